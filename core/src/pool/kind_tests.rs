//! Page-locked memory of kinds other than the default, and its addresses on devices.

use std::sync::Arc;

use highwater_mock::MockOptions;

use super::host_options::HostMemoryOptions;
use crate::testing::ManualBackend;
use crate::{ErrorKind, HostCacheStatistics, HostMemoryKind, PinnedBuffer, Runtime, RuntimeOptions};

const MIB: usize = 1 << 20;
/// The smallest piece.
const PIECE: usize = 2 << 20;

/// A backend that registers memory in small pieces, and allocates write-combined memory.
fn open(options: HostMemoryOptions) -> (Arc<ManualBackend>, Runtime) {
    let backend = ManualBackend::open(MockOptions::new().with_devices(2), |can| {
        (can.host_register, can.write_combined) = (true, true);
        can.register_piece_bytes = PIECE;
    });
    let options = RuntimeOptions::new().with_host_memory(options);
    let runtime = Runtime::with_options(backend.clone(), &options).unwrap();
    backend.watch_locks_of(&runtime);
    (backend, runtime)
}

fn host(runtime: &Runtime) -> HostCacheStatistics {
    let host = runtime.statistics().host;
    assert_eq!(host.broken_law(), None, "{host:?}");
    host
}

fn combined(runtime: &Runtime, bytes: usize) -> PinnedBuffer<u8> {
    runtime.pinned_of(bytes, HostMemoryKind::WriteCombined).unwrap()
}

#[test]
fn write_combined_memory_comes_from_the_backend_and_is_reused_for_its_kind_only() {
    let (backend, runtime) = open(HostMemoryOptions::new());
    let cached = runtime.pinned::<u8>(MIB).unwrap().ptr();
    assert_eq!(runtime.pinned_of::<u8>(MIB, HostMemoryKind::Default).unwrap().ptr(), cached);
    assert_eq!(backend.allocated_kinds(), []);
    let first = combined(&runtime, MIB).ptr();
    assert_ne!(first, cached);
    for bytes in [MIB, 1, 2 * MIB] {
        for (pinned, piece) in [(combined(&runtime, bytes), first), (runtime.pinned(bytes).unwrap(), cached)] {
            assert!((piece.address()..piece.address() + PIECE).contains(&pinned.ptr().address()));
        }
    }
    assert_eq!(backend.allocated_kinds(), [HostMemoryKind::WriteCombined]);
    // No block extends over two allocations.
    let pair = [combined(&runtime, PIECE), combined(&runtime, PIECE)];
    drop(pair);
    assert_eq!(combined(&runtime, 2 * PIECE).registrations().count(), 1);
    assert_eq!(backend.allocated_kinds().len(), 3);
    assert_eq!((host(&runtime).pieces, host(&runtime).held_bytes), (4, 5 * PIECE as u64));
    runtime.trim().unwrap();
    assert_eq!((host(&runtime).held_bytes, backend.live_host_blocks()), (0, 0));
}

#[test]
fn write_combined_memory_is_reused_after_the_streams_that_use_it() {
    let (backend, runtime) = open(HostMemoryOptions::new());
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    let mut pinned = combined(&runtime, PIECE);
    pinned.write().unwrap().fill(7);
    let on_device = device.allocate::<u8>(PIECE).unwrap();
    stream.copy_to_device(&pinned, &on_device).unwrap();
    let graph = stream.capture(|stream| stream.copy_to_device(&pinned, &on_device)).unwrap();
    let address = pinned.ptr();
    drop(pinned);
    assert_ne!(combined(&runtime, PIECE).ptr(), address, "a graph keeps it");
    drop(graph);
    assert_ne!(combined(&runtime, PIECE).ptr(), address, "a stream uses it");
    backend.advance(stream.id());
    assert_eq!([(); 2].map(|()| combined(&runtime, PIECE)).iter().filter(|pinned| pinned.ptr() == address).count(), 1);
    assert_eq!(stream.download(&on_device).unwrap(), vec![7; PIECE]);
}

#[test]
fn the_cap_bounds_the_memory_of_all_kinds() {
    let cap = 2 * PIECE as u64;
    let (_backend, runtime) = open(HostMemoryOptions::new().with_cap_bytes(cap));
    let cached = runtime.pinned::<u8>(PIECE).unwrap();
    let error = runtime.pinned_of::<u8>(2 * PIECE, HostMemoryKind::WriteCombined).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    drop(cached);
    drop(combined(&runtime, 2 * PIECE));
    assert_eq!((host(&runtime).held_bytes, host(&runtime).pieces), (cap, 1));
}

#[test]
fn a_kind_that_a_device_lacks_is_refused() {
    let runtime = Runtime::new(ManualBackend::new()).unwrap();
    let error = runtime.pinned_of::<u8>(1, HostMemoryKind::WriteCombined).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("write_combined"), "{error}");
}

#[test]
fn a_buffer_has_an_address_on_each_device_of_its_runtime() {
    let (backend, runtime) = open(HostMemoryOptions::new());
    for ordinal in [0, 1] {
        let device = runtime.device(ordinal).unwrap();
        // The second has several registrations.
        for pinned in [runtime.pinned::<u8>(0).unwrap(), runtime.pinned(5 * PIECE).unwrap(), combined(&runtime, MIB)] {
            let expected = crate::Backend::host_allocator(&*backend).device_address(pinned.ptr(), ordinal).unwrap();
            assert_eq!(pinned.device_address(&device).unwrap(), expected);
        }
    }
    let (_other_backend, other) = open(HostMemoryOptions::new());
    let error = runtime.pinned::<u8>(1).unwrap().device_address(&other.device(0).unwrap()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidPointer);
}
