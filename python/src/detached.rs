//! [`Detached`]: an object whose end does not hold the interpreter's lock.

use std::mem::ManuallyDrop;
use std::ops::Deref;

use pyo3::Python;

/// Runs `work` without the interpreter's lock, whether or not this thread holds it.
pub(crate) fn detached<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    let mut work = Some(work);
    // `None` while the interpreter ends. No other thread waits for its lock then.
    let done = Python::try_attach(|py| work.take().map(|work| py.detach(work))).flatten();
    match (done, work) {
        (Some(done), _) => done,
        (None, Some(work)) => work(),
        (None, None) => unreachable!("the work was taken and its result returned"),
    }
}

/// A value that is dropped without the interpreter's lock. The last object of a runtime ends it, which waits for the devices.
pub(crate) struct Detached<T: Send>(ManuallyDrop<T>);

impl<T: Send> Detached<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(ManuallyDrop::new(value))
    }
}

impl<T: Send> Deref for Detached<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Send> Drop for Detached<T> {
    fn drop(&mut self) {
        // SAFETY: The value is not used afterward.
        let value = unsafe { ManuallyDrop::take(&mut self.0) };
        detached(move || drop(value));
    }
}
