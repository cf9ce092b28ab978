//! Checks the tables of calls and the numbers against bindings that were generated from AMD's headers. `cubecl-hip-sys`
//! has the whole runtime of HIP 7. `hip-sys` has HIP 5 with hipBLAS 0.53, for the parts that have not changed since.
//! The tests link to neither: the first would need AMD's libraries when a program starts, and the second asks for names
//! that are not installed.

use cubecl_hip_sys as new;
use highwater_driver::abi_check::check;
use highwater_driver::{BlasCalls, Calls, IpcHandle, POINTER_MODE_HOST, capture_mode, capture_status};
use highwater_driver::{abi_pairs, abi_sizes};
use hip_sys::{hipblas, hiprt as old};

use crate::calls::{HipCalls, blas_symbol, runtime_symbol};
use crate::{codes, devices, quirks};

/// Checks the calls that both vendors have against a header.
macro_rules! calls {
    ($abi_check:ident, $header:ident) => {
        $abi_check! { Calls, c $header,
            required {
                stream_query = hipStreamQuery(_);
                stream_synchronize = hipStreamSynchronize(_);
                stream_create_with_priority = hipStreamCreateWithPriority(_, _, _);
                stream_destroy = hipStreamDestroy(_);
                stream_wait_event = hipStreamWaitEvent(_, _, _);
                get_stream_priority_range = hipDeviceGetStreamPriorityRange(_, _);
                event_create = hipEventCreateWithFlags(_, _);
                event_destroy = hipEventDestroy(_);
                event_record = hipEventRecord(_, _);
                event_query = hipEventQuery(_);
                event_synchronize = hipEventSynchronize(_);
                event_elapsed_time = hipEventElapsedTime(_, _, _);
                device_synchronize = hipDeviceSynchronize();
                mem_alloc = hipMalloc(_, _);
                mem_free = hipFree(_);
                mem_get_info = hipMemGetInfo(_, _);
                memcpy_htod_async = hipMemcpyHtoDAsync(_, _, _, _);
                memcpy_dtoh_async = hipMemcpyDtoHAsync(_, _, _, _);
                memcpy_dtod_async = hipMemcpyDtoDAsync(_, _, _, _);
                memset_d8_async = hipMemsetD8Async(_, _, _, _);
                memset_d16_async = hipMemsetD16Async(_, _, _, _);
                memset_d32_async = hipMemsetD32Async(_, _, _, _);
                mem_host_alloc = hipHostMalloc(_, _, _);
                mem_free_host = hipHostFree(_);
                mem_host_register = hipHostRegister(_, _, _);
                mem_host_unregister = hipHostUnregister(_);
                mem_host_get_device_pointer = hipHostGetDevicePointer(_, _, _);
            }
            optional {
                mem_alloc_async = hipMallocAsync(_, _, _);
                mem_free_async = hipFreeAsync(_, _);
                device_get_default_mem_pool = hipDeviceGetDefaultMemPool(_, _);
                mem_pool_set_attribute = hipMemPoolSetAttribute(_, _, _);
                mem_pool_trim_to = hipMemPoolTrimTo(_, _);
                stream_begin_capture = hipStreamBeginCapture(_, _);
                stream_end_capture = hipStreamEndCapture(_, _);
                stream_is_capturing = hipStreamIsCapturing(_, _);
                thread_exchange_stream_capture_mode = hipThreadExchangeStreamCaptureMode(_);
                graph_instantiate_with_flags = hipGraphInstantiateWithFlags(_, _, _);
                graph_launch = hipGraphLaunch(_, _);
                graph_destroy = hipGraphDestroy(_);
                graph_exec_destroy = hipGraphExecDestroy(_);
                ipc_get_mem_handle = hipIpcGetMemHandle(_, _);
                ipc_open_mem_handle = hipIpcOpenMemHandle(_, _, _);
                ipc_close_mem_handle = hipIpcCloseMemHandle(_);
                mem_get_address_range = hipMemGetAddressRange(_, _, _);
                ipc_get_event_handle = hipIpcGetEventHandle(_, _);
                ipc_open_event_handle = hipIpcOpenEventHandle(_, _);
            }
        }
    };
}

