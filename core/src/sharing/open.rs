//! [`Runtime::open_shared`]: buffers of other processes.

use super::exporter::Memory;
use super::ticket::not_given_out;
use super::{Imported, Ticket};
use crate::buffer::DeviceBuffer;
use crate::capture::thread::{in_capture, refuse_in_capture};
use crate::device_block::{DeviceBlock, Origin};
use crate::runtime::Runtime;
use highwater_hal::{Element, Error, ErrorKind, Result};

impl Runtime {
    /// Opens a buffer that another process shares. For a ticket of this runtime, returns the original buffer. Waits until the
    /// device work that was enqueued before the share is done.
    ///
    /// The first open of an allocation sends a request to its exporter and maps the memory. Later opens reuse the mapping. The
    /// buffer behaves like any other and keeps the memory allocated in the exporter. Dropping it does not wait.
    ///
    /// # Errors
    /// - `Expired`: the exporter has ended or has freed the buffer, or the ticket is from another boot or machine.
    /// - `InvalidArgument`: the length or the offset of the range is not a multiple of the size of `T`, or the ticket names
    ///   page-locked memory.
    /// - `DeviceMissing`: the ticket's device is not visible to this process.
    /// - `PermissionDenied`: the exporter belongs to another user.
    /// - `Unsupported`: the device does not support the ticket's transport.
    /// - `InvalidState`: the exporter is stopped, or has not answered for 10 seconds. The limit is 2 seconds for an exporter
    ///   that did not answer the last open. It holds for all requests and connections of one call together. The wait for
    ///   device work that was enqueued before the share has no limit.
    /// - `OperatingSystem`: this process or the exporter has run out of descriptors, threads or addresses.
    /// - `Capture`: this thread is inside a capture.
    pub fn open_shared<T: Element>(&self, ticket: &Ticket) -> Result<DeviceBuffer<T>> {
        const OPERATION: &str = "open_shared";
        let inner = &self.inner;
        inner.check(OPERATION)?;
        refuse_in_capture(OPERATION)?;
        let range = ticket.values::<T>(OPERATION)?;
        if ticket.is_pinned {
            return Err(Error::new(ErrorKind::InvalidArgument, OPERATION, "the ticket names page-locked memory")
                .with_hint("open it with `Runtime::open_pinned`"));
        }
        let uuid = ticket.device_uuid();
        let device = inner.devices.iter().find(|device| device.info.uuid == uuid).ok_or_else(|| {
            Error::new(
                ErrorKind::DeviceMissing,
                OPERATION,
                format!(
                    "none of the {} devices here has the UUID {:032x}",
                    inner.devices.len(),
                    u128::from_be_bytes(uuid)
                ),
            )
            .with_hint("make the exporter's device visible to this process")
        })?;
        let sharing = inner.sharing("open_shared")?;
        if sharing.is_own(ticket) {
            return match sharing.original(ticket)? {
                Memory::Device(block) => Ok(DeviceBuffer::part(self.clone(), block, range)),
                Memory::Pinned(_) => Err(not_given_out("its allocation is page-locked memory")),
            };
        }
        if !device.capabilities.ipc_transports.contains(ticket.transport) {
            return Err(Error::lacks(OPERATION, "ipc_transports"));
        }
        let import = sharing.open(ticket, device.info.ordinal)?;
        let (device, ptr) = (import.device, import.ptr);
        let origin = Origin::Shared(Box::new(Imported::new(self.clone(), import)));
        Ok(DeviceBuffer::part(self.clone(), DeviceBlock::new(&inner.frees, device, ptr, origin), range))
    }

    /// Frees shared memory that no other process has open, and unmaps idle memory of other processes. Shared memory is also
    /// freed automatically when other processes release it or end. Returns the freed bytes. Inside a capture, frees nothing and
    /// returns 0.
    ///
    /// # Errors
    /// `Forked` or `ShuttingDown`.
    pub fn trim_shared(&self) -> Result<u64> {
        self.inner.check("trim_shared")?;
        let Some(sharing) = self.inner.sharing.get().filter(|_| !in_capture()) else { return Ok(0) };
        let (_, before) = sharing.limbo();
        sharing.trim();
        let (_, after) = sharing.limbo();
        Ok(before.saturating_sub(after))
    }

    /// As [`Runtime::trim_shared`].
    ///
    /// # Errors
    /// As [`Runtime::trim_shared`].
    #[deprecated(note = "use `trim_shared`")]
    pub fn collect(&self) -> Result<u64> {
        self.trim_shared()
    }
}
