//! Stream capture: the commands of the streams that take part are recorded instead of executed, and replayed later.
//!
//! A capture begins on one stream. Another stream joins it by waiting for an event that was recorded in the capture,
//! and takes part from there on.
//!
//! Locks: the queue of a stream before a recording.

use std::sync::{Arc, Weak};

use highwater_hal::{CaptureMode, ErrorKind, GraphExecId, Result};

use crate::command::{Command, Step};
use crate::event::Point;
use crate::operation::Operation;
use crate::recording::{Capture, Graph, Part, stream_order};
use crate::stream::Stream;

impl Stream {
    /// Begins a capture on the stream.
    pub(crate) fn begin_capture(&self, operation: Operation, mode: CaptureMode) -> Result<Weak<Capture>> {
        self.device().check_not_lost(operation)?;
        let mut queue = self.open_queue(operation)?;
        if queue.recorder().is_some() {
            return Err(operation
                .error(ErrorKind::Capture, "the stream takes part in a capture already")
                .with_hint("end that capture first, or capture on another stream"));
        }
        Ok(queue.part.insert(Part::begin(mode)).capture())
    }

    /// Ends the capture that began on the stream.
    pub(crate) fn end_capture(&self, operation: Operation) -> Result<Graph> {
        let mut queue = self.open_queue(operation)?;
        let Some(recorder) = queue.recorder() else {
            return Err(operation
                .error(ErrorKind::Capture, "no capture is open on the stream")
                .with_hint("call `begin_capture` first, and end each capture once"));
        };
        let ended = recorder.end(operation)?;
        queue.part = None;
        drop(queue);
        ended.graph(operation)
    }

    /// Enqueues the record of `point`, and returns the point that the event moves to. In a capture that is another
    /// point, which is never reached.
    pub(crate) fn record(self: &Arc<Self>, operation: Operation, point: Arc<Point>) -> Result<Arc<Point>> {
        self.device().check_not_lost(operation)?;
        let step = Step::nameless(Command::Record(Arc::clone(&point)));
        let mut queue = self.open_queue(operation)?;
        if let Some(recorder) = queue.recorder() {
            return recorder.capture_point(operation).map(Point::captured);
        }
        self.push(operation, &mut queue, [step], None)?;
        Ok(point)
    }

    /// Makes later work wait for a point, in a capture or outside.
    pub(crate) fn wait_for(self: &Arc<Self>, operation: Operation, point: Arc<Point>) -> Result<()> {
        self.device().check_not_lost(operation)?;
        let step = Step::nameless(Command::Wait(Arc::clone(&point)));
        let mut queue = self.open_queue(operation)?;
        let Some(captured) = point.capture_point() else {
            let Some(recorder) = queue.recorder() else {
                return self.push(operation, &mut queue, [step], None);
            };
            recorder.lose("one of its streams waited for an event that was recorded outside");
            return Err(operation
                .error(ErrorKind::Capture, "a capture cannot wait for an event recorded outside, and is lost by it")
                .with_hint("wait before the capture begins, or let the stream of the launch wait"));
        };
        if let Some(recorder) = queue.recorder() {
            return recorder.wait_for(operation, captured);
        }
        queue.part = Some(captured.join(operation, self.is_legacy)?);
        Ok(())
    }

    /// Enqueues the commands of a graph, with no other command between them.
    pub(crate) fn launch(self: &Arc<Self>, operation: Operation, graph: &Graph, exec: GraphExecId) -> Result<()> {
        self.device().check_not_lost(operation)?;
        let launch = self.origin(operation).map(|origin| (origin, exec));
        let mut queue = self.open_queue(operation)?;
        if queue.recorder().is_some() {
            return Err(operation
                .error(ErrorKind::Capture, "the stream takes part in a capture, which takes no launch of a graph")
                .with_hint("launch after the capture, or on another stream"));
        }
        self.push(operation, &mut queue, graph.0.iter().cloned(), launch)
    }

    /// Refuses memory in stream order while the stream records. The capture goes on.
    pub(crate) fn refuse_stream_order(&self, operation: Operation) -> Result<()> {
        if self.is_recording() { Err(stream_order(operation)) } else { Ok(()) }
    }
}
