//! The pool of page-locked host memory: pieces that are divided into blocks, which are reused only after every stream that used
//! them has passed that use.
//!
//! Free memory is divided and merged by pages (`ranges.rs`), so a block of any size is reused for any other size. Requests of up
//! to 2 KiB are carved from slabs, which are runs of 64 KiB (`slabs.rs`). Each thread keeps a few blocks of the sizes that it
//! requests (`thread_cache.rs`). A block whose buffer is dropped while a stream may still use it waits: in the cache of its
//! thread, or in the pool, filed under the point of a stream that it waits for. The completion events of one stream pass in order.
//! So a request that finds no free memory queries each stream's first block, and skips the rest if that stream is behind. A stuck
//! stream delays its own blocks and no others. No vendor call happens under a lock.
//!
//! | state of a block | where | leaves by |
//! | --- | --- | --- |
//! | live | with a buffer | the end of the buffer |
//! | cached | in a thread cache or its inbox | a request of its thread; a growth, the cap or a trim merges it |
//! | waiting | in the cache of its thread or in the pool, streams may use it | a request, the cap or a trim that finds them done |
//! | kept | in the pool: its buffer is gone, captures or graphs recorded it | the last of them releases it |
//! | unmarked | in the pool: the end of its use is unknown | the end of the runtime |
//!
//! A block that is in none of these states becomes free pages.
//!
//! *Growth.* The pool grows only if no free run fits the request, after completed uses were collected and all thread caches
//! emptied. While the pools hold little, a thread whose streams are behind grows the pool before that (`pinned.rs`). The pool grows
//! by the shortfall, rounded up to 2 MiB. One thread at a time grows; the others wait and search again.
//!
//! *The cap* bounds the idle bytes: free pages, waiting blocks, and what thread caches may keep. A live buffer is never refused
//! because of it, and blocks that graphs keep are not counted. A release that exceeds it releases whole pieces that are free,
//! then empties the thread caches and queries waiting blocks. Free pages whose piece has blocks in use may stay above the cap.
//!
//! *Locks.* The registry's lock comes before the pool's. Only `thread_cache.rs` accesses a thread cache, never under the pool's
//! lock.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::atomic::AtomicU64 as StdAtomicU64;
use std::sync::{OnceLock, Weak};
use std::time::Duration;

use super::area::{Address, Area, Place};
use super::block::{Block, KeptBlock, OwnedBlock};
use super::block_table::BlockTable;
use super::block_uses::BlockUses;
use super::completion_events::{CompletionEvent, Point};
use super::host_memory::Growth;
use super::host_options::HostMemoryOptions;
use super::poison::fill;
use super::ranges::PAGE;
use super::thread_cache::{Counts, Registry, ThreadCache};
use crate::primitive::{Arc, Condvar, Generation, HostPtr, Mutex, Ordering};

/// Without a cap.
const NO_CAP: u64 = u64::MAX;
/// The number of streams that are behind after which a release for the cap stops querying.
const ENOUGH_BEHIND: usize = 16;

pub(crate) use super::area::Request;

pub(crate) type Hole = super::area::Hole<HostPtr>;
pub(crate) type Leaving = super::area::Leaving<HostPtr>;
pub(crate) type Plan = super::area::Plan<HostPtr>;

impl Address for HostPtr {
    fn number(self) -> u64 {
        self.address() as u64
    }

    fn plus(self, bytes: usize) -> Self {
        self.offset(bytes)
    }
}

/// Where a request that missed its thread cache found its block, without a growth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    /// In free pages.
    Free,
    /// In free pages, after waiting blocks were collected.
    Waiting,
    /// In free pages, after all thread caches were emptied.
    ThreadCaches,
}

/// Why a piece is released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    /// The program asked for it.
    Trim,
    IdleCap,
    IdleTime,
    /// The backend, the machine or the cap had no room for a growth.
    Exhaustion,
    /// Its growth failed.
    FailedGrowth,
    /// The runtime ends.
    End,
}

#[derive(Debug)]
struct State {
    /// True if free memory has the pattern of `poison.rs`.
    is_poisoned: bool,
    area: Area<HostPtr>,
    /// Every block, by address.
    blocks: BlockTable,
    /// Keyed by a point that the block waits for, and a number that tells apart blocks waiting for the same point.
    waiting: BTreeMap<(Point, u64), OwnedBlock>,
    /// The number of blocks put there so far.
    filed: u64,
    /// By address.
    kept: BTreeMap<HostPtr, OwnedBlock>,
    unmarked: Vec<OwnedBlock>,
    waiting_bytes: u64,
    /// Bytes that the cap has granted to thread caches.
    granted_bytes: u64,
    /// Requests that the free pages served, by [`Found`], and those that grew the pool.
    hits: [u64; 3],
    misses: u64,
    allocations: u64,
    /// By [`Reason`].
    frees: [u64; 6],
    peak_held_bytes: u64,
    /// Bytes of the blocks of buffers, thread caches and inboxes. A hit of a thread cache does not change the sum.
    out_bytes: u64,
    peak_out_bytes: u64,
}

