//! One simulated device: its memory, the parts of it that are taken, and whether it still works.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use highwater_hal::{DevicePtr, Error, ErrorKind, MemoryInfo, MemoryRange, RangeKind, Result, Transports};
use parking_lot::RwLock;

use crate::arena::{Arena, Block, Owner, Quarantine};
use crate::device_memory::{BlockFile, DeviceMemory, POISON};
use crate::observer::{Observers, Range, Space, Store, Touch};
use crate::operation::Operation;
use crate::sealed_file;

/// A retired block. [`Device::release`] gives its bytes back.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Retired {
    pub(crate) ptr: DevicePtr,
    /// The bytes that the block takes.
    pub(crate) bytes: u64,
    serial: u64,
    /// The number of commands that the use observer had noted by then. No later command uses the block.
    noted: u64,
}

#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) ordinal: u32,
    pub(crate) memory: DeviceMemory,
    arena: RwLock<Arena>,
    /// Grows whenever a block ends to be live, so that the result of a range check can be remembered.
    epoch: AtomicU64,
    lost: AtomicBool,
    /// Whether freed memory is filled with [`POISON`].
    poisons: bool,
    observers: Observers,
}

/// How a device treats freed memory.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct DeviceOptions {
    pub(crate) quarantine: Quarantine,
    /// Whether freed memory is filled with [`POISON`].
    pub(crate) poisons: bool,
}

impl Device {
    pub(crate) fn new(ordinal: u32, memory_bytes: u64, options: &DeviceOptions, observers: Observers) -> Result<Self> {
        Ok(Self {
            ordinal,
            memory: DeviceMemory::new(ordinal, memory_bytes)?,
            arena: RwLock::new(Arena::new(memory_bytes, options.quarantine)),
            epoch: AtomicU64::new(0),
            lost: AtomicBool::new(false),
            poisons: options.poisons,
            observers,
        })
    }

    /// Returns the store and the offset of the bytes at an address of the device, and how many lie there in a row; `None` if
    /// nothing lies there.
    pub(crate) fn locate(&self, address: u64) -> Option<(Store, u64, u64)> {
        let offset = address.checked_sub(self.memory.base())?;
        let (inode, place, left) = if offset < self.memory.bytes() {
            self.memory.source(offset)
        } else {
            self.memory.imports.read().source(offset)?
        };
        Some((Store::File(inode), place, left))
    }

    /// Returns a range of memory that the device reaches and that lies in one place, with that place.
    pub(crate) fn touch(&self, address: u64, bytes: u64) -> Option<Touch> {
        let (store, start, _) = self.locate(address)?;
        Some(Touch::whole(store, start, Range { space: Space::Device(self.ordinal), address, bytes }))
    }

    fn store(&self) -> Store {
        Store::File(self.memory.id().inode)
    }

    /// Tells the order observer that bytes are handed out anew, or have no owner.
    fn forget(&self, offset: u64, bytes: u64) {
        if let Some(order) = &self.observers.order {
            order.forget(self.store(), offset, bytes);
        }
    }

    /// Tells the order observer that the file of a block, or of physical memory, ends here.
    pub(crate) fn forget_file(&self, inode: u64, bytes: u64) {
        if let Some(order) = &self.observers.order {
            order.forget(Store::File(inode), 0, bytes);
        }
    }

    /// Tells the order observer that a call frees a block at once.
    pub(crate) fn note_free(&self, operation: Operation, ptr: DevicePtr, bytes: u64) {
        if let Some(order) = &self.observers.order
            && let Some(touch) = self.touch(ptr.get(), bytes)
        {
            let range = touch.used.range;
            let own = Touch::whole(self.store(), range.address - self.memory.base(), range);
            // Other addresses still reach bytes in the file of a block.
            if touch.store != own.store {
                order.closed(operation, touch);
            }
            order.freed(operation, own);
        }
    }

    /// Tells the use observer that memory changes hands. Only the first `noted` commands can conflict with that.
    fn change_hands(&self, noted: u64, operation: Operation, how: &str, offset: u64, bytes: u64) {
        if let Some(uses) = &self.observers.uses {
            let address = self.memory.base() + offset;
            uses.changed_hands(noted, operation, how, Range { space: Space::Device(self.ordinal), address, bytes });
        }
    }

