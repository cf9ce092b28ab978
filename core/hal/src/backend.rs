//! The trait [`Backend`]: one vendor's devices, streams, events, memory and copies.

use std::fmt;
use std::sync::Arc;

use crate::blas::{BlasHandle, BlasOptions};
use crate::capability::Capabilities;
use crate::error::{Error, Result};
use crate::host::{HostAllocator, HostObserver};
use crate::id::{BackendTag, EventId, GraphExecId, GraphId, PhysicalMemoryId, StreamId};
use crate::ipc::IpcSharing;
use crate::memory::{
    AllocateOptions, DevicePtr, MemoryCopy, MemoryCopy2d, MemoryFill, MemoryInfo, MemoryRange, PhysicalMemoryOptions,
};

/// The name, versions and tag of a backend.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Identity {
    /// The name that opens it: `cuda`, `rocm`, `mock`, or a plugin's own.
    pub name: String,
    /// The product that it drives, for people: `NVIDIA CUDA`.
    pub description: String,
    /// True if it drives real hardware.
    pub real_device: bool,
    /// Versions of the backend and of each vendor library, as `(what, version)`.
    pub versions: Vec<(String, String)>,
    /// The tag in every id that it issues.
    pub tag: BackendTag,
    /// Environment variables that size the BLAS workspace as `:KiB:COUNT` pairs. The first one that is set counts.
    pub blas_workspace_variables: &'static [&'static str],
    /// Environment variables that size the Lt workspace in KiB. The first one that is set counts.
    pub lt_workspace_variables: &'static [&'static str],
}

impl Identity {
    /// Returns the identity of a real device, without versions and variables.
    #[must_use]
    pub fn new(name: impl Into<String>, description: impl Into<String>, tag: BackendTag) -> Self {
        Self {
            name: name.into(),
            description: description.into(),
            real_device: true,
            versions: Vec::new(),
            tag,
            blas_workspace_variables: &[],
            lt_workspace_variables: &[],
        }
    }
}

/// A description of one device.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Ordinal within this process; another process may count differently.
    pub ordinal: u32,
    /// The vendor's name of the device.
    pub name: String,
    /// The id that names the device in every process.
    pub uuid: [u8; 16],
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// PCI address as `domain:bus:device.function`. Core treats devices with equal addresses and UUIDs as one device,
    /// on which runtimes respect each other's captures. `None` for a device that only this backend has.
    pub pci_address: Option<String>,
    /// NUMA node that the device is attached to; `None` if unknown.
    pub numa_node: Option<u32>,
    /// The vendor's architecture: `sm_90`, `gfx942`, `mock`.
    pub architecture: String,
}

/// Writes the UUID in hexadecimal.
#[cfg(feature = "serde")]
impl serde::Serialize for DeviceInfo {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        use serde::ser::SerializeStruct as _;
        let Self { ordinal, name, uuid, memory_bytes, pci_address, numa_node, architecture } = self;
        let uuid: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        let mut fields = serializer.serialize_struct("DeviceInfo", 7)?;
        fields.serialize_field("ordinal", ordinal)?;
        fields.serialize_field("name", name)?;
        fields.serialize_field("uuid", &uuid)?;
        fields.serialize_field("memory_bytes", memory_bytes)?;
        fields.serialize_field("pci_address", pci_address)?;
        fields.serialize_field("numa_node", numa_node)?;
        fields.serialize_field("architecture", architecture)?;
        fields.end()
    }
}

/// Writes the UUID in hexadecimal.
impl std::fmt::Debug for DeviceInfo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { ordinal, name, uuid, memory_bytes, pci_address, numa_node, architecture } = self;
        let uuid: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        f.debug_struct("DeviceInfo")
            .field("ordinal", ordinal)
            .field("name", name)
            .field("uuid", &format_args!("{uuid}"))
            .field("memory_bytes", memory_bytes)
            .field("pci_address", pci_address)
            .field("numa_node", numa_node)
            .field("architecture", architecture)
            .finish()
    }
}

impl DeviceInfo {
    /// Returns a device without PCI address and NUMA node.
    #[must_use]
    pub fn new(ordinal: u32, name: impl Into<String>, uuid: [u8; 16], memory_bytes: u64) -> Self {
        Self {
            ordinal,
            name: name.into(),
            uuid,
            memory_bytes,
            pci_address: None,
            numa_node: None,
            architecture: String::new(),
        }
    }
}

/// Options of a stream. No stream synchronizes with the legacy default stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct StreamOptions {
    /// The priority of its work over that of other streams.
    pub priority: StreamPriority,
}

impl StreamOptions {
    /// Returns options of normal priority.
    #[must_use]
    pub const fn new() -> Self {
        Self { priority: StreamPriority::Normal }
    }

