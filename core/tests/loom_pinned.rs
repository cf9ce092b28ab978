//! Model checking of the lock of the thread caches, of the blocks that wait in them, and of the end of a buffer beside a note by
//! address. Every interleaving of the steps below is tried, up to a number of preemptions where a test says so. Wrong variants
//! must fail.
//!
//! The files under test are compiled against loom's types; their `crate::primitive` is the module here. Both sides of the
//! asymmetric fence are full fences here: the kernel's barrier makes them so.

#![allow(missing_docs, unreachable_pub, dead_code, reason = "the files under test are compiled as part of this test")]

mod primitive {
    use std::ops::{Deref, DerefMut};

    pub(crate) use loom::cell::UnsafeCell;
    pub(crate) use loom::sync::Arc;
    use loom::sync::atomic::fence;
    pub(crate) use loom::sync::atomic::{AtomicPtr, Ordering};

    pub(crate) fn light_fence() {
        fence(Ordering::SeqCst);
    }

    pub(crate) fn heavy_fence() {
        fence(Ordering::SeqCst);
    }

    pub(crate) fn wait_a_moment() {
        loom::thread::yield_now();
    }

    /// Loom treats a sequentially consistent access as one that acquires and releases. A fence on each side of it restores the
    /// order, as compilers do for processors without such accesses.
    fn ordered<R>(ordering: Ordering, access: impl FnOnce(Ordering) -> R, relaxed: Ordering) -> R {
        if ordering != Ordering::SeqCst {
            return access(ordering);
        }
        fence(Ordering::SeqCst);
        let result = access(relaxed);
        fence(Ordering::SeqCst);
        result
    }

    macro_rules! atomic {
        ($name:ident, $value:ty) => {
            #[derive(Debug)]
            pub(crate) struct $name(loom::sync::atomic::$name);

            impl $name {
                pub(crate) fn new(value: $value) -> Self {
                    Self(loom::sync::atomic::$name::new(value))
                }
                pub(crate) fn load(&self, ordering: Ordering) -> $value {
                    ordered(ordering, |ordering| self.0.load(ordering), Ordering::Acquire)
                }
                pub(crate) fn store(&self, value: $value, ordering: Ordering) {
                    ordered(ordering, |ordering| self.0.store(value, ordering), Ordering::Release);
                }
                pub(crate) fn swap(&self, value: $value, ordering: Ordering) -> $value {
                    ordered(ordering, |ordering| self.0.swap(value, ordering), Ordering::AcqRel)
                }
            }
        };
    }

    atomic!(AtomicBool, bool);
    atomic!(AtomicU16, u16);
    atomic!(AtomicU32, u32);

    impl AtomicU32 {
        pub(crate) fn fetch_add(&self, value: u32, ordering: Ordering) -> u32 {
            ordered(ordering, |ordering| self.0.fetch_add(value, ordering), Ordering::AcqRel)
        }
        pub(crate) fn fetch_sub(&self, value: u32, ordering: Ordering) -> u32 {
            ordered(ordering, |ordering| self.0.fetch_sub(value, ordering), Ordering::AcqRel)
        }
    }

    /// parking_lot's interface over loom's mutex.
    #[derive(Debug)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    /// `None` only while it waits.
    pub(crate) struct MutexGuard<'m, T>(Option<loom::sync::MutexGuard<'m, T>>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }
        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard(Some(self.0.lock().unwrap()))
        }
    }

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

    /// parking_lot's interface over loom's condition variable.
    #[derive(Debug)]
    pub(crate) struct Condvar(loom::sync::Condvar);

    impl Condvar {
        pub(crate) fn new() -> Self {
            Self(loom::sync::Condvar::new())
        }
        pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            guard.0 = guard.0.take().map(|guard| self.0.wait(guard).unwrap());
        }
        pub(crate) fn notify_all(&self) {
            self.0.notify_all();
        }
    }

    /// No child comes of a test here.
    #[derive(Debug, Clone, Copy)]
    pub(crate) struct Generation;

    impl Generation {
        pub(crate) fn is_current(self) -> bool {
            true
        }
    }
}

mod completion_events {
    use crate::primitive::{AtomicBool, Ordering};

    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
    pub(crate) struct Point {
        pub(crate) stream: u64,
        pub(crate) number: u64,
    }

    /// A completion event that passes when the device says so.
    #[derive(Debug)]
    pub(crate) struct CompletionEvent(Point, AtomicBool);

