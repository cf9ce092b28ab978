//! The names of AMD's libraries.
//!
//! HIP and hipBLAS have separate version numbers, and only pairs of one ROCm release work together. hipBLAS 3 takes
//! other numbers for the same types than hipBLAS 2. Each name of hipBLAS therefore carries the major version of its
//! HIP.

use std::path::{Path, PathBuf};

use highwater_driver::{LibraryName, VendorLibrary};
use highwater_hal::{Error, ErrorKind, display_foreign};

pub(crate) const HIP: VendorLibrary = VendorLibrary {
    what: "the HIP runtime",
    path_variable: "HIGHWATER_HIP_LIBRARY",
    names: &[LibraryName::of_major("libamdhip64.so.7", 7), LibraryName::of_major("libamdhip64.so.6", 6)],
    too_old: &[LibraryName::of_major("libamdhip64.so.5", 5)],
    required_symbols: &["hipInit"],
};

pub(crate) const HIPBLAS: VendorLibrary = VendorLibrary {
    what: "hipBLAS",
    path_variable: "HIGHWATER_HIPBLAS_LIBRARY",
    names: &[LibraryName::of_major("libhipblas.so.3", 7), LibraryName::of_major("libhipblas.so.2", 6)],
    too_old: &[],
    required_symbols: &["hipblasCreate"],
};

pub(crate) const HIPBLASLT: VendorLibrary = VendorLibrary {
    what: "hipBLASLt",
    path_variable: "HIGHWATER_HIPBLASLT_LIBRARY",
    // Debian builds version 1 for HIP 6 too.
    names: &[LibraryName::of_major("libhipblaslt.so.0", 6), LibraryName::of_any("libhipblaslt.so.1")],
    too_old: &[],
    required_symbols: &["hipblasLtCreate"],
};

/// Returns the library folders of AMD's installer beyond the loader's path: the default release, then the others,
/// newest first.
pub(crate) fn folders() -> Vec<PathBuf> {
    releases().into_iter().map(|release| release.join("lib")).collect()
}

/// Returns the folders of ROCm releases.
pub(crate) fn releases() -> Vec<PathBuf> {
    releases_in(Path::new("/opt"))
}

fn releases_in(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = entries
        .filter(|entry| {
            let name = entry.file_name();
            name.to_str().is_some_and(|name| name == "rocm" || name.starts_with("rocm-"))
        })
        .map(|entry| entry.path())
        .collect();
    found.sort_by_key(|path| (path.file_name().is_none_or(|name| name != "rocm"), std::cmp::Reverse(path.clone())));
    found
}

/// Returns the major version of the HIP that this process has loaded, if any. A second major version does not load, or
/// breaks the first.
///
/// # Errors
/// `InvalidState` if `given` has another major version, and `Unsupported` if the loaded version is too old.
pub(crate) fn loaded_major(loaded: Option<(PathBuf, LibraryName)>, given: Option<&Path>) -> Result<Option<u32>, Error> {
    let Some((file, major)) = loaded.and_then(|(file, name)| Some((file, name.major?))) else { return Ok(None) };
    let refused = |wanted: &str, hint: String| {
        let message = format!(
            "{wanted}, but the process has loaded {} of major version {major}, and two major versions of HIP do not work in one process",
            display_foreign(&file)
        );
        Err(Error::new(ErrorKind::InvalidState, "open", message).with_hint(hint))
    };
    if HIP.too_old.iter().any(|name| name.major == Some(major)) {
        let accepted: Vec<&str> = HIP.names.iter().map(|name| name.file).collect();
        let message = format!(
            "{} (major version {major}) is too old to be used as {}, and the process has loaded it already",
            display_foreign(&file),
            HIP.what
        );
        return Err(Error::new(ErrorKind::Unsupported, "open", message)
            .with_hint(format!("install a version with {}, and use it in the whole process", accepted.join(" or "))));
    }
    let wanted = given.and_then(|path| HIP.name_of(path));
    match wanted.and_then(|name| name.major) {
        Some(wanted) if wanted != major => refused(
            &format!("HIP {wanted} was requested"),
            format!("point {} at a file of major version {major}, or unset it", HIP.path_variable),
        ),
        _ => Ok(Some(major)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_release_comes_first_and_then_the_newest() {
        let root = std::env::temp_dir().join(format!("highwater-rocm-releases-{}", std::process::id()));
        for release in ["rocm-6.4.3", "rocm", "rocm-7.0.1", "rocminfo", "other"] {
            std::fs::create_dir_all(root.join(release)).unwrap();
        }
        let found = releases_in(&root);
        // Failed once, with one release missing. If it fails again, this says whether the folder was there.
        let there: Vec<_> =
            std::fs::read_dir(&root).unwrap().map(|entry| entry.map(|entry| entry.file_name())).collect();
        assert_eq!(found, ["rocm", "rocm-7.0.1", "rocm-6.4.3"].map(|release| root.join(release)), "{there:?}");
        std::fs::remove_dir_all(&root).unwrap();
        assert!(releases_in(&root).is_empty());
    }

    fn there(file: &str) -> Option<(PathBuf, LibraryName)> {
        let path = PathBuf::from("/somewhere").join(file);
        let name = HIP.name_of(&path).unwrap();
        Some((path, name))
    }

    #[test]
    fn a_second_major_version_of_hip_is_refused() {
        assert_eq!(loaded_major(None, None).unwrap(), None);
        assert_eq!(loaded_major(there("libamdhip64.so.6.4.43484"), None).unwrap(), Some(6));
        let same = Path::new("/elsewhere/libamdhip64.so.6");
        assert_eq!(loaded_major(there("libamdhip64.so.6"), Some(same)).unwrap(), Some(6));
        let error = loaded_major(there("libamdhip64.so.7"), Some(same)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidState);
        assert!(error.message().contains("HIP 6 was requested"), "{error}");
        assert!(error.message().contains("/somewhere/libamdhip64.so.7 of major version 7"), "{error}");
        assert!(error.hint().contains("HIGHWATER_HIP_LIBRARY"), "{error}");
        let error = loaded_major(there("libamdhip64.so.5"), None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.hint().contains("libamdhip64.so.7 or libamdhip64.so.6"), "{error}");
    }
}
