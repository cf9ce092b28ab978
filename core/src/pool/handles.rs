//! The handle pool: per-thread caches over slots that belong to the pool.
//!
//! A thread asks for a handle by key: a device, and a stream if the vendor ties handles to one. Its *thread cache* answers a
//! repeat request from its claims with one compare-exchange: no lock, no vendor call. A miss pops the idle handle used last,
//! or makes one outside every lock. When the thread ends, its claims return to the pool. A second lease in one thread gets
//! another handle. There is no cap.
//!
//! *Many keys.* The thread cache lists its most recent claims, and a request looks through that short list first. It keeps
//! all others in a map by key. So a request takes the same time however many keys the thread has used.
//!
//! *The end of a thread.* The thread cache's destructor makes no vendor call. It moves slots to the idle stack, and only the
//! pool destroys handles. No caller reaches the thread cache by `with`, which aborts after thread teardown. After teardown a
//! lease takes the slow path and returns its slot straight to the pool. So does an owned lease that ends after the thread that took it
//! (`owned_lease.rs`). In a forked child neither leases nor destructors
//! touch a lock.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::collections::hash_map::{Entry, HashMap};
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::first_create::Entry as Creation;
use super::handoff::{IdleStack, Slot};
use highwater_hal::{Result, fork::Generation};

/// The key of handles that are interchangeable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolKey {
    /// Ordinal of the device.
    pub device: u32,
    /// 0, or the object that the handle is tied to (a stream, if the vendor needs one handle for each).
    pub affinity: u64,
}

impl PoolKey {
    /// Returns the key for any handle of the device.
    #[must_use]
    pub const fn device(device: u32) -> Self {
        Self { device, affinity: 0 }
    }
}

type PooledSlot<H> = Arc<Slot<Keyed<H>>>;

impl<H> Keyed<H> {
    fn into_handle(self) -> H {
        self.handle
    }
}

/// The statistics of a handle pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct HandlePoolStatistics {
    /// Handles created so far.
    pub created: u64,
    /// Handles that exist.
    pub live: u64,
    /// The most handles that existed at once.
    pub peak_live: u64,
    /// Handles that left the pool, to be destroyed or kept for another key.
    pub removed: u64,
    /// Handles that [`HandlePool::warm`] or a runtime made before a thread asked for one.
    pub warmed: u64,
    /// Handles that no thread has claimed.
    pub idle: u64,
    /// Handles under a lease.
    pub leased: u64,
    /// Threads that have obtained a handle, counted once for each key.
    pub threads_served: u64,
}

/// A pool of handles of any type: BLAS, Lt, or a user's own such as a cuDNN handle.
///
/// ```
/// use highwater_core::{HandlePool, PoolKey, Result};
///
/// let pool = HandlePool::new();
/// let create = || Ok::<_, highwater_core::Error>(String::from("an expensive handle"));
/// let address = {
///     let lease = pool.lease(PoolKey::device(0), create)?;
///     std::ptr::from_ref::<String>(&lease)
/// };
/// let again = pool.lease(PoolKey::device(0), create)?;
/// assert_eq!(address, std::ptr::from_ref::<String>(&again));
/// assert_eq!(pool.statistics().created, 1);
/// # Ok::<(), highwater_core::Error>(())
/// ```
///
/// A lease cannot outlive its pool:
///
/// ```compile_fail,E0505
/// use highwater_core::{HandlePool, PoolKey};
/// let pool = HandlePool::new();
/// let lease = pool.lease(PoolKey::device(0), || Ok(0_u32)).unwrap();
/// drop(pool);
/// println!("{}", *lease);
/// ```
///
/// and stays in the thread that took it:
///
/// ```compile_fail,E0277
/// use highwater_core::{HandlePool, PoolKey};
/// let pool = HandlePool::new();
/// let lease = pool.lease(PoolKey::device(0), || Ok(0_u32)).unwrap();
/// std::thread::scope(|scope| scope.spawn(move || println!("{}", *lease)).join()).unwrap();
/// ```
pub struct HandlePool<H: Send + 'static> {
    /// Identifies this pool in the process, including pools that no longer exist.
    number: u64,
    shared: Arc<Shared<H>>,
    generation: Generation,
}

/// A handle in its slot, with the key for which the slot is idle.
pub(super) struct Keyed<H> {
    key: PoolKey,
    pub(super) handle: H,
}

struct Shared<H> {
    stacks: Mutex<HashMap<PoolKey, Arc<IdleStack<Keyed<H>>>>>,
    /// Every slot that is not retired. A leased slot is never removed, so a lease may refer to it by address.
    slots: Mutex<Slots<H>>,
    created: AtomicU64,
    removed: AtomicU64,
    warmed: AtomicU64,
    peak_live: AtomicU64,
    threads_served: AtomicU64,
}

