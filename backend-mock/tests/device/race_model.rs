//! The race finder against a model: random programs over streams of two devices, events, waits, queries and frees. The model
//! makes a graph of all calls and operations and asks which can be reached from which, byte by byte.

use std::collections::{BTreeMap, BTreeSet};

use highwater_hal::{Backend, CaptureMode, Completion, DevicePtr, EventId, FillPattern, HostPtr, Location, StreamId};
use highwater_mock::Operation;
use highwater_mock::races::RaceKind;
use proptest::prelude::*;

use crate::rig::{Rig, at, end, small};

/// Streams 0 and 1 are of device 0, stream 2 may be of device 1.
const STREAMS: usize = 3;
/// Events likewise.
const EVENTS: usize = 3;
/// Blocks likewise, and block 3 is page-locked memory.
const BLOCKS: usize = 4;
const HOST_BLOCK: usize = 3;
const BYTES: usize = 16;

#[derive(Debug, Clone)]
enum Step {
    Fill {
        stream: usize,
        block: usize,
        from: usize,
        bytes: usize,
    },
    Copy {
        stream: usize,
        to: usize,
        to_offset: usize,
        from: usize,
        from_offset: usize,
        bytes: usize,
    },
    Record {
        event: usize,
        stream: usize,
    },
    Wait {
        stream: usize,
        event: usize,
    },
    SynchronizeStream(usize),
    SynchronizeEvent(usize),
    SynchronizeDevice(u32),
    QueryStream(usize),
    QueryEvent(usize),
    /// Frees the block and allocates another one in its place.
    Renew(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let part = || (0..BYTES, 1..=BYTES).prop_map(|(from, bytes)| (from, bytes.min(BYTES - from)));
    prop_oneof![
        4 => (0..STREAMS, 0..HOST_BLOCK, part())
            .prop_map(|(stream, block, (from, bytes))| Step::Fill { stream, block, from, bytes }),
        6 => (0..STREAMS, 0..BLOCKS, part(), 0..BLOCKS, 0..BYTES).prop_map(
            |(stream, to, (to_offset, bytes), from, from_offset)| {
                let bytes = bytes.min(BYTES - from_offset);
                Step::Copy { stream, to, to_offset, from, from_offset, bytes }
            }
        ),
        4 => (0..EVENTS, 0..STREAMS).prop_map(|(event, stream)| Step::Record { event, stream }),
        5 => (0..STREAMS, 0..EVENTS).prop_map(|(stream, event)| Step::Wait { stream, event }),
        1 => (0..STREAMS).prop_map(Step::SynchronizeStream),
        1 => (0..EVENTS).prop_map(Step::SynchronizeEvent),
        1 => (0..2u32).prop_map(Step::SynchronizeDevice),
        1 => (0..STREAMS).prop_map(Step::QueryStream),
        1 => (0..EVENTS).prop_map(Step::QueryEvent),
        1 => (0..BLOCKS).prop_map(Step::Renew),
    ]
}

/// A call of the backend, as reports name it.
type Call = (&'static str, u64);

#[derive(Debug, Clone)]
struct Access {
    node: usize,
    /// A stream, or `STREAMS` for the host.
    lane: usize,
    writes: bool,
    call: Call,
}

/// Calls and operations, with those that come right before each.
#[derive(Debug, Default)]
struct Model {
    before: Vec<Vec<usize>>,
    /// The last call of the host, and the last operation of each stream.
    last_call: Option<usize>,
    last: [Option<usize>; STREAMS],
    /// The record that each event is.
    records: [Option<usize>; EVENTS],
    /// Every access to each byte, since the memory was handed out.
    accesses: BTreeMap<(usize, usize), Vec<Access>>,
    races: BTreeSet<(Call, Call)>,
}

impl Model {
    fn node(&mut self, before: impl IntoIterator<Item = Option<usize>>) -> usize {
        self.before.push(before.into_iter().flatten().collect());
        self.before.len() - 1
    }

    /// A call of the host that comes after all that it has waited for.
    fn call(&mut self, waited_for: impl IntoIterator<Item = Option<usize>>) -> usize {
        let before: Vec<_> = waited_for.into_iter().chain([self.last_call]).collect();
        let node = self.node(before);
        self.last_call = Some(node);
        node
    }

    /// An operation of a stream, which the host calls now.
    fn operation(&mut self, stream: usize, waits_for: Option<usize>) -> usize {
        let call = self.call([]);
        let node = self.node([Some(call), self.last[stream], waits_for]);
        self.last[stream] = Some(node);
        node
    }

    fn comes_before(&self, first: usize, second: usize) -> bool {
        let (mut seen, mut to_visit) = (BTreeSet::new(), vec![second]);
        while let Some(node) = to_visit.pop() {
            if node == first {
                return true;
            }
            to_visit.extend(self.before[node].iter().filter(|before| seen.insert(**before)));
        }
        false
    }

    fn access(&mut self, block: usize, bytes: std::ops::Range<usize>, new: &Access) {
        for byte in bytes {
            let earlier = self.accesses.get(&(block, byte)).cloned().unwrap_or_default();
            // Of each lane the last write, and the last read after it.
            let is_last = |index: usize, access: &Access| {
                let later = |other: &Access| other.lane == access.lane && (other.writes || !access.writes);
                !earlier[index + 1..].iter().any(later)
            };
            for (index, access) in earlier.iter().enumerate() {
                let conflict = access.writes || new.writes;
                if conflict && is_last(index, access) && !self.comes_before(access.node, new.node) {
                    self.races.insert((access.call, new.call));
                }
            }
            self.accesses.entry((block, byte)).or_default().push(new.clone());
        }
    }
}

struct Program {
    /// Whether the last stream, event and block are of a second device.
    two_devices: bool,
    rig: Rig,
    streams: [StreamId; STREAMS],
    events: [EventId; EVENTS],
    blocks: [DevicePtr; HOST_BLOCK],
    host_block: HostPtr,
    model: Model,
}

fn device_of(two_devices: bool, index: usize) -> u32 {
    u32::from(two_devices && index == 2)
}

impl Program {
    fn device_of(&self, index: usize) -> u32 {
        device_of(self.two_devices, index)
    }

    fn new(seed: u64, two_devices: bool) -> Self {
        let device_of = |index| device_of(two_devices, index);
        let rig = Rig::new(small().with_devices(2).with_checks().with_schedule(seed).with_race_detector());
        let streams = [0, 1, 2].map(|index| rig.stream(device_of(index)));
        let events = [0, 1, 2].map(|index| rig.event(device_of(index)));
        let blocks = [0, 1, 2].map(|index| rig.allocate(device_of(index), BYTES));
        let host_block = rig.pinned(BYTES);
        Self { two_devices, rig, streams, events, blocks, host_block, model: Model::default() }
    }

    fn latest(&self, operation: Operation) -> Call {
        (operation.name(), self.rig.gpu.calls(operation))
    }

    fn location(&self, block: usize, offset: usize) -> Location {
        if block == HOST_BLOCK {
            // SAFETY: the offset lies inside the block.
            let address = unsafe { self.host_block.as_ptr().add(offset) };
            return Location::Host(HostPtr::new(std::ptr::NonNull::new(address).unwrap()));
        }
        at(self.device_of(block), DevicePtr::new(self.blocks[block].get() + offset as u64))
    }

    fn is_on(&self, stream: usize, block: usize) -> bool {
        block != HOST_BLOCK && self.device_of(block) == self.device_of(stream)
    }

    fn take(&mut self, step: Step) {
        let gpu = self.rig.gpu.clone();
        match step {
            Step::Fill { stream, block, from, bytes } => {
                // A stream fills memory of its own device.
                let stream = if self.is_on(stream, block) { stream } else { block };
                let dst = DevicePtr::new(self.blocks[block].get() + from as u64);
                self.rig.fill(dst, FillPattern::U8(1), bytes, self.streams[stream]).unwrap();
                let node = self.model.operation(stream, None);
                let access = Access { node, lane: stream, writes: true, call: self.latest(Operation::Fill) };
                self.model.access(block, from..from + bytes, &access);
            }
            Step::Copy { stream, to, to_offset, from, from_offset, bytes } => {
                let allowed = match (to, from) {
                    (to, from) if to == from => false,
                    (HOST_BLOCK, other) | (other, HOST_BLOCK) => self.is_on(stream, other),
                    (to, from) => self.is_on(stream, to) || self.is_on(stream, from),
                };
                if !allowed {
                    return;
                }
                let (dst, src) = (self.location(to, to_offset), self.location(from, from_offset));
                self.rig.copy(dst, src, bytes, self.streams[stream]).unwrap();
                let node = self.model.operation(stream, None);
                let access = |writes| Access { node, lane: stream, writes, call: self.latest(Operation::Copy) };
                let (reads, writes) = (access(false), access(true));
                self.model.access(from, from_offset..from_offset + bytes, &reads);
                self.model.access(to, to_offset..to_offset + bytes, &writes);
            }
            Step::Record { event, stream } => {
                // An event is recorded on its own device.
                let stream = if self.device_of(event) == self.device_of(stream) { stream } else { event };
                gpu.record_event(self.events[event], self.streams[stream]).unwrap();
                self.model.records[event] = Some(self.model.operation(stream, None));
            }
            Step::Wait { stream, event } => {
                gpu.stream_wait_event(self.streams[stream], self.events[event]).unwrap();
                let record = self.model.records[event];
                self.model.operation(stream, record);
            }
            Step::SynchronizeStream(stream) => {
                gpu.synchronize_stream(self.streams[stream]).unwrap();
                self.model.call([self.model.last[stream]]);
            }
            Step::SynchronizeEvent(event) => {
                gpu.synchronize_event(self.events[event]).unwrap();
                self.model.call([self.model.records[event]]);
            }
            Step::SynchronizeDevice(device) => {
                gpu.synchronize_device(device).unwrap();
                let (last, two_devices) = (self.model.last, self.two_devices);
                let of_device = (0..STREAMS).filter(|&stream| device_of(two_devices, stream) == device);
                self.model.call(of_device.map(|stream| last[stream]));
            }
            Step::QueryStream(stream) => {
                let done = gpu.query_stream(self.streams[stream]).unwrap() == Completion::Complete;
                self.model.call([self.model.last[stream].filter(|_| done)]);
            }
            Step::QueryEvent(event) => {
                let done = gpu.query_event(self.events[event]).unwrap() == Completion::Complete;
                self.model.call([self.model.records[event].filter(|_| done)]);
            }
            Step::Renew(block) => {
                let operation = if block == HOST_BLOCK {
                    // SAFETY: in test mode, freed memory stays mapped while work uses it.
                    unsafe { self.rig.host.free(self.host_block).unwrap() };
                    self.host_block = self.rig.pinned(BYTES);
                    Operation::HostFree
                } else {
                    self.rig.free(self.device_of(block), self.blocks[block], None).unwrap();
                    self.blocks[block] = self.rig.allocate(self.device_of(block), BYTES);
                    Operation::Free
                };
                let node = self.model.call([]);
                let access = Access { node, lane: STREAMS, writes: true, call: self.latest(operation) };
                self.model.access(block, 0..BYTES, &access);
                self.model.accesses.retain(|(other, _), _| *other != block);
            }
        }
    }
}

/// Compares the reports with the model.
fn compare(program: &Program) -> Result<(), TestCaseError> {
    let races = program.rig.gpu.races();
    prop_assert!(races.iter().all(|race| race.kind() == RaceKind::Unordered));
    let found: Vec<(Call, Call)> = races
        .iter()
        .map(|race| [race.first(), race.second()].map(|place| (place.operation().name(), place.call())))
        .map(|[first, second]| (first, second))
        .collect();
    let distinct: BTreeSet<_> = found.iter().copied().collect();
    prop_assert_eq!(&distinct, &program.model.races);
    prop_assert_eq!(distinct.len(), found.len(), "a pair is told once");
    prop_assert_eq!(program.rig.gpu.race_count(), found.len() as u64);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    #[test]
    fn the_finder_finds_what_the_model_finds_and_nothing_else(
        steps in prop::collection::vec(step(), 1..60),
        seed in 0..1000u64,
    ) {
        let mut program = Program::new(seed, true);
        for step in steps {
            program.take(step);
        }
        compare(&program)?;
    }

    #[test]
    fn branches_of_a_capture_are_compared_as_streams_are(steps in prop::collection::vec(step(), 1..40)) {
        let mut program = Program::new(0, false);
        program.rig.gpu.begin_capture(program.streams[0], CaptureMode::Relaxed).unwrap();
        // Every stream takes part, and every event is one of the capture.
        (0..EVENTS).for_each(|event| program.take(Step::Record { event, stream: 0 }));
        (0..STREAMS).for_each(|stream| program.take(Step::Wait { stream, event: 0 }));
        for step in steps {
            if let Step::Fill { .. } | Step::Copy { .. } | Step::Record { .. } | Step::Wait { .. } = step {
                program.take(step);
            }
        }
        compare(&program)?;
        for stream in 1..STREAMS {
            program.take(Step::Record { event: stream, stream });
            program.take(Step::Wait { stream: 0, event: stream });
        }
        let graph = end(&program.rig.gpu, program.streams[0]).unwrap();
        let graph = program.rig.gpu.instantiate_graph(graph).unwrap();
        // A launch is one operation. The conflicts between its branches were reported before.
        // SAFETY: everything stays allocated, and one operation is executed at a time.
        unsafe { program.rig.gpu.launch_graph(graph, program.streams[0]).unwrap() };
        compare(&program)?;
    }
}
