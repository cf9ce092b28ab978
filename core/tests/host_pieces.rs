//! Page-locked blocks in pieces: mapped by core, registered one by one, copied by parts.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use highwater_core::{
    Backend, Capabilities, DeviceBuffer, Error, ErrorKind, HostCacheStatistics, PinnedBuffer, Runtime, RuntimeOptions,
    Stream,
};
use highwater_mock::{MockGpu, MockOptions, Operation};
use proptest::prelude::*;

const MIB: usize = 1 << 20;
/// The smallest that core makes.
const PIECE: usize = 2 * MIB;
/// Three pieces, half of the last one.
const BLOCK: usize = 5 * MIB;
/// Bytes of the pieces of such a block.
const HELD: u64 = 3 * PIECE as u64;

fn options(piece_bytes: usize) -> MockOptions {
    MockOptions::new().with_capabilities(|can| can.register_piece_bytes = piece_bytes).with_checks()
}

fn open(options: MockOptions) -> (Arc<MockGpu>, Runtime) {
    let gpu = MockGpu::open(options).unwrap();
    (gpu.clone(), Runtime::new(gpu).unwrap())
}

fn host(runtime: &Runtime) -> HostCacheStatistics {
    let host = runtime.statistics().host;
    assert_eq!(host.broken_law(), None, "{host:?}");
    host
}

fn registered(gpu: &MockGpu) -> u64 {
    gpu.live_objects().host_allocations
}

fn refused<T>(result: Result<T, Error>) -> Error {
    result.map(|_| ()).unwrap_err()
}

/// Different in every byte around every border.
fn pattern(bytes: usize) -> Vec<u8> {
    const ROW: usize = 65521;
    let base: Vec<u8> = (0..ROW + 256).map(|at| (at % 251) as u8 ^ (at >> 8) as u8).collect();
    let rows = (0..bytes.div_ceil(ROW)).map(|row| &base[row % 256..][..ROW.min(bytes - row * ROW)]);
    rows.collect::<Vec<_>>().concat()
}

fn end(gpu: &MockGpu, runtime: Runtime) {
    assert_eq!(gpu.violations(), []);
    assert_eq!(runtime.close().unwrap().total(), 0);
    assert_eq!(gpu.live_objects().total(), 0);
}

// ------------------------------------------------------------------------------------------------ making blocks

#[test]
fn a_large_block_is_registered_in_pieces_and_given_back_in_pieces() {
    let (gpu, runtime) = open(options(PIECE));
    let mut pinned = runtime.pinned::<u8>(BLOCK - 100).unwrap();
    assert_eq!((gpu.calls(Operation::HostAllocate), gpu.calls(Operation::HostRegister)), (0, 3));
    assert_eq!(pinned.ptr().address() % PIECE, 0, "aligned to huge pages");
    let registrations: Vec<_> = pinned.registrations().collect();
    assert_eq!(registrations, [0..PIECE, PIECE..2 * PIECE, 2 * PIECE..BLOCK - 100]);
    assert!(pinned.write().unwrap().iter().all(|byte| *byte == 0));
    // One block, whichever address inside it is asked for.
    for at in [0, PIECE - 1, PIECE, BLOCK - 1] {
        let block = runtime.pinned_block_of(pinned.ptr().offset(at)).unwrap();
        assert_eq!((block.base, block.bytes), (pinned.ptr(), BLOCK));
    }
    assert!(runtime.pinned_block_of(pinned.ptr().offset(BLOCK)).is_none());
    let statistics = host(&runtime);
    assert_eq!((statistics.live_blocks, statistics.live_bytes), (1, BLOCK as u64));
    assert_eq!((statistics.pieces, statistics.allocations, statistics.held_bytes), (3, 3, HELD));
    drop(pinned);
    assert_eq!(runtime.pinned::<u8>(BLOCK).unwrap().registrations().count(), 3, "from the cache");
    assert_eq!((gpu.calls(Operation::HostRegister), host(&runtime).hits), (3, 1));
    runtime.trim().unwrap();
    assert_eq!((gpu.calls(Operation::HostUnregister), registered(&gpu), host(&runtime).held_bytes), (3, 0, 0));
    end(&gpu, runtime);
}

