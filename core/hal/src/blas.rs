//! The trait [`BlasHandle`]: one vendor context for matrix products, and the values that describe a product.
//!
//! Matrices are **column-major**, as in every BLAS: element (row, column) of a matrix with leading dimension `ld` is at
//! index `row + column * ld`. A row-major matrix is its own transpose in these terms.

use std::fmt;

use crate::error::{Error, ErrorKind, Result};
use crate::id::StreamId;
use crate::memory::DevicePtr;

/// Which kind of handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BlasKind {
    /// The classic BLAS: cuBLAS, hipBLAS.
    Blas,
    /// Plans with epilogues: cuBLASLt, hipBLASLt.
    Lt,
}

/// How to make a handle, for [`Backend::create_blas_handle`](crate::Backend::create_blas_handle).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlasOptions {
    /// Which kind.
    pub kind: BlasKind,
}

impl BlasOptions {
    /// A handle of `kind`.
    #[must_use]
    pub const fn new(kind: BlasKind) -> Self {
        Self { kind }
    }
}

/// Precision of the multiplications of 32-bit GEMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum MathMode {
    /// Full 32 bits.
    #[default]
    Default,
    /// Inputs rounded to TF32 (10 bits of mantissa). Needs the capability `tf32`.
    Tf32,
}

/// Whether kernels may add with atomics, which is faster and not repeatable bit for bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum AtomicsMode {
    /// Repeatable.
    #[default]
    NotAllowed,
    /// Possibly faster. Needs the capability `atomics_mode`.
    Allowed,
}

/// Element type of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DataType {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// IEEE single precision.
    F32,
    /// IEEE double precision.
    F64,
}

impl DataType {
    /// Size of an element in bytes.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }
}

/// Whether a factor is used as it is or transposed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Transpose {
    /// As it is.
    #[default]
    No,
    /// Transposed.
    Yes,
}

/// A batch of products whose matrices lie at equal distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StridedBatch {
    /// How many products.
    pub count: usize,
    /// Elements from one A to the next; 0 uses the same A in each product.
    pub stride_a: usize,
    /// Elements from one B to the next; 0 uses the same B in each product.
    pub stride_b: usize,
    /// Elements from one C to the next. The Cs lie one behind the other, or side by side. Side by side, the same column
    /// of the second C follows each column of the first, and so on, and `ldc` spans all of them.
    pub stride_c: usize,
}

/// Shape of `C = alpha * op(A) * op(B) + beta * C`: op(A) is m x k, op(B) is k x n, C is m x n.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct GemmShape {
    /// Element type of A and B; half types accumulate in 32 bits.
    pub data_type: DataType,
    /// Element type of C, D and the bias: that of A and B, or `F32` where those are `F16` or `Bf16`.
    pub output: DataType,
    /// Whether op(A) is A transposed.
    pub transpose_a: Transpose,
    /// Whether op(B) is B transposed.
    pub transpose_b: Transpose,
    /// Rows of C.
    pub m: usize,
    /// Columns of C.
    pub n: usize,
    /// Columns of op(A) and rows of op(B).
    pub k: usize,
    /// Leading dimension of A, in elements.
    pub lda: usize,
    /// Leading dimension of B, in elements.
    pub ldb: usize,
    /// Leading dimension of C, in elements.
    pub ldc: usize,
    /// Several products at once.
    pub batch: Option<StridedBatch>,
}

impl GemmShape {
    /// One product of packed matrices, nothing transposed.
    #[must_use]
    pub const fn new(data_type: DataType, m: usize, n: usize, k: usize) -> Self {
        Self {
            data_type,
            output: data_type,
            transpose_a: Transpose::No,
            transpose_b: Transpose::No,
            m,
            n,
            k,
            lda: if m == 0 { 1 } else { m },
            ldb: if k == 0 { 1 } else { k },
            ldc: if m == 0 { 1 } else { m },
            batch: None,
        }
    }

