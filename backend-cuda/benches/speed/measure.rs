//! Alternating bursts of two sides, and the statistics of the pairs.

use std::time::Instant;

use anyhow::Result;

/// The side of a burst.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// The layer's.
    Ours,
    /// The vendor's.
    Raw,
}

/// The number of bursts and calls.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bursts {
    /// Pairs of bursts: one of each side.
    pub(crate) pairs: usize,
    /// Calls in a burst; times are per call.
    pub(crate) calls: usize,
}

/// Times per call in nanoseconds, pair by pair.
#[derive(Debug, Default)]
pub(crate) struct Pairs {
    pub(crate) ours: Vec<f64>,
    pub(crate) raw: Vec<f64>,
}

impl Pairs {
    /// Returns the differences, ours minus raw, in ascending order.
    pub(crate) fn differences(&self) -> Vec<f64> {
        sorted(self.ours.iter().zip(&self.raw).map(|(ours, raw)| ours - raw).collect())
    }

    /// Returns the quotients, ours divided by raw, in ascending order.
    pub(crate) fn quotients(&self) -> Vec<f64> {
        sorted(self.ours.iter().zip(&self.raw).map(|(ours, raw)| ours / raw).collect())
    }
}

/// Runs bursts of both sides in turn. The first side changes every other pair, so that neither profits from warm
/// caches. `prepare` runs before each burst, waits for the streams, and is not timed.
pub(crate) fn alternate(
    bursts: Bursts,
    mut prepare: impl FnMut(Side) -> Result<()>,
    mut ours: impl FnMut(usize) -> Result<()>,
    mut raw: impl FnMut(usize) -> Result<()>,
) -> Result<Pairs> {
    let mut pairs = Pairs::default();
    // Warms up caches, lazily loaded kernels and the clock of an idle GPU.
    let warm = bursts.pairs / 20 + 2;
    for pair in 0..bursts.pairs + warm {
        let order = if pair / 2 % 2 == 0 { [Side::Ours, Side::Raw] } else { [Side::Raw, Side::Ours] };
        for side in order {
            prepare(side)?;
            let ns = match side {
                Side::Ours => burst(bursts.calls, &mut ours)?,
                Side::Raw => burst(bursts.calls, &mut raw)?,
            };
            match side {
                _ if pair < warm => {}
                Side::Ours => pairs.ours.push(ns),
                Side::Raw => pairs.raw.push(ns),
            }
        }
    }
    Ok(pairs)
}

/// Runs bursts of one side, for a row without a counterpart. Returns times per call, in ascending order.
pub(crate) fn alone(
    bursts: Bursts,
    mut prepare: impl FnMut() -> Result<()>,
    mut run: impl FnMut(usize) -> Result<()>,
) -> Result<Vec<f64>> {
    let warm = bursts.pairs / 20 + 2;
    let mut times = Vec::new();
    for turn in 0..bursts.pairs + warm {
        prepare()?;
        let ns = burst(bursts.calls, &mut run)?;
        if turn >= warm {
            times.push(ns);
        }
    }
    Ok(sorted(times))
}

/// Returns nanoseconds per call. The call gets its number.
#[inline]
fn burst(calls: usize, run: &mut impl FnMut(usize) -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    for call in 0..calls {
        run(call)?;
    }
    Ok(start.elapsed().as_nanos() as f64 / calls as f64)
}

/// In ascending order.
pub(crate) fn sorted(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_by(f64::total_cmp);
    values
}

/// Returns the value below which this part of the ascending values lies; NaN if there is no value.
pub(crate) fn quantile(sorted: &[f64], part: f64) -> f64 {
    let place = (sorted.len().saturating_sub(1) as f64 * part).round() as usize;
    sorted.get(place).copied().unwrap_or(f64::NAN)
}

/// Pseudorandom numbers (xorshift), the same in every run.
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Returns a number from -1 to 1.
    pub(crate) fn number(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Fills memory.
    pub(crate) fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let next = self.next().to_le_bytes();
            chunk.copy_from_slice(&next[..chunk.len()]);
        }
    }
}
