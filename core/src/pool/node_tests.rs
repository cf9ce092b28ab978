//! Page-locked memory on the NUMA nodes of devices. The nodes are faked: the pool that a request uses follows from the nodes that
//! the devices and the machine report, and the system refuses to bind memory to a node that does not exist.

use std::collections::BTreeSet;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use highwater_mock::MockOptions;

use super::Nodes;
use super::host_options::HostMemoryOptions;
use crate::testing::ManualBackend;
use crate::{Access, Device, ErrorKind, HostCacheStatistics, PinnedBuffer, Runtime, RuntimeOptions};

const MIB: usize = 1 << 20;
/// The smallest piece.
const PIECE: usize = 2 << 20;

/// A machine whose nodes with memory are listed so.
fn machine(nodes: &str) -> Nodes {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let name = format!("highwater-nodes-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let root = std::env::temp_dir().join(name);
    let folder = root.join("sys/devices/system/node");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("has_memory"), format!("{nodes}\n")).unwrap();
    let nodes = Nodes::of_machine(&root);
    fs::remove_dir_all(&root).unwrap();
    nodes
}

/// Four devices: one on node 0, two on node 1, and one whose node is unknown.
fn open_on(nodes: &str, options: HostMemoryOptions) -> (Arc<ManualBackend>, Runtime) {
    let backend = ManualBackend::open(MockOptions::new().with_devices(4), |can| {
        can.host_register = true;
        can.register_piece_bytes = PIECE;
    });
    backend.attach(&[0, 1, 1]);
    let options = RuntimeOptions::new().with_host_memory(options);
    let runtime = Runtime::on_nodes(backend.clone(), &options, &machine(nodes)).unwrap();
    backend.watch_locks_of(&runtime);
    (backend, runtime)
}

fn open() -> (Arc<ManualBackend>, Runtime) {
    open_on("0-1", HostMemoryOptions::new())
}

fn devices(runtime: &Runtime) -> [Device; 4] {
    [0, 1, 2, 3].map(|ordinal| runtime.device(ordinal).unwrap())
}

fn host(runtime: &Runtime) -> HostCacheStatistics {
    let host = runtime.statistics().host;
    assert_eq!(host.broken_law(), None, "{host:?}");
    host
}

/// Returns whether two buffers that live one after the other have the same memory.
fn shares(first: impl Fn() -> PinnedBuffer<u8>, second: impl Fn() -> PinnedBuffer<u8>) -> bool {
    let address = first().ptr();
    second().ptr() == address
}

#[test]
fn a_list_of_nodes_is_read() {
    let info = |node| {
        let mut info = crate::Backend::device_info(&*ManualBackend::new(), 0).unwrap();
        info.numa_node = node;
        info
    };
    let of = |list: &str, node: u32| machine(list).of_device(&info(Some(node))).is_some();
    assert!(of("0-1", 1) && of("0,2-4,7", 3) && of("0,2-4,7", 7));
    assert!(!of("0-1", 2) && !of("0,2-4,7", 1), "a node without memory");
    assert!(!of("0", 0), "one node");
    assert!(["", "0-", "x", "0-99999999999", "0,,1"].iter().all(|bad| !of(bad, 0)), "not a list");
    assert_eq!(machine("0-1").of_device(&info(None)), None);
    assert_eq!(Nodes::of_machine("/nonexistent".as_ref()).of_device(&info(Some(0))), None);
}

