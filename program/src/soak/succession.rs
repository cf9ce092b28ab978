//! `highwater soak ipc --heir-kills`: kills owners whose memory has heirs, and measures the time until an old ticket opens again.
//!
//! Owners and heirs are children of this process (`command`). Each heir opens the memory of each owner with `OwnerDeath::Inherit`. This
//! process kills the owner, and then opens a ticket that it has not opened before. It measures the time until that succeeds. One heir,
//! and only one, must answer. Some of these heirs are killed as well, and the next one must answer. At the end of each round, the heirs
//! drop their buffers while this process uses the memory. Then everything must be released.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use highwater::hal::counted;
use highwater::{Device, DeviceBuffer, ErrorKind, ImportOptions, OwnerDeath, Runtime, Stream, Ticket, Transport};
use serde_json::{Value, json};

use super::super::args::ChildArguments;
use super::super::backends;
use super::super::child::{self, Child};
use super::super::failure::{Explanation, Failure};
use super::super::frame::{Message as _, messages};
use super::super::progress::Progress;
use super::super::table::Table;
use super::super::{Verdict, output};
use super::leftovers::{Baseline, Left, close};
use super::random::Random;
use super::report::{Reasons, is_bar_met, times_to_json, times_to_text};
use super::{LATENCY, LOOK, Opened, PATIENCE, START, TICKET};

/// The bar: after 99 kills in 100, an old ticket opens within this time.
const BAR: Duration = Duration::from_millis(150);
/// The heirs of each owner.
const HEIRS: usize = 3;

messages! {
    /// A message to an owner or an heir.
    enum Order {
        1 Begin { backend: String },
        /// Share this many buffers of a length, filled with a value.
        2 Share { count: u64, len: u64, value: u32 },
        /// Open tickets, to inherit their memory.
        3 Inherit { tickets: Vec<u8> },
        /// Tell what this process answers for.
        4 Tell,
        /// Drop all buffers.
        5 Drop,
    }
}

messages! {
    /// The answer of an owner or an heir.
    enum Notice {
        6 Shared { tickets: Vec<u8> },
        7 Done,
        /// The allocations that this process answers for, those of them in limbo, and the memory that it has mapped.
        8 State { exports: u64, limbo: u64, mappings: u64 },
        9 Failed(why: Explanation),
    }
}

/// The task of a run.
#[derive(Debug)]
pub(super) struct Soak<'a> {
    pub(super) kills: u64,
    pub(super) seed: u64,
    /// The backend by name; otherwise the mock.
    pub(super) backend: Option<&'a str>,
}

#[derive(Debug, Default)]
pub(super) struct Report {
    backend: String,
    seed: u64,
    is_real: bool,
    kills: u64,
    /// Of the kills, those of heirs that answered.
    heir_kills: u64,
    buffers: u64,
    bytes: u64,
    /// From the kill until an old ticket opened.
    times: Vec<Duration>,
    /// Contents that were not the buffer's own.
    early_frees: u64,
    /// Deaths after which not exactly one heir answered.
    double_owners: u64,
    left: Left,
    unexpected: Reasons,
    elapsed: Duration,
}

pub(super) fn run(soak: &Soak<'_>, progress: &Progress, pulse: &AtomicU64) -> Result<Report> {
    let started = Instant::now();
    let Opened { backend, address, mock } = super::open(soak.backend, LATENCY)?;
    output::line(format_args!("backend {}", backend.identity().name));
    let is_real = backend.identity().real_device;
    let runtime = Runtime::new(backend)?;
    let device = runtime.device(0)?;
    if !device.capabilities().ipc_transports.contains(Transport::Descriptor) {
        let what = format!("{} does not share memory by descriptor", device.info().name);
        return Err(Failure::new(ErrorKind::Unsupported, what, "use a device that does: heirs keep descriptors").into());
    }
    let stream = device.create_stream()?;
    let report = Report { backend: address.clone(), seed: soak.seed, is_real, ..Report::default() };
    let mut opener =
        Opener { address, runtime: runtime.clone(), device, stream, random: Random::new(soak.seed), report };
    let mut heirs = (0..HEIRS).map(|_| opener.start()).collect::<Result<Vec<_>>>()?;
    let mut baseline = None;
    let mut value = 0;
    while opener.report.kills < soak.kills && opener.report.unexpected.count() < 20 {
        pulse.fetch_add(1, Ordering::Relaxed);
        value += 1;
        let before = opener.report.kills;
        opener.round(&mut heirs, value, soak.kills - before)?;
        progress.advance(opener.report.kills - before);
        // After the first round, every object of the first use exists. Each child has memory of its own on a device.
        if baseline.is_none() {
            heirs.clear();
            baseline = Some(Baseline::new(opener.free()?)?);
            heirs = (0..HEIRS).map(|_| opener.start()).collect::<Result<Vec<_>>>()?;
        }
    }
    heirs.clear();
    let left = baseline.map(|baseline| baseline.left(|| opener.free())).transpose()?;
    let mut report = opener.end();
    report.left = left.unwrap_or_default();
    report.left.objects = close(runtime, mock, &mut report.unexpected);
    report.elapsed = started.elapsed();
    Ok(report)
}

