//! The host cache: page-locked blocks, reused only after every stream that used them has passed that use.
//!
//! The cache has one bin for each size class, each with its own lock. A block that is dropped while a stream may still use it
//! waits in its bin, filed under the point of a stream that it waits for. The completion events of one stream pass in order. So
//! a request that finds no free block queries each stream's first block, and skips the rest if that stream is behind. A stuck
//! stream delays its own blocks and no others. No vendor call happens under a lock: callers pass a closure, which runs with the
//! block out of its bin.
//!
//! | state | where | leaves by |
//! | --- | --- | --- |
//! | live | with a buffer | the end of the buffer |
//! | free | in its bin, no stream uses it | a request; the cap or a trim frees it |
//! | waiting | in its bin, streams may use it | a request, the cap or a trim that finds them done |
//! | kept | in its bin: its buffer is gone, captures or graphs recorded it | the last of them releases it |
//! | unmarked | in its bin: the end of its use is unknown | the end of the runtime |
//!
//! *The cap* bounds the cached bytes, free and waiting, not the held bytes. A live buffer is never refused because of it, and
//! blocks that graphs keep are not counted. A release that might exceed it frees the blocks that were free longest. If none is
//! free, it queries waiting blocks, and stops after a handful of streams that are behind. So their number does not slow down
//! every release. Only blocks still in use may stay above the cap. The hit path reads only the held bytes, by one relaxed load,
//! because they include the cached bytes. If that does not suffice, the bins' own counts decide.
//!
//! *Orderings.* The bin's lock guards everything about a block. The counters are relaxed: each is exact once no thread is
//! active. Two threads that release blocks to different bins at once must not both miss the other's count. So each counts, then
//! passes a sequentially consistent fence, then sums up, and at least one sees both. Only a release that races with an
//! allocation may read the held bytes from before it. It then leaves the excess to the next release.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroUsize;
use std::ops::Range;

use super::block_uses::BlockUses;
use super::completion_events::{CompletionEvent, Point};
use super::size_class;
use crate::primitive::HostPtr;
use crate::primitive::{Arc, AtomicU64, Mutex, Ordering, fence};

/// Without a cap.
const NO_CAP: u64 = u64::MAX;
/// The number of streams found behind before the cap stops querying.
const ENOUGH_BEHIND: usize = 16;
const WORDS: usize = size_class::COUNT.div_ceil(64);

/// A block of page-locked memory. It belongs to a buffer or to the cache, even while graphs keep it.
#[derive(Debug)]
pub(crate) struct PinnedBlock {
    pub(crate) ptr: HostPtr,
    pub(crate) bytes: usize,
    pub(crate) class: usize,
    pub(crate) uses: Arc<BlockUses>,
    /// Size of the pieces in which it was registered, the last of which may be shorter. `None` if the backend allocated it.
    pub(crate) piece_bytes: Option<NonZeroUsize>,
    /// The time of its release by a buffer, on the cache's clock, which runs only if there is a cap.
    idle_since: u64,
}

impl PinnedBlock {
    pub(crate) fn new(ptr: HostPtr, bytes: usize, class: usize, piece_bytes: Option<NonZeroUsize>) -> OwnedBlock {
        Box::new(Self { ptr, bytes, class, uses: BlockUses::new(), piece_bytes, idle_since: 0 })
    }

    /// Splits a range of bytes, counted from the start of the block, at the borders between registrations. An empty range is
    /// one part.
    pub(crate) fn cut(&self, range: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let piece_bytes = self.piece_bytes;
        let mut rest = Some(range);
        std::iter::from_fn(move || {
            let Range { start, end } = rest.take()?;
            let border = piece_bytes.map_or(end, |piece| (start / piece + 1).saturating_mul(piece.get()));
            if border < end {
                rest = Some(border..end);
            }
            Some(start..end.min(border))
        })
    }
}

/// A block that cannot be reused until [`HostCache::let_go`].
#[derive(Debug)]
#[must_use]
pub(crate) struct KeptBlock {
    pub(crate) ptr: HostPtr,
    class: usize,
    pub(crate) uses: Arc<BlockUses>,
}

