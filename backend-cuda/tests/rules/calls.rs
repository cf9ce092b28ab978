//! The vendor's functions, in plain types.

use std::ffi::{CStr, c_char, c_void};

use highwater_simulated_harness::library;
use highwater_simulated_harness::library::text_of;

/// A context, stream, event, graph, pool or library handle.
pub(crate) type Handle = usize;
/// A host pointer.
pub(crate) type Pointer = *mut c_void;
/// A host pointer to read.
pub(crate) type Source = *const c_void;
/// A function that a stream runs.
pub(crate) type HostFunction = unsafe extern "C" fn(Pointer);

/// `CUipcMemHandle` and `CUipcEventHandle`, passed by value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct IpcHandle(pub(crate) [u64; 8]);

/// `CUmemAllocationProp`: pinned device memory with handle types.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Properties {
    kind: u32,
    handle_types: u32,
    location_kind: u32,
    location: i32,
    win32: usize,
    flags: [u8; 8],
}

impl Properties {
    pub(crate) fn with_handles(handle_types: u32) -> Self {
        Self { kind: 1, handle_types, location_kind: 1, location: 0, win32: 0, flags: [0; 8] }
    }
}

/// `CUmemAccessDesc`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Access {
    location_kind: u32,
    location: i32,
    flags: u32,
}

impl Access {
    pub(crate) fn read_write(device: i32) -> Self {
        Self { location_kind: 1, location: device, flags: 3 }
    }
}

/// One side of `CUDA_MEMCPY2D`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct RowsSide {
    x: usize,
    y: usize,
    kind: u32,
    host: usize,
    device: u64,
    array: usize,
    pitch: usize,
}

/// `CUDA_MEMCPY2D`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Rows {
    src: RowsSide,
    dst: RowsSide,
    pub(crate) width: usize,
    pub(crate) height: usize,
}

/// The address of rows, and their pitch.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RowsAt {
    Host(Pointer, usize),
    Device(u64, usize),
}

impl Rows {
    pub(crate) fn new(dst: RowsAt, src: RowsAt, width: usize, height: usize) -> Self {
        let side = |at| {
            let (kind, host, device, pitch) = match at {
                RowsAt::Host(host, pitch) => (1, host.addr(), 0, pitch),
                RowsAt::Device(device, pitch) => (2, 0, device, pitch),
            };
            RowsSide { x: 0, y: 0, kind, host, device, array: 0, pitch }
        };
        Self { src: side(src), dst: side(dst), width, height }
    }

    /// Lets the source begin at another row, and another byte of it.
    pub(crate) fn from(mut self, x: usize, y: usize) -> Self {
        (self.src.x, self.src.y) = (x, y);
        self
    }
}

/// One side of `CUDA_MEMCPY3D_PEER`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct PeerSide {
    start: [usize; 4],
    kind: u32,
    host: usize,
    device: u64,
    array: usize,
    context: Handle,
    pitch: usize,
    height: usize,
}

/// `CUDA_MEMCPY3D_PEER`, for one layer of rows.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct PeerRows {
    src: PeerSide,
    dst: PeerSide,
    width: usize,
    height: usize,
    depth: usize,
}

impl PeerRows {
    /// Rows of `width` bytes: of each side, the address, the pitch, and the context.
    pub(crate) fn new(dst: (u64, usize, Handle), src: (u64, usize, Handle), width: usize, height: usize) -> Self {
        let side = |(device, pitch, context)| PeerSide {
            start: [0; 4],
            kind: 2,
            host: 0,
            device,
            array: 0,
            context,
            pitch,
            height,
        };
        Self { src: side(src), dst: side(dst), width, height, depth: 1 }
    }
}

/// `cublasLtMatmulHeuristicResult_t`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Heuristic {
    pub(crate) algorithm: [u64; 8],
    pub(crate) workspace: usize,
    pub(crate) state: u32,
    waves: f32,
    reserved: [i32; 4],
}

/// Returns the address of a scale or an attribute of a call.
pub(crate) fn bits<T>(value: &T) -> Source {
    std::ptr::from_ref(value).cast()
}

impl Driver {
    /// The vendor's name of a code, or the code of the call that should have told it.
    pub(crate) fn name_of(&self, code: u32) -> Result<String, u32> {
        let mut text: *const c_char = std::ptr::null();
        let answer = cu!(cuGetErrorName(code, &mut text));
        if answer != 0 || text.is_null() {
            return Err(answer);
        }
        // SAFETY: the driver gives a string that stays.
        Ok(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    }
}

impl Blas {
    /// The vendor's name of a status.
    pub(crate) fn name_of(&self, status: u32) -> Result<String, String> {
        text_of(&self.library, "cublasGetStatusName", status)
    }
}

/// Calls a function of a library that has to succeed for the rule to go on.
macro_rules! ok {
    ($library:ident $name:ident($($argument:expr),* $(,)?)) => {
        highwater_simulated_harness::log::need(stringify!($name), $library!($name($($argument),*)))?
    };
}
pub(crate) use ok;

/// Calls a function of the driver and gives its code.
macro_rules! cu {
    ($name:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: the arguments are live, or wrong in a way that the vendor documents an answer for.
        unsafe { ($crate::calls::Driver::get().$name)($($argument),*) }
    }};
}
pub(crate) use cu;

