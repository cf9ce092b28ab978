//! The pieces of page-locked memory that the pool divides: mapped here and registered with the backend, or allocated by it.
//!
//! A vendor's allocation faults its pages in on one thread inside the driver, and blocks the GPU calls of other threads during
//! that time. On an H200, 1 GiB took 386 ms, and other threads were blocked for 577 ms. So where a backend can register memory,
//! this module creates it. It requests huge pages, and touches the pages with several threads at once. The caller registers
//! it piece by piece while later pieces are still being touched. That blocks other threads for one piece at a time, a few
//! milliseconds. The touching threads have the affinity and the memory policy of the caller, so `numactl` decides where the
//! pages are, unless the memory belongs to a device's NUMA node (`nodes.rs`).
//!
//! *Addresses.* Pieces lie in a reserved range of addresses, one after another, so that a block may extend over several. A
//! reservation costs no memory. If it is full, or the system refuses so large a range, another follows, and no block extends
//! from one into the other.
//!
//! *Pieces.* A growth is divided into pieces of at most 64 MiB and at most the backend's capability `register_piece_bytes`,
//! rounded to whole huge pages. Each is one registration. A request that must not be divided gets a larger one, up to that
//! capability. A copy must not cross from one registration into another, so copies are split at the borders
//! ([`Block::cut`](super::block::Block::cut)).
//!
//! *Refusals.* Registered memory must not be unmapped: the device would continue to use pages that belong to other owners. A
//! piece whose unregistration is refused stays in use. A piece that is unregistered, but whose pages the system does not take
//! back, is a *remnant*: each trim and the end of the runtime retry it.
//!
//! *Forks.* A child must not share pages that a device writes. The process that first wrote to such a page would get a copy. If
//! that were the parent, the device and the parent would no longer see the same page. So children do not inherit the mapping
//! (`MADV_DONTFORK`). Vendors do the same for their own allocations, and it also saves copying the page tables. In a child the
//! addresses are not mapped. Objects of the parent are refused there before they access memory.
//!
//! No lock is held during a call of the backend.

mod files;

use std::num::NonZeroUsize;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags};

pub(crate) use files::{FileMemory, NotMapped, seal};

use super::host::Plan;
use super::host_options::HugePages;
use super::nodes::prefer_node;
use super::pages::{self, PageSource, System};
use highwater_hal::{
    Capabilities, Error, ErrorKind, HostAllocator, HostMemoryKind, HostOptions, HostPtr, Result, counted,
};

const OPERATION: &str = "pinned";

/// The page size that the kernel uses for a mapping if it can, and the unit of growth.
const HUGE_PAGE: usize = 2 << 20;
/// The bytes that a thread touches at a time: about half a millisecond of work.
const GRAIN: usize = 2 * HUGE_PAGE;
/// Maximum number of threads that touch memory. At most three of four processors do: the others stay free for the registering
/// thread and for unrelated work. With all 16 processors of an H200 host, another thread's GPU calls took up to 22 ms, for lack
/// of a processor. With three of four it was 4.4 ms, the time of one piece, and the whole growth was faster too.
const MOST_THREADS: usize = 16;
/// Maximum size of a piece.
const MOST_PIECE_BYTES: usize = 64 << 20;
/// Size of a reservation of addresses. The system may limit it.
const RESERVED_BYTES: usize = 256 << 30;

#[derive(Debug)]
pub(crate) struct HostMemory {
    allocator: Arc<dyn HostAllocator>,
    /// Maximum size of a piece. `None` if the backend allocates the pieces, of any size.
    piece_bytes: Option<NonZeroUsize>,
    /// Maximum size of a piece that a request needs undivided.
    most_undivided_bytes: usize,
    huge_pages: HugePages,
    source: Box<dyn PageSource>,
    /// True once a growth found no reserved huge pages.
    has_lacked_pages: AtomicBool,
    /// True once the touching of huge pages was slow. Then new pieces have small pages.
    is_slow: AtomicBool,
    /// The NUMA node of the pages. `None` leaves the choice to the system.
    node: Option<u32>,
    kind: HostMemoryKind,
    reservations: Mutex<Vec<Reservation>>,
}

/// One registration or allocation.
pub(crate) type Piece = super::area::Piece<HostPtr>;

/// The result of a growth: its pieces, and the error of the first that could not be made.
#[derive(Debug)]
pub(crate) struct Growth {
    pub(crate) pieces: Vec<Piece>,
    pub(crate) refused: Option<Error>,
}

