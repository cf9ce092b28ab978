//! Finds backends at run time.
//!
//! A plugin that is found becomes a contender like a built-in backend: ready to be opened, or broken for a reason that is known
//! without loading it. No plugin is loaded before it is chosen.

mod manifest;
mod permission;
mod places;
mod plugin;
mod probe;
#[cfg(test)]
mod testing;

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use highwater_hal::{Error, ErrorKind, display_foreign};
use highwater_plugin::TABLE_VERSIONS;

use self::manifest::{Fault, Manifest};
use self::permission::{Complaint, Trust, text_of};
use self::places::Entry;
use self::plugin::{Loaded, failure};
use self::probe::Probed;
pub(super) use self::probe::Probing;
pub use self::probe::serve_probe;
use super::OpenOptions;
use super::built_in::check_loader;
use super::choice::{Contender, Failure, Opening, State};
use super::environment::Environment;
use super::report::OPERATION;
use super::report::{Origin, Outcome, Place, PlaceKind};

/// Loads the plugin of a file, within a limit, and opens it.
type Load = dyn Fn(&Path, Duration) -> Result<Loaded, Failure>;
/// Makes a program probe the plugin of a file, within a limit.
type Probe = dyn Fn(&Path, &Path, Duration) -> Probed;

/// The functions that touch plugins, which tests replace.
pub(super) struct Means {
    load: Box<Load>,
    probe: Box<Probe>,
}

impl Means {
    pub(super) fn real() -> Self {
        Self { load: Box::new(plugin::load), probe: Box::new(probe::probe) }
    }
}

/// The most platforms of a manifest that a message lists.
const MOST_PLATFORMS: usize = 16;

/// Searches for plugins.
pub(super) struct Finder<'a> {
    options: &'a OpenOptions,
    environment: &'a Environment,
    means: &'a Means,
    probing: Probing,
    trust: Trust,
}

/// The source of a plugin's expected name, which the plugin must confirm.
#[derive(Debug, Clone)]
enum Named {
    Manifest { path: PathBuf, version: String },
    File,
    Caller,
    Nobody,
}

/// A plugin that may be loaded.
struct Ready {
    library: PathBuf,
    named: Named,
    notes: Vec<String>,
}

/// The progress of the search for a plugin.
struct Found {
    library: Option<PathBuf>,
    state: Result<Ready, Failure>,
}

impl From<Failure> for Found {
    fn from(failure: Failure) -> Self {
        Self { library: None, state: Err(failure) }
    }
}

impl<'a> Finder<'a> {
    pub(super) fn new(
        options: &'a OpenOptions,
        environment: &'a Environment,
        means: &'a Means,
        probing: Probing,
    ) -> Self {
        let trust = Trust::new(options.allow_insecure, environment);
        Self { options, environment, means, probing, trust }
    }

    /// Returns every plugin of every place, and the outcome for each place.
    pub(super) fn all(&self) -> (Vec<Contender<'a>>, Vec<Place>) {
        let mut contenders = Vec::new();
        let mut places = places::all(self.options, self.environment);
        let mut seen = HashSet::new();
        for place in &mut places {
            if place.outcome == Outcome::Searched {
                self.search(place, &mut seen, &mut contenders);
            }
        }
        (contenders, places)
    }

    /// Searches one folder.
    fn search(&self, place: &mut Place, seen: &mut HashSet<(u64, u64)>, contenders: &mut Vec<Contender<'a>>) {
        let Some(folder) = place.path.clone() else { return };
        let looked = fs::canonicalize(&folder).and_then(|folder| Ok((fs::metadata(&folder)?, folder)));
        let (metadata, folder) = match looked {
            Ok(found) => found,
            Err(error) => return places::note_failure(place, &error),
        };
        if !seen.insert((metadata.dev(), metadata.ino())) {
            (place.outcome, place.reason) = (Outcome::NotTried, "it is the same folder as one above".into());
            return;
        }
        let beside = place.kind == PlaceKind::Executable;
        let entries = match places::list(&folder, beside) {
            Ok(entries) => entries,
            Err(error) => return places::note_failure(place, &error),
        };
        let before = contenders.len();
        let unsafe_folder = self.trust.check(&folder).err();
        let refused = unsafe_folder.as_ref().filter(|_| !self.trust.insecure);
        for entry in entries {
            // A program's folder may contain other TOML files.
            if beside && entry.is_manifest && !manifest::read(&entry.path).is_ok_and(|text| manifest::is_meant(&text)) {
                continue;
            }
            let contender = self.contender(&entry, unsafe_folder.as_ref());
            let library = contender.origin.library();
            // A library with a manifest beside it is found twice.
            let twice = !entry.is_manifest
                && library.is_some()
                && contenders[before..].iter().any(|other| other.origin.library() == library);
            if !twice {
                contenders.push(Contender { hidden: refused.is_some(), ..contender });
            }
        }
        match (contenders.len() - before, refused) {
            (0, _) => (place.outcome, place.reason) = (Outcome::Absent, "there is no plugin in it".into()),
            (_, None) => {}
            // Other users chose the names of its files, so the report counts them and does not name them.
            (found, Some(complaint)) => {
                let plugins = if found == 1 { "1 plugin in it was" } else { &format!("{found} plugins in it were") };
                place.outcome = Outcome::NotPermitted;
                place.reason = format!("{complaint}; {plugins} not looked at");
                place.hint.clone_from(&complaint.hint);
            }
        }
    }

