use std::collections::BTreeSet;

use super::*;
use crate::case::Case;
use crate::cases::cases;

#[test]
fn names_are_unique_and_sentences_are_whole() {
    let mut names = BTreeSet::new();
    let mut sentences = BTreeSet::new();
    for saboteur in saboteurs() {
        assert!(names.insert(saboteur.name), "two saboteurs are called {}", saboteur.name);
        assert!(sentences.insert((saboteur.clause, saboteur.what)), "two saboteurs do this: {}", saboteur.what);
        assert!(saboteur.what.ends_with('.') && saboteur.what.starts_with(char::is_uppercase), "{}", saboteur.what);
        assert!(
            saboteur.name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-'),
            "{}",
            saboteur.name
        );
    }
    assert!(names.len() >= 110, "{}", names.len());
}

#[test]
fn clauses_of_saboteurs_have_cases() {
    let named: BTreeSet<&str> = cases().flat_map(|case: &Case| case.clauses.iter().copied()).collect();
    for saboteur in saboteurs() {
        assert!(named.contains(saboteur.clause), "{} breaks {}, which no case names", saboteur.name, saboteur.clause);
    }
}

#[test]
fn every_clause_has_a_saboteur() {
    let broken: BTreeSet<&str> = saboteurs().map(|saboteur| saboteur.clause).collect();
    let named: BTreeSet<&str> = cases().flat_map(|case: &Case| case.clauses.iter().copied()).collect();
    let without: Vec<_> = named.difference(&broken).collect();
    assert!(without.is_empty(), "clauses that no saboteur breaks: {without:?}");
}
