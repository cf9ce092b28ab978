//! Device memory that was dropped while streams may still use it. It is freed once every one of them has passed that use.
//!
//! No thread waits for this list alone, except for memory of other code. A request for memory, a wait for a stream, a trim, and the end of the runtime go
//! through it. Each takes out one block at a time, so that other threads find the rest.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::completion_events::CompletionEvent;
use super::device_memory::DeviceMemory;
use super::keep_alive::KeepAlive;
use super::stream_use::{StreamUse, UseEnd};
use crate::capture::thread::in_capture;
use crate::services::Services;
use highwater_hal::{DevicePtr, Result};

/// A block that waits for its streams.
#[derive(Debug)]
pub(crate) struct DeferredFree {
    pub(crate) device: u32,
    pub(crate) ptr: DevicePtr,
    /// Completion events that are not known to be passed.
    pub(crate) after: Vec<Arc<CompletionEvent>>,
    /// Uses that have no completion event yet, because other code captures their stream.
    pub(crate) later: Vec<StreamUse>,
    /// True if the use of a stream has no completion event. Then the block is freed only by the end of the runtime.
    pub(crate) unmarked: bool,
    /// Keeps memory of other code, which is dropped instead of freed. `None` for memory of the backend.
    pub(crate) keeps: Option<KeepAlive>,
}

impl DeferredFree {
    /// Records the ends of the uses that have no completion event yet.
    pub(crate) fn record_later(&mut self) {
        for use_ in std::mem::take(&mut self.later) {
            match use_.completion() {
                UseEnd::At(completion) => self.after.push(completion),
                UseEnd::Later => self.later.push(use_),
                UseEnd::Unknown => self.unmarked = true,
            }
        }
    }
}

/// Blocks that wait to be freed.
pub(crate) struct DeferredFrees {
    pub(crate) memory: Arc<DeviceMemory>,
    list: Mutex<VecDeque<DeferredFree>>,
    /// Length of the list, so that a thread that finds it empty needs no lock.
    count: AtomicUsize,
    /// Blocks of other code that wait. The sharing thread goes through the list for them, because their owner waits.
    adopted: AtomicUsize,
    /// Blocks whose last use has no completion event: freed when the runtime ends.
    stranded: Mutex<Vec<DeferredFree>>,
}

impl DeferredFrees {
    pub(crate) fn new(memory: Arc<DeviceMemory>) -> Self {
        let (count, adopted) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self { memory, list: Mutex::default(), count, adopted, stranded: Mutex::default() }
    }

    fn services(&self) -> &Services {
        &self.memory.services
    }

    /// Frees a block once its completion events are passed.
    pub(crate) fn defer(&self, free: DeferredFree) {
        if free.unmarked {
            return self.strand(free);
        }
        if free.keeps.is_some() {
            self.adopted.fetch_add(1, Ordering::Relaxed);
        } else {
            self.services().ledger.set_dropped(free.ptr);
        }
        self.push(free);
    }

    /// Returns whether blocks of other code wait for their streams.
    pub(crate) fn has_adopted(&self) -> bool {
        self.adopted.load(Ordering::Relaxed) > 0
    }

    fn forget_adopted(&self, free: &DeferredFree) {
        if free.keeps.is_some() {
            self.adopted.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Keeps a block for the end of the runtime, because the end of its use is unknown.
    pub(crate) fn strand(&self, free: DeferredFree) {
        self.stranded.lock().push(free);
    }

    /// Takes every block out, at the end of the runtime.
    pub(crate) fn take_all(&self) -> Vec<DeferredFree> {
        let stranded = std::mem::take(&mut *self.stranded.lock());
        std::iter::from_fn(|| self.pop()).chain(stranded).collect()
    }

    fn push(&self, free: DeferredFree) {
        let mut list = self.list.lock();
        list.push_back(free);
        self.count.store(list.len(), Ordering::Relaxed);
    }

    /// Takes out the block that was added or queried longest ago.
    fn pop(&self) -> Option<DeferredFree> {
        let mut list = self.list.lock();
        let free = list.pop_front();
        self.count.store(list.len(), Ordering::Relaxed);
        free
    }

    pub(crate) fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Frees the deferred blocks whose streams have passed their use. With `wait`, waits for them. Without, queries only part
    /// of a long list on a busy device; the next call begins with the blocks that were not queried.
    pub(crate) fn trim(&self, wait: bool) -> Result<()> {
        const ENOUGH_PENDING: usize = 16;
        if in_capture() {
            return Ok(());
        }
        let mut result = self.services().destroy_dropped();
        let mut pending = 0;
        for _ in 0..self.len() {
            if pending == ENOUGH_PENDING {
                break;
            }
            let Some(mut free) = self.pop() else { break };
            free.record_later();
            if free.unmarked {
                self.forget_adopted(&free);
                self.strand(free);
                continue;
            }
            while let Some(completion) = free.after.last() {
                match self.services().is_passed(completion, wait) {
                    Ok(true) => drop(free.after.pop()),
                    Ok(false) => break,
                    Err(error) => {
                        result = result.and(Err(error));
                        break;
                    }
                }
            }
            if !free.after.is_empty() || !free.later.is_empty() {
                pending += 1;
                self.push(free);
                continue;
            }
            self.forget_adopted(&free);
            // SAFETY: Every stream that used the block has passed its last use, and its owner is gone.
            if let Err(error) = unsafe { self.free(&free) } {
                // The end of the runtime retries once more.
                self.strand(free);
                result = result.and(self.services().note(Err(error)));
            }
        }
        result
    }

    /// Frees a block.
    ///
    /// # Safety
    /// The owner must be gone, and every use by a stream must be passed.
    pub(crate) unsafe fn free(&self, free: &DeferredFree) -> Result<()> {
        if let Some(keeps) = &free.keeps {
            keeps.end();
            return Ok(());
        }
        // SAFETY: The caller upholds the contract.
        unsafe { self.memory.free(free.device, free.ptr) }
    }
}

#[cfg(test)]
impl DeferredFrees {
    pub(crate) fn hold_locks(&self) -> impl Drop + '_ {
        crate::testing::Held((self.list.lock(), self.stranded.lock(), self.memory.hold_locks()))
    }

    pub(crate) fn is_locked(&self) -> bool {
        self.list.is_locked() || self.stranded.is_locked() || self.memory.is_locked()
    }
}
