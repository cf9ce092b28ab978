//! Page-locked memory beside the pools: files that several processes map, each with one block (`host_memory/files.rs`).
//!
//! Here are the mappings of one runtime: those of files that it made, and of files that others made and it has opened. A block
//! stands for a mapping while a buffer, a graph or a note uses it. The last of them releases it: `sharing/host.rs`. The memory is
//! unregistered once every stream has passed its last use. Until then it waits here, as free blocks of the pools do. The sharing
//! thread, a trim and the end of the runtime look after it.
//!
//! No lock is held during a call of the backend.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use super::block::{Block, KeptBlock, OwnedBlock};
use super::completion_events::CompletionEvent;
use super::file_access::FileAccess;
use super::host_memory::FileMemory;
use crate::capture::thread::in_capture;
use crate::ledger::HostBlockInfo;
use crate::services::{Services, twice};
use highwater_hal::{Error, ErrorKind, HostAllocator, HostPtr, Result};

/// The pool whose options hold for the files of other processes.
pub(crate) trait MapsFiles: Send + Sync {
    /// Maps and registers a file that another process made.
    fn map_file(&self, file: BorrowedFd<'_>, bytes: usize, read_only: bool) -> Result<FileMemory>;
}

/// The files that a runtime has mapped.
pub(crate) struct HostFiles {
    services: Arc<Services>,
    allocator: Arc<dyn HostAllocator>,
    /// The pool whose options hold for the files of other processes.
    pool: OnceLock<Weak<dyn MapsFiles>>,
    /// The block of each mapping that is in use, by address.
    live: Mutex<BTreeMap<usize, Weak<Block>>>,
    /// Mappings of files that other processes made, by address.
    opened: Mutex<HashMap<usize, (FileMemory, FileAccess)>>,
    opened_bytes: AtomicU64,
    /// Mappings of files that this runtime made, as far as they are not released: number and bytes.
    made: AtomicU64,
    made_bytes: AtomicU64,
    waiting: Mutex<Vec<Waiting>>,
    /// Number of those that a query may release.
    asked: AtomicU64,
    /// True while a thread looks through `waiting`.
    asking: AtomicBool,
}

/// A mapping without a block.
#[derive(Debug)]
struct Waiting {
    memory: FileMemory,
    /// True if this runtime made the file.
    is_made: bool,
    /// Completion events of streams that may still use the memory.
    after: Vec<Arc<CompletionEvent>>,
    /// True if only a trim or the end of the runtime releases it: the backend has refused to.
    is_refused: bool,
    /// True if the end of a use is unknown. Then only the end of the runtime releases it.
    is_unmarked: bool,
}

impl Waiting {
    fn is_asked(&self) -> bool {
        !self.is_refused && !self.is_unmarked
    }
}

/// Totals of a runtime's files.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct FileCounts {
    pub(crate) made: u64,
    pub(crate) made_bytes: u64,
    pub(crate) opened: u64,
    pub(crate) opened_bytes: u64,
}

impl HostFiles {
    pub(crate) fn new(services: Arc<Services>) -> Self {
        Self {
            allocator: services.backend.host_allocator(),
            services,
            pool: OnceLock::new(),
            live: Mutex::default(),
            opened: Mutex::default(),
            opened_bytes: AtomicU64::new(0),
            made: AtomicU64::new(0),
            made_bytes: AtomicU64::new(0),
            waiting: Mutex::default(),
            asked: AtomicU64::new(0),
            asking: AtomicBool::new(false),
        }
    }

    /// Sets the pool, once.
    pub(super) fn set_pool(&self, pool: Weak<dyn MapsFiles>) {
        let _ = self.pool.set(pool);
    }

    /// Maps and registers a file that another process made.
    pub(crate) fn map(
        &self,
        operation: &'static str,
        file: BorrowedFd<'_>,
        bytes: usize,
        read_only: bool,
    ) -> Result<FileMemory> {
        let ended = || Error::new(ErrorKind::ShuttingDown, operation, "the runtime has ended");
        self.pool.get().and_then(Weak::upgrade).ok_or_else(ended)?.map_file(file, bytes, read_only)
    }

    pub(crate) fn counts(&self) -> FileCounts {
        // Relaxed, here and below: only the numbers matter.
        FileCounts {
            made: self.made.load(Ordering::Relaxed),
            made_bytes: self.made_bytes(),
            opened: self.opened.lock().len() as u64,
            opened_bytes: self.opened_bytes.load(Ordering::Relaxed),
        }
    }

    /// Returns the bytes of the files that this runtime made and still has registered.
    pub(crate) fn made_bytes(&self) -> u64 {
        self.made_bytes.load(Ordering::Relaxed)
    }

