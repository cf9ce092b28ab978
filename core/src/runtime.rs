//! The runtime: one open backend with its pools, and what they need from each other.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::backend::{Backend, Completion, DeviceInfo, Identity, LiveObjects};
use crate::blas::{AtomicsMode, BlasKind, BlasOptions, Workspace};
use crate::blas_lease::PooledHandle;
use crate::capability::Capabilities;
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::fork::Generation;
use crate::host::{HostAllocator, HostOptions};
use crate::id::StreamId;
use crate::ledger::{DeviceBlockInfo, Ledger};
use crate::memory::{AllocateOptions, DevicePtr};
use crate::pinned::PinnedBuffer;
use crate::pool::deferred::{DeferredFree, DeferredFrees};
use crate::pool::events::{EventPool, Mark};
use crate::pool::host::{Found, HostCache, OwnedBlock, PinnedBlock, PinnedUse};
use crate::pool::rounds::Rounds;
use crate::pool::workspaces::{IdleWorkspace, WorkspacePool};
use crate::pool::{HandlePool, HandlePoolStatistics, HostCacheStatistics, PoolKey, size_class};
use crate::scalar::Element;
use crate::stream::StreamCore;
use crate::workspace_config;

/// How to make a [`Runtime`].
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct RuntimeOptions {
    /// Bytes of BLAS workspace for each stream; else the backend's environment variables or its default. 0 leaves each
    /// handle on its own workspace.
    pub blas_workspace_bytes: Option<usize>,
    /// Bytes that an Lt plan may use; else the backend's environment variables or its default.
    pub lt_workspace_bytes: Option<usize>,
}

impl RuntimeOptions {
    /// Everything by default.
    #[must_use]
    pub const fn new() -> Self {
        Self { blas_workspace_bytes: None, lt_workspace_bytes: None }
    }

    /// The same with another BLAS workspace.
    #[must_use]
    pub const fn with_blas_workspace_bytes(mut self, bytes: usize) -> Self {
        self.blas_workspace_bytes = Some(bytes);
        self
    }

    /// The same with another Lt workspace.
    #[must_use]
    pub const fn with_lt_workspace_bytes(mut self, bytes: usize) -> Self {
        self.lt_workspace_bytes = Some(bytes);
        self
    }
}

/// An open backend with its pools. Cheap to clone; all clones are the same runtime.
///
/// Devices, streams, events and buffers keep their runtime alive. When the last of them is dropped, the runtime waits
/// for the devices and gives everything back; [`Runtime::close`] does so with an answer.
///
/// ```
/// use highwater_core::{GemmShape, Runtime};
/// use highwater_mock::{MockGpu, MockOptions};
///
/// let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
/// let device = runtime.device(0)?;
/// let stream = device.create_stream()?;
/// let a = stream.upload(&[1.0_f32, 2.0, 3.0, 4.0])?; // 2 x 2, column-major
/// let b = stream.upload(&[1.0_f32, 0.0, 0.0, 1.0])?;
/// let c = device.allocate::<f32>(4)?;
/// stream.blas()?.gemm(&GemmShape::of::<f32>(2, 2, 2), 1.0, &a, &b, 0.0, &c)?;
/// assert_eq!(stream.download(&c)?, [1.0, 2.0, 3.0, 4.0]);
/// # Ok::<(), highwater_core::Error>(())
/// ```
#[derive(Clone)]
pub struct Runtime {
    pub(crate) inner: Arc<RuntimeInner>,
}

pub(crate) struct RuntimeInner {
    pub(crate) backend: Arc<dyn Backend>,
    host: Arc<dyn HostAllocator>,
    pub(crate) generation: Generation,
    pub(crate) devices: Box<[DeviceState]>,
    ledger: Ledger,
    pub(crate) blas_handles: HandlePool<PooledHandle>,
    pub(crate) lt_handles: HandlePool<PooledHandle>,
    host_cache: HostCache,
    deferred: DeferredFrees,
    /// Blocks of device memory whose last use could not be marked: freed when the runtime ends.
    stranded: Mutex<Vec<DeferredFree>>,
    rounds: Rounds,
    /// Handles whose one stream has ended, for devices that want one handle for each stream.
    spare_handles: Mutex<Vec<SpareHandle>>,
    /// Blocks whose last use could not be marked: freed when the runtime ends.
    unmarked: Mutex<Vec<OwnedBlock>>,
    /// Releases that the backend refused.
    failed_releases: AtomicU64,
    /// Objects left on purpose because the process is exiting.
    left_at_exit: AtomicU64,
    closed: AtomicBool,
}

