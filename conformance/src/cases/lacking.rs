//! Absent abilities: a call that needs one gives `Unsupported` without effect. These cases run if a capability is false.

use highwater_hal::numbers::Coded;
use highwater_hal::{
    AllocateOptions, AtomicsMode, Backend, BlasKind, BlasOptions, CaptureMode, DataType, DeviceMemoryKind, DevicePtr,
    EventOptions, GemmShape, GraphExecId, GraphId, HostMemoryKind, HostOptions, IdParts, MathMode, ObjectId,
    PhysicalMemoryId, PhysicalMemoryOptions, PlanOptions, StreamId, StreamOptions, StreamPriority, StridedBatch,
    Transport, Workspace,
};

use super::ids::forge;
use crate::case::{CaseResult, Failure, cases, check, check_eq, check_error};
use crate::device::{Addresses, Block, DEVICE, Event, Handle, Pages, Stream};
use crate::matrix::Product;

cases! {
    group "lacking";
    gemm_f32: ["backend.lacking"] needs [lacks::gemm_f32] => product_is_refused(GemmShape::new(DataType::F32, 8, 8, 8));
    gemm_f64: ["backend.lacking"] needs [lacks::gemm_f64] => product_is_refused(GemmShape::new(DataType::F64, 8, 8, 8));
    gemm_f16: ["backend.lacking"] needs [lacks::gemm_f16] => product_is_refused(GemmShape::new(DataType::F16, 8, 8, 8));
    gemm_bf16: ["backend.lacking"] needs [lacks::gemm_bf16] => product_is_refused(GemmShape::new(DataType::Bf16, 8, 8, 8));
    gemm_mixed: ["backend.lacking"] needs [lacks::gemm_mixed];
    tf32: ["backend.lacking"] needs [lacks::tf32];
    atomics_mode: ["backend.lacking"] needs [lacks::atomics_mode];
    blas_workspace: ["backend.lacking"] needs [lacks::blas_workspace];
    strided_batch: ["backend.lacking"] needs [lacks::strided_batch, has::gemm_f32];
    lt_plans: ["backend.lacking"] needs [lacks::lt_plans];
    what_the_other_kind_of_handle_does: ["blas.kind"] needs [has::lt_plans, has::gemm_f32];
    capture: ["backend.lacking"] needs [lacks::capture];
    stream_ordered_memory: ["backend.lacking"] needs [lacks::stream_ordered_memory];
    shareable_memory: ["backend.lacking"] needs [lacks::shareable_memory];
    interprocess_events: ["backend.lacking"] needs [lacks::interprocess_events];
    event_timing: ["backend.lacking"] needs [lacks::event_timing];
    stream_priority: ["backend.lacking"] needs [lacks::stream_priority];
    peer_copy: ["backend.lacking"] needs [TWO_DEVICES, lacks::peer_copy];
    host_register: ["backend.lacking"] needs [lacks::host_register];
    host_register_read_only: ["backend.lacking"] needs [lacks::host_register_read_only];
    write_combined: ["backend.lacking"] needs [lacks::write_combined];
    legacy_default_stream: ["backend.lacking"] needs [lacks::legacy_default_stream];
    per_thread_default_stream: ["backend.lacking"] needs [lacks::per_thread_default_stream];
    foreign_objects: ["backend.lacking"] needs [lacks::foreign_objects];
    foreign_memory: ["backend.lacking"] needs [lacks::foreign_memory];
    mapped_memory: ["backend.lacking"] needs [lacks::mapped_memory];
    mapped_memory_rdma: ["backend.lacking"] needs [lacks::mapped_memory_rdma];
}

/// Runs the case and checks that the number of objects is unchanged.
fn changing_nothing(backend: &dyn Backend, ask: impl FnOnce() -> CaseResult) -> CaseResult {
    let before = backend.live_objects();
    ask()?;
    check_eq!(backend.live_objects(), before, "living objects after a call that needs an absent ability");
    Ok(())
}

