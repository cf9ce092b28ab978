//! The calls that a process makes while it exits. The backend must refuse each of them (`backend.exiting`).

use std::cell::RefCell;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

use highwater_hal::numbers::Coded as _;
use highwater_hal::{
    AllocateOptions, AtomicsMode, Backend, BlasHandle, BlasKind, BlasOptions, CaptureMode, CopyShape, DataType,
    DeviceMemoryKind, DevicePtr, Epilogue, ErrorKind, EventHandle, EventId, EventOptions, FillPattern, Gemm, GemmShape,
    GraphExecId, GraphId, HostAllocator, HostOptions, HostPtr, IpcSharing, Location, MathMode, MemoryCopy,
    MemoryCopy2d, MemoryFill, MemoryHandle, PhysicalMemoryId, PhysicalMemoryOptions, PlanArguments, PlanId,
    PlanOptions, Result, StreamId, StreamOptions, Transport,
};

const BYTES: usize = 4096;

/// A handle, its plan, and the calls that it supports.
struct Multiplier {
    handle: Box<dyn BlasHandle>,
    plan: Option<(PlanId, PlanOptions)>,
    can_multiply: bool,
    can_reset: bool,
}

/// A range of addresses with memory in its first half, and memory that is not mapped.
#[derive(Clone, Copy)]
struct Mapped {
    addresses: DevicePtr,
    piece: usize,
    other: PhysicalMemoryId,
}

/// A recorded graph.
#[derive(Clone, Copy)]
struct Recorded {
    graph: GraphId,
    executable: GraphExecId,
}

/// Objects for each call. The process gives none of them back, because it exits.
pub(super) struct Objects {
    device: u32,
    stream: StreamId,
    event: EventId,
    is_timed: bool,
    block: DevicePtr,
    pinned: HostPtr,
    unregistered: Option<HostPtr>,
    registered: Option<HostPtr>,
    raw: Option<(u64, u64)>,
    recorded: Option<Recorded>,
    mapped: Option<Mapped>,
    multipliers: Vec<Multiplier>,
    shared: Option<(DevicePtr, Transport, MemoryHandle)>,
    shared_event: Option<(EventId, EventHandle)>,
    describes: bool,
}

/// Returns memory of the process that stays until its end.
fn kept_bytes() -> HostPtr {
    let bytes: &'static mut [u8] = Box::leak(vec![0; BYTES].into_boxed_slice());
    HostPtr::new(NonNull::from(bytes).cast())
}

impl Objects {
    pub(super) fn new(backend: &dyn Backend, device: u32) -> Result<Self> {
        let can = backend.capabilities(device)?;
        let stream = backend.create_stream(device, &StreamOptions::new())?;
        let options = EventOptions::new();
        let event = backend.create_event(device, &if can.event_timing { options.with_timing() } else { options })?;
        backend.record_event(event, stream)?;
        let block = backend.allocate(device, &AllocateOptions::new(BYTES))?;
        let host = backend.host_allocator();
        let pinned = host.allocate(BYTES, &HostOptions::new())?;
        let registered = can.host_register.then(kept_bytes);
        if let Some(ptr) = registered {
            // SAFETY: the bytes stay until the process ends.
            unsafe { host.register(ptr, BYTES, &HostOptions::new()) }?;
        }
        let raw = match can.foreign_objects {
            true => Some((backend.raw_stream(stream)?, backend.raw_event(event)?)),
            false => None,
        };
        let recorded = if can.capture { Some(Self::record(backend, stream)?) } else { None };
        let mapped = if can.mapped_memory { Some(Self::map(backend, device)?) } else { None };
        let kinds = if can.lt_plans { vec![BlasKind::Blas, BlasKind::Lt] } else { vec![BlasKind::Blas] };
        let multiplier = |kind| Self::multiplier(backend, stream, kind);
        let multipliers = kinds.into_iter().map(multiplier).collect::<Result<_>>()?;
        let transport = Transport::ALL.iter().copied().find(|transport| can.ipc_transports.contains(*transport));
        let sharing = backend.ipc_sharing();
        let shared = match (&sharing, transport) {
            (Some(sharing), Some(transport)) if can.shareable_memory => {
                let kind = DeviceMemoryKind::Shareable(transport);
                let ptr = backend.allocate(device, &AllocateOptions::new(BYTES).with_kind(kind))?;
                // SAFETY: the block stays until the process ends.
                Some((ptr, transport, unsafe { sharing.export_memory(device, ptr, transport) }?))
            }
            _ => None,
        };
        let shared_event = match &sharing {
            Some(sharing) if can.interprocess_events => {
                let event = backend.create_event(device, &EventOptions::new().with_interprocess())?;
                Some((event, sharing.export_event(event)?))
            }
            _ => None,
        };
        backend.synchronize_device(device)?;
        let unregistered = can.host_register.then(kept_bytes);
        let (is_timed, describes) = (can.event_timing, can.foreign_memory);
        Ok(Self {
            device,
            stream,
            event,
            is_timed,
            block,
            pinned,
            unregistered,
            registered,
            raw,
            recorded,
            mapped,
            multipliers,
            shared,
            shared_event,
            describes,
        })
    }

