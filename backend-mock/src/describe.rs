//! The description of memory that any code of this process allocated.

use highwater_hal::{DevicePtr, ErrorKind, MemoryRange, Result};

use crate::operation::Operation;
use crate::state::State;

impl State {
    pub(crate) fn describe_memory(&self, operation: Operation, device: u32, ptr: DevicePtr) -> Result<MemoryRange> {
        self.device(operation, device)?.check_not_lost(operation)?;
        let shares = self.capabilities.ipc_transports;
        let (of, range) = self
            .describe_mapped(ptr)
            .or_else(|| {
                self.engine.devices.iter().find_map(|device| Some((device.ordinal, device.describe(ptr, shares)?)))
            })
            .ok_or_else(|| {
                operation
                    .error(ErrorKind::InvalidPointer, format!("{ptr} is in no memory of a device"))
                    .with_hint("pass an address of device memory that is allocated")
            })?;
        if of == device {
            return Ok(range);
        }
        Err(operation
            .error(ErrorKind::WrongDevice, format!("{ptr} is memory of device {of}, not of device {device}"))
            .with_hint("pass the device that the memory belongs to"))
    }
}
