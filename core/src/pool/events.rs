//! Events to mark points in streams with, kept for the next mark: making one costs more than recording it, and some
//! drivers are very slow when several threads make them at once.
//!
//! A [`Mark`] owns its event and gives it back when it is dropped. Who has to ask a mark after leaving a lock shares it
//! by `Arc`: an event that somebody still refers to by its id alone could be recorded anew for somebody else meanwhile.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::backend::{Backend, EventOptions};
use crate::error::Result;
use crate::fork::Generation;
use crate::id::EventId;

/// Idle events of one device, without timing.
#[derive(Debug)]
pub(crate) struct EventPool {
    device: u32,
    generation: Generation,
    idle: Mutex<Vec<EventId>>,
}

/// An event of the pool, in use.
#[derive(Debug)]
pub(crate) struct Mark {
    event: EventId,
    /// `None` once the event is not the pool's any more.
    pool: Option<Arc<EventPool>>,
}

impl EventPool {
    pub(crate) fn new(device: u32, generation: Generation) -> Arc<Self> {
        Arc::new(Self { device, generation, idle: Mutex::default() })
    }

    /// An event that nobody else refers to, not recorded yet.
    pub(crate) fn take(self: &Arc<Self>, backend: &dyn Backend) -> Result<Mark> {
        let idle = self.idle.lock().pop();
        let event = idle.map_or_else(|| backend.create_event(self.device, &EventOptions::new()), Ok)?;
        Ok(Mark { event, pool: Some(Arc::clone(self)) })
    }

    pub(crate) fn take_all(&self) -> Vec<EventId> {
        std::mem::take(&mut *self.idle.lock())
    }
}

impl Mark {
    pub(crate) fn event(&self) -> EventId {
        self.event
    }

    /// Takes the event out of the pool for good, for the caller to destroy.
    pub(crate) fn into_event(mut self) -> EventId {
        self.pool = None;
        self.event
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // In a forked child the lock may be held by a thread that does not exist. Who waits for the record on a device
        // keeps that wait when the event is recorded anew.
        if let Some(pool) = &self.pool
            && pool.generation.is_current()
        {
            pool.idle.lock().push(self.event);
        }
    }
}

#[cfg(test)]
impl EventPool {
    pub(crate) fn hold_lock(&self) -> impl Drop + '_ {
        crate::testing::Held(self.idle.lock())
    }

    pub(crate) fn is_locked(&self) -> bool {
        self.idle.is_locked()
    }
}
