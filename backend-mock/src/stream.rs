//! Streams: each is a queue of commands that a worker thread of its own executes in order.
//!
//! The queue's lock is held to push and to pop, never while a command executes or waits, so enqueueing waits for
//! nothing. The worker starts with the first command, and ends when the stream is closed and its queue is empty.
//!
//! A command that panics loses its device. Later commands of that device are given up, points among them are settled as
//! lost, and no caller is left waiting.
//!
//! Under a [`Scheduler`](crate::engine::Scheduler) there are no workers: calls of the host execute the commands.
//!
//! Priorities change nothing: the workers share the CPU as the system decides.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use highwater_hal::{Completion, DevicePtr, ErrorKind, GraphExecId, ObjectId, Result, StreamId};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::command::{Command, Settled, Step};
use crate::device::{self, Device};
use crate::engine::{Engine, Goal};
use crate::event::Point;
use crate::memory_use::{touches, uses};
use crate::observer::{Note, OnStream, OrderObserver, Origin, Touch};
use crate::operation::Operation;
use crate::raw_handles::RawHandle;
use crate::recording::{Part, Recorder};
use crate::shared_event::Progress;

#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) device: u32,
    /// Its name in messages. Default streams have none.
    pub(crate) id: OnceLock<StreamId>,
    /// Whether it is the device's legacy default stream.
    pub(crate) is_legacy: bool,
    engine: Arc<Engine>,
    pub(crate) queue: Mutex<Queue>,
    /// Signaled when a command arrives, when the stream is closed, and when the engine stops.
    arrived: Condvar,
    /// Signaled when a command has been executed.
    passed: Condvar,
    /// The lane that the order observer assigned; 0 without one.
    lane: usize,
    /// The raw handle. Another stream may have it once this one is closed.
    pub(crate) raw: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Queue {
    /// Each with the use observer's note.
    commands: VecDeque<(Command, Option<Note>)>,
    enqueued: u64,
    completed: u64,
    /// Whether a worker was started, or the scheduler has the stream.
    has_worker: bool,
    /// Whether a command is being executed, under a scheduler.
    is_busy: bool,
    closed: bool,
    /// The capture that the stream takes part in. It may have ended since.
    pub(crate) part: Option<Part>,
    /// Keeps the raw handle until the stream is closed.
    raw: Option<RawHandle>,
}

impl Queue {
    /// Returns the recording that commands go into; `None` if the stream takes part in no capture.
    pub(crate) fn recorder(&self) -> Option<Recorder<'_>> {
        self.part.as_ref()?.recorder()
    }

    /// Refuses to tell the progress of a stream that records. Asking loses the capture.
    pub(crate) fn refuse_to_answer(&self, operation: Operation) -> Result<()> {
        let Some(recorder) = self.recorder() else { return Ok(()) };
        recorder.lose("a call queried or waited for one of its streams");
        Err(operation
            .error(ErrorKind::Capture, "the stream takes part in a capture, which is lost by this call")
            .with_hint("end the capture first, launch the graph, and query the stream of the launch"))
    }
}

impl Stream {
    /// Creates a stream of the engine's device `ordinal`, without a worker yet.
    pub(crate) fn new(engine: &Arc<Engine>, ordinal: u32) -> Arc<Self> {
        Self::with_kind(engine, ordinal, false)
    }

    /// Creates the legacy default stream of a device.
    pub(crate) fn legacy(engine: &Arc<Engine>, ordinal: u32) -> Arc<Self> {
        Self::with_kind(engine, ordinal, true)
    }

    fn with_kind(engine: &Arc<Engine>, ordinal: u32, is_legacy: bool) -> Arc<Self> {
        let raw = engine.raw_handles.take();
        let stream = Arc::new(Self {
            device: ordinal,
            id: OnceLock::new(),
            is_legacy,
            engine: Arc::clone(engine),
            raw: raw.number,
            queue: Mutex::new(Queue { raw: Some(raw), ..Queue::default() }),
            arrived: Condvar::new(),
            passed: Condvar::new(),
            lane: engine.observers.order.as_ref().map_or(0, |order| order.stream_opened(ordinal)),
        });
        engine.add_stream(&stream);
        stream
    }

