//! Property tests: random sequences of operations on the pools, held against models.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, mpsc};
use std::thread;

use highwater_mock::Operation;
use parking_lot::Mutex;
use proptest::collection::vec;
use proptest::prelude::*;

use super::handles::{HandlePool, PoolKey};
use super::ranges::PAGE;
use crate::testing::ManualBackend;
use crate::{Access, DeviceBuffer, ErrorKind, Graph, HostMemoryOptions, PinnedBuffer, Runtime, RuntimeOptions, Stream};
use highwater_hal::{Error, HostMemoryKind};

const OPERATIONS: usize = 50;

fn sequences(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

// ------------------------------------------------------------------------------------------------ the handle pool

const THREADS: usize = 3;
const KEYS: u32 = 2;

#[derive(Debug, Clone)]
enum HandleOperation {
    Lease {
        thread: usize,
        key: u32,
    },
    /// A lease whose creation finds no memory, and releases the idle handles.
    LeaseExhausted {
        thread: usize,
        key: u32,
    },
    Warm {
        key: u32,
        count: usize,
    },
    Release {
        thread: usize,
        which: usize,
    },
    EndThread {
        thread: usize,
    },
    Trim,
}

fn handle_operation() -> impl Strategy<Value = HandleOperation> {
    prop_oneof![
        8 => (0..THREADS, 0..KEYS).prop_map(|(thread, key)| HandleOperation::Lease { thread, key }),
        2 => (0..THREADS, 0..KEYS).prop_map(|(thread, key)| HandleOperation::LeaseExhausted { thread, key }),
        2 => (0..KEYS, 0..4_usize).prop_map(|(key, count)| HandleOperation::Warm { key, count }),
        7 => (0..THREADS, 0..4_usize).prop_map(|(thread, which)| HandleOperation::Release { thread, which }),
        2 => (0..THREADS).prop_map(|thread| HandleOperation::EndThread { thread }),
        1 => Just(HandleOperation::Trim),
    ]
}

enum Command {
    Lease(PoolKey, u64),
    LeaseExhausted(PoolKey, u64),
    Release(usize),
}

/// A thread that leases and releases as told, and answers with the handle it got.
struct Worker<'scope> {
    commands: mpsc::Sender<Command>,
    answers: mpsc::Receiver<u64>,
    thread: thread::ScopedJoinHandle<'scope, ()>,
}

impl<'scope> Worker<'scope> {
    fn start<'env: 'scope>(scope: &'scope thread::Scope<'scope, 'env>, pool: &'env HandlePool<u64>) -> Self {
        let (commands, received) = mpsc::channel();
        let (answer, answers) = mpsc::channel();
        let thread = scope.spawn(move || {
            let mut leases = Vec::new();
            while let Ok(command) = received.recv() {
                let answered = match command {
                    Command::Lease(key, fresh) => {
                        let lease = pool.lease(key, || Ok(fresh)).unwrap();
                        let handle = *lease;
                        leases.push(lease);
                        handle
                    }
                    Command::LeaseExhausted(key, fresh) => {
                        let create = || {
                            drop(pool.take_idle());
                            Ok(fresh)
                        };
                        let lease = pool.lease(key, create).unwrap();
                        let handle = *lease;
                        leases.push(lease);
                        handle
                    }
                    Command::Release(which) => {
                        drop(leases.remove(which));
                        0
                    }
                };
                answer.send(answered).unwrap();
            }
        });
        Self { commands, answers, thread }
    }

    fn tell(&self, command: Command) -> u64 {
        self.commands.send(command).unwrap();
        self.answers.recv().unwrap()
    }

    fn end(self) {
        drop(self.commands);
        // An explicit join waits for the thread-locals too.
        self.thread.join().unwrap();
    }
}

