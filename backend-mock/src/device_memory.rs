//! The memory that a device can reach: its own sealed memory file, the memory of other processes that is open, and memory
//! that is mapped at reserved addresses.
//!
//! A block that other processes may map has a file of its own, which lies over its part of the device's file. The free unmaps
//! this file. So a process that has the block open keeps its bytes, and the next block at the address has other bytes.
//!
//! Offsets count from the start of the device's own memory. Opened memory lies far behind it, at offsets that no
//! device's own memory has, and each access looks it up in a table. Work on memory that was closed too early panics,
//! and the device is lost, as on hardware.
//!
//! The file has no name in any file system, cannot change its size, and ends with the last process that maps it. Only
//! pages that were touched take physical memory, and large freed blocks give theirs back.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use highwater_hal::Result;
use parking_lot::RwLock;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use crate::imports::Imports;
use crate::mapping::Mapping;
use crate::sealed_file::{self, FileId};

/// The smallest freed block that gives its pages back.
const GIVE_BACK_FROM: u64 = 64 * 1024;
/// The words that a copy from device to device carries at a time.
const CARRY_WORDS: usize = 512;

/// The pattern that fills freed memory in test mode, in the machine's byte order. As 32 bits it is a NaN, and two of them
/// are a NaN of 64 bits.
pub const POISON: u32 = 0x7ffc_dead;

/// The file of a block, or of physical memory, that other processes may map. The pages end with the last process that has
/// them open.
#[derive(Debug)]
pub(crate) struct BlockFile {
    pub(crate) file: OwnedFd,
    pub(crate) id: FileId,
    pub(crate) bytes: u64,
}

impl BlockFile {
    /// Creates a file of `bytes` zeros, a multiple of the page size.
    pub(crate) fn new(bytes: u64) -> Result<Self, Errno> {
        let file = sealed_file::create("highwater-mock-block", bytes)?;
        let id = sealed_file::identify(&file)?;
        Ok(Self { file, id, bytes })
    }
}

#[derive(Debug)]
pub(crate) struct DeviceMemory {
    own: Mapping,
    file: OwnedFd,
    id: FileId,
    /// The files that lie over parts of `own`, by offset.
    files: RwLock<BTreeMap<u64, Arc<BlockFile>>>,
    pub(crate) imports: RwLock<Imports>,
}

impl DeviceMemory {
    /// Maps `bytes` (a multiple of 4096) of zeros, for the device with this ordinal.
    pub(crate) fn new(ordinal: u32, bytes: u64) -> Result<Self> {
        let failed = |what: &str, error: Errno| {
            sealed_file::not_made("open", &format!("{what} the {bytes} bytes of a simulated device"), error)
        };
        let file = sealed_file::create("highwater-mock", bytes)
            .map_err(|error| failed("cannot create a sealed memory file for", error))?;
        let id = sealed_file::identify(&file).map_err(|error| failed("cannot identify the memory file of", error))?;
        // SAFETY: the file was just made with this size and sealed.
        let own = unsafe { Mapping::new(&file, 0, bytes) }.map_err(|error| failed("cannot map", error))?;
        Ok(Self { own, file, id, files: RwLock::default(), imports: RwLock::new(Imports::new(ordinal)) })
    }

    /// Returns the device address of the first byte.
    pub(crate) fn base(&self) -> u64 {
        self.own.address()
    }

    /// Returns how many bytes of its own the device has.
    pub(crate) fn bytes(&self) -> u64 {
        self.own.bytes()
    }

    /// Returns the file that holds the device's own bytes.
    pub(crate) fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// Returns the identity of that file.
    pub(crate) fn id(&self) -> FileId {
        self.id
    }

