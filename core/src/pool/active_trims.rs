//! Trims in progress: a request that finds no memory must not fail while another thread is about to free some.
//!
//! A thread that is out of memory frees the unused blocks one at a time. Another thread that does the same does not see the
//! blocks that the first one holds. So it waits for the trims in progress to end before its final attempt. No lock is held
//! during a trim.

use parking_lot::{Condvar, Mutex};

#[derive(Debug, Default)]
pub(crate) struct ActiveTrims {
    under_way: Mutex<usize>,
    ended: Condvar,
}

/// A trim in progress; ends when dropped.
pub(crate) struct ActiveTrim<'r>(&'r ActiveTrims);

impl ActiveTrims {
    pub(crate) fn begin(&self) -> ActiveTrim<'_> {
        *self.under_way.lock() += 1;
        ActiveTrim(self)
    }

    /// Waits until no trim is in progress. The caller must have ended its own.
    pub(crate) fn wait(&self) {
        let mut under_way = self.under_way.lock();
        while *under_way > 0 {
            self.ended.wait(&mut under_way);
        }
    }
}

impl Drop for ActiveTrim<'_> {
    fn drop(&mut self) {
        *self.0.under_way.lock() -= 1;
        self.0.ended.notify_all();
    }
}

#[cfg(test)]
impl ActiveTrims {
    pub(crate) fn hold_lock(&self) -> impl Drop + '_ {
        crate::testing::Held(self.under_way.lock())
    }

    pub(crate) fn is_locked(&self) -> bool {
        self.under_way.is_locked()
    }
}
