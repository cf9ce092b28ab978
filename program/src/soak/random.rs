//! Random choices that can be repeated.

use std::ops::Range;

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

    /// A number of a range that is not empty.
    pub(super) fn within(&mut self, range: Range<u64>) -> u64 {
        range.start + self.next() % (range.end - range.start)
    }

    /// An index into so many, at least one.
    pub(super) fn index(&mut self, length: usize) -> usize {
        self.within(0..length as u64) as usize
    }

    /// True in so many of 100 cases.
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
