//! Futures, closures and descriptors for the end of device work: each wait ends once, and no wait or error is lost.

#![allow(missing_docs, reason = "tests")]

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier, Mutex};
use std::task::{Context, Poll, RawWaker, RawWakerVTable, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use highwater_core::{Backend as _, Done, ErrorKind, Result, Runtime, Stream};
use highwater_mock::{MockGpu, MockOptions, Operation};
use pollster::block_on;
use proptest::prelude::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// A test that takes longer hangs.
const LONG: Duration = Duration::from_secs(30);

/// Returns a stream that executes nothing until the test releases it, or waits for it.
fn held() -> (Arc<MockGpu>, Runtime, Stream) {
    let gpu = MockGpu::open(MockOptions::new().with_held_streams()).unwrap();
    let runtime = Runtime::new(gpu.clone()).unwrap();
    let stream = runtime.device(0).unwrap().create_stream().unwrap();
    enqueue(&stream);
    (gpu, runtime, stream)
}

/// Enqueues work. Without work, an event passes at once.
fn enqueue(stream: &Stream) {
    let values = stream.allocate::<u32>(16).unwrap();
    stream.fill(&values, 1).unwrap();
}

/// Counts wakes.
#[derive(Default)]
struct Wakes(AtomicU32);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn poll_once(done: &mut Done, wakes: &Arc<Wakes>) -> Poll<Result<()>> {
    let waker = Waker::from(Arc::clone(wakes));
    pin!(done).poll(&mut Context::from_waker(&waker))
}

fn is_readable(descriptor: impl AsFd, limit: Duration) -> bool {
    let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) };
    poll(&mut [PollFd::new(&descriptor, PollFlags::IN)], Some(&limit)).unwrap() == 1
}

fn kind_of(result: Result<()>) -> ErrorKind {
    result.unwrap_err().kind()
}

// ---------------------------------------------------------------- many tasks

type Future_ = std::pin::Pin<Box<dyn Future<Output = ()> + Send>>;

/// A task of the executor below.
struct Task {
    future: Mutex<Option<Future_>>,
    wakes: AtomicU32,
    queue: Sender<Arc<Task>>,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.wakes.fetch_add(1, Ordering::SeqCst);
        let queue = self.queue.clone();
        let _ = queue.send(self);
    }
}

/// Runs tasks until the queue has no sender left.
fn work(tasks: &Mutex<Receiver<Arc<Task>>>) {
    loop {
        let next = tasks.lock().unwrap().recv();
        let Ok(task) = next else { return };
        let waker = Waker::from(Arc::clone(&task));
        let mut future = task.future.lock().unwrap();
        if let Some(running) = future.as_mut()
            && running.as_mut().poll(&mut Context::from_waker(&waker)).is_ready()
        {
            *future = None;
        }
    }
}

