//! The trait [`HostAllocator`]: raw page-locked host memory.

use std::fmt;

use crate::error::{Error, Result};
use crate::memory::{DevicePtr, HostPtr};

/// Kinds of page-locked memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum HostMemoryKind {
    /// Cached by the CPU, usable from every device, and cached by the device where the vendor offers a choice.
    #[default]
    Default,
    /// Not cached by the CPU: quick to write, very slow to read. Needs `write_combined`.
    WriteCombined,
}

/// How to make page-locked memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct HostOptions {
    /// Which kind.
    pub kind: HostMemoryKind,
}

impl HostOptions {
    /// The default kind.
    #[must_use]
    pub const fn new() -> Self {
        Self { kind: HostMemoryKind::Default }
    }

    /// The same with another kind.
    #[must_use]
    pub const fn with_kind(mut self, kind: HostMemoryKind) -> Self {
        self.kind = kind;
        self
    }
}

/// Raw page-locked host memory: memory that devices copy from and to at full speed and without the CPU.
///
/// Mapping, pre-faulting, caching and rounding are core's; this trait only makes the vendor's calls. Every call may be
/// slow and may stall the GPU calls of other threads. Where the fact `register_piece_bytes` is not 0, core has small blocks
/// from `allocate`, and maps large ones itself and registers them in pieces of that size.
///
/// # Safety
/// Core makes slices of what `allocate` gives. So an implementation must keep `host.usable`, `host.aligned` and
/// `memory.disjoint` (for host blocks): the block is as large as asked for, initialised, readable and writable, aligned,
/// apart from every other live object, and stays so until `free`. Core unmaps what it has registered: so once `unregister` has
/// succeeded, and where `register` was refused, neither the vendor nor a device uses the range.
#[cfg_attr(feature = "mockall", mockall::automock)]
pub unsafe trait HostAllocator: Send + Sync + fmt::Debug {
    /// Allocates page-locked memory with unspecified contents.
    ///
    /// - `host.usable`: the CPU can read and write every byte; every device can copy to and from it.
    /// - `host.aligned`: the address is a multiple of 64.
    /// - `host.zero`: 0 bytes give `InvalidArgument`.
    /// - `host.exhausted`: more than there is gives `OutOfMemory`, and nothing changes.
    fn allocate(&self, bytes: usize, options: &HostOptions) -> Result<HostPtr>;

    /// Frees what `allocate` gave.
    ///
    /// - `host.free-counts`: `live_objects().host_allocations` goes down by one.
    ///
    /// # Safety
    /// `ptr` came from `allocate` of the same allocator, has not been freed, and nobody uses the memory any more,
    /// outstanding device work included.
    unsafe fn free(&self, ptr: HostPtr) -> Result<()>;

    /// Page-locks memory that somebody else allocated. Needs `host_register`.
    ///
    /// - `host.register-copies`: within one registration, registered memory is copied as allocated memory is, from its first
    ///   byte to its last; from one registration into another that touches it, no copy has to work.
    /// - `host.register-overlap`: a range that overlaps one already registered gives `InvalidArgument`.
    ///
    /// # Safety
    /// The range is mapped, readable and writable, and stays so until `unregister`.
    unsafe fn register(&self, ptr: HostPtr, bytes: usize, options: &HostOptions) -> Result<()> {
        let _ = (ptr, bytes, options);
        Err(Error::lacks("register", "host_register"))
    }

    /// Undoes `register`.
    ///
    /// - `host.unregister-unknown`: an address that `register` was not called with gives `InvalidPointer`.
    ///
    /// # Safety
    /// No device work that uses the range is outstanding.
    unsafe fn unregister(&self, ptr: HostPtr) -> Result<()> {
        let _ = ptr;
        Err(Error::lacks("unregister", "host_register"))
    }

    /// The address under which `device` sees page-locked memory; not always the CPU's.
    ///
    /// - `host.device-address`: the CPU's address where the fact `host_address_is_device_address` holds.
    fn device_address(&self, ptr: HostPtr, device: u32) -> Result<DevicePtr>;
}
