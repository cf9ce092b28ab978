//! The suite finds backends that are wrong: wrappers around the mock that break one promise each.
//!
//! A suite that passes a right backend says little before it has failed a wrong one. The wrapper that breaks nothing
//! passes everything, so that what the others fail is their own mistake.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::Duration;

use highwater_conformance::{Launcher, Options, Report, Status, run, serve_peer};
use highwater_core::{
    AllocateOptions, AtomicsMode, Backend, BlasHandle, BlasKind, BlasOptions, Capabilities, CaptureMode, Completion,
    DeviceInfo, DeviceMemoryKind, DevicePtr, EventHandle, EventId, EventOptions, Gemm, GraphExecId, GraphId,
    HostAllocator, HostOptions, HostPtr, Identity, IpcSharing, LiveObjects, Location, MathMode, MemoryCopy, MemoryFill,
    MemoryHandle, MemoryInfo, PlanArguments, PlanId, PlanOptions, Result, StreamId, StreamOptions, Transport,
    Workspace,
};
use highwater_mock::{MockGpu, MockOptions};

/// What a [`Wrapper`] does wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mistake {
    /// Nothing.
    None,
    /// Waits for the stream inside each call that enqueues.
    RunsAtEnqueue,
    /// Takes a wait for an event and forgets it.
    ForgetsWaits,
    /// Looks at an event when the stream gets to its wait, and not when the wait is called.
    LooksWhenThere,
    /// Writes results of the factors' type whatever is asked for.
    IgnoresTheOutput,
    /// Multiplies with beta 0 whatever is asked for.
    IgnoresBeta,
    /// Makes handles under a lock that every call on a stream takes.
    CreatesUnderALock,
    /// Says that a stream is complete without looking.
    AlwaysComplete,
    /// Tells half the time between two events.
    HalvesTimes,
    /// Leaves handles out of its counts.
    ForgetsToCountHandles,
    /// Opens a private copy of another process's memory.
    SharesByCopying,
    /// Takes waits for events of other processes and forgets them.
    ForgetsOpenedEvents,
    /// Records during a capture, and executes as well.
    ExecutesWhileCapturing,
    /// Executes the first launch of an executable graph and no other.
    ReplaysOnce,
    /// Frees stream-ordered memory at once.
    FreesEarly,
    /// Destroys an executable graph together with its pending launches.
    DropsPendingLaunches,
    /// Registers the first page of memory and none of the rest.
    RegistersAPage,
}

impl Mistake {
    const ALL: [Self; 17] = [
        Self::None,
        Self::RunsAtEnqueue,
        Self::ForgetsWaits,
        Self::LooksWhenThere,
        Self::IgnoresTheOutput,
        Self::IgnoresBeta,
        Self::CreatesUnderALock,
        Self::AlwaysComplete,
        Self::HalvesTimes,
        Self::ForgetsToCountHandles,
        Self::SharesByCopying,
        Self::ForgetsOpenedEvents,
        Self::ExecutesWhileCapturing,
        Self::ReplaysOnce,
        Self::FreesEarly,
        Self::DropsPendingLaunches,
        Self::RegistersAPage,
    ];

    fn name(self) -> String {
        format!("{self:?}")
    }
}

/// The variable by which a second process learns which mistake to make.
const VARIABLE: &str = "HIGHWATER_TEST_MISTAKE";

#[derive(Debug)]
struct Wrapper {
    inner: Arc<dyn Backend>,
    mistake: Mistake,
    lock: RwLock<()>,
    opened_events: Arc<Mutex<HashSet<EventId>>>,
    launched: Mutex<HashSet<GraphExecId>>,
    /// Launches that wait for their stream to be waited for.
    held_back: Mutex<Vec<(GraphExecId, StreamId)>>,
    /// Executes what is being recorded.
    side: StreamId,
    /// Waits and copies that are made when the stream gets there.
    late: Mutex<HashMap<StreamId, Late>>,
}

/// What a stream does later than it was told to.
#[derive(Debug, Default)]
struct Late {
    /// Events that the next copy waits for.
    waits: Vec<EventId>,
    /// Copies that wait.
    copies: Vec<JoinHandle<Result<()>>>,
}

