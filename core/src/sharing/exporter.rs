//! The exporting side: the shared allocations, the importers that have them open, and the memory in limbo.
//!
//! An allocation is an entry here from its first share until it is freed. When its owner drops it, the word of every importer
//! is closed. If an importer still holds it, the entry keeps the pending free (*limbo*) until the last importer has released it
//! or has died. The table of an importer is discarded only after its process has ended.
//!
//! No function here calls the backend, and no lock is held while a bell rings.

use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::fmt::Debug;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Instant, SystemTime};

use parking_lot::{Condvar, Mutex};

use super::held::HeldMemory;
use super::identity::Process;
use super::listing::{Listed, ListedExport};
use super::message::ExportKey;
use super::segment::{CountSegment, Progress, Readiness, ReadySegment, SLOTS, place_of};
use super::system::{is_readable, ring};
use super::ticket::{Secret, not_given_out};
use crate::device_block::DeviceBlock;
use crate::pool::completion_events::CompletionEvent;
use crate::pool::deferred::DeferredFree;
use highwater_hal::{DevicePtr, Error, ErrorKind, MemoryHandle, Result, Transport, counted};

#[derive(Debug, Default)]
pub(crate) struct Exporter {
    state: Mutex<State>,
    /// Number of watches in progress. The service skips the watches if it is zero.
    watching: AtomicU64,
    /// Signaled when an heir has taken all allocations.
    taken: Condvar,
    /// True while a thread processes the watches. One thread at a time publishes the numbers, so they appear in order.
    asking: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    exports: Vec<Option<Export>>,
    /// Indices that are free for reuse.
    free: Vec<u32>,
    last_serial: u64,
    peers: HashMap<u64, PeerBook>,
    last_peer: u64,
    ready: Vec<ReadyPart>,
    watches: Vec<Watch>,
    exported_bytes: u64,
    limbo_blocks: u64,
    limbo_bytes: u64,
    lost_peers: u64,
    /// True in the estate of a dead exporter.
    has_inherited: bool,
    hand_over: HandOver,
    /// The allocations that an heir has taken, while this process has buffers of them.
    handed_over: HashMap<ExportKey, Export>,
}

/// The state of a hand-over: [`Exporter::offer`].
#[derive(Debug, Default)]
enum HandOver {
    #[default]
    None,
    /// An heir may take all allocations. Importers claim those that they keep.
    Offered(Offer),
    /// An heir answers.
    Done,
}

#[derive(Debug, Default)]
struct Offer {
    claims: HashMap<u64, HashSet<ExportKey>>,
    /// The reason why the latest heir could not take them.
    refused: Option<Error>,
}

/// A part of a shared allocation, which the backend exports by its start. Only adopted memory has more than one part.
#[derive(Debug)]
pub(crate) struct MemoryPart {
    pub(crate) ptr: DevicePtr,
    pub(crate) bytes: u64,
    /// The vendor's handle, if it has no descriptor. Such a handle names the memory while it is allocated.
    handle: OnceLock<MemoryHandle>,
}

impl MemoryPart {
    pub(crate) fn new(ptr: DevicePtr, bytes: u64) -> Self {
        Self { ptr, bytes, handle: OnceLock::new() }
    }

    /// Returns the handle that [`MemoryPart::keep_handle`] kept.
    pub(crate) fn handle(&self) -> Option<MemoryHandle> {
        self.handle.get().cloned()
    }

    /// Keeps a handle for the importers. One with a descriptor is not kept, because the descriptor would stay open.
    pub(crate) fn keep_handle(&self, handle: &MemoryHandle) {
        if handle.descriptor.is_none() {
            // Another thread may have kept the same handle.
            let _ = self.handle.set(handle.clone());
        }
    }
}

/// Page-locked memory that is a file.
pub(crate) trait SharedFile: Any + Send + Sync + Debug {
    /// Returns the handle for an importer.
    fn handle(&self, bytes: u64) -> Result<MemoryHandle>;
}

/// The memory of an allocation, while it is used.
#[derive(Debug)]
pub(crate) enum Memory {
    /// A block, and its parts in the order of their addresses, without a gap.
    Device(Arc<DeviceBlock>, Arc<[MemoryPart]>),
    Pinned(Arc<dyn SharedFile>),
    /// Handles of memory whose owner is dead.
    Held(Arc<HeldMemory>),
}

impl Memory {
    /// Returns the number of handles that an importer needs.
    pub(crate) fn parts(&self) -> usize {
        match self {
            Self::Device(_, parts) => parts.len(),
            Self::Pinned(_) => 1,
            Self::Held(held) => held.parts(),
        }
    }
}

/// The memory of an allocation, which its owner keeps.
#[derive(Debug)]
pub(crate) enum WeakMemory {
    Device(Weak<DeviceBlock>, Arc<[MemoryPart]>),
    /// The same, of memory that other code allocated and may use again.
    Adopted(Weak<DeviceBlock>, Arc<[MemoryPart]>),
    Pinned(Weak<dyn SharedFile>),
    /// Inherited memory, which the exporter itself keeps.
    Held(Arc<HeldMemory>),
}

impl WeakMemory {
    fn upgrade(&self) -> Option<Memory> {
        match self {
            Self::Device(block, parts) | Self::Adopted(block, parts) => {
                block.upgrade().map(|block| Memory::Device(block, Arc::clone(parts)))
            }
            Self::Pinned(file) => file.upgrade().map(Memory::Pinned),
            Self::Held(held) => Some(Memory::Held(Arc::clone(held))),
        }
    }

    pub(crate) fn is_pinned(&self) -> bool {
        match self {
            Self::Device(..) | Self::Adopted(..) => false,
            Self::Pinned(_) => true,
            Self::Held(held) => held.is_pinned,
        }
    }

    fn device(&self) -> Option<u32> {
        match self {
            Self::Device(block, _) | Self::Adopted(block, _) => block.upgrade().map(|block| block.device),
            Self::Pinned(_) => None,
            Self::Held(held) => held.device,
        }
    }
}

