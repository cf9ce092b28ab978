//! The pool of page-locked memory over a backend whose streams advance only when a test advances them. The backend panics when it
//! is called under a lock.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use highwater_mock::Operation;

use super::host::{HostCache, Reason, Request};
use super::host_memory::{Growth, Piece};
use super::host_options::HostMemoryOptions;
use super::ranges::{Borders, PAGE};
use crate::testing::ManualBackend;
use crate::{Access, ErrorKind, HostCacheStatistics, HostPtr, PinnedBuffer, Runtime, RuntimeOptions, Stream};
use highwater_hal::fork::Generation;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
/// The smallest piece.
const PIECE: usize = 2 << 20;

fn open(cap: Option<u64>) -> (Arc<ManualBackend>, Runtime) {
    open_over(ManualBackend::new(), cap)
}

fn open_over(backend: Arc<ManualBackend>, cap: Option<u64>) -> (Arc<ManualBackend>, Runtime) {
    let host_memory = HostMemoryOptions { idle_cap_bytes: cap, ..HostMemoryOptions::new() };
    let options = RuntimeOptions::new().with_host_memory(host_memory);
    let runtime = Runtime::with_options(backend.clone(), &options).unwrap();
    backend.watch_locks_of(&runtime);
    (backend, runtime)
}

/// A backend that registers memory in pieces of 2 MiB.
fn registering() -> Arc<ManualBackend> {
    ManualBackend::with_capabilities(|can| {
        can.host_register = true;
        can.register_piece_bytes = PIECE;
    })
}

fn host(runtime: &Runtime) -> HostCacheStatistics {
    let host = runtime.statistics().host;
    assert_eq!(host.broken_law(), None, "{host:?}");
    host
}

