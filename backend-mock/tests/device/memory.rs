use std::ptr::NonNull;

use highwater_hal::{
    AllocateOptions, Backend, Completion, DeviceMemoryKind, DevicePtr, ErrorKind, FillPattern, HostMemoryKind,
    HostOptions, HostPtr, Location,
};
use proptest::prelude::*;

use crate::rig::{Rig, at, kind, millis, small};

#[test]
fn memory_is_counted_and_exhausted_exactly() {
    let rig = Rig::new(small());
    let info = || rig.gpu.memory_info(0).unwrap();
    assert_eq!((info().free, info().total), (64 << 20, 64 << 20));
    assert_eq!(rig.gpu.device_info(0).unwrap().memory_bytes, 64 << 20);
    let block = rig.allocate(0, 1000);
    assert!(block.is_aligned_to(256));
    assert_eq!((info().free, rig.gpu.live_objects().allocations), ((64 << 20) - 1024, 1));
    let error = rig.gpu.allocate(0, &AllocateOptions::new(64 << 20)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    assert!(error.message().contains("67108864 bytes were asked for"), "{error}");
    assert!(error.message().contains(&format!("{} of 67108864 bytes free", info().free)), "{error}");
    assert_eq!(kind(rig.gpu.allocate(0, &AllocateOptions::new(usize::MAX))), ErrorKind::OutOfMemory);
    assert_eq!(kind(rig.gpu.allocate(0, &AllocateOptions::new(0))), ErrorKind::InvalidArgument);
    assert_eq!(kind(rig.gpu.allocate(1, &AllocateOptions::new(1))), ErrorKind::InvalidArgument);
    let shareable = AllocateOptions::new(1).with_kind(DeviceMemoryKind::Shareable(highwater_hal::Transport::Legacy));
    assert_eq!(kind(rig.gpu.allocate(0, &shareable)), ErrorKind::Unsupported);
    let rest = rig.allocate(0, info().free as usize);
    assert_eq!(info().free, 0);
    rig.free(0, rest, None).unwrap();
    rig.free(0, block, None).unwrap();
    assert_eq!((info().free, rig.gpu.live_objects().allocations), (64 << 20, 0));
}

#[test]
fn only_the_start_of_a_live_block_can_be_freed() {
    let rig = Rig::new(small().with_devices(2));
    let block = rig.allocate(0, 1000);
    for (device, ptr) in [(0, block.offset(256)), (0, DevicePtr::new(4096)), (1, block), (0, DevicePtr::new(u64::MAX))]
    {
        assert_eq!(kind(rig.free(device, ptr, None)), ErrorKind::InvalidPointer);
    }
    assert_eq!(kind(rig.free(0, block, Some(rig.stream))), ErrorKind::InvalidArgument);
    rig.free(0, block, None).unwrap();
    assert_eq!(kind(rig.free(0, block, None)), ErrorKind::InvalidPointer);
}

#[test]
fn a_stream_ordered_free_happens_in_the_order_of_its_stream() {
    let rig = Rig::new(small().with_devices(2).with_latency(millis(30)));
    let options = AllocateOptions::new(1 << 20).with_kind(DeviceMemoryKind::StreamOrdered(rig.stream));
    let block = rig.gpu.allocate(0, &options).unwrap();
    let free_bytes = || rig.gpu.memory_info(0).unwrap().free;
    rig.fill(block, FillPattern::U8(1), 1 << 20, rig.stream).unwrap();
    assert_eq!(kind(rig.free(0, block, None)), ErrorKind::InvalidArgument);
    assert_eq!(kind(rig.free(0, block, Some(rig.stream(1)))), ErrorKind::WrongDevice);
    rig.free(0, block, Some(rig.stream)).unwrap();
    assert_eq!(kind(rig.fill(block, FillPattern::U8(1), 1, rig.stream)), ErrorKind::InvalidPointer);
    assert_eq!(rig.gpu.live_objects().allocations, 0);
    assert_eq!((free_bytes(), rig.gpu.query_stream(rig.stream).unwrap()), (63 << 20, Completion::Pending));
    rig.gpu.synchronize_stream(rig.stream).unwrap();
    assert_eq!(free_bytes(), 64 << 20);
    let elsewhere = AllocateOptions::new(1).with_kind(DeviceMemoryKind::StreamOrdered(rig.stream(1)));
    assert_eq!(kind(rig.gpu.allocate(0, &elsewhere)), ErrorKind::WrongDevice);
    let without = Rig::new(small().with_capabilities(|c| c.stream_ordered_memory = false));
    let options = AllocateOptions::new(1).with_kind(DeviceMemoryKind::StreamOrdered(without.stream));
    assert_eq!(kind(without.gpu.allocate(0, &options)), ErrorKind::Unsupported);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn copies_are_exact_at_odd_offsets_and_sizes(
        bytes in 0usize..9000,
        up in 0usize..17,
        across in 0usize..17,
        down in 0usize..17,
        seed in any::<u8>(),
    ) {
        let rig = Rig::new(small().with_devices(2));
        let total = 10_000;
        let source: Vec<u8> = (0..total).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect();
        let (first, second) = (rig.allocate(0, total), rig.allocate(1, total));
        let (pinned, other) = (rig.pinned(total), rig.stream(1));
        rig.fill(first, FillPattern::U8(0xee), total, rig.stream).unwrap();
        rig.fill(second, FillPattern::U8(0xdd), total, other).unwrap();
        rig.gpu.synchronize_stream(other).unwrap();
        // SAFETY: the block holds `total` bytes, and nothing is enqueued on it.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), pinned.as_ptr(), total) };
        // SAFETY: the address is inside the block.
        let from = HostPtr::new(NonNull::new(unsafe { pinned.as_ptr().add(down) }).unwrap());
        rig.copy(at(0, first.offset(up)), Location::Host(from), bytes, rig.stream).unwrap();
        rig.copy(at(1, second.offset(across)), at(0, first.offset(up)), bytes, rig.stream).unwrap();
        rig.gpu.synchronize_stream(rig.stream).unwrap();
        for (block, stream, offset, blank) in [(first, rig.stream, up, 0xee), (second, other, across, 0xdd)] {
            let mut expected = vec![blank; total];
            expected[offset..offset + bytes].copy_from_slice(&source[down..down + bytes]);
            prop_assert_eq!(rig.download::<u8>(block, total, stream), expected);
        }
    }
}

#[test]
fn fills_that_cannot_be_are_refused() {
    let rig = Rig::new(small());
    let block = rig.allocate(0, 256);
    assert_eq!(kind(rig.fill(block.offset(2), FillPattern::U32(0), 1, rig.stream)), ErrorKind::InvalidArgument);
    let too_many = rig.fill(block, FillPattern::U32(0), usize::MAX / 2, rig.stream);
    assert_eq!(kind(too_many), ErrorKind::InvalidArgument);
}

#[test]
fn ranges_outside_of_one_block_are_refused() {
    let rig = Rig::new(small().with_devices(2));
    let (block, neighbour, pinned) = (rig.allocate(0, 1000), rig.allocate(0, 1000), rig.pinned(100));
    let (device, host) = (at(0, block), Location::Host(pinned));
    assert_eq!(kind(rig.copy(device, host, 101, rig.stream)), ErrorKind::InvalidPointer);
    assert_eq!(kind(rig.copy(host, at(0, block.offset(950)), 51, rig.stream)), ErrorKind::InvalidPointer);
    assert_eq!(kind(rig.copy(at(1, block), host, 1, rig.stream(1))), ErrorKind::InvalidPointer);
    assert_eq!(kind(rig.fill(block, FillPattern::U8(0), 1001, rig.stream)), ErrorKind::InvalidPointer);
    let mut own = [0u8; 8];
    let pageable = Location::Host(HostPtr::new(NonNull::from(&mut own).cast()));
    assert_eq!(kind(rig.copy(device, pageable, 8, rig.stream)), ErrorKind::InvalidPointer);
    assert_eq!(kind(rig.copy(host, host, 8, rig.stream)), ErrorKind::InvalidArgument);
    assert_eq!(kind(rig.copy(at(0, block.offset(8)), device, 9, rig.stream)), ErrorKind::InvalidArgument);
    assert_eq!(kind(rig.copy(device, host, 8, rig.stream(1))), ErrorKind::WrongDevice);
    assert_eq!(kind(rig.copy(device, at(2, block), 8, rig.stream)), ErrorKind::InvalidArgument);
    rig.copy(device, at(0, neighbour), 1000, rig.stream).unwrap();
    rig.copy(device, pageable, 0, rig.stream).unwrap();
    let without = Rig::new(small().with_devices(2).with_capabilities(|c| c.peer_copy = false));
    let (here, there) = (without.allocate(0, 8), without.allocate(1, 8));
    assert_eq!(kind(without.copy(at(0, here), at(1, there), 8, without.stream)), ErrorKind::Unsupported);
}

#[test]
fn page_locked_memory_is_allocated_freed_and_counted() {
    let rig = Rig::new(small().with_host_memory_bytes(1 << 20));
    let block = rig.pinned(1000);
    assert_eq!((block.address() % 64, rig.gpu.live_objects().host_allocations), (0, 1));
    assert_eq!(kind(rig.host.allocate(1 << 20, &HostOptions::new())), ErrorKind::OutOfMemory);
    assert_eq!(kind(rig.host.allocate(usize::MAX, &HostOptions::new())), ErrorKind::OutOfMemory);
    assert_eq!(kind(rig.host.allocate(0, &HostOptions::new())), ErrorKind::InvalidArgument);
    assert_eq!(rig.host.device_address(block, 0).unwrap().get(), block.address() as u64);
    assert_eq!(kind(rig.host.device_address(block, 1)), ErrorKind::InvalidArgument);
    // SAFETY: the block is idle; the second free is what the mock refuses.
    unsafe {
        rig.host.free(block).unwrap();
        assert_eq!(kind(rig.host.free(block)), ErrorKind::InvalidPointer);
    }
    assert_eq!(rig.gpu.live_objects().host_allocations, 0);
    rig.pinned(1 << 20);
    let write_combined = HostOptions::new().with_kind(HostMemoryKind::WriteCombined);
    let without = Rig::new(small().with_capabilities(|c| {
        c.write_combined = false;
        c.host_address_is_device_address = false;
    }));
    assert_eq!(kind(without.host.allocate(64, &write_combined)), ErrorKind::Unsupported);
    let block = without.pinned(64);
    assert_ne!(without.host.device_address(block, 0).unwrap().get(), block.address() as u64);
}

#[test]
fn registered_memory_is_page_locked_until_it_is_unregistered() {
    let rig = Rig::new(small());
    let mut memory = vec![5u8; 4096];
    let place = |offset: usize, memory: &mut [u8]| HostPtr::new(NonNull::from(&mut memory[offset]));
    let (start, middle) = (place(0, &mut memory), place(2048, &mut memory));
    let block = rig.allocate(0, 4096);
    let options = HostOptions::new();
    // SAFETY: the vector outlives its registration, and is not touched while a copy uses it.
    unsafe {
        rig.host.register(start, 2048, &options).unwrap();
        assert_eq!(kind(rig.host.register(place(2047, &mut memory), 100, &options)), ErrorKind::InvalidArgument);
        assert_eq!(kind(rig.host.register(start, 1, &options)), ErrorKind::InvalidArgument);
        assert_eq!(kind(rig.host.register(middle, 0, &options)), ErrorKind::InvalidArgument);
        rig.host.register(middle, 2048, &options).unwrap();
        // Two registered ranges that touch are still two, in either direction, and there is no reaching out of the last one.
        for (from, bytes) in [(start, 4096), (start, 2049), (place(2047, &mut memory), 2), (middle, 2049)] {
            let across = rig.copy(at(0, block), Location::Host(from), bytes, rig.stream);
            assert_eq!(kind(across), ErrorKind::InvalidArgument, "{bytes} bytes at {from:?}");
            let across = rig.copy(Location::Host(from), at(0, block), bytes, rig.stream);
            assert_eq!(kind(across), ErrorKind::InvalidArgument, "{bytes} bytes at {from:?}");
        }
        rig.copy(at(0, block), Location::Host(start), 2048, rig.stream).unwrap();
        rig.gpu.synchronize_stream(rig.stream).unwrap();
        assert_eq!(kind(rig.host.free(start)), ErrorKind::InvalidPointer);
        assert_eq!(rig.gpu.live_objects().host_allocations, 2);
        rig.host.unregister(start).unwrap();
        rig.host.unregister(middle).unwrap();
        assert_eq!(kind(rig.host.unregister(start)), ErrorKind::InvalidPointer);
        assert_eq!(kind(rig.host.device_address(start, 0)), ErrorKind::InvalidPointer);
    }
    assert_eq!(rig.download::<u8>(block, 2048, rig.stream), [5; 2048]);
    let little = Rig::new(small().with_host_memory_bytes(4096));
    let filler = little.pinned(2048);
    // SAFETY: the vector outlives its registration, and no copy uses it.
    unsafe {
        assert_eq!(kind(little.host.register(start, 2049, &options)), ErrorKind::OutOfMemory);
        little.host.register(start, 2048, &options).unwrap();
        assert_eq!(kind(little.host.allocate(1, &options)), ErrorKind::OutOfMemory);
        little.host.unregister(start).unwrap();
        little.host.free(filler).unwrap();
    }
    little.pinned(4096);
    let without = Rig::new(small().with_capabilities(|c| c.host_register = false));
    // SAFETY: refused before anything happens.
    assert_eq!(kind(unsafe { without.host.register(start, 8, &options) }), ErrorKind::Unsupported);
}

/// Work without an order leaves one of the written values in each byte, and nothing worse.
#[test]
fn unordered_work_gives_values_that_somebody_wrote() {
    let rig = Rig::new(small());
    let (other, block, copy) = (rig.stream(0), rig.allocate(0, 4001), rig.allocate(0, 4001));
    rig.fill(block, FillPattern::U8(1), 4001, rig.stream).unwrap();
    rig.gpu.synchronize_stream(rig.stream).unwrap();
    for _ in 0..50 {
        rig.fill(block.offset(1), FillPattern::U8(1), 4000, rig.stream).unwrap();
        rig.fill(block.offset(1), FillPattern::U8(2), 3999, other).unwrap();
        rig.copy(at(0, copy), at(0, block), 4001, other).unwrap();
    }
    rig.gpu.synchronize_device(0).unwrap();
    let values = rig.download::<u8>(copy, 4001, rig.stream);
    assert!(values.iter().all(|value| matches!(value, 1 | 2)));
}
