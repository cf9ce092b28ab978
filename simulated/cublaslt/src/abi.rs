//! The ABI check: the exported functions against bindings that were generated from the vendor's headers.

use cudarc::cublaslt::sys;
use highwater_simulated_blas::pairs;
use highwater_simulated_blas::signature::check;

use super::*;

#[test]
fn every_exported_function_has_the_types_of_the_vendors_header() {
    let without_code = pairs! {
        sys, [unsafe fn]:
        cublasLtGetVersion = cublasLtGetVersion();
        cublasLtGetStatusName = cublasLtGetStatusName(_);
        cublasLtGetStatusString = cublasLtGetStatusString(_);
    };
    check(&[signatures(), without_code]);
}

#[test]
fn structures_and_numbers_are_those_of_the_vendors_header() {
    use highwater_simulated_blas::{status, types};
    use sys::cublasLtMatmulDescAttributes_t as Description;
    use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
    use sys::cublasLtMatrixLayoutAttribute_t as Layout;

    assert_eq!(size_of::<sys::cublasLtMatmulHeuristicResult_t>(), size_of::<crate::HeuristicResult>());
    assert_eq!(size_of::<sys::cublasLtMatmulAlgo_t>(), size_of::<crate::Algorithm>());
    assert_eq!(std::mem::offset_of!(sys::cublasLtMatmulHeuristicResult_t, workspaceSize), 64);
    let numbers = [
        (types::R_32F, sys::cudaDataType::CUDA_R_32F as u32),
        (types::R_64F, sys::cudaDataType::CUDA_R_64F as u32),
        (types::R_16F, sys::cudaDataType::CUDA_R_16F as u32),
        (types::R_16BF, sys::cudaDataType::CUDA_R_16BF as u32),
        (status::NOT_INITIALIZED, sys::cublasStatus_t::CUBLAS_STATUS_NOT_INITIALIZED as u32),
        (status::ALLOC_FAILED, sys::cublasStatus_t::CUBLAS_STATUS_ALLOC_FAILED as u32),
        (status::INVALID_VALUE, sys::cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE as u32),
        (status::EXECUTION_FAILED, sys::cublasStatus_t::CUBLAS_STATUS_EXECUTION_FAILED as u32),
        (status::INTERNAL_ERROR, sys::cublasStatus_t::CUBLAS_STATUS_INTERNAL_ERROR as u32),
        (status::NOT_SUPPORTED, sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED as u32),
        (2, Description::CUBLASLT_MATMUL_DESC_POINTER_MODE as u32),
        (3, Description::CUBLASLT_MATMUL_DESC_TRANSA as u32),
        (4, Description::CUBLASLT_MATMUL_DESC_TRANSB as u32),
        (7, Description::CUBLASLT_MATMUL_DESC_EPILOGUE as u32),
        (8, Description::CUBLASLT_MATMUL_DESC_BIAS_POINTER as u32),
        (10, Description::CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE as u32),
        (26, Description::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE as u32),
        (4, Layout::CUBLASLT_MATRIX_LAYOUT_LD as u32),
        (5, Layout::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT as u32),
        (6, Layout::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET as u32),
        (1, Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES as u32),
        (5, Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES as u32),
        (8, Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES as u32),
        (68, sys::cublasComputeType_t::CUBLAS_COMPUTE_32F as u32),
        (77, sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32 as u32),
        (70, sys::cublasComputeType_t::CUBLAS_COMPUTE_64F as u32),
        (64, sys::cublasComputeType_t::CUBLAS_COMPUTE_16F as u32),
        (4, sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32),
        (36, sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_BIAS as u32),
    ];
    for (index, (ours, theirs)) in numbers.into_iter().enumerate() {
        assert_eq!(ours, theirs, "entry {index}");
    }
}