/// What the pool is meant to do, in the plainest terms.
#[derive(Default)]
struct HandleModel {
    created: u64,
    idle: HashMap<u32, Vec<u64>>,
    /// Claims of each thread, in order: key, handle, whether it is leased.
    claims: [Vec<(u32, u64, bool)>; THREADS],
    /// Leases of each thread, in order.
    leases: [Vec<u64>; THREADS],
}

impl HandleModel {
    fn lease(&mut self, thread: usize, key: u32) -> u64 {
        let claims = &mut self.claims[thread];
        let handle = match claims.iter_mut().find(|(k, _, leased)| *k == key && !*leased) {
            Some(claim) => {
                claim.2 = true;
                claim.1
            }
            None => {
                let handle = self.idle.entry(key).or_default().pop().unwrap_or_else(|| {
                    self.created += 1;
                    self.created
                });
                claims.push((key, handle, true));
                handle
            }
        };
        self.leases[thread].push(handle);
        handle
    }

    fn release(&mut self, thread: usize, which: usize) {
        let handle = self.leases[thread].remove(which);
        self.claims[thread].iter_mut().filter(|claim| claim.1 == handle).for_each(|claim| claim.2 = false);
    }

    fn end_thread(&mut self, thread: usize) {
        self.leases[thread].clear();
        for (key, handle, _) in self.claims[thread].drain(..) {
            self.idle.entry(key).or_default().push(handle);
        }
    }
}

