//! The importing side: connections to exporters, mappings, and pending releases.
//!
//! A mapping is kept after its last buffer is dropped, so that another open of the allocation is one atomic operation on its
//! word. It is removed when the exporter frees the allocation or ends, when the runtime is trimmed, and at the end of the
//! runtime.

mod succession;

pub(super) use succession::CountedAt;

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant, SystemTime};

use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use super::counts::{Acquired, Slot};
use super::heir::{Kept, Pause};
use super::held::HeldMemory;
use super::identity::Process;
use super::listening::{WithoutForks, note_received};
use super::listing::{Listed, ListedImport};
use super::message::{
    AT_ONCE, ExportKey, LONGEST, Message, Opened, Part as HandlePart, Standing, Wants, check_version,
};
use super::open_count::OpenCount;
use super::options::{Method, Openers};
use super::patience::{OPERATION, Patience, expired, refusal};
use super::rendezvous::Meeting;
use super::segment::{CountSegment, Progress, Readiness, ReadySegment, SLOTS, place_of};
use super::spread::spread;
use super::system::{Bell, Received, invalid_message, is_readable, line, os_error, receive, send};
use super::ticket::{Secret, Ticket, not_given_out};
use crate::device_block::DeviceBlock;
use crate::pool::completion_events::CompletionEvent;
use crate::pool::stream_use::{StreamUse, UseEnd};
use highwater_hal::{Descriptor, DevicePtr, Error, ErrorKind, MemoryHandle, Result, Transport};

/// Time limit for the greeting of a process that has the name of a dead exporter.
const HEIR_ANSWERS_WITHIN: Duration = Duration::from_secs(1);
/// Time in which an heir listens on the socket of an owner that has ended.
const HEIR_LISTENS_WITHIN: Duration = Duration::from_millis(500);
/// Number of ended exporters that are remembered. An open of another one waits again.
const MOST_ENDED: usize = 256;
/// The first and the longest time between two connections to the socket of such an exporter. Each connection stays in the socket's queue.
const CONNECTS_AGAIN_AFTER: [Duration; 2] = [Duration::from_millis(10), Duration::from_secs(2)];
/// Maximum number of connections for one request, if the exporter hands over meanwhile.
const CONNECTIONS: usize = 3;
/// Maximum number of parts of one allocation. An exporter with more is at fault.
const MOST_FURTHER: u32 = 1 << 20;

/// Maximum number of times that the watched threads of an exporter are chosen. They are chosen again when one of them has ended and the
/// exporter was not killed.
const MOST_CHOICES: u64 = 16;

/// Time for which a thread looks for an answer before it sleeps. A running exporter mostly answers earlier, and to sleep and be woken takes
/// as long again.
const LOOKS_FOR: Duration = Duration::from_micros(50);

/// Time between two checks of a thread that waits for the requests of another thread.
const LOCK_LOOKS_EVERY: Duration = Duration::from_millis(20);

/// Time limits of one open for the answers of a live exporter.
#[derive(Debug)]
struct Limits {
    answer: Duration,
    /// For an exporter that did not answer the last open.
    answer_again: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { answer: Duration::from_secs(10), answer_again: Duration::from_secs(2) }
    }
}

impl Limits {
    /// Returns the time that an open may wait for the exporter of a ticket, over all its requests and connections. The time is
    /// short for an exporter that did not answer the last open. Otherwise repeated opens of its tickets would block for too long.
    fn patience(&self, state: &State, ticket: &Ticket) -> Patience {
        let was_silent = state.silent.contains_key(&ticket.incarnation);
        Patience::new(if was_silent { self.answer_again } else { self.answer })
    }
}

#[derive(Debug, Default)]
pub(crate) struct Importer {
    limits: Limits,
    state: Mutex<State>,
    /// Signaled when a connection or a mapping is added or removed.
    changed: Condvar,
    /// Imports that were dropped while streams may still use them.
    pending: Mutex<Vec<PendingRelease>>,
    pending_count: AtomicU64,
    /// True while a thread processes `pending`. One thread at a time, so that no thread finds the list empty while another
    /// holds its entries.
    asking: AtomicBool,
    /// The blocks that are revoked when the owner of their memory dies, by their addresses.
    revocable: Mutex<HashMap<usize, RevocableBlock>>,
    /// Imports to unmap as soon as no buffer has them open.
    to_unmap: Mutex<Vec<Arc<Import>>>,
    /// Imports that the backend has refused to unmap. The service does not retry them on its own.
    refused: Mutex<Vec<Arc<Import>>>,
    /// True if the last mappings took long.
    slow: AtomicBool,
    pub(crate) opens: AtomicU64,
    pub(crate) kept_opens: AtomicU64,
    pub(crate) live: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    /// By incarnation of the exporter. `None` while a thread connects.
    links: HashMap<[u8; 16], Option<Arc<Link>>>,
    /// Connections that are no longer used: allocations that they opened are still mapped, or their exporter was killed and has not ended.
    former: Vec<Arc<Link>>,
    /// `None` while a thread opens the allocation.
    imports: HashMap<ImportKey, Option<Arc<Import>>>,
    /// The imports by incarnation and index, as exporters name them: one for each device that opened the allocation.
    by_index: HashMap<([u8; 16], u32), Vec<Arc<Import>>>,
    /// Imports of dead exporters that are still open, after their tickets were opened again at an heir.
    former_imports: Vec<Arc<Import>>,
    /// Exporters that did not answer the last request: when the request failed, and why.
    silent: HashMap<[u8; 16], (Instant, Error)>,
    /// Exporters that have ended and whose socket another process has without accepting connections, at most [`MOST_ENDED`].
    ended: VecDeque<Ended>,
    lost_links: u64,
}

impl State {
    /// Returns all imports that are mapped.
    fn mapped(&self) -> impl Iterator<Item = &Arc<Import>> {
        self.imports.values().flatten().chain(&self.former_imports)
    }

    /// Returns the imports that a connection has opened.
    fn opened_by(&self, link: &Arc<Link>) -> Vec<Arc<Import>> {
        self.mapped().filter(|import| Arc::ptr_eq(&import.link, link)).cloned().collect()
    }

    /// Returns whether an import is the one of its key.
    fn stands(&self, import: &Arc<Import>) -> bool {
        let there = self.imports.get(&import.key()).and_then(Option::as_ref);
        there.is_some_and(|there| Arc::ptr_eq(there, import))
    }

    /// Returns the former import of a key for which this process answers.
    fn inherited(&self, key: ImportKey) -> Option<Arc<Import>> {
        self.former_imports.iter().find(|former| former.key() == key && former.is_inherited()).cloned()
    }

    /// Returns the ids of the processes that have answered for an exporter and have ended, and that handed nothing over. No heir has a
    /// socket of theirs.
    fn ended_without_heir(&self, incarnation: &[u8; 16]) -> Vec<i32> {
        let former = self.former.iter().filter(|link| link.incarnation == *incarnation);
        let ended = former.filter(|link| link.process.has_ended() && link.has_handed_nothing_over());
        ended.filter_map(|link| link.process.pid()).collect()
    }

    /// Notes whether an exporter has ended and left its socket to a process that does not accept connections.
    fn note_ended(&mut self, incarnation: [u8; 16], has_ended: bool) {
        let before = self.ended.iter().position(|ended| ended.incarnation == incarnation);
        let before = before.and_then(|place| self.ended.remove(place));
        if has_ended {
            let [shortest, longest] = CONNECTS_AGAIN_AFTER;
            let mut pause = before.map_or_else(|| Pause::between(shortest, longest), |before| before.pause);
            let until = Instant::now() + pause.next();
            self.ended.push_back(Ended { incarnation, pause, until });
            if self.ended.len() > MOST_ENDED {
                self.ended.pop_front();
            }
        }
    }

    fn is_current(&self, link: &Arc<Link>) -> bool {
        self.links.get(&link.incarnation).and_then(Option::as_ref).is_some_and(|current| Arc::ptr_eq(current, link))
    }

    /// Stops opening allocations by a connection. Removes the connection unless allocations that it opened are still mapped, or its exporter
    /// was killed and has not ended.
    fn retire(&mut self, link: &Arc<Link>) {
        if self.is_current(link) {
            self.links.remove(&link.incarnation);
        }
        self.former.retain(|former| !Arc::ptr_eq(former, link));
        let is_ending = link.process.is_killed() && !link.is_lost();
        if link.imports.load(Ordering::Relaxed) > 0 || is_ending {
            self.former.push(Arc::clone(link));
        }
    }
}

/// An exporter that has ended, and whose socket another process has without accepting connections.
#[derive(Debug)]
struct Ended {
    incarnation: [u8; 16],
    /// Between two connections to the socket.
    pause: Pause,
    /// The time of the next connection.
    until: Instant,
}

/// Returns the error for the ticket of an [`Ended`] exporter.
fn left_to_another(ticket: &Ticket) -> Error {
    let what = "has ended, and the process that has its socket accepts no connections";
    expired(format!("the exporter (process {}) {what}", ticket.pid))
}

/// The cause of a failed connection.
#[derive(Debug, Clone, Copy)]
enum Fault {
    /// The other end has closed the connection.
    Cut,
    /// The process that listened on the socket has ended, and the socket is still there. The value is its id, if it is known.
    OwnerEnded(Option<i32>),
    /// The queue of connections had no space.
    Full,
    Other,
}

/// An allocation as opened for one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct ImportKey {
    incarnation: [u8; 16],
    serial: u64,
    device: u32,
}

/// A connection to an exporter.
#[derive(Debug)]
pub(crate) struct Link {
    incarnation: [u8; 16],
    /// False if an exporter is found at an inherited descriptor, which no heir can take.
    may_have_heir: bool,
    pub(crate) process: Arc<Process>,
    socket: OwnedFd,
    /// Number of the last request. The lock is held from a request to its answer.
    channel: Mutex<u32>,
    /// The number of times that a thread found the exporter stopped.
    stops: AtomicU64,
    /// The line on which the exporter rings.
    pub(crate) line: OwnedFd,
    /// True if the exporter still holds the other end of the line.
    pub(crate) has_line: AtomicBool,
    /// Set when the exporter's process has ended.
    lost: AtomicBool,
    /// The watched threads of the exporter. The end of one can show early that the exporter was killed. `None` until they are chosen, and
    /// after one has ended.
    threads: Mutex<Option<Arc<[OwnedFd]>>>,
    /// The number of times that watched threads were chosen.
    choices: AtomicU64,
    /// Set when the exporter has handed over.
    handed_over: AtomicBool,
    /// Set when this process requests the socket on which the exporter listens.
    takes_over: AtomicBool,
    /// The heir that the exporter has named after a hand-over.
    named_heir: OnceLock<Arc<Process>>,
    /// The exporter's socket, if the answer with it came after this process had given the request up.
    late: Mutex<Option<OwnedFd>>,
    /// Set while the exporter may not have read requests that were given up. It grants such an open and takes it back, which would undo a
    /// prepared open of the same allocation.
    has_given_up: AtomicBool,
    /// Set when the connection is found to be cut.
    cut: AtomicBool,
    /// Number of mappings that it opened; written under the lock of the tables.
    imports: AtomicU64,
    parts: Mutex<Vec<Part>>,
    /// The exporter's greeting: its standing and its process id. Unset before it.
    greeted: OnceLock<(Standing, u32)>,
}

