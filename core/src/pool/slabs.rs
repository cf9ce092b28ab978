//! Slabs: runs of 64 KiB that are divided into small blocks, so that 1,000 buffers of 256 bytes do not hold 4 MB.
//!
//! A slab has blocks of one size, a multiple of 256 bytes up to 2 KiB, aligned to 256 bytes. A request takes the lowest free
//! block of the lowest slab of its size that has one. A slab whose last block is freed becomes free pages. This file knows
//! numbers of pages and blocks only.

use std::collections::{BTreeMap, BTreeSet};

use super::ranges::{PAGE, Run};

/// The unit of sizes, and the alignment of blocks.
const UNIT: usize = 256;
/// The largest size.
const MOST_BYTES: usize = 2048;
const SIZES: usize = MOST_BYTES / UNIT;
/// Pages of a slab.
pub(crate) const SLAB_PAGES: u32 = 16;
const SLAB_BYTES: usize = SLAB_PAGES as usize * PAGE;
/// Blocks of the smallest size in a slab.
const MOST_BLOCKS: usize = SLAB_BYTES / UNIT;
/// Marks the size of a block of a slab, in units. Other sizes are in pages, of which the pool counts fewer.
const IN_UNITS: u32 = 1 << 31;

/// Returns the number by which a thread cache finds blocks for a request of so many bytes, which `pages` pages would hold.
#[inline]
pub(crate) fn size_of_request(bytes: usize, pages: u32) -> u32 {
    if bytes <= MOST_BYTES { IN_UNITS | units_of(bytes) } else { pages }
}

/// Returns whether the blocks of a size lie in slabs.
#[inline]
pub(crate) fn is_in_slab(size: u32) -> bool {
    size & IN_UNITS != 0
}

/// Returns the bytes of a block of a size.
#[inline]
pub(crate) fn bytes_of(size: u32) -> usize {
    let unit = if is_in_slab(size) { UNIT } else { PAGE };
    (size & !IN_UNITS) as usize * unit
}

/// Returns whether a request of so many bytes is served by slabs.
pub(crate) fn is_small(bytes: usize) -> bool {
    bytes <= MOST_BYTES
}

fn units_of(bytes: usize) -> u32 {
    // At most 8.
    bytes.max(1).div_ceil(UNIT) as u32
}

#[derive(Debug)]
struct Slab {
    block_bytes: usize,
    used: usize,
    /// The blocks that are in use, one bit for each.
    bits: [u64; MOST_BLOCKS / 64],
}

impl Slab {
    fn blocks(&self) -> usize {
        SLAB_BYTES / self.block_bytes
    }
}

/// The slabs of a pool.
#[derive(Debug, Default)]
pub(crate) struct Slabs {
    /// By first page.
    slabs: BTreeMap<u32, Slab>,
    /// The slabs with free blocks, for each size.
    open: [BTreeSet<u32>; SIZES],
    unused_bytes: u64,
}

impl Slabs {
    /// Bytes of slabs that are in no block.
    pub(crate) fn unused_bytes(&self) -> u64 {
        self.unused_bytes
    }

    /// Returns whether a slab has a free block of a size.
    pub(crate) fn has(&self, bytes: usize) -> bool {
        !self.open[units_of(bytes) as usize - 1].is_empty()
    }

    /// Takes a block. Returns its slab and its offset there in bytes. `None` if no slab of the size has a free block.
    pub(crate) fn take(&mut self, bytes: usize) -> Option<(Run, usize)> {
        let units = units_of(bytes);
        let open = &mut self.open[units as usize - 1];
        let start = *open.first()?;
        let slab = self.slabs.get_mut(&start)?;
        let word = slab.bits.iter().position(|word| *word != u64::MAX)?;
        let bit = slab.bits[word].trailing_ones() as usize;
        slab.bits[word] |= 1 << bit;
        slab.used += 1;
        if slab.used == slab.blocks() {
            open.remove(&start);
        }
        let size = slab.block_bytes;
        self.unused_bytes -= size as u64;
        Some((Run { start, pages: SLAB_PAGES }, (word * 64 + bit) * size))
    }

    /// Adds a slab for blocks of so many bytes.
    pub(crate) fn add(&mut self, start: u32, bytes: usize) {
        let units = units_of(bytes);
        let slab = Slab { block_bytes: units as usize * UNIT, used: 0, bits: [0; MOST_BLOCKS / 64] };
        self.slabs.insert(start, slab);
        self.open[units as usize - 1].insert(start);
        self.unused_bytes += SLAB_BYTES as u64;
    }

    /// Frees the block at an offset of a slab. Returns whether the slab is gone: it had no other block.
    pub(crate) fn free(&mut self, start: u32, offset: usize) -> bool {
        let Some(slab) = self.slabs.get_mut(&start) else { return false };
        let index = offset / slab.block_bytes;
        let mask = 1 << (index % 64);
        debug_assert!(slab.bits[index / 64] & mask != 0, "a block that is in use");
        slab.bits[index / 64] &= !mask;
        slab.used -= 1;
        let (size, is_gone) = (slab.block_bytes, slab.used == 0);
        self.unused_bytes += size as u64;
        let open = &mut self.open[size / UNIT - 1];
        if is_gone {
            open.remove(&start);
            self.slabs.remove(&start);
            self.unused_bytes -= SLAB_BYTES as u64;
        } else {
            open.insert(start);
        }
        is_gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_are_multiples_of_256_bytes_up_to_2_kib_and_then_pages() {
        let sizes = [0, 1, 256, 257, 2048, 2049, 4096].map(|bytes| size_of_request(bytes, 1));
        assert_eq!(sizes, [IN_UNITS | 1, IN_UNITS | 1, IN_UNITS | 1, IN_UNITS | 2, IN_UNITS | 8, 1, 1]);
        assert_eq!([2048, 2049].map(is_small), [true, false]);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn blocks_never_overlap_and_every_byte_is_counted(steps in proptest::collection::vec((0..2049_usize, any::<bool>(), any::<usize>()), 1..1500)) {
            let mut slabs = Slabs::default();
            let mut live: Vec<(u32, usize, usize)> = Vec::new();
            let mut next = 0;
            for (bytes, is_free, pick) in steps {
                if is_free && !live.is_empty() {
                    let (start, offset, _) = live.swap_remove(pick % live.len());
                    let is_last = live.iter().all(|block| block.0 != start);
                    prop_assert_eq!(slabs.free(start, offset), is_last);
                } else {
                    let taken = slabs.take(bytes).or_else(|| {
                        slabs.add(next, bytes);
                        next += SLAB_PAGES;
                        slabs.take(bytes)
                    });
                    let (run, offset) = taken.unwrap();
                    let size = bytes_of(size_of_request(bytes, 1));
                    prop_assert!(size >= bytes && size < bytes.max(1) + UNIT && offset % UNIT == 0);
                    prop_assert!(run.pages == SLAB_PAGES && offset + size <= SLAB_BYTES);
                    let overlaps = |other: &(u32, usize, usize)| {
                        other.0 == run.start && offset < other.1 + other.2 && other.1 < offset + size
                    };
                    prop_assert!(!live.iter().any(overlaps));
                    live.push((run.start, offset, size));
                }
                let used: usize = live.iter().map(|block| block.2).sum();
                let starts: BTreeSet<u32> = live.iter().map(|block| block.0).collect();
                prop_assert_eq!(slabs.unused_bytes() as usize, starts.len() * SLAB_BYTES - used);
            }
        }
    }
}