    fn record(backend: &dyn Backend, stream: StreamId) -> Result<Recorded> {
        backend.begin_capture(stream, CaptureMode::ThreadLocal)?;
        let graph = crate::device::end_capture(backend, stream)?;
        Ok(Recorded { graph, executable: backend.instantiate_graph(graph)? })
    }

    fn map(backend: &dyn Backend, device: u32) -> Result<Mapped> {
        let piece = backend.capabilities(device)?.mapped_memory_granularity;
        let options = PhysicalMemoryOptions::new(piece);
        let addresses = backend.reserve_addresses(device, 2 * piece)?;
        let memory = backend.create_memory(device, &options)?;
        // SAFETY: the addresses were reserved here, and nothing uses them.
        unsafe {
            backend.map_memory(device, addresses, memory)?;
            backend.set_memory_access(device, addresses, piece, device)?;
        }
        Ok(Mapped { addresses, piece, other: backend.create_memory(device, &options)? })
    }

    fn multiplier(backend: &dyn Backend, stream: StreamId, kind: BlasKind) -> Result<Multiplier> {
        let can_multiply = backend.capabilities(stream.device())?.gemm_f32;
        let mut handle = backend.create_blas_handle(stream.device(), &BlasOptions::new(kind))?;
        let can_reset = handle.reset().is_ok();
        handle.set_stream(stream)?;
        let options = PlanOptions::new(SHAPE, Epilogue::None, 0);
        let has_plan = kind == BlasKind::Lt && can_multiply;
        let plan = if has_plan { Some((handle.create_plan(&options)?, options)) } else { None };
        Ok(Multiplier { handle, plan, can_multiply: can_multiply && kind == BlasKind::Blas, can_reset })
    }
}

const SHAPE: GemmShape = GemmShape::new(DataType::F32, 4, 4, 4);

/// A call with its name.
type Call<'a> = (&'static str, Box<dyn FnMut() -> Result<()> + 'a>);

