//! Page-locked host memory, emulated by anonymous mappings and a table of what is locked.
//!
//! Nothing is really locked. The table makes copies as strict as on the strictest hardware: a range outside of the
//! table, or across two entries of it, is an error. Registered memory counts against the limit as allocated memory
//! does.
//!
//! An allocation takes the address of the block of its size that was freed last, unless the system has placed something
//! else there. So a late use of the freed block meets the new one.

use std::collections::{BTreeMap, VecDeque};
use std::ptr::NonNull;
use std::sync::Arc;

use highwater_hal::{
    Capabilities, DevicePtr, Error, ErrorKind, HostAllocator, HostMemoryKind, HostOptions, HostPtr, Result,
};
use parking_lot::RwLock;
use rustix::mm::{MapFlags, ProtFlags};

use crate::calls::Calls;
use crate::device_memory::POISON;
use crate::observer::{Observers, Range, Space, Store, Touch, UseObserver};
use crate::operation::Operation;
use highwater_hal::exit;

/// The freed blocks, and their bytes, that test mode keeps poisoned.
const KEPT_BLOCKS: usize = 64;
const KEPT_BYTES: usize = 64 << 20;

/// The addresses of freed blocks that are kept for the next blocks of their size.
const MOST_ADDRESSES: usize = 256;

/// The distance between the host's and the device's address, if the two differ.
const DEVICE_WINDOW: u64 = 1 << 62;

#[derive(Debug)]
struct Block {
    ptr: HostPtr,
    bytes: usize,
    registered: bool,
}

#[derive(Debug, Default)]
struct Table {
    /// By address. No two entries overlap.
    blocks: BTreeMap<usize, Block>,
    locked_bytes: u64,
    /// In test mode, the freed blocks that are still mapped, the oldest first.
    freed: VecDeque<(HostPtr, usize)>,
    /// Address and size of unmapped blocks, the latest last.
    unmapped: VecDeque<(usize, usize)>,
}

impl Table {
    fn around(&self, address: usize) -> Option<(usize, &Block)> {
        self.blocks.range(..=address).next_back().map(|(&start, block)| (start, block))
    }

    fn contains(&self, address: usize, bytes: usize) -> bool {
        self.around(address)
            .is_some_and(|(start, block)| address.checked_add(bytes).is_some_and(|end| end <= start + block.bytes))
    }

    /// Returns the address of the latest unmapped block of that size, or 0.
    fn address_of_last(&mut self, bytes: usize) -> usize {
        let found = self.unmapped.iter().rposition(|&(_, size)| size == bytes);
        found.and_then(|index| self.unmapped.remove(index)).map_or(0, |(address, _)| address)
    }

    fn note_unmapped(&mut self, address: usize, bytes: usize) {
        if self.unmapped.len() == MOST_ADDRESSES {
            self.unmapped.pop_front();
        }
        self.unmapped.push_back((address, bytes));
    }
}

#[derive(Debug)]
pub(crate) struct MockHost {
    calls: Arc<Calls>,
    capabilities: Capabilities,
    devices: u32,
    limit_bytes: u64,
    table: RwLock<Table>,
    /// Whether freed memory is filled with [`POISON`], and stays mapped for a while.
    poisons: bool,
    observers: Observers,
}

impl MockHost {
    pub(crate) fn new(
        calls: Arc<Calls>,
        capabilities: Capabilities,
        devices: u32,
        limit_bytes: u64,
        poisons: bool,
        observers: Observers,
    ) -> Self {
        Self { calls, capabilities, devices, limit_bytes, table: RwLock::new(Table::default()), poisons, observers }
    }

    /// Tells the order observer that memory is handed out.
    fn note_new(&self, ptr: HostPtr, bytes: usize) {
        if let Some(order) = &self.observers.order {
            order.forget(Store::Host, ptr.address() as u64, bytes as u64);
        }
    }

    /// Tells the order observer that memory is given back.
    fn note_free(&self, operation: Operation, ptr: HostPtr, bytes: usize) {
        if let Some(order) = &self.observers.order {
            order.freed(operation, Touch::whole(Store::Host, ptr.address() as u64, range_of(ptr, bytes)));
        }
    }

    /// Tells the use observer that memory changes hands.
    fn change_hands(&self, operation: Operation, how: &str, ptr: HostPtr, bytes: usize) {
        if let Some(uses) = &self.observers.uses {
            uses.changed_hands(u64::MAX, operation, how, range_of(ptr, bytes));
        }
    }

