//! [`BlasLease`] and [`LtLease`]: pooled handles, bound to a stream and its workspace, that take its submission lock.
//! [`OwnedBlasLease`] and [`OwnedLtLease`] are the same for tasks that move between threads.

use std::fmt;
use std::sync::Arc;

use crate::buffer::{DeviceSlice, Untyped};
use crate::device_block::Noted;
use crate::numerics::{self, Modes, Numerics};
use crate::pool::blas_handles::PooledHandle;
use crate::pool::first_create::Entry;
use crate::pool::{DetachedLease, HandleLease};
use crate::product::{self, Product};
use crate::runtime::RuntimeInner;
use crate::stream::Stream;
use crate::stream::submission::SubmissionGuard;
use highwater_hal::{
    AtomicsMode, BlasKind, DataType, Epilogue, Error, ErrorKind, Gemm, GemmShape, PlanArguments, PlanId, PlanOptions,
    Result, Scalar, Workspace,
};

/// Plans that a handle keeps. At this number it starts over, so that ever-changing shapes do not fill memory.
const MOST_PLANS: usize = 256;

impl PooledHandle {
    /// Binds the stream and its workspace, or the workspace of the capture that it takes part in. A key is never reused, so
    /// an equal key means an equal workspace.
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
        let (key, workspace) = stream.core().binding(self.kind)?;
        // A failure below leaves the handle's state unknown.
        self.bound = 0;
        self.take_back(&stream.runtime().inner)?;
        self.handle.set_stream(stream.id())?;
        // SAFETY: the workspace is the stream's own and lives until the stream has ended and passed its last use, or it is
        // the capture's, which keeps it. Every product that uses it is enqueued on this stream, under its submission lock.
        unsafe { self.handle.set_workspace(workspace)? };
        self.bound = key;
        Ok(())
    }

    /// Restores a handle that foreign code had, or replaces it.
    fn take_back(&mut self, runtime: &RuntimeInner) -> Result<()> {
        if !self.lent {
            return Ok(());
        }
        if self.handle.reset().is_err() {
            let fresh = runtime.handles.make(self.handle.device(), self.kind)?;
            runtime.handles.discard(std::mem::replace(self, fresh));
        }
        self.lent = false;
        Ok(())
    }

    /// Sets the modes of the policy for products of this type that are not set yet.
    #[inline(never)]
    fn apply_numerics(
        &mut self,
        operation: &'static str,
        stream: &Stream,
        policy: Numerics,
        data_type: DataType,
    ) -> Result<()> {
        let capabilities = &stream.runtime().inner.device(stream.device()).capabilities;
        self.modes.apply(&mut *self.handle, operation, policy, capabilities, data_type)
    }

    /// Takes the submission lock, with the handle bound to the stream's workspace of that moment.
    #[inline(always)]
    fn bound_turn<'s>(&mut self, operation: &'static str, stream: &'s Stream) -> Result<SubmissionGuard<'s>> {
        let core = stream.core();
        match core.try_lock_submission() {
            Some(turn) if self.bound == core.bound_as() => Ok(turn),
            turn => self.next_bound_turn(turn, operation, stream),
        }
    }

    /// Does the same if the lock is not free, or the handle has another binding.
    #[cold]
    #[inline(never)]
    fn next_bound_turn<'s>(
        &mut self,
        turn: Option<SubmissionGuard<'s>>,
        operation: &'static str,
        stream: &'s Stream,
    ) -> Result<SubmissionGuard<'s>> {
        drop(turn);
        loop {
            // Without the lock. Repeats a binding that failed before.
            self.bind(stream)?;
            let turn = stream.core().enter(operation)?;
            // Otherwise, a capture began or ended meanwhile.
            if self.bound == stream.core().bound_as() {
                return Ok(turn);
            }
        }
    }
}

