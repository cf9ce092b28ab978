//! Tables from ids to vendor handles. No handle is destroyed while a call uses it.
//!
//! A vendor crashes on a destroyed stream, and a safe call may race with the call that destroys. A lock or a count in
//! the slot would be written by every call of every thread. A call therefore publishes a *hazard pointer* to the slot
//! in the record of its own thread. It then re-checks that the slot holds the object, and calls the vendor. A destroyer
//! makes the id stale and then looks for hazard pointers. While it finds one, the destruction is postponed to a later
//! call. A fence on each side ensures that either the hazard pointer or the stale slot is seen (`hazards.rs`). One
//! fence serves a removal or a sweep of any number of handles.

use std::marker::PhantomData;

use crate::primitive::{AtomicPtr, AtomicU64, Mutex, Ordering};
use highwater_hal::{BackendTag, Error, ErrorKind, EventId, IdParts, ObjectId as _, Result, StreamId};
use std::num::NonZeroU32;

use super::hazards::{Fenced, Hazard};
use super::raw::{IdOf, Raw, RawStream};
use super::thread_records;

/// The place of one object in a table.
#[derive(Debug)]
pub(super) struct Slot {
    /// The generation in the upper half; the device and [`LIVE`] in the lower half.
    state: AtomicU64,
    /// The vendor's handle.
    raw: AtomicU64,
    /// The object's flags and a number.
    flags: AtomicU64,
    /// Of a stream: in the lower half, the number of its handle, which is odd while another handle replaces it; in the upper
    /// half, the number of the handle that was destroyed last. Of an event: the [`Link`] of its last record.
    link: AtomicU64,
}

/// A reference to a handle of a stream: the slot plus 1 in the lower half, and the number of the handle in the upper half.
/// 0 for none. A link stays valid after the handle is destroyed.
pub(super) type Link = u64;

/// The link of an event whose last record was on a default stream or on its relay, which are in no table.
pub(super) const BEHIND_DEFAULT: Link = 1 << 32;

/// The state of a link's handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Home {
    /// None: the event was never recorded, or was last recorded on a default stream or on its relay.
    None,
    /// The handle is in the table.
    Live(RawStream),
    /// The handle was removed or replaced, and is not destroyed yet.
    Leaving,
    /// The handle was destroyed.
    Gone,
}

/// Set in `Slot::state` while the slot holds an object.
const LIVE: u64 = 1 << 31;

const fn live(generation: u32, device: u32) -> u64 {
    (generation as u64) << 32 | LIVE | device as u64
}

/// The low bits of `Slot::flags` that are flags. The others are a number.
const FLAG_BITS: u32 = 8;

/// Returns flags that are a number alone.
pub(super) const fn with_number(number: u64) -> u64 {
    number << FLAG_BITS
}

/// Slots in the first chunk, which is the fastest to search. Each further chunk is twice as large as the previous one.
const FIRST_CHUNK: u32 = 1024;
const CHUNKS: usize = 20;

/// Returns the chunk of a slot and its index in the chunk.
#[inline(always)]
const fn place(slot: u32) -> (usize, usize) {
    let shifted = slot / FIRST_CHUNK + 1;
    let chunk = shifted.ilog2();
    (chunk as usize, (slot - FIRST_CHUNK * ((1 << chunk) - 1)) as usize)
}

const fn chunk_slots(chunk: usize) -> usize {
    (FIRST_CHUNK as usize) << chunk
}

impl Slot {
    #[inline(always)]
    fn address(&self) -> *mut () {
        std::ptr::from_ref(self).cast_mut().cast()
    }

    /// Adds to the number of the handle, and returns the previous link.
    fn count_handle(&self, by: u32) -> u64 {
        let count = |link: u64| Some(link >> 32 << 32 | u64::from((link as u32).wrapping_add(by)));
        match self.link.fetch_update(Ordering::AcqRel, Ordering::Relaxed, count) {
            Ok(before) | Err(before) => before,
        }
    }

    /// Stores that a handle was destroyed.
    fn end<R>(&self, removed: &Removed<R>) {
        let ended = u64::from(removed.link as u32) << 32;
        // Release: a thread that finds the handle gone also finds the effects of its destruction.
        let _ =
            self.link.fetch_update(Ordering::Release, Ordering::Relaxed, |link| Some(ended | u64::from(link as u32)));
    }

