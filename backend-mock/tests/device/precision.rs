//! Element types, precision and repeatability of products.

use std::collections::HashSet;

use half::{bf16, f16};
use highwater_hal::numbers::Coded;
use highwater_hal::{
    AtomicsMode, Backend, BlasHandle, BlasKind, DataType, ErrorKind, Gemm, GemmShape, MathMode, PlanArguments,
    PlanOptions, Scalar, StridedBatch, Workspace,
};
use proptest::prelude::*;

use crate::reference::{Number, Placed, Problem};
use crate::rig::{Rig, kind, small};

/// A handle on the rig's stream with no workspace but the one given; `None` is its own.
fn handle(rig: &Rig, kind: BlasKind, workspace_bytes: Option<usize>) -> Box<dyn BlasHandle> {
    let mut handle = rig.blas(kind, rig.stream);
    let workspace = workspace_bytes.map(|bytes| Workspace { ptr: rig.allocate(0, bytes.max(1)), bytes });
    // SAFETY: the workspace lives as long as the rig.
    unsafe { handle.set_workspace(workspace).unwrap() };
    handle
}

/// All of C after one product into a copy of it.
fn multiply<T: Number>(rig: &Rig, handle: &mut dyn BlasHandle, problem: &Problem<T>, placed: Placed) -> Vec<T> {
    rig.write(placed.c, &problem.c);
    let gemm = Gemm::new(problem.shape, placed.a, placed.b, placed.c).with_scale(problem.alpha, problem.beta);
    // SAFETY: the blocks are as large as the shape says and live as long as the rig.
    unsafe { handle.gemm(&gemm).unwrap() };
    rig.download(placed.c, problem.c.len(), rig.stream)
}

fn check<T: Number>(rig: &Rig, handle: &mut dyn BlasHandle, problem: &Problem<T>, what: &str) {
    let placed = problem.place(rig);
    let seen = multiply(rig, handle, problem, placed);
    problem.check(&seen, what);
    for block in [placed.a, placed.b, placed.c, placed.bias] {
        rig.free(0, block, None).unwrap();
    }
}

fn check_all<T: Number>() {
    let rig = Rig::new(small());
    let batch = StridedBatch { count: 3, stride_a: 600, stride_b: 0, stride_c: 1000 };
    // The handle's own workspace, one for a few columns, one for less than a column, and none.
    for workspace_bytes in [None, Some(1024), Some(60), Some(0)] {
        let mut handle = handle(&rig, BlasKind::Blas, workspace_bytes);
        for (m, n, k) in [(1, 1, 1), (17, 23, 9), (33, 4, 12), (8, 5, 70), (3, 2, 0)] {
            for transposes in 0..4 {
                let mut shape = GemmShape::new(T::TYPE, m, n, k);
                if transposes & 1 != 0 {
                    shape = shape.with_transposed_a();
                }
                if transposes & 2 != 0 {
                    shape = shape.with_transposed_b();
                }
                let padded = shape.with_leading_dimensions(shape.lda + 3, shape.ldb + 1, shape.ldc + 2);
                for shape in [shape, padded, padded.with_batch(batch)] {
                    for (alpha, beta) in [(1.0, 0.0), (-0.5, 2.0), (0.0, 0.5)] {
                        let what = format!("alpha {alpha}, beta {beta}, workspace {workspace_bytes:?}");
                        check::<T>(&rig, &mut *handle, &Problem::new(shape, alpha, beta), &what);
                    }
                }
            }
        }
    }
}

#[test]
fn products_of_halves_are_right_for_every_shape_and_workspace() {
    check_all::<f16>();
}

#[test]
fn products_of_bfloats_are_right_for_every_shape_and_workspace() {
    check_all::<bf16>();
}

#[test]
fn products_of_floats_are_right_for_every_shape_and_workspace() {
    check_all::<f32>();
}

#[test]
fn products_of_doubles_are_right_for_every_shape_and_workspace() {
    check_all::<f64>();
}

