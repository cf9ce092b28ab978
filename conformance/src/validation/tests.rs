//! The layer's findings about a backend that accepts everything.

use std::collections::VecDeque;
use std::mem::forget;
use std::sync::Mutex;

use highwater_hal::{
    AllocateOptions, BackendTag, BlasKind, BlasOptions, Completion, DeviceMemoryKind, DevicePtr, Error, EventId,
    EventOptions, Gemm, GemmShape, IdParts, IdTable, Identity, IpcSharing, LiveObjects, Location, MemoryCopy,
    MemoryHandle, MockBackend, MockBlasHandle, MockIpcSharing, ObjectId, PlanId, StreamId, StreamOptions, Transport,
};

use super::*;
use crate::device::{Block, Stream};
use crate::sweep::{Fault, is_injected};

/// A backend with two devices whose every call succeeds. Blocks lie at these addresses; the last one is used repeatedly.
fn credulous(addresses: &[u64]) -> MockBackend {
    let tag = BackendTag::next();
    let mut backend = MockBackend::new();
    backend.expect_identity().return_const(Identity::new("credulous", "accepts everything", tag));
    backend.expect_device_count().return_const(2_u32);
    let streams = IdTable::<StreamId, ()>::new(tag);
    backend.expect_create_stream().returning(move |device, _| streams.insert("create_stream", device, Arc::new(())));
    let events = IdTable::<EventId, ()>::new(tag);
    backend.expect_create_event().returning(move |device, _| events.insert("create_event", device, Arc::new(())));
    backend.expect_destroy_stream().returning(|_| Ok(()));
    backend.expect_destroy_event().returning(|_| Ok(()));
    backend.expect_query_stream().returning(|_| Ok(Completion::Complete));
    backend.expect_synchronize_stream().returning(|_| Ok(()));
    backend.expect_synchronize_device().returning(|_| Ok(()));
    backend.expect_record_event().returning(|_, _| Ok(()));
    let addresses = Mutex::new(VecDeque::from(addresses.to_vec()));
    backend.expect_allocate().returning(move |_, _| {
        let mut addresses = addresses.lock().unwrap();
        let next = if addresses.len() > 1 { addresses.pop_front() } else { addresses.front().copied() };
        Ok(DevicePtr::new(next.unwrap()))
    });
    backend.expect_free().returning(|_, _, _| Ok(()));
    backend.expect_copy().returning(|_, _| Ok(()));
    backend.expect_live_objects().returning(LiveObjects::default);
    backend
}

