//! Segments of PyTorch's allocator that receivers keep mapped.
//!
//! The map and the unmap of a segment take about as long as the rest of a tensor's way through a queue. A mapping stays in a receiver while the
//! sender shares the memory. So the sender also shares one byte of the segment, for as long as the segment exists. Receivers open it once. PyTorch
//! reports that it frees a segment before it does so (`_torch_segments.cpp`). The share of the segment ends then. The free waits until each
//! receiver has unmapped the segment, at most half a second. NVIDIA leaves a free under a mapping undefined.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
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

/// The longest time that a free waits for receivers.
const LONGEST_WAIT: Duration = Duration::from_millis(500);
const SHORTEST_WAIT: Duration = Duration::from_millis(1);
/// The limit of the next wait. A wait in vain halves it, down to `SHORTEST_WAIT`. A wait that succeeds restores it. So a stopped receiver delays
/// many frees only briefly.
static WAIT_MICROSECONDS: AtomicU64 = AtomicU64::new(LONGEST_WAIT.as_micros() as u64);

/// Whether no receiver has a segment mapped.
#[derive(Default)]
struct Unmapped(Mutex<bool>, Condvar);

impl Unmapped {
    /// Waits until no receiver has the segment mapped, at most the current limit.
    fn wait(&self) {
        // Relaxed: the waits of two threads may share a limit.
        let limit = Duration::from_micros(WAIT_MICROSECONDS.load(Ordering::Relaxed));
        let end = Instant::now() + limit;
        let mut is_unmapped = lock(&self.0);
        while !*is_unmapped {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            is_unmapped = self.1.wait_timeout(is_unmapped, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let next = if *is_unmapped { LONGEST_WAIT } else { (limit / 2).max(SHORTEST_WAIT) };
        WAIT_MICROSECONDS.store(next.as_micros() as u64, Ordering::Relaxed);
    }
}

/// Dropped once no receiver has a segment mapped.
struct Keep(Arc<Unmapped>);

impl Drop for Keep {
    fn drop(&mut self) {
        *lock(&self.0.0) = true;
        self.0.1.notify_all();
    }
}

/// A segment that receivers keep mapped.
struct Segment {
    /// A byte of it, whose share keeps the mappings.
    byte: DeviceBuffer<u8>,
    ticket: Arc<[u8]>,
    unmapped: Arc<Unmapped>,
}

/// Returns the start of the segment in which the block of PyTorch at an address lies. Returns 0 if no block begins there.
type SegmentOf = extern "C" fn(u64) -> u64;
static SEGMENT_OF: OnceLock<SegmentOf> = OnceLock::new();

/// The segments that receivers keep mapped, by their start.
static KEPT: Mutex<BTreeMap<u64, Segment>> = Mutex::new(BTreeMap::new());

impl Segment {
    fn new(standing: &Standing, device: u32, address: u64) -> Result<Self> {
        let unmapped = Arc::<Unmapped>::default();
        let keep = Keep(Arc::clone(&unmapped));
        // SAFETY: The caller has a tensor at the address, so the segment exists now. `segment_freed` ends the share before the segment is freed.
        // Nothing reads or writes the byte through this buffer.
        let byte = unsafe { standing.runtime.device(device)?.adopt::<u8>(DevicePtr::new(address), 1, keep) }?;
        let ticket = byte.share()?.to_bytes().into();
        Ok(Self { byte, ticket, unmapped })
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

/// Ends the share of a segment. Waits until no receiver has it mapped, at most [`LONGEST_WAIT`]. PyTorch's allocator calls it before it frees a
/// segment, with a lock held.
extern "C" fn segment_freed(address: u64) {
    allocating(|| {
        let Some(standing) = STANDING.get() else { return Ok(()) };
        // A child must not reach a lock that a thread of the parent may hold.
        if standing.generation.is_current() {
            let freed = lock(&KEPT).remove(&address);
            if let Some(Segment { byte, unmapped, .. }) = freed {
                drop(byte);
                unmapped.wait();
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
