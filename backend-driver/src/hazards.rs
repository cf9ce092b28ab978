//! Hazard pointers: a record for each thread, in which it publishes the objects that it uses.
//!
//! A user publishes a hazard pointer, fences, then re-checks that the object is live. A destroyer makes the object
//! stale, fences, then looks for hazard pointers. With a sequentially consistent fence on each side, at least one sees
//! the other. Publishing is frequent and destroying is not, so the destroyer pays for both fences while the system
//! permits it (`primitive.rs`). `tests/loom_hazards.rs` tries every interleaving. `thread_records.rs` assigns records
//! to threads.

use std::marker::PhantomData;

use crate::primitive::{AtomicBool, AtomicPtr, Ordering, fence, heavy_fence, store_and_fence};

/// Hazard pointers in one record. A call uses at most two objects, and may run inside another call.
const PER_RECORD: usize = 4;

/// The hazard pointers of one thread.
#[derive(Debug)]
pub(crate) struct Record {
    taken: AtomicBool,
    cells: [AtomicPtr<()>; PER_RECORD],
    /// Whether the thread has an open question ([`Asking`]).
    asks: AtomicBool,
    next: AtomicPtr<Record>,
}

/// All records. The list only grows, to the largest number of threads that had records at one time.
#[derive(Debug)]
pub(crate) struct Registry {
    first: AtomicPtr<Record>,
}

/// Proof of a fence. Objects that were stale before it are not used by threads that publish after it. One fence serves
/// any number of checks.
#[derive(Debug)]
pub(crate) struct Fenced(());

impl Fenced {
    /// Makes the fence.
    pub(crate) fn now() -> Self {
        // Pairs with the fence in `announce`.
        heavy_fence();
        Self(())
    }
}

/// A published hazard pointer. Dropping it, in the same thread, withdraws it.
#[derive(Debug)]
pub(crate) struct Hazard {
    cell: &'static AtomicPtr<()>,
    own_thread: PhantomData<*const ()>,
}

/// A question: a query that a capture in global mode forbids to every thread, or a call that follows an event to a stream
/// (`event_homes.rs`). Dropping it, in the same thread, ends it.
#[derive(Debug)]
pub(crate) struct Asking {
    record: &'static Record,
    /// What the end does to the record.
    end: End,
    own_thread: PhantomData<*const ()>,
}

/// What the end of a question does to its record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Clears,
    /// The question was asked inside another one, which goes on.
    Nothing,
    /// The record was taken for this question.
    GivesBack,
}

impl Drop for Asking {
    #[inline]
    fn drop(&mut self) {
        if self.end != End::Nothing {
            // Release: the query comes before its end.
            self.record.asks.store(false, Ordering::Release);
        }
        if self.end == End::GivesBack {
            self.record.give_back();
        }
    }
}

impl Drop for Hazard {
    #[inline(always)]
    fn drop(&mut self) {
        // Release: the use comes before the end of the hazard pointer.
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
    /// Returns the first `N` empty cells.
    #[cold]
    #[inline(never)]
    fn find_free<const N: usize>(&'static self) -> Option<[&'static AtomicPtr<()>; N]> {
        // Relaxed: only this thread writes the cells.
        let mut free = self.cells.iter().filter(|cell| cell.load(Ordering::Relaxed).is_null());
        let mut found = [&self.cells[0]; N];
        for cell in &mut found {
            *cell = free.next()?;
        }
        Some(found)
    }

    /// Publishes a hazard pointer to `object` in this thread's own record. Returns `None` if the record is full. The
    /// caller then re-checks that the object is live.
    pub(crate) fn announce(&'static self, object: *mut ()) -> Option<Hazard> {
        self.find_free().map(|[cell]| Self::announce_in(cell, object))
    }

    /// Publishes a hazard pointer in an empty record, which is nearly always the case. Returns `None` if the record is
    /// not empty.
    #[inline(always)]
    pub(crate) fn announce_first(&'static self, object: *mut ()) -> Option<Hazard> {
        let cell = &self.cells[0];
        // Relaxed: as in `find_free`.
        cell.load(Ordering::Relaxed).is_null().then(|| Self::announce_in(cell, object))
    }

    #[inline(always)]
    fn announce_in(cell: &'static AtomicPtr<()>, object: *mut ()) -> Hazard {
        // Pairs with the fence that `is_announced` requires.
        store_and_fence(cell, object);
        Hazard::new(cell)
    }

    /// Publishes hazard pointers to two objects at the cost of one.
    pub(crate) fn announce_both(&'static self, first: *mut (), second: *mut ()) -> Option<(Hazard, Hazard)> {
        self.find_free().map(|cells| Self::announce_both_in(cells, first, second))
    }

    /// Publishes two hazard pointers in an empty record.
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
        // The fence after the second store also follows the first store.
        cell.store(first, Ordering::Relaxed);
        (Hazard::new(cell), Self::announce_in(other, second))
    }

