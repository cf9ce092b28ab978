//! The epilogues of Lt plans, for every element type.

use half::{bf16, f16};
use highwater_hal::numbers::Coded;
use highwater_hal::{
    Backend, BlasHandle, BlasKind, Epilogue, ErrorKind, GemmShape, PlanArguments, PlanOptions, Result, StridedBatch,
};

use crate::reference::{Number, Placed, Problem};
use crate::rig::{Rig, kind, small};

/// One run of a plan of its own, into D.
fn run<T: Number>(lt: &mut dyn BlasHandle, problem: &Problem<T>, workspace_bytes: usize, on: Placed) -> Result<()> {
    let plan = lt.create_plan(&PlanOptions::new(problem.shape, problem.epilogue, workspace_bytes))?;
    let mut arguments = PlanArguments::new(on.a, on.b, on.c, problem.epilogue.has_bias().then_some(on.bias));
    (arguments.alpha, arguments.beta) = (problem.alpha, problem.beta);
    // SAFETY: the blocks are as large as the shape says and live as long as the rig.
    unsafe { lt.run_plan(plan, &arguments)? };
    lt.destroy_plan(plan)
}

fn check_all<T: Number>() {
    let rig = Rig::new(small());
    let mut lt = rig.blas(BlasKind::Lt, rig.stream);
    let shape = GemmShape::new(T::TYPE, 13, 9, 20);
    let batch = StridedBatch { count: 3, stride_a: 300, stride_b: 0, stride_c: 140 };
    let padded = shape.with_transposed_b().with_leading_dimensions(15, 10, 14).with_batch(batch);
    for shape in [shape, padded] {
        for &epilogue in Epilogue::ALL {
            for workspace_bytes in [0, 100, 1 << 16] {
                for (alpha, beta) in [(1.0, 0.0), (0.5, -1.5), (0.0, 1.0)] {
                    let mut problem = Problem::<T>::new(shape, alpha, beta);
                    problem.epilogue = epilogue;
                    let placed = problem.place(&rig);
                    run(&mut *lt, &problem, workspace_bytes, placed).unwrap();
                    let seen = rig.download::<T>(placed.c, problem.c.len(), rig.stream);
                    problem.check(&seen, &format!("{epilogue:?}, {workspace_bytes} bytes, alpha {alpha}, beta {beta}"));
                    for block in [placed.a, placed.b, placed.c, placed.bias] {
                        rig.free(0, block, None).unwrap();
                    }
                }
            }
        }
    }
}

#[test]
fn every_epilogue_is_right_for_halves() {
    check_all::<f16>();
}

#[test]
fn every_epilogue_is_right_for_bfloats() {
    check_all::<bf16>();
}

#[test]
fn every_epilogue_is_right_for_floats() {
    check_all::<f32>();
}

#[test]
fn every_epilogue_is_right_for_doubles() {
    check_all::<f64>();
}

/// Known values of GELU: the reference and the mock might share a wrong formula.
#[test]
fn gelu_has_its_known_values() {
    let rig = Rig::new(small());
    let mut problem = Problem::<f64>::new(GemmShape::of::<f64>(4, 1, 1), 1.0, 0.0);
    problem.a = vec![0.0, 1.0, -1.0, 3.0];
    problem.b = vec![1.0];
    problem.epilogue = Epilogue::Gelu;
    let placed = problem.place(&rig);
    run(&mut *rig.blas(BlasKind::Lt, rig.stream), &problem, 4096, placed).unwrap();
    let seen = rig.download::<f64>(placed.c, 4, rig.stream);
    for (seen, known) in seen.iter().zip([0.0, 0.841_192, -0.158_808, 2.996_363]) {
        assert!((seen - known).abs() < 1e-5, "{seen} {known}");
    }
}

#[test]
fn a_bias_is_demanded_where_it_is_read() {
    let rig = Rig::new(small());
    let mut lt = rig.blas(BlasKind::Lt, rig.stream);
    let problem = Problem::<f32>::new(GemmShape::of::<f32>(4, 4, 4), 1.0, 0.0);
    let placed = problem.place(&rig);
    for &epilogue in Epilogue::ALL {
        let plan = lt.create_plan(&PlanOptions::new(problem.shape, epilogue, 0)).unwrap();
        // SAFETY: the blocks are as large as the shape says and live as long as the rig.
        let ran = unsafe { lt.run_plan(plan, &PlanArguments::new(placed.a, placed.b, placed.c, None)) };
        match epilogue {
            Epilogue::None | Epilogue::Relu | Epilogue::Gelu => ran.unwrap(),
            _ => assert_eq!(kind(ran), ErrorKind::InvalidArgument),
        }
    }
    rig.gpu.synchronize_stream(rig.stream).unwrap();
}