/// Runs a case on a backend, and returns the only finding.
#[track_caller]
fn finding(backend: &MockBackend, case: impl FnOnce(&Validated<'_>)) -> String {
    let found = findings(backend, case);
    assert_eq!(found.len(), 1, "{found:?}");
    found.into_iter().next().unwrap()
}

fn findings(backend: &MockBackend, case: impl FnOnce(&Validated<'_>)) -> Vec<String> {
    let validated = Validated::new(backend, None);
    case(&validated);
    validated.findings()
}

#[track_caller]
fn assert_says(finding: &str, parts: &[&str]) {
    for part in parts {
        assert!(finding.contains(part), "`{part}` is missing in: {finding}");
    }
}

fn at(device: u32, address: u64) -> Location {
    Location::Device { device, ptr: DevicePtr::new(address) }
}

fn copy(backend: &Validated<'_>, dst: Location, src: Location, stream: StreamId) {
    // SAFETY: the backend is scripted, and copies nothing.
    unsafe { backend.copy(&MemoryCopy::new(dst, src, 64), stream).unwrap() };
}

fn free(backend: &Validated<'_>, device: u32, address: u64, stream: Option<StreamId>) {
    // SAFETY: the backend is scripted, and frees nothing.
    unsafe { backend.free(device, DevicePtr::new(address), stream).unwrap() };
}

fn block(backend: &Validated<'_>, device: u32, kind: DeviceMemoryKind) -> u64 {
    backend.allocate(device, &AllocateOptions::new(256).with_kind(kind)).unwrap().get()
}

#[test]
fn what_is_right_is_not_mentioned() {
    let found = findings(&credulous(&[0x1000, 0x2000]), |backend| {
        let stream = backend.create_stream(0, &StreamOptions::new()).unwrap();
        let (x, y) = (block(backend, 0, DeviceMemoryKind::Plain), block(backend, 0, DeviceMemoryKind::Plain));
        copy(backend, at(0, x), at(0, y + 192), stream);
        free(backend, 0, x, None);
        free(backend, 0, y, None);
        // The address is used again.
        let y = block(backend, 0, DeviceMemoryKind::StreamOrdered(stream));
        free(backend, 0, y, Some(stream));
        backend.query_stream(StreamId::legacy_default(backend.identity().tag, 1)).unwrap();
        backend.destroy_stream(stream).unwrap();
    });
    assert_eq!(found, Vec::<String>::new());
}

#[test]
fn ids_that_are_gone_or_never_were() {
    let said = finding(&credulous(&[0]), |backend| {
        let stream = backend.create_stream(0, &StreamOptions::new()).unwrap();
        backend.destroy_stream(stream).unwrap();
        backend.query_stream(stream).unwrap();
    });
    assert_says(&said, &["use after destroy", "`query_stream` accepted StreamId", "which was destroyed"]);
    let said = finding(&credulous(&[0]), |backend| {
        let event = backend.create_event(0, &EventOptions::new()).unwrap();
        backend.destroy_event(event).unwrap();
        backend.destroy_event(event).unwrap();
    });
    assert_says(&said, &["double free", "`destroy_event` accepted EventId", "(object 1 of the case)"]);
    let said = finding(&credulous(&[0]), |backend| {
        let stream = backend.create_stream(0, &StreamOptions::new()).unwrap();
        // SAFETY: the backend is scripted, and no runtime uses it.
        let forged = unsafe { StreamId::from_parts(IdParts { slot: 77, ..stream.parts() }) };
        backend.synchronize_stream(forged).unwrap();
        backend.destroy_stream(stream).unwrap();
    });
    assert_says(&said, &["`synchronize_stream` accepted StreamId(77.1", "which was never issued"]);
}

#[test]
fn bad_ids_that_are_refused_and_living_ones_that_are() {
    let mut backend = credulous(&[0]);
    backend
        .expect_query_event()
        .returning(|_| Err(highwater_hal::Error::new(ErrorKind::InvalidHandle, "query_event", "no")));
    let found = findings(&backend, |backend| {
        let event = backend.create_event(0, &EventOptions::new()).unwrap();
        backend.destroy_event(event).unwrap();
        assert!(backend.query_event(event).is_err());
    });
    assert_eq!(found, Vec::<String>::new());
    let said = finding(&backend, |backend| {
        let event = backend.create_event(0, &EventOptions::new()).unwrap();
        assert!(backend.query_event(event).is_err());
        backend.destroy_event(event).unwrap();
    });
    assert_says(&said, &["`query_event` refused ids that are alive"]);
}

#[test]
fn errors_without_a_message_and_of_another_call() {
    let refusing = |named: &'static str, message: &'static str| {
        let mut backend = credulous(&[0]);
        backend.expect_synchronize_event().returning(move |_| Err(Error::new(ErrorKind::Vendor, named, message)));
        finding(&backend, |backend| {
            let event = backend.create_event(0, &EventOptions::new()).unwrap();
            backend.synchronize_event(event).unwrap_err();
            backend.destroy_event(event).unwrap();
        })
    };
    assert_says(&refusing("synchronize_event", ""), &["`synchronize_event` returned an error without a message"]);
    assert_says(&refusing("query_event", "no"), &["`synchronize_event` returned an error of `query_event`"]);
}

#[test]
fn another_object_in_each_call() {
    let mut backend = credulous(&[0]);
    backend.expect_ipc_sharing().returning(|| Some(scripted_sharing()));
    let said = finding(&backend, |backend| {
        backend.ipc_sharing().unwrap();
        backend.ipc_sharing().unwrap();
    });
    assert_says(&said, &["`ipc_sharing` returned another object than before"]);
}

#[test]
fn an_id_that_another_thread_is_destroying_may_be_refused_or_accepted() {
    let tag = BackendTag::next();
    let mut backend = MockBackend::new();
    backend.expect_identity().return_const(Identity::new("racing", "makes an id stale early", tag));
    backend.expect_device_count().return_const(1_u32);
    backend.expect_live_objects().returning(LiveObjects::default);
    let streams = IdTable::<StreamId, ()>::new(tag);
    backend.expect_create_stream().returning(move |device, _| streams.insert("create_stream", device, Arc::new(())));
    let (begun, asked) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
    let (begun, asked) = (Arc::new(begun), Arc::new(asked));
    let (here, there) = (Arc::clone(&begun), Arc::clone(&asked));
    backend.expect_destroy_stream().returning(move |_| {
        here.wait();
        there.wait();
        Ok(())
    });
    let refused = || Err(Error::new(ErrorKind::InvalidHandle, "query_stream", "the id is stale"));
    backend.expect_query_stream().returning(move |_| refused());
    backend.expect_synchronize_stream().returning(|_| Ok(()));
    let found = findings(&backend, |backend| {
        let stream = backend.create_stream(0, &StreamOptions::new()).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| backend.destroy_stream(stream).unwrap());
            begun.wait();
            backend.query_stream(stream).unwrap_err();
            backend.synchronize_stream(stream).unwrap();
            asked.wait();
        });
    });
    assert!(found.is_empty(), "{found:?}");
    // Without a call that destroys it, the id must be accepted.
    let finding = finding(&backend, |backend| {
        let stream = backend.create_stream(0, &StreamOptions::new()).unwrap();
        backend.query_stream(stream).unwrap_err();
        let at_end = std::thread::scope(|scope| {
            let ends = scope.spawn(|| backend.destroy_stream(stream));
            begun.wait();
            asked.wait();
            ends.join().unwrap()
        });
        at_end.unwrap();
    });
    assert_says(&finding, &["refused ids that are alive"]);
}