/// A handle whose stream has ended.
struct SpareHandle {
    device: u32,
    pooled: PooledHandle,
    /// The last work of that stream; `None` where it could not be marked.
    after: Option<Arc<Mark>>,
}

/// What the runtime knows about a device.
pub(crate) struct DeviceState {
    pub(crate) info: DeviceInfo,
    pub(crate) capabilities: Capabilities,
    pub(crate) events: Arc<EventPool>,
    pub(crate) workspaces: WorkspacePool,
    /// The vendor's legacy default stream: one for all who ask, so that its calls take turns.
    pub(crate) legacy_default: Mutex<Weak<StreamCore>>,
    /// Bytes of workspace for the BLAS calls of a stream; 0 for none.
    blas_workspace_bytes: usize,
    /// Bytes of workspace for the Lt calls of a stream; 0 for none.
    lt_workspace_bytes: usize,
}

impl DeviceState {
    /// Bytes of workspace for the calls of one kind; 0 for none.
    pub(crate) fn workspace_bytes(&self, kind: BlasKind) -> usize {
        match kind {
            BlasKind::Lt => self.lt_workspace_bytes,
            _ => self.blas_workspace_bytes,
        }
    }
}

impl fmt::Debug for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Runtime").field("backend", self.inner.backend.identity()).finish_non_exhaustive()
    }
}

/// What a runtime's pools hold and did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Statistics {
    /// The pool of BLAS handles.
    pub blas_handles: HandlePoolStatistics,
    /// The pool of Lt handles.
    pub lt_handles: HandlePoolStatistics,
    /// Workspaces allocated, over all devices.
    pub workspaces: u64,
    /// Bytes of those workspaces.
    pub workspace_bytes: u64,
    /// The cache of page-locked host memory.
    pub host: HostCacheStatistics,
    /// Releases that the backend refused.
    pub failed_releases: u64,
    /// Streams, events, buffers and handles that were left on purpose because the process is exiting.
    pub left_at_exit: u64,
}

impl Runtime {
    /// A runtime over an open backend, with default options.
    ///
    /// # Errors
    /// What the backend gives when it is asked about its devices.
    pub fn new(backend: Arc<dyn Backend>) -> Result<Self> {
        Self::with_options(backend, &RuntimeOptions::new())
    }

    /// A runtime over an open backend.
    ///
    /// # Errors
    /// As [`Runtime::new`].
    pub fn with_options(backend: Arc<dyn Backend>, options: &RuntimeOptions) -> Result<Self> {
        let generation = Generation::current();
        let identity = backend.identity();
        let device = |ordinal| {
            let capabilities = backend.capabilities(ordinal)?;
            let blas = options.blas_workspace_bytes.unwrap_or_else(|| {
                workspace_config::blas_workspace_bytes(
                    identity.blas_workspace_variables,
                    capabilities.blas_workspace_bytes,
                )
            });
            let lt = options.lt_workspace_bytes.unwrap_or_else(|| {
                workspace_config::lt_workspace_bytes(identity.lt_workspace_variables, capabilities.lt_workspace_bytes)
            });
            let align = |bytes: usize| bytes.next_multiple_of(capabilities.workspace_alignment.max(1));
            Ok(DeviceState {
                info: backend.device_info(ordinal)?,
                capabilities,
                events: EventPool::new(ordinal, generation),
                workspaces: WorkspacePool::default(),
                legacy_default: Mutex::default(),
                blas_workspace_bytes: if capabilities.blas_workspace { align(blas) } else { 0 },
                lt_workspace_bytes: if capabilities.blas_workspace { align(lt) } else { 0 },
            })
        };
        let devices = (0..backend.device_count()).map(device).collect::<Result<Box<[_]>>>()?;
        let inner = RuntimeInner {
            host: backend.host_allocator(),
            backend,
            generation,
            devices,
            ledger: Ledger::default(),
            blas_handles: HandlePool::new(),
            lt_handles: HandlePool::new(),
            host_cache: HostCache::new(),
            deferred: DeferredFrees::default(),
            stranded: Mutex::default(),
            rounds: Rounds::default(),
            spare_handles: Mutex::default(),
            unmarked: Mutex::default(),
            failed_releases: AtomicU64::new(0),
            left_at_exit: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Who the backend is.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        self.inner.backend.identity()
    }

    /// The backend itself.
    #[must_use]
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.inner.backend
    }

