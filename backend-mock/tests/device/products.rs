use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use highwater_hal::{
    AtomicsMode, Backend, BlasHandle, BlasKind, BlasOptions, Completion, DataType, Epilogue, ErrorKind, FillPattern,
    Gemm, GemmShape, MathMode, PlanArguments, PlanOptions, StridedBatch, Workspace,
};
use highwater_mock::Operation;

use crate::reference::{Placed, Problem, values};
use crate::rig::{Rig, kind, millis, small};

fn gemm(handle: &mut dyn BlasHandle, gemm: &Gemm) -> highwater_hal::Result<()> {
    // SAFETY: tests keep the blocks until the product has completed; other arguments are what the mock refuses.
    unsafe { handle.gemm(gemm) }
}

fn bind(handle: &mut dyn BlasHandle, workspace: Option<Workspace>) -> highwater_hal::Result<()> {
    // SAFETY: tests keep the workspace until the products have completed.
    unsafe { handle.set_workspace(workspace) }
}

#[test]
fn what_a_product_does_not_read_does_not_matter() {
    let rig = Rig::new(small());
    let mut handle = rig.blas(BlasKind::Blas, rig.stream);
    let shape = GemmShape::new(DataType::F32, 4, 4, 4);
    let (nan, ones) = (rig.upload(&[f32::NAN; 16]), rig.upload(&[1f32; 16]));
    // With beta 0 the old C is not read.
    gemm(&mut *handle, &Gemm::new(shape, ones, ones, nan)).unwrap();
    assert_eq!(rig.download::<f32>(nan, 16, rig.stream), [4.0; 16]);
    // With alpha 0 the factors are not, wherever they are.
    let nowhere = highwater_hal::DevicePtr::new(3);
    gemm(&mut *handle, &Gemm::new(shape, nowhere, nowhere, ones).with_scale(0.0, 3.0)).unwrap();
    assert_eq!(rig.download::<f32>(ones, 16, rig.stream), [3.0; 16]);
    for (m, n) in [(0, 4), (4, 0)] {
        gemm(&mut *handle, &Gemm::new(GemmShape::new(DataType::F32, m, n, 4), nowhere, nowhere, nowhere)).unwrap();
    }
    let no_batch = StridedBatch { count: 0, stride_a: 0, stride_b: 0, stride_c: 16 };
    gemm(&mut *handle, &Gemm::new(shape.with_batch(no_batch), nowhere, nowhere, nowhere)).unwrap();
}

/// The distance to the next column or matrix does not matter where there is no next one.
#[test]
fn a_stride_that_is_never_applied_does_not_matter_under_the_checks_either() {
    for options in [small(), small().with_checks(), small().with_race_detector()] {
        for unused in [1 << 62, usize::MAX] {
            let rig = Rig::new(options.clone());
            let batch = StridedBatch { count: 1, stride_a: unused, stride_b: unused, stride_c: unused };
            let column = GemmShape::new(DataType::F32, 2, 1, 1).with_leading_dimensions(unused, unused, unused);
            for shape in [column, column.with_batch(batch), GemmShape::new(DataType::F32, 2, 2, 2).with_batch(batch)] {
                let [a, b] = [(); 2].map(|()| rig.upload(&[2f32; 4]));
                let [c, d] = [(); 2].map(|()| rig.upload(&[1f32; 4]));
                gemm(&mut *rig.blas(BlasKind::Blas, rig.stream), &Gemm::new(shape, a, b, c).with_scale(1.0, 1.0))
                    .unwrap();
                let mut lt = rig.blas(BlasKind::Lt, rig.stream);
                let plan = lt.create_plan(&PlanOptions::new(shape, Epilogue::None, 0)).unwrap();
                let mut arguments = PlanArguments::new(a, b, d, None);
                (arguments.c, arguments.beta) = (d, 1.0);
                // SAFETY: as in `gemm`.
                unsafe { lt.run_plan(plan, &arguments) }.unwrap();
                let sum = 4.0 * shape.k as f32 + 1.0;
                let expected = if shape.n == 1 { [sum, sum, 1.0, 1.0] } else { [sum; 4] };
                for result in [c, d] {
                    assert_eq!(rig.download::<f32>(result, 4, rig.stream), expected, "{shape:?}");
                }
            }
            assert_eq!((rig.gpu.violation_count(), rig.gpu.races().len()), (0, 0));
        }
    }
}