#[test]
fn objects_of_another_device() {
    let said = finding(&credulous(&[0]), |backend| {
        let stream = backend.create_stream(1, &StreamOptions::new()).unwrap();
        let event = backend.create_event(0, &EventOptions::new()).unwrap();
        backend.record_event(event, stream).unwrap();
        backend.destroy_event(event).unwrap();
        backend.destroy_stream(stream).unwrap();
    });
    assert_says(&said, &["wrong device", "`record_event` recorded"]);
    let said = finding(&credulous(&[0]), |backend| backend.synchronize_device(2).unwrap());
    assert_says(&said, &["wrong device: `synchronize_device` accepted device 2, and there are 2"]);
    let said = finding(&credulous(&[0x1000]), |backend| {
        let x = block(backend, 0, DeviceMemoryKind::Plain);
        free(backend, 1, x, None);
        free(backend, 0, x, None);
    });
    assert_says(&said, &["wrong device: `free` accepted a block of device memory"]);
}

#[test]
fn memory_that_is_given_back_wrongly() {
    let said = finding(&credulous(&[0x1000]), |backend| {
        let x = block(backend, 0, DeviceMemoryKind::Plain);
        free(backend, 0, x, None);
        free(backend, 0, x, None);
    });
    assert_says(&said, &["double free: `free` accepted a block of device memory that is gone", "`allocate`"]);
    let said = finding(&credulous(&[0x1000]), |backend| {
        let stream = backend.create_stream(0, &StreamOptions::new()).unwrap();
        let x = block(backend, 0, DeviceMemoryKind::Plain);
        free(backend, 0, x, Some(stream));
        backend.destroy_stream(stream).unwrap();
    });
    assert_says(&said, &["wrong stream", "belongs to none"]);
    let said = finding(&credulous(&[0x1000]), |backend| {
        let stream = backend.create_stream(0, &StreamOptions::new()).unwrap();
        let x = block(backend, 0, DeviceMemoryKind::StreamOrdered(stream));
        free(backend, 0, x, None);
        backend.destroy_stream(stream).unwrap();
    });
    assert_says(&said, &["wrong stream", "was freed on none"]);
    let said = finding(&credulous(&[0x1000]), |backend| free(backend, 0, 0x77, None));
    assert_says(&said, &["`free` accepted the address 0x77"]);
}

#[test]
fn memory_that_is_used_after_its_end_or_beyond_it() {
    let used = |dst: Location, src: Location| {
        finding(&credulous(&[0x1000, 0x2000, 0x3000]), |backend| {
            let stream = backend.create_stream(0, &StreamOptions::new()).unwrap();
            let (x, gone) = (block(backend, 0, DeviceMemoryKind::Plain), block(backend, 0, DeviceMemoryKind::Plain));
            free(backend, 0, gone, None);
            copy(backend, dst, src, stream);
            free(backend, 0, x, None);
            backend.destroy_stream(stream).unwrap();
        })
    };
    assert_says(&used(at(0, 0x1000), at(0, 0x2000)), &["`copy` was accepted: use after free: the source from 0x2000"]);
    assert_says(&used(at(0, 0x10c1), at(0, 0x1000)), &["the destination from 0x10c1 to 0x1101", "living range"]);
    assert_says(&used(at(1, 0x1000), at(0, 0x1080)), &["wrong device: the destination", "lies on device 0"]);
}

