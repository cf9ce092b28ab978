//! The layer over a `Backend`.

use std::sync::Arc;

use highwater_hal::AnyId::Stream;
use highwater_hal::{
    AllocateOptions, Answer, Backend, BackendLayer, BlasHandle, BlasOptions, Call, DeviceMemoryKind, DevicePtr,
    EventId, HostAllocator, IpcSharing, MemoryCopy, MemoryCopy2d, MemoryFill, PhysicalMemoryId, PhysicalMemoryOptions,
    Result, StreamId,
};

use super::blas::ValidatedHandle;
use super::host::ValidatedAllocator;
use super::ranges::{Holding, Space, on, side};
use super::sharing::ValidatedSharing;
use super::{Validated, origin};

// SAFETY: every call goes to a backend that keeps the clauses, with unchanged arguments, and its answer is returned unchanged.
// A call that the gate refuses has no effect and returns an error.
unsafe impl BackendLayer for Validated<'_> {
    fn below(&self) -> &dyn Backend {
        &*self.inner
    }

    fn around<T: Answer>(&self, call: &Call, forward: impl FnOnce(&dyn Backend) -> Result<T>) -> Result<T> {
        self.books.call(call, || forward(&*self.inner))
    }

    fn record_event(&self, event: EventId, stream: StreamId) -> Result<()> {
        let call = Call::new("record_event", &[&event, &stream]);
        let answer = self.books.call(&call, || self.inner.record_event(event, stream));
        if answer.is_ok() && event.device() != stream.device() {
            self.books.found(format!("wrong device: `record_event` recorded {event:?} on {stream:?}"));
        }
        answer
    }

    fn allocate(&self, device: u32, options: &AllocateOptions) -> Result<DevicePtr> {
        const OPERATION: &str = "allocate";
        let at = origin::take();
        let stream = match options.kind {
            DeviceMemoryKind::StreamOrdered(stream) => Some(stream),
            _ => None,
        };
        let call = || self.inner.allocate(device, options);
        let ptr = self.books.with_ids(OPERATION, stream.map(Stream).as_slice(), call)?;
        self.books.given(OPERATION, on(device, ptr), options.bytes as u64, Holding::of(options.kind), at);
        if let Some(stream) = stream.filter(|stream| stream.device() != device) {
            self.books.found(format!("wrong device: `{OPERATION}` gave memory of device {device} on {stream:?}"));
        }
        Ok(ptr)
    }

    unsafe fn free(&self, device: u32, ptr: DevicePtr, stream: Option<StreamId>) -> Result<()> {
        let misuse = |holding| match (holding, stream) {
            (Holding::StreamOrdered(of), Some(stream)) if of.device() != stream.device() => Some("wrong device".into()),
            (Holding::StreamOrdered(_), Some(_)) | (Holding::Plain | Holding::Shareable(_), None) => None,
            (Holding::Mapped { .. }, _) => Some("memory of another process must be closed, not freed".into()),
            (Holding::Piece { .. }, _) => Some("mapped memory must be unmapped, not freed".into()),
            (Holding::StreamOrdered(of), None) => {
                Some(format!("wrong stream: the memory belongs to {of:?} and was freed on none"))
            }
            (_, stream) => Some(format!("wrong stream: the memory belongs to none and was freed on {stream:?}")),
        };
        // SAFETY: the caller promises what `free` asks for.
        self.books.releasing("free", on(device, ptr), misuse, || unsafe { self.inner.free(device, ptr, stream) })
    }

    fn reserve_addresses(&self, device: u32, bytes: usize) -> Result<DevicePtr> {
        const OPERATION: &str = "reserve_addresses";
        let at = origin::take();
        let ptr = self.books.with_ids(OPERATION, &[], || self.inner.reserve_addresses(device, bytes))?;
        let bytes = bytes as u64;
        self.books.given(OPERATION, (Space::Reserved(device), ptr.get()), bytes, Holding::Addresses { bytes }, at);
        Ok(ptr)
    }

    unsafe fn free_addresses(&self, device: u32, ptr: DevicePtr, bytes: usize) -> Result<()> {
        let mapped =
            self.books.ledger().pieces.range(ptr.get()..ptr.get().saturating_add(bytes as u64)).next().is_some();
        let misuse = |holding| match holding {
            _ if mapped => Some("memory is mapped there".to_owned()),
            Holding::Addresses { bytes: reserved } if reserved == bytes as u64 => None,
            _ => Some(format!("{bytes} bytes are not the whole range")),
        };
        // SAFETY: the caller promises what `free_addresses` asks for.
        let call = || unsafe { self.inner.free_addresses(device, ptr, bytes) };
        self.books.releasing("free_addresses", (Space::Reserved(device), ptr.get()), misuse, call)
    }

    fn create_memory(&self, device: u32, options: &PhysicalMemoryOptions) -> Result<PhysicalMemoryId> {
        let call = Call::new("create_memory", &[&device]);
        let memory = self.books.call(&call, || self.inner.create_memory(device, options))?;
        self.books.ledger().memory.insert(memory, (options.bytes as u64, options.shareable));
        Ok(memory)
    }

    unsafe fn map_memory(&self, device: u32, ptr: DevicePtr, memory: PhysicalMemoryId) -> Result<()> {
        let call = Call::new("map_memory", &[&device, &memory]);
        // SAFETY: the caller promises what `map_memory` asks for.
        self.books.call(&call, || unsafe { self.inner.map_memory(device, ptr, memory) })?;
        self.books.ledger().mapped(device, ptr.get(), memory);
        Ok(())
    }

    unsafe fn set_memory_access(&self, device: u32, ptr: DevicePtr, bytes: usize, accessing: u32) -> Result<()> {
        let at = origin::take();
        let call = Call::new("set_memory_access", &[&device]);
        // SAFETY: the caller promises what `set_memory_access` asks for.
        self.books.call(&call, || unsafe { self.inner.set_memory_access(device, ptr, bytes, accessing) })?;
        self.books.ledger().accessed((ptr.get(), bytes as u64), accessing, at);
        Ok(())
    }

    unsafe fn unmap_memory(&self, device: u32, ptr: DevicePtr, bytes: usize) -> Result<()> {
        let call = Call::new("unmap_memory", &[&device]);
        // SAFETY: the caller promises what `unmap_memory` asks for.
        self.books.call(&call, || unsafe { self.inner.unmap_memory(device, ptr, bytes) })?;
        self.books.ledger().unmapped(ptr.get(), bytes as u64);
        Ok(())
    }

    unsafe fn copy(&self, copy: &MemoryCopy, stream: StreamId) -> Result<()> {
        let bytes = copy.bytes as u64;
        let sides = [("the destination", side(copy.dst), bytes), ("the source", side(copy.src), bytes)];
        // SAFETY: the caller promises what `copy` asks for.
        self.books.using("copy", stream, &sides, || unsafe { self.inner.copy(copy, stream) })
    }

    unsafe fn copy_2d(&self, copy: &MemoryCopy2d, stream: StreamId) -> Result<()> {
        let extent = |bytes: Option<usize>| bytes.map_or(u64::MAX, |bytes| bytes as u64);
        let sides = [
            ("the destination", side(copy.dst), extent(copy.shape.dst_bytes())),
            ("the source", side(copy.src), extent(copy.shape.src_bytes())),
        ];
        // SAFETY: the caller promises what `copy_2d` asks for.
        self.books.using("copy_2d", stream, &sides, || unsafe { self.inner.copy_2d(copy, stream) })
    }

    unsafe fn fill(&self, fill: &MemoryFill, stream: StreamId) -> Result<()> {
        let bytes = (fill.count as u64).saturating_mul(fill.pattern.bytes() as u64);
        let range = [("the range", on(fill.device, fill.dst), bytes)];
        // SAFETY: the caller promises what `fill` asks for.
        self.books.using("fill", stream, &range, || unsafe { self.inner.fill(fill, stream) })
    }

    fn create_blas_handle(&self, device: u32, options: &BlasOptions) -> Result<Box<dyn BlasHandle>> {
        let at = origin::take();
        self.books.enter("create_blas_handle")?;
        let create = || self.inner.create_blas_handle(device, options);
        let handle = self.books.calling("create_blas_handle", create)?;
        Ok(Box::new(ValidatedHandle::new(handle, &self.books, device, options.kind, at)))
    }

    // The backend is asked each time: its answer must not change.
    fn host_allocator(&self) -> Arc<dyn HostAllocator> {
        let inner = self.inner.host_allocator();
        let (first, layer) = self.allocator.get_or_init(|| {
            let layer = ValidatedAllocator { inner: Arc::clone(&inner), books: Arc::clone(&self.books) };
            (Arc::clone(&inner), Arc::new(layer))
        });
        if !Arc::ptr_eq(first, &inner) {
            self.books.found("`host_allocator` returned another allocator than before".to_owned());
        }
        Arc::clone(layer)
    }

    fn ipc_sharing(&self) -> Option<Arc<dyn IpcSharing>> {
        let inner = self.inner.ipc_sharing()?;
        let (first, layer) = self.sharing.get_or_init(|| {
            let layer = ValidatedSharing { inner: Arc::clone(&inner), books: Arc::clone(&self.books) };
            (Arc::clone(&inner), Arc::new(layer))
        });
        if !Arc::ptr_eq(first, &inner) {
            self.books.found("`ipc_sharing` returned another object than before".to_owned());
        }
        Some(Arc::clone(layer))
    }
}
