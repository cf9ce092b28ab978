//! The runner: runs cases on a backend, one after the other, and reports.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use highwater_core::{Backend, Identity};

use crate::case::{Case, CaseResult, Run};
use crate::cases::cases;
use crate::peer::Launcher;

/// Which cases to run, and which are known to fail.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Options {
    /// Runs the cases whose name contains this text, or that prove the clause of this id; `None` runs all.
    pub filter: Option<String>,
    /// Cases that are known to fail on this backend. One that passes nevertheless counts as failed, so that the list
    /// does not grow old.
    pub expected_failures: Vec<Expectation>,
    /// How a second process with the same backend is started; without one, the cases that need it are skipped.
    pub launcher: Option<Launcher>,
}

impl Options {
    /// Every case, none expected to fail, without a second process.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The same with a filter: a part of a case's name, or the id of a clause.
    #[must_use]
    pub fn with_filter(mut self, filter: impl Into<String>) -> Self {
        self.filter = Some(filter.into());
        self
    }

    /// The same with one more case that is known to fail.
    #[must_use]
    pub fn with_expected_failure(mut self, case: impl Into<String>, reason: impl Into<String>) -> Self {
        self.expected_failures.push(Expectation { case: case.into(), reason: reason.into() });
        self
    }

    /// The same with a launcher of second processes.
    #[must_use]
    pub fn with_launcher(mut self, launcher: Launcher) -> Self {
        self.launcher = Some(launcher);
        self
    }

    fn selects(&self, case: &Case) -> bool {
        self.filter.as_deref().is_none_or(|text| case.name.contains(text) || case.clauses.contains(&text))
    }

    fn expectation(&self, case: &Case) -> Option<&Expectation> {
        self.expected_failures.iter().find(|expectation| expectation.case == case.name)
    }
}

/// A case that is known to fail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expectation {
    /// Its name, in full.
    pub case: String,
    /// Why it fails.
    pub reason: String,
}

/// How a case ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Status {
    /// The backend kept the promise.
    Passed,
    /// It did not; the text says what was seen and what was expected.
    Failed(String),
    /// The case says nothing about this backend; the text says why.
    Skipped(String),
    /// It failed, as [`Options::expected_failures`] says.
    ExpectedFailure {
        /// Why it was expected.
        reason: String,
        /// What was seen.
        failure: String,
    },
}

/// One case of a [`Report`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CaseReport {
    /// Which case.
    pub case: &'static Case,
    /// How it ended.
    pub status: Status,
    /// How long it took.
    pub duration: Duration,
}

/// What a run came to.
#[derive(Debug, Clone)]
pub struct Report {
    backend: Identity,
    cases: Vec<CaseReport>,
    unknown_expectations: Vec<Expectation>,
}

impl Report {
    /// Who was tested.
    #[must_use]
    pub fn backend(&self) -> &Identity {
        &self.backend
    }

    /// Every case that the filter selected, in the order of the run.
    #[must_use]
    pub fn cases(&self) -> &[CaseReport] {
        &self.cases
    }

    /// How many cases passed.
    #[must_use]
    pub fn passed(&self) -> usize {
        self.count(|status| matches!(status, Status::Passed))
    }

    /// How many cases failed, those included that passed though they were expected to fail.
    #[must_use]
    pub fn failed(&self) -> usize {
        self.count(|status| matches!(status, Status::Failed(_)))
    }

    /// How many cases were skipped.
    #[must_use]
    pub fn skipped(&self) -> usize {
        self.count(|status| matches!(status, Status::Skipped(_)))
    }

    /// How many cases failed as expected.
    #[must_use]
    pub fn expected_failures(&self) -> usize {
        self.count(|status| matches!(status, Status::ExpectedFailure { .. }))
    }

    /// Expected failures that name no case: misspelt, or the case has gone.
    #[must_use]
    pub fn unknown_expectations(&self) -> &[Expectation] {
        &self.unknown_expectations
    }

    /// Whether no case failed, some case ran, and every expectation names a case.
    #[must_use]
    pub fn is_success(&self) -> bool {
        self.failed() == 0 && !self.cases.is_empty() && self.unknown_expectations.is_empty()
    }

    fn count(&self, which: impl Fn(&Status) -> bool) -> usize {
        self.cases.iter().filter(|case| which(&case.status)).count()
    }
}

/// The counts, then a line for each failure.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {} passed, {} failed, {} skipped, {} failed as expected",
            self.backend.name,
            self.passed(),
            self.failed(),
            self.skipped(),
            self.expected_failures()
        )?;
        for CaseReport { case, status, .. } in &self.cases {
            if let Status::Failed(message) = status {
                write!(f, "\n{} [{}]: {message}", case.name, case.clauses.join(", "))?;
            }
        }
        for Expectation { case, .. } in &self.unknown_expectations {
            write!(f, "\n{case} is expected to fail, but there is no such case")?;
        }
        Ok(())
    }
}

/// Tells an observer how far a run is.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Progress<'a> {
    /// A case begins.
    Started {
        /// Which case.
        case: &'static Case,
        /// Its number in this run, from 0.
        index: usize,
        /// How many cases the run has.
        total: usize,
    },
    /// A case has ended.
    Finished {
        /// How.
        report: &'a CaseReport,
        /// Its number in this run, from 0.
        index: usize,
        /// How many cases the run has.
        total: usize,
    },
}

