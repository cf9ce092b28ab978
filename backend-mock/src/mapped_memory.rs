//! Mapped memory: reserved addresses, physical memory, and the devices that have access to it.
//!
//! Physical memory is a block of its device's memory file that has no address. If other processes may map it, its bytes are in
//! a file of its own, which those processes keep. A device that gets access maps the part of the file at the reserved address,
//! as it maps memory of another process. So the engine finds the bytes, and the checks see them change hands. The race finder
//! knows the place of the bytes behind each address.
//!
//! Lock: `mapped_memory` is taken before the locks of a device.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use highwater_hal::{
    DevicePtr, Error, ErrorKind, MemoryRange, PhysicalMemoryId, PhysicalMemoryOptions, RangeKind, Result, Transports,
};

use crate::device::Device;
use crate::device_memory::BlockFile;
use crate::imports::Source;
use crate::ipc;
use crate::mapping::Mapping;
use crate::operation::Operation;
use crate::sealed_file::{self, FileId};
use crate::state::State;

/// Physical memory of a device. It is freed when the id is destroyed and no piece maps it.
#[derive(Debug)]
pub(crate) struct PhysicalMemory {
    device: Arc<Device>,
    /// The offset in the file of the device, or of another process.
    offset: u64,
    bytes: u64,
    /// The number of the allocation.
    serial: u64,
    /// The file of its own, if other processes may map it.
    shareable: Option<BlockFile>,
    /// The file of another process; `None` for the device's own.
    imported: Option<(OwnedFd, FileId)>,
}

impl PhysicalMemory {
    /// Returns the file that holds the bytes.
    pub(crate) fn file(&self) -> &OwnedFd {
        match (&self.shareable, &self.imported) {
            (Some(own), _) => &own.file,
            (None, Some((file, _))) => file,
            (None, None) => self.device.memory.file(),
        }
    }

    /// Returns the place of the bytes.
    pub(crate) fn source(&self) -> Source {
        let (file, offset) = match (&self.shareable, &self.imported) {
            (Some(own), _) => (own.id, 0),
            (None, Some((_, id))) => (*id, self.offset),
            (None, None) => (self.device.memory.id(), self.offset),
        };
        Source { file, offset, bytes: self.bytes, serial: self.serial }
    }
}

impl Drop for PhysicalMemory {
    fn drop(&mut self) {
        // The bytes of another process end with its file.
        if self.imported.is_none() {
            self.device.free_physical(self.offset, self.bytes);
        }
        if let Some(own) = &self.shareable {
            self.device.forget_file(own.id.inode, own.bytes);
        }
    }
}

/// Physical memory that is mapped.
#[derive(Debug)]
struct Piece {
    memory: Arc<PhysicalMemory>,
    /// One bit for each device that has access.
    access: u64,
}

/// The reserved ranges and the pieces in them, by address.
#[derive(Debug, Default)]
pub(crate) struct MappedMemory {
    /// The device and the bytes of each range.
    reserved: BTreeMap<u64, (u32, u64)>,
    pieces: BTreeMap<u64, Piece>,
}

impl MappedMemory {
    pub(crate) fn reservations(&self) -> u64 {
        self.reserved.len() as u64
    }

    /// Returns whether a range lies inside one reserved range of the device.
    fn is_reserved(&self, device: u32, address: u64, bytes: u64) -> bool {
        let around = self.reserved.range(..=address).next_back();
        around.is_some_and(|(&start, &(of, length))| {
            of == device && address.checked_add(bytes).is_some_and(|end| end <= start + length)
        })
    }

    /// Returns whether memory is mapped in a range.
    fn is_mapped(&self, address: u64, bytes: u64) -> bool {
        let before = self.pieces.range(..address.saturating_add(bytes)).next_back();
        before.is_some_and(|(&start, piece)| start + piece.memory.bytes > address)
    }

    /// Returns the addresses of the pieces that form a range of the device exactly.
    fn whole(&self, operation: Operation, device: u32, ptr: DevicePtr, bytes: usize) -> Result<Vec<u64>> {
        let end = ptr.get().checked_add(bytes as u64);
        let (mut next, mut found) = (ptr.get(), Vec::new());
        while let Some(piece) = self.pieces.get(&next).filter(|_| Some(next) < end) {
            found.push(next);
            next += piece.memory.bytes;
        }
        if Some(next) == end && bytes > 0 && self.is_reserved(device, ptr.get(), bytes as u64) {
            return Ok(found);
        }
        let message = format!("{bytes} bytes at {ptr} of device {device} do not consist of whole mappings");
        Err(operation
            .error(ErrorKind::InvalidPointer, message)
            .with_hint("pass the address of a mapping and its bytes, or those of several without a gap"))
    }
}

