//! Leases that borrow nothing and end in any thread.
//!
//! An owned lease takes its handle as a borrowed one does: from the claims of the calling thread, with one compare-exchange. The end
//! of the lease, in any thread, is another compare-exchange. It returns the handle to those claims. `handoff.rs` has the states.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use super::handles::{HandleLease, HandlePool, Keyed, PoolKey};
use super::handoff::Slot;
use highwater_hal::Result;

/// A lease without the lifetime of its pool. Its owner keeps the pool.
pub(crate) struct DetachedLease<H: Send + 'static> {
    slot: NonNull<Slot<Keyed<H>>>,
    pool: NonNull<HandlePool<H>>,
}

// SAFETY: The lease is the only user of the handle, which is `Send`. Its end in another thread is a compare-exchange, or goes through
// the locks of the pool, which is `Sync`.
unsafe impl<H: Send + 'static> Send for DetachedLease<H> {}
// SAFETY: A shared lease gives out only shared references to the handle, which is `Sync`.
unsafe impl<H: Send + Sync + 'static> Sync for DetachedLease<H> {}

impl<H: Send + 'static> DetachedLease<H> {
    /// Removes the lifetime from a lease.
    ///
    /// # Safety
    /// The caller must keep the pool alive and in place until the lease has ended.
    #[inline]
    pub(crate) unsafe fn new(lease: HandleLease<'_, H>) -> Self {
        let (slot, pool) = lease.into_parts();
        Self { slot: NonNull::from(slot), pool: NonNull::from(pool) }
    }

    #[inline]
    fn slot(&self) -> &Slot<Keyed<H>> {
        // SAFETY: A leased slot stays in the list of its pool, which lives (the promise of `new`).
        unsafe { self.slot.as_ref() }
    }
}

impl<H: Send + 'static> Deref for DetachedLease<H> {
    type Target = H;
    #[inline]
    fn deref(&self) -> &H {
        // SAFETY: This lease holds the slot, and `&self` excludes a `&mut` to the handle.
        match unsafe { &*self.slot().handle() } {
            Some(keyed) => &keyed.handle,
            None => unreachable!("a leased slot has a handle"),
        }
    }
}

impl<H: Send + 'static> DerefMut for DetachedLease<H> {
    #[inline]
    fn deref_mut(&mut self) -> &mut H {
        // SAFETY: This lease holds the slot, and `&mut self` excludes every other reference to the handle.
        match unsafe { &mut *self.slot().handle() } {
            Some(keyed) => &mut keyed.handle,
            None => unreachable!("a leased slot has a handle"),
        }
    }
}

impl<H: Send + 'static> Drop for DetachedLease<H> {
    #[inline]
    fn drop(&mut self) {
        if !self.slot().release_to_claim() {
            // SAFETY: The pool lives (the promise of `new`).
            unsafe { self.pool.as_ref() }.give_back(self.slot());
        }
    }
}

/// A handle of a [`HandlePool`], leased until the lease is dropped, in any thread. The lease keeps the pool alive.
pub struct OwnedHandleLease<H: Send + 'static> {
    /// Dropped before the pool.
    lease: DetachedLease<H>,
    _pool: Arc<HandlePool<H>>,
}

impl<H: Send + fmt::Debug + 'static> fmt::Debug for OwnedHandleLease<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OwnedHandleLease").field(&**self).finish()
    }
}

impl<H: Send + 'static> Deref for OwnedHandleLease<H> {
    type Target = H;
    #[inline]
    fn deref(&self) -> &H {
        &self.lease
    }
}

impl<H: Send + 'static> DerefMut for OwnedHandleLease<H> {
    #[inline]
    fn deref_mut(&mut self) -> &mut H {
        &mut self.lease
    }
}

