//! Gives mutants to the suite and says which were caught.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use highwater_hal::{Backend, Result};

use super::{Mutant, VARIABLE, mutants};
use crate::case::Case;
use crate::cases::cases;
use crate::options::Options;
use crate::peer::Launcher;
use crate::report::Status;
use crate::run::run;

/// Which mutants to run, and how.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct MutantOptions {
    /// Runs the mutants whose name contains this text, or that break the clause of this id; `None` runs all.
    pub filter: Option<String>,
    /// Runs one of so many, beginning with the first; 1 runs all.
    pub every: usize,
    /// How a second process with the same backend is started, for the cases and mutants that need one.
    pub launcher: Option<Launcher>,
    /// How long a case may take. One that takes longer has noticed that something is wrong: the mutant is caught.
    pub case_limit: Duration,
}

impl Default for MutantOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl MutantOptions {
    /// Every mutant, without a second process; a case may take 20 seconds.
    #[must_use]
    pub fn new() -> Self {
        Self { filter: None, every: 1, launcher: None, case_limit: Duration::from_secs(20) }
    }

    /// The same with a filter: a part of a mutant's name, or the id of a clause.
    #[must_use]
    pub fn with_filter(mut self, filter: impl Into<String>) -> Self {
        self.filter = Some(filter.into());
        self
    }

    /// The same with a sample: one of `every` mutants; 0 means 1.
    #[must_use]
    pub fn with_every(mut self, every: usize) -> Self {
        self.every = every;
        self
    }

    /// The same with a launcher of second processes. They are told which mutant they have by an environment variable
    /// that [`serve_peer`](crate::serve_peer) reads.
    #[must_use]
    pub fn with_launcher(mut self, launcher: Launcher) -> Self {
        self.launcher = Some(launcher);
        self
    }

    /// The same with another limit for each case.
    #[must_use]
    pub fn with_case_limit(mut self, limit: Duration) -> Self {
        self.case_limit = limit;
        self
    }

    /// Returns the mutants that these options select, in the order of a run.
    #[must_use]
    pub fn mutants(&self) -> Vec<&'static Mutant> {
        let chosen = |mutant: &&Mutant| match self.filter.as_deref() {
            None => true,
            Some(text) => mutant.name.contains(text) || mutant.clause == text,
        };
        mutants().filter(chosen).step_by(self.every.max(1)).collect()
    }
}

/// What became of a mutant.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Outcome {
    /// A case failed.
    Caught {
        /// The first that did.
        case: &'static Case,
        /// Whether it names the clause that the mutant breaks.
        by_its_clause: bool,
        /// What the case said.
        failure: String,
    },
    /// No case failed.
    Survived,
    /// It was not tried; the text says why.
    Skipped(String),
}

/// One mutant of a [`Score`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Verdict {
    /// Which mutant.
    pub mutant: &'static Mutant,
    /// What became of it.
    pub outcome: Outcome,
    /// How long that took.
    pub duration: Duration,
}

/// A mutant that no case noticed.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Survivor {
    /// Which mutant.
    pub mutant: &'static Mutant,
    /// Why that is known to be so; `None` where the suite is too weak and nobody knew.
    pub reason: Option<&'static str>,
}

/// Tells an observer how far a run is.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum MutantProgress<'a> {
    /// A mutant is given to the suite.
    Started {
        /// Which.
        mutant: &'static Mutant,
        /// Its number in this run, from 0.
        index: usize,
        /// How many the run has.
        total: usize,
    },
    /// It is known what became of it.
    Finished {
        /// What.
        verdict: &'a Verdict,
        /// Its number in this run, from 0.
        index: usize,
        /// How many the run has.
        total: usize,
    },
}

/// What a run of mutants came to.
#[derive(Debug, Clone, Default)]
pub struct Score {
    verdicts: Vec<Verdict>,
}

impl Score {
    /// The least part of the mutants that has to be caught, in percent.
    pub const LEAST_PERCENT: f64 = 95.0;

    /// Every mutant of the run, in order.
    #[must_use]
    pub fn verdicts(&self) -> &[Verdict] {
        &self.verdicts
    }

