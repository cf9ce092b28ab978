//! The trait [`Backend`]: one vendor's devices, streams, events, memory and copies.

use std::fmt;
use std::sync::Arc;

use crate::blas::{BlasHandle, BlasOptions};
use crate::capability::Capabilities;
use crate::error::{Error, Result};
use crate::host::HostAllocator;
use crate::id::{BackendTag, EventId, GraphExecId, GraphId, StreamId};
use crate::ipc::IpcSharing;
use crate::memory::{AllocateOptions, DevicePtr, MemoryCopy, MemoryFill, MemoryInfo};

/// Who a backend is.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Identity {
    /// The name under which it is opened: `cuda`, `rocm`, `mock`, or a plugin's own.
    pub name: String,
    /// What it drives, for people: `NVIDIA CUDA`.
    pub description: String,
    /// Whether there is real hardware behind it.
    pub real_device: bool,
    /// Versions of the backend and of each vendor library, as `(what, version)`.
    pub versions: Vec<(String, String)>,
    /// The tag in every id that it issues.
    pub tag: BackendTag,
    /// Environment variables, first set one wins, that size the BLAS workspace as `:KiB:COUNT` pairs.
    pub blas_workspace_variables: &'static [&'static str],
    /// Environment variables, first set one wins, that size the Lt workspace in KiB.
    pub lt_workspace_variables: &'static [&'static str],
}

impl Identity {
    /// A real device without versions and variables.
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

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Ordinal within this process; another process may count differently.
    pub ordinal: u32,
    /// The vendor's name for it.
    pub name: String,
    /// Identifies the device across processes.
    pub uuid: [u8; 16],
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// PCI address as `domain:bus:device.function`. Core treats devices with equal addresses and UUIDs as one device,
    /// on which runtimes respect each other's captures. `None` for a device that only this backend has.
    pub pci_address: Option<String>,
    /// NUMA node that it is attached to, where known.
    pub numa_node: Option<u32>,
    /// The vendor's architecture: `sm_90`, `gfx942`, `mock`.
    pub architecture: String,
}

impl DeviceInfo {
    /// A device without PCI address and NUMA node.
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

/// How to make a stream. Streams never synchronise with the legacy default stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct StreamOptions {
    /// How urgent its work is beside that of other streams.
    pub priority: StreamPriority,
}

impl StreamOptions {
    /// A stream of normal priority.
    #[must_use]
    pub const fn new() -> Self {
        Self { priority: StreamPriority::Normal }
    }

    /// The same with another priority.
    #[must_use]
    pub const fn with_priority(mut self, priority: StreamPriority) -> Self {
        self.priority = priority;
        self
    }
}

/// Priority of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StreamPriority {
    /// After everything else.
    Low,
    /// As the vendor has it by default.
    #[default]
    Normal,
    /// Before everything else.
    High,
}

/// How to make an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct EventOptions {
    /// Whether [`Backend::event_elapsed_ns`] may be asked; costs time at each record.
    pub timing: bool,
    /// Whether another process may open it; excludes `timing`.
    pub interprocess: bool,
}

impl EventOptions {
    /// An event without timing, for this process.
    #[must_use]
    pub const fn new() -> Self {
        Self { timing: false, interprocess: false }
    }

    /// The same with timing.
    #[must_use]
    pub const fn with_timing(mut self) -> Self {
        self.timing = true;
        self
    }

    /// The same for other processes too.
    #[must_use]
    pub const fn with_interprocess(mut self) -> Self {
        self.interprocess = true;
        self
    }
}

/// Answer to "is it done?".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completion {
    /// Everything up to the point asked for has been executed.
    Complete,
    /// Something is still to be executed.
    Pending,
}

impl Completion {
    /// Whether everything has been executed.
    #[must_use]
    pub const fn is_complete(self) -> bool {
        matches!(self, Self::Complete)
    }
}

/// How strict a capture is about calls that it forbids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum CaptureMode {
    /// Forbidden calls of any thread lose the capture.
    Global,
    /// Forbidden calls of the capturing thread lose the capture.
    #[default]
    ThreadLocal,
    /// Forbidden calls are allowed.
    Relaxed,
}

