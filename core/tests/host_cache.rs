//! The host cache over the mock device: threads, a cap, and memory that other code copies by itself.

use std::thread;

use highwater_core::{Access, Backend, ErrorKind, Location, MemoryCopy, Runtime, RuntimeOptions};
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
