//! The exported functions against bindings that were generated from the vendor's headers. Those are of hipBLAS 0.53, whose
//! functions have the same arguments, as far as their sizes go; the ones that came later have those of the ones they replace.

use highwater_simulated_blas::signature::Signature;
use hip_sys::hipblas as vendor;

macro_rules! same {
    ($($name:ident = $theirs:ident($($argument:tt),*);)*) => {
        [$((
            stringify!($name),
            (super::$name as unsafe extern "C" fn($($argument),*) -> _).classes(),
            (vendor::$theirs as unsafe extern "C" fn($($argument),*) -> _).classes(),
        )),*]
    };
}

#[test]
fn every_exported_function_has_the_types_of_the_vendors_header() {
    let functions = same! {
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
    for (name, ours, theirs) in functions {
        assert_eq!(ours, theirs, "{name}");
    }
}
