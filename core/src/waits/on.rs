//! The waits of events, streams and buffers.

use std::sync::Arc;

use super::done::Done;
use super::notifier::Answers;
use crate::buffer::DeviceBuffer;
use crate::event::Event;
use crate::pinned::PinnedBuffer;
use crate::pool::completion_events::CompletionEvent;
use crate::services::Services;
use crate::shared_pinned::SharedPinnedBuffer;
use crate::stream::Stream;
use highwater_hal::{Element, Result};

/// Begins a wait for events of a runtime.
fn begin(services: &Arc<Services>, events: Result<Vec<Arc<CompletionEvent>>>) -> Done {
    let answers: Arc<dyn Answers> = Arc::<Services>::clone(services);
    Done::begin(&services.notifier, &answers, events)
}

impl Event {
    /// Returns a future that is ready once the stream has passed the event, as [`Event::synchronize`] waits for it. The event may be
    /// dropped before.
    ///
    /// # Errors
    /// The future has the errors of [`Done`], and `Capture` if the event was recorded in a capture.
    pub fn done(&self) -> Done {
        begin(&self.runtime().inner.services, self.completion("done").map(|event| vec![event]))
    }

    /// Calls `call` once the stream has passed the event: [`Done::on_done`] has the rules.
    pub fn on_done(&self, call: impl FnOnce(Result<()>) + Send + 'static) {
        self.done().on_done(call);
    }
}

impl Stream {
    /// Returns a future that is ready once everything enqueued before this call has been executed, as [`Stream::synchronize`] waits for
    /// it. Later work does not delay it. The stream may be dropped before.
    ///
    /// Each call begins a new wait, behind all work enqueued meanwhile. To wait again after a timeout, keep the [future](Done).
    ///
    /// ```
    /// # use highwater_core::Runtime;
    /// # use highwater_mock::{MockGpu, MockOptions};
    /// let stream = Runtime::new(MockGpu::open(MockOptions::new())?)?.device(0)?.create_stream()?;
    /// let values = stream.upload(&[1.0_f32; 1000])?;
    /// pollster::block_on(stream.done())?;
    /// assert!(stream.is_complete()?);
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// The future has the errors of [`Done`], and `Capture` if the stream takes part in a capture.
    pub fn done(&self) -> Done {
        begin(&self.runtime().inner.services, self.completion_outside("done").map(|event| vec![event]))
    }

    /// Calls `call` once everything enqueued before this call has been executed: [`Done::on_done`] has the rules.
    pub fn on_done(&self, call: impl FnOnce(Result<()>) + Send + 'static) {
        self.done().on_done(call);
    }
}

impl<T: Element> PinnedBuffer<T> {
    /// Returns a future that is ready once every stream has passed its copies from and to the buffer. Then [`PinnedBuffer::read`] and
    /// [`PinnedBuffer::write`] do not wait, unless other copies were enqueued after this call.
    ///
    /// # Errors
    /// The future has the errors of [`Done`], and `Capture` if an open capture uses the buffer.
    pub fn ready(&self) -> Done {
        let pool = self.pool();
        begin(pool.services(), pool.uses_of(self.block()))
    }

    /// Calls `call` once every stream has passed its copies from and to the buffer: [`Done::on_done`] has the rules.
    pub fn on_ready(&self, call: impl FnOnce(Result<()>) + Send + 'static) {
        self.ready().on_done(call);
    }
}

impl<T: Element> SharedPinnedBuffer<T> {
    /// Returns a future that is ready once every stream of this process has passed its copies from and to the buffer, as
    /// [`PinnedBuffer::ready`] does.
    ///
    /// # Errors
    /// As [`PinnedBuffer::ready`].
    pub fn ready(&self) -> Done {
        let pool = self.pool();
        begin(pool.services(), pool.uses_of(self.block()))
    }

    /// Calls `call` once the buffer is [ready](Self::ready): [`Done::on_done`] has the rules.
    pub fn on_ready(&self, call: impl FnOnce(Result<()>) + Send + 'static) {
        self.ready().on_done(call);
    }
}

impl<T: Element> DeviceBuffer<T> {
    /// Returns a future that is ready once every stream that uses the buffer has executed the work enqueued before this call. Work of
    /// other processes is not known.
    ///
    /// Each call begins a new wait, behind all work enqueued meanwhile. To wait again after a timeout, keep the [future](Done).
    ///
    /// # Errors
    /// The future has the errors of [`Done`]. It has `Capture` if an open capture uses the buffer. It also has `Capture`, for any buffer,
    /// if the calling thread is inside a capture.
    pub fn ready(&self) -> Done {
        begin(self.block().services_of(), self.block().work())
    }

    /// Calls `call` once the buffer is [ready](Self::ready): [`Done::on_done`] has the rules.
    pub fn on_ready(&self, call: impl FnOnce(Result<()>) + Send + 'static) {
        self.ready().on_done(call);
    }
}
