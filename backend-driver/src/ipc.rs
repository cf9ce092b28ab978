//! The trait `IpcSharing` over a vendor's table of calls.

use std::sync::Arc;

use super::calls::IpcHandle;
use super::platform::{Platform, SharedBlock};
use super::raw::RawEvent;
use super::state::{BlockKind, DriverState, FOREIGN, INTERPROCESS, Mapped, MappedKey};
use highwater_hal::{
    DevicePtr, Error, ErrorKind, EventHandle, EventId, IpcSharing, MemoryHandle, MemoryRange, PhysicalMemoryId, Result,
    Transport,
};

/// Sharing with other processes.
#[derive(Debug)]
pub(super) struct DriverIpc<P: Platform>(Arc<DriverState<P>>);

/// Returns the error of a transport that the device lacks.
#[cold]
pub(super) fn unsupported(operation: &'static str, transport: Transport) -> Error {
    let message = format!("the device does not support the transport {transport:?}");
    Error::new(ErrorKind::Unsupported, operation, message)
        .with_hint("use a transport of the capability `ipc_transports`")
}

const MAGIC: [u8; 8] = *b"HWSHMEM\x01";

/// The memory that a payload names. The vendor makes both from one kind of memory, so only the payload tells them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Named {
    /// Mapped memory. Earlier versions wrote this number for both.
    Mapped = 0,
    /// A block of `allocate`.
    Block = 1,
}

/// The place of [`Named`] in a payload.
const NAMED: usize = 32;

/// Returns the payload of a handle whose memory travels as a descriptor. It identifies the allocation, so that a second
/// open finds the first, and holds the size.
fn seal(named: Named, token: [u8; 16], bytes: u64, uuid: &[u8; 16]) -> [u8; 64] {
    let mut payload = [0; 64];
    payload[..8].copy_from_slice(&MAGIC);
    payload[8..24].copy_from_slice(&token);
    payload[24..32].copy_from_slice(&bytes.to_le_bytes());
    payload[NAMED] = named as u8;
    let sum = checksum(&payload, uuid);
    payload[60..].copy_from_slice(&sum);
    payload
}

fn checksum(payload: &[u8; 64], uuid: &[u8; 16]) -> [u8; 4] {
    let mut hash = crc32fast::Hasher::new();
    hash.update(&payload[..60]);
    hash.update(uuid);
    hash.finalize().to_le_bytes()
}

/// Returns whether `seal` made the payload for this number of bytes of that device.
fn is_sealed(payload: &[u8; 64], bytes: u64, uuid: &[u8; 16]) -> bool {
    payload[..8] == MAGIC && payload[24..32] == bytes.to_le_bytes() && payload[60..] == checksum(payload, uuid)
}

fn refused(operation: &'static str, message: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, operation, message)
        .with_hint("pass the exported handle unchanged, with its descriptor, to the device with its UUID")
}

/// Vendors do not document their codes for 64 bytes that are no handle, so these codes become `InvalidArgument`.
fn no_handle(error: Error) -> Error {
    match error.kind() {
        ErrorKind::InvalidState | ErrorKind::InvalidHandle | ErrorKind::InvalidPointer | ErrorKind::Vendor => {
            let message = format!("the handle does not name memory of another process: {}", error.message());
            refused(error.operation(), message).with_code(error.code().unwrap_or(0))
        }
        _ => error,
    }
}

impl<P: Platform> DriverIpc<P> {
    pub(super) const fn new(state: Arc<DriverState<P>>) -> Self {
        Self(state)
    }

    fn check_uuid(&self, operation: &'static str, device: u32, uuid: &[u8; 16]) -> Result<()> {
        let own = &self.0.device(operation, device)?.info.uuid;
        if own == uuid {
            return Ok(());
        }
        Err(refused(
            operation,
            format!("the handle names the device with the UUID {uuid:02x?}, expected {own:02x?} of device {device}"),
        ))
    }

