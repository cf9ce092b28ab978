//! The properties and capabilities of AMD's devices.

use std::path::Path;

use highwater_driver::text;
use highwater_hal::{Capabilities, DeviceInfo, Error, Transport, Transports};

use crate::codes;
use crate::driver::Driver;
use crate::platform::Rocm;

/// The attribute for memory pools, with the same number since HIP 5.
pub(crate) const MEMORY_POOLS: i32 = 88;

/// A buffer for `hipDeviceProp_t`, which has 1472 bytes in HIP 6 and may grow in later versions.
#[derive(Debug)]
#[repr(C, align(8))]
pub(crate) struct Properties(pub(crate) [u8; 4096]);

/// The range of the architecture's name in the buffer.
pub(crate) const ARCHITECTURE: std::ops::Range<usize> = 1160..1160 + 256;

/// Returns all devices, by ordinal.
pub(crate) fn describe(rocm: &Rocm) -> Result<Vec<(DeviceInfo, Capabilities)>, Error> {
    let mut infos = rocm
        .architectures
        .iter()
        .zip(0..)
        .map(|(architecture, ordinal)| info(rocm.driver, architecture, ordinal))
        .collect::<Result<Vec<_>, Error>>()?;
    tell_apart(&mut infos, &machine(), std::process::id());
    let can = |(info, ordinal)| {
        let can = capabilities(rocm, &info, ordinal);
        (info, can)
    };
    Ok(infos.into_iter().zip(0..).map(can).collect())
}

/// Returns the name of a device's architecture with its features: `gfx942:sramecc+:xnack-`.
pub(crate) fn architecture(driver: &Driver, ordinal: i32) -> Result<String, Error> {
    let mut properties = Box::new(Properties([0; 4096]));
    // SAFETY: The symbol fills the layout of HIP 6, which fits into the buffer. The buffer outlives the call.
    codes::HIP.check("open", unsafe { (driver.own.get_device_properties)(&mut *properties, ordinal) })?;
    Ok(text(&properties.0[ARCHITECTURE]))
}

fn info(driver: &Driver, architecture: &str, ordinal: i32) -> Result<DeviceInfo, Error> {
    let (mut name, mut uuid, mut bytes, mut pci) = ([0_u8; 256], [0_u8; 16], 0_usize, [0_u8; 64]);
    let own = &driver.own;
    let codes = [
        // SAFETY: The call writes at most the bytes that it is given, which outlive it.
        unsafe { (own.device_get_name)(name.as_mut_ptr(), name.len() as i32, ordinal) },
        // SAFETY: The call writes 16 bytes, which outlive it.
        unsafe { (own.device_get_uuid)(&mut uuid, ordinal) },
        // SAFETY: The call writes one number, which outlives it.
        unsafe { (own.device_total_mem)(&mut bytes, ordinal) },
        // SAFETY: As for the name.
        unsafe { (own.device_get_pci_bus_id)(pci.as_mut_ptr(), pci.len() as i32, ordinal) },
    ];
    for code in codes {
        codes::HIP.check("open", code)?;
    }
    let mut info = DeviceInfo::new(ordinal.unsigned_abs(), text(&name), uuid, bytes as u64);
    info.architecture = architecture.to_owned();
    highwater_driver::set_pci_address(&mut info, &pci);
    Ok(info)
}

/// Returns the id of this machine, or the id of its current boot if it has none.
fn machine() -> String {
    let files = ["/etc/machine-id", "/proc/sys/kernel/random/boot_id"];
    let read = |path: &str| std::fs::read_to_string(Path::new(path)).ok();
    files.into_iter().filter_map(read).map(|id| id.trim().to_owned()).find(|id| !id.is_empty()).unwrap_or_default()
}

/// Returns whether the bytes name no device: zeros, or "XX", which HIP reports for a device without a serial number.
fn is_missing(uuid: &[u8; 16]) -> bool {
    let rest = uuid.strip_prefix(b"XX").unwrap_or(uuid);
    rest.iter().all(|byte| *byte == 0)
}

