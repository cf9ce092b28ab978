//! The backend of core's own unit tests: the mock with held streams, below layers that watch the calls. A stream moves only
//! when core waits for it or the test says so. The layers panic when core breaks a promise: a call under a lock, a call that
//! the mock refuses, and memory that is freed while a stream may use it or a live graph has recorded it.

use std::collections::{HashMap, HashSet};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock, Weak};

use highwater_hal::{Answer, AnyId, BackendLayer, Call, HandleLayer, HostLayer};
use highwater_mock::{MockGpu, MockOptions};
use parking_lot::Mutex;

use crate::runtime::RuntimeInner;
use crate::*;

/// Locks that are held until this is dropped.
pub(crate) struct Held<T>(pub(crate) T);

impl<T> Drop for Held<T> {
    fn drop(&mut self) {}
}

/// A call on a handle of any kind. Plans count from 1 on each handle.
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

type Intrusion = Box<dyn FnOnce() -> Result<()> + Send>;

/// The state that the three layers share.
struct Watched {
    gpu: Arc<MockGpu>,
    /// The runtime whose locks must be free at every call, in a test of one thread.
    runtime: Mutex<Option<Weak<RuntimeInner>>>,
    /// The number of calls of each operation since the test took it last.
    calls: Mutex<HashMap<&'static str, u64>>,
    handle_calls: Mutex<Vec<HandleCall>>,
    /// The code that runs in the next call of an operation. Its error is the error of the call.
    intrusion: Mutex<Option<(&'static str, Intrusion)>>,
    /// The beginning of the names of operations, and the number of their next calls that fail.
    refused: Mutex<(&'static [&'static str], u64)>,
}

impl std::fmt::Debug for Watched {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.gpu.fmt(f)
    }
}

impl Watched {
    fn check(&self) {
        if let Some(runtime) = self.runtime.lock().as_ref().and_then(Weak::upgrade) {
            assert!(!runtime.is_locked(), "the backend is called under a lock");
        }
    }

    fn around<T>(&self, operation: &'static str, forward: impl FnOnce() -> Result<T>) -> Result<T> {
        self.check();
        *self.calls.lock().entry(operation).or_default() += 1;
        let intrusion = self.intrusion.lock().take_if(|(at, _)| *at == operation);
        intrusion.map_or(Ok(()), |(_, intrude)| intrude())?;
        self.refuse(operation, ErrorKind::Vendor)?;
        let answer = forward();
        if let Err(error) = &answer {
            assert!(matches!(error.kind(), ErrorKind::OutOfMemory | ErrorKind::Forked), "core broke a rule: {error}");
        }
        assert_eq!(self.gpu.violations(), [], "core broke a rule");
        answer
    }

    fn refuse(&self, operation: &'static str, kind: ErrorKind) -> Result<()> {
        let mut refused = self.refused.lock();
        if refused.1 == 0 || !refused.0.iter().any(|name| operation.starts_with(name)) {
            return Ok(());
        }
        refused.1 -= 1;
        Err(Error::new(kind, operation, "told to refuse"))
    }

    fn assert_not_recorded(&self, at: Location) {
        assert!(!self.gpu.is_recorded(at), "{at:?} is freed while a graph has recorded it");
    }
}

#[derive(Debug)]
pub(crate) struct ManualBackend {
    watched: Arc<Watched>,
    /// The other side of the copies that the test enqueues itself.
    scratch: OnceLock<DevicePtr>,
    /// The events that were recorded in the open captures.
    captured: Mutex<HashSet<AnyId>>,
}

impl ManualBackend {
    pub(crate) fn new() -> Arc<Self> {
        Self::with_capabilities(|_| ())
    }

    pub(crate) fn with_capabilities(change: impl FnOnce(&mut Capabilities)) -> Arc<Self> {
        Self::open(MockOptions::new(), change)
    }

    /// Opens a backend whose device has this much memory.
    pub(crate) fn with_memory(bytes: u64) -> Arc<Self> {
        Self::open(MockOptions::new().with_memory_bytes(bytes), |_| ())
    }

    fn open(options: MockOptions, change: impl FnOnce(&mut Capabilities)) -> Arc<Self> {
        let options = options.with_held_streams().with_checks().with_capabilities(|can| {
            *can = Capabilities::none();
            (can.gemm_f32, can.blas_workspace, can.stream_ordered_memory) = (true, true, true);
            (can.capture, can.create_during_capture) = (true, true);
            (can.workspace_alignment, can.blas_workspace_bytes) = (256, 1 << 20);
            change(can);
        });
        let watched = Watched {
            gpu: MockGpu::open(options).unwrap(),
            runtime: Mutex::default(),
            calls: Mutex::default(),
            handle_calls: Mutex::default(),
            intrusion: Mutex::default(),
            refused: Mutex::default(),
        };
        Arc::new(Self { watched: Arc::new(watched), scratch: OnceLock::new(), captured: Mutex::default() })
    }

    /// Panics from here on when the runtime calls while it holds one of its locks. For tests of one thread.
    pub(crate) fn watch_locks_of(&self, runtime: &Runtime) {
        *self.watched.runtime.lock() = Some(Arc::downgrade(&runtime.inner.0));
    }

