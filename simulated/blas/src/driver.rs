//! The functions of NVIDIA's driver that a BLAS library calls.

use std::ffi::c_void;
use std::sync::OnceLock;

use libloading::Library;

use crate::status;
use crate::table::{self, GetTable, Product, Table};

type Context = *mut c_void;

/// The driver's functions.
#[derive(Debug, Clone, Copy)]
pub struct Driver {
    init: unsafe extern "C" fn(u32) -> u32,
    device_count: unsafe extern "C" fn(*mut i32) -> u32,
    get_current: unsafe extern "C" fn(*mut Context) -> u32,
    push_current: unsafe extern "C" fn(Context) -> u32,
    pop_current: unsafe extern "C" fn(*mut Context) -> u32,
    device_memory: unsafe extern "C" fn(*mut usize, i32) -> u32,
    synchronize: unsafe extern "C" fn() -> u32,
    allocate: unsafe extern "C" fn(*mut u64, usize) -> u32,
    free: unsafe extern "C" fn(u64) -> u32,
    is_capturing: unsafe extern "C" fn(*mut c_void, *mut u32) -> u32,
    allocate_ordered: unsafe extern "C" fn(*mut u64, usize, *mut c_void) -> u32,
    free_ordered: unsafe extern "C" fn(u64, *mut c_void) -> u32,
    table: Table,
}

/// The context of a library's handle.
#[derive(Debug, Clone, Copy)]
pub struct Home {
    /// The device's ordinal.
    pub device: u32,
    /// The `CUcontext`, as a number.
    context: usize,
}

