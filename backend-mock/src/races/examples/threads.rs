//! Mistakes with threads of the host. A flag that is stored and loaded with [`Ordering::Relaxed`] orders nothing, although
//! each of these programs goes on only after the flag is set.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use highwater_hal::{Backend, Location, Result};

use super::Bench;

/// Runs `other` in another thread, and returns when it is done. A flag says so, which orders nothing.
fn beside(other: impl FnOnce() -> Result<()> + Send) -> Result<()> {
    let done = &AtomicBool::new(false);
    thread::scope(|scope| {
        let thread = scope.spawn(move || {
            let result = other();
            done.store(true, Ordering::Relaxed);
            result
        });
        while !done.load(Ordering::Relaxed) {
            thread::yield_now();
        }
        // Nothing waits here: the thread has only its end before it.
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Another thread waits for the copy, and this one frees the memory without being ordered after it.
pub fn waited_in_another_thread(bench: &Bench) -> Result<()> {
    let (stream, block, host) = (bench.stream(0)?, bench.block(0)?, bench.host_block()?);
    bench.copy(block, Location::Host(host), stream)?;
    beside(|| bench.gpu.synchronize_stream(stream))?;
    bench.free_host_block(host)
}

/// The other thread hands over what it has waited for.
pub fn waited_in_another_thread_corrected(bench: &Bench) -> Result<()> {
    let (stream, block, host) = (bench.stream(0)?, bench.block(0)?, bench.host_block()?);
    bench.copy(block, Location::Host(host), stream)?;
    let waited = thread::scope(|scope| {
        let thread = scope.spawn(|| bench.gpu.synchronize_stream(stream).map(|()| bench.gpu.hand_over()));
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    waited.take_over();
    bench.free_host_block(host)
}

/// Two threads use a block on streams of their own, one after the other has waited for its own work.
pub fn block_of_two_threads(bench: &Bench) -> Result<()> {
    let ((one, other), block, host) = (bench.two_streams()?, bench.block(0)?, bench.host_block()?);
    beside(|| {
        bench.fill(block, one)?;
        bench.gpu.synchronize_stream(one)
    })?;
    bench.copy(Location::Host(host), block, other)
}

/// The second stream waits for an event of the first. Threads need no order of their own then.
pub fn block_of_two_threads_corrected(bench: &Bench) -> Result<()> {
    let ((one, other), block, host) = (bench.two_streams()?, bench.block(0)?, bench.host_block()?);
    let filled = bench.event()?;
    beside(|| {
        bench.fill(block, one)?;
        bench.record(filled, one)
    })?;
    bench.wait(other, filled)?;
    bench.copy(Location::Host(host), block, other)
}

/// Reads a result that another thread has waited for.
pub fn read_in_another_thread(bench: &Bench) -> Result<()> {
    let (stream, block, host, copied) = (bench.stream(0)?, bench.block(0)?, bench.host_block()?, bench.event()?);
    bench.copy(Location::Host(host), block, stream)?;
    bench.record(copied, stream)?;
    beside(|| bench.gpu.synchronize_event(copied))?;
    bench.access(host, false);
    Ok(())
}

/// Each thread waits for itself.
pub fn read_in_another_thread_corrected(bench: &Bench) -> Result<()> {
    let (stream, block, host, copied) = (bench.stream(0)?, bench.block(0)?, bench.host_block()?, bench.event()?);
    bench.copy(Location::Host(host), block, stream)?;
    bench.record(copied, stream)?;
    beside(|| bench.gpu.synchronize_event(copied))?;
    bench.gpu.synchronize_event(copied)?;
    bench.access(host, false);
    Ok(())
}
