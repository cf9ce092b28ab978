//! The blocks that a thread keeps for its next requests, so that a hit takes no lock and writes no memory of other threads.
//!
//! A thread cache has lists of blocks of exactly one size each, for the sizes that its thread requested last. A block of more
//! than 64 KiB is kept only if its size was requested at least twice. A block returns to the thread that requested it: another
//! thread that frees it puts it into the *inbox* of that thread, which the owner empties when a list is empty.
//!
//! A dropped block that streams may still use *waits* in the list of its size, if its own thread dropped it. A request that finds
//! no free block queries the uses of the block that has waited longest. So a thread that uses blocks with its own stream takes no
//! lock that other threads take.
//!
//! A thread that is about to grow the pool takes the blocks out of every thread cache first. [`BiasedLock`] makes that safe.
//!
//! *Liveness.* A buffer holds no reference to its runtime. Each thread counts the buffers that it created less those that it
//! dropped, in its cache, and the sum over all threads is the number of live buffers. When the last other user of the runtime
//! is dropped, it marks every thread cache as *closing* and adds the counts up. If buffers are alive, it leaves the runtime in the
//! registry. A thread that drops a buffer finds the mark in the same critical section in which it counts. It then adds the counts
//! up too, and the thread that finds zero ends the runtime. A buffer counts as dropped only once its block is back. After that,
//! its thread no longer accesses the pool. It accesses only its own cache and the registry, which it keeps alive.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;

use super::biased_lock::BiasedLock;
use super::block::OwnedBlock;
use super::host::HostCache;
use super::slabs;
use crate::primitive::{Arc, AtomicPtr, Mutex, Ordering, prepare_fences, thread_pointer};

/// Sizes that a thread cache has lists for.
const SIZES: usize = 16;
/// Blocks of up to this many bytes are kept after the first request.
const SMALL_BYTES: usize = 64 << 10;
/// Small blocks of one size that are kept have at most this many bytes together. So a thread keeps what others drop at a time.
const MOST_SMALL_BYTES: usize = 4 << 20;
/// Blocks of one size that are kept.
const MOST_SMALL: usize = 1024;
const MOST_LARGE: usize = 8;
/// Small blocks that a thread takes ahead at a time have at most so many bytes together, and are at most so many.
const MOST_BYTES_AHEAD: usize = 256 << 10;
const MOST_AHEAD: usize = 32;
/// Blocks of one size that wait for streams and are kept. A driver's queue has about 1,000 places for each stream.
const MOST_SMALL_WAITING: usize = 1536;
const MOST_LARGE_WAITING: usize = 64;
/// Waiting blocks of one size that are many: see [`Cached::take_waiting`].
const BEHIND: usize = 16;
/// Small blocks that must be dropped between a query that found a stream behind and the next query.
const ASK_AFTER: usize = 32;

/// The counts of a thread.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Counts {
    /// The buffers that it created less those that it dropped.
    pub(crate) live: i64,
    /// Those among them that own device memory.
    pub(crate) live_on_devices: i64,
    /// Requests that its own cache served with free blocks.
    pub(crate) hits: u64,
    /// Requests that it served with blocks that had waited for streams.
    pub(crate) waited_hits: u64,
    /// Those among `hits` that were served after the inbox had been emptied into the cache.
    pub(crate) inbox_hits: u64,
}

impl Counts {
    pub(crate) fn add(&mut self, other: Self) {
        self.live += other.live;
        self.live_on_devices += other.live_on_devices;
        self.hits += other.hits;
        self.waited_hits += other.waited_hits;
        self.inbox_hits += other.inbox_hits;
    }
}

/// The blocks of one pool that one thread keeps. Aligned so that other threads write to no cache line that a hit uses: neither the count of
/// references before it, nor the inbox.
#[repr(align(128))]
pub(crate) struct ThreadCache {
    pub(super) cached: BiasedLock<Cached>,
    pub(super) cache: Arc<HostCache>,
    owner: Owner,
    inbox: Inbox,
}