    /// Allocates memory for a caller. A stream gets at once the stream-ordered memory that it is about to free.
    pub(crate) fn allocate(
        &self,
        operation: Operation,
        bytes: usize,
        owner: Owner,
        in_order_of: Option<u64>,
    ) -> Result<DevicePtr> {
        let mut arena = self.arena.write();
        let reused = in_order_of.and_then(|stream| arena.reuse(bytes as u64, stream));
        match reused.or_else(|| arena.allocate(bytes as u64, owner)) {
            Some(offset) => {
                let reserved = arena.block(offset).map_or(bytes as u64, Block::reserved);
                drop(arena);
                if owner == Owner::Shareable
                    && let Err(error) = self.memory.begin_file(offset, reserved)
                {
                    self.take_back(offset);
                    let what = format!("cannot create the memory file of {bytes} bytes that others may map");
                    return Err(sealed_file::not_made(operation.name(), &what, error));
                }
                // Outstanding work may use reused bytes; the release checks it.
                if reused.is_none() {
                    self.change_hands(u64::MAX, operation, "were handed out", offset, bytes as u64);
                }
                self.forget(offset, reserved);
                Ok(DevicePtr::new(self.memory.base() + offset))
            }
            None => {
                let (free, longest, retiring) = (arena.free_bytes(), arena.longest_gap(), arena.retiring_bytes());
                Err(operation
                    .error(
                        ErrorKind::OutOfMemory,
                        format!(
                            "{bytes} bytes were asked for, device {} has {free} of {} bytes free, the longest run is \
                         {longest}, and {retiring} bytes wait for a stream to free them",
                            self.ordinal,
                            self.memory.bytes()
                        ),
                    )
                    .with_hint("free buffers, or open the mock with more memory"))
            }
        }
    }

    /// Frees a block that no caller has seen.
    fn take_back(&self, offset: u64) {
        let mut arena = self.arena.write();
        if let Some(block) = arena.retire(offset) {
            let parts = arena.end_retiring(offset, block.reserved(), block.serial);
            parts.into_iter().for_each(|part| arena.release(part));
        }
    }

    /// Retires a caller's block.
    pub(crate) fn retire(&self, operation: Operation, ptr: DevicePtr, stream_ordered: bool) -> Result<Retired> {
        let mut arena = self.arena.write();
        let block = self.offset(ptr).and_then(|offset| Some((offset, arena.block(offset)?)));
        let (offset, block) = match block {
            Some((offset, block)) if !matches!(block.owner, Owner::Mock | Owner::Physical) => (offset, block),
            _ => return Err(self.not_a_block(operation, &arena, ptr)),
        };
        if stream_ordered != (block.owner == Owner::StreamOrdered) {
            let message = if stream_ordered {
                format!("{ptr} was not allocated in stream order, but a stream was passed")
            } else {
                format!("{ptr} was allocated in stream order, but no stream was passed")
            };
            return Err(operation
                .error(ErrorKind::InvalidArgument, message)
                .with_hint("pass a stream if and only if the block is of kind `StreamOrdered`"));
        }
        arena.retire(offset);
        // Relaxed: a thread that relies on the new state learned of this call's return by other means.
        self.epoch.fetch_add(1, Ordering::Relaxed);
        Ok(self.retired(ptr, block))
    }

    fn retired(&self, ptr: DevicePtr, block: Block) -> Retired {
        let noted = self.observers.uses.as_ref().map_or(u64::MAX, |uses| uses.noted());
        Retired { ptr, bytes: block.reserved(), serial: block.serial, noted }
    }

    /// Notes that the release of a block was enqueued on a stream. Allocations there may reuse the bytes from now on.
    pub(crate) fn offer(&self, block: Retired, stream: u64) {
        if let Some(offset) = self.offset(block.ptr) {
            self.arena.write().offer(offset, block.serial, stream);
        }
    }

    /// Undoes [`Device::retire`].
    pub(crate) fn revive(&self, ptr: DevicePtr) {
        if let Some(offset) = self.offset(ptr) {
            self.arena.write().revive(offset);
        }
    }

    /// Frees the bytes of a retired block, except those that were reused.
    pub(crate) fn release(&self, block: Retired) {
        let Some(offset) = self.offset(block.ptr) else { return };
        let parts = self.arena.write().end_retiring(offset, block.bytes, block.serial);
        // Later work of a block that reused some of the bytes may use them.
        let noted = if parts == [(offset, block.bytes)] { u64::MAX } else { block.noted };
        self.change_hands(noted, Operation::Free, "were freed", offset, block.bytes);
        match self.memory.end_file(offset) {
            Ok(None) => {}
            Ok(Some(file)) => self.forget_file(file.id.inode, file.bytes),
            // The system lacks memory for its own tables. No block gets the bytes, because other processes have them open.
            Err(error) => {
                tracing::warn!(%error, bytes = block.bytes, "freed memory of a simulated device stays taken");
                return;
            }
        }
        for &(offset, bytes) in &parts {
            // While a part is neither live nor a gap, its pages belong to no block.
            if self.poisons {
                self.memory.fill(offset as usize, bytes as usize, bytemuck::cast([POISON; 2]));
            } else {
                self.memory.give_back(offset, bytes);
            }
        }
        let mut arena = self.arena.write();
        parts.into_iter().for_each(|part| arena.release(part));
    }

