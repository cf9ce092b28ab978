//! Streams: a queue of commands each, executed in order by a worker thread of its own.
//!
//! The queue's lock is held to push and to pop, never while a command executes, waits or takes its time, so enqueueing
//! waits for nothing. The worker starts with the first command and ends when the stream was closed and its queue is
//! empty. A command that panics loses its device: what follows on that device is given up, points among it are settled
//! as lost, and nobody is left waiting.
//!
//! Under a [`Schedule`] there are no workers: calls of the host execute the commands, in an order that a seed gives.
//!
//! Priorities are accepted and change nothing: the workers share the CPU as the system sees fit.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use highwater_hal::{Completion, DevicePtr, ErrorKind, GraphExecId, HostPtr, ObjectId, Result, StreamId};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::capture::Part;
use crate::checks::Noted;
use crate::device::{self, Device, Retired};
use crate::engine::Engine;
use crate::event::{Point, Progress};
use crate::kernel::{Panel, Product};
use crate::operation::Operation;
use crate::races::clock::Clock;
use crate::races::finder::Lane;
use crate::races::shadow::Shadow;
use crate::races::site::{OnStream, Origin};
use crate::schedule::Schedule;

/// One operation of a stream. Offsets are bytes from the start of a device's memory.
#[derive(Debug, Clone)]
pub(crate) enum Command {
    CopyToDevice {
        src: HostPtr,
        dst: usize,
        bytes: usize,
        device: u32,
    },
    CopyToHost {
        src: usize,
        dst: HostPtr,
        bytes: usize,
        device: u32,
    },
    CopyOnDevices {
        src: usize,
        src_device: u32,
        dst: usize,
        dst_device: u32,
        bytes: usize,
    },
    Fill {
        device: u32,
        dst: usize,
        bytes: usize,
        pattern: u64,
    },
    Record(Arc<Point>),
    Wait(Arc<Point>),
    /// Gives back the bytes of a block that was freed in stream order.
    Release(Retired),
    /// First half of a product: into the workspace.
    Multiply(Arc<Product>, Panel),
    /// Second half: from the workspace to the result.
    Finish(Arc<Product>, Panel),
    /// Both halves at once, for a product that was given no room for intermediate results.
    MultiplyAndFinish(Arc<Product>),
    /// Runs code of the host.
    #[cfg(feature = "simulated")]
    Call(crate::simulated::Call),
    #[cfg(test)]
    Panic,
}

/// A command with where it comes from, which the race finder wants to know.
#[derive(Debug, Clone)]
pub(crate) struct Step {
    pub(crate) command: Command,
    pub(crate) origin: Option<Arc<Origin>>,
}

impl Step {
    /// For commands that touch no memory.
    pub(crate) fn nameless(command: Command) -> Self {
        Self { command, origin: None }
    }
}

/// A point that the stream has come to, to be settled together with the count of completed commands.
type Settled = Option<(Arc<Point>, Progress)>;

impl Command {
    fn execute(self, engine: &Engine, device: &Device) -> Settled {
        let memory = |ordinal: u32| &engine.devices[ordinal as usize].memory;
        match self {
            // SAFETY: the caller of `copy` promised that the host block stays allocated and is not written until the
            // copy has completed, and the range was found inside a page-locked block.
            Self::CopyToDevice { src, dst, bytes, device } => unsafe { memory(device).write(dst, src.as_ptr(), bytes) },
            // SAFETY: as above, and that nobody else reads or writes the destination.
            Self::CopyToHost { src, dst, bytes, device } => unsafe { memory(device).read(src, dst.as_ptr(), bytes) },
            Self::CopyOnDevices { src, src_device, dst, dst_device, bytes } => {
                memory(dst_device).copy_from(dst, memory(src_device), src, bytes);
            }
            Self::Fill { device, dst, bytes, pattern } => memory(device).fill(dst, bytes, pattern),
            Self::Record(point) => return Some((point, Progress::Reached(Instant::now()))),
            Self::Wait(point) => {
                if point.wait().is_none() {
                    // What was to come before will never come, and what follows relies on it.
                    device.lose();
                }
            }
            Self::Release(block) => device.release(block),
            Self::Multiply(product, panel) => product.multiply(memory(product.device), panel),
            Self::Finish(product, panel) => product.finish(memory(product.device), panel),
            Self::MultiplyAndFinish(product) => product.multiply_and_finish(memory(product.device)),
            #[cfg(feature = "simulated")]
            Self::Call(call) => call.run(),
            #[cfg(test)]
            Self::Panic => panic!("a command that panics, as the test asked"),
        }
        None
    }

