//! The `mockall` mocks of the four traits (feature `mockall` of `highwater-hal`), for tests that script single calls. The
//! backend `mock` serves all other tests: it computes real results.

#![forbid(unsafe_code)]

use std::ptr::NonNull;
use std::sync::Arc;

use highwater::hal::{
    BackendTag, BlasKind, Completion, DevicePtr, HostAllocator, HostPtr, IdTable, Identity, IpcSharing, LiveObjects,
    MathMode, MemoryHandle, MockBackend, MockBlasHandle, MockHostAllocator, MockIpcSharing, ObjectId, StreamId,
    Workspace,
};
use highwater::{Capabilities, DeviceInfo, Error, ErrorKind, GemmShape, Result, Runtime, Transport};
use mockall::predicate::{always, eq};
use mockall::{Sequence, predicate};

/// Returns a backend with one device that answers the queries of every runtime.
fn backend(host: MockHostAllocator) -> MockBackend {
    let tag = BackendTag::next();
    let host: Arc<dyn HostAllocator> = Arc::new(host);
    let mut capabilities = Capabilities::none();
    capabilities.gemm_f32 = true;
    capabilities.blas_workspace = true;
    capabilities.blas_workspace_bytes = 4096;
    let mut backend = MockBackend::new();
    backend.expect_identity().return_const(Identity::new("scripted", "a scripted device", tag));
    backend.expect_device_count().return_const(1_u32);
    backend.expect_device_info().returning(|device| Ok(DeviceInfo::new(device, "scripted", [7; 16], 1 << 30)));
    backend.expect_capabilities().returning(move |_| Ok(capabilities));
    backend.expect_host_allocator().returning(move || Arc::clone(&host));
    backend.expect_host_observer().returning(|| None);
    backend.expect_is_exiting().return_const(false);
    backend.expect_synchronize_device().returning(|_| Ok(()));
    backend.expect_live_objects().returning(LiveObjects::default);
    backend
}

fn id<I: ObjectId>(slot: u32) -> I {
    let table = IdTable::<I, u32>::new(BackendTag::next());
    table.insert("test", 0, Arc::new(slot)).unwrap()
}

#[test]
fn device_memory_that_runs_out_is_asked_for_exactly_twice() {
    let mut backend = backend(MockHostAllocator::new());
    let exhausted = || Error::new(ErrorKind::OutOfMemory, "allocate", "none free");
    backend.expect_allocate().times(2).returning(move |_, _| Err(exhausted()));
    let runtime = Runtime::new(Arc::new(backend)).unwrap();
    let error = runtime.device(0).unwrap().allocate::<f32>(1000).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn other_errors_of_allocate_are_not_tried_again() {
    let mut backend = backend(MockHostAllocator::new());
    backend.expect_allocate().times(1).returning(|_, _| Err(Error::new(ErrorKind::DeviceLost, "allocate", "gone")));
    let runtime = Runtime::new(Arc::new(backend)).unwrap();
    let error = runtime.device(0).unwrap().allocate::<f32>(1000).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeviceLost);
}

