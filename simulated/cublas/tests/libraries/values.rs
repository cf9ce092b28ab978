//! Products of every type against a reference in 64 bits.

use std::ffi::c_void;

use highwater_simulated_harness::values::{F16, F32, F64, Shape, bytes, decode, encode};
use highwater_simulated_harness::{code, isolated, ok};

use crate::rig::{Blas, allocate, download, handle, start, stream, upload};

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
    fn products_that_no_rule_has_are_right(_) over ["cuda"] {
        start(0);
        let (handle, stream) = (handle(), stream());
        ok!(Blas.cublasSetStream_v2(handle, stream));
        ok!(Blas.cublasSetWorkspace_v2(handle, allocate(1 << 20), 1 << 20));
        // The first operand is conjugated as well, which real numbers do not notice.
        let shape = Shape { transposed: (true, false), m: 9, n: 8, k: 7, lda: 7, ldb: 7, ldc: 9 };
        let (a, b, c) = (numbers(63, 4), numbers(56, 5), numbers(72, 6));
        let expected = shape.reference((2.0, 0.5), [&a, &b, &c]);
        let check = |what: &str, of: u32, run: &dyn Fn([u64; 3]) -> u32| {
            let operands = [&a, &b, &c].map(|values| upload(&encode(of, values), stream));
            assert_eq!(run(operands), 0, "{what}");
            assert_close(of, &decode(of, &download(operands[2], 72 * bytes(of), stream)), &expected, what);
        };
        for (what, of, compute) in [("in 16 bits", F16, 64), ("pedantic", F32, 69)] {
            let (two, half) = (scale(compute, 2.0), scale(compute, 0.5));
            check(what, of, &|[a, b, c]| code!(Blas.cublasGemmEx(
                handle, 2, 0, 9, 8, 7, two.as_ptr().cast(), a, of, 7, b, of, 7, half.as_ptr().cast(), c, of, 9, compute, -1
            )));
        }
        check("cublasDgemm_v2", F64, &|[a, b, c]| code!(Blas.cublasDgemm_v2(
            handle, 2, 0, 9, 8, 7, &2.0, a, 7, b, 7, &0.5, c, 9
        )));
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
