//! Addresses, and the values that describe device memory, copies and fills.

use std::fmt;
use std::ptr::NonNull;

use crate::error::{Error, ErrorKind, Result};
use crate::id::StreamId;
use crate::ipc::{Transport, Transports};
use crate::text::counted;

/// An address in a device's memory. The CPU cannot read it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct DevicePtr(u64);

impl DevicePtr {
    /// Returns the address with the number `address`.
    #[must_use]
    pub const fn new(address: u64) -> Self {
        Self(address)
    }

    /// Returns the address as a number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Returns the address `bytes` higher. Saturates at the end of the address space, where no block is.
    #[must_use]
    pub const fn offset(self, bytes: usize) -> Self {
        Self(self.0.saturating_add(bytes as u64))
    }

    /// Returns true if the address is a multiple of `alignment`.
    #[must_use]
    #[inline]
    pub const fn is_aligned_to(self, alignment: usize) -> bool {
        // Nearly all alignments are powers of two, which need no division.
        if alignment.is_power_of_two() {
            self.0 & (alignment as u64 - 1) == 0
        } else {
            alignment != 0 && self.0.is_multiple_of(alignment as u64)
        }
    }
}

impl fmt::Debug for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DevicePtr({:#x})", self.0)
    }
}

/// Writes the address alone, in hexadecimal.
impl fmt::Display for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// An address in the CPU's memory that a device may read and write. Never null.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct HostPtr(NonNull<u8>);

// SAFETY: a `HostPtr` is only an address. Every method that follows it is an `unsafe fn`, whose contract states the access.
unsafe impl Send for HostPtr {}
// SAFETY: as above.
unsafe impl Sync for HostPtr {}

impl HostPtr {
    /// Returns the address of `pointer`.
    #[must_use]
    pub const fn new(pointer: NonNull<u8>) -> Self {
        Self(pointer)
    }

    /// Returns the address as a pointer.
    #[must_use]
    pub const fn as_ptr(self) -> *mut u8 {
        self.0.as_ptr()
    }

    /// Returns the address `bytes` higher. Saturates at the end of the address space, where no block is.
    #[must_use]
    pub fn offset(self, bytes: usize) -> Self {
        Self(self.0.map_addr(|address| address.saturating_add(bytes)))
    }

    /// Returns the address as a number.
    #[must_use]
    pub fn address(self) -> usize {
        self.0.as_ptr().addr()
    }
}

impl fmt::Debug for HostPtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostPtr({:p})", self.0)
    }
}

/// Writes the address alone, in hexadecimal.
impl fmt::Display for HostPtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:p}", self.0)
    }
}

/// Options of an allocation of device memory, for [`Backend::allocate`](crate::Backend::allocate).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct AllocateOptions {
    /// Number of bytes; not 0.
    pub bytes: usize,
    /// Kind of memory.
    pub kind: DeviceMemoryKind,
}

impl AllocateOptions {
    /// Returns options of `bytes` of plain memory.
    #[must_use]
    pub const fn new(bytes: usize) -> Self {
        Self { bytes, kind: DeviceMemoryKind::Plain }
    }

    /// Sets the kind of memory.
    #[must_use]
    pub const fn with_kind(mut self, kind: DeviceMemoryKind) -> Self {
        self.kind = kind;
        self
    }
}

/// Kinds of device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceMemoryKind {
    /// Memory that every stream can use at once. Allocating and freeing it may be slow.
    Plain,
    /// Plain memory that other processes can open by this transport. Vendors fix the transport at the allocation.
    Shareable(Transport),
    /// Memory that is allocated in the order of this stream. Work enqueued on the stream after the call may use it, and so
    /// may work that an event orders after that. See the clause `memory.stream-ordered` of
    /// [`Backend::allocate`](crate::Backend::allocate).
    StreamOrdered(StreamId),
}

/// Options of physical memory, for [`Backend::create_memory`](crate::Backend::create_memory). They cannot change later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PhysicalMemoryOptions {
    /// Number of bytes: a multiple of the capability `mapped_memory_granularity`, and not 0.
    pub bytes: usize,
    /// The transport by which other processes can open the memory; `None` for memory of this process alone. No backend
    /// shares physical memory by [`Transport::Legacy`].
    pub shareable: Option<Transport>,
    /// Whether other devices of the machine, such as network adapters, may access the memory directly (GPUDirect RDMA).
    /// Needs `mapped_memory_rdma`.
    pub rdma: bool,
}