#[test]
fn backends_that_do_not_register_allocate_the_pieces() {
    let without: [fn(&mut Capabilities); 2] = [|can| can.register_piece_bytes = 0, |can| can.host_register = false];
    for change in without {
        let (gpu, runtime) = open(options(PIECE).with_capabilities(change));
        let large = runtime.pinned::<u8>(BLOCK).unwrap();
        let small = runtime.pinned::<u8>(MIB).unwrap();
        assert_eq!((gpu.calls(Operation::HostAllocate), gpu.calls(Operation::HostRegister)), (1, 0));
        assert_eq!(large.registrations().last(), Some(0..BLOCK), "one");
        assert_eq!((host(&runtime).pieces, host(&runtime).held_bytes), (1, HELD), "the rest of the piece serves");
        let more = runtime.pinned::<u8>(BLOCK).unwrap();
        assert_eq!((gpu.calls(Operation::HostAllocate), more.registrations().count()), (2, 1));
        drop((large, small, more));
        runtime.trim().unwrap();
        assert_eq!((gpu.calls(Operation::HostFree), registered(&gpu)), (2, 0));
        end(&gpu, runtime);
    }
}

#[test]
fn a_small_block_takes_its_pages_from_a_piece_that_the_next_blocks_share() {
    let (gpu, runtime) = open(options(PIECE));
    let blocks: Vec<_> = (0..PIECE / 4096).map(|_| runtime.pinned::<u8>(4096).unwrap()).collect();
    assert_eq!((gpu.calls(Operation::HostAllocate), gpu.calls(Operation::HostRegister)), (0, 1));
    assert_eq!((host(&runtime).misses, host(&runtime).free_bytes), (1, 0));
    assert!(blocks.iter().all(|block| block.registrations().eq(std::iter::once(0..4096))));
    assert_eq!(runtime.pinned::<u8>(0).unwrap().registrations().count(), 0);
    drop(blocks);
    end(&gpu, runtime);
}

#[test]
fn pieces_are_whole_huge_pages_of_at_most_64_mib() {
    for (asked, piece) in [(1, PIECE), (PIECE + 1, 2 * PIECE), (3 * MIB, 4 * MIB)] {
        let (_gpu, runtime) = open(options(asked));
        let first = runtime.pinned::<u8>(BLOCK).unwrap().registrations().next();
        assert_eq!(first, Some(0..piece), "{asked} bytes were asked for");
    }
    let (gpu, runtime) = open(options(usize::MAX));
    let registrations: Vec<_> = runtime.pinned::<u8>(65 * MIB).unwrap().registrations().collect();
    assert_eq!(registrations, [0..64 * MIB, 64 * MIB..65 * MIB]);
    assert_eq!(gpu.calls(Operation::HostRegister), 2);
    end(&gpu, runtime);
}

#[test]
fn blocks_of_up_to_4_mib_have_one_registration() {
    let (gpu, runtime) = open(options(32 * MIB));
    let sizes = [3 * MIB, MIB, 4 * MIB, MIB / 2, 5 * MIB / 2, 4 * MIB, 3 * MIB / 2];
    for _ in 0..2 {
        let blocks: Vec<_> = sizes.iter().map(|bytes| runtime.pinned::<u8>(*bytes).unwrap()).collect();
        assert!(blocks.iter().all(|block| block.registrations().count() == 1));
    }
    assert!(gpu.calls(Operation::HostRegister) > 1);
    // A larger one may extend over the pieces of the others.
    let held = host(&runtime);
    let large = runtime.pinned::<u8>(held.held_bytes as usize).unwrap();
    assert!(large.registrations().count() > 1);
    assert_eq!(host(&runtime).held_bytes, held.held_bytes);
    drop(large);
    end(&gpu, runtime);
}

#[test]
fn more_than_the_system_or_the_backend_has_is_an_error_and_costs_nothing() {
    let (gpu, runtime) = open(options(PIECE).with_host_memory_bytes(12 * MIB as u64));
    for bytes in [1 << 42, 1 << 46] {
        let error = refused(runtime.pinned::<u8>(bytes));
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        assert!(error.message().contains(&bytes.to_string()), "{error}");
    }
    let error = refused(runtime.pinned::<u8>(14 * MIB));
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    assert!(error.message().contains("piece 7") && error.message().contains("2097152"), "{error}");
    assert_eq!((registered(&gpu), host(&runtime).held_bytes), (0, 0));
    // Cached memory of any size is released or reused.
    drop((runtime.pinned::<u8>(BLOCK).unwrap(), runtime.pinned::<u8>(MIB).unwrap()));
    let pinned = runtime.pinned::<u8>(12 * MIB).unwrap();
    assert_eq!((registered(&gpu), host(&runtime).pieces), (6, 6));
    drop(pinned);
    end(&gpu, runtime);
}

// ------------------------------------------------------------------------------------------------ one registration

