//! Tables of vendor calls, filled at run time from an opened library.
//!
//! Codes are `i32` values and handles are numbers. An enum of a binding crate would be undefined behavior for the first
//! code that its version does not know. A missing required call fails the load, and a missing optional call is `None`.
//! Nothing is resolved later, and nothing panics.

use super::raw::{RawBlas, RawEvent, RawGraph, RawGraphExec, RawMemPool, RawStream};
use highwater_hal::DevicePtr;

/// Modes of a capture and of a thread. Both vendors use the same numbers.
pub mod capture_mode {
    /// Calls of every thread that a capture forbids fail.
    pub const GLOBAL: u32 = 0;
    /// Calls of the capturing thread that a capture forbids fail.
    pub const THREAD_LOCAL: u32 = 1;
    /// No call fails because of a capture.
    pub const RELAXED: u32 = 2;
}

/// States of a stream's capture. Both vendors use the same numbers.
pub mod capture_status {
    /// The stream takes part in no capture.
    pub const NONE: u32 = 0;
    /// A capture is open.
    pub const ACTIVE: u32 = 1;
    /// A capture was lost and has not been ended.
    pub const INVALIDATED: u32 = 2;
}

/// The pointer mode for alpha and beta in host memory. Both vendors use the same number.
pub const POINTER_MODE_HOST: u32 = 0;

/// 64 bytes that name memory or an event of a process. Both vendors pass them by value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct IpcHandle(pub [u8; 64]);

/// Declares a table of vendor calls.
///
/// Each line holds a field, the symbol's name without the vendor's prefix, and the argument types. Every call returns
/// an `i32`. A `required` call is a function pointer, and an `optional` one may be `None`. `load` fills the table.
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
            /// The fields, with the names of their symbols without the vendor's prefix.
            $visibility const NAMES: &'static [(&'static str, &'static str)] =
                &[$( (stringify!($field), $name), )* $( (stringify!($optional), $optional_name), )*];

            /// Fills the table from `library`. `symbol` returns the vendor's symbol for a name.
            ///
            /// # Errors
            /// All required symbols that are missing.
            ///
            /// # Safety
            /// The caller must ensure that the library's functions under these symbols take the declared arguments.
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
                // Each was found, or the function has returned.
                $( let Some($field) = $field else { return Err(missing) }; )*
                $( let $optional = library.symbol(&symbol($optional_name)); )*
                // SAFETY: The symbols are functions of the declared arguments, as the caller promises. The library is
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
    /// The driver calls that CUDA and HIP have with the same arguments. The fields are named for CUDA's driver API.
    pub struct Calls {
        required {
            /// Reports whether all work of a stream is done.
            stream_query: "StreamQuery" (RawStream);
            /// Waits for a stream.
            stream_synchronize: "StreamSynchronize" (RawStream);
            /// Creates a stream: out, flags, priority.
            stream_create_with_priority: "StreamCreateWithPriority" (*mut RawStream, u32, i32);
            /// Destroys a stream.
            stream_destroy: "StreamDestroy" (RawStream);
            /// Makes a stream wait for an event: stream, event, flags.
            stream_wait_event: "StreamWaitEvent" (RawStream, RawEvent, u32);
            /// Returns the least and the greatest priority: out, out.
            get_stream_priority_range: "GetStreamPriorityRange" (*mut i32, *mut i32);
            /// Creates an event: out, flags.
            event_create: "EventCreate" (*mut RawEvent, u32);
            /// Destroys an event.
            event_destroy: "EventDestroy" (RawEvent);
            /// Records an event: event, stream.
            event_record: "EventRecord" (RawEvent, RawStream);
            /// Reports whether an event is done.
            event_query: "EventQuery" (RawEvent);
            /// Waits for an event.
            event_synchronize: "EventSynchronize" (RawEvent);
            /// Returns the milliseconds between two events: out, start, end.
            event_elapsed_time: "EventElapsedTime" (*mut f32, RawEvent, RawEvent);
            /// Waits for the current device.
            device_synchronize: "DeviceSynchronize" ();
            /// Allocates memory on the current device: out, bytes.
            mem_alloc: "MemAlloc" (*mut DevicePtr, usize);
            /// Frees memory of `mem_alloc`.
            mem_free: "MemFree" (DevicePtr);
            /// Returns the free and the total bytes of the current device: out, out.
            mem_get_info: "MemGetInfo" (*mut usize, *mut usize);
            /// Copies from the host to a device: destination, source, bytes, stream.
            memcpy_htod_async: "MemcpyHtoDAsync" (DevicePtr, *const u8, usize, RawStream);
            /// Copies from a device to the host: destination, source, bytes, stream.
            memcpy_dtoh_async: "MemcpyDtoHAsync" (*mut u8, DevicePtr, usize, RawStream);
            /// Copies within a device: destination, source, bytes, stream.
            memcpy_dtod_async: "MemcpyDtoDAsync" (DevicePtr, DevicePtr, usize, RawStream);
            /// Fills memory with a byte: destination, value, count, stream.
            memset_d8_async: "MemsetD8Async" (DevicePtr, u8, usize, RawStream);
            /// Fills memory with elements of two bytes: destination, value, count, stream.
            memset_d16_async: "MemsetD16Async" (DevicePtr, u16, usize, RawStream);
            /// Fills memory with elements of four bytes: destination, value, count, stream.
            memset_d32_async: "MemsetD32Async" (DevicePtr, u32, usize, RawStream);
            /// Allocates page-locked memory: out, bytes, flags.
            mem_host_alloc: "MemHostAlloc" (*mut *mut u8, usize, u32);
            /// Frees page-locked memory.
            mem_free_host: "MemFreeHost" (*mut u8);
            /// Page-locks existing memory: start, bytes, flags.
            mem_host_register: "MemHostRegister" (*mut u8, usize, u32);
            /// Ends `mem_host_register`: start.
            mem_host_unregister: "MemHostUnregister" (*mut u8);
            /// Returns the device's address of page-locked memory: out, start, flags.
            mem_host_get_device_pointer: "MemHostGetDevicePointer" (*mut DevicePtr, *mut u8, u32);
        }
        optional {
            /// Allocates memory in stream order: out, bytes, stream.
            mem_alloc_async: "MemAllocAsync" (*mut DevicePtr, usize, RawStream);
            /// Frees memory in stream order: memory, stream.
            mem_free_async: "MemFreeAsync" (DevicePtr, RawStream);
            /// Returns the pool behind `mem_alloc_async`: out, device.
            device_get_default_mem_pool: "DeviceGetDefaultMemPool" (*mut RawMemPool, i32);
            /// Sets an attribute of a pool: pool, attribute, value.
            mem_pool_set_attribute: "MemPoolSetAttribute" (RawMemPool, u32, *mut u64);
            /// Frees unused memory of a pool: pool, bytes to keep.
            mem_pool_trim_to: "MemPoolTrimTo" (RawMemPool, usize);
            /// Begins a capture: stream, mode.
            stream_begin_capture: "StreamBeginCapture" (RawStream, u32);
            /// Ends a capture: stream, out.
            stream_end_capture: "StreamEndCapture" (RawStream, *mut RawGraph);
            /// Returns the state of a stream's capture: stream, out.
            stream_is_capturing: "StreamIsCapturing" (RawStream, *mut u32);
            /// Exchanges the calling thread's capture mode: in and out.
            thread_exchange_stream_capture_mode: "ThreadExchangeStreamCaptureMode" (*mut u32);
            /// Makes a graph executable: out, graph, flags.
            graph_instantiate_with_flags: "GraphInstantiateWithFlags" (*mut RawGraphExec, RawGraph, u64);
            /// Launches an executable graph: graph, stream.
            graph_launch: "GraphLaunch" (RawGraphExec, RawStream);
            /// Destroys a graph.
            graph_destroy: "GraphDestroy" (RawGraph);
            /// Destroys an executable graph.
            graph_exec_destroy: "GraphExecDestroy" (RawGraphExec);
            /// Exports memory: out, memory.
            ipc_get_mem_handle: "IpcGetMemHandle" (*mut IpcHandle, DevicePtr);
            /// Opens exported memory: out, handle, flags.
            ipc_open_mem_handle: "IpcOpenMemHandle" (*mut DevicePtr, IpcHandle, u32);
            /// Closes opened memory.
            ipc_close_mem_handle: "IpcCloseMemHandle" (DevicePtr);
            /// Returns the allocation that contains an address: out start, out bytes, address.
            mem_get_address_range: "MemGetAddressRange" (*mut DevicePtr, *mut usize, DevicePtr);
            /// Exports an event: out, event.
            ipc_get_event_handle: "IpcGetEventHandle" (*mut IpcHandle, RawEvent);
            /// Opens an exported event: out, handle.
            ipc_open_event_handle: "IpcOpenEventHandle" (*mut RawEvent, IpcHandle);
        }
    }
}

