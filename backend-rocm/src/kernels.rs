//! The search for rocBLAS's kernels of a device.
//!
//! hipBLAS calls rocBLAS, which reads its kernels from files beside itself. If it finds none for a device, it ends the
//! process at the first product. Creating a handle still succeeds. This module therefore looks for the files in the
//! same places before a handle is created.

use std::path::{Path, PathBuf};

use highwater_driver::{Library, environment_path, loaded_files};
use highwater_hal::{Error, ErrorKind, Result, display_foreign};

use crate::devices::bare;
use crate::libraries;

/// The variable that names the folder, for rocBLAS and for this module.
const VARIABLE: &str = "ROCBLAS_TENSILE_LIBPATH";
/// The folder of the kernels, relative to the library's folder.
const BESIDE: &str = "rocblas/library";

/// The folders in which rocBLAS looks for kernels.
#[derive(Debug)]
pub(crate) struct Kernels(Vec<PathBuf>);

impl Kernels {
    /// Finds the folders of the rocBLAS that `hipblas` uses.
    pub(crate) fn new(hipblas: &Library) -> Self {
        let libraries = [loaded_files("librocblas.so"), loaded_files("libhipblas.so"), vec![hipblas.name().into()]];
        Self(folders(environment_path(VARIABLE), &libraries.concat(), &libraries::releases()))
    }

    /// Checks that kernels for an architecture exist. Succeeds if this cannot be determined.
    ///
    /// # Errors
    /// `Unsupported`, with the file that is missing and the folders that were searched.
    pub(crate) fn check(&self, architecture: &str) -> Result<()> {
        let architecture = bare(architecture);
        let wanted = format!("TensileLibrary_lazy_{architecture}.dat");
        // If no folder exists, the check succeeds, because a rocBLAS may contain its kernels.
        if architecture.is_empty()
            || self.0.is_empty()
            || self.0.iter().any(|folder| has(folder, architecture, &wanted))
        {
            return Ok(());
        }
        let folders: Vec<String> = self.0.iter().map(|folder| display_foreign(folder).to_string()).collect();
        let message = format!(
            "rocBLAS has no kernels for {architecture} and would end the process at the first product; no {wanted} in {}",
            folders.join(", ")
        );
        Err(Error::new(ErrorKind::Unsupported, "create_blas_handle", message)
            .with_hint(format!("install the rocBLAS kernels for {architecture}, or set {VARIABLE} to their folder")))
    }
}

/// Returns whether the folder has the kernels. Builds of rocBLAS that read all kernels at once have one file for all.
fn has(folder: &Path, architecture: &str, wanted: &str) -> bool {
    let whole = ["TensileLibrary.dat".to_owned(), format!("TensileLibrary_{architecture}.dat")];
    // rocBLAS prefers the architecture's own folder.
    [folder.to_owned(), folder.join(architecture)]
        .iter()
        .any(|folder| folder.join(wanted).is_file() || whole.iter().any(|name| folder.join(name).is_file()))
}

/// Returns the folder in the variable, or the existing folders beside the libraries and in the releases.
fn folders(named: Option<PathBuf>, libraries: &[PathBuf], releases: &[PathBuf]) -> Vec<PathBuf> {
    if let Some(named) = named {
        return vec![named];
    }
    // rocBLAS resolves links to find its own folder.
    let real = libraries.iter().filter_map(|library| library.canonicalize().ok());
    let beside = libraries.iter().cloned().chain(real).filter_map(|library| Some(library.parent()?.join(BESIDE)));
    let mut found: Vec<PathBuf> = Vec::new();
    for folder in beside.chain(releases.iter().map(|release| release.join("lib").join(BESIDE))) {
        if folder.is_absolute() && folder.is_dir() && !found.contains(&folder) {
            found.push(folder);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that is removed with the test.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let root = std::env::temp_dir().join(format!("highwater-rocm-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&root).unwrap();
            Self(root)
        }

        fn with(&self, file: &str) -> &Self {
            let path = self.0.join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, b"").unwrap();
            self
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn an_architecture_without_kernels_is_refused_with_what_was_looked_for_and_where() {
        let scratch = Scratch::new("kernels");
        scratch.with("lib/librocblas.so.5").with("lib/rocblas/library/TensileLibrary_lazy_gfx90a.dat");
        let kernels = Kernels(folders(None, &[scratch.0.join("lib/librocblas.so.5")], &[]));
        assert!(kernels.check("gfx90a:sramecc+:xnack-").is_ok());
        let error = kernels.check("gfx1103:xnack-").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        let folder = scratch.0.join("lib/rocblas/library").display().to_string();
        assert!(
            error.message().contains("TensileLibrary_lazy_gfx1103.dat") && error.message().contains(&folder),
            "{error}"
        );
        assert!(error.hint().contains("ROCBLAS_TENSILE_LIBPATH"), "{error}");
    }

    #[test]
    fn the_folder_that_is_named_is_the_only_one() {
        let scratch = Scratch::new("named");
        scratch.with("lib/librocblas.so.5").with("lib/rocblas/library/TensileLibrary_lazy_gfx942.dat");
        let libraries = [scratch.0.join("lib/librocblas.so.5")];
        let kernels = |named: Option<&str>| Kernels(folders(named.map(PathBuf::from), &libraries, &[]));
        assert!(kernels(None).check("gfx942").is_ok());
        let error = kernels(Some("/no/such/folder")).check("gfx942").unwrap_err();
        assert!(error.message().contains("/no/such/folder"), "{error}");
    }

    #[test]
    fn releases_count_and_without_a_folder_nothing_is_refused() {
        let scratch = Scratch::new("releases");
        scratch.with("rocm/lib/rocblas/library/gfx942/TensileLibrary_lazy_gfx942.dat");
        scratch.with("rocm/lib/rocblas/library/TensileLibrary_gfx906.dat");
        let releases = [scratch.0.join("rocm"), scratch.0.join("rocm-7.0.0")];
        let kernels = Kernels(folders(None, &["libhipblas.so.3".into()], &releases));
        assert_eq!(kernels.0.len(), 1);
        assert!(
            kernels.check("gfx942").is_ok() && kernels.check("gfx906").is_ok() && kernels.check("gfx1100").is_err()
        );
        assert!(Kernels(folders(None, &["libhipblas.so.3".into()], &[])).check("gfx1100").is_ok());
    }
}
