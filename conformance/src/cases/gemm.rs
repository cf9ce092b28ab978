//! Matrix products: values, shapes, factors, batches.

use highwater_hal::numbers::Coded;
use highwater_hal::{Backend, BlasKind, DataType, Epilogue, GemmShape, MathMode, PlanOptions, StridedBatch};

use crate::case::{CaseResult, cases, check, check_error};
use crate::device::{DEVICE, Event, Handle, Stream};
use crate::matrix::{Product, Types};
use crate::retry::{Attempt, until_conclusive};
use crate::stream_load::{Direction, StreamLoad};

cases! {
    group "gemm";
    multiplies_f32: ["gemm.value"] needs [has::gemm_f32] => prove(sizes(Types::F32));
    multiplies_f64: ["gemm.value"] needs [has::gemm_f64] => prove(sizes(Types::F64));
    multiplies_f16: ["gemm.value"] needs [has::gemm_f16] => prove(sizes(Types::F16));
    multiplies_bf16: ["gemm.value"] needs [has::gemm_bf16] => prove(sizes(Types::BF16));
    multiplies_larger_f32: ["gemm.value"] needs [has::gemm_f32];
    multiplies_larger_f64: ["gemm.value"] needs [has::gemm_f64];
    multiplies_larger_f16: ["gemm.value"] needs [has::gemm_f16];
    multiplies_larger_bf16: ["gemm.value"] needs [has::gemm_bf16];
    multiplies_tf32: ["gemm.value", "gemm.transpose"] needs [has::gemm_f32, has::tf32];
    multiplies_batches_tf32: ["gemm.strided-batch"] needs [has::gemm_f32, has::tf32, has::strided_batch];
    transposes_f32: ["gemm.transpose", "gemm.value"] needs [has::gemm_f32] => transposes(Types::F32);
    transposes_f64: ["gemm.transpose", "gemm.value"] needs [has::gemm_f64] => transposes(Types::F64);
    transposes_f16: ["gemm.transpose", "gemm.value"] needs [has::gemm_f16] => transposes(Types::F16);
    transposes_bf16: ["gemm.transpose", "gemm.value"] needs [has::gemm_bf16] => transposes(Types::BF16);
    keeps_the_gaps_of_leading_dimensions_f32: ["gemm.leading-dimension"] needs [has::gemm_f32] => keeps_gaps(Types::F32);
    keeps_the_gaps_of_leading_dimensions_f64: ["gemm.leading-dimension"] needs [has::gemm_f64] => keeps_gaps(Types::F64);
    keeps_the_gaps_of_leading_dimensions_f16: ["gemm.leading-dimension"] needs [has::gemm_f16] => keeps_gaps(Types::F16);
    keeps_the_gaps_of_leading_dimensions_bf16: ["gemm.leading-dimension"] needs [has::gemm_bf16] => keeps_gaps(Types::BF16);
    scales_the_product: ["gemm.value"] needs [has::gemm_f32];
    adds_the_old_c_f32: ["gemm.beta"] needs [has::gemm_f32] => adds_the_old_c(Types::F32);
    adds_the_old_c_f64: ["gemm.beta"] needs [has::gemm_f64] => adds_the_old_c(Types::F64);
    adds_the_old_c_f16: ["gemm.beta"] needs [has::gemm_f16] => adds_the_old_c(Types::F16);
    adds_the_old_c_bf16: ["gemm.beta"] needs [has::gemm_bf16] => adds_the_old_c(Types::BF16);
    ignores_the_old_c_with_beta_zero: ["gemm.beta-zero"] needs [has::gemm_f32] => ignores_nan_in_c(Types::F32);
    ignores_the_old_c_with_beta_zero_f64: ["gemm.beta-zero"] needs [has::gemm_f64] => ignores_nan_in_c(Types::F64);
    ignores_the_old_c_with_beta_zero_f16: ["gemm.beta-zero"] needs [has::gemm_f16] => ignores_nan_in_c(Types::F16);
    ignores_the_old_c_with_beta_zero_bf16: ["gemm.beta-zero"] needs [has::gemm_bf16] => ignores_nan_in_c(Types::BF16);
    ignores_the_factors_with_alpha_zero: ["gemm.alpha-zero", "gemm.beta"]
        needs [has::gemm_f32] => ignores_the_factors(Types::F32);
    ignores_the_factors_with_alpha_zero_f64: ["gemm.alpha-zero", "gemm.beta"]
        needs [has::gemm_f64] => ignores_the_factors(Types::F64);
    ignores_the_factors_with_alpha_zero_f16: ["gemm.alpha-zero", "gemm.beta"]
        needs [has::gemm_f16] => ignores_the_factors(Types::F16);
    ignores_the_factors_with_alpha_zero_bf16: ["gemm.alpha-zero", "gemm.beta"]
        needs [has::gemm_bf16] => ignores_the_factors(Types::BF16);
    ignores_the_factors_with_k_zero: ["gemm.alpha-zero", "gemm.beta"] needs [has::gemm_f32];
    writes_zeros_with_alpha_and_beta_zero: ["gemm.alpha-zero", "gemm.beta-zero"] needs [has::gemm_f32];
    writes_nothing_for_empty_products: ["gemm.empty"] needs [has::gemm_f32];
    writes_nothing_for_empty_batches: ["gemm.empty"] needs [has::gemm_f32, has::strided_batch];
    multiplies_batches_f32: ["gemm.strided-batch"] needs [has::gemm_f32, has::strided_batch] => multiplies_batches(Types::F32);
    multiplies_batches_f64: ["gemm.strided-batch"] needs [has::gemm_f64, has::strided_batch] => multiplies_batches(Types::F64);
    multiplies_batches_f16: ["gemm.strided-batch"] needs [has::gemm_f16, has::strided_batch] => multiplies_batches(Types::F16);
    multiplies_batches_bf16: ["gemm.strided-batch"]
        needs [has::gemm_bf16, has::strided_batch] => multiplies_batches(Types::BF16);
    accumulates_halves_in_single_precision: ["gemm.value"] needs [has::gemm_f16] => accumulates(Types::F16);
    accumulates_bfloats_in_single_precision: ["gemm.value"] needs [has::gemm_bf16] => accumulates(Types::BF16);
    multiplies_f16_to_f32: ["gemm.mixed", "gemm.value"]
        needs [has::gemm_f16, has::gemm_mixed] => prove(sizes(Types::F16_TO_F32));
    multiplies_bf16_to_f32: ["gemm.mixed", "gemm.value"]
        needs [has::gemm_bf16, has::gemm_mixed] => prove(sizes(Types::BF16_TO_F32));
    multiplies_larger_f16_to_f32: ["gemm.mixed", "gemm.value"]
        needs [has::gemm_f16, has::gemm_mixed] => multiplies_larger_mixed(Types::F16_TO_F32);
    multiplies_larger_bf16_to_f32: ["gemm.mixed", "gemm.value"]
        needs [has::gemm_bf16, has::gemm_mixed] => multiplies_larger_mixed(Types::BF16_TO_F32);
    transposes_f16_to_f32: ["gemm.mixed", "gemm.transpose"]
        needs [has::gemm_f16, has::gemm_mixed] => transposes(Types::F16_TO_F32);
    transposes_bf16_to_f32: ["gemm.mixed", "gemm.transpose"]
        needs [has::gemm_bf16, has::gemm_mixed] => transposes(Types::BF16_TO_F32);
    keeps_the_gaps_of_leading_dimensions_f16_to_f32: ["gemm.mixed", "gemm.leading-dimension"]
        needs [has::gemm_f16, has::gemm_mixed] => keeps_gaps(Types::F16_TO_F32);
    keeps_the_gaps_of_leading_dimensions_bf16_to_f32: ["gemm.mixed", "gemm.leading-dimension"]
        needs [has::gemm_bf16, has::gemm_mixed] => keeps_gaps(Types::BF16_TO_F32);
    adds_the_old_c_f16_to_f32: ["gemm.mixed", "gemm.beta"]
        needs [has::gemm_f16, has::gemm_mixed] => adds_the_old_c(Types::F16_TO_F32);
    adds_the_old_c_bf16_to_f32: ["gemm.mixed", "gemm.beta"]
        needs [has::gemm_bf16, has::gemm_mixed] => adds_the_old_c(Types::BF16_TO_F32);
    ignores_the_old_c_with_beta_zero_f16_to_f32: ["gemm.mixed", "gemm.beta-zero"]
        needs [has::gemm_f16, has::gemm_mixed] => ignores_nan_in_c(Types::F16_TO_F32);
    ignores_the_old_c_with_beta_zero_bf16_to_f32: ["gemm.mixed", "gemm.beta-zero"]
        needs [has::gemm_bf16, has::gemm_mixed] => ignores_nan_in_c(Types::BF16_TO_F32);
    ignores_the_factors_with_alpha_zero_f16_to_f32: ["gemm.mixed", "gemm.alpha-zero"]
        needs [has::gemm_f16, has::gemm_mixed] => ignores_the_factors(Types::F16_TO_F32);
    ignores_the_factors_with_alpha_zero_bf16_to_f32: ["gemm.mixed", "gemm.alpha-zero"]
        needs [has::gemm_bf16, has::gemm_mixed] => ignores_the_factors(Types::BF16_TO_F32);
    multiplies_batches_f16_to_f32: ["gemm.mixed", "gemm.strided-batch"]
        needs [has::gemm_f16, has::gemm_mixed, has::strided_batch] => multiplies_batches(Types::F16_TO_F32);
    multiplies_batches_bf16_to_f32: ["gemm.mixed", "gemm.strided-batch"]
        needs [has::gemm_bf16, has::gemm_mixed, has::strided_batch] => multiplies_batches(Types::BF16_TO_F32);
    stores_more_than_the_factors_type_holds_f16_to_f32: ["gemm.mixed", "gemm.value"]
        needs [has::gemm_f16, has::gemm_mixed] => stores_more_than_factors_hold(Types::F16_TO_F32);
    stores_more_than_the_factors_type_holds_bf16_to_f32: ["gemm.mixed", "gemm.value"]
        needs [has::gemm_bf16, has::gemm_mixed] => stores_more_than_factors_hold(Types::BF16_TO_F32);
    other_pairs_of_types_are_refused: ["gemm.mixed-pairs"];
    multiplies_batches_side_by_side: ["gemm.strided-batch", "gemm.leading-dimension"] needs [has::gemm_f32, has::strided_batch];
    shares_factors_in_a_batch: ["gemm.strided-batch"] needs [has::gemm_f32, has::strided_batch];
    multiplies_transposed_batches_with_gaps: ["gemm.strided-batch", "gemm.transpose", "gemm.leading-dimension"]
        needs [has::gemm_f32, has::strided_batch];
    returns_at_once: ["gemm.asynchronous"] needs [has::gemm_f32];
}

