//! The description of memory, which any code of the process may have allocated. The cases describe memory of the backend.

use highwater_hal::numbers::Coded;
use highwater_hal::{Backend, DeviceMemoryKind, DevicePtr, MemoryRange, PhysicalMemoryOptions, RangeKind, Transport};

use super::sharing::transports;
use crate::case::{CaseResult, Failure, cases, check, check_eq, check_error};
use crate::device::{Addresses, Block, DEVICE, PhysicalMemory, Stream};

cases! {
    group "foreign";
    blocks_are_described_from_every_address: ["foreign.range", "foreign.kind"] needs [has::foreign_memory];
    mappings_are_described_one_by_one: ["foreign.range", "foreign.kind"] needs [has::foreign_memory, has::mapped_memory];
    stream_ordered_blocks_are_told_apart: ["foreign.range", "foreign.kind"]
        needs [has::foreign_memory, has::stream_ordered_memory];
    blocks_list_the_transports_that_export_them: ["foreign.transports"]
        needs [has::foreign_memory, has::shareable_memory];
    refused_exports_leave_the_transports: ["foreign.transports", "ipc.export-shareable", "ipc.export-transport"]
        needs [has::foreign_memory, has::shareable_memory];
    mappings_list_the_transports_that_export_them: ["foreign.transports"]
        needs [has::foreign_memory, has::shareable_memory, has::mapped_memory];
    addresses_of_nothing_are_refused: ["foreign.unknown"] needs [has::foreign_memory];
    reserved_addresses_are_nothing: ["foreign.unknown"] needs [has::foreign_memory, has::mapped_memory];
    memory_of_another_device_is_refused: ["foreign.unknown"] needs [TWO_DEVICES, has::foreign_memory];
    devices_that_do_not_exist_describe_nothing: ["backend.device-checked"] needs [has::foreign_memory];
}

const BYTES: usize = 1 << 16;

/// Describes memory from its first byte, from its last byte and from between, which must give one range.
#[track_caller]
fn described(backend: &dyn Backend, ptr: DevicePtr, bytes: usize) -> Result<MemoryRange, Failure> {
    let range = backend.describe_memory(DEVICE, ptr)?;
    check_eq!((range.base, range.bytes), (ptr, bytes), "the range of {bytes} bytes at {ptr:?}");
    for offset in [1, bytes / 2 + 3, bytes - 1] {
        let inside = backend.describe_memory(DEVICE, ptr.offset(offset))?;
        check_eq!(inside, range, "the range that contains the byte at {offset} of {bytes}");
    }
    Ok(range)
}

fn blocks_are_described_from_every_address(backend: &dyn Backend) -> CaseResult {
    let blocks = (0..3).map(|size| Block::on(backend, DEVICE, BYTES << size)).collect::<Result<Vec<_>, _>>()?;
    let before = backend.live_objects();
    for block in &blocks {
        let range = described(backend, block.ptr(), block.bytes())?;
        check_eq!(range.kind, RangeKind::Plain, "the kind of a plain block");
    }
    check_eq!(backend.live_objects(), before, "live objects after descriptions");
    Ok(())
}

fn mappings_are_described_one_by_one(backend: &dyn Backend) -> CaseResult {
    let piece = backend.capabilities(DEVICE)?.mapped_memory_granularity;
    let addresses = Addresses::new(backend, DEVICE, 4 * piece)?;
    // A large mapping with a neighbor on either side, and memory whose id is destroyed.
    let pieces = [0..piece, piece..3 * piece, 3 * piece..4 * piece];
    for range in &pieces {
        addresses.fill_in(range.clone())?.destroy()?;
    }
    let before = backend.live_objects();
    for range in &pieces {
        let found = described(backend, addresses.ptr().offset(range.start), range.len())?;
        check_eq!(found.kind, RangeKind::Mapped, "the kind of mapped memory");
    }
    check_eq!(backend.live_objects(), before, "live objects after descriptions");
    Ok(())
}

fn stream_ordered_blocks_are_told_apart(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let ordered = Block::with_kind(backend, DEVICE, BYTES, DeviceMemoryKind::StreamOrdered(stream.id()))?;
    stream.synchronize()?;
    let range = described(backend, ordered.ptr(), BYTES)?;
    check_eq!(range.kind, RangeKind::StreamOrdered, "the kind of a stream-ordered block");
    check!(range.transports.is_empty(), "a stream-ordered block lists the transports {:?}", range.transports);
    Ok(())
}

/// Checks that each transport that a range lists exports it.
fn exports(
    range: &MemoryRange,
    export: impl Fn(Transport) -> highwater_hal::Result<highwater_hal::MemoryHandle>,
) -> CaseResult {
    for &transport in Transport::ALL.iter().filter(|transport| range.transports.contains(**transport)) {
        let handle = export(transport);
        check!(handle.is_ok(), "memory lists {transport:?}, and its export failed: {:?}", handle.err());
        check_eq!(handle?.bytes, range.bytes as u64, "the bytes in a handle of described memory");
    }
    Ok(())
}