impl State {
    fn check_bytes(&self, operation: Operation, bytes: usize) -> Result<()> {
        let granularity = self.capabilities.mapped_memory_granularity;
        if bytes > 0 && bytes.is_multiple_of(granularity) {
            return Ok(());
        }
        Err(operation
            .error(ErrorKind::InvalidArgument, format!("{bytes} bytes were asked for"))
            .with_hint(format!("ask for a multiple of {granularity} bytes, the `mapped_memory_granularity`")))
    }

    pub(crate) fn reserve_addresses(&self, operation: Operation, device: u32, bytes: usize) -> Result<DevicePtr> {
        let memory = &self.device(operation, device)?.memory;
        self.check_bytes(operation, bytes)?;
        let alignment = self.capabilities.mapped_memory_granularity as u64;
        let place = memory.imports.write().reserve(memory.base(), bytes as u64, alignment);
        let place = place.ok_or_else(|| {
            operation.error(ErrorKind::OutOfMemory, format!("no addresses are left for {bytes} bytes"))
        })?;
        let address = memory.base() + place;
        self.mapped_memory.lock().reserved.insert(address, (device, bytes as u64));
        Ok(DevicePtr::new(address))
    }

    pub(crate) fn free_addresses(&self, operation: Operation, device: u32, ptr: DevicePtr, bytes: usize) -> Result<()> {
        let memory = &self.device(operation, device)?.memory;
        let mut mapped = self.mapped_memory.lock();
        let wrong = |what: &str| {
            let message = format!("{bytes} bytes at {ptr} of device {device} {what}");
            operation.error(ErrorKind::InvalidPointer, message)
        };
        if mapped.reserved.get(&ptr.get()) != Some(&(device, bytes as u64)) {
            return Err(wrong("are no reserved range").with_hint("pass a range as `reserve_addresses` returned it"));
        }
        if mapped.is_mapped(ptr.get(), bytes as u64) {
            return Err(wrong("hold mapped memory").with_hint("unmap the memory first"));
        }
        mapped.reserved.remove(&ptr.get());
        memory.imports.write().unreserve(ptr.get() - memory.base());
        Ok(())
    }

    pub(crate) fn create_memory(
        &self,
        operation: Operation,
        device: u32,
        options: &PhysicalMemoryOptions,
    ) -> Result<PhysicalMemoryId> {
        let owner = self.device(operation, device)?;
        owner.check_not_lost(operation)?;
        if let Some(transport) = options.shareable
            && !self.capabilities.ipc_transports.contains(transport)
        {
            return Err(ipc::unsupported(operation, transport));
        }
        if options.rdma && !self.capabilities.mapped_memory_rdma {
            return Err(operation.lacks("mapped_memory_rdma"));
        }
        self.check_bytes(operation, options.bytes)?;
        let (offset, serial) = owner.allocate_physical(operation, options.bytes)?;
        let (device_of, bytes) = (Arc::clone(owner), options.bytes as u64);
        let mut memory = PhysicalMemory { device: device_of, offset, bytes, serial, shareable: None, imported: None };
        if options.shareable.is_some() {
            let file = BlockFile::new(bytes).map_err(|error| {
                sealed_file::not_made(operation.name(), "cannot create the memory file that others may map", error)
            })?;
            memory.shareable = Some(file);
        }
        self.physical_memory.insert(operation.name(), device, Arc::new(memory))
    }

    /// Enters memory of another process, which lies in a file that was checked.
    pub(crate) fn import_memory(
        &self,
        operation: Operation,
        device: u32,
        source: &Source,
        file: &OwnedFd,
    ) -> Result<PhysicalMemoryId> {
        let owner = self.device(operation, device)?;
        let &Source { file: id, offset, bytes, serial } = source;
        let granularity = self.capabilities.mapped_memory_granularity;
        if !bytes.is_multiple_of(granularity as u64) {
            return Err(operation
                .error(
                    ErrorKind::InvalidArgument,
                    format!("the handle is of {bytes} bytes, which is no multiple of the granularity {granularity}"),
                )
                .with_hint("give both processes the same granularity"));
        }
        let copy = rustix::io::fcntl_dupfd_cloexec(file, 0).map_err(|error| {
            sealed_file::failed(operation, "cannot duplicate the descriptor of the memory file", error)
        })?;
        let device_of = Arc::clone(owner);
        let memory =
            PhysicalMemory { device: device_of, offset, bytes, serial, shareable: None, imported: Some((copy, id)) };
        self.physical_memory.insert(operation.name(), device, Arc::new(memory))
    }

