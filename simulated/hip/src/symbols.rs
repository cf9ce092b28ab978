//! The functions by name, for `hipGetProcAddress` and `hipGetDriverEntryPoint`. What a version lacks they lack as well.

use std::ffi::{CStr, c_void};

use highwater_simulated_engine::border::Function;
use highwater_simulated_engine::{functions, hip};

/// The functions that came with HIP 7.
const SINCE_7: [&str; 2] = ["hipStreamGetId", "hipGetDriverEntryPoint"];

/// The address of a function.
pub(crate) fn find(name: &CStr) -> Option<*mut c_void> {
    let name = name.to_str().ok()?;
    if SINCE_7.contains(&name) && hip::settings().is_ok_and(|settings| settings.version.0 < 7) {
        return None;
    }
    FUNCTIONS.iter().find(|function| function.symbol() == name).map(Function::address)
}

static FUNCTIONS: &[Function] = functions! {
    hipInit
    hipRuntimeGetVersion
    hipDriverGetVersion
    hipGetDeviceCount
    hipGetLastError
    hipPeekAtLastError
    hipGetErrorName
    hipGetErrorString
    hipSetDevice
    hipGetDevice
    hipDeviceGet
    hipDeviceGetName
    hipDeviceGetUuid
    hipDeviceTotalMem
    hipDeviceGetPCIBusId
    hipDeviceGetAttribute
    hipGetDeviceProperties
    hipGetDevicePropertiesR0000
    hipGetDevicePropertiesR0600
    hipDeviceSynchronize
    hipDeviceCanAccessPeer
    hipDeviceEnablePeerAccess
    hipDeviceDisablePeerAccess
    hipDeviceGetStreamPriorityRange
    hipStreamCreate
    hipStreamCreateWithFlags
    hipStreamCreateWithPriority
    hipStreamDestroy
    hipStreamQuery
    hipStreamSynchronize
    hipStreamWaitEvent
    hipStreamGetFlags
    hipStreamGetPriority
    hipStreamGetDevice
    hipStreamGetId
    hipLaunchHostFunc
    hipStreamBeginCapture
    hipStreamEndCapture
    hipStreamIsCapturing
    hipStreamGetCaptureInfo
    hipThreadExchangeStreamCaptureMode
    hipGraphInstantiate
    hipGraphInstantiateWithFlags
    hipGraphLaunch
    hipGraphDestroy
    hipGraphExecDestroy
    hipGraphGetNodes
    hipGraphNodeGetType
    hipEventCreate
    hipEventCreateWithFlags
    hipEventDestroy
    hipEventRecord
    hipEventRecordWithFlags
    hipEventQuery
    hipEventSynchronize
    hipEventElapsedTime
    hipMalloc
    hipFree
    hipMallocAsync
    hipFreeAsync
    hipMemcpy
    hipMemcpyAsync
    hipMemcpyHtoDAsync
    hipMemcpyDtoHAsync
    hipMemcpyDtoDAsync
    hipMemcpyPeerAsync
    hipMemsetAsync
    hipMemsetD8Async
    hipMemsetD16Async
    hipMemsetD32Async
    hipMemGetInfo
    hipPointerGetAttributes
    hipMemGetAddressRange
    hipDeviceGetDefaultMemPool
    hipMemPoolSetAttribute
    hipMemPoolGetAttribute
    hipMemPoolTrimTo
    hipHostMalloc
    hipHostFree
    hipHostGetFlags
    hipHostRegister
    hipHostUnregister
    hipHostGetDevicePointer
    hipIpcGetMemHandle
    hipIpcOpenMemHandle
    hipIpcCloseMemHandle
    hipIpcGetEventHandle
    hipIpcOpenEventHandle
    hipGetProcAddress
    hipGetDriverEntryPoint
};
