//! Counts in shared memory: one word for each allocation that one importer has opened, or may open without a request.
//!
//! Only the exporter and the importer map a word. They agree by single atomic operations on it, so neither can die in the
//! middle of one. No lock exists that a dead process could hold.
//!
//! | bits | meaning |
//! | --- | --- |
//! | 0 to 31 | number of times that the importer has the allocation open |
//! | 32 to 61 | generation: tells apart the allocations that use this slot in succession |
//! | 62 | `MAPPED`: the importer may still map the memory |
//! | 63 | `CLOSED`: the owner has dropped the buffer, or the exporter has withdrawn a prepared open |
//!
//! | step | process | effect on the word |
//! | --- | --- | --- |
//! | [`Slot::grant`] | exporter, answering an open | sets the generation and `MAPPED`, adds 1 to the count |
//! | [`Slot::prepare`] | exporter, at a share | sets the generation. The importer can then open the allocation without a request |
//! | [`Slot::take`] | importer, memory not mapped | sets `MAPPED` and adds 1 to the count, unless `CLOSED`, `MAPPED` or another generation |
//! | [`Slot::acquire`] | importer, mapping kept | adds 1 to the count unless `CLOSED`, not `MAPPED` or another generation |
//! | [`Slot::release`] | importer, its device work done | subtracts 1 from the count |
//! | [`Slot::close`] | exporter, when the owner drops the buffer | sets `CLOSED`; the exporter frees the allocation once no importer holds it |
//! | [`Slot::unmapped`] | importer, mapping removed | clears `MAPPED` |
//! | [`Slot::withdraw`] | exporter, before it forgets a live importer | sets `CLOSED` if the count is 0 and the memory is not `MAPPED` |
//!
//! *No early free.* `close`, `withdraw`, `acquire` and `take` are read-modify-writes of one word, so one comes first. Either the
//! importer sees `CLOSED`, or the exporter sees the count. *No lost free.* The step that leaves a closed word without a holder raises the flag
//! of the word afterwards. The exporter reads the word after the flag. *Orderings.* `release` and `unmapped` are release
//! operations; `close` and [`Slot::is_held`] acquire. So everything that the importer did to the memory happens before the
//! exporter uses it again. Flags are raised with release and drained with acquire for the same reason. `open_count.rs` decides
//! which thread of the importer unmaps.

use crate::primitive::{AtomicU64, Ordering};

const COUNT: u64 = u32::MAX as u64;
const GENERATION_SHIFT: u32 = 32;
const GENERATION: u64 = ((1 << 30) - 1) << GENERATION_SHIFT;
const MAPPED: u64 = 1 << 62;
const CLOSED: u64 = 1 << 63;

/// Returns the low bits of an allocation's serial number, shifted into place.
const fn generation_of(serial: u64) -> u64 {
    (serial << GENERATION_SHIFT) & GENERATION
}

/// An allocation as seen by one importer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slot<'t> {
    word: &'t AtomicU64,
    generation: u64,
}

/// The result of an attempt to open an allocation that is already mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Acquired {
    /// Counted.
    Yes,
    /// The owner has dropped the buffer.
    Closed,
    /// The word records no mapping, or its count is at the maximum.
    NotMapped,
}

impl<'t> Slot<'t> {
    pub(crate) fn new(word: &'t AtomicU64, serial: u64) -> Self {
        Self { word, generation: generation_of(serial) }
    }

    fn is_of_this(self, word: u64) -> bool {
        word & GENERATION == self.generation
    }

    /// Counts one open on behalf of the importer. Returns `false` if the count is already 2^32 - 1.
    pub(crate) fn grant(self) -> bool {
        let mut word = self.word.load(Ordering::Acquire);
        loop {
            let count = if self.is_of_this(word) { word & COUNT } else { 0 };
            if count == COUNT {
                return false;
            }
            let next = self.generation | MAPPED | (count + 1);
            match self.word.compare_exchange_weak(word, next, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return true,
                Err(now) => word = now,
            }
        }
    }

    /// Returns whether the word is of this allocation: an open was prepared or granted.
    pub(crate) fn is_known(self) -> bool {
        self.is_of_this(self.word.load(Ordering::Acquire))
    }

