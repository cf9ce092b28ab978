//! The device memory that streams allocate: random programs beside the race finder, and each promise of `docs/device-memory.md`.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use highwater_core::{
    Backend, Device, DeviceBuffer, DeviceMemoryOptions, DeviceMemoryStatistics, ErrorKind, Location, MemoryFill,
    Runtime, RuntimeOptions, SplitMix64, Stream,
};
use highwater_mock::{MockGpu, MockOptions, Operation};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

fn open(mock: MockOptions, options: DeviceMemoryOptions) -> (Arc<MockGpu>, Runtime, Device) {
    let gpu = MockGpu::open(mock).unwrap();
    let runtime = Runtime::with_options(gpu.clone(), &RuntimeOptions::new().with_device_memory(options)).unwrap();
    let device = runtime.device(0).unwrap();
    (gpu, runtime, device)
}

fn default() -> (Arc<MockGpu>, Runtime, Device) {
    open(MockOptions::new(), DeviceMemoryOptions::new())
}

fn memory(runtime: &Runtime) -> DeviceMemoryStatistics {
    runtime.statistics().device_memory
}

/// Every byte that the pool holds is in one state.
fn check_sum(memory: &DeviceMemoryStatistics) {
    let states = [
        memory.live_bytes,
        memory.free_bytes,
        memory.slab_bytes,
        memory.spare_bytes,
        memory.cached_bytes,
        memory.waiting_bytes,
        memory.unmarked_bytes,
    ];
    assert_eq!(states.iter().sum::<u64>(), memory.held_bytes, "{memory:?}");
}

fn end(runtime: Runtime) {
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn a_repeat_request_makes_no_call_of_the_backend() {
    let (gpu, runtime, device) = default();
    let stream = device.create_stream().unwrap();
    let calls = || Operation::ALL.iter().map(|operation| gpu.calls(*operation)).sum::<u64>();
    for bytes in [100, 4 * KIB, MIB, 64 * MIB] {
        for _ in 0..3 {
            drop(stream.allocate::<u8>(bytes).unwrap());
        }
        let before = calls();
        for _ in 0..100 {
            drop(stream.allocate::<u8>(bytes).unwrap());
        }
        assert_eq!(calls(), before, "{bytes} bytes");
    }
    check_sum(&memory(&runtime));
    drop((stream, device));
    end(runtime);
}

#[test]
fn free_memory_of_a_stream_that_has_executed_everything_moves_to_the_stream_that_needs_it() {
    for plain in [false, true] {
        let (_gpu, runtime, device) =
            open(MockOptions::new(), DeviceMemoryOptions::new().with_plain_allocations(plain));
        let (first, second) = (device.create_stream().unwrap(), device.create_stream().unwrap());
        let buffer = first.allocate::<u8>(64 * MIB).unwrap();
        first.fill(&buffer, 1).unwrap();
        drop(buffer);
        first.synchronize().unwrap();
        let before = memory(&runtime);
        let buffer = second.allocate::<u8>(64 * MIB).unwrap();
        let after = memory(&runtime);
        assert_eq!((after.held_bytes, after.allocations), (before.held_bytes, before.allocations), "plain: {plain}");
        assert_eq!(after.moved_bytes, 64 * MIB as u64);
        second.fill(&buffer, 2).unwrap();
        assert!(second.download(&buffer).unwrap().iter().all(|byte| *byte == 2));
        check_sum(&after);
        drop((buffer, first, second, device));
        end(runtime);
    }
}

#[test]
fn a_growth_extends_free_memory_beside_a_place_whose_parts_have_moved() {
    let (_gpu, runtime, device) = default();
    let (first, second) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let [moving, neighbor, last] = [4, 8, 2].map(|mib| first.allocate::<u8>(mib * MIB).unwrap());
    drop(moving);
    let of_second = second.allocate::<u8>(4 * MIB).unwrap();
    assert_eq!((memory(&runtime).held_bytes, memory(&runtime).moved_bytes), (14 * MIB as u64, 4 * MIB as u64));
    drop(neighbor);
    // The free 8 MiB and the place of the 4 MiB before it.
    let large = first.allocate::<u8>(12 * MIB).unwrap();
    assert_eq!((memory(&runtime).held_bytes, memory(&runtime).moved_bytes), (18 * MIB as u64, 4 * MIB as u64));
    first.fill(&large, 7).unwrap();
    assert!(first.download(&large).unwrap().iter().all(|byte| *byte == 7));
    check_sum(&memory(&runtime));
    drop((large, last, of_second, first, second, device));
    end(runtime);
}

/// One may take the free pages that the growth of another counts on.
#[test]
fn threads_that_share_a_stream_grow_its_memory_at_once() {
    for (plain, poison) in [(false, false), (true, false), (false, true)] {
        let options = DeviceMemoryOptions::new().with_plain_allocations(plain).with_poison(poison);
        let (_gpu, runtime, device) = open(MockOptions::new(), options);
        let stream = device.create_stream().unwrap();
        let running = AtomicUsize::new(8);
        std::thread::scope(|scope| {
            // So that the memory grows again and again.
            scope.spawn(|| {
                while running.load(Ordering::Relaxed) > 0 {
                    runtime.trim_device_memory().unwrap();
                    std::thread::sleep(Duration::from_micros(50));
                }
            });
            for seed in 0..8 {
                let (stream, running) = (&stream, &running);
                scope.spawn(move || {
                    let mut random = SplitMix64::new(seed);
                    let mut live = Vec::new();
                    for _ in 0..if poison { 40 } else { 200 } {
                        live.push(stream.allocate::<u8>(4096 << (random.draw() % 12)).unwrap());
                        if live.len() > 12 {
                            live.clear();
                        }
                    }
                    running.fetch_sub(1, Ordering::Relaxed);
                });
            }
        });
        check_sum(&memory(&runtime));
        drop((stream, device));
        end(runtime);
    }
}

/// A stream that starts while another grows must not look like one that has ended.
#[test]
fn streams_start_and_end_in_all_threads_while_memory_grows() {
    let (_gpu, runtime, device) = default();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for round in 0..150_usize {
                    let stream = device.create_stream().unwrap();
                    let buffer = stream.allocate::<u8>((round % 5 + 1) * MIB).unwrap();
                    stream.fill(&buffer, 1).unwrap();
                }
            });
        }
    });
    check_sum(&memory(&runtime));
    assert_eq!(runtime.statistics().failed_releases, 0);
    drop(device);
    end(runtime);
}

