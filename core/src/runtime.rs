//! The runtime: one open backend with its pools, and what they need from each other.

use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use crate::blas_lease::PooledHandle;
use crate::buffer::DeviceBuffer;
use crate::capture::{self, Dropped, GraphStatistics, Graphs, in_capture, refuse_in_capture, warm_up_first};
use crate::device::Device;
use crate::gate::{CaptureGate, Quiet};
use crate::ledger::{DeviceBlockInfo, HostBlock, HostBlockInfo, Ledger};
use crate::numerics::Numerics;
use crate::pinned::PinnedBuffer;
use crate::pool::block_uses::{BlockUses, CpuAccess};
use crate::pool::deferred::{DeferredFree, DeferredFrees};
use crate::pool::events::{EventPool, Mark};
use crate::pool::host::{HostCache, KeptBlock, OwnedBlock, PinnedBlock};
use crate::pool::host_memory::{Freed, HostMemory};
use crate::pool::rounds::Rounds;
use crate::pool::workspaces::{IdleWorkspace, WorkspacePool};
use crate::pool::{HandlePool, HandlePoolStatistics, HostCacheStatistics, PoolKey, size_class};
use crate::sharing::{ExportKey, Import, Sharing, SharingStatistics, Ticket};
use crate::stream::{StreamCore, TurnState};
use crate::workspace_config;
use highwater_hal::{
    AllocateOptions, Backend, BlasKind, BlasOptions, Capabilities, Completion, DeviceInfo, DevicePtr, Element, Error,
    ErrorKind, Identity, IpcSharing, LiveObjects, MemoryHandle, Result, StreamId, Workspace, fork::Generation,
};

/// How to make a [`Runtime`].
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct RuntimeOptions {
    /// Bytes of BLAS workspace for each stream. The default is the backend's environment variables or its own default.
    /// With 0 each handle uses memory of its own. Then each stream has handles of its own, and a capture records no
    /// products.
    pub blas_workspace_bytes: Option<usize>,
    /// Bytes that an Lt plan may use; else the backend's environment variables or its default.
    pub lt_workspace_bytes: Option<usize>,
    /// The policy for products of threads and leases that have none of their own.
    pub numerics: Numerics,
    /// Bytes of page-locked memory that may be cached while no buffer owns them; as many as there are by default.
    pub host_cache_bytes: Option<u64>,
}

impl RuntimeOptions {
    /// Everything by default.
    #[must_use]
    pub const fn new() -> Self {
        Self { blas_workspace_bytes: None, lt_workspace_bytes: None, numerics: Numerics::new(), host_cache_bytes: None }
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

    /// The same with another policy for products: see [`numerics`](crate::numerics).
    #[must_use]
    pub const fn with_numerics(mut self, policy: Numerics) -> Self {
        self.numerics = policy;
        self
    }

    /// The same with a cap on the page-locked memory that is cached and that no buffer owns. What is more is given back to
    /// the backend, unused longest first, once no stream uses it: by whoever drops a buffer, asks for one or synchronises a
    /// stream, who then pays for the backend's call. 0 caches nothing. A buffer is never refused for it.
    #[must_use]
    pub const fn with_host_cache_bytes(mut self, cap: u64) -> Self {
        self.host_cache_bytes = Some(cap);
        self
    }
}

/// An open backend with its pools. Cheap to clone; all clones are the same runtime.
///
/// Devices, streams, events and buffers keep their runtime alive. When the last of them is dropped, the runtime waits
/// for the devices and frees everything; [`Runtime::close`] does so and reports the result. Waiting for a device would
/// lose the captures on it. So the end of a runtime first waits until no runtime of the process captures there. A
/// runtime that is dropped inside a capture ends right after that capture, in the same thread.
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
    pub(crate) inner: Arc<Users>,
}

/// What everybody who uses a runtime refers to; the thread that serves its shares refers to what is inside. The last user
/// ends that thread, so that the runtime ends where it was dropped last, and before that drop has returned.
pub(crate) struct Users(pub(crate) Arc<RuntimeInner>);

impl Deref for Users {
    type Target = RuntimeInner;

    #[inline]
    fn deref(&self) -> &RuntimeInner {
        &self.0
    }
}

impl Users {
    /// What is shared, with the thread that serves it.
    pub(crate) fn sharing(&self, operation: &'static str) -> Result<&Arc<Sharing>> {
        let sharing = match self.sharing.get() {
            Some(sharing) => sharing,
            None => {
                let fresh = Arc::new(Sharing::new(self.generation, operation)?);
                self.sharing.get_or_init(|| fresh)
            }
        };
        sharing.start(&self.0, operation)?;
        Ok(sharing)
    }
}

impl Drop for Users {
    fn drop(&mut self) {
        if self.0.generation.is_current()
            && let Some(sharing) = self.0.sharing.get()
            && !self.0.backend.is_exiting()
        {
            sharing.stop();
        }
        if in_capture() {
            capture::let_go(Arc::clone(&self.0));
        }
    }
}

pub(crate) struct RuntimeInner {
    pub(crate) backend: Arc<dyn Backend>,
    host_memory: HostMemory,
    pub(crate) generation: Generation,
    pub(crate) numerics: Numerics,
    pub(crate) devices: Box<[DeviceState]>,
    pub(crate) ledger: Ledger,
    pub(crate) blas_handles: HandlePool<PooledHandle>,
    pub(crate) lt_handles: HandlePool<PooledHandle>,
    pub(crate) host_cache: HostCache,
    deferred: DeferredFrees,
    /// Blocks of device memory whose last use could not be marked: freed when the runtime ends.
    stranded: Mutex<Vec<DeferredFree>>,
    /// Threads that free device memory. They may wait for streams.
    pub(crate) device_rounds: Rounds,
    /// Threads that free page-locked memory. They never wait for a stream.
    host_rounds: Rounds,
    /// Made with the first share or open.
    sharing: OnceLock<Arc<Sharing>>,
    /// Handles whose one stream has ended, for devices that want one handle for each stream.
    spare_handles: Mutex<Vec<SpareHandle>>,
    /// Releases that the backend refused.
    failed_releases: AtomicU64,
    pub(crate) graphs: Graphs,
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

/// An operation that was not enqueued as a whole.
pub(crate) struct NotEnqueued {
    pub(crate) error: Error,
    /// Whether a part of it was.
    pub(crate) in_part: bool,
}

/// What the runtime knows about a device.
pub(crate) struct DeviceState {
    pub(crate) info: DeviceInfo,
    pub(crate) capabilities: Capabilities,
    pub(crate) events: Arc<EventPool>,
    pub(crate) workspaces: WorkspacePool,
    pub(crate) capture_gate: CaptureGate,
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

