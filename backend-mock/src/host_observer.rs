//! The observer of the host: reports to the race finder the facts that calls do not show.

use std::fmt;
use std::sync::Arc;

use highwater_hal::{AnyId, DoneAnswer, EventId, HostObserver, HostPtr};

use crate::clock::Clock;
use crate::host::range_of;
use crate::observer::{Store, Touch};
use crate::operation::Operation;
use crate::state::Shared;

/// The observer of a mock with a race finder.
pub(crate) struct MockHostObserver(pub(crate) Arc<Shared>);

impl fmt::Debug for MockHostObserver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MockHostObserver").finish_non_exhaustive()
    }
}

impl HostObserver for MockHostObserver {
    fn accessed(&self, ptr: HostPtr, bytes: usize, writes: bool) {
        // In a child, a thread that the child does not have may hold the lock.
        if !self.0.calls.is_own_process() || bytes == 0 {
            return;
        }
        if let Some(order) = &self.0.engine.observers.order {
            let mut touch = Touch::whole(Store::Host, ptr.address() as u64, range_of(ptr, bytes));
            touch.used.writes = writes;
            order.accessed(Operation::CpuAccess, touch);
        }
    }

    fn shared(&self, id: AnyId) {
        if !self.0.calls.is_own_process() {
            return;
        }
        // An object that has ended since orders nothing more.
        match id {
            AnyId::Stream(stream) => {
                if let Ok(stream) = self.0.stream(Operation::QueryStream, stream) {
                    stream.share();
                }
            }
            AnyId::Event(event) => {
                if let Ok(event) = self.0.event(Operation::QueryEvent, event)
                    && let Some(point) = event.latest()
                    && let Some(order) = &self.0.engine.observers.order
                {
                    order.shared_point(&point.observed);
                }
            }
            _ => {}
        }
    }

    fn ask_for_others(&self, ask: &mut dyn FnMut()) {
        match &self.0.engine.observers.order {
            Some(order) if self.0.calls.is_own_process() => order.ask_for_others(ask),
            _ => ask(),
        }
    }

    fn answer(&self, event: EventId) -> Option<Arc<dyn DoneAnswer>> {
        if !self.0.calls.is_own_process() {
            return None;
        }
        let order = self.0.engine.observers.order.as_ref()?;
        // An event that was never recorded orders nothing.
        let point = self.0.event(Operation::QueryEvent, event).ok()?.latest()?;
        Some(Arc::new(MockAnswer { mock: Arc::clone(&self.0), known: order.clock_of_point(&point.observed) }))
    }
}

/// The work that is done by an answer.
struct MockAnswer {
    mock: Arc<Shared>,
    known: Clock,
}

impl fmt::Debug for MockAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MockAnswer").finish_non_exhaustive()
    }
}

impl DoneAnswer for MockAnswer {
    fn heard(&self) {
        if self.mock.calls.is_own_process()
            && let Some(order) = &self.mock.engine.observers.order
        {
            order.host_waited(&self.known);
        }
    }
}
