//! The numbers of the table: those of the contract, and those of the table alone.

pub(super) use highwater_hal::numbers::{Abilities, CHOICES, Coded, Constant, Facts, split_kind};
pub(super) use highwater_hal::numbers::{MEMORY_PLAIN, MEMORY_SHAREABLE, MEMORY_STREAM_ORDERED};

/// The result of a call that panicked. The program never calls such a plugin again.
pub(super) const PANICKED: i32 = -1;

/// The number of a host address, as a side of a copy.
pub(super) const LOCATION_HOST: u32 = 0;
/// The number of a device address, as a side of a copy.
pub(super) const LOCATION_DEVICE: u32 = 1;
