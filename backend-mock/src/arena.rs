//! Which parts of a device's memory are taken: best fit over the gaps, merged when a block comes back.
//!
//! A block is *live* from its allocation until it is retired, *retiring* until the stream that frees it has passed that
//! point, and a *gap* after that. Only live blocks may be used by new work; retiring ones still hold their bytes.
//! Offsets count from the start of the device's memory. The arena is plain data, without locks and without memory.

use std::collections::{BTreeMap, BTreeSet};

/// Every block begins at a multiple of this.
pub(crate) const ALIGNMENT: u64 = 256;

/// Who a block belongs to, and how it is to be freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    /// A caller of `allocate`.
    Plain,
    /// A caller of `allocate`, in stream order.
    StreamOrdered,
    /// The mock itself, for the own workspace of a BLAS handle; not counted among the live objects.
    Mock,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Block {
    /// Bytes that were asked for.
    pub(crate) bytes: u64,
    pub(crate) owner: Owner,
}

impl Block {
    /// Bytes that the block takes.
    fn reserved(self) -> u64 {
        self.bytes.next_multiple_of(ALIGNMENT)
    }
}

#[derive(Debug)]
pub(crate) struct Arena {
    live: BTreeMap<u64, Block>,
    retiring: BTreeMap<u64, Block>,
    /// Length of each gap by its offset. No two gaps touch.
    gaps: BTreeMap<u64, u64>,
    /// The same gaps as (length, offset).
    gaps_by_length: BTreeSet<(u64, u64)>,
    free_bytes: u64,
    callers_blocks: u64,
}

impl Arena {
    /// One gap of `capacity` bytes, a multiple of [`ALIGNMENT`].
    pub(crate) fn new(capacity: u64) -> Self {
        let mut arena = Self {
            live: BTreeMap::new(),
            retiring: BTreeMap::new(),
            gaps: BTreeMap::new(),
            gaps_by_length: BTreeSet::new(),
            free_bytes: capacity,
            callers_blocks: 0,
        };
        arena.insert_gap(0, capacity);
        arena
    }

    /// Takes a block; `None` when no gap is long enough.
    pub(crate) fn allocate(&mut self, bytes: u64, owner: Owner) -> Option<u64> {
        let reserved = bytes.checked_next_multiple_of(ALIGNMENT)?;
        let &(length, offset) = self.gaps_by_length.range((reserved, 0)..).next()?;
        self.remove_gap(offset, length);
        if length > reserved {
            self.insert_gap(offset + reserved, length - reserved);
        }
        self.free_bytes -= reserved;
        self.live.insert(offset, Block { bytes, owner });
        self.callers_blocks += u64::from(owner != Owner::Mock);
        Some(offset)
    }

    /// The live block that begins at `offset`.
    pub(crate) fn block(&self, offset: u64) -> Option<Block> {
        self.live.get(&offset).copied()
    }

    /// Whether a range lies inside one live block.
    pub(crate) fn contains(&self, offset: u64, bytes: u64) -> bool {
        self.around(offset)
            .is_some_and(|(start, block)| offset.checked_add(bytes).is_some_and(|end| end <= start + block.bytes))
    }

    /// The last live block that begins at or before `offset`.
    pub(crate) fn around(&self, offset: u64) -> Option<(u64, Block)> {
        self.live.range(..=offset).next_back().map(|(&start, &block)| (start, block))
    }

    /// Makes a live block unusable for new work; it keeps its bytes until it is released.
    pub(crate) fn retire(&mut self, offset: u64) -> Option<Block> {
        let block = self.live.remove(&offset)?;
        self.retiring.insert(offset, block);
        self.callers_blocks -= u64::from(block.owner != Owner::Mock);
        Some(block)
    }

    /// Undoes [`Arena::retire`].
    pub(crate) fn revive(&mut self, offset: u64) {
        if let Some(block) = self.retiring.remove(&offset) {
            self.live.insert(offset, block);
            self.callers_blocks += u64::from(block.owner != Owner::Mock);
        }
    }

    /// Gives the bytes of a retired block back.
    pub(crate) fn release(&mut self, offset: u64) {
        let Some(block) = self.retiring.remove(&offset) else { return };
        let (mut start, mut length) = (offset, block.reserved());
        self.free_bytes += length;
        if let Some((&before, &before_length)) = self.gaps.range(..start).next_back()
            && before + before_length == start
        {
            self.remove_gap(before, before_length);
            start = before;
            length += before_length;
        }
        if let Some(&after_length) = self.gaps.get(&(start + length)) {
            self.remove_gap(start + length, after_length);
            length += after_length;
        }
        self.insert_gap(start, length);
    }

