//! Deterministic schedules: a seed and the calls decide which stream executes its next operation, and when.
//!
//! There are no workers. The streams with work stand in a list, in the order in which they got it. Each call of the
//! backend executes a drawn number of operations, one at a time, on the caller's thread. A wait executes as many as it
//! needs, a query at times a few.
//!
//! Each operation is the next one of the stream with the highest priority among those that can go on. A stream draws
//! its priority when it gets work, and at times another one. So one stream runs far ahead of the others as often as all
//! run side by side. The amount of work between waits is drawn once: some seeds leave all work to the waits, others do
//! most of it at once.
//!
//! Nothing else is drawn and no clock is read, so equal calls in equal order execute equal operations in equal order.
//! Latencies of operations are left out.
//!
//! Without calls, work would never go on: for a program that watches memory, or for another process that waits for an
//! event. So after [`PATIENCE`] without a call, work goes on by itself, and [`Schedule::unprompted`] counts it. A call
//! itself executes records of events for other processes, unless something holds them up.
//!
//! Only waits and queries run code of the host (the simulated vendor libraries have it), and only if nothing else can
//! go on. A thread that makes another call may hold a lock that the code takes.
//!
//! Locks: `execution`, then a stream's queue, then the list. The thread that executes commands holds `execution`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, ReentrantMutex};

use crate::calls::CallObserver;
use crate::engine::{Goal, Scheduler};
use crate::hash::scramble;
use crate::stream::Stream;

/// The time without a call after which work goes on by itself.
const PATIENCE: Duration = Duration::from_secs(2);
/// The time that a wait sleeps if another process, or code of the host, must come first.
const NAP: Duration = Duration::from_micros(200);

#[derive(Debug)]
pub(crate) struct Schedule {
    /// Held by the thread that executes, and again by what it executes.
    execution: ReentrantMutex<()>,
    ready: Mutex<Ready>,
    /// The largest number of operations that a call executes.
    most: u64,
    /// Grows with each call.
    calls: AtomicU64,
    unprompted: AtomicU64,
    /// Set, and signaled, when the backend ends.
    over: Mutex<bool>,
    ended: Condvar,
}

#[derive(Debug)]
struct Ready {
    seed: u64,
    draws: u64,
    streams: Vec<(Arc<Stream>, u64)>,
}

impl Ready {
    fn draw(&mut self) -> u64 {
        self.draws += 1;
        scramble(self.seed ^ scramble(self.draws))
    }
}

impl Schedule {
    pub(crate) fn new(seed: u64) -> Arc<Self> {
        Arc::new(Self {
            execution: ReentrantMutex::new(()),
            ready: Mutex::new(Ready { seed, draws: 0, streams: Vec::new() }),
            most: [0, 1, 2, 8][(scramble(seed) % 4) as usize],
            calls: AtomicU64::new(0),
            unprompted: AtomicU64::new(0),
            over: Mutex::new(false),
            ended: Condvar::new(),
        })
    }

    fn go(&self, portion: u64, host_code_too: bool) {
        for _ in 0..portion {
            // Another thread executes, which is enough: it may run code that waits for a lock of this one.
            let Some(_executing) = self.execution.try_lock() else { return };
            if !self.step(host_code_too) {
                return;
            }
        }
    }

    /// Executes work until `is_done`, unless another process must come first.
    pub(crate) fn try_to_reach(&self, is_done: impl Fn() -> bool) {
        let _executing = self.execution.lock();
        while !is_done() && self.step(false) {}
    }

    fn execute_until(&self, is_done: &dyn Fn() -> bool) {
        while !is_done() {
            let Some(executing) = self.execution.try_lock_for(NAP) else { continue };
            // Another thread may have executed the last commands meanwhile.
            let is_stuck = !is_done() && !self.step(true);
            drop(executing);
            if is_stuck {
                std::thread::sleep(NAP);
            }
        }
    }

    /// Executes one operation, if a stream can go on. The caller must hold `execution`.
    fn step(&self, host_code_too: bool) -> bool {
        let streams = self.ready.lock().streams.clone();
        let best = |host_code_too: bool| {
            let able = streams.iter().filter(|(stream, _)| stream.can_go_on(host_code_too));
            able.max_by_key(|(_, priority)| *priority)
        };
        // Code of the host comes only if nothing else can go on.
        let Some((stream, _)) = best(false).or_else(|| if host_code_too { best(true) } else { None }) else {
            return false;
        };
        let mut ready = self.ready.lock();
        let draw = ready.draw();
        if draw.is_multiple_of(4)
            && let Some(entry) = ready.streams.iter_mut().find(|(other, _)| Arc::ptr_eq(other, stream))
        {
            entry.1 = scramble(draw);
        }
        drop(ready);
        stream.execute_one()
    }

    /// Returns how many operations happened without a call.
    pub(crate) fn unprompted(&self) -> u64 {
        self.unprompted.load(Ordering::Relaxed)
    }