    /// Number of devices.
    #[must_use]
    pub fn device_count(&self) -> u32 {
        // The count came from the backend as a u32.
        u32::try_from(self.inner.devices.len()).unwrap_or(u32::MAX)
    }

    /// The device with this ordinal, counted from 0.
    ///
    /// # Errors
    /// `InvalidArgument` where there are fewer devices.
    pub fn device(&self, ordinal: u32) -> Result<Device> {
        if self.inner.devices.get(ordinal as usize).is_none() {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                "device",
                format!("there is no device {ordinal}; the backend has {}", self.inner.devices.len()),
            )
            .with_hint("ordinals count from 0"));
        }
        Ok(Device::new(self.clone(), ordinal))
    }

    /// Page-locked host memory for `len` values of `T`, from the cache. The contents are unspecified.
    ///
    /// # Errors
    /// `OutOfMemory` when the backend has no more, also after the cache was trimmed.
    #[inline]
    pub fn pinned<T: Element>(&self, len: usize) -> Result<PinnedBuffer<T>> {
        PinnedBuffer::new(self.clone(), len)
    }

    /// Frees device memory whose streams are done with it. This also happens by itself when memory is asked for and when
    /// a stream is synchronised.
    ///
    /// # Errors
    /// What the backend gives when it is asked about an event; nothing is lost.
    pub fn reclaim(&self) -> Result<()> {
        self.inner.check("reclaim")?;
        self.inner.reclaim(false)
    }

    /// Gives back what is cached and not in use: idle handles, workspaces of ended streams, free page-locked blocks.
    ///
    /// # Errors
    /// The first refusal of the backend; the rest is given back all the same.
    pub fn trim(&self) -> Result<()> {
        self.inner.check("trim")?;
        let handles = self.inner.destroy_idle_handles();
        handles.and(self.inner.reclaim(false)).and(self.inner.free_idle_workspaces(false)).and(self.inner.trim_host())
    }

    /// What the pools hold and did.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        let inner = &*self.inner;
        if !inner.generation.is_current() {
            return Statistics::default();
        }
        let (workspaces, workspace_bytes) = inner
            .devices
            .iter()
            .map(|device| device.workspaces.held())
            .fold((0, 0), |sum, held| (sum.0 + held.0, sum.1 + held.1));
        Statistics {
            blas_handles: inner.blas_handles.statistics(),
            lt_handles: inner.lt_handles.statistics(),
            workspaces,
            workspace_bytes,
            host: inner.host_cache.statistics(),
            failed_releases: inner.failed_releases.load(Ordering::Relaxed),
            left_at_exit: inner.left_at_exit.load(Ordering::Relaxed),
        }
    }

    /// The block of device memory that an address points into, if this runtime gave it out.
    #[must_use]
    pub fn block_of(&self, ptr: DevicePtr) -> Option<DeviceBlockInfo> {
        if self.inner.generation.is_current() { self.inner.ledger.find_device(ptr) } else { None }
    }

    /// Ends the runtime: waits for the devices, gives everything back, and says what the backend still counts as alive
    /// (nothing, unless something else uses the same backend).
    ///
    /// # Errors
    /// `InvalidState` while a device, stream, event, buffer or clone of the runtime is alive: nothing is closed then.
    /// Otherwise the first refusal of the backend; the rest is given back all the same.
    pub fn close(self) -> Result<LiveObjects> {
        self.inner.check("close")?;
        let backend = Arc::clone(&self.inner.backend);
        let mut inner = Arc::try_unwrap(self.inner).map_err(|shared| {
            Error::new(
                ErrorKind::InvalidState,
                "close",
                format!("{} other objects of the runtime are alive", Arc::strong_count(&shared) - 1),
            )
            .with_hint("drop its devices, streams, events, buffers and clones first")
        })?;
        inner.give_everything_back()?;
        drop(inner);
        Ok(backend.live_objects())
    }
}

impl RuntimeInner {
    /// Refuses what would touch the driver in a forked child or during the end of the process.
    #[inline]
    pub(crate) fn check(&self, operation: &'static str) -> Result<()> {
        if !self.generation.is_current() {
            return Err(Generation::error(operation));
        }
        if self.backend.is_exiting() {
            return Err(Error::new(
                ErrorKind::ShuttingDown,
                operation,
                "the process is exiting, and the driver with it",
            )
            .with_hint("stop threads that use the device before `main` returns"));
        }
        Ok(())
    }

    /// Whether a destructor may call the backend. Where the process is exiting, counts the object that is left.
    pub(crate) fn may_release(&self) -> bool {
        if !self.generation.is_current() {
            return false;
        }
        let exiting = self.backend.is_exiting();
        self.left_at_exit.fetch_add(u64::from(exiting), Ordering::Relaxed);
        !exiting
    }

