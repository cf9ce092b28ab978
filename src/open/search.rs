//! One search: a request, in one environment.

use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use highwater_hal::{Error, ErrorKind, display_foreign};

use super::built_in::{KNOWN, Known};
use super::environment::{BACKEND, Environment};
#[cfg(feature = "plugins")]
use super::plugins::{Finder, Means, Probing};
use super::report::OPERATION;
use super::report::{LoadReport, OpenError, Opened, Outcome, Place, PlaceKind};
use super::{OpenOptions, choice};
use choice::Contender;

const BY_VARIABLE: &str = " by HIGHWATER_BACKEND";

pub(super) struct Search<'a> {
    options: &'a OpenOptions,
    environment: Environment,
    built_in: &'static [Known],
    #[cfg(feature = "plugins")]
    means: Means,
}

/// The request: a path, a name, or the best backend.
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
            built_in: &KNOWN,
            #[cfg(feature = "plugins")]
            means: Means::real(),
        }
    }

    /// Searches a machine that a test describes, with these built-in backends and without any variable.
    #[cfg(test)]
    pub(super) fn of_machine(options: &'a OpenOptions, built_in: &'static [Known]) -> Self {
        Self { environment: Environment::default(), built_in, ..Self::of_process(options) }
    }

    pub(super) fn open(&self) -> Result<Opened, OpenError> {
        let (wanted, mut places) = self.wanted().map_err(|error| {
            let report = LoadReport::default();
            OpenError { error, report }
        })?;
        match wanted {
            Wanted::Path(path) => self.at_path(&path, places),
            Wanted::Name(name) => {
                let mut contenders = self.built_in();
                // A built-in backend comes first, so no plugin matters.
                if !super::backends().contains(&name.as_str()) {
                    self.add_plugins(&mut contenders, &mut places, false);
                }
                choice::by_name(&contenders, places, &name, self.by())
            }
            Wanted::Best => {
                let mut contenders = self.built_in();
                self.add_plugins(&mut contenders, &mut places, true);
                choice::best(&contenders, places, self.options.fallback)
            }
        }
    }

    pub(super) fn survey(&self) -> LoadReport {
        let mut contenders = self.built_in();
        // An invalid request is an error of `open`, not of a survey.
        let (wanted, mut places) = self.wanted().unwrap_or((Wanted::Best, Vec::new()));
        self.add_given(&mut contenders, &wanted);
        self.add_plugins(&mut contenders, &mut places, true);
        choice::survey(&contenders, places)
    }

    /// Returns the request of the options, else of the environment, and the places that were read for it.
    fn wanted(&self) -> Result<(Wanted, Vec<Place>), Error> {
        if let Some(path) = &self.options.path {
            let place = Place::new(PlaceKind::Path, Some(path.clone()), Outcome::Searched, "");
            return Ok((Wanted::Path(path.clone()), vec![place]));
        }
        if let Some(name) = &self.options.name {
            return Ok((Wanted::Name(name.clone()), Vec::new()));
        }
        let place = |path, outcome, reason: &str| Place::new(PlaceKind::BackendVariable, path, outcome, reason);
        let Some(value) = self.environment.get(BACKEND) else {
            let place = if self.environment.secure {
                let reason = "the program has more rights than its caller, so the environment is ignored";
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
            let what = format!("{BACKEND} is `{}`, which is not a name", display_foreign(value));
            Error::new(ErrorKind::UnknownBackend, OPERATION, what)
                .with_hint("set it to the name of a backend, or to the path of a plugin, with a `/` in it")
        })?;
        Ok((Wanted::Name(name.to_owned()), vec![place(Some(name.into()), Outcome::Searched, "")]))
    }

    /// Returns the source of a request for a name or a path, to append to "asked for".
    fn by(&self) -> &'static str {
        if self.options.path.is_some() || self.options.name.is_some() { "" } else { BY_VARIABLE }
    }

    fn built_in(&self) -> Vec<Contender<'_>> {
        self.built_in.iter().map(Contender::from).collect()
    }

    #[cfg(feature = "plugins")]
    fn finder(&self, every: bool) -> Finder<'_> {
        let probing = Probing::new(self.options, &self.environment, every);
        Finder::new(self.options, &self.environment, &self.means, probing)
    }

    /// Adds the plugins and their places, before the backends that drive no hardware. With `every`, each may be opened.
    #[cfg(feature = "plugins")]
    fn add_plugins<'s>(&'s self, contenders: &mut Vec<Contender<'s>>, places: &mut Vec<Place>, every: bool) {
        if !self.options.plugins {
            return;
        }
        let (plugins, found) = self.finder(every).all();
        places.extend(found);
        let before = contenders.iter().position(|one| one.real == Some(false)).unwrap_or(contenders.len());
        // A plugin that a built-in backend shadows is never tried, so it comes last.
        let (last, plugins): (Vec<_>, Vec<_>) =
            plugins.into_iter().partition(|plugin| super::backends().contains(&plugin.name.as_str()));
        contenders.splice(before..before, plugins);
        contenders.extend(last);
    }

    #[cfg(not(feature = "plugins"))]
    fn add_plugins<'s>(&'s self, _: &mut Vec<Contender<'s>>, _: &mut Vec<Place>, _: bool) {}

    /// Adds the plugin of a given path, before all others.
    #[cfg(feature = "plugins")]
    fn add_given<'s>(&'s self, contenders: &mut Vec<Contender<'s>>, wanted: &Wanted) {
        if let Wanted::Path(path) = wanted {
            contenders.insert(0, self.finder(true).at(path, self.options.name.as_deref()));
        }
    }

    #[cfg(not(feature = "plugins"))]
    fn add_given<'s>(&'s self, _: &mut Vec<Contender<'s>>, _: &Wanted) {}

    #[cfg(feature = "plugins")]
    fn at_path(&self, path: &Path, places: Vec<Place>) -> Result<Opened, OpenError> {
        let reason = format!("`{}` was asked for{}", display_foreign(path), self.by());
        let mut contenders = vec![self.finder(false).at(path, self.options.name.as_deref())];
        contenders.extend(self.built_in());
        choice::only(&contenders, places, 0, &reason)
    }

    #[cfg(not(feature = "plugins"))]
    fn at_path(&self, path: &Path, places: Vec<Place>) -> Result<Opened, OpenError> {
        let what = format!("{BACKEND} is the path `{}`, and this program loads no plugins", display_foreign(path));
        let error = Error::new(ErrorKind::Unsupported, OPERATION, what)
            .with_hint("build with the feature `plugins`, or set it to the name of a backend that is built in");
        Err(OpenError { error, report: LoadReport { places, candidates: Vec::new() } })
    }
}