/// The counts and the readiness of one group of allocations.
#[derive(Debug, Clone, Default)]
struct Part {
    counts: Option<Arc<CountSegment>>,
    ready: Option<Arc<ReadySegment>>,
}

/// An allocation of another process, mapped here.
#[derive(Debug)]
pub(crate) struct Import {
    pub(crate) link: Arc<Link>,
    /// The ticket that opened it, used to share it again. The exporter has confirmed the allocation that it names.
    pub(crate) ticket: Ticket,
    counts: Arc<CountSegment>,
    ready: Arc<ReadySegment>,
    pub(crate) device: u32,
    pub(crate) ptr: DevicePtr,
    /// True if several parts were mapped as one range.
    is_joined: bool,
    /// Time of the open that mapped it.
    since: SystemTime,
    /// Decides whether the import may be unmapped.
    open: OpenCount,
    /// Its original handles, if it was opened to be inherited.
    held: OnceLock<Arc<HeldMemory>>,
    succession: Mutex<Succession>,
}

/// The state of an import after the death of its exporter.
#[derive(Debug, Default)]
enum Succession {
    /// The exporter lives, or has no heir.
    #[default]
    None,
    /// This process is the heir.
    Inherited(Arc<Kept>),
    /// Another process is the heir.
    Registered(Registration),
    /// Unmapped.
    Over,
}

/// The count of an import at an heir: one, until it is unmapped.
#[derive(Debug)]
struct Registration {
    link: Arc<Link>,
    counted: CountedAt,
}

impl Registration {
    fn end(self, key: ExportKey, state: &mut State) {
        self.counted.end(&self.link, key);
        if self.link.imports.fetch_sub(1, Ordering::Relaxed) == 1 {
            state.retire(&self.link);
        }
    }
}

/// A block that is revoked when the owner of its memory dies.
type RevocableBlock = (Arc<Import>, Weak<DeviceBlock>);

#[derive(Debug)]
struct PendingRelease {
    import: Arc<Import>,
    after: Vec<Arc<CompletionEvent>>,
    /// Uses that have no completion event yet.
    later: Vec<StreamUse>,
    /// True if the end of a stream's use is unknown. Then the end of the runtime releases the import.
    unmarked: bool,
}

impl PendingRelease {
    /// Records the ends of the uses that have no completion event yet.
    fn record_later(&mut self) {
        for use_ in std::mem::take(&mut self.later) {
            match use_.completion_soon() {
                UseEnd::At(completion) => self.after.push(completion),
                UseEnd::Later => self.later.push(use_),
                UseEnd::Unknown => self.unmarked = true,
            }
        }
    }
}

/// The operations for mapping, provided by the runtime.
pub(crate) trait Mapper: Sync {
    /// Maps memory of another process.
    fn map(&self, device: u32, handle: &MemoryHandle) -> Result<DevicePtr>;
    /// Unmaps it. Returns `false` if the backend refuses. The caller must no longer use the mapping.
    fn unmap(&self, device: u32, ptr: DevicePtr) -> bool;
    /// Maps the parts of another process's memory as one range.
    fn map_joined(&self, device: u32, bytes: u64, pieces: &mut Pieces<'_>) -> Result<DevicePtr>;
    /// As [`Mapper::unmap`], for a range of [`Mapper::map_joined`].
    fn unmap_joined(&self, device: u32, ptr: DevicePtr) -> bool;
    /// Fails if this process must stop waiting.
    fn check(&self) -> Result<()>;
    /// Returns a descriptor that is readable once [`Mapper::check`] fails. `None` if the checks between two waits suffice.
    fn ending(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    /// The bell that exporters ring.
    fn bell(&self) -> &Bell;
    /// The rendezvous with exporters.
    fn meeting(&self) -> &Meeting;
}

/// The handles of an allocation's parts, as the exporter sends them.
pub(crate) struct Pieces<'p> {
    link: &'p Link,
    key: ExportKey,
    mapper: &'p dyn Mapper,
    patience: Patience,
    /// The transport and the device of every part.
    like: (Transport, [u8; 16]),
    /// Handles that have arrived.
    here: VecDeque<MemoryHandle>,
    /// Number of parts that have arrived so far.
    arrived: u32,
    /// Number of parts.
    count: u32,
}

impl Pieces<'_> {
    /// Returns the next handle. Requests more from the exporter if none is left here.
    pub(crate) fn next(&mut self) -> Result<Option<MemoryHandle>> {
        if self.here.is_empty() && self.arrived < self.count {
            let handles = self.link.open_parts(self.key, self.arrived, self.like, self.mapper, self.patience)?;
            self.arrived = self.arrived.saturating_add(u32::try_from(handles.len()).unwrap_or(u32::MAX));
            self.here.extend(handles);
        }
        Ok(self.here.pop_front())
    }
}

impl Import {
    fn key(&self) -> ImportKey {
        ImportKey { incarnation: self.ticket.incarnation, serial: self.ticket.serial, device: self.device }
    }

    fn index(&self) -> u32 {
        self.ticket.index
    }

    fn export(&self) -> ExportKey {
        ExportKey { index: self.index(), serial: self.ticket.serial }
    }

    /// Returns whether this process answers in place of the dead exporter.
    fn is_inherited(&self) -> bool {
        matches!(&*self.succession.lock(), Succession::Inherited(_))
    }

    fn slot(&self) -> Slot<'_> {
        self.counts.slot(place_of(self.index()).1, self.ticket.serial)
    }

    /// Checks that a ticket with the same serial number names this import.
    fn check(&self, ticket: &Ticket) -> Result<()> {
        if ticket.index != self.index() {
            return Err(expired("the exporter has no such allocation".to_owned()));
        }
        if ticket.allocation_bytes != self.ticket.allocation_bytes {
            return Err(invalid_message(OPERATION, "an allocation that is not the ticket's"));
        }
        // The exporter has confirmed the secret of this one.
        if self.ticket.secret.is_some() && ticket.secret != self.ticket.secret {
            return Err(not_given_out("it does not have the secret of its allocation"));
        }
        Ok(())
    }

    /// Waits until the device work before a share is done. Only a running exporter can report that.
    fn wait(&self, number: u64, mapper: &dyn Mapper, patience: Option<Patience>) -> Result<()> {
        let link = &self.link;
        let mut waits = None;
        wait_ready(&self.ready, self.index(), number, || {
            mapper.check()?;
            if link.process.has_ended() {
                return Err(link.ended());
            }
            // The work has no limit.
            let (patience, look) = *waits.get_or_insert_with(|| {
                let patience = patience.unwrap_or_else(|| Patience::new(Duration::ZERO));
                (patience, patience.next_look())
            });
            if look <= Instant::now() {
                link.check_running()?;
                waits = Some((patience, patience.next_look()));
            }
            Ok(())
        })
    }
}

/// Waits until the device work before a share is done, and calls `check` regularly to learn whether to continue. The allocation
/// must be open, so that its slot is not reused.
///
/// # Errors
/// `InvalidArgument` if no ticket has this number; `DeviceLost` if the work failed.
pub(crate) fn wait_ready(
    ready: &ReadySegment,
    index: u32,
    number: u64,
    mut check: impl FnMut() -> Result<()>,
) -> Result<()> {
    let slot = place_of(index).1;
    if ready.readiness(slot, number) == Readiness::Ready {
        return Ok(());
    }
    // The wait would never end.
    if !ready.is_issued(slot, number) {
        return Err(not_given_out("it names a share that was not made"));
    }
    if ready.is_orphaned(slot) {
        return Err(expired("the owner died before its device work of this share was done".to_owned()));
    }
    loop {
        match ready.wait(slot, number, Duration::from_millis(20)) {
            Readiness::Ready => return Ok(()),
            Readiness::Waiting => check()?,
            Readiness::Failed => {
                return Err(Error::new(
                    ErrorKind::DeviceLost,
                    OPERATION,
                    "the exporter's device failed in the work before the share",
                )
                .with_hint("look at the exporter's errors"));
            }
        }
    }
}

impl Link {
    pub(crate) fn incarnation(&self) -> &[u8; 16] {
        &self.incarnation
    }

    /// Returns whether the exporter answers no more: it has ended or handed over.
    pub(crate) fn is_lost(&self) -> bool {
        self.is_dead() || self.is_handed_over()
    }

