//! The table of calls that only HIP has, and the vendor's symbols behind the tables that it shares.

use highwater_driver::{RawStream, vendor_calls};
use highwater_hal::DevicePtr;

vendor_calls! {
    /// The runtime's calls beyond [`Calls`](highwater_driver::Calls).
    pub(crate) struct HipCalls {
        required {
            /// Initialises the runtime: flags.
            init: "Init" (u32);
            /// The version of HIP: 10,000,000 * major + 100,000 * minor + patch.
            runtime_get_version: "RuntimeGetVersion" (*mut i32);
            /// That of the driver below, as far as there is another.
            driver_get_version: "DriverGetVersion" (*mut i32);
            /// How many devices there are.
            get_device_count: "GetDeviceCount" (*mut i32);
            /// Makes a device current in the calling thread.
            set_device: "SetDevice" (i32);
            /// The calling thread's device.
            get_device: "GetDevice" (*mut i32);
            /// A device's name: out, room, device.
            device_get_name: "DeviceGetName" (*mut u8, i32, i32);
            /// A device's UUID: 16 bytes, perhaps of text, perhaps the same for all devices.
            device_get_uuid: "DeviceGetUuid" (*mut [u8; 16], i32);
            /// A device's memory in bytes.
            device_total_mem: "DeviceTotalMem" (*mut usize, i32);
            /// A device's PCI address: out, room, device.
            device_get_pci_bus_id: "DeviceGetPCIBusId" (*mut u8, i32, i32);
            /// A number about a device: out, which, device.
            device_get_attribute: "DeviceGetAttribute" (*mut i32, i32, i32);
            /// Everything about a device, in the layout that HIP has had since version 6. The symbol without a suffix fills that
            /// of HIP 5.
            get_device_properties: "GetDevicePropertiesR0600" (*mut crate::devices::Properties, i32);
            /// Whether a device reaches another's memory: out, device, peer.
            device_can_access_peer: "DeviceCanAccessPeer" (*mut i32, i32, i32);
            /// Lets the current device use a peer's memory: peer, flags.
            device_enable_peer_access: "DeviceEnablePeerAccess" (i32, u32);
            /// The device of a stream: stream, out.
            stream_get_device: "StreamGetDevice" (RawStream, *mut i32);
            /// Copies between devices: destination, its device, source, its device, bytes, stream.
            memcpy_peer_async: "MemcpyPeerAsync" (DevicePtr, i32, DevicePtr, i32, usize, RawStream);
        }
        optional {}
    }
}

/// The runtime's symbol of a name in the tables.
pub(crate) fn runtime_symbol(name: &str) -> String {
    match name {
        "GetStreamPriorityRange" => "hipDeviceGetStreamPriorityRange".to_owned(),
        // The call without flags times, and has another argument.
        "EventCreate" => "hipEventCreateWithFlags".to_owned(),
        "MemAlloc" => "hipMalloc".to_owned(),
        "MemFree" => "hipFree".to_owned(),
        "MemAllocAsync" => "hipMallocAsync".to_owned(),
        "MemFreeAsync" => "hipFreeAsync".to_owned(),
        "MemHostAlloc" => "hipHostMalloc".to_owned(),
        "MemFreeHost" => "hipHostFree".to_owned(),
        "MemHostRegister" => "hipHostRegister".to_owned(),
        "MemHostUnregister" => "hipHostUnregister".to_owned(),
        "MemHostGetDevicePointer" => "hipHostGetDevicePointer".to_owned(),
        _ => format!("hip{name}"),
    }
}

/// Returns hipBLAS's symbol of a name in the tables. `major` is that of the HIP that it goes with.
///
/// hipBLAS 2 and 3 take different numbers for the same types under the same symbols. The products of hipBLAS 2 that take
/// the numbers of hipBLAS 3 have the suffix `_v2`.
pub(crate) fn blas_symbol(major: u32, name: &str) -> String {
    match name.split_once("Ex") {
        Some((operation, width)) if major <= 6 => format!("hipblas{operation}Ex_v2{width}"),
        _ => format!("hipblas{name}"),
    }
}
