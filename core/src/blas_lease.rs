//! [`BlasLease`] and [`LtLease`]: pooled handles, bound to a stream and its workspace, that take the stream's turn.

use std::collections::HashMap;
use std::fmt;

use crate::blas::{
    AtomicsMode, BlasHandle, BlasKind, DataType, Epilogue, Gemm, GemmShape, PlanArguments, PlanId, PlanOptions,
    Workspace,
};
use crate::buffer::DeviceSlice;
use crate::error::{Error, ErrorKind, Result};
use crate::numerics::{self, Modes, Numerics};
use crate::pool::HandleLease;
use crate::scalar::Scalar;
use crate::stream::{Stream, Turn};

/// Plans that a handle keeps; past this it starts over, so that ever-changing shapes do not fill memory.
const MOST_PLANS: usize = 256;

/// A handle in the pool, with what is known about its state.
#[derive(Debug)]
pub(crate) struct PooledHandle {
    pub(crate) handle: Box<dyn BlasHandle>,
    pub(crate) kind: BlasKind,
    /// Key of the stream that the handle and that stream's workspace are bound to; 0 where the state is unknown.
    bound: u64,
    /// The modes that are set on the handle. Plans have modes of their own.
    modes: Modes,
    /// Plans belong to the handle that made them, so every handle has its own.
    plans: HashMap<PlanOptions, PlanId>,
}

impl PooledHandle {
    pub(crate) fn new(handle: Box<dyn BlasHandle>, kind: BlasKind) -> Self {
        Self { handle, kind, bound: 0, modes: Modes::default(), plans: HashMap::new() }
    }

    /// The handle of a stream that has ended, for any stream.
    pub(crate) fn unbound(mut self) -> Self {
        self.bound = 0;
        self
    }

    /// Binds the stream and its workspace, or that of the capture that it takes part in. A key is never used twice, so an
    /// equal key means an equal workspace.
    #[inline]
    fn bind(&mut self, stream: &Stream) -> Result<()> {
        if self.bound == stream.core().bound_as() {
            return Ok(());
        }
        self.bind_anew(stream)
    }

    #[cold]
    #[inline(never)]
    fn bind_anew(&mut self, stream: &Stream) -> Result<()> {
        let (key, workspace) = stream.core().binding(&stream.runtime().inner, self.kind)?;
        // Whatever fails below leaves the handle's state unknown.
        self.bound = 0;
        self.handle.set_stream(stream.id())?;
        // SAFETY: the workspace is the stream's own and lives until the stream has ended and passed its last use, or it is
        // the capture's, which keeps it. Every product that uses it is enqueued on this stream, under the stream's turn.
        unsafe { self.handle.set_workspace(workspace)? };
        self.bound = key;
        Ok(())
    }

    /// The stream's turn, with the handle bound to what the stream has at that moment.
    #[inline]
    fn bound_turn<'s>(&mut self, operation: &'static str, stream: &'s Stream) -> Result<Turn<'s>> {
        loop {
            self.bind(stream)?;
            let turn = stream.core().enter(operation)?;
            // A capture began or ended in between: bound anew, without the turn.
            if self.bound == stream.core().bound_as() {
                return Ok(turn);
            }
        }
    }
}

/// A BLAS handle of the pool, bound to a stream and its workspace.
///
/// The lease belongs to the thread that took it and lives no longer than the stream:
///
/// ```compile_fail,E0277
/// # use highwater_core::Runtime;
/// # use highwater_mock::{MockGpu, MockOptions};
/// # let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
/// # let stream = runtime.device(0).unwrap().create_stream().unwrap();
/// let lease = stream.blas().unwrap();
/// std::thread::scope(|scope| { scope.spawn(|| drop(lease)); });
/// ```
///
/// ```compile_fail,E0505
/// # use highwater_core::Runtime;
/// # use highwater_mock::{MockGpu, MockOptions};
/// # let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
/// # let stream = runtime.device(0).unwrap().create_stream().unwrap();
/// let lease = stream.blas().unwrap();
/// drop(stream);
/// drop(lease);
/// ```
pub struct BlasLease<'s> {
    pooled: HandleLease<'s, PooledHandle>,
    stream: &'s Stream,
    /// The lease's own policy.
    numerics: Option<Numerics>,
}

