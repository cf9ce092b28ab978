//! A backend for core's own unit tests whose streams move only when the test says so. It computes nothing; it checks that
//! core keeps its promises: nothing is freed while a stream may use it or a graph that is alive has recorded it, nothing
//! is called that would lose a capture, and everything is freed in the end.

use std::alloc::Layout;
use std::collections::{BTreeMap, HashMap};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::runtime::RuntimeInner;
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
    capabilities: Capabilities,
    host: Arc<ManualHost>,
    state: Arc<Mutex<State>>,
    watched: Arc<Watched>,
    /// What was called on the handles, in order.
    handle_calls: Arc<Mutex<Vec<HandleCall>>>,
    /// How many of the next calls that set a mode fail.
    refuse_modes: Arc<Mutex<usize>>,
    intruder: Intruder,
    /// The number of event queries, and the number of waits of streams for events.
    queries: AtomicU64,
    waits: AtomicU64,
    /// Bytes of device memory.
    memory: AtomicU64,
    /// The number of the next calls to refuse that destroy a stream, an event or a graph.
    refuse_destroys: AtomicU64,
}

type Intrusion = Box<dyn FnOnce() -> Result<()> + Send>;

/// What happens in the middle of a call, once; its error is the call's.
#[derive(Default)]
struct Intruder(Mutex<Option<(&'static str, Intrusion)>>);

impl std::fmt::Debug for Intruder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Intruder")
    }
}

impl Intruder {
    fn enter(&self, operation: &'static str) -> Result<()> {
        let intruder = self.0.lock().take_if(|(at, _)| *at == operation);
        intruder.map_or(Ok(()), |(_, intrude)| intrude())
    }
}

/// A call on a handle of any kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandleCall {
    SetStream,
    SetWorkspace,
    SetMathMode(MathMode),
    SetAtomicsMode(AtomicsMode),
    Gemm(DataType),
    CreatePlan(MathMode, AtomicsMode),
    RunPlan(PlanId),
    DestroyPlan(PlanId),
}

#[derive(Debug, Default)]
struct State {
    next_slot: u32,
    next_address: u64,
    /// Operations enqueued, and executed, on each stream.
    streams: HashMap<StreamId, (u64, u64)>,
    /// Enqueued waits that have not executed: the stream, the number of the operation, and the awaited point.
    waits: Vec<((StreamId, u64), (StreamId, u64))>,
    /// The stream and the number of the operation at which each event was recorded.
    events: HashMap<EventId, Option<(StreamId, u64)>>,
    blocks: BTreeMap<u64, usize>,
    /// Where each stream last used an address.
    last_use: HashMap<(StreamId, u64), u64>,
    fail_record: bool,
    lose_capture: bool,
    /// Streams that take part in a capture, by the stream that began it.
    capturing: HashMap<StreamId, StreamId>,
    /// Events recorded in captures.
    captured_events: HashMap<EventId, StreamId>,
    /// Addresses that are recorded, by the stream that began the capture.
    recorded: HashMap<StreamId, Vec<u64>>,
    graphs: HashMap<GraphId, Vec<u64>>,
    executables: HashMap<GraphExecId, Vec<u64>>,
}

/// The runtime whose locks must be free at every call, where the test has only one thread.
#[derive(Default)]
struct Watched(Mutex<Option<Weak<RuntimeInner>>>);

impl std::fmt::Debug for Watched {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Watched")
    }
}

impl Watched {
    fn check(&self) {
        if let Some(runtime) = self.0.lock().as_ref().and_then(Weak::upgrade) {
            assert!(!runtime.is_locked(), "the backend is called under a lock");
        }
    }
}

#[derive(Debug)]
struct ManualHost {
    live: Mutex<BTreeMap<usize, Layout>>,
    registered: Mutex<BTreeMap<usize, usize>>,
    /// Freed blocks, kept so that no address comes twice.
    freed: Mutex<Vec<(usize, Layout)>>,
    state: Arc<Mutex<State>>,
    watched: Arc<Watched>,
}