    /// Sets the priority.
    #[must_use]
    pub const fn with_priority(mut self, priority: StreamPriority) -> Self {
        self.priority = priority;
        self
    }
}

/// Priority of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StreamPriority {
    /// Below every other stream.
    Low,
    /// The vendor's default.
    #[default]
    Normal,
    /// Above every other stream.
    High,
}

/// Options of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct EventOptions {
    /// Allows [`Backend::event_elapsed_ns`]. Each record then takes longer.
    pub timing: bool,
    /// Lets another process open the event. Excludes `timing`.
    pub interprocess: bool,
}

impl EventOptions {
    /// Returns options of an event without timing, for this process only.
    #[must_use]
    pub const fn new() -> Self {
        Self { timing: false, interprocess: false }
    }

    /// Adds timing.
    #[must_use]
    pub const fn with_timing(mut self) -> Self {
        self.timing = true;
        self
    }

    /// Lets other processes open the event.
    #[must_use]
    pub const fn with_interprocess(mut self) -> Self {
        self.interprocess = true;
        self
    }
}

/// The progress of enqueued work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completion {
    /// All work up to the queried point has been executed.
    Complete,
    /// Some work is still outstanding.
    Pending,
}

impl Completion {
    /// Returns true if all work has been executed.
    #[must_use]
    pub const fn is_complete(self) -> bool {
        matches!(self, Self::Complete)
    }
}

/// The calls that a capture forbids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum CaptureMode {
    /// A forbidden call of any thread loses the capture.
    Global,
    /// A forbidden call of the capturing thread loses the capture.
    #[default]
    ThreadLocal,
    /// No call is forbidden.
    Relaxed,
}

/// Counts of the objects of a backend that are alive. All are zero once everything was destroyed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct LiveObjects {
    /// Streams that `create_stream` made.
    pub streams: u64,
    /// Events that `create_event` made or `open_event` opened.
    pub events: u64,
    /// BLAS and Lt handles.
    pub handles: u64,
    /// Blocks of device memory.
    pub allocations: u64,
    /// Blocks of page-locked host memory, allocated or registered.
    pub host_allocations: u64,
    /// Graphs and executable graphs.
    pub graphs: u64,
    /// Mappings of other processes' memory.
    pub mappings: u64,
    /// File descriptors that sharing made.
    pub descriptors: u64,
    /// Shared files that sharing made.
    pub shared_files: u64,
    /// Ranges of addresses that `reserve_addresses` returned.
    pub reservations: u64,
    /// Physical memory that `create_memory` made, until `destroy_memory`.
    pub physical_memory: u64,
}

impl LiveObjects {
    /// Returns the sum of all counts.
    #[must_use]
    pub const fn total(self) -> u64 {
        self.streams
            + self.events
            + self.handles
            + self.allocations
            + self.host_allocations
            + self.graphs
            + self.mappings
            + self.descriptors
            + self.shared_files
            + self.reservations
            + self.physical_memory
    }
}

impl std::fmt::Display for LiveObjects {
    /// Formats as `2 streams, 1 block of device memory`, or as `nothing` if every count is 0.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let counts = [
            (self.streams, "stream", "streams"),
            (self.events, "event", "events"),
            (self.handles, "handle", "handles"),
            (self.allocations, "block of device memory", "blocks of device memory"),
            (self.host_allocations, "block of host memory", "blocks of host memory"),
            (self.graphs, "graph", "graphs"),
            (self.mappings, "mapping of another process's memory", "mappings of other processes' memory"),
            (self.descriptors, "descriptor", "descriptors"),
            (self.shared_files, "shared file", "shared files"),
            (self.reservations, "range of reserved addresses", "ranges of reserved addresses"),
            (self.physical_memory, "physical memory object", "physical memory objects"),
        ];
        let mut before = "";
        for (count, one, many) in counts.into_iter().filter(|(count, ..)| *count > 0) {
            write!(f, "{before}{count} {}", if count == 1 { one } else { many })?;
            before = ", ";
        }
        if before.is_empty() { f.write_str("nothing") } else { Ok(()) }
    }
}

