//! The printed report of a run.

use anyhow::Result;
use highwater::hal::counted;
use highwater_conformance::{Case, CaseReport, Clause, Options, Report, Status, clauses, clauses_without_case};
use serde_json::{Value, json};

use super::super::output;
use super::super::table::Table;

/// A finished run.
pub(super) struct Run<'r> {
    pub(super) report: &'r Report,
    pub(super) options: &'r Options,
    pub(super) seconds: f64,
    /// The error of the last process when it freed everything.
    pub(super) end: Option<&'r str>,
}

impl Run<'_> {
    pub(super) fn is_success(&self) -> bool {
        self.report.is_success() && self.end.is_none()
    }

    /// Returns every case whose status has a text.
    fn listed(&self, text: impl Fn(&Status) -> Option<&str>) -> Vec<(&CaseReport, &str)> {
        self.report.cases().iter().filter_map(|case| Some((case, text(&case.status)?))).collect()
    }

    fn failures(&self) -> Vec<(&CaseReport, &str)> {
        self.listed(|status| match status {
            Status::Failed(message) => Some(message.as_str()),
            _ => None,
        })
    }

    pub(super) fn to_json(&self) -> Value {
        let list = |key: &str, listed: Vec<(&CaseReport, &str)>| -> Value {
            let entry = |(report, text): (&CaseReport, &str)| {
                let (case, clauses) = (report.case.name, report.case.clauses);
                json!({ "case": case, "clauses": clauses, "round": report.round, key: text })
            };
            listed.into_iter().map(entry).collect()
        };
        let skips = self.listed(|status| match status {
            Status::Skipped(reason) => Some(reason.as_str()),
            _ => None,
        });
        let expected = self.listed(|status| match status {
            Status::ExpectedFailure { reason, .. } => Some(reason.as_str()),
            _ => None,
        });
        let report = self.report;
        let without_case: Vec<&str> = clauses_without_case().into_iter().map(|clause| clause.id).collect();
        json!({
            "backend": report.backend().name,
            "cases": report.cases().len(),
            "passed": report.passed(),
            "failed": report.failed(),
            "skipped": report.skipped(),
            "expected_failures": report.expected_failures(),
            "rounds": self.options.rounds.max(1),
            "seed": self.options.shuffle,
            "drawn_from": report.seed(),
            "clauses": clauses().len(),
            "clauses_without_case": without_case,
            "seconds": self.seconds,
            "failures": list("message", self.failures()),
            "skips": list("reason", skips),
            "expected": list("reason", expected),
            "worker_end": self.end,
        })
    }

    pub(super) fn print(&self) -> Result<()> {
        let failures = self.failures();
        if !failures.is_empty() {
            let mut table = Table::with_header(["case", "expected", "came"]);
            for (report, message) in failures {
                table.add_row([report.case.name, &promised(report.case), message]);
            }
            // Promises are long, and a pipe has no width.
            output::result(table.at_most(120))?;
        }
        let report = self.report;
        let (name, total) = (&report.backend().name, report.cases().len());
        for (reason, cases) in report.skips() {
            let names: Vec<&str> = cases.iter().map(|case| case.name).collect();
            output::result(format_args!("skipped: {reason}: {}", names.join(", ")))?;
        }
        output::result(format_args!("{name}: {}: {}", counted(total, "case"), report.counts()))?;
        Ok(())
    }
}

/// Prints the cases that the options select, and the clauses that they prove.
pub(super) fn list(options: &Options, json: bool) -> Result<()> {
    let listed = options.round(0);
    let proved = |clause: &&Clause| listed.iter().any(|case| case.clauses.contains(&clause.id));
    let proved: Vec<&Clause> = clauses().iter().filter(proved).collect();
    if json {
        let case = |case: &&'static Case| json!({ "case": case.name, "clauses": case.clauses });
        let clause = |clause: &&Clause| {
            let Clause { id, of, method, promise, .. } = clause;
            json!({ "clause": id, "trait": of, "method": method, "promise": promise })
        };
        output::result(json!({
            "cases": listed.iter().map(case).collect::<Vec<_>>(),
            "clauses": proved.iter().map(clause).collect::<Vec<_>>(),
        }))?;
        return Ok(());
    }
    for case in &listed {
        output::result(format_args!("{} [{}]", case.name, case.clauses.join(", ")))?;
    }
    output::result("")?;
    for Clause { id, of, method, promise, .. } in &proved {
        let method = method.map_or(String::new(), |method| format!("::{method}"));
        output::result(format_args!("{id} ({of}{method}): {promise}"))?;
    }
    output::result(format_args!(
        "\n{} {} {}",
        counted(listed.len(), "case"),
        if listed.len() == 1 { "proves" } else { "prove" },
        counted(proved.len(), "clause")
    ))?;
    Ok(())
}

/// Returns the clauses of a case, each with its promise.
pub(super) fn promised(case: &Case) -> String {
    let promise = |id: &&str| match clauses().iter().find(|clause| clause.id == *id) {
        Some(clause) => format!("{id}: {}", clause.promise),
        None => (*id).to_owned(),
    };
    case.clauses.iter().map(promise).collect::<Vec<_>>().join("\n")
}
