//! Memory of other processes, or of other devices of this one, that is open for a device, and its addresses on the
//! device.
//!
//! Addresses are handed out going up, and a closed one returns only after all the others. Work that still uses a closed
//! address meets nothing, not other memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::mapping::Mapping;
use crate::sealed_file::{FileId, page_bytes};

/// The bytes of addresses that each device has for opened memory.
const WINDOW: u64 = 1 << 52;

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
}

#[derive(Debug)]
pub(crate) struct Imports {
    /// The first offset of the window.
    start: u64,
    /// The offset in the window of the next one, if it fits there.
    next: u64,
    open: BTreeMap<u64, Import>,
    offsets: BTreeMap<Source, u64>,
}

impl Imports {
    /// Creates the empty table of the device with this ordinal.
    pub(crate) fn new(ordinal: u32) -> Self {
        Self { start: (u64::from(ordinal) + 1) * WINDOW, next: 0, open: BTreeMap::new(), offsets: BTreeMap::new() }
    }

    /// Counts one more open of memory that is open, and returns its offset.
    pub(crate) fn open_again(&mut self, source: &Source) -> Option<u64> {
        let offset = *self.offsets.get(source)?;
        self.open.get_mut(&offset)?.opens += 1;
        Some(offset)
    }

    /// Adds memory that was not open, and returns its offset; `None` if no addresses are left.
    pub(crate) fn insert(&mut self, source: Source, mapping: Mapping) -> Option<u64> {
        let offset = self.place(mapping.bytes())?;
        self.open.insert(offset, Import { mapping: Arc::new(mapping), source, opens: 1 });
        self.offsets.insert(source, offset);
        Some(offset)
    }

    /// Takes addresses that `insert` will not hand out before all the others; `None` if none are left.
    #[cfg(feature = "simulated")]
    pub(crate) fn reserve(&mut self, bytes: u64, alignment: u64) -> Option<u64> {
        let start = self.place(bytes.checked_add(alignment)?)?;
        Some(start.next_multiple_of(alignment))
    }

    /// Adds a mapping at an offset that `reserve` returned. Returns false if memory is open there.
    #[cfg(feature = "simulated")]
    pub(crate) fn insert_at(&mut self, offset: u64, source: Source, mapping: Mapping) -> bool {
        let end = offset + mapping.bytes();
        let overlaps = |start: u64, other: &Import| start < end && offset < start + other.mapping.bytes();
        if self.open.range(..end).next_back().is_some_and(|(&start, other)| overlaps(start, other)) {
            return false;
        }
        self.open.insert(offset, Import { mapping: Arc::new(mapping), source, opens: 1 });
        self.offsets.insert(source, offset);
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
        self.offsets.remove(&import.source);
        Some(Some(import.mapping))
    }

    /// Returns the mapping that holds an offset, and the offset inside it.
    pub(crate) fn mapping(&self, offset: u64) -> Option<(Arc<Mapping>, u64)> {
        let (start, import) = self.around(offset)?;
        (offset - start < import.mapping.bytes()).then(|| (Arc::clone(&import.mapping), offset - start))
    }

    /// Returns the inode of the file that holds an offset, and the offset in the file.
    pub(crate) fn source(&self, offset: u64) -> Option<(u64, u64)> {
        let (start, import) = self.around(offset)?;
        let inside = offset - start;
        (inside < import.mapping.bytes()).then(|| (import.source.file.inode, import.source.offset + inside))
    }

    /// Returns whether a range lies inside one open block.
    pub(crate) fn contains(&self, offset: u64, bytes: u64) -> bool {
        self.around(offset).is_some_and(|(start, import)| {
            offset.checked_add(bytes).is_some_and(|end| end <= start + import.source.bytes)
        })
    }

    /// Returns how many blocks are open, each counted once.
    pub(crate) fn count(&self) -> u64 {
        self.open.len() as u64
    }

    fn around(&self, offset: u64) -> Option<(u64, &Import)> {
        self.open.range(..=offset).next_back().map(|(&start, import)| (start, import))
    }

    /// Returns an offset with that many free bytes behind it, and a page that stays free.
    fn place(&mut self, bytes: u64) -> Option<u64> {
        let length = bytes.checked_add(page_bytes())?;
        let offset = self.place_from(self.next, length).or_else(|| self.place_from(0, length))?;
        self.next = offset + length;
        Some(self.start + offset)
    }

    fn place_from(&self, from: u64, length: u64) -> Option<u64> {
        let mut offset = from;
        if let Some((start, import)) = self.around(self.start + offset) {
            offset = offset.max(start - self.start + import.mapping.bytes() + page_bytes());
        }
        for (&start, import) in self.open.range(self.start + offset..) {
            if start - self.start >= offset.checked_add(length)? {
                break;
            }
            offset = start - self.start + import.mapping.bytes() + page_bytes();
        }
        (offset.checked_add(length)? <= WINDOW).then_some(offset)
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
    fn a_closed_address_comes_again_only_when_the_others_are_used_up() {
        let mut imports = Imports::new(0);
        let page = page_bytes();
        let (first, second) = (import(&mut imports, 1, 1), import(&mut imports, 2, 2));
        assert!(second >= first + 2 * page);
        assert_eq!((imports.contains(first, page), imports.contains(first, page + 1)), (true, false));
        assert!(imports.mapping(second + 2 * page).is_none() && imports.mapping(first - 1).is_none());
        assert!(imports.close(first).is_some_and(|last| last.is_some()));
        assert!(imports.close(first).is_none());
        let third = import(&mut imports, 1, 3);
        assert!(third > second);
        // As if all the addresses up to the end had been used.
        imports.next = WINDOW - page;
        assert_eq!(import(&mut imports, 1, 4), first);
        let last = import(&mut imports, 8, 5);
        assert!(last >= third + 2 * page, "{last:#x} lies in the blocks up to {third:#x}");
        assert_eq!(imports.count(), 4);
        assert_ne!(import(&mut Imports::new(1), 1, 1), first);
    }
}