/// The pool's memory and its bookkeeping. It makes no call of the backend.
#[derive(Debug)]
pub(crate) struct HostCache {
    /// Identifies the pool in this process; never 0.
    pub(crate) id: u64,
    generation: Generation,
    cap: u64,
    idle_time: Option<Duration>,
    state: Mutex<State>,
    /// The pools of a runtime share this and the next three fields. See `pinned_pools.rs`.
    pub(super) registry: Arc<Mutex<Registry>>,
    /// True while a thread grows a pool.
    growing: Arc<Mutex<bool>>,
    grown: Arc<Condvar>,
    /// The bytes that all pools hold, and their peak. Changed under the lock of the pool whose bytes change.
    held_by_all: Arc<StdAtomicU64>,
    peak_of_all: Arc<StdAtomicU64>,
    /// True for one of the pools, whose statistics contain the counts of all threads.
    is_first: bool,
    others: OnceLock<Box<[Weak<Self>]>>,
}

/// The right to grow the pool, which one thread has at a time; ends when dropped.
#[derive(Debug)]
pub(crate) struct GrowthTurn<'c>(&'c HostCache);

impl Drop for GrowthTurn<'_> {
    fn drop(&mut self) {
        *self.0.growing.lock() = false;
        self.0.grown.notify_all();
    }
}

impl HostCache {
    /// `piece_bytes` is the size of the largest piece, if it has a limit.
    pub(crate) fn new(options: &HostMemoryOptions, piece_bytes: Option<usize>, generation: Generation) -> Arc<Self> {
        Self::with(None, options, piece_bytes, generation)
    }

    /// Returns a pool that shares liveness, limits and the right to grow with the first pool of a runtime.
    pub(crate) fn beside(first: &Self, options: &HostMemoryOptions, piece_bytes: Option<usize>) -> Arc<Self> {
        Self::with(Some(first), options, piece_bytes, first.generation)
    }

    fn with(
        first: Option<&Self>,
        options: &HostMemoryOptions,
        piece_bytes: Option<usize>,
        generation: Generation,
    ) -> Arc<Self> {
        static IDS: StdAtomicU64 = StdAtomicU64::new(1);
        let piece_pages = piece_bytes.map_or(u32::MAX, |bytes| u32::try_from(bytes / PAGE).unwrap_or(u32::MAX));
        Arc::new(Self {
            // Relaxed: the numbers only need to be unique.
            id: IDS.fetch_add(1, Ordering::Relaxed),
            generation,
            cap: options.idle_cap_bytes.unwrap_or(NO_CAP),
            idle_time: options.idle_time,
            state: Mutex::new(State {
                is_poisoned: options.poison == Some(true),
                ..State::new(Area::new(piece_pages, piece_bytes.is_some(), options.idle_time.is_some()))
            }),
            registry: first.map_or_else(|| Arc::new(Mutex::new(Registry::default())), |first| first.registry.clone()),
            growing: first.map_or_else(|| Arc::new(Mutex::new(false)), |first| first.growing.clone()),
            grown: first.map_or_else(|| Arc::new(Condvar::new()), |first| first.grown.clone()),
            held_by_all: first.map_or_else(Arc::default, |first| first.held_by_all.clone()),
            peak_of_all: first.map_or_else(Arc::default, |first| first.peak_of_all.clone()),
            is_first: first.is_none(),
            others: OnceLock::new(),
        })
    }

    /// Makes the pools of a runtime known to each other, once.
    pub(crate) fn unite(pools: &[&Arc<Self>]) {
        for pool in pools {
            let others = pools.iter().filter(|other| other.id != pool.id);
            let _ = pool.others.set(others.map(|other| Arc::downgrade(other)).collect());
        }
    }

    /// Returns a sum over the other pools of the runtime, one lock after the other.
    fn sum_of_others(&self, of: impl Fn(&State) -> u64) -> u64 {
        let others = self.others.get().into_iter().flatten().filter_map(Weak::upgrade);
        others.map(|other| of(&other.state.lock())).sum()
    }

    /// Returns the part of the cap on idle memory that the other pools do not use.
    fn cap_here(&self) -> u64 {
        if self.has_cap() { self.cap.saturating_sub(self.sum_of_others(State::idle_bytes)) } else { NO_CAP }
    }

    pub(crate) fn generation(&self) -> Generation {
        self.generation
    }

    pub(crate) fn has_cap(&self) -> bool {
        self.cap != NO_CAP
    }

