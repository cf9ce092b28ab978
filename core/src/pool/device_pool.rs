//! The device memory that streams allocate and free in their own order: the memories of one device's streams, and how they grow.
//!
//! *Growth.* A request grows the memory of its stream only if no free run fits, after waiting blocks were collected and the lists
//! emptied. The bytes come, in this order, from
//!
//! 1. spare parts of streams that have ended or of a trim, whose last work is done;
//! 2. free parts of other streams that have executed everything. With mapped memory they move. Without it, a whole free allocation
//!    changes its stream;
//! 3. the backend, while the memory held is at most a seventh larger than the most live bytes so far; a third without mapped memory;
//! 4. free parts of the stream itself, if it has executed everything: with mapped memory, they move; without it, they are released;
//! 5. the backend.
//!
//! So the memory held exceeds the most live bytes by that fraction, by what is rounded, and by the free parts of streams that are
//! behind. In a capture, nothing is asked: only spare parts without work and the backend serve.
//!
//! One thread at a time grows a device's memory. No lock is held during a call of the backend.

use std::fmt;
#[cfg(test)]
use std::sync::atomic::AtomicBool;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use super::area::{Leaving, Piece, Request, bytes_of};
use super::completion_events::CompletionEvent;
use super::device_memory::DeviceMemory;
use super::device_options::DeviceMemoryOptions;
use super::device_parts::{Part, Parts, Reservation, too_large};
use super::poison::PATTERN;
use super::ranges::{Borders, PAGE, Run};
use super::stream_memory::{Found, Lot, StreamMemory, Waiting};
use crate::capture::thread::{in_capture, warm_up_first};
use crate::ledger::DeviceBlockInfo;
use crate::primitive::{Condvar, Mutex};
use crate::services::Services;
use highwater_hal::{DevicePtr, Error, ErrorKind, PhysicalMemoryId, Result, counted};

/// Free parts move once the memory held exceeds the most live bytes by one part in so many.
const MOVE_FROM: u64 = 7;
/// Without mapped memory, free allocations are released once the memory held exceeds the most live bytes by one part in so many.
const RELEASE_FROM: u64 = 3;

/// Maximum number of pages of a request: more than an area can count.
const MOST_PAGES: usize = 1 << 31;

/// The state and the history of the device memory that streams allocate.
///
/// `held_bytes` is the sum of the live, free, slab, cached, waiting, unmarked and spare bytes, except while a call moves memory
/// from one state to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct DeviceMemoryStatistics {
    /// Bytes that the pool got from the backend and has not given back.
    pub held_bytes: u64,
    /// The most bytes held at once, as a sum over the devices.
    pub peak_held_bytes: u64,
    /// Parts that the held bytes consist of: mappings of 2 MiB, or plain allocations.
    pub parts: u64,
    /// Blocks that buffers, captures and graphs own.
    pub live_blocks: u64,
    /// Bytes of those blocks, rounded up to pages of 4 KiB or parts of a slab.
    pub live_bytes: u64,
    /// The most live bytes, as a sum over the devices: seen at growths and at calls of
    /// [`Runtime::statistics`](crate::Runtime::statistics).
    pub peak_live_bytes: u64,
    /// Bytes of free pages in the memories of streams.
    pub free_bytes: u64,
    /// Bytes of slabs that are in no block.
    pub slab_bytes: u64,
    /// Bytes of parts that no stream has.
    pub spare_bytes: u64,
    /// Freed blocks that streams keep for the next request of exactly their size.
    pub cached_blocks: u64,
    /// Bytes of those blocks.
    pub cached_bytes: u64,
    /// Freed blocks that wait for other streams, or for the end of their own.
    pub waiting_blocks: u64,
    /// Bytes of those blocks.
    pub waiting_bytes: u64,
    /// Freed blocks whose last use has no completion event. They stay until the runtime ends.
    pub unmarked_blocks: u64,
    /// Bytes of those blocks.
    pub unmarked_bytes: u64,
    /// Requests that took a cached block.
    pub cache_hits: u64,
    /// Requests that took free pages.
    pub free_hits: u64,
    /// Requests that took free pages after waiting blocks were collected.
    pub waiting_hits: u64,
    /// Requests that took free pages after all cached blocks of the stream were merged.
    pub merged_hits: u64,
    /// Requests for which the memory of the stream grew, by spare, moved or new parts.
    pub misses: u64,
    /// Parts that the backend made.
    pub allocations: u64,
    /// Parts that the backend took back.
    pub frees: u64,
    /// Bytes of parts that were taken from one place for another, within a stream or between streams.
    pub moved_bytes: u64,
}

