//! Clauses about products over a table: each pair of types, as a GEMM and as a plan, alone and in a batch, on the first two
//! devices.

use highwater_hal::numbers::Coded as _;
use highwater_hal::{
    AtomicsMode, Backend, BlasKind, Capabilities, DataType, Epilogue, GemmShape, MathMode, PlanArguments, PlanId,
    PlanOptions, StreamId, StridedBatch,
};

use crate::case::{CaseResult, Failure, cases, check, check_error};
use crate::device::{Block, Event, Handle, Stream};
use crate::matrix::{GUARD_BYTES, Placed, Product, Types};
use crate::retry::{Attempt, until_conclusive};
use crate::stream_load::{Direction, StreamLoad};

cases! {
    group "products";
    use_factors_of_every_precision: ["gemm.value", "gemm.beta", "gemm.strided-batch", "plan.value"];
    take_a_factor_of_minus_zero_for_zero: ["gemm.beta-zero", "gemm.alpha-zero", "plan.alpha-zero", "plan.value"];
    are_infinite_beyond_the_range: ["gemm.value", "plan.value"];
    scale_every_c_of_a_batch_without_terms: ["gemm.alpha-zero", "gemm.beta", "gemm.strided-batch", "plan.alpha-zero"]
        needs [has::strided_batch];
    refuse_a_destroyed_stream: ["blas.stream-destroyed"];
    use_one_factor_for_a_whole_batch: ["gemm.strided-batch", "gemm.transpose", "plan.value"] needs [has::strided_batch];
    of_a_fresh_handle_have_equal_bits: ["blas.deterministic"];
    of_plans_have_the_modes_of_their_plan: ["blas.deterministic", "plan.value"] needs [has::lt_plans, has::gemm_f32];
    keep_their_precision_until_it_is_set: ["blas.stream-resets-workspace", "gemm.value"] needs [has::gemm_f32, has::tf32];
    of_a_fresh_handle_return_at_once: ["gemm.asynchronous", "stream.asynchronous"] needs [has::gemm_f32];
    refuse_streams_of_another_device: ["blas.stream-device"] needs [TWO_DEVICES];
    refuse_plans_on_handles_of_the_other_kind: ["blas.kind"];
    add_up_sums_of_odd_length: ["gemm.value", "gemm.transpose", "plan.value"];
    transpose_square_factors: ["gemm.transpose", "gemm.strided-batch", "gemm.mixed", "plan.value"];
    of_every_kind_return_at_once: ["gemm.asynchronous", "stream.asynchronous"];
    larger_than_all_before_return_at_once: ["gemm.asynchronous", "stream.asynchronous"];
    add_a_bias_and_another_c: ["plan.epilogue", "plan.value"] needs [has::lt_plans];
    apply_gelu_to_large_sums: ["plan.epilogue"] needs [has::lt_plans];
    use_the_bias_of_each_run: ["plan.epilogue"] needs [has::lt_plans];
    refuse_each_operand_that_is_not_aligned: ["plan.alignment"] needs [has::lt_plans, has::gemm_f32];
    of_plans_follow_a_reset: ["blas.reset", "plan.value"] needs [has::lt_plans, has::gemm_f32];
    of_plans_follow_the_handle_to_another_stream: ["blas.stream-bound"]
        needs [has::lt_plans, has::gemm_f32, lacks::lt_handle_per_stream];
    of_plans_that_live_at_once_are_apart: ["plan.value", "plan.epilogue", "plan.alignment", "gemm.strided-batch"]
        needs [has::lt_plans, has::gemm_f32];
    of_plans_for_other_types_are_apart: ["plan.value", "plan.mixed"] needs [has::lt_plans];
    of_many_plans_are_right: ["plan.value", "plan.stale"] needs [has::lt_plans, has::gemm_f32];
    without_terms_take_any_alpha: ["gemm.alpha-zero", "gemm.infinite-factors", "plan.alpha-zero", "gemm.leading-dimension"];
    take_factors_beyond_the_range_of_their_type: ["gemm.value", "gemm.beta", "plan.value"];
    of_single_rows_columns_and_terms: ["gemm.value", "gemm.transpose", "gemm.leading-dimension", "plan.value"];
    of_batches_of_one_take_any_strides: ["gemm.strided-batch", "plan.value"] needs [has::strided_batch];
    of_two_handles_keep_their_own_precision: ["gemm.value"] needs [has::gemm_f32, has::tf32];
    follow_the_stream_that_any_thread_bound: ["blas.stream-bound"] needs [has::gemm_f32, lacks::handle_per_stream];
    of_plans_follow_the_stream_that_any_thread_bound: ["blas.stream-bound"]
        needs [has::lt_plans, has::gemm_f32, lacks::lt_handle_per_stream];
}

const WORKSPACE_BYTES: usize = 4 << 20;

/// A handle of one kind on one device, with a stream and a workspace.
struct Bench<'w> {
    backend: &'w dyn Backend,
    device: u32,
    kind: BlasKind,
    can: Capabilities,
    stream: &'w Stream<'w>,
    workspace: &'w Block<'w>,
    handle: Handle<'w>,
}

