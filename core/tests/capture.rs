//! Captures and graphs on the mock, which executes nothing while it captures and loses a capture as the vendors do.

mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::Duration;

use highwater_core::{
    Access, Backend, CaptureMode, DeviceBuffer, Epilogue, Error, ErrorKind, GemmShape, GraphStatistics, Location,
    MemoryCopy, Result, Runtime, RuntimeOptions, Stream,
};
use highwater_mock::{MockGpu, MockOptions, Operation};
use support::{end, kind, open, open_with_stream};

const N: usize = 8;

/// `c += a * b`
fn product(stream: &Stream, a: &DeviceBuffer<f32>, b: &DeviceBuffer<f32>, c: &DeviceBuffer<f32>) -> Result<()> {
    stream.blas()?.gemm(&GemmShape::of::<f32>(N, N, N), 1.0, a, b, 1.0, c)
}

/// A matrix of one value.
fn matrix(stream: &Stream, value: f32) -> DeviceBuffer<f32> {
    stream.upload(&[value; N * N]).unwrap()
}

#[test]
fn two_replays_add_twice() {
    let (_, _, _, stream) = open_with_stream(MockOptions::new());
    let (a, b, c) = (matrix(&stream, 1.0), matrix(&stream, 2.0), matrix(&stream, 5.0));
    let mut graph = stream.capture(|stream| product(stream, &a, &b, &c)).unwrap();
    assert_eq!(stream.download(&c).unwrap(), [5.0; N * N], "recorded, not executed");
    graph.launch(&stream).unwrap();
    graph.launch(&stream).unwrap();
    assert_eq!(stream.download(&c).unwrap(), [5.0 + 2.0 * 2.0 * N as f32; N * N]);
    // The handle of the capture works outside it again.
    product(&stream, &a, &b, &c).unwrap();
    assert_eq!(stream.download(&c).unwrap(), [5.0 + 3.0 * 2.0 * N as f32; N * N]);
}

#[test]
fn a_graph_dropped_while_its_launch_runs_loses_nothing() {
    let (gpu, runtime, device, stream) = open_with_stream(MockOptions::new().with_latency(Duration::from_millis(20)));
    let (a, b, c) = (matrix(&stream, 1.0), matrix(&stream, 3.0), matrix(&stream, 0.0));
    let result = device.allocate::<f32>(N * N).unwrap();
    let mut output = runtime.pinned::<f32>(N * N).unwrap();
    let mut graph = stream
        .capture(|stream| {
            product(stream, &a, &b, &c)?;
            stream.copy(&c, &result)?;
            stream.copy_to_host(&c, &mut output)
        })
        .unwrap();
    graph.launch(&stream).unwrap();
    drop((graph, a, b, c));
    assert!(!stream.is_complete().unwrap());
    // Others take what can be had: nothing that the launch still uses.
    let other = device.create_stream().unwrap();
    let taken: Vec<_> = (0..4).map(|_| device.allocate::<f32>(N * N).unwrap()).collect();
    taken.iter().for_each(|buffer| other.fill(buffer, 7.0).unwrap());
    product(&other, &taken[0], &taken[1], &taken[2]).unwrap();
    assert_eq!(output.read().unwrap(), [3.0 * N as f32; N * N]);
    assert_eq!(stream.download(&result).unwrap(), [3.0 * N as f32; N * N]);
    drop((taken, other, result, output, stream, device));
    assert_eq!(runtime.statistics().graphs, GraphStatistics::default());
    assert_eq!(runtime.close().unwrap().total(), 0);
    assert_eq!(gpu.live_objects().total(), 0);
}

#[test]
fn a_hundred_graphs_dropped_leave_no_block() {
    let (gpu, runtime, device, stream) = open_with_stream(MockOptions::new());
    product(&stream, &matrix(&stream, 1.0), &matrix(&stream, 1.0), &matrix(&stream, 1.0)).unwrap();
    stream.synchronize().unwrap();
    runtime.trim_device_memory().unwrap();
    let before = (gpu.live_objects().allocations, runtime.statistics().workspaces);
    let one_graph = |launches: usize| {
        let (a, b, c) = (matrix(&stream, 1.0), matrix(&stream, 2.0), matrix(&stream, 0.0));
        let mut pinned = runtime.pinned::<u8>(1 << 20).unwrap();
        let large = device.allocate::<u8>(1 << 20).unwrap();
        let mut graph = stream
            .capture(|stream| {
                product(stream, &a, &b, &c)?;
                stream.copy_to_device(&pinned, &large)?;
                stream.copy_to_host(&large, &mut pinned)?;
                stream.write(&[1_u8; 100], large.slice(0..100)?)
            })
            .unwrap();
        (0..launches).for_each(|_| graph.launch(&stream).unwrap());
        graph
    };
    let graphs: Vec<_> = (0..100).map(|index| one_graph(index % 3)).collect();
    let held = runtime.statistics();
    assert_eq!((held.graphs.graphs, held.graphs.device_blocks), (100, 400));
    assert_eq!((held.graphs.pinned_blocks, held.graphs.workspaces), (200, 100));
    assert_eq!(held.host.graph_blocks, 200);
    drop(graphs);
    let after = runtime.statistics();
    assert_eq!((after.graphs, after.host.graph_blocks), (GraphStatistics::default(), 0));
    stream.synchronize().unwrap();
    runtime.trim_device_memory().unwrap();
    assert_eq!(gpu.live_objects().allocations, before.0 + 100, "workspaces, which are in the pool for others");
    drop(one_graph(1));
    assert_eq!(runtime.statistics().workspaces, before.1 + 100);
    stream.synchronize().unwrap();
    runtime.trim().unwrap();
    let trimmed = runtime.statistics();
    assert_eq!((gpu.live_objects().allocations, trimmed.workspaces), before);
    assert_eq!((trimmed.host.held_bytes, gpu.live_objects().host_allocations), (0, 0));
    end(runtime, (stream, device));
}

