//! The part of a product's call that every vendor shares. The numbers of operations and types, the order of checks, and the
//! codes belong to each library.

use std::ffi::c_void;

use crate::table::Product;
use crate::types::{Compute, scale};

/// One matrix, or the first of a batch.
#[derive(Debug, Clone, Copy)]
pub struct Matrix {
    address: u64,
    ld: i64,
    stride: i64,
}

impl Matrix {
    /// Describes a matrix by its address, its leading dimension and the distance to the next one of a batch, in elements.
    #[must_use]
    pub fn new(address: *const c_void, ld: impl Into<i64>, stride: i64) -> Self {
        Self { address: address as u64, ld: ld.into(), stride }
    }
}

/// The number of products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Batch {
    /// One product.
    One,
    /// Creates a batch of this number of products.
    Of(i64),
}

/// The arguments of a call, in the vendor's numbers.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    /// The operations of A and B.
    pub transpose: [u32; 2],
    /// m, n, k.
    pub sizes: [i64; 3],
    /// The types of A, B, C.
    pub types: [u32; 3],
    /// The compute type.
    pub compute_type: u32,
    /// The algorithm.
    pub algo: i64,
    /// The address of alpha.
    pub alpha: *const c_void,
    /// The address of beta.
    pub beta: *const c_void,
    /// A, B, C.
    pub matrices: [Matrix; 3],
    /// The number of products.
    pub batch: Batch,
}

/// The checked sizes and addresses of a product.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    transpose: [bool; 2],
    sizes: [u64; 3],
    addresses: [u64; 3],
    lds: [u64; 3],
    strides: [u64; 3],
    count: u64,
    batched: bool,
}

/// The settings of a handle that its products use.
#[derive(Debug, Clone, Copy)]
pub struct Bound {
    /// The device, by its number in the table.
    pub device: u32,
    /// The stream.
    pub stream: usize,
    /// Whether factors of 32 bits may be rounded to TF32.
    pub allows_tf32: bool,
    /// 1 for sums in any order.
    pub atomics_mode: u32,
    /// 1 if alpha and beta are on the device.
    pub pointer_mode: u32,
}

/// Returns whether an operation transposes; `None` for an unknown number. Each vendor counts from its own number for the plain
/// matrix.
#[must_use]
pub const fn is_transposed(operation: u32, plain: u32) -> Option<bool> {
    match operation.checked_sub(plain) {
        Some(0) => Some(false),
        // Elements are real, so that conjugating changes nothing.
        Some(1 | 2) => Some(true),
        _ => None,
    }
}

fn not_negative<const N: usize>(values: [i64; N]) -> Option<[u64; N]> {
    values.iter().all(|&value| value >= 0).then(|| values.map(i64::unsigned_abs))
}

impl Call {
    /// Returns whether A and B are transposed; `None` for an unknown operation. `plain` is the number of the plain operation.
    #[must_use]
    pub fn transposes(&self, plain: u32) -> Option<[bool; 2]> {
        let [a, b] = self.transpose;
        Some([is_transposed(a, plain)?, is_transposed(b, plain)?])
    }

    /// Returns the sizes and addresses; `None` for a negative number or a leading dimension below the rows of a column.
    #[must_use]
    pub fn shape(&self, transpose: [bool; 2]) -> Option<Shape> {
        let sizes = not_negative(self.sizes)?;
        let (count, batched) = match self.batch {
            Batch::One => (1, false),
            Batch::Of(count) => (u64::try_from(count).ok()?, true),
        };
        let lds = not_negative(self.matrices.map(|matrix| matrix.ld))?;
        let strides = not_negative(self.matrices.map(|matrix| matrix.stride))?;
        let ([m, n, k], [transpose_a, transpose_b]) = (sizes, transpose);
        let rows = [if transpose_a { k } else { m }, if transpose_b { n } else { k }, m];
        if lds.iter().zip(rows).any(|(&ld, rows)| ld < rows.max(1)) {
            return None;
        }
        let addresses = self.matrices.map(|matrix| matrix.address);
        Some(Shape { transpose, sizes, addresses, lds, strides, count, batched })
    }

