//! [`Done`]: the end of device work, for `asyncio` and `poll`. Waits with a time: [`limit`], [`wait_for`].

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use highwater::{Error, ErrorKind};
use pyo3::prelude::*;

use crate::detached::Detached;
use crate::error::{invalid, raised};

/// The time between two looks at signals, such as that of Ctrl-C.
const SLICE: Duration = Duration::from_millis(50);

/// Returns the limit of a wait from seconds. `None`, infinity and more than the clock holds are no limit.
pub(crate) fn limit(operation: &'static str, timeout: Option<f64>) -> PyResult<Option<Duration>> {
    match timeout {
        Some(seconds) if seconds.is_nan() || seconds < 0.0 => {
            let message = format!("the timeout is {seconds:?}, expected seconds of at least 0, or None");
            Err(invalid(operation, message, "pass None to wait without a limit"))
        }
        // An error is a time above the range.
        seconds => Ok(seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())),
    }
}

/// Waits by `wait` until it returns true or the limit has passed, and returns which. Raises what the handlers of signals raise.
pub(crate) fn wait_for(
    py: Python<'_>,
    limit: Option<Duration>,
    wait: impl Fn(Duration) -> Result<bool, Error> + Send + Sync,
) -> PyResult<bool> {
    let end = limit.and_then(|limit| Instant::now().checked_add(limit));
    loop {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        let slice = left.map_or(SLICE, |left| left.min(SLICE));
        if py.detach(|| wait(slice)).map_err(raised)? {
            return Ok(true);
        }
        py.check_signals()?;
        if left.is_some_and(|left| left <= SLICE) {
            return Ok(false);
        }
    }
}

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

    fn __repr__(&self, py: Python<'_>) -> &'static str {
        if self.is_over(py) { "<highwater.Done, over>" } else { "<highwater.Done, not over>" }
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("highwater._waits")?.call_method1("until_over", (slf,))?.call_method0("__await__")
    }
}