/// Sizes (m, n, k) around the borders of kernels' tiles.
const SIZES: [(usize, usize, usize); 10] = [
    (1, 1, 1),
    (2, 3, 4),
    (1, 17, 5),
    (17, 1, 5),
    (16, 16, 16),
    (31, 33, 32),
    (33, 31, 65),
    (64, 1, 64),
    (5, 7, 200),
    (64, 48, 32),
];

/// Runs and checks products with a handle that uses its own workspace.
fn prove(backend: &dyn Backend, products: impl IntoIterator<Item = Product>) -> CaseResult {
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    for product in products {
        product.prove(backend, &mut handle, &stream)?;
    }
    Ok(())
}

/// Runs products of every size of [`SIZES`].
fn sizes(types: Types) -> impl Iterator<Item = Product> {
    let shape = move |(m, n, k)| types.shape(m, n, k);
    SIZES.into_iter().enumerate().map(move |(seed, size)| Product::new(shape(size), seed as u64))
}

/// Returns the four combinations of transposed factors of one product.
fn transposed(shape: GemmShape) -> [GemmShape; 4] {
    [shape, shape.with_transposed_a(), shape.with_transposed_b(), shape.with_transposed_a().with_transposed_b()]
}

/// Returns the same shape with gaps in each matrix.
fn padded(shape: GemmShape) -> GemmShape {
    shape.with_leading_dimensions(shape.lda + 3, shape.ldb + 8, shape.ldc + 5)
}