impl PinnedBlock {
    /// Keeps the block. It belongs to a buffer, which the caller must borrow.
    pub(crate) fn keep(&self) -> KeptBlock {
        KeptBlock::new(self.ptr, self.class, &self.uses)
    }
}

impl KeptBlock {
    /// The caller must ensure that the block stays in the meantime.
    fn new(ptr: HostPtr, class: usize, uses: &Arc<BlockUses>) -> Self {
        uses.count_keeper();
        Self { ptr, class, uses: Arc::clone(uses) }
    }

    /// Adds another keeper of the block.
    pub(crate) fn keep(&self) -> Self {
        Self::new(self.ptr, self.class, &self.uses)
    }
}

/// The form in which buffers and bins exchange a block: one pointer to move.
pub(crate) type OwnedBlock = Box<PinnedBlock>;

#[derive(Debug, Default)]
struct BinState {
    /// Ordered by release: the block released last is at the back.
    free: VecDeque<OwnedBlock>,
    /// Keyed by a point that the block waits for, and a number that tells apart blocks waiting for the same point.
    waiting: BTreeMap<(Point, u64), OwnedBlock>,
    /// The number of blocks put there so far.
    filed: u64,
    live: u64,
    requested_bytes: u64,
    hits: u64,
    misses: u64,
    /// By address.
    kept: BTreeMap<HostPtr, OwnedBlock>,
    unmarked: Vec<OwnedBlock>,
}

impl BinState {
    /// Files a block if streams use it; otherwise returns it.
    #[inline]
    fn wait(&mut self, block: OwnedBlock) -> Option<OwnedBlock> {
        match block.uses.first() {
            Some(point) => {
                self.filed += 1;
                self.waiting.insert((point, self.filed), block);
                None
            }
            None => Some(block),
        }
    }

    /// Files a block that must not be reused.
    #[cold]
    fn set_aside(&mut self, block: OwnedBlock) {
        if block.uses.is_kept() {
            self.kept.insert(block.ptr, block);
        } else {
            self.unmarked.push(block);
        }
    }
}

#[derive(Debug)]
struct Bin {
    state: Mutex<BinState>,
    /// Bytes of the free and waiting blocks; written under the lock, read without.
    cached_bytes: AtomicU64,
}

impl Bin {
    /// Changes the count of cached bytes. The caller must hold the lock, so that no other thread changes it.
    #[inline]
    fn count_cached(&self, more: usize, less: usize) {
        let bytes = self.cached_bytes.load(Ordering::Relaxed);
        self.cached_bytes.store(bytes + more as u64 - less as u64, Ordering::Relaxed);
    }
}

#[derive(Debug)]
pub(crate) struct HostCache {
    bins: Box<[Bin]>,
    cap: u64,
    /// A bit for each class that has ever had a block.
    used_classes: [AtomicU64; WORDS],
    /// Counts releases, if there is a cap.
    clock: AtomicU64,
    /// The class and the stream whose waiting block the cap queries first.
    next_asked: Mutex<(usize, u64)>,
    held_bytes: AtomicU64,
    held_blocks: AtomicU64,
    allocations: AtomicU64,
    frees: AtomicU64,
    cap_evictions: AtomicU64,
}

impl HostCache {
    pub(crate) fn new(cap_bytes: Option<u64>) -> Self {
        let bin = |_| Bin { state: Mutex::new(BinState::default()), cached_bytes: AtomicU64::new(0) };
        Self {
            bins: (0..size_class::COUNT).map(bin).collect(),
            cap: cap_bytes.unwrap_or(NO_CAP),
            used_classes: std::array::from_fn(|_| AtomicU64::new(0)),
            clock: AtomicU64::new(0),
            next_asked: Mutex::new((0, 0)),
            held_bytes: AtomicU64::new(0),
            held_blocks: AtomicU64::new(0),
            allocations: AtomicU64::new(0),
            frees: AtomicU64::new(0),
            cap_evictions: AtomicU64::new(0),
        }
    }

    // ---------------------------------------------------------------- requests

