//! The host cache over the mock device: threads, a cap, and memory that other code copies by itself.

use std::ptr::NonNull;
use std::thread;

use highwater_core::{
    Access, Backend, CopyShape, DeviceBuffer, DeviceSlice, ErrorKind, HostPtr, Location, MemoryCopy, PinnedBuffer,
    Runtime, RuntimeOptions,
};
use highwater_hal::counted;
use highwater_mock::{MockGpu, MockOptions, Operation};

const KIB: usize = 1 << 10;

#[test]
fn threads_under_a_cap_keep_to_it_and_lose_nothing() {
    const CAP: u64 = 100 << 10;
    let gpu = MockGpu::open(MockOptions::new()).unwrap();
    let runtime = Runtime::with_options(gpu, &RuntimeOptions::new().with_host_cache_bytes(CAP)).unwrap();
    thread::scope(|scope| {
        for thread in 0..4_usize {
            let runtime = &runtime;
            scope.spawn(move || {
                let stream = runtime.device(0).unwrap().create_stream().unwrap();
                for round in 0..50_usize {
                    let len = KIB * (1 + (thread * 7 + round * 5) % 60);
                    let values = vec![(thread * 50 + round) as u8; len];
                    let buffer = stream.upload(&values).unwrap();
                    assert_eq!(stream.download(&buffer).unwrap(), values);
                    if round % 10 == thread {
                        runtime.trim().unwrap();
                    }
                }
                stream.synchronize().unwrap();
            });
        }
    });
    // All streams are done, so the next occasion leaves nothing above the cap.
    drop(runtime.pinned::<u8>(1).unwrap());
    let host = runtime.statistics().host;
    assert_eq!(host.broken_law(), None, "{host:?}");
    assert!(host.free_bytes + host.waiting_bytes <= CAP, "{host:?}");
    assert!(host.cap_evictions > 0, "{host:?}");
    assert_eq!((host.live_blocks, host.requested_bytes), (0, 0));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

/// The C library keeps its handles there.
#[test]
fn the_memory_for_a_binding_stays_with_the_block() {
    let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
    let (first, second) = (runtime.pinned::<u8>(4096).unwrap(), runtime.pinned::<u8>(4096).unwrap());
    let [of_first, of_second] = [&first, &second].map(|buffer| buffer.binding_memory());
    assert!(of_first != of_second && of_first == first.binding_memory());
    // SAFETY: the buffer lives, and no other code has the words.
    unsafe {
        assert_eq!(*of_first, [0; 6]);
        *of_first = [7; 6];
    }
    let address = first.ptr();
    drop(first);
    let again = runtime.pinned::<u8>(4096).unwrap();
    assert_eq!((again.ptr(), again.binding_memory()), (address, of_first));
    // SAFETY: as above.
    assert_eq!(unsafe { *of_first }, [7; 6]);
    drop((again, second));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn a_copy_that_other_code_enqueued_from_inside_a_buffer_is_waited_for() {
    let gpu = MockGpu::open(MockOptions::new()).unwrap();
    let runtime = Runtime::new(gpu.clone()).unwrap();
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    let source = stream.upload(&[7_u8; 64]).unwrap();
    let mut pinned = runtime.pinned::<u8>(KIB).unwrap();
    pinned.write().unwrap().fill(0);
    gpu.set_latency(std::time::Duration::from_millis(20));
    let inside = pinned.ptr().offset(100);
    let copy = MemoryCopy::new(Location::Host(inside), Location::Device { device: 0, ptr: source.ptr() }, 64);
    // SAFETY: both ranges lie in live blocks; the use is noted at once, so the buffer is not touched before it is over. The
    // source is dropped after the wait below.
    unsafe { gpu.copy(&copy, stream.id()).unwrap() };
    stream.note_host_use(inside, Access::Write).unwrap();
    let values = pinned.read().unwrap();
    assert!(values[100..164].iter().all(|&value| value == 7), "the read did not wait");
    assert!(values[..100].iter().chain(&values[164..]).all(|&value| value == 0));
}

#[test]
fn a_refused_release_of_memory_above_the_cap_is_counted_and_tried_again() {
    for (register, operation) in [(true, Operation::HostUnregister), (false, Operation::HostFree)] {
        let gpu = MockGpu::open(MockOptions::new().with_capabilities(|can| can.host_register = register)).unwrap();
        let runtime = Runtime::with_options(gpu.clone(), &RuntimeOptions::new().with_host_cache_bytes(0)).unwrap();
        // Within one drop, the release is tried as long as memory is above the cap.
        gpu.fail_by_chance(operation, 1_000_000, ErrorKind::Vendor).unwrap();
        drop(runtime.pinned::<u8>(64).unwrap());
        let statistics = runtime.statistics();
        assert!(statistics.failed_releases > 0);
        assert_eq!((statistics.host.pieces, statistics.host.cap_evictions), (1, 0));
        gpu.fail_by_chance(operation, 0, ErrorKind::Vendor).unwrap();
        drop(runtime.pinned::<u8>(64).unwrap());
        let after = runtime.statistics();
        assert_eq!((after.host.held_bytes, after.host.cap_evictions), (0, 1));
        assert_eq!(after.failed_releases, statistics.failed_releases);
        assert_eq!(runtime.close().unwrap().total(), 0);
    }
}

#[test]
fn copies_by_address_cross_borders_and_are_waited_for() {
    const MIB: usize = 1 << 20;
    let options = MockOptions::new().with_capabilities(|can| can.register_piece_bytes = 2 * MIB);
    let gpu = MockGpu::open(options).unwrap();
    let runtime = Runtime::new(gpu.clone()).unwrap();
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    let mut pinned = runtime.pinned::<u32>(2 * MIB).unwrap();
    assert!(pinned.registrations().count() > 2);
    pinned.write().unwrap().iter_mut().zip(0..).for_each(|(value, at)| *value = at);
    // All values but the first and the last, so that no range begins at a border.
    let len = 2 * MIB - 2;
    let on_device = device.allocate::<u32>(len).unwrap();
    gpu.set_latency(std::time::Duration::from_millis(5));
    // SAFETY: the values are in the buffer, and `write` waits for the copy.
    unsafe { stream.copy_from_raw(pinned.ptr().offset(4), &on_device).unwrap() };
    pinned.write().unwrap().fill(u32::MAX);
    // SAFETY: as above, and `read` waits.
    unsafe { stream.copy_to_raw(&on_device, pinned.ptr().offset(4)).unwrap() };
    let values = pinned.read().unwrap();
    assert_eq!((values[0], values[2 * MIB - 1]), (u32::MAX, u32::MAX));
    assert!(values[1..=len].iter().zip(1..).all(|(value, at)| *value == at), "a wait or a part is missing");

    // Another stream waits on the device, and the pool reuses the memory only after the copy.
    let other = device.create_stream().unwrap();
    let small = runtime.pinned::<u32>(64).unwrap();
    let (from, back) = (device.allocate::<u32>(64).unwrap(), device.allocate::<u32>(64).unwrap());
    stream.fill(&from, 5_u32).unwrap();
    // SAFETY: the values are in the buffer, which the CPU does not access.
    unsafe {
        stream.copy_to_raw(&from, small.ptr()).unwrap();
        other.copy_from_raw(small.ptr(), &back).unwrap();
    }
    drop(small);
    let mut next = runtime.pinned::<u32>(64).unwrap();
    next.write().unwrap().fill(6);
    assert_eq!(other.download(&back).unwrap(), [5; 64]);
    assert_eq!(next.read().unwrap(), [6; 64]);

    // A graph keeps the memory, and each launch counts as a use.
    let mut kept = runtime.pinned::<u32>(64).unwrap();
    kept.write().unwrap().fill(7);
    let address = kept.ptr();
    // SAFETY: the graph keeps the values.
    let graph = stream.capture(|stream| unsafe { stream.copy_from_raw(address, &back) });
    let mut graph = graph.unwrap();
    drop(kept);
    let mut others: Vec<_> = (0..4).map(|_| runtime.pinned::<u32>(64).unwrap()).collect();
    others.iter_mut().for_each(|other| other.write().unwrap().fill(8));
    graph.launch(&stream).unwrap();
    assert_eq!(stream.download(&back).unwrap(), [7; 64]);
    gpu.set_latency(std::time::Duration::ZERO);
    drop((graph, others, next, pinned, from, back, on_device, stream, other, device));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn copies_by_addresses_of_other_memory_are_refused() {
    let gpu = MockGpu::open(MockOptions::new().with_devices(2)).unwrap();
    let runtime = Runtime::new(gpu.clone()).unwrap();
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    let on_device = device.allocate::<u8>(4 * KIB).unwrap();
    let pinned = runtime.pinned::<u8>(4 * KIB).unwrap();
    let refused = |address, device: &DeviceBuffer<u8>| {
        // SAFETY: nothing is enqueued.
        let [from, to] = unsafe { [stream.copy_from_raw(address, device), stream.copy_to_raw(device, address)] };
        let [from, to] = [from.unwrap_err(), to.unwrap_err()];
        assert_eq!((from.kind(), from.message(), from.hint()), (to.kind(), to.message(), to.hint()));
        from
    };
    let mut plain = [0_u8; 16];
    let outside = refused(HostPtr::new(NonNull::from(&mut plain).cast()), &on_device);
    assert_eq!(outside.kind(), ErrorKind::InvalidPointer);
    let leaves = refused(pinned.ptr().offset(1), &on_device);
    assert_eq!(leaves.kind(), ErrorKind::InvalidPointer);
    assert!(leaves.message().contains("4096 bytes") && leaves.message().contains("4095 bytes"), "{leaves}");
    let elsewhere = runtime.device(1).unwrap().allocate::<u8>(16).unwrap();
    assert_eq!(refused(pinned.ptr(), &elsewhere).kind(), ErrorKind::WrongDevice);
    let other = Runtime::new(gpu).unwrap();
    let theirs = other.pinned::<u8>(16).unwrap();
    assert_eq!(refused(theirs.ptr(), &on_device).kind(), ErrorKind::InvalidPointer);
    let address = pinned.ptr();
    drop(pinned);
    assert_eq!(refused(address, &on_device).kind(), ErrorKind::InvalidPointer);
}

/// Blocks are rounded up to 256 bytes or whole pages. The bytes behind the buffer are not the caller's.
#[test]
fn copies_by_address_end_with_the_buffer_and_not_with_its_block() {
    let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    let refused = |host: HostPtr, device: DeviceSlice<'_, u8>, rest: &str| {
        // SAFETY: nothing is enqueued.
        let [from, to] = unsafe { [stream.copy_from_raw(host, device), stream.copy_to_raw(device, host)] };
        let rows = CopyShape::new(1, device.len());
        // SAFETY: as above.
        let [from_rows, to_rows] =
            unsafe { [stream.copy_2d_from_raw(host, device, rows), stream.copy_2d_to_raw(device, host, rows)] };
        for error in [from, to, from_rows, to_rows].map(Result::unwrap_err) {
            assert_eq!(error.kind(), ErrorKind::InvalidPointer, "{error}");
            assert!(error.message().ends_with(&format!("leaves the buffer, which has {rest} from there")), "{error}");
            assert!(!error.hint().is_empty());
        }
    };
    for len in [1, 100, 255, 256, 3000, 4096, 5000] {
        let on_device = stream.allocate::<u8>(len + 1).unwrap();
        let (all, more) = (on_device.slice(0..len).unwrap(), on_device.slice(0..len + 1).unwrap());
        let pinned = runtime.pinned::<u8>(len).unwrap();
        let shared = runtime.pinned_shared::<u8>(len).unwrap();
        for host in [pinned.ptr(), shared.ptr()] {
            stream.fill(&on_device, 3).unwrap();
            // SAFETY: the values are in the buffer, which the CPU does not access.
            unsafe {
                stream.copy_to_raw(all, host).unwrap();
                stream.copy_from_raw(host, all).unwrap();
            }
            refused(host, more, &counted(len, "byte"));
            // Behind a block without rounding lies other memory.
            if !matches!(len, 256 | 4096) {
                refused(host.offset(len), on_device.slice(0..1).unwrap(), "0 bytes");
            }
        }
        assert_eq!(pinned.read().unwrap(), vec![3; len]);
        // A slice of the device's buffer ends with it, too.
        assert_eq!(on_device.slice(0..len + 2).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
    let empty = runtime.pinned::<u64>(0).unwrap();
    refused(empty.ptr(), stream.allocate::<u8>(1).unwrap().slice(0..1).unwrap(), "0 bytes");
    assert_eq!(runtime.statistics().host.broken_law(), None);
}

/// A drop compares the thread with the one that its block returns to. The system gives the thread pointer of an ended thread to a later one.
#[test]
fn a_buffer_of_an_ended_thread_does_not_return_to_a_thread_with_the_same_pointer() {
    let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
    let in_a_thread =
        |work: &(dyn Fn() -> PinnedBuffer<u8> + Sync)| std::thread::scope(|scope| scope.spawn(work).join().unwrap());
    for round in 0..50 {
        let buffer = in_a_thread(&|| runtime.pinned::<u8>(64).unwrap());
        let buffer = std::sync::Mutex::new(Some(buffer));
        let own = in_a_thread(&|| {
            // In half of the rounds, the thread has a cache of its own by then.
            let own = (round % 2 == 0).then(|| runtime.pinned::<u8>(64).unwrap());
            drop(buffer.lock().unwrap().take());
            own.unwrap_or_else(|| runtime.pinned::<u8>(64).unwrap())
        });
        assert_eq!(runtime.statistics().host.live_blocks, 1);
        drop(own);
        let statistics = runtime.statistics().host;
        assert_eq!((statistics.live_blocks, statistics.broken_law()), (0, None));
        // A block in the cache of a thread that has ended would be lost.
        assert!(statistics.cached_blocks <= 1, "{statistics:?}");
    }
    assert_eq!(runtime.close().unwrap().total(), 0);
}
