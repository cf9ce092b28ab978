//! Plans over a vendor's Lt library: products whose kernel is chosen once, with their epilogues.
//!
//! The libraries of both vendors have the same calls with the same arguments. The differences are data: [`LtCodes`].

use std::fmt;
use std::sync::Arc;

use super::blas::{Factors, check_workspace, destroyed, no_stream};
use super::codes::Codes;
use super::lt_calls::{Lt, LtCodes, RawLt, RawMatmulDesc, RawMatmulPreference, RawMatrixLayout};
use super::platform::Platform;
use super::state::{DriverState, HandleCount};
use highwater_hal::{
    AtomicsMode, BlasHandle, BlasKind, DataType, DevicePtr, Epilogue, Error, ErrorKind, Gemm, GemmShape, MathMode,
    PlanArguments, PlanId, PlanOptions, Result, StreamId, Transpose, Workspace,
};

/// An algorithm in the vendor's own format, which fills the first bytes.
type Algorithm = [u64; 8];

/// The words of a result of the heuristic, for the longest algorithm.
const RESULT_WORDS: usize = 12;

/// A description, a layout or a preference of an Lt library, destroyed when dropped. These objects exist on the host only.
#[derive(Debug)]
struct Owned<R: Copy> {
    raw: R,
    codes: &'static Codes,
    destroy: unsafe extern "C" fn(R) -> i32,
    set_attribute: unsafe extern "C" fn(R, u32, *const u8, usize) -> i32,
}

impl<R: Copy> Drop for Owned<R> {
    fn drop(&mut self) {
        // SAFETY: The matching call created the object, and nothing uses it any more.
        unsafe { (self.destroy)(self.raw) };
    }
}

impl<R: Copy> Owned<R> {
    /// Sets an attribute.
    fn set<T: Copy>(&self, operation: &'static str, which: u32, value: &T) -> Result<()> {
        // SAFETY: The object is alive, and the call reads the value's bytes before it returns.
        self.codes.check(operation, unsafe {
            (self.set_attribute)(self.raw, which, std::ptr::from_ref(value).cast(), size_of::<T>())
        })
    }
}

/// A plan.
#[derive(Debug)]
struct Plan {
    product: Owned<RawMatmulDesc>,
    a: Owned<RawMatrixLayout>,
    b: Owned<RawMatrixLayout>,
    c: Owned<RawMatrixLayout>,
    algorithm: Algorithm,
    workspace_bytes: usize,
    /// The alignments of A and B, and of C, D and the bias, in bytes.
    alignments: [usize; 2],
    doubles: bool,
    has_bias: bool,
    /// The bias in the description.
    bias: Option<DevicePtr>,
}

impl Plan {
    /// Returns whether an operand is less aligned than the plan requires.
    #[inline]
    fn misplaces(&self, arguments: &PlanArguments) -> bool {
        let bias = if self.has_bias { arguments.bias.map_or(0, DevicePtr::get) } else { 0 };
        let [of_factors, of_results] = self.alignments.map(|bytes| bytes as u64 - 1);
        let factors = arguments.a.get() | arguments.b.get();
        let results = arguments.c.get() | arguments.d.get() | bias;
        factors & of_factors | results & of_results != 0
    }

    /// Returns whether A and B matter with this alpha, in its type.
    #[inline]
    fn reads_factors(&self, alpha: f64) -> bool {
        if self.doubles { alpha != 0.0 } else { alpha as f32 != 0.0 }
    }

    /// Returns the fault of a run, if any.
    #[inline]
    fn refuses(
        &self,
        operation: &'static str,
        arguments: &PlanArguments,
        workspace: Option<Workspace>,
    ) -> Option<Error> {
        let bytes = workspace.map_or(0, |workspace| workspace.bytes);
        let lacks_bias = self.has_bias && arguments.bias.is_none();
        (lacks_bias || self.misplaces(arguments) || bytes < self.workspace_bytes)
            .then(|| self.refusal(operation, arguments, bytes))
    }