    /// Returns whether handles of a kind stay with one stream. They do if the vendor requires it, or if products keep
    /// intermediate results in the handle's own memory. A plan made for no workspace has no such results.
    pub(crate) fn handle_per_stream(&self, kind: BlasKind) -> bool {
        self.capabilities.handle_per_stream || (kind == BlasKind::Blas && self.blas_workspace_bytes == 0)
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
    /// Events that the pools made and keep, over all devices: completion events of recent work, and idle ones.
    pub events: u64,
    /// The idle events among them, kept for reuse. [`Runtime::trim`] destroys them.
    pub idle_events: u64,
    /// The cache of page-locked host memory.
    pub host: HostCacheStatistics,
    /// What is shared with other processes.
    pub sharing: SharingStatistics,
    /// What captures and graphs hold.
    pub graphs: GraphStatistics,
    /// Releases that the backend refused.
    pub failed_releases: u64,
    /// Streams, events and graphs among them that still wait to be destroyed. [`Runtime::reclaim`], [`Runtime::trim`]
    /// and the end of the runtime retry them. An object that the backend answers for with `InvalidHandle` no longer
    /// exists, so it is not retried.
    pub refused_destroys: u64,
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
            let info = backend.device_info(ordinal)?;
            Ok(DeviceState {
                capture_gate: CaptureGate::of(identity.tag, &info),
                info,
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
            host_memory: HostMemory::new(backend.host_allocator(), devices.iter().map(|device| &device.capabilities)),
            backend,
            generation,
            numerics: options.numerics,
            devices,
            ledger: Ledger::default(),
            blas_handles: HandlePool::new(),
            lt_handles: HandlePool::new(),
            host_cache: HostCache::new(options.host_cache_bytes),
            deferred: DeferredFrees::default(),
            stranded: Mutex::default(),
            device_rounds: Rounds::default(),
            host_rounds: Rounds::default(),
            sharing: OnceLock::new(),
            spare_handles: Mutex::default(),
            graphs: Graphs::default(),
            failed_releases: AtomicU64::new(0),
            left_at_exit: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        };
        Ok(Self { inner: Arc::new(Users(Arc::new(inner))) })
    }

    /// Who the backend is.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        self.inner.backend.identity()
    }

    /// The backend itself. The caller must keep the memory that a capture begun here records, because core does not
    /// know of it.
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
    /// a stream is synchronised. It also retries streams, events and graphs that the backend refused to destroy. In a
    /// thread inside a capture it does nothing.
    ///
    /// A vendor's free may wait for all work on the device. CUDA's does, and it blocks other threads that allocate or
    /// enqueue meanwhile. For short-lived memory beside long work, use [`Stream::allocate`](crate::Stream::allocate),
    /// or keep the buffers.
    ///
    /// # Errors
    /// What the backend gives when it is asked about an event; nothing is lost.
    pub fn reclaim(&self) -> Result<()> {
        self.inner.check("reclaim")?;
        self.inner.retry_refused().and(self.inner.reclaim(false))
    }

    /// Gives back what is cached and not in use: idle handles, workspaces of ended streams, free page-locked blocks,
    /// unused mappings of other processes' memory, and idle events.
    ///
    /// # Errors
    /// The first refusal of the backend; the rest is given back all the same. `Capture` in a thread that is inside a
    /// capture. Handles stay while any runtime captures on a device of this runtime.
    pub fn trim(&self) -> Result<()> {
        self.inner.check("trim")?;
        refuse_in_capture("trim")?;
        if let Some(sharing) = self.inner.sharing.get() {
            sharing.unmap_idle(&self.inner);
        }
        self.inner.trim()
    }

    /// What the pools hold and did.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        let inner = &*self.inner;
        if !inner.generation.is_current() {
            return Statistics::default();
        }
        let add = |sum: (u64, u64), held: (u64, u64)| (sum.0 + held.0, sum.1 + held.1);
        let (workspaces, workspace_bytes) =
            inner.devices.iter().map(|device| device.workspaces.held()).fold((0, 0), add);
        let (events, idle_events) = inner.devices.iter().map(|device| device.events.held()).fold((0, 0), add);
        let (remnant_blocks, remnant_bytes) = inner.host_memory.remnants();
        Statistics {
            blas_handles: inner.blas_handles.statistics(),
            lt_handles: inner.lt_handles.statistics(),
            workspaces,
            workspace_bytes,
            events,
            idle_events,
            host: HostCacheStatistics { remnant_blocks, remnant_bytes, ..inner.host_cache.statistics() },
            sharing: inner.sharing.get().map(|sharing| sharing.statistics()).unwrap_or_default(),
            graphs: inner.graphs.statistics(inner.devices.iter().map(|device| &device.capture_gate)),
            failed_releases: inner.failed_releases.load(Ordering::Relaxed),
            refused_destroys: inner.graphs.refused(),
            left_at_exit: inner.left_at_exit.load(Ordering::Relaxed),
        }
    }

