//! The functions by name, for `hipGetProcAddress` and `hipGetDriverEntryPoint`. Both lack the functions that a version lacks.

use std::ffi::{CStr, c_void};

use highwater_simulated_engine::border::Function;
use highwater_simulated_engine::hip;

/// The functions that came with HIP 7.
const SINCE_7: [&str; 2] = ["hipStreamGetId", "hipGetDriverEntryPoint"];

static WITHOUT_CODE: &[Function] = &[
    Function::new("hipGetLastError", super::hipGetLastError as *mut c_void),
    Function::new("hipPeekAtLastError", super::hipPeekAtLastError as *mut c_void),
    Function::new("hipGetErrorName", super::hipGetErrorName as *mut c_void),
    Function::new("hipGetErrorString", super::hipGetErrorString as *mut c_void),
];

/// Returns the address of a function.
pub(crate) fn find(name: &CStr) -> Option<*mut c_void> {
    let name = name.to_str().ok()?;
    if SINCE_7.contains(&name) && hip::settings().is_ok_and(|settings| settings.version.0 < 7) {
        return None;
    }
    let lists = [super::FUNCTIONS, super::OLD_FUNCTIONS, super::DEVICELESS_FUNCTIONS, WITHOUT_CODE];
    lists.into_iter().flatten().find(|function| function.symbol() == name).map(Function::address)
}
