//! The backend `mock` in unit tests: real results without a GPU, faults on request, and a count of every call.

#![cfg(feature = "mock")]
#![forbid(unsafe_code)]

use std::time::Duration;

use highwater::mock::{MockGpu, MockOptions, Operation};
use highwater::{ErrorKind, GemmShape, Result, Runtime, Stream};

/// Code under test: the sum of some values, as a product with ones.
fn sum(stream: &Stream, values: &[f32]) -> Result<f32> {
    let ones = stream.upload(&vec![1.0_f32; values.len()])?;
    let values = stream.upload(values)?;
    let total = stream.upload(&[0.0_f32])?;
    stream.blas()?.gemm(&GemmShape::of::<f32>(1, 1, values.len()), 1.0, &ones, &values, 0.0, &total)?;
    Ok(stream.download(&total)?[0])
}

#[test]
fn the_sum_is_right_also_on_a_slow_device() {
    let gpu = MockGpu::open(MockOptions::new().with_latency(Duration::from_millis(2))).unwrap();
    let runtime = Runtime::new(gpu.clone()).unwrap();
    let stream = runtime.device(0).unwrap().create_stream().unwrap();
    assert_eq!(sum(&stream, &[1.0, 2.0, 3.5]).unwrap(), 6.5);
    assert_eq!(gpu.calls(Operation::Gemm), 1);
}

#[test]
fn a_sum_that_finds_no_memory_says_so_and_leaves_nothing() {
    // Core tries twice, so both tries have to fail.
    let out = ErrorKind::OutOfMemory;
    let options = MockOptions::new().with_fault(Operation::Allocate, 2, out).with_fault(Operation::Allocate, 3, out);
    let runtime = Runtime::new(MockGpu::open(options).unwrap()).unwrap();
    {
        let stream = runtime.device(0).unwrap().create_stream().unwrap();
        assert_eq!(sum(&stream, &[1.0, 2.0]).unwrap_err().kind(), ErrorKind::OutOfMemory);
        assert_eq!(sum(&stream, &[1.0, 2.0]).unwrap(), 3.0);
    }
    assert_eq!(runtime.close().unwrap().total(), 0);
}
