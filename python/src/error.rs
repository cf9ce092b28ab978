//! Errors of the library as exceptions of the package.

use highwater::{Error, ErrorKind, OpenError};
use pyo3::prelude::*;

/// Returns the exception of an error: the subclass of `highwater.Error` that has the name of its kind.
pub(crate) fn raised(error: Error) -> PyErr {
    Python::attach(|py| {
        let make = || {
            let kind = format!("{:?}", error.kind());
            let arguments =
                (kind, error.operation(), error.message(), error.code(), error.hint(), error.is_temporary());
            py.import("highwater._errors")?.getattr("make")?.call1(arguments)
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