/// Runs 10,000 tasks on two threads. Each task waits for one of two streams. With a seed, cancels a random half: some before their first
/// run, and the others while they wait or are woken.
fn run_ten_thousand(cancels: Option<u64>) {
    const TASKS: usize = 10_000;
    let (gpu, runtime, first) = held();
    let second = runtime.device(0).unwrap().create_stream().unwrap();
    let buffer = runtime.device(0).unwrap().allocate::<u32>(16).unwrap();
    let (queue, tasks) = channel();
    let tasks = Mutex::new(tasks);
    let (finished, results) = channel();
    let polled = Arc::new(AtomicU32::new(0));
    let spawned: Vec<_> = (0..TASKS)
        .map(|task| {
            let stream = [&first, &second][task % 2];
            if task % 100 < 2 {
                stream.fill(&buffer, 7).unwrap();
            }
            let (mut done, finished, polled) = (stream.done(), finished.clone(), Arc::clone(&polled));
            let future = async move {
                let mut is_first = true;
                let result = poll_fn(|context| {
                    let answer = pin!(&mut done).poll(context);
                    if std::mem::take(&mut is_first) {
                        polled.fetch_add(1, Ordering::SeqCst);
                    }
                    answer
                });
                finished.send((task, result.await)).unwrap();
            };
            let future = Mutex::new(Some(Box::pin(future) as Future_));
            Arc::new(Task { future, wakes: AtomicU32::new(0), queue: queue.clone() })
        })
        .collect();
    drop(finished);
    let mut random = cancels;
    let mut is_chosen = || {
        // A linear congruential generator, whose highest bit is the best one.
        random =
            random.map(|state| state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407));
        random.is_some_and(|state| state >> 63 == 1)
    };
    let chosen: Vec<bool> = spawned.iter().map(|_| is_chosen()).collect();
    let cancel = |task: &Task| drop(task.future.lock().unwrap().take());
    let cancelled: Vec<usize> = (0..TASKS).filter(|&task| chosen[task]).collect();
    let (unpolled, waiting) = cancelled.split_at(cancelled.len() / 10);
    unpolled.iter().for_each(|&task| cancel(&spawned[task]));
    spawned.iter().for_each(|task| queue.send(Arc::clone(task)).unwrap());
    drop(queue);
    thread::scope(|scope| {
        (0..2).for_each(|_| drop(scope.spawn(|| work(&tasks))));
        // All tasks wait before the first work ends.
        let start = Instant::now();
        while (polled.load(Ordering::SeqCst) as usize) < TASKS - unpolled.len() {
            assert!(start.elapsed() < LONG, "a task was not run");
            thread::yield_now();
        }
        let (early, late) = waiting.split_at(waiting.len() / 2);
        early.iter().for_each(|&task| cancel(&spawned[task]));
        gpu.release_stream(first.id()).unwrap();
        gpu.release_stream(second.id()).unwrap();
        late.iter().for_each(|&task| cancel(&spawned[task]));
        let mut ended = vec![false; TASKS];
        let mut left = chosen.iter().filter(|&&is_chosen| !is_chosen).count();
        while left > 0 {
            let (task, result) = results.recv_timeout(LONG).expect("no wake is lost");
            result.unwrap();
            assert!(!std::mem::replace(&mut ended[task], true), "task {task} ended twice");
            left -= usize::from(!chosen[task]);
        }
        for (task, spawned) in spawned.iter().enumerate() {
            let wakes = spawned.wakes.load(Ordering::SeqCst);
            if chosen[task] {
                assert!(wakes <= 1, "the cancelled task {task} was woken {wakes} times");
            } else {
                assert_eq!(wakes, 1, "the task {task} waited");
            }
        }
        assert!(early.iter().chain(unpolled).all(|&task| !ended[task]), "a cancelled task ended");
        // The threads end with the last task.
        drop(spawned);
    });
    drop((first, second, buffer));
    assert_eq!(runtime.close().unwrap().total(), 0);
    // A late cancellation may come after the end of its task.
    let late: Vec<(usize, Result<()>)> = results.iter().collect();
    assert!(late.iter().all(|(task, result)| chosen[*task] && result.is_ok()), "{late:?}");
}

#[test]
fn ten_thousand_tasks_on_two_threads_wake_once_each() {
    run_ten_thousand(None);
}

#[test]
fn ten_thousand_tasks_of_which_a_random_half_is_cancelled_lose_no_wake() {
    for seed in 1..4 {
        run_ten_thousand(Some(seed));
    }
}

#[test]
fn every_task_that_waits_is_woken_once() {
    const TASKS: u32 = 2000;
    let (gpu, runtime, stream) = held();
    let mut waits: Vec<_> = (0..TASKS).map(|_| (stream.record().unwrap().done(), Arc::<Wakes>::default())).collect();
    for (done, wakes) in &mut waits {
        assert!(poll_once(done, wakes).is_pending());
    }
    gpu.release_stream(stream.id()).unwrap();
    let start = Instant::now();
    for (done, wakes) in &mut waits {
        while wakes.0.load(Ordering::SeqCst) == 0 {
            assert!(start.elapsed() < LONG, "a wake is lost");
            thread::yield_now();
        }
        assert!(matches!(poll_once(done, wakes), Poll::Ready(Ok(()))));
        // The result stays.
        assert!(matches!(poll_once(done, wakes), Poll::Ready(Ok(()))));
    }
    drop(stream);
    assert_eq!(runtime.close().unwrap().total(), 0);
    assert!(waits.iter().all(|(_, wakes)| wakes.0.load(Ordering::SeqCst) == 1));
}

