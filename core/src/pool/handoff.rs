//! The hand-off of a pooled handle between threads: one atomic state per slot, and a stack of idle slots.
//!
//! | state | user of the handle | leaves by |
//! | --- | --- | --- |
//! | `CLAIMED` | none; it is reserved for one thread's cache | that thread leases it or ends; the pool retires it |
//! | `LEASED` | the holder of the lease | the lease ends; its claim's thread ends; the pool, once no lease can exist |
//! | `UNCLAIMED` | the holder of the lease; no thread has a claim | the lease ends; the pool, once no lease can exist |
//! | `IDLE` | none; it is in the stack, or about to be | any thread pops and leases it; the pool retires it |
//! | `RETIRED` | the thread that retired it | never |
//!
//! A slot is born `LEASED` by the thread that made its handle. The repeat request of a thread is one compare-exchange
//! from `CLAIMED` to `LEASED`; ending a lease is one store back. Only the thread that owns the thread cache moves a slot
//! from `CLAIMED` to `LEASED`, so the exchange only ever fails because the pool retired the slot, or because a lease of
//! the same thread is still open.
//!
//! An owned lease may end in any thread, even after the thread whose claim it took. One compare-exchange decides which end comes
//! first. If the lease ends first, the claim's thread makes the slot idle. If the thread ends first, it moves the slot to `UNCLAIMED`,
//! and the end of the lease makes the slot idle.
//!
//! *Orderings.* A thread gains access (`-> LEASED`, `-> RETIRED`) with acquire and gives it up (`-> CLAIMED`, `-> IDLE`) with
//! release. Every state is reached through this one atomic. A claim's thread that makes a slot idle after another thread's lease uses a
//! read-modify-write, which continues the release of that lease. So everything that the last holder did to the handle happens before the
//! actions of the next one. The stack's mutex orders only the stack.

use crate::primitive::{Arc, AtomicU32, Mutex, Ordering, UnsafeCell};

const CLAIMED: u32 = 0;
const LEASED: u32 = 1;
const IDLE: u32 = 2;
const RETIRED: u32 = 3;
const UNCLAIMED: u32 = 4;

/// A slot for one handle.
#[derive(Debug)]
pub(crate) struct Slot<H> {
    state: AtomicU32,
    handle: UnsafeCell<Option<H>>,
}

// SAFETY: Only the thread that moved the state to `LEASED` or `RETIRED` accesses the handle (see the table above). So sharing
// the slot only ever sends `H` between threads.
unsafe impl<H: Send> Sync for Slot<H> {}

impl<H> Slot<H> {
    /// Returns a slot whose handle the caller holds under a lease.
    pub(crate) fn new_leased(handle: H) -> Self {
        Self { state: AtomicU32::new(LEASED), handle: UnsafeCell::new(Some(handle)) }
    }

