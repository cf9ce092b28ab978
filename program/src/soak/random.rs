//! Repeatable random choices.

use std::ops::Range;
use std::time::Duration;

use highwater::hal::SplitMix64;

#[derive(Debug)]
pub(super) struct Random(SplitMix64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(SplitMix64::new(seed))
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0.draw()
    }

    /// Returns a number of a range, which must not be empty.
    pub(super) fn within(&mut self, range: Range<u64>) -> u64 {
        range.start + self.next() % (range.end - range.start)
    }

    /// Returns an index below `length`, which is at least 1.
    pub(super) fn index(&mut self, length: usize) -> usize {
        self.within(0..length as u64) as usize
    }

    /// Returns a time below a limit, which is at least a microsecond.
    pub(super) fn time(&mut self, limit: Duration) -> Duration {
        Duration::from_micros(self.within(0..limit.as_micros() as u64))
    }

    /// Returns true with a probability of `percent` in 100.
    pub(super) fn percent(&mut self, percent: u64) -> bool {
        self.within(0..100) < percent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_stay_in_range() {
        let mut random = Random::new(1_234_567);
        assert!((0..1000).all(|_| (3..7).contains(&random.within(3..7))));
        assert!((0..1000).all(|_| random.percent(100) && !random.percent(0)));
    }
}
