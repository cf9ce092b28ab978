//! Handle numbers, and the stream that a handle names.

use std::sync::atomic::{AtomicU64, Ordering};

use highwater_hal::StreamId;

/// The distance between handles of one call of [`new_handles`].
pub(crate) const STEP: u64 = 64;

/// Returns the first of `count` new handles. They look like addresses and are never reused, so a stale handle is detected.
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
