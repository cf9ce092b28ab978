//! Highwater as a C library. cbindgen makes `include/highwater/highwater.h` from this code: see `cbindgen.toml` and `tests/header.rs`.
//!
//! The body of each function is in [`failure::call!`], which contains panics and keeps the error of the thread. Handles are in `handle`.
//! A struct of options begins with its size, so that it can grow.

#![allow(non_camel_case_types, reason = "types have the names that C sees")]
#![allow(clippy::missing_safety_doc, reason = "the header states the rules of all functions")]

// In the order of the header. A blank line keeps rustfmt from sorting.
pub mod numbers;
pub mod texts;

pub mod opening;

pub mod device;
pub mod stream;

pub mod memory;

pub mod blas;
pub mod capture;
pub mod sharing;
pub mod standing;

mod failure;
mod handle;
mod json;
