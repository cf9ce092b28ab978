//! A mock with a stream, and the way of data to the device and back.

use std::sync::Arc;
use std::time::Duration;

use bytemuck::Pod;
use highwater_hal::{
    AllocateOptions, Backend, BlasHandle, BlasKind, BlasOptions, DeviceMemoryKind, DevicePtr, ErrorKind, EventId,
    EventOptions, FillPattern, GraphId, HostAllocator, HostOptions, HostPtr, IpcSharing, Location, MemoryCopy,
    MemoryFill, MemoryHandle, Result, StreamId, StreamOptions, Transport,
};
use highwater_mock::{MockGpu, MockOptions};

pub(crate) struct Rig {
    pub(crate) gpu: Arc<MockGpu>,
    pub(crate) host: Arc<dyn HostAllocator>,
    pub(crate) stream: StreamId,
}

/// A mock of 64 MiB per device.
pub(crate) fn small() -> MockOptions {
    MockOptions::new().with_memory_bytes(64 << 20)
}

pub(crate) fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// The kind of the error that is expected.
pub(crate) fn kind<T: std::fmt::Debug>(result: Result<T>) -> ErrorKind {
    result.expect_err("an error is expected").kind()
}

pub(crate) fn at(device: u32, ptr: DevicePtr) -> Location {
    Location::Device { device, ptr }
}

impl Rig {
    pub(crate) fn new(options: MockOptions) -> Self {
        let gpu = MockGpu::open(options).unwrap();
        let stream = gpu.create_stream(0, &StreamOptions::new()).unwrap();
        Self { host: gpu.host_allocator(), gpu, stream }
    }

    pub(crate) fn stream(&self, device: u32) -> StreamId {
        self.gpu.create_stream(device, &StreamOptions::new()).unwrap()
    }

    pub(crate) fn event(&self, device: u32) -> EventId {
        self.gpu.create_event(device, &EventOptions::new()).unwrap()
    }

    pub(crate) fn allocate(&self, device: u32, bytes: usize) -> DevicePtr {
        self.gpu.allocate(device, &AllocateOptions::new(bytes)).unwrap()
    }

    pub(crate) fn pinned(&self, bytes: usize) -> HostPtr {
        self.host.allocate(bytes, &HostOptions::new()).unwrap()
    }

    pub(crate) fn blas(&self, kind: BlasKind, stream: StreamId) -> Box<dyn BlasHandle> {
        let mut handle = self.gpu.create_blas_handle(stream.device(), &BlasOptions::new(kind)).unwrap();
        handle.set_stream(stream).unwrap();
        handle
    }

    pub(crate) fn ipc(&self) -> Arc<dyn IpcSharing> {
        self.gpu.ipc_sharing().unwrap()
    }

    /// A block of the first device for all processes.
    pub(crate) fn shareable(&self, bytes: usize) -> DevicePtr {
        let options = AllocateOptions::new(bytes).with_kind(DeviceMemoryKind::Shareable(Transport::Descriptor));
        self.gpu.allocate(0, &options).unwrap()
    }

    pub(crate) fn export(&self, block: DevicePtr) -> MemoryHandle {
        // SAFETY: tests export blocks that are alive; anything else is what the mock refuses.
        unsafe { self.ipc().export_memory(0, block, Transport::Descriptor) }.unwrap()
    }

    /// An event of the first device for all processes.
    pub(crate) fn interprocess_event(&self) -> EventId {
        self.gpu.create_event(0, &EventOptions::new().with_interprocess()).unwrap()
    }

    /// Opens an event of another backend, or of this one.
    pub(crate) fn open_event_of(&self, owner: &Self, event: EventId) -> EventId {
        self.ipc().open_event(0, &owner.ipc().export_event(event).unwrap()).unwrap()
    }

    pub(crate) fn copy(&self, dst: Location, src: Location, bytes: usize, stream: StreamId) -> Result<()> {
        // SAFETY: tests keep blocks until the work on them has completed, and touch pinned memory only after that;
        // ranges outside of blocks are what the mock refuses.
        unsafe { self.gpu.copy(&MemoryCopy::new(dst, src, bytes), stream) }
    }

    pub(crate) fn fill(&self, dst: DevicePtr, pattern: FillPattern, count: usize, stream: StreamId) -> Result<()> {
        // SAFETY: as in `copy`.
        unsafe { self.gpu.fill(&MemoryFill::new(stream.device(), dst, pattern, count), stream) }
    }

    pub(crate) fn free(&self, device: u32, ptr: DevicePtr, stream: Option<StreamId>) -> Result<()> {
        // SAFETY: tests free what is no longer in use; anything else is what the mock refuses.
        unsafe { self.gpu.free(device, ptr, stream) }
    }

    /// A new block of the first device with these elements.
    pub(crate) fn upload<T: Pod>(&self, values: &[T]) -> DevicePtr {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let block = self.allocate(0, bytes.len());
        self.write(block, values);
        block
    }

    /// Writes elements to the first device.
    pub(crate) fn write<T: Pod>(&self, to: DevicePtr, values: &[T]) {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let pinned = self.pinned(bytes.len());
        // SAFETY: the block is as long as the values and used by nobody else; after the synchronization it is idle.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), pinned.as_ptr(), bytes.len());
            self.copy(at(0, to), Location::Host(pinned), bytes.len(), self.stream).unwrap();
            self.gpu.synchronize_stream(self.stream).unwrap();
            self.host.free(pinned).unwrap();
        }
    }

    /// Elements of a device's memory, read in the order of that device's `stream`.
    pub(crate) fn download<T: Pod>(&self, from: DevicePtr, count: usize, stream: StreamId) -> Vec<T> {
        let mut values = vec![T::zeroed(); count];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut values);
        let pinned = self.pinned(bytes.len());
        self.copy(Location::Host(pinned), at(stream.device(), from), bytes.len(), stream).unwrap();
        self.gpu.synchronize_stream(stream).unwrap();
        // SAFETY: the block is as long as the values, and the copy into it has completed.
        unsafe {
            std::ptr::copy_nonoverlapping(pinned.as_ptr(), bytes.as_mut_ptr(), bytes.len());
            self.host.free(pinned).unwrap();
        }
        values
    }
}

/// Ends a capture of a test.
pub(crate) fn end(gpu: &MockGpu, stream: StreamId) -> Result<GraphId> {
    // SAFETY: no runtime uses the backend, so every capture is the test's own.
    unsafe { gpu.end_capture(stream) }
}
