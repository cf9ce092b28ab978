//! The exporter of `highwater soak ipc`: shares, frees and checks buffers, and kills its consumers.
//!
//! One thread does everything, step by step. Between the steps, it receives the messages and the deaths of consumers. Every
//! wait has a limit.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use highwater::hal::Backend as _;
use highwater::mock::MockGpu;
use highwater::{Device, DeviceBuffer, ErrorKind, Runtime, Stream};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, getpid, set_child_subreaper, wait};

use super::super::child::{self, Child};
use super::super::failure::Failure;
use super::super::frame::Message as _;
use super::super::progress::Progress;
use super::message::{Deed, Order};
use super::pattern::Pattern;
use super::random::Random;
use super::report::Report;

/// The most buffers that the exporter has at once.
const MOST_LIVE: usize = 12;
/// The pause between two steps.
const PAUSE: Duration = Duration::from_micros(200);
/// The duration of the exporter's own operations on the device.
const LATENCY: Duration = Duration::from_micros(20);
/// The longest life of a consumer.
const LIFE: Duration = Duration::from_millis(400);
/// The most living children of dead consumers.
const MOST_HEIRS: usize = 16;
/// The time limit of operations that take milliseconds, for a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// The task of a run.
#[derive(Debug)]
pub(super) struct Soak {
    pub(super) kills: u64,
    /// Consumers at the same time.
    pub(super) consumers: usize,
    pub(super) seed: u64,
}

pub(super) fn run(soak: &Soak, progress: &Progress, pulse: &AtomicU64) -> Result<Report> {
    // Children of killed consumers become children of this process, so that it can wait for them.
    set_child_subreaper(Some(getpid()))?;
    let started = Instant::now();
    let shared_files_before = shared_files();
    let gpu = super::open_mock(LATENCY)?;
    let free_before = gpu.memory_info(0)?.free;
    let runtime = Runtime::new(Arc::<MockGpu>::clone(&gpu))?;
    let mut exporter = Exporter::new(&runtime, soak, progress)?;
    let descriptors_before = descriptors()?;
    exporter.work(pulse)?;
    exporter.free_everything(pulse)?;
    let descriptors_after = eventually(pulse, descriptors, |&now| now <= descriptors_before)?;
    let mut report = exporter.end();
    report.descriptors_left = (descriptors_after - descriptors_before.min(descriptors_after)) as u64;
    match runtime.close() {
        Ok(alive) => report.leaked_objects = alive.total(),
        Err(error) => report.unexpected.add(error.to_string()),
    }
    gpu.violations().iter().for_each(|violation| report.early_frees.add(format!("found by the mock: {violation}")));
    report.leaked_bytes = free_before - gpu.memory_info(0)?.free.min(free_before);
    report.processes_left = eventually(pulse, || Ok(children_are_left()?), |&left| !left)?.into();
    report.shared_files_left = shared_files().saturating_sub(shared_files_before);
    report.elapsed = started.elapsed();
    Ok(report)
}

/// Repeats a question until the answer is right or the time is over. Returns the last answer.
fn eventually<T>(pulse: &AtomicU64, mut ask: impl FnMut() -> Result<T>, right: impl Fn(&T) -> bool) -> Result<T> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let answer = ask()?;
        if right(&answer) || Instant::now() > deadline {
            return Ok(answer);
        }
        pulse.fetch_add(1, Ordering::Relaxed);
        thread::sleep(Duration::from_millis(2));
    }
}

