//! Queues of work, and the threads that execute them.

use std::collections::VecDeque;
use std::sync::Arc;

use highwater_hal::{Completion, Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::memory::Span;
use crate::product::Product;

/// Work of a stream. It owns its objects, so ids and blocks may end earlier.
#[derive(Debug)]
pub(crate) enum Work {
    Copy { to: Span, from: Span },
    Fill { to: Span, element: Vec<u8> },
    Multiply(Product),
    Wait(Point),
}

/// A point in a stream, reached after this much work.
#[derive(Debug, Clone)]
pub(crate) struct Point {
    queue: Arc<Queue>,
    enqueued: u64,
}

impl Point {
    pub(crate) fn query(&self) -> Completion {
        let reached = self.queue.state.lock().executed >= self.enqueued;
        if reached { Completion::Complete } else { Completion::Pending }
    }

    /// Waits until the point is reached. The lock makes the earlier work visible to this thread.
    pub(crate) fn wait(&self) {
        let mut state = self.queue.state.lock();
        while state.executed < self.enqueued {
            self.queue.changed.wait(&mut state);
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    work: VecDeque<Work>,
    enqueued: u64,
    executed: u64,
    closed: bool,
}

impl Queue {
    pub(crate) fn push(&self, work: Work) {
        let mut state = self.state.lock();
        state.work.push_back(work);
        state.enqueued += 1;
        self.changed.notify_all();
    }

    /// Returns the current end of the queue.
    pub(crate) fn point(self: &Arc<Self>) -> Point {
        Point { queue: Arc::clone(self), enqueued: self.state.lock().enqueued }
    }

    /// Executes until the queue is closed and empty (`stream.destroy-pending`).
    fn serve(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some(work) = state.work.pop_front() {
                MutexGuard::unlocked(&mut state, || match work {
                    Work::Copy { to, from } => to.copy_from(&from),
                    Work::Fill { to, element } => to.fill(&element),
                    Work::Multiply(product) => product.run(),
                    Work::Wait(point) => point.wait(),
                });
                state.executed += 1;
                self.changed.notify_all();
            } else if state.closed {
                return;
            } else {
                self.changed.wait(&mut state);
            }
        }
    }
}

/// A stream: a queue with a thread. After the stream is dropped, the thread finishes the work and ends.
#[derive(Debug)]
pub(crate) struct Stream(pub(crate) Arc<Queue>);

impl Stream {
    pub(crate) fn new() -> Result<Self> {
        let queue = Arc::new(Queue::default());
        let served = Arc::clone(&queue);
        let thread = std::thread::Builder::new().name("example-stream".to_owned()).spawn(move || served.serve());
        let refused = |error| Error::new(ErrorKind::OperatingSystem, "create_stream", format!("no thread: {error}"));
        thread.map(|_| Self(queue)).map_err(refused)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.0.state.lock().closed = true;
        self.0.changed.notify_all();
    }
}
