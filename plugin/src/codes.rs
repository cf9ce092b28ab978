//! The numbers of the table: those of the contract, and those that only the table has.

pub(super) use highwater_hal::numbers::{Abilities, CHOICES, Coded, Constant, Facts, split_kind};
pub(super) use highwater_hal::numbers::{MEMORY_PLAIN, MEMORY_SHAREABLE, MEMORY_STREAM_ORDERED};

/// What an answer of 0 and one of a panic are called in the header. A plugin that answers the latter is not called again.
pub(super) const PANICKED: i32 = -1;

/// Sides of a copy, which carry more than their number.
pub(super) const LOCATION_HOST: u32 = 0;
/// See [`LOCATION_HOST`].
pub(super) const LOCATION_DEVICE: u32 = 1;
