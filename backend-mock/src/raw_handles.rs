//! The raw handles of streams, events and BLAS handles: numbers. As with the vendors, the next object takes the number of the
//! one that ended last.

use std::sync::Arc;

use highwater_hal::BackendTag;
use parking_lot::Mutex;

/// The raw handles of one backend.
#[derive(Debug)]
pub(crate) struct RawHandles {
    /// The numbers without an object, the latest last, and the first that was never used.
    numbers: Mutex<(Vec<u64>, u64)>,
}

/// The distance between raw handles, which look like addresses.
const STEP: u64 = 64;

impl RawHandles {
    /// Creates the raw handles of a backend. No other backend of the process has the same.
    pub(crate) fn new(tag: BackendTag) -> Arc<Self> {
        Arc::new(Self { numbers: Mutex::new((Vec::new(), u64::from(tag.get()) << 32 | STEP)) })
    }

    /// Returns the raw handle of a new object.
    pub(crate) fn take(self: &Arc<Self>) -> RawHandle {
        let mut numbers = self.numbers.lock();
        let number = numbers.0.pop().unwrap_or_else(|| {
            numbers.1 += STEP;
            numbers.1 - STEP
        });
        RawHandle { number, owner: Arc::clone(self) }
    }
}

/// The raw handle of an object that lives.
#[derive(Debug)]
pub(crate) struct RawHandle {
    pub(crate) number: u64,
    owner: Arc<RawHandles>,
}

impl Drop for RawHandle {
    fn drop(&mut self) {
        self.owner.numbers.lock().0.push(self.number);
    }
}
