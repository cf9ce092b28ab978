//! Heirs: processes that answer under the name of a dead owner.
//!
//! | state of an allocation at a process that opened it with [`OwnerDeath::Inherit`](super::OwnerDeath::Inherit) | what moves it |
//! | --- | --- |
//! | the owner is alive | its pidfd: the process binds the owner's name. A hand-over: the owner gives its socket (`hand_over.rs`) |
//! | inherited: this process has the name and answers | the process drops its last buffer, and no other heir keeps it: closed, as by an owner |
//! | registered: another heir has the name and counts this process | the pidfd of that heir: as the death of the owner |
//! | orphaned: no process answers yet; this process opens the memory by its own mapping | it inherits or registers |
//! | without an heir, at a process that does not inherit: no process answers | an heir that appears within a few seconds |
//!
//! *One heir.* The kernel gives a name to one process at a time (`rendezvous.rs`), so binding it decides. *No early answer.* A process
//! binds the name after the pidfd of the owner is readable, never because a connection was cut. The driver has ended the owner's
//! device work by then. A ticket whose work was not done by then stays refused. *Counts.* The importers that live register at the
//! heir, which counts them as an owner does. A registration needs no memory: the importer has it mapped. *Several heirs.* Each heir
//! claims its allocations at the one that has the name, and passes the handles that the latter lacks. An allocation stays open to
//! new importers while any of its heirs keeps it.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use super::desk::Desk;
use super::exporter::{Exporter, Grant, Memory};
use super::held::HeldMemory;
use super::listening::ListeningSocket;
use super::message::{ExportKey, Standing};
use super::name::Name;
use super::options::Openers;
use super::rendezvous::{Listener, Meeting};
use super::system::Bell;
use crate::pool::deferred::DeferredFree;
use highwater_hal::{Error, MemoryHandle, Result};

/// The time between two looks for an heir, which doubles.
#[derive(Debug)]
pub(super) struct Pause {
    next: Duration,
    longest: Duration,
}

impl Pause {
    const SHORTEST: Duration = Duration::from_micros(500);
    pub(super) const LONGEST: Duration = Duration::from_millis(100);

    pub(super) fn new() -> Self {
        Self::between(Self::SHORTEST, Self::LONGEST)
    }

    pub(super) fn between(shortest: Duration, longest: Duration) -> Self {
        Self { next: shortest, longest }
    }

    /// Returns the time before the next attempt.
    pub(super) fn next(&mut self) -> Duration {
        let longer = (self.next * 2).min(self.longest);
        std::mem::replace(&mut self.next, longer)
    }
}

/// The name of a dead owner, and the allocations that this process answers for.
#[derive(Debug)]
pub(crate) struct Estate {
    name: Name,
    listener: Listener,
    openers: Openers,
    exporter: Exporter,
}

impl Estate {
    /// Takes the name of an owner that has ended. `None` if another process has it.
    pub(super) fn take(meeting: &Meeting, name: Name, openers: Openers) -> Result<Option<Arc<Self>>> {
        let listener = meeting.inherit(name, openers)?;
        Ok(listener.map(|listener| Arc::new(Self { name, listener, openers, exporter: Exporter::default() })))
    }

    /// Takes the name of a living owner with its socket.
    pub(super) fn given(name: Name, openers: Openers, socket: OwnedFd) -> Result<Arc<Self>> {
        let listener = Meeting::take_over(socket)?;
        Ok(Arc::new(Self { name, listener, openers, exporter: Exporter::default() }))
    }

    /// Answers for an allocation until the result is dropped. `numbers` are those of its latest share, and of the latest share whose
    /// work is done.
    pub(super) fn keep(
        self: &Arc<Self>,
        held: &Arc<HeldMemory>,
        numbers: (u64, u64),
        bell: &Arc<Bell>,
    ) -> Result<Kept> {
        self.exporter.inherit(Arc::clone(held), numbers, None)?;
        Ok(Kept { estate: Arc::clone(self), key: held.key, bell: Arc::clone(bell) })
    }

    /// Returns the socket with the name. `None` once another process has it.
    pub(super) fn socket(&self) -> Option<Arc<ListeningSocket>> {
        self.listener.descriptor()
    }

    /// Returns whether no allocation is left.
    pub(super) fn is_over(&self) -> bool {
        self.exporter.counts().blocks == 0
    }

    /// Gives the name up.
    pub(super) fn close(&self, meeting: &Meeting) {
        meeting.close(&self.listener, self.name);
        self.exporter.disconnect();
    }
}

impl Desk for Estate {
    fn exporter(&self) -> &Exporter {
        &self.exporter
    }

    fn listener(&self) -> Option<&Listener> {
        Some(&self.listener)
    }

    fn incarnation(&self) -> [u8; 16] {
        self.name.incarnation
    }

    fn standing(&self) -> Standing {
        Standing { is_heir: true, openers: self.openers }
    }

    fn export(&self, grant: &Grant, part: usize) -> Result<MemoryHandle> {
        match &grant.memory {
            Memory::Held(held) => held.handle(part),
            // An estate has no other memory.
            Memory::Device(..) | Memory::Pinned(_) => Err(Error::lacks("share", "ipc_transports")),
        }
    }

    fn free(&self, _: Vec<DeferredFree>) {}
}

/// An inherited allocation that this process keeps. Dropping it closes the allocation, unless another heir keeps it.
#[derive(Debug)]
pub(crate) struct Kept {
    estate: Arc<Estate>,
    key: ExportKey,
    /// Wakes the thread that ends the estate.
    bell: Arc<Bell>,
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.estate.exporter.disown(self.key);
        self.bell.ring();
    }
}