#[test]
fn an_undivided_block_may_be_larger_than_a_piece_and_its_memory_serves_others_afterward() {
    let (gpu, runtime) = open(options(usize::MAX));
    let large = runtime.pinned_undivided::<u8>(65 * MIB).unwrap();
    assert!(large.registrations().eq(std::iter::once(0..65 * MIB)));
    assert_eq!((gpu.calls(Operation::HostRegister), host(&runtime).held_bytes), (1, 66 * MIB as u64));
    drop(large);
    // Others divide the piece, and the next one gets it again.
    let small = [MIB, 5 * MIB, 30 * MIB].map(|bytes| runtime.pinned::<u8>(bytes).unwrap());
    assert!(small.iter().all(|block| block.registrations().count() == 1));
    drop(small);
    let again = runtime.pinned_undivided::<u8>(64 * MIB).unwrap();
    assert_eq!((gpu.calls(Operation::HostRegister), again.registrations().count()), (1, 1));
    drop(again);
    runtime.trim().unwrap();
    assert_eq!((gpu.calls(Operation::HostUnregister), registered(&gpu)), (1, 0));
    end(&gpu, runtime);
}

#[test]
fn an_undivided_block_is_not_served_by_memory_that_has_borders() {
    let (gpu, runtime) = open(options(8 * MIB));
    drop(runtime.pinned::<u8>(16 * MIB).unwrap());
    // Several times, so that the thread keeps blocks of this size.
    for _ in 0..3 {
        let pair = [(); 2].map(|()| runtime.pinned::<u8>(6 * MIB).unwrap());
        assert_eq!(pair.iter().map(|block| block.registrations().count()).max(), Some(2));
    }
    assert!(host(&runtime).cached_blocks > 0);
    for _ in 0..3 {
        let pair = [(); 2].map(|()| runtime.pinned_undivided::<u8>(6 * MIB).unwrap());
        assert!(pair.iter().all(|block| block.registrations().count() == 1));
    }
    // Of one size, and each request gets its kind from the thread's own blocks.
    let calls = (gpu.calls(Operation::HostRegister), host(&runtime).misses);
    for _ in 0..20 {
        let undivided = runtime.pinned_undivided::<u8>(6 * MIB).unwrap();
        let any = runtime.pinned::<u8>(6 * MIB).unwrap();
        assert_eq!(undivided.registrations().count(), 1);
        drop((undivided, any));
    }
    assert_eq!((gpu.calls(Operation::HostRegister), host(&runtime).misses), calls);
    end(&gpu, runtime);
}

#[test]
fn a_registration_has_the_limit_of_the_backend_and_none_if_the_backend_allocates() {
    let (gpu, runtime) = open(options(3 * MIB));
    assert_eq!(runtime.pinned_undivided::<u8>(4 * MIB).unwrap().registrations().count(), 1);
    let error = refused(runtime.pinned_undivided::<u8>(4 * MIB + 1));
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.message().contains("4194305") && error.message().contains("at most 4194304 bytes"), "{error}");
    assert!(error.hint().contains("registrations"), "{error}");
    end(&gpu, runtime);
    let (gpu, runtime) = open(options(3 * MIB).with_capabilities(|can| can.host_register = false));
    assert_eq!(runtime.pinned_undivided::<u8>(70 * MIB).unwrap().registrations().count(), 1);
    end(&gpu, runtime);
}

#[test]
fn an_undivided_block_that_cannot_be_registered_leaves_nothing() {
    let (gpu, runtime) = open(options(usize::MAX));
    let first = runtime.pinned::<u8>(MIB).unwrap();
    gpu.fail_call(Operation::HostRegister, 1, ErrorKind::Vendor).unwrap();
    assert_eq!(refused(runtime.pinned_undivided::<u8>(80 * MIB)).kind(), ErrorKind::Vendor);
    assert_eq!((registered(&gpu), host(&runtime).held_bytes), (1, PIECE as u64));
    let large = runtime.pinned_undivided::<u8>(80 * MIB).unwrap();
    assert_eq!(large.ptr(), first.ptr().offset(PIECE), "behind the last piece");
    drop((first, large));
    end(&gpu, runtime);
}

// ------------------------------------------------------------------------------------------------ slabs

