//! A block of device memory and the streams that used it. Its last owner frees it after their work.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

use parking_lot::Mutex;

use crate::capture::thread::{in_capture, no_wait_in_capture, refuse_in_capture};
use crate::pool::completion_events::{CompletionEvent, never_recorded};
use crate::pool::deferred::{DeferredFree, DeferredFrees};
use crate::pool::stream_memory::{Lot, Placed, StreamMemory, Waiting};
use crate::pool::stream_use::{StreamUse, UseEnd};
use crate::runtime::Runtime;
use crate::services::Services;
use crate::sharing::{ExportKey, Owner, Revocation, Ticket};
use crate::stream::core::StreamCore;
use highwater_hal::{DevicePtr, Error, ErrorKind, Result, Transport};

/// A block of device memory with the streams that used it. A user that needs the memory to stay holds a reference.
///
/// `repr(C)` keeps the fields that every product reads next to each other. A vendor's call leaves little of them in the cache.
#[repr(C)]
pub(crate) struct DeviceBlock {
    /// The address of the runtime's services, which tells runtimes apart. `frees` keeps them alive, so no other runtime has it.
    services_address: usize,
    pub(crate) ptr: DevicePtr,
    /// Key of the stream noted last as [`Noted::Ordered`], 0 for none. Noting that stream again costs one load.
    last_use: AtomicU64,
    pub(crate) device: u32,
    /// Streams that use the block in an open capture.
    recording: AtomicU32,
    uses: Mutex<Vec<(StreamUse, Noted)>>,
    origin: Origin,
    pub(crate) frees: Arc<DeferredFrees>,
}

/// The way in which the use of a block by a stream is ordered after the block's allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(crate) enum Noted {
    /// All later work of the stream comes after it.
    Ordered,
    /// As `Ordered`. The memory may be revoked, so the call checks that under the submission lock.
    Revocable,
    /// Each launch of the graph comes after it. The stream takes part in a capture, where it cannot wait for work
    /// outside.
    InCapture,
}

impl Noted {
    pub(crate) fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Ordered, other) | (Self::Revocable, other @ Self::InCapture) => other,
            (earlier, _) => earlier,
        }
    }

    /// Refuses work that would execute instead of being recorded, because the capture ended between note and call.
    pub(crate) fn check_executed(self, operation: &'static str) -> Result<()> {
        match self {
            Self::Ordered | Self::Revocable => Ok(()),
            Self::InCapture => Err(Error::new(
                ErrorKind::Capture,
                operation,
                "another thread ended the capture of the stream before it recorded this call",
            )
            .with_hint("end a capture after all recorded calls of all threads have returned")),
        }
    }
}

/// The source of a block, which decides how it is freed.
pub(crate) enum Origin {
    /// Allocated by itself.
    Own,
    /// A part of the memory of a stream, whose order the allocation and the free follow.
    Ordered(Ordered),
    /// Memory that several processes can have open.
    Shared(Box<dyn SharedMemory>),
}

/// A part of the memory of a stream.
pub(crate) struct Ordered {
    memory: Arc<StreamMemory>,
    lot: Lot,
    /// False once the memory has taken the part back.
    has_lot: AtomicBool,
}

impl Ordered {
    pub(crate) fn new(memory: &Arc<StreamMemory>, lot: Lot) -> Self {
        Self { memory: Arc::clone(memory), lot, has_lot: AtomicBool::new(true) }
    }
}

/// Memory that several processes can have open, as seen from its block.
pub(crate) trait SharedMemory: Send + Sync {
    /// Returns the ticket of the whole block. `after` marks the work on it that is not known to be done.
    fn share(&self, block: &Arc<DeviceBlock>, after: Vec<Arc<CompletionEvent>>) -> Result<Ticket>;
    /// Releases the memory of a block whose last owner is gone.
    fn release(&self, block: &mut DeviceBlock);
    /// Returns the transport by which other processes open the block, which is of this device.
    fn transport(&self, device: u32) -> Result<Transport>;
    /// Returns the bytes of the shared allocation that the block has.
    fn range(&self) -> Range<u64>;
    /// Returns the runtime that exports the allocation, and its key there. `None` if it was not shared, and for memory of another process.
    fn export(&self) -> Option<(Runtime, ExportKey)> {
        None
    }
    /// Returns the state of memory that is revoked when its owner dies. `None` for all other memory.
    fn revocation(&self) -> Option<&Revocation> {
        None
    }
    /// Returns the process that owns the memory, unless it is this one.
    fn owner(&self) -> Option<Owner> {
        None
    }
}