/// The free of an allocation that its owner has dropped. `None` for page-locked memory, which the system frees.
type Limbo = Option<DeferredFree>;

#[derive(Debug)]
struct Export {
    serial: u64,
    bytes: u64,
    transport: Transport,
    /// `None` for page-locked memory.
    device: Option<u32>,
    device_uuid: [u8; 16],
    /// Time of the first share.
    since: SystemTime,
    memory: WeakMemory,
    /// The secret that an open must name, if the exporter admits any process that has a ticket.
    secret: Option<Secret>,
    /// Number of the most recent share.
    number: u64,
    /// Importers that have opened the allocation, or for which an open is prepared.
    peers: Vec<u64>,
    /// Set when the owner has dropped the block while importers hold it.
    limbo: Option<Limbo>,
    /// The heirs of inherited memory; `None` for memory of this process.
    heirs: Option<Heirs>,
}

/// The heirs that keep inherited memory open to new importers.
#[derive(Debug, Default)]
struct Heirs {
    /// True while this process keeps it.
    is_here: bool,
    /// Importers that keep it, while they hold it.
    claims: Vec<u64>,
    /// Of those, the ones that do not hold it yet.
    awaited: Vec<u64>,
}

impl Heirs {
    fn claim(&mut self, peer: u64) {
        if !self.claims.contains(&peer) {
            self.claims.push(peer);
            self.awaited.push(peer);
        }
    }
}

#[derive(Debug)]
struct ReadyPart {
    segment: Arc<ReadySegment>,
    file: Arc<OwnedFd>,
}

/// A share made before its device work was done.
#[derive(Debug)]
struct Watch {
    key: ExportKey,
    number: u64,
    after: Vec<Arc<CompletionEvent>>,
}

/// An importer, as the service communicates with it.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) id: u64,
    pub(crate) process: Process,
    pub(crate) socket: OwnedFd,
    /// The line that wakes the importer. Its `Hello` carries it.
    pub(crate) line: OnceLock<OwnedFd>,
    pub(crate) connected: AtomicBool,
    pub(crate) since: Instant,
    /// The parts so far of an allocation that it entrusts to this heir.
    pub(super) staged: Mutex<Vec<MemoryHandle>>,
}

/// An importer and what it holds.
#[derive(Debug)]
struct PeerBook {
    peer: Arc<Peer>,
    parts: Vec<Option<CountPart>>,
    /// Indices of the allocations that it has opened, or for which an open is prepared.
    exports: HashSet<u32>,
}

#[derive(Debug, Clone)]
struct CountPart {
    segment: Arc<CountSegment>,
    file: Arc<OwnedFd>,
}

/// An open that was granted but not yet answered.
#[derive(Debug)]
pub(crate) struct Grant {
    /// Keeps the memory allocated while the backend exports it.
    pub(crate) memory: Memory,
    pub(crate) transport: Transport,
    /// Bytes of the whole allocation.
    pub(crate) bytes: u64,
    pub(crate) counts: Arc<OwnedFd>,
    pub(crate) ready: Arc<OwnedFd>,
}

/// Maximum number of importers for which a share prepares opens. With more, each importer asks.
const MOST_PREPARED: usize = 16;

impl PeerBook {
    /// Returns the counts of the importer, if an open of an allocation can be prepared there.
    fn preparable(&self, key: ExportKey) -> Option<Arc<CountSegment>> {
        let (part, slot) = place_of(key.index);
        let part = self.parts.get(part).and_then(Option::as_ref)?;
        let can = self.peer.connected.load(Ordering::Relaxed) && !part.segment.slot(slot, key.serial).is_known();
        can.then(|| Arc::clone(&part.segment))
    }

    /// Returns whether the importer holds an allocation.
    fn holds(&self, index: u32, serial: u64, or_maps: bool) -> bool {
        let (part, slot) = place_of(index);
        let part = self.parts.get(part).and_then(Option::as_ref);
        part.is_some_and(|part| part.segment.slot(slot, serial).is_held(or_maps))
    }

    /// Withdraws the prepared open of an allocation. Returns `false` if the importer has the allocation open or mapped.
    fn withdraw(&self, index: u32, serial: u64) -> bool {
        let (part, slot) = place_of(index);
        let part = self.parts.get(part).and_then(Option::as_ref);
        part.is_none_or(|part| part.segment.slot(slot, serial).withdraw())
    }
}

impl Export {
    /// Returns whether a mapping alone keeps the memory. Such vendors require importers to unmap before the exporter frees.
    fn freed_after_unmap(&self) -> bool {
        self.transport == Transport::Legacy
    }
}

impl State {
    fn export(&self, key: ExportKey) -> Option<&Export> {
        self.exports.get(key.index as usize)?.as_ref().filter(|export| export.serial == key.serial)
    }

    fn export_mut(&mut self, key: ExportKey) -> Option<&mut Export> {
        self.exports.get_mut(key.index as usize)?.as_mut().filter(|export| export.serial == key.serial)
    }

    fn is_held(&self, index: u32) -> bool {
        let Some(Some(export)) = self.exports.get(index as usize) else { return false };
        let or_maps = export.freed_after_unmap();
        export
            .peers
            .iter()
            .filter_map(|peer| self.peers.get(peer))
            .any(|book| book.holds(index, export.serial, or_maps))
    }

    /// Returns whether an importer has an allocation open or mapped. It can open a mapped allocation without a request.
    fn is_used_by(&self, book: &PeerBook) -> bool {
        book.exports.iter().any(|index| {
            let export = self.exports.get(*index as usize).and_then(Option::as_ref);
            export.is_some_and(|export| book.holds(*index, export.serial, true))
        })
    }

    /// Removes an allocation.
    fn remove(&mut self, index: u32) -> Option<Export> {
        let export = self.exports.get_mut(index as usize)?.take()?;
        for peer in &export.peers {
            if let Some(book) = self.peers.get_mut(peer) {
                book.exports.remove(&index);
            }
        }
        self.exported_bytes -= export.bytes;
        self.free.push(index);
        self.watches.retain(|watch| watch.key != ExportKey { index, serial: export.serial });
        Some(export)
    }