/// Sums that the type itself could not hold: 2048 + 1 is 2048 in f16, and 300 * 300 is infinite.
#[test]
fn halves_are_accumulated_in_32_bits_and_rounded_once() {
    let rig = Rig::new(small());
    for workspace_bytes in [None, Some(0)] {
        let mut handle = handle(&rig, BlasKind::Blas, workspace_bytes);
        let mut ones = Problem::<f16>::new(GemmShape::of::<f16>(2, 2, 4096), 0.5, 0.0);
        ones.a.fill(f16::ONE);
        ones.b.fill(f16::ONE);
        let seen = multiply(&rig, &mut *handle, &ones, ones.place(&rig));
        assert_eq!(seen[..4], [f16::from_f32(2048.0); 4]);
        let mut large = Problem::<f16>::new(GemmShape::of::<f16>(1, 1, 2), 1.0 / 1024.0, 0.0);
        large.a.fill(f16::from_f32(300.0));
        large.b.fill(f16::from_f32(300.0));
        let seen = multiply(&rig, &mut *handle, &large, large.place(&rig));
        assert_eq!(seen[0], f16::from_f32(180_000.0 / 1024.0));
        large.alpha = 1.0;
        assert_eq!(multiply(&rig, &mut *handle, &large, large.place(&rig))[0], f16::INFINITY);
        let mut bfloats = Problem::<bf16>::new(GemmShape::of::<bf16>(1, 1, 1024), 1.0, 0.0);
        bfloats.a.fill(bf16::ONE);
        bfloats.b.fill(bf16::ONE);
        assert_eq!(multiply(&rig, &mut *handle, &bfloats, bfloats.place(&rig))[0], bf16::from_f32(1024.0));
    }
}

/// Misuse of a workspace has to show with half types too: the intermediate result lies there, in 32 bits.
#[test]
fn halves_pass_through_the_workspace_in_32_bits() {
    let rig = Rig::new(small());
    let workspace = Workspace { ptr: rig.upload(&[-1f32; 16]), bytes: 64 };
    let mut handle = handle(&rig, BlasKind::Blas, None);
    // SAFETY: the workspace lives as long as the rig.
    unsafe { handle.set_workspace(Some(workspace)).unwrap() };
    let mut problem = Problem::<f16>::new(GemmShape::of::<f16>(4, 4, 3), 2.0, 0.0);
    problem.a.fill(f16::ONE);
    problem.b.fill(f16::ONE);
    let placed = problem.place(&rig);
    assert_eq!(multiply(&rig, &mut *handle, &problem, placed)[..16], [f16::from_f32(6.0); 16]);
    assert_eq!(rig.download::<f32>(workspace.ptr, 16, rig.stream), [3.0; 16]);
}

#[test]
fn tf32_is_less_exact_than_32_bits_and_within_its_bound() {
    let rig = Rig::new(small());
    let shape = GemmShape::of::<f32>(24, 24, 200);
    let mut problem = Problem::<f32>::new(shape, 1.0, 0.5);
    let placed = problem.place(&rig);
    let mut handle = handle(&rig, BlasKind::Blas, None);
    let exact = multiply(&rig, &mut *handle, &problem, placed);
    problem.check(&exact, "full precision");
    handle.set_math_mode(MathMode::Tf32).unwrap();
    handle.set_stream(rig.stream).unwrap();
    let tf32 = multiply(&rig, &mut *handle, &problem, placed);
    let differing = exact.iter().zip(&tf32).filter(|(exact, tf32)| exact != tf32).count();
    assert!(differing > 24 * 24 / 2, "only {differing} elements differ");
    problem.math_mode = MathMode::Tf32;
    problem.check(&tf32, "TF32");
    handle.set_math_mode(MathMode::Default).unwrap();
    assert_eq!(multiply(&rig, &mut *handle, &problem, placed), exact);
    // A mode of 32-bit products: others do not mind.
    handle.set_math_mode(MathMode::Tf32).unwrap();
    check::<f64>(&rig, &mut *handle, &Problem::new(GemmShape::of::<f64>(24, 24, 200), 1.0, 0.5), "f64");
    // Only factors are rounded, not C.
    let c = 1.0 + f32::EPSILON;
    let mut old = Problem::<f32>::new(GemmShape::of::<f32>(1, 1, 0), 1.0, 1.0);
    old.c.fill(c);
    assert_eq!(multiply(&rig, &mut *handle, &old, old.place(&rig))[0], c);
}

