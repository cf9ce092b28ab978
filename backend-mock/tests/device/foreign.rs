//! Streams and events of other code, and the default stream of each thread.

use std::sync::mpsc;
use std::time::Instant;

use highwater_hal::{
    Backend, BlasKind, BlasOptions, CaptureMode, Completion, DataType, ErrorKind, EventId, FillPattern, Gemm,
    GemmShape, Result, StreamId,
};

use crate::rig::{Rig, end, kind, millis, small};

impl Rig {
    fn wrap_stream(&self, device: u32, raw: u64) -> Result<StreamId> {
        // SAFETY: tests keep the stream until the wrapper is destroyed; other numbers are what the mock refuses.
        unsafe { self.gpu.stream_from_raw(device, raw) }
    }

    fn wrap_event(&self, device: u32, raw: u64) -> Result<EventId> {
        // SAFETY: as above.
        unsafe { self.gpu.event_from_raw(device, raw) }
    }

    fn own_stream(&self, device: u32) -> StreamId {
        StreamId::per_thread_default(self.gpu.identity().tag, device)
    }
}

#[test]
fn a_wrapped_stream_is_the_same_queue_and_is_forgotten_when_destroyed() {
    let rig = Rig::new(small());
    let (owner, block) = (rig.stream(0), rig.allocate(0, 64));
    let live = rig.gpu.live_objects();
    let wrapper = rig.wrap_stream(0, rig.gpu.raw_stream(owner).unwrap()).unwrap();
    assert_ne!(wrapper, owner);
    assert_eq!(rig.gpu.raw_stream(wrapper).unwrap(), rig.gpu.raw_stream(owner).unwrap());
    assert_eq!(rig.gpu.live_objects(), live);
    // One queue: the order of calls holds through either id.
    for value in 0..4 {
        rig.fill(block, FillPattern::U8(2 * value), 64, owner).unwrap();
        rig.fill(block, FillPattern::U8(2 * value + 1), 32, wrapper).unwrap();
    }
    assert_eq!(rig.download::<u8>(block, 64, wrapper), [[7; 32], [6; 32]].concat());
    assert_eq!(rig.gpu.query_stream(owner).unwrap(), Completion::Complete);
    rig.gpu.begin_capture(wrapper, CaptureMode::ThreadLocal).unwrap();
    assert!(rig.gpu.is_capturing(owner).unwrap());
    rig.gpu.destroy_graph(end(&rig.gpu, owner).unwrap()).unwrap();

    let mut handle = rig.blas(BlasKind::Blas, wrapper);
    let product = Gemm::new(GemmShape::new(DataType::F32, 1, 1, 1), block, block, block.offset(32));
    // SAFETY: the block is large enough and lives as long as the rig.
    let mut multiply = || unsafe { handle.gemm(&product) };
    multiply().unwrap();
    rig.gpu.destroy_stream(wrapper).unwrap();
    assert_eq!(kind(multiply()), ErrorKind::InvalidHandle);
    assert_eq!(kind(rig.gpu.synchronize_stream(wrapper)), ErrorKind::InvalidHandle);
    assert_eq!(kind(rig.gpu.destroy_stream(wrapper)), ErrorKind::InvalidHandle);
    rig.fill(block, FillPattern::U8(9), 64, owner).unwrap();
    assert_eq!(rig.download::<u8>(block, 64, owner), [9; 64]);
    rig.gpu.destroy_stream(owner).unwrap();
    assert_eq!(rig.gpu.live_objects().streams, live.streams - 1);
}

#[test]
fn only_live_objects_of_the_device_are_wrapped() {
    let rig = Rig::new(small().with_devices(2));
    let (stream, event) = (rig.stream(0), rig.event(0));
    let raws = (rig.gpu.raw_stream(stream).unwrap(), rig.gpu.raw_event(event).unwrap());
    assert_eq!(kind(rig.wrap_stream(1, raws.0)), ErrorKind::WrongDevice);
    assert_eq!(kind(rig.wrap_event(1, raws.1)), ErrorKind::WrongDevice);
    for (device, stream, event) in [(0, raws.1, raws.0), (0, 0, 0), (0, u64::MAX, 1)] {
        assert_eq!(kind(rig.wrap_stream(device, stream)), ErrorKind::InvalidHandle);
        assert_eq!(kind(rig.wrap_event(device, event)), ErrorKind::InvalidHandle);
    }
    let other = Rig::new(small());
    assert_eq!(kind(other.wrap_stream(0, raws.0)), ErrorKind::InvalidHandle);
    assert_eq!(kind(rig.wrap_stream(2, raws.0)), ErrorKind::InvalidArgument);
    assert_eq!(kind(rig.wrap_event(2, raws.1)), ErrorKind::InvalidArgument);
    rig.gpu.destroy_stream(stream).unwrap();
    rig.gpu.destroy_event(event).unwrap();
    assert_eq!(kind(rig.wrap_stream(0, raws.0)), ErrorKind::InvalidHandle);
    assert_eq!(kind(rig.wrap_event(0, raws.1)), ErrorKind::InvalidHandle);
    assert_eq!(kind(rig.gpu.raw_stream(stream)), ErrorKind::InvalidHandle);
    assert_eq!(rig.gpu.live_objects().total(), 1);
    let without = Rig::new(small().with_capabilities(|c| c.foreign_objects = false));
    assert_eq!(kind(without.gpu.raw_stream(without.stream)), ErrorKind::Unsupported);
    assert_eq!(kind(without.wrap_stream(0, 1)), ErrorKind::Unsupported);
    assert_eq!(kind(without.wrap_event(0, 1)), ErrorKind::Unsupported);
}