    /// Counts a file that this runtime made.
    pub(crate) fn count_made(&self, memory: &FileMemory) {
        self.made.fetch_add(1, Ordering::Relaxed);
        self.made_bytes.fetch_add(memory.bytes as u64, Ordering::Relaxed);
    }

    // ---------------------------------------------------------------- blocks

    /// Returns the block of a mapping, if it has one.
    pub(crate) fn block_at(&self, ptr: HostPtr) -> Option<OwnedBlock> {
        self.live.lock().get(&ptr.address())?.upgrade()
    }

    /// Notes the block of a mapping, which has none. Returns the block that another thread has noted meanwhile.
    pub(crate) fn add_block(&self, block: &OwnedBlock) -> Option<OwnedBlock> {
        let mut live = self.live.lock();
        if let Some(other) = live.get(&block.ptr.address()).and_then(Weak::upgrade) {
            return Some(other);
        }
        live.insert(block.ptr.address(), Arc::downgrade(block));
        None
    }

    /// Forgets a block that has no owner any more.
    pub(crate) fn remove_block(&self, block: &Block) {
        let mut live = self.live.lock();
        let is_this = |noted: &Weak<Block>| std::ptr::eq(noted.as_ptr(), block);
        if live.get(&block.ptr.address()).is_some_and(is_this) {
            live.remove(&block.ptr.address());
        }
    }

    /// Returns the block that contains an address.
    fn block_of(&self, ptr: HostPtr) -> Option<OwnedBlock> {
        // The reference to another block drops after the lock: the last one releases memory.
        let found = {
            let live = self.live.lock();
            let (_, block) = live.range(..=ptr.address()).next_back()?;
            block.upgrade()
        };
        found.filter(|block| ptr.address() - block.ptr.address() < block.bytes())
    }

    /// Returns the block that contains an address, if a buffer or a graph owns it.
    pub(crate) fn live_block(&self, ptr: HostPtr) -> Option<HostBlockInfo> {
        self.block_of(ptr).map(|block| HostBlockInfo { base: block.ptr, bytes: block.bytes() })
    }

    /// Keeps the block that contains an address.
    pub(crate) fn keep_live_block(&self, ptr: HostPtr) -> Option<KeptBlock> {
        self.block_of(ptr).map(|block| block.keep())
    }

    /// Returns the completion events of the work on a block that is not known to be done, and whether the end of any of that work
    /// is unknown. With `writes_only`, only of work that writes.
    pub(crate) fn outstanding(&self, block: &Block, writes_only: bool) -> (Vec<Arc<CompletionEvent>>, bool) {
        let mut after = block.uses.completions(writes_only);
        after.retain(|completion| !self.services.is_surely_passed(completion));
        (after, block.uses.unmarked.load(Ordering::Relaxed))
    }

    // ---------------------------------------------------------------- files of other processes

    /// Notes a mapping of a file that another process made.
    pub(crate) fn add_opened(&self, memory: FileMemory, access: FileAccess) -> HostPtr {
        let ptr = memory.ptr;
        self.opened_bytes.fetch_add(memory.bytes as u64, Ordering::Relaxed);
        self.opened.lock().insert(ptr.address(), (memory, access));
        ptr
    }

    /// Returns an opened file: its address, the offsets at which registrations begin, except the first, and who may write it.
    pub(crate) fn opened_at(&self, address: usize) -> Option<(HostPtr, Vec<usize>, FileAccess)> {
        self.opened.lock().get(&address).map(|(memory, access)| (memory.ptr, memory.borders(), *access))
    }

    /// Unregisters and unmaps a file that another process made. Returns false if the backend refuses.
    ///
    /// # Safety
    /// No code and no outstanding device work may use the memory.
    pub(crate) unsafe fn close_opened(&self, address: usize) -> bool {
        let Some((mut memory, access)) = self.opened.lock().remove(&address) else { return true };
        let bytes = memory.bytes as u64;
        // SAFETY: As the caller promises.
        let released = unsafe { memory.release(&*self.allocator) };
        // Refusals are counted and logged.
        let is_gone = self.services.note(released).is_ok();
        if is_gone {
            self.opened_bytes.fetch_sub(bytes, Ordering::Relaxed);
        } else {
            self.opened.lock().insert(address, (memory, access));
        }
        is_gone
    }

    // ---------------------------------------------------------------- releases

