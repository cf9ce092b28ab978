//! [`Runtime`]: core's runtime, with constructors that open a backend by name.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use highwater_hal::{Backend, LiveObjects, Result};

use crate::{Fallback, OpenError, Opened, RuntimeOptions, open, open_best};

/// A backend, its devices, and the pools of both. Cheap to clone; clones share everything.
///
/// ```
/// # #[cfg(feature = "mock")] {
/// use highwater::Runtime;
///
/// let runtime = Runtime::open("mock")?;
/// let device = runtime.device(0)?;
/// let stream = device.create_stream()?;
/// let values = stream.upload(&[1.0_f32, 2.0])?;
/// assert_eq!(stream.download(&values)?, [1.0, 2.0]);
///
/// drop((values, stream, device));
/// assert_eq!(runtime.close()?.total(), 0); // The backend holds no object any more.
/// # }
/// # Ok::<(), highwater::Error>(())
/// ```
///
/// The type adds constructors to the runtime of `highwater-core`, which knows no backend by name, and dereferences to
/// it. [`Device::runtime`](crate::Device::runtime) and its siblings return core's; `From` converts either way at no
/// cost.
///
/// # Fork
/// A child of `fork` cannot use the runtimes of its parent: their calls return `Forked`, and their destructors return at once.
/// Do not open a runtime in the child either; call `exec` first. If another thread of the parent was inside a lock at the fork, the
/// lock stays held in the child, so the opening may hang. CUDA does not work in a child of a process that has initialized it.
/// To end the child without `exec`, call `_exit`: `std::process::exit` may hang for the same reason.
#[derive(Clone)]
pub struct Runtime(highwater_core::Runtime);

impl Runtime {
    /// Opens the backend `name` and no other: see [`open`].
    ///
    /// To read why a backend was chosen, call [`open`] or [`OpenOptions::open`](crate::OpenOptions::open) and pass its
    /// backend to [`Runtime::new`].
    ///
    /// # Errors
    /// The errors of [`open`] and of [`Runtime::new`].
    pub fn open(name: &str) -> Result<Self, OpenError> {
        Self::over(open(name)?)
    }

    /// Opens the best real device that works on this machine: see [`open_best`].
    ///
    /// # Errors
    /// The errors of [`open_best`] and of [`Runtime::new`].
    pub fn open_best(fallback: Fallback) -> Result<Self, OpenError> {
        Self::over(open_best(fallback)?)
    }

    /// Creates a runtime over an open backend, with default options.
    ///
    /// # Errors
    /// The backend's error, if it cannot describe its devices.
    pub fn new(backend: Arc<dyn Backend>) -> Result<Self> {
        highwater_core::Runtime::new(backend).map(Self)
    }

    /// Creates a runtime over an open backend.
    ///
    /// # Errors
    /// The errors of [`Runtime::new`].
    pub fn with_options(backend: Arc<dyn Backend>, options: &RuntimeOptions) -> Result<Self> {
        highwater_core::Runtime::with_options(backend, options).map(Self)
    }

    /// Waits for the devices, frees everything, and returns what the backend still counts as live.
    ///
    /// # Errors
    /// The errors of [`highwater_core::Runtime::close`]: `InvalidState` while an object of the runtime is alive. That method
    /// describes what a refusal leaves.
    pub fn close(self) -> Result<LiveObjects> {
        self.0.close()
    }

    /// As [`Runtime::close`], and returns within `limit`. It first waits until the other objects of the runtime are dropped.
    ///
    /// # Errors
    /// The errors of [`highwater_core::Runtime::close_within`]: `InvalidState` with what is still held at the limit.
    pub fn close_within(self, limit: Duration) -> Result<LiveObjects> {
        self.0.close_within(limit)
    }

    fn over(Opened { backend, report }: Opened) -> Result<Self, OpenError> {
        Self::new(backend).map_err(|error| OpenError { error, report })
    }
}

impl Deref for Runtime {
    type Target = highwater_core::Runtime;

    fn deref(&self) -> &highwater_core::Runtime {
        &self.0
    }
}

impl From<highwater_core::Runtime> for Runtime {
    fn from(runtime: highwater_core::Runtime) -> Self {
        Self(runtime)
    }
}

impl From<Runtime> for highwater_core::Runtime {
    fn from(runtime: Runtime) -> Self {
        runtime.0
    }
}

impl fmt::Debug for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(all(test, feature = "mock"))]
mod tests {
    use highwater_hal::ErrorKind;

    use super::*;

    #[test]
    fn a_runtime_opens_by_name_and_closes() {
        let runtime = Runtime::open("mock").unwrap();
        assert_eq!(runtime.identity().name, "mock");
        let again = runtime.clone();
        assert_eq!(again.close().unwrap_err().kind(), ErrorKind::InvalidState);
        assert_eq!(runtime.close().unwrap().total(), 0);
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_report() {
        let error = Runtime::open("metal").unwrap_err();
        assert_eq!(error.error.kind(), ErrorKind::UnknownBackend);
        assert!(!error.report.candidates.is_empty());
    }

    #[test]
    fn the_runtime_of_a_device_converts_to_the_front_doors_and_back() {
        let device = Runtime::open("mock").unwrap().device(0).unwrap();
        let runtime = Runtime::from(device.runtime().clone());
        assert_eq!(format!("{runtime:?}"), format!("{:?}", device.runtime()));
        assert_eq!(highwater_core::Runtime::from(runtime).device_count(), device.runtime().device_count());
    }
}