    /// Exports plain memory by its start. The device is current.
    fn export_legacy(&self, ptr: DevicePtr, bytes: u64, uuid: [u8; 16]) -> Result<MemoryHandle> {
        const OPERATION: &str = "export_memory";
        let state = &*self.0;
        let Some(export) = state.platform.calls().ipc_get_mem_handle else {
            return Err(unsupported(OPERATION, Transport::Legacy));
        };
        let mut payload = IpcHandle([0; 64]);
        // SAFETY: The call writes 64 bytes, which outlive it.
        state.check(OPERATION, unsafe { export(&mut payload, ptr) })?;
        Ok(MemoryHandle::new(Transport::Legacy, uuid, bytes, payload.0))
    }

    /// Exports memory that other code allocated. The device is current.
    ///
    /// # Safety
    /// The caller must ensure that the memory stays allocated during the call.
    unsafe fn export_foreign(&self, range: &MemoryRange, transport: Transport, uuid: [u8; 16]) -> Result<MemoryHandle> {
        const OPERATION: &str = "export_memory";
        let state = &*self.0;
        let bytes = range.bytes as u64;
        let handle = match transport {
            Transport::Legacy => self.export_legacy(range.base, bytes, uuid)?,
            _ => {
                let payload = seal(Named::Mapped, highwater_hal::random(OPERATION)?, bytes, &uuid);
                let handle = MemoryHandle::new(transport, uuid, bytes, payload);
                // SAFETY: As the caller promises.
                unsafe { state.platform.export_foreign(range.base, transport, handle)? }
            }
        };
        self.watch(&handle);
        Ok(handle)
    }

    /// Counts the descriptor of an exported handle until it is closed.
    fn watch(&self, handle: &MemoryHandle) {
        if let Some(descriptor) = &handle.descriptor {
            let mut exported = self.0.exported.lock();
            exported.retain(|other| other.is_open());
            exported.push(descriptor.watch());
        }
    }

    /// Checks that a handle is complete, by a transport of mapped memory.
    fn check_sealed(&self, operation: &'static str, handle: &MemoryHandle) -> Result<()> {
        if handle.transport == Transport::Descriptor {
            if handle.descriptor.is_none() {
                return Err(refused(operation, "the handle has no descriptor".to_owned()));
            }
            if !is_sealed(&handle.payload, handle.bytes, &handle.device_uuid) {
                return Err(refused(operation, "the payload is not an exported one".to_owned()));
            }
        }
        Ok(())
    }

    /// Opens a handle in the vendor's library.
    fn open(&self, device: u32, handle: &MemoryHandle) -> Result<(DevicePtr, Option<SharedBlock>)> {
        const OPERATION: &str = "open_memory";
        let state = &*self.0;
        let _relaxed = state.relaxed();
        let _current = state.make_current(OPERATION, device)?;
        if handle.transport != Transport::Legacy {
            let block = state.platform.open_shared(device, handle)?;
            return Ok((state.made(OPERATION, block.address)?, Some(block)));
        }
        let Some(open) = state.platform.calls().ipc_open_mem_handle else {
            return Err(unsupported(OPERATION, handle.transport));
        };
        let mut address = DevicePtr::new(0);
        let flag = state.platform.quirks().ipc_open_flag;
        // SAFETY: The call writes one number, which outlives it, and takes the handle by value.
        let opened = state.check(OPERATION, unsafe { open(&mut address, IpcHandle(handle.payload), flag) });
        opened.map_err(|error| {
            let error = no_handle(error);
            let hint = state.platform.quirks().ipc_open_hint.filter(|_| error.kind() == ErrorKind::InvalidArgument);
            hint.into_iter().fold(error, Error::with_hint)
        })?;
        state.made(OPERATION, address)?;
        if let Some(range) = state.platform.calls().mem_get_address_range {
            let (mut start, mut bytes) = (DevicePtr::new(0), 0);
            // SAFETY: The call writes two numbers, which outlive it.
            let code = unsafe { range(&mut start, &mut bytes, address) };
            if code != 0 || start != address || (bytes as u64) < handle.bytes {
                if let Some(close) = state.platform.calls().ipc_close_mem_handle {
                    // SAFETY: The memory was just opened, and nothing uses it.
                    unsafe { close(address) };
                }
                state.check(OPERATION, code)?;
                let message =
                    format!("the handle names {} bytes, expected at most the {bytes} of its memory", handle.bytes);
                return Err(refused(OPERATION, message));
            }
        }
        Ok((address, None))
    }