    /// Prepares an open for the importer. Returns `false` if the word is of this allocation, or changes meanwhile. The caller must store
    /// the handle before the call. After `true`, it must note that the importer may hold the allocation.
    pub(crate) fn prepare(self) -> bool {
        let word = self.word.load(Ordering::Acquire);
        // If the importer changes the word of an earlier allocation meanwhile, it has to ask.
        !self.is_of_this(word)
            && self.word.compare_exchange(word, self.generation, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Returns the word for [`Slot::take`], if the importer may open the allocation and has not mapped it.
    pub(crate) fn prepared(self) -> Option<u64> {
        let word = self.word.load(Ordering::Acquire);
        (word == self.generation).then_some(word)
    }

    /// Counts the first open of a prepared allocation. The caller must then map the memory. Returns `false` if the word has changed since
    /// [`Slot::prepared`] returned it.
    pub(crate) fn take(self, prepared: u64) -> bool {
        let next = prepared | MAPPED | 1;
        self.word.compare_exchange(prepared, next, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Closes the word unless the importer has the allocation open or mapped. Returns `false` if it has.
    pub(crate) fn withdraw(self) -> bool {
        let mut word = self.word.load(Ordering::Acquire);
        while self.is_of_this(word) {
            if word & (COUNT | MAPPED) != 0 {
                return false;
            }
            match self.word.compare_exchange_weak(word, word | CLOSED, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return true,
                Err(now) => word = now,
            }
        }
        true
    }

    /// Counts one more open if the memory is mapped.
    #[inline]
    pub(crate) fn acquire(self) -> Acquired {
        let mut word = self.word.load(Ordering::Acquire);
        loop {
            if !self.is_of_this(word) || word & CLOSED != 0 {
                return Acquired::Closed;
            }
            if word & MAPPED == 0 || word & COUNT == COUNT {
                return Acquired::NotMapped;
            }
            match self.word.compare_exchange_weak(word, word + 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Acquired::Yes,
                Err(now) => word = now,
            }
        }
    }

    /// Releases one open. Returns `true` if it was the last of an allocation whose buffer the owner has dropped. The caller must
    /// then raise the flag for the exporter.
    #[inline]
    pub(crate) fn release(self) -> bool {
        let before = self.word.fetch_sub(1, Ordering::AcqRel);
        before & CLOSED != 0 && before & COUNT == 1
    }

    /// Undoes a [`Slot::grant`] that did not reach the importer. If it was the last open, the importer has no mapping either.
    pub(crate) fn take_back(self) {
        let mut word = self.word.load(Ordering::Acquire);
        while self.is_of_this(word) && word & COUNT != 0 {
            let mut next = word - 1;
            if next & COUNT == 0 {
                next &= !MAPPED;
            }
            match self.word.compare_exchange_weak(word, next, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return,
                Err(now) => word = now,
            }
        }
    }

    /// Closes the allocation for this importer. Returns whether the importer has a mapping to remove.
    pub(crate) fn close(self) -> bool {
        let before = self.word.fetch_or(CLOSED, Ordering::AcqRel);
        self.is_of_this(before) && before & MAPPED != 0
    }

    /// Returns whether the importer still holds the allocation; with `or_maps`, a mapping alone holds it too.
    pub(crate) fn is_held(self, or_maps: bool) -> bool {
        let word = self.word.load(Ordering::Acquire);
        self.is_of_this(word) && (word & COUNT != 0 || or_maps && word & MAPPED != 0)
    }

    /// Returns whether the owner has dropped the buffer.
    pub(crate) fn is_closed(self) -> bool {
        let word = self.word.load(Ordering::Acquire);
        !self.is_of_this(word) || word & CLOSED != 0
    }

    /// Records that the memory is no longer mapped. Returns `true` if the owner has dropped the buffer; the caller must then raise
    /// the flag.
    pub(crate) fn unmapped(self) -> bool {
        let mut word = self.word.load(Ordering::Acquire);
        while self.is_of_this(word) {
            match self.word.compare_exchange_weak(word, word & !MAPPED, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return word & CLOSED != 0,
                Err(now) => word = now,
            }
        }
        false
    }
}

/// A set of slots, raised by one process and drained by the other. A summary word marks the words of the set that are not zero,
/// so the cost of a drain depends on the raised slots and not on the size of the set.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Flags<'t> {
    bits: &'t [AtomicU64],
    summary: &'t [AtomicU64],
}

impl<'t> Flags<'t> {
    /// `summary` has a bit for each word of `bits`.
    pub(crate) fn new(bits: &'t [AtomicU64], summary: &'t [AtomicU64]) -> Self {
        debug_assert_eq!(bits.len(), summary.len() * 64);
        Self { bits, summary }
    }

    pub(crate) fn raise(self, slot: usize) {
        let word = slot / 64;
        self.bits[word].fetch_or(1 << (slot % 64), Ordering::AcqRel);
        // After the bit, so that a drain that sees the summary finds the bit.
        self.summary[word / 64].fetch_or(1 << (word % 64), Ordering::AcqRel);
    }

    /// Clears every raised slot and passes its number to `raised`.
    pub(crate) fn drain(self, mut raised: impl FnMut(usize)) {
        for (place, summary) in self.summary.iter().enumerate() {
            if summary.load(Ordering::Acquire) == 0 {
                continue;
            }
            for word in ones(summary.swap(0, Ordering::AcqRel)) {
                let word = place * 64 + word;
                for slot in ones(self.bits[word].swap(0, Ordering::AcqRel)) {
                    raised(word * 64 + slot);
                }
            }
        }
    }
}

/// Returns the positions of the bits that are set.
fn ones(mut word: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        if word == 0 {
            return None;
        }
        let place = word.trailing_zeros() as usize;
        word &= word - 1;
        Some(place)
    })
}
