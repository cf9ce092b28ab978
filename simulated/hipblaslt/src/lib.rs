//! A simulation of AMD's hipBLASLt over the mock.
//!
//! It exports the symbols of `libhipblaslt.so.1` (ROCm 7) and `.so.0` (ROCm 6) that Highwater uses, with the vendor's ABI. The
//! numbers are those of the header of version 1.2.2 (ROCm 7.2.4). The rules were read in the sources of version 0.10 (ROCm 6.3), or
//! are those of the manual:
//!
//! - A preference has a search mode and a workspace, but no alignments and no reduction scheme.
//! - A call uses at most the workspace for which its algorithm was found.
//! - A handle holds 25 MiB of device memory. If there is too little, its creation ends the process with status 1.
//! - No algorithm rounds factors to TF32. This is an assumption: no device was observed.
//! - The handle's Stream-K flags belong to one stream at a time (pytorch#156495). Here, a product on a second stream ends the
//!   process.
//!
//! Not supported: matrices in row-major or tiled order, integers, complex and 8-bit types, epilogues with auxiliary outputs or
//! gradients, and vectors of alpha. The heuristic finds no algorithm for them (7).

#![allow(non_snake_case, reason = "the symbols have the vendor's names")]
#![allow(unreachable_pub, reason = "exported symbols are public and used by nobody in Rust")]
#![allow(clippy::too_many_arguments, reason = "the argument lists of the vendor's functions")]

mod algorithm;

use std::ffi::c_void;

use highwater_simulated_blas::border::{guarded, put};
use highwater_simulated_blas::hip_status::{INTERNAL_ERROR, INVALID_VALUE, NOT_INITIALIZED, NOT_SUPPORTED};
use highwater_simulated_blas::lt::Fault;
use highwater_simulated_blas::lt::attributes::{
    Attribute, Description, Layout, LayoutAttribute, Preference, PreferenceAttribute,
};
use highwater_simulated_blas::lt::problem::{Operands, Problem, WithoutFactors};
use highwater_simulated_blas::runtime::{Home, Runtime};
use highwater_simulated_blas::slots::Slots;
use highwater_simulated_blas::types::of_hip_compute;
use highwater_simulated_blas::{answer, create, export};

use crate::algorithm::{Algorithm, HeuristicResult};

/// `HIPBLAS_OP_N`.
const PLAIN: u32 = 111;

/// The bytes of device memory that a handle takes.
const HANDLE_BYTES: usize = 25 << 20;

/// A handle: its device, its memory, and the stream of its first product.
#[derive(Debug, Clone, Copy)]
struct State {
    home: Home,
    memory: u64,
    stream: Option<usize>,
}

static HANDLES: Slots<State> = Slots::new(*b"HLtHandl");
static DESCRIPTIONS: Slots<Description> = Slots::new(*b"HLtMatml");
static LAYOUTS: Slots<Layout> = Slots::new(*b"HLtLayou");
static PREFERENCES: Slots<Preference> = Slots::new(*b"HLtPrefr");

/// Runs a call. Its name is not used.
fn call(_function: &str, body: impl FnOnce() -> Result<(), u32>) -> u32 {
    guarded(INTERNAL_ERROR, body)
}

/// Returns the code of a fault.
fn code(fault: Fault) -> u32 {
    match fault {
        Fault::Invalid => INVALID_VALUE,
        Fault::Unsupported => NOT_SUPPORTED,
    }
}

/// Returns a copy of the object behind a descriptor.
///
/// # Safety
/// `address` must be null, or come from the function that creates descriptors of some kind.
unsafe fn copy<T: Copy + Send>(slots: &Slots<T>, address: *mut c_void) -> Result<T, u32> {
    // SAFETY: forwarded to the caller.
    unsafe { slots.with(address, |value| *value) }.ok_or(INVALID_VALUE)
}

/// Returns the problem of a call.
///
/// # Safety
/// The contract of [`copy`], for each address.
unsafe fn problem(description: *mut c_void, layouts: [*mut c_void; 4]) -> Result<Problem, u32> {
    // SAFETY: forwarded to the caller.
    let [a, b, c, d] = layouts.map(|address| unsafe { copy(&LAYOUTS, address) });
    // SAFETY: as above.
    let description = unsafe { copy(&DESCRIPTIONS, description) }?;
    let compute_type = of_hip_compute(description.compute_type());
    let problem = Problem::new(&description, [a?, b?, c?, d?], compute_type, PLAIN).map_err(code)?;
    if problem.rounds_to_tf32() { Err(NOT_SUPPORTED) } else { Ok(problem) }
}