    // ---------------------------------------------------------------- requests

    /// Makes a block of free pages, if a run fits.
    pub(crate) fn take(&self, request: Request, home: Option<&Arc<ThreadCache>>) -> Option<OwnedBlock> {
        self.take_found(Found::Free, request, home)
    }

    /// As [`HostCache::take`]. Counts a hit of the kind `found`.
    pub(crate) fn take_found(
        &self,
        found: Found,
        request: Request,
        home: Option<&Arc<ThreadCache>>,
    ) -> Option<OwnedBlock> {
        let mut state = self.state.lock();
        let block = state.take(request, home)?;
        block.begin_life(request.bytes);
        state.hits[found as usize] += 1;
        Some(block)
    }

    /// Returns whether a thread has the lock of the pool.
    pub(crate) fn is_in_use(&self) -> bool {
        self.state.is_locked()
    }

    /// Makes up to `count` free blocks for the cache of a thread, as long as runs fit and without a new slab. They belong to no
    /// buffer.
    pub(crate) fn take_ahead(&self, request: Request, count: usize, home: &Arc<ThreadCache>) -> Vec<OwnedBlock> {
        let mut state = self.state.lock();
        let mut next = || if state.area.needs_no_slab(request) { state.take(request, Some(home)) } else { None };
        (0..count).map_while(|_| next()).collect()
    }