    pub(crate) fn count_failed_release(&self, error: &Error) {
        self.failed_releases.fetch_add(1, Ordering::Relaxed);
        tracing::warn!("a release was refused: {error}");
    }

    fn note(&self, result: Result<()>) -> Result<()> {
        if let Err(error) = &result {
            self.count_failed_release(error);
        }
        result
    }

    pub(crate) fn device(&self, ordinal: u32) -> &DeviceState {
        &self.devices[ordinal as usize]
    }

    // ---------------------------------------------------------------- marks

    /// Marks the point that `stream` has reached.
    pub(crate) fn mark(&self, stream: StreamId) -> Result<Mark> {
        let mark = self.device(stream.device()).events.take(&*self.backend)?;
        self.backend.record_event(mark.event(), stream)?;
        Ok(mark)
    }

    pub(crate) fn is_passed(&self, mark: &Mark, wait: bool) -> Result<bool> {
        if wait {
            self.backend.synchronize_event(mark.event())?;
            return Ok(true);
        }
        Ok(self.backend.query_event(mark.event())? == Completion::Complete)
    }

    // ---------------------------------------------------------------- device memory

    /// Runs `make`; where the device has no memory left, gives back what is not in use and tries once more.
    fn with_reclaim<T>(&self, make: impl Fn() -> Result<T>) -> Result<T> {
        self.reclaim_in_passing();
        match make() {
            Err(error) if error.kind() == ErrorKind::OutOfMemory => {
                let round = self.rounds.begin();
                // A release that is refused is counted, and keeps nobody from trying with what the others gave.
                for given_back in [self.reclaim(true), self.free_idle_workspaces(true), self.destroy_idle_handles()] {
                    if let Err(error) = given_back {
                        tracing::debug!("not everything could be given back: {error}");
                    }
                }
                drop(round);
                // What other threads had in hand meanwhile is free now.
                self.rounds.wait();
                make()
            }
            result => result,
        }
    }

    /// Allocates device memory; where there is none left, gives back what is not in use and tries once more.
    pub(crate) fn allocate_device(&self, device: u32, options: &AllocateOptions) -> Result<DevicePtr> {
        let ptr = self.with_reclaim(|| self.backend.allocate(device, options))?;
        self.ledger.insert_device(DeviceBlockInfo { device, base: ptr, bytes: options.bytes })?;
        Ok(ptr)
    }

    /// Frees device memory.
    ///
    /// # Safety
    /// As [`Backend::free`], except that `ptr` may be any address: what is not the start of a live block is refused.
    pub(crate) unsafe fn free_device(&self, device: u32, ptr: DevicePtr, stream: Option<StreamId>) -> Result<()> {
        let block = self.ledger.remove_device(device, ptr)?;
        // SAFETY: the ledger says that `ptr` came from `allocate` for this device and was not freed; the caller promises
        // that no work that uses it is outstanding.
        unsafe { self.backend.free(device, ptr, stream) }.inspect_err(|_| {
            // Still allocated as far as anyone knows. The range is free in the ledger, so this cannot fail.
            let _ = self.ledger.insert_device(block);
        })
    }

    /// Frees a block once its marks are passed.
    pub(crate) fn defer_free(&self, free: DeferredFree) {
        self.deferred.push(free);
    }

    /// Keeps a block for the end of the runtime, because nobody can tell when its streams are done with it.
    pub(crate) fn strand(&self, free: DeferredFree) {
        self.stranded.lock().push(free);
    }

    /// Frees deferred blocks on the way to something else, which does not fail because a release did: those are counted.
    pub(crate) fn reclaim_in_passing(&self) {
        if self.deferred.len() > 0
            && let Err(error) = self.reclaim(false)
        {
            tracing::debug!("memory could not be reclaimed in passing: {error}");
        }
    }

