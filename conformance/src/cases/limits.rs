//! Products past the limits of simple kernels, operands in unusual places, and arguments that outlive their call.

use highwater_hal::{
    Backend, BlasKind, DataType, DevicePtr, Epilogue, Gemm, GemmShape, PlanOptions, StridedBatch, Transpose,
};

use super::copies::needs_free;
use crate::case::{CaseResult, Failure, cases, check, check_eq, check_error};
use crate::device::{Block, DEVICE, Handle, Pinned, Stream, read_span};
use crate::matrix::{Product, Types};

cases! {
    group "limits";
    products_of_many_rows_columns_and_terms: ["gemm.value", "gemm.leading-dimension"] needs [has::gemm_f32];
    products_of_many_rows_run_in_order: ["gemm.value", "blas.stream-bound", "stream.order"] needs [has::gemm_f32];
    batches_of_many_products: ["gemm.strided-batch"] needs [has::gemm_f32, has::strided_batch];
    batches_of_matrices_far_apart: ["gemm.strided-batch"] needs [has::gemm_f32, has::strided_batch];
    infinite_factors_leave_nothing_finite: ["gemm.infinite-factors"] needs [has::gemm_f32];
    plans_of_many_rows_and_columns: ["plan.value"] needs [has::gemm_f32, has::lt_plans];
    operands_aligned_to_their_elements_only: ["gemm.value"] needs [has::gemm_f32];
    one_matrix_as_both_factors: ["gemm.value", "gemm.transpose"] needs [has::gemm_f32];
    products_keep_their_own_factors: ["gemm.value", "gemm.beta", "blas.stream-bound"] needs [has::gemm_f32];
    plans_keep_their_own_factors: ["plan.value"] needs [has::gemm_f32, has::lt_plans];
    a_product_after_a_refused_one: ["gemm.value", "gemm.mixed-pairs"] needs [has::gemm_f32];
    a_workspace_that_is_bound_again: ["blas.workspace-used"] needs [has::gemm_f32, has::blas_workspace];
}

/// Sizes (m, n, k): more rows than a block of 1,024 threads has, more columns and rows than a grid has blocks in its second
/// dimension, and a long sum.
const SIZES: [(usize, usize, usize); 4] = [(1030, 3, 5), (2, 65_540, 2), (65_540, 2, 1), (3, 2, 20_000)];

fn products_of_many_rows_columns_and_terms(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    for (seed, (m, n, k)) in SIZES.into_iter().enumerate() {
        let product = Product::new(Types::F32.shape(m, n, k), seed as u64).with_scale(0.5, 0.0);
        product.prove(backend, &mut handle, &stream)?;
    }
    // Columns of C that are farther apart than 65,535 elements.
    let shape = Types::F32.shape(3, 4, 2).with_leading_dimensions(3, 2, 65_541);
    Product::new(shape, 9).with_scale(1.0, 1.0).prove(backend, &mut handle, &stream)
}

fn products_of_many_rows_run_in_order(backend: &dyn Backend) -> CaseResult {
    const ROWS: usize = 1030;
    let rows = |first: f32| -> Vec<u8> {
        let element = |index: usize| first + (index % 50) as f32;
        (0..2 * ROWS).flat_map(|index| element(index).to_ne_bytes()).collect()
    };
    let identity: Vec<u8> = [1.0_f32, 0.0, 0.0, 1.0].iter().flat_map(|element| element.to_ne_bytes()).collect();
    let (a, b) = (Block::holding(backend, &rows(0.0))?, Block::holding(backend, &identity)?);
    let (c, fresh) = (Block::filled(backend, 8 * ROWS, 0)?, Block::holding(backend, &rows(7.0))?);
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    let _busy = keep_busy(backend, &stream)?;
    stream.copy(a.all(), fresh.all())?;
    handle.gemm(&gemm(GemmShape::new(DataType::F32, ROWS, 2, 2), 1.0, 0.0), [(&a, 0), (&b, 0), (&c, 0)])?;
    stream.synchronize()?;
    check!(c.read()? == rows(7.0), "a product of {ROWS} rows ran before the copy that precedes it");
    Ok(())
}

fn batches_of_many_products(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    for count in [9, 101, 65_537] {
        let batch = StridedBatch { count, stride_a: 4, stride_b: 4, stride_c: 4 };
        let shape = Types::F32.shape(2, 2, 2).with_batch(batch);
        Product::new(shape, count as u64).with_scale(1.0, 1.0).prove(backend, &mut handle, &stream)?;
    }
    Ok(())
}

