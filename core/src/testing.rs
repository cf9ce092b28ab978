//! A backend for core's own unit tests whose streams move only when the test says so. It computes nothing; it checks that
//! core keeps its promises: nothing is freed while a stream may use it, and everything is freed in the end.

use std::alloc::Layout;
use std::collections::{BTreeMap, HashMap};
use std::ptr::NonNull;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::*;

/// Alignment of device and host blocks.
const ALIGNMENT: usize = 256;

/// Locks that are held until this is dropped.
pub(crate) struct Held<T>(pub(crate) T);

impl<T> Drop for Held<T> {
    fn drop(&mut self) {}
}

#[derive(Debug)]
pub(crate) struct ManualBackend {
    identity: Identity,
    host: Arc<ManualHost>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next_slot: u32,
    next_address: u64,
    /// Operations enqueued, and executed, on each stream.
    streams: HashMap<StreamId, (u64, u64)>,
    /// The stream and the number of the operation at which each event was recorded.
    events: HashMap<EventId, Option<(StreamId, u64)>>,
    blocks: BTreeMap<u64, usize>,
    /// Where each stream last used an address.
    last_use: HashMap<(StreamId, u64), u64>,
    fail_record: bool,
}

#[derive(Debug, Default)]
struct ManualHost(Mutex<BTreeMap<usize, Layout>>);

impl ManualBackend {
    pub(crate) fn new() -> Arc<Self> {
        let mut identity = Identity::new("manual", "streams moved by hand", BackendTag::next());
        identity.real_device = false;
        let state = State { next_address: 0x10_0000, ..State::default() };
        Arc::new(Self { identity, host: Arc::default(), state: Mutex::new(state) })
    }

    /// Executes everything that is enqueued on the stream.
    pub(crate) fn advance(&self, stream: StreamId) {
        if let Some((enqueued, executed)) = self.state.lock().streams.get_mut(&stream) {
            *executed = *enqueued;
        }
    }

    /// Lets every `record_event` fail, or none.
    pub(crate) fn fail_record(&self, fail: bool) {
        self.state.lock().fail_record = fail;
    }

    /// Whether some stream has not executed its last operation on this host or device address.
    pub(crate) fn is_in_use(&self, address: u64) -> bool {
        let state = self.state.lock();
        state.last_use.iter().any(|((stream, used), at)| {
            *used == address && state.streams.get(stream).is_some_and(|(_, executed)| executed < at)
        })
    }

    fn id<I: ObjectId>(&self, state: &mut State, device: u32) -> I {
        state.next_slot += 1;
        let generation = std::num::NonZeroU32::MIN;
        // SAFETY: slots are never used again, and the backend remembers the id from here on.
        unsafe { I::from_parts(IdParts { slot: state.next_slot, generation, tag: self.identity.tag, device }) }
    }
}

fn unknown(operation: &'static str) -> Error {
    Error::new(ErrorKind::InvalidHandle, operation, "unknown id")
}