/// One vendor's devices: streams, events, memory, copies and captures.
///
/// The [crate documentation](crate) describes the design: validation, ids, life cycle, threads, fork and exit.
///
/// A backend is `Send + Sync` and is used through `Arc<dyn Backend>`. Any thread may call any method, without a current
/// device or context. The backend sets the context that it needs and restores the caller's.
///
/// # Clauses of every method
/// - `backend.ids-checked`: a stale, foreign or forged id returns `InvalidHandle` and has no effect.
/// - `backend.device-checked`: an ordinal of `device_count` or above returns `InvalidArgument`, also in a copy or a fill of
///   nothing.
/// - `backend.lacking`: a call that a capability denies returns `Unsupported` and has no effect.
/// - `backend.errors`: an error has a message, and names the method that returned it. Methods of the host allocator have the prefix
///   `host_`. A `copy_2d` that copies each row alone may name `copy`.
/// - `backend.concurrent`: calls from several threads at once do not disturb each other.
/// - `backend.live-objects`: each object counts in `live_objects` from its creation to its destruction.
/// - `backend.destroy-concurrent`: any thread can destroy a stream, an event, a graph or an executable graph, also during a
///   call of another thread that uses it. That call ends as if the object was alive. Later calls return `InvalidHandle`.
/// - `backend.forked`: in a child forked after the backend was opened, calls return `Forked` at once, whatever their arguments. A
///   method whose capability is false, or that the kind of a handle lacks, may return `Unsupported` instead.
/// - `backend.exiting`: once the process has begun to exit, `is_exiting` returns true, and each call that can fail returns
///   `ShuttingDown`. Before that, `is_exiting` returns false.
///
/// # Objects in use
/// Any thread can destroy these objects while work that uses them is outstanding: streams, events, graphs, executable
/// graphs, physical memory, and the ids of foreign objects. Their clauses state what becomes of the work. A BLAS handle and
/// its plans belong to one thread at a time. That thread can destroy them while their products are outstanding.
///
/// The caller must keep all other things until the work that uses them is complete: device memory, mappings, page-locked
/// memory, registrations, and workspaces. So no work that uses memory is outstanding when the last reference to a backend is
/// dropped. Other outstanding work, such as a wait or a record, may then be executed or not. The caller must keep memory that it
/// exported by a transport other than descriptors until no other process has it open. Otherwise, a later allocation may get the
/// bytes. A foreign object must outlive its id, so the destruction of the id waits until no call of another thread uses it. The
/// caller must end a capture before it destroys a stream that takes part. The outcome of the capture is otherwise not promised.
///
/// # Safety
/// Core trusts a backend's answers when it frees and reuses memory, and when it lets safe code touch page-locked memory.
/// The implementation must therefore keep these clauses for every sequence of calls: `event.query`, `event.synchronize`,
/// `event.record-moves`, `event.wait-orders`, `stream.query`, `stream.synchronize`, `devices.synchronize`,
/// `stream.order`, `copy.exact`, and the clauses that its [`HostAllocator`] must keep.
#[cfg_attr(feature = "mockall", mockall::automock)]
pub unsafe trait Backend: Send + Sync + fmt::Debug {
    // ------------------------------------------------------------------ identity

    /// Returns the name, versions and tag.
    ///
    /// - `identity.stable`: every call returns the same value.
    /// - `identity.tagged`: every id that the backend issues carries `identity().tag`.
    fn identity(&self) -> &Identity;

    /// Returns the number of devices, which never changes. Their ordinals count from 0.
    ///
    /// - `devices.some`: the number is at least 1 (a backend without a device does not open).
    fn device_count(&self) -> u32;

    /// Returns the description of a device.
    ///
    /// - `devices.uuid`: the UUID is stable over the life of the machine, and no two devices share one.
    fn device_info(&self, device: u32) -> Result<DeviceInfo>;

    /// Returns the abilities and facts of a device.
    ///
    /// - `devices.capabilities-stable`: every call returns the same value.
    fn capabilities(&self, device: u32) -> Result<Capabilities>;

    /// Returns the free and the total memory.
    ///
    /// - `memory.info`: `free <= total`, and `total` is `device_info().memory_bytes`.
    /// - `memory.info-counts`: `free` is at most `total` less the bytes of all live blocks of `allocate` and all live physical
    ///   memory.
    /// - `memory.info-returns`: a block of 64 MiB or more that is not stream-ordered, and physical memory of that size, is
    ///   free when the call that gives it back returns, unless another user of the device takes it.
    ///
    /// Nothing more is promised. Vendors take memory in larger units than requested, and may keep small blocks and
    /// stream-ordered memory after a free. Other programs change `free` at any time. An allocation of `free` bytes may fail,
    /// because free memory need not be contiguous. An allocation of more may succeed, because a vendor may have kept memory.
    fn memory_info(&self, device: u32) -> Result<MemoryInfo>;

    /// Returns the number of live objects of each kind, by the backend's own count. Objects that the exit policy leaks on
    /// purpose do not count.
    fn live_objects(&self) -> LiveObjects;

