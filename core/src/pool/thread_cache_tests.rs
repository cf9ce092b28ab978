//! The thread caches of real threads: their ends, blocks that other threads drop, and who ends the runtime.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Weak, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::thread_cache;
use crate::runtime::RuntimeInner;
use crate::testing::ManualBackend;
use crate::{Access, Backend, ErrorKind, HostCacheStatistics, PinnedBuffer, Runtime, RuntimeOptions};

const KIB: usize = 1 << 10;
const PIECE: usize = 2 << 20;

fn open() -> (Arc<ManualBackend>, Runtime) {
    let backend = ManualBackend::new();
    (backend.clone(), Runtime::new(backend).unwrap())
}

fn host(runtime: &Runtime) -> HostCacheStatistics {
    let host = runtime.statistics().host;
    assert_eq!(host.broken_law(), None, "{host:?}");
    host
}

/// The number of thread caches that the pool of the calling thread's last cache knows.
fn registered() -> usize {
    let mine = thread_cache::mine();
    mine.last().map_or(0, |mine| mine.cache.registry.lock().caches_of(mine.cache.id).count())
}

/// The inner part of a runtime, which is dead once the runtime has ended.
fn inner(runtime: &Runtime) -> Weak<RuntimeInner> {
    Arc::downgrade(&runtime.inner.0)
}

fn has_ended(backend: &ManualBackend, inner: &Weak<RuntimeInner>) -> bool {
    inner.upgrade().is_none() && backend.gpu.live_objects().total() == 0
}

// ------------------------------------------------------------------------------------------------ threads

#[test]
fn a_thread_that_ends_leaves_no_block_and_its_counts() {
    for cap in [None, Some(0), Some(PIECE as u64 + 100 * KIB as u64)] {
        let backend = ManualBackend::new();
        let mut options = RuntimeOptions::new();
        options.host_memory.idle_cap_bytes = cap;
        let runtime = Runtime::with_options(backend, &options).unwrap();
        let survivor = thread::scope(|scope| {
            let work = || {
                for round in 1..40 {
                    drop(runtime.pinned::<u8>(round % 5 * 10 * KIB).unwrap());
                }
                runtime.pinned::<u8>(KIB).unwrap()
            };
            scope.spawn(work).join().unwrap()
        });
        let statistics = host(&runtime);
        assert_eq!((statistics.cached_blocks, statistics.cached_bytes, statistics.live_blocks), (0, 0, 1));
        assert_eq!(
            statistics.free_bytes,
            statistics.held_bytes - statistics.live_bytes - statistics.slab_bytes,
            "all of it has merged"
        );
        assert_eq!(statistics.hits + statistics.misses, 40, "no request is forgotten");
        // Its home is gone.
        drop(survivor);
        let statistics = host(&runtime);
        assert_eq!((statistics.cached_blocks, statistics.live_blocks), (0, 0));
        assert_eq!(runtime.close().unwrap().total(), 0);
    }
}

#[test]
fn a_buffer_that_another_thread_drops_returns_to_its_own_thread() {
    let (_backend, runtime) = open();
    let pinned = runtime.pinned::<u8>(KIB).unwrap();
    let at = pinned.ptr();
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            drop(pinned);
            assert_eq!((host(&runtime).cached_blocks, host(&runtime).live_blocks), (1, 0), "in the inbox");
            let own = runtime.pinned::<u8>(KIB).unwrap();
            assert_ne!(own.ptr(), at, "another thread's block");
        });
        other.join().unwrap();
    });
    assert_eq!(runtime.pinned::<u8>(KIB).unwrap().ptr(), at);
    assert_eq!(runtime.close().unwrap().total(), 0);
}

