//! Living memory by address: blocks, page-locked ranges and mappings.

use std::collections::BTreeMap;

use highwater_hal::{DeviceMemoryKind, DevicePtr, Location, StreamId, Transport};

use super::ledger::Made;

/// The address space of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Space {
    Host,
    Device(u32),
    /// The reserved addresses of a device. Bytes lie there once memory is mapped.
    Reserved(u32),
}

/// The kind of memory of a range, which decides how it is given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Holding {
    Plain,
    Shareable(Transport),
    StreamOrdered(StreamId),
    HostAllocated,
    HostRegistered,
    /// Memory of another process, with the number of its opens.
    Mapped {
        opens: u64,
    },
    /// Addresses without memory.
    Addresses {
        bytes: u64,
    },
    /// Physical memory, for a device that has access, with the transport that shares it.
    Piece {
        shareable: Option<Transport>,
    },
}

impl Holding {
    pub(super) fn of(kind: DeviceMemoryKind) -> Self {
        match kind {
            DeviceMemoryKind::Shareable(transport) => Self::Shareable(transport),
            DeviceMemoryKind::StreamOrdered(stream) => Self::StreamOrdered(stream),
            _ => Self::Plain,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Plain | Self::Shareable(_) | Self::StreamOrdered(_) => "block of device memory",
            Self::HostAllocated => "block of page-locked memory",
            Self::HostRegistered => "registration",
            Self::Mapped { .. } => "mapping",
            Self::Addresses { .. } => "range of reserved addresses",
            Self::Piece { .. } => "piece of mapped memory",
        }
    }
}

/// A range of memory.
#[derive(Debug, Clone)]
pub(super) struct Range {
    pub(super) made: Made,
    pub(super) bytes: u64,
    pub(super) holding: Holding,
    /// Whether a call is giving it back. The backend may issue the address again before that call returns.
    pub(super) releasing: bool,
    /// Whether an injected fault refused to give it back.
    pub(super) refused: bool,
}

/// The living ranges, and the last range of each address that is gone.
#[derive(Debug, Default)]
pub(super) struct Ranges {
    pub(super) alive: BTreeMap<(Space, u64), Range>,
    gone: BTreeMap<(Space, u64), Range>,
}

impl Ranges {
    /// Enters a range. Returns what is wrong with it, if anything.
    pub(super) fn insert(&mut self, space: Space, start: u64, range: Range) -> Option<String> {
        let overlapped = self.overlapping(space, start, range.bytes).map(|(start, other)| {
            format!(
                "{} at {start:#x}, {} bytes, which is alive: {}",
                other.holding.name(),
                other.bytes,
                other.made.of(other.holding.name())
            )
        });
        let end = start.saturating_add(range.bytes);
        let said = overlapped.map(|other| {
            format!("{} from {start:#x} to {end:#x} overlaps a {other}", range.made.of(range.holding.name()))
        });
        self.alive.insert((space, start), range);
        said
    }

    /// Returns a living range that shares a byte with this one and is not being given back.
    fn overlapping(&self, space: Space, start: u64, bytes: u64) -> Option<(u64, &Range)> {
        let end = start.saturating_add(bytes);
        let before = self.alive.range((space, 0)..(space, end)).rev();
        before
            .take_while(|((_, at), other)| at.saturating_add(other.bytes) > start)
            .find(|(_, other)| !other.releasing)
            .map(|((_, at), other)| (*at, other))
    }

    /// Removes a range.
    pub(super) fn remove(&mut self, space: Space, start: u64) {
        if let Some(range) = self.alive.remove(&(space, start)) {
            self.gone.insert((space, start), range);
        }
    }

    pub(super) fn get(&self, space: Space, start: u64) -> Option<&Range> {
        self.alive.get(&(space, start))
    }

    pub(super) fn get_mut(&mut self, space: Space, start: u64) -> Option<&mut Range> {
        self.alive.get_mut(&(space, start))
    }

    /// Returns the last range that began at this address and is gone.
    pub(super) fn gone(&self, space: Space, start: u64) -> Option<&Range> {
        self.gone.get(&(space, start))
    }

    /// Returns a living range that begins at this address of another device.
    pub(super) fn elsewhere(&self, space: Space, start: u64) -> Option<&Range> {
        let other = |of: Space| matches!((of, space), (Space::Device(_), Space::Device(_))) && of != space;
        self.alive.iter().find(|((of, at), _)| other(*of) && *at == start).map(|(_, range)| range)
    }

