//! Captures and graphs on streams that move only when told. The backend itself panics when core does what would lose a
//! capture, and when memory is freed that a stream or a graph may use.

use std::collections::VecDeque;

use proptest::collection::vec;
use proptest::prelude::*;

use crate::testing::ManualBackend;
use crate::*;

const STREAMS: usize = 3;

fn open() -> (std::sync::Arc<ManualBackend>, Runtime, Device) {
    let backend = ManualBackend::new();
    let runtime = Runtime::new(backend.clone()).unwrap();
    let device = runtime.device(0).unwrap();
    (backend, runtime, device)
}

fn kind<T>(result: Result<T>) -> ErrorKind {
    result.map(|_| ()).unwrap_err().kind()
}

/// Drops the objects of the runtime and closes it. Nothing is left.
#[track_caller]
fn end<T>(runtime: Runtime, objects: T) {
    drop(objects);
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn a_graph_that_is_dropped_gives_back_after_its_last_launch() {
    let (backend, runtime, device) = open();
    let (stream, other) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let buffer = device.allocate::<u8>(64).unwrap();
    let pinned = runtime.pinned::<u8>(64).unwrap();
    let address = pinned.ptr();
    let mut graph = stream.capture(|stream| stream.copy_to_device(&pinned, &buffer)).unwrap();
    drop((buffer, pinned));
    graph.launch(&stream).unwrap();
    graph.launch(&other).unwrap();
    let graphs = runtime.statistics().graphs;
    assert_eq!((graphs.graphs, graphs.device_blocks, graphs.pinned_blocks), (1, 1, 1));
    assert_eq!(runtime.statistics().host.graph_blocks, 1);
    drop(graph);
    assert_eq!(runtime.statistics().graphs, GraphStatistics::default());
    let host = runtime.statistics().host;
    assert_eq!((host.graph_blocks, host.waiting_blocks), (0, 1));

    backend.advance(stream.id());
    runtime.trim_device_memory().unwrap();
    assert_eq!(backend.gpu.live_objects().allocations, 1, "the launch on the other stream is not done");
    assert_ne!(runtime.pinned::<u8>(64).unwrap().ptr(), address);
    runtime.trim().unwrap();
    assert_eq!(runtime.statistics().host.waiting_blocks, 1);
    backend.advance(other.id());
    runtime.trim_device_memory().unwrap();
    assert_eq!(backend.gpu.live_objects().allocations, 0);
    runtime.trim().unwrap();
    assert_eq!((runtime.statistics().host.waiting_blocks, runtime.statistics().host.held_bytes), (0, 0));
    end(runtime, (stream, other, device));
}

#[test]
fn what_was_used_before_the_capture_may_be_dropped_in_it() {
    let (backend, runtime, device) = open();
    let stream = device.create_stream().unwrap();
    let (used_before, pinned) = (device.allocate::<u8>(64).unwrap(), runtime.pinned::<u8>(64).unwrap());
    let ordered = stream.allocate::<u8>(64).unwrap();
    let kept = device.allocate::<u8>(64).unwrap();
    stream.copy_to_device(&pinned, &used_before).unwrap();
    stream.copy_to_device(&pinned, &ordered).unwrap();
    let graph = stream
        .capture(|stream| {
            stream.copy_to_device(&pinned, &kept)?;
            // No event must be recorded on the stream now, nor may anything be freed in its order.
            drop((used_before, ordered, kept));
            drop(stream.record()?);
            runtime.trim_device_memory()
        })
        .unwrap();
    assert_eq!(backend.gpu.live_objects().allocations, 3);
    backend.advance(stream.id());
    runtime.trim_device_memory().unwrap();
    assert_eq!(backend.gpu.live_objects().allocations, 1, "what the graph recorded");
    drop(graph);
    runtime.trim_device_memory().unwrap();
    backend.advance(stream.id());
    runtime.trim_device_memory().unwrap();
    assert_eq!(backend.gpu.live_objects().allocations, 0);
    end(runtime, (pinned, stream, device));
}

#[test]
fn graphs_and_streams_dropped_in_a_capture_are_destroyed_after_it() {
    let (backend, runtime, device) = open();
    let (stream, ends) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let (buffer, pinned) = (device.allocate::<u8>(64).unwrap(), runtime.pinned::<u8>(64).unwrap());
    let earlier = stream.capture(|stream| stream.copy_to_device(&pinned, &buffer)).unwrap();
    let graph = stream
        .capture(|_| {
            drop((earlier, ends));
            assert_eq!((backend.gpu.live_objects().streams, backend.gpu.live_objects().graphs), (2, 1));
            Ok(())
        })
        .unwrap();
    assert_eq!((backend.gpu.live_objects().streams, backend.gpu.live_objects().graphs), (1, 1));
    end(runtime, (graph, buffer, pinned, stream, device));
}

#[test]
fn a_launch_whose_mark_fails_is_waited_for() {
    let (backend, runtime, device) = open();
    let stream = device.create_stream().unwrap();
    let (buffer, pinned) = (device.allocate::<u8>(64).unwrap(), runtime.pinned::<u8>(64).unwrap());
    let mut graph = stream.capture(|stream| stream.copy_to_device(&pinned, &buffer)).unwrap();
    backend.fail_record(true);
    graph.launch(&stream).unwrap();
    backend.fail_record(false);
    assert!(!backend.is_in_use(pinned.ptr().address() as u64));
    graph.launch(&stream).unwrap();
    assert!(backend.is_in_use(pinned.ptr().address() as u64));
    end(runtime, (graph, buffer, pinned, stream, device));
}

#[test]
fn the_cpu_and_launches_are_kept_apart() {
    let (_backend, runtime, device) = open();
    let (stream, other) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let buffer = device.allocate::<u8>(64).unwrap();
    let (mut input, mut output) = (runtime.pinned::<u8>(64).unwrap(), runtime.pinned::<u8>(64).unwrap());
    let mut graph = stream
        .capture(|stream| {
            stream.copy_to_device(&input, &buffer)?;
            stream.copy_to_host(&buffer, &mut output)?;
            // Nothing was executed: there is nothing to see yet.
            assert_eq!(kind(output.read()), ErrorKind::Capture);
            assert_eq!(kind(output.read_with(|_| ())), ErrorKind::Capture);
            assert_eq!(kind(input.write()), ErrorKind::Capture);
            assert_eq!(kind(input.write_with(|_| ())), ErrorKind::Capture);
            Ok(())
        })
        .unwrap();
    // A slice of what the graph only reads does no harm; the others could race with a launch.
    assert!(input.read().is_ok());
    for refused in [kind(input.write()), kind(output.read()), kind(output.write())] {
        assert_eq!(refused, ErrorKind::InvalidState);
    }
    input.write_with(|values| values.fill(1)).unwrap();
    graph.launch(&other).unwrap();
    // Waits for the launch, as the backend would tell.
    output.read_with(|values| assert_eq!(values.len(), 64)).unwrap();
    assert_eq!(kind(input.write_with(|_| graph.launch(&stream)).unwrap()), ErrorKind::InvalidState);
    assert_eq!(kind(output.read_with(|_| graph.launch(&stream)).unwrap()), ErrorKind::InvalidState);
    input.read_with(|_| graph.launch(&stream)).unwrap().unwrap();
    // A closure that panics releases the block.
    let panics = std::panic::AssertUnwindSafe(|| input.write_with(|_| panic!("told to panic")));
    assert!(std::panic::catch_unwind(panics).is_err());
    graph.launch(&stream).unwrap();
    drop(graph);
    assert!(output.read().is_ok() && input.write().is_ok());
    end(runtime, (input, output, buffer, stream, other, device));
}

#[test]
fn who_waits_for_a_launch_learns_that_nobody_can_tell_when_it_is_done() {
    let (backend, runtime, device) = open();
    let (stream, other) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let buffer = device.allocate::<u8>(64).unwrap();
    let mut output = runtime.pinned::<u8>(64).unwrap();
    let mut graph = stream.capture(|stream| stream.copy_to_host(&buffer, &mut output)).unwrap();
    let mut second = stream.capture(|stream| stream.copy_to_host(&buffer, &mut output)).unwrap();
    let (reading, reads) = std::sync::mpsc::channel();
    backend.fail_record(true);
    backend.intrude("synchronize_stream", move || {
        // Both have looked and wait for the launch, unless the machine is busy: then they look afterwards.
        reads.iter().take(2).for_each(drop);
        std::thread::sleep(std::time::Duration::from_millis(20));
        Err(Error::new(ErrorKind::Vendor, "synchronize_stream", "told to fail"))
    });
    std::thread::scope(|scope| {
        let output = &output;
        let launched = std::thread::Builder::new();
        let launched = launched.spawn_scoped(scope, || kind(graph.launch(&stream))).unwrap();
        while !backend.is_in_use(output.ptr().address() as u64) {
            std::thread::yield_now();
        }
        let (sent, also_sent) = (reading.clone(), reading);
        let read = scope.spawn(move || {
            sent.send(()).unwrap();
            kind(output.read_with(|_| ()))
        });
        let launched_too = scope.spawn(|| {
            let sent = also_sent;
            sent.send(()).unwrap();
            kind(second.launch(&other))
        });
        assert_eq!(launched.join().unwrap(), ErrorKind::Vendor);
        assert_eq!(read.join().unwrap(), ErrorKind::InvalidState);
        assert_eq!(launched_too.join().unwrap(), ErrorKind::InvalidState);
    });
    backend.fail_record(false);
    end(runtime, (graph, second, output, buffer, stream, other, device));
}

#[test]
fn an_event_of_a_capture_that_is_dropped_while_it_ends_is_nobodys_before_it_has() {
    let (backend, runtime, device) = open();
    let (stream, other) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let outside = other.clone();
    let graph = stream
        .capture(|stream| {
            let event = stream.record()?;
            backend.intrude("end_capture", move || {
                drop(event);
                // The backend panics if this is an event of the capture.
                outside.record().map(drop)
            });
            Ok(())
        })
        .unwrap();
    end(runtime, (graph, stream, other, device));
}

#[test]
fn a_call_that_was_to_be_recorded_is_not_executed_unordered() {
    let (backend, runtime, device) = open();
    let (home, other) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let (ordered, pinned) = (home.allocate::<u8>(64).unwrap(), runtime.pinned::<u8>(64).unwrap());
    let ((has_begun, begun), (go_on, may_end)) = (std::sync::mpsc::channel(), std::sync::mpsc::channel());
    std::thread::scope(|scope| {
        let capturing = &other;
        scope.spawn(move || {
            let record = |_: &Stream| {
                has_begun.send(()).unwrap();
                may_end.recv().unwrap();
                Ok(())
            };
            drop(capturing.capture(record).unwrap());
        });
        begun.recv().unwrap();
        let (stream, looks) = (other.id(), backend.clone());
        // After the call has found the capture open, and before it is its submission lock.
        backend.intrude("create_event", move || {
            go_on.send(()).unwrap();
            while Backend::is_capturing(&*looks, stream)? {
                std::thread::yield_now();
            }
            Ok(())
        });
        let refused = other.copy_to_device(&pinned, &ordered).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Capture);
        assert!(refused.message().contains("ended the capture"), "{refused}");
    });
    assert!(!backend.is_in_use(ordered.ptr().get()));
    other.copy_to_device(&pinned, &ordered).unwrap();
    assert!(backend.is_in_use(ordered.ptr().get()));
    for stream in [&home, &other] {
        backend.advance(stream.id());
    }
}

