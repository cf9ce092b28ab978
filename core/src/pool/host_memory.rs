//! The blocks of the host cache: small ones from the backend's `allocate`, large ones from the system, registered with the
//! backend in pieces.
//!
//! A vendor's allocation faults its pages in on one thread inside the driver, and blocks the GPU calls of other threads during
//! that time. On an H200, 1 GiB took 386 ms, and other threads were blocked for 577 ms. So this module creates large blocks
//! itself. It maps memory, requests huge pages, and touches the pages with several threads at once. The caller registers it
//! piece by piece while later pieces are still being touched. That blocks other threads for one piece at a time, a few
//! milliseconds. The touching threads have the affinity and the memory policy of the caller, so `numactl` decides where the
//! pages are.
//!
//! *Pieces.* Their size is the backend's capability `register_piece_bytes`, rounded to whole huge pages. The last piece of a
//! block ends with the block. A copy must not cross from one registration into another, so copies are split at the borders
//! ([`PinnedBlock::cut`](super::host::PinnedBlock::cut)).
//!
//! *Refusals.* Registered memory must not be unmapped: the device would continue to use pages that belong to other owners.
//! Pieces are unregistered from the last to the first, and the first refusal stops that. If no piece could be unregistered, the
//! block is unchanged. A block that is unregistered in part is unusable. It is a *remnant*: each trim and the end of the
//! runtime retry it. Otherwise it stays mapped to the end of the process.
//!
//! *Forks.* A child must not share pages that a device writes. The process that first wrote to such a page would get a copy. If
//! that were the parent, the device and the parent would no longer see the same page. So children do not inherit the mapping
//! (`MADV_DONTFORK`). Vendors do the same for their own allocations, and it also saves copying the page tables. In a child the
//! addresses are not mapped. Objects of the parent are refused there before they access memory.
//!
//! No lock is held during a call of the backend.

use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::system_memory;
use highwater_hal::{Capabilities, Error, ErrorKind, HostAllocator, HostOptions, HostPtr, Result};

const OPERATION: &str = "pinned";

/// The page size that the kernel uses for a mapping if it can, and the alignment of mappings.
const HUGE_PAGE: usize = 2 << 20;
/// The smallest page size of any machine.
const PAGE: usize = 4 << 10;
/// The bytes that a thread touches at a time: about half a millisecond of work.
const GRAIN: usize = 2 * HUGE_PAGE;
/// Maximum number of threads that touch a block. At most three of four processors do: the others stay free for the registering
/// thread and for unrelated work. With all 16 processors of an H200 host, another thread's GPU calls took up to 22 ms, for lack
/// of a processor. With three of four it was 4.4 ms, the time of one piece, and the whole block was faster too.
const MOST_THREADS: usize = 16;
/// Blocks up to this fraction of a piece are allocated by the backend. Its allocation blocks other threads about eight times as
/// long as registering as many bytes does, so the largest of them is no worse than one piece.
const OWN_PART: usize = 8;

#[derive(Debug)]
pub(crate) struct HostMemory {
    allocator: Arc<dyn HostAllocator>,
    /// `None` if the backend allocates every block.
    piece_bytes: Option<NonZeroUsize>,
    remnants: Mutex<Vec<Mapped>>,
}

/// The result of freeing a block.
#[derive(Debug)]
#[must_use]
pub(crate) enum Freed {
    /// The block is gone.
    Whole,
    /// The block is unchanged.
    Refused(Error),
    /// The block is a remnant.
    InPart(Error),
}

/// A mapping whose first `registered` pieces are registered. Dropping it has no effect.
#[derive(Debug)]
struct Mapped {
    ptr: HostPtr,
    bytes: usize,
    piece_bytes: NonZeroUsize,
    registered: usize,
}

