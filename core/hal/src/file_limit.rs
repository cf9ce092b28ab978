//! The limit on the size of a file (`RLIMIT_FSIZE`, `ulimit -f`), which applies to memory files too.
//!
//! The system silently kills a process that makes a file longer than its limit (`SIGXFSZ`). Code that makes a memory
//! file calls [`allows`] first. A program that writes files of its own calls [`refuse_instead_of_killing`].

use rustix::process::{Resource, getrlimit};

/// The hint for callers whose size [`allows`] rejects.
pub const HINT: &str =
    "raise the limit on the size of files (`ulimit -f`), or ask for less: memory files count as files";

/// Returns whether this process may make a file of `bytes`.
///
/// ```
/// assert!(highwater_hal::file_limit::allows(0));
/// ```
#[must_use]
pub fn allows(bytes: u64) -> bool {
    getrlimit(Resource::Fsize).current.is_none_or(|most| bytes <= most)
}

/// Makes every later write beyond the limit fail with `EFBIG` instead of ending the process. Child programs inherit
/// this. Call it from `main`: a library must not change a program's signals.
pub fn refuse_instead_of_killing() {
    // SAFETY: ignoring a signal installs no code of ours; the call takes no pointer.
    let before = unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    // It fails only for numbers that are no signal.
    debug_assert_ne!(before, libc::SIG_ERR);
}
