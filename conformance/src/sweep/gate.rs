//! The gate: counts the fallible calls of a case, and refuses one of them.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use highwater_hal::{Error, ErrorKind, Result};

/// One call of a case. Its name does not depend on how threads are scheduled.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Fault {
    /// The thread that makes the call. Thread 0 runs the case; the others are numbered in the order of their first calls.
    pub thread: u32,
    /// The method of the trait. Methods of the allocator carry the prefix `host_`.
    pub operation: Cow<'static, str>,
    /// The number of the call among the thread's calls of the operation, from 1.
    pub index: u32,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { thread, operation, index } = self;
        write!(f, "call {index} of `{operation}` in thread {thread}")
    }
}

/// The calls of one operation that one thread of a case makes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Calls {
    /// The thread, as in [`Fault::thread`].
    pub thread: u32,
    /// The operation, as in [`Fault::operation`].
    pub operation: Cow<'static, str>,
    /// The number of calls.
    pub count: u32,
}

/// Up to this number, each call of one operation by one thread is refused in turn. Later calls belong to a loop of the case.
const EACH: u32 = 64;

/// In a loop, the next refused call is this fraction further on than the last.
const FURTHER: u32 = 8;

impl Calls {
    /// Returns the calls to refuse: each of the first 64, and then each that is an eighth further on than the last.
    pub fn faults(&self) -> impl Iterator<Item = Fault> {
        let next = |index: &u32| index.checked_add(if *index < EACH { 1 } else { index / FURTHER });
        let indices = std::iter::successors(Some(1), next).take_while(|index| *index <= self.count);
        indices.map(|index| Fault { thread: self.thread, operation: self.operation.clone(), index })
    }
}

/// The code of an injected error. No vendor has it.
const CODE: i64 = i64::from_le_bytes(*b"hw sweep");

/// Returns whether the gate injected the error.
pub(crate) fn is_injected(error: &Error) -> bool {
    error.code() == Some(CODE)
}

/// Repeats a release that an injected fault refused, because a dropped guard has no later chance.
pub(crate) fn insist(mut release: impl FnMut() -> Result<()>) -> Result<()> {
    match release() {
        Err(error) if is_injected(&error) => release(),
        answer => answer,
    }
}

/// Whether the gate treats the calls of this thread as one; see [`as_one`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Piece {
    None,
    Begins,
    GoesOn,
}

thread_local! {
    static PIECE: Cell<Piece> = const { Cell::new(Piece::None) };
}

/// Makes the gate count, and possibly refuse, only the first of these calls. They are equal, and their number depends on the
/// speed of the machine.
pub(crate) fn as_one<T>(calls: impl FnOnce() -> T) -> T {
    /// Ends the piece, even if a call panics.
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            PIECE.set(Piece::None);
        }
    }
    PIECE.set(Piece::Begins);
    let _end = End;
    calls()
}