    /// Returns the handle if the slot still holds the object of these parts. The caller has published the hazard
    /// pointer.
    #[inline(always)]
    fn held<I: IdOf>(&self, parts: &IdParts, hazard: Hazard) -> Option<Held<'_, I>> {
        let stands = self.state.load(Ordering::Acquire) == live(parts.generation.get(), parts.device);
        stands.then(|| Held { slot: self, _hazard: hazard, kind: PhantomData })
    }
}

/// The objects of one kind.
#[derive(Debug)]
pub(super) struct Objects<I: IdOf> {
    tag: BackendTag,
    chunks: [AtomicPtr<Slot>; CHUNKS],
    book: Mutex<Book<I::Raw>>,
    kind: PhantomData<fn(I) -> I>,
}

#[derive(Debug)]
struct Book<R> {
    slots: u32,
    free: Vec<u32>,
    live: u64,
    /// Removed objects that a call of another thread may still use.
    put_off: Vec<Removed<R>>,
}

/// A handle that was removed from a table and must be destroyed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Removed<R> {
    slot: u32,
    pub(super) device: u32,
    pub(super) raw: R,
    pub(super) flags: u64,
    /// The slot's link at the removal.
    pub(super) link: u64,
}

impl<R> Removed<R> {
    /// Returns the number above the flags.
    pub(super) const fn number(&self) -> u64 {
        self.flags >> FLAG_BITS
    }
}

/// A vendor handle that is not destroyed while this is alive.
#[derive(Debug)]
pub(super) struct Held<'t, I> {
    slot: &'t Slot,
    _hazard: Hazard,
    kind: PhantomData<I>,
}

impl<I: IdOf> Held<'_, I> {
    /// Returns the vendor's handle.
    #[inline(always)]
    pub(super) fn raw(&self) -> I::Raw {
        // Relaxed: written before the state that was read.
        I::Raw::from_number(self.slot.raw.load(Ordering::Relaxed))
    }

    #[inline(always)]
    pub(super) fn flags(&self) -> u64 {
        self.slot.flags.load(Ordering::Relaxed)
    }

    /// Returns the 56-bit number above the flags.
    pub(super) fn number(&self) -> u64 {
        self.flags() >> FLAG_BITS
    }

    pub(super) fn set_number(&self, number: u64) {
        self.slot.flags.fetch_and((1 << FLAG_BITS) - 1, Ordering::Relaxed);
        self.slot.flags.fetch_or(number << FLAG_BITS, Ordering::Relaxed);
    }

    /// Returns the link of an event.
    #[inline(always)]
    pub(super) fn link(&self) -> Link {
        self.slot.link.load(Ordering::Acquire)
    }

    /// Stores the link of an event.
    pub(super) fn set_link(&self, link: Link) {
        self.slot.link.store(link, Ordering::Release);
    }

    /// Returns the handle and its number, which belong together.
    pub(super) fn raw_and_number(&self) -> (I::Raw, u32) {
        loop {
            let before = self.slot.link.load(Ordering::Acquire) as u32;
            let raw = I::Raw::from_number(self.slot.raw.load(Ordering::Acquire));
            if before & 1 == 0 && self.slot.link.load(Ordering::Acquire) as u32 == before {
                return (raw, before);
            }
            std::hint::spin_loop();
        }
    }

    /// Sets or clears a flag and returns its previous value. If two threads clear a flag, one of them finds it set.
    pub(super) fn set_flag(&self, flag: u64, on: bool) -> bool {
        let before = if on {
            self.slot.flags.fetch_or(flag, Ordering::Relaxed)
        } else {
            self.slot.flags.fetch_and(!flag, Ordering::Relaxed)
        };
        before & flag != 0
    }
}

impl<I: IdOf> Objects<I> {
    pub(super) fn new(tag: BackendTag) -> Self {
        Self {
            tag,
            chunks: std::array::from_fn(|_| AtomicPtr::new(std::ptr::null_mut())),
            book: Mutex::new(Book { slots: 0, free: Vec::new(), live: 0, put_off: Vec::new() }),
            kind: PhantomData,
        }
    }