/// The methods of all leases: each lease has a policy of its own.
macro_rules! policy_of {
    ($name:ident, $($lease:ty),+) => {
        impl $($lease)+ {
            /// Sets the policy for the products of this lease, before the thread's and the runtime's.
            pub fn set_numerics(&mut self, policy: Numerics) {
                self.numerics = Some(policy);
            }

            /// Sets the policy as [`set_numerics`](Self::set_numerics) does, and returns the lease.
            #[must_use]
            pub fn with_numerics(mut self, policy: Numerics) -> Self {
                self.set_numerics(policy);
                self
            }
        }

        impl fmt::Debug for $($lease)+ {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let mut text = f.debug_struct(stringify!($name));
                text.field("handle", &self.pooled.handle).field("stream", &self.stream.id()).finish()
            }
        }
    };
}

policy_of!(BlasLease, BlasLease<'_>);
policy_of!(LtLease, LtLease<'_>);
policy_of!(OwnedBlasLease, OwnedBlasLease);
policy_of!(OwnedLtLease, OwnedLtLease);

/// Binds a lease to its stream, and turns it into a lease that owns the stream.
macro_rules! binding_of {
    ($lease:ident, $owned:ident) => {
        impl<'s> $lease<'s> {
            #[inline]
            pub(crate) fn bind(stream: &'s Stream, mut pooled: HandleLease<'s, PooledHandle>) -> Result<Self> {
                pooled.bind(stream)?;
                Ok(Self { pooled, stream, numerics: None })
            }

            #[inline]
            fn into_owned(self) -> $owned {
                let Self { pooled, stream, numerics } = self;
                // SAFETY: The stream keeps its runtime, which has the pool, and the lease drops it after the handle.
                let pooled = unsafe { DetachedLease::new(pooled) };
                $owned { pooled, stream: stream.to_owned_stream(), numerics }
            }
        }
    };
}

binding_of!(BlasLease, OwnedBlasLease);
binding_of!(LtLease, OwnedLtLease);

impl Stream {
    /// Leases a BLAS handle, bound to this stream and its workspace. A repeat request in the same thread takes no lock and
    /// makes no call of the backend.
    ///
    /// # Errors
    /// The errors of making and binding a handle.
    // Always inlined: a call spills registers, and the compare-exchange waits for those stores (14 ns against 7).
    #[inline(always)]
    pub fn blas(&self) -> Result<BlasLease<'_>> {
        let handles = &self.runtime().inner.handles;
        let enter = || handles.enter(self.device(), BlasKind::Blas, self.core().lacking_workspace(BlasKind::Blas));
        let lease = handles.blas.lease_entered(self.core().blas_key, enter, |entry| self.new_blas_handle(entry))?;
        BlasLease::bind(self, lease)
    }

    /// A handle for products. In a capture that cannot record products, the error gives that reason, instead of a missing
    /// handle.
    #[cold]
    fn new_blas_handle(&self, entry: &Entry<'_>) -> Result<PooledHandle> {
        self.runtime().inner.handles.create(self.device(), BlasKind::Blas, entry).or_else(|error| {
            if error.kind() == ErrorKind::Capture && self.core().enter("gemm")?.recording.is_some() {
                check_recordable("gemm", self)?;
            }
            Err(error)
        })
    }

    /// Leases a BLAS handle as [`Stream::blas`] does. The lease borrows nothing and is `Send`: a task may keep it across an `await`, and
    /// end it in any thread. The handle then returns to the thread that took it. The lease keeps the stream alive.
    ///
    /// ```
    /// use highwater_core::{GemmShape, Runtime};
    /// use highwater_mock::{MockGpu, MockOptions};
    ///
    /// let stream = Runtime::new(MockGpu::open(MockOptions::new())?)?.device(0)?.create_stream()?;
    /// let (a, b, c) = (stream.upload(&[3.0_f32])?, stream.upload(&[2.0])?, stream.upload(&[0.0])?);
    /// let mut blas = stream.blas_owned()?;
    /// let c = std::thread::spawn(move || {
    ///     blas.gemm(&GemmShape::of::<f32>(1, 1, 1), 1.0, &a, &b, 0.0, &c).map(|()| c)
    /// });
    /// assert_eq!(stream.download(&c.join().unwrap()?)?, [6.0]);
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Stream::blas`].
    #[inline]
    pub fn blas_owned(&self) -> Result<OwnedBlasLease> {
        self.blas().map(BlasLease::into_owned)
    }

    /// Leases an Lt handle as [`Stream::lt`] does, with the properties of [`Stream::blas_owned`].
    ///
    /// # Errors
    /// As [`Stream::lt`].
    #[inline]
    pub fn lt_owned(&self) -> Result<OwnedLtLease> {
        self.lt().map(LtLease::into_owned)
    }

    /// Leases an Lt handle, bound to this stream and its workspace, as [`Stream::blas`] does.
    ///
    /// # Errors
    /// `Unsupported` where `lt_plans` is false; else as [`Stream::blas`].
    #[inline(always)]
    pub fn lt(&self) -> Result<LtLease<'_>> {
        let handles = &self.runtime().inner.handles;
        let enter = || handles.enter(self.device(), BlasKind::Lt, self.core().lacking_workspace(BlasKind::Lt));
        let create = |entry: &Entry<'_>| handles.create(self.device(), BlasKind::Lt, entry);
        let lease = handles.lt.lease_entered(self.core().lt_key, enter, create)?;
        LtLease::bind(self, lease)
    }
}

/// A BLAS handle of the pool, bound to a stream and its workspace.
///
/// The lease belongs to the thread that took it and lives no longer than the stream. [`OwnedBlasLease`] has neither limit.
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

/// A leased BLAS handle, as [`BlasLease`] is, for tasks that move between threads. It is `Send`, borrows nothing, and keeps its
/// stream alive. [`Stream::blas_owned`] returns it.
pub struct OwnedBlasLease {
    /// Dropped before the stream.
    pooled: DetachedLease<PooledHandle>,
    stream: Arc<Stream>,
    /// The lease's own policy.
    numerics: Option<Numerics>,
}

/// The operations of a BLAS lease.
macro_rules! products_of {
    ($lease:ty) => {
        impl $lease {
            /// Enqueues `C = alpha * op(A) * op(B) + beta * C`. Returns without waiting for the product.
            ///
            /// # Errors
            /// - `InvalidArgument`: the shape is inconsistent, a buffer is too small for it, or C overlaps A or B.
            /// - `WrongDevice`: a buffer is on another device than the stream.
            /// - `Unsupported`: the device does not multiply this type, has no strided batches, or lacks the TF32 that the
            ///   policy requests. In a capture, also if the BLAS has no workspace.
            /// - Else the backend's error.
            pub fn gemm<'b, T: Scalar>(
                &mut self,
                shape: &GemmShape,
                alpha: T,
                a: impl Into<DeviceSlice<'b, T>>,
                b: impl Into<DeviceSlice<'b, T>>,
                beta: T,
                c: impl Into<DeviceSlice<'b, T>>,
            ) -> Result<()> {
                enqueue(
                    &mut self.pooled,
                    &self.stream,
                    self.numerics,
                    &Product::new::<T, T>("gemm", shape, (alpha, beta), a.into(), b.into(), c.into()),
                )
            }

            /// Enqueues `C = alpha * op(A) * op(B) + beta * C` with factors of `T` and a C of `R`.
            ///
            /// If `T` is [`half::f16`](highwater_hal::half::f16) or [`half::bf16`](highwater_hal::half::bf16), `R` is `f32`, and the sums
            /// stay in 32 bits from the first product to C. With equal types, the call is [`BlasLease::gemm`].
            ///
            /// ```
            /// use highwater_core::half::bf16;
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
            /// The errors of [`BlasLease::gemm`]. `Unsupported` also for other pairs of types, and if the device lacks `gemm_mixed`.
            pub fn gemm_mixed<'b, T: Scalar, R: Scalar>(
                &mut self,
                shape: &GemmShape,
                alpha: R,
                a: impl Into<DeviceSlice<'b, T>>,
                b: impl Into<DeviceSlice<'b, T>>,
                beta: R,
                c: impl Into<DeviceSlice<'b, R>>,
            ) -> Result<()> {
                enqueue(
                    &mut self.pooled,
                    &self.stream,
                    self.numerics,
                    &Product::new::<T, R>("gemm_mixed", shape, (alpha, beta), a.into(), b.into(), c.into()),
                )
            }

            /// Lends the vendor's handle to code that calls the vendor itself.
            ///
            /// During the call the handle is bound to this stream and to a workspace of its own, so foreign code needs no lock.
            /// It has the modes of the innermost policy. The caller must not destroy it.
            ///
            /// Before the next use, the backend restores every setting of the handle, even if `foreign` panics. These are the
            /// pointer, math and atomics modes, stream, workspace, and with cuBLAS the multiprocessor target and emulation. If
            /// the backend cannot, core destroys and replaces the handle. A logger belongs to the process and not to a handle,
            /// so logger settings of foreign code stay.
            ///
            /// No capture of the stream begins during the call. If one is open, the workspace belongs to it, and the caller must
            /// not end it during the call.
            ///
            /// # Errors
            /// `OutOfMemory` if no memory is left for the workspace; `Unsupported` if the policy requests TF32 and the device lacks
            /// it; else the error of binding the handle.
            pub fn with_raw<R>(&mut self, foreign: impl FnOnce(RawBlas) -> R) -> Result<R> {
                lend(&mut self.pooled, &self.stream, self.numerics, foreign)
            }

            /// Calls code that enqueues work with the vendor's handle. The handle is bound to the stream's own workspace, and the call
            /// holds the submission lock, as for a product of this lease. Nothing is restored afterwards, so a repetition makes no
            /// call of the backend. For code that changes the handle, use [`with_raw`](Self::with_raw).
            ///
            /// `enqueue` takes the vendor's handle as a number. The handle has the modes of the innermost policy. `enqueue` blocks
            /// forever if it uses this stream of Highwater, or memory or events that the stream has used. Two threads block each
            /// other if each uses the other's stream. So `enqueue` must use no object of Highwater.
            ///
            /// # Errors
            /// `Unsupported` if the policy requests TF32 and the device lacks it, or in a capture if the BLAS has no workspace; else the
            /// error of binding the handle.
            ///
            /// # Safety
            /// The caller must not change a setting of the handle, must not destroy or keep it, and must enqueue work with it on this
            /// stream only. The memory of the work must live until the stream has passed it, or as long as the graph if a capture is open.
            pub unsafe fn enqueue_raw<R>(&mut self, enqueue: impl FnOnce(u64) -> R) -> Result<R> {
                enqueue_foreign(&mut self.pooled, &self.stream, self.numerics, enqueue)
            }
        }
    };
}

