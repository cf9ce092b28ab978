//! Workspaces: one block of device memory for each stream that ran a BLAS call, so that bytes grow with the streams in
//! use and not with threads times streams. Lt calls use it too; a stream that only ever ran Lt calls has a smaller one.
//!
//! A stream keeps its workspace until it ends; then the block goes to the next stream that needs one, which first waits,
//! on the device, for the work of the old one. A block serves one call at a time: the lease takes the stream's *turn*
//! for the length of one vendor call (see `stream.rs`).

use std::sync::Arc;

use parking_lot::Mutex;

use super::events::Mark;
use highwater_hal::Workspace;

/// Workspaces of one device.
#[derive(Debug, Default)]
pub(crate) struct WorkspacePool(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    idle: Vec<IdleWorkspace>,
    /// Every workspace that is allocated, idle or with a stream.
    all: Vec<Workspace>,
}

/// A workspace that no stream has.
#[derive(Debug, Clone)]
pub(crate) struct IdleWorkspace {
    pub(crate) workspace: Workspace,
    /// The last work that uses it; `None` where there is none.
    pub(crate) after: Option<Arc<Mark>>,
}

impl WorkspacePool {
    /// The smallest idle workspace of at least `bytes`.
    pub(crate) fn take(&self, bytes: usize) -> Option<IdleWorkspace> {
        let mut state = self.0.lock();
        let fits = |idle: &(usize, &IdleWorkspace)| idle.1.workspace.bytes >= bytes;
        let smallest = state.idle.iter().enumerate().filter(fits).min_by_key(|(_, idle)| idle.workspace.bytes);
        let index = smallest?.0;
        Some(state.idle.swap_remove(index))
    }

    pub(crate) fn give_back(&self, idle: IdleWorkspace) {
        self.0.lock().idle.push(idle);
    }

    /// Takes in a block that was allocated.
    pub(crate) fn add(&self, workspace: Workspace) {
        self.0.lock().all.push(workspace);
    }

    /// Strikes out a block that is about to be freed.
    pub(crate) fn remove(&self, workspace: Workspace) {
        self.0.lock().all.retain(|other| *other != workspace);
    }

    /// Takes out the idle workspace that was given back longest ago.
    pub(crate) fn pop_idle(&self) -> Option<IdleWorkspace> {
        let mut state = self.0.lock();
        if state.idle.is_empty() { None } else { Some(state.idle.remove(0)) }
    }

    pub(crate) fn idle_count(&self) -> usize {
        self.0.lock().idle.len()
    }

    /// Takes out every workspace, idle or not, at the end of the runtime.
    pub(crate) fn take_all(&self) -> Vec<Workspace> {
        let mut state = self.0.lock();
        state.idle.clear();
        std::mem::take(&mut state.all)
    }

    /// Number of workspaces, and their bytes.
    pub(crate) fn held(&self) -> (u64, u64) {
        let state = self.0.lock();
        (state.all.len() as u64, state.all.iter().map(|workspace| workspace.bytes as u64).sum())
    }
}

#[cfg(test)]
impl WorkspacePool {
    pub(crate) fn hold_lock(&self) -> impl Drop + '_ {
        crate::testing::Held(self.0.lock())
    }

    pub(crate) fn is_locked(&self) -> bool {
        self.0.is_locked()
    }
}