#[test]
fn small_blocks_share_pages_of_a_slab() {
    let (gpu, runtime) = open(options(PIECE));
    let mut buffers: Vec<_> = (0..1000).map(|_| runtime.pinned::<u8>(256).unwrap()).collect();
    let statistics = host(&runtime);
    assert_eq!((statistics.live_bytes, statistics.slab_bytes), (256_000, 4 * 65_536 - 256_000));
    assert_eq!((statistics.held_bytes, statistics.free_bytes), (PIECE as u64, (PIECE - 4 * 65_536) as u64));
    for (number, buffer) in buffers.iter_mut().enumerate() {
        assert!(buffer.ptr().address().is_multiple_of(256));
        buffer.write().unwrap().fill(number as u8);
    }
    let (first, second) = (&buffers[0], &buffers[1]);
    assert_eq!(runtime.pinned_block_of(second.ptr().offset(255)).unwrap().base, second.ptr());
    assert_eq!(second.ptr(), first.ptr().offset(256));
    // Copies of neighbors.
    let stream = runtime.device(0).unwrap().create_stream().unwrap();
    let copies: Vec<_> = buffers
        .iter()
        .map(|buffer| {
            let copy = stream.allocate::<u8>(256).unwrap();
            stream.copy_to_device(buffer, &copy).unwrap();
            copy
        })
        .collect();
    for (number, copy) in copies.iter().enumerate() {
        assert_eq!(stream.download(copy).unwrap(), [number as u8; 256]);
    }
    // A live buffer keeps its slab, and the rest is free.
    drop(copies);
    stream.synchronize().unwrap();
    buffers.truncate(1);
    runtime.trim().unwrap();
    let statistics = host(&runtime);
    assert_eq!((statistics.slab_bytes, statistics.held_bytes), (65_536 - 256, PIECE as u64));
    drop((buffers, stream));
    runtime.trim().unwrap();
    assert_eq!((host(&runtime).slab_bytes, registered(&gpu)), (0, 0));
    end(&gpu, runtime);
}

#[test]
fn each_small_size_has_slabs_of_its_own_and_an_empty_one_serves_any_size() {
    let (gpu, runtime) = open(options(PIECE));
    for size in (1..=8).map(|units| units * 256) {
        let blocks = 65_536 / size;
        let buffers: Vec<_> = (0..=blocks).map(|_| runtime.pinned::<u8>(size - 1).unwrap()).collect();
        let statistics = host(&runtime);
        assert_eq!(statistics.live_bytes, ((blocks + 1) * size) as u64);
        assert_eq!(statistics.live_bytes + statistics.slab_bytes, 2 * 65_536, "{size}");
        drop(buffers);
        runtime.trim().unwrap();
        assert_eq!(host(&runtime).slab_bytes, 0);
    }
    // Without room for a slab, a page serves.
    let large = runtime.pinned::<u8>(PIECE - 8 * 4096).unwrap();
    let small = runtime.pinned::<u8>(100).unwrap();
    assert_eq!((host(&runtime).slab_bytes, host(&runtime).pieces), (0, 1));
    assert_eq!(runtime.pinned_block_of(small.ptr()).unwrap().bytes, 4096);
    drop((large, small));
    end(&gpu, runtime);
}

// ------------------------------------------------------------------------------------------------ refusals

#[test]
fn a_piece_that_cannot_be_registered_leaves_nothing() {
    for piece in 1..=3 {
        let (gpu, runtime) = open(options(PIECE));
        gpu.fail_call(Operation::HostRegister, piece, ErrorKind::Vendor).unwrap();
        let error = refused(runtime.pinned::<u8>(BLOCK));
        assert_eq!(error.kind(), ErrorKind::Vendor);
        assert!(error.message().contains(&format!("piece {piece} failed")), "{error}");
        let statistics = host(&runtime);
        assert_eq!((registered(&gpu), statistics.held_bytes, statistics.live_blocks), (0, 0, 0));
        assert_eq!((gpu.calls(Operation::HostUnregister), statistics.frees), (piece - 1, piece - 1));
        // Out of memory is tried once more.
        gpu.fail_call(Operation::HostRegister, piece, ErrorKind::OutOfMemory).unwrap();
        drop(runtime.pinned::<u8>(BLOCK).unwrap());
        assert_eq!((registered(&gpu), runtime.statistics().failed_releases), (3, 0));
        end(&gpu, runtime);
    }
}

#[test]
fn a_piece_whose_release_is_refused_stays_in_use_and_is_tried_again() {
    for call in 1..=3 {
        let (gpu, runtime) = open(options(PIECE));
        drop(runtime.pinned::<u8>(BLOCK).unwrap());
        gpu.fail_call(Operation::HostUnregister, call, ErrorKind::Vendor).unwrap();
        assert_eq!(runtime.trim().unwrap_err().kind(), ErrorKind::Vendor);
        let statistics = host(&runtime);
        assert_eq!((statistics.pieces, statistics.frees, statistics.remnant_blocks), (1, 2, 0));
        assert_eq!((statistics.free_bytes, registered(&gpu)), (PIECE as u64, 1));
        assert_eq!(runtime.statistics().failed_releases, 1);
        let stream = runtime.device(0).unwrap().create_stream().unwrap();
        let values = pattern(PIECE);
        let buffer = stream.upload(&values).unwrap();
        stream.synchronize().unwrap();
        assert!(stream.download(&buffer).unwrap() == values);
        assert_eq!(host(&runtime).allocations, 3, "both copies used the piece");
        // Beside the places of the others, which are used again.
        let values = pattern(BLOCK);
        let large = stream.upload(&values).unwrap();
        assert!(stream.download(&large).unwrap() == values);
        stream.synchronize().unwrap();
        runtime.trim().unwrap();
        assert_eq!((registered(&gpu), host(&runtime).held_bytes), (0, 0));
        drop((buffer, large, stream));
        end(&gpu, runtime);
    }
}

