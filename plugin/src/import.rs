//! The program's end of a plugin: the four traits over its table.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use super::link::Link;
use super::raw::RawHandle;
use super::table::Group;
use highwater_hal::{
    AllocateOptions, AtomicsMode, Backend, BlasHandle, BlasKind, BlasOptions, Capabilities, CaptureMode, Completion,
    DeviceInfo, DevicePtr, Error, ErrorKind, EventHandle, EventId, EventOptions, Gemm, GraphExecId, GraphId,
    HostAllocator, HostOptions, HostPtr, Identity, IpcSharing, LiveObjects, MathMode, MemoryCopy, MemoryFill,
    MemoryHandle, MemoryInfo, PlanArguments, PlanId, PlanOptions, Result, StreamId, StreamOptions, Transport,
    Transports, Workspace,
};

/// A limit far above the devices of any process.
const MOST_DEVICES: u32 = 4096;

/// A backend in a plugin.
pub(super) struct Imported {
    link: Arc<Link>,
    identity: Identity,
    /// By ordinal. Read once.
    capabilities: Vec<Capabilities>,
    host: Arc<ImportedHost>,
    sharing: Option<Arc<ImportedSharing>>,
}

impl fmt::Debug for Imported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Imported")
            .field("plugin", &self.link.plugin())
            .field("identity", &self.identity)
            .finish_non_exhaustive()
    }
}

impl Imported {
    /// Reads the identity and the devices of a backend that was just opened. Calls `warn` for abilities without slots.
    pub(super) fn new(link: Link, warn: &mut dyn FnMut(String)) -> Result<Self> {
        let link = Arc::new(link);
        let count = count_devices(&link)?;
        link.set_devices(count);
        let identity = link.identity(link.backend())?;
        if identity.name.is_empty() {
            return Err(broken(&link, "identity", "no name"));
        }
        let mut capabilities = Vec::with_capacity(count as usize);
        for device in 0..count {
            let info = link.device_info(link.backend(), &device)?;
            if info.ordinal != device {
                return Err(broken(&link, "device_info", &format!("the ordinal {} for device {device}", info.ordinal)));
            }
            let claimed = link.capabilities(link.backend(), &device)?;
            let held = hold_to(&link, claimed);
            if held != claimed && device == 0 {
                warn(format!("claims abilities that its table has no slots for: {}", difference(&claimed, &held)));
            }
            capabilities.push(held);
        }
        let shares = capabilities.iter().any(|capabilities| !capabilities.ipc_transports.is_empty());
        let sharing = shares.then(|| Arc::new(ImportedSharing { link: Arc::clone(&link) }));
        let host = Arc::new(ImportedHost { link: Arc::clone(&link) });
        Ok(Self { link, identity, capabilities, host, sharing })
    }
}

/// Returns the number of devices that the plugin reports.
fn count_devices(link: &Arc<Link>) -> Result<u32> {
    match link.device_count(link.backend())? {
        0 => Err(Error::new(ErrorKind::DeviceMissing, "open", format!("the plugin `{}` has no device", link.plugin()))
            .with_hint("a backend without a device does not open")),
        count @ 1..=MOST_DEVICES => Ok(count),
        count => Err(broken(link, "device_count", &format!("{count} devices"))),
    }
}

fn broken(link: &Link, slot: &'static str, what: &str) -> Error {
    link.broken("open", slot, what)
}

/// Clears the abilities for which the table has no slots.
fn hold_to(link: &Link, mut capabilities: Capabilities) -> Capabilities {
    let has = |group| matches!(link.table().group(group), Ok(true));
    if !has(Group::Blas) {
        let c = &mut capabilities;
        (c.gemm_f32, c.gemm_f64, c.gemm_f16, c.gemm_bf16, c.gemm_mixed) = (false, false, false, false, false);
        (c.tf32, c.atomics_mode, c.blas_workspace, c.strided_batch) = (false, false, false, false);
    }
    capabilities.lt_plans &= has(Group::Blas) && has(Group::Lt);
    capabilities.capture &= has(Group::Capture);
    capabilities.event_timing &= has(Group::Timing);
    capabilities.foreign_objects &= has(Group::Foreign);
    capabilities.write_combined &= has(Group::Host);
    capabilities.host_register &= has(Group::Host) && has(Group::Register);
    if !has(Group::Ipc) {
        (capabilities.shareable_memory, capabilities.interprocess_events) = (false, false);
        capabilities.ipc_transports = Transports::NONE;
    }
    capabilities
}