    /// Describes the fault of a run.
    #[cold]
    fn refusal(&self, operation: &'static str, arguments: &PlanArguments, workspace_bytes: usize) -> Error {
        let invalid = |message: String| Error::new(ErrorKind::InvalidArgument, operation, message);
        let bias = if self.has_bias { arguments.bias } else { None };
        if self.has_bias && bias.is_none() {
            return invalid("the plan adds a bias and none was passed".to_owned())
                .with_hint("pass a bias of m elements");
        }
        let [of_factors, of_results] = self.alignments;
        let operands = [
            ("A", Some(arguments.a), of_factors),
            ("B", Some(arguments.b), of_factors),
            ("C", Some(arguments.c), of_results),
            ("D", Some(arguments.d), of_results),
            ("the bias", bias, of_results),
        ];
        for (what, ptr, alignment) in operands {
            if let Some(ptr) = ptr.filter(|ptr| !ptr.is_aligned_to(alignment)) {
                return invalid(format!("{what} is at {ptr}, expected a multiple of {alignment}"))
                    .with_hint("align the operand, or create the plan with a smaller `alignment`");
            }
        }
        let message = format!("the workspace has {workspace_bytes} bytes, expected at least {}", self.workspace_bytes);
        Error::new(ErrorKind::InvalidState, operation, message)
            .with_hint("call `set_workspace` with the bytes of the plan's options")
    }
}

/// The requested product, and the plans that compute it.
#[derive(Debug)]
struct Planned {
    options: PlanOptions,
    /// `None` for k = 0, which the library cannot describe.
    product: Option<Plan>,
    /// The plan for runs in which A and B do not matter. The first such run creates it.
    without_factors: Option<Plan>,
}

/// A handle of an Lt library.
pub(super) struct LtBlas<P: Platform> {
    state: Arc<DriverState<P>>,
    device: u32,
    /// The vendor's handle; null once it is destroyed.
    raw: RawLt,
    stream: Option<StreamId>,
    workspace: Option<Workspace>,
    /// The plans by their ascending numbers. A product without elements is `None`, because the library cannot describe it.
    plans: Vec<(u64, Option<Box<Planned>>)>,
    next_plan: u64,
    /// Counted until the handle is destroyed.
    count: Option<HandleCount<P>>,
}

impl<P: Platform> fmt::Debug for LtBlas<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LtBlas").field("device", &self.device).field("raw", &self.raw).finish_non_exhaustive()
    }
}

/// Returns the Lt library, which a device with the capability `lt_plans` has.
#[inline(always)]
fn library<'s, P: Platform>(operation: &'static str, state: &'s DriverState<P>) -> Result<&'s Lt> {
    state.platform().lt().ok_or_else(|| Error::lacks(operation, "lt_plans"))
}

impl<P: Platform> LtBlas<P> {
    /// Creates a handle. The device is current.
    pub(super) fn create(state: &Arc<DriverState<P>>, device: u32) -> Result<Self> {
        const OPERATION: &str = "create_blas_handle";
        let lt = library(OPERATION, state)?;
        if lt.codes.needs_free_bytes > 0 {
            let (mut free, mut total) = (0, 0);
            // SAFETY: The call writes two numbers, which outlive it.
            state.check(OPERATION, unsafe { (state.platform().calls().mem_get_info)(&mut free, &mut total) })?;
            if free < lt.codes.needs_free_bytes {
                let message = format!(
                    "the device has {free} bytes of free memory, expected at least {} for a handle: {} ends the process if it gets \
                     too few",
                    lt.codes.needs_free_bytes, lt.codes.name
                );
                return Err(Error::new(ErrorKind::OutOfMemory, OPERATION, message)
                    .with_hint("free memory of the device, or create the handle before the device is full"));
            }
        }
        let mut raw = RawLt::NULL;
        // SAFETY: The call writes one number, which outlives it.
        lt.codes.codes.check(OPERATION, unsafe { (lt.calls.create)(&mut raw) })?;
        Ok(Self {
            state: Arc::clone(state),
            device,
            raw,
            stream: None,
            workspace: None,
            plans: Vec::new(),
            next_plan: 1,
            count: Some(state.count_handle()),
        })
    }

