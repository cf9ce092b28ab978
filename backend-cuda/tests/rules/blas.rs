//! cuBLAS.

use crate::calls::ok;
use crate::calls::{Blas, Handle, bits, blas, cu};
use crate::capture::{ALLOCATION, KERNEL, RELEASE, end_with_graph, executable, nodes};
use crate::rig::{Gate, NOT_READY, load, memory, start, store, stream, upload, warm};
use highwater_simulated_harness::Answer;
use highwater_simulated_harness::log::{Log, need};
use highwater_simulated_harness::rules;
use highwater_simulated_harness::values::{
    BF16, Bound, F16, F32, F64, IN_32F, IN_64F, IN_TF32, Shape, bytes, compare, decode, encode, numbers,
};

rules! {
    "blas.version" Blas Shared version: "version, properties and status names need no handle";
    "blas.defaults" Blas Shared defaults: "a handle begins in the default math mode, without atomics, with scales on the host, on the legacy stream";
    "blas.null-handle" Blas Shared null_handle: "a null handle answers 1";
    "blas.bad-arguments" Blas Shared bad_arguments: "wrong sizes and places answer 7, types that do not go together 15";
    "blas.nothing-to-do" Blas Shared nothing: "products without elements do nothing, and with k = 0 they scale C";
    "blas.beta-zero" Blas Shared beta_zero: "with beta = 0, C is not read";
    "blas.values" Blas Shared values: "products of every type are right within the bound of the type";
    "blas.values-batch" Blas Shared batch: "products of a batch lie at their strides";
    "blas.scales" Blas Shared scales: "scales on the host are read in the call, and those on the device in their turn";
    "blas.asynchronous" Blas Shared asynchronous: "a product is enqueued on the handle's stream, without waiting for it";
    "blas.workspace-places" Blas Shared workspace_places: "a workspace is taken at every address, and so is none";
    "blas.set-stream-drops-workspace" Blas Shared set_stream_drops: "cublasSetStream drops the workspace, for the same stream too";
    "blas.modes-survive" Blas Shared modes_survive: "cublasSetStream keeps the modes of math, atomics and scales";
    "blas.destroy-waits" Blas Own destroy_waits: "cublasDestroy waits for the device";
    "blas.create-does-not-wait" Blas Own create_passes: "cublasCreate does not wait for the device";
    "blas.create-in-capture" Blas Shared create_in_capture: "cublasCreate in a capture answers 1 and loses it";
    "blas.captured" Blas Shared captured: "a product is captured with its scales, and replayed on what its memory holds then";
    "blas.captured-memory" Blas Shared captured_memory: "a large product on the handle's own workspace records memory nodes, and on a given one none; a small one is one kernel (in the simulation two on a given workspace, on purpose)";
}

pub(crate) fn handle() -> Answer<Handle> {
    let mut handle = 0;
    need("cublasCreate", blas!(cublasCreate_v2(&mut handle)))?;
    Ok(handle)
}

fn destroy(handle: Handle) -> Answer {
    need("cublasDestroy", blas!(cublasDestroy_v2(handle)))
}

/// A handle that is bound to a stream.
pub(crate) fn handle_on(stream: Handle) -> Answer<Handle> {
    let handle = handle()?;
    need("cublasSetStream", blas!(cublasSetStream_v2(handle, stream)))?;
    Ok(handle)
}

/// `C = A * B` of packed f32 matrices.
pub(crate) fn single(handle: Handle, [m, n, k]: [i32; 3], [a, b, c]: [u64; 3]) -> u32 {
    let (one, zero) = (1f32, 0f32);
    blas!(cublasSgemm_v2(handle, 0, 0, m, n, k, bits(&one), a, m, b, k, bits(&zero), c, m))
}

