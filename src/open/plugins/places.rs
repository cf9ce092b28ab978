//! The folders that are searched for plugins, and their contents.
//!
//! The order: folders from the caller, those of `HIGHWATER_PLUGIN_PATH`, the user's, the system's, the executable's.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use super::super::OpenOptions;
use super::super::environment::{DATA_HOME, Environment, HOME, PLUGIN_PATH};
use super::super::report::{Outcome, Place, PlaceKind};
use super::permission::text_of;

/// Below the user's folder for data, and below each of the system's for libraries.
const FOLDER: &str = "highwater/plugins";

/// A library that is found without a manifest: `libhighwater_NAME.so` or `libhighwater_NAME_plugin.so`.
const BARE: [&str; 3] = ["libhighwater_", "_plugin", ".so"];

/// A place to search: a folder, or one that is left out.
pub(super) fn all(options: &OpenOptions, environment: &Environment) -> Vec<Place> {
    let mut places = Vec::new();
    let mut add = |kind, path: PathBuf| {
        places.push(if path.is_absolute() {
            Place::new(kind, Some(path), Outcome::Searched, "")
        } else {
            let reason = "a relative path would mean another folder wherever the program is started";
            let mut place = Place::new(kind, Some(path), Outcome::NotTried, reason);
            place.hint = "give an absolute path".into();
            place
        });
    };
    for folder in &options.search_folders {
        add(PlaceKind::SearchFolder, folder.clone());
    }
    if let Some(folders) = environment.get(PLUGIN_PATH) {
        // An empty text between two colons is not the current folder.
        for folder in folders.as_bytes().split(|&byte| byte == b':').filter(|folder| !folder.is_empty()) {
            add(PlaceKind::PathVariable, OsStr::from_bytes(folder).into());
        }
    } else {
        places.push(not_set(PlaceKind::PathVariable, environment, ""));
    }
    places.push(user_folder(environment));
    for folder in environment.system {
        places.push(Place::new(PlaceKind::SystemFolder, Some(Path::new(folder).join(FOLDER)), Outcome::Searched, ""));
    }
    places.push(match environment.executable_folder() {
        Some(folder) => Place::new(PlaceKind::Executable, Some(folder.into()), Outcome::Searched, ""),
        None => Place::new(
            PlaceKind::Executable,
            None,
            Outcome::NotSet,
            "the system does not report the path of the executable",
        ),
    });
    places
}

/// Returns the user's folder. The base directory specification ignores relative paths.
fn user_folder(environment: &Environment) -> Place {
    let absolute = |name| environment.get(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let data = absolute(DATA_HOME).or_else(|| Some(absolute(HOME)?.join(".local/share")));
    match data {
        Some(data) => Place::new(PlaceKind::UserFolder, Some(data.join(FOLDER)), Outcome::Searched, ""),
        None => not_set(PlaceKind::UserFolder, environment, "neither XDG_DATA_HOME nor HOME is an absolute path"),
    }
}

fn not_set(kind: PlaceKind, environment: &Environment, reason: &str) -> Place {
    if environment.secure {
        let reason = "the program has more rights than its caller, so the environment is ignored";
        return Place::new(kind, None, Outcome::NotTried, reason);
    }
    Place::new(kind, None, Outcome::NotSet, reason)
}

/// A file in a folder that may be a plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) path: PathBuf,
    /// The name in the file's name; a backend may not be able to have it.
    pub(super) name: String,
    /// Whether it is a manifest; else it is a library without one.
    pub(super) is_manifest: bool,
}

impl Entry {
    /// Returns the plugin that the name of a file suggests.
    fn of(path: PathBuf) -> Option<Self> {
        let file_name = path.file_name()?;
        if file_name.as_bytes().starts_with(b".") {
            return None;
        }
        if path.extension() == Some(OsStr::new("toml")) {
            let name = path.file_stem()?.display().to_string();
            return Some(Self { path, name, is_manifest: true });
        }
        let name = bare_name(file_name)?;
        Some(Self { path, name, is_manifest: false })
    }
}

