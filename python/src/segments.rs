//! Segments of PyTorch's allocator that receivers keep mapped.
//!
//! The map and the unmap of a segment take a good part of the time of a tensor through a queue. A mapping stays in a receiver while the
//! sender shares the memory. So the sender also shares one byte of the segment, for as long as the segment exists. Receivers open it once. PyTorch
//! reports that it frees a segment before it does so (`_torch_segments.cpp`). The share of the segment ends then. The free waits until each
//! running receiver has unmapped the segment, at most 10 seconds. NVIDIA leaves a free under a mapping undefined.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use highwater::hal::DevicePtr;
use highwater::{DeviceBuffer, Result};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::torch::{STANDING, Standing, allocating, lock};

/// The bytes of a ticket with its transport.
const TRANSPORT: Range<usize> = 12..16;
/// The transport of legacy handles.
const LEGACY: [u8; 4] = [0; 4];
/// The bytes of a ticket with the offset of its range in the allocation.
const OFFSET: Range<usize> = 96..104;

/// The longest time that a free waits for running receivers. The device of one may be busy, and the driver unmaps only then.
const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// The same, for `SHORT_FOR` after a wait in vain. So a receiver that hangs does not stop PyTorch for long.
const SHORT_WAIT: Duration = Duration::from_millis(100);
const SHORT_FOR: Duration = Duration::from_secs(60);
/// The time of the last wait in vain.
static LAST_IN_VAIN: Mutex<Option<Instant>> = Mutex::new(None);

/// A segment that receivers keep mapped.
struct Segment {
    /// A byte of it, whose share keeps the mappings.
    byte: DeviceBuffer<u8>,
    ticket: Arc<[u8]>,
}

/// Returns the start of the segment in which the block of PyTorch at an address lies. Returns 0 if no block begins there.
type SegmentOf = extern "C" fn(u64) -> u64;
static SEGMENT_OF: OnceLock<SegmentOf> = OnceLock::new();

/// The segments that receivers keep mapped, by their start.
static KEPT: Mutex<BTreeMap<u64, Segment>> = Mutex::new(BTreeMap::new());

impl Segment {
    fn new(standing: &Standing, device: u32, address: u64) -> Result<Self> {
        // SAFETY: The caller has a tensor at the address, so the segment exists now. `segment_freed` ends the share before the segment is freed.
        // Nothing reads or writes the byte through this buffer.
        let byte = unsafe { standing.runtime.device(device)?.adopt::<u8>(DevicePtr::new(address), 1, ()) }?;
        let ticket = byte.share()?.to_bytes().into();
        Ok(Self { byte, ticket })
    }

    /// Ends the share, and waits until no running receiver has the segment mapped.
    fn end(self) {
        let is_short = lock(&LAST_IN_VAIN).is_some_and(|last| last.elapsed() < SHORT_FOR);
        let (limit, begin) = (if is_short { SHORT_WAIT } else { LONGEST_WAIT }, Instant::now());
        // The call does not wait for stopped receivers.
        if !self.byte.unshare_within(limit) && begin.elapsed() >= limit {
            *lock(&LAST_IN_VAIN) = Some(Instant::now());
        }
    }
}

/// Returns the ticket of the segment that has the storage at `address`. `ticket` is the ticket of the storage. Returns `None` if the ticket has no
/// legacy handle, PyTorch does not report the free, or the share fails.
#[pyfunction]
pub(crate) fn segment_ticket<'py>(
    py: Python<'py>,
    device: u32,
    address: u64,
    ticket: &[u8],
) -> Option<Bound<'py, PyBytes>> {
    // Only a legacy handle names memory whose free under a mapping is undefined.
    if ticket.get(TRANSPORT)? != LEGACY {
        return None;
    }
    let offset: [u8; 8] = ticket.get(OFFSET)?.try_into().ok()?;
    let base = address.checked_sub(u64::from_le_bytes(offset))?;
    let standing = Standing::get("segment_ticket").ok()?;
    let known = || lock(&KEPT).get(&base).map(|segment| Arc::clone(&segment.ticket));
    let make = || {
        // Memory of other libraries is freed without a report.
        if SEGMENT_OF.get()?(address) != base {
            return None;
        }
        let made = Segment::new(standing, device, address).ok()?;
        let mut kept = lock(&KEPT);
        let is_first = !kept.contains_key(&base);
        let ticket = Arc::clone(&if is_first { &made } else { &kept[&base] }.ticket);
        let duplicate = if is_first { kept.insert(base, made) } else { Some(made) };
        // Outside of the lock.
        drop(kept);
        drop(duplicate);
        Some(ticket)
    };
    let found = known().or_else(|| py.detach(make))?;
    Some(PyBytes::new(py, &found))
}

/// Ends the share of a segment. Waits until no running receiver has it mapped, at most [`LONGEST_WAIT`]. PyTorch's allocator calls it before it
/// frees a segment, with a lock held.
extern "C" fn segment_freed(address: u64) {
    allocating(|| {
        let Some(standing) = STANDING.get() else { return Ok(()) };
        // A child must not reach a lock that a thread of the parent may hold.
        if standing.generation.is_current() {
            let freed = lock(&KEPT).remove(&address);
            if let Some(segment) = freed {
                segment.end();
            }
        }
        Ok(())
    });
}

/// Takes the address of `highwater_segment_of`. Returns the address of `segment_freed`, for `highwater_watch_segments`.
///
/// # Safety
/// The caller must pass the address of a [`SegmentOf`] function that exists until the process ends.
#[pyfunction]
pub(crate) unsafe fn segment_freed_function(segment_of: usize) -> usize {
    // SAFETY: As the caller promises.
    let function = unsafe { std::mem::transmute::<usize, SegmentOf>(segment_of) };
    // A retry passes the same address.
    let _ = SEGMENT_OF.set(function);
    segment_freed as *const () as usize
}
