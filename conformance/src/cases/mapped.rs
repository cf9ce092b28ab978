//! Mapped memory: reserved addresses, physical memory, and the mappings between them.

use highwater_hal::numbers::Coded;
use highwater_hal::{
    Backend, BlasKind, CopyShape, DataType, FillPattern, Gemm, GemmShape, PhysicalMemoryOptions, Transport,
};

use crate::case::{CaseResult, cases, check, check_eq, check_error};
use crate::device::{Addresses, Block, DEVICE, Handle, PhysicalMemory, Stream};
use crate::matrix::Product;
use crate::random::Random;

cases! {
    group "mapped";
    reserved_addresses_lie_apart: ["mapped.reserve"] needs [has::mapped_memory];
    odd_sizes_are_refused: ["mapped.sizes"] needs [has::mapped_memory];
    pieces_are_one_range: ["mapped.contiguous", "copy.exact"] needs [has::mapped_memory];
    fills_cross_borders: ["mapped.contiguous", "fill.exact"] needs [has::mapped_memory];
    many_pieces_are_one_range: ["mapped.contiguous", "copy.exact", "fill.exact"] needs [has::mapped_memory];
    products_cross_borders: ["mapped.contiguous", "gemm.value"] needs [has::mapped_memory, has::gemm_f32];
    memory_for_direct_access_is_memory: ["mapped.contiguous"] needs [has::mapped_memory, has::mapped_memory_rdma];
    memory_moves_with_its_bytes: ["mapped.move"] needs [has::mapped_memory];
    addresses_in_use_are_refused: ["mapped.map-checked"] needs [has::mapped_memory];
    memory_that_was_refused_can_be_mapped: ["mapped.map-checked"] needs [has::mapped_memory];
    memory_of_another_device_is_refused: ["mapped.map-checked"] needs [TWO_DEVICES, has::mapped_memory];
    parts_of_mappings_are_refused: ["mapped.whole"] needs [has::mapped_memory];
    addresses_with_memory_are_not_freed: ["mapped.free-checked"] needs [has::mapped_memory];
    access_comes_after_the_memory_is_destroyed: ["mapped.destroy"] needs [has::mapped_memory];
    other_devices_get_access_after_the_memory_is_destroyed: ["mapped.destroy", "mapped.peer"]
        needs [TWO_DEVICES, has::mapped_memory, has::peer_copy];
    destroyed_memory_stays_while_it_is_mapped: ["mapped.destroy"] needs [has::mapped_memory];
    destroyed_bytes_come_back: ["mapped.returns"] needs [has::mapped_memory];
    destroyed_memory_is_free_at_once: ["memory.info-returns"] needs [has::mapped_memory];
    more_than_there_is_is_refused: ["mapped.exhausted"] needs [has::mapped_memory];
    other_transports_are_refused: ["mapped.transports"] needs [has::mapped_memory];
    devices_share_mapped_memory: ["mapped.peer"] needs [TWO_DEVICES, has::mapped_memory, has::peer_copy];
    bad_ids_and_devices_are_refused: ["backend.ids-checked", "backend.device-checked"] needs [has::mapped_memory];
    addresses_and_memory_count: ["backend.live-objects"] needs [has::mapped_memory];
}

fn granularity(backend: &dyn Backend) -> highwater_hal::Result<usize> {
    Ok(backend.capabilities(DEVICE)?.mapped_memory_granularity)
}

fn reserved_addresses_lie_apart(backend: &dyn Backend) -> CaseResult {
    let piece = granularity(backend)?;
    let (mut taken, mut reserved, mut blocks) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..12 {
        let block = Block::new(backend, 4096)?;
        taken.push((block.ptr().get(), block.ptr().offset(4096).get()));
        blocks.push(block);
        let bytes = (round % 4 + 1) * piece;
        let addresses = Addresses::new(backend, DEVICE, bytes)?;
        let (start, end) = (addresses.ptr().get(), addresses.ptr().offset(bytes).get());
        check!(addresses.ptr().is_aligned_to(piece), "addresses from {start:#x}, which is no multiple of {piece}");
        for &(other, other_end) in &taken {
            check!(
                end <= other || other_end <= start,
                "addresses from {start:#x} to {end:#x} overlap those from {other:#x} to {other_end:#x}"
            );
        }
        if round % 3 == 2 {
            // Free addresses may be handed out again.
            drop(addresses);
        } else {
            taken.push((start, end));
            reserved.push(addresses);
        }
    }
    Ok(())
}

