//! Products: the time to enqueue small ones, and the run time of large ones.

use std::cell::{Cell, RefCell};

use anyhow::{Result, ensure};
use highwater_core::half::bf16;
use highwater_core::{BlasKind, BlasOptions, DeviceBuffer, Epilogue, Gemm, GemmShape, Scalar, Stream, Workspace};

use crate::Bench;
use crate::measure::{Bursts, Random, Side, alternate};
use crate::raw::{LtProduct, Owned, kind_of};
use crate::table::{Bar, Row, Table};

/// The cost over raw that enqueuing may have.
const SUBMIT: Bar = Bar::Difference { share: 0.03, ns: 300.0 };
/// Products in a burst.
const CALLS: usize = 100;

pub(crate) fn rows(bench: &Bench<'_>, table: &mut Table) -> Result<()> {
    submit(bench, table, "f32", |number| number)?;
    submit(bench, table, "bf16", bf16::from_f32)?;
    large(bench, table)?;
    planned(bench, table)
}

/// Square matrices, and the raw handle that multiplies them.
struct Product<'b, T: Scalar> {
    bench: &'b Bench<'b>,
    shape: GemmShape,
    kind: i32,
    size: i32,
    stream: Stream,
    a: DeviceBuffer<T>,
    b: DeviceBuffer<T>,
    c: DeviceBuffer<T>,
    raw_c: DeviceBuffer<T>,
    raw_handle: Owned,
    raw_stream: Owned,
    // Dropped after the handle that is bound to it.
    _raw_workspace: Owned,
}

impl<'b, T: Scalar> Product<'b, T> {
    fn new(bench: &'b Bench<'b>, size: usize, from: impl Fn(f32) -> T) -> Result<Self> {
        let stream = bench.device.create_stream()?;
        let mut random = Random::new(size as u64);
        let mut matrix = || -> Vec<T> { (0..size * size).map(|_| from(random.number())).collect() };
        let (a, b) = (stream.upload(&matrix())?, stream.upload(&matrix())?);
        // Not zeros, so that a product that never ran is detected.
        let (c, raw_c) = (stream.upload(&matrix())?, stream.upload(&matrix())?);
        let (raw, bytes) = (bench.raw, bench.options.workspace_bytes);
        let (raw_stream, raw_workspace, raw_handle) = (raw.stream()?, raw.memory(bytes)?, raw.handle()?);
        raw.bind(&raw_handle, &raw_stream, &raw_workspace, bytes)?;
        let (shape, kind) = (GemmShape::of::<T>(size, size, size), kind_of(T::DATA_TYPE)?);
        let size = i32::try_from(size)?;
        let _raw_workspace = raw_workspace;
        Ok(Self { bench, shape, kind, size, stream, a, b, c, raw_c, raw_handle, raw_stream, _raw_workspace })
    }

    fn one(&self, from: f32, to: impl Fn(f32) -> T) -> T {
        to(from)
    }

    #[inline]
    fn raw(&self) -> Result<()> {
        // SAFETY: the handle lives as long as this.
        unsafe { self.raw_on(self.raw_handle.get()) }
    }

    /// Enqueues the product on a handle of the layer, with the same stream, workspace and modes, so that only the layer
    /// differs. Two handles differ by some hundred nanoseconds for each call.
    ///
    /// # Safety
    /// The caller must ensure that the handle is alive and hold its stream's submission lock.
    #[inline]
    unsafe fn raw_on(&self, handle: u64) -> Result<()> {
        let matrices = [self.a.ptr().get(), self.b.ptr().get(), self.raw_c.ptr().get()];
        // SAFETY: The buffers hold matrices of this type and size, and live until the streams were waited for.
        unsafe { self.bench.raw.gemm(handle, self.kind, self.size, matrices) }
    }

    /// Waits for both streams.
    fn settle(&self) -> Result<()> {
        self.bench.raw.synchronize(&self.raw_stream)?;
        Ok(self.stream.synchronize()?)
    }

