//! Buffers over device memory that other code allocated: their checks, and the end of what keeps the memory.

use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use highwater_core::{
    AllocateOptions, Answer, Backend, BackendLayer, Call, Device, DeviceBuffer, DeviceMemoryKind, DevicePtr, Element,
    Error, ErrorKind, HostAllocator, IpcSharing, Matrix, MemoryRange, PhysicalMemoryOptions, RangeKind, Result,
    Runtime, Stream, Ticket, Transport,
};
use highwater_mock::{MockGpu, MockOptions, Operation};

/// Memory of another library, which frees it when it is dropped.
struct Foreign {
    gpu: Arc<MockGpu>,
    ptr: DevicePtr,
    dropped: Arc<AtomicUsize>,
}

impl Drop for Foreign {
    fn drop(&mut self) {
        self.dropped.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the tests drop it when no work uses the memory any more, which the mock checks.
        unsafe { self.gpu.free(0, self.ptr, None) }.unwrap();
    }
}

/// Counts its drops.
struct Counts(Arc<AtomicUsize>);

impl Drop for Counts {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

struct Rig {
    gpu: Arc<MockGpu>,
    runtime: Runtime,
    device: Device,
    stream: Stream,
    dropped: Arc<AtomicUsize>,
}

impl Rig {
    fn new() -> Self {
        Self::with(MockOptions::new())
    }

    fn with(options: MockOptions) -> Self {
        let gpu = MockGpu::open(options).unwrap();
        let runtime = Runtime::new(gpu.clone()).unwrap();
        let device = runtime.device(0).unwrap();
        let stream = device.create_stream().unwrap();
        Self { gpu, runtime, device, stream, dropped: Arc::default() }
    }

    fn foreign(&self, bytes: usize, kind: DeviceMemoryKind) -> Foreign {
        let ptr = self.gpu.allocate(0, &AllocateOptions::new(bytes).with_kind(kind)).unwrap();
        Foreign { gpu: self.gpu.clone(), ptr, dropped: self.dropped.clone() }
    }

    fn shareable(&self, bytes: usize) -> Foreign {
        self.foreign(bytes, DeviceMemoryKind::Shareable(Transport::Descriptor))
    }

    fn dropped(&self) -> usize {
        self.dropped.load(Ordering::SeqCst)
    }

    /// Adopts memory that `keep` keeps, and that nothing else uses.
    fn adopt<T: Element>(&self, ptr: DevicePtr, bytes: usize, keep: impl Send + 'static) -> DeviceBuffer<T> {
        // SAFETY: as every caller in this file ensures.
        unsafe { self.device.adopt(ptr, bytes, keep) }.unwrap()
    }

    /// The error of adopting bytes as `T`.
    fn refusal<T: Element>(&self, ptr: DevicePtr, bytes: usize) -> Error {
        // SAFETY: the call must be refused.
        let error = unsafe { self.device.adopt::<T>(ptr, bytes, ()) }.map(drop).unwrap_err();
        assert_eq!(error.operation(), "adopt", "{error}");
        assert!(!error.hint().is_empty(), "{error}");
        error
    }

