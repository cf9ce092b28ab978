//! Use of stream-ordered memory on another stream. Core orders the first use after the allocation, because work of the
//! earlier block in this memory may be outstanding until then.

use std::sync::{Arc, Barrier};
use std::thread;

use highwater_core::{Backend, CaptureMode, DeviceBuffer, Epilogue, ErrorKind, GemmShape, Result, Runtime, Stream};
use highwater_mock::{MockGpu, MockOptions, Operation};

const LEN: usize = 1000;

/// A mock that finds missing orders in any order of execution.
fn watched(streams: usize) -> (Arc<MockGpu>, Runtime, Vec<Stream>) {
    let gpu = MockGpu::open(MockOptions::new().with_devices(2).with_race_detector()).unwrap();
    let runtime = Runtime::new(gpu.clone()).unwrap();
    let streams = (0..streams).map(|_| runtime.device(0).unwrap().create_stream().unwrap()).collect();
    (gpu, runtime, streams)
}

/// The values of the second of two buffers in the order of one stream, after another stream has filled it with 2s. The
/// first had the same memory, and its fill with 1s may be outstanding.
fn filled_elsewhere(seed: u64) -> Result<(bool, Vec<u32>)> {
    let runtime = Runtime::new(MockGpu::open(MockOptions::new().with_schedule(seed))?)?;
    let device = runtime.device(0)?;
    let (home, other) = (device.create_stream()?, device.create_stream()?);
    let first: DeviceBuffer<u32> = home.allocate(LEN)?;
    let place = first.ptr();
    home.fill(&first, 1)?;
    drop(first);
    let second = home.allocate(LEN)?;
    other.fill(&second, 2)?;
    home.synchronize()?;
    Ok((second.ptr() == place, other.download(&second)?))
}

#[test]
fn a_first_use_on_another_stream_comes_after_the_allocation() {
    let rounds: Vec<_> = (0..50).map(|seed| filled_elsewhere(seed).unwrap()).collect();
    assert!(rounds.iter().all(|(same_place, _)| *same_place), "the mock does not reuse memory early");
    let wrong = rounds.iter().filter(|(_, values)| *values != [2; LEN]).count();
    assert_eq!(wrong, 0, "rounds of 50 that found the data of another buffer");
}

#[test]
fn the_order_costs_one_wait_for_each_stream_and_nothing_at_home() {
    let (gpu, _runtime, streams) = watched(3);
    let [home, other, third] = &streams[..] else { unreachable!() };
    let calls = || (gpu.calls(Operation::RecordEvent), gpu.calls(Operation::StreamWaitEvent));
    let buffer = home.allocate::<u32>(LEN).unwrap();
    home.fill(&buffer, 1).unwrap();
    assert_eq!(calls(), (0, 0));
    for stream in [other, third, other, third, home, other] {
        stream.fill(&buffer, 2).unwrap();
    }
    assert_eq!(calls(), (2, 2));
    // Plain memory has no order.
    let plain = gpu.races().len();
    let buffer = _runtime.device(0).unwrap().allocate::<u32>(LEN).unwrap();
    other.fill(&buffer, 1).unwrap();
    assert_eq!((calls(), gpu.races().len()), ((2, 2), plain));
}

#[test]
fn every_kind_of_use_is_ordered() {
    let (gpu, runtime, streams) = watched(2);
    let (home, other) = (&streams[0], &streams[1]);
    let there = runtime.device(1).unwrap();
    let far = there.create_stream().unwrap();
    let buffer = || home.allocate::<f32>(16).unwrap();
    let plain = runtime.device(0).unwrap().allocate::<f32>(16).unwrap();
    let mut pinned = runtime.pinned::<f32>(16).unwrap();
    other.copy_to_device(&pinned, &buffer()).unwrap();
    other.copy_to_host(&buffer(), &mut pinned).unwrap();
    other.copy(&buffer(), &plain).unwrap();
    other.copy(&plain, &buffer()).unwrap();
    other.fill_zero(&buffer()).unwrap();
    let shape = GemmShape::of::<f32>(4, 4, 4);
    other.blas().unwrap().gemm(&shape, 1.0, &buffer(), &buffer(), 0.0, &buffer()).unwrap();
    let bias = home.allocate::<f32>(4).unwrap();
    let (a, b, d) = (buffer(), buffer(), buffer());
    other.lt().unwrap().matmul(&shape, Epilogue::Bias, 1.0, &a, &b, 0.0, &d, Some((&bias).into())).unwrap();
    // A stream of another device.
    far.copy(&buffer(), &there.allocate::<f32>(16).unwrap()).unwrap();
    gpu.check_races().unwrap();
}

#[test]
fn threads_that_use_it_first_at_once_all_come_after_the_allocation() {
    const THREADS: usize = 4;
    for _ in 0..20 {
        let (gpu, _runtime, streams) = watched(2);
        let (home, other) = (&streams[0], &streams[1]);
        let buffer = home.allocate::<u32>(LEN).unwrap();
        let start = Barrier::new(THREADS);
        thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    start.wait();
                    other.fill(&buffer, 1).unwrap();
                });
            }
        });
        gpu.check_races().unwrap();
    }
}