    /// Returns whether a range lies inside pieces of mapped memory without a gap.
    fn is_mapped(&self, space: Space, start: u64, end: u64) -> bool {
        let is_piece = |range: &Range| matches!(range.holding, Holding::Piece { .. });
        let first =
            self.alive.range(..=(space, start)).next_back().filter(|((of, _), range)| *of == space && is_piece(range));
        let Some(((_, at), range)) = first else { return false };
        let mut reached = at.saturating_add(range.bytes);
        while start < reached && reached < end {
            match self.get(space, reached).filter(|range| is_piece(range)) {
                Some(next) => reached = reached.saturating_add(next.bytes),
                None => return false,
            }
        }
        start < reached && end <= reached
    }

    /// Returns what is wrong with the use of these bytes, if anything.
    pub(super) fn misuse(&self, what: &str, space: Space, start: u64, bytes: u64) -> Option<String> {
        let end = start.saturating_add(bytes);
        let holds = |(&(of, at), range): (&(Space, u64), &Range)| {
            of == space && at <= start && end <= at.saturating_add(range.bytes)
        };
        if self.is_mapped(space, start, end) {
            return None;
        }
        // A range that is being given back may precede a larger range that already has its bytes.
        let mut before = self.alive.range(..=(space, start)).rev();
        if bytes == 0 || before.find(|entry| holds(*entry) || !entry.1.releasing).is_some_and(holds) {
            return None;
        }
        let here = match space {
            Space::Host => "page-locked memory".to_owned(),
            Space::Device(device) | Space::Reserved(device) => format!("memory of device {device}"),
        };
        let range = format!("{what} from {start:#x} to {end:#x}");
        if let Some((_, gone)) = self.gone.range(..=(space, start)).next_back().filter(|entry| holds(*entry)) {
            let name = gone.holding.name();
            return Some(format!("use after free: {range} lies in a {name} that is gone: {}", gone.made.of(name)));
        }
        let elsewhere = self.alive.iter().find(|((of, at), range)| {
            matches!((of, space), (Space::Device(_), Space::Device(_)))
                && *of != space
                && *at <= start
                && end <= at.saturating_add(range.bytes)
        });
        if let Some(((Space::Device(other), _), found)) = elsewhere {
            let made = found.made.of(found.holding.name());
            return Some(format!("wrong device: {range} is {here} for the call, and lies on device {other}: {made}"));
        }
        Some(format!("{range} does not lie in one living range of {here}"))
    }
}

/// Returns the address of a side of a copy.
pub(super) fn side(location: Location) -> (Space, u64) {
    match location {
        Location::Host(ptr) => (Space::Host, ptr.address() as u64),
        Location::Device { device, ptr } => (Space::Device(device), ptr.get()),
    }
}

pub(super) fn on(device: u32, ptr: DevicePtr) -> (Space, u64) {
    (Space::Device(device), ptr.get())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(number: u64, bytes: u64, releasing: bool) -> Range {
        let made = Made { operation: "host_allocate", number, at: None };
        Range { made, bytes, holding: Holding::HostAllocated, releasing, refused: false }
    }

    #[test]
    fn bytes_that_were_given_out_again_are_used_while_their_release_is_not_noted_yet() {
        let mut ranges = Ranges::default();
        // Another thread gives back 0x81a0, while this thread already has the same bytes in a larger block.
        assert_eq!(ranges.insert(Space::Host, 0x81a0, range(1, 0x100, true)), None);
        assert_eq!(ranges.insert(Space::Host, 0x8000, range(2, 0x2000, false)), None);
        assert_eq!(ranges.misuse("the source", Space::Host, 0x8200, 0x1000), None);
        assert_eq!(ranges.misuse("the source", Space::Host, 0x81b0, 0x10), None);
        let past = ranges.misuse("the source", Space::Host, 0x8200, 0x2000).unwrap();
        assert!(past.contains("does not lie in one living range"), "{past}");
        // If no other range has the bytes, a block that is being given back still counts.
        assert_eq!(ranges.misuse("the source", Space::Host, 0x81a0, 0x100), None);
        ranges.remove(Space::Host, 0x8000);
        assert!(ranges.misuse("the source", Space::Host, 0x8200, 0x1000).unwrap().contains("use after free"));
    }
}
