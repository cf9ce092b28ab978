//! Products of random shapes and values, and products with NaN and infinity.
//!
//! A failure describes the random product in full and names the seed of the run. The environment variable
//! `HIGHWATER_CONFORMANCE_SEED` makes a run draw the same products again.

use highwater_hal::numbers::Coded;
use highwater_hal::{Backend, BlasKind, DataType, Epilogue, GemmShape, PlanOptions, StridedBatch};

use crate::case::{CaseResult, cases};
use crate::device::{Block, DEVICE, Handle, Stream};
use crate::matrix::{Operand, Product, Types};
use crate::random::Random;
use crate::seed::with_seed;

cases! {
    group "arithmetic";
    random_products_are_right_f32: ["gemm.value", "gemm.transpose", "gemm.leading-dimension", "gemm.beta"]
        needs [has::gemm_f32] => random_products(Types::F32);
    random_products_are_right_f64: ["gemm.value", "gemm.transpose", "gemm.leading-dimension", "gemm.beta"]
        needs [has::gemm_f64] => random_products(Types::F64);
    random_products_are_right_f16: ["gemm.value", "gemm.transpose", "gemm.leading-dimension", "gemm.beta"]
        needs [has::gemm_f16] => random_products(Types::F16);
    random_products_are_right_bf16: ["gemm.value", "gemm.transpose", "gemm.leading-dimension", "gemm.beta"]
        needs [has::gemm_bf16] => random_products(Types::BF16);
    random_products_are_right_f16_to_f32: ["gemm.mixed", "gemm.value"]
        needs [has::gemm_f16, has::gemm_mixed] => random_products(Types::F16_TO_F32);
    random_products_are_right_bf16_to_f32: ["gemm.mixed", "gemm.value"]
        needs [has::gemm_bf16, has::gemm_mixed] => random_products(Types::BF16_TO_F32);
    random_plans_are_right_f32: ["plan.value", "plan.epilogue"]
        needs [has::gemm_f32, has::lt_plans] => random_plans(Types::F32);
    random_plans_are_right_f16: ["plan.value", "plan.epilogue"]
        needs [has::gemm_f16, has::lt_plans] => random_plans(Types::F16);
    random_plans_are_right_bf16: ["plan.value", "plan.epilogue"]
        needs [has::gemm_bf16, has::lt_plans] => random_plans(Types::BF16);
    what_is_no_number_goes_where_it_enters_f32: ["gemm.value"] needs [has::gemm_f32] => special(Types::F32, NO_NUMBER);
    what_is_no_number_goes_where_it_enters_f64: ["gemm.value"] needs [has::gemm_f64] => special(Types::F64, NO_NUMBER);
    what_is_no_number_goes_where_it_enters_f16: ["gemm.value"] needs [has::gemm_f16] => special(Types::F16, NO_NUMBER);
    what_is_no_number_goes_where_it_enters_bf16: ["gemm.value"] needs [has::gemm_bf16] => special(Types::BF16, NO_NUMBER);
    what_is_no_number_goes_where_it_enters_f16_to_f32: ["gemm.mixed", "gemm.value"]
        needs [has::gemm_f16, has::gemm_mixed] => special(Types::F16_TO_F32, NO_NUMBER);
    infinity_goes_where_it_enters_f32: ["gemm.value"] needs [has::gemm_f32] => special(Types::F32, INFINITE);
    infinity_goes_where_it_enters_f64: ["gemm.value"] needs [has::gemm_f64] => special(Types::F64, INFINITE);
    infinity_goes_where_it_enters_f16: ["gemm.value"] needs [has::gemm_f16] => special(Types::F16, INFINITE);
    infinity_goes_where_it_enters_bf16: ["gemm.value"] needs [has::gemm_bf16] => special(Types::BF16, INFINITE);
    empty_products_of_every_type_write_nothing: ["gemm.empty"];
}

fn below(random: &mut Random, limit: usize) -> usize {
    (random.next() % limit as u64) as usize
}

/// Returns one of the values.
fn one_of<T: Copy>(random: &mut Random, values: &[T]) -> T {
    values[below(random, values.len())]
}

/// Draws a shape: each factor transposed or not, with gaps or not, alone or in a batch.
fn shape(random: &mut Random, types: Types, batched: bool) -> GemmShape {
    // Most sizes are small; a few exceed the tile of a kernel.
    let mut size = || if random.next().is_multiple_of(6) { 1 + below(random, 150) } else { 1 + below(random, 40) };
    let (m, n, k) = (size(), size(), size());
    let mut shape = types.shape(m, n, k);
    if random.next().is_multiple_of(2) {
        shape = shape.with_transposed_a();
    }
    if random.next().is_multiple_of(2) {
        shape = shape.with_transposed_b();
    }
    if random.next().is_multiple_of(2) {
        let mut gap = || below(random, 9);
        shape = shape.with_leading_dimensions(shape.lda + gap(), shape.ldb + gap(), shape.ldc + gap());
    }
    if batched && random.next().is_multiple_of(4) {
        let one = shape.extents("conformance").expect("a drawn shape is valid");
        let count = 1 + below(random, 4);
        let (stride_a, stride_b) = (one.a + below(random, 20), one.b + below(random, 20));
        shape = shape.with_batch(StridedBatch { count, stride_a, stride_b, stride_c: one.c + below(random, 20) });
    }
    shape
}

