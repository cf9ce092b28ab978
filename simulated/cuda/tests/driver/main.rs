//! The simulated driver: its ABI, the library as it is built, and what a real driver does not have.

#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "every call is one of the driver under test, with live arguments"
)]
#![allow(missing_docs, reason = "tests are documented by their names")]

#[path = "../../src/lib.rs"]
mod library;

mod abi;
mod built;
mod simulation;
