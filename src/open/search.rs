//! One search: what was asked for, in this environment.

use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use highwater_core::{Error, ErrorKind};

use super::built_in::KNOWN;
use super::environment::{BACKEND, Environment};
#[cfg(feature = "plugins")]
use super::plugins::{Finder, Means, Probing};
use super::report::{LoadReport, OpenError, Opened, Outcome, Place, PlaceKind};
use super::{OPERATION, OpenOptions, choice};
use choice::Contender;

pub(super) struct Search<'a> {
    options: &'a OpenOptions,
    environment: Environment,
    #[cfg(feature = "plugins")]
    means: Means,
}

/// What is to be opened.
#[derive(Debug, PartialEq, Eq)]
enum Wanted {
    Path(PathBuf),
    Name(String),
    Best,
}

impl<'a> Search<'a> {
    pub(super) fn of_process(options: &'a OpenOptions) -> Self {
        Self {
            options,
            environment: Environment::of_process(),
            #[cfg(feature = "plugins")]
            means: Means::real(),
        }
    }

    pub(super) fn open(&self) -> Result<Opened, OpenError> {
        let (wanted, mut places) = self.wanted().map_err(|error| {
            let report = LoadReport::default();
            OpenError { error, report }
        })?;
        match wanted {
            Wanted::Path(path) => self.at_path(path, places),
            Wanted::Name(name) => {
                let mut contenders = self.built_in();
                // What is built in comes first, so there is nothing to look for.
                if !super::backends().contains(&name.as_str()) {
                    self.add_plugins(&mut contenders, &mut places, false);
                }
                choice::by_name(&contenders, places, &name)
            }
            Wanted::Best => {
                let mut contenders = self.built_in();
                self.add_plugins(&mut contenders, &mut places, true);
                choice::auto(&contenders, places, self.options.allow_mock)
            }
        }
    }

    pub(super) fn survey(&self) -> LoadReport {
        let mut contenders = self.built_in();
        let mut places = Vec::new();
        self.add_plugins(&mut contenders, &mut places, true);
        choice::survey(&contenders, places)
    }

    /// What the options say, or else the environment; and what became of these places.
    fn wanted(&self) -> Result<(Wanted, Vec<Place>), Error> {
        if let Some(path) = &self.options.path {
            return Ok((Wanted::Path(path.clone()), Vec::new()));
        }
        if let Some(name) = &self.options.name {
            return Ok((Wanted::Name(name.clone()), Vec::new()));
        }
        let place = |path, outcome, reason: &str| {
            let (kind, hint) = (PlaceKind::BackendVariable, String::new());
            Place { kind, path, outcome, reason: reason.into(), hint }
        };
        let Some(value) = self.environment.get(BACKEND) else {
            let place = if self.environment.secure {
                let reason = "the program has more rights than who started it, so the environment does not count";
                place(None, Outcome::NotTried, reason)
            } else {
                place(None, Outcome::NotSet, "")
            };
            return Ok((Wanted::Best, vec![place]));
        };
        if value.as_bytes().contains(&b'/') {
            let path = PathBuf::from(value);
            return Ok((Wanted::Path(path.clone()), vec![place(Some(path), Outcome::Searched, "")]));
        }
        let name = value.to_str().ok_or_else(|| {
            let what = format!("{BACKEND} is `{}`, which is no name", value.display());
            Error::new(ErrorKind::UnknownBackend, OPERATION, what)
                .with_hint("set it to the name of a backend, or to the path of a plugin, with a `/` in it")
        })?;
        Ok((Wanted::Name(name.to_owned()), vec![place(None, Outcome::Searched, name)]))
    }

    fn built_in(&self) -> Vec<Contender<'_>> {
        KNOWN.iter().map(Contender::from).collect()
    }

    #[cfg(feature = "plugins")]
    fn finder(&self, every: bool) -> Finder<'_> {
        let probing = Probing::new(self.options, &self.environment, every);
        Finder::new(self.options, &self.environment, &self.means, probing)
    }

    /// Adds the plugins, in front of what has no hardware behind it, and their places. With `every`, each may be opened.
    #[cfg(feature = "plugins")]
    fn add_plugins<'s>(&'s self, contenders: &mut Vec<Contender<'s>>, places: &mut Vec<Place>, every: bool) {
        if !self.options.plugins {
            return;
        }
        let (plugins, found) = self.finder(every).all();
        places.extend(found);
        let before = contenders.iter().position(|one| one.real == Some(false)).unwrap_or(contenders.len());
        contenders.splice(before..before, plugins);
    }

    #[cfg(not(feature = "plugins"))]
    fn add_plugins<'s>(&'s self, _: &mut Vec<Contender<'s>>, _: &mut Vec<Place>, _: bool) {}

    #[cfg(feature = "plugins")]
    fn at_path(&self, path: PathBuf, mut places: Vec<Place>) -> Result<Opened, OpenError> {
        let reason = match places.is_empty() {
            true => format!("`{}` was asked for", path.display()),
            false => format!("`{}` was asked for by {BACKEND}", path.display()),
        };
        if places.is_empty() {
            places.push(Place::new(PlaceKind::Path, Some(path.clone()), Outcome::Searched, ""));
        }
        let plugin = self.finder(false).at(&path, self.options.name.as_deref());
        let mut contenders = self.built_in();
        contenders.insert(0, plugin);
        choice::only(&contenders, places, 0, &reason)
    }

    #[cfg(not(feature = "plugins"))]
    fn at_path(&self, path: PathBuf, places: Vec<Place>) -> Result<Opened, OpenError> {
        let what = format!("{BACKEND} is the path `{}`, and this program loads no plugins", path.display());
        let error = Error::new(ErrorKind::Unsupported, OPERATION, what)
            .with_hint("build with the feature `plugins`, or set it to the name of a backend that is built in");
        Err(OpenError { error, report: LoadReport { places, candidates: Vec::new() } })
    }
}