/// Matrices that begin more than 2^24 elements after the first, for each operand. Only the elements of the products are written.
fn batches_of_matrices_far_apart(backend: &dyn Backend) -> CaseResult {
    const STRIDE: usize = (1 << 24) + 5;
    const COUNT: usize = 2;
    const BYTES: usize = (STRIDE + 1) * 4;
    needs_free(backend, DEVICE, BYTES + (16 << 20))?;
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    let far = Block::new(backend, BYTES)?;
    let near = |values: [f32; COUNT]| Block::holding(backend, &values.map(f32::to_ne_bytes).concat());
    for operand in 0..3 {
        let values: [[f32; COUNT]; 3] = [[2.0, 3.0], [5.0, 7.0], [11.0, 13.0]];
        let blocks = [near(values[0])?, near(values[1])?, near(values[2])?];
        for (index, value) in values[operand].into_iter().enumerate() {
            far.write(index * STRIDE * 4, &value.to_ne_bytes())?;
        }
        let stride = |of| if of == operand { STRIDE } else { 1 };
        let batch = StridedBatch { count: COUNT, stride_a: stride(0), stride_b: stride(1), stride_c: stride(2) };
        let placed = |of: usize| if of == operand { (&far, 0) } else { (&blocks[of], 0) };
        let shape = GemmShape::new(DataType::F32, 1, 1, 1).with_batch(batch);
        handle.gemm(&gemm(shape, 1.0, 1.0), [placed(0), placed(1), placed(2)])?;
        stream.synchronize()?;
        let expected = values[0].iter().zip(values[1]).zip(values[2]).map(|((a, b), c)| a * b + c);
        for (index, expected) in expected.enumerate() {
            let (block, at) = if operand == 2 { (&far, index * STRIDE * 4) } else { (&blocks[2], index * 4) };
            let got = read_span(backend, DEVICE, block.span(at..at + 4))?;
            check!(
                got == expected.to_ne_bytes(),
                "product {index} of a batch whose matrices {} lie {STRIDE} elements apart: got {:?}, expected {expected}",
                ["A", "B", "C"][operand],
                got.as_array::<4>().map(|bytes| f32::from_ne_bytes(*bytes))
            );
        }
    }
    Ok(())
}

/// Values of alpha and beta for which no element of C is finite.
const INFINITE: [(f64, f64); 7] = [
    (f64::INFINITY, 0.0),
    (f64::NEG_INFINITY, 1.0),
    (f64::NAN, 0.0),
    (1.0, f64::INFINITY),
    (1.0, f64::NEG_INFINITY),
    (0.0, f64::NAN),
    (f64::INFINITY, f64::INFINITY),
];

fn infinite_factors_leave_nothing_finite(backend: &dyn Backend) -> CaseResult {
    let capabilities = backend.capabilities(DEVICE)?;
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    for types in [Types::F32, Types::F64, Types::F16, Types::BF16, Types::F16_TO_F32, Types::BF16_TO_F32] {
        for (m, n, k) in [(1, 1, 1), (5, 3, 40)] {
            let shape = types.shape(m, n, k);
            for (alpha, beta) in INFINITE {
                if capabilities.check_product("gemm", &shape).is_err() {
                    continue;
                }
                let product = Product::new(shape, k as u64).with_scale(alpha, beta);
                let placed = product.place(backend)?;
                placed.gemm(&product, &mut handle)?;
                stream.synchronize()?;
                let elements = placed.elements_of_c(&product)?;
                if let Some(place) = elements.iter().position(|element| element.is_finite()) {
                    let got = elements[place];
                    return Err(Failure::new(format!(
                        "a product of {shape:?} with alpha {alpha} and beta {beta}: element {place} of C is {got}, expected is \
                         infinity or NaN"
                    )));
                }
            }
        }
    }
    Ok(())
}