/// The bytes that the cap bounds.
fn idle(host: &HostCacheStatistics) -> u64 {
    host.free_bytes + host.waiting_bytes + host.cached_bytes
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
fn the_cap_releases_the_highest_free_piece_and_no_more_than_it_must() {
    let (backend, runtime) = open(Some(4 * PIECE as u64));
    let buffers = [1, 2, 1, 2].map(|pieces| runtime.pinned::<u8>(pieces * PIECE).unwrap());
    let at: Vec<u64> = buffers.iter().map(address).collect();
    let [first, second, third, last] = buffers;
    drop(second);
    drop(third);
    drop(first);
    assert_eq!((idle(&host(&runtime)), host(&runtime).cap_evictions), (4 * PIECE as u64, 0), "within the cap");
    drop(last);
    let alive: Vec<bool> = at.iter().map(|&address| backend.has_host_block(address)).collect();
    assert_eq!(alive, [true, true, true, false]);
    let statistics = host(&runtime);
    assert_eq!((idle(&statistics), statistics.cap_evictions, statistics.frees), (4 * PIECE as u64, 1, 1));
    // What is kept serves any size.
    let buffers: Vec<_> = (0..4 * PIECE / (64 * KIB)).map(|_| runtime.pinned::<u8>(64 * KIB).unwrap()).collect();
    assert_eq!(host(&runtime).misses, 4);
    drop(buffers);
    assert!(idle(&host(&runtime)) <= 4 * PIECE as u64);
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn a_block_larger_than_the_cap_does_not_drive_out_the_others() {
    let (backend, runtime) = open(Some(2 * PIECE as u64));
    let small = runtime.pinned::<u8>(PIECE).unwrap();
    let large = runtime.pinned::<u8>(4 * PIECE).unwrap();
    let (small_at, large_at) = (address(&small), address(&large));
    drop((small, large));
    assert!(backend.has_host_block(small_at) && !backend.has_host_block(large_at));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn a_live_buffer_is_never_refused_for_the_cap_and_a_cap_of_0_caches_nothing() {
    let (_backend, runtime) = open(Some(0));
    let mut buffers: Vec<_> = (0..30).map(|_| runtime.pinned::<u8>(100 * KIB).unwrap()).collect();
    let statistics = host(&runtime);
    assert_eq!((statistics.live_blocks, statistics.pieces, statistics.cap_evictions), (30, 2, 0));
    assert!(statistics.requested_bytes == 3000 * KIB as u64 && statistics.live_bytes >= statistics.requested_bytes);
    // A piece with live buffers stays. No thread keeps a block beside it.
    buffers.truncate(10);
    let statistics = host(&runtime);
    assert_eq!((statistics.pieces, statistics.cached_bytes, statistics.cap_evictions), (1, 0, 1));
    drop(buffers);
    let statistics = host(&runtime);
    assert_eq!((statistics.pieces, statistics.held_bytes, statistics.cap_evictions), (0, 0, 2));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn blocks_above_the_cap_that_streams_use_are_given_back_once_they_are_done() {
    const BLOCKS: usize = 20;
    const CAP: u64 = 4 * PIECE as u64;
    let (backend, runtime) = open(Some(CAP));
    let (stuck, other) = (stream(&runtime), stream(&runtime));
    let held: Vec<_> = (0..BLOCKS).map(|_| used(&runtime, &stuck, PIECE)).collect();
    let later: Vec<_> = (0..BLOCKS).map(|_| used(&runtime, &other, PIECE)).collect();
    drop((held, later));
    let statistics = host(&runtime);
    assert_eq!((statistics.waiting_blocks, statistics.cap_evictions), (2 * BLOCKS as u64, 0), "all are in use");
    // The stuck ones hold up no others.
    backend.advance(other.id());
    drop(runtime.pinned::<u8>(2 * PIECE).unwrap());
    let statistics = host(&runtime);
    assert_eq!((statistics.waiting_blocks, idle(&statistics)), (BLOCKS as u64, statistics.waiting_bytes));
    // Waiting for a stream is an occasion too.
    stuck.synchronize().unwrap();
    assert_eq!(idle(&host(&runtime)), CAP);
    drop((stuck, other));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn what_threads_keep_counts_for_the_cap() {
    const CAP: u64 = PIECE as u64 + 64 * KIB as u64;
    let (_backend, runtime) = open(Some(CAP));
    let kept = || {
        let buffers: Vec<_> = (0..40).map(|_| runtime.pinned::<u8>(64 * KIB).unwrap()).collect();
        drop(buffers);
        assert!(idle(&host(&runtime)) <= CAP, "{:?}", host(&runtime));
    };
    kept();
    thread::scope(|scope| (0..4).for_each(|_| scope.spawn(kept).join().unwrap()));
    kept();
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn the_cap_on_all_memory_refuses_with_its_numbers_and_after_idle_memory_was_released() {
    let backend = ManualBackend::new();
    let host_memory = HostMemoryOptions::new().with_cap_bytes(8 * MIB as u64);
    let runtime = Runtime::with_options(backend.clone(), &RuntimeOptions::new().with_host_memory(host_memory)).unwrap();
    backend.watch_locks_of(&runtime);
    let half = runtime.pinned::<u8>(4 * MIB).unwrap();
    drop(runtime.pinned::<u8>(3 * MIB).unwrap());
    let error = runtime.pinned::<u8>(6 * MIB).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    for number in [6 * MIB, 4 * MIB, 8 * MIB] {
        assert!(error.message().contains(&number.to_string()), "{error}");
    }
    drop(half);
    assert_eq!(runtime.pinned::<u8>(8 * MIB).unwrap().len(), 8 * MIB, "the idle memory was released for it");
    assert!(host(&runtime).peak_held_bytes <= 8 * MIB as u64, "{:?}", host(&runtime));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn a_request_larger_than_the_cap_is_not_temporary_and_releases_nothing() {
    let backend = ManualBackend::new();
    let host_memory = HostMemoryOptions::new().with_cap_bytes(8 * MIB as u64);
    let runtime = Runtime::with_options(backend, &RuntimeOptions::new().with_host_memory(host_memory)).unwrap();
    drop(runtime.pinned::<u8>(3 * MIB).unwrap());
    let held = host(&runtime).held_bytes;
    let error = runtime.pinned::<u8>(8 * MIB + 1).unwrap_err();
    assert_eq!((error.kind(), error.is_temporary()), (ErrorKind::InvalidArgument, false));
    for number in [8 * MIB + 1, 8 * MIB] {
        assert!(error.message().contains(&number.to_string()), "{error}");
    }
    assert_eq!((host(&runtime).held_bytes, host(&runtime).exhaustion_frees), (held, 0));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn memory_that_is_idle_for_the_set_time_is_released_by_a_later_call() {
    let backend = ManualBackend::new();
    let host_memory = HostMemoryOptions::new().with_idle_time(Duration::from_millis(20));
    let runtime = Runtime::with_options(backend.clone(), &RuntimeOptions::new().with_host_memory(host_memory)).unwrap();
    backend.watch_locks_of(&runtime);
    let (stream, live) = (stream(&runtime), runtime.pinned::<u8>(MIB).unwrap());
    drop(runtime.pinned::<u8>(6 * MIB).unwrap());
    assert_eq!(host(&runtime).held_bytes, 8 * MIB as u64);
    thread::sleep(Duration::from_millis(60));
    stream.synchronize().unwrap();
    assert_eq!(host(&runtime).held_bytes, 2 * MIB as u64, "the piece of the live buffer");
    drop((live, stream));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn thread_caches_are_emptied_before_the_pool_grows() {
    let (_backend, runtime) = open(None);
    let (ready, go) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
    thread::scope(|scope| {
        scope.spawn(|| {
            let buffers: Vec<_> = (0..32).map(|_| runtime.pinned::<u8>(64 * KIB).unwrap()).collect();
            drop(buffers);
            ready.wait();
            go.wait();
        });
        ready.wait();
        assert_eq!((host(&runtime).cached_blocks, host(&runtime).free_bytes), (32, 0));
        assert_eq!(runtime.pinned::<u8>(2 * MIB).unwrap().len(), 2 * MIB);
        assert_eq!((host(&runtime).misses, host(&runtime).held_bytes), (1, 2 * MIB as u64));
        go.wait();
    });
    assert_eq!(runtime.close().unwrap().total(), 0);
}

// ------------------------------------------------------------------------------------------------ pieces

#[test]
fn pieces_are_registered_and_unregistered_under_no_lock_and_only_when_every_one_is_unused() {
    let (backend, runtime) = open_over(registering(), Some(0));
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
    assert_eq!((host(&runtime).held_bytes, backend.live_host_blocks()), (0, 0));
    drop((buffer, stream));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn a_trim_releases_every_free_piece_and_no_piece_of_a_live_buffer() {
    for backend in [ManualBackend::new(), registering()] {
        let (backend, runtime) = open_over(backend, None);
        let mut buffers: Vec<_> = (0..5).map(|_| runtime.pinned::<u8>(PIECE).unwrap()).collect();
        let small = runtime.pinned::<u8>(1).unwrap();
        let kept = buffers.remove(2);
        drop(buffers);
        runtime.trim().unwrap();
        let statistics = host(&runtime);
        assert_eq!((statistics.pieces, backend.live_host_blocks(), statistics.cached_bytes), (2, 2, 0));
        assert!(backend.has_host_block(address(&kept)) && backend.has_host_block(address(&small)));
        // The places of the released pieces are used again.
        let again: Vec<_> = (0..4).map(|_| runtime.pinned::<u8>(PIECE).unwrap()).collect();
        assert_eq!(host(&runtime).pieces, 6);
        drop((kept, small, again));
        runtime.trim().unwrap();
        assert_eq!((host(&runtime).held_bytes, host(&runtime).peak_held_bytes), (0, 6 * PIECE as u64));
        assert_eq!(runtime.close().unwrap().total(), 0);
    }
}

#[test]
fn a_refused_release_leaves_the_piece_in_the_pool_and_is_tried_again() {
    for (backend, release) in [(ManualBackend::new(), Operation::HostFree), (registering(), Operation::HostUnregister)]
    {
        for cap in [None, Some(0)] {
            let (backend, runtime) = open_over(backend.clone(), cap);
            backend.gpu.fail_by_chance(release, 1_000_000, ErrorKind::Vendor).unwrap();
            drop(runtime.pinned::<u8>(100 * KIB).unwrap());
            assert_eq!(runtime.trim().unwrap_err().kind(), ErrorKind::Vendor);
            let statistics = host(&runtime);
            assert_eq!((statistics.pieces, statistics.frees, statistics.cap_evictions), (1, 0, 0));
            assert_eq!(statistics.free_bytes, PIECE as u64);
            assert!(runtime.statistics().failed_releases > u64::from(cap.is_some()), "each is counted");
            backend.gpu.fail_by_chance(release, 0, ErrorKind::Vendor).unwrap();
            let held = runtime.pinned::<u8>(100 * KIB).unwrap();
            // The piece serves requests as before.
            assert_eq!((host(&runtime).hits, host(&runtime).misses), (1, 1));
            drop(held);
            runtime.trim().unwrap();
            assert_eq!((host(&runtime).held_bytes, host(&runtime).frees, backend.live_host_blocks()), (0, 1, 0));
            assert_eq!(runtime.close().unwrap().total(), 0);
        }
    }
}

/// The bookkeeping alone: pieces at addresses that no code accesses.
fn piece(number: usize) -> Piece {
    let address = std::ptr::without_provenance_mut((1 << 30) + number * PIECE);
    Piece { ptr: HostPtr::new(NonNull::new(address).unwrap()), bytes: PIECE }
}

fn request(pages: u32) -> Request {
    Request { pages, bytes: pages as usize * PAGE, borders: Borders::Allowed }
}

/// Grows by these pieces for a request of as much. Returns the first page of its block.
fn grow(cache: &HostCache, pieces: &[Piece]) -> u32 {
    let pages = (pieces.len() * PIECE / PAGE) as u32;
    let request = request(pages);
    let turn = cache.begin_growth(request, None).expect_err("nothing is free");
    let plan = cache.plan_growth(request, &turn).unwrap();
    let growth = Growth { pieces: pieces.to_vec(), refused: None };
    let block = cache.add(&growth, &plan, request, None).unwrap();
    assert_eq!(block.ptr, pieces[0].ptr);
    let start = block.run().start;
    block.uses.end_life();
    cache.give_back(block);
    start
}

#[test]
fn nothing_is_placed_over_a_remnant_until_it_is_gone() {
    const PAGES: u32 = (PIECE / PAGE) as u32;
    let cache = HostCache::new(&HostMemoryOptions::new(), Some(PIECE), Generation::current());
    grow(&cache, &[piece(0), piece(1), piece(2)]);
    let mut below = u32::MAX;
    let leaving: Vec<_> = std::iter::from_fn(|| cache.take_piece(&mut below)).collect();
    assert_eq!(leaving.len(), 3);
    // From the last to the first: the middle one is a remnant.
    for (index, leaving) in leaving.into_iter().enumerate() {
        cache.has_left(leaving, index == 1, Reason::Trim);
    }
    // The counts of buffers are the pool's, which is not here.
    let statistics = cache.statistics();
    assert_eq!((statistics.held_bytes, statistics.remnant_blocks, statistics.remnant_bytes), (0, 1, PIECE as u64));
    let turn = cache.begin_growth(request(PAGES), None).unwrap_err();
    let plan = cache.plan_growth(request(2 * PAGES), &turn).unwrap();
    assert!(plan.hole.is_none(), "the places beside the remnant are one piece each: {plan:?}");
    assert_eq!(plan.last, Some(piece(1)), "behind the remnant");
    drop(turn);
    for remnant in cache.take_remnants() {
        assert_eq!(remnant.piece, piece(1));
        cache.remnant_has_left(remnant);
    }
    assert_eq!((cache.statistics().remnant_blocks, cache.statistics().frees), (0, 3));
    // All places are gone with it.
    assert_eq!(grow(&cache, &[piece(0), piece(1)]), 0);
}

// ------------------------------------------------------------------------------------------------ streams

#[test]
fn a_stuck_stream_holds_up_its_own_block_and_no_others() {
    let (backend, runtime) = open(None);
    let (stuck, other) = (stream(&runtime), stream(&runtime));
    let held = used(&runtime, &stuck, 4 * KIB);
    let stuck_at = address(&held);
    drop(held);
    for _ in 0..1000 {
        let pinned = used(&runtime, &other, 4 * KIB);
        assert_ne!(address(&pinned), stuck_at);
        drop(pinned);
        backend.advance(other.id());
    }
    let statistics = host(&runtime);
    // The others are free as soon as their stream is done, so the first piece serves them all.
    assert_eq!((statistics.allocations, statistics.misses, statistics.hits), (1, 1, 1000));
    assert!(backend.is_in_use(stuck_at));
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
    assert_eq!(host(&runtime).held_bytes, 0);
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
    // Cached, not live: no buffer owns the block.
    let dropped = pinned.ptr();
    drop(pinned);
    assert_eq!(host(&runtime).cached_blocks, 1);
    refused(dropped);
    // A refusal leaves nothing behind.
    assert_eq!((host(&runtime).cached_blocks, host(&runtime).graph_blocks), (1, 0));
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

#[test]
fn a_block_whose_end_of_use_is_unknown_is_kept_until_the_end_of_the_runtime() {
    let (backend, runtime) = open(Some(0));
    let stream = stream(&runtime);
    let pinned = runtime.pinned::<u8>(4 * KIB).unwrap();
    let at = address(&pinned);
    backend.enqueue_use(stream.id(), at);
    backend.fail_record(true);
    backend.gpu.fail_call(Operation::SynchronizeStream, 1, ErrorKind::Vendor).unwrap();
    stream.note_host_use(pinned.ptr(), Access::Write).unwrap_err();
    backend.fail_record(false);
    assert_eq!(pinned.read().unwrap_err().kind(), ErrorKind::InvalidState);
    drop(pinned);
    backend.advance(stream.id());
    runtime.trim().unwrap();
    let statistics = host(&runtime);
    assert_eq!((statistics.unmarked_blocks, statistics.unmarked_bytes), (1, 4 * KIB as u64));
    assert_ne!(address(&runtime.pinned::<u8>(4 * KIB).unwrap()), at, "it is given to nobody");
    drop(stream);
    assert_eq!(runtime.close().unwrap().total(), 0);
}

/// Threads note uses by address while the buffers end. A note is refused, or the block is not given out before its stream is
/// done.
#[test]
fn notes_by_address_race_with_the_end_of_their_buffers() {
    const ROUNDS: usize = 300;
    let backend = ManualBackend::new();
    let runtime = Runtime::new(backend.clone()).unwrap();
    let noted: usize = thread::scope(|scope| {
        let noters: Vec<_> = (0..2)
            .map(|_| {
                let (sender, addresses) = mpsc::sync_channel::<usize>(0);
                let stream = stream(&runtime);
                let runtime = &runtime;
                let noter = scope.spawn(move || {
                    let mut noted = 0;
                    for address in addresses {
                        let ptr = HostPtr::new(NonNull::new(std::ptr::with_exposed_provenance_mut(address)).unwrap());
                        match stream.note_host_use(ptr, Access::Write) {
                            Ok(()) => noted += 1,
                            Err(error) => assert_eq!(error.kind(), ErrorKind::InvalidPointer, "{error}"),
                        }
                        if noted % 4 == 0 {
                            stream.synchronize().unwrap();
                        }
                        let _ = runtime.pinned_block_of(ptr);
                    }
                    noted
                });
                (sender, noter)
            })
            .collect();
        for round in 0..ROUNDS {
            // Small ones go to the thread's cache, large ones back to the pool.
            let bytes = if round % 3 == 0 { 100 * KIB } else { 4 * KIB };
            let pinned = runtime.pinned::<u8>(bytes).unwrap();
            let at = pinned.ptr().as_ptr().expose_provenance();
            noters.iter().for_each(|(sender, _)| sender.send(at).unwrap());
            (0..round % 7).for_each(|_| thread::yield_now());
            drop(pinned);
            let next = runtime.pinned::<u8>(bytes).unwrap();
            assert!(next.block().uses.is_live());
            drop(next);
        }
        noters
            .into_iter()
            .map(|(sender, noter)| {
                drop(sender);
                noter.join().unwrap()
            })
            .sum()
    });
    assert!(noted > 0, "every note came too late");
    let statistics = host(&runtime);
    assert_eq!((statistics.live_blocks, statistics.graph_blocks, statistics.unmarked_blocks), (0, 0, 0));
    runtime.trim().unwrap();
    assert_eq!((host(&runtime).waiting_blocks, host(&runtime).held_bytes), (0, 0));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

// ------------------------------------------------------------------------------------------------ captures and graphs

#[test]
fn what_a_graph_keeps_is_a_state_of_its_own_and_not_counted_for_the_cap() {
    let (backend, runtime) = open(Some(0));
    let stream = stream(&runtime);
    let (kept, other) = (runtime.pinned::<u8>(PIECE).unwrap(), runtime.pinned::<u8>(2 * PIECE).unwrap());
    let device = runtime.device(0).unwrap().allocate(PIECE).unwrap();
    let at = address(&kept);
    let mut graph = stream.capture(|stream| stream.copy_to_device(&kept, &device)).unwrap();
    drop((kept, other));
    runtime.trim().unwrap();
    let statistics = host(&runtime);
    assert_eq!((statistics.graph_blocks, statistics.graph_bytes), (1, PIECE as u64), "{statistics:?}");
    assert_eq!((statistics.pieces, idle(&statistics), statistics.waiting_blocks), (1, 0, 0));
    assert_eq!(runtime.pinned_block_of(HostPtr::new(std::ptr::NonNull::dangling())), None);
    graph.launch(&stream).unwrap();
    drop(graph);
    let statistics = host(&runtime);
    assert_eq!((statistics.graph_blocks, statistics.waiting_blocks), (0, 1), "its launch is not done");
    assert!(backend.has_host_block(at));
    stream.synchronize().unwrap();
    assert_eq!(host(&runtime).held_bytes, 0, "above the cap of 0");
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
    assert_eq!((host(&runtime).graph_blocks, host(&runtime).free_bytes), (0, host(&runtime).held_bytes));
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
    assert_eq!(host(&runtime).held_bytes, 0);
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
        assert_eq!((host(&runtime).pieces, host(&runtime).cap_evictions), (1, 0));
        Ok(())
    });
    assert_eq!(host(&runtime).held_bytes, 0);
    drop((graph, stream));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn broken_laws_are_named() {
    let held = HostCacheStatistics { held_bytes: 1, live_bytes: 1, requested_bytes: 1, ..Default::default() };
    let held = HostCacheStatistics { live_blocks: 1, peak_held_bytes: 1, peak_live_bytes: 1, ..held };
    let sound = HostCacheStatistics { pieces: 1, allocations: 1, misses: 1, ..held };
    assert_eq!(sound.broken_law(), None);
    let broken = [
        HostCacheStatistics { requested_bytes: 2, ..sound },
        HostCacheStatistics { rounding_bytes: 1, requested_bytes: 0, live_blocks: 0, ..sound },
        HostCacheStatistics { inbox_bytes: 1, ..sound },
        HostCacheStatistics { inbox_blocks: 1, ..sound },
        HostCacheStatistics { inbox_hits: 1, ..sound },
        HostCacheStatistics { allocations: 2, ..sound },
        HostCacheStatistics { misses: 2, ..sound },
        HostCacheStatistics { exhaustion_frees: 1, ..sound },
        HostCacheStatistics { peak_held_bytes: 0, ..sound },
        HostCacheStatistics { peak_live_bytes: 0, ..sound },
        HostCacheStatistics { peak_live_bytes: 2, ..sound },
        HostCacheStatistics { held_bytes: 0, ..sound },
    ];
    // Every state counts.
    for broken in [
        HostCacheStatistics { graph_bytes: 1, ..sound },
        HostCacheStatistics { waiting_bytes: 1, ..sound },
        HostCacheStatistics { unmarked_bytes: 1, ..sound },
        HostCacheStatistics { cached_bytes: 1, ..sound },
        HostCacheStatistics { free_bytes: 1, ..sound },
    ] {
        assert!(broken.broken_law().is_some_and(|law| law.starts_with("held_bytes = ")));
    }
    let mut laws: Vec<_> = broken.iter().map(|statistics| statistics.broken_law().unwrap()).collect();
    laws.dedup();
    assert_eq!(laws.len(), broken.len());
}