/// The result of releasing a piece.
#[derive(Debug)]
#[must_use]
pub(crate) enum Freed {
    /// The piece is gone.
    Whole,
    /// The piece is unchanged.
    Refused(Error),
    /// The piece is a remnant.
    InPart(Error),
}

/// Committed memory whose first `registered` pieces are registered. Dropping it has no effect.
#[derive(Debug)]
struct Mapped {
    ptr: HostPtr,
    bytes: usize,
    piece_bytes: NonZeroUsize,
    /// The first bytes, in whole pieces, that have reserved huge pages.
    reserved_bytes: usize,
    registered: usize,
    /// The options of each registration.
    options: HostOptions,
}

impl HostMemory {
    /// Registers memory if every device can use it that way, in pieces that suit all devices.
    pub(crate) fn new<'c>(
        allocator: Arc<dyn HostAllocator>,
        devices: impl IntoIterator<Item = &'c Capabilities>,
        huge_pages: HugePages,
    ) -> Self {
        let piece_of = |device: &Capabilities| if device.host_register { device.register_piece_bytes } else { 0 };
        let least = devices.into_iter().map(piece_of).min().and_then(NonZeroUsize::new);
        let most = |limit: usize| {
            let bytes = least.map_or(limit, NonZeroUsize::get).min(limit);
            bytes.checked_next_multiple_of(HUGE_PAGE).unwrap_or(limit)
        };
        Self {
            allocator,
            piece_bytes: least.and_then(|_| NonZeroUsize::new(most(MOST_PIECE_BYTES))),
            most_undivided_bytes: most(usize::MAX),
            huge_pages,
            source: Box::new(System),
            has_lacked_pages: AtomicBool::new(false),
            is_slow: AtomicBool::new(false),
            node: None,
            kind: HostMemoryKind::Default,
            reservations: Mutex::default(),
        }
    }

    /// Returns the most bytes that a block in one registration can have.
    pub(crate) fn most_undivided_bytes(&self) -> usize {
        self.most_undivided_bytes
    }

    /// Returns the memory with its pages on a NUMA node. For memory that the backend allocates, the backend chooses the node.
    pub(crate) fn on_node(self, node: u32) -> Self {
        Self { node: Some(node), ..self }
    }

    /// Returns memory of a kind other than the default. The backend allocates it: vendors register no such memory.
    pub(crate) fn of_kind(self, kind: HostMemoryKind) -> Self {
        Self { kind, piece_bytes: None, ..self }
    }

    /// Returns the size of the largest piece, if it has a limit.
    pub(crate) fn piece_bytes(&self) -> Option<usize> {
        self.piece_bytes.map(NonZeroUsize::get)
    }

    /// Makes the pieces of a growth. One thread at a time may do so.
    pub(crate) fn grow(&self, plan: &Plan) -> Growth {
        let refused = |error| Growth { pieces: Vec::new(), refused: Some(error) };
        let Some(piece_bytes) = self.piece_bytes else {
            return match self.allocator.allocate(plan.whole, &HostOptions::new().with_kind(self.kind)) {
                Ok(ptr) => {
                    let pieces = vec![Piece { ptr, bytes: plan.whole }];
                    Growth { pieces, refused: None }
                }
                Err(error) => refused(error),
            };
        };
        let placed = match plan.hole {
            Some((_, hole)) => Ok((hole.ptr, plan.whole)),
            None => self.place(plan),
        };
        let (ptr, bytes) = match placed {
            Ok(placed) => placed,
            Err(error) => return refused(error),
        };
        let whole = NonZeroUsize::new(bytes).filter(|_| plan.is_undivided);
        let piece_bytes = whole.map_or(piece_bytes, |whole| whole.max(piece_bytes));
        let (pieces, refused) = self.make(ptr, bytes, piece_bytes, self.huge_pages);
        Growth { pieces, refused }
    }

    /// Makes pieces at an address. Returns the error of the first that could not be made.
    fn make(
        &self,
        ptr: HostPtr,
        bytes: usize,
        piece_bytes: NonZeroUsize,
        huge_pages: HugePages,
    ) -> (Vec<Piece>, Option<Error>) {
        let mut mapped =
            Mapped { ptr, bytes, piece_bytes, reserved_bytes: 0, registered: 0, options: HostOptions::new() };
        if huge_pages == HugePages::Reserved {
            mapped.reserved_bytes = self.map_reserved(&mapped);
        }
        // Relaxed: orders nothing.
        let huge_pages = if self.is_slow.load(Ordering::Relaxed) { HugePages::Off } else { huge_pages };
        let rest = bytes - mapped.reserved_bytes;
        let committed = if rest > 0 { commit(ptr.offset(mapped.reserved_bytes), rest, huge_pages) } else { Ok(()) };
        let refused = match committed {
            Ok(()) => {
                if let Some(node) = self.node
                    // SAFETY: Committed above, and known to no other code.
                    && let Err(error) = unsafe { prefer_node(ptr, bytes, node) }
                {
                    tracing::debug!("page-locked memory is not bound to node {node}: {error}");
                }
                let is_slow = (huge_pages != HugePages::Off).then_some(&self.is_slow);
                let touching = Touching::new(&mapped, &*self.source, is_slow);
                mapped.touch_and_register(&*self.allocator, &touching).err()
            }
            Err(error) => Some(NotMade::Refused(error)),
        };
        let mut pieces: Vec<_> = (0..mapped.registered).map(|index| mapped.piece(index)).collect();
        let made: usize = pieces.iter().map(|piece| piece.bytes).sum();
        if made < bytes
            // SAFETY: Inside a reservation, not registered, and known to no other code.
            && let Err(error) = unsafe { decommit(ptr.offset(made), bytes - made) }
        {
            // The next growth at this address uses the pages again.
            crate::warnings::warning!("memory that is not page-locked stays resident: {error}");
        }
        match refused {
            None => (pieces, None),
            Some(NotMade::Refused(error)) => (pieces, Some(error)),
            Some(NotMade::LacksPages(error)) => {
                self.note_lack(error);
                let (mut rest, refused) =
                    self.make(ptr.offset(made), bytes - made, piece_bytes, HugePages::Transparent);
                pieces.append(&mut rest);
                (pieces, refused)
            }
        }
    }

    /// Maps reserved huge pages for the first pieces, as far as there are any. Returns their bytes.
    fn map_reserved(&self, mapped: &Mapped) -> usize {
        let mut bytes = 0;
        for piece in (0..mapped.pieces()).map(|index| mapped.piece(index)) {
            // SAFETY: A part of the reservation in whole huge pages, which no code uses.
            if let Err(error) = unsafe { self.source.map_reserved(piece.ptr, piece.bytes) } {
                self.note_lack(error);
                break;
            }
            bytes += piece.bytes;
        }
        bytes
    }

    fn note_lack(&self, error: Errno) {
        // Relaxed: orders nothing.
        if !self.has_lacked_pages.swap(true, Ordering::Relaxed) {
            crate::warnings::warning!(
                "page-locked memory uses transparent huge pages, for lack of reserved ones: {error}"
            );
        }
    }

    /// Returns whether a growth by so many bytes takes no other memory than reserved huge pages.
    pub(crate) fn has_reserved(&self, bytes: usize) -> bool {
        self.piece_bytes.is_some() && self.huge_pages == HugePages::Reserved && pages::are_reserved(bytes)
    }

    /// Releases a piece.
    ///
    /// # Safety
    /// No code and no outstanding device work may use the piece. It came from [`HostMemory::grow`], and must be released only
    /// once, unless the release was refused.
    pub(crate) unsafe fn release(&self, piece: Piece) -> Freed {
        if self.piece_bytes.is_none() {
            // SAFETY: The piece came from this allocator. The caller promises the rest.
            return unsafe { self.allocator.free(piece.ptr) }.map_or_else(Freed::Refused, |()| Freed::Whole);
        }
        // SAFETY: Registered with this address. No device work uses it, as the caller promises.
        if let Err(error) = unsafe { self.allocator.unregister(piece.ptr) } {
            return Freed::Refused(error);
        }
        // SAFETY: The backend no longer knows it, and no code uses it.
        unsafe { self.release_remnant(piece) }.map_or_else(Freed::InPart, |()| Freed::Whole)
    }

    /// Gives the pages of a remnant back to the system.
    ///
    /// # Safety
    /// The piece must be a remnant.
    pub(crate) unsafe fn release_remnant(&self, piece: Piece) -> Result<()> {
        // SAFETY: Inside a reservation, and neither the backend nor other code uses it.
        unsafe { decommit(piece.ptr, piece.bytes) }
    }

    /// Returns the address and the size of a growth behind the last piece.
    fn place(&self, plan: &Plan) -> Result<(HostPtr, usize)> {
        let mut reservations = self.reservations.lock();
        let current =
            plan.last.and_then(|last| reservations.iter().position(|reservation| reservation.contains(last.ptr)));
        if let (Some(current), Some(last)) = (current, plan.last) {
            let end = last.ptr.offset(last.bytes);
            if reservations[current].end() - end.address() >= plan.more {
                return Ok((end, plan.more));
            }
        }
        // The reservations behind that of the last piece are empty.
        let empty = &reservations[current.map_or(0, |current| current + 1)..];
        if let Some(reservation) = empty.iter().find(|reservation| reservation.bytes >= plan.whole) {
            return Ok((reservation.start, plan.whole));
        }
        let reservation = Reservation::new(plan.whole)?;
        let start = reservation.start;
        reservations.push(reservation);
        Ok((start, plan.whole))
    }
}

