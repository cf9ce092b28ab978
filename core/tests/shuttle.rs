//! Random schedules of threads over the host cache: no block is in two hands, and in the end every block is accounted for.
//!
//! The files under test are compiled against shuttle's types; their `crate::primitive` is the module here. The backend is a
//! set of flags, one for each completion event and each block.

#![allow(missing_docs, unreachable_pub, dead_code, reason = "the files under test are compiled as part of this test")]

mod primitive {
    use std::ops::{Deref, DerefMut};

    pub(crate) use shuttle::sync::Arc;
    pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

    /// parking_lot's interface over shuttle's mutex.
    #[derive(Debug)]
    pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

    /// `None` only while it waits.
    pub(crate) struct MutexGuard<'m, T>(Option<shuttle::sync::MutexGuard<'m, T>>);

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;
        fn deref(&self) -> &T {
            self.0.as_ref().unwrap()
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.0.as_mut().unwrap()
        }
    }

    /// parking_lot's interface over shuttle's condition variable.
    #[derive(Debug)]
    pub(crate) struct Condvar(shuttle::sync::Condvar);

    impl Condvar {
        pub(crate) fn new() -> Self {
            Self(shuttle::sync::Condvar::new())
        }
        pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            guard.0 = guard.0.take().map(|guard| self.0.wait(guard).unwrap());
        }
        pub(crate) fn notify_all(&self) {
            self.0.notify_all();
        }
    }

    /// An address that is only a number.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
    pub(crate) struct HostPtr(pub(crate) usize);

    /// No child comes of a test here.
    #[derive(Debug, Clone, Copy)]
    pub(crate) struct Generation;

    impl Generation {
        pub(crate) fn is_current(self) -> bool {
            true
        }
    }

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(shuttle::sync::Mutex::new(value))
        }
        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard(Some(self.0.lock().unwrap()))
        }
        pub(crate) fn is_locked(&self) -> bool {
            self.0.try_lock().is_err()
        }
    }
}

mod testing {
    /// Locks that are held until this is dropped.
    pub(crate) struct Held<T>(pub(crate) T);

    impl<T> Drop for Held<T> {
        fn drop(&mut self) {}
    }
}

mod completion_events {
    use crate::primitive::{AtomicBool, Ordering};

    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
    pub(crate) struct Point {
        pub(crate) stream: u64,
        pub(crate) number: u64,
    }

    /// A completion event that is passed when the test says so.
    #[derive(Debug)]
    pub(crate) struct CompletionEvent(Point, AtomicBool);

    impl CompletionEvent {
        pub(crate) fn new(stream: u64, number: u64) -> Self {
            Self(Point { stream, number }, AtomicBool::new(false))
        }
        pub(crate) fn point(&self) -> Point {
            self.0
        }
        pub(crate) fn pass(&self) {
            self.1.store(true, Ordering::SeqCst);
        }
        pub(crate) fn is_passed(&self) -> bool {
            self.1.load(Ordering::SeqCst)
        }
    }
}

#[path = "../src/pool/block_uses.rs"]
mod block_uses;
#[path = "../src/pool/host.rs"]
mod host;
#[path = "../src/pool/size_class.rs"]
mod size_class;

use completion_events::CompletionEvent;
use host::{HostCache, KeptBlock, OwnedBlock, PinnedBlock};
use primitive::{Arc, AtomicBool, AtomicU64, HostPtr, Mutex, Ordering};
use shuttle::thread;

const SCHEDULES: usize = 400;

/// As shuttle's own, with threads whose stacks have room for a rig and for what a failed assertion prints.
fn check_random(scenario: impl Fn() + Send + Sync + 'static, schedules: usize) {
    let mut config = shuttle::Config::new();
    config.stack_size = 1 << 18;
    let scheduler = shuttle::scheduler::RandomScheduler::new(schedules);
    shuttle::Runner::new(scheduler, config).run(scenario);
}

const BYTES: usize = 4096;
const MOST_BLOCKS: usize = 32;

