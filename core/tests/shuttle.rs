//! Random schedules of threads over the pool of page-locked memory and its thread caches: no page has two owners, in the end
//! every page is accounted for, and the last buffer ends the runtime.
//!
//! The files under test are compiled against shuttle's types; their `crate::primitive` is the module here. `pinned.rs` is not
//! among them: the rig makes its calls in the same order. The backend is a list of pieces, and a flag for each completion event.

#![allow(missing_docs, unreachable_pub, dead_code, reason = "the files under test are compiled as part of this test")]

mod primitive {
    use std::ops::{Deref, DerefMut};

    pub(crate) use std::sync::Arc;

    pub(crate) use highwater_core::HostPtr;
    pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicPtr, AtomicU16, AtomicU32, Ordering};

    /// Shuttle's schedules are sequentially consistent.
    pub(crate) fn light_fence() {}
    pub(crate) fn prepare_fences() {}
    pub(crate) fn heavy_fence() {}

    pub(crate) fn wait_a_moment() {
        shuttle::thread::yield_now();
    }

    /// An address that no other live thread of a schedule has. Null once the thread's locals are gone.
    pub(crate) fn thread_pointer() -> *mut () {
        shuttle::thread_local! { static HERE: Box<u8> = Box::new(0); }
        HERE.try_with(|here| std::ptr::from_ref::<u8>(here).cast_mut().cast()).unwrap_or(std::ptr::null_mut())
    }

    /// Accesses to it are steps of their own, so that a schedule can come between two of them.
    #[derive(Debug)]
    pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>, std::sync::atomic::AtomicBool);

    impl<T> UnsafeCell<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(std::cell::UnsafeCell::new(value), std::sync::atomic::AtomicBool::new(false))
        }
        pub(crate) fn with_mut<R>(&self, access: impl FnOnce(*mut T) -> R) -> R {
            assert!(!self.1.swap(true, Ordering::SeqCst), "two accesses at once");
            shuttle::thread::yield_now();
            let result = access(self.0.get());
            self.1.store(false, Ordering::SeqCst);
            result
        }
    }

    /// The standard library's interface over shuttle's locals: each thread of a schedule has its own.
    pub(crate) struct LocalKey<T: 'static>(pub(crate) &'static shuttle::thread::LocalKey<T>, pub(crate) fn() -> T);

    impl<T> LocalKey<T> {
        pub(crate) fn try_with<R>(
            &'static self,
            access: impl FnOnce(&T) -> R,
        ) -> Result<R, shuttle::thread::AccessError> {
            self.0.try_with(access)
        }
    }

    /// The standard library's cells without a destructor outlive all destructors; shuttle's do not.
    impl<T: Copy> LocalKey<std::cell::Cell<T>> {
        pub(crate) fn get(&'static self) -> T {
            self.0.try_with(std::cell::Cell::get).unwrap_or_else(|_| self.1().get())
        }
        pub(crate) fn set(&'static self, value: T) {
            let _ = self.0.try_with(|cell| cell.set(value));
        }
    }

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
    use std::sync::atomic::{AtomicBool, Ordering};

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
        pub(crate) fn is_recorded(&self) -> bool {
            true
        }
        pub(crate) fn is_passed(&self) -> bool {
            self.1.load(Ordering::SeqCst)
        }
    }
}

mod host_memory {
    use crate::primitive::HostPtr;

    pub(crate) type Piece = crate::area::Piece<HostPtr>;

    #[derive(Debug)]
    pub(crate) struct Growth {
        pub(crate) pieces: Vec<Piece>,
        pub(crate) refused: Option<()>,
    }
}

/// The memory of these tests does not exist.
mod poison {
    pub(crate) unsafe fn fill(_ptr: crate::primitive::HostPtr, _bytes: usize) {}
}

mod host_options {
    #[derive(Debug, Clone, Copy, Default)]
    pub(crate) struct HostMemoryOptions {
        pub(crate) idle_cap_bytes: Option<u64>,
        pub(crate) idle_time: Option<std::time::Duration>,
        pub(crate) poison: Option<bool>,
    }
}

