//! The names of AMD's libraries.
//!
//! HIP and hipBLAS count their versions apart, and only pairs of one ROCm release work together: hipBLAS 3 takes other
//! data types under the same symbols than hipBLAS 2. So each hipBLAS carries the major version of the HIP it goes with.

use highwater_core::driver::{LibraryName, VendorLibraries, VendorLibrary};

/// HIP 7 with hipBLAS 3, and HIP 6 with hipBLAS 2 where there is no 7.
pub(crate) static ROCM: VendorLibraries = VendorLibraries { vendor: "ROCm", libraries: &[HIP, HIPBLAS] };

const HIP: VendorLibrary = VendorLibrary {
    what: "the HIP runtime",
    path_variable: "HIGHWATER_HIP_LIBRARY",
    names: &[LibraryName::of_major("libamdhip64.so.7", 7), LibraryName::of_major("libamdhip64.so.6", 6)],
    too_old: &[LibraryName::of_major("libamdhip64.so.5", 5)],
    required_symbols: &["hipInit"],
};

const HIPBLAS: VendorLibrary = VendorLibrary {
    what: "hipBLAS",
    path_variable: "HIGHWATER_HIPBLAS_LIBRARY",
    names: &[LibraryName::of_major("libhipblas.so.3", 7), LibraryName::of_major("libhipblas.so.2", 6)],
    too_old: &[],
    required_symbols: &["hipblasCreate"],
};
