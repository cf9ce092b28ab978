//! Drivers of a vendor, initialized once for each library file and kept until the process ends.

use std::path::PathBuf;
use std::sync::OnceLock;

use parking_lot::Mutex;

use super::search::{Found, LibraryName, Search, VendorLibrary};
use highwater_hal::{Error, ErrorKind, Result, fork::Generation};

/// The initialized drivers of one vendor.
#[derive(Debug)]
pub struct DriverCache<D: 'static> {
    /// The process that initialized the first driver. Its forked children cannot initialize one.
    first: OnceLock<Generation>,
    /// One driver for each opened file.
    open: Mutex<Vec<(String, &'static D)>>,
}

impl<D> DriverCache<D> {
    /// Creates an empty cache.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "one for each vendor, in a static")]
    pub const fn new() -> Self {
        Self { first: OnceLock::new(), open: Mutex::new(Vec::new()) }
    }

    /// Returns the driver that the search finds. `initialize` runs unless the cache holds that driver.
    ///
    /// # Errors
    /// `Forked` in a child of the process that initialized a driver, before any lock is taken. The errors of
    /// [`Search::open`] and of `initialize`.
    ///
    /// # Safety
    /// The same as for [`Search::open`], for the path that `paths` returns for the library's variable.
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
        // SAFETY: As the caller promises.
        let found = unsafe { search.open(library, paths(library.path_variable).as_deref(), accepts) }?;
        let known = |name: &str| self.open.lock().iter().find(|(opened, _)| opened == name).map(|(_, driver)| *driver);
        if let Some(driver) = known(found.library.name()) {
            return Ok(driver);
        }
        // Set before the driver is initialized, so that a child forked at any later time is refused.
        self.first.get_or_init(Generation::current);
        let driver = initialize(&found)?;
        let mut open = self.open.lock();
        // Two threads may both have initialized the driver, which vendors allow.
        if let Some((_, driver)) = open.iter().find(|(opened, _)| opened == found.library.name()) {
            return Ok(driver);
        }
        let driver: &'static D = Box::leak(Box::new(driver));
        open.push((found.library.name().to_owned(), driver));
        Ok(driver)
    }
}

impl Found {
    /// Returns the error of a library that lacks symbols.
    #[cold]
    #[must_use]
    pub fn lacks(&self, missing: &[String], hint: &str) -> Error {
        let message = format!("{} lacks {}", self.library.name(), missing.join(", "));
        Error::new(ErrorKind::SymbolMissing, "open", message).with_hint(hint)
    }

    /// Combines two tables.
    ///
    /// # Errors
    /// `SymbolMissing`, with all symbols that are missing in either table.
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
