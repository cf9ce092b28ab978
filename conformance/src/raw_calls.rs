//! Bare calls of a backend, as baselines of measurements.

use highwater_hal::{
    AllocateOptions, Backend, BlasKind, Completion, DeviceMemoryKind, Location, MemoryCopy, Result, Workspace,
};

use crate::device::{Block, Event, Handle, Pinned, Stream};

/// A stream with memory of its own, whose methods make one bare call of the backend each.
///
/// Benchmarks measure it beside the pools of `highwater-core`: a pool cannot be faster than the calls that it has to make.
///
/// ```
/// use highwater_conformance::RawCalls;
/// # use highwater_mock::{MockGpu, MockOptions};
///
/// # fn open_my_backend() -> highwater_hal::Result<std::sync::Arc<MockGpu>> { MockGpu::open(MockOptions::new()) }
/// let backend = open_my_backend()?;
/// let raw = RawCalls::new(&*backend, 0, 4096)?;
/// raw.copy_to_device()?;
/// raw.synchronize()?;
/// # Ok::<(), highwater_hal::Error>(())
/// ```
#[derive(Debug)]
pub struct RawCalls<'b> {
    backend: &'b dyn Backend,
    device: u32,
    /// Whether the device allocates and frees memory in the order of a stream.
    in_order: bool,
    copy: MemoryCopy,
    // Dropped in this order: the stream waits for its work.
    stream: Stream<'b>,
    event: Event<'b>,
    _pinned: Pinned<'b>,
    _block: Block<'b>,
}

impl<'b> RawCalls<'b> {
    /// Creates the stream and the event, and allocates `bytes` of page-locked memory and of device memory.
    ///
    /// # Errors
    /// The backend's error.
    pub fn new(backend: &'b dyn Backend, device: u32, bytes: usize) -> Result<Self> {
        let stream = Stream::on(backend, device)?;
        let event = Event::on(backend, device)?;
        let pinned = Pinned::new(backend, bytes)?;
        let block = Block::on(backend, device, bytes)?;
        // The first copy makes the blocks wait for the device before they are freed.
        stream.copy(block.all(), pinned.all())?;
        let dst = Location::Device { device, ptr: block.ptr() };
        let copy = MemoryCopy::new(dst, Location::Host(pinned.ptr()), bytes);
        let in_order = backend.capabilities(device)?.stream_ordered_memory;
        Ok(Self { backend, device, in_order, copy, stream, event, _pinned: pinned, _block: block })
    }

    /// Enqueues a copy of the page-locked memory to the device.
    ///
    /// # Errors
    /// The backend's error.
    #[inline]
    pub fn copy_to_device(&self) -> Result<()> {
        // SAFETY: both ranges are whole living blocks, which wait for the device before they are freed. No other code accesses
        // them.
        unsafe { self.backend.copy(&self.copy, self.stream.id()) }
    }

    /// Allocates device memory and frees it: in the order of the stream if the device can, else with plain allocations.
    ///
    /// # Errors
    /// The backend's error.
    #[inline]
    pub fn allocate_and_free(&self, bytes: usize) -> Result<()> {
        let stream = self.in_order.then(|| self.stream.id());
        let kind = stream.map_or(DeviceMemoryKind::Plain, DeviceMemoryKind::StreamOrdered);
        let ptr = self.backend.allocate(self.device, &AllocateOptions::new(bytes).with_kind(kind))?;
        // SAFETY: allocated just now, in the order of the same stream if in any, and nothing uses it.
        unsafe { self.backend.free(self.device, ptr, stream) }
    }

    /// Records the event on the stream.
    ///
    /// # Errors
    /// The backend's error.
    #[inline]
    pub fn record(&self) -> Result<()> {
        self.stream.record(&self.event)
    }

    /// Returns whether the work before the last [`RawCalls::record`] is complete.
    ///
    /// # Errors
    /// The backend's error.
    #[inline]
    pub fn query(&self) -> Result<Completion> {
        self.event.query()
    }

    /// Waits for the stream.
    ///
    /// # Errors
    /// The backend's error.
    pub fn synchronize(&self) -> Result<()> {
        self.stream.synchronize()
    }
}

/// A BLAS handle with two streams, each with a workspace, as a baseline of leases.
///
/// ```
/// use highwater_conformance::RawHandle;
/// # use highwater_mock::{MockGpu, MockOptions};
///
/// # fn open_my_backend() -> highwater_hal::Result<std::sync::Arc<MockGpu>> { MockGpu::open(MockOptions::new()) }
/// let backend = open_my_backend()?;
/// let mut handle = RawHandle::new(&*backend, 0)?;
/// (0..10).try_for_each(|_| handle.bind_to_other_stream())?;
/// # Ok::<(), highwater_hal::Error>(())
/// ```
#[derive(Debug)]
pub struct RawHandle<'b> {
    // Dropped in this order: the handle has no workspace that is freed.
    handle: Handle<'b>,
    bindings: [(Stream<'b>, Option<Workspace>); 2],
    /// The binding that the next call makes.
    next: usize,
    _blocks: [Block<'b>; 2],
}

impl<'b> RawHandle<'b> {
    /// Bytes of a workspace. The time of the calls does not depend on it.
    const WORKSPACE_BYTES: usize = 4 << 20;

    /// Creates the handle and the streams, and allocates the workspaces.
    ///
    /// # Errors
    /// The backend's error.
    pub fn new(backend: &'b dyn Backend, device: u32) -> Result<Self> {
        let handle = Handle::unbound(backend, BlasKind::Blas, device)?;
        let takes_workspace = backend.capabilities(device)?.blas_workspace;
        let block = || Block::on(backend, device, Self::WORKSPACE_BYTES);
        let blocks = [block()?, block()?];
        let binding = |block: &Block<'_>| -> Result<_> {
            let workspace = Workspace { ptr: block.ptr(), bytes: block.bytes() };
            Ok((Stream::on(backend, device)?, takes_workspace.then_some(workspace)))
        };
        let bindings = [binding(&blocks[0])?, binding(&blocks[1])?];
        Ok(Self { handle, bindings, next: 0, _blocks: blocks })
    }

    /// Binds the handle to the stream that it was not bound to last, and to its workspace if the device's BLAS takes one.
    ///
    /// # Errors
    /// The backend's error.
    #[inline]
    pub fn bind_to_other_stream(&mut self) -> Result<()> {
        let (stream, workspace) = &self.bindings[self.next];
        self.next = 1 - self.next;
        let handle = self.handle.raw_mut();
        handle.set_stream(stream.id())?;
        if workspace.is_some() {
            // SAFETY: the block outlives the handle, which is dropped first. Nothing is enqueued through the handle, and no
            // other handle has the workspace.
            unsafe { handle.set_workspace(*workspace)? };
        }
        Ok(())
    }
}
