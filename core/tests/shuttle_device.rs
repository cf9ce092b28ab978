//! Random schedules of threads over the device memory of streams: no memory has two owners, no stream gets memory that another one
//! still uses, nothing that is used is unmapped or destroyed, and in the end every part is accounted for.
//!
//! The files under test are compiled against shuttle's types; their `crate::primitive` is the module here. The backend is a list of
//! parts and mappings. A stream is two numbers: of the work that was enqueued, and of the work that is executed.

#![allow(missing_docs, unreachable_pub, dead_code, reason = "the files under test are compiled as part of this test")]

mod primitive {
    use std::ops::{Deref, DerefMut};

    /// parking_lot's interface over shuttle's mutex.
    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

    /// `None` only while it waits.
    pub(crate) struct MutexGuard<'m, T>(Option<shuttle::sync::MutexGuard<'m, T>>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(shuttle::sync::Mutex::new(value))
        }
        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard(Some(self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)))
        }
        pub(crate) fn is_locked(&self) -> bool {
            self.0.try_lock().is_err()
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;
        fn deref(&self) -> &T {
            self.0.as_ref().unwrap()
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.0.as_mut().unwrap()
        }
    }

    /// parking_lot's interface over shuttle's condition variable.
    #[derive(Debug, Default)]
    pub(crate) struct Condvar(shuttle::sync::Condvar);

    impl Condvar {
        pub(crate) fn new() -> Self {
            Self::default()
        }
        pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            let wait = |guard| self.0.wait(guard).unwrap_or_else(std::sync::PoisonError::into_inner);
            guard.0 = guard.0.take().map(wait);
        }
        pub(crate) fn notify_all(&self) {
            self.0.notify_all();
        }
    }
}

mod testing {
    /// Locks that are held until this is dropped.
    pub(crate) struct Held<T>(pub(crate) T);

    impl<T> Drop for Held<T> {
        fn drop(&mut self) {}
    }
}

mod capture {
    pub(crate) mod thread {
        pub(crate) fn in_capture() -> bool {
            false
        }
        pub(crate) fn warm_up_first(operation: &'static str, what: &str) -> highwater_core::Error {
            highwater_core::Error::new(highwater_core::ErrorKind::Capture, operation, what.to_owned())
        }
    }
}

mod ledger {
    use highwater_core::DevicePtr;

    #[derive(Debug, Clone, Copy)]
    pub(crate) struct DeviceBlockInfo {
        pub(crate) device: u32,
        pub(crate) base: DevicePtr,
        pub(crate) bytes: usize,
    }
}

mod poison {
    pub(crate) const PATTERN: u8 = 0xf5;
}

mod completion_events {
    use std::sync::Arc;

    use crate::Progress;

    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
    pub(crate) struct Point {
        pub(crate) stream: u64,
        pub(crate) number: u64,
    }

    pub(crate) trait WaitForEnd: Send + Sync {
        fn wait_for_end(&self);
    }

    /// The end of the work of a stream up to a number.
    #[derive(Debug)]
    pub(crate) struct CompletionEvent(pub(crate) Point, pub(crate) Arc<Progress>);

    impl CompletionEvent {
        pub(crate) fn point(&self) -> Point {
            self.0
        }
    }
}

mod device_memory {
    /// Device memory retries nothing here.
    pub(crate) struct DeviceMemory;

    impl DeviceMemory {
        pub(crate) fn with_retry_for<T>(
            &self,
            _device: u32,
            _bytes: usize,
            make: impl Fn() -> highwater_core::Result<T>,
        ) -> highwater_core::Result<T> {
            make()
        }
    }
}

mod services {
    use highwater_core::{Capabilities, DevicePtr, Result};

    use crate::completion_events::CompletionEvent;
    use crate::ledger::DeviceBlockInfo;

    #[derive(Debug, Clone, Copy)]
    pub(crate) struct Info {
        pub(crate) memory_bytes: u64,
        pub(crate) ordinal: u32,
    }