    /// Returns a free block, if there is one, and counts it as allocated for `requested` bytes.
    #[inline]
    pub(crate) fn find(&self, class: usize, requested: usize) -> Option<OwnedBlock> {
        let bin = &self.bins[class];
        let mut state = bin.state.lock();
        let block = state.free.pop_back()?;
        block.uses.set_live(true);
        bin.count_cached(0, block.bytes);
        state.hits += 1;
        state.live += 1;
        state.requested_bytes += requested as u64;
        Some(block)
    }

    /// Queries the first waiting block of each stream, and returns the first whose streams are done. It takes out one
    /// block at a time, so that other threads find the rest.
    pub(crate) fn take_waiting(
        &self,
        class: usize,
        requested: usize,
        is_passed: impl Fn(&CompletionEvent) -> bool,
    ) -> Option<OwnedBlock> {
        let block = self.pop_passed(class, &mut 0, u64::MAX, is_passed, || true)?;
        self.count_given(&block, requested, false);
        Some(block)
    }

    /// Takes out a waiting block whose streams are done. Queries blocks filed under the streams from `from` up to `to`,
    /// and moves `from` to the stream to continue with. For each stream that is behind, `goes_on` decides whether to
    /// continue.
    fn pop_passed(
        &self,
        class: usize,
        from: &mut u64,
        to: u64,
        is_passed: impl Fn(&CompletionEvent) -> bool,
        mut goes_on: impl FnMut() -> bool,
    ) -> Option<OwnedBlock> {
        while *from < to {
            let (stream, block) = self.pop_waiting_from(class, *from, to)?;
            *from = stream;
            if block.uses.are_over(&is_passed) {
                return Some(block);
            }
            let is_behind = block.uses.first().is_some_and(|point| point.stream == stream);
            self.put_back(block);
            // Otherwise it waits for another stream, and the next block of this one may wait for none.
            if is_behind {
                *from = stream + 1;
                if !goes_on() {
                    return None;
                }
            }
        }
        None
    }

    /// Counts a block that was found among the waiting (`fresh` false) or newly allocated.
    pub(crate) fn count_given(&self, block: &PinnedBlock, requested: usize, fresh: bool) {
        if fresh {
            self.used_classes[block.class / 64].fetch_or(1 << (block.class % 64), Ordering::Relaxed);
            self.held_bytes.fetch_add(block.bytes as u64, Ordering::Relaxed);
            self.held_blocks.fetch_add(1, Ordering::Relaxed);
            self.allocations.fetch_add(1, Ordering::Relaxed);
        }
        let mut state = self.bins[block.class].state.lock();
        block.uses.set_live(true);
        state.live += 1;
        state.requested_bytes += requested as u64;
        if fresh {
            state.misses += 1;
        } else {
            state.hits += 1;
        }
    }

    // ---------------------------------------------------------------- releases

    /// Takes a block back from the buffer that owned it. Returns whether the cap may be exceeded now.
    #[inline]
    pub(crate) fn give_back(&self, block: OwnedBlock, requested: usize) -> bool {
        let bin = &self.bins[block.class];
        let mut state = bin.state.lock();
        block.uses.set_live(false);
        state.live -= 1;
        state.requested_bytes -= requested as u64;
        if block.uses.is_kept() || block.uses.unmarked.load(Ordering::Relaxed) {
            state.set_aside(block);
            return false;
        }
        self.cache(bin, &mut state, block);
        drop(state);
        self.may_exceed_cap()
    }

    /// Files a block that neither a buffer nor a graph has from here on.
    #[inline]
    fn cache(&self, bin: &Bin, state: &mut BinState, mut block: OwnedBlock) {
        if self.cap != NO_CAP {
            block.idle_since = self.clock.fetch_add(1, Ordering::Relaxed);
        }
        bin.count_cached(block.bytes, 0);
        let free = if block.uses.is_empty() { Some(block) } else { state.wait(block) };
        state.free.extend(free);
    }

    /// Keeps the block at `ptr` with these uses if a buffer owns it.
    pub(crate) fn keep_if_live(&self, ptr: HostPtr, class: usize, uses: &Arc<BlockUses>) -> Option<KeptBlock> {
        let _state = self.bins[class].state.lock();
        uses.is_live().then(|| KeptBlock::new(ptr, class, uses))
    }

