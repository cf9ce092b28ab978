//! Device memory that was dropped while streams may still use it: freed once every one of them has passed its mark.
//!
//! Nothing here waits on its own: the list is gone through when memory is asked for, when a stream is synchronised, when
//! the user says so, and when the runtime ends. Who goes through it takes one block out at a time, so that the others
//! find the rest.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::events::Mark;
use crate::runtime::RuntimeInner;
use crate::stream::{Marked, StreamCore, StreamUse};
use highwater_hal::DevicePtr;

/// A block that waits for its streams.
#[derive(Debug)]
pub(crate) struct DeferredFree {
    pub(crate) device: u32,
    pub(crate) ptr: DevicePtr,
    /// The stream in whose order the block has to be freed, for stream-ordered memory.
    pub(crate) home: Option<Arc<StreamCore>>,
    /// Marks that are not known to be passed.
    pub(crate) after: Vec<Arc<Mark>>,
    /// Uses that could not be marked yet, because other code captures their stream.
    pub(crate) later: Vec<StreamUse>,
    /// Whether some stream's use could not be marked: then only the end of the runtime frees the block.
    pub(crate) unmarked: bool,
}

impl DeferredFree {
    /// Marks the uses that could not be marked yet.
    pub(crate) fn mark_later(&mut self, runtime: &RuntimeInner) {
        for use_ in std::mem::take(&mut self.later) {
            match use_.mark(runtime) {
                Marked::By(mark) => self.after.push(mark),
                Marked::Later => self.later.push(use_),
                Marked::Never => self.unmarked = true,
            }
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct DeferredFrees {
    list: Mutex<VecDeque<DeferredFree>>,
    /// Length of the list, so that those who find it empty need no lock.
    count: AtomicUsize,
}

impl DeferredFrees {
    pub(crate) fn push(&self, free: DeferredFree) {
        let mut list = self.list.lock();
        list.push_back(free);
        self.count.store(list.len(), Ordering::Relaxed);
    }

    /// Takes out the block that was put in or asked after longest ago.
    pub(crate) fn pop(&self) -> Option<DeferredFree> {
        let mut list = self.list.lock();
        let free = list.pop_front();
        self.count.store(list.len(), Ordering::Relaxed);
        free
    }

    pub(crate) fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
impl DeferredFrees {
    pub(crate) fn hold_lock(&self) -> impl Drop + '_ {
        crate::testing::Held(self.list.lock())
    }

    pub(crate) fn is_locked(&self) -> bool {
        self.list.is_locked()
    }
}
