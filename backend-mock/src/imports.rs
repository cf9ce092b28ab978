//! Memory of other processes, or of other devices of this one, that is open for a device, and memory that is mapped at
//! reserved addresses; and its addresses on the device.
//!
//! Closed memory and a range that was given back leave their addresses to the next request of the same size. Work that
//! still uses a closed address meets nothing, or the memory that was opened there since. Other requests get
//! rising addresses.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::mapping::Mapping;
use crate::sealed_file::{FileId, page_bytes};

/// The bytes of addresses that each device has for opened memory.
const WINDOW: u64 = 1 << 52;

/// The free addresses that are kept for the next requests of their size.
const MOST_FREED: usize = 256;

/// The memory that is open, and its identity when it is opened again. A block that was freed and allocated again in the
/// same place is another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Source {
    pub(crate) file: FileId,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    pub(crate) serial: u64,
}

#[derive(Debug)]
struct Import {
    mapping: Arc<Mapping>,
    source: Source,
    opens: u64,
    /// True if the memory was mapped at reserved addresses. Copies may then continue into the mapping behind it.
    is_mapped: bool,
}

#[derive(Debug)]
pub(crate) struct Imports {
    /// The first offset of the window.
    start: u64,
    /// The offset in the window of the next one, if it fits there.
    next: u64,
    open: BTreeMap<u64, Import>,
    /// The bytes of each reserved range, by its offset.
    reserved: BTreeMap<u64, u64>,
    offsets: BTreeMap<Source, u64>,
    /// Offset and bytes of ranges that are free again, the latest last.
    freed: VecDeque<(u64, u64)>,
}

impl Imports {
    /// Creates the empty table of the device with this ordinal.
    pub(crate) fn new(ordinal: u32) -> Self {
        let start = (u64::from(ordinal) + 1) * WINDOW;
        Self {
            start,
            next: 0,
            open: BTreeMap::new(),
            reserved: BTreeMap::new(),
            offsets: BTreeMap::new(),
            freed: VecDeque::new(),
        }
    }

    /// Counts one more open of memory that is open, and returns its offset.
    pub(crate) fn open_again(&mut self, source: &Source) -> Option<u64> {
        let offset = *self.offsets.get(source)?;
        self.open.get_mut(&offset)?.opens += 1;
        Some(offset)
    }

    /// Adds memory that was not open, and returns its offset; `None` if no addresses are left.
    pub(crate) fn insert(&mut self, source: Source, mapping: Mapping) -> Option<u64> {
        let offset = match self.freed_last(mapping.bytes(), 0, page_bytes()) {
            Some(offset) => offset,
            None => self.place(mapping.bytes())?,
        };
        self.open.insert(offset, Import { mapping: Arc::new(mapping), source, opens: 1, is_mapped: false });
        self.offsets.insert(source, offset);
        Some(offset)
    }

    /// Reserves addresses, which go to nothing else until [`Imports::unreserve`]. `base` is the address of offset 0, and
    /// the address is a multiple of `alignment`. Returns the offset; `None` if no addresses are left.
    pub(crate) fn reserve(&mut self, base: u64, bytes: u64, alignment: u64) -> Option<u64> {
        let offset = match self.freed_last(bytes, base, alignment) {
            Some(offset) => offset,
            None => (base + self.place(bytes.checked_add(alignment)?)?).checked_next_multiple_of(alignment)? - base,
        };
        self.reserved.insert(offset, bytes);
        Some(offset)
    }

    /// Ends a reservation.
    pub(crate) fn unreserve(&mut self, offset: u64) {
        if let Some(bytes) = self.reserved.remove(&offset) {
            self.note_freed(offset, bytes);
        }
    }

