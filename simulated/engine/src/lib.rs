//! What simulated vendor libraries are made of: one mock for the whole process, behind raw handles and the vendor's own
//! rules.
//!
//! The libraries themselves (`backend-mock/simulated/cuda`, `backend-mock/simulated/hip`) only have the exported symbols.
//! Each calls a function of this crate, which answers with a value or with a [`Code`]. The rules are CUDA's: those that a
//! real device was seen to have (an NVIDIA H200, driver 580.159, CUDA 13.0), or that the vendor's manual states; where neither
//! says, the functions' words do. Once the library has called [`process::follow_hip`] they are AMD's; where those differ, the
//! functions' words say so, or they stand in [`hip`].
//!
//! # Where what is
//! - [`border`]: what the libraries' exported functions take and give
//! - [`process`]: the one simulation of the process, from `cuInit` to exit; [`variants`]: what can be set from outside;
//!   `visible`: which devices there are
//! - [`current`], [`contexts`]: which context is current in a thread, and primary contexts
//! - [`devices`]: what devices are like
//! - [`streams`], [`events`], [`captures`]: streams and what the default ones wait for, events, captures and graphs
//! - [`memory`], [`host`], [`copies`]: device memory and pools, page-locked memory, copies and fills
//! - [`vmm`], [`ipc`]: memory that is mapped, and what other processes open
//! - [`blas`]: what the BLAS libraries' look-alikes call
//! - [`hip`]: what only AMD's runtime does
//!
//! # How it differs from the vendor's
//! - A stale handle answers 400; a real driver crashes. Handles are never used again.
//! - Every process has devices of its own: what another one allocates leaves its free memory as it is.
//! - Memory that was freed in stream order goes back to the device at once, whatever the pool's threshold. Pools other than
//!   the default one, managed memory, memory of the host by `cuMemCreate` and fabric handles do not exist.
//! - Copies reach every device without peer access, as with the vendor; kernels reach no other device with it.
//! - A graph cannot be launched into a capture (801), and a capture cannot wait for an event outside of it by flag (801).
//! - The legacy default stream waits for the per-thread default stream of the calling thread only.
//! - Every product on a given workspace goes through it, in two kernels or more, so that misuse of a workspace shows at small
//!   sizes too; with the vendor only large products do.
//! - That the exporter has freed what a legacy handle names is not noticed. An event of another process is opened for the
//!   same device only.
//!
//! What was not seen on a device: 400 for the legacy handle of a process that has ended; that stream-ordered and page-locked
//! allocations of no bytes, which succeed, give null; what an unknown capture mode of a thread, which is taken, means (here it
//! is the global one); 1 for an event of a capture that ended well (seen where it was lost); 13 for products of cuBLASLt that
//! touch memory of nobody (seen with cuBLAS, of the first product of a process).

pub mod blas;
pub mod border;
pub mod captures;
pub mod code;
pub mod contexts;
pub mod copies;
pub mod current;
pub mod devices;
pub mod events;
pub mod hip;
pub mod host;
pub mod ipc;
pub mod memory;
pub mod process;
pub mod streams;
pub mod variants;
mod visible;
pub mod vmm;

pub use code::{Answer, Code};
