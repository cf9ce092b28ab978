//! Schedules of threads that chance hardly ever makes, forced by a backend that runs something around one of its calls.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use highwater_core::{
    AllocateOptions, Backend, BlasHandle, BlasOptions, Capabilities, Completion, DeviceInfo, DevicePtr, EventId,
    EventOptions, HostAllocator, Identity, LiveObjects, MemoryCopy, MemoryFill, MemoryInfo, Result, Runtime, StreamId,
    StreamOptions,
};
use highwater_mock::{MockGpu, MockOptions};

/// Something to run once, in another thread.
type Hook = Mutex<Option<Box<dyn FnOnce() + Send>>>;

struct Hooked {
    gpu: Arc<MockGpu>,
    after_synchronize_event: Hook,
    before_stream_wait_event: Hook,
}

impl fmt::Debug for Hooked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hooked").field("gpu", &self.gpu).finish_non_exhaustive()
    }
}

fn run(hook: &Hook) {
    let hook = hook.lock().unwrap().take();
    if let Some(hook) = hook {
        thread::spawn(hook).join().unwrap();
    }
}

// SAFETY: everything is passed on to the mock.
unsafe impl Backend for Hooked {
    fn identity(&self) -> &Identity {
        self.gpu.identity()
    }
    fn device_count(&self) -> u32 {
        self.gpu.device_count()
    }
    fn device_info(&self, device: u32) -> Result<DeviceInfo> {
        self.gpu.device_info(device)
    }
    fn capabilities(&self, device: u32) -> Result<Capabilities> {
        self.gpu.capabilities(device)
    }
    fn memory_info(&self, device: u32) -> Result<MemoryInfo> {
        self.gpu.memory_info(device)
    }
    fn live_objects(&self) -> LiveObjects {
        self.gpu.live_objects()
    }
    fn is_exiting(&self) -> bool {
        self.gpu.is_exiting()
    }
    fn create_stream(&self, device: u32, options: &StreamOptions) -> Result<StreamId> {
        self.gpu.create_stream(device, options)
    }
    fn destroy_stream(&self, stream: StreamId) -> Result<()> {
        self.gpu.destroy_stream(stream)
    }
    fn query_stream(&self, stream: StreamId) -> Result<Completion> {
        self.gpu.query_stream(stream)
    }
    fn synchronize_stream(&self, stream: StreamId) -> Result<()> {
        self.gpu.synchronize_stream(stream)
    }
    fn synchronize_device(&self, device: u32) -> Result<()> {
        self.gpu.synchronize_device(device)
    }
    fn stream_wait_event(&self, stream: StreamId, event: EventId) -> Result<()> {
        run(&self.before_stream_wait_event);
        self.gpu.stream_wait_event(stream, event)
    }
    fn create_event(&self, device: u32, options: &EventOptions) -> Result<EventId> {
        self.gpu.create_event(device, options)
    }
    fn destroy_event(&self, event: EventId) -> Result<()> {
        self.gpu.destroy_event(event)
    }
    fn record_event(&self, event: EventId, stream: StreamId) -> Result<()> {
        self.gpu.record_event(event, stream)
    }
    fn query_event(&self, event: EventId) -> Result<Completion> {
        self.gpu.query_event(event)
    }
    fn synchronize_event(&self, event: EventId) -> Result<()> {
        let result = self.gpu.synchronize_event(event);
        run(&self.after_synchronize_event);
        result
    }
    fn allocate(&self, device: u32, options: &AllocateOptions) -> Result<DevicePtr> {
        self.gpu.allocate(device, options)
    }
    unsafe fn free(&self, device: u32, ptr: DevicePtr, stream: Option<StreamId>) -> Result<()> {
        // SAFETY: the caller's promises are those that the mock asks for.
        unsafe { self.gpu.free(device, ptr, stream) }
    }
    unsafe fn copy(&self, copy: &MemoryCopy, stream: StreamId) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.gpu.copy(copy, stream) }
    }
    unsafe fn fill(&self, fill: &MemoryFill, stream: StreamId) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.gpu.fill(fill, stream) }
    }
    fn create_blas_handle(&self, device: u32, options: &BlasOptions) -> Result<Box<dyn BlasHandle>> {
        self.gpu.create_blas_handle(device, options)
    }
    fn host_allocator(&self) -> Arc<dyn HostAllocator> {
        self.gpu.host_allocator()
    }
}

fn open() -> (Arc<Hooked>, Runtime) {
    let gpu = MockGpu::open(MockOptions::new()).unwrap();
    let hooked =
        Arc::new(Hooked { gpu, after_synchronize_event: Hook::default(), before_stream_wait_event: Hook::default() });
    (hooked.clone(), Runtime::new(hooked).unwrap())
}

#[test]
fn a_reader_does_not_forget_a_use_that_came_while_it_waited() {
    let (hooked, runtime) = open();
    let device = runtime.device(0).unwrap();
    let (writer, reader) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let buffer = Arc::new(device.allocate::<u8>(64).unwrap());
    let mut pinned = runtime.pinned::<u8>(64).unwrap();
    writer.copy_to_host(&*buffer, &mut pinned).unwrap();
    let pinned = Arc::new(pinned);
    let (same, stream, target, gpu) = (pinned.clone(), reader.clone(), buffer.clone(), hooked.gpu.clone());
    // Another thread, between "the mark is passed" and "its use is struck out" of the first one: the event of the use that
    // it strikes out itself would be the next to be recorded.
    *hooked.after_synchronize_event.lock().unwrap() = Some(Box::new(move || {
        same.read().unwrap();
        gpu.set_latency(Duration::from_millis(100));
        stream.copy_to_device(&*same, &*target).unwrap();
    }));
    pinned.read().unwrap();
    let mut pinned = Arc::try_unwrap(pinned).unwrap();
    pinned.write().unwrap().fill(1);
    assert!(reader.is_complete().unwrap(), "the memory was given out while the second stream still read it");
}

#[test]
fn a_copy_waits_for_the_write_it_would_race_with_although_that_use_was_marked_anew() {
    let (hooked, runtime) = open();
    let device = runtime.device(0).unwrap();
    let [writer, reader, third] = std::array::from_fn(|_| device.create_stream().unwrap());
    let [source, target, other] = std::array::from_fn(|_| Arc::new(device.allocate::<u8>(64).unwrap()));
    let mut pinned = runtime.pinned::<u8>(64).unwrap();
    pinned.write().unwrap().fill(0);
    hooked.gpu.set_latency(Duration::from_millis(5));
    for _ in 0..20 {
        writer.fill(&*source, 9).unwrap();
    }
    writer.copy_to_host(&*source, &mut pinned).unwrap();
    let pinned = Arc::new(pinned);
    let (same, stream, aside) = (pinned.clone(), writer.clone(), other.clone());
    // While the reader is about to wait for the writer's mark: a new mark takes its place, and a third stream takes
    // whatever event is free.
    *hooked.before_stream_wait_event.lock().unwrap() = Some(Box::new(move || {
        stream.copy_to_device(&*same, &*aside).unwrap();
        std::mem::forget(third.record().unwrap());
    }));
    reader.copy_to_device(&*pinned, &*target).unwrap();
    assert_eq!(reader.download(&*target).unwrap(), [9; 64], "the copy read the memory before it was written");
}