    /// Adds a vendor handle and issues its id.
    pub(super) fn insert(&self, operation: &'static str, device: u32, raw: I::Raw, flags: u64) -> Result<I> {
        let mut book = self.book.lock();
        let index = match book.free.pop() {
            Some(index) => index,
            None => {
                let index = book.slots;
                let (chunk, _) = place(index);
                if chunk >= CHUNKS {
                    let message = format!("{index} {}s exist, which is the limit", I::NAME);
                    return Err(Error::new(ErrorKind::OutOfMemory, operation, message));
                }
                if self.chunks[chunk].load(Ordering::Relaxed).is_null() {
                    let empty = || Slot {
                        state: AtomicU64::new(0),
                        raw: AtomicU64::new(0),
                        flags: AtomicU64::new(0),
                        link: AtomicU64::new(0),
                    };
                    let slots: Box<[Slot]> = (0..chunk_slots(chunk)).map(|_| empty()).collect();
                    // Release: a thread that reads the chunk reads its slots.
                    self.chunks[chunk].store(Box::into_raw(slots).cast(), Ordering::Release);
                }
                book.slots += 1;
                index
            }
        };
        let Some(slot) = self.slot(index) else {
            return Err(Error::new(ErrorKind::InvalidState, operation, "a table of ids lost a slot"));
        };
        let generation = (slot.state.load(Ordering::Relaxed) >> 32) as u32 + 1;
        let Some(non_zero) = NonZeroU32::new(generation) else {
            return Err(Error::new(ErrorKind::InvalidState, operation, "a slot of ids has no generation left"));
        };
        slot.raw.store(raw.number(), Ordering::Relaxed);
        slot.flags.store(flags, Ordering::Relaxed);
        if I::IS_FOLLOWED {
            slot.count_handle(2);
        } else {
            slot.link.store(0, Ordering::Relaxed);
        }
        // Release: a thread that reads the state reads the handle.
        slot.state.store(live(generation, device), Ordering::Release);
        book.live += 1;
        let parts = IdParts { slot: index, generation: non_zero, tag: self.tag, device };
        // SAFETY: The id is not forged. The table belongs to the backend, and the slot holds the object from here on.
        Ok(unsafe { I::from_parts(parts) })
    }

    #[inline(always)]
    fn slot(&self, index: u32) -> Option<&Slot> {
        let (chunk, place) = place(index);
        let slots = self.chunks.get(chunk)?.load(Ordering::Acquire);
        if slots.is_null() {
            return None;
        }
        // SAFETY: The chunk holds `chunk_slots(chunk)` slots, and `place` is below that. Chunks live as long as the
        // table.
        Some(unsafe { &*slots.add(place) })
    }

    /// Returns the slot of an id of this backend, if it is in the first chunk.
    #[inline(always)]
    fn first_slot_of(&self, parts: &IdParts) -> Option<&Slot> {
        let slots = self.chunks[0].load(Ordering::Acquire);
        if parts.tag != self.tag || parts.slot >= FIRST_CHUNK || slots.is_null() {
            return None;
        }
        // SAFETY: As in `slot`.
        Some(unsafe { &*slots.add(parts.slot as usize) })
    }

