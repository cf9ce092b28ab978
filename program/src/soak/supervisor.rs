//! The supervisor of `highwater soak ipc`: starts the workers, passes their tickets on, stops and kills them, and judges.
//!
//! One thread does this, step by step. No step waits for a worker: the supervisor sends only what a worker has asked for.

use std::collections::VecDeque;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use highwater::hal::counted;
use highwater::sharing::{Rendezvous, SharingOptions};
use highwater::{ErrorKind, Runtime, RuntimeOptions};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, wait};

use super::super::child::{self, Child};
use super::super::failure::Failure;
use super::super::frame::Message as _;
use super::super::progress::Progress;
use super::super::{backends, output};
use super::books::Books;
use super::directory::Directory;
use super::interruption;
use super::message::{Notice, Offer, Order, Refusal, Remains, Slow};
use super::random::Random;
use super::reclaim::Reclaims;
use super::report::Report;
use super::{Opened, PATIENCE, START, descriptors, limits, now};

/// The pause between two steps.
const PAUSE: Duration = Duration::from_micros(500);
/// The maximum number of offers that are passed on. Older offers are forgotten.
const MOST_OFFERS: usize = 48;
/// The maximum number of offers in one answer.
const MOST_TAKEN: u64 = 4;
/// The maximum number of living children of dead workers.
const MOST_HEIRS: usize = 16;
/// The number of faults that ends the run: more give no more insight.
const MOST_FAULTS: u64 = 50;

/// The task of a run.
#[derive(Debug)]
pub(super) struct Soak<'a> {
    pub(super) kills: u64,
    /// Workers at the same time. The first is stopped but never killed, so that it shows what many deaths leave behind.
    pub(super) processes: usize,
    pub(super) seed: u64,
    /// The backend by name; otherwise the mock.
    pub(super) backend: Option<&'a str>,
}

/// The mean times between two kills, and between two stops.
#[derive(Debug, Clone, Copy)]
struct Pace {
    kill: Duration,
    stop: Duration,
}

impl Pace {
    const MOCK: Self = Self { kill: Duration::from_millis(20), stop: Duration::from_millis(60) };
    /// A worker opens an H200 in about 0.2 s, and several open it one after the other.
    const REAL: Self = Self { kill: Duration::from_millis(600), stop: Duration::from_millis(300) };
}

/// The environment variable for the number of connections to a device of CUDA, 8 by default. The driver ends a killed process with one
/// connection sooner, also while another process opens the device. The workers have one, unless the environment sets a number.
const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

/// Returns the number of shared files of this project, and of the files in memory that this process has open.
fn shared_files() -> u64 {
    let named = fs::read_dir("/dev/shm").into_iter().flatten().filter_map(io::Result::ok);
    let named = named.filter(|entry| entry.file_name().to_string_lossy().contains("highwater")).count();
    let open = fs::read_dir("/proc/self/fd").into_iter().flatten().filter_map(io::Result::ok);
    let open = open.filter(|entry| {
        fs::read_link(entry.path()).is_ok_and(|target| target.to_string_lossy().contains("memfd:highwater"))
    });
    (named + open.count()) as u64
}

/// Shares memory in the directory once, and closes the runtime. An exporter removes the files that dead exporters have left there.
fn share_once(opened: &Opened, directory: &Path) -> Result<u64> {
    // The options are `Copy`, and a run has one directory.
    let directory: &'static Path = Box::leak(Box::from(directory));
    let sharing = SharingOptions::new().with_rendezvous(Rendezvous::Directory(directory));
    let options = RuntimeOptions::new().with_sharing(sharing);
    let runtime = Runtime::with_options(Arc::clone(&opened.backend), &options)?;
    let device = runtime.device(0)?;
    let buffer = device.allocate_shared::<u32>(1)?;
    buffer.share()?;
    drop((buffer, device));
    Ok(runtime.close()?.total())
}

