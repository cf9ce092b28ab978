//! The CUDA backend of Highwater: NVIDIA's driver, cuBLASLt and cuBLAS, opened at run time.
//!
//! Nothing of CUDA is needed to build it, and a program that holds it starts on a machine without any. It needs a driver of
//! CUDA 12.2 or newer and cuBLAS 12 or 13. What CUDA and HIP do alike is in `highwater_driver`; here are the names of
//! the libraries, their calls, the meaning of their codes, and what only CUDA has. Which calls stand behind which method is
//! written down in `docs/driver-mapping.md` of the repository, what ran on which GPU in `docs/cuda.md`.

#[cfg(test)]
mod abi_check;
mod calls;
mod codes;
mod devices;
mod driver;
mod libraries;
mod lt;
mod platform;
mod quirks;
mod virtual_memory;

use std::path::PathBuf;
use std::sync::Arc;

use highwater_driver::{Blas, BlasCalls, Opened, Search, environment_path, open_backend};
use highwater_hal::Unavailable;
use highwater_hal::{Backend, BackendTag, Error, Identity};

use crate::driver::Driver;
use crate::platform::Cuda;

/// Opens the backend, or says what is missing.
///
/// # Errors
/// `LibraryMissing`, with every name tried and the loader's words, where a library cannot be opened or is the stub of a
/// toolkit; `SymbolMissing` where one lacks what it should have; `DeviceMissing` where no device is visible;
/// `InvalidArgument` where the variables `HIGHWATER_CUDA_LIBRARY`, `HIGHWATER_CUBLASLT_LIBRARY` and
/// `HIGHWATER_CUBLAS_LIBRARY` name files that do not go together; `Unsupported` for a driver older than CUDA 12.2.
pub fn open() -> Result<Arc<dyn Backend>, Unavailable> {
    let environment = environment_path("VIRTUAL_ENV");
    // SAFETY: NVIDIA's libraries are made to be opened by any process at any time, and the variables belong to whoever
    // starts the process.
    unsafe { open_with(&environment_path, libraries::folders(environment)) }
}

/// # Safety
/// The usual names, whatever `paths` gives and the files in `folders` are NVIDIA's libraries, and this process may run their
/// constructors.
unsafe fn open_with(
    paths: &dyn Fn(&str) -> Option<PathBuf>,
    folders: Vec<PathBuf>,
) -> Result<Arc<dyn Backend>, Unavailable> {
    // SAFETY: passed on from the caller.
    open_backend(folders, |search| unsafe { find(search, paths) })
}

/// # Safety
/// As [`open_with`].
unsafe fn find(search: &mut Search, paths: &dyn Fn(&str) -> Option<PathBuf>) -> Result<Opened<Cuda>, Error> {
    // SAFETY: passed on from the caller.
    let driver = unsafe { Driver::open(search, paths) }?;
    // cuBLAS 13 needs a driver that knows CUDA 13.
    let newest = (driver.version / 1000).unsigned_abs();
    let goes_with = |name: &highwater_driver::LibraryName| name.major.is_none_or(|major| major <= newest);
    let library = &libraries::CUBLAS_LT;
    // SAFETY: passed on from the caller.
    let lt = unsafe { search.open(library, paths(library.path_variable).as_deref(), goes_with) }?;
    let library = &libraries::CUBLAS;
    // SAFETY: passed on from the caller.
    let cublas = unsafe { search.open(library, paths(library.path_variable).as_deref(), goes_with) }?;
    let update = "install cuBLAS of CUDA 12.2 or newer";
    // SAFETY: the libraries go by these names, or a variable names them so; they export what they are.
    let (lt_calls, blas, own) = unsafe {
        (
            lt::LtCalls::load(&lt.library, calls::lt_symbol).map_err(|missing| lt.lacks(&missing, update))?,
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
    let platform = Cuda { driver, blas, cublas: own, lt: lt_calls };
    let devices = devices::describe(&platform)?;
    Ok(Opened { platform, identity, devices, captures: Arc::clone(&driver.captures) })
}

/// The version of cuBLAS.
fn version(calls: &calls::CublasCalls) -> Result<String, Error> {
    let mut parts = Vec::new();
    for which in calls::VERSION_PARTS {
        let mut part = 0;
        // SAFETY: the call writes one number that lives until it returns.
        codes::CUBLAS.check("open", unsafe { (calls.get_property)(which, &mut part) })?;
        parts.push(part.to_string());
    }
    Ok(parts.join("."))
}
