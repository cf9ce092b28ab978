//! Cases name only clauses of the traits, and every clause has a case. The build of `highwater-hal` refuses a clause that is
//! documented twice.

use highwater_conformance::{cases, clauses, clauses_without_case};

#[test]
fn cases_name_only_clauses_of_the_traits() {
    let named = cases().flat_map(|case| case.clauses.iter().map(move |clause| (case.name, *clause)));
    let unknown: Vec<_> = named.filter(|(_, named)| !clauses().iter().any(|clause| clause.id == *named)).collect();
    assert!(unknown.is_empty(), "no trait has these clauses: {unknown:?}");
}

#[test]
fn every_clause_has_a_case() {
    let without = clauses_without_case();
    assert!(without.is_empty(), "clauses without a case: {without:?}");
    assert!(clauses().len() >= 80, "only {} clauses", clauses().len());
    assert!(cases().count() >= 200, "only {} cases", cases().count());
}
