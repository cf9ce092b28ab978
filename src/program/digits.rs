//! The main job: threads that classify handwritten digits and share one device.
//!
//! The weights are uploaded once and used by all threads. Each thread has a stream and buffers of its own and leases an Lt
//! handle from the pool for every batch. It keeps two batches in flight: while the device works on one, the CPU stages the
//! next.
//!
//! *Layout.* BLAS matrices are column-major, safetensors row-major. A row-major weight, inputs x outputs, is a
//! column-major matrix, outputs x inputs, and a batch of images is a matrix with one image in each column. So a layer is
//! `weight * images + bias` without a transposition, and the bias has one value for each row, as Lt's epilogues want it.
//!
//! *Failure.* The first error stops all threads and is the one that is reported. No thread waits for another that may be
//! gone: the start waits for each to be ready *or* ended.

use std::convert::Infallible;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use highwater::{
    DeviceBuffer, Epilogue, ErrorKind, Event, GemmShape, Opened, PinnedBuffer, Runtime, Statistics, Stream,
};

use super::args::DigitsArguments;
use super::failure::Failure;
use super::model::{self, CLASSES, Network, PIXELS, TestSet, largest};
use super::progress::Progress;
use super::report::Report;
use super::{Verdict, output};

/// Images that go through the layers at once. The last batch of a pass is filled up with black images.
const BATCH: usize = 32;

/// The least part of the test digits that a sound run classifies rightly.
pub(super) const LEAST_ACCURACY: f64 = 0.96;

/// Runs the job and prints what came out.
pub(super) fn command(arguments: &DigitsArguments, json: bool) -> Result<Verdict> {
    let (network, test) = model::load(arguments.data.as_deref())?;
    let Opened { backend, report: load_report, .. } = match &arguments.backend {
        Some(name) => highwater::open(name),
        None => highwater::open_auto(true),
    }
    .map_err(highwater::Error::from)?;
    let reason = load_report.taken().map_or_else(String::new, |taken| taken.reason.clone());
    output::line(format_args!("backend {}: {reason}", backend.identity().name));
    if arguments.backend.is_none() {
        for other in load_report.candidates.iter().filter(|other| other.outcome != highwater::Outcome::Taken) {
            output::line(format_args!("not {}: {}: {}", other.name, other.outcome, other.reason));
        }
    }

    let task = Task { network, test, threads: arguments.threads, repeat: arguments.repeat };
    let runtime = Runtime::new(backend)?;
    let backend = runtime.identity().name.clone();
    let device = runtime.device(0)?.info().name.clone();
    let progress = Progress::new("images", task.images() as u64, json);
    let outcome = run(runtime, &task, &progress);
    drop(progress);
    let Outcome { tally, elapsed, statistics, leaks, refused } = outcome?;
    let report = Report {
        backend,
        reason,
        device,
        threads: task.threads,
        repeat: task.repeat,
        tally,
        elapsed,
        statistics,
        leaks,
        refused,
    };
    if json {
        output::result(report.to_json())?
    } else {
        output::result(report.to_table())?
    }
    let faults = report.faults();
    faults.iter().for_each(|fault| output::line(format_args!("error: {fault}")));
    Ok(if faults.is_empty() { Verdict::Good } else { Verdict::Bad })
}

/// What is to be done.
#[derive(Debug)]
struct Task {
    network: Network,
    test: TestSet,
    threads: usize,
    repeat: usize,
}

impl Task {
    fn images(&self) -> usize {
        self.test.len() * self.repeat
    }

    fn batches_per_pass(&self) -> usize {
        self.test.len().div_ceil(BATCH)
    }

    /// The images of a batch; batches count on from pass to pass.
    fn batch(&self, number: usize) -> Option<Range<usize>> {
        let per_pass = self.batches_per_pass();
        let start = number % per_pass * BATCH;
        (number / per_pass < self.repeat).then(|| start..(start + BATCH).min(self.test.len()))
    }
}