#[test]
fn a_plan_has_the_precision_that_it_was_made_with() {
    let rig = Rig::new(small());
    let shape = GemmShape::of::<f32>(16, 16, 100);
    let mut problem = Problem::<f32>::new(shape, 1.0, 0.0);
    let placed = problem.place(&rig);
    let mut lt = handle(&rig, BlasKind::Lt, None);
    let mut seen = Vec::new();
    for mode in [MathMode::Default, MathMode::Tf32] {
        let options = PlanOptions::new(shape, highwater_hal::Epilogue::None, 4096).with_math_mode(mode);
        let plan = lt.create_plan(&options).unwrap();
        rig.write(placed.c, &problem.c);
        // SAFETY: the blocks are as large as the shape says and live as long as the rig.
        unsafe { lt.run_plan(plan, &PlanArguments::new(placed.a, placed.b, placed.c, None)).unwrap() };
        problem.math_mode = mode;
        seen.push(rig.download::<f32>(placed.c, problem.c.len(), rig.stream));
        problem.check(&seen[seen.len() - 1], &format!("{mode:?}"));
    }
    assert_ne!(seen[0], seen[1]);
}

/// The bits of 20 products, as many times as they differ.
fn different_results<T: Number>(mode: Option<AtomicsMode>, kind: BlasKind, math_mode: MathMode) -> usize {
    let rig = Rig::new(small());
    let shape = GemmShape::new(T::TYPE, 16, 16, 512);
    let mut problem = Problem::<T>::new(shape, 1.0, 0.0);
    problem.math_mode = math_mode;
    let placed = problem.place(&rig);
    let mut results = HashSet::<Vec<u8>>::new();
    for _ in 0..20 {
        let mut handle = handle(&rig, kind, None);
        let seen = if kind == BlasKind::Blas {
            if let Some(mode) = mode {
                handle.set_atomics_mode(mode).unwrap();
            }
            handle.set_math_mode(math_mode).unwrap();
            multiply(&rig, &mut *handle, &problem, placed)
        } else {
            // A plan has its own mode, whatever the handle's is.
            let options = PlanOptions::new(shape, highwater_hal::Epilogue::None, 1 << 20).with_math_mode(math_mode);
            let options = mode.map_or(options, |mode| options.with_atomics_mode(mode));
            handle.set_atomics_mode(AtomicsMode::Allowed).unwrap();
            let plan = handle.create_plan(&options).unwrap();
            rig.write(placed.c, &problem.c);
            // SAFETY: the blocks are as large as the shape says and live as long as the rig.
            unsafe { handle.run_plan(plan, &PlanArguments::new(placed.a, placed.b, placed.c, None)).unwrap() };
            rig.download(placed.c, problem.c.len(), rig.stream)
        };
        if results.insert(bytemuck::cast_slice(&seen).to_vec()) {
            problem.check(&seen, &format!("{mode:?}"));
        }
    }
    results.len()
}

#[test]
fn products_repeat_bit_for_bit_unless_atomics_are_allowed() {
    for kind in [BlasKind::Blas, BlasKind::Lt] {
        for mode in [None, Some(AtomicsMode::NotAllowed)] {
            assert_eq!(different_results::<f16>(mode, kind, MathMode::Default), 1, "{kind:?} {mode:?}");
            assert_eq!(different_results::<bf16>(mode, kind, MathMode::Default), 1, "{kind:?} {mode:?}");
            assert_eq!(different_results::<f32>(mode, kind, MathMode::Default), 1, "{kind:?} {mode:?}");
            assert_eq!(different_results::<f32>(mode, kind, MathMode::Tf32), 1, "{kind:?} {mode:?}");
            assert_eq!(different_results::<f64>(mode, kind, MathMode::Default), 1, "{kind:?} {mode:?}");
        }
        let allowed = Some(AtomicsMode::Allowed);
        assert!(different_results::<f32>(allowed, kind, MathMode::Default) > 1, "{kind:?}");
        assert!(different_results::<f32>(allowed, kind, MathMode::Tf32) > 1, "{kind:?}");
        assert!(different_results::<f64>(allowed, kind, MathMode::Default) > 1, "{kind:?}");
    }
}

