//! Announcements of what each thread is using: a record per thread, found by whoever wants to destroy something.
//!
//! A user publishes a hazard pointer, fences, then re-checks that the object is live. A destroyer makes the object
//! stale, fences, then looks for hazard pointers. With a sequentially consistent fence on each side, at least one sees
//! the other. Publishing is frequent and destroying is not, so the destroyer pays for both fences while the system
//! permits it (`primitive.rs`). `tests/loom_hazards.rs` tries every interleaving. `thread_records.rs` assigns records to
//! threads.

use std::marker::PhantomData;

use crate::primitive::{AtomicBool, AtomicPtr, Ordering, fence, heavy_fence, store_and_fence};

/// Most announcements in one record at once: a call uses two objects at most, and may be made inside another.
const PER_RECORD: usize = 4;

/// What one thread announces.
#[derive(Debug)]
pub(crate) struct Record {
    taken: AtomicBool,
    cells: [AtomicPtr<()>; PER_RECORD],
    /// Whether the thread asks what a capture in global mode forbids.
    asks: AtomicBool,
    next: AtomicPtr<Record>,
}

/// All records, which form a list that only grows, to the most threads that announced at once.
#[derive(Debug)]
pub(crate) struct Registry {
    first: AtomicPtr<Record>,
}

/// That a fence was made: what was stale before it is not used by who announces after it. One serves any number of looks.
#[derive(Debug)]
pub(crate) struct Fenced(());

impl Fenced {
    /// Makes the fence.
    pub(crate) fn now() -> Self {
        // With the fence in `announce`.
        heavy_fence();
        Self(())
    }
}

/// An announcement; ends when it is dropped, in the thread that made it.
#[derive(Debug)]
pub(crate) struct Hazard {
    cell: &'static AtomicPtr<()>,
    own_thread: PhantomData<*const ()>,
}

/// A question that a capture in global mode forbids to every thread; ends when it is dropped, in the thread that made it.
#[derive(Debug)]
pub(crate) struct Asking {
    record: &'static Record,
    own_thread: PhantomData<*const ()>,
}

impl Drop for Asking {
    #[inline]
    fn drop(&mut self) {
        // Release: the question comes before its end.
        self.record.asks.store(false, Ordering::Release);
    }
}

impl Drop for Hazard {
    #[inline(always)]
    fn drop(&mut self) {
        // Release: the use comes before the end of the announcement.
        self.cell.store(std::ptr::null_mut(), Ordering::Release);
    }
}

impl Hazard {
    #[inline(always)]
    const fn new(cell: &'static AtomicPtr<()>) -> Self {
        Self { cell, own_thread: PhantomData }
    }
}

impl Record {
    /// The first cells in which nothing is announced, so many.
    #[cold]
    #[inline(never)]
    fn find_free<const N: usize>(&'static self) -> Option<[&'static AtomicPtr<()>; N]> {
        // Relaxed: the cells are written by this thread only.
        let mut free = self.cells.iter().filter(|cell| cell.load(Ordering::Relaxed).is_null());
        let mut found = [&self.cells[0]; N];
        for cell in &mut found {
            *cell = free.next()?;
        }
        Some(found)
    }

    /// Announces that this thread uses `object`, in its own record; `None` where the record is full. The caller then looks
    /// whether the object still stands.
    pub(crate) fn announce(&'static self, object: *mut ()) -> Option<Hazard> {
        self.find_free().map(|[cell]| Self::announce_in(cell, object))
    }

    /// The same where nothing else is announced, as nearly always; else `None`.
    #[inline(always)]
    pub(crate) fn announce_first(&'static self, object: *mut ()) -> Option<Hazard> {
        let cell = &self.cells[0];
        // Relaxed: as in `find_free`.
        cell.load(Ordering::Relaxed).is_null().then(|| Self::announce_in(cell, object))
    }

    #[inline(always)]
    fn announce_in(cell: &'static AtomicPtr<()>, object: *mut ()) -> Hazard {
        // With the one that `is_announced` asks for.
        store_and_fence(cell, object);
        Hazard::new(cell)
    }

    /// Announces two objects at the price of one.
    pub(crate) fn announce_both(&'static self, first: *mut (), second: *mut ()) -> Option<(Hazard, Hazard)> {
        self.find_free().map(|cells| Self::announce_both_in(cells, first, second))
    }