    fn enter(&self, operation: &'static str) -> Result<()> {
        self.state.enter(operation)?;
        if self.raw == RawLt::NULL { Err(destroyed(operation)) } else { Ok(()) }
    }

    /// Returns the index of a plan in `plans`.
    #[inline]
    fn place_of(&self, plan: PlanId) -> Option<usize> {
        self.plans.binary_search_by_key(&plan.get(), |(id, _)| *id).ok()
    }

    fn close(&mut self) -> Result<()> {
        const OPERATION: &str = "destroy";
        self.enter(OPERATION)?;
        let outcome = {
            let _current = self.state.make_current(OPERATION, self.device)?;
            self.plans.clear();
            // SAFETY: The handle is alive, and is not used after this.
            library(OPERATION, &self.state)
                .and_then(|lt| lt.codes.codes.check(OPERATION, unsafe { (lt.calls.destroy)(self.raw) }))
        };
        self.raw = RawLt::NULL;
        self.count = None;
        outcome
    }

    fn layout(
        &self,
        operation: &'static str,
        data_type: i32,
        rows: usize,
        columns: usize,
        ld: usize,
        batch: Option<(usize, usize)>,
    ) -> Result<Owned<RawMatrixLayout>> {
        let Lt { calls, codes } = library(operation, &self.state)?;
        let mut raw = RawMatrixLayout::NULL;
        // The distance of columns, and of matrices, need not fit where there is one.
        let ld = match i64::try_from(ld) {
            Ok(ld) => ld,
            Err(_) if columns <= 1 => rows.max(1) as i64,
            Err(_) => return Err(too_large(operation, codes, ld)),
        };
        // SAFETY: The call writes one number, which outlives it.
        let code = unsafe { (calls.matrix_layout_create)(&mut raw, data_type, rows as u64, columns as u64, ld) };
        codes.codes.check(operation, code)?;
        let (destroy, set_attribute) = (calls.matrix_layout_destroy, calls.matrix_layout_set_attribute);
        let layout = Owned { raw, codes: codes.codes, destroy, set_attribute };
        if let Some((count, stride)) = batch {
            let count = i32::try_from(count).map_err(|_| too_large(operation, codes, count))?;
            let stride = match i64::try_from(stride) {
                Ok(stride) => stride,
                Err(_) if count <= 1 => 0,
                Err(_) => return Err(too_large(operation, codes, stride)),
            };
            layout.set(operation, codes.batch_count, &count)?;
            layout.set(operation, codes.batch_stride, &stride)?;
        }
        Ok(layout)
    }

    fn check_options(&self, operation: &'static str, options: &PlanOptions) -> Result<()> {
        let capabilities = self.state.capabilities(operation, self.device)?;
        capabilities.check_product(operation, &options.shape)?;
        if options.math_mode == MathMode::Tf32 && !capabilities.tf32 {
            return Err(Error::lacks(operation, "tf32"));
        }
        if options.atomics_mode == AtomicsMode::Allowed && !capabilities.atomics_mode {
            return Err(Error::lacks(operation, "atomics_mode"));
        }
        let element = options.shape.data_type.bytes().min(options.shape.output.bytes());
        if options.alignment < element || !options.alignment.is_power_of_two() {
            let message =
                format!("the alignment is {}, expected a power of two of at least {element}", options.alignment);
            return Err(Error::new(ErrorKind::InvalidArgument, operation, message)
                .with_hint("pass at least the bytes of an element"));
        }
        Ok(())
    }