#[test]
fn what_was_dropped_in_a_lost_capture_is_held_to_the_cap() {
    let options = RuntimeOptions::new().with_host_cache_bytes(0);
    let runtime = Runtime::with_options(ManualBackend::new(), &options).unwrap();
    let device = runtime.device(0).unwrap();
    let (stream, other) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let lost = stream.capture(|stream| {
        // The capture does not wait for the stream that joins it.
        other.wait(&stream.record()?)?;
        runtime.pinned::<u8>(64).map(drop)
    });
    assert_eq!(kind(lost), ErrorKind::Capture);
    assert_eq!(runtime.statistics().host.held_bytes, 0);
}

#[test]
fn a_backend_that_panics_while_a_stream_ends_keeps_nobody_waiting() {
    let (backend, runtime, device) = open();
    let stream = device.create_stream().unwrap();
    let (buffer, pinned) = (device.allocate::<u8>(64).unwrap(), runtime.pinned::<u8>(64).unwrap());
    stream.copy_to_device(&pinned, &buffer).unwrap();
    backend.intrude("record_event", || panic!("told to panic"));
    let drops = std::panic::AssertUnwindSafe(|| drop(stream));
    assert!(std::panic::catch_unwind(drops).is_err());
    // In a thread of its own, so that the test fails instead of waiting for ever.
    let (dropped, is_dropped) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        drop(buffer);
        dropped.send(()).unwrap();
    });
    is_dropped.recv_timeout(std::time::Duration::from_secs(20)).expect("the buffer waits for the end of the stream");
    runtime.trim_device_memory().unwrap();
    assert_eq!(backend.gpu.live_objects().allocations, 1, "nobody can tell when the copy is done");
    drop((pinned, device));
    runtime.close().unwrap();
    assert_eq!(backend.gpu.live_objects().allocations, 0);
}

