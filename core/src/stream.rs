//! [`Stream`]: a queue of device operations, with its workspace and its turn.
//!
//! *The turn.* A vendor's BLAS call is several kernels that pass intermediate results through the workspace. Two threads
//! with handles of their own, bound to one stream and its one workspace, would interleave those kernels and read each
//! other's intermediate results. So a call takes the stream's turn for as long as the vendor takes to enqueue it. The turn
//! is the one lock that is held over a vendor call, and no other lock of this crate is taken inside it. BLAS and Lt calls
//! share it, as they share the workspace. Every other call that enqueues takes it too, because the turn also decides
//! whether a call comes before, in or after a capture of the stream (see `capture.rs`).
//!
//! *The per-thread default stream.* Its handle names another stream in each thread, so a [`Stream`] over it belongs to
//! the thread that made it. Calls of other threads fail. Another thread may still drop a buffer and need a mark, which
//! it cannot record. So the end of each turn records a mark.

use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::blas_lease::{BlasLease, LtLease, PooledHandle, check_recordable};
use crate::buffer::{DeviceBuffer, DeviceSlice, Untyped};
use crate::capture::{self, Dropped, Recording};
use crate::event::Event;
use crate::pinned::{PinnedBuffer, PinnedSlice, PinnedSliceMut};
use crate::pool::PoolKey;
use crate::pool::events::{EventPool, Mark, Point};
use crate::runtime::{NotEnqueued, Runtime, RuntimeInner};
use highwater_hal::{
    Backend, BlasKind, Completion, DeviceMemoryKind, Element, Error, ErrorKind, EventOptions, FillPattern, Location,
    MemoryCopy, MemoryFill, Products, Result, StreamId, Workspace, fork,
};

/// A queue of operations of one device, executed in the order of the calls.
///
/// Dropping a stream never waits and loses no work: what was enqueued is executed, and buffers that were used on it know
/// when that is.
///
/// ```
/// use highwater_core::Runtime;
/// use highwater_mock::{MockGpu, MockOptions};
///
/// let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
/// let device = runtime.device(0)?;
/// let (producer, consumer) = (device.create_stream()?, device.create_stream()?);
/// let buffer = device.allocate::<u32>(1000)?;
/// producer.fill(&buffer, 7_u32)?;
/// consumer.wait(&producer.record()?)?; // the device waits, not the CPU
/// assert_eq!(consumer.download(&buffer)?, vec![7; 1000]);
/// # Ok::<(), highwater_core::Error>(())
/// ```
///
/// Any thread may use a stream, except a per-thread default stream
/// ([`Device::per_thread_default_stream`](crate::Device::per_thread_default_stream)), whose calls return `InvalidState`
/// in other threads. Any thread may drop a stream and the buffers that it used.
#[derive(Debug, Clone)]
pub struct Stream {
    runtime: Runtime,
    core: Arc<StreamCore>,
}

/// What the users of a stream share; the last of them ends the stream. It does not keep the runtime alive.
///
/// In the order of declaration, so that what every product looks at lies together: a vendor's call leaves little of it in the
/// cache.
#[repr(C)]
pub(crate) struct StreamCore {
    pub(crate) id: StreamId,
    /// Tells the stream from every other of the process, also from ones that have ended; never 0.
    pub(crate) key: u64,
    /// Under which handles are bound to the stream: its own key, or that of the capture that it takes part in.
    bound_as: AtomicU64,
    turn: Mutex<TurnState>,
    /// True if a call must check more before it enqueues: its thread, or a capture by other code.
    asks: bool,
    /// Whether other code may capture the stream, so that the backend has to be asked.
    ask_capture: bool,
    /// True if the device can capture. Other code may have the id of any stream and capture it.
    can_capture: bool,
    /// What the device multiplies.
    pub(crate) products: Products,
    own_process: fork::Guard,
    backend: Arc<dyn Backend>,
    runtime: Weak<RuntimeInner>,
    /// The keys of the BLAS handles and the Lt handles that can be bound to the stream.
    blas_key: PoolKey,
    lt_key: PoolKey,
    /// For the per-thread default stream: its thread.
    owner: Option<Owner>,
    /// Whether the last reference destroys the stream: not for the vendor's default streams.
    owned: bool,
    end: Arc<StreamEnd>,
    /// Wakes a capture that waits for the stream's waiters, and the waiters behind it.
    settled: Condvar,
    /// Set by the first BLAS call; `None` inside where workspaces are switched off.
    blas_workspace: OnceLock<Option<Workspace>>,
    /// Set by the first Lt call that finds no BLAS workspace that is large enough.
    lt_workspace: OnceLock<Option<Workspace>>,
    /// Whether a thread is making the workspace; not held while it does.
    making_workspace: Mutex<bool>,
    workspace_made: Condvar,
}

/// The thread that a stream belongs to, with the events for the marks that its calls record.
struct Owner {
    thread: ThreadId,
    events: Arc<EventPool>,
}

impl Owner {
    fn is_here(&self) -> bool {
        self.thread == thread::current().id()
    }
}

/// What the turn decides on.
#[derive(Default)]
pub(crate) struct TurnState {
    /// Threads that wait for the stream; no capture begins meanwhile.
    pub(crate) waiting: u32,
    /// Captures that are about to begin and wait for those threads. New waiters queue behind them.
    beginning: u32,
    /// Raw handles of the stream that are lent to foreign code; no capture begins meanwhile.
    pub(crate) lent: u32,
    /// The stream's part in a capture.
    pub(crate) recording: Option<Box<Recording>>,
    /// For the per-thread default stream: the mark after all enqueued work; `None` if it could not be recorded.
    latest: Option<Arc<Mark>>,
    /// The number of marks recorded so far.
    marks: u64,
}

/// The turn of a stream, in the caller's hands.
pub(crate) struct Turn<'s> {
    state: MutexGuard<'s, TurnState>,
    /// For the per-thread default stream. After the state, so that an event goes back to its pool without the turn.
    leaves: Option<Box<LeavesMark<'s>>>,
}