    impl CompletionEvent {
        pub(crate) fn new(stream: u64, number: u64) -> Self {
            Self(Point { stream, number }, AtomicBool::new(false))
        }

        pub(crate) fn pass(&self) {
            self.1.store(true, Ordering::Release);
        }

        pub(crate) fn is_passed(&self) -> bool {
            self.1.load(Ordering::Acquire)
        }

        pub(crate) fn point(&self) -> Point {
            self.0
        }

        pub(crate) fn is_recorded(&self) -> bool {
            true
        }
    }
}

#[path = "../src/pool/biased_lock.rs"]
mod biased_lock;
#[path = "../src/pool/block_uses.rs"]
mod block_uses;
#[path = "../src/pool/lazy_box.rs"]
mod lazy_box;

use biased_lock::BiasedLock;
use block_uses::BlockUses;
use completion_events::CompletionEvent;
use lazy_box::LazyBox;
use loom::cell::UnsafeCell;
use loom::sync::{Arc, Mutex};
use loom::thread;

/// Tries every schedule with at most this many preemptions.
fn check_with(preemptions: usize, scenario: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(scenario);
}

// ------------------------------------------------------------------------------------------------ the biased lock

/// Adds to the value. Loom fails the test if another access is not ordered before or after this one.
fn add(value: &mut u32) -> u32 {
    *value += 1;
    *value
}

/// The accesses of the owner and of other threads exclude each other, and each sees those before it.
fn owner_and_others(others: usize, accesses: usize) {
    let lock = Arc::new(BiasedLock::new(0));
    let others: Vec<_> = (0..others)
        .map(|_| {
            let lock = Arc::clone(&lock);
            thread::spawn(move || lock.other(add))
        })
        .collect();
    let mut last = 0;
    for _ in 0..accesses {
        // SAFETY: Only this thread calls it, and `add` does not.
        let seen = unsafe { lock.own(add) };
        assert!(seen > last, "an access is lost");
        last = seen;
    }
    let count = others.len();
    let mut seen: Vec<_> = others.into_iter().map(|other| other.join().unwrap()).collect();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), count, "two accesses at once");
    assert_eq!(lock.other(|value| *value), (count + accesses) as u32);
}

#[test]
fn the_owner_and_another_thread_are_never_inside_at_once() {
    check_with(4, || owner_and_others(1, 2));
}

#[test]
fn the_owner_and_two_other_threads_are_never_inside_at_once() {
    check_with(2, || owner_and_others(2, 2));
}

/// Another thread that finds a note of the owner inside takes it out, or the owner sees the mark that it leaves: this is how
/// the end of a runtime and the end of a buffer find each other.
#[test]
fn the_owner_sees_a_mark_or_the_other_thread_sees_the_count() {
    check_with(3, || {
        let lock = Arc::new(BiasedLock::new((1, false)));
        let other = {
            let lock = Arc::clone(&lock);
            thread::spawn(move || {
                lock.other(|(_, closing)| *closing = true);
                lock.other(|(live, _)| *live)
            })
        };
        // SAFETY: Only this thread calls it, and the closure does not.
        let closing = unsafe {
            lock.own(|(live, closing)| {
                *live -= 1;
                *closing
            })
        };
        let live = other.join().unwrap();
        assert!(closing || live == 0, "nobody ends the runtime");
    });
}

/// A panic inside ends the access.
#[test]
fn a_panic_inside_ends_the_access() {
    loom::model(|| {
        let lock = Arc::new(BiasedLock::new(0));
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            // SAFETY: Only this thread calls it, and the closure does not.
            unsafe { lock.own(|_| std::panic::resume_unwind(Box::new("a fault"))) }
        }));
        assert!(panicked.is_err());
        let other = {
            let lock = Arc::clone(&lock);
            thread::spawn(move || lock.other(add))
        };
        assert_eq!(other.join().unwrap(), 1);
        // SAFETY: As above.
        assert_eq!(unsafe { lock.own(add) }, 2);
    });
}

// ------------------------------------------------------------------------------------------------ the lazy box