pub(super) fn run(soak: &Soak<'_>, progress: &Progress, pulse: &AtomicU64) -> Result<Report> {
    // Children of killed workers become children of this process, so that it can wait for them.
    set_child_subreaper(Some(getpid()))?;
    let started = Instant::now();
    let opened = super::open(soak.backend, Duration::ZERO)?;
    output::line(format_args!("backend {}", opened.backend.identity().name));
    // Before the directory exists.
    interruption::catch();
    let directory = Directory::make(soak.seed)?;
    limits::check_space(&directory.path, soak.processes as u64)?;
    // Once without workers, so that all objects of the first use exist.
    share_once(&opened, &directory.path)?;
    let (descriptors_before, files_before) = (descriptors()?, shared_files());
    let free_before = opened.backend.memory_info(0)?.free;

    let mut supervisor = Supervisor::new(soak, progress, &opened, &directory.path);
    if opened.backend.identity().name == "cuda" {
        let connections = supervisor.connections.display();
        output::line(format_args!("the workers have {CONNECTIONS}={connections}"));
    }
    // A signal ends workers too, and then a step may fail for that reason.
    supervisor
        .work(pulse)
        .and_then(|()| supervisor.end(pulse))
        .map_err(|error| interruption::check().err().map_or(error, Into::into))?;
    let Supervisor { mut report, reclaims, .. } = supervisor;
    (report.reclaims, report.deaths, report.unmeasured) = (reclaims.times, reclaims.deaths, reclaims.unmeasured);
    reclaims.leaks.into_iter().for_each(|leak| report.leaks.add(format!("{leak} (seed {})", soak.seed)));

    report.processes_left = eventually(pulse, || Ok(u64::from(children_are_left()?)), 0)?;
    report.leaked_objects += share_once(&opened, &directory.path)?;
    report.files_left += directory.files()?;
    report.files_left += eventually(pulse, || Ok(shared_files().saturating_sub(files_before)), 0)?;
    let descriptors_left = || Ok(descriptors()?.saturating_sub(descriptors_before) as u64);
    let (bytes, descriptors) = (
        eventually(pulse, || Ok(free_before.saturating_sub(opened.backend.memory_info(0)?.free)), 0)?,
        eventually(pulse, descriptors_left, 0)?,
    );
    report.is_real = opened.backend.identity().real_device;
    report.backend = opened.address.clone();
    // The libraries of a real device open files of their own, and other programs may use its memory.
    report.descriptors_left += if report.is_real { 0 } else { descriptors };
    report.leaked_bytes += bytes;
    report.elapsed = started.elapsed();
    Ok(report)
}

/// Counts a step of the supervisor.
///
/// # Errors
/// After a signal that ends this process.
fn go_on(pulse: &AtomicU64) -> Result<()> {
    // Relaxed: a counter that orders nothing.
    pulse.fetch_add(1, Ordering::Relaxed);
    Ok(interruption::check()?)
}

/// Repeats a question until the answer is right or the time is over. Returns the last answer.
fn eventually(pulse: &AtomicU64, mut ask: impl FnMut() -> Result<u64>, right: u64) -> Result<u64> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let answer = ask()?;
        if answer == right || Instant::now() > deadline {
            return Ok(answer);
        }
        go_on(pulse)?;
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

struct Worker {
    child: Child,
    pid: u32,
    is_ready: bool,
    started: Instant,
    /// The rendezvous is the directory. Otherwise, it opens only tickets of abstract names.
    by_directory: bool,
    /// The time at which it continues, and the time at which it was stopped.
    stopped: Option<(Instant, Instant)>,
    bequeathed: bool,
    is_cut: bool,
    is_killed: bool,
    remains: Option<Remains>,
}

struct Supervisor<'a> {
    soak: &'a Soak<'a>,
    progress: &'a Progress,
    address: &'a str,
    directory: String,
    pace: Pace,
    connections: OsString,
    random: Random,
    books: Books,
    reclaims: Reclaims,
    workers: Vec<Worker>,
    /// The process that is never killed.
    spared: u32,
    /// The newest offers, with the rendezvous of their owners.
    offers: VecDeque<(Offer, bool)>,
    /// Refusals that came in the last round, and those of the round before, which can be judged.
    refusals: Vec<(u32, Refusal)>,
    /// Sockets of dead workers that left a child. The child lives as long as its socket is open here.
    heirs: VecDeque<UnixStream>,
    /// Processes that ended, whose offers may still be opened.
    ended: VecDeque<u32>,
    next_kill: Instant,
    next_stop: Instant,
    started: u64,
    /// No worker is stopped or killed any more.
    is_ending: bool,
    report: Report,
}

impl<'a> Supervisor<'a> {
    fn new(soak: &'a Soak<'a>, progress: &'a Progress, opened: &'a Opened, directory: &Path) -> Self {
        Self {
            soak,
            progress,
            address: &opened.address,
            directory: directory.to_string_lossy().into_owned(),
            pace: if opened.backend.identity().real_device { Pace::REAL } else { Pace::MOCK },
            connections: env::var_os(CONNECTIONS).unwrap_or_else(|| "1".into()),
            random: Random::new(soak.seed),
            books: Books::default(),
            reclaims: Reclaims::default(),
            workers: Vec::new(),
            spared: 0,
            offers: VecDeque::new(),
            refusals: Vec::new(),
            heirs: VecDeque::new(),
            ended: VecDeque::new(),
            next_kill: Instant::now(),
            next_stop: Instant::now(),
            started: 0,
            is_ending: false,
            report: Report::new(soak.seed, soak.processes),
        }
    }

