//! Mistakes with streams, events and waits.

use highwater_hal::{Backend, Completion, Location, Result};

use super::Bench;

/// Copies a block on one stream that another stream writes, without any wait.
pub fn missing_wait(bench: &Bench) -> Result<()> {
    let ((producer, consumer), block, host) = (bench.two_streams()?, bench.block(0)?, bench.host_block()?);
    bench.fill(block, producer)?;
    bench.copy(Location::Host(host), block, consumer)
}

/// The copying stream waits for an event.
pub fn missing_wait_corrected(bench: &Bench) -> Result<()> {
    let ((producer, consumer), block, host) = (bench.two_streams()?, bench.block(0)?, bench.host_block()?);
    let filled = bench.event()?;
    bench.fill(block, producer)?;
    bench.record(filled, producer)?;
    bench.wait(consumer, filled)?;
    bench.copy(Location::Host(host), block, consumer)
}

/// Records the event too early, before the work that it should cover.
pub fn recorded_too_early(bench: &Bench) -> Result<()> {
    let ((producer, consumer), block, host) = (bench.two_streams()?, bench.block(0)?, bench.host_block()?);
    let filled = bench.event()?;
    bench.record(filled, producer)?;
    bench.fill(block, producer)?;
    bench.wait(consumer, filled)?;
    bench.copy(Location::Host(host), block, consumer)
}

/// The event comes after the work.
pub fn recorded_too_early_corrected(bench: &Bench) -> Result<()> {
    missing_wait_corrected(bench)
}

/// Expects a wait to follow a record that is made after it.
pub fn recorded_again(bench: &Bench) -> Result<()> {
    let ((producer, consumer), block, host) = (bench.two_streams()?, bench.block(0)?, bench.host_block()?);
    let event = bench.event()?;
    bench.record(event, producer)?;
    bench.wait(consumer, event)?;
    bench.fill(block, producer)?;
    bench.record(event, producer)?;
    bench.copy(Location::Host(host), block, consumer)
}

/// Waits again after the second record.
pub fn recorded_again_corrected(bench: &Bench) -> Result<()> {
    let ((producer, consumer), block, host) = (bench.two_streams()?, bench.block(0)?, bench.host_block()?);
    let event = bench.event()?;
    bench.record(event, producer)?;
    bench.wait(consumer, event)?;
    bench.fill(block, producer)?;
    bench.record(event, producer)?;
    bench.wait(consumer, event)?;
    bench.copy(Location::Host(host), block, consumer)
}

/// Waits for an event that was never recorded, which is no wait at all.
pub fn never_recorded(bench: &Bench) -> Result<()> {
    let ((producer, consumer), block, host) = (bench.two_streams()?, bench.block(0)?, bench.host_block()?);
    let filled = bench.event()?;
    bench.fill(block, producer)?;
    bench.wait(consumer, filled)?;
    bench.copy(Location::Host(host), block, consumer)
}

/// Records the event first, and the host waits for it.
pub fn never_recorded_corrected(bench: &Bench) -> Result<()> {
    let ((producer, consumer), block, host) = (bench.two_streams()?, bench.block(0)?, bench.host_block()?);
    let filled = bench.event()?;
    bench.fill(block, producer)?;
    bench.record(filled, producer)?;
    bench.gpu.synchronize_event(filled)?;
    bench.copy(Location::Host(host), block, consumer)
}

/// Makes the producing stream wait, not the consuming one.
pub fn wrong_stream_waits(bench: &Bench) -> Result<()> {
    let ((producer, consumer), block, host) = (bench.two_streams()?, bench.block(0)?, bench.host_block()?);
    let filled = bench.event()?;
    bench.fill(block, producer)?;
    bench.record(filled, producer)?;
    bench.wait(producer, filled)?;
    bench.copy(Location::Host(host), block, consumer)
}

/// A third stream waits for the producer, and the consumer for the third.
pub fn wrong_stream_waits_corrected(bench: &Bench) -> Result<()> {
    let ((producer, consumer), block, host) = (bench.two_streams()?, bench.block(0)?, bench.host_block()?);
    let (between, filled, passed_on) = (bench.stream(0)?, bench.event()?, bench.event()?);
    bench.fill(block, producer)?;
    bench.record(filled, producer)?;
    bench.wait(between, filled)?;
    bench.record(passed_on, between)?;
    bench.wait(consumer, passed_on)?;
    bench.copy(Location::Host(host), block, consumer)
}

/// Waits on the host for another stream than the producing one.
pub fn wrong_stream_synchronized(bench: &Bench) -> Result<()> {
    let ((producer, consumer), block, host) = (bench.two_streams()?, bench.block(0)?, bench.host_block()?);
    bench.fill(block, producer)?;
    bench.gpu.synchronize_stream(consumer)?;
    bench.copy(Location::Host(host), block, consumer)
}

/// Waits for the producing stream.
pub fn wrong_stream_synchronized_corrected(bench: &Bench) -> Result<()> {
    let ((producer, consumer), block, host) = (bench.two_streams()?, bench.block(0)?, bench.host_block()?);
    bench.fill(block, producer)?;
    bench.gpu.synchronize_stream(producer)?;
    bench.copy(Location::Host(host), block, consumer)
}

/// Queries the work, and goes on although it is not done.
pub fn pending_taken_as_done(bench: &Bench) -> Result<()> {
    let ((producer, consumer), block, host) = (bench.two_streams()?, bench.block(0)?, bench.host_block()?);
    loop {
        bench.fill(block, producer)?;
        if bench.gpu.query_stream(producer)? == Completion::Pending {
            return bench.copy(Location::Host(host), block, consumer);
        }
    }
}

/// Queries until the work is done.
pub fn pending_taken_as_done_corrected(bench: &Bench) -> Result<()> {
    let ((producer, consumer), block, host) = (bench.two_streams()?, bench.block(0)?, bench.host_block()?);
    bench.fill(block, producer)?;
    while bench.gpu.query_stream(producer)? == Completion::Pending {}
    bench.copy(Location::Host(host), block, consumer)
}

/// Copies from one device to another on a stream of the other, while a stream of the first still writes.
pub fn cross_device_copy(bench: &Bench) -> Result<()> {
    let (producer, consumer) = (bench.stream(0)?, bench.stream(1)?);
    let (from, to) = (bench.block(0)?, bench.block(1)?);
    bench.fill(from, producer)?;
    bench.gpu.synchronize_device(1)?;
    bench.copy(to, from, consumer)
}

/// The stream of the other device waits for an event of the first.
pub fn cross_device_copy_corrected(bench: &Bench) -> Result<()> {
    let (producer, consumer) = (bench.stream(0)?, bench.stream(1)?);
    let (from, to, filled) = (bench.block(0)?, bench.block(1)?, bench.event()?);
    bench.fill(from, producer)?;
    bench.record(filled, producer)?;
    bench.wait(consumer, filled)?;
    bench.copy(to, from, consumer)
}
