//! The pieces of a pool and the pages in them: which addresses are free, which of them a request gets, and where pieces that were
//! released leave a place.
//!
//! A piece is memory that the backend made in one call. Pieces are numbered by pages ([`Ranges`]), and small requests share slabs
//! ([`Slabs`]). A piece whose pages are all free can be taken out and released.
//!
//! | state of a piece | where | leaves by |
//! | --- | --- | --- |
//! | held | its pages are free or in places | [`Area::take_piece`] and the like, once all its pages are free |
//! | leaving | out of the free pages; nothing is placed there | the release: it is gone, stays, or is a remnant |
//! | remnant | the backend knows it no more, the system has not taken its pages back | a retry |
//!
//! The pages of a piece that is gone are a *hole*, which a later piece can fill. Holes at the end vanish.
//!
//! This file makes no calls and holds no lock. Page-locked memory and device memory use it, each with its own addresses.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Instant;

use super::ranges::{Borders, GRANULE_PAGES, PAGE, Ranges, Run};
use super::slabs::{self, SLAB_PAGES, Slabs};

pub(crate) fn bytes_of(pages: u32) -> usize {
    pages as usize * PAGE
}

fn pages_of(bytes: usize) -> u32 {
    // A piece has fewer pages than the pool can count.
    (bytes / PAGE) as u32
}

/// An address of a kind of memory.
pub(crate) trait Address: Copy + Ord + fmt::Debug {
    /// Returns the address as a number.
    fn number(self) -> u64;
    /// Returns the address `bytes` higher.
    fn plus(self, bytes: usize) -> Self;
}

/// Memory that the backend made in one call, a whole number of granules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece<A> {
    pub(crate) ptr: A,
    pub(crate) bytes: usize,
}

/// The addresses of released pieces that lie before other pieces.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Hole<A> {
    pub(crate) pages: u32,
    pub(crate) ptr: A,
}

/// A piece that is about to be released.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Leaving<A> {
    pub(crate) piece: Piece<A>,
    pub(crate) run: Run,
}

/// A request for a block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request {
    pub(crate) pages: u32,
    /// Bytes that the program requested.
    pub(crate) bytes: usize,
    pub(crate) borders: Borders,
}

impl Request {
    /// Returns the size by which lists of free blocks find a block.
    #[inline]
    pub(crate) fn size(&self) -> u32 {
        slabs::size_of_request(self.bytes, self.pages)
    }
}

/// The plan of a growth, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan<A> {
    /// The first page of released pieces in whose place the new memory begins, and the place.
    pub(crate) hole: Option<(u32, Hole<A>)>,
    /// The pages whose free runs the new memory extends.
    pub(crate) counts_on: Run,
    /// The last piece.
    pub(crate) last: Option<Piece<A>>,
    /// The bytes that the request needs: `more` if the new memory continues the last piece, else `whole`. With a hole, `whole`.
    pub(crate) more: usize,
    pub(crate) whole: usize,
    /// True if the request needs one piece, which may be larger than others.
    pub(crate) is_undivided: bool,
}

/// The memory that a request got.
#[derive(Debug)]
pub(crate) struct Place<A> {
    pub(crate) ptr: A,
    /// Its first page, or that of its slab.
    pub(crate) start: u32,
    /// As [`Request::size`].
    pub(crate) size: u32,
    /// Offsets of the pieces that begin inside.
    pub(crate) borders: Vec<usize>,
}

/// A piece in use.
#[derive(Debug, Clone, Copy)]
struct Held<A> {
    piece: Piece<A>,
    /// The time of the last request or release in it, in milliseconds, if idle memory is released after a time.
    used: u64,
}

/// The pieces of a pool, and the free pages in them.
#[derive(Debug)]
pub(crate) struct Area<A> {
    /// The start of the times, if idle memory is released after a time.
    clock: Option<Instant>,
    /// The time of the last release of old memory.
    pub(crate) swept: u64,
    /// True if a growth can continue the last piece. False if the backend chooses the addresses.
    is_reserved: bool,
    ranges: Ranges,
    slabs: Slabs,
    /// By first page.
    pieces: BTreeMap<u32, Held<A>>,
    holes: BTreeMap<u32, Hole<A>>,
    leaving: BTreeMap<u32, Piece<A>>,
    remnants: BTreeMap<u32, Piece<A>>,
    held_bytes: u64,
}