    /// Returns true once the process has begun to exit. From then on no call reaches the driver, and handles are leaked on
    /// purpose.
    ///
    /// A handler sets the flag. The backend registers it right after the vendor's initialization, so that it runs before the
    /// vendor's own.
    ///
    /// Core checks the flag before its calls, but not before each product. The check may come too late in any case, so each
    /// method of the backend checks it too and returns `ShuttingDown`.
    fn is_exiting(&self) -> bool;

    // ------------------------------------------------------------------ streams

    /// Creates a stream.
    ///
    /// - `stream.order`: the work of one stream is executed in the order of the calls that enqueued it.
    /// - `stream.asynchronous`: a call that enqueues work returns without waiting for earlier work. It may wait while 1,000
    ///   operations or more of its stream are outstanding, because queues of vendors are full then.
    /// - `stream.enqueues`: a call that enqueues work leaves its execution to the device, also on an idle stream. If the work takes
    ///   long, the call returns while the work is outstanding.
    /// - `stream.independent`: work of one stream waits for work of another stream of the device only through
    ///   `stream_wait_event`, while at most 8 streams of the device have outstanding work. Beyond that, streams may share a
    ///   queue of the device, and work waits for earlier work in its queue. The two default streams of a device may wait for
    ///   each other. A copy between host and device may wait for earlier copies of its direction, because they may share an engine.
    ///
    /// The device may complete short work before the call returns. The first call of a kind may load code of the vendor, which
    /// takes long and may wait for the device.
    fn create_stream(&self, device: u32, options: &StreamOptions) -> Result<StreamId>;

    /// Destroys a stream. Does not wait for its work, unless the vendor's call does (ROCm).
    ///
    /// - `stream.destroy-pending`: work that was enqueued before is still executed.
    /// - `event.outlives-stream`: queries, waits and records of an event that was recorded on the stream work as before.
    /// - `stream.destroy-stale`: the id is stale afterwards, also for a second `destroy_stream`.
    fn destroy_stream(&self, stream: StreamId) -> Result<()>;

    /// Returns whether all work enqueued so far has been executed. Does not wait.
    ///
    /// - `stream.query`: `Pending` while work is outstanding, `Complete` after it. A wait for an event is outstanding work until the
    ///   event is reached.
    fn query_stream(&self, stream: StreamId) -> Result<Completion>;

    /// Waits until all work enqueued so far has been executed.
    ///
    /// - `stream.synchronize`: on return, the effects of that work are visible to the CPU.
    /// - `stream.synchronize-ends`: the call returns once that work is done, also while another thread goes on enqueueing.
    fn synchronize_stream(&self, stream: StreamId) -> Result<()>;

    /// Waits until all work enqueued so far on any stream of the device has been executed.
    ///
    /// - `devices.synchronize`: on return, that work has been executed.
    /// - `devices.synchronize-ends`: the call returns once that work is done, also while other threads go on enqueueing.
    fn synchronize_device(&self, device: u32) -> Result<()>;

    /// Makes the stream wait, on the device, for the event's latest record at the time of the call.
    ///
    /// - `event.wait-orders`: work enqueued after the wait runs after the work before the record, also across devices.
    /// - `event.wait-snapshot`: the stream does not wait for a record made after the call, also if the event is recorded again
    ///   before the stream gets to the wait.
    /// - `event.never-recorded`: a wait for an event that was never recorded succeeds and has no effect.
    fn stream_wait_event(&self, stream: StreamId, event: EventId) -> Result<()>;

    /// Returns the vendor's handle of the stream as a number. Needs `foreign_objects`.
    fn raw_stream(&self, stream: StreamId) -> Result<u64> {
        let _ = stream;
        Err(Error::lacks("raw_stream", "foreign_objects"))
    }

    /// Wraps a stream that other code made and owns. `destroy_stream` forgets it without destroying it. Each call returns an id
    /// of its own, also for a stream that has one. The id does not count in `live_objects`.
    ///
    /// - `stream.foreign-kept`: when the id is destroyed, the stream, its outstanding work and its other ids stay as they are.
    ///
    /// # Safety
    /// The caller must pass a live stream of `device`, and must keep it alive until `destroy_stream` has taken the id.
    unsafe fn stream_from_raw(&self, device: u32, raw: u64) -> Result<StreamId> {
        let _ = (device, raw);
        Err(Error::lacks("stream_from_raw", "foreign_objects"))
    }

    // ------------------------------------------------------------------ events

    /// Creates an event. Timing needs `event_timing`, and `interprocess` needs `interprocess_events`. Both at once return
    /// `InvalidArgument`.
    fn create_event(&self, device: u32, options: &EventOptions) -> Result<EventId>;