    /// Counts another open of mapped memory. Returns `None` if this thread must map it; the table then holds a place
    /// for it.
    fn open_again(&self, key: MappedKey, wanted: u64) -> Result<Option<DevicePtr>> {
        let mut mapped = self.0.mapped.lock();
        loop {
            match mapped.get_mut(&key) {
                None => {
                    mapped.insert(key, Mapped { address: None, bytes: wanted, opens: 1, block: None });
                    return Ok(None);
                }
                // The size in a handle is trusted only for the first open.
                Some(Mapped { address: Some(_), bytes, .. }) if *bytes < wanted => {
                    let message =
                        format!("the handle names {wanted} bytes, expected at most the {bytes} of its first open");
                    return Err(refused("open_memory", message));
                }
                Some(Mapped { address: Some(address), opens, .. }) => {
                    *opens += 1;
                    return Ok(Some(*address));
                }
                // Another thread is mapping or unmapping it.
                Some(_) => self.0.mapped_changed.wait(&mut mapped),
            }
        }
    }
}

impl<P: Platform> IpcSharing for DriverIpc<P> {
    unsafe fn export_memory(&self, device: u32, ptr: DevicePtr, transport: Transport) -> Result<MemoryHandle> {
        const OPERATION: &str = "export_memory";
        let state = &*self.0;
        state.enter(OPERATION)?;
        let device_state = state.device(OPERATION, device)?;
        if !device_state.capabilities.ipc_transports.contains(transport) {
            return Err(unsupported(OPERATION, transport));
        }
        let uuid = device_state.info.uuid;
        let not_for_it = || {
            Error::new(
                ErrorKind::InvalidArgument,
                OPERATION,
                format!("{ptr} is not the start of memory that can be shared by {transport:?}"),
            )
            .with_hint("allocate the memory as `DeviceMemoryKind::Shareable`, or create it, with this transport")
        };
        let exported = {
            let blocks = state.blocks.lock();
            let block = blocks.get(&ptr).filter(|block| block.device == device);
            match block.map(|block| (&block.kind, block.bytes as u64)) {
                None => None,
                Some((BlockKind::Legacy, bytes)) if transport == Transport::Legacy => Some((bytes, None)),
                Some((BlockKind::Shared { transport: made_for, token, block: shared }, bytes))
                    if *made_for == transport =>
                {
                    Some((bytes, Some((*token, SharedBlock { ..*shared }))))
                }
                Some(_) => return Err(not_for_it()),
            }
        };
        let _relaxed = state.relaxed();
        let _current = state.make_current(OPERATION, device)?;
        let export = |named, token, shared: &SharedBlock, bytes| {
            let handle = MemoryHandle::new(transport, uuid, bytes, seal(named, token, bytes, &uuid));
            let handle = state.platform.export_shared(shared, transport, handle)?;
            self.watch(&handle);
            Ok(handle)
        };
        match exported {
            None => {
                let export = |token, shared: &SharedBlock| export(Named::Mapped, token, shared, shared.bytes as u64);
                if let Some(exported) = state.export_mapped(OPERATION, device, (ptr, transport), export) {
                    return exported;
                }
                let range = state.foreign_range(OPERATION, device, ptr).ok_or_else(not_for_it)?;
                // SAFETY: The caller promises that the memory stays allocated.
                unsafe { self.export_foreign(&range, transport, uuid) }
            }
            Some((bytes, Some((token, shared)))) => export(Named::Block, token, &shared, bytes),
            Some((bytes, None)) => self.export_legacy(ptr, bytes, uuid),
        }
    }