// ---------------------------------------------------------------- what each wait covers

#[test]
fn a_wait_ends_with_the_work_before_it_and_not_with_later_work() {
    let (gpu, runtime, stream) = held();
    let mut early = stream.done();
    let wakes = Arc::default();
    let event = stream.record().unwrap();
    let mut of_event = event.done();
    assert!(poll_once(&mut early, &wakes).is_pending() && poll_once(&mut of_event, &wakes).is_pending());
    drop(event);
    gpu.release_stream(stream.id()).unwrap();
    enqueue(&stream);
    let mut late = stream.done();
    block_on(early).unwrap();
    block_on(of_event).unwrap();
    assert!(poll_once(&mut late, &wakes).is_pending());
    drop((late, stream));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn buffers_are_ready_when_every_stream_has_passed_its_use() {
    let (gpu, runtime, first) = held();
    let device = runtime.device(0).unwrap();
    let second = device.create_stream().unwrap();
    let on_device = device.allocate::<u32>(1000).unwrap();
    let mut staging = runtime.pinned::<u32>(1000).unwrap();
    block_on(staging.ready()).unwrap();
    block_on(on_device.ready()).unwrap();
    first.fill(&on_device, 3).unwrap();
    second.wait(&first.record().unwrap()).unwrap();
    second.copy_to_host(&on_device, &mut staging).unwrap();
    let (mut pinned, mut of_device) = (staging.ready(), on_device.ready());
    let wakes = Arc::default();
    gpu.release_stream(first.id()).unwrap();
    assert!(poll_once(&mut pinned, &wakes).is_pending() && poll_once(&mut of_device, &wakes).is_pending());
    gpu.release_stream(second.id()).unwrap();
    block_on(pinned).unwrap();
    block_on(of_device).unwrap();
    assert_eq!(staging.read().unwrap(), [3; 1000]);
}

#[test]
fn small_copies_that_share_a_completion_event_are_waited_for() {
    let gpu = MockGpu::open(MockOptions::new()).unwrap();
    let runtime = Runtime::new(gpu).unwrap();
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    let on_device = device.allocate::<u32>(16).unwrap();
    for round in 0..20 {
        let mut staging = runtime.pinned::<u32>(16).unwrap();
        staging.write().unwrap().fill(round);
        stream.copy_to_device(&staging, &on_device).unwrap();
        block_on(staging.ready()).unwrap();
        staging.write().unwrap().fill(0);
        assert_eq!(stream.download(&on_device).unwrap(), [round; 16]);
    }
}

#[test]
fn shared_page_locked_memory_has_a_wait() {
    let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
    let stream = runtime.device(0).unwrap().create_stream().unwrap();
    let values = stream.upload(&[5_u32; 100]).unwrap();
    let mut shared = runtime.pinned_shared::<u32>(100).unwrap();
    shared.write().unwrap().fill(1);
    stream.copy_to_device(&shared, &values).unwrap();
    block_on(shared.ready()).unwrap();
    let (sender, results) = channel();
    shared.on_ready(move |result| sender.send(result).unwrap());
    results.recv_timeout(LONG).unwrap().unwrap();
}

#[test]
fn timed_and_exposed_events_are_waited_for_and_destroyed() {
    let (gpu, runtime, stream) = held();
    let exposed = stream.record().unwrap();
    let id = exposed.id();
    let waits = [exposed.done(), stream.record_timed().unwrap().done()];
    drop(exposed);
    gpu.release_stream(stream.id()).unwrap();
    waits.into_iter().for_each(|done| block_on(done).unwrap());
    // The event did not return to the pool.
    assert_ne!(stream.record().unwrap().id(), id);
    drop(stream);
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn nothing_in_a_capture_is_waited_for() {
    let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
    let stream = runtime.device(0).unwrap().create_stream().unwrap();
    let [buffer, unused] = [(); 2].map(|()| runtime.device(0).unwrap().allocate::<u32>(4).unwrap());
    let graph = stream.capture(|stream| {
        stream.fill(&buffer, 1)?;
        assert_eq!(kind_of(block_on(stream.done())), ErrorKind::Capture);
        assert_eq!(kind_of(block_on(buffer.ready())), ErrorKind::Capture);
        let refused = block_on(unused.ready()).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Capture);
        assert!(refused.to_string().contains("begin the wait before the capture"), "{refused}");
        assert_eq!(kind_of(block_on(stream.record()?.done())), ErrorKind::Capture);
        Ok(())
    });
    graph.unwrap().launch(&stream).unwrap();
    block_on(stream.done()).unwrap();
    block_on(buffer.ready()).unwrap();
}

#[test]
fn a_task_may_read_what_it_waited_for() {
    let gpu = MockGpu::open(MockOptions::new().with_race_detector()).unwrap();
    let runtime = Runtime::new(gpu.clone()).unwrap();
    let stream = runtime.device(0).unwrap().create_stream().unwrap();
    for _ in 0..10 {
        let values = stream.upload(&[9_u32; 5000]).unwrap();
        let mut staging = runtime.pinned::<u32>(5000).unwrap();
        stream.copy_to_host(&values, &mut staging).unwrap();
        let done = stream.record().unwrap().done();
        let read = thread::spawn(move || {
            block_on(done).unwrap();
            staging.read().unwrap().iter().sum::<u32>()
        });
        assert_eq!(read.join().unwrap(), 45_000);
    }
    gpu.check_races().unwrap();
}

// ---------------------------------------------------------------- closures and descriptors

#[test]
fn a_closure_is_called_once_also_if_others_panic() {
    let (gpu, runtime, stream) = held();
    let (sender, results) = channel();
    for number in 0..10 {
        let sender = sender.clone();
        stream.on_done(move |result| {
            sender.send((number, result)).unwrap();
            assert_ne!(number % 3, 0, "this closure panics on purpose");
        });
    }
    assert!(results.try_recv().is_err());
    gpu.release_stream(stream.id()).unwrap();
    let mut seen: Vec<u32> = (0..10).map(|_| results.recv_timeout(LONG).unwrap().0).collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..10).collect::<Vec<_>>());
    // The wait is over, so the method calls it.
    gpu.release_stream(stream.id()).unwrap();
    let event = stream.record().unwrap();
    gpu.release_stream(stream.id()).unwrap();
    let here = thread::current().id();
    event.on_done(move |_| sender.send((u32::from(thread::current().id() == here), Ok(()))).unwrap());
    assert_eq!(results.recv().unwrap().0, 1);
    assert!(results.recv().is_err(), "no closure is left");
    drop((event, stream));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn a_descriptor_is_readable_after_the_work_and_not_before() {
    let (gpu, runtime, stream) = held();
    let done = stream.done().into_descriptor().unwrap();
    assert!(!is_readable(&done, Duration::from_millis(5)) && done.outcome().is_none());
    gpu.release_stream(stream.id()).unwrap();
    assert!(is_readable(&done, LONG));
    done.outcome().unwrap().unwrap();
    enqueue(&stream);
    let failed = stream.done().into_descriptor().unwrap();
    drop((stream, runtime));
    assert!(is_readable(&failed, LONG));
    assert_eq!(kind_of(failed.outcome().unwrap()), ErrorKind::InvalidState);
}