impl Mapped {
    fn pieces(&self) -> usize {
        self.bytes.div_ceil(self.piece_bytes.get())
    }

    fn piece(&self, index: usize) -> Piece {
        let offset = index * self.piece_bytes.get();
        Piece { ptr: self.ptr.offset(offset), bytes: self.piece_bytes.get().min(self.bytes - offset) }
    }

    /// Touches every page and registers every piece, at the same time.
    fn touch_and_register(
        &mut self,
        allocator: &dyn HostAllocator,
        touching: &Touching<'_>,
    ) -> std::result::Result<(), NotMade> {
        thread::scope(|scope| {
            let processors = thread::available_parallelism().map_or(1, NonZeroUsize::get);
            let most = (processors * 3 / 4).clamp(1, MOST_THREADS);
            let spawn = || {
                let builder = thread::Builder::new().name("highwater-touch".to_owned()).stack_size(1 << 17);
                builder.spawn_scoped(scope, || touching.work())
            };
            // One grain takes less time than a thread. A thread that cannot be created is not needed.
            let threads = if touching.grains > 1 { most.min(touching.grains) } else { 0 };
            let started = (0..threads).map_while(|_| spawn().ok()).count();
            if started == 0 {
                touching.work();
            }
            // Even if the backend panics: the scope waits for the threads.
            let _stop = StopOnDrop(touching);
            (0..self.pieces()).try_for_each(|index| {
                touching.wait_for(index).map_err(NotMade::LacksPages)?;
                let Piece { ptr, bytes } = self.piece(index);
                // SAFETY: The range is mapped, and writable unless the options say otherwise. It stays so until it is unregistered.
                let registered = unsafe { allocator.register(ptr, bytes, &self.options) };
                registered.map_err(|error| NotMade::Refused(self.not_registered(&error)))?;
                self.registered += 1;
                Ok(())
            })
        })
    }

