//! The storage behind the handles and descriptors of the libraries.
//!
//! A slot is never freed, only reused. Reading it therefore tells a destroyed handle from a live one, and a use of a destroyed
//! handle returns a code instead of being undefined. A pointer that no call returned is undefined, as with the vendor.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One handle or descriptor. The tag comes first, so that it is found before the kind is known.
#[derive(Debug)]
#[repr(C)]
struct Slot<T> {
    /// The tag of its kind while it is live.
    tag: AtomicU64,
    value: Mutex<Option<T>>,
}

/// All slots of one kind.
#[derive(Debug)]
pub struct Slots<T: 'static> {
    tag: u64,
    free: Mutex<Vec<&'static Slot<T>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T: Send> Slots<T> {
    /// No slots. The tag tells this kind from the others.
    #[must_use]
    pub const fn new(tag: [u8; 8]) -> Self {
        Self { tag: u64::from_ne_bytes(tag), free: Mutex::new(Vec::new()) }
    }

    /// Puts a value into a slot and gives its address.
    pub fn insert(&self, value: T) -> *mut c_void {
        let free = lock(&self.free).pop();
        let slot =
            free.unwrap_or_else(|| Box::leak(Box::new(Slot { tag: AtomicU64::new(0), value: Mutex::new(None) })));
        *lock(&slot.value) = Some(value);
        // Release: who finds the tag finds the value.
        slot.tag.store(self.tag, Ordering::Release);
        std::ptr::from_ref(slot).cast_mut().cast()
    }

    /// The slot at an address that `insert` gave, if it is live.
    ///
    /// # Safety
    /// The address is null or was given by the `insert` of a set of slots.
    unsafe fn slot(&self, address: *mut c_void) -> Option<&'static Slot<T>> {
        let tag = address.cast::<AtomicU64>();
        if !address.cast::<Slot<T>>().is_aligned() {
            return None;
        }
        // SAFETY: the caller promised that a slot lies there, which lives for ever. Its kind is not known yet, so only the
        // tag is read, which comes first in slots of every kind.
        let live = unsafe { tag.as_ref() }?.load(Ordering::Acquire);
        // SAFETY: the tag says that the slot is one of this kind.
        if live == self.tag { unsafe { address.cast::<Slot<T>>().as_ref() } } else { None }
    }

    /// Runs `body` on the value at an address; `None` where nothing is live there.
    ///
    /// # Safety
    /// As for [`Slots::remove`].
    pub unsafe fn with<R>(&self, address: *mut c_void, body: impl FnOnce(&mut T) -> R) -> Option<R> {
        if address.is_null() {
            return None;
        }
        // SAFETY: forwarded to the caller.
        let slot = unsafe { self.slot(address) }?;
        lock(&slot.value).as_mut().map(body)
    }

    /// Takes the value at an address; `None` where nothing is live there.
    ///
    /// # Safety
    /// The address is null or was given by `insert`.
    pub unsafe fn remove(&self, address: *mut c_void) -> Option<T> {
        if address.is_null() {
            return None;
        }
        // SAFETY: forwarded to the caller.
        let slot = unsafe { self.slot(address) }?;
        // One of two threads that destroy the same handle finds the tag gone.
        slot.tag.compare_exchange(self.tag, 0, Ordering::AcqRel, Ordering::Relaxed).ok()?;
        let value = lock(&slot.value).take();
        lock(&self.free).push(slot);
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_address_is_told_and_its_slot_is_used_again() {
        static NUMBERS: Slots<u32> = Slots::new(*b"numbers\0");
        static WORDS: Slots<&str> = Slots::new(*b"words\0\0\0");
        let (seven, word) = (NUMBERS.insert(7), WORDS.insert("word"));
        // SAFETY: all addresses were given by `insert`.
        unsafe {
            assert_eq!(NUMBERS.with(seven, |number| std::mem::replace(number, 8)), Some(7));
            assert_eq!(NUMBERS.with(word, |number| *number), None);
            assert_eq!(WORDS.remove(word), Some("word"));
            assert_eq!(NUMBERS.remove(seven), Some(8));
            assert_eq!(NUMBERS.remove(seven), None);
            assert_eq!(NUMBERS.with(seven, |number| *number), None);
            assert_eq!(NUMBERS.with(std::ptr::null_mut(), |number| *number), None);
            assert_eq!(NUMBERS.insert(9), seven);
            assert_eq!(NUMBERS.with(seven, |number| *number), Some(9));
        }
    }
}
