//! The runtime: one open backend with its pools, and what they need from each other.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::backend::{Backend, Completion, DeviceInfo, Identity, LiveObjects};
use crate::blas::{AtomicsMode, BlasKind, BlasOptions, Workspace};
use crate::blas_lease::PooledHandle;
use crate::capability::Capabilities;
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::fork::Generation;
use crate::host::{HostAllocator, HostOptions};
use crate::id::{EventId, StreamId};
use crate::ledger::{DeviceBlockInfo, Ledger};
use crate::memory::{AllocateOptions, DevicePtr};
use crate::pinned::PinnedBuffer;
use crate::pool::deferred::{DeferredFree, DeferredFrees};
use crate::pool::events::EventPool;
use crate::pool::host::{CachedBlocks, Found, HostCache, OwnedBlock, PinnedBlock, PinnedUse};
use crate::pool::workspaces::{IdleWorkspace, WorkspacePool};
use crate::pool::{HandlePool, HandlePoolStatistics, HostCacheStatistics, size_class};
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
    /// Blocks whose last use could not be marked: freed when the runtime ends.
    unmarked: Mutex<Vec<OwnedBlock>>,
    /// Releases that the backend refused.
    failed_releases: AtomicU64,
    closed: AtomicBool,
}

/// What the runtime knows about a device.
pub(crate) struct DeviceState {
    pub(crate) info: DeviceInfo,
    pub(crate) capabilities: Capabilities,
    pub(crate) events: EventPool,
    pub(crate) workspaces: WorkspacePool,
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
    /// Releases that the backend refused, and what the end of the process made it leave on purpose.
    pub failed_releases: u64,
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
                events: EventPool::default(),
                workspaces: WorkspacePool::default(),
                blas_workspace_bytes: if capabilities.blas_workspace { align(blas) } else { 0 },
                lt_workspace_bytes: if capabilities.blas_workspace { align(lt) } else { 0 },
            })
        };
        let devices = (0..backend.device_count()).map(device).collect::<Result<Box<[_]>>>()?;
        let inner = RuntimeInner {
            host: backend.host_allocator(),
            backend,
            generation: Generation::current(),
            devices,
            ledger: Ledger::default(),
            blas_handles: HandlePool::new(),
            lt_handles: HandlePool::new(),
            host_cache: HostCache::new(),
            deferred: DeferredFrees::default(),
            unmarked: Mutex::default(),
            failed_releases: AtomicU64::new(0),
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
        let handles = [&self.inner.blas_handles, &self.inner.lt_handles].map(HandlePool::take_idle);
        let mut result = Ok(());
        for mut pooled in handles.into_iter().flatten() {
            result = result.and(pooled.handle.destroy());
        }
        result.and(self.inner.reclaim(false)).and(self.inner.free_idle_workspaces(false)).and(self.inner.trim_host())
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
        Ok(())
    }

    /// Whether a destructor may call the backend.
    pub(crate) fn may_release(&self) -> bool {
        self.generation.is_current() && !self.backend.is_exiting()
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
    pub(crate) fn mark(&self, stream: StreamId) -> Result<EventId> {
        let events = &self.device(stream.device()).events;
        let event = events.take(&*self.backend, stream.device())?;
        match self.backend.record_event(event, stream) {
            Ok(()) => Ok(event),
            Err(error) => {
                events.give_back(event);
                Err(error)
            }
        }
    }

    pub(crate) fn give_back_event(&self, event: EventId) {
        self.device(event.device()).events.give_back(event);
    }

    fn is_passed(&self, event: EventId, wait: bool) -> Result<bool> {
        if wait {
            self.backend.synchronize_event(event)?;
            return Ok(true);
        }
        Ok(self.backend.query_event(event)? == Completion::Complete)
    }

    // ---------------------------------------------------------------- device memory

    /// Allocates device memory; where there is none left, gives back what is not in use and tries once more.
    pub(crate) fn allocate_device(&self, device: u32, options: &AllocateOptions) -> Result<DevicePtr> {
        self.reclaim_in_passing();
        let ptr = match self.backend.allocate(device, options) {
            Err(error) if error.kind() == ErrorKind::OutOfMemory => {
                self.reclaim(true)?;
                self.free_idle_workspaces(true)?;
                self.backend.allocate(device, options)?
            }
            result => result?,
        };
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

    pub(crate) fn defer_free(&self, free: DeferredFree) {
        self.deferred.push(free);
    }

    /// Frees deferred blocks on the way to something else, which does not fail because a release did: those are counted.
    pub(crate) fn reclaim_in_passing(&self) {
        if !self.deferred.is_empty()
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
        let mut later = Vec::new();
        for mut free in self.deferred.take_all() {
            if pending == ENOUGH_PENDING {
                self.deferred.push(free);
                continue;
            }
            while let Some(&event) = free.after.last() {
                match self.is_passed(event, wait) {
                    Ok(true) => {
                        free.after.pop();
                        self.give_back_event(event);
                    }
                    Ok(false) => break,
                    Err(error) => {
                        result = result.and(Err(error));
                        break;
                    }
                }
            }
            if free.unmarked || !free.after.is_empty() {
                pending += usize::from(!free.unmarked && !wait);
                later.push(free);
                continue;
            }
            // SAFETY: every stream that used the block has passed its last use, and its owner is gone.
            let freed =
                self.note(unsafe { self.free_device(free.device, free.ptr, free.home.as_ref().map(|home| home.id)) });
            if freed.is_err() {
                // Kept for the end of the runtime, which tries once more.
                later.push(DeferredFree { unmarked: true, ..free });
            }
            result = result.and(freed);
        }
        later.into_iter().for_each(|free| self.deferred.push(free));
        result
    }

    // ---------------------------------------------------------------- workspaces

    /// A workspace of `bytes` for work that is enqueued on `stream` from here on; `None` for 0 bytes.
    pub(crate) fn take_workspace(&self, stream: StreamId, bytes: usize) -> Result<Option<Workspace>> {
        let device = self.device(stream.device());
        if bytes == 0 {
            return Ok(None);
        }
        if let Some(idle) = device.workspaces.take(bytes) {
            if let Some(event) = idle.after {
                if let Err(error) = self.backend.stream_wait_event(stream, event) {
                    device.workspaces.give_back(idle);
                    return Err(error);
                }
                self.give_back_event(event);
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
        let device = self.device(stream.device());
        match self.mark(stream) {
            Ok(event) => device.workspaces.give_back(IdleWorkspace { workspace, after: Some(event) }),
            // It stays in the list of all workspaces, is used by nobody, and is freed when the runtime ends.
            Err(error) => self.count_failed_release(&error),
        }
    }

    fn free_idle_workspaces(&self, wait: bool) -> Result<()> {
        let mut result = Ok(());
        for (ordinal, device) in self.devices.iter().enumerate() {
            for idle in device.workspaces.take_idle() {
                let passed = idle.after.map_or(Ok(true), |event| self.is_passed(event, wait));
                if !matches!(passed, Ok(true)) {
                    result = result.and(passed.map(|_| ()));
                    device.workspaces.give_back(idle);
                    continue;
                }
                if let Some(event) = idle.after {
                    self.give_back_event(event);
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

    /// Makes a handle; where the device has no memory left, gives back what is not in use and tries once more.
    #[cold]
    pub(crate) fn create_handle(&self, device: u32, kind: BlasKind) -> Result<PooledHandle> {
        if self.backend.is_exiting() {
            return Err(Error::new(ErrorKind::ShuttingDown, "create_blas_handle", "the process is exiting"));
        }
        let capabilities = &self.device(device).capabilities;
        if kind == BlasKind::Lt && !capabilities.lt_plans {
            return Err(Error::lacks("create_blas_handle", "lt_plans"));
        }
        let options = BlasOptions::new(kind);
        let mut handle = match self.backend.create_blas_handle(device, &options) {
            Err(error) if error.kind() == ErrorKind::OutOfMemory => {
                self.reclaim(true)?;
                self.free_idle_workspaces(true)?;
                self.backend.create_blas_handle(device, &options)?
            }
            result => result?,
        };
        // Vendors start from different defaults, so the mode is always set where there is one.
        if capabilities.atomics_mode {
            handle.set_atomics_mode(AtomicsMode::NotAllowed)?;
        }
        Ok(PooledHandle::new(handle))
    }

    // ---------------------------------------------------------------- page-locked host memory

    /// A block of page-locked memory of at least `bytes`.
    #[inline]
    pub(crate) fn take_pinned(&self, bytes: usize) -> Result<OwnedBlock> {
        self.check("pinned")?;
        let (class, block_bytes) = size_class::of(bytes).ok_or_else(|| {
            Error::new(ErrorKind::OutOfMemory, "pinned", format!("{bytes} bytes are more than any machine has"))
        })?;
        match self.host_cache.find(class, bytes) {
            Found::Free(block) => Ok(block),
            Found::Waiting(waiting) => self.take_pinned_slow(bytes, class, block_bytes, waiting),
        }
    }

    #[cold]
    fn take_pinned_slow(
        &self,
        bytes: usize,
        class: usize,
        block_bytes: usize,
        waiting: Vec<OwnedBlock>,
    ) -> Result<OwnedBlock> {
        let mut found = None;
        let mut still_waiting = Vec::with_capacity(waiting.len());
        for mut block in waiting {
            if found.is_none() && self.uses_are_over(&mut block) {
                found = Some(block);
            } else {
                still_waiting.push(block);
            }
        }
        self.host_cache.sort_back(class, Vec::new(), still_waiting);
        if let Some(block) = found {
            self.host_cache.count_given(&block, bytes, false);
            return Ok(block);
        }
        let options = HostOptions::new();
        let ptr = match self.host.allocate(block_bytes, &options) {
            Err(error) if error.kind() == ErrorKind::OutOfMemory => {
                self.trim_host()?;
                self.host.allocate(block_bytes, &options)?
            }
            result => result?,
        };
        self.ledger.insert_host(ptr, block_bytes);
        let block =
            PinnedBlock { ptr, bytes: block_bytes, class, uses: Mutex::default(), unmarked: AtomicBool::new(false) };
        let block = Box::new(block);
        self.host_cache.count_given(&block, bytes, true);
        Ok(block)
    }

    /// Whether every stream has passed its last use of a block; forgets those that have.
    fn uses_are_over(&self, block: &mut PinnedBlock) -> bool {
        block.uses.get_mut().retain(|use_| {
            // An error says nothing about the work: the block keeps waiting, and the end of the runtime frees it.
            let passed = self.is_passed(use_.after, false).unwrap_or(false);
            if passed {
                self.give_back_event(use_.after);
            }
            !passed
        });
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

    /// Waits until no stream uses the block any more; with `writes_only`, until none writes it any more.
    pub(crate) fn wait_for_uses(&self, block: &PinnedBlock, writes_only: bool) -> Result<()> {
        self.check("pinned")?;
        if block.unmarked.load(Ordering::Relaxed) {
            return Err(Error::new(
                ErrorKind::InvalidState,
                "pinned",
                "an earlier copy failed in a way that leaves unknown whether the device still uses this memory",
            )
            .with_hint("drop the buffer and take a new one"));
        }
        let awaited = {
            let uses = block.uses.lock();
            if uses.is_empty() {
                return Ok(());
            }
            uses.iter().filter(|use_| use_.writes || !writes_only).map(|use_| use_.after).collect::<Vec<_>>()
        };
        for event in awaited {
            self.backend.synchronize_event(event)?;
            // A use that was marked anew meanwhile carries another event and stays.
            let passed = {
                let mut uses = block.uses.lock();
                uses.iter().position(|use_| use_.after == event).map(|index| uses.swap_remove(index))
            };
            if let Some(passed) = passed {
                self.give_back_event(passed.after);
            }
        }
        Ok(())
    }

    /// Frees the page-locked blocks that nobody uses.
    fn trim_host(&self) -> Result<()> {
        let mut result = Ok(());
        for CachedBlocks { class, mut free, waiting } in self.host_cache.take_cached() {
            let mut still_waiting = Vec::new();
            for mut block in waiting {
                if self.uses_are_over(&mut block) { free.push(block) } else { still_waiting.push(block) }
            }
            let mut kept = Vec::new();
            for block in free {
                // SAFETY: the block is in nobody's hands and no stream uses it any more.
                let freed = self.note(unsafe { self.free_pinned(&block) });
                if freed.is_err() {
                    kept.push(block);
                }
                result = result.and(freed);
            }
            self.host_cache.sort_back(class, kept, still_waiting);
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
        stream: &Arc<StreamCore>,
        writes: bool,
        enqueue: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        // The event is had before anything is enqueued, so that only the record itself can fail afterwards.
        let device = self.device(stream.id.device());
        let racing: Vec<EventId> = {
            let uses = block.uses.lock();
            let races = |use_: &&PinnedUse| use_.stream.id != stream.id && (writes || use_.writes);
            uses.iter().filter(races).map(|use_| use_.after).collect()
        };
        for event in racing {
            self.backend.stream_wait_event(stream.id, event)?;
        }
        let fresh = device.events.take(&*self.backend, stream.id.device())?;
        if let Err(error) = enqueue() {
            device.events.give_back(fresh);
            return Err(error);
        }
        if let Err(error) = self.backend.record_event(fresh, stream.id) {
            device.events.give_back(fresh);
            // Without a mark, waiting is all that is left. Where that fails too, nobody can tell when the device is done
            // with the block: it is never touched or given out again, and freed when the runtime ends.
            return self.backend.synchronize_stream(stream.id).map_err(|_| {
                block.unmarked.store(true, Ordering::Relaxed);
                error
            });
        }
        let mut uses = block.uses.lock();
        let replaced = match uses.iter_mut().find(|use_| use_.stream.id == stream.id) {
            Some(use_) => {
                use_.writes |= writes;
                Some(std::mem::replace(&mut use_.after, fresh))
            }
            None => {
                uses.push(PinnedUse { stream: Arc::clone(stream), after: fresh, writes });
                None
            }
        };
        drop(uses);
        if let Some(event) = replaced {
            self.give_back_event(event);
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
        let handles = [&mut self.blas_handles, &mut self.lt_handles].map(HandlePool::take_all);
        for mut pooled in handles.into_iter().flatten() {
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
        for free in self.deferred.take_all() {
            free.after.iter().for_each(|&event| self.give_back_event(event));
            // SAFETY: the devices have executed everything, and the owner of the block is gone.
            let freed = unsafe { self.free_device(free.device, free.ptr, free.home.as_ref().map(|home| home.id)) };
            result = result.and(self.note(freed));
        }
        let cached =
            self.host_cache.take_cached().into_iter().flat_map(|cached| cached.free.into_iter().chain(cached.waiting));
        let unmarked = std::mem::take(self.unmarked.get_mut());
        for mut block in cached.chain(unmarked) {
            for use_ in block.uses.get_mut().drain(..) {
                self.give_back_event(use_.after);
            }
            // SAFETY: the devices have executed everything, and no buffer owns the block.
            result = result.and(self.note(unsafe { self.free_pinned(&block) }));
        }
        for device in &self.devices {
            let (idle, all) = device.workspaces.take_all();
            idle.iter().filter_map(|idle| idle.after).for_each(|event| device.events.give_back(event));
            for workspace in all {
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
        crate::testing::Held((devices, handles, memory, self.unmarked.lock()))
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
