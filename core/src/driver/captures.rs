//! The captures that are open in a vendor's library, for all backends over it.
//!
//! A backend that is opened twice asks the same library, which loses a capture of the one by a call of the other.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::records;

/// The captures that backends of this process have begun in one vendor's library, and that are open.
#[derive(Debug)]
pub struct Captures {
    open: AtomicU32,
    /// By ordinal.
    devices: Box<[AtomicU32]>,
    /// Whether streams of other code were wrapped, whose captures nobody tells.
    foreign: AtomicBool,
}

/// Whether another copy of this crate is in the process, whose captures nobody tells: in a plugin, or in the program.
static OTHER_COPIES: AtomicBool = AtomicBool::new(false);

/// Notes that another copy of this crate may be in the process: from here on, every question is asked in relaxed mode.
pub(crate) fn note_other_copies() {
    if !OTHER_COPIES.swap(true, Ordering::Relaxed) {
        records::wait_for_questions();
    }
}

/// Undoes it, for tests.
#[cfg(test)]
pub(super) fn forget_other_copies() {
    OTHER_COPIES.store(false, Ordering::Relaxed);
}

impl Captures {
    /// None yet, in a library that sees so many devices.
    #[must_use]
    pub fn new(devices: usize) -> Self {
        let devices = (0..devices).map(|_| AtomicU32::new(0)).collect();
        Self { open: AtomicU32::new(0), devices, foreign: AtomicBool::new(false) }
    }

    /// Whether one is open.
    #[inline(always)]
    pub(super) fn is_any_open(&self) -> bool {
        // Relaxed: the fence of an announcement comes before, and one of the capture's beginning after its count.
        self.open.load(Ordering::Relaxed) != 0
    }

    /// Whether one may be open, those that nobody tells included.
    #[inline(always)]
    pub(super) fn may_be_open(&self) -> bool {
        self.is_any_open() || self.foreign.load(Ordering::Relaxed) || OTHER_COPIES.load(Ordering::Relaxed)
    }

    /// Whether one is open on a stream of the device.
    pub(super) fn are_open_on(&self, device: u32) -> bool {
        self.devices.get(device as usize).is_some_and(|open| open.load(Ordering::Relaxed) != 0)
    }

    pub(super) fn note_foreign(&self) {
        self.foreign.store(true, Ordering::Relaxed);
    }

    pub(super) fn began(&self, device: u32) {
        self.open.fetch_add(1, Ordering::Relaxed);
        if let Some(open) = self.devices.get(device as usize) {
            open.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn ended(&self, device: u32) {
        self.open.fetch_sub(1, Ordering::Relaxed);
        if let Some(open) = self.devices.get(device as usize) {
            open.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