fn multiplies_larger_f32(backend: &dyn Backend) -> CaseResult {
    prove(backend, [Product::new(GemmShape::new(DataType::F32, 130, 117, 150), 21).with_scale(0.7, -1.3)])
}

fn multiplies_larger_f64(backend: &dyn Backend) -> CaseResult {
    prove(backend, [Product::new(GemmShape::new(DataType::F64, 117, 130, 150), 22).with_scale(0.7, -1.3)])
}

fn multiplies_larger_f16(backend: &dyn Backend) -> CaseResult {
    prove(backend, [Product::new(GemmShape::new(DataType::F16, 130, 117, 150), 23).with_scale(0.75, -1.25)])
}

fn multiplies_larger_bf16(backend: &dyn Backend) -> CaseResult {
    prove(backend, [Product::new(GemmShape::new(DataType::Bf16, 117, 130, 150), 24).with_scale(0.75, -1.25)])
}

/// Sums that a half type cannot represent in steps of one. A product that adds in the type itself stops growing.
fn accumulates(backend: &dyn Backend, types: Types) -> CaseResult {
    let shape = types.shape(8, 5, 8192);
    prove(backend, [Product::new(shape, 25).with_ones_in_factors(), Product::new(shape, 26)])
}

/// Runs and checks 32-bit products of factors that may be rounded to TF32.
fn prove_tf32(backend: &dyn Backend, products: impl IntoIterator<Item = Product>) -> CaseResult {
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    handle.raw_mut().set_math_mode(MathMode::Tf32)?;
    products.into_iter().try_for_each(|product| product.with_tf32().prove(backend, &mut handle, &stream))
}