#[test]
fn a_product_is_enqueued_not_computed() {
    let rig = Rig::new(small().with_latency(millis(150)));
    let mut handle = rig.gpu.create_blas_handle(0, &BlasOptions::new(BlasKind::Blas)).unwrap();
    let block = rig.allocate(0, 3 * 64 * 64 * 4);
    handle.set_stream(rig.stream).unwrap();
    let part = 64 * 64 * 4;
    let start = Instant::now();
    let product =
        Gemm::new(GemmShape::new(DataType::F32, 64, 64, 64), block, block.offset(part), block.offset(2 * part));
    gemm(&mut *handle, &product).unwrap();
    assert!(start.elapsed() < millis(140), "enqueueing took {:?}", start.elapsed());
    assert_eq!(rig.gpu.query_stream(rig.stream).unwrap(), Completion::Pending);
    // A handle may go before its product is done; its workspace comes back after.
    let free = rig.gpu.memory_info(0).unwrap().free;
    handle.destroy().unwrap();
    assert_eq!(rig.gpu.memory_info(0).unwrap().free, free);
    rig.gpu.synchronize_stream(rig.stream).unwrap();
    assert!(start.elapsed() >= millis(300), "a product is two operations");
    assert!(rig.gpu.memory_info(0).unwrap().free > free);
}

/// Two handles on one stream with one workspace: wrong numbers without turns, right ones with.
#[test]
fn a_shared_workspace_needs_turns() {
    let rig = Rig::new(small().with_gemm_gap(millis(20)));
    let workspace = Workspace { ptr: rig.allocate(0, 1 << 16), bytes: 1 << 16 };
    let size = 32 * 32;
    let shape = GemmShape::new(DataType::F32, 32, 32, 32);
    let turn = Mutex::new(());
    let wrong_results = |take_turns: bool| {
        let start = Barrier::new(2);
        let products = std::thread::scope(|scope| {
            let threads = [1, 2].map(|seed| {
                let (rig, turn, start) = (&rig, &turn, &start);
                scope.spawn(move || {
                    let mut handle = rig.blas(BlasKind::Blas, rig.stream);
                    bind(&mut *handle, Some(workspace)).unwrap();
                    let mut problem = Problem::<f32>::new(shape, 1.0, 0.0);
                    (problem.a, problem.b) = (values(size, seed), values(size, seed + 10));
                    let Placed { a, b, c, .. } = problem.place(rig);
                    start.wait();
                    {
                        let _turn = take_turns.then(|| turn.lock().unwrap());
                        gemm(&mut *handle, &Gemm::new(shape, a, b, c)).unwrap();
                    }
                    (problem, c)
                })
            });
            threads.map(|thread| thread.join().unwrap())
        });
        let is_wrong = |(problem, c): &&(Problem<f32>, _)| {
            let seen = rig.download::<f32>(*c, problem.c.len(), rig.stream);
            problem.wrong(&seen).is_some()
        };
        products.iter().filter(is_wrong).count()
    };
    assert!(wrong_results(false) > 0, "handles without turns got right numbers");
    assert_eq!(wrong_results(true), 0);
}

#[test]
fn products_pass_through_the_bound_workspace_until_a_stream_is_bound() {
    for resets in [true, false] {
        let rig = Rig::new(small().with_capabilities(|c| c.set_stream_resets_workspace = resets));
        let mut handle = rig.blas(BlasKind::Blas, rig.stream);
        let (ones, c) = (rig.upload(&[1f32; 16]), rig.allocate(0, 64));
        let workspace = Workspace { ptr: rig.upload(&[-1f32; 16]), bytes: 64 };
        let product = Gemm::new(GemmShape::new(DataType::F32, 4, 4, 4), ones, ones, c);
        bind(&mut *handle, Some(workspace)).unwrap();
        handle.set_stream(rig.stream).unwrap();
        gemm(&mut *handle, &product).unwrap();
        let passed_through = if resets { [-1f32; 16] } else { [4.0; 16] };
        assert_eq!(rig.download::<f32>(workspace.ptr, 16, rig.stream), passed_through);
        bind(&mut *handle, Some(workspace)).unwrap();
        gemm(&mut *handle, &product).unwrap();
        assert_eq!(rig.download::<f32>(workspace.ptr, 16, rig.stream), [4.0; 16]);
        rig.fill(workspace.ptr, FillPattern::U32(0), 16, rig.stream).unwrap();
        bind(&mut *handle, None).unwrap();
        gemm(&mut *handle, &product).unwrap();
        assert_eq!(rig.download::<f32>(workspace.ptr, 16, rig.stream), [0.0; 16]);
    }
}

