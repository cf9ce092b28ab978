//! The user's own work on device memory. It has the vendor's stream and an address, and core does not see it.

mod support;

use highwater_core::{
    Access, Backend, CaptureMode, DeviceBuffer, DevicePtr, Epilogue, ErrorKind, EventOptions, FillPattern, GemmShape,
    Location, LtLease, MemoryCopy, MemoryFill, Result,
};
use highwater_mock::{MockGpu, MockOptions};
use support::{open, open_with_stream};

const LEN: usize = 1000;
const KERNEL: u32 = 7;

/// A kernel of other code, which writes [`KERNEL`] into a number of values.
fn launch(gpu: &MockGpu, raw: u64, values: DevicePtr) {
    let fill = MemoryFill::new(0, values, FillPattern::U32(KERNEL), LEN);
    // SAFETY: the tests keep the stream for the time of the call. The tests are about the lifetime of the memory. The
    // mock checks it during the call, and touches device memory by atomics only.
    unsafe {
        let stream = gpu.stream_from_raw(0, raw).unwrap();
        gpu.fill(&fill, stream).unwrap();
        gpu.destroy_stream(stream).unwrap();
    }
}

fn options() -> MockOptions {
    MockOptions::new().with_devices(2)
}

/// Launches a kernel on a buffer, drops the buffer, and follows the memory. Returns how often it was reused while the
/// kernel was queued, and whether the next buffer holds its own values.
fn dropped_after_launch(seed: u64, note: bool) -> Result<(u64, bool)> {
    let (gpu, runtime, _) = open(options().with_schedule(seed).with_checks());
    let device = runtime.device(0)?;
    let (stream, other) = (device.create_stream()?, device.create_stream()?);
    let buffer = device.allocate::<u32>(LEN)?;
    if note {
        stream.note_device_use(&buffer, Access::Write)?;
    }
    launch(&gpu, stream.raw()?, buffer.ptr());
    drop(buffer);
    runtime.trim_device_memory()?;
    let next = device.allocate::<u32>(LEN)?;
    other.fill(&next, 1)?;
    other.synchronize()?;
    stream.synchronize()?;
    let kept = other.download(&next)? == [1; LEN];
    drop((next, stream, other, device));
    assert_eq!(runtime.close()?.total(), 0);
    Ok((gpu.violation_count(), kept))
}

#[test]
fn memory_of_a_noted_kernel_is_given_to_nobody_before_it_is_done() {
    let rounds = |note| (0..50).map(move |seed| dropped_after_launch(seed, note).unwrap());
    // Core cannot know of it. The failure shows that the other half of the test checks the right thing.
    assert!(rounds(false).any(|(violations, _)| violations > 0));
    assert!(rounds(false).any(|(_, kept)| !kept));
    for (seed, round) in rounds(true).enumerate() {
        assert_eq!(round, (0, true), "seed {seed}");
    }
}

/// As [`dropped_after_launch`], for a copy of other code that writes memory of another device. Returns how often that memory
/// was reused while the copy was queued.
fn dropped_after_peer_copy(seed: u64, note: bool) -> Result<u64> {
    let (gpu, runtime, here) = open(MockOptions::new().with_devices(2).with_schedule(seed).with_checks());
    let there = runtime.device(1)?;
    let stream = here.create_stream()?;
    let (source, target) = (here.allocate::<u32>(LEN)?, there.allocate::<u32>(LEN)?);
    stream.note_device_use(&source, Access::Read)?;
    if note {
        stream.note_device_use(&target, Access::Write)?;
    }
    let at = |device, ptr| Location::Device { device, ptr };
    let copy = MemoryCopy::new(at(1, target.ptr()), at(0, source.ptr()), LEN * size_of::<u32>());
    // SAFETY: as in `launch`.
    unsafe {
        let raw = gpu.stream_from_raw(0, stream.raw()?)?;
        gpu.copy(&copy, raw)?;
        gpu.destroy_stream(raw)?;
    }
    drop((source, target));
    runtime.trim_device_memory()?;
    drop(there.allocate::<u32>(LEN)?);
    stream.synchronize()?;
    drop((stream, here, there));
    assert_eq!(runtime.close()?.total(), 0);
    Ok(gpu.violation_count())
}

#[test]
fn a_note_keeps_memory_of_another_device_too() {
    let rounds = |note| (0..20).map(move |seed| dropped_after_peer_copy(seed, note).unwrap());
    assert!(rounds(false).any(|violations| violations > 0));
    assert!(rounds(true).all(|violations| violations == 0));
}