fn plans_of_many_rows_and_columns(backend: &dyn Backend) -> CaseResult {
    const WORKSPACE_BYTES: usize = 4 << 20;
    let workspace = Block::new(backend, WORKSPACE_BYTES)?;
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Lt, &stream)?;
    handle.offer_workspace(&workspace, 0..WORKSPACE_BYTES)?;
    for (seed, (m, n, k)) in [(1032, 8, 8), (8, 65_544, 8)].into_iter().enumerate() {
        let product = Product::new(Types::F32.shape(m, n, k), seed as u64).with_epilogue(Epilogue::Bias);
        let options = PlanOptions::new(product.shape, product.epilogue(), WORKSPACE_BYTES);
        let plan = handle.raw_mut().create_plan(&options)?;
        let placed = product.place(backend)?;
        handle.run_plan(plan, &product.shape, (1.0, 0.0), placed.operands(), None, placed.bias.as_ref())?;
        stream.synchronize()?;
        handle.raw_mut().destroy_plan(plan)?;
        placed.check(&product)?;
    }
    Ok(())
}

const SIZE: usize = 8;
const BYTES: usize = SIZE * SIZE * 4;

fn shape() -> GemmShape {
    GemmShape::new(DataType::F32, SIZE, SIZE, SIZE)
}

fn gemm(shape: GemmShape, alpha: f64, beta: f64) -> Gemm {
    let nowhere = DevicePtr::new(0);
    Gemm::new(shape, nowhere, nowhere, nowhere).with_scale(alpha, beta)
}

/// Returns the bytes of a matrix in column-major order.
fn matrix(element: impl Fn(usize, usize) -> f32) -> Vec<u8> {
    let elements = (0..SIZE).flat_map(|column| (0..SIZE).map(move |row| (row, column)));
    elements.flat_map(|(row, column)| element(row, column).to_ne_bytes()).collect()
}

fn counted(row: usize, column: usize) -> f32 {
    (row * SIZE + column) as f32 - 20.0
}

fn identity(row: usize, column: usize) -> f32 {
    f32::from(u8::from(row == column))
}

fn operands_aligned_to_their_elements_only(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    for offset in [4, 8, 12] {
        let placed = |bytes: Vec<u8>| Block::holding(backend, &[vec![0; offset], bytes].concat());
        let (a, b, c) = (placed(matrix(counted))?, placed(matrix(identity))?, placed(matrix(|_, _| 1.0))?);
        handle.gemm(&gemm(shape(), 2.0, 1.0), [(&a, offset), (&b, offset), (&c, offset)])?;
        stream.synchronize()?;
        let expected = matrix(|row, column| 2.0 * counted(row, column) + 1.0);
        check!(c.read()?[offset..] == expected, "a product of matrices at {offset} bytes from the alignment is wrong");
    }
    Ok(())
}

fn one_matrix_as_both_factors(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    let both = Block::holding(backend, &matrix(counted))?;
    for transpose in [Transpose::No, Transpose::Yes] {
        let shape = if transpose == Transpose::Yes { shape().with_transposed_b() } else { shape() };
        let c = Block::filled(backend, BYTES, 0)?;
        handle.gemm(&gemm(shape, 1.0, 0.0), [(&both, 0), (&both, 0), (&c, 0)])?;
        stream.synchronize()?;
        let expected = matrix(|row, column| {
            let second =
                |inner| if transpose == Transpose::Yes { counted(column, inner) } else { counted(inner, column) };
            (0..SIZE).map(|inner| counted(row, inner) * second(inner)).sum()
        });
        check!(c.read()? == expected, "the product of a matrix with itself is wrong, B transposed: {transpose:?}");
    }
    Ok(())
}

/// Keeps the stream busy while the next calls are made.
fn keep_busy<'b>(backend: &'b dyn Backend, stream: &Stream<'_>) -> highwater_hal::Result<(Block<'b>, Pinned<'b>)> {
    const BUSY_BYTES: usize = 8 << 20;
    let busy = (Block::new(backend, BUSY_BYTES)?, Pinned::new(backend, BUSY_BYTES)?);
    stream.copy(busy.0.all(), busy.1.all())?;
    Ok(busy)
}

/// The factors alpha and beta of products that wait at the same time.
const FACTORS: [(f32, f32); 4] = [(2.0, 1.0), (3.0, 0.0), (-1.0, 2.0), (0.5, -1.0)];

fn products_keep_their_own_factors(backend: &dyn Backend) -> CaseResult {
    keep_factors(backend, BlasKind::Blas)
}

fn plans_keep_their_own_factors(backend: &dyn Backend) -> CaseResult {
    keep_factors(backend, BlasKind::Lt)
}

