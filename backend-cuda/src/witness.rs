//! The tables of calls, held against bindings that were generated from NVIDIA's headers: each call has its symbol, and
//! arguments and an answer of the same size and kind (number or floating-point number).

use cudarc::{cublas, cublaslt, driver};
use highwater_driver::witness::{Signature, check, declared, in_header};
use highwater_driver::witness_pairs;
use highwater_driver::{BlasCalls, Calls, GemmBatchCall, GemmCall};

use crate::calls::{CublasCalls, CudaCalls, blas_symbol, driver_symbol, lt_symbol};
use crate::lt::{LtTable, MatmulCall};

#[test]
fn the_drivers_calls_are_those_of_its_header() {
    let pairs = witness_pairs! { Calls, rust driver::sys,
        required {
            stream_query = cuStreamQuery(_);
            stream_synchronize = cuStreamSynchronize(_);
            stream_create = cuStreamCreateWithPriority(_, _, _);
            stream_destroy = cuStreamDestroy_v2(_);
            stream_wait_event = cuStreamWaitEvent(_, _, _);
            priority_range = cuCtxGetStreamPriorityRange(_, _);
            event_create = cuEventCreate(_, _);
            event_destroy = cuEventDestroy_v2(_);
            event_record = cuEventRecord(_, _);
            event_query = cuEventQuery(_);
            event_synchronize = cuEventSynchronize(_);
            device_synchronize = cuCtxSynchronize();
            allocate = cuMemAlloc_v2(_, _);
            free = cuMemFree_v2(_);
            memory_info = cuMemGetInfo_v2(_, _);
            copy_to_device = cuMemcpyHtoDAsync_v2(_, _, _, _);
            copy_to_host = cuMemcpyDtoHAsync_v2(_, _, _, _);
            copy_on_device = cuMemcpyDtoDAsync_v2(_, _, _, _);
            fill_8 = cuMemsetD8Async(_, _, _, _);
            fill_16 = cuMemsetD16Async(_, _, _, _);
            fill_32 = cuMemsetD32Async(_, _, _, _);
            host_allocate = cuMemHostAlloc(_, _, _);
            host_free = cuMemFreeHost(_);
            host_register = cuMemHostRegister_v2(_, _, _);
            host_unregister = cuMemHostUnregister(_);
            host_device_address = cuMemHostGetDevicePointer_v2(_, _, _);
        }
        optional {
            allocate_async = cuMemAllocAsync(_, _, _);
            free_async = cuMemFreeAsync(_, _);
            default_pool = cuDeviceGetDefaultMemPool(_, _);
            pool_set = cuMemPoolSetAttribute(_, _, _);
            pool_trim = cuMemPoolTrimTo(_, _);
            capture_begin = cuStreamBeginCapture_v2(_, _);
            capture_end = cuStreamEndCapture(_, _);
            capture_state = cuStreamIsCapturing(_, _);
            capture_mode = cuThreadExchangeStreamCaptureMode(_);
            graph_instantiate = cuGraphInstantiateWithFlags(_, _, _);
            graph_launch = cuGraphLaunch(_, _);
            graph_destroy = cuGraphDestroy(_);
            graph_exec_destroy = cuGraphExecDestroy(_);
            ipc_export = cuIpcGetMemHandle(_, _);
            ipc_open = cuIpcOpenMemHandle_v2(_, _, _);
            ipc_close = cuIpcCloseMemHandle(_);
            address_range = cuMemGetAddressRange_v2(_, _, _);
            ipc_export_event = cuIpcGetEventHandle(_, _);
            ipc_open_event = cuIpcOpenEventHandle(_, _);
        }
    };
    // The header of CUDA 13 has only the successor of this call, which older drivers lack; the arguments are the same.
    check(Calls::NAMES, driver_symbol, &pairs, &["event_elapsed"]);
    let successor = in_header(driver::sys::cuEventElapsedTime_v2 as unsafe fn(_, _, _) -> _);
    assert_eq!(declared(|table: &Calls| table.event_elapsed), successor);
}

#[test]
fn the_drivers_calls_that_only_cuda_has_are_those_of_its_header() {
    let pairs = witness_pairs! { CudaCalls, rust driver::sys,
        required {
            init = cuInit(_);
            driver_version = cuDriverGetVersion(_);
            device_count = cuDeviceGetCount(_);
            device = cuDeviceGet(_, _);
            device_name = cuDeviceGetName(_, _, _);
            device_uuid = cuDeviceGetUuid_v2(_, _);
            device_memory = cuDeviceTotalMem_v2(_, _);
            device_pci_address = cuDeviceGetPCIBusId(_, _, _);
            device_attribute = cuDeviceGetAttribute(_, _, _);
            device_reaches = cuDeviceCanAccessPeer(_, _, _);
            context_retain = cuDevicePrimaryCtxRetain(_, _);
            context_current = cuCtxGetCurrent(_);
            context_push = cuCtxPushCurrent_v2(_);
            context_pop = cuCtxPopCurrent_v2(_);
            context_enable_peer = cuCtxEnablePeerAccess(_, _);
            stream_context = cuStreamGetCtx(_, _);
            copy_peer = cuMemcpyPeerAsync(_, _, _, _, _, _);
        }
        optional {
            memory_create = cuMemCreate(_, _, _, _);
            memory_release = cuMemRelease(_);
            memory_granularity = cuMemGetAllocationGranularity(_, _, _);
            address_reserve = cuMemAddressReserve(_, _, _, _, _);
            address_free = cuMemAddressFree(_, _);
            memory_map = cuMemMap(_, _, _, _, _);
            memory_unmap = cuMemUnmap(_, _);
            memory_access = cuMemSetAccess(_, _, _, _);
            memory_export = cuMemExportToShareableHandle(_, _, _, _);
            memory_import = cuMemImportFromShareableHandle(_, _, _);
        }
    };
    check(CudaCalls::NAMES, driver_symbol, &pairs, &[]);
}

