//! Tests of the four traits over a fake vendor: the calls, their context and mode, and the state after errors.

use std::ptr::NonNull;

use super::platform::MAX_PITCH;
use super::state::CAPTURES;
use super::testing::{Fake, GRANULARITY, INVALID, OPENED_BYTES, context};
use highwater_hal::numbers::Coded as _;
use highwater_hal::{
    AllocateOptions, AtomicsMode, Backend, BlasKind, BlasOptions, CaptureMode, Completion, CopyShape, DataType,
    DeviceMemoryKind, DevicePtr, ErrorKind, EventOptions, Gemm, GemmShape, HostMemoryKind, HostOptions, HostPtr,
    Location, MathMode, MemoryCopy, MemoryCopy2d, MemoryHandle, PhysicalMemoryOptions, Result, StreamId, StreamOptions,
    StridedBatch, Transport, Workspace,
};

fn stream(fake: &Fake) -> StreamId {
    fake.backend.create_stream(0, &StreamOptions::new()).unwrap()
}

#[test]
fn a_capture_is_counted_once_however_it_ends() {
    let fake = Fake::new();
    let backend = &fake.backend;
    let id = stream(&fake);
    let idle = |when: &str| assert!(backend.synchronize_device(0).is_ok(), "a capture is still counted: {when}");
    // Begin fails.
    fake.answer("stream_begin_capture", INVALID);
    assert!(backend.begin_capture(id, CaptureMode::Global).is_err());
    idle("begin failed");
    // It ends.
    backend.begin_capture(id, CaptureMode::Global).unwrap();
    assert_eq!(backend.synchronize_device(0).unwrap_err().kind(), ErrorKind::Capture);
    // SAFETY: This test began it.
    let graph = unsafe { backend.end_capture(id) }.unwrap();
    backend.destroy_graph(graph).unwrap();
    idle("ended");
    // Another thread cannot end the capture and does no harm. Its own thread can.
    backend.begin_capture(id, CaptureMode::Global).unwrap();
    let ends = fake.calls("stream_end_capture").len();
    std::thread::scope(|scope| {
        // SAFETY: As above.
        scope.spawn(|| assert_eq!(unsafe { backend.end_capture(id) }.unwrap_err().kind(), ErrorKind::Capture));
    });
    assert_eq!(fake.calls("stream_end_capture").len(), ends);
    assert_eq!(backend.synchronize_device(0).unwrap_err().kind(), ErrorKind::Capture);
    // SAFETY: As above.
    backend.destroy_graph(unsafe { backend.end_capture(id) }.unwrap()).unwrap();
    idle("ended on its own thread");
    // In relaxed mode, any thread can end it.
    backend.begin_capture(id, CaptureMode::Relaxed).unwrap();
    let graph = std::thread::scope(|scope| {
        // SAFETY: As above.
        scope.spawn(|| unsafe { backend.end_capture(id) }.unwrap()).join().unwrap()
    });
    backend.destroy_graph(graph).unwrap();
    idle("ended in relaxed mode");
    // Foreign code ends the capture. The next capture counts once too.
    backend.begin_capture(id, CaptureMode::Global).unwrap();
    fake.end_foreign_capture(backend.raw_stream(id).unwrap());
    backend.begin_capture(id, CaptureMode::Global).unwrap();
    // SAFETY: As above.
    backend.destroy_graph(unsafe { backend.end_capture(id) }.unwrap()).unwrap();
    idle("other code had ended the one before");
    // The stream is destroyed.
    backend.begin_capture(id, CaptureMode::Global).unwrap();
    backend.destroy_stream(id).unwrap();
    idle("the stream was destroyed");
    assert_eq!(fake.alive(), 0);
}

/// The enums of the contract may grow, so matches outside it have a wildcard. This test covers every variant instead.
#[test]
fn no_choice_of_the_contract_is_unknown_here() {
    fn known<T>(answer: Result<T>) {
        if let Err(error) = answer {
            assert!(!error.to_string().contains("does not know"), "{error}");
        }
    }
    let fake = Fake::new();
    let backend = &fake.backend;
    for &mode in CaptureMode::ALL {
        known(backend.begin_capture(stream(&fake), mode));
    }
    drop(fake);
    let fake = Fake::new();
    let backend = &fake.backend;
    BlasKind::ALL.iter().for_each(|&kind| known(backend.create_blas_handle(0, &BlasOptions::new(kind))));
    let mut handle = backend.create_blas_handle(0, &BlasOptions::new(BlasKind::Blas)).unwrap();
    MathMode::ALL.iter().for_each(|&mode| known(handle.set_math_mode(mode)));
    AtomicsMode::ALL.iter().for_each(|&mode| known(handle.set_atomics_mode(mode)));
    let host = backend.host_allocator();
    HostMemoryKind::ALL.iter().for_each(|&kind| known(host.allocate(64, &HostOptions::new().with_kind(kind))));
    for &kind in &[DeviceMemoryKind::Plain, DeviceMemoryKind::StreamOrdered(stream(&fake))] {
        known(backend.allocate(0, &AllocateOptions::new(64).with_kind(kind)));
    }
    for &transport in Transport::ALL {
        known(backend.allocate(0, &AllocateOptions::new(64).with_kind(DeviceMemoryKind::Shareable(transport))));
    }
    let quirks = super::Platform::quirks(&backend.state().platform);
    DataType::ALL.iter().for_each(|&data_type| assert_ne!(quirks.type_code(data_type), -1, "{data_type:?}"));
}