    /// Waits until no other thread grows the pool. Returns a block if there is one by then, else the right to grow.
    pub(crate) fn begin_growth(
        &self,
        request: Request,
        home: Option<&Arc<ThreadCache>>,
    ) -> Result<OwnedBlock, GrowthTurn<'_>> {
        let mut growing = self.growing.lock();
        while *growing {
            self.grown.wait(&mut growing);
        }
        if let Some(block) = self.take(request, home) {
            return Ok(block);
        }
        *growing = true;
        Err(GrowthTurn(self))
    }

    /// Returns the bytes by which the pool grows for a request, unless the growth begins a new range.
    pub(crate) fn shortfall(&self, request: Request) -> usize {
        self.state.lock().area.shortfall(request)
    }

    /// Returns the plan of a growth for a request. `None` if the pool would exceed its maximum number of pages. The caller must pass
    /// the plan
    /// to [`HostCache::add`]: until then, its hole has no other user.
    pub(crate) fn plan_growth(&self, request: Request, _turn: &GrowthTurn<'_>) -> Option<Plan> {
        self.state.lock().area.plan(request)
    }

    /// Adds the pieces of a growth, and makes a block of them if the growth succeeded.
    pub(crate) fn add(
        &self,
        growth: &Growth,
        plan: &Plan,
        request: Request,
        home: Option<&Arc<ThreadCache>>,
    ) -> Option<OwnedBlock> {
        let mut state = self.state.lock();
        self.change(&mut state, |state| state.add(growth, plan.hole));
        if growth.refused.is_some() {
            return None;
        }
        let block = state.take(request, home)?;
        block.begin_life(request.bytes);
        state.misses += 1;
        Some(block)
    }

    // ---------------------------------------------------------------- releases

    /// Takes a block back whose buffer is gone. Returns whether the cap is exceeded now.
    pub(crate) fn give_back(&self, block: OwnedBlock) -> bool {
        let cap = self.cap_here();
        let mut state = self.state.lock();
        state.out_bytes -= block.bytes() as u64;
        state.file(block);
        state.idle_bytes() > cap
    }

    /// Returns the bytes that all pools of the runtime hold.
    pub(crate) fn held_bytes(&self) -> u64 {
        // Relaxed: it is out of date at once, as a sum over the pools would be.
        self.held_by_all.load(Ordering::Relaxed)
    }

    /// Changes the pieces that the pool holds, and counts the difference. The peaks are exact, because the sum is known with each
    /// change.
    fn change<T>(&self, state: &mut State, change: impl FnOnce(&mut State) -> T) -> T {
        let before = state.area.held_bytes();
        let result = change(state);
        let after = state.area.held_bytes();
        state.peak_held_bytes = state.peak_held_bytes.max(after);
        // Relaxed: only the numbers matter. A difference below 0 is added modulo 2^64.
        let difference = after.wrapping_sub(before);
        let of_all = self.held_by_all.fetch_add(difference, Ordering::Relaxed).wrapping_add(difference);
        self.peak_of_all.fetch_max(of_all, Ordering::Relaxed);
        result
    }

    /// Allows a thread cache to keep `bytes` more, within the cap. Returns false if the cap does not permit it.
    pub(crate) fn grant(&self, bytes: u64) -> bool {
        let cap = self.cap_here();
        let mut state = self.state.lock();
        let is_granted = state.idle_bytes().saturating_add(bytes) <= cap;
        if is_granted {
            state.granted_bytes += bytes;
        }
        is_granted
    }

    /// Merges blocks of a thread cache, and takes back the bytes that the cap allowed it.
    pub(crate) fn put_back(&self, blocks: Vec<OwnedBlock>, allowance: u64) {
        let mut state = self.state.lock();
        if self.has_cap() {
            state.granted_bytes -= allowance;
        }
        for block in blocks {
            state.out_bytes -= block.bytes() as u64;
            if block.uses.is_empty() { state.merge(&block) } else { state.file(block) }
        }
    }

    /// Takes the blocks back that thread caches keep, and merges those that are free. Returns whether others wait.
    pub(crate) fn empty_thread_caches(&self) -> bool {
        let registry = self.registry.lock();
        let mut has_waiting = false;
        for cache in registry.caches_of(self.id) {
            let (blocks, allowance) = cache.take_back();
            has_waiting |= blocks.iter().any(|block| !block.uses.is_empty());
            self.put_back(blocks, allowance);
        }
        has_waiting
    }

    /// Returns the block that contains an address, if a buffer owns it.
    pub(crate) fn live_block(&self, ptr: HostPtr) -> Option<OwnedBlock> {
        let state = self.state.lock();
        let block = state.blocks.containing(ptr.address())?;
        block.uses.is_live().then(|| Arc::clone(block))
    }

    /// Returns whether a block of the pool begins at an address, in any state.
    pub(crate) fn has_block(&self, ptr: HostPtr) -> bool {
        self.state.lock().blocks.containing(ptr.address()).is_some_and(|block| block.ptr == ptr)
    }

    /// Returns the maximum so far of the bytes that all pools of the runtime held.
    pub(crate) fn peak_of_all(&self) -> u64 {
        self.peak_of_all.load(Ordering::Relaxed)
    }

    /// Keeps the block that contains an address, if a buffer owns it.
    pub(crate) fn keep_if_live(&self, ptr: HostPtr) -> Option<KeptBlock> {
        let kept = self.live_block(ptr)?.keep();
        if kept.uses.is_live() {
            return Some(kept);
        }
        // The buffer ended in the meantime, and may have found this keeper.
        self.let_go(kept);
        None
    }

    /// Releases a kept block. Returns whether the cap is exceeded now.
    pub(crate) fn let_go(&self, kept: KeptBlock) -> bool {
        let cap = self.cap_here();
        let mut state = self.state.lock();
        kept.uses.uncount_keeper();
        if kept.uses.is_kept() {
            return false;
        }
        // A block whose buffer is alive is not filed.
        let Some(block) = state.kept.remove(&kept.ptr) else { return false };
        drop(kept);
        state.file(block);
        state.idle_bytes() > cap
    }

    // ---------------------------------------------------------------- waiting blocks

    /// Merges waiting blocks whose streams are done, until `is_enough` or the rest is behind. Queries one block at a time,
    /// without a lock, so that other threads find the rest. Stops after `most_behind` streams that are behind.
    pub(crate) fn collect(
        &self,
        is_passed: impl Fn(&CompletionEvent) -> bool,
        most_behind: usize,
        is_enough: impl FnMut() -> bool,
    ) {
        self.collect_streams(0..=u64::MAX, is_passed, most_behind, is_enough);
    }

    /// As [`HostCache::collect`], for blocks that wait for one stream.
    pub(crate) fn collect_stream(
        &self,
        stream: u64,
        is_passed: impl Fn(&CompletionEvent) -> bool,
        is_enough: impl FnMut() -> bool,
    ) {
        self.collect_streams(stream..=stream, is_passed, 1, is_enough);
    }

    fn collect_streams(
        &self,
        streams: RangeInclusive<u64>,
        is_passed: impl Fn(&CompletionEvent) -> bool,
        most_behind: usize,
        mut is_enough: impl FnMut() -> bool,
    ) {
        let (mut from, mut behind) = (*streams.start(), 0);
        while !is_enough() {
            let Some((stream, block)) = self.pop_waiting_in(from..=*streams.end()) else { return };
            from = stream;
            let is_over = block.uses.are_over(&is_passed);
            let is_behind = block.uses.first().is_some_and(|point| point.stream == stream);
            self.state.lock().file(block);
            // Otherwise it waits for another stream, and the next block of this one may wait for none.
            if !is_over && is_behind {
                from = stream + 1;
                behind += 1;
                if behind == most_behind {
                    return;
                }
            }
        }
    }

    fn pop_waiting_in(&self, streams: RangeInclusive<u64>) -> Option<(u64, OwnedBlock)> {
        let mut state = self.state.lock();
        let start = Point { stream: *streams.start(), number: 0 };
        let key = *state.waiting.range((start, 0)..).next()?.0;
        if key.0.stream > *streams.end() {
            return None;
        }
        let block = state.waiting.remove(&key)?;
        state.waiting_bytes -= block.bytes() as u64;
        Some((key.0.stream, block))
    }

    // ---------------------------------------------------------------- the cap and trimming

    /// Returns whether the pool has idle memory above the cap.
    pub(crate) fn exceeds_cap(&self) -> bool {
        if !self.has_cap() {
            return false;
        }
        let cap = self.cap_here();
        self.state.lock().idle_bytes() > cap
    }

    /// Releases free pieces with `free`, which returns whether the piece is gone, until the idle memory is within the cap.
    pub(crate) fn keep_to_cap(
        &self,
        is_passed: impl Fn(&CompletionEvent) -> bool,
        mut free: impl FnMut(Leaving) -> bool,
    ) {
        let mut release = || {
            let mut below = u32::MAX;
            while self.exceeds_cap() {
                let Some(leaving) = self.take_piece(&mut below) else { return };
                let _ = free(leaving);
            }
        };
        release();
        if self.exceeds_cap() {
            self.empty_thread_caches();
            release();
        }
        if self.exceeds_cap() {
            self.collect(is_passed, ENOUGH_BEHIND, || {
                release();
                !self.exceeds_cap()
            });
            release();
        }
    }

    /// Takes the last free piece out whose first page is below a number, and lowers the number to it.
    pub(crate) fn take_piece(&self, below: &mut u32) -> Option<Leaving> {
        self.take_piece_used_before(below, u64::MAX)
    }

    /// Takes the piece out that begins at an address, if all of it is free.
    pub(crate) fn take_piece_at(&self, ptr: HostPtr) -> Option<Leaving> {
        self.change(&mut self.state.lock(), |state| state.area.take_piece_at(ptr))
    }

    /// As [`HostCache::take_piece`], for pieces that were last used before a time.
    fn take_piece_used_before(&self, below: &mut u32, time: u64) -> Option<Leaving> {
        self.change(&mut self.state.lock(), |state| state.area.take_piece(below, time))
    }

    /// Releases the free pieces with `free` that no request has used for the set time, until `is_enough`. Does nothing in the
    /// first half of that time after the last call.
    pub(crate) fn release_old(&self, is_enough: impl Fn() -> bool, mut free: impl FnMut(Leaving)) {
        let Some(idle_time) = self.idle_time else { return };
        let idle = u64::try_from(idle_time.as_millis()).unwrap_or(u64::MAX);
        let now = {
            let mut state = self.state.lock();
            let now = state.area.now();
            if now.saturating_sub(state.area.swept) < idle / 2 {
                return;
            }
            state.area.swept = now;
            now
        };
        self.empty_thread_caches();
        let mut below = u32::MAX;
        while !is_enough()
            && let Some(leaving) = self.take_piece_used_before(&mut below, now.saturating_sub(idle))
        {
            free(leaving);
        }
    }

    /// Puts a piece back whose release was refused.
    pub(crate) fn stays(&self, leaving: Leaving) {
        // The pool may have grown while the piece was out.
        self.change(&mut self.state.lock(), |state| state.area.put_back(leaving));
    }

    /// Takes a piece out again that was just put back.
    pub(crate) fn take_again(&self, leaving: &Leaving) {
        self.change(&mut self.state.lock(), |state| state.area.take_out(leaving));
    }

    /// Notes that a piece is gone, or a remnant.
    pub(crate) fn has_left(&self, leaving: Leaving, is_remnant: bool, reason: Reason) {
        let mut state = self.state.lock();
        state.frees[reason as usize] += 1;
        state.area.has_left(leaving, is_remnant);
    }

    /// Takes the remnants out, to be retried.
    pub(crate) fn take_remnants(&self) -> Vec<Leaving> {
        self.state.lock().area.remnants_to_retry()
    }

    /// Notes that a remnant is gone.
    pub(crate) fn remnant_has_left(&self, leaving: Leaving) {
        self.state.lock().area.remnant_has_left(leaving);
    }

    /// Merges every block, at the end of the runtime.
    pub(crate) fn merge_all(&self) {
        self.empty_thread_caches();
        self.registry.lock().remove_caches_of(self.id);
        let mut state = self.state.lock();
        let waiting = std::mem::take(&mut state.waiting).into_values();
        let blocks: Vec<_> = waiting.chain(std::mem::take(&mut state.unmarked)).collect();
        state.waiting_bytes = 0;
        for block in blocks {
            // The completion events return to their pools.
            block.uses.are_over(|_| true);
            state.merge(&block);
        }
    }

    // ---------------------------------------------------------------- statistics

    pub(crate) fn statistics(&self) -> HostCacheStatistics {
        let registry = self.registry.lock();
        let counts = if self.is_first { registry.counts() } else { Counts::default() };
        let Counts { live, hits: own_hits, inbox_hits, waited_hits } = counts;
        let (mut kept, mut waiting, mut inboxes) = ((0, 0), (0, 0), (0, 0));
        let add = |sum: &mut (u64, u64), (blocks, bytes)| *sum = (sum.0 + blocks, sum.1 + bytes);
        for cache in registry.caches_of(self.id) {
            let (free, in_use) = cache.cached.other(|cached| (cached.kept(), cached.waiting()));
            add(&mut kept, free);
            add(&mut waiting, in_use);
            add(&mut inboxes, cache.inbox());
        }
        let state = self.state.lock();
        let [free_hits, waiting_hits, merged_hits] = state.hits;
        let (remnant_blocks, remnant_bytes) = state.area.remnants();
        let freed = |reason: Reason| state.frees[reason as usize];
        let sum = |blocks: &mut dyn Iterator<Item = &OwnedBlock>| blocks.map(|block| block.bytes() as u64).sum::<u64>();
        let live_blocks = || state.blocks.iter().filter(|block| block.uses.is_live());
        HostCacheStatistics {
            requested_bytes: live_blocks().map(|block| block.requested() as u64).sum(),
            rounding_bytes: live_blocks().map(|block| (block.bytes() - block.requested()) as u64).sum(),
            held_bytes: state.area.held_bytes(),
            peak_held_bytes: state.peak_held_bytes,
            peak_live_bytes: state.peak_out_bytes,
            pieces: state.area.pieces(),
            live_blocks: live as u64,
            live_bytes: sum(&mut live_blocks()),
            graph_blocks: state.kept.len() as u64,
            graph_bytes: sum(&mut state.kept.values()),
            free_bytes: state.area.free_bytes(),
            slab_bytes: state.area.slab_bytes(),
            cached_blocks: kept.0 + inboxes.0,
            cached_bytes: kept.1 + inboxes.1,
            inbox_blocks: inboxes.0,
            inbox_bytes: inboxes.1,
            waiting_blocks: state.waiting.len() as u64 + waiting.0,
            waiting_bytes: state.waiting_bytes + waiting.1,
            unmarked_blocks: state.unmarked.len() as u64,
            unmarked_bytes: sum(&mut state.unmarked.iter()),
            remnant_blocks,
            remnant_bytes,
            hits: own_hits + waited_hits + state.hits.iter().sum::<u64>(),
            // The thread cache found them after it had emptied its inbox.
            cache_hits: own_hits - inbox_hits,
            inbox_hits,
            free_hits,
            waiting_hits: waiting_hits + waited_hits,
            merged_hits,
            misses: state.misses,
            allocations: state.allocations,
            frees: state.frees.iter().sum(),
            trim_frees: freed(Reason::Trim),
            cap_evictions: freed(Reason::IdleCap),
            idle_time_frees: freed(Reason::IdleTime),
            exhaustion_frees: freed(Reason::Exhaustion),
            failed_growth_frees: freed(Reason::FailedGrowth),
        }
    }
}