fn version(log: &mut Log) -> Answer {
    let (mut number, mut parts) = (0, [0; 3]);
    log.is("cublasGetVersion of null", blas!(cublasGetVersion_v2(0, &mut number)), 0);
    for (which, part) in parts.iter_mut().enumerate() {
        log.is(&format!("property {which}"), blas!(cublasGetProperty(which as u32, part)), 0);
    }
    log.is("version and properties agree", number, parts[0] * 10_000 + parts[1] * 100 + parts[2]);
    // Whichever is installed.
    log.observed("version", number);
    log.is("an unknown property", blas!(cublasGetProperty(9, &mut number)), 7);
    for (status, name) in [
        (0, "CUBLAS_STATUS_SUCCESS"),
        (1, "CUBLAS_STATUS_NOT_INITIALIZED"),
        (3, "CUBLAS_STATUS_ALLOC_FAILED"),
        (7, "CUBLAS_STATUS_INVALID_VALUE"),
        (8, "CUBLAS_STATUS_ARCH_MISMATCH"),
        (11, "CUBLAS_STATUS_MAPPING_ERROR"),
        (13, "CUBLAS_STATUS_EXECUTION_FAILED"),
        (14, "CUBLAS_STATUS_INTERNAL_ERROR"),
        (15, "CUBLAS_STATUS_NOT_SUPPORTED"),
    ] {
        log.is(&format!("status {status}"), Blas::get().name_of(status)?, name.to_owned());
    }
    Ok(())
}

fn defaults(log: &mut Log) -> Answer {
    let handle = handle()?;
    let (mut math, mut atomics, mut pointer, mut stream) = (9, 9, 9, 9);
    log.is("math mode", (blas!(cublasGetMathMode(handle, &mut math)), math), (0, 0));
    log.is("atomics", (blas!(cublasGetAtomicsMode(handle, &mut atomics)), atomics), (0, 0));
    log.is("scales", (blas!(cublasGetPointerMode_v2(handle, &mut pointer)), pointer), (0, 0));
    log.is("stream", (blas!(cublasGetStream_v2(handle, &mut stream)), stream), (0, 0));
    log.is("destroyed", blas!(cublasDestroy_v2(handle)), 0);
    Ok(())
}

fn null_handle(log: &mut Log) -> Answer {
    log.is("cublasDestroy", blas!(cublasDestroy_v2(0)), 1);
    log.is("cublasSetStream", blas!(cublasSetStream_v2(0, 0)), 1);
    log.is("cublasSetWorkspace", blas!(cublasSetWorkspace_v2(0, 0, 0)), 1);
    log.is("cublasSetMathMode", blas!(cublasSetMathMode(0, 0)), 1);
    log.is("cublasSetAtomicsMode", blas!(cublasSetAtomicsMode(0, 0)), 1);
    log.is("cublasSgemm", single(0, [1, 1, 1], [0; 3]), 1);
    log.is("a null place for cublasCreate", blas!(cublasCreate_v2(std::ptr::null_mut())), 7);
    Ok(())
}

fn bad_arguments(log: &mut Log) -> Answer {
    let stream = stream()?;
    let handle = handle_on(stream)?;
    let block = upload(&[1f32; 64], stream)?;
    let (one, zero) = (1f32, 0f32);
    let (one, zero) = (bits(&one), bits(&zero));
    let product = |[m, n, k]: [i32; 3], [lda, ldb, ldc]: [i32; 3], transposed: u32| {
        blas!(cublasSgemm_v2(handle, transposed, 0, m, n, k, one, block, lda, block, ldb, zero, block, ldc))
    };
    log.is("m = -1", product([-1, 4, 4], [4; 3], 0), 7);
    log.is("n = -1", product([4, -1, 4], [4; 3], 0), 7);
    log.is("k = -1", product([4, 4, -1], [4; 3], 0), 7);
    log.is("lda < m", product([4; 3], [3, 4, 4], 0), 7);
    log.is("ldb < k", product([4; 3], [4, 3, 4], 0), 7);
    log.is("ldc < m", product([4; 3], [4, 4, 3], 0), 7);
    log.is("lda < k, transposed", product([2, 4, 4], [3, 4, 4], 1), 7);
    log.is("an unknown transposition", product([4; 3], [4; 3], 9), 7);
    let null = std::ptr::null();
    log.is("no alpha", blas!(cublasSgemm_v2(handle, 0, 0, 4, 4, 4, null, block, 4, block, 4, zero, block, 4)), 7);
    log.is("no beta", blas!(cublasSgemm_v2(handle, 0, 0, 4, 4, 4, one, block, 4, block, 4, null, block, 4)), 7);
    let typed = |a: u32, c: u32, compute: u32| {
        blas!(cublasGemmEx(handle, 0, 0, 2, 2, 2, one, block, a, 2, block, a, 2, zero, block, c, 2, compute, -1))
    };
    log.is("f64 in 32 bits", typed(F64, F64, IN_32F), 15);
    log.is("bf16 to f64", typed(BF16, F64, IN_32F), 15);
    log.is("f32 in 64 bits", typed(F32, F32, IN_64F), 15);
    log.is("an unknown compute type", typed(F32, F32, 9999), 15);
    log.is("an unknown math mode", blas!(cublasSetMathMode(handle, 77)), 7);
    log.is("an unknown atomics mode", blas!(cublasSetAtomicsMode(handle, 7)), 7);
    log.is("the stream goes on", cu!(cuStreamSynchronize(stream)), 0);
    destroy(handle)
}

