//! The contract of a Highwater backend: four traits, and the types that cross them.
//!
//! - [`Backend`], [`BlasHandle`], [`HostAllocator`], [`IpcSharing`]. Each method's contract is a list of clauses with ids
//!   ([`clauses`]); the conformance suite proves them by name.
//! - Ids instead of vendor pointers ([`StreamId`], [`IdTable`]), [`Capabilities`] instead of vendor names, [`Error`].
//! - [`for_each_operation`]: the operations of the traits as one list, and the layers that forward them ([`BackendLayer`]).
//! - [`fork`], [`exit`], [`file_limit`]: facts about the process that every backend must respect.
//! - [`copies`]: whether another copy of a backend's code is in the process.
//!
//! A backend depends on this crate and on no other of Highwater. It contains no pool and no policy. Programs use
//! `highwater`, which re-exports this crate as `highwater::hal`.

#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
compile_error!("highwater supports Linux on x86-64 and aarch64 only");

mod backend;
mod blas;
mod capability;
mod clauses;
pub mod copies;
mod error;
pub mod exit;
pub mod file_limit;
pub mod fork;
mod host;
mod id;
mod ipc;
mod memory;
pub mod numbers;
mod operations;
mod random;
mod scalar;
mod secure;
mod text;
mod unavailable;

pub use backend::*;
pub use blas::*;
pub use capability::*;
pub use clauses::{Clause, clauses};
pub use error::*;
/// Half-precision numbers, for buffers and products: [`half::f16`], [`half::bf16`].
pub use half;
pub use host::*;
pub use id::*;
pub use ipc::*;
pub use memory::*;
pub use operations::*;
pub use random::{SplitMix64, random};
pub use scalar::{Element, Scalar};
pub use secure::secure_execution;
pub use text::{display_foreign, harmless};
pub use unavailable::{OpenFailure, Unavailable};

/// The example of the README, compiled with the other doc tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
