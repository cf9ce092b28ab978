//! Several pieces of another process's memory, mapped as one range.
//!
//! Other code may have built its range from many pieces of physical memory. The importer reserves addresses for all of them,
//! and maps each piece as it arrives. A piece's descriptor is closed before the next one comes, so that a range of thousands of
//! pieces needs few descriptors at once. If a piece is missing, everything is undone.

use super::patience::OPERATION;
use super::system::invalid_message;
use crate::ledger::DeviceBlockInfo;
use crate::pool::device_memory::DeviceMemory;
use highwater_hal::{DevicePtr, Error, ErrorKind, MemoryHandle, Result};

/// A range that is being filled. Dropping it undoes everything.
pub(super) struct Joined<'m> {
    memory: &'m DeviceMemory,
    device: u32,
    ptr: DevicePtr,
    bytes: usize,
    /// Bytes that are mapped, from the start.
    filled: usize,
    is_finished: bool,
}

impl<'m> Joined<'m> {
    /// Reserves the addresses.
    pub(super) fn reserve(memory: &'m DeviceMemory, device: u32, bytes: u64) -> Result<Self> {
        let can = &memory.services.device(device).capabilities;
        if !can.mapped_memory {
            return Err(Error::lacks(OPERATION, "mapped_memory"));
        }
        if !can.foreign_memory {
            return Err(Error::lacks(OPERATION, "foreign_memory"));
        }
        let bytes = usize::try_from(bytes)
            .map_err(|_| Error::new(ErrorKind::OutOfMemory, OPERATION, "the range does not fit the address space"))?;
        let ptr = memory.services.backend.reserve_addresses(device, bytes)?;
        Ok(Self { memory, device, ptr, bytes, filled: 0, is_finished: false })
    }

    /// Maps the next piece.
    pub(super) fn add(&mut self, handle: &MemoryHandle) -> Result<()> {
        let services = &self.memory.services;
        let bytes = usize::try_from(handle.bytes).unwrap_or(usize::MAX);
        if bytes == 0 || bytes > self.bytes - self.filled {
            return Err(invalid_message(OPERATION, "pieces that are not the ticket's allocation"));
        }
        let ipc = services.ipc(OPERATION)?;
        let id = self.memory.with_retry(|| ipc.import_memory(self.device, handle), || true)?;
        // SAFETY: The addresses were reserved here, no other code knows them, and nothing is mapped behind the filled part.
        let mapped = unsafe { services.backend.map_memory(self.device, self.ptr.offset(self.filled), id) };
        if mapped.is_ok() {
            self.filled += bytes;
        }
        // Memory that is mapped stays. A refusal is counted and logged.
        let _ = services.note(services.backend.destroy_memory(id));
        mapped
    }

    /// Gives the device access, and returns the address.
    pub(super) fn finish(mut self) -> Result<DevicePtr> {
        let services = &self.memory.services;
        if self.filled != self.bytes {
            return Err(invalid_message(OPERATION, "fewer pieces than the ticket's allocation has"));
        }
        // SAFETY: The range was reserved here, and whole pieces fill it.
        unsafe { services.backend.set_memory_access(self.device, self.ptr, self.bytes, self.device)? };
        let block = DeviceBlockInfo { device: self.device, base: self.ptr, bytes: self.bytes };
        services.ledger.insert_device(block)?;
        self.is_finished = true;
        Ok(self.ptr)
    }
}

impl Drop for Joined<'_> {
    fn drop(&mut self) {
        if !self.is_finished {
            let services = &self.memory.services;
            // A refusal is counted and logged. No later call knows the range.
            let _ = services.note(unmap(self.memory, self.device, self.ptr, (self.filled, self.bytes)));
        }
    }
}

/// Unmaps the first `filled` bytes of a range, and frees its addresses. May be repeated after a failure.
fn unmap(memory: &DeviceMemory, device: u32, ptr: DevicePtr, (filled, bytes): (usize, usize)) -> Result<()> {
    let backend = &memory.services.backend;
    if filled > 0 {
        // SAFETY: The range belongs to this module, and the caller states that no work uses it.
        match unsafe { backend.unmap_memory(device, ptr, filled) } {
            // An earlier attempt unmapped it.
            Err(error) if error.kind() == ErrorKind::InvalidPointer => {}
            unmapped => unmapped?,
        }
    }
    // SAFETY: As above, and nothing is mapped there, or the backend refuses the call.
    unsafe { backend.free_addresses(device, ptr, bytes) }
}

/// Unmaps a range that [`Joined::finish`] returned. May be repeated after a failure.
///
/// # Safety
/// The caller must ensure that no work uses the range.
pub(super) unsafe fn unmap_joined(memory: &DeviceMemory, device: u32, ptr: DevicePtr) -> Result<()> {
    let ledger = &memory.services.ledger;
    let block = ledger.remove_device(device, ptr)?;
    unmap(memory, device, ptr, (block.bytes, block.bytes)).inspect_err(|_| {
        // The range is free in the ledger, so this cannot fail.
        let _ = ledger.insert_device(block);
    })
}