#[test]
fn a_piece_of_a_failed_growth_whose_release_is_refused_stays_in_use() {
    let (gpu, runtime) = open(options(PIECE));
    gpu.fail_call(Operation::HostRegister, 3, ErrorKind::Vendor).unwrap();
    gpu.fail_call(Operation::HostUnregister, 2, ErrorKind::Vendor).unwrap();
    let error = refused(runtime.pinned::<u8>(BLOCK));
    assert!(error.message().contains("piece 3 failed"), "{error}");
    let statistics = host(&runtime);
    assert_eq!((statistics.pieces, statistics.allocations, statistics.remnant_blocks), (1, 2, 0));
    assert_eq!((registered(&gpu), runtime.statistics().failed_releases), (1, 1));
    drop(runtime.pinned::<u8>(PIECE).unwrap());
    assert_eq!(host(&runtime).allocations, 2);
    end(&gpu, runtime);
}

#[test]
fn what_is_never_unregistered_is_never_unmapped_and_the_runtime_ends_all_the_same() {
    let (gpu, runtime) = open(options(PIECE));
    let pinned = runtime.pinned::<u8>(BLOCK).unwrap();
    let at = pinned.ptr();
    drop(pinned);
    gpu.fail_by_chance(Operation::HostUnregister, 1_000_000, ErrorKind::Vendor).unwrap();
    assert_eq!(runtime.close().unwrap_err().kind(), ErrorKind::Vendor);
    assert_eq!(registered(&gpu), 3);
    for offset in (0..BLOCK).step_by(PIECE) {
        // SAFETY: Registered, so still mapped: that is the subject of the test. No other code has the address.
        unsafe { at.offset(offset).as_ptr().write_volatile(1) };
    }
    // Left on purpose, to the end of the process. The mock is given its table back here.
    gpu.fail_by_chance(Operation::HostUnregister, 0, ErrorKind::Vendor).unwrap();
    for offset in (0..BLOCK).step_by(PIECE) {
        // SAFETY: no device uses it.
        unsafe { gpu.host_allocator().unregister(at.offset(offset)).unwrap() };
    }
    assert_eq!(registered(&gpu), 0);
}

// ------------------------------------------------------------------------------------------------ copies

/// Starts and ends around every border of the buffers, and inside.
fn interesting(buffers: [&PinnedBuffer<u8>; 2]) -> Vec<usize> {
    let borders = buffers.into_iter().flat_map(|buffer| buffer.registrations().skip(1)).map(|part| part.start);
    let mut places: Vec<_> = borders.flat_map(|border| [border - 1, border, border + 1]).collect();
    places.extend([0, 1, BLOCK - 1, BLOCK]);
    places.sort_unstable();
    places.dedup();
    places
}

#[test]
fn copies_of_every_range_around_the_borders_bring_the_right_bytes() {
    let (gpu, runtime) = open(options(PIECE).with_memory_bytes(64 * MIB as u64));
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    let content = pattern(BLOCK);
    let mut source = runtime.pinned::<u8>(BLOCK).unwrap();
    source.write().unwrap().copy_from_slice(&content);
    let mut target = runtime.pinned::<u8>(BLOCK).unwrap();
    let buffer = device.allocate::<u8>(BLOCK).unwrap();
    let places = interesting([&source, &target]);
    assert!(places.len() > 10, "both cross borders");
    for (index, &start) in places.iter().enumerate() {
        for &end in &places[index + 1..] {
            // Another offset on the device than in the buffer.
            let there = buffer.slice(BLOCK - (end - start)..BLOCK).unwrap();
            stream.fill(there, 0xee_u8).unwrap();
            target.write().unwrap()[start.saturating_sub(64)..(end + 64).min(BLOCK)].fill(0xdd);
            stream.copy_to_device(source.slice(start..end).unwrap(), there).unwrap();
            stream.copy_to_host(there, target.slice_mut(start..end).unwrap()).unwrap();
            let values = target.read().unwrap();
            assert!(values[start..end] == content[start..end], "{start}..{end}");
            let beside = values[start.saturating_sub(64)..start].iter().chain(&values[end..(end + 64).min(BLOCK)]);
            assert!(beside.into_iter().all(|byte| *byte == 0xdd), "beside {start}..{end}");
        }
    }
    drop((source, target, buffer, stream, device));
    end(&gpu, runtime);
}

