//! The operations of the four traits, listed once, and the layer that forwards them.
//!
//! [`for_each_operation!`](crate::for_each_operation) is the list. A layer stands between a caller and a backend: it
//! implements [`BackendLayer`] (and [`HandleLayer`], [`HostLayer`], [`SharingLayer`] for the objects that a backend gives
//! out), sees every call, and overrides the methods that it changes. A type with one of these traits has the trait that it
//! forwards.
//!
//! A new method of a trait belongs into the list. A test compares the list with the traits, because a method with a
//! default body would otherwise stop at the layer.

use std::fmt;
use std::sync::Arc;

use crate::backend::{Backend, Completion, DeviceInfo, Identity, LiveObjects};
use crate::blas::{BlasHandle, BlasKind, PlanId};
use crate::capability::Capabilities;
use crate::error::Result;
use crate::host::{HostAllocator, HostObserver};
use crate::id::{EventId, GraphExecId, GraphId, IdParts, ObjectId, PhysicalMemoryId, StreamId};
use crate::ipc::{EventHandle, IpcSharing, MemoryHandle};
use crate::memory::{DevicePtr, HostPtr, MemoryInfo, MemoryRange};

/// Calls `$callback!` with the fallible operations of the four traits, one group for each trait.
///
/// An operation is `Variant: [fn] method(argument: Type, ...) -> Answer;`, where `Variant` is its name in an enum and
/// `[unsafe fn]` marks a method that is unsafe to call. Every method returns a `Result` of its answer.
#[macro_export]
macro_rules! for_each_operation {
    ($callback:ident) => {
        $callback! {
            Backend {
                DeviceInfo: [fn] device_info(device: u32) -> $crate::DeviceInfo;
                Capabilities: [fn] capabilities(device: u32) -> $crate::Capabilities;
                MemoryInfo: [fn] memory_info(device: u32) -> $crate::MemoryInfo;
                CreateStream: [fn] create_stream(device: u32, options: &$crate::StreamOptions) -> $crate::StreamId;
                DestroyStream: [fn] destroy_stream(stream: $crate::StreamId) -> ();
                QueryStream: [fn] query_stream(stream: $crate::StreamId) -> $crate::Completion;
                SynchronizeStream: [fn] synchronize_stream(stream: $crate::StreamId) -> ();
                SynchronizeDevice: [fn] synchronize_device(device: u32) -> ();
                StreamWaitEvent: [fn] stream_wait_event(stream: $crate::StreamId, event: $crate::EventId) -> ();
                RawStream: [fn] raw_stream(stream: $crate::StreamId) -> u64;
                StreamFromRaw: [unsafe fn] stream_from_raw(device: u32, raw: u64) -> $crate::StreamId;
                CreateEvent: [fn] create_event(device: u32, options: &$crate::EventOptions) -> $crate::EventId;
                DestroyEvent: [fn] destroy_event(event: $crate::EventId) -> ();
                RecordEvent: [fn] record_event(event: $crate::EventId, stream: $crate::StreamId) -> ();
                QueryEvent: [fn] query_event(event: $crate::EventId) -> $crate::Completion;
                SynchronizeEvent: [fn] synchronize_event(event: $crate::EventId) -> ();
                EventElapsedNs: [fn] event_elapsed_ns(start: $crate::EventId, end: $crate::EventId) -> u64;
                RawEvent: [fn] raw_event(event: $crate::EventId) -> u64;
                EventFromRaw: [unsafe fn] event_from_raw(device: u32, raw: u64) -> $crate::EventId;
                Allocate: [fn] allocate(device: u32, options: &$crate::AllocateOptions) -> $crate::DevicePtr;
                Free: [unsafe fn] free(device: u32, ptr: $crate::DevicePtr, stream: Option<$crate::StreamId>) -> ();
                DescribeMemory: [fn] describe_memory(device: u32, ptr: $crate::DevicePtr) -> $crate::MemoryRange;
                Copy: [unsafe fn] copy(copy: &$crate::MemoryCopy, stream: $crate::StreamId) -> ();
                Copy2d: [unsafe fn] copy_2d(copy: &$crate::MemoryCopy2d, stream: $crate::StreamId) -> ();
                Fill: [unsafe fn] fill(fill: &$crate::MemoryFill, stream: $crate::StreamId) -> ();
                ReserveAddresses: [fn] reserve_addresses(device: u32, bytes: usize) -> $crate::DevicePtr;
                FreeAddresses: [unsafe fn] free_addresses(device: u32, ptr: $crate::DevicePtr, bytes: usize) -> ();
                CreateMemory: [fn] create_memory(device: u32, options: &$crate::PhysicalMemoryOptions)
                    -> $crate::PhysicalMemoryId;
                DestroyMemory: [fn] destroy_memory(memory: $crate::PhysicalMemoryId) -> ();
                MapMemory: [unsafe fn] map_memory(device: u32, ptr: $crate::DevicePtr, memory: $crate::PhysicalMemoryId)
                    -> ();
                SetMemoryAccess: [unsafe fn] set_memory_access(
                    device: u32, ptr: $crate::DevicePtr, bytes: usize, accessing: u32) -> ();
                UnmapMemory: [unsafe fn] unmap_memory(device: u32, ptr: $crate::DevicePtr, bytes: usize) -> ();
                BeginCapture: [fn] begin_capture(stream: $crate::StreamId, mode: $crate::CaptureMode) -> ();
                EndCapture: [unsafe fn] end_capture(stream: $crate::StreamId) -> $crate::GraphId;
                IsCapturing: [fn] is_capturing(stream: $crate::StreamId) -> bool;
                InstantiateGraph: [fn] instantiate_graph(graph: $crate::GraphId) -> $crate::GraphExecId;
                LaunchGraph: [unsafe fn] launch_graph(graph: $crate::GraphExecId, stream: $crate::StreamId) -> ();
                DestroyGraph: [fn] destroy_graph(graph: $crate::GraphId) -> ();
                DestroyGraphExec: [fn] destroy_graph_exec(graph: $crate::GraphExecId) -> ();
                CreateBlasHandle: [fn] create_blas_handle(device: u32, options: &$crate::BlasOptions)
                    -> Box<dyn $crate::BlasHandle>;
            }
            BlasHandle {
                SetStream: [fn] set_stream(stream: $crate::StreamId) -> ();
                SetWorkspace: [unsafe fn] set_workspace(workspace: Option<$crate::Workspace>) -> ();
                SetMathMode: [fn] set_math_mode(mode: $crate::MathMode) -> ();
                SetAtomicsMode: [fn] set_atomics_mode(mode: $crate::AtomicsMode) -> ();
                Gemm: [unsafe fn] gemm(gemm: &$crate::Gemm) -> ();
                CreatePlan: [fn] create_plan(options: &$crate::PlanOptions) -> $crate::PlanId;
                RunPlan: [unsafe fn] run_plan(plan: $crate::PlanId, arguments: &$crate::PlanArguments) -> ();
                DestroyPlan: [fn] destroy_plan(plan: $crate::PlanId) -> ();
                Reset: [fn] reset() -> ();
                Destroy: [fn] destroy() -> ();
            }
            HostAllocator {
                HostAllocate: [fn] allocate(bytes: usize, options: &$crate::HostOptions) -> $crate::HostPtr;
                HostFree: [unsafe fn] free(ptr: $crate::HostPtr) -> ();
                HostRegister: [unsafe fn] register(ptr: $crate::HostPtr, bytes: usize, options: &$crate::HostOptions) -> ();
                HostUnregister: [unsafe fn] unregister(ptr: $crate::HostPtr) -> ();
                HostDeviceAddress: [fn] device_address(ptr: $crate::HostPtr, device: u32) -> $crate::DevicePtr;
            }
            IpcSharing {
                ExportMemory: [unsafe fn] export_memory(device: u32, ptr: $crate::DevicePtr, transport: $crate::Transport)
                    -> $crate::MemoryHandle;
                OpenMemory: [fn] open_memory(device: u32, handle: &$crate::MemoryHandle) -> $crate::DevicePtr;
                CloseMemory: [unsafe fn] close_memory(device: u32, ptr: $crate::DevicePtr) -> ();
                ImportMemory: [fn] import_memory(device: u32, handle: &$crate::MemoryHandle) -> $crate::PhysicalMemoryId;
                ExportEvent: [fn] export_event(event: $crate::EventId) -> $crate::EventHandle;
                OpenEvent: [fn] open_event(device: u32, handle: &$crate::EventHandle) -> $crate::EventId;
            }
        }
    };
}

