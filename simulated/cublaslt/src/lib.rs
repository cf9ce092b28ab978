//! A simulation of NVIDIA's cuBLASLt over the mock.
//!
//! It exports the symbols of `libcublasLt.so.13` that Highwater uses, with the vendor's ABI and rules. A handle has no state
//! but its context; each call names its stream and workspace. An algorithm states the workspace that it needs, and runs only
//! the problem that it was found for.
//!
//! Not supported: matrices in row-major or tiled order, integers, complex and 8-bit types, epilogues with auxiliary outputs or
//! gradients, and vectors of alpha. The heuristic finds no algorithm for them (15).

#![allow(non_snake_case, reason = "the symbols have the vendor's names")]
#![allow(unreachable_pub, reason = "exported symbols are public and used by nobody in Rust")]
#![allow(clippy::too_many_arguments, reason = "the argument lists of the vendor's functions")]

#[cfg(test)]
mod abi;
mod algorithm;

use std::ffi::{c_char, c_void};

use highwater_simulated_blas::border::put;
use highwater_simulated_blas::driver::{Driver, Home};
use highwater_simulated_blas::lt::Fault;
use highwater_simulated_blas::lt::attributes::{
    Attribute, Description, Layout, LayoutAttribute, Preference, PreferenceAttribute, write,
};
use highwater_simulated_blas::lt::problem::{Operands, Problem, WithoutFactors};
use highwater_simulated_blas::slots::Slots;
use highwater_simulated_blas::status::{self, INVALID_VALUE, NOT_INITIALIZED, NOT_SUPPORTED};
use highwater_simulated_blas::{answer, call, create, export, version, version_part};

use crate::algorithm::{Algorithm, HeuristicResult};

static HANDLES: Slots<Home> = Slots::new(*b"LtHandle");
static DESCRIPTIONS: Slots<Description> = Slots::new(*b"LtMatmul");
static LAYOUTS: Slots<Layout> = Slots::new(*b"LtLayout");
static PREFERENCES: Slots<Preference> = Slots::new(*b"LtPrefer");

/// Returns a copy of the object behind a handle or descriptor.
///
/// # Safety
/// `address` must be null, or come from the function that creates descriptors of some kind.
unsafe fn copy<T: Copy + Send>(slots: &Slots<T>, address: *mut c_void, missing: u32) -> Result<T, u32> {
    // SAFETY: forwarded to the caller.
    unsafe { slots.with(address, |value| *value) }.ok_or(missing)
}

/// Returns the problem of a call.
///
/// # Safety
/// The contract of [`copy`], for each address.
unsafe fn problem(description: *mut c_void, [a, b, c, d]: [*mut c_void; 4]) -> Result<Problem, u32> {
    // SAFETY: forwarded to the caller.
    let layout = |address| unsafe { copy(&LAYOUTS, address, INVALID_VALUE) };
    // SAFETY: as above.
    let description = unsafe { copy(&DESCRIPTIONS, description, INVALID_VALUE) }?;
    let layouts = [layout(a)?, layout(b)?, layout(c)?, layout(d)?];
    Problem::new(&description, layouts, Some(description.compute_type()), 0).map_err(code)
}

/// Returns the code of a fault.
fn code(fault: Fault) -> u32 {
    match fault {
        Fault::Invalid => INVALID_VALUE,
        Fault::Unsupported => NOT_SUPPORTED,
    }
}

/// Returns the attribute of a number of `cublasLtMatmulDescAttributes_t`.
fn attribute(number: u32) -> Result<Attribute, u32> {
    Ok(match number {
        0 => Attribute::ComputeType,
        1 => Attribute::ScaleType,
        2 => Attribute::PointerMode,
        3 => Attribute::TransposeA,
        4 => Attribute::TransposeB,
        // Transposed C, part of C only.
        5 | 6 => Attribute::Zero,
        7 => Attribute::Epilogue,
        8 => Attribute::Bias,
        10 => Attribute::BiasBatchStride,
        15 => Attribute::Hint,
        25 => Attribute::SmallHint,
        26 => Attribute::BiasType,
        // Auxiliary outputs, scales of 8-bit types, synchronization by chunks.
        11..=14 | 17..=24 | 27..=37 => Attribute::Special,
        _ => return Err(INVALID_VALUE),
    })
}