    /// Releases a kept block. Returns whether the cap may be exceeded now.
    pub(crate) fn let_go(&self, kept: KeptBlock) -> bool {
        let bin = &self.bins[kept.class];
        let mut state = bin.state.lock();
        kept.uses.uncount_keeper();
        if kept.uses.is_kept() || kept.uses.is_live() {
            return false;
        }
        let Some(block) = state.kept.remove(&kept.ptr) else { return false };
        if block.uses.unmarked.load(Ordering::Relaxed) {
            state.set_aside(block);
            return false;
        }
        self.cache(bin, &mut state, block);
        drop(state);
        self.may_exceed_cap()
    }

    // ---------------------------------------------------------------- the cap and trimming

    /// Returns whether the cap may be exceeded: `false` is certain.
    #[inline]
    pub(crate) fn may_exceed_cap(&self) -> bool {
        self.held_bytes.load(Ordering::Relaxed) > self.cap
    }

    /// Frees blocks with `free`, which returns whether the backend took them, until the cached bytes are within the cap or the
    /// rest is in use.
    pub(crate) fn keep_to_cap(
        &self,
        is_passed: impl Fn(&CompletionEvent) -> bool,
        mut free: impl FnMut(&PinnedBlock) -> bool,
    ) {
        fence(Ordering::SeqCst);
        let mut behind = 0;
        while self.cached_bytes() > self.cap {
            let block = self.pop_longest_free().or_else(|| self.pop_any_passed(&mut behind, &is_passed));
            let Some(block) = block else { return };
            if !free(&block) {
                self.put_back(block);
                return;
            }
            self.cap_evictions.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Frees every block that no stream uses with `free`, which returns whether the backend took it.
    pub(crate) fn trim(
        &self,
        is_passed: impl Fn(&CompletionEvent) -> bool,
        mut free: impl FnMut(&PinnedBlock) -> bool,
    ) {
        for class in self.used_classes() {
            let mut kept = Vec::new();
            let mut from = 0;
            while let Some(block) = self.pop_passed(class, &mut from, u64::MAX, &is_passed, || true) {
                if !free(&block) {
                    kept.push(block);
                }
            }
            for _ in 0..self.free_blocks(class) {
                let Some(block) = self.pop_free(class) else { break };
                if !free(&block) {
                    kept.push(block);
                }
            }
            kept.into_iter().for_each(|block| self.put_back(block));
        }
    }

    /// Returns the classes that have ever had a block.
    fn used_classes(&self) -> impl Iterator<Item = usize> + '_ {
        self.used_classes.iter().enumerate().flat_map(|(index, word)| {
            let mut bits = word.load(Ordering::Relaxed);
            std::iter::from_fn(move || {
                let bit = bits.trailing_zeros() as usize;
                bits &= bits.wrapping_sub(1);
                (bit < 64).then_some(index * 64 + bit)
            })
        })
    }

    fn cached_bytes(&self) -> u64 {
        self.used_classes().map(|class| self.bins[class].cached_bytes.load(Ordering::Relaxed)).sum()
    }

    fn free_blocks(&self, class: usize) -> usize {
        self.bins[class].state.lock().free.len()
    }

    /// Takes out the first waiting block of the first stream from `from` on and below `to`. The caller queries the
    /// backend about it without a lock.
    fn pop_waiting_from(&self, class: usize, from: u64, to: u64) -> Option<(u64, OwnedBlock)> {
        let bin = &self.bins[class];
        let mut state = bin.state.lock();
        let start = Point { stream: from, number: 0 };
        let key = *state.waiting.range((start, 0)..).next()?.0;
        let block = if key.0.stream < to { state.waiting.remove(&key)? } else { return None };
        bin.count_cached(0, block.bytes);
        Some((key.0.stream, block))
    }

    /// Takes out any waiting block, for the end of the runtime.
    pub(crate) fn pop_waiting(&self, class: usize) -> Option<OwnedBlock> {
        self.pop_waiting_from(class, 0, u64::MAX).map(|(_, block)| block)
    }

    /// Takes out one unmarked block, for the end of the runtime.
    pub(crate) fn pop_unmarked(&self, class: usize) -> Option<OwnedBlock> {
        self.bins[class].state.lock().unmarked.pop()
    }

    /// Takes out the block of a class that has been free longest.
    pub(crate) fn pop_free(&self, class: usize) -> Option<OwnedBlock> {
        let bin = &self.bins[class];
        let mut state = bin.state.lock();
        let block = state.free.pop_front()?;
        bin.count_cached(0, block.bytes);
        Some(block)
    }

    /// Takes out the block that has been free longest. A block that alone exceeds the cap comes first.
    fn pop_longest_free(&self) -> Option<OwnedBlock> {
        let front = |class: usize| {
            let state = self.bins[class].state.lock();
            state.free.front().map(|block| (block.bytes as u64 <= self.cap, block.idle_since, class))
        };
        loop {
            let (_, _, class) = self.used_classes().filter_map(front).min()?;
            if let Some(block) = self.pop_free(class) {
                return Some(block);
            }
            // Another thread took it in the meantime.
        }
    }

    /// Takes out a waiting block of any class whose streams are done. Stops after a few streams that are behind, counted in
    /// `behind`; the next call begins with the next stream.
    fn pop_any_passed(&self, behind: &mut usize, is_passed: impl Fn(&CompletionEvent) -> bool) -> Option<OwnedBlock> {
        let (first, stream) = *self.next_asked.lock();
        let later = self.used_classes().filter(|class| *class > first).map(|class| (class, 0, u64::MAX));
        let earlier = self.used_classes().filter(|class| *class < first).map(|class| (class, 0, u64::MAX));
        let round = std::iter::once((first, stream, u64::MAX)).chain(later).chain(earlier);
        for (class, mut from, to) in round.chain(std::iter::once((first, 0, stream))) {
            let goes_on = || {
                *behind += 1;
                *behind < ENOUGH_BEHIND
            };
            let block = self.pop_passed(class, &mut from, to, &is_passed, goes_on);
            if block.is_some() {
                return block;
            }
            if *behind >= ENOUGH_BEHIND {
                *self.next_asked.lock() = (class, from);
                return None;
            }
        }
        None
    }

    /// Returns a free or waiting block to its bin.
    pub(crate) fn put_back(&self, block: OwnedBlock) {
        let bin = &self.bins[block.class];
        let mut state = bin.state.lock();
        bin.count_cached(block.bytes, 0);
        if let Some(block) = state.wait(block) {
            let at = state.free.partition_point(|other| other.idle_since <= block.idle_since);
            state.free.insert(at, block);
        }
    }

    /// Removes a freed block from the counts.
    pub(crate) fn count_freed(&self, block: &PinnedBlock) {
        self.held_bytes.fetch_sub(block.bytes as u64, Ordering::Relaxed);
        self.held_blocks.fetch_sub(1, Ordering::Relaxed);
        self.frees.fetch_add(1, Ordering::Relaxed);
    }

    // ---------------------------------------------------------------- statistics

    pub(crate) fn statistics(&self) -> HostCacheStatistics {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mut sum = HostCacheStatistics {
            held_bytes: count(&self.held_bytes),
            held_blocks: count(&self.held_blocks),
            allocations: count(&self.allocations),
            frees: count(&self.frees),
            cap_evictions: count(&self.cap_evictions),
            ..HostCacheStatistics::default()
        };
        for class in self.used_classes() {
            let state = self.bins[class].state.lock();
            let block_bytes = size_class::block_bytes(class) as u64;
            let (free, waiting) = (state.free.len() as u64, state.waiting.len() as u64);
            let (kept, unmarked) = (state.kept.len() as u64, state.unmarked.len() as u64);
            sum.live_blocks += state.live;
            sum.live_bytes += state.live * block_bytes;
            sum.requested_bytes += state.requested_bytes;
            sum.free_blocks += free;
            sum.free_bytes += free * block_bytes;
            sum.waiting_blocks += waiting;
            sum.waiting_bytes += waiting * block_bytes;
            sum.graph_blocks += kept;
            sum.graph_bytes += kept * block_bytes;
            sum.unmarked_blocks += unmarked;
            sum.unmarked_bytes += unmarked * block_bytes;
            sum.hits += state.hits;
            sum.misses += state.misses;
        }
        sum
    }
}

/// The state and the history of the host cache.
///
/// When no other thread is active, these laws hold ([`HostCacheStatistics::broken_law`] checks them):
///
/// - Every block is in one state: `held_blocks = live_blocks + graph_blocks + free_blocks + waiting_blocks +
///   unmarked_blocks`, and the same in bytes.
/// - No more is requested than is live: `requested_bytes <= live_bytes`.
/// - No block is lost: `held_blocks = allocations - frees`.
/// - Every allocation served a request: `allocations = misses`.
/// - Every eviction was a free: `cap_evictions <= frees`.
/// - If there is a cap, `free_bytes` is within it. So is `free_bytes + waiting_bytes`, except for blocks that were still in use
///   at the last check of the cap. This law needs the cap and is not checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct HostCacheStatistics {
    /// Bytes requested by the live buffers.
    pub requested_bytes: u64,
    /// Bytes of page-locked memory held, in any state.
    pub held_bytes: u64,
    /// Blocks held.
    pub held_blocks: u64,
    /// Blocks that buffers own.
    pub live_blocks: u64,
    /// Bytes of those.
    pub live_bytes: u64,
    /// Blocks whose buffers are gone and that captures or graphs keep.
    pub graph_blocks: u64,
    /// Bytes of those.
    pub graph_bytes: u64,
    /// Blocks that are available at once.
    pub free_blocks: u64,
    /// Bytes of those.
    pub free_bytes: u64,
    /// Blocks whose streams may not have passed their last use.
    pub waiting_blocks: u64,
    /// Bytes of those.
    pub waiting_bytes: u64,
    /// Blocks whose end of use is unknown; freed when the runtime ends.
    pub unmarked_blocks: u64,
    /// Bytes of those.
    pub unmarked_bytes: u64,
    /// Blocks that the backend freed only in part: it refused to unregister the rest of their pieces. They are not held, and no
    /// code uses them. [`Runtime::trim`](crate::Runtime::trim) and the end of the runtime retry them.
    pub remnant_blocks: u64,
    /// Bytes of those.
    pub remnant_bytes: u64,
    /// Requests served from the cache.
    pub hits: u64,
    /// Requests that the backend served.
    pub misses: u64,
    /// Blocks that the backend allocated or registered.
    pub allocations: u64,
    /// Blocks that were freed, for any reason, including those freed only in part.
    pub frees: u64,
    /// Blocks that were freed because of the cap.
    pub cap_evictions: u64,
}

