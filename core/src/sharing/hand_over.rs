//! The hand-over: a living owner gives its shared memory to an heir, which answers its tickets from then on. Nothing is copied.
//!
//! | step | process | effect |
//! | --- | --- | --- |
//! | offer | owner, in [`Runtime::hand_over`] | its device work so far is done; each file of readiness says `Offered`; it rings all importers |
//! | claim | heir: an importer that keeps the original handles | `Entrust` without parts, for each allocation |
//! | take | heir | `TakeOver`; refused while it lacks an allocation, or a share waits for device work |
//! | give | owner | `HandedOver` with the socket on which it listens. From here on, the heir is the owner |
//! | name | owner | `Heir` with the heir's pidfd, to each other importer |
//! | tell | owner | each file of readiness says `Done`; it rings all importers, which register at the heir as after a death |
//!
//! *One owner.* The send of `HandedOver` decides. Before it, the owner answers; it grants nothing after it, and closes its own copy of
//! the socket. *No gap.* The socket keeps its name. Importers that connect meanwhile wait in its queue. The kernel attributes these
//! connections to the owner until the heir listens, so their importers connect again. If the owner has ended by then, they do so for up
//! to half a second, unless they were connected to it and it had offered none. *No early open.* All shares have become ready before the send. *Deaths.* A process that dies before the send leaves the
//! other one as it was. After it, the heir has the name, or the name is free, and the next heir binds it (`heir.rs`). The flag `Done`
//! counts as the death of the owner.
//!
//! *An heir that does not answer.* It lives while its pidfd is not readable, and an importer waits until then. An importer without a
//! connection to the former owner opens the pidfd by the mark in the file of readiness (`identity.rs`). Without a mark, it considers
//! the heir dead once no process has had the name for a few seconds.
//!
//! The former owner no longer counts the opens of others: descriptors keep the memory, so each process frees its own mapping.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::Sharing;
use super::desk::Desk as _;
use super::heir::{Estate, Pause};
use super::importer::{Link, Mapper as _};
use super::searches::Search;
use super::segment::Progress;
use super::system::is_service;
use crate::capture::thread::refuse_in_capture;
use crate::runtime::Runtime;
use highwater_hal::{Error, ErrorKind, Result};

const OPERATION: &str = "hand_over";

impl Runtime {
    /// Hands all shared memory of this runtime over to an heir: a process that has opened each of its tickets with
    /// [`OwnerDeath::Inherit`](crate::OwnerDeath::Inherit), or holds them with [`Holder::hold`](crate::ipc::Holder::hold). Nothing is
    /// copied. The heir answers the tickets from then on, and no open is refused meanwhile. The memory that this runtime
    /// inherited is handed over, too.
    ///
    /// The call first waits for the device work of this process, and then, for at most `limit`, for an heir. Once it has returned, this
    /// process may end. It may also continue to use its buffers, as an importer does. A buffer that it drops afterward does not wait in
    /// limbo. It cannot share memory that it has not shared before.
    ///
    /// The process may drop its buffers before it ends, because the descriptors keep the memory.
    ///
    /// ```
    /// use std::time::Duration;
    /// use highwater_core::{ImportOptions, OwnerDeath, Runtime};
    /// use highwater_mock::{MockGpu, MockOptions};
    ///
    /// let gpu = MockGpu::open(MockOptions::new())?;
    /// let old = Runtime::new(gpu.clone())?;
    /// let weights = old.device(0)?.allocate_shared::<f32>(1000)?;
    /// old.device(0)?.create_stream()?.fill(&weights, 0.5_f32)?;
    /// let ticket = weights.share()?;
    ///
    /// // The engine that replaces it. Here it is another runtime of the same process.
    /// let new = Runtime::new(gpu)?;
    /// let options = ImportOptions::new().with_owner_death(OwnerDeath::Inherit);
    /// let kept = new.open_shared_with::<f32>(&ticket, &options)?;
    ///
    /// old.hand_over(Duration::from_secs(10))?;
    /// // The ticket opens, and `new` answers it.
    /// assert_eq!(new.open_shared::<f32>(&ticket)?.len(), 1000);
    /// assert_eq!(new.device(0)?.create_stream()?.download(&kept)?, vec![0.5; 1000]);
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// After an error, this runtime still owns its own memory. Some of the memory that it had inherited may be handed over.
    /// - `InvalidState`: no heir that keeps all of the memory took it in time; the runtime shares nothing, or another thread hands it
    ///   over; or the sharing thread calls.
    /// - `Unsupported`: some shared memory is adopted or has no descriptor, or the rendezvous is an inherited descriptor.
    /// - `Capture`: this thread is inside a capture, or a stream of a device takes part in one.
    /// - `Forked` or `ShuttingDown`. Otherwise an error of earlier device work.
    pub fn hand_over(&self, limit: Duration) -> Result<()> {
        let inner = &self.inner;
        inner.check(OPERATION)?;
        refuse_in_capture(OPERATION)?;
        if is_service() {
            let what = "the sharing thread, which answers the heir, must not wait for it";
            return Err(Error::new(ErrorKind::InvalidState, OPERATION, what).with_hint("call it from another thread"));
        }
        for device in 0..inner.devices.len() {
            self.device(device as u32)?.synchronize()?;
        }
        match inner.sharing.get() {
            Some(sharing) => sharing.hand_over(limit),
            None => Err(nothing_shared()),
        }
    }
}