impl Drop for ManualHost {
    fn drop(&mut self) {
        let live = std::mem::take(self.live.get_mut());
        for (address, layout) in live.into_iter().chain(self.freed.get_mut().drain(..)) {
            // SAFETY: allocated with this layout, given back once, and nobody has the allocator any more. The address was
            // exposed when the block was made.
            unsafe { std::alloc::dealloc(std::ptr::with_exposed_provenance_mut(address), layout) };
        }
    }
}

impl State {
    fn is_in_use(&self, address: u64) -> bool {
        self.last_use.iter().any(|((stream, used), at)| {
            *used == address && self.streams.get(stream).is_some_and(|(_, executed)| executed < at)
        })
    }

    /// Enqueues or records an operation on these addresses.
    fn enqueue_use(&mut self, operation: &'static str, stream: StreamId, addresses: &[u64]) -> Result<()> {
        if let Some(capture) = self.capturing.get(&stream).copied() {
            self.recorded.entry(capture).or_default().extend(addresses);
            return Ok(());
        }
        let enqueued = &mut self.streams.get_mut(&stream).ok_or_else(|| unknown(operation))?.0;
        *enqueued += 1;
        let at = *enqueued;
        self.last_use.extend(addresses.iter().map(|address| ((stream, *address), at)));
        Ok(())
    }

    /// Executes the stream's work up to an operation, and the work on other streams that it waits for.
    fn advance(&mut self, stream: StreamId, to: u64) {
        let Some((_, executed)) = self.streams.get_mut(&stream) else { return };
        *executed = to.max(*executed);
        let is_due = |((waiting, at), _): &mut ((StreamId, u64), _)| *waiting == stream && *at <= to;
        let due: Vec<_> = self.waits.extract_if(.., is_due).collect();
        due.into_iter().for_each(|(_, (other, at))| self.advance(other, at));
    }

    /// Executes all work enqueued on the stream.
    fn advance_all(&mut self, stream: StreamId) {
        if let Some((enqueued, _)) = self.streams.get(&stream) {
            self.advance(stream, *enqueued);
        }
    }

    fn allocated(&self) -> u64 {
        self.blocks.values().map(|bytes| *bytes as u64).sum()
    }

    /// Whether a graph that is alive has recorded this host or device address.
    fn is_recorded(&self, address: u64) -> bool {
        self.executables.values().any(|addresses| addresses.contains(&address))
    }

    fn assert_outside(&self, stream: StreamId) {
        assert!(!self.capturing.contains_key(&stream), "{stream:?} is asked or waited for in a capture");
    }

    fn assert_event_outside(&self, event: EventId) {
        assert!(!self.captured_events.contains_key(&event), "{event:?} belongs to a capture");
    }
}

impl ManualBackend {
    pub(crate) fn new() -> Arc<Self> {
        Self::with_capabilities(|_| ())
    }

    pub(crate) fn with_capabilities(change: impl FnOnce(&mut Capabilities)) -> Arc<Self> {
        let mut capabilities = Capabilities::none();
        capabilities.gemm_f32 = true;
        capabilities.blas_workspace = true;
        capabilities.stream_ordered_memory = true;
        capabilities.capture = true;
        capabilities.create_during_capture = true;
        capabilities.workspace_alignment = ALIGNMENT;
        capabilities.blas_workspace_bytes = 1 << 20;
        change(&mut capabilities);
        let mut identity = Identity::new("manual", "streams moved by hand", BackendTag::next());
        identity.real_device = false;
        let state = Arc::new(Mutex::new(State { next_address: 0x10_0000, ..State::default() }));
        let watched = Arc::<Watched>::default();
        let host = ManualHost {
            live: Mutex::default(),
            registered: Mutex::default(),
            freed: Mutex::default(),
            state: Arc::clone(&state),
            watched: Arc::clone(&watched),
        };
        Arc::new(Self {
            identity,
            capabilities,
            host: Arc::new(host),
            state,
            watched,
            handle_calls: Arc::default(),
            refuse_modes: Arc::default(),
            intruder: Intruder::default(),
            queries: AtomicU64::new(0),
            waits: AtomicU64::new(0),
            memory: AtomicU64::new(1 << 40),
            refuse_destroys: AtomicU64::new(0),
        })
    }

