//! The right backend below a mutant, as its hooks see it.
//!
//! A hook receives the arguments that the suite gave to the wrapper, and forwards them, or a part of them. All operations are
//! safe to call here: the suite made the promises that they need to the wrapper, and only the wrapper makes these objects and
//! calls the hooks.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use highwater_hal::{
    Backend, BlasHandle, BlasKind, BlasOptions, Completion, DevicePtr, Error, ErrorKind, EventOptions, FillPattern,
    Gemm, GraphId, HostAllocator, HostOptions, IpcSharing, Location, MemoryCopy, MemoryFill, MemoryHandle,
    PlanArguments, PlanId, Result, StreamId, StreamOptions, Workspace, for_each_operation,
};

use crate::validation::Validated;

/// Gives each object a safe method for each operation.
macro_rules! operations {
    (Backend $backend:tt BlasHandle $handle:tt HostAllocator $host:tt IpcSharing $sharing:tt) => {
        operations!(Reference.backend $backend);
        operations!(ReferenceHost.allocator $host);
        operations!(ReferenceSharing.sharing $sharing);
    };
    ($reference:ident.$field:ident {
        $($variant:ident: $fn:tt $method:ident($($arg:ident: $type:ty),*) -> $answer:ty;)*
    }) => {
        #[allow(dead_code, reason = "an operation may have no mutant")]
        impl $reference {
            $(pub(super) fn $method(&self $(, $arg: $type)*) -> Result<$answer> {
                #[allow(unused_unsafe, reason = "some methods are safe to call")]
                // SAFETY: the suite has the backend to itself, and promises to the wrapper what the method asks for. That
                // holds for every part of a range too. The suite touches and frees memory only after it has waited for the
                // device; if a mutant breaks these waits, the wrapper waits before memory is given back. A mutant that frees
                // early frees device memory, which only streams touch. The layer below refuses a range that leaves its block;
                // mutants for real devices pass no such range (the table of `generated::unfit_for_devices`).
                unsafe { self.$field.$method($($arg),*) }
            })*
        }
    };
}

for_each_operation!(operations);

/// The right backend.
#[derive(Debug, Clone)]
pub(super) struct Reference {
    backend: Arc<dyn Backend>,
}

impl Deref for Reference {
    type Target = dyn Backend;

    fn deref(&self) -> &Self::Target {
        &*self.backend
    }
}

impl Reference {
    /// Puts the layer that refuses ranges over the backend. On a real device, a mutant passes only the suite's ranges.
    pub(super) fn new(backend: Arc<dyn Backend>) -> Self {
        if backend.identity().real_device {
            return Self { backend };
        }
        Self { backend: Arc::new(Validated::refusing(backend)) }
    }

    /// Returns whether the stream takes part in a capture.
    pub(super) fn is_recording(&self, stream: StreamId) -> bool {
        self.is_capturing(stream).unwrap_or(false)
    }

    /// Returns whether the stream has outstanding work and takes part in no capture.
    pub(super) fn is_pending(&self, stream: StreamId) -> bool {
        !self.is_recording(stream)
            && self.query_stream(stream).is_ok_and(|completion| completion == Completion::Pending)
    }

    /// Waits for the stream, unless it takes part in a capture.
    pub(super) fn wait_for(&self, stream: StreamId) -> Result<()> {
        if self.is_recording(stream) { Ok(()) } else { self.synchronize_stream(stream) }
    }

    /// Waits for every device.
    pub(super) fn settle(&self) {
        for device in 0..self.device_count() {
            // A device that cannot be waited for executes nothing.
            let _ = self.synchronize_device(device);
        }
    }

    /// Runs work on a new stream and waits for it. The work overtakes everything that is enqueued.
    pub(super) fn on_own_stream(&self, device: u32, act: impl FnOnce(StreamId) -> Result<()>) -> Result<()> {
        let stream = self.create_stream(device, &StreamOptions::new())?;
        let done = act(stream).and_then(|()| self.synchronize_stream(stream));
        self.destroy_stream(stream)?;
        done
    }

    /// Makes one stream wait for the work that is enqueued on the other.
    pub(super) fn let_wait(&self, stream: StreamId, other: StreamId) -> Result<()> {
        let event = self.create_event(other.device(), &EventOptions::new())?;
        let waits = self.record_event(event, other).and_then(|()| self.stream_wait_event(stream, event));
        self.destroy_event(event)?;
        waits
    }

    /// Overwrites bytes of device memory in the order of the stream, if they lie in a block.
    pub(super) fn overwrite(&self, device: u32, ptr: DevicePtr, bytes: usize, stream: StreamId) {
        let fill = MemoryFill::new(device, ptr, FillPattern::U8(0x99), bytes);
        // A range outside of a block is refused, and stays as it is.
        let _ = self.fill(&fill, stream);
    }

    /// Changes bytes of device memory that no stream uses.
    pub(super) fn edit(&self, device: u32, ptr: DevicePtr, bytes: usize, change: impl FnOnce(&mut [u8])) -> Result<()> {
        let host = ReferenceHost::new(self);
        let pinned = host.allocate(bytes, &HostOptions::new())?;
        let (here, there) = (Location::Host(pinned), Location::Device { device, ptr });
        let done = self
            .on_own_stream(device, |stream| self.copy(&MemoryCopy::new(here, there, bytes), stream))
            .and_then(|()| {
                // SAFETY: the block is that long, the copy into it is complete, and no other code knows it.
                change(unsafe { std::slice::from_raw_parts_mut(pinned.as_ptr(), bytes) });
                self.on_own_stream(device, |stream| self.copy(&MemoryCopy::new(there, here, bytes), stream))
            });
        host.free(pinned)?;
        done
    }

