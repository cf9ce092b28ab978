//! The record in which each thread announces what it uses.

use std::cell::Cell;
use std::sync::OnceLock;

use crate::primitive::prepare_fences;

use super::hazards::{Asking, Fenced, Hazard, Record, Registry};

/// The records of threads.
fn registry() -> &'static Registry {
    static REGISTRY: OnceLock<Registry> = OnceLock::new();
    REGISTRY.get_or_init(Registry::new)
}

/// Records of nobody, for threads that are ending and for a thread that announces more than its record holds.
fn common() -> &'static Registry {
    static COMMON: OnceLock<Registry> = OnceLock::new();
    COMMON.get_or_init(Registry::new)
}

/// Gives a thread's record back when it ends.
struct Own(Cell<Option<&'static Record>>);

impl Drop for Own {
    fn drop(&mut self) {
        CURRENT.set(None);
        if let Some(record) = self.0.take() {
            record.give_back();
        }
    }
}

thread_local! {
    /// What the hot path reads: it has no destructor, so that nothing has to be asked before it is read.
    static CURRENT: Cell<Option<&'static Record>> = const { Cell::new(None) };
    static OWN: Own = const { Own(Cell::new(None)) };
}

/// This thread's record; `None` where the thread is ending and its record is gone already.
#[inline(always)]
fn own() -> Option<&'static Record> {
    CURRENT.get().or_else(first)
}

/// The same where the thread has announced before.
#[inline(always)]
pub(super) fn known() -> Option<&'static Record> {
    CURRENT.get()
}

#[cold]
#[inline(never)]
fn first() -> Option<&'static Record> {
    prepare_fences();
    OWN.try_with(|own| {
        let record = registry().take();
        own.0.set(Some(record));
        CURRENT.set(Some(record));
        record
    })
    .ok()
}

/// Says that this thread is about to ask what a capture in global mode forbids; `None` where the thread is ending. Comes before
/// `announce`, and the look for captures after it.
#[inline]
pub(super) fn ask() -> Option<Asking> {
    own().map(Record::ask)
}

/// Waits for the questions of threads that may have found no capture open.
pub(super) fn wait_for_questions() {
    registry().wait_for_questions(std::thread::yield_now);
}

/// Announces that this thread uses two objects, at the price of one. The caller then looks whether they still stand.
pub(super) fn announce_both(first: *mut (), second: *mut ()) -> (Hazard, Hazard) {
    match own().and_then(|record| record.announce_both(first, second)) {
        Some(hazards) => hazards,
        None => (common().announce_apart(first), common().announce_apart(second)),
    }
}

/// Announces that this thread uses `object`. The caller then looks whether the object still stands.
pub(super) fn announce(object: *mut ()) -> Hazard {
    match own().and_then(|record| record.announce(object)) {
        Some(hazard) => hazard,
        None => common().announce_apart(object),
    }
}

/// Whether any thread announces `object`, which the caller made stale before the fence.
pub(super) fn is_announced(object: *mut (), fenced: &Fenced) -> bool {
    registry().is_announced(object, fenced) || common().is_announced(object, fenced)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_announced_now(object: *mut ()) -> bool {
        is_announced(object, &Fenced::now())
    }

    #[test]
    fn announcements_are_seen_until_they_end() {
        let objects = [0_u8; 6];
        let at = |index: usize| std::ptr::from_ref(&objects[index]).cast_mut().cast::<()>();
        // More than a record holds.
        let hazards: Vec<_> = (0..6).map(|index| announce(at(index))).collect();
        assert!((0..6).all(|index| is_announced_now(at(index))));
        drop(hazards);
        assert!(!(0..6).any(|index| is_announced_now(at(index))));
    }

    #[test]
    fn a_thread_that_ends_leaves_its_record_to_another() {
        let object = 0_u8;
        let address = std::ptr::from_ref(&object).addr();
        for _ in 0..50 {
            std::thread::spawn(move || drop(announce(std::ptr::without_provenance_mut(address)))).join().unwrap();
        }
        // Other tests announce as well, each with a few threads.
        assert!(registry().records().count() < 40, "{}", registry().records().count());
    }

    #[test]
    fn a_destructor_of_an_ending_thread_can_announce() {
        struct Late(usize);
        impl Drop for Late {
            fn drop(&mut self) {
                let hazard = announce(std::ptr::without_provenance_mut(self.0));
                assert!(is_announced_now(std::ptr::without_provenance_mut(self.0)));
                drop(hazard);
            }
        }
        thread_local! {
            static LATE: Cell<Option<Late>> = const { Cell::new(None) };
        }
        let object = 0_u8;
        let address = std::ptr::from_ref(&object).addr();
        std::thread::spawn(move || {
            // Made before the record, so it is dropped after it.
            LATE.set(Some(Late(address)));
            drop(announce(std::ptr::without_provenance_mut(address)));
        })
        .join()
        .unwrap();
        assert!(!is_announced_now(std::ptr::without_provenance_mut(address)));
    }
}
