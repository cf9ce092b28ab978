//! Stream capture: what is enqueued on the streams that take part is recorded instead of executed, and replayed later.
//!
//! A capture begins on one stream. A stream that waits for an event recorded in it joins, and takes part from there on. All
//! commands go into one list in the order of the calls. A stream can only wait for what was recorded before, so that
//! order respects every stream and every event between them, and a launch hands the list to one stream as it is.
//!
//! Whether the first stream has waited for all the others is told by *clocks*: each stream knows how many commands of
//! every other stream come before its next one. A recorded event carries the clock of its stream, and a wait takes the
//! greater count of each. At the end the first stream must know of every command.
//!
//! A capture is *open* until it ends, and *lost* in between when it can no longer become a graph. A lost one still has
//! its streams, which take nothing until the first one ends it. A stream refers to its capture, not the other way round,
//! so one that finds its capture ended is simply free again.
//!
//! Locks: a stream's queue before a recording, and never two recordings at once.

use std::sync::{Arc, Weak};
use std::thread::ThreadId;

use highwater_hal::{CaptureMode, Error, ErrorKind, GraphExecId, Result};
use parking_lot::{Mutex, MutexGuard};

use crate::event::{Event, Point};
use crate::operation::Operation;
use crate::races::clock::Clock;
use crate::races::shadow::Shadow;
use crate::stream::{Command, Queue, Step, Stream};

/// What a capture recorded: the commands of one execution.
#[derive(Debug)]
pub(crate) struct Graph(Vec<Step>);

#[derive(Debug)]
pub(crate) struct Capture {
    mode: CaptureMode,
    thread: ThreadId,
    recording: Mutex<Recording>,
}

#[derive(Debug)]
struct Recording {
    state: State,
    commands: Vec<Step>,
    /// A clock for each stream, whose lane is its index; there it counts the commands that it has recorded. The first stream began.
    clocks: Vec<Clock>,
    /// What the recorded commands do to memory, where races are looked for.
    shadow: Shadow,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Open,
    /// Why.
    Lost(&'static str),
    Ended,
}

impl Recording {
    fn lose(&mut self, why: &'static str) {
        if matches!(self.state, State::Open) {
            self.state = State::Lost(why);
            self.commands.clear();
        }
    }

    fn check_open(&self, operation: Operation) -> Result<()> {
        match self.state {
            State::Open => Ok(()),
            State::Lost(why) => Err(lost(operation, why)),
            State::Ended => Err(ended(operation)),
        }
    }

    /// Lets the stream `index` come after everything in `clock`.
    fn follow(&mut self, index: usize, clock: &Clock) {
        self.clocks[index].join(clock);
    }

    fn is_joined(&self) -> bool {
        self.clocks.iter().enumerate().all(|(index, clock)| self.clocks[0].get(index) >= clock.get(index))
    }
}

/// Where in a capture an event was recorded.
#[derive(Debug)]
pub(crate) struct Mark {
    capture: Arc<Capture>,
    clock: Clock,
}

/// A stream's part in a capture.
#[derive(Debug)]
pub(crate) struct Part {
    capture: Arc<Capture>,
    index: usize,
}

/// The recording that a stream takes part in, locked.
pub(crate) struct Recorder<'a> {
    recording: MutexGuard<'a, Recording>,
    part: &'a Part,
}

impl Recorder<'_> {
    pub(crate) fn record(mut self, operation: Operation, step: Step, stream: &Stream) -> Result<()> {
        self.recording.check_open(operation)?;
        if let Command::Release(_) = step.command {
            return Err(stream_order(operation));
        }
        let (recording, index) = (&mut *self.recording, self.part.index);
        recording.clocks[index].tick(index);
        stream.note_recorded(&step, (index, &recording.clocks[index], &mut recording.shadow));
        recording.commands.push(step);
        Ok(())
    }

    fn mark(self, operation: Operation) -> Result<Mark> {
        self.recording.check_open(operation)?;
        Ok(Mark { capture: Arc::clone(&self.part.capture), clock: self.recording.clocks[self.part.index].clone() })
    }

    fn lose(mut self, why: &'static str) {
        self.recording.lose(why);
    }
}