    /// Drops everything, and checks that nothing is left.
    #[track_caller]
    fn end(self) {
        let Self { gpu, runtime, device, stream, .. } = self;
        drop((device, stream));
        runtime.close().unwrap();
        assert_eq!(gpu.live_objects().total(), 0, "{:?}", gpu.live_objects());
    }
}

/// Waits until something is so.
#[track_caller]
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < deadline, "not so within a minute: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Several mappings of other code without a gap, which end when this is dropped.
struct Mapped {
    gpu: Arc<MockGpu>,
    ptr: DevicePtr,
    piece: usize,
    count: usize,
}

impl Mapped {
    fn new(gpu: &Arc<MockGpu>, count: usize, shareable: bool) -> Self {
        let piece = gpu.capabilities(0).unwrap().mapped_memory_granularity;
        let ptr = gpu.reserve_addresses(0, (count + 1) * piece).unwrap();
        for index in 0..count {
            let options = PhysicalMemoryOptions::new(piece);
            let options = if shareable { options.with_shareable(Transport::Descriptor) } else { options };
            let memory = gpu.create_memory(0, &options).unwrap();
            // SAFETY: the addresses are this test's, and each piece has its own.
            unsafe { gpu.map_memory(0, ptr.offset(index * piece), memory) }.unwrap();
            gpu.destroy_memory(memory).unwrap();
        }
        // SAFETY: as above.
        unsafe { gpu.set_memory_access(0, ptr, count * piece, 0) }.unwrap();
        Self { gpu: gpu.clone(), ptr, piece, count }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the tests drop it when no work uses the memory any more, which the mock checks.
        unsafe {
            self.gpu.unmap_memory(0, self.ptr, self.count * self.piece).unwrap();
            self.gpu.free_addresses(0, self.ptr, (self.count + 1) * self.piece).unwrap();
        }
    }
}

#[test]
fn memory_allocated_past_the_pools_is_freed_after_its_last_use() {
    let rig = Rig::new();
    let before = rig.gpu.memory_info(0).unwrap().free;
    let buffer = rig.device.adopt_allocated::<u32>(1000, Transport::Descriptor).unwrap();
    assert_eq!(buffer.transport().unwrap(), Transport::Descriptor);
    rig.stream.fill(&buffer, 7_u32).unwrap();
    assert_eq!(rig.stream.download(&buffer).unwrap(), [7; 1000]);
    assert!(rig.gpu.memory_info(0).unwrap().free < before);
    drop(buffer);
    let deadline = Instant::now() + Duration::from_secs(20);
    while rig.gpu.memory_info(0).unwrap().free < before {
        assert!(Instant::now() < deadline, "the memory is not freed");
        std::thread::yield_now();
    }
    let none = rig.device.adopt_allocated::<u32>(0, Transport::Descriptor).map(drop).unwrap_err();
    assert_eq!(none.kind(), ErrorKind::InvalidArgument, "{none}");
    let lacks = rig.device.adopt_allocated::<u32>(8, Transport::Legacy).map(drop).unwrap_err();
    assert_eq!(lacks.kind(), ErrorKind::Unsupported, "{lacks}");
    assert!(lacks.message().contains("`ipc_transports` lacks Legacy"), "{lacks}");
    // The error of a step inside carries the name of the call too.
    rig.gpu.fail_call(Operation::DescribeMemory, 1, ErrorKind::Vendor).unwrap();
    let undescribed = rig.device.adopt_allocated::<u32>(8, Transport::Descriptor).map(drop).unwrap_err();
    assert_eq!(undescribed.kind(), ErrorKind::Vendor, "{undescribed}");
    for error in [none, lacks, undescribed] {
        assert_eq!(error.operation(), "adopt_allocated", "{error}");
    }
    rig.end();
}

#[test]
fn memory_past_the_pools_takes_the_place_of_memory_that_waits_for_streams() {
    let rig = Rig::with(MockOptions::new().with_memory_bytes(64 << 20));
    rig.gpu.set_latency(Duration::from_millis(5));
    let used = rig.device.allocate::<u8>(40 << 20).unwrap();
    rig.stream.fill_zero(used.slice(0..8).unwrap()).unwrap();
    // It is free once the fill is done.
    drop(used);
    let buffer = rig.device.adopt_allocated::<u8>(40 << 20, Transport::Descriptor).unwrap();
    let error = rig.device.adopt_allocated::<u8>(40 << 20, Transport::Descriptor).map(drop).unwrap_err();
    assert_eq!((error.kind(), error.operation()), (ErrorKind::OutOfMemory, "adopt_allocated"), "{error}");
    assert!(error.message().contains("the request is for 41943040 bytes of device 0, which has 67108864"), "{error}");
    drop(buffer);
    rig.end();
}

#[test]
fn a_refused_free_of_memory_allocated_past_the_pools_is_counted() {
    let rig = Rig::new();
    let buffer = rig.device.adopt_allocated::<u32>(1000, Transport::Descriptor).unwrap();
    rig.gpu.fail_call(Operation::Free, 1, ErrorKind::Vendor).unwrap();
    drop(buffer);
    until("the refusal is counted", || rig.runtime.statistics().failed_releases == 1);
}

#[test]
fn adopted_memory_works_as_any_other_and_is_not_freed() {
    let rig = Rig::new();
    let foreign = rig.foreign(4096, DeviceMemoryKind::Plain);
    // Inside the block, not at its start.
    let buffer = rig.adopt::<u32>(foreign.ptr.offset(1024), 2048, foreign);
    assert_eq!((buffer.len(), buffer.device()), (512, 0));
    rig.stream.fill(&buffer, 7_u32).unwrap();
    rig.stream.fill(buffer.slice(0..2).unwrap(), 9_u32).unwrap();
    assert_eq!(rig.stream.download(buffer.slice(0..4).unwrap()).unwrap(), [9, 9, 7, 7]);
    let copy = rig.stream.upload(&[1_u32; 512]).unwrap();
    rig.stream.copy(&copy, &buffer).unwrap();
    assert_eq!(rig.stream.download(&buffer).unwrap(), vec![1; 512]);
    let before = rig.gpu.calls(Operation::Free);
    drop(buffer);
    rig.stream.synchronize().unwrap();
    // Its owner freed it, once.
    assert_eq!((rig.dropped(), rig.gpu.calls(Operation::Free) - before), (1, 1));
    drop(copy);
    rig.end();
}

#[test]
fn what_keeps_the_memory_is_dropped_at_once_without_work_and_after_the_work_otherwise() {
    let rig = Rig::new();
    let foreign = rig.shareable(4096);
    drop(rig.adopt::<u8>(foreign.ptr, 4096, foreign));
    assert_eq!(rig.dropped(), 1);

    let rig2 = Rig::with(MockOptions::new().with_latency(Duration::from_millis(30)));
    let foreign = rig2.shareable(4096);
    let buffer = rig2.adopt::<u8>(foreign.ptr, 4096, foreign);
    rig2.stream.fill(&buffer, 1_u8).unwrap();
    drop(buffer);
    assert_eq!(rig2.dropped(), 0, "a stream still uses the memory");
    // Without any call of this test.
    until("the work is done", || rig2.dropped() == 1);
    rig.end();
    rig2.end();
}

#[test]
fn a_graph_keeps_adopted_memory_until_it_is_dropped() {
    let rig = Rig::new();
    let foreign = rig.shareable(4096);
    let buffer = rig.adopt::<u8>(foreign.ptr, 4096, foreign);
    let mut graph = rig.stream.capture(|stream| stream.fill(&buffer, 5_u8)).unwrap();
    drop(buffer);
    graph.launch(&rig.stream).unwrap();
    rig.stream.synchronize().unwrap();
    rig.runtime.trim_device_memory().unwrap();
    assert_eq!(rig.dropped(), 0);
    drop(graph);
    rig.stream.synchronize().unwrap();
    rig.runtime.trim_device_memory().unwrap();
    assert_eq!(rig.dropped(), 1);
    rig.end();
}

#[test]
fn a_drop_inside_a_capture_waits_for_its_end() {
    let rig = Rig::new();
    let foreign = rig.shareable(4096);
    let mut buffer = Some(rig.adopt::<u8>(foreign.ptr, 4096, foreign));
    let dropped = rig.dropped.clone();
    let graph = rig.stream.capture(|stream| {
        drop(buffer.take());
        assert_eq!(dropped.load(Ordering::SeqCst), 0, "the drop may call the driver, which a capture forbids");
        // SAFETY: the call must be refused.
        let error = unsafe { rig.device.adopt::<u8>(DevicePtr::new(4096), 1, ()) }.map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Capture);
        let _ = stream;
        Ok(())
    });
    drop(graph.unwrap());
    rig.runtime.trim_device_memory().unwrap();
    assert_eq!(rig.dropped(), 1);
    rig.end();
}