/// Checks that a product is refused and writes nothing.
fn product_is_refused(backend: &dyn Backend, shape: GemmShape) -> CaseResult {
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    let product = Product::new(shape, 1);
    let placed = product.place(backend)?;
    let before = placed.c.read()?;
    check_error!(placed.gemm(&product, &mut handle), Unsupported, "gemm of {shape:?}");
    stream.synchronize()?;
    check!(placed.c.read()? == before, "a refused product wrote to C");
    if backend.capabilities(DEVICE)?.lt_plans {
        let mut lt = Handle::new(backend, BlasKind::Lt, &stream)?;
        let made = lt.raw_mut().create_plan(&PlanOptions::new(shape, highwater_hal::Epilogue::None, 0));
        check_error!(made, Unsupported, "create_plan for {shape:?}");
    }
    Ok(())
}

fn gemm_mixed(backend: &dyn Backend) -> CaseResult {
    for factor in [DataType::F16, DataType::Bf16] {
        let shape = GemmShape::new(factor, 8, 8, 8).with_output(DataType::F32);
        product_is_refused(backend, shape)?;
    }
    Ok(())
}

fn tf32(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    check_error!(handle.raw_mut().set_math_mode(MathMode::Tf32), Unsupported, "set_math_mode to TF32");
    handle.raw_mut().set_math_mode(MathMode::Default)?;
    if backend.capabilities(DEVICE)?.gemm_f32 {
        // The handle keeps full precision.
        Product::new(GemmShape::new(DataType::F32, 16, 16, 16), 2).prove(backend, &mut handle, &stream)?;
    }
    if backend.capabilities(DEVICE)?.lt_plans {
        let shape = GemmShape::new(DataType::F32, 16, 16, 16);
        let options = PlanOptions::new(shape, highwater_hal::Epilogue::None, 0).with_math_mode(MathMode::Tf32);
        let mut lt = Handle::new(backend, BlasKind::Lt, &stream)?;
        check_error!(lt.raw_mut().create_plan(&options), Unsupported, "create_plan with TF32");
    }
    Ok(())
}

fn atomics_mode(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    check_error!(handle.raw_mut().set_atomics_mode(AtomicsMode::Allowed), Unsupported, "set_atomics_mode to allowed");
    handle.raw_mut().set_atomics_mode(AtomicsMode::NotAllowed)?;
    let can = backend.capabilities(DEVICE)?;
    if can.lt_plans && can.gemm_f32 {
        let shape = GemmShape::new(DataType::F32, 16, 16, 16);
        let options = PlanOptions::new(shape, highwater_hal::Epilogue::None, 0);
        let mut lt = Handle::new(backend, BlasKind::Lt, &stream)?;
        check_error!(lt.raw_mut().set_atomics_mode(AtomicsMode::Allowed), Unsupported, "set_atomics_mode of kind Lt");
        let made = lt.raw_mut().create_plan(&options.with_atomics_mode(AtomicsMode::Allowed));
        check_error!(made, Unsupported, "create_plan with atomics");
        lt.raw_mut().create_plan(&options)?;
    }
    Ok(())
}

fn blas_workspace(backend: &dyn Backend) -> CaseResult {
    let alignment = backend.capabilities(DEVICE)?.workspace_alignment;
    let memory = Block::filled(backend, (1 << 20) + alignment, 0x42)?;
    let aligned = memory.ptr().get().next_multiple_of(alignment as u64);
    let workspace = Workspace { ptr: DevicePtr::new(aligned), bytes: 1 << 20 };
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    // SAFETY: inside `memory`, which lives longer than the handle and is used by no other.
    let bound = unsafe { handle.raw_mut().set_workspace(Some(workspace)) };
    check_error!(bound, Unsupported, "set_workspace");
    // SAFETY: binds nothing.
    unsafe { handle.raw_mut().set_workspace(None)? };
    if backend.capabilities(DEVICE)?.gemm_f32 {
        Product::new(GemmShape::new(DataType::F32, 33, 34, 35), 4).prove(backend, &mut handle, &stream)?;
        check!(memory.read()?.iter().all(|&byte| byte == 0x42), "products wrote to a workspace that was refused");
    }
    Ok(())
}

