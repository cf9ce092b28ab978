//! The traits, owning types and pools of Highwater: everything that knows no vendor.
//!
//! - The four traits that a backend implements: [`Backend`], [`BlasHandle`], [`HostAllocator`], [`IpcSharing`]. Each
//!   method's contract is a list of clauses with ids; the conformance suite proves them by name.
//! - The safe owning types that programs use: [`Runtime`], [`Device`], [`Stream`], [`Event`], [`DeviceBuffer`],
//!   [`PinnedBuffer`], [`BlasLease`], [`LtLease`], [`Graph`].
//! - [`Ticket`]: device memory shared between processes.
//! - The pools behind them, of which [`HandlePool`] can be used for handle types of your own.
//! - [`numerics`]: TF32 and repeatability, for a runtime, a thread or a call.
//! - [`driver`]: what vendors' drivers do alike, written once; [`fork`]: noticing a fork for the price of two loads; [`exit`]:
//!   noticing the end of the process; [`file_limit`]: the limit on the size of files and memory files.
//!
//! Core knows no vendor: what differs between them is data ([`Capabilities`]).

#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
compile_error!("highwater supports Linux on x86-64 and aarch64 only");

mod backend;
mod blas;
mod blas_lease;
mod buffer;
mod capability;
mod capture;
#[cfg(test)]
mod capture_tests;
mod clauses;
mod device;
pub mod driver;
mod error;
mod event;
pub mod exit;
pub mod file_limit;
pub mod fork;
#[cfg(test)]
mod fork_tests;
mod gate;
mod host;
mod host_use;
mod id;
mod ipc;
mod ledger;
mod memory;
pub mod numerics;
#[cfg(test)]
mod numerics_tests;
mod pinned;
pub mod plugin;
mod pool;
mod primitive;
mod product;
mod runtime;
mod scalar;
mod secure;
mod sharing;
mod stream;
#[cfg(test)]
mod testing;
mod text;
mod workspace_config;

pub use backend::*;
pub use blas::*;
pub use blas_lease::{BlasLease, LtLease, RawBlas};
pub use buffer::{DeviceBuffer, DeviceSlice};
pub use capability::*;
pub use capture::{Graph, GraphStatistics};
pub use clauses::{Clause, clauses};
pub use device::Device;
pub use error::*;
pub use event::Event;
/// Half-precision numbers, for buffers and products: [`half::f16`], [`half::bf16`].
pub use half;
pub use host::*;
pub use id::*;
pub use ipc::*;
pub use ledger::{DeviceBlockInfo, HostBlockInfo};
pub use memory::*;
pub use numerics::Numerics;
pub use pinned::{PinnedBuffer, PinnedSlice, PinnedSliceMut};
pub use pool::{HandleLease, HandlePool, HandlePoolStatistics, HostCacheStatistics, PoolKey};
pub use runtime::{Runtime, RuntimeOptions, Statistics};
pub use scalar::{Element, Scalar};
pub use secure::secure_execution;
pub use sharing::{SharingStatistics, Ticket};
pub use stream::{Scope, Stream};
pub use text::{display_foreign, harmless};

/// The example of the README, compiled with the other doc tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
