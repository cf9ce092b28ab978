//! [`Event`]: a mark in a stream.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::capture::recording::Capture;
use crate::pool::completion_events::CompletionEvent;
use crate::runtime::Runtime;
use crate::services::Dropped;
use highwater_hal::{EventId, Result};

/// A mark in a stream, made by [`Stream::record`](crate::Stream::record).
#[derive(Debug)]
pub struct Event {
    runtime: Runtime,
    pub(crate) id: EventId,
    /// The event's place in the pool; `None` for one with timing.
    pooled: Option<CompletionEvent>,
    /// Whether the id was given away: such an event does not go back to the pool, because its record could be moved behind
    /// the back of the next user, who frees memory by it.
    exposed: AtomicBool,
    /// The capture that the event was recorded in.
    capture: Option<Arc<Capture>>,
}

impl Event {
    pub(crate) fn pooled(runtime: Runtime, mark: CompletionEvent, capture: Option<Arc<Capture>>) -> Self {
        Self { runtime, id: mark.event(), pooled: Some(mark), exposed: AtomicBool::new(false), capture }
    }

    pub(crate) fn timed(runtime: Runtime, id: EventId) -> Self {
        Self { runtime, id, pooled: None, exposed: AtomicBool::new(false), capture: None }
    }

    pub(crate) fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    pub(crate) fn capture(&self) -> Option<&Arc<Capture>> {
        self.capture.as_ref()
    }

    /// Refuses to ask for an event that was recorded in a capture.
    fn check(&self, operation: &'static str) -> Result<()> {
        self.runtime.inner.check(operation)?;
        self.capture.as_ref().map_or(Ok(()), |capture| Err(capture.no_answer(operation)))
    }

    /// The event's id, for calls of the backend itself.
    #[must_use]
    pub fn id(&self) -> EventId {
        self.exposed.store(true, Ordering::Relaxed);
        self.id
    }

    /// Whether the stream has passed the mark; does not wait.
    ///
    /// # Errors
    /// `Capture` where the mark was made in a capture; else what the backend gives, and an error of the work before the
    /// mark may show up here.
    pub fn is_complete(&self) -> Result<bool> {
        self.check("query_event")?;
        Ok(self.runtime.inner.backend.query_event(self.id)?.is_complete())
    }

    /// Waits until the stream has passed the mark.
    ///
    /// # Errors
    /// As [`Event::is_complete`].
    pub fn synchronize(&self) -> Result<()> {
        self.check("synchronize_event")?;
        self.runtime.inner.backend.synchronize_event(self.id)
    }

    /// Nanoseconds from this mark to a later one, both made by [`Stream::record_timed`](crate::Stream::record_timed).
    ///
    /// # Errors
    /// `InvalidArgument` where one has no timing, `InvalidState` where one is not passed yet, `Capture` where one was made
    /// in a capture.
    pub fn elapsed_ns(&self, later: &Self) -> Result<u64> {
        self.check("event_elapsed_ns")?;
        later.check("event_elapsed_ns")?;
        self.runtime.inner.backend.event_elapsed_ns(self.id, later.id)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let pooled = self.pooled.take();
        if !self.runtime.inner.may_release() {
            // The driver is not called; the mark itself only touches the pool, and not even that in a forked child.
            return;
        }
        let exposed = *self.exposed.get_mut();
        // Nothing is known of what touching an event would do to the capture that it belongs to.
        let pooled = match (&self.capture, pooled) {
            (Some(capture), Some(mark)) => match capture.keep_event(mark, exposed) {
                Some(mark) => Some(mark),
                None => return,
            },
            (_, pooled) => pooled,
        };
        let to_destroy = match pooled {
            Some(mark) if !exposed => return drop(mark),
            Some(mark) => mark.into_event(),
            None => self.id,
        };
        // A refusal is counted and tried again.
        let _ = self.runtime.inner.destroy(Dropped::Event(to_destroy));
    }
}