    /// Returns the calls on handles since the last call of this.
    pub(crate) fn take_handle_calls(&self) -> Vec<HandleCall> {
        std::mem::take(&mut *self.watched.handle_calls.lock())
    }

    /// Returns the number of calls of an operation since the last call of this.
    pub(crate) fn take_calls(&self, operation: &'static str) -> u64 {
        self.watched.calls.lock().remove(operation).unwrap_or_default()
    }

    /// Makes the next calls fail whose operation begins with one of these names. Replaces what was set before.
    pub(crate) fn refuse(&self, operations: &'static [&'static str], calls: u64) {
        *self.watched.refused.lock() = (operations, calls);
    }

    /// Makes every `record_event` fail, or none.
    pub(crate) fn fail_record(&self, fail: bool) {
        self.refuse(&["record_event"], if fail { u64::MAX } else { 0 });
    }

    /// Runs this in the next call of the operation.
    pub(crate) fn intrude(&self, operation: &'static str, intrude: impl FnOnce() -> Result<()> + Send + 'static) {
        *self.watched.intrusion.lock() = Some((operation, Box::new(intrude)));
    }

    /// Executes everything that is enqueued on the stream.
    pub(crate) fn advance(&self, stream: StreamId) {
        self.watched.gpu.release_stream(stream).unwrap();
    }

    /// Returns whether some stream has not executed its last operation on this host or device address.
    pub(crate) fn is_in_use(&self, address: u64) -> bool {
        locations(address).into_iter().any(|at| self.watched.gpu.is_in_use(at))
    }

    /// Returns whether a live graph has recorded this host or device address.
    pub(crate) fn is_recorded(&self, address: u64) -> bool {
        locations(address).into_iter().any(|at| self.watched.gpu.is_recorded(at))
    }

    /// Enqueues a copy of the byte at a host address, behind the runtime's back.
    pub(crate) fn enqueue_use(&self, stream: StreamId, address: u64) {
        let gpu = &self.watched.gpu;
        let ptr = *self.scratch.get_or_init(|| gpu.allocate(0, &AllocateOptions::new(1)).unwrap());
        let copy = MemoryCopy::new(Location::Device { device: 0, ptr }, locations(address)[0], 1);
        // SAFETY: the mock checks that the host memory is page-locked. The test notes the use, so it stays.
        unsafe { gpu.copy(&copy, stream) }.unwrap();
    }

    pub(crate) fn live_objects(&self) -> LiveObjects {
        Backend::live_objects(self)
    }

    /// Returns the number of blocks of page-locked memory. Each registration is one.
    pub(crate) fn live_host_blocks(&self) -> u64 {
        self.watched.gpu.live_objects().host_allocations
    }

    /// Returns whether the address lies in a block of page-locked memory.
    pub(crate) fn has_host_block(&self, address: u64) -> bool {
        self.watched.gpu.host_allocator().device_address(host(address), 0).is_ok()
    }
}

fn host(address: u64) -> HostPtr {
    HostPtr::new(NonNull::new(std::ptr::with_exposed_provenance_mut(address as usize)).unwrap())
}

fn locations(address: u64) -> [Location; 2] {
    [Location::Host(host(address)), Location::Device { device: 0, ptr: DevicePtr::new(address) }]
}

// SAFETY: the overridden methods forward, and free only what the caller gave up.
unsafe impl BackendLayer for ManualBackend {
    fn below(&self) -> &dyn Backend {
        &*self.watched.gpu
    }
    fn around<T: Answer>(&self, call: &Call, forward: impl FnOnce(&dyn Backend) -> Result<T>) -> Result<T> {
        self.watched.around(call.operation, || {
            let event = call.ids().next().filter(|_| matches!(call.operation, "record_event" | "destroy_event"));
            let Some(event) = event else { return forward(self.below()) };
            assert!(!self.captured.lock().contains(&event), "{event:?} belongs to a capture");
            if call.stream().is_some_and(|stream| self.below().is_capturing(stream).unwrap()) {
                self.captured.lock().insert(event);
            }
            forward(self.below())
        })
    }
    fn live_objects(&self) -> LiveObjects {
        self.watched.check();
        let mut live = self.below().live_objects();
        live.allocations -= u64::from(self.scratch.get().is_some());
        live
    }
    /// Executes what was enqueued. The test cannot refer to the stream any more.
    fn destroy_stream(&self, stream: StreamId) -> Result<()> {
        self.watched.around("destroy_stream", || {
            self.watched.gpu.release_stream(stream)?;
            self.below().destroy_stream(stream)
        })
    }
    unsafe fn free(&self, device: u32, ptr: DevicePtr, stream: Option<StreamId>) -> Result<()> {
        self.watched.assert_not_recorded(Location::Device { device, ptr });
        // SAFETY: as the caller promises.
        self.watched.around("free", || unsafe { self.below().free(device, ptr, stream) })
    }
    /// Loses the capture if the end is to be refused with `lose_capture`.
    unsafe fn end_capture(&self, stream: StreamId) -> Result<GraphId> {
        let graph = self.watched.around("end_capture", || {
            self.captured.lock().clear();
            // SAFETY: as the caller promises.
            unsafe { self.below().end_capture(stream) }
        })?;
        let lost = self.watched.refuse("lose_capture", ErrorKind::Capture);
        lost.inspect_err(|_| self.below().destroy_graph(graph).unwrap()).map(|()| graph)
    }
    fn create_blas_handle(&self, device: u32, options: &BlasOptions) -> Result<Box<dyn BlasHandle>> {
        let below = self.watched.around("create_blas_handle", || self.below().create_blas_handle(device, options))?;
        Ok(Box::new(ManualHandle { below, watched: Arc::clone(&self.watched), plans: Vec::new() }))
    }
    fn host_allocator(&self) -> Arc<dyn HostAllocator> {
        Arc::new(ManualHost { below: self.below().host_allocator(), watched: Arc::clone(&self.watched) })
    }
}