    /// Returns the product for the table, in place and without a workspace. The types are those of the factors and the result, in
    /// NVIDIA's numbers.
    ///
    /// # Safety
    /// The caller must keep alpha and beta valid, on the host or the device according to the pointer mode.
    #[must_use]
    pub unsafe fn product(&self, shape: &Shape, [input, output]: [u32; 2], compute: Compute, bound: &Bound) -> Product {
        let &Shape { transpose: [transpose_a, transpose_b], sizes: [m, n, k], count, batched, .. } = shape;
        let ([a, b, c], [lda, ldb, ldc], [stride_a, stride_b, stride_c]) = (shape.addresses, shape.lds, shape.strides);
        let on_device = bound.pointer_mode == 1;
        // SAFETY: forwarded to the caller.
        let [alpha, beta] = [self.alpha, self.beta].map(|place| unsafe { scale(place, compute.scale, on_device) });
        Product {
            device: bound.device,
            input,
            output,
            bias_type: output,
            scale_type: compute.scale,
            epilogue: 1,
            transpose_a: transpose_a.into(),
            transpose_b: transpose_b.into(),
            tf32: (compute.tf32 || (compute.follows_mode && bound.allows_tf32)).into(),
            atomics: bound.atomics_mode,
            device_scales: on_device.into(),
            batched: batched.into(),
            stream: bound.stream as *mut c_void,
            m,
            n,
            k,
            lda,
            ldb,
            ldc,
            ldd: ldc,
            batch: count,
            stride_a,
            stride_b,
            stride_c,
            stride_d: stride_c,
            a,
            b,
            c,
            d: c,
            bias: 0,
            alpha,
            beta,
            workspace: 0,
            workspace_bytes: 0,
        }
    }
}

impl Shape {
    /// Returns whether the product has no elements.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        let [m, n, _] = self.sizes;
        m == 0 || n == 0 || self.count == 0
    }
}

