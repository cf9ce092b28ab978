//! The device memory of one stream: an area whose free pages are free in the order of the stream.
//!
//! A block that the stream frees serves its next request at once, without a call of the backend: the work of both is in the order of
//! the stream. Work of another stream on a block comes after an event that it waits for (`device_block.rs`).
//!
//! | state of a block | where | leaves by |
//! | --- | --- | --- |
//! | live | with a buffer, a capture or a graph | the end of the last of them |
//! | cached | in a list of its size | a request of the stream; a request that finds no free pages, or a trim, merges it |
//! | waiting | in the memory of its stream: other streams may use it, or its own has ended | a request or a trim that finds them done |
//! | unmarked | in the memory of its stream: the end of its use is unknown | the end of the runtime |
//!
//! A block that leaves for good becomes free pages. The memory outlives its stream: then every free page waits for the stream's last
//! completion event, and once no block is left, the pool takes the parts (`device_pool.rs`).
//!
//! *Locks.* The lock is held for no call of the backend, and no other lock is taken under it.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, OnceLock};

use super::area::{Address, Area, Leaving, Piece, Place, Plan, Request};
use super::completion_events::{CompletionEvent, Point};
use super::device_pool::{DeviceMemoryStatistics, DevicePool};
use super::free_lists::FreeLists;
use super::poison::PATTERN;
use super::ranges::Run;
use super::slabs::{self, SLAB_PAGES};
use super::stream_use::{LiveStream, StreamUse, UseEnd};
use crate::ledger::DeviceBlockInfo;
use crate::primitive::Mutex;
use highwater_hal::{DevicePtr, PhysicalMemoryId};

impl Address for DevicePtr {
    fn number(self) -> u64 {
        self.get()
    }

    fn plus(self, bytes: usize) -> Self {
        self.offset(bytes)
    }
}

/// Where a block lies in the memory of its stream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lot {
    pub(crate) ptr: DevicePtr,
    /// The first page of the block, or of its slab.
    start: u32,
    /// As [`Request::size`].
    pub(crate) size: u32,
}

impl Lot {
    fn of(place: &Place<DevicePtr>) -> Self {
        Self { ptr: place.ptr, start: place.start, size: place.size }
    }

    pub(crate) fn bytes(&self) -> usize {
        slabs::bytes_of(self.size)
    }

    fn run(&self) -> Run {
        let pages = if slabs::is_in_slab(self.size) { SLAB_PAGES } else { self.size };
        Run { start: self.start, pages }
    }
}

/// A block, as the memory that keeps it knows it.
///
/// # Safety
/// Only [`DeviceBlock`](crate::device_block::DeviceBlock) implements it, which casts what it gets back.
pub(crate) unsafe trait Placed: Send + Sync {
    /// Returns the part of a stream's memory that the block is.
    fn lot(&self) -> Option<Lot>;

    /// Notes that the memory has taken its part back. The end of the block then returns nothing.
    fn forget_lot(&self);
}

/// A block that waits for other streams.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) lot: Lot,
    /// Completion events that are not known to be passed.
    pub(crate) after: Vec<Arc<CompletionEvent>>,
    /// Uses that have no completion event yet, because other code captures their stream.
    pub(crate) later: Vec<StreamUse>,
    /// True if the use of a stream has no completion event.
    pub(crate) unmarked: bool,
}

impl Waiting {
    pub(crate) fn of(lot: Lot) -> Self {
        Self { lot, after: Vec::new(), later: Vec::new(), unmarked: false }
    }

    /// Records the ends of the uses that have no completion event yet.
    pub(crate) fn record_later(&mut self) {
        for use_ in std::mem::take(&mut self.later) {
            match use_.completion() {
                UseEnd::At(completion) => self.after.push(completion),
                UseEnd::Later => self.later.push(use_),
                UseEnd::Unknown => self.unmarked = true,
            }
        }
    }

    fn is_over(&self) -> bool {
        self.after.is_empty() && self.later.is_empty() && !self.unmarked
    }
}

/// Where a request found its block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    /// In the list of its size.
    List,
    /// In free pages.
    Free,
    /// In free pages, after waiting blocks were collected.
    Waiting,
    /// In free pages, after the lists were emptied.
    Merged,
    /// In new memory.
    Grown,
}

/// The device memory of one stream.
pub(crate) struct StreamMemory {
    pub(crate) pool: Arc<DevicePool>,
    stream: OnceLock<StreamUse>,
    /// The key of the stream, or of its part in a capture.
    pub(crate) key: u64,
    /// Identifies the memory among those of the device.
    pub(crate) id: u64,
    /// True if free memory has a pattern in the order of the stream.
    pub(crate) is_poisoned: bool,
    state: Mutex<State>,
}

impl fmt::Debug for StreamMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamMemory").field("key", &self.key).finish_non_exhaustive()
    }
}