fn keep_factors(backend: &dyn Backend, kind: BlasKind) -> CaseResult {
    const WORKSPACE_BYTES: usize = 4 << 20;
    let workspace = Block::new(backend, WORKSPACE_BYTES)?;
    let (a, b) = (Block::holding(backend, &matrix(counted))?, Block::holding(backend, &matrix(identity))?);
    let results = FACTORS.map(|_| Block::holding(backend, &matrix(|_, _| 1.0)));
    let results = results.into_iter().collect::<highwater_hal::Result<Vec<_>>>()?;
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, kind, &stream)?;
    handle.offer_workspace(&workspace, 0..WORKSPACE_BYTES)?;
    let plan = match kind {
        BlasKind::Lt => {
            let options = PlanOptions::new(shape(), Epilogue::None, WORKSPACE_BYTES);
            Some(handle.raw_mut().create_plan(&options)?)
        }
        _ => None,
    };
    let _busy = keep_busy(backend, &stream)?;
    for ((alpha, beta), c) in FACTORS.into_iter().zip(&results) {
        let (alpha, beta, operands) = (f64::from(alpha), f64::from(beta), [(&a, 0), (&b, 0), (c, 0)]);
        match plan {
            Some(plan) => handle.run_plan(plan, &shape(), (alpha, beta), operands, None, None)?,
            None => handle.gemm(&gemm(shape(), alpha, beta), operands)?,
        }
    }
    stream.synchronize()?;
    for ((alpha, beta), c) in FACTORS.into_iter().zip(&results) {
        let expected = matrix(|row, column| alpha * counted(row, column) + beta);
        check!(
            c.read()? == expected,
            "a product with the factors {alpha} and {beta}, one of several that waited, is wrong"
        );
    }
    Ok(())
}

fn a_product_after_a_refused_one(backend: &dyn Backend) -> CaseResult {
    let (a, b) = (Block::holding(backend, &matrix(counted))?, Block::holding(backend, &matrix(identity))?);
    let c = Block::holding(backend, &matrix(|_, _| 1.0))?;
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    for round in 0..3 {
        // No backend has this pair of types.
        let mut wrong = gemm(shape().with_output(DataType::F16), 7.0, 0.0);
        (wrong.a, wrong.b, wrong.c) = (a.ptr(), b.ptr(), c.ptr());
        // SAFETY: The types are refused; if they are not, the product stays inside the blocks.
        let refused = unsafe { handle.raw_mut().gemm(&wrong) };
        check_error!(refused, Unsupported, "a product of f32 factors with a result of f16");
        handle.gemm(&gemm(shape(), 2.0, 1.0), [(&a, 0), (&b, 0), (&c, 0)])?;
        stream.synchronize()?;
        let expected = matrix(|row, column| 2.0 * counted(row, column) * (round + 1) as f32 + 1.0);
        check!(c.read()? == expected, "product {round} after a refused one is wrong");
    }
    Ok(())
}

fn a_workspace_that_is_bound_again(backend: &dyn Backend) -> CaseResult {
    const WORKSPACE_BYTES: usize = 1 << 20;
    let stream = Stream::new(backend)?;
    let (first, second) = (Block::new(backend, WORKSPACE_BYTES)?, Block::new(backend, WORKSPACE_BYTES)?);
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    // A long sum of few elements, for which kernels use the workspace.
    let product = Product::new(Types::F32.shape(4, 4, 5000), 1);
    for block in [&first, &second, &first] {
        handle.set_workspace(block, 0..WORKSPACE_BYTES)?;
        product.prove(backend, &mut handle, &stream)?;
    }
    stream.set(second.all(), 0x5c)?;
    stream.synchronize()?;
    product.prove(backend, &mut handle, &stream)?;
    check!(second.read()? == [0x5c; WORKSPACE_BYTES], "a product wrote to a workspace that is not bound any more");
    // A product need not use a workspace. If an equal one has used it, so does this one, once it is bound again.
    for product in [product, Product::new(Types::F32.shape(128, 128, 128), 2)] {
        let uses = |handle: &mut Handle<'_>| -> Result<bool, Failure> {
            stream.set(first.all(), 0x5d)?;
            product.prove(backend, handle, &stream)?;
            Ok(first.read()? != [0x5d; WORKSPACE_BYTES])
        };
        let has_used = uses(&mut handle)?;
        handle.set_stream(&stream)?;
        handle.set_workspace(&first, 0..WORKSPACE_BYTES)?;
        check_eq!(
            uses(&mut handle)?,
            has_used,
            "whether a product uses a workspace that was bound again with the stream"
        );
    }
    Ok(())
}
