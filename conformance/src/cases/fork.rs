//! A child that was forked after the backend was opened.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use highwater_core::{
    AllocateOptions, Backend, BlasHandle, BlasKind, BlasOptions, ErrorKind, EventId, EventOptions, HostAllocator,
    HostOptions, MathMode, Result, StreamId, StreamOptions,
};

use crate::case::{CaseResult, Failure, cases, check};
use crate::device::{Block, DEVICE, Event, Stream};

cases! {
    group "fork";
    calls_in_a_forked_child_are_refused: ["backend.forked"];
}

/// How long the calls of a child may take in all.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the child has inherited.
struct Inherited<'a> {
    backend: &'a dyn Backend,
    stream: StreamId,
    event: EventId,
    handle: &'a mut dyn BlasHandle,
    host: &'a dyn HostAllocator,
}

/// A call of the child.
type Call = fn(&mut Inherited<'_>) -> Result<()>;

/// What the child calls. Descriptions that were read before the fork (`device_info`, `capabilities`) are left out: they
/// reach no driver.
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

fn calls_in_a_forked_child_are_refused(backend: &dyn Backend) -> CaseResult {
    const PANICKED: usize = 100;
    let (stream, event) = (Stream::new(backend)?, Event::new(backend)?);
    let block = Block::filled(backend, 4096, 1)?;
    let mut handle = backend.create_blas_handle(DEVICE, &BlasOptions::new(BlasKind::Blas))?;
    let host = backend.host_allocator();
    // SAFETY: the child calls the backend, which is to refuse before it takes a lock, and ends with `_exit`: no
    // destructor and no exit handler of the parent runs twice. What it allocates meanwhile goes through an allocator
    // that the C library makes usable in children of threaded processes.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let first_wrong = catch_unwind(AssertUnwindSafe(|| {
            let handle = &mut *handle;
            let mut inherited = Inherited { backend, stream: stream.id(), event: event.id(), handle, host: &*host };
            let refused = |call: Call, inherited: &mut Inherited<'_>| {
                call(inherited).is_err_and(|error| error.kind() == ErrorKind::Forked)
            };
            let wrong = CALLS.iter().position(|(_, call)| !refused(*call, &mut inherited));
            wrong.map_or(0, |wrong| wrong + 1)
        }));
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(first_wrong.unwrap_or(PANICKED) as i32) };
    }
    check!(child > 0, "the process cannot be forked: {}", std::io::Error::last_os_error());
    let status = wait_for(child)?;
    check!(libc::WIFEXITED(status), "the child ended by signal {}", libc::WTERMSIG(status));
    match libc::WEXITSTATUS(status) as usize {
        0 => {}
        PANICKED => return Err(Failure::new("a call in a forked child panicked")),
        wrong => {
            let name = CALLS.get(wrong - 1).map_or("an unknown call", |(name, _)| name);
            return Err(Failure::new(format!("{name} in a forked child did not give `{}`", ErrorKind::Forked)));
        }
    }
    // The parent goes on as before.
    stream.set(block.all(), 2)?;
    stream.record(&event)?;
    event.synchronize()?;
    check!(block.read()? == [2; 4096], "the parent's stream does not work after a fork");
    handle.destroy()?;
    Ok(())
}

/// Waits for the child, and ends it when it takes too long.
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
