//! The threads of one process that classify batches of images on the device of the weights.
//!
//! All threads use one copy of the weights. Each thread has its own stream and buffers, and leases an Lt
//! handle from the pool for each batch. It keeps two batches in flight: while the device works on one, the CPU stages the
//! next. [`Work`] provides the batches and takes the answers.
//!
//! A device without Lt plans multiplies with BLAS handles. The bias is then a product too, and the CPU applies ReLU.
//!
//! *Failure.* The first error stops all threads and is reported. No thread waits for one that may have ended: the start
//! waits for each to be ready *or* ended.

use std::borrow::Cow;
use std::convert::Infallible;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{OnceLock, mpsc};
use std::thread;

use anyhow::Result;
use highwater::{DeviceBuffer, DeviceSlice, Epilogue, ErrorKind, GemmShape, PinnedBuffer, Runtime, Statistics, Stream};

use super::failure::Failure;
use super::model::{CLASSES, PIXELS, brightness, largest};
use super::task::BATCH;
use super::weights::{DeviceLayer, Weights};

/// Batches that a thread has in flight.
pub(super) const LANES: usize = 2;

/// A batch of at most [`BATCH`] images.
#[derive(Debug)]
pub(super) struct Batch<'a> {
    pub(super) number: u64,
    /// Its first image, counted over all passes.
    pub(super) first_image: u64,
    /// The images, one after the other, of `PIXELS` each.
    pub(super) pixels: Cow<'a, [u8]>,
}

/// The answer to a request for work.
#[derive(Debug)]
pub(super) enum Next<'a> {
    Batch(Batch<'a>),
    /// No batch at the moment.
    Later,
    /// No more batches.
    End,
}

/// The source of batches and the receiver of answers.
pub(super) trait Work: Sync {
    /// Called when all threads are ready. They get no batch before it returns.
    fn ready(&self) -> Result<()>;

    /// Returns the next batch. If there is none, waits, or returns `Later` if `idle` is false: a thread must not
    /// wait while it has undelivered answers.
    fn next(&self, idle: bool) -> Next<'_>;

    /// Receives the answer to a batch, which has one digit for each image.
    fn answer(&self, batch: Batch<'_>, digits: &[u8]) -> Result<()>;

    /// Ends the work early. All calls of `next` return `End`, including those that wait.
    fn stop(&self);
}

/// Classifies in this many threads until there is no more work. Returns the statistics of the pools while all threads still
/// held their resources, which is the need of the job.
pub(super) fn run(runtime: &Runtime, weights: &Weights, threads: usize, work: &dyn Work) -> Result<Statistics> {
    let shared = Shared {
        runtime,
        weights,
        work,
        started: OnceLock::new(),
        failed: AtomicBool::new(false),
        failure: OnceLock::new(),
    };
    let finished = shared.run_threads(threads);
    if let Some(error) = shared.failure.into_inner() {
        return Err(error);
    }
    let statistics = runtime.statistics();
    drop(finished);
    Ok(statistics)
}

/// The state that the threads share.
struct Shared<'a> {
    runtime: &'a Runtime,
    weights: &'a Weights,
    work: &'a dyn Work,
    /// Set when every thread is ready.
    started: OnceLock<()>,
    failed: AtomicBool,
    failure: OnceLock<anyhow::Error>,
}

