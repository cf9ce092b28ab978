//! Batches of uses of a stream: one completion event covers many small uses.
//!
//! The uses of a stream are numbered by batch. Each small use joins the open batch. The record of the batch's event closes it,
//! and later uses join the next. A use is over when the batch with its number is passed.
//!
//! | state of a batch | leaves by |
//! | --- | --- |
//! | open: work may be enqueued that no event follows | a record, or a wait for the whole stream |
//! | recorded | a query or a wait that finds the event passed |
//! | passed | - |
//!
//! All uses of a batch must precede the record. So the stream's submission lock guards the batch: a use joins after its work was
//! enqueued, and under the same hold of the lock. The record and the closing of the batch also share one hold. A use that
//! joins earlier, in a hold of its own, may be in a batch whose record precedes its work. Work that is enqueued between the
//! record and the closing would join a batch that does not cover it. `tests/loom_uses.rs` tries both wrong orders.

use crate::primitive::{Arc, AtomicU32, Ordering};

/// The most uses of a batch.
pub(crate) const MOST_USES: u32 = 32;
/// A batch is recorded once the blocks of its uses have so many bytes together.
pub(crate) const MOST_BYTES: usize = 4 << 20;

const OPEN: u32 = 0;
const RECORDED: u32 = 1;
const PASSED: u32 = 2;

/// How far a batch is. It only advances.
#[derive(Debug)]
pub(crate) struct Progress(AtomicU32);

impl Progress {
    pub(crate) fn new(is_recorded: bool) -> Self {
        Self(AtomicU32::new(if is_recorded { RECORDED } else { OPEN }))
    }

    // Acquire and Release: a thread that finds the batch recorded refers to its event, and one that finds it passed reuses the
    // memory.

    /// Returns whether the batch is recorded or passed.
    pub(crate) fn is_closed(&self) -> bool {
        self.0.load(Ordering::Acquire) != OPEN
    }

    pub(crate) fn is_passed(&self) -> bool {
        self.0.load(Ordering::Acquire) == PASSED
    }

    /// Notes the record. The caller must hold the submission lock.
    pub(crate) fn set_recorded(&self) {
        self.0.store(RECORDED, Ordering::Release);
    }

    /// Notes that the device has passed the batch. No use may join it anymore.
    pub(crate) fn set_passed(&self) {
        self.0.store(PASSED, Ordering::Release);
    }
}

/// The open batch of a stream. `E` is what its uses share. The submission lock guards it.
#[derive(Debug)]
pub(crate) struct OpenBatch<E> {
    open: Option<Arc<E>>,
    uses: u32,
    bytes: usize,
}

impl<E> Default for OpenBatch<E> {
    fn default() -> Self {
        Self { open: None, uses: 0, bytes: 0 }
    }
}

impl<E> OpenBatch<E> {
    /// Returns the open batch. `None` if all uses are in closed ones.
    pub(crate) fn get(&self) -> Option<&Arc<E>> {
        self.open.as_ref()
    }

    /// Opens a batch. None may be open.
    pub(crate) fn open(&mut self, batch: E) {
        *self = Self { open: Some(Arc::new(batch)), uses: 0, bytes: 0 };
    }

    /// Adds a use of a block of so many bytes, whose work is enqueued. Returns the batch, and whether it is full: then the
    /// caller must record it. `None` if no batch is open.
    pub(crate) fn join(&mut self, bytes: usize) -> Option<(Arc<E>, bool)> {
        let batch = Arc::clone(self.open.as_ref()?);
        self.uses += 1;
        self.bytes = self.bytes.saturating_add(bytes);
        Some((batch, self.uses >= MOST_USES || self.bytes >= MOST_BYTES))
    }

    /// Closes the batch. The caller has recorded it, or waits for the stream.
    pub(crate) fn close(&mut self) -> Option<Arc<E>> {
        std::mem::take(self).open
    }
}