/// As the standard library's, over shuttle's locals.
macro_rules! thread_local {
    ($($(#[$attribute:meta])* static $name:ident: $type:ty = $init:expr;)*) => {
        $(
            $(#[$attribute])*
            static $name: crate::primitive::LocalKey<$type> = {
                shuttle::thread_local! { static KEY: $type = $init; }
                crate::primitive::LocalKey(&KEY, || $init)
            };
        )*
    };
}

#[path = "../src/pool/area.rs"]
mod area;
#[path = "../src/pool/biased_lock.rs"]
mod biased_lock;
#[path = "../src/pool/block.rs"]
mod block;
#[path = "../src/pool/block_table.rs"]
mod block_table;
#[path = "../src/pool/block_uses.rs"]
mod block_uses;
#[path = "../src/pool/host.rs"]
mod host;
#[path = "../src/pool/lazy_box.rs"]
mod lazy_box;
#[path = "../src/pool/ranges.rs"]
mod ranges;
#[path = "../src/pool/slabs.rs"]
mod slabs;
#[path = "../src/pool/thread_cache.rs"]
mod thread_cache;

use std::collections::BTreeMap;
use std::ptr::NonNull;

use block::{Block, KeptBlock, OwnedBlock};
use completion_events::CompletionEvent;
use host::{HostCache, Leaving, Reason, Request};
use host_memory::{Growth, Piece};
use host_options::HostMemoryOptions;
use primitive::{Arc, Generation, HostPtr, Mutex};
use ranges::{Borders, PAGE, Run};
use shuttle::thread;
use thread_cache::{AtHome, Cached, ThreadCache, enlist, keep_at_home, with_mine};

const SCHEDULES: usize = 250;

/// As shuttle's own, with threads whose stacks have room for a rig and for what a failed assertion prints.
fn check_random(scenario: impl Fn() + Send + Sync + 'static, schedules: usize) {
    let mut config = shuttle::Config::new();
    config.stack_size = 1 << 18;
    let scheduler = shuttle::scheduler::RandomScheduler::new(schedules);
    shuttle::Runner::new(scheduler, config).run(scenario);
}

/// Pages of a piece.
const PIECE: u32 = 512;

/// What a backend and the buffers would be. No schedule comes between two accesses of it.
#[derive(Default)]
struct Model {
    /// Pages of pieces.
    pieces: Vec<Run>,
    /// Blocks that buffers own.
    owned: BTreeMap<u32, Run>,
    /// Runs that graphs keep.
    kept: Vec<Run>,
    /// The completion events of the uses of each run, whatever the pool knows of them.
    uses: Vec<(Run, Arc<CompletionEvent>)>,
    /// How often the runtime ended.
    ended: usize,
}

/// The pages of a block, counted by addresses. The pool's own numbers have no gap where the addresses have one.
fn pages_of(block: &Block) -> Run {
    place(block.ptr, block.bytes())
}

fn place(ptr: HostPtr, bytes: usize) -> Run {
    Run { start: ((ptr.address() - piece_at(0).address()) / PAGE) as u32, pages: (bytes / PAGE) as u32 }
}

fn overlap(one: Run, other: Run) -> bool {
    one.start < other.end() && other.start < one.end()
}

impl Model {
    fn check_free(&self, run: Run, what: &str) {
        assert!(!self.owned.values().any(|owned| overlap(*owned, run)), "{what} while a buffer owns it");
        assert!(!self.kept.iter().any(|kept| overlap(*kept, run)), "{what} while a graph keeps it");
        let in_use = |(used, event): &(Run, Arc<CompletionEvent>)| overlap(*used, run) && !event.is_passed();
        assert!(!self.uses.iter().any(in_use), "{what} while a stream uses it");
    }

    fn take(&mut self, run: Run) {
        self.check_free(run, "given out");
        let inside = |page: u32| self.pieces.iter().any(|piece| piece.start <= page && page < piece.end());
        assert!((run.start..run.end()).all(inside), "given out after it was released");
        self.owned.insert(run.start, run);
    }
}

/// The pool, as `pinned.rs` uses it.
struct Rig {
    cache: Arc<HostCache>,
    model: std::sync::Mutex<Model>,
    variant: Variant,
}

/// A wrong order of steps at the wait lists of thread caches, which a test must find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Variant {
    Right,
    /// A block is given out before its query has passed.
    Unasked,
    /// Another thread takes the blocks out without the biased lock.
    Unlocked,
}

/// Ends as the runtime does.
struct Runtime(Arc<Rig>);

impl Drop for Runtime {
    fn drop(&mut self) {
        let rig = &self.0;
        assert!(rig.model().owned.is_empty(), "the runtime ends while a buffer is alive");
        assert_eq!(rig.cache.statistics().broken_law(), None);
        rig.cache.merge_all();
        let mut below = u32::MAX;
        while let Some(leaving) = rig.cache.take_piece(&mut below) {
            rig.free(leaving);
        }
        let mut model = rig.model();
        assert!(model.pieces.is_empty(), "a piece is lost");
        model.ended += 1;
    }
}

fn piece_at(page: u32) -> HostPtr {
    let address = std::ptr::without_provenance_mut((1 << 30) + page as usize * PAGE);
    HostPtr::new(NonNull::new(address).unwrap())
}

impl Rig {
    fn new(cap: Option<u64>) -> Arc<Self> {
        let options = HostMemoryOptions { idle_cap_bytes: cap, idle_time: None, poison: None };
        let cache = HostCache::new(&options, Some(PIECE as usize * PAGE), Generation);
        Arc::new(Self { cache, model: std::sync::Mutex::default(), variant: Variant::Right })
    }

    fn wrong(variant: Variant) -> Arc<Self> {
        let mut rig = Self::new(None);
        Arc::get_mut(&mut rig).unwrap().variant = variant;
        rig
    }

    /// Two pools of one runtime.
    fn pair(cap: Option<u64>) -> [Arc<Self>; 2] {
        let first = Self::new(cap);
        let options = HostMemoryOptions { idle_cap_bytes: cap, idle_time: None, poison: None };
        let cache = HostCache::beside(&first.cache, &options, Some(PIECE as usize * PAGE));
        HostCache::unite(&[&first.cache, &cache]);
        [first, Arc::new(Self { cache, model: std::sync::Mutex::default(), variant: Variant::Right })]
    }

    fn model(&self) -> std::sync::MutexGuard<'_, Model> {
        self.model.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// As `PinnedPool::take`.
    fn take(&self, pages: u32) -> OwnedBlock {
        // SAFETY: In the thread that owns the cache, and `find` accesses no thread cache.
        let found = with_mine(self.cache.id, |mine| unsafe {
            mine?.cached.own(|cached| cached.find(pages, pages as usize * PAGE))
        });
        let block = found.unwrap_or_else(|| self.take_slow(pages));
        self.model().take(pages_of(&block));
        block
    }

    fn take_slow(&self, pages: u32) -> OwnedBlock {
        let own = enlist(&self.cache);
        let mut ahead = 0;
        if let Some(own) = &own {
            let inbox = own.take_inbox();
            // SAFETY: In the thread that owns the cache, and the closure accesses no thread cache.
            let (surplus, found) = unsafe {
                own.cached.own(|cached| {
                    let mut surplus: Vec<_> = inbox.into_iter().filter_map(|block| cached.keep(block)).collect();
                    let found = cached.find(pages, pages as usize * PAGE);
                    if found.is_some() {
                        cached.counts.inbox_hits += 1;
                    } else {
                        let (mut replaced, count) = cached.note_miss(pages);
                        surplus.append(&mut replaced);
                        ahead = count;
                    }
                    (surplus, found)
                })
            };
            self.cache.put_back(surplus, 0);
            if let Some(block) = found.or_else(|| self.take_waited(own, pages)) {
                return block;
            }
        }
        let takes_ahead = ahead > 0 && self.cache.is_in_use();
        let block = self.take_shared(pages, own.as_ref());
        count(&self.cache, own.as_deref(), 1);
        if let Some(own) = own.filter(|_| takes_ahead) {
            let request = Request { pages, bytes: pages as usize * PAGE, borders: Borders::Allowed };
            let blocks = self.cache.take_ahead(request, ahead, &own);
            let keep = |cached: &mut Cached| blocks.into_iter().filter_map(|block| cached.keep(block)).collect();
            // SAFETY: As above.
            let surplus = unsafe { own.cached.own(keep) };
            self.cache.put_back(surplus, 0);
        }
        block
    }

    /// As `PinnedPool::take_waited`.
    fn take_waited(&self, own: &ThreadCache, pages: u32) -> Option<OwnedBlock> {
        // SAFETY: In the thread that owns the cache, and the closure accesses no thread cache.
        let block = unsafe { own.cached.own(|cached| cached.pop_waiting(pages)) }?;
        // The time of a query.
        thread::yield_now();
        let is_over = self.variant == Variant::Unasked || block.uses.are_over(CompletionEvent::is_passed);
        let keep = |cached: &mut Cached| {
            if !is_over {
                return (None, cached.put_back_waiting(block));
            }
            cached.counts.live += 1;
            cached.counts.waited_hits += 1;
            block.begin_life(pages as usize * PAGE);
            (Some(block), None)
        };
        // SAFETY: As above.
        let (taken, surplus) = unsafe { own.cached.own(keep) };
        self.cache.put_back(surplus.into_iter().collect(), 0);
        taken
    }

    fn empty_thread_caches(&self) -> bool {
        if self.variant == Variant::Unlocked {
            let registry = self.cache.registry.lock();
            for cache in registry.caches_of(self.cache.id) {
                // SAFETY: None: this is the wrong variant. Shuttle's cell stops the test at the second access.
                let block = unsafe { cache.cached.own(|cached| cached.pop_waiting(1)) };
                self.cache.put_back(block.into_iter().collect(), 0);
            }
        }
        self.cache.empty_thread_caches()
    }

    fn take_shared(&self, pages: u32, home: Option<&Arc<ThreadCache>>) -> OwnedBlock {
        let request = Request { pages, bytes: pages as usize * PAGE, borders: Borders::Allowed };
        let look = || self.cache.take(request, home);
        let mut found = look();
        if found.is_none() {
            self.cache.collect(CompletionEvent::is_passed, usize::MAX, || {
                found = look();
                found.is_some()
            });
        }
        if found.is_none() {
            let has_waiting = self.empty_thread_caches();
            found = look();
            if found.is_none() && has_waiting {
                self.cache.collect(CompletionEvent::is_passed, usize::MAX, || {
                    found = look();
                    found.is_some()
                });
            }
        }
        found.unwrap_or_else(|| {
            self.keep_to_cap();
            self.grow(request, home)
        })
    }

    fn grow(&self, request: Request, home: Option<&Arc<ThreadCache>>) -> OwnedBlock {
        let turn = match self.cache.begin_growth(request, home) {
            Ok(block) => return block,
            Err(turn) => turn,
        };
        loop {
            let plan = self.cache.plan_growth(request, &turn).unwrap();
            let (ptr, bytes) = match (plan.hole, plan.last) {
                (Some((_, hole)), _) => (hole.ptr, plan.whole),
                (None, Some(last)) => (last.ptr.offset(last.bytes), plan.more),
                (None, None) => (piece_at(0), plan.whole),
            };
            // The time of a registration.
            thread::yield_now();
            let piece_bytes = PIECE as usize * PAGE;
            let offsets = (0..bytes).step_by(piece_bytes);
            let pieces: Vec<_> = offsets.map(|offset| Piece { ptr: ptr.offset(offset), bytes: piece_bytes }).collect();
            for piece in &pieces {
                let run = place(piece.ptr, piece.bytes);
                let mut model = self.model();
                assert!(!model.pieces.iter().any(|other| overlap(*other, run)), "two pieces at one address");
                model.pieces.push(run);
            }
            let growth = Growth { pieces, refused: None };
            if let Some(block) = self.cache.add(&growth, &plan, request, home) {
                return block;
            }
        }
    }

    /// As a copy of a stream uses a block that a buffer owns or a graph keeps.
    fn use_block(&self, block: &Block, completion: &Arc<CompletionEvent>) {
        self.model().uses.push((pages_of(block), Arc::clone(completion)));
        let _ = block.uses.note(Arc::clone(completion), true);
    }

    /// As `PinnedPool::give_back`.
    fn drop_buffer(&self, block: OwnedBlock) {
        assert!(self.model().owned.remove(&pages_of(&block).start).is_some());
        let is_free = block.uses.end_life();
        let block = match if is_free { keep_at_home(block) } else { AtHome::Left(block) } {
            AtHome::Kept => return,
            AtHome::KeptWhileClosing(cache) => return end_if_last(&cache),
            AtHome::Left(block) => block,
        };
        let mut block = Some(block);
        let closing = with_mine(self.cache.id, |mine| {
            let mine = mine?;
            let free = block.take_if(|_| is_free)?;
            if free.home.as_deref().is_none_or(|home| !std::ptr::eq(home, mine)) {
                block = match free.home.clone().filter(|_| !mine.cache.has_cap()) {
                    Some(home) => home.send(free),
                    None => Some(free),
                };
                let is_closing = block.is_none() && count(&mine.cache, Some(mine), -1);
                return is_closing.then(|| Arc::clone(&mine.cache));
            }
            // SAFETY: In the thread that owns the cache, and the closure accesses no thread cache.
            let is_closing = unsafe {
                mine.cached.own(|cached| {
                    block = cached.keep(free);
                    if block.is_none() {
                        cached.counts.live -= 1;
                    }
                    cached.closing
                })
            };
            (is_closing && block.is_none()).then(|| Arc::clone(&mine.cache))
        });
        if let Some(cache) = closing {
            end_if_last(&cache);
        }
        if let Some(block) = block {
            self.drop_buffer_slow(block, is_free);
        }
    }

    fn drop_buffer_slow(&self, block: OwnedBlock, is_free: bool) {
        let cache = Arc::clone(&self.cache);
        let own = enlist(&cache);
        self.file(block, own.as_ref(), is_free);
        if count(&cache, own.as_deref(), -1) {
            end_if_last(&cache);
        }
    }

    fn file(&self, block: OwnedBlock, own: Option<&Arc<ThreadCache>>, is_free: bool) {
        let mut block = Some(block);
        if is_free {
            let home = block.as_ref().and_then(|block| block.home.clone());
            let is_own = |home: &Arc<ThreadCache>| own.is_some_and(|own| Arc::ptr_eq(own, home));
            block = match (home, self.cache.has_cap()) {
                (Some(home), false) if !is_own(&home) => block.and_then(|block| home.send(block)),
                (Some(home), true) if is_own(&home) => block.and_then(|block| self.keep_with_allowance(&home, block)),
                _ => block,
            };
        } else if let Some(own) = own
            && let Some(waiting) = block.take_if(|block| {
                block.home.as_ref().is_some_and(|home| Arc::ptr_eq(home, own)) && block.uses.waits_for_streams()
            })
        {
            // SAFETY: In the thread that owns the cache, and the closure accesses no thread cache.
            block = unsafe { own.cached.own(|cached| cached.keep_waiting(waiting)) };
        }
        if let Some(block) = block
            && self.cache.give_back(block)
        {
            self.keep_to_cap();
        }
    }

    fn keep_with_allowance(&self, own: &ThreadCache, block: OwnedBlock) -> Option<OwnedBlock> {
        let bytes = block.bytes() as u64;
        if !self.cache.grant(bytes) {
            return Some(block);
        }
        // SAFETY: In the thread that owns the cache, and the closure accesses no thread cache.
        let returned = unsafe {
            own.cached.own(|cached| {
                cached.allowance += bytes;
                let returned = cached.keep(block);
                if returned.is_some() {
                    cached.allowance -= bytes;
                }
                returned
            })
        };
        if returned.is_some() {
            self.cache.put_back(Vec::new(), bytes);
        }
        returned
    }

    /// As a capture keeps a block.
    fn keep(&self, block: &OwnedBlock) -> KeptBlock {
        self.model().kept.push(pages_of(block));
        block.keep()
    }

    /// As the end of a graph lets go.
    fn let_go(&self, kept: KeptBlock) {
        let mut model = self.model();
        let index = model.kept.iter().position(|run| *run == pages_of(&kept)).unwrap();
        model.kept.swap_remove(index);
        drop(model);
        if self.cache.let_go(kept) {
            self.keep_to_cap();
        }
    }

    fn keep_to_cap(&self) {
        self.cache.keep_to_cap(CompletionEvent::is_passed, |leaving| self.free(leaving));
    }

    fn free(&self, leaving: Leaving) -> bool {
        {
            let mut model = self.model();
            let run = place(leaving.piece.ptr, leaving.piece.bytes);
            model.check_free(run, "released");
            let index = model.pieces.iter().position(|piece| *piece == run).expect("released twice");
            model.pieces.swap_remove(index);
        }
        // The time of a release.
        thread::yield_now();
        self.cache.has_left(leaving, false, Reason::Trim);
        true
    }

    fn trim(&self) {
        self.empty_thread_caches();
        self.cache.collect(CompletionEvent::is_passed, usize::MAX, || false);
        let mut below = u32::MAX;
        while let Some(leaving) = self.cache.take_piece(&mut below) {
            self.free(leaving);
        }
    }

    /// Everything is given back and every completion event is passed: all is accounted for, and a trim leaves nothing.
    fn check_end(&self, cap: u64) {
        let statistics = self.cache.statistics();
        assert_eq!(statistics.broken_law(), None, "{statistics:?}");
        assert_eq!((statistics.live_blocks, statistics.requested_bytes), (0, 0), "{statistics:?}");
        assert!(statistics.free_bytes + statistics.cached_bytes <= cap, "{statistics:?}");
        self.trim();
        let statistics = self.cache.statistics();
        assert_eq!(statistics.broken_law(), None, "{statistics:?}");
        assert_eq!((statistics.pieces, statistics.held_bytes), (0, 0), "{statistics:?}");
        assert!(self.model().pieces.is_empty());
    }
}

fn count(cache: &HostCache, own: Option<&ThreadCache>, change: i64) -> bool {
    match own {
        // SAFETY: In the thread that owns the cache, and the closure accesses no thread cache.
        Some(own) => unsafe {
            own.cached.own(|cached| {
                cached.counts.live += change;
                cached.closing
            })
        },
        None => {
            let mut registry = cache.registry.lock();
            registry.departed.live += change;
            registry.is_closing()
        }
    }
}

fn end_if_last(cache: &HostCache) {
    let last = cache.registry.lock().take_if_last();
    drop(last);
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
                    let block = rig.take(1);
                    rig.use_block(&block, &completion);
                    rig.drop_buffer(block);
                    // A whole piece, and unused.
                    let block = rig.take(PIECE);
                    rig.drop_buffer(block);
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
    for cap in [0, PAGE as u64, (PIECE as usize * PAGE) as u64] {
        check_random(move || takers_and_a_trim(Some(cap)), SCHEDULES / 2);
    }
}

/// Blocks that no stream uses are within the cap as soon as no thread is active, in any order of the threads.
#[test]
fn give_backs_of_different_sizes_at_once_keep_to_the_cap() {
    check_random(
        || {
            let cap = 2 * (PIECE as usize * PAGE) as u64;
            let rig = Rig::new(Some(cap));
            let held = [1, 2, 3].map(|pieces| rig.take(pieces * PIECE));
            let threads = held.map(|block| {
                let rig = Arc::clone(&rig);
                thread::spawn(move || rig.drop_buffer(block))
            });
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            rig.check_end(cap);
        },
        SCHEDULES,
    );
}

/// A use is noted by address while the buffer ends and another thread trims: it is refused, or keeps the block from being
/// freed until it is over.
#[test]
fn a_use_noted_by_address_is_refused_or_waited_for() {
    for cap in [None, Some(0)] {
        check_random(
            move || {
                let rig = Rig::new(cap);
                let block = rig.take(1);
                let (ptr, run) = (block.ptr, pages_of(&block));
                let completion = Arc::new(CompletionEvent::new(1, 1));
                let noter = thread::spawn({
                    let (rig, completion) = (Arc::clone(&rig), Arc::clone(&completion));
                    move || {
                        let Some(kept) = rig.cache.keep_if_live(ptr) else { return false };
                        rig.model().kept.push(run);
                        rig.use_block(&kept, &completion);
                        rig.let_go(kept);
                        true
                    }
                });
                let trimmer = thread::spawn({
                    let rig = Arc::clone(&rig);
                    move || rig.trim()
                });
                rig.drop_buffer(block);
                let noted = noter.join().unwrap();
                trimmer.join().unwrap();
                rig.trim();
                assert_eq!(rig.model().pieces.is_empty(), !noted);
                completion.pass();
                rig.trim();
                rig.check_end(0);
            },
            SCHEDULES,
        );
    }
}

/// Two graphs keep a block whose buffer ends in the meantime. Each is launched and ends, while other threads request memory and
/// trim. No other owner gets the block, and it is not freed, before both graphs have released it and their launches are done.
#[test]
fn a_block_kept_by_graphs_is_given_out_and_freed_after_them() {
    for cap in [None, Some(0)] {
        check_random(
            move || {
                let rig = Rig::new(cap);
                let block = rig.take(1);
                let completions = [Arc::new(CompletionEvent::new(1, 1)), Arc::new(CompletionEvent::new(2, 1))];
                let graphs = [1, 2].map(|stream| {
                    let (rig, completion) = (Arc::clone(&rig), Arc::clone(&completions[stream - 1]));
                    let kept = rig.keep(&block);
                    thread::spawn(move || {
                        // A launch.
                        let begun = kept.uses.begin(stream as u64, true).unwrap();
                        rig.model().uses.push((pages_of(&kept), Arc::clone(&completion)));
                        thread::yield_now();
                        let _ = begun.settle(completion);
                        rig.let_go(kept);
                    })
                });
                let others = [0, 1].map(|_| {
                    let rig = Arc::clone(&rig);
                    thread::spawn(move || {
                        rig.trim();
                        let other = rig.take(1);
                        rig.drop_buffer(other);
                    })
                });
                rig.drop_buffer(block);
                completions.iter().for_each(|completion| completion.pass());
                graphs.into_iter().chain(others).for_each(|thread| thread.join().unwrap());
                // Waiting blocks above the cap go with the next occasion.
                rig.drop_buffer(rig.take(2));
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
    let block = Arc::new(rig.take(1));
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

// ------------------------------------------------------------------------------------------------ thread caches

/// A thread has hits while another grows the pool and takes its blocks out. The blocks of the first are merged or its own,
/// and the pool holds no more than both need at once.
#[test]
fn a_growth_takes_blocks_out_of_caches_that_have_hits() {
    check_random(
        || {
            let rig = Rig::new(None);
            let small = thread::spawn({
                let rig = Arc::clone(&rig);
                move || {
                    for _ in 0..4 {
                        let block = rig.take(1);
                        rig.drop_buffer(block);
                    }
                }
            });
            let large = thread::spawn({
                let rig = Arc::clone(&rig);
                move || {
                    for _ in 0..2 {
                        let block = rig.take(PIECE);
                        rig.drop_buffer(block);
                    }
                }
            });
            small.join().unwrap();
            large.join().unwrap();
            let statistics = rig.cache.statistics();
            assert!(statistics.pieces <= 2 && statistics.cached_blocks == 0, "{statistics:?}");
            assert_eq!(statistics.hits + statistics.misses, 6);
            rig.check_end(u64::MAX);
        },
        SCHEDULES,
    );
}

/// A thread uses blocks with its own stream and drops them, so that they wait in its cache. Another grows the pool, which takes
/// every cache back, and trims it. The device completes the stream in the meantime.
fn blocks_wait_beside_a_growth(variant: Variant) {
    let rig = Rig::wrong(variant);
    let completions: Vec<_> = (0..3).map(|number| Arc::new(CompletionEvent::new(0, number))).collect();
    let user = thread::spawn({
        let (rig, completions) = (Arc::clone(&rig), completions.clone());
        move || {
            for completion in completions {
                let block = rig.take(1);
                rig.use_block(&block, &completion);
                rig.drop_buffer(block);
            }
            // The place of a block that has waited, if its use is over.
            let block = rig.take(1);
            rig.drop_buffer(block);
        }
    });
    let device = thread::spawn({
        let rig = Arc::clone(&rig);
        move || {
            for (number, completion) in completions.iter().enumerate() {
                while rig.model().uses.len() <= number {
                    thread::yield_now();
                }
                // About as long as the user needs for the next request.
                (0..60).for_each(|_| thread::yield_now());
                completion.pass();
            }
        }
    });
    let block = rig.take(PIECE);
    rig.drop_buffer(block);
    rig.trim();
    user.join().unwrap();
    device.join().unwrap();
    let statistics = rig.cache.statistics();
    assert_eq!(statistics.broken_law(), None, "{statistics:?}");
    assert_eq!((statistics.live_blocks, statistics.hits + statistics.misses), (0, 5), "{statistics:?}");
    rig.check_end(u64::MAX);
}

#[test]
fn blocks_that_wait_in_a_thread_cache_are_safe_beside_a_growth_and_a_trim() {
    check_random(|| blocks_wait_beside_a_growth(Variant::Right), SCHEDULES);
}

#[test]
#[should_panic(expected = "given out while a stream uses it")]
fn a_waiting_block_that_is_given_out_without_a_query_is_found() {
    check_random(|| blocks_wait_beside_a_growth(Variant::Unasked), SCHEDULES);
}

#[test]
#[should_panic(expected = "two accesses at once")]
fn a_wait_list_that_is_taken_without_the_lock_is_found() {
    check_random(|| blocks_wait_beside_a_growth(Variant::Unlocked), SCHEDULES);
}

/// Threads that need the pool to grow at the same time share one piece, if they fit in it.
#[test]
fn threads_that_wait_for_a_growth_look_again() {
    check_random(
        || {
            let rig = Rig::new(None);
            let threads = [1, 2, 20].map(|pages| {
                let rig = Arc::clone(&rig);
                thread::spawn(move || rig.take(pages))
            });
            let blocks = threads.map(|thread| thread.join().unwrap());
            let statistics = rig.cache.statistics();
            assert_eq!((statistics.misses, statistics.hits, statistics.pieces), (1, 2, 1));
            blocks.into_iter().for_each(|block| rig.drop_buffer(block));
            rig.check_end(u64::MAX);
        },
        SCHEDULES,
    );
}

/// A growth is planned while another thread releases the last piece, or takes the free memory that the plan counted on.
#[test]
fn a_growth_is_safe_beside_releases() {
    check_random(
        || {
            let rig = Rig::new(None);
            let pieces = [1, 1, 1].map(|pieces| rig.take(pieces * PIECE));
            let [first, second, last] = pieces;
            rig.drop_buffer(last);
            let grower = thread::spawn({
                let rig = Arc::clone(&rig);
                move || {
                    let block = rig.take(2 * PIECE);
                    rig.drop_buffer(block);
                }
            });
            let other = thread::spawn({
                let rig = Arc::clone(&rig);
                move || {
                    rig.drop_buffer(second);
                    let block = rig.take(3 * PIECE);
                    rig.drop_buffer(block);
                }
            });
            rig.trim();
            rig.drop_buffer(first);
            grower.join().unwrap();
            other.join().unwrap();
            rig.check_end(u64::MAX);
        },
        SCHEDULES,
    );
}

/// A thread drops blocks of a thread that is ending, while a third empties all caches.
#[test]
fn blocks_return_to_a_thread_that_is_ending() {
    for cap in [None, Some((PIECE as usize * PAGE) as u64)] {
        check_random(
            move || {
                let rig = Rig::new(cap);
                let (sender, receiver) = shuttle::sync::mpsc::channel();
                let owner = thread::spawn({
                    let rig = Arc::clone(&rig);
                    move || {
                        for _ in 0..3 {
                            sender.send(rig.take(1)).unwrap();
                        }
                        let own = rig.take(1);
                        rig.drop_buffer(own);
                    }
                });
                let dropper = thread::spawn({
                    let rig = Arc::clone(&rig);
                    move || {
                        // One that has a cache of its own for the later ones.
                        for block in receiver {
                            rig.drop_buffer(block);
                        }
                    }
                });
                rig.cache.empty_thread_caches();
                let _ = rig.cache.statistics();
                owner.join().unwrap();
                dropper.join().unwrap();
                let statistics = rig.cache.statistics();
                assert_eq!((statistics.cached_blocks, statistics.live_blocks, statistics.pieces), (0, 0, 1));
                assert_eq!(statistics.hits + statistics.misses, 4);
                rig.check_end(u64::MAX);
            },
            SCHEDULES,
        );
    }
}

/// The last other user of the runtime is dropped while threads drop the buffers, their own and those of others. One of them
/// ends the runtime, once.
#[test]
fn the_last_buffer_ends_the_runtime_once() {
    for cap in [None, Some(0)] {
        check_random(
            move || {
                let rig = Rig::new(cap);
                let given = [1, 1, PIECE].map(|pages| rig.take(pages));
                let threads: Vec<_> = given
                    .into_iter()
                    .enumerate()
                    .map(|(number, given)| {
                        let rig = Arc::clone(&rig);
                        // A buffer that the thread itself requests, so that it has a cache.
                        let mut own = None;
                        let (sender, receiver) = shuttle::sync::mpsc::channel();
                        let thread = thread::spawn(move || {
                            if number > 0 {
                                own = Some(rig.take(1));
                            }
                            sender.send(()).unwrap();
                            rig.drop_buffer(given);
                            own.into_iter().for_each(|own| rig.drop_buffer(own));
                        });
                        (thread, receiver)
                    })
                    .collect();
                // A thread that requests a buffer uses the runtime.
                threads.iter().for_each(|(_, requested)| requested.recv().unwrap());
                let unneeded = rig.cache.registry.lock().leave(Arc::new(Runtime(Arc::clone(&rig))));
                drop(unneeded);
                threads.into_iter().for_each(|(thread, _)| thread.join().unwrap());
                assert_eq!(rig.model().ended, 1);
            },
            SCHEDULES,
        );
    }
}

/// As above, with the buffers of two pools of the runtime.
#[test]
fn the_last_buffer_of_either_pool_ends_the_runtime_once() {
    for cap in [None, Some(0)] {
        check_random(
            move || {
                let rigs = Rig::pair(cap);
                let threads = [0, 1].map(|number| {
                    let (given, rigs) = (rigs[number].take(1), rigs.clone());
                    let (sender, receiver) = shuttle::sync::mpsc::channel();
                    let thread = thread::spawn(move || {
                        // One of the other pool, so that the thread has caches of both or of one.
                        let other = &rigs[1 - number];
                        let own = other.take(1);
                        sender.send(()).unwrap();
                        rigs[number].drop_buffer(given);
                        other.drop_buffer(own);
                    });
                    (thread, receiver)
                });
                threads.iter().for_each(|(_, requested)| requested.recv().unwrap());
                let runtime = Arc::new(rigs.clone().map(Runtime));
                let unneeded = rigs[0].cache.registry.lock().leave(runtime);
                drop(unneeded);
                threads.into_iter().for_each(|(thread, _)| thread.join().unwrap());
                assert!(rigs.iter().all(|rig| rig.model().ended == 1));
            },
            SCHEDULES,
        );
    }
}
