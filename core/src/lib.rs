//! The traits, owning types and pools of Highwater: everything that knows no vendor.
//!
//! - The four traits that a backend implements: [`Backend`], [`BlasHandle`], [`HostAllocator`], [`IpcSharing`]. Each
//!   method's contract is a list of clauses with ids; the conformance suite proves them by name.
//! - The safe owning types that programs use: [`Runtime`], [`Device`], [`Stream`], [`Event`], [`DeviceBuffer`],
//!   [`PinnedBuffer`], [`BlasLease`], [`LtLease`].
//! - The pools behind them, of which [`HandlePool`] can be used for handle types of your own.
//! - [`driver`]: what vendors' drivers do alike, written once; [`fork`]: noticing a fork for the price of two loads.
//!
//! Core knows no vendor: what differs between them is data ([`Capabilities`]).

#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
compile_error!("highwater supports Linux on x86-64 and aarch64 only");

mod backend;
mod blas;
mod blas_lease;
mod buffer;
mod capability;
mod device;
pub mod driver;
mod error;
mod event;
pub mod fork;
#[cfg(test)]
mod fork_tests;
mod host;
mod id;
mod ipc;
mod ledger;
mod memory;
mod pinned;
mod pool;
mod primitive;
mod runtime;
mod scalar;
mod stream;
#[cfg(test)]
mod testing;
mod workspace_config;

pub use backend::*;
pub use blas::*;
pub use blas_lease::{BlasLease, LtLease, RawBlas};
pub use buffer::{DeviceBuffer, DeviceSlice};
pub use capability::*;
pub use device::Device;
pub use error::*;
pub use event::Event;
pub use host::*;
pub use id::*;
pub use ipc::*;
pub use ledger::DeviceBlockInfo;
pub use memory::*;
pub use pinned::{PinnedBuffer, PinnedSlice, PinnedSliceMut};
pub use pool::{HandleLease, HandlePool, HandlePoolStatistics, HostCacheStatistics, PoolKey};
pub use runtime::{Runtime, RuntimeOptions, Statistics};
pub use scalar::{Element, Scalar};
pub use stream::{Scope, Stream};