impl Wrapper {
    fn new(mistake: Mistake) -> Self {
        let inner = MockGpu::open(MockOptions::new()).unwrap();
        let side = inner.create_stream(0, &StreamOptions::new()).unwrap();
        Self {
            inner,
            mistake,
            lock: RwLock::new(()),
            opened_events: Arc::default(),
            launched: Mutex::default(),
            held_back: Mutex::default(),
            side,
            late: Mutex::default(),
        }
    }

    /// Where an operation that is enqueued on the stream is executed too.
    fn also_on(&self, stream: StreamId) -> Option<StreamId> {
        let executes = self.mistake == Mistake::ExecutesWhileCapturing;
        (executes && self.inner.is_capturing(stream).unwrap_or(false)).then_some(self.side)
    }

    /// Launches what was held back on the stream.
    fn let_go(&self, stream: StreamId) -> Result<()> {
        let mut held_back = self.held_back.lock().unwrap_or_else(PoisonError::into_inner);
        for (graph, _) in held_back.extract_if(.., |(_, on)| *on == stream) {
            // SAFETY: the caller's promise when the launch was asked for; it has not waited since.
            unsafe { self.inner.launch_graph(graph, stream)? };
        }
        Ok(())
    }

    fn late(&self) -> MutexGuard<'_, HashMap<StreamId, Late>> {
        self.late.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the late copies of the stream, or of every stream, were made.
    fn join_late(&self, stream: Option<StreamId>) -> Result<()> {
        let taken: Vec<Late> =
            self.late().extract_if(|on, _| stream.is_none_or(|stream| stream == *on)).map(|(_, late)| late).collect();
        taken.into_iter().flat_map(|late| late.copies).try_for_each(|copy| copy.join().unwrap())
    }

    /// Takes the copy, if the stream has waits to look at before it.
    fn takes_late(&self, copy: MemoryCopy, stream: StreamId) -> bool {
        let mut late = self.late();
        let Some(late) = late.get_mut(&stream).filter(|late| !late.waits.is_empty()) else { return false };
        let (waits, inner) = (std::mem::take(&mut late.waits), Arc::clone(&self.inner));
        late.copies.push(std::thread::spawn(move || {
            inner.synchronize_stream(stream)?;
            waits.into_iter().try_for_each(|event| inner.synchronize_event(event))?;
            // SAFETY: as for a copy that is enqueued: whoever waits for the stream or the device waits for this thread.
            unsafe { inner.copy(&copy, stream) }
        }));
        true
    }

    fn enqueued(&self, stream: StreamId, result: Result<()>) -> Result<()> {
        let _shared = self.lock.read();
        result?;
        if self.mistake == Mistake::RunsAtEnqueue { self.inner.synchronize_stream(stream) } else { Ok(()) }
    }
}

// SAFETY: passes everything on to the mock. The wrong ones break promises on purpose; the suite, which is all that uses
// them, touches host memory only after it has waited for the stream, which no wrapper breaks.
unsafe impl Backend for Wrapper {
    fn identity(&self) -> &Identity {
        self.inner.identity()
    }

    fn device_count(&self) -> u32 {
        self.inner.device_count()
    }

    fn device_info(&self, device: u32) -> Result<DeviceInfo> {
        self.inner.device_info(device)
    }

    fn capabilities(&self, device: u32) -> Result<Capabilities> {
        self.inner.capabilities(device)
    }

    fn memory_info(&self, device: u32) -> Result<MemoryInfo> {
        self.inner.memory_info(device)
    }

    fn live_objects(&self) -> LiveObjects {
        let mut live = self.inner.live_objects();
        if self.mistake == Mistake::ForgetsToCountHandles {
            live.handles = 0;
        }
        live
    }

    fn is_exiting(&self) -> bool {
        self.inner.is_exiting()
    }

    fn create_stream(&self, device: u32, options: &StreamOptions) -> Result<StreamId> {
        self.inner.create_stream(device, options)
    }

    fn destroy_stream(&self, stream: StreamId) -> Result<()> {
        self.join_late(Some(stream))?;
        self.inner.destroy_stream(stream)
    }

    fn query_stream(&self, stream: StreamId) -> Result<Completion> {
        let completion = self.inner.query_stream(stream)?;
        Ok(if self.mistake == Mistake::AlwaysComplete { Completion::Complete } else { completion })
    }

