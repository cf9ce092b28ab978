//! Gives mutants to the suite, and scores which it catches.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use highwater_hal::{Backend, Error, ErrorKind, Identity, Result};

use super::{Mutant, VARIABLE, generated_mutants, mutants};
use crate::case::{Case, all_capabilities};
use crate::cases::cases;
use crate::device::DEVICE;
use crate::options::Options;
use crate::peer::Launcher;
use crate::report::Status;
use crate::run::{Executor, InProcess, run};

/// Selects the mutants of a run.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct MutantOptions {
    /// Runs the mutants whose name contains this text, or that break the clause with this id. `None` runs all.
    pub filter: Option<String>,
    /// Selects the mutants by construction instead of the written ones.
    pub generated: bool,
    /// Runs every N-th mutant, beginning with the first; 1 runs all.
    pub every: usize,
    /// Starts a second process with the same backend, for the cases and mutants that need one.
    pub launcher: Option<Launcher>,
    /// The time limit of a case. A case that exceeds it has noticed a mistake, so the mutant is caught.
    pub case_limit: Duration,
    /// The time after which no further mutant is tried; the rest are skipped. `None` tries all.
    pub total_limit: Option<Duration>,
}

impl Default for MutantOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl MutantOptions {
    /// Selects every mutant, without a second process and with 20 seconds for a case.
    #[must_use]
    pub fn new() -> Self {
        Self {
            filter: None,
            generated: false,
            every: 1,
            launcher: None,
            case_limit: Duration::from_secs(20),
            total_limit: None,
        }
    }

    /// Sets the filter: a part of a mutant's name, or the id of a clause.
    #[must_use]
    pub fn with_filter(mut self, filter: impl Into<String>) -> Self {
        self.filter = Some(filter.into());
        self
    }

    /// Selects the mutants by construction.
    #[must_use]
    pub fn with_generated(mut self) -> Self {
        self.generated = true;
        self
    }

    /// Sets the sample: one of `every` mutants; 0 means 1.
    #[must_use]
    pub fn with_every(mut self, every: usize) -> Self {
        self.every = every;
        self
    }

    /// Sets the launcher of second processes. An environment variable names the mutant for them, and
    /// [`serve_peer`](crate::serve_peer) reads it.
    #[must_use]
    pub fn with_launcher(mut self, launcher: Launcher) -> Self {
        self.launcher = Some(launcher);
        self
    }

    /// Sets the time limit of a case.
    #[must_use]
    pub fn with_case_limit(mut self, limit: Duration) -> Self {
        self.case_limit = limit;
        self
    }

    /// Sets the time after which no further mutant is tried.
    #[must_use]
    pub fn with_total_limit(mut self, limit: Duration) -> Self {
        self.total_limit = Some(limit);
        self
    }

    /// Returns the mutants that these options select, in the order of a run.
    #[must_use]
    pub fn mutants(&self) -> Vec<&'static Mutant> {
        let chosen = |mutant: &&Mutant| match self.filter.as_deref() {
            None => true,
            Some(text) => mutant.name.contains(text) || mutant.breaks(text),
        };
        let generated: &[Mutant] = if self.generated { generated_mutants() } else { &[] };
        let written = mutants().filter(|_| !self.generated);
        written.chain(generated).filter(chosen).step_by(self.every.max(1)).collect()
    }
}

/// The result of a mutant.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Outcome {
    /// A case failed.
    Caught {
        /// The first case that failed.
        case: &'static Case,
        /// Whether the case names the clause that the mutant breaks.
        by_its_clause: bool,
        /// The failure of the case.
        failure: String,
    },
    /// No case failed.
    Survived,
    /// The mutant was not tried; the text says why.
    Skipped(String),
}

/// One mutant of a [`Score`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Verdict {
    /// The mutant.
    pub mutant: &'static Mutant,
    /// The result.
    pub outcome: Outcome,
    /// The duration.
    pub duration: Duration,
}