    /// The same product with a result of another type than the factors'. Needs `gemm_mixed` where the two differ.
    ///
    /// ```
    /// use highwater_hal::{DataType, GemmShape};
    ///
    /// let shape = GemmShape::new(DataType::Bf16, 2, 2, 2).with_output(DataType::F32);
    /// assert!(shape.is_mixed());
    /// assert!(!GemmShape::new(DataType::Bf16, 2, 2, 2).is_mixed());
    /// ```
    #[must_use]
    pub const fn with_output(mut self, output: DataType) -> Self {
        self.output = output;
        self
    }

    /// Whether the result is of another type than the factors.
    #[must_use]
    pub fn is_mixed(&self) -> bool {
        self.output != self.data_type
    }

    /// The same product with A stored transposed (k x m, packed).
    #[must_use]
    pub const fn with_transposed_a(mut self) -> Self {
        self.transpose_a = Transpose::Yes;
        self.lda = if self.k == 0 { 1 } else { self.k };
        self
    }

    /// The same product with B stored transposed (n x k, packed).
    #[must_use]
    pub const fn with_transposed_b(mut self) -> Self {
        self.transpose_b = Transpose::Yes;
        self.ldb = if self.n == 0 { 1 } else { self.n };
        self
    }

    /// The same with other leading dimensions, in elements.
    #[must_use]
    pub const fn with_leading_dimensions(mut self, lda: usize, ldb: usize, ldc: usize) -> Self {
        self.lda = lda;
        self.ldb = ldb;
        self.ldc = ldc;
        self
    }

    /// The same for a batch.
    #[must_use]
    pub const fn with_batch(mut self, batch: StridedBatch) -> Self {
        self.batch = Some(batch);
        self
    }

    /// Rows of A as it is stored.
    #[must_use]
    pub const fn rows_a(&self) -> usize {
        match self.transpose_a {
            Transpose::No => self.m,
            Transpose::Yes => self.k,
        }
    }

    /// Columns of A as it is stored.
    #[must_use]
    pub const fn columns_a(&self) -> usize {
        match self.transpose_a {
            Transpose::No => self.k,
            Transpose::Yes => self.m,
        }
    }

    /// Rows of B as it is stored.
    #[must_use]
    pub const fn rows_b(&self) -> usize {
        match self.transpose_b {
            Transpose::No => self.k,
            Transpose::Yes => self.n,
        }
    }

    /// Columns of B as it is stored.
    #[must_use]
    pub const fn columns_b(&self) -> usize {
        match self.transpose_b {
            Transpose::No => self.n,
            Transpose::Yes => self.k,
        }
    }

    /// Number of products.
    #[must_use]
    #[inline]
    pub fn batch_count(&self) -> usize {
        self.batch.map_or(1, |batch| batch.count)
    }