#[test]
fn each_node_has_memory_of_its_own_which_is_reused_there() {
    let (backend, runtime) = open();
    let devices = devices(&runtime);
    let on = |ordinal: usize| devices[ordinal].pinned::<u8>(MIB).unwrap();
    let anywhere = || runtime.pinned::<u8>(MIB).unwrap();
    for _ in 0..3 {
        assert!(shares(|| on(1), || on(2)), "one node");
        assert!(shares(anywhere, || on(3)), "an unknown node");
        assert!(!shares(|| on(0), || on(1)) && !shares(|| on(0), anywhere) && !shares(|| on(1), anywhere));
    }
    let statistics = host(&runtime);
    assert_eq!((statistics.pieces, statistics.held_bytes, statistics.misses), (3, 3 * PIECE as u64, 3));
    assert_eq!((statistics.peak_held_bytes, statistics.hits), (3 * PIECE as u64, 27));
    runtime.trim().unwrap();
    assert_eq!((host(&runtime).held_bytes, backend.live_host_blocks()), (0, 0));
    drop(devices);
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn without_a_choice_of_nodes_a_device_uses_the_memory_of_the_runtime() {
    for nodes in ["0", "", "0,2", "2-3"] {
        let (_backend, runtime) = open_on(nodes, HostMemoryOptions::new());
        let device = runtime.device(1).unwrap();
        let on_device = || device.pinned::<u8>(MIB).unwrap();
        assert!(shares(on_device, || runtime.pinned(MIB).unwrap()), "{nodes}");
    }
    // The backend allocates, and chooses the node.
    let backend = ManualBackend::new();
    backend.attach(&[1]);
    let runtime = Runtime::on_nodes(backend, &RuntimeOptions::new(), &machine("0-1")).unwrap();
    let device = runtime.device(0).unwrap();
    assert!(shares(|| device.pinned(MIB).unwrap(), || runtime.pinned(MIB).unwrap()));
}

#[test]
fn a_thread_cache_has_blocks_of_one_node_and_a_block_returns_to_its_own() {
    let (_backend, runtime) = open();
    let devices = devices(&runtime);
    let mut seen = [BTreeSet::new(), BTreeSet::new()];
    for round in 0..200 {
        let pairs: Vec<_> = (0..round % 7).map(|_| [0, 1].map(|at| devices[at].pinned::<u8>(5000).unwrap())).collect();
        for pair in &pairs {
            pair.iter().zip(&mut seen).for_each(|(buffer, seen)| seen.extend([buffer.ptr().address()]));
        }
        // Every second time, another thread drops them.
        if round % 2 == 0 {
            thread::spawn(move || drop(pairs)).join().unwrap();
        }
    }
    assert!(seen[0].is_disjoint(&seen[1]), "{seen:?}");
    assert_eq!((host(&runtime).live_blocks, host(&runtime).pieces), (0, 2));
}

#[test]
fn copies_notes_and_graphs_use_the_memory_of_any_node() {
    let (backend, runtime) = open();
    for device in devices(&runtime) {
        let stream = device.create_stream().unwrap();
        let on_device = device.allocate::<u8>(MIB).unwrap();
        let mut pinned = runtime.device(1).unwrap().pinned::<u8>(MIB).unwrap();
        assert_eq!(runtime.pinned_block_of(pinned.ptr()).unwrap().base, pinned.ptr());
        pinned.write().unwrap().fill(7);
        stream.copy_to_device(&pinned, &on_device).unwrap();
        stream.note_host_use(pinned.ptr(), Access::Read).unwrap();
        let mut graph = stream.capture(|stream| stream.copy_to_device(&pinned, &on_device)).unwrap();
        graph.launch(&stream).unwrap();
        drop(pinned);
        assert_eq!((host(&runtime).graph_blocks, host(&runtime).graph_bytes), (1, MIB as u64));
        backend.advance(stream.id());
        drop(graph);
        assert_eq!(host(&runtime).graph_blocks, 0);
        assert_eq!(stream.download(&on_device).unwrap(), vec![7; MIB]);
    }
    runtime.trim().unwrap();
    assert_eq!(host(&runtime).held_bytes, 0);
}

#[test]
fn the_copies_of_values_use_the_memory_of_the_device() {
    let (_backend, runtime) = open();
    let stream = runtime.device(1).unwrap().create_stream().unwrap();
    let buffer = stream.upload(&[1_u8; 5000]).unwrap();
    stream.download(&buffer).unwrap();
    drop(runtime.device(2).unwrap().pinned::<u8>(5000).unwrap());
    assert_eq!(host(&runtime).pieces, 1);
}

#[test]
fn the_cap_bounds_the_memory_of_all_nodes_and_idle_memory_of_another_node_gives_way() {
    let cap = 3 * PIECE as u64;
    let (_backend, runtime) = open_on("0-1", HostMemoryOptions::new().with_cap_bytes(cap));
    let devices = devices(&runtime);
    let first = devices[0].pinned::<u8>(2 * PIECE).unwrap();
    let second = devices[1].pinned::<u8>(PIECE).unwrap();
    let error = runtime.pinned::<u8>(1).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    assert!(error.message().contains(&format!("it holds {cap} bytes, the cap is {cap} bytes")), "{error}");
    drop(first);
    let third = runtime.pinned::<u8>(PIECE).unwrap();
    assert_eq!((host(&runtime).held_bytes, host(&runtime).peak_held_bytes), (2 * PIECE as u64, cap));
    drop((second, third));
}

#[test]
fn the_cap_on_idle_memory_bounds_the_sum_over_nodes() {
    let cap = 2 * PIECE as u64;
    let (_backend, runtime) = open_on("0-1", HostMemoryOptions::new().with_idle_cap_bytes(cap));
    let devices = devices(&runtime);
    let hold = |device: &Device| device.pinned::<u8>(2 * PIECE).unwrap();
    let buffers = [hold(&devices[0]), hold(&devices[1]), runtime.pinned(2 * PIECE).unwrap()];
    assert_eq!((host(&runtime).held_bytes, host(&runtime).free_bytes), (6 * PIECE as u64, 0));
    for buffer in buffers {
        drop(buffer);
        let host = host(&runtime);
        assert_eq!(host.free_bytes + host.cached_bytes, cap);
    }
    assert_eq!(host(&runtime).cap_evictions, 4);
    // A thread cache keeps nothing beyond the cap either.
    drop([0, 1].map(|at| devices[at].pinned::<u8>(4096).unwrap()));
    let host = host(&runtime);
    assert!(host.free_bytes + host.cached_bytes <= cap, "{host:?}");
}

#[test]
fn the_last_buffer_of_any_node_ends_the_runtime() {
    let (backend, runtime) = open();
    let mut buffers: Vec<_> = devices(&runtime).iter().map(|device| device.pinned::<u8>(5000).unwrap()).collect();
    buffers.extend(devices(&runtime).iter().map(|device| device.pinned::<u8>(PIECE).unwrap()));
    let error = runtime.clone().close().unwrap_err();
    assert!(error.message().starts_with("9 other objects"), "{error}");
    drop(runtime);
    while let Some(buffer) = buffers.pop() {
        assert!(backend.live_host_blocks() > 0);
        thread::spawn(move || drop(buffer)).join().unwrap();
    }
    assert_eq!(backend.live_host_blocks(), 0);
}

/// What the kernel reports about the mapping at an address, in words.
fn words_of(address: usize) -> Option<Vec<String>> {
    let maps = fs::read_to_string("/proc/self/numa_maps").ok()?;
    // A line begins with the first address of the mapping.
    let starts = |line: &str| usize::from_str_radix(line.split(' ').next().unwrap_or_default(), 16).ok();
    let line = maps.lines().take_while(|line| starts(line).is_some_and(|start| start <= address)).last()?;
    Some(line.split_whitespace().map(str::to_owned).collect())
}

#[test]
fn the_kernel_reports_the_node_of_the_pages() {
    let (_backend, runtime) = open();
    let device = runtime.device(0).unwrap();
    let Some(before) = words_of(runtime.pinned::<u8>(PIECE).unwrap().ptr().address()) else {
        return eprintln!("skipped: the kernel has no /proc/self/numa_maps");
    };
    assert_eq!(before[1], "default", "{before:?}");
    // Released memory loses the policy, and memory in its place has it again.
    for _ in 0..2 {
        let pinned = device.pinned::<u8>(3 * PIECE).unwrap();
        let address = pinned.ptr().address();
        let words = words_of(address).unwrap();
        // SAFETY: The buffer's own pages.
        if let Err(error) = unsafe { super::nodes::prefer_node(pinned.ptr(), 3 * PIECE, 0) } {
            let is_refusal = [libc::ENOSYS, libc::EPERM].map(Some).contains(&error.raw_os_error());
            assert!(is_refusal, "{error}");
            return eprintln!("skipped: the system refuses `mbind`");
        }
        assert_eq!(words[1], "prefer:0", "{words:?}");
        assert!(words.iter().any(|word| word.starts_with("N0=")), "{words:?}");
        drop(pinned);
        runtime.trim().unwrap();
        assert_eq!(words_of(address).unwrap()[1], "default");
    }
}
