//! Runs cases in a process of their own. The process is replaced if a case crashed it or did not end in time.
//!
//! Nothing is retried: the case in flight has failed.

use std::ffi::OsString;
use std::time::Duration;

use anyhow::Result;
use highwater::ErrorKind;
use highwater::hal::{BackendTag, Identity};
use highwater_conformance::{Case, Executor, Fault, Faulted, Mutant, Points, Status};

use super::super::child::Child;
use super::super::failure::Failure;
use super::super::frame::Message as _;
use super::super::{backends, output};
use super::choice::Choice;
use super::protocol::{About, Notice, Order};

/// The least time limit for opening a backend, because a driver initializes every device.
const OPENING: Duration = Duration::from_secs(120);
/// The time limit for a worker to free everything at the end.
const ENDING: Duration = Duration::from_secs(30);

/// One worker at a time.
#[derive(Debug)]
pub(super) struct Workers {
    choice: Choice,
    /// The mutant that makes the backend wrong.
    mutant: Option<&'static Mutant>,
    limit: Duration,
    about: About,
    identity: Identity,
    seed: u64,
    /// `None` if the last one was lost.
    worker: Option<Worker>,
}

impl Workers {
    /// Starts the first worker. `limit` is the time limit of a case.
    ///
    /// # Errors
    /// If the backend does not open, or no process can be started.
    pub(super) fn start(choice: &Choice, limit: Duration) -> Result<Self> {
        Self::start_mutated(choice, None, limit)
    }

    /// The same on a backend that a mutant makes wrong.
    pub(super) fn start_mutated(choice: &Choice, mutant: Option<&'static Mutant>, limit: Duration) -> Result<Self> {
        let (worker, about) = Worker::start(choice, mutant, limit)?;
        let mut identity = Identity::new(&about.name, &about.description, BackendTag::next());
        identity.real_device = about.real_device;
        identity.versions.clone_from(&about.versions);
        Ok(Self { choice: choice.clone(), mutant, limit, about, identity, seed: 0, worker: Some(worker) })
    }

    pub(super) fn about(&self) -> &About {
        &self.about
    }

    /// Sends an order to the worker, or to a new one. Returns a text if the worker is lost.
    fn ask(&mut self, order: &Order) -> Result<Notice, String> {
        let mut worker = match self.worker.take() {
            Some(worker) => worker,
            None => {
                let started = Worker::start(&self.choice, self.mutant, self.limit);
                started.map_err(|error| format!("the backend could not be opened again for it: {error:#}"))?.0
            }
        };
        let notice = worker.ask(order, self.limit)?;
        self.worker = Some(worker);
        Ok(notice)
    }

    /// Kills the last worker, which then has no chance to free anything.
    pub(super) fn abandon(&mut self) {
        self.worker = None;
    }

    /// Makes the last worker free everything. Returns a text if that fails.
    pub(super) fn finish(&mut self) -> Result<(), String> {
        self.worker.take().map_or(Ok(()), Worker::finish)
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        if let Err(text) = self.finish() {
            output::line(format_args!("error: {text}"));
        }
    }
}

impl Executor for Workers {
    fn identity(&self) -> &Identity {
        &self.identity
    }

    fn draw_from(&mut self, seed: u64) {
        self.seed = seed;
    }

    fn run(&mut self, case: &'static Case) -> Status {
        match self.ask(&Order::Run(case.name.to_owned(), self.seed)) {
            Ok(Notice::Ended(status)) => status,
            Ok(other) => Status::Failed(misfit(&other)),
            Err(lost) => Status::Failed(lost),
        }
    }

    fn points(&mut self, case: &'static Case) -> Points {
        match self.ask(&Order::Points(case.name.to_owned())) {
            Ok(Notice::Points(points)) => points,
            Ok(other) => Points::Not(Status::Failed(misfit(&other))),
            Err(lost) => Points::Not(Status::Failed(lost)),
        }
    }