/// The thread pointer of a cache's owner, while the cache is among the owner's. Null before and after that, and where it is not known. Only
/// the owner writes it, and another thread never finds its own pointer here: the owner stores null before it ends, and the end of a
/// thread precedes each thread that has its pointer again. Relaxed, because the owner finds its own stores. Threads that drop blocks of
/// others read it, so it shares no cache line with what the owner writes.
#[repr(align(128))]
struct Owner(AtomicPtr<()>);

impl Owner {
    fn set(&self, thread: *mut ()) {
        self.0.store(thread, Ordering::Relaxed);
    }
}

/// Blocks that other threads dropped. `None` once the thread has ended.
#[repr(align(128))]
struct Inbox(Mutex<Option<Vec<OwnedBlock>>>);

impl fmt::Debug for ThreadCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThreadCache").finish_non_exhaustive()
    }
}

/// The part that the owner accesses without a lock.
#[derive(Default)]
pub(crate) struct Cached {
    pub(crate) counts: Counts,
    /// True once the last other user of the runtime is gone.
    pub(crate) closing: bool,
    /// The index of the list that served last.
    last: usize,
    /// The size of each list's blocks, as [`Block::size`](super::block::Block::size); 0 for an unused list.
    sizes: [u32; SIZES],
    lists: [List; SIZES],
    /// The list whose size is replaced next.
    next: usize,
    /// Bytes of the free blocks in the lists, and the most that the cap allows.
    bytes: u64,
    pub(super) allowance: u64,
    /// Bytes of the blocks that wait for streams.
    waiting_bytes: u64,
}

#[derive(Default)]
struct List {
    /// Free blocks.
    blocks: Vec<OwnedBlock>,
    /// Blocks that streams may still use, in the order in which they were dropped.
    waiting: VecDeque<OwnedBlock>,
    /// The length of `waiting` at which the next request queries one of them.
    ask_at: usize,
    /// True if the size was requested again while the list existed.
    is_repeated: bool,
    /// Blocks that the next miss takes ahead, if they are small.
    ahead: usize,
}

impl Cached {
    #[inline]
    fn list_of(&self, size: u32) -> Option<usize> {
        if self.sizes[self.last] == size {
            return Some(self.last);
        }
        self.sizes.iter().position(|of_list| *of_list == size)
    }

    /// Takes out a block of a size, for a request of `requested` bytes.
    #[inline(always)]
    pub(crate) fn find(&mut self, size: u32, requested: usize) -> Option<OwnedBlock> {
        let index = self.list_of(size)?;
        let block = self.lists[index].blocks.pop()?;
        self.last = index;
        self.bytes -= block.bytes() as u64;
        self.counts.live += 1;
        self.counts.hits += 1;
        block.begin_life(requested);
        Some(block)
    }

    /// As [`Cached::find`], for a block that lies in one registration.
    pub(crate) fn find_undivided(&mut self, size: u32, requested: usize) -> Option<OwnedBlock> {
        let index = self.list_of(size)?;
        let blocks = &mut self.lists[index].blocks;
        let place = blocks.iter().rposition(|block| block.is_undivided())?;
        // `find` takes the last block.
        let last = blocks.len() - 1;
        blocks.swap(place, last);
        self.find(size, requested)
    }

    /// Keeps a free block, or returns it.
    #[inline(always)]
    pub(crate) fn keep(&mut self, block: OwnedBlock) -> Option<OwnedBlock> {
        let Some(index) = self.list_of(block.size) else { return Some(block) };
        let is_small = block.bytes() <= SMALL_BYTES;
        let list = &mut self.lists[index];
        let count = list.blocks.len();
        let has_room =
            if is_small { count < MOST_SMALL && count * block.bytes() < MOST_SMALL_BYTES } else { count < MOST_LARGE };
        let bytes = self.bytes + block.bytes() as u64;
        if !has_room || bytes > self.allowance || !(is_small || list.is_repeated) {
            return Some(block);
        }
        self.bytes = bytes;
        list.blocks.push(block);
        None
    }

