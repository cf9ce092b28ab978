//! [`Sender`]: storages for PyTorch.
//!
//! A share holds its memory, its event and its slot until the slot is 0, or until its receiver has ended. The format has no message
//! for that, so a thread of the sender checks the slots while shares exist. It checks after 1 ms, and at longer intervals up to
//! 16 ms while nothing changes. The sender uses each slot once, so a receiver that counts twice ends no other share.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use highwater_core::fork::Generation;
use highwater_core::{
    Backend, DeviceBuffer, DeviceSlice, Element, Error, ErrorKind, EventId, EventOptions, IpcSharing, Result, Runtime,
    Stream, Transport,
};
use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::TorchStorage;
use crate::counters::{OwnFile, SLOTS, remove_files_of_dead_senders};
use crate::handle::VENDOR_BYTES;

const OPERATION: &str = "share";
/// Maximum number of events of a sender, as in PyTorch. Beyond that, it waits for the stream instead.
const MOST_EVENTS: usize = 1000;
/// The intervals between two checks of the slots.
const SHORTEST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(16);

/// The process that a share is for. [`Sender::share_with`] ends the share when the process ends.
#[derive(Debug, Clone)]
pub struct Receiver(Arc<OwnedFd>);

impl Receiver {
    /// Returns the process with this id. The caller must ensure that no other process has taken the id before the call. A child
    /// that was not waited for keeps its id.
    ///
    /// # Errors
    /// `Expired` if no process has the id; `OperatingSystem` if this process has run out of descriptors.
    pub fn by_pid(pid: u32) -> Result<Self> {
        const OPERATION: &str = "receiver";
        let none = || {
            Error::new(ErrorKind::Expired, OPERATION, format!("there is no process {pid}"))
                .with_hint("pass the id of a process of this PID namespace that has not ended")
        };
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(none)?;
        match pidfd_open(number, PidfdFlags::empty()) {
            Ok(process) => Ok(Self(Arc::new(process))),
            Err(rustix::io::Errno::SRCH) => Err(none()),
            Err(errno) => {
                let message = format!("the operating system cannot open process {pid}: {errno}");
                Err(Error::new(ErrorKind::OperatingSystem, OPERATION, message)
                    .with_code(i64::from(errno.raw_os_error()))
                    .with_hint("raise the limit on descriptors (ulimit -n)"))
            }
        }
    }

    /// Returns whether the process has ended. Its device work has ended before.
    fn has_ended(&self) -> bool {
        let mut wanted = [PollFd::new(&*self.0, PollFlags::IN)];
        poll(&mut wanted, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }
}

/// A share that has not ended.
struct Share {
    file: Arc<OwnFile>,
    slot: usize,
    event: Option<EventId>,
    receiver: Option<Receiver>,
    /// Dropped last: it keeps the runtime open.
    _memory: DeviceBuffer<u8>,
}

impl Share {
    fn is_released(&self) -> bool {
        // The work of the receiver happened before it counted.
        self.file.slot(self.slot).load(Ordering::Acquire) <= 0
    }
}

#[derive(Default)]
struct State {
    /// The file with unused slots, and the first of them.
    file: Option<(Arc<OwnFile>, usize)>,
    shares: Vec<Share>,
    /// Shares whose end the thread is working on.
    ending: usize,
    events: usize,
    closing: bool,
}

struct Inner {
    backend: Arc<dyn Backend>,
    generation: Generation,
    state: Mutex<State>,
    changed: Condvar,
}

impl Inner {
    /// Ends the shares whose receivers are done or dead. Returns their number.
    fn collect(&self) -> usize {
        let (ended, receivers) = {
            let mut state = self.state.lock();
            let ended: Vec<_> = state.shares.extract_if(.., |share| share.is_released()).collect();
            state.ending += ended.len();
            let mut receivers: Vec<_> = state.shares.iter().filter_map(|share| share.receiver.clone()).collect();
            receivers.dedup_by(|one, other| Arc::ptr_eq(&one.0, &other.0));
            (ended, receivers)
        };
        let mut all = ended;
        let dead: Vec<_> = receivers.into_iter().filter(Receiver::has_ended).collect();
        if !dead.is_empty() {
            let mut state = self.state.lock();
            let is_dead = |share: &mut Share| {
                share
                    .receiver
                    .as_ref()
                    .is_some_and(|receiver| dead.iter().any(|dead| Arc::ptr_eq(&dead.0, &receiver.0)))
            };
            let before = all.len();
            all.extend(state.shares.extract_if(.., is_dead));
            state.ending += all.len() - before;
        }
        let (count, mut events) = (all.len(), 0);
        for share in all {
            if let Some(event) = share.event {
                events += 1;
                if let Err(error) = self.backend.destroy_event(event) {
                    tracing::warn!("an event of a share for PyTorch stays: {error}");
                }
            }
        }
        if count > 0 {
            let mut state = self.state.lock();
            state.ending -= count;
            state.events -= events;
            drop(state);
            self.changed.notify_all();
        }
        count
    }