// SAFETY: streams and events are counters under one lock, which answer truly; copies do nothing, so nothing races.
unsafe impl Backend for ManualBackend {
    fn identity(&self) -> &Identity {
        &self.identity
    }
    fn device_count(&self) -> u32 {
        1
    }
    fn device_info(&self, device: u32) -> Result<DeviceInfo> {
        Ok(DeviceInfo::new(device, "manual", [0; 16], 1 << 40))
    }
    fn capabilities(&self, _: u32) -> Result<Capabilities> {
        let mut capabilities = Capabilities::none();
        capabilities.gemm_f32 = true;
        capabilities.blas_workspace = true;
        capabilities.stream_ordered_memory = true;
        capabilities.workspace_alignment = ALIGNMENT;
        capabilities.blas_workspace_bytes = 1 << 20;
        Ok(capabilities)
    }
    fn memory_info(&self, _: u32) -> Result<MemoryInfo> {
        Ok(MemoryInfo { free: 1 << 40, total: 1 << 40 })
    }
    fn live_objects(&self) -> LiveObjects {
        let state = self.state.lock();
        LiveObjects {
            streams: state.streams.len() as u64,
            events: state.events.len() as u64,
            allocations: state.blocks.len() as u64,
            host_allocations: self.host.0.lock().len() as u64,
            ..LiveObjects::default()
        }
    }
    fn is_exiting(&self) -> bool {
        false
    }
    fn create_stream(&self, device: u32, _: &StreamOptions) -> Result<StreamId> {
        let mut state = self.state.lock();
        let id = self.id(&mut state, device);
        state.streams.insert(id, (0, 0));
        Ok(id)
    }
    fn destroy_stream(&self, stream: StreamId) -> Result<()> {
        let mut state = self.state.lock();
        // What was enqueued is executed all the same; the test has no way to look at it any more.
        state.last_use.retain(|(other, _), _| *other != stream);
        for at in state.events.values_mut() {
            if at.is_some_and(|(other, _)| other == stream) {
                *at = None;
            }
        }
        state.streams.remove(&stream).map(|_| ()).ok_or_else(|| unknown("destroy_stream"))
    }
    fn query_stream(&self, stream: StreamId) -> Result<Completion> {
        let state = self.state.lock();
        let (enqueued, executed) = state.streams.get(&stream).ok_or_else(|| unknown("query_stream"))?;
        Ok(if enqueued == executed { Completion::Complete } else { Completion::Pending })
    }
    fn synchronize_stream(&self, stream: StreamId) -> Result<()> {
        self.advance(stream);
        Ok(())
    }
    fn synchronize_device(&self, _: u32) -> Result<()> {
        self.state.lock().streams.values_mut().for_each(|(enqueued, executed)| *executed = *enqueued);
        Ok(())
    }
    fn stream_wait_event(&self, stream: StreamId, event: EventId) -> Result<()> {
        let state = self.state.lock();
        let known = state.streams.contains_key(&stream) && state.events.contains_key(&event);
        if known { Ok(()) } else { Err(unknown("stream_wait_event")) }
    }
    fn create_event(&self, device: u32, _: &EventOptions) -> Result<EventId> {
        let mut state = self.state.lock();
        let id = self.id(&mut state, device);
        state.events.insert(id, None);
        Ok(id)
    }
    fn destroy_event(&self, event: EventId) -> Result<()> {
        self.state.lock().events.remove(&event).map(|_| ()).ok_or_else(|| unknown("destroy_event"))
    }
    fn record_event(&self, event: EventId, stream: StreamId) -> Result<()> {
        let mut state = self.state.lock();
        if state.fail_record {
            return Err(Error::new(ErrorKind::Vendor, "record_event", "told to fail"));
        }
        let at = state.streams.get(&stream).ok_or_else(|| unknown("record_event"))?.0;
        *state.events.get_mut(&event).ok_or_else(|| unknown("record_event"))? = Some((stream, at));
        Ok(())
    }
    fn query_event(&self, event: EventId) -> Result<Completion> {
        let state = self.state.lock();
        let at = state.events.get(&event).ok_or_else(|| unknown("query_event"))?;
        let executed = |stream: &StreamId| state.streams.get(stream).map_or(u64::MAX, |(_, executed)| *executed);
        let passed = at.as_ref().is_none_or(|(stream, at)| executed(stream) >= *at);
        Ok(if passed { Completion::Complete } else { Completion::Pending })
    }
    fn synchronize_event(&self, event: EventId) -> Result<()> {
        let at = *self.state.lock().events.get(&event).ok_or_else(|| unknown("synchronize_event"))?;
        if let Some((stream, _)) = at {
            self.advance(stream);
        }
        Ok(())
    }
    fn allocate(&self, _: u32, options: &AllocateOptions) -> Result<DevicePtr> {
        let mut state = self.state.lock();
        let ptr = state.next_address;
        state.next_address += options.bytes.next_multiple_of(ALIGNMENT) as u64;
        state.blocks.insert(ptr, options.bytes);
        Ok(DevicePtr::new(ptr))
    }
    unsafe fn free(&self, _: u32, ptr: DevicePtr, stream: Option<StreamId>) -> Result<()> {
        assert!(stream.is_some() || !self.is_in_use(ptr.get()), "{ptr:?} is freed while a stream uses it");
        let mut state = self.state.lock();
        assert!(state.blocks.remove(&ptr.get()).is_some(), "{ptr:?} is freed twice");
        Ok(())
    }
    unsafe fn copy(&self, copy: &MemoryCopy, stream: StreamId) -> Result<()> {
        let mut state = self.state.lock();
        let enqueued = &mut state.streams.get_mut(&stream).ok_or_else(|| unknown("copy"))?.0;
        *enqueued += 1;
        let at = *enqueued;
        for location in [copy.src, copy.dst] {
            let address = match location {
                Location::Host(ptr) => ptr.address() as u64,
                Location::Device { ptr, .. } => ptr.get(),
            };
            state.last_use.insert((stream, address), at);
        }
        Ok(())
    }
    unsafe fn fill(&self, _: &MemoryFill, _: StreamId) -> Result<()> {
        Err(Error::lacks("fill", "fill"))
    }
    fn create_blas_handle(&self, _: u32, _: &BlasOptions) -> Result<Box<dyn BlasHandle>> {
        Ok(Box::new(ManualHandle))
    }
    fn host_allocator(&self) -> Arc<dyn HostAllocator> {
        Arc::clone(&self.host) as _
    }
}

