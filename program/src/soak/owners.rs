//! `highwater soak ipc --owner-kills`: this process opens memory of other processes, and kills those.
//!
//! The owners are children of this process (`command`). Several live at once. This process opens their memory with
//! `OwnerDeath::Release`, and one allocation in some with `OwnerDeath::Keep`. It enqueues work on the memory and kills the owners
//! one after the other, while it holds every buffer. It measures the time from the kill until the owner is dead, and until the
//! memory is free. Some owners kill themselves while this process opens their tickets, and these kills are not measured.

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
use super::report::{BAR, Reasons, is_bar_met, times_to_json, times_to_text};
use super::{LATENCY, LOOK, Opened, PATIENCE, START, TICKET};

/// The longest queue of work on a buffer, in pairs of operations, and the most values of an operation. The memory stays until the
/// work has ended, so the whole queue takes a few milliseconds.
const MOST_WORK: u64 = 8;
const MOST_WORK_LEN: usize = 1 << 13;

messages! {
    /// A message to an owner.
    enum Order {
        1 Begin { backend: String },
        /// Share this many buffers of a length, filled with a value. By descriptor, or else by the legacy transport.
        2 Share { count: u64, len: u64, value: u32, by_descriptor: bool },
        /// Kill yourself after this number of microseconds.
        3 Die { after: u64 },
    }
}

messages! {
    /// The answer of an owner.
    enum Notice {
        4 Shared { tickets: Vec<u8> },
        5 Failed(why: Explanation),
    }
}

/// The task of a run.
#[derive(Debug)]
pub(super) struct Soak<'a> {
    pub(super) kills: u64,
    /// Owners at the same time.
    pub(super) owners: usize,
    pub(super) seed: u64,
    /// The backend by name; otherwise the mock.
    pub(super) backend: Option<&'a str>,
}

/// The times of the kills: until the owner is dead, and from there and from the kill until the memory is free.
#[derive(Debug, Default)]
struct Times {
    death: Vec<Duration>,
    release: Vec<Duration>,
    total: Vec<Duration>,
}

#[derive(Debug, Default)]
pub(super) struct Report {
    backend: String,
    seed: u64,
    is_real: bool,
    /// True if the driver counts the memory of all processes as used.
    driver_counts: bool,
    kills: u64,
    buffers: u64,
    bytes: u64,
    /// Kills of owners whose memory had work queued.
    with_work: u64,
    /// Owners that died while their tickets were opened, and the opens that were refused then.
    in_opens: u64,
    refused: u64,
    /// Number of buffers that were kept after the death, with the right contents.
    kept: u64,
    times: Times,
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
    let stream = device.create_stream()?;
    let report = Report { backend: address.clone(), seed: soak.seed, is_real, kills: 0, ..Report::default() };
    let mut importer = Importer {
        soak,
        address,
        runtime: runtime.clone(),
        scratch: device.allocate(MOST_WORK_LEN)?,
        device,
        stream,
        random: Random::new(soak.seed),
        next_value: 0,
        report,
    };
    importer.settle()?;
    let mut baseline = None;
    while importer.report.kills < soak.kills && importer.report.unexpected.count() < 20 {
        importer.wave(progress, pulse)?;
        // After the first wave, every object of the first use exists.
        importer.settle()?;
        if baseline.is_none() {
            baseline = Some(Baseline::new(importer.free()?)?);
        }
    }
    let left = baseline.map(|baseline| baseline.left(|| importer.free())).transpose()?;
    let mut report = importer.end();
    report.left = left.unwrap_or_default();
    report.left.objects = close(runtime, mock, &mut report.unexpected);
    report.elapsed = started.elapsed();
    Ok(report)
}

/// The largest buffer, in values.
const MOST_LEN: usize = 1 << 20;

/// An owner, and the objects that this process has of it.
struct Owned {
    child: Child,
    value: u32,
    tickets: Vec<Ticket>,
    buffers: Vec<DeviceBuffer<u32>>,
    kept: Option<DeviceBuffer<u32>>,
    /// True if it dies while its tickets are opened.
    dies_in_opens: bool,
}