    /// Frees the deferred blocks whose streams have passed; with `wait`, waits for them. Without, it does not ask after
    /// every one of a long list on a busy device: those that were not asked after come first the next time.
    pub(crate) fn reclaim(&self, wait: bool) -> Result<()> {
        const ENOUGH_PENDING: usize = 16;
        let mut result = Ok(());
        let mut pending = 0;
        for _ in 0..self.deferred.len() {
            if pending == ENOUGH_PENDING {
                break;
            }
            let Some(mut free) = self.deferred.pop() else { break };
            while let Some(mark) = free.after.last() {
                match self.is_passed(mark, wait) {
                    Ok(true) => drop(free.after.pop()),
                    Ok(false) => break,
                    Err(error) => {
                        result = result.and(Err(error));
                        break;
                    }
                }
            }
            if !free.after.is_empty() {
                pending += 1;
                self.deferred.push(free);
                continue;
            }
            // SAFETY: every stream that used the block has passed its last use, and its owner is gone.
            let freed = self.note(unsafe { self.free_deferred(&free) });
            if freed.is_err() {
                // The end of the runtime tries once more.
                self.strand(free);
            }
            result = result.and(freed);
        }
        result
    }

    /// # Safety
    /// Nobody uses the block any more, outstanding device work included.
    unsafe fn free_deferred(&self, free: &DeferredFree) -> Result<()> {
        // SAFETY: as promised by the caller.
        unsafe { self.free_device(free.device, free.ptr, free.home.as_ref().map(|home| home.id)) }
    }

    // ---------------------------------------------------------------- workspaces

    /// A workspace of `bytes` for work that is enqueued on `stream` from here on; `None` for 0 bytes.
    pub(crate) fn take_workspace(&self, stream: StreamId, bytes: usize) -> Result<Option<Workspace>> {
        let device = self.device(stream.device());
        if bytes == 0 {
            return Ok(None);
        }
        if let Some(idle) = device.workspaces.take(bytes) {
            if let Some(mark) = &idle.after
                && let Err(error) = self.backend.stream_wait_event(stream, mark.event())
            {
                device.workspaces.give_back(idle);
                return Err(error);
            }
            return Ok(Some(idle.workspace));
        }
        let ptr = self.allocate_device(stream.device(), &AllocateOptions::new(bytes))?;
        let workspace = Workspace { ptr, bytes };
        device.workspaces.add(workspace);
        if !ptr.is_aligned_to(device.capabilities.workspace_alignment) {
            device.workspaces.give_back(IdleWorkspace { workspace, after: None });
            return Err(Error::new(
                ErrorKind::InvalidPointer,
                "allocate",
                format!("the workspace {ptr:?} is not aligned to {}", device.capabilities.workspace_alignment),
            )
            .with_hint("the backend breaks clause memory.aligned"));
        }
        Ok(Some(workspace))
    }

    /// Takes a workspace back after the work enqueued on `stream` so far.
    pub(crate) fn give_back_workspace(&self, workspace: Workspace, stream: StreamId) {
        match self.mark(stream) {
            Ok(mark) => self.give_back_workspace_after(workspace, stream.device(), Arc::new(mark)),
            // It stays in the list of all workspaces, is used by nobody, and is freed when the runtime ends.
            Err(error) => self.count_failed_release(&error),
        }
    }

    pub(crate) fn give_back_workspace_after(&self, workspace: Workspace, device: u32, after: Arc<Mark>) {
        self.device(device).workspaces.give_back(IdleWorkspace { workspace, after: Some(after) });
    }

    fn free_idle_workspaces(&self, wait: bool) -> Result<()> {
        let mut result = Ok(());
        for (ordinal, device) in self.devices.iter().enumerate() {
            for _ in 0..device.workspaces.idle_count() {
                let Some(idle) = device.workspaces.pop_idle() else { break };
                let passed = idle.after.as_ref().map_or(Ok(true), |mark| self.is_passed(mark, wait));
                if !matches!(passed, Ok(true)) {
                    result = result.and(passed.map(|_| ()));
                    device.workspaces.give_back(idle);
                    continue;
                }
                // SAFETY: no stream has the workspace, and the last work that used it is done.
                let freed = self.note(unsafe { self.free_device(ordinal as u32, idle.workspace.ptr, None) });
                match &freed {
                    Ok(()) => device.workspaces.remove(idle.workspace),
                    Err(_) => device.workspaces.give_back(IdleWorkspace { after: None, ..idle }),
                }
                result = result.and(freed);
            }
        }
        result
    }

    // ---------------------------------------------------------------- handles

    /// Makes a handle, or takes one whose stream has ended and is done; where the device has no memory left, gives back
    /// what is not in use and tries once more.
    #[cold]
    pub(crate) fn create_handle(&self, device: u32, kind: BlasKind) -> Result<PooledHandle> {
        self.check("create_blas_handle")?;
        let capabilities = &self.device(device).capabilities;
        if kind == BlasKind::Lt && !capabilities.lt_plans {
            return Err(Error::lacks("create_blas_handle", "lt_plans"));
        }
        if let Some(pooled) = self.take_spare_handle(device, kind) {
            return Ok(pooled);
        }
        let options = BlasOptions::new(kind);
        let mut handle = self.with_reclaim(|| self.backend.create_blas_handle(device, &options))?;
        // Vendors start from different defaults, so the mode is always set where there is one.
        if capabilities.atomics_mode {
            handle.set_atomics_mode(AtomicsMode::NotAllowed)?;
        }
        Ok(PooledHandle::new(handle, kind))
    }

