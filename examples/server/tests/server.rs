//! The server as a process, over the mock and over the simulated CUDA.

#![forbid(unsafe_code)]

#[path = "../src/client.rs"]
mod client;

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tokio::task::JoinSet;

use client::Client;

/// The longest time that a step of a test may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

const SIZE: usize = 16;

/// A command whose devices the test alone describes.
fn command(program: &str, mock: &str) -> Command {
    let mut command = Command::new(program);
    for variable in ["HIGHWATER_BACKEND", "HIGHWATER_SIMULATED_CUDA", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG"]
    {
        command.env_remove(variable);
    }
    command.env("HIGHWATER_MOCK", mock);
    command
}

const PROGRAM: &str = env!("CARGO_BIN_EXE_highwater-example-server");

/// A server that runs.
struct Server {
    child: Child,
    address: SocketAddr,
    output: BufReader<std::process::ChildStdout>,
}

/// What a server left behind.
struct Ended {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Server {
    fn start(mock: &str, arguments: &[&str]) -> Self {
        // The tests share two cores.
        Self::with_threads("2", mock, arguments)
    }

    fn with_threads(threads: &str, mock: &str, arguments: &[&str]) -> Self {
        let mut command = command(PROGRAM, mock);
        command.args(["--backend", "mock", "--listen", "127.0.0.1:0", "--model-size", "16"]).args(arguments);
        // A busy machine must not make requests late. The tests of the timeout have arguments of their own.
        if !arguments.contains(&"--timeout") {
            command.args(["--timeout", "30s"]);
        }
        command.env("TOKIO_WORKER_THREADS", threads);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let address = line.strip_prefix("listening on ").and_then(|rest| rest.split(' ').next()?.parse().ok());
        let address = address.unwrap_or_else(|| panic!("{line:?}"));
        Self { child, address, output }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for the end.
    fn ended(mut self) -> Ended {
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(begun.elapsed() < PATIENCE, "the server does not end");
            thread::sleep(Duration::from_millis(2));
        };
        let (mut stdout, mut stderr) = (String::new(), String::new());
        self.output.read_to_string(&mut stdout).unwrap();
        self.child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        Ended { code: status.code(), stdout, stderr }
    }

    /// Stops the server. It ends well, has answered `answers` requests, and has left nothing.
    #[track_caller]
    fn stop(self, answers: u64) -> Ended {
        self.signal(Signal::TERM);
        let ended = self.ended();
        assert_eq!(ended.code, Some(0), "{}{}", ended.stdout, ended.stderr);
        let expected = format!(
            "stopped: {answers} requests accepted, {answers} answered, 0 bytes left, nothing left after the close\n"
        );
        assert_eq!(ended.stdout, expected);
        ended
    }

    async fn client(&self) -> Client {
        Client::connect(self.address).await.unwrap()
    }

    /// The values of `/metrics`, without those of buckets.
    async fn metrics(&self) -> BTreeMap<String, f64> {
        let answer = self.client().await.send("GET /metrics", "", b"").await.unwrap().unwrap();
        assert!(answer.code == 200 && !answer.closes);
        let page = String::from_utf8(answer.body).unwrap();
        let lines = page.lines().filter(|line| !line.starts_with('#'));
        let value = |line: &str| line.rsplit_once(' ').map(|(name, value)| (name.to_owned(), value.parse().unwrap()));
        lines.map(|line| value(line).unwrap_or_else(|| panic!("{line}"))).collect()
    }

    /// Waits for the first batch.
    async fn begins_a_batch(&self) {
        let begun = Instant::now();
        while self.metrics().await["server_batch_size_count"] == 0.0 {
            assert!(begun.elapsed() < PATIENCE, "the server begins no batch");
        }
    }

    /// The memory of the process, in bytes.
    fn resident(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() * 1024
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The vector of a request, and its product by the matrix, which the server's page describes.
fn sample(request: u64) -> (Vec<f32>, Vec<f32>) {
    let vector: Vec<f32> = (0..SIZE as u64).map(|row| (((row + 3) * (request + 1)) % 101) as f32 - 50.0).collect();
    let matrix = |row: usize, column: usize| ((row * 31 + column * 17) % 9) as f32 - 4.0;
    let product = (0..SIZE).map(|row| (0..SIZE).map(|column| matrix(row, column) * vector[column]).sum());
    (vector.clone(), product.collect())
}

/// Sends a request. Returns the code, after a check of the product if it is 200, or `None` if the server has closed the connection.
async fn multiply(client: &mut Client, headers: &str, request: u64) -> Option<u16> {
    let (vector, product) = sample(request);
    let answer = client.multiply(headers, &vector).await.unwrap()?;
    if answer.code == 200 {
        assert_eq!(bytemuck::cast_slice::<_, u8>(&product), answer.body, "request {request}");
    } else {
        assert!(answer.body.ends_with(b"\n"), "{answer:?}");
    }
    Some(answer.code)
}

/// Sends `each` requests from each of `clients` at the same time, all with a right answer.
async fn load(server: &Server, clients: u64, each: u64) {
    let mut running = JoinSet::new();
    for number in 0..clients {
        let mut client = server.client().await;
        running.spawn(async move {
            for request in 0..each {
                assert_eq!(multiply(&mut client, "", number * each + request).await, Some(200));
            }
        });
    }
    running.join_all().await;
}

#[tokio::test]
async fn answers_of_64_clients_are_right_and_come_in_batches() {
    let server = Server::start("latency=1ms,checks=on,race-detector=on", &["--max-batch", "32"]);
    load(&server, 64, 10).await;
    let metrics = server.metrics().await;
    assert_eq!(metrics["server_requests_total"], 640.0);
    assert_eq!(metrics["server_responses_total{code=\"200\"}"], 640.0);
    assert_eq!(metrics["server_batch_size_sum"], 640.0);
    // Two lanes of 32 serve 64 clients that wait for each other's batches.
    assert!(metrics["server_batch_size_count"] <= 160.0, "{metrics:?}");
    assert_eq!(metrics["server_batch_size_bucket{le=\"32\"}"], metrics["server_batch_size_count"]);
    assert_eq!(metrics["server_request_seconds_count"], 640.0);
    // A batch has three operations and an event.
    assert_eq!(metrics["server_request_seconds_bucket{le=\"0.001\"}"], 0.0);
    assert!(metrics["server_request_seconds_sum"] >= 640.0 * 0.004, "{metrics:?}");
    assert!(metrics["highwater_pinned_live_bytes"] >= 2.0 * 2.0 * 32.0 * 64.0, "{metrics:?}");
    assert!(metrics["highwater_device_live_bytes"] >= 2.0 * 2.0 * 32.0 * 64.0, "{metrics:?}");
    let stderr = server.stop(640).stderr;
    assert!(stderr.contains("0 races") && stderr.lines().count() == 1, "{stderr}");
}

#[tokio::test]
async fn a_batch_blocks_no_thread_of_the_executor() {
    let server = Server::with_threads("1", "latency=100ms", &[]);
    let mut client = server.client().await;
    let product = tokio::spawn(async move { multiply(&mut client, "", 1).await });
    server.begins_a_batch().await;
    // The lane has begun. The only thread still answers.
    for _ in 0..3 {
        server.metrics().await;
    }
    assert!(!product.is_finished());
    assert_eq!(product.await.unwrap(), Some(200));
    server.stop(1);
}

#[tokio::test]
async fn a_late_request_ends_with_504_and_spoils_no_other() {
    let server = Server::start("latency=100ms,checks=on", &["--streams", "1"]);
    let mut client = server.client().await;
    // The first is computed and comes late. The second, behind it in the queue, ends before it is staged.
    let mut second = server.client().await;
    let first = tokio::spawn(async move { (multiply(&mut client, "timeout-ms: 20\r\n", 1).await, client) });
    server.begins_a_batch().await;
    assert_eq!(multiply(&mut second, "timeout-ms: 20\r\n", 2).await, Some(504));
    let (code, mut client) = first.await.unwrap();
    assert_eq!(code, Some(504));
    assert_eq!(multiply(&mut client, "", 3).await, Some(200));
    let metrics = server.metrics().await;
    assert_eq!(metrics["server_responses_total{code=\"504\"}"], 2.0);
    assert_eq!(metrics["server_batch_size_sum"], 2.0, "the second request was computed");
    assert_eq!(server.stop(3).stderr, "");
}

#[tokio::test]
async fn a_full_queue_refuses_requests_at_once() {
    let server = Server::start("latency=50ms", &["--streams", "1", "--max-batch", "1", "--queue", "2"]);
    let mut running = JoinSet::new();
    for request in 0..16 {
        let mut client = server.client().await;
        running.spawn(async move { multiply(&mut client, "", request).await });
    }
    let codes = running.join_all().await;
    let count = |code| codes.iter().filter(|seen| **seen == Some(code)).count();
    // Two wait, and one or two more may have left the queue.
    assert!(count(200) >= 2 && count(429) >= 1 && count(200) + count(429) == 16, "{codes:?}");
    load(&server, 1, 1).await;
    server.stop(17);
}

/// Clients that send requests until the server stops. Each request gets a right answer or was not read.
async fn stops_under_load(signal: Signal) {
    let server = Server::start("", &[]);
    let answers = Arc::new(AtomicU64::new(0));
    let mut running = JoinSet::new();
    for number in 0..32 {
        let (mut client, answers) = (server.client().await, Arc::clone(&answers));
        running.spawn(async move {
            let mut request = number;
            while let Some(code) = multiply(&mut client, "", request).await {
                assert_eq!(code, 200);
                answers.fetch_add(1, SeqCst);
                request += 32;
            }
        });
    }
    let begun = Instant::now();
    while answers.load(SeqCst) < 500 {
        assert!(begun.elapsed() < PATIENCE && running.try_join_next().is_none(), "the clients get no answers");
        tokio::task::yield_now().await;
    }
    server.signal(signal);
    running.join_all().await;
    let ended = server.ended();
    let answers = answers.load(SeqCst);
    let expected = format!(
        "stopped: {answers} requests accepted, {answers} answered, 0 bytes left, nothing left after the close\n"
    );
    assert_eq!((ended.code, ended.stdout, ended.stderr.as_str()), (Some(0), expected, ""));
}

#[tokio::test]
async fn sigterm_under_load_loses_no_request() {
    stops_under_load(Signal::TERM).await;
}

#[tokio::test]
async fn sigint_under_load_loses_no_request() {
    stops_under_load(Signal::INT).await;
}

#[tokio::test]
async fn a_client_that_sends_no_whole_request_delays_the_stop_only_for_a_while() {
    use std::io::Write as _;
    let server = Server::start("", &["--timeout", "100ms"]);
    let silent = TcpStream::connect(server.address).unwrap();
    let mut half = TcpStream::connect(server.address).unwrap();
    half.write_all(b"POST /multiply HTTP/1.1\r\ncontent-length: 64\r\n\r\n1234").unwrap();
    // The server has accepted both before it answers this one.
    load(&server, 1, 1).await;
    server.stop(1);
    drop((silent, half));
}

#[tokio::test]
async fn a_fault_fails_one_batch_and_the_server_goes_on() {
    for fault in ["fail=gemm:2", "fail=copy:4", "fail=copy:5", "fail=query_event:3"] {
        let server = Server::start(&format!("checks=on,{fault}"), &["--streams", "1"]);
        let mut client = server.client().await;
        let mut codes = Vec::new();
        for request in 0..6 {
            codes.extend(multiply(&mut client, "", request).await);
        }
        codes.sort_unstable();
        assert_eq!(codes, [200, 200, 200, 200, 200, 500], "{fault}");
        let stderr = server.stop(6).stderr;
        assert!(stderr.starts_with("a batch of 1 requests failed: ") && stderr.lines().count() == 1, "{stderr}");
    }
}

#[tokio::test]
async fn a_lost_device_ends_the_server_with_its_error() {
    let server = Server::start("fail=gemm:2..:device-lost", &[]);
    let mut client = server.client().await;
    assert_eq!(multiply(&mut client, "", 1).await, Some(200));
    assert_eq!(multiply(&mut client, "", 2).await, Some(500));
    let ended = server.ended();
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(1), ""));
    assert!(ended.stderr.contains("error: gemm: device lost: "), "{}", ended.stderr);
}

#[tokio::test]
async fn a_device_that_hangs_delays_the_stop_only_for_a_while() {
    // A batch takes four times the latency, longer than the stop waits.
    let server = Server::start("latency=500ms", &["--timeout", "100ms"]);
    let mut client = server.client().await;
    assert_eq!(multiply(&mut client, "", 1).await, Some(504));
    server.signal(Signal::TERM);
    let ended = server.ended();
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(1), ""));
    assert_eq!(ended.stderr, "error: the device did not end its work within 1s after the last answer\n");
}

