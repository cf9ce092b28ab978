//! What the streams of one backend share: the devices, the worker threads or the schedule, and the race finder.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use highwater_hal::{Completion, ErrorKind, Result};
use parking_lot::Mutex;

use crate::device::Device;
use crate::event::{Point, Progress};
use crate::operation::Operation;
use crate::races::clock::Clock;
use crate::races::finder::Finder;
use crate::schedule::Schedule;
use crate::stream::Stream;

/// What the workers of one backend share.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) devices: Vec<Device>,
    pub(crate) latency_ns: AtomicU64,
    /// Set when the backend ends: what is still queued is executed at once, without latency.
    pub(crate) stopping: AtomicBool,
    pub(crate) workers: Mutex<Vec<JoinHandle<()>>>,
    thread_name: String,
    /// Where one is set, there are no workers.
    pub(crate) schedule: Option<Arc<Schedule>>,
    /// Set where races are looked for.
    pub(crate) races: Option<Arc<Finder>>,
}

impl Engine {
    pub(crate) fn new(
        devices: Vec<Device>,
        latency: Duration,
        thread_name: String,
        schedule: Option<Arc<Schedule>>,
        races: Option<Arc<Finder>>,
    ) -> Arc<Self> {
        Arc::new(Self {
            schedule,
            races,
            devices,
            latency_ns: AtomicU64::new(nanoseconds(latency)),
            stopping: AtomicBool::new(false),
            workers: Mutex::new(Vec::new()),
            thread_name,
        })
    }

    pub(crate) fn start_worker(&self, operation: Operation, stream: &Arc<Stream>) -> Result<()> {
        let stream = Arc::clone(stream);
        let worker = std::thread::Builder::new().name(self.thread_name.clone()).spawn(move || stream.work()).map_err(
            |error| {
                operation
                    .error(
                        ErrorKind::OutOfMemory,
                        format!("cannot start the worker thread of a simulated stream: {error}"),
                    )
                    .with_hint("use fewer streams at once, or raise the limit on threads (ulimit -u)")
            },
        )?;
        let mut workers = self.workers.lock();
        // Workers of destroyed streams are gone or about to be; taking them in here bounds the list.
        while let Some(index) = workers.iter().position(JoinHandle::is_finished) {
            join(workers.swap_remove(index));
        }
        workers.push(worker);
        Ok(())
    }

    /// Waits until a point is reached (`Complete`) or lost (`None`); the host knows from there on what comes before it.
    pub(crate) fn wait_for(&self, point: &Point) -> Option<Completion> {
        if let Some(schedule) = &self.schedule {
            schedule.wait(|| !matches!(point.progress(), Progress::Ahead));
        }
        let completion = point.wait();
        self.saw(point);
        completion
    }

    /// Where a point stands; where it is reached, the host knows from there on what comes before it.
    pub(crate) fn ask_for(&self, point: &Point) -> Progress {
        if let Some(schedule) = &self.schedule {
            schedule.query();
        }
        let progress = point.progress();
        if let Progress::Reached(_) = progress {
            self.saw(point);
        }
        progress
    }

    /// What the host knows when it has waited for all streams of a device.
    pub(crate) fn clock_of(&self, device: u32) -> Option<Clock> {
        self.races.as_ref().map(|races| races.clock_of_device(device))
    }

    /// The host has waited for what a clock says.
    pub(crate) fn waited(&self, clock: Option<Clock>) {
        if let (Some(races), Some(clock)) = (&self.races, clock) {
            races.host_waited(&clock);
        }
    }

    fn saw(&self, point: &Point) {
        if let Some(finder) = &self.races {
            finder.host_saw(point);
        }
    }

    /// Closes every stream, lets the workers finish what is queued, and waits for them.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        for device in &self.devices {
            let streams = device.streams.lock().clone();
            for stream in streams.iter().filter_map(std::sync::Weak::upgrade) {
                stream.close();
            }
        }
        if let Some(schedule) = &self.schedule {
            schedule.finish();
        }
        let workers = std::mem::take(&mut *self.workers.lock());
        for worker in workers {
            // A worker that comes here itself cannot wait for its own end; it ends right after.
            if worker.thread().id() != std::thread::current().id() {
                join(worker);
            }
        }
    }
}

fn join(worker: JoinHandle<()>) {
    if worker.join().is_err() {
        tracing::warn!("the worker of a simulated stream panicked outside of a command");
    }
}

pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