#[test]
fn what_cannot_be_bound_is_refused() {
    let rig = Rig::new(small().with_devices(2));
    let mut handle = rig.blas(BlasKind::Blas, rig.stream);
    assert_eq!(kind(handle.set_stream(rig.stream(1))), ErrorKind::WrongDevice);
    let block = rig.allocate(0, 4096);
    let workspace = |offset: usize, bytes: usize| Some(Workspace { ptr: block.offset(offset), bytes });
    assert_eq!(kind(bind(&mut *handle, workspace(16, 64))), ErrorKind::InvalidArgument);
    assert_eq!(kind(bind(&mut *handle, workspace(256, 4096))), ErrorKind::InvalidPointer);
    bind(&mut *handle, workspace(256, 1024)).unwrap();
    bind(&mut *handle, workspace(256, 1024)).unwrap();
    let gone = rig.stream(0);
    handle.set_stream(gone).unwrap();
    handle.set_stream(gone).unwrap();
    rig.gpu.destroy_stream(gone).unwrap();
    assert_eq!(kind(handle.set_stream(gone)), ErrorKind::InvalidHandle);
    let (a, shape) = (rig.allocate(0, 64), GemmShape::new(DataType::F32, 2, 2, 2));
    let product = Gemm::new(shape, a, a, a.offset(32));
    assert_eq!(kind(gemm(&mut *handle, &product)), ErrorKind::InvalidHandle);
    handle.set_stream(rig.stream).unwrap();
    gemm(&mut *handle, &product).unwrap();
    rig.gpu.synchronize_stream(rig.stream).unwrap();
    rig.free(0, block, None).unwrap();
    assert_eq!(kind(bind(&mut *handle, workspace(256, 1024))), ErrorKind::InvalidPointer);
}

#[test]
fn products_that_cannot_be_are_refused() {
    let rig = Rig::new(small().with_capabilities(|c| {
        c.gemm_f64 = false;
        c.gemm_f16 = false;
        c.tf32 = false;
        c.strided_batch = false;
        c.atomics_mode = false;
    }));
    let mut handle = rig.blas(BlasKind::Blas, rig.stream);
    let block = rig.allocate(0, 256);
    let shape = GemmShape::new(DataType::F32, 4, 4, 4);
    let mut refused =
        |shape: GemmShape, c: usize| kind(gemm(&mut *handle, &Gemm::new(shape, block, block, block.offset(c))));
    assert_eq!(refused(GemmShape::new(DataType::F64, 1, 1, 1), 64), ErrorKind::Unsupported);
    assert_eq!(refused(GemmShape::new(DataType::F16, 1, 1, 1), 64), ErrorKind::Unsupported);
    let batch = StridedBatch { count: 1, stride_a: 0, stride_b: 0, stride_c: 0 };
    assert_eq!(refused(shape.with_batch(batch), 64), ErrorKind::Unsupported);
    assert_eq!(refused(shape.with_leading_dimensions(3, 4, 4), 64), ErrorKind::InvalidArgument);
    assert_eq!(refused(shape, 66), ErrorKind::InvalidArgument);
    assert_eq!(refused(shape, 196), ErrorKind::InvalidPointer);
    assert_eq!(kind(handle.set_math_mode(MathMode::Tf32)), ErrorKind::Unsupported);
    assert_eq!(kind(handle.set_atomics_mode(AtomicsMode::Allowed)), ErrorKind::Unsupported);
    handle.set_math_mode(MathMode::Default).unwrap();
    handle.set_atomics_mode(AtomicsMode::NotAllowed).unwrap();
    assert_eq!(rig.gpu.calls(Operation::Gemm), 6);
}

#[test]
fn a_handle_that_was_never_bound_refuses_products_whatever_default_streams_there_are() {
    for legacy in [true, false] {
        let rig = Rig::new(small().with_capabilities(|c| c.legacy_default_stream = legacy));
        let mut handle = rig.gpu.create_blas_handle(0, &BlasOptions::new(BlasKind::Blas)).unwrap();
        let block = rig.allocate(0, 64);
        let product = Gemm::new(GemmShape::new(DataType::F32, 1, 1, 1), block, block, block.offset(32));
        assert_eq!(kind(gemm(&mut *handle, &product)), ErrorKind::InvalidState);
        handle.set_stream(rig.stream).unwrap();
        gemm(&mut *handle, &product).unwrap();
    }
}

/// Pools bind before every call, so binding must not cost what a call costs.
#[test]
fn binding_takes_no_time_to_speak_of() {
    let rig = Rig::new(small());
    let mut handle = rig.blas(BlasKind::Blas, rig.stream);
    let workspace = Some(Workspace { ptr: rig.allocate(0, 4096), bytes: 4096 });
    let rounds = 100_000;
    let best = (0..5)
        .map(|_| {
            let start = Instant::now();
            for _ in 0..rounds {
                handle.set_stream(rig.stream).unwrap();
                bind(&mut *handle, workspace).unwrap();
            }
            start.elapsed() / rounds
        })
        .min()
        .unwrap();
    println!("set_stream and set_workspace together: {best:?}");
    // Unoptimised builds included.
    assert!(best < Duration::from_micros(2), "{best:?}");
}