    /// How many mutants were given to the suite, without those that were skipped.
    #[must_use]
    pub fn mutants(&self) -> usize {
        self.count(|outcome| !matches!(outcome, Outcome::Skipped(_)))
    }

    /// How many were caught.
    #[must_use]
    pub fn caught(&self) -> usize {
        self.count(|outcome| matches!(outcome, Outcome::Caught { .. }))
    }

    /// How many were caught by a case that names the clause they break.
    #[must_use]
    pub fn caught_by_their_clause(&self) -> usize {
        self.count(|outcome| matches!(outcome, Outcome::Caught { by_its_clause: true, .. }))
    }

    /// How many were skipped.
    #[must_use]
    pub fn skipped(&self) -> usize {
        self.count(|outcome| matches!(outcome, Outcome::Skipped(_)))
    }

    /// Those that no case noticed.
    #[must_use]
    pub fn survivors(&self) -> Vec<Survivor> {
        let survived = self.verdicts.iter().filter(|verdict| matches!(verdict.outcome, Outcome::Survived));
        survived.map(|&Verdict { mutant, .. }| Survivor { mutant, reason: mutant.survives }).collect()
    }

    /// Caught mutants that the list says cannot be caught: the list has grown old.
    #[must_use]
    pub fn caught_unexpectedly(&self) -> Vec<&'static Mutant> {
        let caught = self.verdicts.iter().filter(|verdict| matches!(verdict.outcome, Outcome::Caught { .. }));
        caught.map(|verdict| verdict.mutant).filter(|mutant| mutant.survives.is_some()).collect()
    }

    /// How many of a hundred were caught; 0 where none was tried.
    #[must_use]
    pub fn percent(&self) -> f64 {
        match self.mutants() {
            0 => 0.0,
            tried => 100.0 * self.caught() as f64 / tried as f64,
        }
    }

    /// Whether enough were caught, and every survivor is known.
    #[must_use]
    pub fn is_success(&self) -> bool {
        let known = self.survivors().iter().all(|survivor| survivor.reason.is_some());
        self.percent() >= Self::LEAST_PERCENT && known && self.caught_unexpectedly().is_empty()
    }

    fn count(&self, which: impl Fn(&Outcome) -> bool) -> usize {
        self.verdicts.iter().filter(|verdict| which(&verdict.outcome)).count()
    }
}