impl fmt::Debug for BlasLease<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlasLease").field("handle", &self.pooled.handle).field("stream", &self.stream.id()).finish()
    }
}

impl<'s> BlasLease<'s> {
    #[inline]
    pub(crate) fn bind(stream: &'s Stream, mut pooled: HandleLease<'s, PooledHandle>) -> Result<Self> {
        pooled.bind(stream)?;
        Ok(Self { pooled, stream, numerics: None })
    }

    /// Sets the policy for the products of this lease, before the thread's and the runtime's.
    pub fn set_numerics(&mut self, policy: Numerics) {
        self.numerics = Some(policy);
    }

    /// The same lease with a policy of its own: see [`BlasLease::set_numerics`].
    #[must_use]
    pub fn with_numerics(mut self, policy: Numerics) -> Self {
        self.set_numerics(policy);
        self
    }

    #[inline]
    fn apply_numerics(&mut self, operation: &'static str, data_type: DataType) -> Result<()> {
        let policy = policy(self.numerics, self.stream);
        let capabilities = &self.stream.runtime().inner.device(self.stream.device()).capabilities;
        let PooledHandle { handle, modes, .. } = &mut *self.pooled;
        modes.apply(&mut **handle, operation, policy, capabilities, data_type)
    }

    /// Enqueues `C = alpha * op(A) * op(B) + beta * C`. Returns without waiting for the product.
    ///
    /// # Errors
    /// - `InvalidArgument`: the shape is inconsistent, a buffer is too small for it, or C overlaps A or B.
    /// - `WrongDevice`: a buffer is on another device than the stream.
    /// - `Unsupported`: the device does not multiply this type, has no strided batches, or lacks the TF32 that the policy
    ///   asks for.
    /// - Else what the backend gives.
    pub fn gemm<'b, T: Scalar>(
        &mut self,
        shape: &GemmShape,
        alpha: T,
        a: impl Into<DeviceSlice<'b, T>>,
        b: impl Into<DeviceSlice<'b, T>>,
        beta: T,
        c: impl Into<DeviceSlice<'b, T>>,
    ) -> Result<()> {
        self.enqueue("gemm", shape, (alpha, beta), a.into(), b.into(), c.into())
    }

    /// Enqueues `C = alpha * op(A) * op(B) + beta * C` with factors of `T` and a C of `R`, which is `f32` where `T` is
    /// [`half::f16`] or [`half::bf16`]; the sums stay in 32 bits from the first product to C. Also takes equal types, and
    /// then is [`BlasLease::gemm`].
    ///
    /// ```
    /// use half::bf16;
    /// use highwater_core::{GemmShape, Runtime};
    /// use highwater_mock::{MockGpu, MockOptions};
    ///
    /// let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
    /// let stream = runtime.device(0)?.create_stream()?;
    /// let a = stream.upload(&[bf16::ONE; 300])?; // 1 x 300
    /// let b = stream.upload(&[bf16::ONE; 300])?; // 300 x 1
    /// let c = stream.upload(&[1.0_f32])?;
    /// stream.blas()?.gemm_mixed(&GemmShape::mixed::<bf16, f32>(1, 1, 300), 1.0, &a, &b, 1.0, &c)?;
    /// assert_eq!(stream.download(&c)?, [301.0]); // bf16 has 300 and 302.
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`BlasLease::gemm`]; `Unsupported` also for other pairs of types, and where the device lacks `gemm_mixed`.
    pub fn gemm_mixed<'b, T: Scalar, R: Scalar>(
        &mut self,
        shape: &GemmShape,
        alpha: R,
        a: impl Into<DeviceSlice<'b, T>>,
        b: impl Into<DeviceSlice<'b, T>>,
        beta: R,
        c: impl Into<DeviceSlice<'b, R>>,
    ) -> Result<()> {
        self.enqueue("gemm_mixed", shape, (alpha, beta), a.into(), b.into(), c.into())
    }

    fn enqueue<T: Scalar, R: Scalar>(
        &mut self,
        operation: &'static str,
        shape: &GemmShape,
        (alpha, beta): (R, R),
        a: DeviceSlice<'_, T>,
        b: DeviceSlice<'_, T>,
        c: DeviceSlice<'_, R>,
    ) -> Result<()> {
        check_product(operation, self.stream, shape, a, b, c)?;
        let gemm = Gemm::new(*shape, a.ptr(), b.ptr(), c.ptr()).with_scale(alpha.to_f64(), beta.to_f64());
        let blocks = [a.block, b.block, c.block];
        blocks.iter().for_each(|block| block.note_use(self.stream.core()));
        // A binding that failed before is made up for here.
        let mut turn = self.pooled.bound_turn(operation, self.stream)?;
        self.apply_numerics(operation, shape.data_type)?;
        blocks.iter().for_each(|block| turn.keep_device(block));
        // SAFETY: the buffers are live, on this device and large enough, and C overlaps neither factor (checked above).
        // They are freed only after this stream has passed the product (`note_use`), or after the graph that keeps them.
        // The turn is held.
        unsafe { self.pooled.handle.gemm(&gemm) }
    }

    /// Lends the vendor's handle to code that calls the vendor itself.
    ///
    /// For the time of the call the handle is bound to this stream and to a workspace of its own, so foreign code needs
    /// no turn, and is in the modes of the policy that counts here. Afterwards the handle is bound anew, whatever was done
    /// to it; it must not be destroyed. A capture of the stream does not begin meanwhile; where one is open, the workspace
    /// belongs to it, and it must not end meanwhile.
    ///
    /// # Errors
    /// `OutOfMemory` where there is no room for the workspace; `Unsupported` where the policy asks for TF32 and the device
    /// lacks it; else what binding gives.
    pub fn with_raw<R>(&mut self, foreign: impl FnOnce(RawBlas) -> R) -> Result<R> {
        let inner = &self.stream.runtime().inner;
        inner.check("with_raw")?;
        // Foreign code may multiply any type.
        self.apply_numerics("with_raw", DataType::F32)?;
        let lent = LentWorkspace::take(self.stream)?;
        let pooled = &mut *self.pooled;
        // What foreign code changes is not known, so all of it is set again by the next binding. The workspace goes back
        // after that binding, or where there is none: before a product uses the handle, it is bound anew.
        pooled.bound = 0;
        pooled.modes = Modes::default();
        pooled.handle.set_stream(self.stream.id())?;
        // SAFETY: nobody else has the workspace, and it is given back below, for work after this stream's, or kept by the
        // capture.
        unsafe { pooled.handle.set_workspace(lent.workspace)? };
        let value = foreign(RawBlas { handle: pooled.handle.raw(), workspace: lent.workspace });
        pooled.bind(self.stream)?;
        Ok(value)
    }
}

