//! The libraries' functions, and device memory.

use std::ffi::{c_char, c_void};
use std::ptr::null_mut;

use highwater_simulated_harness::gate::Gate;
use highwater_simulated_harness::isolated::version;
use highwater_simulated_harness::library::text_of;
use highwater_simulated_harness::{library, ok};
use libloading::Library;

pub(crate) type Ptr = *mut c_void;

/// The file of a library in the version at hand.
fn file(name: &str, of_6: i32, of_7: i32) -> String {
    format!("lib{name}.so.{}", if version() == Some(6) { of_6 } else { of_7 })
}

library! {
    Hip: i32, "HIGHWATER_HIP_LIBRARY", &[&file("amdhip64", 6, 7)];
    hipInit(u32);
    hipRuntimeGetVersion(*mut i32);
    hipDriverGetVersion(*mut i32);
    hipGetLastError();
    hipPeekAtLastError();
    hipGetDeviceCount(*mut i32);
    hipSetDevice(i32);
    hipGetDevice(*mut i32);
    hipDeviceGetAttribute(*mut i32, i32, i32);
    hipDeviceGetName(*mut c_char, i32, i32);
    hipDeviceGetPCIBusId(*mut c_char, i32, i32);
    hipDeviceGetUuid(*mut [u8; 16], i32);
    hipDeviceTotalMem(*mut usize, i32);
    hipGetDeviceProperties(*mut u8, i32);
    hipGetDevicePropertiesR0600(*mut u8, i32);
    hipDeviceSynchronize();
    hipDeviceCanAccessPeer(*mut i32, i32, i32);
    hipDeviceEnablePeerAccess(i32, u32);
    hipDeviceDisablePeerAccess(i32);
    hipDeviceGetStreamPriorityRange(*mut i32, *mut i32);
    hipStreamCreateWithFlags(*mut Ptr, u32);
    hipStreamCreateWithPriority(*mut Ptr, u32, i32);
    hipStreamDestroy(Ptr);
    hipStreamSynchronize(Ptr);
    hipStreamQuery(Ptr);
    hipStreamWaitEvent(Ptr, Ptr, u32);
    hipStreamGetFlags(Ptr, *mut u32);
    hipStreamGetPriority(Ptr, *mut i32);
    hipStreamGetDevice(Ptr, *mut i32);
    hipLaunchHostFunc(Ptr, unsafe extern "C" fn(Ptr), Ptr);
    hipEventCreateWithFlags(*mut Ptr, u32);
    hipEventDestroy(Ptr);
    hipEventRecord(Ptr, Ptr);
    hipEventQuery(Ptr);
    hipEventSynchronize(Ptr);
    hipEventElapsedTime(*mut f32, Ptr, Ptr);
    hipMalloc(*mut Ptr, usize);
    hipFree(Ptr);
    hipMallocAsync(*mut Ptr, usize, Ptr);
    hipFreeAsync(Ptr, Ptr);
    hipMemcpy(Ptr, Ptr, usize, i32);
    hipMemcpyAsync(Ptr, Ptr, usize, i32, Ptr);
    hipMemcpyPeerAsync(Ptr, i32, Ptr, i32, usize, Ptr);
    hipMemsetAsync(Ptr, i32, usize, Ptr);
    hipMemsetD8Async(Ptr, u8, usize, Ptr);
    hipMemsetD16Async(Ptr, u16, usize, Ptr);
    hipMemsetD32Async(Ptr, i32, usize, Ptr);
    hipMemGetInfo(*mut usize, *mut usize);
    hipPointerGetAttributes(*mut Attributes, Ptr);
    hipMemGetAddressRange(*mut Ptr, *mut usize, Ptr);
    hipDeviceGetDefaultMemPool(*mut Ptr, i32);
    hipMemPoolSetAttribute(Ptr, i32, Ptr);
    hipMemPoolGetAttribute(Ptr, i32, Ptr);
    hipMemPoolTrimTo(Ptr, usize);
    hipHostMalloc(*mut Ptr, usize, u32);
    hipHostFree(Ptr);
    hipHostGetFlags(*mut u32, Ptr);
    hipHostRegister(Ptr, usize, u32);
    hipHostUnregister(Ptr);
    hipHostGetDevicePointer(*mut Ptr, Ptr, u32);
    hipIpcGetMemHandle(*mut IpcHandle, Ptr);
    hipIpcOpenMemHandle(*mut Ptr, IpcHandle, u32);
    hipIpcCloseMemHandle(Ptr);
    hipIpcGetEventHandle(*mut IpcHandle, Ptr);
    hipIpcOpenEventHandle(*mut Ptr, IpcHandle);
    hipStreamBeginCapture(Ptr, i32);
    hipStreamEndCapture(Ptr, *mut Ptr);
    hipStreamIsCapturing(Ptr, *mut i32);
    hipStreamGetCaptureInfo(Ptr, *mut i32, *mut u64);
    hipGraphInstantiate(*mut Ptr, Ptr, *mut Ptr, *mut c_char, usize);
    hipGraphLaunch(Ptr, Ptr);
    hipGraphExecDestroy(Ptr);
    hipGraphDestroy(Ptr);
    hipThreadExchangeStreamCaptureMode(*mut i32);
    hipGetProcAddress(*const c_char, *mut Ptr, i32, u64, *mut u32);
}

