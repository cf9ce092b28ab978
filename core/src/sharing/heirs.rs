//! The succession of a runtime: it takes the names of dead owners whose memory it keeps, or registers at their heirs.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

use super::Sharing;
use super::desk::Desk as _;
use super::heir::{Estate, Pause};
use super::held::no_descriptor;
use super::identity::Process;
use super::importer::{Import, Link, Mapper as _};
use super::patience::Patience;
use super::rendezvous::Meeting;
use super::searches::{Search, Searches};
use super::ticket::Ticket;
use highwater_hal::{Error, ErrorKind, Result, Transport};

/// The time in which an heir appears. A process that keeps memory waits longer for the name, which a child of the dead owner may have.
const APPEARS_WITHIN: Duration = Duration::from_secs(5);

/// The time between two attempts to reach an heir that lives and has not answered for [`APPEARS_WITHIN`].
const SELDOM: Duration = Duration::from_secs(1);

/// The dead owners that a runtime answers for, and those whose heirs it looks for.
#[derive(Debug)]
pub(super) struct Heirs {
    estates: Mutex<Vec<Arc<Estate>>>,
    pub(super) searches: Searches,
}

impl Heirs {
    pub(super) fn new(operation: &'static str) -> Result<Self> {
        Ok(Self { estates: Mutex::default(), searches: Searches::new(operation)? })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Vec<Arc<Estate>>> {
        self.estates.lock()
    }

    /// Gives all names up at the end of the runtime.
    pub(super) fn close(&self, meeting: &Meeting) {
        let estates = std::mem::take(&mut *self.estates.lock());
        estates.iter().for_each(|estate| estate.close(meeting));
    }
}

impl Sharing {
    /// Returns the dead owners that this runtime answers for.
    pub(super) fn estates(&self) -> Vec<Arc<Estate>> {
        self.heirs.estates.lock().clone()
    }

    /// Refuses a ticket whose memory this process could not inherit.
    pub(crate) fn check_heir(&self, ticket: &Ticket) -> Result<()> {
        if self.is_own(ticket) {
            if !self.exporter.has_handed_over() {
                return Ok(());
            }
            let message = "this runtime has handed the memory of this ticket over, and cannot inherit it again";
            return Err(Error::new(ErrorKind::InvalidState, "open_shared", message)
                .with_hint("open it with `OwnerDeath::Keep`, or inherit it with another `Runtime`"));
        }
        if ticket.transport != Transport::Descriptor {
            return Err(no_descriptor(ticket.transport));
        }
        self.meeting.check_heir(ticket.method)
    }

    /// Keeps the handles of an import, so that this process can inherit it.
    pub(super) fn hold(self: &Arc<Self>, import: &Arc<Import>, patience: &mut Option<Patience>) -> Result<()> {
        self.importer.hold(import, &self.mapper(), patience)?;
        if import.link.is_lost() {
            // The owner died or handed over in the meantime.
            self.succeed(import.ticket.incarnation);
        }
        Ok(())
    }

    /// Settles the imports of an owner that has died, or whose heir has.
    pub(super) fn succeed(self: &Arc<Self>, incarnation: [u8; 16]) {
        if self.importer.widowed(&incarnation).is_empty() || self.inherit(&incarnation) {
            return;
        }
        // The service must not wait for another process, which may wait for this one. The thread keeps the runtime's state only while it
        // looks, and not between two looks.
        let sharing = Arc::downgrade(self);
        let begun =
            self.heirs.searches.begin("inherit", incarnation, move |search| look(&sharing, incarnation, search));
        if let Err(error) = begun {
            crate::warnings::warning!("no heir of a dead owner was looked for: {error}");
        }
    }

    /// Settles the imports whose search ended with an earlier service.
    pub(super) fn succeed_all(self: &Arc<Self>) {
        self.importer.all_widowed().into_iter().for_each(|incarnation| self.succeed(incarnation));
    }

    /// Takes the name of a dead owner, if this process keeps memory of it. Returns whether this process is the heir.
    fn inherit(&self, incarnation: &[u8; 16]) -> bool {
        // Held to the end, so that two threads do not inherit at the same time.
        let mut estates = self.heirs.estates.lock();
        let widowed = self.importer.widowed(incarnation);
        if let Some(estate) = estates.iter().find(|estate| estate.incarnation() == *incarnation) {
            self.importer.inherit(&widowed, estate, &self.bell);
            return true;
        }
        let Some(first) = widowed.iter().find(|import| import.is_held()) else { return false };
        // An heir may have lost its sockets, and so the name.
        if first.named_heir().is_some_and(|heir| !heir.has_ended()) {
            return false;
        }
        match Estate::take(&self.meeting, first.ticket.exporter(), first.link.openers()) {
            Ok(Some(estate)) => {
                self.importer.inherit(&widowed, &estate, &self.bell);
                estates.push(estate);
                self.ring();
                true
            }
            Ok(None) => false,
            Err(error) => {
                tracing::debug!("the name of a dead owner was not taken: {error}");
                false
            }
        }
    }

