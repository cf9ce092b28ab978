//! Lt plans: products with epilogues.

use highwater_hal::numbers::Coded;
use highwater_hal::{
    AtomicsMode, Backend, BlasKind, DataType, Epilogue, GemmShape, MathMode, PlanArguments, PlanId, PlanOptions,
    StridedBatch,
};

use crate::case::{CaseResult, Failure, cases, check, check_error};
use crate::device::{Block, DEVICE, Event, Handle, Stream};
use crate::matrix::{GUARD_BYTES, Product, Types};
use crate::retry::{Attempt, until_conclusive};
use crate::stream_load::{Direction, StreamLoad};

cases! {
    group "plans";
    multiply_f32: ["plan.value"] needs [has::lt_plans, has::gemm_f32];
    multiply_f64: ["plan.value"] needs [has::lt_plans, has::gemm_f64];
    add_the_old_c: ["plan.value"] needs [has::lt_plans, has::gemm_f32];
    write_to_another_matrix_than_c: ["plan.value"] needs [has::lt_plans, has::gemm_f32] => write_elsewhere(Types::F32);
    multiply_batches: ["plan.value"] needs [has::lt_plans, has::gemm_f32, has::strided_batch];
    add_a_bias: ["plan.epilogue"] needs [has::lt_plans, has::gemm_f32] => prove(followed_by(Types::F32, Epilogue::Bias));
    add_a_bias_and_clamp: ["plan.epilogue"]
        needs [has::lt_plans, has::gemm_f32] => prove(followed_by(Types::F32, Epilogue::BiasRelu));
    clamp: ["plan.epilogue"] needs [has::lt_plans, has::gemm_f32] => prove(followed_by(Types::F32, Epilogue::Relu));
    apply_gelu: ["plan.epilogue"] needs [has::lt_plans, has::gemm_f32] => prove(followed_by(Types::F32, Epilogue::Gelu));
    add_a_bias_and_apply_gelu: ["plan.epilogue"]
        needs [has::lt_plans, has::gemm_f32] => prove(followed_by(Types::F32, Epilogue::BiasGelu));
    multiply_f16_with_every_epilogue: ["plan.value", "plan.epilogue"]
        needs [has::lt_plans, has::gemm_f16] => every_epilogue(Types::F16);
    multiply_bf16_with_every_epilogue: ["plan.value", "plan.epilogue"]
        needs [has::lt_plans, has::gemm_bf16] => every_epilogue(Types::BF16);
    multiply_with_every_epilogue_from_f16_to_f32: ["plan.mixed", "plan.value", "plan.epilogue"]
        needs [has::gemm_f16, has::gemm_mixed, has::lt_plans] => every_epilogue(Types::F16_TO_F32);
    multiply_with_every_epilogue_from_bf16_to_f32: ["plan.mixed", "plan.value", "plan.epilogue"]
        needs [has::gemm_bf16, has::gemm_mixed, has::lt_plans] => every_epilogue(Types::BF16_TO_F32);
    add_a_bias_to_every_product_of_a_batch_from_f16_to_f32: ["plan.mixed", "plan.epilogue"]
        needs [has::gemm_f16, has::gemm_mixed, has::lt_plans, has::strided_batch] => add_a_bias_to_a_batch(Types::F16_TO_F32);
    add_a_bias_to_every_product_of_a_batch_from_bf16_to_f32: ["plan.mixed", "plan.epilogue"]
        needs [has::gemm_bf16, has::gemm_mixed, has::lt_plans, has::strided_batch] => add_a_bias_to_a_batch(Types::BF16_TO_F32);
    write_to_another_matrix_than_c_from_f16_to_f32: ["plan.mixed"]
        needs [has::gemm_f16, has::gemm_mixed, has::lt_plans] => write_elsewhere(Types::F16_TO_F32);
    write_to_another_matrix_than_c_from_bf16_to_f32: ["plan.mixed"]
        needs [has::gemm_bf16, has::gemm_mixed, has::lt_plans] => write_elsewhere(Types::BF16_TO_F32);
    refuse_results_between_their_elements_from_f16_to_f32: ["plan.mixed", "plan.alignment"]
        needs [has::gemm_f16, has::gemm_mixed, has::lt_plans] => refuse_results_between_elements(Types::F16_TO_F32);
    refuse_results_between_their_elements_from_bf16_to_f32: ["plan.mixed", "plan.alignment"]
        needs [has::gemm_bf16, has::gemm_mixed, has::lt_plans] => refuse_results_between_elements(Types::BF16_TO_F32);
    add_a_bias_to_every_product_of_a_batch: ["plan.epilogue"]
        needs [has::lt_plans, has::gemm_f32, has::strided_batch] => add_a_bias_to_a_batch(Types::F32);
    ignore_the_factors_with_alpha_zero: ["plan.alpha-zero"] needs [has::lt_plans, has::gemm_f32];
    ignore_the_factors_with_alpha_zero_f64: ["plan.alpha-zero"]
        needs [has::lt_plans, has::gemm_f64] => ignore_the_factors(Types::F64);
    ignore_the_factors_with_alpha_zero_f16: ["plan.alpha-zero"]
        needs [has::lt_plans, has::gemm_f16] => ignore_the_factors(Types::F16);
    ignore_the_factors_with_alpha_zero_bf16: ["plan.alpha-zero"]
        needs [has::lt_plans, has::gemm_bf16] => ignore_the_factors(Types::BF16);
    ignore_the_factors_with_alpha_zero_f16_to_f32: ["plan.alpha-zero", "plan.mixed"]
        needs [has::gemm_f16, has::gemm_mixed, has::lt_plans] => ignore_the_factors(Types::F16_TO_F32);
    ignore_the_factors_with_alpha_zero_bf16_to_f32: ["plan.alpha-zero", "plan.mixed"]
        needs [has::gemm_bf16, has::gemm_mixed, has::lt_plans] => ignore_the_factors(Types::BF16_TO_F32);
    ignore_the_factors_of_a_batch_with_alpha_zero: ["plan.alpha-zero"] needs [has::lt_plans, has::gemm_f32, has::strided_batch];
    apply_their_epilogue_with_k_zero: ["plan.alpha-zero"] needs [has::lt_plans, has::gemm_f32];
    apply_their_epilogue_with_k_zero_f16: ["plan.alpha-zero"] needs [has::lt_plans, has::gemm_f16];
    run_with_alpha_zero_and_without_a_workspace: ["plan.alpha-zero"] needs [has::lt_plans, has::gemm_f32];
    equal_runs_give_equal_bits: ["blas.deterministic"] needs [has::lt_plans, has::gemm_f32] => equal_bits(Types::F32);
    equal_runs_give_equal_bits_from_bf16_to_f32: ["blas.deterministic", "plan.mixed"]
        needs [has::lt_plans, has::gemm_bf16, has::gemm_mixed] => equal_bits(Types::BF16_TO_F32);
    round_to_tf32_when_asked: ["plan.value"] needs [has::lt_plans, has::gemm_f32, has::tf32];
    refuse_operands_that_are_not_aligned: ["plan.alignment"] needs [has::lt_plans, has::gemm_f32];
    run_again: ["plan.value"] needs [has::lt_plans, has::gemm_f32];
    are_stale_when_destroyed: ["plan.stale"] needs [has::lt_plans, has::gemm_f32];
    of_other_handles_are_stale: ["plan.stale"] needs [has::lt_plans, has::gemm_f32];
    of_two_handles_are_apart: ["plan.stale"] needs [has::lt_plans, has::gemm_f32];
    need_a_bound_stream: ["blas.unbound"] needs [has::lt_plans, has::gemm_f32];
    finish_when_destroyed: ["plan.destroy-pending", "plan.value"] needs [has::lt_plans, has::gemm_f32];
    return_at_once: ["stream.asynchronous"] needs [has::lt_plans, has::gemm_f32];
}

