//! Streams that the caller did not create here: streams of other code, wrapped under an id of their own, and the
//! default stream of each thread.
//!
//! The raw handle of a stream or event is found only while the object lives (`raw_handles`). A wrapper shares the object,
//! and is forgotten when it is destroyed.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::sync::{Arc, Weak};
use std::thread::ThreadId;

use highwater_hal::{Error, ErrorKind};
use parking_lot::Mutex;

use crate::calls::Calls;
use crate::engine::Engine;
use crate::operation::Operation;
use crate::stream::Stream;
use highwater_hal::exit;

#[cold]
pub(crate) fn unknown(operation: Operation, what: &str, device: u32, other: Option<u32>, raw: u64) -> Error {
    if let Some(other) = other {
        return operation
            .error(
                ErrorKind::WrongDevice,
                format!("the {what} {raw:#x} belongs to device {other}, not to device {device}"),
            )
            .with_hint(format!("pass the device on which the {what} was created"));
    }
    operation
        .error(ErrorKind::InvalidHandle, format!("{raw:#x} is not a live {what} of device {device}"))
        .with_hint(format!("pass the result of `raw_{what}`, and keep the {what} until its wrapper is destroyed"))
}

/// The ids of wrappers.
#[derive(Debug)]
pub(crate) struct Wrappers<I>(Mutex<HashSet<I>>);

impl<I: Eq + Hash> Wrappers<I> {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(HashSet::new()))
    }

    pub(crate) fn add(&self, id: I) {
        self.0.lock().insert(id);
    }

    /// Forgets a wrapper. Returns whether the id was one.
    pub(crate) fn forget(&self, id: &I) -> bool {
        self.0.lock().remove(id)
    }

    pub(crate) fn count(&self) -> u64 {
        self.0.lock().len() as u64
    }
}

/// The per-thread default streams of one backend. A stream begins with its first use, and ends with its thread or with
/// the backend, whichever is first. Its enqueued work is executed in either case.
#[derive(Debug)]
pub(crate) struct ThreadStreams {
    calls: Arc<Calls>,
    streams: Mutex<HashMap<(ThreadId, u32), Arc<Stream>>>,
}

impl ThreadStreams {
    pub(crate) fn new(calls: Arc<Calls>) -> Arc<Self> {
        Arc::new(Self { calls, streams: Mutex::new(HashMap::new()) })
    }

    /// Returns the calling thread's stream of a device.
    pub(crate) fn get(self: &Arc<Self>, engine: &Arc<Engine>, device: u32) -> Arc<Stream> {
        let key = (std::thread::current().id(), device);
        let mut streams = self.streams.lock();
        if let Some(stream) = streams.get(&key) {
            return Arc::clone(stream);
        }
        let stream = Stream::new(engine, device);
        streams.insert(key, Arc::clone(&stream));
        drop(streams);
        // A thread that is ending leaves the stream to the backend.
        let _ = END.try_with(|end| end.backends.borrow_mut().push(Arc::downgrade(self)));
        stream
    }

    fn end(&self, thread: ThreadId) {
        // A thread that a forked child does not have may hold the lock.
        if !self.calls.is_own_process() || exit::has_begun() {
            return;
        }
        let ended: Vec<_> = self.streams.lock().extract_if(|(owner, _), _| *owner == thread).collect();
        for (_, stream) in ended {
            stream.close();
        }
    }
}

/// Ends the streams of a thread when the thread ends.
struct EndOfThread {
    thread: ThreadId,
    backends: RefCell<Vec<Weak<ThreadStreams>>>,
}

impl Drop for EndOfThread {
    fn drop(&mut self) {
        for backend in self.backends.take() {
            if let Some(streams) = backend.upgrade() {
                streams.end(self.thread);
            }
        }
    }
}

thread_local! {
    static END: EndOfThread =
        EndOfThread { thread: std::thread::current().id(), backends: RefCell::new(Vec::new()) };
}