#[test]
fn joined_streams_belong_to_the_capture() {
    let (_, runtime, device) = open(MockOptions::new().with_latency(Duration::from_millis(2)));
    let (first, second, third) =
        (device.create_stream().unwrap(), device.create_stream().unwrap(), device.create_stream().unwrap());
    let (a, b) = (matrix(&first, 1.0), matrix(&first, 2.0));
    let (c, d) = (matrix(&first, 0.0), matrix(&first, 0.0));
    let sum = device.allocate::<f32>(2).unwrap();
    first.synchronize().unwrap();
    let mut inside = None;
    let mut graph = first
        .capture(|first| {
            first.fill(&c, 1.0)?;
            second.wait(&first.record()?)?;
            // Side by side, each with a workspace of its own.
            product(&second, &a, &b, &d)?;
            product(first, &a, &b, &c)?;
            assert_eq!(kind(second.synchronize()), ErrorKind::Capture);
            let joined = second.record()?;
            first.wait(&joined)?;
            inside = Some(joined);
            first.copy(c.slice(0..1)?, sum.slice(0..1)?)?;
            first.copy(d.slice(0..1)?, sum.slice(1..2)?)
        })
        .unwrap();
    assert_eq!(runtime.statistics().graphs.workspaces, 2);
    // What was recorded in the capture is good for nothing now, and says so.
    let inside = inside.unwrap();
    assert_eq!(kind(inside.synchronize()), ErrorKind::Capture);
    assert_eq!(kind(inside.is_complete()), ErrorKind::Capture);
    assert_eq!(kind(third.wait(&inside)), ErrorKind::Capture);
    assert_eq!(kind(inside.elapsed_ns(&inside)), ErrorKind::Capture);
    // The streams that took part are as before.
    second.fill(&d, 3.0).unwrap();
    second.synchronize().unwrap();
    graph.launch(&third).unwrap();
    graph.launch(&third).unwrap();
    let product_of = 2.0 * N as f32;
    assert_eq!(third.download(&sum).unwrap(), [1.0 + product_of, 3.0 + 2.0 * product_of]);
    end(runtime, (graph, inside, a, b, c, d, sum, first, second, third, device));
}

#[test]
fn a_stream_that_is_not_waited_for_loses_the_capture_and_nothing_else() {
    let (_, runtime, device) = open(MockOptions::new());
    let (first, second) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let (buffer, pinned) = (device.allocate::<u8>(4).unwrap(), runtime.pinned::<u8>(4).unwrap());
    let result = first.capture(|first| {
        first.copy_to_device(&pinned, &buffer)?;
        second.wait(&first.record()?)?;
        second.fill(&buffer, 1)
    });
    assert_eq!(kind(result), ErrorKind::Capture);
    assert_eq!(runtime.statistics().graphs, GraphStatistics::default());
    assert_eq!(pinned.read().unwrap().len(), 4);
    drop(pinned);
    for stream in [&first, &second] {
        stream.fill(&buffer, 5).unwrap();
        assert_eq!(stream.download(&buffer).unwrap(), [5; 4]);
    }
    let mut graph = second.capture(|second| second.fill(&buffer, 6)).unwrap();
    graph.launch(&first).unwrap();
    assert_eq!(first.download(&buffer).unwrap(), [6; 4]);
    end(runtime, (graph, buffer, first, second, device));
}

#[test]
fn what_would_lose_a_capture_is_refused_before_the_backend_is_called() {
    for mode in [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed] {
        let (gpu, runtime, device) = open(MockOptions::new());
        let (stream, outside) = (device.create_stream().unwrap(), device.create_stream().unwrap());
        let buffer = stream.upload(&[1_u8; 4]).unwrap();
        let mut pinned = runtime.pinned::<u8>(4).unwrap();
        pinned.write().unwrap().fill(9);
        let event = outside.record().unwrap();
        let timed = outside.record_timed().unwrap();
        stream.synchronize().unwrap();
        let mut earlier = stream.capture(|stream| stream.fill(&buffer, 2)).unwrap();
        let mut graph = stream
            .capture_with(mode, |stream| {
                stream.copy_to_device(&pinned, &buffer)?;
                let inside = stream.record()?;
                let calls = gpu.total_calls();
                for refused in [
                    kind(stream.synchronize()),
                    kind(stream.is_complete()),
                    kind(stream.download(&buffer)),
                    kind(stream.scope(|_| Ok(()))),
                    kind(stream.wait(&event)),
                    kind(stream.capture(|_| Ok(()))),
                    kind(pinned.read()),
                    kind(pinned.write()),
                    kind(pinned.read_with(|_| ())),
                    kind(pinned.write_with(|_| ())),
                    kind(inside.synchronize()),
                    kind(inside.is_complete()),
                    kind(timed.elapsed_ns(&inside)),
                    kind(device.synchronize()),
                    kind(device.allocate::<u8>(4)),
                    kind(stream.upload(&[1_u8])),
                    kind(device.create_stream()),
                    kind(runtime.trim()),
                ] {
                    assert_eq!(refused, ErrorKind::Capture);
                }
                assert!(gpu.total_calls() - calls <= 1, "an event made beforehand at most");
                for refused in [kind(stream.record_timed()), kind(earlier.launch(stream))] {
                    assert_eq!(refused, ErrorKind::Capture);
                }
                // Events and streams outside the capture are not affected.
                event.synchronize()?;
                assert!(event.is_complete()?);
                outside.synchronize()?;
                assert!(outside.is_complete()?);
                drop(runtime.pinned::<u8>(1 << 16)?);
                runtime.trim_device_memory()?;
                drop(inside);
                Ok(())
            })
            .unwrap();
        stream.fill(&buffer, 0).unwrap();
        graph.launch(&stream).unwrap();
        assert_eq!(stream.download(&buffer).unwrap(), [9; 4]);
        device.synchronize().unwrap();
        end(runtime, (graph, earlier, buffer, pinned, event, timed, stream, outside, device));
        assert_eq!(gpu.live_objects().total(), 0);
    }
}

#[test]
fn buffers_dropped_in_a_capture_are_kept_by_it() {
    let (gpu, runtime, device, stream) = open_with_stream(MockOptions::new());
    let result = device.allocate::<u8>(4).unwrap();
    let unused = device.allocate::<u8>(4).unwrap();
    let before = gpu.calls(Operation::Free);
    let mut graph = {
        let (pinned, scratch) = (runtime.pinned::<u8>(4).unwrap(), device.allocate::<u8>(4).unwrap());
        let ordered = stream.allocate::<u8>(4).unwrap();
        let mut pinned = pinned;
        pinned.write().unwrap().fill(8);
        stream
            .capture(|stream| {
                stream.copy_to_device(&pinned, &scratch)?;
                stream.copy(&scratch, &ordered)?;
                stream.copy(&ordered, &result)?;
                drop((pinned, scratch, ordered, unused));
                runtime.trim_device_memory()?;
                assert_eq!(gpu.calls(Operation::Free), before, "frees wait for the end of the capture");
                Ok(())
            })
            .unwrap()
    };
    assert_eq!(runtime.statistics().host.graph_blocks, 1);
    let other = runtime.pinned::<u8>(4).unwrap();
    graph.launch(&stream).unwrap();
    assert_eq!(stream.download(&result).unwrap(), [8; 4]);
    end(runtime, (graph, other, result, stream, device));
}