    /// Opens a buffer that another process shares, or the original where it is this runtime's own. Returns when the device
    /// work that was enqueued before the share is done.
    ///
    /// The first open of an allocation asks its exporter and maps the memory; the mapping is kept for further opens. The
    /// buffer is used like any other and keeps the memory in the exporter; dropping it does not wait.
    ///
    /// # Errors
    /// - `Expired`: the exporter has ended or freed the buffer, or the ticket is of another boot or machine.
    /// - `InvalidArgument`: the range is no whole number of values of `T`, or starts between two.
    /// - `DeviceMissing`: this process does not see the ticket's device.
    /// - `PermissionDenied`: the exporter belongs to another user.
    /// - `Unsupported`: the device here does not have the ticket's transport.
    /// - `InvalidState`: the exporter is stopped, or has not answered for 10 seconds. The wait is 2 seconds for an
    ///   exporter that did not answer the last time.
    /// - `OperatingSystem`: no descriptor, thread or address is left, here or in the exporter.
    /// - `Capture`: this thread is inside a capture.
    pub fn open_shared<T: Element>(&self, ticket: &Ticket) -> Result<DeviceBuffer<T>> {
        const OPERATION: &str = "open_shared";
        let inner = &self.inner;
        inner.check(OPERATION)?;
        refuse_in_capture(OPERATION)?;
        let size = size_of::<T>() as u64;
        if size == 0 || !ticket.offset.is_multiple_of(size) || !ticket.length.is_multiple_of(size) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                OPERATION,
                format!("{} bytes at offset {} are no values of {} bytes each", ticket.length, ticket.offset, size),
            )
            .with_hint("open the ticket with the type that was shared"));
        }
        let start = usize::try_from(ticket.offset / size).unwrap_or(usize::MAX);
        let range = start..start.saturating_add(usize::try_from(ticket.length / size).unwrap_or(usize::MAX));
        let uuid = ticket.device_uuid();
        let device = inner.devices.iter().find(|device| device.info.uuid == uuid).ok_or_else(|| {
            Error::new(
                ErrorKind::DeviceMissing,
                OPERATION,
                format!(
                    "none of the {} devices here has the UUID {:032x}",
                    inner.devices.len(),
                    u128::from_be_bytes(uuid)
                ),
            )
            .with_hint("make the exporter's device visible to this process")
        })?;
        let sharing = inner.sharing("open_shared")?;
        if sharing.is_own(ticket) {
            return Ok(DeviceBuffer::part(sharing.original(ticket, inner)?, range));
        }
        if !device.capabilities.ipc_transports.contains(ticket.transport) {
            return Err(Error::lacks(OPERATION, "ipc_transports"));
        }
        let import = sharing.open(ticket, device.info.ordinal, inner)?;
        Ok(DeviceBuffer::imported(self.clone(), import, range))
    }

    /// Looks after what other processes have let go of, and gives back what was only kept for them. This also happens by
    /// itself, as soon as they let go or die. Returns the bytes that nobody else holds any more. In a thread that is inside a
    /// capture it does nothing.
    ///
    /// # Errors
    /// `Forked` or `ShuttingDown`.
    pub fn collect(&self) -> Result<u64> {
        self.inner.check("collect")?;
        let Some(sharing) = self.inner.sharing.get().filter(|_| !in_capture()) else { return Ok(0) };
        let (_, before) = sharing.limbo();
        sharing.collect(&self.inner);
        let (_, after) = sharing.limbo();
        Ok(before.saturating_sub(after))
    }

    /// The block of device memory that an address points into, if this runtime gave it out.
    #[must_use]
    pub fn block_of(&self, ptr: DevicePtr) -> Option<DeviceBlockInfo> {
        if self.inner.generation.is_current() { self.inner.ledger.find_device(ptr) } else { None }
    }

    /// Ends the runtime. Waits for captures of other runtimes on its devices and for the devices themselves, then frees
    /// everything. Returns the objects that the backend still counts as alive: none, unless other code uses the same
    /// backend.
    ///
    /// # Errors
    /// - `InvalidState`: a device, stream, event, buffer or clone of the runtime is alive, or another process has a
    ///   buffer of it open. Nothing is closed, and the message counts the live objects by kind.
    /// - `Capture`: this thread is inside a capture.
    /// - Else the first refusal of the backend. The rest is freed all the same.
    pub fn close(self) -> Result<LiveObjects> {
        self.inner.check("close")?;
        refuse_in_capture("close")?;
        let backend = Arc::clone(&self.inner.backend);
        if let Some(sharing) = self.inner.sharing.get() {
            // The service refers to the runtime now and then.
            sharing.stop();
            sharing.collect(&self.inner);
            let (blocks, bytes) = sharing.limbo();
            if blocks > 0 {
                let holders = sharing.holders_of_limbo();
                sharing.start(&self.inner.0, "close")?;
                return Err(Error::new(
                    ErrorKind::InvalidState,
                    "close",
                    format!("other processes ({holders:?}) have {blocks} buffers of this runtime open, {bytes} bytes"),
                )
                .with_hint("let them drop what they have opened, or end, first"));
            }
        }
        let users = Arc::try_unwrap(self.inner).map_err(|shared| {
            if let Some(sharing) = shared.sharing.get()
                && let Err(error) = sharing.start(&shared.0, "close")
            {
                tracing::warn!("shares are not served any more: {error}");
            }
            // The remaining objects are in use elsewhere. A refusal was counted and logged.
            let _ = shared.trim();
            let others = match Arc::strong_count(&shared) - 1 {
                1 => "1 other object of the runtime is alive".to_owned(),
                others => format!("{others} other objects of the runtime are alive"),
            };
            let live = shared.backend.live_objects();
            Error::new(ErrorKind::InvalidState, "close", format!("{others}; the backend counts {live}"))
                .with_hint("drop its devices, streams, events, buffers and clones first")
        })?;
        let inner = Arc::clone(&users.0);
        drop(users);
        let mut inner = Arc::try_unwrap(inner).map_err(|_| {
            Error::new(ErrorKind::InvalidState, "close", "a stream of the runtime is being dropped by another thread")
                .with_hint("wait for the threads that use the runtime; it ends with that stream")
        })?;
        inner.give_everything_back()?;
        drop(inner);
        Ok(backend.live_objects())
    }
}

impl RuntimeInner {
    /// Frees idle objects.
    fn trim(&self) -> Result<()> {
        let handles = self.retry_refused().and(self.destroy_idle_handles());
        let memory = handles.and(self.reclaim(false)).and(self.free_idle_workspaces(false)).and(self.trim_host());
        memory.and(self.destroy_idle_events())
    }