impl HostMemory {
    /// Registers blocks if every device can use them that way, in pieces that suit all devices.
    pub(crate) fn new<'c>(
        allocator: Arc<dyn HostAllocator>,
        devices: impl IntoIterator<Item = &'c Capabilities>,
    ) -> Self {
        let piece_of = |device: &Capabilities| if device.host_register { device.register_piece_bytes } else { 0 };
        let least = devices.into_iter().map(piece_of).min().and_then(NonZeroUsize::new);
        let whole_pages = |bytes: NonZeroUsize| NonZeroUsize::new(bytes.get().checked_next_multiple_of(HUGE_PAGE)?);
        Self { allocator, piece_bytes: least.and_then(whole_pages), remnants: Mutex::default() }
    }

    /// Returns the size of the pieces in which a block of `bytes` is registered. Returns `None` if the backend allocates it.
    fn piece_bytes_for(&self, bytes: usize) -> Option<NonZeroUsize> {
        self.piece_bytes.filter(|piece| bytes > (piece.get() / OWN_PART).max(HUGE_PAGE))
    }

    /// Creates a block. Returns its address and the size of its registered pieces. Calls `refused` for a release that the
    /// backend refused on the way.
    pub(crate) fn allocate(&self, bytes: usize, refused: impl Fn(&Error)) -> Result<(HostPtr, Option<NonZeroUsize>)> {
        let Some(piece_bytes) = self.piece_bytes_for(bytes) else {
            return Ok((self.allocator.allocate(bytes, &HostOptions::new())?, None));
        };
        if let Some(available) = system_memory::refuses(bytes) {
            let message = format!("{bytes} bytes were requested, the system has {available} available");
            return Err(Error::new(ErrorKind::OutOfMemory, OPERATION, message)
                .with_hint("drop buffers and trim, or raise the memory limit of the process's control group"));
        }
        let mut mapped = Mapped { ptr: map(bytes)?, bytes, piece_bytes, registered: 0 };
        if let Err(error) = mapped.touch_and_register(&*self.allocator) {
            // SAFETY: No other code knows the memory.
            if let Err(error) = unsafe { mapped.release(&*self.allocator) } {
                refused(&error);
                self.remnants.lock().push(mapped);
            }
            return Err(error);
        }
        Ok((mapped.ptr, Some(piece_bytes)))
    }

    /// Frees a block that [`HostMemory::allocate`] created, with the sizes that it returned.
    ///
    /// # Safety
    /// No code and no outstanding device work may use the block. It must be freed only once, unless the free was refused.
    pub(crate) unsafe fn free(&self, ptr: HostPtr, bytes: usize, piece_bytes: Option<NonZeroUsize>) -> Freed {
        let Some(piece_bytes) = piece_bytes else {
            // SAFETY: The block came from this allocator. The caller promises the rest.
            return unsafe { self.allocator.free(ptr) }.map_or_else(Freed::Refused, |()| Freed::Whole);
        };
        let pieces = bytes.div_ceil(piece_bytes.get());
        let mut mapped = Mapped { ptr, bytes, piece_bytes, registered: pieces };
        // SAFETY: The caller upholds the contract.
        match unsafe { mapped.release(&*self.allocator) } {
            Ok(()) => Freed::Whole,
            Err(error) if mapped.registered == pieces => Freed::Refused(error),
            Err(error) => {
                self.remnants.lock().push(mapped);
                Freed::InPart(error)
            }
        }
    }

    /// Retries the remnants; calls `refused` for each that stays one. Returns the first refusal.
    pub(crate) fn release_remnants(&self, refused: impl Fn(&Error)) -> Result<()> {
        let remnants = std::mem::take(&mut *self.remnants.lock());
        let mut result = Ok(());
        for mut mapped in remnants {
            // SAFETY: No code has a remnant, and no device work used it when it became one.
            if let Err(error) = unsafe { mapped.release(&*self.allocator) } {
                refused(&error);
                self.remnants.lock().push(mapped);
                result = result.and(Err(error));
            }
        }
        result
    }

    /// Returns the number of remnants, and their bytes.
    pub(crate) fn remnants(&self) -> (u64, u64) {
        let remnants = self.remnants.lock();
        (remnants.len() as u64, remnants.iter().map(|mapped| mapped.bytes as u64).sum())
    }
}

impl Mapped {
    fn pieces(&self) -> usize {
        self.bytes.div_ceil(self.piece_bytes.get())
    }

    /// Returns the start and the size of a piece.
    fn piece(&self, index: usize) -> (HostPtr, usize) {
        let offset = index * self.piece_bytes.get();
        (self.ptr.offset(offset), self.piece_bytes.get().min(self.bytes - offset))
    }

    /// Touches every page and registers every piece, at the same time.
    fn touch_and_register(&mut self, allocator: &dyn HostAllocator) -> Result<()> {
        let touching = Touching::new(self);
        thread::scope(|scope| {
            let processors = thread::available_parallelism().map_or(1, NonZeroUsize::get);
            let most = (processors * 3 / 4).clamp(1, MOST_THREADS);
            let spawn = || {
                let builder = thread::Builder::new().name("highwater-touch".to_owned()).stack_size(1 << 17);
                builder.spawn_scoped(scope, || touching.work())
            };
            // A thread that cannot be created is not needed.
            let started = (0..most.min(touching.grains)).map_while(|_| spawn().ok()).count();
            if started == 0 {
                touching.work();
            }
            // Even if the backend panics: the scope waits for the threads.
            let _stop = StopOnDrop(&touching);
            (0..self.pieces()).try_for_each(|index| {
                touching.wait_for(index);
                let (ptr, bytes) = self.piece(index);
                // SAFETY: The range is mapped, readable and writable, and is unmapped only once it is unregistered.
                let registered = unsafe { allocator.register(ptr, bytes, &HostOptions::new()) };
                registered.map_err(|error| self.not_registered(&error))?;
                self.registered += 1;
                Ok(())
            })
        })
    }

