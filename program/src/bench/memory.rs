//! The rows of memory: traces on pools of their own. A value is the bytes held, divided by the largest peak of the bytes in use.

use std::time::{Duration, Instant};

use highwater::Result;

use super::report::{Bar, Row};
use super::rounds::quantile;
use super::trace::{self, Event, Held, Memory, Trace};
use super::{Bench, Family};

const SEEDS: [u64; 3] = [1, 2, 3];
/// The seed of the blocks. A simulated first fit holds 1.15, then 1.18, of the largest peak with it.
pub(super) const BLOCKS: u64 = 2;
/// The first of the other seeds of the blocks.
const OTHER_BLOCKS: u64 = 101;
/// Most repetitions of a pass whose time is measured.
const MOST_PASSES: u32 = 3;

pub(super) fn families() -> Vec<Family> {
    let family = |names: &[&str], run| Family { names: names.iter().map(|&name| name.to_owned()).collect(), run };
    vec![
        family(&["trace_three_seeds"], three_seeds),
        family(&["trace_three_seeds_others_median", "trace_three_seeds_others_p90"], other_triples),
        family(&["trace_fresh_seeds", "trace_fresh_seeds_p90"], fresh_seeds),
        family(&["trace_blocks", "trace_blocks_then_odd"], blocks),
        family(&["trace_blocks_others", "trace_blocks_then_odd_others"], other_blocks),
        family(&["pass_three_seeds_1", "pass_three_seeds_2", "pass_three_seeds_3"], passes),
        family(&["pass_same_seed_2", "pass_same_seed_3", "pass_same_seed_growth"], same_seed),
    ]
}

/// Returns the ratio after all traces in a row on a fresh cache.
fn ratio(bench: &Bench<'_>, traces: &[Trace]) -> Result<f64> {
    let runtime = bench.runtime()?;
    let mut held = Held::default();
    traces.iter().try_for_each(|trace| trace.measure(&runtime, &mut held))?;
    Ok(held.ratio())
}

fn three_seeds(bench: &Bench<'_>) -> Result<Vec<Row>> {
    let ratio = ratio(bench, &SEEDS.map(Trace::log_uniform))?;
    Ok(vec![Row::new("trace_three_seeds", ratio, "ratio", Bar::AtMost(1.15))])
}

fn other_triples(bench: &Bench<'_>) -> Result<Vec<Row>> {
    let triple = |first| ratio(bench, &[first, first + 1, first + 2].map(Trace::log_uniform));
    let ratios = (0..bench.seeds.div_ceil(2)).map(|at| triple(4 + 3 * at)).collect::<Result<Vec<f64>>>()?;
    Ok(distribution(["trace_three_seeds_others_median", "trace_three_seeds_others_p90"], ratios))
}

fn fresh_seeds(bench: &Bench<'_>) -> Result<Vec<Row>> {
    let ratios = (1..=bench.seeds).map(|seed| ratio(bench, &[Trace::log_uniform(seed)])).collect::<Result<_>>()?;
    Ok(distribution(["trace_fresh_seeds", "trace_fresh_seeds_p90"], ratios))
}

fn distribution(names: [&str; 2], ratios: Vec<f64>) -> Vec<Row> {
    let [median, p90] = [0.5, 0.9].map(|part| quantile(ratios.clone(), part));
    vec![Row::new(names[0], median, "ratio", Bar::AtMost(1.22)), Row::new(names[1], p90, "ratio", Bar::AtMost(1.35))]
}

/// Returns the ratio after the blocks of six sizes, and the one after the odd blocks too.
fn both_ratios(bench: &Bench<'_>, seed: u64) -> Result<[f64; 2]> {
    let runtime = bench.runtime()?;
    let mut held = Held::default();
    let [six_sizes, odd] = Trace::blocks(seed);
    six_sizes.measure(&runtime, &mut held)?;
    let before = held.ratio();
    odd.measure(&runtime, &mut held)?;
    Ok([before, held.ratio()])
}

fn blocks(bench: &Bench<'_>) -> Result<Vec<Row>> {
    let [before, after] = both_ratios(bench, BLOCKS)?;
    Ok(vec![
        Row::new("trace_blocks", before, "ratio", Bar::AtMost(1.15)),
        Row::new("trace_blocks_then_odd", after, "ratio", Bar::AtMost(1.2)),
    ])
}