/// A mark that the end of a turn records.
struct LeavesMark<'s> {
    stream: &'s StreamCore,
    mark: Option<Mark>,
    before: Option<Arc<Mark>>,
}

impl<'s> From<MutexGuard<'s, TurnState>> for Turn<'s> {
    #[inline(always)]
    fn from(state: MutexGuard<'s, TurnState>) -> Self {
        Self { state, leaves: None }
    }
}

impl Deref for Turn<'_> {
    type Target = TurnState;

    #[inline(always)]
    fn deref(&self) -> &TurnState {
        &self.state
    }
}

impl DerefMut for Turn<'_> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut TurnState {
        &mut self.state
    }
}

impl Drop for Turn<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if let Some(leaves) = &mut self.leaves {
            leaves.record(&mut self.state);
        }
    }
}

impl LeavesMark<'_> {
    #[cold]
    fn record(&mut self, state: &mut TurnState) {
        let Some(mut mark) = self.mark.take() else { return };
        self.before = match self.stream.record(state, &mut mark) {
            Ok(()) => state.latest.replace(Arc::new(mark)),
            Err(error) => {
                tracing::warn!("cannot record the completion event of {:?}: {error}", self.stream.id);
                self.mark = Some(mark);
                // An earlier mark would not cover all enqueued work.
                state.latest.take()
            }
        };
    }
}

/// What is left of a stream when it has ended: the mark of its last work.
#[derive(Debug, Default)]
struct StreamEnd {
    /// `Some` once the stream has ended; inside, `None` where its end could not be marked.
    last: Mutex<Option<Option<Arc<Mark>>>>,
    ended: Condvar,
}

/// The result of marking the use of a stream.
pub(crate) enum Marked {
    By(Arc<Mark>),
    /// Not possible while other code captures the stream. A mark would become part of the graph and never pass.
    Later,
    Never,
}

/// What a buffer remembers of a stream that used it. It does not keep the stream alive.
#[derive(Debug, Clone)]
pub(crate) struct StreamUse {
    key: u64,
    stream: Weak<StreamCore>,
    end: Arc<StreamEnd>,
}

impl StreamUse {
    pub(crate) fn key(&self) -> u64 {
        self.key
    }

    /// Key and last mark of a stream that has ended.
    pub(crate) fn if_ended(&self) -> Option<(u64, Arc<Mark>)> {
        self.end.last.lock().clone().flatten().map(|mark| (self.key, mark))
    }

    /// Whether the stream has executed everything, captures left out, so that its use needs no mark. One call of the backend,
    /// and no event.
    pub(crate) fn is_over(&self, runtime: &RuntimeInner) -> bool {
        let Some(stream) = self.stream.upgrade() else { return false };
        let Ok(turn) = stream.enter("query_stream") else { return false };
        match &turn.recording {
            Some(recording) => {
                let before = Arc::clone(&recording.before);
                drop(turn);
                runtime.is_passed(&before, false).unwrap_or(false)
            }
            None => {
                // A query would lose a capture by other code.
                stream.refuse_if_captured("query_stream").is_ok()
                    && runtime.backend.query_stream(stream.id).is_ok_and(Completion::is_complete)
            }
        }
    }

    /// Marks all work enqueued on the stream so far.
    pub(crate) fn mark(&self, runtime: &RuntimeInner) -> Marked {
        if let Some(stream) = self.stream.upgrade() {
            // The reference keeps the stream from being destroyed meanwhile.
            return match stream.mark(runtime) {
                Ok(mark) => Marked::By(mark),
                Err(error) if error.kind() == ErrorKind::Capture => Marked::Later,
                Err(error) => {
                    runtime.count_failed_release(&error);
                    Marked::Never
                }
            };
        }
        // The last user is gone: its thread has set the last mark, or is about to.
        let mut last = self.end.last.lock();
        while last.is_none() {
            self.end.ended.wait(&mut last);
        }
        last.clone().flatten().map_or(Marked::Never, Marked::By)
    }
}

impl fmt::Debug for StreamCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamCore")
            .field("id", &self.id)
            .field("blas_workspace", &self.blas_workspace)
            .finish_non_exhaustive()
    }
}

impl StreamCore {
    pub(crate) fn to_use(self: &Arc<Self>) -> StreamUse {
        StreamUse { key: self.key, stream: Arc::downgrade(self), end: Arc::clone(&self.end) }
    }

    /// A key that no stream and no capture had before.
    pub(crate) fn next_key() -> u64 {
        static KEYS: AtomicU64 = AtomicU64::new(1);
        // Relaxed: only that no two are equal matters.
        KEYS.fetch_add(1, Ordering::Relaxed)
    }

    /// Whether this process is the one that made the stream.
    #[inline(always)]
    pub(crate) fn is_own_process(&self) -> bool {
        self.own_process.is_current()
    }