/// Calls a function of cuBLAS and gives its status.
macro_rules! blas {
    ($name:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: the arguments are live, or wrong in a way that the vendor documents an answer for.
        unsafe { ($crate::calls::Blas::get().$name)($($argument),*) }
    }};
}
pub(crate) use blas;

/// Calls a function of cuBLASLt and gives its status.
macro_rules! lt {
    ($name:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: the arguments are live, or wrong in a way that the vendor documents an answer for.
        unsafe { ($crate::calls::Lt::get().$name)($($argument),*) }
    }};
}
pub(crate) use lt;

library! {
    /// The driver.
    Driver: u32, "HIGHWATER_CUDA_LIBRARY", &["libcuda.so.1"];
    cuInit(u32);
    cuDriverGetVersion(*mut i32);
    cuGetErrorName(u32, *mut *const c_char);
    cuDeviceGetCount(*mut i32);
    cuDeviceGet(*mut i32, i32);
    cuDeviceGetName(*mut c_char, i32, i32);
    cuDeviceGetAttribute(*mut i32, u32, i32);
    cuDeviceTotalMem_v2(*mut usize, i32);
    cuDeviceCanAccessPeer(*mut i32, i32, i32);
    cuCtxEnablePeerAccess(Handle, u32);
    cuDevicePrimaryCtxRetain(*mut Handle, i32);
    cuDevicePrimaryCtxRelease_v2(i32);
    cuDevicePrimaryCtxGetState(i32, *mut u32, *mut i32);
    cuCtxGetCurrent(*mut Handle);
    cuCtxSetCurrent(Handle);
    cuCtxPushCurrent_v2(Handle);
    cuCtxPopCurrent_v2(*mut Handle);
    cuCtxGetDevice(*mut i32);
    cuCtxSynchronize();
    cuCtxGetStreamPriorityRange(*mut i32, *mut i32);
    cuStreamCreate(*mut Handle, u32);
    cuStreamCreateWithPriority(*mut Handle, u32, i32);
    cuStreamDestroy_v2(Handle);
    cuStreamQuery(Handle);
    cuStreamSynchronize(Handle);
    cuStreamWaitEvent(Handle, Handle, u32);
    cuStreamGetCtx(Handle, *mut Handle);
    cuStreamGetPriority(Handle, *mut i32);
    cuStreamGetFlags(Handle, *mut u32);
    cuStreamGetId(Handle, *mut u64);
    cuStreamBeginCapture_v2(Handle, u32);
    cuStreamEndCapture(Handle, *mut Handle);
    cuStreamIsCapturing(Handle, *mut u32);
    cuThreadExchangeStreamCaptureMode(*mut u32);
    cuGraphInstantiateWithFlags(*mut Handle, Handle, u64);
    cuGraphLaunch(Handle, Handle);
    cuGraphDestroy(Handle);
    cuGraphExecDestroy(Handle);
    cuGraphGetNodes(Handle, *mut Handle, *mut usize);
    cuGraphNodeGetType(Handle, *mut u32);
    cuLaunchHostFunc(Handle, Option<HostFunction>, Pointer);
    cuEventCreate(*mut Handle, u32);
    cuEventDestroy_v2(Handle);
    cuEventRecord(Handle, Handle);
    cuEventQuery(Handle);
    cuEventSynchronize(Handle);
    cuEventElapsedTime(*mut f32, Handle, Handle);
    cuMemAlloc_v2(*mut u64, usize);
    cuMemFree_v2(u64);
    cuMemGetInfo_v2(*mut usize, *mut usize);
    cuMemGetAddressRange_v2(*mut u64, *mut usize, u64);
    cuMemAllocAsync(*mut u64, usize, Handle);
    cuMemFreeAsync(u64, Handle);
    cuDeviceGetDefaultMemPool(*mut Handle, i32);
    cuMemPoolSetAttribute(Handle, u32, Pointer);
    cuMemPoolGetAttribute(Handle, u32, Pointer);
    cuMemPoolTrimTo(Handle, usize);
    cuMemHostAlloc(*mut Pointer, usize, u32);
    cuMemFreeHost(Pointer);
    cuMemHostRegister_v2(Pointer, usize, u32);
    cuMemHostUnregister(Pointer);
    cuMemHostGetDevicePointer_v2(*mut u64, Pointer, u32);
    cuPointerGetAttribute(Pointer, u32, u64);
    cuMemcpyAsync(u64, u64, usize, Handle);
    cuMemcpyHtoDAsync_v2(u64, Source, usize, Handle);
    cuMemcpyDtoHAsync_v2(Pointer, u64, usize, Handle);
    cuMemcpyDtoDAsync_v2(u64, u64, usize, Handle);
    cuMemcpy2DAsync_v2(*const Rows, Handle);
    cuMemcpy3DPeerAsync(*const PeerRows, Handle);
    cuMemcpyPeerAsync(u64, Handle, u64, Handle, usize, Handle);
    cuMemsetD8Async(u64, u8, usize, Handle);
    cuMemsetD16Async(u64, u16, usize, Handle);
    cuMemsetD32Async(u64, u32, usize, Handle);
    cuIpcGetMemHandle(*mut IpcHandle, u64);
    cuIpcOpenMemHandle_v2(*mut u64, IpcHandle, u32);
    cuIpcCloseMemHandle(u64);
    cuIpcGetEventHandle(*mut IpcHandle, Handle);
    cuIpcOpenEventHandle(*mut Handle, IpcHandle);
    cuMemCreate(*mut u64, usize, *const Properties, u64);
    cuMemRelease(u64);
    cuMemRetainAllocationHandle(*mut u64, u64);
    cuMemAddressReserve(*mut u64, usize, usize, u64, u64);
    cuMemAddressFree(u64, usize);
    cuMemMap(u64, usize, usize, u64, u64);
    cuMemUnmap(u64, usize);
    cuMemSetAccess(u64, usize, *const Access, usize);
    cuMemExportToShareableHandle(Pointer, u64, u32, u64);
    cuMemImportFromShareableHandle(*mut u64, usize, u32);
    cuMemGetAllocationGranularity(*mut usize, *const Properties, u32);
}