/// This process, which opens old tickets.
struct Opener {
    address: String,
    runtime: Runtime,
    device: Device,
    stream: Stream,
    random: Random,
    report: Report,
}

impl Opener {
    fn end(self) -> Report {
        self.report
    }

    fn start(&self) -> Result<Child> {
        let arguments: Vec<String> =
            std::iter::once("soak-successor".to_owned()).chain(backends::arguments_of_children()).collect();
        let child = Child::start(&arguments).map_err(|error| {
            let hint = "raise the limits on processes (ulimit -u) and descriptors (ulimit -n)";
            Failure::new(ErrorKind::OperatingSystem, "a process could not be started", hint).because_of(error)
        })?;
        Order::Begin { backend: self.address.clone() }.send(child.socket())?;
        Ok(child)
    }

    fn free(&self) -> Result<u64> {
        self.stream.synchronize()?;
        self.runtime.trim()?;
        Ok(self.device.memory_info()?.free)
    }

    /// Kills an owner, and sometimes the heirs that answer after it. Replaces the latter.
    fn round(&mut self, heirs: &mut Vec<Child>, value: u32, most_kills: u64) -> Result<()> {
        let mut owner = self.start()?;
        let (count, len) = (self.random.within(2..6), 1 << self.random.within(8..18));
        Order::Share { count, len, value }.send(owner.socket())?;
        let Notice::Shared { tickets: bytes } = answer(&mut owner)? else { return Err(astray()) };
        let tickets = bytes.chunks(TICKET).map(Ticket::from_bytes).collect::<highwater::Result<Vec<_>>>()?;
        self.report.buffers += count;
        self.report.bytes += tickets.iter().map(Ticket::bytes).sum::<u64>();
        for heir in heirs.iter_mut() {
            Order::Inherit { tickets: bytes.clone() }.send(heir.socket())?;
        }
        for heir in heirs.iter_mut() {
            expect_done(heir)?;
        }
        // An importer that lives through all of it.
        let known = self.runtime.open_shared::<u32>(&tickets[0])?;
        let mut opened: Vec<DeviceBuffer<u32>> = vec![known];
        let mut unopened = tickets[1..].iter();
        let mut dead = owner;
        let mut most_kills = most_kills;
        while let Some(ticket) = unopened.next() {
            let started = Instant::now();
            dead.kill()?;
            self.report.kills += 1;
            most_kills -= 1;
            opened.extend(self.open_again(ticket, started));
            for buffer in &opened {
                self.check(buffer, value)?;
            }
            let winner = self.winner(heirs, count)?;
            // With the last heir, the memory would end.
            let Some(winner) = winner.filter(|_| heirs.len() > 1 && most_kills > 0 && self.random.percent(30)) else {
                break;
            };
            if unopened.len() == 0 {
                break;
            }
            self.report.heir_kills += 1;
            dead = heirs.swap_remove(winner);
        }
        drop(dead);
        for heir in heirs.iter_mut() {
            Order::Drop.send(heir.socket())?;
            expect_done(heir)?;
        }
        // All heirs have dropped it, and this process still uses it.
        for buffer in &opened {
            self.stream.fill(buffer, value + 1)?;
            self.check(buffer, value + 1)?;
        }
        drop(opened);
        self.stream.synchronize()?;
        let runtime = self.runtime.clone();
        self.wait("memory of a dead owner is still mapped", || Ok(runtime.statistics().sharing.mappings == 0))?;
        for heir in heirs.iter_mut() {
            self.wait("an heir has not released its memory", || Ok(state(heir)? == (0, 0, 0)))?;
        }
        while heirs.len() < HEIRS {
            heirs.push(self.start()?);
        }
        Ok(())
    }

    /// Opens a ticket of a dead owner as soon as an heir answers.
    fn open_again(&mut self, ticket: &Ticket, started: Instant) -> Option<DeviceBuffer<u32>> {
        loop {
            match self.runtime.open_shared(ticket) {
                Ok(buffer) => {
                    self.report.times.push(started.elapsed());
                    return Some(buffer);
                }
                Err(error) if error.kind() != ErrorKind::Expired || started.elapsed() > PATIENCE => {
                    self.report.unexpected.add(format!("an old ticket does not open: {error}"));
                    return None;
                }
                Err(_) => thread::sleep(LOOK),
            }
        }
    }