/// A new field would be ignored here without a compile error.
#[test]
fn the_options_of_the_contract_have_no_other_fields() {
    let shown = |value: &dyn std::fmt::Debug| format!("{value:?}");
    assert_eq!(shown(&AllocateOptions::new(1)), "AllocateOptions { bytes: 1, kind: Plain }");
    assert_eq!(shown(&EventOptions::new()), "EventOptions { timing: false, interprocess: false }");
    assert_eq!(shown(&StreamOptions::new()), "StreamOptions { priority: Normal }");
    assert_eq!(shown(&HostOptions::new()), "HostOptions { kind: Default, read_only: false }");
    assert_eq!(shown(&BlasOptions::new(BlasKind::Blas)), "BlasOptions { kind: Blas }");
    let memory = "PhysicalMemoryOptions { bytes: 1, shareable: None, rdma: false }";
    assert_eq!(shown(&PhysicalMemoryOptions::new(1)), memory);
    let shape = shown(&GemmShape::new(DataType::F32, 1, 1, 1));
    assert_eq!(shape.matches(": ").count(), 11, "{shape}");
}

#[test]
fn a_stream_that_begins_a_capture_while_it_is_destroyed_leaves_no_count() {
    let fake = Fake::new();
    let backend = &fake.backend;
    let id = stream(&fake);
    fake.hold_up("stream_begin_capture");
    std::thread::scope(|scope| {
        let begins = scope.spawn(|| backend.begin_capture(id, CaptureMode::ThreadLocal));
        fake.wait_for("stream_begin_capture");
        backend.destroy_stream(id).unwrap();
        fake.go_on("stream_begin_capture");
        begins.join().unwrap().unwrap();
    });
    assert_eq!(backend.live_objects().total(), 0);
    assert_eq!(fake.alive(), 0);
    backend.synchronize_device(0).unwrap();
    assert!(!backend.state().may_capture());
}

#[test]
fn a_stream_that_ends_a_capture_while_it_is_destroyed_ends_it_once() {
    let fake = Fake::new();
    let backend = &fake.backend;
    let id = stream(&fake);
    fake.hold_up("stream_end_capture");
    std::thread::scope(|scope| {
        let ends = scope.spawn(|| {
            backend.begin_capture(id, CaptureMode::ThreadLocal).unwrap();
            // SAFETY: This thread began it.
            unsafe { backend.end_capture(id) }
        });
        fake.wait_for("stream_end_capture");
        backend.destroy_stream(id).unwrap();
        fake.go_on("stream_end_capture");
        backend.destroy_graph(ends.join().unwrap().unwrap()).unwrap();
    });
    assert_eq!(backend.live_objects().total(), 0);
    assert!(!backend.state().may_capture());
    backend.synchronize_device(0).unwrap();
}

#[test]
fn the_per_thread_default_stream_is_not_captured() {
    let fake = Fake::new();
    let backend = &fake.backend;
    let id = StreamId::per_thread_default(backend.identity().tag, 0);
    assert_eq!(backend.begin_capture(id, CaptureMode::ThreadLocal).unwrap_err().kind(), ErrorKind::Capture);
    // SAFETY: Nothing is captured.
    assert_eq!(unsafe { backend.end_capture(id) }.unwrap_err().kind(), ErrorKind::Capture);
    assert!(fake.calls("stream_begin_capture").is_empty());
    backend.synchronize_device(0).unwrap();
}

#[test]
fn the_handle_of_a_default_stream_is_refused_with_the_right_call() {
    let fake = Fake::new();
    for (raw, call) in [(0, "legacy_default"), (1, "legacy_default"), (2, "per_thread_default")] {
        // SAFETY: Default streams never end.
        let error = unsafe { fake.backend.stream_from_raw(0, raw) }.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.hint().contains(call), "{raw}: {error}");
    }
}

