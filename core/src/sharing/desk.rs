//! The answers to importers. The exporter of a runtime gives them, and so does the heir of a dead exporter.

use std::fmt::Debug;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::exporter::{Exporter, Grant, Peer};
use super::held::HeldMemory;
use super::identity::Process;
use super::listening::ListeningSocket;
use super::message::{
    AT_ONCE, Entrusted, ExportKey, LONGEST, MOST_PARTS, Message, Opened, Part, Standing, Wants, check_version,
};
use super::options::Openers;
use super::rendezvous::Listener;
use super::spread::spread;
use super::system::{Bell, Received, is_readable, os_error, receive, send};
use super::ticket::Secret;
use crate::pool::deferred::DeferredFree;
use highwater_hal::{Descriptor, Error, ErrorKind, MemoryHandle, Result, Transport};

/// Time limit for the greeting of an importer that has connected.
const HELLO_WITHIN: Duration = Duration::from_secs(5);
/// Interval between checks of connections that cannot wake the service.
pub(super) const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Time without new importers after a shortage of descriptors.
const CLOSED_FOR: Duration = Duration::from_millis(20);
/// Maximum number of requests of one importer that are answered before the other importers are served.
const QUESTIONS_AT_ONCE: usize = 64;
/// Limits on the idle connections of all processes together, those with nothing open: a maximum, and the descriptors of this
/// process required for each. Each connection uses up to three descriptors.
const MOST_IDLE: usize = 64;
const DESCRIPTORS_FOR_ONE_IDLE: u64 = 16;
/// Minimum number of idle connections, even with few descriptors.
const FEWEST_IDLE: usize = 4;
/// Maximum number of parts of an allocation that is entrusted.
const MOST_ENTRUSTED: u32 = 1 << 20;

/// The place where importers of one incarnation are served: the exporter of a runtime, or an heir.
pub(super) trait Desk: Debug + Send + Sync {
    fn exporter(&self) -> &Exporter;
    fn listener(&self) -> Option<&Listener>;
    fn incarnation(&self) -> [u8; 16];
    fn standing(&self) -> Standing;
    /// Creates the vendor's handle of a part for an importer.
    fn export(&self, grant: &Grant, part: usize) -> Result<MemoryHandle>;
    /// Frees memory that no importer holds any more.
    fn free(&self, freed: Vec<DeferredFree>);
}

/// A request of an importer for an allocation.
struct Request {
    question: u32,
    key: ExportKey,
    wants: Wants,
    secret: Option<Secret>,
}

/// An event at a desk.
pub(super) enum Visit {
    Listener(Arc<dyn Desk>),
    Question(Arc<dyn Desk>, Arc<Peer>),
    PeerEnded(Arc<dyn Desk>, Arc<Peer>),
}

impl Visit {
    /// Notes that the socket was shut down. If it is the listener's, another process has a copy of it.
    pub(super) fn hung_up(&self) {
        if let Self::Listener(desk) = self {
            desk.listener().into_iter().for_each(Listener::hung_up);
        }
    }
}

/// A desk and its importers.
struct DeskWithPeers {
    desk: Arc<dyn Desk>,
    listener: Option<Arc<ListeningSocket>>,
    peers: Vec<Arc<Peer>>,
}

/// The importers of desks, whose descriptors a thread waits for.
pub(super) struct Visitors(Vec<DeskWithPeers>);

impl Visitors {
    pub(super) fn of(desks: Vec<Arc<dyn Desk>>) -> Self {
        let with_peers = |desk: Arc<dyn Desk>| {
            let (listener, peers) = (desk.listener().and_then(Listener::descriptor), desk.exporter().peers());
            DeskWithPeers { desk, listener, peers }
        };
        Self(desks.into_iter().map(with_peers).collect())
    }

    /// Passes each descriptor to wait for, with the event that it signals. Returns whether a connection cannot wake the thread.
    pub(super) fn watch<'v>(&'v self, reception: &Reception, mut put: impl FnMut(Visit, BorrowedFd<'v>)) -> bool {
        let mut silent = false;
        for DeskWithPeers { desk, listener, peers } in &self.0 {
            if let Some(listener) = listener.as_ref().filter(|_| reception.closed_until.is_none()) {
                put(Visit::Listener(Arc::clone(desk)), listener.as_fd());
            }
            for peer in peers {
                let is_connected = peer.connected.load(Ordering::Relaxed);
                silent |= peer.line.get().is_none() || !is_connected;
                if let Some(pidfd) = peer.process.pidfd() {
                    put(Visit::PeerEnded(Arc::clone(desk), Arc::clone(peer)), pidfd);
                }
                if is_connected {
                    put(Visit::Question(Arc::clone(desk), Arc::clone(peer)), peer.socket.as_fd());
                }
            }
        }
        silent || reception.closed_until.is_some()
    }

