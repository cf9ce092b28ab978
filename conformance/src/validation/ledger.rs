//! The ledger: the objects that a case has made and not yet given back, by the backend's own answers, and the findings.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::panic::Location;

use highwater_hal::{AnyId, BackendTag, LiveObjects, PhysicalMemoryId, StreamId, Transport};

use super::ranges::{Holding, Range, Ranges, Space};

/// The call that made an object.
#[derive(Debug, Clone, Copy)]
pub(super) struct Made {
    pub(super) operation: &'static str,
    /// The number of the object in the case, from 1.
    pub(super) number: u64,
    pub(super) at: Option<&'static Location<'static>>,
}

impl Made {
    /// Describes an object: what it is, which call made it, and where.
    pub(super) fn of(self, what: &str) -> String {
        let Self { operation, number, at } = self;
        match at {
            Some(at) => format!("{what} made by `{operation}` at {}:{}", at.file(), at.line()),
            None => format!("{what} made by `{operation}` (object {number} of the case)"),
        }
    }
}

/// An object with an id.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub(super) made: Made,
    /// Whether it wraps an object of other code, which no count includes.
    pub(super) foreign: bool,
    /// Whether an injected fault refused to destroy it.
    pub(super) refused: bool,
    /// Whether a call that destroys it has begun. Its id may be alive or stale.
    pub(super) destroying: bool,
}

/// An id that a backend must refuse, in words.
#[derive(Debug)]
pub(super) struct Unsound(pub(super) String);

impl fmt::Display for Unsound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The number of findings that are kept for a case. The first ones show the cause.
const MOST_FINDINGS: usize = 8;

/// The objects of one case.
#[derive(Debug)]
pub(super) struct Ledger {
    tag: BackendTag,
    devices: u32,
    made: u64,
    /// The living objects that have an id.
    alive: HashMap<AnyId, Entry>,
    dead: HashMap<AnyId, Made>,
    /// Handles by number.
    pub(super) handles: HashMap<u64, Made>,
    pub(super) ranges: Ranges,
    /// The bytes of physical memory, and the transport that shares it.
    pub(super) memory: HashMap<PhysicalMemoryId, (u64, Option<Transport>)>,
    /// The same for each piece of mapped memory, by address.
    pub(super) pieces: BTreeMap<u64, (u64, Option<Transport>)>,
    /// The number of calls that made a handle for another process.
    exports: u64,
    /// The number of releases that a fault refused and that were repeated.
    pub(super) retried: u64,
    findings: Vec<String>,
}

impl Ledger {
    pub(super) fn new(tag: BackendTag, devices: u32) -> Self {
        Self {
            tag,
            devices,
            made: 0,
            alive: HashMap::new(),
            dead: HashMap::new(),
            handles: HashMap::new(),
            ranges: Ranges::default(),
            memory: HashMap::new(),
            pieces: BTreeMap::new(),
            exports: 0,
            retried: 0,
            findings: Vec::new(),
        }
    }

    /// Records a finding.
    pub(super) fn found(&mut self, text: String) {
        if self.findings.len() < MOST_FINDINGS && !self.findings.contains(&text) {
            self.findings.push(text);
        }
    }

    /// Returns whether the device of an address space exists.
    pub(super) fn has(&self, space: Space) -> bool {
        match space {
            Space::Host => true,
            Space::Device(device) | Space::Reserved(device) => device < self.devices,
        }
    }

    /// Records a call that was accepted for a device that does not exist.
    pub(super) fn check_device(&mut self, operation: &'static str, device: u32) {
        if device >= self.devices {
            let devices = self.devices;
            self.found(format!("wrong device: `{operation}` accepted device {device}, and there are {devices}"));
        }
    }

    /// Describes the call that made a new object.
    pub(super) fn made(&mut self, operation: &'static str, at: Option<&'static Location<'static>>) -> Made {
        self.made += 1;
        Made { operation, number: self.made, at }
    }

    /// Enters memory that was mapped for a device.
    pub(super) fn mapped(&mut self, device: u32, start: u64, memory: PhysicalMemoryId) {
        let (bytes, shareable) = self.memory.get(&memory).copied().unwrap_or_default();
        let end = start.saturating_add(bytes);
        let text = format!("`map_memory` accepted {bytes} bytes at {start:#x} of device {device}");
        let reserved = self.ranges.alive.range(..=(Space::Reserved(device), start)).next_back();
        if !reserved.is_some_and(|((space, at), range)| *space == Space::Reserved(device) && end <= at + range.bytes) {
            self.found(format!("{text}, which are not reserved"));
        }
        if self.pieces.range(..end).next_back().is_some_and(|(at, (length, _))| at + length > start) {
            self.found(format!("{text}, where memory is mapped"));
        }
        if memory.device() != device {
            self.found(format!("wrong device: {text} for {memory:?}"));
        }
        self.pieces.insert(start, (bytes, shareable));
    }