fn run_handle_sequence(operations: &[HandleOperation]) {
    let pool = HandlePool::new();
    let mut model = HandleModel::default();
    let (mut trimmed, mut warmed, mut peak) = (0, 0, 0);
    thread::scope(|scope| {
        let mut workers: [Option<Worker<'_>>; THREADS] = [const { None }; THREADS];
        for operation in operations {
            match *operation {
                HandleOperation::Lease { thread, key } => {
                    let worker = workers[thread].get_or_insert_with(|| Worker::start(scope, &pool));
                    let fresh = model.created + 1;
                    let expected = model.lease(thread, key);
                    assert_eq!(worker.tell(Command::Lease(PoolKey::device(key), fresh)), expected);
                }
                HandleOperation::LeaseExhausted { thread, key } => {
                    let worker = workers[thread].get_or_insert_with(|| Worker::start(scope, &pool));
                    let fresh = model.created + 1;
                    let expected = model.lease(thread, key);
                    assert_eq!(worker.tell(Command::LeaseExhausted(PoolKey::device(key), fresh)), expected);
                    if model.created == fresh {
                        trimmed += model.idle.drain().map(|(_, idle)| idle.len() as u64).sum::<u64>();
                    }
                }
                HandleOperation::Warm { key, count } => {
                    let idle = model.idle.entry(key).or_default();
                    let missing = count.saturating_sub(idle.len());
                    let mut created = model.created;
                    let create = || {
                        created += 1;
                        Ok(created)
                    };
                    assert_eq!(pool.warm(PoolKey::device(key), count, create).unwrap(), missing);
                    idle.extend(model.created + 1..=created);
                    model.created = created;
                    warmed += missing as u64;
                }
                HandleOperation::Release { thread, which } => {
                    if let Some(worker) = &workers[thread]
                        && which < model.leases[thread].len()
                    {
                        worker.tell(Command::Release(which));
                        model.release(thread, which);
                    }
                }
                HandleOperation::EndThread { thread } => {
                    if let Some(worker) = workers[thread].take() {
                        worker.end();
                        model.end_thread(thread);
                    }
                }
                HandleOperation::Trim => {
                    let mut taken = pool.take_idle();
                    let mut expected: Vec<u64> = model.idle.values_mut().flat_map(std::mem::take).collect();
                    taken.sort_unstable();
                    expected.sort_unstable();
                    assert_eq!(taken, expected);
                    trimmed += taken.len() as u64;
                }
            }
            let statistics = pool.statistics();
            let idle: usize = model.idle.values().map(Vec::len).sum();
            let leased: usize = model.leases.iter().map(Vec::len).sum();
            assert_eq!(statistics.created, model.created);
            assert_eq!(statistics.live, model.created - trimmed);
            peak = peak.max(statistics.live);
            assert_eq!((statistics.peak_live, statistics.removed, statistics.warmed), (peak, trimmed, warmed));
            assert_eq!((statistics.idle, statistics.leased), (idle as u64, leased as u64));
        }
        workers.into_iter().flatten().for_each(Worker::end);
    });
}

// ------------------------------------------------------------------------------------------------ memory

const STREAMS: usize = 3;
/// The size of a piece, and the unit of growth.
const PIECE: usize = 2 << 20;

#[derive(Debug, Clone)]
enum MemoryOperation {
    Take { thread: usize, bytes: usize },
    TakeWithFault { bytes: usize, kind: ErrorKind },
    Drop { thread: usize, which: usize },
    Copy { which: usize, stream: usize, to_host: bool },
    NoteUse { which: usize, stream: usize, at: usize, writes: bool },
    WriteByCpu { which: usize },
    Capture { which: usize, stream: usize },
    Launch { which: usize, stream: usize },
    DropGraph { which: usize },
    Advance { stream: usize },
    EndThread { thread: usize },
    Reclaim,
    Trim,
    TrimWithFault,
}

fn memory_operation() -> impl Strategy<Value = MemoryOperation> {
    let size = || prop_oneof![8 => 1..20_000_usize, 4 => 1..2_049_usize, 4 => Just(4096), 4 => Just(1 << 16), 1 => 1..6_000_000_usize];
    let which = || 0..8_usize;
    let stream = || 0..STREAMS;
    let fault = prop_oneof![Just(ErrorKind::OutOfMemory), Just(ErrorKind::Vendor)];
    prop_oneof![
        12 => (0..THREADS, size()).prop_map(|(thread, bytes)| MemoryOperation::Take { thread, bytes }),
        1 => (size(), fault).prop_map(|(bytes, kind)| MemoryOperation::TakeWithFault { bytes, kind }),
        9 => (0..THREADS, which()).prop_map(|(thread, which)| MemoryOperation::Drop { thread, which }),
        8 => (which(), stream(), any::<bool>())
            .prop_map(|(which, stream, to_host)| MemoryOperation::Copy { which, stream, to_host }),
        4 => (which(), stream(), any::<usize>(), any::<bool>())
            .prop_map(|(which, stream, at, writes)| MemoryOperation::NoteUse { which, stream, at, writes }),
        3 => which().prop_map(|which| MemoryOperation::WriteByCpu { which }),
        2 => (which(), stream()).prop_map(|(which, stream)| MemoryOperation::Capture { which, stream }),
        2 => (which(), stream()).prop_map(|(which, stream)| MemoryOperation::Launch { which, stream }),
        2 => which().prop_map(|which| MemoryOperation::DropGraph { which }),
        6 => stream().prop_map(|stream| MemoryOperation::Advance { stream }),
        1 => (0..THREADS).prop_map(|thread| MemoryOperation::EndThread { thread }),
        1 => Just(MemoryOperation::Reclaim),
        1 => Just(MemoryOperation::Trim),
        1 => Just(MemoryOperation::TrimWithFault),
    ]
}

/// A thread that runs jobs, one at a time.
struct Hand {
    jobs: mpsc::Sender<Box<dyn FnOnce() + Send>>,
    thread: thread::JoinHandle<()>,
}

impl Hand {
    fn start() -> Self {
        let (jobs, received) = mpsc::channel::<Box<dyn FnOnce() + Send>>();
        Self { jobs, thread: thread::spawn(move || received.into_iter().for_each(|job| job())) }
    }

    fn run<R: Send + 'static>(&self, job: impl FnOnce() -> R + Send + 'static) -> R {
        let (answer, answers) = mpsc::channel();
        self.jobs.send(Box::new(move || answer.send(job()).unwrap())).unwrap();
        answers.recv().expect("the thread panicked")
    }

    fn end(self) {
        drop(self.jobs);
        // An explicit join waits for the thread-locals too.
        self.thread.join().unwrap();
    }
}

