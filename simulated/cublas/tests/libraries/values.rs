//! Products of every type against a reference in 64 bits.

use std::ffi::c_void;

use highwater_simulated_harness::values::{BF16, F16, F32, F64, Shape, bytes, decode, encode};
use highwater_simulated_harness::{code, isolated, ok};

use crate::rig::{Blas, Driver, download, gate_on, handle, start, store, stream, upload};

/// Numbers between -1 and 1 that every type holds exactly.
pub(crate) fn numbers(count: usize, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 20) % 65
    };
    (0..count).map(|_| next() as f64 / 32.0 - 1.0).collect()
}

/// How far a result may be off, relative to the sizes of its terms.
pub(crate) fn tolerance(data_type: u32) -> f64 {
    match data_type {
        F64 => 1e-13,
        F32 => 1e-5,
        F16 => 2e-3,
        _ => 1.6e-2,
    }
}

pub(crate) fn scale(compute: u32, value: f64) -> Vec<u8> {
    encode(
        match compute {
            64 => F16,
            70 => F64,
            _ => F32,
        },
        &[value],
    )
}

pub(crate) fn assert_close(data_type: u32, seen: &[f64], expected: &[f64], what: &str) {
    assert_eq!(seen.len(), expected.len());
    for (index, (seen, expected)) in seen.iter().zip(expected).enumerate() {
        let off = (seen - expected).abs();
        assert!(
            off <= tolerance(data_type) * expected.abs().max(1.0),
            "{what}, element {index}: {seen}, not {expected}"
        );
    }
}