/// Returns the name in `libhighwater_NAME.so` or `libhighwater_NAME_plugin.so`.
fn bare_name(file: &OsStr) -> Option<String> {
    let [before, plugin, after] = BARE;
    let name = file.to_str()?.strip_prefix(before)?.strip_suffix(after)?;
    let name = name.strip_suffix(plugin).unwrap_or(name);
    (!name.is_empty()).then(|| name.to_owned())
}

/// Returns a name for a library given by its path, until the library reports its own.
pub(super) fn library_name(path: &Path) -> String {
    let file = path.file_name().unwrap_or(path.as_os_str());
    bare_name(file).unwrap_or_else(|| path.file_stem().unwrap_or(file).display().to_string())
}

/// Sorts manifests first, then bare libraries, if those count, by name.
pub(super) fn list(folder: &Path, bare: bool) -> io::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    for entry in fs::read_dir(folder)? {
        entries.extend(Entry::of(entry?.path()).filter(|entry| bare || entry.is_manifest));
    }
    entries.sort_by(|a, b| (!a.is_manifest, &a.path).cmp(&(!b.is_manifest, &b.path)));
    Ok(entries)
}

/// Notes the outcome for a place whose folder could not be listed.
pub(super) fn note_failure(place: &mut Place, error: &io::Error) {
    let hint;
    (place.outcome, hint) = match Errno::from_io_error(error) {
        Some(Errno::NOENT) => (Outcome::Absent, ""),
        Some(Errno::ACCESS | Errno::PERM) => {
            (Outcome::NotPermitted, "check its permissions, and those of the folders above")
        }
        Some(Errno::NOTDIR) => (Outcome::Failed, "put plugins into a folder, and name the folder"),
        _ => (Outcome::Failed, "check this folder, and the targets of its links"),
    };
    if place.outcome != Outcome::Absent {
        place.reason = text_of(error);
    }
    place.hint = hint.into();
}

#[cfg(test)]
mod tests {
    use super::super::super::environment::SYSTEM;
    use super::super::testing::Folder;
    use super::*;

    /// An environment without any variable.
    fn bare() -> Environment {
        let mut environment = Environment::default();
        environment.system = &SYSTEM;
        environment
    }

    fn paths(environment: &Environment) -> Vec<(PlaceKind, Option<&'static str>, Outcome)> {
        let leak = |path: PathBuf| -> &'static str { Box::leak(path.display().to_string().into_boxed_str()) };
        let options = OpenOptions::new();
        all(&options, environment).into_iter().map(|place| (place.kind, place.path.map(leak), place.outcome)).collect()
    }

    const REST: [(PlaceKind, Option<&str>, Outcome); 3] = [
        (PlaceKind::SystemFolder, Some("/usr/local/lib/highwater/plugins"), Outcome::Searched),
        (PlaceKind::SystemFolder, Some("/usr/lib/highwater/plugins"), Outcome::Searched),
        (PlaceKind::Executable, None, Outcome::NotSet),
    ];

    #[test]
    fn nothing_set_leaves_the_folders_of_the_system() {
        let mut expected =
            vec![(PlaceKind::PathVariable, None, Outcome::NotSet), (PlaceKind::UserFolder, None, Outcome::NotSet)];
        expected.extend(REST);
        assert_eq!(paths(&bare()), expected);
        // Empty, relative, or colons only: the same.
        let vain = bare().with(HOME, "").with(DATA_HOME, "data").with(PLUGIN_PATH, "");
        assert_eq!(paths(&vain), expected);
        assert_eq!(paths(&bare().with(PLUGIN_PATH, "::")).len(), 4);
    }

