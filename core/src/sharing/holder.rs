//! [`Holder`]: keeps the handles of shared memory without a device, and answers its tickets when the owner dies.
//!
//! A holder is an heir of last resort (`heir.rs`), in a process that maps nothing. It counts as an importer of a live owner. One thread
//! answers importers and waits for deaths. A short-lived thread registers at an heir, because the answering thread must not wait for
//! another process.

use std::collections::HashSet;
use std::collections::hash_map::{Entry, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use super::desk::{Desk, LOOK_EVERY, Reception, Visit, Visitors};
use super::heir::{Estate, Kept, Pause};
use super::held::{HeldMemory, no_descriptor};
use super::identity::Process;
use super::importer::{CountedAt, Link, Mapper, Pieces};
use super::message::{ExportKey, Part};
use super::options::{Openers, SharingOptions};
use super::patience::Patience;
use super::rendezvous::Meeting;
use super::searches::{Search, Searches};
use super::segment::Progress;
use super::store::{self, HolderState, Saved};
use super::system::{Bell, drain, os_error};
use super::ticket::Ticket;
use crate::own_thread::spawn;
use highwater_hal::{Descriptor, DevicePtr, Error, ErrorKind, MemoryHandle, Result, Transport, fork::Generation};

const OPERATION: &str = "hold";
/// Time limit for the answers of an owner.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// Keeps shared memory beyond the death of its owner, without a device. It keeps descriptors and maps nothing.
///
/// When the owner dies, the holder becomes its heir, as an importer with [`OwnerDeath::Inherit`](crate::OwnerDeath::Inherit) does: tickets
/// that were issued before stay valid while the holder exists. If the owner lives and drops its buffer, the holder releases the memory.
/// The environment variable `HIGHWATER_SHARING` applies as for a runtime.
///
/// ```
/// use highwater_core::Runtime;
/// use highwater_core::ipc::{HeldState, Holder};
/// use highwater_mock::{MockGpu, MockOptions};
///
/// let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
/// let weights = runtime.device(0)?.allocate_shared::<f32>(1000)?;
/// let ticket = weights.share()?;
///
/// // In a process that outlives the one above:
/// let holder = Holder::new()?;
/// holder.hold(&ticket)?;
/// assert_eq!(holder.held()[0].state, HeldState::Owned { pid: Some(std::process::id()) });
/// # Ok::<(), highwater_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Holder {
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

/// The state of an allocation of a [`Holder`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HeldState {
    /// Another process answers: the owner or an heir. `pid` is its process id, as this process sees it; `None` for a process of another
    /// PID namespace.
    Owned {
        /// The process id.
        pid: Option<u32>,
    },
    /// The owner is dead or has handed over, and this holder is not counted at an heir yet.
    Orphaned,
    /// The owner is dead or has handed over, and this holder answers.
    Inherited,
    /// The owner has dropped the memory, or an heir has refused it. The holder no longer keeps it.
    Released,
}

/// An allocation of a [`Holder`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeldAllocation {
    /// A ticket of the whole allocation.
    pub ticket: Ticket,
    /// The state of the allocation.
    pub state: HeldState,
}

#[derive(Debug)]
struct State {
    generation: Generation,
    bell: Arc<Bell>,
    meeting: Meeting,
    is_stopping: AtomicBool,
    held: Mutex<Vec<Held>>,
    estates: Mutex<Vec<Arc<Estate>>>,
    searches: Searches,
}

#[derive(Debug)]
struct Held {
    ticket: Ticket,
    /// The count at the latest process that counted it. `None` if an earlier holder was counted.
    counted: Option<CountedAt>,
    /// The numbers of the latest share, and of the latest share whose work is done, as an earlier holder knew them.
    saved: (u64, u64),
    memory: Arc<HeldMemory>,
    place: Place,
}

/// The process that answers for an allocation.
#[derive(Debug)]
enum Place {
    Other(Arc<Link>),
    /// The process that answered for an earlier holder, which may have ended meanwhile.
    Former(Arc<Process>, Openers),
    Here {
        _kept: Kept,
    },
    Released,
}