#[test]
fn an_error_or_a_panic_ends_the_capture_and_keeps_nothing() {
    let (gpu, runtime, device) = open(MockOptions::new());
    let (stream, joined) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let (a, b, c) = (matrix(&stream, 1.0), matrix(&stream, 2.0), matrix(&stream, 0.0));
    let mut pinned = runtime.pinned::<f32>(N * N).unwrap();
    stream.synchronize().unwrap();
    let mut record = |stream: &Stream| {
        product(stream, &a, &b, &c)?;
        stream.copy_to_host(&c, &mut pinned)?;
        joined.wait(&stream.record()?)
    };
    let failed = stream.capture(|stream| {
        record(stream)?;
        Err(Error::new(ErrorKind::DeviceLost, "test", "told to fail"))
    });
    assert_eq!(kind(failed), ErrorKind::DeviceLost);
    let panics = || stream.capture(|stream| record(stream).map(|()| panic!("told to panic")));
    assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());

    assert_eq!(runtime.statistics().graphs, GraphStatistics::default());
    assert_eq!(gpu.live_objects().graphs, 0);
    assert_eq!(pinned.write().unwrap().len(), N * N);
    drop(device.allocate::<u8>(4).unwrap());
    stream.synchronize().unwrap();
    joined.synchronize().unwrap();
    device.synchronize().unwrap();
    assert_eq!(stream.download(&c).unwrap(), [0.0; N * N], "nothing was executed");
    product(&stream, &a, &b, &c).unwrap();
    assert_eq!(stream.download(&c).unwrap(), [2.0 * N as f32; N * N]);
    end(runtime, (a, b, c, pinned, stream, joined, device));
}

#[test]
fn an_end_or_a_graph_that_is_refused_leaves_the_stream_as_before() {
    for operation in ["begin_capture", "end_capture", "instantiate_graph", "destroy_graph"] {
        let (_, runtime, device, stream) =
            open_with_stream(MockOptions::new().with_fault(operation, 1, ErrorKind::Vendor));
        let buffer = stream.upload(&[1_u8; 4]).unwrap();
        let captured = stream.capture(|stream| stream.fill(&buffer, 2));
        assert_eq!(captured.is_err(), operation != "destroy_graph", "{operation}");
        drop(captured);
        assert_eq!(stream.download(&buffer).unwrap(), [1; 4], "{operation}");
        let mut graph = stream.capture(|stream| stream.fill(&buffer, 2)).unwrap();
        graph.launch(&stream).unwrap();
        assert_eq!(stream.download(&buffer).unwrap(), [2; 4], "{operation}");
        drop((graph, buffer, device));
        assert_eq!(runtime.statistics().graphs, GraphStatistics::default());
    }
}

