//! Counts in shared memory: one word for each allocation that one importer has opened.
//!
//! Exporter and importer are the only two who map a word. They agree by single atomic operations on it, so neither can
//! die in the middle of one, and no lock exists that a dead process could hold.
//!
//! | bits | meaning |
//! | --- | --- |
//! | 0 to 31 | how often the importer has the allocation open |
//! | 32 to 61 | generation: which of the allocations that use this slot one after another |
//! | 62 | `MAPPED`: the importer may still map the memory |
//! | 63 | `CLOSED`: the exporter has freed the allocation; nobody opens it any more |
//!
//! | step | by | word |
//! | --- | --- | --- |
//! | [`Slot::grant`] | exporter, answering an open | sets generation and `MAPPED`, counts 1 up |
//! | [`Slot::acquire`] | importer, mapping kept | counts 1 up unless `CLOSED`, not `MAPPED` or another generation |
//! | [`Slot::release`] | importer, its device work done | counts 1 down |
//! | [`Slot::close`] | exporter, when it frees | sets `CLOSED`; nobody holds it if the count was 0 |
//! | [`Slot::unmapped`] | importer, its mapping taken down | takes `MAPPED` off |
//!
//! *Why nothing is freed early.* `close` and `acquire` are read-modify-writes of one word, so one comes first: either the
//! acquire sees `CLOSED`, or the close sees the count. *Why nothing is lost.* Whoever brings a closed word to a state that
//! nobody holds raises its flag afterwards, and the exporter looks at the word after the flag. *Orderings.* `release` and
//! `unmapped` are releases and `close` and [`Slot::is_held`] acquire, so that what the importer did to the memory happens
//! before the exporter uses it again; flags are raised by release and drained by acquire for the same reason. *Who unmaps*
//! is the importer's own affair: `open_count.rs`.

use crate::primitive::{AtomicU64, Ordering};

const COUNT: u64 = u32::MAX as u64;
const GENERATION_SHIFT: u32 = 32;
const GENERATION: u64 = ((1 << 30) - 1) << GENERATION_SHIFT;
const MAPPED: u64 = 1 << 62;
const CLOSED: u64 = 1 << 63;

/// Returns the bits of an allocation's serial number that fit a word, in place.
const fn generation_of(serial: u64) -> u64 {
    (serial << GENERATION_SHIFT) & GENERATION
}

/// One allocation as one importer has it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slot<'t> {
    word: &'t AtomicU64,
    generation: u64,
}

/// What came of an attempt to open an allocation that is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Acquired {
    /// Counted.
    Yes,
    /// The exporter has freed the allocation.
    Closed,
    /// The word says that there is no mapping, or counts as many opens as it can.
    NotMapped,
}

impl<'t> Slot<'t> {
    pub(crate) fn new(word: &'t AtomicU64, serial: u64) -> Self {
        Self { word, generation: generation_of(serial) }
    }

    fn is_of_this(self, word: u64) -> bool {
        word & GENERATION == self.generation
    }

    /// Counts the importer in, on its behalf. `false` where it counts 2^32 - 1 already.
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

    /// Counts one more open where the mapping stands.
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

    /// Counts one open down. `true` where that was the last of an allocation that the exporter has freed: then the
    /// exporter is told by a flag.
    #[inline]
    pub(crate) fn release(self) -> bool {
        let before = self.word.fetch_sub(1, Ordering::AcqRel);
        before & CLOSED != 0 && before & COUNT == 1
    }

    /// Takes back a [`Slot::grant`] that did not reach the importer: counts down, and where that was the last, the
    /// importer has no mapping either.
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

    /// Closes the allocation for this importer, and says whether it has a mapping that it should take down.
    pub(crate) fn close(self) -> bool {
        let before = self.word.fetch_or(CLOSED, Ordering::AcqRel);
        self.is_of_this(before) && before & MAPPED != 0
    }

    /// Returns whether the importer still holds the allocation; with `or_maps`, a mapping alone holds it too.
    pub(crate) fn is_held(self, or_maps: bool) -> bool {
        let word = self.word.load(Ordering::Acquire);
        self.is_of_this(word) && (word & COUNT != 0 || or_maps && word & MAPPED != 0)
    }

    /// Returns whether the exporter has freed the allocation.
    pub(crate) fn is_closed(self) -> bool {
        let word = self.word.load(Ordering::Acquire);
        !self.is_of_this(word) || word & CLOSED != 0
    }

    /// Notes that the memory is no longer mapped. Returns `true` if the exporter has freed it, and is told by a flag.
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

/// A set of slots by number, raised by one process and drained by the other. A summary word tells which words of the set
/// are worth a look, so draining costs what was raised and not what there is.
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
        // After the bit: who drains the summary finds it.
        self.summary[word / 64].fetch_or(1 << (word % 64), Ordering::AcqRel);
    }

    /// Takes every raised slot down and names it.
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

/// Returns the places of the bits that are set.
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