impl Held {
    fn is_widowed(&self) -> bool {
        match &self.place {
            // Memory that the owner dropped while it lived needs no heir. A former owner keeps it until it is released.
            Place::Other(link) => link.has_no_process() && !self.is_closed(),
            Place::Former(..) => true,
            Place::Here { .. } | Place::Released => false,
        }
    }

    /// Returns whether the owner has dropped the memory.
    fn is_closed(&self) -> bool {
        self.counted.as_ref().is_some_and(|counted| counted.is_closed(self.memory.key))
    }

    /// Returns the numbers of the latest share, and of the latest share whose work is done.
    fn numbers(&self) -> (u64, u64) {
        self.counted.as_ref().map_or(self.saved, |counted| counted.numbers(self.memory.key))
    }

    /// Returns the process that answered last, if it may be alive, and those that may open the memory.
    fn owner(&self) -> Option<(Arc<Process>, Openers)> {
        match &self.place {
            Place::Other(link) => {
                // Reads the name of the heir, if the owner has sent it.
                let _ = link.named_heir();
                Some((Arc::clone(link.last_process()), link.openers()))
            }
            Place::Former(process, openers) => Some((Arc::clone(process), *openers)),
            Place::Here { .. } | Place::Released => None,
        }
    }

    /// Returns whether a process has the name that this one must not take.
    fn has_living_owner(&self) -> bool {
        match &self.place {
            Place::Other(link) => link.named_heir().is_some_and(|heir| !heir.has_ended()),
            Place::Former(process, _) => !process.has_ended(),
            Place::Here { .. } | Place::Released => false,
        }
    }

    fn link(&self) -> Option<&Arc<Link>> {
        match &self.place {
            Place::Other(link) => Some(link),
            Place::Former(..) | Place::Here { .. } | Place::Released => None,
        }
    }

    /// Answers for the allocation from now on.
    fn inherit(&mut self, estate: &Arc<Estate>, bell: &Arc<Bell>) {
        if self.is_closed() {
            // The owner dropped it while it lived.
            drop(self.release());
            return;
        }
        self.saved = self.numbers();
        match estate.keep(&self.memory, self.saved, bell) {
            Ok(kept) => self.place = Place::Here { _kept: kept },
            Err(error) => {
                crate::warnings::warning!("memory of a former owner was not inherited: {error}");
                drop(self.release());
            }
        }
    }

    /// Drops the handles. Returns the process that answered.
    fn release(&mut self) -> Place {
        self.memory = Arc::new(self.memory.without_handles());
        std::mem::replace(&mut self.place, Place::Released)
    }

    /// Releases the memory, and ends the count at a process that answers.
    fn end(&mut self) {
        if let (Place::Other(link), Some(counted)) = (self.release(), &self.counted) {
            counted.end(&link, self.memory.key);
        }
    }
}

/// A source that woke the thread.
enum Source {
    Bell,
    Visit(Visit),
    Rings(Arc<Link>),
    Ended(Arc<Link>),
}

impl Holder {
    /// Starts a holder of nothing, with the thread that answers.
    ///
    /// # Errors
    /// `InvalidArgument` if `HIGHWATER_SHARING` is not valid; `OperatingSystem` if no descriptor or thread is left.
    pub fn new() -> Result<Self> {
        Self::with_options(&SharingOptions::new())
    }

    /// Starts a holder with options. The environment variable fills in those that are not set.
    ///
    /// # Errors
    /// As [`Holder::new`].
    pub fn with_options(options: &SharingOptions) -> Result<Self> {
        Self::start(options, |_| Ok(()))
    }

