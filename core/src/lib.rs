//! The traits, owning types and pools of Highwater: everything that knows no vendor.

#[cfg(not(target_os = "linux"))]
compile_error!("highwater supports Linux (x86-64 and aarch64) only");

mod backend;
mod blas;
mod capability;
pub mod driver;
mod error;
pub mod fork;
mod host;
mod id;
mod ipc;
mod memory;

pub use backend::*;
pub use blas::*;
pub use capability::*;
pub use error::*;
pub use host::*;
pub use id::*;
pub use ipc::*;
pub use memory::*;