/// A mutant that no case caught.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Survivor {
    /// The mutant.
    pub mutant: &'static Mutant,
    /// Why no case can catch it; `None` if the survivor is a gap in the suite.
    pub reason: Option<&'static str>,
}

/// The progress of a run.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum MutantProgress<'a> {
    /// A mutant begins.
    Started {
        /// The mutant.
        mutant: &'static Mutant,
        /// The number of the mutant in this run, from 0.
        index: usize,
        /// The number of mutants in the run.
        total: usize,
    },
    /// A mutant has ended.
    Finished {
        /// The result.
        verdict: &'a Verdict,
        /// The number of the mutant in this run, from 0.
        index: usize,
        /// The number of mutants in the run.
        total: usize,
    },
}

/// The counts of one class of mutants by construction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Class {
    /// Caught by a case.
    pub caught: usize,
    /// Not caught, although a case could catch it.
    pub missed: usize,
    /// No case can catch it.
    pub equivalent: usize,
    /// Not tried.
    pub skipped: usize,
}

/// The score of a run of mutants.
#[derive(Debug, Clone, Default)]
pub struct Score {
    verdicts: Vec<Verdict>,
}

impl Score {
    /// The percentage of mutants that the suite must catch.
    pub const LEAST_PERCENT: f64 = 95.0;

    /// Returns every mutant of the run, in order.
    #[must_use]
    pub fn verdicts(&self) -> &[Verdict] {
        &self.verdicts
    }

    /// Returns the number of mutants that were tried, without those that were skipped.
    #[must_use]
    pub fn mutants(&self) -> usize {
        self.count(|outcome| !matches!(outcome, Outcome::Skipped(_)))
    }

    /// Returns the number of mutants that were caught.
    #[must_use]
    pub fn caught(&self) -> usize {
        self.count(|outcome| matches!(outcome, Outcome::Caught { .. }))
    }

    /// Returns the number of mutants that were caught by a case of their clause.
    #[must_use]
    pub fn caught_by_their_clause(&self) -> usize {
        self.count(|outcome| matches!(outcome, Outcome::Caught { by_its_clause: true, .. }))
    }

    /// Returns the number of mutants that no case can catch, and that none has caught.
    #[must_use]
    pub fn equivalent(&self) -> usize {
        self.survivors().iter().filter(|survivor| survivor.reason.is_some()).count()
    }

    /// Returns the counts of each class of mutants by construction: of each mistake, then of each condition.
    #[must_use]
    pub fn classes(&self) -> Vec<(&'static str, Class)> {
        let mut classes: Vec<(&'static str, Class)> = Vec::new();
        let of = |verdict: &Verdict| verdict.mutant.class();
        let mistakes = self.verdicts.iter().filter_map(|verdict| Some((of(verdict)?.0, verdict)));
        let conditions = self.verdicts.iter().filter_map(|verdict| Some((of(verdict)?.1, verdict)));
        for (name, verdict) in mistakes.chain(conditions) {
            let place = classes.iter().position(|(known, _)| *known == name).unwrap_or_else(|| {
                classes.push((name, Class::default()));
                classes.len() - 1
            });
            let class = &mut classes[place].1;
            *match (&verdict.outcome, verdict.mutant.survives) {
                (Outcome::Caught { .. }, _) => &mut class.caught,
                (Outcome::Survived, None) => &mut class.missed,
                (Outcome::Survived, Some(_)) => &mut class.equivalent,
                (Outcome::Skipped(_), _) => &mut class.skipped,
            } += 1;
        }
        classes
    }

    /// Returns the number of mutants that were skipped.
    #[must_use]
    pub fn skipped(&self) -> usize {
        self.count(|outcome| matches!(outcome, Outcome::Skipped(_)))
    }

    /// Returns the mutants that no case caught.
    #[must_use]
    pub fn survivors(&self) -> Vec<Survivor> {
        let survived = self.verdicts.iter().filter(|verdict| matches!(verdict.outcome, Outcome::Survived));
        survived.map(|&Verdict { mutant, .. }| Survivor { mutant, reason: mutant.survives }).collect()
    }

    /// Returns the caught mutants that the list calls impossible to catch. Their reasons are outdated.
    #[must_use]
    pub fn caught_unexpectedly(&self) -> Vec<&'static Mutant> {
        let caught = self.verdicts.iter().filter(|verdict| matches!(verdict.outcome, Outcome::Caught { .. }));
        caught.map(|verdict| verdict.mutant).filter(|mutant| mutant.survives.is_some()).collect()
    }