impl OpenOptions {
    /// Opens a backend.
    ///
    /// # Errors
    /// The errors of [`open`](crate::open) and [`open_best`](crate::open_best). For a path, those of a plugin.
    pub fn open(&self) -> Result<Opened, OpenError> {
        Search::of_process(self).open()
    }

    /// Tries every backend, including a given path, and keeps none.
    #[must_use]
    pub fn survey(&self) -> LoadReport {
        Search::of_process(self).survey()
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::super::Fallback;
    use super::*;

    fn wanted(options: &OpenOptions, environment: Environment) -> Result<(Wanted, Vec<Place>), Error> {
        let search = Search { environment, ..Search::of_process(options) };
        search.wanted()
    }

    fn variable(value: &str) -> Environment {
        Environment::default().with(BACKEND, value)
    }

    #[test]
    fn the_variable_counts_where_the_caller_left_the_choice_open() {
        let open = OpenOptions::new();
        let name = || Wanted::Name("mock".into());
        assert_eq!(wanted(&open, variable("mock")).unwrap().0, name());
        let (path, places) = wanted(&open, variable("./libx.so")).unwrap();
        assert_eq!(path, Wanted::Path("./libx.so".into()));
        assert_eq!(places[0].to_string(), "HIGHWATER_BACKEND=./libx.so");
        let (best, places) = wanted(&open, variable("")).unwrap();
        assert_eq!((best, places[0].outcome), (Wanted::Best, Outcome::NotSet));
        assert_eq!(wanted(&OpenOptions::new().with_name("mock"), variable("cuda")).unwrap().0, name());
    }

    #[test]
    fn in_a_program_with_more_rights_the_variable_does_not_count() {
        let mut environment = Environment::default();
        environment.secure = true;
        let (best, places) = wanted(&OpenOptions::new(), environment).unwrap();
        assert_eq!((best, places[0].outcome), (Wanted::Best, Outcome::NotTried));
        assert!(places[0].reason.contains("more rights"), "{}", places[0]);
    }

    #[test]
    fn a_name_that_is_no_text_is_refused() {
        let environment = Environment::default().with(BACKEND, OsStr::from_bytes(b"m\xffck"));
        let error = wanted(&OpenOptions::new(), environment).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnknownBackend);
        assert!(error.message().contains("HIGHWATER_BACKEND") && !error.hint().is_empty(), "{error}");
    }

    #[cfg(feature = "plugins")]
    #[test]
    fn a_path_is_opened_before_any_built_in_backend_and_none_in_its_place() {
        let options =
            OpenOptions::new().with_path("/nowhere/libmock.so").with_name("mock").with_fallback(Fallback::Mock);
        let OpenError { error, report } = options.open().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::LibraryMissing);
        assert_eq!(report.candidates.len(), 1 + KNOWN.len(), "{report}");
        assert_eq!(report.candidates[0].outcome, Outcome::LibraryMissing, "{report}");
        assert!(report.candidates[1..].iter().all(|other| other.outcome == Outcome::NotTried), "{report}");
        assert_eq!(options.survey().candidates[0].outcome, Outcome::LibraryMissing);
    }
}
