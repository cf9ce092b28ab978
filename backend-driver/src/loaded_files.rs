//! The library files that this process has loaded, including those that foreign code loaded.

use std::path::{Path, PathBuf};

use super::search::{LibraryName, VendorLibrary};

/// Returns the files that are mapped into this process.
fn mapped_files(maps: &str) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = Vec::new();
    for line in maps.lines() {
        // The path is the sixth field and may contain spaces.
        let path = line.splitn(6, ' ').nth(5).map_or("", str::trim_start);
        if path.starts_with('/') && files.last().is_none_or(|last| last != Path::new(path)) {
            files.push(PathBuf::from(path));
        }
    }
    files.sort();
    files.dedup();
    files
}

/// Returns the loaded files whose names begin with `name`, such as `libamdhip64.so`. Returns none if the system does
/// not list them.
#[must_use]
pub fn loaded_files(name: &str) -> Vec<PathBuf> {
    let is_it = |path: &PathBuf| {
        path.file_name()
            .and_then(|file| file.to_str())
            .and_then(|file| file.strip_prefix(name))
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    mapped_files(&maps).into_iter().filter(is_it).collect()
}

impl VendorLibrary {
    /// Returns the library name of `path`, or of the file that a link leads to. Names of refused versions are included.
    #[must_use]
    pub fn name_of(&self, path: &Path) -> Option<LibraryName> {
        let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let names = || self.too_old.iter().chain(self.names).copied();
        [path, &real].into_iter().find_map(|path| names().find(|name| name.names(path)))
    }

    /// Returns the loaded file of this library, if its name is known.
    #[must_use]
    pub fn loaded(&self) -> Option<(PathBuf, LibraryName)> {
        // Names differ only after `.so`.
        let stem = self.names.first()?.file.split_inclusive(".so").next()?;
        loaded_files(stem).into_iter().find_map(|path| self.name_of(&path).map(|name| (path, name)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_with_spaces_are_read_whole_and_once() {
        let maps = "7f0-7f1 r-xp 00000000 fd:00 1234                       /opt/a b/libx.so.1\n\
                    7f1-7f2 r--p 00001000 fd:00 1234                       /opt/a b/libx.so.1\n\
                    7f2-7f3 rw-p 00000000 00:00 0 \n\
                    7f3-7f4 rw-p 00000000 00:00 0                          [heap]\n";
        assert_eq!(mapped_files(maps), [PathBuf::from("/opt/a b/libx.so.1")]);
    }

    #[test]
    fn the_c_library_is_loaded_and_others_are_not() {
        let found = loaded_files("libc.so");
        assert!(found.iter().any(|path| path.ends_with("libc.so.6")), "{found:?}");
        assert!(loaded_files("libhighwater-no-such.so").is_empty());
        const LIBRARY: VendorLibrary = VendorLibrary {
            what: "the C library",
            path_variable: "",
            names: &[LibraryName::of_major("libc.so.7", 7), LibraryName::of_major("libc.so.6", 6)],
            too_old: &[],
            required_symbols: &[],
        };
        assert_eq!(LIBRARY.loaded().map(|(_, name)| name.major), Some(Some(6)));
    }
}
