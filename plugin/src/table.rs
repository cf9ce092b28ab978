//! The table: one nullable function pointer for each operation, in groups. The list below is the only one: the table's layout,
//! the functions that the exporter fills it with, the calls that the importer makes, and the header come from it.
//!
//! Slots are only ever added at the end. A slot that a table lacks, because it is older or null, is an operation that the
//! plugin does not support; a group is there as a whole or not at all.

use super::cross::{Answer, Argument, HandlePtr};
use super::raw::{CType, RawBackend, RawError, RawHandle, text_of};
use highwater_hal::{
    AllocateOptions, AtomicsMode, BlasOptions, Capabilities, CaptureMode, Completion, DeviceInfo, DevicePtr,
    EventHandle, EventId, EventOptions, Gemm, GraphExecId, GraphId, HostOptions, HostPtr, Identity, LiveObjects,
    MathMode, MemoryCopy, MemoryFill, MemoryHandle, MemoryInfo, PlanArguments, PlanId, PlanOptions, Result, StreamId,
    StreamOptions, Transport, Workspace,
};

/// Versions of the table that this version of Highwater knows.
pub const TABLE_VERSIONS: std::ops::RangeInclusive<u32> = 1..=1;

/// Operations that a table has all of, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Group {
    /// What every backend has: identity, devices, streams, events, memory, copies and fills.
    Required,
    /// Elapsed time between events.
    Timing,
    /// Handles of streams and events for other code, and of other code.
    Foreign,
    /// Page-locked host memory.
    Host,
    /// Page-locking memory that somebody else allocated.
    Register,
    /// BLAS and Lt handles.
    Blas,
    /// Lt plans.
    Lt,
    /// Stream capture and replay.
    Capture,
    /// Memory and events of other processes.
    Ipc,
    /// Restoring a handle that foreign code had.
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

    /// Its name, as it stands in messages and in the header.
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

/// A slot of the table, as C sees it.
#[derive(Debug, Clone)]
pub(super) struct Slot {
    /// Its name.
    pub(super) name: &'static str,
    /// The group that it belongs to.
    pub(super) group: Group,
    /// What it does.
    pub(super) doc: String,
    /// The trait and the method behind it, whose clauses it has to keep. None for slots that give back what Rust drops.
    pub(super) method: Option<(&'static str, &'static str)>,
    /// The declarations of its arguments.
    pub(super) arguments: Vec<String>,
    /// Bytes from the beginning of the table.
    pub(super) offset: usize,
}