fn odd_sizes_are_refused(backend: &dyn Backend) -> CaseResult {
    let (piece, before) = (granularity(backend)?, backend.live_objects());
    for bytes in [0, 1, piece - 1, piece + 1, piece + piece / 2] {
        let (reserved, created) = (
            backend.reserve_addresses(DEVICE, bytes),
            backend.create_memory(DEVICE, &PhysicalMemoryOptions::new(bytes)),
        );
        check_error!(reserved, InvalidArgument, "reserve_addresses of {bytes} bytes");
        check_error!(created, InvalidArgument, "create_memory of {bytes} bytes");
    }
    check_eq!(backend.live_objects(), before, "live objects after refused calls");
    Ok(())
}

fn pieces_are_one_range(backend: &dyn Backend) -> CaseResult {
    let piece = granularity(backend)?;
    let (first, second) = (
        Block::mapped(backend, DEVICE, &[piece, 2 * piece, piece])?,
        Block::mapped(backend, DEVICE, &[2 * piece, piece, piece])?,
    );
    let content = Random::new(81).bytes(4 * piece);
    first.write(0, &content)?;
    check!(first.read()? == content, "one copy into four pieces of mapped memory, and one out of them");
    // Copies between two ranges whose borders differ, and at odd offsets around a border.
    let stream = Stream::new(backend)?;
    stream.copy(second.all(), first.all())?;
    stream.synchronize()?;
    check!(second.read()? == content, "a copy from pieces to pieces");
    let plain = Block::filled(backend, 64, 0)?;
    stream.copy(plain.all(), first.span(piece - 31..piece + 33))?;
    stream.copy(second.span(3 * piece - 7..3 * piece + 57), plain.all())?;
    stream.synchronize()?;
    let mut expected = content.clone();
    expected.copy_within(piece - 31..piece + 33, 3 * piece - 7);
    check!(second.read()? == expected, "copies of 64 bytes across borders changed other bytes, or not these");
    check!(first.read()? == content, "a copy changed its source");
    Ok(())
}

fn fills_cross_borders(backend: &dyn Backend) -> CaseResult {
    let piece = granularity(backend)?;
    let (block, stream) = (Block::mapped(backend, DEVICE, &[piece, piece, piece])?, Stream::new(backend)?);
    let mut expected = vec![0x11; 3 * piece];
    stream.set(block.all(), 0x11)?;
    stream.fill(block.span(piece - 8..2 * piece + 16), FillPattern::U32(0x2233_4455))?;
    for four in expected[piece - 8..2 * piece + 16].as_chunks_mut::<4>().0 {
        *four = 0x2233_4455_u32.to_ne_bytes();
    }
    stream.set(block.span(2 * piece - 1..2 * piece + 1), 0x66)?;
    expected[2 * piece - 1..2 * piece + 1].fill(0x66);
    stream.synchronize()?;
    check!(block.read()? == expected, "fills across the borders of mapped memory");
    Ok(())
}

