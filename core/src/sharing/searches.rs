//! The short-lived threads that look for heirs or take a hand-over. They wait for other processes, which the answering thread must not.
//!
//! Such a thread uses descriptors and objects of its runtime or holder. The end of the runtime or holder therefore wakes all of these threads
//! and waits for their end. No thread owns the count of the threads. Each thread is counted until it has dropped its last reference.

use std::cell::Cell;
use std::collections::HashSet;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags};

use super::identity::Process;
use super::system::{Bell, is_readable};
use crate::own_thread::spawn;
use highwater_hal::{Result, fork::Generation};

thread_local! {
    /// True in the threads of this module.
    static IS_SEARCH: Cell<bool> = const { Cell::new(false) };
}

/// The threads of one runtime or holder.
#[derive(Debug)]
pub(super) struct Searches {
    generation: Generation,
    threads: Arc<Threads>,
    /// Readable while the threads must end.
    end: Arc<Bell>,
}

#[derive(Debug, Default)]
struct Threads {
    state: Mutex<State>,
    /// Signaled when a thread has ended, and when threads may begin again.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The owners for which a thread works. At most one thread works for each.
    incarnations: HashSet<[u8; 16]>,
    threads: usize,
    is_ending: bool,
}

/// One thread, until it drops this. The drop closes the descriptor before it changes the count.
pub(super) struct Search {
    end: Arc<Bell>,
    counted: Counted,
}

struct Counted {
    threads: Arc<Threads>,
    incarnation: [u8; 16],
    is_over: AtomicBool,
}

impl Searches {
    pub(super) fn new(operation: &'static str) -> Result<Self> {
        let (generation, threads) = (Generation::current(), Arc::default());
        Ok(Self { generation, threads, end: Arc::new(Bell::new(operation)?) })
    }

    /// Starts a thread that works for an owner, unless one does so already, or the threads must end. The thread drops `work` before it
    /// counts as ended.
    pub(super) fn begin(
        &self,
        operation: &'static str,
        incarnation: [u8; 16],
        work: impl FnOnce(&Search) + Send + 'static,
    ) -> Result<()> {
        {
            let mut state = self.threads.state.lock();
            if state.is_ending || !state.incarnations.insert(incarnation) {
                return Ok(());
            }
            state.threads += 1;
        }
        let (threads, is_over) = (Arc::clone(&self.threads), AtomicBool::new(false));
        // If no thread can be created, its drop undoes the above.
        let search = Search { end: Arc::clone(&self.end), counted: Counted { threads, incarnation, is_over } };
        let started = spawn(("highwater-heir", operation, ""), move || {
            let search = search;
            IS_SEARCH.set(true);
            work(&search);
        });
        started.map(drop)
    }

    /// Returns the owners for which a thread works.
    pub(super) fn incarnations(&self) -> HashSet<[u8; 16]> {
        self.threads.state.lock().incarnations.clone()
    }

    /// Wakes the threads, which must end. No other thread begins before [`Searches::allow`].
    pub(super) fn signal_end(&self) {
        // The threads do not exist in a forked child, and may have held the lock.
        if self.generation.is_current() {
            let mut state = self.threads.state.lock();
            state.is_ending = true;
            self.end.ring();
        }
    }

    /// Waits until the threads that [`Searches::signal_end`] woke have ended. In such a thread, returns at once.
    pub(super) fn wait_for_end(&self) {
        // The thread-local may be gone at the end of the thread.
        if !self.generation.is_current() || IS_SEARCH.try_with(Cell::get).unwrap_or(true) {
            return;
        }
        let mut state = self.threads.state.lock();
        while state.is_ending && state.threads > 0 {
            self.threads.changed.wait(&mut state);
        }
    }

    /// Lets threads begin again.
    pub(super) fn allow(&self) {
        let mut state = self.threads.state.lock();
        if std::mem::replace(&mut state.is_ending, false) {
            self.end.drain();
            self.threads.changed.notify_all();
        }
    }
}

impl Search {
    /// Returns whether the thread must end.
    pub(super) fn has_to_end(&self) -> bool {
        is_readable(self.ending())
    }

    /// Returns the descriptor that is readable once the thread must end.
    pub(super) fn ending(&self) -> BorrowedFd<'_> {
        self.end.descriptor()
    }

    /// Waits for this time, or until the thread must end, or until a process has ended.
    pub(super) fn sleep(&self, time: Duration, process: Option<&Arc<Process>>) {
        let pidfd = process.and_then(|process| process.pidfd());
        let ends = [self.ending()].into_iter().chain(pidfd);
        let mut ends: Vec<_> = ends.map(|end| PollFd::from_borrowed_fd(end, PollFlags::IN)).collect();
        // Interrupted or not, the caller looks again.
        let _ = rustix::event::poll(&mut ends, rustix::time::Timespec::try_from(time).ok().as_ref());
    }

    /// Lets the next thread for the same owner begin.
    pub(super) fn note_over(&self) {
        self.counted.note_over(&mut self.counted.threads.state.lock());
    }
}

impl Counted {
    fn note_over(&self, state: &mut State) {
        // Afterwards, the entry may be that of the next thread.
        if !self.is_over.swap(true, Ordering::Relaxed) {
            state.incarnations.remove(&self.incarnation);
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut state = self.threads.state.lock();
        self.note_over(&mut state);
        state.threads -= 1;
        drop(state);
        self.threads.changed.notify_all();
    }
}

#[cfg(test)]
impl Searches {
    pub(super) fn is_locked(&self) -> bool {
        self.threads.state.is_locked()
    }

    pub(super) fn hold_lock(&self) -> impl Drop + '_ {
        crate::testing::Held(self.threads.state.lock())
    }
}
