//! The rows of the pool of BLAS handles: the first handles of a process, and leases.

use highwater::Result;
use highwater_conformance::RawHandle;

use super::report::{Bar, Row};
use super::rounds::{Loop, Worker, quantile};
use super::timing::nanoseconds;
use super::{Bench, Family, first_handle};

/// The rows of fresh processes: name, threads, and whether handles are made before.
const FIRST: [(&str, usize, bool); 4] = [
    ("first_handle_1t", 1, false),
    ("first_handle_16t", 16, false),
    ("warm_handle_1t", 1, true),
    ("warm_handle_16t", 16, true),
];

pub(super) fn families(bench: &Bench<'_>) -> Vec<Family> {
    let counts = bench.thread_counts();
    let name = |name: &'static str| counts.iter().map(move |count| format!("{name}_{count}t"));
    vec![
        Family { names: FIRST.map(|(name, ..)| name.to_owned()).into(), run: first },
        Family { names: name("lease_same_stream").chain(name("lease_owned")).collect(), run: same_stream },
        Family { names: name("lease_other_stream").chain(name("raw_setters")).collect(), run: other_stream },
    ]
}

fn first(bench: &Bench<'_>) -> Result<Vec<Row>> {
    let wanted = FIRST.iter().filter(|(name, ..)| bench.wants(name));
    let mut rows: Vec<_> = wanted.map(|row| (row, Vec::new())).collect();
    for _ in 0..bench.rounds {
        for ((_, threads, warm), times) in &mut rows {
            times.push(first_handle::measure(bench.address, *threads, *warm)?.as_secs_f64() * 1e3);
        }
    }
    let bar = |name| if name == "first_handle_16t" { Bar::AtMost(6.0) } else { Bar::None };
    Ok(rows.into_iter().map(|(&(name, ..), times)| Row::new(name, quantile(times, 0.5), "ms", bar(name))).collect())
}

fn same_stream(bench: &Bench<'_>) -> Result<Vec<Row>> {
    let runtime = bench.runtime()?;
    let device = &runtime.device(0)?;
    let mut loops = Vec::new();
    for count in bench.thread_counts() {
        loops.push(Loop::new(format!("lease_same_stream_{count}t"), count, move |_| {
            let stream = device.create_stream()?;
            Ok(Worker::of(move || stream.blas().map(drop)))
        }));
        loops.push(Loop::new(format!("lease_owned_{count}t"), count, move |_| {
            let stream = device.create_stream()?;
            Ok(Worker::of(move || stream.blas_owned().map(drop)))
        }));
    }
    loops.retain(|each| bench.wants(&each.name));
    let times = bench.measure(&loops)?;
    let bar = |name: &str| match name {
        "lease_same_stream_16t" => Bar::AtMost(14.0),
        "lease_owned_16t" => Bar::AtMost(40.0),
        _ => Bar::None,
    };
    Ok(nanoseconds(&loops, &times, bar))
}

fn other_stream(bench: &Bench<'_>) -> Result<Vec<Row>> {
    let runtime = bench.runtime()?;
    let device = &runtime.device(0)?;
    let mut loops = Vec::new();
    for count in bench.thread_counts() {
        let [lease, raw] = ["lease_other_stream", "raw_setters"].map(|name| format!("{name}_{count}t"));
        if !bench.wants(&lease) && !bench.wants(&raw) {
            continue;
        }
        // A bar needs the raw row of its threads.
        loops.push(Loop::new(lease, count, move |_| {
            let streams = [device.create_stream()?, device.create_stream()?];
            let mut next = 0;
            Ok(Worker::of(move || {
                next = 1 - next;
                streams[next].blas().map(drop)
            }))
        }));
        loops.push(Loop::new(raw, count, |_| {
            let mut handle = RawHandle::new(&**bench.backend, 0)?;
            Ok(Worker::of(move || handle.bind_to_other_stream()))
        }));
    }
    let times = bench.measure(&loops)?;
    let raw = |count: &str| {
        let name = format!("raw_setters_{count}");
        loops.iter().position(|each| each.name == name).map_or(f64::NAN, |at| times[at])
    };
    let bar = |name: &str| match name.strip_prefix("lease_other_stream_") {
        Some(count @ "1t") => Bar::AtMost(raw(count) + 20.0),
        Some(count @ "16t") => Bar::AtMost(raw(count) + 22.0),
        _ => Bar::None,
    };
    Ok(nanoseconds(&loops, &times, bar))
}
