//! Checks the tables of calls against bindings that were generated from NVIDIA's headers. Each call must have its
//! symbol, and arguments and a result of the same size and kind (integer or floating point).

use cudarc::{cublas, cublaslt, driver};
use highwater_driver::abi_check::{check, declared, in_header};
use highwater_driver::abi_pairs;
use highwater_driver::{BlasCalls, Calls, LtCalls};

use crate::calls::{CublasCalls, CudaCalls, VirtualMemoryCalls, blas_symbol, driver_symbol, lt_symbol};

#[test]
fn the_drivers_calls_are_those_of_its_header() {
    let pairs = abi_pairs! { Calls, rust driver::sys,
        required {
            stream_query = cuStreamQuery(_);
            stream_synchronize = cuStreamSynchronize(_);
            stream_create_with_priority = cuStreamCreateWithPriority(_, _, _);
            stream_destroy = cuStreamDestroy_v2(_);
            stream_wait_event = cuStreamWaitEvent(_, _, _);
            get_stream_priority_range = cuCtxGetStreamPriorityRange(_, _);
            event_create = cuEventCreate(_, _);
            event_destroy = cuEventDestroy_v2(_);
            event_record = cuEventRecord(_, _);
            event_query = cuEventQuery(_);
            event_synchronize = cuEventSynchronize(_);
            device_synchronize = cuCtxSynchronize();
            mem_alloc = cuMemAlloc_v2(_, _);
            mem_free = cuMemFree_v2(_);
            mem_get_info = cuMemGetInfo_v2(_, _);
            memcpy_htod_async = cuMemcpyHtoDAsync_v2(_, _, _, _);
            memcpy_dtoh_async = cuMemcpyDtoHAsync_v2(_, _, _, _);
            memcpy_dtod_async = cuMemcpyDtoDAsync_v2(_, _, _, _);
            memset_d8_async = cuMemsetD8Async(_, _, _, _);
            memset_d16_async = cuMemsetD16Async(_, _, _, _);
            memset_d32_async = cuMemsetD32Async(_, _, _, _);
            mem_host_alloc = cuMemHostAlloc(_, _, _);
            mem_free_host = cuMemFreeHost(_);
            mem_host_register = cuMemHostRegister_v2(_, _, _);
            mem_host_unregister = cuMemHostUnregister(_);
            mem_host_get_device_pointer = cuMemHostGetDevicePointer_v2(_, _, _);
        }
        optional {
            mem_alloc_async = cuMemAllocAsync(_, _, _);
            mem_free_async = cuMemFreeAsync(_, _);
            device_get_default_mem_pool = cuDeviceGetDefaultMemPool(_, _);
            mem_pool_set_attribute = cuMemPoolSetAttribute(_, _, _);
            mem_pool_trim_to = cuMemPoolTrimTo(_, _);
            stream_begin_capture = cuStreamBeginCapture_v2(_, _);
            stream_end_capture = cuStreamEndCapture(_, _);
            stream_is_capturing = cuStreamIsCapturing(_, _);
            thread_exchange_stream_capture_mode = cuThreadExchangeStreamCaptureMode(_);
            graph_instantiate_with_flags = cuGraphInstantiateWithFlags(_, _, _);
            graph_launch = cuGraphLaunch(_, _);
            graph_destroy = cuGraphDestroy(_);
            graph_exec_destroy = cuGraphExecDestroy(_);
            ipc_get_mem_handle = cuIpcGetMemHandle(_, _);
            ipc_open_mem_handle = cuIpcOpenMemHandle_v2(_, _, _);
            ipc_close_mem_handle = cuIpcCloseMemHandle(_);
            mem_get_address_range = cuMemGetAddressRange_v2(_, _, _);
            ipc_get_event_handle = cuIpcGetEventHandle(_, _);
            ipc_open_event_handle = cuIpcOpenEventHandle(_, _);
        }
    };
    // The header of CUDA 13 has only the successor of this call, which older drivers lack. The arguments are the same.
    check(Calls::NAMES, driver_symbol, &pairs, &["event_elapsed_time"]);
    let successor = in_header(driver::sys::cuEventElapsedTime_v2 as unsafe fn(_, _, _) -> _);
    assert_eq!(declared(|table: &Calls| table.event_elapsed_time), successor);
}

