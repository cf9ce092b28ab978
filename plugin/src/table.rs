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
    MathMode, MemoryCopy, MemoryFill, MemoryHandle, MemoryInfo, PlanArguments, PlanId, PlanOptions, Result, StreamId,
    StreamOptions, Transport, Workspace,
};

/// Versions of the table that this version of Highwater supports.
pub const TABLE_VERSIONS: std::ops::RangeInclusive<u32> = 1..=1;

/// A group of operations. A table has all of a group or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Group {
    /// The operations of every backend: identity, devices, streams, events, memory, copies and fills.
    Required,
    /// Elapsed time between events.
    Timing,
    /// Raw handles of streams and events, to and from other code.
    Foreign,
    /// Page-locked host memory.
    Host,
    /// Page-locking of memory that other code allocated.
    Register,
    /// BLAS and Lt handles.
    Blas,
    /// Lt plans.
    Lt,
    /// Stream capture and replay.
    Capture,
    /// Memory and events of other processes.
    Ipc,
    /// Restoring a handle that foreign code has used.
    Reset,
}

impl Group {
    /// Every group.
    pub(super) const ALL: [Self; 10] = [
        Self::Required,
        Self::Timing,
        Self::Foreign,
        Self::Host,
        Self::Register,
        Self::Blas,
        Self::Lt,
        Self::Capture,
        Self::Ipc,
        Self::Reset,
    ];

    /// Returns the name for messages and for the header.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Required => "required",
            Self::Timing => "timing",
            Self::Foreign => "foreign",
            Self::Host => "host",
            Self::Register => "register",
            Self::Blas => "blas",
            Self::Lt => "lt",
            Self::Capture => "capture",
            Self::Ipc => "ipc",
            Self::Reset => "reset",
        }
    }
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

