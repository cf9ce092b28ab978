//! Handle numbers, and the stream that a handle names.

use std::sync::atomic::{AtomicU64, Ordering};

use highwater_hal::StreamId;
use parking_lot::Mutex;

/// The distance between handles of one call of [`new_handles`].
pub(crate) const STEP: u64 = 64;

/// The handles of one kind of object. The next object gets the handle of the one that ended last, as with the vendors.
#[derive(Debug)]
pub(crate) struct Handles(Mutex<Vec<u64>>);

impl Handles {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// Returns the handle of a new object.
    pub(crate) fn take(&self) -> u64 {
        self.0.lock().pop().unwrap_or_else(|| new_handles(1))
    }

    /// Takes back the handle of an object that no table contains any more.
    pub(crate) fn give_back(&self, raw: u64) {
        self.0.lock().push(raw);
    }
}

/// Returns the first of `count` handles that no object had before. They look like addresses.
pub(crate) fn new_handles(count: u64) -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0x5000_0000_0000);
    // Relaxed: only the number counts.
    NEXT.fetch_add(count * STEP, Ordering::Relaxed)
}

/// Returns a number that no other object of the process has.
pub(crate) fn new_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    // Relaxed: only the number counts.
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// `CU_STREAM_NON_BLOCKING`.
pub const NON_BLOCKING: u32 = 1;

/// A stream by its handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    /// The mock's stream.
    pub id: StreamId,
    /// The device of its context.
    pub device: u32,
    /// `CU_STREAM_NON_BLOCKING` or 0.
    pub flags: u32,
    /// The requested priority, clamped to the vendor's range.
    pub priority: i32,
    /// A number that no other stream of the process has.
    pub number: u64,
}

impl Stream {
    /// Returns whether it is the legacy default stream of its device.
    #[must_use]
    pub fn is_legacy(&self) -> bool {
        self.id.is_legacy_default()
    }
}
