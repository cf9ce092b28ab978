//! The state of captures: which streams take part in one, and which calls that forbids.
//!
//! The mock records and replays. This module decides, before the mock is called, which call is refused with which code, and
//! which call invalidates a capture. A capture is *open* from its begin to its end. A call that a capture forbids
//! invalidates it: every later call on its streams returns 901, the end included. After the end the streams work as before.
//!
//! With AMD's rules the streams of an invalidated capture are *dead* after its end, the origin and every stream that had
//! joined. A dead stream can only be destroyed.
//!
//! A call is *unsafe* while a capture is open if it could wait for the device or free memory that the capture uses. Unsafe
//! calls return 900 and invalidate the capture, on any stream, unless the thread has exchanged its mode.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::thread::ThreadId;

use highwater_hal::StreamId;
use parking_lot::{Mutex, RwLock};

use crate::blocks::GraphMemory;
use crate::code::{Answer, Code};
use crate::handles::{NON_BLOCKING, Stream, new_number};
use crate::process::{Simulation, simulation};
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
    lost: AtomicBool,
    ended: AtomicBool,
    /// Whether another capture was begun on one of its dead streams.
    pub(crate) begun_again: AtomicBool,
    /// Unique among the captures of the process.
    pub(crate) number: u64,
    pub(crate) nodes: Mutex<Vec<u32>>,
    /// The memory that was allocated in the capture.
    pub(crate) memory: Arc<GraphMemory>,
}

