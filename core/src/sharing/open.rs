//! [`Runtime::open_shared`]: buffers of other processes.

use std::ops::Range;

use super::ticket::not_given_out;
use super::{Imported, Ticket};
use crate::buffer::DeviceBuffer;
use crate::capture::thread::{in_capture, refuse_in_capture};
use crate::device_block::{DeviceBlock, Origin};
use crate::runtime::Runtime;
use highwater_hal::{Element, Error, ErrorKind, Result};

/// Returns the values of a ticket in the buffer that was shared, which may be a part of its allocation.
fn range_in(block: &DeviceBlock, ticket: &Ticket, size: u64) -> Result<Range<usize>> {
    let of_block = block.shared_range().unwrap_or_default();
    let start = ticket.offset.checked_sub(of_block.start).filter(|start| start.is_multiple_of(size));
    let is_inside = ticket.offset.saturating_add(ticket.length) <= of_block.end;
    let start = start.filter(|_| is_inside).ok_or_else(|| not_given_out("its range is not in the shared buffer"))?;
    let index = |bytes: u64| usize::try_from(bytes / size).unwrap_or(usize::MAX);
    Ok(index(start)..index(start).saturating_add(index(ticket.length)))
}

impl Runtime {
    /// Opens a buffer that another process shares. For a ticket of this runtime, returns the original buffer. Waits until the
    /// device work that was enqueued before the share is done.
    ///
    /// The first open of an allocation sends a request to its exporter and maps the memory. Later opens reuse the mapping. The
    /// buffer behaves like any other and keeps the memory allocated in the exporter. Dropping it does not wait.
    ///
    /// # Errors
    /// - `Expired`: the exporter has ended or has freed the buffer, or the ticket is from another boot or machine.
    /// - `InvalidArgument`: the length or the offset of the range is not a multiple of the size of `T`.
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
        let size = size_of::<T>() as u64;
        if size == 0 || !ticket.offset.is_multiple_of(size) || !ticket.length.is_multiple_of(size) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                OPERATION,
                format!(
                    "{} bytes at offset {} are not a whole number of {}-byte values",
                    ticket.length, ticket.offset, size
                ),
            )
            .with_hint("open the ticket with the type that was shared"));
        }
        let start = usize::try_from(ticket.offset / size).unwrap_or(usize::MAX);
        let range = start..start.saturating_add(usize::try_from(ticket.length / size).unwrap_or(usize::MAX));
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
            let block = sharing.original(ticket)?;
            let range = range_in(&block, ticket, size)?;
            return Ok(DeviceBuffer::part(self.clone(), block, range));
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