    /// Returns a number that no other stream has as long as this one, or a command of it, exists.
    pub(crate) fn key(self: &Arc<Self>) -> u64 {
        Arc::as_ptr(self).addr() as u64
    }

    pub(crate) fn device(&self) -> &Device {
        &self.engine.devices[self.device as usize]
    }

    /// Appends a command, or records it in the capture. Waits for nothing.
    pub(crate) fn enqueue(self: &Arc<Self>, operation: Operation, command: Command) -> Result<()> {
        self.enqueue_from(operation, &self.origin(operation), command)
    }

    /// Appends one of several commands of a call; see [`Stream::enqueue`].
    pub(crate) fn enqueue_from(
        self: &Arc<Self>,
        operation: Operation,
        origin: &Option<Arc<Origin>>,
        command: Command,
    ) -> Result<()> {
        // Memory is given back on a lost device too.
        if !matches!(command, Command::Release(_)) {
            self.device().check_not_lost(operation)?;
        }
        let step = Step { command, origin: origin.clone() };
        let mut queue = self.open_queue(operation)?;
        if let Some(recorder) = queue.recorder() {
            return self.capture(recorder, operation, step);
        }
        self.push(operation, &mut queue, [step], None)
    }

    fn order(&self) -> Option<&dyn OrderObserver> {
        self.engine.observers.order.as_deref()
    }

    /// Returns the current call, if an observer wants to know. The caller must hold no lock.
    pub(crate) fn origin(&self, operation: Operation) -> Option<Arc<Origin>> {
        self.order().map(|order| order.origin(operation))
    }

    /// Tells the order observer that memory exists from this point of the stream on.
    pub(crate) fn note_allocation(&self, operation: Operation, ptr: DevicePtr, bytes: u64) {
        if let Some(order) = self.order()
            && let Some(touch) = self.device().touch(ptr.get(), bytes)
        {
            let origin = order.origin(operation);
            order.begins(self.lane);
            order.uses(self.named(), &origin, None, &[touch], false);
        }
    }

    /// Returns the stream as observers know it.
    fn named(&self) -> OnStream {
        OnStream { lane: self.lane, id: self.id.get().copied(), is_legacy: self.is_legacy, device: self.device }
    }

    /// Records a command in the capture that the stream takes part in.
    fn capture(&self, mut recorder: Recorder<'_>, operation: Operation, step: Step) -> Result<()> {
        recorder.check(operation, &step)?;
        let observed = self.order().zip(step.origin.clone());
        recorder.record(step, |step, notes, part| {
            if let Some((order, origin)) = observed {
                let (touched, _) = touches(&step.command, &self.engine.devices, self.device());
                order.captured(notes, self.named(), &origin, &touched, part);
            }
        });
        Ok(())
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.queue.lock().closed
    }

    /// Returns whether a capture records the stream's commands.
    pub(crate) fn is_recording(&self) -> bool {
        self.queue.lock().recorder().is_some()
    }

