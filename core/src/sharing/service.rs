//! The sharing thread of a runtime. It answers importers, detects the death of processes, and completes pending releases.
//!
//! It starts with the first share or open and ends with the runtime. It waits on all its sources at once: its bell, the socket
//! that importers connect to, the connection and process of each importer, and the process of each exporter. While shares,
//! releases or adopted buffers wait for device work, it also queries that work, at growing intervals up to a millisecond.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use super::Sharing;
use super::exporter::{Grant, Peer};
use super::identity::Process;
use super::importer::{AT_ONCE, Link};
use super::listing;
use super::message::{
    ExportKey, LONGEST, MOST_PARTS, Message, OLDEST_PROTOCOL, Opened, PROTOCOL, PROTOCOL_OF_PARTS, Part,
};
use super::rendezvous::Listener;
use super::spread::spread;
use super::system::{Received, become_service, drain, is_readable, os_error, receive, send};
use super::ticket::Secret;
use highwater_hal::{Error, ErrorKind, Result};

/// Interval between queries of device work: shortest and longest.
const SHORTEST_PAUSE: Duration = Duration::from_micros(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);
/// Time limit for the greeting of an importer that has connected.
const HELLO_WITHIN: Duration = Duration::from_secs(5);
/// Interval between checks of connections that cannot wake the service.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Maximum number of requests of one importer that are answered before the other importers are served.
const QUESTIONS_AT_ONCE: usize = 64;
/// Limits on the idle connections of all processes together, those with nothing open: a maximum, and the descriptors of this
/// process required for each. Each connection uses up to three descriptors.
const MOST_IDLE: usize = 64;
const DESCRIPTORS_FOR_ONE_IDLE: u64 = 16;
/// Minimum number of idle connections, even with few descriptors.
const FEWEST_IDLE: usize = 4;

pub(super) struct Service {
    sharing: Arc<Sharing>,
    /// Released for a moment to tell an importer that no descriptor is left for it.
    spare: Option<OwnedFd>,
    /// Time until which no importer is accepted, because not even a spare descriptor was left.
    closed_until: Option<std::time::Instant>,
    /// Time of the last search for connections to drop.
    looked: std::time::Instant,
    /// True once the socket for requests of the list was shut down.
    is_unlisted: bool,
    /// True if the last exports took long.
    slow: AtomicBool,
}

/// A request of an importer for an allocation.
struct Request {
    question: u32,
    key: ExportKey,
    wants_counts: bool,
    wants_ready: bool,
    secret: Option<Secret>,
}

/// A source that woke the service.
enum Source {
    Bell,
    Listener,
    Lister,
    Question(Arc<Peer>),
    PeerEnded(Arc<Peer>),
    LinkRings(Arc<Link>),
    LinkEnded(Arc<Link>),
    WatchedEnded(Arc<Process>),
}

impl Service {
    pub(super) fn new(sharing: Arc<Sharing>) -> Self {
        let spare = rustix::io::fcntl_dupfd_cloexec(sharing.bell.descriptor(), 0).ok();
        let (looked, slow) = (std::time::Instant::now(), AtomicBool::new(false));
        Self { sharing, spare, closed_until: None, looked, is_unlisted: false, slow }
    }

    pub(super) fn run(mut self) {
        become_service();
        let mut pause = SHORTEST_PAUSE;
        while !self.sharing.is_stopping() {
            let sharing = &self.sharing;
            let asking = sharing.exporter.is_watching()
                || sharing.importer.is_releasing()
                || sharing.files.is_releasing()
                || sharing.frees.has_adopted();
            let woken = self.wait(asking.then_some(pause));
            // A runtime that is shutting down or gone needs no service.
            let Some(_owner) = self.sharing.services().owner() else { return };
            if self.sharing.is_stopping() || self.sharing.services().check("share").is_err() {
                return;
            }
            let rung = !woken.is_empty();
            for source in woken {
                self.serve(source);
            }
            self.drop_silent_peers();
            self.sharing.settle();
            let moved = self.sharing.ask_after_work();
            pause = if rung || moved { SHORTEST_PAUSE } else { (pause * 2).min(LONGEST_PAUSE) };
        }
    }

