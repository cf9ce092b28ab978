//! `highwater conformance`: the suite of promises against one backend. Cases about two processes start the program again,
//! with the same backend.

use std::ffi::{OsStr, OsString};
use std::time::Instant;

use anyhow::Result;
use comfy_table::{ContentArrangement, Table, presets};
use highwater::ErrorKind;
use highwater_conformance::{
    CaseReport, Launcher, Options, Progress as Step, Report, Status, cases, run_observed, serve_peer,
};
use serde_json::{Value, json};

use super::args::ConformanceArguments;
use super::backends::Prober;
use super::failure::Failure;
use super::progress::Progress;
use super::{Verdict, backends, output};

/// Columns of the table of failures.
const WIDTH: u16 = 110;

pub(super) fn command(arguments: &ConformanceArguments, json: bool) -> Result<Verdict> {
    // Of two processes the other one has probed the plugin.
    let open = |prober| match &arguments.plugin {
        Some(file) => backends::open_file(file, prober),
        None => backends::open_by(&arguments.backend, prober),
    };
    if let Some(served) = serve_peer(|| Ok(open(Prober::Nobody)?.backend)) {
        served?;
        return Ok(Verdict::Good);
    }
    let backend = open(Prober::ThisProgram).map_err(highwater::Error::from)?.backend;
    let mut options = Options::new().with_launcher(launcher(arguments)?);
    if let Some(filter) = &arguments.filter {
        options = options.with_filter(filter);
    }
    let started = Instant::now();
    let mut progress = None;
    let report = run_observed(&*backend, &options, &mut |step| match step {
        Step::Started { case, total, .. } => {
            progress.get_or_insert_with(|| Progress::new("cases", total as u64, json)).now(case.name);
        }
        Step::Finished { report, .. } => {
            let Some(progress) = &progress else { return };
            if let Status::Failed(message) = &report.status {
                progress.say(&format!("failed: {}: {message}", report.case.name));
            }
            progress.advance(1);
        }
        _ => {}
    });
    drop(progress);
    if report.cases().is_empty() {
        let filter = arguments.filter.as_deref().unwrap_or_default();
        let hint = format!("name a part of a case, such as `{}`", cases().next().map_or("", |case| case.group));
        return Err(Failure::new(ErrorKind::InvalidArgument, format!("no case matches `{filter}`"), hint).into());
    }
    if json {
        output::result(to_json(&report, started.elapsed().as_secs_f64()))?;
    } else {
        print(&report)?;
    }
    Ok(if report.is_success() { Verdict::Good } else { Verdict::Bad })
}

/// Starts this program again, for a case.
fn launcher(arguments: &ConformanceArguments) -> Result<Launcher> {
    let executable = Launcher::current_executable().map_err(|error| {
        let hint = "check that `/proc` is mounted";
        let kind = ErrorKind::OperatingSystem;
        Failure::new(kind, "the system does not say where this program is", hint).because_of(error)
    })?;
    let of = |option: &str, value: &OsStr| [OsString::from("conformance"), option.into(), value.to_owned()];
    let what = match &arguments.plugin {
        Some(file) => of("--plugin", file.as_os_str()),
        None => of("--backend", arguments.backend.as_ref()),
    };
    Ok(executable
        .with_arguments(what.into_iter().chain(backends::arguments_of_children().into_iter().map(OsString::from))))
}

/// Case, clauses and text of every case whose status gives a text.
fn listed<'r>(report: &'r Report, text: impl Fn(&'r Status) -> Option<&'r str>) -> Vec<(&'r CaseReport, &'r str)> {
    report.cases().iter().filter_map(|case| Some((case, text(&case.status)?))).collect()
}

fn failures(report: &Report) -> Vec<(&CaseReport, &str)> {
    listed(report, |status| match status {
        Status::Failed(message) => Some(message.as_str()),
        _ => None,
    })
}

fn to_json(report: &Report, seconds: f64) -> Value {
    let list = |key: &str, listed: Vec<(&CaseReport, &str)>| -> Value {
        let entry = |(report, text): (&CaseReport, &str)| json!({ "case": report.case.name, "clauses": report.case.clauses, key: text });
        listed.into_iter().map(entry).collect()
    };
    let skips = listed(report, |status| match status {
        Status::Skipped(reason) => Some(reason.as_str()),
        _ => None,
    });
    let expected = listed(report, |status| match status {
        Status::ExpectedFailure { reason, .. } => Some(reason.as_str()),
        _ => None,
    });
    json!({
        "backend": report.backend().name,
        "cases": report.cases().len(),
        "passed": report.passed(),
        "failed": report.failed(),
        "skipped": report.skipped(),
        "expected_failures": report.expected_failures(),
        "seconds": seconds,
        "failures": list("message", failures(report)),
        "skips": list("reason", skips),
        "expected": list("reason", expected),
    })
}

fn print(report: &Report) -> Result<()> {
    let failures = failures(report);
    if !failures.is_empty() {
        let mut table = Table::new();
        table.load_style(presets::UTF8_FULL);
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(WIDTH);
        table.set_header(["case", "clauses", "seen"]);
        for (report, message) in failures {
            table.add_row([report.case.name, &report.case.clauses.join("\n"), message]);
        }
        output::result(table)?;
    }
    let (name, total) = (&report.backend().name, report.cases().len());
    output::result(format_args!(
        "{name}: {total} cases: {} passed, {} failed, {} skipped, {} failed as expected",
        report.passed(),
        report.failed(),
        report.skipped(),
        report.expected_failures()
    ))?;
    Ok(())
}
