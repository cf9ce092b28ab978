//! The trait `BlasHandle` over a vendor's BLAS.

use std::fmt;
use std::sync::Arc;

use super::calls::POINTER_MODE_HOST;
use super::platform::{Blas, BlasSettings, Platform, Quirks};
use super::raw::{RawBlas, RawStream};
use super::state::{DriverState, HandleCount};
use highwater_hal::{
    AtomicsMode, BlasHandle, BlasKind, Capabilities, DataType, DevicePtr, Error, ErrorKind, Gemm, GemmShape, MathMode,
    Products, Result, StreamId, Transpose, Workspace,
};

/// A handle of the vendor's BLAS.
pub(super) struct DriverBlas<P: Platform> {
    state: Arc<DriverState<P>>,
    device: u32,
    /// The vendor's handle; null once it is destroyed.
    raw: RawBlas,
    /// The bound stream, and its vendor handle when it was bound.
    stream: Option<(StreamId, RawStream)>,
    workspace: Option<Workspace>,
    numbers: Numbers,
    /// The products that the device supports.
    products: Products,
    /// The settings that only this vendor's handles have, read from the new handle.
    settings: BlasSettings,
    /// Counted until the handle is destroyed.
    count: Option<HandleCount<P>>,
}

impl<P: Platform> fmt::Debug for DriverBlas<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DriverBlas").field("device", &self.device).field("raw", &self.raw).finish_non_exhaustive()
    }
}

impl<P: Platform> DriverBlas<P> {
    /// Creates a handle. The device is current.
    pub(super) fn create(state: &Arc<DriverState<P>>, device: u32) -> Result<Self> {
        const OPERATION: &str = "create_blas_handle";
        let blas = state.platform.blas();
        let quirks = state.platform.quirks();
        state.platform.may_create_blas(device)?;
        let mut raw = RawBlas::NULL;
        // SAFETY: The call writes one number, which outlives it.
        blas.codes.check(OPERATION, unsafe { (blas.calls.create)(&mut raw) })?;
        state.made(OPERATION, raw)?;
        let products = Products::of(state.capabilities(OPERATION, device)?);
        let handle = Self {
            state: Arc::clone(state),
            device,
            raw,
            stream: None,
            workspace: None,
            numbers: Numbers::new(quirks, MathMode::Default),
            products,
            settings: state.platform.blas_settings(raw),
            count: Some(state.count_handle()),
        };
        if let (Some(modes), Some(set)) = (quirks.math_modes, blas.calls.set_math_mode)
            && modes.full != 0
        {
            // SAFETY: The handle was just created.
            blas.codes.check(OPERATION, unsafe { set(raw, modes.full) })?;
        }
        if quirks.atomics_allowed_at_first {
            // SAFETY: The handle was just created.
            let code = unsafe { (blas.calls.set_atomics_mode)(raw, quirks.atomics_modes.not_allowed) };
            blas.codes.check(OPERATION, code)?;
        }
        Ok(handle)
    }

    /// Restores the state of a new handle, with the default stream and the handle's own workspace bound.
    fn restore(&mut self, operation: &'static str) -> Result<()> {
        let platform = &self.state.platform;
        let (quirks, calls) = (platform.quirks(), &platform.blas().calls);
        // SAFETY: Each call sets a setting of this live handle. The default stream outlives the handle, and the null
        // address selects its own workspace.
        unsafe {
            self.check(operation, (calls.set_stream)(self.raw, RawStream::NULL))?;
            if let Some(set) = calls.set_workspace.filter(|_| !quirks.set_stream_resets_workspace) {
                self.check(operation, set(self.raw, DevicePtr::new(0), 0))?;
            }
            self.check(operation, (calls.set_pointer_mode)(self.raw, POINTER_MODE_HOST))?;
            self.check(operation, (calls.set_atomics_mode)(self.raw, quirks.atomics_modes.not_allowed))?;
            if let Some(set) = calls.set_math_mode {
                self.check(operation, set(self.raw, quirks.math_modes.map_or(0, |modes| modes.full)))?;
            }
        }
        platform.restore_blas(self.raw, &self.settings).or_else(|code| self.check(operation, code))?;
        self.numbers = Numbers::new(quirks, MathMode::Default);
        Ok(())
    }