fn strided_batch(backend: &dyn Backend) -> CaseResult {
    let batch = StridedBatch { count: 3, stride_a: 64, stride_b: 64, stride_c: 64 };
    product_is_refused(backend, GemmShape::new(DataType::F32, 8, 8, 8).with_batch(batch))
}

fn lt_plans(backend: &dyn Backend) -> CaseResult {
    changing_nothing(backend, || {
        let made = backend.create_blas_handle(DEVICE, &BlasOptions::new(BlasKind::Lt));
        check_error!(made, Unsupported, "create_blas_handle of kind Lt");
        Ok(())
    })?;
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    plan_is_refused(&mut handle)
}

fn plan_is_refused(handle: &mut Handle<'_>) -> CaseResult {
    let options = PlanOptions::new(GemmShape::new(DataType::F32, 8, 8, 8), highwater_hal::Epilogue::None, 0);
    check_error!(handle.raw_mut().create_plan(&options), Unsupported, "create_plan of a handle of kind Blas");
    Ok(())
}

fn what_the_other_kind_of_handle_does(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    plan_is_refused(&mut Handle::new(backend, BlasKind::Blas, &stream)?)?;
    let mut lt = Handle::new(backend, BlasKind::Lt, &stream)?;
    let product = Product::new(GemmShape::new(DataType::F32, 8, 8, 8), 3);
    let placed = product.place(backend)?;
    check_error!(placed.gemm(&product, &mut lt), Unsupported, "gemm of a handle of kind Lt");
    Ok(())
}

fn capture(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let block = Block::filled(backend, 4096, 0)?;
    changing_nothing(backend, || {
        for &mode in CaptureMode::ALL {
            check_error!(backend.begin_capture(stream.id(), mode), Unsupported, "begin_capture");
        }
        check_error!(backend.is_capturing(stream.id()), Unsupported, "is_capturing");
        check_error!(crate::device::end_capture(backend, stream.id()), Unsupported, "end_capture");
        let parts = IdParts { slot: 1 << 30, ..stream.id().parts() };
        let (graph, exec) = (forge::<GraphId>(parts), forge::<GraphExecId>(parts));
        check_error!(backend.instantiate_graph(graph), Unsupported, "instantiate_graph");
        check_error!(backend.destroy_graph(graph), Unsupported, "destroy_graph");
        check_error!(backend.destroy_graph_exec(exec), Unsupported, "destroy_graph_exec");
        // SAFETY: there is no graph, so it has recorded no memory.
        check_error!(unsafe { backend.launch_graph(exec, stream.id()) }, Unsupported, "launch_graph");
        Ok(())
    })?;
    // Later work is executed, not recorded.
    stream.set(block.all(), 1)?;
    stream.synchronize()?;
    check!(block.read()? == [1; 4096], "work after a refused capture was not executed");
    Ok(())
}

fn stream_ordered_memory(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    changing_nothing(backend, || {
        let options = AllocateOptions::new(256).with_kind(DeviceMemoryKind::StreamOrdered(stream.id()));
        check_error!(backend.allocate(DEVICE, &options), Unsupported, "allocate of stream-ordered memory");
        Ok(())
    })
}

fn shareable_memory(backend: &dyn Backend) -> CaseResult {
    changing_nothing(backend, || {
        for &transport in Transport::ALL {
            let options = AllocateOptions::new(256).with_kind(DeviceMemoryKind::Shareable(transport));
            check_error!(backend.allocate(DEVICE, &options), Unsupported, "allocate of memory for {transport:?}");
        }
        Ok(())
    })
}

fn interprocess_events(backend: &dyn Backend) -> CaseResult {
    changing_nothing(backend, || {
        let options = EventOptions::new().with_interprocess();
        check_error!(backend.create_event(DEVICE, &options), Unsupported, "create_event for other processes");
        Ok(())
    })
}

