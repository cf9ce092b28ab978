//! Completion events: points of streams that other work waits for.
//!
//! Events are kept and reused, because creating one costs more than recording it. Some drivers are very slow when several
//! threads create events at once.
//!
//! A [`CompletionEvent`] owns its event and returns it to the pool when it is dropped. A thread that queries one after
//! releasing a lock shares it by `Arc`. Otherwise another thread could reuse the event in the meantime.
//!
//! The completion events of one stream are numbered in the order of their records, which is the order in which they pass.
//! So of two such events the one with the higher number covers the other. If one is not passed, no later one is.
//!
//! The completion event of an open batch (see `use_batches.rs`) is numbered, but not yet recorded. Every other record of the
//! stream first records the open batch, so the order above holds.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::use_batches::Progress;
use highwater_hal::{Backend, Error, ErrorKind, EventId, EventOptions, Result, fork::Generation};

/// Idle events of one device, without timing.
#[derive(Debug)]
pub(crate) struct EventPool {
    device: u32,
    generation: Generation,
    idle: Mutex<Vec<EventId>>,
    /// Exposed events whose last user was a wait. They are destroyed with the idle ones.
    left: Mutex<Vec<EventId>>,
    /// Events that the pool created and still owns.
    held: AtomicU64,
}

/// An event of the pool, in use.
#[derive(Debug)]
pub(crate) struct CompletionEvent {
    event: EventId,
    /// `None` once the event no longer belongs to the pool.
    pool: Option<Arc<EventPool>>,
    point: Point,
    progress: Progress,
    /// For the event of a batch: the stream that records it.
    recorder: Option<Recorder>,
    /// True if other code has the event. Such an event does not return to the pool: that code could record it again while its next
    /// user frees memory by it. Relaxed: the caller exposes the event before other code has it.
    exposed: AtomicBool,
}

/// A stream that records the event of its batch. It keeps nothing alive.
#[derive(Debug)]
pub(crate) struct Recorder {
    pub(crate) stream: Weak<dyn CloseBatch>,
    pub(crate) end: Weak<dyn WaitForEnd>,
}

/// A stream with an open batch.
pub(crate) trait CloseBatch: fmt::Debug + Send + Sync {
    /// Closes a batch of the stream, if it is open. Returns whether it is closed now. Without `wait`, does nothing if another
    /// thread has the submission lock.
    fn close_batch(&self, batch: &CompletionEvent, wait: bool) -> Result<bool>;
}

/// The end of a stream.
pub(crate) trait WaitForEnd: fmt::Debug + Send + Sync {
    /// Waits until the stream has closed its batch for the last time.
    fn wait_for_end(&self);
}

/// A point of a stream: its key, and the number of the completion event. Both are 0 before the completion event is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct Point {
    pub(crate) stream: u64,
    pub(crate) number: u64,
}

impl EventPool {
    pub(crate) fn new(device: u32, generation: Generation) -> Arc<Self> {
        Arc::new(Self { device, generation, idle: Mutex::default(), left: Mutex::default(), held: AtomicU64::new(0) })
    }

    /// Returns an event that no other code refers to and that is not yet recorded.
    pub(crate) fn take(self: &Arc<Self>, backend: &dyn Backend) -> Result<CompletionEvent> {
        let idle = self.idle.lock().pop();
        let event = match idle {
            Some(event) => event,
            None => {
                let event = backend.create_event(self.device, &EventOptions::new())?;
                // Relaxed: the count orders nothing.
                self.held.fetch_add(1, Ordering::Relaxed);
                event
            }
        };
        Ok(self.own(event, false))
    }

    /// Takes an event that the pool did not create, and never gives it out.
    pub(crate) fn adopt(self: &Arc<Self>, event: EventId) -> CompletionEvent {
        self.held.fetch_add(1, Ordering::Relaxed);
        self.own(event, true)
    }

    fn own(self: &Arc<Self>, event: EventId, exposed: bool) -> CompletionEvent {
        CompletionEvent {
            event,
            pool: Some(Arc::clone(self)),
            point: Point::default(),
            progress: Progress::new(true),
            recorder: None,
            exposed: AtomicBool::new(exposed),
        }
    }