#[tokio::test]
async fn memory_stays_the_same_for_10_000_requests() {
    let server = Server::start("", &[]);
    let pools = |metrics: BTreeMap<String, f64>| -> Vec<_> {
        metrics.into_iter().filter(|(name, _)| name.starts_with("highwater_")).collect()
    };
    load(&server, 16, 100).await;
    let (before, resident) = (pools(server.metrics().await), server.resident());
    assert_eq!(before.len(), 6);
    load(&server, 16, 625).await;
    assert_eq!(pools(server.metrics().await), before);
    let growth = server.resident().saturating_sub(resident);
    assert!(growth < 2 << 20, "the process grew by {growth} bytes");
    server.stop(11_600);
}

#[tokio::test]
async fn bad_requests_are_refused_with_a_remedy() {
    let server = Server::start("", &[]);
    let mut client = server.client().await;
    let answer = async |start: &str, headers: &str, body: &[u8]| {
        let mut one = server.client().await;
        let answer = one.send(start, headers, body).await.unwrap().unwrap();
        (answer.code, String::from_utf8(answer.body).unwrap())
    };
    let short = answer("POST /multiply", "", &[0; 60]).await;
    assert_eq!(short, (400, "the vector has 60 bytes; send 64, four for each value\n".to_owned()));
    let (code, message) = answer("POST /multiply", "", &[0; 68]).await;
    assert!(code == 413 && message.ends_with("; send 64 bytes\n"), "{code} {message}");
    let (code, message) = answer("POST /multiply", "timeout-ms: soon\r\n", &[0; 64]).await;
    assert!(code == 400 && message.ends_with("send milliseconds\n"), "{code} {message}");
    assert_eq!(answer("GET /multiply", "", b"").await.0, 405);
    assert_eq!(answer("GET /nothing", "", b"").await.0, 404);
    assert_eq!(multiply(&mut client, "", 1).await, Some(200));
    server.stop(4);
}

