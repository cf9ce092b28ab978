//! A child that is forked after the backend was opened. Every method of the four traits is called there.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use highwater_hal::numbers::Coded;
use highwater_hal::{
    AllocateOptions, AtomicsMode, Backend, BackendTag, BlasKind, BlasOptions, CaptureMode, CopyShape, DataType,
    DeviceMemoryKind, DevicePtr, Epilogue, Error, ErrorKind, EventId, EventOptions, FillPattern, Gemm, GemmShape,
    GraphExecId, GraphId, HostOptions, IdParts, Location, MathMode, MemoryCopy, MemoryCopy2d, MemoryFill, ObjectId,
    PhysicalMemoryOptions, PlanArguments, PlanId, PlanOptions, Result, StreamId, StreamOptions, StridedBatch,
    Transport, Workspace,
};

use super::blas::kinds;
use super::ids::forge;
use super::sharing::transports;
use crate::case::{CaseResult, Failure, cases, check};
use crate::device::{
    Addresses, Block, Capture, DEVICE, Event, Pages, PhysicalMemory, Pinned, Registered, Stream, close_unknown, sharing,
};

cases! {
    group "fork";
    calls_in_a_forked_child_are_refused: ["backend.forked"];
    calls_of_handles_in_a_forked_child_are_refused: ["backend.forked"];
    calls_about_host_memory_in_a_forked_child_are_refused: ["backend.forked"];
    calls_about_registered_memory_in_a_forked_child_are_refused: ["backend.forked"] needs [has::host_register];
    calls_about_mapped_memory_in_a_forked_child_are_refused: ["backend.forked"] needs [has::mapped_memory];
    calls_about_sharing_in_a_forked_child_are_refused: ["backend.forked"] needs [has::shareable_memory];
    calls_about_shared_events_in_a_forked_child_are_refused: ["backend.forked"] needs [has::interprocess_events];
    calls_about_captures_in_a_forked_child_are_refused: ["backend.forked"] needs [has::capture];
    answers_that_are_known_in_a_forked_child_are_refused: ["backend.forked"];
    bad_ids_in_a_forked_child_are_refused_as_forked: ["backend.forked"];
    bad_ordinals_in_a_forked_child_are_refused_as_forked: ["backend.forked"];
    empty_work_in_a_forked_child_is_refused: ["backend.forked"];
    odd_products_in_a_forked_child_are_refused: ["backend.forked"] needs [has::gemm_f32];
    bad_graphs_in_a_forked_child_are_refused_as_forked: ["backend.forked"] needs [has::capture];
    bad_mapped_memory_in_a_forked_child_is_refused_as_forked: ["backend.forked"] needs [has::mapped_memory];
    bad_handles_of_memory_in_a_forked_child_are_refused_as_forked: ["backend.forked"] needs [has::shareable_memory];
}

/// The time limit of all calls of a child.
const PATIENCE: Duration = Duration::from_secs(5);

/// A call of the child, with its name.
type Call<'a> = (&'static str, Box<dyn FnMut() -> Result<()> + 'a>);

/// Makes the calls in a child that is forked here, and checks that each is refused.
fn refused_in_a_child(mut calls: Vec<Call<'_>>) -> CaseResult {
    const PANICKED: usize = 100;
    // SAFETY: the child calls the backend, which is to refuse before it takes a lock, and ends with `_exit`: no
    // destructor and no exit handler of the parent runs twice. What it allocates meanwhile goes through an allocator
    // that the C library makes usable in children of threaded processes.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let first_wrong = catch_unwind(AssertUnwindSafe(|| {
            let is_right = |error: Error| error.kind() == ErrorKind::Forked && !error.message().is_empty();
            let refused = |(_, call): &mut Call<'_>| call().is_err_and(is_right);
            calls.iter_mut().position(|call| !refused(call)).map_or(0, |wrong| wrong + 1)
        }));
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(first_wrong.unwrap_or(PANICKED) as i32) };
    }
    check!(child > 0, "the process cannot be forked: {}", std::io::Error::last_os_error());
    let status = wait_for(child)?;
    check!(libc::WIFEXITED(status), "the child ended by signal {}", libc::WTERMSIG(status));
    match libc::WEXITSTATUS(status) as usize {
        0 => Ok(()),
        PANICKED => Err(Failure::new("a call in a forked child panicked")),
        wrong => {
            let name = calls.get(wrong - 1).map_or("an unknown call", |(name, _)| *name);
            Err(Failure::new(format!("{name} in a forked child did not give `{}` with a message", ErrorKind::Forked)))
        }
    }
}

