//! The trait `BlasHandle`: matrix products by loops, which need no workspace.

use std::sync::Arc;

use highwater_hal::{
    AtomicsMode, BlasHandle, BlasKind, DataType, DevicePtr, Error, ErrorKind, Gemm, GemmShape, MathMode, Result,
    StreamId, Transpose, Workspace,
};

use crate::backend::{DEVICE, Shared};
use crate::memory::Span;
use crate::stream::Work;

/// One product. With alpha 0 or without terms there are no factors (`gemm.alpha-zero`); with beta 0, C is not read (`gemm.beta-zero`).
#[derive(Debug)]
pub(crate) struct Product {
    shape: GemmShape,
    alpha: f64,
    beta: f64,
    factors: Option<(Span, Span)>,
    c: Span,
}

impl Product {
    pub(crate) fn run(&self) {
        let GemmShape { m, n, ldc, batch, .. } = self.shape;
        for element in 0..self.shape.batch_count() * n * m {
            let (product, column, row) = (element / m / n, element / m % n, element % m);
            let at = product * batch.map_or(0, |batch| batch.stride_c) + row + column * ldc;
            let old = if self.beta == 0.0 { 0.0 } else { self.beta * self.load(&self.c, at) };
            let new = self.factors.as_ref().map_or(0.0, |factors| self.alpha * self.sum(factors, product, row, column));
            self.store(at, new + old);
        }
    }

    fn sum(&self, (a, b): &(Span, Span), product: usize, row: usize, column: usize) -> f64 {
        let GemmShape { k, lda, ldb, transpose_a, transpose_b, batch, .. } = self.shape;
        let (stride_a, stride_b) = batch.map_or((0, 0), |batch| (batch.stride_a, batch.stride_b));
        let term = |inner: usize| {
            let in_a = if transpose_a == Transpose::Yes { inner + row * lda } else { row + inner * lda };
            let in_b = if transpose_b == Transpose::Yes { column + inner * ldb } else { inner + column * ldb };
            self.load(a, product * stride_a + in_a) * self.load(b, product * stride_b + in_b)
        };
        (0..k).map(term).sum()
    }

    fn load(&self, matrix: &Span, index: usize) -> f64 {
        match self.shape.data_type {
            DataType::F64 => f64::from_ne_bytes(matrix.read(8 * index)),
            _ => f32::from_ne_bytes(matrix.read(4 * index)).into(),
        }
    }

    fn store(&self, index: usize, value: f64) {
        match self.shape.data_type {
            DataType::F64 => self.c.write(8 * index, &value.to_ne_bytes()),
            _ => self.c.write(4 * index, &(value as f32).to_ne_bytes()),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) shared: Arc<Shared>,
    pub(crate) stream: Option<StreamId>,
    /// Counts for `live_objects`; `None` after the handle was destroyed.
    pub(crate) alive: Option<Arc<()>>,
}

impl Handle {
    fn check(&self, operation: &'static str) -> Result<()> {
        let destroyed = || Error::new(ErrorKind::InvalidHandle, operation, "the handle was destroyed");
        self.alive.as_ref().map(|_| ()).ok_or_else(destroyed)
    }
}

impl BlasHandle for Handle {
    fn kind(&self) -> BlasKind {
        BlasKind::Blas
    }

    fn device(&self) -> u32 {
        DEVICE
    }

    fn set_stream(&mut self, stream: StreamId) -> Result<()> {
        self.check("set_stream")?;
        self.shared.stream("set_stream", stream)?;
        self.stream = Some(stream);
        Ok(())
    }

    unsafe fn set_workspace(&mut self, workspace: Option<Workspace>) -> Result<()> {
        self.check("set_workspace")?;
        if workspace.is_none() { Ok(()) } else { Err(Error::lacks("set_workspace", "blas_workspace")) }
    }

    fn set_math_mode(&mut self, mode: MathMode) -> Result<()> {
        self.check("set_math_mode")?;
        if mode == MathMode::Default { Ok(()) } else { Err(Error::lacks("set_math_mode", "tf32")) }
    }

    fn set_atomics_mode(&mut self, mode: AtomicsMode) -> Result<()> {
        self.check("set_atomics_mode")?;
        if mode == AtomicsMode::NotAllowed { Ok(()) } else { Err(Error::lacks("set_atomics_mode", "atomics_mode")) }
    }

    unsafe fn gemm(&mut self, gemm: &Gemm) -> Result<()> {
        self.check("gemm")?;
        let Gemm { shape, alpha, beta, .. } = *gemm;
        self.shared.capabilities.check_product("gemm", &shape)?;
        let extents = shape.extents("gemm")?;
        let unbound = || Error::new(ErrorKind::InvalidState, "gemm", "the handle is bound to no stream");
        let stream = self.shared.stream("gemm", self.stream.ok_or_else(unbound)?)?;
        if shape.is_empty() {
            return Ok(());
        }
        let find = |ptr: DevicePtr, elements: usize| {
            self.shared.device.find("gemm", ptr.get() as usize, elements * shape.data_type.bytes())
        };
        let read = alpha != 0.0 && shape.k != 0;
        let factors = if read { Some((find(gemm.a, extents.a)?, find(gemm.b, extents.b)?)) } else { None };
        let c = find(gemm.c, extents.c)?;
        stream.0.push(Work::Multiply(Product { shape, alpha, beta, factors, c }));
        Ok(())
    }

    fn raw(&self) -> u64 {
        std::ptr::from_ref(self).addr() as u64
    }

    fn reset(&mut self) -> Result<()> {
        self.check("reset")?;
        self.stream = None;
        Ok(())
    }

    fn destroy(&mut self) -> Result<()> {
        self.check("destroy")?;
        self.alive = None;
        Ok(())
    }
}
