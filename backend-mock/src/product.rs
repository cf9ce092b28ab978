//! A product on its way into a stream: its ranges are checked, and it becomes two commands for each panel.
//!
//! [`RawProduct`] describes all that the kernels can do, which is more than the trait `BlasHandle` requests: Ds with
//! another layout than C, a bias of another type, scales that the device reads. It is for code that stands in for a
//! vendor's BLAS library on top of the mock.

use std::sync::Arc;
use std::time::Duration;

use highwater_hal::{AtomicsMode, DataType, DevicePtr, Epilogue, ErrorKind, GemmShape, MathMode, Result, Workspace};

use crate::command::Command;
use crate::device::Device;
use crate::kernel::{Factor, OwnWorkspace, Product, intermediate_bytes, panels};
use crate::operation::Operation;
use crate::stream::Stream;

/// A scale of a product: `alpha` or `beta`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scale {
    /// This value.
    Value(f64),
    /// An element of this type in the device's memory, read when the result is written.
    Device(DevicePtr, DataType),
}

/// `D = epilogue(alpha * op(A) * op(B) + beta * C)`, for `MockGpu::enqueue_product`.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct RawProduct {
    /// Sizes, leading dimensions, batch, and the element types of the matrices.
    pub shape: GemmShape,
    /// Element type of the bias: that of the output, or any but 64 bits if the output has fewer.
    pub bias_type: DataType,
    /// Factor of the product.
    pub alpha: Scale,
    /// Factor of C; with 0 C is not read.
    pub beta: Scale,
    /// First element of A.
    pub a: DevicePtr,
    /// First element of B.
    pub b: DevicePtr,
    /// First element of C.
    pub c: DevicePtr,
    /// First element of D.
    pub d: DevicePtr,
    /// Leading dimension of D, in elements.
    pub ldd: usize,
    /// Elements from one D of a batch to the next. The Ds must not overlap.
    pub stride_d: usize,
    /// First element of the bias, if the epilogue has one.
    pub bias: Option<DevicePtr>,
    /// The epilogue after the product.
    pub epilogue: Epilogue,
    /// Precision of the factors of 32 bits.
    pub math_mode: MathMode,
    /// Whether the order of sums is free.
    pub atomics_mode: AtomicsMode,
}

/// The space for intermediate results.
pub(crate) struct Scratch {
    pub(crate) workspace: Workspace,
    /// Holds the workspace, if it is a handle's own.
    pub(crate) own: Option<Arc<OwnWorkspace>>,
    /// The largest number of bytes that may be used.
    pub(crate) limit: usize,
}

impl RawProduct {
    /// Creates `C = A * B` in full precision.
    #[must_use]
    pub const fn new(shape: GemmShape, a: DevicePtr, b: DevicePtr, c: DevicePtr) -> Self {
        Self {
            shape,
            bias_type: shape.output,
            alpha: Scale::Value(1.0),
            beta: Scale::Value(0.0),
            a,
            b,
            c,
            d: c,
            ldd: shape.ldc,
            stride_d: match shape.batch {
                Some(batch) => batch.stride_c,
                None => 0,
            },
            bias: None,
            epilogue: Epilogue::None,
            math_mode: MathMode::Default,
            atomics_mode: AtomicsMode::NotAllowed,
        }
    }

    /// Checks what the shape alone does not imply.
    fn check(&self, operation: Operation) -> Result<()> {
        let (input, output) = (self.shape.data_type, self.shape.output);
        let widened = output == DataType::F32 && matches!(input, DataType::F16 | DataType::Bf16);
        if input != output && !widened {
            return Err(operation
                .error(ErrorKind::Unsupported, format!("the mock writes no products of {input:?} as {output:?}")));
        }
        let wide = |data_type| data_type == DataType::F64;
        let scales = [self.alpha, self.beta].into_iter().filter_map(|scale| match scale {
            Scale::Value(_) => None,
            Scale::Device(_, data_type) => Some(data_type),
        });
        let bias = self.epilogue.has_bias().then_some(self.bias_type);
        if scales.chain(bias).any(|data_type| wide(data_type) && !wide(output)) {
            return Err(operation.error(
                ErrorKind::Unsupported,
                format!("the mock adds no scale or bias of 64 bits to results of {output:?}"),
            ));
        }
        // The same rules as for C.
        let mut shape = self.shape;
        shape.ldc = self.ldd;
        if let Some(batch) = &mut shape.batch {
            batch.stride_c = self.stride_d;
        }
        shape.extents(operation.name()).map(|_| ())
    }