/// What a backend and the buffers would be.
struct Rig {
    cache: HostCache,
    allocated: AtomicU64,
    freed: [AtomicBool; MOST_BLOCKS],
    in_hand: [AtomicBool; MOST_BLOCKS],
    /// How many graphs keep each block.
    kept: [AtomicU64; MOST_BLOCKS],
    /// The completion events of the uses of each block, whatever the cache knows of them.
    last_uses: [Mutex<Vec<Arc<CompletionEvent>>>; MOST_BLOCKS],
}

impl Rig {
    fn new(cap: Option<u64>) -> Arc<Self> {
        Arc::new(Self {
            cache: HostCache::new(cap),
            allocated: AtomicU64::new(0),
            freed: std::array::from_fn(|_| AtomicBool::new(false)),
            in_hand: std::array::from_fn(|_| AtomicBool::new(false)),
            kept: std::array::from_fn(|_| AtomicU64::new(0)),
            last_uses: std::array::from_fn(|_| Mutex::new(Vec::new())),
        })
    }

    /// As the runtime takes a block: a free one, a waiting one, a fresh one.
    fn take(&self, bytes: usize) -> OwnedBlock {
        let (class, block_bytes) = size_class::of(bytes).unwrap();
        let cached = self.cache.find(class, bytes);
        let cached = cached.or_else(|| self.cache.take_waiting(class, bytes, CompletionEvent::is_passed));
        let block = cached.unwrap_or_else(|| {
            let number = self.allocated.fetch_add(1, Ordering::SeqCst) as usize;
            let block = PinnedBlock::new(HostPtr(number), block_bytes, class, None);
            self.cache.count_given(&block, bytes, true);
            block
        });
        assert!(!self.is_in_use(&block), "given out while a stream uses it");
        assert_eq!(self.kept[block.ptr.0].load(Ordering::SeqCst), 0, "given out while a graph keeps it");
        assert!(!self.freed[block.ptr.0].load(Ordering::SeqCst), "given out after it was freed");
        assert!(!self.in_hand[block.ptr.0].swap(true, Ordering::SeqCst), "given out twice");
        block
    }

    /// As a copy of a stream uses a block that is in hand.
    fn use_block(&self, block: &PinnedBlock, completion: &Arc<CompletionEvent>) {
        self.last_uses[block.ptr.0].lock().push(Arc::clone(completion));
        let _ = block.uses.note(Arc::clone(completion), true);
    }

    fn is_in_use(&self, block: &PinnedBlock) -> bool {
        self.last_uses[block.ptr.0].lock().iter().any(|completion| !completion.is_passed())
    }

    fn drop_buffer(&self, block: OwnedBlock, bytes: usize) {
        assert!(self.in_hand[block.ptr.0].swap(false, Ordering::SeqCst));
        if self.cache.give_back(block, bytes) {
            self.cache.keep_to_cap(CompletionEvent::is_passed, |block| self.free(block));
        }
    }

    /// As a capture keeps a block.
    fn keep(&self, block: &PinnedBlock) -> KeptBlock {
        self.kept[block.ptr.0].fetch_add(1, Ordering::SeqCst);
        block.keep()
    }

    /// As the end of a graph lets go.
    fn let_go(&self, kept: KeptBlock) {
        self.kept[kept.ptr.0].fetch_sub(1, Ordering::SeqCst);
        if self.cache.let_go(kept) {
            self.cache.keep_to_cap(CompletionEvent::is_passed, |block| self.free(block));
        }
    }

    fn free(&self, block: &PinnedBlock) -> bool {
        assert!(!self.is_in_use(block), "freed while a stream uses it");
        assert_eq!(self.kept[block.ptr.0].load(Ordering::SeqCst), 0, "freed while a graph keeps it");
        assert!(!self.in_hand[block.ptr.0].load(Ordering::SeqCst), "freed while a buffer owns it");
        assert!(!self.freed[block.ptr.0].swap(true, Ordering::SeqCst), "freed twice");
        self.cache.count_freed(block);
        true
    }

    fn trim(&self) {
        self.cache.trim(CompletionEvent::is_passed, |block| self.free(block));
    }