fn calls_in_a_forked_child_are_refused(backend: &dyn Backend) -> CaseResult {
    let can = backend.capabilities(DEVICE)?;
    let options = EventOptions::new();
    let options = if can.event_timing { options.with_timing() } else { options };
    let (stream, event) = (Stream::new(backend)?, Event::with_options(backend, DEVICE, &options)?);
    stream.record(&event)?;
    let (block, pinned) = (Block::filled(backend, 4096, 1)?, Pinned::holding(backend, &[1; 4096])?);
    let device = Location::Device { device: DEVICE, ptr: block.ptr() };
    let copy = MemoryCopy::new(device, Location::Host(pinned.ptr()), 64);
    let rows = MemoryCopy2d::new(device, Location::Host(pinned.ptr()), CopyShape::new(16, 4).with_dst_pitch(32));
    let fill = MemoryFill::new(DEVICE, block.ptr(), FillPattern::U8(3), 64);
    let mut calls: Vec<Call<'_>> = vec![
        ("device_info", Box::new(|| backend.device_info(DEVICE).map(drop))),
        ("capabilities", Box::new(|| backend.capabilities(DEVICE).map(drop))),
        ("memory_info", Box::new(|| backend.memory_info(DEVICE).map(drop))),
        ("create_stream", Box::new(|| backend.create_stream(DEVICE, &StreamOptions::new()).map(drop))),
        ("query_stream", Box::new(|| stream.query().map(drop))),
        ("synchronize_stream", Box::new(|| stream.synchronize())),
        ("synchronize_device", Box::new(|| backend.synchronize_device(DEVICE))),
        ("stream_wait_event", Box::new(|| stream.wait(&event))),
        ("create_event", Box::new(|| backend.create_event(DEVICE, &EventOptions::new()).map(drop))),
        ("record_event", Box::new(|| stream.record(&event))),
        ("query_event", Box::new(|| event.query().map(drop))),
        ("synchronize_event", Box::new(|| event.synchronize())),
        ("allocate", Box::new(|| backend.allocate(DEVICE, &AllocateOptions::new(256)).map(drop))),
        // SAFETY: the blocks outlive the child, and no work uses them. The next calls are alike.
        ("copy", Box::new(|| unsafe { backend.copy(&copy, stream.id()) })),
        // SAFETY: as above.
        ("copy_2d", Box::new(|| unsafe { backend.copy_2d(&rows, stream.id()) })),
        // SAFETY: as above.
        ("fill", Box::new(|| unsafe { backend.fill(&fill, stream.id()) })),
        // SAFETY: as above. If the call succeeds against the promise, the case fails.
        ("free", Box::new(|| unsafe { backend.free(DEVICE, block.ptr(), None) })),
        (
            "create_blas_handle",
            Box::new(|| backend.create_blas_handle(DEVICE, &BlasOptions::new(BlasKind::Blas)).map(drop)),
        ),
    ];
    if can.event_timing {
        let elapsed = || backend.event_elapsed_ns(event.id(), event.id()).map(drop);
        calls.push(("event_elapsed_ns", Box::new(elapsed)));
    }
    if can.foreign_memory {
        calls.push(("describe_memory", Box::new(|| backend.describe_memory(DEVICE, block.ptr()).map(drop))));
    }
    if can.foreign_objects {
        let (raw_stream, raw_event) = (backend.raw_stream(stream.id())?, backend.raw_event(event.id())?);
        calls.push(("raw_stream", Box::new(|| backend.raw_stream(stream.id()).map(drop))));
        calls.push(("raw_event", Box::new(|| backend.raw_event(event.id()).map(drop))));
        // SAFETY: the stream outlives the child.
        let wrap = move || unsafe { backend.stream_from_raw(DEVICE, raw_stream) }.map(drop);
        calls.push(("stream_from_raw", Box::new(wrap)));
        // SAFETY: the event outlives the child.
        let wrap = move || unsafe { backend.event_from_raw(DEVICE, raw_event) }.map(drop);
        calls.push(("event_from_raw", Box::new(wrap)));
    }
    calls.push(("destroy_event", Box::new(|| backend.destroy_event(event.id()))));
    calls.push(("destroy_stream", Box::new(|| backend.destroy_stream(stream.id()))));
    refused_in_a_child(calls)?;
    // The parent continues as before.
    check!(block.read()? == [1; 4096], "memory changed by refused calls of a child");
    stream.set(block.all(), 2)?;
    stream.record(&event)?;
    event.synchronize()?;
    check!(block.read()? == [2; 4096], "the parent's stream does not work after a fork");
    Ok(())
}

fn calls_of_handles_in_a_forked_child_are_refused(backend: &dyn Backend) -> CaseResult {
    let can = backend.capabilities(DEVICE)?;
    let (stream, block) = (Stream::new(backend)?, Block::filled(backend, 4096, 0)?);
    let shape = GemmShape::new(DataType::F32, 4, 4, 4);
    let [a, b, c] = [0, 1024, 2048].map(|offset| block.ptr().offset(offset));
    for &kind in kinds(backend)? {
        let mut handle = backend.create_blas_handle(DEVICE, &BlasOptions::new(kind))?;
        handle.set_stream(stream.id())?;
        let options = PlanOptions::new(shape, Epilogue::None, 0);
        let plan = match kind {
            BlasKind::Lt if can.gemm_f32 => Some(handle.create_plan(&options)?),
            _ => None,
        };
        let handle = std::cell::RefCell::new(handle);
        let mut calls: Vec<Call<'_>> = vec![
            ("set_stream", Box::new(|| handle.borrow_mut().set_stream(stream.id()))),
            // SAFETY: it binds nothing.
            ("set_workspace", Box::new(|| unsafe { handle.borrow_mut().set_workspace(None) })),
            ("set_math_mode", Box::new(|| handle.borrow_mut().set_math_mode(MathMode::Default))),
            ("set_atomics_mode", Box::new(|| handle.borrow_mut().set_atomics_mode(AtomicsMode::NotAllowed))),
            ("reset", Box::new(|| handle.borrow_mut().reset())),
        ];
        if kind == BlasKind::Blas && can.gemm_f32 {
            let gemm = Gemm::new(shape, a, b, c);
            // SAFETY: the matrices lie in the block, apart. The block outlives the child.
            calls.push(("gemm", Box::new(|| unsafe { handle.borrow_mut().gemm(&gemm) })));
            calls.push(("destroy", Box::new(|| handle.borrow_mut().destroy())));
            refused_in_a_child(calls)?;
        } else if let Some(plan) = plan {
            let arguments = PlanArguments::new(a, b, c, None);
            calls.push(("create_plan", Box::new(|| handle.borrow_mut().create_plan(&options).map(drop))));
            // SAFETY: as above.
            calls.push(("run_plan", Box::new(|| unsafe { handle.borrow_mut().run_plan(plan, &arguments) })));
            calls.push(("destroy_plan", Box::new(|| handle.borrow_mut().destroy_plan(plan))));
            calls.push(("destroy", Box::new(|| handle.borrow_mut().destroy())));
            refused_in_a_child(calls)?;
        } else {
            refused_in_a_child(calls)?;
        }
        handle.into_inner().destroy()?;
    }
    Ok(())
}

