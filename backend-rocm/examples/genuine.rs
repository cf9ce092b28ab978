//! Facts about AMD's own libraries on a machine without a device, checked one by one: what the backend is built on and what
//! the simulation imitates. `scripts/check-genuine-rocm.sh` fetches the libraries and runs this over them.
//!
//! ```text
//! genuine MAJOR PART
//!
//!   MAJOR      6 or 7: the HIP that the loader's path leads to
//!   calls      the runtime's calls, without hipInit before them
//!   init       the same after hipInit
//!   blas       hipBLAS
//!   lt         hipBLASLt
//!   lt-create  a handle of hipBLASLt, whose creation ends the process
//!   symbols    which of them exist
//!   missing    the runtime does not open; the next argument is the library that the loader names
//!   majors     HIP of another major version does not open beside this one; the next two arguments are their paths
//! ```
//!
//! One line per fact: version, fact, what is expected, what was seen, and `ok` or `DIFFERENT`.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt::Display;
use std::process::ExitCode;

// The loader's own functions, so that the facts are the loader's own.
unsafe extern "C" {
    safe fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    safe fn dlerror() -> *const c_char;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlvsym(library: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void;
    fn dladdr(address: *const c_void, place: *mut Place) -> c_int;
}

/// `Dl_info`.
#[repr(C)]
struct Place {
    file: *const c_char,
    base: *mut c_void,
    symbol: *const c_char,
    address: *mut c_void,
}

const RTLD_LAZY: c_int = 1;

/// A call of the runtime that takes numbers and pointers. Each argument uses one register, and six suffice.
type Call = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> c_int;
/// hipIpcOpenMemHandle and hipIpcOpenEventHandle: the second argument is 64 bytes by value.
type Import = unsafe extern "C" fn(*mut c_void, Handle, u32) -> c_int;
type Name = unsafe extern "C" fn(c_int) -> *const c_char;

/// An IPC handle as a struct, because C passes an array by reference.
#[repr(C)]
struct Handle([u8; 64]);

/// An argument of a call.
#[derive(Clone, Copy)]
enum Word {
    /// A number, or a null handle.
    N(usize),
    /// A buffer for the call's output.
    Out,
    /// A function that is not called.
    Function,
}
use Word::{Function, N, Out};

/// The calls that return 100 and write nothing. Sizes, kinds and flags would be valid with a device.
const CALLS: &[(&str, &[Word])] = &[
    ("hipGetDevice", &[Out]),
    ("hipSetDevice", &[N(0)]),
    ("hipDeviceGetAttribute", &[Out, N(63), N(0)]),
    ("hipDeviceGetName", &[Out, N(256), N(0)]),
    ("hipDeviceGetPCIBusId", &[Out, N(64), N(0)]),
    ("hipDeviceGetUuid", &[Out, N(0)]),
    ("hipDeviceTotalMem", &[Out, N(0)]),
    ("hipGetDevicePropertiesR0600", &[Out, N(0)]),
    ("hipGetDevicePropertiesR0000", &[Out, N(0)]),
    ("hipGetDeviceProperties", &[Out, N(0)]),
    ("hipDeviceSynchronize", &[]),
    ("hipDeviceCanAccessPeer", &[Out, N(0), N(1)]),
    ("hipDeviceEnablePeerAccess", &[N(1), N(0)]),
    ("hipDeviceDisablePeerAccess", &[N(1)]),
    ("hipDeviceGetStreamPriorityRange", &[Out, Out]),
    ("hipStreamCreateWithFlags", &[Out, N(1)]),
    ("hipStreamCreateWithPriority", &[Out, N(1), N(0)]),
    ("hipStreamDestroy", &[N(0)]),
    ("hipStreamSynchronize", &[N(0)]),
    ("hipStreamQuery", &[N(0)]),
    ("hipStreamWaitEvent", &[N(0), N(0), N(0)]),
    ("hipStreamGetFlags", &[N(0), Out]),
    ("hipStreamGetPriority", &[N(0), Out]),
    ("hipStreamGetDevice", &[N(0), Out]),
    ("hipLaunchHostFunc", &[N(0), Function, N(0)]),
    ("hipEventCreateWithFlags", &[Out, N(2)]),
    ("hipEventDestroy", &[N(0)]),
    ("hipEventRecord", &[N(0), N(0)]),
    ("hipEventQuery", &[N(0)]),
    ("hipEventSynchronize", &[N(0)]),
    ("hipEventElapsedTime", &[Out, N(0), N(0)]),
    ("hipMalloc", &[Out, N(4096)]),
    ("hipFree", &[N(0)]),
    ("hipMallocAsync", &[Out, N(4096), N(0)]),
    ("hipFreeAsync", &[N(0), N(0)]),
    ("hipMemcpy", &[Out, Out, N(16), N(0)]),
    ("hipMemcpyAsync", &[Out, Out, N(16), N(0), N(0)]),
    ("hipMemcpyPeerAsync", &[Out, N(0), Out, N(0), N(16), N(0)]),
    ("hipMemsetAsync", &[Out, N(0), N(16), N(0)]),
    ("hipMemsetD8Async", &[Out, N(0), N(16), N(0)]),
    ("hipMemsetD16Async", &[Out, N(0), N(8), N(0)]),
    ("hipMemsetD32Async", &[Out, N(0), N(4), N(0)]),
    ("hipMemGetInfo", &[Out, Out]),
    ("hipPointerGetAttributes", &[Out, Out]),
    ("hipMemGetAddressRange", &[Out, Out, N(0)]),
    ("hipDeviceGetDefaultMemPool", &[Out, N(0)]),
    ("hipMemPoolSetAttribute", &[N(0), N(4), Out]),
    ("hipMemPoolGetAttribute", &[N(0), N(4), Out]),
    ("hipMemPoolTrimTo", &[N(0), N(0)]),
    ("hipHostMalloc", &[Out, N(4096), N(0)]),
    ("hipHostFree", &[N(0)]),
    ("hipHostRegister", &[Out, N(4096), N(0)]),
    ("hipHostUnregister", &[Out]),
    ("hipHostGetDevicePointer", &[Out, Out, N(0)]),
    ("hipIpcGetMemHandle", &[Out, Out]),
    ("hipIpcCloseMemHandle", &[Out]),
    ("hipIpcGetEventHandle", &[Out, N(0)]),
    ("hipStreamBeginCapture", &[N(0), N(1)]),
    ("hipStreamEndCapture", &[N(0), Out]),
    ("hipStreamIsCapturing", &[N(0), Out]),
    ("hipGraphInstantiate", &[Out, N(0), N(0), N(0), N(0)]),
    ("hipGraphLaunch", &[N(0), N(0)]),
    ("hipGraphExecDestroy", &[N(0)]),
    ("hipGraphDestroy", &[N(0)]),
    ("hipThreadExchangeStreamCaptureMode", &[Out]),
    ("hipPeekAtLastError", &[]),
    // Called twice, because reading the error does not clear it.
    ("hipGetLastError", &[]),
    ("hipGetLastError", &[]),
];

const ERRORS: &[(c_int, &str)] = &[
    (0, "hipSuccess"),
    (1, "hipErrorInvalidValue"),
    (2, "hipErrorOutOfMemory"),
    (3, "hipErrorNotInitialized"),
    (35, "hipErrorInsufficientDriver"),
    (100, "hipErrorNoDevice"),
    (101, "hipErrorInvalidDevice"),
    (201, "hipErrorInvalidContext"),
    (217, "hipErrorPeerAccessUnsupported"),
    (400, "hipErrorInvalidHandle"),
    (500, "hipErrorNotFound"),
    (600, "hipErrorNotReady"),
    (700, "hipErrorIllegalAddress"),
    (704, "hipErrorPeerAccessAlreadyEnabled"),
    (705, "hipErrorPeerAccessNotEnabled"),
    (709, "hipErrorContextIsDestroyed"),
    (712, "hipErrorHostMemoryAlreadyRegistered"),
    (713, "hipErrorHostMemoryNotRegistered"),
    (719, "hipErrorLaunchFailure"),
    (801, "hipErrorNotSupported"),
    (900, "hipErrorStreamCaptureUnsupported"),
    (901, "hipErrorStreamCaptureInvalidated"),
    (902, "hipErrorStreamCaptureMerge"),
    (903, "hipErrorStreamCaptureUnmatched"),
    (904, "hipErrorStreamCaptureUnjoined"),
    (905, "hipErrorStreamCaptureIsolation"),
    (906, "hipErrorStreamCaptureImplicit"),
    (907, "hipErrorCapturedEvent"),
    (908, "hipErrorStreamCaptureWrongThread"),
    (999, "hipErrorUnknown"),
    (12345, "hipErrorUnknown"),
];

const STATUSES: [&str; 12] = [
    "HIPBLAS_STATUS_SUCCESS",
    "HIPBLAS_STATUS_NOT_INITIALIZED",
    "HIPBLAS_STATUS_ALLOC_FAILED",
    "HIPBLAS_STATUS_INVALID_VALUE",
    "HIPBLAS_STATUS_MAPPING_ERROR",
    "HIPBLAS_STATUS_EXECUTION_FAILED",
    "HIPBLAS_STATUS_INTERNAL_ERROR",
    "HIPBLAS_STATUS_NOT_SUPPORTED",
    "HIPBLAS_STATUS_ARCH_MISMATCH",
    "HIPBLAS_STATUS_HANDLE_IS_NULLPTR",
    "HIPBLAS_STATUS_INVALID_ENUM",
    "HIPBLAS_STATUS_UNKNOWN",
];

/// The symbols of the runtime besides those of [`CALLS`], with the versions that have them.
const RUNTIME: &[(&str, &[u32])] = &[
    ("hipInit", &[6, 7]),
    ("hipRuntimeGetVersion", &[6, 7]),
    ("hipDriverGetVersion", &[6, 7]),
    ("hipGetErrorName", &[6, 7]),
    ("hipGetErrorString", &[6, 7]),
    ("hipGetDeviceCount", &[6, 7]),
    ("hipIpcOpenMemHandle", &[6, 7]),
    ("hipIpcOpenEventHandle", &[6, 7]),
    ("hipExtGetLastError", &[6, 7]),
    ("hipGetProcAddress", &[6, 7]),
    ("hipEventRecordWithFlags", &[6, 7]),
    ("hipStreamBeginCaptureToGraph", &[6, 7]),
    ("hipGraphInstantiateWithParams", &[6, 7]),
    ("hipStreamGetId", &[7]),
    ("hipGetDriverEntryPoint", &[7]),
    ("hipMemGetHandleForAddressRange", &[7]),
    ("hiprtcCreateProgram", &[6]),
    ("hiprtcCompileProgram", &[6]),
    ("hiprtcVersion", &[6]),
];

/// The symbols of hipBLAS, with the versions that have them.
const BLAS: &[(&str, &[u32])] = &[
    ("hipblasCreate", &[6, 7]),
    ("hipblasDestroy", &[6, 7]),
    ("hipblasSetStream", &[6, 7]),
    ("hipblasGetStream", &[6, 7]),
    ("hipblasSetPointerMode", &[6, 7]),
    ("hipblasGetPointerMode", &[6, 7]),
    ("hipblasSetAtomicsMode", &[6, 7]),
    ("hipblasGetAtomicsMode", &[6, 7]),
    ("hipblasStatusToString", &[6, 7]),
    ("hipblasSetMathMode", &[6, 7]),
    ("hipblasGetMathMode", &[6, 7]),
    ("hipblasSetWorkspace", &[7]),
    ("hipblasSgemm", &[6, 7]),
    ("hipblasDgemm", &[6, 7]),
    ("hipblasHgemm", &[6, 7]),
    ("hipblasCgemm", &[6, 7]),
    ("hipblasZgemm", &[6, 7]),
    ("hipblasSgemmBatched", &[6, 7]),
    ("hipblasSgemmStridedBatched", &[6, 7]),
    ("hipblasGemmEx", &[6, 7]),
    ("hipblasGemmBatchedEx", &[6, 7]),
    ("hipblasGemmStridedBatchedEx", &[6, 7]),
    ("hipblasGemmExWithFlags", &[6, 7]),
    ("hipblasSaxpy", &[6, 7]),
    ("hipblasDaxpy", &[6, 7]),
    ("hipblasHaxpy", &[6, 7]),
    ("hipblasAxpyEx", &[6, 7]),
    ("hipblasSdot", &[6, 7]),
    ("hipblasSscal", &[6, 7]),
    ("hipblasSnrm2", &[6, 7]),
    ("hipblasSgemv", &[6, 7]),
    ("hipblasSger", &[6, 7]),
    ("hipblasStrsm", &[6, 7]),
    ("hipblasSaxpy_64", &[6, 7]),
    ("hipblasSgemv_64", &[6, 7]),
    ("hipblasSgemm_64", &[6, 7]),
    ("hipblasGemmEx_64", &[6, 7]),
    ("hipblasGemmStridedBatchedEx_64", &[6, 7]),
    ("hipblasGemmEx_v2", &[6]),
    ("hipblasGemmBatchedEx_v2", &[6]),
    ("hipblasGemmStridedBatchedEx_v2", &[6]),
    // Only its name and its symbols reveal the version of hipBLAS.
    ("hipblasGetVersion", &[]),
    ("hipblasGetProperty", &[]),
    ("hipblasGetArchName", &[]),
    ("hipblasSetInt8Datatype", &[]),
    ("hipblasGetInt8Datatype", &[]),
];

/// hipBLASLt: Debian builds this version for HIP 6 and 7.
const LT_NAME: &str = "libhipblaslt.so.1";

/// The symbols of hipBLASLt that the backend calls, and others that show its version.
const LT: &[&str] = &[
    "hipblasLtCreate",
    "hipblasLtDestroy",
    "hipblasLtGetVersion",
    "hipblasLtMatmulDescCreate",
    "hipblasLtMatmulDescDestroy",
    "hipblasLtMatmulDescSetAttribute",
    "hipblasLtMatmulDescGetAttribute",
    "hipblasLtMatrixLayoutCreate",
    "hipblasLtMatrixLayoutDestroy",
    "hipblasLtMatrixLayoutSetAttribute",
    "hipblasLtMatrixLayoutGetAttribute",
    "hipblasLtMatmulPreferenceCreate",
    "hipblasLtMatmulPreferenceDestroy",
    "hipblasLtMatmulPreferenceSetAttribute",
    "hipblasLtMatmulPreferenceGetAttribute",
    "hipblasLtMatmulAlgoGetHeuristic",
    "hipblasLtMatmul",
];

/// A kind of object of hipBLASLt.
struct LtObject {
    /// The kind's name in the names of its functions.
    kind: &'static str,
    /// The arguments of the create function, after the first.
    words: &'static [Word],
    /// The numbers of attributes, with their bytes.
    attributes: &'static [(usize, usize)],
}

const LT_OBJECTS: &[LtObject] = &[
    // Arguments: a product of f32. Attributes: both transposes, the epilogue, the bias's address and its type.
    LtObject { kind: "MatmulDesc", words: &[N(2), N(0)], attributes: &[(0, 4), (1, 4), (2, 4), (3, 8), (4, 4)] },
    // Arguments: 4 by 4 elements of f32. Attributes: the number of matrices and their distance.
    LtObject { kind: "MatrixLayout", words: &[N(0), N(4), N(4), N(4)], attributes: &[(0, 4), (1, 8)] },
    // Attribute: the bytes of workspace.
    LtObject { kind: "MatmulPreference", words: &[], attributes: &[(1, 8)] },
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let [major @ ("6" | "7"), part, rest @ ..] = &arguments[..] else { return usage() };
    let mut facts = Facts { major: if *major == "6" { 6 } else { 7 }, different: false };
    match (*part, rest) {
        ("calls", []) => facts.calls(false),
        ("init", []) => facts.calls(true),
        ("blas", []) => facts.blas(),
        ("lt", []) => facts.lt(),
        ("lt-create", []) => facts.lt_create(),
        ("symbols", []) => facts.symbols(),
        ("missing", [named]) => facts.missing(named),
        ("majors", [first, second]) => facts.majors(first, second),
        _ => return usage(),
    }
    if facts.different { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn usage() -> ExitCode {
    eprintln!("usage: genuine 6|7 calls|init|blas|lt|lt-create|symbols|missing LIBRARY|majors PATH PATH");
    ExitCode::from(2)
}

/// The facts about one version, and whether one of them differs.
struct Facts {
    major: u32,
    different: bool,
}

impl Facts {
    fn fact(&mut self, fact: &str, expected: impl Display, seen: impl Display) {
        let (expected, seen) = (expected.to_string(), seen.to_string());
        let holds = expected == seen;
        self.fact_that(fact, &expected, &seen, holds);
    }

    fn fact_that(&mut self, fact: &str, expected: &str, seen: &str, holds: bool) {
        self.different |= !holds;
        let verdict = if holds { "ok" } else { "DIFFERENT" };
        println!("{:<3} {fact:<56} {expected:<38} {seen:<38} {verdict}", self.major);
    }

    fn runtime_name(&self) -> &'static str {
        if self.major == 6 { "libamdhip64.so.6" } else { "libamdhip64.so.7" }
    }

    fn blas_name(&self) -> &'static str {
        if self.major == 6 { "libhipblas.so.2" } else { "libhipblas.so.3" }
    }

    /// Opens a library as the backend does.
    fn open(&mut self, name: &str) -> Library {
        let (library, seen) = match Library::open(name) {
            Ok(library) => (library, "opens".to_owned()),
            Err(said) => (Library(std::ptr::null_mut()), said),
        };
        let file = name.rsplit('/').next().unwrap_or(name);
        self.fact(&format!("dlopen {file}"), "opens", seen);
        if library.0.is_null() {
            // Nothing else can be checked.
            std::process::exit(1);
        }
        library
    }

    fn calls(&mut self, initialise: bool) {
        let library = self.open(self.runtime_name());
        let when = if initialise { "" } else { "without hipInit: " };
        if initialise {
            self.fact("hipInit(0)", 100, library.call("hipInit", &[N(0)]).code);
        }
        for name in ["hipRuntimeGetVersion", "hipDriverGetVersion"] {
            let answer = library.call(name, &[Out]);
            let version = answer.number();
            let (expected, seen) = (format!("0, {}nnnnnnn", self.major), format!("{}, {version}", answer.code));
            let holds = answer.code == 0 && version / 10_000_000 == self.major as c_int;
            self.fact_that(&format!("{when}{name}"), &expected, &seen, holds);
        }
        let answer = library.call("hipGetDeviceCount", &[Out]);
        let seen = format!("{}, count {}", answer.code, answer.number());
        self.fact(&format!("{when}hipGetDeviceCount"), "100, count 0", seen);
        for (name, words) in CALLS {
            let answer = library.call(name, words);
            self.fact(&format!("{when}{name}"), "100, nothing written", answer);
        }
        for name in ["hipIpcOpenMemHandle", "hipIpcOpenEventHandle"] {
            let mut room = Room::new();
            // SAFETY: the call takes a pointer to a handle, 64 bytes by value, and flags or nothing.
            let code = unsafe {
                let import = std::mem::transmute::<*mut c_void, Import>(library.symbol(name));
                import(room.slot(0), Handle([0; 64]), 1)
            };
            self.fact(&format!("{when}{name}"), "100, nothing written", Answer { code, room });
        }
        for &(code, expected) in ERRORS {
            self.fact(&format!("{when}hipGetErrorName({code})"), expected, library.name_of("hipGetErrorName", code));
        }
        for code in [100, 12345] {
            let seen = library.name_of("hipGetErrorString", code);
            let holds = !seen.is_empty() && seen != "null";
            self.fact_that(&format!("{when}hipGetErrorString({code})"), "words", &format!("{seen:?}"), holds);
        }
    }

    fn blas(&mut self) {
        let library = self.open(self.blas_name());
        for (code, expected) in (0..).zip(STATUSES) {
            let fact = format!("hipblasStatusToString({code})");
            self.fact(&fact, expected, library.name_of("hipblasStatusToString", code));
        }
        for code in [12, 99, -1] {
            let seen = library.name_of("hipblasStatusToString", code);
            let holds = seen.starts_with("<undefined");
            self.fact_that(&format!("hipblasStatusToString({code})"), "<undefined ...", &seen, holds);
        }
        self.fact("hipblasCreate", "6, nothing written", library.call("hipblasCreate", &[Out]));
        self.fact("hipblasCreate(NULL)", 9, library.call("hipblasCreate", &[N(0)]).code);
        self.fact("hipblasSetStream(NULL, NULL)", 1, library.call("hipblasSetStream", &[N(0), N(0)]).code);
        self.fact("hipblasDestroy(NULL)", 1, library.call("hipblasDestroy", &[N(0)]).code);
        self.fact("hipblasCreate again", "6, nothing written", library.call("hipblasCreate", &[Out]));
    }

    /// hipBLASLt ends the process if it gets no device memory.
    fn lt_create(&mut self) {
        let library = self.open(LT_NAME);
        let answer = library.call("hipblasLtCreate", &[Out]);
        self.fact("hipblasLtCreate", "the process ends", &answer);
    }

    fn lt(&mut self) {
        let library = self.open(LT_NAME);
        self.fact("hipblasLtCreate(NULL)", 3, library.call("hipblasLtCreate", &[N(0)]).code);
        self.fact("hipblasLtDestroy(NULL)", 3, library.call("hipblasLtDestroy", &[N(0)]).code);
        for LtObject { kind, words, attributes } in LT_OBJECTS {
            let [create, destroy, set, get] =
                ["Create", "Destroy", "SetAttribute", "GetAttribute"].map(|end| format!("hipblasLt{kind}{end}"));
            let answer = library.call(&create, &[&[Out], *words].concat());
            self.fact(&create, "0, 8 bytes written", &answer);
            let Some(object) = answer.room.0.first_chunk().map(|bytes| usize::from_ne_bytes(*bytes)) else { return };
            if answer.code != 0 {
                continue;
            }
            for &(attribute, bytes) in *attributes {
                // The value is in the slot of its argument. Each byte of the slot is the same.
                let code = library.call(&set, &[N(object), N(attribute), Out, N(bytes)]).code;
                self.fact(&format!("{set}({attribute}, {bytes} bytes)"), 0, code);
                let answer = library.call(&get, &[N(object), N(attribute), Out, N(bytes), Out]);
                self.fact(&format!("{get}({attribute}, {bytes} bytes)"), "0, 8 bytes written", &answer);
                let code = library.call(&set, &[N(object), N(attribute), Out, N(bytes - 1)]).code;
                // A preference does not check the number of bytes.
                let expected = if *kind == "MatmulPreference" { 0 } else { 3 };
                self.fact(&format!("{set}({attribute}, a byte less)"), expected, code);
            }
            let code = library.call(&set, &[N(object), N(99), Out, N(8)]).code;
            self.fact(&format!("{set}(99, 8 bytes)"), 3, code);
            self.fact(&destroy, 0, library.call(&destroy, &[N(object)]).code);
        }
    }

    fn symbols(&mut self) {
        let here = |versions: &[u32], major| if versions.contains(&major) { "present" } else { "absent" };
        let runtime = self.open(self.runtime_name());
        let mut last = "";
        for (name, _) in CALLS {
            if *name != last {
                self.fact(name, "present", runtime.presence(name, "libamdhip64.so"));
            }
            last = name;
        }
        for (name, versions) in RUNTIME {
            self.fact(name, here(versions, self.major), runtime.presence(name, "libamdhip64.so"));
        }
        // SAFETY: both texts end; nothing is called.
        let (versioned, plain) = unsafe {
            (dlvsym(runtime.0, c"hipInit".as_ptr(), c"hip_4.2".as_ptr()), dlsym(runtime.0, c"hipInit".as_ptr()))
        };
        let holds = !versioned.is_null() && versioned == plain;
        let seen = if holds { "the same" } else { "another" };
        self.fact_that("hipInit of version hip_4.2 is the one without a version", "the same", seen, holds);
        let old = runtime.symbol("hipGetDeviceProperties");
        let same = |name: &str| if old == runtime.symbol(name) { "the same" } else { "another" };
        self.fact(
            "hipGetDeviceProperties is hipGetDevicePropertiesR0600",
            "another",
            same("hipGetDevicePropertiesR0600"),
        );
        let blas = self.open(self.blas_name());
        for (name, versions) in BLAS {
            self.fact(name, here(versions, self.major), blas.presence(name, "libhipblas.so"));
        }
        let lt = self.open(LT_NAME);
        for name in LT {
            self.fact(name, "present", lt.presence(name, "libhipblaslt.so"));
        }
        let seen = blas.presence("rocblas_get_version_string", "librocblas.so");
        self.fact("rocblas_get_version_string, in rocBLAS", "present", seen);
    }

    fn missing(&mut self, named: &str) {
        let name = self.runtime_name();
        let fact = format!("dlopen {name} without {named}");
        match Library::open(name) {
            Ok(_) => self.fact(&fact, named, "opens"),
            // The loader names the first library that it lacks, whichever was requested.
            Err(said) => {
                let (names, why) = said.split_once(':').unwrap_or((&said, ""));
                self.fact(&fact, named, names);
                let expected = "cannot open shared object file";
                self.fact_that(&format!("{fact}: why"), expected, why.trim(), why.contains(expected));
            }
        }
    }

    fn majors(&mut self, first: &str, second: &str) {
        self.open(first);
        let file = second.rsplit('/').next().unwrap_or(second);
        let fact = format!("dlopen {file} beside it");
        match Library::open(second) {
            Ok(_) => self.fact(&fact, "undefined symbol", "opens"),
            Err(said) => {
                let seen = said
                    .split_once("undefined symbol")
                    .map_or(said.clone(), |(_, rest)| format!("undefined symbol{rest}"));
                self.fact_that(&fact, "undefined symbol", &seen, seen.starts_with("undefined symbol"));
            }
        }
    }
}

/// A buffer for a call's output, with a slot for each argument, filled with one byte.
struct Room(Vec<u8>);

impl Room {
    const SLOT: usize = 8192;
    const FILL: u8 = 0xa5;

    fn new() -> Self {
        Self(vec![Self::FILL; 6 * Self::SLOT])
    }

    fn slot(&mut self, index: usize) -> *mut c_void {
        self.0[index * Self::SLOT..].as_mut_ptr().cast()
    }
}

/// A call's result and its output.
struct Answer {
    code: c_int,
    room: Room,
}

impl Answer {
    /// Returns the number in the first slot.
    fn number(&self) -> c_int {
        c_int::from_ne_bytes([self.room.0[0], self.room.0[1], self.room.0[2], self.room.0[3]])
    }
}

impl Display for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let written = self.room.0.iter().filter(|byte| **byte != Room::FILL).count();
        match written {
            0 => write!(f, "{}, nothing written", self.code),
            _ => write!(f, "{}, {written} bytes written", self.code),
        }
    }
}