    fn plan(&self, operation: &'static str, options: &PlanOptions) -> Result<Plan> {
        let Lt { calls, codes } = library(operation, &self.state)?;
        let quirks = self.state.platform().quirks();
        let shape = &options.shape;
        let doubles = shape.data_type == DataType::F64;
        let scales = quirks.type_code(if doubles { DataType::F64 } else { DataType::F32 });
        let (factor, result) = (quirks.type_code(shape.data_type), quirks.type_code(shape.output));
        let compute = match (shape.data_type, options.math_mode) {
            (DataType::F64, _) => quirks.compute_codes.f64,
            (DataType::F32, MathMode::Tf32) => quirks.compute_codes.tf32,
            _ => quirks.compute_codes.f32,
        };
        let mut raw = RawMatmulDesc::NULL;
        // SAFETY: The call writes one number, which outlives it.
        codes.codes.check(operation, unsafe { (calls.matmul_desc_create)(&mut raw, compute, scales) })?;
        let (destroy, set_attribute) = (calls.matmul_desc_destroy, calls.matmul_desc_set_attribute);
        let product = Owned { raw, codes: codes.codes, destroy, set_attribute };
        for (which, transpose) in
            [(codes.product.transpose_a, shape.transpose_a), (codes.product.transpose_b, shape.transpose_b)]
        {
            product.set(operation, which, &quirks.transpose_code(transpose))?;
        }
        product.set(operation, codes.product.epilogue, &epilogue_code(operation, codes, options.epilogue)?)?;
        if options.epilogue.has_bias() {
            product.set(operation, codes.product.bias_type, &result)?;
        }
        let batch =
            |stride: fn(&highwater_hal::StridedBatch) -> usize| shape.batch.map(|batch| (batch.count, stride(&batch)));
        let a = self.layout(
            operation,
            factor,
            shape.rows_a(),
            shape.columns_a(),
            shape.lda,
            batch(|batch| batch.stride_a),
        )?;
        let b = self.layout(
            operation,
            factor,
            shape.rows_b(),
            shape.columns_b(),
            shape.ldb,
            batch(|batch| batch.stride_b),
        )?;
        let c = self.layout(operation, result, shape.m, shape.n, shape.ldc, batch(|batch| batch.stride_c))?;
        let mut raw = RawMatmulPreference::NULL;
        // SAFETY: As above.
        codes.codes.check(operation, unsafe { (calls.matmul_preference_create)(&mut raw) })?;
        let (destroy, set_attribute) = (calls.matmul_preference_destroy, calls.matmul_preference_set_attribute);
        let preference = Owned { raw, codes: codes.codes, destroy, set_attribute };
        // Without the capability, no handle of the device gets a workspace.
        let takes_workspace = self.state.capabilities(operation, self.device)?.blas_workspace;
        let workspace_bytes = if takes_workspace { options.workspace_bytes as u64 } else { 0 };
        preference.set(operation, codes.max_workspace, &workspace_bytes)?;
        let alignments = [shape.data_type, shape.output].map(|of| options.alignment.max(of.bytes()));
        // The heuristic distinguishes alignments up to 256.
        let [of_factors, of_results] = alignments.map(|bytes| u32::try_from(bytes.min(256)).unwrap_or(256));
        let values = [of_factors, of_factors, of_results, of_results];
        for (which, alignment) in codes.alignments.into_iter().flatten().zip(values) {
            preference.set(operation, which, &alignment)?;
        }
        if let Some(ways) = codes.reductions {
            // The other schemes add partial sums in the result's type, which costs types of 16 bits most of their digits.
            let may_reorder =
                options.atomics_mode == AtomicsMode::Allowed && matches!(shape.output, DataType::F32 | DataType::F64);
            let allowed = ways.in_order | if may_reorder { ways.in_place } else { 0 };
            preference.set(operation, ways.attribute, &allowed)?;
        }
        let (mut result, mut found) = ([0_u64; RESULT_WORDS], 0);
        // SAFETY: All objects are alive. The call writes one result and one number, which outlive it.
        let code = unsafe {
            (calls.matmul_algo_get_heuristic)(
                self.raw,
                product.raw,
                a.raw,
                b.raw,
                c.raw,
                c.raw,
                preference.raw,
                1,
                result.as_mut_ptr().cast(),
                &mut found,
            )
        };
        codes.codes.check(operation, code)?;
        if found < 1 {
            let GemmShape { data_type, output, m, n, k, .. } = options.shape;
            let message = format!(
                "{} has no kernel for m {m}, n {n}, k {k}, factors {data_type:?}, output {output:?}, epilogue {:?}, an alignment of \
                 {} bytes and a workspace of {} bytes",
                codes.name, options.epilogue, options.alignment, options.workspace_bytes
            );
            return Err(Error::new(ErrorKind::Unsupported, operation, message)
                .with_hint("set a larger workspace (`RuntimeOptions::with_lt_workspace_bytes`), align the operands to 16 bytes, or multiply \
                     without a plan and apply the epilogue in a kernel"));
        }
        // The algorithm, the bytes of workspace, the status, and fields that are not needed.
        let words = codes.algorithm_bytes / 8;
        codes.codes.check(operation, result[words + 1] as u32 as i32)?;
        let mut algorithm = Algorithm::default();
        algorithm[..words].copy_from_slice(&result[..words]);
        let workspace_bytes = result[words] as usize;
        Ok(Plan {
            product,
            a,
            b,
            c,
            algorithm,
            workspace_bytes,
            alignments,
            doubles,
            has_bias: options.epilogue.has_bias(),
            bias: None,
        })
    }

