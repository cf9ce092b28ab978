//! Calls that use one graph or an executable of it, one after another.
//!
//! Neither vendor synchronizes the calls on a graph, not even those that only read it. The caller must. On H200s (driver
//! 580.159.04), threads that made and destroyed executables of one graph at the same time corrupted the memory of the process.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Condvar, Mutex};

/// A graph and its executables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Family(pub(super) u64);

/// The families that calls use. A call waits until no other one uses its family. The lock is not held during the call.
#[derive(Debug, Default)]
pub(super) struct Turns {
    last: AtomicU64,
    used: Mutex<HashSet<Family>>,
    ended: Condvar,
}

/// The use of one family, until the value is dropped.
#[derive(Debug)]
pub(super) struct Turn<'t> {
    turns: &'t Turns,
    family: Family,
}

impl Turns {
    /// Returns the family of a new graph.
    pub(super) fn found(&self) -> Family {
        Family(self.last.fetch_add(1, Ordering::Relaxed))
    }

    /// Waits until no other call uses the family.
    pub(super) fn wait_for(&self, family: Family) -> Turn<'_> {
        let mut used = self.used.lock();
        while !used.insert(family) {
            self.ended.wait(&mut used);
        }
        Turn { turns: self, family }
    }

    #[cfg(test)]
    pub(super) fn is_locked(&self) -> bool {
        self.used.is_locked()
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.turns.used.lock().remove(&self.family);
        self.turns.ended.notify_all();
    }
}