    /// Whether C has no element, so that nothing is computed and nothing is touched.
    #[must_use]
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.m == 0 || self.n == 0 || self.batch_count() == 0
    }

    /// Checks leading dimensions and strides, and gives how many elements of A, B and C the product reaches, counted
    /// from the first.
    ///
    /// # Errors
    /// `InvalidArgument` for a leading dimension below the rows, overlapping Cs, or sizes past the address space.
    #[inline]
    pub fn extents(&self, operation: &'static str) -> Result<Extents> {
        self.reach().ok_or_else(|| self.unreachable(operation))
    }

    /// The extents, if nothing is wrong. Products are checked by this in each call, so what is wrong is said elsewhere.
    #[inline]
    pub fn reach(&self) -> Option<Extents> {
        let leading = self.lda >= self.rows_a().max(1) && self.ldb >= self.rows_b().max(1) && self.ldc >= self.m.max(1);
        let matrix = |rows: usize, columns: usize, ld: usize| -> Option<usize> {
            if rows == 0 || columns == 0 { Some(0) } else { (columns - 1).checked_mul(ld)?.checked_add(rows) }
        };
        let one = Extents {
            a: matrix(self.rows_a(), self.columns_a(), self.lda)?,
            b: matrix(self.rows_b(), self.columns_b(), self.ldb)?,
            c: matrix(self.m, self.n, self.ldc)?,
        };
        let all = match &self.batch {
            None => one,
            Some(batch) => {
                if !self.keeps_apart(batch, one.c) {
                    return None;
                }
                let batched = |one: usize, stride: usize| match batch.count {
                    0 => Some(0),
                    _ if one == 0 => Some(0),
                    count => (count - 1).checked_mul(stride)?.checked_add(one),
                };
                Extents {
                    a: batched(one.a, batch.stride_a)?,
                    b: batched(one.b, batch.stride_b)?,
                    c: batched(one.c, batch.stride_c)?,
                }
            }
        };
        let fits = |elements: usize, of: DataType| {
            elements.checked_mul(of.bytes()).is_some_and(|bytes| isize::try_from(bytes).is_ok())
        };
        let fits = fits(all.a, self.data_type) && fits(all.b, self.data_type) && fits(all.c, self.output);
        (leading && fits).then_some(all)
    }

    /// Returns whether the Cs of a batch lie one behind the other or side by side. Each reaches a given number of
    /// elements.
    #[inline]
    fn keeps_apart(&self, batch: &StridedBatch, reach: usize) -> bool {
        let side_by_side = || {
            let all = (batch.count - 1).checked_mul(batch.stride_c).and_then(|last| last.checked_add(self.m));
            batch.stride_c >= self.m && all.is_some_and(|all| all <= self.ldc)
        };
        batch.count <= 1 || batch.stride_c >= reach || side_by_side()
    }

    /// What is wrong with a shape that reaches nowhere.
    #[cold]
    fn unreachable(&self, operation: &'static str) -> Error {
        let invalid = |message: String| Error::new(ErrorKind::InvalidArgument, operation, message);
        for (name, ld, rows) in
            [("lda", self.lda, self.rows_a()), ("ldb", self.ldb, self.rows_b()), ("ldc", self.ldc, self.m)]
        {
            if ld < rows.max(1) {
                return invalid(format!("{name} is {ld}, the matrix has {rows} rows"))
                    .with_hint("a leading dimension is at least the number of stored rows, and at least 1");
            }
        }
        let alone = Self { batch: None, ..*self };
        if let (Some(batch), Some(one)) = (&self.batch, alone.reach())
            && !self.keeps_apart(batch, one.c)
        {
            let StridedBatch { count, stride_c, .. } = batch;
            return invalid(format!(
                "stride_c is {stride_c}, but one C reaches {} elements, and ldc is {}",
                one.c, self.ldc
            ))
            .with_hint(format!(
                "let the Cs of the batch lie one behind the other (stride_c at least {}), or side by side (stride_c at \
                     least {} and ldc at least {} * stride_c + {1})",
                one.c,
                self.m,
                count - 1
            ));
        }
        invalid(format!("{self:?} reaches past the address space"))
            .with_hint("check the sizes, leading dimensions and strides")
    }
}

/// How many elements of each matrix a product reaches, counted from the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extents {
    /// Elements of A.
    pub a: usize,
    /// Elements of B.
    pub b: usize,
    /// Elements of C.
    pub c: usize,
}

/// One matrix product on raw device addresses. `alpha` and `beta` are exact for every element type up to `F64`.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Gemm {
    /// Sizes, leading dimensions, batch.
    pub shape: GemmShape,
    /// Factor of the product.
    pub alpha: f64,
    /// Factor of the old C; with 0 the old C is not read.
    pub beta: f64,
    /// First element of A.
    pub a: DevicePtr,
    /// First element of B.
    pub b: DevicePtr,
    /// First element of C.
    pub c: DevicePtr,
}

impl Gemm {
    /// `C = A * B` (alpha 1, beta 0).
    #[must_use]
    pub const fn new(shape: GemmShape, a: DevicePtr, b: DevicePtr, c: DevicePtr) -> Self {
        Self { shape, alpha: 1.0, beta: 0.0, a, b, c }
    }

    /// The same with other factors.
    #[must_use]
    pub const fn with_scale(mut self, alpha: f64, beta: f64) -> Self {
        self.alpha = alpha;
        self.beta = beta;
        self
    }
}

/// Device memory for the intermediate results of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workspace {
    /// First byte; a multiple of the capability `workspace_alignment`.
    pub ptr: DevicePtr,
    /// Bytes.
    pub bytes: usize,
}