    fn synchronize_stream(&self, stream: StreamId) -> Result<()> {
        self.let_go(stream)?;
        self.join_late(Some(stream))?;
        self.inner.synchronize_stream(stream)
    }

    fn synchronize_device(&self, device: u32) -> Result<()> {
        self.join_late(None)?;
        self.inner.synchronize_device(device)
    }

    fn stream_wait_event(&self, stream: StreamId, event: EventId) -> Result<()> {
        let opened = || self.opened_events.lock().unwrap_or_else(PoisonError::into_inner).contains(&event);
        if self.mistake == Mistake::ForgetsWaits || self.mistake == Mistake::ForgetsOpenedEvents && opened() {
            // The ids are still looked at.
            self.inner.query_stream(stream)?;
            return self.inner.query_event(event).map(drop);
        }
        if self.mistake == Mistake::LooksWhenThere {
            self.inner.query_stream(stream)?;
            self.inner.query_event(event)?;
            self.late().entry(stream).or_default().waits.push(event);
            return Ok(());
        }
        self.enqueued(stream, self.inner.stream_wait_event(stream, event))
    }

    fn raw_stream(&self, stream: StreamId) -> Result<u64> {
        self.inner.raw_stream(stream)
    }

    unsafe fn stream_from_raw(&self, device: u32, raw: u64) -> Result<StreamId> {
        // SAFETY: handed on as it came.
        unsafe { self.inner.stream_from_raw(device, raw) }
    }

    fn create_event(&self, device: u32, options: &EventOptions) -> Result<EventId> {
        self.inner.create_event(device, options)
    }

    fn destroy_event(&self, event: EventId) -> Result<()> {
        self.inner.destroy_event(event)
    }

    fn record_event(&self, event: EventId, stream: StreamId) -> Result<()> {
        self.enqueued(stream, self.inner.record_event(event, stream))
    }

    fn query_event(&self, event: EventId) -> Result<Completion> {
        self.inner.query_event(event)
    }

    fn synchronize_event(&self, event: EventId) -> Result<()> {
        self.inner.synchronize_event(event)
    }

    fn event_elapsed_ns(&self, start: EventId, end: EventId) -> Result<u64> {
        let elapsed_ns = self.inner.event_elapsed_ns(start, end)?;
        Ok(if self.mistake == Mistake::HalvesTimes { elapsed_ns / 2 } else { elapsed_ns })
    }

    fn raw_event(&self, event: EventId) -> Result<u64> {
        self.inner.raw_event(event)
    }

    unsafe fn event_from_raw(&self, device: u32, raw: u64) -> Result<EventId> {
        // SAFETY: handed on as it came.
        unsafe { self.inner.event_from_raw(device, raw) }
    }

    fn allocate(&self, device: u32, options: &AllocateOptions) -> Result<DevicePtr> {
        match options.kind {
            // So that it can be freed without the stream.
            DeviceMemoryKind::StreamOrdered(_) if self.mistake == Mistake::FreesEarly => {
                self.inner.allocate(device, &AllocateOptions::new(options.bytes))
            }
            _ => self.inner.allocate(device, options),
        }
    }

    unsafe fn free(&self, device: u32, ptr: DevicePtr, stream: Option<StreamId>) -> Result<()> {
        let stream = if self.mistake == Mistake::FreesEarly { None } else { stream };
        // SAFETY: handed on as it came, or too early: the mock's memory stays mapped, so only its bytes suffer.
        unsafe { self.inner.free(device, ptr, stream) }
    }

    unsafe fn copy(&self, copy: &MemoryCopy, stream: StreamId) -> Result<()> {
        if self.takes_late(*copy, stream) {
            return Ok(());
        }
        if let Some(side) = self.also_on(stream) {
            // SAFETY: the memory lives until the wait, and nobody else uses what a case records.
            unsafe { self.inner.copy(copy, side)? };
            self.inner.synchronize_stream(side)?;
        }
        // SAFETY: handed on as it came.
        self.enqueued(stream, unsafe { self.inner.copy(copy, stream) })
    }

    unsafe fn fill(&self, fill: &MemoryFill, stream: StreamId) -> Result<()> {
        if let Some(side) = self.also_on(stream) {
            // SAFETY: as above.
            unsafe { self.inner.fill(fill, side)? };
            self.inner.synchronize_stream(side)?;
        }
        // SAFETY: handed on as it came.
        self.enqueued(stream, unsafe { self.inner.fill(fill, stream) })
    }

