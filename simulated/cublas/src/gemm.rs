//! Products: what the arguments of a call say, and what of it is refused.

use std::ffi::c_void;

use highwater_simulated_blas::driver::Driver;
use highwater_simulated_blas::product::{Batch, Call, Matrix};
use highwater_simulated_blas::status::INVALID_VALUE;
use highwater_simulated_blas::table::Product;
use highwater_simulated_blas::types::Compute;

use crate::handle::Workspace;

/// The call for one product of matrices of one type, `cudaDataType`.
pub(crate) fn of_one_type(
    data_type: u32,
    compute_type: u32,
    transpose: [u32; 2],
    sizes: [i64; 3],
    alpha: *const c_void,
    beta: *const c_void,
    matrices: [Matrix; 3],
) -> Call {
    let types = [data_type; 3];
    Call { transpose, sizes, types, compute_type, algo: -1, alpha, beta, matrices, batch: Batch::One }
}

/// Checks a call and enqueues the product.
///
/// # Safety
/// `handle` is null or was given by `cublasCreate_v2`; alpha and beta are null or valid, on the host or the device as
/// the handle's pointer mode says; the bound stream is one of the driver.
pub(crate) unsafe fn run(call: &Call, handle: *mut c_void) -> Result<(), u32> {
    // The handle is copied out: the real library takes no lock over a call either, so two threads that share a handle
    // meet in its workspace.
    // SAFETY: forwarded to the caller.
    let (bound, workspace) = unsafe { crate::with(handle, |state| Ok((state.bound(), state.workspace()))) }?;
    // `cublasOperation_t` counts from 0.
    let shape = call.transposes(0).and_then(|transpose| call.shape(transpose)).ok_or(INVALID_VALUE)?;
    // `cublasGemmAlgo_t`; any there is will do.
    if !matches!(call.algo, -1..=23 | 99..=115) || call.alpha.is_null() || call.beta.is_null() {
        return Err(INVALID_VALUE);
    }
    let compute = Compute::new(call.compute_type)?;
    let [a, b, c] = call.types;
    compute.check(call.compute_type, a, b, c)?;
    if shape.is_empty() {
        return Ok(());
    }
    // SAFETY: the caller says that alpha and beta are valid; on the host they are read during the call.
    let product = unsafe { call.product(&shape, [a, c], compute, &bound) };
    let driver = Driver::get()?;
    // SAFETY: forwarded to the caller.
    unsafe {
        match workspace {
            Workspace::Own => driver.launch_on_own_workspace(&product),
            Workspace::Bound { address, bytes } => {
                driver.launch(&Product { workspace: address, workspace_bytes: bytes, ..product })
            }
            Workspace::None => driver.launch(&product),
        }
    }
}