    /// Frees a block that the mock owns, or physical memory.
    pub(crate) fn free_own(&self, ptr: DevicePtr, bytes: u64) {
        let Some(offset) = self.offset(ptr) else { return };
        let block = self.arena.write().retire(offset);
        if let Some(block) = block {
            self.forget(offset, bytes);
            self.release(self.retired(ptr, block));
        }
    }

    /// Returns the file and the block of an allocation that other processes may map.
    pub(crate) fn shareable(&self, operation: Operation, ptr: DevicePtr) -> Result<(Arc<BlockFile>, Block)> {
        let (offset, block) = self.block_of(operation, ptr, Owner::Shareable)?;
        let file = self.memory.block_file(offset).ok_or_else(|| {
            operation
                .error(ErrorKind::InvalidPointer, format!("the memory at {ptr} was freed during the call"))
                .with_hint("keep the memory allocated during the call")
        })?;
        Ok((file, block))
    }

    /// Returns the offset and the block of an allocation that other processes may map in the device's own file.
    #[cfg(feature = "simulated")]
    pub(crate) fn pages(&self, operation: Operation, ptr: DevicePtr) -> Result<(u64, Block)> {
        self.block_of(operation, ptr, Owner::Pages)
    }

    fn block_of(&self, operation: Operation, ptr: DevicePtr, owner: Owner) -> Result<(u64, Block)> {
        let arena = self.arena.read();
        match self.offset(ptr).and_then(|offset| Some((offset, arena.block(offset)?))) {
            Some((offset, block)) if block.owner == owner => Ok((offset, block)),
            Some((_, block)) if !matches!(block.owner, Owner::Mock | Owner::Physical) => Err(operation
                .error(ErrorKind::InvalidArgument, format!("the memory at {ptr} was not allocated to be shared"))
                .with_hint("allocate with `DeviceMemoryKind::Shareable`")),
            _ => Err(self.not_a_block(operation, &arena, ptr)),
        }
    }

    /// Allocates physical memory, which has no address. Returns its offset, and the number of the allocation.
    pub(crate) fn allocate_physical(&self, operation: Operation, bytes: usize) -> Result<(u64, u64)> {
        let ptr = self.allocate(operation, bytes, Owner::Physical, None)?;
        let offset = ptr.get() - self.memory.base();
        Ok((offset, self.arena.read().block(offset).map_or(0, |block| block.serial)))
    }

    /// Frees physical memory.
    pub(crate) fn free_physical(&self, offset: u64, bytes: u64) {
        self.free_own(DevicePtr::new(self.memory.base() + offset), bytes);
    }