    /// Returns the allocations that their owner keeps.
    fn kept(&self) -> impl Iterator<Item = (ExportKey, &Export)> {
        let exports = (0..).zip(&self.exports).filter_map(|(index, export)| Some((index, export.as_ref()?)));
        exports
            .filter(|(_, export)| export.limbo.is_none())
            .map(|(index, export)| (ExportKey { index, serial: export.serial }, export))
    }

    /// Publishes the state of a hand-over. The caller must ring the importers in `to_ring` without the lock.
    fn publish_hand_over(&self, progress: Progress, to_ring: &mut Vec<Arc<Peer>>) {
        self.ready.iter().for_each(|part| part.segment.set_hand_over(progress));
        to_ring.extend(self.peers.values().map(|book| Arc::clone(&book.peer)));
    }

    /// As [`Exporter::close`]. The caller must ring the importers in `to_ring` without the lock.
    fn close(&mut self, key: ExportKey, free: Limbo, to_ring: &mut Vec<Arc<Peer>>) -> Limbo {
        self.handed_over.remove(&key);
        let Some(export) = self.export(key) else { return free };
        let (part, slot) = place_of(key.index);
        for book in export.peers.iter().filter_map(|peer| self.peers.get(peer)) {
            let Some(part) = book.parts.get(part).and_then(Option::as_ref) else { continue };
            if part.segment.slot(slot, key.serial).close() {
                // The importer maps memory without an owner. The flag makes it unmap.
                part.segment.closed().raise(slot);
                to_ring.push(Arc::clone(&book.peer));
            }
        }
        if self.is_held(key.index) {
            self.limbo_blocks += 1;
            self.limbo_bytes += self.export(key).map_or(0, |export| export.bytes);
            if let Some(export) = self.export_mut(key) {
                export.limbo = Some(free);
            }
            None
        } else {
            self.remove(key.index);
            free
        }
    }

    /// Closes the inherited allocations among these that no heir keeps any more.
    fn close_disowned(&mut self, indices: impl IntoIterator<Item = u32>, to_ring: &mut Vec<Arc<Peer>>) {
        for index in indices {
            if self.is_disowned(index)
                && let Some(Some(export)) = self.exports.get(index as usize)
            {
                let key = ExportKey { index, serial: export.serial };
                self.close(key, None, to_ring);
            }
        }
    }

    /// Returns whether no heir keeps inherited memory any more.
    fn is_disowned(&self, index: u32) -> bool {
        let Some(Some(export)) = self.exports.get(index as usize) else { return false };
        let Some(heirs) = export.heirs.as_ref().filter(|_| export.limbo.is_none()) else { return false };
        let holds = |peer: &u64| self.peers.get(peer).is_some_and(|book| book.holds(index, export.serial, false));
        !heirs.is_here && heirs.awaited.is_empty() && !heirs.claims.iter().any(holds)
    }

    /// Takes an allocation out of limbo if no importer holds it.
    fn leave_limbo(&mut self, index: u32) -> Option<DeferredFree> {
        let export = self.exports.get(index as usize)?.as_ref()?;
        if export.limbo.is_none() || self.is_held(index) {
            return None;
        }
        let export = self.remove(index)?;
        self.limbo_blocks -= 1;
        self.limbo_bytes -= export.bytes;
        export.limbo.flatten()
    }
}

/// Totals of the exporting side.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ExporterCounts {
    pub(crate) blocks: u64,
    pub(crate) bytes: u64,
    pub(crate) limbo_blocks: u64,
    pub(crate) limbo_bytes: u64,
    pub(crate) peers: u64,
    pub(crate) lost_peers: u64,
}

impl std::ops::Add for ExporterCounts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            blocks: self.blocks + other.blocks,
            bytes: self.bytes + other.bytes,
            limbo_blocks: self.limbo_blocks + other.limbo_blocks,
            limbo_bytes: self.limbo_bytes + other.limbo_bytes,
            peers: self.peers + other.peers,
            lost_peers: self.lost_peers + other.lost_peers,
        }
    }
}

impl Exporter {
    /// Registers an allocation at its first share.
    pub(crate) fn register(
        &self,
        memory: WeakMemory,
        bytes: u64,
        transport: Transport,
        device_uuid: [u8; 16],
        secret: Option<Secret>,
    ) -> Result<ExportKey> {
        // Before the lock: the last reference to a block closes its export.
        let (device, since) = (memory.device(), SystemTime::now());
        let mut state = self.state.lock();
        if matches!(state.hand_over, HandOver::Done) {
            let what = "this runtime has handed its shared memory over, and an heir answers under its name";
            return Err(
                Error::new(ErrorKind::InvalidState, "share", what).with_hint("share new memory from another `Runtime`")
            );
        }
        let index = match state.free.last() {
            Some(&index) => index,
            None => u32::try_from(state.exports.len())
                .map_err(|_| Error::new(ErrorKind::OutOfMemory, "share", "2^32 allocations are shared at once"))?,
        };
        let (part, slot) = place_of(index);
        if part == state.ready.len() {
            let (segment, file) = ReadySegment::create()?;
            if matches!(state.hand_over, HandOver::Offered(_)) {
                segment.set_hand_over(Progress::Offered);
            }
            state.ready.push(ReadyPart { segment: Arc::new(segment), file: Arc::new(file) });
        }
        state.ready[part].segment.begin(slot);
        state.last_serial += 1;
        let serial = state.last_serial;
        let (number, peers, limbo, heirs) = (0, Vec::new(), None, None);
        let export = Export {
            serial,
            bytes,
            transport,
            device,
            device_uuid,
            since,
            memory,
            secret,
            number,
            peers,
            limbo,
            heirs,
        };
        if index as usize == state.exports.len() {
            state.exports.push(Some(export));
        } else {
            state.free.pop();
            state.exports[index as usize] = Some(export);
        }
        state.exported_bytes += bytes;
        Ok(ExportKey { index, serial })
    }