/// An id of any kind of object.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum AnyId {
    /// An executable graph.
    Executable(GraphExecId),
    /// A graph.
    Graph(GraphId),
    /// An event.
    Event(EventId),
    /// Physical memory.
    Memory(PhysicalMemoryId),
    /// A stream.
    Stream(StreamId),
}

impl AnyId {
    /// Returns the parts of the id.
    #[must_use]
    pub fn parts(self) -> IdParts {
        match self {
            Self::Executable(id) => id.parts(),
            Self::Graph(id) => id.parts(),
            Self::Event(id) => id.parts(),
            Self::Memory(id) => id.parts(),
            Self::Stream(id) => id.parts(),
        }
    }

    /// Returns the name of the kind of object, such as `stream`.
    #[must_use]
    pub const fn kind(self) -> &'static str {
        match self {
            Self::Executable(_) => GraphExecId::NAME,
            Self::Graph(_) => GraphId::NAME,
            Self::Event(_) => EventId::NAME,
            Self::Memory(_) => PhysicalMemoryId::NAME,
            Self::Stream(_) => StreamId::NAME,
        }
    }
}

impl fmt::Debug for AnyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Executable(id) => id.fmt(f),
            Self::Graph(id) => id.fmt(f),
            Self::Event(id) => id.fmt(f),
            Self::Memory(id) => id.fmt(f),
            Self::Stream(id) => id.fmt(f),
        }
    }
}

