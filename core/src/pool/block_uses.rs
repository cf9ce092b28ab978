//! The users of a block of page-locked memory: its buffer, streams, the CPU, and the captures and graphs that recorded it.
//!
//! The block, the ledger and graphs share the record, so that a use can be noted for an address inside the block.
//!
//! *Kept.* Captures and graphs keep a block. A kept block is not given out, whether its buffer is alive or not. The number of
//! keepers grows while the caller borrows the buffer or keeps the block already. A note by address may race with the end of the
//! buffer. So the note counts a keeper first and then reads whether the block is live, and the end of the buffer first ends its
//! life and then reads the number of keepers. All four are sequentially consistent: the note finds that the block is not
//! live, or the end of the buffer finds the keeper and files the block as kept. The last keeper then releases it, under the
//! pool's lock.
//!
//! *Streams.* The record has one entry for each stream, with the last completion event after its uses. A write waits for all
//! other uses on the device, so its event replaces theirs. Each time the list has doubled, entries with passed events are
//! dropped. So its length follows the streams that use the block at once, not those that ever did.
//!
//! *The CPU and streams.* Borrows keep the CPU and copies apart: a copy to a buffer borrows it exclusively, a copy from it
//! shares it. A launch of a graph borrows no buffer. So recorded uses are counted here, and these rules keep conflicts apart:
//!
//! - [`read`](crate::PinnedBuffer::read) and [`write`](crate::PinnedBuffer::write) return plain slices, whose lifetimes are
//!   unknown here. They are refused while a graph could race with them. The counts grow only while the buffer is borrowed for
//!   the recorded copy, so no slice in conflict is alive then. (A caller that notes a use by address must ensure this.)
//! - Access by the CPU for the time of a closure is counted. A launch in conflict with it is refused, because a wait for a
//!   closure of the same thread would never end.
//! - An operation that is being enqueued has no completion event yet. Other operations in conflict wait until it has one, for
//!   as long as the vendor takes to enqueue. A launch begins its uses in the order of addresses, before it takes the submission
//!   lock, and no holder of a submission lock waits here. So there is no cycle of waiting threads.

use std::any::Any;
use std::cell::UnsafeCell;
use std::fmt;

use super::completion_events::{CompletionEvent, Point};
use super::lazy_box::LazyBox;
use crate::primitive::Generation;
use crate::primitive::{Arc, AtomicBool, AtomicU16, AtomicU32, Condvar, Mutex, Ordering};

/// Length of the list at the first check for streams that are done.
const LONG: usize = 8;

/// Use of a block by a stream. The stream may end: its work is done when the completion event is passed.
#[derive(Debug)]
struct StreamUse {
    /// Recorded after the last operation of the stream on the block. Threads that query it share it: see
    /// `completion_events.rs`.
    after: Arc<CompletionEvent>,
    /// True if an operation before that event writes the block.
    writes: bool,
    /// The number of the note, among the notes of the block.
    noted: u64,
}

impl StreamUse {
    fn stream(&self) -> u64 {
        self.after.point().stream
    }
}

#[derive(Debug)]
pub(crate) struct BlockUses {
    /// What a block needs only once it is used.
    rest: LazyBox<Rest>,
    /// Number of captures, graphs and notes that keep the block.
    keepers: AtomicU32,
    /// True if a buffer owns the block. See *Kept* above for the order of this and the number of keepers.
    live: AtomicBool,
    /// True if a stream may use the block for an unknown time. An owner or keeper of the block sets it before it releases the
    /// block.
    pub(crate) unmarked: AtomicBool,
    /// Bytes of the block that its buffer did not request. Relaxed: statistics read it, and copies by address, whose caller knows the
    /// buffer. Stored in this struct because it has unused space.
    pub(super) rounding: AtomicU16,
}

/// The words of a block for a binding to another language. This crate uses only their address.
struct BindingMemory(UnsafeCell<[u64; BINDING_WORDS]>);

