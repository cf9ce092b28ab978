//! [`Event`]: a point in the work of a stream.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use crate::capture::recording::Capture;
use crate::pool::completion_events::CompletionEvent;
use crate::runtime::Runtime;
use crate::services::Dropped;
use highwater_hal::{EventId, Result};

/// A point in the work of a stream, recorded by [`Stream::record`](crate::Stream::record). An event outlives its stream.
#[derive(Debug)]
pub struct Event {
    runtime: Runtime,
    pub(crate) id: EventId,
    /// Waits share it. The last user returns it to the pool.
    completion: ManuallyDrop<Arc<CompletionEvent>>,
    /// The capture that the event was recorded in.
    capture: Option<Arc<Capture>>,
}

impl Event {
    pub(crate) fn pooled(runtime: Runtime, mark: CompletionEvent, capture: Option<Arc<Capture>>) -> Self {
        Self { runtime, id: mark.event(), completion: ManuallyDrop::new(Arc::new(mark)), capture }
    }

    /// Returns an event that does not come from the pool, and does not return to it.
    pub(crate) fn unpooled(runtime: Runtime, device: u32, id: EventId) -> Self {
        let mark = runtime.inner.device(device).events.adopt(id);
        Self::pooled(runtime, mark, None)
    }

    pub(crate) fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    pub(crate) fn capture(&self) -> Option<&Arc<Capture>> {
        self.capture.as_ref()
    }

    /// Refuses a query of an event that was recorded in a capture.
    fn check(&self, operation: &'static str) -> Result<()> {
        self.runtime.inner.check(operation)?;
        self.capture.as_ref().map_or(Ok(()), |capture| Err(capture.no_answer(operation)))
    }

    /// Returns the event's id, for calls of the backend itself. The event then does not return to the pool.
    #[must_use]
    pub fn id(&self) -> EventId {
        self.completion.expose();
        self.id
    }

    /// Returns the completion event, for a wait.
    pub(crate) fn completion(&self, operation: &'static str) -> Result<Arc<CompletionEvent>> {
        self.check(operation).map(|()| Arc::clone(&self.completion))
    }

    /// Returns whether the stream has passed the event. Does not wait.
    ///
    /// # Errors
    /// `Capture` if the event was recorded in a capture; else the backend's error, or an error of the work before the event.
    pub fn is_complete(&self) -> Result<bool> {
        self.check("query_event")?;
        Ok(self.runtime.inner.backend.query_event(self.id)?.is_complete())
    }

    /// Waits until the stream has passed the event.
    ///
    /// # Errors
    /// The errors of [`Event::is_complete`].
    pub fn synchronize(&self) -> Result<()> {
        self.check("synchronize_event")?;
        self.runtime.inner.backend.synchronize_event(self.id)
    }

    /// Returns the nanoseconds from this event to a later one. [`Stream::record_timed`](crate::Stream::record_timed) records both.
    /// If `later` is the earlier of the two, returns 0.
    ///
    /// # Errors
    /// `InvalidArgument` if one has no timing, `InvalidState` if the stream has not passed one, `WrongDevice` if they belong to
    /// two devices, `Capture` if one was recorded in a capture.
    pub fn elapsed_ns(&self, later: &Self) -> Result<u64> {
        self.check("event_elapsed_ns")?;
        later.check("event_elapsed_ns")?;
        self.runtime.inner.backend.event_elapsed_ns(self.id, later.id)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: The event is not used afterward.
        let completion = unsafe { ManuallyDrop::take(&mut self.completion) };
        if !self.runtime.inner.may_release() {
            // The driver must not be called. The drop of `completion` touches only the pool, and nothing in a forked child.
            return;
        }
        // If a wait shares it, the end of that wait returns it.
        let Ok(mark) = Arc::try_unwrap(completion) else { return };
        let exposed = mark.is_exposed();
        // Touching an event could harm the capture that it belongs to.
        let mark = match &self.capture {
            Some(capture) => match capture.keep_event(mark, exposed) {
                Some(mark) => mark,
                None => return,
            },
            None => mark,
        };
        if exposed {
            // A refusal is counted and retried.
            let _ = self.runtime.inner.destroy(Dropped::Event(mark.into_event()));
        }
    }
}
