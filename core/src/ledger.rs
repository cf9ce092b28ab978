//! The ledger of every block of device memory that backends allocated. It alone knows whether a pointer is the start of a live
//! block or inside one, and which device the block is on.
//!
//! Vendors do not check. HIP frees the whole block on an interior pointer and returns 0, and cuBLAS accepts a misaligned
//! workspace. So a block that is not in the ledger is refused before the vendor is called. The ledger is used together with the
//! vendor's allocator, not on the pools' hit paths.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use highwater_hal::{DevicePtr, Error, ErrorKind, HostPtr, Result, counted};

/// A block of device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceBlockInfo {
    /// Ordinal of the device.
    pub device: u32,
    /// First byte.
    pub base: DevicePtr,
    /// Size in bytes.
    pub bytes: usize,
}

impl DeviceBlockInfo {
    /// Returns the block in words, for messages.
    fn described(&self) -> String {
        format!("{} at {} of device {}", counted(self.bytes, "byte"), self.base, self.device)
    }
}

/// A block of page-locked memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostBlockInfo {
    /// First byte.
    pub base: HostPtr,
    /// Size of the whole block in bytes, which may be more than its buffer requested.
    pub bytes: usize,
}

/// The device memory of live buffers that have a block of their own: those of [`Device::allocate`](crate::Device::allocate) and
/// [`Device::allocate_shared`](crate::Device::allocate_shared). Buffers that streams allocate are parts of a pool:
/// [`Statistics::device_memory`](crate::Statistics::device_memory).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct BufferStatistics {
    /// Blocks that buffers own.
    pub blocks: u64,
    /// Bytes of those blocks.
    pub bytes: u64,
}

/// A block of device memory, and whether it has an owner.
#[derive(Debug, Clone, Copy)]
struct DeviceBlock {
    info: DeviceBlockInfo,
    /// True if a buffer owns the block. Then waiting for streams does not free it.
    owned: bool,
    /// True if a pool divides the block, and knows what lies in it.
    divided: bool,
    /// Number of mappings of another process's memory that the backend gave this one address. 0 for memory of this process.
    opens: u32,
}

/// Bytes by their use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Held {
    /// In blocks that buffers own.
    pub(crate) buffers: u64,
    /// In workspaces, and in blocks whose buffers were dropped.
    pub(crate) others: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Ledger {
    device: Mutex<BTreeMap<u64, DeviceBlock>>,
}

impl Ledger {
    /// Adds a block. Refuses one that overlaps a live block, which a correct backend never returns.
    pub(crate) fn insert_device(&self, block: DeviceBlockInfo) -> Result<()> {
        insert(&mut self.device.lock(), DeviceBlock { info: block, owned: false, divided: false, opens: 0 })
    }

    /// As [`Ledger::insert_device`], for a block that a buffer owns.
    pub(crate) fn insert_owned(&self, block: DeviceBlockInfo) -> Result<()> {
        insert(&mut self.device.lock(), DeviceBlock { info: block, owned: true, divided: false, opens: 0 })
    }

    /// Adds memory of another process that the backend has opened. A backend gives the address again when the same memory is
    /// opened again. Two tickets open the same memory if other code allocated both buffers in one block.
    pub(crate) fn insert_opened(&self, block: DeviceBlockInfo) -> Result<()> {
        // One lock for both: another thread may add the same memory.
        let mut blocks = self.device.lock();
        if let Some(there) = blocks.get_mut(&block.base.get())
            && there.info == block
            && there.opens > 0
        {
            there.opens += 1;
            return Ok(());
        }
        insert(&mut blocks, DeviceBlock { info: block, owned: false, divided: false, opens: 1 })
    }

    /// Removes memory of [`Ledger::insert_opened`] once.
    pub(crate) fn remove_opened(&self, device: u32, ptr: DevicePtr) -> Result<DeviceBlockInfo> {
        // One lock for both: another thread may remove the same memory.
        let mut blocks = self.device.lock();
        if let Some(there) = blocks.get_mut(&ptr.get())
            && there.info.device == device
            && there.opens > 1
        {
            there.opens -= 1;
            return Ok(there.info);
        }
        remove(&mut blocks, device, ptr)
    }

    /// As [`Ledger::insert_device`], for a block that a pool divides.
    pub(crate) fn insert_divided(&self, block: DeviceBlockInfo) -> Result<()> {
        insert(&mut self.device.lock(), DeviceBlock { info: block, owned: false, divided: true, opens: 0 })
    }

    /// Records that the buffer that owns a block is gone.
    pub(crate) fn set_dropped(&self, ptr: DevicePtr) {
        if let Some(block) = self.device.lock().get_mut(&ptr.get()) {
            block.owned = false;
        }
    }