/// More pieces than 16, of several sizes. Fills and copies use all of them, or all but the first and the last bytes.
fn many_pieces_are_one_range(backend: &dyn Backend) -> CaseResult {
    const EDGE: usize = 64;
    let piece = granularity(backend)?;
    let sizes: Vec<usize> = [1, 2, 1, 1, 3].iter().cycle().take(20).map(|pieces| pieces * piece).collect();
    let bytes = sizes.iter().sum::<usize>();
    let (block, copied) = (Block::mapped(backend, DEVICE, &sizes)?, Block::mapped(backend, DEVICE, &sizes)?);
    let stream = Stream::new(backend)?;
    // The bytes around each border, and those at both ends.
    let borders = sizes.iter().scan(0, |end, bytes| {
        *end += bytes;
        Some(*end)
    });
    let windows: Vec<_> = std::iter::once(0)
        .chain(borders)
        .map(|border| border.saturating_sub(EDGE)..(border + EDGE).min(bytes))
        .collect();
    let seen = Block::new(backend, 2 * EDGE * windows.len())?;
    let holds = |of: &Block<'_>, expected: &dyn Fn(usize) -> u8, what: &str| -> CaseResult {
        for (index, window) in windows.iter().enumerate() {
            stream.copy(seen.span(2 * EDGE * index..2 * EDGE * (index + 1)), of.span(window.clone()))?;
        }
        stream.synchronize()?;
        let got = seen.read()?;
        for (index, window) in windows.iter().enumerate() {
            let right = window.clone().zip(&got[2 * EDGE * index..]).all(|(at, &byte)| byte == expected(at));
            check!(right, "{what} {} mappings: bytes around {}", sizes.len(), window.start);
        }
        Ok(())
    };
    stream.set(block.all(), 0x21)?;
    stream.set(copied.all(), 0x22)?;
    holds(&block, &|_| 0x21, "a fill of")?;
    holds(&copied, &|_| 0x22, "a fill of")?;
    // Each word has other halves, so that a fill that begins anew at a border shows.
    stream.fill(block.span(4..bytes - 4), FillPattern::U32(0x4433_2211))?;
    let filled = |at: usize| match at {
        0..4 => 0x21,
        _ if at >= bytes - 4 => 0x21,
        _ => 0x11 * (1 + at % 4) as u8,
    };
    holds(&block, &filled, "a fill of words of")?;
    stream.copy(copied.span(7..bytes - 1), block.span(3..bytes - 5))?;
    let moved = |at: usize| if at < 7 || at >= bytes - 1 { 0x22 } else { filled(at - 4) };
    holds(&copied, &moved, "a copy over")?;
    // Two mappings at a time, of which one may be larger: whole ones, and without their first and last bytes.
    for (index, pair) in sizes.windows(2).enumerate() {
        let start = sizes[..index].iter().sum::<usize>();
        let end = start + pair[0] + pair[1];
        let byte = 0x40 + index as u8;
        for cut in [0, 4] {
            stream.set(copied.all(), 0x24)?;
            stream.set(copied.span(start + cut..end - cut), byte)?;
            let expected = |at: usize| if (start + cut..end - cut).contains(&at) { byte } else { 0x24 };
            holds(&copied, &expected, "a fill of two of")?;
        }
    }
    // Rows that lie in several mappings each.
    let rows = CopyShape::new(bytes / 4 - 16, 4).with_dst_pitch(bytes / 4).with_src_pitch(bytes / 4);
    stream.set(copied.all(), 0x23)?;
    stream.copy_rows(copied.all(), block.all(), rows)?;
    let in_rows = |at: usize| if at % (bytes / 4) < bytes / 4 - 16 { filled(at) } else { 0x23 };
    holds(&copied, &in_rows, "a copy of rows over")
}

fn products_cross_borders(backend: &dyn Backend) -> CaseResult {
    const SIDE: usize = 48;
    const MATRIX: usize = SIDE * SIDE * 4;
    let piece = granularity(backend)?;
    let product = Product::new(GemmShape::new(DataType::F32, SIDE, SIDE, SIDE), 82);
    let stream = Stream::new(backend)?;
    let mut handle = Handle::new(backend, BlasKind::Blas, &stream)?;
    // The same product in plain memory is the expected one.
    let placed = product.place(backend)?;
    let operands = placed.operands().map(|(block, offset)| (block.read(), offset));
    placed.gemm(&product, &mut handle)?;
    stream.synchronize()?;
    placed.check(&product)?;
    let mut blocks = Vec::new();
    // A border in the middle of each matrix.
    let start = piece - MATRIX / 2;
    for (bytes, offset) in operands {
        let block = Block::mapped(backend, DEVICE, &[piece, piece])?;
        block.write(start, &bytes?[offset..offset + MATRIX])?;
        blocks.push(block);
    }
    let [a, b, c] = &*blocks else { return Ok(()) };
    let zero = highwater_hal::DevicePtr::new(0);
    let gemm = Gemm::new(GemmShape::new(DataType::F32, SIDE, SIDE, SIDE), zero, zero, zero);
    handle.gemm(&product.scaled(gemm), [(a, start), (b, start), (c, start)])?;
    stream.synchronize()?;
    let result = c.read()?;
    check!(result[start..start + MATRIX] == placed.bytes_of_c()?, "a product across borders of mapped memory");
    Ok(())
}

