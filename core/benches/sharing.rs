//! Sharing between two processes, over the mock device. Run with `cargo bench -p highwater-core --bench sharing`.
//!
//! The other process is this program, started again. Both talk over pipes; the baseline is one line each way and nothing
//! else. Both poll their pipes, as programs do that wait for a device too. In the group `two_processes_asleep` (run it alone by
//! `-- asleep`) both sleep in blocking reads instead: a process that sleeps is woken by the system, which may take longer than
//! all of it and says nothing about sharing.

#![allow(dead_code, reason = "a file of the crate is compiled as part of this program")]

mod primitive {
    pub(crate) use std::sync::atomic::{AtomicU64, Ordering};
}

#[path = "../src/sharing/counts.rs"]
mod counts;

use std::hint::black_box;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::AtomicU64;

use counts::{Acquired, Slot};
use criterion::{BatchSize, Criterion};
use highwater_core::{DeviceBuffer, Runtime, Ticket};
use highwater_mock::{MockGpu, MockOptions};

/// Set in the other process, to how it waits.
const IMPORTER: &str = "HIGHWATER_BENCH_IMPORTER";
const POLLING: &str = "polling";
const ASLEEP: &str = "asleep";

fn runtime() -> Runtime {
    Runtime::new(MockGpu::open(MockOptions::new().with_memory_bytes(8 << 30)).unwrap()).unwrap()
}

/// How the two processes wait for each other.
#[derive(Clone, Copy, PartialEq)]
enum Waiting {
    Polling,
    Asleep,
}

/// The next line of a pipe, whether reading from it blocks or not; `None` at its end.
fn poll_line(pipe: &mut impl Read, line: &mut Vec<u8>) -> Option<String> {
    let mut bytes = [0; 512];
    while line.last() != Some(&b'\n') {
        match pipe.read(&mut bytes) {
            Ok(0) => return None,
            Ok(count) => line.extend(&bytes[..count]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) => panic!("{error}"),
        }
    }
    let text = String::from_utf8(std::mem::take(line)).unwrap();
    Some(text.trim_end().to_owned())
}

fn prepare(pipe: impl AsFd, waiting: Waiting) {
    if waiting == Waiting::Polling {
        rustix::fs::fcntl_setfl(pipe, rustix::fs::OFlags::NONBLOCK).unwrap();
    }
}

/// Opens each ticket that comes in, lets go of it, and says so.
fn import(waiting: Waiting) {
    let runtime = runtime();
    let mut out = std::io::stdout().lock();
    let mut input = std::fs::File::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    prepare(&input, waiting);
    let mut line = Vec::new();
    while let Some(text) = poll_line(&mut input, &mut line) {
        if let Ok(ticket) = text.parse::<Ticket>() {
            drop(black_box(runtime.open_shared::<u8>(&ticket).unwrap()));
        }
        out.write_all(b"\n").unwrap();
        out.flush().unwrap();
    }
}

struct Importer {
    child: Child,
    stdin: ChildStdin,
    stdout: ChildStdout,
    line: Vec<u8>,
}

impl Importer {
    fn start(waiting: Waiting) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let how = if waiting == Waiting::Polling { POLLING } else { ASLEEP };
        let mut child = command.env(IMPORTER, how).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let stdin = child.stdin.take().unwrap();
        let stdout = child.stdout.take().unwrap();
        prepare(&stdout, waiting);
        Self { child, stdin, stdout, line: Vec::new() }
    }

    /// Sends a line and waits for its answer.
    fn exchange(&mut self, line: &str) {
        self.stdin.write_all(line.as_bytes()).unwrap();
        poll_line(&mut self.stdout, &mut self.line).unwrap();
    }

    fn end(self) {
        let Self { mut child, stdin, .. } = self;
        drop(stdin);
        assert!(child.wait().unwrap().success());
    }
}

