//! The tables of calls that only CUDA has, and the vendor's symbols behind the tables that it shares.

use highwater_core::driver::vendor_calls;

vendor_calls! {
    /// The driver's calls beyond [`Calls`](highwater_core::driver::Calls).
    pub(crate) struct CudaCalls {
        required {
            /// Initialises the driver: flags.
            init: "Init" (u32);
            /// The version of CUDA that the driver knows: 1000 * major + 10 * minor.
            driver_version: "DriverGetVersion" (*mut i32);
            /// How many devices there are.
            device_count: "DeviceGetCount" (*mut i32);
            /// The device of an ordinal.
            device: "DeviceGet" (*mut i32, i32);
            /// A device's name: out, room, device.
            device_name: "DeviceGetName" (*mut u8, i32, i32);
            /// A device's UUID, that of its part where it is partitioned.
            device_uuid: "DeviceGetUuid_v2" (*mut [u8; 16], i32);
            /// A device's memory in bytes.
            device_memory: "DeviceTotalMem_v2" (*mut usize, i32);
            /// A device's PCI address: out, room, device.
            device_pci_address: "DeviceGetPCIBusId" (*mut u8, i32, i32);
            /// A number about a device: out, which, device.
            device_attribute: "DeviceGetAttribute" (*mut i32, i32, i32);
            /// Whether a device reaches another's memory: out, device, peer.
            device_reaches: "DeviceCanAccessPeer" (*mut i32, i32, i32);
            /// A device's primary context, counted: out, device.
            context_retain: "DevicePrimaryCtxRetain" (*mut u64, i32);
            /// The calling thread's context.
            context_current: "CtxGetCurrent" (*mut u64);
            /// Makes a context current until it is popped.
            context_push: "CtxPushCurrent_v2" (u64);
            /// Makes current what was before.
            context_pop: "CtxPopCurrent_v2" (*mut u64);
            /// Lets the current context use a peer's memory: peer context, flags.
            context_enable_peer: "CtxEnablePeerAccess" (u64, u32);
            /// The context of a stream: stream, out.
            stream_context: "StreamGetCtx" (u64, *mut u64);
            /// Copies between devices: destination, its context, source, its context, bytes, stream.
            copy_peer: "MemcpyPeerAsync" (u64, u64, u64, u64, usize, u64);
        }
        optional {
            /// Makes device memory without an address: out, bytes, properties, flags.
            memory_create: "MemCreate" (*mut u64, usize, *const crate::mapped::Properties, u64);
            /// Gives it back.
            memory_release: "MemRelease" (u64);
            /// What sizes have to be multiples of: out, properties, which.
            memory_granularity: "MemGetAllocationGranularity" (*mut usize, *const crate::mapped::Properties, u32);
            /// Reserves addresses: out, bytes, alignment, wish, flags.
            address_reserve: "MemAddressReserve" (*mut u64, usize, usize, u64, u64);
            /// Gives addresses back.
            address_free: "MemAddressFree" (u64, usize);
            /// Maps memory: address, bytes, offset, memory, flags.
            memory_map: "MemMap" (u64, usize, usize, u64, u64);
            /// Unmaps it.
            memory_unmap: "MemUnmap" (u64, usize);
            /// Says who may use it: address, bytes, descriptions, how many.
            memory_access: "MemSetAccess" (u64, usize, *const crate::mapped::Access, usize);
            /// Makes a handle of it: out, memory, type, flags.
            memory_export: "MemExportToShareableHandle" (*mut u8, u64, u32, u64);
            /// Opens a handle: out, handle, type.
            memory_import: "MemImportFromShareableHandle" (*mut u64, *const u8, u32);
        }
    }
}

vendor_calls! {
    /// cuBLAS's calls beyond [`BlasCalls`](highwater_core::driver::BlasCalls).
    pub(crate) struct CublasCalls {
        required {
            /// A part of the version: which, out.
            property: "GetProperty" (u32, *mut i32);
        }
        optional {}
    }
}

/// Numbers of the parts of a version.
pub(crate) const VERSION_PARTS: [u32; 3] = [0, 1, 2];

/// The driver's symbol of a name in the tables.
pub(crate) fn driver_symbol(name: &str) -> String {
    /// Those whose arguments have changed since their first version.
    const SECOND: [&str; 13] = [
        "StreamDestroy",
        "EventDestroy",
        "MemAlloc",
        "MemFree",
        "MemGetInfo",
        "MemGetAddressRange",
        "MemcpyHtoDAsync",
        "MemcpyDtoHAsync",
        "MemcpyDtoDAsync",
        "MemHostRegister",
        "MemHostGetDevicePointer",
        "StreamBeginCapture",
        "IpcOpenMemHandle",
    ];
    match name {
        "DeviceSynchronize" => "cuCtxSynchronize".to_owned(),
        "GetStreamPriorityRange" => "cuCtxGetStreamPriorityRange".to_owned(),
        _ if SECOND.contains(&name) => format!("cu{name}_v2"),
        _ => format!("cu{name}"),
    }
}

/// cuBLAS's symbol of a name in the tables.
pub(crate) fn blas_symbol(name: &str) -> String {
    match name {
        "Create" | "Destroy" | "SetStream" | "SetWorkspace" => format!("cublas{name}_v2"),
        _ => format!("cublas{name}"),
    }
}

/// cuBLASLt's symbol of a name in the tables.
pub(crate) fn lt_symbol(name: &str) -> String {
    format!("cublasLt{name}")
}
