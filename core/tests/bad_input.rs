//! Bad input: one clear error each, and nothing left behind.

mod support;

use std::sync::Arc;

use highwater_core::half::{bf16, f16};
use highwater_core::{Backend, Epilogue, ErrorKind, GemmShape, Result, Runtime, StridedBatch};
use highwater_mock::{MockGpu, MockOptions, Operation};
use support::{end, open, open_with_stream};

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T>, kind: ErrorKind, words: &str) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(words), "{error}");
    assert!(!error.hint().is_empty(), "nothing says what to do: {error}");
}

#[track_caller]
fn invalid<T: std::fmt::Debug>(result: Result<T>, words: &str) {
    refused(result, ErrorKind::InvalidArgument, words);
}

#[test]
fn pairs_of_types_that_do_not_fit() {
    let (gpu, _, device, stream) = open_with_stream(MockOptions::new());
    let (half, bfloat) = (device.allocate::<f16>(16).unwrap(), device.allocate::<bf16>(16).unwrap());
    let (single, double) = (device.allocate::<f32>(16).unwrap(), device.allocate::<f64>(16).unwrap());
    let mut blas = stream.blas().unwrap();

    let mixed = GemmShape::mixed::<f16, f32>(4, 4, 4);
    let words = "the shape has a result of F32, the buffers are of F16";
    let plain = blas.gemm(&mixed, f16::ONE, &half, &half, f16::ZERO, &half);
    invalid(plain, words);
    let words = "the shape has factors of F16, the buffers are of Bf16";
    let other = blas.gemm_mixed(&mixed, 1.0, &bfloat, &bfloat, 0.0, &single);
    invalid(other, words);

    let words = "no product has factors of F32 and a result of F64";
    let shape = GemmShape::mixed::<f32, f64>(4, 4, 4);
    refused(blas.gemm_mixed(&shape, 1.0, &single, &single, 0.0, &double), ErrorKind::Unsupported, words);
    let words = "no product has factors of F16 and a result of Bf16";
    let shape = GemmShape::mixed::<f16, bf16>(4, 4, 4);
    let narrow = blas.gemm_mixed(&shape, bf16::ONE, &half, &half, bf16::ZERO, &bfloat);
    refused(narrow, ErrorKind::Unsupported, words);

    let small = single.slice(0..15).unwrap();
    let short = blas.gemm_mixed(&mixed, 1.0, &half, &half, 0.0, small);
    invalid(short, "C has 15 values, the product reaches 16");
    let mut lt = stream.lt().unwrap();
    let bias = single.slice(3..6).unwrap();
    let plan = lt.matmul_mixed(&mixed, Epilogue::Bias, 1.0, &half, &half, 0.0, &single, Some(bias));
    invalid(plan, "the bias has 3 values, D has 4 rows");
    let bias = single.slice(12..16).unwrap();
    let plan = lt.matmul_mixed(&mixed, Epilogue::Bias, 1.0, &half, &half, 0.0, &single, Some(bias));
    invalid(plan, "D overlaps the bias");
    assert_eq!((gpu.calls(Operation::Gemm), gpu.calls(Operation::CreatePlan)), (0, 0));
}

#[test]
fn sizes_and_shapes_that_do_not_fit() {
    let (gpu, runtime, device, stream) = open_with_stream(MockOptions::new());
    let (small, large) = (device.allocate::<f32>(3).unwrap(), device.allocate::<f32>(16).unwrap());
    let other = device.allocate::<f32>(16).unwrap();
    let pinned = runtime.pinned::<f32>(16).unwrap();
    let calls = gpu.calls(Operation::Copy) + gpu.calls(Operation::Gemm);

    invalid(stream.copy_to_device(&pinned, &small), "the source has 16 values, the destination 3");
    invalid(stream.write(&[1.0_f32], &large), "the destination 16");
    invalid(large.slice(10..17), "the range from 10 to 17 is not inside a buffer of 16 values");
    let (front, back) = (large.slice(0..10).unwrap(), large.slice(6..16).unwrap());
    invalid(stream.copy(front, back), "overlap");
    invalid(stream.fill(&device.allocate::<f64>(1).unwrap(), 1.0), "8 bytes");
    invalid(device.allocate::<u64>(usize::MAX), "address space");
    refused(runtime.device(1), ErrorKind::InvalidArgument, "there is no device 1; the backend has 1");

    let mut blas = stream.blas().unwrap();
    let shape = GemmShape::of::<f32>(4, 4, 4);
    invalid(blas.gemm(&shape, 1.0, &large, &small, 0.0, &other), "B has 3 values, the product reaches 16");
    invalid(blas.gemm(&shape, 1.0, &large, &other, 0.0, &large), "C overlaps A");
    invalid(blas.gemm(&shape.with_leading_dimensions(3, 4, 4), 1.0, &large, &large, 0.0, &other), "lda is 3");
    let batch = StridedBatch { count: 2, stride_a: 0, stride_b: 0, stride_c: 16 };
    invalid(blas.gemm(&shape.with_batch(batch), 1.0, &large, &large, 0.0, &other), "reaches 32");
    invalid(
        blas.gemm(&GemmShape::of::<f64>(4, 4, 4), 1.0, &large, &large, 0.0, &other),
        "the shape has factors of F64",
    );
    drop(blas);
    let mut lt = stream.lt().unwrap();
    invalid(lt.matmul(&shape, Epilogue::Bias, 1.0, &large, &large, 0.0, &other, None), "needs a bias");
    invalid(
        lt.matmul(&shape, Epilogue::Bias, 1.0, &large, &large, 0.0, &other, Some((&small).into())),
        "the bias has 3 values, D has 4 rows",
    );
    drop(lt);
    assert_eq!(gpu.calls(Operation::Copy) + gpu.calls(Operation::Gemm), calls, "the backend saw none of this");
    end(runtime, (small, large, other, pinned, stream, device));
}

