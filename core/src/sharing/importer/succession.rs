//! The importer's part of a succession: it keeps the handles of memory, and turns to the heir of an exporter that has died.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::MutexGuard;

use super::super::heir::{Estate, Kept};
use super::super::held::HeldMemory;
use super::super::identity::Process;
use super::super::message::{ExportKey, LONGEST, Message};
use super::super::patience::{OPERATION, Patience};
use super::super::pinned_handle::PINNED;
use super::super::segment::{CountSegment, Progress, ReadySegment, place_of};
use super::super::system::{Bell, Received, invalid_message};
use super::super::ticket::Ticket;
use super::{
    Answer, Import, Importer, LOCK_LOOKS_EVERY, Link, MOST_FURTHER, Mapper, Registration, Succession, not_mapped,
};
use highwater_hal::{ErrorKind, MemoryHandle, Result, Transport};

impl Import {
    /// Returns the connection to the heir that counts this import.
    pub(super) fn heir(&self) -> Option<Arc<Link>> {
        match &*self.succession.lock() {
            Succession::Registered(registration) => Some(Arc::clone(&registration.link)),
            _ => None,
        }
    }

    /// Returns whether no process counts this import any more.
    pub(in super::super) fn is_widowed(&self) -> bool {
        match &*self.succession.lock() {
            Succession::None => self.link.has_no_process(),
            Succession::Registered(registration) => registration.link.has_no_process(),
            Succession::Inherited(_) | Succession::Over => false,
        }
    }

    /// Returns whether opens use this mapping, although its exporter has ended or handed over. If so, this process answers for the memory,
    /// or it keeps memory that no process counts, and may soon answer for it. A new mapping would have another owner, possibly this
    /// process.
    pub(in super::super) fn is_kept_here(&self) -> bool {
        match &*self.succession.lock() {
            Succession::Inherited(_) => true,
            Succession::None => self.is_held(),
            Succession::Registered(registration) => self.is_held() && registration.link.has_no_process(),
            Succession::Over => false,
        }
    }

    /// Returns the connection to the process that counts this import.
    fn counted_at(&self) -> Arc<Link> {
        self.heir().unwrap_or_else(|| Arc::clone(&self.link))
    }

    /// Returns the heir that the owner of the memory has named. This process is not counted there yet.
    pub(in super::super) fn named_heir(&self) -> Option<Arc<Process>> {
        self.counted_at().named_heir().cloned()
    }

    /// Returns whether the process behind a connection counts this import.
    pub(crate) fn is_of(&self, link: &Arc<Link>) -> bool {
        Arc::ptr_eq(&self.counted_at(), link)
    }

    /// Returns the process that owns the memory: the exporter, or the heir that it has handed over to. `None` if that is this process.
    pub(crate) fn owner(&self) -> Option<Arc<Process>> {
        let heir = self.heir();
        let is_handed_over = self.link.is_handed_over();
        match heir.filter(|_| is_handed_over) {
            // The heir may have handed over, too.
            Some(heir) => Some(Arc::clone(heir.last_process())),
            None if is_handed_over && self.is_inherited() => None,
            None => Some(Arc::clone(self.link.last_process())),
        }
    }

    /// Returns the owner that has died, for a message.
    pub(crate) fn last_owner(&self) -> String {
        let counted_at = self.counted_at();
        // The kernel does not tell the id of an heir that died before its name was read.
        match counted_at.named_heir.get().filter(|heir| heir.pid().is_some()) {
            Some(heir) => heir.to_string(),
            // It died before this process was counted there.
            None if counted_at.is_handed_over() => format!("the heir of {}", counted_at.process),
            None => counted_at.process.to_string(),
        }
    }

    /// Returns whether the original handles of the memory are kept here.
    pub(crate) fn is_held(&self) -> bool {
        self.held.get().is_some()
    }
}