    /// Starts a holder of the memory of a state, in another process or in this one. If the former holder answered for an owner, this one
    /// answers at once, under the same name. Otherwise a living owner counts it again. If the owner has died meanwhile, this holder inherits
    /// the memory, or registers at the heir. Tickets of shares after the state was saved then return `Expired`, because the end of their
    /// device work is not known.
    ///
    /// The caller must end the former holder first. Otherwise both answer under one name.
    ///
    /// # Errors
    /// `InvalidArgument` if the state is not one of [`Holder::save`], lacks a descriptor, or is of another boot; otherwise as
    /// [`Holder::with_options`].
    pub fn restore(state: HolderState, options: &SharingOptions) -> Result<Self> {
        let HolderState { descriptors, bytes } = state;
        let saved = store::decode(&bytes)?;
        Self::start(options, |state| state.restore(saved, descriptors.into_iter().collect()))
    }

    /// Returns the descriptors and the tickets of all memory that the holder holds, for [`Holder::restore`]. The descriptors are copies, so
    /// this holder continues. If its process is killed, a process that has the state replaces it. A service manager can keep the state
    /// ([`DescriptorStore`](super::DescriptorStore)).
    ///
    /// ```
    /// use highwater_core::Runtime;
    /// use highwater_core::ipc::{HeldState, Holder};
    /// use highwater_core::SharingOptions;
    /// use highwater_mock::{MockGpu, MockOptions};
    ///
    /// let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
    /// let weights = runtime.device(0)?.allocate_shared::<f32>(1000)?;
    /// let holder = Holder::new()?;
    /// holder.hold(&weights.share()?)?;
    ///
    /// let state = holder.save()?;
    /// drop(holder);
    /// // Usually in the next process.
    /// let next = Holder::restore(state, &SharingOptions::new())?;
    /// assert_eq!(next.held().len(), 1);
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// `OperatingSystem` if no descriptor is left; `Forked` in a forked child.
    pub fn save(&self) -> Result<HolderState> {
        if !self.state.generation.is_current() {
            return Err(Generation::error(OPERATION));
        }
        self.state.save()
    }

    fn start(options: &SharingOptions, prepare: impl FnOnce(&State) -> Result<()>) -> Result<Self> {
        let meeting = Meeting::open(options.or(SharingOptions::from_environment()?))?;
        let bell = Arc::new(Bell::new(OPERATION)?);
        let (generation, searches) = (Generation::current(), Searches::new(OPERATION)?);
        let (is_stopping, held, estates) = (AtomicBool::new(false), Mutex::default(), Mutex::default());
        let state = Arc::new(State { generation, bell, meeting, is_stopping, held, estates, searches });
        prepare(&state)?;
        let of_thread = Arc::clone(&state);
        let thread = Some(spawn(("highwater-hold", OPERATION, ""), move || of_thread.run())?);
        Ok(Self { state, thread })
    }

    /// Holds the whole allocation of a ticket from now on, of device memory or of page-locked memory.
    ///
    /// # Errors
    /// `Unsupported` if the memory is not shared by descriptor, or its exporter is found by an inherited descriptor; `Forked` in a forked
    /// child; otherwise as [`Runtime::open_shared`](crate::Runtime::open_shared).
    pub fn hold(&self, ticket: &Ticket) -> Result<()> {
        let state = &self.state;
        if !state.generation.is_current() {
            return Err(Generation::error(OPERATION));
        }
        if ticket.transport != Transport::Descriptor {
            return Err(no_descriptor(ticket.transport));
        }
        state.meeting.check_heir(ticket.method)?;
        let whole = ticket.clone().part(0, ticket.allocation_bytes);
        let is_same = |held: &Held| {
            let (known, ticket) = (&held.ticket, &whole);
            (known.incarnation, known.serial, known.secret) == (ticket.incarnation, ticket.serial, ticket.secret)
        };
        let is_held = |held: &Held| is_same(held) && !matches!(held.place, Place::Released);
        let known_link = {
            let held = state.held.lock();
            if held.iter().any(is_held) {
                return Ok(());
            }
            let mut links = held.iter().filter_map(Held::link);
            links.find(|link| *link.incarnation() == whole.incarnation && !link.is_lost() && !link.is_cut()).cloned()
        };
        let mapper = NoMapper(state, None);
        let mut patience = Patience::new(ANSWER_WITHIN);
        let link = match known_link {
            Some(link) => link,
            None => Arc::new(Link::connect(&whole, &mapper, patience)?),
        };
        let (handles, counted) = link.fetch(&whole, &mapper, &mut patience)?;
        let memory = Arc::new(HeldMemory::of(&whole, None, handles).inspect_err(|_| {
            counted.end(&link, ExportKey { index: whole.index, serial: whole.serial });
        })?);
        let (counted, saved) = (Some(counted), (0, 0));
        let mut held = Held { ticket: whole.clone(), counted, saved, memory, place: Place::Other(link) };
        let mut all = state.held.lock();
        if all.iter().any(is_held) {
            drop(all);
            // Another thread was faster.
            held.end();
            return Ok(());
        }
        all.retain(|held| !is_same(held));
        all.push(held);
        drop(all);
        state.bell.ring();
        Ok(())
    }