fn calls_about_host_memory_in_a_forked_child_are_refused(backend: &dyn Backend) -> CaseResult {
    let (allocator, pinned) = (backend.host_allocator(), Pinned::holding(backend, &[1; 64])?);
    refused_in_a_child(vec![
        ("allocate of page-locked memory", Box::new(|| allocator.allocate(64, &HostOptions::new()).map(drop))),
        ("device_address", Box::new(|| allocator.device_address(pinned.ptr(), DEVICE).map(drop))),
        // SAFETY: no work uses the block. If the call succeeds against the promise, the case fails.
        ("free of page-locked memory", Box::new(|| unsafe { allocator.free(pinned.ptr()) })),
    ])?;
    check!(pinned.read()? == [1; 64], "page-locked memory lost its bytes by a fork");
    Ok(())
}

fn calls_about_registered_memory_in_a_forked_child_are_refused(backend: &dyn Backend) -> CaseResult {
    let (allocator, pages) = (backend.host_allocator(), Pages::new(1));
    let mut registered = Registered::new(backend, &[1; 64])?;
    let start = registered.memory().ptr();
    refused_in_a_child(vec![
        // SAFETY: the pages outlive the child, and no work uses them. The next call is alike.
        ("register", Box::new(|| unsafe { allocator.register(pages.ptr(), 64, &HostOptions::new()) })),
        // SAFETY: as above.
        ("unregister", Box::new(|| unsafe { allocator.unregister(start) })),
    ])?;
    registered.unregister()?;
    Ok(())
}

fn calls_about_mapped_memory_in_a_forked_child_are_refused(backend: &dyn Backend) -> CaseResult {
    let piece = backend.capabilities(DEVICE)?.mapped_memory_granularity;
    let addresses = Addresses::new(backend, DEVICE, 2 * piece)?;
    let mapped = addresses.fill_in(0..piece)?;
    addresses.write(0, &[1; 4096])?;
    let options = PhysicalMemoryOptions::new(piece);
    let other = PhysicalMemory::create(backend, DEVICE, &options)?;
    let (start, free) = (addresses.ptr(), addresses.ptr().offset(piece));
    refused_in_a_child(vec![
        ("reserve_addresses", Box::new(|| backend.reserve_addresses(DEVICE, piece).map(drop))),
        ("create_memory", Box::new(|| backend.create_memory(DEVICE, &options).map(drop))),
        // SAFETY: the addresses belong to this case, and no work uses them. The next calls are alike.
        ("map_memory", Box::new(|| unsafe { backend.map_memory(DEVICE, free, other.id()) })),
        // SAFETY: as above.
        ("set_memory_access", Box::new(|| unsafe { backend.set_memory_access(DEVICE, start, piece, DEVICE) })),
        // SAFETY: as above.
        ("unmap_memory", Box::new(|| unsafe { backend.unmap_memory(DEVICE, start, piece) })),
        // SAFETY: as above.
        ("free_addresses", Box::new(|| unsafe { backend.free_addresses(DEVICE, start, 2 * piece) })),
        ("destroy_memory", Box::new(|| backend.destroy_memory(other.id()))),
    ])?;
    check!(addresses.read(0..4096)? == [1; 4096], "mapped memory lost its bytes by a fork");
    addresses.map(piece, &other, piece)?;
    drop(mapped);
    Ok(())
}

fn calls_about_sharing_in_a_forked_child_are_refused(backend: &dyn Backend) -> CaseResult {
    let transport = transports(backend)?[0];
    let block = Block::with_kind(backend, DEVICE, 4096, DeviceMemoryKind::Shareable(transport))?;
    block.write(0, &[1; 4096])?;
    let (handle, sharing) = (block.export(transport)?, sharing(backend, "fork")?);
    let imports = backend.capabilities(DEVICE)?.foreign_memory;
    let mut calls: Vec<Call<'_>> = vec![
        ("export_memory", Box::new(|| block.export(transport).map(drop))),
        ("open_memory", Box::new(|| sharing.open_memory(DEVICE, &handle).map(drop))),
        ("close_memory", Box::new(|| close_unknown(backend, DEVICE, block.ptr()))),
    ];
    if imports {
        calls.push(("import_memory", Box::new(|| sharing.import_memory(DEVICE, &handle).map(drop))));
    }
    refused_in_a_child(calls)?;
    // The parent continues as before.
    check!(block.read()? == [1; 4096], "shareable memory lost its contents by a fork");
    block.export(transport)?;
    Ok(())
}

