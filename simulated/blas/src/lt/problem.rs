//! A matrix product, as its descriptors specify it.

use std::ffi::c_void;
use std::hash::{Hash, Hasher};

use super::Fault;
use super::attributes::{Description, Layout};
use crate::product::is_transposed;
use crate::table::Product;
use crate::types::{Compute, R_32F, R_64F, scale};

/// No epilogue, for both vendors.
const NO_EPILOGUE: u32 = 1;
/// The alignment of a workspace address that is accepted.
const WORKSPACE_ALIGNMENT: u64 = 16;

/// A product whose descriptors were checked.
#[derive(Debug, Clone, Copy)]
pub struct Problem {
    /// The product without addresses and scales.
    product: Product,
    /// The value for `product.bias`.
    bias: u64,
}

/// The arguments of a call.
#[derive(Debug, Clone, Copy)]
pub struct Operands {
    /// Alpha.
    pub alpha: *const c_void,
    /// Beta.
    pub beta: *const c_void,
    /// The address of A.
    pub a: u64,
    /// The address of B.
    pub b: u64,
    /// The address of C.
    pub c: u64,
    /// The address of D.
    pub d: u64,
    /// The address of the workspace.
    pub workspace: u64,
    /// The bytes of the workspace.
    pub workspace_bytes: u64,
    /// The stream.
    pub stream: *mut c_void,
}

impl Problem {
    /// Returns the problem of a call. `compute_type` is cuBLAS's number, and `plain` is the number of the first operation.
    ///
    /// # Errors
    /// `Invalid` for descriptors that contradict each other, `Unsupported` for products that the kernels cannot compute.
    pub fn new(
        description: &Description,
        layouts: [Layout; 4],
        compute_type: Option<u32>,
        plain: u32,
    ) -> Result<Self, Fault> {
        let [a, b, c, d] = layouts;
        let compute_type = compute_type.ok_or(Fault::Unsupported)?;
        let compute = Compute::new(compute_type).map_err(|_| Fault::Unsupported)?;
        let transposed = |operation| is_transposed(operation, plain).ok_or(Fault::Invalid);
        let (transpose_a, transpose_b) = (transposed(description.transpose_a)?, transposed(description.transpose_b)?);
        let op = |layout: &Layout, transposed| {
            if transposed { (layout.columns, layout.rows) } else { (layout.rows, layout.columns) }
        };
        let ((m, k), (inner, n)) = (op(&a, transpose_a), op(&b, transpose_b));
        let fits = inner == k && [c, d].iter().all(|layout| (layout.rows, layout.columns) == (m, n));
        let usual = |layout: &Layout| {
            let tight = u64::try_from(layout.ld).is_ok_and(|ld| ld >= layout.rows.max(1));
            layout.batch >= 1 && layout.batch == d.batch && layout.stride >= 0 && (tight || layout.order != 0)
        };
        if !fits || !layouts.iter().all(usual) {
            return Err(Fault::Invalid);
        }
        let has_bias = description.epilogue & 4 != 0;
        let special = description.is_special
            || description.pointer_mode > 1
            || description.bias_batch_stride != 0
            || !matches!(description.epilogue, 1 | 2 | 4 | 6 | 32 | 36)
            || layouts.iter().any(|layout| layout.is_special || layout.order != 0);
        let bias_type = u32::try_from(description.bias_type).unwrap_or(d.data_type);
        // A bias has the type of D. The manual lists 32 bits beside halves for some types only, but it is harmless.
        let bias_fits = !has_bias || bias_type == d.data_type || (bias_type == R_32F && d.data_type != R_64F);
        if special || description.scale_type != compute.scale || c.data_type != d.data_type || !bias_fits {
            return Err(Fault::Unsupported);
        }
        compute.check(compute_type, a.data_type, b.data_type, d.data_type).map_err(|_| Fault::Unsupported)?;
        // An empty product has no algorithm.
        if [m, n, k].contains(&0) {
            return Err(Fault::Invalid);
        }
        // The check above excludes negative numbers.
        let number = |value: i64| value.unsigned_abs();
        let product = Product {
            device: 0,
            input: a.data_type,
            output: d.data_type,
            bias_type,
            scale_type: compute.scale,
            epilogue: description.epilogue,
            transpose_a: transpose_a.into(),
            transpose_b: transpose_b.into(),
            tf32: compute.tf32.into(),
            atomics: 0,
            device_scales: description.pointer_mode,
            batched: (d.batch > 1).into(),
            stream: std::ptr::null_mut(),
            m,
            n,
            k,
            lda: number(a.ld),
            ldb: number(b.ld),
            ldc: number(c.ld),
            ldd: number(d.ld),
            batch: u64::from(d.batch.unsigned_abs()),
            stride_a: number(a.stride),
            stride_b: number(b.stride),
            stride_c: number(c.stride),
            stride_d: number(d.stride),
            a: 0,
            b: 0,
            c: 0,
            d: 0,
            bias: 0,
            alpha: 0,
            beta: 0,
            workspace: 0,
            workspace_bytes: 0,
        };
        Ok(Self { product, bias: description.bias })
    }