/// A workspace of a raw handle's own; goes back when dropped, also where foreign code panics.
struct LentWorkspace<'s> {
    stream: &'s Stream,
    workspace: Option<Workspace>,
    /// Whether it belongs to the capture that the stream takes part in.
    captured: bool,
}

impl<'s> LentWorkspace<'s> {
    fn take(stream: &'s Stream) -> Result<Self> {
        let inner = &stream.runtime().inner;
        let core = stream.core();
        let bytes = inner.device(stream.device()).workspace_bytes(BlasKind::Blas);
        loop {
            let mut turn = core.enter("with_raw")?;
            if turn.recording.is_none() {
                turn.lent += 1;
                drop(turn);
                // Counted back also where there is no workspace to be had.
                let mut lent = Self { stream, workspace: None, captured: false };
                lent.workspace = inner.take_workspace(core, bytes)?;
                return Ok(lent);
            }
            drop(turn);
            if bytes == 0 {
                return Ok(Self { stream, workspace: None, captured: true });
            }
            // None where the capture has ended meanwhile.
            if let Some(workspace) = core.captured_workspace(inner, bytes)? {
                return Ok(Self { stream, workspace: Some(workspace), captured: true });
            }
        }
    }
}

impl Drop for LentWorkspace<'_> {
    fn drop(&mut self) {
        let inner = &self.stream.runtime().inner;
        if self.captured || !inner.generation.is_current() {
            return;
        }
        if let Some(workspace) = self.workspace
            && inner.may_release()
        {
            inner.give_back_workspace(workspace, self.stream.core());
        }
        self.stream.core().turn().lent -= 1;
    }
}

