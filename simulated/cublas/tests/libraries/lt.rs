//! cuBLASLt: descriptors, algorithms, epilogues.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use highwater_simulated_harness::values::{BF16, F16, F32, F64, Shape, bytes, decode, encode};
use highwater_simulated_harness::{code, isolated, ok};

use crate::rig::{Driver, Heuristic, Lt, allocate, download, gate_on, start, stream, upload};
use crate::values::{assert_close, numbers, scale};

const NONE: u32 = 1;
const EPILOGUES: [u32; 6] = [NONE, 2, 4, 6, 32, 36];

/// A product with its descriptors.
struct Plan {
    handle: *mut c_void,
    description: *mut c_void,
    /// A, B, C, D.
    layouts: [*mut c_void; 4],
    preference: *mut c_void,
}

fn attribute<T>(value: &T) -> (*const c_void, usize) {
    (std::ptr::from_ref(value).cast(), size_of::<T>())
}

impl Plan {
    /// Column-major matrices, those of C and D with leading dimensions of their own.
    fn new(types: (u32, u32), compute: u32, shape: &Shape, ldd: usize) -> Self {
        let mut plan =
            Self { handle: null_mut(), description: null_mut(), layouts: [null_mut(); 4], preference: null_mut() };
        ok!(Lt.cublasLtCreate(&mut plan.handle));
        let scale_type = match compute {
            64 => F16,
            70 => F64,
            _ => F32,
        };
        ok!(Lt.cublasLtMatmulDescCreate(&mut plan.description, compute, scale_type));
        ok!(Lt.cublasLtMatmulPreferenceCreate(&mut plan.preference));
        let Shape { transposed, m, n, k, lda, ldb, ldc } = *shape;
        let (a, b) = (if transposed.0 { (k, m) } else { (m, k) }, if transposed.1 { (n, k) } else { (k, n) });
        let stored = [(types.0, a, lda), (types.0, b, ldb), (types.1, (m, n), ldc), (types.1, (m, n), ldd)];
        for (layout, (data_type, (rows, columns), ld)) in plan.layouts.iter_mut().zip(stored) {
            ok!(Lt.cublasLtMatrixLayoutCreate(layout, data_type, rows as u64, columns as u64, ld as i64));
        }
        plan.set(3, &u32::from(transposed.0));
        plan.set(4, &u32::from(transposed.1));
        plan
    }

    fn set<T>(&self, number: u32, value: &T) {
        let (value, bytes) = attribute(value);
        ok!(Lt.cublasLtMatmulDescSetAttribute(self.description, number, value, bytes));
    }

    fn prefer<T>(&self, number: u32, value: &T) {
        let (value, bytes) = attribute(value);
        ok!(Lt.cublasLtMatmulPreferenceSetAttribute(self.preference, number, value, bytes));
    }

    fn batch(&self, count: i32, strides: [i64; 4]) {
        for (&layout, stride) in self.layouts.iter().zip(&strides) {
            let ((count, four), (stride, eight)) = (attribute(&count), attribute(stride));
            ok!(Lt.cublasLtMatrixLayoutSetAttribute(layout, 5, count, four));
            ok!(Lt.cublasLtMatrixLayoutSetAttribute(layout, 6, stride, eight));
        }
    }

    /// The algorithm, or the code without one.
    fn find(&self) -> Result<Heuristic, u32> {
        let [a, b, c, d] = self.layouts;
        let (mut results, mut found) = ([Heuristic::default(); 4], -1);
        let code = code!(Lt.cublasLtMatmulAlgoGetHeuristic(
            self.handle,
            self.description,
            a,
            b,
            c,
            d,
            self.preference,
            4,
            results.as_mut_ptr(),
            &mut found
        ));
        assert_eq!(found, i32::from(code == 0));
        assert_eq!(results[0].state, 0);
        if code == 0 { Ok(results[0]) } else { Err(code) }
    }