impl<A: Address> Area<A> {
    /// `piece_pages` is the size of the largest piece. `has_times` says whether the uses of pieces are timed.
    pub(crate) fn new(piece_pages: u32, is_reserved: bool, has_times: bool) -> Self {
        Self {
            clock: has_times.then(Instant::now),
            swept: 0,
            is_reserved,
            ranges: Ranges::new(piece_pages),
            slabs: Slabs::default(),
            pieces: BTreeMap::new(),
            holes: BTreeMap::new(),
            leaving: BTreeMap::new(),
            remnants: BTreeMap::new(),
            held_bytes: 0,
        }
    }

    // ---------------------------------------------------------------- counts

    /// Bytes of the pieces in use.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// The number of pieces in use.
    pub(crate) fn pieces(&self) -> u64 {
        self.pieces.len() as u64
    }

    /// Returns whether there is no piece, not even one that is leaving.
    pub(crate) fn is_empty(&self) -> bool {
        self.pieces.is_empty() && self.leaving.is_empty()
    }

    /// Bytes of free pages.
    pub(crate) fn free_bytes(&self) -> u64 {
        bytes_of(self.ranges.free_pages()) as u64
    }

    /// Bytes of slabs that are in no place.
    pub(crate) fn slab_bytes(&self) -> u64 {
        self.slabs.unused_bytes()
    }

    /// The number and the bytes of the remnants.
    pub(crate) fn remnants(&self) -> (u64, u64) {
        (self.remnants.len() as u64, self.remnants.values().map(|piece| piece.bytes as u64).sum())
    }

    /// Returns the time in milliseconds, if idle memory is released after a time.
    pub(crate) fn now(&self) -> u64 {
        self.clock.map_or(0, |clock| u64::try_from(clock.elapsed().as_millis()).unwrap_or(u64::MAX - 1))
    }

    // ---------------------------------------------------------------- places

    /// Returns whether a request needs no new slab.
    pub(crate) fn needs_no_slab(&self, request: Request) -> bool {
        !slabs::is_small(request.bytes) || self.slabs.has(request.bytes)
    }

    /// Takes free pages, or a part of a slab.
    pub(crate) fn take(&mut self, request: Request) -> Option<Place<A>> {
        if slabs::is_small(request.bytes)
            && let Some(place) = self.take_small(request.bytes)
        {
            return Some(place);
        }
        let run = Run { start: self.ranges.take(request.pages, request.borders)?, pages: request.pages };
        let ptr = self.address_of(run)?;
        self.note_use(run);
        let borders = self.ranges.borders(run).map(|page| bytes_of(page - run.start)).collect();
        Some(Place { ptr, start: run.start, size: request.pages, borders })
    }

    /// Takes a part of a slab. Returns `None` if no slab has one and no free run is large enough for a slab.
    fn take_small(&mut self, bytes: usize) -> Option<Place<A>> {
        let (run, offset) = match self.slabs.take(bytes) {
            Some(taken) => taken,
            None => {
                let start = self.ranges.take(SLAB_PAGES, Borders::None)?;
                self.slabs.add(start, bytes);
                self.slabs.take(bytes)?
            }
        };
        let ptr = self.address_of(run)?.plus(offset);
        self.note_use(run);
        Some(Place { ptr, start: run.start, size: slabs::size_of_request(bytes, 1), borders: Vec::new() })
    }

    /// Frees the place at an address: this run, or a part of it if it is a slab.
    pub(crate) fn free(&mut self, run: Run, ptr: A, is_in_slab: bool) {
        self.note_use(run);
        if is_in_slab {
            let Some(slab) = self.address_of(run) else { return };
            if !self.slabs.free(run.start, (ptr.number() - slab.number()) as usize) {
                return;
            }
        }
        self.ranges.free(run);
    }