    fn open_memory(&self, device: u32, handle: &MemoryHandle) -> Result<DevicePtr> {
        const OPERATION: &str = "open_memory";
        let state = &*self.0;
        state.enter(OPERATION)?;
        let device_state = state.device(OPERATION, device)?;
        if !device_state.capabilities.ipc_transports.contains(handle.transport) {
            return Err(unsupported(OPERATION, handle.transport));
        }
        self.check_uuid(OPERATION, device, &handle.device_uuid)?;
        match handle.transport {
            Transport::Descriptor => self.check_sealed(OPERATION, handle)?,
            Transport::Legacy | Transport::Fabric => {}
            transport => return Err(unsupported(OPERATION, transport)),
        }
        if handle.bytes == 0 {
            return Err(refused(OPERATION, "the handle names 0 bytes, expected at least 1".to_owned()));
        }
        let key = (device, handle.transport as u32, handle.payload);
        if let Some(address) = self.open_again(key, handle.bytes)? {
            return Ok(address);
        }
        let opened = self.open(device, handle);
        let mut mapped = state.mapped.lock();
        let answer = match opened {
            Ok((address, block)) => {
                mapped.insert(key, Mapped { address: Some(address), bytes: handle.bytes, opens: 1, block });
                Ok(address)
            }
            Err(error) => {
                mapped.remove(&key);
                Err(error)
            }
        };
        state.mapped_changed.notify_all();
        answer
    }

    unsafe fn close_memory(&self, device: u32, ptr: DevicePtr) -> Result<()> {
        const OPERATION: &str = "close_memory";
        let state = &*self.0;
        state.enter(OPERATION)?;
        state.device(OPERATION, device)?;
        let (key, bytes, block) = {
            let mut mapped = state.mapped.lock();
            let found = mapped.iter_mut().find(|(key, mapped)| key.0 == device && mapped.address == Some(ptr));
            let Some((key, found)) = found else {
                return Err(Error::new(
                    ErrorKind::InvalidPointer,
                    OPERATION,
                    format!("{ptr} is not open for device {device}"),
                )
                .with_hint("close each address of `open_memory` as often as it was opened"));
            };
            if found.opens > 1 {
                found.opens -= 1;
                return Ok(());
            }
            // A thread that opens it meanwhile waits until it is unmapped.
            found.address = None;
            (*key, found.bytes, found.block.take())
        };
        let outcome = (|| {
            let _relaxed = state.relaxed();
            let _current = state.make_current(OPERATION, device)?;
            // SAFETY: The caller promises that no work uses the mapping.
            unsafe {
                match (&block, state.platform.calls().ipc_close_mem_handle) {
                    (Some(block), _) => state.platform.free_shared(OPERATION, block),
                    (None, Some(close)) => state.check(OPERATION, close(ptr)),
                    (None, None) => Ok(()),
                }
            }
        })();
        let mut mapped = state.mapped.lock();
        if outcome.is_ok() {
            mapped.remove(&key);
        } else {
            mapped.insert(key, Mapped { address: Some(ptr), bytes, opens: 1, block });
        }
        state.mapped_changed.notify_all();
        outcome
    }

