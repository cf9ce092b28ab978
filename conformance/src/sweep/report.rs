//! What a sweep came to.

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
    /// The case did not pass, so there is nothing to sweep.
    Not(Status),
}

/// A case of which one call was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Faulted {
    /// How it ended; a failure is no fault of the case.
    pub status: Status,
    /// Whether the case came to the call.
    pub reached: bool,
    /// Releases that the fault refused and that were made again.
    pub retried: u64,
    /// What must not be, however the case ended: leaks, counts that do not agree, a crash.
    pub findings: Vec<String>,
}

impl Faulted {
    /// A case that did not run.
    pub(crate) fn outside(status: Status) -> Self {
        Self { status, reached: false, retried: 0, findings: Vec::new() }
    }
}

/// Something that a sweep found.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SweepFailure {
    /// The case.
    pub case: &'static Case,
    /// The call that was refused; `None` where the case failed without a fault.
    pub fault: Option<Fault>,
    /// What was wrong.
    pub message: String,
}

/// How far a sweep is: a case has been swept.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct SweepProgress<'a> {
    /// Which case.
    pub case: &'static Case,
    /// How many cases the sweep has.
    pub total: usize,
    /// Calls of this case that were refused.
    pub calls_swept: u64,
    /// What was found in this case.
    pub failures: &'a [SweepFailure],
}

/// What a sweep came to.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SweepReport {
    /// Who was tested.
    pub backend: Identity,
    /// Of so many calls one was refused; 1 is each.
    pub sample: u32,
    /// Cases that were swept.
    pub cases: u64,
    /// Cases that say nothing about this backend.
    pub skipped: u64,
    /// Fallible calls that the cases make.
    pub calls: u64,
    /// Calls that were refused.
    pub calls_swept: u64,
    /// Calls that the case did not come to when they were to be refused.
    pub not_reached: u64,
    /// Releases that a fault refused and that were made again.
    pub retried: u64,
    /// What was found.
    pub failures: Vec<SweepFailure>,
    /// How long it took.
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

    /// Whether calls were refused and nothing was found.
    #[must_use]
    pub fn is_success(&self) -> bool {
        self.failures.is_empty() && self.calls_swept > 0
    }

    /// Takes in what another part of the same sweep came to.
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

/// The counts, then a line for each failure.
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