/// Draws a factor that every type represents exactly, often 0 or 1.
fn scale(random: &mut Random) -> (f64, f64) {
    const FACTORS: [f64; 8] = [0.0, 1.0, 1.0, -1.0, 0.5, 2.0, -1.25, 3.5];
    let (alpha, beta) = (one_of(random, &FACTORS), one_of(random, &FACTORS));
    (alpha, beta)
}

fn random_products(backend: &dyn Backend, types: Types) -> CaseResult {
    const PRODUCTS: usize = 24;
    let batched = backend.capabilities(DEVICE)?.strided_batch;
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    with_seed(0x9e_3779, |random| {
        for _ in 0..PRODUCTS {
            let (alpha, beta) = scale(random);
            let mut product = Product::new(shape(random, types, batched), random.next()).with_scale(alpha, beta);
            if beta == 0.0 {
                product = product.with_nan_in_c();
            }
            if alpha == 0.0 {
                product = product.with_nan_in_factors();
            }
            product.prove(backend, &mut handle, &stream)?;
        }
        Ok(())
    })
}

fn random_plans(backend: &dyn Backend, types: Types) -> CaseResult {
    const PLANS: usize = 16;
    const WORKSPACE_BYTES: usize = 4 << 20;
    let workspace = Block::new(backend, WORKSPACE_BYTES)?;
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Lt, &stream)?;
    handle.offer_workspace(&workspace, 0..WORKSPACE_BYTES)?;
    with_seed(0x51_7cc1, |random| {
        for _ in 0..PLANS {
            let (alpha, beta) = scale(random);
            let product = Product::new(shape(random, types, false), random.next())
                .with_scale(alpha, beta)
                .with_epilogue(one_of(random, Epilogue::ALL));
            let options = PlanOptions::new(product.shape, product.epilogue(), WORKSPACE_BYTES);
            let plan = handle.raw_mut().create_plan(&options)?;
            let placed = product.place(backend)?;
            handle.run_plan(plan, &product.shape, (alpha, beta), placed.operands(), None, placed.bias.as_ref())?;
            stream.synchronize()?;
            handle.raw_mut().destroy_plan(plan)?;
            placed.check(&product)?;
        }
        Ok(())
    })
}

/// Puts a value into single elements of A, B and C, one after the other and all at once. Checks every element of C, both
/// those that depend on the value and those that do not.
fn special(backend: &dyn Backend, types: Types, values: [f64; 2]) -> CaseResult {
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    let [first, second] = values;
    let elements = [(Operand::A, 3, 2, first), (Operand::B, 1, 5, second), (Operand::C, 6, 7, first)];
    let apart = elements.map(|element| vec![element]);
    for elements in apart.into_iter().chain([elements.to_vec()]) {
        for (m, n, k) in [(20, 17, 9), (65, 40, 33)] {
            let shape = types.shape(m, n, k);
            for shape in [shape, shape.with_transposed_a(), shape.with_transposed_b()] {
                // With beta 0, no result depends on the element of C.
                for beta in [0.0, 0.5] {
                    let product = Product::new(shape, 171).with_scale(1.5, beta).with_elements(&elements);
                    product.prove(backend, &mut handle, &stream)?;
                }
            }
        }
    }
    Ok(())
}

const NO_NUMBER: [f64; 2] = [f64::NAN; 2];
const INFINITE: [f64; 2] = [f64::INFINITY, f64::NEG_INFINITY];

fn empty_products_of_every_type_write_nothing(backend: &dyn Backend) -> CaseResult {
    let capabilities = backend.capabilities(DEVICE)?;
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    for &factors in DataType::ALL {
        for types in [Types::of(factors, factors), Types::of(factors, DataType::F32)] {
            for (m, n, k) in [(0, 5, 5), (5, 0, 5), (0, 0, 5), (0, 5, 0), (5, 0, 0), (0, 0, 0)] {
                let shape = types.shape(m, n, k).with_leading_dimensions(8, 8, 8);
                if capabilities.check_product("conformance", &shape).is_ok() {
                    Product::new(shape, 181).with_scale(1.0, 0.5).prove(backend, &mut handle, &stream)?;
                }
            }
        }
    }
    Ok(())
}
