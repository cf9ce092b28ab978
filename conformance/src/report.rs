//! The report of a run: the status of each case, and the counts.

use std::fmt;
use std::time::Duration;

use highwater_hal::Identity;

use crate::case::Case;
use crate::cases::cases;
use crate::options::{Expectation, Options};

/// The result of a case.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Status {
    /// The backend kept the promise.
    Passed,
    /// The backend broke the promise. The text gives the observed and the expected behavior.
    Failed(String),
    /// The case proves nothing about this backend. The text says why.
    Skipped(String),
    /// The case failed, and [`Options::expected_failures`] lists it.
    ExpectedFailure {
        /// The reason of the known failure.
        reason: String,
        /// The observed behavior.
        failure: String,
    },
}

/// One case of a [`Report`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CaseReport {
    /// The case.
    pub case: &'static Case,
    /// The result.
    pub status: Status,
    /// The duration.
    pub duration: Duration,
    /// The round, counted from 0.
    pub round: u32,
}

/// The report of a run.
#[derive(Debug, Clone)]
pub struct Report {
    backend: Identity,
    cases: Vec<CaseReport>,
    unknown_expectations: Vec<Expectation>,
    seed: Option<u64>,
}

impl Report {
    pub(crate) fn new(backend: Identity, cases_run: Vec<CaseReport>, options: &Options, seed: Option<u64>) -> Self {
        let unknown = |expectation: &&Expectation| !cases().any(|case| case.name == expectation.case);
        let unknown_expectations = options.expected_failures.iter().filter(unknown).cloned().collect();
        Self { backend, cases: cases_run, unknown_expectations, seed }
    }

    /// Returns the identity of the tested backend.
    #[must_use]
    pub fn backend(&self) -> &Identity {
        &self.backend
    }

    /// Returns the seed from which the cases of the first round drew; that of each further round is 1 more. `None` if the
    /// environment variable is no number, which fails these cases.
    #[must_use]
    pub fn seed(&self) -> Option<u64> {
        self.seed
    }

    /// Returns every case that the filter selected, in the order of the run, once for each round.
    #[must_use]
    pub fn cases(&self) -> &[CaseReport] {
        &self.cases
    }

    /// Returns the number of cases that passed.
    #[must_use]
    pub fn passed(&self) -> usize {
        self.count(|status| matches!(status, Status::Passed))
    }

    /// Returns the number of cases that failed. A known failure that passed counts as failed.
    #[must_use]
    pub fn failed(&self) -> usize {
        self.count(|status| matches!(status, Status::Failed(_)))
    }

    /// Returns the number of cases that were skipped.
    #[must_use]
    pub fn skipped(&self) -> usize {
        self.count(|status| matches!(status, Status::Skipped(_)))
    }

    /// Returns the number of cases that failed as expected.
    #[must_use]
    pub fn expected_failures(&self) -> usize {
        self.count(|status| matches!(status, Status::ExpectedFailure { .. }))
    }

    /// Returns the skipped cases by reason, in the order of the run.
    #[must_use]
    pub fn skips(&self) -> Vec<(&str, Vec<&'static Case>)> {
        let mut skips: Vec<(&str, Vec<&'static Case>)> = Vec::new();
        for CaseReport { case, status, .. } in &self.cases {
            let Status::Skipped(reason) = status else { continue };
            let place = skips.iter().position(|(known, _)| known == reason).unwrap_or_else(|| {
                skips.push((reason, Vec::new()));
                skips.len() - 1
            });
            let listed = &mut skips[place].1;
            // Each round skips the case again.
            if !listed.iter().any(|other| other.name == case.name) {
                listed.push(case);
            }
        }
        skips
    }

    /// Returns the counts in words.
    #[must_use]
    pub fn counts(&self) -> String {
        let (passed, failed, skipped) = (self.passed(), self.failed(), self.skipped());
        let known = match self.expected_failures() {
            0 => String::new(),
            1 => ", 1 known failure".to_owned(),
            more => format!(", {more} known failures"),
        };
        format!("{passed} passed, {failed} failed, {skipped} skipped{known}")
    }

    /// Returns the known failures that name no case: the name is misspelled, or the case no longer exists.
    #[must_use]
    pub fn unknown_expectations(&self) -> &[Expectation] {
        &self.unknown_expectations
    }

    /// Returns whether no case failed, at least one case ran, and every known failure names a case.
    #[must_use]
    pub fn is_success(&self) -> bool {
        self.failed() == 0 && !self.cases.is_empty() && self.unknown_expectations.is_empty()
    }

    fn count(&self, which: impl Fn(&Status) -> bool) -> usize {
        self.cases.iter().filter(|case| which(&case.status)).count()
    }
}

/// Writes the counts, a line for each failure, and a line for each reason of skipped cases.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.backend.name, self.counts())?;
        for CaseReport { case, status, .. } in &self.cases {
            if let Status::Failed(message) = status {
                write!(f, "\n{} [{}]: {message}", case.name, case.clauses.join(", "))?;
            }
        }
        for Expectation { case, .. } in &self.unknown_expectations {
            write!(f, "\n{case} is listed as a known failure, but no case has this name")?;
        }
        for (reason, cases) in self.skips() {
            let names: Vec<&str> = cases.iter().map(|case| case.name).collect();
            write!(f, "\nskipped: {reason}: {}", names.join(", "))?;
        }
        Ok(())
    }
}

/// The progress of a run.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Progress<'a> {
    /// A case begins.
    Started {
        /// The case.
        case: &'static Case,
        /// The number of the case in this run, from 0.
        index: usize,
        /// The number of cases in the run.
        total: usize,
    },
    /// A case has ended.
    Finished {
        /// The result.
        report: &'a CaseReport,
        /// The number of the case in this run, from 0.
        index: usize,
        /// The number of cases in the run.
        total: usize,
    },
}