#[test]
fn a_value_may_lie_across_a_border_and_an_empty_copy_is_one_call() {
    let (gpu, runtime) = open(options(PIECE));
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    // 12 bytes each: 2 MiB is no multiple of it.
    let values: Vec<[u32; 3]> = (0..BLOCK as u32 / 12).map(|at| [at, !at, at ^ 0x5555]).collect();
    let buffer = stream.upload(&values).unwrap();
    assert!(stream.download(&buffer).unwrap() == values);
    let before = gpu.calls(Operation::Copy);
    let mut pinned = runtime.pinned::<[u32; 3]>(values.len()).unwrap();
    stream.copy_to_host(buffer.slice(7..7).unwrap(), pinned.slice_mut(7..7).unwrap()).unwrap();
    assert_eq!(gpu.calls(Operation::Copy), before + 1);
    stream.copy_to_host(&buffer, &mut pinned).unwrap();
    let parts = pinned.registrations().count() as u64;
    assert!(parts >= 3);
    assert_eq!(gpu.calls(Operation::Copy), before + 1 + parts);
    drop((buffer, pinned, stream, device));
    end(&gpu, runtime);
}

#[test]
fn a_scope_delivers_what_was_copied_over_borders() {
    let (gpu, runtime) = open(options(PIECE));
    let stream = runtime.device(0).unwrap().create_stream().unwrap();
    let values = pattern(BLOCK);
    let buffer = stream.upload(&values).unwrap();
    let mut delivered = vec![0; BLOCK];
    stream
        .scope(|scope| {
            scope.copy_to_device(&values, &buffer)?;
            scope.copy_to_host(&buffer, &mut delivered)
        })
        .unwrap();
    assert!(delivered == values);
    drop((buffer, stream));
    end(&gpu, runtime);
}

/// A copy to the host whose second part is refused while the first one is on its way.
fn half_copied(gpu: &MockGpu, stream: &Stream, buffer: &DeviceBuffer<u8>, pinned: &mut PinnedBuffer<u8>) {
    gpu.set_latency(Duration::from_millis(30));
    gpu.fail_call(Operation::Copy, 2, ErrorKind::Vendor).unwrap();
    assert_eq!(refused(stream.copy_to_host(buffer, pinned)).kind(), ErrorKind::Vendor);
    gpu.set_latency(Duration::ZERO);
}

#[test]
fn a_copy_that_was_enqueued_in_part_is_waited_for_before_the_cpu_touches_the_buffer() {
    let (gpu, runtime) = open(options(PIECE));
    let stream = runtime.device(0).unwrap().create_stream().unwrap();
    let buffer = stream.upload(&[7; BLOCK]).unwrap();
    let mut pinned = runtime.pinned::<u8>(BLOCK).unwrap();
    pinned.write().unwrap().fill(0);
    let first = pinned.registrations().next().unwrap().end;
    stream.synchronize().unwrap();
    half_copied(&gpu, &stream, &buffer, &mut pinned);
    let values = pinned.read().unwrap();
    assert!(values[..first].iter().all(|value| *value == 7), "the read did not wait for the first part");
    assert!(values[first..].iter().all(|value| *value == 0), "the rest was refused");
    drop((buffer, pinned, stream));
    end(&gpu, runtime);
}

#[test]
fn a_copy_that_was_enqueued_in_part_keeps_its_block_from_others() {
    let (gpu, runtime) = open(options(PIECE));
    let stream = runtime.device(0).unwrap().create_stream().unwrap();
    let buffer = stream.upload(&[7; BLOCK]).unwrap();
    stream.synchronize().unwrap();
    runtime.trim().unwrap();
    let mut pinned = runtime.pinned::<u8>(BLOCK).unwrap();
    half_copied(&gpu, &stream, &buffer, &mut pinned);
    drop(pinned);
    let statistics = host(&runtime);
    assert_eq!((statistics.waiting_blocks, statistics.free_bytes), (1, HELD - BLOCK as u64), "only the rest is free");
    // Where it is done by now, the trim may have it; where not, the mock notices.
    runtime.trim().unwrap();
    drop((buffer, stream));
    end(&gpu, runtime);
}

#[test]
fn a_graph_that_recorded_copies_over_borders_replays_them() {
    let (gpu, runtime) = open(options(PIECE));
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    let (mut input, mut output) = (runtime.pinned::<u8>(BLOCK).unwrap(), runtime.pinned::<u8>(BLOCK).unwrap());
    let buffer = device.allocate::<u8>(BLOCK).unwrap();
    output.write().unwrap().fill(0);
    let range = PIECE - 10..2 * PIECE + 10;
    let mut graph = stream
        .capture(|stream| {
            stream.copy_to_device(&input, &buffer)?;
            stream.copy_to_host(buffer.slice(range.clone())?, output.slice_mut(range.clone())?)
        })
        .unwrap();
    for round in 0..3_u8 {
        let content: Vec<u8> = pattern(BLOCK).iter().map(|byte| byte.wrapping_add(round)).collect();
        input.write_with(|values| values.copy_from_slice(&content)).unwrap();
        graph.launch(&stream).unwrap();
        let right = output.read_with(|values| {
            values[range.clone()] == content[range.clone()] && values[..range.start].iter().all(|byte| *byte == 0)
        });
        assert!(right.unwrap(), "round {round}");
    }
    drop(graph);
    drop((input, output, buffer, stream, device));
    end(&gpu, runtime);
}