/// The counts, then a line for each mutant that needs a word.
impl fmt::Display for Score {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} mutants caught ({:.1} %), {} of them by a case of their clause; {} skipped",
            self.caught(),
            self.mutants(),
            self.percent(),
            self.caught_by_their_clause(),
            self.skipped()
        )?;
        for Verdict { mutant, outcome, .. } in &self.verdicts {
            let Mutant { name, clause, what, survives, .. } = mutant;
            match (outcome, survives) {
                (Outcome::Survived, Some(reason)) => write!(f, "\n{name} [{clause}] survives as it may: {reason}")?,
                (Outcome::Survived, None) => write!(f, "\n{name} [{clause}] survives, and no case notices: {what}")?,
                (Outcome::Caught { case, .. }, Some(_)) => {
                    write!(f, "\n{name} [{clause}] is caught by {}: strike the reason why it survives", case.name)?;
                }
                (Outcome::Caught { case, by_its_clause: false, .. }, None) => {
                    write!(f, "\n{name} [{clause}] is caught by {}, which proves other clauses", case.name)?;
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Why mutants are kept from hardware.
const REAL_DEVICE: &str = "a real device does not check every range that a mutant may hand to it; use a simulated one";

/// Gives the mutants that `options` selects to the suite, one after the other, each around a backend that `open` makes,
/// and tells `observer` how far it is.
///
/// Cases that need a second process run where a launcher is given; mutants that need one are skipped elsewhere, and so
/// are those whose clause says nothing about this backend. All are where the device is real
/// ([`Identity::real_device`](highwater_hal::Identity)): it does not check what a mutant may hand to it. A case runs in a thread of its own. Where it takes longer
/// than the limit, the wrapper is stopped, so that the case ends with its next call; a thread that waits for something
/// which never comes stays, with its backend, until the process ends.
#[must_use]
pub fn run_mutants(
    open: impl Fn() -> Result<Arc<dyn Backend>>,
    options: &MutantOptions,
    observer: &mut dyn FnMut(MutantProgress<'_>),
) -> Score {
    let selected = options.mutants();
    let total = selected.len();
    let mut score = Score::default();
    for (index, mutant) in selected.into_iter().enumerate() {
        observer(MutantProgress::Started { mutant, index, total });
        let begun = Instant::now();
        let outcome = match open() {
            Ok(backend) if backend.identity().real_device => Outcome::Skipped(REAL_DEVICE.to_owned()),
            Ok(backend) => Trial::new(mutant, backend, options).run(),
            Err(error) => Outcome::Skipped(format!("the backend does not open: {error}")),
        };
        let verdict = Verdict { mutant, outcome, duration: begun.elapsed() };
        observer(MutantProgress::Finished { verdict: &verdict, index, total });
        score.verdicts.push(verdict);
    }
    score
}

/// One mutant before the suite.
pub(super) struct Trial<'o> {
    mutant: &'static Mutant,
    backend: Arc<dyn Backend>,
    stopped: Arc<AtomicBool>,
    launcher: Option<Launcher>,
    options: &'o MutantOptions,
}

impl<'o> Trial<'o> {
    pub(super) fn new(mutant: &'static Mutant, backend: Arc<dyn Backend>, options: &'o MutantOptions) -> Self {
        let stopped = Arc::<AtomicBool>::default();
        let backend = mutant.wrap_until(backend, Arc::clone(&stopped));
        let launcher = options.launcher.clone().map(|launcher| launcher.with_environment(VARIABLE, mutant.name));
        Self { mutant, backend, stopped, launcher, options }
    }

    fn run(&self) -> Outcome {
        if self.mutant.needs_launcher && self.launcher.is_none() {
            return Outcome::Skipped("no launcher for a second process was given".to_owned());
        }
        let names_it = |case: &&Case| case.clauses.contains(&self.mutant.clause);
        let mut reason = None;
        for case in cases().filter(names_it) {
            match self.run_case(case) {
                Status::Failed(failure) => return Outcome::Caught { case, by_its_clause: true, failure },
                Status::Skipped(why) if reason.is_none() => reason = Some(Err(why)),
                Status::Skipped(_) => {}
                _ => reason = Some(Ok(())),
            }
        }
        // With nothing to break there is nothing to catch.
        if let Some(Err(why)) = reason {
            return Outcome::Skipped(format!("no case of its clause runs here: {why}"));
        }
        let others = || cases().filter(|case| !names_it(case));
        for case in others() {
            if let Status::Failed(failure) = self.run_case(case) {
                return Outcome::Caught { case, by_its_clause: false, failure };
            }
        }
        Outcome::Survived
    }

    /// Runs one case in a thread of its own, and waits for it no longer than the limit.
    pub(super) fn run_case(&self, case: &'static Case) -> Status {
        let mut options = Options::new().with_filter(case.name);
        options.launcher = self.launcher.clone();
        let backend = Arc::clone(&self.backend);
        let (sender, receiver) = mpsc::channel();
        let thread = std::thread::Builder::new().name(case.name.to_owned()).spawn(move || {
            // The filter may select cases whose names go on after this one's.
            let report = run(&*backend, &options);
            let status = report.cases().iter().find(|report| report.case.name == case.name);
            // Nobody listens any more where it took too long.
            let _ = sender.send(status.map(|report| report.status.clone()));
        });
        let thread = match thread {
            Ok(thread) => thread,
            Err(error) => return Status::Skipped(format!("no thread can be started: {error}")),
        };
        let limit = self.options.case_limit;
        match receiver.recv_timeout(limit) {
            Ok(status) => {
                // It has nothing left to do but to end.
                let _ = thread.join();
                status.unwrap_or_else(|| Status::Skipped("the case was not selected".to_owned()))
            }
            Err(RecvTimeoutError::Timeout) => {
                // Relaxed: the thread notices with its next call, whichever that is.
                self.stopped.store(true, Ordering::Relaxed);
                Status::Failed(format!("the case was not over after {limit:?}"))
            }
            Err(RecvTimeoutError::Disconnected) => Status::Failed("the case panicked outside of itself".to_owned()),
        }
    }
}