    /// Returns the error of the first piece that is not registered.
    fn not_registered(&self, error: &Error) -> Error {
        let message = format!(
            "{} bytes were mapped to be page-locked in {} pieces of {} bytes; registering piece {} failed: {}",
            self.bytes,
            self.pieces(),
            self.piece_bytes,
            self.registered + 1,
            error.message()
        );
        let told = Error::new(error.kind(), error.operation(), message).with_hint(error.hint());
        match error.code() {
            Some(code) => told.with_code(code),
            None => told,
        }
    }

    /// Unregisters and unmaps the memory. If that is refused, the rest can be retried.
    ///
    /// # Safety
    /// No code and no outstanding device work may use the memory.
    unsafe fn release(&mut self, allocator: &dyn HostAllocator) -> Result<()> {
        while self.registered > 0 {
            let (ptr, _) = self.piece(self.registered - 1);
            // SAFETY: Registered with this address. No device work uses it, as the caller promises.
            unsafe { allocator.unregister(ptr) }?;
            self.registered -= 1;
        }
        // SAFETY: `map` made the mapping with this length. The backend no longer knows it, and no code uses it, as the caller
        // promises.
        unsafe { unmap(self.ptr.as_ptr(), self.bytes) }
    }
}

/// A mapping that several threads touch at once, in grains that are assigned in the order of addresses, so that the first piece
/// is ready first.
#[derive(Debug)]
struct Touching {
    ptr: HostPtr,
    bytes: usize,
    piece_bytes: usize,
    grains_of_piece: usize,
    grains: usize,
    /// The next grain to assign. Relaxed: it orders nothing.
    next: AtomicUsize,
    /// Grains of each piece that are not yet touched.
    left: Mutex<Vec<usize>>,
    is_ready: Condvar,
}

impl Touching {
    fn new(mapped: &Mapped) -> Self {
        let piece_bytes = mapped.piece_bytes.get();
        let left: Vec<_> = (0..mapped.pieces()).map(|index| mapped.piece(index).1.div_ceil(GRAIN)).collect();
        Self {
            ptr: mapped.ptr,
            bytes: mapped.bytes,
            piece_bytes,
            grains_of_piece: piece_bytes.div_ceil(GRAIN),
            grains: left.iter().sum(),
            next: AtomicUsize::new(0),
            left: Mutex::new(left),
            is_ready: Condvar::new(),
        }
    }

    /// Touches grains until none is left.
    fn work(&self) {
        loop {
            let grain = self.next.fetch_add(1, Ordering::Relaxed);
            if grain >= self.grains {
                return;
            }
            // Only the last piece has fewer grains than the others.
            let (piece, of_piece) = (grain / self.grains_of_piece, grain % self.grains_of_piece);
            let start = piece * self.piece_bytes + of_piece * GRAIN;
            let end = self.bytes.min((piece + 1) * self.piece_bytes).min(start + GRAIN);
            for offset in (start..end).step_by(PAGE) {
                // SAFETY: Inside the mapping, which is writable, zeroed and lives until all threads are done. No other code
                // writes there: grains do not overlap, and the backend locks only pages whose grains are done.
                unsafe { self.ptr.as_ptr().add(offset).write_volatile(0) };
            }
            let mut left = self.left.lock();
            left[piece] -= 1;
            if left[piece] == 0 {
                self.is_ready.notify_one();
            }
        }
    }

    /// Waits until a piece is touched.
    fn wait_for(&self, piece: usize) {
        let mut left = self.left.lock();
        while left[piece] > 0 {
            self.is_ready.wait(&mut left);
        }
    }
}

/// Stops the threads from taking further grains.
struct StopOnDrop<'t>(&'t Touching);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.next.store(self.0.grains, Ordering::Relaxed);
    }
}

