//! Page-locked host memory: the cache of blocks, the memory behind it, and the waits of the CPU for the streams.

use std::any::Any;
use std::cell::RefCell;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, Weak};

use super::HostCacheStatistics;
use super::active_trims::ActiveTrims;
use super::background::Background;
use super::block::{Block, KeptBlock, OwnedBlock};
use super::block_uses::{BegunUse, BlockUses, CpuAccess};
use super::budget::Budget;
use super::completion_events::{CompletionEvent, Point};
use super::host::{Found, HostCache, Leaving, Reason, Request};
use super::host_files::{HostFiles, MapsFiles};
use super::host_memory::{FileMemory, Freed, HostMemory, NotMapped, Piece};
use super::host_options::HostMemoryOptions;
use super::poison::{Poison, fill};
use super::ranges::{Borders, PAGE};
use super::recorder::Recorder;
use super::thread_cache::{AtHome, Cached, Counts, ThreadCache, enlist, keep_at_home, with_mine};
use crate::capture::thread::{in_capture, let_go};
use crate::ledger::HostBlockInfo;
use crate::services::{Services, twice};
use crate::stream::uses::last_used_stream;
use highwater_hal::{DevicePtr, Error, ErrorKind, HostMemoryKind, HostPtr, Result, counted, fork::Generation};

/// Bytes that the pools of a runtime hold from which on they grow only when nothing else is left.
const MOST_AHEAD: u64 = 64 << 20;

/// Maximum number of pages of a request: more than the pool can count.
const MOST_PAGES: usize = 1 << 31;

/// The id of no cache.
const NO_CACHE: u64 = u64::MAX;

/// The page-locked memory of a runtime.
pub(crate) struct PinnedPool {
    /// The generation of the services, copied here for the hit path.
    pub(crate) generation: Generation,
    /// The id of the cache, copied here for the hit path. [`NO_CACHE`] sends every request and every drop to the slow path.
    id: u64,
    cache: Arc<HostCache>,
    /// Maximum of the bytes held.
    cap_bytes: Option<u64>,
    memory: HostMemory,
    poison: Option<Poison>,
    recorder: Option<Arc<Recorder>>,
    /// Threads that free page-locked memory. They never wait for a stream.
    active_trims: Arc<ActiveTrims>,
    /// Page-locked memory beside the pools of the runtime.
    files: Arc<HostFiles>,
    /// The background thread, if the program asked for one.
    background: OnceLock<Background>,
    /// The other pools of the runtime.
    others: OnceLock<Box<[Weak<Self>]>>,
    services: Arc<Services>,
}

/// The property by which a pool differs from the first pool of its runtime.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Special {
    /// A NUMA node.
    Node(u32),
    /// A kind other than the default.
    Kind(HostMemoryKind),
}

/// A buffer's reference to its pool. It counts nothing: see *Liveness* in `thread_cache.rs`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PoolRef(NonNull<PinnedPool>);

// SAFETY: A shared reference to a `PinnedPool`, which is `Sync`.
unsafe impl Send for PoolRef {}
// SAFETY: As above.
unsafe impl Sync for PoolRef {}

impl PoolRef {
    /// Returns the pool of a live buffer.
    #[inline]
    pub(crate) fn get(&self) -> &PinnedPool {
        // SAFETY: Only a buffer has a `PoolRef`, from `PinnedPool::reference`, and the pool lives as long as any buffer: a runtime
        // that loses its last other user while a buffer is alive is left to the buffers.
        unsafe { self.0.as_ref() }
    }

    /// Returns whether this is a reference to a pool.
    pub(crate) fn is(&self, pool: &PinnedPool) -> bool {
        std::ptr::eq(self.0.as_ptr(), pool)
    }
}

impl PinnedPool {
    /// Returns the first pool of a runtime, or a special pool beside the first.
    pub(crate) fn new(
        services: Arc<Services>,
        options: &HostMemoryOptions,
        recorder: Option<Arc<Recorder>>,
        files: Arc<HostFiles>,
        beside: Option<(&Self, Special)>,
    ) -> Arc<Self> {
        let capabilities = services.devices.iter().map(|device| &device.capabilities);
        let memory =
            HostMemory::new(services.backend.host_allocator(), capabilities, options.huge_pages.unwrap_or_default());
        let poison = options.poison.filter(|is_on| *is_on).map(|_| Poison::default());
        let (first, memory) = match beside {
            None => (None, memory),
            Some((first, Special::Node(node))) => (Some(first), memory.on_node(node)),
            Some((first, Special::Kind(kind))) => (Some(first), memory.of_kind(kind)),
        };
        let cache = match first {
            Some(first) => HostCache::beside(&first.cache, options, memory.piece_bytes()),
            None => HostCache::new(options, memory.piece_bytes(), services.generation),
        };
        Arc::new(Self {
            generation: services.generation,
            id: if poison.is_some() || recorder.is_some() { NO_CACHE } else { cache.id },
            poison,
            recorder,
            cache,
            cap_bytes: options.cap_bytes,
            memory,
            active_trims: first.map_or_else(Arc::default, |first| Arc::clone(&first.active_trims)),
            background: OnceLock::new(),
            others: OnceLock::new(),
            files,
            services,
        })
    }

