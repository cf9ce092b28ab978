//! Mistakes with the CPU's own accesses to page-locked memory.

use highwater_hal::{Backend, Location, Result};

use super::Bench;

/// Reads a result right after the call that copies it.
pub fn read_too_early(bench: &Bench) -> Result<()> {
    let (stream, block, host) = (bench.stream(0)?, bench.block(0)?, bench.host_block()?);
    bench.copy(Location::Host(host), block, stream)?;
    bench.access(host, false);
    Ok(())
}

/// Waits for the copy first.
pub fn read_too_early_corrected(bench: &Bench) -> Result<()> {
    let (stream, block, host) = (bench.stream(0)?, bench.block(0)?, bench.host_block()?);
    bench.copy(Location::Host(host), block, stream)?;
    bench.gpu.synchronize_stream(stream)?;
    bench.access(host, false);
    Ok(())
}

/// Fills a block with the next values while a copy still reads the last ones, after a wait for the copy before.
pub fn overwritten_during_the_copy(bench: &Bench) -> Result<()> {
    let (stream, block, host, copied) = (bench.stream(0)?, bench.block(0)?, bench.host_block()?, bench.event()?);
    bench.access(host, true);
    bench.copy(block, Location::Host(host), stream)?;
    bench.record(copied, stream)?;
    bench.copy(block, Location::Host(host), stream)?;
    bench.gpu.synchronize_event(copied)?;
    bench.access(host, true);
    Ok(())
}

/// Waits for the last copy. A read meanwhile is no mistake.
pub fn overwritten_during_the_copy_corrected(bench: &Bench) -> Result<()> {
    let (stream, block, host, copied) = (bench.stream(0)?, bench.block(0)?, bench.host_block()?, bench.event()?);
    bench.access(host, true);
    bench.copy(block, Location::Host(host), stream)?;
    bench.copy(block, Location::Host(host), stream)?;
    bench.record(copied, stream)?;
    bench.access(host, false);
    bench.gpu.synchronize_event(copied)?;
    bench.access(host, true);
    Ok(())
}

/// Enqueues a copy into memory that the CPU is still reading: the end of the access comes after it.
pub fn copied_during_the_access(bench: &Bench) -> Result<()> {
    let (stream, block, host) = (bench.stream(0)?, bench.block(0)?, bench.host_block()?);
    bench.access(host, false);
    bench.copy(Location::Host(host), block, stream)?;
    bench.access(host, false);
    Ok(())
}

/// Copies when the access has ended.
pub fn copied_during_the_access_corrected(bench: &Bench) -> Result<()> {
    let (stream, block, host) = (bench.stream(0)?, bench.block(0)?, bench.host_block()?);
    bench.access(host, false);
    bench.access(host, false);
    bench.copy(Location::Host(host), block, stream)
}