    /// Destroys the handles that no thread has claimed. A vendor's handle holds tens of megabytes of device memory.
    fn destroy_idle_handles(&self) -> Result<()> {
        let idle = [&self.blas_handles, &self.lt_handles].map(HandlePool::take_idle).into_iter().flatten();
        let spare = std::mem::take(&mut *self.spare_handles.lock()).into_iter().map(|spare| spare.pooled);
        let mut result = Ok(());
        for mut pooled in idle.chain(spare) {
            result = result.and(self.note(pooled.handle.destroy()));
        }
        result
    }

    /// Keeps the handles of a stream that has ended for other streams.
    pub(crate) fn spare_handles_of(&self, key: PoolKey, after: Option<&Arc<Mark>>) {
        for pool in [&self.blas_handles, &self.lt_handles] {
            let spare = pool.take_key(key).into_iter().map(|pooled| SpareHandle {
                device: key.device,
                pooled: pooled.unbound(),
                after: after.cloned(),
            });
            self.spare_handles.lock().extend(spare);
        }
    }

    fn take_spare_handle(&self, device: u32, kind: BlasKind) -> Option<PooledHandle> {
        let fits = |spare: &SpareHandle| spare.device == device && spare.pooled.kind == kind;
        let tries = self.spare_handles.lock().len();
        for _ in 0..tries {
            let spare = {
                let mut spares = self.spare_handles.lock();
                let index = spares.iter().position(fits)?;
                spares.remove(index)
            };
            // The vendor wants one stream at a time for this handle: the old one has to be done.
            if spare.after.as_ref().is_some_and(|mark| self.is_passed(mark, false).unwrap_or(false)) {
                return Some(spare.pooled);
            }
            self.spare_handles.lock().push(spare);
        }
        None
    }

    // ---------------------------------------------------------------- page-locked host memory

    /// A block of page-locked memory of at least `bytes`.
    #[inline]
    pub(crate) fn take_pinned(&self, bytes: usize) -> Result<OwnedBlock> {
        // A block of the cache needs no driver, so whether that is going away is asked on the slow path only.
        if !self.generation.is_current() {
            return Err(Generation::error("pinned"));
        }
        let (class, block_bytes) = size_class::of(bytes).ok_or_else(|| {
            Error::new(ErrorKind::OutOfMemory, "pinned", format!("{bytes} bytes are more than any machine has"))
        })?;
        match self.host_cache.find(class, bytes) {
            Found::Free(block) => Ok(block),
            Found::Waiting(waiting) => self.take_pinned_slow(bytes, class, block_bytes, waiting),
        }
    }

    #[cold]
    fn take_pinned_slow(&self, bytes: usize, class: usize, block_bytes: usize, waiting: usize) -> Result<OwnedBlock> {
        self.check("pinned")?;
        for _ in 0..waiting {
            let Some(mut block) = self.host_cache.pop_waiting(class) else { break };
            if self.uses_are_over(&mut block) {
                self.host_cache.count_given(&block, bytes, false);
                return Ok(block);
            }
            self.host_cache.put_back(block);
        }
        let options = HostOptions::new();
        let ptr = match self.host.allocate(block_bytes, &options) {
            Err(error) if error.kind() == ErrorKind::OutOfMemory => {
                let round = self.rounds.begin();
                self.trim_host()?;
                drop(round);
                self.rounds.wait();
                self.host.allocate(block_bytes, &options)?
            }
            result => result?,
        };
        self.ledger.insert_host(ptr, block_bytes);
        let (uses, unmarked) = (Mutex::default(), AtomicBool::new(false));
        let block = Box::new(PinnedBlock { ptr, bytes: block_bytes, class, uses, unmarked });
        self.host_cache.count_given(&block, bytes, true);
        Ok(block)
    }

    /// Whether every stream has passed its last use of a block; forgets those that have.
    fn uses_are_over(&self, block: &mut PinnedBlock) -> bool {
        // An error says nothing about the work: the block keeps waiting, and the end of the runtime frees it.
        block.uses.get_mut().retain(|use_| !self.is_passed(&use_.after, false).unwrap_or(false));
        block.uses.get_mut().is_empty()
    }