    /// Returns the address of a run, which is in use.
    fn address_of(&self, run: Run) -> Option<A> {
        let (first, held) = self.pieces.range(..=run.start).next_back()?;
        Some(held.piece.ptr.plus(bytes_of(run.start - first)))
    }

    /// Notes that the pieces of a run are used now.
    fn note_use(&mut self, run: Run) {
        if self.clock.is_some() {
            let now = self.now();
            let first = self.pieces.range(..=run.start).next_back().map_or(run.start, |(page, _)| *page);
            self.pieces.range_mut(first..run.end()).for_each(|(_, held)| held.used = now);
        }
    }

    // ---------------------------------------------------------------- growth

    /// Returns the hole that a growth for a request uses, with the pages that it adds there, unless a growth at the end adds fewer.
    fn hole_for(&self, request: Request) -> Option<(u32, u32, Hole<A>)> {
        let Request { pages, borders, .. } = request;
        let fits = |(page, hole): (&u32, &Hole<A>)| {
            let place = Run { start: *page, pages: hole.pages };
            Some((self.ranges.shortfall_in(place, self.is_reserved, pages, borders)?, *page, *hole))
        };
        let best = self.holes.iter().filter_map(fits).min_by_key(|(more, page, _)| (*more, *page));
        best.filter(|(more, ..)| !self.is_reserved || *more <= self.shortfall_at_end(request))
    }

    /// Returns the pages that a growth at the end adds, if its memory continues the last piece.
    fn shortfall_at_end(&self, request: Request) -> u32 {
        self.ranges.shortfall(request.pages, request.borders).next_multiple_of(GRANULE_PAGES)
    }

    /// Returns the bytes by which the pool grows for a request, unless the growth begins a new range.
    pub(crate) fn shortfall(&self, request: Request) -> usize {
        let whole = || request.pages.next_multiple_of(GRANULE_PAGES);
        let at_end = || if self.is_reserved { self.shortfall_at_end(request) } else { whole() };
        bytes_of(self.hole_for(request).map_or_else(at_end, |(more, ..)| more))
    }

    /// Returns the plan of a growth for a request. `None` if the pool cannot count so many pages. The hole of the plan has no
    /// other user until [`Area::add`].
    pub(crate) fn plan(&mut self, request: Request) -> Option<Plan<A>> {
        let whole = request.pages.checked_next_multiple_of(GRANULE_PAGES)?;
        self.ranges.pages().checked_add(whole).filter(|pages| *pages < 1 << 31)?;
        let more = self.shortfall_at_end(request);
        let hole = self.hole_for(request);
        if let Some((_, page, _)) = hole {
            self.holes.remove(&page);
        }
        let top = self.ranges.top();
        let at_end = Run { start: top, pages: self.ranges.pages() - top };
        let around =
            |(_, page, hole): (u32, u32, Hole<A>)| self.ranges.free_around(Run { start: page, pages: hole.pages });
        Some(Plan {
            hole: hole.map(|(_, page, hole)| (page, hole)),
            counts_on: hole.map_or(at_end, around),
            last: self.last_placed().map(|(_, last)| last),
            more: bytes_of(more),
            whole: bytes_of(hole.map_or(whole, |(more, ..)| more)),
            is_undivided: request.borders == Borders::None,
        })
    }

    /// Gives up a plan: its hole is free again.
    pub(crate) fn cancel(&mut self, plan: &Plan<A>) {
        if let Some((page, hole)) = plan.hole {
            self.vacate(page, hole);
        }
    }