/// What a backend's objects that are alive come to; all zero when everything was given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct LiveObjects {
    /// Streams made by `create_stream`.
    pub streams: u64,
    /// Events made by `create_event` or opened.
    pub events: u64,
    /// BLAS and Lt handles.
    pub handles: u64,
    /// Blocks of device memory.
    pub allocations: u64,
    /// Blocks of page-locked host memory, allocated or registered.
    pub host_allocations: u64,
    /// Graphs and executable graphs.
    pub graphs: u64,
    /// Memory of other processes that is mapped here.
    pub mappings: u64,
    /// File descriptors made for sharing.
    pub descriptors: u64,
    /// Shared files made for sharing.
    pub shared_files: u64,
}

impl LiveObjects {
    /// The sum of all counts.
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
    }
}

impl std::fmt::Display for LiveObjects {
    /// `2 streams, 1 block of device memory`; `nothing` where every count is 0.
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
        ];
        let mut before = "";
        for (count, one, many) in counts.into_iter().filter(|(count, ..)| *count > 0) {
            write!(f, "{before}{count} {}", if count == 1 { one } else { many })?;
            before = ", ";
        }
        if before.is_empty() { f.write_str("nothing") } else { Ok(()) }
    }
}

/// One vendor's devices: streams, events, memory, copies and captures, raw and without policy.
///
/// # Design
/// A backend does no pooling, no caching and no policy: those are core's, once, for all vendors. It validates the *ids*
/// it is handed, because only it knows them, and the arguments that a clause names; the rest is checked by core before the
/// call, so a backend may pass it on. Methods that move bytes between raw addresses are `unsafe fn`; everything else is safe and gives an error
/// for whatever it cannot do. Options grow; the structs are `non_exhaustive`.
///
/// A backend is `Send + Sync` and is used through `Arc<dyn Backend>`. Methods may be called from any thread, with no
/// device or context made current before: the backend sees to that and leaves the caller's as it was.
///
/// # Clauses of every method
/// - `backend.ids-checked`: a stale, foreign or forged id gives `InvalidHandle`, and nothing happens.
/// - `backend.device-checked`: an ordinal not below `device_count` gives `InvalidArgument`.
/// - `backend.lacking`: what a capability denies gives `Unsupported`, and nothing happens.
/// - `backend.concurrent`: calls from several threads at once do not disturb each other.
/// - `backend.live-objects`: what is made counts in `live_objects` until it is destroyed.
/// - `backend.forked`: in a child forked after the backend was opened, calls give `Forked` at once.
///
/// # Safety
/// Core frees and reuses memory by what a backend answers, and lets safe code touch page-locked memory by it. So an
/// implementation must keep these clauses whatever is called: `event.query`, `event.synchronize`, `event.record-moves`,
/// `event.wait-orders`, `stream.query`, `stream.synchronize`, `devices.synchronize`, `stream.order`, `copy.exact`, and
/// the clauses that its [`HostAllocator`] has to keep.
#[cfg_attr(feature = "mockall", mockall::automock)]
pub unsafe trait Backend: Send + Sync + fmt::Debug {
    // ------------------------------------------------------------------ identity

    /// Name, versions and tag.
    ///
    /// - `identity.stable`: the same value every time.
    /// - `identity.tagged`: every id that the backend issues carries `identity().tag`.
    fn identity(&self) -> &Identity;

    /// Number of devices; their ordinals count from 0. Does not change.
    ///
    /// - `devices.some`: at least 1 (a backend without a device does not open).
    fn device_count(&self) -> u32;

    /// What the device is.
    ///
    /// - `devices.uuid`: the UUID is stable over the life of the machine, and no two devices share one.
    fn device_info(&self, device: u32) -> Result<DeviceInfo>;

    /// What the device can do.
    ///
    /// - `devices.capabilities-stable`: the same value every time.
    fn capabilities(&self, device: u32) -> Result<Capabilities>;

    /// Free and total memory.
    ///
    /// - `memory.info`: `free <= total`, and `total` is `device_info().memory_bytes`.
    fn memory_info(&self, device: u32) -> Result<MemoryInfo>;

    /// Objects that are alive, counted by the backend itself. What the exit policy leaves on purpose is not counted.
    fn live_objects(&self) -> LiveObjects;

