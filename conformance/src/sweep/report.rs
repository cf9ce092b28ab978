//! The result of a sweep.

use std::fmt;
use std::time::Duration;

use highwater_hal::Identity;

use super::gate::{Calls, Fault};
use crate::case::Case;
use crate::report::Status;

/// The calls of a case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Points {
    /// The case passed, and made these fallible calls.
    Calls(Vec<Calls>),
    /// The case did not pass, so the sweep skips it.
    Not(Status),
}

/// The result of a case with one call refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Faulted {
    /// The result of the case. A failure is expected here.
    pub status: Status,
    /// Whether the case reached the call.
    pub reached: bool,
    /// The number of releases that the fault refused and that were repeated.
    pub retried: u64,
    /// The violations, whatever the result of the case: leaks, wrong counts, a crash.
    pub findings: Vec<String>,
}

impl Faulted {
    /// Creates the result of a case that did not run.
    pub(crate) fn outside(status: Status) -> Self {
        Self { status, reached: false, retried: 0, findings: Vec::new() }
    }
}

/// A violation that a sweep found.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SweepFailure {
    /// The case.
    pub case: &'static Case,
    /// The refused call; `None` if the case failed without a fault.
    pub fault: Option<Fault>,
    /// The violation.
    pub message: String,
}

/// The progress of a sweep: one case is done.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct SweepProgress<'a> {
    /// The case.
    pub case: &'static Case,
    /// The number of cases in the sweep.
    pub total: usize,
    /// The number of refused calls of this case.
    pub calls_swept: u64,
    /// The violations of this case.
    pub failures: &'a [SweepFailure],
}

/// The result of a sweep.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SweepReport {
    /// The identity of the tested backend.
    pub backend: Identity,
    /// One of this many calls was refused; 1 means each.
    pub sample: u32,
    /// The number of swept cases.
    pub cases: u64,
    /// The number of cases that prove nothing about this backend.
    pub skipped: u64,
    /// The number of fallible calls of the cases.
    pub calls: u64,
    /// The number of refused calls.
    pub calls_swept: u64,
    /// The number of calls that were never reached when they were to be refused.
    pub not_reached: u64,
    /// The number of releases that a fault refused and that were repeated.
    pub retried: u64,
    /// The violations.
    pub failures: Vec<SweepFailure>,
    /// The duration.
    pub duration: Duration,
}

impl SweepReport {
    pub(super) fn new(backend: Identity, sample: u32) -> Self {
        Self {
            backend,
            sample,
            cases: 0,
            skipped: 0,
            calls: 0,
            calls_swept: 0,
            not_reached: 0,
            retried: 0,
            failures: Vec::new(),
            duration: Duration::ZERO,
        }
    }

    /// Returns whether calls were refused and no violation was found.
    #[must_use]
    pub fn is_success(&self) -> bool {
        self.failures.is_empty() && self.calls_swept > 0
    }

    /// Adds the result of another part of the same sweep.
    pub(super) fn add(&mut self, part: Self) {
        self.cases += part.cases;
        self.skipped += part.skipped;
        self.calls += part.calls;
        self.calls_swept += part.calls_swept;
        self.not_reached += part.not_reached;
        self.retried += part.retried;
        self.failures.extend(part.failures);
    }

    pub(super) fn fails(&mut self, case: &'static Case, fault: Option<Fault>, message: String) {
        self.failures.push(SweepFailure { case, fault, message });
    }
}

/// Writes the counts, then a line for each violation.
impl fmt::Display for SweepReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { backend, cases, calls, calls_swept, failures, .. } = self;
        write!(
            f,
            "{}: {calls_swept} of {calls} calls of {cases} cases refused, {} failures",
            backend.name,
            failures.len()
        )?;
        for SweepFailure { case, fault, message } in failures {
            match fault {
                Some(fault) => write!(f, "\n{}, {fault}: {message}", case.name)?,
                None => write!(f, "\n{}: {message}", case.name)?,
            }
        }
        Ok(())
    }
}