    /// Keeps a block that streams may still use, or returns it.
    pub(crate) fn keep_waiting(&mut self, block: OwnedBlock) -> Option<OwnedBlock> {
        let Some(index) = self.list_of(block.size) else { return Some(block) };
        let is_small = block.bytes() <= SMALL_BYTES;
        let list = &mut self.lists[index];
        let has_room = list.waiting.len() < if is_small { MOST_SMALL_WAITING } else { MOST_LARGE_WAITING };
        if !has_room || self.allowance < u64::MAX || !(is_small || list.is_repeated) {
            return Some(block);
        }
        self.waiting_bytes += block.bytes() as u64;
        list.waiting.push_back(block);
        None
    }

    /// Takes out the block of a size that has waited longest, unless the device is known to be behind.
    pub(crate) fn pop_waiting(&mut self, size: u32) -> Option<OwnedBlock> {
        let index = self.list_of(size)?;
        let list = &mut self.lists[index];
        if list.waiting.len() < list.ask_at {
            return None;
        }
        let block = list.waiting.pop_front()?;
        self.waiting_bytes -= block.bytes() as u64;
        Some(block)
    }

    /// Takes out the waiting blocks of a size, if it is small and they are many.
    pub(crate) fn take_waiting(&mut self, size: u32) -> Option<VecDeque<OwnedBlock>> {
        let list = &mut self.lists[self.list_of(size)?];
        let is_small = list.waiting.front().is_some_and(|block| block.bytes() <= SMALL_BYTES);
        if !is_small || list.waiting.len() < BEHIND {
            return None;
        }
        let waiting = std::mem::take(&mut list.waiting);
        self.waiting_bytes -= waiting.iter().map(|block| block.bytes() as u64).sum::<u64>();
        Some(waiting)
    }

    /// Puts a block back that [`Cached::pop_waiting`] took out. Returns it if its list has another size now.
    pub(crate) fn put_back_waiting(&mut self, block: OwnedBlock) -> Option<OwnedBlock> {
        let Some(index) = self.list_of(block.size) else { return Some(block) };
        self.waiting_bytes += block.bytes() as u64;
        let more = if block.bytes() <= SMALL_BYTES { ASK_AFTER } else { 0 };
        let list = &mut self.lists[index];
        list.waiting.push_front(block);
        list.ask_at = (list.waiting.len() + more).min(MOST_SMALL_WAITING);
        None
    }

    /// Notes a request that found no block. Returns the blocks of the size whose list the new size takes over, and how many
    /// blocks the thread should take ahead: twice as many at each miss, so that a thread that starts rarely takes the pool's lock.
    pub(crate) fn note_miss(&mut self, size: u32) -> (Vec<OwnedBlock>, usize) {
        let Some(index) = self.list_of(size) else {
            let index = self.next;
            self.next = (index + 1) % SIZES;
            self.sizes[index] = size;
            (self.lists[index].is_repeated, self.lists[index].ahead) = (false, 1);
            return (self.empty(index), 0);
        };
        let list = &mut self.lists[index];
        list.is_repeated = true;
        let bytes = slabs::bytes_of(size);
        if bytes > SMALL_BYTES || self.allowance < u64::MAX {
            return (Vec::new(), 0);
        }
        let most = MOST_AHEAD.min(MOST_BYTES_AHEAD / bytes);
        let ahead = list.ahead.min(most);
        list.ahead = (2 * ahead).min(most);
        (Vec::new(), ahead)
    }