/// What an Lt plan does after the product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Epilogue {
    /// Nothing.
    #[default]
    None,
    /// Adds a bias vector of `m` elements to every column.
    Bias,
    /// Bias, then `max(x, 0)`.
    BiasRelu,
    /// `max(x, 0)`.
    Relu,
    /// GELU in its tanh form, which is the vendors': `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))`. The result
    /// may be off by 2^-14 of x, because devices approximate the tanh.
    Gelu,
    /// Bias, then GELU as in [`Epilogue::Gelu`].
    BiasGelu,
}

impl Epilogue {
    /// Whether the epilogue reads a bias vector.
    #[must_use]
    pub const fn has_bias(self) -> bool {
        matches!(self, Self::Bias | Self::BiasRelu | Self::BiasGelu)
    }
}

/// What an Lt plan is made for. Equal options may share a plan, so this is the key of core's cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct PlanOptions {
    /// Sizes, leading dimensions, batch.
    pub shape: GemmShape,
    /// What follows the product.
    pub epilogue: Epilogue,
    /// Bytes of workspace that the plan may use. With 0 it uses none, not even the handle's own memory.
    pub workspace_bytes: usize,
    /// Every operand's address is a multiple of this, in bytes, and of its own elements' size, which may be more where
    /// the types are mixed; quicker kernels want 16 to 256.
    pub alignment: usize,
    /// Precision of 32-bit products, which a plan fixes. Needs `tf32` for [`MathMode::Tf32`].
    pub math_mode: MathMode,
    /// Whether its kernels may add with atomics, which a plan fixes too: it is its algorithm that does. Needs
    /// `atomics_mode` for [`AtomicsMode::Allowed`].
    pub atomics_mode: AtomicsMode,
}

impl PlanOptions {
    /// A plan for `shape`, with operands aligned to their elements, in full precision and repeatable.
    #[must_use]
    pub const fn new(shape: GemmShape, epilogue: Epilogue, workspace_bytes: usize) -> Self {
        let (factor, result) = (shape.data_type.bytes(), shape.output.bytes());
        let alignment = if factor < result { factor } else { result };
        let (math_mode, atomics_mode) = (MathMode::Default, AtomicsMode::NotAllowed);
        Self { shape, epilogue, workspace_bytes, alignment, math_mode, atomics_mode }
    }

    /// The same for operands that are aligned to more than their elements.
    #[must_use]
    pub const fn with_alignment(mut self, alignment: usize) -> Self {
        self.alignment = alignment;
        self
    }

    /// The same with another precision.
    #[must_use]
    pub const fn with_math_mode(mut self, mode: MathMode) -> Self {
        self.math_mode = mode;
        self
    }

    /// The same with or without atomics.
    #[must_use]
    pub const fn with_atomics_mode(mut self, mode: AtomicsMode) -> Self {
        self.atomics_mode = mode;
        self
    }
}

/// A plan of one Lt handle; means nothing to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct PlanId(u64);

impl PlanId {
    /// The plan with this number; only the handle issues valid ones.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// Arguments of one run of an Lt plan: `D = epilogue(alpha * op(A) * op(B) + beta * C)`. D may be C.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct PlanArguments {
    /// Factor of the product.
    pub alpha: f64,
    /// Factor of C; with 0 C is not read.
    pub beta: f64,
    /// First element of A.
    pub a: DevicePtr,
    /// First element of B.
    pub b: DevicePtr,
    /// First element of C.
    pub c: DevicePtr,
    /// First element of D, laid out as C.
    pub d: DevicePtr,
    /// First element of the bias, where the epilogue has one.
    pub bias: Option<DevicePtr>,
}

impl PlanArguments {
    /// `D = epilogue(A * B)` (alpha 1, beta 0).
    #[must_use]
    pub const fn new(a: DevicePtr, b: DevicePtr, d: DevicePtr, bias: Option<DevicePtr>) -> Self {
        Self { alpha: 1.0, beta: 0.0, a, b, c: d, d, bias }
    }
}