impl DeviceMemoryStatistics {
    pub(crate) fn add(&mut self, other: &Self) {
        self.held_bytes += other.held_bytes;
        self.peak_held_bytes += other.peak_held_bytes;
        self.parts += other.parts;
        self.live_blocks += other.live_blocks;
        self.live_bytes += other.live_bytes;
        self.peak_live_bytes += other.peak_live_bytes;
        self.free_bytes += other.free_bytes;
        self.slab_bytes += other.slab_bytes;
        self.spare_bytes += other.spare_bytes;
        self.cached_blocks += other.cached_blocks;
        self.cached_bytes += other.cached_bytes;
        self.waiting_blocks += other.waiting_blocks;
        self.waiting_bytes += other.waiting_bytes;
        self.unmarked_blocks += other.unmarked_blocks;
        self.unmarked_bytes += other.unmarked_bytes;
        self.add_found([other.cache_hits, other.free_hits, other.waiting_hits, other.merged_hits, other.misses]);
        self.allocations += other.allocations;
        self.frees += other.frees;
        self.moved_bytes += other.moved_bytes;
    }

    /// Adds the requests by [`Found`].
    pub(crate) fn add_found(&mut self, [cached, free, waiting, merged, grown]: [u64; 5]) {
        self.cache_hits += cached;
        self.free_hits += free;
        self.waiting_hits += waiting;
        self.merged_hits += merged;
        self.misses += grown;
    }
}

/// A part that no stream has.
#[derive(Debug)]
struct Spare {
    part: Part,
    /// The work after which it is free.
    after: Option<Arc<CompletionEvent>>,
}

/// The memories of a device's streams.
pub(crate) struct DevicePool {
    pub(crate) services: Arc<Services>,
    pub(crate) device: u32,
    pub(crate) parts: Parts,
    memory: OnceLock<Weak<DeviceMemory>>,
    streams: Mutex<Vec<Arc<StreamMemory>>>,
    next_id: AtomicU64,
    /// By id of the memory, in the order in which they were made.
    reservations: Mutex<Vec<(u64, Reservation)>>,
    spare: Mutex<Vec<Spare>>,
    /// True while a thread grows the memory of a stream.
    growing: Mutex<bool>,
    grown: Condvar,
    peak_live_bytes: AtomicU64,
    is_poisoned: bool,
    #[cfg(test)]
    pub(crate) wrongly: Wrongly,
    /// The requests of memories that are gone, by [`Found`].
    found: Mutex<[u64; 5]>,
}

impl fmt::Debug for DevicePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DevicePool").field("device", &self.device).finish_non_exhaustive()
    }
}

/// Mistakes that a test makes the pool make.
#[cfg(test)]
#[derive(Debug, Default)]
pub(crate) struct Wrongly {
    pub(crate) takes_too_early: AtomicBool,
    pub(crate) forgets_uses: AtomicBool,
}

/// The right to grow, which one thread has at a time; ends when dropped.
struct Turn<'p>(&'p DevicePool);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.growing.lock() = false;
        self.0.grown.notify_all();
    }
}

