//! The certificate of a full run: a file with the backend, its devices, and the proof of each clause.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::Result;
use highwater::ErrorKind;
use highwater::hal::display_foreign;
use highwater_conformance::{CaseReport, Clause, Options, Status, clauses};
use serde_json::{Value, json};

use super::super::date::date_of;
use super::super::failure::Failure;
use super::destination::Destination;
use super::protocol::About;
use super::report::Run;

/// The name and the version of the format.
const FORMAT: &str = "highwater-conformance-certificate/1";

/// A certificate that is written when the run has ended.
#[derive(Debug)]
pub(super) struct Certificate {
    path: PathBuf,
    destination: Destination,
}

impl Certificate {
    /// Checks that the run qualifies for a certificate, and that the file can be written.
    ///
    /// # Errors
    /// If the run covers only a part of the suite, or if the file can be neither made nor replaced nor written into.
    pub(super) fn begin(path: &Path, options: &Options) -> Result<Self> {
        if options.filter.is_some() {
            let hint = "leave out `--filter`: a certificate tells of every clause";
            let message = "a certificate is written of a full run only, and `--filter` selects a part";
            return Err(Failure::new(ErrorKind::InvalidArgument, message, hint).into());
        }
        let destination = Destination::of(path).map_err(|error| not_written(path, error))?;
        Ok(Self { path: path.to_owned(), destination })
    }

    /// Writes the certificate.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(super) fn finish(self, run: &Run<'_>, about: &About) -> Result<()> {
        let text = format!("{:#}\n", to_json(run, about, SystemTime::now()));
        self.destination.write(&text).map_err(|error| not_written(&self.path, error))
    }
}

fn not_written(path: &Path, error: std::io::Error) -> anyhow::Error {
    let message = format!("the certificate `{}` cannot be written", display_foreign(path));
    let hint = match error.kind() {
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
            "free space on this disk, or name a file on another one; the results are printed, and the run must be repeated for a \
             certificate"
        }
        _ => "name a file in an existing writable folder, a pipe, or a terminal",
    };
    Failure::new(ErrorKind::OperatingSystem, message, hint).because_of(error).into()
}

fn to_json(run: &Run<'_>, about: &About, now: SystemTime) -> Value {
    let report = run.report;
    let clauses: Vec<Value> = clauses().iter().map(|clause| clause_to_json(clause, report.cases())).collect();
    let expected = report.cases().iter().filter_map(|case| match &case.status {
        Status::ExpectedFailure { reason, failure } => {
            Some(json!({ "case": case.case.name, "round": case.round, "reason": reason, "failure": failure }))
        }
        _ => None,
    });
    json!({
        "format": FORMAT,
        "suite": { "name": "highwater-conformance", "version": env!("CARGO_PKG_VERSION") },
        "date": date_of(now),
        "backend": about.to_json(),
        "system": { "os": std::env::consts::OS, "architecture": std::env::consts::ARCH },
        "conforms": run.is_success(),
        "rounds": run.options.rounds.max(1),
        "seed": run.options.shuffle,
        "drawn_from": report.seed(),
        "seconds": run.seconds,
        "cases": report.cases().len(),
        "passed": report.passed(),
        "failed": report.failed(),
        "skipped": report.skipped(),
        "cells": about.cells,
        "clauses": clauses,
        "expected_failures": expected.collect::<Vec<_>>(),
        "worker_end": run.end,
    })
}

/// A clause with its cases and their results, in every round.
fn clause_to_json(clause: &Clause, reports: &[CaseReport]) -> Value {
    let of_clause = || reports.iter().filter(|report| report.case.clauses.contains(&clause.id));
    let cases = of_clause().map(|report| {
        let (outcome, text) = match &report.status {
            Status::Passed => ("passed", None),
            Status::Failed(message) => ("failed", Some(message)),
            Status::Skipped(reason) => ("skipped", Some(reason)),
            Status::ExpectedFailure { reason, .. } => ("failed as expected", Some(reason)),
            _ => ("unknown", None),
        };
        json!({ "case": report.case.name, "round": report.round, "outcome": outcome, "text": text })
    });
    let any = |which: fn(&Status) -> bool| of_clause().any(|report| which(&report.status));
    let failed = any(|status| matches!(status, Status::Failed(_)));
    let failed_as_expected = any(|status| matches!(status, Status::ExpectedFailure { .. }));
    let passed = any(|status| matches!(status, Status::Passed));
    let outcome = match (failed, failed_as_expected, passed) {
        (true, ..) => "failed",
        (false, true, _) => "failed as expected",
        (false, false, true) => "proved",
        (false, false, false) => "not applicable",
    };
    json!({
        "clause": clause.id,
        "trait": clause.of,
        "promise": clause.promise,
        "outcome": outcome,
        "cases": cases.collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_the_suite_has_no_certificate_and_a_folder_is_none() {
        let folder = std::env::temp_dir();
        let error = Certificate::begin(&folder.join("none.json"), &Options::new().with_filter("ids.")).unwrap_err();
        assert!(error.to_string().contains("`--filter`"), "{error}");
        let error = Certificate::begin(&folder, &Options::new()).unwrap_err();
        assert!(error.to_string().contains("cannot be written"), "{error}");
        let error = Certificate::begin(Path::new("/nowhere/at/all.json"), &Options::new()).unwrap_err();
        assert!(error.to_string().contains("/nowhere/at/all.json"), "{error}");
    }
}