/// Exports functions for one product and for a batch of products, whose arguments every vendor shares. Each line holds their
/// names, the type of their sizes, and an argument of `run` besides the [`Call`] and the handle. The first lines are those of
/// [`export`](crate::export).
///
/// ```text
/// export_gemm! {
///     /// Handles are null or were given by `cublasCreate_v2`.
///     call -> u32;
///     by run, algorithms are i32;
///     cublasGemmEx, cublasGemmStridedBatchedEx: i32;
/// }
/// ```
#[macro_export]
macro_rules! export_gemm {
    (
        #[$promise:meta]
        $call:ident -> $code:ty;
        $(checked in $check:ident against $vendor:path, $kind:tt;)?
        by $run:ident, algorithms are $algorithm:ty;
        $($one:ident, $batched:ident: $size:ty $(, $besides:expr)?;)*
    ) => {
        $crate::export! {
            #[$promise]
            $call -> $code;
            $(checked in $check against $vendor, $kind;)?

            $(
                fn $one(
                    handle: *mut c_void, transa: u32, transb: u32, m: $size, n: $size, k: $size,
                    alpha: *const c_void, a: *const c_void, a_type: u32, lda: $size,
                    b: *const c_void, b_type: u32, ldb: $size,
                    beta: *const c_void, c: *mut c_void, c_type: u32, ldc: $size,
                    compute_type: u32, algo: $algorithm,
                ) {
                    use $crate::product::{Batch, Call, Matrix};
                    let call = Call {
                        transpose: [transa, transb], sizes: [m, n, k].map(i64::from), types: [a_type, b_type, c_type],
                        compute_type, algo: i64::from(algo), alpha, beta, batch: Batch::One,
                        matrices: [Matrix::new(a, lda, 0), Matrix::new(b, ldb, 0), Matrix::new(c, ldc, 0)],
                    };
                    // SAFETY: forwarded to the caller.
                    unsafe { $run(&call, handle $(, $besides)?) }
                }

                fn $batched(
                    handle: *mut c_void, transa: u32, transb: u32, m: $size, n: $size, k: $size,
                    alpha: *const c_void, a: *const c_void, a_type: u32, lda: $size, stride_a: i64,
                    b: *const c_void, b_type: u32, ldb: $size, stride_b: i64,
                    beta: *const c_void, c: *mut c_void, c_type: u32, ldc: $size, stride_c: i64,
                    batch_count: $size, compute_type: u32, algo: $algorithm,
                ) {
                    use $crate::product::{Batch, Call, Matrix};
                    let call = Call {
                        transpose: [transa, transb], sizes: [m, n, k].map(i64::from), types: [a_type, b_type, c_type],
                        compute_type, algo: i64::from(algo), alpha, beta, batch: Batch::Of(i64::from(batch_count)),
                        matrices: [
                            Matrix::new(a, lda, stride_a), Matrix::new(b, ldb, stride_b), Matrix::new(c, ldc, stride_c),
                        ],
                    };
                    // SAFETY: forwarded to the caller.
                    unsafe { $run(&call, handle $(, $besides)?) }
                }
            )*
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{R_16F, R_32F};

    fn call(sizes: [i64; 3], lds: [i64; 3], strides: [i64; 3], batch: Batch) -> Call {
        let matrix = |index: usize| Matrix { address: 1000 + index as u64, ld: lds[index], stride: strides[index] };
        let (alpha, beta) = (std::ptr::null(), std::ptr::null());
        let matrices = [matrix(0), matrix(1), matrix(2)];
        Call { transpose: [0; 2], sizes, types: [R_32F; 3], compute_type: 68, algo: -1, alpha, beta, matrices, batch }
    }

    #[test]
    fn operations_are_counted_from_the_plain_one() {
        for plain in [0, 111] {
            let seen = [plain, plain + 1, plain + 2, plain + 3].map(|operation| is_transposed(operation, plain));
            assert_eq!(seen, [Some(false), Some(true), Some(true), None]);
        }
        assert_eq!(is_transposed(110, 111), None);
    }

    #[test]
    fn a_column_fits_into_its_leading_dimension_and_no_number_is_negative() {
        let shape = |transpose, sizes, lds| call(sizes, lds, [0; 3], Batch::One).shape(transpose);
        assert!(shape([false; 2], [2, 3, 4], [2, 4, 2]).is_some());
        assert!(shape([true; 2], [2, 3, 4], [4, 3, 2]).is_some());
        assert!(shape([true; 2], [2, 3, 4], [3, 3, 2]).is_none());
        for short in [[1, 4, 2], [2, 3, 2], [2, 4, 1], [-2, 4, 2]] {
            assert!(shape([false; 2], [2, 3, 4], short).is_none(), "{short:?}");
        }
        // Nothing is one column too.
        assert!(shape([false; 2], [0; 3], [0, 1, 1]).is_none());
        assert!(shape([false; 2], [0; 3], [1; 3]).is_some_and(|shape| shape.is_empty()));
        assert!(shape([false; 2], [2, 3, 0], [2, 1, 2]).is_some_and(|shape| !shape.is_empty()));
        assert!(shape([false; 2], [2, -3, 4], [2, 4, 2]).is_none());
        let batch = |count, stride| call([1; 3], [1; 3], [0, stride, 0], Batch::Of(count)).shape([false; 2]);
        assert!(batch(0, 0).is_some_and(|shape| shape.is_empty()));
        assert!(batch(2, 1).is_some_and(|shape| !shape.is_empty()));
        assert!(batch(-1, 1).is_none() && batch(2, -1).is_none());
    }

    #[test]
    fn a_product_has_each_number_at_its_place() {
        let (alpha, beta) = (1.5_f32, 0.5_f32);
        let mut call = call([2, 3, 4], [5, 6, 7], [8, 9, 10], Batch::Of(11));
        (call.alpha, call.beta) = ((&raw const alpha).cast(), (&raw const beta).cast());
        let shape = call.shape([false, true]).unwrap();
        let compute = Compute::new(68).unwrap();
        let mut bound = Bound { device: 12, stream: 13, allows_tf32: true, atomics_mode: 1, pointer_mode: 0 };
        // SAFETY: alpha and beta are live, on the host.
        let product = unsafe { call.product(&shape, [R_16F, R_32F], compute, &bound) };
        assert_eq!((product.device, product.stream as usize, product.atomics, product.tf32), (12, 13, 1, 1));
        assert_eq!(
            (product.input, product.output, product.bias_type, product.scale_type),
            (R_16F, R_32F, R_32F, R_32F)
        );
        assert_eq!((product.transpose_a, product.transpose_b, product.batched, product.batch), (0, 1, 1, 11));
        assert_eq!((product.m, product.n, product.k), (2, 3, 4));
        assert_eq!((product.lda, product.ldb, product.ldc, product.ldd), (5, 6, 7, 7));
        assert_eq!((product.stride_a, product.stride_b, product.stride_c, product.stride_d), (8, 9, 10, 10));
        assert_eq!((product.a, product.b, product.c, product.d), (1000, 1001, 1002, 1002));
        assert_eq!((f64::from_bits(product.alpha), f64::from_bits(product.beta)), (1.5, 0.5));
        assert_eq!((product.device_scales, product.workspace_bytes), (0, 0));
        bound.pointer_mode = 1;
        // SAFETY: addresses are not read in this mode.
        let product = unsafe { call.product(&shape, [R_16F, R_32F], compute, &bound) };
        assert_eq!((product.device_scales, product.alpha), (1, call.alpha as u64));
    }
}
