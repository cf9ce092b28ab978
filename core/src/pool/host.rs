//! The host cache: page-locked blocks, used again only after every stream that used them has passed that point.
//!
//! One bin for each size class, each with its own lock. A block that is dropped while a stream may still use it waits in
//! its bin; a request that finds no free block asks each waiting block in turn, so that a stream that is stuck holds up
//! its own blocks and no others. The vendor is never called under a lock.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use super::events::Mark;
use super::size_class;
use crate::memory::HostPtr;

/// A block of page-locked memory. Owned by a buffer or by the cache.
#[derive(Debug)]
pub(crate) struct PinnedBlock {
    pub(crate) ptr: HostPtr,
    pub(crate) bytes: usize,
    pub(crate) class: usize,
    /// Streams that may still use the block. Threads that use one buffer on one stream at once may leave two entries.
    pub(crate) uses: Mutex<Vec<PinnedUse>>,
    /// A stream may use the block and nobody can tell for how long.
    pub(crate) unmarked: AtomicBool,
}

/// A block as buffers and bins hand it to each other: one pointer to move.
pub(crate) type OwnedBlock = Box<PinnedBlock>;

/// Use of a block by a stream.
#[derive(Debug)]
pub(crate) struct PinnedUse {
    /// Key of the stream. The stream itself need not live on: its work is done when the mark is passed.
    pub(crate) stream: u64,
    /// Recorded after an operation of the stream on the block. Who asks after it shares it: see `events.rs`.
    pub(crate) after: Arc<Mark>,
    /// Whether an operation up to there writes the block.
    pub(crate) writes: bool,
}

#[derive(Debug, Default)]
struct Bin {
    free: Vec<OwnedBlock>,
    /// The block that was put in or asked after longest ago is in front.
    waiting: VecDeque<OwnedBlock>,
    live: u64,
    requested_bytes: u64,
    hits: u64,
    misses: u64,
}

impl Bin {
    fn keep(&mut self, block: OwnedBlock, unused: bool) {
        if unused { self.free.push(block) } else { self.waiting.push_back(block) }
    }
}

#[derive(Debug)]
pub(crate) struct HostCache {
    bins: Box<[Mutex<Bin>]>,
    held_bytes: AtomicU64,
    held_blocks: AtomicU64,
}

/// What a look into a bin found.
pub(crate) enum Found {
    /// A block nobody uses.
    Free(OwnedBlock),
    /// No free block, but so many that wait and may have become free.
    Waiting(usize),
}

impl HostCache {
    pub(crate) fn new() -> Self {
        let bins = (0..size_class::COUNT).map(|_| Mutex::default()).collect();
        Self { bins, held_bytes: AtomicU64::new(0), held_blocks: AtomicU64::new(0) }
    }

    /// Looks for a block and, where one is free, counts it as given out for `requested` bytes.
    #[inline]
    pub(crate) fn find(&self, class: usize, requested: usize) -> Found {
        let mut bin = self.bins[class].lock();
        match bin.free.pop() {
            Some(block) => {
                bin.hits += 1;
                bin.live += 1;
                bin.requested_bytes += requested as u64;
                Found::Free(block)
            }
            None => Found::Waiting(bin.waiting.len()),
        }
    }

    /// Takes out one waiting block, for the caller to ask the backend about without a lock. One at a time: the others
    /// that look meanwhile find the rest.
    pub(crate) fn pop_waiting(&self, class: usize) -> Option<OwnedBlock> {
        self.bins[class].lock().waiting.pop_front()
    }

    /// Puts back a block that nobody owns.
    pub(crate) fn put_back(&self, mut block: OwnedBlock) {
        let unused = block.uses.get_mut().is_empty();
        let mut bin = self.bins[block.class].lock();
        bin.keep(block, unused);
    }

    /// Takes out one free block.
    pub(crate) fn pop_free(&self, class: usize) -> Option<OwnedBlock> {
        self.bins[class].lock().free.pop()
    }

    /// How many blocks of a class are free, and how many wait.
    pub(crate) fn cached(&self, class: usize) -> (usize, usize) {
        let bin = self.bins[class].lock();
        (bin.free.len(), bin.waiting.len())
    }

    /// Counts a block that was found among the waiting (`fresh` false) or newly allocated.
    pub(crate) fn count_given(&self, block: &PinnedBlock, requested: usize, fresh: bool) {
        if fresh {
            self.held_bytes.fetch_add(block.bytes as u64, Ordering::Relaxed);
            self.held_blocks.fetch_add(1, Ordering::Relaxed);
        }
        let mut bin = self.bins[block.class].lock();
        bin.live += 1;
        bin.requested_bytes += requested as u64;
        if fresh {
            bin.misses += 1;
        } else {
            bin.hits += 1;
        }
    }

    /// Takes a block back from the buffer that owned it.
    #[inline]
    pub(crate) fn give_back(&self, mut block: OwnedBlock, requested: usize) {
        let unused = block.uses.get_mut().is_empty();
        let mut bin = self.bins[block.class].lock();
        bin.live -= 1;
        bin.requested_bytes -= requested as u64;
        bin.keep(block, unused);
    }

    /// Counts a block that its buffer gave up and that must not be given out again.
    pub(crate) fn count_unmarked(&self, class: usize, requested: usize) {
        let mut bin = self.bins[class].lock();
        bin.live -= 1;
        bin.requested_bytes -= requested as u64;
    }

    /// Uncounts a block that was freed.
    pub(crate) fn count_freed(&self, bytes: usize) {
        self.held_bytes.fetch_sub(bytes as u64, Ordering::Relaxed);
        self.held_blocks.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn statistics(&self) -> HostCacheStatistics {
        let mut sum = HostCacheStatistics {
            held_bytes: self.held_bytes.load(Ordering::Relaxed),
            held_blocks: self.held_blocks.load(Ordering::Relaxed),
            ..HostCacheStatistics::default()
        };
        for bin in &self.bins {
            let bin = bin.lock();
            sum.live_blocks += bin.live;
            sum.requested_bytes += bin.requested_bytes;
            sum.free_blocks += bin.free.len() as u64;
            sum.waiting_blocks += bin.waiting.len() as u64;
            sum.hits += bin.hits;
            sum.misses += bin.misses;
        }
        sum
    }
}

/// What the host cache holds and did. When no other thread is at work, `held_blocks` is the sum of `live_blocks`,
/// `free_blocks` and `waiting_blocks`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct HostCacheStatistics {
    /// Bytes asked for by the buffers that are alive.
    pub requested_bytes: u64,
    /// Bytes of page-locked memory held: by buffers, waiting, or free.
    pub held_bytes: u64,
    /// Blocks held.
    pub held_blocks: u64,
    /// Blocks that buffers own.
    pub live_blocks: u64,
    /// Blocks that can be given out at once.
    pub free_blocks: u64,
    /// Blocks whose streams may not have passed their last use.
    pub waiting_blocks: u64,
    /// Requests served from the cache.
    pub hits: u64,
    /// Requests that went to the backend.
    pub misses: u64,
}

#[cfg(test)]
impl HostCache {
    pub(crate) fn hold_locks(&self) -> impl Drop + '_ {
        crate::testing::Held(self.bins.iter().map(Mutex::lock).collect::<Vec<_>>())
    }
}
