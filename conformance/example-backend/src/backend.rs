//! The trait `Backend`: identity, streams, events, device memory, copies and fills.

use std::sync::{Arc, Weak};

use highwater_hal::{
    AllocateOptions, Backend, BackendTag, BlasHandle, BlasKind, BlasOptions, Capabilities, Completion, DeviceInfo,
    DeviceMemoryKind, DevicePtr, Error, ErrorKind, EventId, EventOptions, FillPattern, HostAllocator, IdTable,
    Identity, LiveObjects, Location, MemoryCopy, MemoryFill, MemoryInfo, Result, StreamId, StreamOptions,
    StreamPriority,
};
use parking_lot::Mutex;

use crate::memory::{ALIGNMENT, Blocks, Span};
use crate::product::Handle;
use crate::stream::{Point, Queue, Stream, Work};

/// The only device.
pub(crate) const DEVICE: u32 = 0;
const DEVICE_BYTES: usize = 256 << 20;

/// Refuses every other ordinal (`backend.device-checked`).
pub(crate) fn check_device(operation: &'static str, device: u32) -> Result<()> {
    let refused = || Error::new(ErrorKind::InvalidArgument, operation, format!("there is no device {device}, only 0"));
    if device == DEVICE { Ok(()) } else { Err(refused()) }
}

/// The point of an event's latest record.
type Event = Mutex<Option<Point>>;

/// The state that the backend shares with its handles.
#[derive(Debug)]
pub(crate) struct Shared {
    identity: Identity,
    pub(crate) capabilities: Capabilities,
    streams: IdTable<StreamId, Stream>,
    events: IdTable<EventId, Event>,
    /// The queues of all streams with outstanding work, destroyed streams included.
    queues: Mutex<Vec<Weak<Queue>>>,
    pub(crate) device: Blocks,
    host: Arc<Blocks>,
    /// Each handle holds a clone.
    handles: Arc<()>,
}

impl Shared {
    /// Returns the stream of an id (`backend.ids-checked`). The ids of default streams are valid, but this device has none.
    pub(crate) fn stream(&self, operation: &'static str, id: StreamId) -> Result<Arc<Stream>> {
        let tag = self.identity.tag;
        if id == StreamId::legacy_default(tag, DEVICE) || id == StreamId::per_thread_default(tag, DEVICE) {
            return Err(Error::lacks(operation, "default streams"));
        }
        self.streams.get(operation, id)
    }

    fn point(&self, operation: &'static str, id: EventId) -> Result<Option<Point>> {
        Ok(self.events.get(operation, id)?.lock().clone())
    }

    fn locate(&self, location: Location, bytes: usize) -> Result<Span> {
        match location {
            Location::Host(ptr) => self.host.find("copy", ptr.address(), bytes),
            Location::Device { device, ptr } => {
                check_device("copy", device)?;
                self.device.find("copy", ptr.get() as usize, bytes)
            }
        }
    }
}

#[derive(Debug)]
pub(crate) struct HostBackend(Arc<Shared>);

impl HostBackend {
    pub(crate) fn new() -> Self {
        let tag = BackendTag::next();
        let mut identity = Identity::new("example", "The CPU as a device, in Rust", tag);
        identity.real_device = false;
        let mut capabilities = Capabilities::none();
        (capabilities.gemm_f32, capabilities.gemm_f64, capabilities.strided_batch) = (true, true, true);
        (capabilities.set_stream_resets_workspace, capabilities.host_address_is_device_address) = (false, true);
        capabilities.workspace_alignment = ALIGNMENT;
        Self(Arc::new(Shared {
            identity,
            capabilities,
            streams: IdTable::new(tag),
            events: IdTable::new(tag),
            queues: Mutex::default(),
            device: Blocks::new(DEVICE_BYTES),
            host: Arc::new(Blocks::new(isize::MAX as usize)),
            handles: Arc::default(),
        }))
    }
}

// SAFETY: streams execute in order, queries and waits answer by what was executed, events move to their latest record, copies
// write only the requested bytes, and `Blocks` keeps the clauses of host memory. The program's end of the table notices a fork:
// it never calls a plugin in a child.
unsafe impl Backend for HostBackend {
    fn identity(&self) -> &Identity {
        &self.0.identity
    }

    fn device_count(&self) -> u32 {
        1
    }

    fn device_info(&self, device: u32) -> Result<DeviceInfo> {
        check_device("device_info", device)?;
        Ok(DeviceInfo::new(DEVICE, "CPU in Rust", *b"example's device", DEVICE_BYTES as u64))
    }

    fn capabilities(&self, device: u32) -> Result<Capabilities> {
        check_device("capabilities", device)?;
        Ok(self.0.capabilities)
    }

    fn memory_info(&self, device: u32) -> Result<MemoryInfo> {
        check_device("memory_info", device)?;
        let (_, used) = self.0.device.usage();
        Ok(MemoryInfo { free: (DEVICE_BYTES - used) as u64, total: DEVICE_BYTES as u64 })
    }

    fn live_objects(&self) -> LiveObjects {
        let mut live = LiveObjects::default();
        (live.streams, live.events) = (self.0.streams.len() as u64, self.0.events.len() as u64);
        live.handles = Arc::strong_count(&self.0.handles) as u64 - 1;
        live.allocations = self.0.device.usage().0 as u64;
        live.host_allocations = self.0.host.usage().0 as u64;
        live
    }

    fn is_exiting(&self) -> bool {
        highwater_hal::exit::has_begun()
    }

