//! Repeatable random choices: SplitMix64, after Steele, Lea and Flood, "Fast splittable pseudorandom number
//! generators" (OOPSLA 2014).

use std::ops::Range;

#[derive(Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ bits >> 31
    }

    /// Returns a number of a range, which must not be empty.
    pub(super) fn within(&mut self, range: Range<u64>) -> u64 {
        range.start + self.next() % (range.end - range.start)
    }

    /// Returns an index below `length`, which is at least 1.
    pub(super) fn index(&mut self, length: usize) -> usize {
        self.within(0..length as u64) as usize
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
    fn the_sequence_is_the_published_one_and_choices_stay_in_range() {
        // The first outputs for the seed 1234567, as in the reference implementation's test vector.
        let mut random = Random::new(1_234_567);
        let first: [u64; 3] = std::array::from_fn(|_| random.next());
        assert_eq!(first, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
        assert!((0..1000).all(|_| (3..7).contains(&random.within(3..7))));
        assert!((0..1000).all(|_| random.percent(100) && !random.percent(0)));
    }
}