fn nothing_shared() -> Error {
    Error::new(ErrorKind::InvalidState, OPERATION, "this runtime shares no memory that an heir could take")
        .with_hint("share a buffer, and open its ticket in the heir, before the hand-over")
}

impl Sharing {
    fn hand_over(&self, limit: Duration) -> Result<()> {
        self.meeting.check_named()?;
        // `None` for a time that does not end.
        let until = Instant::now().checked_add(limit);
        let estates = self.estates();
        let mut count = 0;
        for exporter in std::iter::once(&self.exporter).chain(estates.iter().map(|estate| estate.exporter())) {
            let offered = exporter.offer()?;
            if offered > 0 {
                exporter.wait_for_heir(until)?;
            }
            count += offered;
        }
        // The names that were handed over are to be forgotten.
        self.ring();
        if count == 0 { Err(nothing_shared()) } else { Ok(()) }
    }

    /// Notices the hand-overs of other processes.
    pub(super) fn look_after_hand_overs(self: &Arc<Self>) {
        for (link, progress) in self.importer.hand_overs() {
            match progress {
                Progress::None => {}
                Progress::Offered => self.take_over(link),
                Progress::Done => self.has_been_handed_over(&link),
            }
        }
    }

    /// Turns to the heir of an exporter that has handed over.
    pub(super) fn has_been_handed_over(self: &Arc<Self>, link: &Arc<Link>) {
        if self.importer.handed_over(link, &self.bell) {
            self.succeed(*link.incarnation());
        }
    }

    /// Takes the memory of an exporter that hands over, if this process keeps some of it.
    fn take_over(self: &Arc<Self>, link: Arc<Link>) {
        let incarnation = *link.incarnation();
        if self.importer.heirs_of(&link).is_empty() {
            return;
        }
        // As in `succeed`: the service must not wait for another process.
        let sharing = Arc::downgrade(self);
        let begun = self.heirs.searches.begin("inherit", incarnation, move |search| take(&sharing, &link, search));
        if let Err(error) = begun {
            crate::warnings::warning!("memory that is handed over was not taken: {error}");
        }
    }

    /// Tries once to take the memory. Returns whether the hand-over is over.
    fn try_to_take(&self, link: &Arc<Link>, search: &Search) -> bool {
        let mapper = self.mapper_of(search);
        let imports = self.importer.heirs_of(link);
        let is_offered = link.hand_over() == Progress::Offered && !link.has_no_process();
        if !is_offered && let Some(socket) = link.read_late(&mapper) {
            self.inherit_from(link, socket);
            return true;
        }
        if imports.is_empty() || !is_offered || self.is_stopping() || mapper.check().is_err() {
            return true;
        }
        match self.importer.take_over(&imports, link, &mapper) {
            Ok(socket) => {
                self.inherit_from(link, socket);
                true
            }
            Err(error) => {
                tracing::debug!("memory that is handed over was not taken yet: {error}");
                link.is_cut()
            }
        }
    }