impl Queue {
    /// The recording that commands go into; `None` when the stream takes part in no capture (any more).
    pub(crate) fn recording(&self) -> Option<Recorder<'_>> {
        let part = self.part.as_ref()?;
        let recording = part.capture.recording.lock();
        (!matches!(recording.state, State::Ended)).then_some(Recorder { recording, part })
    }

    /// Nobody learns how far a stream is that records; who asks loses the capture.
    pub(crate) fn refuse_to_answer(&self, operation: Operation) -> Result<()> {
        match self.recording() {
            None => Ok(()),
            Some(recorder) => {
                recorder.lose("somebody asked or waited for a stream that takes part in it");
                Err(operation
                    .error(ErrorKind::Capture, "the stream takes part in a capture, which is lost by this call")
                    .with_hint("end the capture first, launch the graph, and ask for the stream of the launch"))
            }
        }
    }

    /// Loses the capture that the stream takes part in, if any.
    #[cfg(feature = "simulated")]
    pub(crate) fn lose_capture(&self, why: &'static str) {
        if let Some(recorder) = self.recording() {
            recorder.lose(why);
        }
    }

    /// Takes a stream that was destroyed out of its capture; gives what is to be dropped outside the lock.
    pub(crate) fn leave_capture(&mut self) -> Option<(Part, Vec<Step>)> {
        let part = self.part.take()?;
        let mut recording = part.capture.recording.lock();
        let commands = std::mem::take(&mut recording.commands);
        match recording.state {
            State::Ended => {}
            // Without the first stream nobody can end the capture, so it ends here and its other streams are free.
            _ if part.index == 0 => recording.state = State::Ended,
            _ => recording.lose("a stream that takes part in it was destroyed"),
        }
        drop(recording);
        Some((part, commands))
    }
}

impl Stream {
    /// Begins a capture on the stream.
    pub(crate) fn begin_capture(&self, operation: Operation, mode: CaptureMode) -> Result<Weak<Capture>> {
        self.device().check_not_lost(operation)?;
        let mut queue = self.open_queue(operation)?;
        if queue.recording().is_some() {
            return Err(operation
                .error(ErrorKind::Capture, "the stream takes part in a capture already")
                .with_hint("end that capture first, or capture on another stream"));
        }
        let (clocks, shadow) = (vec![Clock::default()], Shadow::default());
        let recording = Recording { state: State::Open, commands: Vec::new(), clocks, shadow };
        let capture = Arc::new(Capture { mode, thread: std::thread::current().id(), recording: Mutex::new(recording) });
        let open = Arc::downgrade(&capture);
        queue.part = Some(Part { capture, index: 0 });
        Ok(open)
    }

    /// Ends the capture that began on the stream.
    pub(crate) fn end_capture(&self, operation: Operation) -> Result<Graph> {
        let mut queue = self.open_queue(operation)?;
        let Some(mut recorder) = queue.recording() else {
            return Err(operation
                .error(ErrorKind::Capture, "no capture is open on the stream")
                .with_hint("call `begin_capture` first, and end each capture once"));
        };
        if recorder.part.index != 0 {
            return Err(operation
                .error(ErrorKind::Capture, "the stream joined a capture that began on another stream")
                .with_hint("end the capture on the stream that it began on"));
        }
        // As with the vendors; the capture stays open.
        let capture = &recorder.part.capture;
        if capture.mode != CaptureMode::Relaxed && capture.thread != std::thread::current().id() {
            return Err(operation
                .error(
                    ErrorKind::Capture,
                    format!("a capture in mode {:?} ends on the thread that it began on", capture.mode),
                )
                .with_hint("end it there, or capture in mode `Relaxed`"));
        }
        let recording = &mut *recorder.recording;
        let state = std::mem::replace(&mut recording.state, State::Ended);
        let commands = std::mem::take(&mut recording.commands);
        let joined = recording.is_joined();
        drop(recorder);
        queue.part = None;
        drop(queue);
        match state {
            State::Lost(why) => Err(lost(operation, why)),
            _ if !joined => Err(operation
                .error(ErrorKind::Capture, "a stream that joined the capture was not waited for; the capture is lost")
                .with_hint(
                    "record an event at the end of each stream that joined, and have the first stream wait for it",
                )),
            _ => Ok(Graph(commands)),
        }
    }

    /// Enqueues the record of `point`, and gives the point that the event is to be moved to: in a capture another one,
    /// which is never reached.
    pub(crate) fn record(self: &Arc<Self>, operation: Operation, point: Arc<Point>) -> Result<Arc<Point>> {
        self.device().check_not_lost(operation)?;
        let step = Step::nameless(Command::Record(Arc::clone(&point)));
        let mut queue = self.open_queue(operation)?;
        if let Some(recorder) = queue.recording() {
            return recorder.mark(operation).map(Point::captured);
        }
        self.push(operation, &mut queue, [step], None)?;
        Ok(point)
    }