    fn check(&mut self, buffer: &DeviceBuffer<u32>, value: u32) -> Result<()> {
        if self.stream.download(buffer)?.iter().any(|&is| is != value) {
            self.report.early_frees += 1;
        }
        Ok(())
    }

    /// Returns the heir that answers for all memory of the round. It must be one.
    fn winner(&mut self, heirs: &mut [Child], count: u64) -> Result<Option<usize>> {
        let mut answering = Vec::new();
        for (at, heir) in heirs.iter_mut().enumerate() {
            match state(heir)? {
                (0, ..) => {}
                (exports, ..) => {
                    answering.push(at);
                    if exports != count {
                        self.report
                            .unexpected
                            .add(format!("an heir answers for {exports} of {}", counted(count, "allocation")));
                    }
                }
            }
        }
        if answering.len() != 1 {
            self.report.double_owners += 1;
        }
        Ok(answering.first().copied())
    }

    fn wait(&mut self, what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !is_so()? {
            if Instant::now() > deadline {
                self.report.unexpected.add(format!("{what} after {} seconds", PATIENCE.as_secs()));
                break;
            }
            thread::sleep(LOOK);
        }
        Ok(())
    }
}

fn astray() -> anyhow::Error {
    let hint = "this is a defect of the program; please report it";
    Failure::new(ErrorKind::InvalidState, "a process of the soak gave an answer to another question", hint).into()
}

/// Waits for the answer of a child.
fn answer(child: &mut Child) -> Result<Notice> {
    let lost = |why: String| {
        let what = format!("a process of the soak is lost: {why}");
        Failure::new(ErrorKind::OperatingSystem, what, "look at its messages above")
    };
    match child.wait_for::<Notice>(START)? {
        Some(Notice::Failed(why)) => Err(lost(format!("{} {}", why.message, why.hint)).into()),
        Some(notice) => Ok(notice),
        None => Err(lost(format!("it ended, or was silent for {} seconds", START.as_secs())).into()),
    }
}

fn expect_done(child: &mut Child) -> Result<()> {
    match answer(child)? {
        Notice::Done => Ok(()),
        _ => Err(astray()),
    }
}

/// Returns the allocations that a child answers for, those in limbo, and the mappings.
fn state(child: &mut Child) -> Result<(u64, u64, u64)> {
    Order::Tell.send(child.socket())?;
    match answer(child)? {
        Notice::State { exports, limbo, mappings } => Ok((exports, limbo, mappings)),
        _ => Err(astray()),
    }
}

/// Runs an owner or an heir until it is killed.
pub(in super::super) fn command(arguments: &ChildArguments) -> Result<Verdict> {
    let (socket, mut inbox) = child::serve(arguments.parent, c"hw-successor", "highwater soak ipc --heir-kills")?;
    let Some(Order::Begin { backend }) = inbox.wait(&socket)? else {
        let hint = "`highwater soak ipc --heir-kills` starts this process, and says what to open";
        return Err(Failure::new(ErrorKind::InvalidState, "this process has nothing to open", hint).into());
    };
    let mut holder = match Holder::open(&backend) {
        Ok(holder) => holder,
        Err(error) => {
            Notice::Failed(Explanation::of(&error)).send(&socket)?;
            return Err(error);
        }
    };
    while let Some(order) = inbox.wait(&socket)? {
        let notice = holder.obey(order).unwrap_or_else(|error| Notice::Failed(Explanation::of(&error)));
        if notice.send(&socket).is_err() {
            child::die();
        }
    }
    Ok(Verdict::Good)
}

/// An owner or an heir, with its buffers.
struct Holder {
    buffers: Vec<DeviceBuffer<u32>>,
    stream: Stream,
    device: Device,
    runtime: Runtime,
}

impl Holder {
    fn open(address: &str) -> Result<Self> {
        let runtime = Runtime::new(super::reopen(address, LATENCY)?.backend)?;
        let device = runtime.device(0)?;
        Ok(Self { buffers: Vec::new(), stream: device.create_stream()?, device, runtime })
    }

    fn obey(&mut self, order: Order) -> Result<Notice> {
        match order {
            Order::Begin { .. } => Ok(Notice::Done),
            Order::Share { count, len, value } => {
                let mut tickets = Vec::new();
                for _ in 0..count {
                    let len = usize::try_from(len)?;
                    let buffer = self.device.allocate_shared_by::<u32>(len, Transport::Descriptor)?;
                    self.stream.fill(&buffer, value)?;
                    tickets.extend(buffer.share()?.to_bytes());
                    self.buffers.push(buffer);
                }
                Ok(Notice::Shared { tickets })
            }
            Order::Inherit { tickets } => {
                let options = ImportOptions::new().with_owner_death(OwnerDeath::Inherit);
                for ticket in tickets.chunks(TICKET) {
                    let ticket = Ticket::from_bytes(ticket)?;
                    self.buffers.push(self.runtime.open_shared_with(&ticket, &options)?);
                }
                Ok(Notice::Done)
            }
            Order::Tell => {
                let sharing = self.runtime.statistics().sharing;
                let (exports, limbo) = (sharing.exported_blocks, sharing.limbo_blocks);
                Ok(Notice::State { exports, limbo, mappings: sharing.mappings })
            }
            Order::Drop => {
                self.buffers.clear();
                Ok(Notice::Done)
            }
        }
    }
}

