//! The table: one nullable function pointer for each operation, in groups. The list in this file is the only one. The layout
//! of the table, the exporter's functions, the importer's calls, and the header are made from it.
//!
//! New slots are added at the end only. A slot that is null, or missing from an older table, is an operation that the plugin
//! does not support. A table has all slots of a group or none.

use super::marshalling::{Answer, Argument, HandlePtr};
use super::raw::{CType, RawBackend, RawError, RawHandle, text_of};
use highwater_hal::{
    AllocateOptions, AtomicsMode, BlasOptions, Capabilities, CaptureMode, Completion, DeviceInfo, DevicePtr,
    EventHandle, EventId, EventOptions, Gemm, GraphExecId, GraphId, HostOptions, HostPtr, Identity, LiveObjects,
    MathMode, MemoryCopy, MemoryCopy2d, MemoryFill, MemoryHandle, MemoryInfo, MemoryRange, PhysicalMemoryId,
    PhysicalMemoryOptions, PlanArguments, PlanId, PlanOptions, Result, StreamId, StreamOptions, Transport, Workspace,
};

/// Versions of the table that this version of Highwater supports.
pub const TABLE_VERSIONS: std::ops::RangeInclusive<u32> = 1..=1;

macro_rules! groups {
    ($($group:ident $name:literal: $words:literal;)+) => {
        /// A group of operations. A table has all of a group or none.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub(super) enum Group {
            $(#[doc = $words] $group),+
        }

        impl Group {
            /// Every group.
            pub(super) const ALL: &'static [Self] = &[$(Self::$group),+];

            /// Returns the name for messages and for the header.
            pub(super) const fn name(self) -> &'static str {
                match self { $(Self::$group => $name),+ }
            }

            /// Returns the description for the header.
            pub(super) const fn words(self) -> &'static str {
                match self { $(Self::$group => $words),+ }
            }
        }
    };
}

groups! {
    Required "required": "the operations of every backend";
    Timing "timing": "elapsed time between events";
    Foreign "foreign": "raw handles of streams and events, to and from other code";
    Host "host": "page-locked host memory";
    Register "register": "page-locking of memory that other code allocated";
    Blas "blas": "BLAS and Lt handles";
    Lt "lt": "Lt plans";
    Capture "capture": "stream capture and replay";
    Ipc "ipc": "memory and events of other processes";
    Reset "reset": "restoring a handle that foreign code has used";
    Mapped "mapped": "physical memory that is mapped at reserved addresses";
    Adopt "adopt": "device memory that other code allocated";
    Rows "rows": "two-dimensional copies in one call; without it, the program makes a flat copy of each row";
}

/// A slot of the table, as C declares it.
#[derive(Debug, Clone)]
pub(super) struct Slot {
    /// Its name.
    pub(super) name: &'static str,
    /// Its group.
    pub(super) group: Group,
    /// Its documentation.
    pub(super) doc: String,
    /// The trait and the method whose clauses it keeps. `None` for a slot that does what a `Drop` does in Rust.
    pub(super) method: Option<(&'static str, &'static str)>,
    /// The declarations of its arguments.
    pub(super) arguments: Vec<String>,
    /// Bytes from the beginning of the table.
    pub(super) offset: usize,
}