    #[test]
    fn every_place_stands_in_its_order() {
        let mut environment =
            bare().with(PLUGIN_PATH, "/one::two:/three/").with(DATA_HOME, "/data").with(HOME, "/home/ada");
        environment.executable = Some("/opt/tool/bin/tool".into());
        let options = OpenOptions::new().with_search_folder("/given");
        let places = all(&options, &environment);
        let seen: Vec<_> =
            places.iter().map(|place| (place.kind, place.path.as_deref().unwrap(), place.outcome)).collect();
        let expected = [
            (PlaceKind::SearchFolder, Path::new("/given"), Outcome::Searched),
            (PlaceKind::PathVariable, Path::new("/one"), Outcome::Searched),
            (PlaceKind::PathVariable, Path::new("two"), Outcome::NotTried),
            (PlaceKind::PathVariable, Path::new("/three/"), Outcome::Searched),
            (PlaceKind::UserFolder, Path::new("/data/highwater/plugins"), Outcome::Searched),
            (PlaceKind::SystemFolder, Path::new("/usr/local/lib/highwater/plugins"), Outcome::Searched),
            (PlaceKind::SystemFolder, Path::new("/usr/lib/highwater/plugins"), Outcome::Searched),
            (PlaceKind::Executable, Path::new("/opt/tool/bin"), Outcome::Searched),
        ];
        assert_eq!(seen, expected);
        assert!(places[2].hint.contains("absolute"), "{}", places[2]);
    }

    #[test]
    fn without_a_data_folder_it_is_below_the_home() {
        for data in ["", "relative"] {
            let environment = bare().with(HOME, "/home/ada").with(DATA_HOME, data);
            assert_eq!(paths(&environment)[1].1, Some("/home/ada/.local/share/highwater/plugins"));
        }
        assert_eq!(paths(&bare().with(HOME, "ada"))[1].1, None);
    }

    #[test]
    fn in_a_program_with_more_rights_the_environment_is_said_not_to_count() {
        let mut environment = bare();
        environment.secure = true;
        let places = all(&OpenOptions::new(), &environment);
        for place in &places[..2] {
            assert_eq!(place.outcome, Outcome::NotTried);
            assert!(place.reason.contains("more rights"), "{place}");
        }
    }

    #[test]
    fn a_folder_is_listed_by_name_and_bare_libraries_only_where_they_count() {
        let folder = Folder::new();
        for name in ["zeta.toml", "alpha.toml", ".hidden.toml", "notes.txt", "toml", "libother.so"] {
            folder.file(name, "");
        }
        for name in ["libhighwater_acme.so", "libhighwater_beta_plugin.so", "libhighwater_.so", "libhighwater_x.so.1"] {
            folder.file(name, "");
        }
        fs::write(folder.path().join(OsStr::from_bytes(b"\xffmega.toml")), "").unwrap();
        let names = |bare| -> Vec<String> { list(folder.path(), bare).unwrap().into_iter().map(|e| e.name).collect() };
        assert_eq!(names(false), ["alpha", "zeta", "\u{fffd}mega"]);
        assert_eq!(names(true), ["alpha", "zeta", "\u{fffd}mega", "acme", "beta"]);
    }

    #[test]
    fn what_is_no_folder_or_leads_nowhere_is_told() {
        let folder = Folder::new();
        let file = folder.file("file", "");
        let circle = folder.path().join("circle");
        std::os::unix::fs::symlink("circle", &circle).unwrap();
        let outcome = |path: &Path| {
            let mut place = Place::new(PlaceKind::PathVariable, Some(path.into()), Outcome::Searched, "");
            note_failure(&mut place, &list(path, false).unwrap_err());
            (place.outcome, place.reason, place.hint.is_empty())
        };
        assert_eq!(outcome(&folder.path().join("none")), (Outcome::Absent, String::new(), true));
        assert_eq!(outcome(&file), (Outcome::Failed, "Not a directory".into(), false));
        assert_eq!(outcome(&circle), (Outcome::Failed, "Too many levels of symbolic links".into(), false));
    }

    #[test]
    fn a_library_is_known_by_the_name_of_its_file() {
        for (path, name) in [("/p/libhighwater_acme_plugin.so", "acme"), ("/p/libfoo.so", "libfoo"), ("/p/x", "x")] {
            assert_eq!(library_name(Path::new(path)), name);
        }
    }
}