#[test]
fn two_threads_capture_at_once_and_others_go_on() {
    const ROUNDS: usize = 20;
    let (_, runtime, _) = open(MockOptions::new());
    let start = Barrier::new(3);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let (runtime, start, done) = (&runtime, &start, &done);
        let captures = |mode| {
            move || {
                let device = runtime.device(0).unwrap();
                let stream = device.create_stream().unwrap();
                let (a, b, c) = (matrix(&stream, 1.0), matrix(&stream, 2.0), matrix(&stream, 0.0));
                start.wait();
                for round in 1..=ROUNDS {
                    let mut graph = stream
                        .capture_with(mode, |stream| {
                            product(stream, &a, &b, &c)?;
                            assert_eq!(kind(device.allocate::<u8>(1)), ErrorKind::Capture);
                            Ok(())
                        })
                        .unwrap();
                    graph.launch(&stream).unwrap();
                    assert_eq!(stream.download(&c).unwrap(), [round as f32 * 2.0 * N as f32; N * N]);
                }
            }
        };
        let threads = [CaptureMode::ThreadLocal, CaptureMode::Global].map(|mode| scope.spawn(captures(mode)));
        scope.spawn(move || {
            let device = runtime.device(0).unwrap();
            let stream = device.create_stream().unwrap();
            start.wait();
            while !done.load(Ordering::Relaxed) {
                let (a, c) = (matrix(&stream, 1.0), matrix(&stream, 0.0));
                product(&stream, &a, &a, &c).unwrap();
                assert_eq!(stream.download(&c).unwrap(), [N as f32; N * N]);
                drop((a, c));
                runtime.trim().unwrap();
                // Refused while a capture is open, and harmless.
                let waited = device.synchronize();
                assert!(waited.is_ok() || kind(waited) == ErrorKind::Capture);
            }
        });
        let joined = threads.map(|thread| thread.join());
        done.store(true, Ordering::Relaxed);
        joined.into_iter().for_each(|result| result.unwrap());
    });
    assert_eq!(runtime.statistics().graphs, GraphStatistics::default());
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn a_thread_that_uses_the_stream_of_another_threads_capture_does_not_disturb_it() {
    const ROUNDS: usize = 60;
    let (_, runtime, device, stream) = open_with_stream(MockOptions::new());
    let (a, b, c) = (matrix(&stream, 1.0), matrix(&stream, 2.0), matrix(&stream, 0.0));
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let (runtime, device, stream, done, a, b) = (&runtime, &device, &stream, &done, &a, &b);
        for _ in 0..2 {
            scope.spawn(move || {
                let other = device.create_stream().unwrap();
                while !done.load(Ordering::Relaxed) {
                    // Each of these comes before, in or after a capture of the other thread.
                    let refused_or_done = |result: Result<()>| match result {
                        Ok(()) => {}
                        Err(error) => assert_eq!(error.kind(), ErrorKind::Capture, "{error}"),
                    };
                    let mut pinned = runtime.pinned::<f32>(N * N).unwrap();
                    let scratch = other.upload(&[0.0_f32; N * N]).unwrap();
                    refused_or_done(stream.copy_to_host(a, &mut pinned));
                    refused_or_done(product(stream, a, b, &scratch));
                    refused_or_done(stream.synchronize());
                    refused_or_done(stream.is_complete().map(|_| ()));
                    refused_or_done(stream.blas().unwrap().with_raw(|_| ()));
                    drop((pinned, scratch));
                    refused_or_done(runtime.trim_device_memory());
                }
            });
        }
        let mut captured = 0;
        while captured < ROUNDS {
            match stream.capture(|stream| product(stream, a, b, &c)) {
                Ok(mut graph) => {
                    captured += 1;
                    graph.launch(stream).unwrap();
                }
                // A raw handle is lent just now.
                Err(error) => assert!(error.message().contains("lent to foreign code"), "{error}"),
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(stream.download(&c).unwrap(), [ROUNDS as f32 * 2.0 * N as f32; N * N]);
    drop((a, b, c, stream, device));
    assert_eq!(runtime.statistics().graphs, GraphStatistics::default());
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn launches_on_several_streams_take_turns() {
    let (_, runtime, device) = open(MockOptions::new().with_devices(2).with_latency(Duration::from_millis(3)));
    let streams: Vec<_> = (0..3).map(|_| device.create_stream().unwrap()).collect();
    let (a, b, c) = (matrix(&streams[0], 1.0), matrix(&streams[0], 2.0), matrix(&streams[0], 0.0));
    streams[0].synchronize().unwrap();
    let mut graph = streams[0].capture(|stream| product(stream, &a, &b, &c)).unwrap();
    let busy = device.allocate::<u8>(1).unwrap();
    for round in 0..6 {
        // Each stream has more to do before than the next one.
        (round..6).for_each(|_| streams[round % 3].fill(&busy, 0).unwrap());
        graph.launch(&streams[round % 3]).unwrap();
    }
    // The last launch comes after all the others, whatever stream they are on.
    assert_eq!(streams[2].download(&c).unwrap(), [6.0 * 2.0 * N as f32; N * N]);
    let elsewhere = runtime.device(1).unwrap().create_stream().unwrap();
    assert_eq!(kind(graph.launch(&elsewhere)), ErrorKind::WrongDevice);
    let (_other_gpu, other_runtime, _) = open(MockOptions::new());
    let foreign = other_runtime.device(0).unwrap().create_stream().unwrap();
    assert_eq!(kind(graph.launch(&foreign)), ErrorKind::InvalidHandle);
}

#[test]
fn a_replay_sees_what_the_cpu_wrote_and_waits_for_other_streams() {
    let (_, runtime, device) = open(MockOptions::new().with_latency(Duration::from_millis(5)));
    let (stream, other) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let (buffer, source) = (device.allocate::<u32>(16).unwrap(), stream.upload(&[40_u32; 16]).unwrap());
    let (mut input, mut output) = (runtime.pinned::<u32>(16).unwrap(), runtime.pinned::<u32>(16).unwrap());
    input.write().unwrap().fill(1);
    // In use by another stream while it is recorded: each launch waits for that.
    other.copy_to_device(&input, &buffer).unwrap();
    let mut graph = stream
        .capture(|stream| {
            stream.copy_to_device(&input, &buffer)?;
            stream.copy_to_host(&buffer, &mut output)
        })
        .unwrap();
    for value in 10..15 {
        input.write_with(|values| values.fill(value)).unwrap();
        graph.launch(&stream).unwrap();
        output.read_with(|values| assert_eq!(values, [value; 16])).unwrap();
    }
    // Another stream writes the input: the launch comes after it, and the next copy to it after the launch.
    other.copy_to_host(&source, &mut input).unwrap();
    graph.launch(&stream).unwrap();
    other.copy_to_host(&buffer, &mut input).unwrap();
    output.read_with(|values| assert_eq!(values, [40; 16])).unwrap();
    drop(graph);
    assert_eq!(output.read().unwrap(), [40; 16]);
}

#[test]
fn two_graphs_that_share_page_locked_memory_take_turns() {
    let (_, runtime, device) = open(MockOptions::new().with_latency(Duration::from_micros(200)));
    let shared: Vec<_> = (0..3).map(|_| runtime.pinned::<u8>(1 << 16).unwrap()).collect();
    let shared = Mutex::new(shared);
    let graphs: Vec<_> = (0..2_u8)
        .map(|value| {
            let stream = device.create_stream().unwrap();
            let (source, sink) = (device.allocate(1 << 16).unwrap(), device.allocate(1 << 16).unwrap());
            stream.fill(&source, value).unwrap();
            let graph = stream
                .capture(|stream| {
                    let mut shared = shared.lock().unwrap();
                    // Written and read back in the order of either end: launches must not wait in a cycle.
                    let order: Vec<usize> = if value == 0 { vec![0, 1, 2] } else { vec![2, 1, 0] };
                    for index in order {
                        stream.copy_to_host(&source, &mut shared[index])?;
                        stream.copy_to_device(&shared[index], &sink)?;
                    }
                    Ok(())
                })
                .unwrap();
            (stream, graph, sink, value)
        })
        .collect();
    thread::scope(|scope| {
        for (stream, mut graph, sink, value) in graphs {
            scope.spawn(move || {
                for _ in 0..20 {
                    graph.launch(&stream).unwrap();
                    assert_eq!(stream.download(&sink).unwrap(), vec![value; 1 << 16]);
                }
            });
        }
    });
}

#[test]
fn a_device_that_makes_nothing_in_a_capture_asks_to_warm_up() {
    let (gpu, runtime, device, stream) =
        open_with_stream(MockOptions::new().with_capabilities(|c| c.create_during_capture = false));
    let (a, b, c) = (matrix(&stream, 1.0), matrix(&stream, 2.0), matrix(&stream, 0.0));
    let error = stream.capture(|stream| product(stream, &a, &b, &c)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Capture);
    assert!(error.hint().contains("warm up"), "{error}");
    assert_eq!(gpu.calls(Operation::CreateBlasHandle), 0, "asked for nothing that would lose the capture");
    product(&stream, &a, &b, &c).unwrap();
    let mut graph = stream
        .capture(|stream| {
            // Not even in another thread is a handle made now.
            let elsewhere = || product(&stream.clone(), &a, &b, &c);
            let refused = thread::scope(|scope| scope.spawn(elsewhere).join().unwrap());
            assert_eq!(kind(refused), ErrorKind::Capture);
            product(stream, &a, &b, &c)
        })
        .unwrap();
    graph.launch(&stream).unwrap();
    assert_eq!(stream.download(&c).unwrap(), [2.0 * 2.0 * N as f32; N * N]);
    end(runtime, (graph, a, b, c, stream, device));
}

#[test]
fn a_device_that_cannot_capture_says_so_before_the_backend_is_called() {
    let (gpu, _, _, stream) = open_with_stream(MockOptions::new().with_capabilities(|c| c.capture = false));
    assert_eq!(kind(stream.capture(|_| panic!("nothing is recorded"))), ErrorKind::Unsupported);
    assert_eq!(gpu.calls(Operation::BeginCapture), 0);
}

#[test]
fn the_legacy_default_stream_takes_part_in_no_capture() {
    let (_, _, device) = open(MockOptions::new());
    let (legacy, stream) = (device.legacy_default_stream().unwrap(), device.create_stream().unwrap());
    let calls = AtomicBool::new(false);
    assert_eq!(
        kind(legacy.capture(|_| {
            calls.store(true, Ordering::Relaxed);
            Ok(())
        })),
        ErrorKind::Capture
    );
    assert!(!calls.into_inner());
    let mut graph = stream
        .capture(|stream| {
            assert_eq!(kind(legacy.wait(&stream.record()?)), ErrorKind::Capture);
            Ok(())
        })
        .unwrap();
    graph.launch(&legacy).unwrap();
    legacy.synchronize().unwrap();
}

#[test]
fn a_graph_goes_to_another_thread() {
    let (_, _, _, stream) = open_with_stream(MockOptions::new());
    let buffer = stream.upload(&[1_u8; 4]).unwrap();
    let mut graph = stream.capture(|stream| stream.fill(&buffer, 2)).unwrap();
    thread::scope(|scope| scope.spawn(|| graph.launch(&stream)).join()).unwrap().unwrap();
    thread::spawn(move || drop(graph)).join().unwrap();
    assert_eq!(stream.download(&buffer).unwrap(), [2; 4]);
}

#[test]
fn raw_handles_of_one_capture_use_its_workspaces_in_turn() {
    let (_, runtime, _, stream) = open_with_stream(MockOptions::new());
    let graph = stream
        .capture(|stream| {
            let (mut first, mut second) = (stream.blas()?, stream.blas()?);
            // More workspaces than the device has memory for.
            for _ in 0..200 {
                first.with_raw(|one| {
                    let two = second.with_raw(|two| two.workspace).unwrap();
                    assert!(one.workspace.is_some() && two.is_some());
                    assert_ne!(one.workspace, two, "two handles that are lent at the same time");
                })?;
            }
            Ok(())
        })
        .unwrap();
    assert_eq!(runtime.statistics().graphs.workspaces, 3, "those of the two, and that of the capture itself");
    drop(graph);
    assert_eq!(runtime.statistics().graphs, GraphStatistics::default());
}

#[test]
fn a_lease_goes_through_a_capture_with_the_captures_workspace() {
    let (_, runtime, _, stream) = open_with_stream(MockOptions::new());
    let (a, b, c) = (matrix(&stream, 1.0), matrix(&stream, 2.0), matrix(&stream, 0.0));
    let shape = GemmShape::of::<f32>(N, N, N);
    let mut lease = stream.blas().unwrap();
    lease.gemm(&shape, 1.0, &a, &b, 1.0, &c).unwrap();
    let mut graph = stream
        .capture(|stream| {
            lease.gemm(&shape, 1.0, &a, &b, 1.0, &c)?;
            stream.lt()?.matmul(&shape, Epilogue::None, 1.0, &a, &b, 1.0, &c, None)?;
            // A raw handle has a workspace of its own, which the graph owns too.
            lease.with_raw(|raw| assert!(raw.workspace.is_some()))
        })
        .unwrap();
    lease.gemm(&shape, 1.0, &a, &b, 1.0, &c).unwrap();
    graph.launch(&stream).unwrap();
    assert_eq!(stream.download(&c).unwrap(), [4.0 * 2.0 * N as f32; N * N]);
    let statistics = runtime.statistics();
    assert_eq!((statistics.workspaces, statistics.graphs.workspaces), (3, 2), "the stream has kept its own");
    let refused = lease.with_raw(|_| stream.capture(|_| Ok(())).map(|_| ())).unwrap();
    assert_eq!(kind(refused), ErrorKind::Capture);
    assert!(stream.capture(|_| Ok(())).is_ok());
}

#[test]
fn the_workspace_of_a_graph_serves_others_after_its_last_launch() {
    let (_, runtime, device) = open(MockOptions::new().with_latency(Duration::from_millis(5)));
    let (stream, other) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let (a, b) = (matrix(&stream, 1.0), matrix(&stream, 2.0));
    let (c, d) = (matrix(&stream, 0.0), matrix(&stream, 0.0));
    stream.synchronize().unwrap();
    let mut graph = stream.capture(|stream| product(stream, &a, &b, &c)).unwrap();
    let busy = device.allocate::<u8>(1).unwrap();
    (0..10).for_each(|_| stream.fill(&busy, 0).unwrap());
    graph.launch(&stream).unwrap();
    drop(graph);
    // Takes over the graph's workspace, and waits for the launch on the device.
    product(&other, &a, &b, &d).unwrap();
    assert_eq!(runtime.statistics().workspaces, 1);
    other.synchronize().unwrap();
    assert!(stream.is_complete().unwrap());
    // A second capture on the first stream finds none, and makes one.
    let mut graph = stream.capture(|stream| product(stream, &a, &b, &c)).unwrap();
    graph.launch(&other).unwrap();
    assert_eq!(other.download(&d).unwrap(), [2.0 * N as f32; N * N]);
    assert_eq!(other.download(&c).unwrap(), [2.0 * 2.0 * N as f32; N * N]);
    assert_eq!(runtime.statistics().workspaces, 2);
}

#[test]
fn sharing_is_refused_in_a_capture_and_of_what_a_capture_uses() {
    let (gpu, runtime, device, stream) = open_with_stream(MockOptions::new());
    let (used, other) = (device.allocate_shared::<u32>(4).unwrap(), device.allocate_shared::<u32>(4).unwrap());
    let ticket = other.share().unwrap();
    stream.synchronize().unwrap();
    let mut graph = stream
        .capture(|stream| {
            stream.fill(&used, 7)?;
            let calls = gpu.total_calls();
            for refused in [
                kind(other.share()),
                kind(used.share()),
                kind(runtime.open_shared::<u32>(&ticket)),
                kind(device.allocate_shared::<u32>(4)),
                kind(runtime.clone().close()),
            ] {
                assert_eq!(refused, ErrorKind::Capture);
            }
            assert_eq!((runtime.trim_shared()?, gpu.total_calls()), (0, calls));
            // Another thread shares and opens what the capture does not use.
            let elsewhere = || {
                assert_eq!(kind(used.share()), ErrorKind::Capture);
                let opened = runtime.open_shared::<u32>(&other.share().unwrap()).unwrap();
                opened.len()
            };
            assert_eq!(thread::scope(|scope| scope.spawn(elsewhere).join().unwrap()), 4);
            Ok(())
        })
        .unwrap();
    graph.launch(&stream).unwrap();
    let opened = runtime.open_shared::<u32>(&used.share().unwrap()).unwrap();
    assert_eq!(stream.download(&opened).unwrap(), [7; 4]);
    end(runtime, (graph, opened, used, other, stream, device));
}

#[test]
fn a_buffer_used_before_a_capture_is_shared_in_it_by_the_mark_of_that_work() {
    let (_, runtime, device, stream) = open_with_stream(MockOptions::new().with_latency(Duration::from_millis(5)));
    let (used, recorded) = (device.allocate_shared::<u32>(4).unwrap(), device.allocate::<u32>(4).unwrap());
    stream.fill(&used, 7).unwrap();
    let mut graph = stream
        .capture(|stream| {
            stream.fill(&recorded, 8)?;
            // Asking the stream now would lose the capture.
            let elsewhere = || {
                let opened = runtime.open_shared::<u32>(&used.share().unwrap()).unwrap();
                device.create_stream().unwrap().download(&opened).unwrap()
            };
            assert_eq!(thread::scope(|scope| scope.spawn(elsewhere).join().unwrap()), [7; 4]);
            Ok(())
        })
        .unwrap();
    graph.launch(&stream).unwrap();
    assert_eq!(stream.download(&recorded).unwrap(), [8; 4]);
    end(runtime, (graph, used, recorded, stream, device));
}

#[test]
fn a_use_by_other_code_noted_in_a_capture_is_the_graphs() {
    let (gpu, runtime, device, stream) = open_with_stream(MockOptions::new().with_latency(Duration::from_millis(5)));
    let source = stream.upload(&[7_u8; 64]).unwrap();
    stream.synchronize().unwrap();
    let pinned = runtime.pinned::<u8>(64).unwrap();
    let mut graph = stream
        .capture(|stream| {
            let (from, to) = (source.ptr(), pinned.ptr());
            let copy = MemoryCopy::new(Location::Host(to), Location::Device { device: 0, ptr: from }, 64);
            // SAFETY: both blocks are alive until the graph is, which the note and the copy below see to.
            unsafe { gpu.copy(&copy, stream.id())? };
            stream.note_host_use(to, Access::Write)?;
            stream.copy(source.slice(0..32)?, source.slice(32..64)?)
        })
        .unwrap();
    assert_eq!(kind(pinned.read()), ErrorKind::InvalidState);
    graph.launch(&stream).unwrap();
    assert_eq!(pinned.read_with(<[u8]>::to_vec).unwrap(), [7; 64]);
    drop(pinned);
    let host = runtime.statistics().host;
    assert_eq!((host.graph_blocks, host.broken_law()), (1, None));
    graph.launch(&stream).unwrap();
    drop((graph, source));
    assert_eq!(runtime.statistics().host.graph_blocks, 0);
    end(runtime, (stream, device));
}

#[test]
fn a_handle_of_another_device_is_not_made_where_that_would_lose_a_capture() {
    let options = MockOptions::new().with_devices(2).with_capabilities(|c| c.create_during_capture = false);
    let (gpu, runtime, _) = open(options);
    let (device, other) = (runtime.device(0).unwrap(), runtime.device(1).unwrap());
    let (stream, elsewhere) = (device.create_stream().unwrap(), other.create_stream().unwrap());
    let buffer = stream.upload(&[1_u8; 4]).unwrap();
    for mode in [CaptureMode::Global, CaptureMode::ThreadLocal] {
        let graph = stream.capture_with(mode, |stream| {
            assert_eq!(kind(elsewhere.blas()), ErrorKind::Capture);
            stream.fill(&buffer, 2)
        });
        drop(graph.unwrap());
    }
    assert_eq!(gpu.calls(Operation::CreateBlasHandle), 0);
    elsewhere.blas().unwrap();
}

#[test]
fn what_was_executed_because_other_code_ended_the_capture_is_waited_for() {
    let (gpu, runtime, device, stream) =
        open_with_stream(MockOptions::new().with_latency(Duration::from_millis(30)).with_checks());
    let buffer = stream.upload(&[7_u8; 4]).unwrap();
    let (a, b, c) = (matrix(&stream, 1.0), matrix(&stream, 2.0), matrix(&stream, 0.0));
    let mut pinned = runtime.pinned::<u8>(4).unwrap();
    pinned.write().unwrap().fill(0);
    stream.synchronize().unwrap();
    // All of this is safe code.
    // SAFETY: the capture is the test's own.
    let end_past_core = |stream: &Stream| gpu.destroy_graph(unsafe { gpu.end_capture(stream.id())? });
    let refused = stream.capture(|stream| end_past_core(stream).and_then(|()| product(stream, &a, &b, &c)));
    assert_eq!(kind(refused), ErrorKind::Capture);
    runtime.trim().unwrap();
    assert_eq!(gpu.violations(), [], "the workspace is freed after the product");
    stream.synchronize().unwrap();
    let refused =
        stream.capture(|stream| end_past_core(stream).and_then(|()| stream.copy_to_host(&buffer, &mut pinned)));
    assert_eq!(kind(refused), ErrorKind::Capture);
    assert_eq!(pinned.read().unwrap(), [7; 4]);
    assert_eq!(stream.download(&c).unwrap(), [2.0 * N as f32; N * N]);
    assert_eq!(gpu.violations(), []);
    end(runtime, (a, b, c, buffer, pinned, stream, device));
}

#[test]
fn nothing_is_delivered_that_was_recorded_and_not_copied() {
    let (_, _, _, stream) = open_with_stream(MockOptions::new());
    let buffer = stream.upload(&[7_u8; 4]).unwrap();
    let mut values = [1_u8; 4];
    let delivered = stream.scope(|scope| {
        let captured = stream.capture(|_| scope.copy_to_host(&buffer, &mut values));
        assert_eq!(kind(captured), ErrorKind::Capture);
        Ok(())
    });
    assert!(delivered.is_ok());
    assert_eq!(values, [1; 4]);
}

#[test]
fn a_capture_that_foreign_code_leaves_open_is_not_touched_by_the_end_of_the_loan() {
    let (gpu, runtime, device) = open(MockOptions::new());
    let own = device.create_stream().unwrap();
    // SAFETY: `own` outlives the wrapped stream.
    let stream = unsafe { device.stream_from_raw(gpu.raw_stream(own.id()).unwrap()).unwrap() };
    let mut lease = stream.blas().unwrap();
    let lent = lease.with_raw(|raw| {
        gpu.begin_capture(own.id(), CaptureMode::Relaxed).unwrap();
        raw.workspace
    });
    assert!(lent.unwrap().is_some());
    let failed = runtime.statistics().failed_releases;
    assert_eq!(failed, 1, "the workspace is left for the end: nobody can tell when foreign code is done with it");
    // SAFETY: the capture is the test's own.
    gpu.destroy_graph(unsafe { gpu.end_capture(own.id()) }.unwrap()).unwrap();
    drop(lease);
    // Nothing of core was recorded there, so nothing is asked that is never reached.
    own.blas().unwrap().with_raw(|_| ()).unwrap();
    runtime.trim().unwrap();
    end(runtime, (stream, own, device));
}

/// Everything that captures and graphs do, on two streams. Errors are passed on.
fn a_life_of_graphs(runtime: &Runtime, streams: &[Stream; 2]) -> Result<()> {
    let [first, second] = streams;
    let device = runtime.device(0)?;
    let shape = GemmShape::of::<f32>(N, N, N);
    let buffers: Vec<DeviceBuffer<f32>> = (0..4).map(|_| device.allocate(N * N)).collect::<Result<_>>()?;
    let ordered = first.allocate::<f32>(N * N)?;
    let (mut input, mut output) = (runtime.pinned::<f32>(N * N)?, runtime.pinned::<f32>(N * N)?);
    input.write()?.fill(1.0);
    let mut graph = first.capture(|first| {
        first.copy_to_device(&input, &buffers[0])?;
        first.write(&[2.0; N * N], &buffers[1])?;
        second.wait(&first.record()?)?;
        first.blas()?.gemm(&shape, 1.0, &buffers[0], &buffers[1], 0.0, &buffers[2])?;
        second.lt()?.matmul(&shape, Epilogue::None, 1.0, &buffers[0], &buffers[1], 0.0, &buffers[3], None)?;
        first.blas()?.with_raw(|_| ())?;
        // SAFETY: Nothing is done with the handle.
        unsafe { first.blas()?.enqueue_raw(|_| ())? };
        first.copy(&buffers[0], &ordered)?;
        drop(ordered);
        if device.capabilities().create_during_capture {
            let inside = first.allocate::<f32>(N * N)?;
            first.copy(&buffers[0], &inside)?;
            drop(inside);
            let inside = first.allocate::<f32>(N * N)?;
            second.copy(&buffers[3], &inside)?;
            second.copy(&inside, &buffers[3])?;
        }
        drop(device.allocate::<u8>(1));
        first.wait(&second.record()?)?;
        first.copy_to_host(&buffers[2], &mut output)
    })?;
    graph.launch(first)?;
    graph.launch(second)?;
    output.read_with(|values| assert_eq!(values, [2.0 * N as f32; N * N]))?;
    drop(buffers);
    input.write_with(|values| values.fill(3.0))?;
    graph.launch(first)?;
    output.read_with(|values| assert_eq!(values, [3.0 * 2.0 * N as f32; N * N]))?;
    graph.launch(second)?;
    drop((graph, input));
    assert_eq!(output.read()?, [3.0 * 2.0 * N as f32; N * N]);
    runtime.trim_device_memory()
}

#[test]
fn whatever_call_fails_nothing_is_lost_and_the_streams_go_on() {
    // If these fail, the backend keeps the object that it was asked to destroy or free, or the runtime leaves it.
    let releases =
        ["destroy_stream", "destroy_event", "destroy_graph", "destroy_graph_exec", "destroy", "free", "host_free"];
    let creating = [true, false];
    for (operation, creates) in
        Operation::ALL.iter().flat_map(|operation| creating.map(|creates| (*operation, creates)))
    {
        for nth in 1.. {
            let options = MockOptions::new().with_checks();
            let gpu = MockGpu::open(options.with_capabilities(|c| c.create_during_capture = creates)).unwrap();
            let small = RuntimeOptions::new().with_blas_workspace_bytes(1 << 14).with_lt_workspace_bytes(1 << 14);
            let runtime = Runtime::with_options(gpu.clone(), &small).unwrap();
            let device = runtime.device(0).unwrap();
            let streams = [device.create_stream().unwrap(), device.create_stream().unwrap()];
            // Handles and workspaces exist, as after a warm-up.
            if !creates {
                streams.iter().for_each(|stream| drop((stream.blas().unwrap(), stream.lt().unwrap())));
                drop((streams[0].blas().unwrap(), streams[1].blas().unwrap()));
            }
            gpu.fail_call(operation.name(), nth, operation.usual_failure()).unwrap();
            let what = format!("call {nth} of {operation} fails, handles are made in captures: {creates}");
            let lived = a_life_of_graphs(&runtime, &streams);
            let failed = gpu.faults(operation);
            let statistics = runtime.statistics();
            assert_eq!(statistics.graphs, GraphStatistics::default(), "{what}");
            assert_eq!(statistics.host.broken_law(), None, "{what}: {:?}", statistics.host);
            if failed > 0 {
                // The streams are as before: all of it works now, other than what a device without handles refuses.
                for stream in &streams {
                    stream.synchronize().unwrap_or_else(|error| panic!("{what}: {lived:?}, then {error}"));
                }
                let again = a_life_of_graphs(&runtime, &streams);
                assert!(again.is_ok() || !creates, "{what}: {lived:?}, then {again:?}");
            }
            drop((streams, device));
            let closed = runtime.close().map(|_| ());
            let failed = gpu.faults(operation);
            let lost = u64::from(failed > 0 && releases.contains(&operation.name()));
            assert!(closed.is_ok() || lost == 1, "{what}: {closed:?}");
            assert!(gpu.live_objects().total() <= lost, "{what}: {:?}", gpu.live_objects());
            assert_eq!(gpu.violations(), [], "{what}");
            if failed == 0 {
                break;
            }
        }
    }
}

#[test]
fn a_product_on_memory_of_its_handle_is_not_recorded() {
    let options = MockOptions::parse("blas-workspace=off").unwrap();
    let (_, _, _, stream) = open_with_stream(options);
    let (a, b, c) = (matrix(&stream, 2.0), matrix(&stream, 3.0), matrix(&stream, 0.0));
    let mut refused = Vec::new();
    let mut graph = stream
        .capture(|scope| {
            refused.push(kind(product(scope, &a, &b, &c)));
            refused.push(kind(scope.blas()?.with_raw(|_| ())));
            scope.fill(&c, 7.0_f32)
        })
        .unwrap();
    assert_eq!(refused, [ErrorKind::Unsupported; 2]);
    graph.launch(&stream).unwrap();
    assert!(stream.download(&c).unwrap().iter().all(|value| *value == 7.0));
    product(&stream, &a, &b, &c).unwrap();
}

/// Actions of another runtime on the device that wait for the device or destroy handles. Each returns whether it needs
/// the end of the capture.
type Harm = (&'static str, fn(Runtime) -> bool);

const HARMS: [Harm; 5] = [
    ("dropped", |other| {
        drop(other);
        true
    }),
    ("closed", |other| {
        // The objects of the first runtime are alive.
        other.close().unwrap();
        true
    }),
    ("trimmed", |other| {
        other.trim().unwrap();
        false
    }),
    ("out of memory", |other| {
        assert_eq!(kind(other.device(0).unwrap().allocate::<u8>(1 << 30)), ErrorKind::OutOfMemory);
        false
    }),
    ("waiting for the device", |other| {
        assert_eq!(kind(other.device(0).unwrap().synchronize()), ErrorKind::Capture);
        false
    }),
];

#[test]
fn another_runtime_on_the_device_does_not_lose_a_capture() {
    for (what, harm) in HARMS {
        let (gpu, runtime, _) = open(MockOptions::new().with_memory_bytes(128 << 20));
        let other = Runtime::new(gpu.clone()).unwrap();
        let stream = runtime.device(0).unwrap().create_stream().unwrap();
        let block = stream.upload(&[1_u8]).unwrap();
        // On a thread that has ended, so that the handle is idle.
        let work = || {
            let stream = other.device(0).unwrap().create_stream().unwrap();
            let (a, b, c) = (matrix(&stream, 1.0), matrix(&stream, 2.0), matrix(&stream, 5.0));
            product(&stream, &a, &b, &c).unwrap();
            stream.synchronize().unwrap();
        };
        thread::scope(|scope| scope.spawn(work).join().unwrap());
        let waited = gpu.calls(Operation::SynchronizeDevice);
        let (done, is_done) = std::sync::mpsc::channel();
        let mut thread = None;
        let mut graph = stream
            .capture(|stream| {
                thread = Some(thread::spawn(move || done.send(harm(other)).unwrap()));
                // Long enough to lose the capture, for a thread that does not wait.
                let early = is_done.recv_timeout(Duration::from_millis(100));
                assert_ne!(early, Ok(true), "{what}: did not wait for the capture");
                assert_eq!(gpu.calls(Operation::SynchronizeDevice), waited, "{what}");
                stream.fill(&block, 9)
            })
            .unwrap_or_else(|error| panic!("{what}: {error}"));
        graph.launch(&stream).unwrap();
        assert_eq!(stream.download(&block).unwrap(), [9], "{what}");
        thread.unwrap().join().unwrap();
        drop((graph, block, stream));
        assert_eq!(runtime.close().unwrap().total(), 0, "{what}");
    }
}

#[test]
fn a_runtime_dropped_inside_a_capture_ends_after_it() {
    let (gpu, runtime, _, stream) = open_with_stream(MockOptions::new());
    let block = stream.upload(&[1_u8]).unwrap();
    stream.synchronize().unwrap();
    let before = gpu.live_objects();
    let other = Runtime::new(gpu.clone()).unwrap();
    let theirs = other.device(0).unwrap().create_stream().unwrap();
    let (a, b, c) = (matrix(&theirs, 1.0), matrix(&theirs, 2.0), matrix(&theirs, 5.0));
    product(&theirs, &a, &b, &c).unwrap();
    let waited = gpu.calls(Operation::SynchronizeDevice);
    let mut graph = stream
        .capture(|stream| {
            // A capture of the other runtime inside, on the same thread. Its end does not end the outer one.
            let inner = theirs.capture(|theirs| theirs.fill(&c, 3.0))?;
            assert_eq!(kind(other.clone().close()), ErrorKind::Capture);
            drop((inner, a, b, c, theirs, other));
            assert_eq!(gpu.calls(Operation::SynchronizeDevice), waited);
            stream.fill(&block, 9)
        })
        .unwrap();
    assert_eq!(gpu.calls(Operation::SynchronizeDevice), waited + 1, "the other runtime has ended");
    let after = gpu.live_objects();
    assert_eq!((after.streams, after.handles, after.allocations), (before.streams, before.handles, before.allocations));
    graph.launch(&stream).unwrap();
    assert_eq!(stream.download(&block).unwrap(), [9]);
    end(runtime, (graph, block, stream));
}

#[test]
fn a_capture_begins_while_threads_wait_for_its_stream_again_and_again() {
    const ROUNDS: u32 = 3000;
    let (_, _, _, stream) = open_with_stream(MockOptions::new().with_latency(Duration::from_millis(1)));
    let block = stream.upload(&[1_u8]).unwrap();
    let most = std::sync::atomic::AtomicU32::new(0);
    let all_wait = Barrier::new(4);
    // Enqueues, so that there is always something to wait for.
    let wait = || {
        all_wait.wait();
        let mut rounds = 0;
        while rounds < ROUNDS {
            stream.fill(&block, 2).unwrap();
            if let Err(error) = stream.synchronize() {
                assert_eq!(error.kind(), ErrorKind::Capture);
                break;
            }
            rounds += 1;
        }
        most.fetch_max(rounds, Ordering::Relaxed);
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..3).map(|_| scope.spawn(wait)).collect();
        all_wait.wait();
        let graph = stream.capture(|_| {
            // Each thread finds the capture open.
            while !threads.iter().all(|thread| thread.is_finished()) {
                thread::yield_now();
            }
            Ok(())
        });
        graph.unwrap();
    });
    assert!(most.into_inner() < ROUNDS, "the capture began when nobody waited any more");
    stream.synchronize().unwrap();
}

#[test]
fn a_capture_begun_past_core_does_not_spoil_reclaiming() {
    let (gpu, runtime, device) = open(MockOptions::new());
    let (stream, other) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let (used, ordered) = (stream.upload(&[1_u8; 64]).unwrap(), stream.allocate::<u8>(64).unwrap());
    let (unused, elsewhere) = (device.allocate::<u8>(64).unwrap(), other.upload(&[2_u8; 64]).unwrap());
    stream.fill(&ordered, 3).unwrap();
    stream.synchronize().unwrap();
    gpu.begin_capture(stream.id(), CaptureMode::Relaxed).unwrap();
    drop((used, ordered, unused, elsewhere));
    other.synchronize().unwrap();
    for _ in 0..3 {
        runtime.trim_device_memory().unwrap();
    }
    let held = || gpu.live_objects().allocations + gpu.live_objects().physical_memory;
    assert_eq!(held(), 2, "what the stream used");
    assert_eq!(runtime.statistics().failed_releases, 0);
    // The capture was not disturbed.
    // SAFETY: this test began it, past core.
    let graph = unsafe { gpu.end_capture(stream.id()) }.unwrap();
    gpu.destroy_graph(graph).unwrap();
    runtime.trim_device_memory().unwrap();
    stream.synchronize().unwrap();
    runtime.trim_device_memory().unwrap();
    stream.synchronize().unwrap();
    assert_eq!(held(), 0);
    end(runtime, (stream, other, device));
}
