//! The state that all users of a stream share.
//!
//! The handle of the per-thread default stream names another stream in each thread, so a stream over it belongs to the
//! thread that made it. Calls of other threads fail. Another thread may still drop a buffer and need a completion
//! event, which it cannot record. So the end of each submission lock records a completion event.

use std::any::Any;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::{self, ThreadId};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::submission::{SubmissionGuard, SubmissionState};
use crate::capture::thread::let_go;
use crate::pool::PoolKey;
use crate::pool::completion_events::{CompletionEvent, EventPool, Point};
use crate::pool::stream_memory::StreamMemory;
use crate::pool::stream_use::{LiveStream, StreamEnd, StreamUse};
use crate::pool::workspaces::{IdleWorkspace, Workspaces};
use crate::services::{Dropped, Services};
use highwater_hal::{
    BlasKind, DevicePtr, Error, ErrorKind, FillPattern, MemoryFill, Products, Result, StreamId, Workspace, fork,
};

/// The state that all users of a stream share. The last user ends the stream. It does not keep the runtime alive.
///
/// `repr(C)` keeps the fields that every product reads next to each other, because a vendor call evicts most of them from the
/// cache.
#[repr(C)]
pub(crate) struct StreamCore {
    pub(crate) id: StreamId,
    /// Identifies the stream in this process, including streams that have ended; never 0.
    pub(crate) key: u64,
    /// The key under which handles are bound to the stream: its own key, or that of the capture that it takes part in.
    bound_as: AtomicU64,
    pub(super) submission: Mutex<SubmissionState>,
    /// True if a call needs more checks before it enqueues: of its thread, or of a capture by other code.
    pub(super) asks: bool,
    /// True if each use of page-locked memory is recorded at once: other code may end or capture the stream.
    pub(super) records_at_use: bool,
    /// True if a batch of uses is open. Written under the submission lock.
    pub(super) has_batch: AtomicBool,
    /// True if other code may capture the stream, so that calls must query the backend.
    pub(super) ask_capture: bool,
    /// True if the device can capture. Other code may have the id of any stream and capture it.
    pub(super) can_capture: bool,
    pub(crate) services: Arc<Services>,
    /// The products that the device supports.
    pub(crate) products: Products,
    own_process: fork::Guard,
    pub(crate) workspaces: Arc<Workspaces>,
    /// The keys of the BLAS handles and the Lt handles that can be bound to the stream.
    pub(crate) blas_key: PoolKey,
    pub(crate) lt_key: PoolKey,
    /// For the per-thread default stream: its thread.
    pub(super) owner: Option<Owner>,
    /// True if the last reference destroys the stream: not for the vendor's default streams.
    owned: bool,
    /// For a stream of other code: what keeps it alive.
    keep_alive: Option<KeepStream>,
    end: Arc<StreamEnd>,
    /// Wakes a capture that waits for the stream's waiters, and the waiters behind it.
    pub(super) settled: Condvar,
    /// Set by the first BLAS call; contains `None` if workspaces are disabled.
    pub(super) blas_workspace: OnceLock<Option<Workspace>>,
    /// Set by the first Lt call that finds no BLAS workspace of sufficient size.
    pub(super) lt_workspace: OnceLock<Option<Workspace>>,
    /// True while a thread creates the workspace. The lock is not held during that time.
    pub(super) making_workspace: Mutex<bool>,
    pub(super) workspace_made: Condvar,
    /// The device memory in the order of the stream, once any is allocated.
    memory: OnceLock<Arc<StreamMemory>>,
}

/// The thread that a stream belongs to, with the pool of the completion events that its calls record.
pub(crate) struct Owner {
    thread: ThreadId,
    pub(super) events: Arc<EventPool>,
}

impl Owner {
    /// Creates an owner for the calling thread.
    pub(super) fn current(events: Arc<EventPool>) -> Self {
        Self { thread: thread::current().id(), events }
    }

    pub(super) fn is_here(&self) -> bool {
        self.thread == thread::current().id()
    }
}

/// The origin of a stream.
#[derive(Default)]
pub(super) struct Origin {
    /// True if the last reference destroys the stream.
    pub(super) owned: bool,
    /// True if other code made the stream and may capture it.
    pub(super) foreign: bool,
    /// For the per-thread default stream: its thread.
    pub(super) owner: Option<Owner>,
    /// What keeps the stream of other code alive.
    pub(super) keep_alive: Option<KeepStream>,
}

/// What keeps a stream of other code alive.
pub(super) type KeepStream = Box<dyn Any + Send + Sync>;

impl fmt::Debug for StreamCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamCore")
            .field("id", &self.id)
            .field("blas_workspace", &self.blas_workspace)
            .finish_non_exhaustive()
    }
}

