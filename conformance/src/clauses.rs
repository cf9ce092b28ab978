//! The clauses that no case proves.

use highwater_hal::{Clause, clauses};

use crate::cases::cases;

/// The clauses that no case proves.
#[must_use]
pub fn clauses_without_case() -> Vec<&'static Clause> {
    clauses().iter().filter(|clause| !cases().any(|case| case.clauses.contains(&clause.id))).collect()
}