    /// Adds a mapping at a reserved offset, of this device or another. Returns false if memory is open there.
    pub(crate) fn insert_at(&mut self, offset: u64, source: Source, mapping: Mapping) -> bool {
        let end = offset + mapping.bytes();
        let overlaps = |start: u64, other: &Import| start < end && offset < start + other.mapping.bytes();
        if self.open.range(..end).next_back().is_some_and(|(&start, other)| overlaps(start, other)) {
            return false;
        }
        self.open.insert(offset, Import { mapping: Arc::new(mapping), source, opens: 1, is_mapped: true });
        true
    }

    /// Closes memory once. Returns `None` if no memory is open at the offset, else the mapping if that was the last
    /// open.
    pub(crate) fn close(&mut self, offset: u64) -> Option<Option<Arc<Mapping>>> {
        let import = self.open.get_mut(&offset)?;
        import.opens -= 1;
        if import.opens > 0 {
            return Some(None);
        }
        let import = self.open.remove(&offset)?;
        if !import.is_mapped {
            self.offsets.remove(&import.source);
            self.note_freed(offset, import.mapping.bytes());
        }
        Some(Some(import.mapping))
    }

    /// Returns the mapping that holds an offset, and the offset inside it.
    pub(crate) fn mapping(&self, offset: u64) -> Option<(Arc<Mapping>, u64)> {
        let (start, import) = self.around(offset)?;
        (offset - start < import.mapping.bytes()).then(|| (Arc::clone(&import.mapping), offset - start))
    }

    /// Returns the start and the bytes of memory of another process that is open around an offset.
    pub(crate) fn opened(&self, offset: u64) -> Option<(u64, u64)> {
        let (start, import) = self.around(offset).filter(|(_, import)| !import.is_mapped)?;
        (offset - start < import.source.bytes).then_some((start, import.source.bytes))
    }

    /// Returns the inode of the file that holds an offset, the offset in the file, and how many bytes lie there in a row.
    pub(crate) fn source(&self, offset: u64) -> Option<(u64, u64, u64)> {
        let (start, import) = self.around(offset)?;
        let inside = offset - start;
        let left = import.mapping.bytes().checked_sub(inside).filter(|&left| left > 0)?;
        Some((import.source.file.inode, import.source.offset + inside, left))
    }

    /// Returns whether a range lies inside one open block, or inside memory that is mapped without a gap.
    pub(crate) fn contains(&self, offset: u64, bytes: u64) -> bool {
        let Some(((start, mut import), end)) = self.around(offset).zip(offset.checked_add(bytes)) else { return false };
        let mut reached = start + import.source.bytes;
        while reached < end && import.is_mapped {
            match self.open.get(&reached) {
                Some(next) if next.is_mapped => (reached, import) = (reached + next.source.bytes, next),
                _ => return false,
            }
        }
        end <= reached
    }

    /// Returns how many blocks of other processes are open, each counted once.
    pub(crate) fn count(&self) -> u64 {
        self.open.values().filter(|import| !import.is_mapped).count() as u64
    }

    fn around(&self, offset: u64) -> Option<(u64, &Import)> {
        self.open.range(..=offset).next_back().map(|(&start, import)| (start, import))
    }

    fn note_freed(&mut self, offset: u64, bytes: u64) {
        if self.freed.len() == MOST_FREED {
            self.freed.pop_front();
        }
        self.freed.push_back((offset, bytes));
    }

    /// Returns the offset of the range of that many bytes that was free again last, at an address that is a multiple of
    /// `alignment`. `base` is the address of offset 0.
    fn freed_last(&mut self, bytes: u64, base: u64, alignment: u64) -> Option<u64> {
        loop {
            let fits = |&(offset, length): &(u64, u64)| length == bytes && (base + offset).is_multiple_of(alignment);
            let (offset, _) = self.freed.iter().rposition(fits).and_then(|index| self.freed.remove(index))?;
            // Another request may have got some of the addresses since.
            let free = self.place_from(offset - self.start, bytes + page_bytes());
            if free == Some(offset - self.start) {
                return Some(offset);
            }
        }
    }

