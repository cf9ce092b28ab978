//! A look-alike of AMD's hipBLAS over the mock, with the rocBLAS that stands behind it.
//!
//! It has the symbols and the ABI of `libhipblas.so.3` and `.so.2` as far as Highwater uses them. Which version it is comes
//! from the simulated runtime's settings, and which symbols that lacks is settled where the file is laid out. The rules are
//! those that hipBLAS 2.4 and 3.2 were seen to have without a device, or that the vendor's manual states.
//!
//! - A handle lives on the device that was current when it was made.
//! - Binding a stream leaves the workspace and the modes as they are.
//! - Each product is two kernels or more, which pass their intermediate results through the workspace: the bound one, or the
//!   handle's own, which all streams share that the handle is used on. The real one makes one kernel of a small product: here
//!   it is two on purpose, so that misuse of a workspace or a handle shows at small sizes too.
//! - Destroying a handle waits for the device.
//!
//! What the real library computes and this one does not: complex and 8-bit types, operands in page-locked memory or on
//! another device. Those are `NOT_SUPPORTED`, or a lost device where only the address tells.

#![allow(non_snake_case, reason = "the symbols have the vendor's names")]
#![allow(unreachable_pub, reason = "exported symbols are public and used by nobody in Rust")]
#![allow(clippy::too_many_arguments, reason = "the argument lists of the vendor's functions")]

mod gemm;
mod handle;
mod runtime;
mod status;
#[cfg(test)]
mod witness;

