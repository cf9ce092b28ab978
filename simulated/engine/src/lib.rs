//! The engine of the simulated vendor libraries: one mock per process, behind raw handles and the vendor's own rules.
//!
//! # Why a simulated driver
//! Highwater's backends talk to a vendor's library through its C symbols. A test double of that table would repeat the
//! backend's own beliefs about the vendor. A library that the loader finds under the vendor's name checks them: programs
//! that know nothing of the simulation run over it, and the same rules run over the real library.
//!
//! `simulated/cuda` and `simulated/hip` export the symbols. Each exported function calls one function of this crate,
//! which returns a value or a [`Code`]. The mock (`highwater-mock`) executes the work: it has the queues, the memory and
//! the arithmetic. This crate decides whether a call is allowed, which code it returns, and what the call waits for.
//!
//! # Sources of the rules
//! The rules are CUDA's: each was observed on an NVIDIA H100 or H200 (driver 580.159, CUDA 13.0) or is stated in NVIDIA's
//! manual. `simulated/answers/cuda-13.txt` has the observed answers of the table of calls and states.
//! The doc comments of the functions name the exceptions. After [`variants::follow_hip`] the rules are AMD's. A difference
//! between the two is stated at the function, or the function is in [`hip`].
//!
//! Six rules were not observed on a device:
//! - 400 for the legacy handle of a process that has ended
//! - null for a stream-ordered or page-locked allocation of 0 bytes, which succeeds
//! - an unknown capture mode of a thread, which is accepted and means the global mode here
//! - 1 for an event of a capture that ended well (observed only for a lost capture)
//! - the codes and the effect of a two-dimensional copy, which are those of NVIDIA's and AMD's manuals
//! - 13 for a product of cuBLASLt that reads unallocated memory (observed only for the first product of cuBLAS)
//!
//! # Layers
//! No module imports a module of a later layer.
//! 1. [`code`], [`variants`]: result codes; the settings of the environment
//! 2. [`process`], `visible`: the one simulation of the process, from `cuInit` to exit; the visible devices
//! 3. [`current`], [`devices`], `handles`, `blocks`: the current context, device attributes, handle numbers, the address
//!    space
//! 4. `capture_state`, [`pools`], [`graphs`]: which streams are captured and what that forbids; memory pools; graphs
//! 5. [`streams`], [`events`], [`host`], [`memory`], [`vmm`]: the objects of a device
//! 6. [`captures`], [`copies`], [`ipc`]: operations on several of those objects
//! 7. [`contexts`], [`blas`], [`hip`]: the end of a context, the table for the BLAS libraries, rules of AMD alone
//! 8. [`border`]: arguments and results at the C boundary
//!
//! # What is not modeled
//! - A stale handle returns 400, unless another object has it since; a real driver may crash.
//! - Every process has its own devices. Allocations of another process do not reduce their free memory.
//! - Memory that was freed in stream order returns to the device at once, whatever the pool's threshold.
//! - Pools other than the default one, managed memory, host memory from `cuMemCreate`, and fabric handles do not exist.
//! - Copies reach every device without peer access, as with the vendor. Kernels reach no other device, even with it.
//! - HIP: a graph cannot be launched into a capture (801), and a capture cannot wait for an external event by flag (801).
//! - The legacy default stream waits for the per-thread default stream of the calling thread only.
//! - Every product on a bound workspace writes to it, in two kernels or more, so that misuse of a workspace shows at small
//!   sizes too. The vendor's libraries do so for large products only.
//! - An importer does not notice that the exporter freed the memory behind a legacy handle.
//! - An event of another process can be opened for the same device only.

pub mod blas;
mod blocks;
pub mod border;
mod capture_state;
pub mod captures;
pub mod code;
pub mod contexts;
pub mod copies;
pub mod current;
pub mod devices;
pub mod events;
pub mod graphs;
mod handles;
pub mod hip;
pub mod host;
pub mod ipc;
pub mod memory;
pub mod pools;
pub mod process;
pub mod streams;
pub mod variants;
mod visible;
pub mod vmm;

pub use code::{Answer, Code};
