//! [`Graph`]: recorded work, and the memory that it owns.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::memory::GraphMemory;
use super::recording::{OwnedWorkspace, Parts, RecordedBlock, Recording};
use crate::device_block::{DeviceBlock, Noted};
use crate::pool::block_uses::BegunUse;
use crate::pool::completion_events::CompletionEvent;
use crate::pool::pinned::PinnedPool;
use crate::runtime::{Runtime, RuntimeInner};
use crate::services::Dropped;
use crate::stream::Stream;
use crate::stream::core::StreamCore;
use crate::stream::submission::SubmissionGuard;
use highwater_hal::{Error, ErrorKind, GraphExecId, Result};

/// Work that [`Stream::capture`] recorded, to be launched any number of times.
///
/// Dropping a graph never waits and loses no work. Enqueued launches are executed, and then the memory that the graph owns is
/// freed.
pub struct Graph {
    runtime: Runtime,
    device: u32,
    executable: GraphExecId,
    recorded: Recorded,
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph")
            .field("executable", &self.executable)
            .field("device_blocks", &self.recorded.device.len())
            .field("pinned_blocks", &self.recorded.pinned.len())
            .finish_non_exhaustive()
    }
}

impl Graph {
    pub(super) fn new(runtime: Runtime, device: u32, executable: GraphExecId, recorded: Recorded) -> Self {
        Self { runtime, device, executable, recorded }
    }

    /// Returns the ordinal of the device that the graph was captured on.
    #[must_use]
    pub fn device(&self) -> u32 {
        self.device
    }

    /// Enqueues one execution of everything recorded, on any stream of the device. Returns at once.
    ///
    /// Launches of one graph execute one after the other, even on different streams. The device waits for other uses of the
    /// page-locked memory that the graph recorded. The buffers track the launch: see
    /// [`PinnedBuffer::read_with`](crate::PinnedBuffer::read_with).
    ///
    /// # Errors
    /// `WrongDevice` for a stream of another device. `Capture` if the stream takes part in a capture. `InvalidState` while the
    /// CPU accesses page-locked memory of the graph in conflict with it. Otherwise the backend's error.
    pub fn launch(&mut self, stream: &Stream) -> Result<()> {
        const OPERATION: &str = "launch_graph";
        let inner = &self.runtime.inner;
        inner.check(OPERATION)?;
        if !Arc::ptr_eq(&stream.runtime().inner, inner) {
            return Err(Error::new(
                ErrorKind::InvalidHandle,
                OPERATION,
                format!("the {} belongs to another runtime than the graph", stream.id()),
            )
            .with_hint("launch on a stream of the graph's own runtime"));
        }
        if stream.device() != self.device {
            return Err(Error::new(
                ErrorKind::WrongDevice,
                OPERATION,
                format!(
                    "the graph was captured on device {}, the stream is on device {}",
                    self.device,
                    stream.device()
                ),
            )
            .with_hint("launch on a stream of the graph's device"));
        }
        self.recorded.launch(inner, self.executable, stream)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // The recorded memory returns itself.
        let inner = &self.runtime.inner;
        if inner.may_release() {
            inner.destroy_or_defer(Dropped::Executable(self.executable));
        }
    }
}

/// The memory that a graph owns. When dropped, returns it for use after the last launch.
pub(super) struct Recorded {
    runtime: Runtime,
    device: HashMap<usize, Arc<DeviceBlock>>,
    /// Sorted by address once there is a graph, see `pool/block_uses.rs`.
    pinned: Vec<RecordedBlock>,
    workspaces: Vec<OwnedWorkspace>,
    memories: Vec<Arc<GraphMemory>>,
    /// Stream and completion event of the last launch.
    last: Option<(u64, Arc<CompletionEvent>)>,
    /// True if it is unknown whether a launch still runs.
    unmarked: bool,
    is_graph: bool,
}

impl Recorded {
    pub(super) fn new(runtime: Runtime) -> Self {
        Self {
            runtime,
            device: HashMap::new(),
            pinned: Vec::new(),
            workspaces: Vec::new(),
            memories: Vec::new(),
            last: None,
            unmarked: false,
            is_graph: false,
        }
    }

