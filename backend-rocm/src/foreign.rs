//! Memory that other code allocated through HIP: what lies at an address.
//!
//! HIP tells host memory, managed memory and device memory apart. It does not tell `hipMalloc`, `hipMallocAsync` and mapped
//! memory apart: in some versions of clr, `hipMemRetainAllocationHandle` follows a null pointer for memory that is not mapped.
//! So the legacy handle is tried, and memory that has none is described as plain memory that no transport exports.

use std::ffi::c_void;

use highwater_driver::{Calls, IpcHandle, no_device_memory};
use highwater_hal::{DevicePtr, Error, ErrorKind, MemoryRange, RangeKind, Result, Transport, Transports};

use crate::codes;

/// `hipMemoryType`, with the numbers of HIP 6 and later.
pub(crate) const DEVICE_MEMORY: i32 = 2;
pub(crate) const MANAGED_MEMORY: i32 = 3;
pub(crate) const UNREGISTERED_MEMORY: i32 = 0;

/// `hipPointerAttribute_t`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Attributes {
    pub(crate) memory_type: i32,
    pub(crate) device: i32,
    device_pointer: *mut c_void,
    host_pointer: *mut c_void,
    pub(crate) is_managed: i32,
    flags: u32,
}

impl Attributes {
    const NONE: Self = Self {
        memory_type: UNREGISTERED_MEMORY,
        device: -2,
        device_pointer: std::ptr::null_mut(),
        host_pointer: std::ptr::null_mut(),
        is_managed: 0,
        flags: 0,
    };
}

/// `hipPointerGetAttributes`.
pub(crate) type GetAttributes = unsafe extern "C" fn(*mut Attributes, DevicePtr) -> i32;

/// Describes the memory at an address, with the calls of the runtime. The device is current.
pub(crate) fn describe(calls: &Calls, get: Option<GetAttributes>, device: u32, ptr: DevicePtr) -> Result<MemoryRange> {
    const OPERATION: &str = "describe_memory";
    let lacks = || Error::lacks(OPERATION, "foreign_memory");
    let get = get.ok_or_else(lacks)?;
    let range = calls.mem_get_address_range.ok_or_else(lacks)?;
    let mut attributes = Attributes::NONE;
    // SAFETY: The call writes one struct, which outlives it.
    let code = unsafe { get(&mut attributes, ptr) };
    if code != 0 || attributes.memory_type == UNREGISTERED_MEMORY {
        return Err(no_device_memory(OPERATION, ptr, "in no memory that HIP knows"));
    }
    let is_managed = attributes.is_managed != 0 || attributes.memory_type == MANAGED_MEMORY;
    if !is_managed && attributes.memory_type != DEVICE_MEMORY {
        return Err(no_device_memory(OPERATION, ptr, "not memory of a device"));
    }
    if !is_managed && attributes.device != device as i32 {
        let message = format!("{ptr} is memory of device {}, not of device {device}", attributes.device);
        return Err(Error::new(ErrorKind::WrongDevice, OPERATION, message)
            .with_hint("pass the device that the memory belongs to"));
    }
    let (mut base, mut bytes) = (DevicePtr::new(0), 0);
    // SAFETY: The call writes two numbers, which outlive it.
    codes::HIP.check(OPERATION, unsafe { range(&mut base, &mut bytes, ptr) })?;
    if is_managed {
        return Ok(MemoryRange::new(RangeKind::Managed, base, bytes));
    }
    let mut handle = IpcHandle([0; 64]);
    // SAFETY: The call writes 64 bytes, which outlive it.
    let has_handle = calls.ipc_get_mem_handle.is_some_and(|get| unsafe { get(&mut handle, base) } == 0);
    let transports = if has_handle { Transports::NONE.with(Transport::Legacy) } else { Transports::NONE };
    Ok(MemoryRange::new(RangeKind::Plain, base, bytes).with_transports(transports))
}