    pub(crate) struct DeviceState {
        pub(crate) info: Info,
        pub(crate) capabilities: Capabilities,
    }

    pub(crate) struct Ledger;

    impl Ledger {
        pub(crate) fn insert_divided(&self, _block: DeviceBlockInfo) -> Result<()> {
            Ok(())
        }
        pub(crate) fn remove_device(&self, device: u32, base: DevicePtr) -> Result<DeviceBlockInfo> {
            Ok(DeviceBlockInfo { device, base, bytes: 0 })
        }
    }

    pub(crate) struct Services {
        pub(crate) backend: crate::Backend,
        pub(crate) devices: Vec<DeviceState>,
        pub(crate) ledger: Ledger,
    }

    impl Services {
        pub(crate) fn device(&self, ordinal: u32) -> &DeviceState {
            &self.devices[ordinal as usize]
        }
        pub(crate) fn is_surely_passed(&self, completion: &CompletionEvent) -> bool {
            completion.1.has_executed(completion.0.number)
        }
        pub(crate) fn is_passed(&self, completion: &CompletionEvent, wait: bool) -> Result<bool> {
            while wait && !self.is_surely_passed(completion) {
                shuttle::thread::yield_now();
            }
            Ok(self.is_surely_passed(completion))
        }
        pub(crate) fn note(&self, result: Result<()>) -> Result<()> {
            result
        }
    }
}

#[path = "../src/pool/area.rs"]
mod area;
#[path = "../src/pool/device_options.rs"]
mod device_options;
#[path = "../src/pool/device_parts.rs"]
mod device_parts;
#[path = "../src/pool/device_pool.rs"]
mod device_pool;
#[path = "../src/pool/free_lists.rs"]
mod free_lists;
#[path = "../src/pool/ranges.rs"]
mod ranges;
#[path = "../src/pool/slabs.rs"]
mod slabs;
#[path = "../src/pool/stream_memory.rs"]
mod stream_memory;
#[path = "../src/pool/stream_use.rs"]
mod stream_use;

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use completion_events::{CompletionEvent, Point};
use device_options::DeviceMemoryOptions;
use device_pool::{DeviceMemoryStatistics, DevicePool};
use highwater_core::{
    AllocateOptions, BackendTag, Capabilities, DevicePtr, Error, IdParts, ObjectId, PhysicalMemoryId,
    PhysicalMemoryOptions, Result, StreamId,
};
use services::{DeviceState, Info, Ledger, Services};
use shuttle::thread;
use stream_memory::{Lot, Placed, StreamMemory, Waiting};
use stream_use::{LiveStream, StreamEnd, StreamUse};

const SCHEDULES: usize = 300;
const MIB: usize = 1 << 20;
const PART: usize = 2 * MIB;

/// As shuttle's own, with threads whose stacks have room for a rig and for what a failed assertion prints.
fn check_random(scenario: impl Fn() + Send + Sync + 'static, schedules: usize) {
    let mut config = shuttle::Config::new();
    config.stack_size = 1 << 18;
    let scheduler = shuttle::scheduler::RandomScheduler::new(schedules);
    shuttle::Runner::new(scheduler, config).run(scenario);
}

/// The work of a stream: how much is enqueued, and how much of it is executed. No schedule comes between two accesses of it.
#[derive(Debug, Default)]
struct Progress {
    enqueued: AtomicU64,
    executed: AtomicU64,
}

impl Progress {
    fn has_executed(&self, number: u64) -> bool {
        self.executed.load(Ordering::SeqCst) >= number
    }

    fn execute_all(&self) {
        let enqueued = self.enqueued.load(Ordering::SeqCst);
        self.executed.store(enqueued, Ordering::SeqCst);
    }
}

/// Bytes of a part.
#[derive(Debug, Clone, Copy)]
struct Bytes {
    memory: u64,
    start: u64,
    end: u64,
}

impl Bytes {
    fn overlaps(&self, other: &Self) -> bool {
        self.memory == other.memory && self.start < other.end && other.start < self.end
    }
}

