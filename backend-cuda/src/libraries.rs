//! The names of NVIDIA's libraries.
//!
//! The driver has always had one file name. The name without a version is never opened, because it is also the name of
//! a toolkit's stub, which opens on any machine and drives no device. cuBLASLt is opened before cuBLAS. Otherwise,
//! cuBLAS would load any version of it on the loader's path.

use std::path::{Path, PathBuf};

use highwater_driver::{LibraryName, VendorLibrary};

pub(crate) const NVIDIA_DRIVER: VendorLibrary = VendorLibrary {
    what: "the NVIDIA driver",
    path_variable: "HIGHWATER_CUDA_LIBRARY",
    names: &[LibraryName::of_any("libcuda.so.1")],
    too_old: &[],
    required_symbols: &["cuInit"],
};

pub(crate) const CUBLAS_LT: VendorLibrary = VendorLibrary {
    what: "cuBLASLt",
    path_variable: "HIGHWATER_CUBLASLT_LIBRARY",
    names: &[LibraryName::of_major("libcublasLt.so.13", 13), LibraryName::of_major("libcublasLt.so.12", 12)],
    too_old: &[LibraryName::of_major("libcublasLt.so.11", 11)],
    required_symbols: &["cublasLtCreate"],
};

pub(crate) const CUBLAS: VendorLibrary = VendorLibrary {
    what: "cuBLAS",
    path_variable: "HIGHWATER_CUBLAS_LIBRARY",
    names: &[LibraryName::of_major("libcublas.so.13", 13), LibraryName::of_major("libcublas.so.12", 12)],
    too_old: &[LibraryName::of_major("libcublas.so.11", 11)],
    required_symbols: &["cublasCreate_v2"],
};

/// Returns the folders of NVIDIA's installers beyond the loader's path: the packages of a Python environment, then the
/// toolkit.
pub(crate) fn folders(environment: Option<PathBuf>) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    if let Some(environment) = environment {
        let versions = std::fs::read_dir(environment.join("lib")).into_iter().flatten().flatten();
        let mut packages: Vec<PathBuf> = versions.map(|entry| entry.path().join("site-packages/nvidia")).collect();
        packages.sort();
        for package in packages.into_iter().rev() {
            folders.extend(
                ["cu13/lib", "cublas/lib"].map(|folder| package.join(folder)).into_iter().filter(|path| path.is_dir()),
            );
        }
    }
    let toolkit = Path::new("/usr/local/cuda");
    folders.extend(["lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"].map(|folder| toolkit.join(folder)));
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_packages_of_a_python_environment_come_before_the_toolkit() {
        let root = std::env::temp_dir().join(format!("highwater-folders-{}", std::process::id()));
        let package = root.join("lib/python3.12/site-packages/nvidia/cu13/lib");
        std::fs::create_dir_all(&package).unwrap();
        let found = folders(Some(root.clone()));
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(found[0], package);
        assert_eq!(found[1], Path::new("/usr/local/cuda/lib64"));
        assert_eq!(folders(None).len(), found.len() - 1);
    }
}