    /// Returns whether the exporter has ended, as far as the service has noticed.
    pub(crate) fn is_dead(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Returns whether the exporter has handed over, as far as the service has noticed.
    pub(crate) fn is_handed_over(&self) -> bool {
        self.handed_over.load(Ordering::Relaxed)
    }

    /// Returns the threads of the exporter that the service watches.
    pub(super) fn threads(&self) -> Arc<[OwnedFd]> {
        let mut threads = self.threads.lock();
        let chosen = threads.get_or_insert_with(|| {
            let is_over = self.process.is_killed() || self.choices.fetch_add(1, Ordering::Relaxed) >= MOST_CHOICES;
            // One that has ended already is not reported by its process before the debugger lets it go.
            let mut threads = if is_over { Vec::new() } else { self.process.threads() };
            threads.retain(|thread| !is_readable(thread.as_fd()));
            threads.into()
        });
        Arc::clone(chosen)
    }

    /// Notes a hand-over. Returns whether it is new.
    pub(super) fn note_hand_over(&self) -> bool {
        !self.handed_over.swap(true, Ordering::Relaxed)
    }

    fn ended(&self) -> Error {
        expired(format!("the exporter ({}) has ended", self.process))
    }

    pub(super) fn is_cut(&self) -> bool {
        self.cut.load(Ordering::Relaxed)
    }

    fn ring(&self) {
        // A failed send is harmless: the exporter is gone, or has other messages to read and checks the flags after them.
        let _ = send(self.socket.as_fd(), &Message::Ring.encode(), &[]);
    }

    /// Connects to the exporter of a ticket. If the exporter has ended and its socket has not, another process has the socket. It is an heir
    /// that does not listen yet, or a child of the exporter. The call then tries again for the time of `heir`, unless
    /// `without_heir` has the id of the exporter. It sets `has_ended` if no heir came. Each attempt leaves a connection in the socket's queue.
    /// If `has_ended` is set before, a full queue is the one of such a socket.
    pub(super) fn connect_or_wait(
        ticket: &Ticket,
        mapper: &dyn Mapper,
        patience: Patience,
        heir: Patience,
        without_heir: &[i32],
        has_ended: &mut bool,
    ) -> Result<Self> {
        let queue = if *has_ended { patience.at_most(Duration::ZERO) } else { patience };
        let (mut first_error, mut connections, mut pause) = (None, 0, Pause::new());
        while connections < CONNECTIONS {
            let mut fault = Fault::Other;
            match Self::connect_once(ticket, mapper, patience, queue, &mut fault) {
                Ok(link) if link.names_another() => connections += 1,
                Ok(link) => return Ok(link),
                Err(error) => match fault {
                    Fault::OwnerEnded(pid) if !heir.is_over() && pid.is_none_or(|pid| !without_heir.contains(&pid)) => {
                        mapper.check()?;
                        std::thread::sleep(pause.next().min(heir.left()));
                    }
                    Fault::OwnerEnded(_) => {
                        *has_ended = true;
                        return Err(first_error.unwrap_or(error));
                    }
                    Fault::Full if *has_ended => return Err(left_to_another(ticket)),
                    // The exporter may have handed over while the connection waited for it. An heir sends valid messages.
                    Fault::Cut if error.kind() != ErrorKind::InvalidArgument => {
                        first_error.get_or_insert(error);
                        connections += 1;
                    }
                    // A process has the name, and does not answer. So the ticket may open later.
                    _ if error.kind() == ErrorKind::InvalidState => return Err(error),
                    _ => return Err(first_error.unwrap_or(error)),
                },
            }
        }
        Err(first_error.unwrap_or_else(|| expired("the exporter and its heir have closed the connections".to_owned())))
    }

    /// As [`connect_or_wait`](Self::connect_or_wait), without a wait for an heir.
    pub(super) fn connect(ticket: &Ticket, mapper: &dyn Mapper, patience: Patience) -> Result<Self> {
        Self::connect_or_wait(ticket, mapper, patience, Patience::new(Duration::ZERO), &[], &mut false)
    }

    /// Returns whether the kernel names another process than the one that answers. The connection is then older than a hand-over.
    fn names_another(&self) -> bool {
        let stated = self.greeted.get().map(|(_, pid)| *pid);
        stated.is_some_and(|stated| self.process.own_number().is_some_and(|number| number != stated))
    }

    /// An error sets `fault` if another attempt may succeed.
    ///
    /// `queue` is for the queue of connections, and `patience` for the answer.
    fn connect_once(
        ticket: &Ticket,
        mapper: &dyn Mapper,
        patience: Patience,
        queue: Patience,
        fault: &mut Fault,
    ) -> Result<Self> {
        let (meeting, who) = (mapper.meeting(), format!("process {}", ticket.pid));
        let reached = meeting.reach(ticket.method, ticket.exporter(), &who, queue, &|| mapper.check());
        let socket = reached.inspect_err(|error| {
            if error.kind() == ErrorKind::InvalidState {
                *fault = Fault::Full;
            }
        })?;
        let process = Process::of_peer(OPERATION, socket.as_fd(), meeting.openers).inspect_err(|error| {
            if error.kind() == ErrorKind::Expired {
                *fault = Fault::OwnerEnded(Process::pid_of_peer(socket.as_fd()));
            }
        })?;
        // After the exporter has ended, any process of this user can take its name. An heir says that it is one.
        let is_other = process.own_number().is_some_and(|number| number != ticket.pid);
        let hello = Message::hello();
        let (line, theirs) = line()?;
        let link = Self {
            incarnation: ticket.incarnation,
            may_have_heir: ticket.method != Method::Descriptor,
            process: Arc::new(process),
            socket,
            channel: Mutex::new(0),
            stops: AtomicU64::new(0),
            line,
            has_line: AtomicBool::new(true),
            lost: AtomicBool::new(false),
            threads: Mutex::default(),
            choices: AtomicU64::new(0),
            handed_over: AtomicBool::new(false),
            takes_over: AtomicBool::new(false),
            named_heir: OnceLock::new(),
            late: Mutex::default(),
            has_given_up: AtomicBool::new(false),
            cut: AtomicBool::new(false),
            imports: AtomicU64::new(0),
            parts: Mutex::default(),
            greeted: OnceLock::new(),
        };
        let own = link.process.own_pidfd(OPERATION)?;
        let sent: Vec<_> = [&theirs].into_iter().chain(&own).map(AsFd::as_fd).collect();
        let said = link.say(&hello, &sent, mapper, patience);
        drop((theirs, own));
        // An exporter that refuses the connection gives the reason before it hangs up.
        let impostor = || {
            let (dead, process) = (ticket.pid, &link.process);
            expired(format!("the exporter (process {dead}) has ended, and {process} has taken its name"))
        };
        let heard = link.hear(mapper, if is_other { patience.at_most(HEIR_ANSWERS_WITHIN) } else { patience });
        if link.is_cut() {
            *fault = Fault::Cut;
        } else if link.process.has_ended() {
            *fault = Fault::OwnerEnded(link.process.pid());
        }
        let (answer, descriptors) = match (said, heard) {
            (_, Err(_)) if is_other => {
                // The process may be an heir that does not answer.
                link.check_running()?;
                return Err(impostor());
            }
            (Err(said), Err(heard)) if heard.kind() == ErrorKind::Expired => return Err(said),
            (_, heard) => heard?,
        };
        let Message::Welcome { version, oldest, incarnation, standing, pid } = answer else {
            return Err(unexpected(&answer));
        };
        if is_other && !standing.is_heir {
            return Err(impostor());
        }
        check_version(OPERATION, "exporter", version, oldest)?;
        if incarnation != ticket.incarnation {
            return Err(invalid_message(OPERATION, "a welcome from another exporter"));
        }
        link.process.identify(OPERATION, descriptors.into_iter().next())?;
        // No other thread has the connection yet.
        let _ = link.greeted.set((standing, pid));
        Ok(link)
    }

    /// Returns whether an heir of the exporter answers.
    fn is_of_heir(&self) -> bool {
        self.greeted.get().is_some_and(|(standing, _)| standing.is_heir)
    }

    /// Returns the processes that may open the memory.
    pub(super) fn openers(&self) -> Openers {
        self.greeted.get().map_or(Openers::SameUser, |(standing, _)| standing.openers)
    }

    /// Refuses a process that has the name of a dead exporter without being its heir.
    pub(super) fn check_heir(&self) -> Result<()> {
        if self.is_of_heir() {
            return Ok(());
        }
        Err(expired(format!("{} has the name of a dead exporter and is no heir", self.process)))
    }

    /// Notes the end of the process.
    pub(super) fn note_end(&self) {
        self.lost.store(true, Ordering::Relaxed);
    }

    /// Requests allocations, at most [`AT_ONCE`]. Sends all requests before it waits for the answers, so that the exporter works
    /// without a pause. Returns the answers that grant an allocation, with the place of its key, and the first failure. The
    /// caller must map or abandon what was granted.
    fn open(
        &self,
        keys: &[ExportKey],
        secrets: &[Option<Secret>],
        memory: bool,
        mapper: &dyn Mapper,
        patience: &mut Patience,
    ) -> (Vec<(usize, Granted)>, Option<Error>) {
        let mut channel = match self.channel(mapper, *patience) {
            Ok(channel) => channel,
            Err(error) => return (Vec::new(), Some(error)),
        };
        let first = channel.wrapping_add(1);
        let (mut granted, mut failed) = (Vec::with_capacity(keys.len()), None);
        let (mut sent, mut belated) = (0, 0);
        for at in 0..keys.len() {
            while failed.is_none() && sent < keys.len() && (sent == at || self.knows(keys[sent])) {
                let question = first.wrapping_add(sent as u32);
                let part = self.part(keys[sent]);
                let wants = Wants { counts: part.counts.is_none(), ready: part.ready.is_none(), memory };
                let secret = secrets[sent];
                let request = Message::Open { question, key: keys[sent], wants, secret };
                *channel = question;
                match self.say(&request, &[], mapper, *patience) {
                    Ok(()) => sent += 1,
                    Err(error) => failed = Some(error),
                }
            }
            if at == sent {
                break;
            }
            // After a refusal, the other answers are awaited: an allocation that is abandoned must have been granted.
            match self.answer(first.wrapping_add(at as u32), &mut belated, mapper, *patience) {
                Ok(Answer::Opened(opened, descriptors)) => {
                    // The parts of this allocation have no time of their own.
                    if at + 1 < keys.len() {
                        patience.renew();
                    }
                    match self.take_in(opened, descriptors, keys[at]) {
                        Ok(taken) => granted.push((at, taken)),
                        Err(error) => {
                            self.abandon(keys[at], mapper, *patience);
                            failed.get_or_insert(error);
                        }
                    }
                }
                Ok(Answer::Refused(error)) => drop(failed.get_or_insert(error)),
                // The exporter may have counted the opens, and no request would match a later answer.
                unusable @ (Ok(Answer::Parts(..) | Answer::Entrusted | Answer::HandedOver(_)) | Err(_)) => {
                    let error = unusable.err().unwrap_or_else(|| self.astray("parts in place of an allocation"));
                    self.has_given_up.store(true, Ordering::Release);
                    keys[at..sent].iter().for_each(|key| self.abandon(*key, mapper, *patience));
                    // The cause of a later failure.
                    failed = Some(failed.filter(|_| !self.is_cut()).unwrap_or(error));
                    break;
                }
            }
        }
        (granted, failed)
    }

    /// Requests further parts of an allocation that is open. Returns their handles, at least one.
    fn open_parts(
        &self,
        key: ExportKey,
        first: u32,
        (transport, uuid): (Transport, [u8; 16]),
        mapper: &dyn Mapper,
        patience: Patience,
    ) -> Result<Vec<MemoryHandle>> {
        let mut channel = self.channel(mapper, patience)?;
        *channel = channel.wrapping_add(1);
        let question = *channel;
        self.say(&Message::Parts { question, key, first }, &[], mapper, patience)?;
        let (parts, descriptors) = match self.answer(question, &mut 0, mapper, patience)? {
            Answer::Parts(parts, descriptors) => (parts, descriptors),
            Answer::Refused(error) => return Err(error),
            Answer::Opened(..) | Answer::Entrusted | Answer::HandedOver(_) => {
                return Err(self.astray("an answer in place of parts"));
            }
        };
        let mut descriptors = descriptors.into_iter();
        let handles = parts.into_iter().map(|part| {
            let handle = MemoryHandle::new(transport, uuid, part.bytes, part.payload);
            match descriptors.next() {
                Some(descriptor) => handle.with_descriptor(Descriptor::new(descriptor)),
                None => handle,
            }
        });
        let handles: Vec<_> = handles.collect();
        if handles.is_empty() {
            return Err(invalid_message(OPERATION, "fewer parts than it announced"));
        }
        Ok(handles)
    }

    /// Locks the connection for requests, once no other thread waits for an answer. If another thread finds the exporter stopped
    /// meanwhile, this one does not ask again.
    fn channel(&self, mapper: &dyn Mapper, patience: Patience) -> Result<MutexGuard<'_, u32>> {
        if let Some(channel) = self.channel.try_lock_for(LOCK_LOOKS_EVERY) {
            return Ok(channel);
        }
        // Relaxed: the lock orders the count.
        let stops = self.stops.load(Ordering::Relaxed);
        let mut look = patience.next_look();
        loop {
            mapper.check()?;
            if patience.is_over() {
                return Err(patience.lost_with(&format!("the exporter ({})", self.process)));
            }
            let channel = self.channel.try_lock_for(LOCK_LOOKS_EVERY);
            let is_due = Instant::now() >= look;
            if is_due {
                look = patience.next_look();
            }
            if is_due || self.stops.load(Ordering::Relaxed) != stops {
                self.check_running()?;
            }
            if let Some(channel) = channel {
                return Ok(channel);
            }
        }
    }