// ---------------------------------------------------------------- errors and ends

#[test]
fn the_error_of_a_query_reaches_its_future_and_no_other() {
    let (gpu, runtime, stream) = held();
    let mut waits: Vec<Done> = (0..4).map(|_| stream.done()).collect();
    let wakes = Arc::default();
    assert!(waits.iter_mut().all(|done| poll_once(done, &wakes).is_pending()));
    gpu.fail_call(Operation::QueryEvent, 1, ErrorKind::OutOfMemory).unwrap();
    let results: Vec<_> = {
        // The failure may meet any of the questions, and only one.
        let first = waits.remove(0);
        let first = block_on(first);
        gpu.release_stream(stream.id()).unwrap();
        std::iter::once(first).chain(waits.into_iter().map(block_on)).collect()
    };
    assert_eq!(kind_of(results[0].clone()), ErrorKind::OutOfMemory);
    assert!(results[1..].iter().all(Result::is_ok), "{results:?}");
    drop(stream);
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn a_lost_device_ends_every_wait() {
    let (gpu, runtime, stream) = held();
    let buffer = runtime.device(0).unwrap().allocate::<u32>(100).unwrap();
    stream.fill(&buffer, 1).unwrap();
    let event = stream.record().unwrap();
    let waits = [event.done(), stream.done(), buffer.ready()];
    gpu.lose_device(0).unwrap();
    // The stream gives its work up.
    gpu.release_stream(stream.id()).unwrap();
    let late = [event.done(), stream.done(), buffer.ready()];
    for done in waits.into_iter().chain(late) {
        assert_eq!(kind_of(block_on(done)), ErrorKind::DeviceLost);
    }
}

#[test]
fn a_future_that_outlives_its_runtime_gets_an_error() {
    let (_gpu, runtime, stream) = held();
    let waits = [stream.done(), stream.record().unwrap().done()];
    let waiting = waits.map(|done| thread::spawn(move || block_on(done)));
    let mut unpolled = stream.done();
    drop((stream, runtime));
    for thread in waiting {
        assert_eq!(kind_of(thread.join().unwrap()), ErrorKind::InvalidState);
    }
    let error = match poll_once(&mut unpolled, &Arc::default()) {
        Poll::Ready(result) => result.unwrap_err(),
        Poll::Pending => panic!("the future would hang"),
    };
    assert!(error.to_string().contains("the runtime ended"), "{error}");
}

#[test]
fn a_closed_runtime_leaves_no_event_of_a_wait() {
    let (_gpu, runtime, stream) = held();
    let waits: Vec<Done> = (0..5).map(|_| stream.done()).collect();
    drop(stream);
    assert_eq!(runtime.close().unwrap().total(), 0);
    assert!(waits.into_iter().all(|done| kind_of(block_on(done)) == ErrorKind::InvalidState));
}

#[test]
fn the_last_object_of_a_runtime_may_end_in_a_closure() {
    let (gpu, runtime, stream) = held();
    let device = runtime.device(0).unwrap();
    let other = device.create_stream().unwrap();
    let (sender, results) = channel();
    enqueue(&other);
    let (of_other, ended) = (other.done(), sender.clone());
    let id = stream.id();
    let done = stream.done();
    let owned = Mutex::new(Some((runtime, device, stream, other)));
    done.on_done(move |result| {
        // The runtime ends here, in its own thread.
        drop(owned.lock().unwrap().take());
        sender.send(result).unwrap();
    });
    of_other.on_done(move |result| ended.send(result).unwrap());
    gpu.release_stream(id).unwrap();
    let results: Vec<_> = (0..2).map(|_| results.recv_timeout(LONG).expect("nothing hangs")).collect();
    assert!(results.iter().any(Result::is_ok));
    assert!(results.iter().any(|result| result.as_ref().is_err_and(|error| error.kind() == ErrorKind::InvalidState)));
}

#[test]
fn two_runtimes_may_end_in_closures_of_each_other() {
    let [(one, first_runtime, first), (two, second_runtime, second)] = [held(), held()];
    let ids = [first.id(), second.id()];
    let barrier = Arc::new(Barrier::new(2));
    let (sender, results) = channel();
    let waits = [first.done(), second.done()];
    let owned = [(second, second_runtime), (first, first_runtime)];
    for (done, owned) in waits.into_iter().zip(owned) {
        let (barrier, sender, owned) = (Arc::clone(&barrier), sender.clone(), Mutex::new(Some(owned)));
        done.on_done(move |result| {
            barrier.wait();
            drop(owned.lock().unwrap().take());
            sender.send(result).unwrap();
        });
    }
    one.release_stream(ids[0]).unwrap();
    two.release_stream(ids[1]).unwrap();
    for _ in 0..2 {
        results.recv_timeout(LONG).expect("neither thread waits for the other").unwrap();
    }
    assert_eq!([one, two].map(|gpu| gpu.live_objects().total()), [0, 0]);
}

thread_local! {
    static ON_CLONE: RefCell<Option<Box<dyn FnOnce()>>> = const { RefCell::new(None) };
}

/// A waker whose clone runs the closure in `ON_CLONE`.
static CLONED: RawWakerVTable = RawWakerVTable::new(
    |data| {
        if let Some(call) = ON_CLONE.take() {
            call();
        }
        RawWaker::new(data, &CLONED)
    },
    |_| (),
    |_| (),
    |_| (),
);

#[test]
fn a_waker_is_cloned_without_a_lock() {
    let (gpu, _runtime, stream) = held();
    let mut done = stream.done();
    let (sender, results) = channel();
    stream.on_done(move |result| sender.send(result).unwrap());
    let id = stream.id();
    ON_CLONE.set(Some(Box::new(move || {
        gpu.release_stream(id).unwrap();
        // The thread ends the wait that is polled, and then calls the closure.
        results.recv_timeout(LONG).expect("the clone holds no lock").unwrap();
    })));
    // SAFETY: No function of the table uses the data, and each may be called in any thread.
    let waker = unsafe { Waker::from_raw(RawWaker::new(std::ptr::null(), &CLONED)) };
    // The wait has ended during the poll.
    assert!(matches!(pin!(&mut done).poll(&mut Context::from_waker(&waker)), Poll::Ready(Ok(()))));
}

#[test]
fn a_waker_that_panics_stops_no_other_wait() {
    struct Panics;
    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            panic!("this waker panics on purpose");
        }
    }
    let (gpu, _runtime, stream) = held();
    let mut bad = stream.done();
    let waker = Waker::from(Arc::new(Panics));
    assert!(pin!(&mut bad).poll(&mut Context::from_waker(&waker)).is_pending());
    let good = stream.done();
    gpu.release_stream(stream.id()).unwrap();
    block_on(good).unwrap();
    block_on(bad).unwrap();
}

