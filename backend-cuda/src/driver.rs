//! NVIDIA's driver, initialized once for each library file, with the primary context of each device.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use highwater_driver::{Calls, Captures, DriverCache, Found, Search, Zeros};
use highwater_hal::{Error, ErrorKind};

use crate::calls::{self, CudaCalls, RawContext, VirtualMemoryCalls};
use crate::{codes, libraries};

/// The oldest supported CUDA version of a driver: 12.2.
const OLDEST: i32 = 12_020;

/// An initialized driver.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) calls: Calls,
    pub(crate) own: CudaCalls,
    /// `None` for a driver that lacks virtual memory.
    pub(crate) virtual_memory: Option<VirtualMemoryCalls>,
    /// The CUDA version of the driver: 1000 * major + 10 * minor.
    pub(crate) version: i32,
    pub(crate) devices: Vec<Device>,
    /// The captures that are open in the driver.
    pub(crate) captures: Arc<Captures>,
}

/// A device and its primary context.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) number: i32,
    /// Retained on first use and never released. The last release would end the work of every library in the context.
    context: OnceLock<RawContext>,
    pub(crate) zeros: Zeros,
}

impl Driver {
    /// Returns the initialized driver that the search finds.
    ///
    /// # Safety
    /// The caller must ensure that this process may run the constructors of all libraries that the names or `paths`
    /// select.
    pub(crate) unsafe fn open(
        search: &mut Search,
        paths: &dyn Fn(&str) -> Option<PathBuf>,
    ) -> Result<&'static Self, Error> {
        static OPEN: DriverCache<Driver> = DriverCache::new();
        // SAFETY: As the caller promises. A library with this name, or one that a variable names as the driver, exports
        // the driver's symbols.
        unsafe { OPEN.open(search, &libraries::NVIDIA_DRIVER, paths, |_| true, |found| Self::initialize(found)) }
    }

    /// # Safety
    /// The caller must ensure that the library is NVIDIA's driver.
    unsafe fn initialize(found: &Found) -> Result<Self, Error> {
        const OPERATION: &str = "open";
        // SAFETY: As the caller promises.
        let (calls, own) = unsafe {
            (Calls::load(&found.library, calls::driver_symbol), CudaCalls::load(&found.library, calls::driver_symbol))
        };
        let (calls, own) = found.both(calls, own, "install a driver of CUDA 12.2 or newer")?;
        let check = |code| codes::CUDA.check(OPERATION, code);
        let mut version = 0;
        // SAFETY: The call writes one number, which outlives it. It needs no initialization.
        check(unsafe { (own.driver_get_version)(&mut version) })?;
        if version < OLDEST {
            let message =
                format!("{} is a driver of CUDA {}, expected a newer one", found.library.name(), written(version));
            return Err(Error::new(ErrorKind::Unsupported, OPERATION, message)
                .with_hint(format!("install a driver of CUDA {} or newer", written(OLDEST))));
        }
        // SAFETY: The call takes only flags, and 0 is the only valid value.
        check(unsafe { (own.init)(0) })?;
        highwater_hal::exit::watch();
        let mut count = 0;
        // SAFETY: As above.
        check(unsafe { (own.device_get_count)(&mut count) })?;
        let number = |ordinal| {
            let mut number = 0;
            // SAFETY: As above.
            check(unsafe { (own.device_get)(&mut number, ordinal) })?;
            Ok(Device { number, context: OnceLock::new(), zeros: Zeros::default() })
        };
        let devices = (0..count).map(number).collect::<Result<Vec<_>, Error>>()?;
        if devices.is_empty() {
            return Err(codes::CUDA.error(OPERATION, cudarc::driver::sys::CUresult::CUDA_ERROR_NO_DEVICE as i32));
        }
        let captures = Arc::new(Captures::new(devices.len()));
        // SAFETY: As the caller promises.
        let virtual_memory = unsafe { VirtualMemoryCalls::load(&found.library, calls::driver_symbol) }.ok();
        Ok(Self { calls, own, virtual_memory, version, devices, captures })
    }

    /// Returns the primary context of a device, which is retained once.
    #[inline]
    pub(crate) fn context(&self, device: u32) -> Result<RawContext, i32> {
        const INVALID_DEVICE: i32 = cudarc::driver::sys::CUresult::CUDA_ERROR_INVALID_DEVICE as i32;
        let device = self.devices.get(device as usize).ok_or(INVALID_DEVICE)?;
        match device.context.get() {
            Some(context) => Ok(*context),
            None => self.retain(device),
        }
    }

    /// Returns the primary context of a device if it exists. Creates none: a context takes hundreds of MiB.
    pub(crate) fn existing_context(&self, device: u32) -> Result<Option<RawContext>, i32> {
        if let Some(known) = self.devices.get(device as usize)
            && known.context.get().is_none()
        {
            let (mut flags, mut is_active) = (0, 0);
            // SAFETY: The call writes two numbers, which outlive it.
            match unsafe { (self.own.device_primary_ctx_get_state)(known.number, &mut flags, &mut is_active) } {
                0 if is_active == 0 => return Ok(None),
                0 => {}
                code => return Err(code),
            }
        }
        self.context(device).map(Some)
    }

    /// Pushes a context that is not current. `code` is the result of the query for the current context.
    #[cold]
    #[inline(never)]
    pub(crate) fn enter(&self, code: i32, context: RawContext) -> Result<Option<()>, i32> {
        if code != 0 {
            return Err(code);
        }
        // SAFETY: The context is the device's primary one, which is never released.
        match unsafe { (self.own.ctx_push_current)(context) } {
            0 => Ok(Some(())),
            code => Err(code),
        }
    }

    #[cold]
    fn retain(&self, device: &Device) -> Result<RawContext, i32> {
        // Two threads may both retain the context. The extra count is harmless, because none is released.
        let mut context = RawContext::NULL;
        // SAFETY: The call writes one number, which outlives it.
        match unsafe { (self.own.device_primary_ctx_retain)(&mut context, device.number) } {
            0 => Ok(*device.context.get_or_init(|| context)),
            code => Err(code),
        }
    }

    /// Returns the first device whose context is retained, or 0 if none is.
    pub(crate) fn first_with_context(&self) -> u32 {
        let found = self.devices.iter().position(|device| device.context.get().is_some());
        found.and_then(|ordinal| u32::try_from(ordinal).ok()).unwrap_or(0)
    }

    /// Returns an attribute of a device; 0 if the driver does not know it.
    pub(crate) fn attribute(&self, device: i32, which: Attribute) -> i32 {
        let mut value = 0;
        // SAFETY: The call writes one number, which outlives it.
        match unsafe { (self.own.device_get_attribute)(&mut value, which as i32, device) } {
            0 => value,
            _ => 0,
        }
    }
}

/// Formats a version: `12.2`.
pub(crate) fn written(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}
