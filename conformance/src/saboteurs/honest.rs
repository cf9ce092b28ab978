//! The backend behind a saboteur, as its hooks see it.
//!
//! Hooks are called with what the suite has handed to the wrapper, and hand it on, or less of it, to the backend. The
//! methods that are unsafe to call are safe to call here: what they ask for was promised to the wrapper, which alone
//! makes these values and calls the hooks.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use highwater_hal::{
    Backend, BlasHandle, BlasKind, BlasOptions, Completion, DevicePtr, Error, ErrorKind, EventOptions, FillPattern,
    Gemm, GraphExecId, GraphId, HostAllocator, HostOptions, HostPtr, IpcSharing, Location, MemoryCopy, MemoryFill,
    MemoryHandle, PlanArguments, PlanId, Result, StreamId, StreamOptions, Transport, Workspace,
};

/// The backend that is wrapped.
#[derive(Debug, Clone)]
pub(super) struct Honest(Arc<dyn Backend>);

impl Deref for Honest {
    type Target = dyn Backend;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl Honest {
    pub(super) fn new(backend: Arc<dyn Backend>) -> Self {
        Self(backend)
    }

    pub(super) fn copy(&self, copy: &MemoryCopy, stream: StreamId) -> Result<()> {
        // SAFETY: what the suite promised to the wrapper holds for this copy and for every part of it; it touches the
        // memory only after it has waited for the device, and where a saboteur spoils that, the wrapper waits before
        // memory is given back.
        unsafe { self.0.copy(copy, stream) }
    }

    pub(super) fn fill(&self, fill: &MemoryFill, stream: StreamId) -> Result<()> {
        // SAFETY: as for `copy`. Device memory is touched by no CPU; a range that is in no block is refused by the
        // backends that saboteurs are made for.
        unsafe { self.0.fill(fill, stream) }
    }

    pub(super) fn free(&self, device: u32, ptr: DevicePtr, stream: Option<StreamId>) -> Result<()> {
        // SAFETY: the suite frees each block once and when it is used no more; a saboteur that frees earlier does so
        // with device memory, which only the work of streams touches.
        unsafe { self.0.free(device, ptr, stream) }
    }

    pub(super) fn end_capture(&self, stream: StreamId) -> Result<GraphId> {
        // SAFETY: the suite has the backend to itself, so every capture is its own.
        unsafe { self.0.end_capture(stream) }
    }

    pub(super) fn launch_graph(&self, graph: GraphExecId, stream: StreamId) -> Result<()> {
        // SAFETY: what the graph recorded lives longer than the graph, and the suite waits before it frees it.
        unsafe { self.0.launch_graph(graph, stream) }
    }

    pub(super) fn stream_from_raw(&self, device: u32, raw: u64) -> Result<StreamId> {
        // SAFETY: the suite wraps streams that outlive their wrappers.
        unsafe { self.0.stream_from_raw(device, raw) }
    }

    pub(super) fn event_from_raw(&self, device: u32, raw: u64) -> Result<highwater_hal::EventId> {
        // SAFETY: the suite wraps events that outlive their wrappers.
        unsafe { self.0.event_from_raw(device, raw) }
    }

    /// Whether the stream takes part in a capture.
    pub(super) fn records(&self, stream: StreamId) -> bool {
        self.0.is_capturing(stream).unwrap_or(false)
    }

    /// Whether something is outstanding on a stream that takes part in no capture.
    pub(super) fn is_busy(&self, stream: StreamId) -> bool {
        !self.records(stream) && self.0.query_stream(stream).is_ok_and(|completion| completion == Completion::Pending)
    }

    /// Waits for the stream, unless it takes part in a capture.
    pub(super) fn wait_for(&self, stream: StreamId) -> Result<()> {
        if self.records(stream) { Ok(()) } else { self.0.synchronize_stream(stream) }
    }

    /// Waits for every device.
    pub(super) fn settle(&self) {
        for device in 0..self.0.device_count() {
            // A device that cannot be waited for does not work either.
            let _ = self.0.synchronize_device(device);
        }
    }

    /// Does something on a stream of its own, and waits for it: before and beside everything that is enqueued.
    pub(super) fn aside(&self, device: u32, act: impl FnOnce(StreamId) -> Result<()>) -> Result<()> {
        let stream = self.0.create_stream(device, &StreamOptions::new())?;
        let done = act(stream).and_then(|()| self.0.synchronize_stream(stream));
        self.0.destroy_stream(stream)?;
        done
    }

    /// Lets one stream wait for all that is enqueued on the other by now.
    pub(super) fn let_wait(&self, stream: StreamId, other: StreamId) -> Result<()> {
        let event = self.0.create_event(other.device(), &EventOptions::new())?;
        let waits = self.0.record_event(event, other).and_then(|()| self.0.stream_wait_event(stream, event));
        self.0.destroy_event(event)?;
        waits
    }

    /// Writes bytes of device memory in the order of the stream, as far as they are in a block.
    pub(super) fn smear(&self, device: u32, ptr: DevicePtr, bytes: usize, stream: StreamId) {
        let fill = MemoryFill::new(device, ptr, FillPattern::U8(0x99), bytes);
        // Where the backend refuses it, there is nothing to spoil.
        let _ = self.fill(&fill, stream);
    }

    /// Changes bytes of device memory that no stream uses.
    pub(super) fn edit(&self, device: u32, ptr: DevicePtr, bytes: usize, change: impl FnOnce(&mut [u8])) -> Result<()> {
        let host = HonestHost::new(self.clone(), 0);
        let pinned = host.allocate(bytes, &HostOptions::new())?;
        let (here, there) = (Location::Host(pinned), Location::Device { device, ptr });
        let done =
            self.aside(device, |stream| self.copy(&MemoryCopy::new(here, there, bytes), stream)).and_then(|()| {
                // SAFETY: the block is that long, the copy into it is done, and nobody else knows it.
                change(unsafe { std::slice::from_raw_parts_mut(pinned.as_ptr(), bytes) });
                self.aside(device, |stream| self.copy(&MemoryCopy::new(there, here, bytes), stream))
            });
        host.free(pinned)?;
        done
    }

    /// A graph of nothing.
    pub(super) fn empty_graph(&self, device: u32) -> Result<GraphId> {
        let stream = self.0.create_stream(device, &StreamOptions::new())?;
        let graph = self.0.begin_capture(stream, Default::default()).and_then(|()| self.end_capture(stream));
        self.0.destroy_stream(stream)?;
        graph
    }

    /// A handle of its own, bound to the stream.
    pub(super) fn handle(&self, kind: BlasKind, stream: StreamId) -> Result<HonestHandle> {
        let handle = self.0.create_blas_handle(stream.device(), &BlasOptions::new(kind))?;
        let mut handle = HonestHandle::new(self.clone(), handle);
        handle.set_stream(stream)?;
        Ok(handle)
    }
}

/// A handle of the backend that is wrapped.
#[derive(Debug)]
pub(super) struct HonestHandle {
    pub(super) backend: Honest,
    handle: Box<dyn BlasHandle>,
    /// The stream and the workspace that the suite has bound.
    pub(super) stream: Option<StreamId>,
    pub(super) workspace: Option<Workspace>,
}

impl HonestHandle {
    pub(super) fn new(backend: Honest, handle: Box<dyn BlasHandle>) -> Self {
        Self { backend, handle, stream: None, workspace: None }
    }