    /// Holds an object of the first chunk, in a thread that has a record and uses nothing else. This is nearly always
    /// the case.
    #[inline(always)]
    fn hold_quickly(&self, parts: &IdParts) -> Option<Held<'_, I>> {
        let (record, slot) = (thread_records::known()?, self.first_slot_of(parts)?);
        slot.held(parts, record.announce_first(slot.address())?)
    }

    /// Holds two objects as [`Objects::hold_quickly`] does.
    #[inline(always)]
    fn hold_quickly_with<'t, J: IdOf>(
        &'t self,
        parts: &IdParts,
        others: &'t Objects<J>,
        other_parts: &IdParts,
    ) -> Option<(Held<'t, I>, Held<'t, J>)> {
        let record = thread_records::known()?;
        let (slot, other_slot) = (self.first_slot_of(parts)?, others.first_slot_of(other_parts)?);
        let (hazard, other_hazard) = record.announce_first_both(slot.address(), other_slot.address())?;
        Some((slot.held(parts, hazard)?, other_slot.held(other_parts, other_hazard)?))
    }

    /// Returns the slot of an id of this backend. The slot may hold another object by now.
    #[inline(always)]
    fn slot_of(&self, parts: &IdParts) -> Option<&Slot> {
        if parts.tag == self.tag { self.slot(parts.slot) } else { None }
    }

    /// Returns the vendor handle of `id`, which is not destroyed until the result is dropped.
    #[inline(always)]
    pub(super) fn hold(&self, operation: &'static str, id: I) -> Result<Held<'_, I>> {
        match self.hold_quickly(&id.parts()) {
            Some(held) => Ok(held),
            None => self.hold_any(operation, id),
        }
    }

    /// Holds any object in any thread, or reports the fault of the id.
    #[cold]
    #[inline(never)]
    fn hold_any(&self, operation: &'static str, id: I) -> Result<Held<'_, I>> {
        let parts = id.parts();
        if let Some(slot) = self.slot_of(&parts)
            && let Some(held) = slot.held(&parts, thread_records::announce(slot.address()))
        {
            return Ok(held);
        }
        Err(self.unknown(operation, id))
    }

    /// Holds objects of two tables at the cost of one.
    #[inline(always)]
    pub(super) fn hold_with<'t, J: IdOf>(
        &'t self,
        operation: &'static str,
        id: I,
        others: &'t Objects<J>,
        other: J,
    ) -> Result<(Held<'t, I>, Held<'t, J>)> {
        match self.hold_quickly_with(&id.parts(), others, &other.parts()) {
            Some(both) => Ok(both),
            None => self.hold_any_with(operation, id, others, other),
        }
    }

    /// Holds any two objects in any thread, or reports the fault of an id.
    #[cold]
    #[inline(never)]
    fn hold_any_with<'t, J: IdOf>(
        &'t self,
        operation: &'static str,
        id: I,
        others: &'t Objects<J>,
        other: J,
    ) -> Result<(Held<'t, I>, Held<'t, J>)> {
        let (parts, other_parts) = (id.parts(), other.parts());
        let (slot, other_slot) = (self.slot_of(&parts), others.slot_of(&other_parts));
        if let (Some(slot), Some(other_slot)) = (slot, other_slot) {
            let (hazard, other_hazard) = thread_records::announce_both(slot.address(), other_slot.address());
            let Some(held) = slot.held(&parts, hazard) else { return Err(self.unknown(operation, id)) };
            let Some(other_held) = other_slot.held(&other_parts, other_hazard) else {
                return Err(others.unknown(operation, other));
            };
            return Ok((held, other_held));
        }
        Err(if slot.is_none() { self.unknown(operation, id) } else { others.unknown(operation, other) })
    }

    #[cold]
    fn unknown(&self, operation: &'static str, id: I) -> Error {
        if id.parts().tag == self.tag {
            Error::new(ErrorKind::InvalidHandle, operation, format!("the {id} does not exist"))
                .with_hint(format!("the {} was destroyed or never existed; create a new one", I::NAME))
        } else {
            let message =
                format!("the {id} belongs to another opened backend than {}, which was called", self.tag.get());
            Error::new(ErrorKind::InvalidHandle, operation, message)
                .with_hint(format!("create the {} with the runtime or the backend that uses it", I::NAME))
        }
    }

    /// Makes `id` stale and passes its handle to `destroy`, unless a call uses the handle. `destroy` also gets the
    /// postponed handles that no call uses any more. It runs outside the lock.
    ///
    /// Returns the result for this object; a postponed destruction is a success. An object with a flag of `at_once` is
    /// not postponed: this call waits until no call uses it.
    pub(super) fn remove(
        &self,
        operation: &'static str,
        id: I,
        at_once: u64,
        mut destroy: impl FnMut(&Removed<I::Raw>) -> Result<()>,
    ) -> Result<()> {
        let parts = id.parts();
        let removed = {
            let mut book = self.book.lock();
            let known = self.slot_of(&parts);
            let slot =
                known.filter(|slot| slot.state.load(Ordering::Relaxed) == live(parts.generation.get(), parts.device));
            let Some(slot) = slot else { return Err(self.unknown(operation, id)) };
            slot.state.store(u64::from(parts.generation.get()) << 32, Ordering::Relaxed);
            book.live -= 1;
            let raw = I::Raw::from_number(slot.raw.load(Ordering::Relaxed));
            let flags = slot.flags.load(Ordering::Relaxed);
            let link = slot.link.load(Ordering::Relaxed);
            Removed { slot: parts.slot, device: parts.device, raw, flags, link }
        };
        if removed.flags & at_once != 0 {
            while self.is_used(&removed, &Fenced::now()) {
                std::thread::yield_now();
            }
        }
        let mut answer = Ok(());
        self.sweep_with(Some(removed), |removed_now| {
            let outcome = destroy(removed_now);
            if removed_now.slot == removed.slot {
                answer = outcome;
            } else if let Err(error) = outcome {
                tracing::warn!("an object whose destruction was postponed was leaked: {error}");
            }
        });
        answer
    }

    /// Puts another vendor handle under `id`, waits until no call uses the old one, and passes it to `destroy`. Calls
    /// with the new handle publish the same slot, so the wait may include some of them. The caller must not use the slot.
    ///
    /// A call that reads the new handle depends on it for what the vendor wrote, so that read needs no fence.
    pub(super) fn replace(
        &self,
        operation: &'static str,
        id: I,
        raw: I::Raw,
        destroy: impl FnOnce(&Removed<I::Raw>) -> Result<()>,
    ) -> Result<()> {
        let parts = id.parts();
        let (slot, replaced) = {
            let _book = self.book.lock();
            let known = self.slot_of(&parts);
            let slot =
                known.filter(|slot| slot.state.load(Ordering::Relaxed) == live(parts.generation.get(), parts.device));
            let Some(slot) = slot else { return Err(self.unknown(operation, id)) };
            let link = slot.count_handle(1);
            // Release: a thread that reads the handle reads what it points to.
            let old = I::Raw::from_number(slot.raw.swap(raw.number(), Ordering::AcqRel));
            slot.count_handle(1);
            (slot, Removed { slot: parts.slot, device: parts.device, raw: old, flags: 0, link })
        };
        while self.is_used(&replaced, &Fenced::now()) {
            std::thread::yield_now();
        }
        if let Err(error) = destroy(&replaced) {
            tracing::warn!("a replaced handle was leaked: {error}");
        }
        slot.end(&replaced);
        Ok(())
    }

    /// Destroys the postponed handles that no call uses any more.
    pub(super) fn sweep(&self, mut destroy: impl FnMut(&Removed<I::Raw>) -> Result<()>) {
        self.sweep_with(None, |removed| {
            if let Err(error) = destroy(removed) {
                tracing::warn!("an object whose destruction was postponed was leaked: {error}");
            }
        });
    }

    fn sweep_with(&self, first: Option<Removed<I::Raw>>, mut destroy: impl FnMut(&Removed<I::Raw>)) {
        let candidates: Vec<_> = {
            let mut book = self.book.lock();
            first.into_iter().chain(book.put_off.drain(..)).collect()
        };
        if candidates.is_empty() {
            return;
        }
        // One fence for all: each handle was made stale before it became a candidate.
        let fenced = Fenced::now();
        for mut removed in candidates {
            if self.is_used(&removed, &fenced) {
                self.book.lock().put_off.push(removed);
                continue;
            }
            // The call that used the object may have changed its flags after the removal.
            if let Some(slot) = self.slot(removed.slot) {
                removed.flags = slot.flags.load(Ordering::Relaxed);
            }
            destroy(&removed);
            if I::IS_FOLLOWED
                && let Some(slot) = self.slot(removed.slot)
            {
                slot.end(&removed);
            }
            // A slot whose generations are exhausted is never issued again.
            let last = self
                .slot(removed.slot)
                .is_none_or(|slot| slot.state.load(Ordering::Relaxed) >> 32 == u64::from(u32::MAX));
            if !last {
                self.book.lock().free.push(removed.slot);
            }
        }
    }

    /// Returns whether a call uses the slot of a handle that was removed before the fence.
    fn is_used(&self, removed: &Removed<I::Raw>, fenced: &Fenced) -> bool {
        self.slot(removed.slot).is_some_and(|slot| thread_records::is_announced(slot.address(), fenced))
    }

    /// Returns the number of objects.
    pub(super) fn live(&self) -> u64 {
        self.book.lock().live
    }

    /// Returns the number of postponed handles without a flag.
    pub(super) fn put_off_without(&self, flag: u64) -> u64 {
        self.book.lock().put_off.iter().filter(|removed| removed.flags & flag == 0).count() as u64
    }

    /// Returns the number of objects with a flag.
    pub(super) fn live_with(&self, flag: u64) -> u64 {
        self.devices_with(flag).len() as u64
    }

    /// Returns the device of each object with a flag.
    pub(super) fn devices_with(&self, flag: u64) -> Vec<u32> {
        let slots = self.book.lock().slots;
        let device = |slot: &Slot| {
            let state = slot.state.load(Ordering::Acquire);
            let has = state & LIVE != 0 && slot.flags.load(Ordering::Relaxed) & flag != 0;
            has.then_some(state as u32 & (LIVE as u32 - 1))
        };
        (0..slots).filter_map(|index| device(self.slot(index)?)).collect()
    }
}

