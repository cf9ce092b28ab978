//! Opening a library registers the process for the barrier. The only test of its process, so nothing else has registered it.

use highwater_driver::Library;

/// Returns whether the process may use the barrier: it has registered, and the system has the call.
fn has_barrier(command: libc::membarrier_cmd) -> bool {
    // SAFETY: The call takes numbers and touches no memory of the caller.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

#[test]
fn the_process_registers_before_a_library_is_loaded() {
    assert!(!has_barrier(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED));
    // SAFETY: There is no such library.
    drop(unsafe { Library::open("libhighwater-no-such.so.1") }.unwrap_err());
    let registered = has_barrier(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED);
    // A sandbox may forbid the call.
    assert_eq!(registered, has_barrier(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED));
}
