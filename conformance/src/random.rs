//! Random shapes and values for cases. Equal seeds give equal numbers, so that a failure can be repeated.

use highwater_hal::SplitMix64;

/// Draws the numbers of a case.
#[derive(Debug, Clone)]
pub(crate) struct Random(SplitMix64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(SplitMix64::new(seed))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0.draw()
    }

    /// Returns a number below `end`, which must be at least 1.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// Returns a number from -1 to 1 in steps of 1/32, which every element type represents exactly.
    pub(crate) fn coarse(&mut self) -> f64 {
        (self.next() % 65) as f64 / 32.0 - 1.0
    }

    /// Returns a number from -1 to 1 with all bits that an `f64` has in this range.
    pub(crate) fn fine(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    }

    pub(crate) fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        for part in bytes.chunks_mut(8) {
            part.copy_from_slice(&self.next().to_le_bytes()[..part.len()]);
        }
        bytes
    }
}