/// This process.
struct Importer<'s> {
    soak: &'s Soak<'s>,
    address: String,
    runtime: Runtime,
    device: Device,
    stream: Stream,
    scratch: DeviceBuffer<u32>,
    random: Random,
    next_value: u32,
    report: Report,
}

impl Importer<'_> {
    fn end(self) -> Report {
        self.report
    }

    fn free(&self) -> Result<u64> {
        Ok(self.device.memory_info()?.free)
    }

    /// Waits for all work, and gives idle memory back.
    fn settle(&self) -> Result<()> {
        self.stream.synchronize()?;
        Ok(self.runtime.trim()?)
    }

    /// Starts owners, opens their memory, and kills each of them.
    fn wave(&mut self, progress: &Progress, pulse: &AtomicU64) -> Result<()> {
        let count = usize::try_from(self.soak.kills - self.report.kills).unwrap_or(usize::MAX).min(self.soak.owners);
        let free = self.device.memory_info()?.free;
        // All of them open their devices at the same time.
        let mut owners = (0..count).map(|_| self.start()).collect::<Result<Vec<_>>>()?;
        for owner in &mut owners {
            pulse.fetch_add(1, Ordering::Relaxed);
            owner.tickets = shared_by(&mut owner.child)?;
        }
        // A real driver counts the memory of all processes, and a simulated one that of this process.
        let bytes: u64 = owners.iter().flat_map(|owner| &owner.tickets).map(Ticket::bytes).sum();
        self.report.driver_counts = self.device.memory_info()?.free + bytes <= free;
        for owner in &mut owners {
            if !owner.dies_in_opens {
                self.open(owner)?;
            }
        }
        for owner in owners {
            pulse.fetch_add(1, Ordering::Relaxed);
            if owner.dies_in_opens {
                self.open_while_it_dies(owner)?
            } else {
                self.kill(owner)?
            }
            self.report.kills += 1;
            progress.advance(1);
        }
        Ok(())
    }

    fn start(&mut self) -> Result<Owned> {
        let arguments: Vec<String> =
            std::iter::once("soak-owner".to_owned()).chain(backends::arguments_of_children()).collect();
        let child = Child::start(&arguments).map_err(|error| {
            let hint =
                "use fewer `--processes`, or raise the limits on processes (ulimit -u) and descriptors (ulimit -n)";
            Failure::new(ErrorKind::OperatingSystem, "an owner could not be started", hint).because_of(error)
        })?;
        self.next_value += 1;
        let value = self.next_value;
        let transports = self.device.capabilities().ipc_transports;
        let (descriptor, legacy) = (transports.contains(Transport::Descriptor), transports.contains(Transport::Legacy));
        let by_descriptor = descriptor && (!legacy || self.random.percent(60));
        let count = self.random.within(1..5);
        let len = 1 << self.random.within(10..MOST_LEN.ilog2().into());
        Order::Begin { backend: self.address.clone() }.send(child.socket())?;
        Order::Share { count, len, value, by_descriptor }.send(child.socket())?;
        let dies_in_opens = self.random.percent(25);
        Ok(Owned { child, value, tickets: Vec::new(), buffers: Vec::new(), kept: None, dies_in_opens })
    }

    fn open_ticket(&mut self, ticket: &Ticket, death: OwnerDeath) -> highwater::Result<DeviceBuffer<u32>> {
        let options = ImportOptions::new().with_owner_death(death);
        let buffer = self.runtime.open_shared_with(ticket, &options)?;
        self.report.buffers += 1;
        self.report.bytes += ticket.bytes();
        Ok(buffer)
    }

    /// Opens the memory of an owner, and checks the contents.
    fn open(&mut self, owner: &mut Owned) -> Result<()> {
        let mut tickets = std::mem::take(&mut owner.tickets);
        let can_keep = tickets.len() > 1 && tickets[0].transport() == Transport::Descriptor;
        if can_keep
            && self.random.percent(40)
            && let Some(ticket) = tickets.pop()
        {
            owner.kept = Some(self.open_ticket(&ticket, OwnerDeath::Keep)?);
        }
        for ticket in &tickets {
            owner.buffers.push(self.open_ticket(ticket, OwnerDeath::Release)?);
            if self.random.percent(30) {
                owner.buffers.push(self.open_ticket(ticket, OwnerDeath::Release)?);
            }
        }
        for buffer in owner.buffers.iter().chain(&owner.kept) {
            self.check(buffer, owner.value)?;
        }
        // One allocation may be open twice.
        owner.tickets = tickets;
        Ok(())
    }

    fn check(&mut self, buffer: &DeviceBuffer<u32>, value: u32) -> Result<()> {
        if self.stream.download(buffer)?.iter().any(|&is| is != value) {
            self.report.unexpected.add(format!("a buffer of the owner with the value {value} has another one"));
        }
        Ok(())
    }

    fn mapped_bytes(&self) -> u64 {
        self.runtime.statistics().sharing.mapped_bytes
    }

    /// Kills an owner while this process holds its memory, and measures.
    fn kill(&mut self, owned: Owned) -> Result<()> {
        let Owned { child, value, tickets, buffers, kept, .. } = owned;
        let Some(owner) = buffers[0].owner() else {
            self.report.unexpected.add("a buffer of another process has no owner".to_owned());
            return Ok(());
        };
        let bytes: u64 = tickets.iter().map(Ticket::bytes).sum();
        let mapped = self.mapped_bytes() - bytes;
        // If the driver counts the owner's memory, it is free only once both processes have released it.
        let free = if self.report.driver_counts { self.device.memory_info()?.free + bytes } else { 0 };
        if self.random.percent(60) {
            self.report.with_work += 1;
            for buffer in &buffers {
                let part = buffer.slice(0..buffer.len().min(MOST_WORK_LEN))?;
                for _ in 0..self.random.within(0..MOST_WORK) {
                    self.stream.copy(part, self.scratch.slice(0..part.len())?)?;
                    self.stream.fill(part, value)?;
                }
            }
        }
        let started = Instant::now();
        child.kill()?;
        let (mut death, mut released) = (None, false);
        let total = loop {
            if death.is_none() && !owner.is_alive() {
                death = Some(started.elapsed());
            }
            released |= death.is_some() && self.mapped_bytes() <= mapped;
            if released && (!self.report.driver_counts || self.device.memory_info()?.free >= free) {
                break Some(started.elapsed());
            }
            if started.elapsed() > PATIENCE {
                break None;
            }
            thread::sleep(LOOK);
        };
        match (death, total) {
            (Some(death), Some(total)) => {
                let times = &mut self.report.times;
                times.death.push(death);
                times.release.push(total.saturating_sub(death));
                times.total.push(total);
            }
            _ => {
                let what = if death.is_none() {
                    "a killed owner is not dead"
                } else {
                    "the memory of a dead owner is not free"
                };
                self.report.unexpected.add(format!("{what} after {} seconds", PATIENCE.as_secs()));
            }
        }
        drop(child);
        for buffer in &buffers {
            self.check_revoked(self.stream.fill(buffer, 0));
        }
        drop(buffers);
        let mut kept_bytes = 0;
        if let Some(kept) = kept {
            self.check(&kept, value)?;
            self.report.kept += 1;
            kept_bytes = (kept.len() * size_of::<u32>()) as u64;
        }
        // The mapped bytes are those of one owner at a time, so the memory of this one has to be unmapped first.
        self.wait_for_mapped(mapped - kept_bytes);
        Ok(())
    }

    fn check_revoked(&mut self, used: highwater::Result<()>) {
        match used {
            Err(error) if error.kind() == ErrorKind::Expired => {}
            Err(error) => self.report.unexpected.add(format!("a use of released memory: {error}")),
            Ok(()) => self.report.unexpected.add("memory of a dead owner was used".to_owned()),
        }
    }

    /// Waits until no more than this is mapped, and the kept buffers are released.
    fn wait_for_mapped(&mut self, bytes: u64) {
        let deadline = Instant::now() + PATIENCE;
        while self.mapped_bytes() > bytes {
            if Instant::now() > deadline {
                let left = self.mapped_bytes() - bytes;
                self.report
                    .unexpected
                    .add(format!("memory of a dead owner is still mapped: {}", counted(left, "byte")));
                return;
            }
            thread::sleep(LOOK);
        }
    }

    /// Opens tickets of an owner that kills itself meanwhile.
    fn open_while_it_dies(&mut self, owned: Owned) -> Result<()> {
        let Owned { mut child, value, tickets, .. } = owned;
        self.report.in_opens += 1;
        let mapped = self.mapped_bytes();
        Order::Die { after: self.random.within(0..1500) }.send(child.socket())?;
        let (mut buffers, mut refusals) = (Vec::new(), 0);
        while refusals < 3 {
            let at = self.random.index(tickets.len());
            match self.open_ticket(&tickets[at], OwnerDeath::Release) {
                Ok(buffer) => buffers.push(buffer),
                Err(error) => {
                    refusals += 1;
                    self.report.refused += 1;
                    // A vendor may see a part of the death.
                    let is_dead = child.finish(PATIENCE)?.is_some();
                    if !is_dead {
                        self.report.unexpected.add(format!("an owner that lives refused an open: {error}"));
                    }
                }
            }
            let at = self.random.index(buffers.len().max(1));
            if let Some(buffer) = buffers.get(at) {
                match self.stream.fill(buffer, value) {
                    Ok(()) => {}
                    revoked => self.check_revoked(revoked),
                }
            }
            if buffers.len() > 64 {
                buffers.swap_remove(at);
            }
        }
        self.wait_for_mapped(mapped);
        for buffer in &buffers {
            self.check_revoked(self.stream.fill(buffer, 0));
        }
        Ok(())
    }
}