    /// Looks once for the heir of an owner, and registers there. Returns whether the search is over.
    fn look_for_heir(&self, incarnation: &[u8; 16], quest: &mut Quest, search: &Search) -> bool {
        let widowed = self.importer.widowed(incarnation);
        let keeps = widowed.iter().any(|import| import.is_held());
        let mapper = self.mapper_of(search);
        if widowed.is_empty() || self.is_stopping() || mapper.check().is_err() {
            return true;
        }
        let named = widowed.iter().find_map(|import| import.named_heir());
        if let Some(heir) = &named {
            self.revoke_widowed(&widowed, |import| import.named_heir().is_some_and(|heir| heir.has_ended()));
            if !heir.has_ended() {
                quest.has_seen(Arc::clone(heir));
            }
        }
        if !quest.answering.as_ref().is_some_and(|link| link.may_still_work()) && self.inherit(incarnation) {
            return true;
        }
        match self.importer.register(&widowed, &mut quest.answering, &mut quest.has_ended, &mapper, &self.bell) {
            Ok(()) => true,
            Err(_) if mapper.check().is_err() => true,
            // A process has the name and does not answer, or this process or that one lacks descriptors. Neither proves that no heir lives.
            Err(error) if proves_nothing(error.kind()) => {
                quest.since = Instant::now();
                false
            }
            Err(error) if !keeps && quest.since.elapsed() > APPEARS_WITHIN => {
                tracing::debug!("a dead owner has no heir: {error}");
                // The importers of an owner that had handed over, whose heir died at once.
                self.revoke_widowed(&widowed, |_| true);
                true
            }
            Err(_) => false,
        }
    }

    /// Revokes the blocks of those imports whose owner has handed over, and whose heir is dead.
    fn revoke_widowed(&self, widowed: &[Arc<Import>], is_lost: impl Fn(&Import) -> bool) {
        let lost: Vec<_> = widowed.iter().filter(|import| is_lost(import)).collect();
        if !lost.is_empty() {
            self.revoke_if(|import| lost.iter().any(|lost| Arc::ptr_eq(lost, import)));
        }
    }

    /// Completes the releases of inherited memory, and gives up the names that no allocation needs any more.
    pub(super) fn settle_estates(&self) {
        let estates = self.estates();
        for estate in &estates {
            // Nothing of this process waits for the importers.
            drop(estate.exporter().released());
        }
        if estates.iter().any(|estate| estate.is_over()) {
            let over: Vec<_> = self.heirs.estates.lock().extract_if(.., |estate| estate.is_over()).collect();
            over.iter().for_each(|estate| estate.close(&self.meeting));
        }
    }
}

/// Returns whether an error of this kind is also possible while an heir lives.
fn proves_nothing(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::InvalidState | ErrorKind::OperatingSystem | ErrorKind::OutOfMemory)
}

/// What a search has found out.
struct Quest {
    /// The connection to the last heir.
    answering: Option<Arc<Link>>,
    /// True if the owner has ended, and the process that has its socket accepts no connections.
    has_ended: bool,
    /// The living heir that the owner has named.
    named: Option<Arc<Process>>,
    /// The latest time at which an heir was known to live; initially the beginning of the search.
    since: Instant,
}

impl Quest {
    fn has_seen(&mut self, heir: Arc<Process>) {
        self.named = Some(heir);
        self.since = Instant::now();
    }
}

/// Looks for the heir of an owner until the imports of this process are settled.
fn look(sharing: &Weak<Sharing>, incarnation: [u8; 16], search: &Search) {
    let started = Instant::now();
    let mut quest = Quest { answering: None, has_ended: false, named: None, since: started };
    let mut pause = Pause::new();
    while let Some(sharing) = sharing.upgrade() {
        if sharing.look_for_heir(&incarnation, &mut quest, search) {
            search.note_over();
            if sharing.importer.has_lost_heir(&incarnation) && !sharing.is_stopping() {
                // It died after the search.
                sharing.succeed(incarnation);
            }
            return;
        }
        drop(sharing);
        let named = quest.named.as_ref().filter(|heir| !heir.has_ended());
        // An heir that no process reaches may live for long.
        let is_long = named.is_some() && started.elapsed() > APPEARS_WITHIN;
        search.sleep(if is_long { SELDOM } else { pause.next() }, named);
    }
}

#[cfg(test)]
impl Heirs {
    pub(super) fn is_locked(&self) -> bool {
        self.estates.is_locked() || self.searches.is_locked()
    }

    pub(super) fn hold_lock(&self) -> impl Drop + '_ {
        crate::testing::Held((self.estates.lock(), self.searches.hold_lock()))
    }
}
