//! The tables of calls that only CUDA has, and NVIDIA's symbols for the names in all tables.

use cudarc::driver::sys;
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
            /// Initializes the driver: flags.
            init: "Init" (u32);
            /// Returns the CUDA version of the driver, 1000 * major + 10 * minor: out.
            driver_get_version: "DriverGetVersion" (*mut i32);
            /// Returns the number of devices: out.
            device_get_count: "DeviceGetCount" (*mut i32);
            /// Returns the device of an ordinal: out, ordinal.
            device_get: "DeviceGet" (*mut i32, i32);
            /// Returns a device's name: out, its bytes, device.
            device_get_name: "DeviceGetName" (*mut u8, i32, i32);
            /// Returns the UUID of a device, or of its MIG partition: out, device.
            device_get_uuid: "DeviceGetUuid_v2" (*mut [u8; 16], i32);
            /// Returns a device's memory in bytes: out, device.
            device_total_mem: "DeviceTotalMem_v2" (*mut usize, i32);
            /// Returns a device's PCI address: out, its bytes, device.
            device_get_pci_bus_id: "DeviceGetPCIBusId" (*mut u8, i32, i32);
            /// Returns an attribute of a device: out, attribute, device.
            device_get_attribute: "DeviceGetAttribute" (*mut i32, i32, i32);
            /// Returns whether a device can access a peer's memory: out, device, peer.
            device_can_access_peer: "DeviceCanAccessPeer" (*mut i32, i32, i32);
            /// Retains a device's primary context: out, device.
            device_primary_ctx_retain: "DevicePrimaryCtxRetain" (*mut RawContext, i32);
            /// Returns whether a device's primary context exists: device, out (flags), out.
            device_primary_ctx_get_state: "DevicePrimaryCtxGetState" (i32, *mut u32, *mut i32);
            /// Returns the calling thread's context: out.
            ctx_get_current: "CtxGetCurrent" (*mut RawContext);
            /// Makes a context current until it is popped: context.
            ctx_push_current: "CtxPushCurrent_v2" (RawContext);
            /// Makes the previous context current: out.
            ctx_pop_current: "CtxPopCurrent_v2" (*mut RawContext);
            /// Lets the current context access a peer's memory: peer context, flags.
            ctx_enable_peer_access: "CtxEnablePeerAccess" (RawContext, u32);
            /// Returns the context of a stream: stream, out.
            stream_get_ctx: "StreamGetCtx" (RawStream, *mut RawContext);
            /// Copies between devices: destination, its context, source, its context, bytes, stream.
            memcpy_peer_async: "MemcpyPeerAsync" (DevicePtr, RawContext, DevicePtr, RawContext, usize, RawStream);
            /// Copies rows: the copy, stream.
            memcpy_2d_async: "Memcpy2DAsync" (*const sys::CUDA_MEMCPY2D_st, RawStream);
            /// Copies rows between devices: the copy, stream.
            memcpy_3d_peer_async: "Memcpy3DPeerAsync" (*const sys::CUDA_MEMCPY3D_PEER_st, RawStream);
        }
        optional {
            /// Returns an attribute of memory: out, attribute, address.
            pointer_get_attribute: "PointerGetAttribute" (*mut u8, u32, DevicePtr);
        }
    }
}

vendor_calls! {
    /// The calls of virtual memory. A driver has all of them or none.
    pub(crate) struct VirtualMemoryCalls {
        required {
            /// Creates an allocation: out, bytes, properties, flags.
            mem_create: "MemCreate" (*mut RawAllocation, usize, *const crate::virtual_memory::Properties, u64);
            /// Releases an allocation.
            mem_release: "MemRelease" (RawAllocation);
            /// Returns the granularity of allocations: out, properties, option.
            mem_get_allocation_granularity: "MemGetAllocationGranularity" (*mut usize, *const crate::virtual_memory::Properties, u32);
            /// Reserves addresses: out, bytes, alignment, preferred address, flags.
            mem_address_reserve: "MemAddressReserve" (*mut DevicePtr, usize, usize, DevicePtr, u64);
            /// Frees reserved addresses: address, bytes.
            mem_address_free: "MemAddressFree" (DevicePtr, usize);
            /// Maps an allocation: address, bytes, offset, allocation, flags.
            mem_map: "MemMap" (DevicePtr, usize, usize, RawAllocation, u64);
            /// Unmaps an allocation: address, bytes.
            mem_unmap: "MemUnmap" (DevicePtr, usize);
            /// Grants access to mapped memory: address, bytes, descriptions, their number.
            mem_set_access: "MemSetAccess" (DevicePtr, usize, *const crate::virtual_memory::Access, usize);
            /// Exports an allocation: out, allocation, handle type, flags.
            mem_export_to_shareable_handle: "MemExportToShareableHandle" (*mut u8, RawAllocation, u32, u64);
            /// Imports an allocation: out, handle, handle type.
            mem_import_from_shareable_handle: "MemImportFromShareableHandle" (*mut RawAllocation, *const u8, u32);
        }
        optional {
            /// Retains the allocation that is mapped at an address: out, address.
            mem_retain_allocation_handle: "MemRetainAllocationHandle" (*mut RawAllocation, DevicePtr);
        }
    }
}

