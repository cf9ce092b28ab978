//! The state of captures: which streams take part in one, and which calls that forbids.
//!
//! The mock records and replays. This module decides, before the mock is called, which call is refused with which code, and
//! which call invalidates a capture. A capture is *open* from its begin to its end. A call that a capture forbids
//! invalidates it: every later call on its streams returns 901, the end included. After the end the streams work as before.
//!
//! AMD's runtime keeps this state for each stream, not for the capture (clr 6.4.3, `hip_stream.cpp` and `hip_graph.cpp`). A
//! forbidden call invalidates one stream, and the others go on recording. A capture that ends with 901 or 904 deletes its graph
//! and leaves every stream as it was: an invalidated one refuses work, and an active one records into the deleted graph, which
//! ends the process here. Destroying a stream that takes part frees the streams that joined through it.
//!
//! A call is *unsafe* while a capture is open if it could wait for the device or free memory that the capture uses. Unsafe
//! calls return 900 and invalidate the capture, on any stream, unless the thread has exchanged its mode.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::thread::ThreadId;

use highwater_hal::{Backend, StreamId};
use parking_lot::{Mutex, RwLock};

use crate::blocks::GraphMemory;
use crate::code::{Answer, Code};
use crate::handles::{NON_BLOCKING, Stream, new_number};
use crate::process::{Simulation, die, simulation};
use crate::variants::{Vendor, vendor};

/// Modes of a capture and of a thread.
pub mod mode {
    /// Unsafe calls of every thread are refused.
    pub const GLOBAL: u32 = 0;
    /// Unsafe calls of the thread that began it are refused.
    pub const THREAD_LOCAL: u32 = 1;
    /// Unsafe calls are allowed.
    pub const RELAXED: u32 = 2;
}

/// Kinds of a graph's nodes.
pub mod node {
    /// A kernel.
    pub const KERNEL: u32 = 0;
    /// A copy.
    pub const COPY: u32 = 1;
    /// A fill.
    pub const FILL: u32 = 2;
    /// A function of the host.
    pub const HOST: u32 = 3;
    /// A wait for an event outside of the graph.
    pub const WAIT: u32 = 6;
    /// Memory that is allocated.
    pub const ALLOCATE: u32 = 10;
    /// Memory that is freed.
    pub const FREE: u32 = 11;
}

/// The capture status of a stream, as `cuStreamIsCapturing` returns it.
pub mod status {
    /// It takes part in no capture.
    pub const NONE: u32 = 0;
    /// Its work is recorded.
    pub const ACTIVE: u32 = 1;
    /// Its capture was invalidated.
    pub const INVALIDATED: u32 = 2;
}

/// One capture, open or ended.
#[derive(Debug)]
pub(crate) struct Capture {
    pub(crate) mode: u32,
    pub(crate) thread: ThreadId,
    pub(crate) origin: Stream,
    /// Whether a call invalidated the capture (CUDA).
    lost: AtomicBool,
    ended: AtomicBool,
    /// Unique among the captures of the process.
    pub(crate) number: u64,
    pub(crate) nodes: Mutex<Vec<u32>>,
    /// The memory that was allocated in the capture.
    pub(crate) memory: Arc<GraphMemory>,
}

impl Capture {
    pub(crate) fn new(origin: Stream, mode: u32) -> Self {
        let [lost, ended] = [const { AtomicBool::new(false) }; 2];
        let thread = std::thread::current().id();
        let memory = Arc::new(GraphMemory::new(origin.device));
        Self { mode, thread, origin, lost, ended, number: new_number(), nodes: Mutex::default(), memory }
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }
}

/// The part of one stream in a capture.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) stream: Stream,
    pub(crate) capture: Arc<Capture>,
    /// The stream through which this stream joined; `None` for the origin.
    parent: Option<StreamId>,
    /// Whether a call invalidated this stream (HIP).
    lost: AtomicBool,
    /// Whether the stream has left the capture (HIP).
    left: AtomicBool,
    /// Whether another capture was begun on the stream after it was invalidated (HIP).
    pub(crate) begun_again: AtomicBool,
}

impl Part {
    pub(crate) fn new(stream: Stream, capture: Arc<Capture>, parent: Option<StreamId>) -> Self {
        let [lost, left, begun_again] = [const { AtomicBool::new(false) }; 3];
        Self { stream, capture, parent, lost, left, begun_again }
    }

    pub(crate) fn is_origin(&self) -> bool {
        self.parent.is_none()
    }

    pub(crate) fn is_lost(&self) -> bool {
        let lost = if vendor() == Vendor::Hip { &self.lost } else { &self.capture.lost };
        lost.load(Ordering::Acquire)
    }

    pub(crate) fn has_left(&self) -> bool {
        match vendor() {
            // An event of a destroyed stream stays part of the capture.
            Vendor::Cuda => self.capture.is_ended(),
            Vendor::Hip => self.left.load(Ordering::Acquire),
        }
    }

