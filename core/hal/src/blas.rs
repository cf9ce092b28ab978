//! The trait [`BlasHandle`], one vendor context for matrix products, and the values that describe a product.
//!
//! Matrices are **column-major**, as in every BLAS: element (row, column) of a matrix with leading dimension `ld` is at
//! index `row + column * ld`. A row-major matrix is its own transpose in these terms.

use std::fmt;

use crate::error::{Error, ErrorKind, Result};
use crate::id::StreamId;
use crate::memory::DevicePtr;
use crate::text::counted;

/// Kinds of handles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BlasKind {
    /// The classic BLAS: cuBLAS, hipBLAS.
    Blas,
    /// Plans with epilogues: cuBLASLt, hipBLASLt.
    Lt,
}

/// Options of a handle, for [`Backend::create_blas_handle`](crate::Backend::create_blas_handle).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlasOptions {
    /// The kind of the handle.
    pub kind: BlasKind,
}

impl BlasOptions {
    /// Returns options of a handle of `kind`.
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

/// The use of atomics in kernels. Sums with atomics are faster but not repeatable bit for bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum AtomicsMode {
    /// Results are repeatable.
    #[default]
    NotAllowed,
    /// Results may be faster and may differ in their last bits. Needs the capability `atomics_mode`.
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
    /// Returns the size of an element in bytes.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }
}

/// The form in which a product uses a factor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Transpose {
    /// As stored.
    #[default]
    No,
    /// Transposed.
    Yes,
}

/// A batch of products whose matrices lie at equal distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StridedBatch {
    /// Number of products.
    pub count: usize,
    /// Elements from one A to the next; 0 uses the same A in each product.
    pub stride_a: usize,
    /// Elements from one B to the next; 0 uses the same B in each product.
    pub stride_b: usize,
    /// Elements from one C to the next. The Cs are stored one after the other, or side by side. Side by side, each column of
    /// the first C is followed by the same column of the second, and so on, and `ldc` spans all of them.
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
    /// The form in which A is used.
    pub transpose_a: Transpose,
    /// The form in which B is used.
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
    /// A batch of products; `None` for one.
    pub batch: Option<StridedBatch>,
}

impl GemmShape {
    /// Returns the shape of one product of packed matrices, without transposition.
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

    /// Sets the type of the result. Needs `gemm_mixed` if it differs from the factors' type.
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

    /// Returns true if the result has another type than the factors.
    #[must_use]
    pub fn is_mixed(&self) -> bool {
        self.output != self.data_type
    }

    /// Sets A to be stored transposed (k x m, packed).
    #[must_use]
    pub const fn with_transposed_a(mut self) -> Self {
        self.transpose_a = Transpose::Yes;
        self.lda = if self.k == 0 { 1 } else { self.k };
        self
    }

    /// Sets B to be stored transposed (n x k, packed).
    #[must_use]
    pub const fn with_transposed_b(mut self) -> Self {
        self.transpose_b = Transpose::Yes;
        self.ldb = if self.n == 0 { 1 } else { self.n };
        self
    }

    /// Sets the leading dimensions, in elements.
    #[must_use]
    pub const fn with_leading_dimensions(mut self, lda: usize, ldb: usize, ldc: usize) -> Self {
        self.lda = lda;
        self.ldb = ldb;
        self.ldc = ldc;
        self
    }

    /// Sets the batch.
    #[must_use]
    pub const fn with_batch(mut self, batch: StridedBatch) -> Self {
        self.batch = Some(batch);
        self
    }

    /// Returns the number of stored rows of A.
    #[must_use]
    pub const fn rows_a(&self) -> usize {
        match self.transpose_a {
            Transpose::No => self.m,
            Transpose::Yes => self.k,
        }
    }

    /// Returns the number of stored columns of A.
    #[must_use]
    pub const fn columns_a(&self) -> usize {
        match self.transpose_a {
            Transpose::No => self.k,
            Transpose::Yes => self.m,
        }
    }

    /// Returns the number of stored rows of B.
    #[must_use]
    pub const fn rows_b(&self) -> usize {
        match self.transpose_b {
            Transpose::No => self.k,
            Transpose::Yes => self.n,
        }
    }

