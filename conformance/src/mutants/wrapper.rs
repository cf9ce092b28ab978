//! The backend that forwards every call, except where a hook steps in.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, ThreadId};

use highwater_hal::{
    Answer, AtomicsMode, Backend, BlasHandle, BlasKind, Call, CaptureMode, DevicePtr, ErrorKind, EventId, GraphExecId,
    GraphId, HostAllocator, HostPtr, Identity, IpcSharing, LiveObjects, MathMode, PhysicalMemoryId, PlanId, Result,
    StreamId, Transport, Workspace, for_each_operation,
};

use super::generated::{Applied, Handle, Lend as _, Mistake, Probe, Treat as _, nothing};
use super::hooks::Hooks;
use super::reference::{Reference, ReferenceHandle, ReferenceHost, ReferenceSharing, wrong};

/// The state that a wrapper shares with the objects that it gave out.
struct Core {
    below: Reference,
    hooks: Hooks,
    /// The mistake of a mutant by construction.
    applied: Option<Applied>,
    /// The identity that the backend reports while streams are alive, if a hook changes it.
    other_identity: Option<Identity>,
    /// Set when the run has stopped waiting for the case that uses the backend.
    stopped: Arc<AtomicBool>,
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("below", &self.below).finish_non_exhaustive()
    }
}

/// The calls by which a case gives back its objects. They reach the backend even after the wrapper was stopped.
const GIVE_BACK: [&str; 15] = [
    "synchronize_stream",
    "synchronize_device",
    "destroy_stream",
    "destroy_event",
    "free",
    "host_free",
    "host_unregister",
    "end_capture",
    "destroy_graph",
    "destroy_graph_exec",
    "destroy",
    "close_memory",
    "unmap_memory",
    "free_addresses",
    "destroy_memory",
];

impl Core {
    fn is_stopped(&self) -> bool {
        // Relaxed: nothing else is read by it.
        self.stopped.load(Ordering::Relaxed)
    }

    /// Returns the hook of an operation, unless the wrapper was stopped.
    fn hook<'a, H: ?Sized>(&self, hook: &'a Option<Box<H>>) -> Option<&'a H> {
        if self.is_stopped() { None } else { hook.as_deref() }
    }

    /// Begins a call.
    fn enter(&self, operation: &'static str, stream: Option<StreamId>) -> Result<()> {
        let stopped = self.is_stopped();
        if stopped && !GIVE_BACK.contains(&operation) {
            return Err(wrong(ErrorKind::DeviceLost, operation));
        }
        // Before the wait, which is for this work too.
        if let Some(applied) = &self.applied {
            applied.enter(&self.below, operation)?;
        }
        let is_real = self.applied.as_ref().is_some_and(|applied| applied.is_real);
        if (stopped || self.hooks.settles || is_real)
            // A free in the order of a stream needs no wait.
            && stream.is_none()
            && !self.applied.as_ref().is_some_and(Applied::captures)
            && matches!(operation, "free" | "host_free" | "host_unregister" | "close_memory" | "unmap_memory")
        {
            self.below.settle();
        }
        self.hook(&self.hooks.before).map_or(Ok(()), |before| before(&self.below, operation, stream))
    }

    /// Returns the mistake that a mutant by construction makes in this call, if any.
    fn mistake(
        &self,
        call: &Call,
        bound: Option<StreamId>,
        handle: Option<Handle>,
        probe: Probe,
    ) -> Option<(&Applied, Mistake)> {
        let applied = self.applied.as_ref().filter(|_| !self.is_stopped())?;
        applied.is_due(&self.below, call, bound, handle, probe).then_some((applied, applied.mutation.mistake))
    }

    /// Notes what a call has made or destroyed, and releases what waits for it.
    fn leave<T: Answer>(&self, call: &Call, bound: Option<StreamId>, answer: &Result<T>, probe: Probe) -> Result<()> {
        let Some(applied) = &self.applied else { return Ok(()) };
        if call.operation == "end_capture" || answer.is_ok() {
            applied.count_capture(call.operation);
        }
        let Ok(value) = answer else { return Ok(()) };
        applied.made(call.operation, value.issued(), probe);
        if matches!(call.operation, "destroy_stream" | "destroy_event") {
            applied.gone(call.ids().next());
        }
        applied.leave(&self.below, call.operation, call.stream().or(bound))
    }
}

/// An argument of a call. A hook may translate ids.
trait Translate: Copy {
    fn translated(self, _: &Hooks) -> Self {
        self
    }
}

macro_rules! untranslated {
    ($($type:ty),*) => { $(impl Translate for $type {})* };
}

untranslated!(u32, u64, usize, DevicePtr, HostPtr, CaptureMode, GraphId, GraphExecId, Transport, Option<Workspace>);
untranslated!(MathMode, AtomicsMode, PlanId, PhysicalMemoryId);

impl<T> Translate for &T {}

impl Translate for StreamId {
    fn translated(self, hooks: &Hooks) -> Self {
        hooks.stream_in.as_ref().map_or(self, |translate| translate(self))
    }
}