const WORKSPACE_BYTES: usize = 4 << 20;

/// Runs products as plans, with a workspace, and checks everything.
fn prove(backend: &dyn Backend, products: impl IntoIterator<Item = Product>) -> CaseResult {
    let workspace = Block::new(backend, WORKSPACE_BYTES)?;
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Lt, &stream)?;
    handle.offer_workspace(&workspace, 0..WORKSPACE_BYTES)?;
    for product in products {
        let shape = product.shape;
        let plan = handle.raw_mut().create_plan(&PlanOptions::new(shape, product.epilogue(), WORKSPACE_BYTES))?;
        let placed = product.place(backend)?;
        let scale = (product.alpha, product.beta);
        handle.run_plan(plan, &shape, scale, placed.operands(), None, placed.bias.as_ref())?;
        stream.synchronize()?;
        handle.raw_mut().destroy_plan(plan)?;
        placed.check(&product)?;
    }
    Ok(())
}

/// Shapes with each factor transposed or not, some with gaps.
fn shapes(types: Types) -> Vec<GemmShape> {
    let plain = [(1, 1, 1), (16, 16, 16), (32, 48, 24), (65, 33, 17)].map(|(m, n, k)| types.shape(m, n, k));
    let all = plain.into_iter().flat_map(|shape| {
        let padded = shape.with_leading_dimensions(shape.lda + 8, shape.ldb + 8, shape.ldc + 8);
        [shape, shape.with_transposed_a(), shape.with_transposed_b(), padded]
    });
    all.collect()
}

