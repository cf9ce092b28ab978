//! The names of NVIDIA's libraries.
//!
//! The driver has had one file name since CUDA began. It is asked for with its version, because the name without one is
//! also that of the stub in a toolkit, which opens everywhere and drives nothing. cuBLASLt comes before cuBLAS: cuBLAS
//! depends on it and would otherwise take whichever the loader's path holds, perhaps of another version.

use highwater_core::driver::{LibraryName, VendorLibraries, VendorLibrary};

/// CUDA 13, and CUDA 12 where there is no 13.
pub(crate) static CUDA: VendorLibraries =
    VendorLibraries { vendor: "CUDA", libraries: &[NVIDIA_DRIVER, CUBLAS_LT, CUBLAS] };

const NVIDIA_DRIVER: VendorLibrary = VendorLibrary {
    what: "the NVIDIA driver",
    path_variable: "HIGHWATER_CUDA_LIBRARY",
    names: &[LibraryName::of_any("libcuda.so.1")],
    too_old: &[],
    required_symbols: &["cuInit"],
};

const CUBLAS_LT: VendorLibrary = VendorLibrary {
    what: "cuBLASLt",
    path_variable: "HIGHWATER_CUBLASLT_LIBRARY",
    names: &[LibraryName::of_major("libcublasLt.so.13", 13), LibraryName::of_major("libcublasLt.so.12", 12)],
    too_old: &[LibraryName::of_major("libcublasLt.so.11", 11)],
    required_symbols: &["cublasLtCreate"],
};

const CUBLAS: VendorLibrary = VendorLibrary {
    what: "cuBLAS",
    path_variable: "HIGHWATER_CUBLAS_LIBRARY",
    names: &[LibraryName::of_major("libcublas.so.13", 13), LibraryName::of_major("libcublas.so.12", 12)],
    too_old: &[],
    required_symbols: &["cublasCreate_v2"],
};
