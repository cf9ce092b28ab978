//! Detection of the exit of the process, so that no call reaches a driver that is shutting down.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::{Error, ErrorKind};

static EXITING: AtomicBool = AtomicBool::new(false);

extern "C" fn set_exiting() {
    EXITING.store(true, Ordering::Release);
}

/// Registers a handler of the exit. Handlers run in the reverse order of their registration. A backend calls this once for
/// each vendor library, right after its initialization, so that the handler runs before the vendor's own.
pub fn watch() {
    // SAFETY: the handler is an `extern "C"` function without arguments that only stores to a static atomic, and the code that
    // holds it is never unloaded (plugins are loaded once and for good).
    if unsafe { libc::atexit(set_exiting) } != 0 {
        tracing::warn!("atexit has no room for a handler; the exit of the process may go unnoticed");
    }
}

/// Returns true once the process has begun to exit.
#[must_use]
#[inline]
pub fn has_begun() -> bool {
    EXITING.load(Ordering::Acquire)
}

/// Returns the error of a call that comes after the process has begun to exit.
#[cold]
#[must_use]
pub fn error(operation: &'static str) -> Error {
    Error::new(ErrorKind::ShuttingDown, operation, "the process has begun to exit")
        .with_hint("join threads that use the device before `main` returns")
}