    /// Closes memory of another process once, or unmaps a piece of mapped memory.
    pub(crate) fn close_import(&self, operation: Operation, ptr: DevicePtr) -> Result<()> {
        let place = ptr.get().checked_sub(self.memory.base());
        let touch = self.observers.order.as_ref().and_then(|_| self.touch(ptr.get(), 1));
        // The mapping itself ends after the lock is released.
        let closed = place.and_then(|place| self.memory.imports.write().close(place));
        match closed {
            Some(mapping) => {
                if let Some(mapping) = &mapping {
                    let offset = ptr.get() - self.memory.base();
                    let how = if operation == Operation::UnmapMemory { "were unmapped" } else { "were closed" };
                    self.change_hands(u64::MAX, operation, how, offset, mapping.bytes());
                    if let (Some(order), Some(touch)) = (&self.observers.order, touch) {
                        let range = Range { bytes: mapping.bytes(), ..touch.used.range };
                        order.closed(operation, Touch::whole(touch.store, touch.start, range));
                    }
                    // No other address reaches a file that this device does not have.
                    if operation == Operation::CloseMemory
                        && let Some(order) = &self.observers.order
                        && let Some(Touch { store: store @ Store::File(inode), start, .. }) = touch
                        && !self.memory.has_file(inode)
                    {
                        order.forget(store, start, mapping.bytes());
                    }
                    // Relaxed: see `retire`.
                    self.epoch.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            }
            None => Err(operation
                .error(ErrorKind::InvalidPointer, format!("no memory is open for device {} at {ptr}", self.ordinal))
                .with_hint("close with the address and the device of `open_memory`, once for each open")),
        }
    }

    /// Checks that a range lies inside one live block, and returns its offset in the memory.
    pub(crate) fn range(&self, operation: Operation, what: &str, ptr: DevicePtr, bytes: usize) -> Result<usize> {
        let offset = ptr.get().checked_sub(self.memory.base());
        if let Some(offset) = offset.filter(|&offset| offset >= self.memory.bytes())
            && self.memory.imports.read().contains(offset, bytes as u64)
        {
            return Ok(offset as usize);
        }
        let arena = self.arena.read();
        match self.offset(ptr) {
            Some(offset) if arena.contains(offset, bytes as u64) => Ok(offset as usize),
            offset => {
                let block = offset.and_then(|offset| arena.around(offset)).map_or_else(
                    || "no block lies there or before".to_owned(),
                    |(start, block)| {
                        format!("the nearest block has {} bytes at {:#x}", block.bytes, self.memory.base() + start)
                    },
                );
                Err(operation
                    .error(
                        ErrorKind::InvalidPointer,
                        format!(
                            "{what}: {bytes} bytes at {ptr} are not inside one block of device {}; {block}",
                            self.ordinal
                        ),
                    )
                    .with_hint(
                        "pass memory of `allocate` or `open_memory` for this device that was not freed, or mapped memory to \
                         which `set_memory_access` gave this device access",
                    ))
            }
        }
    }

    /// Describes the block of this device that contains an address.
    pub(crate) fn describe(&self, ptr: DevicePtr, shares: Transports) -> Option<MemoryRange> {
        let range = |kind, start: u64, bytes: u64| {
            MemoryRange::new(kind, DevicePtr::new(self.memory.base() + start), bytes as usize)
        };
        let Some(offset) = self.offset(ptr) else {
            let place = ptr.get().checked_sub(self.memory.base())?;
            let (start, bytes) = self.memory.imports.read().opened(place)?;
            return Some(range(RangeKind::Plain, start, bytes));
        };
        let (start, block) = self.arena.read().around(offset)?;
        let (kind, transports) = match block.owner {
            Owner::Plain => (RangeKind::Plain, Transports::NONE),
            Owner::Shareable => (RangeKind::Plain, shares),
            #[cfg(feature = "simulated")]
            Owner::Pages => (RangeKind::Plain, shares),
            Owner::StreamOrdered => (RangeKind::StreamOrdered, Transports::NONE),
            Owner::Physical | Owner::Mock => return None,
        };
        Some(range(kind, start, block.bytes).with_transports(transports)).filter(|range| range.contains(ptr))
    }

    /// Returns the epoch of the blocks: it grows whenever a block ends to be live.
    #[inline]
    pub(crate) fn epoch(&self) -> u64 {
        // Relaxed: see `retire`.
        self.epoch.load(Ordering::Relaxed)
    }

    pub(crate) fn memory_info(&self) -> MemoryInfo {
        MemoryInfo { free: self.arena.read().free_bytes(), total: self.memory.bytes() }
    }

    pub(crate) fn callers_blocks(&self) -> u64 {
        self.arena.read().callers_blocks()
    }

    /// Loses the device: it executes nothing any more.
    pub(crate) fn lose(&self) {
        self.lost.store(true, Ordering::Release);
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    pub(crate) fn check_not_lost(&self, operation: Operation) -> Result<()> {
        if self.is_lost() { Err(lost(operation, self.ordinal)) } else { Ok(()) }
    }

    fn offset(&self, ptr: DevicePtr) -> Option<u64> {
        ptr.get().checked_sub(self.memory.base()).filter(|&offset| offset < self.memory.bytes())
    }

    fn not_a_block(&self, operation: Operation, arena: &Arena, ptr: DevicePtr) -> Error {
        let inside = self.offset(ptr).and_then(|offset| {
            let (start, block) = arena.around(offset)?;
            (offset < start + block.bytes).then_some((start, block.owner))
        });
        let message = match inside {
            Some((_, Owner::Mock)) => format!("{ptr} is memory of the backend itself"),
            Some((_, Owner::Physical)) => format!("{ptr} is no address of a block"),
            Some((start, _)) => format!("{ptr} points into the block at {:#x}", self.memory.base() + start),
            None => format!("no block of device {} begins at {ptr}", self.ordinal),
        };
        operation
            .error(ErrorKind::InvalidPointer, message)
            .with_hint("free each block once, with the address and the device it was allocated with")
    }
}

#[cold]
pub(crate) fn lost(operation: Operation, device: u32) -> Error {
    operation
        .error(ErrorKind::DeviceLost, format!("device {device} was lost"))
        .with_hint("an operation panicked on the device's worker, or `lose_device` was called; open the mock again")
}