/// Maps zeroed memory that starts at a huge page and that children do not inherit.
fn map(bytes: usize) -> Result<HostPtr> {
    let failed = |what: &str, error: Errno| {
        let kind = match error {
            Errno::NOMEM | Errno::AGAIN => ErrorKind::OutOfMemory,
            _ => ErrorKind::OperatingSystem,
        };
        Error::new(kind, OPERATION, format!("{bytes} bytes to be page-locked could not be {what}: {error}"))
            .with_code(i64::from(error.raw_os_error()))
            .with_hint("free memory, or raise the limits of the process (`ulimit -v`, vm.max_map_count)")
    };
    // The kernel aligns to pages. One more huge page leaves space for a whole number of huge pages.
    let mapped_bytes = bytes.checked_add(HUGE_PAGE).ok_or_else(|| failed("mapped", Errno::NOMEM))?;
    // SAFETY: A new private mapping at an address that the kernel chooses.
    let mapped = unsafe {
        rustix::mm::mmap_anonymous(
            std::ptr::null_mut(),
            mapped_bytes,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE,
        )
    };
    let start = mapped.map_err(|error| failed("mapped", error))?.cast::<u8>();
    let head = start.addr().next_multiple_of(HUGE_PAGE) - start.addr();
    let ptr = start.wrapping_add(head);
    // The part that is still mapped, as offsets. No part is unmapped twice, because it may have another owner in the meantime.
    let mut left = 0..mapped_bytes;
    let mut prepare = || {
        if head < HUGE_PAGE {
            // SAFETY: The end of the mapping just made, behind the block; no code uses it.
            unsafe { rustix::mm::munmap(ptr.wrapping_add(bytes).cast(), HUGE_PAGE - head) }?;
            left.end = head + bytes;
        }
        if head > 0 {
            // SAFETY: The beginning of the mapping just made, before the block; no code uses it.
            unsafe { rustix::mm::munmap(start.cast(), head) }?;
            left.start = head;
        }
        // SAFETY: The block is inside the mapping just made; the advice changes no contents.
        unsafe { rustix::mm::madvise(ptr.cast(), bytes, Advice::LinuxDontFork) }
    };
    if let Err(error) = prepare() {
        // SAFETY: The rest of the mapping just made; no code uses it.
        if let Err(error) = unsafe { rustix::mm::munmap(start.wrapping_add(left.start).cast(), left.len()) } {
            tracing::warn!("{} bytes of address space stay mapped: {error}", left.len());
        }
        return Err(failed("prepared", error));
    }
    // SAFETY: As above. A kernel without huge pages refuses, which only costs speed.
    if let Err(error) = unsafe { rustix::mm::madvise(ptr.cast(), bytes, Advice::LinuxHugepage) } {
        tracing::debug!("no huge pages for page-locked memory: {error}");
    }
    NonNull::new(ptr).map(HostPtr::new).ok_or_else(|| failed("mapped", Errno::NOMEM))
}

/// # Safety
/// The range must be a mapping of [`map`] that no code uses.
unsafe fn unmap(start: *mut u8, bytes: usize) -> Result<()> {
    // SAFETY: The caller upholds the contract.
    unsafe { rustix::mm::munmap(start.cast(), bytes) }.map_err(|error| {
        Error::new(ErrorKind::OperatingSystem, OPERATION, format!("{bytes} bytes could not be unmapped: {error}"))
            .with_code(i64::from(error.raw_os_error()))
            .with_hint("raise vm.max_map_count; `Runtime::trim` retries")
    })
}

