//! Plans over cuBLASLt: products whose kernel is chosen once, with their epilogues.

use std::fmt;
use std::sync::Arc;

use cudarc::cublaslt::sys;
use highwater_driver::{
    DriverState, HandleCount, RawStream, check_workspace, destroyed, no_stream, raw_handles, vendor_calls,
};
use highwater_hal::{
    AtomicsMode, BlasHandle, BlasKind, DataType, DevicePtr, Epilogue, Error, ErrorKind, Gemm, MathMode, PlanArguments,
    PlanId, PlanOptions, Result, StreamId, Transpose, Workspace,
};

use crate::codes::CUBLAS;
use crate::platform::Cuda;
use crate::quirks::QUIRKS;

raw_handles! {
    /// A handle: `cublasLtHandle_t`.
    pub(crate) RawLt;
    /// The description of a product: `cublasLtMatmulDesc_t`.
    pub(crate) RawMatmulDesc;
    /// The layout of a matrix: `cublasLtMatrixLayout_t`.
    pub(crate) RawMatrixLayout;
    /// A preference of the heuristic: `cublasLtMatmulPreference_t`.
    pub(crate) RawMatmulPreference;
}

/// An algorithm in cuBLASLt's own format.
type Algorithm = [u64; 8];

/// A result of the heuristic, in the vendor's layout with a number instead of the enum.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct HeuristicResult {
    algorithm: Algorithm,
    workspace_bytes: usize,
    state: i32,
    waves: f32,
    reserved: [i32; 4],
}

const _: () = {
    assert!(size_of::<HeuristicResult>() == size_of::<sys::cublasLtMatmulHeuristicResult_t>());
    assert!(
        std::mem::offset_of!(HeuristicResult, workspace_bytes)
            == std::mem::offset_of!(sys::cublasLtMatmulHeuristicResult_t, workspaceSize)
    );
    assert!(
        std::mem::offset_of!(HeuristicResult, state)
            == std::mem::offset_of!(sys::cublasLtMatmulHeuristicResult_t, state)
    );
};

vendor_calls! {
    /// cuBLASLt's calls.
    pub(crate) struct LtCalls {
        required {
            /// Creates a handle.
            create: "Create" (*mut RawLt);
            /// Destroys a handle.
            destroy: "Destroy" (RawLt);
            /// Creates a description of a product: out, compute type, type of alpha and beta.
            matmul_desc_create: "MatmulDescCreate" (*mut RawMatmulDesc, i32, i32);
            /// Destroys a description.
            matmul_desc_destroy: "MatmulDescDestroy" (RawMatmulDesc);
            /// Sets an attribute of a description: description, attribute, value, its bytes.
            matmul_desc_set_attribute: "MatmulDescSetAttribute" (RawMatmulDesc, u32, *const u8, usize);
            /// Creates a layout: out, type, rows, columns, leading dimension.
            matrix_layout_create: "MatrixLayoutCreate" (*mut RawMatrixLayout, i32, u64, u64, i64);
            /// Destroys a layout.
            matrix_layout_destroy: "MatrixLayoutDestroy" (RawMatrixLayout);
            /// Sets an attribute of a layout: layout, attribute, value, its bytes.
            matrix_layout_set_attribute: "MatrixLayoutSetAttribute" (RawMatrixLayout, u32, *const u8, usize);
            /// Creates a matmul preference.
            matmul_preference_create: "MatmulPreferenceCreate" (*mut RawMatmulPreference);
            /// Destroys a matmul preference.
            matmul_preference_destroy: "MatmulPreferenceDestroy" (RawMatmulPreference);
            /// Sets an attribute of a preference: preference, attribute, value, its bytes.
            matmul_preference_set_attribute: "MatmulPreferenceSetAttribute" (RawMatmulPreference, u32, *const u8, usize);
            /// Returns algorithms: handle, description, layouts of A, B, C and D, preference, limit, out, out number.
            matmul_algo_get_heuristic: "MatmulAlgoGetHeuristic" (
                RawLt,
                RawMatmulDesc,
                RawMatrixLayout,
                RawMatrixLayout,
                RawMatrixLayout,
                RawMatrixLayout,
                RawMatmulPreference,
                i32,
                *mut HeuristicResult,
                *mut i32,
            );
            /// Multiplies: handle, description, alpha, A, its layout, B, its layout, beta, C, its layout, D, its layout, algorithm,
            /// workspace, its bytes, stream.
            matmul: "Matmul" (
                RawLt,
                RawMatmulDesc,
                *const u8,
                DevicePtr,
                RawMatrixLayout,
                DevicePtr,
                RawMatrixLayout,
                *const u8,
                DevicePtr,
                RawMatrixLayout,
                DevicePtr,
                RawMatrixLayout,
                *const Algorithm,
                DevicePtr,
                usize,
                RawStream,
            );
        }
        optional {}
    }
}