fn memory_for_direct_access_is_memory(backend: &dyn Backend) -> CaseResult {
    let piece = granularity(backend)?;
    let addresses = Addresses::new(backend, DEVICE, 2 * piece)?;
    let options = PhysicalMemoryOptions::new(piece).with_rdma();
    let direct = PhysicalMemory::create(backend, DEVICE, &options)?;
    addresses.map(0, &direct, piece)?;
    let plain = addresses.fill_in(piece..2 * piece)?;
    addresses.give_access(0..piece, DEVICE)?;
    let content = Random::new(83).bytes(2 * piece);
    addresses.write(0, &content)?;
    check!(addresses.read(0..2 * piece)? == content, "memory for direct access does not keep its bytes");
    drop((addresses, direct, plain));
    Ok(())
}

fn memory_moves_with_its_bytes(backend: &dyn Backend) -> CaseResult {
    let piece = granularity(backend)?;
    let (here, there) = (Addresses::new(backend, DEVICE, 3 * piece)?, Addresses::new(backend, DEVICE, 2 * piece)?);
    let (first, second) = (here.fill_in(0..piece)?, here.fill_in(piece..3 * piece)?);
    let content = Random::new(84).bytes(3 * piece);
    here.write(0, &content)?;
    // One by one, to other addresses, and in the other order.
    here.unmap(0..piece)?;
    here.unmap(piece..3 * piece)?;
    there.map(0, &second, 2 * piece)?;
    here.map(2 * piece, &first, piece)?;
    there.give_access(0..2 * piece, DEVICE)?;
    here.give_access(2 * piece..3 * piece, DEVICE)?;
    check!(there.read(0..2 * piece)? == content[piece..], "memory that was mapped elsewhere has other bytes");
    check!(here.read(2 * piece..3 * piece)? == content[..piece], "memory that was moved in its range has other bytes");
    // New memory takes the place of the old.
    let other = here.fill_in(0..2 * piece)?;
    here.write(0, &vec![0x55; 2 * piece])?;
    check!(
        there.read(0..2 * piece)? == content[piece..],
        "memory at the former addresses of other memory is that memory"
    );
    check!(here.read(2 * piece..3 * piece)? == content[..piece], "new memory beside a piece changed it");
    drop((here, there, first, second, other));
    Ok(())
}

fn addresses_in_use_are_refused(backend: &dyn Backend) -> CaseResult {
    let piece = granularity(backend)?;
    let addresses = Addresses::new(backend, DEVICE, 4 * piece)?;
    let kept = addresses.fill_in(piece..3 * piece)?;
    let content = Random::new(85).bytes(2 * piece);
    addresses.write(piece, &content)?;
    let memory = PhysicalMemory::create(backend, DEVICE, &PhysicalMemoryOptions::new(2 * piece))?;
    for (offset, what) in [
        (0, "at the beginning of mapped memory"),
        (piece, "at the addresses of mapped memory"),
        (2 * piece, "at the end of mapped memory"),
        (3 * piece, "that leaves the reserved range"),
    ] {
        check_error!(addresses.map(offset, &memory, 2 * piece), InvalidPointer, "map_memory {what}");
    }
    for offset in [256, piece / 2] {
        check_error!(addresses.map(offset, &memory, 2 * piece), InvalidArgument, "map_memory at an odd address");
    }
    check!(addresses.read(piece..3 * piece)? == content, "refused mappings changed the memory that is mapped");
    drop((addresses, memory, kept));
    Ok(())
}

