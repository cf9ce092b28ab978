//! The exported functions against bindings that were generated from the vendor's headers.

use cudarc::cublas::sys;
use highwater_simulated_blas::signature::Signature;

macro_rules! same {
    ($($name:ident($($argument:tt),*);)*) => {
        [$((
            stringify!($name),
            (super::$name as unsafe extern "C" fn($($argument),*) -> _).classes(),
            (sys::$name as unsafe fn($($argument),*) -> _).classes(),
        )),*]
    };
}

#[test]
fn every_exported_function_has_the_types_of_the_vendors_header() {
    let functions = same! {
        cublasCreate_v2(_);
        cublasDestroy_v2(_);
        cublasGetVersion_v2(_, _);
        cublasGetProperty(_, _);
        cublasSetStream_v2(_, _);
        cublasGetStream_v2(_, _);
        cublasSetWorkspace_v2(_, _, _);
        cublasSetMathMode(_, _);
        cublasGetMathMode(_, _);
        cublasSetAtomicsMode(_, _);
        cublasGetAtomicsMode(_, _);
        cublasSetPointerMode_v2(_, _);
        cublasGetPointerMode_v2(_, _);
        cublasSetSmCountTarget(_, _);
        cublasGetSmCountTarget(_, _);
        cublasSetEmulationStrategy(_, _);
        cublasGetEmulationStrategy(_, _);
        cublasSgemm_v2(_, _, _, _, _, _, _, _, _, _, _, _, _, _);
        cublasDgemm_v2(_, _, _, _, _, _, _, _, _, _, _, _, _, _);
        cublasSgemmStridedBatched(_, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _);
        cublasGemmEx(_, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _);
        cublasGemmEx_64(_, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _);
        cublasGemmStridedBatchedEx(_, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _);
        cublasGemmStridedBatchedEx_64(_, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _);
        cublasGetStatusName(_);
        cublasGetStatusString(_);
    };
    for (name, ours, theirs) in functions {
        assert_eq!(ours, theirs, "{name}");
    }
}
