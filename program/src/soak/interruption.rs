//! The signals that end the supervisor. It removes its directory first.

use std::sync::atomic::{AtomicBool, Ordering};

use highwater::ErrorKind;

use super::super::failure::{CANNOT, Failure};

static HAS_COME: AtomicBool = AtomicBool::new(false);

/// Makes [`check`] fail after SIGINT, SIGTERM or SIGHUP. The second signal ends this process at once.
///
/// If this process ignores one of them, as under `nohup`, all keep their effect. The next soak then removes the directory.
pub(super) fn catch() {
    let note = || {
        // Relaxed: a flag that orders nothing.
        if HAS_COME.swap(true, Ordering::Relaxed) {
            std::process::exit(CANNOT.into());
        }
    };
    if let Err(error) = ctrlc::try_set_handler(note) {
        tracing::debug!("the signals that end this process keep their effect: {error}");
    }
}

/// # Errors
/// After a signal that ends this process.
pub(super) fn check() -> Result<(), Failure> {
    if HAS_COME.load(Ordering::Relaxed) {
        return Err(Failure::new(ErrorKind::InvalidState, "a signal ended the soak", "run it again; nothing remains"));
    }
    Ok(())
}
