//! Opening a vendor's library at run time, with an account of everything that was tried.

use std::path::PathBuf;

use crate::error::{Error, ErrorKind, Result};

/// A library that was opened. It is never closed: callbacks, exit handlers and threads of a driver outlive every user.
#[derive(Debug, Clone, Copy)]
pub struct Library {
    library: &'static libloading::Library,
    name: &'static str,
}

/// A name that was tried, and what the loader said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenFailure {
    /// The name or path given to the loader.
    pub name: String,
    /// The loader's own words.
    pub reason: String,
}

/// Opens the first of `names` that can be opened. Where the environment variable `path_variable` is set, its value is the
/// only name tried.
///
/// # Errors
/// `LibraryMissing`, with every name tried and the loader's words for each, and the failures as data.
pub fn open_library(
    operation: &'static str,
    path_variable: &'static str,
    names: &[&'static str],
) -> Result<Library, (Error, Vec<OpenFailure>)> {
    let given = std::env::var_os(path_variable).filter(|value| !value.is_empty()).map(PathBuf::from);
    let candidates: Vec<PathBuf> = match &given {
        Some(path) => vec![path.clone()],
        None => names.iter().map(PathBuf::from).collect(),
    };
    let mut failures = Vec::new();
    for candidate in &candidates {
        // SAFETY: opening a library runs its constructors. The names are a vendor's driver libraries (or a file that the
        // user named), whose constructors are made to be run by any process that opens them.
        match unsafe { libloading::Library::new(candidate) } {
            Ok(library) => {
                let name = candidate.display().to_string();
                // Leaked on purpose, once per library: a driver cannot be unloaded safely.
                let library: &'static libloading::Library = Box::leak(Box::new(library));
                return Ok(Library { library, name: Box::leak(name.into_boxed_str()) });
            }
            Err(error) => {
                failures.push(OpenFailure { name: candidate.display().to_string(), reason: loader_words(&error) });
            }
        }
    }
    let tried: Vec<String> = failures.iter().map(|f| format!("{} ({})", f.name, f.reason)).collect();
    let hint = match given {
        Some(_) => format!("{path_variable} is set: correct it, or unset it to search the usual names"),
        None => format!("install the vendor's driver, or set {path_variable} to the full path of the library"),
    };
    let message = format!("none of the vendor's libraries could be opened; tried {}", tried.join(", "));
    Err((Error::new(ErrorKind::LibraryMissing, operation, message).with_hint(hint), failures))
}

/// The loader's own text: the outer error only says that the call failed.
fn loader_words(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

impl Library {
    /// The name or path under which the library was opened.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Whether the library has a symbol of that name.
    #[must_use]
    pub fn has_symbol(&self, name: &str) -> bool {
        // SAFETY: the symbol is only looked up; nothing is called or read through it.
        unsafe { self.library.get::<*const ()>(name.as_bytes()) }.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_VARIABLE: &str = "HIGHWATER_TEST_NO_SUCH_VARIABLE";

    #[test]
    fn a_missing_library_lists_every_name_with_the_loaders_words() {
        let (error, failures) =
            open_library("open", NO_VARIABLE, &["libhighwater-no-such.so.1", "libhighwater-no-such.so"]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::LibraryMissing);
        assert_eq!(failures.len(), 2);
        for failure in &failures {
            assert!(error.message().contains(&failure.name), "{error}");
            assert!(failure.reason.contains("cannot open shared object file"), "{failure:?}");
        }
        assert!(error.hint().contains(NO_VARIABLE));
    }

    #[test]
    fn the_first_name_that_opens_is_taken() {
        let library = open_library("open", NO_VARIABLE, &["libhighwater-no-such.so.1", "libc.so.6"]).unwrap();
        assert_eq!(library.name(), "libc.so.6");
        assert!(library.has_symbol("malloc") && !library.has_symbol("highwater_no_such_symbol"));
    }
}