    fn faults(&self) -> u64 {
        let Report { unexpected, late, early_frees, .. } = &self.report;
        unexpected.count() + late.count() + early_frees.count()
    }

    /// Runs until the given number of workers was killed.
    fn work(&mut self, pulse: &AtomicU64) -> Result<()> {
        while self.report.kills < self.soak.kills && self.faults() < MOST_FAULTS {
            go_on(pulse)?;
            while self.workers.len() < self.soak.processes {
                self.start_worker()?;
            }
            self.round()?;
            self.continue_stopped(Instant::now())?;
            self.stop_some()?;
            self.kill_one()?;
        }
        Ok(())
    }

    /// Hears the workers, judges what they reported, and reaps the dead.
    fn round(&mut self) -> Result<()> {
        child::ready(self.workers.iter().map(|worker| &worker.child), PAUSE)?;
        // All messages from before these refusals are read in this round.
        let refusals = std::mem::take(&mut self.refusals);
        (0..self.workers.len()).try_for_each(|index| self.hear(index))?;
        for (pid, refusal) in refusals {
            self.judge(pid, &refusal);
        }
        self.reclaims.judge(&self.books, now(), self.is_ending);
        self.reap()
    }

    fn start_worker(&mut self) -> Result<()> {
        let arguments: Vec<String> =
            std::iter::once("soak-worker".to_owned()).chain(backends::arguments_of_children()).collect();
        let child = Child::start_with(&arguments, CONNECTIONS, &self.connections).map_err(|error| {
            let hint =
                "use fewer `--processes`, or raise the limits on processes (ulimit -u) and descriptors (ulimit -n)";
            Failure::new(ErrorKind::OperatingSystem, "a worker could not be started", hint).because_of(error)
        })?;
        // The one that is spared opens the tickets of all.
        let by_directory = self.started == 0 || self.random.percent(50);
        let directory = by_directory.then(|| self.directory.clone());
        let pid = child.pid().as_raw_pid().cast_unsigned();
        self.books.note_start(pid, self.started);
        let seed = self.random.next();
        let is_spared = self.started == 0;
        Order::Begin { backend: self.address.to_owned(), seed, directory, is_spared }.send(child.socket())?;
        if self.started == 0 {
            self.spared = pid;
        }
        self.started += 1;
        self.workers.push(Worker {
            child,
            pid,
            is_ready: false,
            started: Instant::now(),
            by_directory,
            stopped: None,
            bequeathed: false,
            is_cut: false,
            is_killed: false,
            remains: None,
        });
        Ok(())
    }

    fn hear(&mut self, index: usize) -> Result<()> {
        let pid = self.workers[index].pid;
        for notice in self.workers[index].child.messages()? {
            match notice {
                Notice::Ready => self.workers[index].is_ready = true,
                Notice::Shared(offer) => {
                    self.offers.push_back((offer, self.workers[index].by_directory));
                    if self.offers.len() > MOST_OFFERS {
                        self.offers.pop_front();
                    }
                }
                Notice::Dropping(number) => self.books.note_drop(pid, number),
                Notice::Want => self.answer(index),
                Notice::Refused(refusal) => self.refusals.push((pid, refusal)),
                Notice::Took(slow) => self.note_time(pid, &slow),
                Notice::Did(counts) => {
                    self.report.counts.iter_mut().zip(counts).for_each(|(all, more)| *all += more);
                }
                Notice::Saw(traces) => {
                    traces.iter().for_each(|trace| self.reclaims.note(pid, trace, &self.books));
                }
                Notice::Found { changed, revoked } => {
                    self.report.words_changed += changed;
                    self.report.revoked += revoked;
                }
                Notice::Early(what) => {
                    let worker = self.books.name(pid);
                    self.report.early_frees.add(format!("{worker}: {what} (seed {})", self.soak.seed));
                }
                Notice::Failed(what) => self.add_unexpected(pid, &what),
                Notice::Bequeathed(descriptors) => {
                    self.workers[index].bequeathed = true;
                    self.report.inherited_descriptors += descriptors;
                }
                Notice::Cutting => {
                    self.workers[index].is_cut = true;
                    self.books.note_cut(pid);
                }
                Notice::Ended(remains) => self.workers[index].remains = Some(remains),
            }
        }
        Ok(())
    }

