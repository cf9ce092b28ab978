//! Page-locked host memory.

use std::ops::Range;

use highwater_hal::{Backend, HostMemoryKind, HostOptions};

use crate::case::{CaseResult, cases, check, check_eq, check_error};
use crate::device::{Block, Pages, Pinned, Registered, RegisteredFile, Stream, file_in_memory, read_file, seal_writes};
use crate::random::Random;

cases! {
    group "host";
    memory_is_usable_by_the_cpu: ["host.usable"];
    memory_is_usable_by_every_device: ["host.usable"];
    addresses_are_aligned: ["host.aligned"];
    zero_bytes_are_refused: ["host.zero"];
    more_than_there_is_is_refused: ["host.exhausted"];
    freed_blocks_are_not_counted: ["host.free-counts"];
    device_address_is_the_host_address: ["host.device-address"] needs [has::host_address_is_device_address];
    write_combined_memory_is_usable: ["host.usable", "host.aligned"] needs [has::write_combined];
    registered_memory_is_usable: ["host.usable", "backend.live-objects"] needs [has::host_register];
    registered_memory_is_copied_up_to_its_ends: ["host.register-copies"] needs [has::host_register];
    registered_memory_does_not_overlap: ["host.register-overlap"] needs [has::host_register];
    allocated_memory_is_not_registered: ["host.register-overlap"] needs [has::host_register];
    registrations_share_a_page: ["host.register-apart", "host.register-copies"] needs [has::host_register];
    registrations_touch: ["host.register-apart", "host.register-copies"] needs [has::host_register];
    read_only_memory_is_registered: ["host.register-read-only"] needs [has::host_register, has::host_register_read_only];
    sealed_memory_is_registered: ["host.register-read-only"] needs [has::host_register, has::host_register_read_only];
    mappings_of_one_file_are_one_memory: ["host.register-apart", "host.register-copies"] needs [has::host_register];
    unknown_memory_is_not_unregistered: ["host.unregister-unknown"] needs [has::host_register];
}

const SIZES: [usize; 8] = [1, 63, 64, 65, 4095, 4096, 4097, (3 << 20) + 5];

fn memory_is_usable_by_the_cpu(backend: &dyn Backend) -> CaseResult {
    let mut blocks = Vec::new();
    for bytes in SIZES {
        let content = Random::new(bytes as u64).bytes(bytes);
        blocks.push((Pinned::holding(backend, &content)?, content));
    }
    for (pinned, content) in &blocks {
        check!(pinned.read()? == *content, "{} page-locked bytes differ from the written ones", content.len());
    }
    Ok(())
}

/// Copies bytes of host memory to every device and back to another block.
fn travels(backend: &dyn Backend, source: crate::device::Span<'_>, content: &[u8]) -> CaseResult {
    for device in 0..backend.device_count() {
        let stream = Stream::on(backend, device)?;
        let block = Block::on(backend, device, content.len())?;
        let back = Pinned::new(backend, content.len())?;
        stream.copy(block.all(), source)?;
        stream.copy(back.all(), block.all())?;
        stream.synchronize()?;
        check!(back.read()? == content, "{} bytes came back changed from device {device}", content.len());
    }
    Ok(())
}

fn memory_is_usable_by_every_device(backend: &dyn Backend) -> CaseResult {
    for bytes in SIZES {
        let content = Random::new(bytes as u64).bytes(bytes);
        let pinned = Pinned::holding(backend, &content)?;
        travels(backend, pinned.all(), &content)?;
    }
    Ok(())
}

fn addresses_are_aligned(backend: &dyn Backend) -> CaseResult {
    let mut alive = Vec::new();
    for bytes in SIZES.iter().chain(&SIZES).copied() {
        let pinned = Pinned::new(backend, bytes)?;
        let address = pinned.ptr().address();
        check!(address.is_multiple_of(64), "{bytes} page-locked bytes at {address:#x}, which is no multiple of 64");
        alive.push(pinned);
    }
    Ok(())
}

fn zero_bytes_are_refused(backend: &dyn Backend) -> CaseResult {
    let before = backend.live_objects();
    check_error!(backend.host_allocator().allocate(0, &HostOptions::new()), InvalidArgument, "allocate of 0 bytes");
    check_eq!(backend.live_objects(), before, "live objects after a refused call");
    Ok(())
}

fn more_than_there_is_is_refused(backend: &dyn Backend) -> CaseResult {
    // More than any process can address.
    const BYTES: usize = 1 << 48;
    let before = backend.live_objects();
    let allocator = backend.host_allocator();
    check_error!(allocator.allocate(BYTES, &HostOptions::new()), OutOfMemory, "allocate of {BYTES} bytes");
    check_eq!(backend.live_objects(), before, "live objects after a refused call");
    let content = Random::new(5).bytes(4096);
    travels(backend, Pinned::holding(backend, &content)?.all(), &content)
}