/// A producer and a consumer, as in a data loader: memory is reused in each round, and the pool does not grow.
#[test]
fn a_thread_keeps_the_many_small_blocks_that_another_thread_drops_at_a_time() {
    let (_, runtime) = open();
    let take = || (0..500).map(|_| runtime.pinned::<u8>(4 * KIB).unwrap()).collect::<Vec<_>>();
    for _ in 0..2 {
        let blocks = take();
        thread::scope(|scope| scope.spawn(|| drop(blocks)).join().unwrap());
    }
    let before = host(&runtime);
    let blocks = take();
    let after = host(&runtime);
    assert_eq!((after.cache_hits + after.inbox_hits) - (before.cache_hits + before.inbox_hits), 500);
    drop(blocks);
    assert_eq!(host(&runtime).cached_blocks, 500);
}

/// Otherwise each block that a starting thread takes waits for the lock.
#[test]
fn a_thread_that_starts_beside_others_takes_small_blocks_ahead() {
    let (_backend, runtime) = open();
    // Returns how often the pool's lock was taken, and the bytes held.
    let take = |bytes: usize, count: usize, is_contended: bool| {
        let before = host(&runtime);
        let request = || {
            if !is_contended {
                return runtime.pinned::<u8>(bytes).unwrap();
            }
            let (held, is_served) = (Barrier::new(2), AtomicBool::new(false));
            thread::scope(|scope| {
                scope.spawn(|| {
                    let locks = runtime.inner.pinned.hold_locks();
                    held.wait();
                    // Long enough for the other thread to wait for the lock, unless its cache serves it.
                    let start = Instant::now();
                    while !is_served.load(Ordering::Relaxed) && start.elapsed() < Duration::from_millis(40) {
                        thread::yield_now();
                    }
                    drop(locks);
                });
                held.wait();
                let block = runtime.pinned::<u8>(bytes).unwrap();
                is_served.store(true, Ordering::Relaxed);
                block
            })
        };
        let blocks: Vec<_> = (0..count).map(|_| request()).collect();
        let after = host(&runtime);
        drop(blocks);
        runtime.trim().unwrap();
        (after.free_hits + after.misses - before.free_hits - before.misses, after.held_bytes)
    };
    assert_eq!(take(4 * KIB, 100, false).0, 100, "no other thread wants the lock");
    // With 0, 1, 2, 4, 8, 16 and 32 blocks ahead.
    assert_eq!(take(8 * KIB, 100, true).0, 8);
    // With 0, 1, 2, 4 and 4.
    assert_eq!(take(64 * KIB, 16, true).0, 5, "256 KiB at most");
    assert_eq!(take(68 * KIB, 10, true).0, 10, "not a small size");
    // Nothing is taken ahead that would need a growth.
    assert_eq!(take(64 * KIB, PIECE / (64 * KIB), true).1, PIECE as u64);
}

#[test]
fn a_thread_keeps_at_most_4_mib_of_small_blocks_of_a_size() {
    let (_, runtime) = open();
    for (bytes, kept) in [(64 * KIB, 64), (4 * KIB, 1024), (KIB, 1024)] {
        drop((0..1100).map(|_| runtime.pinned::<u8>(bytes).unwrap()).collect::<Vec<_>>());
        assert_eq!(host(&runtime).cached_bytes, (kept * bytes) as u64);
        runtime.trim().unwrap();
    }
}

#[test]
fn buffers_go_from_thread_to_thread_and_the_pool_does_not_grow() {
    for bytes in [4 * KIB, 300 * KIB] {
        let (_backend, runtime) = open();
        let (sender, receiver) = mpsc::sync_channel::<PinnedBuffer<u8>>(4);
        thread::scope(|scope| {
            let runtime = &runtime;
            let allocating = scope.spawn(move || {
                for round in 0..2000_usize {
                    let mut pinned = runtime.pinned::<u8>(bytes).unwrap();
                    pinned.write().unwrap()[0] = round as u8;
                    sender.send(pinned).unwrap();
                }
            });
            for (round, pinned) in receiver.into_iter().enumerate() {
                assert_eq!(pinned.read().unwrap()[0], round as u8);
            }
            // The end of a scope does not wait for the destructors of a thread's locals; a join does.
            allocating.join().unwrap();
        });
        let statistics = host(&runtime);
        assert!(statistics.peak_held_bytes <= 2 * PIECE as u64, "{statistics:?}");
        assert_eq!((statistics.live_blocks, statistics.cached_blocks), (0, 0), "both threads have ended");
        assert_eq!(runtime.close().unwrap().total(), 0);
    }
}