/// Returns the attribute of a number of `cublasLtMatrixLayoutAttribute_t`.
fn layout_attribute(number: u32) -> Result<LayoutAttribute, u32> {
    use LayoutAttribute::{Batch, Columns, Ld, Order, Rows, SmallZero, Stride, Type, Zero};
    let all = [Type, Order, Rows, Columns, Ld, Batch, Stride, Zero, SmallZero];
    all.get(number as usize).copied().ok_or(INVALID_VALUE)
}

/// Returns the attribute of a number of `cublasLtMatmulPreferenceAttributes_t`.
fn preference_attribute(number: u32) -> Result<PreferenceAttribute, u32> {
    Ok(match number {
        1 => PreferenceAttribute::Workspace,
        5..=8 => PreferenceAttribute::Alignment(number as usize - 5),
        0 | 3 | 9 => PreferenceAttribute::Hint(4),
        12 => PreferenceAttribute::Hint(8),
        _ => return Err(INVALID_VALUE),
    })
}

export! {
    /// Handles and descriptors must be null, or come from the function that creates them.
    call -> u32;
    checked in signatures against cudarc::cublaslt::sys, [unsafe fn];

    fn cublasLtCreate(handle: *mut *mut c_void) { create!(handle in HANDLES, Driver::get()?.home()?) }

    /// Waits for the device of the handle.
    fn cublasLtDestroy(handle: *mut c_void) {
        // SAFETY: The handle is null or came from `cublasLtCreate`.
        let home = unsafe { HANDLES.remove(handle) }.ok_or(NOT_INITIALIZED)?;
        if let Ok(driver) = Driver::get() {
            driver.wait_and_free(home, 0);
        }
        Ok(())
    }

    fn cublasLtGetProperty(part: u32, value: *mut i32) { answer!(value = version_part(part).ok_or(INVALID_VALUE)?) }

    fn cublasLtMatmulDescCreate(description: *mut *mut c_void, compute_type: u32, scale_type: u32) {
        create!(description in DESCRIPTIONS, Description::new(compute_type, scale_type, 0))
    }

    fn cublasLtMatmulDescDestroy(description: *mut c_void) {
        // SAFETY: The descriptor is null or came from its function.
        unsafe { DESCRIPTIONS.remove(description) }.map(|_| ()).ok_or(INVALID_VALUE)
    }

    fn cublasLtMatmulDescSetAttribute(description: *mut c_void, number: u32, value: *const c_void, bytes: usize) {
        let attribute = attribute(number)?;
        // SAFETY: The descriptor is null or came from its function, and `value` is null or readable for `bytes` bytes.
        unsafe { DESCRIPTIONS.with(description, |description| description.set(attribute, value, bytes)) }
            .ok_or(INVALID_VALUE)?.map_err(code)
    }

    fn cublasLtMatmulDescGetAttribute(
        description: *mut c_void, number: u32, value: *mut c_void, bytes: usize, written: *mut usize,
    ) {
        let attribute = attribute(number)?;
        // SAFETY: The descriptor is null or came from its function.
        let found = unsafe { DESCRIPTIONS.with(description, |description| description.get(attribute)) };
        let found = found.ok_or(INVALID_VALUE)?.map_err(code)?;
        // SAFETY: The places are null or valid.
        unsafe { write(found, value, bytes, written) }.map_err(code)
    }

    fn cublasLtMatrixLayoutCreate(layout: *mut *mut c_void, data_type: u32, rows: u64, columns: u64, ld: i64) {
        create!(layout in LAYOUTS, Layout::new(data_type, rows, columns, ld))
    }

    fn cublasLtMatrixLayoutDestroy(layout: *mut c_void) {
        // SAFETY: The descriptor is null or came from its function.
        unsafe { LAYOUTS.remove(layout) }.map(|_| ()).ok_or(INVALID_VALUE)
    }

    fn cublasLtMatrixLayoutSetAttribute(layout: *mut c_void, number: u32, value: *const c_void, bytes: usize) {
        let attribute = layout_attribute(number)?;
        // SAFETY: The descriptor is null or came from its function, and `value` is null or readable for `bytes` bytes.
        unsafe { LAYOUTS.with(layout, |layout| layout.set(attribute, value, bytes)) }.ok_or(INVALID_VALUE)?.map_err(code)
    }

    fn cublasLtMatmulPreferenceCreate(preference: *mut *mut c_void) {
        create!(preference in PREFERENCES, Preference::default())
    }

    fn cublasLtMatmulPreferenceDestroy(preference: *mut c_void) {
        // SAFETY: The descriptor is null or came from its function.
        unsafe { PREFERENCES.remove(preference) }.map(|_| ()).ok_or(INVALID_VALUE)
    }

    fn cublasLtMatmulPreferenceSetAttribute(
        preference: *mut c_void, number: u32, value: *const c_void, bytes: usize,
    ) {
        let attribute = preference_attribute(number)?;
        // SAFETY: The descriptor is null or came from its function, and `value` is null or readable for `bytes` bytes.
        unsafe { PREFERENCES.with(preference, |preference| preference.set(attribute, value, bytes)) }
            .ok_or(INVALID_VALUE)?.map_err(code)
    }

    /// Finds one algorithm for each problem that the kernels can compute.
    fn cublasLtMatmulAlgoGetHeuristic(
        handle: *mut c_void, description: *mut c_void,
        a: *mut c_void, b: *mut c_void, c: *mut c_void, d: *mut c_void,
        preference: *mut c_void, wanted: i32, results: *mut HeuristicResult, found: *mut i32,
    ) {
        // SAFETY: The handle is null or came from its function.
        unsafe { copy(&HANDLES, handle, NOT_INITIALIZED) }?;
        if wanted < 1 || results.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: `found` is null or valid for a write.
        unsafe { put(found, 0, INVALID_VALUE) }?;
        // SAFETY: The descriptors are null or came from their functions.
        let (problem, preference) =
            unsafe { (problem(description, [a, b, c, d])?, copy(&PREFERENCES, preference, INVALID_VALUE)?) };
        let result = Algorithm::of(&problem, &preference).result();
        // SAFETY: There is space for at least one result, and the check above has shown that `found` is not null.
        unsafe {
            results.write(result);
            found.write(1);
        }
        Ok(())
    }

    /// Multiplies. Without an algorithm, uses the one that the heuristic would return for the workspace.
    fn cublasLtMatmul(
        handle: *mut c_void, description: *mut c_void, alpha: *const c_void,
        a: *const c_void, a_layout: *mut c_void, b: *const c_void, b_layout: *mut c_void, beta: *const c_void,
        c: *const c_void, c_layout: *mut c_void, d: *mut c_void, d_layout: *mut c_void,
        algorithm: *const Algorithm, workspace: *mut c_void, workspace_bytes: usize, stream: *mut c_void,
    ) {
        // SAFETY: The handle is null or came from its function.
        let home = unsafe { copy(&HANDLES, handle, NOT_INITIALIZED) }?;
        // SAFETY: The descriptors are null or came from their functions.
        let problem = unsafe { problem(description, [a_layout, b_layout, c_layout, d_layout]) }?;
        // SAFETY: The algorithm is valid or null.
        let algorithm = match unsafe { algorithm.as_ref() } {
            Some(algorithm) => *algorithm,
            None => Algorithm::of(&problem, &Preference::without_alignment(workspace_bytes as u64)),
        };
        let operands = Operands {
            alpha, beta, a: a as u64, b: b as u64, c: c as u64, d: d as u64,
            workspace: workspace as u64, workspace_bytes: workspace_bytes as u64, stream,
        };
        let needed = algorithm.workspace_for(&problem).ok_or(INVALID_VALUE)?;
        if !algorithm.takes([operands.a, operands.b, operands.c, operands.d]) {
            return Err(INVALID_VALUE);
        }
        // SAFETY: Alpha and beta are valid or null, where the description states, and the stream belongs to the driver.
        unsafe {
            let product = problem.product(home.device, needed, &operands, WithoutFactors::OmitsEpilogue).map_err(code)?;
            Driver::get()?.launch(&product)
        }
    }
}

/// The vendor's `cublasLtGetVersion`.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetVersion() -> usize {
    version() as usize
}

/// The vendor's `cublasLtGetStatusName`.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetStatusName(code: u32) -> *const c_char {
    status::name(code).as_ptr()
}

/// The vendor's `cublasLtGetStatusString`.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetStatusString(code: u32) -> *const c_char {
    status::text(code).as_ptr()
}
