//! The rows of waits that block no thread. They measure the time from the end of the work to the task, and the processor time of a
//! wake.

use std::collections::VecDeque;
use std::fs;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use highwater::{DeviceBuffer, Event, PinnedBuffer, Result, Runtime, Stream};
use rustix::time::{ClockId, clock_gettime};

use super::report::{Bar, Row};
use super::rounds::quantile;
use super::{Bench, Family};

/// Bytes of a copy. The work of a sample is a number of them.
const CHUNK: usize = 1 << 20;
/// The works before a wait: name and time.
const WORKS: [(&str, Duration); 2] = [("1ms", Duration::from_millis(1)), ("10ms", Duration::from_millis(10))];
/// Samples of a row of time in a round.
const SAMPLES: usize = 20;
const TASKS: usize = 10_000;
const EXECUTORS: usize = 2;
const STREAMS: usize = 4;
/// The work that all tasks wait for. They begin their waits during it.
const BLOCKER: Duration = Duration::from_millis(200);

pub(super) fn families() -> Vec<Family> {
    let names = WORKS.iter().flat_map(|(work, _)| [format!("task_after_{work}"), format!("thread_after_{work}")]);
    vec![
        Family { names: names.collect(), run: ends },
        Family { names: vec!["wake_processor_time".to_owned(), "waits_begun_before_their_end".to_owned()], run: wakes },
    ]
}

/// A stream with work of a chosen time.
struct Work {
    stream: Stream,
    host: PinnedBuffer<u8>,
    device: DeviceBuffer<u8>,
    /// The time of a copy.
    copy: Duration,
}

impl Work {
    fn new(runtime: &Runtime) -> Result<Self> {
        const COPIES: u32 = 64;
        let device = runtime.device(0)?;
        let (stream, host) = (device.create_stream()?, runtime.pinned(CHUNK)?);
        let mut work = Self { stream, host, device: device.allocate(CHUNK)?, copy: Duration::ZERO };
        // The first round warms up.
        for _ in 0..2 {
            let started = Instant::now();
            work.enqueue_copies(COPIES)?;
            work.stream.synchronize()?;
            work.copy = started.elapsed() / COPIES;
        }
        Ok(work)
    }

    fn enqueue_copies(&self, copies: u32) -> Result<()> {
        (0..copies).try_for_each(|_| self.stream.copy_to_device(&self.host, &self.device))
    }

    /// Enqueues work that takes about `time`.
    fn enqueue(&self, time: Duration) -> Result<()> {
        let copies = time.as_nanos() / self.copy.as_nanos().max(1);
        self.enqueue_copies(u32::try_from(copies).unwrap_or(u32::MAX).max(1))
    }
}

// ---------------------------------------------------------------- the time to the task

/// Wakes a thread that runs one task.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a task in this thread.
fn block_on<T>(task: impl Future<Output = T>) -> T {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut task = pin!(task);
    loop {
        if let Poll::Ready(value) = task.as_mut().poll(&mut Context::from_waker(&waker)) {
            return value;
        }
        thread::park();
    }
}

/// Asks about each event without a pause. Reports the time at which it passed, or `None` if it had passed at the first answer.
fn observe(events: &Receiver<Arc<Event>>, ends: impl Fn(Result<Option<Instant>>)) {
    for event in events {
        let mut asked = false;
        let end = loop {
            match event.is_complete() {
                Ok(true) => break Ok(asked.then(Instant::now)),
                Ok(false) => asked = true,
                Err(error) => break Err(error),
            }
        };
        ends(end);
    }
}

/// Measures the time from the end of the work to the first instruction after the wait, for a task and for a blocked thread.
fn ends(bench: &Bench<'_>) -> Result<Vec<Row>> {
    let runtime = bench.runtime()?;
    let work = &Work::new(&runtime)?;
    let (to_observer, events) = channel();
    let (send_end, observed) = channel();
    thread::scope(|scope| {
        scope.spawn(move || observe(&events, |end| drop(send_end.send(end))));
        let mut rows = Vec::new();
        for (name, time) in WORKS {
            let names = [format!("task_after_{name}"), format!("thread_after_{name}")];
            if !names.iter().any(|name| bench.wants(name)) {
                continue;
            }
            let mut times = [Vec::new(), Vec::new()];
            for _ in 0..bench.rounds as usize * SAMPLES {
                for (is_thread, times) in times.iter_mut().enumerate() {
                    work.enqueue(time)?;
                    let event = Arc::new(work.stream.record()?);
                    let _ = to_observer.send(Arc::clone(&event));
                    let awake = if is_thread == 1 {
                        event.synchronize().map(|()| Instant::now())
                    } else {
                        block_on(async { event.done().await.map(|()| Instant::now()) })
                    };
                    let (awake, Ok(end)) = (awake?, observed.recv()) else { continue };
                    times.extend(end?.map(|end| awake.saturating_duration_since(end).as_secs_f64() * 1e6));
                }
            }
            for ((name, times), bar) in names.into_iter().zip(times).zip([Bar::AtMost(20.0), Bar::None]) {
                let row = |times| Row::new(name.clone(), quantile(times, 0.5), "us", bar);
                rows.push(if times.is_empty() { Row::skipped(name.clone()) } else { row(times) });
            }
        }
        drop(to_observer);
        Ok(rows)
    })
}