/// The list of operations: `GROUP NAME: RECEIVER.METHOD(ARGUMENTS) -> ANSWER;`, where an `&` marks an argument that the trait's
/// method takes by reference. The plugin calls the method. If `= { BODY }` follows, it runs the body instead.
macro_rules! slots {
    ($callback:ident) => {
        $callback! {
            /// Closes the backend. Called once, as the last call of the backend, but never once the process exits.
            Required close: owned_backend.close() = {
                drop(owned_backend);
                Ok(())
            };
            /// Returns the name and the versions of the backend, the same in every call.
            Required identity: backend.identity() -> Identity = {
                Ok(backend.identity().clone())
            };
            /// Returns the number of devices, which is at least 1 and never changes. Their ordinals count from 0.
            Required device_count: backend.device_count() -> u32 = {
                Ok(backend.device_count())
            };
            /// Returns the description of a device.
            Required device_info: backend.device_info(device: u32) -> DeviceInfo;
            /// Returns the abilities and facts of a device, the same in every call. Called once.
            Required capabilities: backend.capabilities(device: u32) -> Capabilities;
            /// Returns the free and the total memory.
            Required memory_info: backend.memory_info(device: u32) -> MemoryInfo;
            /// Returns the number of live objects of each kind, by the backend's own count.
            Required live_objects: backend.live_objects() -> LiveObjects = {
                Ok(backend.live_objects())
            };
            /// Returns 1 once the backend knows that the process has begun to exit, else 0. The program also checks this itself.
            Required is_exiting: backend.is_exiting() -> bool = {
                Ok(backend.is_exiting())
            };
            /// Creates a stream.
            Required create_stream: backend.create_stream(device: u32, &options: StreamOptions) -> StreamId;
            /// Destroys a stream without waiting. Its work is still executed.
            Required destroy_stream: backend.destroy_stream(stream: StreamId);
            /// Returns HW_COMPLETE if all work enqueued so far has been executed, else HW_PENDING. Does not wait.
            Required query_stream: backend.query_stream(stream: StreamId) -> Completion;
            /// Waits until all work enqueued so far has been executed.
            Required synchronize_stream: backend.synchronize_stream(stream: StreamId);
            /// Waits for every stream of the device.
            Required synchronize_device: backend.synchronize_device(device: u32);
            /// Makes the stream wait, on the device, for the event's latest record at the time of the call.
            Required stream_wait_event: backend.stream_wait_event(stream: StreamId, event: EventId);
            /// Creates an event. Timing and sharing at once return HW_ERROR_INVALID_ARGUMENT.
            Required create_event: backend.create_event(device: u32, &options: EventOptions) -> EventId;
            /// Destroys an event without waiting.
            Required destroy_event: backend.destroy_event(event: EventId);
            /// Records the event at the stream's current point. Replaces an earlier record.
            Required record_event: backend.record_event(event: EventId, stream: StreamId);
            /// Returns HW_COMPLETE if the stream has reached the latest record or if there is none, else HW_PENDING.
            Required query_event: backend.query_event(event: EventId) -> Completion;
            /// Waits until the stream has reached the latest record.
            Required synchronize_event: backend.synchronize_event(event: EventId);
            /// Allocates device memory with unspecified contents, at a multiple of 256.
            Required allocate: backend.allocate(device: u32, &options: AllocateOptions) -> DevicePtr;
            /// Frees a block. Stream-ordered memory is freed in the order of `stream`. Other memory takes a `stream` of zeros.
            Required free: backend.free(device: u32, ptr: DevicePtr, stream: Option<StreamId>);
            /// Enqueues a copy from or to device memory. The other side is device memory or page-locked host memory.
            Required copy: backend.copy(&copy: MemoryCopy, stream: StreamId);
            /// Enqueues a fill of device memory.
            Required fill: backend.fill(&fill: MemoryFill, stream: StreamId);

            /// Returns the nanoseconds between the records of two events with timing.
            Timing event_elapsed_ns: backend.event_elapsed_ns(start: EventId, end: EventId) -> u64;

            /// Returns the vendor's handle of the stream as a number.
            Foreign raw_stream: backend.raw_stream(stream: StreamId) -> u64;
            /// Wraps a stream that other code made and owns. `destroy_stream` forgets it.
            Foreign stream_from_raw: backend.stream_from_raw(device: u32, raw: u64) -> StreamId;
            /// Returns the vendor's handle of the event as a number.
            Foreign raw_event: backend.raw_event(event: EventId) -> u64;
            /// Wraps an event that other code made and owns. `destroy_event` forgets it.
            Foreign event_from_raw: backend.event_from_raw(device: u32, raw: u64) -> EventId;

            /// Allocates page-locked memory with unspecified contents, at a multiple of 64.
            Host host_allocate: host.allocate(bytes: usize, &options: HostOptions) -> HostPtr;
            /// Frees page-locked memory.
            Host host_free: host.free(ptr: HostPtr);
            /// Returns the address of page-locked memory on the device.
            Host host_device_address: host.device_address(ptr: HostPtr, device: u32) -> DevicePtr;

            /// Page-locks memory that other code allocated.
            Register host_register: host.register(ptr: HostPtr, bytes: usize, &options: HostOptions);
            /// Undoes `host_register`.
            Register host_unregister: host.unregister(ptr: HostPtr);

            /// Creates a handle of a kind, HW_BLAS_KIND_... . One thread at a time uses it.
            Blas create_handle: backend.create_blas_handle(device: u32, &kind: BlasOptions) -> HandlePtr;
            /// Binds the stream of later products.
            Blas handle_set_stream: handle.set_stream(stream: StreamId);
            /// Binds the memory for intermediate results, or the handle's own.
            Blas handle_set_workspace: handle.set_workspace(workspace: Option<Workspace>);
            /// Sets the precision of 32-bit products: HW_MATH_MODE_... .
            Blas handle_set_math_mode: handle.set_math_mode(mode: MathMode);
            /// Sets the use of atomics in kernels: HW_ATOMICS_MODE_... .
            Blas handle_set_atomics_mode: handle.set_atomics_mode(mode: AtomicsMode);
            /// Enqueues `C = alpha * op(A) * op(B) + beta * C` on the bound stream. The program has checked sizes, leading
            /// dimensions and strides: every element is inside the address space, and no two products of a batch share one.
            Blas handle_gemm: handle.gemm(&gemm: Gemm);
            /// Returns the vendor's handle as a number.
            Blas handle_raw: handle.raw() -> u64 = {
                Ok(handle.raw())
            };
            /// Destroys the vendor's handle. Later calls except `handle_close` return HW_ERROR_INVALID_HANDLE.
            Blas handle_destroy: handle.destroy();
            /// Closes the handle, and destroys the vendor's if it still exists. Called once, as the last call of the handle.
            Blas handle_close: owned_handle.destroy() = {
                drop(owned_handle);
                Ok(())
            };

            /// Creates a plan, which belongs to the handle.
            Lt create_plan: handle.create_plan(&options: PlanOptions) -> PlanId;
            /// Enqueues one run of a plan on the bound stream, with the bound workspace.
            Lt run_plan: handle.run_plan(plan: PlanId, &arguments: PlanArguments);
            /// Destroys a plan.
            Lt destroy_plan: handle.destroy_plan(plan: PlanId);

            /// Starts to record the work of the stream instead of executing it, in a mode HW_CAPTURE_... .
            Capture begin_capture: backend.begin_capture(stream: StreamId, mode: CaptureMode);
            /// Ends the capture and returns the recorded graph.
            Capture end_capture: backend.end_capture(stream: StreamId) -> GraphId;
            /// Returns 1 if the stream takes part in a capture, else 0.
            Capture is_capturing: backend.is_capturing(stream: StreamId) -> bool;
            /// Makes an executable graph from a graph.
            Capture instantiate_graph: backend.instantiate_graph(graph: GraphId) -> GraphExecId;
            /// Enqueues one execution of the graph.
            Capture launch_graph: backend.launch_graph(graph: GraphExecId, stream: StreamId);
            /// Destroys a graph.
            Capture destroy_graph: backend.destroy_graph(graph: GraphId);
            /// Destroys an executable graph.
            Capture destroy_graph_exec: backend.destroy_graph_exec(graph: GraphExecId);

            /// Returns a handle of a whole allocation, for a transport HW_TRANSPORT_... .
            Ipc export_memory: sharing.export_memory(device: u32, ptr: DevicePtr, transport: Transport) -> MemoryHandle;
            /// Maps memory of another process for the device.
            Ipc open_memory: sharing.open_memory(device: u32, &memory: MemoryHandle) -> DevicePtr;
            /// Undoes one `open_memory`.
            Ipc close_memory: sharing.close_memory(device: u32, ptr: DevicePtr);
            /// Returns a handle of an event that was created with `interprocess`.
            Ipc export_event: sharing.export_event(event: EventId) -> EventHandle;
            /// Opens an event of another process. `destroy_event` closes it.
            Ipc open_event: sharing.open_event(device: u32, &event: EventHandle) -> EventId;
            /// Reports that the program has closed the descriptor that came with this `descriptor_token`.
            Ipc release_descriptor: backend.release_descriptor(token: u64) = {
                let _ = backend;
                // SAFETY: the program passes each token once.
                unsafe { crate::marshalling::drop_descriptor(token) };
                Ok(())
            };

            /// Restores every vendor setting of the handle to its value on a fresh handle. Its plans stay. If this fails or is
            /// missing, core destroys handles that foreign code has used.
            Reset handle_reset: handle.reset();

            /// Reserves addresses of a device, at which physical memory can be mapped. Memory that is mapped without a gap and
            /// that the device may access is one block for every other operation.
            Mapped reserve_addresses: backend.reserve_addresses(device: u32, bytes: usize) -> DevicePtr;
            /// Gives a range of `reserve_addresses` back.
            Mapped free_addresses: backend.free_addresses(device: u32, ptr: DevicePtr, bytes: usize);
            /// Creates physical memory of a device. It has no address until it is mapped.
            Mapped create_memory: backend.create_memory(device: u32, &options: PhysicalMemoryOptions) -> PhysicalMemoryId;
            /// Destroys physical memory.
            Mapped destroy_memory: backend.destroy_memory(memory: PhysicalMemoryId);
            /// Maps all of the memory at `ptr`, inside a reserved range. No device may access it before `set_memory_access`.
            Mapped map_memory: backend.map_memory(device: u32, ptr: DevicePtr, memory: PhysicalMemoryId);
            /// Lets the device `accessing` read and write memory that is mapped for `device`.
            Mapped set_memory_access: backend.set_memory_access(device: u32, ptr: DevicePtr, bytes: usize, accessing: u32);
            /// Unmaps one or more whole mappings, for every device. The addresses stay reserved.
            Mapped unmap_memory: backend.unmap_memory(device: u32, ptr: DevicePtr, bytes: usize);

            /// Describes the device memory at an address, which any code of this process may have allocated.
            Adopt describe_memory: backend.describe_memory(device: u32, ptr: DevicePtr) -> MemoryRange;
            /// Opens mapped memory of another process without mapping it. `destroy_memory` gives it back.
            Adopt import_memory: sharing.import_memory(device: u32, &memory: MemoryHandle) -> PhysicalMemoryId;

            /// Enqueues a copy of rows, from or to device memory. The other side is device memory or page-locked host memory.
            Rows copy_2d: backend.copy_2d(&copy: MemoryCopy2d, stream: StreamId);
        }
    };
}
pub(super) use slots;