#[test]
fn a_pooled_handle_is_bound_once_for_many_products_of_one_stream() {
    let stream: StreamId = id(1);
    let workspace = Workspace { ptr: DevicePtr::new(0x10_0000), bytes: 4096 };
    let mut handle = MockBlasHandle::new();
    let mut order = Sequence::new();
    handle.expect_set_stream().with(eq(stream)).times(1).in_sequence(&mut order).returning(|_| Ok(()));
    handle.expect_set_workspace().with(eq(Some(workspace))).times(1).in_sequence(&mut order).returning(|_| Ok(()));
    handle.expect_set_math_mode().with(eq(MathMode::Default)).times(1).in_sequence(&mut order).returning(|_| Ok(()));
    handle.expect_gemm().times(3).in_sequence(&mut order).returning(|_| Ok(()));
    handle.expect_destroy().times(1).returning(|| Ok(()));

    let mut backend = backend(MockHostAllocator::new());
    backend.expect_create_stream().times(1).returning(move |_, _| Ok(stream));
    backend.expect_destroy_stream().with(eq(stream)).times(1).returning(|_| Ok(()));
    let mut addresses = [0x20_0000, 0x30_0000, 0x40_0000, workspace.ptr.get()].map(DevicePtr::new).into_iter();
    backend.expect_allocate().times(4).returning(move |_, _| Ok(addresses.next().unwrap()));
    backend.expect_free().times(4).returning(|_, _, _| Ok(()));
    backend.expect_create_event().returning(|_, _| Ok(id(2)));
    backend.expect_record_event().returning(|_, _| Ok(()));
    backend.expect_query_event().returning(|_| Ok(Completion::Complete));
    backend.expect_destroy_event().returning(|_| Ok(()));
    let mut handles = Some(Box::new(handle));
    backend
        .expect_create_blas_handle()
        .withf(|device, options| *device == 0 && options.kind == BlasKind::Blas)
        .times(1)
        .returning(move |_, _| Ok(handles.take().unwrap()));

    let runtime = Runtime::new(Arc::new(backend)).unwrap();
    {
        let device = runtime.device(0).unwrap();
        let [a, b, c] = [(); 3].map(|()| device.allocate::<f32>(4).unwrap());
        let stream = device.create_stream().unwrap();
        for _ in 0..3 {
            let shape = GemmShape::of::<f32>(2, 2, 2);
            stream.blas().unwrap().gemm(&shape, 1.0, &a, &b, 0.0, &c).unwrap();
        }
    }
    runtime.close().unwrap();
}

#[test]
fn page_locked_memory_is_allocated_once_and_freed_at_the_end() {
    let mut host = MockHostAllocator::new();
    // The test neither reads nor writes the buffers below, so the address may be dangling.
    host.expect_allocate().times(1).returning(|_, _| Ok(HostPtr::new(NonNull::dangling())));
    host.expect_free().with(eq(HostPtr::new(NonNull::dangling()))).times(1).returning(|_| Ok(()));
    let runtime = Runtime::new(Arc::new(backend(host))).unwrap();
    for _ in 0..5 {
        drop(runtime.pinned::<u8>(1000).unwrap());
    }
    assert_eq!((runtime.statistics().host.misses, runtime.statistics().host.hits), (1, 4));
    runtime.close().unwrap();
}

/// Code under test: maps memory of another process by the first transport that this one can open.
fn open_first(ipc: &dyn IpcSharing, device: u32, handles: &[MemoryHandle]) -> Result<DevicePtr> {
    let refused = Error::new(ErrorKind::InvalidArgument, "open_first", "no handle was sent");
    handles
        .iter()
        .try_fold(refused, |_, handle| match ipc.open_memory(device, handle) {
            Ok(ptr) => std::ops::ControlFlow::Break(ptr),
            Err(error) => std::ops::ControlFlow::Continue(error),
        })
        .break_value()
        .ok_or_else(|| Error::new(ErrorKind::Unsupported, "open_first", "no transport can be opened here"))
}

#[test]
fn a_share_is_opened_by_the_first_transport_that_works() {
    let by = |transport| predicate::function(move |handle: &MemoryHandle| handle.transport == transport);
    let mut ipc = MockIpcSharing::new();
    let mut order = Sequence::new();
    ipc.expect_open_memory()
        .with(eq(0), by(Transport::Fabric))
        .times(1)
        .in_sequence(&mut order)
        .returning(|_, _| Err(Error::lacks("open_memory", "ipc_transports")));
    ipc.expect_open_memory()
        .with(eq(0), by(Transport::Legacy))
        .times(1)
        .in_sequence(&mut order)
        .returning(|_, _| Ok(DevicePtr::new(0x5000)));
    let sent = [Transport::Fabric, Transport::Legacy, Transport::Descriptor]
        .map(|transport| MemoryHandle::new(transport, [7; 16], 4096, [0; 64]));
    assert_eq!(open_first(&ipc, 0, &sent).unwrap(), DevicePtr::new(0x5000));

    let mut refusing = MockIpcSharing::new();
    refusing
        .expect_open_memory()
        .with(always(), always())
        .times(3)
        .returning(|_, _| Err(Error::lacks("open_memory", "x")));
    assert_eq!(open_first(&refusing, 0, &sent).unwrap_err().kind(), ErrorKind::Unsupported);
}