impl Objects<StreamId> {
    /// Returns the link to the handle with this number of a stream.
    pub(super) fn link_of(id: StreamId, number: u32) -> Link {
        u64::from(number) << 32 | (u64::from(id.parts().slot) + 1)
    }

    /// Returns the state of a link's handle. [`Home::Live`] holds while the caller has a hazard pointer to the slot or a
    /// question that it began before this call.
    #[inline]
    pub(super) fn home(&self, link: Link) -> Home {
        let Some(slot) = (link as u32).checked_sub(1).and_then(|slot| self.slot(slot)) else { return Home::None };
        let (number, now) = ((link >> 32) as u32, slot.link.load(Ordering::Acquire));
        // Two numbers of one slot differ by far less than half of all numbers, so the comparison survives an overflow.
        let is_over = ((now >> 32) as u32).wrapping_sub(number) < u32::MAX / 2;
        if is_over {
            Home::Gone
        } else if now as u32 != number || slot.state.load(Ordering::Acquire) & LIVE == 0 {
            Home::Leaving
        } else {
            Home::Live(RawStream::from_number(slot.raw.load(Ordering::Acquire)))
        }
    }
}

impl Objects<EventId> {
    /// Returns the link of a removed event.
    pub(super) fn link_of_removed(&self, removed: &Removed<<EventId as IdOf>::Raw>) -> Link {
        self.slot(removed.slot).map_or(0, |slot| slot.link.load(Ordering::Acquire))
    }
}