    /// Waits for an event, for at most `pause` if it is given.
    fn wait(&mut self, pause: Option<Duration>) -> Vec<Source> {
        let sharing = Arc::clone(&self.sharing);
        if self.closed_until.is_some_and(|until| until <= std::time::Instant::now()) {
            self.closed_until = None;
        }
        let peers = sharing.exporter.peers();
        let links = sharing.importer.links();
        let watched = sharing.deaths.processes();
        let mut sources = vec![Source::Bell];
        let mut ends = vec![PollFd::from_borrowed_fd(sharing.bell.descriptor(), PollFlags::IN)];
        let listener = sharing.listener.get().and_then(Listener::descriptor);
        if let Some(listener) = listener.filter(|_| self.closed_until.is_none()) {
            sources.push(Source::Listener);
            ends.push(PollFd::from_borrowed_fd(listener, PollFlags::IN));
        }
        if let Some(lister) = sharing.lister().filter(|_| !self.is_unlisted) {
            sources.push(Source::Lister);
            ends.push(PollFd::from_borrowed_fd(lister.as_fd(), PollFlags::IN));
        }
        let mut silent = false;
        for peer in &peers {
            silent |= peer.line.get().is_none() || !peer.connected.load(Ordering::Relaxed);
            if let Some(pidfd) = peer.process.pidfd() {
                sources.push(Source::PeerEnded(Arc::clone(peer)));
                ends.push(PollFd::from_borrowed_fd(pidfd, PollFlags::IN));
            }
            if peer.connected.load(Ordering::Relaxed) {
                sources.push(Source::Question(Arc::clone(peer)));
                ends.push(PollFd::from_borrowed_fd(peer.socket.as_fd(), PollFlags::IN));
            }
        }
        for link in &links {
            silent |= !link.has_line.load(Ordering::Relaxed);
            if let Some(pidfd) = link.process.pidfd() {
                sources.push(Source::LinkEnded(Arc::clone(link)));
                ends.push(PollFd::from_borrowed_fd(pidfd, PollFlags::IN));
            }
            if link.has_line.load(Ordering::Relaxed) {
                sources.push(Source::LinkRings(Arc::clone(link)));
                ends.push(PollFd::from_borrowed_fd(link.line.as_fd(), PollFlags::IN));
            }
        }
        for process in &watched {
            if let Some(pidfd) = process.pidfd() {
                sources.push(Source::WatchedEnded(Arc::clone(process)));
                ends.push(PollFd::from_borrowed_fd(pidfd, PollFlags::IN));
            }
        }
        let second = (silent || self.closed_until.is_some()).then_some(LOOK_EVERY);
        let timeout = pause.or(second).and_then(|pause| rustix::time::Timespec::try_from(pause).ok());
        match rustix::event::poll(&mut ends, timeout.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => return Vec::new(),
            Err(errno) => {
                crate::warnings::warning!("waiting for processes that share memory failed: {errno}");
                std::thread::sleep(LONGEST_PAUSE);
                return Vec::new();
            }
        }
        let events: Vec<PollFlags> = ends.iter().map(PollFd::revents).collect();
        let mut woken = Vec::new();
        for (source, events) in sources.into_iter().zip(events) {
            // Another process has a copy of the socket and has shut it down. It would wake this thread without end.
            if events.contains(PollFlags::HUP) {
                match source {
                    Source::Listener => sharing.listener.get().into_iter().for_each(Listener::hung_up),
                    Source::Lister => self.is_unlisted = true,
                    _ => {}
                }
            }
            if !events.is_empty() {
                woken.push(source);
            }
        }
        woken
    }

    fn serve(&mut self, source: Source) {
        match source {
            Source::Bell => self.sharing.bell.drain(),
            Source::Listener => self.let_in(),
            Source::Lister => {
                if let Some(lister) = self.sharing.lister() {
                    listing::answer(lister, || self.sharing.listing());
                }
            }
            Source::Question(peer) => self.answer(&peer),
            Source::PeerEnded(peer) => {
                let freed = self.sharing.exporter.peer_ended(peer.id);
                self.sharing.free(freed);
            }
            Source::LinkRings(link) => {
                if !drain(link.line.as_fd()) {
                    self.sharing.importer.hung_up(&link);
                }
            }
            Source::LinkEnded(link) => self.sharing.link_ended(&link),
            Source::WatchedEnded(process) => self.sharing.watched_ended(&process),
        }
    }