struct Pair {
    pinned: PinnedBuffer<u8>,
    device: DeviceBuffer<u8>,
    /// What every byte of the page-locked memory is, unless a stream may write it.
    tag: Option<u8>,
}

/// Memory that is not free: of a live buffer, or of one that a stream or a graph may still use.
struct Occupied {
    start: usize,
    bytes: usize,
    /// The pages that it keeps: its own, or those of its slab.
    pages: Range<usize>,
    is_live: bool,
    graphs: usize,
}

/// What the pool is meant to do, in pages.
struct MemoryModel {
    backend: Arc<ManualBackend>,
    /// Whether pieces with neighboring addresses are one range.
    has_ranges: bool,
    occupied: Vec<Occupied>,
}

impl MemoryModel {
    /// Removes the memory that has become free.
    fn update(&mut self) {
        let backend = &self.backend;
        self.occupied.retain(|block| block.is_live || block.graphs > 0 || backend.is_in_use(block.start as u64));
    }

    fn at(&mut self, start: usize) -> &mut Occupied {
        self.occupied.iter_mut().find(|block| block.start == start).unwrap()
    }

    fn overlaps(&self, start: usize, bytes: usize) -> bool {
        self.occupied.iter().any(|block| start < block.pages.end && block.pages.start < start + bytes)
    }

    /// Whether a new block overlaps others. Blocks of one size may share a slab.
    fn collides(&self, new: &Occupied) -> bool {
        let shares = |block: &Occupied| block.bytes == new.bytes && new.bytes < PAGE && block.pages == new.pages;
        self.occupied.iter().any(|block| {
            let (own, others) = if shares(block) {
                (new.start..new.start + new.bytes, block.start..block.start + block.bytes)
            } else {
                (new.pages.clone(), block.pages.clone())
            };
            own.start < others.end && others.start < own.end
        })
    }

    /// Whether a block of a slab is free for a request.
    fn has_slab(&self, bytes: usize) -> bool {
        let size = bytes.next_multiple_of(256);
        let of_size = || self.occupied.iter().filter(|block| block.bytes == size && size <= 2048);
        of_size().any(|block| of_size().filter(|other| other.pages == block.pages).count() < (64 << 10) / size)
    }

    /// Whether some free pages in a row could serve a request. Blocks of up to a piece lie inside one piece.
    fn fits(&self, bytes: usize) -> bool {
        let mut ranges: Vec<(usize, usize)> = Vec::new();
        for (start, piece) in self.backend.pieces() {
            match ranges.last_mut() {
                Some((_, end)) if self.has_ranges && bytes > PIECE && *end == start => *end += piece,
                _ => ranges.push((start, start + piece)),
            }
        }
        ranges.into_iter().any(|(mut start, end)| {
            // From one occupied run to the next.
            while start + bytes <= end {
                let blocks = self.occupied.iter().filter(|block| start < block.pages.end);
                match blocks.filter(|block| block.pages.start < start + bytes).map(|block| block.pages.end).max() {
                    Some(behind) => start = behind,
                    None => return true,
                }
            }
            false
        })
    }

    /// The pieces that are free as a whole.
    fn free_pieces(&self) -> usize {
        self.backend.pieces().into_iter().filter(|(start, bytes)| !self.overlaps(*start, *bytes)).count()
    }
}

/// No cap, one that keeps nothing, and one that is often exceeded.
fn cap() -> impl Strategy<Value = Option<u64>> {
    prop_oneof![2 => Just(None), 1 => Just(Some(0)), 3 => (0..10_000_000_u64).prop_map(Some)]
}

