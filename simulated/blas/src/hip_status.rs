//! The codes of `hipblasStatus_t` and their names.

use std::ffi::CStr;

/// It worked.
pub const SUCCESS: u32 = 0;
/// No handle.
pub const NOT_INITIALIZED: u32 = 1;
/// No memory.
pub const ALLOC_FAILED: u32 = 2;
/// A value that no call takes.
pub const INVALID_VALUE: u32 = 3;
/// An error inside the library, among them that there is no device.
pub const INTERNAL_ERROR: u32 = 6;
/// What the library does not compute.
pub const NOT_SUPPORTED: u32 = 7;
/// No place for a handle.
pub const HANDLE_IS_NULLPTR: u32 = 9;
/// A number that is no constant of the argument's type.
pub const INVALID_ENUM: u32 = 10;

const NAMES: [&CStr; 12] = [
    c"HIPBLAS_STATUS_SUCCESS",
    c"HIPBLAS_STATUS_NOT_INITIALIZED",
    c"HIPBLAS_STATUS_ALLOC_FAILED",
    c"HIPBLAS_STATUS_INVALID_VALUE",
    c"HIPBLAS_STATUS_MAPPING_ERROR",
    c"HIPBLAS_STATUS_EXECUTION_FAILED",
    c"HIPBLAS_STATUS_INTERNAL_ERROR",
    c"HIPBLAS_STATUS_NOT_SUPPORTED",
    c"HIPBLAS_STATUS_ARCH_MISMATCH",
    c"HIPBLAS_STATUS_HANDLE_IS_NULLPTR",
    c"HIPBLAS_STATUS_INVALID_ENUM",
    c"HIPBLAS_STATUS_UNKNOWN",
];

/// The name of a code.
#[must_use]
pub fn name(code: u32) -> &'static CStr {
    NAMES.get(code as usize).copied().unwrap_or(c"<undefined hipblasStatus_t value>")
}

/// The code for what the runtime answered when work was enqueued.
#[must_use]
pub const fn of_runtime(code: i32) -> u32 {
    match code {
        0 => SUCCESS,
        1 => INVALID_VALUE,
        2 => ALLOC_FAILED,
        801 => NOT_SUPPORTED,
        _ => INTERNAL_ERROR,
    }
}