    /// Refuses what would touch the driver in a forked child or during the end of the process.
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

    pub(crate) fn is_passed(&self, mark: &Mark, wait: bool) -> Result<bool> {
        if wait {
            self.backend.synchronize_event(mark.event())?;
            return Ok(true);
        }
        Ok(self.backend.query_event(mark.event())? == Completion::Complete)
    }

    // ---------------------------------------------------------------- device memory

    /// Refuses a request for more memory than the device has beyond live buffers. Waiting for every stream and freeing
    /// the rest could not satisfy it.
    fn check_reach(&self, device: u32, bytes: usize, refused: &Error) -> Result<()> {
        let total = self.device(device).info.memory_bytes;
        let owned = self.ledger.owned_bytes(device);
        if bytes as u64 <= total.saturating_sub(owned) {
            return Ok(());
        }
        let message =
            format!("{bytes} bytes were asked for; device {device} has {total}, of which live buffers hold {owned}");
        let error = Error::new(ErrorKind::OutOfMemory, refused.operation(), message)
            .with_hint("ask for less, or drop buffers first: waiting for streams cannot make enough room");
        Err(match refused.code() {
            Some(code) => error.with_code(code),
            None => error,
        })
    }

    /// Runs `make`. If the device has no memory left, frees unused memory and tries once more. `within` refuses
    /// requests that this cannot help.
    fn with_reclaim<T>(&self, make: impl Fn() -> Result<T>, within: impl Fn(&Error) -> Result<()>) -> Result<T> {
        self.reclaim_in_passing();
        match make() {
            // In a capture nothing is given back.
            Err(error) if error.kind() == ErrorKind::OutOfMemory && !in_capture() => {
                within(&error)?;
                let round = self.device_rounds.begin();
                if let Some(sharing) = self.sharing.get() {
                    sharing.collect(self);
                }
                // A release that is refused is counted, and keeps nobody from trying with what the others gave.
                for given_back in [self.reclaim(true), self.free_idle_workspaces(true), self.destroy_idle_handles()] {
                    if let Err(error) = given_back {
                        tracing::debug!("not everything could be given back: {error}");
                    }
                }
                drop(round);
                // What other threads had in hand meanwhile is free now.
                self.device_rounds.wait();
                make()
            }
            result => result,
        }
    }

    /// Allocates device memory; where there is none left, gives back what is not in use and tries once more.
    ///
    /// `home` is the stream in whose order stream-ordered memory is allocated. The caller enters the block in the
    /// ledger.
    fn allocate_device(
        &self,
        device: u32,
        options: &AllocateOptions,
        home: Option<&StreamCore>,
    ) -> Result<DeviceBlockInfo> {
        let make = || {
            let _turn = home.map(|home| home.enter_outside("allocate")).transpose()?;
            self.backend.allocate(device, options)
        };
        let ptr = self.with_reclaim(make, |refused| self.check_reach(device, options.bytes, refused))?;
        Ok(DeviceBlockInfo { device, base: ptr, bytes: options.bytes })
    }

    /// Allocates device memory for a buffer.
    pub(crate) fn allocate_buffer(
        &self,
        device: u32,
        options: &AllocateOptions,
        home: Option<&StreamCore>,
    ) -> Result<DevicePtr> {
        let block = self.allocate_device(device, options, home)?;
        self.ledger.insert_owned(block)?;
        Ok(block.base)
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
        if free.unmarked {
            return self.strand(free);
        }
        self.ledger.set_dropped(free.ptr);
        self.deferred.push(free);
    }

    /// Keeps a block for the end of the runtime, because nobody can tell when its streams are done with it.
    pub(crate) fn strand(&self, free: DeferredFree) {
        self.stranded.lock().push(free);
    }

    /// Frees deferred blocks on the way to something else, which does not fail because a release did: those are counted.
    pub(crate) fn reclaim_in_passing(&self) {
        if self.deferred.len() > 0
            && !in_capture()
            && let Err(error) = self.reclaim(false)
        {
            tracing::debug!("memory could not be reclaimed in passing: {error}");
        }
        if self.host_cache.may_exceed_cap() {
            self.keep_host_cache_to_cap();
        }
    }

    /// Frees the deferred blocks whose streams have passed; with `wait`, waits for them. Without, it does not ask after
    /// every one of a long list on a busy device: those that were not asked after come first the next time.
    pub(crate) fn reclaim(&self, wait: bool) -> Result<()> {
        const ENOUGH_PENDING: usize = 16;
        if in_capture() {
            return Ok(());
        }
        let mut result = self.destroy_dropped();
        let mut pending = 0;
        for _ in 0..self.deferred.len() {
            if pending == ENOUGH_PENDING {
                break;
            }
            let Some(mut free) = self.deferred.pop() else { break };
            free.mark_later(self);
            if free.unmarked {
                self.strand(free);
                continue;
            }
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
            if !free.after.is_empty() || !free.later.is_empty() {
                pending += 1;
                self.deferred.push(free);
                continue;
            }
            // SAFETY: every stream that used the block has passed its last use, and its owner is gone.
            match unsafe { self.free_deferred(&free) } {
                Ok(true) => {}
                Ok(false) => {
                    pending += 1;
                    self.deferred.push(free);
                }
                Err(error) => {
                    // The end of the runtime tries once more.
                    self.strand(free);
                    result = result.and(self.note(Err(error)));
                }
            }
        }
        result
    }

