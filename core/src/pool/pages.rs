//! The pages of a growth: huge pages that the user reserved, and the first touch of every page.
//!
//! *Reserved huge pages* (`vm.nr_hugepages`) are mapped without `MAP_NORESERVE`, so the mapping fails if there are too few. With
//! it, the first touch would raise SIGBUS. A mapping at a fixed address first unmaps the target, even if it then fails. So the
//! pages are mapped elsewhere and moved to their address, which kernels since 5.16 support. The support is tested outside the
//! reservation of addresses, because an older kernel unmaps the target before it refuses.
//!
//! Pages may still be missing at the first touch: a control group limits them, or the memory policy names a node without any.
//! So the touch asks the kernel to populate the range, which returns an error instead of SIGBUS.
//!
//! *Slow touching.* On a fragmented host, the kernel compacts memory to find each huge page, which takes minutes in all. Zeroing a
//! huge page takes 0.1 to 2 ms, and touching the same memory in small pages takes 1 ms more at most. A virtual machine whose host
//! has not backed the memory yet took up to 9 ms in a test. So a piece is slow if its threads spent 20 ms on each of its huge
//! pages on average. They must also have spent 100 ms in all, because a thread that waits for a processor loses some time too.
//! After a slow piece, the pool uses small pages.

use std::ffi::c_void;
use std::fmt;
use std::fs;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags};

use highwater_hal::HostPtr;

/// The size of the huge pages.
const HUGE_PAGE: usize = 2 << 20;
/// The smallest page size of any machine.
const PAGE: usize = 4 << 10;
/// The counts of reserved huge pages of that size.
const COUNTS: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

/// The part of the system that provides pages.
pub(super) trait PageSource: fmt::Debug + Send + Sync {
    /// Maps reserved huge pages, which children do not inherit, over a part of a reservation of addresses. If that fails, the part
    /// is as before.
    ///
    /// # Safety
    /// The part must begin at a huge page and have whole huge pages, and no code may use it.
    unsafe fn map_reserved(&self, target: HostPtr, bytes: usize) -> Result<(), Errno>;

    /// Makes every page of a range present, and returns the time that it took. `is_reserved` says whether they are reserved huge
    /// pages; only then it returns an error.
    ///
    /// # Safety
    /// The range must be mapped, writable and zeroed, and no other code may write to it.
    unsafe fn touch(&self, start: HostPtr, bytes: usize, is_reserved: bool) -> Result<Duration, Errno>;
}

/// This system.
#[derive(Debug)]
pub(super) struct System;

impl PageSource for System {
    unsafe fn map_reserved(&self, target: HostPtr, bytes: usize) -> Result<(), Errno> {
        // SAFETY: The contract is the same.
        unsafe { map_reserved(target, bytes) }
    }

    unsafe fn touch(&self, start: HostPtr, bytes: usize, is_reserved: bool) -> Result<Duration, Errno> {
        let begun = Instant::now();
        if is_reserved {
            // SAFETY: The range is mapped, as the caller promises; the contents stay.
            match unsafe { rustix::mm::madvise(start.as_ptr().cast(), bytes, Advice::LinuxPopulateWrite) } {
                // A kernel before 5.14 does not know it.
                Err(Errno::INVAL) => {}
                result => return result.map(|()| begun.elapsed()),
            }
        }
        for offset in (0..bytes).step_by(PAGE) {
            // SAFETY: Inside the range, which the caller promises to be writable, zeroed and written by no other code.
            unsafe { start.as_ptr().add(offset).write_volatile(0) };
        }
        Ok(begun.elapsed())
    }
}

/// The least time that threads spend on a slow piece, for each huge page and in all.
const SLOW_PAGE: Duration = Duration::from_millis(20);
const SLOW_PIECE: Duration = Duration::from_millis(100);

