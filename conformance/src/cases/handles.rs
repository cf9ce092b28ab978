//! Handles of memory and events of a second process: bad handles and ordinals, bad closes, and closes in each order.

use highwater_hal::numbers::Coded;
use highwater_hal::{Backend, DevicePtr, MemoryHandle, Transport};

use super::sharing::transports;
use super::stability::First;
use crate::case::{CaseResult, Failure, cases, check, check_eq, check_error};
use crate::device::{Block, DEVICE, Event, close_unknown, sharing};
use crate::peer::{Launcher, Peer};
use crate::random::Random;

cases! {
    group "handles" with a second process;
    flipped_bytes: ["ipc.open-checked"] needs [has::shareable_memory, DESCRIPTORS];
    other_fields: ["ipc.open-checked"] needs [has::shareable_memory];
    ordinals: ["backend.device-checked"] needs [has::shareable_memory];
    ordinals_of_events: ["backend.device-checked"] needs [has::interprocess_events];
    bad_closes: ["ipc.close-unknown"] needs [has::shareable_memory];
    closes_in_each_order: ["ipc.close-unknown", "ipc.shared-bytes"] needs [has::shareable_memory];
    answers_with_opened_objects: ["identity.stable", "devices.capabilities-stable", "devices.uuid", "memory.info"]
        needs [has::shareable_memory];
}

const BYTES: usize = 1 << 16;

/// Runs a case for each transport with memory of a second process and its content.
fn with_memory(
    backend: &dyn Backend,
    launcher: &Launcher,
    prove: impl Fn(&mut Peer, Transport, &MemoryHandle, &[u8]) -> CaseResult,
) -> CaseResult {
    for transport in transports(backend)? {
        let mut peer = Peer::start(launcher, backend, DEVICE)?;
        let there = peer.allocate(BYTES, transport)??;
        let content = Random::new(91).bytes(BYTES);
        peer.write(there, &content)??;
        let handle = peer.export(there, transport)??;
        prove(&mut peer, transport, &handle, &content)
            .map_err(|failure| failure.with_details(&format!("by {transport:?}")))?;
        drop(handle);
        peer.free(there)??;
        peer.end()?;
    }
    Ok(())
}

/// Checks that this process refuses a handle and maps nothing.
fn is_refused(backend: &dyn Backend, handle: &MemoryHandle, what: &str) -> CaseResult {
    let before = backend.live_objects();
    check_error!(Block::open(backend, DEVICE, handle), InvalidArgument, "open_memory of a handle with {what}");
    check_eq!(backend.live_objects(), before, "live objects after a handle with {what} was refused");
    Ok(())
}

/// Checks that the unchanged handle opens the memory.
fn opens(backend: &dyn Backend, handle: &MemoryHandle, content: &[u8]) -> CaseResult {
    let mapping = Block::open(backend, DEVICE, handle)?;
    check!(mapping.read()? == content, "a handle names other memory after bad ones were refused");
    Ok(mapping.give_back()?)
}

/// Changes one byte at each place. Only a backend that sends a descriptor makes the payload itself; a vendor's own payload may
/// have bytes without a meaning.
fn flipped_bytes(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    with_memory(backend, launcher, |_, transport, handle, content| {
        if transport != Transport::Descriptor {
            return Ok(());
        }
        for place in 0..handle.payload.len() {
            for mask in [0x01, 0x80, 0xff] {
                let mut altered = handle.clone();
                altered.payload[place] ^= mask;
                is_refused(backend, &altered, &format!("byte {place} of its payload changed by {mask:#x}"))?;
            }
        }
        opens(backend, handle, content)
    })
}

fn other_fields(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    with_memory(backend, launcher, |_, transport, handle, content| {
        for place in 0..handle.device_uuid.len() {
            let mut altered = handle.clone();
            altered.device_uuid[place] ^= 0x01;
            is_refused(backend, &altered, &format!("byte {place} of the UUID changed"))?;
        }
        let bytes = handle.bytes;
        let mut sizes = vec![0, u64::MAX];
        if transport == Transport::Descriptor {
            sizes.extend([1, bytes - 1, bytes + 1, bytes / 2, bytes * 2, bytes + (1 << 30), 1 << 63]);
        }
        for bytes in sizes {
            let mut altered = handle.clone();
            altered.bytes = bytes;
            is_refused(backend, &altered, &format!("{bytes} bytes"))?;
        }
        let offered = backend.capabilities(DEVICE)?.ipc_transports;
        for &other in Transport::ALL.iter().filter(|&&other| other != transport) {
            let mut altered = handle.clone();
            altered.transport = other;
            let before = backend.live_objects();
            if offered.contains(other) {
                is_refused(backend, &altered, &format!("the transport {other:?}"))?;
            } else {
                // It lacks the transport, and the handle is none of it: both errors are right.
                check!(Block::open(backend, DEVICE, &altered).is_err(), "a handle was opened by {other:?}");
            }
            check_eq!(backend.live_objects(), before, "live objects after a handle by {other:?} was refused");
        }
        opens(backend, handle, content)
    })
}