impl PhysicalMemoryOptions {
    /// Returns options of `bytes` of memory of this process alone.
    #[must_use]
    pub const fn new(bytes: usize) -> Self {
        Self { bytes, shareable: None, rdma: false }
    }

    /// Lets other processes open the memory by this transport.
    #[must_use]
    pub const fn with_shareable(mut self, transport: Transport) -> Self {
        self.shareable = Some(transport);
        self
    }

    /// Lets other devices of the machine access the memory directly.
    #[must_use]
    pub const fn with_rdma(mut self) -> Self {
        self.rdma = true;
        self
    }
}

/// Kinds of memory that [`Backend::describe_memory`](crate::Backend::describe_memory) tells apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum RangeKind {
    /// A block of its own: `cudaMalloc`, `hipMalloc`.
    Plain = 0,
    /// Physical memory that is mapped at an address.
    Mapped = 1,
    /// A block of a pool that is allocated and freed in the order of streams: `cudaMallocAsync`.
    StreamOrdered = 2,
    /// Memory that moves between the CPU and the devices: `cudaMallocManaged`, `hipMallocManaged`.
    Managed = 3,
}

/// A range of device memory that any code of this process allocated, as the device's driver knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryRange {
    /// Kind of memory.
    pub kind: RangeKind,
    /// First byte.
    pub base: DevicePtr,
    /// Number of bytes: of the whole block, or of one mapping.
    pub bytes: usize,
    /// Transports by which [`IpcSharing::export_memory`](crate::IpcSharing::export_memory) may export the start of the range.
    pub transports: Transports,
}

impl MemoryRange {
    /// Returns a range that no transport exports.
    #[must_use]
    pub const fn new(kind: RangeKind, base: DevicePtr, bytes: usize) -> Self {
        Self { kind, base, bytes, transports: Transports::NONE }
    }

    /// Sets the transports.
    #[must_use]
    pub const fn with_transports(mut self, transports: Transports) -> Self {
        self.transports = transports;
        self
    }

    /// Returns whether the range contains an address.
    #[must_use]
    pub const fn contains(&self, ptr: DevicePtr) -> bool {
        match ptr.get().checked_sub(self.base.get()) {
            Some(inside) => inside < self.bytes as u64,
            None => false,
        }
    }
}

/// Free and total memory of a device, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes that can be allocated now, if fragmentation permits.
    pub free: u64,
    /// Bytes of the device's memory.
    pub total: u64,
}

/// One side of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Location {
    /// Page-locked memory of the CPU.
    Host(HostPtr),
    /// Memory of the device with this ordinal.
    Device {
        /// Ordinal of the device.
        device: u32,
        /// Address in its memory.
        ptr: DevicePtr,
    },
}

impl Location {
    /// Returns the location `bytes` higher in the same memory. Saturates at the end of the address space.
    #[must_use]
    pub fn offset(self, bytes: usize) -> Self {
        match self {
            Self::Host(ptr) => Self::Host(ptr.offset(bytes)),
            Self::Device { device, ptr } => Self::Device { device, ptr: ptr.offset(bytes) },
        }
    }
}

/// A copy of bytes, for [`Backend::copy`](crate::Backend::copy). Its two sides do not overlap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryCopy {
    /// Destination.
    pub dst: Location,
    /// Source.
    pub src: Location,
    /// Number of bytes. With 0, the copy succeeds and copies nothing, whatever the addresses are.
    pub bytes: usize,
}

impl MemoryCopy {
    /// Returns a copy of `bytes` from `src` to `dst`.
    #[must_use]
    pub const fn new(dst: Location, src: Location, bytes: usize) -> Self {
        Self { dst, src, bytes }
    }
}