impl<'a> Shared<'a> {
    /// Runs the threads and returns the resources that they still hold.
    fn run_threads(&self, count: usize) -> Vec<Thread<'a>> {
        // No message is sent. A thread drops its end when it is ready, or when it ends for any reason.
        let (ready, all_ready) = mpsc::channel::<Infallible>();
        thread::scope(|scope| {
            let mut threads = Vec::new();
            for index in 0..count {
                let ready = ready.clone();
                match thread::Builder::new().spawn_scoped(scope, move || self.serve(ready)) {
                    Ok(thread) => threads.push(thread),
                    Err(error) => {
                        let what = format!("thread {} of {count} could not be started", index + 1);
                        let hint = "use fewer `--threads`, or raise the limit on threads (ulimit -u)";
                        self.fail(Failure::new(ErrorKind::OutOfMemory, what, hint).because_of(error).into());
                        break;
                    }
                }
            }
            drop(ready);
            let _ = all_ready.recv();
            if !self.failed.load(Ordering::Relaxed)
                && let Err(error) = self.work.ready()
            {
                self.fail(error);
            }
            self.started.get_or_init(|| ());
            // A panic is a bug. It continues in this thread once all have ended.
            let joined: Vec<_> = threads.into_iter().map(thread::ScopedJoinHandle::join).collect();
            joined.into_iter().filter_map(|joined| joined.unwrap_or_else(|panic| resume_unwind(panic))).collect()
        })
    }

    /// Keeps the first error and stops the threads.
    fn fail(&self, error: anyhow::Error) {
        let _ = self.failure.set(error);
        // Relaxed: it only prevents the call of `ready`. The next line stops the threads.
        self.failed.store(true, Ordering::Relaxed);
        self.work.stop();
    }

    /// Runs one thread. Returns its resources, so that they live until all threads have ended.
    fn serve(&self, ready: mpsc::Sender<Infallible>) -> Option<Thread<'a>> {
        // A thread that panics stops the others as well.
        let alarm = Alarm(self.work);
        let mut thread = Thread::new(self).map_err(|error| self.fail(error.into())).ok()?;
        drop(ready);
        self.started.wait();
        thread.work(self).map_err(|error| self.fail(error)).ok()?;
        drop(alarm);
        Some(thread)
    }
}

/// Stops the work when a thread panics, so that no other thread waits forever.
struct Alarm<'a>(&'a dyn Work);

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.stop();
        }
    }
}

/// The resources of a thread.
struct Thread<'a> {
    stream: Stream,
    /// The images, then the output of each layer. One set is enough, because batches follow each other in the stream.
    activations: Vec<DeviceBuffer<f32>>,
    lanes: [Lane<'a>; LANES],
    /// The replacement of Lt plans, if the device has none.
    without_plans: Option<WithoutPlans>,
}

/// The resources of a thread without Lt plans.
struct WithoutPlans {
    /// A one for each image. The product of a bias with these is the bias of every image.
    ones: DeviceBuffer<f32>,
    /// The output of a layer, for ReLU.
    values: PinnedBuffer<f32>,
}

/// The page-locked memory of one batch, and the batch in flight in it.
struct Lane<'a> {
    images: PinnedBuffer<f32>,
    logits: PinnedBuffer<f32>,
    in_flight: Option<Batch<'a>>,
}

impl<'a> Thread<'a> {
    /// Allocates the resources, and sends black images through the layers, so that the handle and its plans are
    /// created before the measurement starts.
    fn new(shared: &Shared<'a>) -> highwater::Result<Self> {
        let device = shared.runtime.device(shared.weights.device())?;
        let stream = device.create_stream()?;
        let widths = [PIXELS].into_iter().chain(shared.weights.layers.iter().map(|layer| layer.shape.m));
        let activations = widths.map(|width| device.allocate(width * BATCH)).collect::<highwater::Result<_>>()?;
        let lane = || {
            Ok::<_, highwater::Error>(Lane {
                images: shared.runtime.pinned(PIXELS * BATCH)?,
                logits: shared.runtime.pinned(CLASSES * BATCH)?,
                in_flight: None,
            })
        };
        let without_plans = if device.capabilities().lt_plans {
            None
        } else {
            let widest = shared.weights.layers.iter().map(|layer| layer.shape.m).max().unwrap_or(0);
            let ones = stream.upload(&[1.0; BATCH])?;
            Some(WithoutPlans { ones, values: shared.runtime.pinned(widest * BATCH)? })
        };
        let mut thread = Self { stream, activations, lanes: [lane()?, lane()?], without_plans };
        thread.enqueue(shared.weights, 0, &[])?;
        thread.lanes[0].logits.read()?;
        Ok(thread)
    }