    pub(super) fn desks(&self) -> impl Iterator<Item = &Arc<dyn Desk>> {
        self.0.iter().map(|with_peers| &with_peers.desk)
    }
}

/// Serves the importers of desks, in one thread.
pub(super) struct Reception {
    /// Released for a moment to tell an importer that no descriptor is left for it.
    spare: Option<OwnedFd>,
    /// Time until which no importer is accepted, because not even a spare descriptor was left.
    closed_until: Option<Instant>,
    /// Time of the last search for connections to drop.
    looked: Instant,
    /// True if the last exports took long.
    slow: AtomicBool,
}

impl Reception {
    pub(super) fn new(bell: &Bell) -> Self {
        let spare = rustix::io::fcntl_dupfd_cloexec(bell.descriptor(), 0).ok();
        Self { spare, closed_until: None, looked: Instant::now(), slow: AtomicBool::new(false) }
    }

    /// Opens again after a shortage of descriptors. Called before each wait.
    pub(super) fn begin_round(&mut self) {
        if self.closed_until.is_some_and(|until| until <= Instant::now()) {
            self.closed_until = None;
        }
    }

    pub(super) fn serve(&mut self, visit: Visit, bell: &Bell) {
        match visit {
            Visit::Listener(desk) => self.let_in(&*desk, bell),
            Visit::Question(desk, peer) => self.answer(&*desk, &peer),
            Visit::PeerEnded(desk, peer) => {
                let freed = desk.exporter().peer_ended(peer.id);
                desk.free(freed);
            }
        }
    }

    /// Accepts the importers that have connected.
    fn let_in(&mut self, desk: &dyn Desk, bell: &Bell) {
        let Some(listener) = desk.listener() else { return };
        let most_idle = most_idle();
        // A few at a time, so that accepted connections can greet before they count as idle.
        for _ in 0..most_idle / 2 {
            match listener.accept(desk.incarnation()) {
                Ok(None) => {}
                Ok(Some(socket)) => {
                    match Process::of_peer("share", socket.as_fd(), desk.standing().openers) {
                        Ok(process) => match listener.admit(socket) {
                            Ok(socket) => drop(desk.exporter().add_peer(process, socket)),
                            Err(error) => tracing::debug!("an importer was not reached: {error}"),
                        },
                        Err(error) => refuse(&socket, 0, &error),
                    }
                    if let Some(peer) = desk.exporter().crowding(most_idle) {
                        turn_out(desk, &peer);
                    }
                }
                Err(errno @ (Errno::MFILE | Errno::NFILE)) => {
                    // The spare descriptor serves to report the shortage.
                    let had_spare = self.spare.take().is_some();
                    if had_spare && let Ok(Some(socket)) = listener.accept(desk.incarnation()) {
                        refuse(&socket, 0, &os_error("share", "descriptor in the exporter", errno));
                    }
                    self.spare = rustix::io::fcntl_dupfd_cloexec(bell.descriptor(), 0).ok();
                    if !had_spare {
                        self.closed_until = Some(Instant::now() + CLOSED_FOR);
                        return;
                    }
                }
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(_) => return,
            }
        }
    }