fn multiply_f32(backend: &dyn Backend) -> CaseResult {
    prove(backend, shapes(Types::F32).into_iter().map(|shape| Product::new(shape, 1)))
}

fn multiply_f64(backend: &dyn Backend) -> CaseResult {
    prove(backend, shapes(Types::F64).into_iter().map(|shape| Product::new(shape, 2)))
}

fn add_the_old_c(backend: &dyn Backend) -> CaseResult {
    let products = shapes(Types::F32).into_iter().map(|shape| Product::new(shape, 3).with_scale(-0.5, 1.5));
    prove(backend, products)
}

fn write_elsewhere(backend: &dyn Backend, types: Types) -> CaseResult {
    let workspace = Block::new(backend, WORKSPACE_BYTES)?;
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Lt, &stream)?;
    handle.offer_workspace(&workspace, 0..WORKSPACE_BYTES)?;
    let product = Product::new(types.shape(32, 40, 48), 4).with_scale(1.5, -0.5);
    let options = PlanOptions::new(product.shape, Epilogue::None, WORKSPACE_BYTES);
    let plan = handle.raw_mut().create_plan(&options)?;
    let mut placed = product.place(backend)?;
    let before = placed.c.read()?;
    // The elements differ from C's, between the same guards. A plan that adds them instead of C's is noticed.
    let mut elements = before.clone();
    let end = elements.len() - GUARD_BYTES;
    elements[GUARD_BYTES..end].fill(0x3c);
    let mut other = Block::holding(backend, &elements)?;
    let scale = (product.alpha, product.beta);
    handle.run_plan(plan, &product.shape, scale, placed.operands(), Some(&other), None)?;
    stream.synchronize()?;
    check!(placed.c.read()? == before, "C was changed though D is another matrix");
    std::mem::swap(&mut placed.c, &mut other);
    placed.check(&product)
}

fn multiply_batches(backend: &dyn Backend) -> CaseResult {
    let shape = GemmShape::new(DataType::F32, 16, 20, 24);
    let strides = [(384, 480), (0, 480), (384, 0)];
    prove(
        backend,
        strides.map(|(stride_a, stride_b)| {
            Product::new(shape.with_batch(StridedBatch { count: 4, stride_a, stride_b, stride_c: 320 }), 5)
        }),
    )?;
    // Each column of the second D follows the same column of the first, and so on.
    let side_by_side = StridedBatch { count: 4, stride_a: 384, stride_b: 480, stride_c: 16 };
    let shape = shape.with_leading_dimensions(shape.lda, shape.ldb, 4 * 16 + 8).with_batch(side_by_side);
    prove(backend, [Product::new(shape, 16).with_scale(0.5, 1.0)])
}

