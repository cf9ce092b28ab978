//! The uses of page-locked memory by a stream: which of them share a completion event, and who records it.
//!
//! A small use joins the open batch of the stream (`pool/use_batches.rs`). The thread that enqueues records a full batch, under
//! the submission lock that it already holds. A thread that needs memory, or waits for a use, closes the batch of the stream
//! that it needs. These uses close the batch at once, and have a completion event directly behind their work:
//!
//! - writes of host memory, so that [`read`](crate::PinnedBuffer::read) never waits for later work;
//! - uses of blocks of 4 MiB or more;
//! - uses of a block for which a caller has waited before, such as a buffer that is refilled after each copy;
//! - uses by streams that other code owns.

use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use super::core::StreamCore;
use super::submission::{SubmissionGuard, SubmissionState};
use crate::pool::block::Block;
use crate::pool::completion_events::{CloseBatch, CompletionEvent, Point, Recorder, WaitForEnd, never_recorded};
use crate::pool::use_batches::MOST_BYTES;
use highwater_hal::{AnyId, Result};

thread_local! {
    /// The key of the stream on which the thread last used page-locked memory; 0 before the first use.
    static LAST_USED: Cell<u64> = const { Cell::new(0) };
}

/// Returns the key of the stream on which the calling thread last used page-locked memory.
pub(crate) fn last_used_stream() -> u64 {
    LAST_USED.get()
}

impl StreamCore {
    /// Returns the event of the next batch if none is open, so that it is not created under the submission lock. Bind it before
    /// the lock, so that it goes back to its pool after the lock if a call fails.
    pub(crate) fn event_for_use(&self) -> Result<Option<CompletionEvent>> {
        // Relaxed: only a hint. `prepare_use` looks again.
        if self.has_batch.load(Ordering::Relaxed) { Ok(None) } else { self.take_event().map(Some) }
    }

    fn take_event(&self) -> Result<CompletionEvent> {
        self.services.device(self.id.device()).events.take(&*self.services.backend)
    }

    /// Makes sure that a use can join a batch. Call it before the work is enqueued, so that only a record can fail afterward.
    pub(crate) fn prepare_use(
        &self,
        submission: &mut SubmissionState,
        event: &mut Option<CompletionEvent>,
    ) -> Result<()> {
        if submission.batch.get().is_none() && submission.spare.is_none() {
            submission.spare = match event.take() {
                Some(event) => Some(event),
                None => Some(self.take_event()?),
            };
        }
        Ok(())
    }

    /// Adds a use of a block, whose work is enqueued, to the open batch, and returns the completion event of the batch. The
    /// caller must have held the submission lock since [`prepare_use`](Self::prepare_use).
    ///
    /// # Errors
    /// The error of the record, for a use that needs it at once. The caller must then wait for the stream.
    pub(crate) fn note_use(
        self: &Arc<Self>,
        submission: &mut SubmissionState,
        block: &Block,
        writes: bool,
    ) -> Result<Arc<CompletionEvent>> {
        LAST_USED.set(self.key);
        if let Some(spare) = submission.spare.take() {
            submission.completions += 1;
            let point = Point { stream: self.key, number: submission.completions };
            let stream = Arc::downgrade(self) as Weak<dyn CloseBatch>;
            let recorder = Recorder { stream, end: Arc::downgrade(&self.end()) as Weak<dyn WaitForEnd> };
            submission.batch.open(spare.open(point, recorder));
            self.has_batch.store(true, Ordering::Relaxed);
        }
        let (batch, is_full) = submission.batch.join(block.bytes()).ok_or_else(never_recorded)?;
        let at_once = writes || self.records_at_use || block.bytes() >= MOST_BYTES || block.uses.is_awaited();
        if at_once || is_full {
            match self.record_batch(submission) {
                Err(error) if at_once => return Err(error),
                // The next use, or a thread that needs the memory, tries again.
                Err(error) => tracing::debug!("a batch of uses stays open: {error}"),
                Ok(_) => {}
            }
        }
        Ok(batch)
    }

    /// Records and closes the open batch, and returns its completion event. `None` if no batch is open.
    pub(super) fn record_batch(&self, submission: &mut SubmissionState) -> Result<Option<Arc<CompletionEvent>>> {
        if let Some(batch) = submission.batch.get() {
            self.services.backend.record_event(batch.event(), self.id)?;
            batch.progress().set_recorded();
        }
        Ok(self.take_batch(submission))
    }

    fn take_batch(&self, submission: &mut SubmissionState) -> Option<Arc<CompletionEvent>> {
        let batch = submission.batch.close();
        if batch.is_some() {
            self.has_batch.store(false, Ordering::Relaxed);
        }
        batch
    }

    /// Waits for the uses of the open batch, at the end of a stream that could not record it.
    #[cold]
    pub(super) fn wait_for_batch(&self) {
        let Some(batch) = self.take_batch(&mut self.lock_submission()) else { return };
        match self.services.backend.synchronize_stream(self.id) {
            Ok(()) => {
                self.services.share(AnyId::Stream(self.id));
                batch.progress().set_passed();
            }
            // The blocks wait for the end of the runtime.
            Err(error) => self.services.count_failed_release(&error),
        }
    }
}

impl CloseBatch for StreamCore {
    /// Closes the batch as passed if the stream has executed everything, else by a record.
    #[cold]
    fn close_batch(&self, batch: &CompletionEvent, wait: bool) -> Result<bool> {
        let mut submission: SubmissionGuard<'_> = match self.submission.try_lock() {
            Some(submission) => submission.into(),
            None if wait => self.lock_submission(),
            None => return Ok(false),
        };
        if batch.progress().is_closed() {
            return Ok(true);
        }
        // A query or a record would invalidate a capture by other code, or become part of it.
        self.refuse_if_captured("record_event")?;
        if !wait && self.services.is_stream_idle(self.id) {
            // No record is needed. The open batch is closed under the same hold of the lock, so no later use joins it.
            let closed = self.take_batch(&mut submission);
            drop(submission);
            closed.iter().for_each(|closed| closed.progress().set_passed());
            batch.progress().set_passed();
            return Ok(true);
        }
        let Err(error) = self.record_batch(&mut submission) else {
            return if batch.progress().is_closed() { Ok(true) } else { Err(never_recorded()) };
        };
        if !wait {
            return Err(error);
        }
        // Without a record, the only remaining option is to wait. No later use may join the batch in the meantime.
        let closed = self.take_batch(&mut submission);
        self.wait_for_all(submission)?;
        self.services.share(AnyId::Stream(self.id));
        closed.iter().for_each(|closed| closed.progress().set_passed());
        batch.progress().set_passed();
        Ok(true)
    }
}
