//! Memory that other code allocated through CUDA: what lies at an address, and the export of its mappings.

use cudarc::driver::sys;
use highwater_driver::{Platform, no_device_memory};
use highwater_hal::{DevicePtr, Error, ErrorKind, MemoryHandle, MemoryRange, RangeKind, Result, Transport, Transports};

use crate::codes;
use crate::platform::Cuda;

/// Attributes of memory, named as in NVIDIA's header.
mod attribute {
    use super::sys::CUpointer_attribute as Attribute;

    pub(super) const MEMORY_TYPE: u32 = Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE as u32;
    pub(super) const IS_MANAGED: u32 = Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED as u32;
    pub(super) const DEVICE_ORDINAL: u32 = Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL as u32;
    pub(super) const IS_LEGACY_IPC_CAPABLE: u32 = Attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE as u32;
    pub(super) const ALLOWED_HANDLE_TYPES: u32 = Attribute::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES as u32;
    pub(super) const MEMPOOL_HANDLE: u32 = Attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE as u32;
}

const DEVICE_MEMORY: u64 = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as u64;

const OPERATION: &str = "describe_memory";

/// Returns an attribute of memory; `None` if the driver does not know it, or if such memory does not have it.
fn attribute_of(get: unsafe extern "C" fn(*mut u8, u32, DevicePtr) -> i32, which: u32, ptr: DevicePtr) -> Option<u64> {
    // Attributes have 32 or 64 bits. The numbers are little-endian.
    let mut value = 0_u64;
    // SAFETY: The call writes at most 64 bits, which outlive it.
    let code = unsafe { get((&raw mut value).cast(), which, ptr) };
    (code == 0).then_some(value)
}

fn elsewhere(ptr: DevicePtr, owner: i32, number: i32) -> Error {
    let message = format!("{ptr} is memory of CUDA's device {owner}, not of CUDA's device {number}");
    Error::new(ErrorKind::WrongDevice, OPERATION, message).with_hint("pass the device that the memory belongs to")
}

/// Refuses memory of another device than that with this number, which needs no context. Any device can use managed memory.
pub(crate) fn refuse_memory_of_others(cuda: &Cuda, number: i32, ptr: DevicePtr) -> Result<()> {
    let Some(get) = cuda.driver.own.pointer_get_attribute else { return Ok(()) };
    let attribute = |which| attribute_of(get, which, ptr);
    if attribute(attribute::MEMORY_TYPE) != Some(DEVICE_MEMORY)
        || attribute(attribute::IS_MANAGED).unwrap_or(0) & 1 != 0
    {
        return Ok(());
    }
    match attribute(attribute::DEVICE_ORDINAL).map(|owner| owner as u32 as i32) {
        Some(owner) if owner != number => Err(elsewhere(ptr, owner, number)),
        _ => Ok(()),
    }
}

/// Describes the memory at an address. The device with this number is current.
pub(crate) fn describe(cuda: &Cuda, number: i32, ptr: DevicePtr) -> Result<MemoryRange> {
    let lacks = || Error::lacks(OPERATION, "foreign_memory");
    let get = cuda.driver.own.pointer_get_attribute.ok_or_else(lacks)?;
    let attribute = |which| attribute_of(get, which, ptr);
    // Only plain memory of a device has a legacy handle. If the driver does not know the attribute, an attempt to export decides.
    let legacy = attribute(attribute::IS_LEGACY_IPC_CAPABLE).map(|legacy| legacy & 1 != 0);
    let is_managed = attribute(attribute::IS_MANAGED).unwrap_or(0) & 1 != 0;
    let is_legacy = legacy == Some(true) && !is_managed;
    if !is_managed {
        if !is_legacy {
            match attribute(attribute::MEMORY_TYPE) {
                Some(DEVICE_MEMORY) => {}
                Some(_) => return Err(no_device_memory(OPERATION, ptr, "not memory of a device")),
                None => return Err(no_device_memory(OPERATION, ptr, "in no memory that CUDA knows")),
            }
        }
        let owner = attribute(attribute::DEVICE_ORDINAL).map_or(number, |owner| owner as u32 as i32);
        if owner != number {
            return Err(elsewhere(ptr, owner, number));
        }
    }
    let range = cuda.calls().mem_get_address_range.ok_or_else(lacks)?;
    let (mut base, mut bytes) = (DevicePtr::new(0), 0);
    // SAFETY: The call writes two numbers, which outlive it.
    codes::CUDA.check(OPERATION, unsafe { range(&mut base, &mut bytes, ptr) })?;
    let found = |kind| MemoryRange::new(kind, base, bytes);
    if is_legacy {
        return Ok(found(RangeKind::Plain).with_transports(Transports::NONE.with(Transport::Legacy)));
    }
    if is_managed {
        return Ok(found(RangeKind::Managed));
    }
    if attribute(attribute::MEMPOOL_HANDLE).unwrap_or(0) != 0 {
        return Ok(found(RangeKind::StreamOrdered));
    }
    if let Some(memory) = &cuda.driver.virtual_memory
        && let Some(retained) = memory.retain(ptr)
    {
        memory.release_retained(retained);
        // If the driver does not know the attribute, an attempt to export decides.
        let types = attribute(attribute::ALLOWED_HANDLE_TYPES).unwrap_or(u64::MAX);
        let descriptor = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0;
        let fabric = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC.0;
        let allowed = [(descriptor, Transport::Descriptor), (fabric, Transport::Fabric)];
        let allowed = allowed.into_iter().filter(|(number, _)| types & u64::from(*number) != 0);
        let transports = allowed.fold(Transports::NONE, |set, (_, transport)| set.with(transport));
        return Ok(found(RangeKind::Mapped).with_transports(transports));
    }
    let transports = if legacy.is_none() { Transports::NONE.with(Transport::Legacy) } else { Transports::NONE };
    Ok(found(RangeKind::Plain).with_transports(transports))
}

/// Exports the mapping that starts at an address. The device is current.
pub(crate) fn export(cuda: &Cuda, ptr: DevicePtr, transport: Transport, handle: MemoryHandle) -> Result<MemoryHandle> {
    const OPERATION: &str = "export_memory";
    let not_mapped = || {
        Error::new(ErrorKind::InvalidArgument, OPERATION, format!("{ptr} is not mapped memory"))
            .with_hint("export other memory by `Transport::Legacy`")
    };
    let memory = cuda.driver.virtual_memory.as_ref().ok_or_else(|| Error::lacks(OPERATION, "foreign_memory"))?;
    let retained = memory.retain(ptr).ok_or_else(not_mapped)?;
    let exported = memory.export_allocation(retained, transport, handle);
    memory.release_retained(retained);
    exported
}