// -------------------------------------------------------------------------------------------------- random sequences

#[derive(Debug, Clone)]
enum Operation {
    Take { bytes: usize },
    Drop { which: usize },
    Copy(CopyOf),
    Capture { stream: usize, copies: Vec<CopyOf>, joined: Vec<CopyOf>, dropped: Option<usize>, fails: bool },
    Launch { graph: usize, stream: usize },
    DropGraph { graph: usize },
    TouchByCpu { which: usize },
    Advance { stream: usize },
    Reclaim,
    Trim,
}

#[derive(Debug, Clone)]
struct CopyOf {
    which: usize,
    stream: usize,
    to_host: bool,
    /// Made by other code and noted by address.
    noted: bool,
}

fn copy_of() -> impl Strategy<Value = CopyOf> {
    (0..6_usize, 0..STREAMS, any::<bool>(), 0..4_u8).prop_map(|(which, stream, to_host, noted)| CopyOf {
        which,
        stream,
        to_host,
        noted: noted == 0,
    })
}

fn operation() -> impl Strategy<Value = Operation> {
    let (which, graph, stream) = (0..6_usize, 0..4_usize, 0..STREAMS);
    let capture = (stream.clone(), vec(copy_of(), 0..4), vec(copy_of(), 0..3), prop::option::of(0..6_usize), 0..4_u8);
    prop_oneof![
        5 => (1..10_000_usize).prop_map(|bytes| Operation::Take { bytes }),
        3 => which.clone().prop_map(|which| Operation::Drop { which }),
        3 => copy_of().prop_map(Operation::Copy),
        4 => capture.prop_map(|(stream, copies, joined, dropped, fails)| {
            Operation::Capture { stream, copies, joined, dropped, fails: fails == 0 }
        }),
        5 => (graph.clone(), stream.clone()).prop_map(|(graph, stream)| Operation::Launch { graph, stream }),
        2 => graph.prop_map(|graph| Operation::DropGraph { graph }),
        2 => which.prop_map(|which| Operation::TouchByCpu { which }),
        3 => stream.prop_map(|stream| Operation::Advance { stream }),
        1 => Just(Operation::Reclaim),
        1 => Just(Operation::Trim),
    ]
}

