//! The exported functions and structures against bindings that were generated from AMD's headers: HIP 7, and HIP 5 for the
//! properties of old.

#![allow(missing_docs, reason = "tests are documented by their names")]

use std::ffi::CStr;
use std::mem::offset_of;

use cubecl_hip_sys as vendor;
use highwater_simulated_blas::signature::Signature;

#[path = "../../src/lib.rs"]
mod library;

macro_rules! same {
    ($($name:ident($($argument:tt),*);)*) => {
        [$((
            stringify!($name),
            (library::$name as unsafe extern "C" fn($($argument),*) -> _).classes(),
            (vendor::$name as unsafe extern "C" fn($($argument),*) -> _).classes(),
        )),*]
    };
}

#[test]
fn every_exported_function_has_the_types_of_the_vendors_header() {
    let functions = same! {
        hipInit(_);
        hipRuntimeGetVersion(_);
        hipDriverGetVersion(_);
        hipGetDeviceCount(_);
        hipGetLastError();
        hipPeekAtLastError();
        hipGetErrorName(_);
        hipGetErrorString(_);
        hipSetDevice(_);
        hipGetDevice(_);
        hipDeviceGet(_, _);
        hipDeviceGetName(_, _, _);
        hipDeviceGetUuid(_, _);
        hipDeviceTotalMem(_, _);
        hipDeviceGetPCIBusId(_, _, _);
        hipDeviceGetAttribute(_, _, _);
        hipGetDevicePropertiesR0600(_, _);
        hipDeviceSynchronize();
        hipDeviceCanAccessPeer(_, _, _);
        hipDeviceEnablePeerAccess(_, _);
        hipDeviceDisablePeerAccess(_);
        hipDeviceGetStreamPriorityRange(_, _);
        hipStreamCreate(_);
        hipStreamCreateWithFlags(_, _);
        hipStreamCreateWithPriority(_, _, _);
        hipStreamDestroy(_);
        hipStreamQuery(_);
        hipStreamSynchronize(_);
        hipStreamWaitEvent(_, _, _);
        hipStreamGetFlags(_, _);
        hipStreamGetPriority(_, _);
        hipStreamGetDevice(_, _);
        hipStreamGetId(_, _);
        hipLaunchHostFunc(_, _, _);
        hipStreamBeginCapture(_, _);
        hipStreamEndCapture(_, _);
        hipStreamIsCapturing(_, _);
        hipStreamGetCaptureInfo(_, _, _);
        hipThreadExchangeStreamCaptureMode(_);
        hipGraphInstantiate(_, _, _, _, _);
        hipGraphInstantiateWithFlags(_, _, _);
        hipGraphLaunch(_, _);
        hipGraphDestroy(_);
        hipGraphExecDestroy(_);
        hipGraphGetNodes(_, _, _);
        hipGraphNodeGetType(_, _);
        hipEventCreate(_);
        hipEventCreateWithFlags(_, _);
        hipEventDestroy(_);
        hipEventRecord(_, _);
        hipEventRecordWithFlags(_, _, _);
        hipEventQuery(_);
        hipEventSynchronize(_);
        hipEventElapsedTime(_, _, _);
        hipMalloc(_, _);
        hipFree(_);
        hipMallocAsync(_, _, _);
        hipFreeAsync(_, _);
        hipMemcpy(_, _, _, _);
        hipMemcpyAsync(_, _, _, _, _);
        hipMemcpyHtoDAsync(_, _, _, _);
        hipMemcpyDtoHAsync(_, _, _, _);
        hipMemcpyDtoDAsync(_, _, _, _);
        hipMemcpyPeerAsync(_, _, _, _, _, _);
        hipMemsetAsync(_, _, _, _);
        hipMemsetD8Async(_, _, _, _);
        hipMemsetD16Async(_, _, _, _);
        hipMemsetD32Async(_, _, _, _);
        hipMemGetInfo(_, _);
        hipPointerGetAttributes(_, _);
        hipMemGetAddressRange(_, _, _);
        hipDeviceGetDefaultMemPool(_, _);
        hipMemPoolSetAttribute(_, _, _);
        hipMemPoolGetAttribute(_, _, _);
        hipMemPoolTrimTo(_, _);
        hipHostMalloc(_, _, _);
        hipHostFree(_);
        hipHostGetFlags(_, _);
        hipHostRegister(_, _, _);
        hipHostUnregister(_);
        hipHostGetDevicePointer(_, _, _);
        hipIpcGetMemHandle(_, _);
        hipIpcOpenMemHandle(_, _, _);
        hipIpcCloseMemHandle(_);
        hipIpcGetEventHandle(_, _);
        hipIpcOpenEventHandle(_, _);
        hipGetProcAddress(_, _, _, _, _);
        hipGetDriverEntryPoint(_, _, _, _);
    };
    for (name, ours, theirs) in functions {
        assert_eq!(ours, theirs, "{name}");
    }
}

fn attribute(which: vendor::hipDeviceAttribute_t) -> i32 {
    let mut value = -1;
    // SAFETY: the answer has a place.
    assert_eq!(unsafe { library::hipDeviceGetAttribute(&mut value, which as i32, 0) }, 0, "{which}");
    value
}

