//! The checks of a product before the vendor is called.
//!
//! Products pass here one after the other, each behind a vendor's call that has filled the processor's caches with its own
//! code. So the properties of nearly all products are checked in few consecutive instructions, the same ones for every element
//! type. The rest, huge or batched or wrong, is checked elsewhere.

use std::sync::Arc;

use crate::buffer::{DeviceSlice, Untyped};
use crate::device_block::{DeviceBlock, Noted};
use crate::stream::Stream;
use crate::stream::core::StreamCore;
use crate::stream::submission::SubmissionGuard;
use highwater_hal::{DataType, Epilogue, Error, ErrorKind, Gemm, GemmShape, Result, Scalar, Transpose, counted};

/// A product, or an Lt product with D for C, and the buffers that contain its matrices.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Product<'b> {
    pub(crate) operation: &'static str,
    pub(crate) gemm: Gemm,
    /// The blocks of A, B and C.
    pub(crate) blocks: [&'b Arc<DeviceBlock>; 3],
    /// Values from the beginning of A, B and C to the end of their buffers.
    lens: [usize; 3],
    /// The types of the buffers: of A and B, and of C.
    types: [DataType; 2],
}

impl<'b> Product<'b> {
    #[inline]
    pub(crate) fn new<T: Scalar, R: Scalar>(
        operation: &'static str,
        shape: &GemmShape,
        (alpha, beta): (R, R),
        a: DeviceSlice<'b, T>,
        b: DeviceSlice<'b, T>,
        c: DeviceSlice<'b, R>,
    ) -> Self {
        Self {
            operation,
            gemm: Gemm::new(*shape, a.ptr(), b.ptr(), c.ptr()).with_scale(alpha.to_f64(), beta.to_f64()),
            blocks: [a.block, b.block, c.block],
            lens: [a.len(), b.len(), c.len()],
            types: [T::DATA_TYPE, R::DATA_TYPE],
        }
    }

    /// Checks a product completely.
    #[inline(always)]
    pub(crate) fn check(&self, stream: &Stream) -> Result<()> {
        if self.is_plain(stream) { Ok(()) } else { self.look_closely(stream) }
    }

    /// Returns whether this is a valid single product of usual size. With usual sizes, no number here overflows.
    #[inline(always)]
    fn is_plain(&self, stream: &Stream) -> bool {
        /// The product of two numbers below this, plus one, does not overflow.
        const USUAL: usize = 1 << (usize::BITS / 2 - 1);
        let (core, Gemm { shape, a, b, c, .. }) = (stream.core(), &self.gemm);
        let GemmShape { m, n, k, lda, ldb, ldc, .. } = *shape;
        let [len_a, len_b, len_c] = self.lens;
        let [of_factors, of_result] = self.types;
        let here = |block: &DeviceBlock| block.is_of(core) && block.device == core.id.device();
        // Values from the first of a matrix to its last. The matrix has columns.
        let reach = |rows: usize, columns: usize, ld: usize| (columns - 1).wrapping_mul(ld).wrapping_add(rows);
        let rows_and_columns = |transpose, rows, columns| match transpose {
            Transpose::No => (rows, columns),
            Transpose::Yes => (columns, rows),
        };
        if !(core.is_own_process()
            && core.products.include(shape)
            && shape.data_type == of_factors
            && shape.output == of_result
            && self.blocks.iter().all(|block| here(block))
            && shape.batch.is_none()
            && (m | n | k | lda | ldb | ldc) < USUAL
            && m != 0
            && n != 0
            && k != 0)
        {
            return false;
        }
        let (rows_a, columns_a) = rows_and_columns(shape.transpose_a, m, k);
        let reach_a = reach(rows_a, columns_a, lda);
        if !(lda >= rows_a && len_a >= reach_a) {
            return false;
        }
        let (rows_b, columns_b) = rows_and_columns(shape.transpose_b, k, n);
        let reach_b = reach(rows_b, columns_b, ldb);
        if !(ldb >= rows_b && len_b >= reach_b) {
            return false;
        }
        let reach_c = reach(m, n, ldc);
        if !(ldc >= m && len_c >= reach_c) {
            return false;
        }
        // C is no longer than its buffer, so its bytes do not overflow.
        let end_c = c.offset(reach_c * of_result.bytes());
        (end_c <= *a || a.offset(reach_a * of_factors.bytes()) <= *c)
            && (end_c <= *b || b.offset(reach_b * of_factors.bytes()) <= *c)
    }

    fn slices(&self) -> [Untyped<'b>; 3] {
        let ptrs = [self.gemm.a, self.gemm.b, self.gemm.c];
        std::array::from_fn(|i| Untyped { block: self.blocks[i], ptr: ptrs[i], len: self.lens[i] })
    }

