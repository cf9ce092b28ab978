//! The runtime: one open backend with its pools.

mod inner;
mod options;
mod shutdown;
mod statistics;
mod warm_up;

use std::fmt;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

pub use options::RuntimeOptions;
pub use statistics::{Limits, Statistics};

pub(crate) use inner::{RuntimeInner, Users};

use crate::capture::thread::refuse_in_capture;
use crate::capture_gate::CaptureGate;
use crate::ledger::DeviceBlockInfo;
use crate::own_thread;
use crate::pool::completion_events::EventPool;
use crate::pool::recorder::Recorder;
use crate::pool::{HostMemoryOptions, Nodes};
use crate::services::{DeviceState, Services};
use crate::sharing::{Meeting, SharingOptions};
use crate::workspace_config;
use highwater_hal::{Backend, DevicePtr, Error, ErrorKind, Identity, LiveObjects, Result, fork::Generation};

/// An open backend with its pools. A clone is cheap and refers to the same runtime.
///
/// Devices, streams, events and buffers keep their runtime alive. When the last of them is dropped, the runtime waits for the
/// devices and frees everything. [`Runtime::close`] does so and reports the result. Waiting for a device would invalidate
/// captures on it. So the end of a runtime first waits until no runtime of the process captures there. A runtime that is
/// dropped inside a capture ends right after that capture, in the same thread.
///
/// Code that must not keep the runtime alive, such as a page of metrics, needs no weak reference of the library. Keep the runtime in an
/// `Arc`, and give that code a `Weak`:
///
/// ```
/// # use highwater_core::Runtime;
/// # use highwater_mock::{MockGpu, MockOptions};
/// use std::sync::Arc;
///
/// let runtime = Arc::new(Runtime::new(MockGpu::open(MockOptions::new())?)?);
/// let weak = Arc::downgrade(&runtime);
/// let live_bytes = move || Some(weak.upgrade()?.statistics().host.live_bytes); // `None` after the end.
///
/// assert_eq!(live_bytes(), Some(0));
/// // `None` while another thread is inside `live_bytes`. The runtime then ends where that call returns.
/// let runtime = Arc::into_inner(runtime).expect("no other thread uses it");
/// assert_eq!(runtime.close()?.total(), 0);
/// assert_eq!(live_bytes(), None);
/// # Ok::<(), highwater_core::Error>(())
/// ```
///
/// # Fork
/// A child of `fork` cannot use the runtimes of its parent: their calls return `Forked`, and their destructors return at once.
/// Do not open a runtime in the child either; call `exec` first. If another thread of the parent was inside a lock at the fork, the
/// lock stays held in the child, so the opening may hang. CUDA does not work in a child of a process that has initialized it.
/// To end the child without `exec`, call `_exit`: `std::process::exit` may hang for the same reason.
///
/// # Example
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

impl fmt::Debug for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Runtime").field("backend", self.inner.backend.identity()).finish_non_exhaustive()
    }
}

impl Runtime {
    /// Creates a runtime over an open backend, with default options.
    ///
    /// # Errors
    /// The backend's error if it cannot describe a device.
    pub fn new(backend: Arc<dyn Backend>) -> Result<Self> {
        Self::with_options(backend, &RuntimeOptions::new())
    }

    /// Creates a runtime over an open backend.
    ///
    /// # Errors
    /// As [`Runtime::new`], and also:
    /// - `InvalidArgument`: the variable `HIGHWATER_HOST_MEMORY` or `HIGHWATER_SHARING` has an unknown key or a malformed value.
    /// - `InvalidArgument`: a background thread is requested without an idle time.
    /// - `InvalidArgument`: the file of a trace cannot be created, or the place of a rendezvous cannot be used.
    /// - `OperatingSystem`: the background thread cannot be created.
    pub fn with_options(backend: Arc<dyn Backend>, options: &RuntimeOptions) -> Result<Self> {
        Self::on_nodes(backend, options, &Nodes::of_machine(Path::new("/")))
    }