products_of!(BlasLease<'_>);
products_of!(OwnedBlasLease);

impl BlasLease<'_> {
    pub(crate) fn enqueue(&mut self, product: &Product<'_>) -> Result<()> {
        enqueue(&mut self.pooled, self.stream, self.numerics, product)
    }
}

/// Enqueues a product with a handle of a lease.
fn enqueue(
    pooled: &mut PooledHandle,
    stream: &Stream,
    numerics: Option<Numerics>,
    product: &Product<'_>,
) -> Result<()> {
    product.check(stream)?;
    let Product { operation, gemm, blocks, .. } = product;
    let noted = product::note_uses(stream.core(), blocks)?;
    let mut turn = pooled.bound_turn(operation, stream)?;
    let (policy, data_type) = (policy(numerics, stream), gemm.shape.data_type);
    if !pooled.modes.suit(policy, data_type) {
        pooled.apply_numerics(operation, stream, policy, data_type)?;
    }
    if turn.recording.is_some() || noted != Noted::Ordered {
        if turn.recording.is_some() {
            check_recordable(operation, stream)?;
        }
        product::keep_recorded(operation, &mut turn, noted, blocks)?;
    }
    // SAFETY: the buffers are live, on this device and large enough, and C overlaps neither factor (checked above).
    // They are freed only after this stream has passed the product (`note_uses`), or after the graph that keeps them.
    // The submission lock is held.
    unsafe { pooled.handle.gemm(gemm) }
}