    fn add_unexpected(&mut self, pid: u32, what: &str) {
        let worker = self.books.name(pid);
        self.report.unexpected.add(format!("{worker}: {what} (seed {})", self.soak.seed));
    }

    /// Passes some offers on to a worker that has asked, and so reads its socket.
    fn answer(&mut self, index: usize) {
        let Worker { pid, by_directory, .. } = self.workers[index];
        let can_open = |(offer, of_directory): &&(Offer, bool)| offer.owner != pid && (by_directory || !*of_directory);
        let others: Vec<_> = self.offers.iter().filter(can_open).map(|(offer, _)| offer).collect();
        let count = if others.is_empty() { 0 } else { self.random.within(1..MOST_TAKEN + 1) };
        let offers = (0..count).map(|_| others[self.random.index(others.len())].clone()).collect();
        // It fails if the worker is dead.
        let _ = Order::Take { offers }.send(self.workers[index].child.socket());
    }

    fn note_time(&mut self, pid: u32, slow: &Slow) {
        let (took, is_peer_stopped) = self.books.time(pid, slow);
        let late = self.books.late(pid, slow);
        let longest = &mut self.report.longest[slow.operation.index()];
        let longest = if is_peer_stopped { &mut longest.stopped } else { &mut longest.prompt };
        *longest = took.max(*longest);
        if let Some(late) = late {
            self.report.late.add(format!("{late} (seed {})", self.soak.seed));
        }
    }

    fn judge(&mut self, pid: u32, refusal: &Refusal) {
        match self.books.unjustified(pid, refusal) {
            Some(fault) => self.report.unexpected.add(format!("{fault} (seed {})", self.soak.seed)),
            None if refusal.kind == "Expired" => self.report.expired += 1,
            None => self.report.refused_while_stopped += 1,
        }
    }

    /// Continues the workers whose stop is over.
    fn continue_stopped(&mut self, until: Instant) -> Result<()> {
        for index in 0..self.workers.len() {
            let Worker { stopped: Some((end, since)), pid, .. } = self.workers[index] else { continue };
            if end <= until {
                self.signal(index, Signal::CONT)?;
                self.books.note_continue(pid, now());
                self.workers[index].stopped = None;
                self.report.longest_stop = self.report.longest_stop.max(since.elapsed());
            }
        }
        Ok(())
    }

