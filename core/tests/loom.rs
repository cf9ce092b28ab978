//! Model checking of the hand-off of pooled handles: every interleaving of the threads below is tried.
//!
//! The file under test is compiled against loom's types; its `crate::primitive` is the module here.

#![allow(missing_docs, unreachable_pub, dead_code, reason = "the file under test is compiled as part of this test")]

mod primitive {
    pub(crate) use loom::cell::UnsafeCell;
    pub(crate) use loom::sync::Arc;
    pub(crate) use loom::sync::atomic::{AtomicU32, Ordering};

    /// parking_lot's interface over loom's mutex.
    #[derive(Debug)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }
        pub(crate) fn lock(&self) -> loom::sync::MutexGuard<'_, T> {
            self.0.lock().unwrap()
        }
    }
}

#[path = "../src/pool/handoff.rs"]
mod handoff;

use std::sync::atomic::{AtomicU32 as StdAtomicU32, Ordering::SeqCst};

use handoff::{IdleStack, Slot};
use loom::sync::Arc;
use loom::thread;

/// A handle that counts how often it was destroyed.
struct Handle {
    destroyed: std::sync::Arc<StdAtomicU32>,
    calls: u32,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.destroyed.fetch_add(1, SeqCst);
    }
}

fn new_slot() -> (Arc<Slot<Handle>>, std::sync::Arc<StdAtomicU32>) {
    let destroyed = std::sync::Arc::new(StdAtomicU32::new(0));
    let handle = Handle { destroyed: std::sync::Arc::clone(&destroyed), calls: 0 };
    (Arc::new(Slot::new_leased(handle)), destroyed)
}

/// Uses the handle as the thread with the lease does. Loom fails the test if another thread's access is not ordered.
fn use_handle(slot: &Slot<Handle>) -> u32 {
    // SAFETY: the caller holds the lease.
    let handle = unsafe { (*slot.handle()).as_mut() }.expect("a leased slot has a handle");
    handle.calls += 1;
    handle.calls
}

/// A thread ends and gives its handle back while another takes one from the idle stack.
#[test]
fn a_handle_goes_from_an_ending_thread_to_the_next() {
    loom::model(|| {
        let (slot, destroyed) = new_slot();
        let stack = Arc::new(IdleStack::new());
        let ending = {
            let (slot, stack) = (Arc::clone(&slot), Arc::clone(&stack));
            thread::spawn(move || {
                use_handle(&slot);
                assert!(slot.release_to_thread_cache());
                assert!(slot.lease_claimed());
                use_handle(&slot);
                assert!(slot.release_to_thread_cache());
                assert!(slot.unclaim());
                stack.push(slot);
            })
        };
        let taken = stack.pop();
        if let Some(slot) = &taken {
            use_handle(slot);
            slot.release_to_idle();
            stack.push(Arc::clone(slot));
        }
        ending.join().unwrap();
        let found = stack.pop().expect("the handle is idle in the end, and only once");
        assert!(stack.pop().is_none());
        assert_eq!(use_handle(&found), if taken.is_some() { 4 } else { 3 });
        found.release_to_idle();
        drop(slot.retire());
        assert_eq!(destroyed.load(SeqCst), 1);
    });
}

/// An owned lease ends in one thread while the thread that took it ends: the handle is idle in the end, once.
#[test]
fn an_owned_lease_and_the_thread_of_its_claim_end_at_once() {
    loom::model(|| {
        let (slot, destroyed) = new_slot();
        let stack = Arc::new(IdleStack::new());
        let ending = {
            let (slot, stack) = (Arc::clone(&slot), Arc::clone(&stack));
            thread::spawn(move || {
                if slot.unclaim() {
                    stack.push(slot);
                }
            })
        };
        use_handle(&slot);
        if !slot.release_to_claim() {
            slot.release_to_idle();
            stack.push(Arc::clone(&slot));
        }
        let early = stack.pop();
        if let Some(found) = &early {
            use_handle(found);
        }
        ending.join().unwrap();
        let found = early.or_else(|| stack.pop()).expect("the handle is idle in the end");
        use_handle(&found);
        assert!(stack.pop().is_none(), "the handle is idle only once");
        assert!(slot.is_leased() && slot.retire().is_none());
        found.release_to_idle();
        drop(slot.retire());
        assert_eq!(destroyed.load(SeqCst), 1);
    });
}

/// An owned lease ends in one thread while the thread that took it leases again: the handle has one user at a time.
#[test]
fn an_owned_lease_ends_while_its_thread_leases_again() {
    loom::model(|| {
        let (slot, destroyed) = new_slot();
        let taker = {
            let slot = Arc::clone(&slot);
            thread::spawn(move || {
                if slot.lease_claimed() {
                    use_handle(&slot);
                    assert!(slot.release_to_thread_cache());
                }
                slot.unclaim()
            })
        };
        use_handle(&slot);
        let returned = slot.release_to_claim();
        if !returned {
            slot.release_to_idle();
        }
        assert_eq!(taker.join().unwrap(), returned, "one of the two makes the slot idle");
        assert!(slot.is_idle());
        assert!(slot.retire().is_some());
        assert_eq!(destroyed.load(SeqCst), 1);
    });
}

/// The pool retires a slot while its thread leases it again: either one wins, and the handle is destroyed once.
#[test]
fn retiring_a_claimed_slot_and_leasing_it_exclude_each_other() {
    loom::model(|| {
        let (slot, destroyed) = new_slot();
        assert!(slot.release_to_thread_cache());
        let owner = {
            let slot = Arc::clone(&slot);
            thread::spawn(move || {
                let leased = slot.lease_claimed();
                if leased {
                    use_handle(&slot);
                    assert!(slot.release_to_thread_cache());
                }
                leased
            })
        };
        let retired = slot.retire();
        let was_retired = retired.is_some();
        drop(retired);
        let leased = owner.join().unwrap();
        assert!(leased || was_retired, "one of them must win");
        drop(slot.retire());
        assert!(slot.is_retired());
        assert!(!slot.lease_claimed() && !slot.lease_idle());
        assert_eq!(destroyed.load(SeqCst), 1);
    });
}

/// A thread pops while the pool retires everything: no thread gets a retired handle, and no handle is destroyed twice.
#[test]
fn retiring_idle_slots_and_popping_exclude_each_other() {
    loom::model(|| {
        let (slot, destroyed) = new_slot();
        let stack = Arc::new(IdleStack::new());
        slot.release_to_idle();
        stack.push(Arc::clone(&slot));
        let popper = {
            let stack = Arc::clone(&stack);
            thread::spawn(move || match stack.pop() {
                Some(slot) => {
                    use_handle(&slot);
                    assert!(slot.release_to_thread_cache());
                    assert!(slot.unclaim() || slot.is_retired());
                    true
                }
                None => false,
            })
        };
        // The pool goes by its list of slots, not by the stack: the slot may be popped at this moment.
        let retired = slot.retire().is_some();
        let popped = popper.join().unwrap();
        assert!(retired || popped);
        drop(slot.retire());
        assert_eq!(destroyed.load(SeqCst), 1);
    });
}
