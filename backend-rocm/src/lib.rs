//! The ROCm backend of Highwater: AMD's HIP runtime and hipBLAS, opened at run time.
//!
//! Nothing of ROCm is needed to build it, and a program that holds it starts on a machine without any. This version
//! finds the libraries and says exactly what is missing; it drives no device yet. Which calls it will make is written
//! down in `docs/driver-mapping.md` of the repository.

mod libraries;

use highwater_core::{Backend, driver};

/// Opens the backend, or says what is missing.
///
/// # Errors
/// `LibraryMissing`, with every name tried and the loader's words, where a library cannot be opened; `SymbolMissing`
/// where one lacks what it should have; `InvalidArgument` where the variables `HIGHWATER_HIP_LIBRARY` and
/// `HIGHWATER_HIPBLAS_LIBRARY` name files of different major versions; `Unsupported` where only HIP 5 was found, which
/// is too old, and where ROCm was found, because this version does not drive it.
pub fn open() -> Result<std::sync::Arc<dyn Backend>, driver::Unavailable> {
    // SAFETY: AMD's libraries are made to be opened by any process at any time, and the variables belong to whoever
    // starts the process. Only one major version of HIP is opened: two in one process do not load.
    Err(unsafe { libraries::ROCM.probe(driver::environment_path) })
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use highwater_core::ErrorKind;

    use super::*;

    /// The answer with the HIP runtime named by its variable.
    fn with_runtime(path: &Path) -> driver::Unavailable {
        let paths = |variable: &str| (variable == "HIGHWATER_HIP_LIBRARY").then(|| path.to_owned());
        // SAFETY: the paths of these tests are the C library, which is in this process already, or do not exist.
        unsafe { libraries::ROCM.probe(paths) }
    }

    fn c_library() -> PathBuf {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let path = maps.lines().find_map(|line| line.split_whitespace().find(|word| word.ends_with("/libc.so.6")));
        PathBuf::from(path.expect("this test binary is linked to the C library"))
    }

    #[test]
    fn a_path_that_does_not_exist_is_a_missing_library() {
        let answer = with_runtime(Path::new("/no/such/libamdhip64.so.7"));
        assert_eq!(answer.error.kind(), ErrorKind::LibraryMissing);
        assert!(answer.error.message().contains("/no/such/libamdhip64.so.7"), "{answer}");
        assert!(answer.error.hint().contains("HIGHWATER_HIP_LIBRARY is set"), "{answer}");
    }

    #[test]
    fn a_library_that_is_not_the_runtime_lacks_its_symbols() {
        let answer = with_runtime(&c_library());
        assert_eq!(answer.error.kind(), ErrorKind::SymbolMissing);
        assert!(answer.error.message().contains("hipInit"), "{answer}");
        assert_eq!(answer.opened, [c_library().display().to_string()]);
    }

    #[test]
    fn hip_5_is_refused_by_name() {
        // A link to the C library under the name of the old runtime: what counts is the name.
        let folder = std::env::temp_dir().join(format!("highwater-hip5-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let link = folder.join("libamdhip64.so.5");
        std::os::unix::fs::symlink(c_library(), &link).unwrap();
        let answer = with_runtime(&link);
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(answer.error.kind(), ErrorKind::Unsupported);
        assert!(answer.error.message().contains("(major version 5) is too old"), "{answer}");
        assert!(answer.error.hint().contains("libamdhip64.so.7 or libamdhip64.so.6"), "{answer}");
    }

    #[test]
    fn opening_answers_with_what_was_found_or_with_what_was_tried() {
        let answer = open().unwrap_err();
        match answer.error.kind() {
            ErrorKind::LibraryMissing => assert!(!answer.tried.is_empty()),
            ErrorKind::Unsupported => assert!(!answer.opened.is_empty()),
            other => panic!("{other}: {answer}"),
        }
    }
}