    /// Returns the bytes of the blocks on `device` that no pool divides.
    pub(crate) fn held_bytes(&self, device: u32) -> Held {
        let blocks = self.device.lock();
        let of = |owned: bool| sum_of(&blocks, |block| block.info.device == device && block.owned == owned).bytes;
        Held { buffers: of(true), others: of(false) }
    }

    /// Returns the blocks on `device` that buffers own.
    pub(crate) fn buffers(&self, device: u32) -> BufferStatistics {
        sum_of(&self.device.lock(), |block| block.info.device == device && block.owned)
    }

    /// Returns the blocks that buffers own, on all devices.
    pub(crate) fn all_buffers(&self) -> BufferStatistics {
        sum_of(&self.device.lock(), |block| block.owned)
    }

    /// Removes the block that starts at `ptr` on `device`.
    pub(crate) fn remove_device(&self, device: u32, ptr: DevicePtr) -> Result<DeviceBlockInfo> {
        remove(&mut self.device.lock(), device, ptr)
    }

    /// Returns the live block that contains `ptr`.
    pub(crate) fn find_device(&self, ptr: DevicePtr) -> Option<DeviceBlockInfo> {
        find(&self.device.lock(), ptr)
    }
}

/// Adds a block. Refuses one that overlaps a live block.
fn insert(blocks: &mut BTreeMap<u64, DeviceBlock>, block: DeviceBlock) -> Result<()> {
    let info = block.info;
    let start = info.base.get();
    let Some(end) = start.checked_add(info.bytes as u64) else {
        let message = format!("the backend allocated {}, which ends after the last address", info.described());
        return Err(Error::new(ErrorKind::InvalidPointer, "allocate", message)
            .with_hint("the backend is at fault; run the conformance suite on it"));
    };
    let overlaps = |before: &DeviceBlockInfo| before.base.get() + before.bytes as u64 > start;
    // A block without bytes overlaps none, but would take the entry of another one.
    let there = blocks.get(&start).or_else(|| {
        let (_, before) = blocks.range(..end).next_back()?;
        overlaps(&before.info).then_some(before)
    });
    if let Some(DeviceBlock { info: before, .. }) = there {
        return Err(Error::new(
            ErrorKind::InvalidPointer,
            "allocate",
            format!(
                "the backend allocated {}, which overlaps the live memory of {}",
                info.described(),
                before.described()
            ),
        )
        .with_hint("the backend is at fault; run the conformance suite on it"));
    }
    blocks.insert(start, block);
    Ok(())
}

fn remove(blocks: &mut BTreeMap<u64, DeviceBlock>, device: u32, ptr: DevicePtr) -> Result<DeviceBlockInfo> {
    let problem = match blocks.get(&ptr.get()) {
        Some(block) if block.info.device == device => {
            return blocks.remove(&ptr.get()).map(|block| block.info).ok_or_else(|| unknown(ptr));
        }
        Some(DeviceBlock { info: block, .. }) => Error::new(
            ErrorKind::WrongDevice,
            "free",
            format!("{ptr} belongs to device {}, not to device {device}", block.device),
        ),
        None => match find(blocks, ptr) {
            Some(block) => Error::new(
                ErrorKind::InvalidPointer,
                "free",
                format!(
                    "{ptr} points {} into the memory of {}",
                    counted(ptr.get() - block.base.get(), "byte"),
                    block.described()
                ),
            )
            .with_hint("free the address that was allocated"),
            None => unknown(ptr),
        },
    };
    Err(problem)
}

/// Sums those blocks that no pool divides.
fn sum_of(blocks: &BTreeMap<u64, DeviceBlock>, is_counted: impl Fn(&DeviceBlock) -> bool) -> BufferStatistics {
    let mut sum = BufferStatistics::default();
    for block in blocks.values() {
        if !block.divided && is_counted(block) {
            sum.blocks += 1;
            sum.bytes += block.info.bytes as u64;
        }
    }
    sum
}

fn find(blocks: &BTreeMap<u64, DeviceBlock>, ptr: DevicePtr) -> Option<DeviceBlockInfo> {
    let (_, DeviceBlock { info: block, divided, .. }) = blocks.range(..=ptr.get()).next_back()?;
    (!divided && ptr.get() - block.base.get() < block.bytes as u64).then_some(*block)
}

fn unknown(ptr: DevicePtr) -> Error {
    Error::new(ErrorKind::InvalidPointer, "free", format!("{ptr} is in no live block"))
        .with_hint("it was freed before, or did not come from this runtime")
}

