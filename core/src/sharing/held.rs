//! Memory of another process, as its original handles. An imported handle cannot be exported again, so an heir keeps the handles of
//! the owner and forwards them.

use super::message::{Entrusted, ExportKey, MOST_PARTS, Part};
use super::patience::OPERATION;
use super::ticket::{Secret, Ticket};
use highwater_hal::{Error, ErrorKind, MemoryHandle, Result, Transport};

/// The handles of an allocation, each with a descriptor.
#[derive(Debug)]
pub(crate) struct HeldMemory {
    pub(super) key: ExportKey,
    /// The device in this process; `None` for page-locked memory, and in a process without devices.
    pub(super) device: Option<u32>,
    pub(super) is_pinned: bool,
    pub(super) device_uuid: [u8; 16],
    pub(super) secret: Option<Secret>,
    pub(super) bytes: u64,
    handles: Vec<MemoryHandle>,
}

impl HeldMemory {
    /// Returns the memory of a ticket. `handles` are those of all parts.
    ///
    /// # Errors
    /// `Unsupported` if a handle has no descriptor.
    pub(super) fn of(ticket: &Ticket, device: Option<u32>, handles: Vec<MemoryHandle>) -> Result<Self> {
        if handles.iter().any(|handle| handle.descriptor.is_none()) {
            return Err(no_descriptor(ticket.transport));
        }
        Ok(Self {
            key: ExportKey { index: ticket.index, serial: ticket.serial },
            device,
            is_pinned: ticket.is_pinned,
            device_uuid: ticket.device_uuid,
            secret: ticket.secret,
            bytes: ticket.allocation_bytes,
            handles,
        })
    }

    /// Returns the memory that another heir has entrusted, with the handles of all its parts. `None` if they are not its parts.
    pub(super) fn entrusted(entrusted: &Entrusted, handles: Vec<MemoryHandle>) -> Option<Self> {
        let bytes = handles.iter().try_fold(0_u64, |bytes, handle| bytes.checked_add(handle.bytes));
        let is_whole = bytes == Some(entrusted.bytes) && handles.iter().all(|handle| handle.descriptor.is_some());
        is_whole.then(|| Self {
            key: entrusted.key,
            device: None,
            is_pinned: !entrusted.is_device,
            device_uuid: entrusted.device_uuid,
            secret: entrusted.secret,
            bytes: entrusted.bytes,
            handles,
        })
    }

    /// Returns the message that claims the memory at an heir, with the parts from `first` on; none if `first` is `None`.
    pub(super) fn entrust(&self, first: Option<usize>, (issued, done): (u64, u64)) -> (Entrusted, &[MemoryHandle]) {
        let handles = first.and_then(|first| self.handles.get(first..)).unwrap_or_default();
        let handles = &handles[..handles.len().min(MOST_PARTS)];
        let entrusted = Entrusted {
            key: self.key,
            is_device: !self.is_pinned,
            secret: self.secret,
            device_uuid: self.device_uuid,
            bytes: self.bytes,
            issued,
            done,
            first: u32::try_from(first.unwrap_or_default()).unwrap_or(u32::MAX),
            count: u32::try_from(self.handles.len()).unwrap_or(u32::MAX),
            parts: handles.iter().map(|handle| Part { bytes: handle.bytes, payload: handle.payload }).collect(),
        };
        (entrusted, handles)
    }

    /// Returns the same without the handles.
    pub(super) fn without_handles(&self) -> Self {
        let Self { key, device, is_pinned, device_uuid, secret, bytes, handles: _ } = *self;
        Self { key, device, is_pinned, device_uuid, secret, bytes, handles: Vec::new() }
    }

    /// Returns the number of handles.
    pub(super) fn parts(&self) -> usize {
        self.handles.len()
    }

    /// Returns the handle of a part.
    pub(super) fn handle(&self, part: usize) -> Result<MemoryHandle> {
        self.handles.get(part).cloned().ok_or_else(|| no_descriptor(Transport::Descriptor))
    }
}

/// Returns the error for an heir of memory that has no descriptor.
pub(super) fn no_descriptor(transport: Transport) -> Error {
    let message =
        format!("memory with the transport {transport:?} has no descriptor that an heir could keep and forward");
    Error::new(ErrorKind::Unsupported, OPERATION, message).with_hint(
        "allocate it by `Device::allocate_shared_by` with `Transport::Descriptor`, or open it with `OwnerDeath::Keep`",
    )
}
