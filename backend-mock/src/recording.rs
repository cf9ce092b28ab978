//! The recording of a capture, and the streams that take part in it.
//!
//! All commands go into one list in the order of the calls. A stream can only wait for earlier records, so that order
//! respects every stream and every event between them. A launch hands the list to one stream as it is.
//!
//! Clocks tell whether the first stream has waited for all the others. Each stream knows how many commands of every
//! other stream come before its next one. A recorded event carries the clock of its stream, and a wait takes the
//! greater count of each. At the end, the first stream must know of every command.
//!
//! A capture is *open* until it ends. It is *lost* in between if it can no longer become a graph. The streams of a lost
//! capture take no commands until the first stream ends it. A stream refers to its capture, not the reverse, so a
//! stream that finds its capture ended is free again.
//!
//! Locks: no thread holds the locks of two recordings at once.

use std::sync::{Arc, Weak};
use std::thread::ThreadId;

use highwater_hal::{CaptureMode, Error, ErrorKind, Result};
use parking_lot::{Mutex, MutexGuard};

use crate::clock::Clock;
use crate::command::{Command, Step};
use crate::observer::Note;
use crate::operation::Operation;

/// The commands that a capture recorded, for one execution.
#[derive(Debug)]
pub(crate) struct Graph(pub(crate) Vec<Step>);

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
    /// A clock for each stream, whose lane is its index. There it counts the commands that the stream has recorded. The
    /// first stream began the capture.
    clocks: Vec<Clock>,
    /// The order observer's notes of the recorded commands.
    notes: Option<Note>,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Open,
    /// The reason.
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

    fn is_joined(&self) -> bool {
        self.clocks.iter().enumerate().all(|(index, clock)| self.clocks[0].get(index) >= clock.get(index))
    }
}

/// The place in a capture at which an event was recorded.
#[derive(Debug)]
pub(crate) struct CapturePoint {
    capture: Arc<Capture>,
    clock: Clock,
}

impl CapturePoint {
    /// Loses the capture.
    pub(crate) fn lose(&self, why: &'static str) {
        self.capture.recording.lock().lose(why);
    }

    /// Returns the part of a stream that joins the capture by waiting for the event.
    pub(crate) fn join(&self, operation: Operation, is_legacy: bool) -> Result<Part> {
        let mut recording = self.capture.recording.lock();
        recording.check_open(operation)?;
        if is_legacy {
            recording.lose("the legacy default stream waited for one of its events");
            return Err(legacy_stream(operation));
        }
        let index = recording.clocks.len();
        // Joining counts as a command, so that the first stream must wait even if nothing follows.
        let mut clock = Clock::default();
        clock.tick(index);
        clock.join(&self.clock);
        recording.clocks.push(clock);
        Ok(Part { capture: Arc::clone(&self.capture), index })
    }
}

/// A stream's part in a capture.
#[derive(Debug)]
pub(crate) struct Part {
    capture: Arc<Capture>,
    index: usize,
}

impl Part {
    /// Begins a capture, and returns the part of its first stream.
    pub(crate) fn begin(mode: CaptureMode) -> Self {
        let clocks = vec![Clock::default()];
        let recording = Recording { state: State::Open, commands: Vec::new(), clocks, notes: None };
        let capture = Capture { mode, thread: std::thread::current().id(), recording: Mutex::new(recording) };
        Self { capture: Arc::new(capture), index: 0 }
    }

    pub(crate) fn capture(&self) -> Weak<Capture> {
        Arc::downgrade(&self.capture)
    }

    /// Locks the recording, unless the capture has ended.
    pub(crate) fn recorder(&self) -> Option<Recorder<'_>> {
        let recording = self.capture.recording.lock();
        (!matches!(recording.state, State::Ended)).then_some(Recorder { recording, part: self })
    }

    /// Takes a stream that was destroyed out of its capture. The caller must drop the result outside of its locks.
    pub(crate) fn leave(self) -> (Self, Vec<Step>) {
        let mut recording = self.capture.recording.lock();
        let commands = std::mem::take(&mut recording.commands);
        match recording.state {
            State::Ended => {}
            // Without the first stream nobody can end the capture, so it ends here and its other streams are free.
            _ if self.index == 0 => recording.state = State::Ended,
            _ => recording.lose("a stream that takes part in it was destroyed"),
        }
        drop(recording);
        (self, commands)
    }
}

/// The recording that a stream takes part in, locked.
pub(crate) struct Recorder<'a> {
    recording: MutexGuard<'a, Recording>,
    part: &'a Part,
}