impl StreamCore {
    pub(super) fn new(
        services: Arc<Services>,
        workspaces: Arc<Workspaces>,
        id: StreamId,
        Origin { owned, foreign, owner, keep_alive }: Origin,
    ) -> Arc<Self> {
        let device = id.device();
        let state = services.device(device);
        let key = Self::next_key();
        let capabilities = &state.capabilities;
        let key_of = |kind| PoolKey { device, affinity: if state.handle_per_stream(kind) { key } else { 0 } };
        Arc::new(Self {
            id,
            key,
            products: Products::of(capabilities),
            own_process: fork::Guard::of(services.generation),
            blas_key: key_of(BlasKind::Blas),
            lt_key: key_of(BlasKind::Lt),
            owned,
            keep_alive,
            end: Arc::default(),
            submission: Mutex::default(),
            settled: Condvar::new(),
            bound_as: AtomicU64::new(key),
            has_batch: AtomicBool::new(false),
            records_at_use: owner.is_some() || foreign,
            asks: owner.is_some() || (foreign && capabilities.capture),
            ask_capture: foreign && capabilities.capture,
            can_capture: capabilities.capture,
            owner,
            blas_workspace: OnceLock::new(),
            lt_workspace: OnceLock::new(),
            making_workspace: Mutex::new(false),
            workspaces,
            services,
            workspace_made: Condvar::new(),
            memory: OnceLock::new(),
        })
    }

    /// Returns a record of the stream for memory that it uses.
    pub(crate) fn as_use(self: &Arc<Self>) -> StreamUse {
        StreamUse::new(self.key, Arc::downgrade(self) as Weak<dyn LiveStream>, self.end())
    }

    pub(crate) fn end(&self) -> Arc<StreamEnd> {
        Arc::clone(&self.end)
    }

    /// Returns a key that no stream and no capture has had before.
    pub(crate) fn next_key() -> u64 {
        static KEYS: AtomicU64 = AtomicU64::new(1);
        // Relaxed: the keys only need to be unique.
        KEYS.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the device memory in the order of the stream.
    #[inline]
    pub(crate) fn memory(self: &Arc<Self>) -> &Arc<StreamMemory> {
        self.memory.get_or_init(|| {
            let memory = self.workspaces.pool(self.id.device()).enlist(self.key, false);
            memory.belongs_to(self.as_use());
            memory
        })
    }

    /// Returns whether this process is the one that made the stream.
    #[inline(always)]
    pub(crate) fn is_own_process(&self) -> bool {
        self.own_process.is_current()
    }

    /// Records a completion event after all work enqueued on the stream so far, except captured work.
    pub(crate) fn completion(&self) -> Result<Arc<CompletionEvent>> {
        if self.owner.as_ref().is_some_and(|owner| !owner.is_here()) {
            let latest = self.lock_submission().latest.clone();
            return latest.ok_or_else(|| not_the_owner("record_event"));
        }
        let completion = self.services.device(self.id.device()).events.take(&*self.services.backend)?;
        let submission = self.enter("record_event")?;
        self.complete(submission, completion)
    }

    /// Records a completion event under the submission lock, which ends before the event goes back to its pool.
    fn complete(
        &self,
        mut submission: SubmissionGuard<'_>,
        mut completion: CompletionEvent,
    ) -> Result<Arc<CompletionEvent>> {
        if let Some(recording) = &submission.recording {
            return Ok(Arc::clone(&recording.before));
        }
        self.refuse_if_captured("record_event")?;
        if let Some(batch) = self.record_batch(&mut submission)? {
            return Ok(batch);
        }
        self.record(&mut submission, &mut completion)?;
        drop(submission);
        Ok(Arc::new(completion))
    }

    /// Records a completion event after all work enqueued on the stream so far. The caller must have the submission
    /// lock, so that the numbers follow the order of the records.
    pub(crate) fn record(&self, submission: &mut SubmissionState, completion: &mut CompletionEvent) -> Result<()> {
        self.record_batch(submission)?;
        self.services.backend.record_event(completion.event(), self.id)?;
        submission.completions += 1;
        completion.set_point(Point { stream: self.key, number: submission.completions });
        Ok(())
    }

    /// Returns the key under which handles are bound to the stream now.
    #[inline]
    pub(crate) fn bound_as(&self) -> u64 {
        // Relaxed: a call that enqueues reads it again under the submission lock, and the key changes only under that lock.
        self.bound_as.load(Ordering::Relaxed)
    }

    /// Binds handles under another key from here on. The caller must hold the submission lock.
    pub(crate) fn bind_to(&self, key: u64) {
        self.bound_as.store(key, Ordering::Relaxed);
    }
}

impl LiveStream for StreamCore {
    fn id(&self) -> StreamId {
        self.id
    }

    fn completion(&self) -> Result<Arc<CompletionEvent>> {
        Self::completion(self)
    }

