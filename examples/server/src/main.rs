//! A web server that multiplies vectors by a matrix on a device, in batches.
//!
//! - [`http`]: requests, their deadlines, and the refusal of those that the server has no room for.
//! - [`engine`]: batches, and the lanes that compute them. No call in it blocks a thread of the executor.
//! - [`metrics`]: the counts that `/metrics` returns.
//! - [`self_test`] and [`client`]: clients that check every answer.

#![forbid(unsafe_code)]

mod client;
mod engine;
mod http;
mod metrics;
mod self_test;

use std::fmt;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use clap::Parser;
use clap::builder::RangedU64ValueParser;
use highwater::{Fallback, Opened, Runtime};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use engine::{Dispatcher, Lane};
use http::App;
use metrics::Metrics;

/// The time that a stop waits for connections after the longest request, and then for the device.
const GRACE: Duration = Duration::from_secs(1);

/// Multiplies vectors by a matrix on a device. Requests are computed in batches.
#[derive(Debug, Parser)]
struct Arguments {
    /// The backend: `auto`, `mock`, `cuda`, `rocm`, or a plugin's name. `auto` takes the mock if no device works.
    #[arg(long, default_value = "auto")]
    backend: String,
    /// The address to listen on. With port 0, the system chooses a port, and the first line of the output has it.
    #[arg(long, default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
    /// Rows and columns of the matrix, and so the number of values of a request.
    #[arg(long, default_value_t = 256, value_parser = within(1, 16_384))]
    model_size: usize,
    /// The most requests of a batch.
    #[arg(long, default_value_t = 32, value_parser = within(1, 4096))]
    max_batch: usize,
    /// The longest time that a request waits for others of its batch, such as 2ms. The timer counts whole milliseconds.
    #[arg(long, default_value = "1ms", value_parser = time)]
    max_delay: Duration,
    /// The most requests that wait for a batch. The server refuses others.
    #[arg(long, default_value_t = 1024, value_parser = within(1, 1 << 20))]
    queue: usize,
    /// The longest time until the answer to a request. A request can shorten it with the header `timeout-ms`.
    #[arg(long, default_value = "1s", value_parser = time)]
    timeout: Duration,
    /// Streams, and so batches that are computed at the same time.
    #[arg(long, default_value_t = 2, value_parser = within(1, 64))]
    streams: usize,
    /// Starts the server on a free port, checks the answers to this many requests, and stops the server under load.
    #[arg(long, value_name = "REQUESTS", value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    self_test: Option<u64>,
    /// Clients of the self-test that send requests at the same time.
    #[arg(long, default_value_t = 64, value_parser = within(1, 4096))]
    clients: usize,
}

fn within(least: u64, most: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(least..=most)
}

/// Parses a time of at most one hour.
fn time(text: &str) -> Result<Duration, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let unit = match &text[digits..] {
        "us" => Some(Duration::from_micros(1)),
        "ms" => Some(Duration::from_millis(1)),
        "s" => Some(Duration::from_secs(1)),
        _ => None,
    };
    let time = text[..digits].parse().ok().zip(unit).and_then(|(number, unit): (u32, _)| unit.checked_mul(number));
    time.filter(|&time| time <= Duration::from_secs(3600))
        .ok_or_else(|| "expected a time of at most 3600s, such as 500us, 2ms or 1s".to_owned())
}

/// Writes a line of output. A reader that has gone away stops no server.
fn say(line: fmt::Arguments<'_>) {
    let _ = writeln!(io::stdout(), "{line}");
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The time that the devices have for the rest of their work, once all tasks have ended.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);

fn run(arguments: &Arguments) -> Result<()> {
    let Opened { backend, .. } = match arguments.backend.as_str() {
        "auto" => highwater::open_best(Fallback::Mock)?,
        name => highwater::open(name)?,
    };
    let runtime = Runtime::new(backend)?;
    // Everything that waits for the device or allocates is done before the first request.
    let lanes = Lane::for_streams(&runtime, arguments.model_size, arguments.max_batch, arguments.streams)?;
    let metrics = Arc::new(Metrics::new());
    let executor = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    if let Err(error) = executor.block_on(serve(&runtime, lanes, arguments, &metrics)) {
        eprintln!("error: {error:#}");
        // A device that is lost or hangs may never end its work, and the end of the runtime would wait for it.
        std::process::exit(1);
    }
    // This drops all tasks, and so also the state of connections that outlived the stop.
    drop(executor);
    let statistics = runtime.statistics();
    let bytes = statistics.host.live_bytes + statistics.device_memory.live_bytes + statistics.buffers.bytes;
    let left = runtime.close_within(CLOSE_LIMIT)?;
    let (accepted, answered) = metrics.totals();
    say(format_args!(
        "stopped: {accepted} requests accepted, {answered} answered, {bytes} bytes left, {left} left after the close"
    ));
    if bytes > 0 || left.total() > 0 {
        bail!("the server kept memory of the device or of the host");
    }
    Ok(())
}

/// Answers requests until a signal or a failure of the device.
async fn serve(runtime: &Runtime, lanes: Vec<Lane>, arguments: &Arguments, metrics: &Arc<Metrics>) -> Result<()> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let address = if arguments.self_test.is_some() { SocketAddr::from(([127, 0, 0, 1], 0)) } else { arguments.listen };
    let listener = TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))?;
    let address = listener.local_addr()?;

    let (queue, jobs) = mpsc::channel(arguments.queue);
    let dispatcher = Dispatcher::new(jobs, lanes, arguments.max_batch, arguments.max_delay, Arc::clone(metrics));
    let mut dispatcher = tokio::spawn(dispatcher.run());
    // The connections have the queue only while this function has it.
    let app = App::new(runtime, arguments.model_size, arguments.timeout, queue.downgrade(), Arc::clone(metrics));
    let (stop, stopping) = oneshot::channel::<()>();
    let server = tokio::spawn(http::serve(listener, app, async {
        let _ = stopping.await;
    }));
    say(format_args!("listening on {address} on {}", runtime.device(0)?));
    let self_test = arguments.self_test.map(|requests| {
        tokio::spawn(self_test::run(address, arguments.model_size, requests, arguments.clients, Arc::clone(metrics)))
    });

    let failed = tokio::select! {
        _ = terminate.recv() => None,
        _ = interrupt.recv() => None,
        ended = &mut dispatcher => Some(ended),
    };
    // No new connection is accepted, and each request that has begun is answered. A connection that is left after this time has sent
    // no whole request.
    let _ = stop.send(());
    let _ = timeout(arguments.timeout + GRACE, server).await;
    // The dispatcher ends once the queue is empty and no batch is left.
    drop(queue);
    let lanes = match failed {
        Some(ended) => ended,
        None => timeout(GRACE, dispatcher)
            .await
            .map_err(|_| anyhow!("the device did not end its work within {GRACE:?} after the last answer"))?,
    }??;
    drop(lanes);
    match self_test {
        Some(self_test) => self_test.await?,
        None => Ok(()),
    }
}
