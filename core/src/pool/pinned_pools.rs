//! The pools of page-locked memory of a runtime: one for requests without a device, one for each NUMA node that a device is on, if
//! the machine has several (`nodes.rs`), and one for write-combined memory, if the devices have it.
//!
//! Each pool has ranges and thread caches of its own, so a block keeps its node and its kind. The pools share the parts that a
//! runtime has once: the registry of thread caches with the count of live buffers, the right to grow, the cap, and the cap on idle
//! memory. A pool that exceeds a cap, or is out of memory, also releases the idle memory of the others.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use super::block::{Block, KeptBlock};
use super::block_uses::BlockUses;
use super::completion_events::CompletionEvent;
use super::host_files::{HostFiles, MapsFiles};
use super::nodes::Nodes;
use super::pinned::{PinnedPool, PoolRef, Special};
use super::recorder::Recorder;
use super::thread_cache::query_again;
use super::{HostCacheStatistics, HostMemoryOptions};
use crate::ledger::HostBlockInfo;
use crate::services::Services;
use highwater_hal::{Error, ErrorKind, HostMemoryKind, HostPtr, Result};

pub(crate) struct PinnedPools {
    /// The pool without a node, of the default kind.
    first: Arc<PinnedPool>,
    others: Box<[Arc<PinnedPool>]>,
    write_combined: Option<Arc<PinnedPool>>,
    /// Memory beside the pools, which several processes can have.
    pub(crate) files: Arc<HostFiles>,
    /// The pool of each device.
    of_devices: Box<[Arc<PinnedPool>]>,
}

impl PinnedPools {
    pub(crate) fn new(
        services: &Arc<Services>,
        options: &HostMemoryOptions,
        nodes: &Nodes,
        recorder: Option<&Arc<Recorder>>,
    ) -> Self {
        let files = Arc::new(HostFiles::new(Arc::clone(services)));
        let make =
            |beside| PinnedPool::new(Arc::clone(services), options, recorder.cloned(), Arc::clone(&files), beside);
        let first = make(None);
        let weak: Weak<dyn MapsFiles> = Arc::<PinnedPool>::downgrade(&first);
        files.set_pool(weak);
        let special = |special| make(Some((&*first, special)));
        let mut of_nodes = BTreeMap::new();
        let of_device = |node: Option<u32>| match node.filter(|_| first.registers()) {
            Some(node) => {
                let made = || special(Special::Node(node));
                Arc::clone(of_nodes.entry(node).or_insert_with(made))
            }
            None => Arc::clone(&first),
        };
        let of_devices = services.devices.iter().map(|device| nodes.of_device(&device.info)).map(of_device).collect();
        let has_write_combined = services.devices.iter().all(|device| device.capabilities.write_combined);
        let write_combined = has_write_combined.then(|| special(Special::Kind(HostMemoryKind::WriteCombined)));
        let others = of_nodes.into_values().chain(write_combined.clone()).collect();
        let pools = Self { others, write_combined, files, of_devices, first };
        PinnedPool::unite(&pools.all().collect::<Vec<_>>());
        pools
    }

    /// Returns the pool of requests without a device.
    #[inline]
    pub(crate) fn of_runtime(&self) -> &PinnedPool {
        &self.first
    }

    /// Returns the pool of a device of the runtime.
    #[inline]
    pub(crate) fn of_device(&self, ordinal: u32) -> &PinnedPool {
        &self.of_devices[ordinal as usize]
    }

    /// Returns the pool of a kind of memory.
    pub(crate) fn of_kind(&self, kind: HostMemoryKind) -> Result<&PinnedPool> {
        match kind {
            HostMemoryKind::Default => Ok(&self.first),
            HostMemoryKind::WriteCombined => {
                self.write_combined.as_deref().ok_or_else(|| Error::lacks("pinned", "write_combined"))
            }
            kind => {
                Err(Error::new(ErrorKind::Unsupported, "pinned", format!("no pool has memory of the kind {kind:?}")))
            }
        }
    }

    fn all(&self) -> impl Iterator<Item = &Arc<PinnedPool>> {
        std::iter::once(&self.first).chain(&self.others)
    }

    /// Returns whether a buffer's pool is one of these.
    #[inline]
    pub(crate) fn contain(&self, pool: PoolRef) -> bool {
        self.all().any(|of_runtime| pool.is(of_runtime))
    }

    /// Returns the block that contains an address, if a buffer owns it.
    pub(crate) fn live_block(&self, ptr: HostPtr) -> Option<HostBlockInfo> {
        self.all().find_map(|pool| pool.live_block(ptr)).or_else(|| self.files.live_block(ptr))
    }