    /// The calls on handles since this was asked last.
    pub(crate) fn take_handle_calls(&self) -> Vec<HandleCall> {
        std::mem::take(&mut *self.handle_calls.lock())
    }

    /// Lets the next calls that set a mode fail.
    pub(crate) fn refuse_modes(&self, calls: usize) {
        *self.refuse_modes.lock() = calls;
    }

    /// The number of event queries since the last call of this.
    pub(crate) fn take_queries(&self) -> u64 {
        self.queries.swap(0, Ordering::Relaxed)
    }

    /// The number of waits of streams for events since the last call of this.
    pub(crate) fn take_waits(&self) -> u64 {
        self.waits.swap(0, Ordering::Relaxed)
    }

    /// Refuses the next calls that destroy a stream, an event or a graph.
    pub(crate) fn refuse_destroys(&self, calls: u64) {
        self.refuse_destroys.store(calls, Ordering::Relaxed);
    }

    fn may_destroy(&self, operation: &'static str) -> Result<()> {
        let left = self.refuse_destroys.load(Ordering::Relaxed);
        self.refuse_destroys.store(left.saturating_sub(1), Ordering::Relaxed);
        if left == 0 { Ok(()) } else { Err(Error::new(ErrorKind::Vendor, operation, "told to refuse")) }
    }

    /// Limits the device memory to this from now on.
    pub(crate) fn set_memory(&self, bytes: u64) {
        self.memory.store(bytes, Ordering::Relaxed);
    }

    /// Executes everything that is enqueued on the stream.
    pub(crate) fn advance(&self, stream: StreamId) {
        self.state.lock().advance_all(stream);
    }

    /// Lets every `record_event` fail, or none.
    pub(crate) fn fail_record(&self, fail: bool) {
        self.state.lock().fail_record = fail;
    }

    /// Panics from here on when the runtime calls while it holds one of its locks. For tests of one thread.
    pub(crate) fn watch_locks_of(&self, runtime: &Runtime) {
        *self.watched.0.lock() = Some(Arc::downgrade(&runtime.inner.0));
    }

    /// Does this in the next `synchronize_stream` or `end_capture`.
    pub(crate) fn intrude(&self, operation: &'static str, intrude: impl FnOnce() -> Result<()> + Send + 'static) {
        *self.intruder.0.lock() = Some((operation, Box::new(intrude)));
    }

    /// Lets every capture be lost at its end, or none.
    pub(crate) fn lose_capture(&self, lose: bool) {
        self.state.lock().lose_capture = lose;
    }

    /// Whether some stream has not executed its last operation on this host or device address.
    pub(crate) fn is_in_use(&self, address: u64) -> bool {
        self.state.lock().is_in_use(address)
    }

    /// Enqueues an operation on the block that starts at `address`, behind the runtime's back.
    pub(crate) fn enqueue_use(&self, stream: StreamId, address: u64) {
        self.state.lock().enqueue_use("enqueue_use", stream, &[address]).unwrap();
    }

    /// How many blocks of page-locked memory there are, each registration one.
    pub(crate) fn live_host_blocks(&self) -> u64 {
        (self.host.live.lock().len() + self.host.registered.lock().len()) as u64
    }

    /// Whether a block of page-locked memory starts at `address`.
    pub(crate) fn has_host_block(&self, address: u64) -> bool {
        self.host.live.lock().contains_key(&(address as usize))
    }

