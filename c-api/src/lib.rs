//! Highwater as a C library. `include/highwater/highwater.h` is made from this code: see `header.rs`.
//!
//! [`api!`](declare::api) declares functions, and [`structs!`](declare::structs) structs with their size first. Each function checks
//! its handles and arguments, contains panics, and keeps the error of the thread.

#![allow(non_camel_case_types, reason = "types have the names that C sees")]
#![allow(clippy::missing_safety_doc, reason = "the header states the rules of all functions")]

mod blas;
mod capture;
mod declare;
mod device;
mod failure;
mod handle;
#[cfg(test)]
mod header;
mod json;
mod memory;
mod opening;
mod sharing;
mod standing;
mod stream;
mod texts;
