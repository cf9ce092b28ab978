//! What the vendors' drivers do alike, written once.
//!
//! CUDA and HIP are twins: their natural backends would share most of their lines. So what they do alike lives here, and
//! a vendor crate holds only what is its own: the names of its libraries, its table of calls, the meaning of its codes, its
//! quirks as data, and what the other vendor lacks.
//!
//! - [`Search`] finds a vendor's libraries and says why a vendor cannot be used ([`Unavailable`](highwater_hal::Unavailable)).
//! - [`vendor_calls!`](crate::vendor_calls) declares tables of calls; [`Calls`] and [`BlasCalls`] are those that both vendors have alike.
//! - [`Initialised`] keeps a vendor's driver, [`Captures`] knows the captures in it, [`loaded_files`] says what other
//!   code has opened, [`text`] reads what a vendor wrote.
//! - [`Platform`] is what a vendor crate implements, [`DriverBackend`] the four traits over it.
//!
//! `docs/driver-mapping.md` of the repository maps every trait method to its calls.

mod backend;
mod blas;
mod calls;
mod captures;
mod codes;
mod hazards;
mod host;
mod ipc;
mod library;
mod loaded;
mod lost;
#[cfg(test)]
mod lost_tests;
mod objects;
mod once;
mod place;
mod platform;
mod primitive;
mod raw;
mod records;
mod room;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod vendor;
#[cfg(feature = "witness")]
pub mod witness;

pub use backend::DriverBackend;
pub use calls::{
    BlasCalls, Calls, GemmExCall, GemmStridedBatchedExCall, IpcHandle, POINTER_MODE_HOST, capture_mode, capture_status,
};
pub use captures::Captures;
pub use codes::{Code, Codes};
pub use library::Library;
pub use loaded::loaded_files;
pub use once::Initialised;
pub use place::{set_place, text};
pub use platform::{
    AtomicsModes, Blas, BlasSettings, ComputeCodes, EventFlags, HostFlags, MathModes, Opened, Platform, ProductSymbols,
    Quirks, SharedBlock, TransposeCodes, TypeCodes,
};
pub use raw::{Raw, RawBlas, RawEvent, RawGraph, RawGraphExec, RawMemPool, RawStream};
pub use room::{Current, HandleCount, HeldStream, Relaxed, Room};
pub use vendor::{Found, LibraryName, Search, VendorLibrary, environment_path};
