//! Events to mark points in streams with, kept for the next mark: making one costs more than recording it, and some
//! drivers are very slow when several threads make them at once.

use parking_lot::Mutex;

use crate::backend::{Backend, EventOptions};
use crate::error::Result;
use crate::id::EventId;

/// Idle events of one device, without timing.
#[derive(Debug, Default)]
pub(crate) struct EventPool(Mutex<Vec<EventId>>);

impl EventPool {
    pub(crate) fn take(&self, backend: &dyn Backend, device: u32) -> Result<EventId> {
        let idle = self.0.lock().pop();
        idle.map_or_else(|| backend.create_event(device, &EventOptions::new()), Ok)
    }

    /// Takes an event back. Who still waits for its record on a device keeps that wait.
    pub(crate) fn give_back(&self, event: EventId) {
        self.0.lock().push(event);
    }

    pub(crate) fn take_all(&self) -> Vec<EventId> {
        std::mem::take(&mut *self.0.lock())
    }
}

#[cfg(test)]
impl EventPool {
    pub(crate) fn hold_lock(&self) -> impl Drop + '_ {
        crate::testing::Held(self.0.lock())
    }
}