    /// As [`Product::check`], for any product.
    #[cold]
    #[inline(never)]
    fn look_closely(&self, stream: &Stream) -> Result<()> {
        let Self { operation, gemm: Gemm { shape, .. }, types: [of_factors, of_result], .. } = self;
        let [a, b, c] = self.slices();
        stream.runtime().inner.check(operation)?;
        // The address of released memory may belong to another buffer by now.
        self.blocks.iter().try_for_each(|block| block.check_usable(operation))?;
        let invalid = |message: String| Error::new(ErrorKind::InvalidArgument, operation, message);
        for (what, of_shape, of_buffers) in
            [("factors", shape.data_type, of_factors), ("a result", shape.output, of_result)]
        {
            if of_shape != *of_buffers {
                let message = format!("the shape has {what} of {of_shape:?}, the buffers are of {of_buffers:?}");
                return Err(invalid(message).with_hint(
                    "make the shape with `GemmShape::of::<T>`, or with `GemmShape::mixed::<T, R>` for `gemm_mixed` and \
                     `matmul_mixed`",
                ));
            }
        }
        stream.runtime().inner.device(stream.device()).capabilities.check_product(operation, shape)?;
        let extents = shape.extents(operation)?;
        stream.check_here(operation, &a)?;
        stream.check_here(operation, &b)?;
        stream.check_here(operation, &c)?;
        let lengths = [("A", a.len, extents.a), ("B", b.len, extents.b), ("C", c.len, extents.c)];
        if let Some((name, len, needed)) = lengths.into_iter().find(|(_, len, needed)| len < needed) {
            return Err(invalid(format!("{name} has {}, the product reaches {needed}", counted(len, "value")))
                .with_hint("pass a larger buffer, or check m, n, k, the leading dimensions and the batch"));
        }
        let written = extents.c * of_result.bytes();
        for (name, factor, len) in [("A", a, extents.a), ("B", b, extents.b)] {
            if c.overlaps(written, &factor, len * of_factors.bytes()) {
                return Err(invalid(format!("C overlaps {name}")).with_hint("write to a buffer of its own"));
            }
        }
        Ok(())
    }

    /// Checks the bias of an epilogue completely, after [`Product::check`].
    #[inline(always)]
    pub(crate) fn check_bias(&self, stream: &Stream, epilogue: Epilogue, bias: Option<Untyped<'_>>) -> Result<()> {
        if bias.is_none() & !epilogue.has_bias() { Ok(()) } else { self.look_at_bias(stream, epilogue, bias) }
    }

    #[inline(never)]
    fn look_at_bias(&self, stream: &Stream, epilogue: Epilogue, bias: Option<Untyped<'_>>) -> Result<()> {
        let Self { operation, gemm: Gemm { shape, .. }, types: [_, of_result], .. } = self;
        let [.., d] = self.slices();
        let invalid = |message: String| Error::new(ErrorKind::InvalidArgument, operation, message);
        match bias {
            Some(bias) if epilogue.has_bias() => {
                stream.check_here(operation, &bias)?;
                if bias.len < shape.m {
                    return Err(invalid(format!(
                        "the bias has {}, D has {}",
                        counted(bias.len, "value"),
                        counted(shape.m, "row")
                    ))
                    .with_hint("a bias has one value for each row of D"));
                }
                let written = shape.extents(operation)?.c * of_result.bytes();
                if d.overlaps(written, &bias, shape.m * of_result.bytes()) {
                    return Err(invalid("D overlaps the bias".to_owned()).with_hint("write to a buffer of its own"));
                }
                Ok(())
            }
            None if epilogue.has_bias() => Err(invalid(format!("the epilogue {epilogue:?} needs a bias"))
                .with_hint("pass one value for each row of D")),
            Some(_) => Err(invalid(format!("the epilogue {epilogue:?} takes no bias")).with_hint("pass `None`")),
            None => Ok(()),
        }
    }
}

/// Notes that a stream uses these blocks.
#[inline(always)]
pub(crate) fn note_uses<const N: usize>(stream: &Arc<StreamCore>, blocks: &[&Arc<DeviceBlock>; N]) -> Result<Noted> {
    if blocks.iter().any(|block| !block.is_noted(stream)) {
        return note_anew(stream, blocks);
    }
    Ok(Noted::Ordered)
}

#[cold]
#[inline(never)]
fn note_anew(stream: &Arc<StreamCore>, blocks: &[&Arc<DeviceBlock>]) -> Result<Noted> {
    blocks.iter().try_fold(Noted::Ordered, |noted, block| block.note_use(stream).map(|other| noted.and(other)))
}