/// The C type of a receiver.
macro_rules! receiver_type {
    (handle) => {
        RawHandle
    };
    (owned_handle) => {
        RawHandle
    };
    ($backend:ident) => {
        RawBackend
    };
}
pub(super) use receiver_type;

macro_rules! table {
    ($($(#[doc = $doc:literal])+ $group:ident $name:ident: $receiver:ident.$method:ident
        ($($(& $($by:lifetime)?)? $argument:ident: $type:ty),*) $(-> $answer:ty)? $(= $body:block)?;)+) => {
        /// The operations of a backend, for one version of the table.
        #[derive(Clone, Copy)]
        #[repr(C)]
        pub(super) struct Table {
            /// Bytes of this struct.
            pub(super) size: u64,
            $(
                $(#[doc = $doc])+
                pub(super) $name: Option<unsafe extern "C" fn(
                    *mut receiver_type!($receiver)
                    $(, <$type as Argument>::Abi)*
                    $(, *mut <$answer as Answer>::Slot)?
                    , *mut RawError
                ) -> i32>,
            )+
        }

        impl Table {
            /// A table without any operation.
            pub(super) const EMPTY: Self = Self { size: size_of::<Self>() as u64, $($name: None),+ };

            /// Returns whether each operation is present, in the order of the list.
            pub(super) fn present(&self) -> Vec<bool> {
                vec![$(self.$name.is_some()),+]
            }
        }

        /// Every operation, in the order of the table.
        pub(super) fn slot_list() -> Vec<Slot> {
            vec![$(Slot {
                name: stringify!($name),
                group: Group::$group,
                doc: text_of(&[$($doc),+]),
                method: trait_of(stringify!($receiver)).map(|of| (of, stringify!($method))),
                arguments: vec![
                    <*mut receiver_type!($receiver) as CType>::declare(receiver_name(stringify!($receiver))),
                    $(<<$type as Argument>::Abi as CType>::declare(stringify!($argument)),)*
                    $(<*mut <$answer as Answer>::Slot as CType>::declare("answer"),)?
                    <*mut RawError as CType>::declare("error"),
                ],
                offset: std::mem::offset_of!(Table, $name),
            }),+]
        }
    };
}
slots!(table);

/// The trait of a receiver.
fn trait_of(receiver: &str) -> Option<&'static str> {
    match receiver {
        "backend" => Some("Backend"),
        "handle" => Some("BlasHandle"),
        "host" => Some("HostAllocator"),
        "sharing" => Some("IpcSharing"),
        _ => None,
    }
}

/// The name of a receiver in C, which has backends and handles only.
fn receiver_name(receiver: &str) -> &'static str {
    if matches!(receiver, "handle" | "owned_handle") { "handle" } else { "backend" }
}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let groups: Vec<&str> = self.groups().collect();
        f.debug_struct("Table").field("size", &self.size).field("groups", &groups).finish()
    }
}

impl Table {
    /// Returns whether the table has the group.
    ///
    /// # Errors
    /// The name of a missing slot, if the table has others of the group.
    pub(super) fn group(&self, group: Group) -> Result<bool, &'static str> {
        let present = self.present();
        let members = slot_list().into_iter().zip(present).filter(|(slot, _)| slot.group == group);
        let (there, missing): (Vec<_>, Vec<_>) = members.partition(|(_, present)| *present);
        match (there.is_empty(), missing.first()) {
            (_, None) => Ok(true),
            (true, Some(_)) => Ok(false),
            (false, Some((slot, _))) => Err(slot.name),
        }
    }

    /// Returns the names of the groups that the table has.
    pub(super) fn groups(&self) -> impl Iterator<Item = &'static str> {
        Group::ALL.iter().filter(|group| self.group(**group) == Ok(true)).map(|group| group.name())
    }

    /// Returns the size of the smallest valid table, which ends after the required operations.
    pub(super) fn least_bytes() -> usize {
        let required = slot_list().into_iter().filter(|slot| slot.group == Group::Required);
        required.map(|slot| slot.offset + size_of::<usize>()).max().unwrap_or(size_of::<Self>())
    }
}
