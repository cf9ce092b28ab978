//! Growth over months: a program must not keep an event for every stream that ever was, nor query all of them for every
//! request.

use std::sync::Arc;
use std::thread;

use highwater_mock::{MockOptions, Operation};

use crate::testing::ManualBackend;
use crate::{Access, Backend, ErrorKind, PinnedBuffer, Runtime, Stream};

const BYTES: usize = 4096;

fn open() -> (Arc<ManualBackend>, Runtime) {
    let backend = ManualBackend::new();
    (backend.clone(), Runtime::new(backend).unwrap())
}

fn streams(runtime: &Runtime, count: usize) -> Vec<Stream> {
    let device = runtime.device(0).unwrap();
    (0..count).map(|_| device.create_stream().unwrap()).collect()
}

/// The number of completion events that the buffer remembers.
fn completions(pinned: &PinnedBuffer<u8>) -> usize {
    pinned.block().uses.completions(false).len()
}

// ------------------------------------------------------------------------------------------------ events

#[test]
fn a_buffer_that_is_only_copied_from_forgets_streams_that_have_ended() {
    const STREAMS: u64 = 1000;
    let (backend, runtime) = open();
    backend.watch_locks_of(&runtime);
    let device = runtime.device(0).unwrap();
    let (constant, copy) = (runtime.pinned::<u8>(BYTES).unwrap(), device.allocate::<u8>(BYTES).unwrap());
    for _ in 0..STREAMS {
        let stream = device.create_stream().unwrap();
        stream.copy_to_device(&constant, &copy).unwrap();
        backend.advance(stream.id());
    }
    let events = backend.gpu.live_objects().events;
    assert!(completions(&constant) < 16 && events < 64, "{} marks, {events} events", completions(&constant));
    assert!(backend.gpu.calls(Operation::QueryEvent) < 4 * STREAMS, "to forget must not cost more than to use");
    drop((constant, copy, device));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn threads_on_one_stream_leave_one_mark() {
    const THREADS: usize = 4;
    let (backend, runtime) = open();
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    let (constant, copy) = (runtime.pinned::<u8>(BYTES).unwrap(), device.allocate::<u8>(BYTES).unwrap());
    let start = std::sync::Barrier::new(THREADS);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                start.wait();
                for round in 0..500 {
                    if round % 2 == 0 {
                        stream.copy_to_device(&constant, &copy).unwrap();
                    } else {
                        stream.note_host_use(constant.ptr(), Access::Read).unwrap();
                    }
                }
            });
        }
    });
    let events = backend.gpu.live_objects().events;
    // Each thread holds two events at most: the one that it records and the one that it replaces.
    assert!(
        completions(&constant) == 1 && events <= 1 + 2 * THREADS as u64,
        "{} marks, {events} events",
        completions(&constant)
    );
}

#[test]
fn marks_of_a_stream_that_are_noted_out_of_order_leave_the_later_one() {
    let (_backend, runtime) = open();
    let stream = streams(&runtime, 1).remove(0);
    let pinned = runtime.pinned::<u8>(BYTES).unwrap();
    let uses = &pinned.block().uses;
    let begun = [(); 2].map(|()| uses.begin(stream.core().key, false).unwrap());
    let [earlier, later] = [(); 2].map(|()| stream.core().completion().unwrap());
    let [first, second] = begun;
    assert!(!second.settle(Arc::clone(&later)) && !first.settle(earlier));
    let completions = uses.completions(false);
    assert!(matches!(&*completions, [completion] if Arc::ptr_eq(completion, &later)), "{completions:?}");
}

#[test]
fn a_write_waits_once_for_each_stream_that_read() {
    const READERS: usize = 16;
    let (backend, runtime) = open();
    backend.watch_locks_of(&runtime);
    let device = runtime.device(0).unwrap();
    let (mut pinned, copy) = (runtime.pinned::<u8>(BYTES).unwrap(), device.allocate::<u8>(BYTES).unwrap());
    let readers = streams(&runtime, READERS);
    let writer = device.create_stream().unwrap();
    for _ in 0..10 {
        for reader in &readers {
            stream_reads(reader, &pinned, &copy);
        }
        assert_eq!(completions(&pinned), READERS);
    }
    let before = backend.gpu.calls(Operation::StreamWaitEvent);
    let waits = || backend.gpu.calls(Operation::StreamWaitEvent) - before;
    writer.copy_to_host(&copy, &mut pinned).unwrap();
    assert_eq!(waits(), READERS as u64);
    assert_eq!(completions(&pinned), 1, "the writer has waited for the others");
    writer.copy_to_host(&copy, &mut pinned).unwrap();
    assert_eq!(waits(), READERS as u64, "they were waited for before");
    // A read now waits for the write, and for nothing else.
    stream_reads(&readers[0], &pinned, &copy);
    assert_eq!((waits(), completions(&pinned)), (READERS as u64 + 1, 2));
}

