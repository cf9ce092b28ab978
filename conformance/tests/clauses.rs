//! Clauses and cases belong together: every clause that a case names stands in the documentation of the traits, and
//! every clause there has a case.

use std::collections::{BTreeMap, BTreeSet};

use highwater_conformance::cases;

const SOURCES: [&str; 4] = [
    include_str!("../../core/hal/src/backend.rs"),
    include_str!("../../core/hal/src/blas.rs"),
    include_str!("../../core/hal/src/host.rs"),
    include_str!("../../core/hal/src/ipc.rs"),
];

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
    assert!(documented.len() >= 80, "only {} clauses were found", documented.len());
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
fn every_clause_has_a_case() {
    let named: BTreeSet<&str> = cases().flat_map(|case| case.clauses.iter().copied()).collect();
    let without: BTreeSet<&str> = documented().into_keys().filter(|clause| !named.contains(clause)).collect();
    println!("{} cases name {} clauses", cases().count(), named.len());
    assert_eq!(without, BTreeSet::new(), "clauses without a case");
}

#[test]
fn there_are_enough_cases() {
    assert!(cases().count() >= 200, "{}", cases().count());
}