#[test]
fn blocks_that_overlap() {
    let said = finding(&credulous(&[0x1000, 0x10ff]), |backend| {
        let (x, y) = (block(backend, 0, DeviceMemoryKind::Plain), block(backend, 0, DeviceMemoryKind::Plain));
        free(backend, 0, x, None);
        free(backend, 0, y, None);
    });
    assert_says(&said, &["from 0x10ff to 0x11ff overlaps a block of device memory at 0x1000"]);
}

#[test]
fn what_is_left_over_is_named_with_its_place() {
    let line = line!() + 2;
    let said = finding_of_leak(&credulous(&[0x1000]), |backend| {
        forget(Stream::new(backend).unwrap());
    });
    assert_says(&said, &["leak: stream made by `create_stream` at", &format!("tests.rs:{line}"), "not given back"]);
    let line = line!() + 2;
    let said = finding_of_leak(&credulous(&[0x1000]), |backend| {
        forget(Block::new(backend, 100).unwrap());
    });
    assert_says(&said, &["leak: block of device memory", &format!("tests.rs:{line}"), "100 bytes"]);
}

/// Returns the leak. The backend counts nothing, which is another finding.
fn finding_of_leak(backend: &MockBackend, case: impl FnOnce(&Validated<'_>)) -> String {
    let found = findings(backend, case);
    assert_eq!(found.len(), 2, "{found:?}");
    assert_says(&found[1], &["live objects differ"]);
    found.into_iter().next().unwrap()
}

#[test]
fn counts_that_do_not_agree() {
    let mut asked = 0;
    let tag = BackendTag::next();
    let mut backend = MockBackend::new();
    backend.expect_identity().return_const(Identity::new("forgetful", "counts wrongly", tag));
    backend.expect_device_count().return_const(1_u32);
    backend.expect_live_objects().returning(move || {
        asked += 1;
        let mut live = LiveObjects::default();
        live.events = asked;
        live.descriptors = asked;
        live
    });
    let found = findings(&backend, |_| {});
    assert_eq!(found.len(), 2, "{found:?}");
    assert_says(&found[0], &["`live_objects().events` was 1 and is 2, with 0"]);
    assert_says(&found[1], &["`live_objects().descriptors` was 1 and is 2"]);
}

fn scripted_sharing() -> Arc<dyn IpcSharing> {
    let mut sharing = MockIpcSharing::new();
    sharing.expect_export_memory().returning(|_, _, _| Ok(handle()));
    sharing.expect_open_memory().returning(|_, _| Ok(DevicePtr::new(0x9000)));
    sharing.expect_close_memory().returning(|_, _| Ok(()));
    Arc::new(sharing)
}

/// Returns a credulous backend with sharing.
fn sharing(addresses: &[u64]) -> MockBackend {
    let mut backend = credulous(addresses);
    let sharing = scripted_sharing();
    backend.expect_ipc_sharing().returning(move || Some(Arc::clone(&sharing)));
    backend
}

fn handle() -> MemoryHandle {
    MemoryHandle::new(Transport::Legacy, [0; 16], 512, [0; 64])
}

#[test]
fn exports_and_mappings_that_are_not_balanced() {
    let said = finding(&sharing(&[0x1000]), |backend| {
        let x = block(backend, 0, DeviceMemoryKind::Shareable(Transport::Descriptor));
        let sharing = backend.ipc_sharing().unwrap();
        // SAFETY: the backend is scripted.
        unsafe { sharing.export_memory(0, DevicePtr::new(x), Transport::Legacy).unwrap() };
        free(backend, 0, x, None);
    });
    assert_says(&said, &["`export_memory` was accepted", "not shareable by Legacy"]);
    let close = |backend: &Validated<'_>| {
        // SAFETY: the backend is scripted.
        unsafe { backend.ipc_sharing().unwrap().close_memory(0, DevicePtr::new(0x9000)).unwrap() };
    };
    let open = |backend: &Validated<'_>| {
        backend.ipc_sharing().unwrap().open_memory(0, &handle()).unwrap();
    };
    let said = finding(&sharing(&[0x1000]), |backend| {
        open(backend);
        open(backend);
        (0..3).for_each(|_| close(backend));
    });
    assert_says(&said, &["double free: `close_memory` accepted a mapping that is gone"]);
    let found = findings(&sharing(&[0x1000]), |backend| {
        (0..3).for_each(|_| open(backend));
        close(backend);
    });
    assert_says(&found[0], &["leak: mapping made by `open_memory`", "opened 2 times more often than closed"]);
}

