//! The properties and capabilities of NVIDIA's devices.

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use highwater_driver::text;
use highwater_hal::{Capabilities, DeviceInfo, Error, Result, Transport, Transports};

use crate::codes;
use crate::driver::Device;
use crate::platform::Cuda;

const OPERATION: &str = "open";

/// Returns all devices, by ordinal.
pub(crate) fn describe(cuda: &Cuda) -> Result<Vec<(DeviceInfo, Capabilities)>, Error> {
    (0_u32..)
        .zip(&cuda.driver.devices)
        .map(|(ordinal, device)| Ok((info(cuda, ordinal, device)?, capabilities(cuda, device))))
        .collect()
}

fn info(cuda: &Cuda, ordinal: u32, device: &Device) -> Result<DeviceInfo, Error> {
    let (calls, number) = (&cuda.driver.own, device.number);
    let check = |code| codes::CUDA.check(OPERATION, code);
    let (mut name, mut uuid, mut bytes, mut pci) = ([0_u8; 256], [0_u8; 16], 0_usize, [0_u8; 32]);
    // SAFETY: Each call writes at most the bytes that it is given, which outlive it.
    unsafe {
        check((calls.device_get_name)(name.as_mut_ptr(), name.len() as i32, number))?;
        check((calls.device_get_uuid)(&mut uuid, number))?;
        check((calls.device_total_mem)(&mut bytes, number))?;
        check((calls.device_get_pci_bus_id)(pci.as_mut_ptr(), pci.len() as i32, number))?;
    }
    let mut info = DeviceInfo::new(ordinal, text(&name), uuid, bytes as u64);
    highwater_driver::set_pci_address(&mut info, &pci);
    let (major, minor) = architecture(cuda, number);
    info.architecture = format!("sm_{major}{minor}");
    Ok(info)
}

fn architecture(cuda: &Cuda, number: i32) -> (i32, i32) {
    (
        cuda.driver.attribute(number, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
        cuda.driver.attribute(number, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
    )
}

fn capabilities(cuda: &Cuda, device: &Device) -> Capabilities {
    let has = |which| cuda.driver.attribute(device.number, which) != 0;
    let (major, minor) = architecture(cuda, device.number);
    let calls = &cuda.driver.calls;
    let mut can = Capabilities::none();
    can.gemm_f32 = true;
    can.gemm_f64 = true;
    can.gemm_f16 = (major, minor) >= (5, 3);
    can.gemm_bf16 = major >= 8;
    // All 16-bit factor types can have a 32-bit result.
    can.gemm_mixed = can.gemm_f16 || can.gemm_bf16;
    can.tf32 = major >= 8;
    can.atomics_mode = true;
    can.blas_workspace = cuda.blas.calls.set_workspace.is_some();
    can.strided_batch = true;
    can.lt_plans = true;
    can.capture = calls.can_capture();
    can.stream_ordered_memory =
        has(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED) && calls.can_allocate_in_order();
    can.interprocess_events = calls.can_share_events();
    can.event_timing = true;
    can.stream_priority = true;
    can.peer_copy = true;
    can.host_register = has(Attribute::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED);
    can.host_register_read_only =
        can.host_register && has(Attribute::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED);
    can.write_combined = true;
    can.legacy_default_stream = true;
    can.per_thread_default_stream = true;
    can.foreign_objects = true;
    can.set_stream_resets_workspace = true;
    can.create_during_capture = true;
    can.host_address_is_device_address = has(Attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING)
        && has(Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
    // A registration stalls the GPU calls of other threads for a time that grows with its size: about 4 ms for 64 MiB.
    can.register_piece_bytes = 64 << 20;
    can.ipc_transports = transports(cuda, device);
    can.shareable_memory = !can.ipc_transports.is_empty();
    can.mapped_memory_rdma = has(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
    can.mapped_memory_granularity = mapped_memory_granularity(cuda, device, &can);
    can.mapped_memory = can.mapped_memory_granularity != 0;
    can.mapped_memory_rdma &= can.mapped_memory;
    can.foreign_memory = cuda.driver.own.pointer_get_attribute.is_some() && calls.mem_get_address_range.is_some();
    can.workspace_alignment = 256;
    // NVIDIA's manual recommends these sizes: 32 MiB from Hopper on.
    can.blas_workspace_bytes = if major >= 9 { 32 << 20 } else { 4 << 20 };
    can.lt_workspace_bytes = can.blas_workspace_bytes;
    can
}

/// Returns the granularity of mapped memory; 0 if the device has none.
fn mapped_memory_granularity(cuda: &Cuda, device: &Device, can: &Capabilities) -> usize {
    let supported = Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    let calls = cuda.driver.virtual_memory.filter(|_| cuda.driver.attribute(device.number, supported) != 0);
    let granularity =
        calls.and_then(|calls| calls.granularity(device.number, can.ipc_transports, can.mapped_memory_rdma));
    granularity.unwrap_or(0)
}

/// Returns the transports that work on this machine.
fn transports(cuda: &Cuda, device: &Device) -> Transports {
    let has = |which| cuda.driver.attribute(device.number, which) != 0;
    let calls = &cuda.driver.calls;
    let mut transports = Transports::NONE;
    if calls.can_share() {
        transports = transports.with(Transport::Legacy);
    }
    let Some(memory) = &cuda.driver.virtual_memory else { return transports };
    if has(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
        && memory.works(device.number, Transport::Descriptor)
    {
        transports = transports.with(Transport::Descriptor);
    }
    // A device can report the attribute on a machine that cannot create handles.
    if has(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)
        && memory.works(device.number, Transport::Fabric)
    {
        transports = transports.with(Transport::Fabric);
    }
    transports
}
