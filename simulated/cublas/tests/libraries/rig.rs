//! The libraries' functions, and device memory.

use std::ffi::c_void;
use std::ptr::null_mut;

use highwater_simulated_harness::gate::Gate;
use highwater_simulated_harness::{library, ok};

type Ptr = *mut c_void;

library! {
    Driver: u32, "HIGHWATER_CUDA_LIBRARY", &["libcuda.so.1"];
    cuInit(u32);
    cuDevicePrimaryCtxRetain(*mut Ptr, i32);
    cuCtxSetCurrent(Ptr);
    cuCtxSynchronize();
    cuMemAlloc_v2(*mut u64, usize);
    cuMemFree_v2(u64);
    cuMemGetInfo_v2(*mut usize, *mut usize);
    cuMemcpyHtoDAsync_v2(u64, *const c_void, usize, Ptr);
    cuMemcpyDtoHAsync_v2(Ptr, u64, usize, Ptr);
    cuStreamCreate(*mut Ptr, u32);
    cuStreamSynchronize(Ptr);
    cuStreamQuery(Ptr);
    cuLaunchHostFunc(Ptr, unsafe extern "C" fn(Ptr), Ptr);
    cuMemHostAlloc(*mut Ptr, usize, u32);
    cuCtxEnablePeerAccess(Ptr, u32);
}

library! {
    Blas: u32, "HIGHWATER_CUBLAS_LIBRARY", &["libcublas.so.13"];
    cublasCreate_v2(*mut Ptr);
    cublasDestroy_v2(Ptr);
    cublasGetVersion_v2(Ptr, *mut i32);
    cublasGetProperty(u32, *mut i32);
    cublasSetStream_v2(Ptr, Ptr);
    cublasSetWorkspace_v2(Ptr, u64, usize);
    cublasSetMathMode(Ptr, u32);
    cublasGetAtomicsMode(Ptr, *mut u32);
    cublasSetPointerMode_v2(Ptr, u32);
    cublasSgemm_v2(Ptr, u32, u32, i32, i32, i32, *const f32, u64, i32, u64, i32, *const f32, u64, i32);
    cublasDgemm_v2(Ptr, u32, u32, i32, i32, i32, *const f64, u64, i32, u64, i32, *const f64, u64, i32);
    cublasSgemmStridedBatched(
        Ptr, u32, u32, i32, i32, i32, *const f32, u64, i32, i64, u64, i32, i64, *const f32, u64, i32, i64, i32);
    cublasGemmEx(
        Ptr, u32, u32, i32, i32, i32, *const c_void, u64, u32, i32, u64, u32, i32, *const c_void, u64, u32, i32, u32,
        i32);
}

library! {
    Lt: u32, "HIGHWATER_CUBLASLT_LIBRARY", &["libcublasLt.so.13"];
    cublasLtCreate(*mut Ptr);
    cublasLtDestroy(Ptr);
    cublasLtGetProperty(u32, *mut i32);
    cublasLtMatmulDescCreate(*mut Ptr, u32, u32);
    cublasLtMatmulDescDestroy(Ptr);
    cublasLtMatmulDescSetAttribute(Ptr, u32, *const c_void, usize);
    cublasLtMatmulDescGetAttribute(Ptr, u32, Ptr, usize, *mut usize);
    cublasLtMatrixLayoutCreate(*mut Ptr, u32, u64, u64, i64);
    cublasLtMatrixLayoutDestroy(Ptr);
    cublasLtMatrixLayoutSetAttribute(Ptr, u32, *const c_void, usize);
    cublasLtMatmulPreferenceCreate(*mut Ptr);
    cublasLtMatmulPreferenceDestroy(Ptr);
    cublasLtMatmulPreferenceSetAttribute(Ptr, u32, *const c_void, usize);
    cublasLtMatmulAlgoGetHeuristic(Ptr, Ptr, Ptr, Ptr, Ptr, Ptr, Ptr, i32, *mut Heuristic, *mut i32);
    cublasLtMatmul(
        Ptr, Ptr, *const c_void, u64, Ptr, u64, Ptr, *const c_void, u64, Ptr, u64, Ptr, *const [u64; 8], u64, usize,
        Ptr);
}

/// `cublasLtMatmulHeuristicResult_t`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Heuristic {
    pub(crate) algorithm: [u64; 8],
    pub(crate) workspace: usize,
    pub(crate) state: u32,
    pub(crate) waves: f32,
    pub(crate) reserved: [i32; 4],
}

/// Starts the driver and makes the primary context of a device current.
pub(crate) fn start(device: i32) {
    let mut context = null_mut();
    ok!(Driver.cuInit(0));
    ok!(Driver.cuDevicePrimaryCtxRetain(&mut context, device));
    ok!(Driver.cuCtxSetCurrent(context));
}

pub(crate) fn stream() -> Ptr {
    let mut stream = null_mut();
    ok!(Driver.cuStreamCreate(&mut stream, 1));
    stream
}

pub(crate) fn handle() -> Ptr {
    let mut handle = null_mut();
    ok!(Blas.cublasCreate_v2(&mut handle));
    handle
}

pub(crate) fn allocate(bytes: usize) -> u64 {
    let mut address = 0;
    ok!(Driver.cuMemAlloc_v2(&mut address, bytes));
    address
}

/// A block with these bytes.
pub(crate) fn upload<T: Copy>(values: &[T], stream: Ptr) -> u64 {
    let address = allocate(size_of_val(values).max(1));
    store(address, values, stream);
    address
}

/// Writes to a block.
pub(crate) fn store<T: Copy>(address: u64, values: &[T], stream: Ptr) {
    if !values.is_empty() {
        ok!(Driver.cuMemcpyHtoDAsync_v2(address, values.as_ptr().cast(), size_of_val(values), stream));
        ok!(Driver.cuStreamSynchronize(stream));
    }
}

/// Reads a block after everything in the stream.
pub(crate) fn download<T: Copy + Default>(address: u64, count: usize, stream: Ptr) -> Vec<T> {
    let mut values = vec![T::default(); count];
    ok!(Driver.cuMemcpyDtoHAsync_v2(values.as_mut_ptr().cast(), address, size_of_val(&values[..]), stream));
    ok!(Driver.cuStreamSynchronize(stream));
    values
}

/// Blocks a stream until the gate is opened or dropped.
pub(crate) fn gate_on(stream: Ptr) -> Gate {
    Gate::launched_by(|wait, flag| ok!(Driver.cuLaunchHostFunc(stream, wait, flag)))
}