    /// Waits for the answer to a request. `belated` counts the answers to requests that were given up and abandoned. There are at
    /// most as many as requests.
    fn answer(&self, question: u32, belated: &mut u32, mapper: &dyn Mapper, patience: Patience) -> Result<Answer> {
        loop {
            let (answer, descriptors) = self.hear(mapper, patience)?;
            match answer {
                Message::Opened { question: to, opened } if to == question => {
                    self.has_given_up.store(false, Ordering::Release);
                    return Ok(Answer::Opened(opened, descriptors));
                }
                Message::PartsOpened { question: to, parts } if to == question => {
                    return Ok(Answer::Parts(parts, descriptors));
                }
                Message::Entrusted { question: to } if to == question => return Ok(Answer::Entrusted),
                Message::HandedOver { question: to } if to == question => return Ok(Answer::HandedOver(descriptors)),
                Message::Refused { question: to, kind, text } if to == question => {
                    let refused = if kind == ErrorKind::Expired && self.is_of_heir() {
                        not_inherited(&self.process, &text)
                    } else {
                        refusal(kind, text)
                    };
                    return Ok(Answer::Refused(refused));
                }
                Message::Opened { .. }
                | Message::PartsOpened { .. }
                | Message::Entrusted { .. }
                | Message::HandedOver { .. }
                | Message::Refused { .. }
                    if *belated < question =>
                {
                    *belated += 1;
                    if matches!(answer, Message::HandedOver { .. }) {
                        *self.late.lock() = descriptors.into_iter().next();
                    }
                }
                other => {
                    self.cut.store(true, Ordering::Relaxed);
                    return Err(unexpected(&other));
                }
            }
        }
    }

    /// Cuts the connection, whose answers do not follow the requests.
    fn astray(&self, what: &str) -> Error {
        self.cut.store(true, Ordering::Relaxed);
        invalid_message(OPERATION, what)
    }

    /// Returns the segments of an allocation that are mapped.
    fn part(&self, key: ExportKey) -> Part {
        self.parts.lock().get(place_of(key.index).0).cloned().unwrap_or_default()
    }

    /// Returns whether both segments of an allocation are mapped, so that its answer needs to bring none.
    fn knows(&self, key: ExportKey) -> bool {
        let part = self.part(key);
        part.counts.is_some() && part.ready.is_some()
    }

    /// Takes the prepared opens of these keys. Returns each with its place among the keys.
    fn take_prepared(&self, keys: &[ExportKey]) -> Vec<(usize, Granted)> {
        let take = |(at, key): (usize, &ExportKey)| {
            if self.process.is_killed() || self.has_given_up.load(Ordering::Acquire) {
                return None;
            }
            let Part { counts: Some(counts), ready: Some(ready) } = self.part(*key) else { return None };
            let handle = counts.take(place_of(key.index).1, key.serial)?;
            Some((at, Granted { handle, further: 0, counts, ready }))
        };
        keys.iter().enumerate().filter_map(take).collect()
    }

    fn take_in(&self, opened: Opened, descriptors: Vec<OwnedFd>, key: ExportKey) -> Result<Granted> {
        let (place, _) = place_of(key.index);
        let mut part = self.part(key);
        let mut descriptors = descriptors.into_iter();
        let further = opened.further;
        let mut handle = MemoryHandle::new(opened.transport, opened.device_uuid, opened.bytes, opened.payload);
        let missing = || invalid_message(OPERATION, "an answer without its descriptors");
        if opened.with_descriptor {
            handle = handle.with_descriptor(Descriptor::new(descriptors.next().ok_or_else(missing)?));
        }
        if part.counts.is_none() {
            part.counts = Some(Arc::new(CountSegment::open(&descriptors.next().ok_or_else(missing)?)?));
        }
        if part.ready.is_none() {
            part.ready = Some(Arc::new(ReadySegment::open(&descriptors.next().ok_or_else(missing)?)?));
        }
        let (Some(counts), Some(ready)) = (part.counts.clone(), part.ready.clone()) else { return Err(missing()) };
        let mut parts = self.parts.lock();
        if parts.len() <= place {
            parts.resize_with(place + 1, Part::default);
        }
        parts[place] = part;
        Ok(Granted { handle, further, counts, ready })
    }

    fn abandon(&self, key: ExportKey, mapper: &dyn Mapper, patience: Patience) {
        // If this fails, the exporter has ended or cannot be reached. The count goes away with this process.
        self.say(&Message::Abandon { key }, &[], mapper, patience).unwrap_or_default();
    }

    /// Sends a message, once the exporter's queue has space for it.
    fn say(
        &self,
        message: &Message,
        descriptors: &[BorrowedFd<'_>],
        mapper: &dyn Mapper,
        patience: Patience,
    ) -> Result<()> {
        loop {
            match send(self.socket.as_fd(), &message.encode(), descriptors) {
                Ok(()) => return Ok(()),
                Err(Errno::AGAIN) => self.wait_for(PollFlags::OUT, mapper, patience)?,
                Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => {
                    self.cut.store(true, Ordering::Relaxed);
                    return Err(expired(format!("the exporter ({}) or its runtime has ended", self.process)));
                }
                Err(errno) => return Err(os_error(OPERATION, "connection to the exporter", errno)),
            }
        }
    }

    /// Reads a message without waiting. Once this process has requested the socket on which the exporter listens, a message may bring that
    /// socket. No thread may fork meanwhile.
    fn read(&self, buffer: &mut [u8]) -> std::result::Result<Received, Errno> {
        // Relaxed: the lock of the channel orders the request and its answer.
        if !self.takes_over.load(Ordering::Relaxed) {
            return receive(self.socket.as_fd(), buffer);
        }
        let none = WithoutForks::begin();
        let received = receive(self.socket.as_fd(), buffer);
        if let Ok(Received::Message(_, descriptors)) = &received {
            note_received(descriptors, &none);
        }
        received
    }

    /// Waits for a message.
    fn hear(&self, mapper: &dyn Mapper, patience: Patience) -> Result<(Message, Vec<OwnedFd>)> {
        let process = &self.process;
        let mut buffer = [0_u8; LONGEST + 1];
        let mut sleeps_at = None;
        loop {
            match self.read(&mut buffer) {
                Ok(Received::Message(bytes, descriptors)) => {
                    let message = Message::decode(&buffer[..bytes]).ok_or_else(|| {
                        self.cut.store(true, Ordering::Relaxed);
                        invalid_message(OPERATION, "bytes that are not a message")
                    })?;
                    if message == Message::Heir {
                        self.note_heir(descriptors);
                        continue;
                    }
                    if let Message::Refused { question: 0, kind, text } = message {
                        self.cut.store(true, Ordering::Relaxed);
                        return Err(refusal(kind, text));
                    }
                    return Ok((message, descriptors));
                }
                Ok(Received::Cut { descriptors: true }) => {
                    return Err(os_error(OPERATION, "free descriptors for the exporter's answer", Errno::MFILE));
                }
                Ok(Received::Cut { descriptors: false }) => {
                    return Err(invalid_message(OPERATION, "a message that is too long"));
                }
                Ok(Received::End) => {
                    self.cut.store(true, Ordering::Relaxed);
                    return Err(expired(format!("the exporter ({process}) has closed the connection")));
                }
                Ok(Received::Nothing) => {}
                Err(errno) => return Err(os_error(OPERATION, "connection to the exporter", errno)),
            }
            let now = Instant::now();
            if now < *sleeps_at.get_or_insert(now + LOOKS_FOR) {
                std::hint::spin_loop();
                continue;
            }
            self.wait_for(PollFlags::IN, mapper, patience)?;
        }
    }

    /// Returns an error if the exporter is stopped.
    fn check_running(&self) -> Result<()> {
        match self.process.pid() {
            Some(pid) if self.process.is_stopped() => {
                self.stops.fetch_add(1, Ordering::Relaxed);
                Err(Error::new(
                    ErrorKind::InvalidState,
                    OPERATION,
                    format!("the exporter (process {pid}) is stopped and does not answer"),
                )
                .with_hint(format!("continue it (`kill -CONT {pid}`, or in its debugger), then open the ticket again")))
            }
            _ => Ok(()),
        }
    }

    /// Waits until the socket of the exporter is ready, or until the next check for a stopped exporter.
    fn wait_for(&self, what: PollFlags, mapper: &dyn Mapper, patience: Patience) -> Result<()> {
        let process = &self.process;
        if process.has_ended() {
            return Err(expired(format!("the exporter ({process}) has ended")));
        }
        mapper.check()?;
        if patience.is_over() {
            return Err(patience.lost_with(&format!("{process}, which listens for the ticket's exporter,")));
        }
        let mut ends = vec![PollFd::from_borrowed_fd(self.socket.as_fd(), what)];
        let others = process.pidfd().into_iter().chain(mapper.ending());
        ends.extend(others.map(|other| PollFd::from_borrowed_fd(other, PollFlags::IN)));
        let most = patience.until.min(patience.next_look()).saturating_duration_since(Instant::now());
        let most = rustix::time::Timespec { tv_sec: most.as_secs().cast_signed(), tv_nsec: most.subsec_nanos().into() };
        // Interrupted or not, the caller checks everything again.
        if rustix::event::poll(&mut ends, Some(&most)) == Ok(0) {
            self.check_running()?;
        }
        Ok(())
    }
}

/// What an exporter has granted: the memory's handle, and the segments with its counts.
struct Granted {
    handle: MemoryHandle,
    /// Number of its further parts.
    further: u32,
    counts: Arc<CountSegment>,
    ready: Arc<ReadySegment>,
}

/// The answer to a request.
enum Answer {
    Opened(Opened, Vec<OwnedFd>),
    Parts(Vec<HandlePart>, Vec<OwnedFd>),
    Entrusted,
    HandedOver(Vec<OwnedFd>),
    Refused(Error),
}

/// Returns the error for memory that the heir of an exporter does not have.
fn not_inherited(heir: &Process, reason: &str) -> Error {
    let message = format!("the exporter has ended or handed over, and {heir}, which answers for it, refused: {reason}");
    Error::new(ErrorKind::Expired, OPERATION, message).with_hint(
        "open each ticket in the heir with `OwnerDeath::Inherit` while its exporter lives, and keep the buffers; now request a new ticket",
    )
}

/// Returns the error of an open that mapped nothing and reported nothing.
fn not_mapped() -> Error {
    Error::new(ErrorKind::InvalidState, OPERATION, "the allocation was not mapped").with_hint("open the ticket again")
}

fn unexpected(message: &Message) -> Error {
    invalid_message(OPERATION, &format!("an answer to no request: {message:?}"))
}

/// An entry of a table that one thread fills while the others wait. Removed if filling it fails.
struct Place<'i, K: Copy + Eq + std::hash::Hash, V> {
    importer: &'i Importer,
    table: fn(&mut State) -> &mut HashMap<K, Option<V>>,
    key: K,
    filled: bool,
}

