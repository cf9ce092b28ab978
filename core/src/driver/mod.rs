//! What the vendors' drivers do alike, written once.
//!
//! CUDA and HIP are twins: their natural backends would share most of their lines. So what they do alike lives here, and
//! a vendor crate holds only what is its own: the names of its libraries, its table of calls, the meaning of its codes,
//! and its quirks as data. Today that is finding a vendor's libraries ([`VendorLibraries`]) and saying why a vendor
//! cannot be used ([`Unavailable`]); the four traits over a table of vendor calls join it with the first vendor that is
//! driven (`docs/driver-mapping.md` shows the table).

mod library;
mod unavailable;
mod vendor;

pub use library::{Library, OpenFailure};
pub use unavailable::Unavailable;
pub use vendor::{LibraryName, VendorLibraries, VendorLibrary, environment_path};