    fn empty(&mut self, index: usize) -> Vec<OwnedBlock> {
        let mut blocks = std::mem::take(&mut self.lists[index].blocks);
        self.bytes -= blocks.iter().map(|block| block.bytes() as u64).sum::<u64>();
        self.lists[index].ask_at = 0;
        let waiting = std::mem::take(&mut self.lists[index].waiting);
        self.waiting_bytes -= waiting.iter().map(|block| block.bytes() as u64).sum::<u64>();
        blocks.extend(waiting);
        blocks
    }

    /// Takes out every block.
    fn take_all(&mut self) -> Vec<OwnedBlock> {
        (0..SIZES).flat_map(|index| self.empty(index)).collect()
    }

    /// The number and the bytes of the free blocks in the lists.
    pub(crate) fn kept(&self) -> (u64, u64) {
        (self.lists.iter().map(|list| list.blocks.len() as u64).sum(), self.bytes)
    }

    /// The number and the bytes of the blocks that wait for streams.
    pub(crate) fn waiting(&self) -> (u64, u64) {
        (self.lists.iter().map(|list| list.waiting.len() as u64).sum(), self.waiting_bytes)
    }
}

impl ThreadCache {
    fn new(cache: &Arc<HostCache>, closing: bool) -> Arc<Self> {
        let allowance = if cache.has_cap() { 0 } else { u64::MAX };
        let cached = Cached { closing, allowance, ..Cached::default() };
        Arc::new(Self {
            cached: BiasedLock::new(cached),
            inbox: Inbox(Mutex::new(Some(Vec::new()))),
            cache: Arc::clone(cache),
            owner: Owner(AtomicPtr::new(std::ptr::null_mut())),
        })
    }

    /// Returns whether the calling thread owns the cache. False where no thread pointer is known.
    #[inline]
    fn is_mine(&self) -> bool {
        let owner = self.owner.0.load(Ordering::Relaxed);
        owner == thread_pointer() && !owner.is_null()
    }

    /// Puts a block that another thread dropped into the inbox. Returns it if this cache's thread has ended.
    pub(crate) fn send(&self, block: OwnedBlock) -> Option<OwnedBlock> {
        match &mut *self.inbox.0.lock() {
            Some(inbox) => {
                inbox.push(block);
                None
            }
            None => Some(block),
        }
    }

    /// Takes out the blocks that other threads dropped.
    pub(crate) fn take_inbox(&self) -> Vec<OwnedBlock> {
        self.inbox.0.lock().as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// The number and the bytes of the blocks that other threads dropped.
    pub(crate) fn inbox(&self) -> (u64, u64) {
        let inbox = self.inbox.0.lock();
        let blocks = inbox.iter().flatten();
        blocks.fold((0, 0), |(count, bytes), block| (count + 1, bytes + block.bytes() as u64))
    }

    /// Takes out every block, in any thread. Returns also the bytes that the cap allowed the cache to keep.
    pub(crate) fn take_back(&self) -> (Vec<OwnedBlock>, u64) {
        let (mut blocks, allowance) = self.cached.other(|cached| {
            let allowance = if self.cache.has_cap() { std::mem::take(&mut cached.allowance) } else { 0 };
            (cached.take_all(), allowance)
        });
        blocks.append(&mut self.take_inbox());
        (blocks, allowance)
    }

    /// Ends the cache of a thread that is ending. Returns its blocks and its counts.
    fn end(&self) -> (Vec<OwnedBlock>, Counts, u64) {
        let mut blocks = self.inbox.0.lock().take().unwrap_or_default();
        let (mut kept, allowance) = self.take_back();
        blocks.append(&mut kept);
        (blocks, self.cached.other(|cached| std::mem::take(&mut cached.counts)), allowance)
    }
}

// ---------------------------------------------------------------- the registry of a runtime

/// The thread caches of a runtime's pools.
#[derive(Default)]
pub(crate) struct Registry {
    caches: Vec<Arc<ThreadCache>>,
    /// The counts of threads that have ended, or have no cache.
    pub(crate) departed: Counts,
    closing: bool,
    /// The runtime, once only buffers use it.
    runtime: Option<Arc<dyn Any + Send + Sync>>,
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry").field("caches", &self.caches.len()).finish_non_exhaustive()
    }
}

