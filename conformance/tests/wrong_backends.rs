//! The suite finds backends that are wrong: wrappers around the mock that break one promise each.
//!
//! A suite that passes a right backend says little before it has failed a wrong one. The wrapper that breaks nothing
//! passes everything, so that what the others fail is their own mistake.

use std::sync::{Arc, RwLock};
use std::time::Duration;

use highwater_conformance::{Options, Report, Status, run};
use highwater_core::{
    AllocateOptions, AtomicsMode, Backend, BlasHandle, BlasKind, BlasOptions, Capabilities, CaptureMode, Completion,
    DeviceInfo, DevicePtr, EventId, EventOptions, Gemm, GraphExecId, GraphId, HostAllocator, Identity, IpcSharing,
    LiveObjects, MathMode, MemoryCopy, MemoryFill, MemoryInfo, PlanArguments, PlanId, PlanOptions, Result, StreamId,
    StreamOptions, Workspace,
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
}

#[derive(Debug)]
struct Wrapper {
    inner: Arc<dyn Backend>,
    mistake: Mistake,
    lock: RwLock<()>,
}

impl Wrapper {
    fn new(mistake: Mistake) -> Self {
        let inner = MockGpu::open(MockOptions::new()).unwrap();
        Self { inner, mistake, lock: RwLock::new(()) }
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
        self.inner.destroy_stream(stream)
    }

    fn query_stream(&self, stream: StreamId) -> Result<Completion> {
        let completion = self.inner.query_stream(stream)?;
        Ok(if self.mistake == Mistake::AlwaysComplete { Completion::Complete } else { completion })
    }

    fn synchronize_stream(&self, stream: StreamId) -> Result<()> {
        self.inner.synchronize_stream(stream)
    }

    fn synchronize_device(&self, device: u32) -> Result<()> {
        self.inner.synchronize_device(device)
    }

    fn stream_wait_event(&self, stream: StreamId, event: EventId) -> Result<()> {
        if self.mistake == Mistake::ForgetsWaits {
            // The ids are still looked at.
            self.inner.query_stream(stream)?;
            return self.inner.query_event(event).map(drop);
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
        self.inner.allocate(device, options)
    }

    unsafe fn free(&self, device: u32, ptr: DevicePtr, stream: Option<StreamId>) -> Result<()> {
        // SAFETY: handed on as it came.
        unsafe { self.inner.free(device, ptr, stream) }
    }

    unsafe fn copy(&self, copy: &MemoryCopy, stream: StreamId) -> Result<()> {
        // SAFETY: handed on as it came.
        self.enqueued(stream, unsafe { self.inner.copy(copy, stream) })
    }

    unsafe fn fill(&self, fill: &MemoryFill, stream: StreamId) -> Result<()> {
        // SAFETY: handed on as it came.
        self.enqueued(stream, unsafe { self.inner.fill(fill, stream) })
    }

    fn begin_capture(&self, stream: StreamId, mode: CaptureMode) -> Result<()> {
        self.inner.begin_capture(stream, mode)
    }

    fn end_capture(&self, stream: StreamId) -> Result<GraphId> {
        self.inner.end_capture(stream)
    }

    fn is_capturing(&self, stream: StreamId) -> Result<bool> {
        self.inner.is_capturing(stream)
    }

    fn instantiate_graph(&self, graph: GraphId) -> Result<GraphExecId> {
        self.inner.instantiate_graph(graph)
    }

    unsafe fn launch_graph(&self, graph: GraphExecId, stream: StreamId) -> Result<()> {
        // SAFETY: handed on as it came.
        self.enqueued(stream, unsafe { self.inner.launch_graph(graph, stream) })
    }

    fn destroy_graph(&self, graph: GraphId) -> Result<()> {
        self.inner.destroy_graph(graph)
    }

    fn destroy_graph_exec(&self, graph: GraphExecId) -> Result<()> {
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
        self.inner.host_allocator()
    }

    fn ipc_sharing(&self) -> Option<Arc<dyn IpcSharing>> {
        self.inner.ipc_sharing()
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
        // SAFETY: handed on as it came, or with a beta that reads less.
        let result = unsafe { self.inner.gemm(&gemm) };
        self.enqueued(result)
    }

    fn create_plan(&mut self, options: &PlanOptions) -> Result<PlanId> {
        self.inner.create_plan(options)
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

/// Runs the cases that prove a clause and says which failed.
fn failures(mistake: Mistake, filter: &str) -> (Report, Vec<&'static str>) {
    let report = run(&Wrapper::new(mistake), &Options::new().with_filter(filter));
    let failed = report.cases().iter().filter(|case| matches!(case.status, Status::Failed(_)));
    let names = failed.map(|case| case.case.name).collect();
    (report, names)
}

#[test]
fn a_wrapper_that_does_nothing_wrong_passes() {
    let report = run(&Wrapper::new(Mistake::None), &Options::new());
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
fn a_backend_that_ignores_beta_fails() {
    let (report, failed) = failures(Mistake::IgnoresBeta, "gemm.beta");
    for case in ["adds_the_old_c_f32", "adds_the_old_c_f64", "ignores_the_factors_with_alpha_zero"] {
        assert!(failed.contains(&&*format!("gemm.{case}")), "{report}");
    }
    // Beta 0 is what it does, so that it may.
    let (report, failed) = failures(Mistake::IgnoresBeta, "gemm.ignores_the_old_c_with_beta_zero");
    assert!(failed.is_empty() && report.passed() == 2, "{report}");
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