    /// Frees a block, stream-ordered memory in the order of its home stream; false where that takes part in a capture.
    ///
    /// # Safety
    /// The owner is gone, and every use by a stream is passed or, for stream-ordered memory, precedes a mark of the block.
    pub(crate) unsafe fn free_deferred(&self, free: &DeferredFree) -> Result<bool> {
        let Some(home) = &free.home else {
            // SAFETY: as promised by the caller.
            return unsafe { self.free_device(free.device, free.ptr, None) }.map(|()| true);
        };
        let in_order = || {
            // Where other code captures the stream, that ends too.
            let Ok(turn) = home.enter("free") else { return Ok(false) };
            if turn.recording.is_some() || home.refuse_if_captured("free").is_err() {
                return Ok(false);
            }
            free.after.iter().try_for_each(|mark| self.backend.stream_wait_event(home.id, mark.event()))?;
            // SAFETY: the ledger, which is asked below, says that the block came from `allocate` for this device and was not
            // freed. The home stream waits for every use.
            unsafe { self.backend.free(free.device, free.ptr, Some(home.id)) }.map(|()| true)
        };
        let block = self.ledger.remove_device(free.device, free.ptr)?;
        let freed = in_order();
        if !matches!(freed, Ok(true)) {
            // Still allocated as far as anyone knows. The range is free in the ledger, so this cannot fail.
            let _ = self.ledger.insert_device(block);
        }
        freed
    }

    // ---------------------------------------------------------------- sharing

    pub(crate) fn ipc(&self, operation: &'static str) -> Result<Arc<dyn IpcSharing>> {
        self.backend.ipc_sharing().ok_or_else(|| Error::lacks(operation, "ipc_transports"))
    }

    /// The owner of a block drops it. Gives back what is to be freed now: nothing where other processes have it open.
    pub(crate) fn close_export(&self, export: Option<ExportKey>, free: DeferredFree) -> Option<DeferredFree> {
        match (export, self.sharing.get()) {
            (Some(export), Some(sharing)) => sharing.close(export, free),
            _ => Some(free),
        }
    }

    /// Lets go of memory of another process once the streams have passed their marks.
    pub(crate) fn release_import(&self, import: Arc<Import>, after: Vec<Arc<Mark>>, unmarked: bool) {
        if let Some(sharing) = self.sharing.get() {
            sharing.release_after(import, after, unmarked);
        }
    }

    /// Maps memory of another process.
    pub(crate) fn map_shared(&self, device: u32, handle: &MemoryHandle) -> Result<DevicePtr> {
        let ipc = self.ipc("open_shared")?;
        let ptr = self.with_reclaim(|| ipc.open_memory(device, handle), |_| Ok(()))?;
        let bytes = usize::try_from(handle.bytes).unwrap_or(usize::MAX);
        self.ledger.insert_device(DeviceBlockInfo { device, base: ptr, bytes }).inspect_err(|_| {
            // SAFETY: just opened, and nobody was told of it.
            let closed = unsafe { ipc.close_memory(device, ptr) };
            let _ = self.note(closed);
        })?;
        Ok(ptr)
    }

    /// Undoes [`RuntimeInner::map_shared`]. Returns `false` if the backend refuses; then the memory is mapped as
    /// before.
    ///
    /// # Safety
    /// Nobody uses the mapping any more, outstanding device work included.
    pub(crate) unsafe fn unmap_shared(&self, device: u32, ptr: DevicePtr) -> bool {
        let closed = self.ipc("close_memory").and_then(|ipc| {
            let block = self.ledger.remove_device(device, ptr)?;
            // SAFETY: the ledger says that it is mapped; the caller promises that nobody uses it.
            unsafe { ipc.close_memory(device, ptr) }.inspect_err(|_| {
                // The range is free in the ledger, so this cannot fail.
                let _ = self.ledger.insert_device(block);
            })
        });
        // Refusals are counted and logged.
        self.note(closed).is_ok()
    }

    // ---------------------------------------------------------------- workspaces

    /// A workspace of `bytes` for work that is enqueued on `stream` from here on; `None` for 0 bytes.
    ///
    /// # Errors
    /// `Capture` where the stream takes part in a capture, which cannot wait for earlier work of the workspace.
    pub(crate) fn take_workspace(&self, stream: &StreamCore, bytes: usize) -> Result<Option<Workspace>> {
        let device = self.device(stream.id.device());
        if bytes == 0 {
            return Ok(None);
        }
        if let Some(idle) = device.workspaces.take(bytes) {
            let wait = |mark: &Arc<Mark>| {
                let _turn = stream.enter_outside("stream_wait_event")?;
                self.backend.stream_wait_event(stream.id, mark.event())
            };
            if let Some(Err(error)) = idle.after.as_ref().map(wait) {
                device.workspaces.give_back(idle);
                return Err(error);
            }
            return Ok(Some(idle.workspace));
        }
        self.allocate_workspace(stream.id.device(), bytes).map(Some)
    }

    /// A new workspace.
    pub(crate) fn allocate_workspace(&self, ordinal: u32, bytes: usize) -> Result<Workspace> {
        let device = self.device(ordinal);
        if in_capture() && !device.capabilities.create_during_capture {
            return Err(warm_up_first("allocate", "a workspace"));
        }
        let block = self.allocate_device(ordinal, &AllocateOptions::new(bytes), None)?;
        self.ledger.insert_device(block)?;
        let ptr = block.base;
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
        Ok(workspace)
    }

    /// Takes a workspace back after the work enqueued on `stream` so far.
    pub(crate) fn give_back_workspace(&self, workspace: Workspace, stream: &StreamCore) {
        match stream.mark(self) {
            Ok(mark) => self.give_back_workspace_after(workspace, stream.id.device(), mark),
            // It stays in the list of all workspaces, is used by nobody, and is freed when the runtime ends.
            Err(error) => self.count_failed_release(&error),
        }
    }

    pub(crate) fn give_back_workspace_after(&self, workspace: Workspace, device: u32, after: Arc<Mark>) {
        self.device(device).workspaces.give_back(IdleWorkspace { workspace, after: Some(after) });
    }

    fn destroy_idle_events(&self) -> Result<()> {
        let mut result = Ok(());
        for event in self.devices.iter().flat_map(|device| device.events.take_all()) {
            result = result.and(self.destroy(Dropped::Event(event)));
        }
        result
    }

    /// Retries refused destroys once, outside captures.
    fn retry_refused(&self) -> Result<()> {
        if in_capture() { Ok(()) } else { self.destroy_refused() }
    }