impl Recorder<'_> {
    /// Checks that the capture can record a command.
    pub(crate) fn check(&self, operation: Operation, step: &Step) -> Result<()> {
        self.recording.check_open(operation)?;
        if let Command::Release(_) = step.command { Err(stream_order(operation)) } else { Ok(()) }
    }

    /// Records a command, after `observe` has seen it with the observer's notes and the stream's index and clock.
    pub(crate) fn record(&mut self, step: Step, observe: impl FnOnce(&Step, &mut Option<Note>, (usize, &Clock))) {
        let (recording, index) = (&mut *self.recording, self.part.index);
        recording.clocks[index].tick(index);
        observe(&step, &mut recording.notes, (index, &recording.clocks[index]));
        recording.commands.push(step);
    }

    /// Returns the place in the capture at which an event is recorded now.
    pub(crate) fn capture_point(&self, operation: Operation) -> Result<CapturePoint> {
        self.recording.check_open(operation)?;
        Ok(CapturePoint {
            capture: Arc::clone(&self.part.capture),
            clock: self.recording.clocks[self.part.index].clone(),
        })
    }

    /// Makes the stream wait for an event that was recorded in a capture.
    pub(crate) fn wait_for(mut self, operation: Operation, captured: &CapturePoint) -> Result<()> {
        if Arc::ptr_eq(&self.part.capture, &captured.capture) {
            self.recording.check_open(operation)?;
            self.recording.clocks[self.part.index].join(&captured.clock);
            return Ok(());
        }
        const WHY: &str = "one of its streams waited for an event of another capture";
        self.recording.lose(WHY);
        drop(self);
        captured.lose(WHY);
        Err(operation
            .error(ErrorKind::Capture, "the event belongs to another capture than the stream; both are lost")
            .with_hint("keep the streams and events of two captures apart"))
    }

    pub(crate) fn lose(mut self, why: &'static str) {
        self.recording.lose(why);
    }

    /// Lets the capture end without a wait for the streams that joined it and have recorded nothing.
    #[cfg(feature = "simulated")]
    pub(crate) fn excuse_idle(&mut self) {
        for (index, clock) in self.recording.clocks.iter_mut().enumerate().skip(1) {
            // A stream's own count begins with its joining.
            if clock.get(index) == 1 {
                clock.reset(index);
            }
        }
    }

    /// Ends the capture. If the stream or the thread may not end it, the capture stays open.
    pub(crate) fn end(mut self, operation: Operation) -> Result<Ended> {
        if self.part.index != 0 {
            return Err(operation
                .error(ErrorKind::Capture, "the stream joined a capture that began on another stream")
                .with_hint("end the capture on the stream that it began on"));
        }
        // As with the vendors.
        let capture = &self.part.capture;
        if capture.mode != CaptureMode::Relaxed && capture.thread != std::thread::current().id() {
            return Err(operation
                .error(
                    ErrorKind::Capture,
                    format!("a capture in mode {:?} ends on the thread that it began on", capture.mode),
                )
                .with_hint("end it on that thread, or capture in mode `Relaxed`"));
        }
        let recording = &mut *self.recording;
        let state = std::mem::replace(&mut recording.state, State::Ended);
        Ok(Ended { state, commands: std::mem::take(&mut recording.commands), is_joined: recording.is_joined() })
    }
}

/// A capture that has ended.
pub(crate) struct Ended {
    state: State,
    commands: Vec<Step>,
    is_joined: bool,
}

impl Ended {
    /// Returns the graph, unless the capture is lost.
    pub(crate) fn graph(self, operation: Operation) -> Result<Graph> {
        match self.state {
            State::Lost(why) => Err(lost(operation, why)),
            _ if !self.is_joined => Err(operation
                .error(ErrorKind::Capture, "a stream that joined the capture was not waited for; the capture is lost")
                .with_hint(
                    "record an event at the end of each stream that joined, and let the first stream wait for it",
                )),
            _ => Ok(Graph(self.commands)),
        }
    }
}

/// The captures that may be open, for the calls that a device refuses during a capture.
#[derive(Debug, Default)]
pub(crate) struct OpenCaptures(Vec<Weak<Capture>>);

impl OpenCaptures {
    pub(crate) fn push(&mut self, capture: Weak<Capture>) {
        self.0.retain(|other| other.strong_count() > 0);
        self.0.push(capture);
    }

    /// Loses the captures whose mode forbids this thread to create a handle, on a device that cannot create one during
    /// a capture.
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
                recording.lose("a handle was created meanwhile, and `create_during_capture` is false");
                refused = true;
            }
        }
        if !refused {
            return Ok(());
        }
        Err(operation
            .error(ErrorKind::Capture, "this device creates no handle during a capture; the capture is lost")
            .with_hint("create handles before the capture begins, or capture in mode `Relaxed`"))
    }
}

#[cold]
fn lost(operation: Operation, why: &str) -> Error {
    operation
        .error(ErrorKind::Capture, format!("the capture was lost: {why}"))
        .with_hint("end the capture on the stream that it began on, and capture again")
}

#[cold]
fn ended(operation: Operation) -> Error {
    operation
        .error(ErrorKind::Capture, "the event was recorded in a capture that has ended, so it is never reached")
        .with_hint("record the event again")
}

#[cold]
pub(crate) fn stream_order(operation: Operation) -> Error {
    operation
        .error(ErrorKind::Capture, "the stream takes part in a capture, which takes no memory in stream order")
        .with_hint("allocate before the capture begins, and free after the last launch")
}

#[cold]
pub(crate) fn legacy_stream(operation: Operation) -> Error {
    operation
        .error(ErrorKind::Capture, "the legacy default stream cannot take part in a capture")
        .with_hint("capture on a stream of `create_stream`")
}