/// Returns the names of the abilities that differ.
fn difference(claimed: &Capabilities, held: &Capabilities) -> String {
    use super::codes::Abilities;
    let bits = Abilities::of(claimed) & !Abilities::of(held);
    let mut names: Vec<String> = Abilities::NAMES
        .iter()
        .filter(|ability| bits & ability.value != 0)
        .map(|ability| ability.name.trim_start_matches("CAN_").to_lowercase())
        .collect();
    if claimed.ipc_transports != held.ipc_transports {
        names.push("ipc_transports".to_owned());
    }
    names.join(", ")
}

// SAFETY: every call goes to the plugin, and its answer goes to core. The loader of the plugin vouches for its clauses.
unsafe impl Backend for Imported {
    fn identity(&self) -> &Identity {
        &self.identity
    }

    fn device_count(&self) -> u32 {
        self.link.devices()
    }

    fn device_info(&self, device: u32) -> Result<DeviceInfo> {
        self.link.device_info(self.link.backend(), &device)
    }

    fn capabilities(&self, device: u32) -> Result<Capabilities> {
        match self.capabilities.get(device as usize) {
            Some(capabilities) => Ok(*capabilities),
            None => {
                let message = format!("there is no device {device}; there are {}", self.capabilities.len());
                Err(Error::new(ErrorKind::InvalidArgument, "capabilities", message)
                    .with_hint("ordinals count from 0 and are below `device_count()`"))
            }
        }
    }

    fn memory_info(&self, device: u32) -> Result<MemoryInfo> {
        self.link.memory_info(self.link.backend(), &device)
    }

    fn live_objects(&self) -> LiveObjects {
        self.link.live_objects(self.link.backend()).unwrap_or_default()
    }

    fn is_exiting(&self) -> bool {
        highwater_hal::exit::has_begun() || self.link.is_exiting(self.link.backend()).unwrap_or(false)
    }

    fn create_stream(&self, device: u32, options: &StreamOptions) -> Result<StreamId> {
        self.link.create_stream(self.link.backend(), &device, options)
    }

    fn destroy_stream(&self, stream: StreamId) -> Result<()> {
        self.link.destroy_stream(self.link.backend(), &stream)
    }

    fn query_stream(&self, stream: StreamId) -> Result<Completion> {
        self.link.query_stream(self.link.backend(), &stream)
    }

    fn synchronize_stream(&self, stream: StreamId) -> Result<()> {
        self.link.synchronize_stream(self.link.backend(), &stream)
    }

    fn synchronize_device(&self, device: u32) -> Result<()> {
        self.link.synchronize_device(self.link.backend(), &device)
    }

    fn stream_wait_event(&self, stream: StreamId, event: EventId) -> Result<()> {
        self.link.stream_wait_event(self.link.backend(), &stream, &event)
    }

    fn raw_stream(&self, stream: StreamId) -> Result<u64> {
        self.link.raw_stream(self.link.backend(), &stream)
    }

    unsafe fn stream_from_raw(&self, device: u32, raw: u64) -> Result<StreamId> {
        self.link.stream_from_raw(self.link.backend(), &device, &raw)
    }

    fn create_event(&self, device: u32, options: &EventOptions) -> Result<EventId> {
        self.link.create_event(self.link.backend(), &device, options)
    }

    fn destroy_event(&self, event: EventId) -> Result<()> {
        self.link.destroy_event(self.link.backend(), &event)
    }

    fn record_event(&self, event: EventId, stream: StreamId) -> Result<()> {
        self.link.record_event(self.link.backend(), &event, &stream)
    }

    fn query_event(&self, event: EventId) -> Result<Completion> {
        self.link.query_event(self.link.backend(), &event)
    }