fn run(arguments: &[&str]) -> Output {
    command(PROGRAM, "").args(arguments).output().unwrap()
}

#[test]
fn bad_arguments_are_refused_with_a_remedy() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for (arguments, code, part) in [
        (vec!["--max-batch", "0"], 2, "1..=4096"),
        (vec!["--max-delay", "5"], 2, "such as 500us, 2ms or 1s"),
        (vec!["--timeout", "3601s"], 2, "at most 3600s"),
        (vec!["--backend", "mocc"], 1, "mock"),
        (vec!["--backend", "mock", "--listen", &address], 1, "cannot listen on 127.0.0.1:"),
    ] {
        let output = run(&arguments);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{stderr}");
        assert!(stderr.starts_with("error: ") && stderr.contains(part), "{stderr}");
    }
}

/// The self-test checks the answers itself, and stops the server while its clients send requests.
#[track_caller]
fn passes(output: Output, device: &str) {
    let (stdout, stderr) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert_eq!(output.status.code(), Some(0), "{stdout}{stderr}");
    let lines: Vec<_> = stdout.lines().collect();
    assert!(lines.len() == 4 && lines[0].contains(device), "{stdout}");
    assert_eq!(lines[1], "1000 requests of 64 clients: all answers are right");
    assert!(lines[2].contains(" requests/s, p50 ") && lines[2].contains(" ms, p99 "), "{stdout}");
    assert!(lines[3].ends_with(" answered, 0 bytes left, nothing left after the close"), "{stdout}");
}

#[test]
fn the_self_test_passes_on_the_mock() {
    passes(run(&["--backend", "mock", "--self-test", "1000", "--model-size", "32"]), "Highwater mock");
}

#[test]
fn the_self_test_passes_over_the_simulated_cuda() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/simulated.sh");
    let mut command = command(script.to_str().unwrap(), "");
    command.args(["cuda", PROGRAM, "--backend", "cuda", "--self-test", "1000", "--model-size", "32"]);
    passes(command.output().unwrap(), "simulated CUDA");
}

#[test]
fn a_self_test_with_a_failed_batch_fails() {
    let mut command = command(PROGRAM, "fail=gemm:2");
    let output = command.args(["--backend", "mock", "--self-test", "1000", "--model-size", "32"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(
        stderr.contains("error: request ") && stderr.contains(": code 500: the device refused the batch: gemm"),
        "{stderr}"
    );
}