impl DevicePool {
    pub(crate) fn new(services: &Arc<Services>, device: u32, options: &DeviceMemoryOptions) -> Arc<Self> {
        Arc::new(Self {
            services: Arc::clone(services),
            device,
            parts: Parts::new(Arc::clone(services), device, options),
            memory: OnceLock::new(),
            streams: Mutex::default(),
            next_id: AtomicU64::new(0),
            reservations: Mutex::default(),
            spare: Mutex::default(),
            growing: Mutex::new(false),
            grown: Condvar::new(),
            peak_live_bytes: AtomicU64::new(0),
            is_poisoned: options.poison,
            #[cfg(test)]
            wrongly: Wrongly::default(),
            found: Mutex::default(),
        })
    }

    /// Makes the device's other memory known, once.
    pub(crate) fn beside(&self, memory: &Arc<DeviceMemory>) {
        let _ = self.memory.set(Arc::downgrade(memory));
    }

    /// Returns the memory of a new stream, or of a stream's part in a capture.
    pub(crate) fn enlist(self: &Arc<Self>, key: u64, is_of_graph: bool) -> Arc<StreamMemory> {
        self.collect_ended();
        // Relaxed: the ids only need to be unique.
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let memory = StreamMemory::new(Arc::clone(self), key, id, self.is_poisoned && !is_of_graph);
        self.streams.lock().push(Arc::clone(&memory));
        memory
    }

    /// Takes what streams and graphs have left, as far as it is done. Call it before a capture, in which nothing can be asked. Does
    /// nothing in one.
    pub(crate) fn collect_ended(&self) {
        if in_capture() {
            return;
        }
        let streams = self.streams();
        for memory in streams.iter().filter(|memory| memory.has_ended()) {
            memory.collect(false);
            self.dissolve(memory);
        }
        let mut spares = std::mem::take(&mut *self.spare.lock());
        spares
            .iter_mut()
            .for_each(|spare| spare.after = spare.after.take().filter(|after| !self.services.is_surely_passed(after)));
        self.spare.lock().append(&mut spares);
    }

    fn streams(&self) -> Vec<Arc<StreamMemory>> {
        self.streams.lock().clone()
    }

    // ---------------------------------------------------------------- requests

    /// Returns the request for so many bytes.
    #[inline]
    pub(crate) fn request(bytes: usize) -> Result<Request> {
        let pages = bytes.max(1).div_ceil(PAGE);
        if pages >= MOST_PAGES {
            return Err(too_large(bytes));
        }
        Ok(Request { pages: pages as u32, bytes, borders: Borders::Allowed })
    }

    /// Finds or makes memory for a request that found no block in a list.
    #[cold]
    pub(crate) fn take_slow(&self, memory: &StreamMemory, request: Request) -> Result<Lot> {
        memory.note_miss(request.size());
        if let Some(lot) = memory.take(request, Found::Free) {
            return Ok(lot);
        }
        if !in_capture()
            && memory.collect(false)
            && let Some(lot) = memory.take(request, Found::Waiting)
        {
            return Ok(lot);
        }
        memory.empty_lists();
        if let Some(lot) = memory.take(request, Found::Merged) {
            return Ok(lot);
        }
        self.grow(memory, request)
    }

    fn grow(&self, memory: &StreamMemory, request: Request) -> Result<Lot> {
        let _turn = self.turn();
        if let Some(lot) = memory.take(request, Found::Free) {
            return Ok(lot);
        }
        if in_capture() && !self.services.device(self.device).capabilities.create_during_capture {
            return Err(warm_up_first("allocate", "device memory"));
        }
        let make = || self.try_grow(memory, request);
        let lot = match self.memory.get().and_then(Weak::upgrade) {
            Some(other) => other.with_retry_for(self.device, request.bytes, make),
            None => make(),
        };
        self.note_live_bytes();
        lot
    }

    fn note_live_bytes(&self) -> u64 {
        let live = self.live_bytes();
        // Relaxed: only statistics read it.
        self.peak_live_bytes.fetch_max(live, Ordering::Relaxed).max(live)
    }

