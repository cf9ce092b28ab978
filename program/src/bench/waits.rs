//! The rows of waits that block no thread. They measure the time from the end of the work to the task, and the processor time of a
//! wake and of the questions.
//!
//! A task starts late for two reasons: the library learns late of the end, and a thread that sleeps must wake. So the same wait is
//! measured with a task of a sleeping thread, with a task of a thread that is awake, and with a closure. Another row wakes a sleeping thread
//! without a device.

use std::collections::VecDeque;
use std::fs;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
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
/// Bytes of a copy of longer work. A vendor's queue has space for about 1000 copies, and a call that finds it full waits.
const BIG_CHUNK: usize = 16 << 20;
/// The works before a wait: name, time, bytes of a copy, and samples of a round.
const WORKS: [(&str, Duration, usize, usize); 3] = [
    ("1ms", Duration::from_millis(1), CHUNK, 20),
    ("10ms", Duration::from_millis(10), CHUNK, 20),
    ("50ms", Duration::from_millis(50), BIG_CHUNK, 4),
];
/// Long work, before one wait.
const LONG: (&str, Duration) = ("2s", Duration::from_secs(2));
const TASKS: usize = 10_000;
const EXECUTORS: usize = 2;
/// The most tasks that a thread takes at once.
const TAKEN: usize = 32;
const STREAMS: usize = 4;
/// The work that all tasks wait for. They begin their waits during it.
const BLOCKER: Duration = Duration::from_millis(200);

pub(super) fn families() -> Vec<Family> {
    let names = WORKS.into_iter().flat_map(|(work, ..)| rows_of(work));
    let wakes_rows = ["wake_processor_time", "wake_processor_time_in_notifier", "waits_begun_before_their_end"];
    vec![
        Family { names: names.collect(), run: ends },
        Family { names: vec![share_row(LONG.0)], run: long_wait },
        Family { names: wakes_rows.map(str::to_owned).to_vec(), run: wakes },
    ]
}

fn rows_of(work: &str) -> Vec<String> {
    let share = has_share(work).then(|| share_row(work));
    Form::ALL.into_iter().map(|form| form.row(work)).chain([parked_row(work)]).chain(share).collect()
}

/// Returns whether the notifier's part is measured. In a short wait, the kernel's figure is too old.
fn has_share(work: &str) -> bool {
    work != WORKS[0].0
}

/// The row of the part of a core that the notifier takes during a wait.
fn share_row(work: &str) -> String {
    format!("notifier_core_share_in_{work}")
}

/// The row of the wake of a thread that slept, without a device.
fn parked_row(time: &str) -> String {
    format!("parked_thread_after_{time}")
}