fn calls_about_shared_events_in_a_forked_child_are_refused(backend: &dyn Backend) -> CaseResult {
    let (event, sharing) = (Event::interprocess(backend)?, sharing(backend, "fork")?);
    let handle = event.export()?;
    refused_in_a_child(vec![
        ("export_event", Box::new(|| sharing.export_event(event.id()).map(drop))),
        ("open_event", Box::new(|| sharing.open_event(DEVICE, &handle).map(drop))),
    ])?;
    event.export()?;
    Ok(())
}

fn calls_about_captures_in_a_forked_child_are_refused(backend: &dyn Backend) -> CaseResult {
    let block = Block::filled(backend, 4096, 1)?;
    let stream = Stream::new(backend)?;
    let capture = Capture::begin(&stream, CaptureMode::ThreadLocal)?;
    stream.set(block.all(), 2)?;
    let graph = capture.end(&[&block])?;
    let executable = graph.instantiate()?;
    refused_in_a_child(vec![
        ("begin_capture", Box::new(|| backend.begin_capture(stream.id(), CaptureMode::ThreadLocal))),
        ("end_capture", Box::new(|| crate::device::end_capture(backend, stream.id()).map(drop))),
        ("is_capturing", Box::new(|| backend.is_capturing(stream.id()).map(drop))),
        ("instantiate_graph", Box::new(|| backend.instantiate_graph(graph.id()).map(drop))),
        ("launch_graph", Box::new(|| executable.launch(&stream))),
        ("destroy_graph", Box::new(|| backend.destroy_graph(graph.id()))),
        ("destroy_graph_exec", Box::new(|| backend.destroy_graph_exec(executable.id()))),
    ])?;
    // The parent continues as before.
    executable.launch(&stream)?;
    stream.synchronize()?;
    check!(block.read()? == [2; 4096], "a graph does not work in the parent after a fork");
    Ok(())
}

// ------------------------------------------------------------------------------------------------------- other arguments

/// The parent made each call before, so that a backend may have cached the answer.
fn answers_that_are_known_in_a_forked_child_are_refused(backend: &dyn Backend) -> CaseResult {
    let can = backend.capabilities(DEVICE)?;
    let options = EventOptions::new();
    let options = if can.event_timing { options.with_timing() } else { options };
    let (stream, event) = (Stream::new(backend)?, Event::with_options(backend, DEVICE, &options)?);
    let (block, pinned) = (Block::filled(backend, 4096, 1)?, Pinned::holding(backend, &[1; 64])?);
    // A backend may remember nothing about objects whose raw handle other code has.
    let (other_stream, other_event) = (Stream::new(backend)?, Event::new(backend)?);
    let allocator = backend.host_allocator();
    stream.record(&event)?;
    stream.synchronize()?;
    let mut calls: Vec<Call<'_>> = vec![
        ("device_info of a known device", Box::new(|| backend.device_info(DEVICE).map(drop))),
        ("capabilities of a known device", Box::new(|| backend.capabilities(DEVICE).map(drop))),
        ("memory_info of a known device", Box::new(|| backend.memory_info(DEVICE).map(drop))),
        ("query_stream of an idle stream", Box::new(|| stream.query().map(drop))),
        ("synchronize_stream of an idle stream", Box::new(|| stream.synchronize())),
        ("synchronize_device of an idle device", Box::new(|| backend.synchronize_device(DEVICE))),
        ("query_event of a complete event", Box::new(|| event.query().map(drop))),
        ("synchronize_event of a complete event", Box::new(|| event.synchronize())),
        ("stream_wait_event for a complete event", Box::new(|| stream.wait(&event))),
        ("device_address of a known block", Box::new(|| allocator.device_address(pinned.ptr(), DEVICE).map(drop))),
    ];
    if can.event_timing {
        let elapsed = || backend.event_elapsed_ns(event.id(), event.id()).map(drop);
        calls.push(("event_elapsed_ns of complete events", Box::new(elapsed)));
    }
    if can.foreign_memory {
        let describe = || backend.describe_memory(DEVICE, block.ptr()).map(drop);
        calls.push(("describe_memory of a known block", Box::new(describe)));
    }
    if can.foreign_objects {
        calls.push(("raw_stream of a known stream", Box::new(|| backend.raw_stream(other_stream.id()).map(drop))));
        calls.push(("raw_event of a known event", Box::new(|| backend.raw_event(other_event.id()).map(drop))));
    }
    if can.capture {
        let capturing = || backend.is_capturing(stream.id()).map(drop);
        calls.push(("is_capturing of a known stream", Box::new(capturing)));
    }
    // The parent gets each answer, and twice, so that the second may be a remembered one.
    for _ in 0..2 {
        for (name, call) in &mut calls {
            call().map_err(|error| Failure::new(format!("{name} in the parent: {error}")))?;
        }
    }
    refused_in_a_child(calls)
}

