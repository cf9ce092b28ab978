//! What the vendors' drivers do alike, written once.
//!
//! CUDA and HIP are twins: their natural backends would share most of their lines. So what they do alike lives here, and
//! a vendor crate holds only what is its own: the names of its libraries, its table of calls, the meaning of its codes,
//! and its quirks as data. Today that is finding and opening libraries ([`open_library`]); the four traits over a table
//! of vendor calls join it with the first vendor that is driven (`docs/driver-mapping.md` shows the table).

mod library;

pub use library::{Library, OpenFailure, open_library};
