//! [`open`]: storages that PyTorch shares.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use highwater_core::{
    Device, DeviceBuffer, DevicePtr, Element, Error, ErrorKind, EventHandle, IpcSharing, MemoryHandle, Result,
    Transport,
};

use crate::TorchStorage;
use crate::counters::Counter;
use crate::expandable::Segment;
use crate::handle::{Handle, VENDOR_BYTES, read};

const OPERATION: &str = "open";

/// Memory of another process that is mapped here.
enum Mapped {
    Block { ipc: Arc<dyn IpcSharing>, device: u32, base: DevicePtr },
    Pages(Arc<Segment>),
}

impl Mapped {
    fn base(&self) -> DevicePtr {
        match self {
            Self::Block { base, .. } => *base,
            Self::Pages(segment) => segment.base(),
        }
    }

    /// Unmaps the memory, unless another storage uses it.
    ///
    /// # Safety
    /// The caller must ensure that all work on the storage has ended.
    unsafe fn close(self) -> Result<()> {
        match self {
            // SAFETY: The caller keeps the promise.
            Self::Block { ipc, device, base } => unsafe { ipc.close_memory(device, base) },
            // The driver keeps pages that are mapped here, so the sender may let them go in any case.
            Self::Pages(segment) => {
                drop(segment);
                Ok(())
            }
        }
    }
}

/// A storage of another process. Its drop closes the memory and tells the sender.
struct Received {
    /// `None` in the drop only.
    mapped: Option<Mapped>,
    counter: Option<Counter>,
    /// Set once the buffer exists. An open that fails leaves the count as it was, so that it can be repeated.
    is_open: Arc<AtomicBool>,
}

impl Drop for Received {
    fn drop(&mut self) {
        let Some(mapped) = self.mapped.take() else { return };
        // SAFETY: The buffer drops this object after its last use.
        let closed = unsafe { mapped.close() };
        if let Err(error) = closed {
            // The memory is still mapped, so the sender must keep it.
            tracing::warn!("memory of PyTorch stays open: {error}");
        } else if self.is_open.load(Ordering::Acquire)
            && let Some(counter) = self.counter.take()
        {
            counter.release();
        }
    }
}

/// Opens the storage that PyTorch's `_share_cuda_` returned in another process, as values of `T`. `device` is the device of the
/// storage, as this process counts. Waits until the sender's work before the share is done.
///
/// The buffer behaves like any other. Once it is dropped and the last use has ended, the memory is closed and the sender's count
/// falls. The call that drops the buffer does not wait for that. This process cannot share the sender's memory again.
///
/// ```
/// use highwater_core::{Device, Result};
/// use highwater_pytorch::TorchStorage;
///
/// /// Python: `":".join(f.hex() if isinstance(f, bytes) else str(int(f)) for f in storage._share_cuda_())`.
/// fn values(device: &Device, line: &str) -> Result<Vec<f32>> {
///     let storage: TorchStorage = line.parse()?;
///     let weights = highwater_pytorch::open::<f32>(device, &storage)?;
///     device.create_stream()?.download(&weights)
/// }
/// ```
///
/// # Errors
/// An open that fails leaves the sender's count as it was. It can be repeated, or ended by [`TorchStorage::release`].
/// - `Expired`: the share has ended, or the sender's file of counters is gone.
/// - `InvalidState`: this process has the share open already. Each share is for one open.
/// - `InvalidArgument`: a field is invalid, the storage is of another device or of this process, or it does not fit `T`.
/// - `InvalidPointer`: the range leaves the segment.
/// - `Unsupported`: a handle of a later version than 3 (2 for an expandable segment), pages that travel by the fabric, or a
///   device that lacks `foreign_memory` or the transport: [`Legacy`](Transport::Legacy), or
///   [`Descriptor`](Transport::Descriptor) for an expandable segment.
/// - `PermissionDenied`: the sender belongs to another user, or this process may not copy the descriptors of its expandable
///   segment.
/// - `OperatingSystem`: this process has run out of descriptors or addresses.
/// - `Capture`: this thread is inside a capture.
pub fn open<T: Element>(device: &Device, storage: &TorchStorage) -> Result<DeviceBuffer<T>> {
    device.runtime().check_outside_capture(OPERATION)?;
    let refused = |message: String| {
        Error::new(ErrorKind::InvalidArgument, OPERATION, message)
            .with_hint("pass the eight fields of one call of `_share_cuda_` as they are")
    };
    let handle = read(OPERATION, &storage.handle)?;
    let event = <[u8; VENDOR_BYTES]>::try_from(&storage.event_handle[..]);
    let event = storage.event_sync_required.then_some(event).transpose().map_err(|_| {
        let found = storage.event_handle.len();
        refused(format!("the handle of the event has {found} bytes, expected {VENDOR_BYTES}"))
    })?;
    let size = usize::try_from(storage.size_bytes).ok().filter(|size| *size > 0);
    let size =
        size.ok_or_else(|| refused(format!("a storage of {} bytes, expected at least 1", storage.size_bytes)))?;
    let end = storage.offset_bytes.checked_add(storage.size_bytes).filter(|end| *end <= isize::MAX as u64);
    if end.is_none() {
        let (offset, size) = (storage.offset_bytes, storage.size_bytes);
        return Err(refused(format!("{size} bytes at the offset {offset} leave the address space")));
    }
    let (ordinal, uuid) = (device.ordinal(), device.info().uuid);
    let backend = Arc::clone(device.runtime().backend());
    let ipc = backend.ipc_sharing().ok_or_else(|| Error::lacks(OPERATION, "ipc_transports"))?;
    let transport = match handle {
        Handle::Block(_) => Transport::Legacy,
        Handle::Pages(_) => Transport::Descriptor,
    };
    if !device.capabilities().ipc_transports.contains(transport) {
        return Err(Error::lacks(OPERATION, "ipc_transports"));
    }
    let counter = Some(Counter::of(OPERATION, storage)?);

    if let Some(event) = event {
        let event = ipc.open_event(ordinal, &EventHandle::new(uuid, event))?;
        let waited = backend.synchronize_event(event);
        backend.destroy_event(event)?;
        waited?;
    }
    let mapped = match handle {
        // The sender does not tell the size of the block. `adopt` checks the range against what the driver knows.
        Handle::Block(payload) => {
            let base = ipc.open_memory(ordinal, &MemoryHandle::new(Transport::Legacy, uuid, 1, payload))?;
            Mapped::Block { ipc, device: ordinal, base }
        }
        Handle::Pages(pages) => Mapped::Pages(Segment::of(device, &*ipc, pages)?),
    };
    let (base, is_open) = (mapped.base(), Arc::new(AtomicBool::new(false)));
    let received = Received { mapped: Some(mapped), counter, is_open: Arc::clone(&is_open) };
    let start = base.offset(storage.offset_bytes as usize);
    // SAFETY: `received` keeps the memory mapped, and the sender keeps it allocated until its count falls. The sender's earlier
    // work is done. The drop of `received` is sound in any thread.
    let buffer = unsafe { device.adopt(start, size, received)? };
    is_open.store(true, Ordering::Release);
    Ok(buffer)
}