    /// Returns the pieces in a range, and records if they do not form it exactly.
    fn pieces_of(&mut self, operation: &'static str, start: u64, bytes: u64) -> Vec<(u64, u64, Option<Transport>)> {
        let (mut next, end, mut found) = (start, start.saturating_add(bytes), Vec::new());
        while let Some(&(length, shareable)) = self.pieces.get(&next).filter(|_| next < end) {
            found.push((next, length, shareable));
            next += length;
        }
        if next != end || bytes == 0 {
            let text = format!("`{operation}` accepted {bytes} bytes at {start:#x}, which are no whole mappings");
            self.found(text);
        }
        found
    }

    /// Enters the access of a device to mapped memory.
    pub(super) fn accessed(&mut self, (start, bytes): (u64, u64), device: u32, at: Option<&'static Location<'static>>) {
        const OPERATION: &str = "set_memory_access";
        self.check_device(OPERATION, device);
        for (start, bytes, shareable) in self.pieces_of(OPERATION, start, bytes) {
            // Another thread's block may have had the address, and the call that frees it has not returned yet.
            if self.ranges.get(Space::Device(device), start).is_none_or(|range| range.releasing) {
                let made = self.made(OPERATION, at);
                let range =
                    Range { made, bytes, holding: Holding::Piece { shareable }, releasing: false, refused: false };
                if let Some(text) = self.ranges.insert(Space::Device(device), start, range) {
                    self.found(text);
                }
            }
        }
    }

    /// Removes memory that was unmapped.
    pub(super) fn unmapped(&mut self, start: u64, bytes: u64) {
        for (start, ..) in self.pieces_of("unmap_memory", start, bytes) {
            self.pieces.remove(&start);
            (0..self.devices).for_each(|device| self.ranges.remove(Space::Device(device), start));
        }
    }

    /// Records a handle for other processes. Its descriptor or file must go with its last copy.
    pub(super) fn exported(&mut self) {
        self.exports += 1;
    }

    /// Returns why a backend must refuse the id, if so. Every case may use a default stream, and none may destroy it.
    pub(super) fn unsound(&self, id: AnyId) -> Option<Unsound> {
        if self.alive.contains_key(&id) || matches!(id, AnyId::Stream(stream) if self.is_default(stream)) {
            return None;
        }
        Some(Unsound(match self.dead.get(&id) {
            Some(made) => format!("{id:?}, which was destroyed ({})", made.of(id.kind())),
            None => format!("{id:?}, which was never issued"),
        }))
    }

    /// Returns whether a backend must accept the id.
    pub(super) fn is_sound(&self, id: AnyId) -> bool {
        self.unsound(id).is_none() && self.alive.get(&id).is_none_or(|entry| !entry.destroying)
    }

    /// Notes that a call that destroys the object has begun, or that it has failed. Returns whether one had begun before.
    pub(super) fn begins_to_destroy(&mut self, id: AnyId, has_begun: bool) -> bool {
        self.alive.get_mut(&id).is_some_and(|entry| std::mem::replace(&mut entry.destroying, has_begun))
    }

    fn is_default(&self, id: StreamId) -> bool {
        let named =
            [StreamId::legacy_default(self.tag, id.device()), StreamId::per_thread_default(self.tag, id.device())];
        id.device() < self.devices && named.contains(&id)
    }

    /// Enters an id that the backend issued, and checks it.
    pub(super) fn issued(&mut self, id: AnyId, device: u32, made: Made, foreign: bool) {
        let entry = Entry { made, foreign, refused: false, destroying: false };
        let (old, parts) = (self.alive.insert(id, entry), id.parts());
        let operation = made.operation;
        self.check_device(operation, device);
        if let Some(old) = old {
            self.found(format!("`{operation}` issued {id:?}, which is alive ({})", old.made.of("object")));
        }
        if parts.tag != self.tag {
            self.found(format!("`{operation}` issued {id:?}, and the backend's tag is {}", self.tag.get()));
        }
        if parts.device != device {
            self.found(format!("wrong device: `{operation}` issued {id:?} for device {device}"));
        }
    }

    /// Removes an id. Returns false if it was already removed.
    pub(super) fn remove(&mut self, id: AnyId) -> bool {
        let Some(removed) = self.alive.remove(&id) else { return false };
        self.dead.insert(id, removed.made);
        self.retried += u64::from(removed.refused);
        true
    }

    pub(super) fn entry_mut(&mut self, id: AnyId) -> Option<&mut Entry> {
        self.alive.get_mut(&id)
    }

    /// Returns the objects that exist only because an injected fault refused their release. Executable graphs come first,
    /// then graphs, events and streams.
    pub(super) fn refused(&self) -> (Vec<AnyId>, Vec<(Space, u64, Holding)>) {
        let ids = self.alive.iter().filter(|(_, entry)| entry.refused);
        let mut ids: Vec<AnyId> = ids.map(|(id, _)| *id).collect();
        ids.sort_unstable_by_key(|id| match id {
            AnyId::Executable(_) => 0,
            AnyId::Graph(_) => 1,
            AnyId::Event(_) => 2,
            AnyId::Memory(_) => 3,
            AnyId::Stream(_) => 4,
        });
        let memory = self.ranges.alive.iter().filter(|(_, range)| range.refused);
        (ids, memory.map(|((space, start), range)| (*space, *start, range.holding)).collect())
    }

