//! The exported functions against cudarc's declarations of the vendor's: as many arguments, each as large and as aligned.

use crate::library;
use cudarc::driver::sys;

/// Size and alignment of each argument and of the result.
trait Shape {
    fn shape() -> Vec<(usize, usize)>;
}

macro_rules! shapes {
    ($(($($argument:ident)*))*) => {
        $(
            impl<R, $($argument),*> Shape for unsafe fn($($argument),*) -> R {
                fn shape() -> Vec<(usize, usize)> {
                    vec![$((size_of::<$argument>(), align_of::<$argument>()),)* (size_of::<R>(), align_of::<R>())]
                }
            }

            impl<R, $($argument),*> Shape for unsafe extern "C" fn($($argument),*) -> R {
                fn shape() -> Vec<(usize, usize)> {
                    vec![$((size_of::<$argument>(), align_of::<$argument>()),)* (size_of::<R>(), align_of::<R>())]
                }
            }
        )*
    };
}

shapes! { () (A) (A B) (A B C) (A B C D) (A B C D E) (A B C D E F) }

fn shape_of<F: Shape>(_: F) -> Vec<(usize, usize)> {
    F::shape()
}

macro_rules! compare {
    ($($name:ident($($argument:tt)*);)*) => {
        $(
            let vendor = shape_of(sys::$name as unsafe fn($($argument),*) -> _);
            let ours = shape_of(library::$name as unsafe extern "C" fn($($argument),*) -> _);
            // The vendor's handles for 64 bytes are arrays of bytes, as ours are, so even alignments agree.
            assert_eq!(ours, vendor, stringify!($name));
        )*
    };
}

#[test]
fn every_exported_function_takes_what_the_vendors_takes() {
    compare! {
        cuInit(_);
        cuDriverGetVersion(_);
        cuDeviceGetCount(_);
        cuDeviceGet(_ _);
        cuDeviceGetName(_ _ _);
        cuDeviceGetUuid_v2(_ _);
        cuDeviceTotalMem_v2(_ _);
        cuDeviceGetPCIBusId(_ _ _);
        cuDeviceGetAttribute(_ _ _);
        cuDeviceCanAccessPeer(_ _ _);
        cuCtxEnablePeerAccess(_ _);
        cuDevicePrimaryCtxRetain(_ _);
        cuDevicePrimaryCtxRelease_v2(_);
        cuDevicePrimaryCtxGetState(_ _ _);
        cuCtxGetCurrent(_);
        cuCtxSetCurrent(_);
        cuCtxPushCurrent_v2(_);
        cuCtxPopCurrent_v2(_);
        cuCtxGetDevice(_);
        cuCtxSynchronize();
        cuCtxGetStreamPriorityRange(_ _);
        cuStreamCreate(_ _);
        cuStreamCreateWithPriority(_ _ _);
        cuStreamDestroy_v2(_);
        cuStreamQuery(_);
        cuStreamSynchronize(_);
        cuStreamWaitEvent(_ _ _);
        cuStreamGetCtx(_ _);
        cuStreamGetPriority(_ _);
        cuStreamGetFlags(_ _);
        cuStreamGetId(_ _);
        cuStreamBeginCapture_v2(_ _);
        cuStreamEndCapture(_ _);
        cuStreamIsCapturing(_ _);
        cuThreadExchangeStreamCaptureMode(_);
        cuGraphInstantiateWithFlags(_ _ _);
        cuGraphLaunch(_ _);
        cuGraphDestroy(_);
        cuGraphExecDestroy(_);
        cuGraphGetNodes(_ _ _);
        cuGraphNodeGetType(_ _);
        cuLaunchHostFunc(_ _ _);
        cuEventCreate(_ _);
        cuEventDestroy_v2(_);
        cuEventRecord(_ _);
        cuEventQuery(_);
        cuEventSynchronize(_);
        cuEventElapsedTime_v2(_ _ _);
        cuMemAlloc_v2(_ _);
        cuMemFree_v2(_);
        cuMemGetInfo_v2(_ _);
        cuMemGetAddressRange_v2(_ _ _);
        cuMemAllocAsync(_ _ _);
        cuMemFreeAsync(_ _);
        cuDeviceGetDefaultMemPool(_ _);
        cuMemPoolSetAttribute(_ _ _);
        cuMemPoolGetAttribute(_ _ _);
        cuMemPoolTrimTo(_ _);
        cuMemPoolSetAccess(_ _ _);
        cuMemHostAlloc(_ _ _);
        cuMemFreeHost(_);
        cuMemHostRegister_v2(_ _ _);
        cuMemHostUnregister(_);
        cuMemHostGetDevicePointer_v2(_ _ _);
        cuPointerGetAttribute(_ _ _);
        cuMemcpyAsync(_ _ _ _);
        cuMemcpyHtoDAsync_v2(_ _ _ _);
        cuMemcpyDtoHAsync_v2(_ _ _ _);
        cuMemcpyDtoDAsync_v2(_ _ _ _);
        cuMemcpyPeerAsync(_ _ _ _ _ _);
        cuMemcpyHtoD_v2(_ _ _);
        cuMemcpyDtoH_v2(_ _ _);
        cuMemcpyDtoD_v2(_ _ _);
        cuMemsetD8Async(_ _ _ _);
        cuMemsetD16Async(_ _ _ _);
        cuMemsetD32Async(_ _ _ _);
        cuIpcGetMemHandle(_ _);
        cuIpcOpenMemHandle_v2(_ _ _);
        cuIpcCloseMemHandle(_);
        cuIpcGetEventHandle(_ _);
        cuIpcOpenEventHandle(_ _);
        cuMemCreate(_ _ _ _);
        cuMemRelease(_);
        cuMemRetainAllocationHandle(_ _);
        cuMemAddressReserve(_ _ _ _ _);
        cuMemAddressFree(_ _);
        cuMemMap(_ _ _ _ _);
        cuMemUnmap(_ _);
        cuMemSetAccess(_ _ _ _);
        cuMemExportToShareableHandle(_ _ _ _);
        cuMemImportFromShareableHandle(_ _ _);
        cuMemGetAllocationGranularity(_ _ _);
        cuGetErrorName(_ _);
        cuGetErrorString(_ _);
        cuGetProcAddress_v2(_ _ _ _ _);
    }
}

