//! hipBLASLt: its numbers and its opening.
//!
//! The numbers are those of its header, version 1.2.2 (ROCm 7.2.4). The backend's numbers are the same in version 0.10 (ROCm 6.3).

use std::path::PathBuf;

use highwater_driver::{Epilogues, Lt, LtCalls, LtCodes, ProductAttributes, Search};
use highwater_hal::Error;

use crate::codes::HIPBLASLT;
use crate::libraries;

pub(crate) static HIPBLAS_LT: LtCodes = LtCodes {
    codes: &HIPBLASLT,
    name: "hipBLASLt",
    product: ProductAttributes { transpose_a: 0, transpose_b: 1, epilogue: 2, bias: 3, bias_type: 4 },
    batch_count: 0,
    batch_stride: 1,
    max_workspace: 1,
    // The library has no such preference. The heuristic assumes that operands are aligned to their elements only.
    alignments: None,
    // The library offers no choice of reduction scheme.
    reductions: None,
    epilogues: Epilogues { none: 1, relu: 2, bias: 4, bias_relu: 6, gelu: 32, bias_gelu: 36 },
    // 16 opaque bytes, and the largest workspace.
    algorithm_bytes: 24,
    // Twice the memory of a handle, because other threads and processes may allocate after the check.
    needs_free_bytes: 50 << 20,
};

/// Returns hipBLASLt's symbol for a name in the tables.
pub(crate) fn lt_symbol(name: &str) -> String {
    format!("hipblasLt{name}")
}

/// The result of opening hipBLASLt: the library, or the reason why it is absent.
pub(crate) enum Opening {
    Opened(Lt),
    Absent(String),
}

/// Opens hipBLASLt, which is optional unless a variable names its file.
///
/// # Errors
/// The error of a library that a variable names.
///
/// # Safety
/// The caller must ensure that the usual names, the file of `paths` and the files in the search's folders are AMD's
/// libraries, and that this process may run their constructors.
pub(crate) unsafe fn open(
    search: &mut Search,
    paths: &dyn Fn(&str) -> Option<PathBuf>,
    major: u32,
) -> Result<Opening, Error> {
    let library = &libraries::HIPBLASLT;
    let given = paths(library.path_variable);
    // SAFETY: As the caller promises.
    let found = unsafe { search.open(library, given.as_deref(), |name| name.major.is_none_or(|of| of == major)) };
    let loaded = found.and_then(|found| {
        // SAFETY: The library has this name, or a variable names it. It exports its own symbols.
        unsafe { LtCalls::load(&found.library, lt_symbol) }
            .map_err(|missing| found.lacks(&missing, "install the hipBLASLt of the same ROCm release as HIP"))
    });
    match loaded {
        Ok(calls) => Ok(Opening::Opened(Lt { calls, codes: &HIPBLAS_LT })),
        Err(error) if given.is_some() => Err(error),
        Err(error) => Ok(Opening::Absent(error.message().to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_symbols_are_those_of_the_header() {
        let symbols: Vec<String> = LtCalls::NAMES.iter().map(|(_, name)| lt_symbol(name)).collect();
        let expected = [
            "hipblasLtCreate",
            "hipblasLtDestroy",
            "hipblasLtMatmulDescCreate",
            "hipblasLtMatmulDescDestroy",
            "hipblasLtMatmulDescSetAttribute",
            "hipblasLtMatrixLayoutCreate",
            "hipblasLtMatrixLayoutDestroy",
            "hipblasLtMatrixLayoutSetAttribute",
            "hipblasLtMatmulPreferenceCreate",
            "hipblasLtMatmulPreferenceDestroy",
            "hipblasLtMatmulPreferenceSetAttribute",
            "hipblasLtMatmulAlgoGetHeuristic",
            "hipblasLtMatmul",
        ];
        assert_eq!(symbols, expected);
    }
}
