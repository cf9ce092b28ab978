//! The ABI check: the exported functions against bindings that were generated from the vendor's headers. The bindings are of
//! hipBLAS 0.53, whose functions take arguments of the same sizes. Later functions take those of the ones they replace.

use highwater_simulated_blas::pairs;
use highwater_simulated_blas::signature::check;

use super::*;

#[test]
fn every_exported_function_has_the_types_of_the_vendors_header() {
    let functions = pairs! {
        hip_sys::hipblas, [unsafe extern "C" fn]:
        hipblasCreate = hipblasCreate(_);
        hipblasDestroy = hipblasDestroy(_);
        hipblasSetStream = hipblasSetStream(_, _);
        hipblasGetStream = hipblasGetStream(_, _);
        hipblasSetPointerMode = hipblasSetPointerMode(_, _);
        hipblasGetPointerMode = hipblasGetPointerMode(_, _);
        hipblasSetAtomicsMode = hipblasSetAtomicsMode(_, _);
        hipblasGetAtomicsMode = hipblasGetAtomicsMode(_, _);
        hipblasStatusToString = hipblasStatusToString(_);
        hipblasGemmEx = hipblasGemmEx(_, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _);
        hipblasGemmEx_v2 = hipblasGemmEx(_, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _);
        hipblasGemmStridedBatchedEx =
            hipblasGemmStridedBatchedEx(_, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _);
        hipblasGemmStridedBatchedEx_v2 =
            hipblasGemmStridedBatchedEx(_, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _);
    };
    check(&[functions]);
}