    /// Makes an empty graph.
    pub(super) fn empty_graph(&self, device: u32) -> Result<GraphId> {
        let stream = self.create_stream(device, &StreamOptions::new())?;
        let graph = self.begin_capture(stream, Default::default()).and_then(|()| self.end_capture(stream));
        self.destroy_stream(stream)?;
        graph
    }

    /// Creates a handle that is bound to the stream.
    pub(super) fn handle(&self, kind: BlasKind, stream: StreamId) -> Result<ReferenceHandle> {
        let handle = self.create_blas_handle(stream.device(), &BlasOptions::new(kind))?;
        let mut handle = ReferenceHandle::new(self.clone(), handle);
        handle.set_stream(stream)?;
        Ok(handle)
    }
}

/// The right handle.
#[derive(Debug)]
pub(super) struct ReferenceHandle {
    pub(super) backend: Reference,
    handle: Box<dyn BlasHandle>,
    /// The stream and the workspace that the suite bound.
    pub(super) stream: Option<StreamId>,
    pub(super) workspace: Option<Workspace>,
}

impl ReferenceHandle {
    pub(super) fn new(backend: Reference, handle: Box<dyn BlasHandle>) -> Self {
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
        // SAFETY: the matrices are those that the suite handed over, or parts of them; the layer below refuses a product that
        // reaches out of their blocks.
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

    /// Acts on a new stream and waits for it. The work overtakes everything that is enqueued.
    pub(super) fn ahead<T>(&mut self, act: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let (stream, workspace) = (self.stream, self.workspace);
        let Some(bound) = stream else { return act(self) };
        let backend = self.backend.clone();
        let mut answer = None;
        backend.on_own_stream(bound.device(), |own| {
            self.set_stream(own)?;
            self.set_workspace(workspace)?;
            answer = Some(act(self));
            backend.synchronize_stream(own)?;
            self.set_stream(bound)?;
            self.set_workspace(workspace)
        })?;
        answer.unwrap_or_else(|| Err(wrong(ErrorKind::InvalidState, "ahead")))
    }

    /// Multiplies at once, on a new stream.
    pub(super) fn gemm_on_own_stream(&self, gemm: &Gemm) -> Result<()> {
        let backend = &self.backend;
        backend.on_own_stream(self.handle.device(), |stream| {
            backend.handle(BlasKind::Blas, stream)?.gemm(gemm)?;
            backend.synchronize_stream(stream)
        })
    }
}

impl Deref for ReferenceHandle {
    type Target = dyn BlasHandle;

    fn deref(&self) -> &Self::Target {
        &*self.handle
    }
}

impl DerefMut for ReferenceHandle {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut *self.handle
    }
}

/// The right allocator of page-locked memory.
#[derive(Debug)]
pub(super) struct ReferenceHost {
    allocator: Arc<dyn HostAllocator>,
}

impl ReferenceHost {
    pub(super) fn new(backend: &Reference) -> Self {
        Self { allocator: backend.host_allocator() }
    }
}

/// The right sharing with other processes.
#[derive(Debug)]
pub(super) struct ReferenceSharing {
    pub(super) backend: Reference,
    sharing: Arc<dyn IpcSharing>,
}

impl ReferenceSharing {
    pub(super) fn new(backend: Reference, sharing: Arc<dyn IpcSharing>) -> Self {
        Self { backend, sharing }
    }

    /// Returns the device that the handle names.
    pub(super) fn device_of(&self, handle: &MemoryHandle) -> Option<u32> {
        let names = |&device: &u32| self.backend.device_info(device).is_ok_and(|info| info.uuid == handle.device_uuid);
        (0..self.backend.device_count()).find(names)
    }
}

/// Creates the error of a mutant.
pub(super) fn wrong(kind: ErrorKind, operation: &'static str) -> Error {
    Error::new(kind, operation, "a mutant says so")
}

/// Returns whether the result is an error of this kind.
pub(super) fn is<T>(result: &Result<T>, kind: ErrorKind) -> bool {
    result.as_ref().is_err_and(|error| error.kind() == kind)
}

/// Returns a value instead of an error of this kind.
pub(super) fn forgiven<T>(kind: ErrorKind, result: Result<T>, value: T) -> Result<T> {
    if is(&result, kind) { Ok(value) } else { result }
}

/// Returns an error of another kind instead of an error of this kind.
pub(super) fn renamed<T>(from: ErrorKind, to: ErrorKind, operation: &'static str, result: Result<T>) -> Result<T> {
    if is(&result, from) { Err(wrong(to, operation)) } else { result }
}

/// The kinds of memory that a copy connects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    ToDevice,
    ToHost,
    OnDevice,
    BetweenDevices,
}

impl Way {
    pub(super) fn of(copy: &MemoryCopy) -> Self {
        Self::between(copy.dst, copy.src)
    }

    pub(super) fn between(dst: Location, src: Location) -> Self {
        match (dst, src) {
            (Location::Device { device: to, .. }, Location::Device { device: from, .. }) if to == from => {
                Self::OnDevice
            }
            (Location::Device { .. }, Location::Device { .. }) => Self::BetweenDevices,
            (Location::Device { .. }, Location::Host(_)) => Self::ToDevice,
            (Location::Host(_), _) => Self::ToHost,
        }
    }
}
