//! Sharing while the backend refuses. Every refusal is reported or counted, no call hangs, no memory is freed early, and
//! afterward all memory is returned.

use std::time::Duration;

use highwater_core::{Backend, DeviceBuffer, Error, ErrorKind, Result};
use highwater_mock::{MockOptions, Operation};

use crate::Exporter;
use crate::peer::{Peer, until};

/// Every call of an operation fails from here on.
fn fail_all(side: &Exporter, operation: Operation) {
    side.gpu.fail_by_chance(operation, 1_000_000, ErrorKind::Vendor).unwrap();
}

fn fail_none(side: &Exporter, operation: Operation) {
    side.gpu.fail_by_chance(operation, 0, ErrorKind::Vendor).unwrap();
}

#[test]
fn memory_whose_last_use_could_not_be_marked_was_freed_under_it_when_it_left_limbo() {
    let exporter = Exporter::with(MockOptions::new().with_checks());
    let importer = Exporter::new();
    let buffer = exporter.make(1000, 5);
    let opened = importer.runtime.open_shared::<u32>(&buffer.share().unwrap()).unwrap();
    exporter.gpu.set_latency(Duration::from_millis(300));
    exporter.stream.fill(&buffer, 6_u32).unwrap();
    fail_all(&exporter, Operation::RecordEvent);
    drop(buffer);
    fail_none(&exporter, Operation::RecordEvent);
    drop(opened);
    until("it has left limbo", || exporter.runtime.statistics().sharing.limbo_blocks == 0);
    assert!(exporter.taken() > 0, "freed while nobody knows whether the stream is done");
    assert_eq!(exporter.gpu.violations(), []);
    assert_eq!(exporter.runtime.statistics().failed_releases, 1);
    importer.end();
    exporter.end();
}

#[test]
fn a_buffer_could_not_be_shared_any_more_after_one_query_had_failed() {
    let exporter = Exporter::with(MockOptions::new().with_latency(Duration::from_millis(20)));
    let importer = Exporter::new();
    let buffer = exporter.make(1000, 5);
    fail_all(&exporter, Operation::QueryEvent);
    let ticket = buffer.share().unwrap();
    assert_eq!(importer.refusal(&ticket), ErrorKind::DeviceLost);
    fail_none(&exporter, Operation::QueryEvent);
    exporter.stream.synchronize().unwrap();
    let opened = importer.runtime.open_shared::<u32>(&buffer.share().unwrap()).unwrap();
    assert_eq!(importer.stream.download(&opened).unwrap(), vec![5; 1000]);
    // The work before the first ticket is known to be done as well.
    drop((opened, importer.runtime.open_shared::<u32>(&ticket).unwrap(), buffer));
    until("nobody holds it", || exporter.taken() == 0);
    importer.end();
    exporter.end();
}

#[test]
fn opens_that_failed_were_counted_as_opened_by_a_kept_mapping() {
    let exporter = Exporter::with(MockOptions::new().with_latency(Duration::from_millis(20)));
    let importer = Exporter::new();
    let buffer = exporter.make(1000, 5);
    let opened = importer.runtime.open_shared::<u32>(&buffer.share().unwrap()).unwrap();
    exporter.stream.fill(&buffer, 6_u32).unwrap();
    fail_all(&exporter, Operation::QueryEvent);
    let ticket = buffer.share().unwrap();
    for _ in 0..3 {
        assert_eq!(importer.refusal(&ticket), ErrorKind::DeviceLost);
    }
    fail_none(&exporter, Operation::QueryEvent);
    let sharing = importer.runtime.statistics().sharing;
    assert_eq!((sharing.imports, sharing.opens, sharing.kept_opens), (1, 1, 0));
    importer.end_after((opened, buffer));
    exporter.end();
}

/// The operations that sharing consists of.
const OPERATIONS: [Operation; 8] = [
    Operation::ExportMemory,
    Operation::OpenMemory,
    Operation::CloseMemory,
    Operation::RecordEvent,
    Operation::QueryEvent,
    Operation::QueryStream,
    Operation::Allocate,
    Operation::Free,
];
const LEN: usize = 1024;