    /// Whether the process has begun to exit; from then on nothing calls the driver and handles are leaked on purpose.
    ///
    /// The flag is set by a handler that was registered right after the vendor's initialisation, so that it runs before
    /// the vendor's own.
    ///
    /// Core asks before its calls, but not before each product: that may come a moment too late anyway, so every call of the
    /// backend looks itself and answers `ShuttingDown`.
    fn is_exiting(&self) -> bool;

    // ------------------------------------------------------------------ streams

    /// Makes a stream.
    ///
    /// - `stream.order`: what is enqueued on one stream is executed in the order of the calls.
    /// - `stream.asynchronous`: enqueueing returns without waiting for what was enqueued before.
    /// - `stream.independent`: streams of one device do not wait for each other unless told to.
    fn create_stream(&self, device: u32, options: &StreamOptions) -> Result<StreamId>;

    /// Destroys a stream without waiting.
    ///
    /// - `stream.destroy-pending`: what was enqueued is still executed.
    /// - `stream.destroy-stale`: from here on the id is stale, also for a second `destroy_stream`.
    fn destroy_stream(&self, stream: StreamId) -> Result<()>;

    /// Whether everything enqueued so far has been executed; does not wait.
    ///
    /// - `stream.query`: `Pending` while work is outstanding, `Complete` after it.
    fn query_stream(&self, stream: StreamId) -> Result<Completion>;

    /// Waits until everything enqueued so far has been executed.
    ///
    /// - `stream.synchronize`: on return the effects of that work are visible to the CPU.
    fn synchronize_stream(&self, stream: StreamId) -> Result<()>;

    /// Waits for every stream of the device.
    ///
    /// - `devices.synchronize`: on return the work enqueued on any stream of the device has been executed.
    fn synchronize_device(&self, device: u32) -> Result<()>;

    /// Makes the stream wait, on the device, for the latest record of the event at the time of the call.
    ///
    /// - `event.wait-orders`: work enqueued after the wait runs after the work before the record, also across devices.
    /// - `event.wait-snapshot`: a record made after the call is not waited for.
    /// - `event.never-recorded`: waiting for an event that was never recorded is no wait and no error.
    fn stream_wait_event(&self, stream: StreamId, event: EventId) -> Result<()>;

    /// The vendor's handle of the stream, as a number. Needs `foreign_objects`.
    fn raw_stream(&self, stream: StreamId) -> Result<u64> {
        let _ = stream;
        Err(Error::lacks("raw_stream", "foreign_objects"))
    }

    /// Wraps a stream that other code made and keeps; `destroy_stream` forgets it without destroying it.
    ///
    /// # Safety
    /// `raw` is a live stream of `device` and stays so until the id has been given to `destroy_stream`.
    unsafe fn stream_from_raw(&self, device: u32, raw: u64) -> Result<StreamId> {
        let _ = (device, raw);
        Err(Error::lacks("stream_from_raw", "foreign_objects"))
    }

    // ------------------------------------------------------------------ events

    /// Makes an event. Timing needs `event_timing`, interprocess needs `interprocess_events`; both at once is
    /// `InvalidArgument`.
    fn create_event(&self, device: u32, options: &EventOptions) -> Result<EventId>;

    /// Destroys an event without waiting.
    ///
    /// - `event.destroy-pending`: a record or a wait already enqueued keeps its effect.
    /// - `event.destroy-stale`: from here on the id is stale.
    fn destroy_event(&self, event: EventId) -> Result<()>;

    /// Records the event: marks the point that the stream has reached in the order of calls.
    ///
    /// - `event.record-moves`: a further record replaces the point; the earlier one is forgotten.
    /// - `event.record-device`: a stream of another device than the event's gives `WrongDevice`.
    fn record_event(&self, event: EventId, stream: StreamId) -> Result<()>;

    /// Whether the latest record has been reached; does not wait.
    ///
    /// - `event.query`: `Pending` until the stream has passed the record, then `Complete`.
    /// - `event.query-never-recorded`: `Complete` for an event that was never recorded.
    fn query_event(&self, event: EventId) -> Result<Completion>;

