//! The layer over a `HostAllocator`.

use std::sync::Arc;

use highwater_hal::{Answer, Call, HostAllocator, HostLayer, HostOptions, HostPtr, Result};

use super::ranges::{Holding, Space};
use super::{Books, origin};

#[derive(Debug)]
pub(super) struct ValidatedAllocator {
    pub(super) inner: Arc<dyn HostAllocator>,
    pub(super) books: Arc<Books>,
}

fn at(ptr: HostPtr) -> (Space, u64) {
    (Space::Host, ptr.address() as u64)
}

// SAFETY: every call goes to an allocator that keeps the clauses, with unchanged arguments, and its answer is returned
// unchanged. A call that the gate refuses has no effect and returns an error.
unsafe impl HostLayer for ValidatedAllocator {
    fn below(&self) -> &dyn HostAllocator {
        &*self.inner
    }

    fn around<T: Answer>(&self, call: &Call, forward: impl FnOnce(&dyn HostAllocator) -> Result<T>) -> Result<T> {
        self.books.call(call, || forward(&*self.inner))
    }

    fn allocate(&self, bytes: usize, options: &HostOptions) -> Result<HostPtr> {
        const OPERATION: &str = "host_allocate";
        let place = origin::take();
        self.books.enter(OPERATION)?;
        let ptr = self.books.calling(OPERATION, || self.inner.allocate(bytes, options))?;
        self.books.given(OPERATION, at(ptr), bytes as u64, Holding::HostAllocated, place);
        Ok(ptr)
    }

    unsafe fn free(&self, ptr: HostPtr) -> Result<()> {
        let misuse = |holding| (holding != Holding::HostAllocated).then(|| "registered memory was freed".into());
        // SAFETY: the caller promises what `free` asks for.
        self.books.releasing("host_free", at(ptr), misuse, || unsafe { self.inner.free(ptr) })
    }

    unsafe fn register(&self, ptr: HostPtr, bytes: usize, options: &HostOptions) -> Result<()> {
        const OPERATION: &str = "host_register";
        let place = origin::take();
        self.books.enter(OPERATION)?;
        // SAFETY: the caller promises what `register` asks for.
        self.books.calling(OPERATION, || unsafe { self.inner.register(ptr, bytes, options) })?;
        self.books.given(OPERATION, at(ptr), bytes as u64, Holding::HostRegistered, place);
        Ok(())
    }

    unsafe fn unregister(&self, ptr: HostPtr) -> Result<()> {
        let misuse = |holding| (holding != Holding::HostRegistered).then(|| "allocated memory was unregistered".into());
        // SAFETY: the caller promises what `unregister` asks for.
        self.books.releasing("host_unregister", at(ptr), misuse, || unsafe { self.inner.unregister(ptr) })
    }
}