    /// Releases a file that this runtime made, once its streams have passed their completion events.
    ///
    /// # Safety
    /// No code may use the memory, and no device work but that before the events. If `is_unmarked`, device work may use it until the
    /// end of the runtime.
    pub(crate) unsafe fn release_after(&self, memory: FileMemory, after: Vec<Arc<CompletionEvent>>, is_unmarked: bool) {
        let waiting = Waiting { memory, is_made: true, after, is_refused: false, is_unmarked };
        // A call of the backend could invalidate the capture of this thread.
        let kept = if waiting.after.is_empty() && !is_unmarked && !in_capture() {
            // SAFETY: As the caller promises.
            unsafe { self.release(waiting) }.err().map(|(waiting, _)| waiting)
        } else {
            Some(waiting)
        };
        self.keep(kept);
    }

    /// Keeps memory that the backend has refused to release.
    pub(crate) fn keep_refused(&self, memory: FileMemory) {
        let after = Vec::new();
        self.keep([Waiting { memory, is_made: false, after, is_refused: true, is_unmarked: false }]);
    }

    fn keep(&self, more: impl IntoIterator<Item = Waiting>) {
        let mut waiting = self.waiting.lock();
        waiting.extend(more);
        let asked = waiting.iter().filter(|waiting| waiting.is_asked()).count();
        self.asked.store(asked as u64, Ordering::Relaxed);
    }

    /// # Safety
    /// No code and no device work may use the memory.
    unsafe fn release(&self, mut waiting: Waiting) -> std::result::Result<(), (Waiting, Error)> {
        let bytes = waiting.memory.bytes as u64;
        // SAFETY: As the caller promises.
        let released = unsafe { waiting.memory.release(&*self.allocator) };
        match self.services.note(released) {
            Ok(()) => {
                if waiting.is_made {
                    self.made.fetch_sub(1, Ordering::Relaxed);
                    self.made_bytes.fetch_sub(bytes, Ordering::Relaxed);
                }
                Ok(())
            }
            Err(error) => {
                waiting.is_refused = true;
                Err((waiting, error))
            }
        }
    }

    /// Returns whether memory waits for streams.
    pub(crate) fn is_releasing(&self) -> bool {
        self.asked.load(Ordering::Relaxed) > 0
    }

    /// Releases the memory whose streams are done. Returns whether there was any.
    pub(crate) fn collect(&self) -> bool {
        self.is_releasing() && !in_capture() && self.collect_if(Waiting::is_asked).0
    }

    /// Releases the memory whose streams are done, and what the backend refused to release. Returns the first refusal.
    pub(crate) fn trim(&self) -> Result<()> {
        if in_capture() { Ok(()) } else { self.collect_if(|waiting| !waiting.is_unmarked).1 }
    }

    fn collect_if(&self, is_tried: impl Fn(&Waiting) -> bool) -> (bool, Result<()>) {
        // One thread at a time, so that no thread finds the list empty while another has its entries.
        if self.asking.swap(true, Ordering::AcqRel) {
            return (false, Ok(()));
        }
        let all = std::mem::take(&mut *self.waiting.lock());
        let (mut kept, mut has_released, mut result) = (Vec::new(), false, Ok(()));
        for mut waiting in all {
            waiting.after.retain(|completion| !self.services.is_surely_passed(completion));
            if !waiting.after.is_empty() || !is_tried(&waiting) {
                kept.push(waiting);
                continue;
            }
            // SAFETY: The memory has no block, and every stream that used it has passed its last use.
            match unsafe { self.release(waiting) } {
                Ok(()) => has_released = true,
                Err((waiting, error)) => {
                    kept.push(waiting);
                    result = result.and(Err(error));
                }
            }
        }
        self.keep(kept);
        self.asking.store(false, Ordering::Release);
        (has_released, result)
    }

    /// Releases everything, at the end of the runtime.
    ///
    /// # Safety
    /// The devices must have executed everything, and no block may be left.
    pub(crate) unsafe fn free_all(&self) -> Result<()> {
        let waiting = std::mem::take(&mut *self.waiting.lock());
        let waiting: Vec<_> = waiting.into_iter().map(|waiting| Mutex::new(Some(waiting))).collect();
        twice(waiting, |place| {
            let Some(waiting) = place.lock().take() else { return Ok(()) };
            // SAFETY: As the caller promises.
            unsafe { self.release(waiting) }.map_err(|(waiting, error)| {
                *place.lock() = Some(waiting);
                error
            })
        })
    }
}

#[cfg(test)]
impl HostFiles {
    pub(crate) fn hold_locks(&self) -> impl Drop + '_ {
        crate::testing::Held((self.live.lock(), self.opened.lock(), self.waiting.lock()))
    }

    pub(crate) fn is_locked(&self) -> bool {
        self.live.is_locked() || self.opened.is_locked() || self.waiting.is_locked()
    }
}