/// What a thread leaves to the destructors of its locals.
struct Left {
    runtime: Option<Runtime>,
    buffers: Vec<PinnedBuffer<u8>>,
}

impl Drop for Left {
    fn drop(&mut self) {
        // A request in the destructor of a local works too, whether the thread's cache is gone or not.
        if let Some(runtime) = &self.runtime {
            let mut pinned = runtime.pinned::<u8>(KIB).unwrap();
            pinned.write().unwrap().fill(1);
            assert_eq!(pinned.read().unwrap(), [1; KIB]);
            self.buffers.push(pinned);
        }
        self.buffers.clear();
        self.runtime = None;
    }
}

thread_local! {
    static LEFT: RefCell<Left> = const { RefCell::new(Left { runtime: None, buffers: Vec::new() }) };
}

/// Leaves buffers to a thread's locals, of which the cache is the first to be dropped, or the last.
fn leave_to_locals(runtime: Runtime, is_cache_first: bool, keeps_runtime: bool) {
    // Locals are dropped in some order of their first uses.
    if is_cache_first {
        LEFT.with_borrow(|_| ());
    }
    let buffers: Vec<_> = [KIB, 50 * KIB, PIECE, KIB].map(|bytes| runtime.pinned::<u8>(bytes).unwrap()).into();
    drop(runtime.pinned::<u8>(KIB).unwrap());
    LEFT.with_borrow_mut(|left| {
        left.buffers = buffers;
        left.runtime = keeps_runtime.then_some(runtime);
    });
}

#[test]
fn buffers_that_the_locals_of_a_thread_own_are_returned_after_its_cache_has_ended() {
    for is_cache_first in [true, false] {
        let (_backend, runtime) = open();
        let of_thread = runtime.clone();
        thread::spawn(move || leave_to_locals(of_thread, is_cache_first, true)).join().unwrap();
        let statistics = host(&runtime);
        assert_eq!((statistics.live_blocks, statistics.cached_blocks), (0, 0));
        assert_eq!((statistics.free_bytes, statistics.requested_bytes), (statistics.held_bytes, 0));
        assert_eq!(statistics.hits + statistics.misses, 6);
        assert_eq!(runtime.close().unwrap().total(), 0);
    }
}

#[test]
fn the_locals_of_a_thread_end_the_runtime() {
    for is_cache_first in [true, false] {
        for keeps_runtime in [true, false] {
            let (backend, runtime) = open();
            let inner = inner(&runtime);
            thread::spawn(move || leave_to_locals(runtime, is_cache_first, keeps_runtime)).join().unwrap();
            assert!(has_ended(&backend, &inner), "cache first: {is_cache_first}, with runtime: {keeps_runtime}");
        }
    }
}

// ------------------------------------------------------------------------------------------------ growth