/// Runs products with an epilogue, without and with the old C.
fn followed_by(types: Types, epilogue: Epilogue) -> impl Iterator<Item = Product> {
    let factors = [(1.0, 0.0), (0.5, 1.0)];
    shapes(types).into_iter().flat_map(move |shape| {
        factors.map(|(alpha, beta)| Product::new(shape, 6).with_scale(alpha, beta).with_epilogue(epilogue))
    })
}

/// Runs every epilogue, all of which half types have, on every third shape.
fn every_epilogue(backend: &dyn Backend, types: Types) -> CaseResult {
    Epilogue::ALL.iter().try_for_each(|&epilogue| prove(backend, followed_by(types, epilogue).step_by(3)))
}

fn add_a_bias_to_a_batch(backend: &dyn Backend, types: Types) -> CaseResult {
    let batch = StridedBatch { count: 3, stride_a: 384, stride_b: 480, stride_c: 320 };
    let shape = types.shape(16, 20, 24).with_batch(batch);
    let epilogues = [Epilogue::Bias, Epilogue::BiasGelu];
    prove(backend, epilogues.map(|epilogue| Product::new(shape, 11).with_epilogue(epilogue)))
}

/// Runs products that keep only C and a bias. The bias is small compared to any product of the factors.
fn without_factors(shape: GemmShape, alpha: f64) -> impl Iterator<Item = Product> {
    // Every type represents the last value, and only the widest represents its square.
    let factors = [f64::NAN, f64::INFINITY, 60_000.0];
    Epilogue::ALL.iter().flat_map(move |&epilogue| {
        factors.into_iter().zip([0.0, -0.5, 1.0]).map(move |(factor, beta)| {
            let product = Product::new(shape, 14).with_scale(alpha, beta).with_epilogue(epilogue);
            let bias =
                if shape.output == DataType::F32 || shape.output == DataType::F64 { 2.0_f64.powi(-27) } else { 0.5 };
            product.with_factors(factor).with_bias(bias)
        })
    })
}

fn ignore_the_factors(backend: &dyn Backend, types: Types) -> CaseResult {
    let shape = types.shape(33, 20, 24);
    let padded = shape.with_leading_dimensions(shape.lda + 8, shape.ldb + 8, shape.ldc + 8);
    [padded, shape.with_transposed_a().with_transposed_b()]
        .into_iter()
        .try_for_each(|shape| prove(backend, without_factors(shape, 0.0)))
}

fn ignore_the_factors_with_alpha_zero(backend: &dyn Backend) -> CaseResult {
    let shape = GemmShape::new(DataType::F32, 16, 16, 16);
    // Their products are infinite, but a tiny fraction of them is finite.
    let large = without_factors(shape, 0.0).map(|product| product.with_factors(1e30));
    prove(backend, large)?;
    ignore_the_factors(backend, Types::F32)
}

fn ignore_the_factors_of_a_batch_with_alpha_zero(backend: &dyn Backend) -> CaseResult {
    let batch = StridedBatch { count: 3, stride_a: 384, stride_b: 480, stride_c: 320 };
    prove(backend, without_factors(GemmShape::new(DataType::F32, 16, 20, 24).with_batch(batch), 0.0))
}

fn apply_their_epilogue_with_k_zero(backend: &dyn Backend) -> CaseResult {
    prove(backend, without_factors(GemmShape::new(DataType::F32, 9, 10, 0), 2.0))?;
    prove(backend, without_factors(GemmShape::new(DataType::F32, 9, 10, 0).with_transposed_a(), 0.0))
}

fn apply_their_epilogue_with_k_zero_f16(backend: &dyn Backend) -> CaseResult {
    prove(backend, without_factors(GemmShape::new(DataType::F16, 16, 24, 0), 2.0))
}