struct State {
    lists: FreeLists<Arc<dyn Placed>>,
    area: Area<DevicePtr>,
    /// The memory of each mapped part, by address.
    physical: BTreeMap<u64, PhysicalMemoryId>,
    /// The places that are given out, by address: live, cached or waiting.
    lots: BTreeMap<u64, Lot>,
    waiting: VecDeque<Waiting>,
    unmarked: Vec<Lot>,
    /// True once the stream has ended.
    has_ended: bool,
    live: u64,
    live_bytes: u64,
    /// By [`Found`].
    found: [u64; 5],
}

impl StreamMemory {
    pub(crate) fn new(pool: Arc<DevicePool>, key: u64, id: u64, is_poisoned: bool) -> Arc<Self> {
        let is_mapped = pool.parts.granularity().is_some();
        let state = State {
            lists: FreeLists::default(),
            // No call on device memory minds the borders of mapped parts. An allocation of the backend is a range of its own.
            area: Area::new(0, is_mapped, false),
            physical: BTreeMap::new(),
            lots: BTreeMap::new(),
            waiting: VecDeque::new(),
            unmarked: Vec::new(),
            has_ended: false,
            live: 0,
            live_bytes: 0,
            found: [0; 5],
        };
        Arc::new(Self { pool, stream: OnceLock::new(), key, id, is_poisoned, state: Mutex::new(state) })
    }

    /// Makes the stream known, once.
    pub(crate) fn belongs_to(&self, stream: StreamUse) {
        let _ = self.stream.set(stream);
    }

    /// Returns the stream, while it is alive.
    pub(crate) fn stream(&self) -> Option<Arc<dyn LiveStream>> {
        self.stream.get()?.stream()
    }

