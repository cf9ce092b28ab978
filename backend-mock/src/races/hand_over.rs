//! Hand-overs between threads that the program declares.

use std::fmt;
use std::sync::Arc;

use super::finder::Finder;
use crate::clock::Clock;

/// The knowledge of one thread at its call of [`MockGpu::hand_over`](crate::MockGpu::hand_over). Another thread takes it over.
///
/// A program that lets one thread wait and another go on passes such a value along with its own message: through a
/// channel, under a lock, or as the result of a joined thread. Without
/// [`MockOptions::with_thread_races`](crate::MockOptions::with_thread_races) it has no effect.
#[derive(Clone)]
#[must_use = "the other thread calls `take_over`"]
pub struct HandOver {
    finder: Option<Arc<Finder>>,
    known: Clock,
}

impl fmt::Debug for HandOver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HandOver").finish_non_exhaustive()
    }
}

impl HandOver {
    pub(crate) fn new(finder: Option<&Arc<Finder>>) -> Self {
        Self { finder: finder.cloned(), known: finder.map(|finder| finder.known()).unwrap_or_default() }
    }

    /// Declares that the calling thread goes on after what the other thread did before
    /// [`MockGpu::hand_over`](crate::MockGpu::hand_over).
    pub fn take_over(&self) {
        if let Some(finder) = self.finder.as_ref().filter(|finder| finder.is_own_process()) {
            finder.learn(&self.known);
        }
    }
}