    /// Adds the recording of one stream, after the end of the capture.
    pub(super) fn take_in(&mut self, recording: Recording) {
        let inner = &self.runtime.inner;
        inner.device(recording.device).capture_gate.capture_ended();
        recording.reserved.into_iter().for_each(|idle| inner.workspaces.give_back(recording.device, idle));
        for (record, block) in recording.parts.device {
            block.recording_ended();
            self.device.insert(record, block);
        }
        for (_, recorded) in recording.parts.pinned {
            recorded.block.uses.recording_ended();
            self.pinned.push(recorded);
        }
        self.workspaces.extend(recording.parts.workspaces);
        self.memories.extend(recording.memory);
    }

    /// Returns the recorded memory as the memory of a graph, with one entry for each block.
    pub(super) fn into_graph(mut self) -> Self {
        // Every launch begins its uses in this order.
        let mut pinned = std::mem::take(&mut self.pinned);
        pinned.sort_by_key(|recorded| recorded.block.ptr);
        for recorded in pinned {
            match self.pinned.last_mut().filter(|last| last.block.ptr == recorded.block.ptr) {
                Some(last) => {
                    last.reads = last.reads.saturating_add(recorded.reads);
                    last.writes = last.writes.saturating_add(recorded.writes);
                    self.runtime.inner.pinned.let_go(recorded.block);
                }
                None => self.pinned.push(recorded),
            }
        }
        self.is_graph = true;
        self.count(1);
        self
    }

    fn count(&self, change: u64) {
        let graphs = &self.runtime.inner.graphs;
        let of = |counted: usize| (counted as u64).wrapping_mul(change);
        graphs.live.fetch_add(change, Ordering::Relaxed);
        graphs.device_blocks.fetch_add(of(self.device.len()), Ordering::Relaxed);
        graphs.pinned_blocks.fetch_add(of(self.pinned.len()), Ordering::Relaxed);
        graphs.workspaces.fetch_add(of(self.workspaces.len()), Ordering::Relaxed);
    }

    fn launch(&mut self, inner: &RuntimeInner, executable: GraphExecId, stream: &Stream) -> Result<()> {
        const OPERATION: &str = "launch_graph";
        if self.unmarked {
            return Err(Error::new(
                ErrorKind::InvalidState,
                OPERATION,
                "an earlier launch failed in a way that leaves unknown whether it still runs",
            )
            .with_hint("drop the graph and capture it again"));
        }
        let core = stream.core();
        let begun = self.pinned.iter().map(|recorded| {
            let begun = recorded.block.uses.begin(core.key, recorded.writes > 0).map_err(|_| {
                Error::new(
                    ErrorKind::InvalidState,
                    OPERATION,
                    "the CPU is accessing page-locked memory that the graph uses",
                )
                .with_hint("launch after the closure of `read_with` or `write_with` has returned")
            })?;
            // Checked after the wait: an operation that this one has waited for may have failed.
            PinnedPool::check_known(&recorded.block.uses).map(|()| begun)
        });
        let begun = begun.collect::<Result<Vec<_>>>()?;
        // Before the submission lock: the record takes that of the other stream.
        let racing = self.pinned.iter().zip(&begun);
        let racing =
            racing.map(|(recorded, begun)| PinnedPool::record_racing(&recorded.block, begun).map(Vec::from_iter));
        let racing = racing.collect::<Result<Vec<_>>>()?;
        let note = |noted: Noted, block: &Arc<DeviceBlock>| block.note_use(core).map(|other| noted.and(other));
        let noted = self.device.values().try_fold(Noted::Ordered, note)?;
        let mut completion = inner.device(stream.device()).events.take(&*inner.backend)?;

        let mut submission = core.enter_outside(OPERATION)?;
        noted.check_executed(OPERATION)?;
        if noted != Noted::Ordered {
            self.device.values().try_for_each(|block| block.check_usable(OPERATION))?;
        }
        let previous = self.last.as_ref().filter(|(key, _)| *key != core.key).map(|(_, completion)| completion);
        let workspaces = self.workspaces.iter().filter_map(|owned| owned.idle.after.as_ref());
        let mut awaited: Vec<&Arc<CompletionEvent>> = racing.into_iter().flatten().collect();
        awaited.extend(workspaces.chain(previous));
        awaited.sort_by_key(|completion| Arc::as_ptr(completion));
        awaited.dedup_by_key(|completion| Arc::as_ptr(completion));
        for completion in awaited {
            inner.backend.stream_wait_event(stream.id(), completion.event())?;
        }
        // SAFETY: The graph owns all memory that it recorded, and returns it after the completion event recorded below. This
        // stream waits for the previous launch. Uses that would race on page-locked memory were waited for above. Later uses
        // wait for this launch: its uses are begun, and settled below. `block_uses.rs` describes how the CPU is kept away.
        unsafe { inner.backend.launch_graph(executable, stream.id())? };
        self.workspaces.iter_mut().for_each(|owned| owned.idle.after = None);
        if let Err(error) = core.record(&mut submission, &mut completion) {
            // Without a completion event, the only remaining option is to wait. If the wait fails too, the end of the launch is
            // unknown.
            self.last = None;
            return core.wait_for_all(submission).map_err(|_| {
                self.unmarked = true;
                self.memories.iter().for_each(|memory| memory.ends_after(None));
                self.pinned.iter().for_each(|recorded| recorded.block.uses.unmarked.store(true, Ordering::Relaxed));
                error
            });
        }
        drop(submission);
        let completion = Arc::new(completion);
        let settle = |(begun, recorded): (BegunUse<'_>, &RecordedBlock)| {
            inner.pinned.watch_use(&recorded.block, &completion);
            if begun.settle(Arc::clone(&completion)) {
                inner.pinned.forget_passed(&recorded.block.uses);
            }
        };
        begun.into_iter().zip(&self.pinned).for_each(settle);
        self.memories.iter().for_each(|memory| memory.ends_after(Some(&completion)));
        self.last = Some((core.key, completion));
        Ok(())
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        let inner = &self.runtime.inner;
        if !inner.generation.is_current() {
            // The pools' locks may be held by threads that do not exist in this child.
            return;
        }
        if self.is_graph {
            self.count(1_u64.wrapping_neg());
        }
        for OwnedWorkspace { device, mut idle } in self.workspaces.drain(..) {
            // Without a completion event the workspace stays in the list of all workspaces. No stream uses it, and the end of
            // the runtime frees it.
            if !self.unmarked {
                if let Some((_, completion)) = &self.last {
                    idle.after = Some(Arc::clone(completion));
                }
                inner.workspaces.give_back(device, idle);
            }
        }
        for RecordedBlock { block, reads, writes } in self.pinned.drain(..) {
            block.uses.forget_recorded(reads, writes);
            inner.pinned.let_go(block);
        }
        // `note_use` told the blocks of device memory about the launches, so they are freed after them.
        self.device.clear();
    }
}

