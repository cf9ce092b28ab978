//! What the table of a plugin costs a call: the same calls on the mock and on the mock's plugin, in turns, and the median of the
//! differences. `cargo bench -p highwater-plugin --bench plugin [-- --json]`.
//!
//! The calls are those that do least in the mock, so that the difference is the table's. Rounds are paired: each times both, one
//! right after the other, and the order changes from round to round.

use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use highwater_core::{
    Backend, BlasHandle, BlasKind, BlasOptions, DataType, DevicePtr, EventId, EventOptions, Gemm, GemmShape, StreamId,
    StreamOptions,
};
use highwater_mock::{MockGpu, MockOptions};
use highwater_plugin::{LoadOptions, load};

const ROUNDS: usize = 301;
const CALLS: u32 = 2000;

/// One side: a backend with an object of each kind.
struct Side {
    backend: Arc<dyn Backend>,
    stream: StreamId,
    event: EventId,
    handle: Box<dyn BlasHandle>,
}

impl Side {
    fn new(backend: Arc<dyn Backend>) -> Self {
        let stream = backend.create_stream(0, &StreamOptions::new()).unwrap();
        let event = backend.create_event(0, &EventOptions::new()).unwrap();
        let mut handle = backend.create_blas_handle(0, &BlasOptions::new(BlasKind::Blas)).unwrap();
        handle.set_stream(stream).unwrap();
        Self { backend, stream, event, handle }
    }
}

type Call = fn(&mut Side);

const CASES: [(&str, Call); 5] = [
    ("query_event", |side| {
        black_box(side.backend.query_event(black_box(side.event)).unwrap());
    }),
    ("query_stream", |side| {
        black_box(side.backend.query_stream(black_box(side.stream)).unwrap());
    }),
    ("is_capturing", |side| {
        black_box(side.backend.is_capturing(black_box(side.stream)).unwrap());
    }),
    ("set_stream", |side| side.handle.set_stream(black_box(side.stream)).unwrap()),
    ("gemm (of no elements)", |side| {
        let none = DevicePtr::new(0);
        let gemm = Gemm::new(GemmShape::new(DataType::F32, 0, 0, 0), none, none, none);
        // SAFETY: nothing is read and nothing written.
        unsafe { side.handle.gemm(black_box(&gemm)) }.unwrap();
    }),
];

/// Nanoseconds a call.
fn time(side: &mut Side, call: Call) -> f64 {
    let started = Instant::now();
    for _ in 0..CALLS {
        call(side);
    }
    started.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The mock's plugin, built as this program is.
fn plugin() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .args(["build", "--release", "--quiet", "--locked", "-p", "highwater-mock-plugin", "--target-dir"])
        .arg(target);
    assert!(cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap().success());
    target.join("release/libhighwater_mock.so")
}

fn main() {
    let json = std::env::args().any(|argument| argument == "--json");
    let file = plugin();
    let mut direct = Side::new(MockGpu::open(MockOptions::new()).unwrap());
    let mut through = Side::new(load(&file, &LoadOptions::new()).unwrap().open().unwrap());
    let mut lines = Vec::new();
    for (name, call) in CASES {
        let mut times = [Vec::new(), Vec::new(), Vec::new()];
        for round in 0..ROUNDS {
            let (ours, theirs) = if round % 2 == 0 {
                let ours = time(&mut direct, call);
                (ours, time(&mut through, call))
            } else {
                let theirs = time(&mut through, call);
                (time(&mut direct, call), theirs)
            };
            for (times, value) in times.iter_mut().zip([ours, theirs, theirs - ours]) {
                times.push(value);
            }
        }
        let [ours, theirs, difference] = times.map(median);
        if json {
            lines.push(format!(
                "{{\"call\":\"{name}\",\"direct_ns\":{ours:.1},\"plugin_ns\":{theirs:.1},\"table_ns\":{difference:.1}}}"
            ));
        } else {
            println!("{name:<24} direct {ours:6.1} ns, plugin {theirs:6.1} ns, the table {difference:5.1} ns");
        }
    }
    if json {
        println!("[{}]", lines.join(","));
    }
}