/// The list of operations: `GROUP RECEIVER NAME "OPERATION" (ARGUMENTS) -> ANSWER { WHAT THE PLUGIN DOES }`. `operation` is
/// the name of the trait's method, which errors name.
macro_rules! slots {
    ($callback:ident) => {
        $callback! {
            /// Gives the backend back; nothing of it is used any more. Called once, for the last time in its life, and never once
            /// the process exits.
            Required owned_backend close "close" () {
                drop(owned_backend);
                Ok(())
            }
            /// Who the backend is; the same every time.
            Required backend identity "identity" () -> Identity {
                Ok(backend.identity().clone())
            }
            /// Number of devices, at least 1; their ordinals count from 0. Does not change.
            Required backend device_count "device_count" () -> u32 {
                Ok(backend.device_count())
            }
            /// What the device is.
            Required backend device_info "device_info" (device: u32) -> DeviceInfo {
                backend.device_info(device)
            }
            /// What the device can do; the same every time. Asked once.
            Required backend capabilities "capabilities" (device: u32) -> Capabilities {
                backend.capabilities(device)
            }
            /// Free and total memory.
            Required backend memory_info "memory_info" (device: u32) -> MemoryInfo {
                backend.memory_info(device)
            }
            /// Objects that are alive, counted by the backend itself.
            Required backend live_objects "live_objects" () -> LiveObjects {
                Ok(backend.live_objects())
            }
            /// Whether the process has begun to exit, as far as the backend knows: 0 or 1. The program looks itself too.
            Required backend is_exiting "is_exiting" () -> bool {
                Ok(backend.is_exiting())
            }
            /// Makes a stream.
            Required backend create_stream "create_stream" (device: u32, options: StreamOptions) -> StreamId {
                backend.create_stream(device, &options)
            }
            /// Destroys a stream without waiting; what was enqueued is still executed.
            Required backend destroy_stream "destroy_stream" (stream: StreamId) {
                backend.destroy_stream(stream)
            }
            /// Whether everything enqueued so far has been executed: HW_COMPLETE or HW_PENDING. Does not wait.
            Required backend query_stream "query_stream" (stream: StreamId) -> Completion {
                backend.query_stream(stream)
            }
            /// Waits until everything enqueued so far has been executed.
            Required backend synchronize_stream "synchronize_stream" (stream: StreamId) {
                backend.synchronize_stream(stream)
            }
            /// Waits for every stream of the device.
            Required backend synchronize_device "synchronize_device" (device: u32) {
                backend.synchronize_device(device)
            }
            /// Makes the stream wait, on the device, for the latest record of the event at the time of the call.
            Required backend stream_wait_event "stream_wait_event" (stream: StreamId, event: EventId) {
                backend.stream_wait_event(stream, event)
            }
            /// Makes an event. Timing and sharing at once is HW_ERROR_INVALID_ARGUMENT.
            Required backend create_event "create_event" (device: u32, options: EventOptions) -> EventId {
                backend.create_event(device, &options)
            }
            /// Destroys an event without waiting.
            Required backend destroy_event "destroy_event" (event: EventId) {
                backend.destroy_event(event)
            }
            /// Marks the point that the stream has reached; replaces the event's earlier point.
            Required backend record_event "record_event" (event: EventId, stream: StreamId) {
                backend.record_event(event, stream)
            }
            /// Whether the latest record has been reached: HW_COMPLETE, also where there is none, or HW_PENDING.
            Required backend query_event "query_event" (event: EventId) -> Completion {
                backend.query_event(event)
            }
            /// Waits until the latest record has been reached.
            Required backend synchronize_event "synchronize_event" (event: EventId) {
                backend.synchronize_event(event)
            }
            /// Allocates device memory with unspecified contents, at a multiple of 256.
            Required backend allocate "allocate" (device: u32, options: AllocateOptions) -> DevicePtr {
                backend.allocate(device, &options)
            }
            /// Frees a block. `stream` is zeros, or the stream in whose order stream-ordered memory is freed.
            Required backend free "free" (device: u32, ptr: DevicePtr, stream: Option<StreamId>) {
                // SAFETY: the program keeps the conditions of the trait's method, which are those of the slot.
                unsafe { backend.free(device, ptr, stream) }
            }
            /// Enqueues a copy between device memory and device memory or page-locked host memory.
            Required backend copy "copy" (copy: MemoryCopy, stream: StreamId) {
                // SAFETY: as for `free`.
                unsafe { backend.copy(&copy, stream) }
            }
            /// Enqueues a fill of device memory.
            Required backend fill "fill" (fill: MemoryFill, stream: StreamId) {
                // SAFETY: as for `free`.
                unsafe { backend.fill(&fill, stream) }
            }

            /// Nanoseconds between the records of two events with timing.
            Timing backend event_elapsed_ns "event_elapsed_ns" (start: EventId, end: EventId) -> u64 {
                backend.event_elapsed_ns(start, end)
            }

            /// The vendor's handle of the stream, as a number.
            Foreign backend raw_stream "raw_stream" (stream: StreamId) -> u64 {
                backend.raw_stream(stream)
            }
            /// Wraps a stream that other code made and keeps; `destroy_stream` forgets it.
            Foreign backend stream_from_raw "stream_from_raw" (device: u32, raw: u64) -> StreamId {
                // SAFETY: as for `free`.
                unsafe { backend.stream_from_raw(device, raw) }
            }
            /// The vendor's handle of the event, as a number.
            Foreign backend raw_event "raw_event" (event: EventId) -> u64 {
                backend.raw_event(event)
            }
            /// Wraps an event that other code made and keeps; `destroy_event` forgets it.
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
            /// The address under which the device sees page-locked memory.
            Host backend host_device_address "device_address" (ptr: HostPtr, device: u32) -> DevicePtr {
                backend.host().device_address(ptr, device)
            }

            /// Page-locks memory that somebody else allocated.
            Register backend host_register "register" (ptr: HostPtr, bytes: usize, options: HostOptions) {
                // SAFETY: as for `free`.
                unsafe { backend.host().register(ptr, bytes, &options) }
            }
            /// Undoes `host_register`.
            Register backend host_unregister "unregister" (ptr: HostPtr) {
                // SAFETY: as for `free`.
                unsafe { backend.host().unregister(ptr) }
            }

            /// Makes a handle of a kind, HW_BLAS_KIND_..., for one thread at a time.
            Blas backend create_handle "create_blas_handle" (device: u32, kind: BlasOptions) -> HandlePtr {
                backend.create_handle(device, &kind)
            }
            /// Binds the stream that later products are enqueued on.
            Blas handle handle_set_stream "set_stream" (stream: StreamId) {
                handle.set_stream(stream)
            }
            /// Binds the memory for intermediate results, or the handle's own.
            Blas handle handle_set_workspace "set_workspace" (workspace: Option<Workspace>) {
                // SAFETY: as for `free`.
                unsafe { handle.set_workspace(workspace) }
            }
            /// Chooses the precision of 32-bit products: HW_MATH_MODE_... .
            Blas handle handle_set_math_mode "set_math_mode" (mode: MathMode) {
                handle.set_math_mode(mode)
            }
            /// Chooses whether kernels may add with atomics: HW_ATOMICS_MODE_... .
            Blas handle handle_set_atomics_mode "set_atomics_mode" (mode: AtomicsMode) {
                handle.set_atomics_mode(mode)
            }
            /// Enqueues `C = alpha * op(A) * op(B) + beta * C` on the bound stream. The program has checked sizes, leading
            /// dimensions and strides: every element lies in the address space, and no two products of a batch share one.
            Blas handle handle_gemm "gemm" (gemm: Gemm) {
                // SAFETY: as for `free`.
                unsafe { handle.gemm(&gemm) }
            }
            /// The vendor's handle, as a number.
            Blas handle handle_raw "raw" () -> u64 {
                Ok(handle.raw())
            }
            /// Destroys the vendor's handle; later calls, but `handle_close`, are HW_ERROR_INVALID_HANDLE.
            Blas handle handle_destroy "destroy" () {
                handle.destroy()
            }
            /// Gives the handle back, and destroys the vendor's if that is still there. Called once, for the last time in its life.
            Blas owned_handle handle_close "destroy" () {
                drop(owned_handle);
                Ok(())
            }

            /// Makes a plan, which belongs to the handle.
            Lt handle create_plan "create_plan" (options: PlanOptions) -> PlanId {
                handle.create_plan(&options)
            }
            /// Enqueues one run of a plan on the bound stream, through the bound workspace.
            Lt handle run_plan "run_plan" (plan: PlanId, arguments: PlanArguments) {
                // SAFETY: as for `free`.
                unsafe { handle.run_plan(plan, &arguments) }
            }
            /// Destroys a plan; runs already enqueued are still executed.
            Lt handle destroy_plan "destroy_plan" (plan: PlanId) {
                handle.destroy_plan(plan)
            }

            /// Starts to record what is enqueued on the stream instead of executing it, in a mode HW_CAPTURE_... .
            Capture backend begin_capture "begin_capture" (stream: StreamId, mode: CaptureMode) {
                backend.begin_capture(stream, mode)
            }
            /// Ends the capture and gives what it recorded.
            Capture backend end_capture "end_capture" (stream: StreamId) -> GraphId {
                // SAFETY: as for `free`.
                unsafe { backend.end_capture(stream) }
            }
            /// Whether the stream takes part in a capture: 0 or 1.
            Capture backend is_capturing "is_capturing" (stream: StreamId) -> bool {
                backend.is_capturing(stream)
            }
            /// Makes a graph executable.
            Capture backend instantiate_graph "instantiate_graph" (graph: GraphId) -> GraphExecId {
                backend.instantiate_graph(graph)
            }
            /// Enqueues one execution of the graph.
            Capture backend launch_graph "launch_graph" (graph: GraphExecId, stream: StreamId) {
                // SAFETY: as for `free`.
                unsafe { backend.launch_graph(graph, stream) }
            }
            /// Destroys a graph; graphs made executable from it live on.
            Capture backend destroy_graph "destroy_graph" (graph: GraphId) {
                backend.destroy_graph(graph)
            }
            /// Destroys an executable graph; a launch already enqueued is still executed.
            Capture backend destroy_graph_exec "destroy_graph_exec" (graph: GraphExecId) {
                backend.destroy_graph_exec(graph)
            }

            /// Makes a handle of a whole allocation, by a transport HW_TRANSPORT_... .
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
            /// Makes a handle of an event that was made with `interprocess`.
            Ipc backend export_event "export_event" (event: EventId) -> EventHandle {
                backend.sharing()?.export_event(event)
            }
            /// Opens an event of another process; `destroy_event` closes it.
            Ipc backend open_event "open_event" (device: u32, event: EventHandle) -> EventId {
                backend.sharing()?.open_event(device, &event)
            }
            /// The program has closed the descriptor that came with this `descriptor_token`.
            Ipc backend release_descriptor "release_descriptor" (token: u64) {
                let _ = backend;
                // SAFETY: the program gives each token back once.
                unsafe { crate::cross::drop_descriptor(token) };
                Ok(())
            }

            /// Puts every setting that the vendor has on a handle back to that of a fresh one; its plans stay. If this fails or is
            /// missing, core destroys handles that foreign code had.
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
        /// The operations of a backend, for one version of the table. See the module for how it is read.
        #[derive(Clone, Copy)]
        #[repr(C)]
        pub struct Table {
            /// Bytes of this struct.
            pub size: u64,
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

            /// Which operations it has, in the order of the list.
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
    /// Whether the table has the group.
    ///
    /// # Errors
    /// A slot that is missing, where others of the group are there.
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

    /// Bytes up to the end of the required operations, below which no table can be.
    pub(super) fn least_bytes() -> usize {
        let required = slot_list().into_iter().filter(|slot| slot.group == Group::Required);
        required.map(|slot| slot.offset + size_of::<usize>()).max().unwrap_or(size_of::<Self>())
    }
}