/// Ids that are stale, and ids of another backend.
fn bad_ids_in_a_forked_child_are_refused_as_forked(backend: &dyn Backend) -> CaseResult {
    let can = backend.capabilities(DEVICE)?;
    let (stream, event, block) = (Stream::new(backend)?, Event::new(backend)?, Block::filled(backend, 4096, 1)?);
    let tag = BackendTag::next();
    let streams = [
        Stream::new(backend)?.destroy()?,
        forge::<StreamId>(IdParts { tag, ..stream.id().parts() }),
        StreamId::legacy_default(tag, DEVICE),
    ];
    let events = [Event::new(backend)?.destroy()?, forge::<EventId>(IdParts { tag, ..event.id().parts() })];
    let (stream, event) = (&stream, &event);
    let mut calls: Vec<Call<'_>> = Vec::new();
    for bad in streams {
        let on = Stream::borrowed(backend, bad);
        let ordered = AllocateOptions::new(256).with_kind(DeviceMemoryKind::StreamOrdered(bad));
        let halves = |of: &Stream<'_>| of.copy(block.span(0..64), block.span(64..128));
        let rows = |of: &Stream<'_>| of.copy_rows(block.span(0..64), block.span(64..128), CopyShape::new(16, 4));
        calls.push(("query_stream of a bad id", Box::new(move || backend.query_stream(bad).map(drop))));
        calls.push(("synchronize_stream of a bad id", Box::new(move || backend.synchronize_stream(bad))));
        calls.push(("stream_wait_event of a bad id", Box::new(move || backend.stream_wait_event(bad, event.id()))));
        calls.push(("record_event on a bad id", Box::new(move || backend.record_event(event.id(), bad))));
        calls.push(("destroy_stream of a bad id", Box::new(move || backend.destroy_stream(bad))));
        if can.stream_ordered_memory {
            let allocate = move || backend.allocate(DEVICE, &ordered).map(drop);
            calls.push(("allocate on a bad id", Box::new(allocate)));
        }
        if can.foreign_objects {
            calls.push(("raw_stream of a bad id", Box::new(move || backend.raw_stream(bad).map(drop))));
        }
        if can.capture {
            let begin = move || backend.begin_capture(bad, CaptureMode::Relaxed);
            calls.push(("begin_capture of a bad id", Box::new(begin)));
            let end = move || crate::device::end_capture(backend, bad).map(drop);
            calls.push(("end_capture of a bad id", Box::new(end)));
            calls.push(("is_capturing of a bad id", Box::new(move || backend.is_capturing(bad).map(drop))));
        }
        let block = &block;
        let fill_on = Stream::borrowed(backend, bad);
        calls.push(("fill on a bad id", Box::new(move || fill_on.set(block.all(), 3))));
        let rows_on = Stream::borrowed(backend, bad);
        calls.push(("copy_2d on a bad id", Box::new(move || rows(&rows_on))));
        calls.push(("copy on a bad id", Box::new(move || halves(&on))));
    }
    for bad in events {
        calls.push(("query_event of a bad id", Box::new(move || backend.query_event(bad).map(drop))));
        calls.push(("synchronize_event of a bad id", Box::new(move || backend.synchronize_event(bad))));
        calls.push(("record_event of a bad id", Box::new(move || backend.record_event(bad, stream.id()))));
        calls.push(("stream_wait_event for a bad id", Box::new(move || backend.stream_wait_event(stream.id(), bad))));
        calls.push(("destroy_event of a bad id", Box::new(move || backend.destroy_event(bad))));
        if can.event_timing {
            let elapsed = move || backend.event_elapsed_ns(bad, bad).map(drop);
            calls.push(("event_elapsed_ns of a bad id", Box::new(elapsed)));
        }
        if can.foreign_objects {
            calls.push(("raw_event of a bad id", Box::new(move || backend.raw_event(bad).map(drop))));
        }
        if can.interprocess_events {
            let sharing = sharing(backend, "fork")?;
            calls.push(("export_event of a bad id", Box::new(move || sharing.export_event(bad).map(drop))));
        }
    }
    refused_in_a_child(calls)?;
    check!(block.read()? == [1; 4096], "memory changed by refused calls of a child");
    Ok(())
}