/// Calls foreign code that enqueues with a handle of a lease and leaves its settings as they are.
fn enqueue_foreign<R>(
    pooled: &mut PooledHandle,
    stream: &Stream,
    numerics: Option<Numerics>,
    foreign: impl FnOnce(u64) -> R,
) -> Result<R> {
    const OPERATION: &str = "enqueue_raw";
    stream.runtime().inner.check(OPERATION)?;
    let turn = pooled.bound_turn(OPERATION, stream)?;
    // Foreign code may multiply any type.
    let (policy, data_type) = (policy(numerics, stream), DataType::F32);
    if !pooled.modes.suit(policy, data_type) {
        pooled.apply_numerics(OPERATION, stream, policy, data_type)?;
    }
    if turn.recording.is_some() {
        check_recordable(OPERATION, stream)?;
    }
    let value = foreign(pooled.handle.raw());
    drop(turn);
    Ok(value)
}

/// Lends a handle of a lease.
fn lend<R>(
    pooled: &mut PooledHandle,
    stream: &Stream,
    numerics: Option<Numerics>,
    foreign: impl FnOnce(RawBlas) -> R,
) -> Result<R> {
    let inner = &stream.runtime().inner;
    inner.check("with_raw")?;
    // If the previous attempt failed.
    pooled.take_back(inner)?;
    // An Lt handle has no modes.
    if pooled.kind == BlasKind::Blas {
        // Foreign code may multiply any type.
        pooled.apply_numerics("with_raw", stream, policy(numerics, stream), DataType::F32)?;
    }
    let lent = LentWorkspace::take(stream, pooled.kind)?;
    // Changes by foreign code are unknown, so the next binding undoes all of them. The workspace is returned after that
    // binding, or without one: a product binds the handle again before it uses it.
    pooled.bound = 0;
    pooled.lent = true;
    pooled.modes = Modes::default();
    pooled.handle.set_stream(stream.id())?;
    // SAFETY: No other handle has the workspace. It is returned below, for work after this stream's, or the capture keeps
    // it.
    unsafe { pooled.handle.set_workspace(lent.workspace)? };
    let value = foreign(RawBlas { handle: pooled.handle.raw(), workspace: lent.workspace });
    pooled.bind(stream)?;
    Ok(value)
}