fn nothing(log: &mut Log) -> Answer {
    let stream = stream()?;
    let handle = handle_on(stream)?;
    let (a, c) = (upload(&[1f32; 16], stream)?, upload(&[3f32; 16], stream)?);
    log.is("m = 0 without places for rows", single(handle, [0, 4, 4], [a, a, c]), 7);
    log.is("C is as it was", load::<f32>(c, 16, stream)?, vec![3.0; 16]);
    let (one, half) = (1f32, 0.5f32);
    let empty = |m: i32, n: i32, k: i32| {
        blas!(cublasSgemm_v2(handle, 0, 0, m, n, k, bits(&one), a, 4, a, 4, bits(&half), c, 4))
    };
    log.is("m = 0, with places for rows", empty(0, 4, 4), 0);
    log.is("n = 0", empty(4, 0, 4), 0);
    log.is("C is as it was, again", load::<f32>(c, 16, stream)?, vec![3.0; 16]);
    log.is("k = 0", empty(4, 4, 0), 0);
    log.is("C is scaled", load::<f32>(c, 16, stream)?, vec![1.5; 16]);
    destroy(handle)
}

fn beta_zero(log: &mut Log) -> Answer {
    let stream = stream()?;
    let handle = handle_on(stream)?;
    let (a, c) = (upload(&[1f32; 16], stream)?, upload(&[f32::NAN; 16], stream)?);
    log.is("the product", single(handle, [4, 4, 4], [a, a, c]), 0);
    log.is("C", load::<f32>(c, 16, stream)?, vec![4.0; 16]);
    let (zero, unknown) = (0f32, upload(&[f32::NAN; 16], stream)?);
    let status = blas!(cublasSgemm_v2(handle, 0, 0, 4, 4, 4, bits(&zero), unknown, 4, a, 4, bits(&zero), c, 4));
    log.is("alpha = 0", status, 0);
    log.is("C with alpha = 0 and NaN in A is 0", load::<f32>(c, 16, stream)? == vec![0.0; 16], true);
    destroy(handle)
}

/// A scale as the compute type takes it.
pub(crate) fn scale(compute: u32, value: f64) -> Vec<u8> {
    encode(if compute == IN_64F { F64 } else { F32 }, &[value])
}