    /// Everything is given back and every completion event is passed: all is accounted for, and a trim leaves nothing.
    fn check_end(&self, cap: u64) {
        let statistics = self.cache.statistics();
        assert_eq!(statistics.broken_law(), None, "{statistics:?}");
        assert_eq!((statistics.live_blocks, statistics.requested_bytes), (0, 0), "{statistics:?}");
        assert!(statistics.free_bytes <= cap, "{statistics:?}");
        self.trim();
        let statistics = self.cache.statistics();
        assert_eq!(statistics.broken_law(), None, "{statistics:?}");
        assert_eq!((statistics.held_blocks, statistics.held_bytes), (0, 0), "{statistics:?}");
        assert_eq!(statistics.frees, self.allocated.load(Ordering::SeqCst));
    }
}

/// Two threads take blocks, use them on a stream, and give them back, one trims and one lets the streams pass.
fn takers_and_a_trim(cap: Option<u64>) {
    let rig = Rig::new(cap);
    // Two of each stream, which pass in order.
    let completions: Vec<_> = (0..4).map(|index| Arc::new(CompletionEvent::new(index / 2, index % 2))).collect();
    let takers: Vec<_> = completions
        .chunks(2)
        .map(|completions| {
            let (rig, completions) = (Arc::clone(&rig), completions.to_vec());
            thread::spawn(move || {
                for completion in completions {
                    let block = rig.take(BYTES);
                    rig.use_block(&block, &completion);
                    rig.drop_buffer(block, BYTES);
                    // Another class, and unused.
                    let block = rig.take(2 * BYTES);
                    rig.drop_buffer(block, 2 * BYTES);
                }
            })
        })
        .collect();
    let device = thread::spawn({
        let completions = completions.clone();
        move || {
            for completion in completions {
                // About as long as a taker needs to come back.
                (0..20).for_each(|_| thread::yield_now());
                completion.pass();
            }
        }
    });
    rig.trim();
    takers.into_iter().for_each(|taker| taker.join().unwrap());
    device.join().unwrap();
    rig.check_end(cap.unwrap_or(u64::MAX));
}

#[test]
fn threads_that_take_give_back_and_trim_share_no_block_and_lose_none() {
    check_random(|| takers_and_a_trim(None), SCHEDULES);
}

#[test]
fn the_same_under_a_cap_that_is_often_exceeded() {
    for cap in [0, BYTES as u64, 3 * BYTES as u64] {
        check_random(move || takers_and_a_trim(Some(cap)), SCHEDULES / 2);
    }
}

/// Blocks that no stream uses are within the cap as soon as no thread is active, in any order of the threads.
#[test]
fn give_backs_in_different_bins_at_once_keep_to_the_cap() {
    check_random(
        || {
            let cap = 2 * BYTES;
            let rig = Rig::new(Some(cap as u64));
            let held: Vec<_> = [1, 2, 3].map(|pages| (rig.take(pages * BYTES), pages * BYTES)).into();
            let threads: Vec<_> = held
                .into_iter()
                .map(|(block, bytes)| {
                    let rig = Arc::clone(&rig);
                    thread::spawn(move || rig.drop_buffer(block, bytes))
                })
                .collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            rig.check_end(cap as u64);
        },
        SCHEDULES,
    );
}

/// A use is noted by address while the buffer ends and another thread trims: it is refused, or keeps the block from being
/// freed until it is over.
#[test]
fn a_use_noted_by_address_is_refused_or_waited_for() {
    check_random(
        || {
            let rig = Rig::new(Some(0));
            let block = rig.take(BYTES);
            let (number, class, uses) = (block.ptr.0, block.class, Arc::clone(&block.uses));
            let completion = Arc::new(CompletionEvent::new(1, 1));
            let noter = thread::spawn({
                let (rig, completion) = (Arc::clone(&rig), Arc::clone(&completion));
                move || {
                    let Some(kept) = rig.cache.keep_if_live(HostPtr(number), class, &uses) else { return false };
                    let _ = kept.uses.note(completion, true);
                    let _ = rig.cache.let_go(kept);
                    true
                }
            });
            let trimmer = thread::spawn({
                let rig = Arc::clone(&rig);
                move || rig.trim()
            });
            rig.drop_buffer(block, BYTES);
            let noted = noter.join().unwrap();
            trimmer.join().unwrap();
            assert_eq!(rig.freed[number].load(Ordering::SeqCst), !noted);
            completion.pass();
            rig.trim();
            rig.check_end(0);
        },
        SCHEDULES,
    );
}

