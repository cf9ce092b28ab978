//! Handles: the numbers that stand for objects, and what a stream's handle stands for.

use std::sync::atomic::{AtomicU64, Ordering};

use highwater_hal::StreamId;

/// Between the handles that [`new_handles`] gives at once.
pub(crate) const STEP: u64 = 64;

/// Numbers that look like addresses and are never used again, so that a stale one is found out; the first of `count`.
pub(crate) fn new_handles(count: u64) -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0x5000_0000_0000);
    // Relaxed: only the number counts.
    NEXT.fetch_add(count * STEP, Ordering::Relaxed)
}

/// A number that nothing of the process had before.
pub(crate) fn new_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    // Relaxed: only the number counts.
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// `CU_STREAM_NON_BLOCKING`.
pub const NON_BLOCKING: u32 = 1;

/// A stream as a call names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    /// The mock's stream.
    pub id: StreamId,
    /// Whose context it belongs to.
    pub device: u32,
    /// `CU_STREAM_NON_BLOCKING` or 0.
    pub flags: u32,
    /// As it was asked for, within the vendor's range.
    pub priority: i32,
    /// A number that no other stream of the process has.
    pub number: u64,
}

impl Stream {
    /// Whether it is the legacy default stream of its device.
    #[must_use]
    pub fn is_legacy(&self) -> bool {
        self.id.is_legacy_default()
    }
}
