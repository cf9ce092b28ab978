//! The functions by name, for `cuGetProcAddress`, which takes names without their version.

use std::ffi::{CStr, c_void};

use highwater_simulated_engine::border::Function;

use super::{FUNCTIONS, OLD_FUNCTIONS};

/// Returns the address of a function, by its symbol or by the symbol without `_v2`.
pub(crate) fn find(name: &CStr) -> Option<*mut c_void> {
    let name = name.to_str().ok()?;
    let exact = FUNCTIONS.iter().chain(OLD_FUNCTIONS).find(|function| function.symbol() == name);
    let versioned = || FUNCTIONS.iter().find(|function| function.symbol().strip_suffix("_v2") == Some(name));
    exact.or_else(versioned).map(Function::address)
}