impl State {
    fn new(area: Area<HostPtr>) -> Self {
        Self {
            is_poisoned: false,
            area,
            blocks: BlockTable::default(),
            waiting: BTreeMap::new(),
            filed: 0,
            kept: BTreeMap::new(),
            unmarked: Vec::new(),
            waiting_bytes: 0,
            granted_bytes: 0,
            hits: [0; 3],
            misses: 0,
            allocations: 0,
            frees: [0; 6],
            peak_held_bytes: 0,
            out_bytes: 0,
            peak_out_bytes: 0,
        }
    }

    fn idle_bytes(&self) -> u64 {
        self.area.free_bytes() + self.waiting_bytes + self.granted_bytes
    }

    /// Makes a block of free pages.
    fn take(&mut self, request: Request, home: Option<&Arc<ThreadCache>>) -> Option<OwnedBlock> {
        let Place { ptr, start, size, borders } = self.area.take(request)?;
        let block = Block::new(ptr, start, size, borders, home.cloned());
        self.list(&block);
        Some(block)
    }

    fn list(&mut self, block: &OwnedBlock) {
        self.blocks.insert(Arc::clone(block));
        self.out_bytes += block.bytes() as u64;
        self.peak_out_bytes = self.peak_out_bytes.max(self.out_bytes);
    }

