//! A backend that hands every call on, except where a hook steps in.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use highwater_hal::{
    AllocateOptions, AtomicsMode, Backend, BlasHandle, BlasKind, BlasOptions, Capabilities, CaptureMode, Completion,
    DeviceInfo, DevicePtr, ErrorKind, EventHandle, EventId, EventOptions, Gemm, GraphExecId, GraphId, HostAllocator,
    HostOptions, HostPtr, Identity, IpcSharing, LiveObjects, MathMode, MemoryCopy, MemoryFill, MemoryHandle,
    MemoryInfo, PlanArguments, PlanId, PlanOptions, Result, StreamId, StreamOptions, Transport, Workspace,
};

use super::honest::{Honest, HonestHandle, HonestHost, HonestSharing, wrong};
use super::hooks::Hooks;

/// What a wrapper and the objects that it gave out have in common.
struct Core {
    honest: Honest,
    hooks: Hooks,
    /// Says who it is while streams are alive, where a hook wants that.
    other_identity: Option<Identity>,
    /// Set when nobody waits for the case any more that uses the backend.
    stopped: Arc<AtomicBool>,
    allocators: AtomicU64,
}

/// Calls that a case needs to give back what it has: they reach the backend also when the wrapper was stopped.
const GIVE_BACK: [&str; 11] = [
    "synchronize_stream",
    "synchronize_device",
    "destroy_stream",
    "destroy_event",
    "free",
    "unregister",
    "end_capture",
    "destroy_graph",
    "destroy_graph_exec",
    "destroy",
    "close_memory",
];

impl Core {
    fn is_stopped(&self) -> bool {
        // Relaxed: nothing else is read by it.
        self.stopped.load(Ordering::Relaxed)
    }

    /// The hook of a method, if it may step in still.
    fn hook<'a, H: ?Sized>(&self, hook: &'a Option<Box<H>>) -> Option<&'a H> {
        if self.is_stopped() { None } else { hook.as_deref() }
    }

    /// Begins a call.
    fn enter(&self, method: &'static str, stream: Option<StreamId>) -> Result<()> {
        let stopped = self.is_stopped();
        if stopped && !GIVE_BACK.contains(&method) {
            return Err(wrong(ErrorKind::DeviceLost, method));
        }
        if (stopped || self.hooks.settles) && matches!(method, "free" | "unregister" | "close_memory") {
            self.honest.settle();
        }
        self.hook(&self.hooks.before).map_or(Ok(()), |before| before(&self.honest, method, stream))
    }
}

/// An argument of a call: ids may be translated, and a stream says what the call is about.
trait Argument: Copy {
    fn translated(self, _: &Hooks) -> Self {
        self
    }

    fn stream(self) -> Option<StreamId> {
        None
    }
}

impl<T> Argument for &T {}
impl Argument for u32 {}
impl Argument for u64 {}
impl Argument for usize {}
impl Argument for DevicePtr {}
impl Argument for HostPtr {}
impl Argument for CaptureMode {}
impl Argument for GraphId {}
impl Argument for GraphExecId {}
impl Argument for Transport {}
impl Argument for Option<Workspace> {}
impl Argument for MathMode {}
impl Argument for AtomicsMode {}
impl Argument for PlanId {}

impl Argument for StreamId {
    fn translated(self, hooks: &Hooks) -> Self {
        hooks.stream_in.as_ref().map_or(self, |translate| translate(self))
    }

    fn stream(self) -> Option<StreamId> {
        Some(self)
    }
}

impl Argument for EventId {
    fn translated(self, hooks: &Hooks) -> Self {
        hooks.event_in.as_ref().map_or(self, |translate| translate(self))
    }
}

impl Argument for Option<StreamId> {
    fn translated(self, hooks: &Hooks) -> Self {
        self.map(|stream| stream.translated(hooks))
    }

    fn stream(self) -> Option<StreamId> {
        self
    }
}

/// Methods that go to their hook or are handed on. Those that are unsafe to call have safe namesakes behind the
/// wrapper, which say why.
macro_rules! pass_through {
    ($hooks:ident $access:tt:
        safe { $($name:ident($($arg:ident: $type:ty),*) -> $result:ty;)* }
        unsafe { $($unsafe_name:ident($($unsafe_arg:ident: $unsafe_type:ty),*) -> $unsafe_result:ty;)* }
    ) => {
        $(fn $name(self: pass_through!(self $access) $(, $arg: $type)*) -> $result {
            pass_through!(body self $hooks $access $name $($arg)*)
        })*
        $(unsafe fn $unsafe_name(self: pass_through!(self $access) $(, $unsafe_arg: $unsafe_type)*) -> $unsafe_result {
            pass_through!(body self $hooks $access $unsafe_name $($unsafe_arg)*)
        })*
    };
    (self shared) => { &Self };
    (self unique) => { &mut Self };
    (body $self:ident $hooks:ident $access:tt $name:ident $($arg:ident)*) => {{
        let core = Arc::clone(&$self.core);
        $(let $arg = $arg.translated(&core.hooks);)*
        let about = [$self.bound(), $($arg.stream()),*].into_iter().flatten().next();
        core.enter(stringify!($name), about)?;
        match core.hook(&core.hooks.$hooks.$name) {
            Some(hook) => hook(pass_through!(borrow $access $self.honest) $(, $arg)*),
            None => $self.honest.$name($($arg),*),
        }
    }};
    (borrow shared $honest:expr) => { &$honest };
    (borrow unique $honest:expr) => { &mut $honest };
}

