//! Announcements of what each thread is using: a record per thread, found by whoever wants to destroy something.
//!
//! Records form a list that only grows, to the most threads that announced at once; a thread that ends gives its record
//! to the next.

use std::cell::Cell;
use std::marker::PhantomData;

use crate::primitive::{AtomicBool, AtomicPtr, Ordering};

/// Most announcements of one thread at once: a call uses two objects at most.
const PER_THREAD: usize = 4;

#[derive(Debug)]
struct Record {
    taken: AtomicBool,
    cells: [AtomicPtr<()>; PER_THREAD],
    next: AtomicPtr<Record>,
}

static RECORDS: AtomicPtr<Record> = AtomicPtr::new(std::ptr::null_mut());

/// An announcement; ends when it is dropped, in the thread that made it.
#[derive(Debug)]
pub(super) struct Hazard {
    record: &'static Record,
    cell: usize,
    /// Whether the record was taken for this announcement alone.
    borrowed: bool,
    own_thread: PhantomData<*const ()>,
}

impl Drop for Hazard {
    #[inline]
    fn drop(&mut self) {
        // Release: the use comes before the end of the announcement.
        self.record.cells[self.cell].store(std::ptr::null_mut(), Ordering::Release);
        if self.borrowed {
            self.record.taken.store(false, Ordering::Release);
        }
    }
}

/// The record of a thread, given back when it ends.
struct Own(Cell<Option<&'static Record>>);

impl Drop for Own {
    fn drop(&mut self) {
        if let Some(record) = self.0.take() {
            record.taken.store(false, Ordering::Release);
        }
    }
}

thread_local! {
    static OWN: Own = const { Own(Cell::new(None)) };
}

/// Announces that this thread uses `object`. The caller has to fence before it looks whether the object still stands.
#[inline]
pub(super) fn announce(object: *mut ()) -> Hazard {
    let own = OWN.try_with(|own| {
        own.0.get().unwrap_or_else(|| {
            let record = take();
            own.0.set(Some(record));
            record
        })
    });
    match own {
        Ok(record) => {
            // Relaxed: the cells are written by this thread only.
            if let Some(cell) = record.cells.iter().position(|cell| cell.load(Ordering::Relaxed).is_null()) {
                record.cells[cell].store(object, Ordering::Relaxed);
                return Hazard { record, cell, borrowed: false, own_thread: PhantomData };
            }
            announce_apart(object)
        }
        // The thread is ending, and its record is gone already.
        Err(_) => announce_apart(object),
    }
}

#[cold]
fn announce_apart(object: *mut ()) -> Hazard {
    let record = take();
    record.cells[0].store(object, Ordering::Relaxed);
    Hazard { record, cell: 0, borrowed: true, own_thread: PhantomData }
}

/// A record that nobody else has.
#[cold]
fn take() -> &'static Record {
    for record in records() {
        // Acquire: what the thread before did with its cells is over.
        if record.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok() {
            return record;
        }
    }
    let record: &'static Record = Box::leak(Box::new(Record {
        taken: AtomicBool::new(true),
        cells: std::array::from_fn(|_| AtomicPtr::new(std::ptr::null_mut())),
        next: AtomicPtr::new(std::ptr::null_mut()),
    }));
    let own = std::ptr::from_ref(record).cast_mut();
    let mut first = RECORDS.load(Ordering::Relaxed);
    loop {
        record.next.store(first, Ordering::Relaxed);
        // Release: who finds the record finds its cells. SeqCst, as the search in `is_announced` has to find every record
        // whose announcement precedes the searcher's fence.
        match RECORDS.compare_exchange(first, own, Ordering::SeqCst, Ordering::Relaxed) {
            Ok(_) => return record,
            Err(other) => first = other,
        }
    }
}

fn records() -> impl Iterator<Item = &'static Record> {
    let mut next = RECORDS.load(Ordering::SeqCst);
    std::iter::from_fn(move || {
        // SAFETY: records are leaked boxes, published whole, and never freed.
        let record: &'static Record = unsafe { next.as_ref() }?;
        next = record.next.load(Ordering::Acquire);
        Some(record)
    })
}

/// Whether any thread announces `object`. The caller has made the object stale and fenced before.
pub(super) fn is_announced(object: *mut ()) -> bool {
    // Acquire: where the announcement has ended, the use is over.
    records().any(|record| record.cells.iter().any(|cell| cell.load(Ordering::Acquire) == object))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn announcements_are_seen_until_they_end() {
        let objects = [0_u8; 6];
        let at = |index: usize| std::ptr::from_ref(&objects[index]).cast_mut().cast::<()>();
        // More than a record holds.
        let hazards: Vec<_> = (0..6).map(|index| announce(at(index))).collect();
        assert!((0..6).all(|index| is_announced(at(index))));
        drop(hazards);
        assert!(!(0..6).any(|index| is_announced(at(index))));
    }

    #[test]
    fn a_thread_that_ends_leaves_its_record_to_another() {
        let object = 0_u8;
        let address = std::ptr::from_ref(&object) as usize;
        for _ in 0..50 {
            std::thread::spawn(move || drop(announce(address as *mut ()))).join().unwrap();
        }
        // Other tests announce as well, each with a few threads.
        assert!(records().count() < 40, "{}", records().count());
    }
}
