//! Device memory and page-locked memory shared between processes. One process allocates and shares; any number of others open. The
//! memory is freed when the last of them has released it or has died.
//!
//! # Protocol
//! 1. The exporter allocates with [`Device::allocate_shared`](crate::Device::allocate_shared) and calls
//!    [`DeviceBuffer::share`](crate::DeviceBuffer::share), which returns a [`Ticket`]: plain bytes for any channel.
//! 2. The importer calls [`Runtime::open_shared`](crate::Runtime::open_shared). The first open of an allocation sends a request
//!    to the exporter over a Unix socket, unless the share has prepared the open. It finds the socket by an abstract name, in a directory
//!    or by an inherited descriptor (`rendezvous.rs`). Both sides check the credentials of the other process (`identity.rs`). The answer
//!    contains the memory's handle and a table of counts in sealed shared memory (`counts.rs`). Only these two processes map the table.
//!    Later opens are one atomic operation on a word of that table.
//! 3. Each side drops its buffers independently. The count of an importer decreases when its streams have passed their last
//!    use. An allocation of the exporter that is still open elsewhere waits in *limbo*.
//!
//!    [`Runtime::share_all`](crate::Runtime::share_all) makes one message of many ranges, a [`TicketBatch`]. Its importer
//!    requests all allocations before it waits for the first answer, and counts each once for all ranges.
//! 4. When a process dies, at any point, its pidfd becomes readable in the other process. That process discards the table of
//!    the dead one, and with it everything that the dead process held. The state of a socket proves nothing: a live process may
//!    close it, and a forked child may keep it open. With the rendezvous `abstract` and `directory`, a child of `fork` keeps no socket on
//!    which its parent listens (`listening.rs`).
//!
//! One thread for each runtime (`service.rs`) answers requests and detects events. It starts with the first share or open.
//!
//! # Lifetime of a ticket
//! Any number of processes may open a ticket, once or repeatedly, while the exporter runs and keeps the buffer. A ticket does
//! not keep the memory: it *expires* if the exporter drops its buffer before any process has opened it. When `open_shared`
//! returns, the device work that was enqueued on the buffer before `share` is done.
//!
//! # Death of the exporter
//! With [`Transport::Descriptor`](crate::Transport), the importers keep their pages. With the other transports the memory
//! belongs to the exporter, and the vendor defines what remains of it. An importer that opened memory with
//! [`OwnerDeath::Release`] keeps nothing. Its blocks are revoked (`revocation.rs`). The memory is unmapped once the importer's own
//! work on it is done. `owner.rs` is the program's view of the exporter. An importer that opened memory with [`OwnerDeath::Inherit`]
//! takes the exporter's name, and answers its tickets (`heir.rs`). A living exporter gives it the name (`hand_over.rs`).

mod batch;
mod counts;
mod desk;
mod exporter;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzed;
mod hand_over;
mod heir;
mod heirs;
mod held;
mod holder;
mod identity;
mod importer;
mod joined;
mod listening;
mod listing;
mod message;
mod name;
mod open;
mod open_count;
mod options;
mod origin;
mod owner;
mod patience;
pub(crate) mod pinned;
mod pinned_handle;
mod processes;
mod rendezvous;
mod revocation;
mod searches;
mod segment;
mod service;
mod spread;
mod store;
mod survey;
mod system;
mod ticket;

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

pub use batch::TicketBatch;
pub use holder::{HeldAllocation, HeldState, Holder};
pub use options::{Openers, Rendezvous, SharingOptions};
pub use owner::{DeathWatch, ImportOptions, Owner, OwnerDeath};
pub use processes::{Allocation, Answer, OpenedAllocation, SharedAllocation, SharingProcess, processes};
pub use store::{DescriptorStore, HolderState};
pub use survey::SharingReport;
pub use ticket::Ticket;

pub(crate) use exporter::{MemoryPart, WeakMemory};
pub(crate) use importer::{Failed, Import, Wanted};
pub(crate) use message::ExportKey;
pub(crate) use origin::{Exported, Imported};
pub(crate) use rendezvous::Meeting;
pub(crate) use revocation::Revocation;

