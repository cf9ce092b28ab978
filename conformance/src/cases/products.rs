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
    add_a_bias_and_another_c: ["plan.epilogue", "plan.value"] needs [has::lt_plans];
    apply_gelu_to_large_sums: ["plan.epilogue"] needs [has::lt_plans];
    use_the_bias_of_each_run: ["plan.epilogue"] needs [has::lt_plans];
    refuse_each_operand_that_is_not_aligned: ["plan.alignment"] needs [has::lt_plans, has::gemm_f32];
    of_plans_follow_a_reset: ["blas.reset", "plan.value"] needs [has::lt_plans, has::gemm_f32];
    of_plans_follow_the_handle_to_another_stream: ["blas.stream-bound"]
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