    /// Ends the case. Returns the findings, the leaks, and the counts that disagree.
    pub(super) fn close(&mut self, before: &LiveObjects, after: &LiveObjects) -> Vec<String> {
        let objects = self.alive.iter().map(|(id, entry)| (entry.made.number, entry.made.of(id.kind())));
        let mut left: Vec<(u64, String)> = objects.collect();
        left.extend(self.handles.values().map(|made| (made.number, made.of("handle"))));
        left.extend(self.ranges.alive.values().map(|range| {
            let text = range.made.of(range.holding.name());
            let text = match range.holding {
                Holding::Mapped { opens } => format!("{text}, opened {opens} times more often than closed,"),
                _ => format!("{text}, {} bytes,", range.bytes),
            };
            (range.made.number, text)
        }));
        let unused = self.pieces.iter().filter(|(start, _)| {
            !(0..self.devices).any(|device| self.ranges.get(Space::Device(device), **start).is_some())
        });
        left.extend(
            unused.map(|(start, (bytes, _))| (u64::MAX, format!("memory mapped at {start:#x}, {bytes} bytes,"))),
        );
        left.sort_unstable();
        for (_, text) in left {
            self.found(format!("leak: {text} was not given back"));
        }
        self.agree(before, after);
        std::mem::take(&mut self.findings)
    }

    /// Compares the counts: the increase during the case must be the number of objects in the ledger.
    fn agree(&mut self, before: &LiveObjects, after: &LiveObjects) {
        let (mut allocations, mut host, mut mappings, mut reservations) = (0, 0, 0, 0);
        for range in self.ranges.alive.values() {
            match range.holding {
                Holding::Plain | Holding::Shareable(_) | Holding::StreamOrdered(_) => allocations += 1,
                Holding::HostAllocated | Holding::HostRegistered => host += 1,
                Holding::Mapped { .. } => mappings += 1,
                Holding::Addresses { .. } => reservations += 1,
                // Its physical memory and its addresses count.
                Holding::Piece { .. } => {}
            }
        }
        let (mut streams, mut events, mut graphs, mut physical) = (0, 0, 0, 0);
        for (id, _) in self.alive.iter().filter(|(_, entry)| !entry.foreign) {
            match id {
                AnyId::Stream(_) => streams += 1,
                AnyId::Event(_) => events += 1,
                AnyId::Memory(_) => physical += 1,
                AnyId::Graph(_) | AnyId::Executable(_) => graphs += 1,
            }
        }
        let counts = [
            ("streams", before.streams, after.streams, streams),
            ("events", before.events, after.events, events),
            ("handles", before.handles, after.handles, self.handles.len() as u64),
            ("allocations", before.allocations, after.allocations, allocations),
            ("host_allocations", before.host_allocations, after.host_allocations, host),
            ("graphs", before.graphs, after.graphs, graphs),
            ("mappings", before.mappings, after.mappings, mappings),
            ("reservations", before.reservations, after.reservations, reservations),
            ("physical_memory", before.physical_memory, after.physical_memory, physical),
        ];
        for (name, before, after, held) in counts {
            if after != before + held {
                self.found(format!(
                    "live objects differ after the case: `live_objects().{name}` was {before} and is {after}, with {held} \
                     that the case still holds by the backend's answers"
                ));
            }
        }
        let exports = self.exports;
        for (name, before, after) in [
            ("descriptors", before.descriptors, after.descriptors),
            ("shared_files", before.shared_files, after.shared_files),
        ] {
            if before != after {
                self.found(format!(
                    "live objects differ after the case: `live_objects().{name}` was {before} and is {after}, and every \
                     handle of the {exports} exports of the case is gone"
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use highwater_hal::IdTable;

    use super::*;

    /// Failed before: mapped memory was not entered at the address of a block that another thread was still giving back.
    #[test]
    fn memory_is_mapped_where_another_thread_is_giving_a_block_back() {
        const START: u64 = 0x20_0000;
        const BYTES: u64 = 0x1000;
        let tag = BackendTag::next();
        let mut ledger = Ledger::new(tag, 1);
        let range = |made, holding, releasing| Range { made, bytes: BYTES, holding, releasing, refused: false };
        let made = ledger.made("allocate", None);
        assert_eq!(ledger.ranges.insert(Space::Device(0), START, range(made, Holding::Plain, true)), None);
        let made = ledger.made("reserve_addresses", None);
        let addresses = range(made, Holding::Addresses { bytes: BYTES }, false);
        assert_eq!(ledger.ranges.insert(Space::Reserved(0), START, addresses), None);
        let memory = IdTable::new(tag).insert("create_memory", 0, Arc::new(())).unwrap();
        ledger.memory.insert(memory, (BYTES, None));
        ledger.mapped(0, START, memory);
        ledger.accessed((START, BYTES), 0, None);
        let piece = ledger.ranges.get(Space::Device(0), START).unwrap();
        assert!(matches!(piece.holding, Holding::Piece { .. }) && !piece.releasing, "{piece:?}");
        assert_eq!(ledger.findings, Vec::<String>::new());
    }
}