    /// Describes the mapping that contains an address, with the ordinal of its device.
    pub(crate) fn describe_mapped(&self, ptr: DevicePtr) -> Option<(u32, MemoryRange)> {
        let mapped = self.mapped_memory.lock();
        let (&start, piece) = mapped.pieces.range(..=ptr.get()).next_back()?;
        let memory = &piece.memory;
        let transports = if memory.shareable.is_some() { self.capabilities.ipc_transports } else { Transports::NONE };
        let range = MemoryRange::new(RangeKind::Mapped, DevicePtr::new(start), memory.bytes as usize);
        range.contains(ptr).then(|| (memory.device.ordinal, range.with_transports(transports)))
    }

    pub(crate) fn map_memory(
        &self,
        operation: Operation,
        device: u32,
        ptr: DevicePtr,
        memory: PhysicalMemoryId,
    ) -> Result<()> {
        let found = self.physical_memory.get(operation.name(), memory)?;
        self.device(operation, device)?;
        if memory.device() != device {
            let message =
                format!("the {memory} belongs to device {}, the addresses to device {device}", memory.device());
            return Err(operation
                .error(ErrorKind::WrongDevice, message)
                .with_hint("map memory at addresses of its own device"));
        }
        let granularity = self.capabilities.mapped_memory_granularity;
        if !ptr.is_aligned_to(granularity) {
            return Err(operation
                .error(ErrorKind::InvalidArgument, format!("{ptr} is no multiple of {granularity}"))
                .with_hint("map memory at a multiple of `mapped_memory_granularity`"));
        }
        let mut mapped = self.mapped_memory.lock();
        let bytes = found.bytes;
        let wrong = |what: &str| -> Error {
            let message = format!("{bytes} bytes at {ptr} of device {device} {what}");
            operation.error(ErrorKind::InvalidPointer, message)
        };
        if !mapped.is_reserved(device, ptr.get(), bytes) {
            return Err(wrong("are not inside one reserved range").with_hint("reserve the addresses first"));
        }
        if mapped.is_mapped(ptr.get(), bytes) {
            return Err(wrong("hold mapped memory already").with_hint("unmap the memory first"));
        }
        mapped.pieces.insert(ptr.get(), Piece { memory: found, access: 0 });
        Ok(())
    }

    pub(crate) fn set_memory_access(
        &self,
        operation: Operation,
        device: u32,
        (ptr, bytes): (DevicePtr, usize),
        accessing: u32,
    ) -> Result<()> {
        self.device(operation, device)?;
        let target = self.device(operation, accessing)?;
        if accessing != device && !self.capabilities.peer_copy {
            return Err(operation.lacks("peer_copy"));
        }
        let mut mapped = self.mapped_memory.lock();
        let mut opened = Vec::new();
        for address in mapped.whole(operation, device, ptr, bytes)? {
            let Some(Piece { memory, access }) = mapped.pieces.get(&address) else { continue };
            if access >> accessing & 1 == 1 {
                continue;
            }
            let source = memory.source();
            // SAFETY: the file is sealed, and the block lies inside it.
            let mapping = unsafe { Mapping::new(memory.file(), source.offset, source.bytes) }
                .map_err(|error| sealed_file::failed(operation, "cannot map the memory file", error))?;
            opened.push((address, source, mapping));
        }
        for (address, source, mapping) in opened {
            let place = address - target.memory.base();
            if target.memory.imports.write().insert_at(place, source, mapping)
                && let Some(piece) = mapped.pieces.get_mut(&address)
            {
                piece.access |= 1 << accessing;
            }
        }
        Ok(())
    }

    pub(crate) fn unmap_memory(&self, operation: Operation, device: u32, ptr: DevicePtr, bytes: usize) -> Result<()> {
        self.device(operation, device)?;
        let mut mapped = self.mapped_memory.lock();
        for address in mapped.whole(operation, device, ptr, bytes)? {
            let Some(piece) = mapped.pieces.remove(&address) else { continue };
            for device in &self.engine.devices {
                if piece.access >> device.ordinal & 1 == 1 {
                    device.close_import(operation, DevicePtr::new(address))?;
                }
            }
        }
        Ok(())
    }

    /// Returns the shareable memory that is mapped at an address; `None` if no memory is mapped there.
    pub(crate) fn shareable_mapped(
        &self,
        operation: Operation,
        device: u32,
        ptr: DevicePtr,
    ) -> Result<Option<Arc<PhysicalMemory>>> {
        let mapped = self.mapped_memory.lock();
        let Some(piece) = mapped.pieces.get(&ptr.get()).filter(|piece| piece.memory.device.ordinal == device) else {
            return Ok(None);
        };
        if piece.memory.shareable.is_some() {
            return Ok(Some(Arc::clone(&piece.memory)));
        }
        let message = format!("the physical memory at {ptr} was not created to be shared");
        Err(operation
            .error(ErrorKind::InvalidArgument, message)
            .with_hint("create it with `PhysicalMemoryOptions::with_shareable`"))
    }
}
