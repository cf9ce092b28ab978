//! Capture and replay: [`Stream::capture`] records what is enqueued instead of executing it, a [`Graph`] replays it.
//!
//! *Who owns what.* A capture, and then its graph, owns everything that was recorded: blocks of device memory and of
//! page-locked memory by reference, and workspaces of its own. It gives them back when it is dropped and its last launch is
//! done, which the mark of that launch tells; nobody waits. Handles are bound to the capture's workspace while a
//! stream takes part, under a key of the capture, and are bound anew afterwards.
//!
//! *Before, in, or after.* Every call that enqueues takes the stream's turn, and a capture begins and ends under the turns of
//! its streams. So each call knows whether it is recorded. The end takes the turns of all streams of the capture, in the
//! order of their keys; everybody else holds one turn at most.
//!
//! *What would lose a capture is refused* before the backend is called: waiting and asking, and waits for events from
//! outside. What destructors cannot do meanwhile is deferred. A stream that takes part records no marks: work from
//! before the capture is covered by the mark that was recorded when it began, and what is used in the capture is kept by it.
//!
//! *Page-locked memory* of a graph may be in use elsewhere. Nothing of that stands in the way of recording; each launch
//! waits, on the device, for the uses that it would race with, and counts as a use itself. See `pool/block_uses.rs` for
//! how the CPU is kept apart.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::buffer::{DeviceBlock, Noted};
use crate::event::Event;
use crate::gate::CaptureGate;
use crate::pool::block_uses::BegunUse;
use crate::pool::events::Mark;
use crate::pool::host::KeptBlock;
use crate::pool::workspaces::IdleWorkspace;
use crate::runtime::{Runtime, RuntimeInner};
use crate::stream::{Stream, StreamCore, Turn, TurnState};
use highwater_hal::{
    Backend, BlasKind, CaptureMode, Error, ErrorKind, EventId, GraphExecId, GraphId, HostPtr, Result, StreamId,
    Workspace, fork::Generation,
};

// ---------------------------------------------------------------------------------------------------- the user's side

impl Stream {
    /// Records what `record` enqueues on this stream, without executing any of it, as a graph that can be launched often.
    ///
    /// The graph keeps the addresses and numbers of the time of recording, and owns the memory behind them: buffers may
    /// be dropped right away. Values that are copied from a [`PinnedBuffer`](crate::PinnedBuffer) are those that it holds
    /// when the graph is launched. Another stream joins the capture by [`Stream::wait`] for an event that was recorded
    /// in it, and has to be waited for by this one in the same way before the end.
    ///
    /// In the capture, these give `Capture`, and the capture goes on undisturbed: waiting for or asking a stream that takes
    /// part or an event recorded in it; waits for events from outside; allocating device memory and making streams; access
    /// by the CPU to page-locked memory that is recorded. Allocate before. Where the capability
    /// `create_during_capture` is false, run the work once before it is captured, so that handles exist. A capture does
    /// not begin while other threads wait for the stream or for its device. Threads that start to wait meanwhile come
    /// after it.
    ///
    /// ```
    /// use highwater_core::{GemmShape, Runtime};
    /// use highwater_mock::{MockGpu, MockOptions};
    ///
    /// let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
    /// let stream = runtime.device(0)?.create_stream()?;
    /// let (a, b) = (stream.upload(&[2.0_f32])?, stream.upload(&[3.0_f32])?);
    /// let c = stream.upload(&[0.0_f32])?;
    ///
    /// let mut graph = stream.capture(|stream| {
    ///     stream.blas()?.gemm(&GemmShape::of::<f32>(1, 1, 1), 1.0, &a, &b, 1.0, &c)
    /// })?;
    /// assert_eq!(stream.download(&c)?, [0.0], "recorded, not executed");
    /// graph.launch(&stream)?;
    /// graph.launch(&stream)?;
    /// assert_eq!(stream.download(&c)?, [12.0]);
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// The error of `record`. Then, and if it panics, the capture has ended and nothing is kept. `Unsupported` if the
    /// capability `capture` is false. `Capture` if the stream already takes part in a capture or is a default stream,
    /// or if it did not wait for a stream that joined. Else the backend's error.
    pub fn capture(&self, record: impl FnOnce(&Self) -> Result<()>) -> Result<Graph> {
        self.capture_with(CaptureMode::default(), record)
    }

    /// As [`Stream::capture`], with a choice of how strict the vendor is about calls that foreign code makes meanwhile.
    ///
    /// # Errors
    /// As [`Stream::capture`].
    pub fn capture_with(&self, mode: CaptureMode, record: impl FnOnce(&Self) -> Result<()>) -> Result<Graph> {
        let open = OpenCapture::begin(self, mode)?;
        record(self)?;
        open.finish()
    }
}