fn memory_of_another_device_is_refused(backend: &dyn Backend) -> CaseResult {
    let bytes = granularity(backend)?.max(backend.capabilities(1)?.mapped_memory_granularity);
    let near = Addresses::new(backend, 0, bytes)?;
    let far = PhysicalMemory::create(backend, 1, &PhysicalMemoryOptions::new(bytes))?;
    check_error!(near.map(0, &far, bytes), WrongDevice, "map_memory of memory of another device");
    drop(near.fill_in(0..bytes)?);
    Ok(())
}

fn parts_of_mappings_are_refused(backend: &dyn Backend) -> CaseResult {
    let piece = granularity(backend)?;
    let addresses = Addresses::new(backend, DEVICE, 6 * piece)?;
    // Two pieces, a gap, and a piece.
    let memory = [addresses.fill_in(0..2 * piece)?, addresses.fill_in(2 * piece..3 * piece)?];
    let last = addresses.fill_in(4 * piece..5 * piece)?;
    let content = Random::new(86).bytes(3 * piece);
    addresses.write(0, &content)?;
    for (range, what) in [
        (0..piece, "the first half of a mapping"),
        (piece..2 * piece, "the second half of a mapping"),
        (piece..3 * piece, "half a mapping and a whole one"),
        (0..4 * piece, "two mappings and a gap"),
        (2 * piece..5 * piece, "mappings around a gap"),
        (3 * piece..4 * piece, "a gap"),
        (0..0, "nothing"),
    ] {
        check_error!(addresses.give_access(range.clone(), DEVICE), InvalidPointer, "set_memory_access of {what}");
        check_error!(addresses.unmap(range), InvalidPointer, "unmap_memory of {what}");
    }
    check!(addresses.read(0..3 * piece)? == content, "calls that were refused changed mapped memory");
    // Several whole ones at once.
    addresses.give_access(0..3 * piece, DEVICE)?;
    addresses.unmap(0..3 * piece)?;
    addresses.map(3 * piece, &memory[1], piece)?;
    addresses.give_access(3 * piece..5 * piece, DEVICE)?;
    check!(
        addresses.read(3 * piece..4 * piece)? == content[2 * piece..],
        "memory of which several pieces were unmapped"
    );
    drop((addresses, memory, last));
    Ok(())
}

/// Each refused call leaves the memory as it was, so a right call maps it.
fn memory_that_was_refused_can_be_mapped(backend: &dyn Backend) -> CaseResult {
    let piece = granularity(backend)?;
    let addresses = Addresses::new(backend, DEVICE, 3 * piece)?;
    let beside = addresses.fill_in(2 * piece..3 * piece)?;
    for (offset, what) in
        [(1, "at an odd address"), (2 * piece, "where memory is mapped"), (3 * piece, "behind the range")]
    {
        let memory = PhysicalMemory::create(backend, DEVICE, &PhysicalMemoryOptions::new(piece))?;
        check!(addresses.map(offset, &memory, piece).is_err(), "map_memory {what} succeeded");
        let mapped = addresses.map(0, &memory, piece);
        check!(mapped.is_ok(), "memory cannot be mapped after map_memory {what} was refused: {:?}", mapped.err());
        addresses.give_access(0..piece, DEVICE)?;
        let content = Random::new(92).bytes(piece);
        addresses.write(0, &content)?;
        check!(addresses.read(0..piece)? == content, "memory loses its bytes after map_memory {what} was refused");
        addresses.unmap(0..piece)?;
    }
    drop((addresses, beside));
    Ok(())
}

