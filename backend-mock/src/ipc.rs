//! [`MockIpc`]: handles of device memory and events for other processes, and opening them.
//!
//! A memory handle travels with a descriptor of the allocation's own memory file. Its payload is little-endian:
//!
//! | bytes | what |
//! |---|---|
//! | 0..8 | [`MEMORY_MAGIC`] |
//! | 8..16 | offset of the allocation in the file, 0 |
//! | 16..24 | bytes of the allocation |
//! | 24..32 | number of the allocation within its exporter |
//! | 32..56 | zeros |
//! | 56..64 | a checksum of the above, the device's UUID and the file's inode |
//!
//! An altered handle, or one with another descriptor, is no handle.
//!
//! An event handle has the same form with another magic number and no offset; see [`crate::shared_event`].
//!
//! When the exporter frees a block, the next allocation may get its address, but never its bytes. The bytes end with the last mapping and
//! the last descriptor.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use highwater_hal::{
    DevicePtr, ErrorKind, EventHandle, EventId, IpcSharing, MemoryHandle, PhysicalMemoryId, Result, Transport,
};

use crate::event::Event;
use crate::imports::Source;
use crate::mapping::Mapping;
use crate::operation::Operation;
use crate::payload::{open_payload, seal_payload};
use crate::sealed_file::{self, page_bytes};
use crate::shared_event::SharedEvent;
use crate::state::{Shared, device_uuid};

const MEMORY_MAGIC: u64 = u64::from_le_bytes(*b"HWMKMEM1");

/// The mock's sharing. Keeps the devices alive.
pub(crate) struct MockIpc {
    gpu: Arc<Shared>,
}

impl MockIpc {
    pub(crate) fn new(gpu: &Arc<Shared>) -> Self {
        Self { gpu: Arc::clone(gpu) }
    }

    fn check_transport(&self, operation: Operation, transport: Transport) -> Result<()> {
        if self.gpu.capabilities.ipc_transports.contains(transport) {
            return Ok(());
        }
        Err(unsupported(operation, transport))
    }

    /// Checks a handle, and returns the place that it names, the length of its pages, and whether it is mapped memory.
    fn check_handle(&self, operation: Operation, device: u32, handle: &MemoryHandle) -> Result<(Source, u64, bool)> {
        let gpu = &*self.gpu;
        let ordinal = device;
        gpu.device(operation, ordinal)?.check_not_lost(operation)?;
        self.check_transport(operation, handle.transport)?;
        let refused = |message: String| {
            operation.error(ErrorKind::InvalidArgument, message).with_hint(
                "pass a handle as `export_memory` returned it, with its descriptor, for the device with its UUID",
            )
        };
        let uuid = device_uuid(ordinal);
        if handle.device_uuid != uuid {
            return Err(refused(format!(
                "the handle is of the device with the UUID {:02x?}, device {ordinal} has {uuid:02x?}",
                handle.device_uuid
            )));
        }
        let descriptor =
            handle.descriptor.as_ref().ok_or_else(|| refused("the handle has no descriptor".to_owned()))?.as_ref();
        let (file, file_bytes) = sealed_file::check(operation, descriptor)?;
        let [_, offset, bytes, serial, is_mapped, ..] = open_payload(&handle.payload, MEMORY_MAGIC, &uuid, file)
            .ok_or_else(|| refused("the payload was not exported for this descriptor".to_owned()))?;
        let length = bytes.checked_next_multiple_of(page_bytes()).unwrap_or(u64::MAX);
        let fits = offset.checked_add(length).is_some_and(|end| end <= file_bytes);
        if bytes == 0 || bytes != handle.bytes || !offset.is_multiple_of(page_bytes()) || !fits {
            return Err(refused(format!(
                "the handle is of {} bytes, its payload of {bytes} bytes at {offset} of a file of {file_bytes}",
                handle.bytes
            )));
        }
        Ok((Source { file, offset, bytes, serial }, length, is_mapped != 0))
    }

    /// Returns the descriptor of a handle that was checked.
    fn descriptor_of(operation: Operation, handle: &MemoryHandle) -> Result<&OwnedFd> {
        handle.descriptor.as_ref().map(AsRef::as_ref).ok_or_else(|| {
            operation
                .error(ErrorKind::InvalidArgument, "the handle has no descriptor")
                .with_hint("pass the handle with its descriptor")
        })
    }
}

impl fmt::Debug for MockIpc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MockIpc").finish_non_exhaustive()
    }
}

