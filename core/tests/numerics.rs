//! The policy for products on the mock device: what it computes, what it refuses, and what it costs in calls.

use std::collections::HashSet;
use std::sync::Arc;

use highwater_core::half::{bf16, f16};
use highwater_core::{
    Capabilities, Epilogue, ErrorKind, GemmShape, Numerics, Result, Runtime, RuntimeOptions, Scalar, Stream, numerics,
};
use highwater_mock::{MockGpu, MockOptions, Operation};

const TF32: Numerics = Numerics::new().allow_tf32();

fn open(policy: Numerics, change: impl FnOnce(&mut Capabilities)) -> (Arc<MockGpu>, Runtime, Stream) {
    let gpu = MockGpu::open(MockOptions::new().with_capabilities(change)).unwrap();
    let runtime = Runtime::with_options(gpu.clone(), &RuntimeOptions::new().with_numerics(policy)).unwrap();
    let stream = runtime.device(0).unwrap().create_stream().unwrap();
    (gpu, runtime, stream)
}

/// `factor * 1` by a BLAS handle.
fn product<T: Scalar>(stream: &Stream, factor: T, one: T) -> Result<T> {
    let (a, b) = (stream.upload(&[factor])?, stream.upload(&[one])?);
    let c = stream.upload(&[one])?;
    let zero: T = bytemuck::Zeroable::zeroed();
    stream.blas()?.gemm(&GemmShape::of::<T>(1, 1, 1), one, &a, &b, zero, &c)?;
    Ok(stream.download(&c)?[0])
}

/// `factor * 1` by an Lt plan.
fn planned(stream: &Stream, factor: f32) -> Result<f32> {
    let (a, b) = (stream.upload(&[factor])?, stream.upload(&[1.0])?);
    let d = stream.upload(&[0.0])?;
    let shape = GemmShape::of::<f32>(1, 1, 1);
    stream.lt()?.matmul(&shape, Epilogue::None, 1.0, &a, &b, 0.0, &d, None)?;
    Ok(stream.download(&d)?[0])
}

/// 1 + 2^-12 needs more bits of mantissa than the 10 that TF32 has.
const FINE: f32 = 1.0 + 1.0 / 4096.0;

#[test]
fn tf32_rounds_the_factors_of_32_bit_products_at_every_level_and_of_no_others() {
    let (_gpu, _runtime, stream) = open(TF32, |_| ());
    assert_eq!((product(&stream, FINE, 1.0).unwrap(), planned(&stream, FINE).unwrap()), (1.0, 1.0));
    assert_eq!(product(&stream, f64::from(FINE), 1.0).unwrap(), f64::from(FINE));
    let exact = || (product(&stream, FINE, 1.0).unwrap(), planned(&stream, FINE).unwrap());
    assert_eq!(numerics::with(Numerics::new(), exact), (FINE, FINE));
    assert_eq!(exact(), (1.0, 1.0));

    let (_gpu, _runtime, stream) = open(Numerics::new(), |_| ());
    assert_eq!(product(&stream, FINE, 1.0).unwrap(), FINE);
    assert_eq!(numerics::with(TF32, || product(&stream, FINE, 1.0)).unwrap(), 1.0);
    let (a, b) = (stream.upload(&[FINE]).unwrap(), stream.upload(&[1.0_f32]).unwrap());
    let c = stream.upload(&[0.0_f32]).unwrap();
    let shape = GemmShape::of::<f32>(1, 1, 1);
    let mut blas = stream.blas().unwrap().with_numerics(TF32);
    blas.gemm(&shape, 1.0, &a, &b, 0.0, &c).unwrap();
    assert_eq!(stream.download(&c).unwrap(), [1.0]);
    let mut lt = stream.lt().unwrap().with_numerics(TF32);
    lt.matmul(&shape, Epilogue::None, 1.0, &a, &b, 0.0, &c, None).unwrap();
    assert_eq!(stream.download(&c).unwrap(), [1.0]);
}

