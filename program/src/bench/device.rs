//! The rows of the device memory that streams allocate: time, and the bytes that traces hold and move.

use std::hint::black_box;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use highwater::hal::SplitMix64;
use highwater::{DeviceMemoryOptions, Error, ErrorKind, Result, Runtime, RuntimeOptions, Stream};
use highwater_conformance::RawCalls;

use super::report::{Bar, Row};
use super::rounds::{Loop, Worker, quantile};
use super::timing::{IN_USE, MANY, SIZES, SMALL, nanoseconds};
use super::trace::{Held, Trace};
use super::{Bench, Family};

const MIB: f64 = (1 << 20) as f64;
/// Calls of the backend between two readings of the clock. Some backends take a millisecond for one.
const RAW_BATCH: u32 = 16;
/// Most uses of a stream between two readings of the clock: fewer than a queue has places for.
const MOST_USES: usize = 64;

/// The kinds of memory that a pool can consist of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Mapped,
    Plain,
}

pub(super) fn families(bench: &Bench<'_>) -> Vec<Family> {
    let counts = &bench.thread_counts();
    let of_sizes = |names: &[&str], sizes: &[(&str, usize)]| {
        let names = names.iter().flat_map(|name| sizes.iter().map(move |(size, _)| format!("{name}_{size}")));
        names.flat_map(|name| counts.iter().map(move |count| format!("{name}_{count}t"))).collect()
    };
    let of_traces = |names: &[&str], run| Family { names: names.iter().map(|&name| name.to_owned()).collect(), run };
    vec![
        Family { names: of_sizes(&["same_stream", "raw_allocate_free"], &SIZES), run: same_stream },
        Family { names: of_sizes(&["own_stream", "other_stream"], &SIZES[..2]), run: uses },
        Family { names: [1, MANY].map(replace_name).into(), run: replace },
        of_traces(&["trace_three_seeds_mapped", "moved_three_seeds_mapped"], |bench| three_seeds(bench, Kind::Mapped)),
        of_traces(&["trace_three_seeds_plain", "moved_three_seeds_plain"], |bench| three_seeds(bench, Kind::Plain)),
        of_traces(&["trace_others_mapped", "trace_others_p90_mapped", "moved_others_mapped"], |bench| {
            other_triples(bench, Kind::Mapped)
        }),
        of_traces(&["trace_others_plain", "trace_others_p90_plain", "moved_others_plain"], |bench| {
            other_triples(bench, Kind::Plain)
        }),
        of_traces(&["moved_same_seed_mapped"], |bench| same_seed(bench, Kind::Mapped)),
        of_traces(&["moved_same_seed_plain"], |bench| same_seed(bench, Kind::Plain)),
        of_traces(&["trace_fresh_seeds_mapped", "trace_fresh_seeds_p90_mapped"], |bench| {
            fresh_seeds(bench, Kind::Mapped)
        }),
        of_traces(&["trace_fresh_seeds_plain", "trace_fresh_seeds_p90_plain"], |bench| fresh_seeds(bench, Kind::Plain)),
    ]
}

/// Measures requests that the stream's own memory serves, and the backend's calls that they take the place of.
fn same_stream(bench: &Bench<'_>) -> Result<Vec<Row>> {
    let runtime = bench.runtime()?;
    let device = &runtime.device(0)?;
    let mut loops = Vec::new();
    for (size, bytes) in SIZES {
        for count in bench.thread_counts() {
            loops.push(Loop::new(format!("same_stream_{size}_{count}t"), count, move |_| {
                let stream = device.create_stream()?;
                Ok(Worker::of(move || stream.allocate::<u8>(bytes).map(|block| drop(black_box(block)))))
            }));
            let raw = Loop::new(format!("raw_allocate_free_{size}_{count}t"), count, move |_| {
                let raw = Rc::new(RawCalls::new(&**bench.backend, 0, SMALL)?);
                let settled = Rc::clone(&raw);
                let operation = Worker::of(move || raw.allocate_and_free(bytes));
                Ok(Worker { settle: Box::new(move || settled.synchronize()), ..operation })
            });
            loops.push(raw.with_batch(RAW_BATCH));
        }
    }
    loops.retain(|each| bench.wants(&each.name));
    let times = bench.measure(&loops)?;
    let bar = |name: &str| match (name.starts_with("same_stream"), name.rsplit_once('_')) {
        (true, Some((_, "1t"))) => Bar::AtMost(60.0),
        (true, Some((_, "16t"))) => Bar::AtMost(120.0),
        _ => Bar::None,
    };
    Ok(nanoseconds(&loops, &times, bar))
}