    /// Returns an offset with that many free bytes behind it, and a page that stays free.
    fn place(&mut self, bytes: u64) -> Option<u64> {
        let length = bytes.checked_add(page_bytes())?;
        let offset = self.place_from(self.next, length).or_else(|| self.place_from(0, length))?;
        self.next = offset + length;
        Some(self.start + offset)
    }

    fn place_from(&self, from: u64, length: u64) -> Option<u64> {
        let mut start = self.start + from;
        loop {
            let end = start.checked_add(length).filter(|&end| end <= self.start + WINDOW)?;
            let open = self.open.range(..end).next_back().map(|(&at, import)| at + import.mapping.bytes());
            let reserved = self.reserved.range(..end).next_back().map(|(&at, &bytes)| at + bytes);
            match open.max(reserved).map(|taken| taken + page_bytes()).filter(|&taken| taken > start) {
                Some(taken) => start = taken,
                None => return Some(start - self.start),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sealed_file;

    fn import(imports: &mut Imports, pages: u64, serial: u64) -> u64 {
        let bytes = pages * page_bytes();
        let file = sealed_file::create("test", bytes).unwrap();
        // SAFETY: the file was just made with this size and sealed.
        let mapping = unsafe { Mapping::new(&file, 0, bytes) }.unwrap();
        let source = Source { file: sealed_file::identify(&file).unwrap(), offset: 0, bytes, serial };
        imports.insert(source, mapping).unwrap()
    }

    #[test]
    fn a_closed_address_comes_again_at_once_for_the_same_size() {
        let mut imports = Imports::new(0);
        let page = page_bytes();
        let (first, second) = (import(&mut imports, 1, 1), import(&mut imports, 2, 2));
        assert!(second >= first + 2 * page);
        assert_eq!((imports.contains(first, page), imports.contains(first, page + 1)), (true, false));
        assert!(imports.mapping(second + 2 * page).is_none() && imports.mapping(first - 1).is_none());
        assert!(imports.close(first).is_some_and(|last| last.is_some()));
        assert!(imports.close(first).is_none());
        let third = import(&mut imports, 2, 3);
        assert!(third > second, "another size");
        assert_eq!(import(&mut imports, 1, 4), first);
        imports.close(first).unwrap();
        imports.close(third).unwrap();
        assert_eq!([import(&mut imports, 2, 5), import(&mut imports, 1, 6)], [third, first]);
        // As if all the addresses up to the end had been used.
        imports.next = WINDOW - page;
        let last = import(&mut imports, 8, 7);
        assert!(last >= third + 2 * page, "{last:#x} lies in the blocks up to {third:#x}");
        assert_eq!(imports.count(), 4);
        assert_ne!(import(&mut Imports::new(1), 1, 1), first);
    }

    #[test]
    fn a_closed_address_of_which_another_request_has_a_part_does_not_come_again() {
        let (mut imports, page) = (Imports::new(0), page_bytes());
        let first = import(&mut imports, 4, 1);
        imports.close(first).unwrap();
        imports.next = 0;
        let other = import(&mut imports, 2, 2);
        assert_eq!(other, first);
        let again = import(&mut imports, 4, 3);
        assert!(again >= other + 3 * page, "{again:#x} overlaps the block at {other:#x}");
    }

    #[test]
    fn reserved_addresses_go_to_nothing_else_until_they_are_free() {
        let (mut imports, page) = (Imports::new(0), page_bytes());
        let reserved = imports.reserve(page, 4 * page, 16 * page).unwrap();
        assert!((page + reserved).is_multiple_of(16 * page));
        imports.next = 0;
        let other = import(&mut imports, 40, 1);
        assert!(other >= reserved + 4 * page, "{other:#x} overlaps the reservation at {reserved:#x}");
        imports.unreserve(reserved);
        assert_eq!(imports.reserve(page, 4 * page, 16 * page), Some(reserved));
        imports.unreserve(reserved);
        assert_eq!(import(&mut imports, 4, 2), reserved, "opened memory of the same size");
    }
}
