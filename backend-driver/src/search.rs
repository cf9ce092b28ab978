//! The libraries of a vendor as data, and the search for them.
//!
//! A vendor consists of a driver and of matrix libraries over it. Each library has one file name for each major
//! version, and a process that mixes major versions fails later and elsewhere. The search opens the libraries in order.
//! The first file with a known major version fixes the version of all later libraries.
//!
//! An environment variable can name the file of a library. That file is then the only one tried. If it cannot be used,
//! the search fails and tries no other file.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use highwater_hal::{OpenFailure, Unavailable};

use super::Library;
use highwater_hal::{Error, ErrorKind};

/// One library of a vendor.
#[derive(Debug, Clone, Copy)]
pub struct VendorLibrary {
    /// The library's name in messages: `the CUDA driver`.
    pub what: &'static str,
    /// The environment variable that names the file to open instead of `names`.
    pub path_variable: &'static str,
    /// The file names, most preferred first.
    pub names: &'static [LibraryName],
    /// The file names of refused versions. The search opens them only to report the version.
    pub too_old: &'static [LibraryName],
    /// The symbols that identify a usable version of the library.
    pub required_symbols: &'static [&'static str],
}

/// A file name of a library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LibraryName {
    /// The name for the loader: `libcublas.so.13`.
    pub file: &'static str,
    /// The major version of the vendor's software; `None` for a file that works with any.
    pub major: Option<u32>,
}

impl LibraryName {
    /// Returns the name of a file of the vendor's major version `major`.
    #[must_use]
    pub const fn of_major(file: &'static str, major: u32) -> Self {
        Self { file, major: Some(major) }
    }

    /// Returns the name of a file that works with any major version.
    #[must_use]
    pub const fn of_any(file: &'static str) -> Self {
        Self { file, major: None }
    }

    /// Returns whether `path` has this file name, perhaps with a longer version: `libcublas.so.13.1.0`.
    pub(super) fn names(&self, path: &Path) -> bool {
        path.file_name().and_then(OsStr::to_str).is_some_and(|name| {
            name.strip_prefix(self.file).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        })
    }
}