#[derive(Debug)]
struct ManualHost {
    below: Arc<dyn HostAllocator>,
    watched: Arc<Watched>,
}

// SAFETY: the overridden methods forward.
unsafe impl HostLayer for ManualHost {
    fn below(&self) -> &dyn HostAllocator {
        &*self.below
    }
    fn around<T: Answer>(&self, call: &Call, forward: impl FnOnce(&dyn HostAllocator) -> Result<T>) -> Result<T> {
        self.watched.around(call.operation, || forward(self.below()))
    }
    unsafe fn free(&self, ptr: HostPtr) -> Result<()> {
        self.watched.assert_not_recorded(Location::Host(ptr));
        // SAFETY: as the caller promises.
        self.watched.around("host_free", || unsafe { self.below.free(ptr) })
    }
    unsafe fn unregister(&self, ptr: HostPtr) -> Result<()> {
        self.watched.assert_not_recorded(Location::Host(ptr));
        // SAFETY: as the caller promises.
        self.watched.around("host_unregister", || unsafe { self.below.unregister(ptr) })
    }
}

/// A handle that notes the calls.
#[derive(Debug)]
struct ManualHandle {
    below: Box<dyn BlasHandle>,
    watched: Arc<Watched>,
    plans: Vec<PlanId>,
}

impl ManualHandle {
    fn note<T>(
        &mut self,
        operation: &'static str,
        note: HandleCall,
        forward: impl FnOnce(&mut dyn BlasHandle) -> Result<T>,
    ) -> Result<T> {
        self.watched.handle_calls.lock().push(note);
        self.watched.around(operation, || forward(&mut *self.below))
    }

    fn numbered(&self, plan: PlanId) -> PlanId {
        PlanId::new(self.plans.iter().position(|other| *other == plan).unwrap() as u64 + 1)
    }
}

impl HandleLayer for ManualHandle {
    fn below(&self) -> &dyn BlasHandle {
        &*self.below
    }
    fn around<T: Answer>(&mut self, call: &Call, forward: impl FnOnce(&mut dyn BlasHandle) -> Result<T>) -> Result<T> {
        self.watched.around(call.operation, || forward(&mut *self.below))
    }
    fn set_stream(&mut self, stream: StreamId) -> Result<()> {
        self.note("set_stream", HandleCall::SetStream, |below| below.set_stream(stream))
    }
    unsafe fn set_workspace(&mut self, workspace: Option<Workspace>) -> Result<()> {
        // SAFETY: as the caller promises.
        self.note("set_workspace", HandleCall::SetWorkspace, |below| unsafe { below.set_workspace(workspace) })
    }
    fn set_math_mode(&mut self, mode: MathMode) -> Result<()> {
        self.note("set_math_mode", HandleCall::SetMathMode(mode), |below| below.set_math_mode(mode))
    }
    fn set_atomics_mode(&mut self, mode: AtomicsMode) -> Result<()> {
        self.note("set_atomics_mode", HandleCall::SetAtomicsMode(mode), |below| below.set_atomics_mode(mode))
    }
    unsafe fn gemm(&mut self, gemm: &Gemm) -> Result<()> {
        // SAFETY: as the caller promises.
        self.note("gemm", HandleCall::Gemm(gemm.shape.data_type), |below| unsafe { below.gemm(gemm) })
    }
    fn create_plan(&mut self, options: &PlanOptions) -> Result<PlanId> {
        let note = HandleCall::CreatePlan(options.math_mode, options.atomics_mode);
        let plan = self.note("create_plan", note, |below| below.create_plan(options))?;
        self.plans.push(plan);
        Ok(plan)
    }
    unsafe fn run_plan(&mut self, plan: PlanId, arguments: &PlanArguments) -> Result<()> {
        let note = HandleCall::RunPlan(self.numbered(plan));
        // SAFETY: as the caller promises.
        self.note("run_plan", note, |below| unsafe { below.run_plan(plan, arguments) })
    }
    fn destroy_plan(&mut self, plan: PlanId) -> Result<()> {
        let note = HandleCall::DestroyPlan(self.numbered(plan));
        self.note("destroy_plan", note, |below| below.destroy_plan(plan))
    }
}
