//! Events: each record makes a *point* of its own in a stream.
//!
//! An event is a name for its latest point. A wait takes the point that the event names at the time of the call, so a
//! later record, even one that another stream reaches first, does not move it, and destroying the event takes nothing
//! away from waits and records that are already enqueued. A point is published only after its record has been enqueued,
//! so whoever waits for a point waits for something enqueued before: waits form no circle.

use std::sync::Arc;
use std::time::Instant;

use highwater_core::Completion;
use parking_lot::{Condvar, Mutex};

/// Where a point stands.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Progress {
    /// The stream has not come there yet.
    Ahead,
    /// The stream came there at this time.
    Reached(Instant),
    /// The device was lost before.
    Lost,
}

/// One record of an event.
#[derive(Debug)]
pub(crate) struct Point {
    progress: Mutex<Progress>,
    changed: Condvar,
}

impl Point {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { progress: Mutex::new(Progress::Ahead), changed: Condvar::new() })
    }

    pub(crate) fn progress(&self) -> Progress {
        *self.progress.lock()
    }

    /// Called once, by the stream's worker, under the lock of its queue; whoever holds this lock takes no other.
    pub(crate) fn settle(&self, progress: Progress) {
        *self.progress.lock() = progress;
        self.changed.notify_all();
    }

    /// Waits until the point is reached (`Complete`) or lost (`None`).
    pub(crate) fn wait(&self) -> Option<Completion> {
        let mut progress = self.progress.lock();
        loop {
            match *progress {
                Progress::Ahead => self.changed.wait(&mut progress),
                Progress::Reached(_) => return Some(Completion::Complete),
                Progress::Lost => return None,
            }
        }
    }
}

#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) device: u32,
    pub(crate) timing: bool,
    latest: Mutex<Option<Arc<Point>>>,
}

impl Event {
    pub(crate) fn new(device: u32, timing: bool) -> Arc<Self> {
        Arc::new(Self { device, timing, latest: Mutex::new(None) })
    }

    /// The latest record; `None` when there was none.
    pub(crate) fn latest(&self) -> Option<Arc<Point>> {
        self.latest.lock().clone()
    }

    /// Moves the event to a point whose record has been enqueued.
    pub(crate) fn move_to(&self, point: Arc<Point>) {
        *self.latest.lock() = Some(point);
    }
}
