//! A stream that used memory, as the memory knows it: the stream while it is alive, and its end.

use std::fmt;
use std::sync::{Arc, Weak};

use super::completion_events::{CompletionEvent, WaitForEnd};
use crate::primitive::{Condvar, Mutex};
use highwater_hal::{DevicePtr, Error, ErrorKind, Result, StreamId};

/// A stream that has users.
pub(crate) trait LiveStream: fmt::Debug + Send + Sync {
    fn id(&self) -> StreamId;

    /// Records a completion event after all work enqueued on the stream so far, except captured work.
    fn completion(&self) -> Result<Arc<CompletionEvent>>;

    /// Does the same as [`LiveStream::completion`], for a thread that must not wait for long. `None` if another thread is enqueuing.
    fn completion_soon(&self) -> Result<Option<Arc<CompletionEvent>>> {
        self.completion().map(Some)
    }

    /// Records an event after the work that the stream has recorded in a capture so far. The address identifies the capture.
    /// `None` if the stream takes no part in it.
    fn completion_in(&self, _capture: usize) -> Result<Option<Arc<CompletionEvent>>> {
        Ok(None)
    }

    /// Enqueues a fill of free memory with a value. Fails if the stream takes part in a capture.
    ///
    /// # Safety
    /// The memory is mapped, and no later work than that of this stream uses it before the fill is executed.
    unsafe fn fill(&self, ptr: DevicePtr, bytes: usize, value: u8) -> Result<()>;

    /// Records an event in the capture in which the stream takes part under this key. `None` if it takes part in none.
    fn record_in_capture(&self, _key: u64) -> Result<Option<CompletionEvent>> {
        Ok(None)
    }

    /// Returns whether free memory must stay, because launches of a graph use it.
    fn keeps_free_memory(&self) -> bool {
        false
    }

    /// Returns whether the stream has executed everything except captured work, so that its use needs no completion event.
    /// Costs one call of the backend, and no event.
    fn is_over(&self) -> bool;

    /// Returns whether the stream has executed everything, without waiting. False if the stream takes part in a capture.
    fn is_idle(&self) -> bool;

    fn count_failed_release(&self, error: &Error);
}

/// The remains of a stream that has ended: the completion event of its last work.
#[derive(Debug, Default)]
pub(crate) struct StreamEnd {
    /// `Some` once the stream has ended. Contains `None` if its end has no completion event.
    last: Mutex<Option<Option<Arc<CompletionEvent>>>>,
    ended: Condvar,
}

impl StreamEnd {
    /// Returns the last completion event of a stream that has ended.
    pub(crate) fn if_ended(&self) -> Option<Arc<CompletionEvent>> {
        self.last.lock().clone().flatten()
    }

    /// Waits for the thread that ends the stream, and returns the last completion event.
    pub(crate) fn wait(&self) -> Option<Arc<CompletionEvent>> {
        let mut last = self.last.lock();
        while last.is_none() {
            self.ended.wait(&mut last);
        }
        last.clone().flatten()
    }

    /// Sets the last completion event.
    pub(crate) fn set(&self, last: Option<Arc<CompletionEvent>>) {
        *self.last.lock() = Some(last);
        self.ended.notify_all();
    }
}

impl WaitForEnd for StreamEnd {
    fn wait_for_end(&self) {
        self.wait();
    }
}

/// The end of a stream's use of a block.
#[derive(Clone)]
pub(crate) enum UseEnd {
    /// After this event.
    At(Arc<CompletionEvent>),
    /// Not possible while other code captures the stream. The event would become part of the graph and never complete.
    Later,
    /// The end is unknown.
    Unknown,
}

/// A record of a stream. It does not keep the stream alive.
#[derive(Debug, Clone)]
pub(crate) struct StreamUse {
    key: u64,
    stream: Weak<dyn LiveStream>,
    end: Arc<StreamEnd>,
}

impl StreamUse {
    pub(crate) fn new(key: u64, stream: Weak<dyn LiveStream>, end: Arc<StreamEnd>) -> Self {
        Self { key, stream, end }
    }

    pub(crate) fn key(&self) -> u64 {
        self.key
    }

    /// Returns the stream, while it is alive.
    pub(crate) fn stream(&self) -> Option<Arc<dyn LiveStream>> {
        self.stream.upgrade()
    }

    /// Returns the completion event of the stream's last work, once the stream has ended. `None` if its end has none.
    pub(crate) fn last(&self) -> Option<Arc<CompletionEvent>> {
        self.end.wait()
    }

    /// Returns the key and the last completion event of a stream that has ended.
    pub(crate) fn if_ended(&self) -> Option<(u64, Arc<CompletionEvent>)> {
        self.end.if_ended().map(|completion| (self.key, completion))
    }

    /// As [`LiveStream::is_over`]. False if the stream has ended.
    pub(crate) fn is_over(&self) -> bool {
        self.stream().is_some_and(|stream| stream.is_over())
    }

    /// Records the end of all work enqueued on the stream so far.
    pub(crate) fn completion(&self) -> UseEnd {
        self.completion_by(|stream| stream.completion().map(Some))
    }

    /// Does the same as [`StreamUse::completion`], for a call that can report the error. `None` if the end is unknown.
    pub(crate) fn try_completion(&self) -> Result<Option<Arc<CompletionEvent>>> {
        self.stream().map_or_else(|| Ok(self.last()), |stream| stream.completion().map(Some))
    }

    /// Does the same as [`StreamUse::completion`], for a thread that must not wait for long. `Later` if another thread is enqueuing.
    pub(crate) fn completion_soon(&self) -> UseEnd {
        self.completion_by(|stream| stream.completion_soon())
    }

    fn completion_by(&self, record: impl FnOnce(&dyn LiveStream) -> Result<Option<Arc<CompletionEvent>>>) -> UseEnd {
        if let Some(stream) = self.stream() {
            // The reference keeps the stream from being destroyed in the meantime.
            return match record(&*stream) {
                Ok(Some(completion)) => UseEnd::At(completion),
                Ok(None) => UseEnd::Later,
                Err(error) if error.kind() == ErrorKind::Capture => UseEnd::Later,
                Err(error) => {
                    stream.count_failed_release(&error);
                    UseEnd::Unknown
                }
            };
        }
        // The last user is gone. Its thread has set the last completion event, or is about to.
        self.last().map_or(UseEnd::Unknown, UseEnd::At)
    }
}
