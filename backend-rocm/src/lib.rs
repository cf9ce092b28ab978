//! The ROCm backend of Highwater, over AMD's HIP runtime, hipBLAS and, where it is installed, hipBLASLt, opened at
//! run time.
//!
//! Building this crate requires no ROCm installation, and a program with it starts on a machine without a GPU. It runs
//! with HIP 7 and hipBLAS 3, or with HIP 6 and hipBLAS 2.
//!
//! # Responsibilities
//!
//! [`highwater_driver`] implements the four traits and documents what it checks, what the caller validates, and what
//! happens at exit and after a fork. This crate adds:
//! - the names and the search order of AMD's libraries;
//! - the table of calls that only HIP has, and the symbols of all tables;
//! - the meaning of HIP's and hipBLAS's codes;
//! - the behavior of HIP and hipBLAS as data;
//! - a search for rocBLAS's kernels, because rocBLAS ends the process if it finds none.
//!
//! # Life cycle of the runtime
//!
//! [`open`] initializes the runtime with `hipInit` once for each library file. If the process has
//! loaded a HIP already, `open` uses its major version, because two major versions do not work in one process. Each
//! call makes its device current and restores the caller's device.
//!
//! # Captures
//!
//! After a lost capture, the HIP stream on which it began stays unusable. The backend destroys that stream, which frees
//! the streams that had joined, and puts a new one under its id. A BLAS handle cannot be created during a capture.
//!
//! `docs/driver-mapping.md` in the repository maps each trait method to its calls. `docs/rocm.md` lists the tests.

#[cfg(test)]
mod abi_check;
mod calls;
mod codes;
mod devices;
mod driver;
mod foreign;
mod kernels;
mod libraries;
mod lt;
mod platform;
mod quirks;

use std::path::PathBuf;
use std::sync::Arc;

use highwater_driver::{Blas, BlasCalls, Found, Opened, Search, environment_path, open_backend};
use highwater_hal::Unavailable;
use highwater_hal::{Backend, BackendTag, Error, ErrorKind, Identity};

use crate::driver::Driver;
use crate::kernels::Kernels;
use crate::platform::Rocm;

/// Opens the backend.
///
/// # Errors
/// - `LibraryMissing` if a library cannot be opened, with all names tried and the loader's reasons.
/// - `SymbolMissing` if a library lacks a required symbol.
/// - `DeviceMissing` if no device is visible.
/// - `LibraryMissing` or `SymbolMissing` if `HIGHWATER_HIPBLASLT_LIBRARY` names a file that is not hipBLASLt. Without the
///   variable, hipBLASLt is optional. If it is missing, the devices have no Lt plans.
/// - `InvalidArgument` if `HIGHWATER_HIP_LIBRARY` and `HIGHWATER_HIPBLAS_LIBRARY` name files of different releases.
/// - `InvalidState` if `HIGHWATER_HIP_LIBRARY` names another major version than the HIP that the process has loaded.
/// - `Unsupported` for HIP 5 and older.
pub fn open() -> Result<Arc<dyn Backend>, Unavailable> {
    // SAFETY: Any process may open AMD's libraries at any time. The variables belong to the user who starts the
    // process.
    unsafe { open_with(&environment_path, libraries::folders()) }
}