/// Runs the cases that `options` selects, one after the other.
///
/// Nobody else may use the backend meanwhile: each case must leave `live_objects()` as it found it. A panic inside a
/// case is a failure of that case. A backend that hangs makes the run hang; run it in a process of its own, and see
/// [`run_observed`] for the name of the case.
#[must_use]
pub fn run(backend: &dyn Backend, options: &Options) -> Report {
    run_observed(backend, options, &mut |_| {})
}

/// As [`run`], telling `observer` when a case begins and when it has ended.
#[must_use]
pub fn run_observed(backend: &dyn Backend, options: &Options, observer: &mut dyn FnMut(Progress<'_>)) -> Report {
    let selected: Vec<&'static Case> = cases().filter(|case| options.selects(case)).collect();
    let total = selected.len();
    let mut reports = Vec::with_capacity(total);
    for (index, case) in selected.into_iter().enumerate() {
        observer(Progress::Started { case, index, total });
        let started = Instant::now();
        let status = expected(run_case(backend, case, options.launcher.as_ref()), options.expectation(case));
        let report = CaseReport { case, status, duration: started.elapsed() };
        observer(Progress::Finished { report: &report, index, total });
        reports.push(report);
    }
    let known = |expectation: &&Expectation| !cases().any(|case| case.name == expectation.case);
    let unknown_expectations = options.expected_failures.iter().filter(known).cloned().collect();
    Report { backend: backend.identity().clone(), cases: reports, unknown_expectations }
}

fn expected(status: Status, expectation: Option<&Expectation>) -> Status {
    match (status, expectation) {
        (Status::Failed(failure), Some(Expectation { reason, .. })) => {
            Status::ExpectedFailure { reason: reason.clone(), failure }
        }
        (Status::Passed, Some(Expectation { reason, .. })) => {
            Status::Failed(format!("passes, though it was expected to fail ({reason}); strike it from the list"))
        }
        (status, _) => status,
    }
}

/// Why cases about two processes are skipped where the suite was given no launcher.
const NO_LAUNCHER: &str = "no launcher for a second process was given";

fn run_case(backend: &dyn Backend, case: &Case, launcher: Option<&Launcher>) -> Status {
    let body = || {
        let capabilities = match backend.capabilities(0) {
            Ok(capabilities) => capabilities,
            Err(error) => return Status::Failed(format!("the capabilities of device 0 cannot be read: {error}")),
        };
        if let Some(reason) = case.unmet(&capabilities, backend.device_count()) {
            return Status::Skipped(reason);
        }
        let case = match (case.run, launcher) {
            (Run::Alone(case), _) => Box::new(move || case(backend)) as Box<dyn Fn() -> CaseResult>,
            (Run::WithPeer(case), Some(launcher)) => Box::new(move || case(backend, launcher)),
            (Run::WithPeer(_), None) => return Status::Skipped(NO_LAUNCHER.to_owned()),
        };
        let before = backend.live_objects();
        let status = match catch_unwind(AssertUnwindSafe(case)) {
            Ok(Ok(())) => Status::Passed,
            Ok(Err(failure)) => Status::Failed(failure.to_string()),
            Err(payload) => Status::Failed(panic_message(&*payload)),
        };
        let after = backend.live_objects();
        match status {
            // A case that failed may have left something behind for that very reason.
            Status::Passed if before != after => {
                Status::Failed(format!("live objects differ after the case: {before:?} before, {after:?} after"))
            }
            status => status,
        }
    };
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| Status::Failed(panic_message(&*payload)))
}

fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    format!("panicked: {}", text.unwrap_or("with a payload that is no text"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expectation() -> Expectation {
        Expectation { case: "a.b".to_owned(), reason: "known".to_owned() }
    }

    #[test]
    fn an_expected_failure_that_passes_is_a_failure() {
        let known = expectation();
        let failed = Status::Failed("seen".to_owned());
        assert!(matches!(expected(Status::Passed, Some(&known)), Status::Failed(_)));
        assert!(matches!(expected(failed.clone(), Some(&known)), Status::ExpectedFailure { .. }));
        assert_eq!(expected(failed.clone(), None), failed);
        let skipped = Status::Skipped("why".to_owned());
        assert_eq!(expected(skipped.clone(), Some(&known)), skipped);
    }

    #[test]
    fn a_filter_is_a_part_of_the_name_or_a_whole_clause() {
        let case = cases().find(|case| case.name == "streams.runs_in_order").unwrap();
        assert!(Options::new().selects(case));
        assert!(Options::new().with_filter("in_order").selects(case));
        assert!(Options::new().with_filter("stream.order").selects(case));
        assert!(!Options::new().with_filter("stream.ord").selects(case));
    }

    #[test]
    fn names_are_unique_and_begin_with_their_group() {
        let mut names: Vec<&str> = cases().map(|case| case.name).collect();
        for case in cases() {
            assert!(case.name.starts_with(&format!("{}.", case.group)), "{}", case.name);
            assert!(!case.clauses.is_empty(), "{}", case.name);
        }
        let total = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), total);
    }
}
