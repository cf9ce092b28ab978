//! cuBLASLt.

use crate::blas::scale;
use crate::calls::ok;
use crate::calls::{Heuristic, bits, lt};
use crate::plan::Plan;
use crate::rig::{load, memory, stream, upload};
use highwater_simulated_harness::Answer;
use highwater_simulated_harness::log::Log;
use highwater_simulated_harness::rules;
use highwater_simulated_harness::values::{
    BF16, Bound, F16, F32, F64, IN_32F, IN_64F, IN_TF32, Shape, bytes, compare, decode, encode, numbers,
};

rules! {
    "lt.handles" Lt Shared handles: "handles are made and destroyed, and a heuristic for no results answers 7";
    "lt.values" Lt Shared values: "products of every type by a plan are right within the bound of the type";
    "lt.epilogues" Lt Shared epilogues: "bias, ReLU and GELU behind a product are right";
    "lt.no-epilogue-without-product" Lt Shared no_epilogue_without_product: "with the least alpha there is, the epilogue is kept; with 0 it may be left out";
    "lt.workspace-limit" Lt Shared workspace_limit: "a plan asks for no more workspace than it was allowed";
    "lt.bad-plans" Lt Shared bad_plans: "plans of what does not go together are refused";
}

fn handles(log: &mut Log) -> Answer {
    let (mut handle, mut place) = (0, 0);
    log.is("create", lt!(cublasLtCreate(&mut handle)), 0);
    log.is("a second", lt!(cublasLtCreate(&mut place)), 0);
    log.is("destroyed", (lt!(cublasLtDestroy(handle)), lt!(cublasLtDestroy(place))), (0, 0));
    let plan = Plan::new(F32, F32, IN_32F, &Shape::packed(16, 16, 16))?;
    let [a, b, c] = plan.layouts;
    let mut result = Heuristic::default();
    let code = lt!(cublasLtMatmulAlgoGetHeuristic(
        plan.handle,
        plan.description,
        a,
        b,
        c,
        c,
        plan.preference,
        0,
        &mut result,
        &mut 0
    ));
    log.is("no results asked for", code, 7);
    Ok(())
}

fn values(log: &mut Log) -> Answer {
    let (stream, room) = (stream()?, 4 << 20);
    let workspace = memory(room)?;
    for (name, of, compute) in [
        ("f32", F32, IN_32F),
        ("f32 by TF32", F32, IN_TF32),
        ("f64", F64, IN_64F),
        ("f16", F16, IN_32F),
        ("bf16", BF16, IN_32F),
    ] {
        for (transposed, (alpha, beta)) in [((false, false), (1.0, 0.0)), ((true, false), (0.5, -1.0))] {
            let (m, n, k) = (64, 48, 96);
            let (lda, ldb) = (if transposed.0 { k } else { m }, if transposed.1 { n } else { k });
            let shape = Shape { transposed, m, n, k, lda, ldb, ldc: m };
            let what = format!("{name}, transposed {transposed:?}, scales {alpha} {beta}");
            let plan = Plan::new(of, of, compute, &shape)?;
            plan.limit_workspace(room as u64)?;
            let (code, count, found) = plan.find();
            log.is(&format!("{what}: heuristic"), (code, count, found.state), (0, 1, 0));
            let [of_a, of_b, of_c] = shape.elements();
            let (a, b, c) = (numbers(of, of_a, 6), numbers(of, of_b, 7), numbers(of, of_c, 8));
            let blocks =
                [upload(&encode(of, &a), stream)?, upload(&encode(of, &b), stream)?, upload(&encode(of, &c), stream)?];
            let scales = (scale(compute, alpha), scale(compute, beta));
            let code = plan.run(&found, (&scales.0, &scales.1), blocks, (workspace, room), stream);
            log.is(&format!("{what}: status"), code, 0);
            let seen = decode(of, &load::<u8>(blocks[2], of_c * bytes(of), stream)?);
            let expected = shape.expected(Bound::of(of, compute), (alpha, beta), [&a, &b, &c], |_, value| value);
            log.is(&what, compare(&seen, &expected), "right".to_owned());
        }
    }
    Ok(())
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh())
}