#[test]
fn a_block_may_be_made_while_a_capture_is_open() {
    let (gpu, runtime) = open(options(PIECE));
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    let values = pattern(BLOCK);
    let buffer = device.allocate::<u8>(BLOCK).unwrap();
    // The staging block is made inside, and the graph keeps it.
    let mut graph = stream.capture(|stream| stream.write(&values, &buffer)).unwrap();
    assert_eq!((gpu.calls(Operation::HostRegister), host(&runtime).graph_bytes), (3, BLOCK as u64));
    graph.launch(&stream).unwrap();
    assert!(stream.download(&buffer).unwrap() == values);
    drop(graph);
    drop((buffer, stream, device));
    end(&gpu, runtime);
}

// ------------------------------------------------------------------------------------------------ the cache around them

#[test]
fn the_cap_counts_free_pages_and_releases_whole_pieces() {
    let gpu = MockGpu::open(options(PIECE)).unwrap();
    let cap = RuntimeOptions::new().with_host_cache_bytes((BLOCK + 6 * MIB) as u64);
    let runtime = Runtime::with_options(gpu.clone(), &cap).unwrap();
    let [first, second, small] = [BLOCK, 6 * MIB, MIB].map(|bytes| runtime.pinned::<u8>(bytes).unwrap());
    // 12 MiB for the three: nothing is idle.
    assert_eq!((registered(&gpu), host(&runtime).free_bytes), (6, 0));
    drop(first);
    drop(second);
    assert_eq!((registered(&gpu), host(&runtime).free_bytes), (6, (BLOCK + 6 * MIB) as u64));
    drop(small);
    let statistics = host(&runtime);
    assert_eq!((statistics.free_bytes, statistics.cap_evictions, registered(&gpu)), (10 * MIB as u64, 1, 5));
    // A piece whose release is refused stays above the cap until the next occasion.
    let large = runtime.pinned::<u8>(12 * MIB).unwrap();
    gpu.fail_by_chance(Operation::HostUnregister, 1_000_000, ErrorKind::Vendor).unwrap();
    drop(large);
    let statistics = host(&runtime);
    assert_eq!((statistics.free_bytes, statistics.cap_evictions), (12 * MIB as u64, 1));
    assert!(runtime.statistics().failed_releases > 0);
    gpu.fail_by_chance(Operation::HostUnregister, 0, ErrorKind::Vendor).unwrap();
    drop(runtime.pinned::<u8>(MIB).unwrap());
    let statistics = host(&runtime);
    assert_eq!((statistics.free_bytes, statistics.cap_evictions), (10 * MIB as u64, 2));
    end(&gpu, runtime);
}

#[test]
fn free_pages_beside_a_live_block_may_stay_above_the_cap() {
    let gpu = MockGpu::open(options(PIECE)).unwrap();
    let runtime = Runtime::with_options(gpu.clone(), &RuntimeOptions::new().with_host_cache_bytes(0)).unwrap();
    let small = runtime.pinned::<u8>(4096).unwrap();
    assert_eq!(host(&runtime).free_bytes, PIECE as u64 - 4096);
    // A piece without live blocks goes at once.
    drop(runtime.pinned::<u8>(BLOCK).unwrap());
    assert_eq!((host(&runtime).pieces, host(&runtime).free_bytes), (1, PIECE as u64 - 4096));
    drop(small);
    assert_eq!((host(&runtime).held_bytes, registered(&gpu)), (0, 0));
    end(&gpu, runtime);
}

#[test]
fn threads_that_make_large_blocks_at_once_disturb_each_other_in_nothing() {
    let gpu = MockGpu::open(options(PIECE)).unwrap();
    let cap = RuntimeOptions::new().with_host_cache_bytes(8 * MIB as u64);
    let runtime = Runtime::with_options(gpu.clone(), &cap).unwrap();
    thread::scope(|scope| {
        for thread in 0..4_usize {
            let runtime = &runtime;
            scope.spawn(move || {
                let stream = runtime.device(0).unwrap().create_stream().unwrap();
                for round in 0..6_usize {
                    let values = vec![(thread * 50 + round) as u8; PIECE + MIB * ((thread + round) % 5)];
                    let buffer = stream.upload(&values).unwrap();
                    assert!(stream.download(&buffer).unwrap() == values);
                }
                stream.synchronize().unwrap();
            });
        }
    });
    let statistics = host(&runtime);
    assert_eq!((statistics.live_blocks, statistics.remnant_blocks), (0, 0));
    assert_eq!(runtime.statistics().failed_releases, 0);
    end(&gpu, runtime);
}