    /// The turn, for a call that enqueues, where nobody has it and the backend need not be asked about captures.
    #[inline(always)]
    pub(crate) fn free_turn(&self) -> Option<Turn<'_>> {
        if self.asks { None } else { self.turn.try_lock().map(Turn::from) }
    }

    /// Waits for the stream's turn and holds it until the guard is dropped.
    #[inline]
    pub(crate) fn turn(&self) -> Turn<'_> {
        match self.turn.try_lock() {
            Some(turn) => turn.into(),
            None => self.turn_of_many(),
        }
    }

    /// The turn where another thread has it, for as long as the vendor takes to enqueue one call: some microseconds, which is
    /// less than it takes to put a thread to sleep and to wake it up. So this one looks again and again for a while, and then
    /// lets others run between looks, before it sleeps.
    #[cold]
    fn turn_of_many(&self) -> Turn<'_> {
        const SPIN: Duration = Duration::from_micros(50);
        const YIELD: Duration = Duration::from_micros(500);
        let began = Instant::now();
        loop {
            let waited = began.elapsed();
            if waited < SPIN {
                (0..16).for_each(|_| std::hint::spin_loop());
            } else if waited < YIELD {
                std::thread::yield_now();
            } else {
                return self.turn.lock().into();
            }
            // Looking first: an exchange that fails would take the line from who has the turn.
            if !self.turn.is_locked()
                && let Some(turn) = self.turn.try_lock()
            {
                return turn.into();
            }
        }
    }

    /// The turn, for a call that enqueues. Refused where other code captures the stream: nobody would keep what is used.
    #[inline]
    pub(crate) fn enter(&self, operation: &'static str) -> Result<Turn<'_>> {
        if self.asks { self.enter_asking(operation) } else { Ok(self.turn()) }
    }

    #[cold]
    fn enter_asking(&self, operation: &'static str) -> Result<Turn<'_>> {
        let leaves = match &self.owner {
            Some(owner) if !owner.is_here() => return Err(not_the_owner(operation)),
            // Taken before the turn, so that no other lock is taken inside it.
            Some(owner) => {
                let mark = Some(owner.events.take(&*self.backend)?);
                Some(Box::new(LeavesMark { stream: self, mark, before: None }))
            }
            None => None,
        };
        let mut turn = self.turn();
        if self.ask_capture && turn.recording.is_none() {
            self.refuse_if_captured(operation)?;
        }
        turn.leaves = leaves;
        Ok(turn)
    }

    /// Refuses work that must not become part of a capture by other code. The caller must have the turn, and the stream
    /// must take part in no capture of core.
    pub(crate) fn refuse_if_captured(&self, operation: &'static str) -> Result<()> {
        if self.can_capture && self.backend.is_capturing(self.id)? {
            return Err(Error::new(ErrorKind::Capture, operation, "the stream is being captured by other code")
                .with_hint("capture it with `Stream::capture`, so that the graph keeps the memory it uses"));
        }
        Ok(())
    }

    /// The turn, for a call that makes no sense in a capture or would lose it.
    pub(crate) fn enter_outside(&self, operation: &'static str) -> Result<Turn<'_>> {
        let turn = self.enter(operation)?;
        if turn.recording.is_some() { Err(capture::nothing_is_executed(operation)) } else { Ok(turn) }
    }

    /// Waits until no thread waits for the stream, for a capture that is about to begin. Threads that come meanwhile
    /// find the capture, or continue if it did not begin.
    pub(crate) fn wait_settled(&self, turn: &mut Turn<'_>) {
        turn.beginning += 1;
        while turn.waiting > 0 && turn.recording.is_none() {
            self.settled.wait(&mut turn.state);
        }
        turn.beginning -= 1;
        self.settled.notify_all();
    }

    /// Takes the turn for a call that waits for the stream, after the captures that are about to begin.
    fn enter_to_wait(&self, operation: &'static str) -> Result<Turn<'_>> {
        let mut turn = self.enter_outside(operation)?;
        while turn.beginning > 0 {
            self.settled.wait(&mut turn.state);
            if turn.recording.is_some() {
                return Err(capture::nothing_is_executed(operation));
            }
        }
        Ok(turn)
    }

    /// Waits for everything enqueued on the stream. No capture begins meanwhile.
    pub(crate) fn wait_for_all(&self, mut turn: Turn<'_>) -> Result<()> {
        struct Waiting<'s>(&'s StreamCore);
        impl Drop for Waiting<'_> {
            fn drop(&mut self) {
                self.0.turn().waiting -= 1;
                self.0.settled.notify_all();
            }
        }
        turn.waiting += 1;
        drop(turn);
        let _waiting = Waiting(self);
        self.backend.synchronize_stream(self.id)
    }

    /// A mark after everything that was enqueued on the stream so far, captures left out.
    pub(crate) fn mark(&self, runtime: &RuntimeInner) -> Result<Arc<Mark>> {
        if self.owner.as_ref().is_some_and(|owner| !owner.is_here()) {
            let latest = self.turn().latest.clone();
            return latest.ok_or_else(|| not_the_owner("record_event"));
        }
        let mut mark = runtime.device(self.id.device()).events.take(&*self.backend)?;
        let mut turn = self.enter("record_event")?;
        if let Some(recording) = &turn.recording {
            return Ok(Arc::clone(&recording.before));
        }
        self.refuse_if_captured("record_event")?;
        self.record(&mut turn, &mut mark)?;
        drop(turn);
        Ok(Arc::new(mark))
    }

    /// Records a mark after all work enqueued on the stream so far. The caller must have the turn, so that the numbers
    /// follow the order of the records.
    pub(crate) fn record(&self, turn: &mut TurnState, mark: &mut Mark) -> Result<()> {
        self.backend.record_event(mark.event(), self.id)?;
        turn.marks += 1;
        mark.set_point(Point { stream: self.key, number: turn.marks });
        Ok(())
    }

    /// Under which handles are bound to the stream now.
    #[inline]
    pub(crate) fn bound_as(&self) -> u64 {
        // Relaxed: whoever enqueues looks again when it has the turn, under which the key changes.
        self.bound_as.load(Ordering::Relaxed)
    }

    /// Binds handles under another key from here on. The caller has the turn.
    pub(crate) fn bind_to(&self, key: u64) {
        self.bound_as.store(key, Ordering::Relaxed);
    }

    /// The workspace for the stream's calls of one kind, allocated by the first of them.
    pub(crate) fn workspace(&self, runtime: &RuntimeInner, kind: BlasKind) -> Result<Option<Workspace>> {
        let bytes = runtime.device(self.id.device()).workspace_bytes(kind);
        if let Some(workspace) = self.existing_workspace(kind, bytes) {
            return Ok(workspace);
        }
        // One thread allocates, outside the lock; the others wait for it instead of allocating workspaces that nobody needs.
        let mut making = self.making_workspace.lock();
        while *making {
            self.workspace_made.wait(&mut making);
        }
        if let Some(workspace) = self.existing_workspace(kind, bytes) {
            return Ok(workspace);
        }
        *making = true;
        drop(making);
        let _made = Made(self);
        let workspace = runtime.take_workspace(self, bytes)?;
        let cell = if kind == BlasKind::Lt { &self.lt_workspace } else { &self.blas_workspace };
        Ok(*cell.get_or_init(|| workspace))
    }

    /// Lt calls use the BLAS workspace where there is one: all calls of the stream take turns.
    pub(crate) fn existing_workspace(&self, kind: BlasKind, bytes: usize) -> Option<Option<Workspace>> {
        let blas = self.blas_workspace.get().copied();
        if kind != BlasKind::Lt {
            return blas;
        }
        let large_enough = |blas: &Option<Workspace>| blas.map_or(0, |workspace| workspace.bytes) >= bytes;
        self.lt_workspace.get().copied().or_else(|| blas.filter(large_enough))
    }
}

/// Lets the threads go on that wait for a stream's workspace, also where making it failed: then the next one tries.
struct Made<'s>(&'s StreamCore);