/// Work that was recorded by [`Stream::capture`], to be launched as often as wanted.
///
/// Dropping a graph never waits and loses nothing: a launch that was enqueued is executed, and what the graph owns is given
/// back after it.
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
    /// Ordinal of the device that the graph was captured on.
    #[must_use]
    pub fn device(&self) -> u32 {
        self.device
    }

    /// Enqueues one execution of everything recorded, on any stream of the device. Returns at once.
    ///
    /// Launches of one graph run one after the other, also on different streams. Page-locked memory that the graph
    /// recorded is waited for on the device, and its buffers remember the launch: see
    /// [`PinnedBuffer::read_with`](crate::PinnedBuffer::read_with).
    ///
    /// # Errors
    /// `WrongDevice` for a stream of another device; `Capture` where the stream takes part in a capture;
    /// `InvalidState` while the CPU accesses page-locked memory of the graph in conflict with it; else what the backend
    /// gives.
    pub fn launch(&mut self, stream: &Stream) -> Result<()> {
        const OPERATION: &str = "launch_graph";
        let inner = &self.runtime.inner;
        inner.check(OPERATION)?;
        if !Arc::ptr_eq(&stream.runtime().inner, inner) {
            return Err(Error::new(
                ErrorKind::InvalidHandle,
                OPERATION,
                format!("{:?} belongs to another runtime than the graph", stream.id()),
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
        // What was recorded gives itself back.
        let inner = &self.runtime.inner;
        if inner.may_release() {
            inner.destroy_or_defer(Dropped::Executable(self.executable));
        }
    }
}

/// What captures and graphs hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct GraphStatistics {
    /// Streams that take part in captures that are open.
    pub capturing_streams: u64,
    /// Graphs that are alive.
    pub graphs: u64,
    /// Blocks of device memory that they keep, counted for each graph.
    pub device_blocks: u64,
    /// Blocks of page-locked memory that they keep, counted for each graph.
    pub pinned_blocks: u64,
    /// Workspaces that they own.
    pub workspaces: u64,
}

// ------------------------------------------------------------------------------------------------ threads and devices

thread_local! {
    /// Captures that this thread has begun and not ended.
    static OPEN_CAPTURES: Cell<u32> = const { Cell::new(0) };
    /// Runtimes whose last user was dropped inside a capture on this thread.
    static ENDING: RefCell<Vec<Arc<RuntimeInner>>> = const { RefCell::new(Vec::new()) };
}

/// Whether this thread is inside a capture.
pub(crate) fn in_capture() -> bool {
    OPEN_CAPTURES.try_with(|open| open.get() > 0).unwrap_or(false)
}

fn count_open(change: i32) {
    // Where the thread is ending, there is nothing left to refuse or to defer.
    let _ = OPEN_CAPTURES.try_with(|open| open.set(open.get().saturating_add_signed(change)));
}

/// Drops a reference to a runtime, whose end waits for captures. Inside a capture of this thread it would wait for
/// ever, so the end of that capture drops the reference.
pub(crate) fn let_go(runtime: Arc<RuntimeInner>) {
    if in_capture() {
        // If the thread is ending, the runtime ends here, without waiting.
        let _ = ENDING.try_with(|ending| ending.borrow_mut().push(runtime));
    }
}

/// Ends the runtimes that were dropped inside a capture, once this thread is inside none.
fn end_runtimes() {
    if !in_capture() {
        // Out of the cell first: the end of a runtime runs code of the backend.
        drop(ENDING.try_with(RefCell::take));
    }
}

/// Refuses what a thread inside a capture must not do.
pub(crate) fn refuse_in_capture(operation: &'static str) -> Result<()> {
    if in_capture() {
        return Err(Error::new(
            ErrorKind::Capture,
            operation,
            "this thread is inside a capture, where this is not possible",
        )
        .with_hint("allocate and create before the capture, and give back after it"));
    }
    Ok(())
}

/// The error of a question to a stream that takes part in a capture.
#[cold]
pub(crate) fn nothing_is_executed(operation: &'static str) -> Error {
    Error::new(
        ErrorKind::Capture,
        operation,
        "the stream takes part in a capture: what is enqueued on it is recorded and not executed",
    )
    .with_hint("do this before the capture, or after it and a launch of its graph; the capture goes on")
}

#[cold]
pub(crate) fn warm_up_first(operation: &'static str, what: &str) -> Error {
    Error::new(
        ErrorKind::Capture,
        operation,
        format!("{what} would have to be made, and this device makes none while a capture is open"),
    )
    .with_hint("warm up first: run the same work once before the capture")
}

// ------------------------------------------------------------------------------------------------------- the runtime

/// Graphs of a runtime, and what was dropped where it could not be destroyed.
#[derive(Debug, Default)]
pub(crate) struct Graphs {
    live: AtomicU64,
    device_blocks: AtomicU64,
    pinned_blocks: AtomicU64,
    workspaces: AtomicU64,
    /// Objects that threads inside a capture dropped.
    dropped: Mutex<Vec<Dropped>>,
    /// Objects that the backend refused to destroy.
    refused: Mutex<Vec<Dropped>>,
}

/// Objects to destroy later: dropped inside a capture, or refused by the backend.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Dropped {
    Graph(GraphId),
    Executable(GraphExecId),
    Stream(StreamId),
    Event(EventId),
}