#[cfg(test)]
impl HostMemory {
    pub(crate) fn hold_lock(&self) -> impl Drop + '_ {
        crate::testing::Held(self.remnants.lock())
    }

    pub(crate) fn is_locked(&self) -> bool {
        self.remnants.is_locked()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_hal::DevicePtr;

    /// Registers nothing. Records the calls, and whether the memory had been touched by then.
    #[derive(Debug, Default)]
    struct Register {
        registered: Mutex<Vec<(usize, usize)>>,
        untouched_pages: AtomicUsize,
    }

    // SAFETY: Allocates no memory.
    unsafe impl HostAllocator for Register {
        fn allocate(&self, bytes: usize, _: &HostOptions) -> Result<HostPtr> {
            Err(Error::new(ErrorKind::OutOfMemory, OPERATION, format!("{bytes} bytes were asked for here")))
        }
        unsafe fn free(&self, ptr: HostPtr) -> Result<()> {
            Err(Error::new(ErrorKind::InvalidPointer, OPERATION, format!("{ptr:?}")))
        }
        unsafe fn register(&self, ptr: HostPtr, bytes: usize, _: &HostOptions) -> Result<()> {
            let mut pages = vec![0_u8; bytes.div_ceil(PAGE)];
            // SAFETY: Queries mapped memory, and has space for the answers: no page is smaller.
            assert_eq!(unsafe { libc::mincore(ptr.as_ptr().cast(), bytes, pages.as_mut_ptr()) }, 0);
            // SAFETY: Queries a number.
            let system_page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
            let untouched = pages.iter().take(bytes.div_ceil(system_page)).filter(|page| *page & 1 == 0).count();
            self.untouched_pages.fetch_add(untouched, Ordering::Relaxed);
            self.registered.lock().push((ptr.address(), bytes));
            Ok(())
        }
        unsafe fn unregister(&self, ptr: HostPtr) -> Result<()> {
            let last = self.registered.lock().pop();
            assert_eq!(last.map(|(address, _)| address), Some(ptr.address()), "from the last to the first");
            Ok(())
        }
        fn device_address(&self, ptr: HostPtr, _: u32) -> Result<DevicePtr> {
            Ok(DevicePtr::new(ptr.address() as u64))
        }
    }

    fn open(piece_bytes: usize) -> (Arc<Register>, HostMemory) {
        let mut capabilities = Capabilities::none();
        capabilities.host_register = true;
        capabilities.register_piece_bytes = piece_bytes;
        let register = Arc::<Register>::default();
        (Arc::clone(&register), HostMemory::new(register, [&capabilities]))
    }

    #[test]
    fn every_page_is_touched_before_its_piece_is_registered() {
        const MIB: usize = 1 << 20;
        for (piece, bytes) in [(2, 5 * MIB), (4, 16 * MIB), (6, 15 * MIB), (10, 21 * MIB + 65536), (64, 9 * MIB)] {
            let (register, memory) = open(piece * MIB);
            let (ptr, pieces) = memory.allocate(bytes, |error| panic!("{error}")).unwrap();
            assert_eq!(register.untouched_pages.load(Ordering::Relaxed), 0);
            let expected = (0..bytes)
                .step_by(piece * MIB)
                .map(|start| (ptr.address() + start, (piece * MIB).min(bytes - start)))
                .collect::<Vec<_>>();
            assert_eq!(*register.registered.lock(), expected);
            // SAFETY: No code uses it.
            let freed = unsafe { memory.free(ptr, bytes, pieces) };
            assert!(matches!(freed, Freed::Whole), "{freed:?}");
            assert!(register.registered.lock().is_empty());
        }
    }

    #[test]
    fn the_mapping_is_aligned_and_the_kernel_knows_what_it_is_for() {
        let bytes = HUGE_PAGE + 4 * 65536;
        let ptr = map(bytes).unwrap();
        assert!(ptr.address().is_multiple_of(HUGE_PAGE));
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        // The kernel may have merged it with a neighbour of the same kind.
        let contains = |line: &str| {
            let ends = line.split(' ').next().and_then(|range| range.split_once('-'));
            let ends = ends.and_then(|(start, end)| {
                Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
            });
            ends.is_some_and(|ends| ends.start <= ptr.address() && ptr.address() + bytes <= ends.end)
        };
        let flags = smaps.lines().skip_while(|line| !contains(line)).find(|line| line.starts_with("VmFlags:"));
        let flags = flags.expect("it is mapped");
        assert!(flags.contains(" dc"), "kept out of children: {flags}");
        if std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            assert!(flags.contains(" hg"), "huge pages: {flags}");
        }
        // SAFETY: Mapped above, and no code uses it.
        unsafe { unmap(ptr.as_ptr(), bytes) }.unwrap();
    }

    #[test]
    fn devices_that_differ_agree_on_the_smallest_piece_and_on_none_where_one_cannot_register() {
        let device = |register: bool, piece: usize| {
            let mut capabilities = Capabilities::none();
            capabilities.host_register = register;
            capabilities.register_piece_bytes = piece;
            capabilities
        };
        let pieces = |devices: &[Capabilities]| {
            HostMemory::new(Arc::<Register>::default(), devices).piece_bytes.map(NonZeroUsize::get)
        };
        assert_eq!(pieces(&[]), None);
        assert_eq!(pieces(&[device(true, 64 << 20), device(true, 5 << 20)]), Some(6 << 20));
        assert_eq!(pieces(&[device(true, 64 << 20), device(false, 64 << 20)]), None);
        assert_eq!(pieces(&[device(true, 64 << 20), device(true, 0)]), None);
        assert_eq!(pieces(&[device(true, usize::MAX)]), None);
    }
}