    fn completion_soon(&self) -> Result<Option<Arc<CompletionEvent>>> {
        const SOON: Duration = Duration::from_millis(1);
        if self.owner.as_ref().is_some_and(|owner| !owner.is_here()) {
            let Some(submission) = self.submission.try_lock_for(SOON) else { return Ok(None) };
            return submission.latest.clone().ok_or_else(|| not_the_owner("record_event")).map(Some);
        }
        let completion = self.services.device(self.id.device()).events.take(&*self.services.backend)?;
        let Some(submission) = self.submission.try_lock_for(SOON) else { return Ok(None) };
        self.complete(submission.into(), completion).map(Some)
    }

    fn is_over(&self) -> bool {
        let Ok(submission) = self.enter("query_stream") else { return false };
        match &submission.recording {
            Some(recording) => {
                let before = Arc::clone(&recording.before);
                drop(submission);
                self.services.is_surely_passed(&before)
            }
            None => {
                // A query would invalidate a capture by other code.
                self.refuse_if_captured("query_stream").is_ok() && self.services.is_stream_idle(self.id)
            }
        }
    }

    fn record_in_capture(&self, key: u64) -> Result<Option<CompletionEvent>> {
        let mut completion = self.services.device(self.id.device()).events.take(&*self.services.backend)?;
        let mut submission = self.enter("record_event")?;
        if submission.recording.as_ref().is_none_or(|recording| recording.key != key) {
            return Ok(None);
        }
        self.record(&mut submission, &mut completion)?;
        drop(submission);
        Ok(Some(completion))
    }

    unsafe fn fill(&self, ptr: DevicePtr, bytes: usize, value: u8) -> Result<()> {
        let _submission = self.enter_outside("fill")?;
        let fill = MemoryFill::new(self.id.device(), ptr, FillPattern::U8(value), bytes);
        // SAFETY: As the caller promises.
        unsafe { self.services.backend.fill(&fill, self.id) }
    }

    fn is_idle(&self) -> bool {
        let Some(submission) = self.try_lock_submission() else { return false };
        submission.recording.is_none()
            && self.refuse_if_captured("query_stream").is_ok()
            && self.services.is_stream_idle(self.id)
    }

    fn count_failed_release(&self, error: &Error) {
        self.services.count_failed_release(error);
    }
}

/// Wakes the threads that wait for the end of a stream, even if the backend panics during it.
struct Ending<'s> {
    end: &'s StreamEnd,
    last: Option<Arc<CompletionEvent>>,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.end.set(self.last.take());
    }
}

impl Drop for StreamCore {
    fn drop(&mut self) {
        // Other code's drop may call a driver that no longer works.
        let keep_alive = ManuallyDrop::new(self.keep_alive.take());
        if !self.is_own_process() {
            return;
        }
        // A runtime that is ending has no buffers left to process, and frees all workspaces itself.
        let owner = self.services.owner();
        let may_release =
            if owner.is_some() { self.services.may_release() } else { !self.services.backend.is_exiting() };
        let mut ending = Ending { end: &self.end, last: None };
        let last = owner
            .as_ref()
            .filter(|_| may_release)
            .and_then(|_| self.completion().inspect_err(|error| self.services.count_failed_release(error)).ok());
        if may_release && owner.is_some() && last.is_none() {
            self.wait_for_batch();
        }
        ending.last.clone_from(&last);
        drop(ending);
        if !may_release && self.services.backend.is_exiting() {
            return;
        }
        let _keep_alive = ManuallyDrop::into_inner(keep_alive);
        if !may_release {
            return;
        }
        if let Some(memory) = self.memory.get() {
            memory.pool.end_stream(memory);
        }
        if let Some(owner) = &owner {
            if let Some(last) = &last {
                let workspaces = [&self.blas_workspace, &self.lt_workspace].into_iter().filter_map(OnceLock::get);
                for &workspace in workspaces.flatten() {
                    let idle = IdleWorkspace { workspace, after: Some(Arc::clone(last)) };
                    self.workspaces.give_back(self.id.device(), idle);
                }
            }
            owner.keep_handles_of([self.blas_key, self.lt_key], last.as_ref());
        }
        match &owner {
            _ if !self.owned => {}
            Some(_) => self.services.destroy_or_defer(Dropped::Stream(self.id)),
            None => {
                // No later call can retry, so the stream is destroyed now.
                let destroyed = self.services.backend.destroy_stream(self.id);
                if let Err(error) = destroyed.or_else(|_| self.services.backend.destroy_stream(self.id)) {
                    crate::warnings::warning!("a stream could not be destroyed: {error}");
                }
            }
        }
        // This may be the last reference to the runtime.
        owner.into_iter().for_each(|owner| let_go(owner));
    }
}

#[cold]
pub(super) fn not_the_owner(operation: &'static str) -> Error {
    Error::new(
        ErrorKind::InvalidState,
        operation,
        "the per-thread default stream belongs to another thread; its handle names a different stream in this one",
    )
    .with_hint("use it only in the thread that made it, or share a stream of `create_stream`")
}