    /// Returns the number of stored columns of B.
    #[must_use]
    pub const fn columns_b(&self) -> usize {
        match self.transpose_b {
            Transpose::No => self.n,
            Transpose::Yes => self.k,
        }
    }

    /// Returns the number of products.
    #[must_use]
    #[inline]
    pub fn batch_count(&self) -> usize {
        self.batch.map_or(1, |batch| batch.count)
    }

    /// Returns true if C has no element. Such a product computes and touches nothing.
    #[must_use]
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.m == 0 || self.n == 0 || self.batch_count() == 0
    }

    /// Checks the leading dimensions and strides. Returns the number of elements of A, B and C that the product spans.
    ///
    /// # Errors
    /// `InvalidArgument` for a leading dimension below the rows, overlapping Cs, or sizes past the address space.
    #[inline]
    pub fn extents(&self, operation: &'static str) -> Result<Extents> {
        self.reach().ok_or_else(|| self.unreachable(operation))
    }

    /// Returns the extents of a valid shape. Each product calls this, so [`GemmShape::extents`] makes the error elsewhere.
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

    /// Returns true if the Cs of a batch do not overlap: they are stored one after the other, or side by side. Each spans
    /// `reach` elements.
    #[inline]
    fn keeps_apart(&self, batch: &StridedBatch, reach: usize) -> bool {
        let side_by_side = || {
            let all = (batch.count - 1).checked_mul(batch.stride_c).and_then(|last| last.checked_add(self.m));
            batch.stride_c >= self.m && all.is_some_and(|all| all <= self.ldc)
        };
        batch.count <= 1 || batch.stride_c >= reach || side_by_side()
    }

    /// Returns the sizes in words, for messages.
    #[doc(hidden)]
    #[must_use]
    pub fn described(&self) -> String {
        let Self { m, n, k, lda, ldb, ldc, ref batch, .. } = *self;
        let mut text = format!("the product with m {m}, n {n}, k {k}, lda {lda}, ldb {ldb}, ldc {ldc}");
        if let Some(StridedBatch { count, stride_a, stride_b, stride_c }) = batch {
            text += &format!(", batch {count}, stride_a {stride_a}, stride_b {stride_b}, stride_c {stride_c}");
        }
        text
    }

    /// Returns the error of an invalid shape.
    #[cold]
    fn unreachable(&self, operation: &'static str) -> Error {
        let invalid = |message: String| Error::new(ErrorKind::InvalidArgument, operation, message);
        for (name, ld, rows) in
            [("lda", self.lda, self.rows_a()), ("ldb", self.ldb, self.rows_b()), ("ldc", self.ldc, self.m)]
        {
            if ld < rows.max(1) {
                return invalid(format!("{name} is {ld}, the matrix has {}", counted(rows, "row")))
                    .with_hint("a leading dimension is at least the number of stored rows, and at least 1");
            }
        }
        let alone = Self { batch: None, ..*self };
        if let (Some(batch), Some(one)) = (&self.batch, alone.reach())
            && !self.keeps_apart(batch, one.c)
        {
            let StridedBatch { count, stride_c, .. } = batch;
            return invalid(format!(
                "stride_c is {stride_c}, but one C reaches {}, and ldc is {}",
                counted(one.c, "element"),
                self.ldc
            ))
            .with_hint(format!(
                "let the Cs of the batch lie one behind the other (stride_c at least {}), or side by side (stride_c at \
                     least {} and ldc at least {} * stride_c + {1})",
                one.c,
                self.m,
                count - 1
            ));
        }
        invalid(format!("{} reaches past the address space", self.described()))
            .with_hint("check the sizes, leading dimensions and strides")
    }
}

/// The elements that a product spans, counted from the first of each matrix.
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
    /// Factor of the old C. With 0, the old C is not read.
    pub beta: f64,
    /// First element of A.
    pub a: DevicePtr,
    /// First element of B.
    pub b: DevicePtr,
    /// First element of C.
    pub c: DevicePtr,
}

