//! A process under the script, the libraries' functions, and device memory.

use std::ffi::{CStr, OsStr, c_char, c_void};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use libloading::Library;

/// Set to the major version of HIP in the process that a test runs in.
pub(crate) const INSIDE: &str = "HIGHWATER_TEST_INSIDE";

pub(crate) type Ptr = *mut c_void;

/// Runs the script.
pub(crate) fn under(vendor: &str, command: &[&OsStr], environment: &[(&str, &str)]) -> Output {
    let mut script = Command::new(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../scripts/simulated.sh"));
    script.arg(vendor).args(command).env_remove("HIGHWATER_MOCK").env_remove("HIGHWATER_SIMULATED_HIP");
    script.env_remove("HIP_VISIBLE_DEVICES").envs(environment.iter().copied()).output().unwrap()
}

/// The major version of HIP in the process that a test runs in; `None` in the process that starts it.
pub(crate) fn version() -> Option<i32> {
    std::env::var(INSIDE).ok()?.parse().ok()
}

fn major(vendor: &str) -> &'static str {
    if vendor.starts_with("rocm6") { "6" } else { "7" }
}

/// Has the test of this name run in a process of its own, over each vendor. Where it is to end its process, `aborts` is what
/// it says then.
pub(crate) fn outside(test: &str, vendors: &[&str], environment: &[(&str, &str)], aborts: Option<&str>) {
    let own = std::env::current_exe().unwrap();
    let command = [own.as_os_str(), "--exact".as_ref(), test.as_ref(), "--nocapture".as_ref()];
    for vendor in vendors {
        let output = under(vendor, &command, &[environment, &[(INSIDE, major(vendor))]].concat());
        let (text, told) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        let as_expected = match aborts {
            // A name that is misspelt runs no test and fails nothing.
            None => output.status.success() && text.contains("1 passed"),
            Some(message) => output.status.signal() == Some(libc::SIGABRT) && told.contains(message),
        };
        assert!(as_expected, "over {vendor}, {}: {text}{told}", output.status);
    }
}

/// A test that runs in a process of its own over each of the vendors, with an environment. It is given the major version of
/// HIP.
macro_rules! isolated {
    ($(
        $(#[$attribute:meta])*
        fn $name:ident($version:pat) over $vendors:tt $(with $variable:ident = $value:literal)* $(aborts $message:literal)?
            $body:block
    )*) => {
        $(
            $(#[$attribute])*
            #[test]
            fn $name() {
                match $crate::rig::version() {
                    Some($version) => $body,
                    #[allow(unreachable_patterns, reason = "some tests name their versions")]
                    Some(_) => {}
                    None => {
                        let module = module_path!().split_once("::").map_or("", |(_, module)| module);
                        let test = format!("{module}::{}", stringify!($name));
                        let message: &[&str] = &[$($message)?];
                        let environment: &[(&str, &str)] = &[$((stringify!($variable), $value)),*];
                        $crate::rig::outside(&test, &$vendors, environment, message.first().copied());
                    }
                }
            }
        )*
    };
}
pub(crate) use isolated;

/// A library of the version at hand.
fn open(name: &str, of_6: i32, of_7: i32) -> Library {
    let number = if version() == Some(6) { of_6 } else { of_7 };
    // SAFETY: the libraries may be opened at any time.
    let library = unsafe { Library::new(format!("lib{name}.so.{number}")) };
    library.unwrap_or_else(|error| panic!("{error:?}"))
}

macro_rules! api {
    ($type:ident, $name:literal $of_6:literal $of_7:literal: $($function:ident($($argument:ty),*);)*) => {
        #[allow(non_snake_case, reason = "the symbols have the vendor's names")]
        pub(crate) struct $type {
            $(pub(crate) $function: unsafe extern "C" fn($($argument),*) -> i32,)*
        }

        impl $type {
            pub(crate) fn get() -> &'static Self {
                static LIBRARY: OnceLock<$type> = OnceLock::new();
                LIBRARY.get_or_init(|| {
                    let library = open($name, $of_6, $of_7);
                    // SAFETY: the functions have these types.
                    let found = unsafe {
                        Self { $($function: *library.get(concat!(stringify!($function), "\0").as_bytes()).unwrap(),)* }
                    };
                    std::mem::forget(library);
                    found
                })
            }
        }
    };
}

api!(Hip, "amdhip64" 6 7:
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
);

api!(Blas, "hipblas" 2 3:
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
);

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

/// A function that only some version has, by its symbol.
pub(crate) fn optional<F: Copy>(library: &str, symbol: &str) -> Option<F> {
    let library = if library == "hip" { open("amdhip64", 6, 7) } else { open("hipblas", 2, 3) };
    // SAFETY: the caller names the function's type.
    let found = unsafe { library.get::<F>(symbol.as_bytes()) }.ok().map(|function| *function);
    std::mem::forget(library);
    found
}

/// The name or the text of a code.
pub(crate) fn text(library: &str, function: &str, code: i32) -> String {
    let function = optional::<unsafe extern "C" fn(i32) -> *const c_char>(library, function).unwrap();
    // SAFETY: the function has this type, and gives a string that stays.
    unsafe { CStr::from_ptr(function(code)) }.to_str().unwrap().to_owned()
}

/// Calls a function of a library, and says so when the code is not 0.
macro_rules! ok {
    ($library:ident.$name:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: the arguments are those that the function asks for.
        let code = unsafe { ($crate::rig::$library::get().$name)($($argument),*) };
        assert_eq!(code, 0, stringify!($name));
    }};
}
pub(crate) use ok;

/// Calls a function of a library and gives its code.
macro_rules! code {
    ($library:ident.$name:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: the arguments are those that the function asks for, or wrong ones that it checks.
        unsafe { ($crate::rig::$library::get().$name)($($argument),*) }
    }};
}
pub(crate) use code;

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

/// What is behind an address by so many bytes.
pub(crate) fn behind(address: Ptr, bytes: usize) -> Ptr {
    address.wrapping_byte_add(bytes)
}

/// Bytes of device memory that are free.
pub(crate) fn free_bytes() -> usize {
    let (mut free, mut total) = (0, 0);
    ok!(Hip.hipMemGetInfo(&mut free, &mut total));
    free
}

/// What a stream is blocked by.
pub(crate) struct Gate(&'static AtomicBool);

impl Gate {
    /// Blocks the stream until the gate is opened or dropped.
    pub(crate) fn new(stream: Ptr) -> Self {
        unsafe extern "C" fn wait(flag: Ptr) {
            // SAFETY: the flag lives for ever.
            let flag = unsafe { &*flag.cast::<AtomicBool>() };
            while !flag.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
        }
        let flag: &'static AtomicBool = Box::leak(Box::default());
        ok!(Hip.hipLaunchHostFunc(stream, wait, std::ptr::from_ref(flag).cast_mut().cast()));
        Self(flag)
    }

    pub(crate) fn open(&self) {
        self.0.store(true, Ordering::Release);
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open();
    }
}