use crate::device_block::DeviceBlock;
use crate::ledger::DeviceBlockInfo;
use crate::own_thread::spawn;
use crate::pool::completion_events::CompletionEvent;
use crate::pool::deferred::{DeferredFree, DeferredFrees};
use crate::pool::device_memory::DeviceMemory;
use crate::pool::host_files::HostFiles;
use crate::services::Services;
use desk::Desk;
use exporter::{Exporter, Grant, Memory};
use heir::Pause;
use heirs::Heirs;
use highwater_hal::{DevicePtr, Error, ErrorKind, MemoryHandle, Result, Transport, fork::Generation};
use identity::Process;
use importer::{Importer, Link, Mapper, Pieces};
use joined::{Joined, unmap_joined};
use listening::ListeningSocket;
use message::Standing;
use name::Name;
use owner::{Deaths, NoticesDeaths};
use patience::Patience;
use pinned_handle::PINNED;
use rendezvous::Listener;
use searches::Search;
use segment::Progress;
use service::Service;
use system::{Bell, WaitForService};
use ticket::Secret;

/// The shortest and the longest pause between two looks for importers that hold an allocation.
const UNHELD_LOOKS: [Duration; 2] = [Duration::from_micros(20), Duration::from_millis(1)];
/// The time between two checks for stopped importers.
const STOPPED_LOOKS_EVERY: Duration = Duration::from_millis(10);

/// The shared and opened memory of a runtime. The first share or open creates it.
pub(crate) struct Sharing {
    frees: Arc<DeferredFrees>,
    files: Arc<HostFiles>,
    generation: Generation,
    /// This process. Read once, because `std::process::id` is a system call.
    pid: u32,
    incarnation: [u8; 16],
    boot: [u8; 16],
    exporter: Exporter,
    importer: Importer,
    /// The closures of the program that wait for deaths.
    deaths: Deaths,
    /// The dead owners that this runtime answers for.
    heirs: Heirs,
    bell: Arc<Bell>,
    /// Bound by the first share.
    listener: OnceLock<Listener>,
    meeting: Arc<Meeting>,
    binding: Mutex<()>,
    /// The socket on which other processes request the list of shared memory. Bound when the service starts; `None` if that failed.
    lister: OnceLock<Option<ListeningSocket>>,
    stopping: AtomicBool,
    trims: AtomicU64,
    trimmed_bytes: AtomicU64,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// The id of the latest service. It stays while another thread joins the service.
    thread_id: Mutex<Option<ThreadId>>,
    /// Held while the service starts or ends, so that at most one exists. The service itself never takes it.
    changing: Mutex<()>,
}

/// The memory that a runtime shares with other processes, and the memory of other processes that it has open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct SharingStatistics {
    /// Allocations of this runtime that were shared and are not yet freed.
    pub exported_blocks: u64,
    /// Bytes of `exported_blocks`.
    pub exported_bytes: u64,
    /// Of `exported_blocks`, allocations that this runtime has dropped and other processes still hold.
    pub limbo_blocks: u64,
    /// Bytes of `limbo_blocks`.
    pub limbo_bytes: u64,
    /// Processes that have opened an allocation and may hold it.
    pub peers: u64,
    /// Importers that ended without releasing their allocations.
    pub lost_peers: u64,
    /// Exporters that ended while this runtime was connected to them.
    pub lost_exporters: u64,
    /// Opens of allocations of other processes that buffers hold: one for each ticket, and one for each allocation of a batch.
    pub imports: u64,
    /// Allocations of other processes that are mapped, open or kept for the next open.
    pub mappings: u64,
    /// Bytes of `mappings`.
    pub mapped_bytes: u64,
    /// Blocks of page-locked memory of this runtime that can be shared, shared or not. The counts above contain those that were
    /// shared.
    pub pinned_blocks: u64,
    /// Bytes of `pinned_blocks`, in whole pages. They count toward the cap of page-locked memory.
    pub pinned_bytes: u64,
    /// Of `mappings`, those of page-locked memory.
    pub pinned_mappings: u64,
    /// Bytes of `pinned_mappings`, in whole pages. They do not count toward the cap of page-locked memory here.
    pub pinned_mapped_bytes: u64,
    /// Opens of allocations of other processes so far: one for each ticket, and one for each allocation of a batch.
    pub opens: u64,
    /// Of `opens`, those with an existing mapping.
    pub kept_opens: u64,
    /// Number of searches for memory that other processes have released. `Runtime::trim_shared` (earlier `Runtime::collect`),
    /// [`Runtime::trim`](crate::Runtime::trim), the end of the runtime, and allocations that found no memory make them.
    pub trims: u64,
    /// Bytes in limbo that the searches of `trims` freed. The sharing thread frees most of the memory earlier, as soon as it is released.
    pub trimmed_bytes: u64,
}

