//! An open capture, from its beginning to its graph.

use std::marker::PhantomData;
use std::sync::Arc;

use super::graph::{Graph, Recorded};
use super::recording::{Capture, Recording};
use super::take_part::take_part;
use super::thread::{count_open, end_runtimes, in_capture};
use crate::runtime::RuntimeInner;
use crate::services::Dropped;
use crate::stream::Stream;
use crate::stream::submission::SubmissionGuard;
use highwater_hal::{CaptureMode, Error, GraphId, Result, StreamId, fork::Generation};

impl Stream {
    /// Records what `record` enqueues on this stream, without executing any of it, as a graph that can be launched often.
    ///
    /// The graph keeps the addresses and numbers of the time of recording, and owns the memory behind them: buffers may
    /// be dropped right away. Values that are copied from a [`PinnedBuffer`](crate::PinnedBuffer) are those that it holds
    /// when the graph is launched. Another stream joins the capture by [`Stream::wait`] for an event that was recorded
    /// in it, and has to be waited for by this one in the same way before the end.
    ///
    /// In the capture, these give `Capture`, and the capture goes on undisturbed: waiting for or asking a stream that takes
    /// part or an event recorded in it; waits for events from outside; allocating device memory and making streams; access
    /// by the CPU to page-locked memory that is recorded. Allocate before. Where the capability
    /// `create_during_capture` is false, run the work once before it is captured, so that handles exist. A capture does
    /// not begin while other threads wait for the stream or for its device. Threads that start to wait meanwhile come
    /// after it.
    ///
    /// ```
    /// use highwater_core::{GemmShape, Runtime};
    /// use highwater_mock::{MockGpu, MockOptions};
    ///
    /// let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
    /// let stream = runtime.device(0)?.create_stream()?;
    /// let (a, b) = (stream.upload(&[2.0_f32])?, stream.upload(&[3.0_f32])?);
    /// let c = stream.upload(&[0.0_f32])?;
    ///
    /// let mut graph = stream.capture(|stream| {
    ///     stream.blas()?.gemm(&GemmShape::of::<f32>(1, 1, 1), 1.0, &a, &b, 1.0, &c)
    /// })?;
    /// assert_eq!(stream.download(&c)?, [0.0], "recorded, not executed");
    /// graph.launch(&stream)?;
    /// graph.launch(&stream)?;
    /// assert_eq!(stream.download(&c)?, [12.0]);
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// The error of `record`. Then, and if it panics, the capture has ended and nothing is kept. `Unsupported` if the
    /// capability `capture` is false. `Capture` if the stream already takes part in a capture or is a default stream,
    /// or if it did not wait for a stream that joined. Else the backend's error.
    pub fn capture(&self, record: impl FnOnce(&Self) -> Result<()>) -> Result<Graph> {
        self.capture_with(CaptureMode::default(), record)
    }

    /// As [`Stream::capture`], with a choice of how strict the vendor is about calls that foreign code makes meanwhile.
    ///
    /// # Errors
    /// As [`Stream::capture`].
    pub fn capture_with(&self, mode: CaptureMode, record: impl FnOnce(&Self) -> Result<()>) -> Result<Graph> {
        let open = OpenCapture::begin(self, mode)?;
        record(self)?;
        open.finish()
    }
}

/// A capture that this thread has begun; ends when dropped, and then keeps nothing.
struct OpenCapture<'s> {
    stream: &'s Stream,
    capture: Arc<Capture>,
    ended: bool,
    stays_in_thread: PhantomData<*const ()>,
}

impl<'s> OpenCapture<'s> {
    fn begin(stream: &'s Stream, mode: CaptureMode) -> Result<Self> {
        const OPERATION: &str = "begin_capture";
        let inner = &stream.runtime().inner;
        inner.check(OPERATION)?;
        if !inner.device(stream.device()).capabilities.capture {
            return Err(Error::lacks(OPERATION, "capture"));
        }
        if !in_capture() {
            inner.device(stream.device()).capture_gate.make_way();
        }
        let capture = Capture::new(stream.core());
        take_part(OPERATION, stream, &capture, |backend| backend.begin_capture(stream.id(), mode)).inspect_err(
            |_| {
                // Nobody else has the capture; the stream must not be kept by it.
                drop(capture.close());
            },
        )?;
        count_open(1);
        Ok(Self { stream, capture, ended: false, stays_in_thread: PhantomData })
    }

