//! [`Owner`]: the process that owns opened memory. [`OwnerDeath`]: the effect of its death on an importer.

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use super::identity::Process;
use super::system::os_error;
use highwater_hal::{Error, ErrorKind, Result};

/// The effect on opened memory when the process that owns it dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum OwnerDeath {
    /// The buffer stays usable, and the memory is released with it. With [`Transport::Descriptor`](crate::Transport::Descriptor)
    /// its contents stay. With other transports the vendor defines what remains.
    #[default]
    Keep,
    /// The memory is released promptly, even if the program still has the buffer. The queued work of this process that uses it
    /// ends first. From the death on, each operation on the buffer returns an error of kind `Expired`. So does the launch of a
    /// graph that uses it. If the owner is killed by `SIGKILL`, the release and the errors begin soon after the signal. The process ends
    /// later: with a CUDA context, after 30 to 100 milliseconds. The early release needs Linux 6.9, and both processes in one PID
    /// namespace.
    ///
    /// After [`Stream::note_device_use`](crate::Stream::note_device_use), other code has the address. From then on, the memory is
    /// released once the program has dropped the buffer.
    Release,
    /// This process becomes the owner when the owner dies. The buffer stays usable, as with `Keep`. Tickets that were issued before stay
    /// valid: this process answers them while it has the buffer, as the owner did. Opens between the death and the first answer return
    /// `Expired`, so the caller must try again for some tenths of a second. If several processes chose this, one of them answers, and
    /// the next one after its death.
    ///
    /// The process keeps a descriptor of the memory. An open returns `Unsupported` if the transport is not
    /// [`Transport::Descriptor`](crate::Transport::Descriptor), or the rendezvous is an inherited descriptor, which has no name to take.
    Inherit,
}

/// The options of an open: the argument of [`Runtime::open_shared_with`](crate::Runtime::open_shared_with) and
/// [`Runtime::open_pinned_with`](crate::Runtime::open_pinned_with).
///
/// ```
/// use highwater_core::{OwnerDeath, ImportOptions};
///
/// let options = ImportOptions::new().with_owner_death(OwnerDeath::Release);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ImportOptions {
    owner_death: OwnerDeath,
}

impl ImportOptions {
    /// Returns the options that [`Runtime::open_shared`](crate::Runtime::open_shared) uses: the memory of a dead owner is kept.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the effect on the memory when its owner dies.
    #[must_use]
    pub fn with_owner_death(self, owner_death: OwnerDeath) -> Self {
        Self { owner_death }
    }

    /// Returns the effect on the memory when its owner dies.
    #[must_use]
    pub fn owner_death(&self) -> OwnerDeath {
        self.owner_death
    }
}

/// The process that owns the memory of an opened buffer: [`DeviceBuffer::owner`](crate::DeviceBuffer::owner).
///
/// The handle outlives the buffer and keeps no memory. Only the end of the process counts as its death. [`Owner::is_alive`] also returns
/// false once `SIGKILL` was sent to it, because no process survives that. An owner that is stopped, or whose connection is closed, is
/// alive. An ended process counts as dead even before its parent waits for it, and even with zombie threads.
///
/// ```no_run
/// use std::time::Duration;
///
/// use highwater_core::{OwnerDeath, ImportOptions, Runtime, Ticket};
/// # use highwater_mock::{MockGpu, MockOptions};
///
/// # fn main() -> highwater_core::Result<()> {
/// # let (runtime, ticket) = (Runtime::new(MockGpu::open(MockOptions::new())?)?, Ticket::from_bytes(&[])?);
/// let options = ImportOptions::new().with_owner_death(OwnerDeath::Release);
/// let weights = runtime.open_shared_with::<f32>(&ticket, &options)?;
/// // `None` if this process made the buffer.
/// if let Some(owner) = weights.owner() {
///     let pid = owner.pid();
///     let watch = owner.on_death(move || eprintln!("process {pid:?} has died, and its weights are gone"))?;
///     while owner.is_alive() {
///         // Use the weights.
/// #       break;
///     }
///     let is_dead = owner.wait(Duration::from_secs(1))?;
/// #   let _ = (is_dead, watch);
/// }
/// # Ok(())
/// # }
/// ```
///
/// [`AsFd`] and [`AsRawFd`] return the pidfd of the owner. It becomes readable when the owner has ended, so `poll`, `epoll` and
/// asynchronous runtimes can wait for it. The caller must not close it.
#[derive(Clone)]
pub struct Owner {
    process: Arc<Process>,
    pidfd: Arc<OwnedFd>,
    witness: Weak<dyn NoticesDeaths>,
}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Owner").field("pid", &self.pid()).field("is_alive", &self.is_alive()).finish()
    }
}

