//! The two ends of shared memory, as the origins of blocks.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use super::{ExportKey, Import, ImportOptions, MemoryPart, Owner, OwnerDeath, Revocation, Ticket, WeakMemory};
use crate::device_block::{DeviceBlock, SharedMemory};
use crate::pool::completion_events::CompletionEvent;
use crate::runtime::Runtime;
use highwater_hal::{Result, Transport};

/// Memory of this process that other processes can open.
pub(crate) struct Exported {
    runtime: Runtime,
    transport: Transport,
    bytes: usize,
    /// The key of the allocation in the exporter, set by the first share.
    key: OnceLock<ExportKey>,
}

impl Exported {
    pub(crate) fn new(runtime: Runtime, transport: Transport, bytes: usize) -> Self {
        Self { runtime, transport, bytes, key: OnceLock::new() }
    }
}

impl SharedMemory for Exported {
    fn share(&self, block: &Arc<DeviceBlock>, after: Vec<Arc<CompletionEvent>>) -> Result<Ticket> {
        let inner = &self.runtime.inner;
        let uuid = inner.device(block.device).info.uuid;
        let bytes = self.bytes as u64;
        let parts = Arc::from([MemoryPart::new(block.ptr, bytes)]);
        let memory = WeakMemory::Device(Arc::downgrade(block), parts);
        inner.sharing("share")?.share(memory, &self.key, self.transport, bytes, uuid, after)
    }

    fn transport(&self, _: u32) -> Result<Transport> {
        Ok(self.transport)
    }

    fn range(&self) -> Range<u64> {
        0..self.bytes as u64
    }

    fn export(&self) -> Option<(Runtime, ExportKey)> {
        self.key.get().map(|key| (self.runtime.clone(), *key))
    }

    fn release(&self, block: &mut DeviceBlock) {
        let free = block.deferred_free();
        // Other processes may have the memory open. Then the free waits in limbo.
        let free = match (self.key.get(), self.runtime.inner.sharing.get()) {
            (Some(key), Some(sharing)) => sharing.close(*key, free),
            _ => Some(free),
        };
        if let Some(free) = free {
            self.runtime.inner.frees.defer(free);
        }
    }
}

/// Memory of another process, which counts the opens.
pub(crate) struct Imported {
    runtime: Runtime,
    import: Arc<Import>,
    /// `None` for memory that is kept when its owner dies.
    revocation: Option<Revocation>,
}

impl Imported {
    pub(crate) fn new(runtime: Runtime, import: Arc<Import>, options: &ImportOptions) -> Self {
        let is_revocable = options.owner_death() == OwnerDeath::Release;
        let revocation = is_revocable.then(Revocation::default);
        Self { runtime, import, revocation }
    }
}

impl SharedMemory for Imported {
    /// Waits for the work, because the exporter cannot tell its other importers about it.
    fn share(&self, _: &Arc<DeviceBlock>, after: Vec<Arc<CompletionEvent>>) -> Result<Ticket> {
        after.iter().try_for_each(|completion| self.runtime.inner.is_passed(completion, true).map(drop))?;
        Ok(Ticket { offset: 0, ..self.import.ticket.clone() })
    }

    fn transport(&self, _: u32) -> Result<Transport> {
        Ok(self.import.ticket.transport)
    }

    fn range(&self) -> Range<u64> {
        0..self.import.ticket.allocation_bytes
    }

    fn revocation(&self) -> Option<&Revocation> {
        self.revocation.as_ref()
    }

    fn owner(&self) -> Option<Owner> {
        self.runtime.inner.sharing.get().and_then(|sharing| sharing.owner_of(&self.import.owner()?))
    }

    fn release(&self, block: &mut DeviceBlock) {
        if let Some(sharing) = self.runtime.inner.sharing.get() {
            if let Some(revocation) = &self.revocation {
                sharing.forget_block(block);
                if revocation.is_released() {
                    return;
                }
            }
            let (after, unmarked) = block.outstanding();
            sharing.release_after(Arc::clone(&self.import), after, unmarked);
        }
    }
}
