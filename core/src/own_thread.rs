//! The threads that core starts for a runtime.

use std::cell::Cell;
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;

use highwater_hal::{Error, ErrorKind, Result, fork::Generation};

thread_local! {
    /// True in the threads that call closures and wakers of the program: the notifiers and the sharing threads of all runtimes.
    static CALLS_THE_PROGRAM: Cell<bool> = const { Cell::new(false) };
}

/// Records that this thread calls closures or wakers of the program.
pub(crate) fn become_caller() {
    CALLS_THE_PROGRAM.set(true);
}

/// Returns whether this thread calls closures or wakers of the program, which may end any runtime. It must not wait for the end of a
/// notifier, which may wait for this thread.
pub(crate) fn is_caller() -> bool {
    // The thread-local may be gone at the end of the thread.
    CALLS_THE_PROGRAM.try_with(Cell::get).unwrap_or(false)
}

/// Starts a thread.
///
/// # Errors
/// `OperatingSystem` for `operation`, with a hint that also names `instead`, the way to need no thread.
pub(crate) fn spawn(
    (name, operation, instead): (&str, &'static str, &str),
    work: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>> {
    thread::Builder::new().name(name.to_owned()).spawn(work).map_err(|error| {
        let message = format!("the operating system cannot create a thread: {error}");
        Error::new(ErrorKind::OperatingSystem, operation, message)
            .with_code(i64::from(error.raw_os_error().unwrap_or(0)))
            .with_hint(format!("raise the limit on threads (ulimit -u){instead}"))
    })
}

/// A thread that its runtime ends. A forked child has no such thread.
#[derive(Debug)]
pub(crate) struct OwnThread {
    generation: Generation,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl OwnThread {
    /// As [`spawn`].
    pub(crate) fn start(
        names: (&str, &'static str, &str),
        generation: Generation,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<Self> {
        Ok(Self { generation, thread: Mutex::new(Some(spawn(names, work)?)) })
    }

    /// Waits for the end of the thread if `waits`. The caller has signaled it to end.
    pub(crate) fn end(&self, waits: bool) {
        let Some(thread) = self.thread.lock().take().filter(|_| waits) else { return };
        let name = thread.thread().name().unwrap_or_default().to_owned();
        if crate::panics::has_panicked(thread) {
            crate::warnings::warning!("the thread `{name}` has panicked");
        }
    }
}

impl Drop for OwnThread {
    fn drop(&mut self) {
        if !self.generation.is_current() {
            // The thread does not exist in this child, so its handle must not be touched.
            std::mem::forget(self.thread.get_mut().take());
        }
    }
}
