//! The limit on the size of a file (`RLIMIT_FSIZE`, `ulimit -f`), which counts for memory files too.
//!
//! The system kills a process that makes a file longer than its limit (`SIGXFSZ`), without a word. Code that makes a
//! memory file asks [`allows`] first. A program that writes files of its own calls [`refuse_instead_of_killing`].

use rustix::process::{Resource, getrlimit};

/// What helps where [`allows`] says no.
pub const HINT: &str =
    "raise the limit on the size of files (`ulimit -f`), or ask for less: memory files count as files";

/// Whether this process may make a file of `bytes`.
///
/// ```
/// assert!(highwater_core::file_limit::allows(0));
/// ```
#[must_use]
pub fn allows(bytes: u64) -> bool {
    getrlimit(Resource::Fsize).current.is_none_or(|most| bytes <= most)
}

/// From here on, a write beyond the limit fails with `EFBIG` and no longer ends the process. Programs that this one starts
/// inherit that. For `main`: a library must not change a program's signals.
pub fn refuse_instead_of_killing() {
    // SAFETY: ignoring a signal installs no code of ours; the call takes no pointer.
    let before = unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    // It fails for numbers that are no signal only.
    debug_assert_ne!(before, libc::SIG_ERR);
}
