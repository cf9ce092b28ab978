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
    /// Records the work that `record` enqueues on this stream, without executing it. Returns a graph that can be launched any
    /// number of times.
    ///
    /// The graph keeps the addresses and numbers from the time of recording, and owns the memory behind them: buffers may be
    /// dropped right away. Values that are copied from a [`PinnedBuffer`](crate::PinnedBuffer) are those that it holds at the
    /// launch. Another stream joins the capture by [`Stream::wait`] for an event that was recorded in it. This stream must wait
    /// for the other one in the same way before the end.
    ///
    /// In the capture, the following calls return `Capture`, and the capture continues unharmed:
    /// - waits for and queries of a stream that takes part, or of an event recorded in it;
    /// - waits for events from outside;
    /// - [`Device::allocate`](crate::Device::allocate) and creation of streams;
    /// - access by the CPU to page-locked memory that is recorded.
    ///
    /// [`Stream::allocate`] allocates from memory of the graph, which no other work gets before the graph is dropped and its last launch
    /// done. Allocate everything else before the capture. If the capability `create_during_capture` is false, run the work once before the capture,
    /// so that handles exist. If other threads wait for the stream or for its device, this call first waits until they are done.
    /// Threads that start to wait later come after the capture.
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
    /// while a raw handle of the stream is lent ([`BlasLease::with_raw`](crate::BlasLease::with_raw)), or if the stream did not
    /// wait for one that joined. Else the backend's error.
    pub fn capture(&self, record: impl FnOnce(&Self) -> Result<()>) -> Result<Graph> {
        self.capture_with(CaptureMode::default(), record)
    }

    /// As [`Stream::capture`], with a choice of how strictly the vendor treats calls that foreign code makes during the
    /// capture.
    ///
    /// # Errors
    /// As [`Stream::capture`].
    pub fn capture_with(&self, mode: CaptureMode, record: impl FnOnce(&Self) -> Result<()>) -> Result<Graph> {
        let open = OpenCapture::begin(self, mode)?;
        record(self)?;
        open.finish()
    }
}

/// A capture that this thread has begun. Ends when dropped, and then discards the recorded work.
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
            inner.workspaces.pool(stream.device()).collect_ended();
            inner.device(stream.device()).capture_gate.make_way();
        }
        let capture = Capture::new(stream.core());
        take_part(OPERATION, stream, &capture, |backend| backend.begin_capture(stream.id(), mode)).inspect_err(
            |_| {
                // No other code has the capture; the stream must not be kept by it.
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
        // Every return but the last drops the recorded work.
        let (ended, recorded) = self.end();
        if ended.is_err() {
            runtime.inner.trim_in_passing();
        }
        let graph = ended?;
        let executable = backend.instantiate_graph(graph);
        // A refusal is counted and retried.
        let _ = runtime.inner.destroy(Dropped::Graph(graph));
        // Memory above the cap of the host cache was not freed during the capture.
        runtime.inner.trim_in_passing();
        let executable = executable?;
        let recorded = recorded.into_graph();
        Ok(Graph::new(runtime.clone(), self.stream.device(), executable, recorded))
    }

    /// Ends the capture. Afterward all its streams are as before.
    fn end(&mut self) -> (Result<GraphId>, Recorded) {
        const OPERATION: &str = "end_capture";
        self.ended = true;
        let inner = &self.stream.runtime().inner;
        let mut streams = self.capture.close();
        streams.sort_by_key(|stream| stream.key);
        streams.dedup_by_key(|stream| stream.key);
        let mut submissions: Vec<SubmissionGuard<'_>> = streams.iter().map(|stream| stream.lock_submission()).collect();
        // SAFETY: This capture began it.
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
        // Events of the capture first: the releases below may need one.
        for (completion, exposed) in self.capture.set_ended() {
            if exposed && inner.may_release() {
                // A refusal is counted and retried.
                let _ = inner.destroy(Dropped::Event(completion.into_event()));
            }
        }
        let mut recorded = Recorded::new(self.stream.runtime().clone());
        for (stream, mut recording) in recordings {
            if ended.is_err() && inner.check(OPERATION).is_ok() {
                let memory = recording.memory.clone();
                recording.parts.used_on(inner, stream, memory.as_deref());
            }
            recorded.take_in(*recording);
        }
        // The last users of a stream may be among these; they end it, outside every lock.
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

/// Ends a capture whose end the backend refused, for a reason other than an invalidated capture. Otherwise the stream would
/// record for ever.
fn abandon(inner: &RuntimeInner, stream: StreamId) {
    if !matches!(inner.backend.is_capturing(stream), Ok(true)) {
        return;
    }
    // SAFETY: This is core's own capture, whose end was refused before.
    match unsafe { inner.backend.end_capture(stream) } {
        // A refusal is counted and retried.
        Ok(graph) => drop(inner.destroy(Dropped::Graph(graph))),
        Err(error) => crate::warnings::warning!("a capture could not be ended: {error}"),
    }
}

impl Drop for OpenCapture<'_> {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let inner = &self.stream.runtime().inner;
        if !inner.generation.is_current() {
            // The capture belongs to the parent, and threads that do not exist here may hold its locks.
            count_open(-1);
            end_runtimes();
            return;
        }
        let (ended, recorded) = self.end();
        // If the capture was cut short, an error reports only that.
        if let Ok(graph) = ended {
            // A refusal is counted and retried.
            let _ = inner.destroy(Dropped::Graph(graph));
        }
        drop(recorded);
        inner.trim_in_passing();
    }
}