    fn create_stream(&self, device: u32, options: &StreamOptions) -> Result<StreamId> {
        check_device("create_stream", device)?;
        if options.priority != StreamPriority::Normal {
            return Err(Error::lacks("create_stream", "stream_priority"));
        }
        let stream = Stream::new()?;
        let mut queues = self.0.queues.lock();
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(&stream.0));
        self.0.streams.insert("create_stream", device, Arc::new(stream))
    }

    fn destroy_stream(&self, stream: StreamId) -> Result<()> {
        self.0.stream("destroy_stream", stream)?;
        self.0.streams.remove("destroy_stream", stream).map(drop)
    }

    fn query_stream(&self, stream: StreamId) -> Result<Completion> {
        Ok(self.0.stream("query_stream", stream)?.0.point().query())
    }

    fn synchronize_stream(&self, stream: StreamId) -> Result<()> {
        self.0.stream("synchronize_stream", stream)?.0.point().wait();
        Ok(())
    }

    fn synchronize_device(&self, device: u32) -> Result<()> {
        check_device("synchronize_device", device)?;
        let queues: Vec<_> = self.0.queues.lock().iter().filter_map(Weak::upgrade).collect();
        queues.iter().for_each(|queue| queue.point().wait());
        Ok(())
    }

    fn stream_wait_event(&self, stream: StreamId, event: EventId) -> Result<()> {
        let stream = self.0.stream("stream_wait_event", stream)?;
        if let Some(point) = self.0.point("stream_wait_event", event)? {
            stream.0.push(Work::Wait(point));
        }
        Ok(())
    }

    fn create_event(&self, device: u32, options: &EventOptions) -> Result<EventId> {
        check_device("create_event", device)?;
        match (options.timing, options.interprocess) {
            (false, false) => self.0.events.insert("create_event", device, Arc::default()),
            (true, true) => {
                Err(Error::new(ErrorKind::InvalidArgument, "create_event", "timing and interprocess at once"))
            }
            (true, false) => Err(Error::lacks("create_event", "event_timing")),
            (false, true) => Err(Error::lacks("create_event", "interprocess_events")),
        }
    }

    fn destroy_event(&self, event: EventId) -> Result<()> {
        self.0.events.remove("destroy_event", event).map(drop)
    }

    fn record_event(&self, event: EventId, stream: StreamId) -> Result<()> {
        let event = self.0.events.get("record_event", event)?;
        *event.lock() = Some(self.0.stream("record_event", stream)?.0.point());
        Ok(())
    }

    fn query_event(&self, event: EventId) -> Result<Completion> {
        Ok(self.0.point("query_event", event)?.map_or(Completion::Complete, |point| point.query()))
    }

    fn synchronize_event(&self, event: EventId) -> Result<()> {
        if let Some(point) = self.0.point("synchronize_event", event)? {
            point.wait();
        }
        Ok(())
    }

    fn allocate(&self, device: u32, options: &AllocateOptions) -> Result<DevicePtr> {
        check_device("allocate", device)?;
        match options.kind {
            DeviceMemoryKind::Plain => Ok(DevicePtr::new(self.0.device.add(options.bytes)?.addr().get() as u64)),
            DeviceMemoryKind::StreamOrdered(_) => Err(Error::lacks("allocate", "stream_ordered_memory")),
            _ => Err(Error::lacks("allocate", "shareable_memory")),
        }
    }

    unsafe fn free(&self, device: u32, ptr: DevicePtr, _: Option<StreamId>) -> Result<()> {
        check_device("free", device)?;
        self.0.device.remove(ptr.get() as usize)
    }

    unsafe fn copy(&self, copy: &MemoryCopy, stream: StreamId) -> Result<()> {
        let stream = self.0.stream("copy", stream)?;
        for side in [copy.dst, copy.src] {
            if let Location::Device { device, .. } = side {
                check_device("copy", device)?;
            }
        }
        if copy.bytes != 0 {
            let (to, from) = (self.0.locate(copy.dst, copy.bytes)?, self.0.locate(copy.src, copy.bytes)?);
            stream.0.push(Work::Copy { to, from });
        }
        Ok(())
    }

    unsafe fn fill(&self, fill: &MemoryFill, stream: StreamId) -> Result<()> {
        check_device("fill", fill.device)?;
        let stream = self.0.stream("fill", stream)?;
        let element = match fill.pattern {
            FillPattern::U8(byte) => vec![byte],
            FillPattern::U16(half) => half.to_ne_bytes().to_vec(),
            FillPattern::U32(word) => word.to_ne_bytes().to_vec(),
        };
        if fill.count != 0 {
            let bytes = fill.count.saturating_mul(element.len());
            let to = self.0.device.find("fill", fill.dst.get() as usize, bytes)?;
            stream.0.push(Work::Fill { to, element });
        }
        Ok(())
    }

    fn create_blas_handle(&self, device: u32, options: &BlasOptions) -> Result<Box<dyn BlasHandle>> {
        check_device("create_blas_handle", device)?;
        if options.kind != BlasKind::Blas {
            return Err(Error::lacks("create_blas_handle", "lt_plans"));
        }
        let (shared, alive) = (Arc::clone(&self.0), Some(Arc::clone(&self.0.handles)));
        Ok(Box::new(Handle { shared, stream: None, alive }))
    }

    fn host_allocator(&self) -> Arc<dyn HostAllocator> {
        Arc::clone(&self.0.host) as Arc<dyn HostAllocator>
    }
}
