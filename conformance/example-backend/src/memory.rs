//! Memory of the CPU, as device memory and as page-locked memory: blocks that are found by their addresses.
//!
//! Unordered streams may meet in device memory. The bytes are then unspecified, but the program must remain sound, so bytes are
//! atomic. Work owns the blocks that it uses.

use std::alloc::{self, Layout};
use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use highwater_hal::{DevicePtr, Error, ErrorKind, HostAllocator, HostMemoryKind, HostOptions, HostPtr, Result};
use parking_lot::Mutex;

use crate::backend::check_device;

/// The larger alignment of the clauses `memory.aligned` and `host.aligned`.
pub(crate) const ALIGNMENT: usize = 256;

/// Bytes of a block.
#[derive(Debug, Clone)]
pub(crate) struct Span {
    block: Arc<Box<[AtomicU8]>>,
    range: Range<usize>,
}

impl Span {
    fn bytes(&self) -> &[AtomicU8] {
        &self.block[self.range.clone()]
    }

    pub(crate) fn read<const N: usize>(&self, at: usize) -> [u8; N] {
        let bytes = &self.bytes()[at..at + N];
        std::array::from_fn(|place| bytes[place].load(Ordering::Relaxed))
    }

    pub(crate) fn write(&self, at: usize, element: &[u8]) {
        let bytes = &self.bytes()[at..at + element.len()];
        bytes.iter().zip(element).for_each(|(byte, value)| byte.store(*value, Ordering::Relaxed));
    }

    /// Fills the bytes with an element.
    pub(crate) fn fill(&self, element: &[u8]) {
        (0..self.range.len()).step_by(element.len()).for_each(|at| self.write(at, element));
    }

    pub(crate) fn copy_from(&self, source: &Self) {
        let pairs = self.bytes().iter().zip(source.bytes());
        pairs.for_each(|(to, from)| to.store(from.load(Ordering::Relaxed), Ordering::Relaxed));
    }
}

/// The living blocks of a kind.
#[derive(Debug)]
pub(crate) struct Blocks {
    most_bytes: usize,
    alive: Mutex<BTreeMap<usize, Span>>,
}

impl Blocks {
    pub(crate) fn new(most_bytes: usize) -> Self {
        Self { most_bytes, alive: Mutex::default() }
    }

    /// Returns the number of blocks, and their bytes.
    pub(crate) fn usage(&self) -> (usize, usize) {
        let alive = self.alive.lock();
        (alive.len(), used(&alive))
    }

    /// Allocates a zeroed block. Page-locked memory must be initialized, because the program makes slices of it.
    pub(crate) fn add(&self, bytes: usize) -> Result<NonNull<u8>> {
        if bytes == 0 {
            return Err(Error::new(ErrorKind::InvalidArgument, "allocate", "0 bytes; expected is 1 or more"));
        }
        let exhausted = || Error::new(ErrorKind::OutOfMemory, "allocate", format!("there are no {bytes} bytes left"));
        let mut alive = self.alive.lock();
        if bytes > self.most_bytes - used(&alive) {
            return Err(exhausted());
        }
        let block = zeros(bytes.saturating_add(ALIGNMENT)).ok_or_else(exhausted)?;
        let offset = block.as_ptr().align_offset(ALIGNMENT);
        let start = NonNull::from(&block[offset..]).cast::<u8>();
        alive.insert(start.addr().get(), Span { block: Arc::new(block), range: offset..offset + bytes });
        Ok(start)
    }

    pub(crate) fn remove(&self, address: usize) -> Result<()> {
        let removed = self.alive.lock().remove(&address).map(drop);
        removed.ok_or_else(|| Error::new(ErrorKind::InvalidPointer, "free", format!("no block begins at {address:#x}")))
    }

    /// Returns the range of `bytes` bytes at the address, which lies inside one block.
    pub(crate) fn find(&self, operation: &'static str, address: usize, bytes: usize) -> Result<Span> {
        let alive = self.alive.lock();
        let inside = alive.range(..=address).next_back().and_then(|(start, block)| {
            let start = block.range.start.checked_add(address - start)?;
            let end = start.checked_add(bytes).filter(|&end| end <= block.range.end)?;
            Some(Span { block: Arc::clone(&block.block), range: start..end })
        });
        inside.ok_or_else(|| {
            let message = format!("no block has the {bytes} bytes at {address:#x}");
            Error::new(ErrorKind::InvalidPointer, operation, message)
                .with_hint("pass memory of this backend, not freed")
        })
    }
}

/// Returns that many zeros; `None` if the system refuses. The system provides each page at its first use.
fn zeros(bytes: usize) -> Option<Box<[AtomicU8]>> {
    let layout = Layout::array::<AtomicU8>(bytes).ok().filter(|layout| layout.size() > 0)?;
    // SAFETY: the layout has a size.
    let start = NonNull::new(unsafe { alloc::alloc_zeroed(layout) })?.cast::<AtomicU8>();
    // SAFETY: the global allocator returned the bytes for the layout of such a slice, and zeros are valid.
    Some(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(start.as_ptr(), bytes)) })
}

/// Returns the bytes of all blocks.
fn used(alive: &BTreeMap<usize, Span>) -> usize {
    alive.values().map(|block| block.range.len()).sum()
}

// SAFETY: a block is as large as asked for, initialized, aligned, apart from the others, and stays until `free`.
unsafe impl HostAllocator for Blocks {
    fn allocate(&self, bytes: usize, options: &HostOptions) -> Result<HostPtr> {
        if options.kind != HostMemoryKind::Default {
            return Err(Error::lacks("allocate", "write_combined"));
        }
        self.add(bytes).map(HostPtr::new)
    }

    unsafe fn free(&self, ptr: HostPtr) -> Result<()> {
        self.remove(ptr.address())
    }

    fn device_address(&self, ptr: HostPtr, device: u32) -> Result<DevicePtr> {
        check_device("device_address", device)?;
        Ok(DevicePtr::new(ptr.address() as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_fill_the_memory_to_its_last_byte() {
        let blocks = Blocks::new(1000);
        let kind = |bytes| blocks.add(bytes).unwrap_err().kind();
        let first = blocks.add(600).unwrap();
        assert_eq!(
            (kind(401), kind(1001), kind(0)),
            (ErrorKind::OutOfMemory, ErrorKind::OutOfMemory, ErrorKind::InvalidArgument)
        );
        let second = blocks.add(400).unwrap();
        assert_eq!((blocks.usage(), kind(1)), ((2, 1000), ErrorKind::OutOfMemory));
        blocks.remove(first.addr().get()).unwrap();
        assert_eq!(kind(601), ErrorKind::OutOfMemory);
        let third = blocks.add(600).unwrap();
        for block in [second, third] {
            blocks.remove(block.addr().get()).unwrap();
        }
        assert_eq!(blocks.usage(), (0, 0));
        assert!(blocks.add(1000).is_ok());
    }
}
