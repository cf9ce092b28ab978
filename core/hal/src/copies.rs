//! A flag for other copies of the code in this process.
//!
//! A plugin has its own copy of every crate that it links, including the statics. One copy does not see the counts of the
//! other. The program sets the flag before it loads a plugin, and a plugin sets its own when it is entered.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

static PRESENT: AtomicBool = AtomicBool::new(false);

static LISTENERS: Mutex<Vec<fn()>> = Mutex::new(Vec::new());

/// Returns true if another copy may be in the process.
#[inline(always)]
pub fn are_present() -> bool {
    PRESENT.load(Ordering::Relaxed)
}

/// Notes that another copy may be in the process, and calls every listener once.
pub fn note() {
    if !PRESENT.swap(true, Ordering::Relaxed) {
        // A copy of the list, because a listener may wait for calls that register one.
        let listeners = LISTENERS.lock().clone();
        listeners.into_iter().for_each(|listener| listener());
    }
}

/// Registers a function that [`note`] calls. A listener that is registered later must ask [`are_present`] itself.
pub fn on_note(listener: fn()) {
    let mut listeners = LISTENERS.lock();
    if !listeners.iter().any(|known| std::ptr::fn_addr_eq(*known, listener)) {
        listeners.push(listener);
    }
}

/// Undoes [`note`], for tests.
#[doc(hidden)]
pub fn forget() {
    PRESENT.store(false, Ordering::Relaxed);
}
