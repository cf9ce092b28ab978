//! Streams: a queue of commands each, executed in order by a worker thread of its own.
//!
//! The queue's lock is held to push and to pop, never while a command executes, waits or takes its time, so enqueueing
//! waits for nothing. The worker starts with the first command and ends when the stream was closed and its queue is
//! empty. A command that panics loses its device: what follows on that device is given up, points among it are settled
//! as lost, and nobody is left waiting.
//!
//! Priorities are accepted and change nothing: the workers share the CPU as the system sees fit.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use highwater_core::{Completion, DevicePtr, ErrorKind, HostPtr, Result};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::device::{self, Device};
use crate::event::{Point, Progress};
use crate::kernel::{Panel, Product};
use crate::operation::Operation;

/// One operation of a stream. Offsets are bytes from the start of a device's memory.
#[derive(Debug)]
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
        dst: usize,
        bytes: usize,
        pattern: u64,
    },
    Record(Arc<Point>),
    Wait(Arc<Point>),
    /// Gives back the bytes of a block that was freed in stream order.
    Release {
        ptr: DevicePtr,
        bytes: u64,
    },
    /// First half of a product: into the workspace.
    Multiply(Arc<Product>, Panel),
    /// Second half: from the workspace to the result.
    Finish(Arc<Product>, Panel),
    /// Both halves at once, for a product that was given no room for intermediate results.
    MultiplyAndFinish(Arc<Product>),
    #[cfg(test)]
    Panic,
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
            Self::Fill { dst, bytes, pattern } => device.memory.fill(dst, bytes, pattern),
            Self::Record(point) => return Some((point, Progress::Reached(Instant::now()))),
            Self::Wait(point) => {
                if point.wait().is_none() {
                    // What was to come before will never come, and what follows relies on it.
                    device.lose();
                }
            }
            Self::Release { ptr, bytes } => device.release(ptr, bytes),
            Self::Multiply(product, panel) => product.multiply(&device.memory, panel),
            Self::Finish(product, panel) => product.finish(&device.memory, panel),
            Self::MultiplyAndFinish(product) => product.multiply_and_finish(&device.memory),
            #[cfg(test)]
            Self::Panic => panic!("a command that panics, as the test asked"),
        }
        None
    }

    /// What is left to do when the device was lost before the command's turn came.
    fn give_up(self, device: &Device) -> Settled {
        match self {
            Self::Record(point) => return Some((point, Progress::Lost)),
            Self::Release { ptr, bytes } => device.release(ptr, bytes),
            _ => {}
        }
        None
    }
}

/// What the workers of one backend share.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) devices: Vec<Device>,
    pub(crate) latency_ns: AtomicU64,
    /// Set when the backend ends: what is still queued is executed at once, without latency.
    pub(crate) stopping: AtomicBool,
    workers: Mutex<Vec<JoinHandle<()>>>,
    thread_name: String,
}

impl Engine {
    pub(crate) fn new(devices: Vec<Device>, latency: Duration, thread_name: String) -> Arc<Self> {
        Arc::new(Self {
            devices,
            latency_ns: AtomicU64::new(nanoseconds(latency)),
            stopping: AtomicBool::new(false),
            workers: Mutex::new(Vec::new()),
            thread_name,
        })
    }

    fn start_worker(&self, operation: Operation, stream: &Arc<Stream>) -> Result<()> {
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

    /// Closes every stream, lets the workers finish what is queued, and waits for them.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        for device in &self.devices {
            let streams = device.streams.lock().clone();
            for stream in streams.iter().filter_map(std::sync::Weak::upgrade) {
                stream.close();
            }
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

#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) device: u32,
    engine: Arc<Engine>,
    queue: Mutex<Queue>,
    /// Told when a command arrives, when the stream is closed, and when the engine stops.
    arrived: Condvar,
    /// Told when a command has been executed.
    passed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    commands: VecDeque<Command>,
    enqueued: u64,
    completed: u64,
    has_worker: bool,
    closed: bool,
}

impl Stream {
    /// A stream of the engine's device `ordinal`, without a worker yet.
    pub(crate) fn new(engine: &Arc<Engine>, ordinal: u32) -> Arc<Self> {
        let stream = Arc::new(Self {
            device: ordinal,
            engine: Arc::clone(engine),
            queue: Mutex::new(Queue::default()),
            arrived: Condvar::new(),
            passed: Condvar::new(),
        });
        let mut streams = engine.devices[ordinal as usize].streams.lock();
        streams.retain(|other| other.strong_count() > 0);
        streams.push(Arc::downgrade(&stream));
        stream
    }

