//! A plugin for tests: whatever needs the device panics, and so does its destructor.

use std::sync::Arc;

use highwater_hal::{
    AllocateOptions, Backend, BackendTag, BlasHandle, BlasOptions, Capabilities, Completion, DeviceInfo, DevicePtr,
    Error, ErrorKind, EventId, EventOptions, HostAllocator, HostOptions, HostPtr, IdTable, Identity, LiveObjects,
    MemoryCopy, MemoryFill, MemoryInfo, Result, StreamId, StreamOptions,
};

highwater_plugin::export_backend! {
    name: "panicking",
    description: "A backend that panics",
    vendor: "Highwater",
    version: env!("CARGO_PKG_VERSION"),
    open: open,
}

/// Panics at once where the environment asks for it.
fn open() -> Result<Arc<Panicking>> {
    match std::env::var("HWTEST_PANICKING").as_deref() {
        Ok("open") => panic!("no backend today"),
        Ok("error") => {
            Err(Error::new(ErrorKind::DeviceMissing, "open", "no device today").with_code(7).with_hint("wait"))
        }
        _ => {
            let tag = BackendTag::next();
            let identity = Identity::new("panicking", "A backend that panics", tag);
            Ok(Arc::new(Panicking { identity, streams: IdTable::new(tag) }))
        }
    }
}

#[derive(Debug)]
struct Panicking {
    identity: Identity,
    streams: IdTable<StreamId, ()>,
}

impl Drop for Panicking {
    fn drop(&mut self) {
        panic!("the destructor panics too");
    }
}

#[derive(Debug)]
struct NoMemory;

// SAFETY: it never gives a block.
unsafe impl HostAllocator for NoMemory {
    fn allocate(&self, bytes: usize, _: &HostOptions) -> Result<HostPtr> {
        panic!("no {bytes} bytes today")
    }

    unsafe fn free(&self, _: HostPtr) -> Result<()> {
        panic!("there is no block")
    }

    fn device_address(&self, _: HostPtr, _: u32) -> Result<DevicePtr> {
        panic!("there is no block")
    }
}

// SAFETY: no work is ever enqueued, and no block is ever given.
unsafe impl Backend for Panicking {
    fn identity(&self) -> &Identity {
        &self.identity
    }

    fn device_count(&self) -> u32 {
        1
    }

    fn device_info(&self, device: u32) -> Result<DeviceInfo> {
        Ok(DeviceInfo::new(device, "panicking", [1; 16], 1 << 20))
    }

    fn capabilities(&self, _: u32) -> Result<Capabilities> {
        Ok(Capabilities::none())
    }

    fn memory_info(&self, _: u32) -> Result<MemoryInfo> {
        panic!("{}", "x".repeat(600))
    }

    fn live_objects(&self) -> LiveObjects {
        LiveObjects::default()
    }

    fn is_exiting(&self) -> bool {
        false
    }

    fn create_stream(&self, device: u32, _: &StreamOptions) -> Result<StreamId> {
        self.streams.insert("create_stream", device, Arc::new(()))
    }

    fn destroy_stream(&self, stream: StreamId) -> Result<()> {
        self.streams.remove("destroy_stream", stream).map(drop)
    }

    fn query_stream(&self, stream: StreamId) -> Result<Completion> {
        self.streams.check("query_stream", stream)?;
        Ok(Completion::Complete)
    }

    fn synchronize_stream(&self, _: StreamId) -> Result<()> {
        std::panic::panic_any(4711)
    }

    fn synchronize_device(&self, device: u32) -> Result<()> {
        panic!("device {device} is not waited for")
    }

    fn stream_wait_event(&self, _: StreamId, _: EventId) -> Result<()> {
        panic!("there is no event")
    }

    fn create_event(&self, _: u32, _: &EventOptions) -> Result<EventId> {
        panic!("there is no event")
    }

    fn destroy_event(&self, _: EventId) -> Result<()> {
        panic!("there is no event")
    }

    fn record_event(&self, _: EventId, _: StreamId) -> Result<()> {
        panic!("there is no event")
    }

    fn query_event(&self, _: EventId) -> Result<Completion> {
        panic!("there is no event")
    }

    fn synchronize_event(&self, _: EventId) -> Result<()> {
        panic!("there is no event")
    }

    fn allocate(&self, _: u32, _: &AllocateOptions) -> Result<DevicePtr> {
        panic!("no memory today")
    }

    unsafe fn free(&self, _: u32, _: DevicePtr, _: Option<StreamId>) -> Result<()> {
        panic!("there is no block")
    }

    unsafe fn copy(&self, _: &MemoryCopy, _: StreamId) -> Result<()> {
        panic!("there is no block")
    }

    unsafe fn fill(&self, _: &MemoryFill, _: StreamId) -> Result<()> {
        panic!("there is no block")
    }

    fn create_blas_handle(&self, _: u32, _: &BlasOptions) -> Result<Box<dyn BlasHandle>> {
        panic!("no handle today")
    }

    fn host_allocator(&self) -> Arc<dyn HostAllocator> {
        Arc::new(NoMemory)
    }
}
