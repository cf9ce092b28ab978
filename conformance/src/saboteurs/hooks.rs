//! Where a saboteur can step in: one hook for each method of the four traits, and a few beside them.

use highwater_hal::{
    AllocateOptions, AtomicsMode, BlasKind, BlasOptions, Capabilities, CaptureMode, Completion, DeviceInfo, DevicePtr,
    EventHandle, EventId, EventOptions, Gemm, GraphExecId, GraphId, HostOptions, HostPtr, Identity, LiveObjects,
    MathMode, MemoryCopy, MemoryFill, MemoryHandle, MemoryInfo, PlanArguments, PlanId, PlanOptions, Result, StreamId,
    StreamOptions, Transport, Workspace,
};

use super::honest::{Honest, HonestHandle, HonestHost, HonestSharing};

/// Hooks of one trait: each takes the object behind the wrapper and the arguments of its method. Where there is none,
/// the wrapper hands the call on.
macro_rules! hooks {
    ($(#[$doc:meta])* $name:ident for $inner:ty { $($method:ident($($type:ty),*) -> $result:ty;)* }) => {
        $(#[$doc])*
        #[derive(Default)]
        pub(super) struct $name {
            $(pub(super) $method: Option<Box<dyn Fn($inner $(, $type)*) -> $result + Send + Sync>>,)*
        }

        impl $name {
            $(
                #[allow(dead_code, reason = "a method may have no saboteur")]
                pub(super) fn $method(&mut self, hook: impl Fn($inner $(, $type)*) -> $result + Send + Sync + 'static) {
                    self.$method = Some(Box::new(hook));
                }
            )*
        }
    };
}

hooks! {
    /// Those of `Backend`.
    BackendHooks for &Honest {
        device_count() -> u32;
        device_info(u32) -> Result<DeviceInfo>;
        capabilities(u32) -> Result<Capabilities>;
        memory_info(u32) -> Result<MemoryInfo>;
        live_objects() -> LiveObjects;
        create_stream(u32, &StreamOptions) -> Result<StreamId>;
        destroy_stream(StreamId) -> Result<()>;
        query_stream(StreamId) -> Result<Completion>;
        synchronize_stream(StreamId) -> Result<()>;
        synchronize_device(u32) -> Result<()>;
        stream_wait_event(StreamId, EventId) -> Result<()>;
        raw_stream(StreamId) -> Result<u64>;
        stream_from_raw(u32, u64) -> Result<StreamId>;
        create_event(u32, &EventOptions) -> Result<EventId>;
        destroy_event(EventId) -> Result<()>;
        record_event(EventId, StreamId) -> Result<()>;
        query_event(EventId) -> Result<Completion>;
        synchronize_event(EventId) -> Result<()>;
        event_elapsed_ns(EventId, EventId) -> Result<u64>;
        raw_event(EventId) -> Result<u64>;
        event_from_raw(u32, u64) -> Result<EventId>;
        allocate(u32, &AllocateOptions) -> Result<DevicePtr>;
        free(u32, DevicePtr, Option<StreamId>) -> Result<()>;
        copy(&MemoryCopy, StreamId) -> Result<()>;
        fill(&MemoryFill, StreamId) -> Result<()>;
        begin_capture(StreamId, CaptureMode) -> Result<()>;
        end_capture(StreamId) -> Result<GraphId>;
        is_capturing(StreamId) -> Result<bool>;
        instantiate_graph(GraphId) -> Result<GraphExecId>;
        launch_graph(GraphExecId, StreamId) -> Result<()>;
        destroy_graph(GraphId) -> Result<()>;
        destroy_graph_exec(GraphExecId) -> Result<()>;
        create_blas_handle(u32, &BlasOptions) -> Result<Box<dyn highwater_hal::BlasHandle>>;
    }
}

hooks! {
    /// Those of `BlasHandle`.
    HandleHooks for &mut HonestHandle {
        set_stream(StreamId) -> Result<()>;
        set_workspace(Option<Workspace>) -> Result<()>;
        set_math_mode(MathMode) -> Result<()>;
        set_atomics_mode(AtomicsMode) -> Result<()>;
        gemm(&Gemm) -> Result<()>;
        create_plan(&PlanOptions) -> Result<PlanId>;
        run_plan(PlanId, &PlanArguments) -> Result<()>;
        destroy_plan(PlanId) -> Result<()>;
        reset() -> Result<()>;
        destroy() -> Result<()>;
    }
}

hooks! {
    /// Those of `HostAllocator`.
    HostHooks for &HonestHost {
        allocate(usize, &HostOptions) -> Result<HostPtr>;
        free(HostPtr) -> Result<()>;
        register(HostPtr, usize, &HostOptions) -> Result<()>;
        unregister(HostPtr) -> Result<()>;
        device_address(HostPtr, u32) -> Result<DevicePtr>;
    }
}

hooks! {
    /// Those of `IpcSharing`.
    SharingHooks for &HonestSharing {
        export_memory(u32, DevicePtr, Transport) -> Result<MemoryHandle>;
        open_memory(u32, &MemoryHandle) -> Result<DevicePtr>;
        close_memory(u32, DevicePtr) -> Result<()>;
        export_event(EventId) -> Result<EventHandle>;
        open_event(u32, &EventHandle) -> Result<EventId>;
    }
}

/// Sees each call before it is made, with its method and the stream that it is about; an error refuses the call.
type Before = Box<dyn Fn(&Honest, &'static str, Option<StreamId>) -> Result<()> + Send + Sync>;

/// Turns an id of the suite into one of the backend.
type Translation<I> = Box<dyn Fn(I) -> I + Send + Sync>;

/// Everything that one saboteur does.
#[derive(Default)]
pub(super) struct Hooks {
    pub(super) backend: BackendHooks,
    pub(super) handle: HandleHooks,
    pub(super) host: HostHooks,
    pub(super) sharing: SharingHooks,
    pub(super) before: Option<Before>,
    pub(super) stream_in: Option<Translation<StreamId>>,
    pub(super) event_in: Option<Translation<EventId>>,
    /// Who the backend says that it is while a stream is alive.
    pub(super) identity: Option<fn(&Identity) -> Identity>,
    /// What a handle says that it was made as.
    pub(super) kind: Option<fn(BlasKind) -> BlasKind>,
    /// Whether handles that are dropped are forgotten and not destroyed.
    pub(super) forgets_dropped_handles: bool,
    /// Whether sharing is offered nowhere.
    pub(super) hides_sharing: bool,
    /// Whether devices are waited for before memory is given back: for saboteurs that spoil the waits by which the
    /// suite knows that nobody uses it any more.
    pub(super) settles: bool,
}

impl Hooks {
    /// Sets the hook that sees every call.
    pub(super) fn before(
        &mut self,
        hook: impl Fn(&Honest, &'static str, Option<StreamId>) -> Result<()> + Send + Sync + 'static,
    ) {
        self.before = Some(Box::new(hook));
    }

    pub(super) fn stream_in(&mut self, translation: impl Fn(StreamId) -> StreamId + Send + Sync + 'static) {
        self.stream_in = Some(Box::new(translation));
    }

    pub(super) fn event_in(&mut self, translation: impl Fn(EventId) -> EventId + Send + Sync + 'static) {
        self.event_in = Some(Box::new(translation));
    }

    /// Changes what the backend says of its capabilities.
    pub(super) fn claim(&mut self, change: impl Fn(&mut Capabilities) + Send + Sync + 'static) {
        self.backend.capabilities(move |honest, device| {
            let mut capabilities = honest.capabilities(device)?;
            change(&mut capabilities);
            Ok(capabilities)
        });
    }

    /// Changes what the backend counts.
    pub(super) fn count(&mut self, change: impl Fn(&mut LiveObjects) + Send + Sync + 'static) {
        self.backend.live_objects(move |honest| {
            let mut live = honest.live_objects();
            change(&mut live);
            live
        });
    }
}
