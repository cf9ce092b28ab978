//! Random sequences of everything that an exporter and two importers can do, against a model of what must hold.
//!
//! The three are runtimes of this process, which to each other are peers like any other. The exporter's device is small
//! and its memory is used again at once, so that what is freed early shows in somebody's values; the mocks work slowly,
//! so that much is dropped while it is used, and in test mode, so that they notice.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::{Duration, Instant};

use highwater_core::{DeviceBuffer, ErrorKind, Stream, Ticket, TicketBatch};
use highwater_mock::MockOptions;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use crate::Exporter;
use crate::peer::until;

const SEQUENCES: u32 = 64;
const OPERATIONS: usize = 40;
const IMPORTERS: usize = 2;
/// Values of a page.
const PAGE: usize = 1024;
const PAGES: usize = 24;
/// Private buffers that the exporter fills freed memory with.
const SQUATTERS: usize = 4;

#[derive(Debug, Clone)]
enum Operation {
    Allocate { pages: usize },
    Share { buffer: usize, from: usize, to: usize },
    Open { importer: usize, ticket: usize },
    OpenAgain { import: usize },
    ShareAll { slices: Vec<(usize, usize, usize)> },
    OpenAll { importer: usize, batch: usize },
    Fill { import: usize, times: usize },
    FillOriginal { buffer: usize, times: usize },
    DropImport { import: usize },
    DropOriginal { buffer: usize },
    Collect,
    Trim { importer: usize },
    Synchronize { importer: usize },
    Settle,
}

fn operation() -> impl Strategy<Value = Operation> {
    let which = 0..1000_usize;
    let importer = 0..IMPORTERS;
    prop_oneof![
        3 => (1..=3_usize).prop_map(|pages| Operation::Allocate { pages }),
        5 => (which.clone(), 0..4_usize, 0..4_usize).prop_map(|(buffer, from, to)| Operation::Share { buffer, from, to }),
        8 => (importer.clone(), which.clone()).prop_map(|(importer, ticket)| Operation::Open { importer, ticket }),
        2 => which.clone().prop_map(|import| Operation::OpenAgain { import }),
        3 => vec((which.clone(), 0..4_usize, 0..4_usize), 0..6).prop_map(|slices| Operation::ShareAll { slices }),
        4 => (importer.clone(), which.clone()).prop_map(|(importer, batch)| Operation::OpenAll { importer, batch }),
        4 => (which.clone(), 1..4_usize).prop_map(|(import, times)| Operation::Fill { import, times }),
        2 => (which.clone(), 1..4_usize).prop_map(|(buffer, times)| Operation::FillOriginal { buffer, times }),
        7 => which.clone().prop_map(|import| Operation::DropImport { import }),
        3 => which.prop_map(|buffer| Operation::DropOriginal { buffer }),
        1 => Just(Operation::Collect),
        1 => importer.clone().prop_map(|importer| Operation::Trim { importer }),
        1 => importer.prop_map(|importer| Operation::Synchronize { importer }),
        1 => Just(Operation::Settle),
    ]
}

/// The process that has work queued on an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Writer {
    Exporter,
    Importer(usize),
}

/// An allocation of the exporter, as long as anybody has it.
struct Allocation {
    original: Option<DeviceBuffer<u32>>,
    /// What every value is once the queued work is done.
    values: Vec<u32>,
    queued: Option<Writer>,
    shared: bool,
}

/// A range of an allocation, by its place in the model.
type Part = (usize, Range<usize>);

struct Import {
    importer: usize,
    allocation: usize,
    range: Range<usize>,
    ticket: Ticket,
    buffer: DeviceBuffer<u32>,
    /// The open that counts it: of its own, or of all buffers of an allocation that one batch opened.
    open: u64,
}

struct Importer {
    side: Exporter,
    /// Reads beside the work that is queued on the side's own stream.
    reader: Stream,
    opens: u64,
    /// How many of the opens used a mapping that was kept: at least and at most.
    kept: (u64, u64),
    /// Allocations that may still be mapped.
    mapped: BTreeSet<usize>,
    /// Allocations that a trim may have left mapped, because work on dropped imports was queued.
    uncertain: BTreeSet<usize>,
    /// Imports that were dropped since everything was waited for.
    dropped: u64,
}

