//! The layer over a `Backend`.

use std::sync::Arc;

use highwater_hal::AnyId::Stream;
use highwater_hal::{
    AllocateOptions, Answer, Backend, BackendLayer, BlasHandle, BlasOptions, Call, DeviceMemoryKind, DevicePtr,
    EventId, HostAllocator, IpcSharing, MemoryCopy, MemoryFill, Result, StreamId,
};

use super::blas::ValidatedHandle;
use super::host::ValidatedAllocator;
use super::ranges::{Holding, on, side};
use super::sharing::ValidatedSharing;
use super::{Validated, origin};

// SAFETY: every call goes to a backend that keeps the clauses, with unchanged arguments, and its answer is returned unchanged.
// A call that the gate refuses has no effect and returns an error.
unsafe impl BackendLayer for Validated<'_> {
    fn below(&self) -> &dyn Backend {
        self.inner
    }

    fn around<T: Answer>(&self, call: &Call, forward: impl FnOnce(&dyn Backend) -> Result<T>) -> Result<T> {
        self.books.call(call, || forward(self.inner))
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
            (Holding::StreamOrdered(of), None) => {
                Some(format!("wrong stream: the memory belongs to {of:?} and was freed on none"))
            }
            (_, stream) => Some(format!("wrong stream: the memory belongs to none and was freed on {stream:?}")),
        };
        // SAFETY: the caller promises what `free` asks for.
        self.books.releasing("free", on(device, ptr), misuse, || unsafe { self.inner.free(device, ptr, stream) })
    }

    unsafe fn copy(&self, copy: &MemoryCopy, stream: StreamId) -> Result<()> {
        const OPERATION: &str = "copy";
        let bytes = copy.bytes as u64;
        let sides = [("the destination", side(copy.dst), bytes), ("the source", side(copy.src), bytes)];
        let misuse = self.books.misuse(&sides);
        // SAFETY: the caller promises what `copy` asks for.
        let call = || unsafe { self.inner.copy(copy, stream) };
        let answer = self.books.with_ids(OPERATION, &[Stream(stream)], call);
        self.books.judge_use(OPERATION, misuse, &answer);
        answer
    }

    unsafe fn fill(&self, fill: &MemoryFill, stream: StreamId) -> Result<()> {
        const OPERATION: &str = "fill";
        let bytes = (fill.count as u64).saturating_mul(fill.pattern.bytes() as u64);
        let misuse = self.books.misuse(&[("the range", on(fill.device, fill.dst), bytes)]);
        // SAFETY: the caller promises what `fill` asks for.
        let call = || unsafe { self.inner.fill(fill, stream) };
        let answer = self.books.with_ids(OPERATION, &[Stream(stream)], call);
        self.books.judge_use(OPERATION, misuse, &answer);
        answer
    }

    fn create_blas_handle(&self, device: u32, options: &BlasOptions) -> Result<Box<dyn BlasHandle>> {
        let at = origin::take();
        self.books.enter("create_blas_handle")?;
        let handle = self.inner.create_blas_handle(device, options)?;
        Ok(Box::new(ValidatedHandle::new(handle, &self.books, device, options.kind, at)))
    }

    // The backend is asked each time: its answer must not change.
    fn host_allocator(&self) -> Arc<dyn HostAllocator> {
        Arc::new(ValidatedAllocator { inner: self.inner.host_allocator(), books: Arc::clone(&self.books) })
    }

    fn ipc_sharing(&self) -> Option<Arc<dyn IpcSharing>> {
        let inner = self.inner.ipc_sharing()?;
        Some(Arc::new(ValidatedSharing { inner, books: Arc::clone(&self.books) }))
    }
}