    // ---------------------------------------------------------------- importers

    /// Accepts the importers that have connected.
    fn let_in(&mut self) {
        let sharing = Arc::clone(&self.sharing);
        let Some(listener) = sharing.listener.get() else { return };
        let most_idle = most_idle();
        // A few at a time, so that accepted connections can greet before they count as idle.
        for _ in 0..most_idle / 2 {
            match listener.accept(sharing.incarnation) {
                Ok(None) => {}
                Ok(Some(socket)) => {
                    match Process::of_peer("share", socket.as_fd(), sharing.meeting.openers) {
                        Ok(process) => match listener.admit(socket) {
                            Ok(socket) => drop(sharing.exporter.add_peer(process, socket)),
                            Err(error) => tracing::debug!("an importer was not reached: {error}"),
                        },
                        Err(error) => refuse(&socket, 0, &error),
                    }
                    if let Some(peer) = sharing.exporter.crowding(most_idle) {
                        self.turn_out(&peer);
                    }
                }
                Err(errno @ (Errno::MFILE | Errno::NFILE)) => {
                    // The spare descriptor serves to report the shortage.
                    let had_spare = self.spare.take().is_some();
                    if had_spare && let Ok(Some(socket)) = listener.accept(sharing.incarnation) {
                        refuse(&socket, 0, &os_error("share", "descriptor in the exporter", errno));
                    }
                    self.spare = rustix::io::fcntl_dupfd_cloexec(sharing.bell.descriptor(), 0).ok();
                    if !had_spare {
                        self.closed_until = Some(std::time::Instant::now() + LONGEST_PAUSE * 20);
                        return;
                    }
                }
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(_) => return,
            }
        }
    }

    /// Drops connections that have not sent a greeting, and those that were cut and hold nothing.
    fn drop_silent_peers(&mut self) {
        if self.looked.elapsed() < LOOK_EVERY {
            return;
        }
        self.looked = std::time::Instant::now();
        for peer in self.sharing.exporter.peers() {
            let is_cut = !peer.connected.load(Ordering::Relaxed);
            // Its greeting may be waiting to be read.
            let is_silent =
                peer.line.get().is_none() && peer.since.elapsed() > HELLO_WITHIN && !is_readable(peer.socket.as_fd());
            if is_cut || is_silent {
                self.disconnect(&peer);
            }
        }
    }

    /// Drops an idle connection. An importer that has greeted connects again when it opens something.
    fn turn_out(&self, peer: &Peer) {
        if peer.line.get().is_none() {
            let what = format!("{} has too many silent connections", peer.process);
            refuse(&peer.socket, 0, &Error::new(ErrorKind::OperatingSystem, "share", what));
        }
        self.disconnect(peer);
    }

    fn disconnect(&self, peer: &Peer) {
        peer.connected.store(false, Ordering::Relaxed);
        let _ = rustix::net::shutdown(&peer.socket, rustix::net::Shutdown::Both);
        let freed = self.sharing.exporter.peer_disconnected(peer.id);
        self.sharing.free(freed);
    }