#[test]
fn structures_are_laid_out_as_the_vendors() {
    use library::layout::{AccessDescription, AllocationProperties, IpcHandle, Uuid};
    assert_eq!(size_of::<AllocationProperties>(), size_of::<sys::CUmemAllocationProp>());
    assert_eq!(size_of::<AccessDescription>(), size_of::<sys::CUmemAccessDesc>());
    assert_eq!(size_of::<IpcHandle>(), size_of::<sys::CUipcMemHandle>());
    assert_eq!(size_of::<IpcHandle>(), size_of::<sys::CUipcEventHandle>());
    assert_eq!(size_of::<Uuid>(), size_of::<sys::CUuuid>());
    let location = std::mem::offset_of!(sys::CUmemAllocationProp, location);
    assert_eq!(location, std::mem::offset_of!(AllocationProperties, location_kind));
    assert_eq!(
        std::mem::offset_of!(sys::CUmemAllocationProp, requestedHandleTypes),
        std::mem::offset_of!(AllocationProperties, handle_types)
    );
    assert_eq!(std::mem::offset_of!(sys::CUmemAccessDesc, flags), std::mem::offset_of!(AccessDescription, flags));
}

#[test]
fn codes_have_the_vendors_numbers() {
    use highwater_simulated_engine::Code;
    use sys::cudaError_enum as vendor;
    for (ours, theirs) in [
        (Code::INVALID_VALUE, vendor::CUDA_ERROR_INVALID_VALUE),
        (Code::OUT_OF_MEMORY, vendor::CUDA_ERROR_OUT_OF_MEMORY),
        (Code::NOT_INITIALIZED, vendor::CUDA_ERROR_NOT_INITIALIZED),
        (Code::DEINITIALIZED, vendor::CUDA_ERROR_DEINITIALIZED),
        (Code::STUB_LIBRARY, vendor::CUDA_ERROR_STUB_LIBRARY),
        (Code::NO_DEVICE, vendor::CUDA_ERROR_NO_DEVICE),
        (Code::INVALID_DEVICE, vendor::CUDA_ERROR_INVALID_DEVICE),
        (Code::INVALID_CONTEXT, vendor::CUDA_ERROR_INVALID_CONTEXT),
        (Code::PEER_ACCESS_UNSUPPORTED, vendor::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED),
        (Code::OPERATING_SYSTEM, vendor::CUDA_ERROR_OPERATING_SYSTEM),
        (Code::INVALID_HANDLE, vendor::CUDA_ERROR_INVALID_HANDLE),
        (Code::ILLEGAL_STATE, vendor::CUDA_ERROR_ILLEGAL_STATE),
        (Code::NOT_FOUND, vendor::CUDA_ERROR_NOT_FOUND),
        (Code::NOT_READY, vendor::CUDA_ERROR_NOT_READY),
        (Code::ILLEGAL_ADDRESS, vendor::CUDA_ERROR_ILLEGAL_ADDRESS),
        (Code::PEER_ACCESS_ALREADY_ENABLED, vendor::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED),
        (Code::PEER_ACCESS_NOT_ENABLED, vendor::CUDA_ERROR_PEER_ACCESS_NOT_ENABLED),
        (Code::CONTEXT_IS_DESTROYED, vendor::CUDA_ERROR_CONTEXT_IS_DESTROYED),
        (Code::HOST_MEMORY_ALREADY_REGISTERED, vendor::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED),
        (Code::HOST_MEMORY_NOT_REGISTERED, vendor::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED),
        (Code::LAUNCH_FAILED, vendor::CUDA_ERROR_LAUNCH_FAILED),
        (Code::NOT_PERMITTED, vendor::CUDA_ERROR_NOT_PERMITTED),
        (Code::NOT_SUPPORTED, vendor::CUDA_ERROR_NOT_SUPPORTED),
        (Code::STREAM_CAPTURE_UNSUPPORTED, vendor::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
        (Code::STREAM_CAPTURE_INVALIDATED, vendor::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED),
        (Code::STREAM_CAPTURE_MERGE, vendor::CUDA_ERROR_STREAM_CAPTURE_MERGE),
        (Code::STREAM_CAPTURE_UNMATCHED, vendor::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED),
        (Code::STREAM_CAPTURE_UNJOINED, vendor::CUDA_ERROR_STREAM_CAPTURE_UNJOINED),
        (Code::STREAM_CAPTURE_ISOLATION, vendor::CUDA_ERROR_STREAM_CAPTURE_ISOLATION),
        (Code::STREAM_CAPTURE_IMPLICIT, vendor::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT),
        (Code::CAPTURED_EVENT, vendor::CUDA_ERROR_CAPTURED_EVENT),
        (Code::STREAM_CAPTURE_WRONG_THREAD, vendor::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD),
        (Code::UNKNOWN, vendor::CUDA_ERROR_UNKNOWN),
    ] {
        assert_eq!(ours.0, theirs as u32);
        let (name, _) = Code::describe(ours.0).unwrap();
        assert_eq!(name.trim_end_matches('\0'), format!("{theirs:?}"));
    }
}
