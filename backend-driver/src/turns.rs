//! Calls that use one graph, one after another.
//!
//! Neither vendor synchronizes the calls on a graph, not even those that only read it: the caller must. On H200s (driver
//! 580.159.04), threads that made executables of one graph at the same time corrupted the memory of the process.

use std::collections::HashSet;

use highwater_hal::GraphId;
use parking_lot::{Condvar, Mutex};

/// The graphs that a call uses. A call waits until no other one uses its graph. The lock is not held during the call.
#[derive(Debug, Default)]
pub(super) struct Turns {
    used: Mutex<HashSet<GraphId>>,
    ended: Condvar,
}

/// The use of one graph, until the value is dropped.
#[derive(Debug)]
pub(super) struct Turn<'t> {
    turns: &'t Turns,
    graph: GraphId,
}

impl Turns {
    /// Waits until no other call uses the graph.
    pub(super) fn wait_for(&self, graph: GraphId) -> Turn<'_> {
        let mut used = self.used.lock();
        while !used.insert(graph) {
            self.ended.wait(&mut used);
        }
        Turn { turns: self, graph }
    }

    #[cfg(test)]
    pub(super) fn is_locked(&self) -> bool {
        self.used.is_locked()
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.turns.used.lock().remove(&self.graph);
        self.turns.ended.notify_all();
    }
}
