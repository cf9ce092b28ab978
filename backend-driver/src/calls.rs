//! Tables of vendor calls: function pointers in plain types, filled from a library that was opened at run time.
//!
//! Codes are `i32` and handles and addresses are numbers, whatever a vendor's header calls them: an enum of a binding
//! crate would be undefined behaviour for the first code that its version does not know. A call that is missing is a
//! missing symbol for a required one, and `None` for an optional one; nothing is resolved later, and nothing panics.

use super::raw::{RawBlas, RawEvent, RawGraph, RawGraphExec, RawMemPool, RawStream};
use highwater_hal::DevicePtr;

/// Modes of a capture and of a thread, the same numbers in both vendors.
pub mod capture_mode {
    /// Calls of every thread that a capture forbids fail.
    pub const GLOBAL: u32 = 0;
    /// Calls of the capturing thread that a capture forbids fail.
    pub const THREAD_LOCAL: u32 = 1;
    /// No call fails because of a capture.
    pub const RELAXED: u32 = 2;
}

/// States of a stream's capture, the same numbers in both vendors.
pub mod capture_status {
    /// The stream takes part in no capture.
    pub const NONE: u32 = 0;
    /// A capture is open.
    pub const ACTIVE: u32 = 1;
    /// A capture was lost and has not been ended.
    pub const INVALIDATED: u32 = 2;
}

/// The pointer mode of a BLAS that reads alpha and beta from host memory, the same number in both vendors.
pub const POINTER_MODE_HOST: u32 = 0;

/// 64 bytes that name memory or an event of a process; passed by value, as both vendors do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct IpcHandle(pub [u8; 64]);

