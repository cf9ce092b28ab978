//! What CUDA and HIP share: the four traits of [`highwater_hal`] over a table of a vendor's calls.
//!
//! CUDA and HIP have the same model of streams, events, memory, captures and BLAS handles. They differ in names, codes
//! and a few rules. This crate implements the traits once, and a vendor crate adds only its own part.
//!
//! # Responsibilities
//!
//! This crate is responsible for:
//! - Ids. Each id names one vendor handle, and a stale or forged id is `InvalidHandle`. Vendors crash on a destroyed
//!   handle.
//! - Destruction. No handle is destroyed while a call of another thread uses it.
//! - The current device. Each call leaves the thread's current device as it was.
//! - Captures. A call that would lose a capture is refused, or is made in the relaxed mode.
//! - Errors. Each vendor code becomes an [`ErrorKind`](highwater_hal::ErrorKind) with the code and a remedy.
//!
//! The vendor crate is responsible for the names of its libraries, its tables of calls, the meaning of its codes, its
//! [`Quirks`], and calls that the other vendor lacks. It implements [`Platform`].
//!
//! The caller validates the rest: that memory ranges are valid, that work on memory has ended before it is freed, and
//! that the matrices of a product fit their shapes. The `# Safety` sections of the traits list these obligations.
//!
//! # Life cycle of a driver
//!
//! 1. [`open_backend`] runs a [`Search`], which opens the vendor's libraries. It reports each failure as an
//!    [`Unavailable`](highwater_hal::Unavailable).
//! 2. [`DriverCache`] initializes the driver once for each library file. Several backends share one driver.
//! 3. The vendor crate fills its tables with [`vendor_calls!`](crate::vendor_calls). A missing required symbol is an
//!    error here and never later.
//! 4. [`DriverBackend`] serves calls. Its [`DriverState`] lives until the last BLAS handle is dropped.
//! 5. Libraries are never closed, because callbacks, exit handlers and threads of a driver outlive every user.
//!
//! # Exit, fork and captures
//!
//! Once the process begins to exit, every call returns `ShuttingDown`, and no destructor calls the vendor. In a forked
//! child, every call returns `Forked` before it takes a lock. A driver does not survive a fork, and its locks may be
//! held by threads that the child lacks.
//!
//! A capture in global mode fails forbidden calls of every thread. [`Captures`] counts the open captures of a library,
//! so that other calls know when to change to the relaxed mode. On a vendor whose streams die with a lost capture, new
//! streams replace the dead ones under the same ids.
//!
//! `docs/driver-mapping.md` in the repository maps each trait method to its calls.

#[cfg(feature = "abi_check")]
pub mod abi_check;
mod across_devices;
mod backend;
mod blas;
mod calls;
mod captures;
mod codes;
mod dead_streams;
#[cfg(test)]
mod dead_streams_tests;
mod describe;
mod device_info;
mod driver_cache;
mod event_homes;
mod hazards;
mod host;
mod ipc;
mod library;
mod loaded_files;
mod lt;
mod lt_calls;
mod mapped_memory;
mod objects;
mod platform;
mod primitive;
mod raw;
mod search;
mod state;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod thread_records;
mod turns;
mod zeros;

pub use backend::{DriverBackend, open_backend};
pub use calls::{BlasCalls, Calls, IpcHandle, POINTER_MODE_HOST, capture_mode, capture_status};
pub use captures::Captures;
pub use codes::{Code, Codes};
pub use describe::no_device_memory;
pub use device_info::{set_pci_address, text};
pub use driver_cache::DriverCache;
pub use library::Library;
pub use loaded_files::loaded_files;
pub use lt_calls::{
    Epilogues, Lt, LtCalls, LtCodes, ProductAttributes, RawLt, RawMatmulDesc, RawMatmulPreference, RawMatrixLayout,
    Reductions,
};
pub use platform::{
    AtomicsModes, Blas, BlasSettings, ComputeCodes, EventFlags, HostFlags, MAX_PITCH, MathModes, Opened, Platform,
    Quirks, SharedBlock, TransposeCodes, TypeCodes,
};
pub use raw::{Raw, RawBlas, RawEvent, RawGraph, RawGraphExec, RawMemPool, RawStream};
pub use search::{Found, LibraryName, Search, VendorLibrary, environment_path};
pub use state::{Current, DriverState, HandleCount, HeldStream, Relaxed};
pub use zeros::Zeros;