impl<K: Copy + Eq + std::hash::Hash, V> Place<'_, K, V> {
    fn fill(mut self, value: V) {
        (self.table)(&mut self.importer.state.lock()).insert(self.key, Some(value));
        self.filled = true;
    }
}

impl<K: Copy + Eq + std::hash::Hash, V> Drop for Place<'_, K, V> {
    fn drop(&mut self) {
        if !self.filled {
            (self.table)(&mut self.importer.state.lock()).remove(&self.key);
        }
        self.importer.changed.notify_all();
    }
}

/// An open that is counted. Dropping it releases the import.
struct Counted<'i> {
    importer: &'i Importer,
    /// `None` once the caller has taken it.
    import: Option<Arc<Import>>,
    bell: &'i Bell,
    /// True if an existing mapping was reused.
    is_kept: bool,
}

impl<'i> Counted<'i> {
    fn new(importer: &'i Importer, import: Arc<Import>, bell: &'i Bell, is_kept: bool) -> Self {
        importer.live.fetch_add(1, Ordering::Relaxed);
        Self { importer, import: Some(import), bell, is_kept }
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        if let Some(import) = self.import.take() {
            self.importer.release(&import, self.bell);
        }
    }
}

/// An allocation to open, and the device to open it for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted<'t> {
    pub(crate) ticket: &'t Ticket,
    pub(crate) device: u32,
}

impl Wanted<'_> {
    fn key(self) -> ImportKey {
        ImportKey { incarnation: self.ticket.incarnation, serial: self.ticket.serial, device: self.device }
    }

    fn export(self) -> ExportKey {
        ExportKey { index: self.ticket.index, serial: self.ticket.serial }
    }
}

