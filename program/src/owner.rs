//! The owner of the weights. It loads them once for each device that is used, starts the workers, sends them batches, and
//! collects the answers.
//!
//! *Devices.* The workers use the devices in turn. All workers of a device share one copy of the weights in its
//! memory. The ticket names the device by its UUID, so ordinals may differ between the processes.
//!
//! The owner waits in one place ([`Crew::next`]) for the messages and the deaths of its workers. The
//! time of the work itself is unlimited. The owner reports a worker that owes something but sends nothing, with its
//! state, and continues to wait. A dead worker loses its images and ends the job. The owner stops the others, and the
//! error names the worker and the images.
//!
//! *Dealing.* At first, each worker gets one batch for each lane of its threads and one more for each thread, so that a free
//! lane never waits. Then it gets one batch for each answer. So the faster worker gets more, and the unread bytes of a
//! socket are bounded.

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::ops::Range;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::Result;
use highwater::{ErrorKind, Runtime, Ticket};
use rustix::process::Pid;

use super::backends;
use super::child::{self, Child};
use super::classifier::LANES;
use super::control::{DieAt, Notice, Order, WorkerReport};
use super::failure::Failure;
use super::frame::Message as _;
use super::model::CLASSES;
use super::progress::Progress;
use super::report::{DeviceUse, Outcome};
use super::task::Task;
use super::weights::{self, Weights};

/// The silence after which the owner reports a worker; it doubles each time.
const SILENCE: Duration = Duration::from_secs(5);

/// The time in which a worker must end after it has closed its end of the socket.
const DYING: Duration = Duration::from_secs(10);

/// The most ranges of images that an error lists.
const MOST_RANGES: usize = 8;

/// The distribution of the job over processes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Spread<'a> {
    /// The address with which a worker opens the same backend.
    pub(super) backend: &'a str,
    pub(super) workers: usize,
    /// Threads of each worker.
    pub(super) threads: usize,
    /// True if each worker gets namespaces of its own.
    pub(super) isolated: bool,
    pub(super) die_at: Option<DieAt>,
}

/// Classifies in workers. On return, everything that it made on the device is dropped, and every worker has ended.
pub(super) fn classify(runtime: &Runtime, task: &Task, spread: Spread<'_>, progress: &Progress) -> Result<Outcome> {
    child::check_rendezvous(spread.isolated)?;
    let ordinals = weights::devices_for_workers(runtime)?;
    if ordinals.is_empty() {
        return Err(highwater::Error::lacks("digits", "gemm_f32").into());
    }
    let place = |ordinal| Place::prepare(runtime, task, ordinal);
    let places = ordinals.into_iter().take(spread.workers).map(place).collect::<Result<Vec<_>>>()?;
    let mut job = Job::start(task, spread, progress, &places)?;
    job.deal_and_gather()?;
    let mut outcome = job.finish()?;
    outcome.holdings += runtime.statistics().into();
    drop(places);
    runtime.trim_shared()?;
    Ok(outcome)
}

/// A device that is used, with the weights in its memory.
struct Place {
    ordinal: u32,
    name: String,
    ticket: Ticket,
    /// The memory of the ticket.
    _weights: Weights,
}

impl Place {
    /// Loads the weights into memory of a device and shares them.
    fn prepare(runtime: &Runtime, task: &Task, ordinal: u32) -> Result<Self> {
        let device = runtime.device(ordinal)?;
        let weights = Weights::upload(&device.create_stream()?, &task.network, true)?;
        Ok(Self { ordinal, name: device.info().name.clone(), ticket: weights.share()?, _weights: weights })
    }
}

/// The owner's state of the job.
struct Job<'a> {
    task: &'a Task,
    crew: Crew<'a>,
    /// The next batch to send.
    next_batch: u64,
    answered: u64,
    outcome: Outcome,
}