    pub(super) fn set_stream(&mut self, stream: StreamId) -> Result<()> {
        self.handle.set_stream(stream)?;
        self.stream = Some(stream);
        Ok(())
    }

    pub(super) fn set_workspace(&mut self, workspace: Option<Workspace>) -> Result<()> {
        // SAFETY: the suite binds memory that outlives the handle, and this is what it bound or binds.
        unsafe { self.handle.set_workspace(workspace)? };
        self.workspace = workspace;
        Ok(())
    }

    pub(super) fn gemm(&mut self, gemm: &Gemm) -> Result<()> {
        // SAFETY: the matrices are those that the suite handed over, or parts of them; a product that reaches out of
        // their blocks is refused by the backends that saboteurs are made for.
        unsafe { self.handle.gemm(gemm) }
    }

    pub(super) fn run_plan(&mut self, plan: PlanId, arguments: &PlanArguments) -> Result<()> {
        // SAFETY: as for `gemm`.
        unsafe { self.handle.run_plan(plan, arguments) }
    }

    /// Waits for the bound stream, unless it takes part in a capture.
    pub(super) fn wait(&self) -> Result<()> {
        self.stream.map_or(Ok(()), |stream| self.backend.wait_for(stream))
    }

    /// Multiplies on a stream of its own, at once.
    pub(super) fn gemm_aside(&self, gemm: &Gemm) -> Result<()> {
        let backend = &self.backend;
        backend.aside(self.handle.device(), |stream| {
            backend.handle(BlasKind::Blas, stream)?.gemm(gemm)?;
            backend.synchronize_stream(stream)
        })
    }
}

impl Deref for HonestHandle {
    type Target = dyn BlasHandle;