/// The backend of a saboteur.
pub(super) struct Wrapper {
    core: Arc<Core>,
    honest: Honest,
}

impl Wrapper {
    /// `stopped`, once set, makes calls fail, except those that give something back.
    pub(super) fn new(backend: Arc<dyn Backend>, hooks: Hooks, stopped: Arc<AtomicBool>) -> Self {
        let other_identity = hooks.identity.map(|change| change(backend.identity()));
        let honest = Honest::new(backend);
        let core = Core { honest: honest.clone(), hooks, other_identity, stopped, allocators: AtomicU64::new(0) };
        Self { core: Arc::new(core), honest }
    }

    fn bound(&self) -> Option<StreamId> {
        None
    }
}

impl fmt::Debug for Wrapper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wrapper").field("backend", &self.honest).finish_non_exhaustive()
    }
}

// SAFETY: hands everything on to a backend that keeps its promises. A saboteur breaks one of them on purpose, and is
// given to the suite alone, never to core. The suite touches page-locked memory after it has waited for streams or
// devices; where a saboteur spoils these waits it may read bytes that a device writes at the time, which are bytes
// whatever they are, and memory is given back only after the devices were waited for (`Hooks::settles`).
unsafe impl Backend for Wrapper {
    fn identity(&self) -> &Identity {
        match &self.core.other_identity {
            Some(other) if self.honest.live_objects().streams > 0 => other,
            _ => self.honest.identity(),
        }
    }

    fn device_count(&self) -> u32 {
        match self.core.hook(&self.core.hooks.backend.device_count) {
            Some(hook) => hook(&self.honest),
            None => self.honest.device_count(),
        }
    }

    fn live_objects(&self) -> LiveObjects {
        match self.core.hook(&self.core.hooks.backend.live_objects) {
            Some(hook) => hook(&self.honest),
            None => self.honest.live_objects(),
        }
    }

    fn is_exiting(&self) -> bool {
        self.honest.is_exiting()
    }

    pass_through! { backend shared:
        safe {
            device_info(device: u32) -> Result<DeviceInfo>;
            capabilities(device: u32) -> Result<Capabilities>;
            memory_info(device: u32) -> Result<MemoryInfo>;
            create_stream(device: u32, options: &StreamOptions) -> Result<StreamId>;
            destroy_stream(stream: StreamId) -> Result<()>;
            query_stream(stream: StreamId) -> Result<Completion>;
            synchronize_stream(stream: StreamId) -> Result<()>;
            synchronize_device(device: u32) -> Result<()>;
            stream_wait_event(stream: StreamId, event: EventId) -> Result<()>;
            raw_stream(stream: StreamId) -> Result<u64>;
            create_event(device: u32, options: &EventOptions) -> Result<EventId>;
            destroy_event(event: EventId) -> Result<()>;
            record_event(event: EventId, stream: StreamId) -> Result<()>;
            query_event(event: EventId) -> Result<Completion>;
            synchronize_event(event: EventId) -> Result<()>;
            event_elapsed_ns(start: EventId, end: EventId) -> Result<u64>;
            raw_event(event: EventId) -> Result<u64>;
            allocate(device: u32, options: &AllocateOptions) -> Result<DevicePtr>;
            begin_capture(stream: StreamId, mode: CaptureMode) -> Result<()>;
            is_capturing(stream: StreamId) -> Result<bool>;
            instantiate_graph(graph: GraphId) -> Result<GraphExecId>;
            destroy_graph(graph: GraphId) -> Result<()>;
            destroy_graph_exec(graph: GraphExecId) -> Result<()>;
        }
        unsafe {
            stream_from_raw(device: u32, raw: u64) -> Result<StreamId>;
            event_from_raw(device: u32, raw: u64) -> Result<EventId>;
            free(device: u32, ptr: DevicePtr, stream: Option<StreamId>) -> Result<()>;
            copy(copy: &MemoryCopy, stream: StreamId) -> Result<()>;
            fill(fill: &MemoryFill, stream: StreamId) -> Result<()>;
            end_capture(stream: StreamId) -> Result<GraphId>;
            launch_graph(graph: GraphExecId, stream: StreamId) -> Result<()>;
        }
    }