    /// Returns the allocations that the holder holds or has held, in the order of the calls of [`Holder::hold`]. In a forked child the list
    /// is empty.
    #[must_use]
    pub fn held(&self) -> Vec<HeldAllocation> {
        // In a forked child, a thread that does not exist may hold the lock.
        if !self.state.generation.is_current() {
            return Vec::new();
        }
        let info = |held: &Held| HeldAllocation {
            ticket: held.ticket.clone(),
            state: match &held.place {
                Place::Other(link) if link.is_lost() => HeldState::Orphaned,
                Place::Other(link) => {
                    HeldState::Owned { pid: link.process.pid().and_then(|pid| u32::try_from(pid).ok()) }
                }
                Place::Former(..) => HeldState::Orphaned,
                Place::Here { .. } => HeldState::Inherited,
                Place::Released => HeldState::Released,
            },
        };
        self.state.held.lock().iter().map(info).collect()
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        if !self.state.generation.is_current() {
            // The thread does not exist in this child, so its handle must not be touched.
            std::mem::forget(self.thread.take());
            return;
        }
        self.state.is_stopping.store(true, Ordering::Release);
        self.state.searches.signal_end();
        self.state.bell.ring();
        if self.thread.take().is_some_and(crate::panics::has_panicked) {
            crate::warnings::warning!("the thread of a holder has panicked");
        }
        self.state.searches.wait_for_end();
    }
}

impl State {
    fn run(self: &Arc<Self>) {
        let mut reception = Reception::new(&self.bell);
        while !self.is_stopping.load(Ordering::Acquire) {
            self.round(&mut reception);
        }
        // Dropped without the lock.
        let mut held = std::mem::take(&mut *self.held.lock());
        held.iter_mut().for_each(Held::end);
        drop(held);
        std::mem::take(&mut *self.estates.lock()).iter().for_each(|estate| estate.close(&self.meeting));
    }