    /// Bytes in gaps.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.free_bytes
    }

    /// Bytes of the longest gap.
    pub(crate) fn longest_gap(&self) -> u64 {
        self.gaps_by_length.last().map_or(0, |&(length, _)| length)
    }

    /// Bytes of blocks whose stream-ordered free has not been reached.
    pub(crate) fn retiring_bytes(&self) -> u64 {
        self.retiring.values().map(|block| block.reserved()).sum()
    }

    /// How many live blocks callers hold.
    pub(crate) fn callers_blocks(&self) -> u64 {
        self.callers_blocks
    }

    fn insert_gap(&mut self, offset: u64, length: u64) {
        self.gaps.insert(offset, length);
        self.gaps_by_length.insert((length, offset));
    }

    fn remove_gap(&mut self, offset: u64, length: u64) {
        self.gaps.remove(&offset);
        self.gaps_by_length.remove(&(length, offset));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CAPACITY: u64 = 64 * 1024;

    #[test]
    fn the_tightest_gap_is_taken() {
        let mut arena = Arena::new(CAPACITY);
        let blocks: Vec<_> = [1024, 256, 512, 256].map(|bytes| arena.allocate(bytes, Owner::Plain).unwrap()).into();
        for &offset in [&blocks[0], &blocks[2]] {
            arena.retire(offset).unwrap();
            arena.release(offset);
        }
        assert_eq!(arena.allocate(500, Owner::Plain), Some(blocks[2]));
        assert_eq!(arena.allocate(600, Owner::Plain), Some(blocks[0]));
    }

    #[test]
    fn a_retiring_block_keeps_its_bytes_and_may_be_revived() {
        let mut arena = Arena::new(1024);
        let offset = arena.allocate(1000, Owner::StreamOrdered).unwrap();
        assert!(arena.contains(offset + 10, 990) && !arena.contains(offset + 10, 991));
        arena.retire(offset).unwrap();
        assert!(arena.retire(offset).is_none() && !arena.contains(offset, 1));
        assert_eq!((arena.free_bytes(), arena.retiring_bytes(), arena.callers_blocks()), (0, 1024, 0));
        arena.revive(offset);
        assert!(arena.contains(offset, 1000) && arena.callers_blocks() == 1);
    }

    #[test]
    fn sizes_past_the_address_space_do_not_fit() {
        assert_eq!(Arena::new(1024).allocate(u64::MAX, Owner::Plain), None);
        assert!(!Arena::new(1024).contains(u64::MAX, 1));
    }

    #[derive(Debug, Clone)]
    enum Step {
        Allocate(u64, bool),
        /// Frees the live block with this index, modulo their number.
        Free(usize),
        Retire(usize),
        /// Releases the retired block with this index, modulo their number.
        Release(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (1..6000u64, any::<bool>()).prop_map(|(bytes, own)| Step::Allocate(bytes, own)),
            2 => any::<usize>().prop_map(Step::Free),
            1 => any::<usize>().prop_map(Step::Retire),
            1 => any::<usize>().prop_map(Step::Release),
        ]
    }

    proptest! {
        #[test]
        fn blocks_never_overlap_bytes_add_up_and_gaps_merge(steps in prop::collection::vec(step(), 1..200)) {
            let mut arena = Arena::new(CAPACITY);
            let mut live: Vec<(u64, u64, Owner)> = Vec::new();
            let mut retired: Vec<(u64, u64)> = Vec::new();
            for step in steps {
                match step {
                    Step::Allocate(bytes, own) => {
                        let owner = if own { Owner::Mock } else { Owner::Plain };
                        let longest = arena.longest_gap();
                        match arena.allocate(bytes, owner) {
                            Some(offset) => live.push((offset, bytes, owner)),
                            None => prop_assert!(bytes.next_multiple_of(ALIGNMENT) > longest),
                        }
                    }
                    Step::Free(index) if !live.is_empty() => {
                        let (offset, ..) = live.swap_remove(index % live.len());
                        prop_assert!(arena.retire(offset).is_some());
                        arena.release(offset);
                    }
                    Step::Retire(index) if !live.is_empty() => {
                        let (offset, bytes, _) = live.swap_remove(index % live.len());
                        prop_assert!(arena.retire(offset).is_some());
                        retired.push((offset, bytes));
                    }
                    Step::Release(index) if !retired.is_empty() => {
                        let (offset, _) = retired.swap_remove(index % retired.len());
                        arena.release(offset);
                    }
                    _ => {}
                }
                let mut taken: Vec<_> = live.iter().map(|&(offset, bytes, _)| (offset, bytes)).collect();
                taken.extend(&retired);
                taken.sort_unstable();
                for pair in taken.windows(2) {
                    prop_assert!(pair[0].0 + pair[0].1 <= pair[1].0);
                }
                prop_assert!(taken.iter().all(|&(offset, bytes)| offset % ALIGNMENT == 0 && offset + bytes <= CAPACITY));
                let reserved: u64 = taken.iter().map(|&(_, bytes)| bytes.next_multiple_of(ALIGNMENT)).sum();
                prop_assert_eq!(arena.free_bytes(), CAPACITY - reserved);
                let callers = live.iter().filter(|&&(.., owner)| owner != Owner::Mock).count();
                prop_assert_eq!(arena.callers_blocks(), callers as u64);
                let gaps: Vec<_> = arena.gaps.iter().map(|(&offset, &length)| (offset, length)).collect();
                prop_assert_eq!(gaps.iter().map(|gap| gap.1).sum::<u64>(), arena.free_bytes());
                prop_assert!(gaps.windows(2).all(|pair| pair[0].0 + pair[0].1 < pair[1].0), "gaps touch: {:?}", gaps);
                let by_length: BTreeSet<_> = gaps.iter().map(|&(offset, length)| (length, offset)).collect();
                prop_assert_eq!(&by_length, &arena.gaps_by_length);
            }
        }
    }
}
