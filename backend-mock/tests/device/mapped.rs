//! Mapped memory: wrong uses, the checks of test mode, and the race finder.

use highwater_hal::{Backend, DevicePtr, ErrorKind, FillPattern, PhysicalMemoryId, PhysicalMemoryOptions, Result};
use highwater_mock::races::RaceKind;
use highwater_mock::{MockOptions, Operation};

use crate::rig::{Rig, at, kind, millis, small};

/// The granularity of the mock.
const PIECE: usize = 64 << 10;

fn two() -> MockOptions {
    small().with_devices(2)
}

fn reserve(rig: &Rig, pieces: usize) -> DevicePtr {
    rig.gpu.reserve_addresses(0, pieces * PIECE).unwrap()
}

fn create(rig: &Rig, pieces: usize) -> PhysicalMemoryId {
    rig.gpu.create_memory(0, &PhysicalMemoryOptions::new(pieces * PIECE)).unwrap()
}

fn map(rig: &Rig, ptr: DevicePtr, memory: PhysicalMemoryId) -> Result<()> {
    // SAFETY: the range belongs to the test; anything else is what the mock refuses.
    unsafe { rig.gpu.map_memory(0, ptr, memory) }
}

fn access(rig: &Rig, ptr: DevicePtr, pieces: usize, device: u32) -> Result<()> {
    // SAFETY: as in `map`.
    unsafe { rig.gpu.set_memory_access(0, ptr, pieces * PIECE, device) }
}

fn unmap(rig: &Rig, ptr: DevicePtr, pieces: usize) -> Result<()> {
    // SAFETY: as in `map`. A test that unmaps memory in use gives up its device.
    unsafe { rig.gpu.unmap_memory(0, ptr, pieces * PIECE) }
}

/// Maps new memory with access for the first device.
fn map_new(rig: &Rig, ptr: DevicePtr, pieces: usize) -> PhysicalMemoryId {
    let memory = create(rig, pieces);
    map(rig, ptr, memory).unwrap();
    access(rig, ptr, pieces, 0).unwrap();
    memory
}

#[test]
fn memory_is_reached_by_devices_with_access_while_it_is_mapped() {
    let rig = Rig::new(two());
    let (ptr, far) = (reserve(&rig, 2), rig.stream(1));
    let fill = |stream| rig.fill(ptr, FillPattern::U8(1), 64, stream);
    assert_eq!(kind(fill(rig.stream)), ErrorKind::InvalidPointer);
    map(&rig, ptr, create(&rig, 1)).unwrap();
    assert_eq!(kind(fill(rig.stream)), ErrorKind::InvalidPointer);
    access(&rig, ptr, 1, 0).unwrap();
    fill(rig.stream).unwrap();
    let error = fill(far).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidPointer);
    assert!(error.hint().contains("set_memory_access"), "{error}");
    access(&rig, ptr, 1, 1).unwrap();
    access(&rig, ptr, 1, 1).unwrap();
    rig.gpu.synchronize_stream(rig.stream).unwrap();
    assert_eq!(rig.download::<u8>(ptr, 64, far), [1; 64]);
    // Past the end of the mapping, in the reserved range.
    let edge = ptr.offset(PIECE - 32);
    assert_eq!(kind(rig.fill(edge, FillPattern::U8(1), 64, rig.stream)), ErrorKind::InvalidPointer);
    rig.gpu.synchronize_device(0).unwrap();
    unmap(&rig, ptr, 1).unwrap();
    assert_eq!((kind(fill(rig.stream)), kind(fill(far))), (ErrorKind::InvalidPointer, ErrorKind::InvalidPointer));
    assert_eq!(kind(unmap(&rig, ptr, 1)), ErrorKind::InvalidPointer);
}

#[test]
fn physical_memory_takes_bytes_of_the_device_and_gives_them_back() {
    let rig = Rig::new(small());
    let free = || rig.gpu.memory_info(0).unwrap().free;
    let (before, ptr) = (free(), reserve(&rig, 1 << 20));
    assert_eq!(free(), before, "addresses take no memory");
    let memory = map_new(&rig, ptr, 3);
    assert_eq!(before - free(), 3 * PIECE as u64);
    rig.gpu.destroy_memory(memory).unwrap();
    assert_eq!(before - free(), 3 * PIECE as u64, "mapped memory stays");
    unmap(&rig, ptr, 3).unwrap();
    assert_eq!(free(), before);
    assert_eq!(kind(rig.gpu.create_memory(0, &PhysicalMemoryOptions::new(65 << 20))), ErrorKind::OutOfMemory);
    assert_eq!(free(), before);
}

