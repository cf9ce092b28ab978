//! The thread pointer, which tells threads apart in one instruction.
//!
//! In a shared library, each access to a thread-local variable is a call of the loader's `__tls_get_addr` (about 2 ns). Where a path
//! only asks whether it runs in a given thread, the comparison of thread pointers replaces that call.

/// Returns the thread pointer: an address that no other live thread has. A later thread may have it again. Null where it is not known.
#[inline(always)]
pub(crate) fn thread_pointer() -> *mut () {
    #[cfg(all(target_arch = "x86_64", target_os = "linux", not(miri)))]
    {
        let pointer: *mut ();
        // SAFETY: The ABI of x86-64 (ELF Handling For Thread-Local Storage, 3.4.6) keeps the thread pointer at address 0 of the segment
        // `fs`, in each thread. The instruction reads it, and changes neither memory, nor the stack, nor flags.
        unsafe {
            std::arch::asm!("mov {}, qword ptr fs:[0]", out(reg) pointer, options(readonly, nostack, preserves_flags))
        };
        pointer
    }
    #[cfg(all(target_arch = "aarch64", target_os = "linux", not(miri)))]
    {
        let pointer: *mut ();
        // SAFETY: The system keeps the thread pointer in this register, in each thread. The instruction reads the register alone.
        unsafe { std::arch::asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nomem, nostack, preserves_flags)) };
        pointer
    }
    #[cfg(not(all(any(target_arch = "x86_64", target_arch = "aarch64"), target_os = "linux", not(miri))))]
    std::ptr::null_mut()
}

#[cfg(test)]
mod tests {
    use super::thread_pointer;

    #[test]
    fn live_threads_have_pointers_of_their_own_which_stay_the_same() {
        let here = thread_pointer();
        assert!(!here.is_null());
        let (ready, all_ready) = (std::sync::Barrier::new(8), std::sync::Barrier::new(8));
        let mut addresses: Vec<usize> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| {
                        ready.wait();
                        let mine = thread_pointer();
                        // All threads are alive until each has read its pointer twice.
                        std::thread::yield_now();
                        assert_eq!(mine, thread_pointer());
                        all_ready.wait();
                        mine.addr()
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        addresses.push(here.addr());
        addresses.sort_unstable();
        addresses.dedup();
        assert_eq!(addresses.len(), 9);
        assert_eq!(here, thread_pointer());
    }
}
