//! `highwater bench`: parts of the library, row by row, with bars.
//!
//! - `timing`, `memory`: page-locked memory: the rows of time, and those of memory and of whole passes
//! - `shared`: page-locked memory that several processes have
//! - `device`: the device memory of streams
//! - `handles`: the pool of BLAS handles. `first_handle` has the processes that measure the first handles.
//! - `share`: tickets and batches that another process opens
//! - `waits`: futures for the end of device work
//! - `rounds`: runs loops in turn, in threads of their own.
//! - `trace`: the generators of traces, the file format and the replay. `numpy` draws the numbers.
//! - `report`: the rows as a table and as JSON. `peer` has PyTorch's values. `available` is the memory left.

mod available;
mod device;
pub(super) mod first_handle;
mod handles;
mod memory;
mod numpy;
mod peer;
mod report;
mod rounds;
pub(super) mod share;
mod shared;
mod timing;
mod trace;
mod waits;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use highwater::hal::{Backend, counted, display_foreign};
use highwater::{ErrorKind, Runtime};

use self::report::Row;
use self::trace::{Event, Trace};
use super::args::{self, TraceName};
use super::backends::{self, Prober};
use super::child;
use super::failure::Failure;
use super::{Verdict, output};

/// The seeds of a distribution on the mock, where touching memory takes most of the time.
const SEEDS_OF_MOCK: u64 = 10;

/// The part of the library that is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Host,
    Device,
    Handles,
    Share,
    Waits,
}

impl Part {
    /// Returns the word of the command line.
    fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Device => "device",
            Self::Handles => "handles",
            Self::Share => "share",
            Self::Waits => "waits",
        }
    }

    /// Returns the seeds of a distribution on a real device. In device memory, a growth takes more time.
    fn seeds(self) -> u64 {
        if self == Self::Host { 200 } else { 20 }
    }

    fn families(self, bench: &Bench<'_>) -> Vec<Family> {
        match self {
            Self::Host => {
                timing::families(bench).into_iter().chain(memory::families()).chain(shared::families()).collect()
            }
            Self::Device => device::families(bench),
            Self::Handles => handles::families(bench),
            Self::Share => share::families(bench),
            Self::Waits => waits::families(),
        }
    }
}

/// The settings of a run.
struct Bench<'a> {
    part: Part,
    backend: &'a Arc<dyn Backend>,
    /// The backend's address for other processes: see [`backends::address`].
    address: &'a str,
    rounds: u32,
    /// The time of a loop in a round.
    duration: Duration,
    threads: Option<usize>,
    rows: Option<&'a str>,
    seeds: u64,
}

impl Bench<'_> {
    /// Returns a runtime with empty pools.
    fn runtime(&self) -> highwater::Result<Runtime> {
        Runtime::new(Arc::clone(self.backend))
    }

    fn wants(&self, row: &str) -> bool {
        self.rows.is_none_or(|text| row.contains(text))
    }
}

/// Rows that are measured together.
struct Family {
    names: Vec<String>,
    run: fn(&Bench<'_>) -> highwater::Result<Vec<Row>>,
}

pub(super) fn command(what: &args::Bench, json: bool) -> Result<Verdict> {
    let (part, options, traces) = match what {
        args::Bench::Host(arguments) => {
            if let Some(path) = &arguments.write_trace {
                let events = events(arguments.trace);
                trace::write(path, &events)?;
                output::line(format_args!("{} in {}", counted(events.len(), "line"), path.display()));
                return print(&[], json);
            }
            (Part::Host, &arguments.options, Some(&arguments.traces))
        }
        args::Bench::Device(arguments) => (Part::Device, &arguments.options, Some(&arguments.traces)),
        args::Bench::Handles(arguments) => (Part::Handles, &arguments.options, None),
        args::Bench::Share(arguments) => (Part::Share, &arguments.options, None),
        args::Bench::Waits(arguments) => (Part::Waits, &arguments.options, None),
    };
    if part == Part::Share {
        child::check_rendezvous(false)?;
    }
    let replayed = traces.and_then(|traces| traces.replay.as_deref()).map(trace::read).transpose()?;
    let opened = match &options.backend {
        Some(name) => backends::open_by(name, Prober::ThisProgram),
        None => backends::open_best(),
    };
    let opened = opened.map_err(highwater::Error::from)?;
    let address = backends::address(&opened);
    let backend = opened.backend;
    output::line(format_args!("backend {}", display_foreign(&backend.identity().name)));
    let default_seeds = if backend.identity().real_device { part.seeds() } else { SEEDS_OF_MOCK };
    let bench = Bench {
        part,
        backend: &backend,
        address: &address,
        rounds: options.rounds,
        duration: Duration::from_millis(options.milliseconds),
        threads: options.threads,
        rows: options.rows.as_deref(),
        seeds: traces.and_then(|traces| traces.seeds).unwrap_or(default_seeds),
    };
    if let Some(events) = replayed {
        let rows = match part {
            Part::Device => memory::replay(&bench.runtime()?.device(0)?.create_stream()?, &events)?,
            Part::Host | Part::Handles | Part::Share | Part::Waits => memory::replay(&bench.runtime()?, &events)?,
        };
        return print(&rows, json);
    }
    let families = selected(&bench)?;
    let peer = peer::values(&bench, &options.peer)?;
    let mut rows = measure(&bench, families)?;
    report::add_peer(&mut rows, &peer);
    print(&rows, json)
}

fn print(rows: &[Row], json: bool) -> Result<Verdict> {
    if json {
        output::object(&report::to_json(rows))?;
    } else if !rows.is_empty() {
        output::result(report::to_table(rows))?;
    }
    Ok(Verdict::Good)
}

/// Returns the families with a selected row.
fn selected(bench: &Bench<'_>) -> Result<Vec<Family>> {
    let families = bench.part.families(bench);
    let (selected, others): (Vec<Family>, Vec<Family>) =
        families.into_iter().partition(|family| family.names.iter().any(|name| bench.wants(name)));
    if selected.is_empty() {
        let text = display_foreign(bench.rows.unwrap_or_default()).to_string();
        let names: Vec<&str> = others.iter().flat_map(|family| &family.names).map(String::as_str).collect();
        let hint = format!("the rows are {}", names.join(", "));
        return Err(Failure::new(ErrorKind::InvalidArgument, format!("no row has `{text}` in its name"), hint).into());
    }
    Ok(selected)
}

/// Measures the selected rows. A family that the machine has no memory for is skipped.
fn measure(bench: &Bench<'_>, families: Vec<Family>) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for Family { names, run } in families {
        let wanted: Vec<String> = names.into_iter().filter(|name| bench.wants(name)).collect();
        match run(bench) {
            Ok(measured) => rows.extend(measured.into_iter().filter(|row| bench.wants(&row.name))),
            Err(error) if matches!(error.kind(), ErrorKind::OutOfMemory | ErrorKind::Unsupported) => {
                output::line(format_args!("skipped {}: {}", wanted.join(", "), error.message()));
                rows.extend(wanted.into_iter().map(Row::skipped));
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(rows)
}

/// Returns the events of a trace of the table.
fn events(name: TraceName) -> Vec<Event> {
    let traces = match name {
        TraceName::ThreeSeeds => [1, 2, 3].map(Trace::log_uniform).to_vec(),
        TraceName::BlocksThenOdd => Trace::blocks(memory::BLOCKS).to_vec(),
    };
    let starts = traces.iter().scan(0, |id, trace| {
        let first = *id;
        *id += trace.sizes.len() as u64;
        Some(first)
    });
    traces.iter().zip(starts).flat_map(|(trace, first)| trace.events(first)).collect()
}