impl HostCacheStatistics {
    /// Returns the first law that does not hold, or `None` if all hold. Active threads may hold a block that is temporarily in
    /// no state.
    #[must_use]
    pub fn broken_law(&self) -> Option<&'static str> {
        let blocks =
            self.live_blocks + self.graph_blocks + self.free_blocks + self.waiting_blocks + self.unmarked_blocks;
        let bytes = self.live_bytes + self.graph_bytes + self.free_bytes + self.waiting_bytes + self.unmarked_bytes;
        let laws = [
            (
                self.held_blocks == blocks,
                "held_blocks = live_blocks + graph_blocks + free_blocks + waiting_blocks + unmarked_blocks",
            ),
            (
                self.held_bytes == bytes,
                "held_bytes = live_bytes + graph_bytes + free_bytes + waiting_bytes + unmarked_bytes",
            ),
            (self.requested_bytes <= self.live_bytes, "requested_bytes <= live_bytes"),
            (self.held_blocks + self.frees == self.allocations, "held_blocks = allocations - frees"),
            (self.allocations == self.misses, "allocations = misses"),
            (self.cap_evictions <= self.frees, "cap_evictions <= frees"),
        ];
        laws.into_iter().find(|(holds, _)| !holds).map(|(_, law)| law)
    }
}

#[cfg(test)]
impl HostCache {
    pub(crate) fn hold_locks(&self) -> impl Drop + '_ {
        crate::testing::Held(self.bins.iter().map(|bin| bin.state.lock()).collect::<Vec<_>>())
    }

    pub(crate) fn is_locked(&self) -> bool {
        self.used_classes().any(|class| self.bins[class].state.is_locked())
    }
}