/// Returns the tickets of an owner that has shared.
fn shared_by(child: &mut Child) -> Result<Vec<Ticket>> {
    let lost = |why: String| {
        Failure::new(ErrorKind::OperatingSystem, format!("an owner is lost: {why}"), "look at its messages above")
    };
    match child.wait_for::<Notice>(START)? {
        Some(Notice::Shared { tickets }) => {
            Ok(tickets.chunks(TICKET).map(Ticket::from_bytes).collect::<highwater::Result<_>>()?)
        }
        Some(Notice::Failed(why)) => Err(lost(format!("{} {}", why.message, why.hint)).into()),
        None => Err(lost(format!("it ended, or shared nothing for {} seconds", START.as_secs())).into()),
    }
}

/// Runs an owner until it is killed.
pub(in super::super) fn command(arguments: &ChildArguments) -> Result<Verdict> {
    let (socket, mut inbox) = child::serve(arguments.parent, c"hw-owner", "highwater soak ipc --owner-kills")?;
    let Some(Order::Begin { backend }) = inbox.wait(&socket)? else {
        let hint = "`highwater soak ipc --owner-kills` starts this process, and says what to open";
        return Err(Failure::new(ErrorKind::InvalidState, "this process has nothing to open", hint).into());
    };
    let mut owner = None;
    while let Some(order) = inbox.wait(&socket)? {
        let shared = match order {
            Order::Begin { .. } => continue,
            Order::Die { after } => {
                thread::sleep(Duration::from_micros(after));
                child::die();
            }
            Order::Share { count, len, value, by_descriptor } => {
                let transport = if by_descriptor { Transport::Descriptor } else { Transport::Legacy };
                share(&backend, (count, len), value, transport).map(|(shared, tickets)| {
                    owner = Some(shared);
                    tickets
                })
            }
        };
        let notice =
            shared.map_or_else(|error| Notice::Failed(Explanation::of(&error)), |tickets| Notice::Shared { tickets });
        if notice.send(&socket).is_err() {
            child::die();
        }
    }
    drop(owner);
    Ok(Verdict::Good)
}