impl Importer {
    /// Keeps the handles of an import, which is open, so that this process can be the heir of its exporter.
    ///
    /// `patience` is that of the open.
    pub(crate) fn hold(&self, import: &Import, mapper: &dyn Mapper, patience: &mut Option<Patience>) -> Result<()> {
        if import.is_held() {
            return Ok(());
        }
        let patience = patience.get_or_insert_with(|| self.limits.patience(&self.state.lock(), &import.ticket));
        let (handles, _) = import.link.fetch(&import.ticket, mapper, patience)?;
        // The open that the caller has counts already.
        import.link.abandon(import.export(), mapper, *patience);
        let device = (import.device != PINNED).then_some(import.device);
        let held = HeldMemory::of(&import.ticket, device, handles)?;
        // Another thread may have been faster, with handles of the same memory.
        let _ = import.held.set(Arc::new(held));
        Ok(())
    }

    /// Returns the imports of an exporter that are open and that no process counts: it has died, or its heir has.
    pub(crate) fn widowed(&self, incarnation: &[u8; 16]) -> Vec<Arc<Import>> {
        let state = self.state.lock();
        let is_widowed = |import: &&Arc<Import>| {
            let ticket = &import.ticket;
            // Others have no heirs.
            let may_have_heir = ticket.transport == Transport::Descriptor && import.link.may_have_heir;
            // The owner has dropped the others while it lived.
            let is_shared = import.open.is_open() && !import.slot().is_closed();
            may_have_heir && ticket.incarnation == *incarnation && is_shared && import.is_widowed()
        };
        state.mapped().filter(is_widowed).cloned().collect()
    }

    /// Returns the exporters of imports that are open and that no process counts.
    pub(crate) fn all_widowed(&self) -> HashSet<[u8; 16]> {
        let state = self.state.lock();
        let widowed = state.mapped().filter(|import| import.is_widowed());
        widowed.map(|import| import.ticket.incarnation).collect()
    }

    /// Returns whether imports have lost an heir that counted them.
    pub(crate) fn has_lost_heir(&self, incarnation: &[u8; 16]) -> bool {
        self.widowed(incarnation).iter().any(|import| import.heir().is_some())
    }

    /// Returns the imports that a connection counts, and whose handles are kept here, as far as the owner has not dropped them.
    pub(crate) fn heirs_of(&self, link: &Arc<Link>) -> Vec<Arc<Import>> {
        let is_heir = |import: &&Arc<Import>| {
            let is_shared = import.open.is_open() && !import.slot().is_closed();
            import.is_held() && is_shared && import.is_of(link)
        };
        self.state.lock().mapped().filter(is_heir).cloned().collect()
    }

    /// Takes over what an exporter hands over. Returns its socket.
    pub(crate) fn take_over(&self, imports: &[Arc<Import>], link: &Link, mapper: &dyn Mapper) -> Result<OwnedFd> {
        let mut patience = Patience::new(super::HEIR_ANSWERS_WITHIN);
        let held = imports.iter().filter_map(|import| import.held.get());
        link.take_over(held.map(|held| &**held), mapper, &mut patience)
    }

    /// Answers for the imports whose handles are kept here.
    pub(crate) fn inherit(&self, imports: &[Arc<Import>], estate: &Arc<Estate>, bell: &Arc<Bell>) {
        let mut kept: HashMap<ExportKey, Arc<Kept>> = HashMap::new();
        for import in imports {
            let Some(held) = import.held.get() else { continue };
            let keep = || {
                let numbers = import.ready.latest(place_of(import.index()).1);
                estate.keep(held, numbers, bell).map(Arc::new)
            };
            let known = kept.get(&held.key).map(|kept| Ok(Arc::clone(kept)));
            match known.unwrap_or_else(keep) {
                Ok(of_import) => {
                    kept.insert(held.key, Arc::clone(&of_import));
                    self.succeed(import, Succession::Inherited(of_import), bell);
                }
                Err(error) => crate::warnings::warning!("memory of a dead owner was not inherited: {error}"),
            }
        }
    }