    /// Drops connections that have not sent a greeting, and those that were cut and hold nothing.
    pub(super) fn drop_silent_peers<'d>(&mut self, desks: impl Iterator<Item = &'d Arc<dyn Desk>>) {
        if self.looked.elapsed() < LOOK_EVERY {
            return;
        }
        self.looked = Instant::now();
        for desk in desks {
            for peer in desk.exporter().peers() {
                let is_cut = !peer.connected.load(Ordering::Relaxed);
                // Its greeting may be waiting to be read.
                let is_silent = peer.line.get().is_none()
                    && peer.since.elapsed() > HELLO_WITHIN
                    && !is_readable(peer.socket.as_fd());
                if is_cut || is_silent {
                    disconnect(&**desk, &peer);
                }
            }
        }
    }

    /// Answers the requests of an importer.
    fn answer(&self, desk: &dyn Desk, peer: &Peer) {
        let mut buffer = [0_u8; LONGEST + 1];
        // Requests that are read and not yet answered. A batch has many.
        let mut requests = Vec::new();
        for _ in 0..QUESTIONS_AT_ONCE {
            let (bytes, descriptors) = match receive(peer.socket.as_fd(), &mut buffer) {
                Ok(Received::Message(bytes, descriptors)) => (bytes, descriptors),
                Ok(Received::Nothing) => break,
                Ok(Received::Cut { descriptors }) => {
                    let error = if descriptors {
                        os_error("share", "descriptor in the exporter", Errno::MFILE)
                    } else {
                        Error::new(ErrorKind::InvalidArgument, "share", "the message is too long")
                    };
                    return turn_away(desk, peer, &error);
                }
                // Nothing is granted for the requests.
                Ok(Received::End) | Err(_) => return disconnect(desk, peer),
            };
            let said = match Message::decode(&buffer[..bytes]) {
                Some(Message::Open { question, key, wants, secret }) if peer.line.get().is_some() => {
                    requests.push(Request { question, key, wants, secret });
                    let is_full = requests.len() >= AT_ONCE;
                    if is_full { self.open(desk, peer, std::mem::take(&mut requests)) } else { Ok(()) }
                }
                // In the order of the messages: an allocation is abandoned after it was granted.
                other => self
                    .open(desk, peer, std::mem::take(&mut requests))
                    .and_then(|()| answer_other(desk, peer, other, descriptors)),
            };
            if let Err(error) = said {
                return turn_away(desk, peer, &error);
            }
        }
        if let Err(error) = self.open(desk, peer, requests) {
            turn_away(desk, peer, &error);
        }
    }

    /// Opens allocations for an importer, and answers in the order of its requests. Fails only if the importer cannot be reached.
    fn open(&self, desk: &dyn Desk, peer: &Peer, requests: Vec<Request>) -> Result<()> {
        if !requests.is_empty() {
            check_answers(desk)?;
        }
        let is_heir = desk.standing().is_heir;
        let grant = |request: Request| {
            let granted = desk.exporter().grant(peer.id, request.key, request.secret).map_err(|error| {
                if is_heir && error.kind() == ErrorKind::Expired {
                    Error::new(ErrorKind::Expired, "open_shared", "it does not keep the memory of this ticket")
                } else {
                    error
                }
            });
            (request, granted)
        };
        let granted: Vec<_> = requests.into_iter().map(grant).collect();
        let exported = spread(granted, &self.slow, |(request, granted)| {
            let exported = granted.map(|grant| {
                let handle = if request.wants.memory { desk.export(&grant, 0).map(Some) } else { Ok(None) };
                (handle, grant)
            });
            (request, exported)
        });
        // The count keeps the memory from here on. The blocks drop before the answers, so that a thread that drops a buffer after
        // an open is its last owner. They drop in this thread, for which the end of adopted memory does not wait.
        let exported = exported.into_iter().map(|(request, exported)| {
            let exported = exported.map(|(handle, grant)| {
                let Grant { memory, transport, bytes, counts, ready } = grant;
                // An importer that has the memory mapped gets no handle.
                let handle = handle.map(|handle| {
                    let further = handle.as_ref().map_or(0, |_| u32::try_from(memory.parts() - 1).unwrap_or(u32::MAX));
                    (handle.unwrap_or_else(|| MemoryHandle::new(transport, [0; 16], bytes, [0; 64])), further)
                });
                (handle, counts, ready)
            });
            (request, exported)
        });
        let exported: Vec<_> = exported.collect();
        let mut said = Ok(());
        for (Request { question, key, wants, .. }, exported) in exported {
            let answered = match exported {
                Err(error) => said.clone().and_then(|()| say(peer, &Message::refusal(question, &error), &[])),
                Ok((Err(error), ..)) => {
                    take_back(desk, peer, key);
                    said.clone().and_then(|()| say(peer, &Message::refusal(question, &error), &[]))
                }
                Ok((Ok((handle, further)), counts, ready)) => {
                    let opened = Opened {
                        transport: handle.transport,
                        device_uuid: handle.device_uuid,
                        bytes: handle.bytes,
                        payload: handle.payload,
                        with_descriptor: handle.descriptor.is_some(),
                        further,
                    };
                    let memory = handle.descriptor.as_ref().map(|descriptor| descriptor.as_ref().as_fd());
                    let counts = wants.counts.then(|| counts.as_fd());
                    let ready = wants.ready.then(|| ready.as_fd());
                    let descriptors: Vec<_> = memory.into_iter().chain(counts).chain(ready).collect();
                    said.clone()
                        .and_then(|()| say(peer, &Message::Opened { question, opened }, &descriptors))
                        .inspect_err(|_| take_back(desk, peer, key))
                }
            };
            said = said.and(answered);
        }
        said
    }
}