// SAFETY: No code of this crate reads or writes the words once they are made.
unsafe impl Send for BindingMemory {}
// SAFETY: As above.
unsafe impl Sync for BindingMemory {}

impl fmt::Debug for BindingMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BindingMemory").finish_non_exhaustive()
    }
}

/// Words of [`BlockUses::binding_memory`].
pub(crate) const BINDING_WORDS: usize = 6;

#[derive(Debug)]
struct Rest {
    /// Offsets of the registrations that begin inside the block.
    borders: Vec<usize>,
    /// An object of the block. Few blocks have one, so it is here and not in the block.
    attached: Option<Box<dyn Any + Send + Sync>>,
    binding: BindingMemory,
    state: Mutex<State>,
    /// Wakes the threads that wait for operations that are being enqueued.
    settled: Condvar,
    /// True if the list may not be empty. A release that reads `false` does not lock the list. Always relaxed: it is written
    /// under the list's lock, and the release of the block comes after all uses of the buffer.
    any: AtomicBool,
    /// True if a caller has waited for a use whose end was not recorded: later uses are recorded at once. Relaxed: it only
    /// saves time.
    awaited: AtomicBool,
    /// Operations that read the block in open captures and live graphs, and operations that write it.
    recorded_reads: AtomicU32,
    recorded_writes: AtomicU32,
    /// Streams that use the block in an open capture.
    recording: AtomicU32,
}

#[derive(Debug)]
struct State {
    /// Streams that may still use the block, each once.
    list: Vec<StreamUse>,
    /// The number of notes so far.
    notes: u64,
    enqueuing_reads: u32,
    enqueuing_writes: u32,
    cpu_reads: u32,
    cpu_writes: u32,
}

/// An operation between its start and its completion event.
#[derive(Debug)]
pub(crate) struct BegunUse<'b> {
    uses: &'b BlockUses,
    writes: bool,
    /// Completion events of other streams that the operation must wait for.
    pub(crate) racing: Vec<Arc<CompletionEvent>>,
    /// The number of notes when the operation began.
    notes: u64,
}

/// Access by the CPU; ends when dropped.
#[derive(Debug)]
pub(crate) struct CpuAccess<'b> {
    uses: &'b BlockUses,
    writes: bool,
    generation: Generation,
}

/// The CPU is in a closure that accesses the block.
#[derive(Debug)]
pub(crate) struct InCpuAccess;

impl BlockUses {
    pub(crate) fn new() -> Self {
        Self {
            rest: LazyBox::new(),
            keepers: AtomicU32::new(0),
            live: AtomicBool::new(false),
            unmarked: AtomicBool::new(false),
            rounding: AtomicU16::new(0),
        }
    }

    /// The record of a block in which registrations begin at these offsets.
    pub(crate) fn with_borders(borders: Vec<usize>) -> Self {
        let uses = Self::new();
        if !borders.is_empty() {
            uses.rest.get_or_make(|| Rest::new(borders));
        }
        uses
    }

    /// The record of a block with an object of its own.
    pub(crate) fn with_attached(borders: Vec<usize>, attached: Box<dyn Any + Send + Sync>) -> Self {
        let uses = Self::new();
        uses.rest.get_or_make(|| Rest { attached: Some(attached), ..Rest::new(borders) });
        uses
    }

