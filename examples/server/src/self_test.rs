//! The self-test: many clients check every answer, and the server stops under their load.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Signal, getpid, kill_process};
use tokio::task::JoinSet;

use crate::client::Client;
use crate::engine;
use crate::metrics::Metrics;
use crate::say;

/// Vectors whose products are known. Requests have multiples of them.
const VECTORS: usize = 16;

/// The multiples are 1 to this number, so that every sum is exact.
const MULTIPLES: u64 = 64;

/// Vectors and their products, which the CPU computes before the clock starts.
struct Samples(Vec<(Vec<f32>, Vec<f32>)>);

impl Samples {
    fn new(size: usize) -> Self {
        let matrix = engine::matrix(size);
        let sample = |number| {
            let vector: Vec<f32> = (0..size).map(|row| ((row * 7 + number * 13) % 9) as f32 - 4.0).collect();
            let mut product = vec![0.0; size];
            for (column, factor) in matrix.chunks_exact(size).zip(&vector) {
                for (sum, value) in product.iter_mut().zip(column) {
                    *sum += value * factor;
                }
            }
            (vector, product)
        };
        Self((0..VECTORS).map(sample).collect())
    }

    /// Returns the vector of a request, and its product.
    fn of(&self, request: u64) -> (Vec<f32>, Vec<f32>) {
        let (vector, product) = &self.0[request as usize % VECTORS];
        let multiple = (request % MULTIPLES + 1) as f32;
        let times = |values: &[f32]| values.iter().map(|value| value * multiple).collect();
        (times(vector), times(product))
    }
}

/// What the clients share.
struct Load {
    address: SocketAddr,
    samples: Samples,
    /// Requests to measure.
    requests: u64,
    begun: AtomicU64,
    answered: AtomicU64,
}

/// What one client saw.
#[derive(Default)]
struct Seen {
    latencies: Vec<Duration>,
    answers: u64,
}

/// Sends the requests, checks the answers, stops this process by a signal while the clients go on, and prints the result.
pub(crate) async fn run(
    address: SocketAddr,
    size: usize,
    requests: u64,
    clients: usize,
    metrics: Arc<Metrics>,
) -> Result<()> {
    let samples = Samples::new(size);
    let load = Arc::new(Load { address, samples, requests, begun: AtomicU64::new(0), answered: AtomicU64::new(0) });
    let begun = Instant::now();
    let mut running: JoinSet<_> = (0..clients).map(|_| client(Arc::clone(&load), begun)).collect();
    let mut seen = Seen::default();
    let mut elapsed = Duration::ZERO;
    let mut result = Ok(());
    while let Some(ended) = running.join_next().await {
        match ended? {
            Ok((one, measured)) => {
                seen.latencies.extend(one.latencies);
                seen.answers += one.answers;
                elapsed = elapsed.max(measured);
            }
            Err(error) => {
                // The first error is the result. The server stops nevertheless, and the other clients with it.
                stop()?;
                result = result.and(Err(error));
            }
        }
    }
    result?;
    seen.latencies.sort_unstable();
    let (accepted, answered) = metrics.totals();
    let at = |percent: usize| seen.latencies[(seen.latencies.len() - 1) * percent / 100].as_secs_f64() * 1e3;
    say(format_args!("{requests} requests of {clients} clients: all answers are right"));
    say(format_args!(
        "{:.0} requests/s, p50 {:.2} ms, p99 {:.2} ms",
        requests as f64 / elapsed.as_secs_f64(),
        at(50),
        at(99)
    ));
    if accepted != answered || answered != seen.answers {
        bail!("the stop lost answers: {accepted} requests accepted, {answered} answered, {} received", seen.answers);
    }
    Ok(())
}

fn stop() -> Result<()> {
    kill_process(getpid(), Signal::TERM).context("the signal that stops the server failed")
}

/// Sends requests until the server closes the connection. Returns also the time until the last measured answer of all clients, if this
/// client received it.
async fn client(load: Arc<Load>, begun: Instant) -> Result<(Seen, Duration)> {
    let mut client = Client::connect(load.address).await?;
    let (mut seen, mut elapsed) = (Seen::default(), Duration::ZERO);
    loop {
        let request = load.begun.fetch_add(1, Relaxed);
        let (vector, product) = load.samples.of(request);
        let sent = Instant::now();
        let Some(answer) = client.multiply("", &vector).await.with_context(|| format!("request {request}"))? else {
            if request < load.requests {
                bail!("the server closed the connection before request {request}");
            }
            return Ok((seen, elapsed));
        };
        let latency = sent.elapsed();
        seen.answers += 1;
        if answer.code != 200 {
            bail!("request {request}: code {}: {}", answer.code, String::from_utf8_lossy(&answer.body).trim_end());
        }
        if answer.body != bytemuck::cast_slice::<_, u8>(&product) {
            bail!("request {request}: the answer differs from the product of the CPU");
        }
        if request < load.requests {
            seen.latencies.push(latency);
            if load.answered.fetch_add(1, Relaxed) + 1 == load.requests {
                elapsed = begun.elapsed();
                // The other clients go on, so the server stops under load.
                stop()?;
            }
        }
        if answer.closes {
            return Ok((seen, elapsed));
        }
    }
}
