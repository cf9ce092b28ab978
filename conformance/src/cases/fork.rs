//! A child that is forked after the backend was opened.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use highwater_hal::{
    AllocateOptions, Backend, BlasHandle, BlasKind, BlasOptions, CaptureMode, DeviceMemoryKind, ErrorKind, EventId,
    EventOptions, HostAllocator, HostOptions, MathMode, Result, StreamId, StreamOptions,
};

use super::sharing::transports;
use crate::case::{CaseResult, Failure, cases, check};
use crate::device::{Block, Capture, DEVICE, Event, Stream, close_unknown, sharing};

cases! {
    group "fork";
    calls_in_a_forked_child_are_refused: ["backend.forked"];
    calls_about_sharing_in_a_forked_child_are_refused: ["backend.forked"] needs [has::shareable_memory];
    calls_about_captures_in_a_forked_child_are_refused: ["backend.forked"] needs [has::capture];
}

/// The time limit of all calls of a child.
const PATIENCE: Duration = Duration::from_secs(5);

/// The objects that the child inherits.
struct Inherited<'a> {
    backend: &'a dyn Backend,
    stream: StreamId,
    event: EventId,
    handle: &'a mut dyn BlasHandle,
    host: &'a dyn HostAllocator,
}

/// A call of the child.
type Call = fn(&mut Inherited<'_>) -> Result<()>;

/// The calls of the child. Descriptions that were read before the fork (`device_info`, `capabilities`) are left out, because
/// they reach no driver.
const CALLS: [(&str, Call); 17] = [
    ("memory_info", |i| i.backend.memory_info(DEVICE).map(drop)),
    ("create_stream", |i| i.backend.create_stream(DEVICE, &StreamOptions::new()).map(drop)),
    ("query_stream", |i| i.backend.query_stream(i.stream).map(drop)),
    ("synchronize_stream", |i| i.backend.synchronize_stream(i.stream)),
    ("synchronize_device", |i| i.backend.synchronize_device(DEVICE)),
    ("stream_wait_event", |i| i.backend.stream_wait_event(i.stream, i.event)),
    ("create_event", |i| i.backend.create_event(DEVICE, &EventOptions::new()).map(drop)),
    ("record_event", |i| i.backend.record_event(i.event, i.stream)),
    ("query_event", |i| i.backend.query_event(i.event).map(drop)),
    ("synchronize_event", |i| i.backend.synchronize_event(i.event)),
    ("allocate", |i| i.backend.allocate(DEVICE, &AllocateOptions::new(256)).map(drop)),
    ("allocate of page-locked memory", |i| i.host.allocate(64, &HostOptions::new()).map(drop)),
    ("create_blas_handle", |i| i.backend.create_blas_handle(DEVICE, &BlasOptions::new(BlasKind::Blas)).map(drop)),
    ("set_stream", |i| i.handle.set_stream(i.stream)),
    ("set_math_mode", |i| i.handle.set_math_mode(MathMode::Default)),
    ("destroy_event", |i| i.backend.destroy_event(i.event)),
    ("destroy_stream", |i| i.backend.destroy_stream(i.stream)),
];

/// Makes the calls in a child that is forked here, and checks that each is refused.
fn refused_in_a_child<I>(inherited: &mut I, names: &[&str], call: impl Fn(&mut I, usize) -> Result<()>) -> CaseResult {
    const PANICKED: usize = 100;
    // SAFETY: the child calls the backend, which is to refuse before it takes a lock, and ends with `_exit`: no
    // destructor and no exit handler of the parent runs twice. What it allocates meanwhile goes through an allocator
    // that the C library makes usable in children of threaded processes.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let first_wrong = catch_unwind(AssertUnwindSafe(|| {
            let mut refused = |index| call(inherited, index).is_err_and(|error| error.kind() == ErrorKind::Forked);
            let wrong = (0..names.len()).find(|&index| !refused(index));
            wrong.map_or(0, |wrong| wrong + 1)
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
            let name = names.get(wrong - 1).copied().unwrap_or("an unknown call");
            Err(Failure::new(format!("{name} in a forked child did not give `{}`", ErrorKind::Forked)))
        }
    }
}

fn calls_in_a_forked_child_are_refused(backend: &dyn Backend) -> CaseResult {
    let (stream, event) = (Stream::new(backend)?, Event::new(backend)?);
    let block = Block::filled(backend, 4096, 1)?;
    let mut handle = backend.create_blas_handle(DEVICE, &BlasOptions::new(BlasKind::Blas))?;
    let host = backend.host_allocator();
    let mut inherited =
        Inherited { backend, stream: stream.id(), event: event.id(), handle: &mut *handle, host: &*host };
    refused_in_a_child(&mut inherited, &CALLS.map(|(name, _)| name), |inherited, index| CALLS[index].1(inherited))?;
    // The parent continues as before.
    stream.set(block.all(), 2)?;
    stream.record(&event)?;
    event.synchronize()?;
    check!(block.read()? == [2; 4096], "the parent's stream does not work after a fork");
    handle.destroy()?;
    Ok(())
}

fn calls_about_sharing_in_a_forked_child_are_refused(backend: &dyn Backend) -> CaseResult {
    let transport = transports(backend)?[0];
    let block = Block::with_kind(backend, DEVICE, 4096, DeviceMemoryKind::Shareable(transport))?;
    block.write(0, &[1; 4096])?;
    let (handle, sharing) = (block.export(transport)?, sharing(backend, "fork")?);
    let event = Event::new(backend)?;
    let names = ["export_memory", "open_memory", "close_memory", "export_event"];
    let call = |(): &mut (), index| match names[index] {
        "export_memory" => block.export(transport).map(drop),
        "open_memory" => sharing.open_memory(DEVICE, &handle).map(drop),
        "close_memory" => close_unknown(backend, DEVICE, block.ptr()),
        _ => sharing.export_event(event.id()).map(drop),
    };
    refused_in_a_child(&mut (), &names, call)?;
    // The parent continues as before.
    check!(block.read()? == [1; 4096], "shareable memory lost its contents by a fork");
    block.export(transport)?;
    Ok(())
}

fn calls_about_captures_in_a_forked_child_are_refused(backend: &dyn Backend) -> CaseResult {
    let block = Block::filled(backend, 4096, 1)?;
    let stream = Stream::new(backend)?;
    let capture = Capture::begin(&stream, CaptureMode::ThreadLocal)?;
    stream.set(block.all(), 2)?;
    let graph = capture.end(&[&block])?;
    let executable = graph.instantiate()?;
    let names = [
        "begin_capture",
        "end_capture",
        "is_capturing",
        "instantiate_graph",
        "launch_graph",
        "destroy_graph",
        "destroy_graph_exec",
    ];
    let call = |(): &mut (), index| match names[index] {
        "begin_capture" => backend.begin_capture(stream.id(), CaptureMode::ThreadLocal),
        "end_capture" => crate::device::end_capture(backend, stream.id()).map(drop),
        "is_capturing" => backend.is_capturing(stream.id()).map(drop),
        "instantiate_graph" => backend.instantiate_graph(graph.id()).map(drop),
        "launch_graph" => executable.launch(&stream),
        "destroy_graph" => backend.destroy_graph(graph.id()),
        _ => backend.destroy_graph_exec(executable.id()),
    };
    refused_in_a_child(&mut (), &names, call)?;
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