    /// Waits for an event, and handles it.
    fn round(self: &Arc<Self>, reception: &mut Reception) {
        let desk = |estate: Arc<Estate>| -> Arc<dyn Desk> { estate };
        let visitors = Visitors::of(self.estates.lock().iter().cloned().map(desk).collect());
        let mut links: Vec<Arc<Link>> = Vec::new();
        for link in self.held.lock().iter().filter_map(Held::link).filter(|link| !link.is_lost()) {
            if !links.iter().any(|known| Arc::ptr_eq(known, link)) {
                links.push(Arc::clone(link));
            }
        }
        reception.begin_round();
        let mut sources = vec![Source::Bell];
        let mut ends = vec![PollFd::from_borrowed_fd(self.bell.descriptor(), PollFlags::IN)];
        let mut silent = visitors.watch(reception, |visit, end| {
            sources.push(Source::Visit(visit));
            ends.push(PollFd::from_borrowed_fd(end, PollFlags::IN));
        });
        for link in &links {
            if let Some(pidfd) = link.process.pidfd() {
                sources.push(Source::Ended(Arc::clone(link)));
                ends.push(PollFd::from_borrowed_fd(pidfd, PollFlags::IN));
            }
            let has_line = link.has_line.load(Ordering::Relaxed);
            silent |= !has_line;
            if has_line {
                sources.push(Source::Rings(Arc::clone(link)));
                ends.push(PollFd::from_borrowed_fd(link.line.as_fd(), PollFlags::IN));
            }
        }
        let timeout = silent.then_some(LOOK_EVERY).and_then(|second| rustix::time::Timespec::try_from(second).ok());
        match rustix::event::poll(&mut ends, timeout.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => return,
            Err(errno) => {
                crate::warnings::warning!("a holder cannot wait for processes: {errno}");
                return std::thread::sleep(Pause::LONGEST);
            }
        }
        let events: Vec<PollFlags> = ends.iter().map(PollFd::revents).collect();
        for (source, events) in sources.into_iter().zip(events).filter(|(_, events)| !events.is_empty()) {
            if let Source::Visit(visit) = &source
                && events.contains(PollFlags::HUP)
            {
                visit.hung_up();
            }
            match source {
                Source::Bell => self.bell.drain(),
                Source::Visit(visit) => reception.serve(visit, &self.bell),
                Source::Rings(link) => {
                    if !drain(link.line.as_fd()) {
                        link.has_line.store(false, Ordering::Relaxed);
                    }
                }
                Source::Ended(link) => link.note_end(),
            }
        }
        for link in &links {
            match link.hand_over() {
                Progress::None => {}
                Progress::Offered => self.take_over(link),
                Progress::Done => drop(link.note_hand_over()),
            }
        }
        let widowed: HashSet<_> = {
            let all = self.held.lock();
            all.iter().filter(|held| held.is_widowed()).map(|held| held.ticket.incarnation).collect()
        };
        // The lock ends here, because `succeed` takes it.
        let searches = self.searches.incarnations();
        for incarnation in widowed.difference(&searches) {
            self.succeed(*incarnation);
        }
        reception.drop_silent_peers(visitors.desks());
        for held in &mut *self.held.lock() {
            if held.link().is_some() && held.is_closed() {
                held.end();
            }
        }
        let mut estates = self.estates.lock();
        for estate in &*estates {
            drop(estate.exporter().released());
        }
        let over: Vec<_> = estates.extract_if(.., |estate| estate.is_over()).collect();
        drop(estates);
        over.iter().for_each(|estate| estate.close(&self.meeting));
    }

    /// Settles the allocations of an owner that has died, or whose heir has.
    fn succeed(self: &Arc<Self>, incarnation: [u8; 16]) {
        if self.inherit(&incarnation) {
            return;
        }
        let state = Arc::clone(self);
        let begun = self.searches.begin(OPERATION, incarnation, move |search| {
            let (mut answering, mut pause) = (None::<Arc<Link>>, Pause::new());
            let inherits = |answering: &Option<Arc<Link>>| {
                !answering.as_ref().is_some_and(|link| link.may_still_work()) && state.inherit(&incarnation)
            };
            while !search.has_to_end() && !inherits(&answering) {
                if state.register(&incarnation, &mut answering, search).is_err() {
                    search.sleep(pause.next(), None);
                }
            }
            search.note_over();
            // It may have died in the meantime.
            state.bell.ring();
        });
        if let Err(error) = begun {
            crate::warnings::warning!("no heir of a dead owner was looked for: {error}");
        }
    }

    /// Takes the allocations of an owner that hands over.
    fn take_over(self: &Arc<Self>, link: &Arc<Link>) {
        let (state, of_thread) = (Arc::clone(self), Arc::clone(link));
        let begun = self.searches.begin(OPERATION, *link.incarnation(), move |search| {
            let mut pause = Pause::new();
            while !state.try_to_take(&of_thread, search) {
                search.sleep(pause.next(), None);
            }
            search.note_over();
            state.bell.ring();
        });
        if let Err(error) = begun {
            crate::warnings::warning!("memory that is handed over was not taken: {error}");
        }
    }

