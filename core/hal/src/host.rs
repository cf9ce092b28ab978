//! The traits [`HostAllocator`], raw page-locked host memory, and [`HostObserver`], which follows what the host does with it.

use std::fmt;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::id::EventId;
use crate::memory::{DevicePtr, HostPtr};
use crate::operations::AnyId;

/// Kinds of page-locked memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum HostMemoryKind {
    /// Memory that the CPU caches and every device can use. The device caches it too, if the vendor offers a choice.
    #[default]
    Default,
    /// Memory that the CPU does not cache: fast to write, very slow to read. Needs `write_combined`.
    WriteCombined,
}

/// Options of page-locked memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct HostOptions {
    /// Kind of memory.
    pub kind: HostMemoryKind,
    /// True if `register` gets memory that the CPU may only read. Needs `host_register_read_only`. `allocate` ignores it.
    pub read_only: bool,
}

impl HostOptions {
    /// Returns options of the default kind.
    #[must_use]
    pub const fn new() -> Self {
        Self { kind: HostMemoryKind::Default, read_only: false }
    }

    /// Sets the kind.
    #[must_use]
    pub const fn with_kind(mut self, kind: HostMemoryKind) -> Self {
        self.kind = kind;
        self
    }

    /// Sets whether the memory to register is read-only.
    #[must_use]
    pub const fn with_read_only(mut self, read_only: bool) -> Self {
        self.read_only = read_only;
        self
    }
}

/// Raw page-locked host memory, which devices copy at full speed and without the CPU.
///
/// Core maps, pre-faults, caches and rounds. This trait only makes the vendor's calls. Each call may be slow and may stall
/// the GPU calls of other threads. If every device has `host_register` and a fact `register_piece_bytes` that is not 0, core
/// maps all page-locked memory itself and registers it in pieces of at most that size. Otherwise it uses `allocate`.
///
/// # Safety
/// Core makes slices of the blocks that `allocate` returns. The implementation must therefore keep `host.usable`,
/// `host.aligned` and, for host blocks, `memory.disjoint`. Until `free`, a block has the requested size, is initialized,
/// readable, writable and aligned, and overlaps no other live object.
///
/// Core unmaps the ranges that it registered. So after `unregister` has succeeded, or `register` has failed, neither the
/// vendor nor a device may use the range.
#[cfg_attr(feature = "mockall", mockall::automock)]
pub unsafe trait HostAllocator: Send + Sync + fmt::Debug {
    /// Allocates page-locked memory. Its bytes are initialized, and their values are unspecified.
    ///
    /// - `host.usable`: the CPU can read and write every byte, and every device can copy to and from it.
    /// - `host.aligned`: the address is a multiple of 64.
    /// - `host.zero`: 0 bytes return `InvalidArgument`.
    /// - `host.exhausted`: a request for more than is available returns `OutOfMemory` and changes nothing.
    fn allocate(&self, bytes: usize, options: &HostOptions) -> Result<HostPtr>;

    /// Frees a block of `allocate`.
    ///
    /// - `host.free-counts`: `live_objects().host_allocations` decreases by one.
    ///
    /// # Safety
    /// The caller must pass a block that `allocate` of this allocator returned and that has not been freed. No thread and no
    /// outstanding device work may use the memory.
    unsafe fn free(&self, ptr: HostPtr) -> Result<()>;

    /// Page-locks memory that other code allocated. Needs `host_register`.
    ///
    /// - `host.register-copies`: inside one registration, copies work as with allocated memory, from its first byte to its
    ///   last; a copy that crosses into an adjacent registration need not work.
    /// - `host.register-overlap`: a range that overlaps a registered one or a block of `allocate` returns `InvalidArgument`,
    ///   and nothing changes.
    /// - `host.register-apart`: ranges that do not overlap can be registered, also adjacent ones and several in one page. Each
    ///   works until its own `unregister`, whatever becomes of the others.
    /// - `host.register-read-only`: with `read_only`, the range need not be writable; copies from it work as from other
    ///   registered memory, and another mapping of the same pages stays the same memory.
    ///
    /// # Safety
    /// The caller must pass a mapped, readable and writable range, and must keep it so until `unregister`. With `read_only`,
    /// the range must be mapped and readable, and the caller must ensure that no device writes it.
    unsafe fn register(&self, ptr: HostPtr, bytes: usize, options: &HostOptions) -> Result<()> {
        let _ = (ptr, bytes, options);
        Err(Error::lacks("host_register", "host_register"))
    }

    /// Undoes `register`.
    ///
    /// - `host.unregister-unknown`: an address that was not passed to `register` returns `InvalidPointer`.
    ///
    /// # Safety
    /// The caller must ensure that no device work that uses the range is outstanding.
    unsafe fn unregister(&self, ptr: HostPtr) -> Result<()> {
        let _ = ptr;
        Err(Error::lacks("host_unregister", "host_register"))
    }

    /// Returns the address of page-locked memory on `device`, which may differ from the CPU's.
    ///
    /// - `host.device-address`: it is the CPU's address if the fact `host_address_is_device_address` holds.
    fn device_address(&self, ptr: HostPtr, device: u32) -> Result<DevicePtr>;
}

/// An observer of the host: a part of a backend that follows the order of accesses, such as the race finder of the mock.
///
/// A backend sees only calls. Core reports to the observer the other facts that decide an order. The reports have no effect on
/// devices, cannot fail, and come from the thread that they concern. Backends of vendors have no observer.
pub trait HostObserver: Send + Sync + fmt::Debug {
    /// Notes that the CPU reads or writes page-locked memory now. An access that takes time is noted at its beginning
    /// and at its end.
    fn accessed(&self, ptr: HostPtr, bytes: usize, writes: bool);

    /// Notes that every thread may rely on what the calling thread has learned of an event or a stream: that the work before
    /// it is done. The caller passes the answer on through its own locks.
    fn shared(&self, id: AnyId);

    /// Runs `ask`, which asks the backend about events for other code. An answer that the work is done orders nothing by itself: the
    /// caller passes it on as a [`DoneAnswer`].
    fn ask_for_others(&self, ask: &mut dyn FnMut()) {
        ask();
    }

    /// Returns the answer that the work before an event is done. The caller has it from [`ask_for_others`](Self::ask_for_others), and
    /// the event was not recorded again since. `None` if the observer needs no answers.
    fn answer(&self, event: EventId) -> Option<Arc<dyn DoneAnswer>> {
        let _ = event;
        None
    }
}

/// The answer that some work is done, for the code that waits for this work.
pub trait DoneAnswer: Send + Sync + fmt::Debug {
    /// Notes that the calling thread has the answer from here on.
    fn heard(&self);
}