/// The list of operations: `GROUP RECEIVER NAME "OPERATION" (ARGUMENTS) -> ANSWER { BODY }`. The plugin runs the body.
/// `OPERATION` is the name of the trait's method, for errors.
macro_rules! slots {
    ($callback:ident) => {
        $callback! {
            /// Closes the backend. Called once, as the last call of the backend, but never once the process exits.
            Required owned_backend close "close" () {
                drop(owned_backend);
                Ok(())
            }
            /// Returns the name and the versions of the backend, the same in every call.
            Required backend identity "identity" () -> Identity {
                Ok(backend.identity().clone())
            }
            /// Returns the number of devices, which is at least 1 and never changes. Their ordinals count from 0.
            Required backend device_count "device_count" () -> u32 {
                Ok(backend.device_count())
            }
            /// Returns the description of a device.
            Required backend device_info "device_info" (device: u32) -> DeviceInfo {
                backend.device_info(device)
            }
            /// Returns the abilities and facts of a device, the same in every call. Called once.
            Required backend capabilities "capabilities" (device: u32) -> Capabilities {
                backend.capabilities(device)
            }
            /// Returns the free and the total memory.
            Required backend memory_info "memory_info" (device: u32) -> MemoryInfo {
                backend.memory_info(device)
            }
            /// Returns the number of live objects of each kind, by the backend's own count.
            Required backend live_objects "live_objects" () -> LiveObjects {
                Ok(backend.live_objects())
            }
            /// Returns 1 once the backend knows that the process has begun to exit, else 0. The program also checks this itself.
            Required backend is_exiting "is_exiting" () -> bool {
                Ok(backend.is_exiting())
            }
            /// Creates a stream.
            Required backend create_stream "create_stream" (device: u32, options: StreamOptions) -> StreamId {
                backend.create_stream(device, &options)
            }
            /// Destroys a stream without waiting. Its work is still executed.
            Required backend destroy_stream "destroy_stream" (stream: StreamId) {
                backend.destroy_stream(stream)
            }
            /// Returns HW_COMPLETE if all work enqueued so far has been executed, else HW_PENDING. Does not wait.
            Required backend query_stream "query_stream" (stream: StreamId) -> Completion {
                backend.query_stream(stream)
            }
            /// Waits until all work enqueued so far has been executed.
            Required backend synchronize_stream "synchronize_stream" (stream: StreamId) {
                backend.synchronize_stream(stream)
            }
            /// Waits for every stream of the device.
            Required backend synchronize_device "synchronize_device" (device: u32) {
                backend.synchronize_device(device)
            }
            /// Makes the stream wait, on the device, for the event's latest record at the time of the call.
            Required backend stream_wait_event "stream_wait_event" (stream: StreamId, event: EventId) {
                backend.stream_wait_event(stream, event)
            }
            /// Creates an event. Timing and sharing at once return HW_ERROR_INVALID_ARGUMENT.
            Required backend create_event "create_event" (device: u32, options: EventOptions) -> EventId {
                backend.create_event(device, &options)
            }
            /// Destroys an event without waiting.
            Required backend destroy_event "destroy_event" (event: EventId) {
                backend.destroy_event(event)
            }
            /// Records the event at the stream's current point. Replaces an earlier record.
            Required backend record_event "record_event" (event: EventId, stream: StreamId) {
                backend.record_event(event, stream)
            }
            /// Returns HW_COMPLETE if the stream has reached the latest record or if there is none, else HW_PENDING.
            Required backend query_event "query_event" (event: EventId) -> Completion {
                backend.query_event(event)
            }
            /// Waits until the stream has reached the latest record.
            Required backend synchronize_event "synchronize_event" (event: EventId) {
                backend.synchronize_event(event)
            }
            /// Allocates device memory with unspecified contents, at a multiple of 256.
            Required backend allocate "allocate" (device: u32, options: AllocateOptions) -> DevicePtr {
                backend.allocate(device, &options)
            }
            /// Frees a block. Stream-ordered memory is freed in the order of `stream`. Other memory takes a `stream` of zeros.
            Required backend free "free" (device: u32, ptr: DevicePtr, stream: Option<StreamId>) {
                // SAFETY: the slot has the safety conditions of the trait's method, and the program meets them.
                unsafe { backend.free(device, ptr, stream) }
            }
            /// Enqueues a copy from or to device memory. The other side is device memory or page-locked host memory.
            Required backend copy "copy" (copy: MemoryCopy, stream: StreamId) {
                // SAFETY: as for `free`.
                unsafe { backend.copy(&copy, stream) }
            }
            /// Enqueues a fill of device memory.
            Required backend fill "fill" (fill: MemoryFill, stream: StreamId) {
                // SAFETY: as for `free`.
                unsafe { backend.fill(&fill, stream) }
            }

            /// Returns the nanoseconds between the records of two events with timing.
            Timing backend event_elapsed_ns "event_elapsed_ns" (start: EventId, end: EventId) -> u64 {
                backend.event_elapsed_ns(start, end)
            }

            /// Returns the vendor's handle of the stream as a number.
            Foreign backend raw_stream "raw_stream" (stream: StreamId) -> u64 {
                backend.raw_stream(stream)
            }
            /// Wraps a stream that other code made and owns. `destroy_stream` forgets it.
            Foreign backend stream_from_raw "stream_from_raw" (device: u32, raw: u64) -> StreamId {
                // SAFETY: as for `free`.
                unsafe { backend.stream_from_raw(device, raw) }
            }
            /// Returns the vendor's handle of the event as a number.
            Foreign backend raw_event "raw_event" (event: EventId) -> u64 {
                backend.raw_event(event)
            }
            /// Wraps an event that other code made and owns. `destroy_event` forgets it.
            Foreign backend event_from_raw "event_from_raw" (device: u32, raw: u64) -> EventId {
                // SAFETY: as for `free`.
                unsafe { backend.event_from_raw(device, raw) }
            }

            /// Allocates page-locked memory with unspecified contents, at a multiple of 64.
            Host backend host_allocate "allocate" (bytes: usize, options: HostOptions) -> HostPtr {
                backend.host().allocate(bytes, &options)
            }
            /// Frees page-locked memory.
            Host backend host_free "free" (ptr: HostPtr) {
                // SAFETY: as for `free`.
                unsafe { backend.host().free(ptr) }
            }
            /// Returns the address of page-locked memory on the device.
            Host backend host_device_address "device_address" (ptr: HostPtr, device: u32) -> DevicePtr {
                backend.host().device_address(ptr, device)
            }

            /// Page-locks memory that other code allocated.
            Register backend host_register "register" (ptr: HostPtr, bytes: usize, options: HostOptions) {
                // SAFETY: as for `free`.
                unsafe { backend.host().register(ptr, bytes, &options) }
            }
            /// Undoes `host_register`.
            Register backend host_unregister "unregister" (ptr: HostPtr) {
                // SAFETY: as for `free`.
                unsafe { backend.host().unregister(ptr) }
            }

            /// Creates a handle of a kind, HW_BLAS_KIND_... . One thread at a time uses it.
            Blas backend create_handle "create_blas_handle" (device: u32, kind: BlasOptions) -> HandlePtr {
                backend.create_handle(device, &kind)
            }
            /// Binds the stream of later products.
            Blas handle handle_set_stream "set_stream" (stream: StreamId) {
                handle.set_stream(stream)
            }
            /// Binds the memory for intermediate results, or the handle's own.
            Blas handle handle_set_workspace "set_workspace" (workspace: Option<Workspace>) {
                // SAFETY: as for `free`.
                unsafe { handle.set_workspace(workspace) }
            }
            /// Sets the precision of 32-bit products: HW_MATH_MODE_... .
            Blas handle handle_set_math_mode "set_math_mode" (mode: MathMode) {
                handle.set_math_mode(mode)
            }
            /// Sets the use of atomics in kernels: HW_ATOMICS_MODE_... .
            Blas handle handle_set_atomics_mode "set_atomics_mode" (mode: AtomicsMode) {
                handle.set_atomics_mode(mode)
            }
            /// Enqueues `C = alpha * op(A) * op(B) + beta * C` on the bound stream. The program has checked sizes, leading
            /// dimensions and strides: every element is inside the address space, and no two products of a batch share one.
            Blas handle handle_gemm "gemm" (gemm: Gemm) {
                // SAFETY: as for `free`.
                unsafe { handle.gemm(&gemm) }
            }
            /// Returns the vendor's handle as a number.
            Blas handle handle_raw "raw" () -> u64 {
                Ok(handle.raw())
            }
            /// Destroys the vendor's handle. Later calls except `handle_close` return HW_ERROR_INVALID_HANDLE.
            Blas handle handle_destroy "destroy" () {
                handle.destroy()
            }
            /// Closes the handle, and destroys the vendor's if it still exists. Called once, as the last call of the handle.
            Blas owned_handle handle_close "destroy" () {
                drop(owned_handle);
                Ok(())
            }

            /// Creates a plan, which belongs to the handle.
            Lt handle create_plan "create_plan" (options: PlanOptions) -> PlanId {
                handle.create_plan(&options)
            }
            /// Enqueues one run of a plan on the bound stream, with the bound workspace.
            Lt handle run_plan "run_plan" (plan: PlanId, arguments: PlanArguments) {
                // SAFETY: as for `free`.
                unsafe { handle.run_plan(plan, &arguments) }
            }
            /// Destroys a plan. Runs that were enqueued before are still executed.
            Lt handle destroy_plan "destroy_plan" (plan: PlanId) {
                handle.destroy_plan(plan)
            }

            /// Starts to record the work of the stream instead of executing it, in a mode HW_CAPTURE_... .
            Capture backend begin_capture "begin_capture" (stream: StreamId, mode: CaptureMode) {
                backend.begin_capture(stream, mode)
            }
            /// Ends the capture and returns the recorded graph.
            Capture backend end_capture "end_capture" (stream: StreamId) -> GraphId {
                // SAFETY: as for `free`.
                unsafe { backend.end_capture(stream) }
            }
            /// Returns 1 if the stream takes part in a capture, else 0.
            Capture backend is_capturing "is_capturing" (stream: StreamId) -> bool {
                backend.is_capturing(stream)
            }
            /// Makes an executable graph from a graph.
            Capture backend instantiate_graph "instantiate_graph" (graph: GraphId) -> GraphExecId {
                backend.instantiate_graph(graph)
            }
            /// Enqueues one execution of the graph.
            Capture backend launch_graph "launch_graph" (graph: GraphExecId, stream: StreamId) {
                // SAFETY: as for `free`.
                unsafe { backend.launch_graph(graph, stream) }
            }
            /// Destroys a graph. Executable graphs made from it stay alive.
            Capture backend destroy_graph "destroy_graph" (graph: GraphId) {
                backend.destroy_graph(graph)
            }
            /// Destroys an executable graph. A launch that was enqueued before is still executed.
            Capture backend destroy_graph_exec "destroy_graph_exec" (graph: GraphExecId) {
                backend.destroy_graph_exec(graph)
            }

            /// Returns a handle of a whole allocation, for a transport HW_TRANSPORT_... .
            Ipc backend export_memory "export_memory" (device: u32, ptr: DevicePtr, transport: Transport) -> MemoryHandle {
                // SAFETY: as for `free`.
                unsafe { backend.sharing()?.export_memory(device, ptr, transport) }
            }
            /// Maps memory of another process for the device.
            Ipc backend open_memory "open_memory" (device: u32, memory: MemoryHandle) -> DevicePtr {
                backend.sharing()?.open_memory(device, &memory)
            }
            /// Undoes one `open_memory`.
            Ipc backend close_memory "close_memory" (device: u32, ptr: DevicePtr) {
                // SAFETY: as for `free`.
                unsafe { backend.sharing()?.close_memory(device, ptr) }
            }
            /// Returns a handle of an event that was created with `interprocess`.
            Ipc backend export_event "export_event" (event: EventId) -> EventHandle {
                backend.sharing()?.export_event(event)
            }
            /// Opens an event of another process. `destroy_event` closes it.
            Ipc backend open_event "open_event" (device: u32, event: EventHandle) -> EventId {
                backend.sharing()?.open_event(device, &event)
            }
            /// Reports that the program has closed the descriptor that came with this `descriptor_token`.
            Ipc backend release_descriptor "release_descriptor" (token: u64) {
                let _ = backend;
                // SAFETY: the program passes each token once.
                unsafe { crate::marshalling::drop_descriptor(token) };
                Ok(())
            }

            /// Restores every vendor setting of the handle to its value on a fresh handle. Its plans stay. If this fails or is
            /// missing, core destroys handles that foreign code has used.
            Reset handle handle_reset "reset" () {
                handle.reset()
            }
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
    ($($(#[doc = $doc:literal])+ $group:ident $receiver:ident $name:ident $operation:literal
        ($($argument:ident: $type:ty),*) $(-> $answer:ty)? $body:block)+) => {
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
                method: trait_of(Group::$group, stringify!($receiver)).map(|of| (of, $operation)),
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

/// The trait of a method.
fn trait_of(group: Group, receiver: &str) -> Option<&'static str> {
    match (group, receiver) {
        (_, "owned_backend" | "owned_handle") => None,
        (_, "handle") => Some("BlasHandle"),
        (Group::Host | Group::Register, _) => Some("HostAllocator"),
        (Group::Ipc, _) => Some("IpcSharing"),
        _ => Some("Backend"),
    }
}

fn receiver_name(receiver: &'static str) -> &'static str {
    receiver.strip_prefix("owned_").unwrap_or(receiver)
}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let groups: Vec<&str> =
            Group::ALL.into_iter().filter(|group| matches!(self.group(*group), Ok(true))).map(Group::name).collect();
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

    /// Returns the size of the smallest valid table, which ends after the required operations.
    pub(super) fn least_bytes() -> usize {
        let required = slot_list().into_iter().filter(|slot| slot.group == Group::Required);
        required.map(|slot| slot.offset + size_of::<usize>()).max().unwrap_or(size_of::<Self>())
    }
}
