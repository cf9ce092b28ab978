//! Products: what the arguments of a call say, and what of it is refused.

use std::ffi::c_void;

use highwater_simulated_blas::table::Product;
use highwater_simulated_blas::types::{Compute, R_16BF, R_16F, R_32F, R_64F, read_scale};

use crate::runtime::Runtime;
use crate::status::{INVALID_ENUM, INVALID_VALUE, NOT_SUPPORTED};

/// One matrix, or the first of a batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix {
    address: u64,
    ld: i64,
    stride: i64,
}

impl Matrix {
    pub(crate) fn new(address: *const c_void, ld: impl Into<i64>, stride: i64) -> Self {
        Self { address: address as u64, ld: ld.into(), stride }
    }
}

/// How many products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Batch {
    One,
    Of(i64),
}

/// Which symbol was called, and so which numbers stand for the types.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Symbol {
    /// Without a suffix: `hipblasDatatype_t` in hipBLAS 2, and as `V2` in hipBLAS 3.
    Plain,
    /// With `_v2`: `hipDataType` and `hipblasComputeType_t`.
    V2,
}

/// The arguments of a call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call {
    pub(crate) symbol: Symbol,
    /// `hipblasOperation_t` of A and B.
    pub(crate) transpose: [u32; 2],
    /// m, n, k.
    pub(crate) sizes: [i64; 3],
    /// The types of A, B, C.
    pub(crate) types: [u32; 3],
    pub(crate) compute_type: u32,
    /// `hipblasGemmAlgo_t`; there is one.
    pub(crate) algo: u32,
    pub(crate) alpha: *const c_void,
    pub(crate) beta: *const c_void,
    /// A, B, C.
    pub(crate) matrices: [Matrix; 3],
    pub(crate) batch: Batch,
}

/// The numbers of hipBLAS before version 3, `hipblasDatatype_t`, for elements and for the computation.
fn old_type(number: u32) -> Result<u32, u32> {
    match number {
        150 => Ok(R_16F),
        151 => Ok(R_32F),
        152 => Ok(R_64F),
        168 => Ok(R_16BF),
        153..=155 | 160..=167 | 169 => Err(NOT_SUPPORTED),
        _ => Err(INVALID_ENUM),
    }
}

/// The number of cuBLAS for `hipblasComputeType_t`.
fn compute_number(number: u32) -> Result<u32, u32> {
    match number {
        0 => Ok(64),
        1 => Ok(65),
        2 => Ok(68),
        3 => Ok(69),
        4 => Ok(74),
        5 => Ok(75),
        6 => Ok(77),
        7 => Ok(70),
        8 => Ok(71),
        _ => Err(NOT_SUPPORTED),
    }
}

/// Types of A, B, C, and the computation, in the numbers of CUDA.
fn meaning(symbol: Symbol, major: u32, types: [u32; 3], compute_type: u32) -> Result<([u32; 3], u32), u32> {
    if symbol == Symbol::V2 || major >= 3 {
        // The elements' numbers are CUDA's; what they mean is checked with the computation.
        return Ok((types, compute_number(compute_type)?));
    }
    let [a, b, c] = types.map(old_type);
    let compute = match old_type(compute_type)? {
        R_16F => 64,
        R_32F => 68,
        R_64F => 70,
        _ => return Err(NOT_SUPPORTED),
    };
    Ok(([a?, b?, c?], compute))
}

fn not_negative(value: i64) -> Result<u64, u32> {
    u64::try_from(value).map_err(|_| INVALID_VALUE)
}