    /// What is left to do when the device was lost before the command's turn came.
    fn give_up(self, device: &Device) -> Settled {
        match self {
            Self::Record(point) => return Some((point, Progress::Lost)),
            Self::Release(block) => device.release(block),
            _ => {}
        }
        None
    }
}

#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) device: u32,
    /// Its name in messages; the legacy default stream has none.
    pub(crate) id: OnceLock<StreamId>,
    /// Whether it is the device's legacy default stream.
    pub(crate) is_legacy: bool,
    engine: Arc<Engine>,
    pub(crate) queue: Mutex<Queue>,
    /// Told when a command arrives, when the stream is closed, and when the engine stops.
    arrived: Condvar,
    /// Told when a command has been executed.
    passed: Condvar,
    /// Its lane, where races are looked for.
    pub(crate) lane: Option<Lane>,
}

#[derive(Debug, Default)]
pub(crate) struct Queue {
    /// With the note that test mode took of each.
    commands: VecDeque<(Command, Option<Noted>)>,
    enqueued: u64,
    completed: u64,
    /// Whether a worker was started, or the stream stands in the list of the schedule.
    has_worker: bool,
    /// Whether a command is being executed, under a schedule.
    is_busy: bool,
    closed: bool,
    /// The capture that the stream takes part in; it may have ended since.
    pub(crate) part: Option<Part>,
}

impl Stream {
    /// A stream of the engine's device `ordinal`, without a worker yet.
    pub(crate) fn new(engine: &Arc<Engine>, ordinal: u32) -> Arc<Self> {
        Self::with_kind(engine, ordinal, false)
    }

    /// The legacy default stream of the device.
    pub(crate) fn legacy(engine: &Arc<Engine>, ordinal: u32) -> Arc<Self> {
        Self::with_kind(engine, ordinal, true)
    }

    fn with_kind(engine: &Arc<Engine>, ordinal: u32, is_legacy: bool) -> Arc<Self> {
        let stream = Arc::new(Self {
            device: ordinal,
            id: OnceLock::new(),
            is_legacy,
            engine: Arc::clone(engine),
            queue: Mutex::new(Queue::default()),
            arrived: Condvar::new(),
            passed: Condvar::new(),
            lane: engine.races.as_ref().map(|races| races.lane(ordinal)),
        });
        let mut streams = engine.devices[ordinal as usize].streams.lock();
        streams.retain(|other| other.strong_count() > 0);
        streams.push(Arc::downgrade(&stream));
        stream
    }

    pub(crate) fn device(&self) -> &Device {
        &self.engine.devices[self.device as usize]
    }

    /// Appends a command, or has the capture record it; waits for nothing.
    pub(crate) fn enqueue(self: &Arc<Self>, operation: Operation, command: Command) -> Result<()> {
        self.enqueue_from(operation, &self.origin(operation), command)
    }