/// Work of a stream, by its number.
struct Use {
    bytes: Bytes,
    stream: u64,
    number: u64,
    progress: Arc<Progress>,
}

/// What a backend would be. No schedule comes between two accesses of it.
#[derive(Default)]
struct Model {
    next: u64,
    /// Live physical memory.
    physical: BTreeMap<u64, usize>,
    /// Mappings and allocations: address, bytes, and the number of the memory.
    mapped: BTreeMap<u64, (usize, u64)>,
    reserved: BTreeMap<u64, usize>,
    uses: Vec<Use>,
    /// The blocks that buffers own, by address.
    owned: BTreeMap<u64, usize>,
}

impl Model {
    fn next(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// The memory that lies at a range of addresses, all of which must be mapped.
    fn memory_at(&self, ptr: DevicePtr, bytes: usize) -> Vec<Bytes> {
        let (mut at, end, mut memory) = (ptr.get(), ptr.get() + bytes as u64, Vec::new());
        while at < end {
            let (start, (bytes, id)) = self.mapped.range(..=at).next_back().expect("nothing is mapped there");
            let until = end.min(start + *bytes as u64);
            assert!(at < until, "nothing is mapped there");
            memory.push(Bytes { memory: *id, start: at - start, end: until - start });
            at = until;
        }
        memory
    }

    /// Requires that no other stream than the one with this key uses memory.
    fn check_unused(&self, memory: &[Bytes], key: Option<u64>, what: &str) {
        for used in &self.uses {
            let is_done = Some(used.stream) == key || used.progress.has_executed(used.number);
            let is_used = memory.iter().any(|bytes| bytes.overlaps(&used.bytes));
            assert!(!is_used || is_done, "{:?} are {what} while stream {} uses them", used.bytes, used.stream);
        }
    }

    fn take_out(&mut self, ptr: DevicePtr, what: &str) -> u64 {
        let (bytes, id) = self.mapped.remove(&ptr.get()).expect("nothing is mapped there");
        let end = ptr.get() + bytes as u64;
        let inside = |(start, bytes): (&u64, &usize)| *start < end && ptr.get() < start + *bytes as u64;
        assert!(!self.owned.iter().any(inside), "memory of a buffer is {what}");
        self.check_unused(&[Bytes { memory: id, start: 0, end: bytes as u64 }], None, what);
        id
    }
}

fn id_of(number: u64) -> PhysicalMemoryId {
    static TAG: std::sync::LazyLock<BackendTag> = std::sync::LazyLock::new(BackendTag::next);
    let slot = u32::try_from(number).unwrap();
    // SAFETY: No backend gets the id.
    unsafe { PhysicalMemoryId::from_parts(IdParts { slot, generation: NonZeroU32::MIN, tag: *TAG, device: 0 }) }
}

fn number_of(memory: PhysicalMemoryId) -> u64 {
    memory.parts().slot.into()
}

#[derive(Default)]
struct Backend(std::sync::Mutex<Model>);

impl Backend {
    fn model(&self) -> std::sync::MutexGuard<'_, Model> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn allocate(&self, _device: u32, options: &AllocateOptions) -> Result<DevicePtr> {
        thread::yield_now();
        let mut model = self.model();
        let id = model.next();
        let ptr = id << 40;
        model.physical.insert(id, options.bytes);
        model.mapped.insert(ptr, (options.bytes, id));
        Ok(DevicePtr::new(ptr))
    }

    unsafe fn free(&self, _device: u32, ptr: DevicePtr, _stream: Option<StreamId>) -> Result<()> {
        thread::yield_now();
        let mut model = self.model();
        let id = model.take_out(ptr, "freed");
        model.physical.remove(&id);
        Ok(())
    }

    fn create_memory(&self, _device: u32, options: &PhysicalMemoryOptions) -> Result<PhysicalMemoryId> {
        thread::yield_now();
        let mut model = self.model();
        let id = model.next();
        model.physical.insert(id, options.bytes);
        Ok(id_of(id))
    }