/// Returns the attribute of a number of `hipblasLtMatmulDescAttributes_t`.
fn attribute(number: u32) -> Result<Attribute, u32> {
    Ok(match number {
        0 => Attribute::TransposeA,
        1 => Attribute::TransposeB,
        2 => Attribute::Epilogue,
        3 => Attribute::Bias,
        4 => Attribute::BiasType,
        13 => Attribute::PointerMode,
        // Scales, auxiliary outputs, types of the computation.
        5..=12 | 14 | 22 | 31 | 32 | 100..=103 => Attribute::Special,
        _ => return Err(INVALID_VALUE),
    })
}

/// Returns the attribute of a number of `hipblasLtMatrixLayoutAttribute_t`.
fn layout_attribute(number: u32) -> Result<LayoutAttribute, u32> {
    use LayoutAttribute::{Batch, Columns, Ld, Order, Rows, Stride, Type};
    [Batch, Stride, Type, Order, Rows, Columns, Ld].get(number as usize).copied().ok_or(INVALID_VALUE)
}

/// Returns the attribute of a number of `hipblasLtMatmulPreferenceAttributes_t`.
fn preference_attribute(number: u32) -> Result<PreferenceAttribute, u32> {
    match number {
        0 => Ok(PreferenceAttribute::Hint(4)),
        1 => Ok(PreferenceAttribute::Workspace),
        _ => Err(INVALID_VALUE),
    }
}