impl Translate for EventId {
    fn translated(self, hooks: &Hooks) -> Self {
        hooks.event_in.as_ref().map_or(self, |translate| translate(self))
    }
}

impl Translate for Option<StreamId> {
    fn translated(self, hooks: &Hooks) -> Self {
        self.map(|stream| stream.translated(hooks))
    }
}

/// Implements the four traits: an operation runs its hook, or is forwarded.
macro_rules! wrappers {
    (self shared) => { &Self };
    (self unique) => { &mut Self };
    (borrow shared $below:expr) => { &$below };
    (borrow unique $below:expr) => { &mut $below };
    (early backend $method:ident $self:ident $call:ident $($arg:ident)*) => {{
        let below = &$self.below;
        match ($call.stream(), nothing()) {
            (Some(stream), Some(nothing)) => below
                .on_own_stream(stream.device(), |_own| {
                    $(let $arg = $arg.on(_own);)*
                    below.$method($($arg),*).map(drop)
                })
                .map(|()| nothing),
            _ => below.$method($($arg),*),
        }
    }};
    (early handle $method:ident $self:ident $call:ident $($arg:ident)*) => {
        $self.below.ahead(|below| below.$method($($arg),*))
    };
    (early $hooks:ident $method:ident $self:ident $call:ident $($arg:ident)*) => { $self.below.$method($($arg),*) };
    (defer backend $method:ident $self:ident $call:ident $applied:ident $($arg:ident)*) => {{
        let below = &$self.below;
        match ($call.stream(), nothing()) {
            // What is refused is refused at once.
            (Some(stream), Some(nothing)) if below.is_recording(stream) || below.query_stream(stream).is_ok() => {
                $(let $arg = $arg.keep();)*
                $applied.deferred.defer(stream, move |reference| reference.$method($($arg.lend()),*).map(drop));
                Ok(nothing)
            }
            _ => below.$method($($arg),*),
        }
    }};
    (defer $hooks:ident $method:ident $self:ident $call:ident $applied:ident $($arg:ident)*) => {
        $self.below.$method($($arg),*)
    };
    (finish create_blas_handle $core:ident $below:expr, $answer:expr) => {{
        let below = ReferenceHandle::new($below.clone(), $answer?);
        let maker = thread::current().id();
        Ok(Box::new(WrappedHandle { core: $core, maker, below: ManuallyDrop::new(below) }))
    }};
    (finish $method:ident $core:ident $below:expr, $answer:expr) => { $answer };
    (operations $hooks:ident $access:tt $prefix:literal {
        $($variant:ident: [$($fn:tt)+] $method:ident($($arg:ident: $type:ty),*) -> $answer:ty;)*
    }) => {
        $($($fn)+ $method(self: wrappers!(self $access) $(, $arg: $type)*) -> Result<$answer> {
            let core = Arc::clone(&self.core);
            $(let $arg = $arg.translated(&core.hooks);)*
            let call = Call::new(concat!($prefix, stringify!($method)), &[$(&$arg),*]);
            core.enter(call.operation, self.bound().or(call.stream()))?;
            let probe = Probe::default()$(.with($arg.probe()))*;
            let bound = self.bound();
            let mistake = core.mistake(&call, bound, self.handle(), probe);
            let is_deferred = matches!(mistake, Some((_, Mistake::Delay | Mistake::Swap)));
            let answer: Result<$answer> = match (core.hook(&core.hooks.$hooks.$method), mistake) {
                (_, Some((_, Mistake::Drop))) => match nothing() {
                    Some(nothing) => Ok(nothing),
                    None => self.below.$method($($arg),*),
                },
                (_, Some((_, Mistake::Repeat))) => {
                    let first = self.below.$method($($arg),*);
                    // A refusal changes nothing.
                    let _ = self.below.$method($($arg),*);
                    first
                }
                (_, Some((_applied, Mistake::Neighbor))) => {
                    let _has_stream = call.stream().is_some();
                    $(let $arg = $arg.neighbor(_applied, &core.below, _has_stream);)*
                    self.below.$method($($arg),*)
                }
                (_, Some((_, Mistake::Early))) => wrappers!(early $hooks $method self call $($arg)*),
                (_, Some((_applied, _))) => wrappers!(defer $hooks $method self call _applied $($arg)*),
                (Some(hook), None) => hook(wrappers!(borrow $access self.below) $(, $arg)*),
                (None, None) => self.below.$method($($arg),*),
            };
            if !is_deferred {
                core.leave(&call, bound, &answer, probe)?;
            }
            wrappers!(finish $method core self.below, answer)
        })*
    };
    (Backend $backend:tt BlasHandle $handle:tt HostAllocator $host:tt IpcSharing $sharing:tt) => {
        // SAFETY: every call is forwarded to a backend that keeps its promises, except where a mutant breaks one on purpose.
        // A mutant is given to the suite alone, never to core. The suite reads page-locked memory after it has waited for
        // streams or devices. If a mutant breaks these waits, the suite may read bytes that a device writes meanwhile; any
        // value is then valid. Memory is given back only after all devices were waited for (`Hooks::settles`).
        unsafe impl Backend for Wrapper {
            fn identity(&self) -> &Identity {
                match &self.core.other_identity {
                    Some(other) if self.below.live_objects().streams > 0 => other,
                    _ => self.below.identity(),
                }
            }

            fn device_count(&self) -> u32 {
                let hook = self.core.hook(&self.core.hooks.device_count);
                hook.map_or_else(|| self.below.device_count(), |hook| hook(&self.below))
            }

            fn live_objects(&self) -> LiveObjects {
                let hook = self.core.hook(&self.core.hooks.live_objects);
                hook.map_or_else(|| self.below.live_objects(), |hook| hook(&self.below))
            }

            fn is_exiting(&self) -> bool {
                let hook = self.core.hook(&self.core.hooks.is_exiting);
                hook.map_or_else(|| self.below.is_exiting(), |hook| hook(&self.below))
            }

            fn host_allocator(&self) -> Arc<dyn HostAllocator> {
                let new = || {
                    Arc::new(WrappedHost { core: Arc::clone(&self.core), below: ReferenceHost::new(&self.below) })
                };
                if self.core.hooks.renews_allocators {
                    return new();
                }
                Arc::<WrappedHost>::clone(self.allocator.get_or_init(new))
            }

            fn ipc_sharing(&self) -> Option<Arc<dyn IpcSharing>> {
                let sharing = self.below.ipc_sharing().filter(|_| !self.core.hooks.hides_sharing)?;
                let new = || {
                    let below = ReferenceSharing::new(self.below.clone(), sharing);
                    Arc::new(WrappedSharing { core: Arc::clone(&self.core), below })
                };
                if self.core.hooks.renews_sharing {
                    return Some(new());
                }
                Some(Arc::<WrappedSharing>::clone(self.sharing.get_or_init(new)))
            }

            wrappers!(operations backend shared "" $backend);
        }

        impl BlasHandle for WrappedHandle {
            fn kind(&self) -> BlasKind {
                let kind = self.below.kind();
                self.core.hooks.kind.map_or(kind, |reported| reported(kind))
            }

            fn device(&self) -> u32 {
                self.below.device()
            }

            fn raw(&self) -> u64 {
                self.below.raw()
            }

            wrappers!(operations handle unique "" $handle);
        }

        // SAFETY: as for the backend. No mutant returns less memory than it was asked for.
        unsafe impl HostAllocator for WrappedHost {
            wrappers!(operations host shared "host_" $host);
        }

        impl IpcSharing for WrappedSharing {
            wrappers!(operations sharing shared "" $sharing);
        }
    };
}

