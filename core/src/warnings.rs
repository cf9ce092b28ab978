//! The warnings of core, which are counted as they are given.

use std::sync::atomic::{AtomicU64, Ordering};

/// Warnings of this process so far. Not of one runtime: some places that warn know none.
static GIVEN: AtomicU64 = AtomicU64::new(0);

/// Counts a warning.
pub(crate) fn count() {
    // Relaxed: a counter that orders nothing.
    GIVEN.fetch_add(1, Ordering::Relaxed);
}

/// Returns the number of warnings so far.
pub(crate) fn given() -> u64 {
    GIVEN.load(Ordering::Relaxed)
}

/// As `tracing::warn!`, and counts.
macro_rules! warning {
    ($($arguments:tt)*) => {{
        $crate::warnings::count();
        tracing::warn!($($arguments)*)
    }};
}
pub(crate) use warning;

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::given;

    fn sources(folder: &Path, found: &mut Vec<(String, String)>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                sources(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push((path.display().to_string(), std::fs::read_to_string(&path).unwrap()));
            }
        }
    }

    #[test]
    fn every_warning_of_core_is_counted() {
        let mut found = Vec::new();
        sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut found);
        // Spelled in two parts, so that this file has one place.
        let plain = concat!("tracing::", "warn!");
        let places = found.iter().flat_map(|(path, text)| text.matches(plain).map(move |_| path));
        let places: Vec<_> = places.filter(|path| !path.ends_with("src/warnings.rs")).collect();
        assert!(places.is_empty(), "write `warning!` of `crate::warnings` instead, which counts: {places:?}");
        let before = given();
        super::warning!("a warning of a test, number {}", 1);
        assert!(given() > before);
    }
}