/// An opened library, which is never closed.
struct Library(*mut c_void);

impl Library {
    fn open(name: &str) -> Result<Self, String> {
        let text = CString::new(name).expect("a name without a zero");
        let library = dlopen(text.as_ptr(), RTLD_LAZY);
        if library.is_null() { Err(text_at(dlerror())) } else { Ok(Self(library)) }
    }

    /// Returns the address of a symbol; null if there is none.
    fn symbol(&self, name: &str) -> *mut c_void {
        let text = CString::new(name).expect("a name without a zero");
        // SAFETY: the library is open and the text ends.
        unsafe { dlsym(self.0, text.as_ptr()) }
    }

    /// Checks that a symbol is in the library whose file begins with `file`, and reports where it is otherwise. The
    /// loader also searches the libraries that this one depends on.
    fn presence(&self, name: &str, file: &str) -> String {
        let address = self.symbol(name);
        if address.is_null() {
            return "absent".to_owned();
        }
        let mut place = Place {
            file: std::ptr::null(),
            base: std::ptr::null_mut(),
            symbol: std::ptr::null(),
            address: std::ptr::null_mut(),
        };
        // SAFETY: `place` is room for the answer.
        unsafe { dladdr(address, &mut place) };
        let found = text_at(place.file);
        let found = found.rsplit('/').next().unwrap_or_default();
        if found.starts_with(file) { "present".to_owned() } else { format!("in {found}") }
    }

