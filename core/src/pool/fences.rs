//! The two sides of an asymmetric fence: one side runs often and pays nothing, the other runs rarely and pays for both.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering, compiler_fence, fence};
use std::time::Duration;

/// `MEMBARRIER_CMD_PRIVATE_EXPEDITED`: executes a barrier on every running thread of the process.
const BARRIER: libc::c_int = 1 << 3;
/// `MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED`: must precede the first barrier.
const REGISTER: libc::c_int = 1 << 4;

/// True if the frequent side is a compiler fence. Set before the first lock exists (see [`prepare_fences`]).
static IS_LIGHT: AtomicBool = AtomicBool::new(false);

fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: The command has no pointers and changes no memory.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

/// Chooses the kind of fence. Each thread calls it before it creates a lock. In a process with several threads, the first
/// registration takes 10 to 20 ms, so a program without page-locked memory does not make it. The backends of `highwater-driver`
/// register before they load a driver, and later registrations of the process return at once.
pub(crate) fn prepare_fences() {
    static CHOSEN: Once = Once::new();
    CHOSEN.call_once(|| {
        if membarrier(REGISTER) {
            IS_LIGHT.store(true, Ordering::SeqCst);
        }
    });
}

/// The frequent side.
#[inline]
pub(crate) fn light_fence() {
    if IS_LIGHT.load(Ordering::Relaxed) {
        compiler_fence(Ordering::SeqCst);
    } else {
        fence(Ordering::SeqCst);
    }
}

/// The rare side: every store of another thread before its light fence is visible afterward, or the other thread sees this
/// thread's stores.
pub(crate) fn heavy_fence() {
    // A child has to register again.
    if IS_LIGHT.load(Ordering::Relaxed) && !membarrier(BARRIER) && !(membarrier(REGISTER) && membarrier(BARRIER)) {
        // A filter of system calls was installed meanwhile. From here on every light fence is a full one. Those before it have
        // taken effect once the processors have written back their stores, which takes far less than this time.
        IS_LIGHT.store(false, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(10));
    }
    fence(Ordering::SeqCst);
}

/// Waits for a thread that needs a few nanoseconds, unless the system has suspended it.
pub(crate) fn wait_a_moment() {
    std::thread::yield_now();
}