#[test]
fn the_drivers_calls_that_only_cuda_has_are_those_of_its_header() {
    let pairs = abi_pairs! { CudaCalls, rust driver::sys,
        required {
            init = cuInit(_);
            driver_get_version = cuDriverGetVersion(_);
            device_get_count = cuDeviceGetCount(_);
            device_get = cuDeviceGet(_, _);
            device_get_name = cuDeviceGetName(_, _, _);
            device_get_uuid = cuDeviceGetUuid_v2(_, _);
            device_total_mem = cuDeviceTotalMem_v2(_, _);
            device_get_pci_bus_id = cuDeviceGetPCIBusId(_, _, _);
            device_get_attribute = cuDeviceGetAttribute(_, _, _);
            device_can_access_peer = cuDeviceCanAccessPeer(_, _, _);
            device_primary_ctx_retain = cuDevicePrimaryCtxRetain(_, _);
            device_primary_ctx_get_state = cuDevicePrimaryCtxGetState(_, _, _);
            ctx_get_current = cuCtxGetCurrent(_);
            ctx_push_current = cuCtxPushCurrent_v2(_);
            ctx_pop_current = cuCtxPopCurrent_v2(_);
            ctx_enable_peer_access = cuCtxEnablePeerAccess(_, _);
            stream_get_ctx = cuStreamGetCtx(_, _);
            memcpy_peer_async = cuMemcpyPeerAsync(_, _, _, _, _, _);
            memcpy_2d_async = cuMemcpy2DAsync_v2(_, _);
            memcpy_3d_peer_async = cuMemcpy3DPeerAsync(_, _);
        }
        optional { pointer_get_attribute = cuPointerGetAttribute(_, _, _); }
    };
    check(CudaCalls::NAMES, driver_symbol, &pairs, &[]);
    let pairs = abi_pairs! { VirtualMemoryCalls, rust driver::sys,
        required {
            mem_create = cuMemCreate(_, _, _, _);
            mem_release = cuMemRelease(_);
            mem_get_allocation_granularity = cuMemGetAllocationGranularity(_, _, _);
            mem_address_reserve = cuMemAddressReserve(_, _, _, _, _);
            mem_address_free = cuMemAddressFree(_, _);
            mem_map = cuMemMap(_, _, _, _, _);
            mem_unmap = cuMemUnmap(_, _);
            mem_set_access = cuMemSetAccess(_, _, _, _);
            mem_export_to_shareable_handle = cuMemExportToShareableHandle(_, _, _, _);
            mem_import_from_shareable_handle = cuMemImportFromShareableHandle(_, _, _);
        }
        optional { mem_retain_allocation_handle = cuMemRetainAllocationHandle(_, _); }
    };
    check(VirtualMemoryCalls::NAMES, driver_symbol, &pairs, &[]);
}

#[test]
fn the_calls_of_cublas_are_those_of_its_header() {
    let pairs = abi_pairs! { BlasCalls, rust cublas::sys,
        required {
            create = cublasCreate_v2(_);
            destroy = cublasDestroy_v2(_);
            set_stream = cublasSetStream_v2(_, _);
            set_atomics_mode = cublasSetAtomicsMode(_, _);
            set_pointer_mode = cublasSetPointerMode_v2(_, _);
            gemm_ex = cublasGemmEx(_, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _);
            gemm_strided_batched_ex = cublasGemmStridedBatchedEx(_, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _);
        }
        optional {
            set_workspace = cublasSetWorkspace_v2(_, _, _);
            set_math_mode = cublasSetMathMode(_, _);
            gemm_ex_64 = cublasGemmEx_64(_, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _);
            gemm_strided_batched_ex_64 = cublasGemmStridedBatchedEx_64(_, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _);
        }
    };
    check(BlasCalls::NAMES, blas_symbol, &pairs, &[]);
    let pairs = abi_pairs! { CublasCalls, rust cublas::sys,
        required { get_property = cublasGetProperty(_, _); }
        optional {
            get_sm_count_target = cublasGetSmCountTarget(_, _);
            set_sm_count_target = cublasSetSmCountTarget(_, _);
            get_emulation_strategy = cublasGetEmulationStrategy(_, _);
            set_emulation_strategy = cublasSetEmulationStrategy(_, _);
        }
    };
    // These calls are newer than the header of CUDA 13.0. That header has the types of their arguments, which are
    // 32-bit enums.
    let later = [
        "get_emulation_special_values_support",
        "set_emulation_special_values_support",
        "get_fixed_point_emulation_mantissa_control",
        "set_fixed_point_emulation_mantissa_control",
        "get_fixed_point_emulation_max_mantissa_bit_count",
        "set_fixed_point_emulation_max_mantissa_bit_count",
        "get_fixed_point_emulation_mantissa_bit_offset",
        "set_fixed_point_emulation_mantissa_bit_offset",
        "set_fixed_point_emulation_mantissa_bit_count_pointer",
    ];
    check(CublasCalls::NAMES, blas_symbol, &pairs, &later);
    assert_eq!(size_of::<cublas::sys::cudaEmulationMantissaControl_t>(), size_of::<i32>());
    assert_eq!(size_of::<cublas::sys::cudaEmulationSpecialValuesSupport_t>(), size_of::<i32>());
}

#[test]
fn the_calls_of_cublaslt_are_those_of_its_header() {
    let pairs = abi_pairs! { LtCalls, rust cublaslt::sys,
        required {
            create = cublasLtCreate(_);
            destroy = cublasLtDestroy(_);
            matmul_desc_create = cublasLtMatmulDescCreate(_, _, _);
            matmul_desc_destroy = cublasLtMatmulDescDestroy(_);
            matmul_desc_set_attribute = cublasLtMatmulDescSetAttribute(_, _, _, _);
            matrix_layout_create = cublasLtMatrixLayoutCreate(_, _, _, _, _);
            matrix_layout_destroy = cublasLtMatrixLayoutDestroy(_);
            matrix_layout_set_attribute = cublasLtMatrixLayoutSetAttribute(_, _, _, _);
            matmul_preference_create = cublasLtMatmulPreferenceCreate(_);
            matmul_preference_destroy = cublasLtMatmulPreferenceDestroy(_);
            matmul_preference_set_attribute = cublasLtMatmulPreferenceSetAttribute(_, _, _, _);
            matmul_algo_get_heuristic = cublasLtMatmulAlgoGetHeuristic(_, _, _, _, _, _, _, _, _, _);
            matmul = cublasLtMatmul(_, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _);
        }
        optional {}
    };
    check(LtCalls::NAMES, lt_symbol, &pairs, &[]);
}