impl AsFd for Owner {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

impl AsRawFd for Owner {
    fn as_raw_fd(&self) -> RawFd {
        self.pidfd.as_raw_fd()
    }
}

impl Owner {
    /// Returns the owner behind a connection. `None` before it has sent its greeting.
    pub(super) fn new(process: &Arc<Process>, witness: Weak<dyn NoticesDeaths>) -> Option<Self> {
        let pidfd = Arc::clone(process.shared_pidfd()?);
        Some(Self { process: Arc::clone(process), pidfd, witness })
    }

    /// Returns the process id, as this process sees it. After the death, the id may name another process. `None` for a process of
    /// another PID namespace.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.process.pid().and_then(|pid| u32::try_from(pid).ok())
    }

    /// Returns whether the process is alive. Returns false before the end if the process is being killed, as `/proc` shows it. Memory that was
    /// opened with [`OwnerDeath::Release`] is not released before this returns false.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        // In this order: the process may end meanwhile. Another connection to the same process may have noted the kill.
        !(self.process.is_being_killed() || self.process.has_ended())
    }

    /// Waits for the end of the process, for at most `timeout`. Returns whether it has ended.
    ///
    /// # Errors
    /// `OperatingSystem` if the system refuses the wait.
    pub fn wait(&self, timeout: Duration) -> Result<bool> {
        // `None` for a time that does not end.
        let until = Instant::now().checked_add(timeout);
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let left = left.and_then(|left| rustix::time::Timespec::try_from(left).ok());
            let mut end = [PollFd::from_borrowed_fd(self.as_fd(), PollFlags::IN)];
            match rustix::event::poll(&mut end, left.as_ref()) {
                Ok(ready) => return Ok(ready > 0),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(os_error("wait", "wait for the death of a process", errno)),
            }
        }
    }

    /// Calls a closure once when the process dies, or at once if it is dead. By then, operations on buffers that were opened with
    /// [`OwnerDeath::Release`] are refused, and their memory is about to be released. Keep the result: dropping it cancels
    /// the call, unless it has begun. `let _ =` drops it at once.
    ///
    /// The sharing thread of the runtime makes the call. Until the closure returns, that thread answers no other process and
    /// releases no memory. The closure may drop buffers; otherwise it should only signal another thread. The call does not take place if
    /// the runtime ends before the process.
    ///
    /// # Errors
    /// `ShuttingDown` if the runtime has ended; `Forked` in a forked child; `OperatingSystem` if no thread can be started.
    pub fn on_death(&self, call: impl FnOnce() + Send + 'static) -> Result<DeathWatch> {
        const OPERATION: &str = "on_death";
        let ended = || {
            Error::new(ErrorKind::ShuttingDown, OPERATION, "the runtime has ended")
                .with_hint("keep the runtime, or wait for the owner with `Owner::wait`")
        };
        let witness = self.witness.upgrade().ok_or_else(ended)?;
        Arc::clone(&witness).attend(OPERATION)?;
        let number = witness.deaths().add(&self.process, Box::new(call));
        witness.look_again();
        Ok(DeathWatch { number, witness: Weak::clone(&self.witness) })
    }
}