    /// Creates a plan for `epilogue(beta * C)`. A column of zeros times a row of zeros, from one block, replaces A and
    /// B.
    fn plan_without_factors(&self, operation: &'static str, options: &PlanOptions) -> Result<Plan> {
        let mut options = *options;
        let shape = &mut options.shape;
        (shape.transpose_a, shape.transpose_b) = (Transpose::No, Transpose::No);
        (shape.k, shape.lda, shape.ldb) = (1, shape.m, 1);
        if let Some(batch) = &mut shape.batch {
            (batch.stride_a, batch.stride_b) = (0, 0);
        }
        // Another algorithm may need more workspace than the first plan. A sum of one term needs none.
        options.workspace_bytes = 0;
        self.plan(operation, &options)
    }

    /// Runs a plan with alpha = 0 or k = 0. Some algorithms then omit the epilogue or refuse the product.
    /// With any other alpha, A and B would affect D.
    ///
    /// # Safety
    /// The same as for [`BlasHandle::run_plan`].
    #[cold]
    #[inline(never)]
    unsafe fn run_without_factors(
        &mut self,
        operation: &'static str,
        index: usize,
        arguments: &PlanArguments,
    ) -> Result<()> {
        let Some((_, Some(planned))) = self.plans.get(index) else { return Ok(()) };
        let options = planned.options;
        let shape = &options.shape;
        let state = Arc::clone(&self.state);
        let zeros = {
            let _relaxed = state.relaxed();
            let _current = state.make_current(operation, self.device)?;
            let bytes = shape.m.max(shape.n).saturating_mul(shape.data_type.bytes());
            let zeros = state.platform().zeros(self.device).ok_or_else(|| Error::lacks(operation, "lt_plans"))?;
            let (calls, flags) = (state.platform().calls(), state.platform().quirks().stream_flags);
            zeros.find(calls, flags, bytes).or_else(|code| state.check(operation, code).map(|()| DevicePtr::new(0)))?
        };
        let made = match &planned.without_factors {
            None => {
                let _current = state.make_current(operation, self.device)?;
                Some(self.plan_without_factors(operation, &options)?)
            }
            Some(_) => None,
        };
        let Some((_, Some(planned))) = self.plans.get_mut(index) else { return Ok(()) };
        let plan = match made {
            Some(made) => planned.without_factors.insert(made),
            None => match &mut planned.without_factors {
                Some(plan) => plan,
                None => return Ok(()),
            },
        };
        if let Some(refusal) = plan.refuses(operation, arguments, self.workspace) {
            return Err(refusal);
        }
        let mut arguments = *arguments;
        (arguments.a, arguments.b) = (zeros, zeros);
        // -0 is added to beta * C, which keeps the sign of a zero.
        arguments.alpha = if arguments.beta == 0.0 { 1.0 } else { -1.0 };
        let call = Call { state: &state, handle: self.raw, stream: self.stream, workspace: self.workspace };
        // SAFETY: As the caller promises. The zeros are never freed.
        unsafe { call.run(operation, self.device, plan, &arguments) }
    }
}

/// The state that a run takes from its handle.
struct Call<'h, P: Platform> {
    state: &'h DriverState<P>,
    handle: RawLt,
    stream: Option<StreamId>,
    workspace: Option<Workspace>,
}