struct Model {
    exporter: Exporter,
    /// Reads, and fills what the exporter has for itself.
    reader: Stream,
    importers: Vec<Importer>,
    /// Never taken out, so that indices stay.
    allocations: Vec<Allocation>,
    tickets: Vec<(usize, Range<usize>, Ticket)>,
    batches: Vec<(Vec<Part>, TicketBatch)>,
    imports: Vec<Import>,
    last_open: u64,
    squatters: Vec<(DeviceBuffer<u32>, u32)>,
    last_value: u32,
}

/// A side whose device has so many pages, and its second stream.
fn side(pages: usize) -> (Exporter, Stream) {
    let options = MockOptions::new().with_latency(Duration::from_micros(100)).with_checks();
    let side = Exporter::with(options.with_memory_bytes((pages * PAGE * 4) as u64));
    let reader = side.runtime.device(0).unwrap().create_stream().unwrap();
    (side, reader)
}

impl Model {
    fn new() -> Self {
        let importer = |_| {
            let (side, reader) = side(1);
            let (mapped, uncertain) = (BTreeSet::new(), BTreeSet::new());
            Importer { side, reader, opens: 0, kept: (0, 0), mapped, uncertain, dropped: 0 }
        };
        let (exporter, reader) = side(PAGES);
        Self {
            exporter,
            reader,
            importers: (0..IMPORTERS).map(importer).collect(),
            allocations: Vec::new(),
            tickets: Vec::new(),
            batches: Vec::new(),
            imports: Vec::new(),
            last_open: 0,
            squatters: Vec::new(),
            last_value: 0,
        }
    }

    fn value(&mut self) -> u32 {
        self.last_value += 1;
        self.last_value
    }

    /// The `which`-th of the buffers that the exporter has, counted around.
    fn original(&self, which: usize) -> Option<usize> {
        let alive: Vec<_> = (0..self.allocations.len()).filter(|&at| self.allocations[at].original.is_some()).collect();
        (!alive.is_empty()).then(|| alive[which % alive.len()])
    }

    /// A part of an original: quarters of it, or all of it.
    fn part(&self, which: usize, from: usize, to: usize) -> Option<Part> {
        let at = self.original(which)?;
        let len = self.allocations[at].values.len();
        Some((at, if from < to { from * len / 4..to * len / 4 } else { 0..len }))
    }

    fn is_open(&self, importer: Option<usize>, allocation: usize) -> bool {
        let by = |import: &Import| importer.is_none_or(|importer| import.importer == importer);
        self.imports.iter().any(|import| import.allocation == allocation && by(import))
    }

    fn wait_for(&mut self, writer: Writer) {
        match writer {
            Writer::Exporter => self.exporter.stream.synchronize().unwrap(),
            Writer::Importer(importer) => self.importers[importer].side.stream.synchronize().unwrap(),
        }
        for allocation in self.allocations.iter_mut().filter(|allocation| allocation.queued == Some(writer)) {
            allocation.queued = None;
        }
    }

    /// Work of different streams is ordered by waiting for the other one.
    fn wait_for_others(&mut self, allocation: usize, but: Option<Writer>) {
        if let Some(writer) = self.allocations[allocation].queued
            && Some(writer) != but
        {
            self.wait_for(writer);
        }
    }

    /// Uses memory of the exporter, if there is any, for something else.
    fn squat(&mut self, pages: usize) {
        match self.exporter.runtime.device(0).unwrap().allocate::<u32>(pages * PAGE) {
            Ok(buffer) => {
                let value = self.value();
                self.reader.fill(&buffer, value).unwrap();
                self.squatters.push((buffer, value));
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}"),
        }
    }

