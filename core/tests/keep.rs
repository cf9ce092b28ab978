//! [`Runtime::keep`]: a second owner of shared memory, and [`Runtime::check_outside_capture`].

use highwater_core::{CaptureMode, ErrorKind, Runtime};
use highwater_mock::{MockGpu, MockOptions};

#[test]
fn memory_stays_while_either_owner_exists_and_is_freed_once() {
    let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    let layer = device.allocate_shared::<u32>(1000).unwrap();
    stream.fill(&layer, 7).unwrap();
    let part = runtime.keep(layer.slice(600..900).unwrap()).unwrap();
    assert_eq!((part.len(), part.ptr()), (300, layer.ptr().offset(2400)));
    let whole = runtime.keep(&part).unwrap();
    drop((layer, part));
    assert_eq!(stream.download(&whole).unwrap(), vec![7; 300]);
    assert_eq!(runtime.backend().live_objects().allocations, 1);
    // It is shared as the original is.
    let opened = runtime.open_shared::<u32>(&whole.share().unwrap()).unwrap();
    assert_eq!(opened.ptr(), whole.ptr());
    drop((whole, opened));
    stream.synchronize().unwrap();
    assert_eq!(runtime.backend().live_objects().allocations, 0);
    drop((stream, device));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn other_memory_and_memory_of_another_runtime_are_refused() {
    let open = || Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
    let (runtime, other) = (open(), open());
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    let shared = device.allocate_shared::<u32>(10).unwrap();
    let refused = [
        runtime.keep(&device.allocate::<u32>(10).unwrap()).err(),
        runtime.keep(&stream.allocate::<u32>(10).unwrap()).err(),
        other.keep(&shared).err(),
    ];
    assert_eq!(refused.map(|error| error.map(|error| error.kind())), [Some(ErrorKind::InvalidArgument); 3]);
}

#[test]
fn a_call_of_a_crate_is_refused_inside_a_capture_only() {
    let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
    let stream = runtime.device(0).unwrap().create_stream().unwrap();
    let kind = || runtime.check_outside_capture("test").err().map(|error| (error.kind(), error.operation()));
    let mut inside = None;
    let captured = stream.capture_with(CaptureMode::ThreadLocal, |_| {
        inside = kind();
        Ok(())
    });
    drop(captured);
    assert_eq!((inside, kind()), (Some((ErrorKind::Capture, "test")), None));
}