    /// Destroys an event without waiting for its record. The caller must keep an exported event until no other process waits
    /// for it.
    ///
    /// - `event.destroy-pending`: a record or a wait that was enqueued before keeps its effect, also in a capture.
    /// - `event.destroy-stale`: the id is stale afterwards.
    fn destroy_event(&self, event: EventId) -> Result<()>;

    /// Records the event at the stream's current point in the order of calls.
    ///
    /// - `event.record-moves`: after a further record, queries and waits refer to it alone. Waits that were enqueued before keep
    ///   the earlier record. An event for other processes may be pending until the earlier record is reached too.
    /// - `event.record-device`: a stream of another device than the event's returns `WrongDevice`.
    fn record_event(&self, event: EventId, stream: StreamId) -> Result<()>;

    /// Returns whether the stream has reached the latest record. Does not wait.
    ///
    /// - `event.query`: `Pending` until the stream has passed the record, then `Complete`.
    /// - `event.query-never-recorded`: `Complete` for an event that was never recorded.
    fn query_event(&self, event: EventId) -> Result<Completion>;

    /// Waits until the stream has reached the latest record.
    ///
    /// - `event.synchronize`: on return, the effects of the work before the record are visible to the CPU.
    fn synchronize_event(&self, event: EventId) -> Result<()>;

    /// Returns the nanoseconds between the records of two events with timing.
    ///
    /// - `event.elapsed`: the result is at least the time that the device spent between the records, up to the vendor's rounding.
    ///   The order of the calls does not matter.
    /// - `event.elapsed-order`: if the device reached the record of `end` first, the result is 0.
    /// - `event.elapsed-invalid`: an event without timing or without a record returns `InvalidArgument`; a record that is not
    ///   reached yet returns `InvalidState`.
    fn event_elapsed_ns(&self, start: EventId, end: EventId) -> Result<u64> {
        let _ = (start, end);
        Err(Error::lacks("event_elapsed_ns", "event_timing"))
    }

    /// Returns the vendor's handle of the event as a number. Needs `foreign_objects`.
    fn raw_event(&self, event: EventId) -> Result<u64> {
        let _ = event;
        Err(Error::lacks("raw_event", "foreign_objects"))
    }

    /// Wraps an event that other code made and owns. `destroy_event` forgets it without destroying it. Each call returns an id
    /// of its own, also for an event that has one. The id does not count in `live_objects`.
    ///
    /// - `event.foreign-kept`: when the id is destroyed, the event, its record, the waits for it and its other ids stay as they
    ///   are.
    ///
    /// # Safety
    /// The caller must pass a live event of `device`, and must keep it alive until `destroy_event` has taken the id.
    unsafe fn event_from_raw(&self, device: u32, raw: u64) -> Result<EventId> {
        let _ = (device, raw);
        Err(Error::lacks("event_from_raw", "foreign_objects"))
    }

    // ------------------------------------------------------------------ device memory

    /// Allocates device memory with unspecified contents.
    ///
    /// - `memory.aligned`: the address is a multiple of 256.
    /// - `memory.disjoint`: blocks that are alive do not overlap.
    /// - `memory.zero`: 0 bytes return `InvalidArgument`.
    /// - `memory.exhausted`: a request for more than is available returns `OutOfMemory` and changes nothing.
    /// - `memory.stream-ordered`: work enqueued on a block's stream after the allocation has exclusive use of the bytes, and
    ///   so has work that waits for an event recorded there after it.
    ///
    /// The contract promises nothing more for stream-ordered memory. Its bytes may belong to a block that was freed in
    /// the order of the same stream, with work still outstanding. Work of another stream races with that work unless an
    /// event orders it after the allocation. Core orders the first use on each other stream. Every other caller must
    /// record an event after the allocation and make the other stream wait for it.
    fn allocate(&self, device: u32, options: &AllocateOptions) -> Result<DevicePtr>;

    /// Frees a block. Stream-ordered memory is freed in the order of `stream`. Other memory takes `None`.
    ///
    /// - `memory.free-returns`: freed bytes can be allocated again; stream-ordered bytes, once the stream has passed the free.
    ///
    /// # Safety
    /// - The caller must pass a block that `allocate` returned for this device and that has not been freed.
    /// - The caller must ensure that no work that uses the block is outstanding, unless it precedes the free on `stream`.
    /// - The caller must ensure that no other process has the block open, unless descriptors are the only transport by which the
    ///   block was exported (`ipc.free-keeps`).
    unsafe fn free(&self, device: u32, ptr: DevicePtr, stream: Option<StreamId>) -> Result<()>;

