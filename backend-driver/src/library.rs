//! Opening a shared library at run time.

use std::ffi::OsStr;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use crate::primitive::prepare_fences;
use highwater_hal::OpenFailure;

/// An opened library. It is never closed, because callbacks, exit handlers and threads of a driver outlive every user.
#[derive(Debug, Clone)]
pub struct Library {
    library: Arc<ManuallyDrop<libloading::Library>>,
    name: String,
}

impl Library {
    /// Opens the library `name`. The loader searches for it, unless the name contains a `/`.
    ///
    /// # Errors
    /// The loader's reason.
    ///
    /// # Safety
    /// Opening a library runs its constructors and those of its dependencies. The caller must ensure that this process
    /// may run them.
    pub unsafe fn open(name: impl AsRef<OsStr>) -> Result<Self, OpenFailure> {
        // A driver starts threads. In a process with one thread the registration for the barrier takes no time; with several, about
        // 10 ms, for which the first calls of all threads would wait.
        prepare_fences();
        let name = name.as_ref();
        // SAFETY: The caller promises that the constructors may run.
        match unsafe { libloading::Library::new(name) } {
            Ok(library) => Ok(Self { library: Arc::new(ManuallyDrop::new(library)), name: name.display().to_string() }),
            Err(error) => {
                // The outer error only reports that the call failed. Its source is the loader's text.
                let reason = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
                Err(OpenFailure::new(name.display().to_string(), reason))
            }
        }
    }

    /// Returns the name or path under which the library was opened.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns whether the library has a symbol.
    #[must_use]
    pub fn has_symbol(&self, name: &str) -> bool {
        self.symbol(name).is_some()
    }

    /// Returns the address of a symbol. It is valid until the process ends.
    #[must_use]
    pub fn symbol(&self, name: &str) -> Option<*const ()> {
        // SAFETY: The symbol is only looked up. Nothing is called or read through it.
        let found = unsafe { self.library.get::<*const ()>(name.as_bytes()) }.ok()?;
        // The symbol's address, not the data at it.
        (!found.is_null()).then_some(*found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_opens_knows_its_name_and_its_symbols() {
        // SAFETY: This process has loaded the C library already.
        let library = unsafe { Library::open("libc.so.6") }.unwrap();
        assert_eq!(library.name(), "libc.so.6");
        assert!(library.has_symbol("malloc") && !library.has_symbol("highwater_no_such_symbol"));
    }

    #[test]
    fn a_failure_carries_the_loaders_words_and_names_the_library_once() {
        // SAFETY: There is no such library.
        let failure = unsafe { Library::open("libhighwater-no-such.so.1") }.unwrap_err();
        assert!(failure.reason.contains("cannot open shared object file"), "{failure:?}");
        assert_eq!(failure.to_string().matches("libhighwater-no-such.so.1").count(), 1, "{failure}");
        let other = OpenFailure::new("a.so".into(), "wrong class".into());
        assert_eq!(other.to_string(), "a.so: wrong class");
    }
}
