//! The codes of `cublasStatus_t`, their names and texts.

use std::ffi::CStr;

/// It worked.
pub const SUCCESS: u32 = 0;
/// No handle, no device, or no context.
pub const NOT_INITIALIZED: u32 = 1;
/// No memory.
pub const ALLOC_FAILED: u32 = 3;
/// A value that no call takes.
pub const INVALID_VALUE: u32 = 7;
/// A kernel could not be launched, often because an earlier one failed.
pub const EXECUTION_FAILED: u32 = 13;
/// An error inside the library.
pub const INTERNAL_ERROR: u32 = 14;
/// A combination that the library has no kernel for.
pub const NOT_SUPPORTED: u32 = 15;

const TEXTS: &[(u32, &CStr, &CStr)] = &[
    (SUCCESS, c"CUBLAS_STATUS_SUCCESS", c"success"),
    (NOT_INITIALIZED, c"CUBLAS_STATUS_NOT_INITIALIZED", c"the library was not initialized"),
    (ALLOC_FAILED, c"CUBLAS_STATUS_ALLOC_FAILED", c"the resource allocation failed"),
    (INVALID_VALUE, c"CUBLAS_STATUS_INVALID_VALUE", c"an unsupported value or parameter was passed to the function"),
    (8, c"CUBLAS_STATUS_ARCH_MISMATCH", c"the function requires a feature that the device lacks"),
    (11, c"CUBLAS_STATUS_MAPPING_ERROR", c"an access to GPU memory space failed"),
    (EXECUTION_FAILED, c"CUBLAS_STATUS_EXECUTION_FAILED", c"the function failed to launch on the GPU"),
    (INTERNAL_ERROR, c"CUBLAS_STATUS_INTERNAL_ERROR", c"an internal operation failed"),
    (NOT_SUPPORTED, c"CUBLAS_STATUS_NOT_SUPPORTED", c"the requested functionality is not supported"),
    (16, c"CUBLAS_STATUS_LICENSE_ERROR", c"an error was detected when checking the license"),
];

/// The name of a code.
#[must_use]
pub fn name(code: u32) -> &'static CStr {
    TEXTS.iter().find(|text| text.0 == code).map_or(c"CUBLAS_STATUS_UNKNOWN", |text| text.1)
}

/// What a code means.
#[must_use]
pub fn text(code: u32) -> &'static CStr {
    TEXTS.iter().find(|text| text.0 == code).map_or(c"unknown cublas status", |text| text.2)
}

/// The code for what the driver answered when work was enqueued.
#[must_use]
pub const fn of_launch(driver: u32) -> u32 {
    match driver {
        0 => SUCCESS,
        1 => INVALID_VALUE,
        2 => ALLOC_FAILED,
        // Not initialized (also: a forked child), shutting down, no context, context gone.
        3 | 4 | 201 | 709 => NOT_INITIALIZED,
        801 => NOT_SUPPORTED,
        _ => EXECUTION_FAILED,
    }
}