#[test]
fn handles_and_plans_that_are_gone() {
    let mut backend = credulous(&[0x1000]);
    backend.expect_create_blas_handle().returning(|device, options| {
        let mut handle = MockBlasHandle::new();
        handle.expect_device().return_const(device);
        handle.expect_kind().return_const(options.kind);
        handle.expect_destroy().returning(|| Ok(()));
        handle.expect_set_stream().returning(|_| Ok(()));
        handle.expect_gemm().returning(|_| Ok(()));
        handle.expect_destroy_plan().returning(|_| Ok(()));
        Ok(Box::new(handle))
    });
    let blas = |backend: &Validated<'_>| backend.create_blas_handle(0, &BlasOptions::new(BlasKind::Blas)).unwrap();
    let said = finding(&backend, |backend| {
        let mut handle = blas(backend);
        handle.destroy().unwrap();
        handle.destroy().unwrap();
    });
    assert_says(&said, &["use after destroy: `destroy` accepted a handle that was destroyed"]);
    let said = finding(&backend, |backend| blas(backend).destroy_plan(PlanId::new(3)).unwrap());
    assert_says(&said, &["`destroy_plan` was accepted: double free: PlanId(3)"]);
    let said = finding(&backend, |backend| {
        let x = block(backend, 0, DeviceMemoryKind::Plain);
        let shape = GemmShape::new(highwater_hal::DataType::F32, 8, 8, 1);
        let gemm = Gemm::new(shape, DevicePtr::new(x), DevicePtr::new(x + 32), DevicePtr::new(x + 64));
        let stream = backend.create_stream(0, &StreamOptions::new()).unwrap();
        let mut handle = blas(backend);
        handle.set_stream(stream).unwrap();
        // SAFETY: the backend is scripted, and multiplies nothing.
        unsafe { handle.gemm(&gemm).unwrap() };
        drop(handle);
        backend.destroy_stream(stream).unwrap();
        free(backend, 0, x, None);
    });
    assert_says(&said, &["`gemm` was accepted: C from 0x1040 to 0x1140 does not lie in one living range"]);
    let found = findings(&backend, |backend| forget(blas(backend)));
    assert_says(&found[0], &["leak: handle made by `create_blas_handle`"]);
}

#[test]
fn a_release_that_a_fault_refused_is_made_again_by_its_guard() {
    let backend = credulous(&[0x1000]);
    for operation in ["destroy_stream", "synchronize_stream", "free", "synchronize_device"] {
        let fault = Fault { thread: 0, operation: operation.into(), index: 1 };
        let validated = Validated::new(&backend, Some(Gate::new(Some(fault))));
        {
            let (stream, block) = (Stream::new(&validated).unwrap(), Block::new(&validated, 64).unwrap());
            // The copy makes the stream's device a user of the block, which then waits for it.
            let used = stream.copy(block.span(0..8), block.span(8..16));
            assert!(used.is_ok());
        }
        assert!(validated.gate().unwrap().has_injected(), "{operation}");
        assert_eq!(validated.findings(), Vec::<String>::new(), "{operation}");
        assert_eq!(validated.retried(), u64::from(matches!(operation, "destroy_stream" | "free")), "{operation}");
    }
    // The layer repeats a release that the case made by a direct call.
    let fault = Fault { thread: 0, operation: "destroy_event".into(), index: 1 };
    let validated = Validated::new(&backend, Some(Gate::new(Some(fault))));
    let event = validated.create_event(0, &EventOptions::new()).unwrap();
    assert!(is_injected(&validated.destroy_event(event).unwrap_err()));
    validated.release_refused();
    assert_eq!((validated.findings(), validated.retried()), (Vec::new(), 1));
    // It repeats no release that the case never made.
    let fault = Fault { thread: 0, operation: "free".into(), index: 1 };
    let validated = Validated::new(&backend, Some(Gate::new(Some(fault))));
    let (_, x) =
        (validated.create_event(0, &EventOptions::new()).unwrap(), block(&validated, 0, DeviceMemoryKind::Plain));
    // SAFETY: the backend is scripted.
    assert!(is_injected(&unsafe { validated.free(0, DevicePtr::new(x), None) }.unwrap_err()));
    validated.release_refused();
    let found = validated.findings();
    assert_says(&found[0], &["leak: event"]);
    assert!(found.len() == 2 && found[1].starts_with("live objects differ"), "{found:?}");
}