    fn begin_capture(&self, stream: StreamId, mode: CaptureMode) -> Result<()> {
        self.inner.begin_capture(stream, mode)
    }

    unsafe fn end_capture(&self, stream: StreamId) -> Result<GraphId> {
        // SAFETY: passed on as promised.
        unsafe { self.inner.end_capture(stream) }
    }

    fn is_capturing(&self, stream: StreamId) -> Result<bool> {
        self.inner.is_capturing(stream)
    }

    fn instantiate_graph(&self, graph: GraphId) -> Result<GraphExecId> {
        self.inner.instantiate_graph(graph)
    }

    unsafe fn launch_graph(&self, graph: GraphExecId, stream: StreamId) -> Result<()> {
        if self.mistake == Mistake::ReplaysOnce
            && !self.launched.lock().unwrap_or_else(PoisonError::into_inner).insert(graph)
        {
            return Ok(());
        }
        if self.mistake == Mistake::DropsPendingLaunches && self.inner.query_stream(stream)? == Completion::Pending {
            self.held_back.lock().unwrap_or_else(PoisonError::into_inner).push((graph, stream));
            return Ok(());
        }
        // SAFETY: handed on as it came.
        self.enqueued(stream, unsafe { self.inner.launch_graph(graph, stream) })
    }

    fn destroy_graph(&self, graph: GraphId) -> Result<()> {
        self.inner.destroy_graph(graph)
    }

    fn destroy_graph_exec(&self, graph: GraphExecId) -> Result<()> {
        self.held_back.lock().unwrap_or_else(PoisonError::into_inner).retain(|(held, _)| *held != graph);
        self.inner.destroy_graph_exec(graph)
    }

    fn create_blas_handle(&self, device: u32, options: &BlasOptions) -> Result<Box<dyn BlasHandle>> {
        let inner = match self.mistake {
            Mistake::CreatesUnderALock => {
                let _exclusive = self.lock.write();
                std::thread::sleep(Duration::from_millis(40));
                self.inner.create_blas_handle(device, options)?
            }
            _ => self.inner.create_blas_handle(device, options)?,
        };
        Ok(Box::new(WrappedHandle { inner, mistake: self.mistake, stream: None, backend: Arc::clone(&self.inner) }))
    }

    fn host_allocator(&self) -> Arc<dyn HostAllocator> {
        let inner = self.inner.host_allocator();
        if self.mistake == Mistake::RegistersAPage { Arc::new(RegistersAPage(inner)) } else { inner }
    }

    fn ipc_sharing(&self) -> Option<Arc<dyn IpcSharing>> {
        let inner = self.inner.ipc_sharing()?;
        let (backend, opened_events) = (Arc::clone(&self.inner), Arc::clone(&self.opened_events));
        Some(Arc::new(WrappedSharing { inner, backend, mistake: self.mistake, opened_events }))
    }
}

#[derive(Debug)]
struct WrappedSharing {
    inner: Arc<dyn IpcSharing>,
    backend: Arc<dyn Backend>,
    mistake: Mistake,
    opened_events: Arc<Mutex<HashSet<EventId>>>,
}

impl WrappedSharing {
    /// The bytes of the memory that the handle names, in memory of this process.
    fn copied(&self, device: u32, handle: &MemoryHandle) -> Result<DevicePtr> {
        let opened = self.inner.open_memory(device, handle)?;
        let copy = self.backend.allocate(device, &AllocateOptions::new(handle.bytes as usize))?;
        let stream = self.backend.create_stream(device, &StreamOptions::new())?;
        let at = |ptr| Location::Device { device, ptr };
        // SAFETY: both are as large as the handle says, and live until the stream has been waited for.
        unsafe { self.backend.copy(&MemoryCopy::new(at(copy), at(opened), handle.bytes as usize), stream)? };
        self.backend.synchronize_stream(stream)?;
        self.backend.destroy_stream(stream)?;
        // SAFETY: nothing uses the mapping any more.
        unsafe { self.inner.close_memory(device, opened)? };
        Ok(copy)
    }
}