    fn create_blas_handle(&self, device: u32, options: &BlasOptions) -> Result<Box<dyn BlasHandle>> {
        let core = Arc::clone(&self.core);
        core.enter("create_blas_handle", None)?;
        let handle = match core.hook(&core.hooks.backend.create_blas_handle) {
            Some(hook) => hook(&self.honest, device, options)?,
            None => self.honest.create_blas_handle(device, options)?,
        };
        let honest = HonestHandle::new(self.honest.clone(), handle);
        Ok(Box::new(WrappedHandle { core, honest: std::mem::ManuallyDrop::new(honest) }))
    }

    fn host_allocator(&self) -> Arc<dyn HostAllocator> {
        // Relaxed: only the uniqueness of the number matters.
        let serial = self.core.allocators.fetch_add(1, Ordering::Relaxed);
        Arc::new(WrappedHost { core: Arc::clone(&self.core), honest: HonestHost::new(self.honest.clone(), serial) })
    }

    fn ipc_sharing(&self) -> Option<Arc<dyn IpcSharing>> {
        let sharing = self.honest.ipc_sharing().filter(|_| !self.core.hooks.hides_sharing)?;
        let honest = HonestSharing::new(self.honest.clone(), sharing);
        Some(Arc::new(WrappedSharing { core: Arc::clone(&self.core), honest }))
    }
}

/// A handle of a saboteur.
struct WrappedHandle {
    core: Arc<Core>,
    honest: std::mem::ManuallyDrop<HonestHandle>,
}

impl WrappedHandle {
    fn bound(&self) -> Option<StreamId> {
        self.honest.stream
    }
}

impl fmt::Debug for WrappedHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WrappedHandle").field("handle", &self.honest).finish_non_exhaustive()
    }
}

impl Drop for WrappedHandle {
    fn drop(&mut self) {
        if !self.core.hooks.forgets_dropped_handles {
            // SAFETY: dropped here only, once.
            unsafe { std::mem::ManuallyDrop::drop(&mut self.honest) };
        }
    }
}

impl BlasHandle for WrappedHandle {
    fn kind(&self) -> BlasKind {
        let kind = self.honest.kind();
        self.core.hooks.kind.map_or(kind, |says| says(kind))
    }

    fn device(&self) -> u32 {
        self.honest.device()
    }

    fn raw(&self) -> u64 {
        self.honest.raw()
    }

    pass_through! { handle unique:
        safe {
            set_stream(stream: StreamId) -> Result<()>;
            set_math_mode(mode: MathMode) -> Result<()>;
            set_atomics_mode(mode: AtomicsMode) -> Result<()>;
            create_plan(options: &PlanOptions) -> Result<PlanId>;
            destroy_plan(plan: PlanId) -> Result<()>;
            reset() -> Result<()>;
            destroy() -> Result<()>;
        }
        unsafe {
            set_workspace(workspace: Option<Workspace>) -> Result<()>;
            gemm(gemm: &Gemm) -> Result<()>;
            run_plan(plan: PlanId, arguments: &PlanArguments) -> Result<()>;
        }
    }
}

/// The allocator of a saboteur.
struct WrappedHost {
    core: Arc<Core>,
    honest: HonestHost,
}

impl WrappedHost {
    fn bound(&self) -> Option<StreamId> {
        None
    }
}

impl fmt::Debug for WrappedHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WrappedHost").field("allocator", &self.honest).finish_non_exhaustive()
    }
}

// SAFETY: as for the backend. No saboteur gives out less memory than it was asked for.
unsafe impl HostAllocator for WrappedHost {
    pass_through! { host shared:
        safe {
            allocate(bytes: usize, options: &HostOptions) -> Result<HostPtr>;
            device_address(ptr: HostPtr, device: u32) -> Result<DevicePtr>;
        }
        unsafe {
            free(ptr: HostPtr) -> Result<()>;
            register(ptr: HostPtr, bytes: usize, options: &HostOptions) -> Result<()>;
            unregister(ptr: HostPtr) -> Result<()>;
        }
    }
}

/// The sharing of a saboteur.
struct WrappedSharing {
    core: Arc<Core>,
    honest: HonestSharing,
}

impl WrappedSharing {
    fn bound(&self) -> Option<StreamId> {
        None
    }
}

impl fmt::Debug for WrappedSharing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WrappedSharing").field("sharing", &self.honest).finish_non_exhaustive()
    }
}

impl IpcSharing for WrappedSharing {
    pass_through! { sharing shared:
        safe {
            open_memory(device: u32, handle: &MemoryHandle) -> Result<DevicePtr>;
            export_event(event: EventId) -> Result<EventHandle>;
            open_event(device: u32, handle: &EventHandle) -> Result<EventId>;
        }
        unsafe {
            export_memory(device: u32, ptr: DevicePtr, transport: Transport) -> Result<MemoryHandle>;
            close_memory(device: u32, ptr: DevicePtr) -> Result<()>;
        }
    }
}