fn values(log: &mut Log) -> Answer {
    let stream = stream()?;
    let handle = handle_on(stream)?;
    for (name, input, output, compute) in [
        ("f32", F32, F32, IN_32F),
        ("f32 by TF32", F32, F32, IN_TF32),
        ("f64", F64, F64, IN_64F),
        ("f16", F16, F16, IN_32F),
        ("bf16", BF16, BF16, IN_32F),
        ("f16 to f32", F16, F32, IN_32F),
        ("bf16 to f32", BF16, F32, IN_32F),
    ] {
        for (transposed, (alpha, beta)) in [
            ((false, false), (1.0, 0.0)),
            ((true, false), (-0.5, 1.0)),
            ((false, true), (0.75, -0.25)),
            ((true, true), (1.0, 1.0)),
        ] {
            let (m, n, k) = (67, 45, 129);
            let shape = Shape {
                transposed,
                m,
                n,
                k,
                lda: 8 + if transposed.0 { k } else { m },
                ldb: 1 + if transposed.1 { n } else { k },
                ldc: m + 5,
            };
            let [of_a, of_b, of_c] = shape.elements();
            let (a, b, c) = (numbers(input, of_a, 1), numbers(input, of_b, 2), numbers(output, of_c, 3));
            let [on_a, on_b] = [(&a, input), (&b, input)].map(|(values, of)| upload(&encode(of, values), stream));
            let (on_a, on_b) = (on_a?, on_b?);
            let (alpha_bits, beta_bits) = (scale(compute, alpha), scale(compute, beta));
            // Inputs are exact, the accumulation is that of the compute type, the output that of its own.
            let expected = shape.expected(Bound::of(output, compute), (alpha, beta), [&a, &b, &c], |_, value| value);
            // The calls differ in the types of sizes only.
            macro_rules! product {
                ($function:ident into $c:ident) => {
                    blas!($function(
                        handle,
                        u32::from(transposed.0),
                        u32::from(transposed.1),
                        m as _,
                        n as _,
                        k as _,
                        alpha_bits.as_ptr().cast(),
                        on_a,
                        input,
                        shape.lda as _,
                        on_b,
                        input,
                        shape.ldb as _,
                        beta_bits.as_ptr().cast(),
                        $c,
                        output,
                        shape.ldc as _,
                        compute,
                        -1
                    ))
                };
            }
            let [narrow, wide] = [upload(&encode(output, &c), stream)?, upload(&encode(output, &c), stream)?];
            for (width, status, on_c) in
                [(32, product!(cublasGemmEx into narrow), narrow), (64, product!(cublasGemmEx_64 into wide), wide)]
            {
                let what = format!("{name}, transposed {transposed:?}, scales {alpha} {beta}, sizes of {width} bits");
                log.is(&what, status, 0);
                let seen = decode(output, &load::<u8>(on_c, of_c * bytes(output), stream)?);
                log.is(&what, compare(&seen, &expected), "right".to_owned());
            }
            for block in [on_a, on_b, narrow, wide] {
                ok!(cu cuMemFree_v2(block));
            }
        }
    }
    destroy(handle)
}

fn batch(log: &mut Log) -> Answer {
    let stream = stream()?;
    let handle = handle_on(stream)?;
    let (shape, count) = (Shape::packed(16, 12, 20), 3);
    let [of_a, of_b, of_c] = shape.elements();
    let stride = of_c + 16;
    // The same A in each product.
    let (a, b) = (numbers(F32, of_a, 4), numbers(F32, of_b * count, 5));
    let (on_a, on_b) = (upload(&encode(F32, &a), stream)?, upload(&encode(F32, &b), stream)?);
    let [narrow, wide] = [upload(&vec![9f32; stride * count], stream)?, upload(&vec![9f32; stride * count], stream)?];
    let (one, zero) = (1f32, 0f32);
    macro_rules! products {
        ($function:ident into $c:ident) => {
            blas!($function(
                handle,
                0,
                0,
                16,
                12,
                20,
                bits(&one),
                on_a,
                F32,
                16,
                0,
                on_b,
                F32,
                20,
                of_b as i64,
                bits(&zero),
                $c,
                F32,
                16,
                stride as i64,
                3,
                IN_32F,
                -1
            ))
        };
    }
    for (width, status, on_c) in [
        (32, products!(cublasGemmStridedBatchedEx into narrow), narrow),
        (64, products!(cublasGemmStridedBatchedEx_64 into wide), wide),
    ] {
        log.is(&format!("status, sizes of {width} bits"), status, 0);
        let seen = decode(F32, &load::<u8>(on_c, stride * count * 4, stream)?);
        for product in 0..count {
            let (part, gap) = seen[product * stride..][..stride].split_at(of_c);
            let matrices = [&a[..], &b[product * of_b..], &vec![9.0; of_c]];
            let expected = shape.expected(Bound::of(F32, IN_32F), (1.0, 0.0), matrices, |_, value| value);
            log.is(&format!("product {product}"), compare(part, &expected), "right".to_owned());
            log.is("the gap behind it", gap.iter().all(|&value| value == 9.0), true);
        }
    }
    destroy(handle)
}

