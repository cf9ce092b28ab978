//! The ledger of every block that backends gave out: the one place that knows whether a pointer is the start of a block,
//! inside one, of which device, or nobody's.
//!
//! Vendors do not tell: HIP frees the whole block on an interior pointer and returns 0, and cuBLAS accepts a misaligned
//! workspace. So a block that is not in the ledger is refused before the vendor is called. The ledger is touched when
//! the vendor's allocator is, not on the pools' hit paths.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use crate::error::{Error, ErrorKind, Result};
use crate::memory::{DevicePtr, HostPtr};

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

#[derive(Debug, Default)]
pub(crate) struct Ledger {
    device: Mutex<BTreeMap<u64, DeviceBlockInfo>>,
    host: Mutex<BTreeMap<usize, usize>>,
}

impl Ledger {
    /// Takes in a block; refuses one that overlaps a live one, which a sane vendor never gives.
    pub(crate) fn insert_device(&self, block: DeviceBlockInfo) -> Result<()> {
        let mut blocks = self.device.lock();
        let start = block.base.get();
        let end = start.saturating_add(block.bytes as u64);
        if let Some((_, before)) = blocks.range(..end).next_back()
            && before.base.get().saturating_add(before.bytes as u64) > start
        {
            return Err(Error::new(
                ErrorKind::InvalidPointer,
                "allocate",
                format!("the backend gave out {block:?}, which overlaps the live {before:?}"),
            )
            .with_hint("the backend is at fault; run the conformance suite on it"));
        }
        blocks.insert(start, block);
        Ok(())
    }

    /// Strikes out the block that starts at `ptr` on `device`.
    pub(crate) fn remove_device(&self, device: u32, ptr: DevicePtr) -> Result<DeviceBlockInfo> {
        let mut blocks = self.device.lock();
        let problem = match blocks.get(&ptr.get()) {
            Some(block) if block.device == device => return blocks.remove(&ptr.get()).ok_or_else(|| unknown(ptr)),
            Some(block) => Error::new(
                ErrorKind::WrongDevice,
                "free",
                format!("{ptr:?} belongs to device {}, not to device {device}", block.device),
            ),
            None => match find(&blocks, ptr) {
                Some(block) => Error::new(
                    ErrorKind::InvalidPointer,
                    "free",
                    format!("{ptr:?} points {} bytes into {block:?}", ptr.get() - block.base.get()),
                )
                .with_hint("free the address that was allocated"),
                None => unknown(ptr),
            },
        };
        Err(problem)
    }

    /// The live block that `ptr` points into.
    pub(crate) fn find_device(&self, ptr: DevicePtr) -> Option<DeviceBlockInfo> {
        find(&self.device.lock(), ptr)
    }

    /// Takes in a block of page-locked memory.
    pub(crate) fn insert_host(&self, ptr: HostPtr, bytes: usize) {
        self.host.lock().insert(ptr.address(), bytes);
    }

    /// Strikes out a block of page-locked memory.
    pub(crate) fn remove_host(&self, ptr: HostPtr) -> Result<usize> {
        self.host.lock().remove(&ptr.address()).ok_or_else(|| {
            Error::new(ErrorKind::InvalidPointer, "host_free", format!("{ptr:?} is not the start of a live block"))
        })
    }
}

fn find(blocks: &BTreeMap<u64, DeviceBlockInfo>, ptr: DevicePtr) -> Option<DeviceBlockInfo> {
    let (_, block) = blocks.range(..=ptr.get()).next_back()?;
    (ptr.get() - block.base.get() < block.bytes as u64).then_some(*block)
}

fn unknown(ptr: DevicePtr) -> Error {
    Error::new(ErrorKind::InvalidPointer, "free", format!("{ptr:?} is in no live block"))
        .with_hint("it was freed before, or did not come from this runtime")
}

#[cfg(test)]
impl Ledger {
    pub(crate) fn hold_locks(&self) -> impl Drop + '_ {
        crate::testing::Held((self.device.lock(), self.host.lock()))
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

    #[test]
    fn host_blocks_are_known_by_their_start() {
        let ledger = Ledger::default();
        let mut bytes = [0_u8; 64];
        let ptr = HostPtr::new(std::ptr::NonNull::from(&mut bytes).cast());
        assert!(ledger.remove_host(ptr).is_err());
        ledger.insert_host(ptr, 64);
        assert_eq!(ledger.remove_host(ptr).unwrap(), 64);
    }
}
