//! A vendor's driver, initialised once for each library file and kept to the end of the process.

use std::path::PathBuf;
use std::sync::OnceLock;

use parking_lot::Mutex;

use super::search::{Found, LibraryName, Search, VendorLibrary};
use highwater_hal::{Error, ErrorKind, Result, fork::Generation};

/// The drivers of one vendor that were initialised.
#[derive(Debug)]
pub struct DriverCache<D: 'static> {
    /// The process that was the first to initialise one. A child of its has none, and cannot make one.
    first: OnceLock<Generation>,
    /// One for each file that was opened.
    open: Mutex<Vec<(String, &'static D)>>,
}

impl<D> DriverCache<D> {
    /// None yet.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "one for each vendor, in a static")]
    pub const fn new() -> Self {
        Self { first: OnceLock::new(), open: Mutex::new(Vec::new()) }
    }

    /// The driver that the search finds, initialised by `initialise` unless it was before.
    ///
    /// # Errors
    /// `Forked` in a child of the process that initialised one, before any lock; as [`Search::open`]; what `initialise` gives.
    ///
    /// # Safety
    /// As [`Search::open`], for the path that `paths` gives for the library's variable.
    pub unsafe fn open(
        &self,
        search: &mut Search,
        library: &VendorLibrary,
        paths: &dyn Fn(&str) -> Option<PathBuf>,
        accepts: impl Fn(&LibraryName) -> bool,
        initialize: impl FnOnce(&Found) -> Result<D>,
    ) -> Result<&'static D> {
        if self.first.get().is_some_and(|generation| !generation.is_current()) {
            return Err(Generation::error("open"));
        }
        // SAFETY: passed on from the caller.
        let found = unsafe { search.open(library, paths(library.path_variable).as_deref(), accepts) }?;
        let known = |name: &str| self.open.lock().iter().find(|(opened, _)| opened == name).map(|(_, driver)| *driver);
        if let Some(driver) = known(found.library.name()) {
            return Ok(driver);
        }
        // Before it is, so that a child of any time after is told.
        self.first.get_or_init(Generation::current);
        let driver = initialize(&found)?;
        let mut open = self.open.lock();
        // Two threads may both have initialised it, which drivers allow.
        if let Some((_, driver)) = open.iter().find(|(opened, _)| opened == found.library.name()) {
            return Ok(driver);
        }
        let driver: &'static D = Box::leak(Box::new(driver));
        open.push((found.library.name().to_owned(), driver));
        Ok(driver)
    }
}

impl Found {
    /// The error of a library that lacks symbols, `hint` saying where one comes from that has them.
    #[cold]
    #[must_use]
    pub fn lacks(&self, missing: &[String], hint: &str) -> Error {
        let message = format!("{} lacks {}", self.library.name(), missing.join(", "));
        Error::new(ErrorKind::SymbolMissing, "open", message).with_hint(hint)
    }

    /// Both of two tables, or the error that lists every symbol that is missing in either.
    ///
    /// # Errors
    /// `SymbolMissing`.
    pub fn both<A, B>(&self, one: Result<A, Vec<String>>, other: Result<B, Vec<String>>, hint: &str) -> Result<(A, B)> {
        match (one, other) {
            (Ok(one), Ok(other)) => Ok((one, other)),
            (one, other) => {
                let missing: Vec<String> = [one.err(), other.err()].into_iter().flatten().flatten().collect();
                Err(self.lacks(&missing, hint))
            }
        }
    }
}