#[test]
fn a_forked_child_does_not_share_the_memory() {
    let (gpu, runtime) = open(options(PIECE));
    let pinned = runtime.pinned::<u8>(BLOCK).unwrap();
    let is_mapped = || {
        let mut page = 0_u8;
        // SAFETY: asks whether one page is there, and touches nothing.
        unsafe { libc::mincore(pinned.ptr().as_ptr().cast(), 4096, &raw mut page) == 0 }
    };
    assert!(is_mapped());
    // SAFETY: the child makes one call of the system and ends with `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let shared = is_mapped();
        // SAFETY: ends the child without running anything else.
        unsafe { libc::_exit(i32::from(shared)) };
    }
    let mut status = -1;
    // SAFETY: waits for the child made above.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0, "the child has the parent's page-locked memory");
    drop(pinned);
    end(&gpu, runtime);
}

#[test]
fn refusals_by_chance_lose_nothing() {
    let mut refusals = [0; 3];
    for seed in 0..6 {
        let (gpu, runtime) = open(options(PIECE).with_memory_bytes(64 * MIB as u64).with_seed(seed));
        let chances =
            [(Operation::HostRegister, 100_000), (Operation::HostUnregister, 200_000), (Operation::Copy, 50_000)];
        let set = |on: bool| {
            for (operation, chance) in chances {
                gpu.fail_by_chance(operation, if on { chance } else { 0 }, ErrorKind::Vendor).unwrap();
            }
        };
        set(true);
        let stream = runtime.device(0).unwrap().create_stream().unwrap();
        let mut arrived = 0;
        for round in 0..30_usize {
            let values = pattern(PIECE + 1 + round % 4 * MIB);
            let there = stream.upload(&values).and_then(|buffer| stream.download(&buffer));
            arrived += usize::from(there.is_ok());
            assert!(there.is_err() || there.is_ok_and(|there| there == values));
            if round % 3 == 0 {
                // What it refuses is counted.
                let _ = runtime.trim();
            }
            host(&runtime);
        }
        set(false);
        assert!(arrived > 0, "seed {seed}");
        chances.iter().zip(&mut refusals).for_each(|((operation, _), count)| *count += gpu.faults(*operation));
        drop(stream);
        end(&gpu, runtime);
    }
    assert!(refusals.iter().all(|count| *count > 0), "{refusals:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_the_sizes_bytes_go_there_and_back_and_nothing_is_left(
        piece in prop::sample::select(vec![0, 1, PIECE, PIECE + 1, 6 * MIB, 64 * MIB]),
        bytes in prop_oneof![1..16 * MIB, (1..8_usize).prop_map(|pieces| pieces * PIECE), Just(2 * PIECE + 1)],
        cuts in (any::<prop::sample::Index>(), any::<prop::sample::Index>()),
    ) {
        let (gpu, runtime) = open(options(piece).with_memory_bytes(64 * MIB as u64));
        let device = runtime.device(0).unwrap();
        let stream = device.create_stream().unwrap();
        let values = pattern(bytes);
        let buffer = stream.upload(&values).unwrap();
        let (one, other) = (cuts.0.index(bytes + 1), cuts.1.index(bytes + 1));
        let range = one.min(other)..one.max(other);
        let mut pinned = runtime.pinned::<u8>(bytes).unwrap();
        let whole: Vec<_> = pinned.registrations().collect();
        prop_assert_eq!(whole.iter().map(ExactSizeIterator::len).sum::<usize>(), bytes);
        prop_assert!(whole.windows(2).all(|pair| pair[0].end == pair[1].start));
        prop_assert!(whole.iter().rev().skip(1).rev().skip(1).all(|part| part.len() >= PIECE));
        stream.copy_to_host(buffer.slice(range.clone()).unwrap(), pinned.slice_mut(range.clone()).unwrap()).unwrap();
        prop_assert!(pinned.read().unwrap()[range.clone()] == values[range]);
        let statistics = host(&runtime);
        // Two blocks: the upload's, and the buffer. A border that a block must not cross may cost one more piece each.
        prop_assert!(statistics.held_bytes <= 2 * (bytes.next_multiple_of(PIECE) + PIECE) as u64);
        drop((buffer, pinned, stream, device));
        end(&gpu, runtime);
    }
}