fn scales(log: &mut Log) -> Answer {
    let (stream, other) = (stream()?, stream()?);
    let handle = handle_on(stream)?;
    warm(stream)?;
    let (two, three) = (upload(&[2f32], stream)?, upload(&[3f32], stream)?);
    let (by_host, by_device) = (upload(&[7f32], stream)?, upload(&[7f32], stream)?);
    let on_device = upload(&[10f32, 1.0], stream)?;
    let product = |alpha: *const std::ffi::c_void, beta: *const std::ffi::c_void, c: u64| {
        blas!(cublasSgemm_v2(handle, 0, 0, 1, 1, 1, alpha, two, 1, three, 1, beta, c, 1))
    };
    let place = |index: u64| std::ptr::without_provenance((on_device + 4 * index) as usize);
    // Once beforehand, so that nothing is loaded behind the gate.
    let scratch = upload(&[0f32], stream)?;
    let mut host_scales = [10f32, 1.0];
    log.is("on the host", product(bits(&host_scales[0]), bits(&host_scales[1]), scratch), 0);
    log.is("scales on the device", blas!(cublasSetPointerMode_v2(handle, 1)), 0);
    log.is("on the device", product(place(0), place(1), scratch), 0);
    need("cublasSetPointerMode", blas!(cublasSetPointerMode_v2(handle, 0)))?;
    ok!(cu cuStreamSynchronize(stream));
    let gate = Gate::on(stream)?;
    log.is("behind a gate, on the host", product(bits(&host_scales[0]), bits(&host_scales[1]), by_host), 0);
    need("cublasSetPointerMode", blas!(cublasSetPointerMode_v2(handle, 1)))?;
    log.is("behind a gate, on the device", product(place(0), place(1), by_device), 0);
    host_scales.fill(f32::NAN);
    std::hint::black_box(&host_scales);
    store(on_device, &[100f32, 0.0], other)?;
    log.is("the gate was closed all along", gate.is_open(), false);
    gate.open();
    log.is("scales of the call", load::<f32>(by_host, 1, stream)?, vec![67.0]);
    log.is("scales of its turn", load::<f32>(by_device, 1, stream)?, vec![600.0]);
    destroy(handle)
}

fn asynchronous(log: &mut Log) -> Answer {
    let stream = stream()?;
    let handle = handle_on(stream)?;
    let (a, c) = (upload(&[1f32; 1024], stream)?, upload(&[0f32; 1024], stream)?);
    need("cublasSgemm", single(handle, [32; 3], [a, a, c]))?;
    store(c, &[0f32; 1024], stream)?;
    let gate = Gate::on(stream)?;
    log.is("the product", single(handle, [32; 3], [a, a, c]), 0);
    log.is("the stream", (cu!(cuStreamQuery(stream)), gate.is_open()), (NOT_READY, false));
    gate.open();
    log.is("its values", load::<f32>(c, 1024, stream)? == vec![32.0; 1024], true);
    destroy(handle)
}

fn workspace_places(log: &mut Log) -> Answer {
    let stream = stream()?;
    let handle = handle_on(stream)?;
    let block = memory((1 << 20) + 4096)?;
    for offset in [0, 64, 128, 256, 1, 16] {
        log.is(&format!("+{offset}"), blas!(cublasSetWorkspace_v2(handle, block + offset, 1 << 20)), 0);
    }
    log.is("null", blas!(cublasSetWorkspace_v2(handle, 0, 0)), 0);
    log.is("no bytes", blas!(cublasSetWorkspace_v2(handle, block, 0)), 0);
    destroy(handle)?;
    ok!(cu cuMemFree_v2(block));
    Ok(())
}

fn set_stream_drops(log: &mut Log) -> Answer {
    let stream = stream()?;
    let handle = handle_on(stream)?;
    // So long and so small that it is cut along k, for which a workspace is needed.
    let (edge, k, room) = (64, 65_536, 32 << 20);
    let (a, c) = (memory(edge * k * 4)?, memory(edge * edge * 4)?);
    ok!(cu cuMemsetD8Async(a, 0, edge * k * 4, stream));
    let workspaces = [memory(room)?, memory(room)?];
    let product = || single(handle, [edge as i32, edge as i32, k as i32], [a, a, c]);
    // Which of the two are written to, of two values that no product leaves everywhere.
    let written = || -> Answer<[bool; 2]> {
        for workspace in workspaces {
            ok!(cu cuMemsetD8Async(workspace, 0xa7, room, stream));
        }
        ok!(cu cuStreamSynchronize(stream));
        need("cublasSgemm", product())?;
        let mut seen = [false; 2];
        for (seen, workspace) in seen.iter_mut().zip(workspaces) {
            *seen = load::<u8>(workspace, room, stream)?.iter().any(|&byte| byte != 0xa7);
        }
        Ok(seen)
    };
    log.is("none bound", written()?, [false, false]);
    log.is("bind the first", blas!(cublasSetWorkspace_v2(handle, workspaces[0], room)), 0);
    log.is("the first is bound", written()?, [true, false]);
    log.is("it stays", written()?, [true, false]);
    need("cublasSetMathMode", blas!(cublasSetMathMode(handle, 0)))?;
    need("cublasSetAtomicsMode", blas!(cublasSetAtomicsMode(handle, 0)))?;
    log.is("after setting modes", written()?, [true, false]);
    need("cublasSetWorkspace", blas!(cublasSetWorkspace_v2(handle, workspaces[1], room)))?;
    log.is("the second is bound", written()?, [false, true]);
    need("cublasSetWorkspace", blas!(cublasSetWorkspace_v2(handle, workspaces[1], 0)))?;
    log.is("no bytes of it are bound", written()?, [false, false]);
    need("cublasSetWorkspace", blas!(cublasSetWorkspace_v2(handle, workspaces[1], room)))?;
    need("cublasSetStream", blas!(cublasSetStream_v2(handle, stream)))?;
    log.is("after cublasSetStream with the same stream", written()?, [false, false]);
    destroy(handle)?;
    for block in [a, c, workspaces[0], workspaces[1]] {
        ok!(cu cuMemFree_v2(block));
    }
    Ok(())
}