    fn synchronize_event(&self, event: EventId) -> Result<()> {
        self.link.synchronize_event(self.link.backend(), &event)
    }

    fn event_elapsed_ns(&self, start: EventId, end: EventId) -> Result<u64> {
        self.link.event_elapsed_ns(self.link.backend(), &start, &end)
    }

    fn raw_event(&self, event: EventId) -> Result<u64> {
        self.link.raw_event(self.link.backend(), &event)
    }

    unsafe fn event_from_raw(&self, device: u32, raw: u64) -> Result<EventId> {
        self.link.event_from_raw(self.link.backend(), &device, &raw)
    }

    fn allocate(&self, device: u32, options: &AllocateOptions) -> Result<DevicePtr> {
        self.link.allocate(self.link.backend(), &device, options)
    }

    unsafe fn free(&self, device: u32, ptr: DevicePtr, stream: Option<StreamId>) -> Result<()> {
        self.link.free(self.link.backend(), &device, &ptr, &stream)
    }

    unsafe fn copy(&self, copy: &MemoryCopy, stream: StreamId) -> Result<()> {
        self.link.copy(self.link.backend(), copy, &stream)
    }

    unsafe fn fill(&self, fill: &MemoryFill, stream: StreamId) -> Result<()> {
        self.link.fill(self.link.backend(), fill, &stream)
    }

    fn begin_capture(&self, stream: StreamId, mode: CaptureMode) -> Result<()> {
        self.link.begin_capture(self.link.backend(), &stream, &mode)
    }

    unsafe fn end_capture(&self, stream: StreamId) -> Result<GraphId> {
        self.link.end_capture(self.link.backend(), &stream)
    }

    fn is_capturing(&self, stream: StreamId) -> Result<bool> {
        self.link.is_capturing(self.link.backend(), &stream)
    }

    fn instantiate_graph(&self, graph: GraphId) -> Result<GraphExecId> {
        self.link.instantiate_graph(self.link.backend(), &graph)
    }

    unsafe fn launch_graph(&self, graph: GraphExecId, stream: StreamId) -> Result<()> {
        self.link.launch_graph(self.link.backend(), &graph, &stream)
    }

    fn destroy_graph(&self, graph: GraphId) -> Result<()> {
        self.link.destroy_graph(self.link.backend(), &graph)
    }

    fn destroy_graph_exec(&self, graph: GraphExecId) -> Result<()> {
        self.link.destroy_graph_exec(self.link.backend(), &graph)
    }

    fn create_blas_handle(&self, device: u32, options: &BlasOptions) -> Result<Box<dyn BlasHandle>> {
        let link = &self.link;
        let handle = link.create_handle(link.backend(), &device, options)?.0;
        Ok(Box::new(ImportedHandle { link: Arc::clone(link), handle, kind: options.kind, device }))
    }

    fn host_allocator(&self) -> Arc<dyn HostAllocator> {
        Arc::clone(&self.host) as Arc<dyn HostAllocator>
    }

    fn ipc_sharing(&self) -> Option<Arc<dyn IpcSharing>> {
        self.sharing.as_ref().map(|sharing| Arc::clone(sharing) as Arc<dyn IpcSharing>)
    }
}

/// A handle in a plugin.
#[derive(Debug)]
struct ImportedHandle {
    link: Arc<Link>,
    handle: NonNull<RawHandle>,
    kind: BlasKind,
    device: u32,
}

// SAFETY: the pointer is only passed to the table's functions for handles, which any thread may call, one at a time (the
// table's contract).
unsafe impl Send for ImportedHandle {}

impl BlasHandle for ImportedHandle {
    fn kind(&self) -> BlasKind {
        self.kind
    }

    fn device(&self) -> u32 {
        self.device
    }

    fn set_stream(&mut self, stream: StreamId) -> Result<()> {
        self.link.handle_set_stream(self.handle.as_ptr(), &stream)
    }

    unsafe fn set_workspace(&mut self, workspace: Option<Workspace>) -> Result<()> {
        self.link.handle_set_workspace(self.handle.as_ptr(), &workspace)
    }