/// A description, a layout or a preference of cuBLASLt, destroyed when dropped. These objects exist on the host only.
#[derive(Debug)]
struct Owned<R: Copy> {
    raw: R,
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
        CUBLAS.check(operation, unsafe {
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
                return invalid(format!("{what} is at {ptr:?}, expected a multiple of {alignment}"))
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
    /// `None` for k = 0, which cuBLASLt cannot describe.
    product: Option<Plan>,
    /// The plan for runs in which A and B do not matter. The first such run creates it.
    without_factors: Option<Plan>,
}

/// A handle of cuBLASLt.
pub(crate) struct LtBlas {
    state: Arc<DriverState<Cuda>>,
    device: u32,
    /// The vendor's handle; null once it is destroyed.
    raw: RawLt,
    stream: Option<StreamId>,
    workspace: Option<Workspace>,
    /// The plans by their ascending numbers. A product without elements is `None`, because cuBLASLt cannot describe it.
    plans: Vec<(u64, Option<Box<Planned>>)>,
    next_plan: u64,
    /// Counted until the handle is destroyed.
    count: Option<HandleCount<Cuda>>,
}

impl fmt::Debug for LtBlas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LtBlas").field("device", &self.device).field("raw", &self.raw).finish_non_exhaustive()
    }
}

impl LtBlas {
    /// Creates a handle. The device is current.
    pub(crate) fn create(state: &Arc<DriverState<Cuda>>, device: u32) -> Result<Self> {
        let mut raw = RawLt::NULL;
        // SAFETY: The call writes one number, which outlives it.
        CUBLAS.check("create_blas_handle", unsafe { (state.platform().lt.create)(&mut raw) })?;
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
            CUBLAS.check(OPERATION, unsafe { (self.state.platform().lt.destroy)(self.raw) })
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
        let table = &self.state.platform().lt;
        let mut raw = RawMatrixLayout::NULL;
        // The distance of columns, and of matrices, need not fit where there is one.
        let ld = match i64::try_from(ld) {
            Ok(ld) => ld,
            Err(_) if columns <= 1 => rows.max(1) as i64,
            Err(_) => return Err(too_large(operation, ld)),
        };
        // SAFETY: The call writes one number, which outlives it.
        let code = unsafe { (table.matrix_layout_create)(&mut raw, data_type, rows as u64, columns as u64, ld) };
        CUBLAS.check(operation, code)?;
        let layout =
            Owned { raw, destroy: table.matrix_layout_destroy, set_attribute: table.matrix_layout_set_attribute };
        if let Some((count, stride)) = batch {
            use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
            let count = i32::try_from(count).map_err(|_| too_large(operation, count))?;
            let stride = match i64::try_from(stride) {
                Ok(stride) => stride,
                Err(_) if count <= 1 => 0,
                Err(_) => return Err(too_large(operation, stride)),
            };
            layout.set(operation, Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT as u32, &count)?;
            layout.set(operation, Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET as u32, &stride)?;
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
        use sys::cublasLtMatmulDescAttributes_t as Product;
        use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
        let table = &self.state.platform().lt;
        let shape = &options.shape;
        let doubles = shape.data_type == DataType::F64;
        let scales = QUIRKS.type_code(if doubles { DataType::F64 } else { DataType::F32 });
        let (factor, result) = (QUIRKS.type_code(shape.data_type), QUIRKS.type_code(shape.output));
        let compute = match (shape.data_type, options.math_mode) {
            (DataType::F64, _) => QUIRKS.compute_codes.f64,
            (DataType::F32, MathMode::Tf32) => QUIRKS.compute_codes.tf32,
            _ => QUIRKS.compute_codes.f32,
        };
        let mut raw = RawMatmulDesc::NULL;
        // SAFETY: The call writes one number, which outlives it.
        CUBLAS.check(operation, unsafe { (table.matmul_desc_create)(&mut raw, compute, scales) })?;
        let product = Owned { raw, destroy: table.matmul_desc_destroy, set_attribute: table.matmul_desc_set_attribute };
        for (which, transpose) in [
            (Product::CUBLASLT_MATMUL_DESC_TRANSA, shape.transpose_a),
            (Product::CUBLASLT_MATMUL_DESC_TRANSB, shape.transpose_b),
        ] {
            product.set(operation, which as u32, &QUIRKS.transpose_code(transpose))?;
        }
        let epilogue = epilogue_code(operation, options.epilogue)?;
        product.set(operation, Product::CUBLASLT_MATMUL_DESC_EPILOGUE as u32, &epilogue)?;
        if options.epilogue.has_bias() {
            product.set(operation, Product::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE as u32, &result)?;
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
        CUBLAS.check(operation, unsafe { (table.matmul_preference_create)(&mut raw) })?;
        let preference = Owned {
            raw,
            destroy: table.matmul_preference_destroy,
            set_attribute: table.matmul_preference_set_attribute,
        };
        let set = |which: Preference, value: u64| preference.set(operation, which as u32, &value);
        let set_small = |which: Preference, value: u32| preference.set(operation, which as u32, &value);
        set(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, options.workspace_bytes as u64)?;
        let alignments = [shape.data_type, shape.output].map(|of| options.alignment.max(of.bytes()));
        // The heuristic distinguishes alignments up to 256.
        let [of_factors, of_results] = alignments.map(|bytes| u32::try_from(bytes.min(256)).unwrap_or(256));
        for (which, alignment) in [
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, of_factors),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, of_factors),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, of_results),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, of_results),
        ] {
            set_small(which, alignment)?;
        }
        use sys::cublasLtReductionScheme_t as Scheme;
        // Partial sums are added in the workspace, in the compute type and in a fixed order. The other schemes add them
        // in the result's type, which costs halves most of their digits, or in place, in the order of the kernels.
        let mut schemes = Scheme::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        if options.atomics_mode == AtomicsMode::Allowed && matches!(shape.output, DataType::F32 | DataType::F64) {
            schemes |= Scheme::CUBLASLT_REDUCTION_SCHEME_INPLACE as u32;
        }
        set_small(Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, schemes)?;
        let (mut result, mut found) = (HeuristicResult::default(), 0);
        // SAFETY: All objects are alive. The call writes one result and one number, which outlive it.
        let code = unsafe {
            (table.matmul_algo_get_heuristic)(
                self.raw,
                product.raw,
                a.raw,
                b.raw,
                c.raw,
                c.raw,
                preference.raw,
                1,
                &mut result,
                &mut found,
            )
        };
        CUBLAS.check(operation, code)?;
        if found < 1 {
            return Err(Error::new(
                ErrorKind::Unsupported,
                operation,
                format!("cuBLASLt has no kernel for {options:?}"),
            )
            .with_hint("pass more workspace or a larger alignment, or use a BLAS handle"));
        }
        CUBLAS.check(operation, result.state)?;
        Ok(Plan {
            product,
            a,
            b,
            c,
            algorithm: result.algorithm,
            workspace_bytes: result.workspace_bytes,
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

    /// Runs a plan with alpha = 0 or k = 0. Some algorithms of cuBLASLt then omit the epilogue or refuse the product.
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
            state
                .platform()
                .driver
                .zeros(self.device, bytes)
                .or_else(|code| state.check(operation, code).map(|()| DevicePtr::new(0)))?
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
#[derive(Debug, Clone, Copy)]
struct Call<'h> {
    state: &'h DriverState<Cuda>,
    handle: RawLt,
    stream: Option<StreamId>,
    workspace: Option<Workspace>,
}

impl Call<'_> {
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
        let lt = &state.platform().lt;
        let held = state.stream(operation, stream)?;
        let _current = state.make_current(operation, device)?;
        let bias = if plan.has_bias { arguments.bias } else { None };
        if let Some(bias) = bias.filter(|bias| plan.bias != Some(*bias)) {
            let which = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER as u32;
            plan.product.set(operation, which, &bias.get())?;
            plan.bias = Some(bias);
        }
        let (doubles, floats) = ([arguments.alpha, arguments.beta], [arguments.alpha as f32, arguments.beta as f32]);
        let [alpha, beta]: [*const u8; 2] = if plan.doubles {
            [(&raw const doubles[0]).cast(), (&raw const doubles[1]).cast()]
        } else {
            [(&raw const floats[0]).cast(), (&raw const floats[1]).cast()]
        };
        // SAFETY: The handle, the stream and the plan are alive. The caller promises that the matrices and the
        // workspace are valid. The call reads the factors before it returns.
        let code = unsafe {
            (lt.matmul)(
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
                &plan.algorithm,
                bound,
                bytes,
                held.raw(),
            )
        };
        if code == 0 { Ok(()) } else { Err(state.blas_error(operation, &CUBLAS, device, code)) }
    }
}

