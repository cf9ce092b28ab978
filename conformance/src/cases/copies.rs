//! Copies: between device and page-locked memory, within a device, and between devices.

use std::ops::Range;
use std::ptr::NonNull;

use highwater_hal::{
    Backend, CopyShape, DevicePtr, FillPattern, HostMemoryKind, HostOptions, HostPtr, Location, MemoryCopy, MemoryFill,
};

use super::memory::{Maker, makers};
use crate::case::{CaseResult, Failure, cases, check};
use crate::device::{Block, DEVICE, Pinned, Registered, Span, Stream, read_span};
use crate::random::Random;
use crate::retry::{Attempt, until_conclusive};
use crate::stream_load::{Direction, StreamLoad};

cases! {
    group "copies";
    to_the_device_are_exact: ["copy.exact"];
    to_the_host_are_exact: ["copy.exact"];
    on_the_device_are_exact: ["copy.exact"];
    within_one_block_are_exact: ["copy.exact"];
    of_many_mebibytes_are_exact: ["copy.exact"];
    between_devices_are_exact: ["copy.exact"] needs [TWO_DEVICES, has::peer_copy];
    of_nothing_do_nothing: ["copy.zero"];
    between_devices_of_nothing_do_nothing: ["copy.zero"] needs [TWO_DEVICES, has::peer_copy];
    of_nothing_do_nothing_in_memory_of_each_kind: ["copy.zero", "fill.zero"];
    above_sixteen_mebibytes_are_exact: ["copy.exact", "fill.exact"];
    above_sixty_four_mebibytes_are_exact: ["copy.exact"];
    above_four_gibibytes_are_exact: ["copy.exact", "copy-2d.exact", "fill.exact"];
    of_nothing_need_no_memory: ["copy.zero", "fill.zero"];
    run_in_order: ["copy.ordered"];
    run_after_pending_work: ["copy.ordered"];
}

/// Sizes, and the offsets of the ranges in source and destination.
const RANGES: [(usize, usize, usize); 10] = [
    (1, 0, 0),
    (1, 3, 5),
    (3, 1, 2),
    (255, 0, 1),
    (256, 256, 512),
    (257, 13, 7),
    (4096, 1, 0),
    (4097, 0, 3),
    (65_536, 64, 192),
    ((1 << 20) + 3, 5, 9),
];

/// Bytes before and after a destination that reveal writes outside of it.
const MARGIN: usize = 600;

/// Checks that `got` is `background` with `content` at `start`.
fn arrived(got: &[u8], background: u8, start: usize, content: &[u8], what: &str) -> CaseResult {
    let bytes = content.len();
    check!(got[start..start + bytes] == *content, "{what}: {bytes} bytes to offset {start} arrived changed");
    let beside = got[..start].iter().chain(&got[start + bytes..]).all(|&byte| byte == background);
    check!(beside, "{what}: {bytes} bytes to offset {start} changed bytes beside them");
    Ok(())
}

fn to_the_device_are_exact(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    for (bytes, from, to) in RANGES {
        let content = Random::new(bytes as u64).bytes(from + bytes);
        let source = Pinned::holding(backend, &content)?;
        let target = Block::filled(backend, to + bytes + MARGIN, 0x11)?;
        stream.copy(target.span(to..to + bytes), source.span(from..from + bytes))?;
        stream.synchronize()?;
        arrived(&target.read()?, 0x11, to, &content[from..], "host to device")?;
        check!(source.read()? == content, "a copy to the device changed its source");
    }
    Ok(())
}

fn to_the_host_are_exact(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    for (bytes, from, to) in RANGES {
        let content = Random::new(bytes as u64).bytes(from + bytes);
        let source = Block::holding(backend, &content)?;
        let target = Pinned::holding(backend, &vec![0x22; to + bytes + MARGIN])?;
        stream.copy(target.span(to..to + bytes), source.span(from..from + bytes))?;
        stream.synchronize()?;
        arrived(&target.read()?, 0x22, to, &content[from..], "device to host")?;
        check!(source.read()? == content, "a copy to the host changed its source");
    }
    Ok(())
}