export! {
    /// Handles and descriptors must be null, or come from the function that creates them.
    call -> u32;

    fn hipblasLtCreate(handle: *mut *mut c_void) {
        if handle.is_null() {
            return Err(INVALID_VALUE);
        }
        let runtime = Runtime::get()?;
        // The first call that needs memory ends the process if it fails, also without a device.
        let memory = runtime.allocate(HANDLE_BYTES).unwrap_or_else(|_| {
            eprintln!("Hip error: 'out of memory'(2) at hipblaslt.cpp:147");
            std::process::exit(1)
        });
        create!(handle in HANDLES, State { home: runtime.home()?, memory, stream: None })
    }

    fn hipblasLtDestroy(handle: *mut c_void) {
        // SAFETY: The handle is null or came from `hipblasLtCreate`.
        let state = unsafe { HANDLES.remove(handle) }.ok_or(NOT_INITIALIZED)?;
        Runtime::get()?.wait_and_free(state.home, state.memory);
        Ok(())
    }

    /// 10000 * major + 100 * minor + patch.
    fn hipblasLtGetVersion(handle: *mut c_void, version: *mut i32) {
        // SAFETY: The handle is null or came from its function.
        unsafe { HANDLES.with(handle, |_| ()) }.ok_or(NOT_INITIALIZED)?;
        answer!(version = if Runtime::get()?.major >= 3 { 10_202 } else { 1_200 })
    }

    fn hipblasLtMatmulDescCreate(description: *mut *mut c_void, compute_type: u32, scale_type: u32) {
        create!(description in DESCRIPTIONS, Description::new(compute_type, scale_type, PLAIN))
    }

    fn hipblasLtMatmulDescDestroy(description: *mut c_void) {
        // SAFETY: The descriptor is null or came from its function.
        unsafe { DESCRIPTIONS.remove(description) }.map(|_| ()).ok_or(INVALID_VALUE)
    }

    fn hipblasLtMatmulDescSetAttribute(description: *mut c_void, number: u32, value: *const c_void, bytes: usize) {
        let attribute = attribute(number)?;
        // SAFETY: The descriptor is null or came from its function, and `value` is null or readable for `bytes` bytes.
        let set = unsafe { DESCRIPTIONS.with(description, |description| description.set(attribute, value, bytes)) };
        set.ok_or(INVALID_VALUE)?.map_err(code)
    }

    fn hipblasLtMatrixLayoutCreate(layout: *mut *mut c_void, data_type: u32, rows: u64, columns: u64, ld: i64) {
        create!(layout in LAYOUTS, Layout::new(data_type, rows, columns, ld))
    }

    fn hipblasLtMatrixLayoutDestroy(layout: *mut c_void) {
        // SAFETY: The descriptor is null or came from its function.
        unsafe { LAYOUTS.remove(layout) }.map(|_| ()).ok_or(INVALID_VALUE)
    }

    fn hipblasLtMatrixLayoutSetAttribute(layout: *mut c_void, number: u32, value: *const c_void, bytes: usize) {
        let attribute = layout_attribute(number)?;
        // SAFETY: The descriptor is null or came from its function, and `value` is null or readable for `bytes` bytes.
        unsafe { LAYOUTS.with(layout, |layout| layout.set(attribute, value, bytes)) }.ok_or(INVALID_VALUE)?.map_err(code)
    }

    fn hipblasLtMatmulPreferenceCreate(preference: *mut *mut c_void) {
        create!(preference in PREFERENCES, Preference::without_alignment(0))
    }

    fn hipblasLtMatmulPreferenceDestroy(preference: *mut c_void) {
        // SAFETY: The descriptor is null or came from its function.
        unsafe { PREFERENCES.remove(preference) }.map(|_| ()).ok_or(INVALID_VALUE)
    }

    fn hipblasLtMatmulPreferenceSetAttribute(
        preference: *mut c_void, number: u32, value: *const c_void, bytes: usize,
    ) {
        let attribute = preference_attribute(number)?;
        // SAFETY: The descriptor is null or came from its function, and `value` is null or readable for `bytes` bytes.
        let set = unsafe { PREFERENCES.with(preference, |preference| preference.set(attribute, value, bytes)) };
        set.ok_or(INVALID_VALUE)?.map_err(code)
    }

    /// Finds one algorithm for each problem that the kernels can compute.
    fn hipblasLtMatmulAlgoGetHeuristic(
        handle: *mut c_void, description: *mut c_void,
        a: *mut c_void, b: *mut c_void, c: *mut c_void, d: *mut c_void,
        preference: *mut c_void, wanted: i32, results: *mut HeuristicResult, found: *mut i32,
    ) {
        // SAFETY: The handle is null or came from its function.
        unsafe { HANDLES.with(handle, |_| ()) }.ok_or(NOT_INITIALIZED)?;
        if wanted < 1 || results.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: `found` is null or valid for a write.
        unsafe { put(found, 0, INVALID_VALUE) }?;
        // SAFETY: The descriptors are null or came from their functions.
        let (problem, preference) = unsafe { (problem(description, [a, b, c, d])?, copy(&PREFERENCES, preference)?) };
        if Runtime::get()?.lacks_algorithms {
            return Ok(());
        }
        let result = Algorithm::of(&problem, preference.workspace_bytes).result();
        // SAFETY: There is space for at least one result, and the check above has shown that `found` is not null.
        unsafe {
            results.write(result);
            found.write(1);
        }
        Ok(())
    }

    /// Multiplies. Without an algorithm, uses the one that the heuristic would return for the workspace.
    fn hipblasLtMatmul(
        handle: *mut c_void, description: *mut c_void, alpha: *const c_void,
        a: *const c_void, a_layout: *mut c_void, b: *const c_void, b_layout: *mut c_void, beta: *const c_void,
        c: *const c_void, c_layout: *mut c_void, d: *mut c_void, d_layout: *mut c_void,
        algorithm: *const Algorithm, workspace: *mut c_void, workspace_bytes: usize, stream: *mut c_void,
    ) {
        let runtime = Runtime::get()?;
        // SAFETY: The handle is null or came from its function.
        let state = unsafe {
            HANDLES.with(handle, |state| {
                let before = *state;
                state.stream = Some(stream as usize);
                before
            })
        };
        let state = state.ok_or(NOT_INITIALIZED)?;
        if state.stream.is_some_and(|first| first != stream as usize) {
            eprintln!("the simulated hipBLASLt: a handle was used on a second stream, but its Stream-K flags belong to the first");
            std::process::abort();
        }
        // SAFETY: The descriptors are null or came from their functions.
        let problem = unsafe { problem(description, [a_layout, b_layout, c_layout, d_layout]) }?;
        // SAFETY: The algorithm is valid or null.
        let algorithm = match unsafe { algorithm.as_ref() } {
            Some(algorithm) => *algorithm,
            None => Algorithm::of(&problem, workspace_bytes as u64),
        };
        let needed = algorithm.workspace_for(&problem).ok_or(INVALID_VALUE)?;
        let operands = Operands {
            alpha, beta, a: a as u64, b: b as u64, c: c as u64, d: d as u64,
            workspace: workspace as u64, workspace_bytes: workspace_bytes as u64, stream,
        };
        // SAFETY: Alpha and beta are valid or null, where the description states, and the stream belongs to the runtime.
        unsafe {
            let device = state.home.device;
            let product = problem.product(device, needed, &operands, WithoutFactors::Computes).map_err(code)?;
            runtime.launch(&product)
        }
    }
}