#[test]
fn two_buffers_over_the_same_bytes_and_over_an_own_buffer_are_fine() {
    let rig = Rig::new();
    let foreign = Arc::new(rig.shareable(4096));
    let first = rig.adopt::<u32>(foreign.ptr, 4096, foreign.clone());
    let second = rig.adopt::<u8>(foreign.ptr.offset(2048), 2048, foreign);
    rig.stream.fill(&first, 0x0404_0404_u32).unwrap();
    assert_eq!(rig.stream.download(&second).unwrap(), vec![4; 2048]);
    drop(first);
    assert_eq!(rig.dropped(), 0);
    drop(second);
    until("the block is let go", || rig.dropped() == 1);

    let own = rig.device.allocate::<u32>(64).unwrap();
    rig.stream.fill(&own, 3_u32).unwrap();
    rig.stream.synchronize().unwrap();
    let (ptr, bytes) = (own.ptr(), 256);
    let ended = Arc::<AtomicUsize>::default();
    let again = rig.adopt::<u32>(ptr, bytes, (own, Counts(ended.clone())));
    assert_eq!(rig.stream.download(&again).unwrap(), vec![3; 64]);
    drop(again);
    // Until its stream has passed the use, the buffer inside keeps the runtime.
    until("the buffer inside is dropped", || ended.load(Ordering::SeqCst) == 1);
    rig.end();
}