#[test]
fn memory_of_a_stream_that_is_behind_stays_with_it() {
    for plain in [false, true] {
        let options = DeviceMemoryOptions::new().with_plain_allocations(plain);
        let (gpu, runtime, device) = open(MockOptions::new().with_held_streams(), options);
        let (behind, other) = (device.create_stream().unwrap(), device.create_stream().unwrap());
        let buffer = behind.allocate::<u8>(4 * MIB).unwrap();
        behind.fill(&buffer, 1).unwrap();
        drop(buffer);
        let of_other = other.allocate::<u8>(4 * MIB).unwrap();
        assert_eq!((memory(&runtime).held_bytes, memory(&runtime).moved_bytes), (8 * MIB as u64, 0), "plain: {plain}");
        gpu.release_stream(behind.id()).unwrap();
        let more = other.allocate::<u8>(4 * MIB).unwrap();
        assert_eq!(memory(&runtime).held_bytes, 8 * MIB as u64);
        assert_eq!(memory(&runtime).moved_bytes, 4 * MIB as u64);
        drop((of_other, more, behind, other, device));
        end(runtime);
    }
}

#[test]
fn a_request_above_the_cap_is_refused_with_the_numbers_and_later_ones_succeed() {
    let (_gpu, runtime, device) = open(MockOptions::new(), DeviceMemoryOptions::new().with_cap_bytes(8 * MIB as u64));
    let stream = device.create_stream().unwrap();
    let buffer = stream.allocate::<u8>(6 * MIB).unwrap();
    let error = stream.allocate::<u8>(4 * MIB).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    assert!(error.message().contains("the cap is 8388608"), "{error}");
    assert!(memory(&runtime).peak_held_bytes <= 8 * MIB as u64);
    drop(buffer);
    // The free parts serve it, and those of another stream.
    drop(stream.allocate::<u8>(8 * MIB).unwrap());
    let other = device.create_stream().unwrap();
    drop(other.allocate::<u8>(8 * MIB).unwrap());
    assert!(memory(&runtime).peak_held_bytes <= 8 * MIB as u64);
    drop((stream, other, device));
    end(runtime);
}

#[test]
fn an_exhausted_device_is_an_error_that_names_what_the_runtime_holds() {
    let (_gpu, runtime, device) =
        open(MockOptions::new().with_memory_bytes(64 * MIB as u64), DeviceMemoryOptions::new());
    let stream = device.create_stream().unwrap();
    let (plain, ordered) = (device.allocate::<u8>(20 * MIB).unwrap(), stream.allocate::<u8>(30 * MIB).unwrap());
    for error in [stream.allocate::<u8>(20 * MIB).unwrap_err(), device.allocate::<u8>(20 * MIB).unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        let held = format!("{} in buffers of `Device::allocate`", 20 * MIB);
        assert!(error.message().contains(&held), "{error}");
        assert!(error.message().contains(&format!("{} of them in buffers", 30 * MIB)), "{error}");
        assert!(!error.hint().is_empty());
    }
    drop(ordered);
    // The memory of the stream goes back for a request of another kind.
    stream.synchronize().unwrap();
    drop(device.allocate::<u8>(40 * MIB).unwrap());
    drop((plain, stream, device));
    end(runtime);
}

