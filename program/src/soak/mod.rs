//! `highwater soak ipc`: shares memory of the mock device with processes that are killed at random moments.
//!
//! This process is the exporter (`exporter`). It allocates buffers, shares them, frees them while others still use them, and
//! allocates again. Its children are the consumers (`consumer`). They open tickets, once or more often, and use the memory on
//! a stream. They drop it, start a child that holds their descriptors (`heir`), or cut their sockets and continue to write. The
//! exporter or they themselves kill them, at a random step after a random delay. The contents of a buffer name its owner
//! (`pattern`), so early frees and stray writes are found. At the end, everything must be freed.
//!
//! With `--owner-kills`, this process opens the memory of its children instead, and kills those (`owners`).

pub(super) mod consumer;
mod descriptors;
mod exporter;
pub(super) mod heir;
mod message;
pub(super) mod owners;
mod pattern;
mod random;
mod report;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, SystemTime};

use anyhow::Result;
use highwater::ErrorKind;
use highwater::mock::{MockGpu, MockOptions};
use serde_json::Value;

use super::args::SoakIpcArguments;
use super::child;
use super::failure::{self, Failure};
use super::progress::Progress;
use super::table::Table;
use super::{Verdict, output};

/// The time limit of a step. A step that takes longer hangs, which is a defect.
const STUCK: Duration = Duration::from_secs(60);

pub(super) fn command(arguments: &SoakIpcArguments, json: bool) -> Result<Verdict> {
    child::check_rendezvous(false)?;
    let seed = arguments.seed.unwrap_or_else(any_seed);
    output::line(format_args!("seed {seed}"));
    if let Some(kills) = arguments.owner_kills {
        return kill_owners(arguments, kills, seed, json);
    }
    let progress = Progress::new("kills", arguments.kills, json);
    let pulse = watch(json, seed);
    let soak = exporter::Soak { kills: arguments.kills, consumers: arguments.consumers, seed };
    let report = exporter::run(&soak, &progress, &pulse);
    drop(progress);
    let report = report?;
    print(json, report.to_json(), report.to_table(), &report.faults())
}

/// Runs `highwater soak ipc --owner-kills`.
fn kill_owners(arguments: &SoakIpcArguments, kills: u64, seed: u64, json: bool) -> Result<Verdict> {
    let progress = Progress::new("kills", kills, json);
    let pulse = watch(json, seed);
    let soak = owners::Soak { kills, owners: arguments.consumers, seed, backend: arguments.backend.as_deref() };
    let report = owners::run(&soak, &progress, &pulse);
    drop(progress);
    let report = report?;
    print(json, report.to_json(), report.to_table(), &report.faults())
}

/// Prints the report of a soak.
fn print(json: bool, object: Value, table: Table, faults: &[String]) -> Result<Verdict> {
    if json {
        output::object(&object)?
    } else {
        output::result(table)?
    }
    faults.iter().for_each(|fault| output::line(format_args!("error: {fault}")));
    Ok(if faults.is_empty() { Verdict::Good } else { Verdict::Bad })
}

/// Opens the mock of the environment, with a latency for each operation of a stream. It poisons freed memory, and finds
/// memory that is freed while work of its own process uses it.
fn open_mock(latency: Duration) -> highwater::Result<Arc<MockGpu>> {
    MockGpu::open(MockOptions::from_environment()?.with_latency(latency).with_checks())
}

/// Returns a random seed.
pub(super) fn any_seed() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    // Short enough to type.
    (now.as_nanos() as u64 ^ u64::from(std::process::id())) % 1_000_000_000
}

/// Returns the counter of the exporter's steps. If it stands still, a watchdog ends this process with an error, and the
/// consumers end with it.
fn watch(json: bool, seed: u64) -> Arc<AtomicU64> {
    let pulse = Arc::new(AtomicU64::new(0));
    let watched = Arc::clone(&pulse);
    thread::spawn(move || {
        let mut before = None;
        // Relaxed: a counter that orders nothing.
        while before.replace(watched.load(Ordering::Relaxed)) != Some(watched.load(Ordering::Relaxed)) {
            thread::sleep(STUCK);
        }
        let what = format!("the exporter has not moved for {} seconds (seed {seed})", STUCK.as_secs());
        let error = Failure::new(ErrorKind::InvalidState, what, "this is a defect of the library; please report it");
        failure::print(&error.into(), json);
        std::process::exit(2);
    });
    pulse
}