/// A closure that waits for the death of a process: [`Owner::on_death`]. Dropping it cancels the call.
#[must_use = "bind it to a name: dropping the watch cancels the call"]
#[derive(Debug)]
pub struct DeathWatch {
    number: u64,
    witness: Weak<dyn NoticesDeaths>,
}

impl Drop for DeathWatch {
    fn drop(&mut self) {
        if let Some(witness) = self.witness.upgrade().filter(|witness| witness.is_current()) {
            // Dropped without the lock: a closure may own anything.
            let cancelled = witness.deaths().cancel(self.number);
            drop(cancelled);
        }
    }
}

type Call = Box<dyn FnOnce() + Send>;

/// A process for which closures wait.
struct Watched {
    process: Arc<Process>,
    calls: Vec<(u64, Call)>,
}

/// The part of a runtime that notices the deaths of processes.
pub(crate) trait NoticesDeaths: Send + Sync {
    fn deaths(&self) -> &Deaths;
    /// Starts the thread that detects deaths, if it does not run.
    fn attend(self: Arc<Self>, operation: &'static str) -> Result<()>;
    /// Makes that thread check the closures again.
    fn look_again(&self);
    /// Returns false in a forked child.
    fn is_current(&self) -> bool;
}

/// The closures that wait for the deaths of processes.
#[derive(Default)]
pub(crate) struct Deaths {
    watched: Mutex<Vec<Watched>>,
    last: AtomicU64,
}

impl fmt::Debug for Deaths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Deaths").finish_non_exhaustive()
    }
}

impl Deaths {
    fn add(&self, process: &Arc<Process>, call: Call) -> u64 {
        // Relaxed: the numbers only need to be unique.
        let number = self.last.fetch_add(1, Ordering::Relaxed);
        let mut watched = self.watched.lock();
        match watched.iter_mut().find(|watched| Arc::ptr_eq(&watched.process, process)) {
            Some(watched) => watched.calls.push((number, call)),
            None => watched.push(Watched { process: Arc::clone(process), calls: vec![(number, call)] }),
        }
        number
    }

    fn cancel(&self, number: u64) -> Option<(Call, Option<Watched>)> {
        let mut list = self.watched.lock();
        let (at, place) = list.iter().enumerate().find_map(|(at, watched)| {
            watched.calls.iter().position(|(known, _)| *known == number).map(|place| (at, place))
        })?;
        let (_, call) = list[at].calls.swap_remove(place);
        let watched = list[at].calls.is_empty().then(|| list.swap_remove(at));
        Some((call, watched))
    }

    /// Returns the processes that closures wait for.
    pub(super) fn processes(&self) -> Vec<Arc<Process>> {
        self.watched.lock().iter().map(|watched| Arc::clone(&watched.process)).collect()
    }

    /// Makes the calls that waited for the death of a process.
    pub(super) fn call(&self, process: &Arc<Process>) {
        let watched = {
            let mut list = self.watched.lock();
            let at = list.iter().position(|watched| Arc::ptr_eq(&watched.process, process));
            at.map(|at| list.swap_remove(at))
        };
        for (_, call) in watched.into_iter().flat_map(|watched| watched.calls) {
            if crate::panics::contain(call).is_none() {
                crate::warnings::warning!("a closure for the death of {process} has panicked");
            }
        }
    }
}

/// The runtime has ended before these processes. The program's values in the closures may panic in their drops.
impl Drop for Deaths {
    fn drop(&mut self) {
        for Watched { process, calls } in std::mem::take(self.watched.get_mut()) {
            for (_, call) in calls {
                if crate::panics::contain(|| drop(call)).is_none() {
                    crate::warnings::warning!("the drop of a closure for the death of {process} has panicked");
                }
            }
        }
    }
}

#[cfg(test)]
impl Deaths {
    pub(super) fn is_locked(&self) -> bool {
        self.watched.is_locked()
    }

    pub(super) fn hold_lock(&self) -> impl Drop + '_ {
        crate::testing::Held(self.watched.lock())
    }
}
