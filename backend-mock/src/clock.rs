//! Vector clocks: how many operations of each lane come before a point.
//!
//! A *lane* is a sequence of operations in order: a stream, or the calls of the host. An operation is its lane and its
//! number there. It comes before a point exactly if the point's clock counts as many on that lane.

/// A count for each lane. A lane that is missing counts 0.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Clock(Vec<u64>);

impl Clock {
    pub(crate) fn get(&self, lane: usize) -> u64 {
        self.0.get(lane).copied().unwrap_or(0)
    }

    /// Counts one more operation of a lane, and returns its number.
    pub(crate) fn tick(&mut self, lane: usize) -> u64 {
        if self.0.len() <= lane {
            self.0.resize(lane + 1, 0);
        }
        self.0[lane] += 1;
        self.0[lane]
    }

    /// Sets the count of a lane to 0.
    #[cfg(any(test, feature = "simulated"))]
    pub(crate) fn reset(&mut self, lane: usize) {
        if let Some(count) = self.0.get_mut(lane) {
            *count = 0;
        }
    }

    /// Makes this clock come after everything that comes before `other`.
    pub(crate) fn join(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (own, &count) in self.0.iter_mut().zip(&other.0) {
            *own = count.max(*own);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_join_takes_the_greater_count_of_each_lane() {
        let (mut one, mut other) = (Clock::default(), Clock::default());
        assert_eq!((one.tick(0), one.tick(0), one.tick(1)), (1, 2, 1));
        assert_eq!((other.tick(0), other.tick(3)), (1, 1));
        one.join(&other);
        assert_eq!([0, 1, 2, 3, 4].map(|lane| one.get(lane)), [2, 1, 0, 1, 0]);
        other.join(&one);
        assert_eq!(one, other);
        other.reset(0);
        other.reset(9);
        assert_eq!([0, 1, 2, 3, 9].map(|lane| other.get(lane)), [0, 1, 0, 1, 0]);
    }
}
