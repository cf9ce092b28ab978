//! The last uses of each byte, by lane.
//!
//! Bytes with equal uses lie in one segment. A segment keeps, for each lane, the last write and the last read after it.
//! An operation that is not ordered after one of these is not ordered after anything earlier of that lane. An operation
//! that is ordered after the latest is ordered after all.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::observer::{Range, Role, Store};
use crate::operation::Operation;
use crate::races::site::Site;

/// One operation, as kept for a byte that it touched.
#[derive(Debug, Clone)]
pub(crate) struct Access {
    pub(crate) lane: usize,
    /// The number of the operation in its lane.
    pub(crate) number: u64,
    pub(crate) writes: bool,
    /// Whether the memory has no owner from here on.
    pub(crate) frees: bool,
    pub(crate) role: Role,
    pub(crate) site: Arc<Site>,
    /// All that the operation touches here, by the addresses that it uses.
    pub(crate) range: Range,
}

impl Access {
    /// Returns whether the CPU accesses page-locked memory.
    pub(crate) fn is_by_cpu(&self) -> bool {
        self.site.origin.operation == Operation::CpuAccess
    }

    /// Returns the product whose intermediate results the bytes are.
    pub(crate) fn product(&self) -> Option<usize> {
        if let Role::Workspace { product, .. } = self.role { Some(product) } else { None }
    }
}

#[derive(Debug, Clone)]
struct Segment {
    end: u64,
    accesses: Vec<Access>,
}

#[derive(Debug, Default)]
pub(crate) struct Shadow(HashMap<Store, BTreeMap<u64, Segment>>);

impl Shadow {
    /// Notes an access to the bytes from `start` to `end`. Calls `meet` for each earlier access, with the overlap. Then
    /// forgets the `settled` ones, which can conflict with no later access.
    pub(crate) fn touch(
        &mut self,
        store: Store,
        (start, end): (u64, u64),
        access: &Access,
        settled: impl Fn(&Access) -> bool,
        mut meet: impl FnMut(&Access, u64, u64),
    ) {
        let segments = self.0.entry(store).or_default();
        split(segments, start);
        split(segments, end);
        let (mut at, mut gaps) = (start, Vec::new());
        for (&from, segment) in segments.range_mut(start..end) {
            if at < from {
                gaps.push((at, from));
            }
            segment.accesses.iter().for_each(|earlier| meet(earlier, from, segment.end));
            segment.accesses.retain(|earlier| {
                let replaced = earlier.lane == access.lane && (access.writes || !earlier.writes);
                earlier.frees || !(replaced || settled(earlier))
            });
            segment.accesses.push(access.clone());
            at = segment.end;
        }
        if at < end {
            gaps.push((at, end));
        }
        segments.extend(gaps.into_iter().map(|(from, end)| (from, Segment { end, accesses: vec![access.clone()] })));
    }

    /// Shows every access to the bytes from `start` to `end`.
    pub(crate) fn look(&self, store: Store, (start, end): (u64, u64), mut see: impl FnMut(&Access, u64, u64)) {
        let Some(segments) = self.0.get(&store) else { return };
        let first = segments.range(..=start).next_back().map_or(start, |(&from, _)| from);
        for (&from, segment) in segments.range(first..end).filter(|(_, segment)| segment.end > start) {
            segment.accesses.iter().for_each(|access| see(access, from.max(start), segment.end.min(end)));
        }
    }

    /// Forgets the accesses to the bytes from `start` to `end`.
    pub(crate) fn forget(&mut self, store: Store, (start, end): (u64, u64)) {
        let Some(segments) = self.0.get_mut(&store) else { return };
        split(segments, start);
        split(segments, end);
        segments.extract_if(start..end, |_, _| true).for_each(drop);
        if segments.is_empty() {
            self.0.remove(&store);
        }
    }

    #[cfg(test)]
    fn segments(&self) -> usize {
        self.0.values().map(BTreeMap::len).sum()
    }
}

/// Splits the segment that contains `place`, if it begins before.
fn split(segments: &mut BTreeMap<u64, Segment>, place: u64) {
    let Some((_, segment)) = segments.range_mut(..place).next_back() else { return };
    if segment.end > place {
        let behind = segment.clone();
        segment.end = place;
        segments.insert(place, behind);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observer::Space;

    fn access(lane: usize, number: u64, writes: bool) -> Access {
        let range = Range { space: Space::Host, address: 0, bytes: 1 };
        Access { lane, number, writes, frees: false, role: Role::Whole, site: Site::nowhere(), range }
    }

    fn touch(shadow: &mut Shadow, range: (u64, u64), access: &Access) -> Vec<(usize, u64, u64, u64)> {
        let mut met = Vec::new();
        let settled = |_: &Access| false;
        shadow.touch(Store::Host, range, access, settled, |earlier, from, to| {
            met.push((earlier.lane, earlier.number, from, to));
        });
        met
    }

    #[test]
    fn an_access_meets_the_last_write_and_the_last_read_of_each_lane() {
        let mut shadow = Shadow::default();
        assert!(touch(&mut shadow, (0, 100), &access(0, 1, true)).is_empty());
        assert_eq!(touch(&mut shadow, (50, 150), &access(0, 2, false)), [(0, 1, 50, 100)]);
        assert_eq!(touch(&mut shadow, (60, 70), &access(0, 3, false)), [(0, 1, 60, 70), (0, 2, 60, 70)]);
        let met = touch(&mut shadow, (65, 120), &access(1, 1, true));
        let expected = [(0, 1, 65, 70), (0, 3, 65, 70), (0, 1, 70, 100), (0, 2, 70, 100), (0, 2, 100, 120)];
        assert_eq!(met, expected);
        // A write replaces all earlier accesses of its lane.
        touch(&mut shadow, (0, 200), &access(0, 4, true));
        assert_eq!(touch(&mut shadow, (66, 68), &access(2, 1, false)), [(1, 1, 66, 68), (0, 4, 66, 68)]);
    }

    #[test]
    fn what_is_settled_or_forgotten_is_met_no_more() {
        let mut shadow = Shadow::default();
        touch(&mut shadow, (0, 10), &access(0, 1, true));
        let mut met = 0;
        shadow.touch(Store::Host, (0, 10), &access(1, 1, true), |earlier| earlier.lane == 0, |_, _, _| met += 1);
        assert_eq!(met, 1);
        assert_eq!(touch(&mut shadow, (0, 10), &access(2, 1, false)), [(1, 1, 0, 10)]);
        shadow.forget(Store::Host, (2, 4));
        shadow.forget(Store::File(3), (0, 100));
        let mut seen = Vec::new();
        shadow.look(Store::Host, (1, 8), |access, from, to| seen.push((access.lane, from, to)));
        assert_eq!(seen, [(1, 1, 2), (2, 1, 2), (1, 4, 8), (2, 4, 8)]);
        shadow.forget(Store::Host, (0, 10));
        assert_eq!(shadow.segments(), 0);
    }
}