/// A handle that takes every setting and computes nothing.
#[derive(Debug)]
struct ManualHandle;

impl BlasHandle for ManualHandle {
    fn kind(&self) -> BlasKind {
        BlasKind::Blas
    }
    fn device(&self) -> u32 {
        0
    }
    fn set_stream(&mut self, _: StreamId) -> Result<()> {
        Ok(())
    }
    unsafe fn set_workspace(&mut self, _: Option<Workspace>) -> Result<()> {
        Ok(())
    }
    fn set_math_mode(&mut self, _: MathMode) -> Result<()> {
        Ok(())
    }
    fn set_atomics_mode(&mut self, _: AtomicsMode) -> Result<()> {
        Ok(())
    }
    unsafe fn gemm(&mut self, _: &Gemm) -> Result<()> {
        Err(Error::lacks("gemm", "gemm_f32"))
    }
    fn raw(&self) -> u64 {
        0
    }
    fn destroy(&mut self) -> Result<()> {
        Ok(())
    }
}

// SAFETY: blocks come zeroed from the global allocator in the size and alignment asked for, and go back in `free`.
unsafe impl HostAllocator for ManualHost {
    fn allocate(&self, bytes: usize, _: &HostOptions) -> Result<HostPtr> {
        let layout = Layout::from_size_align(bytes, ALIGNMENT)
            .map_err(|error| Error::new(ErrorKind::OutOfMemory, "host_allocate", error.to_string()))?;
        // SAFETY: the layout has a size: core never asks for 0 bytes.
        let ptr = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })
            .ok_or_else(|| Error::new(ErrorKind::OutOfMemory, "host_allocate", "the allocator has no more"))?;
        let ptr = HostPtr::new(ptr);
        self.0.lock().insert(ptr.address(), layout);
        Ok(ptr)
    }
    unsafe fn free(&self, ptr: HostPtr) -> Result<()> {
        let layout = self.0.lock().remove(&ptr.address()).expect("a live block");
        // SAFETY: allocated with this layout and taken out of the table just now.
        unsafe { std::alloc::dealloc(ptr.as_ptr(), layout) };
        Ok(())
    }
    fn device_address(&self, ptr: HostPtr, _: u32) -> Result<DevicePtr> {
        Ok(DevicePtr::new(ptr.address() as u64))
    }
}
