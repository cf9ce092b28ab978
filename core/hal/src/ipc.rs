//! The trait [`IpcSharing`]: raw handles of device memory and events for other processes.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use crate::error::{Error, Result};
use crate::id::{EventId, PhysicalMemoryId};
use crate::memory::DevicePtr;

/// The way in which a memory handle reaches another process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Transport {
    /// 64 bytes that name a whole plain allocation of a process on this machine (`cuIpc*`, `hipIpc*`).
    Legacy = 0,
    /// A descriptor that is sent over a local socket. The memory outlives its exporter.
    Descriptor = 1,
    /// 64 bytes that are valid in every node of the fabric.
    Fabric = 2,
}

/// A set of [`Transport`]s.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
#[repr(transparent)]
pub struct Transports(u32);

impl fmt::Debug for Transports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = [Transport::Legacy, Transport::Descriptor, Transport::Fabric];
        f.debug_set().entries(all.iter().filter(|transport| self.contains(**transport))).finish()
    }
}

impl Transports {
    /// The empty set.
    pub const NONE: Self = Self(0);

    /// Returns the set with `transport` added.
    #[must_use]
    pub const fn with(self, transport: Transport) -> Self {
        Self(self.0 | 1 << transport as u32)
    }

    /// Returns true if `transport` is in the set.
    #[must_use]
    pub const fn contains(self, transport: Transport) -> bool {
        self.0 & (1 << transport as u32) != 0
    }

    /// Returns the transports that are in both sets.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Returns true if the set is empty.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// A descriptor of the operating system that belongs to a handle. Dropping the last copy closes it.
#[derive(Debug, Clone)]
pub struct Descriptor(Arc<SharedDescriptor>);

/// The state that the copies of a [`Descriptor`] share.
#[derive(Debug)]
struct SharedDescriptor {
    descriptor: OwnedFd,
    /// Dropped after the descriptor is closed.
    _companion: Option<Box<dyn Companion>>,
}

impl Descriptor {
    /// Takes ownership of a descriptor.
    #[must_use]
    pub fn new(descriptor: OwnedFd) -> Self {
        Self(Arc::new(SharedDescriptor { descriptor, _companion: None }))
    }

    /// Takes ownership of a descriptor. Drops `companion` after the last copy is closed.
    #[must_use]
    pub fn with_companion(descriptor: OwnedFd, companion: impl fmt::Debug + Send + Sync + 'static) -> Self {
        Self(Arc::new(SharedDescriptor { descriptor, _companion: Some(Box::new(companion)) }))
    }

    /// Returns a watch, which reports whether copies of the descriptor are alive.
    #[must_use]
    pub fn watch(&self) -> DescriptorWatch {
        DescriptorWatch(Arc::downgrade(&self.0))
    }
}

/// Reports whether copies of a [`Descriptor`] are alive, and keeps none alive itself.
#[derive(Debug, Clone)]
pub struct DescriptorWatch(Weak<SharedDescriptor>);

impl DescriptorWatch {
    /// Returns whether a copy of the descriptor is alive.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.0.strong_count() > 0
    }
}

/// An object that a descriptor keeps until it is closed.
trait Companion: fmt::Debug + Send + Sync {}

impl<T: fmt::Debug + Send + Sync> Companion for T {}

impl AsRef<OwnedFd> for Descriptor {
    fn as_ref(&self) -> &OwnedFd {
        &self.0.descriptor
    }
}

/// A handle of device memory that another process can open.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct MemoryHandle {
    /// Transport of the handle.
    pub transport: Transport,
    /// UUID of the device that owns the memory, because ordinals differ between processes.
    pub device_uuid: [u8; 16],
    /// Bytes of the whole allocation.
    pub bytes: u64,
    /// The vendor's handle.
    pub payload: [u8; 64],
    /// The descriptor that is sent with the payload, for [`Transport::Descriptor`].
    pub descriptor: Option<Descriptor>,
}

impl MemoryHandle {
    /// Returns a handle without a descriptor.
    #[must_use]
    pub const fn new(transport: Transport, device_uuid: [u8; 16], bytes: u64, payload: [u8; 64]) -> Self {
        Self { transport, device_uuid, bytes, payload, descriptor: None }
    }

    /// Returns a handle of mapped memory that other code exported as a descriptor, by the vendor's own call. Only
    /// [`IpcSharing::import_memory`] takes it, where the vendor has such descriptors. The vendor alone checks it.
    #[must_use]
    pub fn of_other_code(device_uuid: [u8; 16], bytes: u64, descriptor: Descriptor) -> Self {
        Self::new(Transport::Descriptor, device_uuid, bytes, OF_OTHER_CODE).with_descriptor(descriptor)
    }

    /// Returns whether [`of_other_code`](Self::of_other_code) made the handle.
    #[must_use]
    pub fn is_of_other_code(&self) -> bool {
        self.transport == Transport::Descriptor && self.payload == OF_OTHER_CODE && self.descriptor.is_some()
    }

