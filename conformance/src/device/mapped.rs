//! Guards of mapped memory: physical memory, and reserved addresses with the memory that is mapped there.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use highwater_hal::{
    Backend, DevicePtr, Location, MemoryHandle, PhysicalMemoryId, PhysicalMemoryOptions, Result, Transport,
};

use super::{Block, Destroy, Object, Origin, Span, Users, read_span, sharing, write_span};
use crate::sweep::insist;
use crate::validation::made_here;

/// Physical memory, destroyed when dropped.
pub(crate) type PhysicalMemory<'b> = Object<'b, PhysicalMemoryId>;

impl Destroy for PhysicalMemoryId {
    fn destroy(self, backend: &dyn Backend) -> Result<()> {
        backend.destroy_memory(self)
    }
}

impl<'b> PhysicalMemory<'b> {
    #[track_caller]
    pub(crate) fn create(backend: &'b dyn Backend, device: u32, options: &PhysicalMemoryOptions) -> Result<Self> {
        made_here();
        Ok(Self::adopted(backend, backend.create_memory(device, options)?))
    }
}

/// Reserved addresses of a device. The memory that is mapped there is unmapped, and the addresses are freed, when dropped.
#[derive(Debug)]
pub(crate) struct Addresses<'b> {
    backend: &'b dyn Backend,
    device: u32,
    ptr: DevicePtr,
    bytes: usize,
    users: Users,
    /// The bytes of each mapping, by its offset.
    mapped: Mutex<BTreeMap<usize, usize>>,
    alive: bool,
}

impl<'b> Addresses<'b> {
    #[track_caller]
    pub(crate) fn new(backend: &'b dyn Backend, device: u32, bytes: usize) -> Result<Self> {
        made_here();
        let ptr = backend.reserve_addresses(device, bytes)?;
        Ok(Self { backend, device, ptr, bytes, users: Users::default(), mapped: Mutex::default(), alive: true })
    }

    pub(crate) fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    fn with_mapped<T>(&self, change: impl FnOnce(&mut BTreeMap<usize, usize>) -> T) -> T {
        change(&mut self.mapped.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Maps memory of `bytes` bytes. A case may pass an offset that the backend must refuse.
    pub(crate) fn map(&self, offset: usize, memory: &PhysicalMemory<'_>, bytes: usize) -> Result<()> {
        // SAFETY: the range is reserved for this guard alone, and a call that leaves it must be refused.
        unsafe { self.backend.map_memory(self.device, self.ptr.offset(offset), memory.id())? };
        self.with_mapped(|mapped| mapped.insert(offset, bytes));
        Ok(())
    }

    /// Gives a device access to mapped memory. A case may pass a range that the backend must refuse.
    #[track_caller]
    pub(crate) fn give_access(&self, range: Range<usize>, accessing: u32) -> Result<()> {
        made_here();
        let (ptr, bytes) = (self.ptr.offset(range.start), range.len());
        // SAFETY: as above.
        unsafe { self.backend.set_memory_access(self.device, ptr, bytes, accessing) }
    }

    /// Creates memory of the range's length, maps it, and gives the device access.
    #[track_caller]
    pub(crate) fn fill_in(&self, range: Range<usize>) -> Result<PhysicalMemory<'b>> {
        let memory = PhysicalMemory::create(self.backend, self.device, &PhysicalMemoryOptions::new(range.len()))?;
        self.map(range.start, &memory, range.len())?;
        self.give_access(range, self.device)?;
        Ok(memory)
    }

    /// Unmaps a range, after all work that is enqueued on it. A case may pass a range that the backend must refuse.
    pub(crate) fn unmap(&self, range: Range<usize>) -> Result<()> {
        self.users.settle(self.backend)?;
        let ptr = self.ptr.offset(range.start);
        // SAFETY: the range belongs to this guard alone, and the devices that used it have been waited for.
        unsafe { self.backend.unmap_memory(self.device, ptr, range.len())? };
        self.with_mapped(|mapped| mapped.retain(|offset, _| !range.contains(offset)));
        Ok(())
    }

    /// Frees a range of addresses that the backend must refuse.
    pub(crate) fn free_wrongly(&self, range: Range<usize>) -> Result<()> {
        // SAFETY: the range belongs to this guard alone, and a call with another range must be refused.
        unsafe { self.backend.free_addresses(self.device, self.ptr.offset(range.start), range.len()) }
    }

    /// Returns a range of mapped memory.
    pub(crate) fn span(&self, range: Range<usize>) -> Span<'_> {
        self.span_on(self.device, range)
    }

