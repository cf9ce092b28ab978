//! What mutants remember from call to call.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use highwater_hal::{Result, StreamId};

use super::reference::Reference;

/// A value that the hooks of one mutant share.
pub(super) struct Shared<T>(Arc<Mutex<T>>);

impl<T> Shared<T> {
    /// A value to begin with.
    pub(super) fn new(value: T) -> Self {
        Self(Arc::new(Mutex::new(value)))
    }

    /// Looks at the value, or changes it. Never calls a backend: the lock is held meanwhile.
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

/// Something that was asked of a backend and was not handed on yet.
type Operation = Box<dyn FnOnce(&Reference) -> Result<()> + Send>;

/// Operations that are handed on later than they were asked for, in order, by stream.
#[derive(Clone, Default)]
pub(super) struct Deferred(Shared<HashMap<StreamId, Vec<Operation>>>);

impl Deferred {
    /// Keeps an operation back.
    pub(super) fn defer(&self, stream: StreamId, operation: impl FnOnce(&Reference) -> Result<()> + Send + 'static) {
        self.0.with(|held| held.entry(stream).or_default().push(Box::new(operation)));
    }

    /// Whether something of the stream is kept back.
    pub(super) fn has(&self, stream: StreamId) -> bool {
        self.0.with(|held| held.contains_key(&stream))
    }

    /// Hands on what is kept back of this stream, or of every stream.
    pub(super) fn release(&self, reference: &Reference, stream: Option<StreamId>) -> Result<()> {
        let taken: Vec<Operation> = self.0.with(|held| match stream {
            Some(stream) => held.remove(&stream).unwrap_or_default(),
            None => held.drain().flat_map(|(_, operations)| operations).collect(),
        });
        taken.into_iter().try_for_each(|operation| operation(reference))
    }

    /// Forgets what is kept back of the stream.
    pub(super) fn forget(&self, stream: StreamId) {
        self.0.with(|held| held.remove(&stream));
    }
}

impl fmt::Debug for Deferred {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Deferred").finish_non_exhaustive()
    }
}