    /// Adds the pieces of a growth, in the place of the hole if there is one.
    fn add(&mut self, growth: &Growth, hole: Option<(u32, Hole)>) {
        if self.is_poisoned {
            // SAFETY: New memory, which no code uses.
            growth.pieces.iter().for_each(|piece| unsafe { fill(piece.ptr, piece.bytes) });
        }
        self.allocations += self.area.add(&growth.pieces, hole);
    }

    /// Files a block that no buffer owns.
    fn file(&mut self, block: OwnedBlock) {
        let uses: &BlockUses = &block.uses;
        if uses.is_kept() {
            self.kept.insert(block.ptr, block);
        } else if uses.unmarked.load(Ordering::Relaxed) {
            self.unmarked.push(block);
        } else if let Some(point) = uses.first() {
            self.filed += 1;
            self.waiting_bytes += block.bytes() as u64;
            self.waiting.insert((point, self.filed), block);
        } else {
            if self.is_poisoned {
                // SAFETY: No buffer, no graph and no stream uses it.
                unsafe { fill(block.ptr, block.bytes()) };
            }
            self.merge(&block);
        }
    }

    /// Frees the pages of a block.
    fn merge(&mut self, block: &Block) {
        self.blocks.remove(block.ptr.address());
        self.area.free(block.run(), block.ptr, block.is_in_slab());
    }
}