/// Returns the row of the median of some times in microseconds.
fn median(name: impl Into<String>, times: Vec<f64>, bar: Bar) -> Row {
    if times.is_empty() { Row::skipped(name) } else { Row::new(name, quantile(times, 0.5), "us", bar) }
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
    fn new(runtime: &Runtime, chunk: usize) -> Result<Self> {
        let copies = u32::try_from((64 * CHUNK / chunk).max(4)).unwrap_or(64);
        let device = runtime.device(0)?;
        let (stream, host) = (device.create_stream()?, runtime.pinned(chunk)?);
        let mut work = Self { stream, host, device: device.allocate(chunk)?, copy: Duration::ZERO };
        // The first round warms up.
        for _ in 0..2 {
            let started = Instant::now();
            work.enqueue_copies(copies)?;
            work.stream.synchronize()?;
            work.copy = started.elapsed() / copies;
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

/// A way to wait for the end of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// A task whose thread sleeps until the wake.
    Task,
    /// A task whose thread looks for work all the time, as a thread of a busy executor does between two tasks.
    AwakeTask,
    /// A closure, which runs in the notifier.
    Closure,
    /// A thread that the backend blocks.
    Thread,
}

impl Form {
    const ALL: [Self; 4] = [Self::Task, Self::AwakeTask, Self::Closure, Self::Thread];

    fn row(self, work: &str) -> String {
        let form = match self {
            Self::Task => "task",
            Self::AwakeTask => "awake_task",
            Self::Closure => "closure",
            Self::Thread => "thread",
        };
        format!("{form}_after_{work}")
    }

    fn bar(self) -> Bar {
        if self == Self::Thread { Bar::None } else { Bar::AtMost(20.0) }
    }

    /// Waits. Returns the time of the first instruction after the wait.
    fn wait(self, event: &Event) -> Result<Instant> {
        let task = async { event.done().await.map(|()| Instant::now()) };
        match self {
            Self::Task => block_on(task),
            Self::AwakeTask => poll_on(task),
            Self::Closure => {
                let (sender, result) = channel();
                event.on_done(move |result| drop(sender.send(result.map(|()| Instant::now()))));
                // The closure is called once. Without its message, the sample counts to the end of this wait.
                result.recv().unwrap_or_else(|_| Ok(Instant::now()))
            }
            Self::Thread => event.synchronize().map(|()| Instant::now()),
        }
    }
}

/// Wakes a thread that runs one task.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a task in this thread, which sleeps while the task waits.
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

/// Tells a thread that is awake to run its task.
struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}

/// Runs a task in this thread, which stays awake while the task waits.
fn poll_on<T>(task: impl Future<Output = T>) -> T {
    let flag = Arc::new(Flag(AtomicBool::new(true)));
    let waker = Waker::from(Arc::clone(&flag));
    let mut task = pin!(task);
    loop {
        // Acquire: the end of the work is before the wake.
        if flag.0.swap(false, Ordering::Acquire)
            && let Poll::Ready(value) = task.as_mut().poll(&mut Context::from_waker(&waker))
        {
            return value;
        }
        thread::yield_now();
    }
}

/// Measures the time from a wake to the first instruction of a thread that slept for `time`, in microseconds. No device takes part.
fn wake_parked(time: Duration, wakes: &Sender<(Duration, Thread)>, woken: &Receiver<Instant>) -> Option<f64> {
    wakes.send((time, thread::current())).ok()?;
    loop {
        thread::park();
        // A thread may wake for no reason.
        if let Ok(wake) = woken.try_recv() {
            return Some(wake.elapsed().as_secs_f64() * 1e6);
        }
    }
}

/// Wakes each thread after its time. As the notifier, sleeps for a short time again and again.
fn wake_threads(threads: &Receiver<(Duration, Thread)>, wakes: &Sender<Instant>) {
    for (time, thread) in threads {
        let started = Instant::now();
        while started.elapsed() < time {
            thread::sleep(Duration::from_micros(4));
        }
        if wakes.send(Instant::now()).is_ok() {
            thread.unpark();
        }
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

/// Measures the time from the end of the work to the first instruction after the wait, for each form. Measures the notifier's part of a
/// core in the waits of the first form.
fn ends(bench: &Bench<'_>) -> Result<Vec<Row>> {
    let runtime = bench.runtime()?;
    let (to_observer, events) = channel();
    let (send_end, observed) = channel();
    let (to_waker, threads) = channel();
    let (send_wake, woken) = channel();
    thread::scope(|scope| {
        scope.spawn(move || observe(&events, |end| drop(send_end.send(end))));
        scope.spawn(move || wake_threads(&threads, &send_wake));
        let mut rows = Vec::new();
        for (name, time, chunk, samples) in WORKS {
            if !rows_of(name).iter().any(|name| bench.wants(name)) {
                continue;
            }
            let work = Work::new(&runtime, chunk)?;
            let mut times = [(); Form::ALL.len()].map(|()| Vec::new());
            let (mut parked, mut shares) = (Vec::new(), Share::default());
            for _ in 0..bench.rounds as usize * samples {
                for (form, times) in Form::ALL.into_iter().zip(&mut times) {
                    work.enqueue(time)?;
                    let event = Arc::new(work.stream.record()?);
                    let _ = to_observer.send(Arc::clone(&event));
                    let awake = if form == Form::Task { shares.add(|| form.wait(&event)) } else { form.wait(&event) };
                    let (awake, Ok(end)) = (awake?, observed.recv()) else { continue };
                    times.extend(end?.map(|end| awake.saturating_duration_since(end).as_secs_f64() * 1e6));
                }
                parked.extend(wake_parked(time, &to_waker, &woken));
            }
            rows.extend(
                Form::ALL.into_iter().zip(times).map(|(form, times)| median(form.row(name), times, form.bar())),
            );
            rows.push(median(parked_row(name), parked, Bar::None));
            if has_share(name) {
                rows.push(shares.row(name));
            }
        }
        drop((to_observer, to_waker));
        Ok(rows)
    })
}

/// The processor time of the notifier in some waits, and the time of these.
#[derive(Default)]
struct Share {
    asked: Duration,
    waited: Duration,
}

impl Share {
    fn add<T>(&mut self, wait: impl FnOnce() -> T) -> T {
        let (before, started) = (processor_time_of_waits(), Instant::now());
        let value = wait();
        let waited = started.elapsed();
        // In the first wait, the thread does not exist before.
        if let (Some(before), Some(after)) = (before, processor_time_of_waits()) {
            self.asked += after.saturating_sub(before);
            self.waited += waited;
        }
        value
    }

    fn row(&self, work: &str) -> Row {
        let name = share_row(work);
        if self.waited.is_zero() {
            return Row::skipped(name);
        }
        Row::new(name, self.asked.as_secs_f64() / self.waited.as_secs_f64(), "ratio", Bar::None)
    }
}

/// Measures the notifier's part of a core in a long wait.
fn long_wait(bench: &Bench<'_>) -> Result<Vec<Row>> {
    let runtime = bench.runtime()?;
    let work = Work::new(&runtime, BIG_CHUNK)?;
    // Starts the thread.
    work.enqueue(Duration::from_millis(1))?;
    block_on(work.stream.done())?;
    work.enqueue(LONG.1)?;
    let mut share = Share::default();
    share.add(|| block_on(work.stream.done()))?;
    Ok(vec![share.row(LONG.0)])
}

// ---------------------------------------------------------------- the cost of a wake

type Running = Pin<Box<dyn Future<Output = Result<()>> + Send>>;

/// A task of the executor.
struct Task {
    future: Mutex<Option<Running>>,
    wakes: AtomicU32,
    executor: Arc<Executor>,
}

/// A minimal executor of a few threads. As usual executors do, it wakes a thread only if one sleeps and none is about to run, and a
/// thread takes several tasks at once.
#[derive(Default)]
struct Executor {
    state: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Arc<Task>>,
    /// Threads that sleep.
    sleeping: usize,
    /// True from the wake of a thread until it runs.
    is_waking: bool,
    /// Tasks that were run so far, whether they ended or not.
    polled: usize,
    ended: usize,
    failed: Option<highwater::Error>,
}

impl Queue {
    /// Returns whether the caller must wake a thread.
    fn wakes_one(&mut self) -> bool {
        let wakes = self.sleeping > 0 && !self.is_waking && !self.tasks.is_empty();
        self.is_waking |= wakes;
        wakes
    }
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
        let mut state = lock(&self.state);
        state.tasks.push_back(task);
        let wakes = state.wakes_one();
        drop(state);
        if wakes {
            self.changed.notify_one();
        }
    }

    /// Runs tasks until all have ended. Returns the processor time after each was run once.
    fn run(&self) -> Duration {
        let mut since = None;
        let mut taken = Vec::with_capacity(TAKEN);
        let mut ended = 0;
        loop {
            let mut state = lock(&self.state);
            state.ended += std::mem::take(&mut ended);
            while state.tasks.is_empty() && state.ended < TASKS {
                state.sleeping += 1;
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.sleeping -= 1;
                state.is_waking = false;
            }
            if state.ended == TASKS {
                self.changed.notify_all();
                drop(state);
                let now = processor_time();
                return now.saturating_sub(since.unwrap_or(now));
            }
            if state.polled >= TASKS && since.is_none() {
                since = Some(processor_time());
            }
            let part = state.tasks.len().div_ceil(EXECUTORS).min(TAKEN);
            taken.extend(state.tasks.drain(..part));
            state.polled += part;
            let wakes = state.wakes_one();
            drop(state);
            if wakes {
                self.changed.notify_one();
            }
            for task in taken.drain(..) {
                let waker = Waker::from(Arc::clone(&task));
                let mut future = lock(&task.future);
                let result = future.as_mut().map(|future| future.as_mut().poll(&mut Context::from_waker(&waker)));
                if let Some(Poll::Ready(result)) = result {
                    *future = None;
                    ended += 1;
                    if let Err(error) = result {
                        lock(&self.state).failed = Some(error);
                    }
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
    let work = Work::new(&runtime, CHUNK)?;
    let device = runtime.device(0)?;
    let streams = (0..STREAMS).map(|_| device.create_stream()).collect::<Result<Vec<_>>>()?;
    let (mut times, mut in_notifier, mut before) = (Vec::new(), Vec::new(), Vec::new());
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
            let of_a_wake = |time: Duration| time.as_secs_f64() * 1e6 / f64::from(woken);
            times.push(of_a_wake(in_tasks + asked));
            in_notifier.push(of_a_wake(asked));
        }
    }
    Ok(vec![
        median("wake_processor_time", times, Bar::AtMost(2.0)),
        median("wake_processor_time_in_notifier", in_notifier, Bar::None),
        Row::new("waits_begun_before_their_end", quantile(before, 0.5), "ratio", Bar::None),
    ])
}