fn stream_reads(stream: &Stream, pinned: &PinnedBuffer<u8>, copy: &crate::DeviceBuffer<u8>) {
    stream.copy_to_device(pinned, copy).unwrap();
}

#[test]
fn a_trim_destroys_idle_events() {
    let (backend, runtime) = open();
    backend.watch_locks_of(&runtime);
    let stream = streams(&runtime, 1).remove(0);
    let completions: Vec<_> = (0..100).map(|_| stream.record().unwrap()).collect();
    drop(completions);
    let events = || (runtime.statistics().events, runtime.statistics().idle_events, backend.gpu.live_objects().events);
    assert_eq!(events(), (100, 100, 100), "kept for the next marks");
    runtime.trim().unwrap();
    assert_eq!(events(), (0, 0, 0));
    let after = stream.record().unwrap();
    runtime.trim().unwrap();
    assert_eq!(events(), (1, 0, 1), "one in use stays");
    let _ = after.id();
    drop(after);
    assert_eq!(events(), (0, 0, 0), "an event whose id was given away is not kept");
}

// ------------------------------------------------------------------------------------------------ questions

#[test]
fn a_request_asks_one_block_of_a_stream_that_is_behind() {
    const WAITING: usize = 1000;
    let (backend, runtime) = open();
    let device = runtime.device(0).unwrap();
    let streams = streams(&runtime, 2);
    let copy = device.allocate::<u8>(BYTES).unwrap();
    for round in 0..WAITING {
        streams[round % 2].copy_to_device(&runtime.pinned::<u8>(BYTES).unwrap(), &copy).unwrap();
    }
    let host = runtime.statistics().host;
    assert_eq!(host.waiting_blocks, WAITING as u64);
    let asked = backend.gpu.calls(Operation::QueryEvent);
    assert!(asked <= 2 * WAITING as u64);
    // One stream has caught up. Finding each of its blocks takes one query of its own and at most one to the other
    // stream.
    backend.advance(streams[1].id());
    let free = host.free_bytes as usize / BYTES;
    let taken: Vec<_> = (0..free + WAITING / 2).map(|_| runtime.pinned::<u8>(BYTES).unwrap()).collect();
    assert_eq!(runtime.statistics().host.misses, host.misses, "the pool did not grow");
    assert!(backend.gpu.calls(Operation::QueryEvent) - asked <= WAITING as u64);
    drop((taken, copy, streams, device));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

// ------------------------------------------------------------------------------------------------ impossible requests

const MIB: usize = 1 << 20;

/// A device of 16 MiB, with a block of 4 MiB that was dropped while a stream which is behind uses it.
fn nearly_full() -> (Arc<ManualBackend>, Runtime, Stream, u64) {
    let backend = ManualBackend::open(MockOptions::new().with_memory_bytes(16 * MIB as u64), |_| ());
    let runtime = Runtime::new(backend.clone()).unwrap();
    let stream = streams(&runtime, 1).remove(0);
    let (pinned, dropped) =
        (runtime.pinned::<u8>(BYTES).unwrap(), runtime.device(0).unwrap().allocate(4 * MIB).unwrap());
    stream.copy_to_device(&pinned, dropped.slice(0..BYTES).unwrap()).unwrap();
    let at = dropped.ptr().get();
    drop(dropped);
    assert!(backend.is_in_use(at));
    backend.watch_locks_of(&runtime);
    (backend, runtime, stream, at)
}

#[test]
fn a_request_for_more_than_the_device_has_waits_for_nothing() {
    let (backend, runtime, _stream, dropped) = nearly_full();
    let error = runtime.device(0).unwrap().allocate::<u8>(1 << 30).unwrap_err();
    assert!(backend.is_in_use(dropped), "the request waited for a stream");
    assert_eq!((error.kind(), error.operation()), (ErrorKind::OutOfMemory, "allocate"));
    assert!(error.message().contains("1073741824") && error.message().contains("16777216"), "{error}");
    assert!(!error.hint().is_empty(), "{error}");
}

#[test]
fn a_request_for_more_than_live_buffers_leave_waits_for_nothing() {
    let (backend, runtime, stream, dropped) = nearly_full();
    let device = runtime.device(0).unwrap();
    let live = device.allocate::<u8>(8 * MIB).unwrap();
    let error = device.allocate::<u8>(9 * MIB).unwrap_err();
    assert!(backend.is_in_use(dropped), "the request waited for a stream");
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    assert!(error.message().contains("8388608"), "names what live buffers hold: {error}");
    // A graph keeps the dropped buffer, so it counts as live.
    let pinned = runtime.pinned::<u8>(BYTES).unwrap();
    let graph = stream.capture(|stream| stream.copy_to_device(&pinned, live.slice(0..BYTES)?)).unwrap();
    drop(live);
    assert!(device.allocate::<u8>(9 * MIB).is_err());
    assert!(backend.is_in_use(dropped), "the request waited for a stream");
    drop(graph);
    // Now waiting helps.
    device.allocate::<u8>(16 * MIB).unwrap();
    assert!(!backend.is_in_use(dropped));
}

#[test]
fn a_request_that_waiting_makes_room_for_waits() {
    let (backend, runtime, _stream, dropped) = nearly_full();
    let device = runtime.device(0).unwrap();
    // The request fits only into the dropped block and the gap behind it.
    let gap = device.allocate::<u8>(4 * MIB).unwrap();
    let _live = device.allocate::<u8>(8 * MIB).unwrap();
    drop(gap);
    device.allocate::<u8>(8 * MIB).unwrap();
    assert!(!backend.is_in_use(dropped));
}

#[test]
fn a_request_for_pinned_memory_does_not_wait_for_one_for_device_memory() {
    let (_backend, runtime) = open();
    // Like a thread that waits for a slow stream to free device memory.
    let _round = runtime.inner.frees.memory.active_trims.begin();
    let (done, is_done) = std::sync::mpsc::channel();
    let asking = runtime.clone();
    let asking = thread::spawn(move || done.send(asking.pinned::<u8>(1 << 50).unwrap_err().kind()));
    let kind = is_done.recv_timeout(std::time::Duration::from_secs(20)).expect("the request waits");
    asking.join().unwrap().unwrap();
    assert_eq!(kind, ErrorKind::OutOfMemory);
}

// ------------------------------------------------------------------------------------------------ refused destroys

const DESTROYS: [Operation; 4] =
    [Operation::DestroyStream, Operation::DestroyEvent, Operation::DestroyGraph, Operation::DestroyGraphExec];

/// Makes every call fail that destroys something, or none.
fn refuse_destroys(backend: &ManualBackend, refuse: bool) {
    let per_million = u32::from(refuse) * 1_000_000;
    for destroy in DESTROYS {
        backend.gpu.fail_by_chance(destroy, per_million, ErrorKind::Vendor).unwrap();
    }
}

/// Drops a stream, an event whose id was given away, and a graph, each of which the backend refuses to destroy.
fn drop_refused(backend: &ManualBackend, runtime: &Runtime) {
    let [first, second] = <[Stream; 2]>::try_from(streams(runtime, 2)).unwrap();
    let event = first.record().unwrap();
    let _ = event.id();
    // The graph that is captured is refused, then the one that is launched.
    refuse_destroys(backend, true);
    let graph = first.capture(|_| Ok(())).unwrap();
    drop((event, graph, second));
    drop(first);
    let live = backend.gpu.live_objects();
    assert_eq!((live.streams, live.graphs), (2, 2), "{live:?}");
    assert_eq!(runtime.statistics().refused_destroys, 5);
    assert_eq!(runtime.statistics().failed_releases, 5);
}

#[test]
fn a_refused_destroy_is_tried_again_by_a_reclaim() {
    let (backend, runtime) = open();
    backend.watch_locks_of(&runtime);
    drop_refused(&backend, &runtime);
    refuse_destroys(&backend, false);
    runtime.trim_device_memory().unwrap();
    let live = backend.gpu.live_objects();
    assert_eq!((live.streams, live.graphs), (0, 0), "{live:?}");
    assert_eq!((runtime.statistics().refused_destroys, runtime.statistics().failed_releases), (0, 5));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn a_refused_destroy_is_tried_again_by_the_end_of_the_runtime_more_than_once() {
    let (backend, runtime) = open();
    drop_refused(&backend, &runtime);
    refuse_destroys(&backend, false);
    for (destroy, nth) in DESTROYS.iter().flat_map(|destroy| [1, 2].map(|nth| (destroy, nth))) {
        backend.gpu.fail_call(destroy, nth, ErrorKind::Vendor).unwrap();
    }
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn a_destroy_that_is_always_refused_does_not_hold_up_the_end_of_the_runtime() {
    let (backend, runtime) = open();
    drop_refused(&backend, &runtime);
    assert_eq!(runtime.close().unwrap_err().kind(), ErrorKind::Vendor);
}

#[test]
fn idle_events_that_a_trim_could_not_destroy_are_destroyed_later() {
    let (backend, runtime) = open();
    let stream = streams(&runtime, 1).remove(0);
    drop((0..10).map(|_| stream.record().unwrap()).collect::<Vec<_>>());
    refuse_destroys(&backend, true);
    assert!(runtime.trim().is_err());
    refuse_destroys(&backend, false);
    assert_eq!((backend.gpu.live_objects().events, runtime.statistics().refused_destroys), (10, 10));
    runtime.trim().unwrap();
    assert_eq!((backend.gpu.live_objects().events, runtime.statistics().refused_destroys), (0, 0));
}