impl Drop for Made<'_> {
    fn drop(&mut self) {
        *self.0.making_workspace.lock() = false;
        self.0.workspace_made.notify_all();
    }
}

/// Wakes the threads that wait for the end of a stream, also if the backend panics in it.
struct Ending<'s> {
    end: &'s StreamEnd,
    last: Option<Arc<Mark>>,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        *self.end.last.lock() = Some(self.last.take());
        self.end.ended.notify_all();
    }
}

impl Drop for StreamCore {
    fn drop(&mut self) {
        if !self.is_own_process() {
            return;
        }
        // Where the runtime is ending, no buffer is left to ask, and it frees all workspaces itself.
        let runtime = self.runtime.upgrade();
        let may_release = runtime.as_ref().map_or_else(|| !self.backend.is_exiting(), |runtime| runtime.may_release());
        let mut ending = Ending { end: &self.end, last: None };
        let last = runtime
            .as_ref()
            .filter(|_| may_release)
            .and_then(|runtime| self.mark(runtime).inspect_err(|error| runtime.count_failed_release(error)).ok());
        ending.last.clone_from(&last);
        drop(ending);
        if !may_release {
            return;
        }
        if let Some(runtime) = &runtime {
            if let Some(last) = &last {
                let workspaces = [&self.blas_workspace, &self.lt_workspace].into_iter().filter_map(OnceLock::get);
                for workspace in workspaces.flatten() {
                    runtime.give_back_workspace_after(*workspace, self.id.device(), Arc::clone(last));
                }
            }
            runtime.spare_handles_of([self.blas_key, self.lt_key], last.as_ref());
        }
        match &runtime {
            _ if !self.owned => {}
            Some(runtime) => runtime.destroy_or_defer(Dropped::Stream(self.id)),
            None => {
                // No later call can retry, so it is done at once.
                let destroyed = self.backend.destroy_stream(self.id);
                if let Err(error) = destroyed.or_else(|_| self.backend.destroy_stream(self.id)) {
                    tracing::warn!("a stream could not be destroyed: {error}");
                }
            }
        }
        // This may be the last reference to it.
        runtime.into_iter().for_each(capture::let_go);
    }
}

#[cold]
fn not_the_owner(operation: &'static str) -> Error {
    Error::new(
        ErrorKind::InvalidState,
        operation,
        "the per-thread default stream belongs to another thread; its handle names a different stream in this one",
    )
    .with_hint("use it only in the thread that made it, or share a stream of `create_stream`")
}

/// A copy of page-locked memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CopyKind {
    ToDevice,
    ToHost,
    /// To the host, for values that are waited for: not to be recorded in a capture.
    Awaited,
}

impl Stream {
    pub(crate) fn new(runtime: Runtime, id: StreamId, owned: bool) -> Self {
        Self::with_keeper(runtime, id, owned, false, None)
    }

    /// A stream that other code made and may capture.
    pub(crate) fn foreign(runtime: Runtime, id: StreamId) -> Self {
        Self::with_keeper(runtime, id, true, true, None)
    }

    /// The calling thread's default stream.
    pub(crate) fn per_thread_default(runtime: Runtime, device: u32) -> Result<Self> {
        let id = StreamId::per_thread_default(runtime.identity().tag, device);
        let events = Arc::clone(&runtime.inner.device(device).events);
        let owner = Owner { thread: thread::current().id(), events };
        let stream = Self::with_keeper(runtime, id, false, true, Some(owner));
        // A mark exists from here on.
        stream.core.enter_outside("record_event")?;
        Ok(stream)
    }

    fn with_keeper(runtime: Runtime, id: StreamId, owned: bool, foreign: bool, owner: Option<Owner>) -> Self {
        let device = id.device();
        let key = StreamCore::next_key();
        let capabilities = &runtime.inner.device(device).capabilities;
        let state = runtime.inner.device(device);
        let key_of = |kind| PoolKey { device, affinity: if state.handle_per_stream(kind) { key } else { 0 } };
        let core = StreamCore {
            id,
            key,
            backend: Arc::clone(&runtime.inner.backend),
            runtime: Arc::downgrade(&runtime.inner.0),
            products: Products::of(capabilities),
            own_process: fork::Guard::of(runtime.inner.generation),
            blas_key: key_of(BlasKind::Blas),
            lt_key: key_of(BlasKind::Lt),
            owned,
            end: Arc::default(),
            turn: Mutex::default(),
            settled: Condvar::new(),
            bound_as: AtomicU64::new(key),
            asks: owner.is_some() || (foreign && capabilities.capture),
            ask_capture: foreign && capabilities.capture,
            can_capture: capabilities.capture,
            owner,
            blas_workspace: OnceLock::new(),
            lt_workspace: OnceLock::new(),
            making_workspace: Mutex::new(false),
            workspace_made: Condvar::new(),
        };
        Self { runtime, core: Arc::new(core) }
    }

    /// The legacy default stream: the one that others have, so that all share its turn and its workspace.
    pub(crate) fn legacy_default(runtime: Runtime, device: u32) -> Self {
        let place = runtime.inner.device(device).legacy_default.lock();
        if let Some(core) = place.upgrade() {
            drop(place);
            return Self { runtime, core };
        }
        drop(place);
        let id = StreamId::legacy_default(runtime.identity().tag, device);
        let fresh = Self::new(runtime, id, false);
        let mut place = fresh.runtime.inner.device(device).legacy_default.lock();
        let stands = place.upgrade();
        if stands.is_none() {
            *place = Arc::downgrade(&fresh.core);
        }
        drop(place);
        match stands {
            Some(core) => Self { runtime: fresh.runtime.clone(), core },
            None => fresh,
        }
    }