/// Sees every fallible call of a case.
#[derive(Debug)]
pub(crate) struct Gate {
    fault: Option<Fault>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    threads: HashMap<ThreadId, u32>,
    counts: HashMap<(u32, &'static str), u32>,
    /// The threads and operations in the order of their first calls.
    order: Vec<(u32, &'static str)>,
    injected: bool,
}

impl Gate {
    /// Creates a gate that counts every call, and refuses the call of the fault, if any.
    pub(crate) fn new(fault: Option<Fault>) -> Self {
        let gate = Self { fault, state: Mutex::default() };
        gate.state().threads.insert(std::thread::current().id(), 0);
        gate
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a call. Returns an error if it is the call to refuse.
    pub(crate) fn enter(&self, operation: &'static str) -> Result<()> {
        match PIECE.get() {
            Piece::None => {}
            Piece::Begins => PIECE.set(Piece::GoesOn),
            Piece::GoesOn => return Ok(()),
        }
        let mut state = self.state();
        let State { threads, counts, order, injected } = &mut *state;
        let next = threads.len() as u32;
        let thread = *threads.entry(std::thread::current().id()).or_insert(next);
        let count = counts.entry((thread, operation)).or_insert_with(|| {
            order.push((thread, operation));
            0
        });
        *count += 1;
        match &self.fault {
            Some(fault) if fault.thread == thread && fault.operation == operation && fault.index == *count => {
                *injected = true;
                Err(Error::new(ErrorKind::Vendor, operation, format!("the fault sweep refused {fault}"))
                    .with_code(CODE))
            }
            _ => Ok(()),
        }
    }

    /// Returns whether the fault was injected.
    pub(crate) fn has_injected(&self) -> bool {
        self.state().injected
    }

    /// Returns every counted call.
    pub(crate) fn calls(&self) -> Vec<Calls> {
        let state = self.state();
        let counted = state.order.iter().map(|&(thread, operation)| {
            let count = state.counts.get(&(thread, operation)).copied().unwrap_or_default();
            Calls { thread, operation: operation.into(), count }
        });
        counted.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_call_is_kept_back_and_every_call_is_counted() {
        let fault = Fault { thread: 0, operation: "copy".into(), index: 2 };
        let gate = Gate::new(Some(fault.clone()));
        assert!(gate.enter("copy").is_ok() && gate.enter("fill").is_ok() && !gate.has_injected());
        let error = gate.enter("copy").unwrap_err();
        assert!(is_injected(&error) && gate.has_injected(), "{error}");
        assert!(error.to_string().contains("call 2 of `copy` in thread 0"), "{error}");
        assert!(gate.enter("copy").is_ok());
        let calls = gate.calls();
        assert_eq!(calls.iter().map(|calls| calls.count).collect::<Vec<_>>(), [3, 1]);
        assert!(calls[0].faults().any(|counted| counted == fault), "{calls:?}");
    }

    #[test]
    fn a_piece_of_work_is_one_call() {
        let gate = Gate::new(None);
        let piece = || (0..9).try_for_each(|_| gate.enter("copy"));
        assert!(as_one(piece).is_ok() && gate.enter("copy").is_ok() && as_one(piece).is_ok());
        assert_eq!(gate.calls()[0].count, 3);
        let gate = Gate::new(Some(Fault { thread: 0, operation: "copy".into(), index: 1 }));
        assert!(as_one(|| gate.enter("copy")).is_err());
    }

    #[test]
    fn of_a_long_loop_some_are_refused() {
        let indices = |count| {
            let calls = Calls { thread: 0, operation: "copy".into(), count };
            calls.faults().map(|fault| fault.index).collect::<Vec<_>>()
        };
        assert_eq!((indices(0), indices(3)), (vec![], vec![1, 2, 3]));
        assert_eq!(indices(64).len(), 64);
        assert_eq!(indices(100)[62..], [63, 64, 72, 81, 91]);
        assert!(indices(u32::MAX).len() < 300);
    }

    #[test]
    fn threads_count_for_themselves() {
        let gate = Gate::new(Some(Fault { thread: 1, operation: "copy".into(), index: 1 }));
        assert!(gate.enter("copy").is_ok());
        assert!(std::thread::scope(|scope| scope.spawn(|| gate.enter("copy")).join().unwrap()).is_err());
        assert!(gate.enter("copy").is_ok());
    }

    #[test]
    fn a_release_is_tried_again_after_an_injected_fault_only() {
        let gate = Gate::new(Some(Fault { thread: 0, operation: "free".into(), index: 1 }));
        let mut calls = 0;
        let released = insist(|| {
            calls += 1;
            gate.enter("free")
        });
        assert!(released.is_ok() && calls == 2);
        let mut calls = 0;
        let refused = insist(|| {
            calls += 1;
            Err(Error::new(ErrorKind::Vendor, "free", "really"))
        });
        assert!(refused.is_err() && calls == 1);
    }
}
