//! `highwater bench host`: the pool of page-locked memory, row by row, with bars.
//!
//! - `timing`: the rows of time. `rounds` runs their loops in turn, in threads of their own.
//! - `memory`: the rows of memory and of whole passes. `trace` has the generators, the file format and the replay. `numpy` draws
//!   the numbers.
//! - `report`: the rows as a table and as JSON. `peer` has PyTorch's values. `available` is the memory left.

mod available;
mod memory;
mod numpy;
mod peer;
mod report;
mod rounds;
mod timing;
mod trace;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use highwater::hal::{Backend, display_foreign};
use highwater::{ErrorKind, Runtime};

use self::report::Row;
use self::trace::{Event, Trace};
use super::args::{BenchHostArguments, TraceName};
use super::backends::{self, Prober};
use super::failure::Failure;
use super::{Verdict, output};

/// The seeds of a distribution on a real device, and on the mock, where touching memory takes most of the time.
const SEEDS: u64 = 200;
const SEEDS_OF_MOCK: u64 = 10;

/// The settings of a run.
struct Bench<'a> {
    backend: &'a Arc<dyn Backend>,
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

pub(super) fn command(arguments: &BenchHostArguments, json: bool) -> Result<Verdict> {
    if let Some(path) = &arguments.write_trace {
        let events = events(arguments.trace);
        trace::write(path, &events)?;
        output::line(format_args!("{} lines in {}", events.len(), path.display()));
        return print(&[], json);
    }
    let replayed = arguments.replay.as_deref().map(trace::read).transpose()?;
    let opened = match &arguments.backend {
        Some(name) => backends::open_by(name, Prober::ThisProgram),
        None => backends::open_best(),
    };
    let backend = opened.map_err(highwater::Error::from)?.backend;
    output::line(format_args!("backend {}", display_foreign(&backend.identity().name)));
    let default_seeds = if backend.identity().real_device { SEEDS } else { SEEDS_OF_MOCK };
    let bench = Bench {
        backend: &backend,
        rounds: arguments.rounds,
        duration: Duration::from_millis(arguments.milliseconds),
        threads: arguments.threads,
        rows: arguments.rows.as_deref(),
        seeds: arguments.seeds.unwrap_or(default_seeds),
    };
    if let Some(events) = replayed {
        return print(&memory::replay(&bench, &events)?, json);
    }
    let families = selected(&bench)?;
    let peer = peer::values(&bench, arguments)?;
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
    let mut families = timing::families(bench);
    families.extend(memory::families());
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