/// The objects that an owner holds until it is killed.
type Holdings = (Runtime, Stream, Vec<DeviceBuffer<u32>>);

fn share(address: &str, (count, len): (u64, u64), value: u32, transport: Transport) -> Result<(Holdings, Vec<u8>)> {
    let runtime = Runtime::new(super::reopen(address, LATENCY)?.backend)?;
    let device = runtime.device(0)?;
    let stream = device.create_stream()?;
    let (mut buffers, mut tickets) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let buffer = device.allocate_shared_by::<u32>(usize::try_from(len)?, transport)?;
        stream.fill(&buffer, value)?;
        tickets.extend(buffer.share()?.to_bytes());
        buffers.push(buffer);
    }
    Ok(((runtime, stream, buffers), tickets))
}

impl Report {
    /// Returns the faults of the run.
    pub(super) fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        // The libraries of a real device open files of their own.
        let descriptors = if self.is_real { 0 } else { self.left.descriptors };
        // Other processes may use a real device.
        let bytes = if self.is_real { 0 } else { self.left.bytes };
        let counts = [
            ("bytes leaked", bytes),
            ("objects still alive at the end", self.left.objects),
            ("unexpected", self.unexpected.count()),
            ("descriptors left", descriptors),
        ];
        faults.extend(counts.iter().filter(|(_, count)| *count > 0).map(|(what, count)| format!("{what}: {count}")));
        faults.extend(self.unexpected.texts().map(|reason| format!("unexpected: {reason}")));
        if self.is_bar_met() == Some(false) {
            faults.push(format!("one kill in 100 kept memory for more than {} ms", BAR.as_millis()));
        }
        faults
    }

    /// Returns whether the bar is met. `None` for too few kills.
    fn is_bar_met(&self) -> Option<bool> {
        is_bar_met(&self.times.total, BAR)
    }

    pub(super) fn to_json(&self) -> Value {
        let times = times_to_json;
        json!({
            "backend": self.backend,
            "seed": self.seed,
            "driver_counts": self.driver_counts,
            "kills": self.kills,
            "measured": self.times.total.len(),
            "killed_in_opens": self.in_opens,
            "killed_with_work": self.with_work,
            "buffers": self.buffers,
            "bytes": self.bytes,
            "refused_opens": self.refused,
            "kept_buffers": self.kept,
            "death_ms": times(&self.times.death),
            "release_ms": times(&self.times.release),
            "total_ms": times(&self.times.total),
            "bar_met": self.is_bar_met(),
            "leaked_bytes": self.left.bytes,
            "leaked_objects": self.left.objects,
            "descriptors_left": self.left.descriptors,
            "unexpected": self.unexpected.count(),
            "seconds": self.elapsed.as_secs_f64(),
        })
    }

    pub(super) fn to_table(&self) -> Table {
        let Self { kills, in_opens, with_work, buffers, bytes, refused, kept, .. } = self;
        let mut table = Table::default();
        let times = times_to_text;
        let killed = format!(
            "{} in {:.1} s; {with_work} with work queued on their memory, {in_opens} while tickets were opened",
            counted(*kills, "owner"),
            self.elapsed.as_secs_f64()
        );
        table.add_row(["kills", &killed]);
        table.add_row(["memory", &{
            let (buffers, bytes) = (counted(*buffers, "buffer"), counted(*bytes, "byte"));
            format!("{buffers}, {bytes}, {kept} kept, {} refused", counted(*refused, "open"))
        }]);
        table.add_row(["free", if self.driver_counts { "unmapped, and free for the driver" } else { "unmapped" }]);
        table.add_row(["kill to death", &times(&self.times.death)]);
        table.add_row(["death to free", &times(&self.times.release)]);
        table.add_row(["kill to free", &times(&self.times.total)]);
        table.add_row(["left", &self.left.counted()]);
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
        check_round_trip(&Order::Share { count: 3, len: 1 << 20, value: 7, by_descriptor: true });
        check_round_trip(&Order::Die { after: 900 });
        check_round_trip(&Notice::Shared { tickets: vec![1; TICKET] });
        let why = Explanation { kind: None, message: "none".into(), hint: String::new() };
        check_round_trip(&Notice::Failed(why));
    }

    #[test]
    fn a_slow_release_and_anything_left_is_a_fault() {
        assert_eq!(Report::default().faults(), Vec::<String>::new());
        let slow = |kills: usize, slow: usize| {
            let mut report = Report::default();
            report.times.total = vec![Duration::from_millis(3); kills];
            report.times.total[..slow].fill(Duration::from_millis(101));
            report.faults().len()
        };
        assert_eq!((slow(1000, 9), slow(1000, 11), slow(99, 99)), (0, 1, 0));
        let left = Report { left: Left { bytes: 1, descriptors: 2, objects: 0 }, ..Report::default() };
        assert_eq!(left.faults(), ["bytes leaked: 1", "descriptors left: 2"]);
    }
}
