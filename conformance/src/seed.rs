//! The seed from which cases draw shapes, values and cells.
//!
//! A run sets the seed of each round for the thread of the case. Outside of a run, a case draws from the environment variable, or
//! from the clock.

use std::cell::Cell;
use std::ffi::OsStr;
use std::time::{SystemTime, UNIX_EPOCH};

use highwater_hal::{Error, ErrorKind, Result, display_foreign};

use crate::case::{CaseResult, Failure};
use crate::random::Random;

/// The variable that holds the seed of an earlier run, so that this one draws the same.
const VARIABLE: &str = "HIGHWATER_CONFORMANCE_SEED";

thread_local! {
    static SEED: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Returns the seed of the next run: that of the environment variable `HIGHWATER_CONFORMANCE_SEED`, or one that differs from run to
/// run.
///
/// # Errors
/// `InvalidArgument` if the variable is not a number below 2^64.
pub fn seed() -> Result<u64> {
    if let Some(text) = std::env::var_os(VARIABLE) {
        return parsed(&text);
    }
    // With a clock before 1970, every run draws the same.
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(Random::new(since.as_nanos() as u64).next() & EXACT_IN_JSON)
}

/// Readers of JSON that have only 64-bit floats read these numbers exactly. Rounds add to the seed, so it is a little less than 2^53.
const EXACT_IN_JSON: u64 = (1 << 52) - 1;

fn parsed(text: &OsStr) -> Result<u64> {
    text.to_str().and_then(|text| text.parse().ok()).ok_or_else(|| {
        let message = format!("{VARIABLE} is `{}`, expected a number below 2^64", display_foreign(text));
        Error::new(ErrorKind::InvalidArgument, "seed", message).with_hint("unset the variable, or set a number")
    })
}

/// Runs a case that draws from this seed, in this thread.
pub(crate) fn during<T>(seed: Option<u64>, run: impl FnOnce() -> T) -> T {
    struct Restored(Option<u64>);
    impl Drop for Restored {
        fn drop(&mut self) {
            SEED.set(self.0);
        }
    }
    let _restored = Restored(SEED.replace(seed));
    run()
}

/// Proves something about values that are drawn from the seed of the run, which a failure names. Equal salts draw equal values.
pub(crate) fn with_seed(salt: u64, prove: impl FnOnce(&mut Random) -> CaseResult) -> CaseResult {
    let seed = match SEED.get() {
        Some(seed) => seed,
        None => seed().map_err(|error| Failure::new(error.to_string()))?,
    };
    prove(&mut Random::new(seed ^ salt))
        .map_err(|failure| failure.with_details(&format!("{VARIABLE}={seed} draws the same again")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_numbers_and_fit_json() {
        use std::os::unix::ffi::OsStrExt as _;
        assert_eq!(parsed(OsStr::new("18446744073709551615")).unwrap(), u64::MAX);
        for bad in [&b"x"[..], b"", b"-1", b"18446744073709551616", b"7\xff"] {
            let error = parsed(OsStr::from_bytes(bad)).unwrap_err().to_string();
            assert!(error.contains("expected a number below 2^64"), "{error}");
        }
        if std::env::var_os(VARIABLE).is_none() {
            assert!((0..100).all(|_| seed().unwrap() < 1 << 52));
        }
    }

    #[test]
    fn a_run_sets_what_its_cases_draw_and_a_failure_names_it() {
        let drawn = |seed| {
            let mut first = 0;
            let prove = |random: &mut Random| {
                first = random.next();
                Err(Failure::new("seen"))
            };
            let failure = during(Some(seed), || with_seed(3, prove)).unwrap_err().to_string();
            assert!(failure.contains(&format!("HIGHWATER_CONFORMANCE_SEED={seed} ")), "{failure}");
            first
        };
        assert_eq!(drawn(7), drawn(7));
        assert_ne!(drawn(7), drawn(8));
        assert_eq!(during(Some(1), || during(Some(2), || SEED.get())), Some(2));
        assert_eq!(SEED.get(), None);
    }
}