impl Graphs {
    pub(crate) fn statistics<'d>(&self, gates: impl Iterator<Item = &'d CaptureGate>) -> GraphStatistics {
        GraphStatistics {
            capturing_streams: gates.map(CaptureGate::capturing_streams).sum(),
            graphs: self.live.load(Ordering::Relaxed),
            device_blocks: self.device_blocks.load(Ordering::Relaxed),
            pinned_blocks: self.pinned_blocks.load(Ordering::Relaxed),
            workspaces: self.workspaces.load(Ordering::Relaxed),
        }
    }

    /// The number of refused destroys to retry.
    pub(crate) fn refused(&self) -> u64 {
        self.refused.lock().len() as u64
    }

    #[cfg(test)]
    pub(crate) fn is_locked(&self) -> bool {
        self.dropped.is_locked() || self.refused.is_locked()
    }

    #[cfg(test)]
    pub(crate) fn hold_lock(&self) -> impl Drop + '_ {
        crate::testing::Held((self.dropped.lock(), self.refused.lock()))
    }
}

impl RuntimeInner {
    pub(crate) fn destroy_or_defer(&self, dropped: Dropped) {
        if in_capture() {
            self.graphs.dropped.lock().push(dropped);
        } else {
            // A refusal is counted and retried; a destructor cannot report it.
            let _ = self.destroy(dropped);
        }
    }

    /// Destroys an object now. If the backend refuses, the refusal is counted and retried later.
    pub(crate) fn destroy(&self, dropped: Dropped) -> Result<()> {
        let destroyed = self.call_destroy(dropped);
        if let Err(error) = &destroyed {
            self.count_failed_release(error);
            self.keep_refused(dropped, error);
        }
        destroyed
    }

    fn call_destroy(&self, dropped: Dropped) -> Result<()> {
        match dropped {
            Dropped::Graph(graph) => self.backend.destroy_graph(graph),
            Dropped::Executable(graph) => self.backend.destroy_graph_exec(graph),
            Dropped::Stream(stream) => self.backend.destroy_stream(stream),
            Dropped::Event(event) => self.backend.destroy_event(event),
        }
    }

    fn keep_refused(&self, dropped: Dropped, error: &Error) {
        // If the backend no longer knows the id, nothing is left to destroy.
        if error.kind() != ErrorKind::InvalidHandle {
            self.graphs.refused.lock().push(dropped);
        }
    }

    /// Destroys what threads inside a capture dropped.
    pub(crate) fn destroy_dropped(&self) -> Result<()> {
        let dropped = std::mem::take(&mut *self.graphs.dropped.lock());
        let mut result = Ok(());
        for dropped in dropped {
            result = result.and(self.destroy(dropped));
        }
        result
    }

    /// Retries once the destroys that the backend refused. The first refusal was counted.
    pub(crate) fn destroy_refused(&self) -> Result<()> {
        let refused = std::mem::take(&mut *self.graphs.refused.lock());
        let mut result = Ok(());
        for dropped in refused {
            match self.call_destroy(dropped) {
                Err(error) if error.kind() != ErrorKind::InvalidHandle => {
                    self.keep_refused(dropped, &error);
                    result = result.and(Err(error));
                }
                _ => {}
            }
        }
        result
    }

    /// A workspace for work that is recorded. The first launch waits for the work that used it before.
    fn take_captured_workspace(&self, device: u32, bytes: usize) -> Result<IdleWorkspace> {
        let state = self.device(device);
        if let Some(idle) = state.workspaces.take(bytes) {
            return Ok(idle);
        }
        Ok(IdleWorkspace { workspace: self.allocate_workspace(device, bytes)?, after: None })
    }
}

// --------------------------------------------------------------------------------------------- what a capture records

/// A capture: what its streams and the events recorded in it share.
pub(crate) struct Capture {
    /// Set before the end takes the turns of the streams.
    closed: AtomicBool,
    state: Mutex<CaptureState>,
}

#[derive(Default)]
struct CaptureState {
    /// Streams that take part, or may have been about to. None of them ends before the capture does.
    streams: Vec<Arc<StreamCore>>,
    /// Events recorded in the capture that were dropped, and whether their ids were given away.
    events: Vec<(Mark, bool)>,
    /// Whether the backend has ended the capture, so that its events are nobody's.
    ended: bool,
}

