//! The HIP runtime, initialized once for each library file.

use std::path::PathBuf;
use std::sync::Arc;

use highwater_driver::{Calls, Captures, DriverCache, Found, LibraryName, Search, Zeros};
use highwater_hal::{Error, ErrorKind};

use crate::calls::{self, HipCalls};
use crate::{codes, libraries, quirks};

/// An initialized runtime.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) calls: Calls,
    pub(crate) own: HipCalls,
    /// The version of HIP: 10,000,000 * major + 100,000 * minor + patch.
    pub(crate) version: i32,
    /// The number of devices.
    pub(crate) devices: i32,
    /// The captures that are open in the runtime.
    pub(crate) captures: Arc<Captures>,
    /// Zeros of each device.
    pub(crate) zeros: Vec<Zeros>,
}

impl Driver {
    /// Returns the initialized runtime that the search finds among the names that `accepts` selects.
    ///
    /// # Safety
    /// The caller must ensure that this process may run the constructors of all libraries that the names or `paths`
    /// select.
    pub(crate) unsafe fn open(
        search: &mut Search,
        paths: &dyn Fn(&str) -> Option<PathBuf>,
        accepts: impl Fn(&LibraryName) -> bool,
    ) -> Result<&'static Self, Error> {
        static OPEN: DriverCache<Driver> = DriverCache::new();
        // SAFETY: As the caller promises. A library with one of these names, or one that a variable names as the
        // runtime, exports the runtime's symbols.
        unsafe { OPEN.open(search, &libraries::HIP, paths, accepts, |found| Self::initialize(found)) }
    }

    /// # Safety
    /// The caller must ensure that the library is AMD's runtime.
    unsafe fn initialize(found: &Found) -> Result<Self, Error> {
        // SAFETY: As the caller promises.
        let tables = unsafe {
            (Calls::load(&found.library, calls::runtime_symbol), HipCalls::load(&found.library, calls::runtime_symbol))
        };
        let (calls, own) = found.both(tables.0, tables.1, "install the HIP runtime of ROCm 6 or 7")?;
        let (mut version, mut devices) = (0, 0);
        // SAFETY: The call writes one number, which outlives it. It needs no initialization.
        codes::HIP.check("open", unsafe { (own.runtime_get_version)(&mut version) })?;
        if major(version) < 6 {
            let message = format!("{} is HIP {}, expected HIP 6 or 7", found.library.name(), written(version));
            return Err(
                Error::new(ErrorKind::Unsupported, "open", message).with_hint("install the HIP runtime of ROCm 6 or 7")
            );
        }
        // SAFETY: The call takes only flags, and 0 is the only valid value.
        is_there(unsafe { (own.init)(0) })?;
        highwater_hal::exit::watch();
        // SAFETY: As above.
        is_there(unsafe { (own.get_device_count)(&mut devices) })?;
        if devices < 1 {
            return Err(codes::HIP.error("open", quirks::NO_DEVICE));
        }
        let captures = Arc::new(Captures::new(devices.unsigned_abs() as usize));
        let zeros = (0..devices).map(|_| Zeros::default()).collect();
        Ok(Self { calls, own, version, devices, captures, zeros })
    }

    /// Returns the major version of HIP.
    pub(crate) const fn major(&self) -> u32 {
        major(self.version)
    }

    /// Returns an attribute of a device; 0 if the runtime does not know it.
    pub(crate) fn attribute(&self, device: i32, which: i32) -> i32 {
        let mut value = 0;
        // SAFETY: The call writes one number, which outlives it.
        let code = unsafe { (self.own.device_get_attribute)(&mut value, which, device) };
        if code == 0 { value } else { 0 }
    }
}

/// Converts a code of initialization, several of which mean that no device exists.
fn is_there(code: i32) -> Result<(), Error> {
    match code {
        0 => Ok(()),
        // HIP 5 returns this code if no device exists. Later versions return `hipErrorNoDevice`.
        quirks::INVALID_DEVICE => Err(codes::HIP.error("open", quirks::NO_DEVICE).with_code(i64::from(code))),
        code => Err(codes::HIP.error("open", code)),
    }
}

const fn major(version: i32) -> u32 {
    (version / 10_000_000).unsigned_abs()
}

/// Formats a version: `6.4.43484`.
pub(crate) fn written(version: i32) -> String {
    format!("{}.{}.{}", major(version), version / 100_000 % 100, version % 100_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_the_runtime_writes_them() {
        assert_eq!([written(60_443_484), written(70_253_211)], ["6.4.43484", "7.2.53211"]);
        assert_eq!([major(50_731_921), major(60_443_484), major(70_253_211)], [5, 6, 7]);
    }

    #[test]
    fn a_machine_without_a_device_is_told_as_that_whatever_the_code() {
        for code in [quirks::NO_DEVICE, quirks::INVALID_DEVICE, 35] {
            let error = is_there(code).unwrap_err();
            assert_eq!((error.kind(), error.code()), (ErrorKind::DeviceMissing, Some(i64::from(code))), "{error}");
            assert!(!error.hint().is_empty());
        }
        assert_eq!(is_there(999).unwrap_err().kind(), ErrorKind::Vendor);
        assert!(is_there(0).is_ok());
    }
}