impl Registry {
    /// Returns the thread caches of one of the runtime's pools.
    pub(crate) fn caches_of(&self, pool: u64) -> impl Iterator<Item = &Arc<ThreadCache>> {
        self.caches.iter().filter(move |cache| cache.cache.id == pool)
    }

    /// Returns the sum of all threads' counts.
    pub(crate) fn counts(&self) -> Counts {
        let mut sum = self.departed;
        self.caches.iter().for_each(|cache| sum.add(cache.cached.other(|cached| cached.counts)));
        sum
    }

    /// Leaves the runtime to the live buffers. Returns it if there are none.
    pub(crate) fn leave(&mut self, runtime: Arc<dyn Any + Send + Sync>) -> Option<Arc<dyn Any + Send + Sync>> {
        self.closing = true;
        self.caches.iter().for_each(|cache| cache.cached.other(|cached| cached.closing = true));
        if self.counts().live == 0 {
            return Some(runtime);
        }
        self.runtime = Some(runtime);
        None
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing
    }

    /// Returns the runtime if it was left to the buffers and none is alive.
    pub(crate) fn take_if_last(&mut self) -> Option<Arc<dyn Any + Send + Sync>> {
        if self.runtime.is_some() && self.counts().live == 0 { self.runtime.take() } else { None }
    }

    /// Removes every thread cache of one of the runtime's pools, at the end of the runtime.
    pub(crate) fn remove_caches_of(&mut self, pool: u64) {
        self.caches.retain(|cache| cache.cache.id != pool);
    }
}

// ---------------------------------------------------------------- the thread's side

/// The caches of a thread, by the pool's id. They end with the thread.
#[derive(Default)]
struct Mine(Vec<(u64, Arc<ThreadCache>)>);

impl Drop for Mine {
    fn drop(&mut self) {
        LAST.set((0, std::ptr::null()));
        self.0.iter().for_each(|(_, mine)| mine.owner.set(std::ptr::null_mut()));
        for (_, mine) in self.0.drain(..) {
            depart(&mine);
        }
    }
}

/// Gives the blocks and the counts of a thread back to the pool, at the end of the thread.
fn depart(mine: &Arc<ThreadCache>) {
    if !mine.cache.generation().is_current() {
        return;
    }
    let mut registry = mine.cache.registry.lock();
    let (blocks, counts, allowance) = mine.end();
    registry.departed.add(counts);
    registry.caches.retain(|cache| !Arc::ptr_eq(cache, mine));
    mine.cache.put_back(blocks, allowance);
}

thread_local! {
    static MINE: RefCell<Mine> = RefCell::default();
    /// The cache that the thread used last: the id of its pool, and its address, which `MINE` keeps alive.
    static LAST: Cell<(u64, *const ThreadCache)> = const { Cell::new((0, std::ptr::null())) };
}

/// Passes the calling thread's cache of a pool to `use_cache`. Passes `None` if it has none.
#[inline]
pub(crate) fn with_mine<R>(pool: u64, use_cache: impl FnOnce(Option<&ThreadCache>) -> R) -> R {
    let (last, cache) = LAST.get();
    // One call of `use_cache`, so that it is compiled into the caller.
    let (found, cache) = if last == pool {
        // SAFETY: The entry of `MINE` keeps it alive. Only this thread removes it: at its end, which resets `LAST`, or in
        // `enlist` once its pool has ended, and then no caller asks for that pool.
        (None, Some(unsafe { &*cache }))
    } else {
        (find_mine(pool), None)
    };
    use_cache(cache.or(found.as_deref()))
}

