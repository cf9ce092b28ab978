//! The suite is held against the mock and against backends that are wrong on purpose. One program, so that what waits in one
//! part runs beside what computes in another.

#![forbid(unsafe_code)]

mod clauses;
mod mock;
mod mutants;
mod sweep;
