//! Whether an import is open in this process or being unmapped. The count that is shared with the exporter says how often
//! it is open too, but what another process can write decides nothing about addresses of this one.
//!
//! | step | by | count |
//! | --- | --- | --- |
//! | [`OpenCount::enter`] | who opens it | 1 up unless it is gone |
//! | [`OpenCount::leave`] | who has let go of it | 1 down; the last then asks whether it is to be unmapped |
//! | [`OpenCount::try_gone`] | who wants to unmap it | gone if the count was 0 |
//! | [`OpenCount::stays`] | the same, if the backend refused to unmap | 0 again; the caller tries again later |
//!
//! *Why nothing is unmapped while it is open.* `enter` and `try_gone` are read-modify-writes of one word, so one comes first:
//! either the enter finds it gone, or the other finds it open. *Why no unmapping is lost.* There are two who can do it: who
//! finds a reason (the exporter has freed the allocation, or has ended) and then finds it open, and who lets go of it last
//! and then finds no reason. With a sequentially consistent fence between the two steps of each, not both find that.

use crate::primitive::{AtomicU64, Ordering, fence};

/// Being unmapped, or unmapped.
const GONE: u64 = 1 << 63;

/// How often an import is open in this process.
#[derive(Debug)]
pub(crate) struct OpenCount(AtomicU64);

impl OpenCount {
    /// Open once.
    pub(crate) fn open() -> Self {
        Self(AtomicU64::new(1))
    }

    /// Counts one more open, which keeps it mapped; `false` where it is gone.
    #[inline]
    pub(crate) fn enter(&self) -> bool {
        let once_more = |open: u64| (open & GONE == 0).then_some(open + 1);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, once_more).is_ok()
    }

    /// Counts one open down. `true` where that was the last: the caller then looks for a reason to unmap it.
    #[inline]
    pub(crate) fn leave(&self) -> bool {
        let was_last = self.0.fetch_sub(1, Ordering::AcqRel) == 1;
        fence(Ordering::SeqCst);
        was_last
    }

    /// Undoes [`OpenCount::try_gone`] for the caller that got `true`: the memory is still mapped. The caller must try
    /// again later, because reasons found meanwhile had no effect.
    pub(crate) fn stays(&self) {
        self.0.store(0, Ordering::Release);
    }

    /// Returns whether it is unmapped, or about to be.
    pub(crate) fn is_gone(&self) -> bool {
        self.0.load(Ordering::Acquire) & GONE != 0
    }

    /// Takes it out of use where nobody has it open; called after a reason was found. `true` for one caller, who unmaps it.
    pub(crate) fn try_gone(&self) -> bool {
        fence(Ordering::SeqCst);
        self.0.compare_exchange(0, GONE, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}