    /// Returns a range of mapped memory, for work of a device that has access.
    pub(crate) fn span_on(&self, device: u32, range: Range<usize>) -> Span<'_> {
        Span::cut(Location::Device { device, ptr: self.ptr }, self.bytes, &self.users, range)
    }

    #[track_caller]
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        write_span(self.backend, self.device, self.span(offset..offset + bytes.len()), bytes)
    }

    #[track_caller]
    pub(crate) fn read(&self, range: Range<usize>) -> Result<Vec<u8>> {
        read_span(self.backend, self.device, self.span(range))
    }

    /// Exports a handle of the memory that is mapped at an offset.
    pub(crate) fn export(&self, offset: usize, transport: Transport) -> Result<MemoryHandle> {
        // SAFETY: memory is mapped there, or the backend must refuse the call.
        unsafe {
            sharing(self.backend, "export_memory")?.export_memory(self.device, self.ptr.offset(offset), transport)
        }
    }

    /// Unmaps what is mapped and frees the addresses. The devices that used them have been waited for.
    pub(super) fn release(&mut self) -> Result<()> {
        self.alive = false;
        for (offset, bytes) in self.with_mapped(std::mem::take) {
            // SAFETY: the guard mapped it, no device uses it any more, and it is unmapped here only.
            insist(|| unsafe { self.backend.unmap_memory(self.device, self.ptr.offset(offset), bytes) })?;
        }
        // SAFETY: the addresses came from `reserve_addresses`, hold no memory any more, and are freed here only.
        insist(|| unsafe { self.backend.free_addresses(self.device, self.ptr, self.bytes) })
    }
}

impl Drop for Addresses<'_> {
    fn drop(&mut self) {
        if self.alive {
            self.users.settle_at_last(self.backend);
            // An error here shows in the count of living objects.
            let _ = self.release();
        }
    }
}

impl<'b> Block<'b> {
    /// Imports mapped memory of another process, and maps it at addresses of its own.
    #[track_caller]
    pub(crate) fn imported(backend: &'b dyn Backend, device: u32, handle: &MemoryHandle) -> Result<Self> {
        let sharing = sharing(backend, "import_memory")?;
        let import = || {
            made_here();
            sharing.import_memory(device, handle).map(|memory| PhysicalMemory::adopted(backend, memory))
        };
        // The end of a second import leaves the first.
        let (memory, second) = (import()?, import()?);
        second.destroy()?;
        let bytes = handle.bytes as usize;
        let addresses = Addresses::new(backend, device, bytes)?;
        Self::of_one_piece(addresses, device, memory, bytes)
    }

    /// Makes a block of mapped memory of one piece that can be exported.
    #[track_caller]
    pub(crate) fn mapped_for(
        backend: &'b dyn Backend,
        device: u32,
        bytes: usize,
        transport: Transport,
    ) -> Result<Self> {
        let addresses = Addresses::new(backend, device, bytes)?;
        let options = PhysicalMemoryOptions::new(bytes).with_shareable(transport);
        let memory = PhysicalMemory::create(backend, device, &options)?;
        Self::of_one_piece(addresses, device, memory, bytes)
    }

    /// Makes a block of mapped memory, with one piece of physical memory for each number of bytes.
    #[track_caller]
    pub(crate) fn mapped(backend: &'b dyn Backend, device: u32, pieces: &[usize]) -> Result<Self> {
        let bytes = pieces.iter().sum();
        let addresses = Addresses::new(backend, device, bytes)?;
        let mut offset = 0;
        for &bytes in pieces {
            // Memory that is destroyed stays as long as it is mapped.
            addresses.fill_in(offset..offset + bytes)?.destroy()?;
            offset += bytes;
        }
        Ok(Self::at(addresses, device, bytes))
    }

    /// Maps the memory at these addresses, and destroys it: it stays as long as it is mapped.
    fn of_one_piece(addresses: Addresses<'b>, device: u32, memory: PhysicalMemory<'_>, bytes: usize) -> Result<Self> {
        addresses.map(0, &memory, bytes)?;
        addresses.give_access(0..bytes, device)?;
        memory.destroy()?;
        Ok(Self::at(addresses, device, bytes))
    }

    /// The block at addresses where memory is mapped.
    fn at(addresses: Addresses<'b>, device: u32, bytes: usize) -> Self {
        let (backend, ptr) = (addresses.backend, addresses.ptr());
        let origin = Origin::Mapped(addresses);
        Self { backend, device, ptr, bytes, origin, users: Users::default(), alive: true }
    }
}