/// Checks the calls that only HIP has against a header, with further calls that not every header has.
macro_rules! hip_calls {
    ($abi_check:ident, $header:ident $(, $($more:tt)*)?) => {
        $abi_check! { HipCalls, c $header,
            required {
                init = hipInit(_);
                runtime_get_version = hipRuntimeGetVersion(_);
                driver_get_version = hipDriverGetVersion(_);
                get_device_count = hipGetDeviceCount(_);
                set_device = hipSetDevice(_);
                get_device = hipGetDevice(_);
                device_get_name = hipDeviceGetName(_, _, _);
                device_get_uuid = hipDeviceGetUuid(_, _);
                device_total_mem = hipDeviceTotalMem(_, _);
                device_get_pci_bus_id = hipDeviceGetPCIBusId(_, _, _);
                device_get_attribute = hipDeviceGetAttribute(_, _, _);
                device_can_access_peer = hipDeviceCanAccessPeer(_, _, _);
                device_enable_peer_access = hipDeviceEnablePeerAccess(_, _);
                memcpy_peer_async = hipMemcpyPeerAsync(_, _, _, _, _, _);
                memcpy_2d_async = hipMemcpy2DAsync(_, _, _, _, _, _, _, _);
                $($($more)*)?
            }
            optional { pointer_get_attributes = hipPointerGetAttributes(_, _); }
        }
    };
}

#[test]
fn the_runtimes_calls_are_those_of_its_header() {
    let pairs = calls! { abi_pairs, new };
    check(Calls::NAMES, runtime_symbol, &pairs, &[]);
    let pairs = hip_calls! { abi_pairs, new,
        get_device_properties = hipGetDevicePropertiesR0600(_, _);
        stream_get_device = hipStreamGetDevice(_, _);
    };
    check(HipCalls::NAMES, runtime_symbol, &pairs, &[]);
}

// Unchanged since HIP 5.
calls! { abi_sizes, old }
hip_calls! { abi_sizes, old }

abi_sizes! { BlasCalls, c hipblas,
    required {
        create = hipblasCreate(_);
        destroy = hipblasDestroy(_);
        set_stream = hipblasSetStream(_, _);
        set_atomics_mode = hipblasSetAtomicsMode(_, _);
        set_pointer_mode = hipblasSetPointerMode(_, _);
        // These types differ from today's and have the same width.
        gemm_ex = hipblasGemmEx(_, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _);
        gemm_strided_batched_ex = hipblasGemmStridedBatchedEx(_, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _);
    }
    optional {}
}

/// Checks that numbers equal those of the named headers.
macro_rules! numbers {
    ($($name:ident = $ours:expr, [$($theirs:expr),+];)*) => {
        $($(const _: () = assert!($ours as i64 == $theirs as i64, stringify!($name));)+)*
    };
}