vendor_calls! {
    /// cuBLAS's calls beyond [`BlasCalls`](highwater_driver::BlasCalls).
    pub(crate) struct CublasCalls {
        required {
            /// Returns a part of the version: part, out.
            get_property: "GetProperty" (u32, *mut i32);
        }
        optional {
            /// Returns the number of multiprocessors that kernels are chosen for: handle, out.
            get_sm_count_target: "GetSmCountTarget" (RawBlas, *mut i32);
            /// Sets the number of multiprocessors: handle, number.
            set_sm_count_target: "SetSmCountTarget" (RawBlas, i32);
            /// Returns the strategy of emulation: handle, out.
            get_emulation_strategy: "GetEmulationStrategy" (RawBlas, *mut i32);
            /// Sets the strategy of emulation: handle, strategy.
            set_emulation_strategy: "SetEmulationStrategy" (RawBlas, i32);
            /// Returns the special values that emulation keeps: handle, out.
            get_emulation_special_values_support: "GetEmulationSpecialValuesSupport" (RawBlas, *mut i32);
            /// Sets the special values that emulation keeps: handle, mask.
            set_emulation_special_values_support: "SetEmulationSpecialValuesSupport" (RawBlas, i32);
            /// Returns the mantissa control of emulation: handle, out.
            get_fixed_point_emulation_mantissa_control: "GetFixedPointEmulationMantissaControl" (RawBlas, *mut i32);
            /// Sets the mantissa control of emulation: handle, control.
            set_fixed_point_emulation_mantissa_control: "SetFixedPointEmulationMantissaControl" (RawBlas, i32);
            /// Returns the largest number of mantissa bits: handle, out.
            get_fixed_point_emulation_max_mantissa_bit_count: "GetFixedPointEmulationMaxMantissaBitCount" (RawBlas, *mut i32);
            /// Sets the largest number of mantissa bits: handle, bits.
            set_fixed_point_emulation_max_mantissa_bit_count: "SetFixedPointEmulationMaxMantissaBitCount" (RawBlas, i32);
            /// Returns the offset of the mantissa bits: handle, out.
            get_fixed_point_emulation_mantissa_bit_offset: "GetFixedPointEmulationMantissaBitOffset" (RawBlas, *mut i32);
            /// Sets the offset of the mantissa bits: handle, bits.
            set_fixed_point_emulation_mantissa_bit_offset: "SetFixedPointEmulationMantissaBitOffset" (RawBlas, i32);
            /// Sets the address to which products report their mantissa bits: handle, device address or 0.
            set_fixed_point_emulation_mantissa_bit_count_pointer: "SetFixedPointEmulationMantissaBitCountPointer" (RawBlas, DevicePtr);
        }
    }
}

/// The calls that read and write a setting of a handle.
type Setting =
    (Option<unsafe extern "C" fn(RawBlas, *mut i32) -> i32>, Option<unsafe extern "C" fn(RawBlas, i32) -> i32>);

impl CublasCalls {
    /// Returns the settings that only cuBLAS handles have. A logger belongs to the process, not to a handle.
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

    /// Reads the settings of a new handle. The defaults depend on the version and on environment variables.
    ///
    /// # Safety
    /// The caller must pass a live handle.
    pub(crate) unsafe fn settings_of(&self, handle: RawBlas) -> BlasSettings {
        self.settings().map(|(get, set)| {
            let (get, _) = get.zip(set)?;
            let mut value = 0;
            // SAFETY: The caller promises a live handle. The call writes one number, which outlives it.
            (unsafe { get(handle, &mut value) } == 0).then_some(value)
        })
    }

    /// Restores these settings.
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
                // SAFETY: As the caller promises.
                done(unsafe { set(handle, *value) })?;
            }
        }
        // SAFETY: As the caller promises. The null address turns reports off, as on a new handle.
        self.set_fixed_point_emulation_mantissa_bit_count_pointer
            .map_or(Ok(()), |set| done(unsafe { set(handle, DevicePtr::new(0)) }))
    }
}

/// The parts of a version: major, minor, patch.
pub(crate) const VERSION_PARTS: [u32; 3] = [0, 1, 2];

/// Returns the driver's symbol for a name in the tables.
pub(crate) fn driver_symbol(name: &str) -> String {
    /// Calls whose arguments changed after their first version.
    const SECOND: [&str; 14] = [
        "StreamDestroy",
        "EventDestroy",
        "MemAlloc",
        "MemFree",
        "MemGetInfo",
        "MemGetAddressRange",
        "MemcpyHtoDAsync",
        "MemcpyDtoHAsync",
        "MemcpyDtoDAsync",
        "Memcpy2DAsync",
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

/// Returns cuBLAS's symbol for a name in the tables.
pub(crate) fn blas_symbol(name: &str) -> String {
    match name {
        "Create" | "Destroy" | "SetStream" | "SetWorkspace" | "SetPointerMode" => format!("cublas{name}_v2"),
        _ => format!("cublas{name}"),
    }
}

/// Returns cuBLASLt's symbol for a name in the tables.
pub(crate) fn lt_symbol(name: &str) -> String {
    format!("cublasLt{name}")
}