fn epilogues(log: &mut Log) -> Answer {
    let (stream, room) = (stream()?, 4 << 20);
    let workspace = memory(room)?;
    let shape = Shape::packed(64, 32, 48);
    for (type_name, of) in [("bf16", BF16), ("f16", F16), ("f32", F32)] {
        let [of_a, of_b, of_c] = shape.elements();
        let (a, b, bias) = (numbers(of, of_a, 9), numbers(of, of_b, 10), numbers(of, shape.m, 11));
        let on_bias = upload(&encode(of, &bias), stream)?;
        for (name, epilogue) in
            [("none", 1u32), ("ReLU", 2), ("bias", 4), ("ReLU and bias", 6), ("GELU", 32), ("GELU and bias", 36)]
        {
            let what = format!("{type_name}, {name}");
            let plan = Plan::new(of, of, IN_32F, &shape)?;
            plan.limit_workspace(room as u64)?;
            plan.describe(7, &epilogue)?;
            if epilogue & 4 != 0 {
                plan.describe(8, &on_bias)?;
            }
            let (code, count, found) = plan.find();
            log.is(&format!("{what}: heuristic"), (code, count), (0, 1));
            let blocks =
                [upload(&encode(of, &a), stream)?, upload(&encode(of, &b), stream)?, memory(of_c * bytes(of))?];
            let scales = (scale(IN_32F, 0.25), scale(IN_32F, 0.0));
            let code = plan.run(&found, (&scales.0, &scales.1), blocks, (workspace, room), stream);
            log.is(&format!("{what}: status"), code, 0);
            let seen = decode(of, &load::<u8>(blocks[2], of_c * bytes(of), stream)?);
            let finish = |row: usize, value: f64| {
                let value = if epilogue & 4 != 0 { value + bias[row] } else { value };
                match epilogue & !4 {
                    2 => value.max(0.0),
                    32 => gelu(value),
                    _ => value,
                }
            };
            // The vendor does not say how it approximates GELU.
            let exact = Bound::of(of, IN_32F);
            let bound = if epilogue & 32 != 0 { exact.loosened() } else { exact };
            let expected = shape.expected(bound, (0.25, 0.0), [&a, &b, &vec![0.0; of_c]], finish);
            log.is(&what, compare(&seen, &expected), "right".to_owned());
        }
    }
    Ok(())
}

/// What the backend has to get around, see its `run_plan`.
fn no_epilogue_without_product(log: &mut Log) -> Answer {
    let (stream, room) = (stream()?, 4 << 20);
    let workspace = memory(room)?;
    let shape = Shape::packed(64, 32, 48);
    let [of_a, of_b, of_c] = shape.elements();
    let (a, b, c) = (numbers(F32, of_a, 9), numbers(F32, of_b, 10), numbers(F32, of_c, 11));
    let negative = c.iter().filter(|value| **value < 0.0).count();
    for (name, alpha) in [("0", 0.0), ("the least there is", f64::from(f32::from_bits(1)))] {
        let plan = Plan::new(F32, F32, IN_32F, &shape)?;
        plan.limit_workspace(room as u64)?;
        plan.describe(7, &2u32)?;
        let (code, count, found) = plan.find();
        log.is(&format!("{name}: heuristic"), (code, count), (0, 1));
        let blocks =
            [upload(&encode(F32, &a), stream)?, upload(&encode(F32, &b), stream)?, upload(&encode(F32, &c), stream)?];
        let scales = (scale(IN_32F, alpha), scale(IN_32F, 1.0));
        log.is(
            &format!("{name}: status"),
            plan.run(&found, (&scales.0, &scales.1), blocks, (workspace, room), stream),
            0,
        );
        let seen = decode(F32, &load::<u8>(blocks[2], of_c * bytes(F32), stream)?);
        let left = seen.iter().filter(|value| **value < 0.0).count();
        if alpha == 0.0 {
            // By the algorithm.
            log.observed(&format!("{name}: behind a ReLU"), left == 0 || left == negative);
        } else {
            log.is(&format!("{name}: negative ones behind a ReLU"), left, 0);
        }
    }
    Ok(())
}

fn workspace_limit(log: &mut Log) -> Answer {
    let shape = Shape::packed(64, 64, 65_536);
    for limit in [0, 1 << 20, 32 << 20] {
        let plan = Plan::new(F32, F32, IN_32F, &shape)?;
        plan.limit_workspace(limit)?;
        let (code, count, found) = plan.find();
        log.is(&format!("{limit}: heuristic"), (code, count), (0, 1));
        log.is(&format!("{limit}: asked for within"), found.workspace as u64 <= limit, true);
        // The library's choice, by its version and the device.
        log.observed(&format!("{limit}: asked for any"), found.workspace > 0);
    }
    Ok(())
}

fn bad_plans(log: &mut Log) -> Answer {
    let shape = Shape::packed(32, 32, 32);
    let plan = Plan::new(BF16, F64, IN_32F, &shape)?;
    log.is("bf16 to f64: there is none", plan.find().0 != 0, true);
    log.is("bf16 to f64", plan.find().0, 15);
    let other = Plan::new(F32, F32, IN_32F, &Shape::packed(16, 32, 32))?;
    let plan = Plan::new(F32, F32, IN_32F, &shape)?;
    let ([a, b, _], [_, _, c]) = (plan.layouts, other.layouts);
    let mut result = Heuristic::default();
    let code = lt!(cublasLtMatmulAlgoGetHeuristic(
        plan.handle,
        plan.description,
        a,
        b,
        c,
        c,
        plan.preference,
        1,
        &mut result,
        &mut 0
    ));
    log.is("sizes that do not fit: refused", code != 0, true);
    log.is("sizes that do not fit", code, 7);
    let wrong = 5u16;
    let code = lt!(cublasLtMatmulDescSetAttribute(plan.description, 7, bits(&wrong), 2));
    log.is("an attribute of a wrong size", code, 7);
    ok!(lt cublasLtMatmulDescSetAttribute(plan.description, 7, bits(&1u32), 4));
    Ok(())
}