    /// Checks the slots until the sender is dropped and every share has ended.
    fn watch(&self) {
        let mut pause = SHORTEST_PAUSE;
        loop {
            if self.backend.is_exiting() {
                // Calls of the driver fail from now on. The process ends, and its memory with it.
                return;
            }
            pause = if self.collect() > 0 { SHORTEST_PAUSE } else { LONGEST_PAUSE.min(pause * 2) };
            let mut state = self.state.lock();
            if !state.shares.is_empty() {
                self.changed.wait_for(&mut state, pause);
            } else if state.closing {
                return;
            } else {
                self.changed.wait(&mut state);
                pause = SHORTEST_PAUSE;
            }
        }
    }
}

/// Shares device memory with processes that use PyTorch. Each share keeps its memory until the receiver has released it.
///
/// Dropping the sender ends no share. The memory stays until the receivers are done, or until this process ends. A thread of the
/// sender ends the shares.
///
/// ```
/// use highwater_core::{Result, Runtime, Transport};
/// use highwater_pytorch::Sender;
///
/// fn send(runtime: &Runtime) -> Result<()> {
///     let device = runtime.device(0)?;
///     let stream = device.create_stream()?;
///     // PyTorch opens plain blocks, by the vendor's legacy handle.
///     let weights = device.allocate_shared_by::<f32>(1000, Transport::Legacy)?;
///     stream.fill(&weights, 0.5_f32)?;
///     let sender = Sender::new(runtime)?;
///     println!("{}", sender.share(&weights, &stream)?); // a line for the Python process
///     drop(weights); // the receiver still has the memory
///     sender.wait(None);
///     Ok(())
/// }
/// ```
pub struct Sender {
    inner: Arc<Inner>,
    runtime: Runtime,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for Sender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sender").field("outstanding", &self.outstanding()).finish_non_exhaustive()
    }
}

impl Sender {
    /// Makes a sender. Removes the files of Highwater's senders that were killed.
    ///
    /// # Errors
    /// `OperatingSystem` if no thread can be started; `Forked` in a forked child.
    pub fn new(runtime: &Runtime) -> Result<Self> {
        runtime.check_outside_capture(OPERATION)?;
        remove_files_of_dead_senders();
        let backend = Arc::clone(runtime.backend());
        let (generation, state, changed) = (Generation::current(), Mutex::default(), Condvar::new());
        let inner = Arc::new(Inner { backend, generation, state, changed });
        let watched = Arc::clone(&inner);
        let thread = std::thread::Builder::new().name("highwater-pytorch".to_owned()).spawn(move || watched.watch());
        let thread = thread.map_err(|error| {
            let message = format!("the operating system cannot create a thread: {error}");
            Error::new(ErrorKind::OperatingSystem, OPERATION, message)
                .with_code(i64::from(error.raw_os_error().unwrap_or(0)))
                .with_hint("raise the limit on threads (ulimit -u)")
        })?;
        Ok(Self { inner, runtime: runtime.clone(), thread: Some(thread) })
    }