impl<H> Shared<H> {
    /// Adds a slot, and counts it.
    fn add(&self, key: PoolKey, slot: &PooledSlot<H>) {
        let mut slots = self.slots.lock();
        slots.entry(key).or_default().push(Arc::clone(slot));
        // Relaxed: the mutex orders the counters.
        let created = self.created.fetch_add(1, Ordering::Relaxed) + 1;
        self.peak_live.fetch_max(created.saturating_sub(self.removed.load(Ordering::Relaxed)), Ordering::Relaxed);
    }

    /// Counts handles that leave the pool.
    fn count_removed(&self, handles: &[H]) {
        self.removed.fetch_add(handles.len() as u64, Ordering::Relaxed);
    }
}

type Slots<H> = BTreeMap<PoolKey, Vec<PooledSlot<H>>>;

fn forget_retired<H>(slots: &mut Slots<H>) {
    slots.retain(|_, of_key| {
        of_key.retain(|slot| !slot.is_retired());
        !of_key.is_empty()
    });
}

impl<H: Send + 'static> fmt::Debug for HandlePool<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HandlePool").field("number", &self.number).finish_non_exhaustive()
    }
}

impl<H: Send + 'static> Default for HandlePool<H> {
    fn default() -> Self {
        Self::new()
    }
}

