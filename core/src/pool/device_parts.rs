//! The device memory behind the areas of streams: parts that the backend made, and where they lie.
//!
//! With mapped memory, a part is physical memory of one granule, 2 MiB. An area lies in reserved addresses, grows at its end by
//! parts, and gives any free part away, to be mapped in another place. Without mapped memory, a part is an allocation of the
//! backend. It has one address for its whole life.
//!
//! No lock is held during a call of the backend.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::area::Piece;
use super::device_options::DeviceMemoryOptions;
use super::ranges::{GRANULE_PAGES, PAGE};
use crate::ledger::DeviceBlockInfo;
use crate::services::Services;
use highwater_hal::{AllocateOptions, DevicePtr, Error, ErrorKind, PhysicalMemoryId, PhysicalMemoryOptions, Result};

/// Bytes of a part of mapped memory, the unit by which an area grows.
const PART: usize = GRANULE_PAGES as usize * PAGE;
/// Bytes of the first reservation of a stream. Each further one is twice as large, up to the device's memory.
const FIRST_RESERVATION: usize = 1 << 30;

/// Memory that the backend made in one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// An allocation.
    Allocated(Piece<DevicePtr>),
    /// Physical memory that is not mapped. `has_pattern` in the test mode, if it was free memory of a stream.
    Physical { memory: PhysicalMemoryId, bytes: usize, has_pattern: bool },
}

impl Part {
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Allocated(piece) => piece.bytes,
            Self::Physical { bytes, .. } => *bytes,
        }
    }
}

/// Reserved addresses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reservation {
    start: DevicePtr,
    bytes: usize,
}

impl Reservation {
    fn end(&self) -> u64 {
        self.start.get() + self.bytes as u64
    }

    fn contains(&self, ptr: DevicePtr) -> bool {
        self.start <= ptr && ptr.get() < self.end()
    }
}

/// Makes and releases the parts of one device.
pub(crate) struct Parts {
    services: Arc<Services>,
    device: u32,
    /// The bytes of a part of mapped memory. `None` if the device has no mapped memory, or the program asked for allocations.
    granularity: Option<usize>,
    cap: Option<u64>,
    rdma: bool,
    pub(crate) counts: PartCounts,
}

/// The counts of parts. Only statistics and the cap read them, so each is changed and read relaxed.
#[derive(Debug, Default)]
pub(crate) struct PartCounts {
    pub(crate) held_bytes: AtomicU64,
    pub(crate) peak_held_bytes: AtomicU64,
    pub(crate) made: AtomicU64,
    pub(crate) released: AtomicU64,
    pub(crate) moved_bytes: AtomicU64,
}

impl PartCounts {
    fn note_made(&self, bytes: usize) {
        let held = self.held_bytes.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
        self.peak_held_bytes.fetch_max(held, Ordering::Relaxed);
        self.made.fetch_add(1, Ordering::Relaxed);
    }

    fn note_released(&self, bytes: usize) {
        self.held_bytes.fetch_sub(bytes as u64, Ordering::Relaxed);
        self.released.fetch_add(1, Ordering::Relaxed);
    }
}

impl Parts {
    pub(crate) fn new(services: Arc<Services>, device: u32, options: &DeviceMemoryOptions) -> Self {
        let capabilities = &services.device(device).capabilities;
        let granularity = capabilities.mapped_memory_granularity;
        let divides = granularity > 0 && PART.is_multiple_of(granularity);
        let can_rdma = !options.rdma || capabilities.mapped_memory_rdma;
        let is_mapped = !options.plain_allocations && capabilities.mapped_memory && divides && can_rdma;
        let (cap, rdma, counts) = (options.cap_bytes, options.rdma, PartCounts::default());
        Self { granularity: is_mapped.then_some(PART), services, device, cap, rdma, counts }
    }

    /// Returns the bytes of each part, if all have the same.
    pub(crate) fn granularity(&self) -> Option<usize> {
        self.granularity
    }