    /// Returns the error of the first piece that is not registered.
    fn not_registered(&self, error: &Error) -> Error {
        let message = format!(
            "{} bytes were mapped to be page-locked in {} of {} bytes; registering piece {} failed: {}",
            self.bytes,
            counted(self.pieces(), "piece"),
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
}

/// Why a piece was not made.
#[derive(Debug)]
enum NotMade {
    /// The system or the backend refused it.
    Refused(Error),
    /// Its reserved huge pages could not be touched.
    LacksPages(Errno),
}

/// A mapping that several threads touch at once, in grains that are assigned in the order of addresses, so that the first piece
/// is ready first.
#[derive(Debug)]
struct Touching<'t> {
    source: &'t dyn PageSource,
    /// Set when the touching of a piece was slow. `None` if there is nothing to change then.
    is_slow: Option<&'t AtomicBool>,
    ptr: HostPtr,
    bytes: usize,
    piece_bytes: usize,
    reserved_bytes: usize,
    grains_of_piece: usize,
    grains: usize,
    /// The next grain to assign. Relaxed: it orders nothing.
    next: AtomicUsize,
    left: Mutex<Vec<Left>>,
    is_ready: Condvar,
}

/// The remaining work of a piece.
#[derive(Debug)]
struct Left {
    /// Grains that are not yet touched.
    grains: usize,
    /// The time that threads spent on the others.
    time: Duration,
    failed: Option<Errno>,
}

impl<'t> Touching<'t> {
    fn new(mapped: &Mapped, source: &'t dyn PageSource, is_slow: Option<&'t AtomicBool>) -> Self {
        let piece_bytes = mapped.piece_bytes.get();
        let left =
            |index| Left { grains: mapped.piece(index).bytes.div_ceil(GRAIN), time: Duration::ZERO, failed: None };
        let left: Vec<_> = (0..mapped.pieces()).map(left).collect();
        Self {
            source,
            is_slow,
            ptr: mapped.ptr,
            bytes: mapped.bytes,
            piece_bytes,
            grains_of_piece: piece_bytes.div_ceil(GRAIN),
            grains: left.iter().map(|left| left.grains).sum(),
            reserved_bytes: mapped.reserved_bytes,
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
            let is_reserved = start < self.reserved_bytes;
            // SAFETY: Inside the mapping, which is writable, zeroed and lives until all threads are done. No other code writes
            // there: grains do not overlap, and the backend locks only pages whose grains are done.
            let touched = unsafe { self.source.touch(self.ptr.offset(start), end - start, is_reserved) };
            let mut left = self.left.lock();
            let left = &mut left[piece];
            left.grains -= 1;
            match touched {
                Ok(time) => left.time += time,
                Err(error) => left.failed = left.failed.or(Some(error)),
            }
            if left.grains == 0 {
                if !is_reserved {
                    self.judge(piece, left.time);
                }
                self.is_ready.notify_one();
            }
        }
    }