fn addresses_with_memory_are_not_freed(backend: &dyn Backend) -> CaseResult {
    let piece = granularity(backend)?;
    let addresses = Addresses::new(backend, DEVICE, 3 * piece)?;
    let before = backend.live_objects();
    for (range, what) in
        [(0..piece, "the first part"), (piece..3 * piece, "the last part"), (0..4 * piece, "more than a range")]
    {
        check_error!(addresses.free_wrongly(range), InvalidPointer, "free_addresses of {what}");
    }
    let memory = addresses.fill_in(2 * piece..3 * piece)?;
    addresses.write(2 * piece, &vec![0x77; piece])?;
    check_error!(addresses.free_wrongly(0..3 * piece), InvalidPointer, "free_addresses while memory is mapped");
    check!(addresses.read(2 * piece..3 * piece)? == vec![0x77; piece], "a refused free changed mapped memory");
    // It stays mapped without its id.
    memory.destroy()?;
    check_error!(
        addresses.free_wrongly(0..3 * piece),
        InvalidPointer,
        "free_addresses while memory is mapped whose id is destroyed"
    );
    check!(
        addresses.read(2 * piece..3 * piece)? == vec![0x77; piece],
        "a refused free changed mapped memory whose id is destroyed"
    );
    check_eq!(backend.live_objects(), before, "live objects after refused calls");
    Ok(())
}

fn destroyed_memory_stays_while_it_is_mapped(backend: &dyn Backend) -> CaseResult {
    let piece = granularity(backend)?;
    let addresses = Addresses::new(backend, DEVICE, piece)?;
    let memory = addresses.fill_in(0..piece)?;
    let content = Random::new(87).bytes(piece);
    addresses.write(0, &content)?;
    let stale = memory.destroy()?;
    // Memory that others get meanwhile is other memory.
    let other = Block::filled(backend, piece, 0x33)?;
    check!(addresses.read(0..piece)? == content, "memory lost its bytes when its id was destroyed");
    addresses.write(0, &vec![0x44; piece])?;
    check!(addresses.read(0..piece)? == vec![0x44; piece], "memory cannot be written after its id was destroyed");
    check!(other.read()? == vec![0x33; piece], "mapped memory whose id was destroyed was given to somebody else");
    let again = PhysicalMemory::adopted(backend, stale);
    check_error!(addresses.map(0, &again, piece), InvalidHandle, "map_memory of a destroyed id");
    check_error!(again.destroy(), InvalidHandle, "destroy_memory of a destroyed id");
    Ok(())
}

/// Memory that is destroyed right after it was mapped, as programs do that keep no id.
fn access_comes_after_the_memory_is_destroyed(backend: &dyn Backend) -> CaseResult {
    let piece = granularity(backend)?;
    let addresses = Addresses::new(backend, DEVICE, 2 * piece)?;
    for part in [0..piece, piece..2 * piece] {
        let memory = PhysicalMemory::create(backend, DEVICE, &PhysicalMemoryOptions::new(piece))?;
        addresses.map(part.start, &memory, piece)?;
        memory.destroy()?;
        addresses.give_access(part, DEVICE)?;
    }
    let content = Random::new(90).bytes(2 * piece);
    addresses.write(0, &content)?;
    // Memory that others get meanwhile is other memory.
    let other = Block::filled(backend, 2 * piece, 0x33)?;
    check!(
        addresses.read(0..2 * piece)? == content,
        "memory that was destroyed before its access does not keep its bytes"
    );
    check!(other.read()? == vec![0x33; 2 * piece], "mapped memory whose id was destroyed was given to somebody else");
    addresses.unmap(0..2 * piece)?;
    Ok(())
}

fn other_devices_get_access_after_the_memory_is_destroyed(backend: &dyn Backend) -> CaseResult {
    const OTHER: u32 = DEVICE + 1;
    let piece = granularity(backend)?;
    let addresses = Addresses::new(backend, DEVICE, 2 * piece)?;
    addresses.fill_in(0..piece)?.destroy()?;
    let living = addresses.fill_in(piece..2 * piece)?;
    let content = Random::new(91).bytes(2 * piece);
    addresses.write(0, &content)?;
    addresses.give_access(0..2 * piece, OTHER)?;
    let (far, stream) = (Block::filled_on(backend, OTHER, 2 * piece, 0)?, Stream::on(backend, OTHER)?);
    stream.copy(far.all(), addresses.span_on(OTHER, 0..2 * piece))?;
    stream.synchronize()?;
    check!(far.read()? == content, "a device that got access after the memory was destroyed reads other bytes");
    drop((stream, addresses, living));
    Ok(())
}