    fn do_one(&mut self, operation: &Operation) {
        match *operation {
            Operation::Allocate { pages } => self.allocate(pages),
            Operation::Share { buffer, from, to } => {
                let Some((at, range)) = self.part(buffer, from, to) else { return };
                let allocation = &mut self.allocations[at];
                let original = allocation.original.as_ref().unwrap();
                let ticket = original.slice(range.clone()).unwrap().share().unwrap();
                allocation.shared = true;
                self.tickets.push((at, range, ticket));
            }
            Operation::Open { importer, ticket } => {
                if self.tickets.is_empty() {
                    return;
                }
                // Mostly young ones: most of the old ones are expired.
                let back = [0, 0, 1, 2, ticket][ticket % 5] % self.tickets.len();
                let (allocation, range, ticket) = self.tickets[self.tickets.len() - 1 - back].clone();
                self.open(importer, allocation, range, ticket);
            }
            Operation::OpenAgain { import } => {
                if self.imports.is_empty() {
                    return;
                }
                let import = &self.imports[import % self.imports.len()];
                let (importer, allocation) = (import.importer, import.allocation);
                let (range, ticket) = (import.range.clone(), import.ticket.clone());
                self.open(importer, allocation, range, ticket);
            }
            Operation::ShareAll { ref slices } => {
                let parts = slices.iter().filter_map(|(buffer, from, to)| self.part(*buffer, *from, *to));
                let parts: Vec<_> = parts.collect();
                let slice =
                    |(at, range): &Part| self.allocations[*at].original.as_ref().unwrap().slice(range.clone()).unwrap();
                let batch = self.exporter.runtime.share_all(&parts.iter().map(slice).collect::<Vec<_>>()).unwrap();
                assert_eq!(TicketBatch::from_bytes(&batch.to_bytes()).unwrap(), batch);
                parts.iter().for_each(|(at, _)| self.allocations[*at].shared = true);
                self.batches.push((parts, batch));
            }
            Operation::OpenAll { importer, batch } => {
                if self.batches.is_empty() {
                    return;
                }
                let back = [0, 0, 1, 2, batch][batch % 5] % self.batches.len();
                let (parts, batch) = self.batches[self.batches.len() - 1 - back].clone();
                self.open_all(importer, &parts, &batch);
            }
            Operation::Fill { import, times } => {
                if self.imports.is_empty() {
                    return;
                }
                let at = import % self.imports.len();
                let (importer, allocation) = (self.imports[at].importer, self.imports[at].allocation);
                self.wait_for_others(allocation, Some(Writer::Importer(importer)));
                for _ in 0..times {
                    let value = self.value();
                    let import = &self.imports[at];
                    self.importers[importer].side.stream.fill(&import.buffer, value).unwrap();
                    self.allocations[allocation].values[import.range.clone()].fill(value);
                }
                self.allocations[allocation].queued = Some(Writer::Importer(importer));
            }
            Operation::FillOriginal { buffer, times } => {
                let Some(at) = self.original(buffer) else { return };
                self.wait_for_others(at, Some(Writer::Exporter));
                for _ in 0..times {
                    let value = self.value();
                    let allocation = &mut self.allocations[at];
                    self.exporter.stream.fill(allocation.original.as_ref().unwrap(), value).unwrap();
                    allocation.values.fill(value);
                }
                self.allocations[at].queued = Some(Writer::Exporter);
            }
            Operation::DropImport { import } => {
                if self.imports.is_empty() {
                    return;
                }
                let at = import % self.imports.len();
                let import = self.imports.swap_remove(at);
                self.importers[import.importer].dropped += 1;
                let pages = self.allocations[import.allocation].values.len() / PAGE;
                drop(import);
                self.squat(pages);
            }
            Operation::DropOriginal { buffer } => {
                let Some(at) = self.original(buffer) else { return };
                let pages = self.allocations[at].values.len() / PAGE;
                self.allocations[at].original = None;
                self.squat(pages);
            }
            Operation::Collect => drop(self.exporter.runtime.trim_shared().unwrap()),
            Operation::Trim { importer } => {
                self.importers[importer].side.runtime.trim().unwrap();
                let gone = self.importers[importer].mapped.clone();
                let gone: BTreeSet<_> = gone.into_iter().filter(|&at| !self.is_open(Some(importer), at)).collect();
                let importer = &mut self.importers[importer];
                if importer.dropped > 0 {
                    importer.uncertain.extend(gone);
                } else {
                    importer.mapped.retain(|at| !gone.contains(at));
                    importer.uncertain.retain(|at| !gone.contains(at));
                }
            }
            Operation::Synchronize { importer } => self.wait_for(Writer::Importer(importer)),
            Operation::Settle => self.settle(),
        }
    }