/// What [`keep_at_home`] did with a free block.
pub(crate) enum AtHome {
    /// The cache has the block, and the buffer is counted as dropped.
    Kept,
    /// The same, and the thread must check for the end of the runtime.
    KeptWhileClosing(Arc<HostCache>),
    /// The block returns to the cache of another thread, or its cache has no room.
    Left(OwnedBlock),
}

/// Keeps the free block of a dropped buffer in the cache that it returns to, if that is the calling thread's. Reads no thread-local
/// variable.
#[inline(always)]
pub(crate) fn keep_at_home(block: OwnedBlock) -> AtHome {
    let home = match &block.home {
        // SAFETY: The owner is this thread, so the cache is in `MINE`, whose entry keeps it alive. Only this thread removes the entry: at
        // its end, which first resets the owner, or in `enlist` once the pool has ended. Neither happens in this function.
        Some(home) if home.is_mine() => unsafe { &*Arc::as_ptr(home) },
        _ => return AtHome::Left(block),
    };
    // SAFETY: In the thread that owns the cache, and the closure accesses no thread cache.
    let (left, is_closing) = unsafe {
        home.cached.own(|cached| {
            let left = cached.keep(block);
            if left.is_none() {
                cached.counts.live -= 1;
            }
            (left, cached.closing)
        })
    };
    match left {
        Some(block) => AtHome::Left(block),
        // The pool may be gone now, but not this.
        None if is_closing => AtHome::KeptWhileClosing(Arc::clone(&home.cache)),
        None => AtHome::Kept,
    }
}

#[cold]
fn find_mine(pool: u64) -> Option<Arc<ThreadCache>> {
    let find =
        |mine: &RefCell<Mine>| mine.borrow().0.iter().find(|(id, _)| *id == pool).map(|(_, mine)| Arc::clone(mine));
    let mine = MINE.try_with(find).ok().flatten()?;
    LAST.set((pool, Arc::as_ptr(&mine)));
    Some(mine)
}

/// Returns the calling thread's cache of a pool, which it creates if necessary. Returns `None` if the thread is ending.
pub(crate) fn enlist(cache: &Arc<HostCache>) -> Option<Arc<ThreadCache>> {
    if let Some(mine) = find_mine(cache.id) {
        return Some(mine);
    }
    let old = MINE.try_with(|mine| {
        // Pools that have ended have forgotten their thread caches.
        let (ended, rest) = mine.take().0.drain(..).partition(|(_, old)| Arc::strong_count(old) == 1);
        mine.borrow_mut().0 = rest;
        ended
    });
    let ended: Vec<_> = old.ok()?;
    if ended.iter().any(|(id, _)| *id == LAST.get().0) {
        LAST.set((0, std::ptr::null()));
    }
    drop(ended);
    prepare_fences();
    let made = {
        let mut registry = cache.registry.lock();
        let made = ThreadCache::new(cache, registry.closing);
        registry.caches.push(Arc::clone(&made));
        made
    };
    MINE.try_with(|mine| mine.borrow_mut().0.push((cache.id, Arc::clone(&made)))).ok()?;
    made.owner.set(thread_pointer());
    LAST.set((cache.id, Arc::as_ptr(&made)));
    Some(made)
}

/// Makes the next requests of the calling thread query the blocks that wait in its caches. It has waited for streams, so they are
/// probably done.
pub(crate) fn query_again() {
    let forget = |cached: &mut Cached| cached.lists.iter_mut().for_each(|list| list.ask_at = 0);
    let _ = MINE.try_with(|mine| {
        // SAFETY: In the thread that owns the caches, and the closure accesses no thread cache.
        mine.borrow().0.iter().for_each(|(_, mine)| unsafe { mine.cached.own(forget) });
    });
}

/// Returns the caches of the calling thread.
#[cfg(test)]
pub(super) fn mine() -> Vec<Arc<ThreadCache>> {
    let caches = |mine: &RefCell<Mine>| mine.borrow().0.iter().map(|(_, mine)| Arc::clone(mine)).collect();
    MINE.try_with(caches).unwrap_or_default()
}