impl Call {
    /// Checks the call and enqueues the product.
    ///
    /// # Safety
    /// `handle` is null or was given by `hipblasCreate`; alpha and beta are null or valid, on the host or the device as
    /// the handle's pointer mode says; the bound stream is one of the runtime.
    pub(crate) unsafe fn run(&self, handle: *mut c_void) -> Result<(), u32> {
        // The handle is copied out: the real library takes no lock over a call either, so two threads that share a handle
        // meet in its workspace.
        let (home, stream, (workspace, workspace_bytes), atomics_mode, pointer_mode) = {
            // SAFETY: the caller's promise.
            unsafe {
                crate::with(handle, |state| {
                    Ok((state.home, state.stream, state.workspace(), state.atomics_mode, state.pointer_mode))
                })
            }?
        };
        let runtime = Runtime::get()?;
        let [transpose_a, transpose_b] = self.transpose.map(|operation| match operation {
            111 => Ok(false),
            // Elements are real, so that conjugating changes nothing.
            112 | 113 => Ok(true),
            _ => Err(INVALID_ENUM),
        });
        let (transpose_a, transpose_b) = (transpose_a?, transpose_b?);
        let ([a_type, b_type, c_type], compute_type) =
            meaning(self.symbol, runtime.major, self.types, self.compute_type)?;
        if self.algo != 160 {
            return Err(INVALID_ENUM);
        }
        let [m, n, k] = self.sizes.map(not_negative);
        let (m, n, k) = (m?, n?, k?);
        let (count, batched) = match self.batch {
            Batch::One => (1, false),
            Batch::Of(count) => (not_negative(count)?, true),
        };
        let [a, b, c] = self.matrices;
        let rows = [if transpose_a { k } else { m }, if transpose_b { n } else { k }, m];
        for (matrix, rows) in [a, b, c].iter().zip(rows) {
            if not_negative(matrix.ld)? < rows.max(1) || matrix.stride < 0 {
                return Err(INVALID_VALUE);
            }
        }
        let compute = Compute::new(compute_type).map_err(|_| NOT_SUPPORTED)?;
        compute.check(compute_type, a_type, b_type, c_type).map_err(|_| NOT_SUPPORTED)?;
        if compute.tf32 && !runtime.has_tf32() {
            return Err(NOT_SUPPORTED);
        }
        if m == 0 || n == 0 || count == 0 {
            return Ok(());
        }
        if self.alpha.is_null() || self.beta.is_null() {
            return Err(INVALID_VALUE);
        }
        let on_device = pointer_mode == 1;
        let scale = |scale: *const c_void| {
            // SAFETY: the caller says that alpha and beta are valid; in this mode they are read during the call.
            if on_device { scale as u64 } else { unsafe { read_scale(scale, compute.scale) }.to_bits() }
        };
        let product = Product {
            device: home.device,
            input: a_type,
            output: c_type,
            bias_type: c_type,
            scale_type: compute.scale,
            epilogue: 1,
            transpose_a: transpose_a.into(),
            transpose_b: transpose_b.into(),
            tf32: compute.tf32.into(),
            atomics: atomics_mode,
            device_scales: on_device.into(),
            batched: batched.into(),
            stream: stream as *mut c_void,
            m,
            n,
            k,
            lda: not_negative(a.ld)?,
            ldb: not_negative(b.ld)?,
            ldc: not_negative(c.ld)?,
            ldd: not_negative(c.ld)?,
            batch: count,
            stride_a: not_negative(a.stride)?,
            stride_b: not_negative(b.stride)?,
            stride_c: not_negative(c.stride)?,
            stride_d: not_negative(c.stride)?,
            a: a.address,
            b: b.address,
            c: c.address,
            d: c.address,
            bias: 0,
            alpha: scale(self.alpha),
            beta: scale(self.beta),
            workspace,
            workspace_bytes,
        };
        // SAFETY: the caller's promise.
        unsafe { runtime.launch(&product) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_symbol_takes_the_numbers_of_its_version() {
        let new = |symbol, major| meaning(symbol, major, [R_16BF, R_16BF, R_32F], 2);
        assert_eq!(new(Symbol::V2, 2), Ok(([R_16BF, R_16BF, R_32F], 68)));
        assert_eq!(new(Symbol::Plain, 3), Ok(([R_16BF, R_16BF, R_32F], 68)));
        assert_eq!(new(Symbol::Plain, 2), Err(INVALID_ENUM));
        let old = |symbol, major| meaning(symbol, major, [168, 168, 151], 151);
        assert_eq!(old(Symbol::Plain, 2), Ok(([R_16BF, R_16BF, R_32F], 68)));
        assert_eq!(old(Symbol::Plain, 3), Err(NOT_SUPPORTED));
        assert_eq!(meaning(Symbol::Plain, 2, [152; 3], 152), Ok(([R_64F; 3], 70)));
        assert_eq!(meaning(Symbol::Plain, 2, [160, 160, 162], 162), Err(NOT_SUPPORTED));
    }
}