    /// The stream's id, for calls of the backend itself.
    #[must_use]
    pub fn id(&self) -> StreamId {
        self.core.id
    }

    /// Returns the vendor's handle of the stream as a number, for kernels and copies that the program enqueues itself.
    /// It is a `cudaStream_t` on CUDA and a `hipStream_t` on ROCm.
    ///
    /// The handle is valid while this stream or a clone of it lives. The caller must not destroy it, and must capture
    /// it only with [`Stream::capture`]. The caller must note the memory that its work uses: device memory before the work
    /// is enqueued, with [`Stream::note_device_use`], and page-locked memory after it, with [`Stream::note_host_use`].
    ///
    /// # Errors
    /// `Unsupported` if `foreign_objects` is false; `InvalidState` for the per-thread default stream of another thread,
    /// because the number names a different stream here; else the backend's error.
    pub fn raw(&self) -> Result<u64> {
        const OPERATION: &str = "raw_stream";
        let backend = self.backend(OPERATION)?;
        if self.core.owner.as_ref().is_some_and(|owner| !owner.is_here()) {
            return Err(not_the_owner(OPERATION));
        }
        backend.raw_stream(self.core.id)
    }

    /// Ordinal of the stream's device.
    #[must_use]
    pub fn device(&self) -> u32 {
        self.core.id.device()
    }

    /// The runtime that the stream belongs to.
    #[must_use]
    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    pub(crate) fn core(&self) -> &Arc<StreamCore> {
        &self.core
    }

    fn backend(&self, operation: &'static str) -> Result<&dyn Backend> {
        self.runtime.inner.check(operation)?;
        Ok(&*self.runtime.inner.backend)
    }

    // ---------------------------------------------------------------- order

    /// Whether everything enqueued so far has been executed; does not wait.
    ///
    /// # Errors
    /// `Capture` where the stream takes part in a capture; else what the backend gives, and an error of earlier work may
    /// show up here.
    pub fn is_complete(&self) -> Result<bool> {
        let backend = self.backend("query_stream")?;
        let _turn = self.core.enter_outside("query_stream")?;
        Ok(backend.query_stream(self.core.id)?.is_complete())
    }

    /// Waits until everything enqueued so far has been executed.
    ///
    /// # Errors
    /// As [`Stream::is_complete`].
    pub fn synchronize(&self) -> Result<()> {
        self.backend("synchronize_stream")?;
        self.core.wait_for_all(self.core.enter_to_wait("synchronize_stream")?)?;
        self.runtime.inner.reclaim_in_passing();
        Ok(())
    }

    /// Marks the point that the stream has reached. In a capture, the mark is a point of the graph: it is good for
    /// [`Stream::wait`] until the capture ends.
    ///
    /// # Errors
    /// What the backend gives.
    pub fn record(&self) -> Result<Event> {
        let backend = self.backend("record_event")?;
        let mut mark = self.runtime.inner.device(self.device()).events.take(backend)?;
        let mut turn = self.core.enter("record_event")?;
        self.core.record(&mut turn, &mut mark)?;
        let capture = turn.recording.as_ref().map(|recording| Arc::clone(&recording.capture));
        drop(turn);
        Ok(Event::pooled(self.runtime.clone(), mark, capture))
    }

    /// Marks the point that the stream has reached, with the time.
    ///
    /// # Errors
    /// `Unsupported` where `event_timing` is false; `Capture` where the stream takes part in a capture; else what the
    /// backend gives.
    pub fn record_timed(&self) -> Result<Event> {
        let backend = self.backend("record_event")?;
        if !self.runtime.inner.device(self.device()).capabilities.event_timing {
            return Err(Error::lacks("create_event", "event_timing"));
        }
        let id = backend.create_event(self.device(), &EventOptions::new().with_timing())?;
        // From here on the event destroys itself, also where the record fails.
        let event = Event::timed(self.runtime.clone(), id);
        let turn = self.core.enter_outside("record_event")?;
        backend.record_event(id, self.core.id)?;
        drop(turn);
        Ok(event)
    }

    /// Makes what is enqueued from here on wait, on the device, for a mark of any stream of the same runtime. Where the
    /// mark was made in a capture that is open, this stream joins the capture.
    ///
    /// # Errors
    /// `Capture` where this stream takes part in a capture that the mark was not made in, or the mark's capture has ended;
    /// else what the backend gives.
    pub fn wait(&self, event: &Event) -> Result<()> {
        let backend = self.backend("stream_wait_event")?;
        if let Some(capture) = event.capture() {
            return capture::join(self, event, capture);
        }
        let turn = self.core.enter("stream_wait_event")?;
        if turn.recording.is_some() {
            return Err(Error::new(
                ErrorKind::Capture,
                "stream_wait_event",
                "the stream takes part in a capture, and the event was recorded outside it",
            )
            .with_hint("wait for it before the capture, or before each launch of the graph; the capture goes on"));
        }
        backend.stream_wait_event(self.core.id, event.id)
    }

    // ---------------------------------------------------------------- memory