    /// Returns the object of the block, if it is a `T`.
    pub(crate) fn attached<T: 'static>(&self) -> Option<&T> {
        self.rest.get()?.attached.as_ref()?.downcast_ref()
    }

    pub(crate) fn borders(&self) -> &[usize] {
        self.rest.get().map_or(&[], |rest| &rest.borders)
    }

    /// Returns memory for a binding to another language. It lives as long as the block, and is zero at first.
    #[inline]
    pub(crate) fn binding_memory(&self) -> *mut [u64; BINDING_WORDS] {
        match self.rest.get() {
            Some(rest) => rest.binding.0.get(),
            None => self.make_binding_memory(),
        }
    }

    /// `extern "C"`, so that the compiler knows that it does not unwind.
    #[cold]
    #[inline(never)]
    extern "C" fn make_binding_memory(&self) -> *mut [u64; BINDING_WORDS] {
        self.rest().binding.0.get()
    }

    fn rest(&self) -> &Rest {
        self.rest.get_or_make(|| Rest::new(Vec::new()))
    }

    // ---------------------------------------------------------------- owners and keepers

    #[inline]
    pub(crate) fn is_live(&self) -> bool {
        self.live.load(Ordering::SeqCst)
    }

    /// Begins the life of a buffer. The caller owns the block.
    #[inline]
    pub(crate) fn begin_life(&self) {
        // The request that makes the buffer known orders this before all uses.
        self.live.store(true, Ordering::Relaxed);
    }

    /// Ends the life of the buffer. Returns whether the block is free: no stream uses it, it has no keeper, and the end of
    /// every use is known.
    #[inline]
    pub(crate) fn end_life(&self) -> bool {
        self.live.swap(false, Ordering::SeqCst);
        !self.is_kept() && self.is_empty() && !self.unmarked.load(Ordering::Relaxed)
    }

    /// Returns whether streams may use the block for a known time, and nothing else keeps it.
    pub(crate) fn waits_for_streams(&self) -> bool {
        !self.is_kept() && !self.is_empty() && !self.unmarked.load(Ordering::Relaxed)
    }

    /// Returns whether a capture, a graph or a note keeps the block.
    #[inline]
    pub(crate) fn is_kept(&self) -> bool {
        self.keepers.load(Ordering::SeqCst) > 0
    }

    /// Counts one more keeper of the block.
    pub(crate) fn count_keeper(&self) {
        self.keepers.fetch_add(1, Ordering::SeqCst);
    }

    /// Removes one keeper of the block. The caller must hold the pool's lock.
    pub(crate) fn uncount_keeper(&self) {
        self.keepers.fetch_sub(1, Ordering::SeqCst);
    }

    // ---------------------------------------------------------------- streams

    /// Returns whether the end of each use must be recorded at once.
    pub(crate) fn is_awaited(&self) -> bool {
        self.rest.get().is_some_and(|rest| rest.awaited.load(Ordering::Relaxed))
    }

    /// Makes streams record the end of each later use at once.
    #[cold]
    pub(crate) fn set_awaited(&self) {
        self.rest().awaited.store(true, Ordering::Relaxed);
    }

    /// Returns whether every stream is known to have passed its last use.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.rest.get().is_none_or(|rest| !rest.any.load(Ordering::Relaxed))
    }

    /// Returns the completion events of the streams that use the block; with `writes_only`, of those that write it.
    pub(crate) fn completions(&self, writes_only: bool) -> Vec<Arc<CompletionEvent>> {
        let Some(rest) = self.rest.get() else { return Vec::new() };
        let state = rest.state.lock();
        state.list.iter().filter(|use_| use_.writes || !writes_only).map(|use_| Arc::clone(&use_.after)).collect()
    }

    /// Returns the point of a stream that the block waits for first.
    pub(crate) fn first(&self) -> Option<Point> {
        self.rest.get()?.state.lock().list.first().map(|use_| use_.after.point())
    }

    /// Returns whether the completion event of the first use is not recorded yet.
    pub(crate) fn joined_open_batch(&self) -> bool {
        let first = || self.rest.get()?.state.lock().list.first().map(|use_| !use_.after.is_recorded());
        first().unwrap_or(false)
    }

    /// Notes a use by a stream, up to a completion event that was recorded after it. Returns true if the caller should now
    /// check which uses are over.
    #[must_use]
    pub(crate) fn note(&self, after: Arc<CompletionEvent>, writes: bool) -> bool {
        let rest = self.rest();
        let mut state = rest.state.lock();
        let is_long = state.note(after, writes);
        rest.any.store(true, Ordering::Relaxed);
        is_long
    }

    /// Removes a use whose completion event is passed.
    pub(crate) fn forget(&self, completion: &Arc<CompletionEvent>) {
        // Compares completion events, not their backend events: while the caller holds the completion event, its backend event
        // cannot be reused.
        let Some(rest) = self.rest.get() else { return };
        let mut state = rest.state.lock();
        state.list.retain(|use_| !Arc::ptr_eq(&use_.after, completion));
        rest.any.store(!state.list.is_empty(), Ordering::Relaxed);
    }

    /// Removes uses that are over, up to the first that is not. Calls `is_passed` without a lock. Returns true if no use is
    /// left.
    pub(crate) fn are_over(&self, is_passed: impl Fn(&CompletionEvent) -> bool) -> bool {
        let Some(rest) = self.rest.get() else { return true };
        let first = || rest.state.lock().list.first().map(|use_| Arc::clone(&use_.after));
        while let Some(completion) = first() {
            if !is_passed(&completion) {
                return false;
            }
            self.forget(&completion);
        }
        true
    }

    /// Removes every use that is over. Calls `is_passed` without a lock.
    #[cold]
    pub(crate) fn forget_passed(&self, is_passed: impl Fn(&CompletionEvent) -> bool) {
        self.completions(false)
            .iter()
            .filter(|completion| is_passed(completion))
            .for_each(|completion| self.forget(completion));
    }

    /// Begins an operation of `stream`, once no conflicting operation is being enqueued.
    pub(crate) fn begin(&self, stream: u64, writes: bool) -> Result<BegunUse<'_>, InCpuAccess> {
        let rest = self.rest();
        let mut state = rest.state.lock();
        loop {
            if state.cpu_writes > 0 || (writes && state.cpu_reads > 0) {
                return Err(InCpuAccess);
            }
            if state.enqueuing_writes == 0 && (!writes || state.enqueuing_reads == 0) {
                break;
            }
            rest.settled.wait(&mut state);
        }
        *state.enqueuing(writes) += 1;
        let races = |use_: &&StreamUse| use_.stream() != stream && (writes || use_.writes);
        let racing = state.list.iter().filter(races).map(|use_| Arc::clone(&use_.after)).collect();
        Ok(BegunUse { uses: self, writes, racing, notes: state.notes })
    }

    // ---------------------------------------------------------------- the CPU

    /// Begins access by the CPU, or returns the completion events that the caller must wait for first.
    pub(crate) fn begin_cpu(
        &self,
        writes: bool,
        generation: Generation,
    ) -> Result<CpuAccess<'_>, Vec<Arc<CompletionEvent>>> {
        let rest = self.rest();
        let mut state = rest.state.lock();
        while state.enqueuing_writes > 0 || (writes && state.enqueuing_reads > 0) {
            rest.settled.wait(&mut state);
        }
        let conflicts = |use_: &&StreamUse| writes || use_.writes;
        let completions: Vec<_> = state.list.iter().filter(conflicts).map(|use_| Arc::clone(&use_.after)).collect();
        if !completions.is_empty() {
            return Err(completions);
        }
        *state.cpu(writes) += 1;
        Ok(CpuAccess { uses: self, writes, generation })
    }

    // ---------------------------------------------------------------- captures and graphs

    // Acquire and Release: a thread that sees that a graph is gone also sees the uses that its launches have left.

    /// Returns whether a capture or a graph could race with a slice of the values.
    pub(crate) fn is_recorded(&self, for_writing: bool) -> bool {
        self.rest.get().is_some_and(|rest| {
            rest.recorded_writes.load(Ordering::Acquire) > 0
                || (for_writing && rest.recorded_reads.load(Ordering::Acquire) > 0)
        })
    }

    /// Returns whether an open capture uses the block.
    pub(crate) fn is_recording(&self) -> bool {
        self.rest.get().is_some_and(|rest| rest.recording.load(Ordering::Acquire) > 0)
    }

    /// Counts a stream that uses the block in a capture, until the capture ends.
    pub(crate) fn recording_began(&self) {
        self.rest().recording.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn recording_ended(&self) {
        self.rest().recording.fetch_sub(1, Ordering::Release);
    }

    /// Counts a recorded operation.
    pub(crate) fn count_recorded(&self, writes: bool) {
        let rest = self.rest();
        let count = if writes { &rest.recorded_writes } else { &rest.recorded_reads };
        count.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes the recorded operations of a graph; its launches have left their completion events.
    pub(crate) fn forget_recorded(&self, reads: u32, writes: u32) {
        self.rest().recorded_reads.fetch_sub(reads, Ordering::Release);
        self.rest().recorded_writes.fetch_sub(writes, Ordering::Release);
    }
}

impl Rest {
    fn new(borders: Vec<usize>) -> Self {
        let state =
            State { list: Vec::new(), notes: 0, enqueuing_reads: 0, enqueuing_writes: 0, cpu_reads: 0, cpu_writes: 0 };
        Self {
            borders,
            attached: None,
            binding: BindingMemory(UnsafeCell::new([0; BINDING_WORDS])),
            state: Mutex::new(state),
            settled: Condvar::new(),
            any: AtomicBool::new(false),
            awaited: AtomicBool::new(false),
            recorded_reads: AtomicU32::new(0),
            recorded_writes: AtomicU32::new(0),
            recording: AtomicU32::new(0),
        }
    }
}

impl State {
    /// As [`BlockUses::note`]. Threads that use the block on one stream may note their completion events in any order; the
    /// event that was recorded last counts.
    fn note(&mut self, after: Arc<CompletionEvent>, writes: bool) -> bool {
        self.notes += 1;
        let noted = self.notes;
        let point = after.point();
        if let Some(use_) = self.list.iter_mut().find(|use_| use_.stream() == point.stream) {
            use_.writes |= writes;
            if use_.after.point().number < point.number {
                use_.after = after;
                use_.noted = noted;
            }
            return false;
        }
        self.list.push(StreamUse { after, writes, noted });
        // Each time the list has doubled, so that each stream costs one or two queries.
        self.list.len() >= LONG && self.list.len().is_power_of_two()
    }

    fn enqueuing(&mut self, writes: bool) -> &mut u32 {
        if writes { &mut self.enqueuing_writes } else { &mut self.enqueuing_reads }
    }

    fn cpu(&mut self, writes: bool) -> &mut u32 {
        if writes { &mut self.cpu_writes } else { &mut self.cpu_reads }
    }
}

impl BegunUse<'_> {
    /// Notes that the operation is enqueued and has waited for all uses that it races with. `after` was recorded behind it.
    /// Returns true if the caller should now check which uses are over.
    #[must_use]
    pub(crate) fn settle(self, after: Arc<CompletionEvent>) -> bool {
        let rest = self.uses.rest();
        let mut state = rest.state.lock();
        if self.writes {
            // A write races with every other stream, so its completion event covers all notes from before it began.
            let stream = after.point().stream;
            state.list.retain(|use_| use_.noted > self.notes || use_.stream() == stream);
        }
        let is_long = state.note(after, self.writes);
        rest.any.store(true, Ordering::Relaxed);
        is_long
    }
}

impl Drop for BegunUse<'_> {
    fn drop(&mut self) {
        let rest = self.uses.rest();
        *rest.state.lock().enqueuing(self.writes) -= 1;
        rest.settled.notify_all();
    }
}

impl Drop for CpuAccess<'_> {
    fn drop(&mut self) {
        // In a child forked inside the closure, a thread that does not exist may hold the lock.
        if self.generation.is_current() {
            *self.uses.rest().state.lock().cpu(self.writes) -= 1;
        }
    }
}