    #[inline(always)]
    fn enter(&self, operation: &'static str) -> Result<()> {
        self.state.enter(operation)?;
        if self.raw == RawBlas::NULL { Err(destroyed(operation)) } else { Ok(()) }
    }

    #[inline(always)]
    fn check(&self, operation: &'static str, code: i32) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        Err(self.state.blas_error(operation, self.state.platform.blas().codes, self.device, code))
    }

    #[cold]
    fn refuse_product(&self, operation: &'static str, shape: &GemmShape) -> Result<()> {
        self.state.capabilities(operation, self.device)?.check_product(operation, shape)
    }

    /// Binds the stream that replaced a dead one under the same id. The caller holds the stream.
    #[cold]
    #[inline(never)]
    fn bind_again(&self, operation: &'static str, stream: RawStream) -> Result<()> {
        let calls = &self.state.platform.blas().calls;
        // SAFETY: The handle is alive, and so is the stream.
        self.check(operation, unsafe { (calls.set_stream)(self.raw, stream) })?;
        match (self.workspace, calls.set_workspace) {
            (Some(workspace), Some(set)) if self.state.platform.quirks().set_stream_resets_workspace => {
                // SAFETY: As above. The caller of `set_workspace` promised that the workspace is valid.
                self.check(operation, unsafe { set(self.raw, workspace.ptr, workspace.bytes) })
            }
            _ => Ok(()),
        }
    }

    fn close(&mut self) -> Result<()> {
        const OPERATION: &str = "destroy";
        if self.raw == RawBlas::NULL {
            return Err(destroyed(OPERATION));
        }
        self.state.enter(OPERATION)?;
        let outcome = {
            let _relaxed = self.state.relaxed();
            let _current = self.state.make_current(OPERATION, self.device)?;
            // SAFETY: The handle is alive, and is not used after this.
            let code = unsafe { (self.state.platform.blas().calls.destroy)(self.raw) };
            self.check(OPERATION, code)
        };
        // Also after an error, because the handle may be gone.
        self.raw = RawBlas::NULL;
        self.count = None;
        outcome
    }
}

impl<P: Platform> Drop for DriverBlas<P> {
    fn drop(&mut self) {
        if self.raw == RawBlas::NULL {
            return;
        }
        if !self.state.is_in_service() {
            // Leaked on purpose: at exit and in a forked child, the vendor is not called. The count refers to the
            // state, which leaks with it.
            std::mem::forget(self.count.take());
            return;
        }
        if let Err(error) = self.close() {
            tracing::warn!("a BLAS handle was leaked: {error}");
        }
    }
}

/// Returns the error of a BLAS handle that was destroyed.
#[cold]
#[must_use]
pub(super) fn destroyed(operation: &'static str) -> Error {
    Error::new(ErrorKind::InvalidHandle, operation, "the handle was destroyed").with_hint("create a new handle")
}

/// Returns the error of a BLAS handle that is bound to no stream.
#[cold]
#[must_use]
pub(super) fn no_stream(operation: &'static str) -> Error {
    Error::new(ErrorKind::InvalidState, operation, "the handle is bound to no stream")
        .with_hint("call `set_stream` first")
}

/// Refuses a workspace whose address is less aligned than the device's kernels need.
///
/// # Errors
/// `InvalidArgument`.
#[inline]
pub(super) fn check_workspace(
    operation: &'static str,
    capabilities: &Capabilities,
    workspace: Workspace,
) -> Result<()> {
    let alignment = capabilities.workspace_alignment;
    if workspace.ptr.is_aligned_to(alignment) { Ok(()) } else { Err(unaligned(operation, workspace, alignment)) }
}

#[cold]
fn unaligned(operation: &'static str, workspace: Workspace, alignment: usize) -> Error {
    let message = format!("the workspace is at {}, expected a multiple of {alignment}", workspace.ptr);
    Error::new(ErrorKind::InvalidArgument, operation, message)
        .with_hint("align the workspace to the capability `workspace_alignment`")
}

