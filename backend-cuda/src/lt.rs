//! The numbers of cuBLASLt.

use cudarc::cublaslt::sys;
use highwater_driver::{Epilogues, LtCodes, ProductAttributes, Reductions};

use crate::codes::CUBLAS;

use sys::cublasLtEpilogue_t as Epilogue;
use sys::cublasLtMatmulDescAttributes_t as Product;
use sys::cublasLtMatmulHeuristicResult_t as HeuristicResult;
use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
use sys::cublasLtMatrixLayoutAttribute_t as Layout;
use sys::cublasLtReductionScheme_t as Reduction;

pub(crate) static CUBLAS_LT: LtCodes = LtCodes {
    codes: &CUBLAS,
    name: "cuBLASLt",
    product: ProductAttributes {
        transpose_a: Product::CUBLASLT_MATMUL_DESC_TRANSA as u32,
        transpose_b: Product::CUBLASLT_MATMUL_DESC_TRANSB as u32,
        epilogue: Product::CUBLASLT_MATMUL_DESC_EPILOGUE as u32,
        bias: Product::CUBLASLT_MATMUL_DESC_BIAS_POINTER as u32,
        bias_type: Product::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE as u32,
    },
    batch_count: Layout::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT as u32,
    batch_stride: Layout::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET as u32,
    max_workspace: Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES as u32,
    alignments: Some([
        Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES as u32,
        Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES as u32,
        Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES as u32,
        Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES as u32,
    ]),
    reductions: Some(Reductions {
        attribute: Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK as u32,
        in_order: Reduction::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32,
        in_place: Reduction::CUBLASLT_REDUCTION_SCHEME_INPLACE as u32,
    }),
    epilogues: Epilogues {
        none: Epilogue::CUBLASLT_EPILOGUE_DEFAULT as u32,
        bias: Epilogue::CUBLASLT_EPILOGUE_BIAS as u32,
        relu: Epilogue::CUBLASLT_EPILOGUE_RELU as u32,
        bias_relu: Epilogue::CUBLASLT_EPILOGUE_RELU_BIAS as u32,
        gelu: Epilogue::CUBLASLT_EPILOGUE_GELU as u32,
        bias_gelu: Epilogue::CUBLASLT_EPILOGUE_GELU_BIAS as u32,
    },
    algorithm_bytes: size_of::<sys::cublasLtMatmulAlgo_t>(),
    needs_free_bytes: 0,
};

// The order of the fields that the driver reads: the algorithm, the bytes of workspace, the status.
const _: () = {
    assert!(size_of::<HeuristicResult>() == 96 && size_of::<sys::cublasLtMatmulAlgo_t>() == 64);
    assert!(std::mem::offset_of!(HeuristicResult, workspaceSize) == 64);
    assert!(std::mem::offset_of!(HeuristicResult, state) == 72);
};