    /// Retries refused destroys as long as any succeeds, and once more.
    fn insist_on_refused(&self) -> Result<()> {
        let mut in_vain = 0;
        loop {
            let waiting = self.graphs.refused();
            let result = self.destroy_refused();
            in_vain = if self.graphs.refused() < waiting { 0 } else { in_vain + 1 };
            if result.is_ok() || in_vain == 2 {
                return result;
            }
        }
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
        match self.take_spare_handle(device, kind) {
            Some(pooled) => Ok(pooled),
            None => self.make_handle(device, kind),
        }
    }

    /// Makes a handle.
    pub(crate) fn make_handle(&self, device: u32, kind: BlasKind) -> Result<PooledHandle> {
        let capabilities = &self.device(device).capabilities;
        // What a thread may do in a capture does not depend on the device.
        let _quiet = match capabilities.create_during_capture {
            true => None,
            false => Some(self.quiet().ok_or_else(|| warm_up_first("create_blas_handle", "a handle"))?),
        };
        let options = BlasOptions::new(kind);
        // Vendors start from different defaults: the handle's modes are unknown until the first product sets them.
        let handle = self.with_reclaim(|| self.backend.create_blas_handle(device, &options), |_| Ok(()))?;
        Ok(PooledHandle::new(handle, kind))
    }

    /// Keeps captures on all devices from beginning; `None` where one is open.
    fn quiet(&self) -> Option<Vec<Quiet>> {
        self.devices.iter().map(|device| device.capture_gate.quiet()).collect()
    }

    /// Destroys a handle that another one has replaced. While a capture is open, the handle waits with the idle ones.
    pub(crate) fn discard_handle(&self, mut pooled: PooledHandle) {
        match self.quiet() {
            // A refusal is counted.
            Some(_quiet) => drop(self.note(pooled.handle.destroy())),
            // Without a mark no stream may reuse it.
            None => {
                let device = pooled.handle.device();
                self.spare_handles.lock().push(SpareHandle { device, pooled, after: None });
            }
        }
    }

    /// Destroys the handles that no thread has claimed. A vendor's handle holds tens of megabytes of device memory.
    /// They stay while any runtime captures: destroying one waits for the device, which would lose the capture.
    fn destroy_idle_handles(&self) -> Result<()> {
        let Some(_quiet) = self.quiet() else { return Ok(()) };
        let idle = [&self.blas_handles, &self.lt_handles].map(HandlePool::take_idle).into_iter().flatten();
        let spare = std::mem::take(&mut *self.spare_handles.lock()).into_iter().map(|spare| spare.pooled);
        let mut result = Ok(());
        for mut pooled in idle.chain(spare) {
            result = result.and(self.note(pooled.handle.destroy()));
        }
        result
    }

    /// Keeps the handles that were tied to an ending stream for other streams. Handles that the backend cannot unbind
    /// end with it.
    pub(crate) fn spare_handles_of(&self, keys: [PoolKey; 2], after: Option<&Arc<Mark>>) {
        let pools = [&self.blas_handles, &self.lt_handles].into_iter().zip(keys);
        let of_stream = pools.filter(|(_, key)| key.affinity != 0);
        for mut pooled in of_stream.flat_map(|(pool, key)| pool.take_key(key)) {
            match pooled.unbind() {
                Ok(()) => {
                    let spare = SpareHandle { device: pooled.handle.device(), pooled, after: after.cloned() };
                    self.spare_handles.lock().push(spare);
                }
                Err(_) => self.discard_handle(pooled),
            }
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
            Some(block) => Ok(block),
            None => self.take_pinned_slow(bytes, class, block_bytes),
        }
    }

    #[cold]
    fn take_pinned_slow(&self, bytes: usize, class: usize, block_bytes: usize) -> Result<OwnedBlock> {
        self.check("pinned")?;
        if let Some(block) = self.host_cache.take_waiting(class, bytes, |mark| self.is_surely_passed(mark)) {
            return Ok(block);
        }
        // While blocks were in hand, others may have found less cached than there is.
        if self.host_cache.may_exceed_cap() {
            self.keep_host_cache_to_cap();
        }
        let allocate = || self.host_memory.allocate(block_bytes, |error| self.count_failed_release(error));
        let (ptr, piece_bytes) = match allocate() {
            Err(error) if error.kind() == ErrorKind::OutOfMemory && !in_capture() => {
                let round = self.host_rounds.begin();
                // A release that is refused is counted, and keeps nobody from trying with what the others gave.
                if let Err(error) = self.trim_host() {
                    tracing::debug!("not everything could be given back: {error}");
                }
                drop(round);
                self.host_rounds.wait();
                allocate()?
            }
            result => result?,
        };
        let block = PinnedBlock::new(ptr, block_bytes, class, piece_bytes);
        let info = HostBlockInfo { base: ptr, bytes: block_bytes };
        self.ledger.insert_host(HostBlock { info, class, uses: Arc::clone(&block.uses) });
        self.host_cache.count_given(&block, bytes, true);
        Ok(block)
    }

    /// Whether the mark is passed, as far as the backend can tell. An error says nothing about the work: the block keeps
    /// waiting, and the end of the runtime frees it.
    fn is_surely_passed(&self, mark: &Mark) -> bool {
        self.is_passed(mark, false).unwrap_or(false)
    }

    #[inline]
    pub(crate) fn give_back_pinned(&self, block: OwnedBlock, requested: usize) {
        if self.host_cache.give_back(block, requested) {
            self.keep_host_cache_to_cap();
        }
    }

    /// Lets go of a block that a capture, a graph or a note by address has kept.
    pub(crate) fn let_go_pinned(&self, kept: KeptBlock) {
        if self.host_cache.let_go(kept) {
            self.keep_host_cache_to_cap();
        }
    }

    /// In a capture nothing is given back; its end makes up for that.
    #[cold]
    #[inline(never)]
    fn keep_host_cache_to_cap(&self) {
        if in_capture() || self.backend.is_exiting() {
            return;
        }
        self.host_cache.keep_to_cap(
            |mark| self.is_surely_passed(mark),
            // SAFETY: the block is in nobody's hands and no stream uses it any more.
            |block| unsafe { self.free_pinned(block) }.0,
        );
    }

