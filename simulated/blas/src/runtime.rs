//! The functions of the HIP runtime that the library calls.

use std::ffi::{c_char, c_void};
use std::sync::OnceLock;

use libloading::Library;

use crate::hip_status as status;
use crate::table::{self, GetTable, Product, Table};

/// The variable that makes hipBLASLt find no algorithm.
pub const LACKS_ALGORITHMS: &str = "HIGHWATER_SIMULATED_HIPBLASLT_EMPTY";

/// The names of the runtime.
const NAMES: [&str; 2] = ["libamdhip64.so.7", "libamdhip64.so.6"];

/// The runtime's functions, and its settings of hipBLAS.
#[derive(Debug)]
pub struct Runtime {
    get_device: unsafe extern "C" fn(*mut i32) -> i32,
    set_device: unsafe extern "C" fn(i32) -> i32,
    device_memory: unsafe extern "C" fn(*mut usize, i32) -> i32,
    synchronize: unsafe extern "C" fn() -> i32,
    allocate: unsafe extern "C" fn(*mut *mut c_void, usize) -> i32,
    free: unsafe extern "C" fn(*mut c_void) -> i32,
    table: Table,
    /// The major version of hipBLAS.
    pub major: u32,
    /// Whether hipBLASLt finds no algorithm for any problem.
    pub lacks_algorithms: bool,
    /// Whether rocBLAS has kernels for the devices.
    has_kernels: bool,
    /// The architecture without its features.
    arch: String,
}

/// The device of a handle.
#[derive(Debug, Clone, Copy)]
pub struct Home {
    /// Its number in the table.
    pub device: u32,
    /// Its ordinal in the runtime.
    ordinal: i32,
}

impl Runtime {
    /// Returns the runtime, which is opened at first use and never closed.
    ///
    /// # Errors
    /// `INTERNAL_ERROR` if no simulated runtime is found.
    pub fn get() -> Result<&'static Self, u32> {
        static RUNTIME: OnceLock<Runtime> = OnceLock::new();
        if let Some(runtime) = RUNTIME.get() {
            return Ok(runtime);
        }
        // A failure is not remembered: the library may be found the next time.
        let runtime = NAMES.iter().find_map(|name| Self::open(name)).ok_or(status::INTERNAL_ERROR)?;
        Ok(RUNTIME.get_or_init(|| runtime))
    }

    fn open(name: &str) -> Option<Self> {
        type Describe = unsafe extern "C" fn(*mut u32, *mut u32, *mut c_char, i32) -> i32;
        // SAFETY: the runtime is made to be opened by any process at any time.
        let library = unsafe { Library::new(name) }.ok()?;
        let (mut major, mut has_kernels, mut arch) = (0, 0, [0u8; 64]);
        // SAFETY: the names have these types in the vendor's header, and in the simulated runtime.
        let runtime = unsafe {
            let describe = *library.get::<Describe>(b"highwater_simulated_hipblas\0").ok()?;
            if describe(&mut major, &mut has_kernels, arch.as_mut_ptr().cast(), arch.len() as i32) != 0 {
                return None;
            }
            let get_table = *library.get::<GetTable>(table::SYMBOL).ok()?;
            let table = *get_table().as_ref()?;
            if table.version != table::VERSION || table.product_bytes != size_of::<Product>() as u64 {
                return None;
            }
            let arch = arch.iter().take_while(|&&byte| byte != 0).map(|&byte| char::from(byte)).collect();
            Self {
                get_device: *library.get(b"hipGetDevice\0").ok()?,
                set_device: *library.get(b"hipSetDevice\0").ok()?,
                device_memory: *library.get(b"hipDeviceTotalMem\0").ok()?,
                synchronize: *library.get(b"hipDeviceSynchronize\0").ok()?,
                allocate: *library.get(b"hipMalloc\0").ok()?,
                free: *library.get(b"hipFree\0").ok()?,
                table,
                major,
                lacks_algorithms: std::env::var_os(LACKS_ALGORITHMS).is_some(),
                has_kernels: has_kernels != 0,
                arch,
            }
        };
        std::mem::forget(library);
        Some(runtime)
    }

    /// Returns the thread's current device.
    ///
    /// # Errors
    /// `INTERNAL_ERROR` if there is none.
    pub fn home(&self) -> Result<Home, u32> {
        let (mut ordinal, mut device) = (0, 0);
        // SAFETY: both take a place for their answer. The first starts the runtime, and gives the thread a device.
        match unsafe { ((self.get_device)(&mut ordinal), (self.table.current_device)(&mut device)) } {
            (0, 0) => Ok(Home { device, ordinal }),
            _ => Err(status::INTERNAL_ERROR),
        }
    }

    /// Returns the bytes of a device's memory.
    ///
    /// # Errors
    /// `INTERNAL_ERROR`.
    pub fn device_memory(&self, home: Home) -> Result<usize, u32> {
        let mut bytes = 0;
        // SAFETY: it takes a place for its answer.
        match unsafe { (self.device_memory)(&mut bytes, home.ordinal) } {
            0 => Ok(bytes),
            _ => Err(status::INTERNAL_ERROR),
        }
    }

    /// Allocates memory of the current device.
    ///
    /// # Errors
    /// `ALLOC_FAILED` if memory is exhausted, else `INTERNAL_ERROR`.
    pub fn allocate(&self, bytes: usize) -> Result<u64, u32> {
        let mut address = std::ptr::null_mut();
        // SAFETY: it takes a place for its answer.
        match unsafe { (self.allocate)(&mut address, bytes) } {
            0 => Ok(address.expose_provenance() as u64),
            code => Err(status::of_runtime(code)),
        }
    }

    /// Waits for the device and frees memory of `allocate`. The runtime's codes are ignored, because a handle may be destroyed
    /// while the runtime shuts down.
    pub fn wait_and_free(&self, home: Home, address: u64) {
        let mut before = 0;
        // SAFETY: the address came from `allocate`, and the thread's device is put back.
        unsafe {
            if (self.get_device)(&mut before) == 0 && (self.set_device)(home.ordinal) == 0 {
                (self.synchronize)();
                (self.free)(std::ptr::with_exposed_provenance_mut(address as usize));
                (self.set_device)(before);
            }
        }
    }

    /// Ends the process if rocBLAS has no kernels for the devices. hipBLASLt has kernels of its own.
    pub fn need_kernels(&self) {
        if !self.has_kernels {
            eprintln!(
                "\nrocBLAS error: Cannot read rocblas/library/TensileLibrary.dat: No such file or directory for GPU arch : \
                 {}\n List of available TensileLibrary Files : ",
                self.arch
            );
            std::process::abort();
        }
    }

    /// Enqueues a product.
    ///
    /// # Errors
    /// The runtime's code as a status.
    ///
    /// # Safety
    /// The caller must pass a stream of the runtime and matrices of the product's sizes.
    pub unsafe fn launch(&self, product: &Product) -> Result<(), u32> {
        // Default streams are those of the thread's device.
        self.home()?;
        // SAFETY: forwarded to the caller.
        match status::of_runtime(unsafe { (self.table.launch)(product) } as i32) {
            status::SUCCESS => Ok(()),
            code => Err(code),
        }
    }
}