/// A handle lent to foreign code by [`BlasLease::with_raw`].
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct RawBlas {
    /// The vendor's handle, as a number.
    pub handle: u64,
    /// The workspace that is bound to it for the time of the call.
    pub workspace: Option<Workspace>,
}

/// An Lt handle of the pool, bound to a stream and its workspace. Plans are cached by what they are made for.
///
/// ```
/// use highwater_core::{Epilogue, GemmShape, Runtime};
/// use highwater_mock::{MockGpu, MockOptions};
///
/// let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
/// let device = runtime.device(0)?;
/// let stream = device.create_stream()?;
/// let weight = stream.upload(&[1.0_f32, -1.0])?; // 2 x 1
/// let input = stream.upload(&[3.0_f32])?; // 1 x 1
/// let bias = stream.upload(&[0.5_f32, 0.5])?;
/// let output = device.allocate::<f32>(2)?;
/// let shape = GemmShape::of::<f32>(2, 1, 1);
/// stream.lt()?.matmul(&shape, Epilogue::BiasRelu, 1.0, &weight, &input, 0.0, &output, Some((&bias).into()))?;
/// assert_eq!(stream.download(&output)?, [3.5, 0.0]);
/// # Ok::<(), highwater_core::Error>(())
/// ```
///
/// As with [`BlasLease`], the lease stays in its thread and does not outlive the stream:
///
/// ```compile_fail,E0277
/// # use highwater_core::Runtime;
/// # use highwater_mock::{MockGpu, MockOptions};
/// # let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
/// let stream = runtime.device(0).unwrap().create_stream().unwrap();
/// let lease = stream.lt().unwrap();
/// std::thread::scope(|scope| { scope.spawn(|| drop(lease)); });
/// ```
///
/// ```compile_fail,E0505
/// # use highwater_core::Runtime;
/// # use highwater_mock::{MockGpu, MockOptions};
/// # let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
/// let stream = runtime.device(0).unwrap().create_stream().unwrap();
/// let lease = stream.lt().unwrap();
/// drop(stream);
/// drop(lease);
/// ```
pub struct LtLease<'s> {
    pooled: HandleLease<'s, PooledHandle>,
    stream: &'s Stream,
    /// The lease's own policy.
    numerics: Option<Numerics>,
}

impl fmt::Debug for LtLease<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LtLease").field("handle", &self.pooled.handle).field("stream", &self.stream.id()).finish()
    }
}

impl<'s> LtLease<'s> {
    #[inline]
    pub(crate) fn bind(stream: &'s Stream, mut pooled: HandleLease<'s, PooledHandle>) -> Result<Self> {
        pooled.bind(stream)?;
        Ok(Self { pooled, stream, numerics: None })
    }

    /// Sets the policy for the products of this lease, before the thread's and the runtime's.
    pub fn set_numerics(&mut self, policy: Numerics) {
        self.numerics = Some(policy);
    }

    /// The same lease with a policy of its own: see [`LtLease::set_numerics`].
    #[must_use]
    pub fn with_numerics(mut self, policy: Numerics) -> Self {
        self.set_numerics(policy);
        self
    }

