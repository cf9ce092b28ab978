//! Traces of requests: the generators of the table, the file format, and their replay.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead as _, BufReader, BufWriter, Write as _};
use std::path::Path;

use anyhow::Result;
use highwater::{Access, DeviceBuffer, ErrorKind, PinnedBuffer, Runtime, Stream};
use serde_json::{Value, json};

use super::super::failure::Failure;
use super::numpy::NumpyRng;

/// Requests between two readings of the bytes held.
const SAMPLE: usize = 8;

/// The memory that the requests of a trace are for.
pub(super) trait Memory {
    type Block;

    /// Returns a new stream of the device that uses the memory.
    fn create_stream(&self) -> highwater::Result<Stream>;
    fn allocate(&self, bytes: usize) -> highwater::Result<Self::Block>;
    /// Notes a use by the work of a stream.
    fn note_use(block: &Self::Block, stream: &Stream) -> highwater::Result<()>;
    /// Returns the bytes that the pool of this memory got from the backend.
    fn held_bytes(&self) -> u64;
}

/// Page-locked memory.
impl Memory for Runtime {
    type Block = PinnedBuffer<u8>;

    fn create_stream(&self) -> highwater::Result<Stream> {
        self.device(0)?.create_stream()
    }

    fn allocate(&self, bytes: usize) -> highwater::Result<Self::Block> {
        self.pinned(bytes)
    }

    fn note_use(block: &Self::Block, stream: &Stream) -> highwater::Result<()> {
        stream.note_host_use(block.ptr(), Access::Read)
    }

    fn held_bytes(&self) -> u64 {
        self.statistics().host.held_bytes
    }
}

/// Device memory in the order of the stream.
impl Memory for Stream {
    type Block = DeviceBuffer<u8>;

    fn create_stream(&self) -> highwater::Result<Stream> {
        self.runtime().device(self.device())?.create_stream()
    }

    fn allocate(&self, bytes: usize) -> highwater::Result<Self::Block> {
        self.allocate(bytes)
    }

    fn note_use(block: &Self::Block, stream: &Stream) -> highwater::Result<()> {
        stream.note_device_use(block, Access::Read)
    }

    fn held_bytes(&self) -> u64 {
        self.runtime().statistics().device_memory.held_bytes
    }
}

/// A trace that replaces blocks: request `i` frees the block of slot `slots[i]`, if any, and puts a new one there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Trace {
    pub(super) sizes: Vec<usize>,
    pub(super) slots: Vec<usize>,
    pub(super) live: usize,
}

impl Trace {
    /// Returns 1,000 requests, log-uniform in 4 KiB to 64 MiB, with 32 live.
    pub(super) fn log_uniform(seed: u64) -> Self {
        let (low, high) = (4096_f64.ln(), f64::from(64 << 20).ln());
        Self::draw(&mut NumpyRng::new(seed), 1000, 32, |rng| rng.uniform(low, high).exp() as usize)
    }

    /// Returns 1,500 blocks of six sizes from 2 to 20 MiB with 200 live, and 600 blocks of 1 to 33 MiB with 120 live.
    pub(super) fn blocks(seed: u64) -> [Self; 2] {
        const MIB: u64 = 1 << 20;
        const SIX: [usize; 6] = [2, 3, 5, 8, 12, 20];
        let mut rng = NumpyRng::new(seed);
        [
            Self::draw(&mut rng, 1500, 200, |rng| SIX[rng.integers(0, 6) as usize] << 20),
            Self::draw(&mut rng, 600, 120, |rng| rng.integers(MIB, 33 * MIB) as usize),
        ]
    }

    /// Draws all sizes first, then all slots. The first `live` requests fill the slots in order.
    fn draw(rng: &mut NumpyRng, requests: usize, live: usize, mut size: impl FnMut(&mut NumpyRng) -> usize) -> Self {
        let sizes = (0..requests).map(|_| size(rng)).collect();
        let drawn: Vec<usize> = (0..requests).map(|_| rng.integers(0, live as u64) as usize).collect();
        let slots = drawn.into_iter().enumerate().map(|(at, slot)| if at < live { at } else { slot }).collect();
        Self { sizes, slots, live }
    }

    fn requests(&self) -> impl Iterator<Item = (usize, usize)> {
        self.sizes.iter().copied().zip(self.slots.iter().copied())
    }

    /// Runs the requests and nothing else, for a measurement of time. Returns the live blocks.
    pub(super) fn run<M: Memory>(&self, memory: &M) -> highwater::Result<Vec<Option<M::Block>>> {
        let mut live: Vec<Option<M::Block>> = (0..self.live).map(|_| None).collect();
        for (bytes, slot) in self.requests() {
            live[slot] = None;
            live[slot] = Some(memory.allocate(bytes)?);
        }
        Ok(live)
    }