    fn set_math_mode(&mut self, mode: MathMode) -> Result<()> {
        self.link.handle_set_math_mode(self.handle.as_ptr(), &mode)
    }

    fn set_atomics_mode(&mut self, mode: AtomicsMode) -> Result<()> {
        self.link.handle_set_atomics_mode(self.handle.as_ptr(), &mode)
    }

    unsafe fn gemm(&mut self, gemm: &Gemm) -> Result<()> {
        self.link.handle_gemm(self.handle.as_ptr(), gemm)
    }

    fn create_plan(&mut self, options: &PlanOptions) -> Result<PlanId> {
        self.link.create_plan(self.handle.as_ptr(), options)
    }

    unsafe fn run_plan(&mut self, plan: PlanId, arguments: &PlanArguments) -> Result<()> {
        self.link.run_plan(self.handle.as_ptr(), &plan, arguments)
    }

    fn destroy_plan(&mut self, plan: PlanId) -> Result<()> {
        self.link.destroy_plan(self.handle.as_ptr(), &plan)
    }

    fn raw(&self) -> u64 {
        self.link.handle_raw(self.handle.as_ptr()).unwrap_or(0)
    }

    fn reset(&mut self) -> Result<()> {
        self.link.handle_reset(self.handle.as_ptr())
    }

    fn destroy(&mut self) -> Result<()> {
        self.link.handle_destroy(self.handle.as_ptr())
    }
}

impl Drop for ImportedHandle {
    fn drop(&mut self) {
        // If the plugin may not be called any more, the handle lives until the process ends, as those of built-in backends do.
        if let Err(error) = self.link.handle_close(self.handle.as_ptr())
            && !matches!(error.kind(), ErrorKind::ShuttingDown | ErrorKind::Forked)
        {
            tracing::warn!("a handle could not be closed: {error}");
        }
    }
}

/// The page-locked memory of a plugin.
#[derive(Debug)]
struct ImportedHost {
    link: Arc<Link>,
}

// SAFETY: as for `Imported`. The marshalling checks that blocks are not null and are aligned.
unsafe impl HostAllocator for ImportedHost {
    fn allocate(&self, bytes: usize, options: &HostOptions) -> Result<HostPtr> {
        self.link.host_allocate(self.link.backend(), &bytes, options)
    }

    unsafe fn free(&self, ptr: HostPtr) -> Result<()> {
        self.link.host_free(self.link.backend(), &ptr)
    }

    unsafe fn register(&self, ptr: HostPtr, bytes: usize, options: &HostOptions) -> Result<()> {
        self.link.host_register(self.link.backend(), &ptr, &bytes, options)
    }

    unsafe fn unregister(&self, ptr: HostPtr) -> Result<()> {
        self.link.host_unregister(self.link.backend(), &ptr)
    }

    fn device_address(&self, ptr: HostPtr, device: u32) -> Result<DevicePtr> {
        self.link.host_device_address(self.link.backend(), &ptr, &device)
    }
}

/// The sharing of a plugin.
#[derive(Debug)]
struct ImportedSharing {
    link: Arc<Link>,
}

impl IpcSharing for ImportedSharing {
    unsafe fn export_memory(&self, device: u32, ptr: DevicePtr, transport: Transport) -> Result<MemoryHandle> {
        self.link.export_memory(self.link.backend(), &device, &ptr, &transport)
    }

    fn open_memory(&self, device: u32, handle: &MemoryHandle) -> Result<DevicePtr> {
        self.link.open_memory(self.link.backend(), &device, handle)
    }

    unsafe fn close_memory(&self, device: u32, ptr: DevicePtr) -> Result<()> {
        self.link.close_memory(self.link.backend(), &device, &ptr)
    }

    fn export_event(&self, event: EventId) -> Result<EventHandle> {
        self.link.export_event(self.link.backend(), &event)
    }

    fn open_event(&self, device: u32, handle: &EventHandle) -> Result<EventId> {
        self.link.open_event(self.link.backend(), &device, handle)
    }
}