#[test]
fn bad_ranges_are_refused_with_a_remedy() {
    let rig = Rig::with(MockOptions::new().with_devices(2));
    let foreign = rig.shareable(4096);
    let at = |offset| foreign.ptr.offset(offset);
    let kind = |error: Error| error.kind();
    assert_eq!(kind(rig.refusal::<u8>(DevicePtr::new(0), 64)), ErrorKind::InvalidPointer);
    assert_eq!(kind(rig.refusal::<u8>(at(0), 0)), ErrorKind::InvalidArgument);
    assert_eq!(kind(rig.refusal::<u32>(at(0), 6)), ErrorKind::InvalidArgument);
    assert_eq!(kind(rig.refusal::<u32>(at(2), 8)), ErrorKind::InvalidArgument);
    assert_eq!(kind(rig.refusal::<[u8; 0]>(at(0), 8)), ErrorKind::InvalidArgument);
    let outside = rig.refusal::<u8>(at(4000), 97);
    assert_eq!(outside.kind(), ErrorKind::InvalidPointer);
    assert!(outside.message().contains("ends after 96"), "{outside}");
    assert_eq!(kind(rig.refusal::<u8>(at(0), usize::MAX - 4096)), ErrorKind::InvalidArgument);
    assert_eq!(kind(rig.refusal::<u8>(DevicePtr::new(u64::MAX - 8), 64)), ErrorKind::InvalidArgument);
    assert_eq!(kind(rig.refusal::<u8>(DevicePtr::new(4096), 64)), ErrorKind::InvalidPointer);
    let far = rig.gpu.allocate(1, &AllocateOptions::new(64)).unwrap();
    assert_eq!(kind(rig.refusal::<u8>(far, 64)), ErrorKind::WrongDevice);
    // SAFETY: nothing uses it.
    unsafe { rig.gpu.free(1, far, None) }.unwrap();
    // Two blocks of `allocate` are not one range, though they may lie next to each other.
    let (a, b) = (rig.shareable(4096), rig.shareable(4096));
    let low = a.ptr.min(b.ptr);
    assert_eq!(kind(rig.refusal::<u8>(low, 8192)), ErrorKind::InvalidPointer);
    drop((a, b, foreign));
    rig.end();
}

#[test]
fn a_refused_call_drops_what_it_was_given() {
    let rig = Rig::new();
    let foreign = rig.shareable(4096);
    let ptr = foreign.ptr;
    // SAFETY: the call must be refused.
    assert!(unsafe { rig.device.adopt::<u8>(ptr, 5000, foreign) }.is_err());
    assert_eq!(rig.dropped(), 1);
    rig.end();
}

#[test]
fn a_device_without_the_ability_refuses_before_the_backend_is_called() {
    let rig = Rig::with(MockOptions::new().with_capabilities(|can| can.foreign_memory = false));
    let error = rig.refusal::<u8>(DevicePtr::new(4096), 64);
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains("foreign_memory"), "{error}");
    assert_eq!(rig.gpu.calls(Operation::DescribeMemory), 0);
    rig.end();
}