fn bad_ordinals_in_a_forked_child_are_refused_as_forked(backend: &dyn Backend) -> CaseResult {
    let can = backend.capabilities(DEVICE)?;
    let (block, pinned) = (Block::new(backend, 4096)?, Pinned::new(backend, 64)?);
    let (allocator, ptr) = (backend.host_allocator(), block.ptr());
    let mut calls: Vec<Call<'_>> = Vec::new();
    for device in [backend.device_count(), u32::MAX] {
        calls.push(("device_info of no device", Box::new(move || backend.device_info(device).map(drop))));
        calls.push(("capabilities of no device", Box::new(move || backend.capabilities(device).map(drop))));
        calls.push(("memory_info of no device", Box::new(move || backend.memory_info(device).map(drop))));
        calls.push(("synchronize_device of no device", Box::new(move || backend.synchronize_device(device))));
        let create = move || backend.create_stream(device, &StreamOptions::new()).map(drop);
        calls.push(("create_stream of no device", Box::new(create)));
        let create = move || backend.create_event(device, &EventOptions::new()).map(drop);
        calls.push(("create_event of no device", Box::new(create)));
        let allocate = move || backend.allocate(device, &AllocateOptions::new(256)).map(drop);
        calls.push(("allocate of no device", Box::new(allocate)));
        // SAFETY: no device has the block, so nothing is freed.
        let free = move || unsafe { backend.free(device, ptr, None) };
        calls.push(("free of no device", Box::new(free)));
        let create = move || backend.create_blas_handle(device, &BlasOptions::new(BlasKind::Blas)).map(drop);
        calls.push(("create_blas_handle of no device", Box::new(create)));
        let (allocator, at) = (std::sync::Arc::clone(&allocator), pinned.ptr());
        let address = move || allocator.device_address(at, device).map(drop);
        calls.push(("device_address of no device", Box::new(address)));
        if can.foreign_memory {
            let describe = move || backend.describe_memory(device, ptr).map(drop);
            calls.push(("describe_memory of no device", Box::new(describe)));
        }
        if can.mapped_memory {
            let piece = can.mapped_memory_granularity;
            let reserve = move || backend.reserve_addresses(device, piece).map(drop);
            calls.push(("reserve_addresses of no device", Box::new(reserve)));
            let create = move || backend.create_memory(device, &PhysicalMemoryOptions::new(piece)).map(drop);
            calls.push(("create_memory of no device", Box::new(create)));
        }
    }
    refused_in_a_child(calls)
}

/// Work without bytes, sizes of 0, and options that no call accepts.
fn empty_work_in_a_forked_child_is_refused(backend: &dyn Backend) -> CaseResult {
    let can = backend.capabilities(DEVICE)?;
    let (stream, block, pinned) = (Stream::new(backend)?, Block::new(backend, 4096)?, Pinned::new(backend, 4096)?);
    let allocator = backend.host_allocator();
    let (device, host) = (Location::Device { device: DEVICE, ptr: block.ptr() }, Location::Host(pinned.ptr()));
    let nowhere = DevicePtr::new(0);
    let null = Location::Device { device: DEVICE, ptr: nowhere };
    let (stream, pinned) = (&stream, &pinned);
    let mut calls: Vec<Call<'_>> = Vec::new();
    for (dst, src) in [(device, host), (host, device), (null, host)] {
        let copy = MemoryCopy::new(dst, src, 0);
        // SAFETY: no byte is copied. The next calls are alike.
        calls.push(("copy of 0 bytes", Box::new(move || unsafe { backend.copy(&copy, stream.id()) })));
        for shape in [CopyShape::new(0, 4), CopyShape::new(4, 0)] {
            let rows = MemoryCopy2d::new(dst, src, shape);
            // SAFETY: as above.
            calls.push(("copy_2d of nothing", Box::new(move || unsafe { backend.copy_2d(&rows, stream.id()) })));
        }
    }
    let narrow = MemoryCopy2d::new(device, host, CopyShape::new(16, 4).with_dst_pitch(8));
    // SAFETY: the pitch is refused.
    calls.push(("copy_2d of a bad pitch", Box::new(move || unsafe { backend.copy_2d(&narrow, stream.id()) })));
    for dst in [block.ptr(), nowhere] {
        let fill = MemoryFill::new(DEVICE, dst, FillPattern::U8(3), 0);
        // SAFETY: no byte is written.
        calls.push(("fill of 0 elements", Box::new(move || unsafe { backend.fill(&fill, stream.id()) })));
    }
    calls.push(("allocate of 0 bytes", Box::new(|| backend.allocate(DEVICE, &AllocateOptions::new(0)).map(drop))));
    let most = AllocateOptions::new(usize::MAX / 4);
    calls.push(("allocate of too much", Box::new(move || backend.allocate(DEVICE, &most).map(drop))));
    // SAFETY: no block begins there.
    calls.push(("free of no block", Box::new(|| unsafe { backend.free(DEVICE, nowhere, None) })));
    let allocate = || allocator.allocate(0, &HostOptions::new()).map(drop);
    calls.push(("host allocate of 0 bytes", Box::new(allocate)));
    let both = EventOptions::new().with_timing().with_interprocess();
    calls.push(("create_event with all options", Box::new(move || backend.create_event(DEVICE, &both).map(drop))));
    for &transport in Transport::ALL.iter().filter(|&&transport| !can.ipc_transports.contains(transport)) {
        let options = AllocateOptions::new(256).with_kind(DeviceMemoryKind::Shareable(transport));
        let allocate = move || backend.allocate(DEVICE, &options).map(drop);
        calls.push(("allocate for a transport that is not offered", Box::new(allocate)));
    }
    if can.foreign_memory {
        let describe = || backend.describe_memory(DEVICE, nowhere).map(drop);
        calls.push(("describe_memory of no block", Box::new(describe)));
    }
    if can.host_register {
        let allocator = &allocator;
        // SAFETY: the memory is registered already or empty, and both are refused.
        let register = |bytes: usize| move || unsafe { allocator.register(pinned.ptr(), bytes, &HostOptions::new()) };
        calls.push(("register of 0 bytes", Box::new(register(0))));
        calls.push(("register of a block", Box::new(register(64))));
        // SAFETY: nothing is registered there.
        calls.push(("unregister of a block", Box::new(|| unsafe { allocator.unregister(pinned.ptr()) })));
    }
    refused_in_a_child(calls)
}

