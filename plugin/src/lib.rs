//! Backends in shared libraries: a stable table of C functions, and both ends of it.
//!
//! A **plugin** is a shared library with one symbol, `highwater_plugin`. The program calls it once with its versions and its
//! receiver of log lines. The plugin returns its name, its versions of the table, and the functions that open a backend and
//! return the table. `highwater.h` ([`header`]) describes this in C, and is generated from the same list as this code. In
//! Rust, [`export_backend!`](crate::export_backend) makes a plugin of any [`Backend`](highwater_hal::Backend), and [`load`]
//! returns it as a backend again.
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
//! - The table passes only fixed-width integers, doubles, pointers, texts of a fixed size and nullable functions. Each side
//!   reads every value of the other as a number, and checks it.
//! - Every struct that is passed by pointer begins with its size. The missing fields of a shorter struct are zero. A longer
//!   struct is accepted if its unknown bytes are zero. Structs and the table grow at the end only.
//! - Both sides state their versions. The highest common one is used.
//! - A slot that is null or past the end of the table is an operation that the plugin does not support. Slots are in groups
//!   (required, timing, foreign, host, register, blas, lt, capture, ipc, reset, mapped, adopt, rows). A table has all of a group or none. The
//!   program clears the abilities that a device claims without the slots for them.
//! - Every function returns a code: 0, the number of an [`ErrorKind`](highwater_hal::ErrorKind), or -1 for a panic. After a
//!   panic, the program never calls the plugin again. The message goes into a struct of the caller.
//! - Panics never cross the table: the plugin's end catches them.
//! - A plugin is loaded once and never unloaded. It has its own copy of the statics, so only the program has pools. The
//!   plugin's log lines go to the program's logger (`highwater::plugin`).
//! - Ids carry the tag that the program passed when it opened the backend.
//! - No function is called in a forked child, or once the process exits.
//!
//! # Modules
//! - `table`: the list of operations; `raw`, `codes`: the structs and the numbers
//! - `marshalling`: the form of each value in the table
//! - `export`: the plugin's end; `link`, `import`: the program's end
//! - `elf`, `load`: loading a file and checking its table; `rules`: checks for tests of plugins
//! - `header`: `highwater.h`; `logging`: the plugin's log lines

mod codes;
mod elf;
mod export;
mod header;
mod import;
mod link;
mod load;
mod logging;
mod marshalling;
#[allow(unreachable_pub, reason = "`abi` exports two of the structs")]
mod raw;
mod rules;
mod table;

pub use header::{header, layout};
pub use load::{LoadOptions, Plugin, Refusal, Stage, blocked, load};
pub use rules::check_rules;
pub use table::TABLE_VERSIONS;

/// The items that [`export_backend!`](crate::export_backend) uses. Plugins in C use `highwater.h`.
#[doc(hidden)]
pub mod abi {
    pub use super::export::{Export, c_text, enter};
    pub use super::raw::{RawHost, RawPlugin};
    pub use highwater_hal::Backend;
}