impl<P: Platform> Call<'_, P> {
    /// Enqueues a run that passed all checks.
    ///
    /// # Safety
    /// The same as for [`BlasHandle::run_plan`].
    #[inline(always)]
    unsafe fn run(
        self,
        operation: &'static str,
        device: u32,
        plan: &mut Plan,
        arguments: &PlanArguments,
    ) -> Result<()> {
        let Self { state, handle, stream, workspace } = self;
        let Some(stream) = stream else { return Err(no_stream(operation)) };
        let (bound, bytes) = workspace.map_or((DevicePtr::new(0), 0), |workspace| (workspace.ptr, workspace.bytes));
        let Lt { calls, codes } = library(operation, state)?;
        let held = state.stream(operation, stream)?;
        let _current = state.make_current(operation, device)?;
        let bias = if plan.has_bias { arguments.bias } else { None };
        if let Some(bias) = bias.filter(|bias| plan.bias != Some(*bias)) {
            plan.product.set(operation, codes.product.bias, &bias.get())?;
            plan.bias = Some(bias);
        }
        let factors = Factors::new(arguments.alpha, arguments.beta);
        let [alpha, beta] = factors.places(if plan.doubles { DataType::F64 } else { DataType::F32 });
        // SAFETY: The handle, the stream and the plan are alive. The caller promises that the matrices and the
        // workspace are valid. The call reads the factors before it returns.
        let code = unsafe {
            (calls.matmul)(
                handle,
                plan.product.raw,
                alpha,
                arguments.a,
                plan.a.raw,
                arguments.b,
                plan.b.raw,
                beta,
                arguments.c,
                plan.c.raw,
                arguments.d,
                plan.c.raw,
                plan.algorithm.as_ptr().cast(),
                bound,
                bytes,
                held.raw(),
            )
        };
        if code == 0 { Ok(()) } else { Err(state.blas_error(operation, codes.codes, device, code)) }
    }
}

fn too_large(operation: &'static str, codes: &LtCodes, value: usize) -> Error {
    let message = format!("the size {value} is beyond the range of {}", codes.name);
    Error::new(ErrorKind::InvalidArgument, operation, message)
}

fn epilogue_code(operation: &'static str, codes: &LtCodes, epilogue: Epilogue) -> Result<u32> {
    let numbers = &codes.epilogues;
    Ok(match epilogue {
        Epilogue::None => numbers.none,
        Epilogue::Bias => numbers.bias,
        Epilogue::Relu => numbers.relu,
        Epilogue::BiasRelu => numbers.bias_relu,
        Epilogue::Gelu => numbers.gelu,
        Epilogue::BiasGelu => numbers.bias_gelu,
        other => {
            let message = format!("{} has no epilogue {other:?}", codes.name);
            return Err(Error::new(ErrorKind::Unsupported, operation, message));
        }
    })
}

impl<P: Platform> Drop for LtBlas<P> {
    fn drop(&mut self) {
        if self.raw == RawLt::NULL {
            return;
        }
        if !self.state.is_in_service() {
            // Leaked on purpose: at exit and in a forked child, the vendor is not called, not even for objects of the
            // host.
            std::mem::forget((self.count.take(), std::mem::take(&mut self.plans)));
            return;
        }
        if let Err(error) = self.close() {
            tracing::warn!("an Lt handle was leaked: {error}");
        }
    }
}

impl<P: Platform> BlasHandle for LtBlas<P> {
    fn kind(&self) -> BlasKind {
        BlasKind::Lt
    }

    fn device(&self) -> u32 {
        self.device
    }

    fn set_stream(&mut self, stream: StreamId) -> Result<()> {
        const OPERATION: &str = "set_stream";
        self.enter(OPERATION)?;
        self.state.stream_for_handle(OPERATION, stream, self.device)?;
        self.stream = Some(stream);
        // On some vendors, binding a stream resets the workspace of every handle.
        if self.state.platform().quirks().set_stream_resets_workspace {
            self.workspace = None;
        }
        Ok(())
    }