/// A product of halves that is stored in 32 bits, through each kind of workspace.
fn check_mixed<T: Number + Scalar>() {
    let rig = Rig::new(small());
    for workspace_bytes in [None, Some(60), Some(0)] {
        let mut handle = handle(&rig, BlasKind::Blas, workspace_bytes);
        for (m, n, k) in [(1, 1, 1), (17, 9, 33), (8, 5, 70)] {
            let shape = GemmShape::new(T::TYPE, m, n, k);
            let factors = Problem::<T>::new(shape, 1.0, 0.0);
            let placed = factors.place(&rig);
            // The same elements in 32 bits, whose products of few digits are exact, and so are their sums.
            let wide = |elements: &[T]| elements.iter().map(|x| Scalar::to_f64(*x) as f32).collect::<Vec<_>>();
            let (a, b) = (rig.upload(&wide(&factors.a)), rig.upload(&wide(&factors.b)));
            let old: Vec<f32> = (0..m * n).map(|i| i as f32 * 0.001).collect();
            let (c, expected) = (rig.upload(&old), rig.upload(&old));
            let mixed = Gemm::new(shape.with_output(DataType::F32), placed.a, placed.b, c).with_scale(1.0, 0.5);
            let same = Gemm::new(GemmShape::new(DataType::F32, m, n, k), a, b, expected).with_scale(1.0, 0.5);
            // SAFETY: the blocks are as large as the shapes say and live as long as the rig.
            unsafe {
                handle.gemm(&mixed).unwrap();
                handle.gemm(&same).unwrap();
            }
            let seen: Vec<f32> = rig.download(c, m * n, rig.stream);
            assert_eq!(seen, rig.download::<f32>(expected, m * n, rig.stream), "{m}x{n}x{k} {workspace_bytes:?}");
            assert_ne!(seen, old);
            for block in [placed.a, placed.b, placed.c, placed.bias, a, b, c, expected] {
                rig.free(0, block, None).unwrap();
            }
        }
    }
}

#[test]
fn mixed_products_are_those_of_widened_factors() {
    check_mixed::<f16>();
    check_mixed::<bf16>();
}

#[test]
fn results_of_mixed_products_are_checked_with_their_own_size() {
    let rig = Rig::new(small());
    let (factors, c) = (rig.allocate(0, 32), rig.allocate(0, 63));
    let mut blas = handle(&rig, BlasKind::Blas, None);
    // SAFETY: what is too small or not aligned is refused before anything is touched.
    let mut run = |shape, c| unsafe { blas.gemm(&Gemm::new(shape, factors, factors, c)) };
    let half = GemmShape::new(DataType::F16, 4, 4, 4);
    run(half, c).unwrap();
    assert_eq!(kind(run(half.with_output(DataType::F32), c)), ErrorKind::InvalidPointer);
    let small = GemmShape::new(DataType::F16, 3, 3, 3);
    assert_eq!(kind(run(small.with_output(DataType::F32), c.offset(2))), ErrorKind::InvalidArgument);
    run(small, c.offset(2)).unwrap();
    run(small.with_output(DataType::F32), c.offset(4)).unwrap();
    rig.gpu.synchronize_stream(rig.stream).unwrap();
}

