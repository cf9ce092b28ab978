//! The counts of graphs and of the memory that they keep.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::capture_gate::CaptureGate;

/// The state of captures and graphs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct GraphStatistics {
    /// Streams that take part in open captures.
    pub capturing_streams: u64,
    /// Live graphs.
    pub graphs: u64,
    /// Blocks of device memory that graphs keep, counted for each graph.
    pub device_blocks: u64,
    /// Blocks of page-locked memory that graphs keep, counted for each graph.
    pub pinned_blocks: u64,
    /// Workspaces that graphs own.
    pub workspaces: u64,
}

/// Counts of graphs and of the memory that they keep.
#[derive(Debug, Default)]
pub(crate) struct GraphCounters {
    pub(super) live: AtomicU64,
    pub(super) device_blocks: AtomicU64,
    pub(super) pinned_blocks: AtomicU64,
    pub(super) workspaces: AtomicU64,
}

impl GraphCounters {
    pub(crate) fn statistics<'d>(&self, gates: impl Iterator<Item = &'d CaptureGate>) -> GraphStatistics {
        GraphStatistics {
            capturing_streams: gates.map(CaptureGate::capturing_streams).sum(),
            graphs: self.live.load(Ordering::Relaxed),
            device_blocks: self.device_blocks.load(Ordering::Relaxed),
            pinned_blocks: self.pinned_blocks.load(Ordering::Relaxed),
            workspaces: self.workspaces.load(Ordering::Relaxed),
        }
    }
}