    /// Allocates device memory in the order of this stream, which is faster for scratch memory. The contents are
    /// unspecified.
    ///
    /// The memory may have belonged to a buffer whose work on this stream is outstanding. So the first use on each
    /// other stream waits, on the device, for all earlier work of this stream. A graph that another stream records
    /// waits at each launch, not during recording. This orders only the allocation; order later work on the buffer with
    /// [`Stream::wait`].
    ///
    /// # Errors
    /// As [`Device::allocate`](crate::Device::allocate); `Unsupported` where `stream_ordered_memory` is false; `Capture`
    /// also where the stream takes part in a capture of another thread.
    pub fn allocate<T: Element>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        if !self.runtime.inner.device(self.device()).capabilities.stream_ordered_memory {
            return Err(Error::lacks("allocate", "stream_ordered_memory"));
        }
        if self.core.owner.is_some() {
            // Any thread may drop the buffer, and would have to free it in the order of the stream.
            let message = "other threads could not free memory allocated in the order of a per-thread default stream";
            return Err(Error::new(ErrorKind::Unsupported, "allocate", message).with_hint("use `Device::allocate`"));
        }
        let kind = DeviceMemoryKind::StreamOrdered(self.core.id);
        DeviceBuffer::with_home(self.runtime.clone(), self.device(), len, kind, Some(Arc::clone(&self.core)))
    }

    pub(crate) fn check_slice(&self, operation: &'static str, slice: &Untyped<'_>) -> Result<()> {
        if !slice.block.is_of(self) {
            return Err(Error::new(
                ErrorKind::InvalidPointer,
                operation,
                format!("{slice:?} belongs to another runtime than the stream"),
            )
            .with_hint("allocate from the stream's own runtime"));
        }
        Ok(())
    }

    pub(crate) fn check_here(&self, operation: &'static str, slice: &Untyped<'_>) -> Result<()> {
        self.check_slice(operation, slice)?;
        if slice.block.device != self.device() {
            return Err(Error::new(
                ErrorKind::WrongDevice,
                operation,
                format!("{slice:?} is on device {}, the stream on device {}", slice.block.device, self.device()),
            )
            .with_hint("use a stream of the buffer's device"));
        }
        Ok(())
    }

    fn check_len(operation: &'static str, src: usize, dst: usize) -> Result<()> {
        if src != dst {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                operation,
                format!("the source has {src} values, the destination {dst}"),
            )
            .with_hint("copy between equal lengths; `slice` gives a part of a buffer"));
        }
        Ok(())
    }

    /// Enqueues a copy of page-locked memory to the device. Returns at once; the buffer remembers that it is in use.
    ///
    /// # Errors
    /// `InvalidArgument` where the lengths differ, `WrongDevice` where `dst` is not on this stream's device; else what
    /// the backend gives.
    pub fn copy_to_device<'h, 'd, T: Element>(
        &self,
        src: impl Into<PinnedSlice<'h, T>>,
        dst: impl Into<DeviceSlice<'d, T>>,
    ) -> Result<()> {
        self.copy_pinned("copy_to_device", &src.into(), dst.into(), CopyKind::ToDevice)
    }

    /// Enqueues a copy of device memory to page-locked memory. Returns at once; the buffer remembers that it is in use,
    /// and [`PinnedBuffer::read`](crate::PinnedBuffer::read) waits for the values.
    ///
    /// # Errors
    /// As [`Stream::copy_to_device`].
    pub fn copy_to_host<'d, 'h, T: Element>(
        &self,
        src: impl Into<DeviceSlice<'d, T>>,
        dst: impl Into<PinnedSliceMut<'h, T>>,
    ) -> Result<()> {
        self.copy_pinned("copy_to_host", &dst.into().0, src.into(), CopyKind::ToHost)
    }

    fn copy_pinned<T: Element>(
        &self,
        operation: &'static str,
        host: &PinnedSlice<'_, T>,
        device: DeviceSlice<'_, T>,
        kind: CopyKind,
    ) -> Result<()> {
        let backend = self.backend(operation)?;
        let to_host = kind != CopyKind::ToDevice;
        let inner = &self.runtime.inner;
        if !Arc::ptr_eq(&host.runtime().inner, inner) {
            return Err(Error::new(
                ErrorKind::InvalidPointer,
                operation,
                format!("{host:?} belongs to another runtime than the stream"),
            )
            .with_hint("allocate from the stream's own runtime"));
        }
        self.check_here(operation, &device.untyped())?;
        let (src_len, dst_len) = if to_host { (device.len(), host.len()) } else { (host.len(), device.len()) };
        Self::check_len(operation, src_len, dst_len)?;
        let block = host.block();
        let range = host.bytes();
        let part_of = |part: &Range<usize>| {
            let ptr = device.ptr().offset(part.start - range.start);
            let on_device = Location::Device { device: device.device(), ptr };
            let on_host = Location::Host(block.ptr.offset(part.start));
            let (dst, src) = if to_host { (on_host, on_device) } else { (on_device, on_host) };
            MemoryCopy::new(dst, src, part.len())
        };
        let noted = device.block.note_use(&self.core)?;
        let recordable = kind != CopyKind::Awaited;
        inner.use_pinned(operation, block, &self.core, to_host, recordable, |turn| {
            let kept = turn.keep_device(operation, noted, &[device.block]);
            kept.map_err(|error| NotEnqueued { error, in_part: false })?;
            // No vendor copies across the border between two registrations.
            block.cut(range.clone()).try_for_each(|part| {
                // SAFETY: both ranges lie in one live block each, that of the host in one registration. The device block is
                // freed, and the host block used again or touched by the CPU, only after this stream has passed the copy:
                // `note_use` and `use_pinned` see to that, and the latter has made this stream wait for every other stream
                // whose use would race with the copy. Where the copy is recorded, the graph keeps both, and each launch
                // does the same.
                let enqueued = unsafe { backend.copy(&part_of(&part), self.core.id) };
                enqueued.map_err(|error| NotEnqueued { error, in_part: part.start > range.start })
            })
        })
    }

    /// Enqueues a copy between device buffers, of this stream's device or to or from another one.
    ///
    /// # Errors
    /// `InvalidArgument` where the lengths differ or the ranges overlap, `WrongDevice` where neither is on this stream's
    /// device, `Unsupported` between devices where `peer_copy` is false; else what the backend gives.
    pub fn copy<'s, 'd, T: Element>(
        &self,
        src: impl Into<DeviceSlice<'s, T>>,
        dst: impl Into<DeviceSlice<'d, T>>,
    ) -> Result<()> {
        const OPERATION: &str = "copy";
        let (src, dst) = (src.into(), dst.into());
        let backend = self.backend(OPERATION)?;
        self.check_slice(OPERATION, &src.untyped())?;
        self.check_slice(OPERATION, &dst.untyped())?;
        Self::check_len(OPERATION, src.len(), dst.len())?;
        if src.device() != dst.device() && !self.runtime.inner.device(self.device()).capabilities.peer_copy {
            return Err(Error::lacks(OPERATION, "peer_copy"));
        }
        if src.device() != self.device() {
            self.check_here(OPERATION, &dst.untyped())?;
        }
        if src.untyped().overlaps(src.bytes(), &dst.untyped(), dst.bytes()) {
            return Err(Error::new(ErrorKind::InvalidArgument, OPERATION, format!("{src:?} and {dst:?} overlap"))
                .with_hint("copy through a third buffer"));
        }
        let location = |slice: &DeviceSlice<'_, T>| Location::Device { device: slice.device(), ptr: slice.ptr() };
        let copy = MemoryCopy::new(location(&dst), location(&src), src.bytes());
        let noted = src.block.note_use(&self.core)?.and(dst.block.note_use(&self.core)?);
        let mut turn = self.core.enter(OPERATION)?;
        turn.keep_device(OPERATION, noted, &[src.block, dst.block])?;
        // SAFETY: both ranges lie in one live block each and do not overlap; the blocks are freed only after this stream
        // has passed the copy (`note_use`), or after the graph that keeps them. The CPU cannot reach either.
        unsafe { backend.copy(&copy, self.core.id) }
    }

    /// Enqueues a fill with one value, whose size is 1, 2 or 4 bytes.
    ///
    /// # Errors
    /// `InvalidArgument` for another size, `WrongDevice` for a buffer of another device; else what the backend gives.
    pub fn fill<'d, T: Element>(&self, dst: impl Into<DeviceSlice<'d, T>>, value: T) -> Result<()> {
        let dst = dst.into();
        let bytes = bytemuck::bytes_of(&value);
        let pattern = match *bytes {
            [a] => FillPattern::U8(a),
            [a, b] => FillPattern::U16(u16::from_ne_bytes([a, b])),
            [a, b, c, d] => FillPattern::U32(u32::from_ne_bytes([a, b, c, d])),
            _ => {
                return Err(Error::new(
                    ErrorKind::InvalidArgument,
                    "fill",
                    format!("a value of {} bytes; devices fill with 1, 2 or 4", bytes.len()),
                )
                .with_hint("use `fill_zero`, or upload the values"));
            }
        };
        self.enqueue_fill(dst, pattern, dst.len())
    }

    /// Enqueues a fill with zero bytes, for values of any size.
    ///
    /// # Errors
    /// As [`Stream::fill`].
    pub fn fill_zero<'d, T: Element>(&self, dst: impl Into<DeviceSlice<'d, T>>) -> Result<()> {
        let dst = dst.into();
        self.enqueue_fill(dst, FillPattern::U8(0), dst.bytes())
    }

    fn enqueue_fill<T: Element>(&self, dst: DeviceSlice<'_, T>, pattern: FillPattern, count: usize) -> Result<()> {
        let backend = self.backend("fill")?;
        self.check_here("fill", &dst.untyped())?;
        let noted = dst.block.note_use(&self.core)?;
        let fill = MemoryFill::new(dst.device(), dst.ptr(), pattern, count);
        let mut turn = self.core.enter("fill")?;
        turn.keep_device("fill", noted, &[dst.block])?;
        // SAFETY: the range lies in one live block, which is freed only after this stream has passed the fill, or after the
        // graph that keeps it. Its start is
        // a multiple of the pattern's size: blocks are aligned to 256, and slices start at a multiple of that size.
        unsafe { backend.fill(&fill, self.core.id) }
    }

    // ---------------------------------------------------------------- values

    /// Enqueues a copy of values to the device, through page-locked memory from the cache: `values` is free to change as
    /// soon as the call returns.
    ///
    /// # Errors
    /// As [`Stream::copy_to_device`] and [`Runtime::pinned`].
    pub fn write<'d, T: Element>(&self, values: &[T], dst: impl Into<DeviceSlice<'d, T>>) -> Result<()> {
        let dst = dst.into();
        Self::check_len("write", values.len(), dst.len())?;
        let mut staging = self.runtime.pinned::<T>(values.len())?;
        staging.write()?.copy_from_slice(values);
        self.copy_to_device(&staging, dst)
    }

    /// Returns a device buffer with these values, copied as by [`Stream::write`]. Work on another stream must wait for
    /// the copy: `other.wait(&stream.record()?)?`.
    ///
    /// # Errors
    /// As [`Stream::write`] and [`Device::allocate`](crate::Device::allocate).
    pub fn upload<T: Element>(&self, values: &[T]) -> Result<DeviceBuffer<T>> {
        let buffer = self.runtime.device(self.device())?.allocate(values.len())?;
        self.write(values, &buffer)?;
        Ok(buffer)
    }

    /// The values of a device buffer, once the work enqueued before has been executed. Waits.
    ///
    /// # Errors
    /// As [`Stream::copy_to_host`] and [`Runtime::pinned`]; `Capture` where the stream takes part in a capture.
    pub fn download<'d, T: Element>(&self, src: impl Into<DeviceSlice<'d, T>>) -> Result<Vec<T>> {
        let src = src.into();
        self.refuse_where_recorded("download")?;
        let mut staging = self.runtime.pinned::<T>(src.len())?;
        self.copy_pinned("copy_to_host", &PinnedSliceMut::from(&mut staging).0, src, CopyKind::Awaited)?;
        Ok(staging.read()?.to_vec())
    }

    /// Runs `enqueue`, which may enqueue copies into borrowed memory of any kind, then waits for them and delivers.
    ///
    /// The device never writes the borrowed memory itself: it writes page-locked memory of the cache, which is copied over
    /// after the wait. So nothing can write to a borrow that has ended, whatever fails or panics.
    ///
    /// ```
    /// # use highwater_core::Runtime;
    /// # use highwater_mock::{MockGpu, MockOptions};
    /// # let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
    /// # let stream = runtime.device(0)?.create_stream()?;
    /// let buffer = stream.upload(&[1_u8, 2, 3, 4])?;
    /// let (mut front, mut back) = ([0; 2], [0; 2]);
    /// stream.scope(|scope| {
    ///     scope.copy_to_host(buffer.slice(0..2)?, &mut front)?;
    ///     scope.copy_to_host(buffer.slice(2..4)?, &mut back)
    /// })?;
    /// assert_eq!((front, back), ([1, 2], [3, 4]));
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// The memory stays borrowed until the scope has ended, and outlives it:
    ///
    /// ```compile_fail,E0502
    /// # use highwater_core::Runtime;
    /// # use highwater_mock::{MockGpu, MockOptions};
    /// # let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
    /// # let stream = runtime.device(0).unwrap().create_stream().unwrap();
    /// # let buffer = stream.upload(&[1_u8, 2]).unwrap();
    /// let mut values = [0; 2];
    /// stream.scope(|scope| {
    ///     scope.copy_to_host(&buffer, &mut values)?;
    ///     println!("{}", values[0]); // not delivered yet
    ///     Ok(())
    /// }).unwrap();
    /// ```
    ///
    /// ```compile_fail,E0597
    /// # use highwater_core::Runtime;
    /// # use highwater_mock::{MockGpu, MockOptions};
    /// # let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
    /// # let stream = runtime.device(0).unwrap().create_stream().unwrap();
    /// # let buffer = stream.upload(&[1_u8, 2]).unwrap();
    /// stream.scope(|scope| {
    ///     let mut values = [0; 2];
    ///     scope.copy_to_host(&buffer, &mut values)
    /// }).unwrap();
    /// ```
    ///
    /// # Errors
    /// What `enqueue` gives, or what waiting for the copies gives; then nothing is delivered. `Capture` where the stream
    /// takes part in a capture.
    pub fn scope<'env, R>(&self, enqueue: impl FnOnce(&mut Scope<'_, 'env>) -> Result<R>) -> Result<R> {
        self.refuse_where_recorded("scope")?;
        let mut scope = Scope { stream: self, deliveries: Vec::new() };
        let value = enqueue(&mut scope)?;
        // All are waited for before the first is delivered: a copy that failed delivers nothing of the others either.
        scope.deliveries.iter().try_for_each(|delivery| delivery.wait())?;
        scope.deliveries.iter_mut().try_for_each(|delivery| delivery.deliver())?;
        Ok(value)
    }

    /// Refuses what waits for values where they are recorded and not made. A capture that begins after this is noticed by
    /// the copies.
    fn refuse_where_recorded(&self, operation: &'static str) -> Result<()> {
        self.backend(operation)?;
        self.core.enter_outside(operation).map(|_| ())
    }

    // ---------------------------------------------------------------- products

    /// Leases a BLAS handle, bound to this stream and its workspace. A repeat request in the same thread takes no lock and
    /// makes no call of the backend.
    ///
    /// # Errors
    /// The errors of making and binding a handle.
    // Always inlined: a call spills registers, and the compare-exchange waits for those stores (14 ns against 7).
    #[inline(always)]
    pub fn blas(&self) -> Result<BlasLease<'_>> {
        let lease = self.runtime.inner.blas_handles.lease(self.core.blas_key, || self.new_blas_handle())?;
        BlasLease::bind(self, lease)
    }

    /// A handle for products. In a capture that cannot record products, the error says so, and not that a handle is missing.
    #[cold]
    fn new_blas_handle(&self) -> Result<PooledHandle> {
        self.runtime.inner.create_handle(self.device(), BlasKind::Blas).or_else(|error| {
            if error.kind() == ErrorKind::Capture && self.core.enter("gemm")?.recording.is_some() {
                check_recordable("gemm", self)?;
            }
            Err(error)
        })
    }

    /// Leases an Lt handle, bound to this stream and its workspace, as [`Stream::blas`] does.
    ///
    /// # Errors
    /// `Unsupported` where `lt_plans` is false; else as [`Stream::blas`].
    #[inline(always)]
    pub fn lt(&self) -> Result<LtLease<'_>> {
        let lease = self
            .runtime
            .inner
            .lt_handles
            .lease(self.core.lt_key, || self.runtime.inner.create_handle(self.device(), BlasKind::Lt))?;
        LtLease::bind(self, lease)
    }
}