impl<H: Send + 'static> HandlePool<H> {
    /// Leases a handle as [`lease`](Self::lease) does. The lease borrows nothing and is `Send`, so that a task may keep it across an
    /// `await`. Threads share the count of the pool's owners: each lease changes it twice.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use highwater_core::{HandlePool, PoolKey};
    ///
    /// let pool = Arc::new(HandlePool::new());
    /// let mut lease = pool.lease_owned(PoolKey::device(0), || Ok(vec![1]))?;
    /// std::thread::spawn(move || lease.push(2)).join().unwrap();
    /// let again = pool.lease(PoolKey::device(0), || unreachable!("the handle is back"))?;
    /// assert_eq!(*again, [1, 2]);
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`lease`](Self::lease).
    pub fn lease_owned(
        self: &Arc<Self>,
        key: PoolKey,
        create: impl FnOnce() -> Result<H>,
    ) -> Result<OwnedHandleLease<H>> {
        // SAFETY: The lease has a reference to the pool and is dropped before it.
        let lease = unsafe { DetachedLease::new(self.lease(key, create)?) };
        Ok(OwnedHandleLease { lease, _pool: Arc::clone(self) })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;

    const KEY: PoolKey = PoolKey::device(0);

    fn numbers(pool: &HandlePool<u32>) -> (u64, u64, u64) {
        let statistics = pool.statistics();
        (statistics.live, statistics.leased, statistics.idle)
    }

    #[test]
    fn a_handle_returns_to_the_thread_that_took_it() {
        let pool = Arc::new(HandlePool::new());
        for round in 0..3 {
            let mut lease = pool.lease_owned(KEY, || Ok(7)).unwrap();
            assert_eq!((*lease, numbers(&pool)), (7 + round, (1, 1, 0)));
            thread::spawn(move || *lease += 1).join().unwrap();
            assert_eq!(numbers(&pool), (1, 0, 0));
        }
        assert_eq!(*pool.lease(KEY, || Ok(0)).unwrap(), 10);
    }

    #[test]
    fn a_lease_that_ends_after_its_thread_leaves_an_idle_handle() {
        let pool = Arc::new(HandlePool::new());
        let inside = Arc::clone(&pool);
        let lease = thread::spawn(move || inside.lease_owned(KEY, || Ok(1)).unwrap()).join().unwrap();
        assert_eq!(numbers(&pool), (1, 1, 0));
        // Nothing takes a handle that is leased.
        assert!(pool.take_idle().is_empty() && pool.take_unleased().is_empty() && pool.take_key(KEY).is_empty());
        drop(lease);
        assert_eq!(numbers(&pool), (1, 0, 1));
        assert_eq!(*pool.lease(KEY, || Ok(2)).unwrap(), 1);
    }

    #[test]
    fn a_lease_keeps_its_pool() {
        let pool = Arc::new(HandlePool::new());
        let lease = pool.lease_owned(KEY, || Ok(String::from("kept"))).unwrap();
        drop(pool);
        assert_eq!(*lease, "kept");
    }

    #[test]
    fn a_thread_that_ends_while_another_ends_its_leases_loses_no_handle() {
        let pool = Arc::new(HandlePool::new());
        for _ in 0..200 {
            let (sender, leases) = channel();
            let inside = Arc::clone(&pool);
            let taker = thread::spawn(move || {
                for handle in 0..3 {
                    sender.send(inside.lease_owned(KEY, || Ok(handle)).unwrap()).unwrap();
                }
            });
            leases.iter().for_each(drop);
            taker.join().unwrap();
            let (live, leased, idle) = numbers(&pool);
            assert!((1..=3).contains(&live) && leased == 0 && idle == live, "{live} {leased} {idle}");
        }
    }

    #[test]
    fn a_lease_of_a_thread_that_is_ending_returns_its_handle() {
        struct LeasesWhenDropped(Arc<HandlePool<u32>>, std::sync::mpsc::Sender<OwnedHandleLease<u32>>);
        impl Drop for LeasesWhenDropped {
            fn drop(&mut self) {
                self.1.send(self.0.lease_owned(KEY, || Ok(1)).unwrap()).unwrap();
            }
        }
        thread_local! {
            static LATE: std::cell::RefCell<Option<LeasesWhenDropped>> = const { std::cell::RefCell::new(None) };
        }
        let pool = Arc::new(HandlePool::new());
        let (sender, leases) = channel();
        let inside = Arc::clone(&pool);
        thread::spawn(move || {
            // Registered first, so that its destructor runs after that of the thread cache.
            LATE.with(|late| *late.borrow_mut() = Some(LeasesWhenDropped(Arc::clone(&inside), sender)));
            drop(inside.lease(KEY, || Ok(0)).unwrap());
        })
        .join()
        .unwrap();
        let lease = leases.recv().unwrap();
        assert_eq!(numbers(&pool).1, 1);
        drop(lease);
        let (live, leased, idle) = numbers(&pool);
        assert!(leased == 0 && idle == live, "{live} {leased} {idle}");
    }
}