/// Measures blocks that a stream fills: the stream that allocated them, and another one.
fn uses(bench: &Bench<'_>) -> Result<Vec<Row>> {
    let runtime = bench.runtime()?;
    let device = &runtime.device(0)?;
    let mut loops = Vec::new();
    for (size, bytes) in &SIZES[..2] {
        for count in bench.thread_counts() {
            for name in ["own_stream", "other_stream"] {
                let start = move |_| {
                    let allocating = Rc::new(device.create_stream()?);
                    let is_own = name == "own_stream";
                    let using = if is_own { Rc::clone(&allocating) } else { Rc::new(device.create_stream()?) };
                    let settled = [Rc::clone(&allocating), Rc::clone(&using)];
                    let operation = Worker::of(move || {
                        let block = allocating.allocate::<u8>(*bytes)?;
                        using.fill(&block, 1)
                    });
                    let settle = move || settled.iter().try_for_each(|stream| stream.synchronize());
                    Ok(Worker { settle: Box::new(settle), ..operation })
                };
                let batch = (IN_USE / bytes).clamp(4, MOST_USES) as u32;
                loops.push(Loop::new(format!("{name}_{size}_{count}t"), count, start).with_batch(batch));
            }
        }
    }
    loops.retain(|each| bench.wants(&each.name));
    let times = bench.measure(&loops)?;
    Ok(nanoseconds(&loops, &times, |_| Bar::None))
}

fn replace_name(live: usize) -> String {
    format!("replace_{live}_live")
}

/// Measures the replacement of a random block, beside one live block and beside many.
fn replace(bench: &Bench<'_>) -> Result<Vec<Row>> {
    let runtime = bench.runtime()?;
    let mut held = Vec::new();
    for live in [1, MANY].into_iter().filter(|&live| bench.wants(&replace_name(live))) {
        let stream = runtime.device(0)?.create_stream()?;
        let blocks = (0..live).map(|_| stream.allocate::<u8>(SMALL)).collect::<Result<Vec<_>>>()?;
        // One thread at a time uses them.
        held.push((replace_name(live), stream, Mutex::new(blocks)));
    }
    let mut loops = Vec::new();
    for (name, stream, blocks) in &held {
        loops.push(Loop::new(name, 1, move |_| {
            let mut blocks = blocks.lock().unwrap_or_else(PoisonError::into_inner);
            let mut random = SplitMix64::new(1);
            Ok(Worker::of(move || {
                let slot = (random.draw() % blocks.len() as u64) as usize;
                // The old block is freed first.
                drop(blocks.swap_remove(slot));
                blocks.push(stream.allocate(SMALL)?);
                Ok(())
            }))
        }));
    }
    let times = bench.measure(&loops)?;
    Ok(nanoseconds(&loops, &times, |_| Bar::None))
}