/// Products without elements, without terms, and of unknown types, on handles that are bound and unbound, and plans that do not
/// exist.
fn odd_products_in_a_forked_child_are_refused(backend: &dyn Backend) -> CaseResult {
    let (stream, block) = (Stream::new(backend)?, Block::filled(backend, 4096, 0)?);
    let stale = Stream::new(backend)?.destroy()?;
    let [a, b, c] = [0, 1024, 2048].map(|offset| block.ptr().offset(offset));
    let square = GemmShape::new(DataType::F32, 4, 4, 4);
    let batch = StridedBatch { count: 0, stride_a: 16, stride_b: 16, stride_c: 16 };
    let shapes = [
        square,
        GemmShape::new(DataType::F32, 0, 4, 4).with_leading_dimensions(4, 4, 4),
        GemmShape::new(DataType::F32, 4, 0, 4),
        GemmShape::new(DataType::F32, 4, 4, 0),
        square.with_batch(batch),
        square.with_output(DataType::F16),
    ];
    for &kind in kinds(backend)? {
        for is_bound in [true, false] {
            let mut handle = backend.create_blas_handle(DEVICE, &BlasOptions::new(kind))?;
            if is_bound {
                handle.set_stream(stream.id())?;
            }
            let handle = std::cell::RefCell::new(handle);
            let handle = &handle;
            let mut calls: Vec<Call<'_>> = vec![
                ("set_stream to a bad id", Box::new(|| handle.borrow_mut().set_stream(stale))),
                ("reset", Box::new(|| handle.borrow_mut().reset())),
                ("set_math_mode", Box::new(|| handle.borrow_mut().set_math_mode(MathMode::Tf32))),
                ("set_atomics_mode", Box::new(|| handle.borrow_mut().set_atomics_mode(AtomicsMode::Allowed))),
            ];
            let odd = Workspace { ptr: block.ptr().offset(1), bytes: 64 };
            // SAFETY: inside the block, which lives longer than the handle.
            let bind = move || unsafe { handle.borrow_mut().set_workspace(Some(odd)) };
            calls.push(("set_workspace to an odd address", Box::new(bind)));
            for shape in shapes {
                for alpha in [1.0, 0.0] {
                    let gemm = Gemm::new(shape, a, b, c).with_scale(alpha, 0.0);
                    // SAFETY: the matrices lie in the block, apart. The block outlives the child.
                    let multiply = move || unsafe { handle.borrow_mut().gemm(&gemm) };
                    if kind == BlasKind::Blas {
                        calls.push(("an odd gemm", Box::new(multiply)));
                    }
                }
                let options = PlanOptions::new(shape, Epilogue::None, 0);
                let create = move || handle.borrow_mut().create_plan(&options).map(drop);
                if kind == BlasKind::Lt {
                    calls.push(("an odd create_plan", Box::new(create)));
                }
            }
            for number in [0, 1, 7, u64::MAX] {
                let (plan, arguments) = (PlanId::new(number), PlanArguments::new(a, b, c, None));
                // SAFETY: there is no such plan.
                let run = move || unsafe { handle.borrow_mut().run_plan(plan, &arguments) };
                let destroy = move || handle.borrow_mut().destroy_plan(plan);
                if kind == BlasKind::Lt {
                    calls.push(("run_plan of no plan", Box::new(run)));
                    calls.push(("destroy_plan of no plan", Box::new(destroy)));
                }
            }
            refused_in_a_child(calls)?;
            handle.borrow_mut().destroy()?;
        }
    }
    check!(block.read()? == [0; 4096], "memory changed by refused products of a child");
    Ok(())
}

fn bad_graphs_in_a_forked_child_are_refused_as_forked(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let graph = Capture::begin(&stream, CaptureMode::ThreadLocal)?.end(&[])?;
    let executable = graph.instantiate()?;
    let tag = BackendTag::next();
    let graphs = [forge::<GraphId>(IdParts { tag, ..graph.id().parts() }), graph.destroy()?];
    let executables = [forge::<GraphExecId>(IdParts { tag, ..executable.id().parts() }), executable.destroy()?];
    let mut calls: Vec<Call<'_>> = vec![(
        "end_capture without a capture",
        Box::new(|| crate::device::end_capture(backend, stream.id()).map(drop)),
    )];
    for bad in graphs {
        calls.push(("instantiate_graph of a bad id", Box::new(move || backend.instantiate_graph(bad).map(drop))));
        calls.push(("destroy_graph of a bad id", Box::new(move || backend.destroy_graph(bad))));
    }
    let stream = &stream;
    for bad in executables {
        // SAFETY: nothing was recorded.
        let launch = move || unsafe { backend.launch_graph(bad, stream.id()) };
        calls.push(("launch_graph of a bad id", Box::new(launch)));
        calls.push(("destroy_graph_exec of a bad id", Box::new(move || backend.destroy_graph_exec(bad))));
    }
    refused_in_a_child(calls)
}

