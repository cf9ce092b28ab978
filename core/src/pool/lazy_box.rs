//! A box that is allocated on the first use, in the space of one pointer.

use std::fmt;
use std::marker::PhantomData;

use crate::primitive::{AtomicPtr, Ordering};

/// A value that most owners never need.
pub(crate) struct LazyBox<T> {
    /// Null before the first use. It then owns the value until the drop.
    value: AtomicPtr<T>,
    owned: PhantomData<Box<T>>,
}

impl<T> LazyBox<T> {
    pub(crate) fn new() -> Self {
        Self { value: AtomicPtr::new(std::ptr::null_mut()), owned: PhantomData }
    }

    /// Returns the value, if it is allocated.
    #[inline]
    pub(crate) fn get(&self) -> Option<&T> {
        let value = self.value.load(Ordering::Acquire);
        // SAFETY: Null, or from `Box::into_raw`. It is not freed before `self` is dropped.
        unsafe { value.as_ref() }
    }

    /// Returns the value, which `make` makes on the first use. If several threads make one at once, one value stays.
    pub(crate) fn get_or_make(&self, make: impl FnOnce() -> T) -> &T {
        if let Some(value) = self.get() {
            return value;
        }
        let made = Box::into_raw(Box::new(make()));
        let others = self.value.compare_exchange(std::ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire);
        match others {
            // SAFETY: Just made; `self` owns it now.
            Ok(_) => unsafe { &*made },
            Err(other) => {
                // SAFETY: Just made, and no other code knows it.
                drop(unsafe { Box::from_raw(made) });
                // SAFETY: Not null. As in `get`.
                unsafe { &*other }
            }
        }
    }
}

impl<T> Drop for LazyBox<T> {
    fn drop(&mut self) {
        let value = self.value.load(Ordering::Acquire);
        if !value.is_null() {
            // SAFETY: From `Box::into_raw`, and no code borrows it anymore.
            drop(unsafe { Box::from_raw(value) });
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for LazyBox<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}
