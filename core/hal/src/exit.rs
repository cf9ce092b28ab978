//! Notices that the process has begun to exit, so that nothing calls a driver that is going away.

use std::sync::atomic::{AtomicBool, Ordering};

static EXITING: AtomicBool = AtomicBool::new(false);

extern "C" fn set_exiting() {
    EXITING.store(true, Ordering::Release);
}

/// Has the exit noticed before the handlers that are registered already. A backend calls it once for each vendor library,
/// right after the library was initialised: handlers run in the reverse order, so this one runs before the vendor's own.
pub fn watch() {
    // SAFETY: the handler is an `extern "C"` function without arguments that only stores to a static atomic, and the code that
    // holds it is never unloaded (plugins are loaded once and for good).
    if unsafe { libc::atexit(set_exiting) } != 0 {
        tracing::warn!("atexit has no room for a handler; the exit of the process may go unnoticed");
    }
}

/// Whether the process has begun to exit.
#[must_use]
#[inline]
pub fn has_begun() -> bool {
    EXITING.load(Ordering::Acquire)
}
