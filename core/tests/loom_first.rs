//! Model checking of the first creation of a handle: every interleaving of the threads below with up to
//! three preemptions is tried.
//!
//! The file under test is compiled against loom's types; its `crate::primitive` is the module here.

#![allow(missing_docs, unreachable_pub, dead_code, reason = "the file under test is compiled as part of this test")]

mod primitive {
    use std::time::Duration;

    pub(crate) use loom::sync::atomic::{AtomicU32, Ordering};

    /// parking_lot's interface over loom's mutex.
    #[derive(Debug)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    /// A guard that a wait can take for its length.
    pub(crate) struct Guard<'m, T>(Option<loom::sync::MutexGuard<'m, T>>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }
        pub(crate) fn lock(&self) -> Guard<'_, T> {
            Guard(Some(self.0.lock().unwrap()))
        }
    }

    impl<T> std::ops::Deref for Guard<'_, T> {
        type Target = T;
        fn deref(&self) -> &T {
            self.0.as_deref().expect("the guard is held")
        }
    }

    impl<T> std::ops::DerefMut for Guard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.0.as_deref_mut().expect("the guard is held")
        }
    }

    /// parking_lot's interface over loom's condition variable. No wait times out, so a lost wake-up is a deadlock, which loom finds.
    #[derive(Debug)]
    pub(crate) struct Condvar(loom::sync::Condvar);

    pub(crate) struct Woken;

    impl Woken {
        pub(crate) fn timed_out(&self) -> bool {
            false
        }
    }

    impl Condvar {
        pub(crate) fn new() -> Self {
            Self(loom::sync::Condvar::new())
        }
        pub(crate) fn wait_for<T>(&self, guard: &mut Guard<'_, T>, _longest: Duration) -> Woken {
            let held = guard.0.take().expect("the guard is held");
            guard.0 = Some(self.0.wait(held).unwrap());
            Woken
        }
        pub(crate) fn notify_all(&self) {
            self.0.notify_all();
        }
    }
}

#[path = "../src/pool/first_create.rs"]
mod first_create;

use std::sync::atomic::{AtomicU32 as StdAtomicU32, Ordering::SeqCst};

use first_create::FirstCreate;
use loom::sync::Arc;
use loom::thread;

/// Runs this in two new threads and in the calling one.
fn in_three_threads(run: impl Fn() + Clone + Send + 'static) {
    let others: Vec<_> = (0..2).map(|_| thread::spawn(run.clone())).collect();
    run();
    others.into_iter().for_each(|other| other.join().unwrap());
}

/// Exactly one of three threads is the first. The others enter only after its creation has ended, and all enter.
#[test]
fn one_thread_creates_first_and_the_others_after_it() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let gate = Arc::new(FirstCreate::new());
        let (firsts, ended) = (std::sync::Arc::new(StdAtomicU32::new(0)), std::sync::Arc::new(StdAtomicU32::new(0)));
        let create = {
            let (gate, firsts, ended) = (Arc::clone(&gate), firsts.clone(), ended.clone());
            move || {
                let entry = gate.enter(None);
                if entry.is_first() {
                    firsts.fetch_add(1, SeqCst);
                    thread::yield_now();
                    ended.store(1, SeqCst);
                } else {
                    assert_eq!(ended.load(SeqCst), 1, "the first creation is still under way");
                }
            }
        };
        in_three_threads(create);
        assert_eq!(firsts.load(SeqCst), 1);
    });
}

/// The first thread makes handles for the threads that wait. Each thread that it has counted finds one, no handle is left over, and
/// only a thread that came later creates its own.
#[test]
fn the_first_thread_makes_handles_for_those_that_wait() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let gate = Arc::new(FirstCreate::new());
        let [idle, made, own] = [(); 3].map(|()| std::sync::Arc::new(StdAtomicU32::new(0)));
        let create = {
            let (gate, idle, made, own) = (Arc::clone(&gate), idle.clone(), made.clone(), own.clone());
            move || {
                let entry = gate.enter(Some(1));
                if entry.is_first() {
                    while (entry.demand().handles as u32) > made.load(SeqCst) {
                        made.fetch_add(1, SeqCst);
                        thread::yield_now();
                        idle.fetch_add(1, SeqCst);
                    }
                    let demand = entry.demand();
                    assert_eq!(demand.workspaces, usize::from(demand.handles > 0));
                } else if idle.fetch_update(SeqCst, SeqCst, |idle| idle.checked_sub(1)).is_err() {
                    own.fetch_add(1, SeqCst);
                }
            }
        };
        in_three_threads(create);
        assert_eq!((idle.load(SeqCst), made.load(SeqCst) + own.load(SeqCst)), (0, 2));
    });
}