    /// Enqueues `D = epilogue(alpha * op(A) * op(B) + beta * D)`. Returns without waiting for it.
    ///
    /// # Errors
    /// As [`BlasLease::gemm`]; `InvalidArgument` also where `bias` is missing, not asked for, or shorter than `m`.
    #[expect(clippy::too_many_arguments, reason = "the operands of one formula, in its order")]
    pub fn matmul<'b, T: Scalar>(
        &mut self,
        shape: &GemmShape,
        epilogue: Epilogue,
        alpha: T,
        a: impl Into<DeviceSlice<'b, T>>,
        b: impl Into<DeviceSlice<'b, T>>,
        beta: T,
        d: impl Into<DeviceSlice<'b, T>>,
        bias: Option<DeviceSlice<'b, T>>,
    ) -> Result<()> {
        self.enqueue("matmul", shape, epilogue, (alpha, beta), [a.into(), b.into()], d.into(), bias)
    }

    /// Enqueues `D = epilogue(alpha * op(A) * op(B) + beta * D)` with factors of `T`, and a D and a bias of `R`: what
    /// [`BlasLease::gemm_mixed`] is to [`BlasLease::gemm`].
    ///
    /// ```
    /// use half::f16;
    /// use highwater_core::{Epilogue, GemmShape, Runtime};
    /// use highwater_mock::{MockGpu, MockOptions};
    ///
    /// let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
    /// let device = runtime.device(0)?;
    /// let stream = device.create_stream()?;
    /// let weight = stream.upload(&[f16::from_f32(60_000.0), -f16::ONE])?; // 2 x 1
    /// let input = stream.upload(&[f16::from_f32(2.0)])?; // 1 x 1
    /// let bias = stream.upload(&[0.5_f32, 0.5])?;
    /// let output = device.allocate::<f32>(2)?;
    /// let shape = GemmShape::mixed::<f16, f32>(2, 1, 1);
    /// let mut lt = stream.lt()?;
    /// lt.matmul_mixed(&shape, Epilogue::BiasRelu, 1.0, &weight, &input, 0.0, &output, Some((&bias).into()))?;
    /// assert_eq!(stream.download(&output)?, [120_000.5, 0.0]); // f16 ends at 65504.
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`LtLease::matmul`]; `Unsupported` also for other pairs of types, and where the device lacks `gemm_mixed`.
    #[expect(clippy::too_many_arguments, reason = "the operands of one formula, in its order")]
    pub fn matmul_mixed<'b, T: Scalar, R: Scalar>(
        &mut self,
        shape: &GemmShape,
        epilogue: Epilogue,
        alpha: R,
        a: impl Into<DeviceSlice<'b, T>>,
        b: impl Into<DeviceSlice<'b, T>>,
        beta: R,
        d: impl Into<DeviceSlice<'b, R>>,
        bias: Option<DeviceSlice<'b, R>>,
    ) -> Result<()> {
        self.enqueue("matmul_mixed", shape, epilogue, (alpha, beta), [a.into(), b.into()], d.into(), bias)
    }

    #[expect(clippy::too_many_arguments, reason = "the operands of one formula, in its order")]
    fn enqueue<T: Scalar, R: Scalar>(
        &mut self,
        operation: &'static str,
        shape: &GemmShape,
        epilogue: Epilogue,
        (alpha, beta): (R, R),
        [a, b]: [DeviceSlice<'_, T>; 2],
        d: DeviceSlice<'_, R>,
        bias: Option<DeviceSlice<'_, R>>,
    ) -> Result<()> {
        check_product(operation, self.stream, shape, a, b, d)?;
        check_bias(operation, self.stream, shape, epilogue, d, bias)?;
        let inner = &self.stream.runtime().inner;
        let device = inner.device(self.stream.device());
        let workspace_bytes = device.workspace_bytes(BlasKind::Lt);
        let policy = policy(self.numerics, self.stream);
        let math_mode = policy.math_mode(operation, &device.capabilities, shape.data_type)?;
        let atomics_mode = policy.atomics_mode(&device.capabilities).unwrap_or(AtomicsMode::NotAllowed);
        // The vendors' heuristics tell alignments up to 256 bytes apart.
        let addresses = [a.ptr(), b.ptr(), d.ptr()].into_iter().chain(bias.map(|bias| bias.ptr()));
        let operands = addresses.fold(256, |bits, ptr| bits | ptr.get());
        let options = PlanOptions::new(*shape, epilogue, workspace_bytes)
            .with_alignment(1 << operands.trailing_zeros())
            .with_math_mode(math_mode)
            .with_atomics_mode(atomics_mode);
        let plan = self.plan(options)?;
        let mut arguments = PlanArguments::new(a.ptr(), b.ptr(), d.ptr(), bias.map(|bias| bias.ptr()));
        arguments.alpha = alpha.to_f64();
        arguments.beta = beta.to_f64();
        let blocks = || [a.block, b.block, d.block].into_iter().chain(bias.map(|bias| bias.block));
        blocks().for_each(|block| block.note_use(self.stream.core()));
        let mut turn = self.pooled.bound_turn(operation, self.stream)?;
        blocks().for_each(|block| turn.keep_device(block));
        // SAFETY: as in `BlasLease::enqueue`; D is C, and the bias is live, long enough and apart from D.
        unsafe { self.pooled.handle.run_plan(plan, &arguments) }
    }

    fn plan(&mut self, options: PlanOptions) -> Result<PlanId> {
        let pooled = &mut *self.pooled;
        if let Some(&plan) = pooled.plans.get(&options) {
            return Ok(plan);
        }
        if pooled.plans.len() >= MOST_PLANS {
            for (_, plan) in pooled.plans.drain() {
                if let Err(error) = pooled.handle.destroy_plan(plan) {
                    self.stream.runtime().inner.count_failed_release(&error);
                }
            }
        }
        let plan = pooled.handle.create_plan(&options)?;
        pooled.plans.insert(options, plan);
        Ok(plan)
    }
}