    #[expect(clippy::too_many_arguments, reason = "those of the vendor's function")]
    fn run(
        &self,
        algorithm: *const [u64; 8],
        alpha: &[u8],
        [a, b, c, d]: [u64; 4],
        beta: &[u8],
        workspace: u64,
        room: usize,
        stream: *mut c_void,
    ) -> u32 {
        let [a_layout, b_layout, c_layout, d_layout] = self.layouts;
        code!(Lt.cublasLtMatmul(
            self.handle,
            self.description,
            alpha.as_ptr().cast(),
            a,
            a_layout,
            b,
            b_layout,
            beta.as_ptr().cast(),
            c,
            c_layout,
            d,
            d_layout,
            algorithm,
            workspace,
            room,
            stream
        ))
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        for layout in self.layouts {
            ok!(Lt.cublasLtMatrixLayoutDestroy(layout));
        }
        ok!(Lt.cublasLtMatmulPreferenceDestroy(self.preference));
        ok!(Lt.cublasLtMatmulDescDestroy(self.description));
        ok!(Lt.cublasLtDestroy(self.handle));
    }
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
}

fn epilogue(number: u32, value: f64, bias: f64) -> f64 {
    let value = if number & 4 != 0 { value + bias } else { value };
    match number & !4 {
        2 => value.max(0.0),
        32 => gelu(value),
        _ => value,
    }
}