numbers! {
    not_ready = quirks::NOT_READY, [new::hipError_t_hipErrorNotReady, old::hipError_t::hipErrorNotReady];
    no_device = quirks::NO_DEVICE, [new::hipError_t_hipErrorNoDevice, old::hipError_t::hipErrorNoDevice];
    invalid_device = quirks::INVALID_DEVICE, [new::hipError_t_hipErrorInvalidDevice, old::hipError_t::hipErrorInvalidDevice];
    no_peer = quirks::PEER_ACCESS_UNSUPPORTED,
        [new::hipError_t_hipErrorPeerAccessUnsupported, old::hipError_t::hipErrorPeerAccessUnsupported];
    peer_already = quirks::PEER_ACCESS_ALREADY_ENABLED,
        [new::hipError_t_hipErrorPeerAccessAlreadyEnabled, old::hipError_t::hipErrorPeerAccessAlreadyEnabled];
    out_of_memory = quirks::OUT_OF_MEMORY, [new::hipError_t_hipErrorOutOfMemory, old::hipError_t::hipErrorOutOfMemory];
    invalid_handle = quirks::INVALID_HANDLE, [new::hipError_t_hipErrorInvalidHandle, old::hipError_t::hipErrorInvalidHandle];
    to_device = quirks::MEMCPY_HOST_TO_DEVICE,
        [new::hipMemcpyKind_hipMemcpyHostToDevice, old::hipMemcpyKind::hipMemcpyHostToDevice];
    to_host = quirks::MEMCPY_DEVICE_TO_HOST,
        [new::hipMemcpyKind_hipMemcpyDeviceToHost, old::hipMemcpyKind::hipMemcpyDeviceToHost];
    on_devices = quirks::MEMCPY_DEVICE_TO_DEVICE,
        [new::hipMemcpyKind_hipMemcpyDeviceToDevice, old::hipMemcpyKind::hipMemcpyDeviceToDevice];
    lost = quirks::CAPTURE_INVALIDATED,
        [new::hipError_t_hipErrorStreamCaptureInvalidated, old::hipError_t::hipErrorStreamCaptureInvalidated];
    non_blocking = quirks::STREAM_NON_BLOCKING, [new::hipStreamNonBlocking, old::hipStreamNonBlocking];
    no_timing = quirks::EVENT_NO_TIMING, [new::hipEventDisableTiming, old::hipEventDisableTiming];
    interprocess = quirks::EVENT_INTERPROCESS, [new::hipEventInterprocess, old::hipEventInterprocess];
    release = quirks::EVENT_RELEASE_TO_SYSTEM, [new::hipEventReleaseToSystem, old::hipEventReleaseToSystem];
    portable = quirks::HOST_PORTABLE, [new::hipHostMallocPortable, old::hipHostMallocPortable];
    mapped = quirks::HOST_MAPPED, [new::hipHostMallocMapped, old::hipHostMallocMapped];
    combined = quirks::HOST_WRITE_COMBINED, [new::hipHostMallocWriteCombined, old::hipHostMallocWriteCombined];
    non_coherent = quirks::HOST_NON_COHERENT, [new::hipHostMallocNonCoherent, old::hipHostMallocNonCoherent];
    register = quirks::REGISTER_PORTABLE, [new::hipHostRegisterPortable, old::hipHostRegisterPortable];
    register_mapped = quirks::REGISTER_MAPPED, [new::hipHostRegisterMapped, old::hipHostRegisterMapped];
    register_read_only = quirks::REGISTER_READ_ONLY, [new::hipHostRegisterReadOnly];
    // HIP 5 has another number.
    ipc = quirks::IPC_LAZY_PEER_ACCESS, [new::hipIpcMemLazyEnablePeerAccess];
    threshold = quirks::POOL_RELEASE_THRESHOLD,
        [new::hipMemPoolAttr_hipMemPoolAttrReleaseThreshold, old::hipMemPoolAttr::hipMemPoolAttrReleaseThreshold];
    pools = devices::MEMORY_POOLS,
        [new::hipDeviceAttribute_t_hipDeviceAttributeMemoryPoolsSupported,
         old::hipDeviceAttribute_t::hipDeviceAttributeMemoryPoolsSupported];
    mode_none = capture_status::NONE, [new::hipStreamCaptureStatus_hipStreamCaptureStatusNone];
    mode_active = capture_status::ACTIVE, [new::hipStreamCaptureStatus_hipStreamCaptureStatusActive];
    mode_lost = capture_status::INVALIDATED, [new::hipStreamCaptureStatus_hipStreamCaptureStatusInvalidated];
    mode_global = capture_mode::GLOBAL, [new::hipStreamCaptureMode_hipStreamCaptureModeGlobal];
    mode_thread = capture_mode::THREAD_LOCAL, [new::hipStreamCaptureMode_hipStreamCaptureModeThreadLocal];
    mode_relaxed = capture_mode::RELAXED, [new::hipStreamCaptureMode_hipStreamCaptureModeRelaxed];
    plain = quirks::OP_N, [hipblas::hipblasOperation_t::HIPBLAS_OP_N];
    transposed = quirks::OP_T, [hipblas::hipblasOperation_t::HIPBLAS_OP_T];
    algorithm = quirks::GEMM_DEFAULT, [hipblas::hipblasGemmAlgo_t::HIPBLAS_GEMM_DEFAULT];
    host_pointers = POINTER_MODE_HOST, [hipblas::hipblasPointerMode_t::HIPBLAS_POINTER_MODE_HOST];
    atomics_not = quirks::ATOMICS_NOT_ALLOWED, [hipblas::hipblasAtomicsMode_t::HIPBLAS_ATOMICS_NOT_ALLOWED];
    atomics = quirks::ATOMICS_ALLOWED, [hipblas::hipblasAtomicsMode_t::HIPBLAS_ATOMICS_ALLOWED];
}

