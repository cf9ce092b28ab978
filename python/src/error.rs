//! Errors of the library as exceptions of the package.

use highwater::{Error, ErrorKind, OpenError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// `highwater._errors.make`. At the end of the interpreter, an import fails, and destructors still get exceptions.
static MAKE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// Loads what [`raised`] needs.
pub(crate) fn prepare(py: Python<'_>) -> PyResult<()> {
    MAKE.import(py, "highwater._errors", "make").map(drop)
}

/// Returns the exception of an error: the subclass of `highwater.Error` that has the name of its kind.
pub(crate) fn raised(error: Error) -> PyErr {
    Python::attach(|py| {
        let make = || {
            let kind = format!("{:?}", error.kind());
            let arguments =
                (kind, error.operation(), error.message(), error.code(), error.hint(), error.is_temporary());
            MAKE.import(py, "highwater._errors", "make")?.call1(arguments)
        };
        make().map_or_else(|failed| failed, PyErr::from_value)
    })
}

pub(crate) fn not_opened(error: OpenError) -> PyErr {
    raised(error.error)
}

/// Returns the exception for an argument that this package refuses itself.
pub(crate) fn invalid(operation: &'static str, message: impl Into<String>, hint: &str) -> PyErr {
    raised(Error::new(ErrorKind::InvalidArgument, operation, message).with_hint(hint))
}

pub(crate) fn unsupported(operation: &'static str, message: impl Into<String>, hint: &str) -> PyErr {
    raised(Error::new(ErrorKind::Unsupported, operation, message).with_hint(hint))
}