impl<'a> Job<'a> {
    /// Starts the workers and waits until all are ready.
    fn start(task: &'a Task, spread: Spread<'_>, progress: &'a Progress, places: &[Place]) -> Result<Self> {
        let crew = Crew { progress, members: Vec::new(), events: VecDeque::new(), threads: spread.threads };
        let unused =
            |place: &Place| DeviceUse { ordinal: place.ordinal, name: place.name.clone(), workers: 0, images: 0 };
        let outcome = Outcome {
            devices: places.iter().map(unused).collect(),
            transports: places.iter().map(|place| weights::transport_name(place.ticket.transport())).collect(),
            ..Outcome::default()
        };
        let mut job = Self { task, crew, next_batch: 0, answered: 0, outcome };
        for number in 1..=spread.workers {
            let arguments: Vec<String> =
                std::iter::once("worker".to_owned()).chain(backends::arguments_of_children()).collect();
            let started = if spread.isolated { Child::start_isolated(&arguments) } else { Child::start(&arguments) };
            let child = started.map_err(|error| {
                let what = format!("worker {number} of {} could not be started", spread.workers);
                let hint = if spread.isolated {
                    "install `unshare` of util-linux, which `--isolate-workers` needs"
                } else {
                    "use fewer `--workers`, or raise the limits on processes (ulimit -u) and descriptors (ulimit -n)"
                };
                Failure::new(ErrorKind::OperatingSystem, what, hint).because_of(error)
            })?;
            let place = (number - 1) % places.len();
            job.outcome.devices[place].workers += 1;
            let setup = Order::Setup {
                backend: spread.backend.to_owned(),
                threads: spread.threads as u64,
                die_at: spread.die_at,
                ticket: places[place].ticket.to_bytes(),
            };
            let mut member = Member::new(child, place)?;
            member.tell(&setup, progress);
            job.crew.members.push(member);
        }
        let mut ready = 0;
        while ready < spread.workers {
            match job.crew.next()? {
                (member, Event::Said(Notice::Ready)) => {
                    job.crew.members[member].owes = false;
                    ready += 1;
                }
                (member, event) => return Err(job.unexpected(member, event)),
            }
        }
        Ok(job)
    }

    /// Sends every batch once, and collects the answers.
    fn deal_and_gather(&mut self) -> Result<()> {
        let started = Instant::now();
        // Round by round, so that the first worker does not get all of a short job.
        for _ in 0..self.crew.threads * (LANES + 1) {
            (0..self.crew.members.len()).for_each(|member| self.deal(member));
        }
        while self.answered < self.task.batches() {
            match self.crew.next()? {
                (member, Event::Said(Notice::Answer { number, digits })) => {
                    self.take_answer(member, number, &digits)?;
                    self.deal(member);
                }
                (member, event) => return Err(self.unexpected(member, event)),
            }
        }
        self.outcome.elapsed = started.elapsed();
        Ok(())
    }

    /// Sends a worker the next batch, if there is one.
    fn deal(&mut self, member: usize) {
        let number = self.next_batch;
        if number >= self.task.batches() {
            return;
        }
        self.next_batch += 1;
        let first_image = self.task.images_of(number).start;
        let batch = Order::Batch { number, first_image, pixels: self.task.pixels(number).to_vec() };
        let member = &mut self.crew.members[member];
        member.in_flight.insert(number);
        member.tell(&batch, self.crew.progress);
    }

    fn take_answer(&mut self, member: usize, number: u64, digits: &[u8]) -> Result<()> {
        let in_flight = &mut self.crew.members[member].in_flight;
        let images = self.task.images_of(number);
        let sound = digits.len() as u64 == images.end - images.start
            && digits.iter().all(|&digit| usize::from(digit) < CLASSES)
            && in_flight.remove(&number);
        if !sound {
            let what = format!("an answer of {} digits to batch {number}", digits.len());
            return Err(self.crew.members[member].broke_the_protocol(&what));
        }
        self.crew.members[member].owes = !self.crew.members[member].in_flight.is_empty();
        self.outcome.tally += self.task.count(number, digits);
        self.outcome.devices[self.crew.members[member].place].images += digits.len() as u64;
        self.answered += 1;
        self.crew.progress.advance(digits.len() as u64);
        Ok(())
    }

    /// Makes the workers free everything, and waits until they have ended.
    fn finish(mut self) -> Result<Outcome> {
        let progress = self.crew.progress;
        self.crew.members.iter_mut().for_each(|member| member.tell(&Order::Finish, progress));
        let mut left = self.crew.members.len();
        while left > 0 {
            match self.crew.next()? {
                (member, Event::Said(Notice::Report(report))) if self.crew.members[member].report.is_none() => {
                    self.crew.members[member].report = Some(report);
                }
                (member, Event::Ended(status)) if status.success() && self.crew.members[member].is_done() => left -= 1,
                (member, event) => return Err(self.unexpected(member, event)),
            }
        }
        for member in &self.crew.members {
            let WorkerReport { holdings, leaks, refused } = member.report.clone().unwrap_or_default();
            self.outcome.holdings += holdings;
            self.outcome.leaks += leaks;
            if !refused.is_empty() {
                self.outcome.refused.push(format!("{}: {refused}", member.name()));
            }
        }
        Ok(self.outcome)
    }