#[cold]
fn too_large(operation: &'static str, shape: &GemmShape) -> Error {
    let message = format!("{} has a size beyond the range of the vendor's BLAS", shape.described());
    Error::new(ErrorKind::InvalidArgument, operation, message).with_hint("split the product into smaller products")
}

/// The sizes of a product in the type that a call takes.
struct Sizes<N> {
    sizes: [N; 3],
    leading: [N; 3],
    count: N,
}

impl<N: TryFrom<usize>> Sizes<N> {
    /// Returns the sizes, or `None` if one does not fit. The distance of columns need not fit where there is one column at most:
    /// then the number of rows stands in for it.
    #[inline(always)]
    fn of(gemm: &Gemm) -> Option<Self> {
        let fit = |numbers: [usize; 3]| -> Option<[N; 3]> {
            let [first, second, third] = numbers.map(|number| N::try_from(number).ok());
            Some([first?, second?, third?])
        };
        let mut shape = gemm.shape;
        // With alpha = 0, A and B do not matter, not even NaN in them. With k = 0, they are not read.
        shape.k = if gemm.alpha == 0.0 { 0 } else { shape.k };
        let leading = |ld: usize, rows: usize, columns: usize| {
            let is_unused = columns <= 1 && N::try_from(ld).is_err();
            if is_unused { rows.max(1) } else { ld }
        };
        Some(Self {
            sizes: fit([shape.m, shape.n, shape.k])?,
            leading: fit([
                leading(shape.lda, shape.rows_a(), shape.columns_a()),
                leading(shape.ldb, shape.rows_b(), shape.columns_b()),
                leading(shape.ldc, shape.m, shape.n),
            ])?,
            count: N::try_from(shape.batch_count()).ok()?,
        })
    }
}

/// The vendor's numbers for a product's operations and types, indexed by the contract's enums instead of matched.
#[derive(Debug)]
struct Numbers {
    transposes: [i32; 2],
    types: [i32; 4],
    /// Indexed by the type of the factors.
    computes: [i32; 4],
    algorithm: i32,
}

impl Numbers {
    fn new(quirks: &Quirks, math_mode: MathMode) -> Self {
        let (mut types, mut computes) = ([0; 4], [0; 4]);
        for data_type in [DataType::F16, DataType::Bf16, DataType::F32, DataType::F64] {
            types[data_type as usize] = quirks.type_code(data_type);
            computes[data_type as usize] = quirks.compute_code(data_type, math_mode);
        }
        let mut transposes = [0; 2];
        for transpose in [Transpose::No, Transpose::Yes] {
            transposes[transpose as usize] = quirks.transpose_code(transpose);
        }
        Self { transposes, types, computes, algorithm: quirks.default_algorithm }
    }
}

/// Alpha and beta, in the two widths that vendors read.
pub(super) struct Factors {
    doubles: [f64; 2],
    floats: [f32; 2],
}

impl Factors {
    #[inline(always)]
    fn of(gemm: &Gemm) -> Self {
        Self::new(gemm.alpha, gemm.beta)
    }

    /// Some kernels of the vendors take -0 for another number than 0, and then read what has no effect: cuBLAS 13.1 on an H200 read the
    /// old C with beta -0.
    #[inline(always)]
    pub(super) fn new(alpha: f64, beta: f64) -> Self {
        // The sum of -0 and 0 is 0.
        let doubles = [alpha + 0.0, beta + 0.0];
        Self { doubles, floats: doubles.map(|factor| factor as f32 + 0.0) }
    }

    /// Returns the addresses of alpha and beta for the vendor.
    #[inline(always)]
    pub(super) fn places(&self, data_type: DataType) -> [*const u8; 2] {
        let (doubles, floats) = (&self.doubles, &self.floats);
        match data_type {
            DataType::F64 => [(&raw const doubles[0]).cast(), (&raw const doubles[1]).cast()],
            _ => [(&raw const floats[0]).cast(), (&raw const floats[1]).cast()],
        }
    }
}

/// `gemm_ex` with sizes of 32 or 64 bits.
type GemmExCall<N> = unsafe extern "C" fn(
    RawBlas,
    i32,
    i32,
    N,
    N,
    N,
    *const u8,
    DevicePtr,
    i32,
    N,
    DevicePtr,
    i32,
    N,
    *const u8,
    DevicePtr,
    i32,
    N,
    i32,
    i32,
) -> i32;