    /// Allocates a part of so many bytes, at an address that the backend chooses.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<Part> {
        self.check_cap(bytes)?;
        let ptr = self.services.backend.allocate(self.device, &AllocateOptions::new(bytes))?;
        let info = DeviceBlockInfo { device: self.device, base: ptr, bytes };
        self.services.ledger.insert_divided(info)?;
        self.counts.note_made(bytes);
        Ok(Part::Allocated(Piece { ptr, bytes }))
    }

    /// Creates a part of physical memory.
    pub(crate) fn create(&self) -> Result<Part> {
        let bytes = self.granularity.unwrap_or(0);
        self.check_cap(bytes)?;
        let options = PhysicalMemoryOptions::new(bytes);
        let options = if self.rdma { options.with_rdma() } else { options };
        let memory = self.services.backend.create_memory(self.device, &options)?;
        self.counts.note_made(bytes);
        Ok(Part::Physical { memory, bytes, has_pattern: false })
    }

    /// Notes that a part was taken from one place for another.
    pub(crate) fn note_moved(&self, part: &Part) {
        self.counts.moved_bytes.fetch_add(part.bytes() as u64, Ordering::Relaxed);
    }

    /// Refuses a part that does not fit below the cap. One thread at a time makes parts.
    fn check_cap(&self, bytes: usize) -> Result<()> {
        let held = self.counts.held_bytes.load(Ordering::Relaxed);
        match self.cap {
            Some(cap) if held.saturating_add(bytes as u64) > cap => {
                let message = format!(
                    "the streams of device {} hold {held} bytes and need {bytes} more; the cap is {cap}",
                    self.device
                );
                Err(Error::new(ErrorKind::OutOfMemory, "allocate", message)
                    .with_hint("drop buffers, or raise `DeviceMemoryOptions::with_cap_bytes`"))
            }
            _ => Ok(()),
        }
    }

    /// Releases a part.
    ///
    /// # Safety
    /// No work uses it, and it is not mapped.
    pub(crate) unsafe fn release(&self, part: Part) -> Result<()> {
        // SAFETY: As the caller promises.
        unsafe { self.release_uncounted(part) }?;
        self.counts.note_released(part.bytes());
        Ok(())
    }

    /// As [`Parts::release`].
    unsafe fn release_uncounted(&self, part: Part) -> Result<()> {
        match part {
            Part::Physical { memory, .. } => self.services.backend.destroy_memory(memory),
            Part::Allocated(Piece { ptr, .. }) => {
                let block = self.services.ledger.remove_device(self.device, ptr)?;
                // SAFETY: It came from `allocate` for this device. The caller promises the rest.
                unsafe { self.services.backend.free(self.device, ptr, None) }.inspect_err(|_| {
                    // The block counts as still allocated. The range is free in the ledger, so this cannot fail.
                    let _ = self.services.ledger.insert_divided(block);
                })
            }
        }
    }

    /// Returns the address of a growth by `more` bytes behind the last piece, or of `whole` bytes elsewhere, with its bytes.
    /// Reserves addresses if no reservation has room.
    pub(crate) fn place(
        &self,
        reservations: &mut Vec<Reservation>,
        last: Option<Piece<DevicePtr>>,
        (more, whole): (usize, usize),
    ) -> Result<(DevicePtr, usize)> {
        let current = last.and_then(|last| reservations.iter().position(|reservation| reservation.contains(last.ptr)));
        if let (Some(current), Some(last)) = (current, last) {
            let end = last.ptr.offset(last.bytes);
            if reservations[current].end() - end.get() >= more as u64 {
                return Ok((end, more));
            }
        }
        // The reservations behind that of the last piece are empty.
        let empty = &reservations[current.map_or(0, |current| current + 1)..];
        if let Some(reservation) = empty.iter().find(|reservation| reservation.bytes >= whole) {
            return Ok((reservation.start, whole));
        }
        let total = usize::try_from(self.services.device(self.device).info.memory_bytes).unwrap_or(usize::MAX);
        let granularity = self.granularity.unwrap_or(1);
        let wanted = reservations.last().map_or(FIRST_RESERVATION, |last| last.bytes.saturating_mul(2)).min(total);
        let bytes = wanted.max(whole).checked_next_multiple_of(granularity).ok_or_else(|| too_large(whole))?;
        let start = self.services.backend.reserve_addresses(self.device, bytes)?;
        reservations.push(Reservation { start, bytes });
        Ok((start, whole))
    }

    /// Maps parts one after another at an address, for every device that can reach the memory. On an error, nothing is mapped.
    ///
    /// # Safety
    /// The addresses are in a reservation of the caller, and nothing is mapped there.
    pub(crate) unsafe fn map(&self, ptr: DevicePtr, parts: &[Part]) -> Result<()> {
        let backend = &self.services.backend;
        let mut mapped = 0;
        let map = || {
            for part in parts {
                let Part::Physical { memory, bytes, .. } = *part else { continue };
                // SAFETY: As the caller promises.
                unsafe { backend.map_memory(self.device, ptr.offset(mapped), memory) }?;
                mapped += bytes;
            }
            // SAFETY: As above: these are the mappings just made.
            unsafe { backend.set_memory_access(self.device, ptr, mapped, self.device) }
        };
        let mut map = map;
        let result = map();
        if result.is_err() && mapped > 0 {
            // SAFETY: Just mapped, and known to no other code.
            let unmapped = unsafe { backend.unmap_memory(self.device, ptr, mapped) };
            // Then the parts stay mapped there and are lost to the pool; the refusal is counted.
            let _ = self.services.note(unmapped);
        }
        result?;
        self.open_to_peers(ptr, mapped);
        Ok(())
    }

    /// Gives the other devices access, where they can have it. A device without access copies through its own.
    fn open_to_peers(&self, ptr: DevicePtr, bytes: usize) {
        for peer in self.services.devices.iter().filter(|peer| peer.info.ordinal != self.device) {
            if !peer.capabilities.peer_copy {
                continue;
            }
            // SAFETY: Just mapped, and known to no other code.
            let opened = unsafe { self.services.backend.set_memory_access(self.device, ptr, bytes, peer.info.ordinal) };
            if let Err(error) = opened {
                tracing::debug!("device {} has no access to memory of {}: {error}", peer.info.ordinal, self.device);
            }
        }
    }

    /// Unmaps the memory at an address.
    ///
    /// # Safety
    /// No work uses it.
    pub(crate) unsafe fn unmap(&self, piece: Piece<DevicePtr>) -> Result<()> {
        // SAFETY: One mapping of this pool. The caller promises the rest.
        unsafe { self.services.backend.unmap_memory(self.device, piece.ptr, piece.bytes) }
    }

    /// Gives reserved addresses back.
    ///
    /// # Safety
    /// Nothing is mapped there.
    pub(crate) unsafe fn end_reservation(&self, reservation: Reservation) -> Result<()> {
        // SAFETY: As the caller promises.
        unsafe { self.services.backend.free_addresses(self.device, reservation.start, reservation.bytes) }
    }
}

pub(crate) fn too_large(bytes: usize) -> Error {
    Error::new(ErrorKind::OutOfMemory, "allocate", format!("no device has {bytes} bytes of memory"))
}
