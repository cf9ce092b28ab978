//! The table of calls that only HIP has, and AMD's symbols for the names in all tables.

use highwater_driver::{RawStream, vendor_calls};
use highwater_hal::DevicePtr;

vendor_calls! {
    /// The runtime's calls beyond [`Calls`](highwater_driver::Calls).
    pub(crate) struct HipCalls {
        required {
            /// Initializes the runtime: flags.
            init: "Init" (u32);
            /// Returns the version of HIP, 10,000,000 * major + 100,000 * minor + patch: out.
            runtime_get_version: "RuntimeGetVersion" (*mut i32);
            /// Returns the version of the driver below HIP, if there is another: out.
            driver_get_version: "DriverGetVersion" (*mut i32);
            /// Returns the number of devices: out.
            get_device_count: "GetDeviceCount" (*mut i32);
            /// Makes a device current in the calling thread: device.
            set_device: "SetDevice" (i32);
            /// Returns the calling thread's device: out.
            get_device: "GetDevice" (*mut i32);
            /// Returns a device's name: out, its bytes, device.
            device_get_name: "DeviceGetName" (*mut u8, i32, i32);
            /// Returns a device's UUID: out, device. The 16 bytes may be text, and may be the same for all devices.
            device_get_uuid: "DeviceGetUuid" (*mut [u8; 16], i32);
            /// Returns a device's memory in bytes: out, device.
            device_total_mem: "DeviceTotalMem" (*mut usize, i32);
            /// Returns a device's PCI address: out, its bytes, device.
            device_get_pci_bus_id: "DeviceGetPCIBusId" (*mut u8, i32, i32);
            /// Returns an attribute of a device: out, attribute, device.
            device_get_attribute: "DeviceGetAttribute" (*mut i32, i32, i32);
            /// Returns all properties of a device: out, device. The layout is that of HIP 6 and later. The symbol
            /// without a suffix fills the layout of HIP 5.
            get_device_properties: "GetDevicePropertiesR0600" (*mut crate::devices::Properties, i32);
            /// Returns whether a device can access a peer's memory: out, device, peer.
            device_can_access_peer: "DeviceCanAccessPeer" (*mut i32, i32, i32);
            /// Lets the current device access a peer's memory: peer, flags.
            device_enable_peer_access: "DeviceEnablePeerAccess" (i32, u32);
            /// Returns the device of a stream: stream, out.
            stream_get_device: "StreamGetDevice" (RawStream, *mut i32);
            /// Copies between devices: destination, its device, source, its device, bytes, stream.
            memcpy_peer_async: "MemcpyPeerAsync" (DevicePtr, i32, DevicePtr, i32, usize, RawStream);
            /// Copies rows: destination, its pitch, source, its pitch, width, height, kind, stream.
            memcpy_2d_async: "Memcpy2DAsync" (DevicePtr, usize, DevicePtr, usize, usize, usize, u32, RawStream);
        }
        optional {
            /// Returns what is known of an address: out, address.
            pointer_get_attributes: "PointerGetAttributes" (*mut crate::foreign::Attributes, DevicePtr);
        }
    }
}

/// Returns the runtime's symbol for a name in the tables.
pub(crate) fn runtime_symbol(name: &str) -> String {
    match name {
        "GetStreamPriorityRange" => "hipDeviceGetStreamPriorityRange".to_owned(),
        // The call without flags creates events with timing and has other arguments.
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

/// Returns hipBLAS's symbol for a name in the tables. `major` is the version of HIP that it works with.
///
/// hipBLAS 2 and 3 take different numbers for the same types under the same symbols. The product calls of hipBLAS 2
/// that take the numbers of hipBLAS 3 have the suffix `_v2`.
pub(crate) fn blas_symbol(major: u32, name: &str) -> String {
    match name.split_once("Ex") {
        Some((operation, width)) if major <= 6 => format!("hipblas{operation}Ex_v2{width}"),
        _ => format!("hipblas{name}"),
    }
}