/// Panics when it is dropped, unless its drop is a part of a panic.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        assert!(thread::panicking(), "this drop panics on purpose");
    }
}

#[test]
fn a_payload_whose_drop_panics_stops_no_other_wait() {
    let (gpu, _runtime, stream) = held();
    let (sender, results) = channel();
    for begun_later in [false, true] {
        stream.on_done(|_| std::panic::panic_any(Bomb));
        let sender = sender.clone();
        stream.on_done(move |result| sender.send((begun_later, result)).unwrap());
        gpu.release_stream(stream.id()).unwrap();
        let (number, result) = results.recv_timeout(LONG).expect("the thread goes on");
        assert_eq!(number, begun_later);
        result.unwrap();
        enqueue(&stream);
    }
}

#[test]
fn a_task_that_moves_between_wakers_is_woken_by_the_last() {
    let (gpu, _runtime, stream) = held();
    let mut done = stream.done();
    let wakes: [Arc<Wakes>; 3] = Default::default();
    wakes.iter().for_each(|wakes| assert!(poll_once(&mut done, wakes).is_pending()));
    gpu.release_stream(stream.id()).unwrap();
    block_on(async {
        enqueue(&stream);
        let later = stream.done();
        gpu.release_stream(stream.id()).unwrap();
        later.await
    })
    .unwrap();
    assert!(matches!(poll_once(&mut done, &wakes[0]), Poll::Ready(Ok(()))));
    let start = Instant::now();
    while wakes[2].0.load(Ordering::SeqCst) == 0 {
        assert!(start.elapsed() < LONG);
        thread::yield_now();
    }
    assert_eq!(wakes.map(|wakes| wakes.0.load(Ordering::SeqCst)), [0, 0, 1]);
}