/// What [`Stream::scope`] enqueues with.
pub struct Scope<'s, 'env> {
    stream: &'s Stream,
    deliveries: Vec<Box<dyn Delivery + 'env>>,
}

/// One copy to borrowed memory.
trait Delivery {
    /// Waits for the copy.
    fn wait(&self) -> Result<()>;
    /// Delivers it.
    fn deliver(&mut self) -> Result<()>;
}

struct Delivered<'env, T: Element> {
    staging: PinnedBuffer<T>,
    dst: &'env mut [T],
}

impl<T: Element> Delivery for Delivered<'_, T> {
    fn wait(&self) -> Result<()> {
        self.staging.read().map(|_| ())
    }

    fn deliver(&mut self) -> Result<()> {
        self.dst.copy_from_slice(self.staging.read()?);
        Ok(())
    }
}

impl fmt::Debug for Scope<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scope").field("copies_to_host", &self.deliveries.len()).finish_non_exhaustive()
    }
}

impl<'env> Scope<'_, 'env> {
    /// Enqueues a copy of values to the device, as [`Stream::write`].
    ///
    /// # Errors
    /// As [`Stream::write`].
    pub fn copy_to_device<'d, T: Element>(&mut self, src: &[T], dst: impl Into<DeviceSlice<'d, T>>) -> Result<()> {
        self.stream.write(src, dst)
    }

    /// Enqueues a copy of device memory, which is delivered to `dst` at the end of the scope.
    ///
    /// # Errors
    /// As [`Stream::copy_to_host`] and [`Runtime::pinned`].
    pub fn copy_to_host<'d, T: Element>(
        &mut self,
        src: impl Into<DeviceSlice<'d, T>>,
        dst: &'env mut [T],
    ) -> Result<()> {
        let src = src.into();
        Stream::check_len("copy_to_host", src.len(), dst.len())?;
        let mut staging = self.stream.runtime.pinned::<T>(src.len())?;
        self.stream.copy_pinned("copy_to_host", &PinnedSliceMut::from(&mut staging).0, src, CopyKind::Awaited)?;
        self.deliveries.push(Box::new(Delivered { staging, dst }));
        Ok(())
    }
}