#[test]
fn memory_of_a_pool_takes_part_in_all_work_and_is_not_shared() {
    let rig = Rig::new();
    let home = rig.gpu.create_stream(0, &highwater_core::StreamOptions::new()).unwrap();
    let options = AllocateOptions::new(4096).with_kind(DeviceMemoryKind::StreamOrdered(home));
    let ptr = rig.gpu.allocate(0, &options).unwrap();
    let buffer = rig.adopt::<u8>(ptr, 4096, ());
    rig.stream.fill(&buffer, 3_u8).unwrap();
    assert_eq!(rig.stream.download(&buffer).unwrap(), [3; 4096]);
    for error in [buffer.share().map(drop).unwrap_err(), buffer.transport().map(drop).unwrap_err()] {
        assert_eq!((error.kind(), error.operation()), (ErrorKind::InvalidArgument, "share"));
        assert!(error.message().contains("order of streams") && error.hint().contains("allocate_shared"), "{error}");
    }
    drop(buffer);
    // SAFETY: nothing uses it.
    unsafe { rig.gpu.free(0, ptr, Some(home)) }.unwrap();
    rig.gpu.destroy_stream(home).unwrap();
    rig.end();
}

/// A backend that describes all memory as managed.
#[derive(Debug)]
struct Managed(Arc<MockGpu>);

// SAFETY: the mock keeps the clauses, and the description is that of other memory.
unsafe impl BackendLayer for Managed {
    fn below(&self) -> &dyn Backend {
        &*self.0
    }

    fn around<T: Answer>(&self, _: &Call, forward: impl FnOnce(&dyn Backend) -> Result<T>) -> Result<T> {
        forward(&*self.0)
    }

    fn host_allocator(&self) -> Arc<dyn HostAllocator> {
        self.0.host_allocator()
    }

    fn ipc_sharing(&self) -> Option<Arc<dyn IpcSharing>> {
        self.0.ipc_sharing()
    }

    fn describe_memory(&self, device: u32, ptr: DevicePtr) -> Result<MemoryRange> {
        let mut range = self.0.describe_memory(device, ptr)?;
        range.kind = RangeKind::Managed;
        Ok(range)
    }
}

#[test]
fn managed_memory_takes_part_in_all_work_and_is_not_shared() {
    let gpu = MockGpu::open(MockOptions::new()).unwrap();
    let runtime = Runtime::new(Arc::new(Managed(gpu.clone()))).unwrap();
    let stream = runtime.device(0).unwrap().create_stream().unwrap();
    let ptr = gpu.allocate(0, &AllocateOptions::new(64)).unwrap();
    // SAFETY: the memory outlives the buffer, and nothing else uses it.
    let buffer = unsafe { DeviceBuffer::<u8>::from_raw(&runtime.device(0).unwrap(), ptr, 64) }.unwrap();
    stream.write(&[6_u8; 64], &buffer).unwrap();
    assert_eq!(stream.download(&buffer).unwrap(), [6; 64]);
    let error = buffer.share().map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.message().contains("managed") && error.hint().contains("Device::allocate_shared"), "{error}");
    drop(buffer);
    // SAFETY: nothing uses it.
    unsafe { gpu.free(0, ptr, None) }.unwrap();
}

#[test]
fn a_raw_buffer_works_in_products_and_its_drop_makes_no_call() {
    let rig = Rig::new();
    let foreign: Vec<_> = (0..3).map(|_| rig.foreign(1024, DeviceMemoryKind::Plain)).collect();
    // SAFETY: the memory outlives the buffers and their work.
    let raw = |index: usize| unsafe { DeviceBuffer::<f32>::from_raw(&rig.device, foreign[index].ptr, 4) }.unwrap();
    let (a, b, c) = (raw(0), raw(1), raw(2));
    rig.stream.write(&[1.0, 2.0, 3.0, 4.0], &a).unwrap();
    rig.stream.write(&[0.0, 1.0, 1.0, 0.0], &b).unwrap();
    let [left, right, product] = [&a, &b, &c].map(|buffer| Matrix::row_major(buffer, 2, 2));
    rig.stream.matmul(left, right, product).run().unwrap();
    let again = raw(0);
    rig.stream.copy(c.slice(0..2).unwrap(), a.slice(2..4).unwrap()).unwrap();
    assert_eq!(rig.stream.download(&again).unwrap(), [1.0, 2.0, 2.0, 1.0]);
    assert_eq!(rig.stream.download(&c).unwrap(), [2.0, 1.0, 4.0, 3.0]);
    let records = rig.gpu.calls(Operation::RecordEvent);
    rig.stream.fill_zero(&a).unwrap();
    drop((a, b, c, again));
    assert_eq!(rig.gpu.calls(Operation::RecordEvent), records, "nothing waits for the last use");
    assert_eq!(rig.dropped(), 0);
    rig.stream.synchronize().unwrap();
    drop(foreign);
    rig.end();
}

