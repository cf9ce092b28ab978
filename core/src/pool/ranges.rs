//! Runs of pages inside large ranges: which pages are free, and which of them a request gets.
//!
//! Memory is a sequence of *pieces*. A piece is one registration with the backend, a whole number of granules (2 MiB). A
//! piece either continues the address range of the piece before it, or begins a new range. This file knows page numbers
//! only; its user maps them to addresses.
//!
//! *Placement.* A request takes the first free run, by address, that is at most a sixteenth larger than the request. If there
//! is none, it takes the first free run that is large enough. In a simulation of the traces of random sizes this held less memory than best fit,
//! and less than plain first fit where few sizes repeat. Low addresses are preferred, so free
//! memory gathers at the top, where pieces are released.
//!
//! *Borders.* Vendors refuse a copy that crosses from one registration into the next. Runs of up to [`UNDIVIDED_PAGES`] never
//! cross a border; larger ones may, and their copies are split there. A caller that cannot split passes [`Borders::None`].
//!
//! *Free runs* are found in three ways, all exact:
//! - by their ends: the first and the last page of a free run carry its length, so a freed run finds both neighbors at once;
//! - by size: bins of sixteen steps to each power of two, each ordered by address;
//! - by size and address: the lowest run of each bin is stored, so a search reads one number for each bin.
//!
//! Free neighbors always merge, so two free runs never touch, except where a range ends.

use std::collections::BTreeSet;

/// Bytes of a page, the unit of this file.
pub(crate) const PAGE: usize = 4096;
/// Pages of a granule, the unit of pieces.
pub(crate) const GRANULE_PAGES: u32 = 512;
/// Runs of up to this many pages, 4 MiB, never cross a border between pieces.
pub(crate) const UNDIVIDED_PAGES: u32 = 1024;

/// Steps of size to each power of two.
const STEPS_LOG2: u32 = 4;
const STEPS: u32 = 1 << STEPS_LOG2;
/// A number of pages has 32 bits.
const BINS: usize = ((32 - STEPS_LOG2) * STEPS + STEPS) as usize;
/// Runs of the request's own bin that the search for a close fit looks at. The rest of that bin is only searched for a fit.
const CLOSE_TRIES: usize = 32;
/// Part of the request by which a close fit may be larger.
const CLOSE: u32 = 16;

/// Marks the ends of a free run. The other bits are its length.
const FREE: u32 = 1 << 31;
/// The most pages of all pieces together: 8 TiB.
const MOST_PAGES: u32 = FREE - 1;

/// Contiguous pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Run {
    pub(crate) start: u32,
    pub(crate) pages: u32,
}

impl Run {
    pub(crate) fn end(self) -> u32 {
        self.start + self.pages
    }
}

/// Whether a run may cross borders between pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Borders {
    /// It may if it is larger than [`UNDIVIDED_PAGES`].
    Allowed,
    /// It lies inside one piece.
    None,
}

/// How a granule begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Begin {
    /// The granule continues the piece of the one before it.
    Inside,
    /// A piece begins, at the address after the piece before it.
    Border,
    /// A piece begins, at another address.
    Wall,
}

/// The pages of all pieces, free or in use.
#[derive(Debug)]
pub(crate) struct Ranges {
    /// For each page: the length of the free run that it begins or ends, with [`FREE`], or 0.
    ends: Vec<u32>,
    /// For each granule.
    begins: Vec<Begin>,
    bins: Box<[BTreeSet<u32>]>,
    /// The first page of each bin's lowest run; `u32::MAX` for an empty bin.
    lowest: Box<[u32]>,
    free_pages: u32,
    /// Runs of up to this many pages never cross a border.
    undivided_pages: u32,
}

impl Ranges {
    /// `piece_pages` is the size of the largest piece.
    pub(crate) fn new(piece_pages: u32) -> Self {
        Self {
            undivided_pages: piece_pages.min(UNDIVIDED_PAGES),
            ends: Vec::new(),
            begins: Vec::new(),
            bins: vec![BTreeSet::new(); BINS].into(),
            lowest: vec![u32::MAX; BINS].into(),
            free_pages: 0,
        }
    }

    /// Pages of all pieces.
    pub(crate) fn pages(&self) -> u32 {
        self.ends.len() as u32
    }

    /// Pages that are free.
    pub(crate) fn free_pages(&self) -> u32 {
        self.free_pages
    }