fn on_the_device_are_exact(backend: &dyn Backend) -> CaseResult {
    for device in 0..backend.device_count() {
        let stream = Stream::on(backend, device)?;
        for (bytes, from, to) in RANGES {
            let content = Random::new(bytes as u64).bytes(from + bytes);
            let source = Block::on(backend, device, content.len())?;
            source.write(0, &content)?;
            let target = Block::filled_on(backend, device, to + bytes + MARGIN, 0x33)?;
            stream.copy(target.span(to..to + bytes), source.span(from..from + bytes))?;
            stream.synchronize()?;
            arrived(&target.read()?, 0x33, to, &content[from..], "device to device")?;
        }
    }
    Ok(())
}

fn within_one_block_are_exact(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let content = Random::new(11).bytes(1000);
    let block = Block::filled(backend, 3000, 0x55)?;
    block.write(0, &content)?;
    stream.copy(block.span(1000..2000), block.span(0..1000))?;
    stream.synchronize()?;
    let got = block.read()?;
    check!(got[..1000] == *content && got[1000..2000] == *content, "a copy to the next bytes arrived changed");
    check!(got[2000..] == [0x55; 1000], "a copy to the next bytes wrote beyond them");
    Ok(())
}

fn of_many_mebibytes_are_exact(backend: &dyn Backend) -> CaseResult {
    const BYTES: usize = (5 << 20) + 17;
    let stream = Stream::new(backend)?;
    let content = Random::new(12).bytes(BYTES);
    let (source, target) = (Pinned::holding(backend, &content)?, Pinned::new(backend, BYTES)?);
    let (first, second) = (Block::new(backend, BYTES)?, Block::new(backend, BYTES)?);
    stream.copy(first.all(), source.all())?;
    stream.copy(second.all(), first.all())?;
    stream.copy(target.all(), second.all())?;
    stream.synchronize()?;
    check!(target.read()? == content, "{BYTES} bytes came back changed");
    Ok(())
}

fn between_devices_are_exact(backend: &dyn Backend) -> CaseResult {
    // On a stream of either device, in either direction.
    for (on, from_device, to_device) in [(0, 0, 1), (1, 0, 1), (0, 1, 0), (1, 1, 0)] {
        let stream = Stream::on(backend, on)?;
        for (bytes, from, to) in RANGES {
            let content = Random::new(bytes as u64).bytes(from + bytes);
            let source = Block::on(backend, from_device, content.len())?;
            source.write(0, &content)?;
            let target = Block::filled_on(backend, to_device, to + bytes + MARGIN, 0x66)?;
            stream.copy(target.span(to..to + bytes), source.span(from..from + bytes))?;
            stream.synchronize()?;
            let what = format!("device {from_device} to device {to_device} on a stream of device {on}");
            arrived(&target.read()?, 0x66, to, &content[from..], &what)?;
        }
    }
    Ok(())
}

fn of_nothing_do_nothing(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let (block, other) = (Block::filled(backend, 256, 1)?, Block::filled(backend, 256, 2)?);
    let pinned = Pinned::holding(backend, &[3; 256])?;
    for at in [0, 100, 256] {
        stream.copy(block.span(at..at), other.span(at..at))?;
        stream.copy(block.span(at..at), pinned.span(at..at))?;
        stream.copy(pinned.span(at..at), other.span(at..at))?;
    }
    stream.synchronize()?;
    check!(
        block.read()? == [1; 256] && other.read()? == [2; 256] && pinned.read()? == [3; 256],
        "a copy of 0 bytes changed something"
    );
    Ok(())
}

fn between_devices_of_nothing_do_nothing(backend: &dyn Backend) -> CaseResult {
    let (near, far) = (Block::filled_on(backend, 0, 256, 1)?, Block::filled_on(backend, 1, 256, 2)?);
    for on in [0, 1] {
        let stream = Stream::on(backend, on)?;
        for at in [0, 100, 256] {
            stream.copy(near.span(at..at), far.span(at..at))?;
            stream.copy(far.span(at..at), near.span(256 - at..256 - at))?;
        }
        stream.synchronize()?;
    }
    check!(near.read()? == [1; 256] && far.read()? == [2; 256], "a copy of 0 bytes between devices changed something");
    Ok(())
}

