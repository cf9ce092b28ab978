//! Mistakes with blocks of memory.

use highwater_hal::{Backend, Location, Result};

use super::Bench;

/// Overwrites a block while a copy on another stream still reads it.
pub fn fill_against_copy(bench: &Bench) -> Result<()> {
    let ((copying, filling), block, host) = (bench.two_streams()?, bench.block(0)?, bench.host_block()?);
    bench.copy(Location::Host(host), block, copying)?;
    bench.fill(block, filling)
}

/// Both on one stream, in order.
pub fn fill_against_copy_corrected(bench: &Bench) -> Result<()> {
    let (stream, block, host) = (bench.stream(0)?, bench.block(0)?, bench.host_block()?);
    bench.copy(Location::Host(host), block, stream)?;
    bench.fill(block, stream)
}

/// Frees a block right after the call that uses it.
pub fn freed_in_use(bench: &Bench) -> Result<()> {
    let (stream, block, host) = (bench.stream(0)?, bench.block(0)?, bench.host_block()?);
    bench.copy(block, Location::Host(host), stream)?;
    bench.free(block, None)
}

/// Waits for the work first.
pub fn freed_in_use_corrected(bench: &Bench) -> Result<()> {
    let (stream, block, host) = (bench.stream(0)?, bench.block(0)?, bench.host_block()?);
    bench.copy(block, Location::Host(host), stream)?;
    bench.gpu.synchronize_device(0)?;
    bench.free(block, None)
}

/// Frees page-locked memory before the copy from it is done.
pub fn host_block_freed(bench: &Bench) -> Result<()> {
    let (stream, block, host) = (bench.stream(0)?, bench.block(0)?, bench.host_block()?);
    bench.copy(block, Location::Host(host), stream)?;
    bench.free_host_block(host)
}

/// Waits for an event after the copy.
pub fn host_block_freed_corrected(bench: &Bench) -> Result<()> {
    let (stream, block, host) = (bench.stream(0)?, bench.block(0)?, bench.host_block()?);
    let copied = bench.event()?;
    bench.copy(block, Location::Host(host), stream)?;
    bench.record(copied, stream)?;
    bench.gpu.synchronize_event(copied)?;
    bench.free_host_block(host)
}

/// Copies into a host block on one stream, while another stream still copies from it.
pub fn host_block_reused(bench: &Bench) -> Result<()> {
    let ((up, down), host) = (bench.two_streams()?, bench.host_block()?);
    let (input, output) = (bench.block(0)?, bench.block(0)?);
    bench.copy(input, Location::Host(host), up)?;
    bench.copy(Location::Host(host), output, down)
}

/// The second stream waits for the first copy.
pub fn host_block_reused_corrected(bench: &Bench) -> Result<()> {
    let ((up, down), host, copied) = (bench.two_streams()?, bench.host_block()?, bench.event()?);
    let (input, output) = (bench.block(0)?, bench.block(0)?);
    bench.copy(input, Location::Host(host), up)?;
    bench.record(copied, up)?;
    bench.wait(down, copied)?;
    bench.copy(Location::Host(host), output, down)
}

/// Frees a block in the order of one stream while another stream still uses it.
pub fn freed_on_another_stream(bench: &Bench) -> Result<()> {
    let ((freeing, using), made) = (bench.two_streams()?, bench.event()?);
    let block = bench.block_in_order_of(freeing)?;
    bench.record(made, freeing)?;
    bench.wait(using, made)?;
    bench.fill(block, using)?;
    bench.free(block, Some(freeing))
}

/// The freeing stream waits for the work.
pub fn freed_on_another_stream_corrected(bench: &Bench) -> Result<()> {
    let ((freeing, using), made, used) = (bench.two_streams()?, bench.event()?, bench.event()?);
    let block = bench.block_in_order_of(freeing)?;
    bench.record(made, freeing)?;
    bench.wait(using, made)?;
    bench.fill(block, using)?;
    bench.record(used, using)?;
    bench.wait(freeing, used)?;
    bench.free(block, Some(freeing))
}

/// Uses a block on one stream that was allocated in the order of another.
pub fn allocated_on_another_stream(bench: &Bench) -> Result<()> {
    let (allocating, using) = bench.two_streams()?;
    let block = bench.block_in_order_of(allocating)?;
    bench.fill(block, using)
}

/// The other stream waits until the block exists.
pub fn allocated_on_another_stream_corrected(bench: &Bench) -> Result<()> {
    let ((allocating, using), made) = (bench.two_streams()?, bench.event()?);
    let block = bench.block_in_order_of(allocating)?;
    bench.record(made, allocating)?;
    bench.wait(using, made)?;
    bench.fill(block, using)
}