    /// Returns whether the stream has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.state.lock().has_ended
    }

    /// Returns the completion event of the stream's last work, once the stream has ended. `None` if its end has none.
    pub(crate) fn last(&self) -> Option<Arc<CompletionEvent>> {
        self.stream.get()?.last()
    }

    /// Returns the record of the stream, once it is known.
    pub(crate) fn stream_use(&self) -> Option<&StreamUse> {
        self.stream.get()
    }

    // ---------------------------------------------------------------- requests

    /// Takes a block from the list of its size.
    #[inline]
    pub(crate) fn take_cached(&self, size: u32) -> Option<Arc<dyn Placed>> {
        let mut state = self.state.lock();
        let block = state.lists.take(size)?;
        state.begin_life(slabs::bytes_of(size), Found::List);
        Some(block)
    }

    /// Takes free pages.
    pub(crate) fn take(&self, request: Request, found: Found) -> Option<Lot> {
        self.state.lock().take(request, found)
    }

    /// Notes a request that found no block in a list. Returns what the lists no longer keep.
    pub(crate) fn note_miss(&self, size: u32) {
        let dropped = {
            let mut state = self.state.lock();
            let blocks = state.lists.note_miss(size);
            state.merge(&blocks);
            blocks
        };
        drop(dropped);
    }

    /// Merges every cached block.
    pub(crate) fn empty_lists(&self) {
        let dropped = {
            let mut state = self.state.lock();
            let blocks = state.lists.take_all();
            state.merge(&blocks);
            blocks
        };
        drop(dropped);
    }

    /// Merges the waiting blocks whose streams have passed their use, with `wait` after waiting for them. Returns whether any
    /// was merged.
    pub(crate) fn collect(&self, wait: bool) -> bool {
        let count = self.state.lock().waiting.len();
        let mut any = false;
        // The first event of each stream that is not passed. No later one of the stream is, so none is queried.
        let mut behind: Vec<Point> = Vec::new();
        for _ in 0..count {
            let Some(mut waiting) = self.pop_waiting() else { break };
            waiting.record_later();
            waiting.after.retain(|completion| {
                let point = completion.point();
                if behind.iter().any(|first| first.stream == point.stream && first.number <= point.number) {
                    return true;
                }
                let is_passed = matches!(self.pool.services.is_passed(completion, wait), Ok(true));
                if !is_passed {
                    behind.push(point);
                }
                !is_passed
            });
            any |= self.file(waiting);
        }
        any
    }

    fn pop_waiting(&self) -> Option<Waiting> {
        self.state.lock().waiting.pop_front()
    }

    // ---------------------------------------------------------------- releases

    /// Takes back a block that no other stream uses.
    #[inline]
    pub(crate) fn give_back(&self, lot: Lot, block: Arc<dyn Placed>) {
        let mut state = self.state.lock();
        state.end_life(lot.bytes());
        if state.has_ended {
            drop(state);
            block.forget_lot();
            return self.wait_for_end(lot);
        }
        if let Some(surplus) = state.lists.keep(lot.size, block) {
            state.free(lot);
            drop(state);
            // Its memory has been taken from it.
            surplus.forget_lot();
        }
    }

    /// Takes back the memory of a block that other streams may use.
    pub(crate) fn give_back_waiting(&self, mut waiting: Waiting) {
        let mut state = self.state.lock();
        state.end_life(waiting.lot.bytes());
        if state.has_ended {
            drop(state);
            match self.last() {
                Some(last) => waiting.after.push(last),
                None => waiting.unmarked = true,
            }
        } else {
            drop(state);
        }
        self.file(waiting);
    }

    /// Files a block that no buffer owns. Returns whether its pages are free now.
    fn file(&self, waiting: Waiting) -> bool {
        let is_over = waiting.is_over() && self.write_pattern(&waiting.lot);
        self.state.lock().file(waiting, is_over);
        is_over
    }

    /// Returns whether free memory has the pattern: not what was freed after the end of the stream.
    pub(crate) fn has_pattern(&self) -> bool {
        self.is_poisoned && self.stream().is_some() && !self.has_ended()
    }

    /// Gives a block the pattern of free memory, if the stream is alive. Returns false if it has to be tried again.
    fn write_pattern(&self, lot: &Lot) -> bool {
        let Some(stream) = self.stream().filter(|_| self.is_poisoned) else { return true };
        // SAFETY: No buffer owns the block, and the streams that used it have executed that.
        unsafe { stream.fill(lot.ptr, lot.bytes(), PATTERN) }.is_ok()
    }

    /// Files a block whose own stream has ended.
    #[cold]
    fn wait_for_end(&self, lot: Lot) {
        let last = self.last();
        let mut state = self.state.lock();
        match last {
            Some(last) => {
                state.waiting.push_back(Waiting { after: vec![last], ..Waiting::of(lot) });
            }
            None => state.unmarked.push(lot),
        }
    }

    /// Notes that the stream is ending. Cached blocks become free pages. Until the stream's last work is done, no other stream may
    /// use them: [`DevicePool`] takes them only after [`StreamMemory::last`].
    pub(crate) fn end(&self) {
        self.state.lock().has_ended = true;
        self.empty_lists();
    }

    // ---------------------------------------------------------------- parts

    /// Returns the plan of a growth.
    pub(crate) fn plan(&self, request: Request) -> Option<Plan<DevicePtr>> {
        self.state.lock().area.plan(request)
    }

    /// Adds the pieces of a growth, and takes the request's part of them.
    pub(crate) fn add(
        &self,
        pieces: &[Piece<DevicePtr>],
        physical: &[PhysicalMemoryId],
        plan: &Plan<DevicePtr>,
        request: Request,
    ) -> Option<Lot> {
        let mut state = self.state.lock();
        state.area.add(pieces, plan.hole);
        state.physical.extend(pieces.iter().zip(physical).map(|(piece, memory)| (piece.ptr.get(), *memory)));
        state.take(request, Found::Grown)
    }

    /// Gives up a plan: its hole is free again.
    pub(crate) fn cancel(&self, plan: &Plan<DevicePtr>) {
        self.state.lock().area.cancel(plan);
    }

    /// Takes the last free piece out that begins below a page, and lowers the number to that page. Returns the physical memory of
    /// a mapped one.
    pub(crate) fn take_piece(&self, below: &mut u32) -> Option<(Leaving<DevicePtr>, Option<PhysicalMemoryId>)> {
        let mut state = self.state.lock();
        let leaving = state.area.take_piece(below, u64::MAX)?;
        let memory = state.physical.remove(&leaving.piece.ptr.get());
        Some((leaving, memory))
    }

    /// As [`Area::take_scattered_piece`], with the physical memory of a mapped one.
    pub(crate) fn take_scattered_piece(
        &self,
        kept: Option<Run>,
    ) -> Option<(Leaving<DevicePtr>, Option<PhysicalMemoryId>)> {
        let mut state = self.state.lock();
        let leaving = state.area.take_scattered_piece(kept)?;
        let memory = state.physical.remove(&leaving.piece.ptr.get());
        Some((leaving, memory))
    }

    /// Takes the smallest free piece out that has at least so many bytes.
    pub(crate) fn take_piece_of(&self, bytes: usize) -> Option<Leaving<DevicePtr>> {
        self.state.lock().area.take_smallest_piece(bytes)
    }

    /// Puts a piece back that was taken out.
    pub(crate) fn put_piece_back(&self, leaving: Leaving<DevicePtr>, memory: Option<PhysicalMemoryId>) {
        let mut state = self.state.lock();
        state.physical.extend(memory.map(|memory| (leaving.piece.ptr.get(), memory)));
        state.area.put_back(leaving);
    }

    /// Notes that a piece is gone.
    pub(crate) fn piece_has_left(&self, leaving: Leaving<DevicePtr>) {
        self.state.lock().area.has_left(leaving, false);
    }

    /// Returns whether no place is given out.
    pub(crate) fn is_unused(&self) -> bool {
        self.state.lock().lots.is_empty()
    }

    /// Frees every place, at the end of the runtime.
    pub(crate) fn free_all(&self) {
        self.empty_lists();
        let mut state = self.state.lock();
        let waiting = std::mem::take(&mut state.waiting).into_iter().map(|waiting| waiting.lot);
        let lots: Vec<_> = waiting.chain(std::mem::take(&mut state.unmarked)).collect();
        lots.into_iter().for_each(|lot| state.free(lot));
    }

    // ---------------------------------------------------------------- questions

    /// Returns the block that contains an address, if it is live.
    pub(crate) fn find(&self, ptr: DevicePtr) -> Option<DeviceBlockInfo> {
        let state = self.state.lock();
        let lot = state.lots.range(..=ptr.get()).next_back().map(|(_, lot)| *lot)?;
        let is_inside = ptr.get() - lot.ptr.get() < lot.bytes() as u64;
        let is_cached = || state.lists.blocks().any(|block| block.lot().is_some_and(|cached| cached.ptr == lot.ptr));
        let is_waiting = || {
            state.waiting.iter().any(|waiting| waiting.lot.ptr == lot.ptr)
                || state.unmarked.iter().any(|unmarked| unmarked.ptr == lot.ptr)
        };
        (is_inside && !is_cached() && !is_waiting()).then(|| DeviceBlockInfo {
            device: self.pool.device,
            base: lot.ptr,
            bytes: lot.bytes(),
        })
    }

    /// Returns the bytes of live blocks.
    pub(crate) fn live_bytes(&self) -> u64 {
        self.state.lock().live_bytes
    }

    /// Returns whether the memory has no part, not even one that another thread is about to unmap.
    pub(crate) fn is_empty(&self) -> bool {
        self.state.lock().area.is_empty()
    }

    /// Returns the number of requests by [`Found`].
    pub(crate) fn found(&self) -> [u64; 5] {
        self.state.lock().found
    }

    /// Adds the state and the history of the memory.
    pub(crate) fn add_to(&self, sum: &mut DeviceMemoryStatistics) {
        let state = self.state.lock();
        let (cached, cached_bytes) = state.lists.kept();
        sum.parts += state.area.pieces();
        sum.live_blocks += state.live;
        sum.live_bytes += state.live_bytes;
        sum.free_bytes += state.area.free_bytes();
        sum.slab_bytes += state.area.slab_bytes();
        sum.cached_blocks += cached;
        sum.cached_bytes += cached_bytes;
        sum.waiting_blocks += state.waiting.len() as u64;
        sum.waiting_bytes += state.waiting.iter().map(|waiting| waiting.lot.bytes() as u64).sum::<u64>();
        sum.unmarked_blocks += state.unmarked.len() as u64;
        sum.unmarked_bytes += state.unmarked.iter().map(|lot| lot.bytes() as u64).sum::<u64>();
        sum.add_found(state.found);
    }
}