/// The bits of many products of one pair of matrices, as many times as they differ.
fn different_results(stream: &Stream, policy: Numerics, lt: bool) -> usize {
    const N: usize = 8;
    const K: usize = 512;
    let values: Vec<f32> = (0..N * K).map(|i| ((i * 31 + 7) % 101) as f32 / 37.0 - 1.3).collect();
    let (a, b) = (stream.upload(&values).unwrap(), stream.upload(&values).unwrap());
    let c = stream.upload(&[0.0_f32; N * N]).unwrap();
    let shape = GemmShape::of::<f32>(N, N, K);
    numerics::with(policy, || {
        let mut results = HashSet::new();
        for _ in 0..20 {
            if lt {
                let mut lease = stream.lt().unwrap();
                lease.matmul(&shape, Epilogue::None, 1.0, &a, &b, 0.0, &c, None).unwrap();
            } else {
                stream.blas().unwrap().gemm(&shape, 1.0, &a, &b, 0.0, &c).unwrap();
            }
            results.insert(stream.download(&c).unwrap().iter().map(|value| value.to_bits()).collect::<Vec<_>>());
        }
        results.len()
    })
}

#[test]
fn products_repeat_bit_for_bit_unless_the_policy_allows_otherwise() {
    let (_gpu, _runtime, stream) = open(Numerics::new(), |_| ());
    for lt in [false, true] {
        assert_eq!(different_results(&stream, Numerics::new(), lt), 1, "lt: {lt}");
        assert!(different_results(&stream, Numerics::new().allow_nondeterminism(), lt) > 1, "lt: {lt}");
        assert_eq!(different_results(&stream, Numerics::new(), lt), 1, "lt: {lt}");
    }
}

#[test]
fn half_types_are_multiplied_and_accumulated_in_32_bits() {
    const K: usize = 4096;
    let (_gpu, _runtime, stream) = open(TF32, |_| ());
    // In 11 bits of mantissa, a sum of ones stops growing at 2048; in 8 bits, at 256.
    fn sum<T: Scalar>(stream: &Stream, one: T) -> f64 {
        let a = stream.upload(&[one; K]).unwrap();
        let c = stream.upload(&[one]).unwrap();
        let zero: T = bytemuck::Zeroable::zeroed();
        stream.blas().unwrap().gemm(&GemmShape::of::<T>(1, 1, K), one, &a, &a, zero, &c).unwrap();
        stream.download(&c).unwrap()[0].to_f64()
    }
    assert_eq!(sum(&stream, f16::ONE), K as f64);
    assert_eq!(sum(&stream, bf16::ONE), K as f64);
}

/// The sum of 4097 ones and the 0.25 that was in C, as 32 bits.
fn mixed_sum<T: Scalar>(stream: &Stream, one: T) -> Result<f32> {
    const K: usize = 4097;
    let a = stream.upload(&[one; K])?;
    let c = stream.upload(&[0.5_f32])?;
    stream.blas()?.gemm_mixed(&GemmShape::mixed::<T, f32>(1, 1, K), 1.0, &a, &a, 0.5, &c)?;
    Ok(stream.download(&c)?[0])
}

/// The same by a plan, with the 0.25 as a bias.
fn mixed_plan<T: Scalar>(stream: &Stream, one: T) -> Result<f32> {
    const K: usize = 4097;
    let a = stream.upload(&[one; K])?;
    let (d, bias) = (stream.upload(&[f32::NAN])?, stream.upload(&[0.25_f32])?);
    let shape = GemmShape::mixed::<T, f32>(1, 1, K);
    stream.lt()?.matmul_mixed(&shape, Epilogue::BiasRelu, 1.0, &a, &a, 0.0, &d, Some((&bias).into()))?;
    Ok(stream.download(&d)?[0])
}

