//! The owning types and pools of Highwater, over the traits of [`highwater_hal`].
//!
//! - The four traits that a backend implements: [`Backend`], [`BlasHandle`], [`HostAllocator`], [`IpcSharing`]. Each
//!   method's contract is a list of clauses with ids; the conformance suite proves them by name.
//! - The safe owning types that programs use: [`Runtime`], [`Device`], [`Stream`], [`Event`], [`DeviceBuffer`],
//!   [`PinnedBuffer`], [`BlasLease`], [`LtLease`], [`Graph`]. [`Done`] is the end of device work, as a future.
//! - [`Ticket`], [`TicketBatch`]: device memory and page-locked memory ([`SharedPinnedBuffer`]) shared between processes.
//! - The pools behind them, of which [`HandlePool`] can be used for handle types of your own.
//! - [`numerics`]: TF32 and repeatability, for a runtime, a thread or a call.
//!
//! Core knows no vendor: what differs between them is data ([`Capabilities`]).

#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
compile_error!("highwater supports Linux on x86-64 and aarch64 only");

mod adopt;
mod blas_lease;
mod buffer;
mod capture;
mod capture_gate;
#[cfg(test)]
mod capture_tests;
mod device;
mod device_block;
mod event;
mod foreign_objects;
mod foreign_use;
#[cfg(test)]
mod fork_tests;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod key_values;
mod ledger;
mod matmul;
pub mod numerics;
#[cfg(test)]
mod numerics_tests;
mod own_thread;
mod panics;
mod pinned;
mod pool;
mod primitive;
mod product;
mod runtime;
mod services;
mod shared_pinned;
mod sharing;
mod stream;
#[cfg(test)]
mod testing;
mod waits;
mod warnings;
mod workspace_config;

pub use blas_lease::{BlasLease, LtLease, OwnedBlasLease, OwnedLtLease, RawBlas};
pub use buffer::{DeviceBuffer, DeviceSlice};
pub use capture::{Graph, GraphStatistics};
pub use device::Device;
pub use event::Event;
pub use foreign_use::Access;
pub use highwater_hal::*;
pub use ledger::{BufferStatistics, DeviceBlockInfo, HostBlockInfo};
pub use matmul::{Matmul, Matrix};
pub use numerics::Numerics;
pub use pinned::{PinnedBuffer, PinnedSlice, PinnedSliceMut};
pub use pool::{
    DeviceMemoryOptions, DeviceMemoryStatistics, HandleLease, HandlePool, HandlePoolStatistics, HostCacheStatistics,
    HostMemoryOptions, HugePages, OwnedHandleLease, PoolKey,
};
pub use runtime::{Limits, Runtime, RuntimeOptions, Statistics};
pub use shared_pinned::SharedPinnedBuffer;
/// The memory that the processes of a user share, and a holder that keeps it without a device.
pub mod ipc {
    pub use crate::sharing::{
        Allocation, Answer, DescriptorStore, HeldAllocation, HeldState, Holder, HolderState, OpenedAllocation,
        SharedAllocation, SharingProcess, processes,
    };
}

pub use sharing::{
    DeathWatch, ImportOptions, Openers, Owner, OwnerDeath, Rendezvous, SharingOptions, SharingReport,
    SharingStatistics, Ticket, TicketBatch,
};
pub use stream::{Scope, Stream};
pub use waits::{Done, DoneDescriptor};

/// The example of the README, compiled with the other doc tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