/// Predictions, counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Tally {
    pub(super) images: usize,
    pub(super) correct: usize,
    /// Predictions that differ from those of the CPU.
    pub(super) differing: usize,
}

impl std::iter::Sum for Tally {
    fn sum<I: Iterator<Item = Self>>(tallies: I) -> Self {
        tallies.fold(Self::default(), |a, b| Self {
            images: a.images + b.images,
            correct: a.correct + b.correct,
            differing: a.differing + b.differing,
        })
    }
}

#[derive(Debug)]
struct Outcome {
    tally: Tally,
    /// From the moment that all threads are ready to the end of the last.
    elapsed: Duration,
    /// What the pools held while every thread still had its buffers.
    statistics: Statistics,
    /// What the backend counts as alive after everything was given back.
    leaks: u64,
    /// Why something was not given back.
    refused: Option<highwater::Error>,
}

/// Classifies, then closes the runtime, whatever became of it.
fn run(runtime: Runtime, task: &Task, progress: &Progress) -> Result<Outcome> {
    let classified = classify(&runtime, task, progress).map_err(with_advice);
    let backend = Arc::clone(runtime.backend());
    let refused = runtime.close().err();
    // The backend counts, also where giving everything back was refused half-way.
    let leaks = backend.live_objects().total();
    let (tally, elapsed, statistics) = classified.inspect_err(|_| {
        if leaks > 0 {
            progress.say(&format!("note: objects left on the device after the error: {leaks}"));
        }
    })?;
    Ok(Outcome { tally, elapsed, statistics, leaks, refused })
}

/// Adds what the user of this program can do to what the library says.
fn with_advice(error: anyhow::Error) -> anyhow::Error {
    let error = match error.downcast::<highwater::Error>() {
        Ok(error) => error,
        Err(other) => return other,
    };
    let (what, hint) = match (error.kind(), error.operation()) {
        (ErrorKind::OutOfMemory, "allocate" | "create_blas_handle") => (
            "the job ran out of device memory",
            "use fewer `--threads`, or a device with more memory (the mock's size is `HIGHWATER_MOCK=memory=4GiB`)",
        ),
        (ErrorKind::OutOfMemory, "host_allocate") => (
            "the job ran out of page-locked memory",
            "use fewer `--threads`, or allow more (the mock's limit is `HIGHWATER_MOCK=host-memory=1GiB`)",
        ),
        (ErrorKind::Unsupported, _) => ("the device cannot run this job", "use another device or `--backend`"),
        // Threads, for one, run out too: the library says of what there was not enough.
        _ => ("the job was not finished", ""),
    };
    Failure::new(error.kind(), what, hint).because_of(error).into()
}

/// Everything that this makes on the device is dropped when it returns.
fn classify(runtime: &Runtime, task: &Task, progress: &Progress) -> Result<(Tally, Duration, Statistics)> {
    let device = runtime.device(0)?;
    if !device.capabilities().lt_plans {
        return Err(highwater::Error::lacks("digits", "lt_plans").into());
    }
    let image = |index| task.test.image(index).collect::<Vec<_>>();
    let expected = (0..task.test.len()).map(|index| task.network.classify(&image(index))).collect();
    let stream = device.create_stream()?;
    let network = DeviceNetwork::upload(&stream, &task.network)?;
    let shared = Shared {
        runtime,
        task,
        progress,
        expected,
        network,
        uploaded: stream.record()?,
        started: OnceLock::new(),
        next_batch: AtomicUsize::new(0),
        stop: AtomicBool::new(false),
        failure: OnceLock::new(),
    };
    let workers = shared.run_threads();
    let elapsed = shared.started.get().map_or(Duration::ZERO, Instant::elapsed);
    if let Some(error) = shared.failure.into_inner() {
        return Err(error);
    }
    // The workers still hold what they took: this is what the job needs at once.
    let statistics = runtime.statistics();
    Ok((workers.iter().map(|worker| worker.tally).sum(), elapsed, statistics))
}

/// The network in the memory of the device.
struct DeviceNetwork {
    layers: Vec<DeviceLayer>,
}