/// Returns every call that the device has, those that give objects back last.
fn calls<'a>(backend: &'a dyn Backend, objects: &'a mut Objects) -> Vec<Call<'a>> {
    let Objects { device, stream, event, block, pinned, .. } = *objects;
    let host: Arc<dyn HostAllocator> = backend.host_allocator();
    let sharing: Option<Arc<dyn IpcSharing>> = backend.ipc_sharing();
    let on_device = |bytes| Location::Device { device, ptr: block.offset(bytes) };
    let copy = MemoryCopy::new(on_device(0), Location::Host(pinned), 64);
    let rows = MemoryCopy2d::new(on_device(0), Location::Host(pinned), CopyShape::new(16, 4).with_dst_pitch(32));
    let fill = MemoryFill::new(device, block, FillPattern::U8(3), 64);
    let mut calls: Vec<Call<'a>> = vec![
        ("device_info", Box::new(move || backend.device_info(device).map(drop))),
        ("capabilities", Box::new(move || backend.capabilities(device).map(drop))),
        ("memory_info", Box::new(move || backend.memory_info(device).map(drop))),
        ("create_stream", Box::new(move || backend.create_stream(device, &StreamOptions::new()).map(drop))),
        ("query_stream", Box::new(move || backend.query_stream(stream).map(drop))),
        ("synchronize_stream", Box::new(move || backend.synchronize_stream(stream))),
        ("synchronize_device", Box::new(move || backend.synchronize_device(device))),
        ("stream_wait_event", Box::new(move || backend.stream_wait_event(stream, event))),
        ("create_event", Box::new(move || backend.create_event(device, &EventOptions::new()).map(drop))),
        ("record_event", Box::new(move || backend.record_event(event, stream))),
        ("query_event", Box::new(move || backend.query_event(event).map(drop))),
        ("synchronize_event", Box::new(move || backend.synchronize_event(event))),
        ("allocate", Box::new(move || backend.allocate(device, &AllocateOptions::new(256)).map(drop))),
        // SAFETY: the memory stays until the process ends, and no other work uses it. The next calls are alike.
        ("copy", Box::new(move || unsafe { backend.copy(&copy, stream) })),
        // SAFETY: as above.
        ("copy_2d", Box::new(move || unsafe { backend.copy_2d(&rows, stream) })),
        // SAFETY: as above.
        ("fill", Box::new(move || unsafe { backend.fill(&fill, stream) })),
        (
            "create_blas_handle",
            Box::new(move || backend.create_blas_handle(device, &BlasOptions::new(BlasKind::Blas)).map(drop)),
        ),
    ];
    let allocator = host.clone();
    calls.push(("host_allocate", Box::new(move || allocator.allocate(64, &HostOptions::new()).map(drop))));
    let allocator = host.clone();
    calls.push(("host_device_address", Box::new(move || allocator.device_address(pinned, device).map(drop))));
    if objects.is_timed {
        calls.push(("event_elapsed_ns", Box::new(move || backend.event_elapsed_ns(event, event).map(drop))));
    }
    if objects.describes {
        calls.push(("describe_memory", Box::new(move || backend.describe_memory(device, block).map(drop))));
    }
    if let Some((raw_stream, raw_event)) = objects.raw {
        calls.push(("raw_stream", Box::new(move || backend.raw_stream(stream).map(drop))));
        calls.push(("raw_event", Box::new(move || backend.raw_event(event).map(drop))));
        // SAFETY: the stream and the event stay until the process ends.
        let wrap = move || unsafe { backend.stream_from_raw(device, raw_stream) }.map(drop);
        calls.push(("stream_from_raw", Box::new(wrap)));
        // SAFETY: as above.
        let wrap = move || unsafe { backend.event_from_raw(device, raw_event) }.map(drop);
        calls.push(("event_from_raw", Box::new(wrap)));
    }
    if let (Some(unregistered), Some(registered)) = (objects.unregistered, objects.registered) {
        let allocator = host.clone();
        // SAFETY: the bytes stay until the process ends, and no work uses them. The next call is alike.
        let register = move || unsafe { allocator.register(unregistered, BYTES, &HostOptions::new()) };
        calls.push(("host_register", Box::new(register)));
        let allocator = host.clone();
        // SAFETY: as above.
        calls.push(("host_unregister", Box::new(move || unsafe { allocator.unregister(registered) })));
    }
    if let Some(Recorded { graph, executable }) = objects.recorded {
        calls.push(("is_capturing", Box::new(move || backend.is_capturing(stream).map(drop))));
        calls.push(("begin_capture", Box::new(move || backend.begin_capture(stream, CaptureMode::ThreadLocal))));
        calls.push(("end_capture", Box::new(move || crate::device::end_capture(backend, stream).map(drop))));
        calls.push(("instantiate_graph", Box::new(move || backend.instantiate_graph(graph).map(drop))));
        // SAFETY: the graph has recorded nothing.
        calls.push(("launch_graph", Box::new(move || unsafe { backend.launch_graph(executable, stream) })));
        calls.push(("destroy_graph_exec", Box::new(move || backend.destroy_graph_exec(executable))));
        calls.push(("destroy_graph", Box::new(move || backend.destroy_graph(graph))));
    }
    if let Some(Mapped { addresses, piece, other }) = objects.mapped {
        let options = PhysicalMemoryOptions::new(piece);
        let free = addresses.offset(piece);
        calls.push(("reserve_addresses", Box::new(move || backend.reserve_addresses(device, piece).map(drop))));
        calls.push(("create_memory", Box::new(move || backend.create_memory(device, &options).map(drop))));
        // SAFETY: the addresses were reserved for these calls, and no work uses them. The next calls are alike.
        calls.push(("map_memory", Box::new(move || unsafe { backend.map_memory(device, free, other) })));
        // SAFETY: as above.
        let access = move || unsafe { backend.set_memory_access(device, addresses, piece, device) };
        calls.push(("set_memory_access", Box::new(access)));
        // SAFETY: as above.
        calls.push(("unmap_memory", Box::new(move || unsafe { backend.unmap_memory(device, addresses, piece) })));
        // SAFETY: as above.
        let give_back = move || unsafe { backend.free_addresses(device, addresses, 2 * piece) };
        calls.push(("free_addresses", Box::new(give_back)));
        calls.push(("destroy_memory", Box::new(move || backend.destroy_memory(other))));
    }
    if let (Some(sharing), Some((ptr, transport, handle))) = (&sharing, &objects.shared) {
        let (ptr, transport) = (*ptr, *transport);
        let (exports, opens, closes, imports) = (sharing.clone(), sharing.clone(), sharing.clone(), sharing.clone());
        // SAFETY: the block stays until the process ends.
        let export = move || unsafe { exports.export_memory(device, ptr, transport) }.map(drop);
        calls.push(("export_memory", Box::new(export)));
        let opened = handle.clone();
        calls.push(("open_memory", Box::new(move || opens.open_memory(device, &opened).map(drop))));
        // SAFETY: no work uses the block, which is no mapping.
        calls.push(("close_memory", Box::new(move || unsafe { closes.close_memory(device, ptr) })));
        if objects.describes && objects.mapped.is_some() {
            let imported = handle.clone();
            calls.push(("import_memory", Box::new(move || imports.import_memory(device, &imported).map(drop))));
        }
    }
    if let (Some(sharing), Some((shared, handle))) = (&sharing, &objects.shared_event) {
        let (exports, opens, shared, handle) = (sharing.clone(), sharing.clone(), *shared, handle.clone());
        calls.push(("export_event", Box::new(move || exports.export_event(shared).map(drop))));
        calls.push(("open_event", Box::new(move || opens.open_event(device, &handle).map(drop))));
    }
    for multiplier in &mut objects.multipliers {
        calls.extend(calls_of_handle(multiplier, stream, block));
    }
    // SAFETY: as above. If a call succeeds against the promise, the case fails.
    calls.push(("free", Box::new(move || unsafe { backend.free(device, block, None) })));
    // SAFETY: as above.
    calls.push(("host_free", Box::new(move || unsafe { host.free(pinned) })));
    calls.push(("destroy_event", Box::new(move || backend.destroy_event(event))));
    calls.push(("destroy_stream", Box::new(move || backend.destroy_stream(stream))));
    calls
}

