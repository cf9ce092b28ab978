//! The statistics of page-locked memory by cause: where requests were served, why pieces were released, and what is waste.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use highwater_mock::Operation;

use crate::testing::ManualBackend;
use crate::{ErrorKind, HostCacheStatistics, HostMemoryOptions, Runtime, RuntimeOptions};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

fn open(options: HostMemoryOptions) -> (Arc<ManualBackend>, Runtime) {
    let backend = ManualBackend::with_capabilities(|can| {
        can.host_register = true;
        can.register_piece_bytes = 2 * MIB;
    });
    let runtime = Runtime::with_options(backend.clone(), &RuntimeOptions::new().with_host_memory(options)).unwrap();
    backend.watch_locks_of(&runtime);
    (backend, runtime)
}

fn host(runtime: &Runtime) -> HostCacheStatistics {
    let host = runtime.statistics().host;
    assert_eq!(host.broken_law(), None, "{host:?}");
    host
}

fn hits(host: &HostCacheStatistics) -> [u64; 6] {
    [host.cache_hits, host.inbox_hits, host.free_hits, host.waiting_hits, host.merged_hits, host.misses]
}

#[test]
fn every_hit_is_counted_where_it_was_found() {
    let (backend, runtime) = open(HostMemoryOptions::new());
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    drop(runtime.pinned::<u8>(3 * KIB).unwrap());
    assert_eq!(hits(&host(&runtime)), [0, 0, 0, 0, 0, 1]);
    let of_cache = runtime.pinned::<u8>(3 * KIB).unwrap();
    assert_eq!(hits(&host(&runtime)), [1, 0, 0, 0, 0, 1]);
    thread::scope(|scope| scope.spawn(|| drop(of_cache)).join().unwrap());
    assert_eq!((host(&runtime).inbox_blocks, host(&runtime).inbox_bytes), (1, 4 * KIB as u64));
    drop(runtime.pinned::<u8>(3 * KIB).unwrap());
    assert_eq!(hits(&host(&runtime)), [1, 1, 0, 0, 0, 1]);
    let rest = runtime.pinned::<u8>(2 * MIB - 4 * KIB).unwrap();
    assert_eq!(hits(&host(&runtime)), [1, 1, 1, 0, 0, 1]);
    stream.copy_to_device(&rest, &device.allocate(rest.len()).unwrap()).unwrap();
    drop(rest);
    assert_eq!(host(&runtime).waiting_blocks, 1);
    backend.advance(stream.id());
    drop(runtime.pinned::<u8>(MIB).unwrap());
    assert_eq!(hits(&host(&runtime)), [1, 1, 1, 1, 0, 1]);
    // The first page is in the thread cache.
    drop(runtime.pinned::<u8>(2 * MIB).unwrap());
    assert_eq!(hits(&host(&runtime)), [1, 1, 1, 1, 1, 1]);
    drop((stream, device));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn waste_and_peaks_are_stated_in_bytes() {
    let (_backend, runtime) = open(HostMemoryOptions::new());
    let buffers = [3000, 5000, MIB].map(|bytes| runtime.pinned::<u8>(bytes).unwrap());
    let statistics = host(&runtime);
    let (requested, pages) = ((3000 + 5000 + MIB) as u64, (12 * KIB + MIB) as u64);
    assert_eq!((statistics.requested_bytes, statistics.rounding_bytes), (requested, pages - requested));
    assert_eq!((statistics.peak_live_bytes, statistics.peak_held_bytes), (pages, 2 * MIB as u64));
    drop(buffers);
    runtime.trim().unwrap();
    let statistics = host(&runtime);
    assert_eq!((statistics.rounding_bytes, statistics.peak_live_bytes), (0, pages));
    // What a thread cache keeps is the error of the peak.
    drop(runtime.pinned::<u8>(3 * KIB).unwrap());
    let all = runtime.pinned::<u8>(2 * MIB - 4 * KIB).unwrap();
    assert_eq!(host(&runtime).peak_live_bytes, host(&runtime).live_bytes + host(&runtime).cached_bytes);
    drop(all);
    assert_eq!(runtime.close().unwrap().total(), 0);
}

/// By trims, the cap on idle memory, the idle time, exhaustion, and growths that failed.
fn frees(runtime: &Runtime) -> [u64; 5] {
    let HostCacheStatistics {
        trim_frees, cap_evictions, idle_time_frees, exhaustion_frees, failed_growth_frees, ..
    } = host(runtime);
    [trim_frees, cap_evictions, idle_time_frees, exhaustion_frees, failed_growth_frees]
}

#[test]
fn every_release_is_counted_by_its_reason() {
    let (backend, runtime) = open(HostMemoryOptions::new().with_cap_bytes(8 * MIB as u64));
    drop(runtime.pinned::<u8>(6 * MIB).unwrap());
    runtime.trim().unwrap();
    assert_eq!(frees(&runtime), [3, 0, 0, 0, 0]);
    let live = runtime.pinned::<u8>(2 * MIB).unwrap();
    drop(runtime.pinned::<u8>(4 * MIB).unwrap());
    runtime.pinned::<u8>(7 * MIB).unwrap_err();
    assert_eq!(frees(&runtime), [3, 0, 0, 2, 0]);
    backend.gpu.fail_call(Operation::HostRegister, 2, ErrorKind::Vendor).unwrap();
    runtime.pinned::<u8>(6 * MIB).unwrap_err();
    assert_eq!(frees(&runtime), [3, 0, 0, 2, 1]);
    drop(live);
    assert_eq!(runtime.close().unwrap().total(), 0);

    let (_backend, runtime) = open(HostMemoryOptions::new().with_idle_cap_bytes(2 * MIB as u64));
    drop(runtime.pinned::<u8>(6 * MIB).unwrap());
    assert_eq!(frees(&runtime), [0, 2, 0, 0, 0]);

    let (_backend, runtime) = open(HostMemoryOptions::new().with_idle_time(Duration::from_millis(20)));
    let stream = runtime.device(0).unwrap().create_stream().unwrap();
    drop(runtime.pinned::<u8>(4 * MIB).unwrap());
    thread::sleep(Duration::from_millis(60));
    stream.synchronize().unwrap();
    assert_eq!(frees(&runtime), [0, 0, 2, 0, 0]);
}
