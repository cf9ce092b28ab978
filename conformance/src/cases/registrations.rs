//! Page-locked memory by its addresses: registrations of odd sizes, one range registered again and again, and addresses that
//! name no registration or lie inside a block.

use std::ops::Range;

use highwater_hal::{Backend, HostMemoryKind, HostOptions, HostPtr, Result};

use crate::case::{CaseResult, cases, check, check_eq, check_error};
use crate::device::{Block, DEVICE, Pages, Pinned, Registered, Span, Stream};
use crate::random::Random;

cases! {
    group "registrations";
    odd_sizes: ["host.register-copies"] needs [has::host_register];
    other_sizes_of_one_start: ["host.register-copies", "host.register-overlap"] needs [has::host_register];
    overlaps: ["host.register-overlap"] needs [has::host_register];
    unknown_addresses: ["host.unregister-unknown"] needs [has::host_register];
    addresses_of_blocks: ["host.unregister-unknown"] needs [has::host_register];
    inner_addresses_of_blocks: ["host.device-address"];
    inner_addresses_of_registrations: ["host.device-address"] needs [has::host_register];
}

const PAGE: usize = 4096;
const GUARD: u8 = 0xa5;

/// Copies each of these parts of host memory to a device and back into it, inverted, on each device. `span` cuts a part.
fn copies_reach<'m>(
    backend: &dyn Backend,
    memory: &'m Registered<'_>,
    registered: &Range<usize>,
    parts: &[Range<usize>],
) -> CaseResult {
    let cut = |range: Range<usize>| -> Span<'m> { memory.span(range) };
    for device in 0..backend.device_count().min(2) {
        let stream = Stream::on(backend, device)?;
        for part in parts {
            let before = memory.read()?;
            let block = Block::on(backend, device, part.len())?;
            stream.copy(block.all(), cut(part.clone()))?;
            stream.synchronize()?;
            check!(block.read()? == before[part.clone()], "a copy from {part:?} of the registration {registered:?}");
            let inverted: Vec<u8> = before[part.clone()].iter().map(|byte| !byte).collect();
            block.write(0, &inverted)?;
            stream.copy(cut(part.clone()), block.all())?;
            stream.synchronize()?;
            let mut expected = before;
            expected[part.clone()].copy_from_slice(&inverted);
            check!(memory.read()? == expected, "a copy to {part:?} of the registration {registered:?}");
        }
    }
    Ok(())
}

/// Returns the parts of a registration at its ends: all of it, and its first and last bytes.
fn ends(range: &Range<usize>) -> Vec<Range<usize>> {
    let length = range.len();
    let mut parts = vec![range.clone(), range.start..range.start + 1, range.end - 1..range.end];
    if length > 8 {
        parts.push(range.end - 7..range.end);
        parts.push(range.start + 3..range.end - 1);
    }
    parts
}

fn odd_sizes(backend: &dyn Backend) -> CaseResult {
    let content = Random::new(12).bytes(4 * PAGE);
    for range in [
        0..1,
        0..PAGE - 1,
        0..PAGE + 1,
        0..PAGE + 17,
        0..3 * PAGE - 1,
        64..65,
        64..PAGE + 3,
        100..2 * PAGE,
        PAGE - 1..PAGE + 1,
        PAGE - 1..3 * PAGE + 1,
        PAGE..PAGE + 333,
    ] {
        let mut memory = Registered::unregistered(backend, &content);
        memory.register(range.clone())?;
        copies_reach(backend, &memory, &range, &ends(&range))?;
    }
    Ok(())
}

fn other_sizes_of_one_start(backend: &dyn Backend) -> CaseResult {
    let mut memory = Registered::unregistered(backend, &Random::new(13).bytes(16 * PAGE));
    let before = backend.live_objects();
    for range in [
        0..PAGE,
        0..4 * PAGE,
        0..PAGE,
        0..PAGE + 5,
        0..16 * PAGE,
        0..100,
        0..2 * PAGE,
        PAGE..2 * PAGE,
        0..3 * PAGE,
        8 * PAGE..9 * PAGE,
        4 * PAGE..16 * PAGE,
    ] {
        memory.register(range.clone())?;
        copies_reach(backend, &memory, &range, &ends(&range))?;
        memory.unregister_part(&range)?;
        check_eq!(backend.live_objects(), before, "live objects after {range:?} was unregistered");
    }
    Ok(())
}

fn overlaps(backend: &dyn Backend) -> CaseResult {
    // Several registrations, so that a range can lie around one of them and touch another.
    let parts = [2 * PAGE..3 * PAGE, 4 * PAGE..4 * PAGE + 100, 6 * PAGE + 7..8 * PAGE + 9];
    let mut memory = Registered::unregistered(backend, &Random::new(14).bytes(12 * PAGE));
    for part in &parts {
        memory.register(part.clone())?;
    }
    let before = backend.live_objects();
    for part in &parts {
        let (start, end) = (part.start, part.end);
        for range in [
            start..end,
            start..start + 1,
            end - 1..end,
            start + 1..end - 1,
            start..end + PAGE / 2,
            start - PAGE / 2..end,
            start - PAGE / 2..end + PAGE / 2,
            start - PAGE..start + 1,
            end - 1..end + PAGE,
            start - 1..end + 1,
            PAGE..11 * PAGE,
            0..12 * PAGE,
        ] {
            let refused = memory.register(range.clone());
            check_error!(refused, InvalidArgument, "register of {range:?} while {parts:?} are registered");
            check_eq!(backend.live_objects(), before, "live objects after register of {range:?} was refused");
        }
    }
    for part in &parts {
        copies_reach(backend, &memory, part, &ends(part))?;
    }
    Ok(())
}

