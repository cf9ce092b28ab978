//! Stream captures by the vendor's rules.
//!
//! The mock records and replays; which call is refused, with which code, and what loses a capture is decided here,
//! before the mock is called. A capture is *open* from its begin to its end. It is *lost* in between when a call was made
//! that it does not allow: then everything on its streams answers 901 until it is ended, the end too, and after that the
//! streams are as good as before.
//!
//! With AMD's rules a lost capture takes its streams with it: once it is ended they are *dead*, that on which it began and
//! every one that had joined, and good for nothing but being destroyed.
//!
//! Calls that could wait for the device, or that could free what a capture uses, are *unsafe* while a capture is open,
//! whatever stream they concern: they answer 900 and lose the capture, unless the thread has exchanged its mode.

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
    /// No unsafe call is refused.
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

/// Where a stream stands, as `cuStreamIsCapturing` tells.
pub mod status {
    /// It takes part in no capture.
    pub const NONE: u32 = 0;
    /// Its work is recorded.
    pub const ACTIVE: u32 = 1;
    /// Its capture was lost.
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
    /// Whether another capture was begun on a dead stream of it.
    pub(crate) begun_again: AtomicBool,
    /// No other capture of the process has it.
    pub(crate) number: u64,
    pub(crate) nodes: Mutex<Vec<u32>>,
    /// What was allocated in it.
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

    /// Whether its streams are dead.
    pub(crate) fn is_dead(&self) -> bool {
        self.is_lost() && self.is_ended()
    }

    /// What a call answers that would enqueue something into it after it was lost.
    fn refusal(&self) -> Code {
        if self.begun_again.load(Ordering::Acquire) { Code::INVALID_VALUE } else { Code::STREAM_CAPTURE_INVALIDATED }
    }
}

/// Which stream it is. The per-thread default stream is another one for each thread.
type Key = (StreamId, Option<ThreadId>);

fn key(stream: StreamId) -> Key {
    (stream, stream.is_per_thread_default().then(|| std::thread::current().id()))
}

/// The captures of the process.
pub(crate) static CAPTURES: LazyLock<Captures> = LazyLock::new(Captures::default);

/// The open captures, and the lost ones whose streams are dead.
#[derive(Debug, Default)]
pub(crate) struct Captures {
    /// How many streams there are below.
    count: AtomicUsize,
    /// The captures that streams take part in.
    streams: RwLock<HashMap<Key, (Stream, Arc<Capture>)>>,
}

impl Captures {
    /// The capture that a stream takes part in, or died with.
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

    /// Ends a capture. Its streams stay in the table where they die with it.
    pub(crate) fn end(&self, capture: &Arc<Capture>, streams_die: bool) {
        if !capture.ended.swap(true, Ordering::AcqRel) && !streams_die {
            self.leave(|_, other| Arc::ptr_eq(other, capture));
        }
    }

    /// Takes streams out of their captures.
    fn leave(&self, left: impl Fn(StreamId, &Arc<Capture>) -> bool) {
        let mut streams = self.streams.write();
        streams.retain(|_, (stream, capture)| !left(stream.id, capture));
        self.count.store(streams.len(), Ordering::Release);
    }

    /// The open captures for which `wanted` holds of one of the streams.
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

/// Whether the legacy default stream of a device waits for a stream.
pub(crate) fn is_blocking_on(stream: &Stream, device: u32) -> bool {
    stream.device == device && stream.flags & NON_BLOCKING == 0
}

impl Simulation {
    pub(crate) fn lose_capture(&self, capture: &Capture) {
        if !capture.lost.swap(true, Ordering::AcqRel) {
            self.hooks.lose_capture(capture.origin.id, "a call was made that it does not allow");
        }
    }

    /// To be called before what is unsafe while something is captured.
    ///
    /// # Errors
    /// 900 when a capture that is open forbids it to this thread; the capture is lost then.
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

    /// To be called before a stream is asked or waited for.
    ///
    /// # Errors
    /// 900 when the stream takes part in a capture, which is lost then; 901 when that was lost before (HIP: 900).
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

    /// Whether the legacy default stream of a device may be used.
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

    /// Loses every open capture, as a copy does that is done when its call returns (HIP).
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

    /// To be called before a whole device is waited for.
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

    /// Whether a stream takes part in a capture, so that what it is given is recorded.
    ///
    /// # Errors
    /// 901 when the capture was lost; 1 when another was begun on a stream that died with it (HIP).
    pub fn is_recording(&self, stream: &Stream) -> Answer<bool> {
        match CAPTURES.of(stream.id) {
            None => Ok(false),
            Some(capture) if capture.is_lost() => Err(capture.refusal()),
            Some(_) => Ok(true),
        }
    }

    /// Loses the capture that a stream takes part in, if any, as a call does that a capture does not allow.
    pub fn lose_capture_of(&self, stream: &Stream) {
        if let Some(capture) = CAPTURES.of(stream.id) {
            self.lose_capture(&capture);
        }
    }

    /// Notes what a capture recorded as `count` nodes of a kind; to be called after something was enqueued. Does
    /// nothing where the stream takes part in no capture.
    pub fn note_nodes(&self, stream: &Stream, kind: u32, count: usize) {
        if let Some(capture) = CAPTURES.of(stream.id) {
            capture.nodes.lock().extend(std::iter::repeat_n(kind, count));
        }
    }

    /// Takes a stream that is destroyed out of its capture. Without the stream that it began on, a capture is over.
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

/// `cuThreadExchangeStreamCaptureMode`: sets the thread's mode and gives the one before. Unknown modes are taken; what they
/// mean is not known, and here they are [`mode::GLOBAL`].
///
/// # Errors
/// As [`simulation`].
pub fn exchange_mode(new: u32) -> Answer<u32> {
    simulation()?;
    Ok(MODE.replace(new))
}
