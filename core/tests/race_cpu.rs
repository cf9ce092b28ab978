//! The race finder sees what the CPU does with page-locked memory through the owning types, and what core's locks order.

mod support;

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use highwater_core::{
    Access, Backend, DeviceBuffer, Done, DoneDescriptor, GemmShape, HostPtr, Location, MemoryCopy, PinnedBuffer,
    Result, Runtime, Stream,
};
use highwater_mock::races::RaceKind;
use highwater_mock::{MockGpu, MockOptions, Operation};
use pollster::block_on;
use rustix::event::{PollFd, PollFlags, poll};
use support::{end, open, open_with_stream};

const LEN: usize = 64;

/// Copies the values into page-locked memory, as other code does: Highwater does not see it.
fn copy_unseen(gpu: &MockGpu, stream: &Stream, buffer: &DeviceBuffer<u32>, to: HostPtr) {
    let source = Location::Device { device: 0, ptr: buffer.ptr() };
    // SAFETY: both blocks are large enough and live until the stream is done. The mock's accesses are atomic, and no test
    // looks at the values before that.
    unsafe { gpu.copy(&MemoryCopy::new(Location::Host(to), source, LEN * 4), stream.id()).unwrap() };
}

/// Returns the operations of the only race.
fn only_race(gpu: &MockGpu) -> [Operation; 2] {
    let races = gpu.races();
    assert_eq!(races.len(), 1, "{races:?}");
    assert_eq!((races[0].kind(), races[0].overlap().bytes), (RaceKind::Unordered, LEN as u64 * 4));
    let text = races[0].to_string();
    assert!(text.contains("by the CPU") && text.contains("race_cpu.rs:"), "{text}");
    [races[0].first().operation(), races[0].second().operation()]
}

type CpuAccess = fn(&mut PinnedBuffer<u32>);

#[test]
fn each_access_during_a_copy_that_was_not_noted_is_a_race() {
    let accesses: [CpuAccess; 4] = [
        |pinned| assert_eq!(pinned.read().unwrap().len(), LEN),
        |pinned| assert_eq!(pinned.write().unwrap().len(), LEN),
        |pinned| pinned.read_with(|values| assert_eq!(values.len(), LEN)).unwrap(),
        |pinned| pinned.write_with(|values| assert_eq!(values.len(), LEN)).unwrap(),
    ];
    for access in accesses {
        for is_noted in [false, true] {
            let (gpu, runtime, device, stream) = open_with_stream(MockOptions::new().with_race_detector());
            let buffer = device.allocate::<u32>(LEN).unwrap();
            let mut pinned = runtime.pinned::<u32>(LEN).unwrap();
            access(&mut pinned);
            copy_unseen(&gpu, &stream, &buffer, pinned.ptr());
            if is_noted {
                stream.note_pinned_use(&pinned, Access::Write).unwrap();
            }
            access(&mut pinned);
            if is_noted {
                gpu.check_races().unwrap();
            } else {
                // A closure reports its beginning and its end, and both may race with the copy.
                let first = &gpu.races()[0];
                assert_eq!(first.second().operation(), Operation::CpuAccess);
                assert!(gpu.race_count() <= 2);
            }
            stream.synchronize().unwrap();
            drop(buffer);
            end(runtime, (device, stream, pinned));
        }
    }
}

#[test]
fn a_copy_into_memory_that_a_closure_reads_is_a_race() {
    let (gpu, runtime, device, stream) = open_with_stream(MockOptions::new().with_race_detector());
    let buffer = device.allocate::<u32>(LEN).unwrap();
    let pinned = runtime.pinned::<u32>(LEN).unwrap();
    let ptr = pinned.ptr();
    pinned.read_with(|_| copy_unseen(&gpu, &stream, &buffer, ptr)).unwrap();
    assert_eq!(only_race(&gpu), [Operation::Copy, Operation::CpuAccess]);
    stream.synchronize().unwrap();
    end(runtime, (device, stream, buffer, pinned));
}