    /// Tries once to take the allocations. Returns whether the hand-over is over.
    fn try_to_take(&self, link: &Arc<Link>, search: &Search) -> bool {
        let is_of = |held: &&mut Held| held.link().is_some_and(|of| Arc::ptr_eq(of, link));
        let is_shared = |held: &&mut Held| !held.is_closed();
        let claimed: Vec<_> = {
            let mut all = self.held.lock();
            let held = all.iter_mut().filter(is_of).filter(is_shared);
            held.map(|held| (Arc::clone(&held.memory), held.ticket.exporter())).collect()
        };
        let is_offered = link.hand_over() == Progress::Offered && !link.has_no_process();
        let Some((_, name)) = claimed.first() else { return true };
        let late = (!is_offered).then(|| link.read_late(&NoMapper(self, Some(search)))).flatten();
        if late.is_none() && (!is_offered || search.has_to_end()) {
            return true;
        }
        let mut patience = Patience::new(Duration::from_secs(1));
        let take =
            || link.take_over(claimed.iter().map(|(held, _)| &**held), &NoMapper(self, Some(search)), &mut patience);
        let socket = match late.map_or_else(take, Ok) {
            Ok(socket) => socket,
            Err(error) => {
                tracing::debug!("memory that is handed over was not taken yet: {error}");
                return link.is_cut();
            }
        };
        match Estate::given(*name, link.openers(), socket) {
            Ok(estate) => {
                link.note_hand_over();
                let mut estates = self.estates.lock();
                let mut all = self.held.lock();
                // What the owner has dropped since the claim is not among them.
                for held in all.iter_mut().filter(is_of).filter(is_shared) {
                    held.inherit(&estate, &self.bell);
                }
                estates.push(estate);
            }
            // The name is free, and is inherited as that of a dead owner.
            Err(error) => crate::warnings::warning!("the socket of an owner was not taken over: {error}"),
        }
        true
    }