/// A workspace that belongs to a raw handle. The drop returns it, even if foreign code panics.
struct LentWorkspace<'s> {
    stream: &'s Stream,
    workspace: Option<Workspace>,
    /// The key of the stream's part in a capture, if the workspace belongs to that capture.
    captured: Option<u64>,
}

impl<'s> LentWorkspace<'s> {
    fn take(stream: &'s Stream, kind: BlasKind) -> Result<Self> {
        let inner = &stream.runtime().inner;
        let core = stream.core();
        let bytes = inner.device(stream.device()).workspace_bytes(kind);
        loop {
            let mut turn = core.enter("with_raw")?;
            let Some(captured) = turn.recording.as_ref().map(|recording| recording.key) else {
                turn.lent += 1;
                drop(turn);
                // Built first, so that the count decreases again if no workspace is available.
                let mut lent = Self { stream, workspace: None, captured: None };
                lent.workspace = core.take_workspace(bytes)?;
                return Ok(lent);
            };
            drop(turn);
            if kind == BlasKind::Lt && bytes == 0 {
                // Each call of an Lt handle names its workspace, so it has no memory of its own.
                return Ok(Self { stream, workspace: None, captured: Some(captured) });
            }
            if kind == BlasKind::Blas {
                check_recordable("with_raw", stream)?;
            }
            // `None` if the capture has ended in the meantime.
            if let Some((key, workspace)) = core.take_captured_workspace(bytes)? {
                return Ok(Self { stream, workspace: Some(workspace), captured: Some(key) });
            }
        }
    }
}

impl Drop for LentWorkspace<'_> {
    fn drop(&mut self) {
        let inner = &self.stream.runtime().inner;
        if !inner.generation.is_current() {
            return;
        }
        if let Some(key) = self.captured {
            if let Some(workspace) = self.workspace {
                self.stream.core().give_back_captured_workspace(key, workspace);
            }
            return;
        }
        if let Some(workspace) = self.workspace
            && inner.may_release()
        {
            self.stream.core().give_back_workspace(workspace);
        }
        self.stream.core().lock_submission().lent -= 1;
    }
}