    /// Whether a graph that is alive has recorded this host or device address.
    pub(crate) fn is_recorded(&self, address: u64) -> bool {
        self.state.lock().is_recorded(address)
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
        Ok(DeviceInfo::new(device, "manual", [0; 16], self.memory.load(Ordering::Relaxed)))
    }
    fn capabilities(&self, _: u32) -> Result<Capabilities> {
        Ok(self.capabilities)
    }
    fn memory_info(&self, _: u32) -> Result<MemoryInfo> {
        let total = self.memory.load(Ordering::Relaxed);
        Ok(MemoryInfo { free: total.saturating_sub(self.state.lock().allocated()), total })
    }
    fn live_objects(&self) -> LiveObjects {
        self.watched.check();
        let state = self.state.lock();
        let mut live = LiveObjects::default();
        live.streams = state.streams.len() as u64;
        live.events = state.events.len() as u64;
        live.allocations = state.blocks.len() as u64;
        live.host_allocations = self.live_host_blocks();
        live.graphs = (state.graphs.len() + state.executables.len()) as u64;
        live
    }
    fn is_exiting(&self) -> bool {
        false
    }
    fn create_stream(&self, device: u32, _: &StreamOptions) -> Result<StreamId> {
        self.watched.check();
        let mut state = self.state.lock();
        let id = self.id(&mut state, device);
        state.streams.insert(id, (0, 0));
        Ok(id)
    }
    fn destroy_stream(&self, stream: StreamId) -> Result<()> {
        self.watched.check();
        self.may_destroy("destroy_stream")?;
        let mut state = self.state.lock();
        state.assert_outside(stream);
        // What was enqueued is executed all the same; the test has no way to look at it any more.
        state.advance_all(stream);
        state.last_use.retain(|(other, _), _| *other != stream);
        for at in state.events.values_mut() {
            if at.is_some_and(|(other, _)| other == stream) {
                *at = None;
            }
        }
        state.streams.remove(&stream).map(|_| ()).ok_or_else(|| unknown("destroy_stream"))
    }
    fn query_stream(&self, stream: StreamId) -> Result<Completion> {
        self.watched.check();
        let state = self.state.lock();
        state.assert_outside(stream);
        let (enqueued, executed) = state.streams.get(&stream).ok_or_else(|| unknown("query_stream"))?;
        Ok(if enqueued == executed { Completion::Complete } else { Completion::Pending })
    }
    fn synchronize_stream(&self, stream: StreamId) -> Result<()> {
        self.watched.check();
        self.intruder.enter("synchronize_stream")?;
        self.state.lock().assert_outside(stream);
        self.advance(stream);
        Ok(())
    }
    fn synchronize_device(&self, _: u32) -> Result<()> {
        self.watched.check();
        assert!(self.state.lock().capturing.is_empty(), "the device is waited for in a capture");
        self.state.lock().streams.values_mut().for_each(|(enqueued, executed)| *executed = *enqueued);
        Ok(())
    }
    fn stream_wait_event(&self, stream: StreamId, event: EventId) -> Result<()> {
        self.watched.check();
        self.waits.fetch_add(1, Ordering::Relaxed);
        let mut state = self.state.lock();
        if !state.streams.contains_key(&stream) || !state.events.contains_key(&event) {
            return Err(unknown("stream_wait_event"));
        }
        match (state.capturing.get(&stream).copied(), state.captured_events.get(&event).copied()) {
            (None, Some(capture)) => drop(state.capturing.insert(stream, capture)),
            (None, None) => {
                if let Some(at) = state.events[&event] {
                    state.enqueue_use("stream_wait_event", stream, &[])?;
                    let number = state.streams[&stream].0;
                    state.waits.push(((stream, number), at));
                }
            }
            (stream_in, event_in) => assert_eq!(stream_in, event_in, "a wait across the border of a capture"),
        }
        Ok(())
    }
    fn create_event(&self, device: u32, _: &EventOptions) -> Result<EventId> {
        self.watched.check();
        self.intruder.enter("create_event")?;
        let mut state = self.state.lock();
        let id = self.id(&mut state, device);
        state.events.insert(id, None);
        Ok(id)
    }
    fn destroy_event(&self, event: EventId) -> Result<()> {
        self.watched.check();
        self.may_destroy("destroy_event")?;
        let mut state = self.state.lock();
        state.assert_event_outside(event);
        state.events.remove(&event).map(|_| ()).ok_or_else(|| unknown("destroy_event"))
    }
    fn record_event(&self, event: EventId, stream: StreamId) -> Result<()> {
        self.watched.check();
        self.intruder.enter("record_event")?;
        let mut state = self.state.lock();
        if state.fail_record {
            return Err(Error::new(ErrorKind::Vendor, "record_event", "told to fail"));
        }
        state.assert_event_outside(event);
        let at = state.streams.get(&stream).ok_or_else(|| unknown("record_event"))?.0;
        if let Some(capture) = state.capturing.get(&stream).copied() {
            state.captured_events.insert(event, capture);
            return Ok(());
        }
        *state.events.get_mut(&event).ok_or_else(|| unknown("record_event"))? = Some((stream, at));
        Ok(())
    }
    fn query_event(&self, event: EventId) -> Result<Completion> {
        self.watched.check();
        self.queries.fetch_add(1, Ordering::Relaxed);
        let state = self.state.lock();
        state.assert_event_outside(event);
        let at = state.events.get(&event).ok_or_else(|| unknown("query_event"))?;
        let executed = |stream: &StreamId| state.streams.get(stream).map_or(u64::MAX, |(_, executed)| *executed);
        let passed = at.as_ref().is_none_or(|(stream, at)| executed(stream) >= *at);
        Ok(if passed { Completion::Complete } else { Completion::Pending })
    }
    fn synchronize_event(&self, event: EventId) -> Result<()> {
        self.watched.check();
        self.state.lock().assert_event_outside(event);
        let at = *self.state.lock().events.get(&event).ok_or_else(|| unknown("synchronize_event"))?;
        if let Some((stream, at)) = at {
            self.state.lock().advance(stream, at);
        }
        Ok(())
    }
    fn allocate(&self, _: u32, options: &AllocateOptions) -> Result<DevicePtr> {
        self.watched.check();
        let mut state = self.state.lock();
        if state.allocated() + options.bytes as u64 > self.memory.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::OutOfMemory, "allocate", "the device has no more"));
        }
        let ptr = state.next_address;
        state.next_address += options.bytes.next_multiple_of(ALIGNMENT) as u64;
        state.blocks.insert(ptr, options.bytes);
        Ok(DevicePtr::new(ptr))
    }
    unsafe fn free(&self, _: u32, ptr: DevicePtr, stream: Option<StreamId>) -> Result<()> {
        self.watched.check();
        assert!(stream.is_some() || !self.is_in_use(ptr.get()), "{ptr:?} is freed while a stream uses it");
        assert!(!self.is_recorded(ptr.get()), "{ptr:?} is freed while a graph has recorded it");
        let mut state = self.state.lock();
        if let Some(stream) = stream {
            state.assert_outside(stream);
        }
        assert!(state.blocks.remove(&ptr.get()).is_some(), "{ptr:?} is freed twice");
        Ok(())
    }
    unsafe fn copy(&self, copy: &MemoryCopy, stream: StreamId) -> Result<()> {
        self.watched.check();
        let addresses = [copy.src, copy.dst].map(|location| match location {
            Location::Host(ptr) => ptr.address() as u64,
            Location::Device { ptr, .. } => ptr.get(),
        });
        self.state.lock().enqueue_use("copy", stream, &addresses)
    }
    fn begin_capture(&self, stream: StreamId, _: CaptureMode) -> Result<()> {
        self.watched.check();
        let mut state = self.state.lock();
        assert!(state.capturing.insert(stream, stream).is_none(), "a capture begins in a capture");
        Ok(())
    }
    unsafe fn end_capture(&self, stream: StreamId) -> Result<GraphId> {
        self.watched.check();
        self.intruder.enter("end_capture")?;
        let mut state = self.state.lock();
        assert_eq!(state.capturing.get(&stream), Some(&stream), "no capture began here");
        state.capturing.retain(|_, capture| *capture != stream);
        state.captured_events.retain(|_, capture| *capture != stream);
        let recorded = state.recorded.remove(&stream).unwrap_or_default();
        if state.lose_capture {
            return Err(Error::new(ErrorKind::Capture, "end_capture", "told to lose it"));
        }
        let id = self.id(&mut state, 0);
        state.graphs.insert(id, recorded);
        Ok(id)
    }
    fn is_capturing(&self, stream: StreamId) -> Result<bool> {
        self.watched.check();
        Ok(self.state.lock().capturing.contains_key(&stream))
    }
    fn instantiate_graph(&self, graph: GraphId) -> Result<GraphExecId> {
        self.watched.check();
        let mut state = self.state.lock();
        let recorded = state.graphs.get(&graph).ok_or_else(|| unknown("instantiate_graph"))?.clone();
        let id = self.id(&mut state, 0);
        state.executables.insert(id, recorded);
        Ok(id)
    }
    unsafe fn launch_graph(&self, graph: GraphExecId, stream: StreamId) -> Result<()> {
        self.watched.check();
        let mut state = self.state.lock();
        state.assert_outside(stream);
        let addresses = state.executables.get(&graph).ok_or_else(|| unknown("launch_graph"))?.clone();
        state.enqueue_use("launch_graph", stream, &addresses)
    }
    fn destroy_graph(&self, graph: GraphId) -> Result<()> {
        self.watched.check();
        self.may_destroy("destroy_graph")?;
        self.state.lock().graphs.remove(&graph).map(|_| ()).ok_or_else(|| unknown("destroy_graph"))
    }
    fn destroy_graph_exec(&self, graph: GraphExecId) -> Result<()> {
        self.watched.check();
        self.may_destroy("destroy_graph_exec")?;
        self.state.lock().executables.remove(&graph).map(|_| ()).ok_or_else(|| unknown("destroy_graph_exec"))
    }
    unsafe fn fill(&self, _: &MemoryFill, _: StreamId) -> Result<()> {
        Err(Error::lacks("fill", "fill"))
    }
    fn create_blas_handle(&self, _: u32, options: &BlasOptions) -> Result<Box<dyn BlasHandle>> {
        self.watched.check();
        let (calls, refuse_modes) = (Arc::clone(&self.handle_calls), Arc::clone(&self.refuse_modes));
        Ok(Box::new(ManualHandle { kind: options.kind, calls, refuse_modes, plans: 0 }))
    }
    fn host_allocator(&self) -> Arc<dyn HostAllocator> {
        Arc::clone(&self.host) as _
    }
}