    /// Makes the pools of a runtime known to each other, once.
    pub(crate) fn unite(pools: &[&Arc<Self>]) {
        HostCache::unite(&pools.iter().map(|pool| &pool.cache).collect::<Vec<_>>());
        for pool in pools {
            let others = pools.iter().filter(|other| !Arc::ptr_eq(other, pool));
            let _ = pool.others.set(others.map(|other| Arc::downgrade(other)).collect());
        }
    }

    fn others(&self) -> impl Iterator<Item = Arc<Self>> + '_ {
        self.others.get().into_iter().flatten().filter_map(Weak::upgrade)
    }

    /// Returns whether the pool divides memory that it registers. Otherwise it cannot choose a node.
    pub(crate) fn registers(&self) -> bool {
        self.memory.piece_bytes().is_some()
    }

    /// Returns whether a block belongs to the pool.
    pub(crate) fn owns(&self, block: &Block) -> bool {
        block
            .home
            .as_ref()
            .map_or_else(|| self.cache.has_block(block.ptr), |home| Arc::ptr_eq(&home.cache, &self.cache))
    }

    /// Returns the address of a block's byte on a device.
    pub(crate) fn device_address(&self, ptr: HostPtr, device: u32) -> Result<DevicePtr> {
        self.services.check("device_address")?;
        self.services.backend.host_allocator().device_address(ptr, device)
    }

    /// Returns the maximum so far of the bytes that all pools of the runtime held.
    pub(crate) fn peak_of_all(&self) -> u64 {
        self.cache.peak_of_all()
    }

    /// Returns a reference for a buffer.
    #[inline]
    pub(crate) fn reference(&self) -> PoolRef {
        PoolRef(NonNull::from(self))
    }

    pub(crate) fn statistics(&self) -> HostCacheStatistics {
        self.cache.statistics()
    }

    /// Returns the block that contains an address, if a buffer owns it.
    pub(crate) fn live_block(&self, ptr: HostPtr) -> Option<HostBlockInfo> {
        self.cache.live_block(ptr).map(|block| HostBlockInfo { base: block.ptr, bytes: block.bytes() })
    }

    /// Keeps the block that contains an address, if a buffer owns it. If the buffer ends in the meantime, the block is not
    /// reused before the caller releases it.
    pub(crate) fn keep_live_block(&self, ptr: HostPtr) -> Option<KeptBlock> {
        self.cache.keep_if_live(ptr)
    }

    /// Frees memory above the cap, which captures and other threads may have left, and memory that was idle for the set time.
    pub(crate) fn trim_in_passing(&self) {
        if self.cache.exceeds_cap() {
            self.keep_to_cap();
        }
        if !in_capture() {
            self.cache.release_old(|| false, |leaving| drop(self.free(leaving, Reason::IdleTime)));
        }
    }

    // ---------------------------------------------------------------- the background thread

    /// Starts the background thread if the options ask for it.
    pub(crate) fn start_background(self: &Arc<Self>, options: &HostMemoryOptions) -> Result<()> {
        if let Some(idle_time) = options.background_time()? {
            let pool = Arc::downgrade(self);
            let _ = self.background.set(Background::start(pool, idle_time, self.generation)?);
        }
        Ok(())
    }

    /// Ends the background thread, and waits for its end unless the process is exiting.
    pub(crate) fn stop_background(&self) {
        if let Some(background) = self.background.get() {
            background.stop(!self.services.backend.is_exiting());
        }
    }

    /// Releases memory that was idle for the set time, in the background thread. Returns false if the process is exiting.
    pub(super) fn release_idle(&self, is_stopping: impl Fn() -> bool) -> bool {
        let may_call = || self.services.check("pinned").is_ok();
        let is_enough = || is_stopping() || !may_call();
        // Without a later request, no other code collects the waiting blocks.
        let release = |pool: &Self| {
            pool.cache.collect(|completion| self.services.is_surely_passed(completion), usize::MAX, is_enough);
            pool.cache.release_old(is_enough, |leaving| drop(pool.free(leaving, Reason::IdleTime)));
        };
        release(self);
        self.others().for_each(|other| release(&other));
        may_call()
    }

    // ---------------------------------------------------------------- requests

    /// Returns a block of page-locked memory of at least `bytes`.
    #[inline(never)]
    pub(crate) fn take(&self, bytes: usize) -> Result<OwnedBlock> {
        let request = self.request(bytes, Borders::Allowed)?;
        let size = request.size();
        let found = with_mine(self.id, |mine| {
            // SAFETY: In the thread that owns the cache, and `find` accesses no thread cache.
            unsafe { mine?.cached.own(|cached| cached.find(size, bytes)) }
        });
        match found {
            Some(block) => Ok(block),
            None => self.take_slow(request),
        }
    }

    /// As [`PinnedPool::take`], for a block in one registration.
    pub(crate) fn take_undivided(&self, bytes: usize) -> Result<OwnedBlock> {
        let request = self.request(bytes, Borders::None)?;
        let most = self.memory.most_undivided_bytes();
        if bytes > most {
            let message = format!("{bytes} bytes were requested in one registration, and one has at most {most} bytes");
            return Err(Error::new(ErrorKind::InvalidArgument, "pinned", message).with_hint(
                "request fewer bytes, or use `Runtime::pinned` and copy each of `PinnedBuffer::registrations`",
            ));
        }
        self.take_slow(request)
    }

    #[inline]
    fn request(&self, bytes: usize, borders: Borders) -> Result<Request> {
        // A block of the cache needs no driver, so only the slow path checks whether the driver is shutting down.
        if !self.generation.is_current() {
            return Err(Generation::error("pinned"));
        }
        let pages = bytes.max(1).div_ceil(PAGE);
        if pages >= MOST_PAGES {
            return Err(too_large(bytes));
        }
        Ok(Request { pages: pages as u32, bytes, borders })
    }

    #[cold]
    fn take_slow(&self, request: Request) -> Result<OwnedBlock> {
        let block = self.find_or_make(request)?;
        if let Some(poison) = &self.poison
            && let Err(error) = self.check_poison(poison, &block)
        {
            block.uses.unmarked.store(true, Ordering::Relaxed);
            // SAFETY: As the end of a buffer, which the caller did not get. The runtime is borrowed, so the pool lives on.
            unsafe { Self::give_back(self.reference(), block) };
            return Err(error);
        }
        if let Some(recorder) = &self.recorder {
            recorder.allocated(&block);
        }
        Ok(block)
    }

    /// Returns whether uses of blocks are noted, for a trace or for the check of the pool's own record.
    pub(crate) fn watches_uses(&self) -> bool {
        self.poison.is_some() || self.recorder.is_some()
    }

    fn check_poison(&self, poison: &Poison, block: &Block) -> Result<()> {
        let is_passed = (!in_capture()).then_some(|completion: &_| self.services.is_surely_passed(completion));
        poison.check(block.ptr, block.bytes(), is_passed)
    }

    /// Notes that a stream uses a block up to a completion event, for the trace and for the check of the pool's own record.
    pub(crate) fn watch_use(&self, block: &Block, completion: &Arc<CompletionEvent>) {
        if let Some(poison) = &self.poison {
            poison.note(block.ptr, block.bytes(), completion);
        }
        if let Some(recorder) = &self.recorder {
            recorder.used(block);
        }
    }

    fn find_or_make(&self, request: Request) -> Result<OwnedBlock> {
        let (size, Request { bytes, borders, .. }) = (request.size(), request);
        self.services.check("pinned")?;
        if let Some(cap) = self.cap_bytes.filter(|cap| bytes as u64 > *cap) {
            let message = format!(
                "a request of {} of page-locked memory exceeds the cap of {}",
                counted(bytes, "byte"),
                counted(cap, "byte")
            );
            return Err(Error::new(ErrorKind::InvalidArgument, "pinned", message)
                .with_hint("request fewer bytes, or raise the cap"));
        }
        let own = enlist(&self.cache);
        let mut ahead = 0;
        if let Some(own) = &own {
            let inbox = own.take_inbox();
            let is_from_inbox = !inbox.is_empty();
            // SAFETY: In the thread that owns the cache, and the closure accesses no thread cache.
            let (surplus, found) = unsafe {
                own.cached.own(|cached| {
                    let mut surplus: Vec<_> = inbox.into_iter().filter_map(|block| cached.keep(block)).collect();
                    let found = match borders {
                        Borders::Allowed => cached.find(size, bytes),
                        Borders::None => cached.find_undivided(size, bytes),
                    };
                    if found.is_some() {
                        cached.counts.inbox_hits += u64::from(is_from_inbox);
                    } else {
                        let (mut replaced, count) = cached.note_miss(size);
                        surplus.append(&mut replaced);
                        ahead = count;
                    }
                    (surplus, found)
                })
            };
            if !surplus.is_empty() {
                self.cache.put_back(surplus, 0);
                // The thread keeps what the cap allowed it.
                if self.cache.exceeds_cap() {
                    self.keep_to_cap();
                }
            }
            if let Some(block) = found.or_else(|| self.take_waited(own, request)) {
                return Ok(block);
            }
        }
        // A thread that needs no turn for the lock takes nothing ahead: memory that is merged serves more requests.
        let takes_ahead = ahead > 0 && self.id != NO_CACHE && self.cache.is_in_use();
        let block = self.take_shared(request, own.as_ref())?;
        count(&self.cache, own.as_deref(), 1);
        if let Some(own) = own.filter(|_| takes_ahead) {
            let blocks = self.cache.take_ahead(request, ahead, &own);
            let keep = |cached: &mut Cached| blocks.into_iter().filter_map(|block| cached.keep(block)).collect();
            // SAFETY: In the thread that owns the cache, and the closure accesses no thread cache.
            let surplus: Vec<_> = unsafe { own.cached.own(keep) };
            if !surplus.is_empty() {
                self.cache.put_back(surplus, 0);
            }
        }
        Ok(block)
    }

    /// Returns the block that has waited longest in the calling thread's cache, if its streams are done.
    fn take_waited(&self, own: &ThreadCache, request: Request) -> Option<OwnedBlock> {
        // SAFETY: In the thread that owns the cache, and the closure accesses no thread cache.
        let block = unsafe { own.cached.own(|cached| cached.pop_waiting(request.size())) }?;
        // To close an open batch costs a query or a record. Before the pool grows, it is closed for all blocks that it covers.
        let is_over = !block.uses.joined_open_batch()
            && block.uses.are_over(|completion| self.services.is_surely_passed(completion));
        if is_over && self.poison.is_some() {
            // SAFETY: Its streams are done, and it is in no list.
            unsafe { fill(block.ptr, block.bytes()) };
        }
        let is_usable = is_over && (request.borders == Borders::Allowed || block.is_undivided());
        let keep = |cached: &mut Cached| {
            if !is_usable {
                return (None, if is_over { cached.keep(block) } else { cached.put_back_waiting(block) });
            }
            cached.counts.live += 1;
            cached.counts.waited_hits += 1;
            block.begin_life(request.bytes);
            (Some(block), None)
        };
        // SAFETY: As above.
        let (taken, surplus) = unsafe { own.cached.own(keep) };
        if surplus.is_some() {
            self.cache.put_back(surplus.into_iter().collect(), 0);
        }
        taken
    }

    /// Puts the blocks that wait in the calling thread's cache back into the pool if their streams are done. Queries each stream
    /// once. Returns whether there were any; `None` if too few blocks wait.
    fn put_back_waited(&self, own: &ThreadCache, request: Request) -> Option<bool> {
        // SAFETY: In the thread that owns the cache, and the closure accesses no thread cache.
        let waiting = unsafe { own.cached.own(|cached| cached.take_waiting(request.size())) }?;
        // The first event of each stream that is not passed. No later one of the stream is.
        let behind: RefCell<Vec<Point>> = RefCell::default();
        let is_passed = |completion: &CompletionEvent| {
            let point = completion.point();
            let is_later = |first: &Point| first.stream == point.stream && first.number <= point.number;
            if behind.borrow().iter().any(is_later) {
                return false;
            }
            let is_passed = self.services.is_surely_passed(completion);
            behind.borrow_mut().extend((!is_passed).then_some(point));
            is_passed
        };
        let is_over = |block: &OwnedBlock| block.uses.are_over(is_passed);
        let (over, rest): (Vec<_>, Vec<_>) = waiting.into_iter().partition(is_over);
        // SAFETY: As above.
        let surplus = unsafe {
            own.cached.own(|cached| rest.into_iter().filter_map(|block| cached.keep_waiting(block)).collect())
        };
        if self.poison.is_some() {
            // SAFETY: Their streams are done, and they are in no list.
            over.iter().for_each(|block| unsafe { fill(block.ptr, block.bytes()) });
        }
        let any = !over.is_empty();
        self.cache.put_back(over, 0);
        self.cache.put_back(surplus, 0);
        Some(any)
    }

    /// Makes a block. Tries the cheapest way first: for a thread whose streams are behind, a growth of a small pool. To take the
    /// blocks of other threads, which are behind too, would take longer at every request.
    fn take_shared(&self, request: Request, home: Option<&Arc<ThreadCache>>) -> Result<OwnedBlock> {
        let look = |found| self.cache.take_found(found, request, home);
        if let Some(block) = look(Found::Free) {
            return Ok(block);
        }
        if self.cache.held_bytes() < MOST_AHEAD
            && !in_capture()
            && let Some(any_done) = home.and_then(|own| self.put_back_waited(own, request))
        {
            let block = if any_done { look(Found::Waiting) } else { self.grow(request, home).ok() };
            if let Some(block) = block {
                return Ok(block);
            }
        }
        if let Some(block) = self.collect_until(|| look(Found::Waiting)) {
            return Ok(block);
        }
        let has_waiting = self.cache.empty_thread_caches();
        if let Some(block) = look(Found::ThreadCaches) {
            return Ok(block);
        }
        if has_waiting && let Some(block) = self.collect_until(|| look(Found::Waiting)) {
            return Ok(block);
        }
        // While this thread held blocks, other threads may have seen less idle memory than there is.
        self.trim_in_passing();
        match self.grow(request, home) {
            Err(error) if error.kind() == ErrorKind::OutOfMemory && !in_capture() => {
                let round = self.active_trims.begin();
                // A refused release is counted, and the allocation retries with the memory that the others freed.
                if let Err(error) = self.trim_all() {
                    tracing::debug!("not everything could be given back: {error}");
                }
                drop(round);
                self.active_trims.wait();
                look(Found::Free).map_or_else(|| self.grow(request, home), Ok)
            }
            result => result,
        }
    }

    /// Collects the waiting blocks whose streams are done, until `look` finds a block.
    fn collect_until(&self, look: impl Fn() -> Option<OwnedBlock>) -> Option<OwnedBlock> {
        let is_passed = |completion: &CompletionEvent| self.services.is_surely_passed(completion);
        let mut found = None;
        // Work of other threads is queried only if that of this thread frees too little.
        self.cache.collect_stream(last_used_stream(), is_passed, || {
            found = look();
            found.is_some()
        });
        if found.is_none() {
            self.cache.collect(is_passed, usize::MAX, || {
                found = look();
                found.is_some()
            });
        }
        found
    }

    /// Grows the pool for a request, once no other thread does.
    fn grow(&self, request: Request, home: Option<&Arc<ThreadCache>>) -> Result<OwnedBlock> {
        let turn = match self.cache.begin_growth(request, home) {
            Ok(block) => return Ok(block),
            Err(turn) => turn,
        };
        loop {
            self.check_room(request)?;
            if let Some(block) = self.cache.take(request, home) {
                return Ok(block);
            }
            let plan = self.cache.plan_growth(request, &turn).ok_or_else(|| too_large(request.bytes))?;
            let growth = self.memory.grow(&plan);
            let block = self.cache.add(&growth, &plan, request, home);
            match (block, growth.refused) {
                (Some(block), _) => return Ok(block),
                (None, Some(error)) => {
                    self.release_failed(&growth.pieces);
                    return Err(error);
                }
                // Another thread has taken or released the free memory that the plan counted on.
                (None, None) => {}
            }
        }
    }

    /// Releases the pieces of a growth that failed, so that it leaves no memory behind. In a capture they stay in the pool.
    fn release_failed(&self, pieces: &[Piece]) {
        if !in_capture() {
            for leaving in pieces.iter().rev().filter_map(|piece| self.cache.take_piece_at(piece.ptr)) {
                // A refusal is counted, and the piece stays in the pool.
                let _ = self.free(leaving, Reason::FailedGrowth);
            }
        }
    }

    /// Checks that the cap and the machine have enough memory left for a growth. If memory is scarce, releases idle memory first.
    fn check_room(&self, request: Request) -> Result<()> {
        self.check_room_for(|| self.cache.shortfall(request))
    }

    /// As [`PinnedPool::check_room`], for a growth by `shortfall`.
    fn check_room_for(&self, shortfall: impl Fn() -> usize) -> Result<()> {
        let budget = Budget::of_process();
        // A trim may release the free memory that the growth would continue, so it is measured again.
        let room = || {
            let (shortfall, held) = (shortfall(), self.cache.held_bytes() + self.files.made_bytes());
            if self.memory.has_reserved(shortfall) {
                return budget.room_below_cap(shortfall as u64, held, self.cap_bytes);
            }
            budget.room(shortfall as u64, held, self.cap_bytes)
        };
        if !room().is_ok_and(|room| !room.release_idle_first) && !in_capture() {
            // A refused release is counted.
            if let Err(error) = self.trim_all() {
                tracing::debug!("not everything could be given back: {error}");
            }
        }
        room().map(drop).map_err(|shortage| budget.out_of_memory("pinned", &shortage))
    }

    // ---------------------------------------------------------------- files

    /// Makes a file of zeros of at least the requested size, mapped and registered as the memory of this pool is.
    pub(crate) fn make_file(&self, bytes: usize) -> Result<(FileMemory, OwnedFd)> {
        self.check_room_for(|| bytes)?;
        self.memory.make_file(bytes).map_err(|refused| self.keep_left(refused))
    }

    fn keep_left(&self, NotMapped { error, left }: NotMapped) -> Error {
        if let Some(left) = left {
            self.services.count_failed_release(&error);
            self.files.keep_refused(left);
        }
        error
    }

    // ---------------------------------------------------------------- releases

    /// Takes the block of a buffer back. The buffer counts as live until this returns.
    ///
    /// # Safety
    /// The caller must be the end of the buffer that owned the block, and must not use the pool afterward.
    #[inline(always)]
    pub(crate) unsafe fn give_back(pool: PoolRef, block: OwnedBlock) {
        // In the caller, because the exchange inside waits for all earlier stores: those that save registers come after it.
        let is_free = block.uses.end_life();
        Self::give_back_ended(pool, block, is_free);
    }

    /// Takes back the block of a buffer whose life has ended.
    #[inline(never)]
    fn give_back_ended(pool: PoolRef, block: OwnedBlock, is_free: bool) {
        // A pool that sends every drop to the slow path has blocks with homes, too.
        if !is_free || pool.get().id == NO_CACHE {
            return Self::give_back_elsewhere(pool, block, is_free);
        }
        match keep_at_home(block) {
            AtHome::Kept => {}
            AtHome::KeptWhileClosing(cache) => end_if_last(&cache),
            AtHome::Left(block) => Self::give_back_elsewhere(pool, block, is_free),
        }
    }

    /// Takes a block back that the cache which it returns to did not keep.
    #[inline(never)]
    fn give_back_elsewhere(pool: PoolRef, block: OwnedBlock, is_free: bool) {
        let mut block = Some(block);
        let id = pool.get().id;
        let closing = with_mine(id, |mine| {
            let mine = mine?;
            let dropped = block.take_if(|block| is_free || block.uses.waits_for_streams())?;
            if dropped.home.as_deref().is_none_or(|home| !std::ptr::eq(home, mine)) {
                // The block may be gone once it is sent, and with it the last other reference to its home.
                block = match dropped.home.clone().filter(|_| is_free && !mine.cache.has_cap()) {
                    Some(home) => home.send(dropped),
                    None => Some(dropped),
                };
                let is_closing = block.is_none() && count(&mine.cache, Some(mine), -1);
                return is_closing.then(|| Arc::clone(&mine.cache));
            }
            // SAFETY: In the thread that owns the cache, and the closure accesses no thread cache.
            let is_closing = unsafe {
                mine.cached.own(|cached| {
                    block = if is_free { cached.keep(dropped) } else { cached.keep_waiting(dropped) };
                    if block.is_none() {
                        cached.counts.live -= 1;
                    }
                    cached.closing
                })
            };
            // The pool may be gone now, but not this.
            (is_closing && block.is_none()).then(|| Arc::clone(&mine.cache))
        });
        if let Some(cache) = closing {
            end_if_last(&cache);
        }
        if let Some(block) = block {
            give_back_slow(pool, block, is_free);
        }
    }

    /// Releases a block that a capture, a graph or a note by address has kept.
    pub(crate) fn let_go(&self, kept: KeptBlock) {
        if self.cache.let_go(kept) {
            self.keep_to_cap();
        }
    }

    /// Leaves the runtime to the live buffers, if there are any. The last of them ends it.
    pub(crate) fn leave_to_buffers(&self, runtime: Arc<dyn Any + Send + Sync>) {
        let unneeded = self.cache.registry.lock().leave(runtime);
        unneeded.into_iter().for_each(|runtime| let_go(runtime));
    }

    /// Returns the number of live buffers.
    pub(crate) fn live_buffers(&self) -> u64 {
        self.cache.registry.lock().counts().live as u64
    }

    /// Frees memory until the cap is met. In a capture, frees nothing; the end of the capture does it later.
    #[cold]
    #[inline(never)]
    fn keep_to_cap(&self) {
        if in_capture() || self.services.backend.is_exiting() {
            return;
        }
        let keep = |pool: &Self| {
            let free = |leaving| pool.free(leaving, Reason::IdleCap).0;
            pool.cache.keep_to_cap(|completion| self.services.is_surely_passed(completion), free);
        };
        keep(self);
        if self.cache.exceeds_cap() {
            self.others().for_each(|other| keep(&other));
        }
    }

    /// Refuses a block whose end of use is unknown.
    pub(crate) fn check_known(uses: &BlockUses) -> Result<()> {
        if uses.unmarked.load(Ordering::Relaxed) {
            return Err(Error::new(
                ErrorKind::InvalidState,
                "pinned",
                "an earlier copy failed in a way that leaves unknown whether the device still uses this memory",
            )
            .with_hint("drop the buffer and allocate a new one"));
        }
        Ok(())
    }

    /// Waits until no stream uses the block; with `writes_only`, until none writes it.
    pub(crate) fn wait_for_uses(&self, block: &Block, writes_only: bool) -> Result<()> {
        self.check_access(block)?;
        if block.uses.is_recorded(!writes_only) {
            return Err(Error::new(
                ErrorKind::InvalidState,
                "pinned",
                "a graph has recorded this memory, and its launches could race with a slice of the values",
            )
            .with_hint("use `read_with` or `write_with`, or drop the graph first"));
        }
        self.wait_for_completions(block, block.uses.completions(writes_only))
    }

    /// Returns the completion events of the streams that use the block, for a wait that blocks no thread.
    pub(crate) fn uses_of(&self, block: &Block) -> Result<Vec<Arc<CompletionEvent>>> {
        self.check_access(block)?;
        let completions = block.uses.completions(false);
        if completions.iter().any(|completion| !completion.progress().is_closed()) {
            block.uses.set_awaited();
        }
        Ok(completions)
    }

    pub(crate) fn services(&self) -> &Arc<Services> {
        &self.services
    }

    fn check_access(&self, block: &Block) -> Result<()> {
        self.services.check("pinned")?;
        Self::check_known(&block.uses)?;
        if block.uses.is_recording() {
            return Err(Error::new(
                ErrorKind::Capture,
                "pinned",
                "an open capture uses this memory: its recorded work is not executed",
            )
            .with_hint("read and write before the capture, or between launches of the graph; the capture goes on"));
        }
        Ok(())
    }

    fn wait_for_completions(&self, block: &Block, completions: Vec<Arc<CompletionEvent>>) -> Result<()> {
        for completion in completions {
            if !completion.progress().is_closed() {
                block.uses.set_awaited();
            }
            self.services.is_passed(&completion, true)?;
            block.uses.forget(&completion);
        }
        Ok(())
    }

    /// Records the completion events that an operation must wait for, where their batches are open, and returns those that are
    /// not passed. The caller must hold no submission lock.
    pub(crate) fn record_racing<'b>(
        block: &Block,
        begun: &'b BegunUse<'_>,
    ) -> Result<impl Iterator<Item = &'b Arc<CompletionEvent>> + use<'b>> {
        for completion in begun.racing.iter().filter(|completion| !completion.progress().is_closed()) {
            block.uses.set_awaited();
            completion.ensure_recorded(true)?;
        }
        Ok(begun.racing.iter().filter(|completion| !completion.progress().is_passed()))
    }

    /// Begins access by the CPU, once the streams that use the block are done. Launches of graphs that conflict with it are
    /// refused.
    pub(crate) fn access<'b>(&self, block: &'b Block, writes: bool) -> Result<CpuAccess<'b>> {
        self.check_access(block)?;
        loop {
            match block.uses.begin_cpu(writes, self.generation) {
                // Work that was being enqueued when the access began may have failed since.
                Ok(access) => return Self::check_known(&block.uses).map(|()| access),
                Err(completions) => self.wait_for_completions(block, completions)?,
            }
        }
    }

    /// Notes that the CPU accesses a block now, for the observer of the backend.
    #[inline]
    pub(crate) fn note_access(&self, ptr: HostPtr, bytes: usize, writes: bool) {
        self.services.note_access(ptr, bytes, writes);
    }

    /// Frees the unused memory of all pools of the runtime, because memory is scarce.
    fn trim_all(&self) -> Result<()> {
        let trim = |pool: &Self| pool.trim_for(Reason::Exhaustion);
        self.others().fold(trim(self), |result, other| result.and(trim(&other)))
    }

    /// Frees the page-locked memory that no buffer, graph or stream uses.
    pub(crate) fn trim(&self) -> Result<()> {
        self.trim_for(Reason::Trim)
    }

    fn trim_for(&self, reason: Reason) -> Result<()> {
        // First, because pieces that become remnants below have just been tried.
        let mut result = self.release_remnants();
        self.cache.empty_thread_caches();
        self.cache.collect(|completion| self.services.is_surely_passed(completion), usize::MAX, || false);
        let mut below = u32::MAX;
        while let Some(leaving) = self.cache.take_piece(&mut below) {
            let (_, freed) = self.free(leaving, reason);
            result = std::mem::replace(&mut result, Ok(())).and(freed);
        }
        result
    }

    /// Releases a piece that was taken out of the pool. Returns whether it is gone, and the backend's refusal, which is
    /// counted.
    fn free(&self, leaving: Leaving, reason: Reason) -> (bool, Result<()>) {
        // SAFETY: The piece came from this memory. All of it was free, and it was taken out, so no code and no stream uses it.
        let (is_gone, refused) = match unsafe { self.memory.release(leaving.piece) } {
            Freed::Whole => {
                self.cache.has_left(leaving, false, reason);
                (true, Ok(()))
            }
            Freed::InPart(error) => {
                self.cache.has_left(leaving, true, reason);
                (true, Err(error))
            }
            Freed::Refused(error) => {
                self.cache.stays(leaving);
                (false, Err(error))
            }
        };
        (is_gone, self.services.note(refused))
    }

    /// Retries the remnants. Returns the first refusal.
    fn release_remnants(&self) -> Result<()> {
        let mut result = Ok(());
        for leaving in self.cache.take_remnants() {
            // SAFETY: A remnant: nothing is placed there until it has left.
            let released = unsafe { self.memory.release_remnant(leaving.piece) };
            if released.is_ok() {
                self.cache.remnant_has_left(leaving);
            }
            result = result.and(self.services.note(released));
        }
        result
    }

    /// Removes uses of a block that are over, so that a buffer that outlives many streams does not keep an event for each.
    #[cold]
    pub(crate) fn forget_passed(&self, uses: &BlockUses) {
        if !in_capture() {
            // Not worth a record: a use of an open batch is recent.
            uses.forget_passed(|completion| {
                completion.progress().is_closed() && self.services.is_surely_passed(completion)
            });
        }
    }

    /// Frees all memory, at the end of the runtime.
    ///
    /// # Safety
    /// The devices must have executed everything, and no buffer may own a block.
    pub(crate) unsafe fn free_all(&self) -> Result<()> {
        // Every test with a runtime checks the laws here.
        if cfg!(debug_assertions) && !std::thread::panicking() {
            let statistics = self.statistics();
            assert_eq!(statistics.broken_law(), None, "a law of the pool does not hold: {statistics:?}");
        }
        self.poison.iter().for_each(Poison::clear);
        self.recorder.iter().for_each(|recorder| recorder.flush());
        self.cache.merge_all();
        let mut below = u32::MAX;
        let pieces: Vec<_> = std::iter::from_fn(|| self.cache.take_piece(&mut below)).collect();
        let mut in_part = Ok(());
        let mut result = twice(pieces, |leaving| {
            let (is_gone, freed) = self.free(*leaving, Reason::End);
            if is_gone {
                // The rest of it is a remnant, which is released below.
                in_part = std::mem::replace(&mut in_part, Ok(())).and(freed);
                return Ok(());
            }
            // Taken out again: the second attempt is for this piece.
            self.cache.take_again(leaving);
            freed
        });
        result = result.and(in_part).and(self.release_remnants());
        if result.is_ok() {
            // SAFETY: Every piece is gone, and no code uses one.
            unsafe { self.memory.end_reservations() };
        }
        result
    }
}

