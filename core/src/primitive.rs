//! The synchronisation types of this crate, in one place, so that the model checkers can replace them.
//!
//! `tests/loom.rs` compiles the lock-free files of this crate against a module of the same shape over loom's types, and
//! `tests/shuttle.rs` those of the host cache over shuttle's.

pub(crate) use std::sync::Arc;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};

pub(crate) use parking_lot::{Condvar, Mutex};

/// Stores, and orders the store before everything that follows, as a sequentially consistent fence behind it would.
///
/// On x86 an exchange does both for half the price of the `mfence` that such a fence is compiled to: every instruction with a
/// lock prefix is a full barrier there. The compiler's own reordering is what the second line is for.
#[inline]
pub(crate) fn store_and_fence(cell: &AtomicPtr<()>, value: *mut ()) {
    if cfg!(target_arch = "x86_64") {
        cell.swap(value, Ordering::SeqCst);
        std::sync::atomic::compiler_fence(Ordering::SeqCst);
    } else {
        cell.store(value, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }
}

/// `UnsafeCell` with the access pattern of loom's, which tracks who reads and who writes.
#[derive(Debug, Default)]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

impl<T> UnsafeCell<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    #[inline]
    pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}