fn event_timing(backend: &dyn Backend) -> CaseResult {
    let (stream, event) = (Stream::new(backend)?, Event::new(backend)?);
    stream.record(&event)?;
    stream.synchronize()?;
    changing_nothing(backend, || {
        let options = EventOptions::new().with_timing();
        check_error!(backend.create_event(DEVICE, &options), Unsupported, "create_event with timing");
        check_error!(backend.event_elapsed_ns(event.id(), event.id()), Unsupported, "event_elapsed_ns");
        Ok(())
    })
}

fn stream_priority(backend: &dyn Backend) -> CaseResult {
    changing_nothing(backend, || {
        for priority in [StreamPriority::Low, StreamPriority::High] {
            let options = StreamOptions::new().with_priority(priority);
            check_error!(
                backend.create_stream(DEVICE, &options),
                Unsupported,
                "create_stream of {priority:?} priority"
            );
        }
        Ok(())
    })
}

fn peer_copy(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::on(backend, 0)?;
    let (near, far) = (Block::filled_on(backend, 0, 256, 1)?, Block::filled_on(backend, 1, 256, 2)?);
    check_error!(stream.copy(far.all(), near.all()), Unsupported, "copy to another device");
    check_error!(stream.copy(near.all(), far.all()), Unsupported, "copy from another device");
    stream.synchronize()?;
    check!(near.read()? == [1; 256] && far.read()? == [2; 256], "a refused copy was executed");
    let capabilities = backend.capabilities(0)?;
    if capabilities.mapped_memory {
        let bytes = capabilities.mapped_memory_granularity;
        let addresses = Addresses::new(backend, 0, bytes)?;
        // Its own device has access all the same.
        let _memory = addresses.fill_in(0..bytes)?;
        check_error!(addresses.give_access(0..bytes, 1), Unsupported, "access of another device to mapped memory");
    }
    Ok(())
}

fn host_register(backend: &dyn Backend) -> CaseResult {
    let pages = Pages::new(1);
    changing_nothing(backend, || {
        let allocator = backend.host_allocator();
        // SAFETY: the pages live until after the calls, and no device uses them.
        let (registered, unregistered) = unsafe {
            (allocator.register(pages.ptr(), pages.len(), &HostOptions::new()), allocator.unregister(pages.ptr()))
        };
        check_error!(registered, Unsupported, "register");
        check_error!(unregistered, Unsupported, "unregister");
        Ok(())
    })
}

fn host_register_read_only(backend: &dyn Backend) -> CaseResult {
    let pages = Pages::new(1);
    changing_nothing(backend, || {
        let options = HostOptions::new().with_read_only(true);
        // SAFETY: the pages live until after the call, and no device uses them.
        let registered = unsafe { backend.host_allocator().register(pages.ptr(), pages.len(), &options) };
        check_error!(registered, Unsupported, "register of read-only memory");
        Ok(())
    })
}

fn write_combined(backend: &dyn Backend) -> CaseResult {
    changing_nothing(backend, || {
        let options = HostOptions::new().with_kind(HostMemoryKind::WriteCombined);
        let allocated = backend.host_allocator().allocate(4096, &options);
        check_error!(allocated, Unsupported, "allocate of write-combined memory");
        let pages = Pages::new(1);
        // SAFETY: the pages live until after the call. If it succeeds against the promise, the case fails.
        let registered = unsafe { backend.host_allocator().register(pages.ptr(), 4096, &options) };
        if registered.is_ok() {
            // SAFETY: no work uses the pages.
            let _ = unsafe { backend.host_allocator().unregister(pages.ptr()) };
        }
        check_error!(registered, Unsupported, "register of write-combined memory");
        Ok(())
    })
}