impl Gemm {
    /// Returns the product `C = A * B` (alpha 1, beta 0).
    #[must_use]
    pub const fn new(shape: GemmShape, a: DevicePtr, b: DevicePtr, c: DevicePtr) -> Self {
        Self { shape, alpha: 1.0, beta: 0.0, a, b, c }
    }

    /// Sets the factors.
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

/// The operation of an Lt plan after the product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Epilogue {
    /// No operation.
    #[default]
    None,
    /// Adds a bias vector of `m` elements to every column.
    Bias,
    /// Bias, then `max(x, 0)`.
    BiasRelu,
    /// `max(x, 0)`.
    Relu,
    /// GELU in its tanh form, as both vendors have it: `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))`. The result
    /// may differ by 2^-14 of x, because devices approximate the tanh.
    Gelu,
    /// Bias, then GELU as in [`Epilogue::Gelu`].
    BiasGelu,
}

impl Epilogue {
    /// Returns true if the epilogue reads a bias vector.
    #[must_use]
    pub const fn has_bias(self) -> bool {
        matches!(self, Self::Bias | Self::BiasRelu | Self::BiasGelu)
    }
}

/// Options of an Lt plan. Core's cache uses them as its key, because equal options may share a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct PlanOptions {
    /// Sizes, leading dimensions, batch.
    pub shape: GemmShape,
    /// The operation after the product.
    pub epilogue: Epilogue,
    /// Bytes of workspace that the plan may use. With 0, it uses no workspace, not even the handle's own.
    pub workspace_bytes: usize,
    /// Alignment in bytes of every operand's address. An address is also a multiple of its own element's size, which may be
    /// more if the types are mixed. Faster kernels need 16 to 256.
    pub alignment: usize,
    /// Precision of 32-bit products. [`MathMode::Tf32`] needs `tf32`.
    pub math_mode: MathMode,
    /// Use of atomics, which depends on the algorithm of the plan. [`AtomicsMode::Allowed`] needs `atomics_mode`.
    pub atomics_mode: AtomicsMode,
}

impl PlanOptions {
    /// Returns options of a repeatable plan for `shape`, in full precision, with operands aligned to their elements.
    #[must_use]
    pub const fn new(shape: GemmShape, epilogue: Epilogue, workspace_bytes: usize) -> Self {
        let (factor, result) = (shape.data_type.bytes(), shape.output.bytes());
        let alignment = if factor < result { factor } else { result };
        let (math_mode, atomics_mode) = (MathMode::Default, AtomicsMode::NotAllowed);
        Self { shape, epilogue, workspace_bytes, alignment, math_mode, atomics_mode }
    }

    /// Sets the alignment of the operands.
    #[must_use]
    pub const fn with_alignment(mut self, alignment: usize) -> Self {
        self.alignment = alignment;
        self
    }

    /// Sets the precision.
    #[must_use]
    pub const fn with_math_mode(mut self, mode: MathMode) -> Self {
        self.math_mode = mode;
        self
    }

    /// Sets the use of atomics.
    #[must_use]
    pub const fn with_atomics_mode(mut self, mode: AtomicsMode) -> Self {
        self.atomics_mode = mode;
        self
    }
}

/// The id of a plan of one Lt handle. It has no meaning to other handles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct PlanId(u64);

impl PlanId {
    /// Returns the id with this number. Only the handle issues valid ids.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// Returns the number.
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
    /// Factor of C. With 0, C is not read.
    pub beta: f64,
    /// First element of A.
    pub a: DevicePtr,
    /// First element of B.
    pub b: DevicePtr,
    /// First element of C.
    pub c: DevicePtr,
    /// First element of D, which has the layout of C.
    pub d: DevicePtr,
    /// First element of the bias, if the epilogue has one.
    pub bias: Option<DevicePtr>,
}

impl PlanArguments {
    /// Returns the arguments of `D = epilogue(A * B)` (alpha 1, beta 0).
    #[must_use]
    pub const fn new(a: DevicePtr, b: DevicePtr, d: DevicePtr, bias: Option<DevicePtr>) -> Self {
        Self { alpha: 1.0, beta: 0.0, a, b, c: d, d, bias }
    }
}

