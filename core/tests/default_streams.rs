//! The vendor's default streams as streams of the owning types: by name, and by the handles that other code uses.

mod support;

use std::thread;
use std::time::Duration;

use highwater_core::{
    Access, Backend, DeviceBuffer, ErrorKind, FillPattern, GemmShape, Location, MemoryCopy, MemoryFill, Runtime,
    Stream, StreamId,
};
use highwater_mock::{MockGpu, MockOptions};
use support::{kind, open};

fn options() -> MockOptions {
    MockOptions::new().with_latency(Duration::from_millis(2)).with_checks()
}

#[test]
fn the_handles_of_default_streams_give_default_streams() {
    let (gpu, runtime, device) = open(options());
    let tag = runtime.identity().tag;
    // SAFETY: default streams never end.
    let by_handle = |id: StreamId| unsafe { device.stream_from_raw(gpu.raw_stream(id).unwrap()) }.unwrap();
    let legacy = by_handle(StreamId::legacy_default(tag, 0));
    assert_eq!(legacy.id(), device.legacy_default_stream().unwrap().id());
    let own = by_handle(StreamId::per_thread_default(tag, 0));
    assert_eq!(own.id(), device.per_thread_default_stream().unwrap().id());
    assert!(own.id().is_per_thread_default() && legacy.id().is_legacy_default());
    // SAFETY: 0 is no stream.
    let refused = unsafe { device.stream_from_raw(0) }.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    assert!(refused.hint().contains("`per_thread_default_stream`"), "{refused}");
}

#[test]
fn the_per_thread_stream_belongs_to_one_thread() {
    let (_, _, device) = open(options());
    let stream = device.per_thread_default_stream().unwrap();
    let (a, b) = (stream.upload(&[2.0_f32]).unwrap(), stream.upload(&[3.0_f32]).unwrap());
    let c = device.allocate::<f32>(1).unwrap();
    let shape = GemmShape::of::<f32>(1, 1, 1);
    stream.blas().unwrap().gemm(&shape, 1.0, &a, &b, 0.0, &c).unwrap();
    assert_eq!(stream.download(&c).unwrap(), [6.0]);
    assert_eq!(kind(stream.capture(|_| Ok(()))), ErrorKind::Capture);
    assert_eq!(kind(stream.allocate::<u8>(4)), ErrorKind::Unsupported);
    let event = device.create_stream().unwrap().record().unwrap();
    thread::scope(|scope| {
        let elsewhere = || {
            let product = |stream: &Stream| stream.blas()?.gemm(&shape, 1.0, &a, &b, 0.0, &c);
            for refused in [
                kind(stream.fill(&c, 0.0)),
                kind(stream.copy(&a, &c)),
                kind(stream.write(&[1.0], &c)),
                kind(stream.download(&c)),
                kind(stream.synchronize()),
                kind(stream.is_complete()),
                kind(stream.record()),
                kind(stream.raw()),
                kind(stream.record_timed()),
                kind(stream.wait(&event)),
                kind(product(&stream)),
                kind(stream.blas().and_then(|mut lease| lease.with_raw(|_| ()))),
                // SAFETY: Nothing is done with the handle.
                kind(stream.blas().and_then(|mut lease| unsafe { lease.enqueue_raw(|_| ()) })),
            ] {
                assert_eq!(refused, ErrorKind::InvalidState);
            }
            // This thread has a different one.
            let own = device.per_thread_default_stream().unwrap();
            product(&own).unwrap();
            assert_eq!(own.download(&c).unwrap(), [6.0]);
        };
        scope.spawn(elsewhere).join().unwrap();
    });
    stream.synchronize().unwrap();
}

#[test]
fn what_a_per_thread_stream_used_may_be_dropped_in_any_thread() {
    let ended = drop_after(|_, stream, filled, result| {
        for value in 0..10 {
            stream.fill(filled, value).unwrap();
        }
        stream.copy(filled, result).unwrap();
    });
    assert_eq!(ended, 0);
}

#[test]
fn foreign_work_on_a_per_thread_stream_is_covered_by_the_note_after_it() {
    let ended = drop_after(|gpu, stream, filled, result| {
        stream.note_device_use(filled, Access::Write).unwrap();
        for value in 0..10 {
            let fill = MemoryFill::new(0, filled.ptr(), FillPattern::U8(value), 4096);
            // SAFETY: the range belongs to the block, and notes before and after cover its use.
            unsafe { gpu.fill(&fill, stream.id()) }.unwrap();
        }
        let at = |ptr| Location::Device { device: 0, ptr };
        let copy = MemoryCopy::new(at(result.ptr()), at(filled.ptr()), 4096);
        // SAFETY: as above. The other block lives until the wait for the device.
        unsafe { gpu.copy(&copy, stream.id()) }.unwrap();
        stream.note_device_use(filled, Access::Write).unwrap();
    });
    assert_eq!(ended, 0);
}

/// Runs `work` on a per-thread stream, drops the stream and the first buffer in another thread, and closes the runtime.
/// Returns the number of resources that the runtime could not free.
fn drop_after(work: impl FnOnce(&MockGpu, &Stream, &DeviceBuffer<u8>, &DeviceBuffer<u8>) + Send) -> u64 {
    let (gpu, runtime, device) = open(options());
    let result = device.allocate::<u8>(4096).unwrap();
    let (hand_over, handed_over) = std::sync::mpsc::channel();
    let (end, ends) = std::sync::mpsc::channel::<()>();
    thread::scope(|scope| {
        let (device, result, foreign) = (&device, &result, &gpu);
        scope.spawn(move || {
            let stream = device.per_thread_default_stream().unwrap();
            let filled = device.allocate::<u8>(4096).unwrap();
            work(foreign, &stream, &filled, result);
            hand_over.send((stream, filled)).unwrap();
            let _ = ends.recv();
        });
        let (stream, filled) = handed_over.recv().unwrap();
        drop_elsewhere(&gpu, &runtime, stream, filled, result);
        drop(end);
    });
    assert!(gpu.violations().is_empty(), "{:?}", gpu.violations());
    drop((result, device));
    runtime.close().unwrap().total()
}

/// Its thread lives, and its work goes on. Other threads get no memory that it uses; the mock's checks would report it.
fn drop_elsewhere(
    gpu: &MockGpu,
    runtime: &Runtime,
    stream: Stream,
    filled: DeviceBuffer<u8>,
    result: &DeviceBuffer<u8>,
) {
    let device = runtime.device(0).unwrap();
    let before = gpu.live_objects().allocations;
    drop(filled);
    let other = device.create_stream().unwrap();
    for _ in 0..4 {
        let taken = device.allocate::<u8>(4096).unwrap();
        other.fill(&taken, 77).unwrap();
    }
    drop(stream);
    other.synchronize().unwrap();
    device.synchronize().unwrap();
    runtime.trim_device_memory().unwrap();
    assert_eq!(gpu.live_objects().allocations, before - 1);
    assert_eq!(other.download(result).unwrap(), [9; 4096]);
    assert_eq!(runtime.statistics().failed_releases, 0);
}