    /// Removes every event without a user from the pool, for the caller to destroy.
    pub(crate) fn take_all(&self) -> Vec<EventId> {
        let mut idle = std::mem::take(&mut *self.idle.lock());
        idle.append(&mut self.left.lock());
        self.held.fetch_sub(idle.len() as u64, Ordering::Relaxed);
        idle
    }

    /// Returns the number of events that the pool owns, and the number of idle ones among them.
    pub(crate) fn held(&self) -> (u64, u64) {
        (self.held.load(Ordering::Relaxed), self.idle.lock().len() as u64)
    }
}

impl CompletionEvent {
    pub(crate) fn event(&self) -> EventId {
        self.event
    }

    /// Records that other code has the event.
    pub(crate) fn expose(&self) {
        self.exposed.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_exposed(&self) -> bool {
        self.exposed.load(Ordering::Relaxed)
    }

    pub(crate) fn point(&self) -> Point {
        self.point
    }

    /// Sets the point at which the event is recorded. Only [`StreamCore::record`](crate::stream::core::StreamCore::record)
    /// knows it.
    pub(crate) fn set_point(&mut self, point: Point) {
        self.point = point;
    }

    /// Makes this the event of a batch that the stream opens at the point.
    pub(crate) fn open(mut self, point: Point, recorder: Recorder) -> Self {
        self.point = point;
        self.progress = Progress::new(false);
        self.recorder = Some(recorder);
        self
    }

    pub(crate) fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Returns whether the event is recorded or passed. Otherwise its batch is open.
    pub(crate) fn is_recorded(&self) -> bool {
        self.progress.is_closed()
    }

    /// Records the event if it belongs to an open batch. Returns whether it is recorded or passed now. Without `wait`, does
    /// nothing if another thread has the submission lock of the stream. The caller must hold no submission lock.
    ///
    /// # Errors
    /// `Capture` if other code captures the stream; the backend's error; `InvalidState` if the stream has ended and could
    /// neither record the event nor wait.
    pub(crate) fn ensure_recorded(&self, wait: bool) -> Result<bool> {
        if self.progress.is_closed() {
            return Ok(true);
        }
        let Some(recorder) = &self.recorder else { return Ok(true) };
        if let Some(stream) = recorder.stream.upgrade() {
            return stream.close_batch(self, wait);
        }
        // The last user of the stream is gone. Its thread has recorded the event, or is about to.
        if wait && let Some(end) = recorder.end.upgrade() {
            end.wait_for_end();
        }
        if wait && !self.progress.is_closed() {
            return Err(never_recorded());
        }
        Ok(self.progress.is_closed())
    }

    /// Removes the event from the pool, for the caller to destroy.
    pub(crate) fn into_event(mut self) -> EventId {
        if let Some(pool) = self.pool.take() {
            pool.held.fetch_sub(1, Ordering::Relaxed);
        }
        self.event
    }
}

#[cold]
pub(crate) fn never_recorded() -> Error {
    Error::new(ErrorKind::InvalidState, "record_event", "the end of earlier work could not be recorded")
        .with_hint("drop the memory that the work uses; it is freed when the runtime ends")
}

impl Drop for CompletionEvent {
    fn drop(&mut self) {
        // In a forked child, a thread that does not exist may hold the lock. A wait on a device for this record continues to
        // refer to it after the event is recorded again.
        if let Some(pool) = &self.pool
            && pool.generation.is_current()
        {
            let unused = if *self.exposed.get_mut() { &pool.left } else { &pool.idle };
            unused.lock().push(self.event);
        }
    }
}

#[cfg(test)]
impl EventPool {
    pub(crate) fn hold_lock(&self) -> impl Drop + '_ {
        crate::testing::Held((self.idle.lock(), self.left.lock()))
    }

    pub(crate) fn is_locked(&self) -> bool {
        self.idle.is_locked() || self.left.is_locked()
    }
}