#[test]
fn each_thread_has_a_default_stream_of_its_own_on_each_device() {
    let rig = Rig::new(small().with_devices(2));
    let live = rig.gpu.live_objects();
    let raw = |device| rig.gpu.raw_stream(rig.own_stream(device)).unwrap();
    let here = [raw(0), raw(1), raw(0)];
    assert!(here[0] != here[1] && here[0] == here[2]);
    std::thread::scope(|scope| {
        let there = scope.spawn(|| {
            let block = rig.allocate(1, 64);
            rig.fill(block, FillPattern::U8(4), 64, rig.own_stream(1)).unwrap();
            assert_eq!(rig.download::<u8>(block, 64, rig.own_stream(1)), [4; 64]);
            rig.free(1, block, None).unwrap();
            [raw(0), raw(1)]
        });
        let there = there.join().unwrap();
        assert!(!here.contains(&there[0]) && !here.contains(&there[1]));
    });
    // No object, and not to be destroyed.
    assert_eq!(rig.gpu.live_objects(), live);
    assert_eq!(kind(rig.gpu.destroy_stream(rig.own_stream(0))), ErrorKind::InvalidArgument);
    assert_eq!(kind(rig.gpu.query_stream(rig.own_stream(2))), ErrorKind::InvalidHandle);
    let without = Rig::new(small().with_capabilities(|c| c.per_thread_default_stream = false));
    assert_eq!(kind(without.gpu.query_stream(without.own_stream(0))), ErrorKind::Unsupported);
}

/// A handle bound to the per-thread stream is bound to that of the thread which multiplies: one thread captures, and
/// the other one's product is executed.
#[test]
fn a_handle_follows_the_thread_that_uses_it() {
    let rig = Rig::new(small());
    let (ones, c) = (rig.upload(&[1f32; 4]), rig.upload(&[0f32; 4]));
    let mut handle = rig.gpu.create_blas_handle(0, &BlasOptions::new(BlasKind::Blas)).unwrap();
    let own = rig.own_stream(0);
    handle.set_stream(own).unwrap();
    let mut add = || {
        let product = Gemm::new(GemmShape::new(DataType::F32, 2, 2, 2), ones, ones, c).with_scale(1.0, 1.0);
        // SAFETY: the blocks are large enough and live as long as the rig.
        unsafe { handle.gemm(&product).unwrap() };
    };
    rig.gpu.begin_capture(own, CaptureMode::Relaxed).unwrap();
    add();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            add();
            rig.gpu.synchronize_stream(own).unwrap();
        });
    });
    add();
    let exec = rig.gpu.instantiate_graph(end(&rig.gpu, own).unwrap()).unwrap();
    assert_eq!(rig.download::<f32>(c, 4, rig.stream), [2.0; 4]);
    // SAFETY: the blocks live as long as the rig.
    unsafe { rig.gpu.launch_graph(exec, own).unwrap() };
    assert_eq!(rig.download::<f32>(c, 4, own), [6.0; 4]);
}

#[test]
fn a_default_stream_ends_with_its_thread_and_its_work_is_done() {
    let rig = Rig::new(small().with_latency(millis(10)));
    let block = rig.upload(&[0u8; 64]);
    let raw = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            for value in 1..=5 {
                rig.fill(block, FillPattern::U8(value), 64, rig.own_stream(0)).unwrap();
            }
            rig.gpu.raw_stream(rig.own_stream(0)).unwrap()
        });
        thread.join().unwrap()
    });
    // Joining a thread waits for the destructors of its thread-local values.
    assert_eq!(kind(rig.wrap_stream(0, raw)), ErrorKind::InvalidHandle);
    rig.gpu.synchronize_device(0).unwrap();
    assert_eq!(rig.download::<u8>(block, 64, rig.stream), [5; 64]);
}

#[test]
fn a_default_stream_ends_with_its_backend_before_its_thread() {
    let rig = Rig::new(small());
    let tag = rig.gpu.identity().tag.get();
    let (used, go_on) = (mpsc::channel(), mpsc::channel());
    let gpu = std::sync::Arc::clone(&rig.gpu);
    let thread = std::thread::spawn(move || {
        gpu.synchronize_stream(StreamId::per_thread_default(gpu.identity().tag, 0)).unwrap();
        let event = gpu.create_event(0, &highwater_hal::EventOptions::new()).unwrap();
        gpu.record_event(event, StreamId::per_thread_default(gpu.identity().tag, 0)).unwrap();
        drop(gpu);
        used.0.send(()).unwrap();
        go_on.1.recv().unwrap();
    });
    used.1.recv().unwrap();
    drop(rig);
    let start = Instant::now();
    while crate::life::workers(tag) > 0 {
        assert!(start.elapsed() < millis(10_000), "a worker outlives its backend");
        std::thread::yield_now();
    }
    go_on.0.send(()).unwrap();
    thread.join().unwrap();
}
