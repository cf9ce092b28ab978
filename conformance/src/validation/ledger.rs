//! What a case has made and not yet given back, by the backend's own answers, and what was wrong with them.

use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::panic::Location;

use highwater_hal::{BackendTag, EventId, GraphExecId, GraphId, LiveObjects, ObjectId, StreamId};

use super::book::{Book, Holding, Space};

/// The call that made an object.
#[derive(Debug, Clone, Copy)]
pub(super) struct Made {
    pub(super) operation: &'static str,
    /// Which object of the case it is, from 1.
    pub(super) number: u64,
    pub(super) at: Option<&'static Location<'static>>,
}

impl Made {
    /// What was made, by which call, and where.
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
    /// It wraps an object of other code, which counts nowhere.
    pub(super) foreign: bool,
    /// An injected fault kept it from being destroyed.
    pub(super) refused: bool,
}

/// The ids of one kind of object.
#[derive(Debug)]
pub(super) struct Ids<I> {
    pub(super) alive: HashMap<I, Entry>,
    dead: HashMap<I, Made>,
}

impl<I> Default for Ids<I> {
    fn default() -> Self {
        Self { alive: HashMap::new(), dead: HashMap::new() }
    }
}

impl<I: ObjectId + Hash + Eq> Ids<I> {
    /// How many of them the backend has to count.
    fn counted(&self) -> u64 {
        self.alive.values().filter(|entry| !entry.foreign).count() as u64
    }

    /// Why this id should not be accepted, if so.
    fn unsound(&self, id: I) -> Option<Unsound> {
        if self.alive.contains_key(&id) {
            return None;
        }
        let id_text = format!("{id:?}");
        Some(match self.dead.get(&id) {
            Some(made) => Unsound(format!("{id_text}, which was destroyed ({})", made.of(I::NAME))),
            None => Unsound(format!("{id_text}, which was never issued")),
        })
    }

    fn remove(&mut self, id: I) -> Option<Entry> {
        let entry = self.alive.remove(&id)?;
        self.dead.insert(id, entry.made);
        Some(entry)
    }

    fn leaks(&self) -> impl Iterator<Item = (u64, String)> {
        self.alive.values().map(|entry| (entry.made.number, entry.made.of(I::NAME)))
    }
}

/// An id of any kind.
#[derive(Debug, Clone, Copy)]
pub(super) enum AnyId {
    Stream(StreamId),
    Event(EventId),
    Graph(GraphId),
    Executable(GraphExecId),
}

/// An id that a backend must refuse, in words.
#[derive(Debug)]
pub(super) struct Unsound(pub(super) String);

impl fmt::Display for Unsound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Findings of one case beyond these are not written down; the first ones say what is wrong.
const MOST_FINDINGS: usize = 8;

/// The objects of one case.
#[derive(Debug)]
pub(super) struct Ledger {
    tag: BackendTag,
    devices: u32,
    made: u64,
    pub(super) streams: Ids<StreamId>,
    pub(super) events: Ids<EventId>,
    pub(super) graphs: Ids<GraphId>,
    pub(super) executables: Ids<GraphExecId>,
    /// Handles by number.
    pub(super) handles: HashMap<u64, Made>,
    pub(super) book: Book,
    /// Calls that made a handle for other processes.
    exports: u64,
    /// Releases that a fault refused and that were made again.
    pub(super) retried: u64,
    findings: Vec<String>,
}

impl Ledger {
    pub(super) fn new(tag: BackendTag, devices: u32) -> Self {
        Self {
            tag,
            devices,
            made: 0,
            streams: Ids::default(),
            events: Ids::default(),
            graphs: Ids::default(),
            executables: Ids::default(),
            handles: HashMap::new(),
            book: Book::default(),
            exports: 0,
            retried: 0,
            findings: Vec::new(),
        }
    }

    /// Notes something that is wrong.
    pub(super) fn found(&mut self, text: String) {
        if self.findings.len() < MOST_FINDINGS && !self.findings.contains(&text) {
            self.findings.push(text);
        }
    }

    /// Notes a call that was accepted for a device that is not there.
    pub(super) fn check_device(&mut self, operation: &'static str, device: u32) {
        if device >= self.devices {
            let devices = self.devices;
            self.found(format!("wrong device: `{operation}` accepted device {device}, and there are {devices}"));
        }
    }

    /// The note of a new object.
    pub(super) fn made(&mut self, operation: &'static str, at: Option<&'static Location<'static>>) -> Made {
        self.made += 1;
        Made { operation, number: self.made, at }
    }

    /// Notes a handle for other processes, whose descriptor or file has to go with its last copy.
    pub(super) fn exported(&mut self) {
        self.exports += 1;
    }

    /// Why an id should be refused, if so. Default streams are nobody's to destroy and everybody's to use.
    pub(super) fn unsound(&self, id: AnyId) -> Option<Unsound> {
        match id {
            AnyId::Stream(id) if self.is_default(id) => None,
            AnyId::Stream(id) => self.streams.unsound(id),
            AnyId::Event(id) => self.events.unsound(id),
            AnyId::Graph(id) => self.graphs.unsound(id),
            AnyId::Executable(id) => self.executables.unsound(id),
        }
    }