fn two_processes(criterion: &mut Criterion, name: &str, waiting: Waiting) {
    let exporter = runtime();
    let device = exporter.device(0).unwrap();
    let mut importer = Importer::start(waiting);
    let mut group = criterion.benchmark_group(name);
    let buffer = device.allocate_shared::<u8>(1 << 20).unwrap();
    group.bench_function("baseline_a_line_each_way", |b| {
        // As long as a ticket's text.
        let line = format!("{}\n", "-".repeat(buffer.share().unwrap().to_string().len()));
        b.iter(|| importer.exchange(&line));
    });
    group.bench_function("share_open_release_acknowledge_mapping_kept", |b| {
        b.iter(|| importer.exchange(&format!("{}\n", buffer.share().unwrap())));
    });
    group.bench_function("share_open_release_acknowledge_first_open", |b| {
        b.iter_batched(
            || device.allocate_shared::<u8>(4096).unwrap(),
            |buffer| {
                importer.exchange(&format!("{}\n", buffer.share().unwrap()));
                buffer
            },
            BatchSize::PerIteration,
        );
    });
    group.finish();
    drop(buffer);
    importer.end();
}

fn one_count(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("count");
    let word = AtomicU64::new(0);
    let slot = Slot::new(&word, 1);
    assert!(slot.grant());
    group.bench_function("taken_and_given_back", |b| {
        b.iter(|| {
            assert_eq!(black_box(slot).acquire(), Acquired::Yes);
            assert!(!black_box(slot).release());
        });
    });
    let (exporter, importer) = (runtime(), runtime());
    let buffer = exporter.device(0).unwrap().allocate_shared::<u8>(1 << 20).unwrap();
    group.bench_function("share_again", |b| b.iter(|| buffer.share().unwrap()));
    let ticket = buffer.share().unwrap();
    drop(importer.open_shared::<u8>(&ticket).unwrap());
    group.bench_function("open_again_and_drop", |b| {
        b.iter(|| drop(black_box(importer.open_shared::<u8>(&ticket).unwrap())));
    });
    group.finish();
}

/// Releases, with few and with many shares outstanding.
fn outstanding(criterion: &mut Criterion) {
    let (exporter, importer) = (runtime(), runtime());
    let device = exporter.device(0).unwrap();
    let mut group = criterion.benchmark_group("release");
    for (name, allocations, opens) in [("1_outstanding", 1, 1), ("100_000_outstanding", 1000, 100)] {
        let buffers: Vec<DeviceBuffer<u8>> = (0..allocations).map(|_| device.allocate_shared(64).unwrap()).collect();
        let tickets: Vec<_> = buffers.iter().map(|buffer| buffer.share().unwrap()).collect();
        let held: Vec<_> =
            (0..opens).flat_map(|_| tickets.iter().map(|ticket| importer.open_shared::<u8>(ticket).unwrap())).collect();
        group.bench_function(name, |b| {
            b.iter_batched(|| importer.open_shared::<u8>(&tickets[0]).unwrap(), drop, BatchSize::SmallInput);
        });
        drop(held);
    }
    // The exporter has dropped everything: each release ends one block's limbo.
    for (name, blocks) in [("and_collect_1_in_limbo", 1), ("and_collect_20_000_in_limbo", 20_000)] {
        let make = || {
            let buffer = device.allocate_shared::<u8>(64).unwrap();
            importer.open_shared::<u8>(&buffer.share().unwrap()).unwrap()
        };
        let held: Vec<_> = (1..blocks).map(|_| make()).collect();
        group.bench_function(name, |b| {
            b.iter_batched(
                make,
                |import| {
                    drop(import);
                    exporter.trim_shared().unwrap()
                },
                BatchSize::PerIteration,
            );
        });
        drop(held);
    }
    group.finish();
}

fn main() {
    if let Some(how) = std::env::var_os(IMPORTER) {
        return import(if how == ASLEEP { Waiting::Asleep } else { Waiting::Polling });
    }
    let mut criterion = Criterion::default().configure_from_args();
    one_count(&mut criterion);
    outstanding(&mut criterion);
    two_processes(&mut criterion, "two_processes", Waiting::Polling);
    two_processes(&mut criterion, "two_processes_asleep", Waiting::Asleep);
    criterion.final_summary();
}