impl IpcSharing for WrappedSharing {
    unsafe fn export_memory(&self, device: u32, ptr: DevicePtr, transport: Transport) -> Result<MemoryHandle> {
        // SAFETY: handed on as it came.
        unsafe { self.inner.export_memory(device, ptr, transport) }
    }

    fn open_memory(&self, device: u32, handle: &MemoryHandle) -> Result<DevicePtr> {
        match self.mistake {
            Mistake::SharesByCopying => self.copied(device, handle),
            _ => self.inner.open_memory(device, handle),
        }
    }

    unsafe fn close_memory(&self, device: u32, ptr: DevicePtr) -> Result<()> {
        match self.mistake {
            // SAFETY: `open_memory` allocated it, and nothing uses it, as the caller promises.
            Mistake::SharesByCopying => unsafe { self.backend.free(device, ptr, None) },
            // SAFETY: handed on as it came.
            _ => unsafe { self.inner.close_memory(device, ptr) },
        }
    }

    fn export_event(&self, event: EventId) -> Result<EventHandle> {
        self.inner.export_event(event)
    }

    fn open_event(&self, device: u32, handle: &EventHandle) -> Result<EventId> {
        let event = self.inner.open_event(device, handle)?;
        self.opened_events.lock().unwrap_or_else(PoisonError::into_inner).insert(event);
        Ok(event)
    }
}

#[derive(Debug)]
struct WrappedHandle {
    inner: Box<dyn BlasHandle>,
    mistake: Mistake,
    stream: Option<StreamId>,
    backend: Arc<dyn Backend>,
}

impl WrappedHandle {
    fn enqueued(&self, result: Result<()>) -> Result<()> {
        result?;
        match (self.mistake, self.stream) {
            (Mistake::RunsAtEnqueue, Some(stream)) => self.backend.synchronize_stream(stream),
            _ => Ok(()),
        }
    }
}

impl BlasHandle for WrappedHandle {
    fn kind(&self) -> BlasKind {
        self.inner.kind()
    }

    fn device(&self) -> u32 {
        self.inner.device()
    }

    fn set_stream(&mut self, stream: StreamId) -> Result<()> {
        self.inner.set_stream(stream)?;
        self.stream = Some(stream);
        Ok(())
    }

    unsafe fn set_workspace(&mut self, workspace: Option<Workspace>) -> Result<()> {
        // SAFETY: handed on as it came.
        unsafe { self.inner.set_workspace(workspace) }
    }

    fn set_math_mode(&mut self, mode: MathMode) -> Result<()> {
        self.inner.set_math_mode(mode)
    }

    fn set_atomics_mode(&mut self, mode: AtomicsMode) -> Result<()> {
        self.inner.set_atomics_mode(mode)
    }

    unsafe fn gemm(&mut self, gemm: &Gemm) -> Result<()> {
        let mut gemm = *gemm;
        if self.mistake == Mistake::IgnoresBeta {
            gemm.beta = 0.0;
        }
        if self.mistake == Mistake::IgnoresTheOutput {
            gemm.shape = gemm.shape.with_output(gemm.shape.data_type);
        }
        // SAFETY: handed on as it came, or so that it reads or writes less.
        let result = unsafe { self.inner.gemm(&gemm) };
        self.enqueued(result)
    }

    fn create_plan(&mut self, options: &PlanOptions) -> Result<PlanId> {
        let mut options = *options;
        if self.mistake == Mistake::IgnoresTheOutput {
            options.shape = options.shape.with_output(options.shape.data_type);
        }
        self.inner.create_plan(&options)
    }

    unsafe fn run_plan(&mut self, plan: PlanId, arguments: &PlanArguments) -> Result<()> {
        // SAFETY: handed on as it came.
        let result = unsafe { self.inner.run_plan(plan, arguments) };
        self.enqueued(result)
    }

    fn destroy_plan(&mut self, plan: PlanId) -> Result<()> {
        self.inner.destroy_plan(plan)
    }

    fn raw(&self) -> u64 {
        self.inner.raw()
    }

    fn destroy(&mut self) -> Result<()> {
        self.inner.destroy()
    }
}

#[derive(Debug)]
struct RegistersAPage(Arc<dyn HostAllocator>);