/// The state and the history of the pool of page-locked memory.
///
/// These laws hold at rest, when no other thread is inside the pool ([`HostCacheStatistics::broken_law`] checks them). The parts
/// of a reading are read one after the other. So while other threads request or drop buffers, a reading may be torn: a block that
/// moves in the meantime is counted twice or not at all.
///
/// - Every byte is in one state: `held_bytes = live_bytes + graph_bytes + waiting_bytes + unmarked_bytes + cached_bytes +
///   free_bytes + slab_bytes`.
/// - Requests are rounded up: `live_bytes = requested_bytes + rounding_bytes`, and `rounding_bytes <= 4096 * live_blocks`.
/// - Blocks in inboxes also count as cached: `inbox_bytes <= cached_bytes`, `inbox_blocks <= cached_blocks`.
/// - Every hit has a place where its memory was found: `hits = cache_hits + inbox_hits + free_hits + waiting_hits + merged_hits`.
/// - No piece is lost: `pieces = allocations - frees`.
/// - The pool grows only for requests: `misses <= allocations`.
/// - Every free has a reason: `frees = trim_frees + cap_evictions + idle_time_frees + exhaustion_frees + failed_growth_frees`.
/// - `held_bytes <= peak_held_bytes` and `live_bytes + cached_bytes <= peak_live_bytes <= peak_held_bytes`.
///
/// Waste is the part of `held_bytes` that no live buffer requested. Its causes are `rounding_bytes`, `free_bytes` (fragmentation),
/// `slab_bytes`, `cached_bytes - inbox_bytes` (thread caches), `inbox_bytes`, and the work of streams: `waiting_bytes`,
/// `graph_bytes` and `unmarked_bytes`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct HostCacheStatistics {
    /// Bytes requested by the live buffers.
    pub requested_bytes: u64,
    /// Bytes that the blocks of those buffers have in addition. Requests of up to 2 KiB are rounded up to multiples of 256 bytes,
    /// larger ones to pages.
    pub rounding_bytes: u64,
    /// Bytes of page-locked memory held, in any state.
    pub held_bytes: u64,
    /// Maximum of `held_bytes` so far.
    pub peak_held_bytes: u64,
    /// Maximum so far of `live_bytes`, `cached_bytes` and the bytes that wait in thread caches together, as a bound of the maximum
    /// of `live_bytes`. The bound is too large by at most the other two at the time of that maximum. It is found on slow paths,
    /// because a hit of a thread cache does not change the sum.
    pub peak_live_bytes: u64,
    /// Pieces held: memory that the backend registered, or allocated, in one call.
    pub pieces: u64,
    /// Blocks that buffers own.
    pub live_blocks: u64,
    /// Bytes of those, including `rounding_bytes`.
    pub live_bytes: u64,
    /// Blocks whose buffers are gone and that captures or graphs keep.
    pub graph_blocks: u64,
    /// Bytes of those.
    pub graph_bytes: u64,
    /// Bytes of free pages, which any request can use.
    pub free_bytes: u64,
    /// Bytes of slabs that are in no block. A slab has 64 KiB and blocks of one size, a multiple of 256 bytes up to 2 KiB.
    pub slab_bytes: u64,
    /// Free blocks that threads keep for requests of the same size. They are merged before the pool grows.
    pub cached_blocks: u64,
    /// Bytes of those.
    pub cached_bytes: u64,
    /// Cached blocks that another thread dropped, and that are in the inbox of the thread that requested them.
    pub inbox_blocks: u64,
    /// Bytes of those.
    pub inbox_bytes: u64,
    /// Blocks whose streams may not have passed their last use. A block counts until the pool queries its completion events, even
    /// if its streams are done. The pool does so at the latest before it grows, and in each trim.
    pub waiting_blocks: u64,
    /// Bytes of those.
    pub waiting_bytes: u64,
    /// Blocks of which it is unknown when the device stops using them. They are freed when the runtime ends.
    pub unmarked_blocks: u64,
    /// Bytes of those.
    pub unmarked_bytes: u64,
    /// Pieces that the backend released, and whose pages the system did not take back. They are not held, and no code uses
    /// them. [`Runtime::trim`](crate::Runtime::trim) and the end of the runtime retry them.
    pub remnant_blocks: u64,
    /// Bytes of those.
    pub remnant_bytes: u64,
    /// Requests served without a growth.
    pub hits: u64,
    /// Of those, requests that the cache of the thread served.
    pub cache_hits: u64,
    /// Of those, requests that a block from the inbox of the thread served.
    pub inbox_hits: u64,
    /// Of those, requests that free pages served.
    pub free_hits: u64,
    /// Of those, requests that a block served whose streams were found to be done: one that waited in the cache of the thread, or
    /// free pages after waiting blocks had been collected.
    pub waiting_hits: u64,
    /// Of those, requests that free pages served after all thread caches had been emptied and their blocks merged.
    pub merged_hits: u64,
    /// Requests for which the pool grew.
    pub misses: u64,
    /// Pieces that the backend registered or allocated.
    pub allocations: u64,
    /// Pieces that were released, for any reason, including remnants.
    pub frees: u64,
    /// Pieces that [`Runtime::trim`](crate::Runtime::trim) released.
    pub trim_frees: u64,
    /// Pieces that were released because of the cap on idle memory.
    pub cap_evictions: u64,
    /// Pieces that were released because no request had used them for the idle time.
    pub idle_time_frees: u64,
    /// Pieces that were released because memory was scarce for a growth: below the cap, on the machine or in the backend.
    pub exhaustion_frees: u64,
    /// Pieces that were released because a later piece of the same growth failed.
    pub failed_growth_frees: u64,
}