/// One vendor context for matrix products: a cuBLAS, hipBLAS or Lt handle.
///
/// A handle is used by one thread at a time (`Send`, not `Sync`; changes take `&mut self`) and belongs to one device.
/// It chooses neither stream nor workspace: core binds both. Dropping a handle destroys it; [`BlasHandle::destroy`] does
/// so with an answer.
///
/// A product is **several operations** in the stream that pass intermediate results through the workspace. Two handles
/// bound to one stream and one workspace therefore corrupt each other unless their calls take turns; taking turns is
/// core's job (the stream's *turn*), not the handle's.
#[cfg_attr(feature = "mockall", mockall::automock)]
pub trait BlasHandle: Send + fmt::Debug {
    /// The kind it was made as.
    ///
    /// - `blas.kind`: what belongs to the other kind (products for `Lt`, plans for `Blas`) gives `Unsupported`.
    fn kind(&self) -> BlasKind;

    /// Ordinal of its device.
    fn device(&self) -> u32;

    /// Binds the stream that later products are enqueued on.
    ///
    /// - `blas.stream-bound`: products run in the order of the bound stream.
    /// - `blas.unbound`: until a stream is bound, products and runs of plans give `InvalidState`, and nothing is enqueued.
    /// - `blas.stream-device`: a stream of another device gives `WrongDevice`.
    /// - `blas.stream-resets-workspace`: where the fact `set_stream_resets_workspace` holds, the handle is back on its
    ///   own workspace, also when the stream is the same; modes survive.
    fn set_stream(&mut self, stream: StreamId) -> Result<()>;

    /// Binds the memory for intermediate results; `None` binds the handle's own. Needs `blas_workspace` for `Some`.
    ///
    /// - `blas.workspace-used`: products keep their intermediate results in the bound workspace.
    /// - `blas.workspace-alignment`: an address that is not a multiple of `workspace_alignment` gives `InvalidArgument`.
    ///
    /// # Safety
    /// The memory belongs to the handle's device. It stays allocated while products are enqueued with it bound, and until
    /// the last of them has completed. Meanwhile nobody else uses it, except products of the same stream whose calls take
    /// turns.
    unsafe fn set_workspace(&mut self, workspace: Option<Workspace>) -> Result<()>;

    /// Chooses the precision of 32-bit products. Needs `tf32` for [`MathMode::Tf32`]. A plan has its own.
    fn set_math_mode(&mut self, mode: MathMode) -> Result<()>;

    /// Chooses whether kernels may add with atomics. Needs `atomics_mode` for [`AtomicsMode::Allowed`]. A plan has its
    /// own.
    ///
    /// - `blas.deterministic`: with `NotAllowed`, equal calls give equal bits.
    fn set_atomics_mode(&mut self, mode: AtomicsMode) -> Result<()>;

    /// Enqueues `C = alpha * op(A) * op(B) + beta * C` on the bound stream.
    ///
    /// - `gemm.value`: every element of C is the product within the rounding of C's type. NaN and infinity in A, B and C
    ///   reach the elements that they enter, and no others.
    ///   Before it is added to `beta * C`, the product may be rounded to that type.
    /// - `gemm.transpose`: for each combination of transposed factors.
    /// - `gemm.leading-dimension`: elements between the rows of C and the leading dimension keep their value.
    /// - `gemm.beta`: the old C enters with factor beta.
    /// - `gemm.beta-zero`: with beta 0 the old C is not read (NaN there does not matter).
    /// - `gemm.alpha-zero`: with alpha 0 or k 0, A and B do not matter.
    /// - `gemm.empty`: with m, n or the batch 0 nothing is written, and it is no error.
    /// - `gemm.strided-batch`: the products of a batch are independent and lie at the strides given.
    /// - `gemm.mixed`: with factors of `F16` or `Bf16` and an output of `F32`, C is an `F32` matrix, of which the old
    ///   values enter and the product is stored without a rounding to the factors' type; the sum is kept in 32 bits, and
    ///   whatever else is said of C holds. Needs `gemm_mixed`.
    /// - `gemm.mixed-pairs`: every other pair of different types gives `Unsupported`, as a GEMM and as a plan, and
    ///   nothing is written.
    /// - `gemm.asynchronous`: the call returns without waiting for the product.
    ///
    /// # Safety
    /// A, B and C lie inside blocks of the handle's device that stay allocated until the product has completed, C
    /// overlaps neither A nor B, and the shape was checked by [`GemmShape::extents`].
    unsafe fn gemm(&mut self, gemm: &Gemm) -> Result<()>;