fn multiplies_tf32(backend: &dyn Backend) -> CaseResult {
    let shapes = [(17, 9, 33), (64, 64, 8), (65, 3, 20)].map(|(m, n, k)| GemmShape::new(DataType::F32, m, n, k));
    let transposed = shapes.into_iter().flat_map(transposed).map(padded);
    let scaled = transposed.map(|shape| Product::new(shape, 27).with_scale(1.5, -0.5));
    prove_tf32(backend, sizes(Types::F32).chain(scaled))
}

fn multiplies_batches_tf32(backend: &dyn Backend) -> CaseResult {
    let shapes = batches(GemmShape::new(DataType::F32, 16, 20, 24));
    prove_tf32(backend, shapes.map(|shape| Product::new(shape, 28)))
}

fn transposes(backend: &dyn Backend, types: Types) -> CaseResult {
    // Square factors too: if a matrix can be mistaken for its transpose, only the values show it.
    let sizes = [(17, 9, 33), (4, 64, 8), (65, 3, 20), (24, 24, 24), (20, 7, 20), (7, 20, 20)];
    let shapes = sizes.map(|(m, n, k)| types.shape(m, n, k));
    prove(backend, shapes.into_iter().flat_map(transposed).map(|shape| Product::new(shape, 31)))
}

fn keeps_gaps(backend: &dyn Backend, types: Types) -> CaseResult {
    let shapes = [(13, 6, 10), (1, 20, 3), (32, 32, 32)].map(|(m, n, k)| types.shape(m, n, k));
    let shapes = shapes.into_iter().flat_map(transposed).map(padded);
    prove(backend, shapes.flat_map(|shape| [0.0, 0.5].map(|beta| Product::new(shape, 41).with_scale(1.5, beta))))
}

fn scales_the_product(backend: &dyn Backend) -> CaseResult {
    let shape = GemmShape::new(DataType::F32, 20, 30, 40);
    prove(backend, [-1.0, 0.3, 2.0, 1e-3, 1e6].map(|alpha| Product::new(shape, 51).with_scale(alpha, 0.0)))
}