    /// Describes the device memory at an address, which any code of this process may have allocated. Needs `foreign_memory`.
    /// Changes nothing, and waits for nothing.
    ///
    /// - `foreign.range`: the range is the whole block that contains the address, or the one mapping of physical memory that
    ///   contains it. Every address in a range gives the same range.
    /// - `foreign.kind`: memory of `map_memory` is `Mapped`, a stream-ordered block is `StreamOrdered`, and a plain block is
    ///   `Plain`.
    /// - `foreign.transports`: memory that was made shareable by a transport lists it. `export_memory` exports the start of the
    ///   range by each transport that it lists, unless the memory itself came from another process.
    /// - `foreign.unknown`: null, and an address in no memory of a device, return `InvalidPointer`. An address in memory of
    ///   another device returns `WrongDevice`.
    fn describe_memory(&self, device: u32, ptr: DevicePtr) -> Result<MemoryRange> {
        let _ = (device, ptr);
        Err(Error::lacks("describe_memory", "foreign_memory"))
    }

    // ------------------------------------------------------------------ mapped memory

    /// Reserves addresses of a device, at which physical memory can be mapped. Needs `mapped_memory`, as do the calls below.
    ///
    /// Mapped memory has three parts: addresses, physical memory, and the access that devices have. A caller reserves
    /// addresses, creates memory, maps it, and sets access. Work then uses the bytes like a block of `allocate`. For the
    /// safety conditions of all methods, memory that is mapped without a gap and that the device may access is one block.
    ///
    /// - `mapped.reserve`: the address is a multiple of `mapped_memory_granularity`, and the range overlaps neither a live
    ///   block nor another range.
    /// - `mapped.sizes`: 0 bytes, and bytes that are no multiple of `mapped_memory_granularity`, return `InvalidArgument`,
    ///   also from `create_memory`.
    fn reserve_addresses(&self, device: u32, bytes: usize) -> Result<DevicePtr> {
        let _ = (device, bytes);
        Err(Error::lacks("reserve_addresses", "mapped_memory"))
    }

    /// Gives a range of `reserve_addresses` back.
    ///
    /// - `mapped.free-checked`: a range that is not reserved with this start and these bytes, or in which memory is mapped,
    ///   returns `InvalidPointer`, and nothing changes.
    ///
    /// # Safety
    /// The caller must own the range, and must not pass it to another call meanwhile.
    unsafe fn free_addresses(&self, device: u32, ptr: DevicePtr, bytes: usize) -> Result<()> {
        let _ = (device, ptr, bytes);
        Err(Error::lacks("free_addresses", "mapped_memory"))
    }

    /// Creates physical memory of a device. It has no address until it is mapped.
    ///
    /// - `mapped.exhausted`: a request for more than is available returns `OutOfMemory` and changes nothing.
    /// - `mapped.shared`: for memory with a transport in `shareable`, `export_memory` takes the address at which the memory
    ///   is mapped, and returns a handle of all of it.
    /// - `mapped.transports`: a transport outside `ipc_transports`, and `Transport::Legacy`, return `Unsupported`.
    fn create_memory(&self, device: u32, options: &PhysicalMemoryOptions) -> Result<PhysicalMemoryId> {
        let _ = (device, options);
        Err(Error::lacks("create_memory", "mapped_memory"))
    }

    /// Destroys physical memory. The id is stale afterwards.
    ///
    /// - `mapped.destroy`: memory that is mapped stays accessible until it is unmapped, also to outstanding work, and to devices
    ///   that get access later.
    /// - `mapped.returns`: bytes that are destroyed and not mapped can be allocated again.
    fn destroy_memory(&self, memory: PhysicalMemoryId) -> Result<()> {
        let _ = memory;
        Err(Error::lacks("destroy_memory", "mapped_memory"))
    }

    /// Maps all of the memory at `ptr`, inside a range of `reserve_addresses`. No device may access it before
    /// `set_memory_access`.
    ///
    /// - `mapped.contiguous`: one copy, fill or product can use several mappings that have no gap between them.
    /// - `mapped.move`: memory that is unmapped and mapped at another address keeps its bytes.
    /// - `mapped.map-checked`: an address that is no multiple of `mapped_memory_granularity` returns `InvalidArgument`. Bytes
    ///   that leave the range, and those in which memory is mapped, return `InvalidPointer`. Memory of another device
    ///   returns `WrongDevice`. Nothing changes.
    /// - `mapped.capture`: if `create_during_capture` holds, the calls of mapped memory neither fail nor disturb a capture, from
    ///   any thread and in any mode.
    ///
    /// # Safety
    /// The caller must own the range at `ptr`, must not pass it to another call meanwhile, and must not destroy the memory
    /// meanwhile.
    unsafe fn map_memory(&self, device: u32, ptr: DevicePtr, memory: PhysicalMemoryId) -> Result<()> {
        let _ = (device, ptr, memory);
        Err(Error::lacks("map_memory", "mapped_memory"))
    }

