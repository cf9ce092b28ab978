//! Detection of a program with more rights than its caller.

/// Returns true if the system started this program with more rights than its caller has (`AT_SECURE`): by set-user-ID,
/// set-group-ID, or capabilities of its file. Such a program must not let its environment choose files and code.
///
/// ```
/// assert!(!highwater_hal::secure_execution());
/// ```
#[must_use]
pub fn secure_execution() -> bool {
    // SAFETY: the call reads a value that the kernel set at the start of the process, and takes no pointer.
    let secure = unsafe { libc::getauxval(libc::AT_SECURE) };
    secure != 0
}