// SAFETY: what it gives out is the mock's.
unsafe impl HostAllocator for RegistersAPage {
    fn allocate(&self, bytes: usize, options: &HostOptions) -> Result<HostPtr> {
        self.0.allocate(bytes, options)
    }

    unsafe fn free(&self, ptr: HostPtr) -> Result<()> {
        // SAFETY: handed on as it came.
        unsafe { self.0.free(ptr) }
    }

    unsafe fn register(&self, ptr: HostPtr, bytes: usize, options: &HostOptions) -> Result<()> {
        // SAFETY: handed on as it came, or less of it.
        unsafe { self.0.register(ptr, bytes.min(4096), options) }
    }

    unsafe fn unregister(&self, ptr: HostPtr) -> Result<()> {
        // SAFETY: handed on as it came.
        unsafe { self.0.unregister(ptr) }
    }

    fn device_address(&self, ptr: HostPtr, device: u32) -> Result<DevicePtr> {
        self.0.device_address(ptr, device)
    }
}

/// Options with a launcher of second processes that make the same mistake.
fn options(mistake: Mistake) -> Options {
    let launcher = Launcher::current_executable().unwrap();
    let launcher = launcher.with_arguments(["peer", "--exact", "--ignored", "--nocapture"]);
    Options::new().with_launcher(launcher.with_environment(VARIABLE, mistake.name()))
}

#[test]
#[ignore = "the second process of cases about sharing, which start it themselves"]
fn peer() {
    let opened = || -> Result<Arc<dyn Backend>> {
        let name = std::env::var(VARIABLE).unwrap();
        let mistake = Mistake::ALL.into_iter().find(|mistake| mistake.name() == name);
        Ok(Arc::new(Wrapper::new(mistake.unwrap())))
    };
    if let Some(served) = serve_peer(opened) {
        served.unwrap();
    }
}

/// Runs the cases that prove a clause and says which failed.
fn failures(mistake: Mistake, filter: &str) -> (Report, Vec<&'static str>) {
    let report = run(&Wrapper::new(mistake), &options(mistake).with_filter(filter));
    let failed = report.cases().iter().filter(|case| matches!(case.status, Status::Failed(_)));
    let names = failed.map(|case| case.case.name).collect();
    (report, names)
}

#[test]
fn a_wrapper_that_does_nothing_wrong_passes() {
    let report = run(&Wrapper::new(Mistake::None), &options(Mistake::None));
    assert!(report.is_success(), "{report}");
}

#[test]
fn a_backend_that_runs_at_enqueue_fails() {
    let (report, failed) = failures(Mistake::RunsAtEnqueue, "stream.asynchronous");
    for case in ["copies_return_at_once", "fills_return_at_once", "records_and_waits_return_at_once"] {
        assert!(failed.contains(&&*format!("streams.{case}")), "{report}");
    }
    let (report, failed) = failures(Mistake::RunsAtEnqueue, "gemm.asynchronous");
    assert_eq!(failed, ["gemm.returns_at_once"], "{report}");
}

#[test]
fn a_backend_that_forgets_waits_fails() {
    let (report, failed) = failures(Mistake::ForgetsWaits, "event.wait-orders");
    for case in ["waits_order_streams", "waits_order_a_chain_of_streams", "waits_gather_several_streams"] {
        assert!(failed.contains(&&*format!("events.{case}")), "{report}");
    }
    let (report, failed) = failures(Mistake::ForgetsWaits, "event.destroy-pending");
    assert_eq!(failed, ["events.destroyed_events_keep_their_waits"], "{report}");
}

#[test]
fn a_backend_that_looks_at_an_event_when_the_stream_gets_there_fails() {
    let case = "events.waits_ignore_later_records_of_pending_streams";
    let (report, failed) = failures(Mistake::LooksWhenThere, case);
    assert_eq!(failed, [case], "{report}");
    let text = report.to_string();
    assert!(text.contains("helpings the calls took") && text.contains("the stream went on after"), "{text}");
}

#[test]
fn a_backend_that_ignores_the_type_of_the_output_fails() {
    let (report, failed) = failures(Mistake::IgnoresTheOutput, "gemm.mixed");
    for case in
        ["multiplies_f16_to_f32", "multiplies_bf16_to_f32", "stores_more_than_the_factors_type_holds_f16_to_f32"]
    {
        assert!(failed.contains(&&*format!("gemm.{case}")), "{report}");
    }
    let (report, failed) = failures(Mistake::IgnoresTheOutput, "plan.mixed");
    assert!(failed.contains(&"plans.multiply_with_every_epilogue_from_bf16_to_f32"), "{report}");
}

