//! Events: each record makes a *point* of its own in a stream.
//!
//! An event is a name for its latest point. A wait takes the point that the event names at the time of the call. A
//! later record does not move the wait, even if another stream reaches it first. Destroying the event takes nothing
//! away from enqueued waits and records.
//!
//! A point is published only after its record has been enqueued. So a wait always waits for something that was enqueued
//! before, and waits form no cycle.
//!
//! The points of an event for several processes are records in shared memory; see [`crate::shared_event`].

use std::sync::Arc;

use highwater_hal::{Completion, ErrorKind, Result};
use parking_lot::{Condvar, Mutex};

use crate::observer::Observed;
use crate::operation::Operation;
use crate::raw_handles::RawHandle;
use crate::recording::CapturePoint;
use crate::shared_event::{Progress, Record, SharedEvent};

/// One record of an event.
#[derive(Debug)]
pub(crate) struct Point {
    /// The progress of the point, unless it is shared.
    progress: Mutex<Progress>,
    changed: Condvar,
    shared: Option<Record>,
    /// The place in a capture at which the record was made. Such a point is never reached.
    capture_point: Option<CapturePoint>,
    /// The data that the order observer keeps with the point.
    pub(crate) observed: Observed,
}

impl Point {
    pub(crate) fn new() -> Arc<Self> {
        Self::with(None)
    }

    fn with(shared: Option<Record>) -> Arc<Self> {
        Arc::new(Self::made(shared, None))
    }

    /// Creates the point of a record that was made in a capture.
    pub(crate) fn captured(capture_point: CapturePoint) -> Arc<Self> {
        Arc::new(Self::made(None, Some(capture_point)))
    }

    fn made(shared: Option<Record>, capture_point: Option<CapturePoint>) -> Self {
        let progress = Mutex::new(Progress::Ahead);
        let observed = Observed { shared: shared.as_ref().map(Record::key), ..Observed::default() };
        Self { progress, changed: Condvar::new(), shared, capture_point, observed }
    }

    /// Returns the place in a capture at which the record was made.
    pub(crate) fn capture_point(&self) -> Option<&CapturePoint> {
        self.capture_point.as_ref()
    }

    pub(crate) fn progress(&self) -> Progress {
        match &self.shared {
            None => *self.progress.lock(),
            Some(record) => record.progress(),
        }
    }

    /// Settles the point. The stream's worker calls it once, under the lock of its queue, and takes no lock under this
    /// one.
    pub(crate) fn settle(&self, progress: Progress) {
        if let Some(record) = &self.shared {
            return record.settle(progress);
        }
        *self.progress.lock() = progress;
        self.changed.notify_all();
    }

    /// Waits until the point is reached (`Complete`) or lost (`None`).
    pub(crate) fn wait(&self) -> Option<Completion> {
        if let Some(record) = &self.shared {
            return if matches!(record.wait(), Progress::Lost) { None } else { Some(Completion::Complete) };
        }
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
    /// The state of the event, if it is for several processes.
    pub(crate) shared: Option<Arc<SharedEvent>>,
    pub(crate) raw: RawHandle,
}

impl Event {
    pub(crate) fn new(device: u32, timing: bool, raw: RawHandle) -> Arc<Self> {
        Arc::new(Self { device, timing, latest: Mutex::new(None), shared: None, raw })
    }

    /// Creates an event for several processes.
    pub(crate) fn interprocess(device: u32, shared: Arc<SharedEvent>, raw: RawHandle) -> Arc<Self> {
        Arc::new(Self { device, timing: false, latest: Mutex::new(None), shared: Some(shared), raw })
    }

    /// Returns the latest record; `None` if there was none.
    pub(crate) fn latest(&self) -> Option<Arc<Point>> {
        match &self.shared {
            None => self.latest.lock().clone(),
            Some(shared) => shared.latest().map(|record| Point::with(Some(record))),
        }
    }

    /// Creates a point for a record that is about to be enqueued.
    pub(crate) fn point(&self, operation: Operation) -> Result<Arc<Point>> {
        match &self.shared {
            None => Ok(Point::new()),
            Some(shared) => Ok(Point::with(Some(shared.begin_record(operation)?))),
        }
    }

    /// Moves the event to a point whose record has been enqueued.
    pub(crate) fn move_to(&self, point: Arc<Point>) {
        match &point.shared {
            None => *self.latest.lock() = Some(point),
            Some(record) => record.publish(),
        }
    }

    /// Returns the latest record, which must have been made outside of captures. A record in a capture is never
    /// reached.
    pub(crate) fn reachable(&self, operation: Operation) -> Result<Option<Arc<Point>>> {
        let latest = self.latest();
        let Some(captured) = latest.as_ref().and_then(|point| point.capture_point()) else { return Ok(latest) };
        captured.lose("a call queried or waited for an event that was recorded in it");
        Err(operation
            .error(ErrorKind::Capture, "the event was last recorded in a capture, so it is never reached")
            .with_hint("record an event on the stream of the launch, and query that event"))
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use highwater_hal::{Backend as _, EventOptions};

    use super::*;
    use crate::{MockGpu, MockOptions};

    /// Nanoseconds of 32 bits would wrap after 4.3 s, and milliseconds in an `f32` would lose digits.
    #[test]
    fn long_times_between_records_are_exact() {
        let gpu = MockGpu::open(MockOptions::new()).unwrap();
        let [start, end] = [0; 2].map(|device| gpu.create_event(device, &EventOptions::new().with_timing()).unwrap());
        let now = Instant::now();
        for nanoseconds in [u64::from(u32::MAX), u64::from(u32::MAX) + 1, 5_000_000_001, 86_400_000_000_001] {
            for (id, time) in [(start, now), (end, now + Duration::from_nanos(nanoseconds))] {
                let point = Point::new();
                point.settle(Progress::Reached(time));
                gpu.shared.event(Operation::EventElapsedNs, id).unwrap().move_to(point);
            }
            assert_eq!(gpu.event_elapsed_ns(start, end).unwrap(), nanoseconds);
            assert_eq!(gpu.event_elapsed_ns(end, start).unwrap(), 0);
        }
    }
}
