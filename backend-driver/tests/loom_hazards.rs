//! Model checks of the hazard pointers that keep a vendor's handle alive during a call. loom tries every interleaving
//! of the threads below.
//!
//! `hazards.rs` is compiled with loom's types; its `crate::primitive` is the module here.

#![allow(missing_docs, unreachable_pub, dead_code, reason = "the file under test is compiled as part of this test")]

mod primitive {
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicPtr, Ordering, fence};

    /// Both sides as plain fences. loom cannot model the barrier that the system makes in other threads.
    pub(crate) fn heavy_fence() {
        fence(Ordering::SeqCst);
    }

    pub(crate) fn store_and_fence(cell: &AtomicPtr<()>, value: *mut ()) {
        cell.store(value, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }
}

#[path = "../src/hazards.rs"]
mod hazards;

use hazards::{Fenced, Registry};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;

/// An object of a table: whether its id is stale, and the vendor's handle. loom fails the test if the handle is used
/// while it is destroyed.
struct Object {
    stale: AtomicBool,
    handle: UnsafeCell<bool>,
}

struct Table {
    registry: Registry,
    object: Object,
}

// SAFETY: The cell is what the model is about: loom fails the test where two threads touch it unordered.
unsafe impl Sync for Table {}
// SAFETY: As above.
unsafe impl Send for Table {}

impl Table {
    fn new() -> Arc<Self> {
        let object = Object { stale: AtomicBool::new(false), handle: UnsafeCell::new(true) };
        Arc::new(Self { registry: Registry::new(), object })
    }

    fn address(&self) -> *mut () {
        std::ptr::from_ref(&self.object).cast_mut().cast()
    }

    /// Makes a call: publishes a hazard pointer, re-checks the object, and uses it.
    fn call(&self) {
        let record = self.registry.take();
        let hazard = record.announce(self.address()).expect("an own record has an empty cell");
        if !self.object.stale.load(Ordering::Acquire) {
            // SAFETY: Read only.
            let alive = self.object.handle.with(|handle| unsafe { *handle });
            assert!(alive, "a call used a handle that was destroyed");
        }
        drop(hazard);
        record.give_back();
    }

    /// Makes the id stale. Returns whether the handle could be destroyed at once.
    fn remove(&self) -> bool {
        self.object.stale.store(true, Ordering::Relaxed);
        self.sweep()
    }

    fn sweep(&self) -> bool {
        let fenced = Fenced::now();
        if self.registry.is_announced(self.address(), &fenced) {
            return false;
        }
        // SAFETY: Nothing uses it, which this test checks.
        self.object.handle.with_mut(|handle| unsafe { *handle = false });
        true
    }
}

#[test]
fn a_handle_is_not_destroyed_under_a_call() {
    loom::model(|| {
        let table = Table::new();
        let other = Arc::clone(&table);
        let call = thread::spawn(move || other.call());
        let destroyed = table.remove();
        call.join().unwrap();
        // A later sweep destroys a postponed handle.
        assert!(destroyed || table.sweep());
    });
}

#[test]
fn a_question_sees_the_capture_or_the_capture_waits_for_it() {
    loom::model(|| {
        let table = Table::new();
        let (captures, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (other, seen, answers) = (Arc::clone(&table), Arc::clone(&captures), Arc::clone(&answered));
        let asks = thread::spawn(move || {
            let record = other.registry.take();
            let asking = record.ask();
            let hazard = record.announce(other.address()).expect("an own record has an empty cell");
            let relaxed = seen.load(Ordering::Relaxed);
            answers.store(true, Ordering::Relaxed);
            drop((hazard, asking));
            relaxed
        });
        captures.store(true, Ordering::Relaxed);
        table.registry.wait_for_questions(thread::yield_now);
        let begun_after = answered.load(Ordering::Relaxed);
        // If the query did not see the capture, it was answered before the vendor began the capture.
        assert!(asks.join().unwrap() || begun_after);
    });
}

#[test]
fn two_calls_and_one_who_destroys() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let table = Table::new();
        let calls: Vec<_> = (0..2)
            .map(|_| {
                let other = Arc::clone(&table);
                thread::spawn(move || other.call())
            })
            .collect();
        let destroyed = table.remove();
        calls.into_iter().for_each(|call| call.join().unwrap());
        assert!(destroyed || table.sweep());
    });
}

#[test]
fn an_announcement_apart_is_seen_like_any_other() {
    loom::model(|| {
        let table = Table::new();
        let other = Arc::clone(&table);
        let call = thread::spawn(move || {
            let hazard = other.registry.announce_apart(other.address());
            if !other.object.stale.load(Ordering::Acquire) {
                // SAFETY: Read only.
                assert!(other.object.handle.with(|handle| unsafe { *handle }));
            }
            drop(hazard);
        });
        let destroyed = table.remove();
        call.join().unwrap();
        assert!(destroyed || table.sweep());
    });
}

#[test]
fn two_objects_that_are_announced_at_once_are_both_seen() {
    loom::model(|| {
        let (first, second) = (Table::new(), Table::new());
        let (one, two) = (Arc::clone(&first), Arc::clone(&second));
        // Both tables look into the first one's records.
        let call = thread::spawn(move || {
            let record = one.registry.take();
            let hazards = record.announce_both(one.address(), two.address()).expect("an own record has an empty cell");
            for table in [&one, &two] {
                if !table.object.stale.load(Ordering::Acquire) {
                    // SAFETY: Read only.
                    assert!(table.object.handle.with(|handle| unsafe { *handle }));
                }
            }
            drop(hazards);
        });
        second.object.stale.store(true, Ordering::Relaxed);
        let fenced = Fenced::now();
        if !first.registry.is_announced(second.address(), &fenced) {
            // SAFETY: Nothing uses it, which this test checks.
            second.object.handle.with_mut(|handle| unsafe { *handle = false });
        }
        let destroyed = first.remove();
        call.join().unwrap();
        assert!(destroyed || first.sweep());
    });
}