    /// Marks that this thread is about to ask a question. The mark takes effect with the next hazard pointer, whose fence
    /// it shares. The caller checks for open captures after that.
    #[inline]
    pub(crate) fn ask(&'static self) -> Asking {
        // Relaxed: only this thread writes it.
        let end = if self.asks.load(Ordering::Relaxed) { End::Nothing } else { End::Clears };
        self.asks.store(true, Ordering::Relaxed);
        Asking { record: self, end, own_thread: PhantomData }
    }

    /// Returns the record to the registry. All its cells must be empty.
    pub(crate) fn give_back(&self) {
        // Release: a thread that takes the record finds its cells empty.
        self.taken.store(false, Ordering::Release);
    }
}

impl Registry {
    pub(crate) fn new() -> Self {
        Self { first: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Returns a record that no other thread has.
    #[cold]
    pub(crate) fn take(&self) -> &'static Record {
        for record in self.records() {
            // Acquire: the previous thread's uses of the cells are over.
            if record.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                return record;
            }
        }
        self.add(std::ptr::null_mut())
    }

    /// Begins a question in a record of its own, for a thread whose record is gone.
    #[cold]
    pub(crate) fn ask_apart(&self) -> Asking {
        let mut asking = self.take().ask();
        asking.end = End::GivesBack;
        asking
    }

    /// Adds a record whose first cell holds `object`. The caller fences after this call, or before it checks for stale
    /// objects.
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
            // Release: a thread that reads the record reads its cells.
            match self.first.compare_exchange(first, own, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return record,
                Err(other) => first = other,
            }
        }
    }

    /// Publishes a hazard pointer in a registry of shared records, where publishing takes the cell.
    #[cold]
    pub(crate) fn announce_apart(&self, object: *mut ()) -> Hazard {
        let take = |cell: &&AtomicPtr<()>| {
            // Acquire: the previous hazard pointer in the cell has ended.
            cell.compare_exchange(std::ptr::null_mut(), object, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let cell = self.records().flat_map(|record| &record.cells).find(take);
        let cell = cell.unwrap_or_else(|| &self.add(object).cells[0]);
        // Pairs with the fence that `is_announced` requires.
        fence(Ordering::SeqCst);
        Hazard::new(cell)
    }

    pub(crate) fn records(&self) -> impl Iterator<Item = &'static Record> {
        let mut next = self.first.load(Ordering::Acquire);
        std::iter::from_fn(move || {
            // SAFETY: Records are leaked boxes, published whole, and never freed.
            let record: &'static Record = unsafe { next.as_ref() }?;
            next = record.next.load(Ordering::Acquire);
            Some(record)
        })
    }

    /// Waits for each question whose thread may have found no capture open, or a stream alive. The caller must have
    /// published the capture, or the end of the stream, before.
    pub(crate) fn wait_for_questions(&self, pause: impl Fn()) {
        // Pairs with the fence in `announce`.
        heavy_fence();
        for record in self.records() {
            // Acquire: if the query has ended, the vendor has answered it.
            while record.asks.load(Ordering::Acquire) {
                pause();
            }
        }
    }

    /// Returns whether any thread has a hazard pointer to `object`, which the caller made stale before the fence.
    pub(crate) fn is_announced(&self, object: *mut (), _: &Fenced) -> bool {
        // Acquire: if the hazard pointer has ended, the use is over.
        self.records().any(|record| record.cells.iter().any(|cell| cell.load(Ordering::Acquire) == object))
    }
}