/// A handle that notes every call and computes nothing.
#[derive(Debug)]
struct ManualHandle {
    kind: BlasKind,
    calls: Arc<Mutex<Vec<HandleCall>>>,
    refuse_modes: Arc<Mutex<usize>>,
    plans: u64,
}

impl ManualHandle {
    fn note(&self, call: HandleCall) -> Result<()> {
        self.calls.lock().push(call);
        Ok(())
    }

    fn note_mode(&self, call: HandleCall) -> Result<()> {
        self.note(call)?;
        let mut refuse = self.refuse_modes.lock();
        if *refuse > 0 {
            *refuse -= 1;
            return Err(Error::new(ErrorKind::Vendor, "set_mode", "told to fail"));
        }
        Ok(())
    }
}

impl BlasHandle for ManualHandle {
    fn kind(&self) -> BlasKind {
        self.kind
    }
    fn device(&self) -> u32 {
        0
    }
    fn set_stream(&mut self, _: StreamId) -> Result<()> {
        self.note(HandleCall::SetStream)
    }
    unsafe fn set_workspace(&mut self, _: Option<Workspace>) -> Result<()> {
        self.note(HandleCall::SetWorkspace)
    }
    fn set_math_mode(&mut self, mode: MathMode) -> Result<()> {
        self.note_mode(HandleCall::SetMathMode(mode))
    }
    fn set_atomics_mode(&mut self, mode: AtomicsMode) -> Result<()> {
        self.note_mode(HandleCall::SetAtomicsMode(mode))
    }
    unsafe fn gemm(&mut self, gemm: &Gemm) -> Result<()> {
        self.note(HandleCall::Gemm(gemm.shape.data_type))
    }
    fn create_plan(&mut self, options: &PlanOptions) -> Result<PlanId> {
        self.plans += 1;
        self.note(HandleCall::CreatePlan(options.math_mode, options.atomics_mode))?;
        Ok(PlanId::new(self.plans))
    }
    unsafe fn run_plan(&mut self, plan: PlanId, _: &PlanArguments) -> Result<()> {
        self.note(HandleCall::RunPlan(plan))
    }
    fn destroy_plan(&mut self, plan: PlanId) -> Result<()> {
        self.note(HandleCall::DestroyPlan(plan))
    }
    fn raw(&self) -> u64 {
        0
    }
    fn destroy(&mut self) -> Result<()> {
        Ok(())
    }
}

