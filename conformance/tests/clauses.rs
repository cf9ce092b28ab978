//! Clauses and cases belong together: every clause that a case names stands in the documentation of the traits, and
//! every clause there has a case, or stands below with the reason why not.

use std::collections::{BTreeMap, BTreeSet};

use highwater_conformance::cases;

const SOURCES: [&str; 4] = [
    include_str!("../../core/src/backend.rs"),
    include_str!("../../core/src/blas.rs"),
    include_str!("../../core/src/host.rs"),
    include_str!("../../core/src/ipc.rs"),
];

/// Clauses that no case names yet.
const WITHOUT_A_CASE: [(&str, &str); 8] = [
    ("capture.not-executed", CAPTURE),
    ("capture.lost", CAPTURE),
    ("capture.replay", CAPTURE),
    ("ipc.shared-bytes", SHARING),
    ("ipc.export-shareable", SHARING),
    ("ipc.export-transport", SHARING),
    ("ipc.open-again", SHARING),
    ("ipc.close-unknown", SHARING),
];

const CAPTURE: &str = "no backend captures yet; the cases come with the first that does";
const SHARING: &str = "no backend shares memory yet; the cases need a second process";

/// Ids of clauses: documentation lines of the form "- `group.name`:".
fn documented() -> BTreeMap<&'static str, usize> {
    let mut ids = BTreeMap::new();
    for line in SOURCES.iter().flat_map(|source| source.lines()) {
        let Some(rest) = line.trim_start().strip_prefix("///").or_else(|| line.trim_start().strip_prefix("//!")) else {
            continue;
        };
        let Some((id, _)) = rest.trim_start().strip_prefix("- `").and_then(|rest| rest.split_once("`:")) else {
            continue;
        };
        if id.split_once('.').is_some_and(|(group, name)| !group.is_empty() && !name.is_empty()) {
            *ids.entry(id).or_insert(0) += 1;
        }
    }
    ids
}

#[test]
fn every_clause_is_documented_once() {
    let documented = documented();
    assert!(documented.len() >= 60, "only {} clauses were found", documented.len());
    let twice: Vec<_> = documented.iter().filter(|(_, count)| **count > 1).collect();
    assert!(twice.is_empty(), "documented more than once: {twice:?}");
}

#[test]
fn cases_name_only_clauses_that_are_documented() {
    let documented = documented();
    let unknown: Vec<_> = cases()
        .flat_map(|case| case.clauses.iter().map(move |clause| (case.name, *clause)))
        .filter(|(_, clause)| !documented.contains_key(clause))
        .collect();
    assert!(unknown.is_empty(), "no trait documents these: {unknown:?}");
}

#[test]
fn every_clause_has_a_case_or_a_reason() {
    let named: BTreeSet<&str> = cases().flat_map(|case| case.clauses.iter().copied()).collect();
    let without: BTreeSet<&str> = documented().into_keys().filter(|clause| !named.contains(clause)).collect();
    let written: BTreeSet<&str> = WITHOUT_A_CASE.iter().map(|(clause, _)| *clause).collect();
    println!("{} cases name {} clauses; without a case:", cases().count(), named.len());
    for (clause, reason) in WITHOUT_A_CASE {
        println!("  {clause}: {reason}");
    }
    assert_eq!(without, written, "clauses without a case, found and written down");
}

#[test]
fn there_are_enough_cases() {
    assert!(cases().count() >= 50, "{}", cases().count());
}
