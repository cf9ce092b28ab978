//! The parts of a device's memory that are taken: best fit over the gaps, which merge when a block comes back.
//!
//! A request takes the block of its size that was freed last, if nothing else has taken bytes of it. So the next block of
//! that size has the same address, and a late use of the freed one meets other contents. Without such a block, the request
//! takes the tightest gap.
//!
//! A block is *live* from its allocation until it is retired. It is *retiring* until the stream that frees it has
//! passed that point, and a *gap* after that. New work may use live blocks only; a retiring block still holds its
//! bytes.
//!
//! An allocation in the order of the stream that frees a block takes bytes of that block at once, as the vendors' pools
//! do. If a [`Quarantine`] is set, a freed block becomes a gap only after enough later frees, so work that uses it too
//! late meets no other block. Quarantined bytes count as free, and are taken if nothing else is left.
//!
//! Offsets count from the start of the device's memory. The arena is plain data, without locks and without memory.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::sealed_file::page_bytes;

/// The alignment of every block.
pub(crate) const ALIGNMENT: u64 = 256;

/// The most freed blocks that an arena remembers. With more, it forgets all.
const MOST_FREED: usize = 4096;

/// The owner of a block, which decides how it is to be freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    /// A caller of `allocate`.
    Plain,
    /// A caller of `allocate`, in stream order.
    StreamOrdered,
    /// A caller of `allocate`, in pages of a file of its own, which other processes can map.
    Shareable,
    /// A caller of a simulated driver, in pages of the device's own file, which other processes can map.
    #[cfg(feature = "simulated")]
    Pages,
    /// A caller of `create_memory`. Counts as a live object elsewhere, and no address reaches it here.
    Physical,
    /// The mock itself, for the own workspace of a BLAS handle. Does not count as a live object.
    Mock,
}

impl Owner {
    /// Returns whether callers hold the block by its address.
    fn is_caller(self) -> bool {
        !matches!(self, Self::Mock | Self::Physical)
    }