impl MapsFiles for PinnedPool {
    fn map_file(&self, file: BorrowedFd<'_>, bytes: usize, read_only: bool) -> Result<FileMemory> {
        if !self.registers() {
            return Err(Error::lacks("open_pinned", "host_register"));
        }
        self.memory.map_file(file, bytes, read_only).map_err(|refused| self.keep_left(refused))
    }
}

/// Counts a buffer in the calling thread's cache, or in the registry if the thread is ending. Returns whether the thread must
/// check for the end of the runtime.
fn count(cache: &HostCache, own: Option<&ThreadCache>, change: i64) -> bool {
    match own {
        Some(own) => {
            let count = |cached: &mut Cached| {
                cached.counts.live += change;
                cached.closing
            };
            // SAFETY: In the thread that owns the cache, and the closure accesses no thread cache.
            unsafe { own.cached.own(count) }
        }
        None => {
            let mut registry = cache.registry.lock();
            registry.departed.live += change;
            registry.is_closing()
        }
    }
}

/// A buffer of device memory, counted like one of page-locked memory. Keeps the runtime alive without a shared count.
#[derive(Debug)]
pub(crate) struct Liveness(PoolRef);

impl Liveness {
    /// Counts a buffer of the runtime whose first pool this is.
    #[inline]
    pub(crate) fn new(pool: &PinnedPool) -> Self {
        if Self::count(pool, 1).is_none() {
            count_on_device(&pool.cache, 1);
        }
        Self(pool.reference())
    }