    /// Runs the requests, frees all blocks, and adds what they needed to `held`.
    pub(super) fn measure<M: Memory>(&self, memory: &M, held: &mut Held) -> highwater::Result<()> {
        let mut live: Vec<Option<(M::Block, usize)>> = (0..self.live).map(|_| None).collect();
        for (at, (bytes, slot)) in self.requests().enumerate() {
            if let Some((_, bytes)) = live[slot].take() {
                held.freed(bytes);
            }
            live[slot] = Some((memory.allocate(bytes)?, bytes));
            held.allocated(bytes);
            if at % SAMPLE == 0 {
                held.look(memory);
            }
        }
        held.look(memory);
        live.iter().flatten().for_each(|(_, bytes)| held.freed(*bytes));
        Ok(())
    }

    /// Returns the events of the trace. All blocks are free at its end. One request takes a microsecond.
    pub(super) fn events(&self, first_id: u64) -> Vec<Event> {
        let mut live = vec![None; self.live];
        let mut events = Vec::new();
        for (id, (bytes, slot)) in (first_id..).zip(self.requests()) {
            let t = id * 1000;
            let free = live[slot].replace(id).map(|id| Event { t, thread: 0, id, act: Act::Free });
            events.extend(free.into_iter().chain([Event { t, thread: 0, id, act: Act::Allocate { bytes } }]));
        }
        let end = (first_id + self.sizes.len() as u64) * 1000;
        events.extend(live.into_iter().flatten().map(|id| Event { t: end, thread: 0, id, act: Act::Free }));
        events
    }
}

/// The maximum of the bytes that a pool holds, and the maximum of the bytes in use.
#[derive(Debug, Default)]
pub(super) struct Held {
    pub(super) held: u64,
    pub(super) peak: u64,
    given_out: u64,
}

impl Held {
    fn allocated(&mut self, bytes: usize) {
        self.given_out += bytes as u64;
        self.peak = self.peak.max(self.given_out);
    }

    fn freed(&mut self, bytes: usize) {
        self.given_out -= bytes as u64;
    }

    fn look(&mut self, memory: &impl Memory) {
        self.held = self.held.max(memory.held_bytes());
    }

    /// Returns the first maximum divided by the second.
    pub(super) fn ratio(&self) -> f64 {
        self.held as f64 / self.peak.max(1) as f64
    }
}

/// A line of a trace file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Event {
    /// Nanoseconds since the start of the trace.
    t: u64,
    thread: u64,
    /// The block: a number that no other block of the trace has.
    id: u64,
    act: Act,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    Allocate {
        bytes: usize,
    },
    /// A use by the stream of the thread.
    Use,
    Free,
}

impl Event {
    fn to_json(self) -> Value {
        let Self { t, thread, id, act } = self;
        match act {
            Act::Allocate { bytes } => json!({ "t": t, "thread": thread, "op": "alloc", "id": id, "bytes": bytes }),
            Act::Use => json!({ "t": t, "thread": thread, "op": "use", "id": id }),
            Act::Free => json!({ "t": t, "thread": thread, "op": "free", "id": id }),
        }
    }

    /// Reads a line. An error says what is wrong with it.
    fn parse(line: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(line).map_err(|error| error.to_string())?;
        let number = |key: &str| value[key].as_u64().ok_or_else(|| format!("`{key}` is not a whole number"));
        let act = match value["op"].as_str() {
            Some("alloc") => {
                let bytes = usize::try_from(number("bytes")?).map_err(|error| error.to_string())?;
                Act::Allocate { bytes }
            }
            Some("use") => Act::Use,
            Some("free") => Act::Free,
            _ => return Err("`op` is none of `alloc`, `use` and `free`".into()),
        };
        Ok(Self { t: number("t")?, thread: number("thread")?, id: number("id")?, act })
    }
}

/// Writes a trace file.
pub(super) fn write(path: &Path, events: &[Event]) -> Result<()> {
    let cannot = |error| {
        let message = format!("the trace cannot be written to {}", path.display());
        Failure::new(ErrorKind::InvalidState, message, "give a file that can be written").because_of(error)
    };
    let mut file = BufWriter::new(File::create(path).map_err(cannot)?);
    events.iter().try_for_each(|event| writeln!(file, "{}", event.to_json())).map_err(cannot)?;
    Ok(file.flush().map_err(cannot)?)
}

