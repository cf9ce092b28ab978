//! Notices that the process has begun to exit.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

static EXITING: AtomicBool = AtomicBool::new(false);

extern "C" fn set_exiting() {
    EXITING.store(true, Ordering::Release);
}

/// Registers the handler, once per process. It has to be called right after the vendor's initialisation: handlers run in
/// the reverse order, so this one runs before the vendor's own.
pub fn watch_exit() {
    static REGISTER: Once = Once::new();
    REGISTER.call_once(|| {
        // SAFETY: the handler is an `extern "C"` function without arguments that only stores to a static atomic, and the
        // code that holds it is never unloaded (plugins are loaded once and for good).
        if unsafe { libc::atexit(set_exiting) } != 0 {
            tracing::warn!("atexit has no room for the driver's handler; exit will go unnoticed");
        }
    });
}

/// Whether the process has begun to exit.
#[inline]
pub(super) fn has_begun() -> bool {
    EXITING.load(Ordering::Acquire)
}
