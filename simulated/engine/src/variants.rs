//! The settings of a simulated library: `HIGHWATER_SIMULATED_CUDA=key=value,...` or `HIGHWATER_SIMULATED_HIP`.
//!
//! | key | value |
//! | --- | --- |
//! | `devices` | `none`: `cuInit` and every HIP call that needs a device return 100 |
//! | `unknown-code` | a function's name: its next call returns 921, which no header knows; with `NAME:NTH` the nth one |
//! | `lose-context` | a function's name, or `NAME:NTH`: that call returns 700, and the contexts of the process are lost |
//!
//! Only for CUDA:
//!
//! | key | value |
//! | --- | --- |
//! | `driver-version` | the result of `cuDriverGetVersion`, 13000 unless set |
//! | `library` | `stub`: `cuInit` returns 34 |
//!
//! Only for HIP:
//!
//! | key | value |
//! | --- | --- |
//! | `version` | the version whose rules apply: `7.2` (the default), `6.4`, `5.7`, or another `MAJOR.MINOR` |
//! | `hipblas` | the major version of hipBLAS: unless set, 3 with HIP 7 and 2 before |
//! | `arch` | the architecture that the devices report, `gfx942:sramecc+:xnack-` unless set |
//! | `kernels` | `none`: the first product ends the process, as with a rocBLAS that has no kernels for the devices |
//! | `registered-address` | `same`: registered host memory has its own address on the device; `other`, the default, another |
//!
//! `HIGHWATER_MOCK` sets the number, memory and speed of the devices, and which calls of the mock fail.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::code::{Answer, Code};

/// The vendor whose rules a library follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vendor {
    /// NVIDIA's driver.
    Cuda,
    /// AMD's runtime.
    Hip,
}

impl Vendor {
    /// The environment variable.
    #[must_use]
    pub const fn variable(self) -> &'static str {
        match self {
            Self::Cuda => "HIGHWATER_SIMULATED_CUDA",
            Self::Hip => "HIGHWATER_SIMULATED_HIP",
        }
    }

    /// Returns the name of the library in messages.
    #[must_use]
    pub const fn library(self) -> &'static str {
        match self {
            Self::Cuda => "the simulated CUDA driver",
            Self::Hip => "the simulated HIP runtime",
        }
    }

    /// The prefix of the library's function names.
    const fn prefix(self) -> &'static str {
        match self {
            Self::Cuda => "cu",
            Self::Hip => "hip",
        }
    }
}

/// A code that no header has.
pub const UNKNOWN_CODE: u32 = 921;

/// A call that returns another code.
#[derive(Debug)]
struct Injection {
    function: String,
    calls_left: AtomicU64,
    code: u32,
}

/// The settings.
#[derive(Debug)]
pub struct Variants {
    /// The version that the driver reports, for example 13000.
    pub driver_version: i32,
    /// Whether there is no device.
    pub no_device: bool,
    /// Whether the library is a stub.
    pub stub: bool,
    /// Settings of AMD's library only.
    pub hip: HipVariants,
    injections: Vec<Injection>,
}

/// Settings of AMD's library only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HipVariants {
    /// Major and minor version.
    pub version: (i32, i32),
    /// The major version of hipBLAS, if it is not the one that belongs to `version`.
    hipblas: Option<u32>,
    /// The architecture that the devices report.
    pub arch: String,
    /// True if rocBLAS has kernels for that architecture.
    pub has_kernels: bool,
    /// Whether registered host memory has another address on the device than on the host.
    pub moves_registered: bool,
    /// Whether the devices have serial numbers, from which HIP makes their UUIDs.
    pub has_serials: bool,
}

impl Default for HipVariants {
    fn default() -> Self {
        let arch = String::from("gfx942:sramecc+:xnack-");
        Self { version: (7, 2), hipblas: None, arch, has_kernels: true, moves_registered: true, has_serials: true }
    }
}

impl HipVariants {
    /// Returns the result of `hipRuntimeGetVersion`.
    #[must_use]
    pub fn runtime_version(&self) -> i32 {
        match self.version {
            (5, 7) => 50_731_921,
            (6, 4) => 60_443_484,
            (7, 2) => 70_253_211,
            (major, minor) => major * 10_000_000 + minor * 100_000,
        }
    }