    /// Returns the importers that hold an allocation.
    pub(crate) fn holders(&self, key: ExportKey) -> Vec<Arc<Peer>> {
        let state = self.state.lock();
        let Some(export) = state.export(key) else { return Vec::new() };
        let or_maps = export.freed_after_unmap();
        let books = export.peers.iter().filter_map(|peer| state.peers.get(peer));
        books.filter(|book| book.holds(key.index, key.serial, or_maps)).map(|book| Arc::clone(&book.peer)).collect()
    }

    /// Returns the secret of an allocation, if it has one.
    pub(crate) fn secret(&self, key: ExportKey) -> Option<Secret> {
        let state = self.state.lock();
        state.export(key).or_else(|| state.handed_over.get(&key))?.secret
    }

    /// Returns the number of a share after device work. The ready segment reaches the number when the work is done. Without
    /// pending work, returns the number of the most recent share. `None` if an heir has the allocation: the caller must wait for `after`.
    pub(crate) fn number(&self, key: ExportKey, after: &mut Vec<Arc<CompletionEvent>>) -> Option<u64> {
        let mut state = self.state.lock();
        let state = &mut *state;
        let (part, slot) = place_of(key.index);
        let ready = &state.ready[part].segment;
        let export = state.exports.get_mut(key.index as usize).and_then(Option::as_mut);
        let export = export.filter(|export| export.serial == key.serial)?;
        if after.is_empty() {
            if ready.readiness(slot, export.number) == Readiness::Failed {
                // The query for earlier work failed. That work is now known to be done.
                ready.publish(slot, export.number);
            }
            return Some(export.number);
        }
        export.number += 1;
        let number = export.number;
        ready.issue(slot, number);
        state.watches.push(Watch { key, number, after: std::mem::take(after) });
        self.watching.store(state.watches.len() as u64, Ordering::Relaxed);
        Some(number)
    }

    /// Returns the memory of an allocation if [`Exporter::prepare`] can prepare an open of it. `None` if no importer needs it, if there are
    /// too many importers, or if an open must name a secret.
    pub(crate) fn to_prepare(&self, key: ExportKey) -> Option<Memory> {
        let state = self.state.lock();
        let export = state.export(key).filter(|export| export.limbo.is_none() && export.secret.is_none())?;
        let importers = state.peers.values().filter(|book| book.preparable(key).is_some()).count();
        (1..=MOST_PREPARED).contains(&importers).then(|| export.memory.upgrade()).flatten()
    }

    /// Prepares opens of an allocation by a handle, for the connected importers that have opened memory before. The handle must have no
    /// descriptor.
    pub(crate) fn prepare(&self, key: ExportKey, handle: &MemoryHandle) {
        let mut state = self.state.lock();
        let State { exports, peers, .. } = &mut *state;
        let export = exports.get_mut(key.index as usize).and_then(Option::as_mut);
        let Some(export) = export.filter(|export| export.serial == key.serial && export.limbo.is_none()) else {
            return;
        };
        for (id, book) in peers {
            let Some(segment) = book.preparable(key) else { continue };
            if segment.prepare(place_of(key.index).1, key.serial, handle) {
                book.exports.insert(key.index);
                // A word may have another generation again if the importer is at fault.
                if !export.peers.contains(id) {
                    export.peers.push(*id);
                }
            }
        }
    }

    pub(crate) fn is_watching(&self) -> bool {
        self.watching.load(Ordering::Relaxed) > 0
    }

    /// Checks the shares whose work was not done, oldest first. `is_passed` queries the backend without a lock, and returns
    /// `None` if the query fails. Returns whether the work of a share was done.
    pub(crate) fn watch(&self, mut is_passed: impl FnMut(&CompletionEvent) -> Option<bool>) -> bool {
        if self.asking.swap(true, Ordering::AcqRel) {
            return false;
        }
        let mut watches = std::mem::take(&mut self.state.lock().watches);
        let mut waiting: HashSet<ExportKey> = HashSet::new();
        let mut done = false;
        watches.retain_mut(|watch| {
            let mut failed = false;
            watch.after.retain(|completion| match is_passed(completion) {
                Some(passed) => !passed,
                None => {
                    failed = true;
                    true
                }
            });
            // In the order of their numbers: a ready number implies that all numbers before it are ready.
            if !failed && (!watch.after.is_empty() || waiting.contains(&watch.key)) {
                waiting.insert(watch.key);
                return true;
            }
            done = true;
            let state = self.state.lock();
            if state.export(watch.key).is_some() {
                let (part, slot) = place_of(watch.key.index);
                let number = if failed { ReadySegment::FAILED } else { watch.number };
                state.ready[part].segment.publish(slot, number);
            }
            false
        });
        let mut state = self.state.lock();
        // Shares made in the meantime are newer.
        watches.append(&mut state.watches);
        watches.retain(|watch| state.export(watch.key).is_some());
        self.watching.store(watches.len() as u64, Ordering::Relaxed);
        state.watches = watches;
        drop(state);
        self.asking.store(false, Ordering::Release);
        done
    }

    /// Returns the memory of an allocation of this process, and the segment that publishes its readiness. `bytes` is the size in
    /// the ticket.
    pub(crate) fn own(&self, key: ExportKey, bytes: u64) -> Result<(Memory, Arc<ReadySegment>)> {
        // Declared before the lock so that it drops after the lock, as in `grant`.
        let memory;
        let state = self.state.lock();
        let expired = || {
            Error::new(ErrorKind::Expired, "open_shared", "this runtime has freed the buffer of this ticket")
                .with_hint("keep the buffer until its tickets have been opened")
        };
        let export = state.export(key).filter(|export| export.limbo.is_none());
        let export = export.or_else(|| state.handed_over.get(&key)).ok_or_else(expired)?;
        memory = export.memory.upgrade().ok_or_else(expired)?;
        if bytes != export.bytes {
            return Err(not_given_out("its size is not the allocation's"));
        }
        let ready = Arc::clone(&state.ready[place_of(key.index).0].segment);
        Ok((memory, ready))
    }