/// Ends the batch of the last use. A use in an open batch may wait for later work of its stream, of which the model knows nothing.
fn end_batch(stream: &Stream) {
    drop(stream.record().unwrap());
}

/// Page-locked memory and device memory, with copies by several threads on streams that advance only on request. The backend
/// itself panics when memory is freed while a stream or a graph uses it, and when it is called under a lock. The model knows
/// every page: which of them may be given out, when the pool may grow and by how much, what a trim releases, and what every
/// buffer contains.
fn run_memory_sequence(operations: &[MemoryOperation], cap: Option<u64>, registers: bool, poisons: bool) {
    let backend = ManualBackend::with_capabilities(|can| {
        can.host_register = registers;
        can.register_piece_bytes = PIECE;
    });
    let host_memory = HostMemoryOptions { idle_cap_bytes: cap, ..HostMemoryOptions::new().with_poison(poisons) };
    let options = RuntimeOptions::new().with_host_memory(host_memory);
    let runtime = Runtime::with_options(backend.clone(), &options).unwrap();
    backend.watch_locks_of(&runtime);
    let device = runtime.device(0).unwrap();
    let streams: [Stream; STREAMS] = std::array::from_fn(|_| device.create_stream().unwrap());
    let mut hands: [Option<Hand>; THREADS] = [const { None }; THREADS];
    let mut alive: VecDeque<Pair> = VecDeque::new();
    // With the address of the block that each has recorded.
    let mut graphs: Vec<(Graph, usize)> = Vec::new();
    let mut model = MemoryModel { backend: Arc::clone(&backend), has_ranges: registers, occupied: Vec::new() };
    let (growth, release) = match registers {
        true => (Operation::HostRegister, Operation::HostUnregister),
        false => (Operation::HostAllocate, Operation::HostFree),
    };
    let fail = |operation, is_on: bool, kind| {
        backend.gpu.fail_by_chance(operation, u32::from(is_on) * 1_000_000, kind).unwrap();
    };
    let (mut requests, mut next_tag) = (0, 0_u8);
    for operation in operations {
        model.update();
        let before = runtime.statistics().host;
        match *operation {
            MemoryOperation::Take { bytes, .. } | MemoryOperation::TakeWithFault { bytes, .. } => {
                let whole = bytes.next_multiple_of(PAGE);
                let fits = model.fits(whole) || model.has_slab(bytes);
                let fault = match *operation {
                    MemoryOperation::TakeWithFault { kind, .. } => Some(kind),
                    _ => None,
                };
                let of_thread = match *operation {
                    MemoryOperation::Take { thread, .. } if thread > 0 => Some(thread),
                    _ => None,
                };
                fault.into_iter().for_each(|kind| fail(growth, true, kind));
                let taken = match of_thread {
                    Some(thread) => {
                        let runtime = runtime.clone();
                        hands[thread].get_or_insert_with(Hand::start).run(move || runtime.pinned::<u8>(bytes))
                    }
                    None => runtime.pinned::<u8>(bytes),
                };
                fault.into_iter().for_each(|kind| fail(growth, false, kind));
                let host = runtime.statistics().host;
                let grown = host.misses - before.misses;
                match taken {
                    Err(error) => {
                        assert_eq!((Some(error.kind()), grown), (fault, 0));
                        assert!(!fits, "refused, although memory was free");
                    }
                    Ok(pinned) => {
                        requests += 1;
                        assert!(fault.is_none() || grown == 0, "grown with a fault");
                        assert_eq!(grown == 0, fits, "grown by {grown}, for {bytes} bytes: {before:?}");
                        let allocated = (host.allocations - before.allocations) as usize * PIECE;
                        let most = if grown == 0 { 0 } else { whole.next_multiple_of(PIECE) };
                        assert!(allocated <= most, "grown by more than the request");
                        let start = pinned.ptr().address();
                        let block = pinned.block();
                        assert!(start.is_multiple_of(if bytes <= 2048 { 256 } else { PAGE }));
                        // Page 0 is aligned to 2 MiB, and no slab is as large.
                        let run = block.run();
                        let before = run.start as usize * PAGE;
                        let first = (start - before) / PIECE * PIECE + before;
                        let pages = first..first + run.pages as usize * PAGE;
                        let new = Occupied { start, bytes: block.bytes(), pages, is_live: true, graphs: 0 };
                        assert!(!model.collides(&new), "given out while it is in use");
                        model.occupied.push(new);
                        let device = device.allocate(bytes).unwrap();
                        alive.push_back(Pair { pinned, device, tag: None });
                    }
                }
            }
            MemoryOperation::Drop { thread, which } => {
                if which < alive.len() {
                    let pair = alive.remove(which).unwrap();
                    model.at(pair.pinned.ptr().address()).is_live = false;
                    let pinned = pair.pinned;
                    if thread == 0 {
                        drop(pinned);
                    } else {
                        hands[thread].get_or_insert_with(Hand::start).run(move || drop(pinned));
                    }
                    drop(pair.device);
                    model.update();
                    let host = runtime.statistics().host;
                    // What is above the cap is in use, or shares a piece with what is. A drop asks few streams, so blocks that
                    // wait for others may be done.
                    let idle = host.free_bytes + host.waiting_bytes + host.cached_bytes;
                    let is_known = host.waiting_bytes == 0;
                    assert!(idle <= cap.unwrap_or(u64::MAX) || model.free_pieces() == 0 || !is_known, "{host:?}");
                }
            }
            MemoryOperation::Copy { which, stream, to_host } => {
                if let Some(pair) = alive.get_mut(which) {
                    if to_host {
                        pair.tag = None;
                        streams[stream].copy_to_host(&pair.device, &mut pair.pinned).unwrap();
                    } else {
                        streams[stream].copy_to_device(&pair.pinned, &pair.device).unwrap();
                        end_batch(&streams[stream]);
                    }
                }
            }
            MemoryOperation::NoteUse { which, stream, at, writes } => {
                if let Some(pair) = alive.get(which) {
                    let (stream, base) = (&streams[stream], pair.pinned.ptr());
                    backend.enqueue_use(stream.id(), base.address() as u64);
                    let inside = base.offset(at % pair.pinned.len());
                    assert_eq!(runtime.pinned_block_of(inside).unwrap().base, base);
                    stream.note_host_use(inside, if writes { Access::Write } else { Access::Read }).unwrap();
                    end_batch(stream);
                }
            }
            MemoryOperation::WriteByCpu { which } => {
                if let Some(pair) = alive.get_mut(which) {
                    next_tag = next_tag.wrapping_add(1);
                    pair.pinned.write_with(|values| values.fill(next_tag)).unwrap();
                    pair.tag = Some(next_tag);
                    assert!(!backend.is_in_use(pair.pinned.ptr().address() as u64));
                }
            }
            MemoryOperation::Capture { which, stream } => {
                if let Some(pair) = alive.get(which) {
                    let graph = streams[stream].capture(|stream| stream.copy_to_device(&pair.pinned, &pair.device));
                    let start = pair.pinned.ptr().address();
                    model.at(start).graphs += 1;
                    graphs.push((graph.unwrap(), start));
                }
            }
            MemoryOperation::Launch { which, stream } => {
                if let Some((graph, _)) = graphs.get_mut(which) {
                    graph.launch(&streams[stream]).unwrap();
                }
            }
            MemoryOperation::DropGraph { which } => {
                if which < graphs.len() {
                    let (graph, start) = graphs.remove(which);
                    drop(graph);
                    model.at(start).graphs -= 1;
                }
            }
            MemoryOperation::Advance { stream } => backend.advance(streams[stream].id()),
            MemoryOperation::EndThread { thread } => hands[thread].take().into_iter().for_each(Hand::end),
            MemoryOperation::Reclaim => runtime.trim_device_memory().unwrap(),
            MemoryOperation::Trim => {
                runtime.trim().unwrap();
                assert_eq!((model.free_pieces(), runtime.statistics().host.cached_bytes), (0, 0));
            }
            MemoryOperation::TrimWithFault => {
                fail(release, true, ErrorKind::Vendor);
                let free = model.free_pieces();
                assert_eq!(runtime.trim().is_err(), free > 0);
                assert_eq!(model.free_pieces(), free, "a refused release loses nothing");
                fail(release, false, ErrorKind::Vendor);
            }
        }
        let host = runtime.statistics().host;
        assert_eq!(host.broken_law(), None, "{host:?}");
        let pieces = backend.pieces();
        assert_eq!((host.pieces, host.held_bytes), (pieces.len() as u64, pieces.values().sum::<usize>() as u64));
        let kept = model.occupied.iter().filter(|block| !block.is_live && block.graphs > 0).count();
        assert_eq!((host.live_blocks, host.graph_blocks), (alive.len() as u64, kept as u64));
        assert_eq!((host.unmarked_blocks, host.remnant_blocks), (0, 0));
        assert!(cap.is_some() || host.cap_evictions == 0);
        assert_eq!(host.hits + host.misses, requests);
        assert_eq!(host.requested_bytes, alive.iter().map(|pair| pair.pinned.len() as u64).sum::<u64>());
        for pair in &alive {
            assert!(pair.pinned.block().uses.completions(false).len() <= STREAMS, "a stream has left two marks");
            let Some(tag) = pair.tag else { continue };
            for at in [0, pair.pinned.len() / 2, pair.pinned.len() - 1] {
                // SAFETY: Inside the live buffer, which was written by the CPU and which no stream writes since.
                let value = unsafe { pair.pinned.ptr().as_ptr().add(at).read_volatile() };
                assert_eq!(value, tag, "another owner has written the memory");
            }
        }
    }
    drop((alive, graphs, streams, device));
    let [_, first, second] = hands;
    // One thread ends before the runtime, and one after it.
    first.into_iter().for_each(Hand::end);
    assert_eq!(runtime.close().unwrap().total(), 0);
    assert!(backend.pieces().is_empty());
    second.into_iter().for_each(Hand::end);
}

