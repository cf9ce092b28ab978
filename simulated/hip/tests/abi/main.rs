//! The ABI check: the exported functions and structures against bindings that were generated from AMD's headers: HIP 7, and HIP 5 for the
//! properties of old.

#![allow(missing_docs, reason = "tests are documented by their names")]

use std::ffi::CStr;
use std::mem::offset_of;

use cubecl_hip_sys as vendor;
use highwater_simulated_blas::pairs;
use highwater_simulated_blas::signature::check;

#[path = "../../src/lib.rs"]
mod library;

use library::*;

#[test]
fn every_exported_function_has_the_types_of_the_vendors_header() {
    let others = pairs! {
        cubecl_hip_sys, [unsafe extern "C" fn]:
        hipGetLastError = hipGetLastError();
        hipPeekAtLastError = hipPeekAtLastError();
        hipGetErrorName = hipGetErrorName(_);
        hipGetErrorString = hipGetErrorString(_);
    };
    check(&[signatures(), deviceless_signatures(), others]);
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
