//! Products: what the arguments of a call say, and what of it is refused.

use std::ffi::c_void;

use highwater_simulated_blas::product::Call;
use highwater_simulated_blas::table::Product;
use highwater_simulated_blas::types::{Compute, R_16BF, R_16F, R_32F, R_64F, of_hip_compute};

use highwater_simulated_blas::hip_status::{INVALID_ENUM, INVALID_VALUE, NOT_SUPPORTED};
use highwater_simulated_blas::runtime::Runtime;

/// Which symbol was called, and so which numbers stand for the types.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Symbol {
    /// Without a suffix: `hipblasDatatype_t` in hipBLAS 2, and as `V2` in hipBLAS 3.
    Plain,
    /// With `_v2`: `hipDataType` and `hipblasComputeType_t`.
    V2,
}

/// The numbers of hipBLAS before version 3, `hipblasDatatype_t`, for elements and for the computation.
fn old_type(number: u32) -> Result<u32, u32> {
    match number {
        150 => Ok(R_16F),
        151 => Ok(R_32F),
        152 => Ok(R_64F),
        168 => Ok(R_16BF),
        153..=155 | 160..=167 | 169 => Err(NOT_SUPPORTED),
        _ => Err(INVALID_ENUM),
    }
}

/// Types of A, B, C, and the computation, in the numbers of CUDA.
fn meaning(symbol: Symbol, major: u32, types: [u32; 3], compute_type: u32) -> Result<([u32; 3], u32), u32> {
    if symbol == Symbol::V2 || major >= 3 {
        // The elements' numbers are CUDA's; what they mean is checked with the computation.
        return Ok((types, of_hip_compute(compute_type).ok_or(NOT_SUPPORTED)?));
    }
    let [a, b, c] = types.map(old_type);
    let compute = match old_type(compute_type)? {
        R_16F => 64,
        R_32F => 68,
        R_64F => 70,
        _ => return Err(NOT_SUPPORTED),
    };
    Ok(([a?, b?, c?], compute))
}

/// Checks a call and enqueues the product.
///
/// # Safety
/// `handle` is null or was given by `hipblasCreate`; alpha and beta are null or valid, on the host or the device as
/// the handle's pointer mode says; the bound stream is one of the runtime.
pub(crate) unsafe fn run(call: &Call, handle: *mut c_void, symbol: Symbol) -> Result<(), u32> {
    // The handle is copied out: the real library takes no lock over a call either, so two threads that share a handle
    // meet in its workspace.
    // SAFETY: forwarded to the caller.
    let (bound, (workspace, workspace_bytes)) =
        unsafe { crate::with(handle, |state| Ok((state.bound(), state.workspace()))) }?;
    let runtime = Runtime::get()?;
    // `hipblasOperation_t` counts from 111.
    let transpose = call.transposes(111).ok_or(INVALID_ENUM)?;
    let ([a, b, c], compute_type) = meaning(symbol, runtime.major, call.types, call.compute_type)?;
    // `hipblasGemmAlgo_t`; there is one.
    if call.algo != 160 {
        return Err(INVALID_ENUM);
    }
    let shape = call.shape(transpose).ok_or(INVALID_VALUE)?;
    let compute = Compute::new(compute_type).map_err(|_| NOT_SUPPORTED)?;
    compute.check(compute_type, a, b, c).map_err(|_| NOT_SUPPORTED)?;
    // No tested architecture has TF32 (seen with hipBLAS 2.4 and 3.2 on gfx942 and gfx1100).
    if compute.tf32 {
        return Err(NOT_SUPPORTED);
    }
    if shape.is_empty() {
        return Ok(());
    }
    if call.alpha.is_null() || call.beta.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller says that alpha and beta are valid; on the host they are read during the call.
    let product = unsafe { call.product(&shape, [a, c], compute, &bound) };
    runtime.need_kernels();
    // SAFETY: forwarded to the caller.
    unsafe { runtime.launch(&Product { workspace, workspace_bytes, ..product }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_symbol_takes_the_numbers_of_its_version() {
        let new = |symbol, major| meaning(symbol, major, [R_16BF, R_16BF, R_32F], 2);
        assert_eq!(new(Symbol::V2, 2), Ok(([R_16BF, R_16BF, R_32F], 68)));
        assert_eq!(new(Symbol::Plain, 3), Ok(([R_16BF, R_16BF, R_32F], 68)));
        assert_eq!(new(Symbol::Plain, 2), Err(INVALID_ENUM));
        let old = |symbol, major| meaning(symbol, major, [168, 168, 151], 151);
        assert_eq!(old(Symbol::Plain, 2), Ok(([R_16BF, R_16BF, R_32F], 68)));
        assert_eq!(old(Symbol::Plain, 3), Err(NOT_SUPPORTED));
        assert_eq!(meaning(Symbol::Plain, 2, [152; 3], 152), Ok(([R_64F; 3], 70)));
        assert_eq!(meaning(Symbol::Plain, 2, [160, 160, 162], 162), Err(NOT_SUPPORTED));
    }
}