/// Threads that use a box at once get one value, complete, and no other stays.
#[test]
fn threads_that_use_a_lazy_box_at_once_get_the_same_value() {
    loom::model(|| {
        let (lazy, token) = (Arc::new(LazyBox::new()), std::sync::Arc::new(()));
        let make = |lazy: &LazyBox<_>, token: &std::sync::Arc<()>| {
            let value: &(u32, _) = lazy.get_or_make(|| (7, std::sync::Arc::clone(token)));
            assert_eq!(value.0, 7);
            std::ptr::from_ref(value).addr()
        };
        let other = {
            let (lazy, token) = (Arc::clone(&lazy), std::sync::Arc::clone(&token));
            thread::spawn(move || make(&lazy, &token))
        };
        let own = make(&lazy, &token);
        assert_eq!(own, other.join().unwrap());
        assert_eq!(std::sync::Arc::strong_count(&token), 2);
        drop(lazy);
        assert_eq!(std::sync::Arc::strong_count(&token), 1);
    });
}

// ------------------------------------------------------------------------------------------------ lives and keepers

/// A block, and what the pool and the thread cache do with it. A note that keeps the block enqueues work on its memory.
struct Kept {
    uses: BlockUses,
    memory: UnsafeCell<u32>,
    pool: Mutex<Pool>,
}

/// Where the block is while no buffer owns it.
#[derive(Default)]
struct Pool {
    kept: bool,
    free: u32,
}

impl Kept {
    fn new() -> Arc<Self> {
        let kept = Self { uses: BlockUses::new(), memory: UnsafeCell::new(0), pool: Mutex::default() };
        kept.uses.begin_life();
        Arc::new(kept)
    }

    fn use_memory(&self) {
        // SAFETY: The protocol gives the memory to one user at a time; loom watches.
        self.memory.with_mut(|memory| unsafe { *memory += 1 });
    }

    /// As `HostCache::keep_if_live`, up to the refusal.
    fn keep_if_live(&self) -> bool {
        self.uses.count_keeper();
        if self.uses.is_live() {
            return true;
        }
        self.let_go();
        false
    }

    /// As `HostCache::let_go`.
    fn let_go(&self) {
        let mut pool = self.pool.lock().unwrap();
        self.uses.uncount_keeper();
        if !self.uses.is_kept() && std::mem::take(&mut pool.kept) {
            self.file(&mut pool);
        }
    }

    /// As the end of a buffer: a free block goes to the thread cache without the pool's lock. Returns whether it did.
    fn end_buffer(&self) -> bool {
        let is_free = self.uses.end_life();
        if !is_free {
            self.file(&mut self.pool.lock().unwrap());
        }
        is_free
    }

    /// As `State::file`.
    fn file(&self, pool: &mut Pool) {
        if self.uses.is_kept() {
            assert!(!pool.kept, "filed twice");
            pool.kept = true;
        } else {
            pool.free += 1;
            // The next request of any thread may get it.
            self.use_memory();
        }
    }
}

/// A buffer ends while threads note uses of its address. A note that found the buffer alive has the memory to itself until it
/// releases the block, and in the end the block is free exactly once.
fn a_buffer_ends_beside_notes(notes: usize) {
    let block = Kept::new();
    let memory = Arc::new(Mutex::new(()));
    let noters: Vec<_> = (0..notes)
        .map(|_| {
            let (block, memory) = (Arc::clone(&block), Arc::clone(&memory));
            thread::spawn(move || {
                let is_kept = block.keep_if_live();
                if is_kept {
                    // Work of several streams: they wait for each other.
                    let guard = memory.lock().unwrap();
                    block.use_memory();
                    drop(guard);
                    block.let_go();
                }
                is_kept
            })
        })
        .collect();
    let was_cached = block.end_buffer();
    if was_cached {
        // The next owner, in the same thread.
        block.use_memory();
    }
    let noted = noters.into_iter().map(|noter| noter.join().unwrap()).filter(|noted| *noted).count();
    let pool = block.pool.lock().unwrap();
    assert!(!pool.kept && !block.uses.is_kept(), "kept by nobody");
    assert_eq!(pool.free + u32::from(was_cached), 1, "free in one place, after {noted} notes");
}

#[test]
fn the_end_of_a_buffer_finds_the_keeper_or_the_note_finds_the_end() {
    check_with(4, || a_buffer_ends_beside_notes(1));
}

#[test]
fn the_end_of_a_buffer_finds_two_keepers_or_they_find_the_end() {
    check_with(2, || a_buffer_ends_beside_notes(2));
}