    /// Returns the code for work that is enqueued into it after it was invalidated.
    fn refusal(&self) -> Code {
        if self.begun_again.load(Ordering::Acquire) { Code::INVALID_VALUE } else { Code::STREAM_CAPTURE_INVALIDATED }
    }
}

/// The key of a stream. Each thread has its own per-thread default stream.
type Key = (StreamId, Option<ThreadId>);

fn key(stream: StreamId) -> Key {
    (stream, stream.is_per_thread_default().then(|| std::thread::current().id()))
}

/// The captures of the process.
pub(crate) static CAPTURES: LazyLock<Captures> = LazyLock::new(Captures::default);

/// The streams that take part in a capture.
#[derive(Debug, Default)]
pub(crate) struct Captures {
    /// The number of entries of `streams`, which saves the lock while no stream is captured.
    count: AtomicUsize,
    streams: RwLock<HashMap<Key, Arc<Part>>>,
}

impl Captures {
    /// Returns the part of a stream in a capture.
    pub(crate) fn of(&self, stream: StreamId) -> Option<Arc<Part>> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        self.streams.read().get(&key(stream)).cloned()
    }

    /// Makes a stream take part, unless it does already.
    pub(crate) fn begin(&self, part: Part) -> bool {
        let mut streams = self.streams.write();
        let key = key(part.stream.id);
        if streams.contains_key(&key) {
            return false;
        }
        streams.insert(key, Arc::new(part));
        self.count.store(streams.len(), Ordering::Release);
        true
    }

    /// Makes a stream take part, and replaces its earlier part.
    pub(crate) fn join(&self, part: Part) {
        let mut streams = self.streams.write();
        streams.insert(key(part.stream.id), Arc::new(part));
        self.count.store(streams.len(), Ordering::Release);
    }

    /// Ends a capture. Unless `streams_stay`, its streams take part in nothing from then on.
    pub(crate) fn end(&self, capture: &Arc<Capture>, streams_stay: bool) {
        capture.ended.store(true, Ordering::Release);
        if !streams_stay {
            self.leave(|part| Arc::ptr_eq(&part.capture, capture));
        }
    }

    /// Removes streams from their captures.
    fn leave(&self, leaves: impl Fn(&Arc<Part>) -> bool) {
        let mut streams = self.streams.write();
        streams.retain(|_, part| {
            let leaves = leaves(part);
            if leaves {
                part.left.store(true, Ordering::Release);
            }
            !leaves
        });
        self.count.store(streams.len(), Ordering::Release);
    }

    /// Removes a stream and every stream that joined through it (HIP).
    fn leave_with_children(&self, stream: StreamId) {
        let parents: HashMap<StreamId, StreamId> = {
            let streams = self.streams.read();
            streams.values().filter_map(|part| Some((part.stream.id, part.parent?))).collect()
        };
        let descends = |mut child: StreamId| {
            // A stream has one parent, and the chain ends at the origin. The bound is for two streams that joined each other.
            for _ in 0..=parents.len() {
                if child == stream {
                    return true;
                }
                let Some(parent) = parents.get(&child) else { return false };
                child = *parent;
            }
            false
        };
        self.leave(|part| descends(part.stream.id));
    }

    /// Returns the parts in open captures that `wanted` accepts. With AMD's rules, a forbidden call invalidates origins only.
    pub(crate) fn find(&self, wanted: impl Fn(&Part) -> bool) -> Vec<Arc<Part>> {
        if self.count.load(Ordering::Acquire) == 0 {
            return Vec::new();
        }
        let streams = self.streams.read();
        let open = |part: &&Arc<Part>| !part.capture.is_ended() && wanted(part);
        streams.values().filter(open).cloned().collect()
    }
}

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(mode::GLOBAL) };
}

/// Returns whether the legacy default stream of a device waits for a stream.
pub(crate) fn is_blocking_on(stream: &Stream, device: u32) -> bool {
    stream.device == device && stream.flags & NON_BLOCKING == 0
}

impl Simulation {
    pub(crate) fn lose_capture(&self, part: &Part) {
        if vendor() == Vendor::Hip {
            part.lost.store(true, Ordering::Release);
        } else if !part.capture.lost.swap(true, Ordering::AcqRel) {
            self.hooks.lose_capture(part.capture.origin.id, "a call was made that it does not allow");
        }
    }

    /// Invalidates captures by a call that they forbid.
    fn lose_captures(&self, forbidding: &[Arc<Part>], code: Code) -> Answer<()> {
        for part in forbidding {
            self.lose_capture(part);
        }
        if forbidding.is_empty() { Ok(()) } else { Err(code) }
    }

    /// Checks an unsafe call.
    ///
    /// # Errors
    /// 900 if an open capture forbids it to this thread. The capture is invalidated.
    pub fn check_unsafe_call(&self) -> Answer<()> {
        let (own, thread) = (MODE.get(), std::thread::current().id());
        if own == mode::RELAXED {
            return Ok(());
        }
        let forbidding = CAPTURES.find(|part| {
            let capture = &part.capture;
            let here = capture.thread == thread && capture.mode != mode::RELAXED;
            part.is_origin() && (here || (own != mode::THREAD_LOCAL && capture.mode == mode::GLOBAL))
        });
        self.lose_captures(&forbidding, Code::STREAM_CAPTURE_UNSUPPORTED)
    }

