//! What the vendors' drivers do alike, written once.
//!
//! CUDA and HIP are twins: their natural backends would share most of their lines. So what they do alike lives here, and
//! a vendor crate holds only what is its own: the names of its libraries, its table of calls, the meaning of its codes, its
//! quirks as data, and what the other vendor lacks.
//!
//! - [`Search`] finds a vendor's libraries and says why a vendor cannot be used ([`Unavailable`](highwater_hal::Unavailable)).
//! - [`vendor_calls!`](crate::vendor_calls) declares tables of calls; [`Calls`] and [`BlasCalls`] are those that both vendors have alike.
//! - [`DriverCache`] keeps a vendor's driver, [`Captures`] knows the captures in it, [`loaded_files`] says what other
//!   code has opened, [`text`] reads what a vendor wrote.
//! - [`Platform`] is what a vendor crate implements, [`DriverBackend`] the four traits over it.
//!
//! `docs/driver-mapping.md` of the repository maps every trait method to its calls.

#[cfg(feature = "abi_check")]
pub mod abi_check;
mod backend;
mod blas;
mod calls;
mod captures;
mod codes;
mod dead_streams;
#[cfg(test)]
mod dead_streams_tests;
mod device_info;
mod driver_cache;
mod hazards;
mod host;
mod ipc;
mod library;
mod loaded_files;
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

pub use backend::{DriverBackend, open_backend};
pub use blas::{check_workspace, destroyed, no_stream};
pub use calls::{BlasCalls, Calls, IpcHandle, POINTER_MODE_HOST, capture_mode, capture_status};
pub use captures::Captures;
pub use codes::{Code, Codes};
pub use device_info::{set_pci_address, text};
pub use driver_cache::DriverCache;
pub use library::Library;
pub use loaded_files::loaded_files;
pub use platform::{
    AtomicsModes, Blas, BlasSettings, ComputeCodes, EventFlags, HostFlags, MathModes, Opened, Platform, Quirks,
    SharedBlock, TransposeCodes, TypeCodes,
};
pub use raw::{Raw, RawBlas, RawEvent, RawGraph, RawGraphExec, RawMemPool, RawStream};
pub use search::{Found, LibraryName, Search, VendorLibrary, environment_path};
pub use state::{Current, DriverState, HandleCount, HeldStream, Relaxed};
