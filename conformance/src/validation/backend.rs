//! The trait `Backend`, handed through.

use std::sync::Arc;

use highwater_hal::{
    AllocateOptions, Backend, BlasHandle, BlasOptions, Capabilities, CaptureMode, Completion, DeviceInfo,
    DeviceMemoryKind, DevicePtr, EventId, EventOptions, GraphExecId, GraphId, HostAllocator, Identity, IpcSharing,
    LiveObjects, MemoryCopy, MemoryFill, MemoryInfo, Result, StreamId, StreamOptions,
};

use super::blas::WatchedHandle;
use super::book::{Holding, on, place};
use super::host::WatchedAllocator;
use super::ledger::AnyId::{Event, Executable, Graph, Stream};
use super::sharing::WatchedSharing;
use super::{Watched, origin};

// SAFETY: every call goes to a backend that keeps the clauses, with the arguments that came and the answer that it gives; a
// call that the gate keeps back does nothing and gives an error.
unsafe impl Backend for Watched<'_> {
    fn identity(&self) -> &Identity {
        self.inner.identity()
    }

    fn device_count(&self) -> u32 {
        self.inner.device_count()
    }

    fn device_info(&self, device: u32) -> Result<DeviceInfo> {
        self.watch.on_device("device_info", device, || self.inner.device_info(device))
    }

    fn capabilities(&self, device: u32) -> Result<Capabilities> {
        self.watch.on_device("capabilities", device, || self.inner.capabilities(device))
    }

    fn memory_info(&self, device: u32) -> Result<MemoryInfo> {
        self.watch.on_device("memory_info", device, || self.inner.memory_info(device))
    }

    fn live_objects(&self) -> LiveObjects {
        self.inner.live_objects()
    }

    fn is_exiting(&self) -> bool {
        self.inner.is_exiting()
    }

    // ------------------------------------------------------------------ streams

    fn create_stream(&self, device: u32, options: &StreamOptions) -> Result<StreamId> {
        const OPERATION: &str = "create_stream";
        let at = origin::take();
        self.watch.enter(OPERATION)?;
        let id = self.inner.create_stream(device, options)?;
        self.watch.issued(OPERATION, Stream(id), device, at, false);
        Ok(id)
    }

    fn destroy_stream(&self, stream: StreamId) -> Result<()> {
        self.watch.destroying("destroy_stream", Stream(stream), || self.inner.destroy_stream(stream))
    }

    fn query_stream(&self, stream: StreamId) -> Result<Completion> {
        self.watch.with_ids("query_stream", &[Stream(stream)], || self.inner.query_stream(stream))
    }

    fn synchronize_stream(&self, stream: StreamId) -> Result<()> {
        self.watch.with_ids("synchronize_stream", &[Stream(stream)], || self.inner.synchronize_stream(stream))
    }

    fn synchronize_device(&self, device: u32) -> Result<()> {
        self.watch.on_device("synchronize_device", device, || self.inner.synchronize_device(device))
    }

    fn stream_wait_event(&self, stream: StreamId, event: EventId) -> Result<()> {
        let ids = [Stream(stream), Event(event)];
        self.watch.with_ids("stream_wait_event", &ids, || self.inner.stream_wait_event(stream, event))
    }

    fn raw_stream(&self, stream: StreamId) -> Result<u64> {
        self.watch.with_ids("raw_stream", &[Stream(stream)], || self.inner.raw_stream(stream))
    }

    unsafe fn stream_from_raw(&self, device: u32, raw: u64) -> Result<StreamId> {
        const OPERATION: &str = "stream_from_raw";
        let at = origin::take();
        self.watch.enter(OPERATION)?;
        // SAFETY: handed on as it came.
        let id = unsafe { self.inner.stream_from_raw(device, raw)? };
        self.watch.issued(OPERATION, Stream(id), device, at, true);
        Ok(id)
    }

    // ------------------------------------------------------------------ events

    fn create_event(&self, device: u32, options: &EventOptions) -> Result<EventId> {
        const OPERATION: &str = "create_event";
        let at = origin::take();
        self.watch.enter(OPERATION)?;
        let id = self.inner.create_event(device, options)?;
        self.watch.issued(OPERATION, Event(id), device, at, false);
        Ok(id)
    }

    fn destroy_event(&self, event: EventId) -> Result<()> {
        self.watch.destroying("destroy_event", Event(event), || self.inner.destroy_event(event))
    }

    fn record_event(&self, event: EventId, stream: StreamId) -> Result<()> {
        const OPERATION: &str = "record_event";
        let ids = [Event(event), Stream(stream)];
        let answer = self.watch.with_ids(OPERATION, &ids, || self.inner.record_event(event, stream));
        if answer.is_ok() && event.device() != stream.device() {
            self.watch.found(format!("wrong device: `{OPERATION}` recorded {event:?} on {stream:?}"));
        }
        answer
    }

    fn query_event(&self, event: EventId) -> Result<Completion> {
        self.watch.with_ids("query_event", &[Event(event)], || self.inner.query_event(event))
    }

    fn synchronize_event(&self, event: EventId) -> Result<()> {
        self.watch.with_ids("synchronize_event", &[Event(event)], || self.inner.synchronize_event(event))
    }

    fn event_elapsed_ns(&self, start: EventId, end: EventId) -> Result<u64> {
        let ids = [Event(start), Event(end)];
        self.watch.with_ids("event_elapsed_ns", &ids, || self.inner.event_elapsed_ns(start, end))
    }

    fn raw_event(&self, event: EventId) -> Result<u64> {
        self.watch.with_ids("raw_event", &[Event(event)], || self.inner.raw_event(event))
    }

    unsafe fn event_from_raw(&self, device: u32, raw: u64) -> Result<EventId> {
        const OPERATION: &str = "event_from_raw";
        let at = origin::take();
        self.watch.enter(OPERATION)?;
        // SAFETY: handed on as it came.
        let id = unsafe { self.inner.event_from_raw(device, raw)? };
        self.watch.issued(OPERATION, Event(id), device, at, true);
        Ok(id)
    }

    // ------------------------------------------------------------------ device memory

    fn allocate(&self, device: u32, options: &AllocateOptions) -> Result<DevicePtr> {
        const OPERATION: &str = "allocate";
        let at = origin::take();
        let stream = match options.kind {
            DeviceMemoryKind::StreamOrdered(stream) => Some(stream),
            _ => None,
        };
        let call = || self.inner.allocate(device, options);
        let ptr = self.watch.with_ids(OPERATION, stream.map(Stream).as_slice(), call)?;
        self.watch.given(OPERATION, on(device, ptr), options.bytes as u64, Holding::of(options.kind), at);
        if let Some(stream) = stream.filter(|stream| stream.device() != device) {
            self.watch.found(format!("wrong device: `{OPERATION}` gave memory of device {device} on {stream:?}"));
        }
        Ok(ptr)
    }

    unsafe fn free(&self, device: u32, ptr: DevicePtr, stream: Option<StreamId>) -> Result<()> {
        let misuse = |holding| match (holding, stream) {
            (Holding::StreamOrdered(of), Some(stream)) if of.device() != stream.device() => Some("wrong device".into()),
            (Holding::StreamOrdered(_), Some(_)) | (Holding::Plain | Holding::Shareable(_), None) => None,
            (Holding::Mapped { .. }, _) => Some("memory of another process is closed and not freed".into()),
            (Holding::StreamOrdered(of), None) => {
                Some(format!("wrong stream: the memory belongs to {of:?} and was freed on none"))
            }
            (_, stream) => Some(format!("wrong stream: the memory belongs to none and was freed on {stream:?}")),
        };
        // SAFETY: handed on as it came.
        self.watch.releasing("free", on(device, ptr), misuse, || unsafe { self.inner.free(device, ptr, stream) })
    }

    // ------------------------------------------------------------------ copies and fills

    unsafe fn copy(&self, copy: &MemoryCopy, stream: StreamId) -> Result<()> {
        const OPERATION: &str = "copy";
        let bytes = copy.bytes as u64;
        let sides = [("the destination", place(copy.dst), bytes), ("the source", place(copy.src), bytes)];
        let misuse = self.watch.misuse(&sides);
        // SAFETY: handed on as it came.
        let call = || unsafe { self.inner.copy(copy, stream) };
        let answer = self.watch.with_ids(OPERATION, &[Stream(stream)], call);
        self.watch.judge_use(OPERATION, misuse, &answer);
        answer
    }

    unsafe fn fill(&self, fill: &MemoryFill, stream: StreamId) -> Result<()> {
        const OPERATION: &str = "fill";
        let bytes = (fill.count as u64).saturating_mul(fill.pattern.bytes() as u64);
        let misuse = self.watch.misuse(&[("the range", on(fill.device, fill.dst), bytes)]);
        // SAFETY: handed on as it came.
        let call = || unsafe { self.inner.fill(fill, stream) };
        let answer = self.watch.with_ids(OPERATION, &[Stream(stream)], call);
        self.watch.judge_use(OPERATION, misuse, &answer);
        answer
    }

    // ------------------------------------------------------------------ capture and replay

    fn begin_capture(&self, stream: StreamId, mode: CaptureMode) -> Result<()> {
        self.watch.with_ids("begin_capture", &[Stream(stream)], || self.inner.begin_capture(stream, mode))
    }

    unsafe fn end_capture(&self, stream: StreamId) -> Result<GraphId> {
        const OPERATION: &str = "end_capture";
        let at = origin::take();
        // SAFETY: handed on as it came.
        let call = || unsafe { self.inner.end_capture(stream) };
        let id = self.watch.with_ids(OPERATION, &[Stream(stream)], call)?;
        self.watch.issued(OPERATION, Graph(id), stream.device(), at, false);
        Ok(id)
    }

    fn is_capturing(&self, stream: StreamId) -> Result<bool> {
        self.watch.with_ids("is_capturing", &[Stream(stream)], || self.inner.is_capturing(stream))
    }

    fn instantiate_graph(&self, graph: GraphId) -> Result<GraphExecId> {
        const OPERATION: &str = "instantiate_graph";
        let at = origin::take();
        let id = self.watch.with_ids(OPERATION, &[Graph(graph)], || self.inner.instantiate_graph(graph))?;
        self.watch.issued(OPERATION, Executable(id), graph.device(), at, false);
        Ok(id)
    }

    unsafe fn launch_graph(&self, graph: GraphExecId, stream: StreamId) -> Result<()> {
        let ids = [Executable(graph), Stream(stream)];
        // SAFETY: handed on as it came.
        self.watch.with_ids("launch_graph", &ids, || unsafe { self.inner.launch_graph(graph, stream) })
    }

    fn destroy_graph(&self, graph: GraphId) -> Result<()> {
        self.watch.destroying("destroy_graph", Graph(graph), || self.inner.destroy_graph(graph))
    }

    fn destroy_graph_exec(&self, graph: GraphExecId) -> Result<()> {
        self.watch.destroying("destroy_graph_exec", Executable(graph), || self.inner.destroy_graph_exec(graph))
    }

    // ------------------------------------------------------------------ the other three traits

    fn create_blas_handle(&self, device: u32, options: &BlasOptions) -> Result<Box<dyn BlasHandle>> {
        let at = origin::take();
        self.watch.enter("create_blas_handle")?;
        let handle = self.inner.create_blas_handle(device, options)?;
        Ok(Box::new(WatchedHandle::new(handle, &self.watch, device, options.kind, at)))
    }

    // Asked each time: that it is the same every time is the backend's to keep.
    fn host_allocator(&self) -> Arc<dyn HostAllocator> {
        Arc::new(WatchedAllocator::new(self.inner.host_allocator(), &self.watch))
    }

    fn ipc_sharing(&self) -> Option<Arc<dyn IpcSharing>> {
        let sharing = self.inner.ipc_sharing()?;
        Some(Arc::new(WatchedSharing::new(sharing, &self.watch)))
    }
}
