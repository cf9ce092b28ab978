//! The state of mutants between calls.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use highwater_hal::{Result, StreamId};

use super::reference::Reference;

/// A value that the hooks of one mutant share.
pub(super) struct Shared<T>(Arc<Mutex<T>>);

impl<T> Shared<T> {
    /// Creates a shared value.
    pub(super) fn new(value: T) -> Self {
        Self(Arc::new(Mutex::new(value)))
    }

    /// Reads or changes the value under its lock. `look` must not call a backend.
    pub(super) fn with<R>(&self, look: impl FnOnce(&mut T) -> R) -> R {
        look(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<T: Copy> Shared<T> {
    pub(super) fn get(&self) -> T {
        self.with(|value| *value)
    }

    pub(super) fn set(&self, value: T) {
        self.with(|old| *old = value);
    }
}

impl<T: Default> Default for Shared<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

/// An operation that a case requested and that was not forwarded yet.
type Operation = Box<dyn FnOnce(&Reference) -> Result<()> + Send>;

/// Operations that are forwarded later than requested, in order, by stream.
#[derive(Clone, Default)]
pub(super) struct Deferred(Shared<HashMap<StreamId, Vec<Operation>>>);

impl Deferred {
    /// Defers an operation.
    pub(super) fn defer(&self, stream: StreamId, operation: impl FnOnce(&Reference) -> Result<()> + Send + 'static) {
        self.0.with(|held| held.entry(stream).or_default().push(Box::new(operation)));
    }

    /// Returns whether the stream has deferred operations.
    pub(super) fn has(&self, stream: StreamId) -> bool {
        self.0.with(|held| held.contains_key(&stream))
    }

    /// Forwards the deferred operations of this stream, or of all streams.
    pub(super) fn release(&self, reference: &Reference, stream: Option<StreamId>) -> Result<()> {
        let taken: Vec<Operation> = self.0.with(|held| match stream {
            Some(stream) => held.remove(&stream).unwrap_or_default(),
            None => held.drain().flat_map(|(_, operations)| operations).collect(),
        });
        taken.into_iter().try_for_each(|operation| operation(reference))
    }

    /// Discards the deferred operations of the stream.
    pub(super) fn forget(&self, stream: StreamId) {
        self.0.with(|held| held.remove(&stream));
    }
}

impl fmt::Debug for Deferred {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Deferred").finish_non_exhaustive()
    }
}
