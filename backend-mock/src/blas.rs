//! BLAS and Lt handles: binding and checks.
//!
//! Pools bind before every call, so binding is cheap. A handle remembers the stream and the workspace that passed the
//! checks, with the epoch of the table that holds them. They stay valid until the epoch moves.

use std::collections::HashMap;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use highwater_hal::{
    AtomicsMode, BlasHandle, BlasKind, Epilogue, Error, ErrorKind, Gemm, GemmShape, MathMode, PlanArguments, PlanId,
    PlanOptions, Result, StreamId, Workspace,
};

use crate::arena::Owner;
use crate::calls::Tally;
use crate::device::Device;
use crate::kernel::OwnWorkspace;
use crate::operation::Operation;
use crate::product::{RawProduct, Scale, Scratch};
use crate::raw_handles::RawHandle;
use crate::state::{Shared, wrong_device};
use crate::stream::Stream;
use highwater_hal::exit;

/// The bytes of the workspace that every handle owns.
const OWN_WORKSPACE_BYTES: usize = 64 * 1024;

/// A handle. In a forked child and at exit, its destructor leaves the context alone.
pub(crate) struct MockBlas(ManuallyDrop<Context>);

struct Context {
    kind: BlasKind,
    device: u32,
    /// The raw handle.
    number: u64,
    /// Keeps the raw handle until the handle is destroyed.
    raw: Option<RawHandle>,
    tally: Arc<Tally>,
    /// `None` once the handle was destroyed.
    own: Option<Arc<OwnWorkspace>>,
    stream: Option<BoundStream>,
    /// `None` is the handle's own.
    workspace: Option<Workspace>,
    /// The last workspace that was found inside a live block, and the epoch of the device's blocks at that time.
    known_workspace: Option<(Workspace, u64)>,
    math_mode: MathMode,
    atomics_mode: AtomicsMode,
    /// True if the device reads alpha and beta. Only foreign code sets this.
    scales_on_device: Arc<AtomicBool>,
    plans: HashMap<PlanId, PlanOptions>,
    /// The last field, because the fields above refer to it.
    gpu: Arc<Shared>,
}

struct BoundStream {
    id: StreamId,
    /// The epoch of the streams when the id last passed the check.
    epoch: u64,
    /// Fetched with the first product.
    stream: Option<Arc<Stream>>,
}

impl MockBlas {
    pub(crate) fn new(gpu: &Arc<Shared>, device: u32, kind: BlasKind) -> Result<Self> {
        let operation = Operation::CreateBlasHandle;
        let owner = Arc::clone(gpu.device(operation, device)?);
        let ptr = owner.allocate(operation, OWN_WORKSPACE_BYTES, Owner::Mock, None)?;
        let own = OwnWorkspace { device: owner, ptr, bytes: OWN_WORKSPACE_BYTES };
        gpu.handles.fetch_add(1, Ordering::Relaxed);
        let raw = gpu.engine.raw_handles.take();
        let number = raw.number;
        let scales_on_device = Arc::default();
        gpu.raw_handles.lock().insert(number, Arc::clone(&scales_on_device));
        Ok(Self(ManuallyDrop::new(Context {
            kind,
            device,
            number,
            raw: Some(raw),
            tally: gpu.calls.open_tally(),
            own: Some(Arc::new(own)),
            stream: None,
            workspace: None,
            known_workspace: None,
            math_mode: MathMode::default(),
            atomics_mode: AtomicsMode::default(),
            scales_on_device,
            plans: HashMap::new(),
            gpu: Arc::clone(gpu),
        })))
    }
}

impl Drop for MockBlas {
    fn drop(&mut self) {
        if !self.0.gpu.calls.is_own_process() || exit::has_begun() {
            return;
        }
        self.0.close();
        self.0.gpu.calls.close_tally(&self.0.tally);
        // SAFETY: this is the destructor, and nothing touches the context after it.
        unsafe { ManuallyDrop::drop(&mut self.0) };
    }
}