    /// Keeps the block that contains an address, if a buffer owns it. If the buffer ends in the meantime, the block is not
    /// reused before the caller releases it.
    pub(crate) fn keep_live_block(&self, ptr: HostPtr) -> Option<KeptBlock> {
        self.all().find_map(|pool| pool.keep_live_block(ptr)).or_else(|| self.files.keep_live_block(ptr))
    }

    /// Releases a block that a capture, a graph or a note by address has kept.
    pub(crate) fn let_go(&self, kept: KeptBlock) {
        self.all().find(|pool| pool.owns(&kept)).unwrap_or(&self.first).let_go(kept);
    }

    /// Starts the background thread of the runtime if the options ask for it.
    pub(crate) fn start_background(&self, options: &HostMemoryOptions) -> Result<()> {
        self.first.start_background(options)
    }

    /// Ends the background thread.
    pub(crate) fn stop_background(&self) {
        self.first.stop_background();
    }

    /// Notes that a stream uses a block up to a completion event, for the tests of the pools' own record.
    pub(crate) fn watch_use(&self, block: &Block, completion: &Arc<CompletionEvent>) {
        if self.first.watches_uses()
            && let Some(pool) = self.all().find(|pool| pool.owns(block))
        {
            pool.watch_use(block, completion);
        }
    }

    /// Removes uses of a block that are over.
    pub(crate) fn forget_passed(&self, uses: &BlockUses) {
        self.first.forget_passed(uses);
    }

    /// Leaves the runtime to the live buffers, if there are any. The last of them ends it.
    pub(crate) fn leave_to_buffers(&self, runtime: Arc<dyn Any + Send + Sync>) {
        self.first.leave_to_buffers(runtime);
    }

    /// Returns the number of live buffers, of all pools.
    pub(crate) fn live_buffers(&self) -> u64 {
        self.first.live_buffers()
    }

    /// Frees memory above the cap, and memory that was idle for the set time, after a wait of the calling thread.
    pub(crate) fn trim_in_passing(&self) {
        query_again();
        self.files.collect();
        self.all().for_each(|pool| pool.trim_in_passing());
    }

    /// Frees the page-locked memory that no buffer, graph or stream uses.
    pub(crate) fn trim(&self) -> Result<()> {
        self.all().fold(self.files.trim(), |result, pool| result.and(pool.trim()))
    }

    /// Frees all memory, at the end of the runtime.
    ///
    /// # Safety
    /// The devices must have executed everything, and no buffer may own a block.
    pub(crate) unsafe fn free_all(&self) -> Result<()> {
        // SAFETY: As the caller promises.
        let files = unsafe { self.files.free_all() };
        // SAFETY: As the caller promises.
        let free_all = |pool: &PinnedPool| unsafe { pool.free_all() };
        self.all().fold(files, |result, pool| result.and(free_all(pool)))
    }

    /// Returns the sum of the pools' statistics.
    pub(crate) fn statistics(&self) -> HostCacheStatistics {
        let sum = self.others.iter().fold(self.first.statistics(), |sum, pool| plus(sum, pool.statistics()));
        // The pools reach their peaks at different times.
        if self.others.is_empty() {
            sum
        } else {
            let peak_held_bytes = self.first.peak_of_all();
            HostCacheStatistics { peak_held_bytes, peak_live_bytes: sum.peak_live_bytes.min(peak_held_bytes), ..sum }
        }
    }
}

/// Adds statistics, field by field.
fn plus(sum: HostCacheStatistics, other: HostCacheStatistics) -> HostCacheStatistics {
    macro_rules! add {
        ($($field:ident)*) => {{
            // A field that is not named here does not compile.
            let HostCacheStatistics { $($field),* } = sum;
            HostCacheStatistics { $($field: $field + other.$field),* }
        }};
    }
    add!(requested_bytes rounding_bytes held_bytes peak_held_bytes peak_live_bytes pieces live_blocks live_bytes graph_blocks
        graph_bytes free_bytes slab_bytes cached_blocks cached_bytes inbox_blocks inbox_bytes waiting_blocks waiting_bytes
        unmarked_blocks unmarked_bytes remnant_blocks remnant_bytes hits cache_hits inbox_hits free_hits waiting_hits
        merged_hits misses allocations frees trim_frees cap_evictions idle_time_frees exhaustion_frees failed_growth_frees)
}

#[cfg(test)]
impl PinnedPools {
    /// Holds every lock of the first pool. The others share some of them.
    pub(crate) fn hold_locks(&self) -> impl Drop + '_ {
        crate::testing::Held((self.first.hold_locks(), self.files.hold_locks()))
    }

    pub(crate) fn is_locked(&self) -> bool {
        self.all().any(|pool| pool.is_locked()) || self.files.is_locked()
    }
}