fn of_nothing_do_nothing_in_memory_of_each_kind(backend: &dyn Backend) -> CaseResult {
    let can = backend.capabilities(DEVICE)?;
    let stream = Stream::new(backend)?;
    let plain = Pinned::holding(backend, &[3; 256])?;
    let combined = match can.write_combined {
        true => {
            let options = HostOptions::new().with_kind(HostMemoryKind::WriteCombined);
            Some(Pinned::with_options(backend, 256, &options)?)
        }
        false => None,
    };
    let registered = if can.host_register { Some(Registered::new(backend, &[4; 4096])?) } else { None };
    let mut hosts: Vec<Span<'_>> = vec![plain.all()];
    hosts.extend(combined.iter().map(Pinned::all));
    hosts.extend(registered.iter().map(|registered| registered.span(0..256)));
    let piece = if can.mapped_memory { can.mapped_memory_granularity } else { 4096 };
    let other = Block::filled(backend, 256, 2)?;
    for Maker { what, make, .. } in makers(backend, &stream)? {
        let block = make(piece)?;
        stream.set(block.all(), 1)?;
        for at in [0, 100, piece] {
            for pattern in [FillPattern::U8(9), FillPattern::U16(9), FillPattern::U32(9)] {
                stream.fill(block.span(at..at), pattern)?;
            }
            stream.copy(block.span(at..at), other.span(0..0))?;
            stream.copy(other.span(0..0), block.span(at..at))?;
            for host in &hosts {
                stream.copy(block.span(at..at), host.cut_to_nothing())?;
                stream.copy(host.cut_to_nothing(), block.span(at..at))?;
            }
        }
        stream.synchronize()?;
        check!(block.read()? == vec![1; piece], "a copy or fill of nothing changed {what} memory");
    }
    check!(other.read()? == [2; 256] && plain.read()? == [3; 256], "a copy of 0 bytes changed something");
    Ok(())
}

/// Sizes of more than 24 bits, once in each direction.
fn above_sixteen_mebibytes_are_exact(backend: &dyn Backend) -> CaseResult {
    const BYTES: usize = (16 << 20) + 4096 + 5;
    const BLOCKS: usize = 4;
    const WORDS: usize = BYTES / 4 * 4;
    const OTHER: u8 = 0xee;
    let between = backend.device_count() > 1 && backend.capabilities(DEVICE)?.peer_copy;
    let devices = if between { [DEVICE, DEVICE, 1, 1] } else { [DEVICE; BLOCKS] };
    for device in devices {
        needs_free(backend, device, 2 * BLOCKS * BYTES)?;
    }
    let stream = Stream::new(backend)?;
    let content = Random::new(14).bytes(BYTES);
    let (source, target) = (Pinned::holding(backend, &content)?, Pinned::new(backend, BYTES)?);
    let mut blocks = Vec::new();
    for device in devices {
        blocks.push(Block::filled_on(backend, device, BYTES, OTHER)?);
    }
    stream.copy(blocks[0].all(), source.all())?;
    stream.synchronize()?;
    // On one device, to another if there is one, on that, and back. Each block has other bytes before its copy.
    for index in 0..BLOCKS {
        if index == BLOCKS - 1 {
            stream.set(blocks[0].all(), OTHER)?;
            stream.synchronize()?;
        }
        let there = Stream::on(backend, devices[index])?;
        there.copy(blocks[(index + 1) % BLOCKS].all(), blocks[index].all())?;
        there.synchronize()?;
    }
    stream.copy(target.all(), blocks[0].all())?;
    stream.synchronize()?;
    alike(&target.read()?, &content, 0, "a copy to the device, to each block, and back")?;
    for pattern in [FillPattern::U8(0x5a), FillPattern::U32(0x0102_0304)] {
        stream.fill(blocks[0].span(0..WORDS), pattern)?;
        stream.copy(target.all(), blocks[0].all())?;
        stream.synchronize()?;
        let element = match pattern {
            FillPattern::U32(word) => word.to_ne_bytes(),
            _ => [0x5a; 4],
        };
        let expected = [element.repeat(WORDS / 4).as_slice(), &content[WORDS..]].concat();
        alike(&target.read()?, &expected, 0, &format!("a fill of {WORDS} bytes with {pattern:?}"))?;
    }
    Ok(())
}

/// Checks that the bytes from `start` on are the expected ones, and names the first that differs.
fn alike(got: &[u8], expected: &[u8], start: usize, what: &str) -> CaseResult {
    match got.iter().zip(expected).position(|(got, expected)| got != expected) {
        None => Ok(()),
        Some(place) => Err(Failure::new(format!(
            "{what}: byte {} is the first that differs: got {:#04x}, expected {:#04x}",
            start + place,
            got[place],
            expected[place]
        ))),
    }
}