/// Returns the error of a transport that the capabilities do not name.
#[cold]
pub(crate) fn unsupported(operation: Operation, transport: Transport) -> highwater_hal::Error {
    operation
        .error(ErrorKind::Unsupported, format!("the device shares nothing by the transport {transport:?}"))
        .with_hint("the capability `ipc_transports` lists the transports of the device")
}

impl IpcSharing for MockIpc {
    unsafe fn export_memory(&self, device: u32, ptr: DevicePtr, transport: Transport) -> Result<MemoryHandle> {
        let gpu = &*self.gpu;
        let operation = gpu.calls.enter(Operation::ExportMemory)?;
        let ordinal = device;
        let device = gpu.device(operation, ordinal)?;
        self.check_transport(operation, transport)?;
        let mapped = gpu.shareable_mapped(operation, ordinal, ptr)?;
        let is_mapped = u64::from(mapped.is_some());
        let uuid = device_uuid(ordinal);
        let handle = |source: Source, file: &OwnedFd| {
            let words = [MEMORY_MAGIC, source.offset, source.bytes, source.serial, is_mapped];
            let payload = seal_payload(&words, &uuid, source.file);
            let descriptor = gpu.exported.duplicate(operation, file)?;
            Ok(MemoryHandle::new(transport, uuid, source.bytes, payload).with_descriptor(descriptor))
        };
        if let Some(mapped) = mapped {
            return handle(mapped.source(), mapped.file());
        }
        let (file, block) = device.shareable(operation, ptr)?;
        handle(Source { file: file.id, offset: 0, bytes: block.bytes, serial: block.serial }, &file.file)
    }

    fn open_memory(&self, device: u32, handle: &MemoryHandle) -> Result<DevicePtr> {
        let gpu = &*self.gpu;
        let operation = gpu.calls.enter(Operation::OpenMemory)?;
        let (source, length, _) = self.check_handle(operation, device, handle)?;
        let offset = source.offset;
        let descriptor = Self::descriptor_of(operation, handle)?;
        let device = gpu.device(operation, device)?;
        let mut imports = device.memory.imports.write();
        let place = match imports.open_again(&source) {
            Some(place) => place,
            None => {
                // SAFETY: the check found the file long enough and sealed against shrinking.
                let mapping = unsafe { Mapping::new(descriptor, offset, length) }
                    .map_err(|error| sealed_file::failed(operation, "cannot map the memory file", error))?;
                imports.insert(source, mapping).ok_or_else(|| {
                    operation.error(ErrorKind::OutOfMemory, format!("no addresses are left for {length} bytes"))
                })?
            }
        };
        Ok(DevicePtr::new(device.memory.base() + place))
    }

    unsafe fn close_memory(&self, device: u32, ptr: DevicePtr) -> Result<()> {
        let gpu = &*self.gpu;
        let operation = gpu.calls.enter(Operation::CloseMemory)?;
        gpu.device(operation, device)?.close_import(operation, ptr)
    }

    fn import_memory(&self, device: u32, handle: &MemoryHandle) -> Result<PhysicalMemoryId> {
        let gpu = &*self.gpu;
        let operation = Operation::ImportMemory;
        gpu.enter_mapped(operation)?.check_foreign_memory(operation)?;
        let (source, _, is_mapped) = self.check_handle(operation, device, handle)?;
        if !is_mapped {
            return Err(operation
                .error(ErrorKind::InvalidArgument, "the handle is of memory of `allocate`, which is not mapped memory")
                .with_hint("open other memory with `open_memory`"));
        }
        gpu.import_memory(operation, device, &source, Self::descriptor_of(operation, handle)?)
    }

    fn export_event(&self, event: EventId) -> Result<EventHandle> {
        let operation = self.gpu.calls.enter(Operation::ExportEvent)?;
        let object = self.gpu.event(operation, event)?;
        let shared = object.shared.as_ref().ok_or_else(|| {
            operation
                .error(ErrorKind::InvalidArgument, format!("the {event} was not created for other processes"))
                .with_hint("create the event with `EventOptions::with_interprocess`")
        })?;
        shared.export(operation, device_uuid(object.device), &self.gpu.exported)
    }

    fn open_event(&self, device: u32, handle: &EventHandle) -> Result<EventId> {
        let gpu = &*self.gpu;
        let operation = gpu.calls.enter(Operation::OpenEvent)?;
        gpu.device(operation, device)?.check_not_lost(operation)?;
        if !gpu.capabilities.interprocess_events {
            return Err(operation.lacks("interprocess_events"));
        }
        let shared = SharedEvent::open(operation, handle, device_uuid(device), gpu.peers())?;
        gpu.events.insert(operation.name(), device, Event::interprocess(device, shared, gpu.engine.raw_handles.take()))
    }
}
