//! The CUDA backend of Highwater, over NVIDIA's driver, cuBLAS and cuBLASLt, opened at run time.
//!
//! Building this crate requires no CUDA installation, and a program with it starts on a machine without a GPU. It runs
//! with a driver of CUDA 12.2 or newer and cuBLAS 12 or 13.
//!
//! # Responsibilities
//!
//! [`highwater_driver`] implements the four traits and documents what it checks, what the caller validates, and what
//! happens at exit and after a fork. This crate adds:
//! - the names and the search order of NVIDIA's libraries;
//! - the tables of calls that only CUDA has, and the symbols of all tables;
//! - the meaning of CUDA's and cuBLAS's codes;
//! - CUDA's behavior as data;
//! - plans over cuBLASLt, and memory that is shared by a descriptor or over a fabric.
//!
//! # Life cycle of the driver
//!
//! [`open`] initializes the driver with `cuInit` once for each library file. It retains the primary context of a device
//! on first use and never releases it. Each call makes that context current if it is not, and restores the caller's
//! context.
//!
//! # Captures
//!
//! A stream of CUDA survives a lost capture. The traits' calls run beside a capture of any mode, because calls that a
//! capture forbids are made in the relaxed mode. A BLAS handle may be created during a capture.
//!
//! `docs/driver-mapping.md` in the repository maps each trait method to its calls. `docs/cuda.md` lists the tests and
//! measurements on each GPU.

#[cfg(test)]
mod abi_check;
mod calls;
mod codes;
mod devices;
mod driver;
mod foreign;
mod libraries;
mod lt;
pub mod mps;
mod platform;
mod quirks;
mod virtual_memory;

use std::path::PathBuf;
use std::sync::Arc;

use highwater_driver::{Blas, BlasCalls, Lt, LtCalls, Opened, Search, environment_path, open_backend};
use highwater_hal::Unavailable;
use highwater_hal::{Backend, BackendTag, Error, Identity};

use crate::driver::Driver;
use crate::platform::Cuda;

/// Opens the backend.
///
/// # Errors
/// - `LibraryMissing` if a library cannot be opened or is a toolkit's stub, with all names tried and the loader's
///   reasons.
/// - `SymbolMissing` if a library lacks a required symbol.
/// - `DeviceMissing` if no device is visible.
/// - `InvalidArgument` if `HIGHWATER_CUDA_LIBRARY`, `HIGHWATER_CUBLASLT_LIBRARY` and `HIGHWATER_CUBLAS_LIBRARY` name
///   files of different major versions.
/// - `Unsupported` if the driver is older than CUDA 12.2.
pub fn open() -> Result<Arc<dyn Backend>, Unavailable> {
    let environment = environment_path("VIRTUAL_ENV");
    // SAFETY: Any process may open NVIDIA's libraries at any time. The variables belong to the user who starts the
    // process.
    unsafe { open_with(&environment_path, libraries::folders(environment)) }
}

/// # Safety
/// The caller must ensure that the usual names, the files of `paths` and the files in `folders` are NVIDIA's libraries,
/// and that this process may run their constructors.
unsafe fn open_with(
    paths: &dyn Fn(&str) -> Option<PathBuf>,
    folders: Vec<PathBuf>,
) -> Result<Arc<dyn Backend>, Unavailable> {
    // SAFETY: As the caller promises.
    open_backend(folders, |search| unsafe { find(search, paths) })
}

/// # Safety
/// The same as for [`open_with`].
unsafe fn find(search: &mut Search, paths: &dyn Fn(&str) -> Option<PathBuf>) -> Result<Opened<Cuda>, Error> {
    // SAFETY: As the caller promises.
    let driver = unsafe { Driver::open(search, paths) }?;
    // cuBLAS 13 needs a driver of CUDA 13.
    let newest = (driver.version / 1000).unsigned_abs();
    let goes_with = |name: &highwater_driver::LibraryName| name.major.is_none_or(|major| major <= newest);
    let library = &libraries::CUBLAS_LT;
    // SAFETY: As the caller promises.
    let lt = unsafe { search.open(library, paths(library.path_variable).as_deref(), goes_with) }?;
    let library = &libraries::CUBLAS;
    // SAFETY: As the caller promises.
    let cublas = unsafe { search.open(library, paths(library.path_variable).as_deref(), goes_with) }?;
    let update = "install cuBLAS of CUDA 12.2 or newer";
    // SAFETY: The libraries have these names, or a variable names them. They export their own symbols.
    let (lt_calls, blas, own) = unsafe {
        (
            LtCalls::load(&lt.library, calls::lt_symbol).map_err(|missing| lt.lacks(&missing, update))?,
            BlasCalls::load(&cublas.library, calls::blas_symbol),
            calls::CublasCalls::load(&cublas.library, calls::blas_symbol),
        )
    };
    let (blas, own) = cublas.both(blas, own, update)?;
    let blas = Blas { calls: blas, codes: &codes::CUBLAS };
    let mut identity = Identity::new("cuda", "NVIDIA CUDA", BackendTag::next());
    identity.versions = vec![
        ("highwater-cuda".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        ("CUDA driver".to_owned(), driver::written(driver.version)),
        ("cuBLAS".to_owned(), version(&own)?),
    ];
    identity.blas_workspace_variables = &["CUBLAS_WORKSPACE_CONFIG"];
    identity.lt_workspace_variables = &["CUBLASLT_WORKSPACE_SIZE"];
    let platform = Cuda { driver, blas, cublas: own, lt: Lt { calls: lt_calls, codes: &lt::CUBLAS_LT } };
    let devices = devices::describe(&platform)?;
    Ok(Opened { platform, identity, devices, captures: Arc::clone(&driver.captures) })
}

/// Returns the version of cuBLAS.
fn version(calls: &calls::CublasCalls) -> Result<String, Error> {
    let mut parts = Vec::new();
    for which in calls::VERSION_PARTS {
        let mut part = 0;
        // SAFETY: The call writes one number, which outlives it.
        codes::CUBLAS.check("open", unsafe { (calls.get_property)(which, &mut part) })?;
        parts.push(part.to_string());
    }
    Ok(parts.join("."))
}
