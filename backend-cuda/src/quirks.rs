//! CUDA's behavior as data.

use cudarc::cublas::sys::{
    cublasAtomicsMode_t, cublasComputeType_t, cublasGemmAlgo_t, cublasMath_t, cublasOperation_t, cudaDataType_t,
};
use cudarc::driver::sys::{CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_WRITECOMBINED};
use cudarc::driver::sys::{
    CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_READ_ONLY, CUipcMem_flags,
};
use cudarc::driver::sys::{CUevent_flags, CUmemPool_attribute, CUresult, CUstream_flags};
use highwater_driver::{
    AtomicsModes, ComputeCodes, EventFlags, HostFlags, MathModes, Quirks, RawStream, TransposeCodes, TypeCodes,
};

/// Partial sums are added in 32 bits even for a 16-bit result. By default, cuBLAS adds them in 16 bits.
const FULL_SUMS: u32 = cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION as u32;

const PINNED: u32 = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP;
const NO_TIMING: u32 = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;

pub(crate) static QUIRKS: Quirks = Quirks {
    legacy_stream: RawStream(1),
    per_thread_stream: RawStream(2),
    not_ready: CUresult::CUDA_ERROR_NOT_READY as i32,
    out_of_memory: CUresult::CUDA_ERROR_OUT_OF_MEMORY as i32,
    no_elapsed_time: CUresult::CUDA_ERROR_INVALID_HANDLE as i32,
    stream_flags: CUstream_flags::CU_STREAM_NON_BLOCKING as u32,
    event_flags: EventFlags {
        plain: NO_TIMING,
        timing: CUevent_flags::CU_EVENT_DEFAULT as u32,
        interprocess: NO_TIMING | CUevent_flags::CU_EVENT_INTERPROCESS as u32,
    },
    host_flags: HostFlags { default: PINNED, write_combined: PINNED | CU_MEMHOSTALLOC_WRITECOMBINED },
    register_flags: CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP,
    register_read_only_flag: CU_MEMHOSTREGISTER_READ_ONLY,
    ipc_open_flag: CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32,
    ipc_open_hint: None,
    pool_release_threshold: CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD as u32,
    transpose_codes: TransposeCodes {
        no: cublasOperation_t::CUBLAS_OP_N as i32,
        yes: cublasOperation_t::CUBLAS_OP_T as i32,
    },
    type_codes: TypeCodes {
        f16: cudaDataType_t::CUDA_R_16F as i32,
        bf16: cudaDataType_t::CUDA_R_16BF as i32,
        f32: cudaDataType_t::CUDA_R_32F as i32,
        f64: cudaDataType_t::CUDA_R_64F as i32,
    },
    compute_codes: ComputeCodes {
        f32: cublasComputeType_t::CUBLAS_COMPUTE_32F as i32,
        tf32: cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32 as i32,
        f64: cublasComputeType_t::CUBLAS_COMPUTE_64F as i32,
    },
    default_algorithm: cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT as i32,
    math_modes: Some(MathModes {
        full: cublasMath_t::CUBLAS_DEFAULT_MATH as u32 | FULL_SUMS,
        tf32: cublasMath_t::CUBLAS_TF32_TENSOR_OP_MATH as u32 | FULL_SUMS,
    }),
    atomics_modes: AtomicsModes {
        not_allowed: cublasAtomicsMode_t::CUBLAS_ATOMICS_NOT_ALLOWED as u32,
        allowed: cublasAtomicsMode_t::CUBLAS_ATOMICS_ALLOWED as u32,
    },
    atomics_allowed_at_first: false,
    set_stream_resets_workspace: true,
    streams_die_after: &[],
    events_follow_streams: false,
    rows_anywhere: true,
};
