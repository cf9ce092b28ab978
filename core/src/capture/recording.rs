//! The recording of a capture: the memory of each stream that takes part, and the events.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::memory::GraphMemory;
use crate::device_block::DeviceBlock;
use crate::pool::block::KeptBlock;
use crate::pool::completion_events::CompletionEvent;
use crate::pool::workspaces::IdleWorkspace;
use crate::stream::core::StreamCore;
use highwater_hal::{BlasKind, Error, ErrorKind, HostPtr, Workspace};

/// The state that the streams of a capture share with the events recorded in it.
pub(crate) struct Capture {
    /// Set before the end takes the submission locks of the streams.
    closed: AtomicBool,
    state: Mutex<CaptureState>,
}

#[derive(Default)]
pub(super) struct CaptureState {
    /// Streams that take part, or may have been about to. The capture keeps them alive.
    pub(super) streams: Vec<Arc<StreamCore>>,
    /// Events recorded in the capture that were dropped, and whether their ids were exposed.
    events: Vec<(CompletionEvent, bool)>,
    /// True if the backend has ended the capture, so that its events belong to no capture.
    ended: bool,
}

impl fmt::Debug for Capture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Capture").field("closed", &self.closed).finish_non_exhaustive()
    }
}

impl Capture {
    pub(super) fn new(first: &Arc<StreamCore>) -> Arc<Self> {
        let state = CaptureState { streams: vec![Arc::clone(first)], ..CaptureState::default() };
        Arc::new(Self { closed: AtomicBool::new(false), state: Mutex::new(state) })
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Adds a stream that is about to take part. Returns false if the capture has ended.
    pub(crate) fn add(&self, stream: &Arc<StreamCore>) -> bool {
        let mut state = self.state.lock();
        if self.is_closed() {
            return false;
        }
        state.streams.push(Arc::clone(stream));
        true
    }

    pub(crate) fn close(&self) -> Vec<Arc<StreamCore>> {
        let mut state = self.state.lock();
        self.closed.store(true, Ordering::Release);
        std::mem::take(&mut state.streams)
    }

    /// Keeps an event that is dropped until the capture ends. Returns it if the capture has ended.
    pub(crate) fn keep_event(&self, completion: CompletionEvent, exposed: bool) -> Option<CompletionEvent> {
        let mut state = self.state.lock();
        if state.ended {
            return Some(completion);
        }
        state.events.push((completion, exposed));
        None
    }

    /// Records that the backend has ended the capture. Returns the events that were dropped during it.
    pub(crate) fn set_ended(&self) -> Vec<(CompletionEvent, bool)> {
        let mut state = self.state.lock();
        state.ended = true;
        std::mem::take(&mut state.events)
    }

    /// Returns the error of a query of an event that was recorded in the capture.
    pub(crate) fn no_answer(&self, operation: &'static str) -> Error {
        let message = if self.is_closed() {
            "the event was recorded in a capture, which has ended: it marks a point in a graph, not in a stream"
        } else {
            "the event was recorded in a capture that is open: nothing in it is executed"
        };
        Error::new(ErrorKind::Capture, operation, message).with_hint("record an event after the launch of the graph")
    }
}

/// A stream's part in a capture.
pub(crate) struct Recording {
    pub(crate) capture: Arc<Capture>,
    /// The key under which handles are bound for the capture; not the key of a stream.
    pub(crate) key: u64,
    /// Recorded after the work enqueued on the stream before the capture.
    pub(crate) before: Arc<CompletionEvent>,
    pub(crate) device: u32,
    pub(crate) parts: Parts,
    /// The memory that the stream allocates in the capture, once there is any.
    pub(crate) memory: Option<Arc<GraphMemory>>,
    /// Workspaces for the work, allocated before the capture.
    pub(crate) reserved: Vec<IdleWorkspace>,
    /// Workspaces that raw handles have given back. The capture owns them.
    pub(crate) returned: Vec<Workspace>,
    /// The workspace of each kind, once requested. Contains `None` if workspaces are disabled.
    pub(crate) blas_workspace: Option<Option<Workspace>>,
    pub(crate) lt_workspace: Option<Option<Workspace>>,
}

/// The recorded memory.
#[derive(Default)]
pub(crate) struct Parts {
    /// By address of the block's record.
    pub(super) device: HashMap<usize, Arc<DeviceBlock>>,
    pub(super) pinned: HashMap<HostPtr, RecordedBlock>,
    pub(super) workspaces: Vec<OwnedWorkspace>,
}

/// A page-locked block, with the number of recorded operations that read it and of those that write it.
pub(crate) struct RecordedBlock {
    pub(super) block: KeptBlock,
    pub(super) reads: u32,
    pub(super) writes: u32,
}

pub(crate) struct OwnedWorkspace {
    pub(super) device: u32,
    pub(super) idle: IdleWorkspace,
}

impl Recording {
    /// Returns the workspace for calls of one kind, if one was requested before. As on a stream, Lt calls use the workspace of
    /// the BLAS calls if it is large enough.
    pub(crate) fn existing_workspace(&self, kind: BlasKind, bytes: usize) -> Option<Option<Workspace>> {
        if kind != BlasKind::Lt {
            return self.blas_workspace;
        }
        let large_enough = |blas: &Option<Workspace>| blas.map_or(0, |workspace| workspace.bytes) >= bytes;
        self.lt_workspace.or_else(|| self.blas_workspace.filter(large_enough))
    }

    pub(crate) fn take_reserved(&mut self, bytes: usize) -> Option<IdleWorkspace> {
        let index = self.reserved.iter().position(|idle| idle.workspace.bytes >= bytes)?;
        Some(self.reserved.swap_remove(index))
    }

    /// Takes a workspace that a raw handle has given back. The work of the stream is recorded in order, so it can serve again.
    pub(crate) fn take_returned(&mut self, bytes: usize) -> Option<Workspace> {
        let index = self.returned.iter().position(|workspace| workspace.bytes >= bytes)?;
        Some(self.returned.swap_remove(index))
    }

    /// Keeps a block of device memory that an operation uses. The capture has its own memory as a whole, so a block of it can serve
    /// again in the capture.
    pub(crate) fn keep_device(&mut self, block: &Arc<DeviceBlock>) {
        if block.is_in_order_of(self.key) {
            return;
        }
        self.parts.device.entry(Arc::as_ptr(block).addr()).or_insert_with(|| {
            block.recording_began();
            Arc::clone(block)
        });
    }

    /// Keeps a page-locked block that an operation uses. Returns it if the capture has it already.
    pub(crate) fn keep_pinned(&mut self, block: KeptBlock, writes: bool) -> Option<KeptBlock> {
        let mut surplus = None;
        let recorded = match self.parts.pinned.entry(block.ptr) {
            Entry::Occupied(entry) => {
                surplus = Some(block);
                entry.into_mut()
            }
            Entry::Vacant(entry) => {
                block.uses.recording_began();
                entry.insert(RecordedBlock { block, reads: 0, writes: 0 })
            }
        };
        let count = if writes { &mut recorded.writes } else { &mut recorded.reads };
        // A graph never has four billion copies of one block.
        if *count < u32::MAX {
            *count += 1;
            recorded.block.uses.count_recorded(writes);
        }
        surplus
    }

    pub(crate) fn own(&mut self, idle: IdleWorkspace) {
        self.parts.workspaces.push(OwnedWorkspace { device: self.device, idle });
    }
}