    /// Adds a descriptor.
    #[must_use]
    pub fn with_descriptor(mut self, descriptor: Descriptor) -> Self {
        self.descriptor = Some(descriptor);
        self
    }
}

/// The payload of handles that other code exported.
const OF_OTHER_CODE: [u8; 64] = *b"a descriptor of the vendor, which other code than this exported.";

/// A handle of an event that another process can open.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct EventHandle {
    /// UUID of the event's device.
    pub device_uuid: [u8; 16],
    /// The vendor's handle.
    pub payload: [u8; 64],
    /// The descriptor that is sent with the payload, if the vendor's handle alone is not enough.
    pub descriptor: Option<Descriptor>,
}

impl EventHandle {
    /// Returns a handle of an event of that device.
    #[must_use]
    pub const fn new(device_uuid: [u8; 16], payload: [u8; 64]) -> Self {
        Self { device_uuid, payload, descriptor: None }
    }

    /// Adds a descriptor.
    #[must_use]
    pub fn with_descriptor(mut self, descriptor: Descriptor) -> Self {
        self.descriptor = Some(descriptor);
        self
    }
}

/// Raw export, open and close of memory and events. Core counts, orders and caches.
///
/// - `ipc.shared-bytes`: each process reads the bytes that the other writes to the memory.
#[cfg_attr(feature = "mockall", mockall::automock)]
pub trait IpcSharing: Send + Sync + fmt::Debug {
    /// Returns a handle of a whole allocation, or of physical memory that is mapped at `ptr`.
    ///
    /// - `ipc.export-shareable`: memory that was not made shareable by this transport returns `InvalidArgument`.
    /// - `ipc.export-transport`: a transport outside the capability `ipc_transports` returns `Unsupported`.
    /// - `ipc.descriptor-keeps`: with [`Transport::Descriptor`], the descriptor keeps the memory. Each process that receives the
    ///   handle can open the memory after its exporter has ended.
    /// - `ipc.free-keeps`: with [`Transport::Descriptor`], memory that its exporter frees, or destroys and unmaps, keeps its bytes for
    ///   each process that has it open or has its handle. No other allocation gets the bytes until the last mapping and the last descriptor have ended.
    ///
    /// # Safety
    /// The caller must pass a block that `allocate` returned for this device and that has not been freed, the address of
    /// mapped memory of this device, or the start of a range that `describe_memory` returned for this device. The memory must
    /// stay allocated during the call.
    unsafe fn export_memory(&self, device: u32, ptr: DevicePtr, transport: Transport) -> Result<MemoryHandle>;

    /// Maps memory of another process for work of `device`.
    ///
    /// - `ipc.open-again`: a second open for the same device returns the same address and is counted.
    /// - `ipc.open-outlives`: with [`Transport::Descriptor`], the mapping keeps the memory after its exporter has ended.
    /// - `ipc.open-checked`: a handle that no exporter made, of another device's UUID or without the descriptor that its
    ///   transport needs, returns `InvalidArgument`, and nothing is mapped.
    fn open_memory(&self, device: u32, handle: &MemoryHandle) -> Result<DevicePtr>;

    /// Undoes one `open_memory`. A call that fails leaves the memory open, and the caller may repeat it.
    ///
    /// - `ipc.close-unknown`: an address that is not open returns `InvalidPointer`.
    ///
    /// # Safety
    /// The caller must ensure that no work that uses the mapping is outstanding, unless another open keeps the mapping.
    unsafe fn close_memory(&self, device: u32, ptr: DevicePtr) -> Result<()>;

    /// Opens mapped memory of another process without mapping it, so that the caller can map several handles without a gap
    /// between them. `destroy_memory` gives it back. Needs `mapped_memory` and `foreign_memory`.
    ///
    /// - `ipc.import-maps`: once mapped, it is the memory of the handle: each process reads the bytes that the other writes.
    /// - `ipc.import-checked`: a handle that no exporter made, of another device's UUID, without the descriptor that its
    ///   transport needs, or of memory that is not mapped memory, returns `InvalidArgument`, and nothing is opened. The handles of
    ///   [`Transport::Fabric`] do not tell memory of `allocate` from mapped memory if the size is one of mapped memory.
    fn import_memory(&self, device: u32, handle: &MemoryHandle) -> Result<PhysicalMemoryId> {
        let _ = (device, handle);
        Err(Error::lacks("import_memory", "foreign_memory"))
    }

    /// Returns a handle of an event that was created with `interprocess`.
    ///
    /// - `ipc.export-event`: an event created without `interprocess` returns `InvalidArgument`.
    fn export_event(&self, event: EventId) -> Result<EventHandle>;

    /// Opens an event of another process. `destroy_event` closes it.
    ///
    /// - `ipc.event-orders`: work that waits for the opened event runs after the other process's work before the record.
    /// - `ipc.event-peer-ends`: if the fact `event_waits_end_with_peer` holds, waits end when the recording process ends
    ///   before the record is reached.
    fn open_event(&self, device: u32, handle: &EventHandle) -> Result<EventId>;
}