    /// Answers the requests of an importer.
    fn answer(&self, peer: &Peer) {
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
                    return self.turn_away(peer, &error);
                }
                // Nothing is granted for the requests.
                Ok(Received::End) | Err(_) => return self.disconnect(peer),
            };
            let said = match Message::decode(&buffer[..bytes]) {
                Some(Message::Open { question, key, wants_counts, wants_ready, secret })
                    if peer.line.get().is_some() =>
                {
                    requests.push(Request { question, key, wants_counts, wants_ready, secret });
                    if requests.len() < AT_ONCE { Ok(()) } else { self.open(peer, std::mem::take(&mut requests)) }
                }
                // In the order of the messages: an allocation is abandoned after it was granted.
                other => self
                    .open(peer, std::mem::take(&mut requests))
                    .and_then(|()| self.answer_other(peer, other, descriptors)),
            };
            if let Err(error) = said {
                return self.turn_away(peer, &error);
            }
        }
        if let Err(error) = self.open(peer, requests) {
            self.turn_away(peer, &error);
        }
    }

    /// Gives an importer the reason and drops its connection.
    fn turn_away(&self, peer: &Peer, error: &Error) {
        refuse(&peer.socket, 0, error);
        self.disconnect(peer);
    }

    /// Answers a message that is not a request for an allocation.
    fn answer_other(&self, peer: &Peer, message: Option<Message>, descriptors: Vec<OwnedFd>) -> Result<()> {
        let has_greeted = peer.line.get().is_some();
        match message {
            Some(Message::Hello { version, oldest }) if !has_greeted => {
                self.welcome(peer, version, oldest, descriptors)
            }
            Some(Message::Parts { question, key, first }) if has_greeted => self.open_parts(peer, question, key, first),
            Some(Message::Abandon { key }) if has_greeted => {
                self.take_back(peer, key);
                Ok(())
            }
            // The flags are checked after all events of this round.
            Some(Message::Ring) if has_greeted => Ok(()),
            _ => Err(Error::new(ErrorKind::InvalidArgument, "share", "the message is not a request")),
        }
    }

    fn take_back(&self, peer: &Peer, key: ExportKey) {
        let freed = self.sharing.exporter.take_back(peer.id, key);
        self.sharing.free(freed.into_iter().collect());
    }

    fn welcome(&self, peer: &Peer, version: u16, oldest: u16, descriptors: Vec<OwnedFd>) -> Result<()> {
        if oldest > PROTOCOL || version < OLDEST_PROTOCOL {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "share",
                format!("the importer speaks protocols {oldest} to {version}, the exporter protocol {PROTOCOL}"),
            ));
        }
        let mut descriptors = descriptors.into_iter();
        let line = descriptors
            .next()
            .ok_or_else(|| Error::new(ErrorKind::InvalidArgument, "share", "the greeting has no line to ring on"))?;
        peer.process.identify("share", descriptors.next())?;
        let own = peer.process.own_pidfd("share")?;
        peer.version.store(version, Ordering::Relaxed);
        // Only this thread sets the line, and it was not set.
        let _ = peer.line.set(line);
        let welcome =
            Message::Welcome { version: PROTOCOL, oldest: OLDEST_PROTOCOL, incarnation: self.sharing.incarnation };
        let own: Vec<_> = own.iter().map(AsFd::as_fd).collect();
        say(peer, &welcome, &own)
    }

    /// Opens allocations for an importer, and answers in the order of its requests. Fails only if the importer cannot be reached.
    fn open(&self, peer: &Peer, requests: Vec<Request>) -> Result<()> {
        let grant = |request: Request| {
            let granted = self.sharing.exporter.grant(peer.id, request.key, request.secret);
            (request, granted)
        };
        let granted: Vec<_> = requests.into_iter().map(grant).collect();
        let can_join = peer.version.load(Ordering::Relaxed) >= PROTOCOL_OF_PARTS;
        let exported = spread(granted, &self.slow, |(request, granted)| {
            let exported = granted.map(|grant| {
                let parts = grant.memory.parts();
                let handle = if parts == 1 || can_join { self.sharing.export(&grant, 0) } else { Err(no_parts(parts)) };
                (handle, grant)
            });
            (request, exported)
        });
        // The count keeps the memory from here on. The blocks drop before the answers, so that a thread that drops a buffer after
        // an open is its last owner. They drop in this thread, for which the end of adopted memory does not wait.
        let exported = exported.into_iter().map(|(request, exported)| {
            let exported = exported.map(|(handle, grant)| {
                let Grant { memory, counts, ready, .. } = grant;
                (handle, u32::try_from(memory.parts() - 1).unwrap_or(u32::MAX), counts, ready)
            });
            (request, exported)
        });
        let exported: Vec<_> = exported.collect();
        let mut said = Ok(());
        for (Request { question, key, wants_counts, wants_ready, .. }, exported) in exported {
            let answered = match exported {
                Err(error) => said.clone().and_then(|()| say(peer, &Message::refusal(question, &error), &[])),
                Ok((Err(error), ..)) => {
                    self.take_back(peer, key);
                    said.clone().and_then(|()| say(peer, &Message::refusal(question, &error), &[]))
                }
                Ok((Ok(handle), further, counts, ready)) => {
                    let opened = Opened {
                        transport: handle.transport,
                        device_uuid: handle.device_uuid,
                        bytes: handle.bytes,
                        payload: handle.payload,
                        with_descriptor: handle.descriptor.is_some(),
                        further,
                    };
                    let memory = handle.descriptor.as_ref().map(|descriptor| descriptor.as_ref().as_fd());
                    let counts = wants_counts.then(|| counts.as_fd());
                    let ready = wants_ready.then(|| ready.as_fd());
                    let descriptors: Vec<_> = memory.into_iter().chain(counts).chain(ready).collect();
                    said.clone()
                        .and_then(|()| say(peer, &Message::Opened { question, opened }, &descriptors))
                        .inspect_err(|_| self.take_back(peer, key))
                }
            };
            said = said.and(answered);
        }
        said
    }

    /// Exports further parts of an allocation that an importer has opened. Fails only if the importer cannot be reached.
    fn open_parts(&self, peer: &Peer, question: u32, key: ExportKey, first: u32) -> Result<()> {
        let exported = self.sharing.exporter.granted(peer.id, key).and_then(|grant| {
            let parts = (0..grant.memory.parts()).skip(first as usize).take(MOST_PARTS);
            parts.map(|part| self.sharing.export(&grant, part)).collect::<Result<Vec<_>>>()
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
}

/// Returns the error for an importer that knows no allocations of several parts.
fn no_parts(parts: usize) -> Error {
    let message = format!("the buffer has {parts} parts, which the importer's version cannot map");
    Error::new(ErrorKind::Unsupported, "share", message)
}

/// Returns the maximum number of idle connections.
fn most_idle() -> usize {
    let descriptors = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    let share = usize::try_from(descriptors / DESCRIPTORS_FOR_ONE_IDLE).unwrap_or(MOST_IDLE);
    share.clamp(FEWEST_IDLE, MOST_IDLE)
}

fn say(peer: &Peer, message: &Message, descriptors: &[std::os::fd::BorrowedFd<'_>]) -> Result<()> {
    send(peer.socket.as_fd(), &message.encode(), descriptors)
        .map_err(|errno| os_error("share", "connection to an importer", errno))
}

fn refuse(socket: &OwnedFd, question: u32, error: &Error) {
    tracing::debug!("an importer was refused: {error}");
    // An importer that does not listen gets no reason.
    let _ = send(socket.as_fd(), &Message::refusal(question, error).encode(), &[]);
}

impl Sharing {
    /// Completes the releases of other processes: frees memory that leaves limbo, and unmaps memory that exporters have freed.
    pub(super) fn settle(&self) {
        let released = self.exporter.released();
        self.free(released);
        self.importer.unmap_closed(&self.mapper());
    }

    /// Queries the device work that shares and releases wait for. Returns whether any of it was done.
    pub(super) fn ask_after_work(&self) -> bool {
        let published = self.exporter.is_watching()
            && self.exporter.watch(|completion| {
                let passed = self.services().is_passed(completion, false);
                passed.inspect_err(|error| crate::warnings::warning!("device work before a share failed: {error}")).ok()
            });
        // An error proves nothing about the work: the import is kept, and the end of the process releases it.
        let released = self.importer.is_releasing()
            && self.importer.release_passed(
                |completion| self.services().is_surely_passed(completion),
                false,
                &self.bell,
            );
        let unregistered = self.files.collect();
        let waiting = self.frees.has_adopted().then(|| self.frees.len());
        if waiting.is_some() {
            // Refusals have been counted and logged.
            let _ = self.frees.trim(false);
        }
        let freed = waiting.is_some_and(|waiting| self.frees.len() < waiting);
        published || released || unregistered || freed
    }
}