#[test]
fn a_read_beside_copies_that_read_is_no_race() {
    let (gpu, runtime, device, stream) = open_with_stream(MockOptions::new().with_race_detector());
    let buffer = device.allocate::<u32>(LEN).unwrap();
    let mut pinned = runtime.pinned::<u32>(LEN).unwrap();
    pinned.write().unwrap().fill(7);
    stream.copy_to_device(&pinned, &buffer).unwrap();
    assert_eq!(pinned.read().unwrap()[0], 7);
    pinned.write().unwrap().fill(8);
    assert_eq!(stream.download(&buffer).unwrap(), [7; LEN]);
    gpu.check_races().unwrap();
    assert!(gpu.calls(Operation::CpuAccess) >= 4, "{}", gpu.calls(Operation::CpuAccess));
    end(runtime, (device, stream, buffer, pinned));
}

#[test]
fn without_a_finder_no_access_is_noted() {
    let (gpu, runtime, device, stream) = open_with_stream(MockOptions::new());
    assert!(gpu.host_observer().is_none());
    runtime.pinned::<u32>(LEN).unwrap().write().unwrap().fill(1);
    assert_eq!(gpu.calls(Operation::CpuAccess), 0);
    end(runtime, (device, stream));
}

/// Works with everything that pools hand from one thread to the next.
fn work(runtime: &Runtime, rounds: usize) -> Result<()> {
    const N: usize = 8;
    let device = runtime.device(0)?;
    let shape = GemmShape::of::<f32>(N, N, N);
    for round in 0..rounds {
        let stream = device.create_stream()?;
        let (ones, product) = (stream.upload(&[1.0_f32; N * N])?, stream.allocate::<f32>(N * N)?);
        stream.blas()?.gemm(&shape, 1.0, &ones, &ones, 0.0, &product)?;
        let mut pinned = runtime.pinned::<f32>(N * N)?;
        stream.copy_to_host(&product, &mut pinned)?;
        match round % 4 {
            // Everything is dropped while it is in use.
            0 => {}
            1 => assert_eq!(pinned.read()?[0], N as f32),
            2 => assert_eq!(stream.download(&product)?, [N as f32; N * N]),
            _ => runtime.trim_device_memory()?,
        }
    }
    Ok(())
}

#[test]
fn what_cores_locks_hand_from_thread_to_thread_is_ordered() {
    for options in [MockOptions::new(), MockOptions::new().with_latency(Duration::from_micros(50))] {
        let (gpu, runtime, device) = open(options.with_thread_races());
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| work(&runtime, 24).unwrap());
            }
        });
        gpu.check_races().unwrap();
        end(runtime, device);
        gpu.check_races().unwrap();
    }
}

#[test]
fn buffers_that_are_dropped_in_another_thread_are_ordered() {
    let (gpu, runtime, device) = open(MockOptions::new().with_thread_races());
    let (sender, receiver) = mpsc::channel::<(Stream, DeviceBuffer<u32>, PinnedBuffer<u32>)>();
    thread::scope(|scope| {
        scope.spawn(|| receiver.into_iter().for_each(drop));
        for round in 0..40 {
            let stream = device.create_stream().unwrap();
            let buffer = stream.allocate::<u32>(LEN).unwrap();
            let mut pinned = runtime.pinned::<u32>(LEN).unwrap();
            pinned.write().unwrap().fill(round);
            stream.copy_to_device(&pinned, &buffer).unwrap();
            sender.send((stream, buffer, pinned)).unwrap();
        }
        drop(sender);
    });
    gpu.check_races().unwrap();
    end(runtime, device);
}

/// The value is written on one stream, and read on another by a thread that learned of it through a channel.
fn through_a_channel(options: MockOptions, declares: bool) -> Vec<[Operation; 2]> {
    let (gpu, runtime, device) = open(options);
    let (one, other) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let buffer = device.allocate::<u32>(LEN).unwrap();
    let (sender, receiver) = mpsc::channel();
    let ready = Barrier::new(2);
    thread::scope(|scope| {
        let (ready, other, buffer) = (&ready, &other, &buffer);
        scope.spawn(move || {
            // The first call comes before the fill.
            other.is_complete().unwrap();
            ready.wait();
            let waited: highwater_mock::races::HandOver = receiver.recv().unwrap();
            if declares {
                waited.take_over();
            }
            assert_eq!(other.download(buffer).unwrap(), [5; LEN]);
        });
        ready.wait();
        one.fill(buffer, 5_u32).unwrap();
        one.synchronize().unwrap();
        sender.send(gpu.hand_over()).unwrap();
    });
    let races = gpu.races();
    one.synchronize().unwrap();
    other.synchronize().unwrap();
    drop(buffer);
    end(runtime, (device, one, other));
    races.iter().map(|race| [race.first().operation(), race.second().operation()]).collect()
}

