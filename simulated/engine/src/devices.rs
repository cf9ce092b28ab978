//! The attributes of devices, their ordinals, and peer access.

use std::sync::atomic::Ordering;

use highwater_hal::{Backend, Capabilities};

use crate::code::{Answer, Code};
use crate::current::{self, with_context};
use crate::process::{Simulation, simulation};
use crate::variants::{Vendor, variants, vendor};

impl Simulation {
    /// Returns the mock's capabilities.
    ///
    /// # Errors
    /// 101 if no such device exists.
    pub fn capabilities(&self, device: u32) -> Answer<Capabilities> {
        self.check_device(device)?;
        self.gpu.capabilities(device).map_err(|error| self.code_of(error))
    }
}

/// `cuDeviceGetCount`.
///
/// # Errors
/// 3 before `cuInit`, 4 at exit.
pub fn count() -> Answer<u32> {
    Ok(simulation()?.visible.len() as u32)
}

/// Returns the mock's device of an ordinal. `cuDeviceGet` returns the ordinal itself.
///
/// # Errors
/// 101 if no such device exists.
pub fn get(ordinal: i32) -> Answer<u32> {
    let simulation = simulation()?;
    let index = usize::try_from(ordinal).map_err(|_| Code::INVALID_DEVICE)?;
    simulation.visible.get(index).copied().ok_or(Code::INVALID_DEVICE)
}

/// Returns the ordinal of the mock's device, -1 for a device that is not visible.
///
/// # Errors
/// 3 before `cuInit`, 4 at exit.
pub fn ordinal(device: u32) -> Answer<i32> {
    let index = simulation()?.visible.iter().position(|&visible| visible == device);
    Ok(index.map_or(-1, |index| index as i32))
}

/// `cuDeviceGetName`.
///
/// # Errors
/// 101 if no such device exists.
pub fn name(ordinal: i32) -> Answer<String> {
    let vendor = match vendor() {
        Vendor::Cuda => "CUDA",
        Vendor::Hip => "HIP",
    };
    get(ordinal).map(|device| format!("Highwater simulated {vendor} device {device}"))
}

/// `cuDeviceGetUuid_v2`: the same in every process. HIP: "XX" and zeros for a device without a serial number.
///
/// # Errors
/// 101 if no such device exists.
pub fn uuid(ordinal: i32) -> Answer<[u8; 16]> {
    let device = get(ordinal)?;
    let simulation = simulation()?;
    if vendor() == Vendor::Hip && !variants()?.hip.has_serials {
        return Ok(*b"XX\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
    }
    simulation.gpu.device_info(device).map(|info| info.uuid).map_err(|error| simulation.code_of(error))
}

/// `cuDeviceTotalMem_v2`.
///
/// # Errors
/// 101 if no such device exists.
pub fn memory_bytes(ordinal: i32) -> Answer<u64> {
    let device = get(ordinal)?;
    let simulation = simulation()?;
    simulation.gpu.device_info(device).map(|info| info.memory_bytes).map_err(|error| simulation.code_of(error))
}

/// `cuDeviceGetPCIBusId`.
///
/// # Errors
/// 101 if no such device exists.
pub fn pci_bus_id(ordinal: i32) -> Answer<String> {
    get(ordinal).map(|device| format!("0000:{:02X}:00.0", device + 1))
}

/// `cuDeviceGetAttribute`, with an NVIDIA H200's value unless the simulation has its own.
///
/// # Errors
/// 1 for an unknown attribute, 101 if no such device exists.
pub fn attribute(attribute: u32, ordinal: i32) -> Answer<i32> {
    /// Attributes end before this one in CUDA 13.0.
    const END: u32 = 148;
    let device = get(ordinal)?;
    let capabilities = simulation()?.capabilities(device)?;
    let shares = !capabilities.ipc_transports.is_empty();
    Ok(match attribute {
        1 => 1024,
        2 | 3 => 1024,
        4 => 64,
        5 => i32::MAX,
        6 | 7 => 65535,
        10 => 32,
        13 => 1_980_000,
        16 => 132,
        19 | 31 | 83 | 89 => 1,
        33 => device as i32 + 1,
        36 => 3_201_000,
        40 => 3,
        // One address space for all.
        41 | 91 => 1,
        75 => 9,
        76 => 0,
        78 => i32::from(capabilities.stream_priority),
        99 => i32::from(capabilities.host_register),
        113 => i32::from(capabilities.host_register_read_only),
        102 => i32::from(capabilities.mapped_memory),
        103 => i32::from(shares),
        110 => i32::from(capabilities.mapped_memory_rdma),
        115 => i32::from(capabilities.stream_ordered_memory),
        // Descriptors and fabric handles, as on the device, which refuses the latter.
        119 => i32::from(capabilities.stream_ordered_memory) * 9,
        125 => i32::from(capabilities.interprocess_events),
        116 | 128 => 1,
        0 | END.. => return Err(Code::INVALID_VALUE),
        _ => 0,
    })
}

/// `cuDeviceCanAccessPeer`.
///
/// # Errors
/// 101 if no such device exists.
pub fn can_access_peer(ordinal: i32, peer: i32) -> Answer<bool> {
    let (device, peer) = (get(ordinal)?, get(peer)?);
    Ok(device != peer && simulation()?.capabilities(device)?.peer_copy)
}

/// `cuCtxEnablePeerAccess`: from the current context to another.
///
/// # Errors
/// 1 for flags, 201 for an unknown context, 217 for the current one itself (HIP: 101) and between devices without peer access,
/// 704 for the second call.
pub fn enable_peer_access(context: u64, flags: u32) -> Answer<()> {
    let (simulation, device) = with_context()?;
    let peer = current::device_of(simulation, context).ok_or(Code::INVALID_CONTEXT)?;
    simulation.check_context(peer)?;
    if flags != 0 {
        return Err(Code::INVALID_VALUE);
    }
    if peer == device && vendor() == Vendor::Hip {
        return Err(Code::INVALID_DEVICE);
    }
    if peer == device || !simulation.capabilities(device)?.peer_copy {
        return Err(Code::PEER_ACCESS_UNSUPPORTED);
    }
    let bit = 1 << peer;
    if simulation.state(device)?.peers.fetch_or(bit, Ordering::AcqRel) & bit != 0 {
        return Err(Code::PEER_ACCESS_ALREADY_ENABLED);
    }
    Ok(())
}