    /// Checks that both sides have the same product.
    fn compare(&self) -> Result<()> {
        self.settle()?;
        let (ours, raw) = (self.stream.download(&self.c)?, self.stream.download(&self.raw_c)?);
        // Sums of `size` products of numbers up to 1, rounded to the type. bf16 has 8 bits.
        let most = 0.02 * f64::from(self.size).sqrt();
        let apart = ours.iter().zip(&raw).map(|(ours, raw)| (ours.to_f64() - raw.to_f64()).abs());
        let worst = apart.fold(0.0, |worst: f64, next| if next <= worst { worst } else { next });
        ensure!(worst <= most, "ours and raw multiply {0} x {0} differently: by {worst}", self.size);
        Ok(())
    }
}

/// Measures enqueuing a product of 32 x 32.
fn submit<T: Scalar>(bench: &Bench<'_>, table: &mut Table, name: &str, from: impl Fn(f32) -> T) -> Result<()> {
    let product = Product::new(bench, 32, &from)?;
    let (one, zero) = (product.one(1.0, &from), product.one(0.0, &from));
    let Product { stream, shape, a, b, c, .. } = &product;
    let bursts = bench.bursts(CALLS);
    // The pool returns the same handle to the same thread.
    let pooled = stream.blas()?.with_raw(|raw| raw.handle)?;
    // SAFETY: The pool keeps the handle, and only this thread exists to use it.
    let raw = |_| unsafe { product.raw_on(pooled) };
    {
        let mut lease = stream.blas()?;
        let ours = |_| Ok(lease.gemm(shape, one, a, b, zero, c)?);
        let pairs = alternate(bursts, |_| product.settle(), ours, raw)?;
        table.push(
            Row::pairs(format!("enqueue gemm 32x32x32 {name}, lease kept; raw on the same handle"), &pairs).bar(SUBMIT),
        );
    }
    product.compare()?;
    let ours = |_| Ok(stream.blas()?.gemm(shape, one, a, b, zero, c)?);
    let pairs = alternate(bursts, |_| product.settle(), ours, raw)?;
    table.push(Row::pairs(format!("take a lease, enqueue gemm 32x32x32 {name}, give it back"), &pairs));

    // In a program that uses only the layer, a thread has no current context. The layer makes one current in each call.
    let current = RefCell::new(None);
    let prepare = |side| {
        // Pushed again before it may be popped again.
        current.replace(None);
        if side == Side::Ours {
            current.replace(Some(Popped::new(bench)?));
        }
        product.settle()
    };
    let pairs = alternate(bursts, prepare, ours, raw)?;
    drop(current);
    let pairs_of_two_handles = alternate(bursts, |_| product.settle(), ours, |_| product.raw())?;
    table.push(Row::pairs(format!("the same in a thread without a context, {name}"), &pairs));
    let what = format!("the same with a context, {name}; raw: a handle, stream and workspace of its own");
    table.push(Row::pairs(what, &pairs_of_two_handles));

    let mut handle = bench.runtime.backend().create_blas_handle(0, &BlasOptions::new(BlasKind::Blas))?;
    let bytes = bench.options.workspace_bytes;
    let workspace = bench.device.allocate::<u8>(bytes)?;
    handle.set_stream(stream.id())?;
    // SAFETY: Only this handle uses the workspace, which is dropped after the stream was waited for.
    unsafe { handle.set_workspace(Some(Workspace { ptr: workspace.ptr(), bytes }))? };
    let gemm = Gemm::new(*shape, a.ptr(), b.ptr(), c.ptr());
    // SAFETY: The shape is that of the buffers, which live until the stream was waited for. No other handle uses the
    // stream.
    let raw_handle = handle.raw();
    // SAFETY: The handle lives until the end, and only this thread uses it.
    let pairs = alternate(
        bursts,
        |_| product.settle(),
        |_| Ok(unsafe { handle.gemm(&gemm) }?),
        |_| unsafe { product.raw_on(raw_handle) },
    )?;
    product.compare()?;
    table.push(Row::pairs(format!("enqueue gemm 32x32x32 {name}, trait"), &pairs));
    handle.destroy()?;
    Ok(())
}