#[test]
fn a_channel_orders_threads_once_it_is_declared() {
    assert_eq!(through_a_channel(MockOptions::new().with_thread_races(), false), [[Operation::Fill, Operation::Copy]]);
    assert!(through_a_channel(MockOptions::new().with_thread_races(), true).is_empty());
    // Without the option, a wait counts for all threads.
    assert!(through_a_channel(MockOptions::new().with_race_detector(), false).is_empty());
}

// ---------------------------------------------------------------- futures

/// A device that has copied values into page-locked memory, or will once the test releases its stream.
struct Copied {
    gpu: Arc<MockGpu>,
    runtime: Runtime,
    stream: Stream,
    buffer: DeviceBuffer<u32>,
    pinned: PinnedBuffer<u32>,
}

impl Copied {
    fn new(options: MockOptions) -> Self {
        let (gpu, runtime, device, stream) = open_with_stream(options);
        let (buffer, mut pinned) = (device.allocate::<u32>(LEN).unwrap(), runtime.pinned::<u32>(LEN).unwrap());
        stream.fill(&buffer, 1).unwrap();
        stream.copy_to_host(&buffer, &mut pinned).unwrap();
        Self { gpu, runtime, stream, buffer, pinned }
    }

    fn held(options: MockOptions) -> Self {
        Self::new(options.with_held_streams())
    }

    fn release(&self) {
        self.gpu.release_stream(self.stream.id()).unwrap();
    }

    /// Returns an access of the CPU that waits for nothing by itself.
    fn access(&self) -> impl Fn() + Send + 'static {
        let (observer, ptr) = (self.gpu.host_observer().unwrap(), self.pinned.ptr());
        move || observer.accessed(ptr, LEN * 4, false)
    }

    /// Ends the runtime. Returns the number of races.
    fn end(self) -> u64 {
        let races = self.gpu.race_count();
        self.release();
        end(self.runtime, (self.stream, self.buffer, self.pinned));
        races
    }
}

/// Waits until a descriptor is readable, which the finder does not see.
fn wait_unseen(descriptor: &DoneDescriptor) {
    assert_eq!(poll(&mut [PollFd::new(descriptor, PollFlags::IN)], None).unwrap(), 1);
}

type Begin = fn(&Copied) -> Done;

/// The calls that return a future.
const BEGINS: [Begin; 4] = [
    |copied| copied.stream.done(),
    |copied| copied.stream.record().unwrap().done(),
    |copied| copied.pinned.ready(),
    |copied| copied.buffer.ready(),
];

fn with_both(test: impl Fn(MockOptions)) {
    test(MockOptions::new().with_race_detector());
    test(MockOptions::new().with_thread_races());
}

#[test]
fn a_future_orders_the_cpu_behind_the_work_once_its_result_is_taken() {
    with_both(|options| {
        for begin in BEGINS {
            for takes in [true, false] {
                let copied = Copied::held(options.clone());
                let access = copied.access();
                let (done, told) = (begin(&copied), copied.stream.done().into_descriptor().unwrap());
                copied.release();
                // The notifier has the answers now, and no thread of the program does.
                wait_unseen(&told);
                if takes {
                    block_on(done).unwrap();
                }
                access();
                assert_eq!(copied.end(), u64::from(!takes));
            }
        }
    });
}

#[test]
fn a_future_of_work_that_is_done_orders_nothing_before_its_result_is_taken() {
    with_both(|options| {
        for takes in [true, false] {
            let copied = Copied::held(options.clone());
            let access = copied.access();
            copied.release();
            wait_unseen(&copied.stream.done().into_descriptor().unwrap());
            let done = copied.stream.done();
            if takes {
                block_on(done).unwrap();
            }
            access();
            assert_eq!(copied.end(), u64::from(!takes));
        }
    });
}