    /// Poisons a freed block and keeps it mapped for a while. A program that reads it too late finds the poison, and
    /// device work that comes too late finds memory. Unmaps the oldest blocks that no work uses.
    ///
    /// # Safety
    /// The block must be a mapping of `allocate` that is no longer in the table.
    unsafe fn keep_poisoned(&self, ptr: HostPtr, bytes: usize) {
        for offset in (0..bytes).step_by(size_of::<u32>()) {
            let part = (bytes - offset).min(size_of::<u32>());
            // SAFETY: the part lies inside the mapping, whose owner has given it up.
            unsafe { std::ptr::copy_nonoverlapping(POISON.to_ne_bytes().as_ptr(), ptr.as_ptr().add(offset), part) };
        }
        let mut unneeded = Vec::new();
        let mut table = self.table.write();
        table.freed.push_back((ptr, bytes));
        let mut kept_bytes: usize = table.freed.iter().map(|block| block.1).sum();
        let mut excess = table.freed.len().saturating_sub(KEPT_BLOCKS);
        table.freed.retain(|&(ptr, bytes)| {
            let is_in_use = |uses: &Arc<dyn UseObserver>| uses.is_in_use(range_of(ptr, bytes));
            let keep = (excess == 0 && kept_bytes <= KEPT_BYTES) || self.observers.uses.as_ref().is_some_and(is_in_use);
            if !keep {
                excess = excess.saturating_sub(1);
                kept_bytes -= bytes;
                unneeded.push((ptr, bytes));
            }
            keep
        });
        drop(table);
        for (ptr, bytes) in unneeded {
            // SAFETY: the mapping was made by `allocate` with this length, was freed, and no work uses it.
            unsafe { unmap(ptr.as_ptr(), bytes) };
        }
    }

    /// Checks that a range lies inside one page-locked block. A range that begins in a registration and reaches out of
    /// it is an invalid argument, as with the vendors, even if another registration follows without a gap.
    pub(crate) fn range(&self, operation: Operation, what: &str, ptr: HostPtr, bytes: usize) -> Result<()> {
        let table = self.table.read();
        if table.contains(ptr.address(), bytes) {
            return Ok(());
        }
        if let Some((start, block)) = table.around(ptr.address())
            && block.registered
            && ptr.address() - start < block.bytes
        {
            return Err(operation
                .error(
                    ErrorKind::InvalidArgument,
                    format!("{what}: {bytes} bytes at {ptr} reach out of the {} registered at {start:#x}", block.bytes),
                )
                .with_hint("split copies at the borders between registrations"));
        }
        drop(table);
        Err(operation
            .error(
                ErrorKind::InvalidPointer,
                format!("{what}: {bytes} bytes at {ptr} are not inside one block of page-locked memory"),
            )
            .with_hint("copy from and to memory that the host allocator allocated or registered, one block at a time"))
    }

    /// Returns how many blocks are page-locked.
    pub(crate) fn blocks(&self) -> u64 {
        self.table.read().blocks.len() as u64
    }

    fn check_kind(&self, operation: Operation, options: &HostOptions) -> Result<()> {
        match options.kind {
            HostMemoryKind::Default => Ok(()),
            HostMemoryKind::WriteCombined if self.capabilities.write_combined => Ok(()),
            HostMemoryKind::WriteCombined => Err(operation.lacks("write_combined")),
            other => Err(operation
                .error(ErrorKind::Unsupported, format!("the mock does not support the kind of memory {other:?}"))),
        }
    }
}

pub(crate) fn range_of(ptr: HostPtr, bytes: usize) -> Range {
    Range { space: Space::Host, address: ptr.address() as u64, bytes: bytes as u64 }
}

fn no_bytes(operation: Operation) -> Error {
    operation.error(ErrorKind::InvalidArgument, "0 bytes were asked for, expected at least 1")
}

fn exhausted(operation: Operation, bytes: usize, locked: u64, limit: u64) -> Error {
    let free = limit - locked;
    operation
        .error(ErrorKind::OutOfMemory, format!("{bytes} bytes were asked for, {free} of {limit} are free"))
        .with_hint("free page-locked memory, or open the mock with more host memory")
}

