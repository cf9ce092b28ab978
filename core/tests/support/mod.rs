//! How most tests of the owning types begin and end.

#![allow(dead_code, reason = "each test uses some of it")]

use std::sync::Arc;

use highwater_core::{Device, ErrorKind, Result, Runtime, Stream};
use highwater_mock::{MockGpu, MockOptions};

/// Opens a mock with these options. Returns it, a runtime over it, and the first device.
pub(crate) fn open(options: MockOptions) -> (Arc<MockGpu>, Runtime, Device) {
    let gpu = MockGpu::open(options).unwrap();
    let runtime = Runtime::new(gpu.clone()).unwrap();
    let device = runtime.device(0).unwrap();
    (gpu, runtime, device)
}

/// Opens a mock as [`open`] does, and creates a stream.
pub(crate) fn open_with_stream(options: MockOptions) -> (Arc<MockGpu>, Runtime, Device, Stream) {
    let (gpu, runtime, device) = open(options);
    let stream = device.create_stream().unwrap();
    (gpu, runtime, device, stream)
}

/// Drops the objects of the runtime and closes it. Nothing is left.
#[track_caller]
pub(crate) fn end<T>(runtime: Runtime, objects: T) {
    drop(objects);
    assert_eq!(runtime.close().unwrap().total(), 0);
}

pub(crate) fn kind<T>(result: Result<T>) -> ErrorKind {
    result.map(|_| ()).unwrap_err().kind()
}