impl Calls {
    /// Returns whether all calls of capture and replay are present.
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

    /// Returns whether all calls of legacy memory handles are present.
    #[must_use]
    pub const fn can_share(&self) -> bool {
        self.ipc_get_mem_handle.is_some() && self.ipc_open_mem_handle.is_some() && self.ipc_close_mem_handle.is_some()
    }

    /// Returns whether all calls of event handles are present.
    #[must_use]
    pub const fn can_share_events(&self) -> bool {
        self.ipc_get_event_handle.is_some() && self.ipc_open_event_handle.is_some()
    }

    /// Returns whether all calls of stream-ordered memory are present.
    #[must_use]
    pub const fn can_allocate_in_order(&self) -> bool {
        self.mem_alloc_async.is_some() && self.mem_free_async.is_some()
    }
}

vendor_calls! {
    /// The BLAS calls that cuBLAS and hipBLAS have with the same arguments.
    pub struct BlasCalls {
        required {
            /// Creates a handle.
            create: "Create" (*mut RawBlas);
            /// Destroys a handle.
            destroy: "Destroy" (RawBlas);
            /// Binds a stream: handle, stream.
            set_stream: "SetStream" (RawBlas, RawStream);
            /// Allows or forbids kernels that add with atomics: handle, mode.
            set_atomics_mode: "SetAtomicsMode" (RawBlas, u32);
            /// Sets the location of alpha and beta: handle, mode.
            set_pointer_mode: "SetPointerMode" (RawBlas, u32);
            /// Multiplies: handle, operations on A and B, m, n, k, alpha, A, type, lda, B, type, ldb, beta, C, type,
            /// ldc, compute type, algorithm.
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
            /// Sets the math mode: handle, mode.
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