    /// Lets the device `accessing` read and write memory that is mapped for `device`. Another device than `device` needs
    /// `peer_copy`.
    ///
    /// - `mapped.peer`: work of each device that has access uses the same bytes at the same addresses.
    /// - `mapped.whole`: a range that does not consist of whole mappings returns `InvalidPointer`, and nothing changes; also
    ///   from `unmap_memory`.
    ///
    /// # Safety
    /// The caller must own the range, and must not pass it to another call meanwhile.
    unsafe fn set_memory_access(&self, device: u32, ptr: DevicePtr, bytes: usize, accessing: u32) -> Result<()> {
        let _ = (device, ptr, bytes, accessing);
        Err(Error::lacks("set_memory_access", "mapped_memory"))
    }

    /// Unmaps one or more whole mappings, for every device. The addresses stay reserved.
    ///
    /// # Safety
    /// The caller must own the range, and must ensure that no work that uses it is outstanding.
    unsafe fn unmap_memory(&self, device: u32, ptr: DevicePtr, bytes: usize) -> Result<()> {
        let _ = (device, ptr, bytes);
        Err(Error::lacks("unmap_memory", "mapped_memory"))
    }

    // ------------------------------------------------------------------ copies and fills

    /// Enqueues a copy from or to device memory. The other side is device memory, of the same device or another, or
    /// page-locked host memory.
    ///
    /// - `copy.exact`: exactly `bytes` bytes arrive, unchanged; bytes beside the destination keep their value.
    /// - `copy.ordered`: the copy runs in the order of the stream.
    /// - `copy.zero`: a copy of 0 bytes succeeds and copies nothing. Its addresses need not lie in a block, and may be null.
    ///
    /// # Safety
    /// The caller must ensure that:
    /// - each range of at least a byte lies inside one block: device memory of the named device, memory that is mapped without a
    ///   gap and that the device may access, one page-locked host block, or one registration;
    /// - the ranges do not overlap, and both blocks stay allocated until the copy has completed;
    /// - until then, the source is not written, and a host destination is neither read nor written.
    unsafe fn copy(&self, copy: &MemoryCopy, stream: StreamId) -> Result<()>;

    /// Enqueues a copy of rows, whose beginnings have equal distances on each side. The sides are those of
    /// [`copy`](Backend::copy). The default enqueues a copy for each row.
    ///
    /// - `copy-2d.exact`: exactly `width` bytes of each row arrive, unchanged; bytes between the rows and beside them keep their
    ///   value on both sides.
    /// - `copy-2d.ordered`: the copy runs in the order of the stream.
    /// - `copy-2d.zero`: a copy of 0 rows, or of rows of 0 bytes, succeeds and copies nothing.
    /// - `copy-2d.pitch`: a pitch less than the width returns `InvalidArgument`, and nothing is enqueued. A pitch has no largest
    ///   value.
    ///
    /// # Safety
    /// The caller must ensure that:
    /// - the bytes from the first row to the end of the last lie, on each side, inside one block, as for `copy`;
    /// - no row of one side overlaps a row of the other, and both blocks stay allocated until the copy has completed;
    /// - until then, no row of the source is written, and no row of a host destination is read or written.
    unsafe fn copy_2d(&self, copy: &MemoryCopy2d, stream: StreamId) -> Result<()> {
        // SAFETY: Each row lies inside the blocks of the whole copy, for which the caller promises the rest.
        copy.in_rows(|row| unsafe { self.copy(row, stream) })
    }

    /// Enqueues a fill of device memory.
    ///
    /// - `fill.exact`: exactly `count` elements are written, with each width of pattern.
    /// - `fill.ordered`: the fill runs in the order of the stream.
    /// - `fill.zero`: a fill of 0 elements succeeds and writes nothing. Its address need not lie in a block, and may be null.
    ///
    /// # Safety
    /// The caller must pass a range inside one block of the device, unless the count is 0. It must keep the block allocated until
    /// the fill has completed.
    unsafe fn fill(&self, fill: &MemoryFill, stream: StreamId) -> Result<()>;

    // ------------------------------------------------------------------ capture and replay

