//! The program from outside.
//!
//! One test program, because the tests that mostly wait and the tests that compute then run beside each other.

#![forbid(unsafe_code)]

mod bench;
mod built;
mod conformance;
mod finding;
mod ipc;
mod mps;
mod output;
mod own_backends;
mod plugins;
mod race_finder;
mod simulated;
mod started;