/// One call of an operation, as a layer sees it.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    /// The name of the method; methods of [`HostAllocator`] carry the prefix `host_`.
    pub operation: &'static str,
    /// The device, if the call names one.
    pub device: Option<u32>,
    ids: [Option<AnyId>; 2],
}

impl Call {
    /// Describes a call with these arguments.
    #[must_use]
    pub fn new(operation: &'static str, arguments: &[&dyn Argument]) -> Self {
        let mut call = Self { operation, device: None, ids: [None; 2] };
        for &argument in arguments {
            call.device = call.device.or_else(|| argument.device());
            if let (Some(id), Some(free)) = (argument.id(), call.ids.iter_mut().find(|id| id.is_none())) {
                *free = Some(id);
            }
        }
        call
    }

    /// Returns the ids among the arguments, in their order.
    pub fn ids(&self) -> impl Iterator<Item = AnyId> + Clone + use<> {
        self.ids.into_iter().flatten()
    }

    /// Returns the first stream among the arguments.
    #[must_use]
    pub fn stream(&self) -> Option<StreamId> {
        self.ids().find_map(|id| if let AnyId::Stream(stream) = id { Some(stream) } else { None })
    }
}

/// An argument of an operation.
pub trait Argument {
    /// Returns the id that the argument is.
    fn id(&self) -> Option<AnyId> {
        None
    }

    /// Returns the device that the argument is.
    fn device(&self) -> Option<u32> {
        None
    }
}

/// What an operation returns.
pub trait Answer {
    /// Whether the operation issues an id.
    const ISSUES: bool = false;

    /// Returns the id that the operation issued.
    fn issued(&self) -> Option<AnyId> {
        None
    }
}

macro_rules! ids {
    ($($id:ident $variant:ident;)*) => {$(
        impl Argument for $id {
            fn id(&self) -> Option<AnyId> {
                Some(AnyId::$variant(*self))
            }
        }

        impl Answer for $id {
            const ISSUES: bool = true;

            fn issued(&self) -> Option<AnyId> {
                Some(AnyId::$variant(*self))
            }
        }
    )*};
}

ids! {
    StreamId Stream;
    EventId Event;
    GraphId Graph;
    GraphExecId Executable;
    PhysicalMemoryId Memory;
}