    /// Leases a slot of the calling thread's own thread cache. Returns false if it is already leased or retired.
    #[inline]
    pub(crate) fn lease_claimed(&self) -> bool {
        // A plain load first: for a slot that is leased (a second request in the thread), no locked instruction runs.
        self.state.load(Ordering::Relaxed) == CLAIMED
            && self.state.compare_exchange(CLAIMED, LEASED, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Ends a lease; the slot stays in the thread cache of the calling thread. Returns false if that cache is gone, or never had the
    /// slot. Then the lease goes on, and the caller must end it by [`release_to_idle`](Self::release_to_idle).
    #[inline]
    #[must_use]
    pub(crate) fn release_to_thread_cache(&self) -> bool {
        // A load and a store are enough. While the slot is leased, no other thread changes its state: `retire` takes only claimed and
        // idle slots, and this thread has the claim. The end of the thread's cache moves the slot to `UNCLAIMED`, in this thread.
        let is_claimed = self.state.load(Ordering::Relaxed) == LEASED;
        if is_claimed {
            self.state.store(CLAIMED, Ordering::Release);
        }
        is_claimed
    }

    /// Ends an owned lease, in any thread; the slot stays in the thread cache that has its claim. Returns false if that thread has
    /// ended. Then the lease goes on, and the caller must end it by [`release_to_idle`](Self::release_to_idle).
    #[inline]
    pub(crate) fn release_to_claim(&self) -> bool {
        self.state.compare_exchange(LEASED, CLAIMED, Ordering::Release, Ordering::Relaxed).is_ok()
    }

    /// Gives up the claim of a leased slot that entered no thread cache.
    pub(crate) fn disclaim(&self) {
        // Relaxed: only the holder of the lease and the pool read the state, and neither gains access by it.
        self.state.store(UNCLAIMED, Ordering::Relaxed);
    }

    /// Gives up a claim at the end of its thread. Returns true if the slot is idle now. If it is leased, the end of the lease makes
    /// it idle.
    pub(crate) fn unclaim(&self) -> bool {
        let mut state = self.state.load(Ordering::Relaxed);
        loop {
            let next = match state {
                CLAIMED => IDLE,
                LEASED => UNCLAIMED,
                _ => return false,
            };
            match self.state.compare_exchange_weak(state, next, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return next == IDLE,
                Err(now) => state = now,
            }
        }
    }

    /// Ends a lease that belongs to no thread cache.
    pub(crate) fn release_to_idle(&self) {
        self.state.store(IDLE, Ordering::Release);
    }

    /// Leases a slot that was popped from the stack. Returns false if the pool has retired it in the meantime.
    pub(crate) fn lease_idle(&self) -> bool {
        self.state.compare_exchange(IDLE, LEASED, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Removes the handle from a claimed or idle slot for good. Returns `None` if the slot is leased or was already retired.
    pub(crate) fn retire(&self) -> Option<H> {
        let mut state = self.state.load(Ordering::Relaxed);
        while state == CLAIMED || state == IDLE {
            match self.state.compare_exchange_weak(state, RETIRED, Ordering::Acquire, Ordering::Relaxed) {
                // SAFETY: This thread has moved the state to `RETIRED`, so no other thread accesses the handle now or later.
                Ok(_) => return self.handle.with_mut(|handle| unsafe { (*handle).take() }),
                Err(now) => state = now,
            }
        }
        None
    }

    /// Removes the handle, in any state.
    ///
    /// # Safety
    /// No lease of the slot may exist, except forgotten ones.
    pub(crate) unsafe fn retire_unleased(&self) -> Option<H> {
        self.state.swap(RETIRED, Ordering::Acquire);
        // SAFETY: No lease exists (the caller's promise), and from here on none can be created: the slot is retired.
        self.handle.with_mut(|handle| unsafe { (*handle).take() })
    }

    /// Returns whether the slot is retired.
    pub(crate) fn is_retired(&self) -> bool {
        self.state.load(Ordering::Relaxed) == RETIRED
    }

    /// Returns whether the slot is idle.
    pub(crate) fn is_idle(&self) -> bool {
        self.state.load(Ordering::Relaxed) == IDLE
    }

    /// Returns whether the slot is leased.
    pub(crate) fn is_leased(&self) -> bool {
        matches!(self.state.load(Ordering::Relaxed), LEASED | UNCLAIMED)
    }

    /// Returns the location of the handle, for the holder of the lease.
    #[inline]
    pub(crate) fn handle(&self) -> *mut Option<H> {
        self.handle.with_mut(|handle| handle)
    }
}

/// Idle slots, the most recently used on top.
#[derive(Debug)]
pub(crate) struct IdleStack<H>(Mutex<Vec<Arc<Slot<H>>>>);

impl<H> IdleStack<H> {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// Puts a slot on top. The slot's state is already `IDLE`, or `RETIRED` by now, which `pop` detects.
    pub(crate) fn push(&self, slot: Arc<Slot<H>>) {
        self.0.lock().push(slot);
    }

    /// Leases the slot on top.
    pub(crate) fn pop(&self) -> Option<Arc<Slot<H>>> {
        loop {
            let slot = self.0.lock().pop()?;
            if slot.lease_idle() {
                return Some(slot);
            }
        }
    }

    /// Removes all slots.
    pub(crate) fn take_all(&self) -> Vec<Arc<Slot<H>>> {
        std::mem::take(&mut *self.0.lock())
    }

    /// Removes the slots that the pool has retired.
    pub(crate) fn forget_retired(&self) {
        self.0.lock().retain(|slot| !slot.is_retired());
    }
}
