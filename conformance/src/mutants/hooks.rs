//! The places where a mutant changes the behavior of a backend: one hook for each operation, and a few for the rest.

use highwater_hal::{BlasKind, Capabilities, EventId, Identity, LiveObjects, Result, StreamId, for_each_operation};

use super::reference::{Reference, ReferenceHandle, ReferenceHost, ReferenceSharing};

/// Makes a struct of hooks for each trait. A hook receives the object below the wrapper and the arguments of its method.
/// Without a hook the wrapper forwards the call.
macro_rules! hooks {
    (Backend $backend:tt BlasHandle $handle:tt HostAllocator $host:tt IpcSharing $sharing:tt) => {
        hooks!(BackendHooks for &Reference $backend);
        hooks!(HandleHooks for &mut ReferenceHandle $handle);
        hooks!(HostHooks for &ReferenceHost $host);
        hooks!(SharingHooks for &ReferenceSharing $sharing);
    };
    ($name:ident for $inner:ty {
        $($variant:ident: $fn:tt $method:ident($($arg:ident: $type:ty),*) -> $answer:ty;)*
    }) => {
        #[derive(Default)]
        pub(super) struct $name {
            $(pub(super) $method: Option<Box<dyn Fn($inner $(, $type)*) -> Result<$answer> + Send + Sync>>,)*
        }

        impl $name {
            $(
                #[allow(dead_code, reason = "an operation may have no mutant")]
                pub(super) fn $method(
                    &mut self,
                    hook: impl Fn($inner $(, $type)*) -> Result<$answer> + Send + Sync + 'static,
                ) {
                    self.$method = Some(Box::new(hook));
                }
            )*
        }
    };
}

for_each_operation!(hooks);

/// Sees each call before it is forwarded: its operation and the stream that it concerns. An error refuses the call.
type Before = Box<dyn Fn(&Reference, &'static str, Option<StreamId>) -> Result<()> + Send + Sync>;

/// Returns a fact of the backend.
type Fact<T> = Box<dyn Fn(&Reference) -> T + Send + Sync>;

/// Translates an id that a case uses to an id of the backend.
type Translation<I> = Box<dyn Fn(I) -> I + Send + Sync>;

/// Everything that one mutant changes.
#[derive(Default)]
pub(super) struct Hooks {
    pub(super) backend: BackendHooks,
    pub(super) handle: HandleHooks,
    pub(super) host: HostHooks,
    pub(super) sharing: SharingHooks,
    pub(super) before: Option<Before>,
    pub(super) stream_in: Option<Translation<StreamId>>,
    pub(super) event_in: Option<Translation<EventId>>,
    pub(super) device_count: Option<Fact<u32>>,
    pub(super) live_objects: Option<Fact<LiveObjects>>,
    pub(super) is_exiting: Option<Fact<bool>>,
    /// The identity that the backend reports while a stream is alive.
    pub(super) identity: Option<fn(&Identity) -> Identity>,
    /// The kind that a handle reports.
    pub(super) kind: Option<fn(BlasKind) -> BlasKind>,
    /// Whether a dropped handle is forgotten instead of destroyed.
    pub(super) forgets_dropped_handles: bool,
    /// Whether each call of `host_allocator` returns another object.
    pub(super) renews_allocators: bool,
    /// Whether each call of `ipc_sharing` returns another object.
    pub(super) renews_sharing: bool,
    /// Whether the backend offers no sharing.
    pub(super) hides_sharing: bool,
    /// Whether the wrapper waits for all devices before it gives memory back. A mutant that breaks the waits of the suite
    /// sets this, because the suite then gives back memory that is still in use.
    pub(super) settles: bool,
}

impl Hooks {
    /// Sets the hook that sees every call.
    pub(super) fn before(
        &mut self,
        hook: impl Fn(&Reference, &'static str, Option<StreamId>) -> Result<()> + Send + Sync + 'static,
    ) {
        self.before = Some(Box::new(hook));
    }

    pub(super) fn stream_in(&mut self, translation: impl Fn(StreamId) -> StreamId + Send + Sync + 'static) {
        self.stream_in = Some(Box::new(translation));
    }

    pub(super) fn event_in(&mut self, translation: impl Fn(EventId) -> EventId + Send + Sync + 'static) {
        self.event_in = Some(Box::new(translation));
    }

    pub(super) fn device_count(&mut self, count: impl Fn(&Reference) -> u32 + Send + Sync + 'static) {
        self.device_count = Some(Box::new(count));
    }

    /// Changes the capabilities that the backend reports.
    pub(super) fn claim(&mut self, change: impl Fn(&mut Capabilities) + Send + Sync + 'static) {
        self.backend.capabilities(move |reference, device| {
            let mut capabilities = reference.capabilities(device)?;
            change(&mut capabilities);
            Ok(capabilities)
        });
    }

    /// Changes the capabilities that the backend reports of each device but the first.
    pub(super) fn claim_of_others(&mut self, change: impl Fn(&mut Capabilities) + Send + Sync + 'static) {
        self.backend.capabilities(move |reference, device| {
            let mut capabilities = reference.capabilities(device)?;
            if device > 0 {
                change(&mut capabilities);
            }
            Ok(capabilities)
        });
    }

    /// Changes the living objects that the backend reports.
    pub(super) fn count(&mut self, change: impl Fn(&mut LiveObjects) + Send + Sync + 'static) {
        self.live_objects = Some(Box::new(move |reference| {
            let mut live = reference.live_objects();
            change(&mut live);
            live
        }));
    }
}
