//! The one-time cost of the first handle. For information.

use std::time::Instant;

use anyhow::Result;

use crate::Bench;
use crate::table::{Row, Table};

pub(crate) fn rows(bench: &Bench<'_>, table: &mut Table) -> Result<()> {
    let stream = bench.device.create_stream()?;
    let start = Instant::now();
    drop(stream.blas()?);
    let lease = start.elapsed();
    // The first handle of the process loads the library's kernels, which favors the raw handle.
    let start = Instant::now();
    let handle = bench.raw.handle()?;
    let create = start.elapsed();
    drop(handle);
    let [lease, create] = [lease, create].map(|time| time.as_nanos() as f64);
    table.push(Row::once("first lease of the process; raw: the second cublasCreate", lease, Some(create)));
    Ok(())
}