impl fmt::Debug for MockBlas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MockBlas")
            .field("kind", &self.0.kind)
            .field("device", &self.0.device)
            .field("number", &self.0.number)
            .field("stream", &self.0.stream.as_ref().map(|bound| bound.id))
            .field("workspace", &self.0.workspace)
            .finish_non_exhaustive()
    }
}

impl Context {
    /// Enters an operation, and checks that the handle was not destroyed.
    #[inline]
    fn enter(&self, operation: Operation) -> Result<()> {
        self.gpu.calls.enter_handle(&self.tally, operation)?;
        if self.own.is_none() { Err(destroyed(operation)) } else { Ok(()) }
    }

    fn enter_as(&self, operation: Operation, kind: BlasKind) -> Result<()> {
        self.enter(operation)?;
        if self.kind == kind {
            return Ok(());
        }
        Err(operation.error(
            ErrorKind::Unsupported,
            format!("a handle of kind {:?} cannot do this, it takes one of kind {kind:?}", self.kind),
        ))
    }

    fn device(&self) -> &Device {
        &self.gpu.engine.devices[self.device as usize]
    }

    /// Ends the handle. Enqueued products keep what they need.
    fn close(&mut self) {
        if self.own.take().is_some() {
            self.stream = None;
            self.plans.clear();
            self.gpu.raw_handles.lock().remove(&self.number);
            self.raw = None;
            self.gpu.handles.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn check_type(&self, operation: Operation, shape: &GemmShape) -> Result<()> {
        self.gpu.capabilities.check_product(operation.name(), shape)
    }

    fn check_math_mode(&self, operation: Operation, mode: MathMode) -> Result<()> {
        match mode {
            MathMode::Default => Ok(()),
            MathMode::Tf32 if self.gpu.capabilities.tf32 => Ok(()),
            MathMode::Tf32 => Err(operation.lacks("tf32")),
            other => {
                Err(operation
                    .error(ErrorKind::Unsupported, format!("the mock does not support the precision {other:?}")))
            }
        }
    }

    fn check_atomics_mode(&self, operation: Operation, mode: AtomicsMode) -> Result<()> {
        if mode != AtomicsMode::NotAllowed && !self.gpu.capabilities.atomics_mode {
            return Err(operation.lacks("atomics_mode"));
        }
        Ok(())
    }

    /// Returns the bound stream, which must still exist.
    fn bound_stream(&mut self, operation: Operation) -> Result<Arc<Stream>> {
        let gpu = &self.gpu;
        let Some(bound) = &mut self.stream else { return Err(unbound(operation)) };
        // Another thread may use the handle next, and has another stream.
        if bound.id.is_per_thread_default() {
            return gpu.stream(operation, bound.id);
        }
        // Relaxed: see `destroy_stream`.
        let epoch = gpu.streams_epoch.load(Ordering::Relaxed);
        match &bound.stream {
            Some(stream) if bound.epoch == epoch => Ok(Arc::clone(stream)),
            _ => {
                let stream = gpu.stream(operation, bound.id)?;
                bound.stream = Some(Arc::clone(&stream));
                bound.epoch = epoch;
                Ok(stream)
            }
        }
    }

    fn enqueue(&mut self, operation: Operation, product: &RawProduct, workspace_limit: usize) -> Result<()> {
        product.shape.extents(operation.name())?;
        if product.shape.is_empty() {
            return Ok(());
        }
        let stream = self.bound_stream(operation)?;
        let (workspace, own) = match (self.workspace, &self.own) {
            (Some(workspace), _) => (workspace, None),
            (None, Some(own)) => (Workspace { ptr: own.ptr, bytes: own.bytes }, Some(Arc::clone(own))),
            (None, None) => return Err(destroyed(operation)),
        };
        let scratch = Scratch { workspace, own, limit: workspace_limit };
        product.enqueue(operation, self.device(), &stream, Some(scratch), self.gpu.gemm_gap).map(|_| ())
    }
}

#[cold]
fn unbound(operation: Operation) -> Error {
    operation.error(ErrorKind::InvalidState, "the handle is bound to no stream").with_hint("call `set_stream` first")
}

#[cold]
fn destroyed(operation: Operation) -> Error {
    operation.error(ErrorKind::InvalidHandle, "the handle was destroyed").with_hint("create a new one")
}

impl BlasHandle for MockBlas {
    fn kind(&self) -> BlasKind {
        self.0.kind
    }

    fn device(&self) -> u32 {
        self.0.device
    }

    fn set_stream(&mut self, stream: StreamId) -> Result<()> {
        let (context, operation) = (&mut *self.0, Operation::SetStream);
        context.enter(operation)?;
        // Relaxed: see `destroy_stream`.
        let epoch = context.gpu.streams_epoch.load(Ordering::Relaxed);
        match &mut context.stream {
            Some(bound) if bound.id == stream && bound.epoch == epoch => {}
            bound => {
                context.gpu.check_stream(operation, stream)?;
                if stream.device() != context.device {
                    return Err(wrong_device(operation, stream, "the handle", context.device));
                }
                match bound {
                    Some(bound) if bound.id == stream => bound.epoch = epoch,
                    bound => *bound = Some(BoundStream { id: stream, epoch, stream: None }),
                }
            }
        }
        if context.gpu.capabilities.set_stream_resets_workspace {
            context.workspace = None;
        }
        Ok(())
    }

    unsafe fn set_workspace(&mut self, workspace: Option<Workspace>) -> Result<()> {
        let (context, operation) = (&mut *self.0, Operation::SetWorkspace);
        context.enter(operation)?;
        if let Some(wanted) = workspace {
            if !context.gpu.capabilities.blas_workspace {
                return Err(operation.lacks("blas_workspace"));
            }
            let epoch = context.device().epoch();
            if context.known_workspace != Some((wanted, epoch)) {
                let alignment = context.gpu.capabilities.workspace_alignment;
                if !wanted.ptr.is_aligned_to(alignment) {
                    return Err(operation
                        .error(
                            ErrorKind::InvalidArgument,
                            format!("the workspace is at {}, not at a multiple of {alignment}", wanted.ptr),
                        )
                        .with_hint("the capability `workspace_alignment` is the required alignment"));
                }
                context.device().range(operation, "the workspace", wanted.ptr, wanted.bytes)?;
                context.known_workspace = Some((wanted, epoch));
            }
        }
        context.workspace = workspace;
        Ok(())
    }

    fn set_math_mode(&mut self, mode: MathMode) -> Result<()> {
        let operation = Operation::SetMathMode;
        self.0.enter(operation)?;
        self.0.check_math_mode(operation, mode)?;
        self.0.math_mode = mode;
        Ok(())
    }

    fn set_atomics_mode(&mut self, mode: AtomicsMode) -> Result<()> {
        let operation = Operation::SetAtomicsMode;
        self.0.enter(operation)?;
        self.0.check_atomics_mode(operation, mode)?;
        self.0.atomics_mode = mode;
        Ok(())
    }

    unsafe fn gemm(&mut self, gemm: &Gemm) -> Result<()> {
        let operation = Operation::Gemm;
        self.0.enter_as(operation, BlasKind::Blas)?;
        self.0.check_type(operation, &gemm.shape)?;
        // Relaxed: foreign code changes it only while the caller lends it the handle.
        if self.0.scales_on_device.load(Ordering::Relaxed) {
            return Err(operation
                .error(ErrorKind::InvalidPointer, "the device would read alpha at an address of the host")
                .with_hint("foreign code set the handle's pointer mode; restore it"));
        }
        let mut product = RawProduct::new(gemm.shape, gemm.a, gemm.b, gemm.c);
        product.alpha = Scale::Value(gemm.alpha);
        product.beta = Scale::Value(gemm.beta);
        product.math_mode = self.0.math_mode;
        product.atomics_mode = self.0.atomics_mode;
        self.0.enqueue(operation, &product, usize::MAX)
    }

    fn create_plan(&mut self, options: &PlanOptions) -> Result<PlanId> {
        // No other handle issues the same number, so a plan of another handle is unknown here.
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        let operation = Operation::CreatePlan;
        self.0.enter_as(operation, BlasKind::Lt)?;
        self.0.check_type(operation, &options.shape)?;
        options.shape.extents(operation.name())?;
        self.0.check_math_mode(operation, options.math_mode)?;
        self.0.check_atomics_mode(operation, options.atomics_mode)?;
        if !options.alignment.is_power_of_two() {
            return Err(operation.error(
                ErrorKind::InvalidArgument,
                format!("the plan is for operands aligned to {}, which is not a power of two", options.alignment),
            ));
        }
        match options.epilogue {
            Epilogue::None | Epilogue::Bias | Epilogue::Relu | Epilogue::Gelu => {}
            Epilogue::BiasRelu | Epilogue::BiasGelu => {}
            other => {
                return Err(operation
                    .error(ErrorKind::Unsupported, format!("the mock does not support the epilogue {other:?}")));
            }
        }
        let plan = PlanId::new(NUMBERS.fetch_add(1, Ordering::Relaxed));
        self.0.plans.insert(plan, *options);
        Ok(plan)
    }

    unsafe fn run_plan(&mut self, plan: PlanId, arguments: &PlanArguments) -> Result<()> {
        let operation = Operation::RunPlan;
        self.0.enter_as(operation, BlasKind::Lt)?;
        let options = *self.0.plans.get(&plan).ok_or_else(|| no_plan(operation, plan))?;
        let operands = [arguments.a, arguments.b, arguments.c, arguments.d].into_iter().chain(arguments.bias);
        if let Some(operand) = operands.into_iter().find(|operand| !operand.is_aligned_to(options.alignment)) {
            return Err(operation
                .error(
                    ErrorKind::InvalidArgument,
                    format!("{operand:?} is not a multiple of {}, the alignment of the plan", options.alignment),
                )
                .with_hint("create the plan with the alignment of the operands"));
        }
        let mut product = RawProduct::new(options.shape, arguments.a, arguments.b, arguments.d);
        product.c = arguments.c;
        product.alpha = Scale::Value(arguments.alpha);
        product.beta = Scale::Value(arguments.beta);
        product.bias = arguments.bias;
        product.epilogue = options.epilogue;
        product.math_mode = options.math_mode;
        product.atomics_mode = options.atomics_mode;
        self.0.enqueue(operation, &product, options.workspace_bytes)
    }

    fn destroy_plan(&mut self, plan: PlanId) -> Result<()> {
        let operation = Operation::DestroyPlan;
        self.0.enter_as(operation, BlasKind::Lt)?;
        self.0.plans.remove(&plan).map(|_| ()).ok_or_else(|| no_plan(operation, plan))
    }

    fn raw(&self) -> u64 {
        self.0.number
    }

    fn reset(&mut self) -> Result<()> {
        let context = &mut *self.0;
        context.enter(Operation::Reset)?;
        (context.stream, context.workspace) = (None, None);
        (context.math_mode, context.atomics_mode) = (MathMode::default(), AtomicsMode::default());
        // Relaxed: see `gemm`.
        context.scales_on_device.store(false, Ordering::Relaxed);
        Ok(())
    }

    fn destroy(&mut self) -> Result<()> {
        self.0.enter(Operation::Destroy)?;
        self.0.close();
        Ok(())
    }
}

fn no_plan(operation: Operation, plan: PlanId) -> Error {
    operation
        .error(ErrorKind::InvalidHandle, format!("{plan:?} is not a plan of this handle, or was destroyed"))
        .with_hint("create the plan with the same handle, and run it before it is destroyed")
}