#[test]
fn a_raw_buffer_of_bad_memory_is_refused_with_the_place_of_the_memory() {
    let rig = Rig::with(MockOptions::new().with_devices(2));
    let refusal = |device: u32, ptr: DevicePtr, len: usize| {
        let device = rig.runtime.device(device).unwrap();
        // SAFETY: the call must be refused.
        let error = unsafe { DeviceBuffer::<u32>::from_raw(&device, ptr, len) }.map(drop).unwrap_err();
        assert_eq!(error.operation(), "from_raw");
        assert!(!error.hint().is_empty(), "{error}");
        error
    };
    let foreign = rig.shareable(4096);
    assert_eq!(refusal(0, DevicePtr::new(0), 1).kind(), ErrorKind::InvalidPointer);
    assert_eq!(refusal(0, DevicePtr::new(4096), 1).kind(), ErrorKind::InvalidPointer);
    assert_eq!(refusal(0, foreign.ptr, 0).kind(), ErrorKind::InvalidArgument);
    assert_eq!(refusal(0, foreign.ptr, usize::MAX / 2).kind(), ErrorKind::InvalidArgument);
    assert_eq!(refusal(0, foreign.ptr.offset(2), 1).kind(), ErrorKind::InvalidArgument);
    assert_eq!(refusal(0, foreign.ptr, 1025).kind(), ErrorKind::InvalidPointer);
    let elsewhere = refusal(1, foreign.ptr, 1024);
    assert_eq!(elsewhere.kind(), ErrorKind::WrongDevice);
    names_both_places(&rig, elsewhere.message());
    assert!(elsewhere.hint().contains("device 0"), "{elsewhere}");
    drop(foreign);
    rig.end();
}

/// Checks that a message has the ordinals and the UUIDs of both devices.
#[track_caller]
fn names_both_places(rig: &Rig, message: &str) {
    for ordinal in [0, 1] {
        let uuid = rig.runtime.device(ordinal).unwrap().info().uuid;
        let uuid: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        assert!(message.contains(&format!("device {ordinal} (UUID {uuid})")), "{message}");
    }
}

#[test]
fn streams_and_events_of_another_device_are_refused_with_their_place() {
    let rig = Rig::with(MockOptions::new().with_devices(2));
    let far = rig.gpu.create_stream(1, &highwater_core::StreamOptions::new()).unwrap();
    let event = rig.gpu.create_event(1, &highwater_core::EventOptions::new()).unwrap();
    let (raw_stream, raw_event) = (rig.gpu.raw_stream(far).unwrap(), rig.gpu.raw_event(event).unwrap());
    let live = rig.gpu.live_objects().total();
    // SAFETY: both are alive, and the calls must be refused.
    let refused = unsafe {
        [
            rig.device.stream_from_raw(raw_stream).map(drop).unwrap_err(),
            rig.device.event_from_raw(raw_event).map(drop).unwrap_err(),
            rig.stream.wait_raw(raw_event).unwrap_err(),
        ]
    };
    for (error, operation) in refused.iter().zip(["stream_from_raw", "event_from_raw", "wait_raw"]) {
        assert_eq!((error.kind(), error.operation()), (ErrorKind::WrongDevice, operation), "{error}");
        names_both_places(&rig, error.message());
    }
    assert_eq!(rig.gpu.live_objects().total(), live, "the search leaves nothing behind");
    rig.gpu.destroy_event(event).unwrap();
    rig.gpu.destroy_stream(far).unwrap();
    rig.end();
}