    /// If the touching of a piece was slow, continues with small pages.
    fn judge(&self, piece: usize, time: Duration) {
        let start = piece * self.piece_bytes;
        let end = self.bytes.min(start + self.piece_bytes);
        let Some(is_slow) = self.is_slow.filter(|_| pages::is_slow(end - start, time)) else { return };
        // Relaxed: orders nothing.
        if is_slow.swap(true, Ordering::Relaxed) {
            return;
        }
        crate::warnings::warning!(
            "touching {} bytes in huge pages took {time:?}; new memory has small pages",
            end - start
        );
        if end < self.bytes
            // SAFETY: The rest of the mapping, which lives until all threads are done; the advice changes no contents.
            && let Err(error) = unsafe { advise(self.ptr.offset(end), self.bytes - end, HugePages::Off) }
        {
            tracing::debug!("the kernel keeps its choice of pages: {error}");
        }
    }

    /// Waits until a piece is touched. Returns an error if some of its pages could not be.
    fn wait_for(&self, piece: usize) -> Result<(), Errno> {
        let mut left = self.left.lock();
        while left[piece].grains > 0 {
            self.is_ready.wait(&mut left);
        }
        left[piece].failed.map_or(Ok(()), Err)
    }
}

/// Stops the threads from taking further grains.
struct StopOnDrop<'t>(&'t Touching<'t>);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.next.store(self.0.grains, Ordering::Relaxed);
    }
}

/// A range of addresses. Its memory is committed in parts.
#[derive(Debug)]
struct Reservation {
    /// The first byte, at a huge page.
    start: HostPtr,
    bytes: usize,
    mapping: Range<usize>,
}

impl Reservation {
    /// Reserves at least `bytes`, and more if the system allows it.
    fn new(bytes: usize) -> Result<Self> {
        let mut size = RESERVED_BYTES.max(bytes);
        loop {
            match Self::of_size(size) {
                Err(_) if size > bytes => size = (size / 2).max(bytes),
                result => return result.map_err(|error| system_error(bytes, "reserved", error)),
            }
        }
    }

    fn of_size(bytes: usize) -> Result<Self, Errno> {
        // The kernel aligns to pages. One more huge page leaves space for a whole number of huge pages.
        let mapped_bytes = bytes.checked_add(HUGE_PAGE).ok_or(Errno::NOMEM)?;
        // SAFETY: A new private mapping at an address that the kernel chooses.
        let mapped = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                mapped_bytes,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        let first = mapped.addr();
        let start = mapped.cast::<u8>().wrapping_add(first.next_multiple_of(HUGE_PAGE) - first);
        let start = HostPtr::new(NonNull::new(start).ok_or(Errno::NOMEM)?);
        Ok(Self { start, bytes, mapping: first..first + mapped_bytes })
    }

    fn end(&self) -> usize {
        self.start.address() + self.bytes
    }

    fn contains(&self, ptr: HostPtr) -> bool {
        (self.start.address()..self.end()).contains(&ptr.address())
    }
}