    /// Returns the plugin of a given path, a manifest or a library.
    pub(super) fn at(&self, path: &Path, name: Option<&str>) -> Contender<'a> {
        Contender { given: true, ..self.find(path, name) }
    }

    fn find(&self, path: &Path, name: Option<&str>) -> Contender<'a> {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        if path.extension() == Some(OsStr::new("toml")) {
            let stem = path.file_stem().unwrap_or_default().display().to_string();
            let found = match name {
                Some(name) if name != stem => {
                    let what = format!(
                        "`{}` was asked for, and `{}` is the manifest of `{}`",
                        display_foreign(name),
                        display_foreign(&path),
                        display_foreign(&stem)
                    );
                    failure(Outcome::Failed, what, "ask for the name or for the file").into()
                }
                _ => self.by_manifest(&path, &stem, None),
            };
            return self.finish(stem, Some(path), found);
        }
        let (name, named) = match name {
            Some(name) => (name.to_owned(), Named::Caller),
            None => (places::library_name(&path), Named::Nobody),
        };
        let found = self.library(&path, named, Vec::new());
        self.finish(name, None, found)
    }

    fn contender(&self, entry: &Entry, unsafe_folder: Option<&Complaint>) -> Contender<'a> {
        let Entry { path, name, is_manifest } = entry;
        if *is_manifest {
            let found = self.by_manifest(path, name, unsafe_folder);
            return self.finish(name.clone(), Some(path.clone()), found);
        }
        let found = match self.allow(unsafe_folder) {
            Ok(notes) => self.library(path, Named::File, notes),
            Err(failure) => Found { library: Some(path.clone()), state: Err(failure) },
        };
        self.finish(name.clone(), None, found)
    }

    /// Turns a complaint into a note if insecure plugins are allowed.
    fn allow(&self, complaint: Option<&Complaint>) -> Result<Vec<String>, Failure> {
        match complaint {
            None => Ok(Vec::new()),
            Some(complaint) if self.trust.insecure => Ok(vec![format!("not safe, and allowed: {complaint}")]),
            Some(complaint) => Err(failure(Outcome::NotPermitted, complaint.to_string(), &complaint.hint)),
        }
    }

    /// Follows a manifest to its library.
    fn by_manifest(&self, path: &Path, name: &str, unsafe_folder: Option<&Complaint>) -> Found {
        let invalid = |line: Option<usize>, what: &str, hint: &str| {
            let line = line.map_or_else(String::new, |line| format!(":{line}"));
            Found::from(failure(Outcome::InvalidManifest, format!("{}{line}: {what}", display_foreign(path)), hint))
        };
        let mut notes = match self.allow(unsafe_folder) {
            Ok(notes) => notes,
            Err(failure) => return failure.into(),
        };
        // The manifest may be a link, and its library lies beside the link's target.
        let file = match fs::canonicalize(path) {
            Ok(file) => file,
            Err(error) => return invalid(None, &text_of(&error), "check the targets of its links, or remove it"),
        };
        match self.allow(self.trust.check(&file).err().as_ref()) {
            Ok(more) => notes.extend(more.into_iter().filter(|note| !notes.contains(note)).collect::<Vec<_>>()),
            Err(failure) => return failure.into(),
        }
        let text = match manifest::read(&file) {
            Ok(text) => text,
            Err(Fault { line, what, hint }) => return invalid(line, &what, &hint),
        };
        let manifest = match Manifest::parse(&text) {
            Ok(manifest) => manifest,
            Err(Fault { line, what, hint }) => return invalid(line, &what, &hint),
        };
        if manifest.name != name {
            let line = text.lines().position(|line| line.trim_start().starts_with("name")).map(|index| index + 1);
            let what = format!(
                "`name` is `{}`, and the file is named for `{}`",
                display_foreign(&manifest.name),
                display_foreign(name)
            );
            return invalid(line, &what, &format!("name the file `{}.toml`", manifest.name));
        }
        let platform = manifest::platform();
        let Some(library) = manifest.libraries.get(&platform) else {
            let platforms = manifest.libraries.keys().take(MOST_PLATFORMS);
            let others: Vec<String> = platforms.map(|platform| display_foreign(platform).to_string()).collect();
            let what = format!("it has libraries for {}, and none for {platform}", others.join(", "));
            return failure(Outcome::WrongPlatform, what, "").into();
        };
        let offered = &manifest.table_versions;
        if offered.start() > TABLE_VERSIONS.end() || offered.end() < TABLE_VERSIONS.start() {
            let range = |range: &std::ops::RangeInclusive<u32>| format!("{} to {}", range.start(), range.end());
            let what = format!(
                "it offers versions {} of the table, and this program understands {}",
                range(offered),
                range(&TABLE_VERSIONS)
            );
            return failure(Outcome::VersionOutOfRange, what, "").into();
        }
        let library = file.parent().unwrap_or(Path::new("/")).join(library);
        let named = Named::Manifest { path: path.to_owned(), version: manifest.version };
        self.library(&library, named, notes)
    }

    /// Checks a library without loading it.
    fn library(&self, path: &Path, named: Named, mut notes: Vec<String>) -> Found {
        let file = match fs::canonicalize(path) {
            Ok(file) => file,
            Err(error) => {
                let named_by = match &named {
                    Named::Manifest { .. } => "the manifest names ",
                    _ => "",
                };
                let what = format!("{named_by}`{}`: {}", display_foreign(path), text_of(&error));
                let hint = match named {
                    Named::Manifest { .. } => "install the plugin again, or correct `[library]` of its manifest",
                    _ => "give the path of a library or of a manifest",
                };
                return failure(Outcome::LibraryMissing, what, hint).into();
            }
        };
        let state = match self.allow(self.trust.check(&file).err().as_ref()) {
            Err(failure) => Err(failure),
            // The loader would wait at a pipe.
            Ok(_) if !file.is_file() => {
                let what = format!("`{}` is not a regular file", display_foreign(&file));
                Err(failure(Outcome::WrongPlatform, what, "give the path of a library or of a manifest"))
            }
            Ok(more) => {
                notes.extend(more.into_iter().filter(|note| !notes.contains(note)).collect::<Vec<_>>());
                Ok(Ready { library: file.clone(), named, notes })
            }
        };
        Found { library: Some(file), state }
    }

    fn finish(&self, name: String, manifest: Option<PathBuf>, found: Found) -> Contender<'a> {
        let origin = Origin::Plugin { manifest, library: found.library };
        let state = match found.state {
            Err(failure) => State::Broken(failure),
            Ok(ready) => {
                let how = How { means: self.means, probing: self.probing.clone(), limit: self.options.load_limit };
                let expected = name.clone();
                State::Ready(Box::new(move || open(&how, &ready, &expected)))
            }
        };
        Contender { name, origin, given: false, hidden: false, real: None, state }
    }
}

