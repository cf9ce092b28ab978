//! A process under the script, the libraries' functions, and device memory.

use std::ffi::{OsStr, c_char, c_void};
use std::path::PathBuf;
use std::process::{Command, Output};
use std::ptr::null_mut;
use std::sync::OnceLock;

use libloading::Library;

/// Set in the process that a test runs in.
const INSIDE: &str = "HIGHWATER_TEST_INSIDE";

pub(crate) fn script() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../scripts/simulated.sh")
}

/// Runs the script.
pub(crate) fn under(vendor: &str, command: &[&OsStr], environment: &[(&str, &str)]) -> Output {
    let mut script = Command::new(script());
    script.arg(vendor).args(command).env_remove("HIGHWATER_MOCK").env_remove("HIGHWATER_SIMULATED_CUDA");
    script.env_remove("CUBLAS_WORKSPACE_CONFIG").envs(environment.iter().copied()).output().unwrap()
}

/// Has the test of this name run in a process of its own. `true` there, and `false` where it was started from.
pub(crate) fn inside(test: &str, vendor: &str, environment: &[(&str, &str)]) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    let own = std::env::current_exe().unwrap();
    let command = [own.as_os_str(), "--exact".as_ref(), test.as_ref(), "--nocapture".as_ref()];
    let output = under(vendor, &command, &[environment, &[(INSIDE, "1")]].concat());
    let text = String::from_utf8_lossy(&output.stdout);
    // A name that is misspelt runs no test and fails nothing.
    assert!(output.status.success() && text.contains("1 passed"), "{text}{}", String::from_utf8_lossy(&output.stderr));
    false
}

/// A test that runs in a process of its own, over `vendor`, with an environment.
macro_rules! isolated {
    ($(
        $(#[$attribute:meta])*
        fn $name:ident() over $vendor:literal $(with $variable:ident = $value:literal)* $body:block
    )*) => {
        $(
            $(#[$attribute])*
            #[test]
            fn $name() {
                let module = module_path!().split_once("::").map_or("", |(_, module)| module);
                let test = format!("{module}::{}", stringify!($name));
                if $crate::rig::inside(&test, $vendor, &[$((stringify!($variable), $value)),*]) $body
            }
        )*
    };
}
pub(crate) use isolated;

type Ptr = *mut c_void;

macro_rules! api {
    ($type:ident, $file:literal: $($name:ident($($argument:ty),*);)*) => {
        #[allow(non_snake_case, reason = "the symbols have the vendor's names")]
        pub(crate) struct $type {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) -> u32,)*
        }

        impl $type {
            pub(crate) fn get() -> &'static Self {
                static LIBRARY: OnceLock<$type> = OnceLock::new();
                LIBRARY.get_or_init(|| {
                    // SAFETY: the libraries may be opened at any time, and the functions have these types.
                    unsafe {
                        let library = Library::new($file).unwrap();
                        let found = Self {
                            $($name: *library.get(concat!(stringify!($name), "\0").as_bytes()).unwrap(),)*
                        };
                        std::mem::forget(library);
                        found
                    }
                })
            }
        }
    };
}

api!(Driver, "libcuda.so.1":
    cuInit(u32);
    cuDevicePrimaryCtxRetain(*mut Ptr, i32);
    cuCtxSetCurrent(Ptr);
    cuCtxGetCurrent(*mut Ptr);
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
    cuStreamBeginCapture_v2(Ptr, u32);
    cuStreamEndCapture(Ptr, *mut Ptr);
    cuGraphInstantiateWithFlags(*mut Ptr, Ptr, u64);
    cuGraphLaunch(Ptr, Ptr);
    cuGraphGetNodes(Ptr, *mut Ptr, *mut usize);
    cuGraphNodeGetType(Ptr, *mut u32);
    cuMemHostAlloc(*mut Ptr, usize, u32);
    cuCtxEnablePeerAccess(Ptr, u32);
);

api!(Blas, "libcublas.so.13":
    cublasCreate_v2(*mut Ptr);
    cublasDestroy_v2(Ptr);
    cublasGetVersion_v2(Ptr, *mut i32);
    cublasGetProperty(u32, *mut i32);
    cublasSetStream_v2(Ptr, Ptr);
    cublasGetStream_v2(Ptr, *mut Ptr);
    cublasSetWorkspace_v2(Ptr, u64, usize);
    cublasSetMathMode(Ptr, u32);
    cublasGetMathMode(Ptr, *mut u32);
    cublasSetAtomicsMode(Ptr, u32);
    cublasGetAtomicsMode(Ptr, *mut u32);
    cublasSetPointerMode_v2(Ptr, u32);
    cublasGetPointerMode_v2(Ptr, *mut u32);
    cublasSgemm_v2(Ptr, u32, u32, i32, i32, i32, *const f32, u64, i32, u64, i32, *const f32, u64, i32);
    cublasDgemm_v2(Ptr, u32, u32, i32, i32, i32, *const f64, u64, i32, u64, i32, *const f64, u64, i32);
    cublasSgemmStridedBatched(
        Ptr, u32, u32, i32, i32, i32, *const f32, u64, i32, i64, u64, i32, i64, *const f32, u64, i32, i64, i32);
    cublasGemmEx(
        Ptr, u32, u32, i32, i32, i32, *const c_void, u64, u32, i32, u64, u32, i32, *const c_void, u64, u32, i32, u32,
        i32);
    cublasGemmEx_64(
        Ptr, u32, u32, i64, i64, i64, *const c_void, u64, u32, i64, u64, u32, i64, *const c_void, u64, u32, i64, u32,
        i32);
    cublasGemmStridedBatchedEx(
        Ptr, u32, u32, i32, i32, i32, *const c_void, u64, u32, i32, i64, u64, u32, i32, i64, *const c_void, u64, u32,
        i32, i64, i32, u32, i32);
    cublasGemmStridedBatchedEx_64(
        Ptr, u32, u32, i64, i64, i64, *const c_void, u64, u32, i64, i64, u64, u32, i64, i64, *const c_void, u64, u32,
        i64, i64, i64, u32, i32);
);

api!(Lt, "libcublasLt.so.13":
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
);

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

/// A function that gives a text for a code.
pub(crate) fn text(file: &str, function: &str, code: u32) -> String {
    // SAFETY: the function has this type, and gives a string that stays.
    unsafe {
        let library = Library::new(file).unwrap();
        let function = *library.get::<unsafe extern "C" fn(u32) -> *const c_char>(function.as_bytes()).unwrap();
        std::mem::forget(library);
        std::ffi::CStr::from_ptr(function(code)).to_str().unwrap().to_owned()
    }
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

/// What a stream is blocked by.
pub(crate) struct Gate(&'static std::sync::atomic::AtomicBool);

impl Gate {
    /// Blocks the stream until the gate is opened or dropped.
    pub(crate) fn new(stream: Ptr) -> Self {
        unsafe extern "C" fn wait(flag: Ptr) {
            // SAFETY: the flag lives for ever.
            let flag = unsafe { &*flag.cast::<std::sync::atomic::AtomicBool>() };
            while !flag.load(std::sync::atomic::Ordering::Acquire) {
                std::thread::yield_now();
            }
        }
        let flag: &'static _ = Box::leak(Box::default());
        ok!(Driver.cuLaunchHostFunc(
            stream,
            wait,
            std::ptr::from_ref::<std::sync::atomic::AtomicBool>(flag).cast_mut().cast()
        ));
        Self(flag)
    }

    pub(crate) fn open(&self) {
        self.0.store(true, std::sync::atomic::Ordering::Release);
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open();
    }
}
