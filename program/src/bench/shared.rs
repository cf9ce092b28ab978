//! The rows of shared page-locked memory: making it, opening it in another runtime, and copies from it to the device, next to
//! copies from memory of the pool.

use std::time::Instant;

use highwater::{PinnedSlice, Result, Runtime};

use super::report::{Bar, Row};
use super::rounds::quantile;
use super::{Bench, Family};

/// The bytes on a real device, and on the mock, whose copies the CPU makes.
const BYTES: usize = 1 << 30;
const BYTES_OF_MOCK: usize = 64 << 20;

const NAMES: [&str; 6] =
    ["shared_make", "shared_open", "copy_from_pool", "copy_from_shared", "copy_from_opened", "copy_from_opened_ratio"];

pub(super) fn families() -> Vec<Family> {
    vec![Family { names: NAMES.map(str::to_owned).into(), run }]
}

fn run(bench: &Bench<'_>) -> Result<Vec<Row>> {
    let is_real = bench.backend.identity().real_device;
    let bytes = if is_real { BYTES } else { BYTES_OF_MOCK };
    let mut rounds = Vec::new();
    for _ in 0..bench.rounds {
        rounds.push(round(bench, bytes)?);
    }
    let column = |at: usize| quantile(rounds.iter().map(|round| round[at]).collect(), 0.5);
    // Milliseconds for each GiB, then GB/s, then a ratio.
    let units = ["ms/GiB", "ms/GiB", "GB/s", "GB/s", "GB/s", "ratio"];
    let bar = |name: &str| if name == NAMES[5] { Bar::AtLeast(0.97) } else { Bar::None };
    let rows = NAMES.into_iter().zip(units).enumerate();
    Ok(rows.map(|(at, (name, unit))| Row::new(name, column(at), unit, bar(name))).collect())
}

/// Measures each row once.
fn round(bench: &Bench<'_>, bytes: usize) -> Result<[f64; 6]> {
    let per_gib = |started: Instant| started.elapsed().as_secs_f64() * 1e3 * (1 << 30) as f64 / bytes as f64;
    let (maker, opener) = (bench.runtime()?, bench.runtime()?);
    let pinned = maker.pinned::<u8>(bytes)?;
    let started = Instant::now();
    let shared = maker.pinned_shared::<u8>(bytes)?;
    let made = per_gib(started);
    let ticket = shared.share()?;
    let started = Instant::now();
    let opened = opener.open_pinned::<u8>(&ticket)?;
    let opening = per_gib(started);
    let from_pool = speed(bench, &maker, || (&pinned).into(), bytes)?;
    let from_shared = speed(bench, &maker, || (&shared).into(), bytes)?;
    let from_opened = speed(bench, &opener, || (&opened).into(), bytes)?;
    Ok([made, opening, from_pool, from_shared, from_opened, from_opened / from_pool])
}

/// Returns the GB/s of copies to the first device, for the time of a loop.
fn speed<'b>(
    bench: &Bench<'_>,
    runtime: &Runtime,
    from: impl Fn() -> PinnedSlice<'b, u8>,
    bytes: usize,
) -> Result<f64> {
    let device = runtime.device(0)?;
    let (stream, target) = (device.create_stream()?, device.allocate::<u8>(bytes)?);
    let copy = || stream.copy_to_device(from(), &target);
    copy()?;
    stream.synchronize()?;
    let started = Instant::now();
    let mut copies = 0;
    while copies == 0 || started.elapsed() < bench.duration {
        copy()?;
        stream.synchronize()?;
        copies += 1;
    }
    Ok(f64::from(copies) * bytes as f64 / started.elapsed().as_secs_f64() / 1e9)
}
