//! Batches of requests, and the lanes that compute them.
//!
//! A lane has one stream, one BLAS handle, and memory for one batch. The [`Dispatcher`] forms a batch and gives it to an idle lane. The
//! lane copies the requests into page-locked memory, and enqueues a copy to the device, the product, and the copy back. Then it awaits
//! the copy. The executor's threads serve other tasks meanwhile.
//!
//! The memory belongs to the lane and not to a request. So a request may end before its batch, and nothing is freed that the device uses.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use highwater::{DeviceBuffer, Error, ErrorKind, GemmShape, OwnedBlasLease, PinnedBuffer, Result, Runtime, Stream};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use crate::metrics::Metrics;

/// A request in the queue.
pub(crate) struct Job {
    /// The vector, as the bytes of `f32` values in the order of this machine.
    pub(crate) vector: Bytes,
    pub(crate) accepted: Instant,
    /// Closed once nothing waits for the answer.
    pub(crate) reply: oneshot::Sender<Result<Bytes>>,
}

/// Returns the matrix, in columns. Its values are small integers, so every sum is exact.
pub(crate) fn matrix(size: usize) -> Vec<f32> {
    let value = |index: usize| ((index % size * 31 + index / size * 17) % 9) as f32 - 4.0;
    (0..size * size).map(value).collect()
}

/// A stream with all that a batch needs.
pub(crate) struct Lane {
    size: usize,
    stream: Stream,
    /// Kept for the life of the lane. An owned lease moves with its task from thread to thread.
    blas: OwnedBlasLease,
    matrix: Arc<DeviceBuffer<f32>>,
    /// Page-locked memory of this host, and memory of the device: a column for each request.
    inputs: PinnedBuffer<f32>,
    outputs: PinnedBuffer<f32>,
    device_inputs: DeviceBuffer<f32>,
    device_outputs: DeviceBuffer<f32>,
}

impl Lane {
    /// Makes lanes on streams of the first device. Waits for the upload of the matrix.
    pub(crate) fn for_streams(runtime: &Runtime, size: usize, max_batch: usize, streams: usize) -> Result<Vec<Self>> {
        let device = runtime.device(0)?;
        let uploads = device.create_stream()?;
        let matrix_on_device = uploads.allocate(size * size)?;
        uploads.write(&matrix(size), &matrix_on_device)?;
        uploads.synchronize()?;
        let matrix = Arc::new(matrix_on_device);
        let lane = |_| {
            let stream = device.create_stream()?;
            let values = size * max_batch;
            Ok(Self {
                size,
                blas: stream.blas_owned()?,
                matrix: Arc::clone(&matrix),
                inputs: device.pinned(values)?,
                outputs: device.pinned(values)?,
                device_inputs: stream.allocate(values)?,
                device_outputs: stream.allocate(values)?,
                stream,
            })
        };
        (0..streams).map(lane).collect()
    }

    /// Computes a batch and answers its requests. Returns the lane for the next batch, or the error if the device is lost.
    async fn answer(mut self, batch: Vec<Job>) -> Result<Self> {
        let size = self.size;
        let error = match self.multiply(&batch).await {
            Ok(products) => {
                for (job, product) in batch.into_iter().zip(products.chunks_exact(size)) {
                    // A request that has ended needs no answer.
                    let _ = job.reply.send(Ok(Bytes::copy_from_slice(bytemuck::cast_slice(product))));
                }
                return Ok(self);
            }
            Err(error) => error,
        };
        eprintln!("a batch of {} requests failed: {error}", batch.len());
        for job in batch {
            let _ = job.reply.send(Err(error.clone()));
        }
        if error.kind() == ErrorKind::DeviceLost { Err(error) } else { Ok(self) }
    }

    /// Multiplies the matrix by the vectors of a batch. Returns the products, one after another.
    async fn multiply(&mut self, batch: &[Job]) -> Result<&[f32]> {
        let (size, count) = (self.size, batch.len());
        let values = 0..size * count;
        // A batch that failed may have left work behind. Otherwise the memory is ready.
        self.inputs.ready().await?;
        for (column, job) in self.inputs.write()?.chunks_exact_mut(size).zip(batch) {
            bytemuck::cast_slice_mut(column).copy_from_slice(&job.vector);
        }
        let (inputs, outputs) = (self.device_inputs.slice(values.clone())?, self.device_outputs.slice(values.clone())?);
        self.stream.copy_to_device(self.inputs.slice(values.clone())?, inputs)?;
        self.blas.gemm(&GemmShape::of::<f32>(size, count, size), 1.0, &*self.matrix, inputs, 0.0, outputs)?;
        self.stream.copy_to_host(outputs, self.outputs.slice_mut(values.clone())?)?;
        self.outputs.ready().await?;
        Ok(&self.outputs.read()?[values])
    }
}

/// Forms batches from the queue, and gives them to lanes.
pub(crate) struct Dispatcher {
    jobs: mpsc::Receiver<Job>,
    idle: Vec<Lane>,
    busy: JoinSet<Result<Lane>>,
    max_batch: usize,
    max_delay: Duration,
    metrics: Arc<Metrics>,
}

impl Dispatcher {
    pub(crate) fn new(
        jobs: mpsc::Receiver<Job>,
        idle: Vec<Lane>,
        max_batch: usize,
        max_delay: Duration,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self { jobs, idle, busy: JoinSet::new(), max_batch, max_delay, metrics }
    }

    /// Runs until the queue is closed and each of its requests is answered. Returns the lanes.
    ///
    /// # Errors
    /// The error of a device that is lost. The requests in the queue then end without an answer.
    pub(crate) async fn run(mut self) -> anyhow::Result<Vec<Lane>> {
        let mut batch = Vec::new();
        loop {
            // While all lanes are busy, the batch is not closed, and grows in the queue.
            let is_idle = !self.idle.is_empty();
            tokio::select! {
                Some(lane) = self.busy.join_next() => self.idle.push(lane??),
                is_open = fill(&mut batch, &mut self.jobs, self.max_batch, self.max_delay), if is_idle => {
                    if let Some(lane) = self.idle.pop_if(|_| !batch.is_empty()) {
                        self.metrics.batch_sizes.observe(batch.len() as u64);
                        self.busy.spawn(lane.answer(std::mem::take(&mut batch)));
                    }
                    if !is_open {
                        break;
                    }
                }
            }
        }
        while let Some(lane) = self.busy.join_next().await {
            self.idle.push(lane??);
        }
        Ok(self.idle)
    }
}

/// Adds requests to a batch until it is full, or until its oldest request has waited for `max_delay`. Returns false once the queue is
/// closed and empty. If the future is dropped, the batch keeps its requests.
async fn fill(batch: &mut Vec<Job>, jobs: &mut mpsc::Receiver<Job>, max_batch: usize, max_delay: Duration) -> bool {
    while batch.len() < max_batch {
        let next = match batch.first() {
            None => jobs.recv().await,
            // Also after this time, takes requests that are in the queue already.
            Some(oldest) => match timeout_at(oldest.accepted + max_delay, jobs.recv()).await {
                Ok(next) => next,
                Err(_) => return true,
            },
        };
        match next {
            None => return false,
            // The request was late or its client left, so nothing is computed for it.
            Some(job) if job.reply.is_closed() => {}
            Some(job) => batch.push(job),
        }
    }
    true
}

/// The error of a request whose batch was lost with the device.
pub(crate) fn lost() -> Error {
    Error::new(ErrorKind::DeviceLost, "multiply", "the device was lost before the answer")
        .with_hint("the server ends; start it again")
}