/// The policy that counts for a product: the lease's, else the thread's, else the runtime's.
#[inline]
fn policy(of_lease: Option<Numerics>, stream: &Stream) -> Numerics {
    of_lease.or_else(numerics::of_thread).unwrap_or(stream.runtime().inner.numerics)
}

/// Everything that can be wrong with a product, before the vendor is called.
fn check_product<T: Scalar, R: Scalar>(
    operation: &'static str,
    stream: &Stream,
    shape: &GemmShape,
    a: DeviceSlice<'_, T>,
    b: DeviceSlice<'_, T>,
    c: DeviceSlice<'_, R>,
) -> Result<()> {
    stream.runtime().inner.check(operation)?;
    let invalid = |message: String| Error::new(ErrorKind::InvalidArgument, operation, message);
    for (what, of_shape, of_buffers) in
        [("factors", shape.data_type, T::DATA_TYPE), ("result", shape.output, R::DATA_TYPE)]
    {
        if of_shape != of_buffers {
            let message = format!("the shape has {what} of {of_shape:?}, the buffers are of {of_buffers:?}");
            return Err(invalid(message).with_hint(
                "make the shape with `GemmShape::of::<T>`, or with `GemmShape::mixed::<T, R>` for `gemm_mixed` and \
                 `matmul_mixed`",
            ));
        }
    }
    stream.runtime().inner.device(stream.device()).capabilities.check_product(operation, shape)?;
    let extents = shape.extents(operation)?;
    let lengths = [("A", a.len(), extents.a), ("B", b.len(), extents.b), ("C", c.len(), extents.c)];
    stream.check_here(operation, &a)?;
    stream.check_here(operation, &b)?;
    stream.check_here(operation, &c)?;
    if let Some((name, len, needed)) = lengths.into_iter().find(|(_, len, needed)| len < needed) {
        return Err(invalid(format!("{name} has {len} values, the product reaches {needed}"))
            .with_hint("pass a larger buffer, or check m, n, k, the leading dimensions and the batch"));
    }
    for (name, factor, len) in [("A", &a, extents.a), ("B", &b, extents.b)] {
        if c.overlaps(extents.c, factor, len) {
            return Err(invalid(format!("C overlaps {name}")).with_hint("write to a buffer of its own"));
        }
    }
    Ok(())
}

fn check_bias<T: Scalar>(
    operation: &'static str,
    stream: &Stream,
    shape: &GemmShape,
    epilogue: Epilogue,
    d: DeviceSlice<'_, T>,
    bias: Option<DeviceSlice<'_, T>>,
) -> Result<()> {
    let invalid = |message: String| Error::new(ErrorKind::InvalidArgument, operation, message);
    match bias {
        Some(bias) if epilogue.has_bias() => {
            stream.check_here(operation, &bias)?;
            if bias.len() < shape.m {
                return Err(invalid(format!("the bias has {} values, D has {} rows", bias.len(), shape.m))
                    .with_hint("a bias has one value for each row of D"));
            }
            if d.overlaps(shape.extents(operation)?.c, &bias, shape.m) {
                return Err(invalid("D overlaps the bias".to_owned()).with_hint("write to a buffer of its own"));
            }
            Ok(())
        }
        None if epilogue.has_bias() => {
            Err(invalid(format!("the epilogue {epilogue:?} needs a bias"))
                .with_hint("pass one value for each row of D"))
        }
        Some(_) => Err(invalid(format!("the epilogue {epilogue:?} takes no bias")).with_hint("pass `None`")),
        None => Ok(()),
    }
}