/// Returns every call of a handle.
fn calls_of_handle<'a>(multiplier: &'a mut Multiplier, stream: StreamId, block: DevicePtr) -> Vec<Call<'a>> {
    let Multiplier { handle, plan, can_multiply, can_reset } = multiplier;
    let handle = Rc::new(RefCell::new(handle));
    let on = |call: fn(&mut dyn BlasHandle) -> Result<()>| {
        let handle = Rc::clone(&handle);
        move || call(&mut ***handle.borrow_mut())
    };
    let bind = Rc::clone(&handle);
    let mut calls: Vec<Call<'a>> = vec![
        ("set_stream", Box::new(move || bind.borrow_mut().set_stream(stream))),
        // SAFETY: it binds nothing.
        ("set_workspace", Box::new(on(|handle| unsafe { handle.set_workspace(None) }))),
        ("set_math_mode", Box::new(on(|handle| handle.set_math_mode(MathMode::Default)))),
        ("set_atomics_mode", Box::new(on(|handle| handle.set_atomics_mode(AtomicsMode::NotAllowed)))),
    ];
    if *can_reset {
        calls.push(("reset", Box::new(on(|handle| handle.reset()))));
    }
    let [a, b, c] = [0, 1024, 2048].map(|offset| block.offset(offset));
    if *can_multiply {
        let (multiply, gemm) = (Rc::clone(&handle), Gemm::new(SHAPE, a, b, c));
        // SAFETY: the matrices lie in the block, apart. The block stays until the process ends. The run of a plan is alike.
        calls.push(("gemm", Box::new(move || unsafe { multiply.borrow_mut().gemm(&gemm) })));
    }
    if let Some((plan, options)) = *plan {
        let (create, run, destroy) = (Rc::clone(&handle), Rc::clone(&handle), Rc::clone(&handle));
        let arguments = PlanArguments::new(a, b, c, None);
        calls.push(("create_plan", Box::new(move || create.borrow_mut().create_plan(&options).map(drop))));
        // SAFETY: as above.
        calls.push(("run_plan", Box::new(move || unsafe { run.borrow_mut().run_plan(plan, &arguments) })));
        calls.push(("destroy_plan", Box::new(move || destroy.borrow_mut().destroy_plan(plan))));
    }
    calls.push(("destroy", Box::new(on(|handle| handle.destroy()))));
    calls
}