    /// Adds the pieces of a growth, in the place of the plan's hole if there is one. Returns how many there are.
    pub(crate) fn add(&mut self, pieces: &[Piece<A>], hole: Option<(u32, Hole<A>)>) -> u64 {
        let mut next = hole.map(|(page, _)| page);
        let mut added = 0;
        for piece in pieces {
            let pages = pages_of(piece.bytes);
            let start = match &mut next {
                Some(next) => {
                    let start = *next;
                    *next += pages;
                    self.ranges.replace_piece(Run { start, pages }, self.is_reserved);
                    Some(start)
                }
                None => {
                    // The last piece may have been released since the growth was planned. Then the addresses have a gap.
                    let continues = self.last_placed().is_some_and(|(page, last)| {
                        page + pages_of(last.bytes) == self.ranges.pages() && last.ptr.plus(last.bytes) == piece.ptr
                    });
                    self.ranges.add_piece(pages, self.is_reserved && continues)
                }
            };
            // The plan has left room for the pages.
            let Some(start) = start else { continue };
            let used = self.now();
            self.pieces.insert(start, Held { piece: *piece, used });
            self.held_bytes += piece.bytes as u64;
            added += 1;
        }
        if let (Some((first, hole)), Some(next)) = (hole, next) {
            let used = next - first;
            if used < hole.pages {
                self.vacate(next, Hole { pages: hole.pages - used, ptr: hole.ptr.plus(bytes_of(used)) });
            }
        }
        added
    }

    /// Returns the piece with the last pages, in use or on its way out, with its first page.
    fn last_placed(&self) -> Option<(u32, Piece<A>)> {
        let last = self.pieces.last_key_value().map(|(page, held)| (*page, held.piece));
        let others = [&self.leaving, &self.remnants].map(BTreeMap::last_key_value);
        let others = others.into_iter().flatten().map(|(page, piece)| (*page, *piece));
        others.chain(last).max_by_key(|(page, _)| *page)
    }

    // ---------------------------------------------------------------- releases

    /// Takes the last free piece out whose first page is below a number and that was last used before a time. Lowers the number to
    /// that page.
    pub(crate) fn take_piece(&mut self, below: &mut u32, time: u64) -> Option<Leaving<A>> {
        let last =
            |run: Run| self.last_piece_in(Run { pages: run.end().min(*below) - run.start, ..run }, run.end(), time);
        let runs = self.ranges.free_runs().filter(|run| run.start < *below);
        let leaving = runs.filter_map(last).max_by_key(|leaving| leaving.run.start)?;
        *below = leaving.run.start;
        self.take_out(&leaving).then_some(leaving)
    }

    /// Takes the last piece of the smallest free run out that contains one and has no page of `kept`.
    pub(crate) fn take_scattered_piece(&mut self, kept: Option<Run>) -> Option<Leaving<A>> {
        let is_kept = |run: &Run| kept.is_some_and(|kept| kept.start < run.end() && run.start < kept.end());
        let last = |run: Run| self.last_piece_in(run, run.end(), u64::MAX).map(|leaving| (run, leaving));
        let runs = self.ranges.free_runs().filter(|run| !is_kept(run));
        let smallest = runs.filter_map(last).min_by_key(|(run, _)| (run.pages, Reverse(run.start)));
        let (_, leaving) = smallest?;
        self.take_out(&leaving).then_some(leaving)
    }

    /// Returns the last piece that begins in a run, ends at a page or before, and was last used before a time.
    fn last_piece_in(&self, run: Run, end: u32, time: u64) -> Option<Leaving<A>> {
        let leaving = |(page, held): (&u32, &Held<A>)| {
            let leaving = Leaving { piece: held.piece, run: Run { start: *page, pages: pages_of(held.piece.bytes) } };
            (leaving.run.end() <= end && held.used < time).then_some(leaving)
        };
        self.pieces.range(run.start..run.end()).rev().find_map(leaving)
    }

    /// Takes the smallest free piece out that has at least so many bytes.
    pub(crate) fn take_smallest_piece(&mut self, bytes: usize) -> Option<Leaving<A>> {
        let is_free = |page: u32, held: &Held<A>| {
            let run = self.ranges.free_runs().find(|run| run.start <= page && page < run.end());
            run.is_some_and(|run| page + pages_of(held.piece.bytes) <= run.end())
        };
        let fits = self.pieces.iter().filter(|(page, held)| held.piece.bytes >= bytes && is_free(**page, held));
        let (page, held) = fits.min_by_key(|(_, held)| held.piece.bytes)?;
        let leaving = Leaving { piece: held.piece, run: Run { start: *page, pages: pages_of(held.piece.bytes) } };
        self.take_out(&leaving).then_some(leaving)
    }