/// Gives a UUID to each device that has none or shares one with another device. It is derived from the machine and the
/// PCI address, so every process of the machine derives the same. A device without an address gets one that no other process
/// derives, because an ordinal names different devices in processes that see different ones.
fn tell_apart(infos: &mut [DeviceInfo], machine: &str, process: u32) {
    let reported: Vec<[u8; 16]> = infos.iter().map(|info| info.uuid).collect();
    for info in infos {
        let alike = reported.iter().filter(|uuid| **uuid == info.uuid).count();
        if is_missing(&info.uuid) || alike > 1 {
            let place = info.pci_address.clone().filter(|address| !address.is_empty());
            let place = place.unwrap_or_else(|| format!("ordinal {} of process {process}", info.ordinal));
            info.uuid = made_up(machine, &place);
        }
    }
}

/// Derives a UUID of version 8, the version for custom formats, by FNV-1a over both texts.
fn made_up(machine: &str, place: &str) -> [u8; 16] {
    let mut hash = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128;
    for byte in b"highwater-rocm\0".iter().chain(machine.as_bytes()).chain(b"\0").chain(place.as_bytes()) {
        hash = (hash ^ u128::from(*byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
    }
    let mut uuid = hash.to_be_bytes();
    uuid[6] = 0x80 | (uuid[6] & 0x0f);
    uuid[8] = 0x80 | (uuid[8] & 0x3f);
    uuid
}

/// The bytes of workspace for Lt plans. PyTorch's default on ROCm is the same.
const LT_WORKSPACE_BYTES: usize = 80 << 20;

/// Returns the bytes of workspace that AMD's kernels use. Large devices benefit from a large workspace.
fn workspace_bytes(architecture: &str) -> usize {
    let large = ["gfx942", "gfx950", "gfx1250"].contains(&bare(architecture));
    if large { 128 << 20 } else { 32 << 20 }
}

/// Returns the architecture without its features.
pub(crate) fn bare(architecture: &str) -> &str {
    architecture.split(':').next().unwrap_or(architecture)
}

fn capabilities(rocm: &Rocm, info: &DeviceInfo, ordinal: i32) -> Capabilities {
    let has = |which| rocm.driver.attribute(ordinal, which) != 0;
    let calls = &rocm.driver.calls;
    let (mut least, mut greatest) = (0, 0);
    // SAFETY: The call writes two numbers, which outlive it.
    let ranged = unsafe { (calls.get_stream_priority_range)(&mut least, &mut greatest) } == 0;
    let mut can = Capabilities::none();
    (can.gemm_f16, can.gemm_bf16, can.gemm_f32, can.gemm_f64, can.gemm_mixed) = (true, true, true, true, true);
    can.strided_batch = true;
    can.atomics_mode = true;
    can.stream_ordered_memory = has(MEMORY_POOLS) && calls.can_allocate_in_order();
    can.capture = calls.can_capture();
    can.stream_priority = ranged && least != greatest;
    // `tf32` is false, because the compute type is refused and the math mode showed no effect.
    // `interprocess_events` is false. In HIP 6, no record reaches another process. HIP 7 orders only the first 32 records.
    if calls.can_share() {
        can.ipc_transports = Transports::NONE.with(Transport::Legacy);
        can.shareable_memory = true;
    }
    can.foreign_memory = rocm.driver.own.pointer_get_attributes.is_some() && calls.mem_get_address_range.is_some();
    (can.event_timing, can.foreign_objects, can.peer_copy) = (true, true, true);
    (can.host_register, can.write_combined) = (true, true);
    // `host_register_read_only` is false: HIP has a flag, and no attribute that says which devices honor it.
    (can.legacy_default_stream, can.per_thread_default_stream) = (true, true);
    // A BLAS handle makes calls that a capture forbids in any mode. Some versions end the process when one fails.
    can.create_during_capture = false;
    can.set_stream_resets_workspace = rocm.quirks.set_stream_resets_workspace;
    // On some devices, registered memory has another address, so the runtime is asked for it.
    can.host_address_is_device_address = false;
    // The memory is allocated as non-coherent.
    can.pinned_cached_by_device = true;
    can.register_piece_bytes = 64 << 20;
    can.workspace_alignment = 256;
    if rocm.lt.is_some() {
        can.lt_plans = true;
        can.lt_workspace_bytes = LT_WORKSPACE_BYTES;
        // Stream-K kernels keep flags in the handle.
        can.lt_handle_per_stream = true;
    }
    can.blas_workspace = rocm.blas.calls.set_workspace.is_some();
    if can.blas_workspace {
        can.blas_workspace_bytes = workspace_bytes(&info.architecture);
    } else {
        // A handle works in its own memory, which moves with it from stream to stream.
        can.handle_per_stream = true;
    }
    can
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(ordinal: u32, uuid: u8, place: Option<&str>) -> DeviceInfo {
        let mut info = DeviceInfo::new(ordinal, "a device", [uuid; 16], 1);
        info.pci_address = place.map(str::to_owned);
        info
    }

    #[test]
    fn devices_that_report_one_uuid_are_told_apart_by_where_they_are() {
        let mut infos = [
            device(0, 7, Some("0000:03:00.0")),
            device(1, 7, Some("0000:83:00.0")),
            device(2, 9, Some("0000:a3:00.0")),
            device(3, 0, Some("0000:c3:00.0")),
            device(4, 0, None),
        ];
        tell_apart(&mut infos, "machine", 1);
        let uuids: std::collections::HashSet<_> = infos.iter().map(|info| info.uuid).collect();
        assert_eq!(uuids.len(), 5);
        assert!(!uuids.contains(&[7; 16]) && !uuids.contains(&[0; 16]));
        // A unique UUID is kept.
        assert_eq!(infos[2].uuid, [9; 16]);
        // Every process derives the same, whichever devices it sees in whatever order.
        let mut other = [device(0, 7, Some("0000:83:00.0")), device(1, 7, Some("0000:03:00.0"))];
        tell_apart(&mut other, "machine", 2);
        assert_eq!([other[1].uuid, other[0].uuid], [infos[0].uuid, infos[1].uuid]);
        tell_apart(&mut other, "machine", 2);
        assert_eq!(other[0].uuid, infos[1].uuid);
        let mut elsewhere = [device(0, 0, Some("0000:03:00.0"))];
        tell_apart(&mut elsewhere, "another machine", 1);
        assert_ne!(elsewhere[0].uuid, infos[0].uuid);
        assert_eq!((infos[0].uuid[6] >> 4, infos[0].uuid[8] >> 6), (8, 2));
    }

    /// HIP reports "XX" and zeros for a device without a serial number. A process that sees one such device must not take it for
    /// that of a process that sees another one.
    #[test]
    fn a_device_without_a_serial_number_has_no_uuid() {
        let mut without_serial = [0; 16];
        without_serial[..2].copy_from_slice(b"XX");
        let see = |place: Option<&str>, process| {
            let mut infos = [device(0, 0, place)];
            infos[0].uuid = without_serial;
            tell_apart(&mut infos, "machine", process);
            infos[0].uuid
        };
        let (first, second) = ("0000:03:00.0", "0000:83:00.0");
        assert_ne!(see(Some(first), 1), without_serial);
        assert_ne!(see(Some(first), 1), see(Some(second), 2));
        assert_eq!(see(Some(first), 1), see(Some(first), 2));
        // Without an address, an ordinal names different devices in different processes.
        assert_ne!(see(None, 1), see(None, 2));
        assert!(!is_missing(b"XX00000000000001"));
    }

    #[test]
    fn an_architecture_is_named_without_its_features() {
        assert_eq!(["gfx942:sramecc+:xnack-", "gfx1100", ""].map(bare), ["gfx942", "gfx1100", ""]);
        assert_eq!(["gfx942:sramecc+", "gfx90a"].map(workspace_bytes), [128 << 20, 32 << 20]);
    }
}