/// `gemm_strided_batched_ex` with sizes of 32 or 64 bits.
type GemmStridedBatchedExCall<N> = unsafe extern "C" fn(
    RawBlas,
    i32,
    i32,
    N,
    N,
    N,
    *const u8,
    DevicePtr,
    i32,
    N,
    i64,
    DevicePtr,
    i32,
    N,
    i64,
    *const u8,
    DevicePtr,
    i32,
    N,
    i64,
    N,
    i32,
    i32,
) -> i32;

/// The arguments of a product call, except its sizes.
#[derive(Clone, Copy)]
struct Arguments {
    handle: RawBlas,
    transposes: [i32; 2],
    /// The types of the factors and of the result.
    types: [i32; 2],
    compute: i32,
    algorithm: i32,
    /// The addresses of alpha and beta.
    scale: [*const u8; 2],
    matrices: [DevicePtr; 3],
}

impl Arguments {
    #[inline(always)]
    fn of(numbers: &Numbers, handle: RawBlas, gemm: &Gemm, factors: &Factors) -> Self {
        let shape = &gemm.shape;
        let transposes = [shape.transpose_a, shape.transpose_b];
        let types = [shape.data_type, shape.output];
        Self {
            handle,
            transposes: transposes.map(|transpose| numbers.transposes[transpose as usize]),
            types: types.map(|data_type| numbers.types[data_type as usize]),
            compute: numbers.computes[shape.data_type as usize],
            algorithm: numbers.algorithm,
            scale: factors.places(shape.data_type),
            matrices: [gemm.a, gemm.b, gemm.c],
        }
    }

    /// # Safety
    /// The same as for [`enqueue`]. `call` must be the vendor's call for single products, and the factors must not have
    /// moved.
    #[inline(always)]
    unsafe fn single<N>(self, call: GemmExCall<N>, [m, n, k]: [N; 3], [lda, ldb, ldc]: [N; 3]) -> i32 {
        let Self { handle, transposes: [op_a, op_b], types: [factor, result], compute, algorithm, .. } = self;
        let ([alpha, beta], [a, b, c]) = (self.scale, self.matrices);
        // SAFETY: As the caller promises. The vendor reads the factors during the call.
        unsafe {
            call(
                handle, op_a, op_b, m, n, k, alpha, a, factor, lda, b, factor, ldb, beta, c, result, ldc, compute,
                algorithm,
            )
        }
    }

    /// # Safety
    /// The same as for [`enqueue`]. `call` must be the vendor's call for batches, and the factors must not have moved.
    unsafe fn batch<N>(self, call: GemmStridedBatchedExCall<N>, sizes: Sizes<N>, strides: [i64; 3]) -> i32 {
        let Self { handle, transposes: [op_a, op_b], types: [factor, result], compute, algorithm, .. } = self;
        let ([alpha, beta], [a, b, c]) = (self.scale, self.matrices);
        let Sizes { sizes: [m, n, k], leading: [lda, ldb, ldc], count } = sizes;
        let [stride_a, stride_b, stride_c] = strides;
        // SAFETY: As in `single`.
        unsafe {
            call(
                handle, op_a, op_b, m, n, k, alpha, a, factor, lda, stride_a, b, factor, ldb, stride_b, beta, c,
                result, ldc, stride_c, count, compute, algorithm,
            )
        }
    }
}

/// Enqueues a product and returns the vendor's status. Sizes that fit are passed in 32 bits, because every BLAS has
/// those calls.
///
/// # Safety
/// The caller must ensure that the handle and its bound stream are alive, and the obligations of [`BlasHandle::gemm`].
#[inline(always)]
unsafe fn enqueue(
    operation: &'static str,
    blas: &Blas,
    numbers: &Numbers,
    handle: RawBlas,
    gemm: &Gemm,
) -> Result<i32> {
    let GemmShape { m, n, k, lda, ldb, ldc, .. } = gemm.shape;
    let usual = gemm.shape.batch.is_none() & (gemm.alpha != 0.0) & ((m | n | k | lda | ldb | ldc) <= i32::MAX as usize);
    if !usual {
        // SAFETY: As the caller promises.
        return unsafe { enqueue_unusual(operation, blas, numbers, handle, gemm) };
    }
    let (sizes, leading) = ([m, n, k].map(|size| size as i32), [lda, ldb, ldc].map(|size| size as i32));
    let factors = Factors::of(gemm);
    // SAFETY: As the caller promises.
    Ok(unsafe { Arguments::of(numbers, handle, gemm, &factors).single(blas.calls.gemm_ex, sizes, leading) })
}