/// # Safety
/// The caller must ensure that the usual names, the files of `paths` and the files in `folders` are AMD's libraries,
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
unsafe fn find(search: &mut Search, paths: &dyn Fn(&str) -> Option<PathBuf>) -> Result<Opened<Rocm>, Error> {
    let given = paths(libraries::HIP.path_variable);
    let loaded = libraries::loaded_major(libraries::HIP.loaded(), given.as_deref())?;
    // SAFETY: As the caller promises.
    let driver = unsafe { Driver::open(search, paths, |name| loaded.is_none() || name.major == loaded) }?;
    let given = paths(libraries::HIPBLAS.path_variable);
    // SAFETY: As above.
    let hipblas =
        unsafe { search.open(&libraries::HIPBLAS, given.as_deref(), |name| name.major == Some(driver.major())) }?;
    goes_with(&hipblas, driver)?;
    let symbol = |name: &str| calls::blas_symbol(driver.major(), name);
    // SAFETY: The library has this name, or a variable names it. It exports the symbols of its version.
    let mut blas = unsafe { BlasCalls::load(&hipblas.library, symbol) }
        .map_err(|missing| hipblas.lacks(&missing, "install the hipBLAS of the same ROCm release as HIP"))?;
    // hipBLAS accepts one further mode, which showed no effect. The compute type of a product selects the precision.
    blas.set_math_mode = None;
    // SAFETY: As above.
    let lt = unsafe { lt::open(search, paths, driver.major()) }?;
    let mut identity = Identity::new("rocm", "AMD ROCm", BackendTag::next());
    let mut below = 0;
    // SAFETY: The call writes one number, which outlives it.
    codes::HIP.check("open", unsafe { (driver.own.driver_get_version)(&mut below) })?;
    let versions = [
        ("highwater-rocm", env!("CARGO_PKG_VERSION").to_owned()),
        ("HIP", driver::written(driver.version)),
        ("HIP driver", driver::written(below)),
        // hipBLAS has no call for its full version.
        ("hipBLAS", (driver.major() - 4).to_string()),
    ];
    identity.versions = versions.into_iter().map(|(what, version)| (what.to_owned(), version)).collect();
    identity.blas_workspace_variables = &["HIPBLAS_WORKSPACE_CONFIG", "ROCBLAS_WORKSPACE_CONFIG"];
    identity.lt_workspace_variables = &["HIPBLASLT_WORKSPACE_SIZE"];
    let lt = match lt {
        lt::Opening::Opened(lt) => {
            // `hipblasLtGetVersion` needs a handle.
            identity.versions.push(("hipBLASLt".to_owned(), "opened".to_owned()));
            Some(lt)
        }
        lt::Opening::Absent(why) => {
            identity.versions.push(("hipBLASLt".to_owned(), format!("none, so there are no Lt plans: {why}")));
            None
        }
    };
    let architectures =
        (0..driver.devices).map(|ordinal| devices::architecture(driver, ordinal)).collect::<Result<Vec<_>, Error>>()?;
    let kernels = Kernels::new(&hipblas.library);
    let quirks = quirks::of_hip(driver.major());
    let blas = Blas { calls: blas, codes: &codes::HIPBLAS };
    let platform = Rocm { driver, blas, lt, quirks, kernels, architectures };
    let devices = devices::describe(&platform)?;
    Ok(Opened { platform, identity, devices, captures: Arc::clone(&driver.captures) })
}

/// Checks that hipBLAS and HIP belong to the same release, by the file's name or by a symbol that only hipBLAS 2 has.
fn goes_with(hipblas: &Found, driver: &Driver) -> Result<(), Error> {
    let second = hipblas.library.has_symbol(&calls::blas_symbol(6, "GemmEx"));
    let major = hipblas.major.unwrap_or(if second { 6 } else { 7 });
    if major == driver.major() {
        return Ok(());
    }
    let message = format!(
        "{} requires HIP {major}, but HIP {} was opened",
        hipblas.library.name(),
        driver::written(driver.version)
    );
    Err(Error::new(ErrorKind::InvalidArgument, "open", message).with_hint(format!(
        "{} is set: point it at the hipBLAS of the same ROCm release as HIP, or unset it",
        libraries::HIPBLAS.path_variable
    )))
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use highwater_hal::ErrorKind;

    use super::*;

    /// Opens the backend with the HIP runtime at `path`.
    fn with_runtime(path: &Path) -> Unavailable {
        let paths = |variable: &str| (variable == "HIGHWATER_HIP_LIBRARY").then(|| path.to_owned());
        // SAFETY: The paths of these tests do not exist, or name the C library, which this process has loaded.
        unsafe { open_with(&paths, Vec::new()) }.unwrap_err()
    }

    fn c_library() -> PathBuf {
        let found = highwater_driver::loaded_files("libc.so").pop();
        found.expect("this test binary is linked to the C library")
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
        // A link to the C library with the name of the old runtime. The name decides.
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
    fn every_symbol_that_is_asked_for_is_one_of_the_vendors() {
        use highwater_driver::Calls;
        let names = Calls::NAMES.iter().chain(calls::HipCalls::NAMES).map(|(_, name)| calls::runtime_symbol(name));
        let symbols: std::collections::HashSet<String> = names.collect();
        assert_eq!(symbols.len(), Calls::NAMES.len() + calls::HipCalls::NAMES.len());
        for symbol in
            ["hipMalloc", "hipFree", "hipHostMalloc", "hipHostFree", "hipMemcpyHtoDAsync", "hipEventCreateWithFlags"]
        {
            assert!(symbols.contains(symbol), "{symbol}");
        }
        for symbol in ["hipGetDevicePropertiesR0600", "hipGraphInstantiateWithFlags", "hipDeviceGetStreamPriorityRange"]
        {
            assert!(symbols.contains(symbol), "{symbol}");
        }
        // The symbol without a suffix fills an older layout. The symbol without flags has other arguments.
        assert!(!symbols.contains("hipGetDeviceProperties") && !symbols.contains("hipEventCreate"));
        let blas: Vec<String> = BlasCalls::NAMES.iter().map(|(_, name)| calls::blas_symbol(7, name)).collect();
        assert_eq!(blas[..4], ["hipblasCreate", "hipblasDestroy", "hipblasSetStream", "hipblasSetAtomicsMode"]);
    }
}
