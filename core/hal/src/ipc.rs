//! The trait [`IpcSharing`]: raw handles of device memory and events for other processes.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use crate::error::Result;
use crate::id::EventId;
use crate::memory::DevicePtr;

/// How a memory handle travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Transport {
    /// 64 bytes that name a whole plain allocation of a process on this machine (`cuIpc*`, `hipIpc*`).
    Legacy = 0,
    /// A descriptor that travels over a local socket; the memory outlives its exporter.
    Descriptor = 1,
    /// 64 bytes that are valid in every node of the fabric.
    Fabric = 2,
}

/// An operating system's object that travels beside a handle, closed when the last copy is dropped.
#[derive(Debug, Clone)]
pub struct Descriptor(Arc<SharedDescriptor>);

/// What the copies of a [`Descriptor`] share.
#[derive(Debug)]
struct SharedDescriptor {
    descriptor: OwnedFd,
    /// Dropped after the descriptor was closed.
    _companion: Option<Box<dyn Companion>>,
}

impl Descriptor {
    /// Takes over a descriptor.
    #[must_use]
    pub fn new(descriptor: OwnedFd) -> Self {
        Self(Arc::new(SharedDescriptor { descriptor, _companion: None }))
    }

    /// Takes over a descriptor. Drops `companion` after the last copy was closed.
    #[must_use]
    pub fn with_companion(descriptor: OwnedFd, companion: impl fmt::Debug + Send + Sync + 'static) -> Self {
        Self(Arc::new(SharedDescriptor { descriptor, _companion: Some(Box::new(companion)) }))
    }

    /// Returns a watch, which tells whether copies of the descriptor are alive.
    #[must_use]
    pub fn watch(&self) -> DescriptorWatch {
        DescriptorWatch(Arc::downgrade(&self.0))
    }
}

/// Tells whether copies of a [`Descriptor`] are alive, and keeps none alive itself.
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
    /// How it travels.
    pub transport: Transport,
    /// UUID of the device that owns the memory; ordinals differ between processes.
    pub device_uuid: [u8; 16],
    /// Bytes of the whole allocation.
    pub bytes: u64,
    /// The vendor's handle.
    pub payload: [u8; 64],
    /// What travels beside the payload, for [`Transport::Descriptor`].
    pub descriptor: Option<Descriptor>,
}

impl MemoryHandle {
    /// A handle without a descriptor.
    #[must_use]
    pub const fn new(transport: Transport, device_uuid: [u8; 16], bytes: u64, payload: [u8; 64]) -> Self {
        Self { transport, device_uuid, bytes, payload, descriptor: None }
    }

    /// The same with a descriptor.
    #[must_use]
    pub fn with_descriptor(mut self, descriptor: Descriptor) -> Self {
        self.descriptor = Some(descriptor);
        self
    }
}

/// A handle of an event that another process can open.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct EventHandle {
    /// UUID of the event's device.
    pub device_uuid: [u8; 16],
    /// The vendor's handle.
    pub payload: [u8; 64],
    /// What travels beside the payload, where the vendor's handle alone is not enough.
    pub descriptor: Option<Descriptor>,
}

impl EventHandle {
    /// A handle of an event of that device.
    #[must_use]
    pub const fn new(device_uuid: [u8; 16], payload: [u8; 64]) -> Self {
        Self { device_uuid, payload, descriptor: None }
    }

    /// The same with a descriptor.
    #[must_use]
    pub fn with_descriptor(mut self, descriptor: Descriptor) -> Self {
        self.descriptor = Some(descriptor);
        self
    }
}

/// Raw export, open and close of memory and events. Counting, ordering and caching are core's.
///
/// - `ipc.shared-bytes`: what one process writes to the memory the other reads, and the other way round.
#[cfg_attr(feature = "mockall", mockall::automock)]
pub trait IpcSharing: Send + Sync + fmt::Debug {
    /// Makes a handle of a whole allocation.
    ///
    /// - `ipc.export-shareable`: memory not allocated as `Shareable` by this transport gives `InvalidArgument`.
    /// - `ipc.export-transport`: a transport outside the capability `ipc_transports` gives `Unsupported`.
    ///
    /// # Safety
    /// `ptr` came from `allocate` for this device and has not been freed.
    unsafe fn export_memory(&self, device: u32, ptr: DevicePtr, transport: Transport) -> Result<MemoryHandle>;

    /// Maps memory of another process for `device`, which is the one that will touch it.
    ///
    /// - `ipc.open-again`: a second open for the same device gives the same address and is counted.
    /// - `ipc.open-outlives`: with [`Transport::Descriptor`] the mapping keeps the memory when its exporter has ended.
    /// - `ipc.open-checked`: a handle that no exporter made, of another device's UUID or without the descriptor that its
    ///   transport needs, gives `InvalidArgument`, and nothing is mapped.
    fn open_memory(&self, device: u32, handle: &MemoryHandle) -> Result<DevicePtr>;

    /// Undoes one `open_memory`. A failed call leaves the memory open, and the caller may repeat it.
    ///
    /// - `ipc.close-unknown`: an address that is not open gives `InvalidPointer`.
    ///
    /// # Safety
    /// No work that uses the mapping is outstanding, unless it is open once more.
    unsafe fn close_memory(&self, device: u32, ptr: DevicePtr) -> Result<()>;

    /// Makes a handle of an event that was made with `interprocess`.
    ///
    /// - `ipc.export-event`: an event made without `interprocess` gives `InvalidArgument`.
    fn export_event(&self, event: EventId) -> Result<EventHandle>;

    /// Opens an event of another process; `destroy_event` closes it.
    ///
    /// - `ipc.event-orders`: work that waits for the opened event runs after the other process's work before the record.
    /// - `ipc.event-peer-ends`: where the fact `event_waits_end_with_peer` holds, waits end when the recording process ends
    ///   before the record is reached.
    fn open_event(&self, device: u32, handle: &EventHandle) -> Result<EventId>;
}