impl fmt::Debug for Capture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Capture").field("closed", &self.closed).finish_non_exhaustive()
    }
}

impl Capture {
    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Takes in a stream that is about to take part; false where the capture has ended.
    fn add(&self, stream: &Arc<StreamCore>) -> bool {
        let mut state = self.state.lock();
        if self.is_closed() {
            return false;
        }
        state.streams.push(Arc::clone(stream));
        true
    }

    fn close(&self) -> Vec<Arc<StreamCore>> {
        let mut state = self.state.lock();
        self.closed.store(true, Ordering::Release);
        std::mem::take(&mut state.streams)
    }

    /// Keeps an event that is dropped until the capture ends; gives it back where it has ended.
    pub(crate) fn keep_event(&self, mark: Mark, exposed: bool) -> Option<Mark> {
        let mut state = self.state.lock();
        if state.ended {
            return Some(mark);
        }
        state.events.push((mark, exposed));
        None
    }

    /// The backend has ended the capture. Gives the events that were dropped meanwhile.
    fn set_ended(&self) -> Vec<(Mark, bool)> {
        let mut state = self.state.lock();
        state.ended = true;
        std::mem::take(&mut state.events)
    }

    /// The error of a question to an event that was recorded in the capture.
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
    /// Under which handles are bound for the capture; no stream's key.
    pub(crate) key: u64,
    /// Marks the work enqueued on the stream before the capture.
    pub(crate) before: Arc<Mark>,
    device: u32,
    parts: Parts,
    /// Workspaces that the work may be given, made beforehand.
    reserved: Vec<IdleWorkspace>,
    /// The workspace of each kind, once asked for; `None` inside where workspaces are switched off.
    blas_workspace: Option<Option<Workspace>>,
    lt_workspace: Option<Option<Workspace>>,
}

/// Memory that was recorded.
#[derive(Default)]
struct Parts {
    /// By address of the block's record.
    device: HashMap<usize, Arc<DeviceBlock>>,
    pinned: HashMap<HostPtr, RecordedBlock>,
    workspaces: Vec<OwnedWorkspace>,
}

impl Parts {
    /// Counts all of it as used on the stream up to now. Where the end of a capture is refused, nobody knows that what was
    /// enqueued was recorded: other code can have ended the capture before, and then it was executed.
    fn used_on(&mut self, inner: &RuntimeInner, stream: &StreamCore) {
        if self.pinned.is_empty() && self.workspaces.is_empty() {
            return;
        }
        let mut earlier = self.workspaces.iter().filter_map(|owned| owned.idle.after.as_ref());
        let wait = |turn: Turn<'_>| {
            let result = earlier.try_for_each(|mark| inner.backend.stream_wait_event(stream.id, mark.event()));
            drop(turn);
            result
        };
        // The mark stands for the earlier users of the workspaces too.
        let waited = stream.enter_outside("stream_wait_event").and_then(wait);
        match waited.and_then(|()| stream.mark(inner)) {
            Ok(mark) => {
                for RecordedBlock { block, writes, .. } in self.pinned.values() {
                    if block.uses.note(Arc::clone(&mark), *writes > 0) {
                        inner.forget_passed(&block.uses);
                    }
                }
                self.workspaces.iter_mut().for_each(|owned| owned.idle.after = Some(Arc::clone(&mark)));
            }
            Err(error) => {
                inner.count_failed_release(&error);
                self.pinned.values().for_each(|recorded| recorded.block.uses.unmarked.store(true, Ordering::Relaxed));
                // They stay in the list of all workspaces, are used by nobody, and are freed when the runtime ends.
                self.workspaces.clear();
            }
        }
    }
}

/// A page-locked block, with the number of recorded operations that read and that write it.
struct RecordedBlock {
    block: KeptBlock,
    reads: u32,
    writes: u32,
}

struct OwnedWorkspace {
    device: u32,
    idle: IdleWorkspace,
}

impl Recording {
    /// The workspace for calls of one kind, where one was asked for before: as a stream's own, Lt calls use that of the BLAS
    /// calls where it is large enough.
    fn existing_workspace(&self, kind: BlasKind, bytes: usize) -> Option<Option<Workspace>> {
        if kind != BlasKind::Lt {
            return self.blas_workspace;
        }
        let large_enough = |blas: &Option<Workspace>| blas.map_or(0, |workspace| workspace.bytes) >= bytes;
        self.lt_workspace.or_else(|| self.blas_workspace.filter(large_enough))
    }

    fn take_reserved(&mut self, bytes: usize) -> Option<IdleWorkspace> {
        let index = self.reserved.iter().position(|idle| idle.workspace.bytes >= bytes)?;
        Some(self.reserved.swap_remove(index))
    }