    /// Counts in the calling thread's cache. Returns whether the thread must check for the end of the runtime, or `None` if the
    /// thread has no cache.
    #[inline]
    fn count(pool: &PinnedPool, change: i64) -> Option<Option<Arc<HostCache>>> {
        with_mine(pool.id, |mine| {
            let mine = mine?;
            // SAFETY: In the thread that owns the cache, and the closure accesses no thread cache.
            let is_closing = unsafe {
                mine.cached.own(|cached| {
                    cached.counts.live += change;
                    cached.counts.live_on_devices += change;
                    cached.closing
                })
            };
            // The pool may be gone now, but not this.
            Some(is_closing.then(|| Arc::clone(&mine.cache)))
        })
    }
}

impl Drop for Liveness {
    #[inline]
    fn drop(&mut self) {
        let pool = self.0.get();
        if !pool.generation.is_current() {
            return;
        }
        let closing = match Self::count(pool, -1) {
            Some(closing) => closing,
            None => {
                // Once the buffer is counted as dropped, the pool may be gone, but not this.
                let cache = Arc::clone(&pool.cache);
                count_on_device(&cache, -1).then_some(cache)
            }
        };
        if let Some(cache) = closing {
            end_if_last(&cache);
        }
    }
}

/// Counts a buffer of device memory in a thread that has not used the pool yet, or is ending. Returns whether the thread must check
/// for the end of the runtime.
#[cold]
fn count_on_device(cache: &Arc<HostCache>, change: i64) -> bool {
    let add = |counts: &mut Counts| {
        counts.live += change;
        counts.live_on_devices += change;
    };
    match enlist(cache) {
        // SAFETY: In the thread that owns the cache, and the closure accesses no thread cache.
        Some(own) => unsafe {
            own.cached.own(|cached| {
                add(&mut cached.counts);
                cached.closing
            })
        },
        None => {
            let mut registry = cache.registry.lock();
            add(&mut registry.departed);
            registry.is_closing()
        }
    }
}