/// What traces in a row need on one stream.
struct Needs {
    /// The bytes held, divided by the largest peak of the bytes in use.
    ratio: f64,
    /// MiB that the pool moved after the first trace.
    moved: f64,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Mapped => "mapped",
            Self::Plain => "plain",
        }
    }

    fn bar(self) -> Bar {
        Bar::AtMost(match self {
            Self::Mapped => 1.15,
            Self::Plain => 1.5,
        })
    }

    /// Returns a row of this kind.
    fn row(self, name: &str, value: f64, unit: &'static str, bar: Bar) -> Row {
        Row::new(format!("{name}_{}", self.name()), value, unit, bar)
    }

    /// Returns a stream of a runtime of its own, whose memory is of this kind.
    fn stream(self, bench: &Bench<'_>) -> Result<Stream> {
        if self == Self::Mapped && !bench.backend.capabilities(0)?.mapped_memory {
            return Err(Error::new(ErrorKind::Unsupported, "bench", "device 0 has no mapped memory"));
        }
        let memory = DeviceMemoryOptions::new().with_plain_allocations(self == Self::Plain);
        let options = RuntimeOptions::new().with_device_memory(memory);
        Runtime::with_options(Arc::clone(bench.backend), &options)?.device(0)?.create_stream()
    }

    /// Runs traces in a row on an empty pool.
    fn run(self, bench: &Bench<'_>, seeds: &[u64]) -> Result<Needs> {
        let stream = self.stream(bench)?;
        let mut held = Held::default();
        // After each trace.
        let mut moved = Vec::new();
        for &seed in seeds {
            Trace::log_uniform(seed).measure(&stream, &mut held)?;
            moved.push(stream.runtime().statistics().device_memory.moved_bytes as f64 / MIB);
        }
        Ok(Needs { ratio: held.ratio(), moved: moved.last().unwrap_or(&0.0) - moved.first().unwrap_or(&0.0) })
    }
}

fn three_seeds(bench: &Bench<'_>, kind: Kind) -> Result<Vec<Row>> {
    let needs = kind.run(bench, &[1, 2, 3])?;
    Ok(vec![
        kind.row("trace_three_seeds", needs.ratio, "ratio", kind.bar()),
        kind.row("moved_three_seeds", needs.moved, "MiB", Bar::None),
    ])
}

fn other_triples(bench: &Bench<'_>, kind: Kind) -> Result<Vec<Row>> {
    let triple = |at| kind.run(bench, &[4 + 3 * at, 5 + 3 * at, 6 + 3 * at]);
    let needs = (0..bench.seeds.div_ceil(2)).map(triple).collect::<Result<Vec<_>>>()?;
    let ratios: Vec<f64> = needs.iter().map(|needs| needs.ratio).collect();
    let moved = needs.iter().map(|needs| needs.moved).collect();
    Ok(vec![
        kind.row("trace_others", quantile(ratios.clone(), 0.5), "ratio", kind.bar()),
        kind.row("trace_others_p90", quantile(ratios, 0.9), "ratio", Bar::None),
        kind.row("moved_others", quantile(moved, 0.5), "MiB", Bar::AtMost(64.0)),
    ])
}

/// Runs the trace of one seed three times in a row, for several seeds.
fn same_seed(bench: &Bench<'_>, kind: Kind) -> Result<Vec<Row>> {
    let moved = |seed| Ok(kind.run(bench, &[seed; 3])?.moved);
    let moved = (1..=bench.seeds).map(moved).collect::<Result<_>>()?;
    Ok(vec![kind.row("moved_same_seed", quantile(moved, 0.5), "MiB", Bar::AtMost(64.0))])
}

fn fresh_seeds(bench: &Bench<'_>, kind: Kind) -> Result<Vec<Row>> {
    let ratio = |seed| Ok(kind.run(bench, &[seed])?.ratio);
    let ratios: Vec<f64> = (1..=bench.seeds).map(ratio).collect::<Result<_>>()?;
    Ok(vec![
        kind.row("trace_fresh_seeds", quantile(ratios.clone(), 0.5), "ratio", kind.bar()),
        kind.row("trace_fresh_seeds_p90", quantile(ratios, 0.9), "ratio", Bar::None),
    ])
}