#[test]
fn a_foreign_stream_is_not_used_any_more_once_it_was_given_back() {
    let fake = Fake::new();
    let backend = &fake.backend;
    let raw = fake.foreign();
    // SAFETY: The stream is alive until it is given back.
    let id = unsafe { backend.stream_from_raw(0, raw) }.unwrap();
    fake.hold_up("stream_synchronize");
    std::thread::scope(|scope| {
        let user = scope.spawn(|| backend.synchronize_stream(id));
        fake.wait_for("stream_synchronize");
        let owner = scope.spawn(|| {
            backend.destroy_stream(id).unwrap();
            // From here on its owner may destroy it.
            fake.destroy_foreign(raw);
        });
        // The thread that destroys has made the id stale, and waits.
        while backend.query_stream(id).is_ok() {
            std::thread::yield_now();
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
        fake.go_on("stream_synchronize");
        user.join().unwrap().unwrap();
        owner.join().unwrap();
    });
    assert!(fake.calls("stream_destroy").is_empty());
    assert_eq!(backend.live_objects().total(), 0);
}

#[test]
fn an_own_stream_that_a_call_uses_is_destroyed_after_it_and_nobody_waits() {
    let fake = Fake::new();
    let backend = &fake.backend;
    let id = stream(&fake);
    fake.hold_up("stream_synchronize");
    std::thread::scope(|scope| {
        let user = scope.spawn(|| backend.synchronize_stream(id));
        fake.wait_for("stream_synchronize");
        backend.destroy_stream(id).unwrap();
        assert!(fake.calls("stream_destroy").is_empty());
        fake.go_on("stream_synchronize");
        user.join().unwrap().unwrap();
    });
    assert_eq!((backend.live_objects().total(), fake.alive()), (0, 0));
}

#[test]
fn success_without_an_object_is_an_error_and_leaves_nothing() {
    let fake = Fake::new();
    let backend = &fake.backend;
    let id = stream(&fake);
    for name in [
        "stream_create_with_priority",
        "event_create",
        "mem_alloc",
        "mem_alloc_async",
        "mem_host_alloc",
        "blas_create",
        "allocate_shared",
        "reserve_addresses",
        "create_memory",
        "open_shared",
        "ipc_open_mem_handle",
        "stream_end_capture",
        "graph_instantiate_with_flags",
        "ipc_open_event_handle",
    ] {
        fake.give_nothing(name);
    }
    let before = backend.live_objects();
    let vendor = |what: &str, error: Option<highwater_hal::Error>| {
        let error = error.unwrap_or_else(|| panic!("{what} gave an object"));
        assert_eq!(error.kind(), ErrorKind::Vendor, "{what}: {error}");
    };
    vendor("stream", backend.create_stream(0, &StreamOptions::new()).err());
    vendor("event", backend.create_event(0, &EventOptions::new()).err());
    vendor("plain", backend.allocate(0, &AllocateOptions::new(64)).err());
    for kind in [
        DeviceMemoryKind::StreamOrdered(id),
        DeviceMemoryKind::Shareable(Transport::Legacy),
        DeviceMemoryKind::Shareable(Transport::Descriptor),
    ] {
        vendor("memory", backend.allocate(0, &AllocateOptions::new(64).with_kind(kind)).err());
    }
    vendor("addresses", backend.reserve_addresses(0, GRANULARITY).err());
    vendor("memory", backend.create_memory(0, &PhysicalMemoryOptions::new(GRANULARITY)).err());
    vendor("host", backend.host_allocator().allocate(64, &HostOptions::new()).err());
    vendor("handle", backend.create_blas_handle(0, &BlasOptions::new(BlasKind::Blas)).err());
    let ipc = backend.ipc_sharing().unwrap();
    for transport in [Transport::Legacy, Transport::Fabric] {
        vendor("mapping", ipc.open_memory(0, &MemoryHandle::new(transport, [0; 16], 64, [1; 64])).err());
    }
    vendor("opened event", ipc.open_event(0, &highwater_hal::EventHandle::new([0; 16], [1; 64])).err());
    backend.begin_capture(id, CaptureMode::ThreadLocal).unwrap();
    // SAFETY: This test began it.
    vendor("graph", unsafe { backend.end_capture(id) }.err());
    assert_eq!(backend.live_objects(), before);
    backend.synchronize_device(0).unwrap();
}

#[test]
fn a_handle_of_more_bytes_than_are_mapped_is_refused_also_when_it_is_opened_already() {
    let fake = Fake::new();
    let ipc = fake.backend.ipc_sharing().unwrap();
    let handle =
        |transport, bytes: usize| MemoryHandle::new(transport, [0; 16], bytes as u64, [transport as u8 + 1; 64]);
    for transport in [Transport::Legacy, Transport::Fabric] {
        let first = ipc.open_memory(0, &handle(transport, OPENED_BYTES)).unwrap();
        let error = ipc.open_memory(0, &handle(transport, OPENED_BYTES + 1)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{transport:?}: {error}");
        // Nothing was counted.
        // SAFETY: Nothing uses it.
        unsafe { ipc.close_memory(0, first) }.unwrap();
        assert_eq!(fake.backend.live_objects().mappings, 0, "{transport:?}");
    }
    assert_eq!(fake.alive(), 0);
}

#[test]
fn a_legacy_handle_that_the_vendor_refuses_is_an_invalid_argument() {
    let fake = Fake::new();
    let ipc = fake.backend.ipc_sharing().unwrap();
    for code in [INVALID, 201, 400] {
        fake.answer("ipc_open_mem_handle", code);
        let error = ipc.open_memory(0, &MemoryHandle::new(Transport::Legacy, [0; 16], 64, [1; 64])).unwrap_err();
        assert_eq!((error.kind(), error.code()), (ErrorKind::InvalidArgument, Some(i64::from(code))), "{error}");
        assert_eq!(error.hint(), "see the same devices");
    }
    fake.answer("ipc_open_mem_handle", 2);
    let error = ipc.open_memory(0, &MemoryHandle::new(Transport::Legacy, [0; 16], 64, [1; 64])).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    assert_eq!(fake.backend.live_objects().mappings, 0);
}

#[test]
fn what_exports_leave_behind_does_not_grow() {
    let fake = Fake::new();
    let backend = &fake.backend;
    let kind = DeviceMemoryKind::Shareable(Transport::Descriptor);
    let block = backend.allocate(0, &AllocateOptions::new(64).with_kind(kind)).unwrap();
    let ipc = backend.ipc_sharing().unwrap();
    for _ in 0..100 {
        // SAFETY: The block is alive.
        drop(unsafe { ipc.export_memory(0, block, Transport::Descriptor) }.unwrap());
    }
    assert!(backend.state().exported.lock().len() < 10);
    // SAFETY: Nothing uses it.
    unsafe { backend.free(0, block, None) }.unwrap();
    assert_eq!(backend.live_objects().total(), 0);
}

#[test]
fn memory_that_could_not_be_freed_can_be_freed_again() {
    let fake = Fake::new();
    let backend = &fake.backend;
    let host = backend.host_allocator();
    let kinds = [
        (DeviceMemoryKind::Plain, "mem_free"),
        (DeviceMemoryKind::Shareable(Transport::Legacy), "mem_free"),
        (DeviceMemoryKind::Shareable(Transport::Descriptor), "free_shared"),
    ];
    for (kind, call) in kinds {
        let block = backend.allocate(0, &AllocateOptions::new(64).with_kind(kind)).unwrap();
        for failing in [call, "make_current"] {
            fake.answer(failing, INVALID);
            // SAFETY: Nothing uses it.
            assert!(unsafe { backend.free(0, block, None) }.is_err());
        }
        assert_eq!(backend.live_objects().allocations, 1);
        // SAFETY: As above.
        unsafe { backend.free(0, block, None) }.unwrap();
    }
    let block = host.allocate(64, &HostOptions::new()).unwrap();
    fake.answer("mem_free_host", INVALID);
    // SAFETY: As above.
    assert!(unsafe { host.free(block) }.is_err());
    // SAFETY: As above.
    unsafe { host.free(block) }.unwrap();
    assert_eq!((backend.live_objects().total(), fake.alive()), (0, 0));
}

#[test]
fn memory_that_the_cpu_may_only_read_is_registered_with_the_vendors_flag() {
    let fake = Fake::new();
    let host = fake.backend.host_allocator();
    let mut bytes = [0_u8; 64];
    let ptr = HostPtr::new(std::ptr::NonNull::from(&mut bytes).cast());
    for read_only in [false, true] {
        let options = HostOptions::new().with_read_only(read_only);
        // SAFETY: The bytes live until they are unregistered, and the fake uses nothing.
        unsafe { host.register(ptr, 64, &options).and_then(|()| host.unregister(ptr)) }.unwrap();
    }
    assert_eq!(fake.register_flags(), [3, 3 | 8]);
}

#[test]
fn stream_ordered_memory_is_not_freed_into_a_capture() {
    let fake = Fake::new();
    let backend = &fake.backend;
    let id = stream(&fake);
    let kind = DeviceMemoryKind::StreamOrdered(id);
    let block = backend.allocate(0, &AllocateOptions::new(64).with_kind(kind)).unwrap();
    backend.begin_capture(id, CaptureMode::ThreadLocal).unwrap();
    // SAFETY: Nothing uses it.
    assert_eq!(unsafe { backend.free(0, block, Some(id)) }.unwrap_err().kind(), ErrorKind::Capture);
    assert!(fake.calls("mem_free_async").is_empty());
    // SAFETY: This test began it.
    backend.destroy_graph(unsafe { backend.end_capture(id) }.unwrap()).unwrap();
    // SAFETY: As above.
    unsafe { backend.free(0, block, Some(id)) }.unwrap();
    assert_eq!(backend.live_objects().allocations, 0);
}

#[test]
fn calls_that_a_capture_forbids_are_made_in_relaxed_mode_while_one_is_open() {
    let fake = Fake::new();
    let backend = &fake.backend;
    let (captured, other) = (stream(&fake), stream(&fake));
    let event = backend.create_event(0, &EventOptions::new()).unwrap();
    backend.begin_capture(other, CaptureMode::Global).unwrap();
    // SAFETY: This test began it.
    let graph = unsafe { backend.end_capture(other) }.unwrap();
    backend.begin_capture(captured, CaptureMode::Global).unwrap();
    assert_eq!(backend.query_event(event).unwrap(), Completion::Complete);
    backend.query_stream(other).unwrap();
    backend.synchronize_stream(other).unwrap();
    let block = backend.allocate(0, &AllocateOptions::new(64)).unwrap();
    // SAFETY: Nothing uses it.
    unsafe { backend.free(0, block, None) }.unwrap();
    let ordered = AllocateOptions::new(64).with_kind(DeviceMemoryKind::StreamOrdered(other));
    let block = backend.allocate(0, &ordered).unwrap();
    // SAFETY: As above.
    unsafe { backend.free(0, block, Some(other)) }.unwrap();
    let executable = backend.instantiate_graph(graph).unwrap();
    backend.destroy_graph_exec(executable).unwrap();
    backend.destroy_graph(graph).unwrap();
    let handle = backend.create_blas_handle(0, &BlasOptions::new(BlasKind::Blas)).unwrap();
    drop(handle);
    backend.destroy_event(event).unwrap();
    backend.destroy_stream(other).unwrap();
    // The stream's capture counts until the stream is destroyed.
    backend.destroy_stream(captured).unwrap();
    for name in [
        "event_query",
        "stream_query",
        "stream_synchronize",
        "mem_alloc",
        "mem_free",
        "mem_alloc_async",
        "mem_pool_set_attribute",
        "mem_free_async",
        "graph_instantiate_with_flags",
        "graph_exec_destroy",
        "blas_create",
        "blas_destroy",
        "event_destroy",
        "stream_destroy",
    ] {
        let calls = fake.calls(name);
        assert!(!calls.is_empty() && calls.iter().all(|call| call.mode == 2), "{name}: {calls:?}");
    }
    // The default pool is never destroyed.
    assert_eq!(fake.alive(), 1);
}

#[test]
fn a_capture_that_forbids_questions_begins_after_those_that_did_not_see_it() {
    let fake = Fake::new();
    let backend = &fake.backend;
    let (first, second) = (stream(&fake), stream(&fake));
    let event = backend.create_event(0, &EventOptions::new()).unwrap();
    // A query of a default stream is always relaxed, because no capture would wait for it.
    backend.query_stream(StreamId::legacy_default(backend.identity().tag, 0)).unwrap();
    assert_eq!(fake.calls("stream_query").iter().map(|call| call.mode).collect::<Vec<_>>(), [2]);
    fake.hold_up("event_query");
    std::thread::scope(|scope| {
        let asks = scope.spawn(|| backend.query_event(event));
        fake.wait_for("event_query");
        // A capture that forbids nothing to other threads does not wait.
        backend.begin_capture(first, CaptureMode::ThreadLocal).unwrap();
        let begins = scope.spawn(|| backend.begin_capture(second, CaptureMode::Global));
        while !backend.state().may_capture() {
            std::thread::yield_now();
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert_eq!(fake.calls("stream_begin_capture").len(), 1);
        fake.go_on("event_query");
        asks.join().unwrap().unwrap();
        begins.join().unwrap().unwrap();
    });
    // A later query sees the capture.
    backend.query_event(event).unwrap();
    assert_eq!(fake.calls("event_query").iter().map(|call| call.mode).collect::<Vec<_>>(), [0, 2]);
}

#[test]
fn beside_a_plugin_every_question_is_asked_in_relaxed_mode() {
    let fake = Fake::new();
    let id = stream(&fake);
    let ask = || fake.backend.query_stream(id).unwrap();
    ask();
    highwater_hal::copies::note();
    ask();
    highwater_hal::copies::forget();
    assert_eq!(fake.calls("stream_query").iter().map(|call| call.mode).collect::<Vec<_>>(), [0, 2]);
}

#[test]
fn a_backend_that_ends_with_a_capture_open_leaves_no_count_to_others_over_its_library() {
    let fake = Fake::new();
    let captures = std::sync::Arc::clone(&fake.backend.state().captures);
    fake.backend.begin_capture(stream(&fake), CaptureMode::ThreadLocal).unwrap();
    assert!(captures.are_open_on(0));
    drop(fake);
    assert!(!captures.are_open_on(0) && !captures.is_any_open());
}

#[test]
fn a_product_runs_in_the_context_of_its_device_and_a_destroyed_stream_is_not_used() {
    let fake = Fake::new();
    let backend = &fake.backend;
    let id = backend.create_stream(1, &StreamOptions::new()).unwrap();
    let mut handle = backend.create_blas_handle(1, &BlasOptions::new(BlasKind::Blas)).unwrap();
    handle.set_stream(id).unwrap();
    let ptr = DevicePtr::new(0x1000);
    // SAFETY: Nothing dereferences the address.
    unsafe { handle.set_workspace(Some(Workspace { ptr, bytes: 64 })) }.unwrap();
    let gemm = Gemm::new(GemmShape::new(DataType::F32, 2, 2, 2), ptr, ptr, ptr);
    // SAFETY: As above.
    unsafe { handle.gemm(&gemm) }.unwrap();
    assert_eq!(fake.calls("gemm_ex").iter().map(|call| call.context).collect::<Vec<_>>(), [context(1)]);
    backend.destroy_stream(id).unwrap();
    // SAFETY: As above.
    assert_eq!(unsafe { handle.gemm(&gemm) }.unwrap_err().kind(), ErrorKind::InvalidHandle);
    // SAFETY: As above.
    assert_eq!(unsafe { handle.set_workspace(None) }.unwrap_err().kind(), ErrorKind::InvalidHandle);
    let other = backend.create_stream(1, &StreamOptions::new()).unwrap();
    handle.set_stream(other).unwrap();
    // SAFETY: As above.
    unsafe { handle.gemm(&gemm) }.unwrap();
    handle.destroy().unwrap();
    assert_eq!(handle.set_stream(other).unwrap_err().kind(), ErrorKind::InvalidHandle);
    backend.destroy_stream(other).unwrap();
    assert_eq!((backend.live_objects().total(), fake.alive()), (0, 0));
}

#[test]
fn a_product_goes_to_the_call_that_can_count_it() {
    let fake = Fake::new();
    let id = stream(&fake);
    let mut handle = fake.backend.create_blas_handle(0, &BlasOptions::new(BlasKind::Blas)).unwrap();
    handle.set_stream(id).unwrap();
    let ptr = DevicePtr::new(0x1000);
    let large = i32::MAX as usize + 1;
    let shape = GemmShape::new(DataType::F32, 2, 2, 2);
    let batched = |count| shape.with_batch(StridedBatch { count, stride_a: 4, stride_b: 4, stride_c: 4 });
    let mut wide = shape;
    wide.lda = large;
    let cases = [
        (shape, "gemm_ex"),
        (batched(3), "gemm_strided_batched_ex"),
        (wide, "gemm_ex_64"),
        (batched(large), "gemm_strided_batched_ex_64"),
    ];
    for (shape, name) in cases {
        // SAFETY: Nothing dereferences the addresses.
        unsafe { handle.gemm(&Gemm::new(shape, ptr, ptr, ptr)) }.unwrap();
        assert_eq!(fake.calls(name).len(), 1, "{name}");
    }
    let names = ["gemm_ex", "gemm_strided_batched_ex", "gemm_ex_64", "gemm_strided_batched_ex_64"];
    assert_eq!(names.map(|name| fake.calls(name).len()), [1; 4]);
    // A size that no call can express.
    let mut endless = shape;
    endless.ldb = usize::MAX;
    // SAFETY: As above.
    let error = unsafe { handle.gemm(&Gemm::new(endless, ptr, ptr, ptr)) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert_eq!(names.map(|name| fake.calls(name).len()), [1; 4]);
}

#[test]
fn a_stride_that_is_never_applied_fits_every_call() {
    let fake = Fake::new();
    let id = stream(&fake);
    let mut handle = fake.backend.create_blas_handle(0, &BlasOptions::new(BlasKind::Blas)).unwrap();
    handle.set_stream(id).unwrap();
    let ptr = DevicePtr::new(0x1000);
    let column = GemmShape::new(DataType::F32, 2, 1, 1);
    for unused in [i32::MAX as usize + 1, 1 << 62, usize::MAX] {
        let batch = StridedBatch { count: 1, stride_a: unused, stride_b: unused, stride_c: unused };
        let column = column.with_leading_dimensions(unused, unused, unused);
        for shape in [column, column.with_batch(batch), GemmShape::new(DataType::F32, 2, 2, 2).with_batch(batch)] {
            // SAFETY: Nothing dereferences the addresses.
            unsafe { handle.gemm(&Gemm::new(shape, ptr, ptr, ptr)) }.unwrap();
        }
    }
    let names = ["gemm_ex", "gemm_strided_batched_ex", "gemm_ex_64", "gemm_strided_batched_ex_64"];
    assert_eq!(names.map(|name| fake.calls(name).len()), [3, 6, 0, 0]);
}

#[test]
fn the_pool_is_set_up_once_and_under_no_lock() {
    let fake = Fake::new();
    let backend = &fake.backend;
    let id = stream(&fake);
    let kind = DeviceMemoryKind::StreamOrdered(id);
    fake.hold_up("device_get_default_mem_pool");
    // A thread that sets up the pool blocks no other thread.
    std::thread::scope(|scope| {
        let allocate = || backend.allocate(0, &AllocateOptions::new(64).with_kind(kind)).unwrap();
        let first = scope.spawn(allocate);
        fake.wait_for("device_get_default_mem_pool");
        let second = scope.spawn(allocate);
        while fake.calls("device_get_default_mem_pool").len() < 2 {
            std::thread::yield_now();
        }
        fake.go_on("device_get_default_mem_pool");
        for thread in [first, second] {
            // SAFETY: Nothing uses it.
            unsafe { backend.free(0, thread.join().unwrap(), Some(id)) }.unwrap();
        }
    });
    assert_eq!(backend.live_objects().allocations, 0);
}

#[test]
fn flags_that_are_set_twice_are_told_apart() {
    let fake = Fake::new();
    let id = stream(&fake);
    let held = fake.backend.state().stream("t", id).unwrap();
    assert_eq!([true, true, false, false].map(|on| held.set_flag(CAPTURES, on)), [false, true, true, false]);
}

// ------------------------------------------------------------------------------------------------ a sandbox

/// The variable that marks the child process of the test below.
const SANDBOXED: &str = "HIGHWATER_TEST_SANDBOXED";

/// Makes the kernel refuse `membarrier` to this thread from now on, as a sandbox that begins after opening does.
fn deny_membarrier() {
    let refuse = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let code = |class: u32, mode: u32, source: u32| (class | mode | source) as u16;
    let load = code(libc::BPF_LD, libc::BPF_W, libc::BPF_ABS);
    let compare = code(libc::BPF_JMP, libc::BPF_JEQ, libc::BPF_K);
    let give = code(libc::BPF_RET, libc::BPF_K, 0);
    let mut filter = [
        // The description of a system call begins with its number.
        libc::sock_filter { code: load, jt: 0, jf: 0, k: 0 },
        libc::sock_filter { code: compare, jt: 0, jf: 1, k: libc::SYS_membarrier as u32 },
        libc::sock_filter { code: give, jt: 0, jf: 0, k: refuse },
        libc::sock_filter { code: give, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW },
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: The program lives until the calls return, and refuses a call that nothing relies on.
    let installed = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
    };
    assert!(installed, "{}", std::io::Error::last_os_error());
}

#[test]
fn what_is_destroyed_after_membarrier_is_denied_is_destroyed() {
    if std::env::var_os(SANDBOXED).is_none() {
        let name = "tests::what_is_destroyed_after_membarrier_is_denied_is_destroyed";
        let test = std::process::Command::new(std::env::current_exe().unwrap())
            .args([name, "--exact", "--test-threads=1"])
            .env(SANDBOXED, "1")
            .output()
            .unwrap();
        let output = String::from_utf8_lossy(&test.stdout);
        assert!(test.status.success() && output.contains("1 passed"), "{output}");
        return;
    }
    let fake = Fake::new();
    let backend = &fake.backend;
    let streams: Vec<_> = (0..400).map(|_| stream(&fake)).collect();
    let (used, idle) = streams.split_last().unwrap();
    // One thread is in a call that uses a stream, while the other streams are destroyed.
    let (destroyed, live) = std::thread::scope(|scope| {
        fake.hold_up("stream_query");
        scope.spawn(|| backend.query_stream(*used));
        fake.wait_for("stream_query");
        deny_membarrier();
        idle.iter().chain([used]).for_each(|stream| backend.destroy_stream(*stream).unwrap());
        let found = (fake.calls("stream_destroy").len(), backend.live_objects().streams);
        fake.go_on("stream_query");
        found
    });
    assert_eq!((destroyed, live), (idle.len(), 1), "all but the one in use, which counts");
    assert_eq!(backend.live_objects().streams, 0);
    assert_eq!(fake.calls("stream_destroy").len(), streams.len());
}

/// Mapped memory of the fake: addresses and the memory that is mapped there.
fn map(fake: &Fake) -> (DevicePtr, highwater_hal::PhysicalMemoryId) {
    let backend = &fake.backend;
    let ptr = backend.reserve_addresses(0, GRANULARITY).unwrap();
    let memory = backend.create_memory(0, &PhysicalMemoryOptions::new(GRANULARITY)).unwrap();
    // SAFETY: The range belongs to the test.
    unsafe { backend.map_memory(0, ptr, memory) }.unwrap();
    (ptr, memory)
}

#[test]
fn calls_of_mapped_memory_are_made_in_the_relaxed_mode_with_the_device_current() {
    let fake = Fake::new();
    let backend = &fake.backend;
    let (ptr, memory) = map(&fake);
    // SAFETY: The range belongs to the test.
    unsafe { backend.set_memory_access(0, ptr, GRANULARITY, 1) }.unwrap();
    backend.destroy_memory(memory).unwrap();
    assert!(fake.calls("release_memory").is_empty(), "mapped memory was released");
    // SAFETY: As above.
    unsafe {
        backend.unmap_memory(0, ptr, GRANULARITY).unwrap();
        backend.free_addresses(0, ptr, GRANULARITY).unwrap();
    }
    for name in [
        "reserve_addresses",
        "create_memory",
        "map_memory",
        "set_memory_access",
        "unmap_memory",
        "release_memory",
        "free_addresses",
    ] {
        let calls = fake.calls(name);
        assert_eq!(calls.len(), 1, "{name}");
        assert_eq!((calls[0].context, calls[0].mode), (context(0), 2), "{name}");
    }
    assert_eq!((backend.live_objects().total(), fake.alive()), (0, 0));
}

#[test]
fn a_call_of_mapped_memory_that_fails_changes_nothing_and_can_be_repeated() {
    let fake = Fake::new();
    let backend = &fake.backend;
    for (name, failing) in [("reserve_addresses", INVALID), ("create_memory", 2)] {
        fake.answer(name, failing);
    }
    assert!(backend.reserve_addresses(0, GRANULARITY).is_err());
    let created = backend.create_memory(0, &PhysicalMemoryOptions::new(GRANULARITY));
    assert_eq!(created.unwrap_err().kind(), ErrorKind::OutOfMemory);
    assert_eq!(backend.live_objects().total(), 0);
    let ptr = backend.reserve_addresses(0, GRANULARITY).unwrap();
    let memory = backend.create_memory(0, &PhysicalMemoryOptions::new(GRANULARITY)).unwrap();
    let twice = |name: &'static str, call: &dyn Fn() -> Result<()>| {
        let before = backend.live_objects();
        for failing in [name, "make_current"] {
            fake.answer(failing, INVALID);
            assert!(call().is_err(), "{name}");
            assert_eq!(backend.live_objects(), before, "{name}");
        }
        call().unwrap();
    };
    // SAFETY: The range belongs to the test, and nothing uses it.
    unsafe {
        twice("map_memory", &|| backend.map_memory(0, ptr, memory));
        twice("set_memory_access", &|| backend.set_memory_access(0, ptr, GRANULARITY, 0));
        twice("unmap_memory", &|| backend.unmap_memory(0, ptr, GRANULARITY));
        twice("release_memory", &|| backend.destroy_memory(memory));
        twice("free_addresses", &|| backend.free_addresses(0, ptr, GRANULARITY));
    }
    assert_eq!(backend.destroy_memory(memory).unwrap_err().kind(), ErrorKind::InvalidHandle);
    assert_eq!((backend.live_objects().total(), fake.alive()), (0, 0));
}

#[test]
fn memory_that_a_call_destroys_is_refused_to_others() {
    let fake = Fake::new();
    let backend = &fake.backend;
    let ptr = backend.reserve_addresses(0, GRANULARITY).unwrap();
    let memory = backend.create_memory(0, &PhysicalMemoryOptions::new(GRANULARITY)).unwrap();
    fake.hold_up("release_memory");
    std::thread::scope(|scope| {
        let user = scope.spawn(|| backend.destroy_memory(memory));
        fake.wait_for("release_memory");
        // SAFETY: The range belongs to the test.
        let mapped = unsafe { backend.map_memory(0, ptr, memory) };
        for refused in [mapped, backend.destroy_memory(memory)] {
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::InvalidHandle);
        }
        fake.go_on("release_memory");
        user.join().unwrap().unwrap();
    });
    // SAFETY: As above.
    unsafe { backend.free_addresses(0, ptr, GRANULARITY) }.unwrap();
    assert_eq!((backend.live_objects().total(), fake.alive()), (0, 0));
}

/// CUDA records a copy with the thread's context. Without one, a graph of copies between the host and a second device cannot be
/// instantiated (seen on two H100s, driver 580.159.04).
#[test]
fn recorded_copies_are_made_with_the_device_current() {
    let fake = Fake::new();
    let backend = &fake.backend;
    let stream = backend.create_stream(1, &StreamOptions::new()).unwrap();
    let mut host = [0_u8; 8];
    let host = Location::Host(HostPtr::new(NonNull::from(&mut host).cast()));
    let device = Location::Device { device: 1, ptr: DevicePtr::new(0x1000) };
    let copy = |dst, src| {
        // SAFETY: The fake vendor copies nothing.
        unsafe { backend.copy(&MemoryCopy::new(dst, src, 8), stream) }.unwrap();
    };
    copy(device, host);
    backend.begin_capture(stream, CaptureMode::ThreadLocal).unwrap();
    copy(device, host);
    copy(host, device);
    // SAFETY: The test began the capture.
    let graph = unsafe { backend.end_capture(stream) }.unwrap();
    let of = |name| fake.calls(name).iter().map(|call| call.context).collect::<Vec<_>>();
    assert_eq!(of("memcpy_htod_async"), [0, context(1)], "a copy outside a capture needs no context");
    assert_eq!(of("memcpy_dtoh_async"), [context(1)]);
    backend.destroy_graph(graph).unwrap();
    backend.destroy_stream(stream).unwrap();
}

/// A vendor's graph and its executables are used by one call at a time.
#[test]
fn executables_of_one_graph_are_made_and_destroyed_one_after_another() {
    const NAME: &str = "graph_instantiate_with_flags";
    let fake = Fake::new();
    let backend = &fake.backend;
    let stream = backend.create_stream(0, &StreamOptions::new()).unwrap();
    let record = || {
        backend.begin_capture(stream, CaptureMode::ThreadLocal).unwrap();
        // SAFETY: Nothing was recorded.
        unsafe { backend.end_capture(stream) }.unwrap()
    };
    let (graph, other) = (record(), record());
    let [first, of_other] = [graph, other].map(|graph| backend.instantiate_graph(graph).unwrap());
    fake.hold_up(NAME);
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            [graph, graph, graph, other].map(|graph| scope.spawn(move || backend.instantiate_graph(graph))).into();
        // One call for each graph at a time, however long the calls take.
        while fake.calls(NAME).len() < 4 {
            std::thread::yield_now();
        }
        let destroyer = scope.spawn(move || backend.destroy_graph_exec(first));
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert_eq!((fake.calls(NAME).len(), fake.calls("graph_exec_destroy").len()), (4, 0));
        fake.go_on(NAME);
        destroyer.join().unwrap().unwrap();
        for thread in threads {
            backend.destroy_graph_exec(thread.join().unwrap().unwrap()).unwrap();
        }
    });
    assert_eq!(fake.calls(NAME).len(), 6);
    backend.destroy_graph_exec(of_other).unwrap();
    for graph in [graph, other] {
        backend.destroy_graph(graph).unwrap();
    }
    backend.destroy_stream(stream).unwrap();
    fake.is_empty();
}