/// Runs one plan, alternately with and without its factors, on a handle without a workspace.
fn run_with_alpha_zero_and_without_a_workspace(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Lt, &stream)?;
    let shape = GemmShape::new(DataType::F32, 40, 300, 16);
    let plan = handle.raw_mut().create_plan(&PlanOptions::new(shape, Epilogue::BiasRelu, 0))?;
    for alpha in [1.0, 0.0, 2.0, 0.0, -1.0] {
        let mut product = Product::new(shape, 15).with_scale(alpha, 0.5).with_epilogue(Epilogue::BiasRelu);
        if alpha == 0.0 {
            product = product.with_nan_in_factors();
        }
        let placed = product.place(backend)?;
        handle.run_plan(plan, &shape, (alpha, 0.5), placed.operands(), None, placed.bias.as_ref())?;
        stream.synchronize()?;
        placed.check(&product)?;
    }
    Ok(())
}

fn equal_bits(backend: &dyn Backend, types: Types) -> CaseResult {
    let workspace = Block::new(backend, WORKSPACE_BYTES)?;
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Lt, &stream)?;
    handle.raw_mut().set_atomics_mode(AtomicsMode::NotAllowed)?;
    handle.offer_workspace(&workspace, 0..WORKSPACE_BYTES)?;
    for (m, n, k) in [(16, 16, 16), (8, 8, 3000), (100, 90, 80)] {
        let product = Product::new(types.shape(m, n, k), 12).with_epilogue(Epilogue::BiasRelu);
        let options = PlanOptions::new(product.shape, product.epilogue(), WORKSPACE_BYTES);
        let plan = handle.raw_mut().create_plan(&options)?;
        let mut first: Option<Vec<u8>> = None;
        for round in 0..4 {
            let placed = product.place(backend)?;
            handle.run_plan(plan, &product.shape, (1.0, 0.0), placed.operands(), None, placed.bias.as_ref())?;
            stream.synchronize()?;
            let got = placed.bytes_of_c()?;
            let same = first.get_or_insert_with(|| got.clone()) == &got;
            check!(same, "run {round} of a plan of {m}x{n}x{k} gave other bits than the first");
        }
    }
    Ok(())
}

fn round_to_tf32_when_asked(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Lt, &stream)?;
    let shape = GemmShape::new(DataType::F32, 64, 64, 64);
    let exact = PlanOptions::new(shape, Epilogue::None, 0);
    let tf32 = exact.with_math_mode(MathMode::Tf32);
    for (options, product) in [(tf32, Product::new(shape, 9).with_tf32()), (exact, Product::new(shape, 9))] {
        let plan = handle.raw_mut().create_plan(&options)?;
        let placed = product.place(backend)?;
        handle.run_plan(plan, &shape, (1.0, 0.0), placed.operands(), None, None)?;
        stream.synchronize()?;
        placed.check(&product)?;
    }
    Ok(())
}

fn refuse_operands_that_are_not_aligned(backend: &dyn Backend) -> CaseResult {
    const ALIGNMENT: usize = 64;
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Lt, &stream)?;
    let product = Product::new(GemmShape::new(DataType::F32, 16, 16, 16), 10);
    let options = PlanOptions::new(product.shape, Epilogue::None, 0).with_alignment(ALIGNMENT);
    let plan = handle.raw_mut().create_plan(&options)?;
    let placed = product.place(backend)?;
    for operand in 0..3 {
        // Half an alignment further on; the matrix then ends inside the guard after it.
        let mut operands = placed.operands();
        operands[operand].1 += ALIGNMENT / 2;
        let run = handle.run_plan(plan, &product.shape, (1.0, 0.0), operands, None, None);
        check_error!(run, InvalidArgument, "run_plan with operand {operand} less aligned than the plan has it");
    }
    // No plan above was executed, and aligned operands are accepted.
    handle.run_plan(plan, &product.shape, (1.0, 0.0), placed.operands(), None, None)?;
    stream.synchronize()?;
    placed.check(&product)
}