/// Maps and unmaps memory of other processes.
struct DeviceMapper<'s> {
    memory: &'s DeviceMemory,
    files: &'s HostFiles,
    bell: &'s Bell,
    meeting: &'s Meeting,
    /// The thread of a search; `None` for a call of the program.
    search: Option<&'s Search>,
}

impl Mapper for DeviceMapper<'_> {
    fn map(&self, device: u32, handle: &MemoryHandle) -> Result<DevicePtr> {
        let services = &self.memory.services;
        if device == PINNED {
            return pinned_handle::map(services, self.files, handle);
        }
        let ipc = services.ipc("open_shared")?;
        let ptr = self.memory.with_retry(|| ipc.open_memory(device, handle), || true)?;
        let bytes = usize::try_from(handle.bytes).unwrap_or(usize::MAX);
        services.ledger.insert_opened(DeviceBlockInfo { device, base: ptr, bytes }).inspect_err(|_| {
            // SAFETY: The memory was just opened, and no other code knows its address.
            let closed = unsafe { ipc.close_memory(device, ptr) };
            let _ = services.note(closed);
        })?;
        Ok(ptr)
    }

    fn unmap(&self, device: u32, ptr: DevicePtr) -> bool {
        if device == PINNED {
            // SAFETY: As below.
            return unsafe { self.files.close_opened(ptr.get() as usize) };
        }
        let services = &self.memory.services;
        let closed = services.ipc("close_memory").and_then(|ipc| {
            let block = services.ledger.remove_opened(device, ptr)?;
            // SAFETY: The ledger shows that the memory is mapped. The importer unmaps only memory that no buffer has open, and
            // a count decreases only when the streams that used the import have passed their last use.
            unsafe { ipc.close_memory(device, ptr) }.inspect_err(|_| {
                // The range is free in the ledger, so this cannot fail.
                let _ = services.ledger.insert_opened(block);
            })
        });
        // Refusals are counted and logged.
        services.note(closed).is_ok()
    }

    fn map_joined(&self, device: u32, bytes: u64, pieces: &mut Pieces<'_>) -> Result<DevicePtr> {
        let mut joined = Joined::reserve(self.memory, device, bytes)?;
        while let Some(handle) = pieces.next()? {
            joined.add(&handle)?;
        }
        joined.finish()
    }

    fn unmap_joined(&self, device: u32, ptr: DevicePtr) -> bool {
        // SAFETY: As in `unmap`.
        let unmapped = unsafe { unmap_joined(self.memory, device, ptr) };
        self.memory.services.note(unmapped).is_ok()
    }

    fn check(&self) -> Result<()> {
        if self.search.is_some_and(Search::has_to_end) {
            return Err(Error::new(ErrorKind::ShuttingDown, "inherit", "the runtime ends"));
        }
        self.memory.services.check("open_shared")
    }

    fn ending(&self) -> Option<BorrowedFd<'_>> {
        self.search.map(Search::ending)
    }

    fn bell(&self) -> &Bell {
        self.bell
    }

    fn meeting(&self) -> &Meeting {
        self.meeting
    }
}

impl Sharing {
    /// Creates the state. `operation` is the first operation that needs it.
    pub(crate) fn new(
        frees: Arc<DeferredFrees>,
        files: Arc<HostFiles>,
        meeting: Arc<Meeting>,
        operation: &'static str,
    ) -> Result<Self> {
        Ok(Self {
            generation: frees.memory.services.generation,
            frees,
            files,
            pid: std::process::id(),
            incarnation: highwater_hal::random(operation)?,
            boot: system::boot_id(),
            exporter: Exporter::default(),
            importer: Importer::default(),
            deaths: Deaths::default(),
            heirs: Heirs::new(operation)?,
            bell: Arc::new(Bell::new(operation)?),
            listener: OnceLock::new(),
            meeting,
            binding: Mutex::new(()),
            lister: OnceLock::new(),
            stopping: AtomicBool::new(false),
            trims: AtomicU64::new(0),
            trimmed_bytes: AtomicU64::new(0),
            thread: Mutex::default(),
            thread_id: Mutex::default(),
            changing: Mutex::new(()),
        })
    }

