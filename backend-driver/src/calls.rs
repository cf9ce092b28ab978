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
            stream_create: "StreamCreateWithPriority" (*mut RawStream, u32, i32);
            /// Destroys a stream.
            stream_destroy: "StreamDestroy" (RawStream);
            /// Makes a stream wait for an event: stream, event, flags.
            stream_wait_event: "StreamWaitEvent" (RawStream, RawEvent, u32);
            /// Least and greatest priority.
            priority_range: "GetStreamPriorityRange" (*mut i32, *mut i32);
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
            event_elapsed: "EventElapsedTime" (*mut f32, RawEvent, RawEvent);
            /// Waits for the current device.
            device_synchronize: "DeviceSynchronize" ();
            /// Allocates plain memory of the current device: out, bytes.
            allocate: "MemAlloc" (*mut DevicePtr, usize);
            /// Frees plain memory.
            free: "MemFree" (DevicePtr);
            /// Free and total bytes of the current device.
            memory_info: "MemGetInfo" (*mut usize, *mut usize);
            /// Copies from the host: destination, source, bytes, stream.
            copy_to_device: "MemcpyHtoDAsync" (DevicePtr, *const u8, usize, RawStream);
            /// Copies to the host: destination, source, bytes, stream.
            copy_to_host: "MemcpyDtoHAsync" (*mut u8, DevicePtr, usize, RawStream);
            /// Copies within a device: destination, source, bytes, stream.
            copy_on_device: "MemcpyDtoDAsync" (DevicePtr, DevicePtr, usize, RawStream);
            /// Fills bytes: destination, value, count, stream.
            fill_8: "MemsetD8Async" (DevicePtr, u8, usize, RawStream);
            /// Fills elements of two bytes.
            fill_16: "MemsetD16Async" (DevicePtr, u16, usize, RawStream);
            /// Fills elements of four bytes.
            fill_32: "MemsetD32Async" (DevicePtr, u32, usize, RawStream);
            /// Allocates page-locked memory: out, bytes, flags.
            host_allocate: "MemHostAlloc" (*mut *mut u8, usize, u32);
            /// Frees page-locked memory.
            host_free: "MemFreeHost" (*mut u8);
            /// Page-locks memory: start, bytes, flags.
            host_register: "MemHostRegister" (*mut u8, usize, u32);
            /// Undoes `host_register`.
            host_unregister: "MemHostUnregister" (*mut u8);
            /// The device's address of page-locked memory: out, start, flags.
            host_device_address: "MemHostGetDevicePointer" (*mut DevicePtr, *mut u8, u32);
        }
        optional {
            /// Allocates memory in the order of a stream: out, bytes, stream.
            allocate_async: "MemAllocAsync" (*mut DevicePtr, usize, RawStream);
            /// Frees memory in the order of a stream: memory, stream.
            free_async: "MemFreeAsync" (DevicePtr, RawStream);
            /// The pool behind `allocate_async`: out, device.
            default_pool: "DeviceGetDefaultMemPool" (*mut RawMemPool, i32);
            /// Sets an attribute of a pool: pool, which, value.
            pool_set: "MemPoolSetAttribute" (RawMemPool, u32, *mut u64);
            /// Gives cached memory of a pool back: pool, bytes to keep.
            pool_trim: "MemPoolTrimTo" (RawMemPool, usize);
            /// Begins a capture: stream, mode.
            capture_begin: "StreamBeginCapture" (RawStream, u32);
            /// Ends a capture: stream, out.
            capture_end: "StreamEndCapture" (RawStream, *mut RawGraph);
            /// The state of a capture: stream, out.
            capture_state: "StreamIsCapturing" (RawStream, *mut u32);
            /// Exchanges the calling thread's capture mode.
            capture_mode: "ThreadExchangeStreamCaptureMode" (*mut u32);
            /// Makes a graph executable: out, graph, flags.
            graph_instantiate: "GraphInstantiateWithFlags" (*mut RawGraphExec, RawGraph, u64);
            /// Launches an executable graph: graph, stream.
            graph_launch: "GraphLaunch" (RawGraphExec, RawStream);
            /// Destroys a graph.
            graph_destroy: "GraphDestroy" (RawGraph);
            /// Destroys an executable graph.
            graph_exec_destroy: "GraphExecDestroy" (RawGraphExec);
            /// Makes a handle of memory: out, memory.
            ipc_export: "IpcGetMemHandle" (*mut IpcHandle, DevicePtr);
            /// Opens a handle of memory: out, handle, flags.
            ipc_open: "IpcOpenMemHandle" (*mut DevicePtr, IpcHandle, u32);
            /// Closes memory of another process.
            ipc_close: "IpcCloseMemHandle" (DevicePtr);
            /// The allocation around an address: its start, its bytes, the address.
            address_range: "MemGetAddressRange" (*mut DevicePtr, *mut usize, DevicePtr);
            /// Makes a handle of an event: out, event.
            ipc_export_event: "IpcGetEventHandle" (*mut IpcHandle, RawEvent);
            /// Opens a handle of an event: out, handle.
            ipc_open_event: "IpcOpenEventHandle" (*mut RawEvent, IpcHandle);
        }
    }
}

impl Calls {
    /// Whether the vendor has every call that capture and replay take.
    #[must_use]
    pub const fn can_capture(&self) -> bool {
        self.capture_begin.is_some()
            && self.capture_end.is_some()
            && self.capture_state.is_some()
            && self.capture_mode.is_some()
            && self.graph_instantiate.is_some()
            && self.graph_launch.is_some()
            && self.graph_destroy.is_some()
            && self.graph_exec_destroy.is_some()
    }

    /// Whether it has those that sharing memory by legacy handles takes.
    #[must_use]
    pub const fn can_share(&self) -> bool {
        self.ipc_export.is_some() && self.ipc_open.is_some() && self.ipc_close.is_some()
    }

    /// Whether it has those that sharing events takes.
    #[must_use]
    pub const fn can_share_events(&self) -> bool {
        self.ipc_export_event.is_some() && self.ipc_open_event.is_some()
    }

    /// Whether it has those that stream-ordered memory takes.
    #[must_use]
    pub const fn can_allocate_in_order(&self) -> bool {
        self.allocate_async.is_some() && self.free_async.is_some()
    }
}

/// A product with sizes of 32 or 64 bits: handle, both transposes, m, n, k, alpha, A, its type, lda, B, its type, ldb, beta, C,
/// its type, ldc, compute type, algorithm.
pub type GemmCall<N> = unsafe extern "C" fn(
    RawBlas,
    i32,
    i32,
    N,
    N,
    N,
    *const u8,
    DevicePtr,
    i32,
    N,
    DevicePtr,
    i32,
    N,
    *const u8,
    DevicePtr,
    i32,
    N,
    i32,
    i32,
) -> i32;

/// A batch, with the same sizes: a stride follows each leading dimension, and the count follows C.
pub type GemmBatchCall<N> = unsafe extern "C" fn(
    RawBlas,
    i32,
    i32,
    N,
    N,
    N,
    *const u8,
    DevicePtr,
    i32,
    N,
    i64,
    DevicePtr,
    i32,
    N,
    i64,
    *const u8,
    DevicePtr,
    i32,
    N,
    i64,
    N,
    i32,
    i32,
) -> i32;

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
        }
        optional {
            /// Binds a workspace: handle, memory, bytes.
            set_workspace: "SetWorkspace" (RawBlas, DevicePtr, usize);
            /// Sets the precision: handle, mode.
            set_math_mode: "SetMathMode" (RawBlas, u32);
        }
    }
}