struct Pair {
    pinned: PinnedBuffer<u8>,
    device: DeviceBuffer<u8>,
}

fn copy(backend: &ManualBackend, stream: &Stream, pairs: &mut VecDeque<Pair>, copy: &CopyOf) -> Result<()> {
    match pairs.get_mut(copy.which) {
        Some(pair) if copy.noted => {
            backend.enqueue_use(stream.id(), pair.pinned.ptr().address() as u64);
            stream.note_host_use(pair.pinned.ptr(), if copy.to_host { Access::Write } else { Access::Read })
        }
        Some(pair) if copy.to_host => stream.copy_to_host(&pair.device, &mut pair.pinned),
        Some(pair) => stream.copy_to_device(&pair.pinned, &pair.device),
        None => Ok(()),
    }
}

fn run(operations: &[Operation], cap: Option<u64>) {
    let backend = ManualBackend::new();
    let host_memory = HostMemoryOptions { idle_cap_bytes: cap, ..HostMemoryOptions::new() };
    let options = RuntimeOptions::new().with_host_memory(host_memory);
    let runtime = Runtime::with_options(backend.clone(), &options).unwrap();
    let device = runtime.device(0).unwrap();
    backend.watch_locks_of(&runtime);
    let streams: [Stream; STREAMS] = std::array::from_fn(|_| device.create_stream().unwrap());
    let mut pairs = VecDeque::new();
    let mut graphs: VecDeque<Graph> = VecDeque::new();
    for operation in operations {
        match operation {
            Operation::Take { bytes } => {
                let pinned = runtime.pinned::<u8>(*bytes).unwrap();
                let address = pinned.ptr().address() as u64;
                assert!(!backend.is_in_use(address), "a block was given out while a stream uses it");
                assert!(!backend.is_recorded(address), "a block was given out while a graph has recorded it");
                pairs.push_back(Pair { pinned, device: device.allocate(*bytes).unwrap() });
            }
            Operation::Drop { which } => drop(pairs.remove(*which)),
            Operation::Copy(of) => copy(&backend, &streams[of.stream], &mut pairs, of).unwrap(),
            Operation::Capture { stream, copies, joined, dropped, fails } => {
                let first = &streams[*stream];
                let second = &streams[(*stream + 1) % STREAMS];
                let captured = first.capture(|stream| {
                    copies.iter().try_for_each(|of| copy(&backend, stream, &mut pairs, of))?;
                    second.wait(&stream.record()?)?;
                    joined.iter().try_for_each(|of| copy(&backend, second, &mut pairs, of))?;
                    if let Some(which) = dropped {
                        drop(pairs.remove(*which));
                    }
                    assert_eq!(kind(second.synchronize()), ErrorKind::Capture);
                    stream.wait(&second.record()?)?;
                    if *fails { Err(Error::new(ErrorKind::InvalidState, "test", "told to fail")) } else { Ok(()) }
                });
                assert_eq!(captured.is_err(), *fails);
                graphs.extend(captured);
            }
            Operation::Launch { graph, stream } => {
                if let Some(graph) = graphs.get_mut(*graph) {
                    graph.launch(&streams[*stream]).unwrap();
                }
            }
            Operation::DropGraph { graph } => drop(graphs.remove(*graph)),
            Operation::TouchByCpu { which } => {
                if let Some(pair) = pairs.get_mut(*which) {
                    let address = pair.pinned.ptr().address() as u64;
                    pair.pinned.write_with(|values| values.fill(1)).unwrap();
                    assert!(!backend.is_in_use(address));
                    if pair.pinned.write().is_ok() {
                        assert!(!backend.is_recorded(address));
                    }
                }
            }
            Operation::Advance { stream } => backend.advance(streams[*stream].id()),
            Operation::Reclaim => runtime.trim_device_memory().unwrap(),
            Operation::Trim => runtime.trim().unwrap(),
        }
        let statistics = runtime.statistics();
        let host = statistics.host;
        assert_eq!(host.broken_law(), None, "{host:?}");
        assert_eq!((host.pieces, host.unmarked_blocks), (backend.live_host_blocks(), 0));
        assert_eq!(host.live_blocks, pairs.len() as u64);
        assert_eq!((statistics.graphs.graphs, statistics.graphs.capturing_streams), (graphs.len() as u64, 0));
        assert!(host.graph_blocks <= statistics.graphs.pinned_blocks);
    }
    end(runtime, (pairs, graphs, streams, device));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nothing_is_given_back_early_and_everything_in_the_end(
        operations in vec(operation(), 1..60), cap in prop::option::of(0..50_000_u64)
    ) {
        run(&operations, cap);
    }
}
