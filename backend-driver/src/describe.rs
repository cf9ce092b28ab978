//! Memory that other code of the process allocated: its description, its export, and the import of mapped memory.
//!
//! The vendor says what lies at an address. For memory of this backend, its own tables say which transports export it: a
//! block that was not made shareable stays private, though the vendor could export it.

use super::ipc::unsupported;
use super::platform::Platform;
use super::state::{BlockKind, DriverState};
use highwater_hal::{
    DevicePtr, Error, ErrorKind, MemoryRange, PhysicalMemoryId, RangeKind, Result, Transport, Transports,
};

/// Returns the error of an address at which no device memory lies.
#[cold]
#[must_use]
pub fn no_device_memory(operation: &'static str, ptr: DevicePtr, what: &str) -> Error {
    Error::new(ErrorKind::InvalidPointer, operation, format!("{ptr} is {what}, expected memory of a device"))
        .with_hint("pass an address of device memory that is allocated")
}

impl<P: Platform> DriverState<P> {
    pub(super) fn describe_memory(&self, device: u32, ptr: DevicePtr) -> Result<MemoryRange> {
        const OPERATION: &str = "describe_memory";
        self.enter(OPERATION)?;
        if !self.capabilities(OPERATION, device)?.foreign_memory {
            return Err(Error::lacks(OPERATION, "foreign_memory"));
        }
        if ptr.get() == 0 {
            return Err(no_device_memory(OPERATION, ptr, "null"));
        }
        let range = self.describe_by_vendor(OPERATION, device, ptr)?;
        let range = self.as_own(device, range);
        // The vendor's range has whole pages.
        if range.contains(ptr) { Ok(range) } else { Err(no_device_memory(OPERATION, ptr, "in no live block")) }
    }

    fn describe_by_vendor(&self, operation: &'static str, device: u32, ptr: DevicePtr) -> Result<MemoryRange> {
        let _relaxed = self.relaxed();
        self.platform.refuse_memory_of_others(device, ptr)?;
        let _current = self.make_current(operation, device)?;
        let mut range = self.platform.describe_memory(device, ptr)?;
        let offered = self.capabilities(operation, device)?.ipc_transports;
        range.transports = range.transports.and(offered);
        Ok(range)
    }

    /// Corrects the description of memory that this backend made.
    fn as_own(&self, device: u32, range: MemoryRange) -> MemoryRange {
        let only = |transport: Option<Transport>| transport.map_or(Transports::NONE, |it| Transports::NONE.with(it));
        if let Some(block) = self.blocks.lock().get(&range.base).filter(|block| block.device == device) {
            let (kind, transports) = match &block.kind {
                BlockKind::Plain => (RangeKind::Plain, Transports::NONE),
                BlockKind::Legacy => (range.kind, only(Some(Transport::Legacy))),
                BlockKind::Shared { transport, .. } => (range.kind, only(Some(*transport))),
                BlockKind::StreamOrdered => (RangeKind::StreamOrdered, Transports::NONE),
            };
            return MemoryRange::new(kind, range.base, block.bytes).with_transports(transports);
        }
        if let Some((bytes, shareable)) = self.mapped_piece(range.base) {
            return MemoryRange::new(RangeKind::Mapped, range.base, bytes).with_transports(only(shareable));
        }
        // Vendors refuse to export memory of another process.
        if self.is_opened(range.base) { range.with_transports(Transports::NONE) } else { range }
    }

    fn is_opened(&self, base: DevicePtr) -> bool {
        self.mapped.lock().values().any(|mapped| mapped.address == Some(base))
    }

    /// Returns the range of foreign memory that starts at an address; `None` if none does, or if this backend made the memory.
    pub(super) fn foreign_range(&self, operation: &'static str, device: u32, ptr: DevicePtr) -> Option<MemoryRange> {
        let may = self.capabilities(operation, device).is_ok_and(|can| can.foreign_memory);
        if !may || ptr.get() == 0 || self.mapped_piece(ptr).is_some() || self.is_opened(ptr) {
            return None;
        }
        self.describe_by_vendor(operation, device, ptr).ok().filter(|range| range.base == ptr)
    }

    /// Opens mapped memory of another process. The handle was checked.
    pub(super) fn import_memory(
        &self,
        device: u32,
        bytes: usize,
        import: impl FnOnce(&P) -> Result<u64>,
    ) -> Result<PhysicalMemoryId> {
        const OPERATION: &str = "import_memory";
        let allocation = {
            let _relaxed = self.relaxed();
            let _current = self.make_current(OPERATION, device)?;
            import(&self.platform)?
        };
        self.enter_imported(OPERATION, device, bytes, allocation)
    }

    /// Checks that a device imports mapped memory by a transport. Returns the granularity.
    pub(super) fn check_import(&self, device: u32, transport: Transport) -> Result<usize> {
        const OPERATION: &str = "import_memory";
        let can = self.capabilities(OPERATION, device)?;
        if !can.foreign_memory {
            return Err(Error::lacks(OPERATION, "foreign_memory"));
        }
        if !can.mapped_memory {
            return Err(Error::lacks(OPERATION, "mapped_memory"));
        }
        if !can.ipc_transports.contains(transport) {
            return Err(unsupported(OPERATION, transport));
        }
        Ok(can.mapped_memory_granularity)
    }
}
