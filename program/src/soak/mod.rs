//! `highwater soak ipc`: shares memory of the mock device with processes that are killed at random moments.
//!
//! This process is the exporter (`exporter`): it allocates buffers, shares them, frees them while others still use them, and
//! allocates again. Its children are the consumers (`consumer`): they open tickets, once or often, use the memory on a
//! stream, drop it, leave a child behind that holds their descriptors (`heir`) or cut their sockets and go on writing, and are
//! killed, by the exporter or by themselves, at a random step after a random delay. What is in a buffer tells whose it is (`pattern`), so that memory
//! that is freed too early, or written by somebody who has lost it, shows. At the end everything has to be back.

pub(super) mod consumer;
mod descriptors;
mod exporter;
pub(super) mod heir;
mod message;
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

use super::args::SoakIpcArguments;
use super::failure::{self, Failure};
use super::progress::Progress;
use super::{Verdict, output};

/// Longer than any step can take. A step that takes longer hangs, and is a defect.
const STUCK: Duration = Duration::from_secs(60);

pub(super) fn command(arguments: &SoakIpcArguments, json: bool) -> Result<Verdict> {
    let seed = arguments.seed.unwrap_or_else(any_seed);
    output::line(format_args!("seed {seed}"));
    let progress = Progress::new("kills", arguments.kills, json);
    let pulse = watch(json, seed);
    let soak = exporter::Soak { kills: arguments.kills, consumers: arguments.consumers, seed };
    let report = exporter::run(&soak, &progress, &pulse);
    drop(progress);
    let report = report?;
    if json {
        output::object(&report.to_json())?
    } else {
        output::result(report.to_table())?
    }
    let faults = report.faults();
    faults.iter().for_each(|fault| output::line(format_args!("error: {fault}")));
    Ok(if faults.is_empty() { Verdict::Good } else { Verdict::Bad })
}

/// The mock as the environment describes it, with an extra time for each operation of a stream. It poisons what is freed,
/// and finds what is freed while work of its own process uses it.
fn open_mock(latency: Duration) -> highwater::Result<Arc<MockGpu>> {
    MockGpu::open(MockOptions::from_environment()?.with_latency(latency).with_checks())
}

/// Another seed each time.
pub(super) fn any_seed() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    // Short enough to be typed.
    (now.as_nanos() as u64 ^ u64::from(std::process::id())) % 1_000_000_000
}

/// Counts the exporter's steps. Where none is made for long, a watchdog ends this process with an error; the consumers end
/// with it.
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