/// Refuses each call of the backend once, as the suite's fault sweep does. No wait in any form is lost, and no object.
#[test]
fn a_refused_call_loses_no_wait_and_no_object() {
    let mut refused = 0;
    for &operation in Operation::ALL {
        for nth in 1..40 {
            let gpu = MockGpu::open(MockOptions::new()).unwrap();
            let Ok(runtime) = Runtime::new(gpu.clone()) else { break };
            let device = runtime.device(0).unwrap();
            let stream = device.create_stream().unwrap();
            let on_device = device.allocate::<u32>(100).unwrap();
            gpu.fail_call(operation, nth, ErrorKind::Vendor).unwrap();
            let run = || {
                let mut staging = runtime.pinned::<u32>(100)?;
                stream.fill(&on_device, 4)?;
                stream.copy_to_host(&on_device, &mut staging)?;
                let event = stream.record()?;
                let waits = [event.done(), stream.done(), staging.ready(), on_device.ready()];
                let (sender, called) = channel();
                stream.on_done(move |result| sender.send(result).unwrap());
                let descriptor = stream.done().into_descriptor()?;
                // Each form ends, whichever of them has the error.
                let mut results: Vec<_> = waits.into_iter().map(block_on).collect();
                results.push(called.recv_timeout(LONG).expect("the closure is called"));
                assert!(called.recv().is_err(), "the closure is called twice");
                assert!(is_readable(&descriptor, LONG), "the descriptor would hang");
                results.push(descriptor.outcome().expect("a readable descriptor has a result"));
                results.into_iter().collect::<Result<Vec<_>>>()?;
                assert_eq!(staging.read()?, [4; 100]);
                Ok::<(), highwater_core::Error>(())
            };
            let result = run();
            let was_refused = gpu.faults(operation) > 0;
            if let Err(error) = result {
                assert!(was_refused && error.kind() == ErrorKind::Vendor, "{operation:?} {nth}: {error}");
            }
            drop((stream, on_device, device));
            // A refusal that no call has met yet may meet the close.
            match runtime.close() {
                Ok(live) => assert_eq!(live.total(), 0, "{operation:?} {nth}"),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Vendor, "{operation:?} {nth}: {error}"),
            }
            if !was_refused && gpu.faults(operation) == 0 {
                break;
            }
            refused += 1;
        }
    }
    assert!(refused > 20, "the sweep refused only {refused} calls");
}