    /// Returns the major version of hipBLAS.
    #[must_use]
    pub fn hipblas(&self) -> u32 {
        self.hipblas.unwrap_or(if self.version.0 >= 7 { 3 } else { 2 })
    }

    /// Reads one setting. Returns `None` for a key that is not HIP's.
    fn set(&mut self, key: &str, value: &str) -> Option<Result<(), &'static str>> {
        match (key, value) {
            ("version", _) => {
                let version =
                    value.split_once('.').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
                match version
                    .filter(|&(major, minor): &(i32, i32)| (5..=20).contains(&major) && (0..100).contains(&minor))
                {
                    Some(version) => self.version = version,
                    None => return Some(Err("MAJOR.MINOR such as 6.4, from 5.0 on")),
                }
            }
            ("hipblas", "2") => self.hipblas = Some(2),
            ("hipblas", "3") => self.hipblas = Some(3),
            ("hipblas", _) => return Some(Err("`2` or `3`")),
            ("arch", _) if value.starts_with("gfx") && value.len() < 200 => self.arch = value.to_owned(),
            ("arch", _) => return Some(Err("an architecture such as `gfx942:sramecc+:xnack-`")),
            ("kernels", "none") => self.has_kernels = false,
            ("kernels", _) => return Some(Err("`none`")),
            ("registered-address", "same" | "other") => self.moves_registered = value == "other",
            ("serial", "none") => self.has_serials = false,
            ("serial", _) => return Some(Err("`none`")),
            ("registered-address", _) => return Some(Err("`same` or `other`")),
            _ => return None,
        }
        Some(Ok(()))
    }
}

impl Default for Variants {
    fn default() -> Self {
        let hip = HipVariants::default();
        Self { driver_version: 13000, no_device: false, stub: false, hip, injections: Vec::new() }
    }
}

impl Variants {
    /// Parses the variable's text. The error states the expected format.
    ///
    /// # Errors
    /// A sentence about the first entry that cannot be parsed.
    pub fn parse(vendor: Vendor, text: &str) -> Result<Self, String> {
        let mut variants = Self::default();
        for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
            let (key, value) =
                entry.split_once('=').ok_or_else(|| format!("`{entry}` has no `=`; write key=value,key=value"))?;
            let expected = |what: &str| format!("`{key}` has the value `{value}`, expected {what}");
            let is_cuda = vendor == Vendor::Cuda;
            match key {
                "driver-version" if is_cuda => {
                    variants.driver_version = value.parse().map_err(|_| expected("a number such as 13000"))?;
                }
                "devices" if value == "none" => variants.no_device = true,
                "devices" => return Err(expected("`none`; their number is set by HIGHWATER_MOCK=devices=N")),
                "library" if is_cuda && value == "stub" => variants.stub = true,
                "library" if is_cuda => return Err(expected("`stub`")),
                "unknown-code" | "lose-context" => {
                    let (function, nth) = value.split_once(':').unwrap_or((value, "1"));
                    let nth: u64 = nth.parse().map_err(|_| expected("FUNCTION or FUNCTION:NTH"))?;
                    if nth == 0 || !function.starts_with(vendor.prefix()) {
                        return Err(expected("FUNCTION or FUNCTION:NTH, counted from 1"));
                    }
                    let code = if key == "unknown-code" { UNKNOWN_CODE } else { 700 };
                    let (function, calls_left) = (function.to_owned(), AtomicU64::new(nth));
                    variants.injections.push(Injection { function, calls_left, code });
                }
                _ => match if is_cuda { None } else { variants.hip.set(key, value) } {
                    Some(set) => set.map_err(expected)?,
                    None => {
                        let (variable, own) = match vendor {
                            Vendor::Cuda => (vendor.variable(), "driver-version, library"),
                            Vendor::Hip => {
                                (vendor.variable(), "version, hipblas, arch, kernels, registered-address, serial")
                            }
                        };
                        return Err(format!(
                            "`{key}` is no key of {variable}, expected {own}, devices, unknown-code or lose-context"
                        ));
                    }
                },
            }
        }
        Ok(variants)
    }

    /// Returns the code prescribed for this call of a function, if any.
    pub(crate) fn due(&self, function: &str) -> Option<u32> {
        let injection = self.injections.iter().find(|injection| injection.function == function)?;
        // Relaxed: the countdown orders nothing.
        let left = injection.calls_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        (left == Ok(1)).then_some(injection.code)
    }
}