    /// Registers imports at the heir of their exporter. Those that the heir does not have stay without one. `answering` becomes the
    /// connection to the heir. `has_ended` is as for [`Link::connect_or_wait`].
    ///
    /// # Errors
    /// Of the connection: the heir may answer later.
    pub(crate) fn register(
        &self,
        imports: &[Arc<Import>],
        answering: &mut Option<Arc<Link>>,
        has_ended: &mut bool,
        mapper: &dyn Mapper,
        bell: &Bell,
    ) -> Result<()> {
        let Some(first) = imports.first() else { return Ok(()) };
        let mut patience = Patience::new(super::HEIR_ANSWERS_WITHIN);
        let at_once = Patience::new(Duration::ZERO);
        let link = Link::connect_or_wait(&first.ticket, mapper, patience, at_once, &[], has_ended)?;
        let link = Arc::new(link);
        link.check_heir()?;
        *has_ended = false;
        *answering = Some(Arc::clone(&link));
        let mut registered = Ok(());
        for import in imports {
            patience.renew();
            let numbers = import.ready.latest(place_of(import.index()).1);
            let held = import.held.get().map(|held| &**held);
            match link.register(&import.ticket, held, numbers, mapper, &mut patience) {
                Ok(counted) => {
                    link.imports.fetch_add(1, Ordering::Relaxed);
                    let registration = Registration { link: Arc::clone(&link), counted };
                    self.succeed(import, Succession::Registered(registration), bell);
                }
                // `InvalidState`: the heir has not answered in time.
                Err(error)
                    if error.kind() == ErrorKind::InvalidState
                        || link.is_cut()
                        || link.process.has_ended()
                        || mapper.check().is_err() =>
                {
                    registered = Err(error);
                    break;
                }
                // A later attempt gets the same answer.
                Err(error) => tracing::debug!("an heir does not have an allocation: {error}"),
            }
        }
        self.state.lock().retire(&link);
        // The service has to wait for the end of the heir.
        bell.ring();
        registered
    }

    /// Enters the heir of an import.
    fn succeed(&self, import: &Arc<Import>, succession: Succession, bell: &Bell) {
        let before = {
            let mut now = import.succession.lock();
            if matches!(*now, Succession::Over) { succession } else { std::mem::replace(&mut *now, succession) }
        };
        if let Succession::Registered(registration) = before {
            registration.end(import.export(), &mut self.state.lock());
        }
        // The last buffer may be gone in the meantime.
        if !import.open.is_open() {
            self.unmap_soon([Arc::clone(import)], bell);
        }
    }
}

/// One open of an allocation at a process that answers for it, without a mapping.
#[derive(Debug, Clone)]
pub(crate) struct CountedAt {
    counts: Arc<CountSegment>,
    ready: Arc<ReadySegment>,
}

impl CountedAt {
    /// Returns the numbers of the latest share, and of the latest share whose work is done.
    pub(crate) fn numbers(&self, key: ExportKey) -> (u64, u64) {
        self.ready.latest(place_of(key.index).1)
    }

    /// Returns whether the owner has dropped the memory.
    pub(crate) fn is_closed(&self, key: ExportKey) -> bool {
        self.counts.slot(place_of(key.index).1, key.serial).is_closed()
    }

    /// Ends the open.
    pub(crate) fn end(&self, link: &Link, key: ExportKey) {
        let (_, slot) = place_of(key.index);
        let word = self.counts.slot(slot, key.serial);
        word.release();
        word.unmapped();
        // Raised in any case: an heir that keeps the memory for this process must look.
        self.counts.released().raise(slot);
        link.ring();
    }
}

impl Link {
    /// Returns whether the process at the other end has ended, or answers no more after a hand-over. The service may not have noticed the
    /// end yet. An heir that left out the imports of such a link would answer for a part of the memory, and return `Expired` for the rest.
    pub(in super::super) fn has_no_process(&self) -> bool {
        self.is_lost() || self.process.has_ended()
    }

    /// Returns whether the process has cut the connection and not ended. A process that ends loses its sockets, and so the name of a dead
    /// owner, before its device work has ended. Its pidfd is readable after that.
    pub(in super::super) fn may_still_work(&self) -> bool {
        self.is_cut() && !self.has_no_process()
    }

    /// Returns the state of a hand-over by the process at the other end.
    pub(in super::super) fn hand_over(&self) -> Progress {
        let parts = self.parts.lock();
        let ready = parts.iter().filter_map(|part| part.ready.as_ref());
        ready.map(|ready| ready.hand_over()).max().unwrap_or(Progress::None)
    }

    /// Returns whether the process at the other end is known to have offered no hand-over. It offers one before it gives its socket to an heir.
    pub(super) fn has_handed_nothing_over(&self) -> bool {
        let is_known = self.parts.lock().iter().any(|part| part.ready.is_some());
        is_known && self.hand_over() == Progress::None
    }

