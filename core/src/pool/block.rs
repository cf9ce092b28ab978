//! A block of page-locked memory: a run of pages with the record of its uses.

use std::ops::Range;

use super::block_uses::BlockUses;
use super::ranges::Run;
use super::slabs;
use super::thread_cache::ThreadCache;
use crate::primitive::{Arc, AtomicUsize, HostPtr, Ordering};

/// A block. A buffer, a thread cache, the pool's lists and keepers share it; `uses` says who may use the memory.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) ptr: HostPtr,
    pub(crate) bytes: usize,
    /// The pages of the block, or of its slab.
    pub(crate) run: Run,
    /// The offset of the block in those, in bytes.
    pub(crate) offset: usize,
    /// The number by which thread caches find the block.
    pub(crate) size: u32,
    /// Bytes that the buffer requested. Relaxed: only statistics read it.
    requested: AtomicUsize,
    /// Offsets of the registrations that begin inside the block, if any do.
    borders: Option<Arc<[usize]>>,
    pub(crate) uses: BlockUses,
    /// The thread cache that the block returns to.
    pub(crate) home: Option<Arc<ThreadCache>>,
}

pub(crate) type OwnedBlock = Arc<Block>;

impl Block {
    pub(crate) fn new(
        ptr: HostPtr,
        bytes: usize,
        run: Run,
        offset: usize,
        borders: Option<Arc<[usize]>>,
        home: Option<Arc<ThreadCache>>,
    ) -> OwnedBlock {
        let size = slabs::size_of_request(bytes, run.pages);
        Arc::new(Self {
            ptr,
            bytes,
            run,
            offset,
            size,
            requested: AtomicUsize::new(0),
            borders,
            uses: BlockUses::new(),
            home,
        })
    }

    /// Begins the life of a buffer that requested so many bytes.
    #[inline]
    pub(crate) fn begin_life(&self, requested: usize) {
        self.requested.store(requested, Ordering::Relaxed);
        self.uses.begin_life();
    }

    pub(crate) fn requested(&self) -> usize {
        self.requested.load(Ordering::Relaxed)
    }

    /// Returns whether the block lies in one registration.
    pub(crate) fn is_undivided(&self) -> bool {
        self.borders.is_none()
    }

    /// Splits a range of bytes, counted from the start of the block, at the borders between registrations. An empty range is
    /// one part.
    pub(crate) fn cut(&self, range: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let borders = self.borders.clone();
        let mut rest = Some(range);
        std::iter::from_fn(move || {
            let Range { start, end } = rest.take()?;
            let border = borders.iter().flat_map(|borders| borders.iter()).copied().find(|border| *border > start);
            let border = border.filter(|border| *border < end);
            if let Some(border) = border {
                rest = Some(border..end);
            }
            Some(start..border.unwrap_or(end))
        })
    }

    /// Keeps the block. It belongs to a buffer, which the caller must borrow.
    pub(crate) fn keep(self: &Arc<Self>) -> KeptBlock {
        self.uses.count_keeper();
        KeptBlock(Arc::clone(self))
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
