//! What the simulated library is like: `HIGHWATER_SIMULATED_CUDA=key=value,...`.
//!
//! | key | value |
//! | --- | --- |
//! | `driver-version` | what `cuDriverGetVersion` gives, 13000 unless set |
//! | `devices` | `none`: `cuInit` answers 100 |
//! | `library` | `stub`: `cuInit` answers 34 |
//! | `unknown-code` | a function's name: its next call answers 921, which no header knows; with `NAME:NTH` the nth one |
//! | `lose-context` | a function's name, or `NAME:NTH`: that call answers 700, and the contexts of the process are lost |
//!
//! How many devices there are, how much memory they have, how slow they are and which calls of the mock fail is the
//! mock's own variable, `HIGHWATER_MOCK`.

use std::sync::atomic::{AtomicU64, Ordering};

/// The variable.
pub const VARIABLE: &str = "HIGHWATER_SIMULATED_CUDA";

/// A code that no header has.
pub const UNKNOWN_CODE: u32 = 921;

/// A call that answers something else than it would.
#[derive(Debug)]
struct Injection {
    function: String,
    calls_left: AtomicU64,
    code: u32,
}

/// What the variable says.
#[derive(Debug)]
pub struct Variants {
    /// What the driver says it is, for example 13000.
    pub driver_version: i32,
    /// Whether there is no device.
    pub no_device: bool,
    /// Whether the library is a stub.
    pub stub: bool,
    injections: Vec<Injection>,
}

impl Default for Variants {
    fn default() -> Self {
        Self { driver_version: 13000, no_device: false, stub: false, injections: Vec::new() }
    }
}

impl Variants {
    /// Reads the variable's text; the error says what was expected.
    ///
    /// # Errors
    /// A sentence about the first entry that cannot be read.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut variants = Self::default();
        for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
            let (key, value) =
                entry.split_once('=').ok_or_else(|| format!("`{entry}` has no `=`; write key=value,key=value"))?;
            let expected = |what: &str| format!("`{key}` has the value `{value}`, expected {what}");
            match key {
                "driver-version" => {
                    variants.driver_version = value.parse().map_err(|_| expected("a number such as 13000"))?;
                }
                "devices" if value == "none" => variants.no_device = true,
                "devices" => return Err(expected("`none`; their number is set by HIGHWATER_MOCK=devices=N")),
                "library" if value == "stub" => variants.stub = true,
                "library" => return Err(expected("`stub`")),
                "unknown-code" | "lose-context" => {
                    let (function, nth) = value.split_once(':').unwrap_or((value, "1"));
                    let nth: u64 = nth.parse().map_err(|_| expected("FUNCTION or FUNCTION:NTH"))?;
                    if nth == 0 || !function.starts_with("cu") {
                        return Err(expected("FUNCTION or FUNCTION:NTH, counted from 1"));
                    }
                    let code = if key == "unknown-code" { UNKNOWN_CODE } else { 700 };
                    let (function, calls_left) = (function.to_owned(), AtomicU64::new(nth));
                    variants.injections.push(Injection { function, calls_left, code });
                }
                _ => {
                    return Err(format!(
                        "`{key}` is no key of {VARIABLE}, expected driver-version, devices, library, unknown-code or \
                         lose-context"
                    ));
                }
            }
        }
        Ok(variants)
    }

    /// The code that this call of a function is to answer, if it was chosen.
    pub(crate) fn due(&self, function: &str) -> Option<u32> {
        let injection = self.injections.iter().find(|injection| injection.function == function)?;
        // Relaxed: a countdown, which orders nothing.
        let left = injection.calls_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        (left == Ok(1)).then_some(injection.code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_is_read_and_a_typo_says_what_was_expected() {
        let variants =
            Variants::parse("driver-version=12020, unknown-code=cuStreamQuery,lose-context=cuMemAlloc_v2:2,").unwrap();
        assert_eq!(variants.driver_version, 12020);
        assert_eq!(variants.due("cuStreamQuery"), Some(921));
        assert_eq!(variants.due("cuStreamQuery"), None);
        assert_eq!((variants.due("cuMemAlloc_v2"), variants.due("cuMemAlloc_v2")), (None, Some(700)));
        assert_eq!(variants.due("cuInit"), None);
        assert!(Variants::parse("devices=none").unwrap().no_device && Variants::parse("library=stub").unwrap().stub);
        for (text, part) in [
            ("driver-version=new", "a number"),
            ("devices=3", "HIGHWATER_MOCK"),
            ("library=real", "`stub`"),
            ("unknown-code=cuInit:0", "counted from 1"),
            ("unknown-code=x", "FUNCTION"),
            ("colour=red", "driver-version"),
            ("devices", "no `=`"),
        ] {
            let error = Variants::parse(text).unwrap_err();
            assert!(error.contains(part), "`{part}` is missing in `{error}`");
        }
    }
}