/// The ends of the uses of streams, as of one call.
#[derive(Default)]
pub(crate) struct StreamEnds(Vec<(u64, Option<UseEnd>)>);

impl StreamEnds {
    /// Returns the end of a stream's use. `None` if the work is done.
    fn of(&mut self, use_: &StreamUse, services: &Services) -> Option<UseEnd> {
        if let Some((_, end)) = self.0.iter().find(|(key, _)| *key == use_.key()) {
            return end.clone();
        }
        let end = (!use_.is_over()).then(|| use_.completion());
        let end = end.filter(|end| !matches!(end, UseEnd::At(completion) if services.is_surely_passed(completion)));
        self.0.push((use_.key(), end.clone()));
        end
    }
}

impl fmt::Debug for DeviceBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBlock").field("device", &self.device).field("ptr", &self.ptr).finish_non_exhaustive()
    }
}

impl DeviceBlock {
    pub(crate) fn new(frees: &Arc<DeferredFrees>, device: u32, ptr: DevicePtr, origin: Origin) -> Arc<Self> {
        let (last_use, uses, recording) = (AtomicU64::new(0), Mutex::default(), AtomicU32::new(0));
        let (services_address, frees) = (Arc::as_ptr(&frees.memory.services).addr(), Arc::clone(frees));
        Arc::new(Self { services_address, ptr, last_use, device, recording, uses, origin, frees })
    }

    /// Returns a block that the memory of a stream kept.
    #[inline]
    pub(crate) fn kept(block: Arc<dyn Placed>) -> Arc<Self> {
        // SAFETY: No other type implements `Placed`. A check of the type would cost a twentieth of a request.
        unsafe { Arc::from_raw(Arc::into_raw(block).cast::<Self>()) }
    }

    fn services(&self) -> &Services {
        self.services_of()
    }

    pub(crate) fn services_of(&self) -> &Arc<Services> {
        &self.frees.memory.services
    }