/// Keeps the blocks of a product that is recorded.
#[cold]
#[inline(never)]
pub(crate) fn keep_recorded(
    operation: &'static str,
    submission: &mut SubmissionGuard<'_>,
    noted: Noted,
    blocks: &[&Arc<DeviceBlock>],
) -> Result<()> {
    submission.keep_device(operation, noted, blocks)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::ManualBackend;
    use crate::{Capabilities, DeviceBuffer, Runtime, StridedBatch};

    /// Sizes in a range that is right for most shapes, and those at which a number could overflow.
    fn size(usual: std::ops::Range<usize>) -> impl Strategy<Value = usize> {
        let huge = prop::sample::select(vec![0, (1 << 31) - 1, 1 << 31, 1 << 32, usize::MAX >> 1, usize::MAX]);
        prop_oneof![20 => usual, 1 => huge]
    }

    fn transpose() -> impl Strategy<Value = Transpose> {
        prop::sample::select(vec![Transpose::No, Transpose::Yes])
    }

    fn data_type() -> impl Strategy<Value = DataType> {
        prop::sample::select(vec![DataType::F16, DataType::Bf16, DataType::F32, DataType::F64])
    }

    prop_compose! {
        fn shape()(
            types in prop_oneof![
                data_type().prop_map(|data_type| (data_type, data_type)),
                (prop::sample::select(vec![DataType::F16, DataType::Bf16]), Just(DataType::F32)),
                (data_type(), data_type()),
            ],
            transposes in (transpose(), transpose()),
            sizes in [size(1..6), size(1..6), size(1..6), size(4..8), size(4..8), size(4..8)],
            batch in prop::option::weighted(0.1, 0_usize..3),
        ) -> GemmShape {
            let [m, n, k, lda, ldb, ldc] = sizes;
            let mut shape = GemmShape::new(types.0, m, n, k).with_output(types.1).with_leading_dimensions(lda, ldb, ldc);
            (shape.transpose_a, shape.transpose_b) = transposes;
            shape.batch = batch.map(|count| StridedBatch { count, stride_a: 40, stride_b: 40, stride_c: 40 });
            shape
        }
    }

    /// A stream, a buffer of its runtime, and one of another.
    struct Rig(Stream, [DeviceBuffer<u8>; 2]);

    const BYTES: usize = 1000;

    impl Rig {
        fn new(has_mixed: bool) -> Self {
            let can = |capabilities: &mut Capabilities| {
                (capabilities.gemm_f64, capabilities.gemm_bf16, capabilities.strided_batch) = (true, true, true);
                capabilities.gemm_mixed = has_mixed;
            };
            let [ours, other] =
                [(); 2].map(|()| Runtime::new(ManualBackend::with_capabilities(can)).unwrap().device(0).unwrap());
            Self(ours.create_stream().unwrap(), [ours, other].map(|device| device.allocate(BYTES).unwrap()))
        }
    }

    thread_local! {
        static RIGS: [Rig; 2] = [Rig::new(false), Rig::new(true)];
    }

    #[test]
    fn a_c_whose_bytes_cannot_be_counted_is_refused() {
        RIGS.with(|[Rig(stream, buffers), _]| {
            // The columns of 8 bytes each exceed the address space, and their number of bytes wraps to few.
            let (n, ldc) = ((1 << 30) + 2, (1 << 31) - 1);
            for data_type in [DataType::F64, DataType::F32] {
                let shape = GemmShape::new(data_type, 1, n, 1).with_leading_dimensions(1, 1, ldc);
                let [ours, other] = [0, 512].map(|at| DeviceSlice::from(&buffers[0]).untyped().ptr.offset(at));
                let product = Product {
                    operation: "gemm",
                    gemm: Gemm::new(shape, ours, ours, other),
                    blocks: [DeviceSlice::from(&buffers[0]).untyped().block; 3],
                    // The factors are large enough.
                    lens: [1, n, BYTES],
                    types: [data_type; 2],
                };
                assert!(!product.is_plain(stream));
                assert_eq!(product.check(stream).unwrap_err().kind(), ErrorKind::InvalidArgument);
            }
        });
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_product_of_usual_size_is_plain_if_nothing_is_wrong_with_it(
            shape in shape(),
            types in prop::option::weighted(0.1, [data_type(), data_type()]),
            places in [0_usize..10, 0_usize..10, 0_usize..10],
            lens in [15_usize..60, 15_usize..60, 15_usize..60],
            foreign in prop::option::weighted(0.05, 0_usize..3),
            has_mixed in any::<bool>(),
        ) {
            RIGS.with(|rigs| {
                let Rig(stream, buffers) = &rigs[usize::from(has_mixed)];
                let slices: [_; 3] = std::array::from_fn(|i| {
                    DeviceSlice::from(&buffers[usize::from(foreign == Some(i))]).untyped()
                });
                let [a, b, c] = std::array::from_fn(|i| slices[i].ptr.offset(places[i] * 32));
                let product = Product {
                    operation: "gemm",
                    gemm: Gemm::new(shape, a, b, c),
                    blocks: slices.map(|slice| slice.block),
                    lens,
                    types: types.unwrap_or([shape.data_type, shape.output]),
                };
                let GemmShape { m, n, k, lda, ldb, ldc, batch, .. } = shape;
                let sizes = [m, n, k, lda, ldb, ldc];
                let usual = batch.is_none() && m > 0 && n > 0 && k > 0 && sizes.iter().all(|&size| size < 1 << 31);
                let fine = product.look_closely(stream);
                prop_assert_eq!(product.is_plain(stream), fine.is_ok() && usual, "{:?}", fine);
                Ok(())
            })?;
        }
    }
}
