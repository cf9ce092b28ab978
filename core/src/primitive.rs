//! The synchronization types of this crate, in one place, so that the model checkers can replace them.
//!
//! `tests/loom.rs`, `tests/loom_pinned.rs` and `tests/loom_uses.rs` compile lock-free files of this crate against a module of
//! the same shape over loom's types, and `tests/shuttle.rs` and `tests/shuttle_device.rs` those of the host cache and of device memory
//! over shuttle's.

pub(crate) use std::sync::Arc;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

pub(crate) use highwater_hal::HostPtr;
pub(crate) use highwater_hal::fork::Generation;
pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};

pub(crate) use crate::pool::fences::{heavy_fence, light_fence, prepare_fences, wait_a_moment};
pub(crate) use crate::pool::thread_pointer::thread_pointer;

/// `UnsafeCell` with the access pattern of loom's, which tracks readers and writers.
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