struct DeviceLayer {
    shape: GemmShape,
    epilogue: Epilogue,
    weight: DeviceBuffer<f32>,
    bias: DeviceBuffer<f32>,
}

impl DeviceNetwork {
    fn upload(stream: &Stream, network: &Network) -> highwater::Result<Self> {
        let last = network.layers.len() - 1;
        let upload = |(index, layer): (usize, &model::Layer)| {
            Ok(DeviceLayer {
                shape: GemmShape::of::<f32>(layer.outputs, BATCH, layer.inputs),
                epilogue: if index == last { Epilogue::Bias } else { Epilogue::BiasRelu },
                weight: stream.upload(&layer.weight)?,
                bias: stream.upload(&layer.bias)?,
            })
        };
        Ok(Self { layers: network.layers.iter().enumerate().map(upload).collect::<highwater::Result<_>>()? })
    }
}

/// What the threads share.
struct Shared<'a> {
    runtime: &'a Runtime,
    task: &'a Task,
    progress: &'a Progress,
    /// The CPU's predictions.
    expected: Vec<usize>,
    network: DeviceNetwork,
    /// Passed once the weights are on the device.
    uploaded: Event,
    /// Set when every thread is ready.
    started: OnceLock<Instant>,
    next_batch: AtomicUsize,
    stop: AtomicBool,
    failure: OnceLock<anyhow::Error>,
}

impl Shared<'_> {
    /// Runs the threads and gives what they still hold.
    fn run_threads(&self) -> Vec<Worker> {
        // Nothing is ever sent: a thread drops its end when it is ready, or when it ends for any reason.
        let (ready, all_ready) = mpsc::channel::<Infallible>();
        thread::scope(|scope| {
            let mut threads = Vec::new();
            for index in 0..self.task.threads {
                let ready = ready.clone();
                match thread::Builder::new().spawn_scoped(scope, move || self.serve(ready)) {
                    Ok(thread) => threads.push(thread),
                    Err(error) => {
                        let what = format!("thread {} of {} could not be started", index + 1, self.task.threads);
                        let failure = Failure::new(
                            ErrorKind::OutOfMemory,
                            what,
                            "use fewer `--threads`, or raise the limit on threads (ulimit -u)",
                        );
                        self.fail(failure.because_of(error).into());
                        break;
                    }
                }
            }
            drop(ready);
            let _ = all_ready.recv();
            self.started.get_or_init(Instant::now);
            // A panic is a bug, and goes on in this thread once all have ended.
            let joined: Vec<_> = threads.into_iter().map(thread::ScopedJoinHandle::join).collect();
            joined.into_iter().filter_map(|joined| joined.unwrap_or_else(|panic| resume_unwind(panic))).collect()
        })
    }

    /// Keeps the first error and stops the threads.
    fn fail(&self, error: anyhow::Error) {
        let _ = self.failure.set(error);
        // Relaxed: threads that see it later do some batches more.
        self.stop.store(true, Ordering::Relaxed);
    }

    /// What a thread does. The worker is its result, so that its buffers live until all threads have ended.
    fn serve(&self, ready: mpsc::Sender<Infallible>) -> Option<Worker> {
        let mut worker = Worker::new(self).map_err(|error| self.fail(error.into())).ok()?;
        drop(ready);
        self.started.wait();
        worker.work(self).map_err(|error| self.fail(error.into())).ok()?;
        Some(worker)
    }

    fn take_batch(&self) -> Option<Range<usize>> {
        if self.stop.load(Ordering::Relaxed) {
            return None;
        }
        self.task.batch(self.next_batch.fetch_add(1, Ordering::Relaxed))
    }
}

/// What a thread holds.
struct Worker {
    stream: Stream,
    /// The images, then what each layer makes of them. One set is enough: batches follow each other in the stream.
    activations: Vec<DeviceBuffer<f32>>,
    lanes: [Lane; 2],
    tally: Tally,
}

/// Page-locked memory of one batch, and which images are in flight in it.
struct Lane {
    images: PinnedBuffer<f32>,
    logits: PinnedBuffer<f32>,
    in_flight: Range<usize>,
}

