//! The first creation of a handle: one thread makes it, and the others wait for its end.
//!
//! A vendor's first creation initializes its library and loads its kernels. Later ones are far quicker. Threads that all create
//! at once, before the first has ended, wait for each other inside the driver, which takes longer than one after another. So the
//! first thread to come creates, and each other thread waits until that creation is over, and then creates its own.
//!
//! | state | meaning | leaves by |
//! | --- | --- | --- |
//! | `NEW` | no thread has come | the first thread enters |
//! | `UNDER_WAY` | that thread creates | its entry is dropped, after success, failure or panic |
//! | `OVER` | every thread enters at once | never |
//!
//! No thread waits for a handle of another thread. After a failed first creation all threads try at once, so none waits twice. No
//! thread waits longer than [`LONGEST_WAIT`].
//!
//! *Orderings.* The state orders nothing but itself: handles travel through the pool. Waiters read it under the mutex under which
//! the end is written, so no wake-up is lost.

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
    ending: Mutex<()>,
    ended: Condvar,
}

/// The right to create. The others wait while the entry of the first thread lives.
#[derive(Debug)]
pub(crate) struct Entry<'f> {
    first: Option<&'f FirstCreate>,
    has_waited: bool,
}

impl Entry<'_> {
    /// Returns an entry for which no other thread waits.
    pub(crate) const fn later() -> Self {
        Self { first: None, has_waited: false }
    }

    /// Returns whether the thread has waited for another's creation.
    pub(crate) fn has_waited(&self) -> bool {
        self.has_waited
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
            let ending = first.ending.lock();
            first.state.store(OVER, Ordering::Release);
            drop(ending);
            first.ended.notify_all();
        }
    }
}

impl FirstCreate {
    pub(crate) fn new() -> Self {
        Self { state: AtomicU32::new(NEW), ending: Mutex::new(()), ended: Condvar::new() }
    }

    /// Enters a creation. If the first one is under way in another thread, waits for its end. The caller must hold no lock.
    pub(crate) fn enter(&self) -> Entry<'_> {
        match self.state.compare_exchange(NEW, UNDER_WAY, Ordering::Acquire, Ordering::Acquire) {
            Ok(_) => Entry { first: Some(self), has_waited: false },
            Err(OVER) => Entry::later(),
            Err(_) => {
                let mut ending = self.ending.lock();
                while self.state.load(Ordering::Acquire) == UNDER_WAY {
                    if self.ended.wait_for(&mut ending, LONGEST_WAIT).timed_out() {
                        break;
                    }
                }
                Entry { first: None, has_waited: true }
            }
        }
    }
}