    /// Checks the ranges and enqueues the product, through `scratch` if there is one. Returns the number of commands.
    pub(crate) fn enqueue(
        &self,
        operation: Operation,
        device: &Device,
        stream: &Arc<Stream>,
        scratch: Option<Scratch>,
        gap: Duration,
    ) -> Result<usize> {
        let extents = self.shape.extents(operation.name())?;
        self.check(operation)?;
        if self.shape.is_empty() {
            return Ok(0);
        }
        // Matrices that the product does not read may lie anywhere.
        let range = |what: &str, ptr: DevicePtr, elements: usize, data_type: DataType, used: bool| {
            if !used || elements == 0 {
                return Ok(0);
            }
            let size = data_type.bytes();
            if !ptr.is_aligned_to(size) {
                return Err(operation.error(
                    ErrorKind::InvalidArgument,
                    format!("{what} is at {ptr}, not at a multiple of the {size} bytes of an element"),
                ));
            }
            device.range(operation, what, ptr, elements * size)
        };
        let factor = |what: &str, scale: Scale| match scale {
            Scale::Value(value) => Ok(Factor::Value(value)),
            Scale::Device(ptr, data_type) => {
                range(what, ptr, 1, data_type, true).map(|offset| Factor::At { offset, data_type })
            }
        };
        let (alpha, beta) = (factor("alpha", self.alpha)?, factor("beta", self.beta)?);
        let (input, output) = (self.shape.data_type, self.shape.output);
        let reads_factors = !alpha.is_zero() && self.shape.k != 0;
        let bias = match self.bias {
            _ if !self.epilogue.has_bias() => None,
            Some(bias) => Some((range("the bias", bias, self.shape.m, self.bias_type, true)?, self.bias_type)),
            None => {
                return Err(operation.error(
                    ErrorKind::InvalidArgument,
                    format!("the epilogue {:?} reads a bias, but none was passed", self.epilogue),
                ));
            }
        };
        let capacity = scratch.as_ref().map_or(0, |scratch| scratch.workspace.bytes.min(scratch.limit))
            / intermediate_bytes(input);
        let workspace = match &scratch {
            Some(Scratch { workspace, .. }) => {
                device.range(operation, "the bound workspace", workspace.ptr, workspace.bytes)?
            }
            None => 0,
        };
        let mut product = Product {
            device: device.ordinal,
            shape: self.shape,
            alpha,
            beta,
            a: range("A", self.a, extents.a, input, reads_factors)?,
            b: range("B", self.b, extents.b, input, reads_factors)?,
            c: range("C", self.c, extents.c, output, !beta.is_zero())?,
            d: 0,
            ldd: self.ldd,
            stride_d: self.stride_d,
            in_place: self.c == self.d,
            bias,
            epilogue: self.epilogue,
            tf32: self.math_mode == MathMode::Tf32 && input == DataType::F32,
            atomics: self.atomics_mode != AtomicsMode::NotAllowed,
            workspace,
            own: scratch.and_then(|scratch| scratch.own),
        };
        product.d = range("the result", self.d, product.extent_d(), output, true)?;
        let product = Arc::new(product);
        let origin = stream.origin(operation);
        if capacity == 0 {
            return stream.enqueue_from(operation, &origin, Command::MultiplyAndFinish(product)).map(|()| 1);
        }
        let mut commands = 0;
        for panel in panels(&self.shape, capacity) {
            stream.enqueue_from(operation, &origin, Command::Multiply(Arc::clone(&product), panel))?;
            if !gap.is_zero() {
                std::thread::sleep(gap);
            }
            stream.enqueue_from(operation, &origin, Command::Finish(Arc::clone(&product), panel))?;
            commands += 2;
        }
        Ok(commands)
    }
}