/// Declares a table of vendor calls.
///
/// Each line is a field, the symbol's name without the vendor's prefix, and the arguments; every call returns an `i32`.
/// `required` calls are plain function pointers, `optional` ones may be `None`. The table is filled by its `load`, which
/// is given a function that turns a name into the vendor's symbol and lists every required symbol that the library lacks.
#[macro_export]
macro_rules! vendor_calls {
    (
        $(#[$table_doc:meta])* $visibility:vis struct $table:ident {
            required { $( $(#[$doc:meta])* $field:ident: $name:literal ($($argument:ty),* $(,)?); )* }
            optional { $( $(#[$optional_doc:meta])* $optional:ident: $optional_name:literal ($($optional_argument:ty),* $(,)?); )* }
        }
    ) => {
        $(#[$table_doc])*
        #[derive(Debug, Clone, Copy)]
        $visibility struct $table {
            $( $(#[$doc])* pub $field: unsafe extern "C" fn($($argument),*) -> i32, )*
            $( $(#[$optional_doc])* pub $optional: Option<unsafe extern "C" fn($($optional_argument),*) -> i32>, )*
        }

        impl $table {
            /// The fields, and the symbols' names without the vendor's prefix.
            $visibility const NAMES: &'static [(&'static str, &'static str)] =
                &[$( (stringify!($field), $name), )* $( (stringify!($optional), $optional_name), )*];

            /// Fills the table from `library`; `symbol` makes the vendor's symbol of a name.
            ///
            /// # Errors
            /// Every required symbol that is missing.
            ///
            /// # Safety
            /// What the library exports under these symbols has the arguments that the table declares.
            $visibility unsafe fn load(
                library: &$crate::Library,
                symbol: impl Fn(&str) -> String,
            ) -> Result<Self, Vec<String>> {
                let mut missing: Vec<String> = Vec::new();
                $(
                    let name = symbol($name);
                    let $field = library.symbol(&name);
                    if $field.is_none() {
                        missing.push(name);
                    }
                )*
                if !missing.is_empty() {
                    return Err(missing);
                }
                // Each is found, or the function has returned.
                $( let Some($field) = $field else { return Err(missing) }; )*
                $( let $optional = library.symbol(&symbol($optional_name)); )*
                // SAFETY: the symbols are functions of the declared arguments, as the caller vouches, and the library is
                // never closed.
                unsafe {
                    Ok(Self {
                        $( $field: std::mem::transmute::<*const (), unsafe extern "C" fn($($argument),*) -> i32>($field), )*
                        $( $optional: $optional.map(|found| {
                            std::mem::transmute::<*const (), unsafe extern "C" fn($($optional_argument),*) -> i32>(found)
                        }), )*
                    })
                }
            }
        }
    };
}

vendor_calls! {
    /// The calls of a driver that CUDA and HIP have with the same arguments.
    pub struct Calls {
        required {
            /// Whether the stream has executed everything.
            stream_query: "StreamQuery" (RawStream);
            /// Waits for the stream.
            stream_synchronize: "StreamSynchronize" (RawStream);
            /// Makes a stream: out, flags, priority.
            stream_create_with_priority: "StreamCreateWithPriority" (*mut RawStream, u32, i32);
            /// Destroys a stream.
            stream_destroy: "StreamDestroy" (RawStream);
            /// Makes a stream wait for an event: stream, event, flags.
            stream_wait_event: "StreamWaitEvent" (RawStream, RawEvent, u32);
            /// Least and greatest priority.
            get_stream_priority_range: "GetStreamPriorityRange" (*mut i32, *mut i32);
            /// Makes an event: out, flags.
            event_create: "EventCreate" (*mut RawEvent, u32);
            /// Destroys an event.
            event_destroy: "EventDestroy" (RawEvent);
            /// Records an event: event, stream.
            event_record: "EventRecord" (RawEvent, RawStream);
            /// Whether the event has been reached.
            event_query: "EventQuery" (RawEvent);
            /// Waits for the event.
            event_synchronize: "EventSynchronize" (RawEvent);
            /// Milliseconds between two events: out, start, end.
            event_elapsed_time: "EventElapsedTime" (*mut f32, RawEvent, RawEvent);
            /// Waits for the current device.
            device_synchronize: "DeviceSynchronize" ();
            /// Allocates plain memory of the current device: out, bytes.
            mem_alloc: "MemAlloc" (*mut DevicePtr, usize);
            /// Frees plain memory.
            mem_free: "MemFree" (DevicePtr);
            /// Free and total bytes of the current device.
            mem_get_info: "MemGetInfo" (*mut usize, *mut usize);
            /// Copies from the host: destination, source, bytes, stream.
            memcpy_htod_async: "MemcpyHtoDAsync" (DevicePtr, *const u8, usize, RawStream);
            /// Copies to the host: destination, source, bytes, stream.
            memcpy_dtoh_async: "MemcpyDtoHAsync" (*mut u8, DevicePtr, usize, RawStream);
            /// Copies within a device: destination, source, bytes, stream.
            memcpy_dtod_async: "MemcpyDtoDAsync" (DevicePtr, DevicePtr, usize, RawStream);
            /// Fills bytes: destination, value, count, stream.
            memset_d8_async: "MemsetD8Async" (DevicePtr, u8, usize, RawStream);
            /// Fills elements of two bytes.
            memset_d16_async: "MemsetD16Async" (DevicePtr, u16, usize, RawStream);
            /// Fills elements of four bytes.
            memset_d32_async: "MemsetD32Async" (DevicePtr, u32, usize, RawStream);
            /// Allocates page-locked memory: out, bytes, flags.
            mem_host_alloc: "MemHostAlloc" (*mut *mut u8, usize, u32);
            /// Frees page-locked memory.
            mem_free_host: "MemFreeHost" (*mut u8);
            /// Page-locks memory: start, bytes, flags.
            mem_host_register: "MemHostRegister" (*mut u8, usize, u32);
            /// Undoes `host_register`.
            mem_host_unregister: "MemHostUnregister" (*mut u8);
            /// The device's address of page-locked memory: out, start, flags.
            mem_host_get_device_pointer: "MemHostGetDevicePointer" (*mut DevicePtr, *mut u8, u32);
        }
        optional {
            /// Allocates memory in the order of a stream: out, bytes, stream.
            mem_alloc_async: "MemAllocAsync" (*mut DevicePtr, usize, RawStream);
            /// Frees memory in the order of a stream: memory, stream.
            mem_free_async: "MemFreeAsync" (DevicePtr, RawStream);
            /// The pool behind `allocate_async`: out, device.
            device_get_default_mem_pool: "DeviceGetDefaultMemPool" (*mut RawMemPool, i32);
            /// Sets an attribute of a pool: pool, which, value.
            mem_pool_set_attribute: "MemPoolSetAttribute" (RawMemPool, u32, *mut u64);
            /// Gives cached memory of a pool back: pool, bytes to keep.
            mem_pool_trim_to: "MemPoolTrimTo" (RawMemPool, usize);
            /// Begins a capture: stream, mode.
            stream_begin_capture: "StreamBeginCapture" (RawStream, u32);
            /// Ends a capture: stream, out.
            stream_end_capture: "StreamEndCapture" (RawStream, *mut RawGraph);
            /// The state of a capture: stream, out.
            stream_is_capturing: "StreamIsCapturing" (RawStream, *mut u32);
            /// Exchanges the calling thread's capture mode.
            thread_exchange_stream_capture_mode: "ThreadExchangeStreamCaptureMode" (*mut u32);
            /// Makes a graph executable: out, graph, flags.
            graph_instantiate_with_flags: "GraphInstantiateWithFlags" (*mut RawGraphExec, RawGraph, u64);
            /// Launches an executable graph: graph, stream.
            graph_launch: "GraphLaunch" (RawGraphExec, RawStream);
            /// Destroys a graph.
            graph_destroy: "GraphDestroy" (RawGraph);
            /// Destroys an executable graph.
            graph_exec_destroy: "GraphExecDestroy" (RawGraphExec);
            /// Makes a handle of memory: out, memory.
            ipc_get_mem_handle: "IpcGetMemHandle" (*mut IpcHandle, DevicePtr);
            /// Opens a handle of memory: out, handle, flags.
            ipc_open_mem_handle: "IpcOpenMemHandle" (*mut DevicePtr, IpcHandle, u32);
            /// Closes memory of another process.
            ipc_close_mem_handle: "IpcCloseMemHandle" (DevicePtr);
            /// The allocation around an address: its start, its bytes, the address.
            mem_get_address_range: "MemGetAddressRange" (*mut DevicePtr, *mut usize, DevicePtr);
            /// Makes a handle of an event: out, event.
            ipc_get_event_handle: "IpcGetEventHandle" (*mut IpcHandle, RawEvent);
            /// Opens a handle of an event: out, handle.
            ipc_open_event_handle: "IpcOpenEventHandle" (*mut RawEvent, IpcHandle);
        }
    }
}

impl Calls {
    /// Whether the vendor has every call that capture and replay take.
    #[must_use]
    pub const fn can_capture(&self) -> bool {
        self.stream_begin_capture.is_some()
            && self.stream_end_capture.is_some()
            && self.stream_is_capturing.is_some()
            && self.thread_exchange_stream_capture_mode.is_some()
            && self.graph_instantiate_with_flags.is_some()
            && self.graph_launch.is_some()
            && self.graph_destroy.is_some()
            && self.graph_exec_destroy.is_some()
    }

    /// Whether it has those that sharing memory by legacy handles takes.
    #[must_use]
    pub const fn can_share(&self) -> bool {
        self.ipc_get_mem_handle.is_some() && self.ipc_open_mem_handle.is_some() && self.ipc_close_mem_handle.is_some()
    }

    /// Whether it has those that sharing events takes.
    #[must_use]
    pub const fn can_share_events(&self) -> bool {
        self.ipc_get_event_handle.is_some() && self.ipc_open_event_handle.is_some()
    }

    /// Whether it has those that stream-ordered memory takes.
    #[must_use]
    pub const fn can_allocate_in_order(&self) -> bool {
        self.mem_alloc_async.is_some() && self.mem_free_async.is_some()
    }
}

vendor_calls! {
    /// The calls of a BLAS that cuBLAS and hipBLAS have with the same arguments.
    pub struct BlasCalls {
        required {
            /// Makes a handle.
            create: "Create" (*mut RawBlas);
            /// Destroys a handle.
            destroy: "Destroy" (RawBlas);
            /// Binds a stream: handle, stream.
            set_stream: "SetStream" (RawBlas, RawStream);
            /// Says whether kernels may add with atomics: handle, mode.
            set_atomics_mode: "SetAtomicsMode" (RawBlas, u32);
            /// Sets the location of alpha and beta: handle, mode. Mode 0 is the host with both vendors.
            set_pointer_mode: "SetPointerMode" (RawBlas, u32);
            /// Multiplies: handle, operations on A and B, m, n, k, alpha, A, type, lda, B, type, ldb, beta, C, type, ldc, compute type, algorithm.
            gemm_ex: "GemmEx" (
                RawBlas, i32, i32, i32, i32, i32, *const u8, DevicePtr, i32, i32, DevicePtr, i32, i32, *const u8, DevicePtr, i32, i32, i32, i32,
            );
            /// Multiplies a batch. A stride follows each leading dimension, and the count follows C.
            gemm_strided_batched_ex: "GemmStridedBatchedEx" (
                RawBlas, i32, i32, i32, i32, i32, *const u8, DevicePtr, i32, i32, i64, DevicePtr, i32, i32, i64, *const u8, DevicePtr, i32, i32,
                i64, i32, i32, i32,
            );
        }
        optional {
            /// Binds a workspace: handle, memory, bytes.
            set_workspace: "SetWorkspace" (RawBlas, DevicePtr, usize);
            /// Sets the precision: handle, mode.
            set_math_mode: "SetMathMode" (RawBlas, u32);
            /// Multiplies with 64-bit sizes.
            gemm_ex_64: "GemmEx_64" (
                RawBlas, i32, i32, i64, i64, i64, *const u8, DevicePtr, i32, i64, DevicePtr, i32, i64, *const u8, DevicePtr, i32, i64, i32, i32,
            );
            /// Multiplies a batch with 64-bit sizes.
            gemm_strided_batched_ex_64: "GemmStridedBatchedEx_64" (
                RawBlas, i32, i32, i64, i64, i64, *const u8, DevicePtr, i32, i64, i64, DevicePtr, i32, i64, i64, *const u8, DevicePtr, i32, i64,
                i64, i64, i32, i32,
            );
        }
    }
}