isolated! {
    fn products_of_every_type_and_transposition_are_right(_) over ["cuda"] {
        start(0);
        let (handle, stream) = (handle(), stream());
        let workspace = crate::rig::allocate(1 << 20);
        for (input, output, compute) in [
            (F32, F32, 68),
            (F32, F32, 77),
            (F64, F64, 70),
            (F16, F16, 68),
            (F16, F16, 64),
            (BF16, BF16, 68),
            (F16, F32, 68),
            (BF16, F32, 69),
        ] {
            for transpose in [(0, 0), (1, 0), (0, 2), (1, 1)] {
                for (with_workspace, beta) in [(true, 0.0), (false, -0.5), (true, 1.0)] {
                    let (m, n, k) = (70, 67, 5);
                    let shape = Shape {
                        transposed: (transpose.0 != 0, transpose.1 != 0), m, n, k,
                        lda: 3 + if transpose.0 == 0 { m } else { k },
                        ldb: 1 + if transpose.1 == 0 { k } else { n },
                        ldc: m + 2,
                    };
                    let (a, b) = (numbers(shape.elements()[0], 1), numbers(shape.elements()[1], 2));
                    let mut c = numbers(shape.ldc * n, 3);
                    if beta == 0.0 {
                        // Must not be read.
                        c[0] = f64::NAN;
                    }
                    let [device_a, device_b] = [&a, &b].map(|values| upload(&encode(input, values), stream));
                    let device_c = upload(&encode(output, &c), stream);
                    let (alpha, beta_bits) = (scale(compute, 0.75), scale(compute, beta));
                    ok!(Blas.cublasSetStream_v2(handle, stream));
                    if with_workspace {
                        ok!(Blas.cublasSetWorkspace_v2(handle, workspace, 1 << 20));
                    }
                    ok!(Blas.cublasGemmEx(
                        handle, transpose.0, transpose.1, m as i32, n as i32, k as i32, alpha.as_ptr().cast(), device_a, input,
                        shape.lda as i32, device_b, input, shape.ldb as i32, beta_bits.as_ptr().cast(), device_c, output,
                        shape.ldc as i32, compute, -1
                    ));
                    let seen = decode(output, &download::<u8>(device_c, c.len() * bytes(output), stream));
                    let what = format!("{input} to {output} in {compute}, {transpose:?}, beta {beta}");
                    assert_close(output, &seen, &shape.reference((0.75, beta), [&a, &b, &c]), &what);
                    for block in [device_a, device_b, device_c] {
                        ok!(Driver.cuMemFree_v2(block));
                    }
                }
            }
        }
    }

    fn the_plain_calls_and_those_of_64_bits_compute_the_same(_) over ["cuda"] {
        start(0);
        let (handle, stream) = (handle(), stream());
        ok!(Blas.cublasSetStream_v2(handle, stream));
        let shape = Shape::packed(9, 8, 7);
        let (a, b, c) = (numbers(63, 4), numbers(56, 5), vec![0.0; 72]);
        let expected = shape.reference((2.0, 0.0), [&a, &b, &c]);
        let singles = [&a, &b, &c].map(|values| upload(&encode(F32, values), stream));
        let doubles = [&a, &b, &c].map(|values| upload(&encode(F64, values), stream));
        let (two, zero) = (2f32, 0f32);
        ok!(Blas.cublasSgemm_v2(handle, 0, 0, 9, 8, 7, &two, singles[0], 9, singles[1], 7, &zero, singles[2], 9));
        assert_close(F32, &decode(F32, &download(singles[2], 72 * 4, stream)), &expected, "cublasSgemm_v2");
        ok!(Blas.cublasDgemm_v2(handle, 0, 0, 9, 8, 7, &2.0, doubles[0], 9, doubles[1], 7, &0.0, doubles[2], 9));
        assert_close(F64, &decode(F64, &download(doubles[2], 72 * 8, stream)), &expected, "cublasDgemm_v2");
        store(singles[2], &[0f32; 72], stream);
        let (two, zero) = (std::ptr::from_ref(&two).cast::<c_void>(), std::ptr::from_ref(&zero).cast());
        ok!(Blas.cublasGemmEx_64(
            handle, 0, 0, 9, 8, 7, two, singles[0], F32, 9, singles[1], F32, 7, zero, singles[2], F32, 9, 68, -1
        ));
        assert_close(F32, &decode(F32, &download(singles[2], 72 * 4, stream)), &expected, "cublasGemmEx_64");
    }

    fn batches_lie_at_their_strides(_) over ["cuda"] {
        start(0);
        let (handle, stream) = (handle(), stream());
        ok!(Blas.cublasSetStream_v2(handle, stream));
        let shape = Shape::packed(4, 3, 2);
        let (one, zero) = (1f32, 0f32);
        // The same A in each product, gaps between the others.
        let (a, b) = (numbers(8, 6), numbers(5 * 10, 7));
        let mut expected = vec![9.0; 5 * 14];
        for index in 0..5 {
            let product = shape.reference((1.0, 0.0), [&a, &b[index * 10..], &[0.0; 12]]);
            expected[index * 14..index * 14 + 12].copy_from_slice(&product);
        }
        let [device_a, device_b] = [&a, &b].map(|values| upload(&encode(F32, values), stream));
        let check = |name: &str, run: &dyn Fn(u64) -> u32| {
            let c = upload(&[9f32; 5 * 14], stream);
            assert_eq!(run(c), 0, "{name}");
            assert_close(F32, &decode(F32, &download(c, 5 * 14 * 4, stream)), &expected, name);
        };
        let (one_bits, zero_bits) = (std::ptr::from_ref(&one).cast::<c_void>(), std::ptr::from_ref(&zero).cast::<c_void>());
        check("cublasSgemmStridedBatched", &|c| code!(Blas.cublasSgemmStridedBatched(
            handle, 0, 0, 4, 3, 2, &one, device_a, 4, 0, device_b, 2, 10, &zero, c, 4, 14, 5
        )));
        check("cublasGemmStridedBatchedEx", &|c| code!(Blas.cublasGemmStridedBatchedEx(
            handle, 0, 0, 4, 3, 2, one_bits, device_a, F32, 4, 0, device_b, F32, 2, 10, zero_bits, c, F32, 4, 14, 5, 68, -1
        )));
        check("cublasGemmStridedBatchedEx_64", &|c| code!(Blas.cublasGemmStridedBatchedEx_64(
            handle, 0, 0, 4, 3, 2, one_bits, device_a, F32, 4, 0, device_b, F32, 2, 10, zero_bits, c, F32, 4, 14, 5, 68, -1
        )));
    }

    fn scales_are_read_in_the_call_on_the_host_and_in_their_turn_on_the_device(_) over ["cuda"] {
        start(0);
        let (handle, stream) = (handle(), stream());
        ok!(Blas.cublasSetStream_v2(handle, stream));
        let [a, b] = [2f32, 3.0].map(|value| upload(&[value], stream));
        let (on_host, on_device) = (upload(&[7f32], stream), upload(&[7f32], stream));
        let scales = upload(&[10f32, 1.0], stream);
        let other = self::stream();
        let gate = gate_on(stream);
        let mut host_scales = [10f32, 1.0];
        ok!(Blas.cublasSgemm_v2(handle, 0, 0, 1, 1, 1, &host_scales[0], a, 1, b, 1, &host_scales[1], on_host, 1));
        ok!(Blas.cublasSetPointerMode_v2(handle, 1));
        let place = |index: u64| (scales + index * 4) as *const f32;
        ok!(Blas.cublasSgemm_v2(handle, 0, 0, 1, 1, 1, place(0), a, 1, b, 1, place(1), on_device, 1));
        // Neither product has begun.
        host_scales.fill(f32::NAN);
        std::hint::black_box(&host_scales);
        store(scales, &[100f32, 0.0], other);
        gate.open();
        assert_eq!(download::<f32>(on_host, 1, stream), [67.0]);
        assert_eq!(download::<f32>(on_device, 1, stream), [600.0]);
    }

    fn tf32_comes_by_the_mode_or_by_the_compute_type_and_full_precision_otherwise(_) over ["cuda"] {
        start(0);
        let (handle, stream) = (handle(), stream());
        ok!(Blas.cublasSetStream_v2(handle, stream));
        // Of this, TF32 keeps the 1 only.
        let value = 1.0 + 2f32.powi(-13);
        let [a, b, c] = [value, 1.0, 0.0].map(|value| upload(&[value], stream));
        let (one, zero) = (1f32, 0f32);
        let product = |compute: u32| {
            let (one, zero) = (std::ptr::from_ref(&one).cast::<c_void>(), std::ptr::from_ref(&zero).cast::<c_void>());
            ok!(Blas.cublasGemmEx(handle, 0, 0, 1, 1, 1, one, a, F32, 1, b, F32, 1, zero, c, F32, 1, compute, -1));
            download::<f32>(c, 1, stream)[0]
        };
        assert_eq!([68, 69, 77].map(product), [value, value, 1.0]);
        ok!(Blas.cublasSetMathMode(handle, 3));
        assert_eq!([68, 69, 77].map(product), [1.0, value, 1.0]);
        ok!(Blas.cublasSetMathMode(handle, 3 | 16));
        ok!(Blas.cublasSgemm_v2(handle, 0, 0, 1, 1, 1, &one, a, 1, b, 1, &zero, c, 1));
        assert_eq!(download::<f32>(c, 1, stream), [1.0]);
    }
}
