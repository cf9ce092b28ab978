//! Device memory that was dropped while streams may still use it: freed once every one of them has passed its mark.
//!
//! Nothing here waits on its own: the list is gone through when memory is asked for, when a stream is synchronised, when
//! the user says so, and when the runtime ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::id::EventId;
use crate::memory::DevicePtr;
use crate::stream::StreamCore;

/// A block that waits for its streams.
#[derive(Debug)]
pub(crate) struct DeferredFree {
    pub(crate) device: u32,
    pub(crate) ptr: DevicePtr,
    /// The stream in whose order the block has to be freed, for stream-ordered memory.
    pub(crate) home: Option<Arc<StreamCore>>,
    /// Marks that are not known to be passed.
    pub(crate) after: Vec<EventId>,
    /// A mark could not be recorded: only the end of the runtime, which synchronises the device, frees the block.
    pub(crate) unmarked: bool,
}

#[derive(Debug, Default)]
pub(crate) struct DeferredFrees {
    list: Mutex<Vec<DeferredFree>>,
    /// Length of the list, so that those who find it empty need no lock.
    count: AtomicUsize,
}

impl DeferredFrees {
    pub(crate) fn push(&self, free: DeferredFree) {
        let mut list = self.list.lock();
        list.push(free);
        self.count.store(list.len(), Ordering::Relaxed);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// Takes everything out, for the caller to ask the backend about without a lock; what is not done yet comes back by
    /// [`DeferredFrees::push`].
    pub(crate) fn take_all(&self) -> Vec<DeferredFree> {
        let mut list = self.list.lock();
        self.count.store(0, Ordering::Relaxed);
        std::mem::take(&mut *list)
    }
}

#[cfg(test)]
impl DeferredFrees {
    pub(crate) fn hold_lock(&self) -> impl Drop + '_ {
        crate::testing::Held(self.list.lock())
    }
}