/// The shape of a two-dimensional copy: `height` rows of `width` bytes. The rows of each side begin at equal distances, its pitch.
///
/// ```
/// use highwater_hal::CopyShape;
///
/// // 3 rows of 100 bytes, which begin 256 bytes apart in the source and without gaps in the destination.
/// let shape = CopyShape::new(100, 3).with_src_pitch(256);
/// assert_eq!((shape.src_bytes(), shape.dst_bytes()), (Some(612), Some(300)));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct CopyShape {
    /// Bytes of each row. With 0, the copy succeeds and copies nothing.
    pub width: usize,
    /// Number of rows. With 0, the copy succeeds and copies nothing.
    pub height: usize,
    /// Bytes from the beginning of one row to that of the next in the source; at least `width`.
    pub src_pitch: usize,
    /// The same in the destination.
    pub dst_pitch: usize,
}

impl CopyShape {
    /// Returns the shape of `height` rows of `width` bytes, without gaps on either side.
    #[must_use]
    pub const fn new(width: usize, height: usize) -> Self {
        Self { width, height, src_pitch: width, dst_pitch: width }
    }

    /// Sets the bytes between the beginnings of rows in the source.
    #[must_use]
    pub const fn with_src_pitch(mut self, bytes: usize) -> Self {
        self.src_pitch = bytes;
        self
    }

    /// Sets the bytes between the beginnings of rows in the destination.
    #[must_use]
    pub const fn with_dst_pitch(mut self, bytes: usize) -> Self {
        self.dst_pitch = bytes;
        self
    }

    /// Returns true if there is nothing to copy.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.width == 0 || self.height == 0
    }

    /// Returns the bytes from the first to the last of the source. `None` if they exceed the address space.
    #[must_use]
    pub const fn src_bytes(&self) -> Option<usize> {
        self.extent(self.src_pitch)
    }

    /// Returns the bytes from the first to the last of the destination. `None` if they exceed the address space.
    #[must_use]
    pub const fn dst_bytes(&self) -> Option<usize> {
        self.extent(self.dst_pitch)
    }

    const fn extent(&self, pitch: usize) -> Option<usize> {
        if self.is_empty() {
            return Some(0);
        }
        match (self.height - 1).checked_mul(pitch) {
            Some(before_last) => before_last.checked_add(self.width),
            None => None,
        }
    }

    /// Returns where each row begins in the destination and in the source, in bytes behind the first.
    pub fn rows(self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.height).map(move |row| (row.saturating_mul(self.dst_pitch), row.saturating_mul(self.src_pitch)))
    }

    /// Returns the shape in words, for messages.
    #[doc(hidden)]
    #[must_use]
    pub fn described(&self) -> String {
        let Self { width, height, src_pitch, dst_pitch } = *self;
        format!("height {height}, width {width}, pitches {src_pitch} and {dst_pitch}")
    }

    /// Checks that rows of one side do not overlap.
    ///
    /// # Errors
    /// `InvalidArgument` if a pitch is less than the width.
    pub fn check(&self, operation: &'static str) -> Result<()> {
        for (side, pitch) in [("source", self.src_pitch), ("destination", self.dst_pitch)] {
            if pitch < self.width {
                let [pitch, width] = [pitch, self.width].map(|bytes| counted(bytes, "byte"));
                let message = format!("the pitch of the {side} is {pitch}, expected at least the width of {width}");
                return Err(Error::new(ErrorKind::InvalidArgument, operation, message)
                    .with_hint("pass the bytes from the beginning of one row to that of the next"));
            }
        }
        Ok(())
    }

    /// Returns true if a row at `src` shares a byte with a row at `dst`, in the same memory. The shape must pass [`check`](Self::check).
    #[must_use]
    pub fn overlaps(&self, dst: u64, src: u64) -> bool {
        let beyond =
            |start: u64, bytes: Option<usize>| u128::from(start) + bytes.map_or(u128::MAX >> 1, |bytes| bytes as u128);
        if beyond(dst, self.dst_bytes()) <= u128::from(src) || beyond(src, self.src_bytes()) <= u128::from(dst) {
            return false;
        }
        // Rows ascend on both sides, so the lower of two rows that are apart is apart from all later rows, too.
        let begin = |start: u64, row: usize, pitch: usize| u128::from(start) + row as u128 * pitch as u128;
        let (mut to, mut from) = (0, 0);
        while to < self.height && from < self.height && self.width > 0 {
            let (dst, src) = (begin(dst, to, self.dst_pitch), begin(src, from, self.src_pitch));
            if dst.abs_diff(src) < self.width as u128 {
                return true;
            }
            if dst < src { to += 1 } else { from += 1 }
        }
        false
    }
}