impl Capture {
    pub(crate) fn new(origin: Stream, mode: u32) -> Self {
        let [lost, ended, begun_again] = [const { AtomicBool::new(false) }; 3];
        let thread = std::thread::current().id();
        let memory = Arc::new(GraphMemory::new(origin.device));
        Self { mode, thread, origin, lost, ended, begun_again, number: new_number(), nodes: Mutex::default(), memory }
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Returns whether its streams are dead.
    pub(crate) fn is_dead(&self) -> bool {
        self.is_lost() && self.is_ended()
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

/// The open captures, and the invalidated ones whose streams are dead.
#[derive(Debug, Default)]
pub(crate) struct Captures {
    /// The number of entries of `streams`, which saves the lock while no stream is captured.
    count: AtomicUsize,
    /// The capture of each stream that takes part in one.
    streams: RwLock<HashMap<Key, (Stream, Arc<Capture>)>>,
}

impl Captures {
    /// Returns the capture that a stream takes part in or died with.
    pub(crate) fn of(&self, stream: StreamId) -> Option<Arc<Capture>> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        self.streams.read().get(&key(stream)).map(|(_, capture)| Arc::clone(capture))
    }

    pub(crate) fn begin(&self, stream: Stream, capture: Arc<Capture>) -> bool {
        let mut streams = self.streams.write();
        if streams.contains_key(&key(stream.id)) {
            return false;
        }
        streams.insert(key(stream.id), (stream, capture));
        self.count.store(streams.len(), Ordering::Release);
        true
    }

    pub(crate) fn join(&self, stream: Stream, capture: Arc<Capture>) {
        let mut streams = self.streams.write();
        streams.insert(key(stream.id), (stream, capture));
        self.count.store(streams.len(), Ordering::Release);
    }

    /// Ends a capture. Dead streams stay in the table.
    pub(crate) fn end(&self, capture: &Arc<Capture>, streams_die: bool) {
        if !capture.ended.swap(true, Ordering::AcqRel) && !streams_die {
            self.leave(|_, other| Arc::ptr_eq(other, capture));
        }
    }

    /// Removes streams from their captures.
    fn leave(&self, left: impl Fn(StreamId, &Arc<Capture>) -> bool) {
        let mut streams = self.streams.write();
        streams.retain(|_, (stream, capture)| !left(stream.id, capture));
        self.count.store(streams.len(), Ordering::Release);
    }

    /// Returns the open captures with a stream that `wanted` accepts.
    pub(crate) fn find(&self, wanted: impl Fn(&Stream, &Capture) -> bool) -> Vec<Arc<Capture>> {
        if self.count.load(Ordering::Acquire) == 0 {
            return Vec::new();
        }
        let streams = self.streams.read();
        let found = streams.values().filter(|(stream, capture)| !capture.is_ended() && wanted(stream, capture));
        found.map(|(_, capture)| Arc::clone(capture)).collect()
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
    pub(crate) fn lose_capture(&self, capture: &Capture) {
        if !capture.lost.swap(true, Ordering::AcqRel) {
            self.hooks.lose_capture(capture.origin.id, "a call was made that it does not allow");
        }
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
        let forbidding = CAPTURES.find(|_, capture| {
            let here = capture.thread == thread && capture.mode != mode::RELAXED;
            here || (own != mode::THREAD_LOCAL && capture.mode == mode::GLOBAL)
        });
        for capture in &forbidding {
            self.lose_capture(capture);
        }
        if forbidding.is_empty() { Ok(()) } else { Err(Code::STREAM_CAPTURE_UNSUPPORTED) }
    }

    /// Checks a query of a stream or a wait for it.
    ///
    /// # Errors
    /// 900 if the stream takes part in a capture, which is then invalidated; 901 if it was already invalidated (HIP: 900).
    pub(crate) fn check_not_capturing(&self, stream: &Stream) -> Answer<()> {
        match CAPTURES.of(stream.id) {
            None => Ok(()),
            Some(capture) if capture.is_lost() && vendor() == Vendor::Cuda => Err(Code::STREAM_CAPTURE_INVALIDATED),
            Some(capture) => {
                self.lose_capture(&capture);
                Err(Code::STREAM_CAPTURE_UNSUPPORTED)
            }
        }
    }

    /// Checks a use of the legacy default stream of a device.
    ///
    /// # Errors
    /// 906 when a blocking stream of the device takes part in a capture, which is lost then.
    pub(crate) fn check_legacy_use(&self, device: u32) -> Answer<()> {
        let drawn_in = CAPTURES.find(|stream, _| is_blocking_on(stream, device));
        for capture in &drawn_in {
            self.lose_capture(capture);
        }
        if drawn_in.is_empty() { Ok(()) } else { Err(Code::STREAM_CAPTURE_IMPLICIT) }
    }

    /// Invalidates every open capture, as a synchronous copy does (HIP).
    ///
    /// # Errors
    /// 906 when there was one.
    pub(crate) fn check_nothing_captures(&self) -> Answer<()> {
        let open = CAPTURES.find(|_, _| true);
        for capture in &open {
            self.lose_capture(capture);
        }
        if open.is_empty() { Ok(()) } else { Err(Code::STREAM_CAPTURE_IMPLICIT) }
    }

    /// Checks a wait for a whole device.
    ///
    /// # Errors
    /// 900 when one of its streams takes part in a capture, which is lost then.
    pub(crate) fn check_no_capture_on(&self, device: u32) -> Answer<()> {
        let open = CAPTURES.find(|stream, _| stream.device == device);
        for capture in &open {
            self.lose_capture(capture);
        }
        if open.is_empty() { Ok(()) } else { Err(Code::STREAM_CAPTURE_UNSUPPORTED) }
    }

    /// Returns whether a stream takes part in a capture, which records its work.
    ///
    /// # Errors
    /// 901 if the capture was invalidated; 1 if another capture was begun on a stream that died with it (HIP).
    pub fn is_recording(&self, stream: &Stream) -> Answer<bool> {
        match CAPTURES.of(stream.id) {
            None => Ok(false),
            Some(capture) if capture.is_lost() => Err(capture.refusal()),
            Some(_) => Ok(true),
        }
    }

    /// Invalidates the capture that a stream takes part in, if any.
    pub fn lose_capture_of(&self, stream: &Stream) {
        if let Some(capture) = CAPTURES.of(stream.id) {
            self.lose_capture(&capture);
        }
    }

    /// Records that the last operation added `count` nodes of a kind to a capture. Call it after the operation was enqueued.
    /// Does nothing if the stream takes part in no capture.
    pub fn note_nodes(&self, stream: &Stream, kind: u32, count: usize) {
        if let Some(capture) = CAPTURES.of(stream.id) {
            capture.nodes.lock().extend(std::iter::repeat_n(kind, count));
        }
    }

    /// Removes a destroyed stream from its capture. A capture ends with the stream on which it began.
    pub(crate) fn leave_capture(&self, stream: &Stream) {
        if let Some(capture) = CAPTURES.of(stream.id) {
            self.lose_capture(&capture);
            if capture.origin.id == stream.id {
                CAPTURES.end(&capture, vendor() == Vendor::Hip);
            }
            if vendor() == Vendor::Hip {
                CAPTURES.leave(|other, _| other == stream.id);
            }
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