    fn run_with_fault(&mut self, case: &'static Case, fault: &Fault) -> Faulted {
        let lost = |text: String| {
            let (status, findings) = (Status::Failed(text.clone()), vec![text]);
            Faulted { status, reached: true, retried: 0, findings }
        };
        match self.ask(&Order::Fault(case.name.to_owned(), fault.clone())) {
            Ok(Notice::Faulted(faulted)) => faulted,
            Ok(other) => lost(misfit(&other)),
            Err(text) => lost(text),
        }
    }
}

fn misfit(notice: &Notice) -> String {
    format!("its process answered something else than it was asked for: {notice:?}")
}

/// A process that runs cases.
#[derive(Debug)]
struct Worker {
    child: Child,
    /// The case that it ran last.
    last: Option<String>,
}

impl Worker {
    fn start(choice: &Choice, mutant: Option<&'static Mutant>, limit: Duration) -> Result<(Self, About)> {
        let mutant = mutant.map(|mutant| ["--mutant".into(), mutant.name.into()]);
        let command = std::iter::once("conformance-worker".into()).chain(mutant.into_iter().flatten());
        let arguments: Vec<OsString> = command.chain(choice.arguments()).collect();
        let child = Child::start(&arguments).map_err(|error| {
            let hint = "the limits on processes and open files (`ulimit -a`) say what this user may have";
            Failure::new(ErrorKind::OperatingSystem, "no process can be started for the cases", hint).because_of(error)
        })?;
        let mut worker = Self { child, last: None };
        let loading = backends::load_limit().unwrap_or_default();
        match worker.hear(limit.max(OPENING + loading)) {
            Ok(Notice::Ready(about)) => Ok((worker, about)),
            Ok(Notice::Failed(why)) => Err(Failure::of_process(None, why).into()),
            other => {
                let what = other.map_or_else(|lost| lost, |other| misfit(&other));
                let hint = "run `highwater doctor`, which opens the backend too";
                let message = format!("the backend was not opened: {what}");
                Err(Failure::new(ErrorKind::InvalidState, message, hint).into())
            }
        }
    }

    fn ask(&mut self, order: &Order, limit: Duration) -> Result<Notice, String> {
        let last = self.last.replace(order.case().to_owned()).unwrap_or_else(|| "its start".to_owned());
        if let Ok(Some(status)) = self.child.ended() {
            return Err(format!("its process had ended before it began, after {last}: {status}"));
        }
        if order.send(self.child.socket()).is_err() {
            // It is dead, and its exit status gives the reason.
            return self.hear(Duration::ZERO);
        }
        match self.hear(limit)? {
            Notice::Failed(why) => Err(format!("its process gave up: {}", why.message)),
            notice => Ok(notice),
        }
    }

    /// Waits for a message. Returns a text if none arrives. The process has ended then.
    fn hear(&mut self, limit: Duration) -> Result<Notice, String> {
        let heard = self.child.wait_for(limit).map_err(|error| format!("its process cannot be understood: {error}"));
        match heard {
            Ok(Some(notice)) => return Ok(notice),
            Ok(None) => {}
            Err(text) => {
                self.stop();
                return Err(text);
            }
        }
        // Read before it is killed.
        let by_itself = self.child.ended().ok().flatten();
        if let Some(status) = by_itself {
            return Err(format!("its process ended: {status}"));
        }
        self.stop();
        Err(format!("it did not end within {} s (`--limit`), so its process was killed", limit.as_secs()))
    }

    fn stop(&mut self) {
        if let Err(error) = self.child.stop() {
            output::line(format_args!("error: {error}"));
        }
    }

    /// Closes the socket, and waits for the process to end successfully.
    fn finish(mut self) -> Result<(), String> {
        match self.child.finish(ENDING) {
            Ok(Some(status)) if status.success() => Ok(()),
            Ok(Some(status)) => {
                Err(format!("the process of the cases ended badly when there was no more to do: {status}"))
            }
            Ok(None) => {
                let seconds = ENDING.as_secs();
                Err(format!("the process of the cases did not end within {seconds} s when there was no more to do"))
            }
            Err(error) => Err(format!("the process of the cases cannot be waited for: {error}")),
        }
    }
}