    /// Takes a free run of `pages` pages, not 0. Returns `None` if no free run fits.
    pub(crate) fn take(&mut self, pages: u32, borders: Borders) -> Option<u32> {
        let (free, start) = self.find(pages, borders)?;
        self.take_at(free, Run { start, pages });
        Some(start)
    }

    /// Returns the free runs, in no order.
    pub(crate) fn free_runs(&self) -> impl Iterator<Item = Run> + '_ {
        self.bins.iter().flatten().map(|start| self.free_run_at(*start))
    }

    /// Takes exactly this run if it is free.
    pub(crate) fn take_exactly(&mut self, run: Run) -> bool {
        let free = self.free_runs().find(|free| free.start <= run.start && run.end() <= free.end());
        if let Some(free) = free {
            self.take_at(free, run);
        }
        free.is_some()
    }

    /// Frees a run, or a part of one, that [`take`](Self::take) gave, and merges it with its free neighbors.
    pub(crate) fn free(&mut self, run: Run) {
        let mut whole = run;
        if run.start > 0 && !self.is_wall(run.start) {
            let before = self.ends[run.start as usize - 1];
            if before & FREE != 0 {
                let pages = before & !FREE;
                whole = Run { start: run.start - pages, pages: whole.pages + pages };
                self.remove(Run { start: whole.start, pages });
            }
        }
        if run.end() < self.pages() && !self.is_wall(run.end()) {
            let after = self.ends[run.end() as usize];
            if after & FREE != 0 {
                let pages = after & !FREE;
                whole.pages += pages;
                self.remove(Run { start: run.end(), pages });
            }
        }
        self.insert(whole);
    }

    /// Returns how many pages a growth for this request must add at least, if the new piece continues the last one's
    /// address range. The free run at the top counts if the request may cross the border.
    pub(crate) fn shortfall(&self, pages: u32, borders: Borders) -> u32 {
        let top = self.pages() - self.top();
        if self.must_be_undivided(pages, borders) { pages } else { pages.saturating_sub(top).max(1) }
    }

    /// As [`shortfall`](Self::shortfall), for a growth in the place of removed pieces. The free runs at both ends of the place
    /// count, if `continues`: the new memory continues their addresses. Returns a whole number of granules, or `None` if the place
    /// is too small.
    pub(crate) fn shortfall_in(&self, place: Run, continues: bool, pages: u32, borders: Borders) -> Option<u32> {
        let around = if continues && !self.must_be_undivided(pages, borders) { self.free_around(place) } else { place };
        let before = place.start - around.start;
        let more = pages.saturating_sub(before).max(1).checked_next_multiple_of(GRANULE_PAGES)?;
        if more <= place.pages {
            return Some(more);
        }
        (around.pages >= pages).then_some(place.pages)
    }

    /// Returns the place of removed pieces with the free runs at both its ends.
    pub(crate) fn free_around(&self, place: Run) -> Run {
        let free = |at: u32, end: u32| if end & FREE != 0 && !self.is_wall(at) { end & !FREE } else { 0 };
        let before = place.start.checked_sub(1).map_or(0, |last| free(place.start, self.ends[last as usize]));
        let after = self.ends.get(place.end() as usize).map_or(0, |end| free(place.end(), *end));
        Run { start: place.start - before, pages: before + place.pages + after }
    }

    /// Returns the first page of the free run at the end, or the number of pages if there is none.
    pub(crate) fn top(&self) -> u32 {
        self.pages() - self.ends.last().map_or(0, |end| if end & FREE != 0 { end & !FREE } else { 0 })
    }

    /// Adds a piece of whole granules at the end, all of it free. Returns its first page, or `None` if the pages are too many.
    /// `continues` says whether its address is the end of the last piece's.
    pub(crate) fn add_piece(&mut self, pages: u32, continues: bool) -> Option<u32> {
        debug_assert!(pages > 0 && pages.is_multiple_of(GRANULE_PAGES));
        let start = self.pages();
        let end = start.checked_add(pages).filter(|end| *end <= MOST_PAGES)?;
        self.ends.resize(end as usize, 0);
        let begin = if continues && start > 0 { Begin::Border } else { Begin::Wall };
        self.begins.push(begin);
        self.begins.resize((end / GRANULE_PAGES) as usize, Begin::Inside);
        self.free(Run { start, pages });
        Some(start)
    }

    /// Adds a piece of whole granules in the place of removed pieces, which the caller has taken. All of it is free then.
    ///
    /// `is_same_address` says whether its address follows from that of its neighbors.
    pub(crate) fn replace_piece(&mut self, piece: Run, is_same_address: bool) {
        let end = (piece.end() / GRANULE_PAGES) as usize;
        let mut begin = |granule: usize, inside: bool| {
            if let Some(begin) = self.begins.get_mut(granule) {
                *begin = match *begin {
                    _ if inside => Begin::Inside,
                    Begin::Wall => Begin::Wall,
                    _ if is_same_address => Begin::Border,
                    _ => Begin::Wall,
                };
            }
        };
        let first = (piece.start / GRANULE_PAGES) as usize;
        begin(first, false);
        (first + 1..end).for_each(|granule| begin(granule, true));
        begin(end, false);
        self.free(piece);
    }

    /// Returns the first pages of the pieces that begin inside a run, after its first page.
    pub(crate) fn borders(&self, run: Run) -> impl Iterator<Item = u32> + '_ {
        (run.start / GRANULE_PAGES + 1..run.end().div_ceil(GRANULE_PAGES))
            .filter(|granule| self.begins[*granule as usize] != Begin::Inside)
            .map(|granule| granule * GRANULE_PAGES)
    }

    /// Removes the last piece, which the caller has taken whole.
    pub(crate) fn remove_last_piece(&mut self, piece: Run) {
        debug_assert_eq!(piece.end(), self.pages());
        self.ends.truncate(piece.start as usize);
        self.begins.truncate((piece.start / GRANULE_PAGES) as usize);
    }

    /// Returns whether a piece at this page may begin at another address than the one before it ends.
    pub(crate) fn begins_range(&self, page: u32) -> bool {
        page == self.pages() || self.is_wall(page)
    }

    // ---------------------------------------------------------------- search

    /// The free run that a request uses, and the first page of the request inside it.
    fn find(&self, pages: u32, borders: Borders) -> Option<(Run, u32)> {
        let undivided = self.must_be_undivided(pages, borders);
        let place = |start: u32| {
            let free = self.free_run_at(start);
            (free.pages >= pages).then(|| self.place_in(free, pages, undivided)).flatten().map(|start| (free, start))
        };
        let own = bin_of(pages);
        // A close fit: in the request's own bin, or in one of the next two.
        let most = pages.saturating_add(pages / CLOSE);
        let close = (own..=bin_of(most))
            .filter(|bin| self.lowest[*bin] != u32::MAX)
            .filter_map(|bin| {
                let tries = self.bins[bin].iter().take(CLOSE_TRIES);
                tries.filter_map(|start| place(*start)).find(|(free, _)| free.pages <= most)
            })
            .min_by_key(|(_, start)| *start);
        if close.is_some() {
            return close;
        }
        // The lowest run of any bin.
        let mut first: Option<(Run, u32)> = None;
        for bin in own..BINS {
            if self.lowest[bin] < first.map_or(u32::MAX, |(_, start)| start) {
                let found = self.bins[bin].iter().find_map(|start| place(*start));
                if let Some(found) = found
                    && first.is_none_or(|(_, start)| found.1 < start)
                {
                    first = Some(found);
                }
            }
        }
        first
    }

    fn must_be_undivided(&self, pages: u32, borders: Borders) -> bool {
        borders == Borders::None || pages <= self.undivided_pages
    }

    /// The first place for so many pages in a free run that is large enough.
    fn place_in(&self, free: Run, pages: u32, undivided: bool) -> Option<u32> {
        if !undivided {
            return Some(free.start);
        }
        let mut start = free.start;
        while start + pages <= free.end() {
            match self.borders(Run { start, pages }).next() {
                Some(border) => start = border,
                None => return Some(start),
            }
        }
        None
    }

    // ---------------------------------------------------------------- free runs

    /// The free run that begins at a page.
    fn free_run_at(&self, start: u32) -> Run {
        Run { start, pages: self.ends[start as usize] & !FREE }
    }

    fn is_wall(&self, page: u32) -> bool {
        page.is_multiple_of(GRANULE_PAGES) && self.begins[(page / GRANULE_PAGES) as usize] == Begin::Wall
    }

    /// Takes a part of a free run.
    fn take_at(&mut self, free: Run, taken: Run) {
        self.remove(free);
        if taken.start > free.start {
            self.insert(Run { start: free.start, pages: taken.start - free.start });
        }
        if taken.end() < free.end() {
            self.insert(Run { start: taken.end(), pages: free.end() - taken.end() });
        }
    }

    fn insert(&mut self, run: Run) {
        self.ends[run.start as usize] = FREE | run.pages;
        self.ends[run.end() as usize - 1] = FREE | run.pages;
        self.free_pages += run.pages;
        let bin = bin_of(run.pages);
        self.bins[bin].insert(run.start);
        self.lowest[bin] = self.lowest[bin].min(run.start);
    }

    fn remove(&mut self, run: Run) {
        self.ends[run.start as usize] = 0;
        self.ends[run.end() as usize - 1] = 0;
        self.free_pages -= run.pages;
        let bin = bin_of(run.pages);
        self.bins[bin].remove(&run.start);
        if self.lowest[bin] == run.start {
            self.lowest[bin] = self.bins[bin].first().copied().unwrap_or(u32::MAX);
        }
    }
}