/// An exporter and an importer that live on while their backends refuse.
struct Pair {
    exporter: Exporter,
    importer: Exporter,
    /// What was refused.
    errors: Vec<Error>,
    rounds: u32,
}

impl Pair {
    fn new(seed: u64) -> Self {
        let options = || {
            let latency = Duration::from_micros(200);
            MockOptions::new().with_memory_bytes(4 << 20).with_latency(latency).with_checks().with_seed(seed)
        };
        let (exporter, importer) = (Exporter::with(options()), Exporter::with(options()));
        Self { exporter, importer, errors: Vec::new(), rounds: 0 }
    }

    fn faults(&self, operation: Operation) -> u64 {
        self.exporter.gpu.faults(operation) + self.importer.gpu.faults(operation)
    }

    fn failed_releases(&self) -> u64 {
        [&self.exporter, &self.importer].map(|side| side.runtime.statistics().failed_releases).iter().sum()
    }

    /// Checks that a refusal is reported with a message.
    fn note<T>(&mut self, result: Result<T>) -> Option<T> {
        result
            .inspect_err(|error| {
                assert!(!error.message().is_empty() && !error.hint().is_empty(), "{error:?}");
                self.errors.push(error.clone());
            })
            .ok()
    }

    fn download(&mut self, by_importer: bool, buffer: &DeviceBuffer<u32>, tag: u32) {
        let side = if by_importer { &self.importer } else { &self.exporter };
        let values = side.stream.download(buffer);
        if let Some(values) = self.note(values) {
            assert_eq!(values, vec![tag; buffer.len()], "round {}: {:?}", self.rounds, self.errors);
        }
    }

    /// A buffer with its values, which may fail.
    fn make(&mut self, tag: u32) -> Option<DeviceBuffer<u32>> {
        let made = self.exporter.runtime.device(0).unwrap().allocate_shared::<u32>(LEN);
        let buffer = self.note(made)?;
        let filled = self.exporter.stream.fill(&buffer, tag);
        self.note(filled)?;
        Some(buffer)
    }

    /// A buffer is shared, opened twice, and written and read by the importer. The exporter drops it first, and reuses the
    /// returned memory at once.
    fn round(&mut self) {
        self.rounds += 1;
        let (tag, next) = (self.rounds, 1_000_000 + self.rounds);
        self.batch(tag);
        let Some(buffer) = self.make(tag) else { return };
        let shared = buffer.share();
        let ticket = self.note(shared);
        let mut opened: Vec<_> = (0..2)
            .filter_map(|_| {
                let opened = self.importer.runtime.open_shared::<u32>(ticket.as_ref()?);
                self.note(opened)
            })
            .collect();
        for import in &opened {
            self.download(true, import, tag);
            let filled = self.importer.stream.fill(import, tag);
            self.note(filled);
        }
        self.download(false, &buffer, tag);
        opened.pop();
        drop(buffer);
        let others: Vec<_> = (0..3).filter_map(|_| self.make(next)).collect();
        for import in opened {
            self.download(true, &import, tag);
            // On its way when the import is dropped.
            let filled = self.importer.stream.fill(&import, tag);
            self.note(filled);
        }
        let collected = self.exporter.runtime.trim_shared();
        self.note(collected);
        if self.rounds.is_multiple_of(4) {
            let trimmed = self.importer.runtime.trim();
            self.note(trimmed);
        }
        for other in &others {
            self.download(false, other, next);
        }
        let synchronized = self.importer.stream.synchronize();
        self.note(synchronized);
        // Whatever was written late would be seen now.
        for other in &others {
            self.download(false, other, next);
        }
    }

