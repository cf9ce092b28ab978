//! Segments of PyTorch's allocator that receivers keep mapped.
//!
//! To map a segment takes several times as long as to send a tensor of it. A mapping stays in a receiver while the sender shares the memory. So
//! the sender also shares one byte of the segment itself, for as long as the segment exists. Receivers open it once. PyTorch reports that it
//! frees a segment before it does so (`_torch_segments.cpp`). The share of the segment ends then, and the free waits until each receiver has
//! unmapped it, because a free under a mapping is undefined.

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

/// The bytes of a ticket with its transport, and with the offset of its range in the allocation.
const TRANSPORT: Range<usize> = 12..16;
const OFFSET: Range<usize> = 96..104;
const LEGACY: [u8; 4] = [0; 4];

/// The time that a free waits for receivers. Each free that waits in vain halves it, so that a stopped receiver does not hold up PyTorch.
const LONGEST_WAIT: Duration = Duration::from_millis(500);
const SHORTEST_WAIT: Duration = Duration::from_millis(1);
static WAIT_MICROSECONDS: AtomicU64 = AtomicU64::new(LONGEST_WAIT.as_micros() as u64);

/// Whether no receiver has a segment mapped any more.
#[derive(Default)]
struct Unmapped(Mutex<bool>, Condvar);

impl Unmapped {
    /// Waits until no receiver has the segment mapped.
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

/// Returns the start of the segment in which the memory of a storage begins. Returns 0 for memory that is not PyTorch's.
type SegmentOf = extern "C" fn(u64) -> u64;
static SEGMENT_OF: OnceLock<SegmentOf> = OnceLock::new();

/// By address. Lives as long as the runtime, which is the process.
static KEPT: Mutex<BTreeMap<u64, Segment>> = Mutex::new(BTreeMap::new());

impl Segment {
    fn new(standing: &Standing, device: u32, address: u64) -> Result<Self> {
        let unmapped = Arc::<Unmapped>::default();
        let keep = Keep(Arc::clone(&unmapped));
        // SAFETY: The caller has a tensor at the address, so the segment exists now. `segment_freed` ends the share before the segment is freed.
        // Nothing uses the byte.
        let byte = unsafe { standing.runtime.device(device)?.adopt::<u8>(DevicePtr::new(address), 1, keep) }?;
        let ticket = byte.share()?.to_bytes().into();
        Ok(Self { byte, ticket, unmapped })
    }
}

/// Returns the ticket of the segment in which a storage begins, whose own ticket is `ticket`. Returns `None` for memory that receivers do not keep
/// mapped: it has no legacy handle, PyTorch does not report its free, or the share of the segment fails.
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
        let second = if is_first { kept.insert(base, made) } else { Some(made) };
        // Dropped after the lock.
        drop(kept);
        drop(second);
        Some(ticket)
    };
    let found = known().or_else(|| py.detach(make))?;
    Some(PyBytes::new(py, &found))
}

/// Ends the share of a segment, and waits until no receiver has it mapped. PyTorch calls it before it frees a segment.
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

/// Takes the address of `highwater_segment_of`, and returns the one of the function that `highwater_watch_segments` takes.
///
/// # Safety
/// The caller must pass the address of such a function, which exists as long as the process.
#[pyfunction]
pub(crate) unsafe fn segment_functions(segment_of: usize) -> usize {
    // SAFETY: As the caller promises.
    let function = unsafe { std::mem::transmute::<usize, SegmentOf>(segment_of) };
    // A second installation passes the same one.
    let _ = SEGMENT_OF.set(function);
    segment_freed as *const () as usize
}