    /// Starts to record the work of the stream instead of executing it. Needs `capture`.
    ///
    /// - `capture.not-executed`: no work enqueued during the capture is executed.
    /// - `capture.begin-again`: a stream that takes part in a capture already returns `Capture`.
    /// - `capture.joins`: a stream that waits for an event recorded in the capture takes part in it from there on.
    /// - `capture.several`: streams may be in separate captures at once, in every mode, also if one thread began them. Each graph has
    ///   the work of its own capture. The captures may end in any order.
    /// - `capture.any-thread`: the work of every thread on the stream is recorded. In mode `Relaxed`, every thread may end the
    ///   capture.
    /// - `capture.undisturbed`: these calls neither fail nor disturb the capture, from any thread and in any mode: allocating
    ///   and freeing plain memory, page-locked memory, and stream-ordered memory on streams that take no part; registering and
    ///   unregistering memory; exporting, opening and closing memory that processes share; creating and destroying events;
    ///   querying and waiting for streams that take no part; querying and waiting for events recorded outside, also on a
    ///   stream that took part later; waits of streams that take no part for such events; instantiating other graphs,
    ///   launching them on streams that take no part, and destroying them; creating handles (if `create_during_capture` holds).
    /// - `capture.no-answer`: a query of, or a wait for, a stream that takes part or an event recorded in the capture returns
    ///   `Capture`, and may lose the capture.
    fn begin_capture(&self, stream: StreamId, mode: CaptureMode) -> Result<()> {
        let _ = (stream, mode);
        Err(Error::lacks("begin_capture", "capture"))
    }

    /// Ends the capture and returns the recorded graph.
    ///
    /// - `capture.lost`: a capture that was lost returns `Capture`; afterwards the stream works as before.
    /// - `capture.unjoined`: if the first stream did not wait for work that a stream recorded after it joined, the call returns
    ///   `Capture`, and the capture is lost. A stream that joined and recorded nothing may have the same effect, or none.
    /// - `capture.end-without`: a stream without a capture returns `Capture`, and nothing changes.
    ///
    /// # Safety
    /// The caller must have begun this capture, or have its owner's leave to end it. Ending one that core began
    /// (`Stream::capture`) makes core free memory that the graph still uses.
    unsafe fn end_capture(&self, stream: StreamId) -> Result<GraphId> {
        let _ = stream;
        Err(Error::lacks("end_capture", "capture"))
    }

    /// Returns whether the stream takes part in a capture.
    fn is_capturing(&self, stream: StreamId) -> Result<bool> {
        let _ = stream;
        Err(Error::lacks("is_capturing", "capture"))
    }

    /// Makes an executable graph from a graph.
    fn instantiate_graph(&self, graph: GraphId) -> Result<GraphExecId> {
        let _ = graph;
        Err(Error::lacks("instantiate_graph", "capture"))
    }

    /// Enqueues one execution of the graph.
    ///
    /// - `capture.replay`: each launch executes all recorded operations once, in the order of the stream, including those of
    ///   the streams that joined, in the order that their events set.
    /// - `capture.by-value`: addresses and scalars are those of the time of recording.
    ///
    /// # Safety
    /// The caller must keep all memory that the graph recorded allocated until the launch has completed. Until then, the
    /// caller must not launch the same executable graph again.
    unsafe fn launch_graph(&self, graph: GraphExecId, stream: StreamId) -> Result<()> {
        let _ = (graph, stream);
        Err(Error::lacks("launch_graph", "capture"))
    }

    /// Destroys a graph.
    ///
    /// - `capture.destroy-graph`: executable graphs made from it stay alive.
    fn destroy_graph(&self, graph: GraphId) -> Result<()> {
        let _ = graph;
        Err(Error::lacks("destroy_graph", "capture"))
    }

    /// Destroys an executable graph.
    ///
    /// - `capture.destroy-executable`: a launch that was enqueued before is still executed.
    fn destroy_graph_exec(&self, graph: GraphExecId) -> Result<()> {
        let _ = graph;
        Err(Error::lacks("destroy_graph_exec", "capture"))
    }

    // ------------------------------------------------------------------ the other three traits

    /// Creates a BLAS or an Lt handle of the device. May take milliseconds, and may wait for another creation.
    ///
    /// - `blas.create-concurrent`: creating one handle does not delay calls on other handles, streams or devices.
    fn create_blas_handle(&self, device: u32, options: &BlasOptions) -> Result<Box<dyn BlasHandle>>;

    /// Returns the allocator of page-locked host memory.
    ///
    /// - `host.one-allocator`: every call returns the same object.
    fn host_allocator(&self) -> Arc<dyn HostAllocator>;

    /// Returns the sharing of memory and events with other processes, if the backend supports it.
    ///
    /// - `ipc.offered`: sharing is offered if and only if the `ipc_transports` of a device are not empty. Every call returns the
    ///   same object.
    fn ipc_sharing(&self) -> Option<Arc<dyn IpcSharing>> {
        None
    }

    /// Returns the observer of the host, if the backend has one. Core asks once, when it opens a runtime.
    fn host_observer(&self) -> Option<Arc<dyn HostObserver>> {
        None
    }
}