fn blocks_list_the_transports_that_export_them(backend: &dyn Backend) -> CaseResult {
    let plain = Block::on(backend, DEVICE, BYTES)?;
    exports(&backend.describe_memory(DEVICE, plain.ptr())?, |transport| plain.export(transport))?;
    for transport in transports(backend)? {
        let block = Block::with_kind(backend, DEVICE, BYTES, DeviceMemoryKind::Shareable(transport))?;
        let range = backend.describe_memory(DEVICE, block.ptr().offset(BYTES - 1))?;
        check_eq!(range.base, block.ptr(), "the start of shareable memory");
        check!(range.transports.contains(transport), "memory for {transport:?} lists {:?}", range.transports);
        exports(&range, |transport| block.export(transport))?;
    }
    Ok(())
}

/// Memory that was made shareable by one transport is exported by each other one, which is refused.
fn refused_exports_leave_the_transports(backend: &dyn Backend) -> CaseResult {
    for transport in transports(backend)? {
        let block = Block::with_kind(backend, DEVICE, BYTES, DeviceMemoryKind::Shareable(transport))?;
        let before = backend.describe_memory(DEVICE, block.ptr())?;
        for &other in Transport::ALL.iter().filter(|other| !before.transports.contains(**other)) {
            let refused = block.export(other);
            check!(refused.is_err(), "memory that lists {:?} was exported by {other:?}", before.transports);
            let after = backend.describe_memory(DEVICE, block.ptr())?;
            check_eq!(after, before, "memory for {transport:?} after an export by {other:?} was refused");
            exports(&after, |transport| block.export(transport))?;
        }
    }
    Ok(())
}

fn mappings_list_the_transports_that_export_them(backend: &dyn Backend) -> CaseResult {
    let piece = backend.capabilities(DEVICE)?.mapped_memory_granularity;
    let addresses = Addresses::new(backend, DEVICE, 2 * piece)?;
    // Memory of this process alone lies beside it.
    let private = addresses.fill_in(piece..2 * piece)?;
    let beside = backend.describe_memory(DEVICE, addresses.ptr().offset(piece))?;
    exports(&beside, |transport| addresses.export(piece, transport))?;
    for transport in transports(backend)?.into_iter().filter(|&transport| transport != Transport::Legacy) {
        let options = PhysicalMemoryOptions::new(piece).with_shareable(transport);
        let memory = PhysicalMemory::create(backend, DEVICE, &options)?;
        addresses.map(0, &memory, piece)?;
        addresses.give_access(0..piece, DEVICE)?;
        let range = backend.describe_memory(DEVICE, addresses.ptr())?;
        check!(range.transports.contains(transport), "mapped memory for {transport:?} lists {:?}", range.transports);
        exports(&range, |transport| addresses.export(0, transport))?;
        addresses.unmap(0..piece)?;
    }
    drop((addresses, private));
    Ok(())
}

fn addresses_of_nothing_are_refused(backend: &dyn Backend) -> CaseResult {
    let on_host = Box::new([0_u8; 64]);
    let nothing = [0, on_host.as_ptr().addr() as u64, u64::MAX - 4095];
    for address in nothing {
        let described = backend.describe_memory(DEVICE, DevicePtr::new(address));
        check_error!(described, InvalidPointer, "describe_memory of {address:#x}");
    }
    Ok(())
}

fn reserved_addresses_are_nothing(backend: &dyn Backend) -> CaseResult {
    let piece = backend.capabilities(DEVICE)?.mapped_memory_granularity;
    let addresses = Addresses::new(backend, DEVICE, 2 * piece)?;
    let memory = addresses.fill_in(0..piece)?;
    let behind = backend.describe_memory(DEVICE, addresses.ptr().offset(piece));
    check_error!(behind, InvalidPointer, "describe_memory of addresses without memory");
    // A description that is kept must not outlive the mapping.
    described(backend, addresses.ptr(), piece)?;
    addresses.unmap(0..piece)?;
    for offset in [0, piece - 1] {
        let unmapped = backend.describe_memory(DEVICE, addresses.ptr().offset(offset));
        check_error!(unmapped, InvalidPointer, "describe_memory of memory that was described and then unmapped");
    }
    let larger = addresses.fill_in(0..2 * piece)?;
    described(backend, addresses.ptr(), 2 * piece)?;
    drop(larger);
    drop((addresses, memory));
    Ok(())
}

fn memory_of_another_device_is_refused(backend: &dyn Backend) -> CaseResult {
    let far = Block::on(backend, 1, BYTES)?;
    check_error!(backend.describe_memory(DEVICE, far.ptr()), WrongDevice, "describe_memory of another device's block");
    check_eq!(backend.describe_memory(1, far.ptr())?.base, far.ptr(), "the block as its own device describes it");
    if backend.capabilities(1)?.mapped_memory {
        let mapped = Block::mapped(backend, 1, &[backend.capabilities(1)?.mapped_memory_granularity])?;
        let described = backend.describe_memory(DEVICE, mapped.ptr());
        check_error!(described, WrongDevice, "describe_memory of another device's mapped memory");
    }
    Ok(())
}

fn devices_that_do_not_exist_describe_nothing(backend: &dyn Backend) -> CaseResult {
    let block = Block::on(backend, DEVICE, BYTES)?;
    for device in [backend.device_count(), u32::MAX] {
        check_error!(backend.describe_memory(device, block.ptr()), InvalidArgument, "describe_memory({device})");
    }
    Ok(())
}