fn destroyed_bytes_come_back(backend: &dyn Backend) -> CaseResult {
    let (piece, memory) = (granularity(backend)?, backend.memory_info(DEVICE)?);
    let pieces = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX) / piece;
    // More than half of what is free, so that two do not fit.
    let bytes = pieces(memory.free / 10 * 6).max(1) * piece;
    let rounds = pieces(memory.total) * piece / bytes + 2;
    let addresses = Addresses::new(backend, DEVICE, bytes)?;
    for round in 0..rounds {
        let options = PhysicalMemoryOptions::new(bytes);
        let memory = match PhysicalMemory::create(backend, DEVICE, &options) {
            Ok(memory) => memory,
            Err(error) => {
                let text = format!("{bytes} bytes were destroyed {round} times, and then: {error}");
                return Err(crate::case::Failure::new(text));
            }
        };
        match round % 3 {
            // Never mapped.
            0 => drop(memory),
            // Destroyed before it is unmapped, and after it.
            order => {
                addresses.map(0, &memory, bytes)?;
                if order == 1 {
                    memory.destroy()?;
                    addresses.unmap(0..bytes)?;
                } else {
                    addresses.unmap(0..bytes)?;
                    memory.destroy()?;
                }
            }
        }
    }
    check!(Block::new(backend, bytes).is_ok(), "bytes of physical memory do not come back for other memory");
    Ok(())
}

/// Gives physical memory back in each order. Another program may take the memory at the same time, so one success is proof.
fn destroyed_memory_is_free_at_once(backend: &dyn Backend) -> CaseResult {
    const TIMES: usize = 20;
    let bytes = (64_usize << 20).next_multiple_of(granularity(backend)?);
    let addresses = Addresses::new(backend, DEVICE, bytes)?;
    for what in ["was never mapped", "was unmapped before", "was mapped, once it is unmapped"] {
        if backend.memory_info(DEVICE)?.free < bytes as u64 {
            return Ok(());
        }
        let mut grown = Vec::new();
        for _ in 0..TIMES {
            let memory = PhysicalMemory::create(backend, DEVICE, &PhysicalMemoryOptions::new(bytes))?;
            if what != "was never mapped" {
                addresses.map(0, &memory, bytes)?;
            }
            let before = backend.memory_info(DEVICE)?.free;
            match what {
                "was never mapped" => drop(memory.destroy()?),
                "was unmapped before" => {
                    addresses.unmap(0..bytes)?;
                    memory.destroy()?;
                }
                _ => {
                    memory.destroy()?;
                    addresses.unmap(0..bytes)?;
                }
            }
            grown.push(backend.memory_info(DEVICE)?.free.saturating_sub(before));
            if grown.last() >= Some(&(bytes as u64)) {
                break;
            }
        }
        check!(
            grown.last() >= Some(&(bytes as u64)),
            "the free memory grew by {grown:?} bytes when {bytes} bytes of physical memory were destroyed that {what}"
        );
    }
    Ok(())
}

fn more_than_there_is_is_refused(backend: &dyn Backend) -> CaseResult {
    let (piece, before) = (granularity(backend)?, backend.live_objects());
    let total = usize::try_from(backend.memory_info(DEVICE)?.total).unwrap_or(usize::MAX / 64);
    for bytes in [total.next_multiple_of(piece) + piece, total.next_multiple_of(piece).saturating_mul(16)] {
        let created = backend.create_memory(DEVICE, &PhysicalMemoryOptions::new(bytes));
        check_error!(created, OutOfMemory, "create_memory of {bytes} bytes");
    }
    check_eq!(backend.live_objects(), before, "live objects after refused calls");
    let block = Block::mapped(backend, DEVICE, &[piece])?;
    block.write(0, &vec![5; piece])?;
    check!(block.read()? == vec![5; piece], "memory created after a refused call does not work");
    Ok(())
}

