//! Checks of the rules of the table that ordinary calls do not show, for tests of plugins.
//!
//! A program of this version does not depend on these rules. Its structs have the sizes that plugins know, and it reads no answer
//! after an error. A program of a later version may. So the conformance suite turns the checks on.

use std::sync::atomic::{AtomicBool, Ordering};

use super::raw::RawError;

static CHECKED: AtomicBool = AtomicBool::new(false);

/// Checks the rules of the table in every backend that is opened from now on, in this process.
///
/// Each call with a struct is first made with a longer struct, whose unknown bytes are not zero. The plugin must refuse it. The
/// call itself then has a longer struct whose unknown bytes are zero, and must work. An error must have a message, and leave the
/// answer untouched. A call that breaks a rule returns `Vendor`, and the message names the rule.
///
/// The checks make calls slower. They are for tests of plugins.
pub fn check_rules() {
    // Relaxed: a thread that opens a backend later was ordered after this call by other means, or by none.
    CHECKED.store(true, Ordering::Relaxed);
}

/// Returns whether the rules are checked.
#[inline]
pub(super) fn are_checked() -> bool {
    CHECKED.load(Ordering::Relaxed)
}

/// Returns the fault of the details of an error, if they have one.
pub(super) fn fault_of_error(raw: &RawError) -> Option<String> {
    if raw.message.read_cut().is_empty() {
        return Some("no message; expected are the fault and the expected value".to_owned());
    }
    match raw.has_vendor_code {
        0 | 1 => None,
        other => Some(format!("{other} for `has_vendor_code`; expected is 0 or 1")),
    }
}