    fn destroy_memory(&self, memory: PhysicalMemoryId) -> Result<()> {
        thread::yield_now();
        let mut model = self.model();
        assert!(!model.mapped.values().any(|(_, id)| *id == number_of(memory)), "destroyed while it is mapped");
        assert!(model.physical.remove(&number_of(memory)).is_some(), "destroyed twice");
        Ok(())
    }

    fn reserve_addresses(&self, _device: u32, bytes: usize) -> Result<DevicePtr> {
        let mut model = self.model();
        let ptr = model.next() << 40;
        model.reserved.insert(ptr, bytes);
        Ok(DevicePtr::new(ptr))
    }

    unsafe fn free_addresses(&self, _device: u32, start: DevicePtr, bytes: usize) -> Result<()> {
        let mut model = self.model();
        let end = start.get() + bytes as u64;
        assert!(model.mapped.range(start.get()..end).next().is_none(), "addresses are freed under a mapping");
        assert_eq!(model.reserved.remove(&start.get()), Some(bytes));
        Ok(())
    }

    unsafe fn map_memory(&self, _device: u32, ptr: DevicePtr, memory: PhysicalMemoryId) -> Result<()> {
        thread::yield_now();
        let mut model = self.model();
        let inside = |(start, bytes): (&u64, &usize)| *start <= ptr.get() && ptr.get() < start + *bytes as u64;
        assert!(model.reserved.iter().any(inside), "mapped outside of reserved addresses");
        let bytes = model.physical[&number_of(memory)];
        let end = ptr.get() + bytes as u64;
        let last = model.mapped.range(..end).next_back().map(|(start, (bytes, _))| start + *bytes as u64);
        assert!(last.is_none_or(|last| last <= ptr.get()), "mapped twice");
        model.mapped.insert(ptr.get(), (bytes, number_of(memory)));
        Ok(())
    }

    unsafe fn unmap_memory(&self, _device: u32, ptr: DevicePtr, _bytes: usize) -> Result<()> {
        thread::yield_now();
        self.model().take_out(ptr, "unmapped");
        Ok(())
    }

    unsafe fn set_memory_access(&self, _device: u32, _ptr: DevicePtr, _bytes: usize, _peer: u32) -> Result<()> {
        Ok(())
    }
}

/// A block as its memory keeps it.
struct Kept(Lot, AtomicBool);

// SAFETY: `StreamMemory` casts nothing. The cast of the library is not part of this test.
unsafe impl Placed for Kept {
    fn lot(&self) -> Option<Lot> {
        Some(self.0)
    }
    fn forget_lot(&self) {
        self.1.store(true, Ordering::SeqCst);
    }
}

#[derive(Debug)]
struct Life {
    key: u64,
    progress: Arc<Progress>,
    /// The wrong variant: answers that everything is executed.
    lies: bool,
}

impl Life {
    fn completion_now(&self) -> Arc<CompletionEvent> {
        let number = self.progress.enqueued.load(Ordering::SeqCst);
        Arc::new(CompletionEvent(Point { stream: self.key, number }, Arc::clone(&self.progress)))
    }
}

impl LiveStream for Life {
    fn id(&self) -> StreamId {
        unreachable!("no call of a backend names a stream here")
    }
    fn completion(&self) -> Result<Arc<CompletionEvent>> {
        Ok(self.completion_now())
    }
    fn is_over(&self) -> bool {
        self.is_idle()
    }
    fn is_idle(&self) -> bool {
        let number = self.progress.enqueued.load(Ordering::SeqCst);
        self.lies || self.progress.has_executed(number)
    }
    unsafe fn fill(&self, _ptr: DevicePtr, _bytes: usize, _value: u8) -> Result<()> {
        Ok(())
    }
    fn count_failed_release(&self, _error: &Error) {}
}

struct Rig {
    services: Arc<Services>,
    pool: Arc<DevicePool>,
    lies: bool,
}

/// A stream, as `stream/core.rs` has it.
struct Stream {
    rig: Arc<Rig>,
    life: Option<Arc<Life>>,
    end: Arc<StreamEnd>,
    memory: Arc<StreamMemory>,
    progress: Arc<Progress>,
}