    /// Shares a buffer or a slice with one process that uses PyTorch. The receiver waits for the earlier work of `stream`. The
    /// caller must order other streams' work on the memory before that. Each storage is for one open. Share again for another
    /// receiver.
    ///
    /// The memory must be a plain block that the vendor's legacy handle names: of
    /// [`allocate_shared_by`](highwater_core::Device::allocate_shared_by) with [`Transport::Legacy`], or adopted memory of
    /// `cudaMalloc`. The receiver maps the whole block, and can reach the bytes beside the slice.
    ///
    /// The memory stays until the receiver has released the storage. If the receiver is killed or never opens it, the memory stays
    /// until this process ends. [`share_with`](Self::share_with) and [`TorchStorage::release`] end such a share. Afterwards, the
    /// memory is freed like that of any dropped buffer.
    ///
    /// # Errors
    /// - `InvalidArgument`: the slice is empty, of another runtime or device than the stream, or in memory that the legacy handle
    ///   does not name.
    /// - `Unsupported`: the device lacks the transport `Legacy` or `foreign_memory`.
    /// - `OperatingSystem`: `/dev/shm` has no memory left, or this process has run out of descriptors.
    /// - `Capture`: this thread is inside a capture, or the stream takes part in one.
    pub fn share<'b, T: Element>(
        &self,
        memory: impl Into<DeviceSlice<'b, T>>,
        stream: &Stream,
    ) -> Result<TorchStorage> {
        self.share_bytes(memory.into().as_bytes(), stream, None)
    }

    /// Shares as [`share`](Self::share) does, and ends the share when the process of the receiver ends.
    ///
    /// # Errors
    /// As [`share`](Self::share).
    pub fn share_with<'b, T: Element>(
        &self,
        memory: impl Into<DeviceSlice<'b, T>>,
        stream: &Stream,
        receiver: &Receiver,
    ) -> Result<TorchStorage> {
        self.share_bytes(memory.into().as_bytes(), stream, Some(receiver.clone()))
    }

    fn share_bytes(
        &self,
        memory: DeviceSlice<'_, u8>,
        stream: &Stream,
        receiver: Option<Receiver>,
    ) -> Result<TorchStorage> {
        let (runtime, backend, device) = (&self.runtime, &self.inner.backend, memory.device());
        runtime.check_outside_capture(OPERATION)?;
        let refused =
            |message: String, hint| Err(Error::new(ErrorKind::InvalidArgument, OPERATION, message).with_hint(hint));
        if memory.is_empty() {
            return refused("the slice is empty".to_owned(), "share at least one value");
        }
        if stream.device() != device {
            let message = format!("a stream of device {} for memory of device {device}", stream.device());
            return refused(message, "pass the stream whose work wrote the memory");
        }
        if !Arc::ptr_eq(stream.runtime().backend(), backend) {
            return refused(
                "the stream belongs to another runtime".to_owned(),
                "pass a stream of the sender's runtime",
            );
        }
        if backend.is_capturing(stream.id())? {
            return Err(Error::new(ErrorKind::Capture, OPERATION, "the stream takes part in a capture")
                .with_hint("share the memory before or after the capture"));
        }
        let keeps = runtime.keep(memory)?;
        let transport = keeps.transport()?;
        if transport != Transport::Legacy {
            let message =
                format!("other processes open the memory by {transport:?}, and PyTorch by {:?}", Transport::Legacy);
            return refused(message, "allocate it with `allocate_shared_by(len, Transport::Legacy)`");
        }
        let ipc = backend.ipc_sharing().ok_or_else(|| Error::lacks(OPERATION, "ipc_transports"))?;
        let base = backend.describe_memory(device, memory.ptr())?.base;
        // SAFETY: `describe_memory` returned the start of the block, and `keeps` keeps it allocated.
        let handle = unsafe { ipc.export_memory(device, base, Transport::Legacy)? };
        let (event_handle, event) = match self.record(&*ipc, stream)? {
            Some((event, handle)) => (handle, Some(event)),
            None => ([0; VENDOR_BYTES], None),
        };
        let kept = self.keep(event, receiver, keeps);
        let (name, slot) = kept.inspect_err(|_| self.give_up(event))?;
        Ok(TorchStorage {
            device,
            handle: handle.payload.to_vec(),
            size_bytes: memory.len() as u64,
            offset_bytes: memory.ptr().get() - base.get(),
            ref_counter_handle: name.into_bytes(),
            ref_counter_offset: slot as u64,
            event_handle: event_handle.to_vec(),
            event_sync_required: event.is_some(),
        })
    }

    /// Records an event for the receiver. Waits for the stream instead and returns `None` if the device lacks such events, or the
    /// sender has as many as PyTorch makes.
    fn record(&self, ipc: &dyn IpcSharing, stream: &Stream) -> Result<Option<(EventId, [u8; VENDOR_BYTES])>> {
        let (backend, device) = (&self.inner.backend, stream.device());
        let can = self.runtime.device(device)?.capabilities().interprocess_events;
        let mut state = self.inner.state.lock();
        let takes = can && state.events < MOST_EVENTS;
        state.events += usize::from(takes);
        drop(state);
        if !takes {
            stream.synchronize()?;
            return Ok(None);
        }
        let event = backend.create_event(device, &EventOptions::new().with_interprocess());
        let event = event.inspect_err(|_| self.inner.state.lock().events -= 1)?;
        let recorded = backend.record_event(event, stream.id()).and_then(|()| ipc.export_event(event));
        let handle = recorded.inspect_err(|_| self.give_up(Some(event)))?;
        Ok(Some((event, handle.payload)))
    }

    /// Destroys an event that no receiver learns of.
    fn give_up(&self, event: Option<EventId>) {
        let Some(event) = event else { return };
        // The caller has an error already.
        let _ = self.inner.backend.destroy_event(event);
        self.inner.state.lock().events -= 1;
    }

    /// Takes a slot, and keeps the memory until the slot is 0. Returns the name of the file, and the slot.
    fn keep(
        &self,
        event: Option<EventId>,
        receiver: Option<Receiver>,
        memory: DeviceBuffer<u8>,
    ) -> Result<(String, usize)> {
        let mut state = self.inner.state.lock();
        let (file, slot) = match &mut state.file {
            Some((file, next)) if *next < SLOTS => {
                *next += 1;
                (Arc::clone(file), *next - 1)
            }
            _ => {
                let file = Arc::new(OwnFile::create(OPERATION)?);
                state.file = Some((Arc::clone(&file), 1));
                (file, 0)
            }
        };
        file.slot(slot).store(1, Ordering::Release);
        let name = file.name().to_owned();
        let is_first = state.shares.is_empty();
        state.shares.push(Share { file, slot, event, receiver, _memory: memory });
        drop(state);
        if is_first {
            self.inner.changed.notify_all();
        }
        Ok((name, slot))
    }

    /// Returns the number of shares that have not ended.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        if !self.inner.generation.is_current() {
            return 0;
        }
        let state = self.inner.state.lock();
        state.shares.len() + state.ending
    }

    /// Waits until every share has ended, for at most `limit`. Returns whether all have ended. `None` means unlimited.
    ///
    /// A receiver in Python holds a storage until its last tensor is deleted.
    #[must_use]
    pub fn wait(&self, limit: Option<Duration>) -> bool {
        if !self.inner.generation.is_current() {
            return true;
        }
        let until = limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut state = self.inner.state.lock();
        while !state.shares.is_empty() || state.ending > 0 {
            match until {
                None => self.inner.changed.wait(&mut state),
                Some(until) if self.inner.changed.wait_until(&mut state, until).timed_out() => {
                    return state.shares.is_empty() && state.ending == 0;
                }
                Some(_) => {}
            }
        }
        true
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if !self.inner.generation.is_current() {
            // The thread does not exist in this child, so its handle must not be touched.
            std::mem::forget(thread);
            return;
        }
        let mut state = self.inner.state.lock();
        state.closing = true;
        // The last share removes the file.
        state.file = None;
        let is_done = state.shares.is_empty() && state.ending == 0;
        drop(state);
        self.inner.changed.notify_all();
        if is_done && thread.join().is_err() {
            tracing::warn!("the thread `highwater-pytorch` has panicked");
        }
    }
}