/// Takes a block back that the thread cache did not keep.
#[cold]
#[inline(never)]
fn give_back_slow(pool: PoolRef, block: OwnedBlock, is_free: bool) {
    // Once the buffer is counted as dropped, the pool may be gone, but not this.
    let cache = Arc::clone(&pool.get().cache);
    let own = enlist(&cache);
    pool.get().file(block, own.as_ref(), is_free);
    if count(&cache, own.as_deref(), -1) {
        end_if_last(&cache);
    }
}

/// Ends the runtime if it was left to the buffers and none is alive.
#[cold]
fn end_if_last(cache: &HostCache) {
    let last = cache.registry.lock().take_if_last();
    last.into_iter().for_each(|runtime| let_go(runtime));
}

impl PinnedPool {
    /// Sends a free block home, keeps it in the calling thread's cache with more allowance, or files it in the pool.
    fn file(&self, block: OwnedBlock, own: Option<&Arc<ThreadCache>>, is_free: bool) {
        if let Some(recorder) = &self.recorder {
            recorder.freed(&block);
        }
        let mut block = Some(block);
        if is_free {
            let home = block.as_ref().and_then(|block| block.home.clone());
            let is_own = |home: &Arc<ThreadCache>| own.is_some_and(|own| Arc::ptr_eq(own, home));
            if let (Some(_), Some(block)) = (&self.poison, &block) {
                // SAFETY: No buffer, no graph and no stream uses it.
                unsafe { fill(block.ptr, block.bytes()) };
            }
            block = match (home, self.cache.has_cap()) {
                // The cache has not been tried yet.
                (Some(home), false) if is_own(&home) && self.id == NO_CACHE => {
                    // SAFETY: In the thread that owns the cache, and the closure accesses no thread cache.
                    block.and_then(|block| unsafe { home.cached.own(|cached| cached.keep(block)) })
                }
                (Some(home), false) if !is_own(&home) => block.and_then(|block| home.send(block)),
                (Some(home), true) if is_own(&home) => block.and_then(|block| self.keep_with_allowance(&home, block)),
                _ => block,
            };
        } else if let Some(own) = own
            && let Some(waiting) = block.take_if(|block| {
                block.home.as_ref().is_some_and(|home| Arc::ptr_eq(home, own)) && block.uses.waits_for_streams()
            })
        {
            // SAFETY: In the thread that owns the cache, and the closure accesses no thread cache.
            block = unsafe { own.cached.own(|cached| cached.keep_waiting(waiting)) };
        }
        if let Some(block) = block
            && self.cache.give_back(block)
        {
            self.keep_to_cap();
        }
    }

