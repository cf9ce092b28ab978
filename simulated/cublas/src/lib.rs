//! A simulation of NVIDIA's cuBLAS over the mock.
//!
//! It exports the symbols of `libcublas.so.13` that Highwater uses, with the vendor's ABI. Its rules were observed with cuBLAS
//! 13.1 on an NVIDIA H200 (driver 580.159), or are stated in the vendor's manual.
//!
//! - A handle belongs to the context that was current at its creation, else to that of device 0, which becomes current.
//! - Binding a stream, even the same one, returns the handle to its own workspace. Modes are kept.
//! - On a bound workspace each product is two kernels or more, which pass intermediate results through it. On the handle's own
//!   workspace it is one kernel, which no other stream can disturb. The real library runs a small product as one kernel on
//!   either; two make misuse of a workspace show at small sizes too.
//! - Destroying a handle waits for the device.
//!
//! Not computed: complex and 8-bit types, emulation, operands in page-locked memory or on another device. Those return
//! `NOT_SUPPORTED`, or lose the context if only the address reveals them.

#![allow(non_snake_case, reason = "the symbols have the vendor's names")]
#![allow(unreachable_pub, reason = "exported symbols are public and used by nobody in Rust")]
#![allow(clippy::too_many_arguments, reason = "the argument lists of the vendor's functions")]

#[cfg(test)]
mod abi;
mod gemm;
mod handle;

use std::ffi::{c_char, c_void};

use highwater_simulated_blas::border::set_switch;
use highwater_simulated_blas::product::{Batch, Matrix};
use highwater_simulated_blas::status::{self, INVALID_VALUE};
use highwater_simulated_blas::types::{R_32F, R_64F};
use highwater_simulated_blas::{answer, call, create, export, export_gemm, on, version, version_part};

use crate::gemm::{of_one_type, run};
use crate::handle::State;

/// Runs `body` on the state of a handle.
///
/// # Safety
/// The caller must pass null or a handle from `cublasCreate_v2`.
unsafe fn with<R>(handle: *mut c_void, body: impl FnOnce(&mut State) -> Result<R, u32>) -> Result<R, u32> {
    // SAFETY: forwarded to the caller.
    unsafe { handle::HANDLES.with(handle, body) }.unwrap_or(Err(status::NOT_INITIALIZED))
}

