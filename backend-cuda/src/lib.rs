//! The CUDA backend of Highwater: NVIDIA's driver, cuBLASLt and cuBLAS, opened at run time.
//!
//! Nothing of CUDA is needed to build it, and a program that holds it starts on a machine without any. This version
//! finds the libraries and says exactly what is missing; it drives no device yet. Which calls it will make is written
//! down in `docs/driver-mapping.md` of the repository.

mod libraries;

use highwater_core::{Backend, driver};

/// Opens the backend, or says what is missing.
///
/// # Errors
/// `LibraryMissing`, with every name tried and the loader's words, where a library cannot be opened; `SymbolMissing`
/// where one lacks what it should have; `InvalidArgument` where the variables `HIGHWATER_CUDA_LIBRARY`,
/// `HIGHWATER_CUBLASLT_LIBRARY` and `HIGHWATER_CUBLAS_LIBRARY` name files that do not go together; `Unsupported` where
/// CUDA was found, because this version does not drive it.
pub fn open() -> Result<std::sync::Arc<dyn Backend>, driver::Unavailable> {
    // SAFETY: NVIDIA's libraries are made to be opened by any process at any time, and the variables belong to whoever
    // starts the process.
    Err(unsafe { libraries::CUDA.probe(driver::environment_path) })
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use highwater_core::ErrorKind;

    use super::*;

    /// The answer with the driver's library named by its variable.
    fn with_driver(path: &Path) -> driver::Unavailable {
        let paths = |variable: &str| (variable == "HIGHWATER_CUDA_LIBRARY").then(|| path.to_owned());
        // SAFETY: the paths of these tests are the C library, which is in this process already, or do not exist.
        unsafe { libraries::CUDA.probe(paths) }
    }

    fn c_library() -> PathBuf {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let path = maps.lines().find_map(|line| line.split_whitespace().find(|word| word.ends_with("/libc.so.6")));
        PathBuf::from(path.expect("this test binary is linked to the C library"))
    }

    #[test]
    fn a_path_that_does_not_exist_is_a_missing_library() {
        let answer = with_driver(Path::new("/no/such/libcuda.so.1"));
        assert_eq!(answer.error.kind(), ErrorKind::LibraryMissing);
        assert!(answer.error.message().contains("/no/such/libcuda.so.1"), "{answer}");
        assert!(answer.error.hint().contains("HIGHWATER_CUDA_LIBRARY is set"), "{answer}");
    }

    #[test]
    fn a_library_that_is_not_the_driver_lacks_its_symbols() {
        let answer = with_driver(&c_library());
        assert_eq!(answer.error.kind(), ErrorKind::SymbolMissing);
        assert!(answer.error.message().contains("cuInit"), "{answer}");
        assert_eq!(answer.opened, [c_library().display().to_string()]);
    }

    #[test]
    fn opening_answers_with_what_was_found_or_with_what_was_tried() {
        let answer = open().unwrap_err();
        match answer.error.kind() {
            ErrorKind::LibraryMissing => assert!(!answer.tried.is_empty()),
            ErrorKind::Unsupported => assert_eq!(answer.opened.len(), libraries::CUDA.libraries.len()),
            other => panic!("{other}: {answer}"),
        }
    }
}