/// Proves something with a fresh handle of each kind on each of the first two devices.
fn on_each(backend: &dyn Backend, prove: impl Fn(&mut Bench<'_>) -> CaseResult) -> CaseResult {
    for device in 0..backend.device_count().min(2) {
        for kind in [BlasKind::Blas, BlasKind::Lt] {
            on_one(backend, device, kind, &prove)?;
        }
    }
    Ok(())
}

/// Proves something with a fresh handle for plans on each of the first two devices.
fn on_each_for_plans(backend: &dyn Backend, prove: impl Fn(&mut Bench<'_>) -> CaseResult) -> CaseResult {
    (0..backend.device_count().min(2)).try_for_each(|device| on_one(backend, device, BlasKind::Lt, &prove))
}

fn on_one(
    backend: &dyn Backend,
    device: u32,
    kind: BlasKind,
    prove: impl Fn(&mut Bench<'_>) -> CaseResult,
) -> CaseResult {
    let can = backend.capabilities(device)?;
    if kind == BlasKind::Lt && !can.lt_plans {
        return Ok(());
    }
    let (workspace, stream) = (Block::on(backend, device, WORKSPACE_BYTES)?, Stream::on(backend, device)?);
    let mut handle = Handle::new(backend, kind, &stream)?;
    handle.offer_workspace(&workspace, 0..WORKSPACE_BYTES)?;
    let mut bench = Bench { backend, device, kind, can, stream: &stream, workspace: &workspace, handle };
    prove(&mut bench).map_err(|failure| failure.with_details(&format!("a handle of {kind:?} on device {device}")))
}

impl<'w> Bench<'w> {
    /// Returns the pairs of types that the device has.
    fn types(&self) -> Vec<Types> {
        let Capabilities { gemm_f16, gemm_bf16, gemm_f32, gemm_f64, gemm_mixed, .. } = self.can;
        let types = [
            (gemm_f32, Types::F32),
            (gemm_f64, Types::F64),
            (gemm_f16, Types::F16),
            (gemm_bf16, Types::BF16),
            (gemm_f16 && gemm_mixed, Types::F16_TO_F32),
            (gemm_bf16 && gemm_mixed, Types::BF16_TO_F32),
        ];
        types.into_iter().filter_map(|(has, types)| has.then_some(types)).collect()
    }

    /// Returns a product of these types, alone and, if the device has batches, three of them.
    fn alone_and_in_a_batch(&self, types: Types, (m, n, k): (usize, usize, usize)) -> Vec<GemmShape> {
        let alone = types.shape(m, n, k);
        let batch = StridedBatch { count: 3, stride_a: m * k, stride_b: k * n, stride_c: m * n };
        if self.can.strided_batch { vec![alone, alone.with_batch(batch)] } else { vec![alone] }
    }

    fn plan(&mut self, product: &Product) -> highwater_hal::Result<PlanId> {
        let options = PlanOptions::new(product.shape, product.epilogue(), WORKSPACE_BYTES);
        self.handle.raw_mut().create_plan(&options)
    }

    /// Runs a product and waits for it.
    fn run(&mut self, product: &Product) -> Result<Placed<'w>, Failure> {
        let placed = product.place_on(self.backend, self.device)?;
        if self.kind == BlasKind::Lt {
            let plan = self.plan(product)?;
            let scale = (product.alpha, product.beta);
            let (operands, bias) = (placed.operands(), placed.bias.as_ref());
            self.handle.run_plan(plan, &product.shape, scale, operands, None, bias)?;
            self.stream.synchronize()?;
            self.handle.raw_mut().destroy_plan(plan)?;
        } else {
            placed.gemm(product, &mut self.handle)?;
            self.stream.synchronize()?;
        }
        Ok(placed)
    }

    /// Runs a product, waits, and checks every byte.
    fn prove(&mut self, product: &Product) -> CaseResult {
        self.run(product)?.check(product)
    }
}

// ------------------------------------------------------------------------------------------------------------ the values

fn use_factors_of_every_precision(backend: &dyn Backend) -> CaseResult {
    on_each(backend, |bench| {
        for types in bench.types() {
            for shape in bench.alone_and_in_a_batch(types, (9, 8, 16)) {
                // Neither is exact in any type, and an error of 32-bit factors exceeds the bound of 64-bit products.
                for (alpha, beta) in [(0.1, 0.0), (1.0, 0.3), (-0.7, 0.1)] {
                    bench.prove(&Product::new(shape, 1).with_scale(alpha, beta))?;
                }
            }
        }
        Ok(())
    })
}

/// Neither the rows, the columns nor the sums fill whole tiles, and the sums exceed those that one step of a kernel adds up.
fn add_up_sums_of_odd_length(backend: &dyn Backend) -> CaseResult {
    on_each(backend, |bench| {
        for types in bench.types() {
            let shapes = [types.shape(67, 35, 261), types.shape(35, 67, 519).with_transposed_a().with_transposed_b()];
            shapes.into_iter().try_for_each(|shape| bench.prove(&Product::new(shape, 23)))?;
        }
        Ok(())
    })
}

/// A square factor has as many elements in each row as in each column, so its shape does not tell its transposition.
fn transpose_square_factors(backend: &dyn Backend) -> CaseResult {
    const SIZES: [(usize, usize, usize); 3] = [(16, 8, 8), (8, 16, 8), (8, 8, 8)];
    on_each(backend, |bench| {
        for types in bench.types() {
            let plain: Vec<_> = SIZES.into_iter().flat_map(|size| bench.alone_and_in_a_batch(types, size)).collect();
            for plain in plain {
                let transposed = [
                    plain.with_transposed_a(),
                    plain.with_transposed_b(),
                    plain.with_transposed_a().with_transposed_b(),
                ];
                transposed.into_iter().try_for_each(|shape| bench.prove(&Product::new(shape, 24)))?;
            }
        }
        Ok(())
    })
}

fn take_a_factor_of_minus_zero_for_zero(backend: &dyn Backend) -> CaseResult {
    on_each(backend, |bench| {
        for types in bench.types() {
            for shape in bench.alone_and_in_a_batch(types, (8, 16, 8)) {
                let product = Product::new(shape, 2);
                bench.prove(&product.clone().with_scale(1.0, -0.0).with_nan_in_c())?;
                bench.prove(&product.clone().with_scale(-0.0, 1.0).with_nan_in_factors())?;
                bench.prove(&product.with_scale(-0.0, -0.0).with_nan_in_factors().with_nan_in_c())?;
            }
        }
        Ok(())
    })
}

fn are_infinite_beyond_the_range(backend: &dyn Backend) -> CaseResult {
    on_each(backend, |bench| {
        for types in bench.types() {
            for shape in bench.alone_and_in_a_batch(types, (8, 8, 8)) {
                // Each sum is eight times the square of the factor.
                let (factor, least) = match (shape.data_type, shape.output) {
                    (DataType::F16, DataType::F16) => (256.0, 2.0_f64.powi(-6)),
                    (DataType::F16, _) => (256.0, 1.0),
                    (DataType::F64, _) => (2.0_f64.powi(600), 0.0),
                    _ => (2.0_f64.powi(64), 0.0),
                };
                let product = Product::new(shape, 3).with_factors(factor);
                bench.prove(&product.clone())?;
                bench.prove(&product.clone().with_scale(-1.0, 1.0))?;
                if least > 0.0 {
                    // The sum has 32 bits, in which it is finite, and so is the result.
                    bench.prove(&product.with_scale(least, 0.0))?;
                }
            }
        }
        Ok(())
    })
}

fn use_one_factor_for_a_whole_batch(backend: &dyn Backend) -> CaseResult {
    on_each(backend, |bench| {
        for types in bench.types() {
            let plain = types.shape(8, 16, 24);
            let transposed = [
                plain,
                plain.with_transposed_a(),
                plain.with_transposed_b(),
                plain.with_transposed_a().with_transposed_b(),
            ];
            for shape in transposed {
                for (stride_a, stride_b) in [(0, 24 * 16), (8 * 24, 0), (0, 0)] {
                    let batch = StridedBatch { count: 3, stride_a, stride_b, stride_c: 8 * 16 };
                    bench.prove(&Product::new(shape.with_batch(batch), 4).with_scale(1.0, 1.0))?;
                }
            }
        }
        Ok(())
    })
}

fn scale_every_c_of_a_batch_without_terms(backend: &dyn Backend) -> CaseResult {
    on_each(backend, |bench| {
        for types in bench.types() {
            let batch = StridedBatch { count: 3, stride_a: 0, stride_b: 0, stride_c: 8 * 16 };
            for (k, alpha) in [(0, 2.0), (8, 0.0)] {
                for beta in [0.0, 0.5, 1.0, -2.0] {
                    bench.prove(&Product::new(types.shape(8, 16, k).with_batch(batch), 21).with_scale(alpha, beta))?;
                }
            }
        }
        Ok(())
    })
}

fn refuse_a_destroyed_stream(backend: &dyn Backend) -> CaseResult {
    on_each(backend, |bench| {
        let Some(&types) = bench.types().first() else { return Ok(()) };
        let product = Product::new(types.shape(8, 8, 8), 22);
        let placed = product.place_on(bench.backend, bench.device)?;
        let before = placed.c.read()?;
        let stream = Stream::on(bench.backend, bench.device)?;
        let mut handle = Handle::new(bench.backend, bench.kind, &stream)?;
        let plan = match bench.kind {
            BlasKind::Lt => {
                let options = PlanOptions::new(product.shape, Epilogue::None, 0);
                Some(handle.raw_mut().create_plan(&options)?)
            }
            _ => None,
        };
        stream.destroy()?;
        // They may take the place of the destroyed stream.
        let _others =
            (0..4).map(|_| Stream::on(bench.backend, bench.device)).collect::<highwater_hal::Result<Vec<_>>>()?;
        let run = match plan {
            Some(plan) => handle.run_plan(plan, &product.shape, (1.0, 0.0), placed.operands(), None, None),
            None => placed.gemm(&product, &mut handle),
        };
        check_error!(run, InvalidHandle, "a product on a stream that was destroyed");
        bench.backend.synchronize_device(bench.device)?;
        check!(placed.c.read()? == before, "a product on a stream that was destroyed was executed on another stream");
        Ok(())
    })
}

/// Long sums: kernels split them, and another order of the parts changes bits.
const LONG_SUM: (usize, usize, usize) = (8, 8, 20_000);

fn equal_bits(bench: &mut Bench<'_>, types: Types) -> CaseResult {
    let (m, n, k) = LONG_SUM;
    let product = Product::new(types.shape(m, n, k), 5);
    let first = bench.run(&product)?.bytes_of_c()?;
    for round in 1..4 {
        let placed = bench.run(&product)?;
        check!(placed.bytes_of_c()? == first, "equal product {round} of {k} terms has other bits than the first");
    }
    Ok(())
}

fn of_a_fresh_handle_have_equal_bits(backend: &dyn Backend) -> CaseResult {
    on_each(backend, |bench| bench.types().into_iter().try_for_each(|types| equal_bits(bench, types)))
}

// ------------------------------------------------------------------------------------------------------------- the modes

fn of_plans_have_the_modes_of_their_plan(backend: &dyn Backend) -> CaseResult {
    on_each_for_plans(backend, |bench| {
        if bench.can.atomics_mode {
            bench.handle.raw_mut().set_atomics_mode(AtomicsMode::Allowed)?;
        }
        if bench.can.tf32 {
            bench.handle.raw_mut().set_math_mode(MathMode::Tf32)?;
        }
        equal_bits(bench, Types::F32)?;
        bench.prove(&short_sums())
    })
}

/// A product in which rounding to TF32 exceeds the bound of full precision.
fn short_sums() -> Product {
    Product::new(Types::F32.shape(64, 64, 8), 6)
}

fn keep_their_precision_until_it_is_set(backend: &dyn Backend) -> CaseResult {
    type Action = (&'static str, fn(&mut Bench<'_>, &Stream<'_>) -> CaseResult);
    const ACTIONS: [Action; 6] = [
        ("a stream was bound again", |bench, _| Ok(bench.handle.set_stream(bench.stream)?)),
        ("another stream was bound in between", |bench, other| {
            if !bench.can.handle_per_stream {
                bench.handle.set_stream(other)?;
            }
            Ok(bench.handle.set_stream(bench.stream)?)
        }),
        ("a workspace was bound", |bench, _| {
            let workspace = bench.workspace;
            Ok(bench.handle.offer_workspace(workspace, 0..WORKSPACE_BYTES)?)
        }),
        ("a product of no known types was refused", |bench, _| {
            let product = Product::new(Types::of(DataType::F32, DataType::F16).shape(8, 8, 8), 7);
            let placed = product.place_on(bench.backend, bench.device)?;
            check_error!(
                placed.gemm(&product, &mut bench.handle),
                Unsupported,
                "a product of f32 with a result of f16"
            );
            Ok(())
        }),
        ("a product of another type", |bench, _| match bench.types().into_iter().nth(1) {
            Some(types) => bench.prove(&Product::new(types.shape(8, 8, 8), 8)),
            None => Ok(()),
        }),
        ("the use of atomics was set", |bench, _| {
            Ok(bench.handle.raw_mut().set_atomics_mode(AtomicsMode::NotAllowed)?)
        }),
    ];
    on_each(backend, |bench| {
        if bench.kind == BlasKind::Lt {
            // A plan has its own precision.
            return Ok(());
        }
        let (full, rounded) = (short_sums(), short_sums().with_tf32());
        let other = Stream::on(bench.backend, bench.device)?;
        bench.prove(&full)?;
        bench.handle.raw_mut().set_math_mode(MathMode::Tf32)?;
        let first = bench.run(&full)?;
        first.check(&rounded)?;
        if first.check(&full).is_ok() {
            // The device multiplies this product in full precision anyway, so the mode has no visible effect.
            return Ok(());
        }
        for (what, act) in ACTIONS {
            act(bench, &other)?;
            let placed = bench.run(&full)?;
            placed.check(&rounded)?;
            check!(placed.check(&full).is_err(), "products are not rounded to TF32 any more after {what}");
        }
        bench.handle.raw_mut().set_math_mode(MathMode::Default)?;
        bench.prove(&full)
    })
}

// ----------------------------------------------------------------------------------------------------------- the handles

fn of_a_fresh_handle_return_at_once(backend: &dyn Backend) -> CaseResult {
    on_each(backend, |bench| {
        let (backend, device, stream) = (bench.backend, bench.device, bench.stream);
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        let before = Event::on(backend, device)?;
        let product = Product::new(Types::F32.shape(16, 16, 16), 9);
        // A first product of the process loads kernels, which may wait.
        bench.prove(&product)?;
        let placed = product.place_on(backend, device)?;
        until_conclusive("the first product of a handle waits for the work before it", |load| {
            let workspace = Block::on(backend, device, WORKSPACE_BYTES)?;
            let mut handle = Handle::new(backend, bench.kind, stream)?;
            handle.offer_workspace(&workspace, 0..WORKSPACE_BYTES)?;
            let plan = match bench.kind {
                BlasKind::Lt => {
                    let options = PlanOptions::new(product.shape, Epilogue::None, WORKSPACE_BYTES);
                    Some(handle.raw_mut().create_plan(&options)?)
                }
                _ => None,
            };
            busy.enqueue(stream, load)?;
            stream.record(&before)?;
            match plan {
                Some(plan) => handle.run_plan(plan, &product.shape, (1.0, 0.0), placed.operands(), None, None)?,
                None => placed.gemm(&product, &mut handle)?,
            }
            let outstanding = before.is_pending()?;
            stream.synchronize()?;
            placed.check(&product)?;
            Ok(Attempt::seen(outstanding))
        })
    })
}

/// Each pair of types alone and in a batch, with each epilogue and precision, behind one load.
fn of_every_kind_return_at_once(backend: &dyn Backend) -> CaseResult {
    on_each(backend, |bench| {
        let (backend, device, stream) = (bench.backend, bench.device, bench.stream);
        let is_plan = bench.kind == BlasKind::Lt;
        let epilogues = if is_plan { Epilogue::ALL } else { &[Epilogue::None] };
        let mut products = Vec::new();
        for types in bench.types() {
            for shape in bench.alone_and_in_a_batch(types, (16, 16, 16)) {
                let possible =
                    epilogues.iter().filter(|&&epilogue| shape.batch.is_none() || epilogue == Epilogue::None);
                products.extend(possible.map(|&epilogue| Product::new(shape, 25).with_epilogue(epilogue)));
            }
        }
        let mut made = Vec::new();
        for product in products {
            let plan = if is_plan { Some(bench.plan(&product)?) } else { None };
            made.push((product.place_on(backend, device)?, plan, product));
        }
        let modes: &[MathMode] =
            if bench.can.tf32 && !is_plan { &[MathMode::Default, MathMode::Tf32] } else { &[MathMode::Default] };
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        let before = Event::on(backend, device)?;
        for &mode in modes {
            if !is_plan {
                bench.handle.raw_mut().set_math_mode(mode)?;
            }
            let mut waited = None;
            let mut enqueue = |handle: &mut Handle<'_>| -> CaseResult {
                waited = None;
                for (placed, plan, product) in &made {
                    match plan {
                        Some(plan) => {
                            let (operands, bias) = (placed.operands(), placed.bias.as_ref());
                            handle.run_plan(*plan, &product.shape, (1.0, 0.0), operands, None, bias)?;
                        }
                        None => placed.gemm(product, handle)?,
                    }
                    if waited.is_none() && !before.is_pending()? {
                        waited = Some(format!("{:?}, then {:?}", product.shape, product.epilogue()));
                    }
                }
                Ok(())
            };
            // The first products may load kernels, which may wait.
            enqueue(&mut bench.handle)?;
            stream.synchronize()?;
            until_conclusive("a product waits for the work before it", |load| {
                busy.enqueue(stream, load)?;
                stream.record(&before)?;
                enqueue(&mut bench.handle)?;
                let outstanding = before.is_pending()?;
                stream.synchronize()?;
                Ok(Attempt::seen(outstanding))
            })
            .map_err(|failure| failure.with_details(&format!("the first that may have waited: {waited:?}")))?;
        }
        Ok(())
    })
}

/// A fresh handle computes small products, and behind a load larger ones, in each pair of types. Another handle has loaded the kernels.
fn larger_than_all_before_return_at_once(backend: &dyn Backend) -> CaseResult {
    on_each(backend, |bench| {
        let (backend, device, stream) = (bench.backend, bench.device, bench.stream);
        let is_plan = bench.kind == BlasKind::Lt;
        let mut made = Vec::new();
        for size in [4, 16, 48] {
            let of_size =
                bench.types().into_iter().flat_map(|types| bench.alone_and_in_a_batch(types, (size, size, size)));
            let of_size: Vec<_> = of_size.map(|shape| Product::new(shape, 26)).collect();
            let placed = of_size.into_iter().map(|product| Ok((product.place_on(backend, device)?, product)));
            made.push(placed.collect::<Result<Vec<_>, Failure>>()?);
        }
        let plans_of =
            |handle: &mut Handle<'_>, made: &[(Placed<'_>, Product)]| -> highwater_hal::Result<Vec<Option<PlanId>>> {
                let options = |product: &Product| PlanOptions::new(product.shape, Epilogue::None, WORKSPACE_BYTES);
                let plan = |handle: &mut Handle<'_>, product| handle.raw_mut().create_plan(&options(product)).map(Some);
                made.iter().map(|(_, product)| if is_plan { plan(handle, product) } else { Ok(None) }).collect()
            };
        let enqueue = |handle: &mut Handle<'_>,
                       made: &[(Placed<'_>, Product)],
                       plans: &[Option<PlanId>]|
         -> CaseResult {
            for ((placed, product), plan) in made.iter().zip(plans) {
                match plan {
                    Some(plan) => handle.run_plan(*plan, &product.shape, (1.0, 0.0), placed.operands(), None, None)?,
                    None => placed.gemm(product, handle)?,
                }
            }
            Ok(())
        };
        for made in &made {
            let plans = plans_of(&mut bench.handle, made)?;
            enqueue(&mut bench.handle, made, &plans)?;
        }
        stream.synchronize()?;
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        let before = Event::on(backend, device)?;
        until_conclusive("a product that is larger than those before waits for the work before it", |load| {
            let mut handle = Handle::new(backend, bench.kind, stream)?;
            handle.offer_workspace(bench.workspace, 0..WORKSPACE_BYTES)?;
            let plans = made.iter().map(|made| plans_of(&mut handle, made)).collect::<Result<Vec<_>, _>>()?;
            enqueue(&mut handle, &made[0], &plans[0])?;
            stream.synchronize()?;
            busy.enqueue(stream, load)?;
            stream.record(&before)?;
            for (made, plans) in made.iter().zip(&plans).skip(1) {
                enqueue(&mut handle, made, plans)?;
            }
            let outstanding = before.is_pending()?;
            stream.synchronize()?;
            Ok(Attempt::seen(outstanding))
        })
    })
}

fn refuse_streams_of_another_device(backend: &dyn Backend) -> CaseResult {
    on_each(backend, |bench| {
        let other = 1 - bench.device;
        let (tag, can) = (bench.backend.identity().tag, bench.backend.capabilities(other)?);
        let created = Stream::on(bench.backend, other)?;
        let mut streams = vec![("a stream", created.id())];
        if can.legacy_default_stream {
            streams.push(("the legacy default stream", StreamId::legacy_default(tag, other)));
        }
        if can.per_thread_default_stream {
            streams.push(("the per-thread default stream", StreamId::per_thread_default(tag, other)));
        }
        for (what, stream) in streams {
            check_error!(
                bench.handle.raw_mut().set_stream(stream),
                WrongDevice,
                "set_stream to {what} of another device"
            );
            if let Some(types) = bench.types().first() {
                bench.prove(&Product::new(types.shape(8, 8, 8), 10))?;
            }
        }
        Ok(())
    })
}

/// Returns arguments that no refused run reads.
fn nothing() -> PlanArguments {
    let nowhere = highwater_hal::DevicePtr::new(0);
    PlanArguments::new(nowhere, nowhere, nowhere, None)
}

fn refuse_plans_on_handles_of_the_other_kind(backend: &dyn Backend) -> CaseResult {
    on_each(backend, |bench| {
        let live = bench.backend.live_objects();
        let shape = GemmShape::new(DataType::F32, 8, 8, 8);
        if bench.kind == BlasKind::Lt {
            let placed = Product::new(shape, 11).place_on(bench.backend, bench.device)?;
            let gemm = placed.gemm(&Product::new(shape, 11), &mut bench.handle);
            check_error!(gemm, Unsupported, "a product on a handle for plans");
        } else {
            let handle = bench.handle.raw_mut();
            let options = PlanOptions::new(shape, Epilogue::None, 0);
            check_error!(handle.create_plan(&options), Unsupported, "create_plan on a handle for products");
            for number in [0, 1, u64::MAX] {
                let plan = PlanId::new(number);
                check_error!(handle.destroy_plan(plan), Unsupported, "destroy_plan on a handle for products");
                // SAFETY: the handle has no plan, so nothing is read.
                let run = unsafe { handle.run_plan(plan, &nothing()) };
                check_error!(run, Unsupported, "run_plan on a handle for products");
            }
        }
        check!(bench.backend.live_objects() == live, "a call of the other kind has left an object");
        Ok(())
    })
}

// ------------------------------------------------------------------------------------------------------------- the plans

/// Returns the bytes of a block with its elements replaced, and the guards kept.
fn with_other_elements(block: &Block<'_>) -> Result<Vec<u8>, Failure> {
    let mut bytes = block.read()?;
    let end = bytes.len() - GUARD_BYTES;
    bytes[GUARD_BYTES..end].fill(0x3c);
    Ok(bytes)
}

fn add_a_bias_and_another_c(backend: &dyn Backend) -> CaseResult {
    on_each_for_plans(backend, |bench| {
        for types in bench.types() {
            for &epilogue in Epilogue::ALL {
                let product = Product::new(types.shape(16, 24, 8), 13).with_scale(0.5, 1.5).with_epilogue(epilogue);
                let mut placed = product.place_on(bench.backend, bench.device)?;
                let before = placed.c.read()?;
                let mut other = Block::on(bench.backend, bench.device, placed.c.bytes())?;
                other.write(0, &with_other_elements(&placed.c)?)?;
                let plan = bench.plan(&product)?;
                let (operands, bias) = (placed.operands(), placed.bias.as_ref());
                bench.handle.run_plan(plan, &product.shape, (0.5, 1.5), operands, Some(&other), bias)?;
                bench.stream.synchronize()?;
                bench.handle.raw_mut().destroy_plan(plan)?;
                check!(placed.c.read()? == before, "C was changed although D is another matrix, then {epilogue:?}");
                std::mem::swap(&mut placed.c, &mut other);
                placed.check(&product)?;
            }
        }
        Ok(())
    })
}

fn apply_gelu_to_large_sums(backend: &dyn Backend) -> CaseResult {
    on_each_for_plans(backend, |bench| {
        for types in bench.types() {
            let shape = types.shape(8, 8, 8);
            for epilogue in [Epilogue::Gelu, Epilogue::BiasGelu] {
                // The sums are 8, 50, 200 and 12,800, of either sign.
                for factor in [1.0, 2.5, 5.0, 40.0] {
                    for alpha in [1.0, -1.0] {
                        let product = Product::new(shape, 14).with_factors(factor).with_scale(alpha, 0.0);
                        bench.prove(&product.with_epilogue(epilogue))?;
                    }
                }
            }
        }
        Ok(())
    })
}

fn use_the_bias_of_each_run(backend: &dyn Backend) -> CaseResult {
    on_each_for_plans(backend, |bench| {
        for types in bench.types() {
            let products: Vec<Product> = (0..3)
                .map(|seed| Product::new(types.shape(16, 8, 8), 20 + seed).with_epilogue(Epilogue::Bias))
                .collect();
            let plan = bench.plan(&products[0])?;
            let placed = products.iter().map(|product| product.place_on(bench.backend, bench.device));
            let placed = placed.collect::<Result<Vec<_>, Failure>>()?;
            // One run after the other, without a wait.
            for (product, placed) in products.iter().zip(&placed) {
                let (operands, bias) = (placed.operands(), placed.bias.as_ref());
                bench.handle.run_plan(plan, &product.shape, (1.0, 0.0), operands, None, bias)?;
            }
            bench.stream.synchronize()?;
            bench.handle.raw_mut().destroy_plan(plan)?;
            for (product, placed) in products.iter().zip(&placed) {
                placed.check(product)?;
            }
        }
        Ok(())
    })
}

fn refuse_each_operand_that_is_not_aligned(backend: &dyn Backend) -> CaseResult {
    const ALIGNMENT: usize = 64;
    on_each_for_plans(backend, |bench| {
        let product = Product::new(Types::F32.shape(16, 16, 16), 15).with_epilogue(Epilogue::Bias);
        let options = PlanOptions::new(product.shape, product.epilogue(), 0).with_alignment(ALIGNMENT);
        let plan = bench.handle.raw_mut().create_plan(&options)?;
        let placed = product.place_on(bench.backend, bench.device)?;
        let other = Block::on(bench.backend, bench.device, placed.c.bytes())?;
        let bias = placed.bias.as_ref().ok_or_else(|| Failure::new("a product with a bias has none"))?;
        let at = |block: &Block<'_>| block.ptr().offset(GUARD_BYTES);
        let mut right = PlanArguments::new(at(&placed.a), at(&placed.b), at(&other), Some(at(bias)));
        right.c = at(&placed.c);
        type Move = fn(&mut PlanArguments);
        const OPERANDS: [(&str, Move); 5] = [
            ("A", |arguments| arguments.a = arguments.a.offset(ALIGNMENT / 2)),
            ("B", |arguments| arguments.b = arguments.b.offset(ALIGNMENT / 2)),
            ("C", |arguments| arguments.c = arguments.c.offset(ALIGNMENT / 2)),
            ("D", |arguments| arguments.d = arguments.d.offset(ALIGNMENT / 2)),
            ("the bias", |arguments| arguments.bias = arguments.bias.map(|bias| bias.offset(ALIGNMENT / 2))),
        ];
        for beta in [0.0, 1.0] {
            right.beta = beta;
            // C counts too if it is not read.
            for (what, shift) in OPERANDS {
                let mut arguments = right;
                shift(&mut arguments);
                // SAFETY: each operand lies in its block, of which guards follow, and the blocks live until the wait below.
                let run = unsafe { bench.handle.raw_mut().run_plan(plan, &arguments) };
                check_error!(
                    run,
                    InvalidArgument,
                    "run_plan with {what} less aligned than the plan states, beta {beta}"
                );
            }
        }
        bench.stream.synchronize()?;
        bench.handle.run_plan(plan, &product.shape, (1.0, 0.0), placed.operands(), None, Some(bias))?;
        bench.stream.synchronize()?;
        placed.check(&product)
    })
}

fn of_plans_follow_a_reset(backend: &dyn Backend) -> CaseResult {
    on_each_for_plans(backend, |bench| {
        let product = Product::new(Types::F32.shape(16, 24, 8), 16).with_epilogue(Epilogue::BiasRelu);
        let plan = bench.plan(&product)?;
        for _ in 0..2 {
            match bench.handle.raw_mut().reset() {
                Err(error) if error.kind() == highwater_hal::ErrorKind::Unsupported => return Ok(()),
                reset => reset?,
            }
            bench.handle.set_stream(bench.stream)?;
            let workspace = bench.workspace;
            bench.handle.offer_workspace(workspace, 0..WORKSPACE_BYTES)?;
            let placed = product.place_on(bench.backend, bench.device)?;
            let (operands, bias) = (placed.operands(), placed.bias.as_ref());
            bench.handle.run_plan(plan, &product.shape, (1.0, 0.0), operands, None, bias)?;
            bench.stream.synchronize()?;
            placed.check(&product)?;
        }
        Ok(bench.handle.raw_mut().destroy_plan(plan)?)
    })
}

fn of_plans_follow_the_handle_to_another_stream(backend: &dyn Backend) -> CaseResult {
    on_each_for_plans(backend, |bench| {
        let (backend, device) = (bench.backend, bench.device);
        let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
        let other = Stream::on(backend, device)?;
        let product = Product::new(Types::F32.shape(16, 16, 16), 17);
        let placed = product.place_on(backend, device)?;
        let right = Block::on(backend, device, placed.a.bytes())?;
        right.write(0, &placed.a.read()?)?;
        let wrong = Block::on(backend, device, placed.a.bytes())?;
        wrong.write(0, &with_other_elements(&placed.a)?)?;
        let plan = bench.plan(&product)?;
        let operands = placed.operands();
        bench.handle.run_plan(plan, &product.shape, (1.0, 0.0), operands, None, None)?;
        bench.stream.synchronize()?;
        bench.handle.set_stream(&other)?;
        let workspace = bench.workspace;
        bench.handle.offer_workspace(workspace, 0..WORKSPACE_BYTES)?;
        until_conclusive("the work was over before the plan ran behind it", |load| {
            other.copy(placed.a.all(), wrong.all())?;
            busy.enqueue(&other, load)?;
            other.copy(placed.a.all(), right.all())?;
            bench.handle.run_plan(plan, &product.shape, (1.0, 0.0), operands, None, None)?;
            let outstanding = other.is_pending()?;
            check!(bench.stream.query()?.is_complete(), "a plan runs on the stream that was bound when it was made");
            other.synchronize()?;
            placed.check(&product)?;
            Ok(Attempt::seen(outstanding))
        })
    })
}

// ----------------------------------------------------------------------------------------------------- plans side by side

/// A plan, and a product for it. A plan accepts the address of its operands, and a stricter plan refuses it.
struct Planned {
    what: &'static str,
    options: PlanOptions,
    product: Product,
}

impl Planned {
    fn new(what: &'static str, shape: GemmShape, epilogue: Epilogue) -> Self {
        // The seed follows from nothing that differs between plans, so equal shapes have equal operands.
        let product = Product::new(shape, 31).with_scale(1.0, 0.5).with_epilogue(epilogue);
        Self { what, options: PlanOptions::new(shape, epilogue, WORKSPACE_BYTES), product }
    }

    fn with_options(mut self, change: impl FnOnce(PlanOptions) -> PlanOptions) -> Self {
        self.options = change(self.options);
        self
    }
}

/// Makes all plans on one handle, in each order, and runs each while the others live.
fn run_side_by_side(bench: &mut Bench<'_>, planned: &[Planned]) -> CaseResult {
    let orders: [Vec<&Planned>; 2] = [planned.iter().collect(), planned.iter().rev().collect()];
    for order in orders {
        let mut plans = Vec::new();
        for planned in order {
            plans.push((bench.handle.raw_mut().create_plan(&planned.options)?, planned));
        }
        for (made, (plan, Planned { what, options, product })) in plans.iter().enumerate() {
            if plans[..made].iter().any(|(other, _)| other == plan) {
                return Err(Failure::new(format!("the plan {what} has the id of a plan that lives")));
            }
            let placed = product.place_on(bench.backend, bench.device)?;
            let scale = (product.alpha, product.beta);
            let ran =
                bench.handle.run_plan(*plan, &product.shape, scale, placed.operands(), None, placed.bias.as_ref());
            ran.map_err(|error| Failure::new(format!("the plan {what} does not run beside others: {error}")))?;
            bench.stream.synchronize()?;
            let failed = |failure: Failure| failure.with_details(&format!("by the plan {what}, beside others"));
            placed.check(product).map_err(failed)?;
            // One element further on, which is less aligned. The matrices then end inside the guards behind them.
            let element = options.shape.data_type.bytes().max(options.shape.output.bytes());
            if product.bias.is_none() {
                let operands = placed.operands().map(|(block, offset)| (block, offset + element));
                let ran = bench.handle.run_plan(*plan, &product.shape, (0.0, 0.0), operands, None, None);
                match (ran, options.alignment > element) {
                    (Ok(()), false) => {}
                    (ran, true) => check_error!(ran, InvalidArgument, "a run of the plan {what} on odd addresses"),
                    (Err(error), false) => {
                        let message =
                            format!("the plan {what} refuses operands that are aligned to {element}: {error}");
                        return Err(Failure::new(message));
                    }
                }
                bench.stream.synchronize()?;
            }
        }
        for (plan, _) in plans {
            bench.handle.raw_mut().destroy_plan(plan)?;
        }
    }
    Ok(())
}

/// Plans of one handle that differ in one field each. All are square, so that most fields change no size.
fn of_plans_that_live_at_once_are_apart(backend: &dyn Backend) -> CaseResult {
    const SIDE: usize = 8;
    on_each_for_plans(backend, |bench| {
        let square = Types::F32.shape(SIDE, SIDE, SIDE);
        let wide = square.with_leading_dimensions(2 * SIDE, 2 * SIDE, 2 * SIDE);
        let plain = |what, shape| Planned::new(what, shape, Epilogue::None);
        let mut planned = vec![
            plain("of a square product", square),
            plain("with another m", Types::F32.shape(SIDE / 2, SIDE, SIDE).with_leading_dimensions(SIDE, SIDE, SIDE)),
            plain("with another n", Types::F32.shape(SIDE, SIDE / 2, SIDE)),
            plain("with another k", Types::F32.shape(SIDE, SIDE, SIDE / 2).with_leading_dimensions(SIDE, SIDE, SIDE)),
            plain("with A transposed", square.with_transposed_a()),
            plain("with B transposed", square.with_transposed_b()),
            plain("with A and B transposed", square.with_transposed_a().with_transposed_b()),
            plain("with all leading dimensions doubled", wide),
            plain("with another lda", square.with_leading_dimensions(2 * SIDE, SIDE, SIDE)),
            plain("with another ldb", square.with_leading_dimensions(SIDE, 2 * SIDE, SIDE)),
            plain("with another ldc", square.with_leading_dimensions(SIDE, SIDE, 2 * SIDE)),
            plain("for addresses aligned to 64", square).with_options(|options| options.with_alignment(64)),
            plain("without a workspace", square)
                .with_options(|options| PlanOptions::new(options.shape, options.epilogue, 0)),
        ];
        if bench.can.strided_batch {
            const MATRIX: usize = SIDE * SIDE;
            let batch = StridedBatch { count: 3, stride_a: MATRIX, stride_b: MATRIX, stride_c: MATRIX };
            let batches = [
                ("of a batch of 3", batch),
                ("of a batch of 2", StridedBatch { count: 2, ..batch }),
                ("of a batch of 1", StridedBatch { count: 1, ..batch }),
                ("of a batch with another stride of A", StridedBatch { stride_a: 2 * MATRIX, ..batch }),
                ("of a batch with another stride of B", StridedBatch { stride_b: 2 * MATRIX, ..batch }),
                ("of a batch with another stride of C", StridedBatch { stride_c: 2 * MATRIX, ..batch }),
                ("of a batch with one A", StridedBatch { stride_a: 0, ..batch }),
                ("of a batch with one B", StridedBatch { stride_b: 0, ..batch }),
            ];
            planned.extend(batches.map(|(what, batch)| plain(what, square.with_batch(batch))));
        }
        for (what, epilogue) in [
            ("with a bias", Epilogue::Bias),
            ("that clamps", Epilogue::Relu),
            ("with a bias that clamps", Epilogue::BiasRelu),
            ("that applies GELU", Epilogue::Gelu),
            ("with a bias that applies GELU", Epilogue::BiasGelu),
        ] {
            planned.push(Planned::new(what, square, epilogue));
        }
        if bench.can.tf32 {
            let mut rounded = plain("in TF32", square).with_options(|options| options.with_math_mode(MathMode::Tf32));
            rounded.product = rounded.product.with_tf32();
            planned.push(rounded);
        }
        if bench.can.atomics_mode {
            let atomic = |options: PlanOptions| options.with_atomics_mode(AtomicsMode::Allowed);
            planned.push(plain("with atomics", square).with_options(atomic));
        }
        run_side_by_side(bench, &planned)
    })
}

fn of_plans_for_other_types_are_apart(backend: &dyn Backend) -> CaseResult {
    on_each_for_plans(backend, |bench| {
        let planned: Vec<Planned> = bench
            .types()
            .into_iter()
            .map(|types| Planned::new("for one of the pairs of types", types.shape(16, 16, 16), Epilogue::None))
            .collect();
        run_side_by_side(bench, &planned)
    })
}

/// More plans than caches of 64 and of 128 have, each for another number of terms.
fn of_many_plans_are_right(backend: &dyn Backend) -> CaseResult {
    const PLANS: usize = 130;
    on_each_for_plans(backend, |bench| {
        let products: Vec<Product> = (1..=PLANS).map(|k| Product::new(Types::F32.shape(4, 4, k), 32)).collect();
        let mut plans = Vec::new();
        for product in &products {
            plans.push(bench.handle.raw_mut().create_plan(&PlanOptions::new(product.shape, Epilogue::None, 0))?);
        }
        // From the first on, and then against the order.
        for index in (0..PLANS).step_by(9).chain((0..PLANS).rev().step_by(13)) {
            let product = &products[index];
            let placed = product.place_on(bench.backend, bench.device)?;
            let ran = bench.handle.run_plan(plans[index], &product.shape, (1.0, 0.0), placed.operands(), None, None);
            ran.map_err(|error| Failure::new(format!("plan {index} of {PLANS} that live does not run: {error}")))?;
            bench.stream.synchronize()?;
            placed.check(product)?;
        }
        plans.into_iter().try_for_each(|plan| bench.handle.raw_mut().destroy_plan(plan))?;
        Ok(())
    })
}

// ----------------------------------------------------------------------------------------------- special factors and sizes

fn without_terms_take_any_alpha(backend: &dyn Backend) -> CaseResult {
    on_each(backend, |bench| {
        for types in bench.types() {
            for shape in bench.alone_and_in_a_batch(types, (5, 3, 0)) {
                for alpha in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 3.0] {
                    for beta in [0.0, 1.0, -2.0] {
                        bench.prove(&Product::new(shape, 33).with_scale(alpha, beta))?;
                    }
                    // The old C is not read.
                    bench.prove(&Product::new(shape, 33).with_scale(alpha, 0.0).with_nan_in_c())?;
                }
            }
            // The gaps of C stay as they are, although nothing of C does.
            for (k, alpha) in [(0, 3.0), (4, 0.0)] {
                let (m, n) = (5, 3);
                let alone = types.shape(m, n, k).with_leading_dimensions(m, k.max(1), m + 2);
                let batch = StridedBatch { count: 3, stride_a: m * k, stride_b: k * n, stride_c: (m + 2) * n };
                let shapes = if bench.can.strided_batch { vec![alone, alone.with_batch(batch)] } else { vec![alone] };
                for shape in shapes {
                    bench.prove(&Product::new(shape, 33).with_scale(alpha, 0.0))?;
                }
            }
        }
        Ok(())
    })
}

/// Alpha and beta are numbers of the type that sums have, which has a larger range than 16-bit floats.
fn take_factors_beyond_the_range_of_their_type(backend: &dyn Backend) -> CaseResult {
    // The products are 2^-20.
    let small = 2.0_f64.powi(-10);
    on_each(backend, |bench| {
        for types in bench.types() {
            for shape in bench.alone_and_in_a_batch(types, (8, 8, 8)) {
                let product = Product::new(shape, 34).with_factors(small);
                for alpha in [100_000.0, -70_000.0, 1e7] {
                    bench.prove(&product.clone().with_scale(alpha, 0.0))?;
                }
                // The old C is small too.
                bench.prove(&product.clone().with_old_c(small).with_scale(100_000.0, 100_000.0))?;
                // Smaller than the least number of half precision.
                let large = Product::new(shape, 34).with_factors(128.0).with_scale(1e-9, 0.0);
                bench.prove(&large)?;
            }
        }
        Ok(())
    })
}

/// A matrix of one row, one column or one element, whose leading dimension and transposition matter nevertheless.
fn of_single_rows_columns_and_terms(backend: &dyn Backend) -> CaseResult {
    const SIZES: [(usize, usize, usize); 7] =
        [(1, 1, 1), (1, 1, 7), (1, 6, 1), (6, 1, 1), (1, 6, 7), (6, 1, 7), (6, 5, 1)];
    on_each(backend, |bench| {
        for (index, types) in bench.types().into_iter().enumerate() {
            let shapes = SIZES.into_iter().flat_map(|(m, n, k)| {
                let plain = types.shape(m, n, k);
                let both = plain.with_transposed_a().with_transposed_b();
                [plain, plain.with_transposed_a(), plain.with_transposed_b(), both]
            });
            // All of the first types, and every third of the others.
            let step = if index == 0 { 1 } else { 3 };
            for shape in shapes.skip(index % 3).step_by(step) {
                let far = shape.with_leading_dimensions(shape.lda + 10, shape.ldb + 11, shape.ldc + 12);
                bench.prove(&Product::new(far, 35).with_scale(0.5, 2.0))?;
            }
        }
        Ok(())
    })
}

fn of_batches_of_one_take_any_strides(backend: &dyn Backend) -> CaseResult {
    on_each(backend, |bench| {
        for types in bench.types() {
            for stride in [0, 1, 1000] {
                let batch = StridedBatch { count: 1, stride_a: stride, stride_b: stride, stride_c: stride };
                let shape = types.shape(8, 16, 8).with_batch(batch);
                bench.prove(&Product::new(shape, 36).with_scale(1.0, 1.0))?;
            }
        }
        Ok(())
    })
}

// ------------------------------------------------------------------------------------------------------- handles side by side

/// Sets the precision of two handles in each order of up to three settings. After each, both multiply.
fn of_two_handles_keep_their_own_precision(backend: &dyn Backend) -> CaseResult {
    const MODES: [MathMode; 2] = [MathMode::Default, MathMode::Tf32];
    on_each(backend, |bench| {
        if bench.kind == BlasKind::Lt {
            // A plan has its own precision.
            return Ok(());
        }
        let product = Product::new(Types::F32.shape(16, 16, 8), 6);
        let rounded = product.clone().with_tf32();
        bench.handle.raw_mut().set_math_mode(MathMode::Tf32)?;
        if bench.run(&product)?.check(&product).is_ok() {
            // The mode has no visible effect.
            return Ok(());
        }
        let mut handles = Vec::new();
        for _ in 0..2 {
            handles.push(Handle::new(bench.backend, bench.kind, bench.stream)?);
        }
        let placed = product.place_on(bench.backend, bench.device)?;
        let mut set = [MathMode::Default; 2];
        // A setting is a handle and a mode. Each pair of settings follows each other.
        for first in 0..4 {
            for second in 0..4 {
                for setting in [first, second, first] {
                    let (which, mode) = (setting / 2, MODES[setting % 2]);
                    handles[which].raw_mut().set_math_mode(mode)?;
                    set[which] = mode;
                    for (handle, mode) in handles.iter_mut().zip(set) {
                        placed.gemm(&product, handle)?;
                        bench.stream.synchronize()?;
                        let full = placed.check(&product);
                        let message = format!("a handle in the mode {mode:?}, beside one in another");
                        match mode {
                            MathMode::Tf32 => {
                                placed.check(&rounded)?;
                                check!(full.is_err(), "{message} does not round to TF32");
                            }
                            _ => full.map_err(|failure| failure.with_details(&message))?,
                        }
                    }
                }
            }
        }
        Ok(())
    })
}

fn follow_the_stream_that_any_thread_bound(backend: &dyn Backend) -> CaseResult {
    on_each(backend, |bench| match bench.kind {
        BlasKind::Lt => Ok(()),
        _ => follow_any_thread(bench),
    })
}

fn of_plans_follow_the_stream_that_any_thread_bound(backend: &dyn Backend) -> CaseResult {
    on_each_for_plans(backend, follow_any_thread)
}

/// Binds two streams alternately, each in one of two threads, while the other stream is busy. The product runs on the stream that
/// was bound last, in either thread.
fn follow_any_thread(bench: &mut Bench<'_>) -> CaseResult {
    let (backend, device) = (bench.backend, bench.device);
    let busy = StreamLoad::new(backend, device, Direction::ToDevice)?;
    let streams = [Stream::on(backend, device)?, Stream::on(backend, device)?];
    let product = Product::new(Types::F32.shape(16, 16, 16), 37);
    let placed = product.place_on(backend, device)?;
    let plan = match bench.kind {
        BlasKind::Lt => Some(bench.plan(&product)?),
        _ => None,
    };
    let elsewhere = |act: &mut (dyn FnMut() -> highwater_hal::Result<()> + Send)| -> CaseResult {
        let done = std::thread::scope(|scope| scope.spawn(act).join());
        Ok(done.map_err(|_| Failure::new("a thread panicked"))??)
    };
    // Whether another thread binds the last stream, whether it multiplies, and which stream is the last.
    for (binds, multiplies, last) in [(true, false, 1), (false, true, 0), (true, true, 1), (false, false, 0)] {
        let (stream, other) = (&streams[last], &streams[1 - last]);
        let handle = &mut bench.handle;
        handle.set_stream(other)?;
        if binds {
            elsewhere(&mut || handle.set_stream(stream))?;
        } else {
            elsewhere(&mut || handle.set_stream(other))?;
            handle.set_stream(stream)?;
        }
        let workspace = bench.workspace;
        bench.handle.offer_workspace(workspace, 0..WORKSPACE_BYTES)?;
        until_conclusive("the other stream was idle when the product had run", |load| {
            placed.c.write(0, &with_other_elements(&placed.c)?)?;
            let copied = Block::on(backend, device, placed.c.bytes())?;
            busy.enqueue(other, load)?;
            let handle = &mut bench.handle;
            let mut multiply = || match plan {
                Some(plan) => handle.run_plan(plan, &product.shape, (1.0, 0.0), placed.operands(), None, None),
                None => placed.gemm(&product, handle),
            };
            if multiplies {
                elsewhere(&mut multiply)?;
            } else {
                multiply()?;
            }
            // In the order of the stream that was bound last.
            stream.copy(copied.all(), placed.c.all())?;
            stream.synchronize()?;
            let outstanding = other.is_pending()?;
            other.synchronize()?;
            placed.check(&product)?;
            let same = copied.read()? == placed.c.read()?;
            check!(same, "a product did not run on the stream that was bound last, by another thread: {binds}");
            Ok(Attempt::seen(outstanding))
        })?;
    }
    match plan {
        Some(plan) => Ok(bench.handle.raw_mut().destroy_plan(plan)?),
        None => Ok(()),
    }
}