    /// Keeps a page-locked block that an operation uses. Gives it back where the capture has it already.
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
        // A graph of four thousand million copies of one block is none.
        if *count < u32::MAX {
            *count += 1;
            recorded.block.uses.count_recorded(writes);
        }
        surplus
    }

    fn own(&mut self, idle: IdleWorkspace) {
        self.parts.workspaces.push(OwnedWorkspace { device: self.device, idle });
    }
}

impl TurnState {
    /// Keeps the blocks of a recorded call, which were noted before.
    #[inline]
    pub(crate) fn keep_device(
        &mut self,
        operation: &'static str,
        noted: Noted,
        blocks: &[&Arc<DeviceBlock>],
    ) -> Result<()> {
        let Some(recording) = &mut self.recording else { return noted.check_executed(operation) };
        for &block in blocks {
            recording.parts.device.entry(Arc::as_ptr(block).addr()).or_insert_with(|| {
                block.recording_began();
                Arc::clone(block)
            });
        }
        Ok(())
    }
}

impl StreamCore {
    /// What a handle has to be bound to for calls on this stream: the key, and the workspace.
    pub(crate) fn binding(&self, runtime: &RuntimeInner, kind: BlasKind) -> Result<(u64, Option<Workspace>)> {
        let bytes = runtime.device(self.id.device()).workspace_bytes(kind);
        // No capture, as far as can be seen without the turn: whoever enqueues looks at the key again when it has it.
        if self.bound_as() == self.key
            && let Some(workspace) = self.existing_workspace(kind, bytes)
        {
            return Ok((self.key, workspace));
        }
        loop {
            let mut turn = self.turn();
            let Some(recording) = &mut turn.recording else {
                drop(turn);
                match self.workspace(runtime, kind) {
                    // A capture began meanwhile.
                    Err(error) if error.kind() == ErrorKind::Capture && self.turn().recording.is_some() => continue,
                    workspace => return Ok((self.key, workspace?)),
                }
            };
            let key = recording.key;
            if let Some(workspace) = recording.existing_workspace(kind, bytes) {
                return Ok((key, workspace));
            }
            let reserved = recording.take_reserved(bytes);
            drop(turn);
            let idle = match reserved {
                _ if bytes == 0 => None,
                Some(idle) => Some(idle),
                None => Some(runtime.take_captured_workspace(self.id.device(), bytes)?),
            };
            let mut turn = self.turn();
            let recording = turn.recording.as_mut().filter(|recording| recording.key == key);
            if let Some(recording) = recording
                && recording.existing_workspace(kind, bytes).is_none()
            {
                let workspace = idle.as_ref().map(|idle| idle.workspace);
                let place =
                    if kind == BlasKind::Lt { &mut recording.lt_workspace } else { &mut recording.blas_workspace };
                *place = Some(workspace);
                if let Some(idle) = idle {
                    recording.own(idle);
                }
                return Ok((key, workspace));
            }
            drop(turn);
            // Another thread was quicker, or the capture has ended meanwhile.
            if let Some(idle) = idle {
                runtime.device(self.id.device()).workspaces.give_back(idle);
            }
        }
    }

    /// A workspace that belongs to the capture that the stream takes part in; `None` where it takes part in none.
    pub(crate) fn captured_workspace(&self, runtime: &RuntimeInner, bytes: usize) -> Result<Option<Workspace>> {
        let Some(key) = self.turn().recording.as_ref().map(|recording| recording.key) else { return Ok(None) };
        let idle = runtime.take_captured_workspace(self.id.device(), bytes)?;
        let mut turn = self.turn();
        match turn.recording.as_mut().filter(|recording| recording.key == key) {
            Some(recording) => {
                let workspace = idle.workspace;
                recording.own(idle);
                Ok(Some(workspace))
            }
            None => {
                drop(turn);
                runtime.device(self.id.device()).workspaces.give_back(idle);
                Ok(None)
            }
        }
    }
}

// ----------------------------------------------------------------------------------------------------- begin and join