    /// Returns the error for an event that ends the job.
    fn unexpected(&self, member: usize, event: Event) -> anyhow::Error {
        let named = &self.crew.members[member];
        match event {
            Event::Said(Notice::Failed(why)) => Failure::of_process(Some(&named.name()), why).into(),
            Event::Said(notice) => named.broke_the_protocol(&format!("{notice:?}")),
            Event::Ended(status) => {
                let hint = "find out who ended it (`dmesg` tells of a lack of memory); the other workers were stopped";
                let unfinished = self.unfinished(member);
                let cut = if named.child.is_cut() { " in the middle of a message" } else { "" };
                Failure::lost_worker(format!("{} ended early{cut} ({status}); {unfinished}", named.name()), hint).into()
            }
        }
    }

    /// Returns the unfinished images, and those of them that this worker had.
    fn unfinished(&self, member: usize) -> String {
        let images = |batches: &mut dyn Iterator<Item = u64>| ranges(batches.map(|batch| self.task.images_of(batch)));
        let with_it = images(&mut self.crew.members[member].in_flight.iter().copied());
        let mut dealt: BTreeSet<u64> = BTreeSet::new();
        self.crew.members.iter().for_each(|member| dealt.extend(&member.in_flight));
        let mut all = images(&mut dealt.iter().copied());
        let not_dealt = self.task.images_of(self.next_batch).start.min(self.task.images())..self.task.images();
        if !not_dealt.is_empty() {
            all = ranges(all.into_iter().chain([not_dealt]));
        }
        let of_all = format!("of {} images", self.task.images());
        format!(
            "unfinished: {} {of_all}{}; with this worker: {}{}",
            count(&all),
            list(&all),
            count(&with_it),
            list(&with_it)
        )
    }
}

fn count(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

/// Returns the ranges with their last image, in parentheses.
fn list(ranges: &[Range<u64>]) -> String {
    if ranges.is_empty() {
        return String::new();
    }
    let mut texts: Vec<_> =
        ranges.iter().take(MOST_RANGES).map(|range| format!("{}-{}", range.start, range.end - 1)).collect();
    if ranges.len() > MOST_RANGES {
        texts.push(format!("and {} ranges more", ranges.len() - MOST_RANGES));
    }
    format!(" ({})", texts.join(", "))
}

/// Joins adjacent ranges of a sorted sequence.
fn ranges(ranges: impl Iterator<Item = Range<u64>>) -> Vec<Range<u64>> {
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => joined.push(range),
        }
    }
    joined
}

/// The workers. Dropping it stops those that still run.
struct Crew<'a> {
    progress: &'a Progress,
    members: Vec<Member>,
    /// The events that are not handled yet.
    events: VecDeque<(usize, Event)>,
    threads: usize,
}

/// The owner's state of a worker.
struct Member {
    child: Child,
    /// Index of its device among those that are used.
    place: usize,
    in_flight: BTreeSet<u64>,
    report: Option<WorkerReport>,
    ended: bool,
    /// True if it owes a message: that it is ready, an answer, a report.
    owes: bool,
    /// The start of its silence while it owes a message.
    silent_since: Instant,
    /// The silence after which the owner reports it next.
    told_after: Duration,
}

/// An event of a worker.
#[derive(Debug)]
enum Event {
    Said(Notice),
    Ended(ExitStatus),
}

impl Member {
    fn new(child: Child, place: usize) -> io::Result<Self> {
        child.socket().set_write_timeout(Some(SILENCE))?;
        Ok(Self {
            child,
            place,
            in_flight: BTreeSet::new(),
            report: None,
            ended: false,
            owes: false,
            silent_since: Instant::now(),
            told_after: SILENCE,
        })
    }

    fn name(&self) -> String {
        name(&self.child)
    }

    /// Returns true if everything that it owed has arrived.
    fn is_done(&self) -> bool {
        self.report.is_some() && !self.child.is_cut()
    }

    /// Sends an order. A failure means that the worker has died or is about to, which its pidfd reports.
    fn tell(&mut self, order: &Order, progress: &Progress) {
        if !self.owes {
            self.is_heard();
            self.owes = true;
        }
        let Self { child, silent_since, told_after, .. } = self;
        let _ = order.send_patiently(child.socket(), || tell_of_silence(child, *silent_since, told_after, progress));
    }