/// A handle lent to foreign code by [`BlasLease::with_raw`] or [`LtLease::with_raw`].
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct RawBlas {
    /// The vendor's handle, as a number.
    pub handle: u64,
    /// The workspace that is bound to it during the call. Foreign code passes it to each call of an Lt handle.
    pub workspace: Option<Workspace>,
}

/// An Lt handle of the pool, bound to a stream and its workspace. Plans are cached by their options.
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
/// As with [`BlasLease`], the lease stays in its thread and does not outlive the stream. [`OwnedLtLease`] has neither limit.
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

/// A leased Lt handle, as [`LtLease`] is, for tasks that move between threads. It is `Send`, borrows nothing, and keeps its stream
/// alive. [`Stream::lt_owned`] returns it.
pub struct OwnedLtLease {
    /// Dropped before the stream.
    pooled: DetachedLease<PooledHandle>,
    stream: Arc<Stream>,
    /// The lease's own policy.
    numerics: Option<Numerics>,
}

/// The operations of an Lt lease.
macro_rules! planned_products_of {
    ($lease:ty) => {
        impl $lease {
            /// Enqueues `D = epilogue(alpha * op(A) * op(B) + beta * D)`. Returns without waiting for it.
            ///
            /// # Errors
            /// The errors of [`BlasLease::gemm`]. `InvalidArgument` also if `bias` is missing, not expected, or shorter than `m`.
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
                let product = Product::new::<T, T>("matmul", shape, (alpha, beta), a.into(), b.into(), d.into());
                run_product(
                    (&mut self.pooled, &self.stream, self.numerics),
                    &product,
                    epilogue,
                    bias.map(|bias| bias.untyped()),
                )
            }

            /// Enqueues `D = epilogue(alpha * op(A) * op(B) + beta * D)` with factors of `T`, and with a D and a bias of `R`, as
            /// [`BlasLease::gemm_mixed`] does.
            ///
            /// ```
            /// use highwater_core::half::f16;
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
            /// The errors of [`LtLease::matmul`]. `Unsupported` also for other pairs of types, and if the device lacks `gemm_mixed`.
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
                let product = Product::new::<T, R>("matmul_mixed", shape, (alpha, beta), a.into(), b.into(), d.into());
                run_product(
                    (&mut self.pooled, &self.stream, self.numerics),
                    &product,
                    epilogue,
                    bias.map(|bias| bias.untyped()),
                )
            }

            /// Lends the vendor's Lt handle to code that calls the vendor itself, as [`BlasLease::with_raw`] does. The calls of an Lt
            /// handle take the stream and the workspace as arguments. The caller must pass [`Stream::raw`] and
            /// [`RawBlas::workspace`], and must not destroy the handle.
            ///
            /// ```
            /// # use highwater_core::Runtime;
            /// # use highwater_mock::{MockGpu, MockOptions};
            /// let stream = Runtime::new(MockGpu::open(MockOptions::new())?)?.device(0)?.create_stream()?;
            /// let (raw, workspace) = stream.lt()?.with_raw(|lt| (lt.handle, lt.workspace))?; // A `cublasLtHandle_t` on CUDA.
            /// assert!(raw != 0 && workspace.is_some());
            /// # Ok::<(), highwater_core::Error>(())
            /// ```
            ///
            /// # Errors
            /// `OutOfMemory` if no memory is left for the workspace; else the error of binding the handle.
            pub fn with_raw<R>(&mut self, foreign: impl FnOnce(RawBlas) -> R) -> Result<R> {
                lend(&mut self.pooled, &self.stream, self.numerics, foreign)
            }
        }
    };
}

