//! The error of a backend that cannot be opened.

use std::fmt;

use crate::error::Error;
use crate::text::display_foreign;

/// A name that the loader could not open.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpenFailure {
    /// The name or path given to the loader.
    pub name: String,
    /// The loader's message.
    pub reason: String,
}

impl OpenFailure {
    /// Returns a name with the loader's message.
    #[must_use]
    pub const fn new(name: String, reason: String) -> Self {
        Self { name, reason }
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for OpenFailure {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeStruct as _;
        let Self { name, reason } = self;
        let mut fields = serializer.serialize_struct("OpenFailure", 2)?;
        fields.serialize_field("name", name)?;
        fields.serialize_field("reason", reason)?;
        fields.end()
    }
}

impl fmt::Display for OpenFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Most messages of the loader begin with the name.
        let Self { name, reason } = self;
        if reason.starts_with(name) {
            let rest = &reason[name.len()..];
            write!(f, "{}{}", display_foreign(name), display_foreign(rest))
        } else {
            write!(f, "{}: {}", display_foreign(name), display_foreign(reason))
        }
    }
}

/// The reason why a vendor's backend does not open, with the libraries that it tried.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{error}")]
#[non_exhaustive]
pub struct Unavailable {
    /// The error: `LibraryMissing`, `SymbolMissing`, `DeviceMissing`, or `Unsupported` for a library that is too old.
    pub error: Error,
    /// Every name that did not open, in the order of the attempts.
    pub tried: Vec<OpenFailure>,
    /// The libraries that did open, in the order of the attempts.
    pub opened: Vec<String>,
}

impl Unavailable {
    /// Returns `error` with the names that did not open and the libraries that did.
    #[must_use]
    pub const fn new(error: Error, tried: Vec<OpenFailure>, opened: Vec<String>) -> Self {
        Self { error, tried, opened }
    }
}

impl From<Unavailable> for Error {
    fn from(unavailable: Unavailable) -> Self {
        unavailable.error
    }
}

impl From<Error> for Unavailable {
    /// Converts an error that no library caused.
    fn from(error: Error) -> Self {
        Self::new(error, Vec::new(), Vec::new())
    }
}
