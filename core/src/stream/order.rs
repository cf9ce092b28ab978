//! The order between streams: events that a stream records and waits for.

use std::sync::Arc;

use super::Stream;
use crate::capture::join;
use crate::device::Device;
use crate::event::Event;
use crate::pool::completion_events::CompletionEvent;
use highwater_hal::{Backend, Error, ErrorKind, EventId, EventOptions, Result};

impl Stream {
    /// Records the point that the stream has reached. In a capture, the event is a point of the graph, and [`Stream::wait`]
    /// accepts it until the capture ends.
    ///
    /// # Errors
    /// The backend's error.
    pub fn record(&self) -> Result<Event> {
        let backend = self.backend("record_event")?;
        let mut completion = self.runtime.inner.device(self.device()).events.take(backend)?;
        let mut submission = self.core.enter("record_event")?;
        self.core.record(&mut submission, &mut completion)?;
        let capture = submission.recording.as_ref().map(|recording| Arc::clone(&recording.capture));
        drop(submission);
        Ok(Event::pooled(self.runtime.clone(), completion, capture))
    }

    /// Records a completion event for a wait. Returns an error if the stream takes part in a capture.
    pub(crate) fn completion_outside(&self, operation: &'static str) -> Result<Arc<CompletionEvent>> {
        let backend = self.backend(operation)?;
        let mut completion = self.runtime.inner.device(self.device()).events.take(backend)?;
        let mut submission = self.core.enter_outside(operation)?;
        self.core.record(&mut submission, &mut completion)?;
        drop(submission);
        Ok(Arc::new(completion))
    }

    /// Records the point that the stream has reached, with a timestamp.
    ///
    /// # Errors
    /// `Unsupported` if `event_timing` is false; `Capture` if the stream takes part in a capture; otherwise the backend's
    /// error.
    pub fn record_timed(&self) -> Result<Event> {
        let backend = self.backend("record_event")?;
        if !self.runtime.inner.device(self.device()).capabilities.event_timing {
            return Err(Error::lacks("create_event", "event_timing"));
        }
        let id = backend.create_event(self.device(), &EventOptions::new().with_timing())?;
        // From here on the event destroys itself, even if recording it fails.
        let event = Event::unpooled(self.runtime.clone(), self.device(), id);
        let submission = self.core.enter_outside("record_event")?;
        backend.record_event(id, self.core.id)?;
        drop(submission);
        Ok(event)
    }

    /// Makes all work enqueued from here on wait, on the device, for an event of any stream of the same runtime. If the
    /// event was recorded in an open capture, this stream joins the capture.
    ///
    /// # Errors
    /// `Capture` if this stream takes part in a capture in which the event was not recorded, or if the event's capture has
    /// ended. Otherwise the backend's error.
    pub fn wait(&self, event: &Event) -> Result<()> {
        let backend = self.backend("stream_wait_event")?;
        if let Some(capture) = event.capture() {
            return join(self, event, capture);
        }
        self.wait_outside(backend, event.id)
    }

    /// Makes all work enqueued from here on wait, on the device, for an event of other code: a `cudaEvent_t` on CUDA, a
    /// `hipEvent_t` on ROCm. Later records of the event have no effect on the wait.
    ///
    /// # Errors
    /// `Unsupported` if `foreign_objects` is false; `InvalidArgument` for 0; `Capture` if this stream takes part in a capture;
    /// otherwise the backend's error.
    ///
    /// # Safety
    /// The caller must pass a live event of this stream's device, and must keep it alive until the call has returned.
    /// [`Device::event_from_raw`](crate::Device::event_from_raw) takes events of other devices.
    pub unsafe fn wait_raw(&self, raw: u64) -> Result<()> {
        const OPERATION: &str = "wait_raw";
        let backend = self.backend(OPERATION)?;
        let device = Device::of(&self.runtime, self.device());
        // SAFETY: The caller passes a live event of the device. The end of this call destroys the id.
        let event = unsafe { device.wrap_event(OPERATION, raw)? };
        let waited = self.wait_outside(backend, event);
        // The wait refers to the record, and no longer to the id.
        let forgotten = backend.destroy_event(event);
        waited.and(forgotten)
    }

    /// Enqueues a wait for an event that was recorded in no capture.
    fn wait_outside(&self, backend: &dyn Backend, event: EventId) -> Result<()> {
        let submission = self.core.enter("stream_wait_event")?;
        if submission.recording.is_some() {
            return Err(Error::new(
                ErrorKind::Capture,
                "stream_wait_event",
                "the stream takes part in a capture, and the event was recorded outside it",
            )
            .with_hint("wait for it before the capture, or before each launch of the graph; the capture goes on"));
        }
        backend.stream_wait_event(self.core.id, event)
    }
}