library! {
    /// cuBLAS.
    Blas: u32, "HIGHWATER_CUBLAS_LIBRARY", &["libcublas.so.13", "libcublas.so.12"];
    cublasCreate_v2(*mut Handle);
    cublasDestroy_v2(Handle);
    cublasGetVersion_v2(Handle, *mut i32);
    cublasGetProperty(u32, *mut i32);
    cublasSetStream_v2(Handle, Handle);
    cublasGetStream_v2(Handle, *mut Handle);
    cublasSetWorkspace_v2(Handle, u64, usize);
    cublasSetMathMode(Handle, u32);
    cublasGetMathMode(Handle, *mut u32);
    cublasSetAtomicsMode(Handle, u32);
    cublasGetAtomicsMode(Handle, *mut u32);
    cublasSetPointerMode_v2(Handle, u32);
    cublasGetPointerMode_v2(Handle, *mut u32);
    cublasSgemm_v2(Handle, u32, u32, i32, i32, i32, Source, u64, i32, u64, i32, Source, u64, i32);
    cublasGemmEx(
        Handle, u32, u32, i32, i32, i32, Source, u64, u32, i32, u64, u32, i32, Source, u64, u32, i32, u32, i32);
    cublasGemmEx_64(
        Handle, u32, u32, i64, i64, i64, Source, u64, u32, i64, u64, u32, i64, Source, u64, u32, i64, u32, i32);
    cublasGemmStridedBatchedEx(
        Handle, u32, u32, i32, i32, i32, Source, u64, u32, i32, i64, u64, u32, i32, i64, Source, u64, u32, i32, i64,
        i32, u32, i32);
    cublasGemmStridedBatchedEx_64(
        Handle, u32, u32, i64, i64, i64, Source, u64, u32, i64, i64, u64, u32, i64, i64, Source, u64, u32, i64, i64,
        i64, u32, i32);
}

library! {
    /// cuBLASLt.
    Lt: u32, "HIGHWATER_CUBLASLT_LIBRARY", &["libcublasLt.so.13", "libcublasLt.so.12"];
    cublasLtCreate(*mut Handle);
    cublasLtDestroy(Handle);
    cublasLtMatmulDescCreate(*mut Handle, u32, u32);
    cublasLtMatmulDescDestroy(Handle);
    cublasLtMatmulDescSetAttribute(Handle, u32, Source, usize);
    cublasLtMatrixLayoutCreate(*mut Handle, u32, u64, u64, i64);
    cublasLtMatrixLayoutDestroy(Handle);
    cublasLtMatmulPreferenceCreate(*mut Handle);
    cublasLtMatmulPreferenceDestroy(Handle);
    cublasLtMatmulPreferenceSetAttribute(Handle, u32, Source, usize);
    cublasLtMatmulAlgoGetHeuristic(
        Handle, Handle, Handle, Handle, Handle, Handle, Handle, i32, *mut Heuristic, *mut i32);
    cublasLtMatmul(
        Handle, Handle, Source, u64, Handle, u64, Handle, Source, u64, Handle, u64, Handle, *const [u64; 8], u64,
        usize, Handle);
}