/// The attributes' numbers do not change between versions; both layouts have to agree with them.
#[test]
fn properties_stand_where_the_vendors_structures_have_them() {
    // SAFETY: a structure of numbers, for which zeros are good.
    let mut new = unsafe { std::mem::zeroed::<vendor::hipDeviceProp_tR0600>() };
    // SAFETY: as above.
    let mut old = unsafe { std::mem::zeroed::<hip_sys::hiprt::hipDeviceProp_t>() };
    assert_eq!((size_of_val(&new), size_of_val(&old)), (1472, 792));
    assert_eq!(offset_of!(vendor::hipDeviceProp_tR0600, gcnArchName), 1160);
    // SAFETY: there is room for the structures.
    unsafe {
        assert_eq!(library::hipGetDevicePropertiesR0600(std::ptr::from_mut(&mut new).cast(), 0), 0);
        assert_eq!(library::hipGetDeviceProperties(std::ptr::from_mut(&mut old).cast(), 0), 0);
    }
    macro_rules! number {
        ($field:ident, $attribute:ident) => {
            let number = attribute(vendor::$attribute);
            assert_eq!((new.$field, old.$field), (number, number), stringify!($field));
        };
    }
    number!(warpSize, hipDeviceAttribute_t_hipDeviceAttributeWarpSize);
    number!(multiProcessorCount, hipDeviceAttribute_t_hipDeviceAttributeMultiprocessorCount);
    number!(major, hipDeviceAttribute_t_hipDeviceAttributeComputeCapabilityMajor);
    number!(minor, hipDeviceAttribute_t_hipDeviceAttributeComputeCapabilityMinor);
    number!(pciBusID, hipDeviceAttribute_t_hipDeviceAttributePciBusId);
    number!(pciDeviceID, hipDeviceAttribute_t_hipDeviceAttributePciDeviceId);
    number!(pciDomainID, hipDeviceAttribute_t_hipDeviceAttributePciDomainID);
    number!(maxThreadsPerBlock, hipDeviceAttribute_t_hipDeviceAttributeMaxThreadsPerBlock);
    number!(regsPerBlock, hipDeviceAttribute_t_hipDeviceAttributeMaxRegistersPerBlock);
    number!(clockRate, hipDeviceAttribute_t_hipDeviceAttributeClockRate);
    number!(memoryClockRate, hipDeviceAttribute_t_hipDeviceAttributeMemoryClockRate);
    number!(memoryBusWidth, hipDeviceAttribute_t_hipDeviceAttributeMemoryBusWidth);
    number!(l2CacheSize, hipDeviceAttribute_t_hipDeviceAttributeL2CacheSize);
    number!(concurrentKernels, hipDeviceAttribute_t_hipDeviceAttributeConcurrentKernels);
    number!(canMapHostMemory, hipDeviceAttribute_t_hipDeviceAttributeCanMapHostMemory);
    assert_eq!(new.maxThreadsDim, [1024; 3]);
    assert_eq!((new.integrated, new.unifiedAddressing, new.streamPrioritiesSupported), (0, 1, 1));
    assert_eq!(new.asyncEngineCount, attribute(vendor::hipDeviceAttribute_t_hipDeviceAttributeAsyncEngineCount));
    assert_eq!(new.totalGlobalMem, old.totalGlobalMem);
    // SAFETY: the call ended the texts.
    let [new_arch, old_arch] =
        unsafe { [CStr::from_ptr(new.gcnArchName.as_ptr()), CStr::from_ptr(old.gcnArchName.as_ptr())] };
    assert_eq!((new_arch, old_arch), (c"gfx942:sramecc+:xnack-", c"gfx942:sramecc+:xnack-"));
}

#[test]
fn codes_have_the_vendors_names() {
    macro_rules! names {
        ($($code:ident)*) => { [$((vendor::$code, stringify!($code).trim_start_matches("hipError_t_"))),*] };
    }
    let codes = names! {
        hipError_t_hipSuccess hipError_t_hipErrorInvalidValue hipError_t_hipErrorOutOfMemory
        hipError_t_hipErrorNotInitialized hipError_t_hipErrorDeinitialized hipError_t_hipErrorInvalidConfiguration
        hipError_t_hipErrorInvalidMemcpyDirection hipError_t_hipErrorInsufficientDriver hipError_t_hipErrorNoDevice
        hipError_t_hipErrorInvalidDevice hipError_t_hipErrorInvalidContext hipError_t_hipErrorPeerAccessUnsupported
        hipError_t_hipErrorOperatingSystem hipError_t_hipErrorInvalidHandle hipError_t_hipErrorIllegalState
        hipError_t_hipErrorNotFound hipError_t_hipErrorNotReady hipError_t_hipErrorIllegalAddress
        hipError_t_hipErrorPeerAccessAlreadyEnabled hipError_t_hipErrorPeerAccessNotEnabled
        hipError_t_hipErrorContextIsDestroyed hipError_t_hipErrorHostMemoryAlreadyRegistered
        hipError_t_hipErrorHostMemoryNotRegistered hipError_t_hipErrorLaunchFailure hipError_t_hipErrorNotSupported
        hipError_t_hipErrorStreamCaptureUnsupported hipError_t_hipErrorStreamCaptureInvalidated
        hipError_t_hipErrorStreamCaptureMerge hipError_t_hipErrorStreamCaptureUnmatched
        hipError_t_hipErrorStreamCaptureUnjoined hipError_t_hipErrorStreamCaptureIsolation
        hipError_t_hipErrorStreamCaptureImplicit hipError_t_hipErrorCapturedEvent
        hipError_t_hipErrorStreamCaptureWrongThread hipError_t_hipErrorUnknown
    };
    for (code, name) in codes {
        // SAFETY: the function gives a text that stays.
        let ours = unsafe { CStr::from_ptr(library::hipGetErrorName(code as i32)) };
        assert_eq!(ours.to_str(), Ok(name), "{code}");
    }
}