fn run_again(backend: &dyn Backend) -> CaseResult {
    let workspace = Block::new(backend, WORKSPACE_BYTES)?;
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Lt, &stream)?;
    handle.offer_workspace(&workspace, 0..WORKSPACE_BYTES)?;
    let shapes = [GemmShape::new(DataType::F32, 32, 32, 32), GemmShape::new(DataType::F32, 16, 64, 8)];
    let mut plans = Vec::new();
    for shape in shapes {
        let options = PlanOptions::new(shape, Epilogue::None, WORKSPACE_BYTES);
        plans.push((shape, handle.raw_mut().create_plan(&options)?));
    }
    for seed in 0..6 {
        for &(shape, plan) in &plans {
            let product = Product::new(shape, seed).with_scale(seed as f64, 0.0);
            let placed = product.place(backend)?;
            handle.run_plan(plan, &shape, (product.alpha, product.beta), placed.operands(), None, None)?;
            stream.synchronize()?;
            placed.check(&product)?;
        }
    }
    Ok(())
}

/// Returns arguments that a plan which does not exist never reads.
fn nothing() -> PlanArguments {
    let nowhere = highwater_hal::DevicePtr::new(0);
    PlanArguments::new(nowhere, nowhere, nowhere, None)
}

fn are_stale_when_destroyed(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Lt, &stream)?;
    let handle = handle.raw_mut();
    let options = PlanOptions::new(GemmShape::new(DataType::F32, 8, 8, 8), Epilogue::None, 0);
    let stale = handle.create_plan(&options)?;
    handle.destroy_plan(stale)?;
    let next = handle.create_plan(&options)?;
    check!(next != stale, "the plan id {stale:?} was issued again");
    for plan in [stale, PlanId::new(u64::MAX)] {
        // SAFETY: a plan that does not exist reads and writes nothing.
        let run = unsafe { handle.run_plan(plan, &nothing()) };
        check_error!(run, InvalidHandle, "run_plan of {plan:?}");
        check_error!(handle.destroy_plan(plan), InvalidHandle, "destroy_plan of {plan:?}");
    }
    Ok(())
}

fn of_other_handles_are_stale(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let mut owner = Handle::new(backend, BlasKind::Lt, &stream)?;
    let mut other = Handle::new(backend, BlasKind::Lt, &stream)?;
    let options = PlanOptions::new(GemmShape::new(DataType::F32, 8, 8, 8), Epilogue::None, 0);
    let plan = owner.raw_mut().create_plan(&options)?;
    // SAFETY: a plan that does not exist reads and writes nothing.
    let run = unsafe { other.raw_mut().run_plan(plan, &nothing()) };
    check_error!(run, InvalidHandle, "run_plan of a plan of another handle");
    check_error!(other.raw_mut().destroy_plan(plan), InvalidHandle, "destroy_plan of a plan of another handle");
    Ok(())
}

/// The plans of one handle stay when those of another, which may have the same ids, are destroyed.
fn of_two_handles_are_apart(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let products = [11, 12].map(|m| Product::new(GemmShape::new(DataType::F32, m, 14, 16), m as u64));
    let mut handles = [Handle::new(backend, BlasKind::Lt, &stream)?, Handle::new(backend, BlasKind::Lt, &stream)?];
    let mut plans = Vec::new();
    for (handle, product) in handles.iter_mut().zip(&products) {
        plans.push(handle.raw_mut().create_plan(&PlanOptions::new(product.shape, Epilogue::None, 0))?);
    }
    let [first, second] = &mut handles;
    let run = |handle: &mut Handle<'_>, which: usize| -> CaseResult {
        let (plan, product) = (plans[which], &products[which]);
        let placed = product.place(backend)?;
        let ran = handle.run_plan(plan, &product.shape, (1.0, 0.0), placed.operands(), None, None);
        ran.map_err(|error| Failure::new(format!("the plan of handle {which} does not run: {error}")))?;
        stream.synchronize()?;
        placed.check(product)
    };
    run(first, 0)?;
    run(second, 1)?;
    first.raw_mut().destroy_plan(plans[0])?;
    run(second, 1)?;
    let placed = products[0].place(backend)?;
    let ran = first.run_plan(plans[0], &products[0].shape, (1.0, 0.0), placed.operands(), None, None);
    check_error!(ran, InvalidHandle, "a run of a destroyed plan, beside a plan of another handle");
    first.raw_mut().destroy()?;
    run(second, 1)
}