    /// Locks the queue of a stream that takes commands.
    pub(crate) fn open_queue(&self, operation: Operation) -> Result<MutexGuard<'_, Queue>> {
        let queue = self.queue.lock();
        if queue.closed {
            return Err(operation
                .error(ErrorKind::InvalidHandle, "the stream was destroyed")
                .with_hint("pass a live stream"));
        }
        Ok(queue)
    }

    /// Hands commands to the worker, which starts with the first.
    pub(crate) fn push(
        self: &Arc<Self>,
        operation: Operation,
        queue: &mut Queue,
        steps: impl IntoIterator<Item = Step>,
        launch: Option<(Arc<Origin>, GraphExecId)>,
    ) -> Result<()> {
        if !queue.has_worker && self.engine.scheduler.is_none() {
            self.engine.start_worker(operation, self)?;
            queue.has_worker = true;
        }
        let stream = self.named();
        let launch = launch.as_ref().map(|(origin, exec)| (origin, Touch::graph(exec.parts())));
        if let Some(order) = self.order() {
            order.begins(self.lane);
            if let Some((origin, touch)) = &launch {
                order.uses(stream, origin, None, &[*touch], false);
            }
        }
        let launch = launch.map(|(origin, _)| origin);
        let before = queue.commands.len();
        queue.commands.extend(steps.into_iter().map(|step| {
            self.tell_order(&step, launch, stream);
            let watcher = self.engine.observers.uses.as_ref();
            let note = watcher
                .and_then(|watcher| watcher.enqueued(operation, stream, uses(&step.command, &self.engine.devices)));
            (step.command, note)
        }));
        queue.enqueued += (queue.commands.len() - before) as u64;
        if let Some(scheduler) = &self.engine.scheduler
            && !queue.has_worker
            && !queue.commands.is_empty()
        {
            scheduler.add(self);
            queue.has_worker = true;
        }
        self.arrived.notify_one();
        Ok(())
    }

    /// Tells the order observer of a command of the operation that began.
    fn tell_order(&self, step: &Step, launch: Option<&Arc<Origin>>, stream: OnStream) {
        let Some(order) = self.order() else { return };
        match &step.command {
            Command::Record(point) => order.records(self.lane, &point.observed),
            Command::Wait(point) => order.waits(self.lane, &point.observed),
            command => {
                if let Some(origin) = &step.origin {
                    let (touched, frees) = touches(command, &self.engine.devices, self.device());
                    order.uses(stream, origin, launch, &touched, frees);
                }
            }
        }
    }

    /// Closes the stream to new commands. Those in the queue are still executed.
    pub(crate) fn close(&self) {
        let mut queue = self.queue.lock();
        queue.closed = true;
        let raw = queue.raw.take();
        let part = queue.part.take().map(Part::leave);
        drop(queue);
        self.arrived.notify_one();
        drop((part, raw));
    }

    pub(crate) fn query(&self, operation: Operation) -> Result<Completion> {
        self.device().check_not_lost(operation)?;
        if let Some(scheduler) = &self.engine.scheduler {
            scheduler.queried();
        }
        let queue = self.queue.lock();
        queue.refuse_to_answer(operation)?;
        Ok(if self.has_completed(&queue) { Completion::Complete } else { Completion::Pending })
    }

    /// Returns whether everything that was enqueued has been executed. The host knows that from here on.
    fn has_completed(&self, queue: &Queue) -> bool {
        let completed = queue.completed == queue.enqueued;
        if let Some(order) = self.order().filter(|_| completed) {
            order.host_waited(&order.clock_of_stream(self.lane));
        }
        completed
    }

    /// Tells the order observer that every thread knows what the calling one has learned of the stream.
    pub(crate) fn share(&self) {
        if let Some(order) = self.order() {
            order.shared(self.lane);
        }
    }

    /// Waits for the work that was enqueued before the call.
    pub(crate) fn synchronize(&self, operation: Operation) -> Result<()> {
        let queue = self.queue.lock();
        queue.refuse_to_answer(operation)?;
        self.wait_for_all(queue);
        if self.device().is_lost() { Err(device::lost(operation, self.device)) } else { Ok(()) }
    }

    /// Lets the work that was enqueued before the call be executed. Observers learn of no wait.
    pub(crate) fn release(&self, mut queue: MutexGuard<'_, Queue>) {
        let target = queue.enqueued;
        if let Some(scheduler) = &self.engine.scheduler {
            drop(queue);
            scheduler.wait(Goal::Stream(self), &|| self.queue.lock().completed >= target);
        } else {
            while queue.completed < target {
                self.passed.wait(&mut queue);
            }
        }
    }

    fn wait_for_all(&self, queue: MutexGuard<'_, Queue>) {
        let clock = self.order().map(|order| order.clock_of_stream(self.lane));
        self.release(queue);
        if let (Some(order), Some(clock)) = (self.order(), clock) {
            order.host_waited(&clock);
        }
    }

    /// Waits for the work that was enqueued before the call, even if the stream is destroyed, lost or takes part in a
    /// capture.
    #[cfg(feature = "simulated")]
    pub(crate) fn drain(&self) {
        self.wait_for_all(self.queue.lock());
    }

    /// Returns whether everything that was enqueued has been executed.
    #[cfg(feature = "simulated")]
    pub(crate) fn is_idle(&self) -> bool {
        self.has_completed(&self.queue.lock())
    }

    /// Executes the commands in order, until the stream is closed and none is left. The body of a worker.
    pub(crate) fn work(&self) {
        let mut queue = self.queue.lock();
        loop {
            if let Some(front) = queue.commands.pop_front() {
                self.take_time(&mut queue);
                self.execute(&mut queue, front);
            } else if queue.closed {
                return;
            } else {
                self.arrived.wait(&mut queue);
            }
        }
    }

    /// Executes a command that was popped from the queue.
    fn execute(&self, queue: &mut MutexGuard<'_, Queue>, (command, note): (Command, Option<Note>)) {
        let settled = MutexGuard::unlocked(queue, || {
            let settled = self.run(command);
            // Before anybody can see that the command has been executed.
            drop(note);
            settled
        });
        // Both under the lock: a thread that sees the point reached finds the stream as far, and the reverse.
        queue.completed += 1;
        if let Some((point, progress)) = settled {
            point.settle(progress);
        }
        self.passed.notify_all();
    }

    /// Returns whether the next command can be executed without waiting for another stream. Code of the host counts
    /// only if `host_code_too`.
    pub(crate) fn can_go_on(&self, host_code_too: bool) -> bool {
        let queue = self.queue.lock();
        match queue.commands.front() {
            _ if queue.is_busy => false,
            None => false,
            Some((Command::Wait(point), _)) => self.device().is_lost() || !matches!(point.progress(), Progress::Ahead),
            #[cfg(feature = "simulated")]
            Some((Command::Call(_), _)) => host_code_too,
            Some(_) => {
                let _ = host_code_too;
                true
            }
        }
    }

    /// Returns the point that the next command waits for, unless it can be executed now.
    pub(crate) fn awaited(&self) -> Option<Arc<Point>> {
        match self.queue.lock().commands.front() {
            Some((Command::Wait(point), _)) => {
                (!self.device().is_lost() && matches!(point.progress(), Progress::Ahead)).then(|| Arc::clone(point))
            }
            _ => None,
        }
    }

    /// Returns whether the next command records a point.
    pub(crate) fn is_at_record(&self) -> bool {
        matches!(self.queue.lock().commands.front(), Some((Command::Record(_), _)))
    }

    /// Returns whether a command in the queue records the point.
    pub(crate) fn will_record(&self, point: &Point) -> bool {
        let records = |command: &Command| matches!(command, Command::Record(other) if std::ptr::eq(&**other, point));
        self.queue.lock().commands.iter().any(|(command, _)| records(command))
    }

    /// Executes the next command for the scheduler. Returns false if there is none.
    pub(crate) fn execute_one(&self) -> bool {
        let mut queue = self.queue.lock();
        let Some(front) = queue.commands.pop_front() else { return false };
        queue.is_busy = true;
        self.execute(&mut queue, front);
        queue.is_busy = false;
        if queue.commands.is_empty() {
            queue.has_worker = false;
            if let Some(scheduler) = &self.engine.scheduler {
                scheduler.remove(self);
            }
        }
        true
    }

    /// Waits for the latency. The lock is free meanwhile, and the end of the backend cuts the wait short.
    fn take_time(&self, queue: &mut MutexGuard<'_, Queue>) {
        // Relaxed: a setting, which orders nothing.
        let latency = Duration::from_nanos(self.engine.latency_ns.load(Ordering::Relaxed));
        if latency.is_zero() {
            return;
        }
        // A deadline past the range of the clock counts as none: the stop flag ends the wait.
        let deadline = Instant::now().checked_add(latency);
        while !self.engine.stopping.load(Ordering::Acquire) {
            match deadline {
                None => self.arrived.wait(queue),
                Some(deadline) if Instant::now() < deadline => {
                    self.arrived.wait_until(queue, deadline);
                }
                Some(_) => return,
            }
        }
    }

    fn run(&self, command: Command) -> Settled {
        let device = self.device();
        if device.is_lost() {
            return command.give_up(device);
        }
        // Unwind safety: a panicking command leaves device memory half written. Its contents are unspecified from then
        // on, and the device is lost with it.
        catch_unwind(AssertUnwindSafe(|| command.execute(&self.engine.devices, device))).unwrap_or_else(|_| {
            device.lose();
            None
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Some(order) = self.order() {
            order.stream_ended(self.lane);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DeviceOptions;
    use crate::observer::Observers;
    use crate::raw_handles::RawHandles;
    use highwater_hal::BackendTag;

    fn engine() -> Arc<Engine> {
        let device = |ordinal| Device::new(ordinal, 1 << 20, &DeviceOptions::default(), Observers::default()).unwrap();
        let devices = (0..2).map(|ordinal| Arc::new(device(ordinal))).collect();
        Engine::new(
            devices,
            Duration::ZERO,
            "hw-mock-test".to_owned(),
            None,
            Observers::default(),
            RawHandles::new(BackendTag::next()),
        )
    }

    #[test]
    fn a_panicking_command_loses_its_device_and_leaves_nobody_waiting() {
        let engine = engine();
        let (broken, dependent, healthy) = (Stream::new(&engine, 0), Stream::new(&engine, 1), Stream::new(&engine, 1));
        let point = Point::new();
        broken.enqueue(Operation::Fill, Command::Panic).unwrap();
        // The device may be lost before the record arrives or after. Nobody hangs in either case.
        if broken.enqueue(Operation::RecordEvent, Command::Record(Arc::clone(&point))).is_ok() {
            assert!(point.wait().is_none());
            dependent.enqueue(Operation::StreamWaitEvent, Command::Wait(point)).unwrap();
            assert_eq!(dependent.synchronize(Operation::SynchronizeStream).unwrap_err().kind(), ErrorKind::DeviceLost);
        } else {
            healthy.synchronize(Operation::SynchronizeStream).unwrap();
        }
        let error = broken.synchronize(Operation::SynchronizeStream).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeviceLost);
        let error =
            broken.enqueue(Operation::Fill, Command::Fill { device: 0, dst: 0, bytes: 8, pattern: 0 }).unwrap_err();
        assert_eq!((error.kind(), error.operation()), (ErrorKind::DeviceLost, "fill"));
        engine.stop();
    }

    #[test]
    fn workers_of_closed_streams_do_not_pile_up() {
        let engine = engine();
        for _ in 0..20 {
            let stream = Stream::new(&engine, 0);
            stream.enqueue(Operation::Fill, Command::Fill { device: 0, dst: 0, bytes: 8, pattern: 1 }).unwrap();
            stream.close();
            while Arc::strong_count(&stream) > 1 {
                std::thread::yield_now();
            }
        }
        std::thread::sleep(Duration::from_millis(20));
        let last = Stream::new(&engine, 0);
        last.enqueue(Operation::Fill, Command::Fill { device: 0, dst: 0, bytes: 8, pattern: 1 }).unwrap();
        assert!(engine.workers.lock().len() <= 2, "{} workers are kept", engine.workers.lock().len());
        assert!(engine.streams_of(0).len() <= 2);
        engine.stop();
    }
}
