//! A block of page-locked memory: a run of pages with the record of its uses.

use std::fmt;
use std::ops::Range;

use super::block_uses::{BINDING_WORDS, BlockUses};
use super::ranges::{PAGE, Run};
use super::slabs::{self, SLAB_PAGES};
use super::thread_cache::ThreadCache;
use crate::primitive::{Arc, HostPtr, Ordering};

/// Maximum number of pages of a block.
pub(crate) const MOST_PAGES: u32 = (1 << 31) - 1;

/// A block. A buffer, a thread cache, the pool's lists and keepers share it; `uses` says who may use the memory.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) ptr: HostPtr,
    /// The first page of the block, or of its slab.
    start: u32,
    /// The size by which thread caches find the block, as [`slabs::size_of_request`].
    pub(crate) size: u32,
    pub(crate) uses: BlockUses,
    /// The thread cache that the block returns to.
    pub(crate) home: Option<Arc<ThreadCache>>,
}

/// Memory beside the pool that several processes can have, as seen from its block.
pub(crate) trait SharedPages: fmt::Debug + Send + Sync {
    /// Releases the memory of a block that no buffer, graph or note has any more.
    fn release(&self, block: &Block);
}

pub(crate) type OwnedBlock = Arc<Block>;

impl Block {
    pub(crate) fn new(
        ptr: HostPtr,
        start: u32,
        size: u32,
        borders: Vec<usize>,
        home: Option<Arc<ThreadCache>>,
    ) -> OwnedBlock {
        Arc::new(Self { ptr, start, size, uses: BlockUses::with_borders(borders), home })
    }

    /// Returns the block of memory that several processes can have. Its last owner releases it.
    pub(crate) fn shared(
        ptr: HostPtr,
        requested: usize,
        borders: Vec<usize>,
        shared: Box<dyn SharedPages>,
    ) -> OwnedBlock {
        // Sizes in pages end where sizes in units begin.
        let size = u32::try_from(requested.max(1).div_ceil(PAGE)).map_or(MOST_PAGES, |pages| pages.min(MOST_PAGES));
        let uses = BlockUses::with_attached(borders, Box::new(shared));
        let block = Self { ptr, start: 0, size, uses, home: None };
        block.begin_life(requested);
        Arc::new(block)
    }

    #[inline]
    pub(crate) fn bytes(&self) -> usize {
        slabs::bytes_of(self.size)
    }

    /// Returns the pages of the block, or of its slab.
    pub(crate) fn run(&self) -> Run {
        let pages = if self.is_in_slab() { SLAB_PAGES } else { self.size };
        Run { start: self.start, pages }
    }

    pub(crate) fn is_in_slab(&self) -> bool {
        slabs::is_in_slab(self.size)
    }

    /// Begins the life of a buffer that requested so many bytes.
    #[inline]
    pub(crate) fn begin_life(&self, requested: usize) {
        // At most a page, which an empty buffer has.
        debug_assert!(self.bytes() - requested <= PAGE);
        self.uses.rounding.store((self.bytes() - requested) as u16, Ordering::Relaxed);
        self.uses.begin_life();
    }

    pub(crate) fn requested(&self) -> usize {
        self.bytes() - usize::from(self.uses.rounding.load(Ordering::Relaxed))
    }

    /// Returns whether the block lies in one registration.
    pub(crate) fn is_undivided(&self) -> bool {
        self.uses.borders().is_empty()
    }

    /// Splits a range of bytes, counted from the start of the block, at the borders between registrations. An empty range is
    /// one part.
    pub(crate) fn cut(&self, range: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let borders: Box<[usize]> = self.uses.borders().into();
        let mut rest = Some(range);
        std::iter::from_fn(move || {
            let Range { start, end } = rest.take()?;
            let border = borders.iter().copied().find(|border| *border > start);
            let border = border.filter(|border| *border < end);
            if let Some(border) = border {
                rest = Some(border..end);
            }
            Some(start..border.unwrap_or(end))
        })
    }

    /// Returns memory for a binding to another language. It lives as long as the block, and is zero at first.
    #[inline]
    pub(crate) fn binding_memory(&self) -> *mut [u64; BINDING_WORDS] {
        self.uses.binding_memory()
    }

    /// Keeps the block. It belongs to a buffer, which the caller must borrow.
    pub(crate) fn keep(self: &Arc<Self>) -> KeptBlock {
        self.uses.count_keeper();
        KeptBlock(Arc::clone(self))
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Some(shared) = self.uses.attached::<Box<dyn SharedPages>>() {
            shared.release(self);
        }
    }
}

/// A block that cannot be reused until [`HostCache::let_go`](super::host::HostCache::let_go).
#[derive(Debug)]
#[must_use]
pub(crate) struct KeptBlock(pub(super) OwnedBlock);

impl std::ops::Deref for KeptBlock {
    type Target = OwnedBlock;

    fn deref(&self) -> &OwnedBlock {
        &self.0
    }
}