static IS_HIP: AtomicBool = AtomicBool::new(false);
static VARIANTS: OnceLock<Result<Variants, String>> = OnceLock::new();

/// Makes the engine follow AMD's rules. The library must call this first.
#[inline]
pub fn follow_hip() {
    // Relaxed: it is set before a thread's first call and never reset.
    if !IS_HIP.load(Ordering::Relaxed) {
        IS_HIP.store(true, Ordering::Relaxed);
    }
}

/// Returns the vendor whose rules the engine follows.
#[inline]
#[must_use]
pub fn vendor() -> Vendor {
    if IS_HIP.load(Ordering::Relaxed) { Vendor::Hip } else { Vendor::Cuda }
}

/// Returns the settings of the environment.
///
/// # Errors
/// 1, with a message on standard error, if they cannot be parsed.
pub fn variants() -> Answer<&'static Variants> {
    let variants = VARIANTS.get_or_init(|| {
        let vendor = vendor();
        let (library, variable) = (vendor.library(), vendor.variable());
        let text = std::env::var(variable).unwrap_or_default();
        Variants::parse(vendor, &text).inspect_err(|error| eprintln!("{library}: in {variable}, {error}"))
    });
    variants.as_ref().map_err(|_| Code::INVALID_VALUE)
}

/// Returns the major version of HIP whose rules apply.
pub(crate) fn hip_major() -> i32 {
    variants().map_or(7, |variants| variants.hip.version.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_is_read_and_a_typo_says_what_was_expected() {
        let parse = |text| Variants::parse(Vendor::Cuda, text);
        let variants = parse("driver-version=12020, unknown-code=cuStreamQuery,lose-context=cuMemAlloc_v2:2,").unwrap();
        assert_eq!(variants.driver_version, 12020);
        assert_eq!(variants.due("cuStreamQuery"), Some(921));
        assert_eq!(variants.due("cuStreamQuery"), None);
        assert_eq!((variants.due("cuMemAlloc_v2"), variants.due("cuMemAlloc_v2")), (None, Some(700)));
        assert_eq!(variants.due("cuInit"), None);
        assert!(parse("devices=none").unwrap().no_device && parse("library=stub").unwrap().stub);
        for (text, part) in [
            ("driver-version=new", "a number"),
            ("devices=3", "HIGHWATER_MOCK"),
            ("library=real", "`stub`"),
            ("unknown-code=cuInit:0", "counted from 1"),
            ("unknown-code=x", "FUNCTION"),
            ("colour=red", "driver-version"),
            ("version=6.4", "no key of HIGHWATER_SIMULATED_CUDA"),
            ("devices", "no `=`"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(part), "`{part}` is missing in `{error}`");
        }
    }

    #[test]
    fn every_key_of_hip_is_read() {
        let parse = |text| Variants::parse(Vendor::Hip, text);
        let hip = parse("").unwrap().hip;
        assert_eq!((hip.version, hip.hipblas(), hip.runtime_version()), ((7, 2), 3, 70_253_211));
        assert!(hip.has_kernels && hip.moves_registered && hip.arch.starts_with("gfx942:"));
        let variants = parse(
            "version=6.4,arch=gfx90a:sramecc+:xnack-,kernels=none,registered-address=same,unknown-code=hipSetDevice",
        );
        let variants = variants.unwrap();
        assert_eq!(variants.due("hipSetDevice"), Some(921));
        let hip = variants.hip;
        assert_eq!((hip.version, hip.hipblas(), hip.runtime_version()), ((6, 4), 2, 60_443_484));
        assert!(!hip.has_kernels && !hip.moves_registered && hip.arch == "gfx90a:sramecc+:xnack-");
        assert_eq!(parse("hipblas=2").unwrap().hip.hipblas(), 2);
        for (text, part) in [
            ("version=7", "MAJOR.MINOR"),
            ("version=4.5", "from 5.0 on"),
            ("hipblas=1", "`2` or `3`"),
            ("arch=sm_90", "gfx942"),
            ("kernels=all", "`none`"),
            ("registered-address=any", "`other`"),
            ("unknown-code=cuInit", "FUNCTION"),
            ("driver-version=13000", "registered-address"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(part), "`{part}` is missing in `{error}`");
        }
    }
}