/// A copy of rows that the vendor makes in one call has the device current. Other copies are made row by row.
#[test]
fn rows_are_copied_at_once_if_one_call_can() {
    let fake = Fake::new();
    let backend = &fake.backend;
    let stream = backend.create_stream(0, &StreamOptions::new()).unwrap();
    let mut host = [0_u8; 8];
    let host = Location::Host(HostPtr::new(NonNull::from(&mut host).cast()));
    let on = |device, address| Location::Device { device, ptr: DevicePtr::new(address) };
    let copy = |dst, src, shape| {
        // SAFETY: The fake vendor copies nothing.
        unsafe { backend.copy_2d(&MemoryCopy2d::new(dst, src, shape), stream) }
    };
    let shape = CopyShape::new(16, 3).with_src_pitch(32);
    let (here, there) = (on(0, 0x1000), on(0, 0x2000));
    for (dst, src) in [(here, host), (host, here), (there, here)] {
        copy(dst, src, shape).unwrap();
    }
    let at_once: Vec<_> = fake.calls("memcpy_2d_async").iter().map(|call| call.context).collect();
    assert_eq!(at_once, [context(0); 3]);
    let flat = || {
        ["memcpy_htod_async", "memcpy_dtoh_async", "memcpy_dtod_async", "memcpy_peer_async"]
            .map(|name| fake.calls(name).len())
    };
    assert_eq!(flat(), [0; 4]);
    // Between devices, in both directions.
    copy(on(1, 0x1000), here, shape).unwrap();
    copy(here, on(1, 0x1000), shape).unwrap();
    assert_eq!((flat(), fake.calls("memcpy_2d_async").len()), ([0; 4], 5));
    assert_eq!(fake.calls("enable_peer_access").len(), 2);
    // With a pitch that is too large for the vendor.
    copy(there, host, shape.with_dst_pitch(MAX_PITCH + 1)).unwrap();
    copy(there, host, shape.with_dst_pitch(MAX_PITCH)).unwrap();
    assert_eq!((flat(), fake.calls("memcpy_2d_async").len()), ([3, 0, 0, 0], 6));
    // In several mappings.
    let ptr = backend.reserve_addresses(0, 2 * GRANULARITY).unwrap();
    let memory = backend.create_memory(0, &PhysicalMemoryOptions::new(GRANULARITY)).unwrap();
    // SAFETY: The test owns the range.
    unsafe { backend.map_memory(0, ptr, memory) }.unwrap();
    let near_the_end = on(0, ptr.get() + GRANULARITY as u64 - 40);
    copy(near_the_end, here, CopyShape::new(16, 2)).unwrap();
    assert_eq!((flat(), fake.calls("memcpy_2d_async").len()), ([3, 0, 0, 0], 7));
    copy(near_the_end, here, shape).unwrap();
    assert_eq!((flat(), fake.calls("memcpy_2d_async").len()), ([3, 0, 0, 0], 8));
    // No call is known to take both.
    copy(on(1, 0x1000), near_the_end, shape.with_src_pitch(32)).unwrap();
    assert_eq!((flat(), fake.calls("memcpy_2d_async").len()), ([3, 0, 0, 3], 8));
    // Nothing to copy, and what is refused, calls nothing.
    copy(here, there, CopyShape::new(0, 5)).unwrap();
    for (dst, src, shape) in [(here, there, shape.with_src_pitch(15)), (here, here, shape), (host, host, shape)] {
        assert_eq!(copy(dst, src, shape).unwrap_err().kind(), ErrorKind::InvalidArgument, "{shape:?}");
    }
    assert_eq!(copy(on(1, 0x1000), host, shape).unwrap_err().kind(), ErrorKind::WrongDevice);
    assert_eq!((flat(), fake.calls("memcpy_2d_async").len()), ([3, 0, 0, 3], 8));
    // SAFETY: The test owns the range, and no work uses it.
    unsafe { backend.unmap_memory(0, ptr, GRANULARITY) }.unwrap();
    backend.destroy_memory(memory).unwrap();
    // SAFETY: As above.
    unsafe { backend.free_addresses(0, ptr, 2 * GRANULARITY) }.unwrap();
    backend.destroy_stream(stream).unwrap();
    assert_eq!((backend.live_objects().total(), fake.alive()), (0, 0));
}