#[test]
fn plain_allocations_use_no_mapped_memory() {
    let (gpu, runtime, device) = open(MockOptions::new(), DeviceMemoryOptions::new().with_plain_allocations(true));
    let stream = device.create_stream().unwrap();
    let buffers: Vec<_> = [100, MIB, 5 * MIB].map(|bytes| stream.allocate::<u8>(bytes).unwrap()).into();
    assert_eq!((gpu.live_objects().physical_memory, gpu.live_objects().reservations), (0, 0));
    assert_eq!(gpu.live_objects().allocations, memory(&runtime).parts);
    drop((buffers, stream, device));
    end(runtime);
}

#[test]
fn streams_that_come_and_go_leave_their_memory_to_the_next() {
    for plain in [false, true] {
        let options = DeviceMemoryOptions::new().with_plain_allocations(plain);
        let (gpu, runtime, device) = open(MockOptions::new(), options);
        for _ in 0..200 {
            let stream = device.create_stream().unwrap();
            let buffer = stream.allocate::<u8>(3 * MIB).unwrap();
            stream.fill(&buffer, 1).unwrap();
            stream.synchronize().unwrap();
        }
        let memory = memory(&runtime);
        // A few: the end of a stream takes its time on a busy machine.
        assert!(memory.held_bytes <= 100 * MIB as u64, "plain: {plain}, {memory:?}");
        assert!(gpu.live_objects().reservations <= 25);
        assert_eq!((memory.live_blocks, memory.misses), (0, 200));
        check_sum(&memory);
        drop(device);
        end(runtime);
    }
}

#[test]
fn a_trim_gives_back_what_no_work_uses() {
    let (gpu, runtime, device) = open(MockOptions::new().with_held_streams(), DeviceMemoryOptions::new());
    let (done, behind) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    drop(done.allocate::<u8>(10 * MIB).unwrap());
    let kept = done.allocate::<u8>(100).unwrap();
    let used = behind.allocate::<u8>(6 * MIB).unwrap();
    behind.fill(&used, 1).unwrap();
    drop(used);
    runtime.trim().unwrap();
    assert_eq!(memory(&runtime).held_bytes, (2 + 6) * MIB as u64);
    gpu.release_stream(behind.id()).unwrap();
    runtime.trim().unwrap();
    assert_eq!(memory(&runtime).held_bytes, 2 * MIB as u64);
    check_sum(&memory(&runtime));
    drop((kept, done, behind, device));
    end(runtime);
}

/// A buffer, its value, and the stream on which it was written last.
struct Live {
    buffer: DeviceBuffer<u8>,
    value: u8,
    writer: usize,
}

#[test]
fn memory_for_network_adapters_is_created_so_or_allocated() {
    for can in [true, false] {
        let mock = MockOptions::new().with_capabilities(move |capabilities| capabilities.mapped_memory_rdma = can);
        let (gpu, runtime, device) = open(mock, DeviceMemoryOptions::new().with_rdma(true));
        let stream = device.create_stream().unwrap();
        drop(stream.allocate::<u8>(MIB).unwrap());
        let calls = [gpu.calls(Operation::CreateMemory), gpu.calls(Operation::Allocate)];
        assert_eq!(calls.map(|calls| calls > 0), [can, !can]);
        drop((stream, device));
        end(runtime);
    }
}