/// The start of an open.
enum Begun<'i> {
    /// The allocation was mapped, and the open is counted.
    Counted(Counted<'i>),
    /// The caller maps the allocation, and other threads wait.
    First(Place<'i, ImportKey, Arc<Import>>),
}

/// An allocation that this call maps first: its place among the wanted ones, and its entry in the table.
struct First<'i, 't> {
    at: usize,
    wanted: Wanted<'t>,
    place: Place<'i, ImportKey, Arc<Import>>,
}

/// An error, and the place of the allocation that it concerns.
pub(crate) type Failed = (usize, Error);

/// The state of a table's entry.
enum Found<'i, K: Copy + Eq + std::hash::Hash, V> {
    There(V),
    /// None: the caller creates the value, and other threads wait.
    Mine(Place<'i, K, V>),
}

impl Importer {
    /// Returns an entry, or the right to create it. Waits no longer than `patience` for a thread that creates it. Its time starts
    /// with the first wait, because an open of mapped memory must not even read the clock.
    fn find<K: Copy + Eq + std::hash::Hash, V: Clone>(
        &self,
        key: K,
        table: fn(&mut State) -> &mut HashMap<K, Option<V>>,
        ticket: &Ticket,
        patience: &mut Option<Patience>,
    ) -> Result<Found<'_, K, V>> {
        let mut state = self.state.lock();
        let mut began = None;
        loop {
            match table(&mut state).get(&key) {
                Some(Some(value)) => return Ok(Found::There(value.clone())),
                Some(None) => {
                    let patience = *patience.get_or_insert_with(|| self.limits.patience(&state, ticket));
                    began.get_or_insert_with(Instant::now);
                    if patience.is_over() {
                        return Err(patience.lost_with(&format!("the exporter (process {})", ticket.pid)));
                    }
                    self.changed.wait_until(&mut state, patience.until);
                }
                None => {
                    // The thread that had the right got no answer meanwhile. This one would wait as long again.
                    if let (Some(began), Some((failed, error))) = (began, state.silent.get(&ticket.incarnation))
                        && began <= *failed
                    {
                        return Err(error.clone());
                    }
                    table(&mut state).insert(key, None);
                    return Ok(Found::Mine(Place { importer: self, table, key, filled: false }));
                }
            }
        }
    }

    /// Notes whether the exporter of a ticket answered a request.
    fn note_answer<T>(&self, ticket: &Ticket, answer: &Result<T>) {
        let silent = answer.as_ref().err().filter(|error| error.kind() == ErrorKind::InvalidState);
        let mut state = self.state.lock();
        match silent {
            Some(error) => drop(state.silent.insert(ticket.incarnation, (Instant::now(), error.clone()))),
            None => drop(state.silent.remove(&ticket.incarnation)),
        }
    }

    /// Returns the connection to the exporter of a ticket.
    fn link(&self, ticket: &Ticket, mapper: &dyn Mapper, patience: Patience) -> Result<Arc<Link>> {
        loop {
            match self.find(ticket.incarnation, |state| &mut state.links, ticket, &mut Some(patience))? {
                // Its heir has the name.
                Found::There(link) if link.is_handed_over() => self.state.lock().retire(&link),
                Found::There(link) if link.is_dead() && !link.may_have_heir => return Err(link.ended()),
                Found::There(link) if link.is_dead() => self.state.lock().retire(&link),
                Found::There(link) => return Ok(link),
                Found::Mine(place) => {
                    let incarnation = ticket.incarnation;
                    let (without_heir, next) = {
                        let state = self.state.lock();
                        let ended = state.ended.iter().find(|ended| ended.incarnation == incarnation);
                        (state.ended_without_heir(&incarnation), ended.map(|ended| ended.until))
                    };
                    // Otherwise this process would fill the queue, and others could not learn that the exporter has ended.
                    if next.is_some_and(|next| Instant::now() < next) {
                        return Err(left_to_another(ticket));
                    }
                    let mut has_ended = next.is_some();
                    let heir = if has_ended { Duration::ZERO } else { HEIR_LISTENS_WITHIN };
                    let heir = patience.at_most(heir);
                    let link = Link::connect_or_wait(ticket, mapper, patience, heir, &without_heir, &mut has_ended);
                    self.note_answer(ticket, &link);
                    self.state.lock().note_ended(incarnation, has_ended && link.is_err());
                    let link = Arc::new(link?);
                    place.fill(Arc::clone(&link));
                    // From here on, the service listens to the exporter's end.
                    mapper.bell().ring();
                    return Ok(link);
                }
            }
        }
    }

    /// Opens an allocation for a device and counts the open. Waits until the device work before the share is done. `patience` is that of
    /// the whole call. It is set by the first wait.
    pub(crate) fn open(
        &self,
        wanted: Wanted<'_>,
        mapper: &dyn Mapper,
        patience: &mut Option<Patience>,
    ) -> Result<Arc<Import>> {
        let counted = match self.begin(wanted, mapper, patience)? {
            Begun::Counted(counted) => counted,
            Begun::First(place) => {
                let mut opened = [None];
                let first = VecDeque::from([First { at: 0, wanted, place }]);
                self.map_all(first, mapper, patience, &mut opened).map_err(|(_, error)| error)?;
                let [Some(counted)] = opened else { return Err(not_mapped()) };
                counted
            }
        };
        if let Some(import) = &counted.import {
            import.wait(wanted.ticket.number, mapper, *patience)?;
        }
        self.note_open(counted).ok_or_else(not_mapped)
    }

    /// Opens allocations as [`Importer::open`] does, each once. If one cannot be opened, none is.
    ///
    /// The caller must name no allocation of a device twice.
    pub(crate) fn open_all(
        &self,
        wanted: &[Wanted<'_>],
        mapper: &dyn Mapper,
        patience: &mut Option<Patience>,
    ) -> std::result::Result<Vec<Arc<Import>>, Failed> {
        let mut opened: Vec<Option<Counted<'_>>> = wanted.iter().map(|_| None).collect();
        // In the order of the keys: two calls that wait for entries of each other would never end.
        let mut order: Vec<usize> = (0..wanted.len()).collect();
        order.sort_unstable_by_key(|&at| wanted[at].key());
        let mut firsts = VecDeque::new();
        for at in order {
            let wanted = wanted[at];
            match self.begin(wanted, mapper, patience).map_err(|error| (at, error))? {
                Begun::Counted(counted) => opened[at] = Some(counted),
                Begun::First(place) => firsts.push_back(First { at, wanted, place }),
            }
        }
        // The keys of one exporter are neighbors.
        while let Some(first) = firsts.front() {
            let exporter = first.wanted.ticket.incarnation;
            let others = firsts.iter().position(|first| first.wanted.ticket.incarnation != exporter);
            let others = others.map(|others| firsts.split_off(others)).unwrap_or_default();
            self.map_all(std::mem::replace(&mut firsts, others), mapper, patience, &mut opened)?;
            if wanted.len() > 1 {
                patience.iter_mut().for_each(Patience::renew);
            }
        }
        // Each wait of its own, so that an error leaves the rest to be released.
        for (at, (counted, wanted)) in opened.iter().zip(wanted).enumerate() {
            let import = counted.as_ref().and_then(|counted| counted.import.as_ref());
            import
                .ok_or_else(not_mapped)
                .and_then(|import| import.wait(wanted.ticket.number, mapper, *patience))
                .map_err(|error| (at, error))?;
        }
        let finish = |counted: Option<Counted<'_>>| counted.and_then(|counted| self.note_open(counted));
        Ok(opened.into_iter().filter_map(finish).collect())
    }

    /// Hands an open over to the caller.
    fn note_open(&self, mut counted: Counted<'_>) -> Option<Arc<Import>> {
        self.opens.fetch_add(1, Ordering::Relaxed);
        self.kept_opens.fetch_add(u64::from(counted.is_kept), Ordering::Relaxed);
        counted.import.take()
    }

    /// Counts an open of memory that is mapped, or returns the right to map it.
    fn begin<'i>(
        &'i self,
        wanted: Wanted<'_>,
        mapper: &'i dyn Mapper,
        patience: &mut Option<Patience>,
    ) -> Result<Begun<'i>> {
        let (key, ticket) = (wanted.key(), wanted.ticket);
        loop {
            let import = match self.find(key, |state| &mut state.imports, ticket, patience)? {
                Found::Mine(place) => return Ok(Begun::First(place)),
                Found::There(import) => import,
            };
            if import.link.is_lost() && !import.is_kept_here() {
                if !import.link.may_have_heir {
                    return Err(import.link.ended());
                }
                // The name of the exporter may have an heir, which opens the memory anew.
                let mut state = self.state.lock();
                if state.stands(&import) {
                    state.imports.remove(&key);
                    state.former_imports.push(import);
                }
                continue;
            }
            import.check(ticket)?;
            let Some(acquired) = self.count(&import, mapper.bell()) else {
                // Another thread is unmapping the import. Wait for the result, then map again unless the backend refused.
                let mut state = self.state.lock();
                let stands = |state: &State| {
                    let there = state.imports.get(&key).and_then(Option::as_ref);
                    there.is_some_and(|there| Arc::ptr_eq(there, &import))
                };
                while stands(&state) && import.open.is_gone() {
                    let patience = *patience.get_or_insert_with(|| self.limits.patience(&state, ticket));
                    if patience.is_over() {
                        return Err(patience.lost_with("the thread of this process that unmaps the memory"));
                    }
                    self.changed.wait_until(&mut state, patience.until);
                }
                continue;
            };
            return Err(match acquired {
                Acquired::Yes => return Ok(Begun::Counted(Counted::new(self, import, mapper.bell(), true))),
                Acquired::Closed => expired("the exporter has freed the buffer of this ticket".to_owned()),
                // The import is mapped, and no thread of this process is about to unmap it.
                _ => invalid_message(OPERATION, "counts that are not possible"),
            });
        }
    }

    /// Counts one more open of a mapping. `None` if another thread is unmapping it.
    fn count(&self, import: &Arc<Import>, bell: &Bell) -> Option<Acquired> {
        if !import.open.enter() {
            return None;
        }
        let acquired = import.slot().acquire();
        if acquired != Acquired::Yes {
            self.leave(import, bell);
        }
        Some(acquired)
    }

    /// Requests allocations of one exporter, maps them, and counts the opens. Leaves nothing mapped that is not in `opened`.
    fn map_all<'i, 't>(
        &'i self,
        mut firsts: VecDeque<First<'i, 't>>,
        mapper: &'i dyn Mapper,
        patience: &mut Option<Patience>,
        opened: &mut [Option<Counted<'i>>],
    ) -> std::result::Result<(), Failed> {
        let Some(first) = firsts.front() else { return Ok(()) };
        let ticket = first.wanted.ticket;
        // An exporter that breaks the connection does not get more time with the next one.
        let patience = patience.get_or_insert_with(|| self.limits.patience(&self.state.lock(), ticket));
        let (mut has_reconnected, mut takes) = (false, true);
        let is_batch = opened.len() > 1;
        while let Some(first) = firsts.front() {
            let at = first.at;
            let link = self.link(ticket, mapper, *patience).map_err(|error| (at, error))?;
            let keys: Vec<_> = firsts.iter().take(AT_ONCE).map(|first| first.wanted.export()).collect();
            let secrets: Vec<_> = firsts.iter().take(AT_ONCE).map(|first| first.wanted.ticket.secret).collect();
            let (mut granted, mut failed) = (if takes { link.take_prepared(&keys) } else { Vec::new() }, None);
            let was_prepared = !granted.is_empty();
            if !was_prepared {
                (granted, failed) = link.open(&keys, &secrets, true, mapper, patience);
                let answered = failed.clone().map_or(Ok(()), Err);
                self.note_answer(ticket, &answered);
            }
            if let Some(error) = failed {
                if link.is_cut() {
                    self.state.lock().retire(&link);
                }
                // The exporter may still be alive: it drops idle connections.
                let retries = link.is_cut() && error.kind() == ErrorKind::Expired && !has_reconnected;
                if !retries {
                    granted.iter().for_each(|(at, _)| link.abandon(keys[*at], mapper, *patience));
                    let refused =
                        keys.iter().enumerate().map(|(at, _)| at).find(|at| granted.iter().all(|(has, _)| has != at));
                    return Err((refused.map_or(at, |refused| firsts[refused].at), error));
                }
                has_reconnected = true;
            }
            let mut rest = VecDeque::with_capacity(firsts.len());
            let mut batch = Vec::with_capacity(granted.len());
            let mut answers = granted.drain(..).peekable();
            for (place, first) in firsts.drain(..).enumerate() {
                match answers.next_if(|(at, _)| *at == place) {
                    Some((_, granted)) => batch.push((first, granted)),
                    None => rest.push_back(first),
                }
            }
            drop(answers);
            firsts = rest;
            if is_batch && !batch.is_empty() {
                patience.renew();
            }
            let patience = *patience;
            let map = |(first, granted): (First<'i, 't>, Granted)| {
                (first.at, self.map(first, granted, &link, mapper, (patience, is_batch)))
            };
            let mut failure = None;
            for (at, mapped) in spread(batch, &self.slow, map) {
                match mapped {
                    Ok(counted) => opened[at] = Some(counted),
                    // The exporter may be ending, which only an answer shows.
                    Err((_, first)) if was_prepared => {
                        takes = false;
                        firsts.push_back(first);
                    }
                    Err((error, _)) => drop(failure.get_or_insert((at, error))),
                }
            }
            if let Some(failure) = failure {
                return Err(failure);
            }
        }
        Ok(())
    }

    /// Maps an allocation that its exporter has granted, and enters it in the tables.
    fn map<'i, 't>(
        &'i self,
        first: First<'i, 't>,
        granted: Granted,
        link: &Arc<Link>,
        mapper: &'i dyn Mapper,
        (patience, is_batch): (Patience, bool),
    ) -> std::result::Result<Counted<'i>, (Error, First<'i, 't>)> {
        let Granted { handle, further, counts, ready } = granted;
        let Wanted { ticket, device } = first.wanted;
        let key = first.wanted.export();
        let abandon = || link.abandon(key, mapper, patience);
        let known = self.state.lock().inherited(first.wanted.key());
        if let Some(import) = known.filter(|import| self.count(import, mapper.bell()) == Some(Acquired::Yes)) {
            // The heir that granted it is this process, which took the memory over during the open.
            abandon();
            self.state.lock().former_imports.retain(|former| !Arc::ptr_eq(former, &import));
            first.place.fill(Arc::clone(&import));
            return Ok(Counted::new(self, import, mapper.bell(), true));
        }
        let is_joined = further > 0;
        let is_whole = is_joined || handle.bytes == ticket.allocation_bytes;
        // Page-locked memory has one part.
        let is_possible = further <= MOST_FURTHER && !(is_joined && ticket.is_pinned);
        if !is_whole || !is_possible || handle.device_uuid != ticket.device_uuid {
            abandon();
            return Err((invalid_message(OPERATION, "an allocation that is not the ticket's"), first));
        }
        let mapped = if is_joined {
            let like = (handle.transport, handle.device_uuid);
            let (here, arrived, count) = (VecDeque::from([handle]), 1, further + 1);
            let mut pieces = Pieces { link, key, mapper, patience, like, here, arrived, count };
            if is_batch {
                pieces.patience.renew();
            }
            mapper.map_joined(device, ticket.allocation_bytes, &mut pieces)
        } else {
            mapper.map(device, &handle)
        };
        let ptr = match mapped {
            Ok(ptr) => ptr,
            Err(error) => {
                abandon();
                return Err((error, first));
            }
        };
        let (link, ticket_of, open) = (Arc::clone(link), ticket.clone(), OpenCount::open());
        let since = SystemTime::now();
        let (held, succession) = (OnceLock::new(), Mutex::default());
        let ticket = ticket_of;
        let import = Import { link, ticket, counts, ready, device, ptr, is_joined, since, open, held, succession };
        let import = Arc::new(import);
        let index = (import.ticket.incarnation, import.index());
        let mut state = self.state.lock();
        state.by_index.entry(index).or_default().push(Arc::clone(&import));
        import.link.imports.fetch_add(1, Ordering::Relaxed);
        let was_cut = !state.is_current(&import.link);
        if was_cut {
            // In the meantime.
            state.retire(&import.link);
        }
        drop(state);
        if was_cut {
            // The service may have forgotten the connection, and has to notice the end of the exporter's process.
            mapper.bell().ring();
        }
        first.place.fill(Arc::clone(&import));
        Ok(Counted::new(self, import, mapper.bell(), false))
    }

    /// Releases an import once its streams have passed their completion events.
    pub(crate) fn release_after(
        &self,
        import: Arc<Import>,
        after: Vec<Arc<CompletionEvent>>,
        unmarked: bool,
        bell: &Bell,
    ) {
        if after.is_empty() && !unmarked {
            return self.release(&import, bell);
        }
        let mut pending = self.pending.lock();
        pending.push(PendingRelease { import, after, later: Vec::new(), unmarked });
        self.count_pending(&pending);
        drop(pending);
        bell.ring();
    }

    /// Releases an import once these uses have ended.
    pub(crate) fn release_after_uses(&self, import: Arc<Import>, later: Vec<StreamUse>, bell: &Bell) {
        if later.is_empty() {
            return self.release(&import, bell);
        }
        let mut pending = self.pending.lock();
        pending.push(PendingRelease { import, after: Vec::new(), later, unmarked: false });
        self.count_pending(&pending);
        drop(pending);
        bell.ring();
    }

    // ---------------------------------------------------------------- revocable blocks

    /// Notes a block that is revoked when the owner of its memory dies.
    pub(crate) fn add_revocable(&self, import: &Arc<Import>, block: &Arc<DeviceBlock>) {
        let entry = (Arc::clone(import), Arc::downgrade(block));
        self.revocable.lock().insert(Arc::as_ptr(block).addr(), entry);
    }

    /// Forgets a block whose owner is gone.
    pub(crate) fn forget_revocable(&self, block: &DeviceBlock) {
        // Dropped without the lock.
        let forgotten = self.revocable.lock().remove(&std::ptr::from_ref(block).addr());
        drop(forgotten);
    }

    /// Removes and returns the blocks of these imports. Blocks that are being dropped release their memory themselves.
    pub(crate) fn take_revocable(
        &self,
        is_revoked: impl Fn(&Arc<Import>) -> bool,
    ) -> Vec<(Arc<Import>, Arc<DeviceBlock>)> {
        let mut revocable = self.revocable.lock();
        let taken = revocable.extract_if(|_, (import, _)| is_revoked(import));
        let taken: Vec<_> = taken.map(|(_, entry)| entry).collect();
        drop(revocable);
        taken.into_iter().filter_map(|(import, block)| block.upgrade().map(|block| (import, block))).collect()
    }

    /// Stores the number of releases that can be queried. An import without completion events waits for the end of the runtime.
    fn count_pending(&self, pending: &[PendingRelease]) {
        let asked = pending.iter().filter(|release| !release.after.is_empty() || !release.later.is_empty()).count();
        self.pending_count.store(asked as u64, Ordering::Relaxed);
    }

    pub(crate) fn is_releasing(&self) -> bool {
        self.pending_count.load(Ordering::Relaxed) > 0
    }

    /// Checks the imports that streams still used. `is_passed` queries the backend without a lock. At the end of the runtime,
    /// all work has been waited for. Returns whether an import was released.
    pub(crate) fn release_passed(
        &self,
        mut is_passed: impl FnMut(&CompletionEvent) -> bool,
        at_end: bool,
        bell: &Bell,
    ) -> bool {
        if self.asking.swap(true, Ordering::AcqRel) && !at_end {
            return false;
        }
        let mut pending = std::mem::take(&mut *self.pending.lock());
        let before = pending.len();
        pending.retain_mut(|release| {
            if at_end {
                release.later.clear();
            }
            release.record_later();
            release.after.retain(|completion| !at_end && !is_passed(completion));
            let waits = !release.after.is_empty() || !release.later.is_empty() || release.unmarked && !at_end;
            if !waits {
                self.release(&release.import, bell);
            }
            waits
        });
        let released = pending.len() < before;
        let mut now = self.pending.lock();
        now.append(&mut pending);
        self.count_pending(&now);
        drop(now);
        self.asking.store(false, Ordering::Release);
        released
    }

    /// Releases an import whose device work is done.
    pub(crate) fn release(&self, import: &Arc<Import>, bell: &Bell) {
        self.live.fetch_sub(1, Ordering::Relaxed);
        if import.slot().release() {
            import.counts.released().raise(place_of(import.index()).1);
            import.link.ring();
        }
        self.leave(import, bell);
    }

    /// Undoes [`OpenCount::enter`].
    fn leave(&self, import: &Arc<Import>, bell: &Bell) {
        let link = &import.link;
        if import.open.leave() && (import.slot().is_closed() || link.is_lost() || link.process.is_killed()) {
            self.unmap_soon([Arc::clone(import)], bell);
        }
    }

    /// Schedules imports to be unmapped unless a buffer has them open. Wakes the service, which would otherwise sleep if no later event came.
    fn unmap_soon(&self, imports: impl IntoIterator<Item = Arc<Import>>, bell: &Bell) {
        self.to_unmap.lock().extend(imports);
        bell.ring();
    }

    // ---------------------------------------------------------------- calls of the service

    pub(crate) fn links(&self) -> Vec<Arc<Link>> {
        let state = self.state.lock();
        state.links.values().flatten().chain(&state.former).filter(|link| !link.is_lost()).cloned().collect()
    }

    /// Returns the allocations of other runtimes that are mapped.
    pub(crate) fn list(&self) -> Vec<ListedImport> {
        let state = self.state.lock();
        // What this process inherited is in the list of its exports.
        let is_foreign = |import: &&Arc<Import>| !import.is_inherited();
        let list = |import: &Arc<Import>| {
            let owner = import.heir().unwrap_or_else(|| Arc::clone(&import.link));
            let Ticket { transport, device_uuid, allocation_bytes: bytes, is_pinned, .. } = import.ticket;
            let device = (!is_pinned).then_some(import.device);
            let process = &owner.process;
            ListedImport {
                what: Listed { transport, device, device_uuid, bytes, since: import.since },
                owner: process.number(),
                owner_has_ended: owner.is_dead() || process.has_ended(),
                is_idle: !import.open.is_open(),
            }
        };
        state.mapped().filter(is_foreign).map(list).collect()
    }

    /// Handles an exporter that has hung up. It or its runtime has ended, or the connection was cut.
    pub(crate) fn hung_up(&self, link: &Arc<Link>) {
        link.has_line.store(false, Ordering::Relaxed);
        self.state.lock().retire(link);
    }

    /// Handles the end of an exporter's process: its tickets expire, and memory that no buffer has open is unmapped. Returns
    /// `false` if this was done before.
    pub(crate) fn link_ended(&self, link: &Arc<Link>, bell: &Bell) -> bool {
        if link.lost.swap(true, Ordering::Relaxed) {
            return false;
        }
        let mut state = self.state.lock();
        state.lost_links += 1;
        let imports = state.opened_by(link);
        // The next open looks for an heir.
        if link.may_have_heir || link.imports.load(Ordering::Relaxed) == 0 {
            state.retire(link);
        }
        drop(state);
        self.unmap_soon(imports, bell);
        true
    }

    /// Handles the end of a thread of an exporter. If the exporter was killed, memory that no buffer has open is unmapped before its
    /// process has ended. Returns whether the kill is new.
    pub(crate) fn thread_ended(&self, link: &Arc<Link>, bell: &Bell) -> bool {
        let is_killed = link.process.note_kill();
        // The next round chooses threads again, unless the exporter was killed.
        drop(link.threads.lock().take());
        if is_killed {
            let imports = self.state.lock().opened_by(link);
            self.unmap_soon(imports, bell);
        }
        is_killed
    }

    /// Returns the connections to exporters that hand over or have done so, with the state of each.
    pub(crate) fn hand_overs(&self) -> Vec<(Arc<Link>, Progress)> {
        let links = self.links().into_iter().map(|link| {
            let progress = link.hand_over();
            (link, progress)
        });
        links.filter(|(_, progress)| *progress != Progress::None).collect()
    }

    /// Handles an exporter that has handed over: the next opens go to its heir. Returns `false` if this was done before.
    pub(crate) fn handed_over(&self, link: &Arc<Link>, bell: &Bell) -> bool {
        let mut state = self.state.lock();
        if !link.note_hand_over() {
            return false;
        }
        let imports = state.opened_by(link);
        state.retire(link);
        drop(state);
        self.unmap_soon(imports, bell);
        true
    }

    /// Unmaps the allocations that exporters have freed, and those on the list.
    pub(crate) fn unmap_closed(&self, mapper: &dyn Mapper) {
        {
            let state = self.state.lock();
            for link in state.links.values().flatten().chain(&state.former) {
                for (place, part) in link.parts.lock().iter().enumerate() {
                    let Some(counts) = &part.counts else { continue };
                    counts.closed().drain(|slot| {
                        let index = u32::try_from(place * SLOTS + slot).unwrap_or(u32::MAX);
                        let imports = state.by_index.get(&(link.incarnation, index)).into_iter().flatten();
                        let imports = imports.filter(|import| Arc::ptr_eq(&import.link, link));
                        let closed = imports.filter(|import| import.slot().is_closed());
                        self.to_unmap.lock().extend(closed.cloned());
                    });
                }
            }
        }
        let to_unmap = std::mem::take(&mut *self.to_unmap.lock());
        for import in to_unmap {
            self.unmap(&import, mapper);
        }
    }

    /// Schedules a retry of each refused unmap whose reason still holds.
    pub(crate) fn try_refused_again(&self) {
        let refused = std::mem::take(&mut *self.refused.lock());
        let has_reason = |import: &Arc<Import>| import.slot().is_closed() || import.link.is_lost();
        self.to_unmap.lock().extend(refused.into_iter().filter(has_reason));
    }

    /// Unmaps everything that no buffer has open.
    pub(crate) fn unmap_idle(&self, mapper: &dyn Mapper) {
        let imports: Vec<_> = self.state.lock().mapped().cloned().collect();
        for import in imports {
            self.unmap(&import, mapper);
        }
    }

    fn unmap(&self, import: &Arc<Import>, mapper: &dyn Mapper) {
        if !import.open.try_gone() {
            // Open, or unmapped already. The last release checks whether to unmap it.
            return;
        }
        let (device, ptr) = (import.device, import.ptr);
        let unmapped = if import.is_joined { mapper.unmap_joined(device, ptr) } else { mapper.unmap(device, ptr) };
        if !unmapped {
            // The import stays in the tables and in the exporter's count: some transports forbid a free of mapped memory.
            self.refused.lock().push(Arc::clone(import));
            let state = self.state.lock();
            import.open.stays();
            drop(state);
            self.changed.notify_all();
            return;
        }
        if import.slot().unmapped() {
            import.counts.released().raise(place_of(import.index()).1);
            import.link.ring();
        }
        let succession = std::mem::replace(&mut *import.succession.lock(), Succession::Over);
        let mut state = self.state.lock();
        if state.stands(import) {
            state.imports.remove(&import.key());
        }
        state.former_imports.retain(|former| !Arc::ptr_eq(former, import));
        let index = (import.ticket.incarnation, import.index());
        if let Some(imports) = state.by_index.get_mut(&index) {
            imports.retain(|other| !Arc::ptr_eq(other, import));
            if imports.is_empty() {
                state.by_index.remove(&index);
            }
        }
        let link = &import.link;
        if link.imports.fetch_sub(1, Ordering::Relaxed) == 1 && (link.is_lost() || !state.is_current(link)) {
            state.retire(link);
        }
        let inherited = match succession {
            Succession::Registered(registration) => {
                registration.end(import.export(), &mut state);
                None
            }
            Succession::Inherited(kept) => Some(kept),
            Succession::None | Succession::Over => None,
        };
        drop(state);
        // The last of an allocation closes it.
        drop(inherited);
        self.changed.notify_all();
    }

    /// Closes the connections at the end of the runtime.
    pub(crate) fn disconnect(&self) {
        let (links, former) = {
            let mut state = self.state.lock();
            (std::mem::take(&mut state.links), std::mem::take(&mut state.former))
        };
        for link in links.into_values().flatten().chain(former) {
            // A forked child may keep the sockets open, so shut them down.
            let _ = rustix::net::shutdown(&link.socket, rustix::net::Shutdown::Both);
            let _ = rustix::net::shutdown(&link.line, rustix::net::Shutdown::Both);
        }
    }

    /// Returns the number of mappings and their bytes.
    pub(crate) fn mapped(&self) -> (u64, u64) {
        let state = self.state.lock();
        let imports = || state.mapped();
        (imports().count() as u64, imports().map(|import| import.ticket.allocation_bytes).sum())
    }

    pub(crate) fn lost_links(&self) -> u64 {
        self.state.lock().lost_links
    }
}