fn adds_the_old_c(backend: &dyn Backend, types: Types) -> CaseResult {
    let shape = types.shape(19, 27, 11);
    let scales = [(1.0, 1.0), (1.0, -1.0), (0.5, 0.3), (-2.0, 1e3)];
    prove(backend, scales.map(|(alpha, beta)| Product::new(shape, 61).with_scale(alpha, beta)))
}

fn ignores_nan_in_c(backend: &dyn Backend, types: Types) -> CaseResult {
    let shapes = transposed(types.shape(12, 33, 7)).map(padded);
    let products = |beta: f64| shapes.map(|shape| Product::new(shape, 71).with_scale(1.25, beta).with_nan_in_c());
    prove(backend, [0.0, -0.0].into_iter().flat_map(products))
}

fn ignores_the_factors(backend: &dyn Backend, types: Types) -> CaseResult {
    let shape = types.shape(15, 14, 13);
    let scales = [(0.0, 1.0), (0.0, -0.5), (0.0, 3.0), (-0.0, 1.0)];
    prove(backend, scales.map(|(alpha, beta)| Product::new(shape, 81).with_scale(alpha, beta).with_nan_in_factors()))
}

fn ignores_the_factors_with_k_zero(backend: &dyn Backend) -> CaseResult {
    let shapes = transposed(GemmShape::new(DataType::F32, 9, 10, 0));
    prove(
        backend,
        shapes.into_iter().flat_map(|shape| [1.0, 0.5, 0.0].map(|beta| Product::new(shape, 91).with_scale(2.0, beta))),
    )
}

fn writes_zeros_with_alpha_and_beta_zero(backend: &dyn Backend) -> CaseResult {
    let shape = padded(GemmShape::new(DataType::F32, 15, 14, 13));
    prove(backend, [Product::new(shape, 101).with_scale(0.0, 0.0).with_nan_in_c().with_nan_in_factors()])
}

fn writes_nothing_for_empty_products(backend: &dyn Backend) -> CaseResult {
    // Beta would scale C if C had elements. The memory at C's address is guard bytes.
    let sizes = [(0, 5, 5), (5, 0, 5), (0, 0, 5), (0, 5, 0), (5, 0, 0), (0, 0, 0)];
    let shapes = sizes.map(|(m, n, k)| GemmShape::new(DataType::F32, m, n, k).with_leading_dimensions(8, 8, 8));
    prove(backend, shapes.map(|shape| Product::new(shape, 111).with_scale(1.0, 0.5)))
}

fn writes_nothing_for_empty_batches(backend: &dyn Backend) -> CaseResult {
    let batch = StridedBatch { count: 0, stride_a: 20, stride_b: 30, stride_c: 40 };
    prove(backend, [Product::new(GemmShape::new(DataType::F32, 4, 5, 6).with_batch(batch), 112)])
}

/// Batches of three sizes with gaps between the matrices.
fn batches(shape: GemmShape) -> [GemmShape; 3] {
    let one = shape.extents("conformance").expect("a valid shape");
    [(1, 0), (3, 0), (8, 11)].map(|(count, gap)| {
        let (stride_a, stride_b, stride_c) = (one.a + gap, one.b + 2 * gap, one.c + gap);
        shape.with_batch(StridedBatch { count, stride_a, stride_b, stride_c })
    })
}

fn multiplies_batches(backend: &dyn Backend, types: Types) -> CaseResult {
    let shapes = [(5, 6, 7), (16, 16, 16), (33, 2, 9)].map(|(m, n, k)| types.shape(m, n, k));
    let shapes = shapes.into_iter().flat_map(batches);
    prove(backend, shapes.flat_map(|shape| [0.0, 0.75].map(|beta| Product::new(shape, 121).with_scale(1.5, beta))))
}