    /// Calls a function that takes numbers and pointers.
    fn call(&self, name: &str, words: &[Word]) -> Answer {
        extern "C" fn never(_: *mut c_void) {}
        let mut room = Room::new();
        let mut registers = [0; 6];
        for (index, (register, word)) in registers.iter_mut().zip(words).enumerate() {
            *register = match *word {
                N(number) => number,
                Out => room.slot(index) as usize,
                Function => never as extern "C" fn(*mut c_void) as usize,
            };
        }
        let address = self.symbol(name);
        if address.is_null() {
            return Answer { code: c_int::MIN, room };
        }
        let [a, b, c, d, e, f] = registers;
        // SAFETY: the function takes at most six numbers or pointers, given in the registers where it looks for them; what it
        // writes has a slot of its own that is larger than any structure of these libraries.
        let code = unsafe { std::mem::transmute::<*mut c_void, Call>(address)(a, b, c, d, e, f) };
        Answer { code, room }
    }

    /// Returns the text of a function from a code to a text.
    fn name_of(&self, function: &str, code: c_int) -> String {
        let address = self.symbol(function);
        if address.is_null() {
            return "no such function".to_owned();
        }
        // SAFETY: the function takes a code and gives a text that lasts.
        text_at(unsafe { std::mem::transmute::<*mut c_void, Name>(address)(code) })
    }
}

/// Reads a text of the libraries or of the loader.
fn text_at(text: *const c_char) -> String {
    if text.is_null() {
        return "null".to_owned();
    }
    // SAFETY: the callers pass texts that end and that nobody changes meanwhile.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