// SAFETY: blocks come zeroed from the global allocator in the size and alignment asked for, and stay until the end.
unsafe impl HostAllocator for ManualHost {
    fn allocate(&self, bytes: usize, _: &HostOptions) -> Result<HostPtr> {
        self.watched.check();
        let layout = Layout::from_size_align(bytes, ALIGNMENT)
            .map_err(|error| Error::new(ErrorKind::OutOfMemory, "host_allocate", error.to_string()))?;
        // SAFETY: the layout has a size: core never asks for 0 bytes.
        let ptr = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })
            .ok_or_else(|| Error::new(ErrorKind::OutOfMemory, "host_allocate", "the allocator has no more"))?;
        let ptr = HostPtr::new(ptr);
        ptr.as_ptr().expose_provenance();
        self.live.lock().insert(ptr.address(), layout);
        Ok(ptr)
    }
    unsafe fn free(&self, ptr: HostPtr) -> Result<()> {
        self.watched.check();
        let address = ptr.address();
        let state = self.state.lock();
        assert!(!state.is_in_use(address as u64), "{ptr:?} is freed while a stream uses it");
        assert!(!state.is_recorded(address as u64), "{ptr:?} is freed while a graph has recorded it");
        drop(state);
        let layout = self.live.lock().remove(&address).expect("a live block");
        self.freed.lock().push((address, layout));
        Ok(())
    }
    unsafe fn register(&self, ptr: HostPtr, bytes: usize, _: &HostOptions) -> Result<()> {
        self.watched.check();
        let mut registered = self.registered.lock();
        let before = registered.range(..ptr.address() + bytes).next_back();
        assert!(before.is_none_or(|(start, bytes)| start + bytes <= ptr.address()), "{ptr:?} is registered already");
        registered.insert(ptr.address(), bytes);
        Ok(())
    }
    unsafe fn unregister(&self, ptr: HostPtr) -> Result<()> {
        self.watched.check();
        let address = ptr.address() as u64;
        assert!(!self.state.lock().is_in_use(address), "{ptr:?} is unregistered while a stream uses it");
        assert!(!self.state.lock().is_recorded(address), "{ptr:?} is unregistered while a graph has recorded it");
        assert!(self.registered.lock().remove(&ptr.address()).is_some(), "{ptr:?} is not registered");
        Ok(())
    }
    fn device_address(&self, ptr: HostPtr, _: u32) -> Result<DevicePtr> {
        Ok(DevicePtr::new(ptr.address() as u64))
    }
}