    /// Shares two buffers as one batch of three slices. Each opened slice has its values, and each failed open leaves nothing open.
    fn batch(&mut self, tag: u32) {
        let Some(buffers) = (0..2).map(|_| self.make(tag)).collect::<Option<Vec<_>>>() else { return };
        let slices = [buffers[0].slice(0..LEN / 2), buffers[1].slice(0..LEN), buffers[0].slice(LEN / 4..LEN)];
        let shared = self.exporter.runtime.share_all(&slices.map(Result::unwrap));
        let Some(batch) = self.note(shared) else { return };
        let before = self.importer.runtime.statistics().sharing.opens;
        let opened = self.importer.runtime.open_shared_all::<u32>(&batch);
        let opens = self.importer.runtime.statistics().sharing.opens - before;
        let Some(mut opened) = self.note(opened) else {
            assert_eq!(opens, 0, "round {}", self.rounds);
            return;
        };
        assert_eq!((opens, opened.len()), (2, 3));
        drop(buffers);
        for import in &opened {
            self.download(true, import, tag);
        }
        drop(opened.remove(0));
        for import in opened {
            self.download(true, &import, tag);
            // On its way when the import is dropped.
            let filled = self.importer.stream.fill(&import, tag);
            self.note(filled);
        }
    }

    /// The faults are over: everything comes back, except what the backend would not take back.
    fn end(mut self) {
        self.errors.clear();
        (0..2).for_each(|_| self.round());
        assert!(self.errors.is_empty(), "{:?}", self.errors);
        let Self { exporter, importer, .. } = self;
        let unmapped = importer.gpu.faults(Operation::CloseMemory);
        assert!(importer.runtime.statistics().failed_releases >= unmapped);
        let watched = [exporter.gpu.clone(), importer.gpu.clone()];
        // Releases that could not be marked wait for the importer's end.
        drop(importer.stream);
        let live = importer.runtime.close().unwrap();
        assert!(live.total() == live.mappings && live.mappings <= unmapped, "{live:?}, {unmapped} refused");
        until("it has left limbo", || exporter.runtime.statistics().sharing.limbo_blocks == 0);
        exporter.end();
        for gpu in watched {
            assert_eq!(gpu.violations(), []);
        }
    }
}

#[test]
fn a_call_that_fails_is_told_or_counted_and_everything_comes_back() {
    for operation in OPERATIONS {
        for kind in [operation.usual_failure(), ErrorKind::Vendor] {
            for nth in 1..=5 {
                let mut pair = Pair::new(0);
                pair.exporter.gpu.fail_call(operation, nth, kind).unwrap();
                pair.importer.gpu.fail_call(operation, nth, kind).unwrap();
                // Some are called by one side only, and some the more often the slower the device is.
                let sides = match operation {
                    Operation::ExportMemory | Operation::Allocate | Operation::Free => vec![pair.exporter.gpu.clone()],
                    Operation::OpenMemory | Operation::CloseMemory => vec![pair.importer.gpu.clone()],
                    _ => vec![pair.exporter.gpu.clone(), pair.importer.gpu.clone()],
                };
                until("the calls have failed", || {
                    pair.round();
                    sides.iter().all(|gpu| gpu.faults(operation) > 0)
                });
                let told = pair.errors.len() as u64 + pair.failed_releases();
                let faults = pair.faults(operation);
                match operation {
                    // Asked again, or waited for another way, or given memory after all.
                    Operation::RecordEvent | Operation::QueryEvent | Operation::QueryStream => {}
                    Operation::Allocate | Operation::OpenMemory if kind == ErrorKind::OutOfMemory => {
                        assert_eq!(told, 0, "{operation}: {:?}", pair.errors);
                    }
                    _ => assert!(told >= faults, "{operation} {nth}: {faults} faults, {:?}", pair.errors),
                }
                assert!(
                    pair.errors.iter().all(|error| {
                        error.kind() == kind
                            || operation == Operation::QueryEvent && error.kind() == ErrorKind::DeviceLost
                            || operation == Operation::RecordEvent && error.kind() == ErrorKind::InvalidState
                    }),
                    "{operation} {nth}: {:?}",
                    pair.errors
                );
                pair.end();
            }
        }
    }
}