    unsafe fn set_workspace(&mut self, workspace: Option<Workspace>) -> Result<()> {
        const OPERATION: &str = "set_workspace";
        self.enter(OPERATION)?;
        if let Some(wanted) = workspace {
            check_workspace(OPERATION, self.state.capabilities(OPERATION, self.device)?, wanted)?;
        }
        self.workspace = workspace;
        Ok(())
    }

    fn set_math_mode(&mut self, mode: MathMode) -> Result<()> {
        const OPERATION: &str = "set_math_mode";
        self.enter(OPERATION)?;
        if mode == MathMode::Tf32 {
            self.state.require(OPERATION, self.device, |can| can.tf32, "tf32")?;
        }
        // Each plan has its own math mode.
        Ok(())
    }

    fn set_atomics_mode(&mut self, mode: AtomicsMode) -> Result<()> {
        const OPERATION: &str = "set_atomics_mode";
        self.enter(OPERATION)?;
        if mode == AtomicsMode::Allowed {
            self.state.require(OPERATION, self.device, |can| can.atomics_mode, "atomics_mode")?;
        }
        // Each plan has its own atomics mode.
        Ok(())
    }

    unsafe fn gemm(&mut self, _gemm: &Gemm) -> Result<()> {
        self.enter("gemm")?;
        Err(Error::new(ErrorKind::Unsupported, "gemm", "an Lt handle computes products only by plans")
            .with_hint("call `create_plan` and `run_plan`, or use a handle of kind `Blas`"))
    }

    fn create_plan(&mut self, options: &PlanOptions) -> Result<PlanId> {
        const OPERATION: &str = "create_plan";
        self.enter(OPERATION)?;
        options.shape.extents(OPERATION)?;
        self.check_options(OPERATION, options)?;
        let plan = if options.shape.is_empty() {
            None
        } else {
            let _current = self.state.make_current(OPERATION, self.device)?;
            let (product, without_factors) = match options.shape.k {
                0 => (None, Some(self.plan_without_factors(OPERATION, options)?)),
                _ => (Some(self.plan(OPERATION, options)?), None),
            };
            Some(Box::new(Planned { options: *options, product, without_factors }))
        };
        let id = self.next_plan;
        self.next_plan += 1;
        self.plans.push((id, plan));
        Ok(PlanId::new(id))
    }

    unsafe fn run_plan(&mut self, plan: PlanId, arguments: &PlanArguments) -> Result<()> {
        const OPERATION: &str = "run_plan";
        self.enter(OPERATION)?;
        let Some(index) = self.place_of(plan) else { return Err(no_plan(OPERATION, plan)) };
        let Some(planned) = &mut self.plans[index].1 else { return Ok(()) };
        let plan = match &mut planned.product {
            Some(plan) if plan.reads_factors(arguments.alpha) => plan,
            // SAFETY: As the caller promises.
            _ => return unsafe { self.run_without_factors(OPERATION, index, arguments) },
        };
        if let Some(refusal) = plan.refuses(OPERATION, arguments, self.workspace) {
            return Err(refusal);
        }
        let call = Call { state: &self.state, handle: self.raw, stream: self.stream, workspace: self.workspace };
        // SAFETY: As the caller promises.
        unsafe { call.run(OPERATION, self.device, plan, arguments) }
    }

    fn destroy_plan(&mut self, plan: PlanId) -> Result<()> {
        const OPERATION: &str = "destroy_plan";
        self.enter(OPERATION)?;
        let index = self.place_of(plan).ok_or_else(|| no_plan(OPERATION, plan))?;
        self.plans.remove(index);
        Ok(())
    }

    fn raw(&self) -> u64 {
        self.raw.0
    }

    fn reset(&mut self) -> Result<()> {
        self.enter("reset")?;
        // The handle has no settings. Its logger and cache belong to the process.
        (self.stream, self.workspace) = (None, None);
        Ok(())
    }

    fn destroy(&mut self) -> Result<()> {
        self.close()
    }
}

#[cold]
fn no_plan(operation: &'static str, plan: PlanId) -> Error {
    Error::new(ErrorKind::InvalidHandle, operation, format!("{plan:?} is not a live plan of this handle"))
        .with_hint("create the plan on this handle")
}