#[test]
fn the_transport_is_found_by_trying_and_memory_without_one_says_why() {
    let rig = Rig::new();
    let foreign = rig.shareable(4096);
    let buffer = rig.adopt::<u8>(foreign.ptr, 4096, foreign);
    assert_eq!(buffer.transport().unwrap(), Transport::Descriptor);
    assert_eq!(rig.gpu.calls(Operation::ExportMemory), 1);
    assert_eq!(buffer.share().unwrap().transport(), Transport::Descriptor);
    assert_eq!(rig.gpu.calls(Operation::ExportMemory), 1, "the attempt is made once");
    drop(buffer);

    let plain = rig.foreign(4096, DeviceMemoryKind::Plain);
    let buffer = rig.adopt::<u8>(plain.ptr, 4096, plain);
    let error = buffer.share().map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.message().contains("no transport") && error.hint().contains("allocate_shared"), "{error}");
    assert_eq!(buffer.transport().unwrap_err().message(), error.message());
    drop(buffer);

    let mapped = Mapped::new(&rig.gpu, 2, false);
    let buffer = rig.adopt::<u8>(mapped.ptr, 4096, mapped);
    let error = buffer.share().map(drop).unwrap_err();
    assert!(error.message().contains("mapped without a handle"), "{error}");
    drop(buffer);

    // A refusal of the driver is passed on, and the next share tries again.
    let foreign = rig.shareable(4096);
    let buffer = rig.adopt::<u8>(foreign.ptr, 4096, foreign);
    rig.gpu.fail_call(Operation::ExportMemory, 1, ErrorKind::Vendor).unwrap();
    let error = buffer.share().map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Vendor, "{error}");
    assert_eq!(buffer.share().unwrap().transport(), Transport::Descriptor);
    drop(buffer);
    rig.end();
}

#[test]
fn a_range_over_several_mappings_is_one_buffer() {
    let rig = Rig::new();
    let mapped = Mapped::new(&rig.gpu, 3, true);
    let (ptr, piece) = (mapped.ptr, mapped.piece);
    // It ends in the unmapped part of the reservation.
    let outside = rig.refusal::<u8>(ptr, 3 * piece + 1);
    assert_eq!(outside.kind(), ErrorKind::InvalidPointer);
    assert!(outside.message().contains(&format!("ends after {}", 3 * piece)), "{outside}");
    let buffer = rig.adopt::<u8>(ptr.offset(piece / 2), 2 * piece, mapped);
    rig.stream.fill(&buffer, 8_u8).unwrap();
    let border = buffer.slice(piece / 2 - 4..piece / 2 + 4).unwrap();
    assert_eq!(rig.stream.download(border).unwrap(), [8; 8]);
    let ticket = buffer.share().unwrap();
    // The range of the buffer in all three mappings.
    assert_eq!(ticket.bytes(), 2 * piece as u64);
    drop(buffer);
    rig.end();
}

#[test]
fn the_own_ticket_of_adopted_memory_opens_the_buffer_itself() {
    let rig = Rig::new();
    let foreign = rig.shareable(4096);
    let buffer = rig.adopt::<u32>(foreign.ptr.offset(1024), 2048, foreign);
    rig.stream.fill(&buffer, 1_u32).unwrap();
    rig.stream.fill(buffer.slice(10..20).unwrap(), 2_u32).unwrap();
    let ticket = buffer.slice(8..12).unwrap().share().unwrap();
    let opened = rig.runtime.open_shared::<u32>(&ticket).unwrap();
    assert_eq!(opened.ptr(), buffer.ptr().offset(32));
    assert_eq!(rig.stream.download(&opened).unwrap(), [1, 1, 2, 2]);
    drop(buffer);
    rig.stream.synchronize().unwrap();
    rig.runtime.trim_device_memory().unwrap();
    assert_eq!(rig.dropped(), 0, "the opened buffer is the same memory");
    // A ticket that names bytes of the allocation beside the buffer.
    let mut bytes = ticket.to_bytes();
    bytes[96..104].copy_from_slice(&0_u64.to_le_bytes());
    let sum = crc32fast::hash(&bytes[..132]);
    bytes[132..].copy_from_slice(&sum.to_le_bytes());
    let beside = Ticket::from_bytes(&bytes).unwrap();
    let error = rig.runtime.open_shared::<u32>(&beside).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    drop(opened);
    rig.stream.synchronize().unwrap();
    assert_eq!(rig.dropped(), 1);
    rig.end();
}

/// Prints when it is dropped.
struct Loud;

