//! The state that the streams of one backend share: devices, worker threads or scheduler, and observers.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use highwater_hal::{Completion, ErrorKind, Result};
use parking_lot::Mutex;

use crate::clock::Clock;
use crate::device::Device;
use crate::event::Point;
use crate::observer::Observers;
use crate::operation::Operation;
use crate::raw_handles::RawHandles;
use crate::shared_event::Progress;
use crate::stream::Stream;

/// The goal of a wait: a point, or the end of what was enqueued on a stream.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Goal<'a> {
    Point(&'a Point),
    Stream(&'a Stream),
}

/// An executor of the streams' commands, in place of the workers.
pub(crate) trait Scheduler: fmt::Debug + Send + Sync {
    /// Adds a stream that has work from here on.
    fn add(&self, stream: &Arc<Stream>);

    /// Removes a stream that has no work any more.
    fn remove(&self, stream: &Stream);

    /// Notes that a call asks for the progress of the work.
    fn queried(&self);

    /// Executes work until `is_done` returns true, which is when `goal` has been reached.
    fn wait(&self, goal: Goal<'_>, is_done: &dyn Fn() -> bool);

    /// Executes everything that was enqueued, at the end of the backend.
    fn finish(&self);
}

/// The state that the streams of one backend share.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) devices: Vec<Arc<Device>>,
    /// By device, every stream that may have work: the streams in the table, the default ones, and destroyed ones that
    /// still drain.
    streams: Vec<Mutex<Vec<Weak<Stream>>>>,
    pub(crate) latency_ns: AtomicU64,
    /// Set when the backend ends. Queued work is then executed at once, without latency.
    pub(crate) stopping: AtomicBool,
    pub(crate) workers: Mutex<Vec<JoinHandle<()>>>,
    thread_name: String,
    /// If one is set, there are no workers.
    pub(crate) scheduler: Option<Arc<dyn Scheduler>>,
    pub(crate) observers: Observers,
    pub(crate) raw_handles: Arc<RawHandles>,
}

impl Engine {
    pub(crate) fn new(
        devices: Vec<Arc<Device>>,
        latency: Duration,
        thread_name: String,
        scheduler: Option<Arc<dyn Scheduler>>,
        observers: Observers,
        raw_handles: Arc<RawHandles>,
    ) -> Arc<Self> {
        Arc::new(Self {
            streams: devices.iter().map(|_| Mutex::default()).collect(),
            devices,
            latency_ns: AtomicU64::new(nanoseconds(latency)),
            stopping: AtomicBool::new(false),
            workers: Mutex::new(Vec::new()),
            thread_name,
            scheduler,
            observers,
            raw_handles,
        })
    }

    /// Adds a new stream to those of its device.
    pub(crate) fn add_stream(&self, stream: &Arc<Stream>) {
        let mut streams = self.streams[stream.device as usize].lock();
        streams.retain(|other| other.strong_count() > 0);
        streams.push(Arc::downgrade(stream));
    }

    /// Returns the streams of a device that may have work.
    pub(crate) fn streams_of(&self, device: u32) -> Vec<Arc<Stream>> {
        let streams = self.streams[device as usize].lock().clone();
        streams.iter().filter_map(Weak::upgrade).collect()
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
        // Workers of destroyed streams have ended or are about to. Joining them here bounds the list.
        while let Some(index) = workers.iter().position(JoinHandle::is_finished) {
            join(workers.swap_remove(index));
        }
        workers.push(worker);
        Ok(())
    }

    /// Waits until a point is reached (`Complete`) or lost (`None`). From then on the host knows what comes before it.
    pub(crate) fn wait_for(&self, point: &Point) -> Option<Completion> {
        if let Some(scheduler) = &self.scheduler {
            scheduler.wait(Goal::Point(point), &|| !matches!(point.progress(), Progress::Ahead));
        }
        let completion = point.wait();
        self.saw(point);
        completion
    }

    /// Returns the progress of a point. If it is reached, the host knows from then on what comes before it.
    pub(crate) fn ask_for(&self, point: &Point) -> Progress {
        if let Some(scheduler) = &self.scheduler {
            scheduler.queried();
        }
        let progress = point.progress();
        if let Progress::Reached(_) = progress {
            self.saw(point);
        }
        progress
    }

    /// Returns what the host knows once it has waited for all streams of a device.
    pub(crate) fn clock_of(&self, device: u32) -> Option<Clock> {
        self.observers.order.as_ref().map(|order| order.clock_of_device(device))
    }

    /// Tells the order observer that the host has waited for everything in a clock.
    pub(crate) fn waited(&self, clock: Option<Clock>) {
        if let (Some(order), Some(clock)) = (&self.observers.order, clock) {
            order.host_waited(&clock);
        }
    }

    fn saw(&self, point: &Point) {
        if let Some(order) = &self.observers.order {
            order.host_saw(&point.observed);
        }
    }

    /// Closes every stream, lets the workers finish the queued work, and waits for them.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        for device in &self.devices {
            self.streams_of(device.ordinal).iter().for_each(|stream| stream.close());
        }
        if let Some(scheduler) = &self.scheduler {
            scheduler.finish();
        }
        let workers = std::mem::take(&mut *self.workers.lock());
        for worker in workers {
            // A worker cannot wait for its own end. It ends right after.
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