#[cfg(test)]
impl Importer {
    pub(crate) fn is_locked(&self) -> bool {
        self.state.is_locked()
            || self.pending.is_locked()
            || self.revocable.is_locked()
            || self.to_unmap.is_locked()
            || self.refused.is_locked()
    }

    pub(crate) fn hold_locks(&self) -> impl Drop + '_ {
        let imports = (self.revocable.lock(), self.to_unmap.lock(), self.refused.lock());
        crate::testing::Held((self.state.lock(), self.pending.lock(), imports))
    }
}

#[cfg(test)]
mod tests {
    use highwater_hal::Transport;
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

    use super::super::name::Name;
    use super::super::options::SharingOptions;
    use std::time::Instant;

    use super::*;

    const OWNER: Standing = Standing { is_heir: false, openers: Openers::SameUser };

    struct NoMapper(Bell, Meeting);

    impl NoMapper {
        fn new() -> Self {
            Self(Bell::new(OPERATION).unwrap(), Meeting::open(SharingOptions::new()).unwrap())
        }
    }

    impl Mapper for NoMapper {
        fn map(&self, _: u32, _: &MemoryHandle) -> Result<DevicePtr> {
            unreachable!()
        }

        fn unmap(&self, _: u32, _: DevicePtr) -> bool {
            true
        }

