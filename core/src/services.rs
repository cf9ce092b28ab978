//! The base of every pool: the backend, the fork guard, the ledger, the devices, and the releases to retry.
//!
//! This is the bottom layer. Each pool holds a reference to it; the runtime owns the pools.

use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use crate::capture::GraphCounters;
use crate::capture::thread::in_capture;
use crate::capture_gate::{CaptureGate, Quiet};
use crate::ledger::Ledger;
use crate::numerics::Numerics;
use crate::pool::PoolKey;
use crate::pool::completion_events::{CompletionEvent, EventPool};
use crate::waits::notifier::{Answers, Notifier};
use highwater_hal::{
    AnyId, Backend, BlasKind, Capabilities, Completion, DeviceInfo, DoneAnswer, Error, ErrorKind, EventId, GraphExecId,
    GraphId, HostObserver, HostPtr, IpcSharing, Result, StreamId, Transport, fork::Generation,
};

/// The runtime, as seen from the pools. Each method concerns pools that the caller does not know.
pub(crate) trait Owner: Any + Send + Sync {
    /// Frees memory that is known to be unused, without waiting.
    fn trim_in_passing(&self);
    /// Frees cached device memory for an allocation that found none. Waits for streams.
    fn trim_device_memory(&self);
    /// Keeps the handles that were tied to a stream that has ended, for use after its last work.
    fn keep_handles_of(&self, keys: [PoolKey; 2], after: Option<&Arc<CompletionEvent>>);
}

/// The bottom layer of a runtime.
pub(crate) struct Services {
    pub(crate) backend: Arc<dyn Backend>,
    observer: Option<Arc<dyn HostObserver>>,
    pub(crate) generation: Generation,
    /// The policy for products of threads and leases that set none.
    pub(crate) numerics: Numerics,
    pub(crate) devices: Box<[DeviceState]>,
    pub(crate) ledger: Ledger,
    pub(crate) graphs: GraphCounters,
    /// The waits for the end of work that block no thread.
    pub(crate) notifier: Arc<Notifier>,
    /// Releases that the backend refused.
    failed_releases: AtomicU64,
    /// Objects left on purpose because the process is exiting.
    left_at_exit: AtomicU64,
    /// Objects that threads inside a capture dropped.
    dropped: Mutex<Vec<Dropped>>,
    /// Objects that the backend refused to destroy.
    refused: Mutex<Vec<Dropped>>,
    owner: OnceLock<Weak<dyn Owner>>,
}

/// Releases what the runtime holds, and retries the refused ones once after all others: no later call can retry.
/// Returns the first error that remains.
pub(crate) fn twice<T>(held: impl IntoIterator<Item = T>, mut release: impl FnMut(&T) -> Result<()>) -> Result<()> {
    let refused: Vec<T> = held.into_iter().filter(|one| release(one).is_err()).collect();
    refused.iter().map(release).fold(Ok(()), Result::and)
}

/// Objects to destroy later: dropped inside a capture, or refused by the backend.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Dropped {
    Graph(GraphId),
    Executable(GraphExecId),
    Stream(StreamId),
    Event(EventId),
}

/// The state of one device.
pub(crate) struct DeviceState {
    pub(crate) info: DeviceInfo,
    pub(crate) capabilities: Capabilities,
    pub(crate) events: Arc<EventPool>,
    pub(crate) capture_gate: CaptureGate,
    /// Bytes of workspace for the BLAS calls of a stream; 0 for none.
    pub(crate) blas_workspace_bytes: usize,
    /// Bytes of workspace for the Lt calls of a stream; 0 for none.
    pub(crate) lt_workspace_bytes: usize,
}

impl DeviceState {
    /// Bytes of workspace for the calls of one kind; 0 for none.
    pub(crate) fn workspace_bytes(&self, kind: BlasKind) -> usize {
        match kind {
            BlasKind::Lt => self.lt_workspace_bytes,
            _ => self.blas_workspace_bytes,
        }
    }

    /// Returns whether handles of a kind stay with one stream. They do if the vendor requires it, or if products keep
    /// intermediate results in the handle's own memory. A plan made for no workspace has no such results.
    pub(crate) fn handle_per_stream(&self, kind: BlasKind) -> bool {
        let can = &self.capabilities;
        can.handle_per_stream
            || (kind == BlasKind::Lt && can.lt_handle_per_stream)
            || (kind == BlasKind::Blas && self.blas_workspace_bytes == 0)
    }
}

/// Returns the error of a transport that the device does not offer.
#[cold]
pub(crate) fn lacks_transport(operation: &'static str, transport: Transport) -> Error {
    let message = format!("the device's capability `ipc_transports` lacks {transport:?}");
    Error::new(ErrorKind::Unsupported, operation, message)
        .with_hint("ask `capabilities()` before, or use another transport, device or backend")
}