impl<H: Send + 'static> HandlePool<H> {
    /// Returns an empty pool.
    #[must_use]
    pub fn new() -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let shared = Shared {
            stacks: Mutex::new(HashMap::new()),
            slots: Mutex::new(BTreeMap::new()),
            created: AtomicU64::new(0),
            removed: AtomicU64::new(0),
            warmed: AtomicU64::new(0),
            peak_live: AtomicU64::new(0),
            threads_served: AtomicU64::new(0),
        };
        Self {
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            shared: Arc::new(shared),
            generation: Generation::current(),
        }
    }

    /// Leases a handle for `key`: the one that this thread used last, an idle one, or a new one from `create`. `create` runs
    /// outside every lock and may be slow.
    ///
    /// # Errors
    /// `Forked` in a child of the process that created the pool; otherwise the error of `create`.
    #[inline]
    pub fn lease(&self, key: PoolKey, create: impl FnOnce() -> Result<H>) -> Result<HandleLease<'_, H>> {
        self.lease_entered(key, Creation::later, |_| create())
    }

    /// Leases a handle as [`lease`](Self::lease) does. Before `create`, runs `enter`, which may wait for another thread's first
    /// creation. A handle that became idle during the wait is leased instead of a new one. The entry ends after `create`.
    #[inline(always)]
    pub(crate) fn lease_entered<'g>(
        &self,
        key: PoolKey,
        enter: impl FnOnce() -> Creation<'g>,
        create: impl FnOnce(&Creation<'g>) -> Result<H>,
    ) -> Result<HandleLease<'_, H>> {
        if !self.generation.is_current() {
            return Err(Generation::error("lease"));
        }
        match self.lease_from_thread_cache(key) {
            Some(slot) => Ok(HandleLease { slot, pool: self, stays_in_thread: PhantomData }),
            None => self.lease_slow(key, enter, create),
        }
    }

    #[inline]
    fn lease_from_thread_cache(&self, key: PoolKey) -> Option<&Slot<Keyed<H>>> {
        let number = self.number;
        THREAD_CACHE
            .try_with(|cache| {
                let claims = cache.claims.try_borrow().ok()?;
                let mut of_key = claims.recent.iter().filter(|claim| claim.pool == number && claim.key == key);
                let slot = of_key.find_map(|claim| self.lease_claim(claim));
                if slot.is_some() || claims.older.is_none() {
                    return slot;
                }
                drop(claims);
                self.lease_older(cache, key)
            })
            .ok()
            .flatten()
    }

    /// Leases the slot of a claim of this pool, unless it is already leased or retired.
    #[inline]
    fn lease_claim(&self, claim: &Claim) -> Option<&Slot<Keyed<H>>> {
        debug_assert_eq!(claim.pool, self.number);
        // SAFETY: The claim's pool number is this pool's, so its slot is a `Slot<Keyed<H>>`. It is alive here because the claim
        // holds a reference. After `lease_claimed` it is leased, and a leased slot stays in the pool's list while the pool lives.
        // The lease borrows the pool, which keeps it alive.
        let slot = unsafe { &*Arc::as_ptr(&claim.slot).cast::<Slot<Keyed<H>>>() };
        slot.lease_claimed().then_some(slot)
    }

    /// Leases the slot of a claim that is not among the recent ones, and makes it one of them.
    #[cold]
    #[inline(never)]
    fn lease_older(&self, cache: &ThreadCache, key: PoolKey) -> Option<&Slot<Keyed<H>>> {
        let mut claims = cache.claims.try_borrow_mut().ok()?;
        let Entry::Occupied(mut of_key) = claims.older.as_mut()?.entry((self.number, key)) else { return None };
        let leased = |(index, claim)| Some((index, self.lease_claim(claim)?));
        let (index, slot) = of_key.get().iter().enumerate().find_map(leased)?;
        let claim = of_key.get_mut().swap_remove(index);
        if of_key.get().is_empty() {
            of_key.remove();
        }
        claims.older_count -= 1;
        claims.insert(claim);
        Some(slot)
    }

    #[cold]
    fn lease_slow<'g>(
        &self,
        key: PoolKey,
        enter: impl FnOnce() -> Creation<'g>,
        create: impl FnOnce(&Creation<'g>) -> Result<H>,
    ) -> Result<HandleLease<'_, H>> {
        let slot = match self.stack(key).pop() {
            Some(slot) => slot,
            None => {
                let creation = enter();
                let idle = if creation.has_waited() { self.stack(key).pop() } else { None };
                match idle {
                    Some(slot) => slot,
                    None => {
                        let slot = Arc::new(Slot::new_leased(Keyed { key, handle: create(&creation)? }));
                        self.shared.add(key, &slot);
                        slot
                    }
                }
            }
        };
        let address = Arc::as_ptr(&slot);
        let claimed = THREAD_CACHE.try_with(|cache| {
            let Ok(mut claims) = cache.claims.try_borrow_mut() else { return false };
            claims.forget_dead();
            if !claims.has_alive(self.number, key) {
                self.shared.threads_served.fetch_add(1, Ordering::Relaxed);
            }
            let pool: Weak<Shared<H>> = Arc::downgrade(&self.shared);
            claims.insert(Claim { pool: self.number, key, slot, owner: pool, generation: self.generation });
            true
        });
        // SAFETY: The slot is leased and in the pool's list. Leased slots stay there while the pool lives, and the lease
        // borrows the pool.
        let slot = unsafe { &*address };
        // If the thread is ending, its cache is gone. Then the slot has no claim, and the lease itself returns it.
        if !claimed.unwrap_or(false) {
            slot.disclaim();
        }
        Ok(HandleLease { slot, pool: self, stays_in_thread: PhantomData })
    }

    /// Makes handles until `count` are idle for `key`, so that this many threads find one. `create` runs outside every lock.
    /// Returns how many were made. Handles that threads lease in the meantime are not made up for.
    ///
    /// ```
    /// use highwater_core::{HandlePool, PoolKey};
    ///
    /// let pool = HandlePool::new();
    /// pool.warm(PoolKey::device(0), 2, || Ok(String::from("an expensive handle")))?;
    /// let lease = pool.lease(PoolKey::device(0), || unreachable!("the pool is warm"))?;
    /// assert_eq!((pool.statistics().warmed, pool.statistics().idle), (2, 1));
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Forked` in a child of the process that created the pool; otherwise the first error of `create`. Handles made before it
    /// stay in the pool.
    pub fn warm(&self, key: PoolKey, count: usize, mut create: impl FnMut() -> Result<H>) -> Result<usize> {
        if !self.generation.is_current() {
            return Err(Generation::error("warm"));
        }
        let missing = count.saturating_sub(self.idle_of(key));
        for _ in 0..missing {
            self.add_warm(key, create()?);
        }
        Ok(missing)
    }

    /// Returns the number of idle handles of a key.
    pub(crate) fn idle_of(&self, key: PoolKey) -> usize {
        self.shared.slots.lock().get(&key).map_or(0, |of_key| of_key.iter().filter(|slot| slot.is_idle()).count())
    }

    /// Adds a handle that was made before a thread asked for it.
    pub(crate) fn add_warm(&self, key: PoolKey, handle: H) {
        self.shared.warmed.fetch_add(1, Ordering::Relaxed);
        self.add_idle(key, handle);
    }

    /// Adds a handle that no thread has claimed.
    pub(crate) fn add_idle(&self, key: PoolKey, handle: H) {
        let slot = Arc::new(Slot::new_leased(Keyed { key, handle }));
        self.shared.add(key, &slot);
        slot.release_to_idle();
        self.shared.push(key, slot);
    }

    fn stack(&self, key: PoolKey) -> Arc<IdleStack<Keyed<H>>> {
        Arc::clone(self.shared.stacks.lock().entry(key).or_insert_with(|| Arc::new(IdleStack::new())))
    }

    /// Takes out the handles that no thread has claimed, for the caller to destroy.
    #[must_use]
    pub fn take_idle(&self) -> Vec<H> {
        if !self.generation.is_current() {
            return Vec::new();
        }
        let stacks: Vec<_> = self.shared.stacks.lock().values().cloned().collect();
        let handles: Vec<H> = stacks
            .iter()
            .flat_map(|stack| stack.take_all())
            .filter_map(|slot| slot.retire())
            .map(Keyed::into_handle)
            .collect();
        self.shared.count_removed(&handles);
        forget_retired(&mut self.shared.slots.lock());
        handles
    }

    /// Takes out every handle that is not under a lease, including those that live threads have claimed.
    #[must_use]
    pub fn take_unleased(&self) -> Vec<H> {
        if !self.generation.is_current() {
            return Vec::new();
        }
        let mut slots = self.shared.slots.lock();
        let handles: Vec<H> =
            slots.values().flatten().filter_map(|slot| slot.retire()).map(Keyed::into_handle).collect();
        self.shared.count_removed(&handles);
        forget_retired(&mut slots);
        drop(slots);
        self.shared.stacks.lock().values().for_each(|stack| stack.forget_retired());
        handles
    }

    /// Takes out every handle of `key` that is not under a lease, and removes the key.
    #[must_use]
    pub fn take_key(&self, key: PoolKey) -> Vec<H> {
        if !self.generation.is_current() {
            return Vec::new();
        }
        let mut slots = self.shared.slots.lock();
        let mut of_key = slots.remove(&key).unwrap_or_default();
        let handles: Vec<H> = of_key.iter().filter_map(|slot| slot.retire()).map(Keyed::into_handle).collect();
        self.shared.count_removed(&handles);
        of_key.retain(|slot| !slot.is_retired());
        if !of_key.is_empty() {
            slots.insert(key, of_key);
        }
        drop(slots);
        // After retiring the slots: see `Shared::push_idle`.
        self.shared.stacks.lock().remove(&key);
        handles
    }

    /// Takes out every handle. The borrow proves that no lease is left except forgotten ones.
    #[must_use]
    pub fn take_all(&mut self) -> Vec<H> {
        if !self.generation.is_current() {
            return Vec::new();
        }
        let slots = std::mem::take(&mut *self.shared.slots.lock());
        self.shared.stacks.lock().clear();
        // SAFETY: Every lease borrows the pool, which is borrowed exclusively here. So only forgotten leases can exist.
        let retired = slots.values().flatten().filter_map(|slot| unsafe { slot.retire_unleased() });
        let handles: Vec<H> = retired.map(Keyed::into_handle).collect();
        self.shared.count_removed(&handles);
        handles
    }

    /// Returns the statistics of the pool.
    #[must_use]
    pub fn statistics(&self) -> HandlePoolStatistics {
        if !self.generation.is_current() {
            return HandlePoolStatistics::default();
        }
        let slots = self.shared.slots.lock();
        HandlePoolStatistics {
            created: self.shared.created.load(Ordering::Relaxed),
            live: slots.values().map(Vec::len).sum::<usize>() as u64,
            peak_live: self.shared.peak_live.load(Ordering::Relaxed),
            removed: self.shared.removed.load(Ordering::Relaxed),
            warmed: self.shared.warmed.load(Ordering::Relaxed),
            idle: slots.values().flatten().filter(|slot| slot.is_idle()).count() as u64,
            leased: slots.values().flatten().filter(|slot| slot.is_leased()).count() as u64,
            threads_served: self.shared.threads_served.load(Ordering::Relaxed),
        }
    }

    /// Ends a lease whose claim's thread no longer has a thread cache.
    #[cold]
    pub(super) fn give_back(&self, slot: &Slot<Keyed<H>>) {
        if !self.generation.is_current() {
            return;
        }
        // SAFETY: The caller holds the lease of the slot until `release_to_idle`.
        let Some(Keyed { key, .. }) = (unsafe { &*slot.handle() }) else { return };
        let key = *key;
        let is_this = |kept: &&PooledSlot<H>| std::ptr::eq(Arc::as_ptr(kept), slot);
        let kept = self.shared.slots.lock().get(&key).and_then(|of_key| of_key.iter().find(is_this).cloned());
        slot.release_to_idle();
        if let Some(slot) = kept {
            self.shared.push(key, slot);
        }
    }
}

#[cfg(test)]
impl<H: Send + 'static> HandlePool<H> {
    /// Holds every lock of the pool, for the fork test.
    pub(crate) fn hold_locks(&self) -> impl Drop + '_ {
        crate::testing::Held((self.shared.stacks.lock(), self.shared.slots.lock()))
    }

    pub(crate) fn is_locked(&self) -> bool {
        self.shared.stacks.is_locked() || self.shared.slots.is_locked()
    }
}

impl<H: Send + 'static> Drop for HandlePool<H> {
    fn drop(&mut self) {
        if self.generation.is_current() {
            drop(self.take_all());
        } else {
            // The child owns none of this. Not even the list may be dropped, because its lock may be held for ever.
            std::mem::forget(Arc::clone(&self.shared));
        }
    }
}

impl<'p, H: Send + 'static> HandleLease<'p, H> {
    /// Returns the slot and the pool. The caller must end the lease.
    #[inline]
    pub(super) fn into_parts(self) -> (&'p Slot<Keyed<H>>, &'p HandlePool<H>) {
        let this = ManuallyDrop::new(self);
        (this.slot, this.pool)
    }
}

/// A handle, leased by one thread until the lease is dropped. [`HandlePool::lease_owned`] returns a lease without these limits.
pub struct HandleLease<'p, H: Send + 'static> {
    slot: &'p Slot<Keyed<H>>,
    pool: &'p HandlePool<H>,
    stays_in_thread: PhantomData<*const ()>,
}

impl<H: Send + fmt::Debug + 'static> fmt::Debug for HandleLease<'_, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HandleLease").field(&**self).finish()
    }
}

impl<H: Send + 'static> Deref for HandleLease<'_, H> {
    type Target = H;
    #[inline]
    fn deref(&self) -> &H {
        // SAFETY: This lease holds the slot, and `&self` excludes a `&mut` to the handle.
        match unsafe { &*self.slot.handle() } {
            Some(keyed) => &keyed.handle,
            None => unreachable!("a leased slot has a handle"),
        }
    }
}

impl<H: Send + 'static> DerefMut for HandleLease<'_, H> {
    #[inline]
    fn deref_mut(&mut self) -> &mut H {
        // SAFETY: This lease holds the slot, and `&mut self` excludes every other reference to the handle.
        match unsafe { &mut *self.slot.handle() } {
            Some(keyed) => &mut keyed.handle,
            None => unreachable!("a leased slot has a handle"),
        }
    }
}

impl<H: Send + 'static> Drop for HandleLease<'_, H> {
    #[inline]
    fn drop(&mut self) {
        // The thread cache that claimed the slot belongs to this thread. Once it is gone, no code would return the slot. The state says
        // so, and takes no access to a thread-local variable, which is a call in a shared library. In a forked child the store affects
        // the child's own copy, and `give_back` checks for that before it locks.
        if !self.slot.release_to_thread_cache() {
            self.pool.give_back(self.slot);
        }
    }
}

// ---------------------------------------------------------------------------------------------------- the thread cache

thread_local! {
    static THREAD_CACHE: ThreadCache = const { ThreadCache { claims: RefCell::new(Claims::none()) } };
}

/// The claims of one thread, over all pools.
struct ThreadCache {
    claims: RefCell<Claims>,
}

/// The length of the list of recent claims. Few threads have more claims: one for each device and kind of handle.
const RECENT: usize = 32;

struct Claims {
    /// The claims that were made or moved here last, up to [`RECENT`]. A request looks at each.
    recent: Vec<Claim>,
    /// The index in `recent` whose claim leaves next.
    leaves_next: usize,
    /// All other claims, by pool and key. No list is empty. `None` until `recent` is full.
    older: Option<HashMap<(u64, PoolKey), Vec<Claim>>>,
    /// The number of claims in `older`.
    older_count: usize,
    /// The number of claims in `older` from which on the dead ones are looked for.
    sweep_at: usize,
}

impl Claims {
    const fn none() -> Self {
        Self { recent: Vec::new(), leaves_next: 0, older: None, older_count: 0, sweep_at: RECENT }
    }

    /// Adds a claim to the recent ones. The one that was added first gives way.
    fn insert(&mut self, claim: Claim) {
        if self.recent.len() < RECENT {
            self.recent.push(claim);
            return;
        }
        let left = std::mem::replace(&mut self.recent[self.leaves_next], claim);
        self.leaves_next = (self.leaves_next + 1) % RECENT;
        self.older.get_or_insert_default().entry((left.pool, left.key)).or_default().push(left);
        self.older_count += 1;
    }

    /// Returns whether a claim of this pool and key is alive.
    fn has_alive(&self, pool: u64, key: PoolKey) -> bool {
        let of_key = self.older.as_ref().and_then(|older| older.get(&(pool, key)));
        let recent = self.recent.iter().filter(|claim| claim.pool == pool && claim.key == key);
        recent.chain(of_key.into_iter().flatten()).any(Claim::is_alive)
    }

    /// Drops the dead claims among the recent ones. Drops all others each time that their number has doubled, so that a claim
    /// costs the same whatever their number.
    fn forget_dead(&mut self) {
        self.recent.retain(Claim::is_alive);
        if self.older_count < self.sweep_at {
            return;
        }
        if let Some(older) = &mut self.older {
            older.retain(|_, of_key| {
                of_key.retain(Claim::is_alive);
                !of_key.is_empty()
            });
            self.older_count = older.values().map(Vec::len).sum();
        }
        self.sweep_at = RECENT.max(2 * self.older_count);
    }

    /// Takes all claims out.
    fn take(&mut self) -> impl Iterator<Item = Claim> + use<> {
        let Self { recent, older, .. } = std::mem::replace(self, Self::none());
        older.into_iter().flat_map(HashMap::into_values).flatten().chain(recent)
    }
}

struct Claim {
    pool: u64,
    key: PoolKey,
    slot: Arc<dyn ClaimedSlot>,
    owner: Weak<dyn SlotOwner>,
    generation: Generation,
}

/// The operations of a thread cache on a slot whose handle type it does not know.
trait ClaimedSlot: Send + Sync {
    fn unclaim(&self) -> bool;
    fn is_retired(&self) -> bool;
    fn into_any(self: Arc<Self>) -> Arc<dyn std::any::Any + Send + Sync>;
}

impl<H: Send + 'static> ClaimedSlot for Slot<Keyed<H>> {
    fn unclaim(&self) -> bool {
        Slot::unclaim(self)
    }
    fn is_retired(&self) -> bool {
        Slot::is_retired(self)
    }
    fn into_any(self: Arc<Self>) -> Arc<dyn std::any::Any + Send + Sync> {
        self
    }
}

/// The operations of a thread cache on a pool whose handle type it does not know.
trait SlotOwner: Send + Sync {
    fn push_idle(&self, key: PoolKey, slot: Arc<dyn ClaimedSlot>);
}

impl<H: Send + 'static> SlotOwner for Shared<H> {
    fn push_idle(&self, key: PoolKey, slot: Arc<dyn ClaimedSlot>) {
        if let Ok(slot) = slot.into_any().downcast::<Slot<Keyed<H>>>() {
            self.push(key, slot);
        }
    }
}

impl<H> Shared<H> {
    /// Puts an idle slot on its stack, unless the pool has retired it. One lock covers the check and the push. To remove a key,
    /// the pool first retires its slots and then removes its stack, so the stack never reappears.
    fn push(&self, key: PoolKey, slot: PooledSlot<H>) {
        let mut stacks = self.stacks.lock();
        if !slot.is_retired() {
            stacks.entry(key).or_insert_with(|| Arc::new(IdleStack::new())).push(slot);
        }
    }
}

impl Claim {
    fn is_alive(&self) -> bool {
        self.generation.is_current() && !self.slot.is_retired()
    }
}

impl Drop for ThreadCache {
    fn drop(&mut self) {
        for claim in self.claims.get_mut().take() {
            // In a forked child, a thread that does not exist may hold the pool's lock. The claim is left as it is.
            if !claim.generation.is_current() {
                std::mem::forget(claim);
                continue;
            }
            // The state changes before the pool is looked up. A pool that is ending retires claimed and idle slots alike, so
            // the pool destroys the handle, never this code.
            if claim.slot.unclaim()
                && let Some(owner) = claim.owner.upgrade()
            {
                owner.push_idle(claim.key, claim.slot);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_hal::{Error, ErrorKind};

    #[test]
    fn a_key_that_is_forgotten_while_a_thread_ends_leaves_nothing() {
        let pool = HandlePool::new();
        drop(pool.lease(KEY, || Ok(1)).unwrap());
        // Simulates the end of a thread, step by step.
        let claim = THREAD_CACHE.with(|cache| cache.claims.borrow_mut().recent.pop()).unwrap();
        assert!(claim.slot.unclaim());
        assert_eq!(pool.take_key(KEY), vec![1]);
        claim.owner.upgrade().unwrap().push_idle(claim.key, claim.slot);
        assert!(pool.shared.stacks.lock().is_empty());
        let expected =
            HandlePoolStatistics { created: 1, peak_live: 1, removed: 1, threads_served: 1, ..Default::default() };
        assert_eq!(pool.statistics(), expected);
    }

    #[test]
    fn handles_that_were_taken_out_are_idle_no_more() {
        let mut pool = HandlePool::new();
        let fill = |pool: &HandlePool<u32>| {
            let lease = || drop(pool.lease(KEY, || Ok(1)).unwrap());
            std::thread::scope(|scope| scope.spawn(lease).join().unwrap());
            assert_eq!(pool.statistics().idle, 1);
        };
        fill(&pool);
        assert_eq!(pool.take_unleased(), vec![1]);
        assert_eq!((pool.statistics().live, pool.statistics().idle), (0, 0));
        fill(&pool);
        assert_eq!(pool.take_all(), vec![1]);
        assert_eq!((pool.statistics().live, pool.statistics().idle), (0, 0));
        assert!(pool.shared.stacks.lock().values().all(|stack| stack.take_all().is_empty()));
    }

    const KEY: PoolKey = PoolKey::device(0);

    #[test]
    fn a_second_lease_in_one_thread_gets_another_handle() {
        let pool = HandlePool::new();
        let mut next = 0;
        let mut create = || {
            next += 1;
            Ok(next)
        };
        let first = pool.lease(KEY, &mut create).unwrap();
        let second = pool.lease(KEY, &mut create).unwrap();
        assert_ne!(*first, *second);
        drop((first, second));
        let statistics = pool.statistics();
        assert_eq!((statistics.created, statistics.live, statistics.leased, statistics.idle), (2, 2, 0, 0));
        assert_eq!(statistics.threads_served, 1);
    }

    #[test]
    fn handles_of_ended_threads_are_used_again_the_last_one_first() {
        let pool = HandlePool::new();
        for _ in 0..100 {
            std::thread::scope(|scope| {
                scope.spawn(|| drop(pool.lease(KEY, || Ok(7_u8)).unwrap())).join().unwrap();
            });
        }
        let statistics = pool.statistics();
        assert_eq!((statistics.created, statistics.idle, statistics.threads_served), (1, 1, 100));
    }

    #[test]
    fn keys_do_not_mix() {
        let pool = HandlePool::new();
        drop(pool.lease(KEY, || Ok(0)).unwrap());
        let other = pool.lease(PoolKey::device(1), || Ok(1)).unwrap();
        assert_eq!(*other, 1);
        let tied = pool.lease(PoolKey { device: 0, affinity: 9 }, || Ok(2)).unwrap();
        assert_eq!(*tied, 2);
    }

    /// Returns the time of the fastest of several rounds, each of which leases a handle for 64 keys.
    fn fastest(pool: &HandlePool<u64>, mut key_of: impl FnMut(u64) -> PoolKey) -> std::time::Duration {
        let mut turn = 0;
        let mut round = || {
            let start = std::time::Instant::now();
            for _ in 0..64 {
                turn += 1;
                drop(pool.lease(key_of(turn), || Ok(turn)).unwrap());
            }
            start.elapsed()
        };
        (0..20).map(|_| round()).min().unwrap()
    }

    #[test]
    fn a_lease_takes_as_long_in_a_thread_that_has_used_thousands_of_keys() {
        const OTHERS: u64 = 10_000;
        let key = |affinity| PoolKey { device: 0, affinity };
        let pool = HandlePool::new();
        let few = [
            fastest(&pool, |turn| key(OTHERS + turn % 2)),
            fastest(&pool, |turn| key(OTHERS + turn % (2 * RECENT as u64))),
            fastest(&pool, |turn| PoolKey { device: 1, affinity: turn }),
            fastest(&pool, |turn| {
                drop(pool.take_key(PoolKey { device: 2, affinity: turn - 1 }));
                PoolKey { device: 2, affinity: turn }
            }),
        ];
        for other in 0..OTHERS {
            drop(pool.lease(key(other), || Ok(other)).unwrap());
        }
        let many = [
            fastest(&pool, |turn| key(turn % 2)),
            fastest(&pool, |turn| key(turn * 7 % OTHERS)),
            fastest(&pool, |turn| PoolKey { device: 3, affinity: turn }),
            fastest(&pool, |turn| {
                drop(pool.take_key(PoolKey { device: 4, affinity: turn - 1 }));
                PoolKey { device: 4, affinity: turn }
            }),
        ];
        for (what, (few, many)) in ["two", "all", "new", "taken"].into_iter().zip(few.into_iter().zip(many)) {
            assert!(many < 20 * few, "{what} keys: {few:?} with few keys, {many:?} with many");
        }
    }

    #[test]
    fn a_thread_finds_its_handle_of_each_of_many_keys() {
        const KEYS: u64 = 5 * RECENT as u64;
        let key = |affinity| PoolKey { device: 0, affinity };
        let pool = HandlePool::new();
        let lease = |affinity, expected: u64| {
            let lease = pool.lease(key(affinity), || Ok(affinity)).unwrap();
            assert_eq!(*lease, expected);
            lease
        };
        std::thread::scope(|scope| {
            let thread = || {
                (0..KEYS).for_each(|affinity| drop(lease(affinity, affinity)));
                for step in [1, 7, RECENT as u64 - 1] {
                    (0..KEYS).for_each(|turn| drop(lease(turn * step % KEYS, turn * step % KEYS)));
                }
                let statistics = pool.statistics();
                assert_eq!((statistics.created, statistics.threads_served, statistics.idle), (KEYS, KEYS, 0));
                // A second lease gets a handle of its own, which is found again as well.
                let held: Vec<_> = (0..KEYS).map(|affinity| lease(affinity, affinity)).collect();
                let second = |affinity| drop(pool.lease(key(affinity), || Ok(KEYS + affinity)).unwrap());
                (0..2 * KEYS).for_each(|turn| second(turn % KEYS));
                assert_eq!((pool.statistics().created, pool.statistics().leased), (2 * KEYS, KEYS));
                drop(held);
                // Handles that were taken out are not found.
                assert_eq!(pool.take_key(key(3)).len(), 2);
                assert_eq!(pool.take_key(key(KEYS - 1)).len(), 2);
                (0..KEYS).for_each(|affinity| drop(pool.lease(key(affinity), || Ok(affinity)).unwrap()));
                assert_eq!((pool.statistics().created, pool.statistics().live), (2 * KEYS + 2, 2 * KEYS - 2));
            };
            scope.spawn(thread).join().unwrap();
        });
        let statistics = pool.statistics();
        assert_eq!((statistics.live, statistics.idle, statistics.leased), (2 * KEYS - 2, 2 * KEYS - 2, 0));
        assert_eq!(pool.take_idle().len() as u64, 2 * KEYS - 2);
        assert_eq!(pool.statistics().live, 0);
    }

    #[test]
    fn claims_of_keys_that_are_gone_do_not_pile_up() {
        let pool = HandlePool::new();
        let kept = PoolKey { device: 1, affinity: 0 };
        for affinity in 0..100 * RECENT as u64 {
            let key = PoolKey { device: 0, affinity };
            drop(pool.lease(key, || Ok(affinity)).unwrap());
            drop(pool.lease(kept, || Ok(0)).unwrap());
            if affinity >= 2 * RECENT as u64 {
                drop(pool.take_key(PoolKey { affinity: affinity - 2 * RECENT as u64, ..key }));
            }
        }
        THREAD_CACHE.with(|cache| {
            let claims = cache.claims.borrow();
            let older: usize = claims.older.iter().flatten().map(|(_, of_key)| of_key.len()).sum();
            assert_eq!(older, claims.older_count);
            assert!(claims.recent.len() + older < 10 * RECENT, "{} and {older}", claims.recent.len());
        });
    }

    #[test]
    fn a_failed_creation_leaves_nothing() {
        let pool = HandlePool::<u8>::new();
        let error = pool.lease(KEY, || Err(Error::new(ErrorKind::OutOfMemory, "create", "no"))).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        assert_eq!(pool.statistics(), HandlePoolStatistics::default());
        assert_eq!(*pool.lease(KEY, || Ok(3)).unwrap(), 3);
    }

    #[test]
    fn a_creation_may_lease_from_the_same_pool() {
        let pool = HandlePool::new();
        let outer = pool.lease(KEY, || Ok(*pool.lease(KEY, || Ok(1))? + 1)).unwrap();
        assert_eq!(*outer, 2);
    }

    #[test]
    fn trimming_takes_what_no_thread_claims_and_closing_takes_the_rest() {
        let pool = HandlePool::new();
        drop(pool.lease(KEY, || Ok(1)).unwrap());
        std::thread::scope(|scope| {
            scope.spawn(|| drop(pool.lease(KEY, || Ok(2)).unwrap())).join().unwrap();
        });
        assert_eq!(pool.take_idle(), vec![2]);
        assert_eq!(pool.take_unleased(), vec![1]);
        assert_eq!(pool.statistics().live, 0);
        // The claim of this thread is now invalid and must not be found.
        assert_eq!(*pool.lease(KEY, || Ok(3)).unwrap(), 3);
    }

    #[test]
    fn a_forgotten_lease_loses_its_handle_only_until_the_pool_ends() {
        let mut pool = HandlePool::new();
        std::mem::forget(pool.lease(KEY, || Ok(1)).unwrap());
        assert_eq!(*pool.lease(KEY, || Ok(2)).unwrap(), 2);
        assert!(pool.take_unleased() == vec![2]);
        assert_eq!(pool.take_all(), vec![1]);
    }

    #[test]
    fn a_thread_that_ends_after_the_pool_does_no_harm() {
        let (hold, wait) = std::sync::mpsc::channel::<()>();
        let pool = Arc::new(HandlePool::new());
        let inside = Arc::clone(&pool);
        let (ready, is_ready) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            drop(inside.lease(KEY, || Ok(1)).unwrap());
            drop(inside);
            ready.send(()).unwrap();
            let _ = wait.recv();
        });
        is_ready.recv().unwrap();
        assert!(Arc::try_unwrap(pool).is_ok());
        drop(hold);
        thread.join().unwrap();
    }

    /// Leases from a destructor that runs before, and one that runs after, the thread cache's own.
    #[test]
    fn thread_locals_dropped_in_any_order_never_abort() {
        struct LeasesWhenDropped(RefCell<Option<Arc<HandlePool<u32>>>>);
        impl Drop for LeasesWhenDropped {
            fn drop(&mut self) {
                if let Some(pool) = self.0.get_mut().take() {
                    let one = pool.lease(KEY, || Ok(1)).unwrap();
                    let two = pool.lease(KEY, || Ok(2)).unwrap();
                    drop((two, one));
                }
            }
        }
        thread_local! {
            static EARLY: LeasesWhenDropped = const { LeasesWhenDropped(RefCell::new(None)) };
            static LATE: LeasesWhenDropped = const { LeasesWhenDropped(RefCell::new(None)) };
        }
        let pool = Arc::new(HandlePool::new());
        for _ in 0..50 {
            let pool = Arc::clone(&pool);
            std::thread::spawn(move || {
                EARLY.with(|local| *local.0.borrow_mut() = Some(Arc::clone(&pool)));
                drop(pool.lease(KEY, || Ok(0)).unwrap());
                LATE.with(|local| *local.0.borrow_mut() = Some(Arc::clone(&pool)));
            })
            .join()
            .unwrap();
        }
        let statistics = pool.statistics();
        assert_eq!((statistics.created, statistics.idle, statistics.leased), (2, 2, 0));
    }
}
