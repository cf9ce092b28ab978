//! Sizes that no memory has, and memory that comes back: each kind of memory on each device.

use highwater_hal::{
    AllocateOptions, Backend, DeviceMemoryKind, Error, ErrorKind, HostMemoryKind, HostOptions, PhysicalMemoryOptions,
    Result, Transport,
};

use super::memory::makers;
use crate::case::{CaseResult, Failure, cases, check, check_eq, check_error};
use crate::device::{Block, Pinned, Stream};

cases! {
    group "sizes";
    more_than_there_is: ["memory.exhausted"];
    more_mapped_memory_than_there_is: ["mapped.exhausted", "mapped.sizes"] needs [has::mapped_memory];
    more_host_memory_than_there_is: ["host.exhausted"];
    nothing: ["memory.zero"];
    no_host_memory: ["host.zero"];
    small_blocks_are_aligned: ["memory.aligned"];
    freed_bytes_of_each_kind_come_back: ["memory.free-returns"];
}

/// Sizes around the ends of the numbers, at which a sum or a rounding overflows.
const HUGE: [usize; 10] = [
    usize::MAX,
    usize::MAX - 1,
    usize::MAX - 63,
    usize::MAX - 255,
    usize::MAX - 4095,
    usize::MAX - (2 << 20) + 1,
    usize::MAX / 2 + 2,
    isize::MAX as usize + 1,
    isize::MAX as usize,
    isize::MAX as usize - 255,
];

/// Returns sizes that exceed this many bytes by as little as one byte.
fn beyond(total: u64) -> impl Iterator<Item = usize> {
    let total = usize::try_from(total).unwrap_or(usize::MAX / 64);
    [total + 1, total + 256, total.saturating_mul(2), total.saturating_mul(3) + 7].into_iter().chain(HUGE)
}

/// Returns the kinds of memory of a device, in words, with the kind that `allocate` takes.
fn kinds(backend: &dyn Backend, stream: &Stream<'_>) -> Result<Vec<DeviceMemoryKind>> {
    let can = backend.capabilities(stream.id().device())?;
    let mut kinds = vec![DeviceMemoryKind::Plain];
    if can.stream_ordered_memory {
        kinds.push(DeviceMemoryKind::StreamOrdered(stream.id()));
    }
    for transport in [Transport::Legacy, Transport::Descriptor, Transport::Fabric] {
        if can.shareable_memory && can.ipc_transports.contains(transport) {
            kinds.push(DeviceMemoryKind::Shareable(transport));
        }
    }
    Ok(kinds)
}

/// Returns the kinds of page-locked memory that every device has.
fn host_kinds(backend: &dyn Backend) -> Result<Vec<HostMemoryKind>> {
    let mut kinds = vec![HostMemoryKind::Default];
    if backend.capabilities(crate::device::DEVICE)?.write_combined {
        kinds.push(HostMemoryKind::WriteCombined);
    }
    Ok(kinds)
}

/// Returns roughly the largest half of the free memory that one block can have, in whole pieces.
fn large_bytes(backend: &dyn Backend, device: u32, make: impl Fn(usize) -> Result<()>) -> Result<usize> {
    let granularity = backend.capabilities(device)?.mapped_memory_granularity.max(1 << 16);
    let mut bytes = usize::try_from(backend.memory_info(device)?.free / 10 * 6).unwrap_or(usize::MAX);
    loop {
        bytes = (bytes / granularity * granularity).max(granularity);
        match make(bytes) {
            Err(error) if error.kind() == ErrorKind::OutOfMemory && bytes > granularity => bytes /= 2,
            answer => return answer.map(|()| bytes),
        }
    }
}