/// Drops an idle connection. An importer that has greeted connects again when it opens something.
fn turn_out(desk: &dyn Desk, peer: &Peer) {
    if peer.line.get().is_none() {
        let what = format!("{} has too many silent connections", peer.process);
        refuse(&peer.socket, 0, &Error::new(ErrorKind::OperatingSystem, "share", what));
    }
    disconnect(desk, peer);
}

fn disconnect(desk: &dyn Desk, peer: &Peer) {
    peer.connected.store(false, Ordering::Relaxed);
    let _ = rustix::net::shutdown(&peer.socket, rustix::net::Shutdown::Both);
    let freed = desk.exporter().peer_disconnected(peer.id);
    desk.free(freed);
}

/// Gives an importer the reason and drops its connection.
fn turn_away(desk: &dyn Desk, peer: &Peer, error: &Error) {
    refuse(&peer.socket, 0, error);
    disconnect(desk, peer);
}

/// Answers a message that is not a request for an allocation.
fn answer_other(desk: &dyn Desk, peer: &Peer, message: Option<Message>, descriptors: Vec<OwnedFd>) -> Result<()> {
    let has_greeted = peer.line.get().is_some();
    if !matches!(message, Some(Message::Abandon { .. } | Message::Ring)) {
        check_answers(desk)?;
    }
    match message {
        Some(Message::Hello { version, oldest }) if !has_greeted => welcome(desk, peer, version, oldest, descriptors),
        Some(Message::Parts { question, key, first }) if has_greeted => open_parts(desk, peer, question, key, first),
        Some(Message::Abandon { key }) if has_greeted => {
            take_back(desk, peer, key);
            Ok(())
        }
        // The flags are checked after all events of this round.
        Some(Message::Ring) if has_greeted => Ok(()),
        Some(Message::TakeOver { question }) if has_greeted => hand_over(desk, peer, question),
        Some(Message::Entrust { question, entrusted }) if has_greeted => {
            match take_over(desk, peer, entrusted, descriptors) {
                Ok(()) => say(peer, &Message::Entrusted { question }, &[]),
                Err(error) => say(peer, &Message::refusal(question, &error), &[]),
            }
        }
        _ => Err(Error::new(ErrorKind::InvalidArgument, "share", "the message is not a request")),
    }
}

/// Refuses requests once an heir answers. The importer then connects to the heir, which has the name.
fn check_answers(desk: &dyn Desk) -> Result<()> {
    if desk.exporter().has_handed_over() {
        return Err(Error::new(
            ErrorKind::Expired,
            "share",
            "the owner has handed its memory over, and its heir answers",
        ));
    }
    Ok(())
}

/// Gives the name of this desk to an heir, with the socket. Fails only if the importer cannot be reached.
fn hand_over(desk: &dyn Desk, peer: &Peer, question: u32) -> Result<()> {
    let given = check_heir(desk, peer).and_then(|()| {
        let unnamed = || Error::new(ErrorKind::InvalidState, "inherit", "the owner does not listen any more");
        let listener = desk.listener().ok_or_else(unnamed)?;
        let socket = listener.descriptor().ok_or_else(unnamed)?;
        let give = || say(peer, &Message::HandedOver { question }, &[(*socket).as_fd()]);
        desk.exporter().hand_over(peer.id, give, |other| name_heir(other, &peer.process))?;
        listener.give_up();
        Ok(())
    });
    given.or_else(|error| say(peer, &Message::refusal(question, &error), &[]))
}

/// Gives an importer the pidfd of the heir, which proves that the heir lives.
fn name_heir(peer: &Peer, heir: &Process) {
    if let Some(pidfd) = heir.pidfd() {
        // An importer that cannot be reached must find the heir by the name.
        let _ = say(peer, &Message::Heir, &[pidfd]);
    }
}

/// Refuses a process that may open memory and must not answer for it: it could give memory of its own under the number of any
/// allocation.
fn check_heir(desk: &dyn Desk, peer: &Peer) -> Result<()> {
    let openers = desk.standing().openers;
    let openers = if openers == Openers::Secret { Openers::SameUser } else { openers };
    Process::of_peer("inherit", peer.socket.as_fd(), openers).map(drop)
}

fn take_back(desk: &dyn Desk, peer: &Peer, key: ExportKey) {
    let freed = desk.exporter().take_back(peer.id, key);
    desk.free(freed.into_iter().collect());
}