    /// Restarts the measurement of its silence.
    fn is_heard(&mut self) {
        self.silent_since = Instant::now();
        self.told_after = SILENCE;
    }

    fn tell_of_silence(&mut self, progress: &Progress) {
        if self.owes && !self.ended {
            tell_of_silence(&self.child, self.silent_since, &mut self.told_after, progress);
        }
    }

    fn broke_the_protocol(&self, what: &str) -> anyhow::Error {
        let message = format!("{} said what was not expected: {what}", self.name());
        Failure::new(ErrorKind::InvalidState, message, "this is a defect of the program; please report it").into()
    }
}

/// Returns the name of a worker for messages.
fn name(child: &Child) -> String {
    child.worker().map_or_else(
        || format!("a worker that `unshare` (process {}) starts", child.pid()),
        |worker| format!("worker {worker}"),
    )
}

/// Returns advice for the user about a silent worker, by its state in the system.
fn advice(state: &str, pid: Option<Pid>) -> String {
    let pid = pid.map_or_else(|| "PID".to_owned(), |pid| pid.to_string());
    match state.chars().next() {
        Some('T') => format!("it is stopped: let it go on (`kill -CONT {pid}`), or end it, which ends the job"),
        Some('t') => "a debugger has stopped it: let it go on there, or end it, which ends the job".to_owned(),
        Some('Z') => {
            "it has ended, and the system does not report that yet: a debugger holds it, or its parent does not run"
                .to_owned()
        }
        _ => "the job waits for it; ending it ends the job".to_owned(),
    }
}

/// Reports a worker that has been silent for too long, with its state in the system.
fn tell_of_silence(child: &Child, since: Instant, told_after: &mut Duration, progress: &Progress) {
    if since.elapsed() < *told_after {
        return;
    }
    let seconds = since.elapsed().as_secs();
    *told_after *= 2;
    let state = child.state().unwrap_or_else(|| "unknown".to_owned());
    let (name, advice) = (name(child), advice(&state, child.worker()));
    progress.say(&format!("warning: {name} has said nothing for {seconds} s, its state is {state}; {advice}"));
}

impl Crew<'_> {
    /// Waits for the next event.
    fn next(&mut self) -> Result<(usize, Event)> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(event);
            }
            self.wait()?;
        }
    }

    /// Waits for events and stores them. The messages of a worker come before its end.
    fn wait(&mut self) -> Result<()> {
        let waiting: Vec<usize> = (0..self.members.len()).filter(|&index| !self.members[index].ended).collect();
        let children = || waiting.iter().map(|&index| &self.members[index].child);
        let limit = if children().any(Child::has_hung_up) { DYING } else { SILENCE };
        let ready = child::ready(children(), limit)?;
        let progress = self.progress;
        self.members.iter_mut().for_each(|member| member.tell_of_silence(progress));
        if ready.is_empty() {
            // Those that hung up and do not die.
            let mut hung_up = self.members.iter().filter(|member| !member.ended && member.child.has_hung_up());
            hung_up.try_for_each(|member| member.child.kill())?;
        }
        for index in ready.into_iter().map(|position| waiting[position]) {
            let member = &mut self.members[index];
            // Death is checked first: everything that a dead worker sent is in the socket.
            let ended = member.child.ended()?;
            for notice in member.child.messages()? {
                member.is_heard();
                self.events.push_back((index, Event::Said(notice)));
            }
            if let Some(status) = ended {
                member.ended = true;
                self.events.push_back((index, Event::Ended(status)));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Failed before: a process that has ended was called one that could be ended.
    #[test]
    fn the_advice_about_a_silent_worker_fits_its_state() {
        let pid = Pid::from_raw(7);
        assert!(advice("T (stopped)", pid).contains("`kill -CONT 7`"));
        assert!(advice("t (tracing stop)", pid).contains("debugger"));
        assert!(advice("Z (zombie)", pid).starts_with("it has ended"));
        assert!(advice("S (sleeping)", pid).contains("ending it ends the job"));
    }

    #[test]
    fn ranges_that_touch_are_joined_and_long_lists_are_cut() {
        let joined = ranges([0..32, 32..64, 96..128].into_iter());
        assert_eq!(joined, [0..64, 96..128]);
        assert_eq!((count(&joined), list(&joined).as_str()), (96, " (0-63, 96-127)"));
        assert_eq!(list(&[]), "");
        let many: Vec<_> = (0..10).map(|number| 10 * number..10 * number + 1).collect();
        assert!(list(&many).ends_with("70-70, and 2 ranges more)"), "{}", list(&many));
    }
}