fn other_blocks(bench: &Bench<'_>) -> Result<Vec<Row>> {
    let seeds = OTHER_BLOCKS..OTHER_BLOCKS + bench.seeds.div_ceil(10);
    let ratios = seeds.map(|seed| both_ratios(bench, seed)).collect::<Result<Vec<_>>>()?;
    let [before, after] = [0, 1].map(|at| ratios.iter().map(|both| both[at]).fold(0.0, f64::max));
    Ok(vec![
        Row::new("trace_blocks_others", before, "ratio", Bar::AtMost(1.18)),
        Row::new("trace_blocks_then_odd_others", after, "ratio", Bar::AtMost(1.23)),
    ])
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Runs traces in a row on a fresh cache. Returns the time of each and the bytes held after it.
fn run_in_a_row(bench: &Bench<'_>, traces: &[Trace]) -> Result<Vec<(f64, u64)>> {
    let runtime = bench.runtime()?;
    let run = |trace: &Trace| {
        let started = Instant::now();
        let live = trace.run(&runtime)?;
        let time = milliseconds(started.elapsed());
        drop(live);
        Ok((time, runtime.statistics().host.held_bytes))
    };
    traces.iter().map(run).collect()
}

/// Returns the median of each column.
fn medians(runs: &[[f64; 3]]) -> [f64; 3] {
    [0, 1, 2].map(|at| quantile(runs.iter().map(|run| run[at]).collect(), 0.5))
}

fn passes(bench: &Bench<'_>) -> Result<Vec<Row>> {
    let traces = SEEDS.map(Trace::log_uniform);
    let mut runs = Vec::new();
    for _ in 0..bench.rounds.min(MOST_PASSES) {
        let passes = run_in_a_row(bench, &traces)?;
        runs.push([0, 1, 2].map(|at| passes[at].0));
    }
    let rows = (1..).zip(medians(&runs)).zip([60.0, 10.0, 10.0]);
    Ok(rows
        .map(|((pass, time), bar)| Row::new(format!("pass_three_seeds_{pass}"), time, "ms", Bar::AtMost(bar)))
        .collect())
}

fn same_seed(bench: &Bench<'_>) -> Result<Vec<Row>> {
    let traces = [SEEDS[0]; 3].map(Trace::log_uniform);
    let (mut times, mut bars) = (Vec::new(), Vec::new());
    let mut growth = 0.0_f64;
    for _ in 0..bench.rounds.min(MOST_PASSES) {
        let passes = run_in_a_row(bench, &traces)?;
        let held = |at: usize| passes[at].1 as f64;
        // Growth costs as much per byte as in the cold pass.
        let allowed = |at: usize| 1.0 + passes[0].0 * ((held(at) - held(at - 1)) / held(0)).max(0.0);
        times.push([0, 1, 2].map(|at| passes[at].0));
        bars.push([0.0, allowed(1), allowed(2)]);
        growth = growth.max(100.0 * (held(2) - held(0)) / held(0));
    }
    let (times, bars) = (medians(&times), medians(&bars));
    Ok(vec![
        Row::new("pass_same_seed_2", times[1], "ms", Bar::AtMost(bars[1])),
        Row::new("pass_same_seed_3", times[2], "ms", Bar::AtMost(bars[2])),
        Row::new("pass_same_seed_growth", growth, "%", Bar::AtMost(2.0)),
    ])
}

/// Replays a trace file on memory that has no blocks.
pub(super) fn replay(memory: &impl Memory, events: &[Event]) -> Result<Vec<Row>> {
    let mut held = Held::default();
    let started = Instant::now();
    trace::replay(memory, events, &mut held)?;
    let time = milliseconds(started.elapsed());
    Ok(vec![
        Row::new("replay", held.ratio(), "ratio", Bar::None),
        Row::new("replay_held", held.held as f64, "bytes", Bar::None),
        Row::new("replay_peak", held.peak as f64, "bytes", Bar::None),
        Row::new("replay_time", time, "ms", Bar::None),
    ])
}