    fn allocate(&mut self, pages: usize) {
        let device = self.exporter.runtime.device(0).unwrap();
        let original = match device.allocate_shared::<u32>(pages * PAGE) {
            Ok(original) => original,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
                self.squatters.clear();
                return;
            }
        };
        let value = self.value();
        self.exporter.stream.fill(&original, value).unwrap();
        self.allocations.push(Allocation {
            original: Some(original),
            values: vec![value; pages * PAGE],
            queued: Some(Writer::Exporter),
            shared: false,
        });
    }

    fn open(&mut self, importer: usize, allocation: usize, range: Range<usize>, ticket: Ticket) {
        let opened = self.importers[importer].side.runtime.open_shared::<u32>(&ticket);
        if self.allocations[allocation].original.is_none() {
            assert_eq!(opened.unwrap_err().kind(), ErrorKind::Expired);
            return;
        }
        let buffer = opened.unwrap();
        assert_eq!(buffer.len(), range.len());
        let open = self.count_open(importer, allocation);
        self.imports.push(Import { importer, allocation, range, ticket, buffer, open });
    }

    /// Counts an open of an allocation, and returns its number.
    fn count_open(&mut self, importer: usize, allocation: usize) -> u64 {
        let of = &mut self.importers[importer];
        of.opens += 1;
        let may_be_kept = of.mapped.contains(&allocation);
        of.kept.0 += u64::from(may_be_kept && !of.uncertain.contains(&allocation));
        of.kept.1 += u64::from(may_be_kept);
        of.mapped.insert(allocation);
        of.uncertain.remove(&allocation);
        self.last_open += 1;
        self.last_open
    }

    /// Opens a batch: all of it, or nothing if an allocation of it is gone.
    fn open_all(&mut self, importer: usize, parts: &[Part], batch: &TicketBatch) {
        let opened = self.importers[importer].side.runtime.open_shared_all::<u32>(batch);
        let allocations: BTreeSet<_> = parts.iter().map(|(at, _)| *at).collect();
        let alive: Vec<_> = allocations.iter().filter(|at| self.allocations[**at].original.is_some()).collect();
        if alive.len() < allocations.len() {
            assert_eq!(opened.unwrap_err().kind(), ErrorKind::Expired);
            // The call may have mapped some before it was refused.
            for at in alive {
                if self.importers[importer].mapped.insert(*at) {
                    self.importers[importer].uncertain.insert(*at);
                }
            }
            return;
        }
        let buffers = opened.unwrap();
        assert_eq!(buffers.len(), parts.len());
        let count = |at: &usize| (*at, self.count_open(importer, *at));
        let opens: BTreeMap<_, _> = allocations.iter().map(count).collect();
        for (place, (buffer, (allocation, range))) in buffers.into_iter().zip(parts).enumerate() {
            assert_eq!(buffer.len(), range.len());
            let (ticket, open) = (batch.ticket(place).unwrap(), opens[allocation]);
            let (allocation, range) = (*allocation, range.clone());
            self.imports.push(Import { importer, allocation, range, ticket, buffer, open });
        }
    }

    /// What holds after every step, whatever is queued.
    fn check(&self) {
        for import in self.imports.iter().filter(|import| self.allocations[import.allocation].queued.is_none()) {
            let values = self.importers[import.importer].reader.download(&import.buffer).unwrap();
            assert_eq!(values, self.allocations[import.allocation].values[import.range.clone()]);
        }
        for allocation in self.allocations.iter().filter(|allocation| allocation.queued.is_none()) {
            let Some(original) = &allocation.original else { continue };
            assert_eq!(self.reader.download(original).unwrap(), allocation.values);
        }
        self.agrees(false).unwrap();
        for (buffer, value) in &self.squatters {
            assert_eq!(self.reader.download(buffer).unwrap(), vec![*value; buffer.len()]);
        }
    }

    /// Whether the counts are those of the model; exactly, where nothing is under way.
    fn agrees(&self, exactly: bool) -> Result<(), String> {
        let between = |what: &str, least: u64, is: u64, most: u64| {
            let most = if exactly { least } else { most };
            if (least..=most).contains(&is) { Ok(()) } else { Err(format!("{what}: {is} is not in {least}..={most}")) }
        };
        for (at, importer) in self.importers.iter().enumerate() {
            let sharing = importer.side.runtime.statistics().sharing;
            let open = self.imports.iter().filter(|import| import.importer == at).map(|import| import.open);
            let open = open.collect::<BTreeSet<_>>().len() as u64;
            between("imports", open, sharing.imports, open + importer.dropped)?;
            // Kept: what is open, and what is not but was not freed by the exporter.
            let stays = |allocation: &&usize| {
                self.is_open(Some(at), **allocation) || self.allocations[**allocation].original.is_some()
            };
            let most = importer.mapped.len() as u64;
            let surely = importer.mapped.difference(&importer.uncertain);
            if exactly && importer.uncertain.is_empty() {
                let bytes = |at: &usize| self.allocations[*at].values.len() as u64 * 4;
                let staying: Vec<_> = surely.filter(stays).collect();
                between("mappings", staying.len() as u64, sharing.mappings, most)?;
                let staying_bytes = staying.iter().map(|at| bytes(at)).sum();
                between("mapped bytes", staying_bytes, sharing.mapped_bytes, 0)?;
            } else if !(surely.filter(stays).count() as u64..=most).contains(&sharing.mappings) {
                return Err(format!("{} mappings of {most}", sharing.mappings));
            }
            between("opens", importer.opens, sharing.opens, importer.opens)?;
            if !(importer.kept.0..=importer.kept.1).contains(&sharing.kept_opens) {
                return Err(format!("{} kept opens, not {:?}", sharing.kept_opens, importer.kept));
            }
        }
        let sharing = self.exporter.runtime.statistics().sharing;
        let dropped: u64 = self.importers.iter().map(|importer| importer.dropped).sum();
        let alive = self.allocations.iter().filter(|allocation| allocation.shared && allocation.original.is_some());
        let alive = alive.count() as u64;
        let limbo: Vec<_> = (0..self.allocations.len())
            .filter(|&at| self.allocations[at].original.is_none() && self.is_open(None, at))
            .collect();
        let limbo_bytes: u64 = limbo.iter().map(|&at| self.allocations[at].values.len() as u64 * 4).sum();
        let limbo = limbo.len() as u64;
        between("blocks in limbo", limbo, sharing.limbo_blocks, limbo + dropped)?;
        between("bytes in limbo", limbo_bytes, sharing.limbo_bytes, limbo_bytes + dropped * 3 * PAGE as u64 * 4)?;
        between("exported blocks", alive + limbo, sharing.exported_blocks, alive + limbo + dropped)?;
        Ok(())
    }

    /// Waits for all that is queued and under way: from then on the counts are exact.
    fn settle(&mut self) {
        self.wait_for(Writer::Exporter);
        (0..IMPORTERS).for_each(|importer| self.wait_for(Writer::Importer(importer)));
        let deadline = Instant::now() + Duration::from_secs(60);
        while let Err(what) = self.agrees(true) {
            assert!(Instant::now() < deadline, "still after a minute: {what}");
            std::thread::sleep(Duration::from_micros(100));
        }
        for at in 0..IMPORTERS {
            self.importers[at].dropped = 0;
            let mapped = self.importers[at].mapped.clone();
            let stays = |which: &usize| self.is_open(Some(at), *which) || self.allocations[*which].original.is_some();
            let mapped: BTreeSet<_> = mapped.into_iter().filter(stays).collect();
            let importer = &mut self.importers[at];
            importer.uncertain.retain(|which| mapped.contains(which));
            importer.mapped = mapped;
        }
    }

    fn end(mut self) {
        self.settle();
        self.check();
        self.squatters.clear();
        self.allocations.iter_mut().for_each(|allocation| allocation.original = None);
        self.imports.clear();
        let Self { exporter, reader, importers, .. } = self;
        until("all memory is back", || exporter.taken() == 0);
        drop(reader);
        for side in importers.into_iter().map(|importer| importer.side).chain([exporter]) {
            let gpu = side.gpu.clone();
            side.end();
            assert_eq!(gpu.violations(), []);
        }
    }
}

fn run(operations: &[Operation]) {
    let mut model = Model::new();
    for operation in operations {
        model.do_one(operation);
        while model.squatters.len() > SQUATTERS {
            model.squatters.remove(0);
        }
        model.check();
    }
    model.end();
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: SEQUENCES,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(3),
        max_shrink_iters: 200,
        ..ProptestConfig::default()
    })]

    #[test]
    fn memory_that_somebody_has_open_stays_and_all_other_comes_back(operations in vec(operation(), OPERATIONS)) {
        run(&operations);
    }
}