// SAFETY: each block is an anonymous mapping of its own, zeroed, page-aligned, and at least as large as requested. Only
// `free` unmaps it, or the end of the allocator.
unsafe impl HostAllocator for MockHost {
    fn allocate(&self, bytes: usize, options: &HostOptions) -> Result<HostPtr> {
        let operation = self.calls.enter(Operation::HostAllocate)?;
        self.check_kind(operation, options)?;
        if bytes == 0 {
            return Err(no_bytes(operation));
        }
        let mut table = self.table.write();
        let locked = table.locked_bytes;
        let exhausted = || exhausted(operation, bytes, locked, self.limit_bytes);
        if bytes as u64 > self.limit_bytes - locked {
            return Err(exhausted());
        }
        let wanted = table.address_of_last(bytes);
        // SAFETY: a new private mapping. The kernel places it at the wanted address only if nothing lies there.
        let address = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::without_provenance_mut(wanted),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        };
        let address = address.ok().and_then(|address| NonNull::new(address.cast::<u8>()));
        let ptr = HostPtr::new(address.ok_or_else(exhausted)?);
        table.locked_bytes += bytes as u64;
        table.blocks.insert(ptr.address(), Block { ptr, bytes, registered: false });
        drop(table);
        self.change_hands(operation, "were handed out", ptr, bytes);
        self.note_new(ptr, bytes);
        Ok(ptr)
    }

    unsafe fn free(&self, ptr: HostPtr) -> Result<()> {
        let operation = self.calls.enter(Operation::HostFree)?;
        let mut table = self.table.write();
        let bytes = match table.blocks.get(&ptr.address()) {
            Some(Block { bytes, registered: false, .. }) => *bytes,
            other => {
                let what = if other.is_some() { "was registered, not allocated" } else { "is no allocated block" };
                return Err(operation
                    .error(ErrorKind::InvalidPointer, format!("{ptr} {what}"))
                    .with_hint("free each block once, with the address that `allocate` returned"));
            }
        };
        table.blocks.remove(&ptr.address());
        table.locked_bytes -= bytes as u64;
        // Unmapping a large block takes long. The system does not hand the address out before it is done.
        drop(table);
        self.change_hands(operation, "were freed", ptr, bytes);
        self.note_free(operation, ptr, bytes);
        if self.poisons {
            // SAFETY: the block was just taken out of the table.
            unsafe { self.keep_poisoned(ptr, bytes) };
            return Ok(());
        }
        // SAFETY: `allocate` made the mapping with this length. The caller promises that nobody uses it any more.
        unsafe { unmap(ptr.as_ptr(), bytes) };
        self.table.write().note_unmapped(ptr.address(), bytes);
        Ok(())
    }

    unsafe fn register(&self, ptr: HostPtr, bytes: usize, options: &HostOptions) -> Result<()> {
        let operation = self.calls.enter(Operation::HostRegister)?;
        if !self.capabilities.host_register {
            return Err(operation.lacks("host_register"));
        }
        if options.read_only && !self.capabilities.host_register_read_only {
            return Err(operation.lacks("host_register_read_only"));
        }
        self.check_kind(operation, options)?;
        if bytes == 0 {
            return Err(no_bytes(operation));
        }
        let invalid = |message: String| Err(operation.error(ErrorKind::InvalidArgument, message));
        let Some(end) = ptr.address().checked_add(bytes) else {
            return invalid(format!("{bytes} bytes at {ptr} reach past the address space"));
        };
        let mut table = self.table.write();
        // Only the last block that begins before the end can reach into the range.
        if let Some((start, block)) = table.around(end - 1)
            && start + block.bytes > ptr.address()
        {
            return invalid(format!(
                "{bytes} bytes at {ptr} overlap the {} page-locked bytes at {start:#x}",
                block.bytes
            ));
        }
        if bytes as u64 > self.limit_bytes - table.locked_bytes {
            return Err(exhausted(operation, bytes, table.locked_bytes, self.limit_bytes));
        }
        table.locked_bytes += bytes as u64;
        table.blocks.insert(ptr.address(), Block { ptr, bytes, registered: true });
        drop(table);
        self.note_new(ptr, bytes);
        Ok(())
    }

    unsafe fn unregister(&self, ptr: HostPtr) -> Result<()> {
        let operation = self.calls.enter(Operation::HostUnregister)?;
        if !self.capabilities.host_register {
            return Err(operation.lacks("host_register"));
        }
        let mut table = self.table.write();
        if let Some(&Block { bytes, registered: true, .. }) = table.blocks.get(&ptr.address()) {
            table.blocks.remove(&ptr.address());
            table.locked_bytes -= bytes as u64;
            drop(table);
            self.change_hands(operation, "were unregistered", ptr, bytes);
            self.note_free(operation, ptr, bytes);
            return Ok(());
        }
        Err(operation
            .error(ErrorKind::InvalidPointer, format!("{ptr} was not registered"))
            .with_hint("unregister each range once, with the address it was registered with"))
    }

    fn device_address(&self, ptr: HostPtr, device: u32) -> Result<DevicePtr> {
        let operation = self.calls.enter(Operation::HostDeviceAddress)?;
        if device >= self.devices {
            return Err(operation.error(
                ErrorKind::InvalidArgument,
                format!("device {device} was asked for, there are {}", self.devices),
            ));
        }
        self.range(operation, "address", ptr, 1)?;
        let window = if self.capabilities.host_address_is_device_address { 0 } else { DEVICE_WINDOW };
        Ok(DevicePtr::new(ptr.address() as u64 + window))
    }
}

impl Drop for MockHost {
    /// Unmaps the blocks that were never freed. Without the allocator, nobody can free them.
    fn drop(&mut self) {
        if !self.calls.is_own_process() || exit::has_begun() {
            return;
        }
        let table = self.table.get_mut();
        let never_freed = table.blocks.values().filter(|block| !block.registered).map(|block| (block.ptr, block.bytes));
        for (ptr, bytes) in never_freed.chain(table.freed.iter().copied()) {
            // SAFETY: `allocate` made the mapping with this length, and no other code unmaps it. The backend, whose
            // workers used it, holds the allocator and has ended.
            unsafe { unmap(ptr.as_ptr(), bytes) };
        }
    }
}

/// # Safety
/// The range must be a mapping of `allocate` that nobody uses any more.
unsafe fn unmap(address: *mut u8, bytes: usize) {
    // SAFETY: as promised by the caller.
    if let Err(error) = unsafe { rustix::mm::munmap(address.cast(), bytes) } {
        tracing::warn!(%error, bytes, "cannot unmap emulated page-locked memory");
    }
}