    /// Classifies batches until none are left, two in flight at a time.
    fn work(&mut self, shared: &Shared<'a>) -> Result<()> {
        let mut lane = 0;
        loop {
            // The next lane holds the older of the two batches.
            let idle = self.lanes.iter().all(|lane| lane.in_flight.is_none());
            match shared.work.next(idle) {
                Next::Batch(batch) => {
                    self.collect(shared.work, lane)?;
                    self.enqueue(shared.weights, lane, &batch.pixels)?;
                    self.lanes[lane].in_flight = Some(batch);
                }
                Next::Later => self.collect(shared.work, lane)?,
                Next::End => break,
            }
            lane = (lane + 1) % LANES;
        }
        (0..LANES).try_for_each(|after| self.collect(shared.work, (lane + after) % LANES))
    }

    /// Stages images and enqueues everything up to the copy back. Does not wait for the device, if it has plans.
    fn enqueue(&mut self, weights: &Weights, lane: usize, pixels: &[u8]) -> highwater::Result<()> {
        let Self { stream, activations, lanes, without_plans } = self;
        let Lane { images, logits, .. } = &mut lanes[lane];
        let pixels = pixels.iter().copied().map(brightness).chain(std::iter::repeat(0.0));
        images.write()?.iter_mut().zip(pixels).for_each(|(staged, pixel)| *staged = pixel);
        stream.copy_to_device(&*images, &activations[0])?;
        for (layer, values) in weights.layers.iter().zip(activations.windows(2)) {
            let [input, output] = values else { unreachable!("windows of two") };
            let (weight, bias) = weights.of(layer)?;
            match without_plans {
                None => {
                    stream.lt()?.matmul(&layer.shape, layer.epilogue, 1.0, weight, input, 0.0, output, Some(bias))?;
                }
                Some(without_plans) => without_plans.apply(stream, layer, weight, input, output, bias)?,
            }
        }
        stream.copy_to_host(&activations[activations.len() - 1], logits)
    }

    /// Waits for the batch of a lane, if there is one, and delivers its answer.
    fn collect(&mut self, work: &dyn Work, lane: usize) -> Result<()> {
        let Lane { logits, in_flight, .. } = &mut self.lanes[lane];
        let Some(batch) = in_flight.take() else { return Ok(()) };
        let images = batch.pixels.len() / PIXELS;
        let logits = logits.read()?.chunks_exact(CLASSES).take(images);
        let digits: Vec<u8> = logits.map(|logits| largest(logits) as u8).collect();
        work.answer(batch, &digits)
    }
}

impl WithoutPlans {
    /// Computes a layer without Lt plans, as [`LtLease::matmul`](highwater::LtLease::matmul) does.
    fn apply(
        &mut self,
        stream: &Stream,
        layer: &DeviceLayer,
        weight: DeviceSlice<'_, f32>,
        input: &DeviceBuffer<f32>,
        output: &DeviceBuffer<f32>,
        bias: DeviceSlice<'_, f32>,
    ) -> highwater::Result<()> {
        let (width, images) = (layer.shape.m, layer.shape.n);
        {
            let mut handle = stream.blas()?;
            handle.gemm(&GemmShape::of::<f32>(width, images, 1), 1.0, bias, &self.ones, 0.0, output)?;
            handle.gemm(&layer.shape, 1.0, weight, input, 1.0, output)?;
        }
        if layer.epilogue == Epilogue::BiasRelu {
            let values = 0..width * images;
            stream.copy_to_host(output, self.values.slice_mut(values.clone())?)?;
            self.values.write()?[values.clone()].iter_mut().for_each(|value| *value = value.max(0.0));
            stream.copy_to_device(self.values.slice(values)?, output)?;
        }
        Ok(())
    }
}