isolated! {
    fn every_epilogue_of_every_type_is_right_with_and_without_workspace(_) over ["cuda"] {
        start(0);
        let stream = stream();
        let workspace = allocate(1 << 16);
        let (m, n, k, ldd) = (72, 60, 6, 80);
        for (input, output, compute) in
            [(F32, F32, 68), (F32, F32, 77), (BF16, BF16, 68), (F16, F16, 68), (F16, F16, 64), (BF16, F32, 68), (F64, F64, 70)]
        {
            let shape = Shape { transposed: (true, false), m, n, k, lda: k + 2, ldb: k, ldc: m };
            let (a, b, c) = (numbers(shape.elements()[0], 1), numbers(k * n, 2), numbers(m * n, 3));
            let bias = numbers(m, 4);
            for number in EPILOGUES {
                for (room, beta) in [(1usize << 16, 0.0), (0, 0.5)] {
                    let plan = Plan::new((input, output), compute, &shape, ldd);
                    let [device_a, device_b] = [&a, &b].map(|values| upload(&encode(input, values), stream));
                    // With beta 0 there may be no C.
                    let device_c = if beta == 0.0 { 0 } else { upload(&encode(output, &c), stream) };
                    let device_d = upload(&encode(output, &vec![7.0; ldd * n]), stream);
                    let device_bias = upload(&encode(output, &bias), stream);
                    plan.set(7, &number);
                    plan.set(8, &device_bias);
                    plan.prefer(1, &(room as u64));
                    let found = plan.find().unwrap();
                    assert!(found.workspace <= room && (found.workspace > 0) == (room > 0));
                    let (alpha, beta_bits) = (scale(compute, 2.0), scale(compute, beta));
                    let operands = [device_a, device_b, device_c, device_d];
                    assert_eq!(plan.run(&found.algorithm, &alpha, operands, &beta_bits, workspace, room, stream), 0);
                    let mut expected = vec![7.0; ldd * n];
                    for (index, expected) in expected.iter_mut().enumerate() {
                        let (row, column) = (index % ldd, index / ldd);
                        if row < m {
                            let sum = 2.0 * shape.element(&a, &b, row, column).0 + beta * c[row + column * m];
                            *expected = epilogue(number, sum, bias[row]);
                        }
                    }
                    let seen = decode(output, &download::<u8>(device_d, ldd * n * bytes(output), stream));
                    assert_close(output, &seen, &expected, &format!("{input} to {output} in {compute}, epilogue {number}"));
                    for block in [device_a, device_b, device_c, device_d, device_bias] {
                        ok!(Driver.cuMemFree_v2(block));
                    }
                }
            }
        }
    }

    fn batches_share_a_bias_of_32_bits(_) over ["cuda"] {
        start(0);
        let (stream, shape) = (stream(), Shape::packed(4, 3, 2));
        let (a, b, bias) = (numbers(3 * 8, 1), numbers(6, 2), numbers(4, 3));
        let plan = Plan::new((BF16, BF16), 68, &shape, 4);
        let [device_a, device_b] = [&a, &b].map(|values| upload(&encode(BF16, values), stream));
        let (device_bias, d) = (upload(&encode(F32, &bias), stream), allocate(3 * 16 * 2));
        plan.batch(3, [8, 0, 12, 16]);
        plan.set(7, &4u32);
        plan.set(8, &device_bias);
        plan.set(26, &F32);
        let (found, one, zero) = (plan.find().unwrap(), scale(68, 1.0), scale(68, 0.0));
        assert_eq!(plan.run(&found.algorithm, &one, [device_a, device_b, 0, d], &zero, 0, 0, stream), 0);
        let seen = decode(BF16, &download::<u8>(d, 3 * 16 * 2, stream));
        for index in 0..3 {
            let mut expected = shape.reference((1.0, 0.0), [&a[index * 8..], &b, &[0.0; 12]]);
            expected.iter_mut().enumerate().for_each(|(place, value)| *value += bias[place % 4]);
            assert_close(BF16, &seen[index * 16..index * 16 + 12], &expected, &format!("product {index}"));
        }
    }

    fn a_run_without_an_algorithm_finds_one_and_nothing_waits(_) over ["cuda"] {
        start(0);
        let (stream, shape) = (stream(), Shape::packed(2, 2, 2));
        let plan = Plan::new((F32, F32), 68, &shape, 2);
        let (a, d) = (upload(&[1f32, 0.0, 0.0, 1.0], stream), upload(&[0f32; 4], stream));
        let gate = gate_on(stream);
        assert_eq!(plan.run(null(), &scale(68, 3.0), [a, a, 0, d], &scale(68, 0.0), 0, 0, stream), 0);
        assert_eq!(code!(Driver.cuStreamQuery(stream)), 600);
        gate.open();
        assert_eq!(download::<f32>(d, 4, stream), [3.0, 0.0, 0.0, 3.0]);
        // Scales on the device.
        plan.set(2, &1u32);
        let scales = upload(&[5f32, 1.0], stream);
        let place = |index: u64| {
            // SAFETY: the slice has no bytes; only its address counts.
            unsafe { std::slice::from_raw_parts((scales + index * 4) as *const u8, 0) }
        };
        assert_eq!(plan.run(null(), place(0), [a, a, d, d], place(1), 0, 0, stream), 0);
        assert_eq!(download::<f32>(d, 4, stream), [8.0, 0.0, 0.0, 8.0]);
    }

    fn an_algorithm_runs_its_own_problem_with_its_workspace_and_alignment_only(_) over ["cuda"] {
        start(0);
        let (stream, shape) = (stream(), Shape::packed(64, 64, 4));
        let plan = Plan::new((F32, F32), 68, &shape, 64);
        plan.prefer(1, &(1u64 << 20));
        let found = plan.find().unwrap();
        assert_eq!(found.workspace, 64 * 64 * 4);
        let (block, workspace) = (upload(&[0f32; 64 * 64 + 16], stream), allocate(found.workspace + 64));
        let (one, zero) = (scale(68, 1.0), scale(68, 0.0));
        let run = |plan: &Plan, operands: [u64; 4], workspace: u64, room: usize| {
            plan.run(&found.algorithm, &one, operands, &zero, workspace, room, stream)
        };
        let operands = [block, block, 0, block];
        assert_eq!(run(&plan, operands, workspace, found.workspace), 0);
        assert_eq!(run(&plan, operands, workspace, found.workspace - 1), 7);
        assert_eq!(run(&plan, operands, 0, found.workspace), 7);
        assert_eq!(run(&plan, operands, workspace + 4, found.workspace), 7);
        assert_eq!(run(&plan, [block, block, 0, block + 4], workspace, found.workspace), 7);
        assert_eq!(plan.run(&[1; 8], &one, operands, &zero, workspace, found.workspace, stream), 7);
        let other = Plan::new((F32, F32), 68, &Shape::packed(64, 64, 5), 64);
        assert_eq!(run(&other, operands, workspace, found.workspace), 7);
        // Found for operands that are aligned to their elements.
        (5..=8).for_each(|number| plan.prefer(number, &4u32));
        let found = plan.find().unwrap();
        let unaligned = [block, block, 0, block + 4];
        assert_eq!(plan.run(&found.algorithm, &one, unaligned, &zero, workspace, found.workspace, stream), 0);
        ok!(Driver.cuStreamSynchronize(stream));
    }

    fn what_does_not_fit_together_is_invalid_and_what_has_no_kernel_finds_no_algorithm(_) over ["cuda"] {
        start(0);
        let shape = Shape::packed(4, 4, 4);
        let plan = || Plan::new((F32, F32), 68, &shape, 4);
        let with = |change: &dyn Fn(&Plan)| {
            let plan = plan();
            change(&plan);
            plan.find().map(|found| found.workspace)
        };
        assert_eq!(with(&|_| {}), Ok(0));
        for (number, value, code) in
            [(7, 130u32, 15), (7, 152, 15), (2, 2, 15), (3, 9, 7), (1, F64, 15), (0, 72, 15), (0, 5, 15), (26, F64, 0)]
        {
            let expected = if code == 0 { Ok(0) } else { Err(code) };
            assert_eq!(with(&|plan| plan.set(number, &value)), expected, "attribute {number} = {value}");
        }
        assert_eq!(with(&|plan| { plan.set(7, &4u32); plan.set(26, &F64) }), Err(15));
        let layout = |index: usize, number: u32, value: u64| {
            with(&|plan| {
                let (value, bytes) = attribute(&value);
                ok!(Lt.cublasLtMatrixLayoutSetAttribute(plan.layouts[index], number, value, bytes));
            })
        };
        // Rows, columns, leading dimension, batch; another order; another type.
        assert_eq!([layout(0, 3, 5), layout(2, 2, 5), layout(1, 4, 3), layout(3, 5, 2)], [Err(7); 4]);
        assert_eq!([layout(1, 1, 1), layout(1, 0, 1)], [Err(15); 2]);
        assert_eq!(code!(Lt.cublasLtMatmulDescSetAttribute(plan().description, 7, null(), 4)), 7);
        assert_eq!(code!(Lt.cublasLtMatmulDescSetAttribute(plan().description, 7, attribute(&1u16).0, 2)), 7);
        assert_eq!(code!(Lt.cublasLtMatmulDescSetAttribute(plan().description, 99, attribute(&1u32).0, 4)), 7);
        let (mut number, mut written) = (0u32, 0);
        let place = std::ptr::from_mut(&mut number).cast();
        ok!(Lt.cublasLtMatmulDescGetAttribute(plan().description, 7, place, 4, &mut written));
        assert_eq!((number, written), (NONE, 4));
        // A bias that is nowhere, C that is nowhere, and no handle.
        let plan = plan();
        let block = upload(&[0f32; 16], null_mut());
        let (one, zero) = (scale(68, 1.0), scale(68, 0.0));
        assert_eq!(plan.run(null(), &one, [block, block, 0, block], &one, 0, 0, null_mut()), 7);
        plan.set(7, &4u32);
        assert_eq!(plan.run(null(), &one, [block, block, 0, block], &zero, 0, 0, null_mut()), 7);
        assert_eq!(code!(Lt.cublasLtDestroy(null_mut())), 1);
        assert_eq!(code!(Lt.cublasLtMatmulDescDestroy(plan.handle)), 7);
        let [a, b, c, d] = plan.layouts;
        assert_eq!(code!(Lt.cublasLtMatmulAlgoGetHeuristic(
            null_mut(), plan.description, a, b, c, d, plan.preference, 1, &mut Heuristic::default(), &mut 0
        )), 1);
        assert_eq!(code!(Lt.cublasLtMatmulAlgoGetHeuristic(
            plan.handle, plan.description, a, b, c, d, plan.preference, 0, &mut Heuristic::default(), &mut 0
        )), 7);
    }
}