    /// Has what follows wait for a point, in a capture or outside.
    pub(crate) fn wait_for(self: &Arc<Self>, operation: Operation, point: Arc<Point>) -> Result<()> {
        self.device().check_not_lost(operation)?;
        let step = Step::nameless(Command::Wait(Arc::clone(&point)));
        let mut queue = self.open_queue(operation)?;
        let Some(mark) = point.mark() else {
            let Some(recorder) = queue.recording() else {
                return self.push(operation, &mut queue, [step], None);
            };
            recorder.lose("one of its streams waited for an event that was recorded outside");
            return Err(operation
                .error(ErrorKind::Capture, "a capture cannot wait for an event recorded outside, and is lost by it")
                .with_hint("wait before the capture begins, or have the stream of the launch wait"));
        };
        if let Some(mut recorder) = queue.recording() {
            if Arc::ptr_eq(&recorder.part.capture, &mark.capture) {
                recorder.recording.check_open(operation)?;
                let index = recorder.part.index;
                recorder.recording.follow(index, &mark.clock);
                return Ok(());
            }
            const WHY: &str = "one of its streams waited for an event of another capture";
            recorder.lose(WHY);
            mark.capture.recording.lock().lose(WHY);
            return Err(operation
                .error(ErrorKind::Capture, "the event belongs to another capture than the stream; both are lost")
                .with_hint("keep the streams and events of two captures apart"));
        }
        let mut recording = mark.capture.recording.lock();
        recording.check_open(operation)?;
        if self.is_legacy {
            recording.lose("the legacy default stream waited for one of its events");
            return Err(legacy_stream(operation));
        }
        let index = recording.clocks.len();
        // Joining counts as a command, so that the first stream has to wait even where nothing follows.
        let mut clock = Clock::default();
        clock.tick(index);
        recording.clocks.push(clock);
        recording.follow(index, &mark.clock);
        drop(recording);
        queue.part = Some(Part { capture: Arc::clone(&mark.capture), index });
        Ok(())
    }

    /// Enqueues the commands of a graph, with nothing else between them.
    pub(crate) fn launch(self: &Arc<Self>, operation: Operation, graph: &Graph, exec: GraphExecId) -> Result<()> {
        self.device().check_not_lost(operation)?;
        let launch = self.origin(operation).map(|origin| (origin, exec));
        let mut queue = self.open_queue(operation)?;
        if queue.recording().is_some() {
            return Err(operation
                .error(ErrorKind::Capture, "the stream takes part in a capture, which takes no launch of a graph")
                .with_hint("launch after the capture, or on another stream"));
        }
        self.push(operation, &mut queue, graph.0.iter().cloned(), launch)
    }

    /// Memory in stream order cannot be had while the stream records; the capture goes on.
    pub(crate) fn refuse_stream_order(&self, operation: Operation) -> Result<()> {
        if self.queue.lock().recording().is_some() { Err(stream_order(operation)) } else { Ok(()) }
    }
}

impl Event {
    /// The latest record, which must have been made outside of captures: nothing else is ever reached.
    pub(crate) fn reachable(&self, operation: Operation) -> Result<Option<Arc<Point>>> {
        let latest = self.latest();
        let Some(mark) = latest.as_ref().and_then(|point| point.mark()) else { return Ok(latest) };
        mark.capture.recording.lock().lose("somebody asked or waited for an event that was recorded in it");
        Err(operation
            .error(ErrorKind::Capture, "the event was last recorded in a capture, so it is never reached")
            .with_hint("record an event on the stream of the launch, and ask for that"))
    }
}

/// The captures that may be open, for what a device refuses meanwhile.
#[derive(Debug, Default)]
pub(crate) struct OpenCaptures(Vec<Weak<Capture>>);

impl OpenCaptures {
    pub(crate) fn push(&mut self, capture: Weak<Capture>) {
        self.0.retain(|other| other.strong_count() > 0);
        self.0.push(capture);
    }

    /// For a device on which handles cannot be made during a capture: loses the captures whose mode forbids it to this
    /// thread.
    pub(crate) fn refuse_creation(&mut self, operation: Operation) -> Result<()> {
        let thread = std::thread::current().id();
        let mut refused = false;
        for capture in self.0.iter().filter_map(Weak::upgrade) {
            let forbidden = match capture.mode {
                CaptureMode::Relaxed => false,
                CaptureMode::ThreadLocal => capture.thread == thread,
                _ => true,
            };
            let mut recording = capture.recording.lock();
            if forbidden && !matches!(recording.state, State::Ended) {
                recording.lose("a handle was made meanwhile, and `create_during_capture` is false");
                refused = true;
            }
        }
        if !refused {
            return Ok(());
        }
        Err(operation
            .error(ErrorKind::Capture, "a handle cannot be made during a capture here; the capture is lost")
            .with_hint("make handles before the capture begins, or capture in mode `Relaxed`"))
    }
}

#[cold]
fn lost(operation: Operation, why: &str) -> Error {
    operation
        .error(ErrorKind::Capture, format!("the capture was lost: {why}"))
        .with_hint("end the capture on the stream that it began on, and capture anew")
}

#[cold]
fn ended(operation: Operation) -> Error {
    operation
        .error(ErrorKind::Capture, "the event was recorded in a capture that has ended, so it is never reached")
        .with_hint("record the event again")
}

#[cold]
fn stream_order(operation: Operation) -> Error {
    operation
        .error(ErrorKind::Capture, "the stream takes part in a capture, which takes no memory in stream order")
        .with_hint("allocate before the capture begins, and free after the last launch")
}

#[cold]
pub(crate) fn legacy_stream(operation: Operation) -> Error {
    operation
        .error(ErrorKind::Capture, "the legacy default stream cannot take part in a capture")
        .with_hint("capture on a stream made by `create_stream`")
}