fn too_large(operation: &'static str, value: usize) -> Error {
    Error::new(ErrorKind::InvalidArgument, operation, format!("the size {value} is beyond the range of cuBLASLt"))
}

fn epilogue_code(operation: &'static str, epilogue: Epilogue) -> Result<u32> {
    use sys::cublasLtEpilogue_t as Code;
    Ok(match epilogue {
        Epilogue::None => Code::CUBLASLT_EPILOGUE_DEFAULT,
        Epilogue::Bias => Code::CUBLASLT_EPILOGUE_BIAS,
        Epilogue::Relu => Code::CUBLASLT_EPILOGUE_RELU,
        Epilogue::BiasRelu => Code::CUBLASLT_EPILOGUE_RELU_BIAS,
        Epilogue::Gelu => Code::CUBLASLT_EPILOGUE_GELU,
        Epilogue::BiasGelu => Code::CUBLASLT_EPILOGUE_GELU_BIAS,
        other => {
            return Err(Error::new(ErrorKind::Unsupported, operation, format!("cuBLASLt has no epilogue {other:?}")));
        }
    } as u32)
}

impl Drop for LtBlas {
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

impl BlasHandle for LtBlas {
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
        // Binding a stream resets the workspace, as for every handle of the device.
        self.workspace = None;
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
        // A cuBLASLt handle has no settings. Its logger and cache belong to the process.
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