#[test]
fn devices_and_runtimes_that_do_not_go_together() {
    let (_, runtime, _, stream) =
        open_with_stream(MockOptions::new().with_devices(2).with_capabilities(|c| c.peer_copy = false));
    let elsewhere = runtime.device(1).unwrap().allocate::<f32>(4).unwrap();
    let here = runtime.device(0).unwrap().allocate::<f32>(4).unwrap();
    let pinned = runtime.pinned::<f32>(4).unwrap();
    refused(
        stream.copy_to_device(&pinned, &elsewhere),
        ErrorKind::WrongDevice,
        "is on device 1, the stream on device 0",
    );
    refused(stream.fill(&elsewhere, 1.0), ErrorKind::WrongDevice, "device 1");
    refused(stream.copy(&elsewhere, &here), ErrorKind::Unsupported, "peer_copy");
    let shape = GemmShape::of::<f32>(2, 2, 2);
    refused(
        stream.blas().unwrap().gemm(&shape, 1.0, &here, &elsewhere, 0.0, &here),
        ErrorKind::WrongDevice,
        "device 1",
    );
    let (_other_gpu, other, _) = open(MockOptions::new());
    let foreign = other.device(0).unwrap().allocate::<f32>(4).unwrap();
    refused(stream.fill(&foreign, 1.0), ErrorKind::InvalidPointer, "another runtime");
    refused(stream.copy_to_device(&other.pinned(4).unwrap(), &here), ErrorKind::InvalidPointer, "another runtime");
}

#[test]
fn a_stale_handle_is_named() {
    let (gpu, _, _, stream) = open_with_stream(MockOptions::new());
    // Somebody destroys the stream behind the runtime's back.
    gpu.destroy_stream(stream.id()).unwrap();
    refused(stream.synchronize(), ErrorKind::InvalidHandle, "does not exist (any more)");
    refused(stream.blas(), ErrorKind::InvalidHandle, "does not exist (any more)");
}

#[test]
fn a_device_without_memory_gives_back_what_is_not_in_use_before_it_refuses() {
    const MIB: usize = 1 << 20;
    let (gpu, runtime, device) = open(MockOptions::new().with_memory_bytes(64 * MIB as u64));
    {
        // An ended stream's workspace (32 MiB) and a dropped buffer are what can be given back.
        let stream = device.create_stream().unwrap();
        drop(stream.blas().unwrap());
        stream.fill_zero(&device.allocate::<u8>(16 * MIB).unwrap()).unwrap();
    }
    let most = device.allocate::<u8>(60 * MIB).unwrap();
    refused(device.allocate::<u8>(8 * MIB), ErrorKind::OutOfMemory, "allocate");
    let stream = device.create_stream().unwrap();
    refused(stream.blas(), ErrorKind::OutOfMemory, "allocate");
    drop(most);
    drop(stream.blas().unwrap());
    end(runtime, (stream, device));
    assert_eq!(gpu.memory_info(0).unwrap().free, 64 * MIB as u64);
}

#[test]
fn every_failing_call_leaves_nothing_behind() {
    // The whole life of a program, with each operation failing at each of its calls in turn.
    let life = |gpu: &Arc<MockGpu>| -> Result<()> {
        let runtime = Runtime::new(gpu.clone())?;
        let result = (|| {
            let device = runtime.device(0)?;
            let streams = [device.create_stream()?, device.create_stream()?];
            let a = streams[0].upload(&[1.0_f32; 16])?;
            let c = device.allocate::<f32>(16)?;
            streams[1].wait(&streams[0].record()?)?;
            streams[1].blas()?.gemm(&GemmShape::of::<f32>(4, 4, 4), 1.0, &a, &a, 0.0, &c)?;
            streams[1].lt()?.matmul(&GemmShape::of::<f32>(4, 4, 4), Epilogue::None, 1.0, &a, &a, 0.0, &c, None)?;
            let scratch = streams[1].allocate::<f32>(16)?;
            streams[1].copy(&c, &scratch)?;
            assert_eq!(streams[1].download(&scratch)?, vec![4.0; 16]);
            runtime.trim()
        })();
        // Closing retries what a fault made fail before, and the fault comes only once.
        let closed = runtime.close();
        result.and(closed.map(|_| ()))
    };
    let gpu = MockGpu::open(MockOptions::new()).unwrap();
    life(&gpu).unwrap();
    for &operation in Operation::ALL {
        let calls = gpu.calls(operation);
        for nth in 1..=calls {
            let gpu = MockGpu::open(MockOptions::new()).unwrap();
            gpu.fail_call(operation, nth, ErrorKind::Vendor).unwrap();
            let result = life(&gpu);
            let left = gpu.live_objects();
            // Every release is tried again, except that of a handle.
            let allowed = u64::from(operation == Operation::Destroy);
            assert!(left.total() <= allowed, "call {nth} of {operation} failed: {left:?}, {result:?}");
        }
    }
}

#[test]
fn closing_with_something_alive_says_so_and_closes_nothing() {
    let (gpu, runtime, _, stream) = open_with_stream(MockOptions::new());
    refused(
        runtime.close(),
        ErrorKind::InvalidState,
        "1 other object of the runtime is alive; with the pools, the backend counts 1 stream",
    );
    stream.synchronize().unwrap();
    drop(stream);
    assert_eq!(gpu.live_objects().total(), 0);
}