    /// Makes a plan. May take milliseconds: core caches plans.
    fn create_plan(&mut self, options: &PlanOptions) -> Result<PlanId> {
        let _ = options;
        Err(Error::lacks("create_plan", "lt_plans"))
    }

    /// Enqueues one run of a plan on the bound stream, through the bound workspace.
    ///
    /// - `plan.value`: D is `epilogue(alpha * op(A) * op(B) + beta * C)` within the rounding of D's type. Before
    ///   an epilogue, `alpha * op(A) * op(B)` and its sum with C may be rounded to that type.
    /// - `plan.epilogue`: for each epilogue; the bias is added to every column.
    /// - `plan.alpha-zero`: with alpha 0 or k 0, A and B do not matter: D is `epilogue(beta * C)`, with the bias that the
    ///   epilogue adds.
    /// - `plan.mixed`: as `gemm.mixed`; C, D and the bias are of the output's type, and no sum is rounded to the factors'
    ///   type on the way.
    /// - `plan.stale`: a destroyed or unknown plan gives `InvalidHandle`.
    /// - `plan.alignment`: an operand that is not aligned as the plan says, or to its own elements, gives `InvalidArgument`.
    ///
    /// # Safety
    /// As [`BlasHandle::gemm`], for A, B, C, D and the bias; D overlaps neither A nor B nor the bias, and is C or does
    /// not overlap it.
    unsafe fn run_plan(&mut self, plan: PlanId, arguments: &PlanArguments) -> Result<()> {
        let _ = (plan, arguments);
        Err(Error::lacks("run_plan", "lt_plans"))
    }

    /// Destroys a plan; runs already enqueued are still executed.
    fn destroy_plan(&mut self, plan: PlanId) -> Result<()> {
        let _ = plan;
        Err(Error::lacks("destroy_plan", "lt_plans"))
    }

    /// The vendor's handle, as a number, for code that calls the vendor itself. [`BlasHandle::reset`] undoes the
    /// settings of that code.
    fn raw(&self) -> u64;

    /// Restores every vendor setting of the handle to its value on a fresh handle. Its plans stay.
    ///
    /// A backend that cannot do so returns `Unsupported`, as this default does. After this or any other error, core
    /// destroys a handle that foreign code had, and makes a new one.
    ///
    /// - `blas.reset`: after it, products behave as on a fresh handle with a stream and a workspace bound.
    fn reset(&mut self) -> Result<()> {
        Err(Error::new(ErrorKind::Unsupported, "reset", "this backend cannot restore the settings of a handle")
            .with_hint("destroy the handle, and make a new one"))
    }

    /// Destroys the vendor's handle; may wait for the device. Once only: later calls of any method give `InvalidHandle`.
    ///
    /// - `blas.destroyed`: `live_objects().handles` goes down by one, also when a handle ends without this call.
    fn destroy(&mut self) -> Result<()>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_of_packed_padded_and_transposed_matrices() {
        let shape = GemmShape::new(DataType::F32, 3, 4, 5);
        assert_eq!(shape.extents("t").unwrap(), Extents { a: 15, b: 20, c: 12 });
        let padded = shape.with_leading_dimensions(7, 8, 9);
        assert_eq!(padded.extents("t").unwrap(), Extents { a: 4 * 7 + 3, b: 3 * 8 + 5, c: 3 * 9 + 3 });
        let both = shape.with_transposed_a().with_transposed_b();
        assert_eq!((both.lda, both.ldb), (5, 4));
        assert_eq!(both.extents("t").unwrap(), Extents { a: 15, b: 20, c: 12 });
    }

