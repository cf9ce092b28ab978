//! The contract of a Highwater backend: four traits, and the types in their signatures.
//!
//! - [`Backend`] provides devices, streams, events, memory, copies and captures.
//! - [`BlasHandle`] is one vendor context for matrix products.
//! - [`HostAllocator`] allocates page-locked host memory.
//! - [`IpcSharing`] exports memory and events to other processes.
//! - [`for_each_operation`] lists the operations of all four once. [`BackendLayer`] stands between a caller and a backend and
//!   forwards them.
//!
//! A backend depends on this crate and on no other of Highwater. Programs use `highwater`, which re-exports this crate as
//! `highwater::hal`.
//!
//! # Design
//! A backend makes the vendor's calls. It contains no pool, no cache and no policy: core has them once, for all vendors.
//! Each method's contract is a list of *clauses* with ids ([`clauses`]). The conformance suite proves them by id. Each clause
//! holds for every backend, so core contains no branch on a vendor's name.
//!
//! **Validation.** A backend validates the arguments that only it can judge, and those that a clause names:
//! - ids: stale, foreign and forged ids return [`ErrorKind::InvalidHandle`] before the vendor is called;
//! - ordinals of devices, and requests that a capability denies;
//! - the arguments that a clause rejects.
//!
//! Core validates all other arguments before the call, and a backend may pass them to the vendor. Methods on raw addresses
//! are `unsafe fn`, and their Safety sections state the caller's obligations. All other methods are safe, and return an error
//! for each request that they cannot meet.
//!
//! **Ids, not pointers.** Streams, events, graphs and physical memory cross the traits as ids ([`StreamId`], [`EventId`],
//! [`GraphId`], [`PhysicalMemoryId`]). A vendor's pointer may name a new object after its own was destroyed. An id never does.
//! [`IdTable`] issues and checks ids.
//!
//! **Capabilities are data.** [`Capabilities`] lists the abilities and the facts of a device. A denied ability returns
//! [`ErrorKind::Unsupported`] without a call of the vendor. The other optional methods have a default that returns this
//! error. Options and enums are `non_exhaustive`, so the contract can grow.
//!
//! **Errors.** Every failure is an [`Error`] with a kind, the operation, a message and, where one helps, a hint and the
//! vendor's code.
//!
//! # Life cycle
//! 1. The backend loads the vendor's library and initializes it. Right after that, it calls [`exit::watch`]. A backend
//!    without a device does not open, and reports the reason as [`Unavailable`].
//! 2. Core reads [`Backend::identity`], [`Backend::device_info`] and [`Backend::capabilities`]. They never change.
//! 3. Core creates streams, events and handles, allocates memory, and enqueues work. Calls may come from several threads at
//!    once.
//! 4. Core destroys each object once, and frees each block once. A call that fails leaves the object alive, and core may
//!    repeat the call.
//! 5. When core has destroyed everything, [`Backend::live_objects`] is zero, and the last `Arc` drops the backend.
//!
//! # Threads
//! [`Backend`], [`HostAllocator`] and [`IpcSharing`] are `Send + Sync`. Any thread may call any method, and no call needs a
//! current device or context. A backend sets the vendor's context itself and restores the caller's. A [`BlasHandle`] is
//! `Send` but not `Sync`: one thread at a time uses it.
//!
//! # Exit
//! A vendor's library may shut down before the last objects are dropped. From [`exit::has_begun`] on, a backend calls no
//! driver and returns [`ErrorKind::ShuttingDown`]. Vendor objects are leaked on purpose, and the process frees them by ending.
//!
//! # Fork
//! A vendor's context does not work in a forked child, and a lock may be held by a thread that does not exist there. In such a
//! child, each method returns [`ErrorKind::Forked`] before it takes a lock or calls the vendor. [`fork`] detects this in two
//! loads.
//!
//! # Capture
//! While a stream is captured, its work is recorded and not executed. The clauses of [`Backend::begin_capture`] list the
//! calls that must neither fail nor disturb a capture. A vendor forbids more, so a backend switches the thread's capture mode
//! or defers the call. Only the code that began a capture may end it.
//!
//! # Facts about the process
//! - [`fork`] and [`exit`] detect a fork and the exit of the process.
//! - [`file_limit`] checks the limit on the size of files, which applies to memory files too.
//! - [`copies`] reports whether another copy of the code, such as a plugin's, is in the process.

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
pub use text::{counted, display_foreign, harmless};
pub use unavailable::{OpenFailure, Unavailable};

/// The example of the README, compiled with the other doc tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