/// Returns ordinals that no device has.
fn above(backend: &dyn Backend) -> [u32; 4] {
    let count = backend.device_count();
    [count, count + 1, 1 << 16, u32::MAX]
}

fn ordinals(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    with_memory(backend, launcher, |_, _, handle, content| {
        let before = backend.live_objects();
        for device in above(backend) {
            let opened = Block::open(backend, device, handle);
            check_error!(opened, InvalidArgument, "open_memory for device {device}");
            check_eq!(backend.live_objects(), before, "live objects after open_memory for device {device}");
        }
        opens(backend, handle, content)
    })
}

fn ordinals_of_events(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    let mut peer = Peer::start(launcher, backend, DEVICE)?;
    let there = peer.create_event(true)??;
    let handle = peer.export_event(there)??;
    let before = backend.live_objects();
    for device in above(backend) {
        check_error!(Event::open(backend, device, &handle), InvalidArgument, "open_event for device {device}");
        check_eq!(backend.live_objects(), before, "live objects after open_event for device {device}");
    }
    let here = Event::open(backend, DEVICE, &handle)?;
    check!(here.query()?.is_complete(), "an event that was never recorded is pending");
    drop((here, handle));
    peer.end()
}

fn bad_closes(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    with_memory(backend, launcher, |_, _, handle, content| {
        let mapping = Block::open(backend, DEVICE, handle)?;
        let (start, before) = (mapping.ptr(), backend.live_objects());
        let own = Block::filled(backend, BYTES, 1)?;
        let with_own = backend.live_objects();
        for (what, ptr) in [
            ("the second byte of a mapping", start.offset(1)),
            ("an address inside a mapping", start.offset(BYTES / 2)),
            ("the last byte of a mapping", start.offset(BYTES - 1)),
            ("the address before a mapping", DevicePtr::new(start.get() - 1)),
            ("memory of this process", own.ptr()),
            ("no address", DevicePtr::new(0)),
            ("the last address", DevicePtr::new(u64::MAX)),
        ] {
            check_error!(close_unknown(backend, DEVICE, ptr), InvalidPointer, "close_memory of {what}");
            check_eq!(backend.live_objects(), with_own, "live objects after close_memory of {what}");
        }
        let sharing = sharing(backend, "close_memory")?;
        for device in (0..backend.device_count()).filter(|&device| device != DEVICE) {
            // SAFETY: no work uses the mapping. If the call succeeds against the promise, the case fails.
            let closed = unsafe { sharing.close_memory(device, start) };
            check_error!(closed, InvalidPointer, "close_memory for device {device} of memory that {DEVICE} has open");
        }
        for device in above(backend) {
            // SAFETY: as above.
            let closed = unsafe { sharing.close_memory(device, start) };
            check_error!(closed, InvalidArgument, "close_memory for device {device}");
        }
        drop(own);
        check_eq!(backend.live_objects(), before, "live objects after refused closes");
        check!(mapping.read()? == content, "a mapping changed by refused closes");
        Ok(mapping.give_back()?)
    })
}

/// Opens three blocks, and closes them in each order. The others stay readable.
fn closes_in_each_order(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    for transport in transports(backend)? {
        let mut peer = Peer::start(launcher, backend, DEVICE)?;
        let mut handles = Vec::new();
        for number in 0..3_u8 {
            let there = peer.allocate(BYTES, transport)??;
            peer.write(there, &[number + 1; BYTES])??;
            handles.push(peer.export(there, transport)??);
        }
        let before = backend.live_objects();
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let open = |handle| Block::open(backend, DEVICE, handle).map(Some);
            let mut mappings = handles.iter().map(open).collect::<Result<Vec<_>, _>>()?;
            for closed in order {
                mappings[closed].take().ok_or_else(|| Failure::new("closed twice"))?.give_back()?;
                for (number, mapping) in (1..).zip(&mappings) {
                    let Some(mapping) = mapping else { continue };
                    check!(mapping.read()? == [number; BYTES], "block {number} after another was closed: {order:?}");
                }
            }
            check_eq!(backend.live_objects(), before, "live objects when all was closed in the order {order:?}");
        }
        drop(handles);
        peer.end()?;
    }
    Ok(())
}

fn answers_with_opened_objects(backend: &dyn Backend, launcher: &Launcher) -> CaseResult {
    let first = First::of(backend)?;
    with_memory(backend, launcher, |peer, _, handle, _| {
        let mapping = Block::open(backend, DEVICE, handle)?;
        first.check("with memory of another process")?;
        if backend.capabilities(DEVICE)?.interprocess_events {
            let there = peer.create_event(true)??;
            let here = Event::open(backend, DEVICE, &peer.export_event(there)??)?;
            first.check("with an event of another process")?;
            drop(here);
        }
        Ok(mapping.give_back()?)
    })?;
    first.check("when memory of another process is closed")
}