    /// Answers for the memory of a living owner, with its socket.
    fn inherit_from(&self, link: &Arc<Link>, socket: OwnedFd) {
        // What the owner has dropped since the claim is not among them.
        let imports = self.importer.heirs_of(link);
        let Some(first) = imports.first() else { return };
        let mut estates = self.heirs.lock();
        match Estate::given(first.ticket.exporter(), link.openers(), socket) {
            Ok(estate) => {
                self.importer.handed_over(link, &self.bell);
                self.importer.inherit(&imports, &estate, &self.bell);
                estates.push(estate);
                self.ring();
            }
            // The name is free, and is inherited as that of a dead owner.
            Err(error) => crate::warnings::warning!("the socket of an owner was not taken over: {error}"),
        }
    }
}

/// Takes the memory of an exporter that hands over, or learns that another process has it.
fn take(sharing: &Weak<Sharing>, link: &Arc<Link>, search: &Search) {
    let mut pause = Pause::new();
    while let Some(sharing) = sharing.upgrade() {
        if sharing.try_to_take(link, search) {
            let incarnation = link.incarnation();
            search.note_over();
            if !sharing.importer.widowed(incarnation).is_empty() && !sharing.is_stopping() {
                sharing.succeed(*incarnation);
            }
            return;
        }
        drop(sharing);
        search.sleep(pause.next(), None);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use highwater_hal::{MemoryHandle, Transport};
    use highwater_mock::{MockGpu, MockOptions};

    use super::super::exporter::{Exporter, SharedFile, WeakMemory};
    use super::super::message::ExportKey;
    use super::super::{ImportOptions, OwnerDeath, Wanted};
    use super::*;

    /// Failed before: the open made a second mapping, whose owner was this process itself, and the next opens found that one.
    #[test]
    fn an_heir_that_opens_its_ticket_before_it_has_taken_the_socket_owns_the_memory() {
        let new = || Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
        let (owner, heir) = (new(), new());
        let buffer = owner.device(0).unwrap().allocate_shared::<u32>(10).unwrap();
        let ticket = buffer.share().unwrap();
        let options = ImportOptions::new().with_owner_death(OwnerDeath::Inherit);
        let kept = heir.open_shared_with::<u32>(&ticket, &options).unwrap();
        let sharing = heir.inner.sharing.get().unwrap();
        let link = sharing.importer.links().remove(0);
        // The thread that takes the socket stops here.
        let estates = sharing.heirs.lock();
        std::thread::scope(|scope| {
            let giving = scope.spawn(|| owner.hand_over(Duration::from_secs(60)));
            while link.hand_over() != Progress::Offered {
                std::thread::yield_now();
            }
            sharing.take_over(Arc::clone(&link));
            giving.join().unwrap().unwrap();
            // The service notices the hand-over.
            assert!(link.hand_over() == Progress::Done && sharing.importer.handed_over(&link, &sharing.bell));
            let opening = scope.spawn(|| {
                let wanted = Wanted { ticket: &ticket, device: 0 };
                sharing
                    .importer
                    .open(wanted, &sharing.mapper(), &mut None)
                    .map(|import| sharing.importer.release(&import, &sharing.bell))
            });
            let until = Instant::now() + Duration::from_secs(1);
            while !opening.is_finished() && Instant::now() < until {
                std::thread::yield_now();
            }
            drop(estates);
            opening.join().unwrap().unwrap();
        });
        let until = Instant::now() + Duration::from_secs(60);
        while kept.owner().is_some() && Instant::now() < until {
            std::thread::yield_now();
        }
        let opened = heir.open_shared::<u32>(&ticket).unwrap();
        assert!(opened.owner().is_none() && kept.owner().is_none(), "{:?}, {:?}", opened.owner(), kept.owner());
        assert_eq!((opened.ptr(), heir.statistics().sharing.mappings), (kept.ptr(), 1));
        drop((buffer, opened, kept));
    }

    /// Failed before: the thread that queries the work had removed the shares that wait for it from the list. The heir then answered for a
    /// share that was never ready.
    #[test]
    fn memory_is_not_given_while_a_thread_asks_after_work_that_is_not_done() {
        let gpu = MockGpu::open(MockOptions::parse("latency=300ms").unwrap()).unwrap();
        let owner = Runtime::new(gpu).unwrap();
        let device = owner.device(0).unwrap();
        let buffer = device.allocate_shared::<u32>(10).unwrap();
        device.create_stream().unwrap().fill(&buffer, 7_u32).unwrap();
        let ticket = buffer.share().unwrap();
        let exporter = &owner.inner.sharing.get().unwrap().exporter;
        assert_eq!(exporter.offer().unwrap(), 1);
        let key = ExportKey { index: ticket.index, serial: ticket.serial };
        exporter.claim_offered(1, key, None).unwrap();
        let mut given = None;
        // The service may query the work at the same time.
        while given.is_none() && exporter.is_watching() {
            exporter.watch(|_| {
                given.get_or_insert_with(|| exporter.hand_over(1, || Ok(()), |_| ()));
                Some(false)
            });
        }
        let error = given.expect("the work takes longer").unwrap_err();
        assert!(error.message().contains("device work before a share is not done"), "{error}");
    }

    #[derive(Debug)]
    struct Pages;

    impl SharedFile for Pages {
        fn handle(&self, bytes: u64) -> Result<MemoryHandle> {
            Ok(MemoryHandle::new(Transport::Descriptor, [0; 16], bytes, [0; 64]))
        }
    }

    fn register(exporter: &Exporter, transport: Transport) -> ExportKey {
        let memory: Weak<dyn SharedFile> = Weak::<Pages>::new();
        exporter.register(WeakMemory::Pinned(memory), 8, transport, [0; 16], None).unwrap()
    }

    #[test]
    fn memory_without_descriptors_is_not_offered() {
        let exporter = Exporter::default();
        assert_eq!(exporter.offer().unwrap(), 0);
        register(&exporter, Transport::Descriptor);
        register(&exporter, Transport::Legacy);
        let error = exporter.offer().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains("Legacy") && error.hint().contains("Transport::Descriptor"), "{error}");
        assert!(!exporter.is_offering());
    }

    #[test]
    fn an_offer_ends_with_its_time_and_two_threads_do_not_offer_at_once() {
        let exporter = Exporter::default();
        register(&exporter, Transport::Descriptor);
        assert_eq!(exporter.offer().unwrap(), 1);
        assert_eq!(exporter.offer().unwrap_err().kind(), ErrorKind::InvalidState);
        // An heir that claims nothing gets nothing.
        let given = exporter.hand_over(1, || unreachable!(), |_| ());
        assert_eq!(given.unwrap_err().kind(), ErrorKind::InvalidState);
        let error = exporter.wait_for_heir(Some(Instant::now())).unwrap_err();
        assert!(error.message().contains("the heir keeps all but 1 of 1 allocation"), "{error}");
        assert!(!exporter.is_offering() && !exporter.has_handed_over());
        assert_eq!(exporter.hand_over(1, || unreachable!(), |_| ()).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }

    #[test]
    fn an_heir_that_takes_the_memory_as_the_time_ends_has_it() {
        let exporter = Exporter::default();
        let key = register(&exporter, Transport::Descriptor);
        exporter.offer().unwrap();
        exporter.claim_offered(1, key, None).unwrap();
        let until = Instant::now() + Duration::from_millis(40);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| exporter.wait_for_heir(Some(until)));
            std::thread::sleep(Duration::from_millis(20));
            // The time ends while the lock of the exporter is held.
            let give = || {
                while Instant::now() < until + Duration::from_millis(40) {
                    std::thread::yield_now();
                }
                Ok(())
            };
            exporter.hand_over(1, give, |_| ()).unwrap();
            waiting.join().unwrap().unwrap();
        });
        assert!(exporter.has_handed_over(), "the exporter has forgotten that its heir answers");
    }

    #[test]
    fn claims_of_an_earlier_attempt_do_not_count() {
        let exporter = Exporter::default();
        let keys = [(); 2].map(|()| register(&exporter, Transport::Descriptor));
        exporter.offer().unwrap();
        exporter.claim_offered(1, keys[0], None).unwrap();
        assert!(exporter.hand_over(1, || unreachable!(), |_| ()).is_err());
        // The heir has dropped its buffer of the first allocation since.
        exporter.claim_offered(1, keys[1], None).unwrap();
        let error = exporter.hand_over(1, || Ok(()), |_| ()).unwrap_err();
        assert!(error.message().contains("all but 1 of 2"), "{error}");
        keys.iter().for_each(|key| exporter.claim_offered(1, *key, None).unwrap());
        exporter.hand_over(1, || Ok(()), |_| ()).unwrap();
        assert!(exporter.has_handed_over());
    }
}