/// A block whose life has ended begins another in the same thread, while a note of the first life is about to be refused. The
/// note is refused, or keeps the block for the new life; the block is never lost.
#[test]
fn a_note_that_comes_late_keeps_the_next_buffer_or_nothing() {
    check_with(3, || {
        let block = Kept::new();
        let noter = {
            let block = Arc::clone(&block);
            thread::spawn(move || {
                let is_kept = block.keep_if_live();
                if is_kept {
                    block.let_go();
                }
            })
        };
        let mut cached = block.end_buffer();
        if cached {
            block.uses.begin_life();
            cached = block.end_buffer();
        }
        noter.join().unwrap();
        let pool = block.pool.lock().unwrap();
        assert!(!pool.kept && !block.uses.is_kept(), "kept by nobody");
        assert_eq!(pool.free + u32::from(cached), 1, "free in one place");
    });
}

// ------------------------------------------------------------------------------------------------ blocks that wait

/// How a wait list is used.
#[derive(Clone, Copy, PartialEq)]
enum Variant {
    Right,
    /// A block is given out before its query has passed.
    Unasked,
    /// Another thread takes the blocks out without the biased lock.
    Unlocked,
}

/// A block that waits for a stream, with its memory.
struct Waiting {
    uses: BlockUses,
    memory: Arc<UnsafeCell<u32>>,
}

impl Waiting {
    fn is_over(&self, variant: Variant) -> bool {
        variant == Variant::Unasked || self.uses.are_over(CompletionEvent::is_passed)
    }

    /// As the next owner. Loom fails the test if the device's access is not ordered before it.
    fn use_memory(&self) {
        // SAFETY: The protocol gives the memory to one user at a time; loom watches.
        self.memory.with_mut(|memory| unsafe { *memory += 1 });
    }
}

/// The wait list of a thread cache, as `Cached`.
type WaitList = Vec<Box<Waiting>>;

/// A thread drops a block that its stream uses, and requests one. Another empties the cache, to grow the pool. The device
/// completes the stream. The block is in one place in the end, and no owner accesses it beside the device.
fn a_block_waits(variant: Variant) {
    let cache = Arc::new(BiasedLock::new(WaitList::new()));
    let pool = Arc::new(Mutex::new(WaitList::new()));
    let completion = Arc::new(CompletionEvent::new(1, 1));
    let block = Waiting { uses: BlockUses::new(), memory: Arc::new(UnsafeCell::new(0)) };
    let memory = Arc::clone(&block.memory);
    let _ = block.uses.note(Arc::clone(&completion), true);
    let device = thread::spawn(move || {
        // SAFETY: As in `use_memory`.
        memory.with_mut(|memory| unsafe { *memory += 1 });
        completion.pass();
    });
    let grower = {
        let (cache, pool) = (Arc::clone(&cache), Arc::clone(&pool));
        thread::spawn(move || {
            let taken = match variant {
                // SAFETY: None: this is the wrong variant.
                Variant::Unlocked => unsafe { cache.own(std::mem::take) },
                _ => cache.other(std::mem::take),
            };
            for block in &taken {
                if block.is_over(variant) {
                    block.use_memory();
                }
            }
            pool.lock().unwrap().extend(taken);
        })
    };
    // As `PinnedPool::file`.
    // SAFETY: Only this thread calls it, except in the wrong variant, and the closures do not.
    unsafe { cache.own(|list| list.push(Box::new(block))) };
    // As `PinnedPool::take_waited`.
    // SAFETY: As above.
    let popped = unsafe { cache.own(WaitList::pop) };
    let mut has_block = false;
    if let Some(block) = popped {
        if block.is_over(variant) {
            block.use_memory();
            has_block = true;
        } else {
            // SAFETY: As above.
            unsafe { cache.own(|list| list.push(block)) };
        }
    }
    device.join().unwrap();
    grower.join().unwrap();
    let places = cache.other(|list| list.len()) + pool.lock().unwrap().len() + usize::from(has_block);
    assert_eq!(places, 1, "the block is in one place");
}

#[test]
fn a_block_that_waits_is_given_out_after_its_stream_or_taken_back_once() {
    check_with(2, || a_block_waits(Variant::Right));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_block_that_is_given_out_before_its_query_passed_is_found() {
    check_with(2, || a_block_waits(Variant::Unasked));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_wait_list_that_is_taken_without_the_biased_lock_is_found() {
    check_with(2, || a_block_waits(Variant::Unlocked));
}