    fn save(&self) -> Result<HolderState> {
        let failed = |errno| os_error(OPERATION, "copy of a descriptor", errno);
        let mut descriptors: HashMap<String, OwnedFd> = HashMap::new();
        let mut put = |name: String, descriptor: BorrowedFd<'_>| -> Result<()> {
            if let Entry::Vacant(entry) = descriptors.entry(name) {
                entry.insert(rustix::io::fcntl_dupfd_cloexec(descriptor, 0).map_err(failed)?);
            }
            Ok(())
        };
        let mut all = Vec::new();
        // The estates are locked before the held memory everywhere.
        let estates = self.estates.lock();
        for held in &*self.held.lock() {
            let estate = estates.iter().find(|estate| estate.incarnation() == held.ticket.incarnation);
            let (owner, proof, openers): (_, Arc<dyn AsFd>, _) = match (&held.place, held.owner(), estate) {
                (_, Some((process, openers)), _) => match process.shared_pidfd() {
                    Some(pidfd) => (Some(process.key()), Arc::<OwnedFd>::clone(pidfd), openers),
                    None => continue,
                },
                (Place::Here { .. }, None, Some(estate)) => match estate.socket() {
                    Some(socket) => (None, socket, estate.standing().openers),
                    None => continue,
                },
                _ => continue,
            };
            let handles = (0..held.memory.parts()).map(|part| held.memory.handle(part)).collect::<Result<Vec<_>>>()?;
            let parts = handles.iter().map(|handle| Part { bytes: handle.bytes, payload: handle.payload }).collect();
            let saved = Saved { ticket: held.ticket.clone(), numbers: held.numbers(), openers, owner, parts };
            for (part, handle) in handles.iter().enumerate() {
                if let Some(descriptor) = &handle.descriptor {
                    put(saved.part(part), descriptor.as_ref().as_fd())?;
                }
            }
            put(saved.proof(), proof.as_fd())?;
            all.push(saved);
        }
        Ok(HolderState { descriptors: descriptors.into_iter().collect(), bytes: store::encode(&all) })
    }

    /// Holds the memory that an earlier holder has saved. The caller starts the thread afterwards.
    fn restore(&self, all: Vec<Saved>, mut descriptors: HashMap<String, OwnedFd>) -> Result<()> {
        let lacking = |name: &str| store::invalid(&format!("no descriptor with the name `{name}`"));
        let mut former: HashMap<String, Arc<Process>> = HashMap::new();
        for saved in all {
            let boot = super::system::boot_id();
            if saved.ticket.boot != boot && boot != [0; 16] && saved.ticket.boot != [0; 16] {
                return Err(store::invalid("memory of another machine, or of before the last restart of this one"));
            }
            self.meeting.check_heir(saved.ticket.method)?;
            let handles = saved.parts.iter().enumerate().map(|(at, part)| {
                let name = saved.part(at);
                let descriptor = descriptors.remove(&name).ok_or_else(|| lacking(&name))?;
                let uuid = saved.ticket.device_uuid;
                let handle = MemoryHandle::new(Transport::Descriptor, uuid, part.bytes, part.payload);
                Ok(handle.with_descriptor(Descriptor::new(descriptor)))
            });
            let handles = handles.collect::<Result<Vec<_>>>()?;
            let bytes = handles.iter().try_fold(0_u64, |bytes, handle| bytes.checked_add(handle.bytes));
            if bytes != Some(saved.ticket.allocation_bytes) {
                return Err(store::invalid("parts that are not the allocation of their ticket"));
            }
            let memory = Arc::new(HeldMemory::of(&saved.ticket, None, handles)?);
            let proof = saved.proof();
            let (counted, place) = (None, Place::Released);
            let mut held = Held { ticket: saved.ticket.clone(), counted, saved: saved.numbers, memory, place };
            if saved.owner.is_some() {
                let process = match former.get(&proof) {
                    Some(process) => Arc::clone(process),
                    None => {
                        let pidfd = descriptors.remove(&proof).ok_or_else(|| lacking(&proof))?;
                        let wrong = || store::invalid(&format!("a descriptor `{proof}` that is no pidfd"));
                        let process = Arc::new(Process::of_pidfd(pidfd).ok_or_else(wrong)?);
                        former.insert(proof, Arc::clone(&process));
                        process
                    }
                };
                held.place = Place::Former(process, saved.openers);
            } else {
                let mut estates = self.estates.lock();
                let known = estates.iter().find(|estate| estate.incarnation() == saved.ticket.incarnation).cloned();
                let estate = match known {
                    Some(estate) => estate,
                    None => {
                        let socket = descriptors.remove(&proof).ok_or_else(|| lacking(&proof))?;
                        let estate = Estate::given(saved.ticket.exporter(), saved.openers, socket)?;
                        estates.push(Arc::clone(&estate));
                        estate
                    }
                };
                held.inherit(&estate, &self.bell);
            }
            self.held.lock().push(held);
        }
        // The thread searches for the owners.
        self.bell.ring();
        Ok(())
    }

    /// Takes the name of a dead owner. Returns whether nothing is left to settle.
    fn inherit(&self, incarnation: &[u8; 16]) -> bool {
        let is_widowed = |held: &Held| held.ticket.incarnation == *incarnation && held.is_widowed();
        let mut estates = self.estates.lock();
        let mut all = self.held.lock();
        let Some(first) = all.iter().find(|held| is_widowed(held)) else { return true };
        if first.has_living_owner() {
            return false;
        }
        let known = estates.iter().find(|estate| estate.incarnation() == *incarnation).cloned();
        let estate = match known {
            Some(estate) => estate,
            None => {
                let openers = first.owner().map_or_else(Default::default, |(_, openers)| openers);
                match Estate::take(&self.meeting, first.ticket.exporter(), openers) {
                    Ok(Some(estate)) => estate,
                    Ok(None) => return false,
                    Err(error) => {
                        tracing::debug!("the name of a dead owner was not taken: {error}");
                        return false;
                    }
                }
            }
        };
        for held in all.iter_mut().filter(|held| is_widowed(held)) {
            held.inherit(&estate, &self.bell);
        }
        if !estates.iter().any(|known| Arc::ptr_eq(known, &estate)) {
            estates.push(estate);
        }
        self.bell.ring();
        true
    }

    /// Registers the allocations of a dead owner at its heir. `answering` becomes the connection to it.
    fn register(&self, incarnation: &[u8; 16], answering: &mut Option<Arc<Link>>, search: &Search) -> Result<()> {
        let widowed: Vec<_> = {
            let all = self.held.lock();
            let widowed = all.iter().filter(|held| held.ticket.incarnation == *incarnation && held.is_widowed());
            let living = |held: &Held| match &held.place {
                Place::Former(process, _) => Some(Arc::clone(process)),
                _ => None,
            };
            widowed.map(|held| (held.ticket.clone(), Arc::clone(&held.memory), held.numbers(), living(held))).collect()
        };
        let Some((first, _, _, former)) = widowed.first() else { return Ok(()) };
        let mapper = NoMapper(self, Some(search));
        let mut patience = Patience::new(Duration::from_secs(1));
        let link = Arc::new(Link::connect(first, &mapper, patience)?);
        let checked = link.check_heir();
        let is_heir = checked.is_ok();
        // The owner of an earlier holder may live, and then has the memory itself.
        if former.as_ref().is_none_or(|former| former.key() != link.process.key()) {
            checked?;
        }
        *answering = Some(Arc::clone(&link));
        for (ticket, memory, numbers, _) in widowed {
            patience.renew();
            let passed = is_heir.then_some(&*memory);
            let registered = link.register(&ticket, passed, numbers, &mapper, &mut patience);
            let mut all = self.held.lock();
            let Some(held) = all.iter_mut().find(|held| Arc::ptr_eq(&held.memory, &memory)) else {
                // It was released meanwhile.
                drop(all);
                if let Ok(counted) = registered {
                    counted.end(&link, memory.key);
                }
                continue;
            };
            match registered {
                Ok(counted) => (held.counted, held.place) = (Some(counted), Place::Other(Arc::clone(&link))),
                Err(error) if link.is_cut() || link.process.has_ended() || search.has_to_end() => return Err(error),
                // It has not answered in time.
                Err(error) if error.kind() == ErrorKind::InvalidState => return Err(error),
                Err(error) => {
                    crate::warnings::warning!(
                        "a holder released memory, because the owner or the heir of the memory refused it: {error}"
                    );
                    drop(held.release());
                }
            }
        }
        self.bell.ring();
        Ok(())
    }
}

/// Maps nothing. The second field is the search for which it waits; `None` for a call of the program.
struct NoMapper<'s>(&'s State, Option<&'s Search>);

impl Mapper for NoMapper<'_> {
    fn map(&self, _: u32, _: &MemoryHandle) -> Result<DevicePtr> {
        Err(Error::lacks(OPERATION, "ipc_transports"))
    }

    fn unmap(&self, _: u32, _: DevicePtr) -> bool {
        true
    }

    fn map_joined(&self, _: u32, _: u64, _: &mut Pieces<'_>) -> Result<DevicePtr> {
        Err(Error::lacks(OPERATION, "ipc_transports"))
    }

    fn unmap_joined(&self, _: u32, _: DevicePtr) -> bool {
        true
    }

    fn check(&self) -> Result<()> {
        if self.0.is_stopping.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::ShuttingDown, OPERATION, "the holder ends"));
        }
        Ok(())
    }

    fn ending(&self) -> Option<BorrowedFd<'_>> {
        self.1.map(Search::ending)
    }

    fn bell(&self) -> &Bell {
        &self.0.bell
    }

    fn meeting(&self) -> &Meeting {
        &self.0.meeting
    }
}