impl State {
    #[inline]
    fn begin_life(&mut self, bytes: usize, found: Found) {
        self.live += 1;
        self.live_bytes += bytes as u64;
        self.found[found as usize] += 1;
    }

    #[inline]
    fn end_life(&mut self, bytes: usize) {
        self.live -= 1;
        self.live_bytes -= bytes as u64;
    }

    fn take(&mut self, request: Request, found: Found) -> Option<Lot> {
        let lot = Lot::of(&self.area.take(request)?);
        self.lots.insert(lot.ptr.get(), lot);
        self.begin_life(lot.bytes(), found);
        Some(lot)
    }

    /// Files a block that no buffer owns.
    fn file(&mut self, waiting: Waiting, is_over: bool) {
        if is_over {
            self.free(waiting.lot);
        } else if waiting.unmarked {
            self.unmarked.push(waiting.lot);
        } else {
            self.waiting.push_back(waiting);
        }
    }

    fn free(&mut self, lot: Lot) {
        self.lots.remove(&lot.ptr.get());
        self.area.free(lot.run(), lot.ptr, slabs::is_in_slab(lot.size));
    }

    /// Frees the memory of blocks that lists kept.
    fn merge(&mut self, blocks: &[Arc<dyn Placed>]) {
        for block in blocks {
            if let Some(lot) = block.lot() {
                self.free(lot);
                block.forget_lot();
            }
        }
    }
}

#[cfg(test)]
impl StreamMemory {
    pub(crate) fn hold_lock(&self) -> impl Drop + '_ {
        crate::testing::Held(self.state.lock())
    }

    pub(crate) fn is_locked(&self) -> bool {
        self.state.is_locked()
    }
}
