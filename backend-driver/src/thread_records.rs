//! The hazard record of each thread.

use std::cell::Cell;
use std::sync::OnceLock;

use crate::primitive::prepare_fences;

use super::hazards::{Asking, Fenced, Hazard, Record, Registry};

/// Returns the records of threads.
fn registry() -> &'static Registry {
    static REGISTRY: OnceLock<Registry> = OnceLock::new();
    REGISTRY.get_or_init(Registry::new)
}

/// Returns the shared records, for ending threads and for threads whose own record is full.
fn common() -> &'static Registry {
    static COMMON: OnceLock<Registry> = OnceLock::new();
    COMMON.get_or_init(Registry::new)
}

/// Returns a thread's record to the registry when the thread ends.
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
    /// The cell that the hot path reads. It has no destructor, so the read needs no check.
    static CURRENT: Cell<Option<&'static Record>> = const { Cell::new(None) };
    static OWN: Own = const { Own(Cell::new(None)) };
}

/// Returns this thread's record; `None` if the thread is ending and its record is gone.
#[inline(always)]
fn own() -> Option<&'static Record> {
    CURRENT.get().or_else(first)
}

/// Returns this thread's record if the thread has one already.
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

/// Marks that this thread is about to ask a question ([`Asking`]). The caller must then publish a hazard pointer, and check for
/// captures after that. An ending thread takes a record for the question.
#[inline]
pub(super) fn ask() -> Asking {
    match own() {
        Some(record) => record.ask(),
        None => registry().ask_apart(),
    }
}

/// Waits for the questions of threads that may have found no capture open, or a stream alive that is ending.
pub(super) fn wait_for_questions() {
    registry().wait_for_questions(std::thread::yield_now);
}

/// Publishes hazard pointers to two objects at the cost of one. The caller then re-checks that the objects are live.
pub(super) fn announce_both(first: *mut (), second: *mut ()) -> (Hazard, Hazard) {
    match own().and_then(|record| record.announce_both(first, second)) {
        Some(hazards) => hazards,
        None => (common().announce_apart(first), common().announce_apart(second)),
    }
}

/// Publishes a hazard pointer to `object`. The caller then re-checks that the object is live.
pub(super) fn announce(object: *mut ()) -> Hazard {
    match own().and_then(|record| record.announce(object)) {
        Some(hazard) => hazard,
        None => common().announce_apart(object),
    }
}

/// Returns whether any thread has a hazard pointer to `object`, which the caller made stale before the fence.
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
        // Other tests publish hazard pointers too, each in a few threads.
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
            // Created before the record and therefore dropped after it.
            LATE.set(Some(Late(address)));
            drop(announce(std::ptr::without_provenance_mut(address)));
        })
        .join()
        .unwrap();
        assert!(!is_announced_now(std::ptr::without_provenance_mut(address)));
    }

    #[test]
    fn a_question_of_an_ending_thread_is_waited_for() {
        use std::sync::Arc;
        use std::sync::atomic::{AtomicU32, Ordering};

        /// 0: begins; 1: the question is open; 2: it may end.
        struct Late(Arc<AtomicU32>);
        impl Drop for Late {
            fn drop(&mut self) {
                assert!(own().is_none());
                let asking = ask();
                drop(ask());
                let hazard = announce(Arc::as_ptr(&self.0).cast_mut().cast());
                self.0.store(1, Ordering::SeqCst);
                while self.0.load(Ordering::SeqCst) == 1 {
                    std::thread::yield_now();
                }
                drop((asking, hazard));
            }
        }
        thread_local! {
            static LATE: Cell<Option<Late>> = const { Cell::new(None) };
        }
        let state = Arc::new(AtomicU32::new(0));
        let late = Late(Arc::clone(&state));
        let ends = std::thread::spawn(move || {
            // Created before the record and therefore dropped after it.
            LATE.set(Some(late));
            drop(announce(std::ptr::dangling_mut::<u8>().cast()));
        });
        while state.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        let waits = std::thread::spawn(wait_for_questions);
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!waits.is_finished());
        state.store(2, Ordering::SeqCst);
        waits.join().unwrap();
        ends.join().unwrap();
    }

    #[test]
    fn a_question_inside_another_does_not_end_it() {
        let outer = ask();
        drop(ask());
        let waits = std::thread::spawn(wait_for_questions);
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!waits.is_finished());
        drop(outer);
        waits.join().unwrap();
    }
}
