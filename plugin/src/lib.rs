//! Backends that are libraries of their own: a stable table of C functions, the end of the program and the end of the plugin.
//!
//! A **plugin** is a shared library with one symbol, `highwater_plugin`. The program calls it once with what it offers
//! (versions, a place for log lines); the plugin answers with who it is, which versions of the table it has, how its backend
//! is opened, and where its table is. `highwater.h`, which is made from the same list as the code here ([`header`]), says it
//! all in C; in Rust, [`export_backend!`](crate::export_backend) makes a plugin of any [`Backend`](highwater_hal::Backend), and [`load`]
//! gives it back as one.
//!
//! ```no_run
//! use std::path::Path;
//! use highwater_core::Runtime;
//! use highwater_plugin::{LoadOptions, load};
//!
//! let plugin = load(Path::new("/opt/vendor/libhighwater_vendor.so"), &LoadOptions::new())?;
//! println!("{} {} by {}, table {}", plugin.name(), plugin.version(), plugin.vendor(), plugin.table_version());
//! let runtime = Runtime::new(plugin.open()?)?;
//! # Ok::<(), highwater_core::Error>(())
//! ```
//!
//! # The table
//! - Integers of fixed width, doubles, pointers, texts of fixed room and nullable functions cross, and nothing else. Every value
//!   that comes over is read as a number and checked, on both sides.
//! - Every struct behind a pointer begins with its size. A shorter one means zeros for the rest, a longer one is accepted
//!   where it is zero behind what the reader knows. Structs and the table only ever grow at the end.
//! - Both sides name the versions that they have, and the highest common one is used.
//! - A slot that is null or past the end of the table is an operation that the plugin does not support. Slots are in groups
//!   (required, timing, foreign, host, register, blas, lt, capture, ipc) of which a table has all or none; abilities that a
//!   device claims without the slots for them are taken from it.
//! - Every function answers with a code: 0, the number of an [`ErrorKind`](highwater_hal::ErrorKind), or -1 for a panic, after which
//!   the plugin is not called any more. The words go into a struct of the caller.
//! - Panics never cross: the plugin's end catches its own.
//! - A plugin is loaded once and never unloaded. It has a copy of this crate's statics of its own, so pools live in the
//!   program only; what the plugin logs is handed to the program's logger (`highwater::plugin`).
//! - Ids carry the tag that the program gave when it opened the backend.
//! - Nothing is called in a forked child, and nothing once the process exits.
//!
//! # Where what is
//! - `table`: the list of operations, from which the rest is made; `raw`, `codes`: the structs and numbers that cross
//! - `cross`: how each value crosses; `export`, `link`, `import`: the two ends; `elf`, `load`: from the file to the table
//! - `header`: `highwater.h`; `logging`: log lines on their way to the program

mod codes;
mod cross;
mod elf;
mod export;
mod header;
mod import;
mod link;
mod load;
mod logging;
#[allow(unreachable_pub, reason = "two of the structs are what `abi` gives plugins")]
mod raw;
mod table;

pub use header::{header, layout};
pub use load::{LoadOptions, Plugin, Refusal, Stage, load};
pub use table::TABLE_VERSIONS;

/// What [`export_backend!`](crate::export_backend) needs; plugins in C have `highwater.h`.
#[doc(hidden)]
pub mod abi {
    pub use super::export::{Export, c_text, enter};
    pub use super::raw::{RawHost, RawPlugin};
    pub use highwater_hal::Backend;
}