    fn signal(&self, index: usize, signal: Signal) -> Result<()> {
        // The id names no other process until the child has been waited for.
        match kill_process(self.workers[index].child.pid(), signal) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(error) => Err(io::Error::from(error).into()),
        }
    }

    /// Stops a random worker, if it is time.
    fn stop_some(&mut self) -> Result<()> {
        if self.next_stop > Instant::now() {
            return Ok(());
        }
        self.next_stop = Instant::now() + self.random.time(self.pace.stop * 2);
        let index = self.random.index(self.workers.len());
        let stopped = self.workers.iter().filter(|worker| worker.stopped.is_some()).count();
        // Some must run, to be delayed. A worker that is not ready may not have asked yet to die with this process.
        let Worker { stopped: stop, is_ready, .. } = self.workers[index];
        if stop.is_some() || !is_ready || 2 * stopped + 2 > self.workers.len() {
            return Ok(());
        }
        let milliseconds = match self.random.within(0..100) {
            0..85 => self.random.within(1..60),
            85..99 => self.random.within(60..400),
            // This stop is longer than the limit of every call. No process is killed meanwhile, so that calls reach their limits.
            _ => self.random.within(1200..2500),
        };
        let since = Instant::now();
        self.books.note_stop(self.workers[index].pid, now());
        self.signal(index, Signal::STOP)?;
        let until = since + Duration::from_millis(milliseconds);
        self.workers[index].stopped = Some((until, since));
        if milliseconds > 1000 {
            self.next_kill = self.next_kill.max(until);
        }
        self.report.stops += 1;
        Ok(())
    }

    /// Kills a random worker, if it is time.
    fn kill_one(&mut self) -> Result<()> {
        // Those that die are counted once they are dead.
        let dying = self.workers.iter().filter(|worker| worker.is_killed).count() as u64;
        if self.next_kill > Instant::now() || self.report.kills + dying >= self.soak.kills {
            return Ok(());
        }
        let index = self.random.index(self.workers.len());
        let Worker { pid, is_ready, stopped, started, .. } = self.workers[index];
        if !is_ready && stopped.is_none() && started.elapsed() > START {
            let worker = self.books.name(pid);
            let what = format!("{worker} has not opened its device for {} seconds", START.as_secs());
            return Err(Failure::new(ErrorKind::InvalidState, what, "use fewer `--processes`").into());
        }
        // A few die before they are ready.
        let can_die = pid != self.spared && !self.workers[index].is_killed;
        if !can_die || !(is_ready || self.random.percent(1)) {
            return Ok(());
        }
        self.next_kill = Instant::now() + self.random.time(self.pace.kill * 2);
        let was_stopped = stopped.is_some();
        self.books.note_kill(pid);
        self.reclaims.note_kill(pid, now());
        self.workers[index].is_killed = true;
        self.workers[index].child.kill()?;
        self.report.killed_while_stopped += u64::from(was_stopped);
        Ok(())
    }

    /// Records the death of a killed worker.
    fn bury(&mut self, worker: &Worker) -> Result<()> {
        self.report.kills += 1;
        self.report.killed_after_fork += u64::from(worker.bequeathed);
        self.report.killed_after_cut += u64::from(worker.is_cut);
        if worker.bequeathed {
            self.heirs.push_back(worker.child.clone_socket()?);
            if self.heirs.len() > MOST_HEIRS {
                self.heirs.pop_front();
            }
        }
        self.progress.advance(1);
        Ok(())
    }

    fn forget(&mut self, pid: u32) {
        self.ended.push_back(pid);
        if self.ended.len() > 100
            && let Some(pid) = self.ended.pop_front()
        {
            self.books.prune(pid);
        }
    }

    /// Reaps every process that has ended: children of killed workers, and workers that ended by themselves.
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
        // Otherwise it was the child of a worker.
        let Some(index) = self.workers.iter().position(|worker| worker.child.pid() == pid) else { return Ok(()) };
        self.workers[index].child.note_end(status);
        self.hear(index)?;
        let worker = self.workers.swap_remove(index);
        self.books.note_kill(worker.pid);
        self.reclaims.note_death(worker.pid, now());
        self.forget(worker.pid);
        if worker.is_killed {
            return self.bury(&worker);
        }
        let report = &mut self.report;
        match worker.remains {
            Some(Remains { bytes, objects, descriptors, deaths }) if self.is_ending => {
                report.leaked_bytes += bytes;
                report.leaked_objects += objects;
                report.descriptors_left += descriptors;
                if worker.pid == self.spared {
                    report.deaths_seen = deaths;
                }
                if bytes + objects + descriptors > 0 {
                    let name = self.books.name(worker.pid);
                    let (bytes, objects) = (counted(bytes, "byte"), counted(objects, "object"));
                    let descriptors = counted(descriptors, "descriptor");
                    let what = format!("{name} has {bytes}, {objects} and {descriptors} left");
                    self.report.leaks.add(format!("{what}; expected 0 (seed {})", self.soak.seed));
                }
            }
            _ => self.add_unexpected(worker.pid, &format!("it ended by itself ({status})")),
        }
        Ok(())
    }

    /// Lets all workers release everything and end. Those that are cut off are killed.
    fn end(&mut self, pulse: &AtomicU64) -> Result<()> {
        self.continue_stopped(Instant::now() + PATIENCE)?;
        while let Some(index) = self.workers.iter().position(|worker| worker.is_cut || worker.is_killed) {
            self.books.note_kill(self.workers[index].pid);
            let mut worker = self.workers.swap_remove(index);
            worker.child.stop()?;
            self.reclaims.note_death(worker.pid, now());
        }
        self.is_ending = true;
        // Memory of dead workers is reclaimed while the others live.
        let deadline = Instant::now() + PATIENCE * 2;
        while self.reclaims.is_waiting() && Instant::now() < deadline {
            go_on(pulse)?;
            self.round()?;
        }
        for worker in &self.workers {
            self.books.note_end(worker.pid);
        }
        for worker in &self.workers {
            let _ = Order::End.send(worker.child.socket());
        }
        let deadline = Instant::now() + PATIENCE * 2;
        while !self.workers.is_empty() && Instant::now() < deadline {
            go_on(pulse)?;
            self.round()?;
        }
        for index in 0..self.workers.len() {
            self.add_unexpected(self.workers[index].pid, "it does not end");
        }
        self.workers.clear();
        self.round()?;
        self.offers = VecDeque::new();
        self.heirs.clear();
        Ok(())
    }
}