    fn finish(mut self) -> Result<Graph> {
        let runtime = self.stream.runtime();
        if !runtime.inner.generation.is_current() {
            // A child forked inside the closure: the capture is the parent's.
            return Err(Generation::error("end_capture"));
        }
        let backend = &runtime.inner.backend;
        // What was recorded is dropped on every way out but the last.
        let (ended, recorded) = self.end();
        if ended.is_err() {
            runtime.inner.trim_in_passing();
        }
        let graph = ended?;
        let executable = backend.instantiate_graph(graph);
        // A refusal is counted and tried again.
        let _ = runtime.inner.destroy(Dropped::Graph(graph));
        // What is above the cap of the host cache was left alone in the capture.
        runtime.inner.trim_in_passing();
        let executable = executable?;
        let recorded = recorded.into_graph();
        Ok(Graph::new(runtime.clone(), self.stream.device(), executable, recorded))
    }

    /// Ends the capture: afterwards all its streams are as before.
    fn end(&mut self) -> (Result<GraphId>, Recorded) {
        const OPERATION: &str = "end_capture";
        self.ended = true;
        let inner = &self.stream.runtime().inner;
        let mut streams = self.capture.close();
        streams.sort_by_key(|stream| stream.key);
        streams.dedup_by_key(|stream| stream.key);
        let mut submissions: Vec<SubmissionGuard<'_>> = streams.iter().map(|stream| stream.lock_submission()).collect();
        // SAFETY: this capture began it.
        let end = |()| unsafe { inner.backend.end_capture(self.stream.id()) };
        let ended = inner.check(OPERATION).and_then(end);
        if ended.is_err() && inner.check(OPERATION).is_ok() {
            abandon(inner, self.stream.id());
        }
        let mut recordings = Vec::new();
        for (stream, submission) in streams.iter().zip(&mut submissions) {
            let takes_part = |recording: &mut Box<Recording>| Arc::ptr_eq(&recording.capture, &self.capture);
            if let Some(recording) = submission.recording.take_if(takes_part) {
                stream.bind_to(stream.key);
                recordings.push((stream, recording));
            }
        }
        drop(submissions);
        count_open(-1);
        // Events of the capture first: what is given back below may need one.
        for (completion, exposed) in self.capture.set_ended() {
            if exposed && inner.may_release() {
                // A refusal is counted and tried again.
                let _ = inner.destroy(Dropped::Event(completion.into_event()));
            }
        }
        let mut recorded = Recorded::new(self.stream.runtime().clone());
        for (stream, mut recording) in recordings {
            if ended.is_err() && inner.check(OPERATION).is_ok() {
                recording.parts.used_on(inner, stream);
            }
            recorded.take_in(*recording);
        }
        // The last users of a stream may be here; they end it, outside every lock.
        drop(streams);
        if !in_capture()
            && inner.check(OPERATION).is_ok()
            && let Err(error) = inner.destroy_dropped()
        {
            tracing::debug!("what was dropped in a capture could not all be destroyed: {error}");
        }
        end_runtimes();
        (ended, recorded)
    }
}

/// Ends a capture whose end was refused, and not by the capture being lost: else the stream would record for ever.
fn abandon(inner: &RuntimeInner, stream: StreamId) {
    if !matches!(inner.backend.is_capturing(stream), Ok(true)) {
        return;
    }
    // SAFETY: core's own capture, whose end was refused before.
    match unsafe { inner.backend.end_capture(stream) } {
        // A refusal is counted and tried again.
        Ok(graph) => drop(inner.destroy(Dropped::Graph(graph))),
        Err(error) => tracing::warn!("a capture could not be ended: {error}"),
    }
}

impl Drop for OpenCapture<'_> {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let inner = &self.stream.runtime().inner;
        if !inner.generation.is_current() {
            // The capture is the parent's; its locks may be held by threads that do not exist here.
            count_open(-1);
            end_runtimes();
            return;
        }
        let (ended, recorded) = self.end();
        // Where the capture was cut short, an error says only that.
        if let Ok(graph) = ended {
            // A refusal is counted and tried again.
            let _ = inner.destroy(Dropped::Graph(graph));
        }
        drop(recorded);
        inner.trim_in_passing();
    }
}