    /// Refuses a block of which nobody can tell whether a device still uses it.
    pub(crate) fn check_marked(uses: &BlockUses) -> Result<()> {
        if uses.unmarked.load(Ordering::Relaxed) {
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
        self.check_access(block)?;
        if block.uses.is_recorded(!writes_only) {
            return Err(Error::new(
                ErrorKind::InvalidState,
                "pinned",
                "a graph has recorded this memory, and its launches could race with a slice of the values",
            )
            .with_hint("use `read_with` or `write_with`, or drop the graph first"));
        }
        self.wait_for_marks(block, block.uses.marks(writes_only))
    }

    fn check_access(&self, block: &PinnedBlock) -> Result<()> {
        self.check("pinned")?;
        Self::check_marked(&block.uses)?;
        if block.uses.is_recording() {
            return Err(Error::new(
                ErrorKind::Capture,
                "pinned",
                "a capture that is open uses this memory: what it recorded is not executed",
            )
            .with_hint("read and write before the capture, or between launches of the graph; the capture goes on"));
        }
        Ok(())
    }

    fn wait_for_marks(&self, block: &PinnedBlock, marks: Vec<Arc<Mark>>) -> Result<()> {
        for mark in marks {
            self.backend.synchronize_event(mark.event())?;
            block.uses.forget(&mark);
        }
        Ok(())
    }

    /// Access by the CPU that launches of graphs are kept from, once the streams that use the block are done.
    pub(crate) fn access_pinned<'b>(&self, block: &'b PinnedBlock, writes: bool) -> Result<CpuAccess<'b>> {
        self.check_access(block)?;
        loop {
            match block.uses.begin_cpu(writes, self.generation) {
                // What was being enqueued when it began may have failed since.
                Ok(access) => return Self::check_marked(&block.uses).map(|()| access),
                Err(marks) => self.wait_for_marks(block, marks)?,
            }
        }
    }

    /// Frees the page-locked blocks that nobody uses.
    fn trim_host(&self) -> Result<()> {
        // First: what becomes a remnant below was tried a moment ago.
        let mut result = self.host_memory.release_remnants(|error| self.count_failed_release(error));
        self.host_cache.trim(
            |mark| self.is_surely_passed(mark),
            |block| {
                // SAFETY: the block is in nobody's hands and no stream uses it any more.
                let (taken, freed) = unsafe { self.free_pinned(block) };
                result = std::mem::replace(&mut result, Ok(())).and(freed);
                taken
            },
        );
        result
    }

    /// Frees a block. Says whether it is gone, and what the backend refused, which is counted.
    ///
    /// # Safety
    /// Nobody uses the block any more, outstanding device work included.
    unsafe fn free_pinned(&self, block: &PinnedBlock) -> (bool, Result<()>) {
        let known = match self.ledger.remove_host(block.ptr) {
            Ok(known) => known,
            Err(error) => return (false, self.note(Err(error))),
        };
        // SAFETY: the block came from there (the ledger knows it); nobody uses it (the caller's promise).
        let refused = match unsafe { self.host_memory.free(block.ptr, block.bytes, block.piece_bytes) } {
            Freed::Whole => Ok(()),
            Freed::InPart(error) => Err(error),
            Freed::Refused(error) => {
                self.ledger.insert_host(known);
                return (false, self.note(Err(error)));
            }
        };
        self.host_cache.count_freed(block);
        (true, self.note(refused))
    }

    /// Records that `stream` uses a block, in an operation that is enqueued by `enqueue`.
    ///
    /// Uses of other streams that would race with it on the host memory are waited for first, on the device. Where the
    /// operation is recorded in a capture, each launch does that instead; it is refused there unless `recordable`.
    pub(crate) fn use_pinned(
        &self,
        operation: &'static str,
        block: &PinnedBlock,
        stream: &StreamCore,
        writes: bool,
        recordable: bool,
        enqueue: impl FnOnce(&mut TurnState) -> Result<(), NotEnqueued>,
    ) -> Result<()> {
        let begun = block.uses.begin(stream.key, writes).map_err(|_| {
            // The borrow of the buffer keeps such access and copies apart.
            Error::new(ErrorKind::InvalidState, operation, "the CPU is accessing the page-locked memory")
        })?;
        // Not before: an operation that this one has waited for may have failed.
        Self::check_marked(&block.uses)?;
        // The event is had before anything is enqueued, so that only the record itself can fail afterwards.
        let mut mark = self.device(stream.id.device()).events.take(&*self.backend)?;
        let mut turn = if recordable { stream.enter(operation)? } else { stream.enter_outside(operation)? };
        if let Some(recording) = &mut turn.recording {
            let surplus = recording.keep_pinned(block.keep(), writes);
            let enqueued = enqueue(&mut turn);
            drop(turn);
            surplus.into_iter().for_each(|kept| self.let_go_pinned(kept));
            return enqueued.map_err(|refused| refused.error);
        }
        for mark in &begun.racing {
            self.backend.stream_wait_event(stream.id, mark.event())?;
        }
        let enqueued = match enqueue(&mut turn) {
            Ok(()) => Ok(()),
            // The stream uses the block, as if all had been enqueued.
            Err(NotEnqueued { error, in_part: true }) => Err(error),
            Err(NotEnqueued { error, in_part: false }) => return Err(error),
        };
        if let Err(error) = stream.record(&mut turn, &mut mark) {
            // Without a mark, waiting is all that is left. Where that fails too, nobody can tell when the device is done
            // with the block: it is never touched or given out again, and freed when the runtime ends.
            let waited = stream.wait_for_all(turn).map_err(|_| {
                block.uses.unmarked.store(true, Ordering::Relaxed);
                error
            });
            return waited.and(enqueued);
        }
        drop(turn);
        if begun.settle(Arc::new(mark)) {
            self.forget_passed(&block.uses);
        }
        enqueued
    }

    /// Forgets uses of a block that are over. So a buffer that outlives many streams does not keep an event for each.
    #[cold]
    pub(crate) fn forget_passed(&self, uses: &BlockUses) {
        if !in_capture() {
            uses.forget_passed(|mark| self.is_surely_passed(mark));
        }
    }

    // ---------------------------------------------------------------- the end

    /// Leaves every handle to the end of the process.
    fn leave_handles(&mut self) {
        let pooled = [&mut self.blas_handles, &mut self.lt_handles].map(HandlePool::take_all).into_iter().flatten();
        let spare = std::mem::take(self.spare_handles.get_mut()).into_iter().map(|spare| spare.pooled);
        pooled.chain(spare).for_each(std::mem::forget);
    }

    /// Releases what the runtime holds, and retries the refused ones once after all others: nobody can retry later. Returns
    /// the first error that remains.
    fn twice<T>(&self, held: impl IntoIterator<Item = T>, mut release: impl FnMut(&T) -> Result<()>) -> Result<()> {
        let refused: Vec<T> = held.into_iter().filter(|one| release(one).is_err()).collect();
        refused.iter().map(release).fold(Ok(()), Result::and)
    }

    /// Waits for the devices and frees everything that the runtime holds. Called once no other object refers to it.
    fn give_everything_back(&mut self) -> Result<()> {
        if self.closed.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        // The next steps would lose the captures of other runtimes on the same devices.
        let gates = self.devices.iter().map(|device| &device.capture_gate);
        let quiet = if in_capture() { self.quiet() } else { Some(CaptureGate::wait_until_quiet(gates)) };
        let Some(_quiet) = quiet else {
            // The thread of the capture is ending, so no later call ends the runtime.
            tracing::warn!("a runtime ended inside a capture; its memory and objects stay allocated");
            self.leave_handles();
            return Err(capture::nothing_is_executed("close"));
        };
        // The last user of the runtime has ended the service; where that was the service itself, it does nothing more.
        if let Some(sharing) = self.sharing.get() {
            sharing.hang_up();
        }
        // A refusal here is retried below.
        let _ = self.destroy_dropped();
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
        if let Some(sharing) = self.sharing.get().map(Arc::clone) {
            sharing.end_imports(self);
            sharing.collect(self);
            let (blocks, bytes) = sharing.limbo();
            if blocks > 0 {
                let holders = sharing.holders_of_limbo();
                tracing::warn!("{blocks} buffers ({bytes} bytes) stay allocated: processes {holders:?} have them open");
            }
        }
        let stranded = std::mem::take(self.stranded.get_mut());
        let frees: Vec<_> = std::iter::from_fn(|| self.deferred.pop()).chain(stranded).collect();
        result = result.and(self.twice(frees, |free| {
            // SAFETY: the devices have executed everything, and the owner of the block is gone.
            self.note(unsafe { self.free_deferred(free) }.map(|_| ()))
        }));
        let blocks = (0..size_class::COUNT).flat_map(|class| {
            let cache = &self.host_cache;
            let any = move || cache.pop_free(class).or_else(|| cache.pop_waiting(class));
            std::iter::from_fn(move || any().or_else(|| cache.pop_unmarked(class)))
        });
        // Marks go back to their pools, also where the free is refused.
        let blocks: Vec<_> = blocks.collect();
        for block in &blocks {
            block.uses.are_over(|_| true);
        }
        let mut in_part = Ok(());
        result = result.and(self.twice(blocks, |block| {
            // SAFETY: the devices have executed everything, and no buffer owns the block.
            let (is_gone, freed) = unsafe { self.free_pinned(block) };
            if is_gone {
                // What is left of it is a remnant, which is released below.
                in_part = std::mem::replace(&mut in_part, Ok(())).and(freed);
                return Ok(());
            }
            freed
        }));
        result = result.and(in_part);
        result = result.and(self.host_memory.release_remnants(|error| self.count_failed_release(error)));
        for device in &self.devices {
            result = result.and(self.twice(device.workspaces.take_all(), |workspace| {
                // SAFETY: the devices have executed everything, and the handles that had it bound are destroyed.
                self.note(unsafe { self.free_device(device.info.ordinal, workspace.ptr, None) })
            }));
        }
        // A refusal here is retried like the rest.
        let _ = self.destroy_idle_events();
        result.and(self.insist_on_refused())
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
        let lists = (self.stranded.lock(), self.spare_handles.lock(), self.host_memory.hold_lock());
        let sharing = self.sharing.get().map(|sharing| sharing.hold_locks());
        let places: Vec<_> = self.devices.iter().map(|device| device.legacy_default.lock()).collect();
        let captures: Vec<_> = self.devices.iter().map(|device| device.capture_gate.hold_lock()).collect();
        let graphs = (captures, self.graphs.hold_lock(), crate::gate::hold_registry());
        let rounds = (self.device_rounds.hold_lock(), self.host_rounds.hold_lock());
        crate::testing::Held((devices, handles, memory, lists, places, graphs, rounds, sharing))
    }

    /// Whether any lock of the runtime's pools is held: where only one thread is at work, by that thread.
    pub(crate) fn is_locked(&self) -> bool {
        let of_device = |device: &DeviceState| {
            device.events.is_locked()
                || device.workspaces.is_locked()
                || device.legacy_default.is_locked()
                || device.capture_gate.is_locked()
        };
        self.devices.iter().any(of_device)
            || self.graphs.is_locked()
            || self.blas_handles.is_locked()
            || self.lt_handles.is_locked()
            || self.ledger.is_locked()
            || self.host_cache.is_locked()
            || self.host_memory.is_locked()
            || self.deferred.is_locked()
            || self.stranded.is_locked()
            || self.spare_handles.is_locked()
            || self.device_rounds.is_locked()
            || self.host_rounds.is_locked()
            || self.sharing.get().is_some_and(|sharing| sharing.is_locked())
    }
}

impl Drop for RuntimeInner {
    fn drop(&mut self) {
        if self.may_release() {
            // Refusals were counted and logged; a destructor has nobody to tell.
            let _ = self.give_everything_back();
        } else if self.generation.is_current() {
            if let Some(sharing) = self.sharing.get() {
                sharing.abandon();
            }
            // The process is exiting: the driver may be gone before the handles are, so they are left on purpose.
            self.leave_handles();
        }
    }
}
