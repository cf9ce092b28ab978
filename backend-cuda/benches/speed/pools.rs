//! The cost of the pools and of sharing, for information.

use anyhow::{Result, ensure};
use highwater_core::ErrorKind;

use crate::Bench;
use crate::measure::{alone, alternate};
use crate::raw::done;
use crate::table::{Row, Table};

pub(crate) fn rows(bench: &Bench<'_>, table: &mut Table) -> Result<()> {
    let Bench { raw, device, runtime, .. } = bench;
    let bytes = if bench.options.quick { 64 << 10 } else { 1 << 20 };
    let stream = device.create_stream()?;
    if device.capabilities().stream_ordered_memory {
        let raw_stream = raw.stream()?;
        let settle = |_| {
            raw.synchronize(&raw_stream)?;
            Ok(stream.synchronize()?)
        };
        let by_raw = |_| {
            let mut memory = 0;
            // SAFETY: the call writes one number that lives until it returns; the stream is alive.
            let code = unsafe { (raw.cuda.allocate_async)(&mut memory, bytes, raw_stream.get()) };
            done("cuMemAllocAsync", code)?;
            // SAFETY: allocated just now on this stream, and nothing uses it.
            done("cuMemFreeAsync", unsafe { (raw.cuda.free_async)(memory, raw_stream.get()) })
        };
        let ours = |_| {
            drop(stream.allocate::<u8>(bytes)?);
            Ok(())
        };
        let pairs = alternate(bench.bursts(100), settle, ours, by_raw)?;
        let what =
            format!("allocate and free {} KiB in stream order; raw: cuMemAllocAsync, cuMemFreeAsync", bytes >> 10);
        table.push(Row::pairs(what, &pairs));
    }

    let shared = match device.allocate_shared::<u8>(bytes) {
        Ok(shared) => shared,
        Err(error) if error.kind() == ErrorKind::Unsupported => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let share = |_| {
        let opened = runtime.open_shared::<u8>(&shared.share()?)?;
        ensure!(opened.ptr() == shared.ptr(), "a process's own buffer opens as the original");
        Ok(())
    };
    let times = alone(bench.bursts(50), || Ok(()), share)?;
    table.push(Row::alone("share a buffer, open the ticket in the same process, drop", &times));
    drop(shared);
    runtime.trim_shared()?;
    Ok(())
}