#[test]
fn a_backend_that_ignores_beta_fails() {
    let (report, failed) = failures(Mistake::IgnoresBeta, "gemm.beta");
    for case in ["adds_the_old_c_f32", "adds_the_old_c_f64", "ignores_the_factors_with_alpha_zero"] {
        assert!(failed.contains(&&*format!("gemm.{case}")), "{report}");
    }
    // Beta 0 is what it does, so that it may.
    let (report, failed) = failures(Mistake::IgnoresBeta, "gemm.ignores_the_old_c_with_beta_zero");
    assert!(failed.is_empty() && report.passed() == 6, "{report}");
}

#[test]
fn a_backend_that_makes_handles_under_a_lock_fails() {
    let (report, failed) = failures(Mistake::CreatesUnderALock, "blas.create-concurrent");
    assert_eq!(failed, ["blas.creation_delays_nobody"], "{report}");
}

#[test]
fn a_backend_that_never_says_pending_fails() {
    let (report, failed) = failures(Mistake::AlwaysComplete, "streams.query_follows_the_work");
    assert_eq!(failed, ["streams.query_follows_the_work"], "{report}");
}

#[test]
fn a_backend_that_halves_times_fails() {
    let (report, failed) = failures(Mistake::HalvesTimes, "event.elapsed");
    assert_eq!(failed, ["events.elapsed_time_covers_the_work"], "{report}");
}

#[test]
fn a_backend_that_does_not_count_handles_fails() {
    let (report, failed) = failures(Mistake::ForgetsToCountHandles, "blas.destroyed");
    assert_eq!(failed, ["ids.handles_count"], "{report}");
}

/// Checks that the case fails, or every case of a list.
#[track_caller]
fn assert_fails(mistake: Mistake, filter: &str, cases: &[&str]) {
    let (report, failed) = failures(mistake, filter);
    for case in cases {
        assert!(failed.contains(case), "{case} does not notice {mistake:?}: {report}");
    }
}

#[test]
fn a_backend_that_shares_by_copying_fails() {
    let cases = [
        "sharing.importers_see_what_the_exporter_writes",
        "sharing.exporters_see_what_the_importer_writes",
        "sharing.mappings_of_memory_made_elsewhere_are_shared",
    ];
    assert_fails(Mistake::SharesByCopying, "ipc.shared-bytes", &cases);
}

#[test]
fn a_backend_whose_opened_events_order_nothing_fails() {
    let cases = ["sharing.opened_events_order_the_importer", "sharing.opened_events_order_the_exporter"];
    assert_fails(Mistake::ForgetsOpenedEvents, "ipc.event-orders", &cases);
}

#[test]
fn a_backend_that_executes_while_capturing_fails() {
    let cases = ["capture.records_instead_of_executing", "capture.streams_join_by_events"];
    assert_fails(Mistake::ExecutesWhileCapturing, "capture.not-executed", &cases);
}

#[test]
fn a_backend_that_replays_once_fails() {
    let cases = [
        "capture.replays_execute_everything_each_time",
        "capture.two_replays_add_a_product_twice",
        "capture.many_replays_run_one_after_the_other",
    ];
    assert_fails(Mistake::ReplaysOnce, "capture.replay", &cases);
}

#[test]
fn a_backend_that_frees_stream_ordered_memory_at_once_fails() {
    let case = "memory.stream_ordered_bytes_are_given_to_nobody_too_early";
    assert_fails(Mistake::FreesEarly, case, &[case]);
}

#[test]
fn a_backend_that_drops_pending_launches_with_their_graph_fails() {
    let cases = [
        "capture.pending_launches_finish_when_all_is_destroyed",
        "capture.pending_products_finish_when_all_is_destroyed",
    ];
    assert_fails(Mistake::DropsPendingLaunches, "capture.pending_", &cases);
}

#[test]
fn a_backend_that_registers_one_page_fails() {
    let cases = ["host.registered_memory_is_copied_up_to_its_ends"];
    assert_fails(Mistake::RegistersAPage, "host.register-copies", &cases);
}