/// A buffer, as `device_block.rs` has it: a use by another stream waits.
struct Buffer {
    memory: Arc<StreamMemory>,
    block: Arc<Kept>,
    used_by: Option<Arc<CompletionEvent>>,
}

impl Rig {
    fn new(plain: bool, lies: bool) -> Arc<Self> {
        let mut capabilities = Capabilities::none();
        capabilities.mapped_memory = true;
        capabilities.mapped_memory_granularity = PART;
        let device = DeviceState { info: Info { memory_bytes: 1 << 30, ordinal: 0 }, capabilities };
        let services = Arc::new(Services { backend: Backend::default(), devices: vec![device], ledger: Ledger });
        let options = DeviceMemoryOptions::new().with_plain_allocations(plain);
        let pool = DevicePool::new(&services, 0, &options);
        Arc::new(Self { services, pool, lies })
    }

    fn model(&self) -> std::sync::MutexGuard<'_, Model> {
        self.services.backend.model()
    }

    fn stream(self: &Arc<Self>, key: u64) -> Stream {
        let progress = Arc::<Progress>::default();
        let life = Arc::new(Life { key, progress: Arc::clone(&progress), lies: self.lies });
        let memory = self.pool.enlist(key, false);
        let end = Arc::<StreamEnd>::default();
        memory.belongs_to(StreamUse::new(key, Arc::downgrade(&life) as Weak<dyn LiveStream>, Arc::clone(&end)));
        Stream { rig: Arc::clone(self), life: Some(life), end, memory, progress }
    }

    fn statistics(&self) -> DeviceMemoryStatistics {
        let sum = self.pool.statistics();
        let states = [sum.live_bytes, sum.free_bytes, sum.slab_bytes, sum.spare_bytes, sum.cached_bytes];
        let waiting = sum.waiting_bytes + sum.unmarked_bytes;
        assert_eq!(states.iter().sum::<u64>() + waiting, sum.held_bytes, "{sum:?}");
        sum
    }

    /// Every buffer and stream is gone and everything is executed: a trim leaves nothing.
    fn check_end(&self) {
        assert_eq!(self.statistics().live_blocks, 0);
        // The first makes the memories of streams spare.
        self.pool.trim(true).unwrap();
        self.pool.trim(true).unwrap();
        assert_eq!(self.statistics().held_bytes, 0);
        let model = self.model();
        assert!(model.physical.is_empty() && model.mapped.is_empty() && model.reserved.is_empty());
    }
}

impl Stream {
    /// As `Stream::allocate`.
    fn allocate(&self, bytes: usize) -> Buffer {
        let request = DevicePool::request(bytes).unwrap();
        let kept = self.memory.take_cached(request.size());
        let lot = match kept {
            Some(kept) => kept.lot().unwrap(),
            None => self.rig.pool.take_slow(&self.memory, request).unwrap(),
        };
        let mut model = self.rig.model();
        let memory = model.memory_at(lot.ptr, lot.bytes());
        model.check_unused(&memory, Some(self.memory.key), "given out");
        let end = lot.ptr.get() + lot.bytes() as u64;
        let inside = |(start, bytes): (&u64, &usize)| *start < end && lot.ptr.get() < start + *bytes as u64;
        assert!(!model.owned.iter().any(inside), "a block has two owners");
        model.owned.insert(lot.ptr.get(), lot.bytes());
        drop(model);
        Buffer { memory: Arc::clone(&self.memory), block: Arc::new(Kept(lot, AtomicBool::new(false))), used_by: None }
    }

    /// Enqueues work on a buffer.
    fn work_on(&self, buffer: &mut Buffer) {
        let number = self.progress.enqueued.fetch_add(1, Ordering::SeqCst) + 1;
        let mut model = self.rig.model();
        for bytes in model.memory_at(buffer.block.0.ptr, buffer.block.0.bytes()) {
            let progress = Arc::clone(&self.progress);
            model.uses.push(Use { bytes, stream: self.memory.key, number, progress });
        }
        drop(model);
        if !Arc::ptr_eq(&self.memory, &buffer.memory) {
            let point = Point { stream: self.memory.key, number };
            buffer.used_by = Some(Arc::new(CompletionEvent(point, Arc::clone(&self.progress))));
        }
    }

