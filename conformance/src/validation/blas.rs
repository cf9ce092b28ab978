//! The layer over a `BlasHandle`.

use std::collections::HashMap;
use std::panic::Location;
use std::sync::Arc;

use highwater_hal::{
    Answer, AnyId, BlasHandle, BlasKind, Call, DevicePtr, Gemm, GemmShape, HandleLayer, PlanArguments, PlanId,
    PlanOptions, Result, StreamId, Workspace,
};

use super::Books;
use super::ranges::on;

/// A plan of a handle.
#[derive(Debug)]
struct Plan {
    shape: GemmShape,
    alive: bool,
}

#[derive(Debug)]
pub(super) struct ValidatedHandle {
    inner: Box<dyn BlasHandle>,
    books: Arc<Books>,
    /// The number of the handle in the ledger.
    number: u64,
    device: u32,
    destroyed: bool,
    bound: Option<StreamId>,
    plans: HashMap<PlanId, Plan>,
}

impl ValidatedHandle {
    pub(super) fn new(
        inner: Box<dyn BlasHandle>,
        books: &Arc<Books>,
        device: u32,
        kind: BlasKind,
        at: Option<&'static Location<'static>>,
    ) -> Self {
        let seen = (inner.device(), inner.kind());
        let mut ledger = books.ledger();
        let made = ledger.made("create_blas_handle", at);
        ledger.handles.insert(made.number, made);
        if seen != (device, kind) {
            let (seen_device, seen_kind) = seen;
            ledger.found(format!(
                "wrong device: `create_blas_handle` gave a handle of kind {seen_kind:?} on device {seen_device} for one of \
                 kind {kind:?} on device {device}"
            ));
        }
        drop(ledger);
        let books = Arc::clone(books);
        Self { inner, books, number: made.number, device, destroyed: false, bound: None, plans: HashMap::new() }
    }

    /// Makes a call of the handle, and judges the answer.
    fn calling<T>(
        &mut self,
        operation: &'static str,
        misuse: Option<String>,
        call: impl FnOnce(&mut dyn BlasHandle) -> Result<T>,
    ) -> Result<T> {
        self.books.enter(operation)?;
        let answer = self.books.calling(operation, || call(&mut *self.inner));
        if answer.is_ok() && self.destroyed {
            self.books.found(format!("use after destroy: `{operation}` accepted a handle that was destroyed"));
        }
        self.books.judge_use(operation, misuse, &answer);
        answer
    }

    /// Returns why the backend must refuse a product on the bound stream, if so.
    fn dead_stream(&self) -> Option<String> {
        let Some(bound) = self.bound else { return Some("the handle is bound to no stream".to_owned()) };
        self.books.unsound(&[AnyId::Stream(bound)]).map(|id| format!("the handle is bound to {id}"))
    }

