//! Page-locked memory from huge pages that the user reserved. Needs the right to reserve some (`vm.nr_hugepages`); without it,
//! the test prints the reason and checks the fallback only.

use std::fs;
use std::sync::Arc;

use highwater_core::{HostMemoryOptions, HugePages, PinnedBuffer, Runtime, RuntimeOptions};
use highwater_mock::{MockGpu, MockOptions};

const MIB: usize = 1 << 20;
const PIECE: usize = 2 * MIB;
const COUNT: &str = "/proc/sys/vm/nr_hugepages";
const PAGES: usize = 8;

fn number(path: &str) -> Option<usize> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn free_pages() -> Option<usize> {
    number("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
}

/// The pages that the test reserved; gives them back when dropped.
struct Reserved(usize);

impl Reserved {
    fn new(pages: usize) -> Result<Self, String> {
        let before = number(COUNT).ok_or("the kernel has no reserved huge pages")?;
        let set = fs::write(COUNT, (before + pages).to_string());
        let reserved = Self(before);
        set.map_err(|error| format!("{COUNT} cannot be written: {error}"))?;
        match free_pages() {
            Some(free) if free == pages && number(COUNT) == Some(before + pages) => Ok(reserved),
            free => Err(format!("{pages} huge pages were asked for, and {free:?} are free")),
        }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let _ = fs::write(COUNT, self.0.to_string());
    }
}

fn open(options: MockOptions) -> (Arc<MockGpu>, Runtime) {
    open_with(options, HostMemoryOptions::new())
}

fn open_with(options: MockOptions, host_memory: HostMemoryOptions) -> (Arc<MockGpu>, Runtime) {
    let options = options.with_capabilities(|can| can.register_piece_bytes = PIECE).with_checks();
    let gpu = MockGpu::open(options).unwrap();
    let options = RuntimeOptions::new().with_host_memory(host_memory.with_huge_pages(HugePages::Reserved));
    (gpu.clone(), Runtime::with_options(gpu, &options).unwrap())
}

/// The page size of the mapping at an address, in KiB, and whether children inherit it.
fn mapping(address: usize) -> (usize, bool) {
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
    let holds = |line: &str| {
        let ends = line.split(' ').next().and_then(|range| range.split_once('-'));
        let ends = ends.map(|(start, end)| [start, end].map(|end| usize::from_str_radix(end, 16).unwrap_or(0)));
        ends.is_some_and(|[start, end]| (start..end).contains(&address))
    };
    let mut rest = smaps.lines().skip_while(|line| !holds(line));
    let size = rest.find_map(|line| line.strip_prefix("KernelPageSize:")).unwrap();
    let flags = rest.find_map(|line| line.strip_prefix("VmFlags:")).unwrap();
    (size.trim().trim_end_matches(" kB").parse().unwrap(), !flags.contains(" dc"))
}

/// Whether each piece of a buffer has reserved huge pages.
fn reserved(buffer: &PinnedBuffer<u8>) -> Vec<bool> {
    let at = |offset: usize| mapping(buffer.ptr().address() + offset);
    let pieces = buffer.registrations().map(|part| at(part.start));
    pieces.inspect(|(_, is_inherited)| assert!(!is_inherited)).map(|(size, _)| size == 2048).collect()
}

/// Copies a pattern to the device and back.
fn check_copies(runtime: &Runtime, pinned: &mut PinnedBuffer<u8>) {
    let device = runtime.device(0).unwrap();
    let (stream, buffer) = (device.create_stream().unwrap(), device.allocate::<u8>(pinned.len()).unwrap());
    let values: Vec<u8> = (0..pinned.len()).map(|at| (at % 251) as u8).collect();
    pinned.write().unwrap().copy_from_slice(&values);
    stream.copy_to_device(&*pinned, &buffer).unwrap();
    pinned.write().unwrap().fill(0);
    stream.copy_to_host(&buffer, &mut *pinned).unwrap();
    assert!(pinned.read().unwrap() == values);
}

fn end(gpu: &MockGpu, runtime: Runtime) {
    assert_eq!(gpu.violations(), []);
    assert_eq!(runtime.close().unwrap().total(), 0);
}

/// One test: the number of reserved pages belongs to the whole machine.
#[test]
fn reserved_huge_pages_serve_as_far_as_they_go_and_return() {
    // Without any.
    let (gpu, runtime) = open(MockOptions::new());
    if free_pages().is_none_or(|free| free == 0) {
        let mut pinned = runtime.pinned::<u8>(5 * MIB).unwrap();
        assert_eq!(reserved(&pinned), [false; 3]);
        check_copies(&runtime, &mut pinned);
    }
    end(&gpu, runtime);

    let _reserved = match Reserved::new(PAGES) {
        Ok(reserved) => reserved,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let free = || free_pages().unwrap();
    let (gpu, runtime) = open(MockOptions::new());
    let mut first = runtime.pinned::<u8>(5 * MIB).unwrap();
    assert_eq!((reserved(&first), free()), (vec![true; 3], PAGES - 3));
    check_copies(&runtime, &mut first);
    runtime.trim().unwrap();
    assert_eq!(free(), PAGES - 3, "a live buffer stays");
    // Pieces of both kinds are one range: a block may lie in both.
    let mut second = runtime.pinned::<u8>(17 * MIB).unwrap();
    assert_eq!(second.ptr(), first.ptr().offset(5 * MIB), "behind the first");
    let kinds = reserved(&second);
    assert_eq!((kinds[1..6].to_vec(), kinds[6..].to_vec()), (vec![true; 5], vec![false; 3]), "{kinds:?}");
    assert_eq!(free(), 0);
    check_copies(&runtime, &mut second);
    let statistics = runtime.statistics().host;
    assert_eq!((statistics.held_bytes, statistics.pieces, statistics.broken_law()), (22 * MIB as u64, 11, None));
    // The pages return, and the places are used again.
    let start = first.ptr();
    drop((first, second));
    runtime.trim().unwrap();
    assert_eq!((free(), runtime.statistics().host.held_bytes), (PAGES, 0));
    let mut again = runtime.pinned::<u8>(5 * MIB).unwrap();
    assert_eq!((again.ptr(), reserved(&again)), (start, vec![true; 3]));
    assert!(again.write().unwrap().iter().all(|byte| *byte == 0), "new pages");
    drop(again);
    end(&gpu, runtime);
    assert_eq!(free(), PAGES, "the end of the runtime leaves nothing");

    // The cap counts them.
    let (gpu, runtime) = open_with(MockOptions::new(), HostMemoryOptions::new().with_cap_bytes(4 * MIB as u64));
    let whole = runtime.pinned::<u8>(4 * MIB).unwrap();
    assert_eq!(reserved(&whole), [true; 2]);
    let error = runtime.pinned::<u8>(2 * MIB).unwrap_err();
    assert!(error.message().contains("the cap is 4194304 bytes"), "{error}");
    drop(whole);
    end(&gpu, runtime);

    // A registration that fails.
    let (gpu, runtime) = open(MockOptions::new().with_host_memory_bytes(4 * MIB as u64));
    assert!(runtime.pinned::<u8>(6 * MIB).is_err());
    assert_eq!((free(), runtime.statistics().host.held_bytes), (PAGES, 0));
    end(&gpu, runtime);
}
