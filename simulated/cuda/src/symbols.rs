//! The functions by name, for `cuGetProcAddress`, which takes names without their version.

use std::ffi::{CStr, c_void};

use highwater_simulated_engine::border::Function;
use highwater_simulated_engine::functions;

/// The address of a function, by its symbol or by the symbol without `_v2`.
pub(crate) fn find(name: &CStr) -> Option<*mut c_void> {
    let name = name.to_str().ok()?;
    let exact = FUNCTIONS.iter().find(|function| function.symbol() == name);
    let versioned = || FUNCTIONS.iter().find(|function| function.symbol().strip_suffix("_v2") == Some(name));
    exact.or_else(versioned).map(Function::address)
}

static FUNCTIONS: &[Function] = functions! {
    cuInit
    cuDriverGetVersion
    cuDeviceGetCount
    cuDeviceGet
    cuDeviceGetName
    cuDeviceGetUuid_v2
    cuDeviceTotalMem_v2
    cuDeviceGetPCIBusId
    cuDeviceGetAttribute
    cuDeviceCanAccessPeer
    cuCtxEnablePeerAccess
    cuDevicePrimaryCtxRetain
    cuDevicePrimaryCtxRelease_v2
    cuDevicePrimaryCtxGetState
    cuCtxGetCurrent
    cuCtxSetCurrent
    cuCtxPushCurrent_v2
    cuCtxPopCurrent_v2
    cuCtxGetDevice
    cuCtxSynchronize
    cuCtxGetStreamPriorityRange
    cuStreamCreate
    cuStreamCreateWithPriority
    cuStreamDestroy_v2
    cuStreamQuery
    cuStreamSynchronize
    cuStreamWaitEvent
    cuStreamGetCtx
    cuStreamGetPriority
    cuStreamGetFlags
    cuStreamGetId
    cuStreamBeginCapture_v2
    cuStreamEndCapture
    cuStreamIsCapturing
    cuThreadExchangeStreamCaptureMode
    cuGraphInstantiateWithFlags
    cuGraphLaunch
    cuGraphDestroy
    cuGraphExecDestroy
    cuGraphGetNodes
    cuGraphNodeGetType
    cuLaunchHostFunc
    cuEventCreate
    cuEventDestroy_v2
    cuEventRecord
    cuEventQuery
    cuEventSynchronize
    cuEventElapsedTime
    cuEventElapsedTime_v2
    cuMemAlloc_v2
    cuMemFree_v2
    cuMemGetInfo_v2
    cuMemGetAddressRange_v2
    cuMemAllocAsync
    cuMemFreeAsync
    cuDeviceGetDefaultMemPool
    cuMemPoolSetAttribute
    cuMemPoolGetAttribute
    cuMemPoolTrimTo
    cuMemPoolSetAccess
    cuMemHostAlloc
    cuMemFreeHost
    cuMemHostRegister_v2
    cuMemHostUnregister
    cuMemHostGetDevicePointer_v2
    cuPointerGetAttribute
    cuMemcpyAsync
    cuMemcpyHtoDAsync_v2
    cuMemcpyDtoHAsync_v2
    cuMemcpyDtoDAsync_v2
    cuMemcpyPeerAsync
    cuMemcpyHtoD_v2
    cuMemcpyDtoH_v2
    cuMemcpyDtoD_v2
    cuMemsetD8Async
    cuMemsetD16Async
    cuMemsetD32Async
    cuIpcGetMemHandle
    cuIpcOpenMemHandle_v2
    cuIpcCloseMemHandle
    cuIpcGetEventHandle
    cuIpcOpenEventHandle
    cuMemCreate
    cuMemRelease
    cuMemRetainAllocationHandle
    cuMemAddressReserve
    cuMemAddressFree
    cuMemMap
    cuMemUnmap
    cuMemSetAccess
    cuMemExportToShareableHandle
    cuMemImportFromShareableHandle
    cuMemGetAllocationGranularity
    cuGetErrorName
    cuGetErrorString
    cuGetProcAddress_v2
};