    /// The same where nothing else is announced.
    #[inline(always)]
    pub(crate) fn announce_first_both(&'static self, first: *mut (), second: *mut ()) -> Option<(Hazard, Hazard)> {
        let cells = [&self.cells[0], &self.cells[1]];
        // Relaxed: as in `find_free`.
        let free = cells.iter().all(|cell| cell.load(Ordering::Relaxed).is_null());
        free.then(|| Self::announce_both_in(cells, first, second))
    }

    #[inline(always)]
    fn announce_both_in(
        [cell, other]: [&'static AtomicPtr<()>; 2],
        first: *mut (),
        second: *mut (),
    ) -> (Hazard, Hazard) {
        // The fence behind the second store is behind the first one too.
        cell.store(first, Ordering::Relaxed);
        (Hazard::new(cell), Self::announce_in(other, second))
    }

    /// Says that this thread is about to ask. It takes effect with the next announcement, whose fence it shares; the caller
    /// looks after that whether a capture is open.
    #[inline]
    pub(crate) fn ask(&'static self) -> Asking {
        self.asks.store(true, Ordering::Relaxed);
        Asking { record: self, own_thread: PhantomData }
    }

    /// Leaves the record to another thread; nothing is announced in it any more.
    pub(crate) fn give_back(&self) {
        // Release: who takes it finds its cells empty.
        self.taken.store(false, Ordering::Release);
    }
}

impl Registry {
    pub(crate) fn new() -> Self {
        Self { first: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// A record that nobody else has.
    #[cold]
    pub(crate) fn take(&self) -> &'static Record {
        for record in self.records() {
            // Acquire: what the thread before did with its cells is over.
            if record.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                return record;
            }
        }
        self.add(std::ptr::null_mut())
    }

    /// Adds a record, with `object` announced in its first cell. That it is found by whoever has to is a matter of the fences:
    /// the caller fences after it, or is going to before it looks.
    fn add(&self, object: *mut ()) -> &'static Record {
        let record: &'static Record = Box::leak(Box::new(Record {
            taken: AtomicBool::new(true),
            cells: std::array::from_fn(|cell| AtomicPtr::new(if cell == 0 { object } else { std::ptr::null_mut() })),
            asks: AtomicBool::new(false),
            next: AtomicPtr::new(std::ptr::null_mut()),
        }));
        let own = std::ptr::from_ref(record).cast_mut();
        let mut first = self.first.load(Ordering::Relaxed);
        loop {
            record.next.store(first, Ordering::Relaxed);
            // Release: who finds the record finds its cells.
            match self.first.compare_exchange(first, own, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return record,
                Err(other) => first = other,
            }
        }
    }

    /// Announces without a record of one's own: in a registry whose records are nobody's, where a cell is taken by
    /// announcing in it.
    #[cold]
    pub(crate) fn announce_apart(&self, object: *mut ()) -> Hazard {
        let take = |cell: &&AtomicPtr<()>| {
            // Acquire: the announcement that was there before is over.
            cell.compare_exchange(std::ptr::null_mut(), object, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let cell = self.records().flat_map(|record| &record.cells).find(take);
        let cell = cell.unwrap_or_else(|| &self.add(object).cells[0]);
        // With the one that `is_announced` asks for.
        fence(Ordering::SeqCst);
        Hazard::new(cell)
    }

    pub(crate) fn records(&self) -> impl Iterator<Item = &'static Record> {
        let mut next = self.first.load(Ordering::Acquire);
        std::iter::from_fn(move || {
            // SAFETY: records are leaked boxes, published whole, and never freed.
            let record: &'static Record = unsafe { next.as_ref() }?;
            next = record.next.load(Ordering::Acquire);
            Some(record)
        })
    }

    /// Waits until every thread that may have found no capture open has been answered. The caller has made it known before that
    /// one is.
    pub(crate) fn wait_for_questions(&self, pause: impl Fn()) {
        // With the fence in `announce`.
        heavy_fence();
        for record in self.records() {
            // Acquire: where the question has ended, the vendor has answered it.
            while record.asks.load(Ordering::Acquire) {
                pause();
            }
        }
    }

    /// Whether any thread announces `object`, which the caller made stale before the fence.
    pub(crate) fn is_announced(&self, object: *mut (), _: &Fenced) -> bool {
        // Acquire: where the announcement has ended, the use is over.
        self.records().any(|record| record.cells.iter().any(|cell| cell.load(Ordering::Acquire) == object))
    }
}