fn modes_survive(log: &mut Log) -> Answer {
    let (first, second) = (stream()?, stream()?);
    let handle = handle_on(first)?;
    log.is("TF32", blas!(cublasSetMathMode(handle, 3)), 0);
    log.is("atomics", blas!(cublasSetAtomicsMode(handle, 1)), 0);
    log.is("scales on the device", blas!(cublasSetPointerMode_v2(handle, 1)), 0);
    for (name, stream) in [("the same stream", first), ("another", second)] {
        need("cublasSetStream", blas!(cublasSetStream_v2(handle, stream)))?;
        let (mut math, mut atomics, mut pointer, mut of) = (9, 9, 9, 0);
        need("cublasGetMathMode", blas!(cublasGetMathMode(handle, &mut math)))?;
        need("cublasGetAtomicsMode", blas!(cublasGetAtomicsMode(handle, &mut atomics)))?;
        need("cublasGetPointerMode", blas!(cublasGetPointerMode_v2(handle, &mut pointer)))?;
        need("cublasGetStream", blas!(cublasGetStream_v2(handle, &mut of)))?;
        log.is(name, (math, atomics, pointer, of == stream), (3, 1, 1, true));
    }
    destroy(handle)
}

fn destroy_waits(log: &mut Log) -> Answer {
    let context = start(0)?;
    let stream = stream()?;
    warm(stream)?;
    let other = handle()?;
    let gate = Gate::on(stream)?;
    let (passed, status) = gate.is_passed_by(context, false, || blas!(cublasDestroy_v2(other)))?;
    log.is("it returned while a stream worked", passed, false);
    log.is("status", status, 0);
    ok!(cu cuStreamSynchronize(stream));
    Ok(())
}

fn create_passes(log: &mut Log) -> Answer {
    let context = start(0)?;
    let stream = stream()?;
    warm(stream)?;
    let first = handle()?;
    let gate = Gate::on(stream)?;
    let (passed, status) = gate.is_passed_by(context, true, || blas!(cublasCreate_v2(&mut 0)))?;
    log.is("it returned while a stream worked", passed, true);
    log.is("status", status, 0);
    ok!(cu cuStreamSynchronize(stream));
    destroy(first)
}

fn create_in_capture(log: &mut Log) -> Answer {
    let stream = stream()?;
    let first = handle()?;
    for (mode, name) in [(0, "global"), (1, "thread-local")] {
        ok!(cu cuStreamBeginCapture_v2(stream, mode));
        log.is(&format!("{name}: cublasCreate"), blas!(cublasCreate_v2(&mut 0)), 1);
        log.is(&format!("{name}: end"), cu!(cuStreamEndCapture(stream, &mut 0)), 901);
    }
    log.is("after that", handle().and_then(destroy), Ok(()));
    ok!(cu cuStreamBeginCapture_v2(stream, 2));
    let second = handle()?;
    log.is("relaxed: end", cu!(cuStreamEndCapture(stream, &mut 0)), 0);
    destroy(second)?;
    destroy(first)
}