impl Worker {
    /// Takes what the thread needs, and sends black images through the layers: so the handle is taken and its plans are
    /// made before the clock starts.
    fn new(shared: &Shared<'_>) -> highwater::Result<Self> {
        let device = shared.runtime.device(0)?;
        let stream = device.create_stream()?;
        stream.wait(&shared.uploaded)?;
        let widths = [PIXELS].into_iter().chain(shared.network.layers.iter().map(|layer| layer.shape.m));
        let activations = widths.map(|width| device.allocate(width * BATCH)).collect::<highwater::Result<_>>()?;
        let lane = || {
            Ok::<_, highwater::Error>(Lane {
                images: shared.runtime.pinned(PIXELS * BATCH)?,
                logits: shared.runtime.pinned(CLASSES * BATCH)?,
                in_flight: 0..0,
            })
        };
        let mut worker = Self { stream, activations, lanes: [lane()?, lane()?], tally: Tally::default() };
        worker.submit(shared, 0, 0..0)?;
        worker.collect(shared, 0)?;
        Ok(worker)
    }

    /// Classifies batches until there are none left, two in flight at a time.
    fn work(&mut self, shared: &Shared<'_>) -> highwater::Result<()> {
        let mut lane = 0;
        while let Some(batch) = shared.take_batch() {
            self.collect(shared, lane)?;
            self.submit(shared, lane, batch)?;
            lane = 1 - lane;
        }
        self.collect(shared, lane)?;
        self.collect(shared, 1 - lane)
    }

    /// Stages the images of a batch and enqueues everything up to the copy back. Does not wait for the device.
    fn submit(&mut self, shared: &Shared<'_>, lane: usize, batch: Range<usize>) -> highwater::Result<()> {
        let Self { stream, activations, lanes, .. } = self;
        let Lane { images, logits, in_flight } = &mut lanes[lane];
        let pixels = batch.clone().flat_map(|image| shared.task.test.image(image)).chain(std::iter::repeat(0.0));
        images.write()?.iter_mut().zip(pixels).for_each(|(staged, pixel)| *staged = pixel);
        stream.copy_to_device(&*images, &activations[0])?;
        {
            let mut handle = stream.lt()?;
            for (layer, values) in shared.network.layers.iter().zip(activations.windows(2)) {
                let DeviceLayer { shape, epilogue, weight, bias } = layer;
                let [input, output] = values else { unreachable!("windows of two") };
                handle.matmul(shape, *epilogue, 1.0, weight, input, 0.0, output, Some(bias.into()))?;
            }
        }
        stream.copy_to_host(&activations[activations.len() - 1], logits)?;
        *in_flight = batch;
        Ok(())
    }

