//! Announcements of what each thread is using: a record per thread, found by whoever wants to destroy something.
//!
//! Who uses an object announces it, fences, and then looks whether it still stands. Who destroys it makes it stale, fences, and
//! then looks for announcements. With a sequentially consistent fence on each side, not both miss the other.
//! `tests/loom_hazards.rs` tries every interleaving. Which record is whose is `records.rs`'s affair.

use std::marker::PhantomData;

use crate::primitive::{AtomicBool, AtomicPtr, Ordering, fence, store_and_fence};

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

/// An announcement; ends when it is dropped, in the thread that made it.
#[derive(Debug)]
pub(crate) struct Hazard {
    record: &'static Record,
    cell: usize,
    /// Whether the record was taken for this announcement alone.
    borrowed: bool,
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
    #[inline]
    fn drop(&mut self) {
        // Release: the use comes before the end of the announcement.
        self.record.cells[self.cell].store(std::ptr::null_mut(), Ordering::Release);
        if self.borrowed {
            self.record.give_back();
        }
    }
}

impl Record {
    /// Announces that this thread uses `object`, in its own record; `None` where the record is full. The caller then looks
    /// whether the object still stands.
    #[inline]
    pub(crate) fn announce(&'static self, object: *mut ()) -> Option<Hazard> {
        // Relaxed: the cells are written by this thread only.
        let cell = self.cells.iter().position(|cell| cell.load(Ordering::Relaxed).is_null())?;
        // With the fence in `is_announced`.
        store_and_fence(&self.cells[cell], object);
        Some(Hazard { record: self, cell, borrowed: false, own_thread: PhantomData })
    }

    /// Says that this thread is about to ask. It takes effect with the next announcement, whose fence it shares; the caller
    /// looks after that whether a capture is open.
    #[inline]
    pub(crate) fn ask(&'static self) -> Asking {
        self.asks.store(true, Ordering::Relaxed);
        Asking { record: self, own_thread: PhantomData }
    }

    /// Announces two objects at the price of one.
    #[inline]
    pub(crate) fn announce_both(&'static self, first: *mut (), second: *mut ()) -> Option<(Hazard, Hazard)> {
        let cell = self.cells.iter().position(|cell| cell.load(Ordering::Relaxed).is_null())?;
        let rest = self.cells.get(cell + 1..)?;
        let other = cell + 1 + rest.iter().position(|cell| cell.load(Ordering::Relaxed).is_null())?;
        // The fence behind the second store is behind the first one too.
        self.cells[cell].store(first, Ordering::Relaxed);
        store_and_fence(&self.cells[other], second);
        let hazard = |cell| Hazard { record: self, cell, borrowed: false, own_thread: PhantomData };
        Some((hazard(cell), hazard(other)))
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
        let record: &'static Record = Box::leak(Box::new(Record {
            taken: AtomicBool::new(true),
            cells: std::array::from_fn(|_| AtomicPtr::new(std::ptr::null_mut())),
            asks: AtomicBool::new(false),
            next: AtomicPtr::new(std::ptr::null_mut()),
        }));
        let own = std::ptr::from_ref(record).cast_mut();
        let mut first = self.first.load(Ordering::Relaxed);
        loop {
            record.next.store(first, Ordering::Relaxed);
            // Release: who finds the record finds its cells. That it is found by whoever has to is a matter of the fences: it
            // is put here before the thread's first announcement.
            match self.first.compare_exchange(first, own, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return record,
                Err(other) => first = other,
            }
        }
    }

    /// Announces in a record that is taken for it alone.
    #[cold]
    pub(crate) fn announce_apart(&self, object: *mut ()) -> Hazard {
        let record = self.take();
        store_and_fence(&record.cells[0], object);
        Hazard { record, cell: 0, borrowed: true, own_thread: PhantomData }
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
        fence(Ordering::SeqCst);
        for record in self.records() {
            // Acquire: where the question has ended, the vendor has answered it.
            while record.asks.load(Ordering::Acquire) {
                pause();
            }
        }
    }

    /// Whether any thread announces `object`. The caller has made the object stale before.
    pub(crate) fn is_announced(&self, object: *mut ()) -> bool {
        // With the fence in `announce`.
        fence(Ordering::SeqCst);
        // Acquire: where the announcement has ended, the use is over.
        self.records().any(|record| record.cells.iter().any(|cell| cell.load(Ordering::Acquire) == object))
    }
}