    fn device(&self) -> &Device {
        &self.engine.devices[self.device as usize]
    }

    /// Appends a command; waits for nothing.
    pub(crate) fn enqueue(self: &Arc<Self>, operation: Operation, command: Command) -> Result<()> {
        // Memory is given back on a lost device too.
        if !matches!(command, Command::Release { .. }) {
            self.device().check_not_lost(operation)?;
        }
        let mut queue = self.queue.lock();
        if queue.closed {
            return Err(operation
                .error(ErrorKind::InvalidHandle, "the stream was destroyed")
                .with_hint("bind or pass a stream that is alive"));
        }
        if !queue.has_worker {
            self.engine.start_worker(operation, self)?;
            queue.has_worker = true;
        }
        queue.commands.push_back(command);
        queue.enqueued += 1;
        drop(queue);
        self.arrived.notify_one();
        Ok(())
    }

    /// Takes no more commands; those in the queue are still executed.
    pub(crate) fn close(&self) {
        self.queue.lock().closed = true;
        self.arrived.notify_one();
    }

    pub(crate) fn query(&self, operation: Operation) -> Result<Completion> {
        self.device().check_not_lost(operation)?;
        let queue = self.queue.lock();
        Ok(if queue.completed == queue.enqueued { Completion::Complete } else { Completion::Pending })
    }

    /// Waits for what has been enqueued before the call.
    pub(crate) fn synchronize(&self, operation: Operation) -> Result<()> {
        let mut queue = self.queue.lock();
        let target = queue.enqueued;
        while queue.completed < target {
            self.passed.wait(&mut queue);
        }
        drop(queue);
        if self.device().is_lost() { Err(device::lost(operation, self.device)) } else { Ok(()) }
    }

    fn work(&self) {
        let mut queue = self.queue.lock();
        loop {
            if let Some(command) = queue.commands.pop_front() {
                self.take_time(&mut queue);
                let settled = MutexGuard::unlocked(&mut queue, || self.run(command));
                // Both under the lock: who sees the point reached finds the stream as far, and the other way round.
                queue.completed += 1;
                if let Some((point, progress)) = settled {
                    point.settle(progress);
                }
                self.passed.notify_all();
            } else if queue.closed {
                return;
            } else {
                self.arrived.wait(&mut queue);
            }
        }
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
        Engine::new(devices, Duration::ZERO, "hw-mock-test".to_owned())
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
        let error = broken.enqueue(Operation::Fill, Command::Fill { dst: 0, bytes: 8, pattern: 0 }).unwrap_err();
        assert_eq!((error.kind(), error.operation()), (ErrorKind::DeviceLost, "fill"));
        engine.stop();
    }

    #[test]
    fn workers_of_closed_streams_do_not_pile_up() {
        let engine = engine();
        for _ in 0..20 {
            let stream = Stream::new(&engine, 0);
            stream.enqueue(Operation::Fill, Command::Fill { dst: 0, bytes: 8, pattern: 1 }).unwrap();
            stream.close();
            while Arc::strong_count(&stream) > 1 {
                std::thread::yield_now();
            }
        }
        std::thread::sleep(Duration::from_millis(20));
        let last = Stream::new(&engine, 0);
        last.enqueue(Operation::Fill, Command::Fill { dst: 0, bytes: 8, pattern: 1 }).unwrap();
        assert!(engine.workers.lock().len() <= 2, "{} workers are kept", engine.workers.lock().len());
        assert!(engine.devices[0].streams.lock().len() <= 2);
        engine.stop();
    }
}