/// The means by which a plugin is opened.
struct How<'a> {
    means: &'a Means,
    probing: Probing,
    limit: Duration,
}

/// Probes a plugin if requested, and opens it in this process.
fn open(how: &How<'_>, ready: &Ready, expected: &str) -> Result<Opening, Failure> {
    let How { means, probing, limit } = how;
    check_loader()?;
    let mut notes = ready.notes.clone();
    let not_probed = match probing {
        Probing::Off => None,
        Probing::By { prober } => match (means.probe)(prober, &ready.library, *limit) {
            Probed::Opens => None,
            Probed::Refused(mut failure) => {
                failure.notes = notes;
                return Err(failure);
            }
            Probed::Impossible(why) => Some(why),
        },
        Probing::Impossible(why) => Some(why.clone()),
    };
    notes.extend(not_probed.map(|why| format!("it was not probed in a process of its own: {why}")));
    let Loaded { name, version, warnings, backend } = (means.load)(&ready.library, *limit).map_err(|mut failure| {
        failure.notes.clone_from(&notes);
        failure
    })?;
    notes.extend(warnings.iter().map(|warning| display_foreign(warning).to_string()));
    let library = display_foreign(&ready.library);
    // Names are compared raw and displayed escaped.
    let [said_name, expected_name] = [name.as_str(), expected].map(|name| display_foreign(name).to_string());
    match &ready.named {
        Named::Manifest { path, .. } if name != expected => {
            let what = format!(
                "{}: `name` is `{expected_name}`, and `{library}` calls itself `{said_name}`",
                display_foreign(path)
            );
            return Err(failure(Outcome::InvalidManifest, what, "correct the manifest, or the library that it names"));
        }
        Named::File if name != expected => {
            let what = format!("`{library}` is named for `{expected_name}`, and calls itself `{said_name}`");
            let hint = format!("name the file `libhighwater_{said_name}.so`, or give it a manifest `{said_name}.toml`");
            return Err(failure(Outcome::Failed, what, &hint));
        }
        Named::Caller if name != expected => {
            let what = format!("`{expected_name}` was asked for, and `{library}` is `{said_name}`");
            let error =
                Error::new(ErrorKind::UnknownBackend, OPERATION, what).with_hint("ask for the name or for the file");
            return Err(Failure { notes, ..Failure::new(Outcome::Failed, error) });
        }
        Named::Manifest { path, version: said } if *said != version => {
            let [said, version] = [said, &version].map(|version| display_foreign(version).to_string());
            notes.push(format!("{} says version {said}, and the library says {version}", display_foreign(path)));
        }
        _ => {}
    }
    Ok(Opening { backend, name: Some(name), notes })
}

#[cfg(test)]
mod tests;