    /// As the end of a buffer.
    fn drop_buffer(&self, buffer: Buffer) {
        let Buffer { memory, block, used_by } = buffer;
        assert!(self.rig.model().owned.remove(&block.0.ptr.get()).is_some());
        match used_by {
            None => memory.give_back(block.0, block),
            Some(after) => memory.give_back_waiting(Waiting { after: vec![after], ..Waiting::of(block.0) }),
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let Some(life) = self.life.take().filter(|_| !std::thread::panicking()) else { return };
        let last = life.completion_now();
        drop(life);
        self.end.set(Some(last));
        self.rig.pool.end_stream(&self.memory);
    }
}

/// Two threads with a stream each allocate, work and free; one of the streams ends. A third executes, and one trims.
fn allocate_and_trim(plain: bool, lies: bool) {
    let rig = Rig::new(plain, lies);
    let streams = [rig.stream(1), rig.stream(2)];
    let progress: Vec<_> = streams.iter().map(|stream| Arc::clone(&stream.progress)).collect();
    let users: Vec<_> = streams
        .into_iter()
        .map(|stream| {
            thread::spawn(move || {
                for bytes in [3 * MIB, 100, 5 * MIB, 3 * MIB] {
                    let mut buffer = stream.allocate(bytes);
                    stream.work_on(&mut buffer);
                    stream.drop_buffer(buffer);
                }
            })
        })
        .collect();
    let device = thread::spawn({
        let progress = progress.clone();
        move || {
            for _ in 0..3 {
                (0..10).for_each(|_| thread::yield_now());
                progress.iter().for_each(|progress| progress.execute_all());
            }
        }
    });
    rig.pool.trim(false).unwrap();
    users.into_iter().for_each(|user| user.join().unwrap());
    device.join().unwrap();
    progress.iter().for_each(|progress| progress.execute_all());
    rig.check_end();
}

#[test]
fn streams_that_allocate_free_and_end_beside_a_trim_share_no_memory_and_lose_none() {
    for plain in [false, true] {
        check_random(move || allocate_and_trim(plain, false), SCHEDULES);
    }
}

#[test]
fn memory_that_moves_although_its_stream_is_behind_is_found() {
    for plain in [false, true] {
        let found = std::panic::catch_unwind(|| check_random(move || allocate_and_trim(plain, true), SCHEDULES));
        assert!(found.is_err(), "plain: {plain}");
    }
}

/// Three threads share a stream, and one gives its blocks to another stream before it drops them.
fn share_a_stream(plain: bool) {
    let rig = Rig::new(plain, false);
    let (shared, other) = (Arc::new(rig.stream(1)), Arc::new(rig.stream(2)));
    let progress = [Arc::clone(&shared.progress), Arc::clone(&other.progress)];
    let users: Vec<_> = (0..3)
        .map(|index| {
            let (shared, other) = (Arc::clone(&shared), Arc::clone(&other));
            thread::spawn(move || {
                for bytes in [2 * MIB, 300, 2 * MIB] {
                    let mut buffer = shared.allocate(bytes * (index + 1));
                    shared.work_on(&mut buffer);
                    if index == 0 {
                        other.work_on(&mut buffer);
                    }
                    shared.drop_buffer(buffer);
                }
            })
        })
        .collect();
    progress.iter().for_each(|progress| progress.execute_all());
    rig.pool.trim(false).unwrap();
    users.into_iter().for_each(|user| user.join().unwrap());
    rig.statistics();
    drop((shared, other));
    progress.iter().for_each(|progress| progress.execute_all());
    rig.check_end();
}

#[test]
fn threads_that_share_a_stream_share_no_block() {
    for plain in [false, true] {
        check_random(move || share_a_stream(plain), SCHEDULES);
    }
}