proptest! {
    // Each sequence starts threads.
    #![proptest_config(sequences(1_000))]

    #[test]
    fn the_handle_pool_does_what_its_model_does(operations in vec(handle_operation(), OPERATIONS)) {
        run_handle_sequence(&operations);
    }
}

proptest! {
    // Each sequence makes a runtime.
    #![proptest_config(sequences(300))]

    #[test]
    fn memory_is_used_again_only_after_its_streams_and_given_back_in_the_end(
        operations in vec(memory_operation(), OPERATIONS), cap in cap(), registers in any::<bool>(), poisons in any::<bool>()
    ) {
        run_memory_sequence(&operations, cap, registers, poisons);
    }
}

#[test]
fn a_copy_whose_mark_fails_is_waited_for() {
    let backend = ManualBackend::new();
    let runtime = Runtime::new(backend.clone()).unwrap();
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    // A use of a large block is recorded at once.
    let pinned = runtime.pinned::<u8>(4 << 20).unwrap();
    let buffer = device.allocate::<u8>(4 << 20).unwrap();
    backend.fail_record(true);
    stream.copy_to_device(&pinned, &buffer).unwrap();
    assert!(!backend.is_in_use(pinned.ptr().address() as u64));
    // The buffer's own completion event fails when it is dropped: it is kept, and freed by the end of the runtime.
    stream.copy_to_device(&pinned, &buffer).unwrap();
    drop(buffer);
    backend.fail_record(false);
    runtime.trim_device_memory().unwrap();
    assert_eq!(runtime.backend().live_objects().allocations, 1);
    assert_eq!(runtime.statistics().failed_releases, 1);
    drop((pinned, stream, device));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

// ------------------------------------------------------------------------------------------------ refused releases

/// What other code does while the backend releases a piece, and whether the release is refused.
#[derive(Debug, Clone, Copy)]
struct Release {
    grows_by: usize,
    kind: HostMemoryKind,
    is_refused: bool,
}

fn release() -> impl Strategy<Value = Release> {
    let kind = prop_oneof![Just(HostMemoryKind::Default), Just(HostMemoryKind::WriteCombined)];
    (0..4_usize, kind, any::<bool>()).prop_map(|(grows_by, kind, is_refused)| Release { grows_by, kind, is_refused })
}

/// The releases of a trim, one after the other.
fn script(
    backend: &Arc<ManualBackend>,
    operation: &'static str,
    runtime: &Arc<Runtime>,
    taken: &Arc<Mutex<Vec<PinnedBuffer<u8>>>>,
    mut releases: std::vec::IntoIter<Release>,
) {
    let Some(Release { grows_by, kind, is_refused }) = releases.next() else { return };
    let (again, owner, buffers) = (Arc::downgrade(backend), Arc::downgrade(runtime), Arc::clone(taken));
    backend.intrude(operation, move || {
        let (backend, runtime) = (again.upgrade().unwrap(), owner.upgrade().unwrap());
        for _ in 0..grows_by {
            buffers.lock().push(runtime.pinned_of::<u8>(2 << 20, kind)?);
        }
        script(&backend, operation, &runtime, &buffers, releases);
        if is_refused { Err(Error::new(ErrorKind::Vendor, operation, "refused")) } else { Ok(()) }
    });
}

fn refuse_releases_beside_growths(trims: Vec<(usize, Vec<Release>)>, registers: bool) {
    let backend = ManualBackend::with_capabilities(|can| {
        (can.host_register, can.write_combined) = (registers, true);
        can.register_piece_bytes = 2 << 20;
    });
    let operation = if registers { "host_unregister" } else { "host_free" };
    let runtime = Arc::new(Runtime::new(backend.clone()).unwrap());
    let taken = Arc::new(Mutex::new(Vec::new()));
    for (more, releases) in trims {
        taken.lock().extend((0..more).map(|_| runtime.pinned::<u8>(2 << 20).unwrap()));
        taken.lock().clear();
        script(&backend, operation, &runtime, &taken, releases.into_iter());
        // A refusal is expected.
        let _ = runtime.trim();
        // A script that the trim did not use up ends here.
        backend.intrude("none", || Ok(()));
        let host = runtime.statistics().host;
        assert_eq!(host.broken_law(), None, "{host:?}");
        assert_eq!(host.held_bytes, backend.pieces().values().sum::<usize>() as u64);
    }
    taken.lock().clear();
    runtime.trim().unwrap();
    assert_eq!(runtime.statistics().host.held_bytes, 0);
    assert_eq!(Arc::into_inner(runtime).unwrap().close().unwrap().total(), 0);
}

proptest! {
    // Each sequence makes a runtime.
    #![proptest_config(sequences(100))]

    #[test]
    fn refused_releases_beside_growths_break_no_law(
        trims in vec((0..5_usize, vec(release(), 0..6)), 1..6), registers in any::<bool>()
    ) {
        refuse_releases_beside_growths(trims, registers);
    }
}

/// The pool grows while the backend refuses to release a piece: more is held then than after any growth.
#[test]
fn a_piece_that_stays_beside_a_growth_raises_the_peak() {
    for kind in [HostMemoryKind::Default, HostMemoryKind::WriteCombined] {
        let release = Release { grows_by: 1, kind, is_refused: true };
        for registers in [false, true] {
            refuse_releases_beside_growths(vec![(1, vec![release])], registers);
        }
    }
}