impl Drop for Loud {
    fn drop(&mut self) {
        println!("dropped in {}", std::process::id());
    }
}

/// Panics when it is dropped.
struct Panics;

impl Drop for Panics {
    fn drop(&mut self) {
        panic!("as the test wants");
    }
}

#[test]
fn a_panic_of_what_keeps_the_memory_stays_in_the_drop() {
    let rig = Rig::new();
    let foreign = rig.shareable(4096);
    let buffer = rig.adopt::<u8>(foreign.ptr, 4096, Panics);
    drop(buffer);
    drop(foreign);
    rig.end();
}

const SCENARIO: &str = "HIGHWATER_TEST_ADOPT_SCENARIO";

static LATE: Mutex<Option<DeviceBuffer<u8>>> = Mutex::new(None);

/// Runs after the backend's own handler, which was registered later.
extern "C" fn drop_late() {
    drop(LATE.lock().unwrap().take());
    println!("late");
}

/// Not a test by itself: what `a_child_and_an_exit_leak_what_keeps_the_memory` runs.
#[test]
fn scenario() {
    let Ok(scenario) = std::env::var(SCENARIO) else { return };
    if scenario == "exit" {
        // SAFETY: the handler only drops a buffer.
        assert_eq!(unsafe { libc::atexit(drop_late) }, 0);
    }
    let rig = Rig::new();
    let foreign = rig.shareable(4096);
    let buffer = rig.adopt::<u8>(foreign.ptr, 4096, Loud);
    std::mem::forget(foreign);
    match scenario.as_str() {
        "fork" => {
            // SAFETY: the child drops objects, makes calls that must be refused, and exits.
            let pid = unsafe { libc::fork() };
            if pid == 0 {
                drop(buffer);
                // SAFETY: the call must be refused.
                let refused = unsafe { rig.device.adopt::<u8>(DevicePtr::new(4096), 1, Loud) };
                let ok = refused.is_err_and(|error| error.kind() == ErrorKind::Forked);
                // SAFETY: ends the child at once.
                unsafe { libc::_exit(i32::from(!ok)) };
            }
            let mut status = -1;
            // SAFETY: waits for the child made above.
            assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
            assert_eq!(status, 0);
            println!("parent {}", std::process::id());
            drop(buffer);
        }
        "exit" => {
            *LATE.lock().unwrap() = Some(buffer);
            std::mem::forget(rig);
            std::process::exit(0);
        }
        _ => panic!("an unknown scenario"),
    }
}

fn run(scenario: &str) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "scenario", "--test-threads=1", "--nocapture"])
        .env(SCENARIO, scenario)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_child_and_an_exit_leak_what_keeps_the_memory() {
    let forked = run("fork");
    let parent = forked.lines().find_map(|line| line.split_once("parent ")).unwrap().1.to_owned();
    let drops: Vec<&str> =
        forked.lines().filter_map(|line| line.split_once("dropped in ")).map(|(_, pid)| pid).collect();
    assert_eq!(drops, [parent.as_str()], "{forked}");
    let exited = run("exit");
    assert!(exited.contains("late") && !exited.contains("dropped"), "{exited}");
}

#[test]
fn a_share_ends_once_no_importer_has_the_memory_open() {
    const LONG: Duration = Duration::from_secs(20);
    let rig = Rig::new();
    let importer = Runtime::new(rig.gpu.clone()).unwrap();
    let make = || rig.device.adopt_allocated::<u32>(1000, Transport::Descriptor).unwrap();

    // Never shared, and shared without an importer.
    assert!(make().unshare_within(Duration::ZERO));
    let buffer = make();
    buffer.share().unwrap();
    assert!(buffer.unshare_within(Duration::ZERO));

    let buffer = make();
    let opened = importer.open_shared::<u32>(&buffer.share().unwrap()).unwrap();
    let begin = Instant::now();
    assert!(!buffer.unshare_within(Duration::from_millis(50)));
    assert!(begin.elapsed() >= Duration::from_millis(50));
    drop(opened);

    let buffer = make();
    let opened = importer.open_shared::<u32>(&buffer.share().unwrap()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(30));
            drop(opened);
        });
        assert!(buffer.unshare_within(Duration::MAX));
    });
    assert!(begin.elapsed() < LONG);
}