/// One vendor context for matrix products: a cuBLAS, hipBLAS or Lt handle.
///
/// One thread at a time uses a handle (`Send`, not `Sync`; changes take `&mut self`). A handle belongs to one device. Core
/// binds its stream and its workspace. Dropping a handle destroys it, and [`BlasHandle::destroy`] also returns the result.
///
/// A product is **several operations** in the stream, which pass intermediate results through the workspace. Two handles on
/// one stream and one workspace therefore corrupt each other unless each call is submitted whole. Core's *submission lock*
/// of the stream ensures that; the handle does not.
#[cfg_attr(feature = "mockall", mockall::automock)]
pub trait BlasHandle: Send + fmt::Debug {
    /// Returns the kind of the handle.
    ///
    /// - `blas.kind`: a call of the other kind (a product on `Lt`, a plan on `Blas`) returns `Unsupported`.
    fn kind(&self) -> BlasKind;

    /// Returns the ordinal of the handle's device.
    fn device(&self) -> u32;

    /// Binds the stream of later products.
    ///
    /// - `blas.stream-bound`: products run in the order of the bound stream.
    /// - `blas.unbound`: until a stream is bound, products and runs of plans return `InvalidState`, and nothing is enqueued.
    ///   A product without elements may succeed.
    /// - `blas.stream-device`: a stream of another device returns `WrongDevice`.
    /// - `blas.stream-destroyed`: once the bound id is destroyed, even if it names a foreign stream, products and runs of plans return
    ///   `InvalidHandle`, and nothing is enqueued. A product without elements may succeed. Those enqueued before are still
    ///   executed.
    /// - `blas.stream-resets-workspace`: if the fact `set_stream_resets_workspace` holds, the handle returns to its own
    ///   workspace, even if the stream is the same; modes survive.
    fn set_stream(&mut self, stream: StreamId) -> Result<()>;

    /// Binds the memory for intermediate results. `None` binds the handle's own; `Some` needs `blas_workspace`.
    ///
    /// - `blas.workspace-used`: products keep their intermediate results in the bound workspace.
    /// - `blas.workspace-alignment`: an address that is not a multiple of `workspace_alignment` returns `InvalidArgument`, and the workspace
    ///   before it stays bound.
    ///
    /// # Safety
    /// The caller must pass memory of the handle's device. It must stay allocated while it is bound and until the last
    /// product that was enqueued with it has completed. Until then, no other work may use it, except products of the same
    /// stream under the same lock.
    unsafe fn set_workspace(&mut self, workspace: Option<Workspace>) -> Result<()>;

    /// Sets the precision of 32-bit products. [`MathMode::Tf32`] needs `tf32`. A plan has its own precision.
    fn set_math_mode(&mut self, mode: MathMode) -> Result<()>;

    /// Sets the use of atomics. [`AtomicsMode::Allowed`] needs `atomics_mode`. A plan has its own mode.
    ///
    /// - `blas.deterministic`: with `NotAllowed`, equal calls compute equal bits.
    fn set_atomics_mode(&mut self, mode: AtomicsMode) -> Result<()>;

    /// Enqueues `C = alpha * op(A) * op(B) + beta * C` on the bound stream.
    ///
    /// - `gemm.value`: every element of C is the product within the rounding of C's type. Before it is added to `beta * C`,
    ///   the product may be rounded to that type. NaN and infinity in A, B and C reach exactly the elements that they enter.
    /// - `gemm.infinite-factors`: with an infinite or NaN beta, or such an alpha and a k above 0, every element of C is infinite
    ///   or NaN.
    /// - `gemm.transpose`: this holds for each combination of transposed factors.
    /// - `gemm.leading-dimension`: elements between the rows of C and the leading dimension keep their value.
    /// - `gemm.beta`: the old C enters with factor beta.
    /// - `gemm.beta-zero`: with beta 0 or -0, the old C is not read (NaN in it has no effect).
    /// - `gemm.alpha-zero`: with alpha 0 or -0, or k 0, A and B have no effect.
    /// - `gemm.empty`: with m, n or the batch 0, the call succeeds and writes nothing.
    /// - `gemm.strided-batch`: the products of a batch are independent and use the given strides.
    /// - `gemm.mixed`: with factors of `F16` or `Bf16` and an output of `F32`, C is an `F32` matrix: its old values enter and
    ///   the product is stored without rounding to the factors' type; the sum is kept in 32 bits, and every other clause
    ///   about C holds. Needs `gemm_mixed`.
    /// - `gemm.mixed-pairs`: every other pair of different types returns `Unsupported`, as a GEMM and as a plan, and writes
    ///   nothing.
    /// - `gemm.asynchronous`: the call returns without waiting for the product.
    ///
    /// # Safety
    /// The caller must ensure that:
    /// - A, B and C are inside blocks of the handle's device, which stay allocated until the product has completed;
    /// - C overlaps neither A nor B;
    /// - [`GemmShape::extents`] has accepted the shape.
    unsafe fn gemm(&mut self, gemm: &Gemm) -> Result<()>;

