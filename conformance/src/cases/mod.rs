//! The cases, one file for each part of the traits.

mod aftermath;
mod arithmetic;
mod blas;
mod capture;
mod cells;
mod concurrency;
mod copies;
mod events;
mod fills;
mod foreign;
mod fork;
mod gemm;
mod handles;
mod host;
mod identity;
mod ids;
mod in_use;
mod kinds;
mod lacking;
mod limits;
mod mapped;
mod memory;
mod pairs;
mod plans;
mod products;
mod refusals;
mod registrations;
mod rows;
mod sharing;
mod sizes;
mod stability;
mod streams;
mod transfers;

use highwater_hal::{Clause, clauses};

use crate::case::Case;

pub use cells::{CellAxis, CellTable, cell_tables};
pub(crate) use ids::forge;

/// The groups in the order of a run. A group comes after the groups that it depends on.
const GROUPS: &[&[Case]] = &[
    identity::CASES,
    ids::CASES,
    stability::CASES,
    refusals::CASES,
    memory::CASES,
    host::CASES,
    sizes::CASES,
    registrations::CASES,
    fills::CASES,
    copies::CASES,
    rows::CASES,
    streams::CASES,
    events::CASES,
    gemm::CASES,
    arithmetic::CASES,
    blas::CASES,
    plans::CASES,
    products::CASES,
    limits::CASES,
    mapped::CASES,
    foreign::CASES,
    capture::CASES,
    cells::CASES,
    transfers::CASES,
    kinds::CASES,
    pairs::CASES,
    sharing::CASES,
    handles::CASES,
    aftermath::CASES,
    concurrency::CASES,
    in_use::CASES,
    lacking::CASES,
    fork::CASES,
];

/// Returns every case, in the order of a run.
pub fn cases() -> impl Iterator<Item = &'static Case> {
    GROUPS.iter().copied().flatten()
}

/// Returns the clauses that no case proves.
#[must_use]
pub fn clauses_without_case() -> Vec<&'static Clause> {
    clauses().iter().filter(|clause| !cases().any(|case| case.clauses.contains(&clause.id))).collect()
}