impl Services {
    pub(crate) fn new(
        backend: Arc<dyn Backend>,
        generation: Generation,
        numerics: Numerics,
        devices: Box<[DeviceState]>,
    ) -> Self {
        Self {
            observer: backend.host_observer(),
            backend,
            generation,
            numerics,
            devices,
            ledger: Ledger::default(),
            graphs: GraphCounters::default(),
            notifier: Notifier::new(generation),
            failed_releases: AtomicU64::new(0),
            left_at_exit: AtomicU64::new(0),
            dropped: Mutex::default(),
            refused: Mutex::default(),
            owner: OnceLock::new(),
        }
    }

    /// Sets the runtime that owns the pools, once.
    pub(crate) fn set_owner(&self, owner: Weak<dyn Owner>) {
        let _ = self.owner.set(owner);
    }

    /// Returns the runtime that owns the pools, or `None` once it ends. The reference delays its end.
    pub(crate) fn owner(&self) -> Option<Arc<dyn Owner>> {
        self.owner.get().and_then(Weak::upgrade)
    }

    /// Frees memory that is known to be unused, without waiting.
    pub(crate) fn trim_in_passing(&self) {
        if let Some(owner) = self.owner() {
            owner.trim_in_passing();
        }
    }

    /// Refuses calls that would touch the driver in a forked child or during the end of the process.
    pub(crate) fn check(&self, operation: &'static str) -> Result<()> {
        if !self.generation.is_current() {
            return Err(Generation::error(operation));
        }
        if self.backend.is_exiting() {
            return Err(highwater_hal::exit::error(operation));
        }
        Ok(())
    }

    pub(crate) fn device(&self, ordinal: u32) -> &DeviceState {
        &self.devices[ordinal as usize]
    }

    pub(crate) fn ipc(&self, operation: &'static str) -> Result<Arc<dyn IpcSharing>> {
        self.backend.ipc_sharing().ok_or_else(|| Error::lacks(operation, "ipc_transports"))
    }

    /// Keeps captures on all devices from beginning. Returns `None` if one is open.
    pub(crate) fn quiet(&self) -> Option<Vec<Quiet>> {
        self.devices.iter().map(|device| device.capture_gate.quiet()).collect()
    }

    // ---------------------------------------------------------------- completion events

    /// Returns whether the completion event is passed; with `wait`, waits until it is. Records it if its batch is open; without
    /// `wait`, only if the stream's submission lock is free. The caller must hold no submission lock.
    pub(crate) fn is_passed(&self, completion: &CompletionEvent, wait: bool) -> Result<bool> {
        let is_passed = self.find_passed(completion, wait)?;
        if is_passed && !completion.progress().is_passed() {
            self.share(AnyId::Event(completion.event()));
            completion.progress().set_passed();
        }
        Ok(is_passed)
    }

    /// As [`is_passed`](Self::is_passed), but tells no other thread.
    fn find_passed(&self, completion: &CompletionEvent, wait: bool) -> Result<bool> {
        let progress = completion.progress();
        if !progress.is_closed() && ((!wait && in_capture()) || !completion.ensure_recorded(wait)?) {
            return Ok(false);
        }
        if progress.is_passed() {
            return Ok(true);
        }
        if wait {
            self.backend.synchronize_event(completion.event())?;
            return Ok(true);
        }
        self.has_reached(completion)
    }

    fn has_reached(&self, completion: &CompletionEvent) -> Result<bool> {
        self.backend.query_event(completion.event()).map(Completion::is_complete)
    }

    /// Returns whether a stream has executed everything, as far as the backend can tell. Other threads may rely on it.
    pub(crate) fn is_stream_idle(&self, stream: StreamId) -> bool {
        let is_idle = self.backend.query_stream(stream).is_ok_and(Completion::is_complete);
        if is_idle {
            self.share(AnyId::Stream(stream));
        }
        is_idle
    }

    /// Reports to the backend's observer that other threads may rely on what this one has learned of an event or a stream.
    #[inline]
    pub(crate) fn share(&self, id: AnyId) {
        if let Some(observer) = &self.observer {
            observer.shared(id);
        }
    }

    /// Reports to the backend's observer that the CPU accesses page-locked memory.
    #[inline]
    pub(crate) fn note_access(&self, ptr: HostPtr, bytes: usize, writes: bool) {
        if let Some(observer) = &self.observer {
            observer.accessed(ptr, bytes, writes);
        }
    }

    /// Returns whether the completion event is passed, as far as the backend can tell. An error proves nothing about the work:
    /// the block continues to wait, and the end of the runtime frees it.
    pub(crate) fn is_surely_passed(&self, completion: &CompletionEvent) -> bool {
        self.is_passed(completion, false).unwrap_or(false)
    }