    /// Creates a plan. May take milliseconds, so core caches plans.
    fn create_plan(&mut self, options: &PlanOptions) -> Result<PlanId> {
        let _ = options;
        Err(Error::lacks("create_plan", "lt_plans"))
    }

    /// Enqueues one run of a plan on the bound stream, with the bound workspace.
    ///
    /// - `plan.value`: D is `epilogue(alpha * op(A) * op(B) + beta * C)` within the rounding of D's type. Before
    ///   an epilogue, `alpha * op(A) * op(B)` and its sum with C may be rounded to that type.
    /// - `plan.epilogue`: this holds for each epilogue; the bias is added to every column.
    /// - `plan.alpha-zero`: with alpha 0 or -0, or k 0, A and B have no effect: D is `epilogue(beta * C)`, with the bias that the
    ///   epilogue adds.
    /// - `plan.mixed`: as `gemm.mixed`; C, D and the bias have the output's type, and no intermediate sum is rounded to the
    ///   factors' type.
    /// - `plan.stale`: a destroyed or unknown plan returns `InvalidHandle`.
    /// - `plan.alignment`: an operand that is not aligned to the plan's alignment, or to its own elements, returns
    ///   `InvalidArgument`.
    ///
    /// # Safety
    /// The obligations of [`BlasHandle::gemm`] apply to A, B, C, D and the bias. The caller must also ensure that D overlaps
    /// neither A nor B nor the bias, and that D is C or does not overlap it.
    unsafe fn run_plan(&mut self, plan: PlanId, arguments: &PlanArguments) -> Result<()> {
        let _ = (plan, arguments);
        Err(Error::lacks("run_plan", "lt_plans"))
    }

    /// Destroys a plan.
    ///
    /// - `plan.destroy-pending`: runs that were enqueued before are still executed.
    fn destroy_plan(&mut self, plan: PlanId) -> Result<()> {
        let _ = plan;
        Err(Error::lacks("destroy_plan", "lt_plans"))
    }

    /// Returns the vendor's handle as a number, for code that calls the vendor itself. [`BlasHandle::reset`] undoes the
    /// settings of that code.
    fn raw(&self) -> u64;

    /// Restores every vendor setting of the handle to its value on a fresh handle. Its plans stay.
    ///
    /// A backend that cannot do so returns `Unsupported`, as this default does. After any error, core destroys a handle that
    /// foreign code has used, and creates a new one.
    ///
    /// - `blas.reset`: afterwards, products behave as on a fresh handle with a stream and a workspace bound.
    fn reset(&mut self) -> Result<()> {
        Err(Error::new(ErrorKind::Unsupported, "reset", "this backend cannot restore the settings of a handle")
            .with_hint("destroy the handle, and make a new one"))
    }

    /// Destroys the vendor's handle. May wait for the device, and may lose captures that are open there. Later calls of any
    /// method return `InvalidHandle`.
    ///
    /// - `blas.destroyed`: `live_objects().handles` decreases by one, also if a handle is dropped without this call.
    /// - `blas.destroy-pending`: products and runs of plans that were enqueued before are still executed, with the workspace
    ///   that was bound then. The same holds for a handle that is dropped.
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