fn freed_blocks_are_not_counted(backend: &dyn Backend) -> CaseResult {
    let counted = || backend.live_objects().host_allocations;
    let none = counted();
    let (first, second) = (Pinned::new(backend, 100)?, Pinned::new(backend, 100)?);
    check_eq!(counted(), none + 2, "page-locked blocks with two allocated");
    drop(first);
    check_eq!(counted(), none + 1, "page-locked blocks with one of two freed");
    drop(second);
    check_eq!(counted(), none, "page-locked blocks with both freed");
    Ok(())
}

fn device_address_is_the_host_address(backend: &dyn Backend) -> CaseResult {
    let pinned = Pinned::new(backend, 4096)?;
    for device in 0..backend.device_count() {
        if backend.capabilities(device)?.host_address_is_device_address {
            let address = backend.host_allocator().device_address(pinned.ptr(), device)?;
            check_eq!(address.get(), pinned.ptr().address() as u64, "address of page-locked memory on device {device}");
        }
    }
    Ok(())
}

fn write_combined_memory_is_usable(backend: &dyn Backend) -> CaseResult {
    let options = HostOptions::new().with_kind(HostMemoryKind::WriteCombined);
    let content = Random::new(6).bytes(10_000);
    let pinned = Pinned::with_options(backend, content.len(), &options)?;
    check!(pinned.ptr().address().is_multiple_of(64), "write-combined memory is not aligned");
    pinned.write(&content)?;
    travels(backend, pinned.all(), &content)?;
    check!(pinned.read()? == content, "the CPU does not read back its own bytes from write-combined memory");
    Ok(())
}

fn registered_memory_is_usable(backend: &dyn Backend) -> CaseResult {
    const BYTES: usize = 1 << 18;
    let before = backend.live_objects().host_allocations;
    let content = Random::new(7).bytes(BYTES);
    let mut registered = Registered::new(backend, &content)?;
    check_eq!(backend.live_objects().host_allocations, before + 1, "page-locked blocks with one registered");
    travels(backend, registered.all(), &content)?;
    let block = Block::filled(backend, BYTES, 0x3c)?;
    let stream = Stream::new(backend)?;
    stream.copy(registered.all(), block.all())?;
    stream.synchronize()?;
    check!(registered.read()? == [0x3c; BYTES], "a copy to registered memory did not arrive");
    registered.unregister()?;
    check_eq!(backend.live_objects().host_allocations, before, "page-locked blocks after unregister");
    check!(registered.memory().bytes() == [0x3c; BYTES], "registered memory lost its bytes when it was unregistered");
    Ok(())
}

/// Makes two adjacent registrations, and copies inside each of them, some up to the border.
fn registered_memory_is_copied_up_to_its_ends(backend: &dyn Backend) -> CaseResult {
    const PIECE: usize = 1 << 18;
    let content = Random::new(9).bytes(2 * PIECE);
    let (stream, block) = (Stream::new(backend)?, Block::new(backend, 2 * PIECE)?);
    let source = Registered::in_pieces(backend, &content, PIECE)?;
    let target = Registered::in_pieces(backend, &vec![0x5a; 2 * PIECE], PIECE)?;
    let mut expected = vec![0x5a; 2 * PIECE];
    for (start, end) in [
        (0, 1),
        (1, 4096),
        (5000, PIECE - 1),
        (PIECE - 1, PIECE),
        (PIECE, PIECE + 1),
        (PIECE + 1, PIECE + 64),
        (PIECE + 4096, 2 * PIECE - 3),
        (2 * PIECE - 1, 2 * PIECE),
    ] {
        stream.copy(block.span(start..end), source.span(start..end))?;
        stream.copy(target.span(start..end), block.span(start..end))?;
        expected[start..end].copy_from_slice(&content[start..end]);
    }
    stream.synchronize()?;
    check!(target.read()? == expected, "copies between two registrations that touch changed bytes");
    for half in [0..PIECE, PIECE..2 * PIECE] {
        stream.copy(block.span(half.clone()), source.span(half.clone()))?;
        stream.copy(target.span(half.clone()), block.span(half))?;
    }
    stream.synchronize()?;
    check!(target.read()? == content, "whole registrations that touch were copied and changed");
    Ok(())
}

/// The bytes of the smallest page.
const PAGE: usize = 4096;