    // ---------------------------------------------------------------- releases

    /// Returns whether a destructor may call the backend. If the process is exiting, counts the object that is left.
    pub(crate) fn may_release(&self) -> bool {
        if !self.generation.is_current() {
            return false;
        }
        let exiting = self.backend.is_exiting();
        // Threads that drop at the same time must not all write the count.
        if exiting {
            self.left_at_exit.fetch_add(1, Ordering::Relaxed);
        }
        !exiting
    }

    pub(crate) fn count_failed_release(&self, error: &Error) {
        self.failed_releases.fetch_add(1, Ordering::Relaxed);
        crate::warnings::warning!("a release was refused: {error}");
    }

    /// Counts a release if it failed, and passes its result on.
    pub(crate) fn note(&self, result: Result<()>) -> Result<()> {
        if let Err(error) = &result {
            self.count_failed_release(error);
        }
        result
    }

    /// Destroys an object, after the capture if the thread is inside one.
    pub(crate) fn destroy_or_defer(&self, dropped: Dropped) {
        if in_capture() {
            self.dropped.lock().push(dropped);
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
            self.refused.lock().push(dropped);
        }
    }

    /// Destroys the objects that threads inside a capture dropped.
    pub(crate) fn destroy_dropped(&self) -> Result<()> {
        let dropped = std::mem::take(&mut *self.dropped.lock());
        let mut result = Ok(());
        for dropped in dropped {
            result = result.and(self.destroy(dropped));
        }
        result
    }

    /// Retries once the destroys that the backend refused. The first refusal was counted.
    fn destroy_refused(&self) -> Result<()> {
        let refused = std::mem::take(&mut *self.refused.lock());
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

    /// Retries refused destroys once, outside captures.
    pub(crate) fn retry_refused(&self) -> Result<()> {
        if in_capture() { Ok(()) } else { self.destroy_refused() }
    }

    /// Retries refused destroys as long as any succeeds, and once more.
    pub(crate) fn insist_on_refused(&self) -> Result<()> {
        let mut in_vain = 0;
        loop {
            let waiting = self.refused_destroys();
            let result = self.destroy_refused();
            in_vain = if self.refused_destroys() < waiting { 0 } else { in_vain + 1 };
            if result.is_ok() || in_vain == 2 {
                return result;
            }
        }
    }

    pub(crate) fn destroy_idle_events(&self) -> Result<()> {
        let mut result = Ok(());
        for event in self.devices.iter().flat_map(|device| device.events.take_all()) {
            result = result.and(self.destroy(Dropped::Event(event)));
        }
        result
    }

    // ---------------------------------------------------------------- statistics

    /// Returns the number of refused destroys to retry.
    pub(crate) fn refused_destroys(&self) -> u64 {
        self.refused.lock().len() as u64
    }

    pub(crate) fn failed_releases(&self) -> u64 {
        self.failed_releases.load(Ordering::Relaxed)
    }

    pub(crate) fn left_at_exit(&self) -> u64 {
        self.left_at_exit.load(Ordering::Relaxed)
    }
}

impl Answers for Services {
    fn has_passed(&self, event: &CompletionEvent) -> Result<bool> {
        let Some(observer) = &self.observer else {
            // Other code may have recorded an exposed event again since it passed.
            return if event.is_exposed() { self.has_reached(event) } else { self.is_passed(event, false) };
        };
        // The answer counts for the code that waits, once that code has it. So no pool may rely on this question.
        let mut answer = Ok(false);
        observer.ask_for_others(&mut || {
            answer = if event.is_exposed() { self.has_reached(event) } else { self.find_passed(event, false) };
        });
        answer
    }

    fn answer(&self, event: &CompletionEvent) -> Option<Arc<dyn DoneAnswer>> {
        self.observer.as_ref()?.answer(event.event())
    }

    fn may_ask(&self) -> Result<()> {
        self.check("done")
    }
}

#[cfg(test)]
impl Services {
    pub(crate) fn hold_locks(&self) -> impl Drop + '_ {
        let events: Vec<_> = self.devices.iter().map(|device| device.events.hold_lock()).collect();
        let captures: Vec<_> = self.devices.iter().map(|device| device.capture_gate.hold_lock()).collect();
        let lists = (self.dropped.lock(), self.refused.lock(), self.notifier.hold_lock());
        crate::testing::Held((events, self.ledger.hold_locks(), captures, lists, crate::capture_gate::hold_registry()))
    }

    pub(crate) fn is_locked(&self) -> bool {
        let of_device = |device: &DeviceState| device.events.is_locked() || device.capture_gate.is_locked();
        self.devices.iter().any(of_device)
            || self.ledger.is_locked()
            || self.dropped.is_locked()
            || self.refused.is_locked()
            || self.notifier.is_locked()
    }
}