impl HostCacheStatistics {
    /// Returns the first law that does not hold, or `None` if all hold. A broken law is a bug only if the statistics were read at
    /// rest. While other threads are inside the pool, the reading may be torn, and a block may be in no state for a moment.
    #[must_use]
    pub fn broken_law(&self) -> Option<&'static str> {
        let bytes = self.live_bytes
            + self.graph_bytes
            + self.waiting_bytes
            + self.unmarked_bytes
            + self.cached_bytes
            + self.free_bytes
            + self.slab_bytes;
        let hits = self.cache_hits + self.inbox_hits + self.free_hits + self.waiting_hits + self.merged_hits;
        let frees = self.trim_frees
            + self.cap_evictions
            + self.idle_time_frees
            + self.exhaustion_frees
            + self.failed_growth_frees;
        let laws = [
            (
                self.held_bytes == bytes,
                "held_bytes = live_bytes + graph_bytes + waiting_bytes + unmarked_bytes + cached_bytes + free_bytes + slab_bytes",
            ),
            (
                self.live_bytes == self.requested_bytes + self.rounding_bytes,
                "live_bytes = requested_bytes + rounding_bytes",
            ),
            (self.rounding_bytes <= self.live_blocks * PAGE as u64, "rounding_bytes <= 4096 * live_blocks"),
            (self.inbox_bytes <= self.cached_bytes, "inbox_bytes <= cached_bytes"),
            (self.inbox_blocks <= self.cached_blocks, "inbox_blocks <= cached_blocks"),
            (self.hits == hits, "hits = cache_hits + inbox_hits + free_hits + waiting_hits + merged_hits"),
            (self.pieces + self.frees == self.allocations, "pieces = allocations - frees"),
            (self.misses <= self.allocations, "misses <= allocations"),
            (
                self.frees == frees,
                "frees = trim_frees + cap_evictions + idle_time_frees + exhaustion_frees + failed_growth_frees",
            ),
            (self.held_bytes <= self.peak_held_bytes, "held_bytes <= peak_held_bytes"),
            (
                self.live_bytes + self.cached_bytes <= self.peak_live_bytes,
                "live_bytes + cached_bytes <= peak_live_bytes",
            ),
            (self.peak_live_bytes <= self.peak_held_bytes, "peak_live_bytes <= peak_held_bytes"),
        ];
        laws.into_iter().find(|(holds, _)| !holds).map(|(_, law)| law)
    }
}

#[cfg(test)]
impl HostCache {
    pub(crate) fn hold_locks(&self) -> impl Drop + '_ {
        crate::testing::Held((self.registry.lock(), self.state.lock(), self.growing.lock()))
    }

    pub(crate) fn is_locked(&self) -> bool {
        self.registry.is_locked() || self.state.is_locked() || self.growing.is_locked()
    }
}