/// Random programs that order their own work. The race finder must report nothing, and every buffer must keep its value: memory
/// reaches another buffer only after the work on the earlier one.
fn random_program(seed: u64, plain: bool) {
    let mock = MockOptions::new().with_race_detector().with_schedule(seed).with_memory_bytes(64 * MIB as u64);
    let options = DeviceMemoryOptions::new().with_plain_allocations(plain).with_poison(seed % 8 == 7);
    let (gpu, runtime, device) = open(mock, options);
    let mut random = SplitMix64::new(seed);
    let mut below = |limit: usize| (random.draw() % limit as u64) as usize;
    let stream = || device.create_stream().unwrap();
    let mut streams: Vec<Stream> = (0..3).map(|_| stream()).collect();
    let mut live: Vec<Live> = Vec::new();
    for step in 0..120 {
        let value = (step + 1) as u8;
        match below(10) {
            0..=3 => {
                let bytes = [200, 3000, 70 * KIB, 700 * KIB, 3 * MIB][below(5)];
                let home = below(streams.len());
                let buffer = streams[home].allocate::<u8>(bytes).unwrap();
                // Written first at home or elsewhere.
                let writer = if below(3) == 0 { below(streams.len()) } else { home };
                streams[writer].fill(&buffer, value).unwrap();
                live.push(Live { buffer, value, writer });
            }
            4 | 5 if !live.is_empty() => {
                let index = below(live.len());
                let writer = below(streams.len());
                let each = &mut live[index];
                streams[writer].wait(&streams[each.writer].record().unwrap()).unwrap();
                streams[writer].fill(&each.buffer, value).unwrap();
                (each.value, each.writer) = (value, writer);
            }
            6 | 7 if !live.is_empty() => drop(live.swap_remove(below(live.len()))),
            8 => match below(4) {
                0 => runtime.trim().unwrap(),
                1 => {
                    let ended = below(streams.len());
                    // Its work is done, so no event of it is needed below.
                    streams[ended].synchronize().unwrap();
                    streams[ended] = stream();
                }
                _ => streams[below(streams.len())].synchronize().unwrap(),
            },
            _ if !live.is_empty() => {
                let each = &live[below(live.len())];
                let values = streams[each.writer].download(&each.buffer).unwrap();
                assert!(values.iter().all(|value| *value == each.value), "seed {seed}, step {step}, plain {plain}");
            }
            _ => {}
        }
        check_sum(&memory(&runtime));
    }
    gpu.check_races().unwrap();
    drop((live, streams, device));
    end(runtime);
}

#[test]
fn random_programs_have_no_race_and_keep_their_values() {
    for seed in 0..40 {
        random_program(seed, seed % 3 == 0);
    }
}

/// A program's own work that it did not note with [`Stream::note_device_use`].
#[test]
fn the_race_finder_reports_work_on_freed_memory_once_another_stream_has_it() {
    let (gpu, runtime, device) = open(MockOptions::new().with_race_detector(), DeviceMemoryOptions::new());
    let (first, own) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let buffer = first.allocate::<u8>(4 * KIB).unwrap();
    first.fill(&buffer, 1).unwrap();
    own.wait(&first.record().unwrap()).unwrap();
    let fill = MemoryFill::new(0, buffer.ptr(), highwater_core::FillPattern::U8(2), 4 * KIB);
    // SAFETY: The mock checks the range, which stays mapped. The missing note is what the test is about.
    unsafe { gpu.fill(&fill, own.id()) }.unwrap();
    drop(buffer);
    gpu.check_races().unwrap();
    let next = first.allocate::<u8>(4 * KIB).unwrap();
    assert_eq!(Location::Device { device: 0, ptr: next.ptr() }, Location::Device { device: 0, ptr: fill.dst });
    first.fill(&next, 3).unwrap();
    assert_eq!(gpu.races().len(), 1, "{:?}", gpu.races());
    drop((next, first, own, device));
    end(runtime);
}

#[test]
fn buffers_that_no_stream_allocated_are_counted_for_each_device() {
    let gpu = MockGpu::open(MockOptions::new().with_devices(2)).unwrap();
    let runtime = Runtime::new(gpu).unwrap();
    let devices = [runtime.device(0).unwrap(), runtime.device(1).unwrap()];
    let buffers = || {
        let of_device = |device: &Device| (device.buffers().blocks, device.buffers().bytes);
        let sum = runtime.statistics().buffers;
        (of_device(&devices[0]), of_device(&devices[1]), (sum.blocks, sum.bytes))
    };
    assert_eq!(buffers(), ((0, 0), (0, 0), (0, 0)));
    let stream = devices[0].create_stream().unwrap();
    let of_stream = stream.allocate::<u8>(4096).unwrap();
    let plain = devices[0].allocate::<f32>(1024).unwrap();
    let shared = devices[1].allocate_shared::<u8>(100).unwrap();
    let ((blocks, bytes), (far_blocks, far_bytes), sum) = buffers();
    assert_eq!((blocks, bytes, far_blocks), (1, 4096, 1), "without memory of streams");
    assert!(far_bytes >= 100, "{far_bytes}");
    assert_eq!(sum, (2, bytes + far_bytes));
    let text = runtime.statistics().to_string();
    assert!(text.contains("device memory of buffers: 2 blocks (4."), "{text}");
    // A dropped buffer is not live, even if its memory waits for a stream.
    stream.fill(&plain, 1.0_f32).unwrap();
    drop((plain, shared));
    assert_eq!(buffers(), ((0, 0), (0, 0), (0, 0)));
    drop((stream, of_stream, devices));
    assert_eq!(runtime.close().unwrap().total(), 0);
}