impl Report {
    /// Returns the faults of the run.
    pub(super) fn faults(&self) -> Vec<String> {
        // The libraries of a real device open files of their own, and other processes may use its memory.
        let of_process = |count: u64| if self.is_real { 0 } else { count };
        let counts = [
            ("early frees", self.early_frees),
            ("deaths without exactly one heir", self.double_owners),
            ("bytes leaked", of_process(self.left.bytes)),
            ("objects still alive at the end", self.left.objects),
            ("descriptors left", of_process(self.left.descriptors)),
            ("unexpected", self.unexpected.count()),
        ];
        let mut faults: Vec<_> =
            counts.iter().filter(|(_, count)| *count > 0).map(|(what, count)| format!("{what}: {count}")).collect();
        faults.extend(self.unexpected.texts().map(|reason| format!("unexpected: {reason}")));
        if self.is_bar_met() == Some(false) {
            faults.push(format!("after one kill in 100, an old ticket needed more than {} ms", BAR.as_millis()));
        }
        faults
    }

    /// Returns whether the bar is met. `None` for too few kills.
    fn is_bar_met(&self) -> Option<bool> {
        is_bar_met(&self.times, BAR)
    }

    pub(super) fn to_json(&self) -> Value {
        json!({
            "backend": self.backend,
            "seed": self.seed,
            "kills": self.kills,
            "heir_kills": self.heir_kills,
            "measured": self.times.len(),
            "buffers": self.buffers,
            "bytes": self.bytes,
            "open_ms": times_to_json(&self.times),
            "bar_met": self.is_bar_met(),
            "early_frees": self.early_frees,
            "double_owners": self.double_owners,
            "leaked_bytes": self.left.bytes,
            "leaked_objects": self.left.objects,
            "descriptors_left": self.left.descriptors,
            "unexpected": self.unexpected.count(),
            "seconds": self.elapsed.as_secs_f64(),
        })
    }

    pub(super) fn to_table(&self) -> Table {
        let Self { kills, heir_kills, buffers, bytes, early_frees, double_owners, .. } = self;
        let seconds = self.elapsed.as_secs_f64();
        let left = self.left.counted();
        let mut table = Table::default();
        table.add_row(["kills", &format!("{kills} in {seconds:.1} s; {heir_kills} of them heirs that answered")]);
        table.add_row([
            "memory",
            &format!("{}, {}, {HEIRS} heirs", counted(*buffers, "buffer"), counted(*bytes, "byte")),
        ]);
        table.add_row(["kill to open", &times_to_text(&self.times)]);
        table.add_row([
            "faults",
            &format!(
                "{}, {} without exactly one heir",
                counted(*early_frees, "early free"),
                counted(*double_owners, "death")
            ),
        ]);
        table.add_row(["left", &left]);
        table
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::frame::tests::check_round_trip;
    use super::*;

    #[test]
    fn messages_arrive_as_they_were_sent() {
        check_round_trip(&Order::Begin { backend: "mock".into() });
        check_round_trip(&Order::Share { count: 3, len: 1 << 20, value: 7 });
        check_round_trip(&Order::Inherit { tickets: vec![1; TICKET] });
        check_round_trip(&Order::Tell);
        check_round_trip(&Order::Drop);
        check_round_trip(&Notice::Shared { tickets: vec![1; TICKET] });
        check_round_trip(&Notice::Done);
        check_round_trip(&Notice::State { exports: 1, limbo: 2, mappings: 3 });
    }

    #[test]
    fn each_fault_and_a_slow_heir_is_reported() {
        assert_eq!(Report::default().faults(), Vec::<String>::new());
        let slow = |slow: usize| {
            let mut report = Report { times: vec![Duration::from_millis(3); 1000], ..Report::default() };
            report.times[..slow].fill(Duration::from_millis(151));
            report.faults().len()
        };
        assert_eq!((slow(9), slow(11)), (0, 1));
        let left = Left { descriptors: 3, ..Left::default() };
        let bad = Report { early_frees: 1, double_owners: 2, left, ..Report::default() };
        assert_eq!(bad.faults(), ["early frees: 1", "deaths without exactly one heir: 2", "descriptors left: 3"]);
    }
}