fn captured(log: &mut Log) -> Answer {
    let stream = stream()?;
    let handle = handle()?;
    let (a, c, workspace) = (upload(&[1f32; 1024], stream)?, upload(&[0f32; 1024], stream)?, memory(4 << 20)?);
    need("cublasSetStream", blas!(cublasSetStream_v2(handle, stream)))?;
    need("cublasSgemm", single(handle, [32; 3], [a, a, c]))?;
    store(c, &[0f32; 1024], stream)?;
    let (mut alpha, beta) = (2f32, 0f32);
    ok!(cu cuStreamBeginCapture_v2(stream, 1));
    log.is("cublasSetStream", blas!(cublasSetStream_v2(handle, stream)), 0);
    log.is("cublasSetWorkspace", blas!(cublasSetWorkspace_v2(handle, workspace, 4 << 20)), 0);
    let status = blas!(cublasSgemm_v2(handle, 0, 0, 32, 32, 32, bits(&alpha), a, 32, a, 32, bits(&beta), c, 32));
    log.is("cublasSgemm", status, 0);
    let graph = end_with_graph(stream)?;
    alpha = f32::NAN;
    std::hint::black_box(&alpha);
    log.is("nothing was done", load::<f32>(c, 1024, stream)? == vec![0.0; 1024], true);
    let executable = executable(graph)?;
    ok!(cu cuGraphLaunch(executable, stream));
    log.is("launched", load::<f32>(c, 1024, stream)? == vec![64.0; 1024], true);
    store(a, &[2f32; 1024], stream)?;
    ok!(cu cuGraphLaunch(executable, stream));
    log.is("launched on other values", load::<f32>(c, 1024, stream)? == vec![256.0; 1024], true);
    ok!(cu cuGraphExecDestroy(executable));
    ok!(cu cuGraphDestroy(graph));
    destroy(handle)
}

fn captured_memory(log: &mut Log) -> Answer {
    let stream = stream()?;
    let handle = handle()?;
    let (k, room) = (32_768, 32 << 20);
    let (a, c, workspace) = (memory(256 * k * 2)?, memory(256 * 256 * 2)?, memory(room)?);
    let captured = |log: &mut Log, what: &str, edge: i32, k: i32, own: bool| -> Answer {
        let (one, zero) = (1f32, 0f32);
        ok!(cu cuStreamBeginCapture_v2(stream, 1));
        need("cublasSetStream", blas!(cublasSetStream_v2(handle, stream)))?;
        if own {
            need("cublasSetWorkspace", blas!(cublasSetWorkspace_v2(handle, workspace, room)))?;
        }
        let status = blas!(cublasGemmEx(
            handle,
            0,
            0,
            edge,
            edge,
            k,
            bits(&one),
            a,
            BF16,
            edge,
            a,
            BF16,
            k,
            bits(&zero),
            c,
            BF16,
            edge,
            IN_32F,
            -1
        ));
        log.is(&format!("{what}: status"), status, 0);
        let graph = end_with_graph(stream)?;
        let nodes = nodes(graph)?;
        let count = |of: u32| nodes.iter().filter(|&&node| node == of).count();
        let memory = if edge == 256 && !own { 1 } else { 0 };
        log.is(&format!("{what}: allocated and freed"), (count(ALLOCATION), count(RELEASE)), (memory, memory));
        log.is(&format!("{what}: a kernel at least"), count(KERNEL) > 0, true);
        let what = format!("{what}: nodes");
        match (edge, own) {
            (32, false) => log.is(&what, nodes, vec![KERNEL]),
            // The vendor uses a workspace for large products only. In the simulation every product goes through the one
            // that it is given, in two kernels, so that misuse of a workspace shows at small sizes too.
            (32, true) => log.either(&what, nodes, vec![KERNEL], vec![KERNEL, KERNEL]),
            (_, false) => log.is(&what, nodes, vec![KERNEL, KERNEL, ALLOCATION, RELEASE]),
            (_, true) => log.is(&what, nodes, vec![KERNEL, KERNEL]),
        }
        ok!(cu cuGraphDestroy(graph));
        Ok(())
    };
    captured(log, "32x32x32, the handle's own", 32, 32, false)?;
    captured(log, "32x32x32, given", 32, 32, true)?;
    captured(log, "256x256x32768, the handle's own", 256, k as i32, false)?;
    captured(log, "256x256x32768, given", 256, k as i32, true)?;
    destroy(handle)?;
    for block in [a, c, workspace] {
        ok!(cu cuMemFree_v2(block));
    }
    Ok(())
}