fn other_transports_are_refused(backend: &dyn Backend) -> CaseResult {
    let (piece, before) = (granularity(backend)?, backend.live_objects());
    let offered = backend.capabilities(DEVICE)?.ipc_transports;
    for &transport in Transport::ALL {
        if transport == Transport::Legacy || !offered.contains(transport) {
            let options = PhysicalMemoryOptions::new(piece).with_shareable(transport);
            check_error!(backend.create_memory(DEVICE, &options), Unsupported, "create_memory for {transport:?}");
        }
    }
    check_eq!(backend.live_objects(), before, "live objects after refused calls");
    Ok(())
}

fn devices_share_mapped_memory(backend: &dyn Backend) -> CaseResult {
    let piece = granularity(backend)?;
    let addresses = Addresses::new(backend, 0, 2 * piece)?;
    let memory = [addresses.fill_in(0..piece)?, addresses.fill_in(piece..2 * piece)?];
    addresses.give_access(0..2 * piece, 1)?;
    let content = Random::new(88).bytes(2 * piece);
    addresses.write(0, &content)?;
    let far = Block::filled_on(backend, 1, 2 * piece, 0)?;
    let stream = Stream::on(backend, 1)?;
    stream.copy(far.all(), addresses.span_on(1, 0..2 * piece))?;
    stream.synchronize()?;
    check!(far.read()? == content, "a device with access does not read the bytes of another device's mapped memory");
    stream.set(addresses.span_on(1, piece - 100..piece + 100), 0x99)?;
    stream.synchronize()?;
    let mut expected = content;
    expected[piece - 100..piece + 100].fill(0x99);
    check!(addresses.read(0..2 * piece)? == expected, "bytes that a device with access wrote are not there");
    drop((stream, addresses, memory));
    Ok(())
}

fn bad_ids_and_devices_are_refused(backend: &dyn Backend) -> CaseResult {
    let piece = granularity(backend)?;
    let addresses = Addresses::new(backend, DEVICE, piece)?;
    let before = backend.live_objects();
    let stale = PhysicalMemory::create(backend, DEVICE, &PhysicalMemoryOptions::new(piece))?.destroy()?;
    let gone = PhysicalMemory::adopted(backend, stale);
    check_error!(addresses.map(0, &gone, piece), InvalidHandle, "map_memory of a stale id");
    check_error!(gone.destroy(), InvalidHandle, "destroy_memory of a stale id");
    let memory = addresses.fill_in(0..piece)?;
    check_eq!((memory.id().tag(), memory.id().device()), (backend.identity().tag, DEVICE), "tag and device of memory");
    for device in [backend.device_count(), u32::MAX] {
        let reserved = backend.reserve_addresses(device, piece);
        check_error!(reserved, InvalidArgument, "reserve_addresses({device})");
        let created = backend.create_memory(device, &PhysicalMemoryOptions::new(piece));
        check_error!(created, InvalidArgument, "create_memory({device})");
        check_error!(addresses.give_access(0..piece, device), InvalidArgument, "set_memory_access for {device}");
    }
    drop(memory);
    check_eq!(backend.live_objects(), before, "live objects after refused calls");
    Ok(())
}

fn addresses_and_memory_count(backend: &dyn Backend) -> CaseResult {
    let (piece, before) = (granularity(backend)?, backend.live_objects());
    let counts = |reservations: u64, memory: u64, what: &str| -> CaseResult {
        let live = backend.live_objects();
        let counted = (live.reservations - before.reservations, live.physical_memory - before.physical_memory);
        check_eq!(counted, (reservations, memory), "reserved ranges and physical memory {what}");
        Ok(())
    };
    let addresses = [Addresses::new(backend, DEVICE, piece)?, Addresses::new(backend, DEVICE, 2 * piece)?];
    counts(2, 0, "after two reservations")?;
    let memory = PhysicalMemory::create(backend, DEVICE, &PhysicalMemoryOptions::new(piece))?;
    counts(2, 1, "after memory was created")?;
    addresses[0].map(0, &memory, piece)?;
    memory.destroy()?;
    counts(2, 0, "after mapped memory was destroyed")?;
    drop(addresses);
    check_eq!(backend.live_objects(), before, "live objects after everything was given back");
    Ok(())
}