/// Two graphs keep a block whose buffer ends in the meantime. Each is launched and ends, while other threads request memory and
/// trim. No other owner gets the block, and it is not freed, before both graphs have released it and their launches are done.
#[test]
fn a_block_kept_by_graphs_is_given_out_and_freed_after_them() {
    for cap in [None, Some(0)] {
        check_random(
            move || {
                let rig = Rig::new(cap);
                let block = rig.take(BYTES);
                let completions = [Arc::new(CompletionEvent::new(1, 1)), Arc::new(CompletionEvent::new(2, 1))];
                let graphs = [1, 2].map(|stream| {
                    let (rig, completion) = (Arc::clone(&rig), Arc::clone(&completions[stream - 1]));
                    let kept = rig.keep(&block);
                    thread::spawn(move || {
                        // A launch.
                        let begun = kept.uses.begin(stream as u64, true).unwrap();
                        rig.last_uses[kept.ptr.0].lock().push(Arc::clone(&completion));
                        thread::yield_now();
                        let _ = begun.settle(completion);
                        rig.let_go(kept);
                    })
                });
                let others = [0, 1].map(|_| {
                    let rig = Arc::clone(&rig);
                    thread::spawn(move || {
                        rig.trim();
                        let other = rig.take(BYTES);
                        rig.drop_buffer(other, BYTES);
                    })
                });
                rig.drop_buffer(block, BYTES);
                completions.iter().for_each(|completion| completion.pass());
                graphs.into_iter().chain(others).for_each(|thread| thread.join().unwrap());
                // Waiting blocks above the cap go with the next occasion.
                rig.drop_buffer(rig.take(2 * BYTES), 2 * BYTES);
                assert_eq!(rig.cache.statistics().graph_blocks, 0);
                rig.check_end(cap.unwrap_or(u64::MAX));
            },
            SCHEDULES / 2,
        );
    }
}

/// Threads use a block on a shared stream, and another thread on its own stream. Each stream has one entry, in any
/// order of the notes, and no use is forgotten before it is over.
fn uses_of_shared_streams(writes: bool) {
    const THREADS: u64 = 3;
    let rig = Rig::new(None);
    let block = Arc::new(rig.take(BYTES));
    // The number of each stream's last completion event, under its submission lock.
    let submissions = [0, 1].map(|_| Arc::new(Mutex::new(0)));
    // In an order that the device may execute: a stream waits for completion events noted earlier.
    let completions = Arc::new(Mutex::new(Vec::new()));
    let threads: Vec<_> = (0..THREADS)
        .map(|thread| {
            let (block, completions) = (Arc::clone(&block), Arc::clone(&completions));
            let stream = u64::from(thread > 1);
            let submission = Arc::clone(&submissions[stream as usize]);
            thread::spawn(move || {
                for use_ in 0..2 {
                    let begun = block.uses.begin(stream, writes && use_ == 1).unwrap();
                    let mut submission = submission.lock();
                    *submission += 1;
                    let completion = Arc::new(CompletionEvent::new(stream, *submission));
                    completions.lock().push(Arc::clone(&completion));
                    drop(submission);
                    let _ = begun.settle(completion);
                    assert!(block.uses.completions(false).len() <= 2, "a stream has two entries");
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    for completion in completions.lock().iter() {
        assert!(!block.uses.are_over(CompletionEvent::is_passed), "a use was forgotten before it was over");
        completion.pass();
    }
    assert!(block.uses.are_over(CompletionEvent::is_passed));
}

#[test]
fn a_stream_has_one_entry_which_covers_all_its_uses() {
    for writes in [false, true] {
        check_random(move || uses_of_shared_streams(writes), SCHEDULES);
    }
}
