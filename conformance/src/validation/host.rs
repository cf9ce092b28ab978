//! The trait `HostAllocator`, handed through.

use std::sync::Arc;

use highwater_hal::{DevicePtr, HostAllocator, HostOptions, HostPtr, Result};

use super::book::{Holding, Space};
use super::{Watch, origin};

#[derive(Debug)]
pub(super) struct WatchedAllocator {
    inner: Arc<dyn HostAllocator>,
    watch: Arc<Watch>,
}

impl WatchedAllocator {
    pub(super) fn new(inner: Arc<dyn HostAllocator>, watch: &Arc<Watch>) -> Self {
        Self { inner, watch: Arc::clone(watch) }
    }
}

fn at(ptr: HostPtr) -> (Space, u64) {
    (Space::Host, ptr.address() as u64)
}

// SAFETY: every call goes to an allocator that keeps the clauses, with the arguments that came and the answer that it gives;
// a call that the gate keeps back does nothing and gives an error.
unsafe impl HostAllocator for WatchedAllocator {
    fn allocate(&self, bytes: usize, options: &HostOptions) -> Result<HostPtr> {
        const OPERATION: &str = "host allocate";
        let place = origin::take();
        self.watch.enter(OPERATION)?;
        let ptr = self.inner.allocate(bytes, options)?;
        self.watch.given(OPERATION, at(ptr), bytes as u64, Holding::HostAllocated, place);
        Ok(ptr)
    }

    unsafe fn free(&self, ptr: HostPtr) -> Result<()> {
        let misuse =
            |holding| (holding != Holding::HostAllocated).then(|| "memory was freed that was registered".into());
        // SAFETY: handed on as it came.
        self.watch.releasing("host free", at(ptr), misuse, || unsafe { self.inner.free(ptr) })
    }

    unsafe fn register(&self, ptr: HostPtr, bytes: usize, options: &HostOptions) -> Result<()> {
        const OPERATION: &str = "register";
        let place = origin::take();
        self.watch.enter(OPERATION)?;
        // SAFETY: handed on as it came.
        unsafe { self.inner.register(ptr, bytes, options)? };
        self.watch.given(OPERATION, at(ptr), bytes as u64, Holding::HostRegistered, place);
        Ok(())
    }

    unsafe fn unregister(&self, ptr: HostPtr) -> Result<()> {
        let misuse =
            |holding| (holding != Holding::HostRegistered).then(|| "memory was unregistered that was allocated".into());
        // SAFETY: handed on as it came.
        self.watch.releasing("unregister", at(ptr), misuse, || unsafe { self.inner.unregister(ptr) })
    }

    fn device_address(&self, ptr: HostPtr, device: u32) -> Result<DevicePtr> {
        self.watch.on_device("device_address", device, || self.inner.device_address(ptr, device))
    }
}