    /// Waits for the batch of a lane and counts its predictions.
    fn collect(&mut self, shared: &Shared<'_>, lane: usize) -> highwater::Result<()> {
        let Lane { logits, in_flight, .. } = &mut self.lanes[lane];
        let batch = std::mem::take(in_flight);
        for (image, logits) in batch.clone().zip(logits.read()?.chunks_exact(CLASSES)) {
            let digit = largest(logits);
            self.tally.correct += usize::from(digit == usize::from(shared.task.test.labels[image]));
            self.tally.differing += usize::from(digit != shared.expected[image]);
        }
        self.tally.images += batch.len();
        shared.progress.advance(batch.len() as u64);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use highwater::Backend as _;
    use highwater::mock::{MockGpu, MockOptions, Operation};

    use super::*;

    fn task(threads: usize, repeat: usize) -> Task {
        let (network, test) = model::load(None).unwrap();
        Task { network, test, threads, repeat }
    }

    fn quiet(task: &Task) -> Progress {
        // A total that is never reached, so that no line is printed.
        Progress::new("images", task.images() as u64 * 100, true)
    }

    #[test]
    fn every_image_of_every_pass_is_in_one_batch() {
        let task = task(1, 3);
        let mut seen = vec![0; task.test.len()];
        let batches = (0..).map_while(|number| task.batch(number));
        batches.flatten().for_each(|image| seen[image] += 1);
        assert_eq!(seen, vec![3; 540]);
    }

    #[test]
    fn the_pools_grow_to_the_threads_and_not_with_the_work() {
        let run = |repeat| {
            let task = task(3, repeat);
            let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
            run(runtime, &task, &quiet(&task)).unwrap()
        };
        let (once, often) = (run(1), run(4));
        for outcome in [&once, &often] {
            assert_eq!(outcome.leaks, 0);
            assert_eq!(outcome.tally.differing, 0);
            assert_eq!(outcome.statistics.lt_handles.created, 3);
            assert_eq!(outcome.statistics.lt_handles.threads_served, 3);
            assert_eq!(outcome.statistics.workspaces, 3);
        }
        assert_eq!(often.tally.correct, 4 * once.tally.correct);
        assert_eq!(often.tally.images, 4 * 540);
        let buffers_of_a_thread = 2 * (PIXELS + CLASSES) * BATCH * size_of::<f32>();
        assert_eq!(once.statistics.host.requested_bytes, 3 * buffers_of_a_thread as u64);
        assert_eq!(often.statistics.host.requested_bytes, once.statistics.host.requested_bytes);
    }

    /// Whichever call fails, and whenever: one error that names it, or a run that was not hurt. No thread hangs, and
    /// nothing is left, apart from what the backend itself refuses to release; and that is reported.
    #[test]
    fn a_fault_anywhere_ends_the_job_cleanly() {
        let mut task = task(3, 2);
        task.test = task.test.first(40);
        let releases = ["destroy", "free", "synchronize_device"];
        let mut failed = 0;
        for &operation in Operation::ALL {
            for nth in [1, 2, 5, 20] {
                let fault = format!("{operation}:{nth}");
                let options = MockOptions::new().with_fault(operation, nth, operation.usual_failure());
                let gpu = MockGpu::open(options).unwrap();
                let Ok(runtime) = Runtime::new(gpu.clone()) else { continue };
                let outcome = run(runtime, &task, &quiet(&task));
                let left = gpu.live_objects().total();
                if !releases.iter().any(|release| operation.name().contains(release)) {
                    assert_eq!(left, 0, "{fault}");
                }
                match outcome {
                    Ok(outcome) => assert_eq!((outcome.tally.differing, outcome.leaks), (0, left), "{fault}"),
                    Err(error) => {
                        failed += 1;
                        let error = format!("{error:#}");
                        assert!(error.contains(&format!("{operation}: ")), "{fault}: {error}");
                    }
                }
            }
        }
        assert!(failed > 20, "only {failed} faults were seen");
    }

    #[test]
    fn advice_on_memory_is_given_for_the_memory_that_ran_out_and_for_nothing_else() {
        let advised = |kind, operation| {
            let error = highwater::Error::new(kind, operation, "none left").with_hint("of the library");
            with_advice(error.into()).downcast::<Failure>().unwrap()
        };
        for operation in ["allocate", "create_blas_handle"] {
            assert!(advised(ErrorKind::OutOfMemory, operation).hint().contains("HIGHWATER_MOCK=memory="));
        }
        assert!(advised(ErrorKind::OutOfMemory, "host_allocate").hint().contains("HIGHWATER_MOCK=host-memory="));
        for (kind, operation) in [(ErrorKind::OutOfMemory, "create_stream"), (ErrorKind::DeviceLost, "allocate")] {
            assert_eq!(advised(kind, operation).hint(), "", "the library's hint is hidden");
        }
    }

    #[test]
    fn a_device_without_lt_plans_is_refused_with_the_capability() {
        let gpu = MockGpu::open(MockOptions::parse("lt=off").unwrap()).unwrap();
        let task = task(1, 1);
        let error = run(Runtime::new(gpu).unwrap(), &task, &quiet(&task)).unwrap_err();
        assert!(format!("{error:#}").contains("`lt_plans` is false"), "{error:#}");
    }
}