for_each_operation!(wrappers);

/// The backend of a mutant.
#[derive(Debug)]
pub(super) struct Wrapper {
    core: Arc<Core>,
    below: Reference,
    allocator: OnceLock<Arc<WrappedHost>>,
    sharing: OnceLock<Arc<WrappedSharing>>,
}

impl Wrapper {
    /// Wraps a backend. Once `stopped` is set, calls fail, except those that give something back.
    pub(super) fn new(
        backend: Arc<dyn Backend>,
        hooks: Hooks,
        applied: Option<Applied>,
        stopped: Arc<AtomicBool>,
    ) -> Self {
        let other_identity = hooks.identity.map(|change| change(backend.identity()));
        let below = Reference::new(backend);
        let core = Core { below: below.clone(), hooks, applied, other_identity, stopped };
        Self { core: Arc::new(core), below, allocator: OnceLock::new(), sharing: OnceLock::new() }
    }

    fn bound(&self) -> Option<StreamId> {
        None
    }

    fn handle(&self) -> Option<Handle> {
        None
    }
}

/// A handle of a mutant.
#[derive(Debug)]
struct WrappedHandle {
    core: Arc<Core>,
    /// The thread that created it.
    maker: ThreadId,
    below: ManuallyDrop<ReferenceHandle>,
}

impl WrappedHandle {
    fn bound(&self) -> Option<StreamId> {
        self.below.stream
    }

    fn handle(&self) -> Option<Handle> {
        Some(Handle { maker: self.maker, device: self.below.device(), raw: self.below.raw() })
    }
}

impl Drop for WrappedHandle {
    fn drop(&mut self) {
        if !self.core.hooks.forgets_dropped_handles {
            // SAFETY: this is the only place that drops it, and it runs once.
            unsafe { ManuallyDrop::drop(&mut self.below) };
        }
    }
}

/// The allocator of a mutant.
#[derive(Debug)]
struct WrappedHost {
    core: Arc<Core>,
    below: ReferenceHost,
}

impl WrappedHost {
    fn bound(&self) -> Option<StreamId> {
        None
    }

    fn handle(&self) -> Option<Handle> {
        None
    }
}

/// The sharing of a mutant.
#[derive(Debug)]
struct WrappedSharing {
    core: Arc<Core>,
    below: ReferenceSharing,
}

impl WrappedSharing {
    fn bound(&self) -> Option<StreamId> {
        None
    }

    fn handle(&self) -> Option<Handle> {
        None
    }
}