#[test]
fn a_raw_stream_is_the_one_that_the_backend_names() {
    let (gpu, _, _, stream) = open_with_stream(options());
    assert_eq!(stream.raw().unwrap(), gpu.raw_stream(stream.id()).unwrap());
    let (_, _, _, stream) = open_with_stream(options().with_capabilities(|can| can.foreign_objects = false));
    assert_eq!(stream.raw().unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn a_graph_keeps_memory_that_a_recorded_kernel_was_noted_for() {
    let (gpu, runtime, _, stream) = open_with_stream(options().with_checks());
    let buffer = stream.upload(&[0_u32; LEN]).unwrap();
    let mut graph = stream
        .capture_with(CaptureMode::Relaxed, |stream| {
            stream.note_device_use(&buffer, Access::Write)?;
            launch(&gpu, stream.raw()?, buffer.ptr());
            Ok(())
        })
        .unwrap();
    stream.synchronize().unwrap();
    drop(buffer);
    runtime.trim_device_memory().unwrap();
    assert_eq!((runtime.statistics().graphs.device_blocks, gpu.live_objects().allocations), (1, 1));
    graph.launch(&stream).unwrap();
    drop(graph);
    stream.synchronize().unwrap();
    assert_eq!((gpu.live_objects().allocations, gpu.violation_count()), (0, 0));
}

#[test]
fn a_note_orders_the_kernel_after_the_allocation() {
    let (gpu, _, device) = open(options().with_race_detector());
    let (home, other) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let buffer: DeviceBuffer<u32> = home.allocate(LEN).unwrap();
    other.note_device_use(buffer.slice(0..1).unwrap(), Access::Read).unwrap();
    launch(&gpu, other.raw().unwrap(), buffer.ptr());
    gpu.check_races().unwrap();
}

#[test]
fn notes_of_other_runtimes_and_of_streams_that_other_code_captures_are_refused() {
    let (gpu, runtime, device) = open(options());
    let (stream, buffer) = (device.create_stream().unwrap(), device.allocate::<u32>(LEN).unwrap());
    let (_, other, _) = open(options());
    let elsewhere = other.device(0).unwrap().create_stream().unwrap();
    let refused = elsewhere.note_device_use(&buffer, Access::Write).unwrap_err();
    assert_eq!((refused.kind(), refused.operation()), (ErrorKind::InvalidPointer, "note_device_use"));
    // A stream of another device may read the memory, as a peer.
    runtime.device(1).unwrap().create_stream().unwrap().note_device_use(&buffer, Access::Read).unwrap();
    // SAFETY: `stream` outlives the wrapper.
    let wrapper = unsafe { device.stream_from_raw(stream.raw().unwrap()).unwrap() };
    gpu.begin_capture(stream.id(), CaptureMode::Relaxed).unwrap();
    assert_eq!(wrapper.note_device_use(&buffer, Access::Write).unwrap_err().kind(), ErrorKind::Capture);
    // SAFETY: the test's own capture.
    gpu.destroy_graph(unsafe { gpu.end_capture(stream.id()).unwrap() }).unwrap();
}

#[test]
fn a_stream_waits_for_an_event_of_other_code_and_leaves_it_as_it_is() {
    let (gpu, runtime, device) = open(options().with_race_detector());
    let (first, second, third) =
        (device.create_stream().unwrap(), device.create_stream().unwrap(), device.create_stream().unwrap());
    let values = device.allocate::<u32>(LEN).unwrap();
    let event = gpu.create_event(0, &EventOptions::new()).unwrap();
    let raw = gpu.raw_event(event).unwrap();
    first.fill(&values, KERNEL).unwrap();
    gpu.record_event(event, first.id()).unwrap();
    let live = gpu.live_objects().events;
    // SAFETY: the event lives until the end of the test.
    unsafe { second.wait_raw(raw) }.unwrap();
    assert_eq!(gpu.live_objects().events, live, "the wait keeps no id");
    assert_eq!(second.download(&values).unwrap(), [KERNEL; LEN]);
    // SAFETY: as above.
    let wrapped = unsafe { device.event_from_raw(raw) }.unwrap();
    third.wait(&wrapped).unwrap();
    assert_eq!(third.download(&values).unwrap(), [KERNEL; LEN]);
    assert!(wrapped.is_complete().unwrap());
    drop(wrapped);
    gpu.check_races().unwrap();
    // SAFETY: as above; these calls are refused.
    let refused = unsafe {
        [
            first.wait_raw(0).unwrap_err(),
            device.event_from_raw(0).map(drop).unwrap_err(),
            first.capture(|stream| stream.wait_raw(raw)).map(drop).unwrap_err(),
        ]
    };
    let kinds = refused.map(|error| error.kind());
    assert_eq!(kinds, [ErrorKind::InvalidArgument, ErrorKind::InvalidArgument, ErrorKind::Capture]);
    // The event is still its owner's.
    gpu.record_event(event, first.id()).unwrap();
    gpu.synchronize_event(event).unwrap();
    gpu.destroy_event(event).unwrap();
    drop((first, second, third, values, device));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn an_lt_handle_is_lent_with_a_workspace_of_its_own_and_works_afterward() {
    let (_, runtime, device, stream) = open_with_stream(MockOptions::new());
    let (a, b, c) =
        (stream.upload(&[3.0_f32]).unwrap(), stream.upload(&[2.0_f32]).unwrap(), device.allocate::<f32>(1).unwrap());
    let shape = GemmShape::of::<f32>(1, 1, 1);
    let mut lt = stream.lt().unwrap();
    let multiply = |lt: &mut LtLease<'_>, alpha| {
        lt.matmul(&shape, Epilogue::None, alpha, &a, &b, 0.0, &c, None).unwrap();
        stream.download(&c).unwrap()[0]
    };
    assert_eq!(multiply(&mut lt, 1.0), 6.0);
    let first = lt.with_raw(|raw| raw).unwrap();
    assert!(first.handle != 0 && first.workspace.is_some());
    assert_eq!(multiply(&mut lt, 2.0), 12.0, "the handle is bound again");
    // In a capture, the workspace belongs to the capture.
    let mut captured = None;
    let graph = stream.capture(|stream| {
        captured = stream.lt()?.with_raw(|raw| raw.workspace)?;
        Ok(())
    });
    assert!(captured.is_some() && captured != first.workspace);
    drop((graph.unwrap(), lt));
    drop((a, b, c, stream, device));
    assert_eq!(runtime.close().unwrap().total(), 0);
}