macro_rules! without_ids {
    ($($trait:ident for $($type:ty),*;)*) => { $($(impl $trait for $type {})*)* };
}

without_ids! {
    Argument for u64, usize, DevicePtr, HostPtr, PlanId, crate::CaptureMode, crate::Transport, crate::MathMode,
        crate::AtomicsMode, Option<crate::Workspace>;
    Answer for (), bool, u64, Completion, DeviceInfo, Capabilities, MemoryInfo, MemoryRange, DevicePtr, HostPtr, PlanId, MemoryHandle,
        EventHandle, Box<dyn BlasHandle>;
}

impl<T> Argument for &T {}

impl Argument for u32 {
    fn device(&self) -> Option<u32> {
        Some(*self)
    }
}

impl Argument for Option<StreamId> {
    fn id(&self) -> Option<AnyId> {
        self.map(AnyId::Stream)
    }
}

macro_rules! layers {
    (Backend { $($b:tt)* } BlasHandle { $($h:tt)* } HostAllocator { $($a:tt)* } IpcSharing { $($s:tt)* }) => {
        layers! {
            /// A layer over a [`Backend`]. A type that implements it is a [`Backend`].
            ///
            /// # Safety
            /// An overridden method must keep the clauses that [`Backend`] names.
            [unsafe] BackendLayer: [Send + Sync + fmt::Debug] over shared Backend "" {
                /// Returns the implementation's identity.
                fn identity(&self) -> &Identity;
                /// Returns the number of devices.
                fn device_count(&self) -> u32;
                /// Returns the living objects.
                fn live_objects(&self) -> LiveObjects;
                /// Returns whether the process has begun to exit.
                fn is_exiting(&self) -> bool;
                /// Returns the allocator of page-locked memory.
                fn host_allocator(&self) -> Arc<dyn HostAllocator>;
                /// Returns the sharing with other processes.
                fn ipc_sharing(&self) -> Option<Arc<dyn IpcSharing>>;
                /// Returns the observer of the host.
                fn host_observer(&self) -> Option<Arc<dyn HostObserver>>;
            } { $($b)* }
        }
        layers! {
            /// A layer over a [`BlasHandle`]. A type that implements it is a [`BlasHandle`].
            [] HandleLayer: [Send + fmt::Debug] over unique BlasHandle "" {
                /// Returns the kind of the handle.
                fn kind(&self) -> BlasKind;
                /// Returns the ordinal of the handle's device.
                fn device(&self) -> u32;
                /// Returns the vendor's handle.
                fn raw(&self) -> u64;
            } { $($h)* }
        }
        layers! {
            /// A layer over a [`HostAllocator`]. A type that implements it is a [`HostAllocator`].
            ///
            /// # Safety
            /// An overridden method must keep the clauses that [`HostAllocator`] names.
            [unsafe] HostLayer: [Send + Sync + fmt::Debug] over shared HostAllocator "host_" {} { $($a)* }
        }
        layers! {
            /// A layer over an [`IpcSharing`]. A type that implements it is an [`IpcSharing`].
            [] SharingLayer: [Send + Sync + fmt::Debug] over shared IpcSharing "" {} { $($s)* }
        }
    };
    (self shared) => { &Self };
    (self unique) => { &mut Self };
    (below shared $trait:ident) => { &dyn $trait };
    (below unique $trait:ident) => { &mut dyn $trait };
    (
        $(#[$doc:meta])*
        [$($unsafe:tt)?] $layer:ident: [$($bound:tt)+] over $access:tt $trait:ident $prefix:literal
        { $($(#[$fact_doc:meta])* fn $fact:ident(&self) -> $value:ty;)* }
        { $($variant:ident: [$($fn:tt)+] $method:ident($($arg:ident: $type:ty),*) -> $answer:ty;)* }
    ) => {
        $(#[$doc])*
        #[allow(clippy::missing_safety_doc, reason = "the trait that the layer forwards has the docs of the methods")]
        pub $($unsafe)? trait $layer: $($bound)+ {
            /// Returns the object below the layer.
            fn below(&self) -> &dyn $trait;

            /// Sees every call of a method that is not overridden. `forward` makes the call below.
            ///
            /// # Errors
            /// The error of the call below, or one of the layer.
            fn around<T: Answer>(
                self: layers!(self $access),
                call: &Call,
                forward: impl FnOnce(layers!(below $access $trait)) -> Result<T>,
            ) -> Result<T>;

            $($(#[$fact_doc])* fn $fact(&self) -> $value {
                self.below().$fact()
            })*

            $(
                #[doc = concat!("Forwards [`", stringify!($trait), "::", stringify!($method), "`].")]
                #[allow(clippy::missing_errors_doc, reason = "as the method that it forwards")]
                $($fn)+ $method(self: layers!(self $access) $(, $arg: $type)*) -> Result<$answer> {
                    let call = Call::new(concat!($prefix, stringify!($method)), &[$(&$arg),*]);
                    #[allow(unused_unsafe, reason = "some methods are safe to call")]
                    // SAFETY: the caller promised to the layer what the method below asks for.
                    self.around(&call, |below| unsafe { below.$method($($arg),*) })
                }
            )*
        }

        // SAFETY: the layer keeps the clauses in the methods that it overrides, and the object below keeps them in the others.
        $($unsafe)? impl<L: $layer> $trait for L {
            $(fn $fact(&self) -> $value {
                $layer::$fact(self)
            })*

            $($($fn)+ $method(self: layers!(self $access) $(, $arg: $type)*) -> Result<$answer> {
                #[allow(unused_unsafe, reason = "some methods are safe to call")]
                // SAFETY: the caller promises what the method asks for.
                unsafe { $layer::$method(self $(, $arg)*) }
            })*
        }
    };
}

for_each_operation!(layers);

#[cfg(test)]
mod tests {
    use super::*;

    macro_rules! names {
        ($($trait:ident { $($variant:ident: $fn:tt $method:ident $arguments:tt -> $answer:ty;)* })*) => {
            [$((stringify!($trait), vec![$(stringify!($method)),*])),*]
        };
    }

    /// The methods of a trait, in the text of the file that declares it.
    fn declared(text: &'static str, of: &str) -> Vec<&'static str> {
        let (_, body) = text.split_once(&format!("trait {of}: ")).unwrap();
        let (body, _) = body.split_once("\n}\n").unwrap();
        let lines = body.lines().filter_map(|line| line.strip_prefix("    "));
        let methods = lines.filter_map(|line| line.strip_prefix("unsafe ").unwrap_or(line).strip_prefix("fn "));
        methods.map(|method| method.split_once('(').unwrap().0).collect()
    }

    #[test]
    fn every_method_of_the_traits_is_forwarded() {
        let sources =
            [include_str!("backend.rs"), include_str!("blas.rs"), include_str!("host.rs"), include_str!("ipc.rs")];
        let infallible: [&[&str]; 4] = [
            &[
                "identity",
                "device_count",
                "live_objects",
                "is_exiting",
                "host_allocator",
                "ipc_sharing",
                "host_observer",
            ],
            &["kind", "device", "raw"],
            &[],
            &[],
        ];
        let listed = for_each_operation!(names);
        for (((of, mut listed), text), infallible) in listed.into_iter().zip(sources).zip(infallible) {
            listed.extend(infallible);
            let mut declared = declared(text, of);
            listed.sort_unstable();
            declared.sort_unstable();
            assert_eq!(declared, listed, "the methods of `{of}` and the operations of the list");
        }
    }

    #[test]
    fn a_call_names_its_device_and_ids() {
        let tag = crate::BackendTag::next();
        let stream = StreamId::legacy_default(tag, 0);
        let call = Call::new("free", &[&3_u32, &DevicePtr::new(64), &Some(stream)]);
        assert_eq!((call.operation, call.device, call.stream()), ("free", Some(3), Some(stream)));
        assert_eq!(Call::new("copy", &[&&64_usize, &stream]).ids().collect::<Vec<_>>(), [AnyId::Stream(stream)]);
    }
}