    fn deref(&self) -> &Self::Target {
        &*self.handle
    }
}

impl DerefMut for HonestHandle {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut *self.handle
    }
}

/// The allocator of page-locked memory that is wrapped.
#[derive(Debug)]
pub(super) struct HonestHost {
    pub(super) backend: Honest,
    allocator: Arc<dyn HostAllocator>,
    /// How many allocators were given out before this one.
    pub(super) serial: u64,
}

impl HonestHost {
    pub(super) fn new(backend: Honest, serial: u64) -> Self {
        let allocator = backend.host_allocator();
        Self { backend, allocator, serial }
    }

    pub(super) fn allocate(&self, bytes: usize, options: &HostOptions) -> Result<HostPtr> {
        self.allocator.allocate(bytes, options)
    }

    pub(super) fn free(&self, ptr: HostPtr) -> Result<()> {
        // SAFETY: the suite frees each block once, when nobody uses it any more.
        unsafe { self.allocator.free(ptr) }
    }

    pub(super) fn register(&self, ptr: HostPtr, bytes: usize, options: &HostOptions) -> Result<()> {
        // SAFETY: the suite registers memory that outlives the registration; this is all of it, or a part.
        unsafe { self.allocator.register(ptr, bytes, options) }
    }

    pub(super) fn unregister(&self, ptr: HostPtr) -> Result<()> {
        // SAFETY: the suite unregisters memory that no device uses any more.
        unsafe { self.allocator.unregister(ptr) }
    }

    pub(super) fn device_address(&self, ptr: HostPtr, device: u32) -> Result<DevicePtr> {
        self.allocator.device_address(ptr, device)
    }
}

/// Sharing with other processes, as the backend that is wrapped has it.
#[derive(Debug)]
pub(super) struct HonestSharing {
    pub(super) backend: Honest,
    sharing: Arc<dyn IpcSharing>,
}

impl HonestSharing {
    pub(super) fn new(backend: Honest, sharing: Arc<dyn IpcSharing>) -> Self {
        Self { backend, sharing }
    }

    pub(super) fn export_memory(&self, device: u32, ptr: DevicePtr, transport: Transport) -> Result<MemoryHandle> {
        // SAFETY: the suite exports blocks that are alive.
        unsafe { self.sharing.export_memory(device, ptr, transport) }
    }

    pub(super) fn close_memory(&self, device: u32, ptr: DevicePtr) -> Result<()> {
        // SAFETY: the suite closes what no work uses any more.
        unsafe { self.sharing.close_memory(device, ptr) }
    }
}

impl Deref for HonestSharing {
    type Target = dyn IpcSharing;

    fn deref(&self) -> &Self::Target {
        &*self.sharing
    }
}

/// An error of a saboteur's making.
pub(super) fn wrong(kind: ErrorKind, operation: &'static str) -> Error {
    Error::new(kind, operation, "a saboteur says so")
}

/// Whether the result is an error of this kind.
pub(super) fn is<T>(result: &Result<T>, kind: ErrorKind) -> bool {
    result.as_ref().is_err_and(|error| error.kind() == kind)
}

/// Which memory a copy leaves and reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    ToDevice,
    ToHost,
    OnDevice,
    BetweenDevices,
}

impl Way {
    pub(super) fn of(copy: &MemoryCopy) -> Self {
        match (copy.dst, copy.src) {
            (Location::Device { device: to, .. }, Location::Device { device: from, .. }) if to == from => {
                Self::OnDevice
            }
            (Location::Device { .. }, Location::Device { .. }) => Self::BetweenDevices,
            (Location::Device { .. }, Location::Host(_)) => Self::ToDevice,
            (Location::Host(_), _) => Self::ToHost,
        }
    }
}
