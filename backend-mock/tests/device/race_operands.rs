//! Which bytes a product is said to use, against the definition: each byte of its operands is written by another stream, and is
//! a race exactly where the product reads or writes it.

use std::collections::BTreeSet;

use highwater_hal::{
    Backend, BlasKind, DataType, Epilogue, FillPattern, Gemm, GemmShape, PlanArguments, PlanOptions, StridedBatch,
    Transpose, Workspace,
};
use highwater_mock::Operation;
use proptest::prelude::*;

use crate::rig::{Rig, small};

/// Bytes of an element.
const SIZE: usize = 4;

#[derive(Debug, Clone)]
struct Case {
    shape: GemmShape,
    alpha: f64,
    beta: f64,
    /// Elements in the workspace: few, so that the product is cut into panels.
    room: usize,
}

fn case() -> impl Strategy<Value = Case> {
    let sizes = (1..5usize, 1..5usize, 0..4usize);
    let extra = (0..3usize, 0..3usize, 0..3usize);
    let batch = prop::option::of((1..4usize, 0..2usize, 0..3usize, 0..3usize));
    let scales = (prop::sample::select(vec![0.0, 1.0]), prop::sample::select(vec![0.0, 1.0]));
    // The distance of columns, or of matrices, where there is only one.
    let unused = prop::sample::select(vec![None, Some(1 << 62), Some(usize::MAX)]);
    (sizes, extra, any::<(bool, bool)>(), batch, scales, 1..20usize, unused).prop_map(
        |((m, n, k), (more_a, more_b, more_c), (transpose_a, transpose_b), batch, (alpha, beta), room, unused)| {
            let mut shape = GemmShape::new(DataType::F32, m, n, k);
            if transpose_a {
                shape = shape.with_transposed_a();
            }
            if transpose_b {
                shape = shape.with_transposed_b();
            }
            let leading = |ld, columns| unused.filter(|_| columns <= 1).unwrap_or(ld);
            let (lda, ldb, ldc) = (
                leading(shape.lda + more_a, shape.columns_a()),
                leading(shape.ldb + more_b, shape.columns_b()),
                leading(shape.ldc + more_c, n),
            );
            shape = shape.with_leading_dimensions(lda, ldb, ldc);
            let extents = shape.extents("case").unwrap();
            if let Some((count, one_b, apart_a, apart_c)) = batch {
                let stride_b = one_b * (extents.b + 1);
                let strides = [extents.a + apart_a, stride_b, extents.c + apart_c];
                let [stride_a, stride_b, stride_c] =
                    strides.map(|stride| unused.filter(|_| count == 1).unwrap_or(stride));
                shape = shape.with_batch(StridedBatch { count, stride_a, stride_b, stride_c });
            }
            Case { shape, alpha, beta, room }
        },
    )
}

/// The elements of a matrix of the batch, by the definition.
fn elements(rows: usize, columns: usize, ld: usize, stride: usize, count: usize) -> BTreeSet<usize> {
    let all = (0..count).flat_map(|part| (0..columns).map(move |column| part * stride + column * ld));
    all.flat_map(|first| first..first + rows).collect()
}

/// Elements of A, of B and of C that the product uses.
fn used(case: &Case) -> [BTreeSet<usize>; 3] {
    let shape = &case.shape;
    let batch = shape.batch.unwrap_or(StridedBatch { count: 1, stride_a: 0, stride_b: 0, stride_c: 0 });
    let stored = |transpose, rows, columns| if transpose == Transpose::No { (rows, columns) } else { (columns, rows) };
    let ((rows_a, columns_a), (rows_b, columns_b)) =
        (stored(shape.transpose_a, shape.m, shape.k), stored(shape.transpose_b, shape.k, shape.n));
    let factors = |elements| if case.alpha == 0.0 { BTreeSet::new() } else { elements };
    [
        factors(elements(rows_a, columns_a, shape.lda, batch.stride_a, batch.count)),
        factors(elements(rows_b, columns_b, shape.ldb, batch.stride_b, batch.count)),
        elements(shape.m, shape.n, shape.ldc, batch.stride_c, batch.count),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(100) })]

    #[test]
    fn a_product_uses_the_elements_of_its_operands_and_no_others(case in case()) {
        const ELEMENTS: usize = 100;
        let rig = Rig::new(small().with_schedule(0).with_race_detector());
        let other = rig.stream(0);
        let blocks = [(); 3].map(|()| rig.allocate(0, SIZE * ELEMENTS));
        let workspace = Workspace { ptr: rig.allocate(0, SIZE * case.room), bytes: SIZE * case.room };
        let mut handle = rig.blas(BlasKind::Blas, rig.stream);
        let gemm = Gemm::new(case.shape, blocks[0], blocks[1], blocks[2]).with_scale(case.alpha, case.beta);
        // SAFETY: everything stays allocated; the contents are not looked at.
        unsafe {
            handle.set_workspace(Some(workspace)).unwrap();
            handle.gemm(&gemm).unwrap();
        }
        let mut fills = Vec::new();
        for (index, block) in blocks.into_iter().enumerate() {
            for element in 0..ELEMENTS {
                let place = highwater_hal::DevicePtr::new(block.get() + (SIZE * element) as u64);
                rig.fill(place, FillPattern::U32(0), 1, other).unwrap();
                fills.push((index, element));
            }
        }
        let mut found = [(); 3].map(|()| BTreeSet::new());
        for race in rig.gpu.races() {
            prop_assert_eq!((race.first().operation(), race.second().operation()), (Operation::Gemm, Operation::Fill));
            let (index, element) = fills[race.second().call() as usize - 1];
            prop_assert_eq!(race.first().operand(), Some(["A", "B", "C"][index]));
            prop_assert!(found[index].insert(element));
        }
        prop_assert_eq!(found, used(&case));
        rig.gpu.synchronize_device(0).unwrap();
    }
}

#[test]
fn a_report_names_the_operand_of_a_plan() {
    let rig = Rig::new(small().with_race_detector());
    let other = rig.stream(0);
    let [a, b, c, d, bias, workspace] = [(); 6].map(|()| rig.allocate(0, 1024));
    let mut handle = rig.blas(BlasKind::Lt, rig.stream);
    // SAFETY: everything stays allocated; the contents are not looked at.
    unsafe { handle.set_workspace(Some(Workspace { ptr: workspace, bytes: 1024 })).unwrap() };
    let shape = GemmShape::new(DataType::F32, 4, 4, 4);
    let plan = handle.create_plan(&PlanOptions::new(shape, Epilogue::Bias, 1024)).unwrap();
    let mut arguments = PlanArguments::new(a, b, d, Some(bias));
    (arguments.c, arguments.beta) = (c, 1.0);
    // SAFETY: as above.
    unsafe { handle.run_plan(plan, &arguments).unwrap() };
    let operands = [(a, "A"), (b, "B"), (c, "C"), (d, "D"), (bias, "bias"), (workspace, "workspace")];
    for (index, (block, name)) in operands.into_iter().enumerate() {
        rig.fill(block, FillPattern::U8(0), 1, other).unwrap();
        let races = rig.gpu.races();
        assert_eq!(races.len(), index + 1);
        let place = races[index].first();
        assert_eq!(place.operand(), Some(name).filter(|_| !place.is_workspace()));
        let (text, second) = (races[index].to_string(), races[index].second());
        assert!(text.contains(&format!(" of device 0 (its {name}), on ")), "{text}");
        assert!(text.contains("which both use 1 byte at ") && second.operand().is_none(), "{text}");
    }
    rig.gpu.synchronize_device(0).unwrap();
}