fn need_a_bound_stream(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let product = Product::new(GemmShape::new(DataType::F32, 12, 14, 16), 1);
    let placed = product.place(backend)?;
    let before = placed.bytes_of_c()?;
    // A fresh handle has nothing of one that was destroyed.
    Handle::new(backend, BlasKind::Lt, &stream)?.raw_mut().destroy()?;
    let mut handle = Handle::unbound(backend, BlasKind::Lt, DEVICE)?;
    let plan = handle.raw_mut().create_plan(&PlanOptions::new(product.shape, Epilogue::None, 0))?;
    let run = handle.run_plan(plan, &product.shape, (1.0, 0.0), placed.operands(), None, None);
    check_error!(run, InvalidState, "a run of a plan on a handle that is bound to no stream");
    backend.synchronize_device(DEVICE)?;
    check!(placed.bytes_of_c()? == before, "a run that was refused changed D");
    handle.set_stream(&stream)?;
    handle.run_plan(plan, &product.shape, (1.0, 0.0), placed.operands(), None, None)?;
    stream.synchronize()?;
    placed.check(&product)
}

fn finish_when_destroyed(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Lt, &stream)?;
    let product = Product::new(GemmShape::new(DataType::F32, 48, 48, 48), 7);
    until_conclusive("the stream was idle when the plan was destroyed", |load| {
        let plan = handle.raw_mut().create_plan(&PlanOptions::new(product.shape, Epilogue::None, 0))?;
        let placed = product.place(backend)?;
        busy.enqueue(&stream, load)?;
        handle.run_plan(plan, &product.shape, (1.0, 0.0), placed.operands(), None, None)?;
        handle.raw_mut().destroy_plan(plan)?;
        let pending = stream.is_pending()?;
        stream.synchronize()?;
        placed.check(&product)?;
        Ok(Attempt::seen(pending))
    })
}

fn return_at_once(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let (stream, before) = (Stream::new(backend)?, Event::new(backend)?);
    let mut handle = Handle::new(backend, BlasKind::Lt, &stream)?;
    let product = Product::new(GemmShape::new(DataType::F32, 64, 64, 64), 8);
    let plan = handle.raw_mut().create_plan(&PlanOptions::new(product.shape, Epilogue::None, 0))?;
    let placed = product.place(backend)?;
    handle.run_plan(plan, &product.shape, (1.0, 0.0), placed.operands(), None, None)?;
    stream.synchronize()?;
    until_conclusive("a plan waits for the work before it", |load| {
        busy.enqueue(&stream, load)?;
        stream.record(&before)?;
        handle.run_plan(plan, &product.shape, (1.0, 0.0), placed.operands(), None, None)?;
        let outstanding = before.is_pending()?;
        stream.synchronize()?;
        placed.check(&product)?;
        Ok(Attempt::seen(outstanding))
    })
}

/// A 32-bit D at a multiple of two bytes, the size of a factor, which is the whole alignment that the plan requires.
fn refuse_results_between_elements(backend: &dyn Backend, types: Types) -> CaseResult {
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Lt, &stream)?;
    let product = Product::new(types.shape(16, 16, 16), 13).with_epilogue(Epilogue::Bias);
    let options = PlanOptions::new(product.shape, Epilogue::Bias, 0);
    check!(options.alignment == 2, "a plan for factors of 16 bits is for addresses of {}", options.alignment);
    let plan = handle.raw_mut().create_plan(&options)?;
    let placed = product.place(backend)?;
    let mut operands = placed.operands();
    operands[2].1 += 2;
    let run = handle.run_plan(plan, &product.shape, (1.0, 0.0), operands, None, placed.bias.as_ref());
    check_error!(run, InvalidArgument, "run_plan with D between two elements");
    handle.run_plan(plan, &product.shape, (1.0, 0.0), placed.operands(), None, placed.bias.as_ref())?;
    stream.synchronize()?;
    placed.check(&product)
}
