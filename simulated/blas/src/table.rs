//! The private table of the simulated driver, through which the BLAS libraries launch kernels.

use std::ffi::c_void;

/// The symbol of the driver that returns the table: `extern "C" fn() -> *const Table`.
pub const SYMBOL: &[u8] = b"highwater_simulated_blas\0";

/// The version of the table. A driver of another build may have another.
pub const VERSION: u64 = 1;

/// `extern "C" fn() -> *const Table`.
pub type GetTable = unsafe extern "C" fn() -> *const Table;

/// The table.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Table {
    /// [`VERSION`].
    pub version: u64,
    /// Bytes of a [`Product`].
    pub product_bytes: u64,
    /// The device whose context is current in the thread; makes that of device 0 current if none is.
    pub current_device: unsafe extern "C" fn(device: *mut u32) -> u32,
    /// Enqueues the kernels of a product. Returns a `CUresult`.
    pub launch: unsafe extern "C" fn(product: *const Product) -> u32,
}

/// `D = epilogue(alpha * op(A) * op(B) + beta * C)`, checked as far as that needs no device.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Product {
    /// Ordinal of the device that the library's handle belongs to.
    pub device: u32,
    /// `cudaDataType` of A and B.
    pub input: u32,
    /// `cudaDataType` of C and D.
    pub output: u32,
    /// `cudaDataType` of the bias.
    pub bias_type: u32,
    /// `cudaDataType` of the scales in device memory.
    pub scale_type: u32,
    /// `cublasLtEpilogue_t`.
    pub epilogue: u32,
    /// 1 for a transposed A.
    pub transpose_a: u32,
    /// 1 for a transposed B.
    pub transpose_b: u32,
    /// 1 for factors rounded to TF32.
    pub tf32: u32,
    /// 1 for sums in any order.
    pub atomics: u32,
    /// 1 if `alpha` and `beta` are device addresses.
    pub device_scales: u32,
    /// 1 for a batch, of `batch` products.
    pub batched: u32,
    /// The `CUstream`.
    pub stream: *mut c_void,
    /// Rows of D.
    pub m: u64,
    /// Columns of D.
    pub n: u64,
    /// Columns of op(A).
    pub k: u64,
    /// Leading dimension of A.
    pub lda: u64,
    /// Leading dimension of B.
    pub ldb: u64,
    /// Leading dimension of C.
    pub ldc: u64,
    /// Leading dimension of D.
    pub ldd: u64,
    /// Products of a batch.
    pub batch: u64,
    /// Elements from one A to the next.
    pub stride_a: u64,
    /// Elements from one B to the next.
    pub stride_b: u64,
    /// Elements from one C to the next.
    pub stride_c: u64,
    /// Elements from one D to the next.
    pub stride_d: u64,
    /// Address of A.
    pub a: u64,
    /// Address of B.
    pub b: u64,
    /// Address of C.
    pub c: u64,
    /// Address of D.
    pub d: u64,
    /// Address of the bias, if the epilogue has one.
    pub bias: u64,
    /// The bits of an `f64`, or an address.
    pub alpha: u64,
    /// As `alpha`.
    pub beta: u64,
    /// Address of the workspace.
    pub workspace: u64,
    /// Bytes of the workspace; 0 for a product that is one kernel.
    pub workspace_bytes: u64,
}

impl Product {
    /// Bytes of all intermediate results at once.
    #[must_use]
    pub fn intermediate_bytes(&self) -> u64 {
        let wide = if self.input == crate::types::R_64F { 8u64 } else { 4 };
        self.m.saturating_mul(self.n).saturating_mul(self.batch).saturating_mul(wide)
    }
}
