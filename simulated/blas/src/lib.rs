//! The common part of the simulated cuBLAS, cuBLASLt, hipBLAS and hipBLASLt.
//!
//! Like the real libraries they call the driver: contexts, memory and waits go through the public functions of `libcuda.so.1`
//! or `libamdhip64.so`. Only kernels are launched through a private [`table`], which the simulated driver exports as
//! `highwater_simulated_blas`.
//!
//! This crate does not depend on the engine, and must not. Each simulated library has its own statics. A BLAS library that
//! linked the engine would create a second set of devices in the process.
//!
//! - `border`: exported functions and their results
//! - `table`: the private table and its description of a product
//! - `driver`: the functions of NVIDIA's driver, and the current context
//! - `runtime`, `hip_status`: the functions of AMD's runtime, and the codes of its libraries
//! - `lt`: descriptors of cuBLASLt and hipBLASLt
//! - `product`: the arguments of a product that every vendor has
//! - `signature`: the ABI of a function, for tests
//! - `slots`: the storage of handles and descriptors
//! - `status`: the codes of NVIDIA's libraries, their names and texts
//! - `types`: element and compute types in NVIDIA's numbers, and their valid combinations

use std::sync::OnceLock;

pub mod border;
pub mod driver;
pub mod hip_status;
pub mod lt;
pub mod product;
pub mod runtime;
pub mod signature;
pub mod slots;
pub mod status;
pub mod table;
pub mod types;

/// The variable that sets the version that the libraries report.
pub const VERSION_VARIABLE: &str = "HIGHWATER_SIMULATED_CUBLAS_VERSION";

/// Returns the version that the libraries report; 130100 by default.
#[must_use]
pub fn version() -> u32 {
    static VERSION: OnceLock<u32> = OnceLock::new();
    *VERSION.get_or_init(|| std::env::var(VERSION_VARIABLE).ok().and_then(|text| text.parse().ok()).unwrap_or(130_100))
}

/// What `cublasGetProperty` answers for a part of the version.
#[must_use]
pub fn version_part(part: u32) -> Option<i32> {
    let part = match part {
        0 => version() / 10_000,
        1 => version() / 100 % 100,
        2 => version() % 100,
        _ => return None,
    };
    i32::try_from(part).ok()
}

/// Runs a call of cuBLAS or cuBLASLt, whatever its name.
pub fn call(_function: &str, body: impl FnOnce() -> Result<(), u32>) -> u32 {
    border::guarded(status::INTERNAL_ERROR, body)
}