/// Lets a stream take part in a capture. `start` makes the backend's call.
fn take_part(
    operation: &'static str,
    stream: &Stream,
    capture: &Arc<Capture>,
    start: impl FnOnce(&dyn Backend) -> Result<()>,
) -> Result<()> {
    let inner = &stream.runtime().inner;
    let core = stream.core();
    let device = inner.device(stream.device());
    let refused = |message: &str, hint: &str| Err(Error::new(ErrorKind::Capture, operation, message).with_hint(hint));
    if core.id.is_legacy_default() || core.id.is_per_thread_default() {
        return refused("a default stream cannot take part in a capture", "capture a stream made for it");
    }
    let capturing = device.capture_gate.capturing();
    let mut reserved = Reserved { runtime: inner, device: stream.device(), workspaces: Vec::new() };
    if !device.capabilities.create_during_capture && !in_capture() {
        reserved.add(BlasKind::Blas)?;
        if device.capabilities.lt_plans {
            reserved.add(BlasKind::Lt)?;
        }
    }
    let mut mark = device.events.take(&*inner.backend)?;
    let mut turn = core.enter(operation)?;
    core.wait_settled(&mut turn);
    if turn.recording.is_some() {
        drop(turn);
        return refused("the stream takes part in a capture already", "end that capture first");
    }
    if turn.lent > 0 {
        drop(turn);
        return refused("a raw handle of the stream is lent to foreign code", "capture after `with_raw` has returned");
    }
    if capture.is_closed() {
        drop(turn);
        return Err(capture.no_answer(operation));
    }
    // The mark goes back to its pool after the turn, also where a call fails.
    let started = core.record(&mut turn, &mut mark).and_then(|()| start(&*inner.backend));
    if let Err(error) = started {
        drop(turn);
        return Err(error);
    }
    let key = StreamCore::next_key();
    core.bind_to(key);
    turn.recording = Some(Box::new(Recording {
        capture: Arc::clone(capture),
        key,
        before: Arc::new(mark),
        device: stream.device(),
        parts: Parts::default(),
        reserved: std::mem::take(&mut reserved.workspaces),
        blas_workspace: None,
        lt_workspace: None,
    }));
    drop(turn);
    // Uncounted at the end of the capture.
    std::mem::forget(capturing);
    Ok(())
}

/// Workspaces made before a capture; go back to the pool unless it takes them.
struct Reserved<'r> {
    runtime: &'r RuntimeInner,
    device: u32,
    workspaces: Vec<IdleWorkspace>,
}

impl Reserved<'_> {
    fn add(&mut self, kind: BlasKind) -> Result<()> {
        let bytes = self.runtime.device(self.device).workspace_bytes(kind);
        if bytes > 0 && self.workspaces.iter().all(|idle| idle.workspace.bytes < bytes) {
            self.workspaces.push(self.runtime.take_captured_workspace(self.device, bytes)?);
        }
        Ok(())
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        for idle in self.workspaces.drain(..) {
            self.runtime.device(self.device).workspaces.give_back(idle);
        }
    }
}

/// Makes `stream` wait for an event that was recorded in a capture: it joins the capture, or takes part already.
pub(crate) fn join(stream: &Stream, event: &Event, capture: &Arc<Capture>) -> Result<()> {
    const OPERATION: &str = "stream_wait_event";
    let inner = &stream.runtime().inner;
    {
        let turn = stream.core().enter(OPERATION)?;
        if let Some(recording) = &turn.recording {
            if Arc::ptr_eq(&recording.capture, capture) {
                return inner.backend.stream_wait_event(stream.id(), event.id);
            }
            return Err(Error::new(
                ErrorKind::Capture,
                OPERATION,
                "the event was recorded in another capture than the one the stream takes part in",
            )
            .with_hint("captures do not wait for each other; launch their graphs in order"));
        }
    }
    if !Arc::ptr_eq(&event.runtime().inner, inner) {
        return Err(Error::new(
            ErrorKind::InvalidHandle,
            OPERATION,
            "the event belongs to another runtime than the stream",
        )
        .with_hint("capture on streams of one runtime"));
    }
    if !capture.add(stream.core()) {
        return Err(capture.no_answer(OPERATION));
    }
    take_part(OPERATION, stream, capture, |backend| backend.stream_wait_event(stream.id(), event.id))
}

/// A capture that this thread has begun; ends when dropped, and then keeps nothing.
struct OpenCapture<'s> {
    stream: &'s Stream,
    capture: Arc<Capture>,
    ended: bool,
    stays_in_thread: PhantomData<*const ()>,
}

impl<'s> OpenCapture<'s> {
    fn begin(stream: &'s Stream, mode: CaptureMode) -> Result<Self> {
        const OPERATION: &str = "begin_capture";
        let inner = &stream.runtime().inner;
        inner.check(OPERATION)?;
        if !inner.device(stream.device()).capabilities.capture {
            return Err(Error::lacks(OPERATION, "capture"));
        }
        if !in_capture() {
            inner.device(stream.device()).capture_gate.make_way();
        }
        let state = CaptureState { streams: vec![Arc::clone(stream.core())], ..CaptureState::default() };
        let capture = Arc::new(Capture { closed: AtomicBool::new(false), state: Mutex::new(state) });
        take_part(OPERATION, stream, &capture, |backend| backend.begin_capture(stream.id(), mode)).inspect_err(
            |_| {
                // Nobody else has the capture; the stream must not be kept by it.
                drop(capture.close());
            },
        )?;
        count_open(1);
        Ok(Self { stream, capture, ended: false, stays_in_thread: PhantomData })
    }