    /// Returns the bytes of all intermediate results together.
    #[must_use]
    pub fn intermediate_bytes(&self) -> u64 {
        self.product.intermediate_bytes()
    }

    /// Returns a number that differs between problems, except by accident.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        let p = &self.product;
        let mut hasher = std::hash::DefaultHasher::new();
        [p.input, p.output, p.bias_type, p.scale_type, p.epilogue, p.transpose_a, p.transpose_b, p.tf32, p.batched]
            .hash(&mut hasher);
        [p.m, p.n, p.k, p.lda, p.ldb, p.ldc, p.ldd, p.batch, p.stride_a, p.stride_b, p.stride_c, p.stride_d]
            .hash(&mut hasher);
        hasher.finish()
    }

    /// Returns whether the compute type rounds factors to TF32.
    #[must_use]
    pub fn rounds_to_tf32(&self) -> bool {
        self.product.tf32 != 0
    }

    /// Returns the product of a call on `device` that uses `needed` bytes of workspace.
    ///
    /// # Errors
    /// `Invalid` for arguments that a call must not have.
    ///
    /// # Safety
    /// Alpha and beta must be null or valid, on the host or the device as the description states.
    pub unsafe fn product(
        &self,
        device: u32,
        needed: u64,
        operands: &Operands,
        without_factors: WithoutFactors,
    ) -> Result<Product, Fault> {
        let &Operands { alpha, beta, a, b, c, d, workspace, workspace_bytes, stream } = operands;
        let has_room = workspace_bytes >= needed
            && workspace.is_multiple_of(WORKSPACE_ALIGNMENT)
            && (needed == 0 || workspace != 0);
        let has_bias = self.product.epilogue & 4 != 0;
        if alpha.is_null() || beta.is_null() || !has_room || (has_bias && self.bias == 0) {
            return Err(Fault::Invalid);
        }
        let mut product = self.product;
        let on_device = product.device_scales != 0;
        // SAFETY: The caller promises that alpha and beta are valid.
        let [alpha, beta] = [alpha, beta].map(|place| unsafe { scale(place, product.scale_type, on_device) });
        let reads_c = on_device || f64::from_bits(beta) != 0.0;
        let in_place = c == d && (product.ldc, product.stride_c) != (product.ldd, product.stride_d);
        if (reads_c && (c == 0 || in_place)) || d == 0 || a == 0 || b == 0 {
            return Err(Fault::Invalid);
        }
        product.device = device;
        (product.stream, product.a, product.b, product.c, product.d) = (stream, a, b, c, d);
        (product.bias, product.alpha, product.beta) = (self.bias, alpha, beta);
        if without_factors == WithoutFactors::OmitsEpilogue && !on_device && f64::from_bits(alpha) == 0.0 {
            product.epilogue = NO_EPILOGUE;
        }
        (product.workspace, product.workspace_bytes) = (workspace, needed);
        Ok(product)
    }
}

/// The behavior of a library for an alpha of 0 on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WithoutFactors {
    /// It omits the epilogue (cuBLASLt).
    OmitsEpilogue,
    /// It computes as for any other alpha.
    Computes,
}