/// Returns the path in the environment variable `name`, if it is set and not empty.
#[must_use]
pub fn environment_path(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// The operation in the error of a failed search.
const OPERATION: &str = "open";

/// A search for a vendor's libraries.
#[derive(Debug, Default)]
pub struct Search {
    tried: Vec<OpenFailure>,
    opened: Vec<String>,
    /// The fixed major version, and the file that fixed it.
    settled: Option<(u32, String)>,
    /// Folders to search after the loader's own.
    folders: Vec<PathBuf>,
    /// The folder in which a library was found. Libraries that depend on it are searched there first.
    folder: Option<PathBuf>,
}

/// A library that the search opened.
#[derive(Debug, Clone)]
pub struct Found {
    /// The library.
    pub library: Library,
    /// The major version in the file's name, if any.
    pub major: Option<u32>,
}

impl Search {
    /// Creates a search that looks into `folders` after the loader's own.
    #[must_use]
    pub fn new(folders: Vec<PathBuf>) -> Self {
        Self { folders, ..Self::default() }
    }

    /// Ends the search with `error` and an account of the files tried.
    #[must_use]
    pub fn fails(self, error: Error) -> Unavailable {
        Unavailable::new(error, self.tried, self.opened)
    }

    /// Returns the opened files, in order.
    #[must_use]
    pub fn opened(&self) -> &[String] {
        &self.opened
    }

    /// Opens `library`. Tries only the file `given` if there is one. Otherwise tries the names that `accepts` selects
    /// and that have the fixed major version.
    ///
    /// # Errors
    /// - `LibraryMissing` if no file can be opened.
    /// - `SymbolMissing` if the opened file lacks a required symbol.
    /// - `Unsupported` if only a refused version is installed.
    /// - `InvalidArgument` if `given` has another major version than the libraries opened before.
    ///
    /// # Safety
    /// The caller must ensure that this process may run the constructors of all these libraries.
    pub unsafe fn open(
        &mut self,
        library: &VendorLibrary,
        given: Option<&Path>,
        accepts: impl Fn(&LibraryName) -> bool,
    ) -> Result<Found, Error> {
        // SAFETY: As the caller promises.
        let (opened, name) = unsafe {
            match given {
                Some(path) => self.open_given(library, path),
                None => self.open_known(library, accepts),
            }
        }?;
        let lacks: Vec<&str> =
            library.required_symbols.iter().copied().filter(|symbol| !opened.has_symbol(symbol)).collect();
        if !lacks.is_empty() {
            let message = format!("{} was opened as {} but lacks {}", opened.name(), library.what, lacks.join(", "));
            self.opened.push(opened.name().to_owned());
            return Err(Error::new(ErrorKind::SymbolMissing, OPERATION, message).with_hint(match given {
                Some(_) => format!("{} is set: point it at {}, or unset it", library.path_variable, library.what),
                None => format!("update the package of {}", library.what),
            }));
        }
        if self.settled.is_none() {
            self.settled = name.and_then(|name| name.major).map(|major| (major, opened.name().to_owned()));
        }
        self.opened.push(opened.name().to_owned());
        Ok(Found { library: opened, major: name.and_then(|name| name.major) })
    }

    /// Opens the file that the library's variable names, and no other.
    ///
    /// # Safety
    /// The same as for [`Search::open`].
    unsafe fn open_given(
        &mut self,
        library: &VendorLibrary,
        path: &Path,
    ) -> Result<(Library, Option<LibraryName>), Error> {
        let variable = library.path_variable;
        // SAFETY: The caller promises that the file's constructors may run.
        let opened = unsafe { Library::open(path) }.map_err(|failure| {
            let message = format!("{} could not be opened; tried {failure}", library.what);
            self.tried.push(failure);
            Error::new(ErrorKind::LibraryMissing, OPERATION, message)
                .with_hint(format!("{variable} is set: correct it, or unset it to search the usual names"))
        })?;
        // A link without a version in its name leads to a file that has one.
        let name = library.name_of(path);
        if let Some(old) = name.filter(|name| library.too_old.contains(name)) {
            self.opened.push(opened.name().to_owned());
            return Err(too_old(library, opened.name(), old));
        }
        if let Some((settled, by)) = &self.settled
            && let Some(major) = name.and_then(|name| name.major)
            && major != *settled
        {
            let message =
                format!("{} belongs to major version {major}, expected major version {settled} of {by}", opened.name());
            self.opened.push(opened.name().to_owned());
            return Err(Error::new(ErrorKind::InvalidArgument, OPERATION, message)
                .with_hint(format!("{variable} is set: point it at a file of major version {settled}, or unset it")));
        }
        Ok((opened, name))
    }

    /// Opens the first of the library's names that has the fixed major version, if one is fixed.
    ///
    /// # Safety
    /// The same as for [`Search::open`].
    unsafe fn open_known(
        &mut self,
        library: &VendorLibrary,
        accepts: impl Fn(&LibraryName) -> bool,
    ) -> Result<(Library, Option<LibraryName>), Error> {
        let first = self.tried.len();
        let settled = self.settled.as_ref().map(|(major, _)| *major);
        let goes_together =
            |name: &&LibraryName| accepts(name) && (settled.is_none() || name.major.is_none() || name.major == settled);
        for name in library.names.iter().filter(goes_together) {
            if let Some(folder) = self.folder.clone()
                && let Some(opened) = self.open_in(&folder, *name)
            {
                return Ok((opened, Some(*name)));
            }
            // SAFETY: The caller promises that the constructors of these names may run.
            match unsafe { Library::open(name.file) } {
                Ok(opened) => return Ok((opened, Some(*name))),
                Err(failure) => self.tried.push(failure),
            }
        }
        for name in library.names.iter().filter(goes_together) {
            for folder in self.folders.clone() {
                if let Some(opened) = self.open_in(&folder, *name) {
                    self.folder = Some(folder);
                    return Ok((opened, Some(*name)));
                }
            }
        }
        for old in library.too_old {
            // SAFETY: As above.
            match unsafe { Library::open(old.file) } {
                Ok(opened) => {
                    self.opened.push(opened.name().to_owned());
                    return Err(too_old(library, opened.name(), *old));
                }
                Err(failure) => self.tried.push(failure),
            }
        }
        let tried: Vec<String> = self.tried[first..].iter().map(ToString::to_string).collect();
        let partner = self.settled.as_ref().map(|(_, by)| format!(" to match {by}")).unwrap_or_default();
        let message = format!("{} could not be opened{partner}; tried {}", library.what, tried.join("; "));
        Err(Error::new(ErrorKind::LibraryMissing, OPERATION, message).with_hint(format!(
            "install {}, or set {} to the full path of its file",
            library.what, library.path_variable
        )))
    }
}

impl Search {
    /// Opens a file in a folder, if it exists.
    fn open_in(&mut self, folder: &Path, name: LibraryName) -> Option<Library> {
        let path = folder.join(name.file);
        if !path.exists() {
            return None;
        }
        // SAFETY: The creator of the search promises that the constructors in these folders may run.
        match unsafe { Library::open(&path) } {
            Ok(opened) => Some(opened),
            Err(failure) => {
                self.tried.push(failure);
                None
            }
        }
    }
}

fn too_old(library: &VendorLibrary, file: &str, old: LibraryName) -> Error {
    let accepted: Vec<&str> = library.names.iter().map(|name| name.file).collect();
    let version = old.major.map(|major| format!(" (major version {major})")).unwrap_or_default();
    let message = format!("{file}{version} is too old to be used as {}", library.what);
    Error::new(ErrorKind::Unsupported, OPERATION, message)
        .with_hint(format!("install a version with {}", accepted.join(" or ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ABSENT: &str = "libhighwater-no-such.so.7";
    const ABSENT_TOO: &str = "libhighwater-no-such.so.6";

    const fn library(what: &'static str, names: &'static [LibraryName]) -> VendorLibrary {
        VendorLibrary { what, path_variable: "FIRST_PATH", names, too_old: &[], required_symbols: &["malloc"] }
    }

    /// The C library stands in for a driver, and the math library of the same major version for a matrix library.
    const FOUND: &[VendorLibrary] = &[
        library("the driver", &[LibraryName::of_major(ABSENT, 7), LibraryName::of_major("libc.so.6", 6)]),
        VendorLibrary {
            path_variable: "SECOND_PATH",
            required_symbols: &["cos"],
            ..library(
                "the matrix library",
                &[LibraryName::of_major("libdl.so.2", 7), LibraryName::of_major("libm.so.6", 6)],
            )
        },
    ];

    const MISSING: &[VendorLibrary] =
        &[library("the driver", &[LibraryName::of_major(ABSENT, 7), LibraryName::of_major(ABSENT_TOO, 6)])];

    const OLD: &[VendorLibrary] = &[VendorLibrary {
        too_old: &[LibraryName::of_major("libc.so.6", 5)],
        ..library("the driver", &[LibraryName::of_major(ABSENT, 7)])
    }];

    /// Opens the libraries in order.
    fn search(libraries: &[VendorLibrary], given: &[(&str, &Path)]) -> std::result::Result<Search, Unavailable> {
        let mut search = Search::default();
        for library in libraries {
            let path = given.iter().find(|(name, _)| *name == library.path_variable).map(|(_, path)| *path);
            // SAFETY: The names are parts of the C library, which this process has loaded, or do not exist.
            if let Err(error) = unsafe { search.open(library, path, |_| true) } {
                return Err(search.fails(error));
            }
        }
        Ok(search)
    }

    fn refused(libraries: &[VendorLibrary], given: &[(&str, &Path)]) -> Unavailable {
        search(libraries, given).unwrap_err()
    }

    #[test]
    fn a_missing_library_lists_every_name_with_the_loaders_words() {
        let answer = refused(MISSING, &[]);
        assert_eq!(answer.error.kind(), ErrorKind::LibraryMissing);
        let tried: Vec<&str> = answer.tried.iter().map(|failure| failure.name.as_str()).collect();
        assert_eq!(tried, [ABSENT, ABSENT_TOO]);
        for failure in &answer.tried {
            assert!(failure.reason.contains("cannot open shared object file"), "{failure:?}");
            assert!(answer.error.message().contains(&failure.to_string()), "{answer}");
        }
        assert!(answer.error.hint().contains("FIRST_PATH"), "{answer}");
        assert!(answer.opened.is_empty());
    }

    #[test]
    fn majors_are_not_mixed() {
        let found = search(FOUND, &[]).unwrap();
        // `libdl.so.2` would open and comes first, but stands for another major version than the driver found.
        assert_eq!(found.opened(), ["libc.so.6", "libm.so.6"]);
        let answer = found.fails(Error::new(ErrorKind::DeviceMissing, OPERATION, "there is none"));
        assert_eq!((answer.tried.len(), answer.opened.len()), (1, 2));
        assert_eq!(Error::from(answer).kind(), ErrorKind::DeviceMissing);
    }

    #[test]
    fn a_variable_is_the_only_name_tried() {
        let answer = refused(FOUND, &[("FIRST_PATH", Path::new("/no/such/libc.so.6"))]);
        assert_eq!(answer.error.kind(), ErrorKind::LibraryMissing);
        assert_eq!(answer.tried.len(), 1);
        assert_eq!(answer.tried[0].name, "/no/such/libc.so.6");
        assert!(answer.error.hint().contains("FIRST_PATH is set"), "{answer}");
    }

    #[test]
    fn a_library_without_its_symbols_is_another_error_than_none() {
        let answer = refused(FOUND, &[("SECOND_PATH", Path::new("libc.so.6"))]);
        assert_eq!(answer.error.kind(), ErrorKind::SymbolMissing);
        assert!(answer.error.message().contains("lacks cos"), "{answer}");
        assert_eq!(answer.opened, ["libc.so.6", "libc.so.6"]);
    }

    #[test]
    fn a_version_that_is_too_old_is_named() {
        for given in [&[][..], &[("FIRST_PATH", Path::new("libc.so.6"))]] {
            let answer = refused(OLD, given);
            assert_eq!(answer.error.kind(), ErrorKind::Unsupported);
            assert!(answer.error.message().contains("libc.so.6 (major version 5) is too old"), "{answer}");
            assert!(answer.error.hint().contains(ABSENT), "{answer}");
        }
    }

    #[test]
    fn files_that_do_not_go_together_are_refused() {
        let answer = refused(FOUND, &[("SECOND_PATH", Path::new("libdl.so.2"))]);
        assert_eq!(answer.error.kind(), ErrorKind::InvalidArgument);
        assert!(answer.error.message().contains("libdl.so.2 belongs to major version 7"), "{answer}");
    }

    #[test]
    fn a_longer_version_is_the_same_library_and_a_longer_number_is_not() {
        let name = LibraryName::of_major("libcublas.so.1", 1);
        assert!(name.names(Path::new("/opt/lib/libcublas.so.1")));
        assert!(name.names(Path::new("libcublas.so.1.2.3")));
        assert!(!name.names(Path::new("libcublas.so.13")));
        assert!(!name.names(Path::new("/opt/libcublas.so.1/other.so")));
    }
}