fn bad_mapped_memory_in_a_forked_child_is_refused_as_forked(backend: &dyn Backend) -> CaseResult {
    let can = backend.capabilities(DEVICE)?;
    let piece = can.mapped_memory_granularity;
    let addresses = Addresses::new(backend, DEVICE, 2 * piece)?;
    let (start, none) = (addresses.ptr(), backend.device_count());
    let stale = PhysicalMemory::create(backend, DEVICE, &PhysicalMemoryOptions::new(piece))?.destroy()?;
    let mut calls: Vec<Call<'_>> = Vec::new();
    for bytes in [0, 1] {
        let reserve = move || backend.reserve_addresses(DEVICE, bytes).map(drop);
        calls.push(("reserve_addresses of an odd size", Box::new(reserve)));
        let create = move || backend.create_memory(DEVICE, &PhysicalMemoryOptions::new(bytes)).map(drop);
        calls.push(("create_memory of an odd size", Box::new(create)));
    }
    for &transport in Transport::ALL {
        if transport == Transport::Legacy || !can.ipc_transports.contains(transport) {
            let options = PhysicalMemoryOptions::new(piece).with_shareable(transport);
            let create = move || backend.create_memory(DEVICE, &options).map(drop);
            calls.push(("create_memory for a transport that is not offered", Box::new(create)));
        }
    }
    calls.push(("destroy_memory of a bad id", Box::new(move || backend.destroy_memory(stale))));
    // SAFETY: the addresses belong to this case, and no memory is mapped there. The next calls are alike.
    calls.push(("map_memory of a bad id", Box::new(move || unsafe { backend.map_memory(DEVICE, start, stale) })));
    for (device, bytes, accessing) in [(DEVICE, piece, DEVICE), (none, piece, DEVICE), (DEVICE, 0, none)] {
        // SAFETY: as above.
        let access = move || unsafe { backend.set_memory_access(device, start, bytes, accessing) };
        calls.push(("set_memory_access of no mapping", Box::new(access)));
        // SAFETY: as above.
        let unmap = move || unsafe { backend.unmap_memory(device, start, bytes) };
        calls.push(("unmap_memory of no mapping", Box::new(unmap)));
        // SAFETY: as above. The bytes are not those of the range.
        let free = move || unsafe { backend.free_addresses(device, start, bytes) };
        calls.push(("free_addresses of another range", Box::new(free)));
    }
    refused_in_a_child(calls)
}

fn bad_handles_of_memory_in_a_forked_child_are_refused_as_forked(backend: &dyn Backend) -> CaseResult {
    let can = backend.capabilities(DEVICE)?;
    let (sharing, none) = (sharing(backend, "fork")?, backend.device_count());
    let sharing = &sharing;
    let first = transports(backend)?[0];
    let block = Block::with_kind(backend, DEVICE, 4096, DeviceMemoryKind::Shareable(first))?;
    let handle = block.export(first)?;
    let mut altered = [handle.clone(), handle.clone(), handle.clone()];
    altered[0].payload = [0xff; 64];
    altered[1].bytes = 0;
    altered[2].descriptor = None;
    let mut calls: Vec<Call<'_>> = Vec::new();
    for &transport in Transport::ALL {
        // The block is for the first one.
        let block = &block;
        calls.push(("export_memory by each transport", Box::new(move || block.export(transport).map(drop))));
    }
    for device in [DEVICE, none] {
        for ptr in [0, u64::MAX - 4095] {
            let ptr = DevicePtr::new(ptr);
            // SAFETY: no memory begins there.
            let export = move || unsafe { sharing.export_memory(device, ptr, first).map(drop) };
            calls.push(("export_memory of no memory", Box::new(export)));
            calls.push(("close_memory of no memory", Box::new(move || close_unknown(backend, device, ptr))));
        }
        for handle in altered.iter().chain([&handle]) {
            calls
                .push(("open_memory of a bad handle", Box::new(move || sharing.open_memory(device, handle).map(drop))));
            if can.foreign_memory && can.mapped_memory {
                let import = move || sharing.import_memory(device, handle).map(drop);
                calls.push(("import_memory of a bad handle", Box::new(import)));
            }
        }
    }
    refused_in_a_child(calls)
}

/// Waits for the child, and kills it at the time limit.
fn wait_for(child: libc::pid_t) -> Result<i32, Failure> {
    let deadline = Instant::now() + PATIENCE;
    let mut status = 0;
    loop {
        // SAFETY: asks for the child that this process made and has not waited for yet.
        match unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } {
            0 if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(1)),
            0 => {
                // SAFETY: the child has not been waited for, so the number is still its own.
                unsafe {
                    libc::kill(child, libc::SIGKILL);
                    libc::waitpid(child, &mut status, 0);
                }
                return Err(Failure::new(format!("calls in a forked child did not return within {PATIENCE:?}")));
            }
            ended if ended == child => return Ok(status),
            _ => return Err(Failure::new(format!("waiting for a child failed: {}", std::io::Error::last_os_error()))),
        }
    }
}

#[cfg(test)]
mod tests {
    macro_rules! names {
        ($($trait:ident { $($variant:ident: $fn:tt $method:ident $arguments:tt -> $answer:ty;)* })*) => {
            [$($(stringify!($method)),*),*]
        };
    }

    #[test]
    fn every_operation_is_called_in_a_forked_child() {
        let source = include_str!("fork.rs");
        for method in highwater_hal::for_each_operation!(names) {
            assert!(source.contains(&format!("(\"{method}")) || source.contains(&format!("\"{method}\",")), "{method}");
        }
    }
}