    fn finish(mut self) -> Result<Graph> {
        let runtime = self.stream.runtime();
        if !runtime.inner.generation.is_current() {
            // A child forked inside the closure: the capture is the parent's.
            return Err(Generation::error("end_capture"));
        }
        let backend = &runtime.inner.backend;
        // What was recorded is dropped on every way out but the last.
        let (ended, recorded) = self.end();
        if ended.is_err() {
            runtime.inner.reclaim_in_passing();
        }
        let graph = ended?;
        let executable = backend.instantiate_graph(graph);
        // A refusal is counted and tried again.
        let _ = runtime.inner.destroy(Dropped::Graph(graph));
        // What is above the cap of the host cache was left alone in the capture.
        runtime.inner.reclaim_in_passing();
        let executable = executable?;
        let recorded = recorded.into_graph();
        Ok(Graph { runtime: runtime.clone(), device: self.stream.device(), executable, recorded })
    }

    /// Ends the capture: afterwards all its streams are as before.
    fn end(&mut self) -> (Result<GraphId>, Recorded) {
        const OPERATION: &str = "end_capture";
        self.ended = true;
        let inner = &self.stream.runtime().inner;
        let mut streams = self.capture.close();
        streams.sort_by_key(|stream| stream.key);
        streams.dedup_by_key(|stream| stream.key);
        let mut turns: Vec<Turn<'_>> = streams.iter().map(|stream| stream.turn()).collect();
        // SAFETY: this capture began it.
        let end = |()| unsafe { inner.backend.end_capture(self.stream.id()) };
        let ended = inner.check(OPERATION).and_then(end);
        if ended.is_err() && inner.check(OPERATION).is_ok() {
            abandon(inner, self.stream.id());
        }
        let mut recordings = Vec::new();
        for (stream, turn) in streams.iter().zip(&mut turns) {
            let takes_part = |recording: &mut Box<Recording>| Arc::ptr_eq(&recording.capture, &self.capture);
            if let Some(recording) = turn.recording.take_if(takes_part) {
                stream.bind_to(stream.key);
                recordings.push((stream, recording));
            }
        }
        drop(turns);
        count_open(-1);
        // Events of the capture first: what is given back below may need one.
        for (mark, exposed) in self.capture.set_ended() {
            if exposed && inner.may_release() {
                // A refusal is counted and tried again.
                let _ = inner.destroy(Dropped::Event(mark.into_event()));
            }
        }
        let mut recorded = Recorded::new(self.stream.runtime().clone());
        for (stream, mut recording) in recordings {
            if ended.is_err() && inner.check(OPERATION).is_ok() {
                recording.parts.used_on(inner, stream);
            }
            recorded.take_in(*recording);
        }
        // The last users of a stream may be here; they end it, outside every lock.
        drop(streams);
        if !in_capture()
            && inner.check(OPERATION).is_ok()
            && let Err(error) = inner.destroy_dropped()
        {
            tracing::debug!("what was dropped in a capture could not all be destroyed: {error}");
        }
        end_runtimes();
        (ended, recorded)
    }
}

/// Ends a capture whose end was refused, and not by the capture being lost: else the stream would record for ever.
fn abandon(inner: &RuntimeInner, stream: StreamId) {
    if !matches!(inner.backend.is_capturing(stream), Ok(true)) {
        return;
    }
    // SAFETY: core's own capture, whose end was refused before.
    match unsafe { inner.backend.end_capture(stream) } {
        // A refusal is counted and tried again.
        Ok(graph) => drop(inner.destroy(Dropped::Graph(graph))),
        Err(error) => tracing::warn!("a capture could not be ended: {error}"),
    }
}

impl Drop for OpenCapture<'_> {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let inner = &self.stream.runtime().inner;
        if !inner.generation.is_current() {
            // The capture is the parent's; its locks may be held by threads that do not exist here.
            count_open(-1);
            end_runtimes();
            return;
        }
        let (ended, recorded) = self.end();
        // Where the capture was cut short, an error says only that.
        if let Ok(graph) = ended {
            // A refusal is counted and tried again.
            let _ = inner.destroy(Dropped::Graph(graph));
        }
        drop(recorded);
        inner.reclaim_in_passing();
    }
}

// ------------------------------------------------------------------------------------------------- what a graph owns

/// What a graph owns; gives it back when dropped, for use after the last launch.
struct Recorded {
    runtime: Runtime,
    device: HashMap<usize, Arc<DeviceBlock>>,
    /// In the order of addresses once there is a graph, see `pool/block_uses.rs`.
    pinned: Vec<RecordedBlock>,
    workspaces: Vec<OwnedWorkspace>,
    /// Stream and mark of the last launch.
    last: Option<(u64, Arc<Mark>)>,
    /// A launch may be running and nobody can tell for how long.
    unmarked: bool,
    is_graph: bool,
}