/// Makes each call. Returns the first that is not refused because the process exits, with its answer.
pub(super) fn not_refused(backend: &dyn Backend, objects: &mut Objects) -> Option<String> {
    calls(backend, objects).into_iter().find_map(|(name, mut call)| match call() {
        Err(error) if error.kind() == ErrorKind::ShuttingDown => None,
        Err(error) => Some(format!("{name} gave `{error}`")),
        Ok(()) => Some(format!("{name} succeeded")),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use highwater_mock::{MockGpu, MockOptions};

    use super::*;

    macro_rules! names {
        ($($trait:ident { $($variant:ident: $fn:tt $method:ident $arguments:tt -> $answer:ty;)* })*) => {
            [$((stringify!($trait), vec![$(stringify!($method)),*])),*]
        };
    }

    #[test]
    fn every_operation_is_called_at_an_exit() {
        let backend = MockGpu::open(MockOptions::new()).unwrap();
        let mut objects = Objects::new(&*backend, 0).unwrap();
        let listed: BTreeSet<String> =
            calls(&*backend, &mut objects).into_iter().map(|(name, _)| name.to_owned()).collect();
        let operations = highwater_hal::for_each_operation!(names);
        let expected: BTreeSet<String> = operations
            .into_iter()
            .flat_map(|(of, methods)| {
                let prefix = if of == "HostAllocator" { "host_" } else { "" };
                methods.into_iter().map(move |method| format!("{prefix}{method}"))
            })
            .collect();
        assert_eq!(listed, expected);
        // The process does not exit, so the first call succeeds.
        assert_eq!(not_refused(&*backend, &mut objects).unwrap(), "device_info succeeded");
    }
}