    /// Counts a stream that uses the block in a capture, until the capture ends.
    pub(crate) fn recording_began(&self) {
        self.recording.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn recording_ended(&self) {
        self.recording.fetch_sub(1, Ordering::Relaxed);
    }

    /// Returns whether the block belongs to the stream's runtime.
    #[inline(always)]
    pub(crate) fn is_of(&self, stream: &StreamCore) -> bool {
        self.services_address == Arc::as_ptr(&stream.services).addr()
    }

    /// Refuses a block of another runtime.
    pub(crate) fn check_runtime(&self, operation: &'static str, services: &Arc<Services>) -> Result<()> {
        if self.services_address == Arc::as_ptr(services).addr() {
            return Ok(());
        }
        Err(Error::new(ErrorKind::InvalidArgument, operation, "the buffer belongs to another runtime")
            .with_hint("call the runtime that the buffer was made by"))
    }

    /// Returns whether the stream was noted last.
    #[inline(always)]
    pub(crate) fn is_noted(&self, stream: &StreamCore) -> bool {
        // Relaxed: the lock guards the list itself. This only shows that the key was noted before, and the key of a stream that
        // is in use does not leave the list.
        self.last_use.load(Ordering::Relaxed) == stream.key
    }

    /// Notes that work on `stream` uses the block, before it is enqueued. The first note of a stream orders it after
    /// the allocation of stream-ordered memory. The caller must hold no submission lock.
    #[inline]
    pub(crate) fn note_use(&self, stream: &Arc<StreamCore>) -> Result<Noted> {
        if self.is_noted(stream) { Ok(Noted::Ordered) } else { self.note_anew(stream) }
    }

    /// Returns the state of memory that is revoked when its owner dies.
    fn revocation(&self) -> Option<&Revocation> {
        match &self.origin {
            Origin::Shared(memory) => memory.revocation(),
            Origin::Own | Origin::Ordered(_) => None,
        }
    }

    /// Refuses memory that was revoked. A call that uses [`Noted::Revocable`] memory calls it under the submission lock.
    pub(crate) fn check_usable(&self, operation: &'static str) -> Result<()> {
        self.revocation().map_or(Ok(()), |revocation| revocation.check(operation))
    }

    /// Notes that other code has the address. From then on, the memory is released with the block and not earlier.
    pub(crate) fn note_lent(&self) {
        if let Some(revocation) = self.revocation() {
            let _uses = self.uses.lock();
            revocation.lend();
        }
    }

    /// Refuses all later uses of the memory of a dead owner. Returns the streams that used it. A call that was noted earlier
    /// checks under the submission lock. So it either comes before the completion of its stream or finds the memory revoked.
    /// `None` if other code has the address: the memory is then released with the block.
    pub(crate) fn revoke(&self, owner: String) -> Option<Vec<StreamUse>> {
        let revocation = self.revocation()?;
        let uses = self.uses.lock();
        revocation.revoke(owner).then(|| uses.iter().map(|(use_, _)| use_.clone()).collect())
    }

    /// Returns the process that owns the memory, unless it is this one.
    pub(crate) fn owner(&self) -> Option<Owner> {
        match &self.origin {
            Origin::Shared(memory) => memory.owner(),
            Origin::Own | Origin::Ordered(_) => None,
        }
    }

    /// Returns the runtime that exports the allocation of the block, and its key there.
    pub(crate) fn export(&self) -> Option<(Runtime, ExportKey)> {
        match &self.origin {
            Origin::Shared(memory) => memory.export(),
            Origin::Own | Origin::Ordered(_) => None,
        }
    }

    /// Returns whether the block is allocated and freed in the order of the stream, or the stream's part in a capture, with this
    /// key.
    pub(crate) fn is_in_order_of(&self, key: u64) -> bool {
        matches!(&self.origin, Origin::Ordered(Ordered { memory, .. }) if memory.key == key)
    }

    #[cold]
    fn note_anew(&self, stream: &Arc<StreamCore>) -> Result<Noted> {
        if self.is_in_order_of(stream.bound_as()) && stream.bound_as() != stream.key {
            // Memory of the capture that the stream takes part in. If it ends meanwhile, the call is refused.
            return Ok(Noted::InCapture);
        }
        let home = match &self.origin {
            Origin::Ordered(Ordered { memory, .. }) if memory.key != stream.key => Some(memory),
            _ => None,
        };
        let mut noted = Noted::Ordered;
        let mut uses = self.uses.lock();
        let earlier = uses.iter().find(|(use_, _)| use_.key() == stream.key).map(|(_, noted)| *noted);
        if let Some(home) = home
            && earlier != Some(Noted::Ordered)
        {
            drop(uses);
            // A thread that finds the stream in the list as ordered comes after the wait. Two threads may both make it
            // wait.
            noted = self.order_after_allocation(home, stream, earlier.is_some())?;
            uses = self.uses.lock();
        }
        if earlier != Some(Noted::Ordered) {
            match uses.iter_mut().find(|(use_, _)| use_.key() == stream.key) {
                Some((_, earlier)) if noted == Noted::Ordered => *earlier = noted,
                Some(_) => {}
                None => uses.push((stream.as_use(), noted)),
            }
        }
        let count = uses.len();
        drop(uses);
        if self.revocation().is_some() {
            // No short cut: each use must look whether the memory is revoked.
            noted = noted.and(Noted::Revocable);
        } else if noted == Noted::Ordered {
            self.last_use.store(stream.key, Ordering::Relaxed);
        }
        // From time to time, so that a buffer that outlives many streams does not remember all of them.
        if count >= 8 && count.is_power_of_two() {
            self.forget_ended_streams();
        }
        Ok(noted)
    }

    /// Makes a stream wait, on the device, for the allocation of the block in the order of another stream. Until then,
    /// work of the earlier block in this memory may be outstanding. The wait covers all work of the other stream so
    /// far, so that an allocation itself records no completion event.
    fn order_after_allocation(&self, home: &StreamMemory, stream: &StreamCore, is_noted: bool) -> Result<Noted> {
        const OPERATION: &str = "stream_wait_event";
        let capture = stream.lock_submission().recording.as_ref().map(|recording| Arc::clone(&recording.capture));
        if let Some(capture) = capture {
            // In the capture that the memory belongs to, the wait is recorded, once.
            let home = home.stream().filter(|_| !is_noted);
            let allocated = home.map(|home| home.completion_in(Arc::as_ptr(&capture).addr())).transpose()?.flatten();
            if let Some(allocated) = allocated {
                let submission = stream.enter(OPERATION)?;
                if submission.recording.as_ref().is_some_and(|recording| Arc::ptr_eq(&recording.capture, &capture)) {
                    self.services().backend.stream_wait_event(stream.id, allocated.event())?;
                }
            }
            return Ok(Noted::InCapture);
        }
        let wait = || {
            // If the home stream takes part in a capture, the allocation came before that. If it has ended, so has the work
            // before the allocation been enqueued.
            let allocated = match home.stream() {
                Some(home) => home.completion()?,
                None => home.last().ok_or_else(never_recorded)?,
            };
            let submission = stream.enter(OPERATION)?;
            if submission.recording.is_some() {
                return Ok(Noted::InCapture);
            }
            self.services().backend.stream_wait_event(stream.id, allocated.event())?;
            Ok(Noted::Ordered)
        };
        wait().map_err(|error: Error| {
            let own =
                home.stream().map_or_else(|| "a stream that has ended".to_owned(), |home| format!("the {}", home.id()));
            let message = format!(
                "the {} cannot wait for the allocation of {} in the order of {own}: {}",
                stream.id,
                self.ptr,
                error.message()
            );
            let unordered = Error::new(error.kind(), OPERATION, message).with_hint(error.hint());
            error.code().into_iter().fold(unordered, Error::with_code)
        })
    }

    /// Removes the streams that have ended and are done. Keys are never reused, so the streams are not noted again.
    #[cold]
    fn forget_ended_streams(&self) {
        let ended: Vec<_> = self.uses.lock().iter().filter_map(|(use_, _)| use_.if_ended()).collect();
        for (key, completion) in ended {
            if self.services().is_surely_passed(&completion) {
                self.uses.lock().retain(|(use_, _)| use_.key() != key);
            }
        }
    }

    /// Returns the completion events of the work on the block that is not known to be done, and whether any of that work has no
    /// completion event.
    pub(crate) fn outstanding(&self) -> (Vec<Arc<CompletionEvent>>, bool) {
        self.outstanding_of(&mut StreamEnds::default())
    }

    /// Does the same as [`DeviceBlock::outstanding`], with one question to the backend for each stream of several blocks. The
    /// caller must have begun `ends` after the work that counts.
    fn outstanding_of(&self, ends: &mut StreamEnds) -> (Vec<Arc<CompletionEvent>>, bool) {
        let uses: Vec<StreamUse> = self.uses.lock().iter().map(|(use_, _)| use_.clone()).collect();
        let mut unmarked = false;
        let mut outstanding = Vec::new();
        for use_ in uses {
            match ends.of(&use_, self.services()) {
                None => {}
                Some(UseEnd::At(completion)) => outstanding.push(completion),
                Some(UseEnd::Later | UseEnd::Unknown) => unmarked = true,
            }
        }
        (outstanding, unmarked)
    }

    /// Returns the completion events of the work on the block, for a wait that blocks no thread.
    pub(crate) fn work(&self) -> Result<Vec<Arc<CompletionEvent>>> {
        self.services().check("ready")?;
        self.refuse_if_recorded("ready")?;
        if in_capture() {
            return Err(no_wait_in_capture("ready"));
        }
        let uses: Vec<StreamUse> = self.uses.lock().iter().map(|(use_, _)| use_.clone()).collect();
        let running = uses.iter().filter(|use_| !use_.is_over());
        running.map(|use_| use_.try_completion()?.ok_or_else(never_recorded)).collect()
    }

    fn refuse_if_recorded(&self, operation: &'static str) -> Result<()> {
        if self.recording.load(Ordering::Relaxed) == 0 {
            return Ok(());
        }
        let message = "an open capture uses the buffer: its recorded work is not executed, so no call can wait for it";
        Err(Error::new(ErrorKind::Capture, operation, message)
            .with_hint("call this before the capture, or after it and a launch of its graph; the capture goes on"))
    }

    /// Returns the ticket of the whole block.
    pub(crate) fn share(self: &Arc<Self>) -> Result<Ticket> {
        self.share_with(&mut StreamEnds::default())
    }

    /// Does the same as [`DeviceBlock::share`], for a call that shares several blocks. The caller must have begun `ends` in that call.
    pub(crate) fn share_with(self: &Arc<Self>, ends: &mut StreamEnds) -> Result<Ticket> {
        self.services().check("share")?;
        refuse_in_capture("share")?;
        self.check_usable("share")?;
        self.refuse_if_recorded("share")?;
        let (after, unmarked) = self.outstanding_of(ends);
        if unmarked {
            return Err(Error::new(
                ErrorKind::InvalidState,
                "share",
                "a wait for the device work on the buffer failed",
            )
            .with_hint("an earlier error of the device gives the reason"));
        }
        self.shared_memory()?.share(self, after)
    }

    /// Returns the memory that several processes can have open.
    fn shared_memory(&self) -> Result<&dyn SharedMemory> {
        let message = match &self.origin {
            Origin::Shared(memory) => return Ok(&**memory),
            Origin::Ordered(_) => "stream-ordered memory cannot be shared",
            Origin::Own => "the buffer was not allocated to be shared",
        };
        Err(Error::new(ErrorKind::InvalidArgument, "share", message)
            .with_hint("allocate it with `Device::allocate_shared`"))
    }

    /// Returns the transport by which other processes open the block.
    pub(crate) fn transport(&self) -> Result<Transport> {
        self.services().check("transport")?;
        self.shared_memory()?.transport(self.device)
    }

    /// Returns the bytes of the shared allocation that the block has. `None` for other memory.
    pub(crate) fn shared_range(&self) -> Option<Range<u64>> {
        self.shared_memory().ok().map(SharedMemory::range)
    }

    /// Takes the streams that used the block out. The block has no owner any more.
    fn take_uses(&mut self) -> Vec<StreamUse> {
        std::mem::take(self.uses.get_mut()).into_iter().map(|(use_, _)| use_).collect()
    }

    /// Returns the free to run once every stream that used the block has passed that use. The block has no owner any more.
    pub(crate) fn deferred_free(&mut self) -> DeferredFree {
        let later = self.take_uses();
        let (device, ptr) = (self.device, self.ptr);
        let mut free = DeferredFree { device, ptr, after: Vec::new(), later, unmarked: false, keeps: None };
        free.record_later();
        free
    }

    /// Ends the life of a block whose buffer is gone.
    #[inline]
    pub(crate) fn end(block: Arc<Self>) {
        if let Origin::Ordered(Ordered { memory, lot, .. }) = &block.origin
            && Arc::strong_count(&block) == 1
        {
            // With the releases of earlier owners: what they did to the block comes before.
            fence(Ordering::Acquire);
            // SAFETY: This is the only reference, and no `Weak` of a block of a stream exists. `Arc::get_mut` or the lock would cost
            // a tenth of the free.
            let uses = unsafe { &*block.uses.data_ptr() };
            let is_used_by_others = uses.iter().any(|(use_, _)| use_.key() != memory.key);
            // In a forked child, a thread of the parent may hold the lock for ever. No call of the backend follows, so the exit of
            // the process needs no check.
            if !is_used_by_others && !memory.is_poisoned && block.services().generation.is_current() {
                let (memory, lot) = (Arc::as_ptr(memory), *lot);
                // SAFETY: The pool keeps the memory of a stream while a place of it is given out. This place is, until the last
                // lock of `give_back` ends. A shared count here would cost a quarter of the free.
                unsafe { &*memory }.give_back(lot, block);
            }
        }
    }
}

// SAFETY: The only implementation.
unsafe impl Placed for DeviceBlock {
    fn lot(&self) -> Option<Lot> {
        match &self.origin {
            Origin::Ordered(ordered) => Some(ordered.lot),
            _ => None,
        }
    }

    fn forget_lot(&self) {
        if let Origin::Ordered(ordered) = &self.origin {
            // Relaxed: the caller owns the block.
            ordered.has_lot.store(false, Ordering::Relaxed);
        }
    }
}

impl Drop for DeviceBlock {
    fn drop(&mut self) {
        if let Origin::Ordered(ordered) = &mut self.origin
            && !*ordered.has_lot.get_mut()
        {
            return;
        }
        if !self.services().may_release() {
            return;
        }
        match std::mem::replace(&mut self.origin, Origin::Own) {
            Origin::Shared(memory) => memory.release(self),
            Origin::Own => {
                let free = self.deferred_free();
                self.frees.defer(free);
            }
            Origin::Ordered(Ordered { memory, lot, .. }) => {
                let mut later = self.take_uses();
                // Its own stream needs no event: the memory is free in its order.
                later.retain(|use_| use_.key() != memory.key);
                #[cfg(test)]
                later.retain(|_| !memory.pool.wrongly.forgets_uses.load(Ordering::Relaxed));
                let mut waiting = Waiting { later, ..Waiting::of(lot) };
                waiting.record_later();
                memory.give_back_waiting(waiting);
            }
        }
    }
}
