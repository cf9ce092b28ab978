//! Bad input to the library: one clear error each, with what to do, and nothing left behind.

#![cfg(feature = "mock")]
#![forbid(unsafe_code)]

use highwater::mock::{MockGpu, MockOptions, Operation};
use highwater::{Epilogue, Error, ErrorKind, GemmShape, Runtime};

fn runtime(options: MockOptions) -> Runtime {
    Runtime::new(MockGpu::open(options).unwrap()).unwrap()
}

#[track_caller]
fn assert_clear(error: &Error, kind: ErrorKind, parts: &[&str]) {
    assert_eq!(error.kind(), kind, "{error}");
    assert!(!error.hint().is_empty(), "no hint in: {error}");
    for part in parts {
        assert!(error.message().contains(part), "`{part}` is missing in: {error}");
    }
}

#[test]
fn buffers_of_the_wrong_size_are_refused_with_both_sizes() {
    let runtime = runtime(MockOptions::new());
    {
        let device = runtime.device(0).unwrap();
        let stream = device.create_stream().unwrap();
        let [a, b, small] = [6, 6, 3].map(|len| device.allocate::<f32>(len).unwrap());
        let mut pinned = runtime.pinned::<f32>(5).unwrap();
        let error = stream.copy_to_device(&pinned, &a).unwrap_err();
        assert_clear(&error, ErrorKind::InvalidArgument, &["5", "6"]);
        let error = stream.copy_to_host(&small, &mut pinned).unwrap_err();
        assert_clear(&error, ErrorKind::InvalidArgument, &["3", "5"]);
        let error = stream.write(&[0.0; 7], &a).unwrap_err();
        assert_clear(&error, ErrorKind::InvalidArgument, &["7", "6"]);

        let shape = GemmShape::of::<f32>(2, 2, 3);
        let error = stream.blas().unwrap().gemm(&shape, 1.0, &a, &b, 0.0, &small).unwrap_err();
        assert_clear(&error, ErrorKind::InvalidArgument, &["C has 3 values", "4"]);
        let mut lt = stream.lt().unwrap();
        let error = lt.matmul(&shape, Epilogue::None, 1.0, &small, &b, 0.0, &a, None).unwrap_err();
        assert_clear(&error, ErrorKind::InvalidArgument, &["A has 3 values", "6"]);
    }
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn a_stale_stream_is_refused_and_the_rest_is_given_back() {
    let runtime = runtime(MockOptions::new());
    {
        let device = runtime.device(0).unwrap();
        let (stale, live) = (device.create_stream().unwrap(), device.create_stream().unwrap());
        let buffer = device.allocate::<f32>(16).unwrap();
        runtime.backend().destroy_stream(stale.id()).unwrap();
        assert_clear(&stale.fill(&buffer, 1.0).unwrap_err(), ErrorKind::InvalidHandle, &[]);
        assert_clear(&stale.synchronize().unwrap_err(), ErrorKind::InvalidHandle, &[]);
        assert_clear(&stale.record().unwrap_err(), ErrorKind::InvalidHandle, &[]);
        let (a, b) = (device.allocate::<f32>(16).unwrap(), device.allocate::<f32>(16).unwrap());
        let product =
            stale.blas().and_then(|mut blas| blas.gemm(&GemmShape::of::<f32>(4, 4, 4), 1.0, &a, &b, 0.0, &buffer));
        assert_clear(&product.unwrap_err(), ErrorKind::InvalidHandle, &[]);
        // Other streams do not notice.
        live.fill(&buffer, 2.0).unwrap();
        assert_eq!(live.download(&buffer).unwrap(), [2.0; 16]);
    }
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn objects_of_another_runtime_are_refused() {
    let (here, there) = (runtime(MockOptions::new()), runtime(MockOptions::new()));
    {
        let stream = here.device(0).unwrap().create_stream().unwrap();
        let foreign_stream = there.device(0).unwrap().create_stream().unwrap();
        let foreign = there.device(0).unwrap().allocate::<f32>(4).unwrap();
        assert_eq!(stream.fill_zero(&foreign).unwrap_err().kind(), ErrorKind::InvalidPointer);
        assert_eq!(stream.wait(&foreign_stream.record().unwrap()).unwrap_err().kind(), ErrorKind::InvalidHandle);
    }
    assert_eq!((here.close().unwrap().total(), there.close().unwrap().total()), (0, 0));
}

#[test]
fn a_full_device_is_out_of_memory_and_usable_again_afterwards() {
    let runtime = runtime(MockOptions::new().with_memory_bytes(1 << 20));
    {
        let device = runtime.device(0).unwrap();
        let half = device.allocate::<u8>(1 << 19).unwrap();
        let error = device.allocate::<u8>((1 << 19) + 1).unwrap_err();
        assert_clear(&error, ErrorKind::OutOfMemory, &[]);
        drop(half);
        assert!(device.allocate::<u8>((1 << 19) + 1).is_ok());
    }
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn a_handle_that_cannot_be_made_is_made_by_the_next_request() {
    let runtime = runtime(MockOptions::new().with_fault(Operation::CreateBlasHandle, 1, ErrorKind::Vendor));
    {
        let stream = runtime.device(0).unwrap().create_stream().unwrap();
        assert_eq!(stream.blas().unwrap_err().kind(), ErrorKind::Vendor);
        assert!(stream.blas().is_ok());
    }
    assert_eq!(runtime.close().unwrap().total(), 0);
}
