//! The sharing thread of a runtime. It answers importers, detects the death of processes, and completes pending releases.
//!
//! It starts with the first share or open and ends with the runtime. It waits on all its sources at once: its bell, the socket
//! that importers connect to, the connection and process of each importer, and the process and two threads of each exporter. While shares,
//! releases or adopted buffers wait for device work, it also queries that work, at growing intervals up to a millisecond.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use super::Sharing;
use super::desk::{Desk, LOOK_EVERY, Reception, Visit, Visitors};
use super::identity::Process;
use super::importer::Link;
use super::listing;
use super::system::{become_service, drain};

/// Interval between queries of device work: shortest and longest.
const SHORTEST_PAUSE: Duration = Duration::from_micros(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

pub(super) struct Service {
    sharing: Arc<Sharing>,
    reception: Reception,
    /// True once the socket for requests of the list was shut down.
    is_unlisted: bool,
}

/// A source that woke the service.
enum Source {
    Bell,
    Lister,
    Visit(Visit),
    LinkRings(Arc<Link>),
    LinkEnded(Arc<Link>),
    /// A thread of the exporter has ended.
    LinkThreadEnded(Arc<Link>),
    WatchedEnded(Arc<Process>),
}

impl Service {
    pub(super) fn new(sharing: Arc<Sharing>) -> Self {
        let reception = Reception::new(&sharing.bell);
        Self { sharing, reception, is_unlisted: false }
    }

    pub(super) fn run(mut self) {
        become_service();
        self.sharing.succeed_all();
        let mut pause = SHORTEST_PAUSE;
        while !self.sharing.is_stopping() {
            let sharing = Arc::clone(&self.sharing);
            let asking = sharing.exporter.is_watching()
                || sharing.importer.is_releasing()
                || sharing.files.is_releasing()
                || sharing.frees.has_adopted();
            let own: Arc<dyn Desk> = Arc::<Sharing>::clone(&sharing);
            let estates = sharing.estates().into_iter().map(|estate| -> Arc<dyn Desk> { estate });
            let visitors = Visitors::of(std::iter::once(own).chain(estates).collect());
            let woken = self.wait(&visitors, asking.then_some(pause));
            // A runtime that is shutting down or gone needs no service.
            let Some(_owner) = sharing.services().owner() else { return };
            if sharing.is_stopping() || sharing.services().check("share").is_err() {
                return;
            }
            let rung = !woken.is_empty();
            for source in woken {
                self.serve(source);
            }
            self.reception.drop_silent_peers(visitors.desks());
            sharing.settle();
            sharing.look_after_hand_overs();
            let moved = sharing.ask_after_work();
            pause = if rung || moved { SHORTEST_PAUSE } else { (pause * 2).min(LONGEST_PAUSE) };
        }
    }

    /// Waits for an event, for at most `pause` if it is given.
    fn wait(&mut self, visitors: &Visitors, pause: Option<Duration>) -> Vec<Source> {
        let sharing = Arc::clone(&self.sharing);
        self.reception.begin_round();
        let links = sharing.importer.links();
        let threads: Vec<_> = links.iter().map(|link| link.threads()).collect();
        let watched = sharing.deaths.processes();
        let mut sources = vec![Source::Bell];
        let mut ends = vec![PollFd::from_borrowed_fd(sharing.bell.descriptor(), PollFlags::IN)];
        let mut silent = visitors.watch(&self.reception, |visit, end| {
            sources.push(Source::Visit(visit));
            ends.push(PollFd::from_borrowed_fd(end, PollFlags::IN));
        });
        if let Some(lister) = sharing.lister().filter(|_| !self.is_unlisted) {
            sources.push(Source::Lister);
            ends.push(PollFd::from_borrowed_fd(lister.as_fd(), PollFlags::IN));
        }
        for (link, threads) in links.iter().zip(&threads) {
            for thread in threads.iter() {
                sources.push(Source::LinkThreadEnded(Arc::clone(link)));
                ends.push(PollFd::from_borrowed_fd(thread.as_fd(), PollFlags::IN));
            }
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
        let second = silent.then_some(LOOK_EVERY);
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
                    Source::Visit(ref visit) => visit.hung_up(),
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
            Source::Visit(visit) => self.reception.serve(visit, &self.sharing.bell),
            Source::Lister => {
                if let Some(lister) = self.sharing.lister() {
                    listing::answer(lister, || self.sharing.listing());
                }
            }
            Source::LinkRings(link) => {
                if !drain(link.line.as_fd()) {
                    self.sharing.importer.hung_up(&link);
                }
            }
            Source::LinkThreadEnded(link) => self.sharing.link_thread_ended(&link),
            Source::LinkEnded(link) => self.sharing.link_ended(&link),
            Source::WatchedEnded(process) => self.sharing.watched_ended(&process),
        }
    }
}

impl Sharing {
    /// Completes the releases of other processes: frees memory that leaves limbo, and unmaps memory that exporters have freed.
    pub(super) fn settle(&self) {
        let released = self.exporter.released();
        self.free(released);
        self.importer.unmap_closed(&self.mapper());
        self.settle_estates();
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