    /// Closes an allocation that its owner drops, so that no importer opens it again. Returns the free to run now, or `None` if
    /// an importer holds the allocation, which then stays here. Page-locked memory has no free.
    pub(crate) fn close(&self, key: ExportKey, free: Limbo) -> Limbo {
        let mut to_ring = Vec::new();
        let freed = self.state.lock().close(key, free, &mut to_ring);
        ring_all(&to_ring);
        freed
    }

    // ---------------------------------------------------------------- inherited memory

    /// Takes an allocation of a dead exporter over. `issued` is the number of its latest share, and `done` that of the latest share
    /// whose device work was done. `from` is the importer that has entrusted it, or `None` if this process keeps it.
    pub(super) fn inherit(&self, held: Arc<HeldMemory>, (issued, done): (u64, u64), from: Option<u64>) -> Result<()> {
        let key = held.key;
        let (part, slot) = place_of(key.index);
        let mut state = self.state.lock();
        let state = &mut *state;
        let index = key.index as usize;
        if let Some(Some(export)) = state.exports.get_mut(index) {
            let other = || Error::new(ErrorKind::InvalidArgument, "inherit", "another allocation has its place");
            let heirs = export.heirs.as_mut().filter(|_| export.serial == key.serial).ok_or_else(other)?;
            match from {
                Some(peer) => heirs.claim(peer),
                None => heirs.is_here = true,
            }
            return Ok(());
        }
        while state.ready.len() <= part {
            let (segment, file) = ReadySegment::create()?;
            state.ready.push(ReadyPart { segment: Arc::new(segment), file: Arc::new(file) });
        }
        state.has_inherited = true;
        state.ready[part].segment.inherit(slot, issued, done);
        let gap = state.exports.len()..index;
        state.free.extend(gap.filter_map(|index| u32::try_from(index).ok()));
        if state.exports.len() <= index {
            state.exports.resize_with(index + 1, || None);
        }
        state.free.retain(|free| *free != key.index);
        let bytes = held.bytes;
        let mut heirs = Heirs { is_here: from.is_none(), ..Heirs::default() };
        from.into_iter().for_each(|peer| heirs.claim(peer));
        state.exports[index] = Some(Export {
            serial: key.serial,
            bytes,
            transport: Transport::Descriptor,
            device: held.device,
            device_uuid: held.device_uuid,
            since: SystemTime::now(),
            secret: held.secret,
            memory: WeakMemory::Held(held),
            number: issued,
            peers: Vec::new(),
            limbo: None,
            heirs: Some(heirs),
        });
        state.exported_bytes += bytes;
        Ok(())
    }

    /// Notes that an importer keeps inherited memory as one of its heirs.
    pub(super) fn claim(&self, peer: u64, key: ExportKey, secret: Option<Secret>) -> Result<()> {
        let mut state = self.state.lock();
        let expired = || Error::new(ErrorKind::Expired, "inherit", "this heir does not have the allocation");
        let export = state.export_mut(key).filter(|export| export.limbo.is_none()).ok_or_else(expired)?;
        if export.secret != secret {
            let what = "the claim does not have the secret of its allocation";
            return Err(Error::new(ErrorKind::PermissionDenied, "inherit", what));
        }
        let heirs = export.heirs.as_mut().ok_or_else(expired)?;
        heirs.claim(peer);
        Ok(())
    }

    /// Notes that this process keeps inherited memory no more.
    pub(super) fn disown(&self, key: ExportKey) {
        let mut to_ring = Vec::new();
        {
            let mut state = self.state.lock();
            if let Some(heirs) = state.export_mut(key).and_then(|export| export.heirs.as_mut()) {
                heirs.is_here = false;
            }
            state.close_disowned([key.index], &mut to_ring);
        }
        ring_all(&to_ring);
    }

    /// Returns the frees that importers have enabled since the last call. The cost depends on the released allocations, not on
    /// all shared ones.
    pub(crate) fn released(&self) -> Vec<DeferredFree> {
        let mut to_ring = Vec::new();
        let mut state = self.state.lock();
        let mut raised = Vec::new();
        for book in state.peers.values() {
            for (place, part) in book.parts.iter().enumerate() {
                let Some(part) = part else { continue };
                part.segment.released().drain(|slot| raised.push(place * SLOTS + slot));
            }
        }
        let raised: Vec<_> = raised.into_iter().filter_map(|index| u32::try_from(index).ok()).collect();
        state.close_disowned(raised.iter().copied(), &mut to_ring);
        let freed = raised.into_iter().filter_map(|index| state.leave_limbo(index)).collect();
        drop(state);
        ring_all(&to_ring);
        freed
    }

    // ---------------------------------------------------------------- hand-over

    /// Offers all allocations to an heir. Returns the number of those; 0 if there is nothing to hand over.
    ///
    /// # Errors
    /// `Unsupported` for an allocation that no heir can keep; `InvalidState` during another hand-over.
    pub(super) fn offer(&self) -> Result<usize> {
        let mut to_ring = Vec::new();
        let count = {
            let mut state = self.state.lock();
            if matches!(state.hand_over, HandOver::Offered(_)) {
                return Err(Error::new(ErrorKind::InvalidState, "hand_over", "another thread hands the memory over"));
            }
            let mut count = 0;
            for (_, export) in state.kept() {
                let message = match (&export.memory, export.transport) {
                    (WeakMemory::Adopted(..), _) => {
                        "adopted memory is shared, which other code of this process may use again".to_owned()
                    }
                    (_, Transport::Descriptor) => {
                        count += 1;
                        continue;
                    }
                    (_, transport) => {
                        format!("memory with the transport {transport:?} is shared, which has no descriptor to keep")
                    }
                };
                return Err(Error::new(ErrorKind::Unsupported, "hand_over", message).with_hint(
                    "drop that buffer first, or share memory of `Device::allocate_shared_by` with `Transport::Descriptor`",
                ));
            }
            if count > 0 {
                state.hand_over = HandOver::Offered(Offer::default());
                state.publish_hand_over(Progress::Offered, &mut to_ring);
            }
            count
        };
        ring_all(&to_ring);
        Ok(count)
    }

