//! `highwater soak ipc`: processes that share memory with each other, while some are killed and stopped at random moments.
//!
//! This process is the supervisor (`supervisor`). Its children are the workers (`worker`), which are all alike. Each shares memory
//! and opens that of the others, uses it, checks it and drops it (`operation` has the table). The supervisor passes the tickets on,
//! sends the signals, and keeps the books (`books`) by which it judges what the workers report. It measures the time until nothing
//! of a killed worker is left in the others (`reclaim`). The contents of memory name it (`pattern`), so early frees and stray
//! writes are found.
//!
//! With `--owner-kills`, this process opens the memory of its children instead, and kills those (`owners`). With `--heir-kills`, other
//! children inherit the memory (`succession`).

mod books;
mod descriptors;
mod directory;
pub(super) mod heir;
mod interruption;
mod leftovers;
mod limits;
mod message;
mod operation;
pub(super) mod owners;
mod pattern;
mod random;
mod reclaim;
mod report;
pub(super) mod succession;
mod supervisor;
pub(super) mod worker;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, SystemTime};

use anyhow::Result;
use highwater::hal::Backend;
use highwater::mock::{MockGpu, MockOptions};
use highwater::{Error, ErrorKind};
use rustix::time::{ClockId, clock_gettime};
use serde_json::Value;

use super::args::SoakIpcArguments;
use super::backends::{self, Prober};
use super::child;
use super::failure::{self, Failure};
use super::progress::Progress;
use super::table::Table;
use super::{Verdict, output};

/// The command, for messages.
const COMMAND: &str = "highwater soak ipc";
/// The time limit of a step. A step that takes longer hangs, which is a defect.
const STUCK: Duration = Duration::from_secs(60);
/// The time in which a child opens its device.
const START: Duration = Duration::from_secs(120);
/// Bytes of a ticket.
const TICKET: usize = 136;
/// The duration of an operation on the mock, in the soaks of owners and heirs.
const LATENCY: Duration = Duration::from_micros(20);
/// The interval between attempts of those soaks.
const LOOK: Duration = Duration::from_micros(50);
/// The time limit of operations that take milliseconds, for a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

pub(super) fn command(arguments: &SoakIpcArguments, json: bool) -> Result<Verdict> {
    child::check_rendezvous(false)?;
    let seed = arguments.seed.unwrap_or_else(any_seed);
    output::line(format_args!("seed {seed}"));
    let kills = arguments.owner_kills.or(arguments.heir_kills).unwrap_or(arguments.kills);
    let (processes, backend) = (arguments.processes, arguments.backend.as_deref());
    limits::check_descriptors(processes as u64)?;
    let progress = Progress::new("kills", kills, json);
    let pulse = watch(json, seed);
    if arguments.owner_kills.is_some() {
        let soak = owners::Soak { kills, owners: processes, seed, backend };
        let report = owners::run(&soak, &progress, &pulse);
        drop(progress);
        let report = report?;
        return print(json, report.to_json(), report.to_table(), &report.faults());
    }
    if arguments.heir_kills.is_some() {
        let report = succession::run(&succession::Soak { kills, seed, backend }, &progress, &pulse);
        drop(progress);
        let report = report?;
        return print(json, report.to_json(), report.to_table(), &report.faults());
    }
    let report = supervisor::run(&supervisor::Soak { kills, processes, seed, backend }, &progress, &pulse);
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

/// An opened backend, its address for other processes, and the mock if it is one.
struct Opened {
    backend: Arc<dyn Backend>,
    address: String,
    mock: Option<Arc<MockGpu>>,
}

impl Opened {
    /// Opens the mock of the environment, with a latency for each operation of a stream. It poisons freed memory, and finds
    /// memory that is freed while work of its own process uses it.
    fn mock(latency: Duration) -> highwater::Result<Self> {
        let gpu = MockGpu::open(MockOptions::from_environment()?.with_latency(latency).with_checks())?;
        Ok(Self { backend: Arc::<MockGpu>::clone(&gpu), address: "mock".to_owned(), mock: Some(gpu) })
    }
}

/// Opens a backend by name, and by default the mock.
fn open(name: Option<&str>, latency: Duration) -> Result<Opened> {
    match name {
        Some(name) if name != "mock" => {
            let opened = backends::open_by(name, Prober::ThisProgram).map_err(Error::from)?;
            let address = backends::address(&opened);
            Ok(Opened { backend: opened.backend, address, mock: None })
        }
        _ => Ok(Opened::mock(latency)?),
    }
}

/// Opens the backend that the parent of this process has opened.
fn reopen(address: &str, latency: Duration) -> highwater::Result<Opened> {
    if address == "mock" {
        return Opened::mock(latency);
    }
    Ok(Opened { backend: backends::reopen(address)?, address: address.to_owned(), mock: None })
}

/// Returns the number of open descriptors of this process.
fn descriptors() -> Result<usize> {
    Ok(std::fs::read_dir("/proc/self/fd")?.count())
}

/// Returns the time of the monotonic clock in nanoseconds. All processes have it in common.
fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// Returns whether a process keeps the memory of another one after its death. The choice is by pair, so that the supervisor knows it.
fn keeps(process: u32, owner: u32) -> bool {
    (process ^ owner) % 4 == 3
}

/// Returns a random seed.
pub(super) fn any_seed() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    // Short enough to type.
    (now.as_nanos() as u64 ^ u64::from(std::process::id())) % 1_000_000_000
}

/// Returns the counter of the supervisor's steps. If it stands still, a watchdog ends this process with an error, and the
/// workers end with it.
fn watch(json: bool, seed: u64) -> Arc<AtomicU64> {
    let pulse = Arc::new(AtomicU64::new(0));
    let watched = Arc::clone(&pulse);
    thread::spawn(move || {
        let mut before = None;
        // Relaxed: a counter that orders nothing.
        while before.replace(watched.load(Ordering::Relaxed)) != Some(watched.load(Ordering::Relaxed)) {
            thread::sleep(STUCK);
        }
        let what = format!("the soak has not moved for {} seconds (seed {seed})", STUCK.as_secs());
        let error = Failure::new(ErrorKind::InvalidState, what, "this is a defect of the library; please report it");
        failure::print(&error.into(), json);
        std::process::exit(2);
    });
    pulse
}
