//! The ABI check: the exported functions against bindings that were generated from the vendor's headers.

use cudarc::cublas::sys;
use highwater_simulated_blas::pairs;
use highwater_simulated_blas::signature::check;

use super::*;

#[test]
fn every_exported_function_has_the_types_of_the_vendors_header() {
    let names = pairs! {
        sys, [unsafe fn]:
        cublasGetStatusName = cublasGetStatusName(_);
        cublasGetStatusString = cublasGetStatusString(_);
    };
    check(&[signatures(), gemm_signatures(), names]);
}
