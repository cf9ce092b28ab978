//! The synchronization types of this crate, so that model checkers can replace them.
//!
//! `tests/loom_hazards.rs` compiles `hazards.rs` with a module of the same shape over loom's types.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

pub(crate) use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering, fence};

pub(crate) use parking_lot::Mutex;

/// Whether [`heavy_fence`] makes every running thread of the process pass a barrier, so that [`store_and_fence`] needs
/// none.
static IS_ASYMMETRIC: AtomicBool = AtomicBool::new(false);

/// The time when the system first denied the barrier, after it had granted it.
static DENIED: OnceLock<Instant> = OnceLock::new();

/// The longest time that a store may be invisible to other processors. It is thousands of times the actual delay, and
/// several timer ticks.
const STORES_ARE_SEEN: Duration = Duration::from_millis(50);

/// Decides once how the two fences below work, and returns [`IS_ASYMMETRIC`].
pub(crate) fn prepare_fences() -> bool {
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    *REGISTERED.get_or_init(|| {
        let registered = membarrier(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED);
        IS_ASYMMETRIC.store(registered, Ordering::Relaxed);
        registered
    })
}

/// Linux 4.14 and newer have the call, but a sandbox may forbid it.
fn membarrier(command: libc::membarrier_cmd) -> bool {
    // SAFETY: The call takes numbers and touches no memory of the caller.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

/// The frequent side of a pair of fences. Stores `value`, and orders the store before everything that follows, as a
/// sequentially consistent fence would. The order holds for threads that call [`heavy_fence`].
///
/// While the other side makes this thread pass a barrier, only the compiler must be kept from reordering. Otherwise, on
/// x86, an exchange costs half as much as the `mfence` of a sequentially consistent fence. Every instruction with a
/// lock prefix is a full barrier there.
///
/// The choice between the two is read after the store: see [`heavy_fence`].
#[inline(always)]
pub(crate) fn store_and_fence(cell: &AtomicPtr<()>, value: *mut ()) {
    cell.store(value, Ordering::Relaxed);
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
    if IS_ASYMMETRIC.load(Ordering::Relaxed) {
        std::sync::atomic::compiler_fence(Ordering::SeqCst);
    } else if cfg!(target_arch = "x86_64") {
        cell.swap(value, Ordering::SeqCst);
        std::sync::atomic::compiler_fence(Ordering::SeqCst);
    } else {
        fence(Ordering::SeqCst);
    }
}

/// The rare side: a sequentially consistent fence, which pairs with every [`store_and_fence`].
///
/// *If the system denies the barrier after granting it*, as in a sandbox that begins after opening, [`store_and_fence`]
/// makes its own fence from then on. A thread that skipped the fence read the choice before it could see the change.
/// Its store precedes that read, so at worst it is still in the processor's store buffer. It leaves the buffer within
/// microseconds, at the latest when the thread is interrupted. So the first call waits much longer than that, and so
/// does every other call until that time is over. Threads that read the choice later make a fence.
pub(crate) fn heavy_fence() {
    fence(Ordering::SeqCst);
    // A thread that found the static set found it after this decision.
    if !prepare_fences() {
        return;
    }
    if IS_ASYMMETRIC.load(Ordering::Relaxed) && membarrier(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED) {
        return;
    }
    let mut is_first = false;
    let denied = DENIED.get_or_init(|| {
        is_first = true;
        IS_ASYMMETRIC.store(false, Ordering::SeqCst);
        Instant::now()
    });
    if is_first {
        tracing::warn!("the system denies `membarrier` after granting it; every call fences from now on");
    }
    let rest = STORES_ARE_SEEN.saturating_sub(denied.elapsed());
    if !rest.is_zero() {
        std::thread::sleep(rest);
    }
    fence(Ordering::SeqCst);
}