export! {
    /// Handles are null or were given by `cublasCreate_v2`.
    call -> u32;
    checked in signatures against cudarc::cublas::sys, [unsafe fn];

    fn cublasCreate_v2(handle: *mut *mut c_void) { create!(handle in handle::HANDLES, State::new()?) }

    /// Waits for the device.
    fn cublasDestroy_v2(handle: *mut c_void) {
        // SAFETY: the handle is null or was given by `cublasCreate_v2`.
        unsafe { handle::HANDLES.remove(handle) }.map(State::end).ok_or(status::NOT_INITIALIZED)
    }

    /// Needs no handle.
    fn cublasGetVersion_v2(_handle: *mut c_void, version: *mut i32) { answer!(version = self::version() as i32) }
    fn cublasGetProperty(part: u32, value: *mut i32) { answer!(value = version_part(part).ok_or(INVALID_VALUE)?) }

    /// The handle is back on its own workspace, also when the stream is the same.
    fn cublasSetStream_v2(handle: *mut c_void, stream: *mut c_void) {
        on!(handle, |state| { state.bind_stream(stream as usize); Ok(()) })
    }

    fn cublasGetStream_v2(handle: *mut c_void, stream: *mut *mut c_void) {
        answer!(stream = on!(handle, |state| Ok(state.stream))? as *mut c_void)
    }

    /// 0 bytes forbid any workspace.
    fn cublasSetWorkspace_v2(handle: *mut c_void, workspace: *mut c_void, bytes: usize) {
        on!(handle, |state| state.bind_workspace(workspace as u64, bytes as u64))
    }

    fn cublasSetMathMode(handle: *mut c_void, mode: u32) { on!(handle, |state| state.set_math_mode(mode)) }
    fn cublasGetMathMode(handle: *mut c_void, mode: *mut u32) { answer!(mode = on!(handle, |state| Ok(state.math_mode))?) }

    fn cublasSetAtomicsMode(handle: *mut c_void, mode: u32) {
        on!(handle, |state| set_switch(&mut state.atomics_mode, mode, INVALID_VALUE))
    }

    fn cublasGetAtomicsMode(handle: *mut c_void, mode: *mut u32) {
        answer!(mode = on!(handle, |state| Ok(state.atomics_mode))?)
    }

    fn cublasSetPointerMode_v2(handle: *mut c_void, mode: u32) {
        on!(handle, |state| set_switch(&mut state.pointer_mode, mode, INVALID_VALUE))
    }

    fn cublasGetPointerMode_v2(handle: *mut c_void, mode: *mut u32) {
        answer!(mode = on!(handle, |state| Ok(state.pointer_mode))?)
    }

    /// Changes nothing about a product here.
    fn cublasSetSmCountTarget(handle: *mut c_void, count: i32) { on!(handle, |state| state.set_sm_count_target(count)) }

    fn cublasGetSmCountTarget(handle: *mut c_void, count: *mut i32) {
        answer!(count = on!(handle, |state| Ok(state.sm_count_target))?)
    }

    /// Changes nothing about a product here.
    fn cublasSetEmulationStrategy(handle: *mut c_void, strategy: u32) {
        on!(handle, |state| state.set_emulation_strategy(strategy))
    }

    fn cublasGetEmulationStrategy(handle: *mut c_void, strategy: *mut u32) {
        answer!(strategy = on!(handle, |state| Ok(state.emulation_strategy))?)
    }

    fn cublasSgemm_v2(
        handle: *mut c_void, transa: u32, transb: u32, m: i32, n: i32, k: i32,
        alpha: *const f32, a: *const f32, lda: i32, b: *const f32, ldb: i32,
        beta: *const f32, c: *mut f32, ldc: i32,
    ) {
        let call = of_one_type(R_32F, 68, [transa, transb], [m, n, k].map(i64::from), alpha.cast(), beta.cast(), [
            Matrix::new(a.cast(), lda, 0), Matrix::new(b.cast(), ldb, 0), Matrix::new(c.cast(), ldc, 0),
        ]);
        // SAFETY: forwarded to the caller.
        unsafe { run(&call, handle) }
    }

    fn cublasDgemm_v2(
        handle: *mut c_void, transa: u32, transb: u32, m: i32, n: i32, k: i32,
        alpha: *const f64, a: *const f64, lda: i32, b: *const f64, ldb: i32,
        beta: *const f64, c: *mut f64, ldc: i32,
    ) {
        let call = of_one_type(R_64F, 70, [transa, transb], [m, n, k].map(i64::from), alpha.cast(), beta.cast(), [
            Matrix::new(a.cast(), lda, 0), Matrix::new(b.cast(), ldb, 0), Matrix::new(c.cast(), ldc, 0),
        ]);
        // SAFETY: forwarded to the caller.
        unsafe { run(&call, handle) }
    }

    fn cublasSgemmStridedBatched(
        handle: *mut c_void, transa: u32, transb: u32, m: i32, n: i32, k: i32,
        alpha: *const f32, a: *const f32, lda: i32, stride_a: i64, b: *const f32, ldb: i32, stride_b: i64,
        beta: *const f32, c: *mut f32, ldc: i32, stride_c: i64, batch_count: i32,
    ) {
        let mut call = of_one_type(R_32F, 68, [transa, transb], [m, n, k].map(i64::from), alpha.cast(), beta.cast(), [
            Matrix::new(a.cast(), lda, stride_a), Matrix::new(b.cast(), ldb, stride_b), Matrix::new(c.cast(), ldc, stride_c),
        ]);
        call.batch = Batch::Of(i64::from(batch_count));
        // SAFETY: forwarded to the caller.
        unsafe { run(&call, handle) }
    }
}

export_gemm! {
    /// Handles are null or were given by `cublasCreate_v2`.
    call -> u32;
    checked in gemm_signatures against cudarc::cublas::sys, [unsafe fn];
    by run, algorithms are i32;
    cublasGemmEx, cublasGemmStridedBatchedEx: i32;
    cublasGemmEx_64, cublasGemmStridedBatchedEx_64: i64;
}

/// The vendor's `cublasGetStatusName`.
#[unsafe(no_mangle)]
pub extern "C" fn cublasGetStatusName(code: u32) -> *const c_char {
    status::name(code).as_ptr()
}

/// The vendor's `cublasGetStatusString`.
#[unsafe(no_mangle)]
pub extern "C" fn cublasGetStatusString(code: u32) -> *const c_char {
    status::text(code).as_ptr()
}