    #[inline]
    pub(crate) fn give_back_pinned(&self, mut block: OwnedBlock, requested: usize) {
        if *block.unmarked.get_mut() {
            self.host_cache.count_unmarked(block.class, requested);
            self.unmarked.lock().push(block);
        } else {
            self.host_cache.give_back(block, requested);
        }
    }

    /// Refuses a block of which nobody can tell whether a device still uses it.
    fn check_marked(block: &PinnedBlock) -> Result<()> {
        if block.unmarked.load(Ordering::Relaxed) {
            return Err(Error::new(
                ErrorKind::InvalidState,
                "pinned",
                "an earlier copy failed in a way that leaves unknown whether the device still uses this memory",
            )
            .with_hint("drop the buffer and take a new one"));
        }
        Ok(())
    }

    /// Waits until no stream uses the block any more; with `writes_only`, until none writes it any more.
    pub(crate) fn wait_for_uses(&self, block: &PinnedBlock, writes_only: bool) -> Result<()> {
        self.check("pinned")?;
        Self::check_marked(block)?;
        let awaited: Vec<Arc<Mark>> = {
            let uses = block.uses.lock();
            if uses.is_empty() {
                return Ok(());
            }
            uses.iter().filter(|use_| use_.writes || !writes_only).map(|use_| Arc::clone(&use_.after)).collect()
        };
        for mark in awaited {
            self.backend.synchronize_event(mark.event())?;
            // By the mark and not by its event: the mark in hand keeps its event from being recorded for anybody else.
            block.uses.lock().retain(|use_| !Arc::ptr_eq(&use_.after, &mark));
        }
        Ok(())
    }

    /// Frees the page-locked blocks that nobody uses.
    fn trim_host(&self) -> Result<()> {
        let mut result = Ok(());
        for class in 0..size_class::COUNT {
            let (_, waiting) = self.host_cache.cached(class);
            for _ in 0..waiting {
                let Some(mut block) = self.host_cache.pop_waiting(class) else { break };
                self.uses_are_over(&mut block);
                self.host_cache.put_back(block);
            }
            let (free, _) = self.host_cache.cached(class);
            let mut refused = Vec::new();
            for _ in 0..free {
                let Some(block) = self.host_cache.pop_free(class) else { break };
                // SAFETY: the block is in nobody's hands and no stream uses it any more.
                let freed = self.note(unsafe { self.free_pinned(&block) });
                if freed.is_err() {
                    refused.push(block);
                }
                result = result.and(freed);
            }
            refused.into_iter().for_each(|block| self.host_cache.put_back(block));
        }
        result
    }

    /// # Safety
    /// Nobody uses the block any more, outstanding device work included.
    unsafe fn free_pinned(&self, block: &PinnedBlock) -> Result<()> {
        let bytes = self.ledger.remove_host(block.ptr)?;
        // SAFETY: the block came from this allocator (the ledger knows it); nobody uses it (the caller's promise).
        unsafe { self.host.free(block.ptr) }.inspect_err(|_| self.ledger.insert_host(block.ptr, bytes))?;
        self.host_cache.count_freed(bytes);
        Ok(())
    }

    /// Records that `stream` uses a block, in an operation that is enqueued by `enqueue`.
    ///
    /// Uses of other streams that would race with it on the host memory are waited for first, on the device.
    pub(crate) fn use_pinned(
        &self,
        block: &PinnedBlock,
        stream: &StreamCore,
        writes: bool,
        enqueue: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        Self::check_marked(block)?;
        let (racing, before) = {
            let uses = block.uses.lock();
            let races = |use_: &&PinnedUse| use_.stream != stream.key && (writes || use_.writes);
            let racing: Vec<Arc<Mark>> = uses.iter().filter(races).map(|use_| Arc::clone(&use_.after)).collect();
            let before = uses.iter().find(|use_| use_.stream == stream.key).map(|use_| Arc::clone(&use_.after));
            (racing, before)
        };
        for mark in &racing {
            self.backend.stream_wait_event(stream.id, mark.event())?;
        }
        // The event is had before anything is enqueued, so that only the record itself can fail afterwards.
        let mark = self.device(stream.id.device()).events.take(&*self.backend)?;
        enqueue()?;
        if let Err(error) = self.backend.record_event(mark.event(), stream.id) {
            // Without a mark, waiting is all that is left. Where that fails too, nobody can tell when the device is done
            // with the block: it is never touched or given out again, and freed when the runtime ends.
            return self.backend.synchronize_stream(stream.id).map_err(|_| {
                block.unmarked.store(true, Ordering::Relaxed);
                error
            });
        }
        let after = Arc::new(mark);
        let mut uses = block.uses.lock();
        // The mark that stood before this call was recorded before this one, on the same stream: this one covers it. Marks
        // that other threads have set meanwhile may be earlier or later, and stay.
        let covered = before.and_then(|before| uses.iter_mut().find(|use_| Arc::ptr_eq(&use_.after, &before)));
        match covered {
            Some(use_) => {
                use_.writes |= writes;
                use_.after = after;
            }
            None => uses.push(PinnedUse { stream: stream.key, after, writes }),
        }
        Ok(())
    }