/// A two-dimensional copy, for [`Backend::copy_2d`](crate::Backend::copy_2d). No row of one side overlaps a row of the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryCopy2d {
    /// The first row of the destination.
    pub dst: Location,
    /// The first row of the source.
    pub src: Location,
    /// The rows and their pitches.
    pub shape: CopyShape,
}

impl MemoryCopy2d {
    /// Returns a copy of rows from `src` to `dst`.
    #[must_use]
    pub const fn new(dst: Location, src: Location, shape: CopyShape) -> Self {
        Self { dst, src, shape }
    }

    /// Makes the copy from flat ones, for devices without a call for it: `copy` receives one for each row. If there is nothing to
    /// copy, or the shape is refused, it receives one of 0 bytes, which checks the rest of the arguments first.
    ///
    /// # Errors
    /// The error of the first copy that fails, and `InvalidArgument` as [`CopyShape::check`]. The copies before it are made.
    pub fn in_rows(&self, mut copy: impl FnMut(&MemoryCopy) -> Result<()>) -> Result<()> {
        let Self { dst, src, shape } = *self;
        let checked = shape.check("copy_2d");
        if shape.is_empty() || checked.is_err() {
            // Copies nothing, and returns the errors that take precedence: those of the process, the stream and the devices.
            copy(&MemoryCopy::new(dst, src, 0))?;
            return checked;
        }
        shape.rows().try_for_each(|(to, from)| copy(&MemoryCopy::new(dst.offset(to), src.offset(from), shape.width)))
    }
}

/// A fill of device memory with one element, for [`Backend::fill`](crate::Backend::fill).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryFill {
    /// Ordinal of the device, to which the stream belongs.
    pub device: u32,
    /// First byte; a multiple of the pattern's size.
    pub dst: DevicePtr,
    /// The element.
    pub pattern: FillPattern,
    /// Number of elements. With 0, the fill succeeds and writes nothing, whatever the address is.
    pub count: usize,
}

impl MemoryFill {
    /// Returns a fill of `count` elements at `dst`.
    #[must_use]
    pub const fn new(device: u32, dst: DevicePtr, pattern: FillPattern, count: usize) -> Self {
        Self { device, dst, pattern, count }
    }
}

/// The element of a fill. Both vendors offer 1, 2 and 4 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FillPattern {
    /// One byte.
    U8(u8),
    /// Two bytes.
    U16(u16),
    /// Four bytes.
    U32(u32),
}

impl FillPattern {
    /// Returns the size of the element in bytes.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::U8(_) => 1,
            Self::U16(_) => 2,
            Self::U32(_) => 4,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_and_alignment_of_device_addresses() {
        let ptr = DevicePtr::new(0x1000);
        assert_eq!(ptr.offset(24).get(), 0x1018);
        assert!(ptr.is_aligned_to(256) && !ptr.offset(8).is_aligned_to(256));
        assert!(!ptr.is_aligned_to(0));
        assert_eq!(DevicePtr::new(u64::MAX).offset(8).get(), u64::MAX);
    }

    #[test]
    fn rows_overlap_if_they_share_a_byte() {
        for (width, height, pitches) in [(3, 4, (3, 3)), (2, 3, (5, 5)), (2, 4, (3, 7)), (1, 5, (4, 2)), (4, 1, (4, 9))]
        {
            let shape = CopyShape::new(width, height).with_dst_pitch(pitches.0).with_src_pitch(pitches.1);
            for distance in 0..64_u64 {
                let (dst, src) = (distance, 32);
                let bytes = |start: u64, row: usize| start as usize + row..start as usize + row + width;
                let shared = shape.rows().any(|(to, _)| {
                    let to = bytes(dst, to);
                    shape.rows().any(|(_, from)| bytes(src, from).any(|byte| to.contains(&byte)))
                });
                assert_eq!(shape.overlaps(dst, src), shared, "{shape:?} at {dst} and {src}");
            }
        }
        assert!(!CopyShape::new(0, 9).overlaps(5, 5) && !CopyShape::new(9, 0).overlaps(5, 5));
        let endless = CopyShape::new(1, usize::MAX).with_src_pitch(usize::MAX);
        assert_eq!((endless.src_bytes(), endless.overlaps(0, 0)), (None, true));
    }
}
