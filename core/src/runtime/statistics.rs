//! [`Statistics`]: what the pools of a runtime hold and did.

use super::Runtime;
use crate::capture::GraphStatistics;
use crate::pool::{HandlePoolStatistics, HostCacheStatistics};
use crate::sharing::SharingStatistics;

/// What a runtime's pools hold and did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Statistics {
    /// The pool of BLAS handles.
    pub blas_handles: HandlePoolStatistics,
    /// The pool of Lt handles.
    pub lt_handles: HandlePoolStatistics,
    /// Workspaces allocated, over all devices.
    pub workspaces: u64,
    /// Bytes of those workspaces.
    pub workspace_bytes: u64,
    /// Events that the pools made and keep, over all devices: completion events of recent work, and idle ones.
    pub events: u64,
    /// The idle events among them, kept for reuse. [`Runtime::trim`](crate::Runtime::trim) destroys them.
    pub idle_events: u64,
    /// The cache of page-locked host memory.
    pub host: HostCacheStatistics,
    /// What is shared with other processes.
    pub sharing: SharingStatistics,
    /// What captures and graphs hold.
    pub graphs: GraphStatistics,
    /// Releases that the backend refused.
    pub failed_releases: u64,
    /// Streams, events and graphs among them that still wait to be destroyed. [`Runtime::reclaim`](crate::Runtime::reclaim), [`Runtime::trim`](crate::Runtime::trim)
    /// and the end of the runtime retry them. An object that the backend answers for with `InvalidHandle` no longer
    /// exists, so it is not retried.
    pub refused_destroys: u64,
    /// Streams, events, buffers and handles that were left on purpose because the process is exiting.
    pub left_at_exit: u64,
}

impl Runtime {
    /// What the pools hold and did.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        let inner = &*self.inner;
        if !inner.generation.is_current() {
            return Statistics::default();
        }
        let (workspaces, workspace_bytes) = inner.workspaces.held();
        let add = |sum: (u64, u64), held: (u64, u64)| (sum.0 + held.0, sum.1 + held.1);
        let (events, idle_events) = inner.devices.iter().map(|device| device.events.held()).fold((0, 0), add);
        Statistics {
            blas_handles: inner.handles.blas.statistics(),
            lt_handles: inner.handles.lt.statistics(),
            workspaces,
            workspace_bytes,
            events,
            idle_events,
            host: inner.pinned.statistics(),
            sharing: inner.sharing.get().map(|sharing| sharing.statistics()).unwrap_or_default(),
            graphs: inner.graphs.statistics(inner.devices.iter().map(|device| &device.capture_gate)),
            failed_releases: inner.failed_releases(),
            refused_destroys: inner.refused_destroys(),
            left_at_exit: inner.left_at_exit(),
        }
    }
}