#[test]
fn mixed_products_are_stored_in_32_bits_without_a_rounding_before() {
    // TF32 concerns factors of 32 bits only.
    let (gpu, _runtime, stream) = open(TF32, |_| ());
    // 4097.25 has 15 bits; f16 has 11 and bf16 has 8.
    assert_eq!(mixed_sum(&stream, f16::ONE).unwrap(), 4097.25);
    assert_eq!(mixed_sum(&stream, bf16::ONE).unwrap(), 4097.25);
    assert_eq!(mixed_plan(&stream, f16::ONE).unwrap(), 4097.25);
    assert_eq!(mixed_plan(&stream, bf16::ONE).unwrap(), 4097.25);
    assert_eq!(gpu.calls(Operation::CreatePlan), 2);
    // Another type of result is another plan.
    let (a, d) = (stream.upload(&[bf16::ONE; 4097]).unwrap(), stream.upload(&[bf16::ONE]).unwrap());
    let bias = stream.upload(&[bf16::ONE]).unwrap();
    let shape = GemmShape::of::<bf16>(1, 1, 4097);
    let mut lt = stream.lt().unwrap();
    lt.matmul(&shape, Epilogue::BiasRelu, bf16::ONE, &a, &a, bf16::ZERO, &d, Some((&bias).into())).unwrap();
    assert_eq!(stream.download(&d).unwrap(), [bf16::from_f32(4096.0)]);
    assert_eq!(gpu.calls(Operation::CreatePlan), 3);
    // Equal types are the ordinary product, in TF32 here.
    let (fine, one) = (stream.upload(&[FINE]).unwrap(), stream.upload(&[1.0_f32]).unwrap());
    let c = stream.upload(&[0.0_f32]).unwrap();
    let mut blas = stream.blas().unwrap();
    blas.gemm_mixed(&GemmShape::of::<f32>(1, 1, 1), 1.0, &fine, &one, 0.0, &c).unwrap();
    assert_eq!(stream.download(&c).unwrap(), [1.0]);
}

#[test]
fn mixed_products_need_their_ability_and_nothing_else_needs_it() {
    let (gpu, _runtime, stream) = open(Numerics::new(), |capabilities| capabilities.gemm_mixed = false);
    for refused in [mixed_sum(&stream, f16::ONE), mixed_plan(&stream, bf16::ONE)] {
        let error = refused.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("gemm_mixed"), "{error}");
    }
    assert_eq!((gpu.calls(Operation::Gemm), gpu.calls(Operation::CreatePlan)), (0, 0));
    assert_eq!(product(&stream, f16::ONE, f16::ONE).unwrap(), f16::ONE);
    assert_eq!(mixed_sum(&stream, 1.0_f32).unwrap(), 4097.25);
    let (_gpu, _runtime, stream) = open(Numerics::new(), |capabilities| capabilities.gemm_bf16 = false);
    assert!(mixed_sum(&stream, bf16::ONE).unwrap_err().to_string().contains("gemm_bf16"));
    assert_eq!(mixed_sum(&stream, f16::ONE).unwrap(), 4097.25);
}

#[test]
fn every_epilogue_follows_its_product() {
    let (_gpu, _runtime, stream) = open(Numerics::new(), |_| ());
    let (weight, input) = (stream.upload(&[2.0_f32, -3.0]).unwrap(), stream.upload(&[0.5_f32]).unwrap());
    let bias = stream.upload(&[0.25_f32, 1.0]).unwrap();
    let output = stream.upload(&[0.0_f32; 2]).unwrap();
    let shape = GemmShape::of::<f32>(2, 1, 1);
    let gelu = |x: f64| x / 2.0 * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh());
    let (plain, biased) = ([1.0, -1.5], [1.25, -0.5]);
    for (epilogue, expected) in [
        (Epilogue::None, plain),
        (Epilogue::Relu, [1.0, 0.0]),
        (Epilogue::Gelu, plain.map(gelu)),
        (Epilogue::Bias, biased),
        (Epilogue::BiasRelu, [1.25, 0.0]),
        (Epilogue::BiasGelu, biased.map(gelu)),
    ] {
        let needed = epilogue.has_bias().then(|| (&bias).into());
        let mut lt = stream.lt().unwrap();
        lt.matmul(&shape, epilogue, 1.0, &weight, &input, 0.0, &output, needed).unwrap();
        let got = stream.download(&output).unwrap();
        let near = got.iter().zip(expected).all(|(got, expected)| (f64::from(*got) - expected).abs() < 1e-6);
        assert!(near, "{epilogue:?}: {got:?}, not {expected:?}");
        // A bias that is missing, or that the epilogue does not take.
        let wrong = if epilogue.has_bias() { None } else { Some((&bias).into()) };
        let error = lt.matmul(&shape, epilogue, 1.0, &weight, &input, 0.0, &output, wrong).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{epilogue:?}");
    }
}