use std::ffi::{c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::gemm::{Batch, Call, Matrix, Symbol};
use crate::handle::State;
use crate::status::{HANDLE_IS_NULLPTR, INTERNAL_ERROR, INVALID_VALUE, NOT_INITIALIZED, NOT_SUPPORTED, SUCCESS};

macro_rules! export {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {
        $(
            #[doc = concat!("The vendor's `", stringify!($name), "`.")]
            $(#[$doc])*
            ///
            /// # Safety
            /// Pointers are null or valid for what the vendor's function of this name reads and writes, and handles are null
            /// or were given by `hipblasCreate`.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> u32 {
                let body = move || -> Result<(), u32> { $body };
                // A panic does not cross into foreign code. Unwind safety: what it leaves behind is the state of a slot, whose
                // lock says that it was poisoned.
                match catch_unwind(AssertUnwindSafe(body)) {
                    Ok(answer) => answer.err().unwrap_or(SUCCESS),
                    Err(_) => INTERNAL_ERROR,
                }
            }
        )*
    };
}

/// Writes an answer.
///
/// # Safety
/// `place` is null or valid for a write.
unsafe fn put<T>(place: *mut T, value: T) -> Result<(), u32> {
    if place.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller says that the place is valid when it is not null.
    unsafe { place.write(value) };
    Ok(())
}

/// Runs `body` on the state of a handle.
///
/// # Safety
/// `handle` is null or was given by `hipblasCreate`.
unsafe fn with<R>(handle: *mut c_void, body: impl FnOnce(&mut State) -> Result<R, u32>) -> Result<R, u32> {
    // SAFETY: the caller's promise.
    unsafe { handle::HANDLES.with(handle, body) }.unwrap_or(Err(NOT_INITIALIZED))
}

export! {
    fn hipblasCreate(handle: *mut *mut c_void) {
        if handle.is_null() {
            return Err(HANDLE_IS_NULLPTR);
        }
        let state = State::new()?;
        // SAFETY: the caller gives a place for a handle.
        unsafe { put(handle, handle::HANDLES.insert(state)) }
    }

    /// Waits for the device.
    fn hipblasDestroy(handle: *mut c_void) {
        // SAFETY: the handle is null or was given by `hipblasCreate`.
        unsafe { handle::HANDLES.remove(handle) }.map(State::end).ok_or(NOT_INITIALIZED)
    }

    /// A bound workspace stays.
    fn hipblasSetStream(handle: *mut c_void, stream: *mut c_void) {
        // SAFETY: the handle is null or was given by `hipblasCreate`.
        unsafe { with(handle, |state| { state.stream = stream as usize; Ok(()) }) }
    }

    fn hipblasGetStream(handle: *mut c_void, stream: *mut *mut c_void) {
        // SAFETY: as above, and the caller gives a place for a stream, or null.
        unsafe { put(stream, with(handle, |state| Ok(state.stream))? as *mut c_void) }
    }

    /// Since hipBLAS 3.
    fn hipblasSetWorkspace(handle: *mut c_void, workspace: *mut c_void, bytes: usize) {
        // SAFETY: the handle is null or was given by `hipblasCreate`.
        unsafe { with(handle, |state| state.bind_workspace(workspace as u64, bytes as u64)) }
    }

    /// There is the default mode and no other.
    fn hipblasSetMathMode(handle: *mut c_void, mode: u32) {
        // SAFETY: the handle is null or was given by `hipblasCreate`.
        unsafe { with(handle, |_| if mode == 0 { Ok(()) } else { Err(NOT_SUPPORTED) }) }
    }

    fn hipblasGetMathMode(handle: *mut c_void, mode: *mut u32) {
        // SAFETY: as above, and the caller gives a place for a mode, or null.
        unsafe { put(mode, with(handle, |_| Ok(0))?) }
    }

    fn hipblasSetAtomicsMode(handle: *mut c_void, mode: u32) {
        // SAFETY: the handle is null or was given by `hipblasCreate`.
        unsafe { with(handle, |state| handle::set_switch(&mut state.atomics_mode, mode)) }
    }

    fn hipblasGetAtomicsMode(handle: *mut c_void, mode: *mut u32) {
        // SAFETY: as above, and the caller gives a place for a mode, or null.
        unsafe { put(mode, with(handle, |state| Ok(state.atomics_mode))?) }
    }

    fn hipblasSetPointerMode(handle: *mut c_void, mode: u32) {
        // SAFETY: the handle is null or was given by `hipblasCreate`.
        unsafe { with(handle, |state| handle::set_switch(&mut state.pointer_mode, mode)) }
    }

    fn hipblasGetPointerMode(handle: *mut c_void, mode: *mut u32) {
        // SAFETY: as above, and the caller gives a place for a mode, or null.
        unsafe { put(mode, with(handle, |state| Ok(state.pointer_mode))?) }
    }

    fn hipblasGemmEx(
        handle: *mut c_void, transa: u32, transb: u32, m: i32, n: i32, k: i32,
        alpha: *const c_void, a: *const c_void, a_type: u32, lda: i32, b: *const c_void, b_type: u32, ldb: i32,
        beta: *const c_void, c: *mut c_void, c_type: u32, ldc: i32, compute_type: u32, algo: u32,
    ) {
        let call = Call {
            symbol: Symbol::Plain, transpose: [transa, transb], sizes: [m, n, k].map(i64::from),
            types: [a_type, b_type, c_type], compute_type, algo, alpha, beta, batch: Batch::One,
            matrices: [Matrix::new(a, lda, 0), Matrix::new(b, ldb, 0), Matrix::new(c, ldc, 0)],
        };
        // SAFETY: the caller's promises are the ones that are asked for.
        unsafe { call.run(handle) }
    }

    fn hipblasGemmEx_64(
        handle: *mut c_void, transa: u32, transb: u32, m: i64, n: i64, k: i64,
        alpha: *const c_void, a: *const c_void, a_type: u32, lda: i64, b: *const c_void, b_type: u32, ldb: i64,
        beta: *const c_void, c: *mut c_void, c_type: u32, ldc: i64, compute_type: u32, algo: u32,
    ) {
        let call = Call {
            symbol: Symbol::Plain, transpose: [transa, transb], sizes: [m, n, k],
            types: [a_type, b_type, c_type], compute_type, algo, alpha, beta, batch: Batch::One,
            matrices: [Matrix::new(a, lda, 0), Matrix::new(b, ldb, 0), Matrix::new(c, ldc, 0)],
        };
        // SAFETY: the caller's promises are the ones that are asked for.
        unsafe { call.run(handle) }
    }

    fn hipblasGemmEx_v2(
        handle: *mut c_void, transa: u32, transb: u32, m: i32, n: i32, k: i32,
        alpha: *const c_void, a: *const c_void, a_type: u32, lda: i32, b: *const c_void, b_type: u32, ldb: i32,
        beta: *const c_void, c: *mut c_void, c_type: u32, ldc: i32, compute_type: u32, algo: u32,
    ) {
        let call = Call {
            symbol: Symbol::V2, transpose: [transa, transb], sizes: [m, n, k].map(i64::from),
            types: [a_type, b_type, c_type], compute_type, algo, alpha, beta, batch: Batch::One,
            matrices: [Matrix::new(a, lda, 0), Matrix::new(b, ldb, 0), Matrix::new(c, ldc, 0)],
        };
        // SAFETY: the caller's promises are the ones that are asked for.
        unsafe { call.run(handle) }
    }

    fn hipblasGemmEx_v2_64(
        handle: *mut c_void, transa: u32, transb: u32, m: i64, n: i64, k: i64,
        alpha: *const c_void, a: *const c_void, a_type: u32, lda: i64, b: *const c_void, b_type: u32, ldb: i64,
        beta: *const c_void, c: *mut c_void, c_type: u32, ldc: i64, compute_type: u32, algo: u32,
    ) {
        let call = Call {
            symbol: Symbol::V2, transpose: [transa, transb], sizes: [m, n, k],
            types: [a_type, b_type, c_type], compute_type, algo, alpha, beta, batch: Batch::One,
            matrices: [Matrix::new(a, lda, 0), Matrix::new(b, ldb, 0), Matrix::new(c, ldc, 0)],
        };
        // SAFETY: the caller's promises are the ones that are asked for.
        unsafe { call.run(handle) }
    }

    fn hipblasGemmStridedBatchedEx(
        handle: *mut c_void, transa: u32, transb: u32, m: i32, n: i32, k: i32,
        alpha: *const c_void, a: *const c_void, a_type: u32, lda: i32, stride_a: i64,
        b: *const c_void, b_type: u32, ldb: i32, stride_b: i64,
        beta: *const c_void, c: *mut c_void, c_type: u32, ldc: i32, stride_c: i64,
        batch_count: i32, compute_type: u32, algo: u32,
    ) {
        let call = Call {
            symbol: Symbol::Plain, transpose: [transa, transb], sizes: [m, n, k].map(i64::from),
            types: [a_type, b_type, c_type], compute_type, algo, alpha, beta, batch: Batch::Of(i64::from(batch_count)),
            matrices: [Matrix::new(a, lda, stride_a), Matrix::new(b, ldb, stride_b), Matrix::new(c, ldc, stride_c)],
        };
        // SAFETY: the caller's promises are the ones that are asked for.
        unsafe { call.run(handle) }
    }

    fn hipblasGemmStridedBatchedEx_64(
        handle: *mut c_void, transa: u32, transb: u32, m: i64, n: i64, k: i64,
        alpha: *const c_void, a: *const c_void, a_type: u32, lda: i64, stride_a: i64,
        b: *const c_void, b_type: u32, ldb: i64, stride_b: i64,
        beta: *const c_void, c: *mut c_void, c_type: u32, ldc: i64, stride_c: i64,
        batch_count: i64, compute_type: u32, algo: u32,
    ) {
        let call = Call {
            symbol: Symbol::Plain, transpose: [transa, transb], sizes: [m, n, k],
            types: [a_type, b_type, c_type], compute_type, algo, alpha, beta, batch: Batch::Of(batch_count),
            matrices: [Matrix::new(a, lda, stride_a), Matrix::new(b, ldb, stride_b), Matrix::new(c, ldc, stride_c)],
        };
        // SAFETY: the caller's promises are the ones that are asked for.
        unsafe { call.run(handle) }
    }

    fn hipblasGemmStridedBatchedEx_v2(
        handle: *mut c_void, transa: u32, transb: u32, m: i32, n: i32, k: i32,
        alpha: *const c_void, a: *const c_void, a_type: u32, lda: i32, stride_a: i64,
        b: *const c_void, b_type: u32, ldb: i32, stride_b: i64,
        beta: *const c_void, c: *mut c_void, c_type: u32, ldc: i32, stride_c: i64,
        batch_count: i32, compute_type: u32, algo: u32,
    ) {
        let call = Call {
            symbol: Symbol::V2, transpose: [transa, transb], sizes: [m, n, k].map(i64::from),
            types: [a_type, b_type, c_type], compute_type, algo, alpha, beta, batch: Batch::Of(i64::from(batch_count)),
            matrices: [Matrix::new(a, lda, stride_a), Matrix::new(b, ldb, stride_b), Matrix::new(c, ldc, stride_c)],
        };
        // SAFETY: the caller's promises are the ones that are asked for.
        unsafe { call.run(handle) }
    }

    fn hipblasGemmStridedBatchedEx_v2_64(
        handle: *mut c_void, transa: u32, transb: u32, m: i64, n: i64, k: i64,
        alpha: *const c_void, a: *const c_void, a_type: u32, lda: i64, stride_a: i64,
        b: *const c_void, b_type: u32, ldb: i64, stride_b: i64,
        beta: *const c_void, c: *mut c_void, c_type: u32, ldc: i64, stride_c: i64,
        batch_count: i64, compute_type: u32, algo: u32,
    ) {
        let call = Call {
            symbol: Symbol::V2, transpose: [transa, transb], sizes: [m, n, k],
            types: [a_type, b_type, c_type], compute_type, algo, alpha, beta, batch: Batch::Of(batch_count),
            matrices: [Matrix::new(a, lda, stride_a), Matrix::new(b, ldb, stride_b), Matrix::new(c, ldc, stride_c)],
        };
        // SAFETY: the caller's promises are the ones that are asked for.
        unsafe { call.run(handle) }
    }
}

/// The vendor's `hipblasStatusToString`.
#[unsafe(no_mangle)]
pub extern "C" fn hipblasStatusToString(code: u32) -> *const c_char {
    status::name(code).as_ptr()
}