    /// Takes the piece out that begins at an address, if all of it is free.
    pub(crate) fn take_piece_at(&mut self, ptr: A) -> Option<Leaving<A>> {
        let (page, held) = self.pieces.iter().rev().find(|(_, held)| held.piece.ptr == ptr)?;
        let leaving = Leaving { piece: held.piece, run: Run { start: *page, pages: pages_of(held.piece.bytes) } };
        self.take_out(&leaving).then_some(leaving)
    }

    /// Takes a piece out if all of it is free.
    pub(crate) fn take_out(&mut self, leaving: &Leaving<A>) -> bool {
        let is_free = self.ranges.take_exactly(leaving.run);
        if is_free {
            self.pieces.remove(&leaving.run.start);
            self.leaving.insert(leaving.run.start, leaving.piece);
            self.held_bytes -= leaving.piece.bytes as u64;
        }
        is_free
    }

    /// Puts a piece back whose release was refused.
    pub(crate) fn put_back(&mut self, leaving: Leaving<A>) {
        self.held_bytes += leaving.piece.bytes as u64;
        let used = self.now();
        self.leaving.remove(&leaving.run.start);
        self.pieces.insert(leaving.run.start, Held { piece: leaving.piece, used });
        self.ranges.free(leaving.run);
    }

    /// Notes that a piece is gone, or a remnant.
    pub(crate) fn has_left(&mut self, leaving: Leaving<A>, is_remnant: bool) {
        self.leaving.remove(&leaving.run.start);
        if is_remnant {
            self.remnants.insert(leaving.run.start, leaving.piece);
        } else {
            self.vacate(leaving.run.start, Hole { pages: leaving.run.pages, ptr: leaving.piece.ptr });
        }
    }

    /// Returns the remnants, to be retried. Until [`Area::remnant_has_left`], nothing is placed there.
    pub(crate) fn remnants_to_retry(&self) -> Vec<Leaving<A>> {
        let leaving = |(start, piece): (&u32, &Piece<A>)| Leaving {
            piece: *piece,
            run: Run { start: *start, pages: pages_of(piece.bytes) },
        };
        self.remnants.iter().map(leaving).collect()
    }

    /// Notes that a remnant is gone.
    pub(crate) fn remnant_has_left(&mut self, leaving: Leaving<A>) {
        if self.remnants.remove(&leaving.run.start).is_some() {
            self.vacate(leaving.run.start, Hole { pages: leaving.run.pages, ptr: leaving.piece.ptr });
        }
    }

    /// Notes that the addresses of released pieces are unused.
    fn vacate(&mut self, mut start: u32, mut hole: Hole<A>) {
        let end = start + hole.pages;
        let joins = |page: u32, before: Hole<A>, after: Hole<A>| {
            !self.ranges.begins_range(page) && before.ptr.plus(bytes_of(before.pages)) == after.ptr
        };
        let next = self.holes.get(&end).copied().filter(|next| joins(end, hole, *next));
        let before = self.holes.range(..start).next_back().map(|(page, before)| (*page, *before));
        let before = before.filter(|(page, before)| page + before.pages == start && joins(start, *before, hole));
        if let Some(next) = next {
            self.holes.remove(&end);
            hole.pages += next.pages;
        }
        if let Some((page, before)) = before {
            hole = Hole { pages: before.pages + hole.pages, ptr: before.ptr };
            start = page;
        }
        self.holes.insert(start, hole);
        while let Some((page, hole)) = self.holes.last_key_value().map(|(page, hole)| (*page, *hole))
            && page + hole.pages == self.ranges.pages()
        {
            self.holes.remove(&page);
            self.ranges.remove_last_piece(Run { start: page, pages: hole.pages });
        }
    }
}