/// Checks that every call that takes a stream refuses a default stream.
fn default_stream_is_refused(backend: &dyn Backend, id: StreamId) -> CaseResult {
    let (event, block) = (Event::new(backend)?, Block::filled(backend, 256, 1)?);
    let default = Stream::borrowed(backend, id);
    changing_nothing(backend, || {
        check_error!(default.query(), Unsupported, "query_stream of a default stream");
        check_error!(default.synchronize(), Unsupported, "synchronize_stream of a default stream");
        check_error!(default.set(block.all(), 2), Unsupported, "fill on a default stream");
        check_error!(default.record(&event), Unsupported, "record_event on a default stream");
        check_error!(default.wait(&event), Unsupported, "stream_wait_event of a default stream");
        let copied = default.copy(block.span(0..128), block.span(128..256));
        check_error!(copied, Unsupported, "copy on a default stream");
        if backend.capabilities(DEVICE)?.stream_ordered_memory {
            let options = AllocateOptions::new(256).with_kind(DeviceMemoryKind::StreamOrdered(id));
            check_error!(backend.allocate(DEVICE, &options), Unsupported, "allocate on a default stream");
        }
        Ok(())
    })?;
    check!(block.read()? == [1; 256], "a refused fill was executed");
    Ok(())
}

fn legacy_default_stream(backend: &dyn Backend) -> CaseResult {
    default_stream_is_refused(backend, StreamId::legacy_default(backend.identity().tag, DEVICE))
}

fn per_thread_default_stream(backend: &dyn Backend) -> CaseResult {
    default_stream_is_refused(backend, StreamId::per_thread_default(backend.identity().tag, DEVICE))
}

fn foreign_memory(backend: &dyn Backend) -> CaseResult {
    let block = Block::filled(backend, 4096, 1)?;
    check_error!(backend.describe_memory(DEVICE, block.ptr()), Unsupported, "describe_memory");
    Ok(())
}

fn foreign_objects(backend: &dyn Backend) -> CaseResult {
    let (stream, event) = (Stream::new(backend)?, Event::new(backend)?);
    changing_nothing(backend, || {
        check_error!(backend.raw_stream(stream.id()), Unsupported, "raw_stream");
        check_error!(backend.raw_event(event.id()), Unsupported, "raw_event");
        // SAFETY: no stream and no event, but the capability is false: the call is refused before it looks at them.
        let (wrapped_stream, wrapped_event) =
            unsafe { (backend.stream_from_raw(DEVICE, 0), backend.event_from_raw(DEVICE, 0)) };
        check_error!(wrapped_stream, Unsupported, "stream_from_raw");
        check_error!(wrapped_event, Unsupported, "event_from_raw");
        Ok::<(), Failure>(())
    })
}

fn mapped_memory(backend: &dyn Backend) -> CaseResult {
    const BYTES: usize = 2 << 20;
    let (stream, ptr) = (Stream::new(backend)?, DevicePtr::new(BYTES as u64));
    check_eq!(backend.capabilities(DEVICE)?.mapped_memory_granularity, 0, "the granularity without mapped memory");
    changing_nothing(backend, || {
        check_error!(backend.reserve_addresses(DEVICE, BYTES), Unsupported, "reserve_addresses");
        check_error!(backend.create_memory(DEVICE, &PhysicalMemoryOptions::new(BYTES)), Unsupported, "create_memory");
        let memory = forge::<PhysicalMemoryId>(IdParts { slot: 1 << 30, ..stream.id().parts() });
        check_error!(backend.destroy_memory(memory), Unsupported, "destroy_memory");
        // SAFETY: the capability is false, so the calls are refused before they look at the addresses.
        let refused = unsafe {
            [
                ("map_memory", backend.map_memory(DEVICE, ptr, memory)),
                ("set_memory_access", backend.set_memory_access(DEVICE, ptr, BYTES, DEVICE)),
                ("unmap_memory", backend.unmap_memory(DEVICE, ptr, BYTES)),
                ("free_addresses", backend.free_addresses(DEVICE, ptr, BYTES)),
            ]
        };
        for (operation, answer) in refused {
            check_error!(answer, Unsupported, "{operation}");
        }
        Ok(())
    })
}

fn mapped_memory_rdma(backend: &dyn Backend) -> CaseResult {
    let bytes = backend.capabilities(DEVICE)?.mapped_memory_granularity.max(1);
    changing_nothing(backend, || {
        let options = PhysicalMemoryOptions::new(bytes).with_rdma();
        check_error!(backend.create_memory(DEVICE, &options), Unsupported, "create_memory for direct access");
        Ok(())
    })
}
