//! Products: what the arguments of a call say, and what of it is refused.

use std::ffi::c_void;

use highwater_simulated_blas::driver::Driver;
use highwater_simulated_blas::status::INVALID_VALUE;
use highwater_simulated_blas::table::Product;
use highwater_simulated_blas::types::{Compute, read_scale};

use crate::handle::Workspace;

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

/// The arguments of a call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call {
    /// `cublasOperation_t` of A and B.
    pub(crate) transpose: [u32; 2],
    /// m, n, k.
    pub(crate) sizes: [i64; 3],
    /// `cudaDataType` of A, B, C.
    pub(crate) types: [u32; 3],
    /// `cublasComputeType_t`.
    pub(crate) compute_type: u32,
    /// `cublasGemmAlgo_t`; any there is will do.
    pub(crate) algo: i32,
    pub(crate) alpha: *const c_void,
    pub(crate) beta: *const c_void,
    /// A, B, C.
    pub(crate) matrices: [Matrix; 3],
    pub(crate) batch: Batch,
}

fn not_negative(value: i64) -> Result<u64, u32> {
    u64::try_from(value).map_err(|_| INVALID_VALUE)
}

impl Call {
    /// One product of matrices of one type.
    pub(crate) fn of_one_type(
        data_type: u32,
        compute_type: u32,
        transpose: [u32; 2],
        sizes: [i64; 3],
        alpha: *const c_void,
        beta: *const c_void,
        matrices: [Matrix; 3],
    ) -> Self {
        let types = [data_type; 3];
        Self { transpose, sizes, types, compute_type, algo: -1, alpha, beta, matrices, batch: Batch::One }
    }

    /// Checks the call and enqueues the product.
    ///
    /// # Safety
    /// `handle` is null or was given by `cublasCreate_v2`; alpha and beta are null or valid, on the host or the device as
    /// the handle's pointer mode says; the bound stream is one of the driver.
    pub(crate) unsafe fn run(&self, handle: *mut c_void) -> Result<(), u32> {
        // The handle is copied out: the real library takes no lock over a call either, so two threads that share a handle
        // meet in its workspace.
        let (home, stream, workspace, tf32, atomics_mode, pointer_mode) = {
            // SAFETY: the caller's promise.
            unsafe {
                crate::with(handle, |state| {
                    let workspace = state.workspace();
                    let tf32 = state.allows_tf32();
                    Ok((state.home, state.stream, workspace, tf32, state.atomics_mode, state.pointer_mode))
                })
            }?
        };
        let [m, n, k] = self.sizes.map(not_negative);
        let (m, n, k) = (m?, n?, k?);
        let (count, batched) = match self.batch {
            Batch::One => (1, false),
            Batch::Of(count) => (not_negative(count)?, true),
        };
        let [transpose_a, transpose_b] = self.transpose.map(|operation| match operation {
            0 => Ok(false),
            // Elements are real, so that conjugating changes nothing.
            1 | 2 => Ok(true),
            _ => Err(INVALID_VALUE),
        });
        let (transpose_a, transpose_b) = (transpose_a?, transpose_b?);
        let [a, b, c] = self.matrices;
        let rows = [if transpose_a { k } else { m }, if transpose_b { n } else { k }, m];
        for (matrix, rows) in [a, b, c].iter().zip(rows) {
            if not_negative(matrix.ld)? < rows.max(1) || matrix.stride < 0 {
                return Err(INVALID_VALUE);
            }
        }
        if !matches!(self.algo, -1..=23 | 99..=115) || self.alpha.is_null() || self.beta.is_null() {
            return Err(INVALID_VALUE);
        }
        let compute = Compute::new(self.compute_type)?;
        let [a_type, b_type, c_type] = self.types;
        compute.check(self.compute_type, a_type, b_type, c_type)?;
        if m == 0 || n == 0 || count == 0 {
            return Ok(());
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
            tf32: (compute.tf32 || (compute.follows_mode && tf32)).into(),
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
            workspace: 0,
            workspace_bytes: 0,
        };
        let driver = Driver::get()?;
        // SAFETY: the caller's promise.
        unsafe {
            match workspace {
                Workspace::Own => driver.launch_on_own_workspace(&product),
                Workspace::Bound { address, bytes } => {
                    driver.launch(&Product { workspace: address, workspace_bytes: bytes, ..product })
                }
                Workspace::None => driver.launch(&product),
            }
        }
    }
}