    /// Waits until an heir has taken the allocations, and ends the offer.
    ///
    /// # Errors
    /// `InvalidState` if no heir takes them in time: this process still has them.
    pub(super) fn wait_for_heir(&self, until: Option<Instant>) -> Result<()> {
        let mut state = self.state.lock();
        loop {
            if !matches!(state.hand_over, HandOver::Offered(_)) {
                return Ok(());
            }
            let is_over = match until {
                Some(until) => self.taken.wait_until(&mut state, until).timed_out(),
                None => {
                    self.taken.wait(&mut state);
                    false
                }
            };
            // An heir may have taken them as the time ended.
            if is_over && let HandOver::Offered(offer) = &mut state.hand_over {
                let refused = offer.refused.take();
                state.hand_over = HandOver::None;
                state.publish_hand_over(Progress::None, &mut Vec::new());
                let reason = match &refused {
                    Some(error) => error.message().to_owned(),
                    None => "no importer that keeps it with `OwnerDeath::Inherit` has answered".to_owned(),
                };
                let message = format!("no heir took the memory in time: {reason}");
                return Err(Error::new(ErrorKind::InvalidState, "hand_over", message).with_hint(
                    "open every shared ticket in one process with `OwnerDeath::Inherit`, or by `Holder::hold`, which must not be stopped (`kill -CONT`)",
                ));
            }
        }
    }

    /// Notes that an importer keeps an allocation that is offered.
    pub(super) fn claim_offered(&self, peer: u64, key: ExportKey, secret: Option<Secret>) -> Result<()> {
        let mut state = self.state.lock();
        let refused = |kind, what| Err(Error::new(kind, "inherit", what));
        let Some(export) = state.export(key).filter(|export| export.limbo.is_none()) else {
            return refused(ErrorKind::Expired, "the owner has dropped the allocation");
        };
        if export.secret != secret {
            return refused(ErrorKind::PermissionDenied, "the claim does not have the secret of its allocation");
        }
        match &mut state.hand_over {
            HandOver::Offered(offer) => {
                offer.claims.entry(peer).or_default().insert(key);
                Ok(())
            }
            HandOver::None | HandOver::Done => {
                refused(ErrorKind::InvalidArgument, "the owner of the memory is alive, and does not hand it over")
            }
        }
    }

    /// Gives all allocations to an importer that has claimed each. `give` sends the importer the right to answer. From its success on,
    /// this exporter grants nothing. `tell` names the heir to another importer, before that one can see the hand-over.
    ///
    /// # Errors
    /// `InvalidState` while the importer lacks an allocation, or device work before a share is not done; otherwise that of `give`.
    pub(super) fn hand_over(&self, peer: u64, give: impl FnOnce() -> Result<()>, tell: impl Fn(&Peer)) -> Result<()> {
        let mut to_ring = Vec::new();
        let heir = self.state.lock().peers.get(&peer).map(|book| Arc::clone(&book.peer));
        let mark = heir.and_then(|heir| heir.process.mark());
        {
            let mut state = self.state.lock();
            let state = &mut *state;
            let kept: Vec<ExportKey> = state.kept().map(|(key, _)| key).collect();
            let HandOver::Offered(offer) = &mut state.hand_over else {
                let what = "the owner of the memory is alive, and does not hand it over";
                return Err(Error::new(ErrorKind::InvalidArgument, "inherit", what));
            };
            // Before each attempt, the heir claims what it keeps then.
            let claims = offer.claims.remove(&peer).unwrap_or_default();
            let lacking = kept.iter().filter(|key| !claims.contains(*key)).count();
            // A thread that queries the work has the watches, so the published numbers count.
            let is_pending = kept.iter().any(|key| waits(&state.ready, *key, state.exports.get(key.index as usize)));
            if lacking > 0 || is_pending {
                let what = match lacking {
                    0 => "device work before a share is not done".to_owned(),
                    _ => format!("the heir keeps all but {lacking} of {}", counted(kept.len(), "allocation")),
                };
                let error = Error::new(ErrorKind::InvalidState, "inherit", what);
                offer.refused = Some(error.clone());
                return Err(error);
            }
            // Under the lock: a share and a drop of another thread come before it or after it.
            give()?;
            state.peers.values().filter(|book| book.peer.id != peer).for_each(|book| tell(&book.peer));
            state.hand_over = HandOver::Done;
            // For importers that the message does not reach.
            mark.into_iter().for_each(|mark| state.ready.iter().for_each(|part| part.segment.set_heir(mark)));
            state.publish_hand_over(Progress::Done, &mut to_ring);
            for key in kept {
                let export = state.remove(key.index);
                state.handed_over.extend(export.map(|export| (key, export)));
            }
        }
        self.taken.notify_all();
        ring_all(&to_ring);
        Ok(())
    }

    /// Returns whether an heir may take the allocations.
    pub(super) fn is_offering(&self) -> bool {
        matches!(self.state.lock().hand_over, HandOver::Offered(_))
    }

    /// Returns whether an heir answers in place of this exporter.
    pub(super) fn has_handed_over(&self) -> bool {
        matches!(self.state.lock().hand_over, HandOver::Done)
    }

    /// Returns the number of the latest share of an allocation that an heir has taken.
    pub(super) fn number_handed_over(&self, key: ExportKey) -> Option<u64> {
        self.state.lock().handed_over.get(&key).map(|export| export.number)
    }

    // ---------------------------------------------------------------- importers

