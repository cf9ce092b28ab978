//! Free blocks of exactly one size each, for the sizes that were requested last.
//!
//! The lists of a stream's device memory. A list is found by comparing sixteen numbers, and takes and keeps its block in constant
//! time. A block of more than 64 KiB is kept only if its size was requested at least twice.

use super::slabs;

/// Sizes that have lists.
const SIZES: usize = 16;
/// Blocks of up to this many bytes are kept after the first request.
const SMALL_BYTES: usize = 64 << 10;
/// Blocks of one size that are kept.
const MOST_SMALL: usize = 64;
const MOST_LARGE: usize = 8;

#[derive(Debug)]
pub(crate) struct FreeLists<B> {
    /// The index of the list that served last.
    last: usize,
    /// The size of each list's blocks, as [`Request::size`](super::area::Request::size); 0 for an unused list.
    sizes: [u32; SIZES],
    lists: [List<B>; SIZES],
    /// The list whose size is replaced next.
    next: usize,
    bytes: u64,
}

#[derive(Debug)]
struct List<B> {
    blocks: Vec<B>,
    /// True if the size was requested again while the list existed.
    is_repeated: bool,
}

impl<B> Default for FreeLists<B> {
    fn default() -> Self {
        let list = |_| List { blocks: Vec::new(), is_repeated: false };
        Self { last: 0, sizes: [0; SIZES], lists: std::array::from_fn(list), next: 0, bytes: 0 }
    }
}

impl<B> FreeLists<B> {
    #[inline]
    fn list_of(&self, size: u32) -> Option<usize> {
        if self.sizes[self.last] == size {
            return Some(self.last);
        }
        self.sizes.iter().position(|of_list| *of_list == size)
    }

    /// Takes out a block of a size.
    #[inline]
    pub(crate) fn take(&mut self, size: u32) -> Option<B> {
        let index = self.list_of(size)?;
        let block = self.lists[index].blocks.pop()?;
        self.last = index;
        self.bytes -= slabs::bytes_of(size) as u64;
        Some(block)
    }

    /// Keeps a block of a size, or returns it.
    #[inline]
    pub(crate) fn keep(&mut self, size: u32, block: B) -> Option<B> {
        let Some(index) = self.list_of(size) else { return Some(block) };
        let bytes = slabs::bytes_of(size);
        let list = &mut self.lists[index];
        let is_small = bytes <= SMALL_BYTES;
        let has_room = list.blocks.len() < if is_small { MOST_SMALL } else { MOST_LARGE };
        if !has_room || !(is_small || list.is_repeated) {
            return Some(block);
        }
        self.bytes += bytes as u64;
        list.blocks.push(block);
        None
    }

    /// Notes a request that found no block. Returns the blocks of the size whose list the new size takes over.
    pub(crate) fn note_miss(&mut self, size: u32) -> Vec<B> {
        if let Some(index) = self.list_of(size) {
            self.lists[index].is_repeated = true;
            return Vec::new();
        }
        let index = self.next;
        self.next = (index + 1) % SIZES;
        let blocks = self.empty(index);
        self.sizes[index] = size;
        self.lists[index].is_repeated = false;
        blocks
    }

    fn empty(&mut self, index: usize) -> Vec<B> {
        let blocks = std::mem::take(&mut self.lists[index].blocks);
        self.bytes -= (blocks.len() * slabs::bytes_of(self.sizes[index])) as u64;
        blocks
    }

    /// Takes out every block.
    pub(crate) fn take_all(&mut self) -> Vec<B> {
        (0..SIZES).flat_map(|index| self.empty(index)).collect()
    }

    /// Returns the number and the bytes of the blocks.
    pub(crate) fn kept(&self) -> (u64, u64) {
        (self.lists.iter().map(|list| list.blocks.len() as u64).sum(), self.bytes)
    }

    pub(crate) fn blocks(&self) -> impl Iterator<Item = &B> {
        self.lists.iter().flat_map(|list| &list.blocks)
    }
}
