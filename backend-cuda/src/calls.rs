//! The tables of calls that only CUDA has, and the vendor's symbols behind the tables that it shares.

use highwater_driver::{BlasSettings, RawBlas, RawStream, raw_handles, vendor_calls};
use highwater_hal::DevicePtr;

raw_handles! {
    /// A context: `CUcontext`.
    pub(crate) RawContext;
    /// Memory without an address: `CUmemGenericAllocationHandle`.
    pub(crate) RawAllocation;
}

vendor_calls! {
    /// The driver's calls beyond [`Calls`](highwater_driver::Calls).
    pub(crate) struct CudaCalls {
        required {
            /// Initialises the driver: flags.
            init: "Init" (u32);
            /// The version of CUDA that the driver knows: 1000 * major + 10 * minor.
            driver_get_version: "DriverGetVersion" (*mut i32);
            /// How many devices there are.
            device_get_count: "DeviceGetCount" (*mut i32);
            /// The device of an ordinal.
            device_get: "DeviceGet" (*mut i32, i32);
            /// A device's name: out, room, device.
            device_get_name: "DeviceGetName" (*mut u8, i32, i32);
            /// A device's UUID, that of its part where it is partitioned.
            device_get_uuid: "DeviceGetUuid_v2" (*mut [u8; 16], i32);
            /// A device's memory in bytes.
            device_total_mem: "DeviceTotalMem_v2" (*mut usize, i32);
            /// A device's PCI address: out, room, device.
            device_get_pci_bus_id: "DeviceGetPCIBusId" (*mut u8, i32, i32);
            /// A number about a device: out, which, device.
            device_get_attribute: "DeviceGetAttribute" (*mut i32, i32, i32);
            /// Whether a device reaches another's memory: out, device, peer.
            device_can_access_peer: "DeviceCanAccessPeer" (*mut i32, i32, i32);
            /// A device's primary context, counted: out, device.
            device_primary_ctx_retain: "DevicePrimaryCtxRetain" (*mut RawContext, i32);
            /// The calling thread's context.
            ctx_get_current: "CtxGetCurrent" (*mut RawContext);
            /// Makes a context current until it is popped.
            ctx_push_current: "CtxPushCurrent_v2" (RawContext);
            /// Makes current what was before.
            ctx_pop_current: "CtxPopCurrent_v2" (*mut RawContext);
            /// Lets the current context use a peer's memory: peer context, flags.
            ctx_enable_peer_access: "CtxEnablePeerAccess" (RawContext, u32);
            /// The context of a stream: stream, out.
            stream_get_ctx: "StreamGetCtx" (RawStream, *mut RawContext);
            /// Copies between devices: destination, its context, source, its context, bytes, stream.
            memcpy_peer_async: "MemcpyPeerAsync" (DevicePtr, RawContext, DevicePtr, RawContext, usize, RawStream);
        }
        optional {}
    }
}

vendor_calls! {
    /// The calls of virtual memory, which a driver has all of or lacks.
    pub(crate) struct VirtualMemoryCalls {
        required {
            /// Makes device memory without an address: out, bytes, properties, flags.
            mem_create: "MemCreate" (*mut RawAllocation, usize, *const crate::virtual_memory::Properties, u64);
            /// Gives it back.
            mem_release: "MemRelease" (RawAllocation);
            /// What sizes have to be multiples of: out, properties, which.
            mem_get_allocation_granularity: "MemGetAllocationGranularity" (*mut usize, *const crate::virtual_memory::Properties, u32);
            /// Reserves addresses: out, bytes, alignment, wish, flags.
            mem_address_reserve: "MemAddressReserve" (*mut DevicePtr, usize, usize, DevicePtr, u64);
            /// Gives addresses back.
            mem_address_free: "MemAddressFree" (DevicePtr, usize);
            /// Maps memory: address, bytes, offset, memory, flags.
            mem_map: "MemMap" (DevicePtr, usize, usize, RawAllocation, u64);
            /// Unmaps it.
            mem_unmap: "MemUnmap" (DevicePtr, usize);
            /// Says who may use it: address, bytes, descriptions, how many.
            mem_set_access: "MemSetAccess" (DevicePtr, usize, *const crate::virtual_memory::Access, usize);
            /// Makes a handle of it: out, memory, type, flags.
            mem_export_to_shareable_handle: "MemExportToShareableHandle" (*mut u8, RawAllocation, u32, u64);
            /// Opens a handle: out, handle, type.
            mem_import_from_shareable_handle: "MemImportFromShareableHandle" (*mut RawAllocation, *const u8, u32);
        }
        optional {}
    }
}