impl HostMemory {
    /// Returns the reservations to the system, at the end of the runtime.
    ///
    /// # Safety
    /// No piece may be registered, and no code may use one.
    pub(crate) unsafe fn end_reservations(&self) {
        for Reservation { mapping, .. } in self.reservations.lock().drain(..) {
            let start = std::ptr::without_provenance_mut(mapping.start);
            // SAFETY: The mapping is this module's own, and no code uses it, as the caller promises.
            if let Err(error) = unsafe { rustix::mm::munmap(start, mapping.len()) } {
                crate::warnings::warning!("{} bytes of addresses stay reserved: {error}", mapping.len());
            }
        }
    }
}

fn system_error(bytes: usize, what: &str, error: Errno) -> Error {
    let kind = match error {
        Errno::NOMEM | Errno::AGAIN => ErrorKind::OutOfMemory,
        _ => ErrorKind::OperatingSystem,
    };
    Error::new(kind, OPERATION, format!("{bytes} bytes to be page-locked could not be {what}: {error}"))
        .with_code(i64::from(error.raw_os_error()))
        .with_hint("free memory, or raise the limits of the process (`ulimit -v`, vm.max_map_count)")
}

/// Makes a part of a reservation readable and writable. Its pages are zeroed when they are first touched.
fn commit(start: HostPtr, bytes: usize, huge_pages: HugePages) -> Result<()> {
    let ptr = start.as_ptr().cast();
    // SAFETY: Inside a reservation, and no code uses this part.
    unsafe { rustix::mm::mprotect(ptr, bytes, MprotectFlags::READ | MprotectFlags::WRITE) }
        .map_err(|error| system_error(bytes, "mapped", error))?;
    // A kernel without huge pages refuses, which only costs speed.
    // SAFETY: As above.
    if let Err(error) = unsafe { advise(start, bytes, huge_pages) } {
        tracing::debug!("the kernel keeps its choice of pages for page-locked memory: {error}");
    }
    // SAFETY: As above; the advice changes no contents.
    unsafe { rustix::mm::madvise(ptr, bytes, Advice::LinuxDontFork) }
        .map_err(|error| system_error(bytes, "kept out of children", error))
}

/// Tells the kernel whether memory may have huge pages.
///
/// # Safety
/// The memory must be mapped.
unsafe fn advise(start: HostPtr, bytes: usize, huge_pages: HugePages) -> Result<(), Errno> {
    let advice = if huge_pages == HugePages::Off { Advice::LinuxNoHugepage } else { Advice::LinuxHugepage };
    // SAFETY: As the caller promises; the advice changes no contents.
    unsafe { rustix::mm::madvise(start.as_ptr().cast(), bytes, advice) }
}

