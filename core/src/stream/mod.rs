//! [`Stream`]: a queue of device operations.

pub(crate) mod copies;
pub(crate) mod core;
mod order;
mod rows;
pub(crate) mod submission;
pub(crate) mod uses;
mod values;
mod workspace;

use std::fmt;
use std::sync::{Arc, OnceLock};

pub use values::Scope;

use self::core::{KeepStream, Origin, Owner, StreamCore, not_the_owner};
use crate::runtime::Runtime;
use highwater_hal::{Backend, Result, StreamId};

/// A queue of operations of one device, executed in the order of the calls.
///
/// Dropping a stream loses no work, and never waits except on ROCm, where the vendor's call waits for the stream's work. Enqueued work is executed, and buffers that were used on the stream learn
/// when it is done.
///
/// ```
/// use highwater_core::Runtime;
/// use highwater_mock::{MockGpu, MockOptions};
///
/// let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
/// let device = runtime.device(0)?;
/// let (producer, consumer) = (device.create_stream()?, device.create_stream()?);
/// let buffer = device.allocate::<u32>(1000)?;
/// producer.fill(&buffer, 7_u32)?;
/// consumer.wait(&producer.record()?)?; // the device waits, not the CPU
/// assert_eq!(consumer.download(&buffer)?, vec![7; 1000]);
/// # Ok::<(), highwater_core::Error>(())
/// ```
///
/// Any thread may use a stream, except a per-thread default stream
/// ([`Device::per_thread_default_stream`](crate::Device::per_thread_default_stream)), whose calls return `InvalidState`
/// in other threads. Any thread may drop a stream and the buffers that it used.
#[derive(Clone)]
pub struct Stream {
    runtime: Runtime,
    core: Arc<StreamCore>,
    /// The same stream, for leases that own it. So threads that each have a stream share no count.
    owned: OnceLock<Arc<Self>>,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("runtime", &self.runtime).field("core", &self.core).finish()
    }
}

impl Stream {
    pub(crate) fn new(runtime: Runtime, id: StreamId, owned: bool) -> Self {
        Self::of(runtime, id, Origin { owned, ..Origin::default() })
    }

    /// Wraps a stream that other code made and may capture, and that `keep_alive` keeps.
    pub(crate) fn foreign(runtime: Runtime, id: StreamId, keep_alive: impl Send + Sync + 'static) -> Self {
        let keep_alive = Some(Box::new(keep_alive) as KeepStream);
        Self::of(runtime, id, Origin { owned: true, foreign: true, keep_alive, ..Origin::default() })
    }

    /// Returns the calling thread's default stream.
    pub(crate) fn per_thread_default(runtime: Runtime, device: u32) -> Result<Self> {
        let id = StreamId::per_thread_default(runtime.identity().tag, device);
        let events = Arc::clone(&runtime.inner.device(device).events);
        let owner = Owner::current(events);
        let stream = Self::of(runtime, id, Origin { foreign: true, owner: Some(owner), ..Origin::default() });
        // From here on, a completion event exists.
        stream.core.enter_outside("record_event")?;
        Ok(stream)
    }

    fn of(runtime: Runtime, id: StreamId, origin: Origin) -> Self {
        let (services, workspaces) = (Arc::clone(&runtime.inner.services), Arc::clone(&runtime.inner.workspaces));
        Self::with_core(runtime, StreamCore::new(services, workspaces, id, origin))
    }

    fn with_core(runtime: Runtime, core: Arc<StreamCore>) -> Self {
        Self { runtime, core, owned: OnceLock::new() }
    }

    /// Returns the stream for an owner that outlives this borrow.
    #[inline]
    pub(crate) fn to_owned_stream(&self) -> Arc<Self> {
        Arc::clone(self.owned.get_or_init(|| Arc::new(Self::with_core(self.runtime.clone(), Arc::clone(&self.core)))))
    }

    /// Returns the legacy default stream. All users have the same one, so that they share its submission lock and its
    /// workspace.
    pub(crate) fn legacy_default(runtime: Runtime, device: u32) -> Self {
        let place = runtime.inner.legacy_streams[device as usize].lock();
        if let Some(core) = place.upgrade() {
            drop(place);
            return Self::with_core(runtime, core);
        }
        drop(place);
        let id = StreamId::legacy_default(runtime.identity().tag, device);
        let fresh = Self::new(runtime, id, false);
        let mut place = fresh.runtime.inner.legacy_streams[device as usize].lock();
        let stands = place.upgrade();
        if stands.is_none() {
            *place = Arc::downgrade(&fresh.core);
        }
        drop(place);
        match stands {
            Some(core) => Self::with_core(fresh.runtime.clone(), core),
            None => fresh,
        }
    }

    /// Returns the stream's id, for calls of the backend itself.
    #[must_use]
    pub fn id(&self) -> StreamId {
        self.core.id
    }

    /// Returns the vendor's handle of the stream as a number, for kernels and copies that the program enqueues itself.
    /// It is a `cudaStream_t` on CUDA and a `hipStream_t` on ROCm.
    ///
    /// The handle is valid while this stream or a clone of it lives. The caller must not destroy it, and must capture
    /// it only with [`Stream::capture`]. The caller must note the memory that its work uses: device memory before the work
    /// is enqueued, with [`Stream::note_device_use`], and page-locked memory after it, with [`Stream::note_host_use`].
    ///
    /// # Errors
    /// `Unsupported` if `foreign_objects` is false; `InvalidState` for the per-thread default stream of another thread,
    /// because the number names a different stream here; else the backend's error.
    pub fn raw(&self) -> Result<u64> {
        const OPERATION: &str = "raw_stream";
        let backend = self.backend(OPERATION)?;
        if self.core.owner.as_ref().is_some_and(|owner| !owner.is_here()) {
            return Err(not_the_owner(OPERATION));
        }
        backend.raw_stream(self.core.id)
    }

    /// Returns the ordinal of the stream's device.
    #[must_use]
    pub fn device(&self) -> u32 {
        self.core.id.device()
    }

    /// Returns the runtime that the stream belongs to.
    #[must_use]
    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    pub(crate) fn core(&self) -> &Arc<StreamCore> {
        &self.core
    }

    pub(crate) fn backend(&self, operation: &'static str) -> Result<&dyn Backend> {
        self.runtime.inner.check(operation)?;
        Ok(&*self.runtime.inner.backend)
    }

    // ---------------------------------------------------------------- order

    /// Returns whether everything enqueued so far has been executed. Does not wait.
    ///
    /// # Errors
    /// `Capture` if the stream takes part in a capture; otherwise the backend's error. An error of earlier work may be reported
    /// here.
    pub fn is_complete(&self) -> Result<bool> {
        let backend = self.backend("query_stream")?;
        let _submission = self.core.enter_outside("query_stream")?;
        Ok(backend.query_stream(self.core.id)?.is_complete())
    }

    /// Waits until everything enqueued so far has been executed.
    ///
    /// # Errors
    /// As [`Stream::is_complete`].
    pub fn synchronize(&self) -> Result<()> {
        self.backend("synchronize_stream")?;
        self.core.wait_for_all(self.core.enter_to_wait("synchronize_stream")?)?;
        self.runtime.inner.trim_in_passing();
        Ok(())
    }
}
