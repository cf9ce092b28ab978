//! The host cache over a backend whose streams move only when told, and that panics when it is called under a lock.

use std::sync::Arc;

use crate::testing::ManualBackend;
use crate::{Access, ErrorKind, HostCacheStatistics, HostPtr, PinnedBuffer, Runtime, RuntimeOptions, Stream};

const KIB: usize = 1 << 10;

fn open(cap: Option<u64>) -> (Arc<ManualBackend>, Runtime) {
    let backend = ManualBackend::new();
    let options = RuntimeOptions { host_cache_bytes: cap, ..RuntimeOptions::new() };
    let runtime = Runtime::with_options(backend.clone(), &options).unwrap();
    backend.watch_locks_of(&runtime);
    (backend, runtime)
}

fn host(runtime: &Runtime) -> HostCacheStatistics {
    let host = runtime.statistics().host;
    assert_eq!(host.broken_law(), None, "{host:?}");
    host
}

fn stream(runtime: &Runtime) -> Stream {
    runtime.device(0).unwrap().create_stream().unwrap()
}

/// A buffer that a copy of `stream` uses.
fn used(runtime: &Runtime, stream: &Stream, bytes: usize) -> PinnedBuffer<u8> {
    let pinned = runtime.pinned::<u8>(bytes).unwrap();
    stream.copy_to_device(&pinned, &runtime.device(0).unwrap().allocate(bytes).unwrap()).unwrap();
    pinned
}

fn address(buffer: &PinnedBuffer<u8>) -> u64 {
    buffer.ptr().address() as u64
}

// ------------------------------------------------------------------------------------------------ the cap