    /// Waits until the latest record has been reached.
    ///
    /// - `event.synchronize`: on return the effects of the work before the record are visible to the CPU.
    fn synchronize_event(&self, event: EventId) -> Result<()>;

    /// Nanoseconds between the records of two events with timing.
    ///
    /// - `event.elapsed`: at least the time that the device spent between them.
    /// - `event.elapsed-invalid`: an event without timing or never recorded gives `InvalidArgument`, one not reached yet
    ///   `InvalidState`.
    fn event_elapsed_ns(&self, start: EventId, end: EventId) -> Result<u64> {
        let _ = (start, end);
        Err(Error::lacks("event_elapsed_ns", "event_timing"))
    }

    /// The vendor's handle of the event, as a number. Needs `foreign_objects`.
    fn raw_event(&self, event: EventId) -> Result<u64> {
        let _ = event;
        Err(Error::lacks("raw_event", "foreign_objects"))
    }

    /// Wraps an event that other code made and keeps; `destroy_event` forgets it without destroying it.
    ///
    /// # Safety
    /// `raw` is a live event of `device` and stays so until the id has been given to `destroy_event`.
    unsafe fn event_from_raw(&self, device: u32, raw: u64) -> Result<EventId> {
        let _ = (device, raw);
        Err(Error::lacks("event_from_raw", "foreign_objects"))
    }

    // ------------------------------------------------------------------ device memory

    /// Allocates device memory with unspecified contents.
    ///
    /// - `memory.aligned`: the address is a multiple of 256.
    /// - `memory.disjoint`: blocks that are alive do not overlap.
    /// - `memory.zero`: 0 bytes give `InvalidArgument`.
    /// - `memory.exhausted`: more than there is gives `OutOfMemory`, and nothing changes.
    /// - `memory.stream-ordered`: work enqueued on a block's stream after the allocation has the bytes to itself, and so has
    ///   work that waits for an event recorded there after it.
    ///
    /// The contract promises nothing more for stream-ordered memory. Its bytes may belong to a block that was freed in
    /// the order of the same stream, with work still outstanding. Work of another stream races with that work unless an
    /// event orders it after the allocation. Core orders the first use on each other stream. Every other caller must
    /// record an event after the allocation and make the other stream wait for it.
    fn allocate(&self, device: u32, options: &AllocateOptions) -> Result<DevicePtr>;

    /// Frees a block. `stream` is `Some` for stream-ordered memory, which is then freed in the order of that stream, and
    /// `None` otherwise.
    ///
    /// - `memory.free-returns`: freed bytes can be allocated again (stream-ordered ones once the stream is past).
    ///
    /// # Safety
    /// - `ptr` came from `allocate` for this device and has not been freed.
    /// - No work that uses the block is outstanding, unless it precedes the free on `stream`.
    unsafe fn free(&self, device: u32, ptr: DevicePtr, stream: Option<StreamId>) -> Result<()>;

    // ------------------------------------------------------------------ copies and fills

    /// Enqueues a copy between device memory and device memory or page-locked host memory, of one device or two.
    ///
    /// - `copy.exact`: exactly `bytes` bytes arrive, unchanged; bytes beside the destination keep their value.
    /// - `copy.ordered`: the copy runs in the order of the stream.
    /// - `copy.zero`: 0 bytes copy nothing and give no error.
    ///
    /// # Safety
    /// - Both ranges lie inside one block each: device memory of the device named, or one page-locked host block or one
    ///   registration.
    /// - They do not overlap, and both blocks stay allocated until the copy has completed.
    /// - Until then nobody writes the source, and nobody reads or writes a host destination.
    unsafe fn copy(&self, copy: &MemoryCopy, stream: StreamId) -> Result<()>;

    /// Enqueues a fill of device memory.
    ///
    /// - `fill.exact`: exactly `count` elements are written, with each width of pattern.
    /// - `fill.ordered`: the fill runs in the order of the stream.
    /// - `fill.zero`: 0 elements fill nothing and give no error.
    ///
    /// # Safety
    /// The range lies inside one block of the device, which stays allocated until the fill has completed.
    unsafe fn fill(&self, fill: &MemoryFill, stream: StreamId) -> Result<()>;

    // ------------------------------------------------------------------ capture and replay