impl Driver {
    /// Returns the driver, which is opened at first use and never closed.
    ///
    /// # Errors
    /// `NOT_INITIALIZED` if no simulated driver is found.
    pub fn get() -> Result<&'static Self, u32> {
        static DRIVER: OnceLock<Driver> = OnceLock::new();
        if let Some(driver) = DRIVER.get() {
            return Ok(driver);
        }
        // A failure is not remembered: the library may be found the next time.
        let driver = Self::open().ok_or(status::NOT_INITIALIZED)?;
        Ok(DRIVER.get_or_init(|| driver))
    }

    fn open() -> Option<Self> {
        // SAFETY: the driver is made to be opened by any process at any time.
        let library = unsafe { Library::new("libcuda.so.1") }.ok()?;
        // SAFETY: the names have these types in the vendor's header.
        let driver = unsafe {
            let get_table = *library.get::<GetTable>(table::SYMBOL).ok()?;
            let table = *get_table().as_ref()?;
            if table.version != table::VERSION || table.product_bytes != size_of::<Product>() as u64 {
                return None;
            }
            Self {
                init: *library.get(b"cuInit\0").ok()?,
                device_count: *library.get(b"cuDeviceGetCount\0").ok()?,
                get_current: *library.get(b"cuCtxGetCurrent\0").ok()?,
                push_current: *library.get(b"cuCtxPushCurrent_v2\0").ok()?,
                pop_current: *library.get(b"cuCtxPopCurrent_v2\0").ok()?,
                device_memory: *library.get(b"cuDeviceTotalMem_v2\0").ok()?,
                synchronize: *library.get(b"cuCtxSynchronize\0").ok()?,
                allocate: *library.get(b"cuMemAlloc_v2\0").ok()?,
                free: *library.get(b"cuMemFree_v2\0").ok()?,
                is_capturing: *library.get(b"cuStreamIsCapturing\0").ok()?,
                allocate_ordered: *library.get(b"cuMemAllocAsync\0").ok()?,
                free_ordered: *library.get(b"cuMemFreeAsync\0").ok()?,
                table,
            }
        };
        std::mem::forget(library);
        Some(driver)
    }

    /// Starts the driver as the runtime inside the real library does, makes a context current if none is, and returns the
    /// current one.
    ///
    /// # Errors
    /// `NOT_INITIALIZED`.
    pub fn home(&self) -> Result<Home, u32> {
        let mut devices = 0;
        // SAFETY: the function takes 0 for its flags, and the other a place for a number.
        let code = unsafe {
            match (self.init)(0) {
                0 => (self.device_count)(&mut devices),
                code => code,
            }
        };
        if code != 0 || devices < 1 {
            return Err(status::NOT_INITIALIZED);
        }
        let device = self.current_device().map_err(|_| status::NOT_INITIALIZED)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: it takes a place for its answer.
        match unsafe { (self.get_current)(&mut context) } {
            0 => Ok(Home { device, context: context as usize }),
            _ => Err(status::NOT_INITIALIZED),
        }
    }

    /// Returns the device of the current context. If none is current, makes that of device 0 current, as the runtime inside the
    /// real library does.
    fn current_device(&self) -> Result<u32, u32> {
        let mut device = 0;
        // SAFETY: it takes a place for its answer.
        match unsafe { (self.table.current_device)(&mut device) } {
            0 => Ok(device),
            code => Err(status::of_launch(code)),
        }
    }

    /// Returns the bytes of a device's memory.
    ///
    /// # Errors
    /// `NOT_INITIALIZED`.
    pub fn device_memory(&self, home: Home) -> Result<usize, u32> {
        let mut bytes = 0;
        let device = i32::try_from(home.device).map_err(|_| status::NOT_INITIALIZED)?;
        // SAFETY: it takes a place for its answer.
        match unsafe { (self.device_memory)(&mut bytes, device) } {
            0 => Ok(bytes),
            _ => Err(status::NOT_INITIALIZED),
        }
    }

    /// Allocates device memory in the current context.
    ///
    /// # Errors
    /// `ALLOC_FAILED` if memory is exhausted, else `NOT_INITIALIZED`.
    pub fn allocate(&self, bytes: usize) -> Result<u64, u32> {
        let mut address = 0;
        // SAFETY: it takes a place for its answer.
        match unsafe { (self.allocate)(&mut address, bytes) } {
            0 => Ok(address),
            2 => Err(status::ALLOC_FAILED),
            _ => Err(status::NOT_INITIALIZED),
        }
    }

    /// Waits for the device and frees memory of `allocate`; 0 is none. The driver's codes are ignored, because a handle may be
    /// destroyed while the driver shuts down.
    pub fn wait_and_free(&self, home: Home, address: u64) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: the context is the one that the memory came from, and what was pushed is popped.
        unsafe {
            if (self.push_current)(home.context as Context) == 0 {
                (self.synchronize)();
                if address != 0 {
                    (self.free)(address);
                }
                (self.pop_current)(&mut popped);
            }
        }
    }

    /// Enqueues a product of a handle on its own workspace. A capture records an allocation for large intermediate results.
    ///
    /// # Errors
    /// The driver's code as a status.
    ///
    /// # Safety
    /// As for [`Driver::launch`].
    pub unsafe fn launch_on_own_workspace(&self, product: &Product) -> Result<(), u32> {
        /// On an H200 a capture recorded memory for intermediate results of 256 KiB, and none for those of 4 KiB.
        const LARGE: u64 = 64 << 10;
        self.current_device()?;
        let (stream, mut capture, bytes) = (product.stream, 0, product.intermediate_bytes());
        // SAFETY: the stream is one of the driver, and the answer has a place.
        let answered = unsafe { (self.is_capturing)(stream, &mut capture) };
        if bytes < LARGE || answered != 0 || capture != 1 {
            // SAFETY: forwarded to the caller.
            return unsafe { self.launch(product) };
        }
        let mut product = *product;
        product.workspace_bytes = bytes;
        let launched = |code: u32| if code == 0 { Ok(()) } else { Err(status::of_launch(code)) };
        // SAFETY: the stream is one of the driver, and what is allocated is freed after its last use.
        unsafe {
            launched((self.allocate_ordered)(&mut product.workspace, bytes as usize, stream))?;
            self.launch(&product)?;
            launched((self.free_ordered)(product.workspace, stream))
        }
    }

    /// Enqueues a product. In a thread without a context, the context of device 0 becomes current.
    ///
    /// # Errors
    /// The driver's code as a status.
    ///
    /// # Safety
    /// The caller must pass a stream of the driver and matrices of the product's sizes.
    pub unsafe fn launch(&self, product: &Product) -> Result<(), u32> {
        self.current_device()?;
        // SAFETY: forwarded to the caller.
        match status::of_launch(unsafe { (self.table.launch)(product) }) {
            status::SUCCESS => Ok(()),
            code => Err(code),
        }
    }
}
