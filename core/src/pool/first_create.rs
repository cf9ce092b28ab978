//! The first creation of a handle: one thread makes it, and the others wait for its end.
//!
//! A vendor's first creation initializes its library and loads its kernels. Later ones are far quicker. Threads that all create
//! at once wait for each other inside the driver, which takes longer than one after another. So the first thread to come creates,
//! also for the threads that wait by then. Their handles are idle in the pool before the wait ends. A thread that finds none
//! afterward creates its own.
//!
//! | state | meaning | leaves by |
//! | --- | --- | --- |
//! | `NEW` | no thread has come | the first thread enters |
//! | `UNDER_WAY` | that thread creates, also for the [`Demand`] of the others | its entry is dropped, after success, failure or panic |
//! | `OVER` | every thread enters at once | never |
//!
//! No thread waits for a handle that another one holds. After a failed first creation all threads try at once, so none waits twice.
//! No thread waits longer than [`LONGEST_WAIT`].
//!
//! *Orderings.* The state orders nothing but itself: handles travel through the pool. Waiters read it under the mutex under which
//! the end is written, so no wake-up is lost. The same mutex guards the list of the waiting threads. No thread holds it during a
//! call of the backend.

use std::time::Duration;

use crate::primitive::{AtomicU32, Condvar, Mutex, Ordering};

const NEW: u32 = 0;
const UNDER_WAY: u32 = 1;
const OVER: u32 = 2;

/// The longest time that a thread waits for another's first creation.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// The first creation of one kind of handle on one device.
#[derive(Debug)]
pub(crate) struct FirstCreate {
    state: AtomicU32,
    /// The waiting threads: the stream of each that lacks a workspace.
    waiting: Mutex<Vec<Option<u64>>>,
    ended: Condvar,
}

/// What the waiting threads need.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Demand {
    /// Threads that wait, each for one handle.
    pub(crate) handles: usize,
    /// Streams that lack a workspace. Threads may share one. If any thread waits, the first thread's own stream counts too, because
    /// that thread binds its handle at the same time.
    pub(crate) workspaces: usize,
}

/// The right to create. The others wait while the entry of the first thread lives.
#[derive(Debug)]
pub(crate) struct Entry<'f> {
    first: Option<&'f FirstCreate>,
    has_waited: bool,
    /// The thread's own stream, if it lacks a workspace.
    stream: Option<u64>,
}

impl Entry<'_> {
    /// Returns an entry for which no other thread waits.
    pub(crate) const fn later() -> Self {
        Self { first: None, has_waited: false, stream: None }
    }

    /// Returns whether the thread has waited for another's creation.
    pub(crate) fn has_waited(&self) -> bool {
        self.has_waited
    }

    /// Returns what the waiting threads need. For all but the first creation that is nothing.
    pub(crate) fn demand(&self) -> Demand {
        let Some(first) = self.first else { return Demand::default() };
        let waiting = first.waiting.lock();
        if waiting.is_empty() {
            return Demand::default();
        }
        let mut streams: Vec<u64> = waiting.iter().copied().chain([self.stream]).flatten().collect();
        streams.sort_unstable();
        streams.dedup();
        Demand { handles: waiting.len(), workspaces: streams.len() }
    }

    /// Returns whether this is the first creation.
    #[cfg(test)]
    pub(crate) fn is_first(&self) -> bool {
        self.first.is_some()
    }
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        if let Some(first) = self.first {
            let waiting = first.waiting.lock();
            first.state.store(OVER, Ordering::Release);
            drop(waiting);
            first.ended.notify_all();
        }
    }
}

impl FirstCreate {
    pub(crate) fn new() -> Self {
        Self { state: AtomicU32::new(NEW), waiting: Mutex::new(Vec::new()), ended: Condvar::new() }
    }

    /// Enters a creation. If the first one is under way in another thread, waits for its end. The caller must hold no lock.
    /// `stream` is the key of the thread's stream, if it lacks a workspace.
    pub(crate) fn enter(&self, stream: Option<u64>) -> Entry<'_> {
        match self.state.compare_exchange(NEW, UNDER_WAY, Ordering::Acquire, Ordering::Acquire) {
            Ok(_) => Entry { first: Some(self), has_waited: false, stream },
            Err(OVER) => Entry::later(),
            Err(_) => {
                let mut waiting = self.waiting.lock();
                waiting.push(stream);
                while self.state.load(Ordering::Acquire) == UNDER_WAY {
                    if self.ended.wait_for(&mut waiting, LONGEST_WAIT).timed_out() {
                        break;
                    }
                }
                if let Some(own) = waiting.iter().position(|other| *other == stream) {
                    waiting.swap_remove(own);
                }
                Entry { first: None, has_waited: true, stream: None }
            }
        }
    }
}