/// Gives the pages of a part of a reservation back to the system. The addresses stay reserved.
///
/// # Safety
/// The backend must not know the range, and no code may use it.
unsafe fn decommit(start: HostPtr, bytes: usize) -> Result<()> {
    let failed = |error: Errno| {
        Error::new(ErrorKind::OperatingSystem, OPERATION, format!("{bytes} bytes could not be given back: {error}"))
            .with_code(i64::from(error.raw_os_error()))
            .with_hint("raise vm.max_map_count; `Runtime::trim` retries")
    };
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
    // SAFETY: The caller promises that no code uses the range, which is inside a reservation.
    let mapped = unsafe { rustix::mm::mmap_anonymous(start.as_ptr().cast(), bytes, ProtFlags::empty(), flags) };
    mapped.map(drop).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::host::Hole;
    use crate::pool::ranges::PAGE;
    use crate::pool::ranges::Run;
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
            Err(Error::new(ErrorKind::InvalidPointer, OPERATION, format!("{ptr}")))
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

    /// Has small pages for reserved ones, of which some cannot be touched.
    #[derive(Debug)]
    struct FewReserved {
        mapped_bytes: AtomicUsize,
        touched: AtomicUsize,
        touchable: usize,
    }

    impl PageSource for FewReserved {
        unsafe fn map_reserved(&self, target: HostPtr, bytes: usize) -> Result<(), Errno> {
            if self.mapped_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes > 4 * HUGE_PAGE {
                return Err(Errno::NOMEM);
            }
            commit(target, bytes, HugePages::Off).map_err(|_| Errno::INVAL)
        }
        unsafe fn touch(&self, start: HostPtr, bytes: usize, is_reserved: bool) -> Result<Duration, Errno> {
            if is_reserved && self.touched.fetch_add(1, Ordering::Relaxed) >= self.touchable {
                return Err(Errno::FAULT);
            }
            // SAFETY: As the caller promises.
            unsafe { System.touch(start, bytes, false) }
        }
    }

    #[test]
    fn pages_that_are_reserved_but_missing_at_the_touch_are_replaced() {
        // Of six pieces, four are mapped from reserved pages.
        for touchable in [4, 2, 0] {
            let (register, mut memory) = open(HUGE_PAGE);
            memory.huge_pages = HugePages::Reserved;
            memory.source =
                Box::new(FewReserved { mapped_bytes: AtomicUsize::new(0), touched: AtomicUsize::new(0), touchable });
            let growth = memory.grow(&plan(6 * HUGE_PAGE));
            assert!(growth.refused.is_none(), "{growth:?}");
            let start = growth.pieces[0].ptr;
            let expected = (0..6).map(|piece| Piece { ptr: start.offset(piece * HUGE_PAGE), bytes: HUGE_PAGE });
            assert!(growth.pieces.iter().copied().eq(expected), "{growth:?}");
            assert_eq!(register.untouched_pages.load(Ordering::Relaxed), 0);
            assert_eq!(register.registered.lock().len(), 6);
            assert!(memory.has_lacked_pages.load(Ordering::Relaxed));
        }
    }

    fn open(piece_bytes: usize) -> (Arc<Register>, HostMemory) {
        let mut capabilities = Capabilities::none();
        capabilities.host_register = true;
        capabilities.register_piece_bytes = piece_bytes;
        let register = Arc::<Register>::default();
        (Arc::clone(&register), HostMemory::new(register, [&capabilities], HugePages::Transparent))
    }

    fn plan(whole: usize) -> Plan {
        Plan { hole: None, counts_on: Run { start: 0, pages: 0 }, last: None, more: whole, whole, is_undivided: false }
    }

    #[test]
    fn every_page_is_touched_before_its_piece_is_registered() {
        const MIB: usize = 1 << 20;
        for (piece, bytes) in [(2, 6 * MIB), (4, 16 * MIB), (6, 16 * MIB), (10, 22 * MIB), (64, 10 * MIB)] {
            let (register, memory) = open(piece * MIB);
            let growth = memory.grow(&plan(bytes));
            assert!(growth.refused.is_none(), "{growth:?}");
            assert_eq!(register.untouched_pages.load(Ordering::Relaxed), 0);
            let start = growth.pieces[0].ptr.address();
            let expected = (0..bytes)
                .step_by(piece * MIB)
                .map(|offset| (start + offset, (piece * MIB).min(bytes - offset)))
                .collect::<Vec<_>>();
            assert_eq!(*register.registered.lock(), expected);
            for piece in growth.pieces.iter().rev() {
                // SAFETY: No code uses it.
                let freed = unsafe { memory.release(*piece) };
                assert!(matches!(freed, Freed::Whole), "{freed:?}");
            }
            assert!(register.registered.lock().is_empty());
            // SAFETY: Every piece is gone.
            unsafe { memory.end_reservations() };
        }
    }

    #[test]
    fn a_growth_continues_the_last_piece_and_takes_the_place_of_a_released_one() {
        let (_register, memory) = open(4 * HUGE_PAGE);
        let first = memory.grow(&plan(3 * HUGE_PAGE)).pieces[0];
        let behind = Plan { last: Some(first), more: HUGE_PAGE, ..plan(2 * HUGE_PAGE) };
        let growth = memory.grow(&behind);
        let second = growth.pieces[0];
        assert_eq!(second, Piece { ptr: first.ptr.offset(first.bytes), bytes: HUGE_PAGE });
        // SAFETY: The page is committed, and no other code uses it.
        unsafe { second.ptr.as_ptr().write_volatile(7) };
        // SAFETY: No code uses it.
        assert!(matches!(unsafe { memory.release(second) }, Freed::Whole));
        let again = memory.grow(&Plan { hole: Some((0, Hole { pages: 512, ptr: second.ptr })), ..plan(HUGE_PAGE) });
        assert_eq!(again.pieces, [second]);
        // SAFETY: As above.
        assert_eq!(unsafe { second.ptr.as_ptr().read_volatile() }, 0, "new pages");
    }

    /// The flags that the kernel states for the mapping of a piece.
    fn flags_of(Piece { ptr, bytes }: Piece) -> String {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        // The kernel may have merged it with a neighbor of the same kind.
        let contains = |line: &str| {
            let ends = line.split(' ').next().and_then(|range| range.split_once('-'));
            let ends = ends.and_then(|(start, end)| {
                Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
            });
            ends.is_some_and(|ends| ends.start <= ptr.address() && ptr.address() + bytes <= ends.end)
        };
        let flags = smaps.lines().skip_while(|line| !contains(line)).find(|line| line.starts_with("VmFlags:"));
        flags.expect("it is mapped").to_owned()
    }

    #[test]
    fn the_memory_is_aligned_and_the_kernel_knows_what_it_is_for() {
        let (_register, memory) = open(4 * HUGE_PAGE);
        let Piece { ptr, bytes } = memory.grow(&plan(HUGE_PAGE)).pieces[0];
        assert!(ptr.address().is_multiple_of(HUGE_PAGE));
        let flags = flags_of(Piece { ptr, bytes });
        assert!(flags.contains(" dc"), "kept out of children: {flags}");
        if std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            assert!(flags.contains(" hg"), "huge pages: {flags}");
        }
    }

    /// Touches nothing. The memory is slow whose first byte lies in one of these huge pages, counted from the first touch.
    #[derive(Debug)]
    struct Slow {
        first: Mutex<Option<usize>>,
        slow: std::ops::Range<usize>,
        time: Duration,
    }

    impl PageSource for Slow {
        unsafe fn map_reserved(&self, _: HostPtr, _: usize) -> Result<(), Errno> {
            Err(Errno::NOMEM)
        }
        unsafe fn touch(&self, start: HostPtr, _: usize, _: bool) -> Result<Duration, Errno> {
            let first = *self.first.lock().get_or_insert(start.address());
            let page = start.address().wrapping_sub(first) / HUGE_PAGE;
            Ok(if self.slow.contains(&page) { self.time } else { Duration::from_millis(1) })
        }
    }

    #[test]
    fn after_a_piece_whose_touching_was_slow_the_pages_are_small() {
        if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            return println!("skipped: the kernel has no transparent huge pages");
        }
        let is_huge = |piece: &Piece| flags_of(*piece).contains(" hg");
        let is_small = |piece: &Piece| flags_of(*piece).contains(" nh");
        for huge_pages in [HugePages::Transparent, HugePages::Reserved] {
            let (_register, mut memory) = open(2 * HUGE_PAGE);
            memory.huge_pages = huge_pages;
            // The fourth of six pieces.
            memory.source = Box::new(Slow { first: Mutex::default(), slow: 6..8, time: Duration::from_millis(100) });
            // The first touch is that of the first piece.
            let first = memory.grow(&plan(2 * HUGE_PAGE)).pieces[0];
            let behind = Plan { last: Some(first), more: 10 * HUGE_PAGE, ..plan(10 * HUGE_PAGE) };
            let growth = memory.grow(&behind);
            assert!(growth.refused.is_none() && growth.pieces.len() == 5, "{growth:?}");
            let pieces = &growth.pieces;
            assert!(is_huge(&first) && pieces[..3].iter().all(is_huge) && pieces[3..].iter().all(is_small));
            // Later growths too.
            let last = Plan { last: Some(pieces[4]), more: HUGE_PAGE, ..plan(HUGE_PAGE) };
            assert!(memory.grow(&last).pieces.iter().all(is_small));
        }
        // A thread that waited for a processor, or a machine that is slow for all pages alike.
        for (piece, time) in [(1, 99), (8, 159)] {
            let (_register, mut memory) = open(piece * HUGE_PAGE);
            // A grain has two huge pages.
            let of_grain = Duration::from_millis(time) / piece.div_ceil(2) as u32;
            memory.source = Box::new(Slow { first: Mutex::default(), slow: 0..64, time: of_grain });
            let growth = memory.grow(&plan(2 * piece * HUGE_PAGE));
            assert!(growth.pieces.iter().all(is_huge), "{piece} {time}");
        }
        let (_register, mut memory) = open(HUGE_PAGE);
        memory.huge_pages = HugePages::Off;
        assert!(memory.grow(&plan(2 * HUGE_PAGE)).pieces.iter().all(is_small));
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
            HostMemory::new(Arc::<Register>::default(), devices, HugePages::Transparent)
                .piece_bytes
                .map(NonZeroUsize::get)
        };
        assert_eq!(pieces(&[]), None);
        assert_eq!(pieces(&[device(true, 64 << 20), device(true, 5 << 20)]), Some(6 << 20));
        assert_eq!(pieces(&[device(true, 64 << 20), device(false, 64 << 20)]), None);
        assert_eq!(pieces(&[device(true, 64 << 20), device(true, 0)]), None);
        assert_eq!(pieces(&[device(true, usize::MAX)]), Some(64 << 20));
    }
}
