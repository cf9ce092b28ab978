//! What a run came to: how each case ended, and the counts.

use std::fmt;
use std::time::Duration;

use highwater_hal::Identity;

use crate::case::Case;
use crate::cases::cases;
use crate::options::{Expectation, Options};

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
    /// In which round it ran, from 0.
    pub round: u32,
}

/// What a run came to.
#[derive(Debug, Clone)]
pub struct Report {
    backend: Identity,
    cases: Vec<CaseReport>,
    unknown_expectations: Vec<Expectation>,
}

impl Report {
    pub(crate) fn new(backend: Identity, cases_run: Vec<CaseReport>, options: &Options) -> Self {
        let unknown = |expectation: &&Expectation| !cases().any(|case| case.name == expectation.case);
        let unknown_expectations = options.expected_failures.iter().filter(unknown).cloned().collect();
        Self { backend, cases: cases_run, unknown_expectations }
    }

    /// Who was tested.
    #[must_use]
    pub fn backend(&self) -> &Identity {
        &self.backend
    }

    /// Every case that the filter selected, in the order of the run; once for each round.
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

    /// The skipped cases by reason, in the order of the run.
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
            // A run of several rounds skips a case in each.
            if !listed.iter().any(|other| other.name == case.name) {
                listed.push(case);
            }
        }
        skips
    }

    /// The counts, in words.
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

/// The counts, then a line for each failure, and one for each reason to skip cases.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.backend.name, self.counts())?;
        for CaseReport { case, status, .. } in &self.cases {
            if let Status::Failed(message) = status {
                write!(f, "\n{} [{}]: {message}", case.name, case.clauses.join(", "))?;
            }
        }
        for Expectation { case, .. } in &self.unknown_expectations {
            write!(f, "\n{case} is expected to fail, but there is no such case")?;
        }
        for (reason, cases) in self.skips() {
            let names: Vec<&str> = cases.iter().map(|case| case.name).collect();
            write!(f, "\nskipped: {reason}: {}", names.join(", "))?;
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
