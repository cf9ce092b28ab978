//! Page-locked host memory: the cache of blocks, the memory behind it, and the waits of the CPU for the streams.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::active_trims::ActiveTrims;
use super::block_uses::{BlockUses, CpuAccess};
use super::completion_events::CompletionEvent;
use super::host::{HostCache, KeptBlock, OwnedBlock, PinnedBlock};
use super::host_memory::{Freed, HostMemory};
use super::{HostCacheStatistics, size_class};
use crate::capture::thread::in_capture;
use crate::ledger::{HostBlock, HostBlockInfo};
use crate::services::{Services, twice};
use highwater_hal::{Error, ErrorKind, HostPtr, Result, fork::Generation};

/// The page-locked memory of a runtime.
pub(crate) struct PinnedPool {
    /// The generation of the services, copied here for the hit path.
    pub(crate) generation: Generation,
    cache: HostCache,
    memory: HostMemory,
    /// Threads that free page-locked memory. They never wait for a stream.
    active_trims: ActiveTrims,
    services: Arc<Services>,
}

impl PinnedPool {
    pub(crate) fn new(services: Arc<Services>, cap_bytes: Option<u64>) -> Self {
        let capabilities = services.devices.iter().map(|device| &device.capabilities);
        Self {
            generation: services.generation,
            cache: HostCache::new(cap_bytes),
            memory: HostMemory::new(services.backend.host_allocator(), capabilities),
            active_trims: ActiveTrims::default(),
            services,
        }
    }

    pub(crate) fn statistics(&self) -> HostCacheStatistics {
        let (remnant_blocks, remnant_bytes) = self.memory.remnants();
        HostCacheStatistics { remnant_blocks, remnant_bytes, ..self.cache.statistics() }
    }

    /// Returns the block that contains an address, if a buffer owns it.
    pub(crate) fn live_block(&self, ptr: HostPtr) -> Option<HostBlock> {
        self.services.ledger.find_host(ptr).filter(|block| block.uses.is_live())
    }

    /// Keeps the block that contains an address, if a buffer owns it. If the buffer ends in the meantime, the block is not
    /// reused before the caller releases it.
    pub(crate) fn keep_live_block(&self, ptr: HostPtr) -> Option<KeptBlock> {
        let block = self.live_block(ptr)?;
        self.cache.keep_if_live(block.info.base, block.class, &block.uses)
    }

    /// Frees blocks above the cap, which captures and other threads may have left.
    pub(crate) fn trim_to_cap(&self) {
        if self.cache.may_exceed_cap() {
            self.keep_to_cap();
        }
    }

    /// Returns a block of page-locked memory of at least `bytes`.
    #[inline]
    pub(crate) fn take(&self, bytes: usize) -> Result<OwnedBlock> {
        // A block of the cache needs no driver, so only the slow path checks whether the driver is shutting down.
        if !self.generation.is_current() {
            return Err(Generation::error("pinned"));
        }
        let (class, block_bytes) = size_class::of(bytes).ok_or_else(|| {
            Error::new(ErrorKind::OutOfMemory, "pinned", format!("no machine has {bytes} bytes of memory"))
        })?;
        match self.cache.find(class, bytes) {
            Some(block) => Ok(block),
            None => self.take_slow(bytes, class, block_bytes),
        }
    }

    #[cold]
    fn take_slow(&self, bytes: usize, class: usize, block_bytes: usize) -> Result<OwnedBlock> {
        self.services.check("pinned")?;
        if let Some(block) =
            self.cache.take_waiting(class, bytes, |completion| self.services.is_surely_passed(completion))
        {
            return Ok(block);
        }
        // While this thread held blocks, other threads may have seen fewer cached bytes than there are.
        if self.cache.may_exceed_cap() {
            self.keep_to_cap();
        }
        let allocate = || self.memory.allocate(block_bytes, |error| self.services.count_failed_release(error));
        let (ptr, piece_bytes) = match allocate() {
            Err(error) if error.kind() == ErrorKind::OutOfMemory && !in_capture() => {
                let round = self.active_trims.begin();
                // A refused release is counted, and the allocation retries with the memory that the others freed.
                if let Err(error) = self.trim() {
                    tracing::debug!("not everything could be given back: {error}");
                }
                drop(round);
                self.active_trims.wait();
                allocate()?
            }
            result => result?,
        };
        let block = PinnedBlock::new(ptr, block_bytes, class, piece_bytes);
        let info = HostBlockInfo { base: ptr, bytes: block_bytes };
        self.services.ledger.insert_host(HostBlock { info, class, uses: Arc::clone(&block.uses) });
        self.cache.count_given(&block, bytes, true);
        Ok(block)
    }

    #[inline]
    pub(crate) fn give_back(&self, block: OwnedBlock, requested: usize) {
        if self.cache.give_back(block, requested) {
            self.keep_to_cap();
        }
    }

    /// Releases a block that a capture, a graph or a note by address has kept.
    pub(crate) fn let_go(&self, kept: KeptBlock) {
        if self.cache.let_go(kept) {
            self.keep_to_cap();
        }
    }

    /// Frees blocks until the cap is met. In a capture, frees nothing; the end of the capture does it later.
    #[cold]
    #[inline(never)]
    fn keep_to_cap(&self) {
        if in_capture() || self.services.backend.is_exiting() {
            return;
        }
        self.cache.keep_to_cap(
            |completion| self.services.is_surely_passed(completion),
            // SAFETY: No code has the block, and no stream uses it any more.
            |block| unsafe { self.free(block) }.0,
        );
    }