    /// As [`Stream::enqueue`], for one of several commands of a call.
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
        if let Some(recorder) = queue.recording() {
            return recorder.record(operation, step, self);
        }
        self.push(operation, &mut queue, [step], None)
    }

    /// The call that is being made, where races are looked for. To be asked before any lock is taken.
    pub(crate) fn origin(&self, operation: Operation) -> Option<Arc<Origin>> {
        self.lane.as_ref().map(|lane| lane.finder.origin(operation))
    }

    /// Shows the race finder memory that is there from this point of the stream on.
    pub(crate) fn note_allocation(&self, operation: Operation, ptr: DevicePtr, bytes: u64) {
        if let Some(lane) = &self.lane
            && let Some(touch) = self.device().touch(ptr.get(), bytes)
        {
            lane.allocated(lane.finder.origin(operation), touch, self.named());
        }
    }

    /// The stream as reports of races name it.
    pub(crate) fn named(&self) -> OnStream {
        OnStream { id: self.id.get().copied(), is_legacy: self.is_legacy, device: self.device }
    }

    /// Shows the race finder a command that a capture records as the latest of its stream with this index and clock.
    pub(crate) fn note_recorded(&self, step: &Step, part: (usize, &Clock, &mut Shadow)) {
        if let (Some(lane), Some(origin)) = (&self.lane, &step.origin) {
            lane.recorded(&step.command, Arc::clone(origin), (&self.engine, self.named()), part);
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.queue.lock().closed
    }

    /// Whether a capture records what is enqueued.
    pub(crate) fn is_recording(&self) -> bool {
        self.queue.lock().recording().is_some()
    }

    /// The queue of a stream that takes commands.
    pub(crate) fn open_queue(&self, operation: Operation) -> Result<MutexGuard<'_, Queue>> {
        let queue = self.queue.lock();
        if queue.closed {
            return Err(operation
                .error(ErrorKind::InvalidHandle, "the stream was destroyed")
                .with_hint("bind or pass a stream that is alive"));
        }
        Ok(queue)
    }

    /// Hands commands to the worker, which it starts with the first.
    pub(crate) fn push(
        self: &Arc<Self>,
        operation: Operation,
        queue: &mut Queue,
        steps: impl IntoIterator<Item = Step>,
        launch: Option<(Arc<Origin>, GraphExecId)>,
    ) -> Result<()> {
        if !queue.has_worker && self.engine.schedule.is_none() {
            self.engine.start_worker(operation, self)?;
            queue.has_worker = true;
        }
        if let Some(lane) = &self.lane {
            lane.begin();
            if let Some((origin, exec)) = &launch {
                let exec = exec.parts();
                let number = u64::from(exec.slot) << 32 | u64::from(exec.generation.get());
                lane.launched(number, origin, self.named());
            }
        }
        let checks = self.device().checks.as_ref();
        let before = queue.commands.len();
        queue.commands.extend(steps.into_iter().map(|Step { command, origin }| {
            let id = self.id.get().copied();
            if let Some(lane) = &self.lane {
                let launch = launch.as_ref().map(|(origin, _)| origin);
                lane.command(&command, origin.as_ref(), launch, (&self.engine, self.named()));
            }
            let noted = checks.and_then(|checks| checks.note(operation, &command, &self.engine, self.device, id));
            (command, noted)
        }));
        queue.enqueued += (queue.commands.len() - before) as u64;
        if let Some(schedule) = &self.engine.schedule
            && !queue.has_worker
            && !queue.commands.is_empty()
        {
            schedule.add(self);
            queue.has_worker = true;
        }
        self.arrived.notify_one();
        Ok(())
    }

    /// Takes no more commands; those in the queue are still executed.
    pub(crate) fn close(&self) {
        let mut queue = self.queue.lock();
        queue.closed = true;
        let recorded = queue.leave_capture();
        drop(queue);
        self.arrived.notify_one();
        drop(recorded);
    }

    pub(crate) fn query(&self, operation: Operation) -> Result<Completion> {
        self.device().check_not_lost(operation)?;
        if let Some(schedule) = &self.engine.schedule {
            schedule.query();
        }
        let queue = self.queue.lock();
        queue.refuse_to_answer(operation)?;
        Ok(if self.has_completed(&queue) { Completion::Complete } else { Completion::Pending })
    }

    /// Whether all that was enqueued has been executed, which the host knows from here on.
    fn has_completed(&self, queue: &Queue) -> bool {
        let completed = queue.completed == queue.enqueued;
        if let Some(lane) = self.lane.as_ref().filter(|_| completed) {
            lane.finder.host_waited(&lane.clock());
        }
        completed
    }

    /// Waits for what has been enqueued before the call.
    pub(crate) fn synchronize(&self, operation: Operation) -> Result<()> {
        let queue = self.queue.lock();
        queue.refuse_to_answer(operation)?;
        self.wait_for_all(queue);
        if self.device().is_lost() { Err(device::lost(operation, self.device)) } else { Ok(()) }
    }

    fn wait_for_all(&self, mut queue: MutexGuard<'_, Queue>) {
        let (target, clock) = (queue.enqueued, self.lane.as_ref().map(Lane::clock));
        if let Some(schedule) = &self.engine.schedule {
            drop(queue);
            schedule.wait(|| self.queue.lock().completed >= target);
        } else {
            while queue.completed < target {
                self.passed.wait(&mut queue);
            }
            drop(queue);
        }
        if let (Some(lane), Some(clock)) = (&self.lane, clock) {
            lane.finder.host_waited(&clock);
        }
    }

    /// Waits for what has been enqueued before the call, whether the stream is destroyed, lost or takes part in a capture.
    #[cfg(feature = "simulated")]
    pub(crate) fn drain(&self) {
        self.wait_for_all(self.queue.lock());
    }

    /// Whether everything that was enqueued has been executed.
    #[cfg(feature = "simulated")]
    pub(crate) fn is_idle(&self) -> bool {
        self.has_completed(&self.queue.lock())
    }

    /// What a worker does: executes the commands in order, until the stream was closed and none is left.
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

    /// Executes a command that was taken out of the queue.
    fn execute(&self, queue: &mut MutexGuard<'_, Queue>, (command, noted): (Command, Option<Noted>)) {
        let settled = MutexGuard::unlocked(queue, || {
            let settled = self.run(command);
            // Before anybody can see that the command has been executed.
            drop(noted);
            settled
        });
        // Both under the lock: who sees the point reached finds the stream as far, and the other way round.
        queue.completed += 1;
        if let Some((point, progress)) = settled {
            point.settle(progress);
        }
        self.passed.notify_all();
    }

    /// Whether the next command can be executed without waiting for another stream. Code of the host counts only where
    /// that is asked for.
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

    /// Executes the next command, in the turn of a schedule. `false` where there is none.
    pub(crate) fn execute_one(&self, schedule: &Schedule) -> bool {
        let mut queue = self.queue.lock();
        let Some(front) = queue.commands.pop_front() else { return false };
        queue.is_busy = true;
        self.execute(&mut queue, front);
        queue.is_busy = false;
        if queue.commands.is_empty() {
            queue.has_worker = false;
            schedule.remove(self);
        }
        true
    }

    /// Lets the latency pass; the lock is free meanwhile, and the end of the backend cuts it short.
    fn take_time(&self, queue: &mut MutexGuard<'_, Queue>) {
        // Relaxed: a setting, which orders nothing.
        let latency = Duration::from_nanos(self.engine.latency_ns.load(Ordering::Relaxed));
        if latency.is_zero() {
            return;
        }
        // A deadline past the range of the clock is as good as none: the stop flag ends the wait.
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
        // Unwind safety: what a panicking command leaves half done is device memory, whose contents are unspecified
        // from then on, and the device is lost with it.
        catch_unwind(AssertUnwindSafe(|| command.execute(&self.engine, device))).unwrap_or_else(|_| {
            device.lose();
            None
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine() -> Arc<Engine> {
        let devices = (0..2).map(|ordinal| Device::new(ordinal, 1 << 20).unwrap()).collect();
        Engine::new(devices, Duration::ZERO, "hw-mock-test".to_owned(), None, None)
    }

    #[test]
    fn a_panicking_command_loses_its_device_and_leaves_nobody_waiting() {
        let engine = engine();
        let (broken, dependent, healthy) = (Stream::new(&engine, 0), Stream::new(&engine, 1), Stream::new(&engine, 1));
        let point = Point::new();
        broken.enqueue(Operation::Fill, Command::Panic).unwrap();
        // The device may be lost before the record arrives or after; either way nobody hangs.
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
        assert!(engine.devices[0].streams.lock().len() <= 2);
        engine.stop();
    }
}