// The layout of HIP 6. One field of it is read, from a larger buffer.
const _: () = assert!(std::mem::offset_of!(new::hipDeviceProp_tR0600, gcnArchName) == devices::ARCHITECTURE.start);
const _: () = assert!(size_of::<new::hipDeviceProp_tR0600>() == 1472);
const _: () = assert!(size_of::<new::hipDeviceProp_tR0600>() <= size_of::<devices::Properties>());
const _: () = assert!(align_of::<new::hipDeviceProp_tR0600>() <= align_of::<devices::Properties>());
const _: () = assert!(size_of::<new::hipIpcMemHandle_t>() == size_of::<IpcHandle>());
const _: () = assert!(size_of::<old::hipUUID>() == 16 && size_of::<new::hipUUID>() == 16);

#[test]
fn each_code_has_the_name_that_the_headers_give_it() {
    macro_rules! named {
        ($codes:expr, $type:ty: $($name:ident)*) => {
            let names = [$((stringify!($name), <$type>::$name as i32)),*];
            for row in $codes.rows {
                let found = names.iter().find(|(name, _)| *name == row.name);
                assert_eq!(found.map(|(_, number)| *number), Some(row.code), "{}", row.name);
            }
        };
    }
    named! { codes::HIP, old::hipError_t:
        hipErrorInvalidValue hipErrorOutOfMemory hipErrorNotInitialized hipErrorDeinitialized hipErrorInvalidDevicePointer
        hipErrorInvalidMemcpyDirection hipErrorInsufficientDriver hipErrorMissingConfiguration hipErrorNoDevice hipErrorInvalidDevice
        hipErrorInvalidContext hipErrorMapFailed hipErrorNoBinaryForGpu hipErrorECCNotCorrectable hipErrorPeerAccessUnsupported
        hipErrorSharedObjectInitFailed hipErrorOperatingSystem hipErrorInvalidHandle hipErrorIllegalState hipErrorNotFound
        hipErrorNotReady hipErrorIllegalAddress hipErrorLaunchOutOfResources hipErrorLaunchTimeOut
        hipErrorPeerAccessAlreadyEnabled hipErrorPeerAccessNotEnabled hipErrorContextIsDestroyed hipErrorAssert
        hipErrorHostMemoryAlreadyRegistered hipErrorHostMemoryNotRegistered hipErrorLaunchFailure hipErrorNotSupported
        hipErrorStreamCaptureUnsupported hipErrorStreamCaptureInvalidated hipErrorStreamCaptureMerge
        hipErrorStreamCaptureUnmatched hipErrorStreamCaptureUnjoined hipErrorStreamCaptureIsolation
        hipErrorStreamCaptureImplicit hipErrorCapturedEvent hipErrorStreamCaptureWrongThread hipErrorUnknown
    }
    named! { codes::HIPBLAS, hipblas::hipblasStatus_t:
        HIPBLAS_STATUS_NOT_INITIALIZED HIPBLAS_STATUS_ALLOC_FAILED HIPBLAS_STATUS_INVALID_VALUE HIPBLAS_STATUS_MAPPING_ERROR
        HIPBLAS_STATUS_EXECUTION_FAILED HIPBLAS_STATUS_INTERNAL_ERROR HIPBLAS_STATUS_NOT_SUPPORTED HIPBLAS_STATUS_ARCH_MISMATCH
        HIPBLAS_STATUS_HANDLE_IS_NULLPTR HIPBLAS_STATUS_INVALID_ENUM HIPBLAS_STATUS_UNKNOWN
    }
}

#[test]
fn the_symbols_of_hipblas_are_the_vendors() {
    let names: Vec<String> = BlasCalls::NAMES.iter().map(|(_, name)| blas_symbol(7, name)).collect();
    assert_eq!(names[..4], ["hipblasCreate", "hipblasDestroy", "hipblasSetStream", "hipblasSetAtomicsMode"]);
    assert!(names.contains(&"hipblasSetWorkspace".to_owned()));
}

#[test]
fn r2_5_transposes_and_the_default_algorithm_have_numbers_of_their_own() {
    for quirks in [&quirks::HIPBLAS_2, &quirks::HIPBLAS_3] {
        let (transposes, types, computes) = (quirks.transpose_codes, quirks.type_codes, quirks.compute_codes);
        assert_eq!((transposes.no, transposes.yes, quirks.default_algorithm), (111, 112, 160));
        assert_eq!([types.f16, types.bf16, types.f32, types.f64], [2, 14, 0, 1]);
        assert_eq!([computes.f32, computes.tf32, computes.f64], [2, 6, 7]);
    }
}