    /// Registers an importer that has connected.
    pub(crate) fn add_peer(&self, process: Process, socket: OwnedFd) -> Arc<Peer> {
        let mut state = self.state.lock();
        state.last_peer += 1;
        let peer = Arc::new(Peer {
            id: state.last_peer,
            process,
            socket,
            line: OnceLock::new(),
            connected: AtomicBool::new(true),
            since: Instant::now(),
            staged: Mutex::default(),
        });
        let book = PeerBook { peer: Arc::clone(&peer), parts: Vec::new(), exports: HashSet::new() };
        state.peers.insert(peer.id, book);
        peer
    }

    /// Returns a connection to drop if more than `most` connections are idle, with nothing open. It is the oldest idle
    /// connection of the process that has the most. So a process that connects repeatedly loses its own connections and not
    /// those of others.
    ///
    /// Connections with an unread greeting are skipped; the service reads them next.
    pub(crate) fn crowding(&self, most: usize) -> Option<Arc<Peer>> {
        let state = self.state.lock();
        let idle = || state.peers.values().filter(|book| book.exports.is_empty()).map(|book| &book.peer);
        if idle().count() <= most {
            return None;
        }
        let mut of_process: HashMap<(i32, u64), usize> = HashMap::new();
        idle().for_each(|peer| *of_process.entry(peer.process.key()).or_default() += 1);
        let (crowd, _) = of_process.into_iter().max_by_key(|&(_, connections)| connections)?;
        let droppable = |peer: &&Arc<Peer>| {
            peer.process.key() == crowd && (peer.line.get().is_some() || !is_readable(peer.socket.as_fd()))
        };
        idle().filter(droppable).min_by_key(|peer| peer.id).cloned()
    }

    pub(crate) fn peers(&self) -> Vec<Arc<Peer>> {
        self.state.lock().peers.values().map(|book| Arc::clone(&book.peer)).collect()
    }

    /// Counts an open of an allocation by an importer.
    pub(crate) fn grant(&self, peer: u64, key: ExportKey, secret: Option<Secret>) -> Result<Grant> {
        // Declared before the lock so that it drops after the lock: the last reference to a block closes its export.
        let memory;
        let mut state = self.state.lock();
        let state = &mut *state;
        let expired =
            || Error::new(ErrorKind::Expired, "open_shared", "the exporter has freed the buffer of this ticket");
        let export = state.export(key).filter(|export| export.limbo.is_none()).ok_or_else(expired)?;
        if export.secret.is_some_and(|expected| !secret.is_some_and(|secret| secret.matches(&expected))) {
            let what = "the ticket does not have the secret of its allocation";
            return Err(Error::new(ErrorKind::PermissionDenied, "open_shared", what));
        }
        memory = export.memory.upgrade().ok_or_else(expired)?;
        let (part, slot) = place_of(key.index);
        let (transport, bytes) = (export.transport, export.bytes);
        let ready = Arc::clone(&state.ready[part].file);
        let book = state
            .peers
            .get_mut(&peer)
            .ok_or_else(|| Error::new(ErrorKind::Expired, "open_shared", "the exporter has closed the connection"))?;
        if book.parts.len() <= part {
            book.parts.resize_with(part + 1, || None);
        }
        let counts = match &book.parts[part] {
            Some(counts) => counts.clone(),
            None => {
                let (segment, file) = CountSegment::create()?;
                let counts = CountPart { segment: Arc::new(segment), file: Arc::new(file) };
                book.parts[part] = Some(counts.clone());
                counts
            }
        };
        if !counts.segment.slot(slot, key.serial).grant() {
            return Err(Error::new(
                ErrorKind::OutOfMemory,
                "open_shared",
                "one process has the allocation open 2^32 times",
            ));
        }
        book.exports.insert(key.index);
        if let Some(export) = state.export_mut(key) {
            if !export.peers.contains(&peer) {
                export.peers.push(peer);
            }
            if let Some(heirs) = &mut export.heirs {
                heirs.awaited.retain(|awaited| *awaited != peer);
            }
        }
        Ok(Grant { memory, transport, bytes, counts: counts.file, ready })
    }

    /// Returns an open that was granted before, for the parts that the importer has not got yet.
    pub(crate) fn granted(&self, peer: u64, key: ExportKey) -> Result<Grant> {
        // Declared before the lock so that it drops after the lock, as in `grant`.
        let memory;
        let state = self.state.lock();
        let expired =
            || Error::new(ErrorKind::Expired, "open_shared", "the exporter has freed the buffer of this ticket");
        let export = state.export(key).filter(|export| export.limbo.is_none()).ok_or_else(expired)?;
        memory = export.memory.upgrade().ok_or_else(expired)?;
        let (part, _) = place_of(key.index);
        let book = state.peers.get(&peer).filter(|book| book.holds(key.index, key.serial, false));
        let counts = book.and_then(|book| book.parts.get(part)?.as_ref()).ok_or_else(|| {
            Error::new(ErrorKind::InvalidArgument, "open_shared", "the importer has not opened the allocation")
        })?;
        let (counts, ready) = (Arc::clone(&counts.file), Arc::clone(&state.ready[part].file));
        Ok(Grant { memory, transport: export.transport, bytes: export.bytes, counts, ready })
    }

    /// Undoes a grant that the importer could not use.
    pub(crate) fn take_back(&self, peer: u64, key: ExportKey) -> Option<DeferredFree> {
        let mut state = self.state.lock();
        let (part, slot) = place_of(key.index);
        if let Some(part) = state.peers.get(&peer).and_then(|book| book.parts.get(part)?.as_ref()) {
            part.segment.slot(slot, key.serial).take_back();
        }
        state.leave_limbo(key.index)
    }

    /// Removes an importer whose process has ended, with everything that it held.
    pub(crate) fn peer_ended(&self, peer: u64) -> Vec<DeferredFree> {
        let mut state = self.state.lock();
        let was_open = state.peers.get(&peer).is_some_and(|book| state.is_used_by(book));
        state.lost_peers += u64::from(was_open);
        let (freed, to_ring) = Self::remove_peer(&mut state, peer);
        drop(state);
        ring_all(&to_ring);
        freed
    }