    /// Starts the thread that executes work if nobody calls.
    pub(crate) fn watch(self: &Arc<Self>, name: String) -> std::io::Result<()> {
        let schedule = Arc::downgrade(self);
        std::thread::Builder::new().name(name).spawn(move || watch(&schedule, PATIENCE)).map(|_| ())
    }
}

impl CallObserver for Schedule {
    /// Executes some work before the call.
    fn called(&self) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let portion = self.ready.lock().draw() % (self.most + 1);
        self.go(portion, false);
    }
}

impl Scheduler for Schedule {
    fn add(&self, stream: &Arc<Stream>) {
        let mut ready = self.ready.lock();
        let priority = ready.draw();
        ready.streams.push((Arc::clone(stream), priority));
    }

    fn remove(&self, stream: &Stream) {
        let mut ready = self.ready.lock();
        let index = ready.streams.iter().position(|(other, _)| std::ptr::eq(&**other, stream));
        let removed = index.map(|index| ready.streams.remove(index));
        drop(ready);
        drop(removed);
    }

    fn queried(&self) {
        let draw = self.ready.lock().draw();
        // At times a query executes work, so that a caller that asks again and again gets its answer in the end.
        self.go(if draw.is_multiple_of(2) { 0 } else { 1 + draw / 2 % 4 }, true);
    }

    fn wait(&self, _: Goal<'_>, is_done: &dyn Fn() -> bool) {
        self.execute_until(is_done);
    }

    fn finish(&self) {
        *self.over.lock() = true;
        self.ended.notify_all();
        self.execute_until(&|| self.ready.lock().streams.is_empty());
    }
}

fn watch(schedule: &Weak<Schedule>, patience: Duration) {
    let (mut calls, mut since) = (0, Instant::now());
    while let Some(schedule) = schedule.upgrade() {
        let mut over = schedule.over.lock();
        if !*over {
            schedule.ended.wait_for(&mut over, patience / 10);
        }
        if *over {
            return;
        }
        drop(over);
        let now = schedule.calls.load(Ordering::Relaxed);
        if now != calls || schedule.ready.lock().streams.is_empty() {
            (calls, since) = (now, Instant::now());
        } else if since.elapsed() >= patience {
            while schedule.calls.load(Ordering::Relaxed) == calls {
                let _executing = schedule.execution.lock();
                if !schedule.step(true) {
                    break;
                }
                if schedule.unprompted.fetch_add(1, Ordering::Relaxed) == 0 {
                    tracing::warn!("no call for {patience:?}: work went on outside of the schedule");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::Command;
    use crate::device::{Device, DeviceOptions};
    use crate::engine::Engine;
    use crate::observer::Observers;
    use crate::operation::Operation;
    use crate::raw_handles::RawHandles;
    use highwater_hal::BackendTag;

    const FILL: Command = Command::Fill { device: 0, dst: 0, bytes: 8, pattern: 1 };

    fn engine(schedule: &Arc<Schedule>) -> Arc<Engine> {
        let device = Device::new(0, 1 << 20, &DeviceOptions::default(), Observers::default()).unwrap();
        let scheduler = Arc::<Schedule>::clone(schedule);
        let name = "hw-mock-test".to_owned();
        let raw_handles = RawHandles::new(BackendTag::next());
        Engine::new(vec![Arc::new(device)], Duration::ZERO, name, Some(scheduler), Observers::default(), raw_handles)
    }

    #[test]
    fn work_goes_on_by_itself_when_nobody_calls_and_not_before() {
        let schedule = Schedule::new(0);
        let engine = engine(&schedule);
        let stream = Stream::new(&engine, 0);
        stream.enqueue(Operation::Fill, FILL).unwrap();
        let watched = Arc::downgrade(&schedule);
        let watcher = std::thread::spawn(move || watch(&watched, Duration::from_millis(20)));
        let start = Instant::now();
        while schedule.unprompted() == 0 {
            assert!(start.elapsed() < Duration::from_secs(30), "the work stands still");
            std::thread::yield_now();
        }
        assert!(start.elapsed() >= Duration::from_millis(20));
        assert!(schedule.ready.lock().streams.is_empty());
        engine.stop();
        watcher.join().unwrap();
    }

    #[test]
    fn the_watcher_ends_with_a_schedule_that_was_never_used() {
        let schedule = Schedule::new(0);
        let watched = Arc::downgrade(&schedule);
        let watcher = std::thread::spawn(move || watch(&watched, Duration::from_millis(20)));
        drop(schedule);
        watcher.join().unwrap();
    }

    #[test]
    fn a_call_does_not_wait_for_a_thread_that_executes() {
        let schedule = (0..).map(Schedule::new).find(|schedule| schedule.most == 8).unwrap();
        let engine = engine(&schedule);
        let stream = Stream::new(&engine, 0);
        stream.enqueue(Operation::Fill, FILL).unwrap();
        let executing = schedule.execution.lock();
        std::thread::scope(|scope| {
            scope.spawn(|| (0..100).for_each(|_| schedule.called())).join().unwrap();
        });
        assert_eq!(schedule.ready.lock().streams.len(), 1);
        drop(executing);
        engine.stop();
        assert!(schedule.ready.lock().streams.is_empty());
    }
}