#[test]
fn a_graph_that_another_stream_recorded_is_ordered_by_each_launch() {
    let (gpu, _runtime, streams) = watched(4);
    let [home, capturing, joining, launching] = &streams[..] else { unreachable!() };
    let (buffer, joined) = (home.allocate::<u32>(LEN).unwrap(), home.allocate::<u32>(LEN).unwrap());
    let mut graph = capturing
        .capture(|stream| {
            stream.fill(&buffer, 1)?;
            joining.wait(&stream.record()?)?;
            joining.fill(&joined, 2)?;
            stream.wait(&joining.record()?)
        })
        .unwrap();
    assert_eq!(gpu.calls(Operation::StreamWaitEvent), 2, "only those of the capture");
    graph.launch(launching).unwrap();
    // Outside of the capture, the streams have not come after the allocation yet.
    capturing.wait(&launching.record().unwrap()).unwrap();
    joining.wait(&launching.record().unwrap()).unwrap();
    let waits = gpu.calls(Operation::StreamWaitEvent);
    capturing.fill(&buffer, 3).unwrap();
    joining.fill(&joined, 3).unwrap();
    assert_eq!(gpu.calls(Operation::StreamWaitEvent), waits + 2);
    gpu.check_races().unwrap();
    assert_eq!(capturing.download(&buffer).unwrap(), [3; LEN]);
}

#[test]
fn a_home_that_captures_orders_by_the_work_before_its_capture() {
    let (gpu, _runtime, streams) = watched(3);
    let [home, other, joining] = &streams[..] else { unreachable!() };
    let (buffer, recorded) = (home.allocate::<u32>(LEN).unwrap(), home.allocate::<u32>(LEN).unwrap());
    let mut graph = home
        .capture_with(CaptureMode::Global, |home| {
            other.fill(&buffer, 7)?;
            joining.wait(&home.record()?)?;
            joining.fill(&recorded, 8)?;
            home.wait(&joining.record()?)
        })
        .unwrap();
    assert_eq!(other.download(&buffer).unwrap(), [7; LEN]);
    graph.launch(other).unwrap();
    assert_eq!(other.download(&recorded).unwrap(), [8; LEN]);
    gpu.check_races().unwrap();
}

#[test]
fn a_home_whose_user_has_dropped_it_orders_all_the_same() {
    let (gpu, _runtime, mut streams) = watched(2);
    let buffer = streams[0].allocate::<u32>(LEN).unwrap();
    drop(streams.remove(0));
    streams[0].fill(&buffer, 1).unwrap();
    assert_eq!(streams[0].download(&buffer).unwrap(), [1; LEN]);
    gpu.check_races().unwrap();
}

#[test]
fn a_wait_that_fails_is_made_by_the_next_use() {
    for operation in [Operation::CreateEvent, Operation::RecordEvent, Operation::StreamWaitEvent] {
        let (gpu, _runtime, streams) = watched(2);
        let (home, other) = (&streams[0], &streams[1]);
        let buffer = home.allocate::<u32>(LEN).unwrap();
        gpu.fail_call(operation, 1, ErrorKind::Vendor).unwrap();
        let error = other.fill(&buffer, 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Vendor);
        for part in [&format!("the {} cannot wait for the allocation", other.id()), &format!("the {}", home.id())] {
            assert!(error.message().contains(part), "{error}");
        }
        assert_eq!(gpu.calls(Operation::Fill), 0);
        other.fill(&buffer, 2).unwrap();
        gpu.check_races().unwrap();
        assert_eq!(other.download(&buffer).unwrap(), [2; LEN]);
    }
}

#[test]
fn a_home_that_other_code_captures_refuses_and_says_which_stream_it_is() {
    let (gpu, runtime, streams) = watched(2);
    let (own, other) = (&streams[0], &streams[1]);
    // SAFETY: `own` outlives the wrapper.
    let home = unsafe { runtime.device(0).unwrap().stream_from_raw(gpu.raw_stream(own.id()).unwrap()).unwrap() };
    let buffer = home.allocate::<u32>(LEN).unwrap();
    gpu.begin_capture(own.id(), CaptureMode::Relaxed).unwrap();
    let error = other.fill(&buffer, 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Capture);
    assert!(
        error.message().contains(&format!("in the order of the {}: other code is capturing the stream", home.id())),
        "{error}"
    );
    // SAFETY: the test's own capture.
    gpu.destroy_graph(unsafe { gpu.end_capture(own.id()).unwrap() }).unwrap();
    other.fill(&buffer, 1).unwrap();
    gpu.check_races().unwrap();
}

#[test]
fn memory_that_was_used_elsewhere_is_freed_after_all_of_it() {
    let (gpu, runtime, streams) = watched(3);
    let [home, other, third] = &streams[..] else { unreachable!() };
    for _ in 0..5 {
        let buffer = home.allocate::<u32>(LEN).unwrap();
        other.fill(&buffer, 1).unwrap();
        let mut graph = third.capture(|stream| stream.fill(&buffer, 2)).unwrap();
        third.wait(&other.record().unwrap()).unwrap();
        graph.launch(third).unwrap();
        drop((buffer, graph));
    }
    gpu.check_races().unwrap();
    drop(streams);
    assert_eq!(runtime.close().unwrap().total(), 0);
}