/// A vendor without a call for rows between devices gets a copy of each row.
#[test]
fn rows_between_devices_are_copied_one_by_one_without_a_call_for_them() {
    let fake = Fake::mortal();
    let stream = fake.backend.create_stream(0, &StreamOptions::new()).unwrap();
    let on = |device, address| Location::Device { device, ptr: DevicePtr::new(address) };
    for (dst, src) in [(on(1, 0x1000), on(0, 0x2000)), (on(0, 0x2000), on(1, 0x1000))] {
        // SAFETY: The fake vendor copies nothing.
        unsafe { fake.backend.copy_2d(&MemoryCopy2d::new(dst, src, CopyShape::new(16, 3)), stream) }.unwrap();
    }
    assert_eq!((fake.calls("memcpy_peer_async").len(), fake.calls("memcpy_2d_async").len()), (6, 0));
    // Over two mappings of one device, too.
    let backend = &fake.backend;
    let ptr = backend.reserve_addresses(0, 2 * GRANULARITY).unwrap();
    let memory = backend.create_memory(0, &PhysicalMemoryOptions::new(GRANULARITY)).unwrap();
    // SAFETY: The test owns the range.
    unsafe { backend.map_memory(0, ptr, memory) }.unwrap();
    let near_the_end = on(0, ptr.get() + GRANULARITY as u64 - 40);
    // SAFETY: The fake vendor copies nothing.
    unsafe { backend.copy_2d(&MemoryCopy2d::new(near_the_end, on(0, 0x2000), CopyShape::new(16, 3)), stream) }.unwrap();
    assert_eq!((fake.calls("memcpy_dtod_async").len(), fake.calls("memcpy_2d_async").len()), (3, 0));
    // SAFETY: The test owns the range, and no work uses it.
    unsafe { backend.unmap_memory(0, ptr, GRANULARITY) }.unwrap();
    backend.destroy_memory(memory).unwrap();
    // SAFETY: As above.
    unsafe { backend.free_addresses(0, ptr, 2 * GRANULARITY) }.unwrap();
    fake.backend.destroy_stream(stream).unwrap();
    fake.is_empty();
}