fn registered_memory_does_not_overlap(backend: &dyn Backend) -> CaseResult {
    let content = Random::new(8).bytes(1 << 17);
    // Whole pages, and a range that begins and ends inside a page.
    for (start, end) in [(2 * PAGE, 8 * PAGE), (2 * PAGE + 100, 8 * PAGE - 100)] {
        let mut memory = Registered::unregistered(backend, &content);
        memory.register(start..end)?;
        let before = backend.live_objects();
        for (what, range) in [
            ("the same range", start..end),
            ("its first half", start..(start + end) / 2),
            ("its second half", (start + end) / 2..end),
            ("its middle", start + PAGE..end - PAGE),
            ("its first byte", start..start + 1),
            ("its last byte", end - 1..end),
            ("a range around it", start - PAGE..end + PAGE),
            ("a range that ends behind its first byte", start - PAGE..start + 1),
            ("a range that begins at its last byte", end - 1..end + PAGE),
            ("a longer range from its start", start..end + PAGE),
            ("a longer range up to its end", start - PAGE..end),
        ] {
            check_error!(memory.register(range), InvalidArgument, "register of registered memory, {what}");
            check_eq!(backend.live_objects(), before, "live objects after register of {what} was refused");
        }
        travels(backend, memory.span(start..end), &content[start..end])?;
    }
    Ok(())
}

fn allocated_memory_is_not_registered(backend: &dyn Backend) -> CaseResult {
    let content = Random::new(10).bytes(4 * PAGE);
    let pinned = Pinned::holding(backend, &content)?;
    let before = backend.live_objects();
    for (what, range) in [("all", 0..4 * PAGE), ("the first byte", 0..1), ("the middle", PAGE..2 * PAGE)] {
        let start = pinned.ptr().offset(range.start);
        // SAFETY: inside the block, which lives until after the call. If the call succeeds against the promise, the case fails,
        // and the registration ends below.
        let refused = unsafe { backend.host_allocator().register(start, range.len(), &HostOptions::new()) };
        if refused.is_ok() {
            // SAFETY: as above; no work uses the range.
            let _ = unsafe { backend.host_allocator().unregister(start) };
        }
        check_error!(refused, InvalidArgument, "register of a block of `allocate`, {what}");
    }
    check_eq!(backend.live_objects(), before, "live objects after refused calls");
    travels(backend, pinned.all(), &content)
}

/// Registers ranges and unregisters them in several orders. All others must work at each step.
fn work_apart(backend: &dyn Backend, ranges: &[Range<usize>], orders: &[&[usize]]) -> CaseResult {
    let content = Random::new(11).bytes(ranges.iter().map(|range| range.end).max().unwrap_or(0));
    let before = backend.live_objects().host_allocations;
    for order in orders {
        let mut memory = Registered::unregistered(backend, &content);
        let mut live: Vec<Range<usize>> = Vec::new();
        for range in ranges {
            memory.register(range.clone())?;
            live.push(range.clone());
        }
        check_eq!(backend.live_objects().host_allocations, before + ranges.len() as u64, "live registrations");
        for &index in *order {
            for range in &live {
                travels(backend, memory.span(range.clone()), &content[range.clone()])?;
                arrives(backend, &mut memory, range)?;
            }
            memory.unregister_part(&ranges[index])?;
            live.retain(|range| *range != ranges[index]);
            let counted = backend.live_objects().host_allocations;
            check_eq!(counted, before + live.len() as u64, "live registrations after one of several was unregistered");
            // Its place is free again.
            memory.register(ranges[index].clone())?;
            memory.unregister_part(&ranges[index])?;
        }
    }
    Ok(())
}

/// Copies into a registered range. No byte beside it may change.
fn arrives(backend: &dyn Backend, memory: &mut Registered<'_>, range: &Range<usize>) -> CaseResult {
    let before = memory.read()?;
    let turned: Vec<u8> = before[range.clone()].iter().map(|byte| !byte).collect();
    let stream = Stream::new(backend)?;
    for bytes in [turned, before[range.clone()].to_vec()] {
        let block = Block::holding(backend, &bytes)?;
        stream.copy(memory.span(range.clone()), block.all())?;
        stream.synchronize()?;
        let mut expected = before.clone();
        expected[range.clone()].copy_from_slice(&bytes);
        check!(memory.read()? == expected, "a copy to the registered bytes {range:?} did not arrive there alone");
    }
    Ok(())
}

fn registrations_share_a_page(backend: &dyn Backend) -> CaseResult {
    let ranges = [0..100, 128..129, 129..1000, 1064..PAGE + 700, PAGE + 700..PAGE + 764, PAGE + 1000..3 * PAGE];
    work_apart(backend, &ranges, &[&[0, 1, 2, 3, 4, 5], &[5, 3, 4, 1, 0, 2]])
}