/// The bin of runs of so many pages: a bin for each number below 32, then sixteen bins to each power of two.
fn bin_of(pages: u32) -> usize {
    let log2 = pages.max(1).ilog2();
    if log2 <= STEPS_LOG2 {
        return pages as usize;
    }
    let step = log2 - STEPS_LOG2;
    (step * STEPS + (pages >> step)) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bins_are_in_the_order_of_sizes_and_sixteen_to_each_power_of_two() {
        let mut last = 0;
        for pages in 1..100_000 {
            let bin = bin_of(pages);
            assert!(bin == last || bin == last + 1, "{pages}");
            last = bin;
        }
        assert_eq!(bin_of(1 << 20) - bin_of(1 << 19), 16);
        assert!(bin_of(u32::MAX) < BINS);
    }

    #[test]
    fn a_close_fit_comes_before_a_lower_address() {
        let mut ranges = Ranges::new(u32::MAX);
        ranges.add_piece(512, false).unwrap();
        let runs: Vec<_> = [100, 1, 32, 1].map(|pages| (ranges.take(pages, Borders::Allowed).unwrap(), pages)).into();
        for (start, pages) in [runs[0], runs[2]] {
            ranges.free(Run { start, pages });
        }
        assert_eq!(ranges.take(31, Borders::Allowed), Some(runs[2].0));
        assert_eq!(ranges.take(31, Borders::Allowed), Some(0));
    }

    #[test]
    fn small_runs_cross_no_border_and_large_ones_may() {
        let mut ranges = Ranges::new(u32::MAX);
        ranges.add_piece(512, false).unwrap();
        ranges.add_piece(1024, true).unwrap();
        // 412 pages are left in the first piece.
        assert_eq!(ranges.take(100, Borders::Allowed), Some(0));
        assert_eq!(ranges.take(500, Borders::Allowed), Some(512));
        ranges.free(Run { start: 512, pages: 500 });
        assert_eq!(ranges.take(1025, Borders::None), None);
        assert_eq!(ranges.take(1025, Borders::Allowed), Some(100));
    }

    #[test]
    fn ranges_that_do_not_touch_do_not_merge() {
        let mut ranges = Ranges::new(u32::MAX);
        ranges.add_piece(1024, false).unwrap();
        ranges.add_piece(1024, false).unwrap();
        assert_eq!(ranges.take(1536, Borders::Allowed), None);
        assert_eq!(ranges.shortfall(1536, Borders::Allowed), 512);
        ranges.add_piece(512, true).unwrap();
        assert_eq!(ranges.take(1536, Borders::Allowed), Some(1024));
    }

    /// What each page is: in which run that was given out, or free.
    #[derive(Default)]
    struct Model {
        pages: Vec<Option<usize>>,
        begins: Vec<Begin>,
        runs: Vec<Option<Run>>,
    }

    impl Model {
        fn begin_of(&self, page: u32) -> Begin {
            if page.is_multiple_of(GRANULE_PAGES) {
                self.begins[(page / GRANULE_PAGES) as usize]
            } else {
                Begin::Inside
            }
        }

        /// Whether a run of so many pages could lie here.
        fn fits(&self, start: u32, pages: u32, borders: Borders) -> bool {
            let undivided = borders == Borders::None || pages <= UNDIVIDED_PAGES;
            start + pages <= self.pages.len() as u32
                && (start..start + pages).all(|page| {
                    let begin = if page == start { Begin::Inside } else { self.begin_of(page) };
                    self.pages[page as usize].is_none()
                        && (begin == Begin::Inside || (begin == Begin::Border && !undivided))
                })
        }

        fn check(&self, ranges: &Ranges) {
            assert_eq!(ranges.pages() as usize, self.pages.len());
            assert_eq!(ranges.free_pages() as usize, self.pages.iter().filter(|page| page.is_none()).count());
            let runs: Vec<_> = ranges.free_runs().collect();
            for run in &runs {
                assert!((run.start..run.end()).all(|page| self.pages[page as usize].is_none()));
                let ends = |at: u32| at == 0 || at == ranges.pages() || self.begin_of(at) == Begin::Wall;
                assert!(ends(run.start) || self.pages[run.start as usize - 1].is_some(), "{run:?} has a free neighbor");
                assert!(ends(run.end()) || self.pages[run.end() as usize].is_some(), "{run:?} has a free neighbor");
            }
            for (bin, starts) in ranges.bins.iter().enumerate() {
                assert_eq!(ranges.lowest[bin], starts.first().copied().unwrap_or(u32::MAX));
            }
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Take(u32, bool),
        Free(usize),
        Grow(u32, bool),
        Release,
    }

    fn step() -> impl Strategy<Value = Step> {
        let pages = prop_oneof![4 => 1_u32..40, 2 => 1_u32..600, 1 => 900_u32..1600];
        prop_oneof![
            6 => (pages, any::<bool>()).prop_map(|(pages, whole)| Step::Take(pages, whole)),
            5 => any::<usize>().prop_map(Step::Free),
            1 => (1_u32..4, any::<bool>()).prop_map(|(granules, continues)| Step::Grow(granules, continues)),
            1 => Just(Step::Release),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// A request is refused only if it fits nowhere; runs never overlap; free neighbors are merged.
        #[test]
        fn runs_are_exact(steps in proptest::collection::vec(step(), 1..120)) {
            let (mut ranges, mut model) = (Ranges::new(u32::MAX), Model::default());
            for step in steps {
                match step {
                    Step::Take(pages, whole) => {
                        let borders = if whole { Borders::None } else { Borders::Allowed };
                        match ranges.take(pages, borders) {
                            Some(start) => {
                                prop_assert!(model.fits(start, pages, borders), "{start} {pages}");
                                let number = model.runs.len();
                                model.pages[start as usize..(start + pages) as usize].fill(Some(number));
                                model.runs.push(Some(Run { start, pages }));
                            }
                            None => {
                                let all = 0..model.pages.len() as u32;
                                prop_assert!(!all.into_iter().any(|start| model.fits(start, pages, borders)), "{pages}");
                            }
                        }
                    }
                    Step::Free(which) => {
                        let count = model.runs.len().max(1);
                        if let Some(run) = model.runs.get_mut(which % count).and_then(Option::take) {
                            model.pages[run.start as usize..run.end() as usize].fill(None);
                            ranges.free(run);
                        }
                    }
                    Step::Grow(granules, continues) => {
                        let pages = granules * GRANULE_PAGES;
                        let start = ranges.add_piece(pages, continues).unwrap();
                        prop_assert_eq!(start as usize, model.pages.len());
                        model.begins.push(if continues && start > 0 { Begin::Border } else { Begin::Wall });
                        model.pages.resize(model.pages.len() + pages as usize, None);
                        model.begins.resize(model.pages.len() / GRANULE_PAGES as usize, Begin::Inside);
                    }
                    Step::Release => {
                        let last = model.begins.iter().rposition(|begin| *begin != Begin::Inside);
                        let Some(last) = last else { continue };
                        let start = last as u32 * GRANULE_PAGES;
                        let piece = Run { start, pages: ranges.pages() - start };
                        let is_free = model.pages[start as usize..].iter().all(Option::is_none);
                        prop_assert_eq!(ranges.take_exactly(piece), is_free);
                        if is_free {
                            ranges.remove_last_piece(piece);
                            model.pages.truncate(start as usize);
                            model.begins.truncate(last);
                        }
                    }
                }
                model.check(&ranges);
            }
        }
    }
}