#[test]
fn the_cap_gives_back_what_was_unused_longest_and_no_more_than_it_must() {
    let (backend, runtime) = open(Some(64 * KIB as u64));
    // Of several classes, so that the order is not that of one bin.
    let buffers = [16, 32, 16, 8].map(|kib| runtime.pinned::<u8>(kib * KIB).unwrap());
    let at: Vec<u64> = buffers.iter().map(address).collect();
    let [first, second, third, last] = buffers;
    drop(second);
    drop(third);
    drop(first);
    assert_eq!(host(&runtime).free_bytes, 64 * KIB as u64);
    assert_eq!(host(&runtime).cap_evictions, 0, "within the cap");
    drop(last);
    let alive: Vec<bool> = at.iter().map(|&address| backend.has_host_block(address)).collect();
    assert_eq!(alive, [true, false, true, true], "the second was given back first");
    let statistics = host(&runtime);
    assert_eq!((statistics.free_bytes, statistics.cap_evictions, statistics.frees), (40 * KIB as u64, 1, 1));
    // What was used again is not unused longest: of the two blocks of 16 KiB, the other one goes.
    assert_eq!(address(&runtime.pinned::<u8>(16 * KIB).unwrap()), at[0]);
    drop(runtime.pinned::<u8>(40 * KIB).unwrap());
    let alive: Vec<bool> = at.iter().map(|&address| backend.has_host_block(address)).collect();
    assert_eq!(alive, [true, false, false, true]);
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn a_block_larger_than_the_cap_does_not_drive_out_the_others() {
    let (backend, runtime) = open(Some(64 * KIB as u64));
    let small = runtime.pinned::<u8>(32 * KIB).unwrap();
    let large = runtime.pinned::<u8>(128 * KIB).unwrap();
    let (small_at, large_at) = (address(&small), address(&large));
    drop((small, large));
    assert!(backend.has_host_block(small_at) && !backend.has_host_block(large_at));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn a_live_buffer_is_never_refused_for_the_cap_and_a_cap_of_0_caches_nothing() {
    let (_backend, runtime) = open(Some(0));
    let buffers: Vec<_> = (0..10).map(|_| runtime.pinned::<u8>(100 * KIB).unwrap()).collect();
    let statistics = host(&runtime);
    assert_eq!((statistics.live_blocks, statistics.cap_evictions), (10, 0));
    assert!(statistics.requested_bytes == 1000 * KIB as u64 && statistics.live_bytes >= statistics.requested_bytes);
    drop(buffers);
    let statistics = host(&runtime);
    assert_eq!((statistics.held_blocks, statistics.held_bytes, statistics.cap_evictions), (0, 0, 10));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn blocks_above_the_cap_that_streams_use_are_given_back_once_they_are_done() {
    const BLOCKS: usize = 50;
    let (backend, runtime) = open(Some(10 * 4 * KIB as u64));
    let (stuck, other) = (stream(&runtime), stream(&runtime));
    let held: Vec<_> = (0..BLOCKS).map(|_| used(&runtime, &stuck, 4 * KIB)).collect();
    let later: Vec<_> = (0..BLOCKS).map(|_| used(&runtime, &other, 16 * KIB)).collect();
    drop((held, later));
    let statistics = host(&runtime);
    assert_eq!((statistics.waiting_blocks, statistics.cap_evictions), (2 * BLOCKS as u64, 0), "all are in use");
    // The stuck ones hold up no others, although there are more of them than are asked at once.
    backend.advance(other.id());
    for _ in 0..4 {
        drop(runtime.pinned::<u8>(64 * KIB).unwrap());
    }
    let statistics = host(&runtime);
    assert_eq!((statistics.waiting_blocks, statistics.free_blocks), (BLOCKS as u64, 0), "{statistics:?}");
    // Waiting for a stream is an occasion too.
    stuck.synchronize().unwrap();
    let statistics = host(&runtime);
    assert_eq!(statistics.free_bytes + statistics.waiting_bytes, 10 * 4 * KIB as u64, "{statistics:?}");
    drop((stuck, other));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

// ------------------------------------------------------------------------------------------------ pieces

#[test]
fn pieces_are_registered_and_unregistered_under_no_lock_and_only_when_every_one_is_unused() {
    const PIECE: usize = 2 << 20;
    let backend = ManualBackend::with_capabilities(|can| {
        can.host_register = true;
        can.register_piece_bytes = PIECE;
    });
    let runtime = Runtime::with_options(backend.clone(), &RuntimeOptions::new().with_host_cache_bytes(0)).unwrap();
    backend.watch_locks_of(&runtime);
    let stream = stream(&runtime);
    let pinned = runtime.pinned::<u8>(3 * PIECE).unwrap();
    let at = address(&pinned);
    let buffer = runtime.device(0).unwrap().allocate(3 * PIECE).unwrap();
    // Over the second border only.
    let part = PIECE + 5..3 * PIECE;
    stream.copy_to_device(pinned.slice(part.clone()).unwrap(), buffer.slice(part).unwrap()).unwrap();
    let in_use = [at, at + PIECE as u64 + 5, at + 2 * PIECE as u64].map(|address| backend.is_in_use(address));
    assert_eq!(in_use, [false, true, true], "one copy for each piece that is touched");
    drop(pinned);
    assert_eq!((host(&runtime).waiting_blocks, backend.live_host_blocks()), (1, 3));
    backend.advance(stream.id());
    runtime.trim().unwrap();
    assert_eq!((host(&runtime).held_blocks, backend.live_host_blocks()), (0, 0));
    drop((buffer, stream));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

// ------------------------------------------------------------------------------------------------ streams

#[test]
fn a_stuck_stream_holds_up_its_own_block_and_no_others() {
    let (backend, runtime) = open(None);
    let (stuck, other) = (stream(&runtime), stream(&runtime));
    drop(used(&runtime, &stuck, 4 * KIB));
    for _ in 0..1000 {
        let pinned = used(&runtime, &other, 4 * KIB);
        drop(pinned);
        backend.advance(other.id());
    }
    let statistics = host(&runtime);
    assert_eq!((statistics.allocations, statistics.hits), (2, 999));
    drop((stuck, other));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn a_block_is_not_freed_by_a_trim_while_a_noted_use_is_outstanding() {
    let (backend, runtime) = open(Some(0));
    let stream = stream(&runtime);
    let pinned = runtime.pinned::<u8>(4 * KIB).unwrap();
    backend.enqueue_use(stream.id(), address(&pinned));
    stream.note_host_use(pinned.ptr().offset(4 * KIB - 1), Access::Write).unwrap();
    drop(pinned);
    // The backend panics when a block in use is freed.
    runtime.trim().unwrap();
    assert_eq!(host(&runtime).waiting_blocks, 1);
    backend.advance(stream.id());
    runtime.trim().unwrap();
    assert_eq!(host(&runtime).held_blocks, 0);
}

#[test]
fn the_cpu_waits_for_noted_uses_as_it_does_for_copies() {
    let (backend, runtime) = open(None);
    let stream = stream(&runtime);
    let mut pinned = runtime.pinned::<u8>(4 * KIB).unwrap();
    backend.enqueue_use(stream.id(), address(&pinned));
    stream.note_host_use(pinned.ptr(), Access::Read).unwrap();
    pinned.read().unwrap();
    assert!(backend.is_in_use(address(&pinned)), "two readers do not wait for each other");
    pinned.write().unwrap();
    assert!(!backend.is_in_use(address(&pinned)));
    backend.enqueue_use(stream.id(), address(&pinned));
    stream.note_host_use(pinned.ptr().offset(100), Access::Write).unwrap();
    pinned.read().unwrap();
    assert!(!backend.is_in_use(address(&pinned)));
}

#[test]
fn one_stream_leaves_one_mark_however_often_it_uses_a_block() {
    let (backend, runtime) = open(None);
    let stream = stream(&runtime);
    let pinned = used(&runtime, &stream, 4 * KIB);
    for _ in 0..10 {
        stream.note_host_use(pinned.ptr(), Access::Read).unwrap();
    }
    assert_eq!((pinned.block().uses.completions(false).len(), pinned.block().uses.completions(true).len()), (1, 0));
    stream.note_host_use(pinned.ptr(), Access::Write).unwrap();
    assert_eq!((pinned.block().uses.completions(false).len(), pinned.block().uses.completions(true).len()), (1, 1));
    drop(backend);
}

#[test]
fn an_address_in_no_live_buffer_is_an_error() {
    let (_backend, runtime) = open(None);
    let (_other_backend, other) = open(None);
    let stream = stream(&runtime);
    let refused = |ptr: HostPtr| {
        assert_eq!(runtime.pinned_block_of(ptr), None);
        let error = stream.note_host_use(ptr, Access::Write).unwrap_err();
        assert_eq!((error.kind(), error.operation()), (ErrorKind::InvalidPointer, "note_host_use"));
        assert!(error.hint().contains("alive"), "{error}");
    };
    let mut on_the_stack = 0_u8;
    refused(HostPtr::new(std::ptr::NonNull::from(&mut on_the_stack)));
    let pinned = runtime.pinned::<u8>(5000).unwrap();
    let info = runtime.pinned_block_of(pinned.ptr().offset(4999)).unwrap();
    assert_eq!(info.base, pinned.ptr());
    refused(pinned.ptr().offset(info.bytes));
    let foreign = other.pinned::<u8>(64).unwrap();
    refused(foreign.ptr());
    // Cached, not live: the block is nobody's.
    let dropped = pinned.ptr();
    drop(pinned);
    assert_eq!(host(&runtime).free_blocks, 1);
    refused(dropped);
    // A refusal leaves nothing behind.
    assert_eq!(host(&runtime).free_blocks, 1);
    assert_eq!(runtime.pinned::<u8>(5000).unwrap().ptr(), dropped);
}

#[test]
fn a_noted_use_whose_mark_fails_is_waited_for() {
    let (backend, runtime) = open(None);
    let stream = stream(&runtime);
    let pinned = runtime.pinned::<u8>(64).unwrap();
    backend.enqueue_use(stream.id(), address(&pinned));
    backend.fail_record(true);
    stream.note_host_use(pinned.ptr(), Access::Write).unwrap();
    assert!(!backend.is_in_use(address(&pinned)));
    backend.fail_record(false);
}

// ------------------------------------------------------------------------------------------------ captures and graphs

#[test]
fn what_a_graph_keeps_is_a_state_of_its_own_and_not_counted_for_the_cap() {
    let (backend, runtime) = open(Some(0));
    let stream = stream(&runtime);
    let (kept, other) = (runtime.pinned::<u8>(4 * KIB).unwrap(), runtime.pinned::<u8>(16 * KIB).unwrap());
    let device = runtime.device(0).unwrap().allocate(4 * KIB).unwrap();
    let at = address(&kept);
    let mut graph = stream.capture(|stream| stream.copy_to_device(&kept, &device)).unwrap();
    drop((kept, other));
    runtime.trim().unwrap();
    let statistics = host(&runtime);
    assert_eq!((statistics.graph_blocks, statistics.graph_bytes), (1, 4 * KIB as u64), "{statistics:?}");
    assert_eq!((statistics.held_blocks, statistics.free_blocks, statistics.waiting_blocks), (1, 0, 0));
    assert_eq!(runtime.pinned_block_of(HostPtr::new(std::ptr::NonNull::dangling())), None);
    graph.launch(&stream).unwrap();
    drop(graph);
    let statistics = host(&runtime);
    assert_eq!((statistics.graph_blocks, statistics.waiting_blocks), (0, 1), "its launch is not done");
    assert!(backend.has_host_block(at));
    stream.synchronize().unwrap();
    assert_eq!(host(&runtime).held_blocks, 0, "above the cap of 0");
    drop((stream, device));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn a_block_that_its_buffer_and_two_graphs_have_goes_back_once() {
    let (_backend, runtime) = open(None);
    let (first, second) = (stream(&runtime), stream(&runtime));
    let pinned = runtime.pinned::<u8>(4 * KIB).unwrap();
    let device = runtime.device(0).unwrap().allocate(4 * KIB).unwrap();
    // One of the graphs uses it on two streams, and several times.
    let one = first.capture(|first| {
        first.copy_to_device(&pinned, &device)?;
        first.copy_to_device(&pinned, &device)?;
        second.wait(&first.record()?)?;
        second.copy_to_device(&pinned, &device)?;
        second.note_host_use(pinned.ptr(), Access::Read)?;
        first.wait(&second.record()?)
    });
    let two = second.capture(|second| second.copy_to_device(&pinned, &device));
    drop(one);
    assert_eq!(host(&runtime).live_blocks, 1);
    drop(pinned);
    assert_eq!((host(&runtime).graph_blocks, host(&runtime).live_blocks), (1, 0));
    drop(two);
    assert_eq!((host(&runtime).graph_blocks, host(&runtime).free_blocks), (0, 1));
    drop((first, second, device));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn a_use_noted_in_a_capture_is_kept_by_it_and_by_its_launches() {
    let (backend, runtime) = open(None);
    let (stream, other) = (stream(&runtime), stream(&runtime));
    let mut pinned = runtime.pinned::<u8>(4 * KIB).unwrap();
    let at = address(&pinned);
    // Work from before the capture, which the launches wait for.
    backend.enqueue_use(other.id(), at);
    other.note_host_use(pinned.ptr(), Access::Read).unwrap();
    let mut graph = stream
        .capture(|stream| {
            backend.enqueue_use(stream.id(), at);
            // The backend panics where an event of core is recorded in the capture and asked after outside it.
            stream.note_host_use(pinned.ptr().offset(100), Access::Write)?;
            assert_eq!(pinned.write().unwrap_err().kind(), ErrorKind::Capture);
            Ok(())
        })
        .unwrap();
    assert_eq!(pinned.block().uses.completions(false).len(), 1, "a recorded use leaves no mark");
    assert_eq!(pinned.read().unwrap_err().kind(), ErrorKind::InvalidState, "a launch could race with the slice");
    graph.launch(&stream).unwrap();
    assert!(backend.is_in_use(at));
    pinned.write_with(|_| assert!(!backend.is_in_use(at))).unwrap();
    drop(pinned);
    assert_eq!((host(&runtime).graph_blocks, runtime.statistics().graphs.pinned_blocks), (1, 1));
    graph.launch(&stream).unwrap();
    drop(graph);
    runtime.trim().unwrap();
    assert_eq!(host(&runtime).waiting_blocks, 1, "the launch is not done");
    backend.advance(stream.id());
    backend.advance(other.id());
    runtime.trim().unwrap();
    assert_eq!(host(&runtime).held_blocks, 0);
    drop((stream, other));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn nothing_is_given_back_for_the_cap_in_a_capture_but_after_it() {
    let (_backend, runtime) = open(Some(0));
    let stream = stream(&runtime);
    let before = runtime.pinned::<u8>(4 * KIB).unwrap();
    let graph = stream.capture(|_| {
        drop(before);
        assert_eq!(host(&runtime).free_blocks, 1);
        Ok(())
    });
    assert_eq!(host(&runtime).held_blocks, 0);
    drop((graph, stream));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn broken_laws_are_named() {
    let sound = HostCacheStatistics { held_blocks: 1, live_blocks: 1, allocations: 1, misses: 1, ..Default::default() };
    assert_eq!(sound.broken_law(), None);
    let broken = [
        HostCacheStatistics { graph_blocks: 1, ..sound },
        HostCacheStatistics { graph_bytes: 1, ..sound },
        HostCacheStatistics { requested_bytes: 1, ..sound },
        HostCacheStatistics { frees: 1, ..sound },
        HostCacheStatistics { misses: 2, ..sound },
        HostCacheStatistics { cap_evictions: 1, ..sound },
    ];
    let mut laws: Vec<_> = broken.iter().map(|statistics| statistics.broken_law().unwrap()).collect();
    laws.dedup();
    assert_eq!(laws.len(), broken.len());
}
