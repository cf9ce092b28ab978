//! A child that is forked after the backend was opened. Every method of the four traits is called there.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use highwater_hal::{
    AllocateOptions, AtomicsMode, Backend, BlasKind, BlasOptions, CaptureMode, CopyShape, DataType, DeviceMemoryKind,
    Epilogue, ErrorKind, EventOptions, FillPattern, Gemm, GemmShape, HostOptions, Location, MathMode, MemoryCopy,
    MemoryCopy2d, MemoryFill, PhysicalMemoryOptions, PlanArguments, PlanOptions, Result, StreamOptions,
};

use super::blas::kinds;
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
            let refused = |(_, call): &mut Call<'_>| call().is_err_and(|error| error.kind() == ErrorKind::Forked);
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
            Err(Failure::new(format!("{name} in a forked child did not give `{}`", ErrorKind::Forked)))
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