#[test]
fn thousands_of_threads_leave_nothing_behind() {
    let (_backend, runtime) = open();
    drop(runtime.pinned::<u8>(KIB).unwrap());
    for round in 0..3000_usize {
        let runtime = &runtime;
        let pinned = thread::scope(|scope| {
            scope.spawn(move || runtime.pinned::<u8>(round % 4 * 30 * KIB).unwrap()).join().unwrap()
        });
        drop(pinned);
    }
    assert_eq!(registered(), 1);
    let statistics = host(&runtime);
    assert_eq!((statistics.pieces, statistics.hits + statistics.misses), (1, 3001));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn a_thread_forgets_runtimes_that_have_ended() {
    let (_backend, lasting) = open();
    drop(lasting.pinned::<u8>(KIB).unwrap());
    let backend = ManualBackend::new();
    for round in 0..100 {
        let runtime = Runtime::new(backend.clone()).unwrap();
        let pinned = runtime.pinned::<u8>(KIB).unwrap();
        if round % 2 == 0 {
            drop(pinned);
            assert_eq!(runtime.close().unwrap().total(), 0);
        } else {
            drop(runtime);
            drop(pinned);
        }
        assert!(thread_cache::mine().len() <= 3, "{}", thread_cache::mine().len());
    }
    assert_eq!(backend.gpu.live_objects().total(), 0);
    // The cache of the runtime that lasts is still found.
    drop(lasting.pinned::<u8>(KIB).unwrap());
    assert_eq!((host(&lasting).hits, host(&lasting).misses), (1, 1));
}

/// Hits of one thread alternate between two runtimes.
#[test]
fn a_thread_has_a_cache_for_each_runtime() {
    let (_backend, first) = open();
    let (_other, second) = open();
    let at = [&first, &second].map(|runtime| runtime.pinned::<u8>(KIB).unwrap().ptr());
    for _ in 0..10 {
        assert_eq!([&first, &second].map(|runtime| runtime.pinned::<u8>(KIB).unwrap().ptr()), at);
    }
    assert_eq!((host(&first).hits, host(&second).hits), (10, 10));
    assert_eq!(first.close().unwrap().total(), 0);
    assert_eq!(second.pinned::<u8>(KIB).unwrap().ptr(), at[1]);
}

/// Its streams have done none of its copies, so no block of it is free.
#[test]
fn a_thread_that_is_behind_leaves_the_caches_of_others_alone() {
    const COPIES: usize = 2000;
    let (_backend, runtime) = open();
    let device = runtime.device(0).unwrap();
    let (stream, copy) = (device.create_stream().unwrap(), device.allocate::<u8>(4 * KIB).unwrap());
    let (cached, ended) = (Barrier::new(2), Barrier::new(2));
    thread::scope(|scope| {
        scope.spawn(|| {
            drop(runtime.pinned::<u8>(8 * KIB).unwrap());
            cached.wait();
            ended.wait();
        });
        cached.wait();
        for _ in 0..COPIES {
            stream.copy_to_device(&runtime.pinned::<u8>(4 * KIB).unwrap(), &copy).unwrap();
        }
        let host = host(&runtime);
        ended.wait();
        assert_eq!((host.cached_blocks, host.waiting_blocks), (1, COPIES as u64));
        assert!(host.held_bytes <= (COPIES * 4 * KIB + (4 << 20)) as u64, "{host:?}");
    });
    drop((stream, copy, device));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

// ------------------------------------------------------------------------------------------------ the end of the runtime

#[test]
fn a_runtime_ends_beside_threads_that_still_have_caches_of_it() {
    const THREADS: usize = 4;
    let (backend, runtime) = open();
    let (cached, ended) = (Barrier::new(THREADS + 1), Barrier::new(THREADS + 1));
    // A request that finds no free memory, because another thread is about to add it, empties the caches of all threads.
    let turn = Mutex::new(());
    let (backend, cached, ended, turn) = (&backend, &cached, &ended, &turn);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            let runtime = runtime.clone();
            scope.spawn(move || {
                let turn = turn.lock();
                drop(runtime.pinned::<u8>(KIB).unwrap());
                drop(turn);
                drop(runtime);
                cached.wait();
                ended.wait();
                // The next runtime of the thread works, and is not taken for the old one.
                let next = Runtime::new(backend.clone()).unwrap();
                drop(next.pinned::<u8>(KIB).unwrap());
                assert_eq!((host(&next).hits, host(&next).misses), (0, 1));
            });
        }
        cached.wait();
        assert_eq!(host(&runtime).cached_blocks, THREADS as u64);
        assert_eq!(runtime.close().unwrap().total(), 0);
        ended.wait();
    });
    assert_eq!(backend.gpu.live_objects().total(), 0);
}

