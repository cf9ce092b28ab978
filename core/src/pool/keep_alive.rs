//! The object that keeps adopted memory allocated.

use std::fmt;

use parking_lot::Mutex;

/// The object that keeps foreign memory allocated. Only [`KeepAlive::end`] drops it; otherwise it is leaked.
pub(crate) struct KeepAlive(Mutex<Option<Box<dyn Send>>>);

impl KeepAlive {
    pub(crate) fn new(kept: impl Send + 'static) -> Self {
        Self(Mutex::new(Some(Box::new(kept))))
    }

    /// Drops the object, the first time.
    pub(crate) fn end(&self) {
        let kept = self.0.lock().take();
        // It may end in a thread that serves other processes too.
        if crate::panics::contain(|| drop(kept)).is_none() {
            crate::warnings::warning!("the object that kept adopted memory panicked when it was dropped");
        }
    }
}

impl Drop for KeepAlive {
    fn drop(&mut self) {
        std::mem::forget(self.0.get_mut().take());
    }
}

impl fmt::Debug for KeepAlive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeepAlive").finish_non_exhaustive()
    }
}