    /// Claims the allocations of a process that hands over, and takes its place. Returns the socket on which it listened.
    pub(in super::super) fn take_over<'h>(
        &self,
        held: impl Iterator<Item = &'h HeldMemory>,
        mapper: &dyn Mapper,
        patience: &mut Patience,
    ) -> Result<OwnedFd> {
        let given = self.claim_all(held, mapper, patience);
        // The answer to an earlier attempt may have come during this one.
        self.late.lock().take().map_or(given, Ok)
    }

    fn claim_all<'h>(
        &self,
        held: impl Iterator<Item = &'h HeldMemory>,
        mapper: &dyn Mapper,
        patience: &mut Patience,
    ) -> Result<OwnedFd> {
        for held in held {
            patience.renew();
            self.entrust(held, None, (0, 0), mapper, *patience)?;
        }
        patience.renew();
        let mut channel = self.channel(mapper, *patience)?;
        *channel = channel.wrapping_add(1);
        let question = *channel;
        self.takes_over.store(true, Ordering::Relaxed);
        self.say(&Message::TakeOver { question }, &[], mapper, *patience)?;
        match self.answer(question, &mut 0, mapper, *patience)? {
            Answer::HandedOver(descriptors) => {
                let missing = || invalid_message(OPERATION, "a hand-over without its socket");
                descriptors.into_iter().next().ok_or_else(missing)
            }
            Answer::Refused(error) => Err(error),
            Answer::Opened(..) | Answer::Parts(..) | Answer::Entrusted => Err(self.astray("an answer to no hand-over")),
        }
    }

    /// Reads the messages that answer no waiting request. Returns the exporter's socket, if it has handed over and [`Link::take_over`] gave
    /// up before the answer. In an unread message, the socket would keep the name, and no process would answer.
    pub(in super::super) fn read_late(&self, mapper: &dyn Mapper) -> Option<OwnedFd> {
        loop {
            // A thread that waits for an answer may have the lock for as long as an open.
            if let Some(channel) = self.channel.try_lock_for(LOCK_LOOKS_EVERY) {
                return self.late.lock().take().or_else(|| self.read_unasked(&channel));
            }
            mapper.check().ok()?;
        }
    }

    /// Reads as [`Link::read_late`]. The caller must hold the lock, so that no request of another thread waits for an answer.
    fn read_unasked(&self, _: &MutexGuard<'_, u32>) -> Option<OwnedFd> {
        let mut buffer = [0_u8; LONGEST + 1];
        while let Ok(Received::Message(bytes, descriptors)) = self.read(&mut buffer) {
            match Message::decode(&buffer[..bytes]) {
                Some(Message::HandedOver { .. }) => return descriptors.into_iter().next(),
                Some(Message::Heir) => self.note_heir(descriptors),
                _ => {}
            }
        }
        None
    }

    /// Notes the heir that the exporter names, by its pidfd.
    pub(super) fn note_heir(&self, descriptors: Vec<OwnedFd>) {
        let heir = descriptors.into_iter().next().and_then(Process::of_pidfd);
        heir.into_iter().for_each(|heir| drop(self.named_heir.set(Arc::new(heir))));
    }

    /// Returns the heir that the exporter has named, or else the exporter. An heir that was found dead may have no pidfd to wait for.
    pub(in super::super) fn last_process(&self) -> &Arc<Process> {
        self.named_heir.get().filter(|heir| heir.pidfd().is_some()).unwrap_or(&self.process)
    }

    /// Returns the heir that the exporter has named after a hand-over. `None` if the name did not reach this process, or this process is the
    /// heir.
    pub(in super::super) fn named_heir(&self) -> Option<&Arc<Process>> {
        if self.named_heir.get().is_none()
            && self.hand_over() == Progress::Done
            && let Some(channel) = self.channel.try_lock()
        {
            // The name came before the flag. A thread that has the lock reads it itself.
            if let Some(socket) = self.read_unasked(&channel) {
                *self.late.lock() = Some(socket);
            }
            drop(channel);
            self.find_heir();
        }
        self.named_heir.get()
    }

    /// Finds the heir by its mark in the file of readiness. The connection may have been cut before the name came.
    fn find_heir(&self) {
        if self.named_heir.get().is_some() {
            return;
        }
        let mark = self.parts.lock().iter().find_map(|part| part.ready.as_ref()?.heir());
        let heir = mark.and_then(Process::of_mark);
        // This process lives.
        let heir = heir.filter(|heir| heir.pid().map(i32::cast_unsigned) != Some(std::process::id()));
        heir.into_iter().for_each(|heir| drop(self.named_heir.set(Arc::new(heir))));
    }

    /// Opens an allocation. Returns the handles of all parts, and the count.
    pub(in super::super) fn fetch(
        &self,
        ticket: &Ticket,
        mapper: &dyn Mapper,
        patience: &mut Patience,
    ) -> Result<(Vec<MemoryHandle>, CountedAt)> {
        let key = ExportKey { index: ticket.index, serial: ticket.serial };
        let (granted, failed) = self.open(&[key], &[ticket.secret], true, mapper, patience);
        let granted = granted.into_iter().next().ok_or_else(|| failed.unwrap_or_else(not_mapped))?.1;
        let like = (granted.handle.transport, granted.handle.device_uuid);
        let mut handles = vec![granted.handle];
        while handles.len() <= granted.further.min(MOST_FURTHER) as usize {
            let first = u32::try_from(handles.len()).unwrap_or(u32::MAX);
            let parts = self.open_parts(key, first, like, mapper, *patience);
            handles.extend(parts.inspect_err(|_| self.abandon(key, mapper, *patience))?);
        }
        let bytes = handles.iter().try_fold(0_u64, |bytes, handle| bytes.checked_add(handle.bytes));
        if bytes != Some(ticket.allocation_bytes) || like.1 != ticket.device_uuid {
            self.abandon(key, mapper, *patience);
            return Err(invalid_message(OPERATION, "an allocation that is not the ticket's"));
        }
        Ok((handles, CountedAt { counts: granted.counts, ready: granted.ready }))
    }

    /// Counts memory of a dead exporter at its heir, and claims it if this process keeps it.
    pub(in super::super) fn register(
        &self,
        ticket: &Ticket,
        held: Option<&HeldMemory>,
        numbers: (u64, u64),
        mapper: &dyn Mapper,
        patience: &mut Patience,
    ) -> Result<CountedAt> {
        if let Some(held) = held
            && let Err(error) = self.entrust(held, None, numbers, mapper, *patience)
        {
            if error.kind() != ErrorKind::Expired {
                return Err(error);
            }
            let mut first = 0;
            while first < held.parts() {
                first += self.entrust(held, Some(first), numbers, mapper, *patience)?;
            }
        }
        let key = ExportKey { index: ticket.index, serial: ticket.serial };
        let (granted, failed) = self.open(&[key], &[ticket.secret], false, mapper, patience);
        let granted = granted.into_iter().next().ok_or_else(|| failed.unwrap_or_else(not_mapped))?.1;
        Ok(CountedAt { counts: granted.counts, ready: granted.ready })
    }

    /// Claims an allocation at an heir, or passes parts of it. Returns the number of parts.
    fn entrust(
        &self,
        held: &HeldMemory,
        first: Option<usize>,
        numbers: (u64, u64),
        mapper: &dyn Mapper,
        patience: Patience,
    ) -> Result<usize> {
        let (entrusted, handles) = held.entrust(first, numbers);
        let mut channel = self.channel(mapper, patience)?;
        *channel = channel.wrapping_add(1);
        let question = *channel;
        let descriptors = handles.iter().filter_map(|handle| handle.descriptor.as_ref());
        let descriptors: Vec<_> = descriptors.map(|descriptor| descriptor.as_ref().as_fd()).collect();
        self.say(&Message::Entrust { question, entrusted }, &descriptors, mapper, patience)?;
        match self.answer(question, &mut 0, mapper, patience)? {
            Answer::Entrusted => Ok(handles.len()),
            Answer::Refused(error) => Err(error),
            Answer::Opened(..) | Answer::Parts(..) | Answer::HandedOver(_) => Err(self.astray("an answer to no claim")),
        }
    }
}
