//! [`Done`]: the end of device work, for `asyncio` and `poll`.

use std::os::fd::AsRawFd;

use highwater::{Error, ErrorKind};
use pyo3::prelude::*;

use crate::detached::Detached;
use crate::error::raised;

/// A wait for device work, which `Stream.done` and `Event.done` return. It blocks no thread.
///
/// `await done` returns once the work is done, and raises the error of failed work. Any number of tasks may await it. Elsewhere, its
/// `fileno` serves `select` and `poll`. Dropping it ends the wait, and the work goes on.
#[pyclass(frozen, module = "highwater")]
pub(crate) struct Done(Detached<highwater::DoneDescriptor>);

impl Done {
    pub(crate) fn new(py: Python<'_>, done: impl FnOnce() -> highwater::Done + Send) -> PyResult<Self> {
        py.detach(|| done().into_descriptor()).map(|made| Self(Detached::new(made))).map_err(raised)
    }
}

#[pymethods]
impl Done {
    /// Whether the wait is over. Does not wait.
    #[getter]
    fn is_over(&self, py: Python<'_>) -> bool {
        py.detach(|| self.0.outcome()).is_some()
    }

    /// Raises the error of failed work. Returns if the work succeeded. Raises `InvalidState` while the work runs.
    fn result(&self, py: Python<'_>) -> PyResult<()> {
        let running = || {
            let error = Error::new(ErrorKind::InvalidState, "result", "the work is not done");
            Err(error.with_hint("await the object, or wait until its descriptor is readable"))
        };
        py.detach(|| self.0.outcome()).unwrap_or_else(running).map_err(raised)
    }

    /// Returns the descriptor that becomes readable when the wait is over. The caller must not read or close it.
    fn fileno(&self) -> i32 {
        self.0.as_raw_fd()
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("highwater._waits")?.call_method1("until_over", (slf,))?.call_method0("__await__")
    }
}
