//! A simulation of AMD's hipBLAS over the mock, with the rocBLAS behind it.
//!
//! It exports the symbols of `libhipblas.so.3` and `.so.2` that Highwater uses, with the vendor's ABI. The simulated runtime's
//! settings choose the version, and `scripts/simulated.sh` removes the symbols that it lacks. The rules were observed with
//! hipBLAS 2.4 and 3.2 without a device, or are stated in the vendor's manual.
//!
//! - A handle belongs to the device that was current at its creation.
//! - Binding a stream keeps the workspace and the modes.
//! - Each product is two kernels or more, which pass intermediate results through the workspace: the bound one, or the handle's
//!   own, which all streams of the handle share. The real library runs a small product as one kernel; two make misuse of a
//!   workspace or a handle show at small sizes too.
//! - Destroying a handle waits for the device.
//!
//! Not computed: complex and 8-bit types, operands in page-locked memory or on another device. Those return `NOT_SUPPORTED`,
//! or lose the device if only the address reveals them.

#![allow(non_snake_case, reason = "the symbols have the vendor's names")]
#![allow(unreachable_pub, reason = "exported symbols are public and used by nobody in Rust")]
#![allow(clippy::too_many_arguments, reason = "the argument lists of the vendor's functions")]

#[cfg(test)]
mod abi;
mod gemm;
mod handle;

use std::ffi::{c_char, c_void};

use highwater_simulated_blas::border::{guarded, put, set_switch};
use highwater_simulated_blas::{answer, export, export_gemm, on};

use crate::gemm::{Symbol, run};
use crate::handle::State;
use highwater_simulated_blas::hip_status::{
    HANDLE_IS_NULLPTR, INTERNAL_ERROR, INVALID_ENUM, INVALID_VALUE, NOT_INITIALIZED, NOT_SUPPORTED,
};

/// Runs a call, whatever its name.
fn call(_function: &str, body: impl FnOnce() -> Result<(), u32>) -> u32 {
    guarded(INTERNAL_ERROR, body)
}

/// Runs `body` on the state of a handle.
///
/// # Safety
/// `handle` is null or was given by `hipblasCreate`.
unsafe fn with<R>(handle: *mut c_void, body: impl FnOnce(&mut State) -> Result<R, u32>) -> Result<R, u32> {
    // SAFETY: forwarded to the caller.
    unsafe { handle::HANDLES.with(handle, body) }.unwrap_or(Err(NOT_INITIALIZED))
}

export! {
    /// Handles are null or were given by `hipblasCreate`.
    call -> u32;

    fn hipblasCreate(handle: *mut *mut c_void) {
        if handle.is_null() {
            return Err(HANDLE_IS_NULLPTR);
        }
        let state = State::new()?;
        // SAFETY: the caller gives a place for a handle.
        unsafe { put(handle, handle::HANDLES.insert(state), INVALID_VALUE) }
    }

    /// Waits for the device.
    fn hipblasDestroy(handle: *mut c_void) {
        // SAFETY: the handle is null or was given by `hipblasCreate`.
        unsafe { handle::HANDLES.remove(handle) }.map(State::end).ok_or(NOT_INITIALIZED)
    }

    /// A bound workspace stays.
    fn hipblasSetStream(handle: *mut c_void, stream: *mut c_void) {
        on!(handle, |state| { state.stream = stream as usize; Ok(()) })
    }

    fn hipblasGetStream(handle: *mut c_void, stream: *mut *mut c_void) {
        answer!(stream = on!(handle, |state| Ok(state.stream))? as *mut c_void)
    }

    /// Since hipBLAS 3.
    fn hipblasSetWorkspace(handle: *mut c_void, workspace: *mut c_void, bytes: usize) {
        on!(handle, |state| { state.bind_workspace(workspace as u64, bytes as u64); Ok(()) })
    }

    /// Mode 1 (`HIPBLAS_XF32_XDL_MATH`) is accepted and has no effect (seen with hipBLAS 2.4 and 3.2).
    fn hipblasSetMathMode(handle: *mut c_void, mode: u32) {
        on!(handle, |state| set_switch(&mut state.math_mode, mode, NOT_SUPPORTED))
    }

    fn hipblasGetMathMode(handle: *mut c_void, mode: *mut u32) {
        answer!(mode = on!(handle, |state| Ok(state.math_mode))?)
    }

    fn hipblasSetAtomicsMode(handle: *mut c_void, mode: u32) {
        on!(handle, |state| set_switch(&mut state.atomics_mode, mode, INVALID_ENUM))
    }

    fn hipblasGetAtomicsMode(handle: *mut c_void, mode: *mut u32) {
        answer!(mode = on!(handle, |state| Ok(state.atomics_mode))?)
    }

    fn hipblasSetPointerMode(handle: *mut c_void, mode: u32) {
        on!(handle, |state| set_switch(&mut state.pointer_mode, mode, INVALID_ENUM))
    }

    fn hipblasGetPointerMode(handle: *mut c_void, mode: *mut u32) {
        answer!(mode = on!(handle, |state| Ok(state.pointer_mode))?)
    }
}

export_gemm! {
    /// Handles are null or were given by `hipblasCreate`.
    call -> u32;
    by run, algorithms are u32;
    hipblasGemmEx, hipblasGemmStridedBatchedEx: i32, Symbol::Plain;
    hipblasGemmEx_64, hipblasGemmStridedBatchedEx_64: i64, Symbol::Plain;
    hipblasGemmEx_v2, hipblasGemmStridedBatchedEx_v2: i32, Symbol::V2;
    hipblasGemmEx_v2_64, hipblasGemmStridedBatchedEx_v2_64: i64, Symbol::V2;
}

/// The vendor's `hipblasStatusToString`.
#[unsafe(no_mangle)]
pub extern "C" fn hipblasStatusToString(code: u32) -> *const c_char {
    highwater_simulated_blas::hip_status::name(code).as_ptr()
}
