//! The speed of the layer over CUDA compared with the vendor's own calls, as a table: `cargo bench -p highwater-cuda
//! --bench speed`.
//!
//! Both sides run in one process over the same libraries, the same primary context and the same matrices, in
//! alternating bursts. A figure is the median of the paired differences, or of the paired ratios if the bar is a ratio,
//! with the 10th and 90th percentile. Streams are synchronized between bursts, and no burst fills a stream's queue
//! (about 1,000 operations). Each row has a warm-up.
//!
//! "Ours" is `Runtime` and its types, with the context current as for raw. Rows with "trait" call `dyn Backend` and
//! `dyn BlasHandle`. The exit status is 1 if a bar is missed, and 2 after an error.

mod binding;
mod copies;
mod events;
mod gemm;
mod machine;
mod measure;
mod options;
mod pinning;
mod pools;
mod raw;
mod table;
mod threads;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use highwater_core::{Backend, Device, Runtime, RuntimeOptions};
use serde_json::json;

use crate::measure::Bursts;
use crate::options::Options;
use crate::raw::Raw;
use crate::table::Table;

/// The objects that every group of rows uses. The primary context is current in the main thread.
struct Bench<'b> {
    options: &'b Options,
    raw: &'b Raw,
    runtime: &'b Runtime,
    device: &'b Device,
}

impl Bench<'_> {
    /// The calls in each burst, with the usual number of pairs.
    fn bursts(&self, calls: usize) -> Bursts {
        let calls = if self.options.quick { calls.min(20) } else { calls };
        Bursts { pairs: self.options.pairs, calls }
    }
}

type Group = fn(&Bench<'_>, &mut Table) -> Result<()>;

/// The groups of rows, by the names that `--only` takes. Pinning is last, because it empties the pools.
const GROUPS: [(&str, Group); 7] = [
    ("gemm", gemm::rows),
    ("bind", binding::rows),
    ("events", events::rows),
    ("pools", pools::rows),
    ("threads", threads::rows),
    ("copies", copies::rows),
    ("pin", pinning::rows),
];

fn main() -> ExitCode {
    let names = GROUPS.map(|(name, _)| name);
    let options = match Options::parse(std::env::args().skip(1), &names) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("speed: {error:#}\n{}", options::usage(&names));
            return ExitCode::from(2);
        }
    };
    let opening = Instant::now();
    let backend = match highwater_cuda::open() {
        Err(unavailable) if options.as_test => {
            eprintln!("speed: there is no CUDA here, nothing is measured: {unavailable}");
            return ExitCode::SUCCESS;
        }
        opened => opened.context("the CUDA backend does not open"),
    };
    let opened = opening.elapsed();
    match backend.and_then(|backend| measure(&options, backend, opened)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("speed: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// Prints the table and returns whether all bars are reached.
fn measure(options: &Options, backend: Arc<dyn Backend>, opened: Duration) -> Result<bool> {
    let start = Instant::now();
    let raw = Raw::open(backend.identity(), 0)?;
    let of_runtime = RuntimeOptions::new().with_blas_workspace_bytes(options.workspace_bytes);
    let runtime = Runtime::with_options(backend, &of_runtime.with_lt_workspace_bytes(options.workspace_bytes))?;
    let device = runtime.device(0)?;

    let machine = machine::describe(&runtime, &device, opened);
    machine.iter().for_each(|(what, value)| println!("{what}: {value}"));
    println!();
    let mut table = Table::begin(!options.quick);
    let mut failed = Vec::new();
    {
        let _current = raw.enter()?;
        let bench = Bench { options, raw: &raw, runtime: &runtime, device: &device };
        for (name, group) in GROUPS {
            if options.wants(name) {
                // The other rows are still useful.
                if let Err(error) = group(&bench, &mut table) {
                    eprintln!("speed: the rows of `{name}` failed: {error:#}");
                    failed.push(name);
                }
            }
        }
    }
    if let Some(path) = &options.json {
        let machine: serde_json::Map<_, _> = machine.into_iter().map(|(what, value)| (what, json!(value))).collect();
        let all = json!({ "machine": machine, "quick": options.quick, "failed": failed, "rows": table.json() });
        std::fs::write(path, format!("{all:#}\n")).with_context(|| format!("writing {}", path.display()))?;
    }
    drop(device);
    let left = runtime.close()?.total();
    println!("\n{left} objects of the backend are left; {:.0} s", start.elapsed().as_secs_f64());
    let missed = table.missed();
    missed.iter().for_each(|what| println!("missed: {what}"));
    ensure!(failed.is_empty(), "these rows failed: {}", failed.join(", "));
    Ok(missed.is_empty())
}