    fn import_memory(&self, device: u32, handle: &MemoryHandle) -> Result<PhysicalMemoryId> {
        const OPERATION: &str = "import_memory";
        let state = &*self.0;
        state.enter(OPERATION)?;
        let granularity = state.check_import(device, handle.transport)?;
        self.check_uuid(OPERATION, device, &handle.device_uuid)?;
        let bytes = usize::try_from(handle.bytes).unwrap_or(0);
        // By `Transport::Fabric`, the payload is the vendor's own.
        let is_block = handle.transport == Transport::Descriptor && handle.payload[NAMED] == Named::Block as u8;
        let is_foreign = handle.is_of_other_code();
        let is_possible = handle.transport != Transport::Legacy && bytes != 0 && bytes.is_multiple_of(granularity);
        if !is_possible || is_block {
            let message =
                format!("a handle of {} bytes by {:?} is not of mapped memory", handle.bytes, handle.transport);
            return Err(Error::new(ErrorKind::InvalidArgument, OPERATION, message)
                .with_hint("open other memory with `open_memory`"));
        }
        if !is_foreign {
            self.check_sealed(OPERATION, handle)?;
        }
        state.import_memory(device, bytes, |platform| platform.import_memory(device, handle))
    }

    fn export_event(&self, event: EventId) -> Result<EventHandle> {
        const OPERATION: &str = "export_event";
        let state = &*self.0;
        state.enter(OPERATION)?;
        let held = state.events.hold(OPERATION, event)?;
        if held.flags() & (INTERPROCESS | FOREIGN) == 0 {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                OPERATION,
                format!("the {event} is not an interprocess event"),
            )
            .with_hint("create the event with `EventOptions::with_interprocess`"));
        }
        let device = state.device(OPERATION, event.device())?;
        // Foreign code may have created an interprocess event on a device that lacks the capability.
        if !device.capabilities.interprocess_events {
            return Err(Error::lacks(OPERATION, "interprocess_events"));
        }
        let uuid = device.info.uuid;
        let Some(export) = state.platform.calls().ipc_get_event_handle else {
            return Err(Error::lacks(OPERATION, "interprocess_events"));
        };
        let _relaxed = state.relaxed();
        let _current = state.make_current(OPERATION, event.device())?;
        let mut payload = IpcHandle([0; 64]);
        // SAFETY: The event is held, and the call writes 64 bytes, which outlive it.
        state.check(OPERATION, unsafe { export(&mut payload, held.raw()) })?;
        Ok(EventHandle::new(uuid, payload.0))
    }

    fn open_event(&self, device: u32, handle: &EventHandle) -> Result<EventId> {
        const OPERATION: &str = "open_event";
        let state = &*self.0;
        state.enter(OPERATION)?;
        if !state.device(OPERATION, device)?.capabilities.interprocess_events {
            return Err(Error::lacks(OPERATION, "interprocess_events"));
        }
        self.check_uuid(OPERATION, device, &handle.device_uuid)?;
        let Some(open) = state.platform.calls().ipc_open_event_handle else {
            return Err(Error::lacks(OPERATION, "interprocess_events"));
        };
        let _relaxed = state.relaxed();
        let _current = state.make_current(OPERATION, device)?;
        let mut raw = RawEvent::NULL;
        // SAFETY: The call writes one number, which outlives it, and takes the handle by value.
        state.check(OPERATION, unsafe { open(&mut raw, IpcHandle(handle.payload)) })?;
        state.made(OPERATION, raw)?;
        state.events.insert(OPERATION, device, raw, INTERPROCESS).inspect_err(|_| {
            // SAFETY: No other code knows the event.
            unsafe { (state.platform.calls().event_destroy)(raw) };
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_is_opened_as_it_was_sealed_or_not_at_all() {
        let (uuid, other) = ([7; 16], [8; 16]);
        let payload = seal(Named::Block, [3; 16], 4096, &uuid);
        assert!(is_sealed(&payload, 4096, &uuid));
        for index in 0..64 {
            let mut altered = payload;
            altered[index] ^= 1;
            assert!(!is_sealed(&altered, 4096, &uuid), "byte {index}");
        }
        assert!(!is_sealed(&payload, 4097, &uuid) && !is_sealed(&payload, 4096, &other));
    }
}