/// Returns whether the touching of a piece of whole huge pages was slow. `time` is the sum over all threads.
pub(super) fn is_slow(bytes: usize, time: Duration) -> bool {
    let huge_pages = u32::try_from(bytes / HUGE_PAGE).unwrap_or(u32::MAX);
    time >= SLOW_PIECE.max(SLOW_PAGE.saturating_mul(huge_pages))
}

/// Returns whether so many bytes of reserved huge pages are free.
pub(super) fn are_reserved(bytes: usize) -> bool {
    let count = |name: &str| fs::read_to_string(format!("{COUNTS}/{name}")).ok()?.trim().parse::<usize>().ok();
    let free = || Some(count("free_hugepages")?.saturating_sub(count("resv_hugepages")?));
    free().is_some_and(|free| free >= bytes.div_ceil(HUGE_PAGE))
}

/// As [`PageSource::map_reserved`].
///
/// # Safety
/// The caller must ensure the same as for [`PageSource::map_reserved`].
unsafe fn map_reserved(target: HostPtr, bytes: usize) -> Result<(), Errno> {
    if !can_move()? {
        return Err(Errno::OPNOTSUPP);
    }
    let mapped = map_huge(bytes)?;
    // SAFETY: The mapping is new; the advice changes no contents.
    unsafe { rustix::mm::madvise(mapped, bytes, Advice::LinuxDontFork) }.inspect_err(|_| unmap(mapped, bytes))?;
    // SAFETY: The mapping is new. No code uses the target, as the caller promises.
    let moved = unsafe { move_to(mapped, bytes, target.as_ptr().cast()) };
    if moved.is_err() {
        // The kernel makes its checks before it unmaps the target. If the target is unmapped nevertheless, this reserves it again.
        // An error here means that the target is still mapped.
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
        // SAFETY: Replaces no mapping.
        let _ = unsafe { rustix::mm::mmap_anonymous(target.as_ptr().cast(), bytes, ProtFlags::empty(), flags) };
        unmap(mapped, bytes);
    }
    moved
}

fn map_huge(bytes: usize) -> Result<*mut c_void, Errno> {
    let flags = MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_2MB;
    // SAFETY: A new private mapping at an address that the kernel chooses.
    unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags) }
}

/// # Safety
/// No code may use either range, and the target must be a mapping of the caller.
unsafe fn move_to(from: *mut c_void, bytes: usize, target: *mut c_void) -> Result<(), Errno> {
    // SAFETY: As the caller promises.
    unsafe { rustix::mm::mremap_fixed(from, bytes, bytes, MremapFlags::MAYMOVE, target) }.map(drop)
}

fn unmap(ptr: *mut c_void, bytes: usize) {
    // SAFETY: Only called for mappings of this file that no code uses.
    if let Err(error) = unsafe { rustix::mm::munmap(ptr, bytes) } {
        crate::warnings::warning!("{bytes} bytes of huge pages stay mapped: {error}");
    }
}

/// Returns whether the kernel moves reserved huge pages. Tests it once, with one page.
fn can_move() -> Result<bool, Errno> {
    static CAN_MOVE: OnceLock<bool> = OnceLock::new();
    if let Some(can_move) = CAN_MOVE.get() {
        return Ok(*can_move);
    }
    let page = map_huge(HUGE_PAGE)?;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: A new private mapping at an address that the kernel chooses.
    let space = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), 2 * HUGE_PAGE, ProtFlags::empty(), flags) };
    let space = space.inspect_err(|_| unmap(page, HUGE_PAGE))?;
    let target = space.cast::<u8>().wrapping_add(space.addr().next_multiple_of(HUGE_PAGE) - space.addr()).cast();
    // SAFETY: Both are new, and the target lies inside the space.
    let moved = unsafe { move_to(page, HUGE_PAGE, target) }.is_ok();
    // If the kernel refused, it may have unmapped the target, which may have another owner by now. So the space stays reserved.
    if moved {
        unmap(space, 2 * HUGE_PAGE)
    } else {
        unmap(page, HUGE_PAGE)
    }
    Ok(*CAN_MOVE.get_or_init(|| moved))
}