/// Keeps this thread without a current context until it is dropped.
struct Popped<'b>(&'b Bench<'b>);

impl<'b> Popped<'b> {
    fn new(bench: &'b Bench<'b>) -> Result<Self> {
        bench.raw.leave()?;
        Ok(Self(bench))
    }
}

impl Drop for Popped<'_> {
    fn drop(&mut self) {
        // A failure here recurs in the next raw call, which reports it.
        if let Ok(current) = self.0.raw.enter() {
            std::mem::forget(current);
        }
    }
}

/// Measures the run time of large products.
fn large(bench: &Bench<'_>, table: &mut Table) -> Result<()> {
    const PRODUCTS: usize = 10;
    let size = if bench.options.quick { 64 } else { 8192 };
    let product = Product::new(bench, size, bf16::from_f32)?;
    let Product { stream, shape, a, b, c, .. } = &product;
    let mut lease = stream.blas()?;
    let ours = |_| {
        for _ in 0..PRODUCTS {
            lease.gemm(shape, bf16::ONE, a, b, bf16::ZERO, c)?;
        }
        Ok(stream.synchronize()?)
    };
    let raw = |_| {
        for _ in 0..PRODUCTS {
            product.raw()?;
        }
        bench.raw.synchronize(&product.raw_stream)
    };
    let bursts = Bursts { pairs: bench.options.pairs.min(200), calls: 1 };
    let pairs = alternate(bursts, |_| product.settle(), ours, raw)?;
    drop(lease);
    product.compare()?;
    table.push(Row::pairs(format!("{PRODUCTS} gemm {size}^3 bf16 and synchronize"), &pairs).bar(Bar::Times(1.01)));
    Ok(())
}

/// Measures enqueuing a product of 64 x 64 by a cached plan.
fn planned(bench: &Bench<'_>, table: &mut Table) -> Result<()> {
    const SIZE: usize = 64;
    /// Handles of cublasGemmEx, which differ by hundreds of nanoseconds for each call. The bursts rotate through them.
    const HANDLES: usize = 8;
    let products = (0..HANDLES).map(|_| Product::new(bench, SIZE, bf16::from_f32)).collect::<Result<Vec<_>>>()?;
    let turn = Cell::new(0);
    let next = |side| {
        if side == Side::Raw {
            turn.set((turn.get() + 1) % HANDLES);
        }
        products.iter().try_for_each(Product::settle)
    };
    let by_raw = |_| products[turn.get()].raw();
    let product = &products[0];
    let Product { stream, shape, a, b, c, raw_c, raw_stream, .. } = product;
    let bursts = bench.bursts(CALLS);
    {
        let mut lease = stream.lt()?;
        let mut ours = |_| Ok(lease.matmul(shape, Epilogue::None, bf16::ONE, a, b, bf16::ZERO, c, None)?);
        let pairs = alternate(bursts, next, &mut ours, by_raw)?;
        product.compare()?;
        let what = "enqueue Lt 64^3 bf16, plan cached, lease kept; raw: cublasGemmEx, eight handles";
        table.push(Row::pairs(what, &pairs).bar(Bar::Times(0.95)));

        let plan = LtProduct::new(bench.raw, product.kind, SIZE, bench.options.workspace_bytes)?;
        let matrices = [a, b, raw_c].map(|buffer| buffer.ptr().get());
        // SAFETY: The buffers hold matrices of this type and size, and live until the streams were waited for.
        let raw = |_| unsafe { plan.run(raw_stream, matrices) };
        let pairs = alternate(bursts, |_| product.settle(), &mut ours, raw)?;
        product.compare()?;
        table.push(Row::pairs("the same; raw: cublasLtMatmul with its algorithm chosen", &pairs));
    }
    let ours = |_| Ok(stream.lt()?.matmul(shape, Epilogue::None, bf16::ONE, a, b, bf16::ZERO, c, None)?);
    let pairs = alternate(bursts, next, ours, by_raw)?;
    table.push(Row::pairs("enqueue Lt 64^3 bf16, plan cached, lease per call; raw: cublasGemmEx", &pairs));
    product.settle()
}