#[test]
fn types_and_precisions_that_the_device_lacks_are_refused() {
    let rig = Rig::new(small().with_capabilities(|c| {
        c.gemm_bf16 = false;
        c.tf32 = false;
        c.atomics_mode = false;
    }));
    let block = rig.allocate(0, 256);
    let (mut blas, mut lt) = (handle(&rig, BlasKind::Blas, None), handle(&rig, BlasKind::Lt, None));
    let gemm = |data_type| Gemm::new(GemmShape::new(data_type, 1, 1, 1), block, block, block.offset(64));
    // SAFETY: the block is large enough and lives as long as the rig.
    let mut run = |data_type| unsafe { blas.gemm(&gemm(data_type)) };
    assert_eq!(kind(run(DataType::Bf16)), ErrorKind::Unsupported);
    run(DataType::F16).unwrap();
    assert_eq!(kind(blas.set_math_mode(MathMode::Tf32)), ErrorKind::Unsupported);
    let options = |data_type| PlanOptions::new(GemmShape::new(data_type, 1, 1, 1), highwater_hal::Epilogue::None, 0);
    assert_eq!(kind(lt.create_plan(&options(DataType::Bf16))), ErrorKind::Unsupported);
    let tf32 = options(DataType::F32).with_math_mode(MathMode::Tf32);
    assert_eq!(kind(lt.create_plan(&tf32)), ErrorKind::Unsupported);
    let atomics = options(DataType::F32).with_atomics_mode(AtomicsMode::Allowed);
    assert_eq!(kind(lt.create_plan(&atomics)), ErrorKind::Unsupported);
    lt.create_plan(&options(DataType::F16)).unwrap();
    let mut mixed = options(DataType::F16);
    mixed.shape = mixed.shape.with_output(DataType::F32);
    lt.create_plan(&mixed).unwrap();
    mixed.shape = GemmShape::new(DataType::Bf16, 1, 1, 1).with_output(DataType::F32);
    assert_eq!(kind(lt.create_plan(&mixed)), ErrorKind::Unsupported);
}

#[derive(Debug, Clone)]
struct Arbitrary {
    data_type: DataType,
    sizes: (usize, usize, usize),
    transposed: (bool, bool),
    padding: (usize, usize, usize),
    batch: Option<usize>,
    scale: (f64, f64),
    workspace_bytes: Option<usize>,
    atomics: bool,
    tf32: bool,
}

fn arbitrary() -> impl Strategy<Value = Arbitrary> {
    let data_type = prop::sample::select(DataType::ALL);
    let factor = || prop::sample::select(vec![0.0, 1.0, -1.0, 0.5, -2.25]);
    let k = prop_oneof![3 => 0..20usize, 1 => 60..150usize];
    (
        (data_type, (0..20usize, 0..20usize, k), any::<(bool, bool)>()),
        ((0..4usize, 0..4usize, 0..4usize), prop::option::of(0..4usize), (factor(), factor())),
        (prop::option::of(0..3000usize), any::<bool>(), any::<bool>()),
    )
        .prop_map(|((data_type, sizes, transposed), (padding, batch, scale), (workspace_bytes, atomics, tf32))| {
            Arbitrary { data_type, sizes, transposed, padding, batch, scale, workspace_bytes, atomics, tf32 }
        })
}

fn prove<T: Number>(arbitrary: &Arbitrary) {
    let rig = Rig::new(small());
    let (m, n, k) = arbitrary.sizes;
    let mut shape = GemmShape::new(T::TYPE, m, n, k);
    if arbitrary.transposed.0 {
        shape = shape.with_transposed_a();
    }
    if arbitrary.transposed.1 {
        shape = shape.with_transposed_b();
    }
    let (a, b, c) = arbitrary.padding;
    shape = shape.with_leading_dimensions(shape.lda + a, shape.ldb + b, shape.ldc + c);
    if let Some(count) = arbitrary.batch {
        let one = shape.extents("test").unwrap();
        shape = shape.with_batch(StridedBatch { count, stride_a: one.a, stride_b: 0, stride_c: one.c + 1 });
    }
    let mut handle = handle(&rig, BlasKind::Blas, arbitrary.workspace_bytes);
    if arbitrary.atomics {
        handle.set_atomics_mode(AtomicsMode::Allowed).unwrap();
    }
    let mut problem = Problem::<T>::new(shape, arbitrary.scale.0, arbitrary.scale.1);
    if arbitrary.tf32 {
        handle.set_math_mode(MathMode::Tf32).unwrap();
        problem.math_mode = MathMode::Tf32;
    }
    check::<T>(&rig, &mut *handle, &problem, &format!("{arbitrary:?}"));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

    #[test]
    fn any_product_of_any_type_is_within_its_bound(arbitrary in arbitrary()) {
        match arbitrary.data_type {
            DataType::F16 => prove::<f16>(&arbitrary),
            DataType::Bf16 => prove::<bf16>(&arbitrary),
            DataType::F32 => prove::<f32>(&arbitrary),
            _ => prove::<f64>(&arbitrary),
        }
    }
}