#[test]
fn the_calls_of_cublas_are_those_of_its_header() {
    let pairs = witness_pairs! { BlasCalls, rust cublas::sys,
        required {
            create = cublasCreate_v2(_);
            destroy = cublasDestroy_v2(_);
            set_stream = cublasSetStream_v2(_, _);
            set_atomics_mode = cublasSetAtomicsMode(_, _);
            set_pointer_mode = cublasSetPointerMode_v2(_, _);
        }
        optional {
            set_workspace = cublasSetWorkspace_v2(_, _, _);
            set_math_mode = cublasSetMathMode(_, _);
        }
    };
    check(BlasCalls::NAMES, blas_symbol, &pairs, &[]);
    let pairs = witness_pairs! { CublasCalls, rust cublas::sys,
        required { property = cublasGetProperty(_, _); }
        optional {
            get_sm_count = cublasGetSmCountTarget(_, _);
            set_sm_count = cublasSetSmCountTarget(_, _);
            get_emulation = cublasGetEmulationStrategy(_, _);
            set_emulation = cublasSetEmulationStrategy(_, _);
        }
    };
    // These calls are newer than the header of CUDA 13.0, which has the types of their arguments: enums of 32 bits.
    let later = [
        "get_special_values",
        "set_special_values",
        "get_mantissa_control",
        "set_mantissa_control",
        "get_mantissa_bits",
        "set_mantissa_bits",
        "get_mantissa_offset",
        "set_mantissa_offset",
        "set_mantissa_report",
    ];
    check(CublasCalls::NAMES, blas_symbol, &pairs, &later);
    assert_eq!(size_of::<cublas::sys::cudaEmulationMantissaControl_t>(), size_of::<i32>());
    assert_eq!(size_of::<cublas::sys::cudaEmulationSpecialValuesSupport_t>(), size_of::<i32>());
    let gemm =
        in_header(cublas::sys::cublasGemmEx as unsafe fn(_, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _) -> _);
    assert_eq!(GemmCall::<i32>::classes(), gemm);
    let gemm_64 = in_header(
        cublas::sys::cublasGemmEx_64 as unsafe fn(_, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _) -> _,
    );
    assert_eq!(GemmCall::<i64>::classes(), gemm_64);
    let batch = in_header(
        cublas::sys::cublasGemmStridedBatchedEx
            as unsafe fn(_, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _) -> _,
    );
    assert_eq!(GemmBatchCall::<i32>::classes(), batch);
    let batch_64 = in_header(
        cublas::sys::cublasGemmStridedBatchedEx_64
            as unsafe fn(_, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _) -> _,
    );
    assert_eq!(GemmBatchCall::<i64>::classes(), batch_64);
}

#[test]
fn the_calls_of_cublaslt_are_those_of_its_header() {
    let pairs = witness_pairs! { LtTable, rust cublaslt::sys,
        required {
            create = cublasLtCreate(_);
            destroy = cublasLtDestroy(_);
            product_create = cublasLtMatmulDescCreate(_, _, _);
            product_destroy = cublasLtMatmulDescDestroy(_);
            product_set = cublasLtMatmulDescSetAttribute(_, _, _, _);
            layout_create = cublasLtMatrixLayoutCreate(_, _, _, _, _);
            layout_destroy = cublasLtMatrixLayoutDestroy(_);
            layout_set = cublasLtMatrixLayoutSetAttribute(_, _, _, _);
            wish_create = cublasLtMatmulPreferenceCreate(_);
            wish_destroy = cublasLtMatmulPreferenceDestroy(_);
            wish_set = cublasLtMatmulPreferenceSetAttribute(_, _, _, _);
            choose = cublasLtMatmulAlgoGetHeuristic(_, _, _, _, _, _, _, _, _, _);
        }
        optional {}
    };
    check(LtTable::NAMES, lt_symbol, &pairs, &[]);
    assert_eq!(
        MatmulCall::classes(),
        in_header(cublaslt::sys::cublasLtMatmul as unsafe fn(_, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _) -> _)
    );
}