impl Recorded {
    fn new(runtime: Runtime) -> Self {
        Self {
            runtime,
            device: HashMap::new(),
            pinned: Vec::new(),
            workspaces: Vec::new(),
            last: None,
            unmarked: false,
            is_graph: false,
        }
    }

    /// Takes in what one stream recorded, now that the capture has ended.
    fn take_in(&mut self, recording: Recording) {
        let state = self.runtime.inner.device(recording.device);
        state.capture_gate.capture_ended();
        recording.reserved.into_iter().for_each(|idle| state.workspaces.give_back(idle));
        for (record, block) in recording.parts.device {
            block.recording_ended();
            self.device.insert(record, block);
        }
        for (_, recorded) in recording.parts.pinned {
            recorded.block.uses.recording_ended();
            self.pinned.push(recorded);
        }
        self.workspaces.extend(recording.parts.workspaces);
    }

    /// The same, as what a graph owns.
    fn into_graph(mut self) -> Self {
        // One entry for each block, in the order in which every launch begins its uses.
        let mut pinned = std::mem::take(&mut self.pinned);
        pinned.sort_by_key(|recorded| recorded.block.ptr);
        for recorded in pinned {
            match self.pinned.last_mut().filter(|last| last.block.ptr == recorded.block.ptr) {
                Some(last) => {
                    last.reads = last.reads.saturating_add(recorded.reads);
                    last.writes = last.writes.saturating_add(recorded.writes);
                    self.runtime.inner.let_go_pinned(recorded.block);
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
            .with_hint("drop the graph and capture it anew"));
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
            // Not before: an operation that this one has waited for may have failed.
            RuntimeInner::check_marked(&recorded.block.uses).map(|()| begun)
        });
        let begun = begun.collect::<Result<Vec<_>>>()?;
        let note = |noted: Noted, block: &Arc<DeviceBlock>| block.note_use(core).map(|other| noted.and(other));
        let noted = self.device.values().try_fold(Noted::Ordered, note)?;
        let mut mark = inner.device(stream.device()).events.take(&*inner.backend)?;

        let mut turn = core.enter_outside(OPERATION)?;
        noted.check_executed(OPERATION)?;
        let previous = self.last.as_ref().filter(|(key, _)| *key != core.key).map(|(_, mark)| mark);
        let workspaces = self.workspaces.iter().filter_map(|owned| owned.idle.after.as_ref());
        let mut awaited: Vec<&Arc<Mark>> = begun.iter().flat_map(|begun| &begun.racing).collect();
        awaited.extend(workspaces.chain(previous));
        awaited.sort_by_key(|mark| Arc::as_ptr(mark));
        awaited.dedup_by_key(|mark| Arc::as_ptr(mark));
        for mark in awaited {
            inner.backend.stream_wait_event(stream.id(), mark.event())?;
        }
        // SAFETY: the graph owns all memory that it recorded, and gives it back after the mark recorded below. This stream
        // has been made to wait for the launch before. What would race on page-locked memory was waited for above, and what
        // follows waits for this launch: its uses are begun, and settled below. The CPU stays away: see `block_uses.rs`.
        unsafe { inner.backend.launch_graph(executable, stream.id())? };
        self.workspaces.iter_mut().for_each(|owned| owned.idle.after = None);
        if let Err(error) = core.record(&mut turn, &mut mark) {
            // Without a mark, waiting is all that is left. Where that fails too, nobody can tell when the launch is done.
            self.last = None;
            return core.wait_for_all(turn).map_err(|_| {
                self.unmarked = true;
                self.pinned.iter().for_each(|recorded| recorded.block.uses.unmarked.store(true, Ordering::Relaxed));
                error
            });
        }
        drop(turn);
        let mark = Arc::new(mark);
        let settle = |(begun, recorded): (BegunUse<'_>, &RecordedBlock)| {
            if begun.settle(Arc::clone(&mark)) {
                inner.forget_passed(&recorded.block.uses);
            }
        };
        begun.into_iter().zip(&self.pinned).for_each(settle);
        self.last = Some((core.key, mark));
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
            // Without a mark it stays in the list of all workspaces, is used by nobody, and is freed when the runtime ends.
            if !self.unmarked {
                if let Some((_, mark)) = &self.last {
                    idle.after = Some(Arc::clone(mark));
                }
                inner.device(device).workspaces.give_back(idle);
            }
        }
        for RecordedBlock { block, reads, writes } in self.pinned.drain(..) {
            block.uses.forget_recorded(reads, writes);
            inner.let_go_pinned(block);
        }
        // Blocks of device memory know the launches from `note_use`, and are freed after them.
        self.device.clear();
    }
}