fn on_each_device(backend: &dyn Backend, prove: impl Fn(u32, &Stream<'_>) -> CaseResult) -> CaseResult {
    (0..backend.device_count()).try_for_each(|device| {
        let stream = Stream::on(backend, device)?;
        prove(device, &stream).map_err(|failure| failure.with_details(&format!("on device {device}")))
    })
}

fn more_than_there_is(backend: &dyn Backend) -> CaseResult {
    on_each_device(backend, |device, stream| {
        let total = backend.memory_info(device)?.total;
        let plain = |bytes| Block::on(backend, device, bytes).map(drop);
        let large = large_bytes(backend, device, plain)?;
        for kind in kinds(backend, stream)? {
            let before = backend.live_objects();
            for bytes in beyond(total) {
                let options = AllocateOptions::new(bytes).with_kind(kind);
                check_error!(backend.allocate(device, &options), OutOfMemory, "allocate of {bytes} bytes of {kind:?}");
                check_eq!(backend.live_objects(), before, "live objects after {bytes} bytes of {kind:?} were refused");
            }
            check_eq!(backend.memory_info(device)?.total, total, "total memory after refused allocations of {kind:?}");
            let block = Block::with_kind(backend, device, 4096, kind)?;
            stream.set(block.all(), 5)?;
            stream.synchronize()?;
            check!(block.read()? == [5; 4096], "{kind:?} memory does not work after refused allocations");
        }
        // What fitted before fits again.
        let again = plain(large);
        check!(again.is_ok(), "{large} bytes fitted before the refused allocations, and now: {:?}", again.err());
        Ok(())
    })
}

fn more_mapped_memory_than_there_is(backend: &dyn Backend) -> CaseResult {
    on_each_device(backend, |device, _| {
        let can = backend.capabilities(device)?;
        let (piece, total) = (can.mapped_memory_granularity, backend.memory_info(device)?.total);
        let before = backend.live_objects();
        let mut transports = vec![None];
        if can.shareable_memory {
            let all = [Transport::Descriptor, Transport::Fabric].into_iter();
            transports.extend(all.filter(|&transport| can.ipc_transports.contains(transport)).map(Some));
        }
        for transport in transports {
            let create = |bytes| {
                let options = PhysicalMemoryOptions::new(bytes);
                let options = match transport {
                    Some(transport) => options.with_shareable(transport),
                    None => options,
                };
                backend.create_memory(device, &options)
            };
            for bytes in beyond(total) {
                let whole = bytes / piece * piece;
                if whole as u64 > total {
                    check_error!(create(whole), OutOfMemory, "create_memory of {whole} bytes for {transport:?}");
                }
                if bytes != whole {
                    check_error!(create(bytes), InvalidArgument, "create_memory of {bytes} bytes for {transport:?}");
                    let reserved = backend.reserve_addresses(device, bytes);
                    check_error!(reserved, InvalidArgument, "reserve_addresses of {bytes} bytes");
                }
            }
            check_error!(create(0), InvalidArgument, "create_memory of 0 bytes for {transport:?}");
            check_error!(create(piece + 1), InvalidArgument, "create_memory of an odd size for {transport:?}");
            check_eq!(backend.live_objects(), before, "live objects after refused calls for {transport:?}");
        }
        check_error!(backend.reserve_addresses(device, 0), InvalidArgument, "reserve_addresses of 0 bytes");
        check_eq!(backend.memory_info(device)?.total, total, "total memory after refused calls");
        let block = Block::mapped(backend, device, &[piece])?;
        block.write(0, &[5; 4096])?;
        check!(block.read()?[..4096] == [5; 4096], "mapped memory does not work after refused calls");
        Ok(())
    })
}

fn more_host_memory_than_there_is(backend: &dyn Backend) -> CaseResult {
    let allocator = backend.host_allocator();
    for kind in host_kinds(backend)? {
        let (options, before) = (HostOptions::new().with_kind(kind), backend.live_objects());
        // More than any process can address.
        for bytes in HUGE.into_iter().chain([1 << 48, (1 << 48) + 1, 1 << 62]) {
            check_error!(allocator.allocate(bytes, &options), OutOfMemory, "allocate of {bytes} bytes of {kind:?}");
            check_eq!(backend.live_objects(), before, "live objects after {bytes} bytes of {kind:?} were refused");
        }
        let pinned = Pinned::with_options(backend, 4096, &options)?;
        pinned.write(&[5; 4096])?;
        check!(pinned.read()? == [5; 4096], "{kind:?} host memory does not work after refused allocations");
    }
    Ok(())
}

fn nothing(backend: &dyn Backend) -> CaseResult {
    on_each_device(backend, |device, stream| {
        for kind in kinds(backend, stream)? {
            let before = backend.live_objects();
            let options = AllocateOptions::new(0).with_kind(kind);
            check_error!(backend.allocate(device, &options), InvalidArgument, "allocate of 0 bytes of {kind:?}");
            check_eq!(backend.live_objects(), before, "live objects after 0 bytes of {kind:?} were refused");
        }
        Ok(())
    })
}

fn no_host_memory(backend: &dyn Backend) -> CaseResult {
    for kind in host_kinds(backend)? {
        let (options, before) = (HostOptions::new().with_kind(kind), backend.live_objects());
        let allocated = backend.host_allocator().allocate(0, &options);
        check_error!(allocated, InvalidArgument, "allocate of 0 bytes of {kind:?} host memory");
        check_eq!(backend.live_objects(), before, "live objects after 0 bytes of {kind:?} host memory were refused");
    }
    Ok(())
}

fn small_blocks_are_aligned(backend: &dyn Backend) -> CaseResult {
    on_each_device(backend, |device, stream| {
        for kind in kinds(backend, stream)? {
            let mut blocks: Vec<Block<'_>> = Vec::new();
            for bytes in [1, 2, 8, 16, 31, 32, 64, 100, 127, 128, 129, 192, 255, 256, 257, 384, 1000] {
                let block = Block::with_kind(backend, device, bytes, kind)?;
                check!(block.ptr().is_aligned_to(256), "{bytes} bytes of {kind:?} at {:?}", block.ptr());
                let end = block.ptr().offset(bytes).get();
                let apart = |other: &Block<'_>| {
                    end <= other.ptr().get() || other.ptr().offset(other.bytes()).get() <= block.ptr().get()
                };
                check!(blocks.iter().all(apart), "{bytes} bytes of {kind:?} overlap another block");
                blocks.push(block);
            }
            stream.synchronize()?;
        }
        Ok(())
    })
}

/// Allocates and frees more than each device has, of each kind of memory.
fn freed_bytes_of_each_kind_come_back(backend: &dyn Backend) -> CaseResult {
    on_each_device(backend, |device, stream| {
        let total = usize::try_from(backend.memory_info(device)?.total).unwrap_or(usize::MAX);
        for maker in makers(backend, stream)? {
            let make = |bytes| {
                let block = (maker.make)(bytes)?;
                drop(block);
                stream.synchronize()
            };
            let bytes = large_bytes(backend, device, make)?;
            for round in 1..total / bytes + 2 {
                make(bytes).map_err(|error: Error| {
                    let what = &maker.what;
                    Failure::new(format!("{bytes} bytes of {what} memory were freed {round} times, and then: {error}"))
                })?;
            }
        }
        Ok(())
    })
}