    /// Returns what is wrong with the operands of a product, if anything. Factors that the product does not read are not
    /// checked.
    fn misused(&self, shape: &GemmShape, alpha: f64, operands: [(&'static str, DevicePtr); 3]) -> Option<String> {
        let extents = shape.extents("validation").ok()?;
        let [(a_name, a), (b_name, b), (c_name, c)] = operands;
        let (factor, result) = (shape.data_type.bytes(), shape.output.bytes());
        let empty = extents.c == 0;
        let factors = if alpha == 0.0 || shape.k == 0 || empty { 0 } else { factor as u64 };
        let ranges = [
            (a_name, on(self.device, a), extents.a as u64 * factors),
            (b_name, on(self.device, b), extents.b as u64 * factors),
            (c_name, on(self.device, c), extents.c as u64 * result as u64),
        ];
        self.books.misuse(&ranges)
    }
}

impl HandleLayer for ValidatedHandle {
    fn below(&self) -> &dyn BlasHandle {
        &*self.inner
    }

    fn around<T: Answer>(&mut self, call: &Call, forward: impl FnOnce(&mut dyn BlasHandle) -> Result<T>) -> Result<T> {
        self.calling(call.operation, None, forward)
    }

    fn set_stream(&mut self, stream: StreamId) -> Result<()> {
        const OPERATION: &str = "set_stream";
        let unsound = self.books.unsound(&[AnyId::Stream(stream)]);
        let wrong_device =
            (stream.device() != self.device).then(|| format!("{stream:?} for a handle of device {}", self.device));
        let misuse = unsound.map(|id| id.to_string()).or(wrong_device);
        self.calling(OPERATION, misuse, |handle| handle.set_stream(stream))?;
        self.bound = Some(stream);
        Ok(())
    }

    unsafe fn set_workspace(&mut self, workspace: Option<Workspace>) -> Result<()> {
        let misuse = workspace.and_then(|memory| {
            self.books.misuse(&[("the workspace", on(self.device, memory.ptr), memory.bytes as u64)])
        });
        let refused = self.books.refuse("set_workspace", misuse.as_ref());
        self.calling("set_workspace", misuse, |handle| {
            refused?;
            // SAFETY: the caller promises what the method asks for.
            unsafe { handle.set_workspace(workspace) }
        })
    }

    unsafe fn gemm(&mut self, gemm: &Gemm) -> Result<()> {
        let operands = [("A", gemm.a), ("B", gemm.b), ("C", gemm.c)];
        let (dead, outside) = (self.dead_stream(), self.misused(&gemm.shape, gemm.alpha, operands));
        // The backend refuses a bad stream.
        let refused = self.books.refuse("gemm", outside.as_ref().filter(|_| dead.is_none()));
        self.calling("gemm", dead.or(outside), |handle| {
            refused?;
            // SAFETY: the caller promises what the method asks for.
            unsafe { handle.gemm(gemm) }
        })
    }

    fn create_plan(&mut self, options: &PlanOptions) -> Result<PlanId> {
        const OPERATION: &str = "create_plan";
        let plan = self.calling(OPERATION, None, |handle| handle.create_plan(options))?;
        let made = Plan { shape: options.shape, alive: true };
        if self.plans.insert(plan, made).is_some_and(|old| old.alive) {
            self.books.found(format!("`{OPERATION}` issued {plan:?}, which is alive"));
        }
        Ok(plan)
    }

    unsafe fn run_plan(&mut self, plan: PlanId, arguments: &PlanArguments) -> Result<()> {
        let (dead, outside) = match self.plans.get(&plan) {
            Some(Plan { shape, alive: true }) => {
                let operands = [("A", arguments.a), ("B", arguments.b), ("D", arguments.d)];
                (self.dead_stream(), self.misused(shape, arguments.alpha, operands))
            }
            Some(_) => (Some(format!("use after destroy: {plan:?} was destroyed")), None),
            None => (Some(format!("{plan:?} was never issued by this handle")), None),
        };
        // The backend refuses a bad stream or plan.
        let refused = self.books.refuse("run_plan", outside.as_ref().filter(|_| dead.is_none()));
        self.calling("run_plan", dead.or(outside), |handle| {
            refused?;
            // SAFETY: the caller promises what the method asks for.
            unsafe { handle.run_plan(plan, arguments) }
        })
    }

    fn destroy_plan(&mut self, plan: PlanId) -> Result<()> {
        let alive = self.plans.get(&plan).is_some_and(|plan| plan.alive);
        let misuse = (!alive).then(|| format!("double free: {plan:?} is no plan that is alive"));
        self.calling("destroy_plan", misuse, |handle| handle.destroy_plan(plan))?;
        if let Some(plan) = self.plans.get_mut(&plan) {
            plan.alive = false;
        }
        Ok(())
    }

    fn reset(&mut self) -> Result<()> {
        self.calling("reset", None, |handle| handle.reset())?;
        self.bound = None;
        Ok(())
    }

    fn destroy(&mut self) -> Result<()> {
        self.calling("destroy", None, |handle| handle.destroy())?;
        self.destroyed = true;
        self.books.ledger().handles.remove(&self.number);
        Ok(())
    }
}

impl Drop for ValidatedHandle {
    fn drop(&mut self) {
        // The backend's handle is dropped, and so destroyed, right after this.
        self.books.ledger().handles.remove(&self.number);
    }
}