    /// Lays a new file over `bytes` bytes at `offset`, both multiples of the page size, until [`DeviceMemory::end_file`].
    pub(crate) fn begin_file(&self, offset: u64, bytes: u64) -> Result<(), Errno> {
        let block = BlockFile::new(bytes)?;
        // SAFETY: the file was just made with this size and sealed.
        unsafe { self.own.replace(offset, &block.file, 0, bytes) }?;
        self.files.write().insert(offset, Arc::new(block));
        Ok(())
    }

    /// Unmaps the file at `offset`, and maps the device's own bytes there. Returns `None` if no file lies there.
    pub(crate) fn end_file(&self, offset: u64) -> Result<Option<Arc<BlockFile>>, Errno> {
        let Some(block) = self.files.write().remove(&offset) else { return Ok(None) };
        // SAFETY: the device's own file is sealed, and as long as the mapping.
        match unsafe { self.own.replace(offset, &self.file, offset, block.bytes) } {
            Ok(()) => Ok(Some(block)),
            Err(error) => {
                self.files.write().insert(offset, block);
                Err(error)
            }
        }
    }

    /// Returns the file of the block at `offset`.
    pub(crate) fn block_file(&self, offset: u64) -> Option<Arc<BlockFile>> {
        self.files.read().get(&offset).map(Arc::clone)
    }

    /// Returns the place of one of the device's own bytes: the inode of the file, the offset in it, and the number of bytes
    /// that follow in one piece.
    pub(crate) fn source(&self, offset: u64) -> (u64, u64, u64) {
        let files = self.files.read();
        if let Some((start, block)) = files.range(..=offset).next_back()
            && offset - start < block.bytes
        {
            return (block.id.inode, offset - start, block.bytes - (offset - start));
        }
        let end = files.range(offset..).next().map_or(self.own.bytes(), |(&start, _)| start);
        (self.id.inode, offset, end - offset)
    }

    /// Returns whether a file of this device has this inode.
    pub(crate) fn has_file(&self, inode: u64) -> bool {
        self.id.inode == inode || self.files.read().values().any(|block| block.id.inode == inode)
    }

    /// Runs `access` on each mapping that holds a part of a range, with the offset inside it, and the offset and the length
    /// of the part.
    ///
    /// # Panics
    /// If no mapping holds a byte. Calls check ranges before they enqueue work.
    fn parts(&self, offset: usize, bytes: usize, mut access: impl FnMut(&Mapping, usize, usize, usize)) {
        if (offset as u64) < self.own.bytes() {
            return access(&self.own, offset, 0, bytes);
        }
        let mut done = 0;
        while done < bytes {
            let at = (offset + done) as u64;
            // The lock is not held while bytes are copied.
            let found = self.imports.read().mapping(at);
            let Some((mapping, inside)) = found else {
                panic!("a command uses memory at offset {at:#x}, which was closed or unmapped");
            };
            let part = (bytes - done).min((mapping.bytes() - inside) as usize);
            access(&mapping, inside as usize, done, part);
            done += part;
        }
    }

    /// Reads bytes into host memory.
    ///
    /// # Safety
    /// As for [`Mapping::read`].
    pub(crate) unsafe fn read(&self, offset: usize, dst: *mut u8, bytes: usize) {
        // SAFETY: as promised by the caller, of whose destination each part is a part.
        self.parts(offset, bytes, |mapping, inside, done, part| unsafe { mapping.read(inside, dst.add(done), part) });
    }

    /// Writes bytes from host memory.
    ///
    /// # Safety
    /// As for [`Mapping::write`].
    pub(crate) unsafe fn write(&self, offset: usize, src: *const u8, bytes: usize) {
        // SAFETY: as promised by the caller, of whose source each part is a part.
        self.parts(offset, bytes, |mapping, inside, done, part| unsafe { mapping.write(inside, src.add(done), part) });
    }