/// Enqueues any product by the narrowest call that can express its sizes.
///
/// # Safety
/// The same as for [`enqueue`].
#[cold]
#[inline(never)]
unsafe fn enqueue_unusual(
    operation: &'static str,
    blas: &Blas,
    numbers: &Numbers,
    handle: RawBlas,
    gemm: &Gemm,
) -> Result<i32> {
    let factors = Factors::of(gemm);
    let arguments = Arguments::of(numbers, handle, gemm, &factors);
    let shape = &gemm.shape;
    let strides = match &shape.batch {
        None => None,
        Some(batch) => {
            // The distance of matrices does not matter where there is one.
            let unused = (batch.count <= 1).then_some(0);
            let [stride_a, stride_b, stride_c] =
                [batch.stride_a, batch.stride_b, batch.stride_c].map(|stride| i64::try_from(stride).ok().or(unused));
            match (stride_a, stride_b, stride_c) {
                (Some(stride_a), Some(stride_b), Some(stride_c)) => Some([stride_a, stride_b, stride_c]),
                _ => return Err(too_large(operation, shape)),
            }
        }
    };
    // SAFETY: As the caller promises. Each call is the vendor's for its kind and width.
    let code = unsafe {
        match (Sizes::<i32>::of(gemm), Sizes::<i64>::of(gemm), strides) {
            (Some(sizes), _, None) => Some(arguments.single(blas.calls.gemm_ex, sizes.sizes, sizes.leading)),
            (Some(sizes), _, Some(strides)) => {
                Some(arguments.batch(blas.calls.gemm_strided_batched_ex, sizes, strides))
            }
            (None, Some(sizes), None) => {
                blas.calls.gemm_ex_64.map(|call| arguments.single(call, sizes.sizes, sizes.leading))
            }
            (None, Some(sizes), Some(strides)) => {
                blas.calls.gemm_strided_batched_ex_64.map(|call| arguments.batch(call, sizes, strides))
            }
            (None, None, _) => None,
        }
    };
    code.ok_or_else(|| too_large(operation, shape))
}

impl<P: Platform> BlasHandle for DriverBlas<P> {
    fn kind(&self) -> BlasKind {
        BlasKind::Blas
    }

    fn device(&self) -> u32 {
        self.device
    }

    fn set_stream(&mut self, stream: StreamId) -> Result<()> {
        const OPERATION: &str = "set_stream";
        self.enter(OPERATION)?;
        let raw = {
            let held = self.state.stream_for_handle(OPERATION, stream, self.device)?;
            let blas = self.state.platform.blas();
            // SAFETY: The handle is alive, and the stream is held.
            blas.codes.check(OPERATION, unsafe { (blas.calls.set_stream)(self.raw, held.raw()) })?;
            held.raw()
        };
        self.stream = Some((stream, raw));
        if self.state.platform.quirks().set_stream_resets_workspace {
            self.workspace = None;
        }
        Ok(())
    }