        fn map_joined(&self, _: u32, _: u64, _: &mut Pieces<'_>) -> Result<DevicePtr> {
            unreachable!()
        }

        fn unmap_joined(&self, _: u32, _: DevicePtr) -> bool {
            true
        }

        fn check(&self) -> Result<()> {
            Ok(())
        }

        fn bell(&self) -> &Bell {
            &self.0
        }

        fn meeting(&self) -> &Meeting {
            &self.1
        }
    }

    fn hear(socket: BorrowedFd<'_>) -> bool {
        rustix::event::poll(&mut [PollFd::from_borrowed_fd(socket, PollFlags::IN)], None).unwrap();
        matches!(receive(socket, &mut [0; LONGEST + 1]), Ok(Received::Message(..)))
    }

    fn ticket(incarnation: [u8; 16]) -> Ticket {
        Ticket {
            transport: Transport::Descriptor,
            is_pinned: false,
            method: Method::Abstract,
            secret: None,
            boot: [0; 16],
            incarnation,
            device_uuid: [0; 16],
            pid: std::process::id(),
            index: 0,
            serial: 1,
            number: 0,
            allocation_bytes: 8,
            offset: 0,
            length: 8,
        }
    }

    /// A socket with the name of an exporter.
    fn listen(incarnation: &[u8; 16]) -> OwnedFd {
        let flags = SocketFlags::CLOEXEC;
        let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let address =
            SocketAddrUnix::new_abstract_name(&Name { boot: [0; 16], incarnation: *incarnation }.address()).unwrap();
        rustix::net::bind(&listener, &address).unwrap();
        rustix::net::listen(&listener, 4).unwrap();
        listener
    }

    #[test]
    fn an_exporter_that_does_not_answer_is_waited_for_at_length_once() {
        let incarnation = highwater_hal::random(OPERATION).unwrap();
        let _listener = listen(&incarnation);
        let limits = Limits { answer: Duration::from_millis(1500), answer_again: Duration::from_millis(100) };
        let importer = Importer { limits, ..Importer::default() };
        let took: Vec<_> = (0..3)
            .map(|_| {
                let started = Instant::now();
                let mapper = NoMapper::new();
                let error =
                    importer.open(Wanted { ticket: &ticket(incarnation), device: 0 }, &mapper, &mut None).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::InvalidState, "{error}");
                assert!(error.message().contains(&format!("process {}", std::process::id())), "{error}");
                started.elapsed()
            })
            .collect();
        assert!(took[0] >= Duration::from_millis(1500), "{took:?}");
        assert!(took[1..].iter().all(|took| *took < Duration::from_millis(1500)), "{took:?}");
    }

    #[test]
    fn a_full_queue_is_waited_for_unless_its_owner_has_ended() {
        let incarnation = highwater_hal::random(OPERATION).unwrap();
        let _listener = listen(&incarnation);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let name = SocketAddrUnix::new_abstract_name(&Name { boot: [0; 16], incarnation }.address()).unwrap();
        let mut connections = Vec::new();
        loop {
            let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
            match rustix::net::connect(&socket, &name) {
                Ok(()) => connections.push(socket),
                Err(error) => break assert_eq!(error, Errno::AGAIN),
            }
        }
        for (ended, expected) in [(false, ErrorKind::InvalidState), (true, ErrorKind::Expired)] {
            let (started, limit, mut has_ended) = (Instant::now(), Duration::from_millis(300), ended);
            let (patience, at_once) = (Patience::new(limit), Patience::new(Duration::ZERO));
            let mapper = NoMapper::new();
            let error = Link::connect_or_wait(&ticket(incarnation), &mapper, patience, at_once, &[], &mut has_ended)
                .unwrap_err();
            assert_eq!((error.kind(), has_ended), (expected, ended), "{error}");
            assert_eq!(started.elapsed() >= limit, !ended, "{:?}", started.elapsed());
        }
    }

    #[test]
    fn an_exporter_of_another_version_is_refused_by_name() {
        for (version, oldest, is_accepted) in [(2, 2, false), (5, 3, false), (6, 2, true), (8, 6, true), (8, 7, false)]
        {
            let incarnation = highwater_hal::random(OPERATION).unwrap();
            let listener = listen(&incarnation);
            let exporter = std::thread::spawn(move || {
                let socket = rustix::net::accept_with(&listener, SocketFlags::CLOEXEC).unwrap();
                assert!(hear(socket.as_fd()), "a greeting");
                let pid = std::process::id();
                let welcome = Message::Welcome { version, oldest, incarnation, standing: OWNER, pid };
                send(socket.as_fd(), &welcome.encode(), &[]).unwrap();
                while hear(socket.as_fd()) {}
            });
            let patience = Patience::new(Duration::from_secs(10));
            let connected = Link::connect(&ticket(incarnation), &NoMapper::new(), patience);
            assert_eq!(connected.is_ok(), is_accepted, "{connected:?}");
            if let Err(error) = &connected {
                assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
                let what = format!("the exporter speaks versions {oldest} to {version} of the protocol");
                assert!(error.message().contains(&what), "{error}");
                assert!(error.hint().contains("the same version"), "{error}");
            }
            drop(connected);
            exporter.join().unwrap();
        }
    }

    /// The socket in an unread message keeps the name, so that no process could answer under it.
    #[test]
    fn an_heir_finds_the_answer_to_an_attempt_that_it_gave_up() {
        let incarnation = highwater_hal::random(OPERATION).unwrap();
        let listener = listen(&incarnation);
        let (answer, may_answer) = std::sync::mpsc::channel();
        let owner = std::thread::spawn(move || {
            let socket = rustix::net::accept_with(&listener, SocketFlags::CLOEXEC).unwrap();
            assert!(hear(socket.as_fd()), "a greeting");
            let welcome = Message::welcome(incarnation, OWNER);
            send(socket.as_fd(), &welcome.encode(), &[]).unwrap();
            assert!(hear(socket.as_fd()), "an attempt");
            may_answer.recv().unwrap();
            let refused = Message::refusal(7, &Error::new(ErrorKind::InvalidState, "inherit", "an old one"));
            send(socket.as_fd(), &refused.encode(), &[]).unwrap();
            send(socket.as_fd(), &Message::HandedOver { question: 1 }.encode(), &[listener.as_fd()]).unwrap();
            socket
        });
        let mapper = NoMapper::new();
        let link = Link::connect(&ticket(incarnation), &mapper, Patience::new(Duration::from_secs(10))).unwrap();
        assert!(link.read_late(&mapper).is_none());
        let error = link.take_over(std::iter::empty(), &mapper, &mut Patience::new(Duration::ZERO)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidState, "{error}");
        answer.send(()).unwrap();
        let connection = owner.join().unwrap();
        // A thread that looks for the name of the heir reads the answer first.
        let (ready, _) = ReadySegment::create().unwrap();
        ready.set_hand_over(Progress::Done);
        link.parts.lock().push(Part { counts: None, ready: Some(Arc::new(ready)) });
        assert!(link.named_heir().is_none());
        // It is the socket that has the name.
        let socket = link.read_late(&mapper).unwrap();
        let name = rustix::net::getsockname(&socket).unwrap();
        assert_eq!(name, rustix::net::getsockname(&connection).unwrap());
        assert!(link.read_late(&mapper).is_none());
    }

    #[test]
    fn an_exporter_that_breaks_the_connection_gets_no_second_time_limit() {
        let incarnation = highwater_hal::random(OPERATION).unwrap();
        let (flags, listener) = (SocketFlags::CLOEXEC, listen(&incarnation));
        let exporter = std::thread::spawn(move || {
            let accept = || {
                let socket = rustix::net::accept_with(&listener, flags).unwrap();
                let welcome = Message::welcome(incarnation, OWNER);
                assert!(hear(socket.as_fd()));
                send(socket.as_fd(), &welcome.encode(), &[]).unwrap();
                assert!(hear(socket.as_fd()), "a request");
                socket
            };
            let first = accept();
            std::thread::sleep(Duration::from_millis(1200));
            drop(first);
            // It answers nothing.
            let second = accept();
            while hear(second.as_fd()) {}
        });
        let importer = Importer::default();
        // So that the limit is the short one.
        let silent = (Instant::now(), Error::new(ErrorKind::InvalidState, OPERATION, "no answer"));
        importer.state.lock().silent.insert(incarnation, silent);
        let started = Instant::now();
        let mapper = NoMapper::new();
        let error = importer.open(Wanted { ticket: &ticket(incarnation), device: 0 }, &mapper, &mut None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidState, "{error}");
        assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
        importer.disconnect();
        exporter.join().unwrap();
    }
}