    fn services(&self) -> &Services {
        &self.frees.memory.services
    }

    fn mapper(&self) -> DeviceMapper<'_> {
        let (memory, files, bell, meeting) = (&self.frees.memory, &self.files, &self.bell, &self.meeting);
        DeviceMapper { memory, files, bell, meeting, search: None }
    }

    /// Returns a mapper whose waits end with the search.
    fn mapper_of<'s>(&'s self, search: &'s Search) -> DeviceMapper<'s> {
        DeviceMapper { search: Some(search), ..self.mapper() }
    }

    /// Wakes the service.
    fn ring(&self) {
        self.bell.ring();
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Starts the service if it does not run.
    pub(crate) fn start(self: &Arc<Self>, operation: &'static str) -> Result<()> {
        let runs = |thread: &Option<JoinHandle<()>>| thread.as_ref().is_some_and(|thread| !thread.is_finished());
        if runs(&self.thread.lock()) && !self.is_stopping() {
            return Ok(());
        }
        // Waits here if another thread is ending the service.
        let _changing = self.changing.lock();
        let mut thread = self.thread.lock();
        if runs(&thread) {
            return Ok(());
        }
        self.stopping.store(false, Ordering::Release);
        self.heirs.searches.allow();
        self.lister.get_or_init(|| {
            // Sharing works without it.
            let unlisted = |error: &Error| tracing::debug!("this runtime cannot be listed: {error}");
            ListeningSocket::make(|| listing::listen(&self.incarnation)).inspect_err(unlisted).ok()
        });
        let service = Service::new(Arc::clone(self));
        let started = spawn(("highwater-share", operation, ""), move || service.run())?;
        *self.thread_id.lock() = Some(started.thread().id());
        *thread = Some(started);
        Ok(())
    }

    /// Signals the service to end by itself, because the process is exiting.
    pub(crate) fn abandon(&self) {
        self.stopping.store(true, Ordering::Release);
    }

    /// Makes the service look after the adopted memory that waits. Starts it if necessary, unless this thread is one: what an
    /// adopted buffer kept is dropped there, and another thread may wait for its end.
    pub(crate) fn look_after_adopted(self: &Arc<Self>) {
        if system::is_service() || self.start("adopt").is_ok() {
            self.bell.ring();
        }
    }

    /// Ends the service and the searches for heirs, and waits for their end.
    pub(crate) fn stop(&self) {
        self.stop_service();
        // No lock is held here. The searches wait for no thread of this process.
        self.heirs.searches.wait_for_end();
    }

    /// Ends the service and waits for its end. Wakes the searches for heirs, which end, too. A sharing thread waits neither for itself nor
    /// for a sharing thread that waits for it. The latter is in a closure of the program, and ends later.
    fn stop_service(&self) {
        let service = *self.thread_id.lock();
        let _wait = match service.filter(|_| system::is_service()) {
            Some(service) => match WaitForService::begin(service) {
                Some(wait) => Some(wait),
                None => {
                    self.abandon();
                    return self.heirs.searches.signal_end();
                }
            },
            None => None,
        };
        let _changing = self.changing.lock();
        self.stopping.store(true, Ordering::Release);
        self.heirs.searches.signal_end();
        self.bell.ring();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread
            && crate::panics::has_panicked(thread)
        {
            crate::warnings::warning!("the sharing thread has panicked");
        }
    }

    /// Closes the connections of importers and accepts no more. Called at the end of the runtime.
    pub(crate) fn hang_up(&self) {
        if let Some(listener) = self.listener.get() {
            self.meeting.close(listener, self.name());
        }
        if let Some(lister) = self.lister() {
            // Another process may have a copy of the socket, so shut it down.
            let _ = rustix::net::shutdown(lister, rustix::net::Shutdown::Both);
        }
        self.exporter.disconnect();
        self.heirs.close(&self.meeting);
    }

    /// Returns the socket for requests of the list, if there is one.
    fn lister(&self) -> Option<&ListeningSocket> {
        self.lister.get()?.as_ref()
    }

    /// Listens for importers.
    fn listen(&self) -> Result<()> {
        if self.listener.get().is_some() {
            return Ok(());
        }
        let _binding = self.binding.lock();
        if self.listener.get().is_some() {
            return Ok(());
        }
        let listener = self.meeting.listen(self.name())?;
        // The lock is held, so the value is not set.
        let _ = self.listener.set(listener);
        self.bell.ring();
        Ok(())
    }

    // ---------------------------------------------------------------- exporting

    /// Returns the ticket of an allocation of this runtime, without its range.
    pub(crate) fn share(
        &self,
        memory: WeakMemory,
        export: &OnceLock<ExportKey>,
        transport: Transport,
        bytes: u64,
        device_uuid: [u8; 16],
        after: Vec<Arc<CompletionEvent>>,
    ) -> Result<Ticket> {
        self.listen()?;
        let is_pinned = memory.is_pinned();
        let key = match export.get() {
            Some(key) => *key,
            None => {
                // If two threads share for the first time at once, one of them registers.
                let _registering = self.binding.lock();
                match export.get() {
                    Some(key) => *key,
                    None => {
                        let key = self.exporter.register(memory, bytes, transport, device_uuid, self.new_secret()?)?;
                        *export.get_or_init(|| key)
                    }
                }
            }
        };
        let mut after = after;
        let waits = !after.is_empty();
        let number = match self.exporter.number(key, &mut after) {
            Some(number) => number,
            None => {
                // The heir cannot learn of the work.
                after.iter().try_for_each(|completion| self.services().is_passed(completion, true).map(drop))?;
                self.exporter.number_handed_over(key).unwrap_or_default()
            }
        };
        if waits {
            self.bell.ring();
        }
        if transport == Transport::Legacy {
            self.prepare(key);
        }
        Ok(Ticket {
            transport,
            is_pinned,
            method: self.meeting.method(),
            secret: self.exporter.secret(key),
            boot: self.boot,
            incarnation: self.incarnation,
            device_uuid,
            pid: self.pid,
            index: key.index,
            serial: key.serial,
            number,
            allocation_bytes: bytes,
            offset: 0,
            length: bytes,
        })
    }

    /// Prepares opens of an allocation, so that importers need no request. If this fails, importers send requests.
    fn prepare(&self, key: ExportKey) {
        let Some(Memory::Device(block, parts)) = self.exporter.to_prepare(key) else { return };
        if let [part] = &*parts
            && let Ok(handle) = self.export_part(&block, part, Transport::Legacy)
            && handle.descriptor.is_none()
        {
            self.exporter.prepare(key, &handle);
        }
    }

    /// Exports a part of a block that the caller keeps alive.
    fn export_part(&self, block: &DeviceBlock, part: &MemoryPart, transport: Transport) -> Result<MemoryHandle> {
        if let Some(handle) = part.handle() {
            return Ok(handle);
        }
        let ipc = self.services().ipc("share")?;
        // SAFETY: The block is alive, which keeps its parts.
        let mut handle = unsafe { ipc.export_memory(block.device, part.ptr, transport)? };
        handle.bytes = part.bytes;
        part.keep_handle(&handle);
        Ok(handle)
    }

    /// Returns the name under which importers find this runtime.
    fn name(&self) -> Name {
        Name { boot: self.boot, incarnation: self.incarnation }
    }

    /// Returns a secret for an allocation, if any process that has the ticket may open it.
    fn new_secret(&self) -> Result<Option<Secret>> {
        let has_secrets = self.meeting.openers == Openers::Secret;
        has_secrets.then(|| highwater_hal::random("share").map(Secret)).transpose()
    }

    /// Closes a shared allocation that its owner drops. Returns the free to run now.
    pub(crate) fn close(&self, key: ExportKey, free: DeferredFree) -> Option<DeferredFree> {
        self.exporter.close(key, Some(free))
    }

    /// Waits until no importer holds an allocation that was closed, at most `limit`. Waits only for processes that run. Returns whether no
    /// importer holds it.
    pub(crate) fn wait_unheld(&self, key: ExportKey, limit: Duration) -> bool {
        let [shortest, longest] = UNHELD_LOOKS;
        let (began, mut pause) = (Instant::now(), Pause::between(shortest, longest));
        let (mut next_check, mut before) = (Duration::ZERO, 0);
        loop {
            let holders = self.exporter.holders(key);
            if holders.is_empty() {
                return true;
            }
            let waited = began.elapsed();
            if waited >= limit {
                return false;
            }
            // The rest may be stopped once one has let go.
            if waited >= next_check || holders.len() < before {
                if holders.iter().all(|peer| peer.process.is_stopped()) {
                    return false;
                }
                next_check = waited + STOPPED_LOOKS_EVERY;
            }
            before = holders.len();
            std::thread::sleep(pause.next().min(limit - waited));
        }
    }

    /// Closes shared page-locked memory that its owner drops. The system frees it.
    pub(crate) fn close_pinned(&self, key: ExportKey) {
        self.exporter.close(key, None);
    }

    /// Frees and unmaps all memory that other processes have released, without waiting for the service. Returns the bytes that
    /// left limbo.
    pub(crate) fn trim(&self) -> u64 {
        let (_, before) = self.limbo();
        for peer in self.exporter.peers() {
            if peer.process.has_ended() {
                let freed = self.exporter.peer_ended(peer.id);
                self.free(freed);
            }
        }
        for estate in self.estates() {
            let ended = estate.exporter().peers().into_iter().filter(|peer| peer.process.has_ended());
            ended.for_each(|peer| drop(estate.exporter().peer_ended(peer.id)));
        }
        self.importer.try_refused_again();
        self.settle();
        self.ask_after_work();
        let (_, after) = self.limbo();
        let freed = before.saturating_sub(after);
        self.trims.fetch_add(1, Ordering::Relaxed);
        self.trimmed_bytes.fetch_add(freed, Ordering::Relaxed);
        freed
    }

    /// Returns the blocks and bytes that this runtime has dropped and other processes hold.
    pub(crate) fn limbo(&self) -> (u64, u64) {
        let counts = self.exporter.counts();
        (counts.limbo_blocks, counts.limbo_bytes)
    }

    /// Returns the processes that hold memory in limbo.
    pub(crate) fn holders_of_limbo(&self) -> String {
        self.exporter.holders_of_limbo()
    }

    // ---------------------------------------------------------------- importing

    /// Returns whether this runtime made a ticket.
    pub(crate) fn is_own(&self, ticket: &Ticket) -> bool {
        ticket.incarnation == self.incarnation
    }

    /// Returns the original memory of a ticket of this runtime, once the device work before the share is done.
    pub(crate) fn original(&self, ticket: &Ticket) -> Result<Memory> {
        let key = ExportKey { index: ticket.index, serial: ticket.serial };
        let (memory, ready) = self.exporter.own(key, ticket.allocation_bytes)?;
        importer::wait_ready(&ready, ticket.index, ticket.number, || self.services().check("open_shared"))?;
        Ok(memory)
    }

    /// Opens an allocation of another runtime. `patience` is that of the whole call, which the first wait sets.
    fn open(self: &Arc<Self>, wanted: Wanted<'_>, patience: &mut Option<Patience>) -> Result<Arc<Import>> {
        self.check_boot(wanted.ticket)?;
        let import = self.importer.open(wanted, &self.mapper(), patience)?;
        self.look_after_open(&import);
        Ok(import)
    }

    /// Turns to the heir of an import whose owner has died or handed over during the open. The service did not know it then.
    fn look_after_open(self: &Arc<Self>, import: &Import) {
        if import.link.is_lost() && import.is_widowed() {
            self.succeed(import.ticket.incarnation);
        }
    }

    /// Opens allocations of other runtimes, each once. If one cannot be opened, none is.
    fn open_all(
        self: &Arc<Self>,
        wanted: &[Wanted<'_>],
        patience: &mut Option<Patience>,
    ) -> std::result::Result<Vec<Arc<Import>>, Failed> {
        for (at, wanted) in wanted.iter().enumerate() {
            self.check_boot(wanted.ticket).map_err(|error| (at, error))?;
        }
        let imports = self.importer.open_all(wanted, &self.mapper(), patience)?;
        imports.iter().for_each(|import| self.look_after_open(import));
        Ok(imports)
    }

    fn check_boot(&self, ticket: &Ticket) -> Result<()> {
        // A process without `/proc` does not know its boot id.
        let knows = |boot: [u8; 16]| boot != [0; 16];
        if knows(ticket.boot) && knows(self.boot) && ticket.boot != self.boot {
            return Err(Error::new(
                ErrorKind::Expired,
                "open_shared",
                "the ticket is from another machine, or from before the last restart of this one",
            )
            .with_hint("request a new ticket from a process that runs on this machine"));
        }
        Ok(())
    }

    /// Releases an import once its streams have passed their completion events.
    pub(crate) fn release_after(&self, import: Arc<Import>, after: Vec<Arc<CompletionEvent>>, unmarked: bool) {
        self.importer.release_after(import, after, unmarked, &self.bell);
    }

    /// Notes a block that is revoked when the owner of its memory dies.
    pub(crate) fn watch_owner(self: &Arc<Self>, import: &Arc<Import>, block: &Arc<DeviceBlock>) {
        self.importer.add_revocable(import, block);
        // The owner may have died before the block was added. Memory that this process keeps after that has another owner now.
        let link = &import.link;
        let is_killed = link.process.is_killed() && link.hand_over() != Progress::Done;
        if (link.is_dead() || is_killed) && !import.is_kept_here() {
            self.revoke(link);
        } else if link.is_lost() {
            self.succeed(import.ticket.incarnation);
        }
    }

    /// Forgets a block that [`Sharing::watch_owner`] noted and whose owner is gone.
    pub(crate) fn forget_block(&self, block: &DeviceBlock) {
        self.importer.forget_revocable(block);
    }

    /// Revokes the blocks of a dead owner, and releases their memory once the work on it is done.
    fn revoke(&self, link: &Arc<Link>) {
        self.revoke_if(|import| import.is_of(link));
    }

    fn revoke_if(&self, is_revoked: impl Fn(&Arc<Import>) -> bool) {
        for (import, block) in self.importer.take_revocable(is_revoked) {
            if let Some(uses) = block.revoke(import.last_owner()) {
                self.importer.release_after_uses(import, uses, &self.bell);
            }
        }
    }

    /// Handles the end of a thread of an exporter's process. If the process was killed, nothing can keep it alive. This importer then
    /// releases the memory before the process has ended. All else waits for the end, because device work of the process may still run.
    fn link_thread_ended(self: &Arc<Self>, link: &Arc<Link>) {
        if self.importer.thread_ended(link, &self.bell) && link.hand_over() != Progress::Done {
            self.revoke(link);
        }
    }

    /// Handles the end of an exporter's process.
    fn link_ended(self: &Arc<Self>, link: &Arc<Link>) {
        if link.hand_over() == Progress::Done {
            // Its heir lives on.
            return self.has_been_handed_over(link);
        }
        if self.importer.link_ended(link, &self.bell) {
            self.revoke(link);
            self.succeed(*link.incarnation());
        }
    }

    /// Returns the owner behind a connection.
    pub(crate) fn owner_of(self: &Arc<Self>, process: &Arc<Process>) -> Option<Owner> {
        let witness: Weak<Self> = Arc::downgrade(self);
        Owner::new(process, witness)
    }

    /// Handles the end of a process for which closures wait.
    fn watched_ended(self: &Arc<Self>, process: &Arc<Process>) {
        // The memory is revoked before the closures run.
        for link in self.importer.links() {
            if link.process.has_ended() {
                self.link_ended(&link);
            }
        }
        self.deaths.call(process);
    }

    /// Unmaps the memory that no buffer has open.
    pub(crate) fn unmap_idle(&self) {
        self.importer.unmap_idle(&self.mapper());
    }

    /// Ends the importing side. All work has been waited for, so every import is released.
    pub(crate) fn end_imports(&self) {
        self.importer.release_passed(|_| true, true, &self.bell);
        self.importer.unmap_closed(&self.mapper());
        self.unmap_idle();
        self.importer.disconnect();
    }

    /// Returns the memory that this runtime shares and has open.
    fn listing(&self) -> listing::Listing {
        let estates = self.estates();
        let inherited = estates.iter().flat_map(|estate| estate.exporter().list());
        let exports = self.exporter.list().into_iter().chain(inherited).collect();
        listing::Listing { exports, imports: self.importer.list(), left_off: 0 }
    }

    pub(crate) fn statistics(&self) -> SharingStatistics {
        let estates = self.estates();
        let inherited = estates.iter().map(|estate| estate.exporter().counts());
        let exported = inherited.fold(self.exporter.counts(), std::ops::Add::add);
        let (mappings, mapped_bytes) = self.importer.mapped();
        SharingStatistics {
            exported_blocks: exported.blocks,
            exported_bytes: exported.bytes,
            limbo_blocks: exported.limbo_blocks,
            limbo_bytes: exported.limbo_bytes,
            peers: exported.peers,
            lost_peers: exported.lost_peers,
            lost_exporters: self.importer.lost_links(),
            imports: self.importer.live.load(Ordering::Relaxed),
            mappings,
            mapped_bytes,
            pinned_blocks: 0,
            pinned_bytes: 0,
            pinned_mappings: 0,
            pinned_mapped_bytes: 0,
            opens: self.importer.opens.load(Ordering::Relaxed),
            kept_opens: self.importer.kept_opens.load(Ordering::Relaxed),
            trims: self.trims.load(Ordering::Relaxed),
            trimmed_bytes: self.trimmed_bytes.load(Ordering::Relaxed),
        }
    }
}

impl Desk for Sharing {
    fn exporter(&self) -> &Exporter {
        &self.exporter
    }

    fn listener(&self) -> Option<&Listener> {
        self.listener.get()
    }

    fn incarnation(&self) -> [u8; 16] {
        self.incarnation
    }

    fn standing(&self) -> Standing {
        Standing { is_heir: false, openers: self.meeting.openers }
    }

    fn export(&self, grant: &Grant, number: usize) -> Result<MemoryHandle> {
        match &grant.memory {
            Memory::Device(block, parts) => self.export_part(block, &parts[number], grant.transport),
            Memory::Pinned(file) => file.handle(grant.bytes),
            Memory::Held(held) => held.handle(number),
        }
    }

    /// Frees memory that has left limbo, in the order of the streams that used it in this process.
    fn free(&self, freed: Vec<DeferredFree>) {
        if freed.is_empty() {
            return;
        }
        for free in freed {
            if free.unmarked { self.frees.strand(free) } else { self.frees.defer(free) }
        }
        self.services().trim_in_passing();
    }
}

impl std::fmt::Debug for Sharing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sharing").field("pid", &self.pid).finish_non_exhaustive()
    }
}