    /// Returns the percentage of mutants that were caught; 0 if none was tried. Mutants by construction that are equivalent do not
    /// count.
    #[must_use]
    pub fn percent(&self) -> f64 {
        let equivalent = if self.is_generated() { self.equivalent() } else { 0 };
        match self.mutants() - equivalent {
            0 => 0.0,
            tried => 100.0 * self.caught() as f64 / tried as f64,
        }
    }

    /// Returns whether enough mutants were caught, and every survivor has a reason.
    #[must_use]
    pub fn is_success(&self) -> bool {
        let known = self.is_generated() || self.survivors().iter().all(|survivor| survivor.reason.is_some());
        self.percent() >= Self::LEAST_PERCENT && known && self.caught_unexpectedly().is_empty()
    }

    fn is_generated(&self) -> bool {
        self.verdicts.iter().any(|verdict| verdict.mutant.class().is_some())
    }

    fn count(&self, which: impl Fn(&Outcome) -> bool) -> usize {
        self.verdicts.iter().filter(|verdict| which(&verdict.outcome)).count()
    }
}

/// Writes the counts, then a line for each mutant that was not caught as expected.
impl fmt::Display for Score {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} mutants caught ({:.1} % of those that a case can notice), {} of them by a case of their clause; {} \
             equivalent, {} skipped",
            self.caught(),
            self.mutants(),
            self.percent(),
            self.caught_by_their_clause(),
            self.equivalent(),
            self.skipped()
        )?;
        for (name, Class { caught, missed, equivalent, skipped }) in self.classes() {
            write!(f, "\n{name}: {caught} caught, {missed} missed, {equivalent} equivalent, {skipped} skipped")?;
        }
        for Verdict { mutant, outcome, .. } in &self.verdicts {
            if self.is_generated() && mutant.survives.is_some() && matches!(outcome, Outcome::Survived) {
                continue;
            }
            let Mutant { name, clause, what, survives, .. } = mutant;
            match (outcome, survives) {
                (Outcome::Survived, Some(reason)) => write!(f, "\n{name} [{clause}] survives, as expected: {reason}")?,
                (Outcome::Survived, None) => write!(f, "\n{name} [{clause}] survives: {what}")?,
                (Outcome::Caught { case, .. }, Some(_)) => {
                    write!(f, "\n{name} [{clause}] is caught by {}, so remove its reason to survive", case.name)?;
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

/// The reason why no mutant in this process runs on a real device.
const IN_THIS_PROCESS: &str = "on a real device, each mutant needs a process of its own; use `run_mutants_on`";

/// Gives the mutants that `options` selects to the suite, one after the other. `open` makes a backend for each, and
/// `observer` sees the progress.
///
/// Cases and mutants that need a second process are skipped without a launcher. Mutants of a clause that proves nothing about
/// this backend are skipped too. On a real device ([`Identity::real_device`](highwater_hal::Identity)) all are skipped,
/// because a fault of the device would spoil the next ones; see [`run_mutants_on`]. Each case runs in its own thread. If it exceeds the
/// limit, the wrapper is stopped, and the case ends with its next call. A thread that waits forever stays, with its backend,
/// until the process ends.
#[must_use]
pub fn run_mutants(
    open: impl Fn() -> Result<Arc<dyn Backend>>,
    options: &MutantOptions,
    observer: &mut dyn FnMut(MutantProgress<'_>),
) -> Score {
    score(options, observer, |mutant| match open() {
        Ok(backend) if backend.identity().real_device => Outcome::Skipped(IN_THIS_PROCESS.to_owned()),
        Ok(backend) if let Some(why) = mutant.unfit_for(backend.identity(), backend.device_count()) => {
            Outcome::Skipped(why.to_owned())
        }
        Ok(_) if mutant.needs_launcher && options.launcher.is_none() => {
            Outcome::Skipped("no launcher for a second process was given".to_owned())
        }
        Ok(backend) if let Some(why) = unmet(mutant, &*backend) => Outcome::Skipped(why),
        Ok(backend) => {
            let trial = Trial::new(mutant, backend, options);
            judge(mutant, &mut |case| trial.run_case(case))
        }
        Err(error) => Outcome::Skipped(format!("the backend does not open: {error}")),
    })
}

/// Returns the reason if the mutant does no wrong around this backend.
fn unmet(mutant: &Mutant, backend: &dyn Backend) -> Option<String> {
    const LARGE: u64 = 5 << 30;
    // A backend that cannot describe its devices fails the cases.
    let free = backend.memory_info(DEVICE).ok()?.free;
    if mutant.needs_large_block && free <= LARGE {
        return Some(format!(
            "a block of more than 4 GiB shows the mistake, and device {DEVICE} has {} MiB of free memory",
            free >> 20
        ));
    }
    mutant.unmet(&all_capabilities(backend).ok()?)
}

/// Gives the mutants that `options` selects to the suite, each in an executor that `start` makes, such as a process. The executor runs
/// the cases on a [`Mutated`] backend.
///
/// A mutant that is unfit for a backend with this identity and number of devices ([`Mutant::unfit_for`]) is skipped with the reason. The
/// executor limits the time of a case, and has its own launcher.
#[must_use]
pub fn run_mutants_on<E: Executor>(
    identity: &Identity,
    device_count: u32,
    mut start: impl FnMut(&'static Mutant) -> std::result::Result<E, String>,
    options: &MutantOptions,
    observer: &mut dyn FnMut(MutantProgress<'_>),
) -> Score {
    score(options, observer, |mutant| {
        if let Some(reason) = mutant.unfit_for(identity, device_count) {
            return Outcome::Skipped(reason.to_owned());
        }
        match start(mutant) {
            Ok(mut executor) => judge(mutant, &mut |case| executor.run(case)),
            Err(error) => Outcome::Skipped(format!("the backend does not open: {error}")),
        }
    })
}

/// Tries the mutants one after the other.
fn score(
    options: &MutantOptions,
    observer: &mut dyn FnMut(MutantProgress<'_>),
    mut attempt: impl FnMut(&'static Mutant) -> Outcome,
) -> Score {
    let selected = options.mutants();
    let total = selected.len();
    let mut score = Score::default();
    let started = Instant::now();
    for (index, mutant) in selected.into_iter().enumerate() {
        observer(MutantProgress::Started { mutant, index, total });
        let begun = Instant::now();
        let outcome = match options.total_limit {
            Some(limit) if started.elapsed() >= limit => {
                Outcome::Skipped(format!("the run had reached its limit of {} s", limit.as_secs()))
            }
            _ => attempt(mutant),
        };
        let verdict = Verdict { mutant, outcome, duration: begun.elapsed() };
        observer(MutantProgress::Finished { verdict: &verdict, index, total });
        score.verdicts.push(verdict);
    }
    score
}

/// Gives one mutant to the cases: first those of its clauses, then the others, up to the first that fails.
fn judge(mutant: &'static Mutant, run_case: &mut dyn FnMut(&'static Case) -> Status) -> Outcome {
    let names_it = |case: &&Case| case.clauses.iter().any(|clause| mutant.breaks(clause));
    let mut reason = None;
    for case in cases().filter(names_it) {
        match run_case(case) {
            Status::Failed(failure) => return Outcome::Caught { case, by_its_clause: true, failure },
            Status::Skipped(why) if reason.is_none() => reason = Some(Err(why)),
            Status::Skipped(_) => {}
            _ => reason = Some(Ok(())),
        }
    }
    // The backend lacks the ability that the mutant breaks.
    if let Some(Err(why)) = reason {
        return Outcome::Skipped(format!("no case of its clause runs here: {why}"));
    }
    // Many mutants by construction are equivalent. The proof of such a mutant covers the other cases.
    let is_proved = mutant.class().is_some() && mutant.survives.is_some();
    for case in cases().filter(|case| !is_proved && !names_it(case)) {
        if let Status::Failed(failure) = run_case(case) {
            return Outcome::Caught { case, by_its_clause: false, failure };
        }
    }
    Outcome::Survived
}

/// A backend that a mutant makes wrong, for the suite alone. An executor in a process of its own gives it to cases.
pub struct Mutated {
    backend: Arc<dyn Backend>,
    launcher: Option<Launcher>,
}

impl Mutated {
    /// Makes the backend wrong, also in the second process that the launcher starts.
    ///
    /// # Errors
    /// `Unsupported` if the mutant is unfit for the backend.
    pub fn new(mutant: &'static Mutant, backend: Arc<dyn Backend>, launcher: Option<Launcher>) -> Result<Self> {
        if let Some(reason) = mutant.unfit_for(backend.identity(), backend.device_count()) {
            let message = format!("the mutant `{}` is kept from this backend: {reason}", mutant.name);
            return Err(Error::new(ErrorKind::Unsupported, "mutant", message));
        }
        let launcher = launcher.map(|launcher| launcher.with_environment(VARIABLE, mutant.name));
        Ok(Self { backend: mutant.wrap_until(backend, Arc::default()), launcher })
    }

    /// Returns an executor of cases in this process.
    #[must_use]
    pub fn executor(&self) -> InProcess<'_> {
        InProcess::new(&*self.backend, self.launcher.clone())
    }
}

impl fmt::Debug for Mutated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mutated").field("identity", self.backend.identity()).finish_non_exhaustive()
    }
}

/// The trial of one mutant.
pub(super) struct Trial<'o> {
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
        Self { backend, stopped, launcher, options }
    }

    /// Runs one case in its own thread, and waits for it until the limit.
    pub(super) fn run_case(&self, case: &'static Case) -> Status {
        let mut options = Options::new().with_filter(case.name);
        options.launcher = self.launcher.clone();
        let backend = Arc::clone(&self.backend);
        let (sender, receiver) = mpsc::channel();
        let thread = std::thread::Builder::new().name(case.name.to_owned()).spawn(move || {
            // The filter may also select cases whose names continue this one's.
            let report = run(&*backend, &options);
            let status = report.cases().iter().find(|report| report.case.name == case.name);
            // After the limit, nothing receives the result.
            let _ = sender.send(status.map(|report| report.status.clone()));
        });
        let thread = match thread {
            Ok(thread) => thread,
            Err(error) => return Status::Skipped(format!("no thread can be started: {error}")),
        };
        let limit = self.options.case_limit;
        match receiver.recv_timeout(limit) {
            Ok(status) => {
                // The thread has sent its result and is about to end.
                let _ = thread.join();
                status.unwrap_or_else(|| Status::Skipped("the case was not selected".to_owned()))
            }
            Err(RecvTimeoutError::Timeout) => {
                // Relaxed: the thread may notice with any later call.
                self.stopped.store(true, Ordering::Relaxed);
                Status::Failed(format!("the case exceeded its limit of {limit:?}"))
            }
            Err(RecvTimeoutError::Disconnected) => Status::Failed("the case panicked outside of itself".to_owned()),
        }
    }
}