#[cfg(test)]
impl<I: IdOf> Objects<I> {
    pub(super) fn is_locked(&self) -> bool {
        self.book.is_locked()
    }
}

impl<I: IdOf> Drop for Objects<I> {
    fn drop(&mut self) {
        for (chunk, slots) in self.chunks.iter().enumerate() {
            let slots = slots.load(Ordering::Acquire);
            if !slots.is_null() {
                let slots = std::ptr::slice_from_raw_parts_mut(slots, chunk_slots(chunk));
                // SAFETY: `insert` made the chunk from a box of this length, and nothing refers to the table any more.
                drop(unsafe { Box::from_raw(slots) });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_follow_one_another_without_a_gap() {
        let mut expected = (0, 0);
        for slot in 0..10_000 {
            assert_eq!(place(slot), expected);
            expected.1 += 1;
            if expected.1 == chunk_slots(expected.0) {
                expected = (expected.0 + 1, 0);
            }
        }
    }

    #[test]
    fn an_id_is_stale_once_removed_and_its_slot_is_used_again_for_another() {
        let table = Objects::<StreamId>::new(BackendTag::next());
        let old = table.insert("t", 3, RawStream(77), 0).unwrap();
        assert_eq!((table.hold("t", old).unwrap().raw().0, old.device()), (77, 3));
        let mut destroyed = Vec::new();
        table
            .remove("t", old, 0, |removed| {
                destroyed.push((removed.raw.0, removed.device));
                Ok(())
            })
            .unwrap();
        assert_eq!(destroyed, [(77, 3)]);
        let new = table.insert("t", 3, RawStream(78), 0).unwrap();
        assert_eq!(old.parts().slot, new.parts().slot);
        assert_eq!(table.hold("t", old).unwrap_err().kind(), ErrorKind::InvalidHandle);
        assert_eq!(table.remove("t", old, 0, |_| Ok(())).unwrap_err().kind(), ErrorKind::InvalidHandle);
        assert_eq!((table.hold("t", new).unwrap().raw().0, table.live()), (78, 1));
    }

    #[test]
    fn ids_of_other_backends_and_forged_ones_are_refused() {
        let (table, other) =
            (Objects::<StreamId>::new(BackendTag::next()), Objects::<StreamId>::new(BackendTag::next()));
        let id = table.insert("t", 1, RawStream(5), 0).unwrap();
        assert_eq!(other.hold("t", id).unwrap_err().kind(), ErrorKind::InvalidHandle);
        for forged in [IdParts { device: 0, ..id.parts() }, IdParts { slot: 40_000_000, ..id.parts() }] {
            // SAFETY: No runtime uses this table.
            let forged = unsafe { StreamId::from_parts(forged) };
            assert_eq!(table.hold("t", forged).unwrap_err().kind(), ErrorKind::InvalidHandle);
        }
    }

    #[test]
    fn what_a_call_uses_is_destroyed_only_after_it() {
        let table = Objects::<StreamId>::new(BackendTag::next());
        let id = table.insert("t", 0, RawStream(9), 0).unwrap();
        let held = table.hold("t", id).unwrap();
        let mut destroyed = 0;
        table
            .remove("t", id, 0, |_| {
                destroyed += 1;
                Ok(())
            })
            .unwrap();
        assert_eq!((destroyed, table.live(), table.put_off_without(1)), (0, 0, 1));
        assert!(table.hold("t", id).is_err());
        // The slot is not reused before its handle is destroyed.
        let other = table.insert("t", 0, RawStream(10), 0).unwrap();
        assert_ne!(other.parts().slot, id.parts().slot);
        table.sweep(|_| {
            destroyed += 1;
            Ok(())
        });
        assert_eq!(destroyed, 0);
        drop(held);
        table.sweep(|_| {
            destroyed += 1;
            Ok(())
        });
        table.sweep(|_| {
            destroyed += 1;
            Ok(())
        });
        assert_eq!(destroyed, 1);
    }

    #[test]
    fn flags_are_counted_over_live_objects() {
        let table = Objects::<StreamId>::new(BackendTag::next());
        let ids: Vec<_> = (0..200).map(|raw| table.insert("t", 0, RawStream(raw), raw & 1).unwrap()).collect();
        table.remove("t", ids[1], 0, |_| Ok(())).unwrap();
        table.hold("t", ids[0]).unwrap().set_flag(1, true);
        table.hold("t", ids[3]).unwrap().set_flag(1, false);
        assert_eq!((table.live(), table.live_with(1)), (199, 99));
        assert_eq!(table.hold("t", ids[0]).unwrap().flags(), 1);
    }

    #[test]
    fn threads_that_use_and_one_that_destroys_never_meet_a_destroyed_object() {
        use std::sync::atomic::AtomicBool;
        // The handle is an index into this array. Destroying it sets the entry.
        let destroyed: Vec<AtomicBool> = (0..2000).map(|_| AtomicBool::new(false)).collect();
        let table = Objects::<StreamId>::new(BackendTag::next());
        let current = std::sync::Mutex::new(table.insert("t", 0, RawStream(0), 0).unwrap());
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        let id = *current.lock().unwrap();
                        if let Ok(held) = table.hold("t", id) {
                            assert!(!destroyed[held.raw().0 as usize].load(std::sync::atomic::Ordering::SeqCst));
                        }
                    }
                });
            }
            for raw in 1..2000 {
                let next = table.insert("t", 0, RawStream(raw), 0).unwrap();
                let old = std::mem::replace(&mut *current.lock().unwrap(), next);
                table
                    .remove("t", old, 0, |removed| {
                        destroyed[removed.raw.0 as usize].store(true, std::sync::atomic::Ordering::SeqCst);
                        Ok(())
                    })
                    .unwrap();
            }
        });
        table.sweep(|_| Ok(()));
        assert_eq!(table.live(), 1);
    }
}