fn welcome(desk: &dyn Desk, peer: &Peer, version: u16, oldest: u16, descriptors: Vec<OwnedFd>) -> Result<()> {
    check_version("share", "importer", version, oldest)?;
    let mut descriptors = descriptors.into_iter();
    let line = descriptors
        .next()
        .ok_or_else(|| Error::new(ErrorKind::InvalidArgument, "share", "the greeting has no line to ring on"))?;
    peer.process.identify("share", descriptors.next())?;
    let own = peer.process.own_pidfd("share")?;
    // Only this thread sets the line, and it was not set.
    let _ = peer.line.set(line);
    let welcome = Message::welcome(desk.incarnation(), desk.standing());
    let own: Vec<_> = own.iter().map(AsFd::as_fd).collect();
    say(peer, &welcome, &own)
}

/// Exports further parts of an allocation that an importer has opened. Fails only if the importer cannot be reached.
fn open_parts(desk: &dyn Desk, peer: &Peer, question: u32, key: ExportKey, first: u32) -> Result<()> {
    let exported = desk.exporter().granted(peer.id, key).and_then(|grant| {
        let parts = (0..grant.memory.parts()).skip(first as usize).take(MOST_PARTS);
        parts.map(|part| desk.export(&grant, part)).collect::<Result<Vec<_>>>()
    });
    let handles = match exported {
        Ok(handles) => handles,
        Err(error) => return say(peer, &Message::refusal(question, &error), &[]),
    };
    let parts = handles.iter().map(|handle| Part { bytes: handle.bytes, payload: handle.payload }).collect();
    let descriptors = handles.iter().filter_map(|handle| handle.descriptor.as_ref());
    let descriptors: Vec<_> = descriptors.map(|descriptor| descriptor.as_ref().as_fd()).collect();
    say(peer, &Message::PartsOpened { question, parts }, &descriptors)
}

/// Notes that another heir keeps an allocation, and takes its handles over if this heir lacks them.
fn take_over(desk: &dyn Desk, peer: &Peer, entrusted: Entrusted, descriptors: Vec<OwnedFd>) -> Result<()> {
    let invalid = |what: &str| Error::new(ErrorKind::InvalidArgument, "inherit", what);
    check_heir(desk, peer)?;
    let (exporter, is_heir) = (desk.exporter(), desk.standing().is_heir);
    if entrusted.parts.is_empty() {
        let claim_of_offer = || exporter.claim_offered(peer.id, entrusted.key, entrusted.secret);
        if exporter.is_offering() || !is_heir {
            claim_of_offer()?;
        }
        return if is_heir { exporter.claim(peer.id, entrusted.key, entrusted.secret) } else { Ok(()) };
    }
    if !is_heir {
        return Err(invalid("the owner of the memory is alive"));
    }
    let mut staged = peer.staged.lock();
    if entrusted.first == 0 {
        staged.clear();
    }
    if entrusted.count > MOST_ENTRUSTED || entrusted.first as usize != staged.len() {
        staged.clear();
        return Err(invalid("the parts of the allocation are not in order"));
    }
    let mut descriptors = descriptors.into_iter().map(Descriptor::new);
    let handles = entrusted.parts.iter().map(|part| {
        let handle = MemoryHandle::new(Transport::Descriptor, entrusted.device_uuid, part.bytes, part.payload);
        descriptors.next().map_or(handle.clone(), |descriptor| handle.with_descriptor(descriptor))
    });
    staged.extend(handles);
    if staged.len() < entrusted.count as usize {
        return Ok(());
    }
    let handles = std::mem::take(&mut *staged);
    drop(staged);
    let held = HeldMemory::entrusted(&entrusted, handles).ok_or_else(|| invalid("the parts are not the allocation"))?;
    desk.exporter().inherit(Arc::new(held), (entrusted.issued, entrusted.done), Some(peer.id))
}

/// Returns the maximum number of idle connections.
fn most_idle() -> usize {
    let descriptors = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    let share = usize::try_from(descriptors / DESCRIPTORS_FOR_ONE_IDLE).unwrap_or(MOST_IDLE);
    share.clamp(FEWEST_IDLE, MOST_IDLE)
}

fn say(peer: &Peer, message: &Message, descriptors: &[BorrowedFd<'_>]) -> Result<()> {
    send(peer.socket.as_fd(), &message.encode(), descriptors)
        .map_err(|errno| os_error("share", "connection to an importer", errno))
}

fn refuse(socket: &OwnedFd, question: u32, error: &Error) {
    tracing::debug!("an importer was refused: {error}");
    // An importer that does not listen gets no reason.
    let _ = send(socket.as_fd(), &Message::refusal(question, error).encode(), &[]);
}