#[test]
fn a_buffer_works_after_everything_else_of_its_runtime_is_dropped() {
    let (backend, runtime) = open();
    let inner = inner(&runtime);
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    let on_device = device.allocate::<u8>(4).unwrap();
    let mut pinned = runtime.pinned::<u8>(4).unwrap();
    pinned.write().unwrap().copy_from_slice(&[1, 2, 3, 4]);
    stream.copy_to_device(&pinned, &on_device).unwrap();
    pinned.write().unwrap().fill(0);
    stream.copy_to_host(&on_device, &mut pinned).unwrap();
    drop((runtime, device, stream, on_device));
    assert!(inner.upgrade().is_some());
    assert_eq!(pinned.read().unwrap(), [1, 2, 3, 4], "the copy was waited for");
    pinned.write().unwrap()[0] = 9;
    pinned.write_with(|values| values[1] = 9).unwrap();
    assert_eq!(pinned.read_with(<[u8]>::to_vec).unwrap(), [9, 9, 3, 4]);
    assert_eq!((pinned.registrations().count(), pinned.slice(1..3).unwrap().len()), (1, 2));
    drop(pinned);
    assert!(has_ended(&backend, &inner));
}

#[test]
fn the_last_buffer_ends_the_runtime_in_any_thread() {
    // Small and large, of this thread and of another.
    for bytes in [KIB, PIECE] {
        for drop_elsewhere in [false, true] {
            let (backend, runtime) = open();
            let inner = inner(&runtime);
            let [first, last] = [bytes; 2].map(|bytes| runtime.pinned::<u8>(bytes).unwrap());
            drop(runtime);
            drop(first);
            assert!(inner.upgrade().is_some(), "a buffer is alive");
            if drop_elsewhere {
                thread::spawn(move || drop(last)).join().unwrap();
            } else {
                drop(last);
            }
            assert!(has_ended(&backend, &inner));
        }
    }
}

#[test]
fn the_last_buffer_in_a_capture_ends_the_runtime_after_it() {
    let (backend, runtime) = open();
    let (_other_backend, other) = open();
    let inner = inner(&runtime);
    let stream = other.device(0).unwrap().create_stream().unwrap();
    let mut last = Some((runtime.pinned::<u8>(KIB).unwrap(), runtime.pinned::<u8>(PIECE).unwrap()));
    drop(runtime);
    let graph = stream.capture(|_| {
        drop(last.take());
        assert!(inner.upgrade().is_some(), "the end of a runtime waits for captures");
        Ok(())
    });
    graph.unwrap();
    assert!(has_ended(&backend, &inner));
}

/// Failed before: such a thread holds the inner part for a moment, and the close was refused at once.
#[test]
fn a_close_within_a_limit_waits_for_a_thread_that_drops_a_stream() {
    let (backend, runtime) = open();
    let held = inner(&runtime).upgrade().unwrap();
    let dropping = thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        drop(held);
    });
    assert_eq!(runtime.close_within(Duration::from_secs(60)).unwrap().total(), 0);
    dropping.join().unwrap();
    assert_eq!(backend.gpu.live_objects().total(), 0);
    // A close without a limit does not wait.
    let (_, runtime) = open();
    let _held = inner(&runtime).upgrade().unwrap();
    let refused = runtime.close().unwrap_err();
    assert!(refused.kind() == ErrorKind::InvalidState && refused.message().contains("being dropped"), "{refused}");
}

#[test]
fn threads_that_drop_the_last_buffers_at_once_end_the_runtime_once() {
    const THREADS: usize = 3;
    for round in 0..80 {
        let (backend, runtime) = open();
        let inner = inner(&runtime);
        let start = Barrier::new(THREADS + 1);
        thread::scope(|scope| {
            for thread in 0..THREADS {
                // Some have blocks of other threads, some have caches, and some have neither.
                let given = (thread != 1).then(|| runtime.pinned::<u8>(KIB << (round % 12)).unwrap());
                let runtime = runtime.clone();
                let start = &start;
                scope.spawn(move || {
                    let own = (thread > 0).then(|| runtime.pinned::<u8>(KIB).unwrap());
                    drop(runtime);
                    start.wait();
                    if round % 2 == 0 {
                        drop((given, own));
                    } else {
                        drop((own, given));
                    }
                });
            }
            start.wait();
            drop(runtime);
        });
        assert!(has_ended(&backend, &inner), "round {round}");
    }
}

