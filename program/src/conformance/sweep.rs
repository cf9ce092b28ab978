//! `highwater conformance --fault-sweep`: each fallible call of each case is refused once.

use std::num::NonZero;
use std::thread::available_parallelism;
use std::time::Duration;

use anyhow::Result;
use highwater::hal::counted;
use highwater_conformance::{Fault, Options, SweepFailure, SweepReport, sweep_on};
use serde_json::{Value, json};

use super::super::args::ConformanceArguments;
use super::super::progress::Progress;
use super::super::table::Table;
use super::super::{Verdict, output};
use super::choice::Choice;
use super::workers::Workers;

/// The limit on jobs. Each has one process with the backend, and sometimes a second one.
const MOST_JOBS: usize = 16;

pub(super) fn command(
    arguments: &ConformanceArguments,
    choice: &Choice,
    options: &Options,
    json: bool,
) -> Result<Verdict> {
    let limit = Duration::from_secs(arguments.limit);
    let jobs = match arguments.jobs {
        Some(jobs) => jobs,
        // Cases that exhaust a device's memory would disturb each other.
        None if Workers::start(choice, limit)?.about().real_device => 1,
        None => available_parallelism().map_or(1, NonZero::get).min(MOST_JOBS),
    };
    let progress = Progress::new("cases", options.round(0).len() as u64, json);
    let report = sweep_on(jobs, &|| Workers::start(choice, limit), options, arguments.sample, &|step| {
        progress.now(step.case.name);
        for SweepFailure { case, fault, message, .. } in step.failures {
            let (name, clauses) = (case.name, case.clauses.join(", "));
            progress.say(&format!("failed: {name} [{clauses}], {}: {message}", refused(fault.as_ref())));
        }
        progress.advance(1);
    });
    drop(progress);
    let report = report?;
    if json {
        output::object(&to_json(&report))?;
    } else {
        print(&report)?;
    }
    Ok(if report.is_success() { Verdict::Good } else { Verdict::Bad })
}

fn refused(fault: Option<&Fault>) -> String {
    fault.map_or_else(|| "no call".to_owned(), Fault::to_string)
}

fn to_json(report: &SweepReport) -> Value {
    let failure = |failure: &SweepFailure| {
        let fault = failure.fault.as_ref().map(
            |Fault { thread, operation, index }| json!({ "thread": thread, "operation": operation, "index": index }),
        );
        let (case, clauses) = (failure.case.name, failure.case.clauses);
        json!({ "case": case, "clauses": clauses, "fault": fault, "message": failure.message })
    };
    json!({
        "backend": report.backend.name,
        "cases": report.cases,
        "skipped": report.skipped,
        "sample": report.sample,
        "calls": report.calls,
        "calls_swept": report.calls_swept,
        "not_reached": report.not_reached,
        "releases_retried": report.retried,
        "seconds": report.duration.as_secs_f64(),
        "failures": report.failures.iter().map(failure).collect::<Vec<_>>(),
    })
}

fn print(report: &SweepReport) -> Result<()> {
    if !report.failures.is_empty() {
        let mut table = Table::with_header(["case", "refused", "came"]);
        for SweepFailure { case, fault, message, .. } in &report.failures {
            table.add_row([case.name, &refused(fault.as_ref()), message]);
        }
        output::result(table)?;
    }
    let SweepReport { backend, cases, calls, calls_swept, not_reached, retried, failures, .. } = report;
    let (name, found) = (&backend.name, failures.len());
    output::result(format_args!(
        "{name}: {calls_swept} of {} of {} were refused ({not_reached} were not reached), {} {} made again, {}",
        counted(*calls, "call"),
        counted(*cases, "case"),
        counted(*retried, "release"),
        if *retried == 1 { "was" } else { "were" },
        counted(found, "failure")
    ))?;
    Ok(())
}