impl Drop for Sharing {
    fn drop(&mut self) {
        if !self.generation.is_current() {
            // The thread does not exist in this child, so its handle must not be touched.
            std::mem::forget(self.thread.get_mut().take());
        }
    }
}

impl NoticesDeaths for Sharing {
    fn deaths(&self) -> &Deaths {
        &self.deaths
    }

    fn attend(self: Arc<Self>, operation: &'static str) -> Result<()> {
        self.services().check(operation)?;
        // A closure that runs in the sharing thread must not wait for that thread.
        if system::is_service() { Ok(()) } else { self.start(operation) }
    }

    fn look_again(&self) {
        self.ring();
    }

    fn is_current(&self) -> bool {
        self.generation.is_current()
    }
}

#[cfg(test)]
impl Sharing {
    /// Returns whether a lock is held that must not be held during a call of the backend.
    pub(crate) fn is_locked(&self) -> bool {
        self.exporter.is_locked()
            || self.importer.is_locked()
            || self.deaths.is_locked()
            || self.heirs.is_locked()
            || self.binding.is_locked()
            || self.thread.is_locked()
            || self.thread_id.is_locked()
    }

    pub(crate) fn hold_locks(&self) -> impl Drop + '_ {
        crate::testing::Held((
            self.exporter.hold_lock(),
            self.importer.hold_locks(),
            (self.deaths.hold_lock(), self.heirs.hold_lock()),
            self.binding.lock(),
            (self.thread.lock(), self.thread_id.lock()),
            self.changing.lock(),
        ))
    }
}