planned_products_of!(LtLease<'_>);
planned_products_of!(OwnedLtLease);

/// Enqueues a product by a plan, with a handle of a lease.
fn run_product(
    (pooled, stream, numerics): (&mut PooledHandle, &Stream, Option<Numerics>),
    product: &Product<'_>,
    epilogue: Epilogue,
    bias: Option<Untyped<'_>>,
) -> Result<()> {
    product.check(stream)?;
    product.check_bias(stream, epilogue, bias)?;
    let Product { operation, gemm: Gemm { shape, alpha, beta, a, b, c: d, .. }, blocks, .. } = product;
    let device = stream.runtime().inner.device(stream.device());
    let workspace_bytes = device.workspace_bytes(BlasKind::Lt);
    let policy = policy(numerics, stream);
    let math_mode = policy.math_mode(operation, &device.capabilities, shape.data_type)?;
    let atomics_mode = policy.atomics_mode(&device.capabilities).unwrap_or(AtomicsMode::NotAllowed);
    // The vendors' heuristics distinguish alignments up to 256 bytes.
    let operands = 256 | a.get() | b.get() | d.get() | bias.map_or(0, |bias| bias.ptr.get());
    let options = PlanOptions::new(*shape, epilogue, workspace_bytes)
        .with_alignment(1 << operands.trailing_zeros())
        .with_math_mode(math_mode)
        .with_atomics_mode(atomics_mode);
    let plan = pooled.plan(stream, &options)?;
    let mut arguments = PlanArguments::new(*a, *b, *d, bias.map(|bias| bias.ptr));
    arguments.alpha = *alpha;
    arguments.beta = *beta;
    // Without a bias, D appears twice.
    let [block_a, block_b, block_d] = *blocks;
    let blocks = &[block_a, block_b, block_d, bias.map_or(block_d, |bias| bias.block)];
    let noted = product::note_uses(stream.core(), blocks)?;
    let mut turn = pooled.bound_turn(operation, stream)?;
    if turn.recording.is_some() || noted != Noted::Ordered {
        product::keep_recorded(operation, &mut turn, noted, blocks)?;
    }
    // SAFETY: as in `enqueue`; D is C, and the bias is live, long enough and apart from D.
    unsafe { pooled.handle.run_plan(plan, &arguments) }
}

impl PooledHandle {
    /// Returns the plan for these options. The plan of the previous product is at hand.
    #[inline]
    fn plan(&mut self, stream: &Stream, options: &PlanOptions) -> Result<PlanId> {
        match &self.last_plan {
            Some((last, plan)) if last == options => Ok(*plan),
            _ => self.other_plan(stream, options),
        }
    }

    #[inline(never)]
    fn other_plan(&mut self, stream: &Stream, options: &PlanOptions) -> Result<PlanId> {
        if let Some(&plan) = self.plans.get(options) {
            self.last_plan = Some((*options, plan));
            return Ok(plan);
        }
        if self.plans.len() >= MOST_PLANS {
            self.last_plan = None;
            for (_, plan) in self.plans.drain() {
                if let Err(error) = self.handle.destroy_plan(plan) {
                    stream.runtime().inner.count_failed_release(&error);
                }
            }
        }
        let plan = self.handle.create_plan(options)?;
        self.plans.insert(*options, plan);
        self.last_plan = Some((*options, plan));
        Ok(plan)
    }
}

/// Refuses products that cannot be recorded. A graph may run beside the next work of its handle, so it needs a workspace of its
/// own.
#[cold]
pub(crate) fn check_recordable(operation: &'static str, stream: &Stream) -> Result<()> {
    let device = stream.runtime().inner.device(stream.device());
    if device.workspace_bytes(BlasKind::Blas) > 0 {
        return Ok(());
    }
    let (why, hint) = if device.capabilities.blas_workspace {
        (
            "the BLAS workspace has 0 bytes",
            "set a size with `RuntimeOptions::with_blas_workspace_bytes`, or in the variable that sets 0, such as \
             CUBLAS_WORKSPACE_CONFIG",
        )
    } else {
        (
            "the device's BLAS takes no workspace",
            "multiply by `Stream::lt`, or outside of the capture, or use a vendor release whose BLAS takes a workspace",
        )
    };
    let message = format!("{why}, and a recorded product would share its handle's memory with later ones");
    Err(Error::new(ErrorKind::Unsupported, operation, message).with_hint(hint))
}

/// Returns the policy of a product: the lease's, else the thread's, else the runtime's.
#[inline]
fn policy(of_lease: Option<Numerics>, stream: &Stream) -> Numerics {
    of_lease.or_else(numerics::of_thread).unwrap_or(stream.core().services.numerics)
}