/// Skips the case if the device has less free memory.
pub(super) fn needs_free(backend: &dyn Backend, device: u32, bytes: usize) -> CaseResult {
    let free = backend.memory_info(device)?.free;
    if free < bytes as u64 {
        let mebibytes = |bytes: u64| bytes >> 20;
        let (free, needed) = (mebibytes(free), mebibytes(bytes as u64) + 1);
        return Err(Failure::skip(format!(
            "device {device} has {free} MiB of free memory, and the case needs {needed} MiB"
        )));
    }
    Ok(())
}

/// The bytes of a transfer that has more than 64 MiB.
pub(super) const LARGE: usize = (64 << 20) + 4096 + 5;

/// The parts of a large transfer that a case compares: beginning, end, and both sides of each power of two from 1 MiB on.
pub(super) fn compared_parts() -> impl Iterator<Item = Range<usize>> {
    const PART: usize = 2048;
    let middle = (20..=26).map(|power| (1_usize << power) - PART..(1 << power) + PART);
    std::iter::once(0..PART).chain(middle).chain(std::iter::once(LARGE - PART..LARGE))
}

/// A size of more than 26 bits, in each direction. Comparing all of the bytes would take most of the time.
fn above_sixty_four_mebibytes_are_exact(backend: &dyn Backend) -> CaseResult {
    const OTHER: u8 = 0xee;
    needs_free(backend, DEVICE, 3 * LARGE)?;
    let mut random = Random::new(16);
    let stream = Stream::new(backend)?;
    let (source, target) = (Pinned::new(backend, LARGE)?, Pinned::new(backend, LARGE)?);
    let (first, second) = (Block::new(backend, LARGE)?, Block::new(backend, LARGE)?);
    let contents: Vec<_> = compared_parts().map(|part| (part.clone(), random.bytes(part.len()))).collect();
    for (part, content) in &contents {
        source.write_at(part.start, content)?;
        target.write_at(part.start, &vec![OTHER; part.len()])?;
    }
    // The memory may be that of an earlier run, with the same bytes.
    for block in [&first, &second] {
        stream.set(block.all(), OTHER)?;
    }
    stream.copy(first.all(), source.all())?;
    stream.copy(second.all(), first.all())?;
    stream.copy(target.all(), second.all())?;
    stream.synchronize()?;
    for (part, content) in &contents {
        // SAFETY: the stream was synchronized, and nothing was enqueued on this memory since.
        let got = unsafe { target.bytes_now(part.clone()) };
        alike(got, content, part.start, &format!("{LARGE} bytes after a copy to the device, on it, and back"))?;
    }
    Ok(())
}

/// More bytes than a number of 32 bits counts, with and without a sign. Only the last ones are compared, and those at which such a number
/// begins again.
fn above_four_gibibytes_are_exact(backend: &dyn Backend) -> CaseResult {
    const BYTES: usize = (4 << 30) + (1 << 17) + 3;
    const END: usize = 64;
    const PITCH: usize = 65_521;
    needs_free(backend, DEVICE, 2 * BYTES)?;
    let stream = Stream::new(backend)?;
    let (first, second) = (Block::new(backend, BYTES)?, Block::new(backend, BYTES)?);
    let places = [0..END, (2 << 30) - END..(2 << 30) + END, (4 << 30) - END..(4 << 30) + END, BYTES - END..BYTES];
    let holds = |block: &Block<'_>, byte: u8, what: &str| -> CaseResult {
        for place in &places {
            let got = read_span(backend, DEVICE, block.span(place.clone()))?;
            check!(got.iter().all(|&got| got == byte), "{what} of {BYTES} bytes did not reach the bytes {place:?}");
        }
        Ok(())
    };
    stream.set(first.all(), 1)?;
    stream.set(second.all(), 2)?;
    stream.synchronize()?;
    holds(&first, 1, "a fill")?;
    stream.copy(second.all(), first.all())?;
    stream.synchronize()?;
    holds(&second, 1, "a copy")?;
    stream.set(first.all(), 3)?;
    let rows = CopyShape::new(PITCH, BYTES / PITCH);
    stream.copy_rows(second.all(), first.all(), rows)?;
    stream.synchronize()?;
    for place in &places[..3] {
        let got = read_span(backend, DEVICE, second.span(place.clone()))?;
        check!(got.iter().all(|&got| got == 3), "a copy of {rows:?} did not reach the bytes {place:?}");
    }
    Ok(())
}