    /// Returns the number that offset and length of a block are multiples of.
    fn granule(self) -> u64 {
        match self {
            Self::Shareable | Self::Physical => page_bytes(),
            #[cfg(feature = "simulated")]
            Self::Pages => page_bytes(),
            Self::Plain | Self::StreamOrdered | Self::Mock => ALIGNMENT,
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Block {
    /// The bytes that the caller requested.
    pub(crate) bytes: u64,
    pub(crate) owner: Owner,
    /// The number of the allocation, unique in the arena.
    pub(crate) serial: u64,
}

impl Block {
    /// Returns the bytes that the block takes.
    pub(crate) fn reserved(self) -> u64 {
        self.bytes.next_multiple_of(self.owner.granule())
    }
}

/// A block that was retired, or the rest of it after a later allocation on the same stream.
#[derive(Debug, Clone, Copy)]
struct Retiring {
    /// The whole block, as it was allocated.
    block: Block,
    /// The remaining bytes.
    length: u64,
    /// The stream that frees the block, once the free is enqueued there.
    stream: Option<u64>,
}

/// The time for which freed blocks are not handed out again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Quarantine {
    /// Until this block and the blocks freed later exceed that many bytes.
    pub(crate) bytes: Option<u64>,
    /// Until that many blocks were freed later.
    pub(crate) frees: Option<usize>,
}

impl Quarantine {
    /// Returns whether that many blocks and bytes can be kept. Without limits, nothing is kept.
    fn holds(self, blocks: usize, bytes: u64) -> bool {
        (self.bytes.is_some() || self.frees.is_some())
            && self.bytes.is_none_or(|limit| bytes <= limit)
            && self.frees.is_none_or(|limit| blocks <= limit)
    }
}

#[derive(Debug)]
pub(crate) struct Arena {
    live: BTreeMap<u64, Block>,
    retiring: BTreeMap<u64, Retiring>,
    /// The retiring blocks that their stream may reuse at once, as (stream, length, offset).
    reusable: BTreeSet<(u64, u64, u64)>,
    /// The length of each gap by its offset. No two gaps touch.
    gaps: BTreeMap<u64, u64>,
    /// The same gaps as (length, offset).
    gaps_by_length: BTreeSet<(u64, u64)>,
    /// The offsets of freed blocks by their length, the latest last. Bytes of some may have been taken since.
    freed: BTreeMap<u64, Vec<u64>>,
    freed_count: usize,
    free_bytes: u64,
    callers_blocks: u64,
    allocations: u64,
    quarantine: Quarantine,
    /// Offset and length of freed blocks that are no gaps yet, the oldest first.
    quarantined: VecDeque<(u64, u64)>,
    quarantined_bytes: u64,
}

impl Arena {
    /// Creates an arena of one gap of `capacity` bytes, a multiple of [`ALIGNMENT`].
    pub(crate) fn new(capacity: u64, quarantine: Quarantine) -> Self {
        let mut arena = Self {
            live: BTreeMap::new(),
            retiring: BTreeMap::new(),
            reusable: BTreeSet::new(),
            gaps: BTreeMap::new(),
            gaps_by_length: BTreeSet::new(),
            freed: BTreeMap::new(),
            freed_count: 0,
            free_bytes: capacity,
            callers_blocks: 0,
            allocations: 0,
            quarantine,
            quarantined: VecDeque::new(),
            quarantined_bytes: 0,
        };
        arena.insert_gap(0, capacity);
        arena
    }

    /// Takes a block. Returns `None` if no gap is long enough.
    pub(crate) fn allocate(&mut self, bytes: u64, owner: Owner) -> Option<u64> {
        let reserved = bytes.checked_next_multiple_of(owner.granule())?;
        if let Some((gap, length, offset)) = self.freed_last(reserved, owner) {
            self.take_from_gap(gap, length, offset, reserved);
            self.go_live(offset, bytes, owner);
            return Some(offset);
        }
        let (gap, length, offset) = loop {
            // A gap may be long enough, and yet too short from the next multiple of the granule on.
            let found = self.gaps_by_length.range((reserved, 0)..).find_map(|&(length, gap)| {
                let offset = gap.next_multiple_of(owner.granule());
                (offset - gap <= length - reserved).then_some((gap, length, offset))
            });
            match found {
                Some(found) => break found,
                None => self.end_oldest_quarantine()?,
            }
        };
        self.take_from_gap(gap, length, offset, reserved);
        self.go_live(offset, bytes, owner);
        Some(offset)
    }

    fn take_from_gap(&mut self, gap: u64, length: u64, offset: u64, reserved: u64) {
        self.remove_gap(gap, length);
        if offset > gap {
            self.insert_gap(gap, offset - gap);
        }
        let behind = gap + length - (offset + reserved);
        if behind > 0 {
            self.insert_gap(offset + reserved, behind);
        }
        self.free_bytes -= reserved;
    }

    /// Returns the gap with its length, and the offset, of the block of that length that was freed last and is still free.
    fn freed_last(&mut self, reserved: u64, owner: Owner) -> Option<(u64, u64, u64)> {
        let mut offsets = self.freed.remove(&reserved)?;
        self.freed_count -= offsets.len();
        let mut found = None;
        while let Some(offset) = offsets.pop() {
            if let Some((gap, length)) = self.gap_around(offset, reserved) {
                if offset.is_multiple_of(owner.granule()) {
                    found = Some((gap, length, offset));
                } else {
                    offsets.push(offset);
                }
                break;
            }
        }
        if !offsets.is_empty() {
            self.freed_count += offsets.len();
            self.freed.insert(reserved, offsets);
        }
        found
    }

    /// Returns offset and length of the gap that contains a range.
    fn gap_around(&self, offset: u64, bytes: u64) -> Option<(u64, u64)> {
        let (&gap, &length) = self.gaps.range(..=offset).next_back()?;
        (offset + bytes <= gap + length).then_some((gap, length))
    }

    /// Notes a freed block for the next request of its length.
    fn note_freed(&mut self, offset: u64, length: u64) {
        if self.freed_count == MOST_FREED {
            self.freed.clear();
            self.freed_count = 0;
        }
        self.freed.entry(length).or_default().push(offset);
        self.freed_count += 1;
    }

    /// Takes a block out of bytes that `stream` is about to free. Returns `None` if the stream frees no block of that
    /// length, or if a quarantine keeps the bytes back.
    pub(crate) fn reuse(&mut self, bytes: u64, stream: u64) -> Option<u64> {
        let reserved = bytes.checked_next_multiple_of(Owner::StreamOrdered.granule())?;
        let first = (stream, reserved, 0)..=(stream, u64::MAX, u64::MAX);
        let kept = |length| self.quarantine.holds(1, length);
        let &(_, length, offset) = self.reusable.range(first).find(|&&(_, length, _)| !kept(length))?;
        let rest = self.take_out(offset)?;
        if length > reserved {
            self.retiring.insert(offset + reserved, Retiring { length: length - reserved, ..rest });
            self.offer(offset + reserved, rest.block.serial, stream);
        }
        self.go_live(offset, bytes, Owner::StreamOrdered);
        Some(offset)
    }

    fn go_live(&mut self, offset: u64, bytes: u64, owner: Owner) {
        self.allocations += 1;
        self.live.insert(offset, Block { bytes, owner, serial: self.allocations });
        self.callers_blocks += u64::from(owner.is_caller());
    }

    /// Returns the live block that begins at `offset`.
    pub(crate) fn block(&self, offset: u64) -> Option<Block> {
        self.live.get(&offset).copied()
    }

    /// Returns whether a range lies inside one live block that has an address.
    pub(crate) fn contains(&self, offset: u64, bytes: u64) -> bool {
        self.around(offset)
            .filter(|(_, block)| block.owner != Owner::Physical)
            .is_some_and(|(start, block)| offset.checked_add(bytes).is_some_and(|end| end <= start + block.bytes))
    }

    /// Returns the last live block that begins at or before `offset`.
    pub(crate) fn around(&self, offset: u64) -> Option<(u64, Block)> {
        self.live.range(..=offset).next_back().map(|(&start, &block)| (start, block))
    }

    /// Retires a live block: new work must not use it. The block keeps its bytes until it is released.
    pub(crate) fn retire(&mut self, offset: u64) -> Option<Block> {
        let block = self.live.remove(&offset)?;
        self.retiring.insert(offset, Retiring { block, length: block.reserved(), stream: None });
        self.callers_blocks -= u64::from(block.owner.is_caller());
        Some(block)
    }

    /// Offers a retiring block, whose free was enqueued on `stream`, to allocations in the order of `stream`.
    pub(crate) fn offer(&mut self, offset: u64, serial: u64, stream: u64) {
        if let Some(retiring) = self.retiring.get_mut(&offset).filter(|retiring| retiring.block.serial == serial) {
            retiring.stream = Some(stream);
            self.reusable.insert((stream, retiring.length, offset));
        }
    }

    /// Removes the parts of a retiring block that were not reused. Returns their offsets and lengths, for
    /// [`Arena::release`].
    pub(crate) fn end_retiring(&mut self, offset: u64, bytes: u64, serial: u64) -> Vec<(u64, u64)> {
        let parts = self.retiring.range(offset..offset + bytes).filter(|(_, part)| part.block.serial == serial);
        let parts: Vec<_> = parts.map(|(&at, part)| (at, part.length)).collect();
        for &(at, _) in &parts {
            self.take_out(at);
        }
        parts
    }

    fn take_out(&mut self, offset: u64) -> Option<Retiring> {
        let retiring = self.retiring.remove(&offset)?;
        if let Some(stream) = retiring.stream {
            self.reusable.remove(&(stream, retiring.length, offset));
        }
        Some(retiring)
    }

    /// Undoes [`Arena::retire`].
    pub(crate) fn revive(&mut self, offset: u64) {
        if let Some(Retiring { block, .. }) = self.retiring.remove(&offset) {
            self.live.insert(offset, block);
            self.callers_blocks += u64::from(block.owner.is_caller());
        }
    }

    /// Frees bytes that [`Arena::end_retiring`] removed.
    pub(crate) fn release(&mut self, (offset, length): (u64, u64)) {
        self.free_bytes += length;
        self.quarantined.push_back((offset, length));
        self.quarantined_bytes += length;
        while !self.quarantine.holds(self.quarantined.len(), self.quarantined_bytes)
            && self.end_oldest_quarantine().is_some()
        {}
    }

    /// Turns the block that has been in quarantine for longest into a gap.
    fn end_oldest_quarantine(&mut self) -> Option<()> {
        let (offset, length) = self.quarantined.pop_front()?;
        self.quarantined_bytes -= length;
        self.add_gap(offset, length);
        self.note_freed(offset, length);
        Some(())
    }

    /// Adds a gap, and merges it with its neighbors.
    fn add_gap(&mut self, offset: u64, length: u64) {
        let (mut start, mut length) = (offset, length);
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

    /// Returns the bytes in gaps and in quarantine.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.free_bytes
    }

    /// Returns the bytes of the longest gap.
    pub(crate) fn longest_gap(&self) -> u64 {
        self.gaps_by_length.last().map_or(0, |&(length, _)| length)
    }

    /// Returns the bytes of blocks whose stream-ordered free has not been reached.
    pub(crate) fn retiring_bytes(&self) -> u64 {
        self.retiring.values().map(|retiring| retiring.length).sum()
    }

    /// Returns the number of live blocks that callers hold.
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
        let mut arena = Arena::new(CAPACITY, Quarantine::default());
        let blocks: Vec<_> = [1024, 256, 512, 256].map(|bytes| arena.allocate(bytes, Owner::Plain).unwrap()).into();
        for &offset in [&blocks[0], &blocks[2]] {
            free(&mut arena, offset);
        }
        assert_eq!(arena.allocate(500, Owner::Plain), Some(blocks[2]));
        assert_eq!(arena.allocate(600, Owner::Plain), Some(blocks[0]));
    }

    #[test]
    fn the_next_request_of_a_size_takes_the_block_that_was_freed_last() {
        let mut arena = Arena::new(CAPACITY, Quarantine::default());
        let allocate = |arena: &mut Arena, bytes| arena.allocate(bytes, Owner::Plain).unwrap();
        let blocks = [(); 4].map(|()| allocate(&mut arena, 512));
        let hole = allocate(&mut arena, 512);
        allocate(&mut arena, 256);
        // The hole is the tightest gap. The others merge, and the last of them merges with nothing.
        [hole, blocks[0], blocks[2], blocks[1]].into_iter().for_each(|offset| free(&mut arena, offset));
        assert_eq!(allocate(&mut arena, 500), blocks[1]);
        assert_eq!(allocate(&mut arena, 512), blocks[2]);
        assert_eq!(allocate(&mut arena, 256), blocks[0], "the tightest gap, of which a freed block has 512 bytes");
        assert_eq!(allocate(&mut arena, 512), hole, "a part of the block that was freed before was taken");
    }

    #[test]
    fn the_list_of_freed_blocks_is_bounded() {
        let mut arena = Arena::new(1 << 30, Quarantine::default());
        for blocks in [1, MOST_FREED, 3 * MOST_FREED] {
            let taken: Vec<_> = (0..blocks).map(|_| arena.allocate(256, Owner::Plain).unwrap()).collect();
            taken.into_iter().for_each(|offset| free(&mut arena, offset));
            assert!(arena.freed_count <= MOST_FREED);
            assert_eq!(arena.freed_count, arena.freed.values().map(Vec::len).sum::<usize>());
        }
        assert_eq!((arena.free_bytes(), arena.longest_gap()), (1 << 30, 1 << 30));
    }

    #[test]
    fn a_retiring_block_keeps_its_bytes_and_may_be_revived() {
        let mut arena = Arena::new(1024, Quarantine::default());
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
        assert_eq!(Arena::new(1024, Quarantine::default()).allocate(u64::MAX, Owner::Plain), None);
        assert!(!Arena::new(1024, Quarantine::default()).contains(u64::MAX, 1));
    }

    fn free(arena: &mut Arena, offset: u64) {
        let block = arena.retire(offset).unwrap();
        release(arena, offset, block);
    }

    fn release(arena: &mut Arena, offset: u64, block: Block) {
        let parts = arena.end_retiring(offset, block.reserved(), block.serial);
        parts.into_iter().for_each(|part| arena.release(part));
    }

    #[test]
    fn a_freed_block_is_kept_back_until_enough_was_freed_after_it() {
        for quarantine in [
            Quarantine { frees: Some(2), bytes: None },
            Quarantine { frees: None, bytes: Some(512) },
            Quarantine { frees: Some(100), bytes: Some(767) },
        ] {
            let mut arena = Arena::new(CAPACITY, quarantine);
            let offset = arena.allocate(256, Owner::Plain).unwrap();
            let others = [(); 2].map(|()| arena.allocate(256, Owner::Plain).unwrap());
            // The first block that is freed would be the tightest gap.
            arena.allocate(256, Owner::Plain).unwrap();
            free(&mut arena, offset);
            assert_eq!(arena.free_bytes(), CAPACITY - 3 * 256);
            assert_ne!(arena.allocate(256, Owner::Plain), Some(offset), "{quarantine:?}");
            free(&mut arena, others[0]);
            let next = arena.allocate(256, Owner::Plain);
            assert!(next != Some(offset) && next != Some(others[0]), "{quarantine:?}");
            free(&mut arena, others[1]);
            assert_eq!(arena.allocate(256, Owner::Plain), Some(offset), "{quarantine:?}");
        }
    }

    #[test]
    fn blocks_are_taken_out_of_quarantine_when_nothing_else_is_left() {
        let mut arena = Arena::new(CAPACITY, Quarantine { frees: Some(1000), bytes: None });
        let blocks: Vec<_> = (0..64).map(|_| arena.allocate(1024, Owner::Plain).unwrap()).collect();
        assert_eq!(arena.allocate(1, Owner::Plain), None);
        for &offset in &blocks {
            free(&mut arena, offset);
        }
        assert_eq!(arena.allocate(1, Owner::Plain), Some(blocks[0]), "the one that was freed first");
        assert!(arena.allocate(CAPACITY - 1024, Owner::Plain).is_some());
    }

    #[test]
    fn a_stream_has_what_it_frees_at_once_and_nobody_else_has() {
        let mut arena = Arena::new(1024, Quarantine::default());
        let offset = arena.allocate(1024, Owner::StreamOrdered).unwrap();
        let first = arena.retire(offset).unwrap();
        assert_eq!(arena.reuse(256, 7), None, "the free is not enqueued yet");
        arena.offer(offset, first.serial, 7);
        assert_eq!((arena.reuse(256, 8), arena.reuse(1025, 7), arena.allocate(256, Owner::Plain)), (None, None, None));
        assert_eq!((arena.reuse(200, 7), arena.reuse(512, 7)), (Some(offset), Some(offset + 256)));
        assert_eq!((arena.callers_blocks(), arena.free_bytes(), arena.retiring_bytes()), (2, 0, 256));
        // The first free executes. It gives back only the bytes that were not reused.
        release(&mut arena, offset, first);
        assert_eq!((arena.free_bytes(), arena.reuse(256, 7)), (256, None));
        assert_eq!(arena.allocate(256, Owner::Plain), Some(offset + 768));
        // The frees of two blocks in the same place, one after the other, are told apart.
        let later = arena.retire(offset).unwrap();
        arena.offer(offset, first.serial, 7);
        assert_eq!(arena.reuse(256, 7), None);
        arena.offer(offset, later.serial, 7);
        release(&mut arena, offset, first);
        assert_eq!(arena.reuse(256, 7), Some(offset));
    }

    #[test]
    fn what_a_quarantine_keeps_is_not_reused() {
        let mut arena = Arena::new(CAPACITY, Quarantine { frees: None, bytes: Some(1024) });
        for (bytes, again) in [(1000, false), (1025, true)] {
            let offset = arena.allocate(bytes, Owner::StreamOrdered).unwrap();
            let serial = arena.retire(offset).unwrap().serial;
            arena.offer(offset, serial, 7);
            assert_eq!(arena.reuse(1, 7).is_some(), again, "{bytes} bytes");
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Allocate(u64, Owner),
        /// Allocates in the order of a stream.
        Reuse(u64, u64),
        /// Frees the live block with this index, modulo their number.
        Free(usize),
        /// Retires it, and offers it to a stream.
        Retire(usize, Option<u64>),
        /// Releases the retired block with this index, modulo their number.
        Release(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (1..6000u64, prop::sample::select(vec![Owner::Mock, Owner::Plain, Owner::Shareable]))
                .prop_map(|(bytes, owner)| Step::Allocate(bytes, owner)),
            2 => any::<usize>().prop_map(Step::Free),
            1 => (any::<usize>(), prop::option::of(0..2u64)).prop_map(|(index, stream)| Step::Retire(index, stream)),
            1 => (1..3000u64, 0..2u64).prop_map(|(bytes, stream)| Step::Reuse(bytes, stream)),
            1 => any::<usize>().prop_map(Step::Release),
        ]
    }

    /// Takes the steps, and checks after each that blocks do not overlap, bytes add up, and gaps are merged.
    fn walk(steps: Vec<Step>, quarantine: Quarantine) -> Result<(), TestCaseError> {
        let mut arena = Arena::new(CAPACITY, quarantine);
        let mut live: Vec<(u64, u64, Owner)> = Vec::new();
        let mut retired: Vec<(u64, Block)> = Vec::new();
        // The remains of retired blocks: offset, length, serial number, and the stream that may reuse them.
        let mut parts: Vec<(u64, u64, u64, Option<u64>)> = Vec::new();
        for step in steps {
            match step {
                Step::Allocate(bytes, owner) => match arena.allocate(bytes, owner) {
                    Some(offset) => live.push((offset, bytes, owner)),
                    None => {
                        let lost_before_the_block = owner.granule() - ALIGNMENT;
                        let needed = bytes.next_multiple_of(owner.granule()) + lost_before_the_block;
                        prop_assert!(needed > arena.longest_gap());
                    }
                },
                Step::Reuse(bytes, stream) => {
                    let reserved = bytes.next_multiple_of(ALIGNMENT);
                    let fits = |part: &&mut (u64, u64, u64, Option<u64>)| {
                        part.3 == Some(stream) && part.1 >= reserved && !quarantine.holds(1, part.1)
                    };
                    let tightest = parts.iter_mut().filter(fits).min_by_key(|part| (part.1, part.0));
                    prop_assert_eq!(arena.reuse(bytes, stream), tightest.as_ref().map(|part| part.0));
                    if let Some(part) = tightest {
                        live.push((part.0, bytes, Owner::StreamOrdered));
                        (part.0, part.1) = (part.0 + reserved, part.1 - reserved);
                    }
                    parts.retain(|part| part.1 > 0);
                }
                Step::Free(index) if !live.is_empty() => {
                    let (offset, ..) = live.swap_remove(index % live.len());
                    free(&mut arena, offset);
                }
                Step::Retire(index, stream) if !live.is_empty() => {
                    let (offset, ..) = live.swap_remove(index % live.len());
                    let block = arena.retire(offset).unwrap();
                    if let Some(stream) = stream {
                        arena.offer(offset, block.serial, stream);
                    }
                    retired.push((offset, block));
                    parts.push((offset, block.reserved(), block.serial, stream));
                }
                Step::Release(index) if !retired.is_empty() => {
                    let (offset, block) = retired.swap_remove(index % retired.len());
                    release(&mut arena, offset, block);
                    parts.retain(|part| part.2 != block.serial);
                }
                _ => {}
            }
            let left = parts.iter().map(|&(offset, length, ..)| (offset, length, Owner::Plain));
            let mut taken: Vec<_> = live.iter().copied().chain(left).collect();
            taken.sort_unstable_by_key(|&(offset, ..)| offset);
            for pair in taken.windows(2) {
                prop_assert!(pair[0].0 + pair[0].1 <= pair[1].0);
            }
            for &(offset, bytes, owner) in &taken {
                prop_assert!(offset % owner.granule() == 0 && offset + bytes <= CAPACITY);
            }
            prop_assert_eq!(arena.retiring_bytes(), parts.iter().map(|part| part.1).sum::<u64>());
            let reserved: u64 = taken.iter().map(|&(_, bytes, owner)| bytes.next_multiple_of(owner.granule())).sum();
            prop_assert_eq!(arena.free_bytes(), CAPACITY - reserved);
            let callers = live.iter().filter(|&&(.., owner)| owner != Owner::Mock).count();
            prop_assert_eq!(arena.callers_blocks(), callers as u64);
            let gaps: Vec<_> = arena.gaps.iter().map(|(&offset, &length)| (offset, length)).collect();
            let quarantined: u64 = arena.quarantined.iter().map(|block| block.1).sum();
            prop_assert_eq!(quarantined, arena.quarantined_bytes);
            prop_assert!(quarantined == 0 || quarantine.holds(arena.quarantined.len(), quarantined));
            prop_assert_eq!(gaps.iter().map(|gap| gap.1).sum::<u64>() + quarantined, arena.free_bytes());
            prop_assert!(gaps.windows(2).all(|pair| pair[0].0 + pair[0].1 < pair[1].0), "gaps touch: {:?}", gaps);
            let by_length: BTreeSet<_> = gaps.iter().map(|&(offset, length)| (length, offset)).collect();
            prop_assert_eq!(&by_length, &arena.gaps_by_length);
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn blocks_never_overlap_bytes_add_up_and_gaps_merge(
            steps in prop::collection::vec(step(), 1..200),
            frees in prop::option::of(0usize..8),
            bytes in prop::option::of(0u64..20_000),
        ) {
            walk(steps, Quarantine { bytes, frees })?;
        }
    }
}