#[test]
fn calls_that_fail_by_chance_lose_nothing_and_free_nothing_early() {
    for seed in 0..12 {
        let mut pair = Pair::new(seed);
        // One operation after the other, and then all of them.
        let (failing, per_million) = match OPERATIONS.get(seed as usize) {
            Some(operation) => (std::slice::from_ref(operation), 400_000),
            None => (&OPERATIONS[..], 100_000),
        };
        for gpu in [&pair.exporter.gpu, &pair.importer.gpu] {
            failing.iter().for_each(|operation| {
                gpu.fail_by_chance(operation, per_million, operation.usual_failure()).unwrap();
            });
        }
        (0..30).for_each(|_| pair.round());
        assert!(failing.iter().any(|operation| pair.faults(*operation) > 0), "{failing:?}");
        for side in [&pair.exporter, &pair.importer] {
            failing.iter().for_each(|operation| fail_none(side, *operation));
        }
        pair.end();
    }
}

/// How often the thread that serves a process's shares has gone to sleep.
fn sleeps(peer: &Peer) -> u64 {
    let serves = |task: &std::path::PathBuf| {
        std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == "highwater-share")
    };
    let mut thread = None;
    until("the thread has its name", || {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", peer.pid())).unwrap().flatten();
        thread = tasks.map(|task| task.path()).find(serves);
        thread.is_some()
    });
    let status = std::fs::read_to_string(thread.unwrap().join("status")).unwrap();
    let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).unwrap();
    count.trim().parse().unwrap()
}

#[test]
fn a_release_that_nobody_could_mark_kept_the_importer_awake() {
    let exporter = Exporter::new();
    let buffer = exporter.make(10, 1);
    let mut peer = Peer::start_with("latency=100ms,fail=record_event:1", |_| {});
    peer.tell(&format!("open a {}", buffer.share().unwrap()));
    peer.tell("fill a 1 1");
    peer.tell("drop a");
    // It is let go of at the end, and not asked after a thousand times a second.
    assert!(peer.tell("statistics").starts_with("imports=1 "));
    let before = sleeps(&peer);
    std::thread::sleep(Duration::from_millis(300));
    let slept = sleeps(&peer) - before;
    assert!(slept < 50, "{slept} times");
    peer.quit();
    drop(buffer);
    exporter.end_once_all_is_back();
}

#[test]
fn memory_whose_unmapping_is_refused_stays_mapped_and_is_unmapped_later() {
    let (exporter, importer) = (Exporter::new(), Exporter::new());
    let sharing = || importer.runtime.statistics().sharing;
    let mapped = || importer.gpu.live_objects().mappings;
    let (buffer, ticket) = exporter.make_shared(1000, 1);
    drop(importer.runtime.open_shared::<u32>(&ticket).unwrap());
    until("it is let go of", || sharing().imports == 0);
    importer.gpu.fail_call("close_memory", 1, ErrorKind::Vendor).unwrap();
    importer.runtime.trim().unwrap();
    assert_eq!((sharing().mappings, mapped()), (1, 1), "it is mapped, and known to be");
    // It uses the existing mapping.
    let opened = importer.runtime.open_shared::<u32>(&ticket).unwrap();
    assert_eq!(sharing().kept_opens, 1);
    assert_eq!(importer.stream.download(&opened).unwrap(), vec![1; 1000]);
    drop(opened);
    until("it is let go of again", || sharing().imports == 0);
    importer.runtime.trim().unwrap();
    assert_eq!((sharing().mappings, mapped()), (0, 0));

    // The same after the exporter has freed it. No process opens it any more, and the next check unmaps it.
    drop(importer.runtime.open_shared::<u32>(&ticket).unwrap());
    until("it is let go of once more", || sharing().imports == 0);
    importer.gpu.fail_call("close_memory", 1, ErrorKind::Vendor).unwrap();
    let refused = importer.runtime.statistics().failed_releases;
    drop(buffer);
    until("the importer was told", || importer.runtime.statistics().failed_releases > refused);
    assert_eq!((sharing().mappings, mapped()), (1, 1));
    assert_eq!(importer.refusal(&ticket), ErrorKind::Expired);
    importer.runtime.trim_shared().unwrap();
    until("it is unmapped", || (sharing().mappings, mapped()) == (0, 0));
    importer.end();
    exporter.end();
}
