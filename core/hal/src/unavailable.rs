//! The answer of a backend that cannot be opened.

use std::fmt;

use crate::error::Error;
use crate::text::display_foreign;

/// A name that was tried, and what the loader said.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpenFailure {
    /// The name or path given to the loader.
    pub name: String,
    /// The loader's own words.
    pub reason: String,
}

impl OpenFailure {
    /// A name, with the loader's words.
    #[must_use]
    pub const fn new(name: String, reason: String) -> Self {
        Self { name, reason }
    }
}

impl fmt::Display for OpenFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The loader mostly begins with the name itself.
        let Self { name, reason } = self;
        if reason.starts_with(name) {
            let rest = &reason[name.len()..];
            write!(f, "{}{}", display_foreign(name), display_foreign(rest))
        } else {
            write!(f, "{}: {}", display_foreign(name), display_foreign(reason))
        }
    }
}

/// Why a vendor cannot be used, with an account of what was tried on the way.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{error}")]
#[non_exhaustive]
pub struct Unavailable {
    /// What was missing: `LibraryMissing`, `SymbolMissing`, `DeviceMissing`, or `Unsupported` where what was
    /// found is too old.
    pub error: Error,
    /// Every name that was tried and did not open, in the order of the attempts.
    pub tried: Vec<OpenFailure>,
    /// The libraries that did open, in the order of the attempts.
    pub opened: Vec<String>,
}

impl Unavailable {
    /// `error`, with the names that did not open and those that did.
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
    /// A backend that failed for a reason that has nothing to do with libraries.
    fn from(error: Error) -> Self {
        Self::new(error, Vec::new(), Vec::new())
    }
}
