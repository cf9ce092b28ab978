//! The captures that are open in a vendor's library, counted for all backends over it.
//!
//! Two openings of a backend call the same library, so a call of one can lose a capture of the other.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::thread_records;

/// The open captures that backends of this process have begun in one vendor's library.
#[derive(Debug)]
pub struct Captures {
    open: AtomicU32,
    /// The counts by ordinal.
    devices: Box<[AtomicU32]>,
    /// True once a stream of other code was wrapped. Its captures are unknown here.
    foreign: AtomicBool,
}

impl Captures {
    /// No captures yet, in a library that sees a given number of devices.
    #[must_use]
    pub fn new(devices: usize) -> Self {
        // The captures of another copy are unknown here, so queries become relaxed from then on.
        highwater_hal::copies::on_note(thread_records::wait_for_questions);
        let devices = (0..devices).map(|_| AtomicU32::new(0)).collect();
        Self { open: AtomicU32::new(0), devices, foreign: AtomicBool::new(false) }
    }

    /// Returns whether a capture is open.
    #[inline(always)]
    pub(super) fn is_any_open(&self) -> bool {
        // Relaxed: an announcement's fence precedes this load, and the beginning of a capture fences after its count.
        self.open.load(Ordering::Relaxed) != 0
    }

    /// Returns whether a capture may be open, unknown ones included.
    #[inline(always)]
    pub(super) fn may_be_open(&self) -> bool {
        self.is_any_open() || self.foreign.load(Ordering::Relaxed) || highwater_hal::copies::are_present()
    }

    /// Returns whether a capture is open on a stream of the device.
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