/// Each column of the second C follows the same column of the first, and so on.
fn multiplies_batches_side_by_side(backend: &dyn Backend) -> CaseResult {
    let shape = GemmShape::new(DataType::F32, 9, 10, 11);
    prove(
        backend,
        [9, 12].map(|stride_c| {
            let batch = StridedBatch { count: 4, stride_a: 99, stride_b: 110, stride_c };
            let shape = shape.with_leading_dimensions(9, 11, 4 * stride_c).with_batch(batch);
            Product::new(shape, 132).with_scale(1.5, -0.5)
        }),
    )
}

fn shares_factors_in_a_batch(backend: &dyn Backend) -> CaseResult {
    let shape = GemmShape::new(DataType::F32, 12, 10, 8);
    let strides = [(0, 80), (96, 0), (0, 0)];
    prove(
        backend,
        strides.map(|(stride_a, stride_b)| {
            Product::new(shape.with_batch(StridedBatch { count: 5, stride_a, stride_b, stride_c: 120 }), 131)
        }),
    )
}

fn multiplies_transposed_batches_with_gaps(backend: &dyn Backend) -> CaseResult {
    let shapes = transposed(GemmShape::new(DataType::F32, 9, 14, 6)).map(padded);
    prove(backend, shapes.into_iter().flat_map(batches).map(|shape| Product::new(shape, 141).with_scale(-1.0, 0.5)))
}

fn returns_at_once(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let (stream, before) = (Stream::new(backend)?, Event::new(backend)?);
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    let product = Product::new(GemmShape::new(DataType::F32, 64, 64, 64), 151);
    let placed = product.place(backend)?;
    // The first product may load kernels, which this case does not measure.
    placed.gemm(&product, &mut handle)?;
    stream.synchronize()?;
    until_conclusive("a product waits for the work before it", |load| {
        busy.enqueue(&stream, load)?;
        stream.record(&before)?;
        placed.gemm(&product, &mut handle)?;
        let outstanding = before.is_pending()?;
        stream.synchronize()?;
        check!(stream.query()?.is_complete(), "the stream is pending after it was synchronized");
        placed.check(&product)?;
        Ok(Attempt::seen(outstanding))
    })
}

fn multiplies_larger_mixed(backend: &dyn Backend, types: Types) -> CaseResult {
    let shapes = transposed(types.shape(130, 117, 150)).into_iter().chain(transposed(types.shape(128, 64, 256)));
    prove(backend, shapes.map(|shape| Product::new(shape, 29).with_scale(0.7, -1.3)))
}

/// Sums that are too long for the factors' types and too large for half precision.
fn stores_more_than_factors_hold(backend: &dyn Backend, types: Types) -> CaseResult {
    let odd = Product::new(types.shape(8, 5, 4099), 161).with_ones_in_factors();
    let large = Product::new(types.shape(16, 8, 64), 162).with_ones_in_factors().with_scale(2048.25, 0.0);
    prove(backend, [odd, large, Product::new(types.shape(8, 5, 8192), 163).with_scale(1.0, 1.0)])
}

fn other_pairs_of_types_are_refused(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let mut blas = Handle::new(backend, BlasKind::Blas, &stream)?;
    let mut lt = match backend.capabilities(DEVICE)?.lt_plans {
        true => Some(Handle::new(backend, BlasKind::Lt, &stream)?),
        false => None,
    };
    for &factor in DataType::ALL {
        for &result in DataType::ALL {
            let widened = matches!(factor, DataType::F16 | DataType::Bf16) && result == DataType::F32;
            if factor == result || widened {
                continue;
            }
            let shape = GemmShape::new(factor, 8, 8, 8).with_output(result);
            let placed = Product::new(shape, 164).place(backend)?;
            let before = placed.c.read()?;
            let product = Product::new(shape, 164);
            check_error!(placed.gemm(&product, &mut blas), Unsupported, "gemm of {factor:?} to {result:?}");
            if let Some(lt) = &mut lt {
                let made = lt.raw_mut().create_plan(&PlanOptions::new(shape, Epilogue::None, 0));
                check_error!(made, Unsupported, "create_plan for {factor:?} to {result:?}");
            }
            stream.synchronize()?;
            check!(placed.c.read()? == before, "a refused product of {factor:?} to {result:?} wrote to C");
        }
    }
    Ok(())
}