    /// Checks a call that concerns a stream and cannot be recorded, such as a query.
    ///
    /// # Errors
    /// 900 if the stream takes part in a capture, which is then invalidated.
    pub(crate) fn check_not_capturing(&self, stream: &Stream) -> Answer<()> {
        match CAPTURES.of(stream.id) {
            None => Ok(()),
            Some(part) => {
                self.lose_capture(&part);
                Err(Code::STREAM_CAPTURE_UNSUPPORTED)
            }
        }
    }

    /// Checks a use of the legacy default stream of a device. With AMD's rules, every use but a synchronous copy is allowed.
    ///
    /// # Errors
    /// 906 when a blocking stream of the device takes part in a capture, which is lost then.
    pub(crate) fn check_legacy_use(&self, device: u32) -> Answer<()> {
        if vendor() == Vendor::Hip {
            return Ok(());
        }
        let drawn_in = CAPTURES.find(|part| is_blocking_on(&part.stream, device));
        self.lose_captures(&drawn_in, Code::STREAM_CAPTURE_IMPLICIT)
    }

    /// Invalidates every open capture, as a synchronous copy does (HIP).
    ///
    /// # Errors
    /// 906 when there was one.
    pub(crate) fn check_nothing_captures(&self) -> Answer<()> {
        let open = CAPTURES.find(Part::is_origin);
        self.lose_captures(&open, Code::STREAM_CAPTURE_IMPLICIT)
    }

    /// Checks a wait for a whole device.
    ///
    /// # Errors
    /// 900 when one of its streams takes part in a capture, which is lost then.
    pub(crate) fn check_no_capture_on(&self, device: u32) -> Answer<()> {
        let open = CAPTURES.find(|part| part.is_origin() && part.stream.device == device);
        self.lose_captures(&open, Code::STREAM_CAPTURE_UNSUPPORTED)
    }

    /// Returns whether a stream takes part in a capture, which records its work.
    ///
    /// # Errors
    /// 901 if the capture was invalidated; 1 if another capture was begun on the invalidated stream (HIP). An active stream
    /// whose graph was deleted ends the process (HIP).
    pub fn is_recording(&self, stream: &Stream) -> Answer<bool> {
        match CAPTURES.of(stream.id) {
            None => Ok(false),
            Some(part) if part.is_lost() => Err(part.refusal()),
            Some(part) if part.capture.is_ended() => die(
                "the simulated HIP runtime: work was recorded into a graph that was deleted, which corrupts HIP's memory",
            ),
            Some(_) => Ok(true),
        }
    }

    /// Invalidates the capture that a stream takes part in, if any.
    pub fn lose_capture_of(&self, stream: &Stream) {
        if let Some(part) = CAPTURES.of(stream.id) {
            self.lose_capture(&part);
        }
    }

    /// Records that the last operation added `count` nodes of a kind to a capture. Call it after the operation was enqueued.
    /// Does nothing if the stream takes part in no capture.
    pub fn note_nodes(&self, stream: &Stream, kind: u32, count: usize) {
        if let Some(part) = CAPTURES.of(stream.id) {
            part.capture.nodes.lock().extend(std::iter::repeat_n(kind, count));
        }
    }

    /// Removes a destroyed stream from its capture. A capture ends with the stream on which it began. CUDA: the capture goes on
    /// without any other stream.
    pub(crate) fn leave_capture(&self, stream: &Stream) {
        let Some(part) = CAPTURES.of(stream.id) else { return };
        if vendor() == Vendor::Hip {
            CAPTURES.leave_with_children(stream.id);
            if part.is_origin() && !part.capture.is_ended() {
                self.abandon(&part.capture);
            }
            return;
        }
        if part.is_origin() {
            self.lose_capture(&part);
            CAPTURES.end(&part.capture, false);
        } else {
            CAPTURES.leave(|other| Arc::ptr_eq(other, &part));
            self.hooks.leave_capture(stream.id);
        }
    }

    /// Ends a capture and discards its graph.
    pub(crate) fn abandon(&self, capture: &Arc<Capture>) {
        CAPTURES.end(capture, true);
        // SAFETY: the graph is destroyed and never launched.
        if let Ok(graph) = unsafe { self.gpu.end_capture(capture.origin.id) } {
            let _ = self.gpu.destroy_graph(graph);
        }
    }
}

/// `cuThreadExchangeStreamCaptureMode`: sets the thread's mode and returns the previous one. An unknown mode is accepted; its
/// meaning is not documented, and here it is [`mode::GLOBAL`].
///
/// # Errors
/// As [`simulation`].
pub fn exchange_mode(new: u32) -> Answer<u32> {
    simulation()?;
    Ok(MODE.replace(new))
}