#[test]
fn a_runtime_with_live_buffers_does_not_close_and_works_afterward() {
    let (backend, runtime) = open();
    let mut pinned = runtime.pinned::<u8>(KIB).unwrap();
    let of_thread = thread::scope(|scope| scope.spawn(|| runtime.pinned::<u8>(PIECE).unwrap()).join().unwrap());
    let inner = inner(&runtime);
    let again = runtime.clone();
    let error = runtime.close().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidState);
    assert!(error.message().contains("3 other objects"), "{error}");
    pinned.write().unwrap().fill(7);
    let next = again.pinned::<u8>(KIB).unwrap();
    drop((of_thread, next));
    assert_eq!(host(&again).live_blocks, 1);
    // This takes the last reference but for the buffer's.
    assert_eq!(again.close().unwrap_err().kind(), ErrorKind::InvalidState);
    assert!(inner.upgrade().is_some());
    assert_eq!(pinned.read().unwrap()[0], 7);
    drop(pinned);
    assert!(has_ended(&backend, &inner));
}

#[test]
fn a_block_that_a_stream_uses_waits_in_the_cache_of_its_thread() {
    let (backend, runtime) = open();
    let stream = runtime.device(0).unwrap().create_stream().unwrap();
    let use_once = |access| {
        let pinned = runtime.pinned::<u8>(4 * KIB).unwrap();
        backend.enqueue_use(stream.id(), pinned.ptr().address() as u64);
        stream.note_pinned_use(&pinned, access).unwrap();
        pinned.ptr()
    };
    // A write is recorded at once.
    let first = use_once(Access::Write);
    assert_eq!((host(&runtime).waiting_blocks, host(&runtime).waiting_bytes), (1, 4 * KIB as u64));
    backend.advance(stream.id());
    let again = runtime.pinned::<u8>(4 * KIB).unwrap();
    assert_eq!((again.ptr(), host(&runtime).waiting_hits, host(&runtime).misses), (first, 1, 1));
    drop(again);
    let used = use_once(Access::Write);
    let other = runtime.pinned::<u8>(4 * KIB).unwrap();
    assert_ne!(other.ptr(), used, "the stream still uses it");
    backend.advance(stream.id());
    drop(other);

    // A request that needs all memory takes the block back, once the stream is done.
    use_once(Access::Read);
    backend.advance(stream.id());
    drop(runtime.pinned::<u8>(PIECE).unwrap());
    assert_eq!((host(&runtime).misses, host(&runtime).waiting_blocks), (1, 0));
    // Before that, the pool grows instead.
    use_once(Access::Read);
    drop(runtime.pinned::<u8>(PIECE).unwrap());
    assert_eq!((host(&runtime).misses, host(&runtime).waiting_blocks), (2, 1));
    backend.advance(stream.id());

    // A thread that ends leaves its waiting blocks to the pool.
    thread::scope(|scope| {
        scope.spawn(|| use_once(Access::Read)).join().unwrap();
    });
    assert_eq!((host(&runtime).waiting_blocks, registered()), (2, 1), "that of this thread waits too");
    backend.advance(stream.id());
    runtime.trim().unwrap();
    assert_eq!((host(&runtime).held_bytes, host(&runtime).waiting_blocks), (0, 0));

    let (_other_backend, other) = open();
    let error = stream.note_pinned_use(&other.pinned::<u8>(1).unwrap(), Access::Read).unwrap_err();
    assert_eq!((error.kind(), error.operation()), (ErrorKind::InvalidPointer, "note_pinned_use"));
    drop(stream);
    assert_eq!(runtime.close().unwrap().total(), 0);
    assert_eq!(other.close().unwrap().total(), 0);
}
