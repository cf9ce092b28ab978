//! Property tests: random sequences of operations on the pools, held against models.

use std::collections::{HashMap, VecDeque};
use std::sync::mpsc;
use std::thread;

use proptest::collection::vec;
use proptest::prelude::*;

use super::handles::{HandlePool, PoolKey};
use super::size_class;
use crate::testing::ManualBackend;
use crate::{Access, DeviceBuffer, PinnedBuffer, Runtime, RuntimeOptions, Stream};

const OPERATIONS: usize = 50;

fn sequences(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

// ------------------------------------------------------------------------------------------------ the handle pool

const THREADS: usize = 3;
const KEYS: u32 = 2;

#[derive(Debug, Clone)]
enum HandleOperation {
    Lease { thread: usize, key: u32 },
    Release { thread: usize, which: usize },
    EndThread { thread: usize },
    Trim,
}

fn handle_operation() -> impl Strategy<Value = HandleOperation> {
    prop_oneof![
        8 => (0..THREADS, 0..KEYS).prop_map(|(thread, key)| HandleOperation::Lease { thread, key }),
        7 => (0..THREADS, 0..4_usize).prop_map(|(thread, which)| HandleOperation::Release { thread, which }),
        2 => (0..THREADS).prop_map(|thread| HandleOperation::EndThread { thread }),
        1 => Just(HandleOperation::Trim),
    ]
}

enum Command {
    Lease(PoolKey, u64),
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
    let mut trimmed = 0;
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
            assert_eq!((statistics.idle, statistics.leased), (idle as u64, leased as u64));
        }
        workers.into_iter().flatten().for_each(Worker::end);
    });
}

// ------------------------------------------------------------------------------------------------ memory

const STREAMS: usize = 3;

#[derive(Debug, Clone)]
enum MemoryOperation {
    Take { bytes: usize },
    Drop { which: usize },
    Copy { which: usize, stream: usize, to_host: bool },
    NoteUse { which: usize, stream: usize, at: usize, writes: bool },
    TouchByCpu { which: usize },
    Advance { stream: usize },
    Reclaim,
    Trim,
}

fn memory_operation() -> impl Strategy<Value = MemoryOperation> {
    let bytes = prop_oneof![1..20_000_usize, Just(4096), Just(1 << 16)];
    let which = 0..8_usize;
    prop_oneof![
        6 => bytes.prop_map(|bytes| MemoryOperation::Take { bytes }),
        4 => which.clone().prop_map(|which| MemoryOperation::Drop { which }),
        6 => (which.clone(), 0..STREAMS, any::<bool>())
            .prop_map(|(which, stream, to_host)| MemoryOperation::Copy { which, stream, to_host }),
        2 => (which.clone(), 0..STREAMS, any::<usize>(), any::<bool>())
            .prop_map(|(which, stream, at, writes)| MemoryOperation::NoteUse { which, stream, at, writes }),
        1 => which.prop_map(|which| MemoryOperation::TouchByCpu { which }),
        3 => (0..STREAMS).prop_map(|stream| MemoryOperation::Advance { stream }),
        1 => Just(MemoryOperation::Reclaim),
        1 => Just(MemoryOperation::Trim),
    ]
}

struct Pair {
    pinned: PinnedBuffer<u8>,
    device: DeviceBuffer<u8>,
    bytes: usize,
}

/// No cap, one that keeps nothing, and one that is often exceeded.
fn cap() -> impl Strategy<Value = Option<u64>> {
    prop_oneof![2 => Just(None), 1 => Just(Some(0)), 3 => (0..100_000_u64).prop_map(Some)]
}

