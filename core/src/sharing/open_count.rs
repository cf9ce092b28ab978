//! The number of times that an import is open in this process, and whether it is being unmapped. The count shared with the
//! exporter also contains the opens. But another process can write that word, so it must not decide about addresses of this
//! process.
//!
//! | step | caller | effect on the count |
//! | --- | --- | --- |
//! | [`OpenCount::enter`] | an open | adds 1 unless the import is gone |
//! | [`OpenCount::leave`] | a release | subtracts 1; the last release then checks for a reason to unmap |
//! | [`OpenCount::try_gone`] | an unmap | marks the import as gone if the count is 0 |
//! | [`OpenCount::stays`] | an unmap that the backend refused | sets 0 again; the caller retries later |
//!
//! *No unmap while open.* `enter` and `try_gone` are read-modify-writes of one word, so one comes first. Either the enter finds
//! the import gone, or `try_gone` finds it open. *No lost unmap.* Two threads can do the unmap. One finds a reason (the
//! exporter has freed the allocation or has ended) and then finds the import open. The other releases the import last and then
//! finds no reason. A sequentially consistent fence between the two steps of each thread excludes that both happen.

use crate::primitive::{AtomicU64, Ordering, fence};

/// Being unmapped, or unmapped.
const GONE: u64 = 1 << 63;

/// The number of times that an import is open in this process.
#[derive(Debug)]
pub(crate) struct OpenCount(AtomicU64);

impl OpenCount {
    /// Open once.
    pub(crate) fn open() -> Self {
        Self(AtomicU64::new(1))
    }

    /// Counts one more open, which keeps the memory mapped. Returns `false` if the import is gone.
    #[inline]
    pub(crate) fn enter(&self) -> bool {
        let once_more = |open: u64| (open & GONE == 0).then_some(open + 1);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, once_more).is_ok()
    }

    /// Releases one open. Returns `true` if it was the last. The caller then checks for a reason to unmap.
    #[inline]
    pub(crate) fn leave(&self) -> bool {
        let was_last = self.0.fetch_sub(1, Ordering::AcqRel) == 1;
        fence(Ordering::SeqCst);
        was_last
    }

    /// Undoes [`OpenCount::try_gone`] for the caller that got `true`: the memory is still mapped. The caller must retry later,
    /// because reasons found in the meantime had no effect.
    pub(crate) fn stays(&self) {
        self.0.store(0, Ordering::Release);
    }

    /// Returns whether a buffer has the import open.
    pub(crate) fn is_open(&self) -> bool {
        let open = self.0.load(Ordering::Acquire);
        open & GONE == 0 && open != 0
    }

    /// Returns whether the import is unmapped or about to be.
    pub(crate) fn is_gone(&self) -> bool {
        self.0.load(Ordering::Acquire) & GONE != 0
    }

    /// Marks the import as gone if it is not open. Call it after a reason to unmap was found. Returns `true` to one caller,
    /// which unmaps.
    pub(crate) fn try_gone(&self) -> bool {
        fence(Ordering::SeqCst);
        self.0.compare_exchange(0, GONE, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}