    // ---------------------------------------------------------------- the end

    /// Waits for the devices and frees everything that the runtime holds. Called once no other object refers to it.
    fn give_everything_back(&mut self) -> Result<()> {
        if self.closed.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let mut result = Ok(());
        let pooled = [&mut self.blas_handles, &mut self.lt_handles].map(HandlePool::take_all).into_iter().flatten();
        let spare = std::mem::take(self.spare_handles.get_mut()).into_iter().map(|spare| spare.pooled);
        for mut pooled in pooled.chain(spare).collect::<Vec<_>>() {
            result = result.and(self.note(pooled.handle.destroy()));
        }
        let wait = |device: &DeviceState| {
            // Twice: what is at stake is all memory, and the second try is free.
            let first = self.backend.synchronize_device(device.info.ordinal);
            first.or_else(|_| self.note(self.backend.synchronize_device(device.info.ordinal)))
        };
        if let Err(error) = self.devices.iter().try_for_each(wait) {
            // Work may be outstanding on a device that cannot be waited for: its memory is left alone.
            tracing::warn!("a device could not be waited for; memory is left allocated");
            return Err(error);
        }
        // From here on nothing is outstanding: every block can be freed and every event is passed.
        let stranded = std::mem::take(self.stranded.get_mut());
        for free in std::iter::from_fn(|| self.deferred.pop()).chain(stranded).collect::<Vec<_>>() {
            // SAFETY: the devices have executed everything, and the owner of the block is gone.
            result = result.and(self.note(unsafe { self.free_deferred(&free) }));
        }
        let unmarked = std::mem::take(self.unmarked.get_mut());
        let cached = (0..size_class::COUNT).flat_map(|class| {
            let cache = &self.host_cache;
            std::iter::from_fn(move || cache.pop_free(class).or_else(|| cache.pop_waiting(class)))
        });
        for block in cached.chain(unmarked) {
            // SAFETY: the devices have executed everything, and no buffer owns the block.
            result = result.and(self.note(unsafe { self.free_pinned(&block) }));
        }
        for device in &self.devices {
            for workspace in device.workspaces.take_all() {
                // SAFETY: the devices have executed everything, and the handles that had it bound are destroyed.
                result = result.and(self.note(unsafe { self.free_device(device.info.ordinal, workspace.ptr, None) }));
            }
            for event in device.events.take_all() {
                result = result.and(self.note(self.backend.destroy_event(event)));
            }
        }
        result
    }
}

#[cfg(test)]
impl RuntimeInner {
    /// Holds every lock of the runtime's pools, for the fork test.
    pub(crate) fn hold_locks(&self) -> impl Drop + '_ {
        let devices: Vec<_> =
            self.devices.iter().map(|device| (device.events.hold_lock(), device.workspaces.hold_lock())).collect();
        let handles = (self.blas_handles.hold_locks(), self.lt_handles.hold_locks());
        let memory = (self.ledger.hold_locks(), self.host_cache.hold_locks(), self.deferred.hold_lock());
        let lists = (self.unmarked.lock(), self.stranded.lock(), self.spare_handles.lock());
        let places: Vec<_> = self.devices.iter().map(|device| device.legacy_default.lock()).collect();
        crate::testing::Held((devices, handles, memory, lists, places, self.rounds.hold_lock()))
    }
}

impl Drop for RuntimeInner {
    fn drop(&mut self) {
        if self.may_release() {
            // Refusals were counted and logged; a destructor has nobody to tell.
            let _ = self.give_everything_back();
        } else if self.generation.is_current() {
            // The process is exiting: the driver may be gone before the handles are, so they are left on purpose.
            for pooled in [&mut self.blas_handles, &mut self.lt_handles].map(HandlePool::take_all).into_iter().flatten()
            {
                std::mem::forget(pooled);
            }
        }
    }
}
