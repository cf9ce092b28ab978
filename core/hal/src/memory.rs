//! Addresses, and the values that describe device memory, copies and fills.

use std::fmt;
use std::ptr::NonNull;

use crate::id::StreamId;
use crate::ipc::{Transport, Transports};

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
}