    /// Returns what is freed, and the importers to ring without the lock.
    fn remove_peer(state: &mut State, peer: u64) -> (Vec<DeferredFree>, Vec<Arc<Peer>>) {
        let mut to_ring = Vec::new();
        let Some(book) = state.peers.remove(&peer) else { return (Vec::new(), to_ring) };
        if state.has_inherited {
            let mut claimed = Vec::new();
            for (index, export) in (0..).zip(&mut state.exports) {
                let heirs = export.as_mut().and_then(|export| export.heirs.as_mut());
                let Some(heirs) = heirs.filter(|heirs| heirs.claims.contains(&peer)) else { continue };
                heirs.claims.retain(|claim| *claim != peer);
                heirs.awaited.retain(|awaited| *awaited != peer);
                claimed.push(index);
            }
            state.close_disowned(claimed, &mut to_ring);
        }
        let leave = |index: u32| {
            if let Some(Some(export)) = state.exports.get_mut(index as usize) {
                export.peers.retain(|other| *other != peer);
            }
            state.leave_limbo(index)
        };
        (book.exports.into_iter().filter_map(leave).collect(), to_ring)
    }

    /// Removes an importer that has closed its connection, if it holds nothing. An importer that holds or maps memory stays
    /// until its process has ended.
    pub(crate) fn peer_disconnected(&self, peer: u64) -> Vec<DeferredFree> {
        let mut state = self.state.lock();
        let Some(book) = state.peers.get(&peer) else { return Vec::new() };
        // The importer could still take prepared opens. After the withdrawal, it must send requests.
        let withdrawn = book.exports.iter().map(|index| match state.exports.get(*index as usize) {
            Some(Some(export)) => book.withdraw(*index, export.serial),
            _ => true,
        });
        if !withdrawn.fold(true, std::ops::BitAnd::bitand) {
            return Vec::new();
        }
        let (freed, to_ring) = Self::remove_peer(&mut state, peer);
        drop(state);
        ring_all(&to_ring);
        freed
    }

    /// Closes the connections at the end of the runtime.
    pub(crate) fn disconnect(&self) {
        for peer in self.peers() {
            // A forked child may keep the sockets open, so shut them down.
            let _ = rustix::net::shutdown(&peer.socket, rustix::net::Shutdown::Both);
            if let Some(line) = peer.line.get() {
                let _ = rustix::net::shutdown(line, rustix::net::Shutdown::Both);
            }
        }
    }

    /// Returns the shared allocations, each with the processes that have it open or mapped.
    pub(crate) fn list(&self) -> Vec<ListedExport> {
        let state = self.state.lock();
        let list = |(index, export): (usize, &Option<Export>)| {
            let (index, export) = (u32::try_from(index).ok()?, export.as_ref()?);
            let books = export.peers.iter().filter_map(|peer| state.peers.get(peer));
            let holding = books.filter(|book| book.holds(index, export.serial, true));
            let mut holders: Vec<u32> = holding.map(|book| book.peer.process.number()).collect();
            holders.sort_unstable();
            holders.dedup();
            let Export { transport, device, device_uuid, bytes, since, .. } = *export;
            let what = Listed { transport, device, device_uuid, bytes, since };
            Some(ListedExport { what, is_dropped: export.limbo.is_some(), holders })
        };
        state.exports.iter().enumerate().filter_map(list).collect()
    }

    pub(crate) fn counts(&self) -> ExporterCounts {
        let state = self.state.lock();
        ExporterCounts {
            blocks: (state.exports.len() - state.free.len()) as u64,
            bytes: state.exported_bytes,
            limbo_blocks: state.limbo_blocks,
            limbo_bytes: state.limbo_bytes,
            peers: state.peers.values().filter(|book| !book.exports.is_empty()).count() as u64,
            lost_peers: state.lost_peers,
        }
    }

    /// Returns the processes that hold allocations in limbo.
    pub(crate) fn holders_of_limbo(&self) -> String {
        let state = self.state.lock();
        let in_limbo = |index: &u32| {
            let export = state.exports.get(*index as usize).and_then(Option::as_ref);
            export.filter(|export| export.limbo.is_some()).map(|export| (export.serial, export.freed_after_unmap()))
        };
        let holds = |book: &&PeerBook| {
            book.exports
                .iter()
                .any(|index| in_limbo(index).is_some_and(|(serial, or_maps)| book.holds(*index, serial, or_maps)))
        };
        let holders = state.peers.values().filter(holds).map(|book| &book.peer.process);
        let mut keys: Vec<_> = holders.map(Process::key).collect();
        keys.sort_unstable();
        keys.dedup();
        let hidden = keys.iter().filter(|(pid, _)| *pid == 0).count();
        let mut named: Vec<_> = keys.iter().filter(|(pid, _)| *pid != 0).map(|(pid, _)| pid.to_string()).collect();
        named.dedup();
        if hidden > 0 {
            named.push(format!("{hidden} of other PID namespaces"));
        }
        named.join(", ")
    }
}

/// Returns whether device work before a share is not done yet, and will be.
fn waits(ready: &[ReadyPart], key: ExportKey, export: Option<&Option<Export>>) -> bool {
    let (part, slot) = place_of(key.index);
    let (Some(part), Some(Some(export))) = (ready.get(part), export) else { return false };
    !part.segment.is_orphaned(slot) && part.segment.readiness(slot, export.number) == Readiness::Waiting
}

/// Wakes importers.
fn ring_all(peers: &[Arc<Peer>]) {
    for line in peers.iter().filter_map(|peer| peer.line.get()) {
        ring(line.as_fd());
    }
}

#[cfg(test)]
impl Exporter {
    pub(crate) fn is_locked(&self) -> bool {
        self.state.is_locked()
    }

    pub(crate) fn hold_lock(&self) -> impl Drop + '_ {
        crate::testing::Held(self.state.lock())
    }
}