vendor_calls! {
    /// cuBLAS's calls beyond [`BlasCalls`](highwater_driver::BlasCalls).
    pub(crate) struct CublasCalls {
        required {
            /// A part of the version: which, out.
            get_property: "GetProperty" (u32, *mut i32);
        }
        optional {
            /// The number of multiprocessors that kernels are chosen for: handle, out.
            get_sm_count_target: "GetSmCountTarget" (RawBlas, *mut i32);
            /// Sets it: handle, number.
            set_sm_count_target: "SetSmCountTarget" (RawBlas, i32);
            /// The strategy of emulation: handle, out.
            get_emulation_strategy: "GetEmulationStrategy" (RawBlas, *mut i32);
            /// Sets it: handle, strategy.
            set_emulation_strategy: "SetEmulationStrategy" (RawBlas, i32);
            /// The special values that emulation keeps: handle, out.
            get_emulation_special_values_support: "GetEmulationSpecialValuesSupport" (RawBlas, *mut i32);
            /// Sets them: handle, mask.
            set_emulation_special_values_support: "SetEmulationSpecialValuesSupport" (RawBlas, i32);
            /// The control of the bits of emulation: handle, out.
            get_fixed_point_emulation_mantissa_control: "GetFixedPointEmulationMantissaControl" (RawBlas, *mut i32);
            /// Sets it: handle, control.
            set_fixed_point_emulation_mantissa_control: "SetFixedPointEmulationMantissaControl" (RawBlas, i32);
            /// The most bits of emulation: handle, out.
            get_fixed_point_emulation_max_mantissa_bit_count: "GetFixedPointEmulationMaxMantissaBitCount" (RawBlas, *mut i32);
            /// Sets it: handle, bits.
            set_fixed_point_emulation_max_mantissa_bit_count: "SetFixedPointEmulationMaxMantissaBitCount" (RawBlas, i32);
            /// The offset added to those bits: handle, out.
            get_fixed_point_emulation_mantissa_bit_offset: "GetFixedPointEmulationMantissaBitOffset" (RawBlas, *mut i32);
            /// Sets it: handle, bits.
            set_fixed_point_emulation_mantissa_bit_offset: "SetFixedPointEmulationMantissaBitOffset" (RawBlas, i32);
            /// Sets the address at which products report their bits: handle, an address on the device or 0.
            set_fixed_point_emulation_mantissa_bit_count_pointer: "SetFixedPointEmulationMantissaBitCountPointer" (RawBlas, DevicePtr);
        }
    }
}

/// The two calls that read and set a setting of a handle.
type Setting =
    (Option<unsafe extern "C" fn(RawBlas, *mut i32) -> i32>, Option<unsafe extern "C" fn(RawBlas, i32) -> i32>);

impl CublasCalls {
    /// The settings that only cuBLAS handles have. A logger belongs to the process and not to a handle.
    fn settings(&self) -> [Setting; 6] {
        [
            (self.get_sm_count_target, self.set_sm_count_target),
            (self.get_emulation_strategy, self.set_emulation_strategy),
            (self.get_emulation_special_values_support, self.set_emulation_special_values_support),
            (self.get_fixed_point_emulation_mantissa_control, self.set_fixed_point_emulation_mantissa_control),
            (
                self.get_fixed_point_emulation_max_mantissa_bit_count,
                self.set_fixed_point_emulation_max_mantissa_bit_count,
            ),
            (self.get_fixed_point_emulation_mantissa_bit_offset, self.set_fixed_point_emulation_mantissa_bit_offset),
        ]
    }

    /// Reads the settings of a fresh handle. The defaults depend on the version and on environment variables.
    ///
    /// # Safety
    /// The caller must pass a live handle.
    pub(crate) unsafe fn settings_of(&self, handle: RawBlas) -> BlasSettings {
        self.settings().map(|(get, set)| {
            let (get, _) = get.zip(set)?;
            let mut value = 0;
            // SAFETY: the caller vouches for the handle; the call writes one number that lives until it returns.
            (unsafe { get(handle, &mut value) } == 0).then_some(value)
        })
    }

    /// Restores all these settings.
    ///
    /// # Safety
    /// The caller must pass a live handle.
    ///
    /// # Errors
    /// cuBLAS's code.
    pub(crate) unsafe fn restore(&self, handle: RawBlas, fresh: &BlasSettings) -> Result<(), i32> {
        let done = |code| if code == 0 { Ok(()) } else { Err(code) };
        for ((_, set), value) in self.settings().into_iter().zip(fresh) {
            if let (Some(set), Some(value)) = (set, value) {
                // SAFETY: passed on from the caller.
                done(unsafe { set(handle, *value) })?;
            }
        }
        // SAFETY: passed on from the caller. No address stands for no report, as on a fresh handle.
        self.set_fixed_point_emulation_mantissa_bit_count_pointer
            .map_or(Ok(()), |set| done(unsafe { set(handle, DevicePtr::new(0)) }))
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
        "Create" | "Destroy" | "SetStream" | "SetWorkspace" | "SetPointerMode" => format!("cublas{name}_v2"),
        _ => format!("cublas{name}"),
    }
}

/// cuBLASLt's symbol of a name in the tables.
pub(crate) fn lt_symbol(name: &str) -> String {
    format!("cublasLt{name}")
}