    /// Keeps a block in the calling thread's cache, if the cap grants it.
    fn keep_with_allowance(&self, own: &ThreadCache, block: OwnedBlock) -> Option<OwnedBlock> {
        let bytes = block.bytes() as u64;
        if !self.cache.grant(bytes) {
            return Some(block);
        }
        // SAFETY: In the thread that owns the cache, and the closure accesses no thread cache.
        let returned = unsafe {
            own.cached.own(|cached| {
                cached.allowance += bytes;
                let returned = cached.keep(block);
                if returned.is_some() {
                    cached.allowance -= bytes;
                }
                returned
            })
        };
        if returned.is_some() {
            self.cache.put_back(Vec::new(), bytes);
        }
        returned
    }
}

fn too_large(bytes: usize) -> Error {
    Error::new(ErrorKind::OutOfMemory, "pinned", format!("no machine has {bytes} bytes of memory"))
}

#[cfg(test)]
impl PinnedPool {
    /// Collects every waiting block as if its streams were done.
    pub(crate) fn collect_too_early(&self) {
        self.cache.collect(|_| true, usize::MAX, || false);
    }

    pub(crate) fn hold_locks(&self) -> impl Drop + '_ {
        crate::testing::Held((self.cache.hold_locks(), self.active_trims.hold_lock()))
    }

    pub(crate) fn is_locked(&self) -> bool {
        self.cache.is_locked() || self.active_trims.is_locked()
    }
}