    fn turn(&self) -> Turn<'_> {
        let mut growing = self.growing.lock();
        while *growing {
            self.grown.wait(&mut growing);
        }
        *growing = true;
        Turn(self)
    }

    fn try_grow(&self, memory: &StreamMemory, request: Request) -> Result<Lot> {
        loop {
            let lot = match self.parts.granularity() {
                Some(granularity) => self.grow_mapped(memory, request, granularity),
                None => self.grow_by_allocation(memory, request),
            };
            // Otherwise another thread has taken the free pages that the plan counted on.
            if let Some(lot) = lot? {
                return Ok(lot);
            }
        }
    }

    // ---------------------------------------------------------------- without mapped memory

    fn grow_by_allocation(&self, memory: &StreamMemory, request: Request) -> Result<Option<Lot>> {
        let mut plan = memory.plan(request).ok_or_else(|| too_large(request.bytes))?;
        let spare = self.take_spare(plan.whole);
        let moved = if spare.is_none() { self.take_allocation_of_others(memory, plan.whole) } else { None };
        let has_pattern = moved.is_some_and(|(_, has_pattern)| has_pattern);
        let part = match spare.or(moved.map(|(part, _)| part)) {
            Some(part) => part,
            None => {
                let surplus = plan.whole.saturating_sub(self.fresh_bytes(request, RELEASE_FROM));
                self.release_own(memory, surplus);
                self.parts.allocate(plan.whole).inspect_err(|_| memory.cancel(&plan))?
            }
        };
        let Part::Allocated(piece) = part else { return Err(too_large(request.bytes)) };
        if plan.hole.is_some_and(|(_, hole)| bytes_of(hole.pages) < piece.bytes) {
            memory.cancel(&plan);
            plan.hole = None;
        }
        if !has_pattern && let Err(error) = Self::write_pattern(memory, piece) {
            memory.cancel(&plan);
            self.keep_spare(vec![part]);
            return Err(error);
        }
        Ok(memory.add(&[piece], &[], &plan, request))
    }

    /// Gives new memory of a stream the pattern of free memory, in the test mode.
    fn write_pattern(memory: &StreamMemory, piece: Piece<DevicePtr>) -> Result<()> {
        let Some(stream) = memory.stream().filter(|_| memory.is_poisoned) else { return Ok(()) };
        // SAFETY: Just mapped or allocated for this stream, and all earlier work on it is done.
        unsafe { stream.fill(piece.ptr, piece.bytes, PATTERN) }
    }

    /// Takes the smallest spare allocation of at least so many bytes whose last work is done.
    fn take_spare(&self, bytes: usize) -> Option<Part> {
        let mut fitting: Vec<_> = {
            let mut spare = self.spare.lock();
            let (fits, rest) = std::mem::take(&mut *spare).into_iter().partition(|spare| spare.part.bytes() >= bytes);
            *spare = rest;
            fits
        };
        fitting.sort_by_key(|spare| spare.part.bytes());
        let index = fitting.iter().position(|spare| self.is_done(spare));
        let found = index.map(|index| fitting.remove(index).part);
        self.spare.lock().extend(fitting);
        found
    }

    /// In a capture, asks nothing.
    fn is_done(&self, spare: &Spare) -> bool {
        spare.after.as_ref().is_none_or(|after| !in_capture() && self.services.is_surely_passed(after))
    }

    /// Takes a free allocation of another stream that has executed everything, with whether it has the pattern of free memory.
    fn take_allocation_of_others(&self, memory: &StreamMemory, bytes: usize) -> Option<(Part, bool)> {
        for other in self.streams().iter().filter(|other| other.id != memory.id) {
            let Some(leaving) = other.take_piece_of(bytes) else { continue };
            // Asked after the piece was taken out, so no later work of the stream can use it.
            if Self::is_idle(other) {
                other.piece_has_left(leaving);
                let part = Part::Allocated(leaving.piece);
                self.parts.note_moved(&part);
                return Some((part, other.has_pattern()));
            }
            other.put_piece_back(leaving, None);
        }
        None
    }

    /// Releases free allocations of a stream that has executed everything, until they have so many bytes.
    fn release_own(&self, memory: &StreamMemory, bytes: usize) {
        let (mut below, mut missing, mut taken) = (u32::MAX, bytes, Vec::new());
        while missing > 0
            && let Some((leaving, _)) = memory.take_piece(&mut below)
        {
            missing = missing.saturating_sub(leaving.piece.bytes);
            taken.push(leaving);
        }
        // Asked after the pieces were taken out, so no later work of the stream can use them.
        let is_idle = !taken.is_empty() && Self::is_idle(memory);
        for leaving in taken {
            // SAFETY: All of it was free, it was taken out, and its stream has executed everything.
            let release = || self.services.note(unsafe { self.parts.release(Part::Allocated(leaving.piece)) });
            if is_idle && release().is_ok() {
                memory.piece_has_left(leaving);
            } else {
                memory.put_piece_back(leaving, None);
            }
        }
    }

    /// Returns whether a stream has executed everything. In a capture, and of a stream that takes part in one, asks nothing.
    fn is_idle(memory: &StreamMemory) -> bool {
        #[cfg(test)]
        if memory.pool.wrongly.takes_too_early.load(Ordering::Relaxed) {
            return true;
        }
        match memory.stream() {
            _ if in_capture() => false,
            Some(stream) => stream.is_idle(),
            None => memory.last().is_some_and(|last| memory.pool.services.is_surely_passed(&last)),
        }
    }

    // ---------------------------------------------------------------- with mapped memory

    fn grow_mapped(&self, memory: &StreamMemory, request: Request, granularity: usize) -> Result<Option<Lot>> {
        let plan = memory.plan(request).ok_or_else(|| too_large(request.bytes))?;
        let (place, bytes) = match plan.hole {
            Some((_, hole)) => (hole.ptr, plan.whole),
            None => self.place(memory, plan.last, (plan.more, plan.whole))?,
        };
        let count = bytes.div_ceil(granularity);
        let mut parts = Vec::with_capacity(count);
        while parts.len() < count
            && let Some(part) = self.take_spare(granularity)
        {
            parts.push(part);
        }
        let streams = self.streams();
        for other in streams.iter().filter(|other| other.id != memory.id) {
            self.move_parts(other, None, count, &mut parts);
        }
        let kept = Some(plan.counts_on);
        self.move_parts(
            memory,
            kept,
            count.saturating_sub(self.fresh_bytes(request, MOVE_FROM) / granularity),
            &mut parts,
        );
        while parts.len() < count {
            match self.parts.create() {
                Ok(part) => parts.push(part),
                Err(error) => {
                    let created = parts.len();
                    self.move_parts(memory, kept, count, &mut parts);
                    if parts.len() < count {
                        self.keep_spare(parts);
                        memory.cancel(&plan);
                        return Err(error);
                    }
                    tracing::debug!("the backend created {created} of {count} parts, and the others moved: {error}");
                }
            }
        }
        // SAFETY: Behind the last piece, in a reservation of the stream, or in a hole. One thread at a time grows.
        if let Err(error) = unsafe { self.parts.map(place, &parts) } {
            self.keep_spare(parts);
            memory.cancel(&plan);
            return Err(error);
        }
        let mut at = place;
        let (mut pieces, mut physical) = (Vec::with_capacity(count), Vec::with_capacity(count));
        let mut refused = None;
        for part in &parts {
            let Part::Physical { memory: id, bytes, has_pattern } = *part else { continue };
            let piece = Piece { ptr: at, bytes };
            if !has_pattern && let Err(error) = Self::write_pattern(memory, piece) {
                refused.get_or_insert(error);
            }
            pieces.push(piece);
            physical.push(id);
            at = at.offset(bytes);
        }
        let lot = memory.add(&pieces, &physical, &plan, request);
        let Some(error) = refused else { return Ok(lot) };
        if let Some(lot) = lot {
            memory.give_back_waiting(Waiting::of(lot));
        }
        Err(error)
    }

    /// Returns the bytes that the memory may grow by before parts move, because a move takes longer than a creation: up to a
    /// seventh more than the most live bytes so far.
    fn fresh_bytes(&self, request: Request, from: u64) -> usize {
        let peak = self.note_live_bytes().max(self.live_bytes() + request.bytes as u64);
        usize::try_from((peak + peak / from).saturating_sub(self.held_bytes())).unwrap_or(usize::MAX)
    }

    fn place(
        &self,
        memory: &StreamMemory,
        last: Option<Piece<DevicePtr>>,
        bytes: (usize, usize),
    ) -> Result<(DevicePtr, usize)> {
        let own = |(id, reservation): &(u64, Reservation)| (*id == memory.id).then_some(*reservation);
        let mut own: Vec<_> = self.reservations.lock().iter().filter_map(own).collect();
        let known = own.len();
        let placed = self.parts.place(&mut own, last, bytes);
        let new = own.into_iter().skip(known).map(|reservation| (memory.id, reservation));
        self.reservations.lock().extend(new);
        placed
    }

    /// Takes free parts out of the memory of a stream that has executed everything, except those in `kept`, until there are
    /// `count`. Those of the smallest free runs go first, because large runs serve large requests.
    fn move_parts(&self, from: &StreamMemory, kept: Option<Run>, count: usize, parts: &mut Vec<Part>) {
        let missing = count.saturating_sub(parts.len());
        let scattered = || from.take_scattered_piece(kept);
        let taken: Vec<_> = std::iter::from_fn(scattered).take(missing).collect();
        if taken.is_empty() {
            return;
        }
        // Asked after the pieces were taken out, so no later work of the stream can use them.
        let is_idle = Self::is_idle(from);
        for (leaving, physical) in taken {
            match physical.filter(|_| is_idle).and_then(|memory| self.unmap(leaving, memory)) {
                Some(mut part) => {
                    from.piece_has_left(leaving);
                    self.parts.note_moved(&part);
                    if let Part::Physical { has_pattern, .. } = &mut part {
                        *has_pattern = from.has_pattern();
                    }
                    parts.push(part);
                }
                None => from.put_piece_back(leaving, physical),
            }
        }
    }

    /// Unmaps a piece that was taken out, and that no work uses.
    fn unmap(&self, leaving: Leaving<DevicePtr>, memory: PhysicalMemoryId) -> Option<Part> {
        // SAFETY: All of it was free, it was taken out, and its stream has executed everything.
        let unmapped = unsafe { self.parts.unmap(leaving.piece) };
        self.services.note(unmapped).ok().map(|()| Part::Physical {
            memory,
            bytes: leaving.piece.bytes,
            has_pattern: false,
        })
    }

    fn keep_spare(&self, parts: Vec<Part>) {
        self.spare.lock().extend(parts.into_iter().map(|part| Spare { part, after: None }));
    }

    // ---------------------------------------------------------------- releases

    /// Ends the memory of a stream whose last completion event is known.
    pub(crate) fn end_stream(&self, memory: &Arc<StreamMemory>) {
        memory.end();
        self.dissolve(memory);
    }

    /// Takes the parts of a stream that has ended and has no block left. Parts that are mapped stay until their work is done.
    fn dissolve(&self, memory: &Arc<StreamMemory>) {
        // Read once: a memory whose stream becomes known in between is not that of a stream that has ended.
        let Some(stream) = memory.stream_use() else { return };
        if stream.stream().is_some() || !memory.is_unused() {
            return;
        }
        // Without an event of its last work, the parts stay until the runtime ends.
        let Some(last) = stream.last() else { return };
        let is_done = self.services.is_surely_passed(&last);
        if self.parts.granularity().is_some() && !is_done {
            return;
        }
        self.make_spare(memory, Some(&last).filter(|_| !is_done));
        if memory.is_empty() {
            let mut streams = self.streams.lock();
            let count = streams.len();
            streams.retain(|other| !Arc::ptr_eq(other, memory));
            let is_first = streams.len() < count;
            drop(streams);
            if is_first {
                self.found.lock().iter_mut().zip(memory.found()).for_each(|(sum, found)| *sum += found);
                // A refused one is retried by the end of the runtime.
                let _ = self.end_reservations(|id| id == memory.id);
            }
        }
    }

    /// Makes the free parts of a memory spare: free after the work of an event. Nothing of mapped parts uses them any more.
    fn make_spare(&self, memory: &StreamMemory, after: Option<&Arc<CompletionEvent>>) {
        let mut below = u32::MAX;
        while let Some((leaving, physical)) = memory.take_piece(&mut below) {
            self.make_piece_spare(memory, (leaving, physical), after);
        }
    }

    fn make_piece_spare(
        &self,
        memory: &StreamMemory,
        (leaving, physical): (Leaving<DevicePtr>, Option<PhysicalMemoryId>),
        after: Option<&Arc<CompletionEvent>>,
    ) {
        let part = match physical {
            Some(physical) => self.unmap(leaving, physical),
            None => Some(Part::Allocated(leaving.piece)),
        };
        match part {
            Some(part) => {
                memory.piece_has_left(leaving);
                self.spare.lock().push(Spare { part, after: after.cloned() });
            }
            None => memory.put_piece_back(leaving, physical),
        }
    }

    /// Gives back the addresses of streams whose parts are gone.
    fn end_reservations(&self, of: impl Fn(u64) -> bool) -> Result<()> {
        let mut ended = Vec::new();
        self.reservations.lock().retain(|&(id, reservation)| {
            let ends = of(id);
            ended.extend(ends.then_some((id, reservation)));
            !ends
        });
        let mut result = Ok(());
        for (id, reservation) in ended {
            // SAFETY: No piece is left, so nothing is mapped there.
            let freed = self.services.note(unsafe { self.parts.end_reservation(reservation) });
            if freed.is_err() {
                self.reservations.lock().push((id, reservation));
            }
            result = result.and(freed);
        }
        result
    }

    /// Releases the memory that no block and no work uses; with `wait`, waits for that work. Does nothing in a capture.
    pub(crate) fn trim(&self, wait: bool) -> Result<()> {
        if in_capture() {
            return Ok(());
        }
        let mut result = Ok(());
        for memory in self.streams() {
            memory.collect(wait);
            memory.empty_lists();
            if memory.stream().is_none() {
                self.dissolve(&memory);
                continue;
            }
            result = result.and(self.trim_stream(&memory, wait));
        }
        result.and(self.release_spare(wait))
    }

    /// Makes the free parts of a stream spare.
    fn trim_stream(&self, memory: &StreamMemory, wait: bool) -> Result<()> {
        let Some(stream) = memory.stream().filter(|stream| !stream.keeps_free_memory()) else { return Ok(()) };
        let mut taken = Vec::new();
        let mut below = u32::MAX;
        while let Some(piece) = memory.take_piece(&mut below) {
            taken.push(piece);
        }
        if taken.is_empty() {
            return Ok(());
        }
        let done = if stream.is_idle() {
            Ok(true)
        } else if wait {
            stream.completion().and_then(|completion| self.services.is_passed(&completion, true))
        } else {
            Ok(false)
        };
        for (leaving, physical) in taken {
            if matches!(done, Ok(true)) {
                self.make_piece_spare(memory, (leaving, physical), None);
            } else {
                memory.put_piece_back(leaving, physical);
            }
        }
        done.map(|_| ())
    }

    fn release_spare(&self, wait: bool) -> Result<()> {
        let mut result = Ok(());
        let spares = std::mem::take(&mut *self.spare.lock());
        for spare in spares {
            let done = spare.after.as_ref().map_or(Ok(true), |after| self.services.is_passed(after, wait));
            if !matches!(done, Ok(true)) {
                result = result.and(done.map(|_| ()));
                self.spare.lock().push(spare);
                continue;
            }
            // SAFETY: Its last work is done, and it is not mapped.
            let released = self.services.note(unsafe { self.parts.release(spare.part) });
            if released.is_err() {
                self.spare.lock().push(Spare { after: None, ..spare });
            }
            result = result.and(released);
        }
        result
    }

    /// Releases everything, at the end of the runtime.
    ///
    /// # Safety
    /// The device has executed everything, and no buffer owns a block.
    pub(crate) unsafe fn free_all(&self) -> Result<()> {
        for memory in self.streams() {
            memory.free_all();
        }
        for spare in &mut *self.spare.lock() {
            spare.after = None;
        }
        // Twice: no later call can retry.
        let first = self.release_all();
        let freed = first.or_else(|_| self.release_all());
        // They hold completion events, which the runtime destroys next.
        self.streams.lock().retain(|memory| !memory.is_empty());
        freed
    }

    /// Releases every part. A part that stays mapped keeps its addresses.
    fn release_all(&self) -> Result<()> {
        let mut kept = Vec::new();
        for memory in self.streams() {
            self.make_spare(&memory, None);
            if !memory.is_empty() {
                kept.push(memory.id);
            }
        }
        let ended = self.end_reservations(|id| !kept.contains(&id)).and(self.release_spare(false));
        if kept.is_empty() {
            return ended;
        }
        let message = format!("device {} still has {} with mapped memory", self.device, counted(kept.len(), "stream"));
        ended.and(Err(Error::new(ErrorKind::InvalidState, "unmap_memory", message)
            .with_hint("the backend refused to unmap it; a warning of `tracing` gives its reason")))
    }

    // ---------------------------------------------------------------- questions

    /// Returns the live block that contains an address.
    pub(crate) fn find(&self, ptr: DevicePtr) -> Option<DeviceBlockInfo> {
        self.streams().iter().find_map(|memory| memory.find(ptr))
    }

    /// Returns the bytes of live blocks.
    pub(crate) fn live_bytes(&self) -> u64 {
        self.streams().iter().map(|memory| memory.live_bytes()).sum()
    }

    /// Returns the bytes that the pool got from the backend.
    pub(crate) fn held_bytes(&self) -> u64 {
        // Relaxed: it is out of date at once.
        self.parts.counts.held_bytes.load(Ordering::Relaxed)
    }

    /// Returns the counts of the device.
    pub(crate) fn statistics(&self) -> DeviceMemoryStatistics {
        let mut sum = DeviceMemoryStatistics { peak_live_bytes: self.note_live_bytes(), ..Default::default() };
        self.streams().iter().for_each(|memory| memory.add_to(&mut sum));
        sum.add_found(*self.found.lock());
        for spare in &*self.spare.lock() {
            sum.parts += 1;
            sum.spare_bytes += spare.part.bytes() as u64;
        }
        let counts = &self.parts.counts;
        sum.held_bytes = self.held_bytes();
        sum.peak_held_bytes = counts.peak_held_bytes.load(Ordering::Relaxed);
        sum.allocations = counts.made.load(Ordering::Relaxed);
        sum.frees = counts.released.load(Ordering::Relaxed);
        sum.moved_bytes = counts.moved_bytes.load(Ordering::Relaxed);
        sum
    }
}

#[cfg(test)]
impl DevicePool {
    pub(crate) fn hold_locks(&self) -> impl Drop + '_ {
        // Leaked, because the guards borrow from them. Only a test asks.
        let memories: &'static [Arc<StreamMemory>] = Box::leak(self.streams().into_boxed_slice());
        let of_streams: Vec<_> = memories.iter().map(|memory| memory.hold_lock()).collect();
        let lists = (self.streams.lock(), self.reservations.lock(), self.spare.lock());
        crate::testing::Held((of_streams, lists, self.growing.lock(), self.found.lock()))
    }

    pub(crate) fn is_locked(&self) -> bool {
        let lists =
            [self.streams.is_locked(), self.reservations.is_locked(), self.spare.is_locked(), self.found.is_locked()];
        // `growing` is a flag that is set during calls of the backend, and its lock is not held then.
        lists.contains(&true) || self.growing.is_locked() || self.streams().iter().any(|memory| memory.is_locked())
    }
}
