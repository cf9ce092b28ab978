//! Whether this process has more rights than who started it.

/// Whether the system started this program with more rights than its caller has: set-user-ID, set-group-ID or capabilities of its
/// file (`AT_SECURE`). Such a program must not follow its environment to files and code.
///
/// ```
/// assert!(!highwater_hal::secure_execution());
/// ```
#[must_use]
pub fn secure_execution() -> bool {
    // SAFETY: it reads a value that the kernel gave the process when it started, and takes no pointer.
    let secure = unsafe { libc::getauxval(libc::AT_SECURE) };
    secure != 0
}