impl Parts {
    /// Counts all of it as used on the stream so far. If the end of a capture is refused, it is unknown whether the enqueued
    /// work was recorded: other code can have ended the capture before, and then the work was executed.
    pub(super) fn used_on(&mut self, inner: &RuntimeInner, stream: &StreamCore, memory: Option<&GraphMemory>) {
        if self.pinned.is_empty() && self.workspaces.is_empty() && memory.is_none() {
            return;
        }
        let mut earlier = self.workspaces.iter().filter_map(|owned| owned.idle.after.as_ref());
        let wait = |submission: SubmissionGuard<'_>| {
            let result =
                earlier.try_for_each(|completion| inner.backend.stream_wait_event(stream.id, completion.event()));
            drop(submission);
            result
        };
        // The completion event also covers the earlier users of the workspaces.
        let waited = stream.enter_outside("stream_wait_event").and_then(wait);
        match waited.and_then(|()| stream.completion()) {
            Ok(completion) => {
                memory.into_iter().for_each(|memory| memory.ends_after(Some(&completion)));
                for RecordedBlock { block, writes, .. } in self.pinned.values() {
                    inner.pinned.watch_use(block, &completion);
                    if block.uses.note(Arc::clone(&completion), *writes > 0) {
                        inner.pinned.forget_passed(&block.uses);
                    }
                }
                self.workspaces.iter_mut().for_each(|owned| owned.idle.after = Some(Arc::clone(&completion)));
            }
            Err(error) => {
                inner.count_failed_release(&error);
                memory.into_iter().for_each(|memory| memory.ends_after(None));
                self.pinned.values().for_each(|recorded| recorded.block.uses.unmarked.store(true, Ordering::Relaxed));
                // They stay in the list of all workspaces. No stream uses them, and the end of the runtime frees them.
                self.workspaces.clear();
            }
        }
    }
}