// ---------------------------------------------------------------- cancellation in every state

#[derive(Debug, Clone, Copy)]
enum Step {
    Begin { stream: usize, form: u8 },
    Poll(usize),
    Cancel(usize),
    Call(usize),
    Descriptor(usize),
    Release(usize),
    Wait(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0..2_usize, 0..4_u8).prop_map(|(stream, form)| Step::Begin { stream, form }),
        3 => any::<usize>().prop_map(Step::Poll),
        2 => any::<usize>().prop_map(Step::Cancel),
        1 => any::<usize>().prop_map(Step::Call),
        1 => any::<usize>().prop_map(Step::Descriptor),
        2 => (0..2_usize).prop_map(Step::Release),
        1 => any::<usize>().prop_map(Step::Wait),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_wait_may_be_cancelled_in_every_state(steps in prop::collection::vec(step(), 1..60), close in any::<bool>()) {
        let (gpu, runtime, first) = held();
        let device = runtime.device(0).unwrap();
        let streams = [first, device.create_stream().unwrap()];
        let buffer = device.allocate::<u32>(64).unwrap();
        let mut staging = runtime.pinned::<u32>(64).unwrap();
        let (sender, called) = channel();
        // The waits that are alive, with the streams that they need.
        let mut waits: Vec<(Done, Arc<Wakes>, [bool; 2])> = Vec::new();
        let (mut descriptors, mut calls) = (Vec::new(), 0);
        // Streams that have executed everything enqueued so far.
        let mut released = [true, true];
        for step in steps {
            match step {
                Step::Begin { stream, form } => {
                    let on = &streams[stream];
                    on.fill(&buffer, 1).unwrap();
                    released[stream] = false;
                    let mut needs = [stream == 0, stream == 1];
                    let done = match form {
                        0 => on.done(),
                        1 => on.record().unwrap().done(),
                        2 => {
                            // Without an order between the streams: nothing reads the values.
                            on.copy_to_host(&buffer, &mut staging).unwrap();
                            needs = [true, true];
                            staging.ready()
                        }
                        _ => {
                            needs = [true, true];
                            buffer.ready()
                        }
                    };
                    waits.push((done, Arc::default(), needs));
                }
                Step::Poll(at) if !waits.is_empty() => {
                    let at = at % waits.len();
                    let (done, wakes, _) = &mut waits[at];
                    if let Poll::Ready(result) = poll_once(done, wakes) {
                        prop_assert!(result.is_ok(), "{result:?}");
                    }
                }
                Step::Cancel(at) if !waits.is_empty() => drop(waits.swap_remove(at % waits.len())),
                Step::Call(at) if !waits.is_empty() => {
                    let sender = sender.clone();
                    calls += 1;
                    waits.swap_remove(at % waits.len()).0.on_done(move |result| drop(sender.send(result)));
                }
                Step::Descriptor(at) if !waits.is_empty() => {
                    descriptors.push(waits.swap_remove(at % waits.len()).0.into_descriptor().unwrap());
                }
                Step::Release(stream) => {
                    gpu.release_stream(streams[stream].id()).unwrap();
                    released[stream] = true;
                }
                Step::Wait(at) if !waits.is_empty() => {
                    let at = at % waits.len();
                    let needs = waits[at].2;
                    if (0..2).all(|stream| !needs[stream] || released[stream]) {
                        let result = block_on(waits.swap_remove(at).0);
                        prop_assert!(result.is_ok(), "{result:?}");
                    }
                }
                _ => {}
            }
        }
        if close {
            // Every wait that is left ends with the runtime.
            drop((streams, buffer, staging, device));
            prop_assert_eq!(runtime.close().unwrap().total(), 0);
            let ended = |result: Result<()>| result.map_or_else(|error| error.kind() == ErrorKind::InvalidState, |()| true);
            for _ in 0..calls {
                prop_assert!(ended(called.recv_timeout(LONG).unwrap()));
            }
            prop_assert!(descriptors.iter().all(|done| is_readable(done, LONG) && ended(done.outcome().unwrap())));
            prop_assert!(waits.into_iter().all(|(done, ..)| ended(block_on(done))));
        } else {
            streams.iter().for_each(|stream| gpu.release_stream(stream.id()).unwrap());
            for _ in 0..calls {
                prop_assert!(called.recv_timeout(LONG).unwrap().is_ok());
            }
            prop_assert!(descriptors.iter().all(|done| is_readable(done, LONG) && done.outcome().unwrap().is_ok()));
            for (done, wakes, _) in waits {
                prop_assert!(block_on(done).is_ok());
                prop_assert!(wakes.0.load(Ordering::SeqCst) <= 1);
            }
            drop((streams, buffer, staging, device));
            prop_assert_eq!(runtime.close().unwrap().total(), 0);
        }
        prop_assert!(called.try_recv().is_err(), "no closure is called twice");
    }
}

#[test]
fn a_panic_of_a_closure_that_is_called_at_once_reaches_the_caller() {
    let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
    let staging = runtime.pinned::<u8>(1).unwrap();
    let call = || staging.on_ready(|_| panic!("on purpose"));
    assert!(catch_unwind(AssertUnwindSafe(call)).is_err());
}