#[test]
fn the_outcome_of_a_descriptor_is_an_order_and_its_readability_is_none() {
    with_both(|options| {
        for takes in [true, false] {
            let copied = Copied::held(options.clone());
            let access = copied.access();
            let done = copied.stream.done().into_descriptor().unwrap();
            assert!(done.outcome().is_none());
            copied.release();
            wait_unseen(&done);
            // The text of a future is for people.
            assert!(format!("{done:?}").contains("Ok"));
            if takes {
                done.outcome().unwrap().unwrap();
            }
            access();
            assert_eq!(copied.end(), u64::from(!takes));
        }
    });
}

#[test]
fn a_closure_comes_after_the_work_before_its_event_and_not_after_later_work() {
    with_both(|options| {
        for is_early in [false, true] {
            let (gpu, runtime, device, stream) = open_with_stream(options.clone().with_held_streams());
            let (buffer, mut pinned) = (device.allocate::<u32>(LEN).unwrap(), runtime.pinned::<u32>(LEN).unwrap());
            stream.fill(&buffer, 1).unwrap();
            let early = stream.done();
            stream.copy_to_host(&buffer, &mut pinned).unwrap();
            let copied = Copied { gpu, runtime, stream, buffer, pinned };
            let access = copied.access();
            let (sender, called) = mpsc::channel();
            let call = move |result: Result<()>| {
                access();
                sender.send(result).unwrap();
            };
            if is_early {
                early.on_done(call)
            } else {
                copied.stream.on_done(call)
            }
            copied.release();
            called.recv().unwrap().unwrap();
            drop(device);
            assert_eq!(copied.end(), u64::from(is_early));
        }
    });
}

#[test]
fn the_result_of_a_future_counts_for_its_own_thread() {
    for hands_over in [true, false] {
        let copied = Copied::held(MockOptions::new().with_thread_races());
        let access = copied.access();
        let (ready, done) = (Barrier::new(2), copied.stream.done());
        let (sender, receiver) = mpsc::channel::<highwater_mock::races::HandOver>();
        thread::scope(|scope| {
            let (ready, gpu) = (&ready, &copied.gpu);
            scope.spawn(move || {
                // The finder knows the thread before the end of the work.
                let _ = gpu.hand_over();
                ready.wait();
                let heard = receiver.recv().unwrap();
                if hands_over {
                    heard.take_over();
                }
                access();
            });
            ready.wait();
            copied.release();
            block_on(done).unwrap();
            sender.send(copied.gpu.hand_over()).unwrap();
        });
        assert_eq!(copied.end(), u64::from(!hands_over));
    }
}

/// A task of the executor below.
struct Task {
    future: Mutex<Option<Pin<Box<dyn Future<Output = ()> + Send>>>>,
    queue: mpsc::Sender<Arc<Self>>,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        let queue = self.queue.clone();
        let _ = queue.send(self);
    }
}

#[test]
fn tasks_of_an_executor_are_ordered_in_whichever_thread_they_go_on() {
    const TASKS: usize = 40;
    for awaits in [true, false] {
        let copied = Copied::held(MockOptions::new().with_thread_races());
        let (queue, tasks) = mpsc::channel::<Arc<Task>>();
        let (tasks, ready) = (Mutex::new(tasks), Barrier::new(3));
        for _ in 0..TASKS {
            let (access, done) = (copied.access(), copied.stream.done());
            let future = async move {
                if awaits {
                    done.await.unwrap();
                }
                access();
            };
            let task = Task { future: Mutex::new(Some(Box::pin(future))), queue: queue.clone() };
            queue.send(Arc::new(task)).unwrap();
        }
        drop(queue);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    // The finder knows the threads before the end of the work.
                    let _ = copied.gpu.hand_over();
                    ready.wait();
                    loop {
                        let next = tasks.lock().unwrap().recv();
                        let Ok(task) = next else { return };
                        let waker = Waker::from(Arc::clone(&task));
                        let mut future = task.future.lock().unwrap();
                        if let Some(running) = future.as_mut()
                            && pin!(running).poll(&mut Context::from_waker(&waker)) == Poll::Ready(())
                        {
                            *future = None;
                        }
                    }
                });
            }
            ready.wait();
            copied.release();
        });
        assert_eq!(copied.end(), if awaits { 0 } else { TASKS as u64 });
    }
}