/// Reaps the children that have ended. Returns true if others still run.
fn children_are_left() -> io::Result<bool> {
    loop {
        match wait(WaitOptions::NOHANG) {
            Ok(Some(_)) | Err(Errno::INTR) => {}
            Ok(None) => return Ok(true),
            Err(Errno::CHILD) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Returns the number of open descriptors of this process.
fn descriptors() -> Result<usize> {
    Ok(fs::read_dir("/proc/self/fd")?.count())
}

/// Returns the number of shared files of this project.
fn shared_files() -> u64 {
    let Ok(entries) = fs::read_dir("/dev/shm") else { return 0 };
    let is_ours = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().contains("highwater");
    entries.filter_map(io::Result::ok).filter(is_ours).count() as u64
}

/// A buffer of the exporter.
struct Block {
    pattern: Pattern,
    buffer: DeviceBuffer<u32>,
    offer: Order,
}

struct Consumer {
    child: Child,
    /// The time at which it is killed, unless it kills itself before.
    until: Instant,
    bequeathed: bool,
    cut_off: bool,
    work_queued: bool,
}

struct Exporter<'a> {
    soak: &'a Soak,
    progress: &'a Progress,
    runtime: &'a Runtime,
    device: Device,
    stream: Stream,
    random: Random,
    next_tag: u64,
    blocks: Vec<Block>,
    consumers: Vec<Consumer>,
    /// Sockets of dead consumers that left a child. The child lives as long as its socket is open here.
    heirs: VecDeque<UnixStream>,
    started: u64,
    report: Report,
}

impl<'a> Exporter<'a> {
    fn new(runtime: &'a Runtime, soak: &'a Soak, progress: &'a Progress) -> Result<Self> {
        let device = runtime.device(0)?;
        let mut exporter = Self {
            soak,
            progress,
            runtime,
            stream: device.create_stream()?,
            device,
            random: Random::new(soak.seed),
            next_tag: 1,
            blocks: Vec::new(),
            consumers: Vec::new(),
            heirs: VecDeque::new(),
            started: 0,
            report: Report { seed: soak.seed, ..Report::default() },
        };
        // Once without consumers, so that all objects of the first use exist before descriptors are counted.
        exporter.share()?;
        exporter.check()?;
        exporter.free()?;
        Ok(exporter)
    }

    /// Runs until the given number of consumers was killed.
    fn work(&mut self, pulse: &AtomicU64) -> Result<()> {
        while self.report.kills < self.soak.kills {
            pulse.fetch_add(1, Ordering::Relaxed);
            while self.consumers.len() < self.soak.consumers && self.started < self.soak.kills {
                self.start_consumer()?;
            }
            self.step()?;
            self.hear(PAUSE)?;
            self.kill_who_is_due()?;
            self.reap()?;
            if self.report.unexpected.count() > 100 {
                // More failures give no more insight.
                break;
            }
        }
        self.consumers.clear();
        Ok(())
    }

    fn start_consumer(&mut self) -> Result<()> {
        let arguments = ["soak-consumer".to_owned(), "--seed".to_owned(), self.random.next().to_string()];
        let child = Child::start(&arguments).map_err(|error| {
            let hint =
                "use fewer `--consumers`, or raise the limits on processes (ulimit -u) and descriptors (ulimit -n)";
            Failure::new(ErrorKind::OperatingSystem, "a consumer could not be started", hint).because_of(error)
        })?;
        // A consumer that does not read for this long is stuck.
        child.socket().set_write_timeout(Some(PATIENCE))?;
        // Some die before they have opened anything.
        let life = if self.random.percent(15) { LIFE / 10 } else { LIFE };
        let life = Duration::from_micros(self.random.within(0..life.as_micros() as u64));
        let until = Instant::now() + life;
        self.started += 1;
        self.consumers.push(Consumer { child, until, bequeathed: false, cut_off: false, work_queued: false });
        let newest = self.consumers.len() - 1;
        for index in 0..self.blocks.len() {
            self.offer(newest, index);
        }
        Ok(())
    }

    /// Offers a buffer to a consumer. A dead consumer ignores it.
    fn offer(&mut self, consumer: usize, block: usize) {
        let consumer = &self.consumers[consumer];
        if let Err(error) = self.blocks[block].offer.send(consumer.child.socket())
            && matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
        {
            self.report.unexpected.add("a consumer does not listen".to_owned());
        }
    }

    fn step(&mut self) -> Result<()> {
        match self.random.within(0..10) {
            0..4 if self.blocks.len() < MOST_LIVE => self.share()?,
            0..7 if !self.blocks.is_empty() => self.free()?,
            7..9 if !self.blocks.is_empty() => self.check()?,
            _ => drop(self.runtime.trim_shared()?),
        }
        let limbo = self.runtime.statistics().sharing.limbo_bytes;
        self.report.limbo_peak_bytes = self.report.limbo_peak_bytes.max(limbo);
        Ok(())
    }

    /// Allocates a buffer and offers it to all consumers. A consumer that opens the ticket waits for the contents.
    fn share(&mut self) -> Result<()> {
        let side = Pattern::SIDES[self.random.index(Pattern::SIDES.len())];
        let pattern = Pattern::new(self.next_tag, side);
        self.next_tag += 1;
        let buffer = self.device.allocate_shared(pattern.len())?;
        pattern.write(&self.stream, &buffer)?;
        let offer = Order::Offer { ticket: buffer.share()?.to_bytes(), pattern };
        self.blocks.push(Block { pattern, buffer, offer });
        self.report.shared += 1;
        let newest = self.blocks.len() - 1;
        for consumer in 0..self.consumers.len() {
            self.offer(consumer, newest);
        }
        Ok(())
    }

    /// Frees a buffer, which consumers may have open.
    fn free(&mut self) -> Result<()> {
        let index = self.random.index(self.blocks.len());
        // Sometimes it is checked before.
        if self.random.percent(30) {
            self.check_block(index)?;
        }
        drop(self.blocks.swap_remove(index));
        Ok(())
    }

    fn check(&mut self) -> Result<()> {
        let index = self.random.index(self.blocks.len());
        self.check_block(index)
    }

    fn check_block(&mut self, index: usize) -> Result<()> {
        let Block { pattern, buffer, .. } = &self.blocks[index];
        let words = self.stream.download(buffer)?;
        match pattern.check(&words) {
            Ok(seen) => {
                self.report.checks += 1;
                self.report.words_changed += seen.changed;
            }
            Err(what) => self.report.early_frees.add(format!("seen by the exporter: {what}")),
        }
        Ok(())
    }

    /// Receives the messages of consumers. Waits up to `limit`.
    fn hear(&mut self, limit: Duration) -> Result<()> {
        child::ready(self.consumers.iter().map(|consumer| &consumer.child), limit)?;
        (0..self.consumers.len()).try_for_each(|index| self.hear_consumer(index))
    }

    fn hear_consumer(&mut self, index: usize) -> Result<()> {
        let consumer = &mut self.consumers[index];
        let pid = consumer.child.pid();
        for deed in consumer.child.messages()? {
            match deed {
                Deed::Opened => self.report.opens += 1,
                Deed::Released => self.report.releases += 1,
                Deed::Expired => self.report.expired_tickets += 1,
                Deed::Checked => self.report.checks += 1,
                Deed::Queued => consumer.work_queued = true,
                Deed::Idle => consumer.work_queued = false,
                Deed::Bequeathed(descriptors) => {
                    consumer.bequeathed = true;
                    self.report.inherited_descriptors += descriptors;
                }
                Deed::Cut(sockets) => {
                    consumer.cut_off = true;
                    self.report.cut_sockets += sockets;
                }
                Deed::Stolen(what) => self.report.early_frees.add(format!("seen by consumer {pid}: {what}")),
                Deed::Failed(what) => self.report.unexpected.add(format!("a consumer: {what}")),
            }
        }
        Ok(())
    }

    fn kill_who_is_due(&mut self) -> Result<()> {
        let now = Instant::now();
        for consumer in &mut self.consumers {
            if consumer.until <= now {
                consumer.child.kill()?;
                // A kill takes far less time, so this is a defect.
                if now.duration_since(consumer.until) > PATIENCE {
                    let what = format!("consumer {} does not die", consumer.child.pid());
                    return Err(
                        Failure::new(ErrorKind::InvalidState, what, "look for what the kernel holds it with").into()
                    );
                }
            }
        }
        Ok(())
    }

    /// Reaps every process that has ended: consumers and their children.
    fn reap(&mut self) -> Result<()> {
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) => self.note_end(pid, ExitStatus::from_raw(status.as_raw()))?,
                Ok(None) | Err(Errno::CHILD) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn note_end(&mut self, pid: Pid, status: ExitStatus) -> Result<()> {
        // Otherwise it was the child of a consumer.
        if let Some(index) = self.consumers.iter().position(|consumer| consumer.child.pid() == pid) {
            self.consumers[index].child.note_end(status);
            // Its last messages.
            self.hear_consumer(index)?;
            let consumer = self.consumers.swap_remove(index);
            if status.signal() != Some(Signal::KILL.as_raw()) {
                self.report.unexpected.add(format!("a consumer ended by itself ({status})"));
            }
            self.report.kills += 1;
            if consumer.bequeathed {
                self.report.killed_after_fork += 1;
                self.heirs.push_back(consumer.child.clone_socket()?);
                if self.heirs.len() > MOST_HEIRS {
                    self.heirs.pop_front();
                }
            }
            self.report.killed_after_cut += u64::from(consumer.cut_off);
            self.report.killed_with_work += u64::from(consumer.work_queued);
            self.progress.advance(1);
        }
        Ok(())
    }

    /// Checks that all memory is freed once all consumers are dead, though children still hold their descriptors.
    fn free_everything(&mut self, pulse: &AtomicU64) -> Result<()> {
        (0..self.blocks.len()).try_for_each(|index| self.check_block(index))?;
        self.blocks.clear();
        let ask = || {
            self.runtime.trim_shared()?;
            Ok(self.runtime.statistics().sharing)
        };
        let sharing = eventually(pulse, ask, |sharing| sharing.exported_bytes == 0 && sharing.limbo_bytes == 0)?;
        if sharing.exported_bytes + sharing.limbo_bytes > 0 {
            self.report.unexpected.add(format!("memory is still shared though all consumers are dead: {sharing:?}"));
        }
        self.report.heirs_at_the_end = self.heirs.len() as u64;
        self.heirs.clear();
        Ok(())
    }

    /// Drops everything, and returns the report.
    fn end(self) -> Report {
        self.report
    }
}
