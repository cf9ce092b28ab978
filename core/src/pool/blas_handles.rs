//! The pooled BLAS and Lt handles of a runtime: creation, trimming, and handles whose stream has ended.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::completion_events::CompletionEvent;
use super::device_memory::DeviceMemory;
use super::first_create::{Entry, FirstCreate};
use super::handles::{HandlePool, HandlePoolStatistics, PoolKey};
use super::workspaces::Workspaces;
use crate::capture::thread::{in_capture, warm_up_first};
use crate::numerics::Modes;
use crate::services::Services;
use highwater_hal::{BlasHandle, BlasKind, BlasOptions, Error, PlanId, PlanOptions, Result};

/// The time after which the first thread stops making handles for those that wait. Where a creation is slow although it is not the
/// first, several threads may be quicker than one.
const LONGEST_EXTRA_WORK: Duration = Duration::from_millis(50);

/// A handle in the pool, with its known state.
#[derive(Debug)]
pub(crate) struct PooledHandle {
    pub(crate) handle: Box<dyn BlasHandle>,
    pub(crate) kind: BlasKind,
    /// Key of the stream and workspace to which the handle is bound; 0 if the state is unknown.
    pub(crate) bound: u64,
    /// True if foreign code has used the handle since its settings were known. Then it counts as unbound.
    pub(crate) lent: bool,
    /// The modes that are set on the handle. Plans have modes of their own.
    pub(crate) modes: Modes,
    /// Plans belong to the handle that made them, so every handle has its own.
    pub(crate) plans: HashMap<PlanOptions, PlanId>,
    /// The plan that ran last.
    pub(crate) last_plan: Option<(PlanOptions, PlanId)>,
}

impl PooledHandle {
    pub(crate) fn new(handle: Box<dyn BlasHandle>, kind: BlasKind) -> Self {
        Self { handle, kind, bound: 0, lent: false, modes: Modes::default(), plans: HashMap::new(), last_plan: None }
    }

    /// Unbinds the handle from a stream that is about to end. The vendor keeps it bound until then.
    pub(crate) fn unbind(&mut self) -> Result<()> {
        self.bound = 0;
        self.modes = Modes::default();
        self.handle.reset()?;
        self.lent = false;
        Ok(())
    }
}

/// The handles of a runtime.
pub(crate) struct BlasHandles {
    pub(crate) blas: HandlePool<PooledHandle>,
    pub(crate) lt: HandlePool<PooledHandle>,
    memory: Arc<DeviceMemory>,
    workspaces: Arc<Workspaces>,
    /// Handles whose stream has ended, for devices that need one handle for each stream.
    spare: Mutex<Vec<SpareHandle>>,
    /// Handles that were made for streams to come, of each kind.
    warmed: [AtomicU64; 2],
    /// Handles of ended streams that other streams have taken, of each kind. The pool counts each as created once more.
    reused: [AtomicU64; 2],
    /// Handles that were destroyed before a stream took them, of each kind.
    untaken: [AtomicU64; 2],
    /// By ordinal, for BLAS and Lt.
    first: Box<[[FirstCreate; 2]]>,
    /// The error of the handles that the runtime makes in the background. The first failing lease states it.
    warm_error: Mutex<Option<Error>>,
}

/// A handle whose stream has ended.
struct SpareHandle {
    device: u32,
    pooled: PooledHandle,
    after: After,
}

/// The last work of a spare handle.
enum After {
    /// There is none: the handle is new.
    Nothing,
    Event(Arc<CompletionEvent>),
    /// It is unknown, so no stream may use the handle.
    Unknown,
}

impl SpareHandle {
    fn fits(&self, device: u32, kind: BlasKind) -> bool {
        self.device == device && self.pooled.kind == kind
    }
}