/// Addresses of copies and fills of nothing need not lie in a block.
fn of_nothing_need_no_memory(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let (block, pinned) = (Block::filled(backend, 256, 1)?, Pinned::holding(backend, &[3; 256])?);
    let null = Location::Device { device: DEVICE, ptr: DevicePtr::new(0) };
    let (device, host) = (Location::Device { device: DEVICE, ptr: block.ptr() }, Location::Host(pinned.ptr()));
    let mut pageable = 0_u8;
    let pageable = Location::Host(HostPtr::new(NonNull::from(&mut pageable)));
    for (what, dst, src) in [
        ("from null to a block", device, null),
        ("from a block to null", null, device),
        ("from null to null", null, null),
        ("from page-locked memory to null", null, host),
        ("from null to page-locked memory", host, null),
        ("from memory that is not page-locked to a block", device, pageable),
        ("from a block to memory that is not page-locked", pageable, device),
    ] {
        // SAFETY: a copy of 0 bytes has no obligation for its addresses.
        let copied = unsafe { backend.copy(&MemoryCopy::new(dst, src, 0), stream.id()) };
        copied.map_err(|error| Failure::new(format!("a copy of 0 bytes {what} failed: {error}")))?;
    }
    for pattern in [FillPattern::U8(9), FillPattern::U16(9), FillPattern::U32(9)] {
        // SAFETY: a fill of 0 elements has no obligation for its address.
        let filled = unsafe { backend.fill(&MemoryFill::new(DEVICE, DevicePtr::new(0), pattern, 0), stream.id()) };
        filled.map_err(|error| Failure::new(format!("a fill of 0 elements at null failed: {error}")))?;
    }
    stream.synchronize()?;
    check!(block.read()? == [1; 256] && pinned.read()? == [3; 256], "a copy or a fill of nothing changed something");
    Ok(())
}

fn run_in_order(backend: &dyn Backend) -> CaseResult {
    const BYTES: usize = 100_000;
    let stream = Stream::new(backend)?;
    let content = Random::new(13).bytes(BYTES);
    let blocks: Vec<Block<'_>> = (0..3).map(|_| Block::filled(backend, BYTES, 0)).collect::<Result<_, _>>()?;
    let (source, target) = (Pinned::holding(backend, &content)?, Pinned::new(backend, BYTES)?);
    // Each copy needs the one before it. All are enqueued before the first could have finished them all.
    stream.copy(blocks[0].all(), source.all())?;
    for step in 0..99 {
        stream.copy(blocks[(step + 1) % 3].all(), blocks[step % 3].all())?;
    }
    stream.copy(target.all(), blocks[0].all())?;
    stream.synchronize()?;
    check!(target.read()? == content, "a chain of 101 copies ended with other bytes than it began with");
    Ok(())
}

fn run_after_pending_work(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToHost)?;
    until_conclusive("a copy waits for the work before it", |load| {
        let block = Block::filled(backend, 4096, 0)?;
        let (new, seen) = (Pinned::holding(backend, &[1; 4096])?, Pinned::holding(backend, &[9; 4096])?);
        let (earlier, later) = (Block::filled(backend, 4096, 8)?, Block::filled(backend, 4096, 8)?);
        let stream = Stream::new(backend)?;
        busy.enqueue(&stream, load)?;
        stream.copy(seen.all(), block.all())?;
        stream.copy(earlier.all(), block.all())?;
        stream.copy(block.all(), new.all())?;
        stream.copy(later.all(), block.all())?;
        let pending = stream.is_pending()?;
        stream.synchronize()?;
        check!(seen.read()? == [0; 4096], "a copy to the device overtook a copy to the host before it");
        check!(block.read()? == [1; 4096], "a copy to the device did not arrive");
        check!(earlier.read()? == [0; 4096], "a copy on the device was overtaken by a copy to its source");
        check!(later.read()? == [1; 4096], "a copy on the device overtook the copy that writes its source");
        Ok(Attempt::seen(pending))
    })
}