#[cfg(test)]
impl Ledger {
    pub(crate) fn hold_locks(&self) -> impl Drop + '_ {
        crate::testing::Held(self.device.lock())
    }

    /// Returns whether a lock is held, including those of the blocks' uses.
    pub(crate) fn is_locked(&self) -> bool {
        self.device.is_locked()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(device: u32, base: u64, bytes: usize) -> DeviceBlockInfo {
        DeviceBlockInfo { device, base: DevicePtr::new(base), bytes }
    }

    #[test]
    fn freed_interior_and_wrong_device_pointers_are_refused() {
        let ledger = Ledger::default();
        ledger.insert_device(block(0, 0x1000, 0x100)).unwrap();
        let kind = |device, ptr| ledger.remove_device(device, DevicePtr::new(ptr)).unwrap_err().kind();
        assert_eq!(kind(0, 0x1080), ErrorKind::InvalidPointer);
        assert_eq!(kind(1, 0x1000), ErrorKind::WrongDevice);
        assert_eq!(kind(0, 0x1100), ErrorKind::InvalidPointer);
        assert_eq!(ledger.find_device(DevicePtr::new(0x10ff)), Some(block(0, 0x1000, 0x100)));
        assert_eq!(ledger.find_device(DevicePtr::new(0x1100)), None);
        ledger.remove_device(0, DevicePtr::new(0x1000)).unwrap();
        assert_eq!(kind(0, 0x1000), ErrorKind::InvalidPointer);
    }

    // The first was found by `scripts/fuzz.sh`, the others by the reading after it.
    #[test]
    fn a_backend_that_gives_an_address_of_a_live_block_again_is_caught() {
        let ledger = Ledger::default();
        let local = block(0, 0x1000, 0x100);
        ledger.insert_owned(local).unwrap();
        assert!(ledger.insert_opened(local).is_err(), "memory of this process was counted as an import");
        assert!(ledger.insert_device(block(0, 0x1000, 0)).is_err(), "a block without bytes took the place of another");
        ledger.insert_device(block(0, 0x2000, 0)).unwrap();
        assert!(ledger.insert_device(block(0, 0x2000, 0x10)).is_err(), "a block took the place of one without bytes");
        assert!(ledger.insert_device(block(0, u64::MAX - 1, 2)).is_err(), "a block ends after the last address");
        assert_eq!(ledger.held_bytes(0), Held { buffers: 0x100, others: 0 });
        // The same memory of another process, opened twice.
        let opened = block(0, 0x3000, 0x10);
        ledger.insert_opened(opened).unwrap();
        ledger.insert_opened(opened).unwrap();
        for _ in 0..2 {
            assert_eq!(ledger.remove_opened(0, opened.base).unwrap(), opened);
        }
        assert!(ledger.remove_opened(0, opened.base).is_err());
    }

    // Seen on an H200 on 2026-11-28: 1,000 tensors of PyTorch in 500 segments, opened by several threads at once.
    #[test]
    fn threads_that_open_the_same_memory_at_once_count_each_open() {
        let ledger = Ledger::default();
        let opened = block(0, 0x3000, 0x10);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..5_000 {
                        ledger.insert_opened(opened).unwrap();
                        assert_eq!(ledger.remove_opened(0, opened.base).unwrap(), opened);
                    }
                });
            }
        });
        assert_eq!(ledger.find_device(opened.base), None, "the ledger still counts an open that was closed");
    }

    #[test]
    fn bytes_that_buffers_own_are_counted_until_the_buffer_is_gone() {
        let ledger = Ledger::default();
        ledger.insert_owned(block(0, 0x1000, 0x100)).unwrap();
        ledger.insert_owned(block(0, 0x2000, 0x10)).unwrap();
        ledger.insert_owned(block(1, 0x3000, 0x1)).unwrap();
        ledger.insert_device(block(0, 0x4000, 0x1000)).unwrap();
        assert_eq!(ledger.held_bytes(0), Held { buffers: 0x110, others: 0x1000 });
        assert_eq!(ledger.held_bytes(1), Held { buffers: 1, others: 0 });
        assert_eq!(ledger.buffers(0), BufferStatistics { blocks: 2, bytes: 0x110 });
        assert_eq!(ledger.all_buffers(), BufferStatistics { blocks: 3, bytes: 0x111 });
        ledger.set_dropped(DevicePtr::new(0x1000));
        assert_eq!(ledger.held_bytes(0), Held { buffers: 0x10, others: 0x1100 });
        ledger.remove_device(0, DevicePtr::new(0x2000)).unwrap();
        assert_eq!(ledger.held_bytes(0).buffers, 0);
    }

    #[test]
    fn a_backend_that_gives_out_overlapping_blocks_is_caught() {
        let ledger = Ledger::default();
        ledger.insert_device(block(0, 0x1000, 0x100)).unwrap();
        assert!(ledger.insert_device(block(0, 0x1000, 0x10)).is_err());
        assert!(ledger.insert_device(block(0, 0x10f0, 0x100)).is_err());
        assert!(ledger.insert_device(block(0, 0xf80, 0x100)).is_err());
        ledger.insert_device(block(0, 0x1100, 0x100)).unwrap();
        ledger.insert_device(block(0, 0xf00, 0x100)).unwrap();
    }
}