/// Reads a trace file. Every line is checked: an `alloc` has a new id, and `use` and `free` name a live block.
pub(super) fn read(path: &Path) -> Result<Vec<Event>> {
    let hint = "a trace has one JSON object per line; docs/program.md has the format";
    let fail = |message: String| Failure::new(ErrorKind::InvalidArgument, message, hint);
    let name = path.display();
    let file = File::open(path).map_err(|error| fail(format!("the trace {name} cannot be read")).because_of(error))?;
    let mut events = Vec::new();
    // The live blocks; false for those that were freed.
    let mut live = HashMap::new();
    for (number, line) in (1..).zip(BufReader::new(file).lines()) {
        let line = line.map_err(|error| fail(format!("line {number} of {name} cannot be read")).because_of(error))?;
        let checked = Event::parse(&line).and_then(|event| {
            let id = event.id;
            let is_live = live.get(&id).copied();
            match (event.act, is_live) {
                (Act::Allocate { .. }, None) => live.insert(id, true),
                (Act::Free, Some(true)) => live.insert(id, false),
                (Act::Use, Some(true)) => None,
                (Act::Allocate { .. }, Some(_)) => return Err(format!("block {id} was allocated before")),
                (_, None) => return Err(format!("block {id} was not allocated")),
                (_, Some(false)) => return Err(format!("block {id} was freed before")),
            };
            Ok(event)
        });
        events.push(checked.map_err(|why| fail(format!("line {number} of {name}: {why}")))?);
    }
    if events.is_empty() {
        return Err(fail(format!("the trace {name} has no lines")).into());
    }
    Ok(events)
}

/// Replays events in the order of their lines, by one thread, with a stream for each traced thread. It does not wait for the
/// times of the lines.
pub(super) fn replay<M: Memory>(memory: &M, events: &[Event], held: &mut Held) -> highwater::Result<()> {
    let mut streams: HashMap<u64, Stream> = HashMap::new();
    let mut live: HashMap<u64, (M::Block, usize)> = HashMap::new();
    for (at, Event { thread, id, act, .. }) in events.iter().enumerate() {
        match act {
            Act::Allocate { bytes } => {
                live.insert(*id, (memory.allocate(*bytes)?, *bytes));
                held.allocated(*bytes);
            }
            Act::Use => {
                if !streams.contains_key(thread) {
                    streams.insert(*thread, memory.create_stream()?);
                }
                live.get(id).map_or(Ok(()), |(block, _)| M::note_use(block, &streams[thread]))?;
            }
            Act::Free => {
                if let Some((_, bytes)) = live.remove(id) {
                    held.freed(bytes);
                }
            }
        }
        if at % SAMPLE == 0 {
            held.look(memory);
        }
    }
    held.look(memory);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// FNV-1a over whole numbers: the sizes, then the slots.
    fn digest(trace: &Trace) -> u64 {
        let fold = |hash: u64, &value: &usize| (hash ^ value as u64).wrapping_mul(0x100_0000_01b3);
        trace.sizes.iter().chain(&trace.slots).fold(0xcbf2_9ce4_8422_2325, fold)
    }

    #[test]
    fn traces_are_those_that_numpy_draws() {
        // Printed by NumPy 2.4.6 with the same calls.
        let expected = [
            (1, 0x1f4c_e19a_d11f_c961),
            (2, 0xd1c8_b30d_cd60_c320),
            (3, 0xe257_7471_af56_7bdc),
            (100, 0xc009_992b_d091_7d9c),
        ];
        for (seed, expected) in expected {
            assert_eq!(digest(&Trace::log_uniform(seed)), expected, "seed {seed}");
        }
        let expected = [
            (1, [0x1abb_7004_0d02_9ba0, 0xa5e0_f3fc_9450_341c]),
            (2, [0x4bea_102c_759e_a091, 0xd012_3b38_5fc6_4645]),
            (3, [0x8a98_36b1_bee9_f849, 0xf658_63b1_42de_5a2e]),
        ];
        for (seed, expected) in expected {
            assert_eq!(Trace::blocks(seed).map(|trace| digest(&trace)), expected, "seed {seed}");
        }
    }

    #[test]
    fn peaks_are_those_of_the_peers_programs() {
        for (seed, expected) in [(1, 426_644_334), (2, 495_133_013), (3, 392_239_618)] {
            let trace = Trace::log_uniform(seed);
            let mut held = Held::default();
            let mut live = [0; 32];
            for (bytes, slot) in trace.requests() {
                held.freed(std::mem::replace(&mut live[slot], bytes));
                held.allocated(bytes);
            }
            assert_eq!(held.peak, expected, "seed {seed}");
        }
    }

    #[test]
    fn events_are_read_as_they_were_written_and_free_every_block() {
        let path = std::env::temp_dir().join(format!("highwater-trace-{}", std::process::id()));
        let events = Trace::log_uniform(1).events(0);
        write(&path, &events).unwrap();
        let read = read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(read, events);
        assert_eq!(events.len(), 2000);
        assert!(events.is_sorted_by_key(|event| event.t));
    }
}