// ---------------------------------------------------------------- the cost of a wake

type Running = Pin<Box<dyn Future<Output = Result<()>> + Send>>;

/// A task of the executor.
struct Task {
    future: Mutex<Option<Running>>,
    wakes: AtomicU32,
    executor: Arc<Executor>,
}

/// A minimal executor of a few threads.
#[derive(Default)]
struct Executor {
    state: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Arc<Task>>,
    /// Tasks that were run so far, whether they ended or not.
    polled: usize,
    ended: usize,
    failed: Option<highwater::Error>,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.wakes.fetch_add(1, Ordering::Relaxed);
        let executor = Arc::clone(&self.executor);
        executor.push(self);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Executor {
    fn push(&self, task: Arc<Task>) {
        lock(&self.state).tasks.push_back(task);
        self.changed.notify_one();
    }

    /// Runs tasks until all have ended. Returns the processor time after each was run once.
    fn run(&self) -> Duration {
        let mut since = None;
        loop {
            let mut state = lock(&self.state);
            let task = loop {
                if state.ended == TASKS {
                    self.changed.notify_all();
                    drop(state);
                    let now = processor_time();
                    return now.saturating_sub(since.unwrap_or(now));
                }
                if state.polled >= TASKS && since.is_none() {
                    since = Some(processor_time());
                }
                match state.tasks.pop_front() {
                    Some(task) => break task,
                    None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                }
            };
            state.polled += 1;
            drop(state);
            let waker = Waker::from(Arc::clone(&task));
            let mut future = lock(&task.future);
            let result = future.as_mut().map(|future| future.as_mut().poll(&mut Context::from_waker(&waker)));
            if let Some(Poll::Ready(result)) = result {
                *future = None;
                let mut state = lock(&self.state);
                state.ended += 1;
                if let Err(error) = result {
                    state.failed = Some(error);
                }
            }
        }
    }
}

/// Returns the processor time of this thread.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Returns the processor time of the runtime's threads that ask about waits. `None` if the kernel does not report it.
fn processor_time_of_waits() -> Option<Duration> {
    let mut found = None;
    for thread in fs::read_dir("/proc/self/task").ok()?.flatten() {
        let read = |name| fs::read_to_string(thread.path().join(name)).ok();
        if read("comm").is_some_and(|name| name.trim_end() == "highwater-done") {
            let nanoseconds = read("schedstat")?.split(' ').next()?.parse().ok()?;
            found = Some(found.unwrap_or(Duration::ZERO) + Duration::from_nanos(nanoseconds));
        }
    }
    found
}

/// Measures the processor time of a wake, in all threads that take part in it, while many tasks wait.
fn wakes(bench: &Bench<'_>) -> Result<Vec<Row>> {
    let runtime = bench.runtime()?;
    let work = Work::new(&runtime)?;
    let device = runtime.device(0)?;
    let streams = (0..STREAMS).map(|_| device.create_stream()).collect::<Result<Vec<_>>>()?;
    let (mut times, mut before) = (Vec::new(), Vec::new());
    for _ in 0..bench.rounds.min(3) {
        work.enqueue(BLOCKER)?;
        let blocker = work.stream.record()?;
        streams.iter().try_for_each(|stream| stream.wait(&blocker))?;
        let executor = Arc::<Executor>::default();
        let mut tasks = Vec::with_capacity(TASKS);
        for task in 0..TASKS {
            let future = Mutex::new(Some(Box::pin(streams[task % STREAMS].done()) as Running));
            tasks.push(Arc::new(Task { future, wakes: AtomicU32::new(0), executor: Arc::clone(&executor) }));
        }
        tasks.iter().for_each(|task| lock(&executor.state).tasks.push_back(Arc::clone(task)));
        let asked_before = processor_time_of_waits();
        let in_tasks: Duration = thread::scope(|scope| {
            let threads: Vec<_> = (0..EXECUTORS).map(|_| scope.spawn(|| executor.run())).collect();
            let joined = threads.into_iter().map(thread::ScopedJoinHandle::join);
            joined.map(|time| time.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).sum()
        });
        if let Some(error) = lock(&executor.state).failed.take() {
            return Err(error);
        }
        let woken: u32 = tasks.iter().map(|task| task.wakes.load(Ordering::Relaxed)).sum();
        before.push(f64::from(woken) / TASKS as f64);
        let asked = processor_time_of_waits().zip(asked_before).map(|(after, before)| after.saturating_sub(before));
        if let Some(asked) = asked.filter(|_| woken > 0) {
            times.push((in_tasks + asked).as_secs_f64() * 1e6 / f64::from(woken));
        }
    }
    let time = if times.is_empty() {
        Row::skipped("wake_processor_time")
    } else {
        Row::new("wake_processor_time", quantile(times, 0.5), "us", Bar::AtMost(2.0))
    };
    Ok(vec![time, Row::new("waits_begun_before_their_end", quantile(before, 0.5), "ratio", Bar::None)])
}