    /// Reads elements at `offset`.
    pub(crate) fn read_slice<T: bytemuck::Pod>(&self, offset: usize, dst: &mut [T]) {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(dst);
        // SAFETY: the slice is writable and borrowed exclusively.
        unsafe { self.read(offset, bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Writes elements at `offset`.
    pub(crate) fn write_slice<T: bytemuck::Pod>(&self, offset: usize, src: &[T]) {
        let bytes: &[u8] = bytemuck::cast_slice(src);
        // SAFETY: the slice is initialized, and its borrow keeps writers away.
        unsafe { self.write(offset, bytes.as_ptr(), bytes.len()) };
    }

    /// Copies from another device's memory, or within this one.
    pub(crate) fn copy_from(&self, offset: usize, source: &Self, source_offset: usize, bytes: usize) {
        let mut carried = [0u64; CARRY_WORDS];
        let carried: &mut [u8] = bytemuck::cast_slice_mut(&mut carried);
        let mut done = 0;
        while done < bytes {
            let part = (bytes - done).min(carried.len());
            source.read_slice(source_offset + done, &mut carried[..part]);
            self.write_slice(offset + done, &carried[..part]);
            done += part;
        }
    }

    /// Fills a range; see [`Mapping::fill`].
    pub(crate) fn fill(&self, offset: usize, bytes: usize, pattern: u64) {
        self.parts(offset, bytes, |mapping, inside, _, part| mapping.fill(inside, part, pattern));
    }

    /// Gives the pages of a freed block back to the system, if the block is large enough.
    pub(crate) fn give_back(&self, offset: u64, bytes: u64) {
        if bytes >= GIVE_BACK_FROM
            && let Err(error) =
                rustix::fs::fallocate(&self.file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, bytes)
        {
            tracing::debug!(offset, bytes, %error, "freed pages of a simulated device stay in memory");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ranges_at_any_offset_and_length_are_exact(offset in 0usize..40, to in 100usize..140, bytes in 0usize..60) {
            let memory = DeviceMemory::new(0, 4096).unwrap();
            let mut expected: Vec<u8> = (0..200u8).collect();
            memory.write_slice(0, &expected);
            memory.copy_from(to, &memory, offset, bytes);
            expected.copy_within(offset..offset + bytes, to);
            let mut seen = vec![0u8; 200];
            memory.read_slice(0, &mut seen);
            prop_assert_eq!(&seen, &expected);
            let mut part = vec![0u8; bytes];
            memory.read_slice(to, &mut part);
            prop_assert_eq!(&part[..], &expected[to..to + bytes]);
            memory.fill(offset, bytes, u64::from_ne_bytes([0xab; 8]));
            expected[offset..offset + bytes].fill(0xab);
            memory.read_slice(0, &mut seen);
            prop_assert_eq!(&seen, &expected);
        }
    }

    #[test]
    fn neighbours_in_one_word_do_not_disturb_each_other() {
        let memory = DeviceMemory::new(0, 4096).unwrap();
        std::thread::scope(|scope| {
            for at in 0..8usize {
                let memory = &memory;
                scope.spawn(move || {
                    for round in 0..=200u8 {
                        memory.write_slice(at, &[round]);
                        let mut seen = [0u8];
                        memory.read_slice(at, &mut seen);
                        assert_eq!(seen[0], round);
                    }
                });
            }
        });
    }

    #[test]
    fn only_touched_pages_take_memory_and_big_holes_give_it_back() {
        let memory = DeviceMemory::new(0, 1 << 30).unwrap();
        let blocks = || rustix::fs::fstat(&memory.file).unwrap().st_blocks * 512;
        assert_eq!(blocks(), 0);
        memory.fill(0, 1 << 20, 7);
        assert!(blocks() >= 1 << 20 && blocks() < 8 << 20, "{} bytes for one MiB", blocks());
        memory.give_back(0, 1 << 20);
        assert_eq!(blocks(), 0);
        assert!(rustix::fs::ftruncate(&memory.file, 4096).is_err(), "the file is not sealed against shrinking");
        assert!(rustix::fs::ftruncate(&memory.file, 2 << 30).is_err(), "the file is not sealed against growing");
    }
}