    #[test]
    fn extents_of_batches_and_of_nothing() {
        let batch = StridedBatch { count: 3, stride_a: 0, stride_b: 20, stride_c: 12 };
        let shape = GemmShape::new(DataType::F64, 3, 4, 5).with_batch(batch);
        assert_eq!(shape.extents("t").unwrap(), Extents { a: 15, b: 60, c: 36 });
        assert_eq!(GemmShape::new(DataType::F32, 0, 4, 5).extents("t").unwrap(), Extents { a: 0, b: 20, c: 0 });
        assert_eq!(GemmShape::new(DataType::F32, 2, 2, 0).extents("t").unwrap(), Extents { a: 0, b: 0, c: 4 });
    }

    #[test]
    fn the_cs_of_a_batch_lie_one_behind_the_other_or_side_by_side() {
        for (m, n, ldc, stride_c, count) in (0..4_usize)
            .flat_map(|m| (0..4).flat_map(move |n| (1..12).flat_map(move |ldc| (0..14).map(move |s| (m, n, ldc, s)))))
            .flat_map(|(m, n, ldc, stride)| (0..4).map(move |count| (m, n, ldc, stride, count)))
            .filter(|(m, _, ldc, ..)| ldc >= m)
        {
            let batch = StridedBatch { count, stride_a: 0, stride_b: 0, stride_c };
            let shape =
                GemmShape::new(DataType::F32, m, n, 1).with_leading_dimensions(m.max(1), 1, ldc).with_batch(batch);
            let mut elements: Vec<usize> = (0..count)
                .flat_map(|c| (0..n).flat_map(move |column| (0..m).map(move |row| c * stride_c + column * ldc + row)))
                .collect();
            let all = elements.len();
            elements.sort_unstable();
            elements.dedup();
            let apart = elements.len() == all;
            match shape.extents("t") {
                Ok(extents) => {
                    assert!(apart, "{shape:?}");
                    assert_eq!(extents.c, elements.last().map_or(0, |last| last + 1), "{shape:?}");
                }
                // The refused shapes overlap, or follow neither of the two orders.
                Err(_) => {
                    let one = (n - 1) * ldc + m;
                    assert!(!apart || (stride_c < one && (count - 1) * stride_c + m > ldc), "{shape:?}");
                }
            }
        }
    }

    #[test]
    fn a_wider_result_changes_its_own_bytes_and_no_count_of_elements() {
        let shape = GemmShape::new(DataType::F16, 3, 4, 5);
        let mixed = shape.with_output(DataType::F32);
        assert_eq!((shape.output, shape.is_mixed(), mixed.is_mixed()), (DataType::F16, false, true));
        assert_eq!(mixed.extents("t").unwrap(), shape.extents("t").unwrap());
        assert_eq!(PlanOptions::new(mixed, Epilogue::None, 0).alignment, 2);
        // 2^61 elements are too many of 4 bytes and not of 2.
        let large = GemmShape::new(DataType::F16, 1 << 31, 1 << 30, 0);
        assert_eq!(large.extents("t").unwrap().c, 1 << 61);
        let error = large.with_output(DataType::F32).extents("t").unwrap_err();
        assert!(error.to_string().contains("past the address space"), "{error}");
    }

    #[test]
    fn bad_shapes_are_named() {
        let shape = GemmShape::new(DataType::F32, 3, 4, 5);
        let error = shape.with_leading_dimensions(2, 5, 3).extents("gemm").unwrap_err();
        assert!(error.to_string().contains("lda is 2, the matrix has 3 rows"), "{error}");
        let overlapping = StridedBatch { count: 2, stride_a: 0, stride_b: 0, stride_c: 11 };
        let error = shape.with_batch(overlapping).extents("gemm").unwrap_err();
        assert!(error.to_string().contains("stride_c is 11, but one C reaches 12 elements, and ldc is 3"), "{error}");
        assert!(error.hint().contains("stride_c at least 3 and ldc at least 1 * stride_c + 3"), "{error}");
        let huge = GemmShape::new(DataType::F32, usize::MAX / 2, 4, 5);
        assert_eq!(huge.extents("gemm").unwrap_err().kind(), ErrorKind::InvalidArgument);
        assert!(GemmShape::new(DataType::F64, 1 << 31, 1 << 31, 1).extents("gemm").is_err());
    }
}