    /// Starts to record what is enqueued on the stream instead of executing it. Needs `capture`.
    ///
    /// - `capture.not-executed`: nothing enqueued during the capture is executed.
    /// - `capture.begin-again`: beginning on a stream that takes part in a capture gives `Capture`.
    /// - `capture.joins`: a stream that waits for an event recorded in the capture takes part in it from there on.
    /// - `capture.undisturbed`: allocating and freeing plain memory and page-locked memory, registering and unregistering
    ///   memory, exporting, opening and closing memory that processes share, creating and destroying events, asking and
    ///   waiting for events that were recorded outside and for streams that take no part, and making handles (where
    ///   `create_during_capture` holds) neither fail nor disturb the capture, from whichever thread and in whichever mode.
    /// - `capture.no-answer`: asking or waiting for a stream that takes part, or an event recorded in the capture, gives
    ///   `Capture`; the capture may be lost by it.
    fn begin_capture(&self, stream: StreamId, mode: CaptureMode) -> Result<()> {
        let _ = (stream, mode);
        Err(Error::lacks("begin_capture", "capture"))
    }

    /// Ends the capture and gives what it recorded.
    ///
    /// - `capture.lost`: a capture that was lost gives `Capture`; afterwards the stream works as before.
    /// - `capture.unjoined`: where a stream that joined was not waited for by the first one, `Capture`, and the capture is
    ///   lost.
    /// - `capture.end-without`: a stream without a capture gives `Capture`, and nothing changes.
    ///
    /// # Safety
    /// Whoever ends a capture takes what it recorded out of the hands of who began it. So the caller began it, or has a right
    /// to end it: a capture of core's (`Stream::capture`) is ended by core alone, which frees memory by what it recorded.
    unsafe fn end_capture(&self, stream: StreamId) -> Result<GraphId> {
        let _ = stream;
        Err(Error::lacks("end_capture", "capture"))
    }

    /// Whether the stream takes part in a capture.
    fn is_capturing(&self, stream: StreamId) -> Result<bool> {
        let _ = stream;
        Err(Error::lacks("is_capturing", "capture"))
    }

    /// Makes a graph executable.
    fn instantiate_graph(&self, graph: GraphId) -> Result<GraphExecId> {
        let _ = graph;
        Err(Error::lacks("instantiate_graph", "capture"))
    }

    /// Enqueues one execution of the graph.
    ///
    /// - `capture.replay`: every launch executes all recorded operations once, in the order of the stream, also those of
    ///   the streams that joined, in the order that their events gave.
    /// - `capture.by-value`: addresses and scalars are those of the time of recording.
    ///
    /// # Safety
    /// All memory that the graph recorded stays allocated until the launch has completed, and no other launch of the
    /// same executable graph runs meanwhile.
    unsafe fn launch_graph(&self, graph: GraphExecId, stream: StreamId) -> Result<()> {
        let _ = (graph, stream);
        Err(Error::lacks("launch_graph", "capture"))
    }

    /// Destroys a graph; graphs made executable from it live on.
    fn destroy_graph(&self, graph: GraphId) -> Result<()> {
        let _ = graph;
        Err(Error::lacks("destroy_graph", "capture"))
    }

    /// Destroys an executable graph; a launch already enqueued is still executed.
    fn destroy_graph_exec(&self, graph: GraphExecId) -> Result<()> {
        let _ = graph;
        Err(Error::lacks("destroy_graph_exec", "capture"))
    }

    // ------------------------------------------------------------------ the other three traits

    /// Makes a BLAS or an Lt handle of the device. May take milliseconds, and waits for nobody else's creation.
    ///
    /// - `blas.create-concurrent`: making one handle does not delay calls on other handles, streams or devices.
    fn create_blas_handle(&self, device: u32, options: &BlasOptions) -> Result<Box<dyn BlasHandle>>;

    /// The allocator of page-locked host memory; the same every time.
    fn host_allocator(&self) -> Arc<dyn HostAllocator>;

    /// Sharing with other processes, where the backend can do it.
    ///
    /// - `ipc.offered`: offered exactly where the `ipc_transports` of a device are not empty.
    fn ipc_sharing(&self) -> Option<Arc<dyn IpcSharing>> {
        None
    }
}