/// Unregisters an address that the backend must refuse.
fn unregister_wrongly(backend: &dyn Backend, ptr: HostPtr) -> Result<()> {
    // SAFETY: no work that uses the memory is outstanding. If the call succeeds against the promise, the case fails.
    unsafe { backend.host_allocator().unregister(ptr) }
}

fn unknown_addresses(backend: &dyn Backend) -> CaseResult {
    for registered in [PAGE..3 * PAGE, PAGE + 64..3 * PAGE - 64] {
        let mut memory = Registered::unregistered(backend, &Random::new(15).bytes(5 * PAGE));
        memory.register(registered.clone())?;
        let (start, end, before) = (registered.start, registered.end, backend.live_objects());
        for at in [0, start - 1, start + 1, start + 64, 2 * PAGE, end - 1, end, 4 * PAGE] {
            let refused = unregister_wrongly(backend, memory.memory().ptr().offset(at));
            check_error!(refused, InvalidPointer, "unregister of {at} while {registered:?} is registered");
            check_eq!(backend.live_objects(), before, "live objects after unregister of {at} was refused");
        }
        copies_reach(backend, &memory, &registered, &ends(&registered))?;
        // The registration is still there, and its own end is known once.
        check_error!(memory.register(registered.clone()), InvalidArgument, "register after refused calls");
        memory.unregister_part(&registered)?;
        let again = unregister_wrongly(backend, memory.memory().ptr().offset(start));
        check_error!(again, InvalidPointer, "a second unregister of {registered:?}");
    }
    let never = Pages::new(1);
    check_error!(unregister_wrongly(backend, never.ptr()), InvalidPointer, "unregister of memory never registered");
    Ok(())
}

/// Returns the kinds of page-locked memory of the first device.
fn kinds(backend: &dyn Backend) -> Result<Vec<HostMemoryKind>> {
    let mut kinds = vec![HostMemoryKind::Default];
    if backend.capabilities(DEVICE)?.write_combined {
        kinds.push(HostMemoryKind::WriteCombined);
    }
    Ok(kinds)
}

fn addresses_of_blocks(backend: &dyn Backend) -> CaseResult {
    for kind in kinds(backend)? {
        let pinned = Pinned::with_options(backend, 3 * PAGE, &HostOptions::new().with_kind(kind))?;
        pinned.write(&[GUARD; 3 * PAGE])?;
        let before = backend.live_objects();
        for at in [0, 1, 64, PAGE, 3 * PAGE - 1] {
            let refused = unregister_wrongly(backend, pinned.ptr().offset(at));
            check_error!(refused, InvalidPointer, "unregister of byte {at} of an allocated block of {kind:?} memory");
            check_eq!(backend.live_objects(), before, "live objects after unregister of an allocated block");
        }
        let (stream, block) = (Stream::new(backend)?, Block::new(backend, 3 * PAGE)?);
        stream.copy(block.all(), pinned.all())?;
        stream.synchronize()?;
        check!(block.read()? == [GUARD; 3 * PAGE], "an allocated block does not work after refused calls");
    }
    Ok(())
}

/// Checks that the addresses of the bytes of one range lie as far from each other on each device as on the host.
fn keeps_distances(backend: &dyn Backend, start: HostPtr, bytes: usize, what: &str) -> CaseResult {
    let allocator = backend.host_allocator();
    for device in 0..backend.device_count() {
        let is_one = backend.capabilities(device)?.host_address_is_device_address;
        let first = allocator.device_address(start, device)?;
        for at in [0, 1, 63, 64, 257, PAGE - 1, PAGE, bytes / 2, bytes - 1].into_iter().filter(|&at| at < bytes) {
            let address = allocator.device_address(start.offset(at), device)?;
            check_eq!(address, first.offset(at), "the address of byte {at} of {bytes} of {what} on device {device}");
            if is_one {
                let host = start.offset(at).address() as u64;
                check_eq!(address.get(), host, "the address of byte {at} of {bytes} of {what} on device {device}");
            }
        }
    }
    Ok(())
}

fn inner_addresses_of_blocks(backend: &dyn Backend) -> CaseResult {
    for kind in kinds(backend)? {
        for bytes in [1, 100, PAGE + 1, 5 * PAGE + 77] {
            let pinned = Pinned::with_options(backend, bytes, &HostOptions::new().with_kind(kind))?;
            keeps_distances(backend, pinned.ptr(), bytes, &format!("{kind:?} memory"))?;
        }
    }
    Ok(())
}

fn inner_addresses_of_registrations(backend: &dyn Backend) -> CaseResult {
    let mut memory = Registered::unregistered(backend, &[GUARD; 4 * PAGE]);
    for range in [0..PAGE, PAGE + 64..3 * PAGE + 100, 3 * PAGE + 100..3 * PAGE + 101] {
        memory.register(range.clone())?;
        let start = memory.memory().ptr().offset(range.start);
        keeps_distances(backend, start, range.len(), &format!("the registration {range:?}"))?;
    }
    Ok(())
}