library! {
    Blas: i32, "HIGHWATER_HIPBLAS_LIBRARY", &[&file("hipblas", 2, 3)];
    hipblasCreate(*mut Ptr);
    hipblasDestroy(Ptr);
    hipblasSetStream(Ptr, Ptr);
    hipblasGetStream(Ptr, *mut Ptr);
    hipblasSetPointerMode(Ptr, i32);
    hipblasGetPointerMode(Ptr, *mut i32);
    hipblasSetAtomicsMode(Ptr, i32);
    hipblasGetAtomicsMode(Ptr, *mut i32);
    hipblasSetMathMode(Ptr, i32);
    hipblasGetMathMode(Ptr, *mut i32);
}

/// `hipIpcMemHandle_t` and `hipIpcEventHandle_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct IpcHandle(pub(crate) [u8; 64]);

/// `hipPointerAttribute_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Attributes {
    pub(crate) kind: i32,
    pub(crate) device: i32,
    pub(crate) on_device: Ptr,
    pub(crate) on_host: Ptr,
    pub(crate) is_managed: i32,
    pub(crate) flags: u32,
}

fn library_of(name: &str) -> &'static Library {
    if name == "hip" { &Hip::get().library } else { &Blas::get().library }
}

/// A function that only some version has, by its symbol.
pub(crate) fn optional<F: Copy>(library: &str, symbol: &str) -> Option<F> {
    // SAFETY: the caller names the function's type.
    unsafe { library_of(library).get::<F>(symbol.as_bytes()) }.ok().map(|function| *function)
}

/// The name or the text of a code.
pub(crate) fn text(library: &str, function: &str, code: i32) -> String {
    text_of(library_of(library), function, code).unwrap()
}

/// A stream that does not wait for the legacy one.
pub(crate) fn stream() -> Ptr {
    let mut stream = null_mut();
    ok!(Hip.hipStreamCreateWithFlags(&mut stream, 1));
    stream
}

pub(crate) fn event(flags: u32) -> Ptr {
    let mut event = null_mut();
    ok!(Hip.hipEventCreateWithFlags(&mut event, flags));
    event
}

pub(crate) fn allocate(bytes: usize) -> Ptr {
    let mut address = null_mut();
    ok!(Hip.hipMalloc(&mut address, bytes));
    address
}

/// Page-locked memory.
pub(crate) fn pinned(bytes: usize, flags: u32) -> Ptr {
    let mut address = null_mut();
    ok!(Hip.hipHostMalloc(&mut address, bytes, flags));
    address
}

/// A block with these values.
pub(crate) fn upload<T: Copy>(values: &[T], stream: Ptr) -> Ptr {
    let address = allocate(size_of_val(values).max(1));
    store(address, values, stream);
    address
}

/// Writes to a block.
pub(crate) fn store<T: Copy>(address: Ptr, values: &[T], stream: Ptr) {
    ok!(Hip.hipMemcpyAsync(address, values.as_ptr().cast_mut().cast(), size_of_val(values), 1, stream));
    ok!(Hip.hipStreamSynchronize(stream));
}

/// Reads a block after everything in the stream.
pub(crate) fn download<T: Copy + Default>(address: Ptr, count: usize, stream: Ptr) -> Vec<T> {
    let mut values = vec![T::default(); count];
    ok!(Hip.hipMemcpyAsync(values.as_mut_ptr().cast(), address, size_of_val(&values[..]), 2, stream));
    ok!(Hip.hipStreamSynchronize(stream));
    values
}

/// Returns the address at an offset in bytes from another.
pub(crate) fn behind(address: Ptr, bytes: usize) -> Ptr {
    address.wrapping_byte_add(bytes)
}

/// Bytes of device memory that are free.
pub(crate) fn free_bytes() -> usize {
    let (mut free, mut total) = (0, 0);
    ok!(Hip.hipMemGetInfo(&mut free, &mut total));
    free
}

/// Blocks a stream until the gate is opened or dropped.
pub(crate) fn gate_on(stream: Ptr) -> Gate {
    Gate::launched_by(|wait, flag| ok!(Hip.hipLaunchHostFunc(stream, wait, flag)))
}
