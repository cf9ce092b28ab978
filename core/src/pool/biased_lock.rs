//! A lock that one thread takes with plain loads and stores, and other threads rarely.
//!
//! The owner announces itself (`busy`), then checks whether the lock is revoked. Another thread revokes the lock, then waits until
//! the owner is not busy. Each side stores first and loads second, so at least one of them sees the other, if neither load is
//! executed before the store. The owner pays only a compiler fence for that. The other side makes the kernel execute a barrier
//! on every running thread of the process (`membarrier`). Where the kernel lacks it, both sides execute a fence.
//!
//! | owner | other thread |
//! | --- | --- |
//! | `busy` = true | takes `turn` |
//! | light fence | `revoked` = true |
//! | reads `revoked`; if set, waits for `turn` | heavy fence |
//! | accesses the value | waits until `busy` is false |
//! | `busy` = false | accesses the value; `revoked` = false; ends its turn |

use crate::primitive::{AtomicBool, Mutex, MutexGuard, Ordering, UnsafeCell, heavy_fence, light_fence, wait_a_moment};

/// A value that one thread owns.
#[derive(Debug)]
pub(crate) struct BiasedLock<T> {
    /// True while the owner accesses the value without `turn`. Only the owner writes it.
    busy: AtomicBool,
    /// True while another thread accesses the value. Only the holder of `turn` writes it.
    revoked: AtomicBool,
    turn: Mutex<()>,
    value: UnsafeCell<T>,
}

// SAFETY: The protocol above lets one thread at a time access the value, and orders the accesses.
unsafe impl<T: Send> Sync for BiasedLock<T> {}

/// Ends the access of the owner, even if it panics.
struct Busy<'l>(&'l AtomicBool);

impl Drop for Busy<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Ends the access of another thread, even if it panics.
struct Revoked<'l>(&'l AtomicBool);

impl Drop for Revoked<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl<T> BiasedLock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            busy: AtomicBool::new(false),
            revoked: AtomicBool::new(false),
            turn: Mutex::new(()),
            value: UnsafeCell::new(value),
        }
    }

    /// Passes the value to `access`, in the owner's thread.
    ///
    /// # Safety
    /// Only one thread may ever call this method, and `access` must not call it again.
    #[inline]
    pub(crate) unsafe fn own<R>(&self, access: impl FnOnce(&mut T) -> R) -> R {
        self.busy.store(true, Ordering::Relaxed);
        light_fence();
        let _turn = if self.revoked.load(Ordering::Acquire) { Some(self.own_turn()) } else { None };
        // Dropped before the turn. In a turn, the lock is not busy, and the store changes nothing.
        let _busy = Busy(&self.busy);
        // One call of `access`, so that it is compiled into the caller.
        // SAFETY: The owner is busy and the lock is not revoked, so every other thread waits for the owner. Or the owner has the turn, and
        // other threads access the value only in theirs.
        self.value.with_mut(|value| access(unsafe { &mut *value }))
    }

    /// Waits for the owner's turn.
    #[cold]
    #[inline(never)]
    fn own_turn(&self) -> MutexGuard<'_, ()> {
        // The other thread waits for this store, so it must come before the wait for its turn.
        self.busy.store(false, Ordering::Release);
        self.turn.lock()
    }

    /// Passes the value to `access`, in any thread. The owner waits in the meantime, so `access` must be short.
    pub(crate) fn other<R>(&self, access: impl FnOnce(&mut T) -> R) -> R {
        let _turn = self.turn.lock();
        self.revoked.store(true, Ordering::Relaxed);
        let _revoked = Revoked(&self.revoked);
        heavy_fence();
        while self.busy.load(Ordering::Acquire) {
            wait_a_moment();
        }
        // SAFETY: The owner is not busy, and waits for this turn before it accesses the value. Others wait too.
        self.value.with_mut(|value| access(unsafe { &mut *value }))
    }
}
