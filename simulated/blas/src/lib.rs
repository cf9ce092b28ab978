//! What the look-alikes of cuBLAS and cuBLASLt share, and hipBLAS's as far as it has the same.
//!
//! Like the real ones they stand on the driver: contexts, memory and waiting go through functions that `libcuda.so.1` or
//! `libamdhip64.so` exports for everybody. Only the kernels are reached through a private [`table`], which the simulated
//! driver exports as `highwater_simulated_blas`.
//!
//! - `border`: exported functions, and what they write for their callers
//! - `table`: the private table, and a product as it crosses it
//! - `driver`: NVIDIA's driver's functions, and which context is current
//! - `product`: the arguments of a product, as far as they are alike with every vendor
//! - `signature`: what of a function the ABI sees, for tests
//! - `slots`: what the libraries' handles and descriptors lie in
//! - `status`: the codes of NVIDIA's libraries, their names and texts
//! - `types`: element and compute types in NVIDIA's numbers, and which go together

use std::sync::OnceLock;

pub mod border;
pub mod driver;
pub mod product;
pub mod signature;
pub mod slots;
pub mod status;
pub mod table;
pub mod types;

/// The variable that sets the version which the libraries say they are.
pub const VERSION_VARIABLE: &str = "HIGHWATER_SIMULATED_CUBLAS_VERSION";

/// The version that the libraries say they are; 130100 unless set.
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
