//! The test mode of device memory: it finds writes after the free, and mistakes of the pool, which the race finder of the mock finds
//! too.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use highwater_hal::{Backend, FillPattern, MemoryFill};
use highwater_mock::{MockGpu, MockOptions};

use super::device_pool::Wrongly;
use crate::{Device, DeviceMemoryOptions, ErrorKind, Runtime, RuntimeOptions};

const MIB: usize = 1 << 20;

fn open(mock: MockOptions, plain: bool, poison: bool) -> (Arc<MockGpu>, Runtime, Device) {
    let gpu = MockGpu::open(mock).unwrap();
    let memory = DeviceMemoryOptions::new().with_plain_allocations(plain).with_poison(poison);
    let runtime = Runtime::with_options(gpu.clone(), &RuntimeOptions::new().with_device_memory(memory)).unwrap();
    let device = runtime.device(0).unwrap();
    (gpu, runtime, device)
}

/// Makes the pool of a device make a mistake.
fn mistake(runtime: &Runtime, which: impl Fn(&Wrongly) -> &AtomicBool) {
    which(&runtime.inner.frees.memory.pool(0).wrongly).store(true, Ordering::Relaxed);
}

#[test]
fn a_write_after_the_free_is_found_at_the_reuse_and_the_memory_serves_again() {
    for (plain, bytes) in [(false, 100), (false, 4096), (false, 3 * MIB), (true, 100), (true, 3 * MIB)] {
        let (gpu, runtime, device) = open(MockOptions::new(), plain, true);
        let stream = device.create_stream().unwrap();
        let ptr = stream.allocate::<u8>(bytes).unwrap().ptr();
        let fill = MemoryFill::new(0, ptr.offset(70), FillPattern::U8(7), 1);
        // SAFETY: The mock checks the addresses, which stay mapped.
        unsafe { gpu.fill(&fill, stream.id()) }.unwrap();
        let error = stream.allocate::<u8>(bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidState);
        let start = format!("the block of {bytes} bytes at {ptr} was written at offset 70 after it was freed");
        assert!(error.message().starts_with(&start) && error.message().ends_with("0x07"), "{error}");
        assert_eq!(stream.allocate::<u8>(bytes).unwrap().ptr(), ptr);
        assert_eq!(runtime.statistics().device_memory.live_blocks, 0);
        drop((stream, device));
        assert_eq!(runtime.close().unwrap().total(), 0);
    }
}

#[test]
fn sound_programs_are_not_reported() {
    for plain in [false, true] {
        let (gpu, runtime, device) = open(MockOptions::new().with_race_detector(), plain, true);
        let streams = [device.create_stream().unwrap(), device.create_stream().unwrap()];
        let mut live = Vec::new();
        for round in 0..120_usize {
            let (stream, other) = (&streams[round % 2], &streams[(round + 1) % 2]);
            let buffer = stream.allocate::<u8>([100, 5000, MIB, 3 * MIB][round % 4]).unwrap();
            stream.fill(&buffer, round as u8).unwrap();
            other.wait(&stream.record().unwrap()).unwrap();
            other.fill(&buffer, 1).unwrap();
            stream.wait(&other.record().unwrap()).unwrap();
            live.push(buffer);
            if live.len() > 5 {
                drop(live.remove(round % 5));
            }
            if round % 20 == 19 {
                live.clear();
                device.synchronize().unwrap();
                runtime.trim_device_memory().unwrap();
                let graph = stream.capture(|stream| stream.fill(&stream.allocate::<u8>(MIB)?, 1)).unwrap();
                drop(graph);
            }
        }
        gpu.check_races().unwrap();
        drop((live, streams, device));
        assert_eq!(runtime.close().unwrap().total(), 0);
    }
}

/// Memory of a stream that has not executed everything goes to another one.
#[test]
fn memory_that_moves_too_early_is_found_by_the_pattern_and_by_the_race_finder() {
    for (plain, poison) in [(false, true), (false, false), (true, true), (true, false)] {
        let mock = MockOptions::new().with_held_streams().with_race_detector();
        let (gpu, runtime, device) = open(mock, plain, poison);
        let (first, second) = (device.create_stream().unwrap(), device.create_stream().unwrap());
        let buffer = first.allocate::<u8>(4 * MIB).unwrap();
        first.fill(&buffer, 1).unwrap();
        drop(buffer);
        mistake(&runtime, |wrongly| &wrongly.takes_too_early);
        let taken = second.allocate::<u8>(4 * MIB);
        if poison {
            assert_eq!(taken.unwrap_err().kind(), ErrorKind::InvalidState, "plain: {plain}");
        } else {
            second.fill(&taken.unwrap(), 2).unwrap();
            assert!(gpu.check_races().is_err(), "plain: {plain}");
        }
    }
}

/// A block is free although another stream uses it.
#[test]
fn a_forgotten_use_is_found_by_the_pattern_and_by_the_race_finder() {
    for (plain, poison) in [(false, true), (false, false), (true, true), (true, false)] {
        let mock = MockOptions::new().with_held_streams().with_race_detector();
        let (gpu, runtime, device) = open(mock, plain, poison);
        mistake(&runtime, |wrongly| &wrongly.forgets_uses);
        let (home, other) = (device.create_stream().unwrap(), device.create_stream().unwrap());
        let buffer = home.allocate::<u8>(4096).unwrap();
        other.fill(&buffer, 2).unwrap();
        drop(buffer);
        if poison {
            home.synchronize().unwrap();
            gpu.release_stream(other.id()).unwrap();
            let error = home.allocate::<u8>(4096).unwrap_err();
            assert!(error.message().ends_with("0x02"), "plain: {plain}, {error}");
        } else {
            home.fill(&home.allocate::<u8>(4096).unwrap(), 3).unwrap();
            assert!(gpu.check_races().is_err(), "plain: {plain}");
        }
    }
}