    /// Refuses a block whose end of use is unknown.
    pub(crate) fn check_known(uses: &BlockUses) -> Result<()> {
        if uses.unmarked.load(Ordering::Relaxed) {
            return Err(Error::new(
                ErrorKind::InvalidState,
                "pinned",
                "an earlier copy failed in a way that leaves unknown whether the device still uses this memory",
            )
            .with_hint("drop the buffer and allocate a new one"));
        }
        Ok(())
    }

    /// Waits until no stream uses the block; with `writes_only`, until none writes it.
    pub(crate) fn wait_for_uses(&self, block: &PinnedBlock, writes_only: bool) -> Result<()> {
        self.check_access(block)?;
        if block.uses.is_recorded(!writes_only) {
            return Err(Error::new(
                ErrorKind::InvalidState,
                "pinned",
                "a graph has recorded this memory, and its launches could race with a slice of the values",
            )
            .with_hint("use `read_with` or `write_with`, or drop the graph first"));
        }
        self.wait_for_completions(block, block.uses.completions(writes_only))
    }

    fn check_access(&self, block: &PinnedBlock) -> Result<()> {
        self.services.check("pinned")?;
        Self::check_known(&block.uses)?;
        if block.uses.is_recording() {
            return Err(Error::new(
                ErrorKind::Capture,
                "pinned",
                "an open capture uses this memory: its recorded work is not executed",
            )
            .with_hint("read and write before the capture, or between launches of the graph; the capture goes on"));
        }
        Ok(())
    }

    fn wait_for_completions(&self, block: &PinnedBlock, completions: Vec<Arc<CompletionEvent>>) -> Result<()> {
        for completion in completions {
            self.services.backend.synchronize_event(completion.event())?;
            block.uses.forget(&completion);
        }
        Ok(())
    }

    /// Begins access by the CPU, once the streams that use the block are done. Launches of graphs that conflict with it are
    /// refused.
    pub(crate) fn access<'b>(&self, block: &'b PinnedBlock, writes: bool) -> Result<CpuAccess<'b>> {
        self.check_access(block)?;
        loop {
            match block.uses.begin_cpu(writes, self.generation) {
                // Work that was being enqueued when the access began may have failed since.
                Ok(access) => return Self::check_known(&block.uses).map(|()| access),
                Err(completions) => self.wait_for_completions(block, completions)?,
            }
        }
    }

    /// Frees the page-locked blocks that no buffer, graph or stream uses.
    pub(crate) fn trim(&self) -> Result<()> {
        // First, because blocks that become remnants below have just been tried.
        let mut result = self.memory.release_remnants(|error| self.services.count_failed_release(error));
        self.cache.trim(
            |completion| self.services.is_surely_passed(completion),
            |block| {
                // SAFETY: No code has the block, and no stream uses it any more.
                let (taken, freed) = unsafe { self.free(block) };
                result = std::mem::replace(&mut result, Ok(())).and(freed);
                taken
            },
        );
        result
    }

    /// Frees a block. Returns whether it is gone, and the backend's refusal, which is counted.
    ///
    /// # Safety
    /// No code and no outstanding device work may use the block.
    unsafe fn free(&self, block: &PinnedBlock) -> (bool, Result<()>) {
        let known = match self.services.ledger.remove_host(block.ptr) {
            Ok(known) => known,
            Err(error) => return (false, self.services.note(Err(error))),
        };
        // SAFETY: The block came from this memory (the ledger knows it). No code uses it (the caller's promise).
        let refused = match unsafe { self.memory.free(block.ptr, block.bytes, block.piece_bytes) } {
            Freed::Whole => Ok(()),
            Freed::InPart(error) => Err(error),
            Freed::Refused(error) => {
                self.services.ledger.insert_host(known);
                return (false, self.services.note(Err(error)));
            }
        };
        self.cache.count_freed(block);
        (true, self.services.note(refused))
    }

    /// Removes uses of a block that are over. So a buffer that outlives many streams does not keep an event for each.
    #[cold]
    pub(crate) fn forget_passed(&self, uses: &BlockUses) {
        if !in_capture() {
            uses.forget_passed(|completion| self.services.is_surely_passed(completion));
        }
    }

    /// Frees every block, at the end of the runtime.
    ///
    /// # Safety
    /// The devices must have executed everything, and no buffer may own a block.
    pub(crate) unsafe fn free_all(&self) -> Result<()> {
        let mut result = Ok(());
        let blocks = (0..size_class::COUNT).flat_map(|class| {
            let cache = &self.cache;
            let any = move || cache.pop_free(class).or_else(|| cache.pop_waiting(class));
            std::iter::from_fn(move || any().or_else(|| cache.pop_unmarked(class)))
        });
        // Completion events return to their pools, even if the free is refused.
        let blocks: Vec<_> = blocks.collect();
        for block in &blocks {
            block.uses.are_over(|_| true);
        }
        let mut in_part = Ok(());
        result = result.and(twice(blocks, |block| {
            // SAFETY: The devices have executed everything, and no buffer owns the block.
            let (is_gone, freed) = unsafe { self.free(block) };
            if is_gone {
                // The rest of it is a remnant, which is released below.
                in_part = std::mem::replace(&mut in_part, Ok(())).and(freed);
                return Ok(());
            }
            freed
        }));
        result = result.and(in_part);
        result = result.and(self.memory.release_remnants(|error| self.services.count_failed_release(error)));
        result
    }
}

#[cfg(test)]
impl PinnedPool {
    pub(crate) fn hold_locks(&self) -> impl Drop + '_ {
        crate::testing::Held((self.cache.hold_locks(), self.memory.hold_lock(), self.active_trims.hold_lock()))
    }

    pub(crate) fn is_locked(&self) -> bool {
        self.cache.is_locked() || self.memory.is_locked() || self.active_trims.is_locked()
    }
}