    unsafe fn set_workspace(&mut self, workspace: Option<Workspace>) -> Result<()> {
        const OPERATION: &str = "set_workspace";
        self.enter(OPERATION)?;
        let capabilities = self.state.capabilities(OPERATION, self.device)?;
        let Some(wanted) = workspace else {
            if self.workspace.is_none() {
                return Ok(());
            }
            let (blas, resets) = (self.state.platform.blas(), self.state.platform.quirks().set_stream_resets_workspace);
            return match (self.stream, blas.calls.set_workspace) {
                // Binding the stream again restores the handle's own workspace.
                (Some((stream, _)), _) if resets => self.set_stream(stream),
                (_, Some(set)) if !resets => {
                    // SAFETY: The handle is alive, and the null address selects its own workspace.
                    self.check(OPERATION, unsafe { set(self.raw, DevicePtr::new(0), 0) })?;
                    self.workspace = None;
                    Ok(())
                }
                _ => Ok(()),
            };
        };
        let Some(set) = self.state.platform.blas().calls.set_workspace.filter(|_| capabilities.blas_workspace) else {
            return Err(Error::lacks(OPERATION, "blas_workspace"));
        };
        check_workspace(OPERATION, capabilities, wanted)?;
        // SAFETY: The handle is alive. The caller promises that the memory is valid.
        self.check(OPERATION, unsafe { set(self.raw, wanted.ptr, wanted.bytes) })?;
        self.workspace = Some(wanted);
        Ok(())
    }

    fn set_math_mode(&mut self, mode: MathMode) -> Result<()> {
        const OPERATION: &str = "set_math_mode";
        self.enter(OPERATION)?;
        if mode == MathMode::Tf32 {
            self.state.require(OPERATION, self.device, |can| can.tf32, "tf32")?;
        }
        let platform = &self.state.platform;
        if let (Some(modes), Some(set)) = (platform.quirks().math_modes, platform.blas().calls.set_math_mode) {
            let number = match mode {
                MathMode::Default => modes.full,
                MathMode::Tf32 => modes.tf32,
                _ => return Err(Error::unknown(OPERATION, &mode)),
            };
            // SAFETY: The handle is alive.
            self.check(OPERATION, unsafe { set(self.raw, number) })?;
        }
        // Only F32 has a choice of precision.
        self.numbers.computes[DataType::F32 as usize] = platform.quirks().compute_code(DataType::F32, mode);
        Ok(())
    }

    fn set_atomics_mode(&mut self, mode: AtomicsMode) -> Result<()> {
        const OPERATION: &str = "set_atomics_mode";
        self.enter(OPERATION)?;
        let vendor = self.state.platform.quirks().atomics_modes;
        let number = match mode {
            AtomicsMode::NotAllowed => vendor.not_allowed,
            AtomicsMode::Allowed if self.state.capabilities(OPERATION, self.device)?.atomics_mode => vendor.allowed,
            AtomicsMode::Allowed => return Err(Error::lacks(OPERATION, "atomics_mode")),
            _ => return Err(Error::unknown(OPERATION, &mode)),
        };
        // SAFETY: The handle is alive.
        self.check(OPERATION, unsafe { (self.state.platform.blas().calls.set_atomics_mode)(self.raw, number) })
    }

    unsafe fn gemm(&mut self, gemm: &Gemm) -> Result<()> {
        const OPERATION: &str = "gemm";
        self.enter(OPERATION)?;
        let state = &*self.state;
        if !self.products.include(&gemm.shape) {
            return self.refuse_product(OPERATION, &gemm.shape);
        }
        if gemm.shape.is_empty() {
            return Ok(());
        }
        let Some((stream, bound)) = self.stream else { return Err(no_stream(OPERATION)) };
        let held = state.stream(OPERATION, stream)?;
        let _current = state.make_current(OPERATION, self.device)?;
        if held.raw() != bound {
            self.bind_again(OPERATION, held.raw())?;
            self.stream = Some((stream, held.raw()));
        }
        // SAFETY: The handle and its stream are alive. The caller promises that the matrices are valid.
        let code = unsafe { enqueue(OPERATION, state.platform.blas(), &self.numbers, self.raw, gemm) }?;
        self.check(OPERATION, code)
    }

    fn raw(&self) -> u64 {
        self.raw.0
    }

    fn reset(&mut self) -> Result<()> {
        const OPERATION: &str = "reset";
        self.enter(OPERATION)?;
        // The binding is unknown from here on.
        (self.stream, self.workspace) = (None, None);
        let state = Arc::clone(&self.state);
        let _relaxed = state.relaxed();
        let _current = state.make_current(OPERATION, self.device)?;
        self.restore(OPERATION)
    }

    fn destroy(&mut self) -> Result<()> {
        self.close()
    }
}