/// Page-locked blocks and device blocks, copied between on streams that move only when told. The backend itself panics
/// when a block is freed while a stream uses it, and when it is called under a lock; the model adds which requests must be
/// served from the cache, and what may stay in it.
fn run_memory_sequence(operations: &[MemoryOperation], cap: Option<u64>) {
    let backend = ManualBackend::new();
    let options = RuntimeOptions { host_cache_bytes: cap, ..RuntimeOptions::new() };
    let runtime = Runtime::with_options(backend.clone(), &options).unwrap();
    backend.watch_locks_of(&runtime);
    let device = runtime.device(0).unwrap();
    let streams: [Stream; STREAMS] = std::array::from_fn(|_| device.create_stream().unwrap());
    let mut alive: VecDeque<Pair> = VecDeque::new();
    // Blocks in the cache, by class.
    let mut cached: HashMap<usize, Vec<u64>> = HashMap::new();
    let mut expected_misses = 0;
    for operation in operations {
        match *operation {
            MemoryOperation::Take { bytes } => {
                let (class, block_bytes) = size_class::of(bytes).unwrap();
                let in_class = cached.entry(class).or_default();
                let available = in_class.iter().any(|&address| !backend.is_in_use(address));
                let pinned = runtime.pinned::<u8>(bytes).unwrap();
                let address = pinned.ptr().address() as u64;
                assert!(!backend.is_in_use(address), "a block was given out while a stream uses it");
                match in_class.iter().position(|&other| other == address) {
                    Some(index) => {
                        in_class.swap_remove(index);
                    }
                    None => {
                        assert!(!available, "a free block was passed over");
                        expected_misses += 1;
                    }
                }
                assert!(bytes < 4096 || block_bytes - bytes <= bytes / 8);
                assert!(alive.iter().all(|other| other.pinned.ptr() != pinned.ptr()));
                let device = device.allocate(bytes).unwrap();
                alive.push_back(Pair { pinned, device, bytes });
            }
            MemoryOperation::Drop { which } => {
                if which < alive.len() {
                    let pair = alive.remove(which).unwrap();
                    let class = size_class::of(pair.bytes).unwrap().0;
                    cached.entry(class).or_default().push(pair.pinned.ptr().address() as u64);
                    drop(pair);
                    // What is above the cap is in use, or was not reached because so much of it is.
                    let host = runtime.statistics().host;
                    let addresses = || cached.values().flatten().filter(|&&address| backend.has_host_block(address));
                    let in_use = || addresses().filter(|&&address| backend.is_in_use(address)).count();
                    assert!(
                        host.free_bytes + host.waiting_bytes <= cap.unwrap_or(u64::MAX)
                            || in_use() == addresses().count()
                            || in_use() >= 16,
                        "{host:?}"
                    );
                }
            }
            MemoryOperation::Copy { which, stream, to_host } => {
                if let Some(pair) = alive.get_mut(which) {
                    if to_host {
                        streams[stream].copy_to_host(&pair.device, &mut pair.pinned).unwrap();
                    } else {
                        streams[stream].copy_to_device(&pair.pinned, &pair.device).unwrap();
                    }
                }
            }
            MemoryOperation::NoteUse { which, stream, at, writes } => {
                if let Some(pair) = alive.get(which) {
                    let (stream, base) = (&streams[stream], pair.pinned.ptr());
                    backend.enqueue_use(stream.id(), base.address() as u64);
                    let inside = base.offset(at % pair.bytes);
                    assert_eq!(runtime.pinned_block_of(inside).unwrap().base, base);
                    stream.note_host_use(inside, if writes { Access::Write } else { Access::Read }).unwrap();
                }
            }
            MemoryOperation::TouchByCpu { which } => {
                if let Some(pair) = alive.get_mut(which) {
                    pair.pinned.write().unwrap().fill(1);
                    assert!(!backend.is_in_use(pair.pinned.ptr().address() as u64));
                }
            }
            MemoryOperation::Advance { stream } => backend.advance(streams[stream].id()),
            MemoryOperation::Reclaim => runtime.trim_device_memory().unwrap(),
            MemoryOperation::Trim => {
                runtime.trim().unwrap();
                cached.values_mut().for_each(|blocks| blocks.retain(|&address| backend.is_in_use(address)));
            }
        }
        let host = runtime.statistics().host;
        assert_eq!(host.broken_law(), None, "{host:?}");
        assert_eq!(host.held_blocks, backend.live_host_blocks());
        assert_eq!((host.live_blocks, host.graph_blocks, host.unmarked_blocks), (alive.len() as u64, 0, 0));
        assert!(cap.is_some() || host.cap_evictions == 0);
        let completions = |pair: &Pair| pair.pinned.block().uses.completions(false).len();
        assert!(alive.iter().all(|pair| completions(pair) <= STREAMS), "a stream has left two marks");
        cached.values_mut().for_each(|blocks| blocks.retain(|&address| backend.has_host_block(address)));
        assert_eq!(host.requested_bytes, alive.iter().map(|pair| pair.bytes as u64).sum::<u64>());
        assert_eq!(host.misses, expected_misses);
        let in_cache: usize = cached.values().map(Vec::len).sum();
        assert_eq!(host.free_blocks + host.waiting_blocks, in_cache as u64);
    }
    drop((alive, streams, device));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

proptest! {
    // Each sequence starts threads.
    #![proptest_config(sequences(2_000))]

    #[test]
    fn the_handle_pool_does_what_its_model_does(operations in vec(handle_operation(), OPERATIONS)) {
        run_handle_sequence(&operations);
    }
}

proptest! {
    // Each sequence makes a runtime.
    #![proptest_config(sequences(1_500))]

    #[test]
    fn memory_is_used_again_only_after_its_streams_and_given_back_in_the_end(
        operations in vec(memory_operation(), OPERATIONS), cap in cap()
    ) {
        run_memory_sequence(&operations, cap);
    }
}

#[test]
fn a_copy_whose_mark_fails_is_waited_for() {
    let backend = ManualBackend::new();
    let runtime = Runtime::new(backend.clone()).unwrap();
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    let pinned = runtime.pinned::<u8>(64).unwrap();
    let buffer = device.allocate::<u8>(64).unwrap();
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