impl BlasHandles {
    pub(crate) fn new(memory: Arc<DeviceMemory>, workspaces: Arc<Workspaces>) -> Self {
        let first = memory.services.devices.iter().map(|_| [FirstCreate::new(), FirstCreate::new()]).collect();
        Self {
            blas: HandlePool::new(),
            lt: HandlePool::new(),
            memory,
            workspaces,
            spare: Mutex::default(),
            warmed: Default::default(),
            reused: Default::default(),
            untaken: Default::default(),
            first,
            warm_error: Mutex::default(),
        }
    }

    /// Enters a creation; waits if the first one of the device is under way in another thread. A thread inside a capture does
    /// not wait. `stream` is the key of its stream, if that lacks a workspace.
    #[cold]
    pub(crate) fn enter(&self, device: u32, kind: BlasKind, stream: Option<u64>) -> Entry<'_> {
        if in_capture() {
            Entry::later()
        } else {
            self.first[device as usize][usize::from(kind == BlasKind::Lt)].enter(stream)
        }
    }

    /// Returns the statistics of the handles of a kind, with those that no stream has yet.
    pub(crate) fn statistics(&self, kind: BlasKind) -> HandlePoolStatistics {
        let mut statistics = self.pool(kind).statistics();
        // A lock may be held by a thread that a forked child lacks.
        if self.services().check("statistics").is_err() {
            return statistics;
        }
        for spare in self.spare.lock().iter().filter(|spare| spare.pooled.kind == kind) {
            statistics.live += 1;
            statistics.idle += 1;
            // The pool counts it when a stream takes it.
            statistics.created += u64::from(matches!(spare.after, After::Nothing));
        }
        statistics.peak_live = statistics.peak_live.max(statistics.live);
        let kind = usize::from(kind == BlasKind::Lt);
        statistics.warmed += self.warmed[kind].load(Ordering::Relaxed);
        let untaken = self.untaken[kind].load(Ordering::Relaxed);
        statistics.created = (statistics.created + untaken).saturating_sub(self.reused[kind].load(Ordering::Relaxed));
        statistics.removed += untaken;
        statistics
    }

    fn pool(&self, kind: BlasKind) -> &HandlePool<PooledHandle> {
        if kind == BlasKind::Lt { &self.lt } else { &self.blas }
    }

    /// Makes handles until `count` of the kind are idle.
    pub(crate) fn warm(&self, device: u32, kind: BlasKind, count: usize) -> Result<()> {
        (self.idle(device, kind)..count).try_for_each(|_| self.add_idle(device, kind))
    }

    /// Returns the number of handles that the next threads find.
    fn idle(&self, device: u32, kind: BlasKind) -> usize {
        if self.services().device(device).handle_per_stream(kind) {
            let is_new = |spare: &&SpareHandle| spare.fits(device, kind) && matches!(spare.after, After::Nothing);
            self.spare.lock().iter().filter(is_new).count()
        } else {
            self.pool(kind).idle_of(PoolKey::device(device))
        }
    }

    /// Makes a handle that no thread has claimed. If handles belong to streams, the next stream takes it.
    pub(crate) fn add_idle(&self, device: u32, kind: BlasKind) -> Result<()> {
        self.check_kind(device, kind)?;
        // Until the handle is in the pool, so that a thread that waits finds it there.
        let entry = self.enter(device, kind, None);
        let pooled = self.make(device, kind)?;
        if self.services().device(device).handle_per_stream(kind) {
            self.warmed[usize::from(kind == BlasKind::Lt)].fetch_add(1, Ordering::Relaxed);
            self.add_spare(device, pooled);
        } else {
            self.pool(kind).add_warm(PoolKey::device(device), pooled);
        }
        self.make_for_waiting(device, kind, &entry);
        Ok(())
    }

    fn add_spare(&self, device: u32, pooled: PooledHandle) {
        self.spare.lock().push(SpareHandle { device, pooled, after: After::Nothing });
    }

    /// Makes handles and workspaces for the threads that wait for the first creation. One thread makes all of them, because several
    /// that create at once contend inside the driver. If one cannot be made, stops: the others try themselves, and state the error.
    fn make_for_waiting(&self, device: u32, kind: BlasKind, entry: &Entry<'_>) {
        let start = Instant::now();
        let (mut made, mut workspaces) = (0, 0);
        loop {
            let demand = entry.demand();
            // A thread that comes now may take a handle without waiting.
            if demand.handles <= made
                || demand.handles <= self.idle(device, kind)
                || start.elapsed() > LONGEST_EXTRA_WORK
            {
                return;
            }
            // Each stream counts once, also after a thread that came meanwhile has taken its workspace.
            let more = demand.workspaces.saturating_sub(workspaces);
            workspaces += more;
            let made_one = self.add_workspaces(device, kind, more).and_then(|()| self.make_once(device, kind));
            match made_one {
                Ok(pooled) if self.services().device(device).handle_per_stream(kind) => self.add_spare(device, pooled),
                Ok(pooled) => self.pool(kind).add_idle(PoolKey::device(device), pooled),
                Err(error) => {
                    tracing::debug!("the threads that wait for the first handle make their own: {error}");
                    return;
                }
            }
            made += 1;
        }
    }

    /// Allocates workspaces until `count` are idle.
    fn add_workspaces(&self, device: u32, kind: BlasKind, count: usize) -> Result<()> {
        let bytes = self.services().device(device).workspace_bytes(kind);
        self.workspaces.warm(device, bytes, count)
    }

    /// Keeps the error of the background thread for the first lease that fails.
    pub(crate) fn keep_warm_error(&self, error: Error) {
        *self.warm_error.lock() = Some(error);
    }

    fn check_kind(&self, device: u32, kind: BlasKind) -> Result<()> {
        self.services().check("create_blas_handle")?;
        if kind == BlasKind::Lt && !self.services().device(device).capabilities.lt_plans {
            return Err(Error::lacks("create_blas_handle", "lt_plans").with_hint(
                "`highwater doctor` and the versions of `Backend::identity` say why; `Stream::matmul` multiplies without a plan",
            ));
        }
        Ok(())
    }

    fn services(&self) -> &Services {
        &self.memory.services
    }

    /// Takes every handle out, at the end of the runtime. The borrow proves that no lease is left.
    pub(crate) fn take_all(&mut self) -> Vec<PooledHandle> {
        let pooled = [&mut self.blas, &mut self.lt].map(HandlePool::take_all).into_iter().flatten();
        let spare = std::mem::take(self.spare.get_mut()).into_iter().map(|spare| spare.pooled);
        pooled.chain(spare).collect()
    }

    /// Creates a handle, or takes one whose stream has ended and is done. If the device has no memory left, frees unused memory
    /// and retries once. The first creation of a device also makes handles for the threads that wait for it.
    #[cold]
    pub(crate) fn create(&self, device: u32, kind: BlasKind, entry: &Entry<'_>) -> Result<PooledHandle> {
        self.check_kind(device, kind)?;
        if let Some(pooled) = self.take_spare(device, kind) {
            return Ok(pooled);
        }
        let made = self.make(device, kind).map_err(|error| match self.warm_error.lock().take() {
            Some(before) => error.with_hint(format!("the warm handles could not be made either: {before}")),
            None => error,
        })?;
        self.make_for_waiting(device, kind, entry);
        Ok(made)
    }

    /// Creates a handle.
    pub(crate) fn make(&self, device: u32, kind: BlasKind) -> Result<PooledHandle> {
        self.make_by(device, kind, |create| self.memory.with_retry(create, || true))
    }

    /// Creates a handle. Frees nothing for it.
    fn make_once(&self, device: u32, kind: BlasKind) -> Result<PooledHandle> {
        self.make_by(device, kind, |create| create())
    }

    fn make_by(
        &self,
        device: u32,
        kind: BlasKind,
        by: impl FnOnce(&dyn Fn() -> Result<Box<dyn BlasHandle>>) -> Result<Box<dyn BlasHandle>>,
    ) -> Result<PooledHandle> {
        let capabilities = &self.services().device(device).capabilities;
        // A thread's permissions in a capture do not depend on the device.
        let _quiet = match capabilities.create_during_capture {
            true => None,
            false => Some(self.services().quiet().ok_or_else(|| warm_up_first("create_blas_handle", "a handle"))?),
        };
        let options = BlasOptions::new(kind);
        // Vendors start with different defaults, so the handle's modes are unknown until the first product sets them.
        let handle = by(&|| self.services().backend.create_blas_handle(device, &options))?;
        Ok(PooledHandle::new(handle, kind))
    }

    /// Destroys a handle that another one has replaced. During a capture, the handle is put with the idle ones instead.
    pub(crate) fn discard(&self, mut pooled: PooledHandle) {
        match self.services().quiet() {
            // A refusal is counted.
            Some(_quiet) => drop(self.services().note(pooled.handle.destroy())),
            // Without a completion event, no stream may reuse it.
            None => {
                let device = pooled.handle.device();
                self.spare.lock().push(SpareHandle { device, pooled, after: After::Unknown });
            }
        }
    }

    /// Destroys the handles that no thread has claimed. A vendor's handle holds tens of megabytes of device memory. The handles
    /// stay while any runtime captures: destroying one waits for the device, which would invalidate the capture.
    pub(crate) fn trim(&self) -> Result<()> {
        let Some(_quiet) = self.services().quiet() else { return Ok(()) };
        let idle = [&self.blas, &self.lt].map(HandlePool::take_idle).into_iter().flatten();
        let spare = std::mem::take(&mut *self.spare.lock());
        for spare in spare.iter().filter(|spare| matches!(spare.after, After::Nothing)) {
            self.untaken[usize::from(spare.pooled.kind == BlasKind::Lt)].fetch_add(1, Ordering::Relaxed);
        }
        let spare = spare.into_iter().map(|spare| spare.pooled);
        let mut result = Ok(());
        for mut pooled in idle.chain(spare) {
            result = result.and(self.services().note(pooled.handle.destroy()));
        }
        result
    }

    /// Keeps the handles of an ending stream for other streams. Handles that the backend cannot unbind are destroyed with the
    /// stream.
    pub(crate) fn keep_spare(&self, keys: [PoolKey; 2], after: Option<&Arc<CompletionEvent>>) {
        let pools = [&self.blas, &self.lt].into_iter().zip(keys);
        let of_stream = pools.filter(|(_, key)| key.affinity != 0);
        for mut pooled in of_stream.flat_map(|(pool, key)| pool.take_key(key)) {
            match pooled.unbind() {
                Ok(()) => {
                    let after = after.cloned().map_or(After::Unknown, After::Event);
                    let spare = SpareHandle { device: pooled.handle.device(), pooled, after };
                    self.spare.lock().push(spare);
                }
                Err(_) => self.discard(pooled),
            }
        }
    }

    fn take_spare(&self, device: u32, kind: BlasKind) -> Option<PooledHandle> {
        let tries = self.spare.lock().len();
        for _ in 0..tries {
            let spare = {
                let mut spares = self.spare.lock();
                let index = spares.iter().position(|spare| spare.fits(device, kind))?;
                spares.remove(index)
            };
            // The vendor allows one stream at a time for this handle, so the old stream must be done.
            let is_free = match &spare.after {
                After::Nothing => true,
                After::Event(completion) => self.services().is_surely_passed(completion),
                After::Unknown => false,
            };
            if is_free {
                if !matches!(spare.after, After::Nothing) {
                    self.reused[usize::from(kind == BlasKind::Lt)].fetch_add(1, Ordering::Relaxed);
                }
                return Some(spare.pooled);
            }
            self.spare.lock().push(spare);
        }
        None
    }
}

#[cfg(test)]
impl BlasHandles {
    pub(crate) fn hold_locks(&self) -> impl Drop + '_ {
        crate::testing::Held((self.blas.hold_locks(), self.lt.hold_locks(), self.spare.lock()))
    }

    pub(crate) fn is_locked(&self) -> bool {
        self.blas.is_locked() || self.lt.is_locked() || self.spare.is_locked()
    }
}