    fn is_default(&self, id: StreamId) -> bool {
        let named =
            [StreamId::legacy_default(self.tag, id.device()), StreamId::per_thread_default(self.tag, id.device())];
        id.device() < self.devices && named.contains(&id)
    }

    /// Takes in an id that the backend issued, and looks whether it may be one.
    pub(super) fn issued(&mut self, id: AnyId, device: u32, made: Made, foreign: bool) {
        let entry = Entry { made, foreign, refused: false };
        let (old, parts, text) = match id {
            AnyId::Stream(id) => (self.streams.alive.insert(id, entry), id.parts(), format!("{id:?}")),
            AnyId::Event(id) => (self.events.alive.insert(id, entry), id.parts(), format!("{id:?}")),
            AnyId::Graph(id) => (self.graphs.alive.insert(id, entry), id.parts(), format!("{id:?}")),
            AnyId::Executable(id) => (self.executables.alive.insert(id, entry), id.parts(), format!("{id:?}")),
        };
        let operation = made.operation;
        self.check_device(operation, device);
        if let Some(old) = old {
            self.found(format!("`{operation}` issued {text}, which is alive ({})", old.made.of("object")));
        }
        if parts.tag != self.tag {
            self.found(format!("`{operation}` issued {text}, and the backend's tag is {}", self.tag.get()));
        }
        if parts.device != device {
            self.found(format!("wrong device: `{operation}` issued {text} for device {device}"));
        }
    }

    /// Takes an id out; false if it was out already.
    pub(super) fn remove(&mut self, id: AnyId) -> bool {
        let removed = match id {
            AnyId::Stream(id) => self.streams.remove(id),
            AnyId::Event(id) => self.events.remove(id),
            AnyId::Graph(id) => self.graphs.remove(id),
            AnyId::Executable(id) => self.executables.remove(id),
        };
        self.retried += u64::from(removed.is_some_and(|entry| entry.refused));
        removed.is_some()
    }

    pub(super) fn entry_mut(&mut self, id: AnyId) -> Option<&mut Entry> {
        match id {
            AnyId::Stream(id) => self.streams.alive.get_mut(&id),
            AnyId::Event(id) => self.events.alive.get_mut(&id),
            AnyId::Graph(id) => self.graphs.alive.get_mut(&id),
            AnyId::Executable(id) => self.executables.alive.get_mut(&id),
        }
    }

    /// What is left only because an injected fault refused its release.
    pub(super) fn refused(&self) -> (Vec<AnyId>, Vec<(Space, u64, Holding)>) {
        fn of<I: Copy>(ids: &Ids<I>, any: fn(I) -> AnyId) -> impl Iterator<Item = AnyId> {
            ids.alive.iter().filter(|(_, entry)| entry.refused).map(move |(id, _)| any(*id))
        }
        let ids = of(&self.executables, AnyId::Executable)
            .chain(of(&self.graphs, AnyId::Graph))
            .chain(of(&self.events, AnyId::Event))
            .chain(of(&self.streams, AnyId::Stream));
        let memory = self.book.alive.iter().filter(|(_, range)| range.refused);
        (ids.collect(), memory.map(|((space, start), range)| (*space, *start, range.holding)).collect())
    }

    /// Ends the case: what was found, what is left over, and whether the backend's counts agree.
    pub(super) fn close(&mut self, before: &LiveObjects, after: &LiveObjects) -> Vec<String> {
        let mut left: Vec<(u64, String)> = self.streams.leaks().collect();
        left.extend(self.events.leaks());
        left.extend(self.graphs.leaks());
        left.extend(self.executables.leaks());
        left.extend(self.handles.values().map(|made| (made.number, made.of("handle"))));
        left.extend(self.book.alive.values().map(|range| {
            let text = range.made.of(range.holding.name());
            let text = match range.holding {
                Holding::Mapped { opens } => format!("{text}, opened {opens} times more often than closed,"),
                _ => format!("{text}, {} bytes,", range.bytes),
            };
            (range.made.number, text)
        }));
        left.sort_unstable();
        for (_, text) in left {
            self.found(format!("leak: {text} was not given back"));
        }
        self.agree(before, after);
        std::mem::take(&mut self.findings)
    }

    /// Statistics: what the backend counts more than before the case is what the ledger has.
    fn agree(&mut self, before: &LiveObjects, after: &LiveObjects) {
        let (mut allocations, mut host, mut mappings) = (0, 0, 0);
        for range in self.book.alive.values() {
            match range.holding {
                Holding::Plain | Holding::Shareable(_) | Holding::StreamOrdered(_) => allocations += 1,
                Holding::HostAllocated | Holding::HostRegistered => host += 1,
                Holding::Mapped { .. } => mappings += 1,
            }
        }
        let counts = [
            ("streams", before.streams, after.streams, self.streams.counted()),
            ("events", before.events, after.events, self.events.counted()),
            ("handles", before.handles, after.handles, self.handles.len() as u64),
            ("allocations", before.allocations, after.allocations, allocations),
            ("host_allocations", before.host_allocations, after.host_allocations, host),
            ("graphs", before.graphs, after.graphs, self.graphs.counted() + self.executables.counted()),
            ("mappings", before.mappings, after.mappings, mappings),
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