    /// Creates a runtime on a machine with these NUMA nodes.
    pub(crate) fn on_nodes(backend: Arc<dyn Backend>, options: &RuntimeOptions, nodes: &Nodes) -> Result<Self> {
        let host_memory = options.host_memory.or(HostMemoryOptions::from_environment()?);
        let meeting = Meeting::open(options.sharing.or(SharingOptions::from_environment()?))?;
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
                blas_workspace_bytes: if capabilities.blas_workspace { align(blas) } else { 0 },
                lt_workspace_bytes: if capabilities.blas_workspace { align(lt) } else { 0 },
            })
        };
        let devices = (0..backend.device_count()).map(device).collect::<Result<Box<[_]>>>()?;
        let recorder = host_memory.record.map(Recorder::open).transpose()?;
        let services = Arc::new(Services::new(backend, generation, options.numerics, devices));
        let inner =
            RuntimeInner::new(services, (&host_memory, &options.device_memory), nodes, recorder.as_ref(), meeting);
        inner.pinned.start_background(&host_memory)?;
        let runtime = Self { inner: Arc::new(Users(inner)) };
        if options.warm_handles > 0 && runtime.device_count() > 0 {
            let warm_up = warm_up::WarmUp::start(&runtime.inner.0, options.warm_handles)?;
            // This is the only call.
            let _ = runtime.inner.warm_up.set(warm_up);
        }
        Ok(runtime)
    }

    /// Returns the identity of the backend.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        self.inner.backend.identity()
    }

    /// Returns the backend itself. The caller must keep the memory that a capture begun on it records, because core does not
    /// know about that memory.
    #[must_use]
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.inner.backend
    }

    /// Returns the number of devices.
    #[must_use]
    pub fn device_count(&self) -> u32 {
        // The count came from the backend as a u32.
        u32::try_from(self.inner.devices.len()).unwrap_or(u32::MAX)
    }

    /// Frees dropped device memory that no stream uses any more, and the memory that streams keep for
    /// [`Stream::allocate`](crate::Stream::allocate), as far as their work is done. Retries the destruction of streams, events and graphs that the
    /// backend refused to destroy. Inside a capture, frees nothing. Every allocation and every wait for a stream also frees dropped
    /// memory of [`Device::allocate`](crate::Device::allocate).
    ///
    /// A vendor's free may wait for all work on the device. CUDA's does, and during the wait it blocks other threads that
    /// allocate or enqueue. For short-lived memory beside long work, use [`Stream::allocate`](crate::Stream::allocate), or keep
    /// the buffers.
    ///
    /// # Errors
    /// The backend's error if it cannot report whether a stream is done. Nothing is lost.
    pub fn trim_device_memory(&self) -> Result<()> {
        self.inner.check("trim_device_memory")?;
        self.inner.retry_refused().and(self.inner.frees.trim(false)).and(self.inner.trim_pools())
    }

    /// As [`Runtime::trim_device_memory`].
    ///
    /// # Errors
    /// As [`Runtime::trim_device_memory`].
    #[deprecated(note = "use `trim_device_memory`")]
    pub fn reclaim(&self) -> Result<()> {
        self.trim_device_memory()
    }

    /// Frees everything that is cached and not in use: idle handles, workspaces of ended streams, free page-locked blocks,
    /// unused mappings of other processes' memory, and idle events.
    ///
    /// Handles stay while any runtime captures on a device of this runtime.
    ///
    /// # Errors
    /// The first error of the backend; the rest is freed nevertheless. `Capture` in a thread that is inside a capture.
    pub fn trim(&self) -> Result<()> {
        self.inner.check("trim")?;
        refuse_in_capture("trim")?;
        if let Some(sharing) = self.inner.sharing.get() {
            sharing.unmap_idle();
        }
        self.inner.trim()
    }

    /// Destroys the idle handles, BLAS and Lt, and nothing else. Handles that a live thread used last stay. All stay while any
    /// runtime captures on a device of this runtime.
    ///
    /// # Errors
    /// As [`Runtime::trim`].
    pub fn trim_handles(&self) -> Result<()> {
        self.inner.check("trim_handles")?;
        refuse_in_capture("trim_handles")?;
        self.inner.handles.trim()
    }

    /// Frees the workspaces that no stream has and whose last work is done, and nothing else.
    ///
    /// # Errors
    /// As [`Runtime::trim`].
    pub fn trim_workspaces(&self) -> Result<()> {
        self.inner.check("trim_workspaces")?;
        refuse_in_capture("trim_workspaces")?;
        self.inner.workspaces.trim(false)
    }

    /// Frees the page-locked memory that no buffer, graph or stream uses, and nothing else.
    ///
    /// ```
    /// use highwater_core::Runtime;
    /// use highwater_mock::{MockGpu, MockOptions};
    ///
    /// let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
    /// drop(runtime.pinned::<u8>(1 << 20)?);
    /// assert!(runtime.statistics().host.held_bytes > 0, "kept for the next request");
    /// runtime.trim_pinned_memory()?;
    /// assert_eq!(runtime.statistics().host.held_bytes, 0);
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Runtime::trim`].
    pub fn trim_pinned_memory(&self) -> Result<()> {
        self.inner.check("trim_pinned_memory")?;
        refuse_in_capture("trim_pinned_memory")?;
        self.inner.pinned.trim()
    }

    /// Refuses a call in the same states as every method that calls the backend. A crate that calls the backend of a runtime
    /// itself begins with this method.
    ///
    /// # Errors
    /// The message contains `operation`. `Forked` in a forked child; `Capture` in a thread inside a capture; the error of a
    /// backend that ends.
    pub fn check_outside_capture(&self, operation: &'static str) -> Result<()> {
        self.inner.check(operation)?;
        refuse_in_capture(operation)
    }

    /// Returns the block of device memory that contains an address, if this runtime allocated it.
    #[must_use]
    pub fn block_of(&self, ptr: DevicePtr) -> Option<DeviceBlockInfo> {
        if !self.inner.generation.is_current() {
            return None;
        }
        let memory = &self.inner.frees.memory;
        let pools = || memory.pools.iter().find_map(|pool| pool.find(ptr));
        self.inner.ledger.find_device(ptr).or_else(pools)
    }

    /// Ends the runtime. Waits for captures of other runtimes on its devices and for the devices themselves, then frees
    /// everything. Returns the objects that the backend still counts as alive. There are none unless other code uses the same
    /// backend.
    ///
    /// # Errors
    /// - `InvalidState`: a device, stream, event, buffer or clone of the runtime is alive, or another process has one of its
    ///   buffers open. The message has the number of other live objects, and the backend's count by kind.
    /// - `Capture`: this thread is inside a capture.
    /// - Otherwise the first error of the backend. The rest is freed nevertheless.
    ///
    /// A refusal with `InvalidState` takes nothing that is in use. If objects of this runtime are alive, it frees idle handles,
    /// workspaces and blocks, as [`Runtime::trim`] does.
    ///
    /// The call consumes the runtime, even if it is refused. To try again, clone the [`Device::runtime`](crate::Device::runtime) of a live
    /// device, drop the device, and close the clone. A clone that was made before makes the first call fail. If no object is left after
    /// a refusal, the runtime ends as by a drop.
    pub fn close(self) -> Result<LiveObjects> {
        self.close_after_drops(Duration::ZERO)
    }

    /// Closes the runtime. Waits at most `limit` for another thread that is dropping a stream.
    fn close_after_drops(self, limit: Duration) -> Result<LiveObjects> {
        self.inner.check("close")?;
        refuse_in_capture("close")?;
        let backend = Arc::clone(&self.inner.backend);
        if let Some(sharing) = self.inner.sharing.get() {
            // The sharing thread refers to the runtime from time to time.
            sharing.stop();
            sharing.trim();
            if let Some(error) = self.inner.open_elsewhere("close") {
                sharing.start("close")?;
                return Err(error);
            }
        }
        self.inner.notifier.wait_for_answers();
        let buffers = self.inner.pinned.live_buffers();
        let users = if buffers == 0 { Arc::try_unwrap(self.inner) } else { Err(self.inner) };
        let users = users.map_err(|shared| {
            if let Some(sharing) = shared.sharing.get()
                && let Err(error) = sharing.start("close")
            {
                crate::warnings::warning!("the sharing thread could not be restarted: {error}");
            }
            // The remaining objects are in use elsewhere. A refusal has been counted and logged.
            let _ = shared.trim();
            shared.in_use("close", Arc::strong_count(&shared) as u64 - 1 + buffers)
        })?;
        let mut inner = Arc::clone(&users.0);
        drop(users);
        let begun = Instant::now();
        let mut inner = loop {
            match Arc::try_unwrap(inner) {
                Ok(inner) => break inner,
                Err(shared) if begun.elapsed() < limit => inner = shared,
                Err(_) => {
                    let what = "a stream of the runtime is being dropped by another thread";
                    return Err(Error::new(ErrorKind::InvalidState, "close", what)
                        .with_hint("wait for the threads that use the runtime; it ends with that stream"));
                }
            }
            thread::sleep(Duration::from_micros(50));
        };
        inner.give_everything_back()?;
        drop(inner);
        Ok(backend.live_objects())
    }

    /// As [`Runtime::close`], and returns within `limit`. The call first waits until the other objects of the runtime are dropped, and
    /// other processes have closed its buffers. A thread of its own then ends the runtime, because a device that hangs never ends its
    /// work.
    ///
    /// ```
    /// # use highwater_core::{ErrorKind, Runtime};
    /// # use highwater_mock::{MockGpu, MockOptions};
    /// use std::time::Duration;
    ///
    /// # let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
    /// let device = runtime.device(0)?;
    /// let task = std::thread::spawn(move || drop(device));
    /// assert_eq!(runtime.close_within(Duration::from_secs(10))?.total(), 0); // Waits for the task's device.
    /// # task.join().unwrap();
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidState` if objects are still alive at the limit, or if the devices have not done their work. The message states
    /// which. In the second case, the runtime ends with the devices' work or with the process. `OperatingSystem` if no thread
    /// can be created. Otherwise as [`Runtime::close`].
    pub fn close_within(self, limit: Duration) -> Result<LiveObjects> {
        const OPERATION: &str = "close_within";
        self.inner.check(OPERATION)?;
        refuse_in_capture(OPERATION)?;
        let begun = Instant::now();
        let left = || limit.saturating_sub(begun.elapsed());
        let mut pause = Duration::from_micros(50);
        // A drop wakes no thread, because a wake would cost each drop.
        loop {
            let others = Arc::strong_count(&self.inner) as u64 - 1 + self.inner.pinned.live_buffers();
            let in_use = (others > 0).then(|| self.inner.in_use(OPERATION, others));
            let Some(error) = in_use.or_else(|| self.inner.open_elsewhere(OPERATION)) else { break };
            if left().is_zero() {
                return Err(error);
            }
            thread::sleep(pause.min(left()));
            pause = (2 * pause).min(Duration::from_millis(5));
        }
        let backend = Arc::clone(&self.inner.backend);
        let (sender, ended) = mpsc::channel();
        let (is_caller, rest) = (own_thread::is_caller(), left());
        let close = move || {
            if is_caller {
                own_thread::become_caller();
            }
            // No thread receives the answer after the limit.
            let _ = sender.send(self.close_after_drops(rest));
        };
        own_thread::spawn(("highwater-close", OPERATION, ", or call `Runtime::close`"), close)?;
        let rest = left();
        ended.recv_timeout(rest).unwrap_or_else(|_| {
            let live = backend.live_objects();
            let message = format!(
                "the devices have not done their work within {rest:?}, the rest of {limit:?}; the backend counts {live}"
            );
            Err(Error::new(ErrorKind::InvalidState, OPERATION, message).with_hint(
                "end the process if a device hangs; otherwise pass a longer limit, or wait for the work first",
            ))
        })
    }
}
