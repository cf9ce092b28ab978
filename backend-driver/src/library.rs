//! Opening one shared library at run time, and what the loader says where it cannot.

use std::ffi::OsStr;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use highwater_hal::OpenFailure;

/// A library that was opened. It is never closed: callbacks, exit handlers and threads of a driver outlive every user.
#[derive(Debug, Clone)]
pub struct Library {
    library: Arc<ManuallyDrop<libloading::Library>>,
    name: String,
}

impl Library {
    /// Opens the library `name`, searched for by the loader's rules, or taken as a path where it holds a `/`.
    ///
    /// # Errors
    /// What the loader said.
    ///
    /// # Safety
    /// Opening a library runs its constructors, and those of everything that it depends on: they are fit to be run by
    /// this process, now.
    pub unsafe fn open(name: impl AsRef<OsStr>) -> Result<Self, OpenFailure> {
        let name = name.as_ref();
        // SAFETY: the caller vouches for the library's constructors.
        match unsafe { libloading::Library::new(name) } {
            Ok(library) => Ok(Self { library: Arc::new(ManuallyDrop::new(library)), name: name.display().to_string() }),
            Err(error) => {
                // The outer error only says that the call failed; the loader's text is its source.
                let reason = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
                Err(OpenFailure::new(name.display().to_string(), reason))
            }
        }
    }

    /// The name or path under which the library was opened.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether the library has a symbol of that name.
    #[must_use]
    pub fn has_symbol(&self, name: &str) -> bool {
        self.symbol(name).is_some()
    }

    /// The address of a symbol, which stays valid for the life of the process.
    #[must_use]
    pub fn symbol(&self, name: &str) -> Option<*const ()> {
        // SAFETY: the symbol is only looked up; nothing is called or read through it.
        let found = unsafe { self.library.get::<*const ()>(name.as_bytes()) }.ok()?;
        // The symbol's address, not what lies there.
        (!found.is_null()).then_some(*found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_opens_knows_its_name_and_its_symbols() {
        // SAFETY: the C library is part of this process already.
        let library = unsafe { Library::open("libc.so.6") }.unwrap();
        assert_eq!(library.name(), "libc.so.6");
        assert!(library.has_symbol("malloc") && !library.has_symbol("highwater_no_such_symbol"));
    }

    #[test]
    fn a_failure_carries_the_loaders_words_and_names_the_library_once() {
        // SAFETY: there is no such library.
        let failure = unsafe { Library::open("libhighwater-no-such.so.1") }.unwrap_err();
        assert!(failure.reason.contains("cannot open shared object file"), "{failure:?}");
        assert_eq!(failure.to_string().matches("libhighwater-no-such.so.1").count(), 1, "{failure}");
        let other = OpenFailure::new("a.so".into(), "wrong class".into());
        assert_eq!(other.to_string(), "a.so: wrong class");
    }
}