fn registrations_touch(backend: &dyn Backend) -> CaseResult {
    let ranges = [PAGE..3 * PAGE, 0..PAGE, 3 * PAGE..4 * PAGE];
    work_apart(backend, &ranges, &[&[0, 1, 2], &[2, 1, 0]])
}

/// Copies from registered memory that the CPU may only read, before and after the file behind it was written.
/// Short registrations count too, because a backend may copy them once instead of page-locking them.
fn read_only_memory_is_registered(backend: &dyn Backend) -> CaseResult {
    const PAGE: usize = 4096;
    let before = backend.live_objects();
    for bytes in [PAGE, 1 << 14, 1 << 16, 1 << 18] {
        let content = Random::new(10).bytes(bytes);
        let registered = RegisteredFile::new(backend, &content)?;
        travels(backend, registered.all(), &content)?;
        let part = bytes - PAGE + 5..bytes;
        travels(backend, registered.span(part.clone()), &content[part])?;
        // A copy of the pages, made by the registration, would keep the old bytes.
        let content = Random::new(11).bytes(bytes);
        registered.write(&content);
        travels(backend, registered.all(), &content)?;
        drop(registered);
        check_eq!(backend.live_objects(), before, "live objects after unregister of {bytes} bytes");
    }
    Ok(())
}

/// Registers memory that no mapping can write, as importers of shared page-locked memory do.
fn sealed_memory_is_registered(backend: &dyn Backend) -> CaseResult {
    const BYTES: usize = 1 << 17;
    let content = Random::new(12).bytes(BYTES);
    let file = file_in_memory(&content);
    seal_writes(&file);
    let before = backend.live_objects();
    let registered = RegisteredFile::of(backend, &file, BYTES, true)?;
    travels(backend, registered.all(), &content)?;
    let part = 4096..BYTES - 4095;
    travels(backend, registered.span(part.clone()), &content[part])?;
    drop(registered);
    check!(read_file(&file, BYTES) == content, "a registration for reading changed the memory");
    check_eq!(backend.live_objects(), before, "live objects after unregister");
    Ok(())
}

/// Registers several mappings of one file at once: two runtimes of a process share page-locked memory in this way.
fn mappings_of_one_file_are_one_memory(backend: &dyn Backend) -> CaseResult {
    const BYTES: usize = 1 << 16;
    let file = file_in_memory(&[0; BYTES]);
    let before = backend.live_objects();
    let (first, second) =
        (RegisteredFile::of(backend, &file, BYTES, false)?, RegisteredFile::of(backend, &file, BYTES, false)?);
    for (seed, writer) in [(13, &first), (14, &second)] {
        let content = Random::new(seed).bytes(BYTES);
        for device in 0..backend.device_count() {
            file_is_written(backend, device, writer, &content)?;
            check!(read_file(&file, BYTES) == content, "a copy to one mapping of a file did not arrive in the file");
            travels(backend, first.all(), &content)?;
            travels(backend, second.all(), &content)?;
        }
    }
    // The end of one registration leaves the other.
    drop(first);
    let content = Random::new(15).bytes(BYTES);
    second.write(&content);
    travels(backend, second.all(), &content)?;
    drop(second);
    check_eq!(backend.live_objects(), before, "live objects after unregister");
    Ok(())
}

/// Copies bytes from a device to a mapping of a file.
fn file_is_written(backend: &dyn Backend, device: u32, to: &RegisteredFile<'_>, content: &[u8]) -> CaseResult {
    let stream = Stream::on(backend, device)?;
    let block = Block::on(backend, device, content.len())?;
    // Different bytes first, so that bytes from the device before do not pass for these.
    for bytes in [vec![0x5a; content.len()], content.to_vec()] {
        block.write(0, &bytes)?;
        stream.copy(to.all(), block.all())?;
        stream.synchronize()?;
    }
    Ok(())
}

fn unknown_memory_is_not_unregistered(backend: &dyn Backend) -> CaseResult {
    let never = Pages::new(1);
    let mut once = Registered::new(backend, &[1; 100])?;
    once.unregister()?;
    let before = backend.live_objects();
    let allocator = backend.host_allocator();
    // SAFETY: no device work uses the addresses.
    let (unknown, twice) = unsafe { (allocator.unregister(never.ptr()), allocator.unregister(once.memory().ptr())) };
    check_error!(unknown, InvalidPointer, "unregister of memory that was never registered");
    check_error!(twice, InvalidPointer, "a second unregister");
    check_eq!(backend.live_objects(), before, "live objects after refused calls");
    Ok(())
}