#[test]
fn memory_that_is_unmapped_while_a_fill_is_queued_is_found() {
    let rig = Rig::new(small().with_checks().with_latency(millis(200)));
    let ptr = reserve(&rig, 3);
    let memory = [map_new(&rig, ptr, 1), map_new(&rig, ptr.offset(PIECE), 2)];
    rig.fill(ptr.offset(PIECE - 8), FillPattern::U8(1), 16, rig.stream).unwrap();
    unmap(&rig, ptr.offset(PIECE), 2).unwrap();
    let violations = rig.gpu.violations();
    assert_eq!((violations.len(), violations[0].operation), (1, Operation::UnmapMemory), "{violations:#?}");
    let text = violations[0].to_string();
    assert!(text.contains("were unmapped while `fill` was queued or running"), "{text}");
    // The fill finds nothing there, and the device is lost.
    assert_eq!(kind(rig.gpu.synchronize_stream(rig.stream)), ErrorKind::DeviceLost);
    memory.into_iter().for_each(|memory| rig.gpu.destroy_memory(memory).unwrap());
}

#[test]
fn races_on_mapped_bytes_are_found_by_where_they_lie() {
    let rig = Rig::new(two().with_race_detector());
    let (ptr, other) = (reserve(&rig, 4), rig.stream(0));
    let memory = [map_new(&rig, ptr, 1), map_new(&rig, ptr.offset(PIECE), 1)];
    let fill = |offset: usize, bytes, stream| rig.fill(ptr.offset(offset), FillPattern::U8(1), bytes, stream).unwrap();
    // Neighbors on both sides of a border.
    fill(0, PIECE, rig.stream);
    fill(PIECE, PIECE, other);
    rig.gpu.check_races().unwrap();
    rig.gpu.synchronize_device(0).unwrap();
    // One fill over the border, and one behind it.
    fill(PIECE - 64, 128, rig.stream);
    fill(PIECE + 32, 8, other);
    let races = rig.gpu.races();
    assert_eq!((races.len(), races[0].kind()), (1, RaceKind::Unordered), "{races:#?}");
    assert_eq!((races[0].overlap().address, races[0].overlap().bytes), (ptr.get() + PIECE as u64 + 32, 8));
    rig.gpu.synchronize_device(0).unwrap();
    // The same bytes at two addresses.
    map(&rig, ptr.offset(3 * PIECE), memory[0]).unwrap();
    access(&rig, ptr.offset(3 * PIECE), 1, 0).unwrap();
    fill(16, 16, rig.stream);
    fill(3 * PIECE, 16, other);
    assert_eq!(rig.gpu.race_count(), 1, "other bytes");
    fill(3 * PIECE + 20, 4, other);
    assert_eq!(rig.gpu.race_count(), 2, "{:#?}", rig.gpu.races());
    rig.gpu.synchronize_device(0).unwrap();
    // Unmapped while nothing says that the fill is over.
    fill(PIECE, 64, rig.stream);
    unmap(&rig, ptr.offset(PIECE), 1).unwrap();
    assert_eq!(rig.gpu.race_count(), 3, "{:#?}", rig.gpu.races());
}

#[test]
fn copies_overlap_by_address_and_borders_may_lie_anywhere() {
    let rig = Rig::new(small());
    let ptr = reserve(&rig, 4);
    let sizes = [1, 2, 1];
    let starts = [0, 1, 3];
    for (start, pieces) in starts.into_iter().zip(sizes) {
        map_new(&rig, ptr.offset(start * PIECE), pieces);
    }
    let values: Vec<u8> = (0..4 * PIECE).map(|index| (index * 31 % 251) as u8).collect();
    rig.write(ptr, &values);
    assert_eq!(rig.download::<u8>(ptr, 4 * PIECE, rig.stream), values);
    assert_eq!(
        kind(rig.copy(at(0, ptr.offset(PIECE - 8)), at(0, ptr.offset(PIECE)), 16, rig.stream)),
        ErrorKind::InvalidArgument
    );
    rig.copy(at(0, ptr.offset(3 * PIECE - 5)), at(0, ptr.offset(PIECE - 3)), 11, rig.stream).unwrap();
    let mut expected = values.clone();
    expected.copy_within(PIECE - 3..PIECE + 8, 3 * PIECE - 5);
    assert_eq!(rig.download::<u8>(ptr, 4 * PIECE, rig.stream), expected);
}

#[test]
fn the_granularity_is_an_option_and_zero_without_the_ability() {
    let granularity = |text: &str| {
        let rig = Rig::new(MockOptions::parse(text).unwrap());
        let capabilities = rig.gpu.capabilities(0).unwrap();
        (capabilities.mapped_memory, capabilities.mapped_memory_rdma, capabilities.mapped_memory_granularity)
    };
    assert_eq!(granularity("memory=1MiB"), (true, true, PIECE));
    assert_eq!(granularity("memory=8MiB,mapped-memory-granularity=2MiB"), (true, true, 2 << 20));
    assert_eq!(granularity("memory=1MiB,mapped-memory=off"), (false, false, 0));
    let odd = MockOptions::parse("mapped-memory-granularity=100").unwrap();
    let error = highwater_mock::MockGpu::open(odd).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.message().contains("100 bytes"), "{error}");
}
