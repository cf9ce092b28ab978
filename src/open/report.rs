//! The load report: every place and every backend, with its outcome.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use highwater_hal::OpenFailure;
use highwater_hal::{Backend, Error, ErrorKind, display_foreign};

/// The operation that errors of this folder name.
pub(super) const OPERATION: &str = "open";

/// Enums whose values have words for reports.
macro_rules! worded {
    ($($(#[$attribute:meta])* enum $name:ident { $($(#[doc = $doc:literal])+ $value:ident = $words:literal,)+ })+) => {$(
        $(#[$attribute])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum $name {
            $($(#[doc = $doc])+ $value,)+
        }

        impl $name {
            /// Every value once.
            #[allow(dead_code, reason = "only outcomes are read from their words")]
            const ALL: &'static [Self] = &[$(Self::$value),+];

            /// Returns the words of reports.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$value => $words),+ }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.as_str())
            }
        }
    )+};
}

worded! {
    /// The outcome for a backend, or for a place that is searched for plugins.
    enum Outcome {
        /// The backend was opened and returned.
        Taken = "taken",
        /// The backend opens, and was not requested.
        Usable = "usable",
        /// The backend was not tried; the reason says why.
        NotTried = "not tried",
        /// A vendor's library, or the plugin itself, could not be opened.
        LibraryMissing = "library missing",
        /// A symbol is missing in a vendor's library, or one that the plugin needs.
        SymbolMissing = "symbol missing",
        /// The libraries work, but there is no usable device.
        DeviceMissing = "no device",
        /// The backend was found, but is too old or is not supported by this version.
        Unsupported = "unsupported",
        /// Initialization failed in another way.
        Failed = "failed",
        /// Of a place: its variable or folder is not set.
        NotSet = "not set",
        /// Of a place: the folder does not exist, or contains no plugin.
        Absent = "absent",
        /// Of a place: its plugins are among the candidates.
        Searched = "searched",
        /// The plugin is for other machines, or its file is not a library.
        WrongPlatform = "wrong platform",
        /// The plugin's manifest is invalid; the reason names file and line.
        InvalidManifest = "invalid manifest",
        /// Another user could change the file, or it cannot be read.
        NotPermitted = "not permitted",
        /// The plugin's library has no entry point.
        NoEntryPoint = "no entry point",
        /// The plugin and this program have no version of the table in common.
        VersionOutOfRange = "version out of range",
        /// The plugin's table is invalid.
        BadTable = "bad table",
        /// The process that probed the plugin crashed.
        CrashedInProbe = "crashed in the probe",
        /// The process that probed the plugin did not end, and was killed.
        HungInProbe = "hung in the probe",
    }

    /// The kind of a place that is searched for plugins, in the order of the search.
    enum PlaceKind {
        /// A path from the caller.
        Path = "path",
        /// The environment variable `HIGHWATER_BACKEND`: a name or a path, used if the caller gave neither.
        BackendVariable = "HIGHWATER_BACKEND",
        /// A folder from the caller.
        SearchFolder = "search folder",
        /// A folder of the environment variable `HIGHWATER_PLUGIN_PATH`.
        PathVariable = "HIGHWATER_PLUGIN_PATH",
        /// The user's folder.
        UserFolder = "user folder",
        /// A folder of the system.
        SystemFolder = "system folder",
        /// The folder of the executable.
        Executable = "beside the executable",
    }
}

impl Outcome {
    /// Returns whether something exists and does not work. False if nothing exists.
    #[must_use]
    pub const fn is_broken(self) -> bool {
        !matches!(self, Self::Taken | Self::Usable | Self::NotTried | Self::NotSet | Self::Absent | Self::Searched)
    }

    /// Returns the outcome with these words.
    #[cfg_attr(not(feature = "plugins"), allow(dead_code, reason = "only probes send outcomes as words"))]
    pub(super) fn of_words(words: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|outcome| outcome.as_str() == words)
    }

    pub(super) fn of(error: &Error) -> Self {
        match error.kind() {
            ErrorKind::LibraryMissing => Self::LibraryMissing,
            ErrorKind::SymbolMissing => Self::SymbolMissing,
            ErrorKind::DeviceMissing => Self::DeviceMissing,
            ErrorKind::Unsupported => Self::Unsupported,
            _ => Self::Failed,
        }
    }
}

/// The origin of a backend.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// A part of this program, if its feature is on.
    BuiltIn,
    /// A library loaded at run time.
    #[non_exhaustive]
    Plugin {
        /// The manifest that names it; `None` if the library itself was found or given.
        manifest: Option<PathBuf>,
        /// The library, with all links resolved; `None` if the search ended before it was known.
        library: Option<PathBuf>,
    },
}

impl Origin {
    /// Returns the library of a plugin.
    #[must_use]
    pub fn library(&self) -> Option<&Path> {
        match self {
            Self::BuiltIn => None,
            Self::Plugin { library, .. } => library.as_deref(),
        }
    }

    /// Returns the manifest of a plugin.
    #[must_use]
    pub fn manifest(&self) -> Option<&Path> {
        match self {
            Self::BuiltIn => None,
            Self::Plugin { manifest, .. } => manifest.as_deref(),
        }
    }
}

impl fmt::Display for Origin {
    /// Writes `built in`, or the file that was found: the manifest, else the library.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self, self.manifest().or(self.library())) {
            (Self::BuiltIn, _) => f.pad("built in"),
            (_, Some(file)) => display_foreign(file).fmt(f),
            (_, None) => f.pad("plugin"),
        }
    }
}

/// One backend, and the reason it was or was not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Candidate {
    /// The backend's name; for a plugin without a readable manifest, the name of its file.
    pub name: String,
    /// The origin.
    pub origin: Origin,
    /// The outcome.
    pub outcome: Outcome,
    /// The reason.
    pub reason: String,
    /// The remedy; may be empty.
    pub hint: String,
    /// The libraries that did not open, with the loader's message.
    pub tried: Vec<OpenFailure>,
    /// Warnings of a plugin, a plugin that was not probed, or an unsafe file that was allowed.
    pub notes: Vec<String>,
}

/// A place that was searched for plugins, and the outcome.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Place {
    /// The kind of place.
    pub kind: PlaceKind,
    /// The folder or file, or the value of `HIGHWATER_BACKEND`; `None` if it is not set.
    pub path: Option<PathBuf>,
    /// The outcome.
    pub outcome: Outcome,
    /// The reason; may be empty.
    pub reason: String,
    /// The remedy; may be empty.
    pub hint: String,
}

impl Place {
    #[cfg_attr(not(feature = "plugins"), allow(dead_code, reason = "without plugins there is only one place"))]
    pub(super) fn new(kind: PlaceKind, path: Option<PathBuf>, outcome: Outcome, reason: impl Into<String>) -> Self {
        Self { kind, path, outcome, reason: reason.into(), hint: String::new() }
    }
}

impl fmt::Display for Place {
    /// Writes `/usr/lib/highwater/plugins (absent)`, or `HIGHWATER_BACKEND=mock`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.path {
            Some(value) if self.kind == PlaceKind::BackendVariable => {
                write!(f, "{}={}", self.kind, display_foreign(value))
            }
            Some(path) => write!(f, "{} ({})", display_foreign(path), self.outcome),
            None => write!(f, "{} ({})", self.kind, self.outcome),
        }
    }
}

/// Every place that was searched and every backend that was found, with its outcome.
///
/// `Display` prints a line for each backend, with its hint and notes below it, a line for each broken place, and one line with
/// all other places.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct LoadReport {
    /// The places, in the order of the search; empty if none was needed.
    pub places: Vec<Place>,
    /// The candidates, in order of preference.
    pub candidates: Vec<Candidate>,
}

impl LoadReport {
    /// Returns the candidate that was taken.
    #[must_use]
    pub fn taken(&self) -> Option<&Candidate> {
        self.candidates.iter().find(|candidate| candidate.outcome == Outcome::Taken)
    }

    /// Returns the places that exist and cannot be used.
    pub fn broken_places(&self) -> impl Iterator<Item = &Place> {
        self.places.iter().filter(|place| place.outcome.is_broken() || !place.hint.is_empty())
    }

    /// Returns a line that names all other places; `None` if there are none.
    #[must_use]
    pub fn quiet_places(&self) -> Option<String> {
        let quiet = self.places.iter().filter(|place| !place.outcome.is_broken() && place.hint.is_empty());
        let quiet: Vec<String> = quiet.map(ToString::to_string).collect();
        (!quiet.is_empty()).then(|| format!("plugins looked for in: {}", quiet.join(", ")))
    }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let column = |texts: &mut dyn Iterator<Item = &str>| texts.map(str::len).max().unwrap_or(0) + 2;
        let shown: Vec<String> =
            self.candidates.iter().map(|candidate| display_foreign(&candidate.name).to_string()).collect();
        let names = column(&mut shown.iter().map(String::as_str));
        let outcomes = column(&mut self.candidates.iter().map(|candidate| candidate.outcome.as_str()));
        let margin = names + outcomes;
        let mut line_break = "";
        for (name, Candidate { outcome, reason, hint, notes, .. }) in shown.iter().zip(&self.candidates) {
            write!(f, "{line_break}{name:<names$}{outcome:<outcomes$}{reason}")?;
            line_break = "\n";
            if !hint.is_empty() {
                write!(f, "\n{:<margin$}hint: {hint}", "")?;
            }
            for note in notes {
                write!(f, "\n{:<margin$}note: {note}", "")?;
            }
        }
        for place in self.broken_places() {
            write!(f, "{line_break}{}: {place}: {}", place.kind, place.reason)?;
            line_break = "\n";
            if !place.hint.is_empty() {
                write!(f, "; {}", place.hint)?;
            }
        }
        self.quiet_places().map_or(Ok(()), |places| write!(f, "{line_break}{places}"))
    }
}

/// An opened backend, and the reason for the choice.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Opened {
    /// The backend.
    pub backend: Arc<dyn Backend>,
    /// The outcome for each backend and each place.
    pub report: LoadReport,
}

/// The error of opening a backend, with the report.
///
/// The kind of the error follows from the [`Outcome`] of the requested backend:
///
/// | outcome | kind |
/// | --- | --- |
/// | [`LibraryMissing`](Outcome::LibraryMissing) | `LibraryMissing` |
/// | [`SymbolMissing`](Outcome::SymbolMissing), [`NoEntryPoint`](Outcome::NoEntryPoint) | `SymbolMissing` |
/// | [`DeviceMissing`](Outcome::DeviceMissing) | `DeviceMissing` |
/// | [`Unsupported`](Outcome::Unsupported), [`WrongPlatform`](Outcome::WrongPlatform), [`VersionOutOfRange`](Outcome::VersionOutOfRange), [`BadTable`](Outcome::BadTable) | `Unsupported` |
/// | [`InvalidManifest`](Outcome::InvalidManifest) | `InvalidArgument` |
/// | [`NotPermitted`](Outcome::NotPermitted) | `PermissionDenied` |
/// | [`CrashedInProbe`](Outcome::CrashedInProbe), [`HungInProbe`](Outcome::HungInProbe) | `Vendor` |
/// | [`Failed`](Outcome::Failed) | the backend's own |
///
/// No backend of the requested name is `UnknownBackend`. If the best one is requested and none works, the kind is
/// `DeviceMissing`; with a fallback, that of the fallback's error.
///
/// `?` converts it to an [`Error`], or boxes it unchanged. Either way the report is its
/// [`source`](std::error::Error::source). `Debug`, which `fn main() -> Result<_, _>` prints, shows the error alone.
#[derive(Clone, thiserror::Error)]
#[error("{error}")]
#[non_exhaustive]
pub struct OpenError {
    /// The error.
    pub error: Error,
    /// The outcome for each backend and each place.
    #[source]
    pub report: LoadReport,
}

impl fmt::Debug for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.error, f)
    }
}

/// The source of an [`OpenError`].
impl std::error::Error for LoadReport {}

impl From<OpenError> for Error {
    fn from(error: OpenError) -> Self {
        error.error.with_source(error.report)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(name: &str, outcome: Outcome, reason: &str) -> Candidate {
        let (hint, tried, notes) = (String::new(), Vec::new(), Vec::new());
        Candidate { name: name.into(), origin: Origin::BuiltIn, outcome, reason: reason.into(), hint, tried, notes }
    }

    #[test]
    fn a_report_prints_one_line_for_each_candidate_and_its_hint_below() {
        let taken = candidate("mock", Outcome::Taken, "asked for");
        let mut missing = candidate("cuda", Outcome::LibraryMissing, "no driver");
        missing.hint = "install it".into();
        let report = LoadReport { candidates: vec![missing, taken], ..LoadReport::default() };
        let expected = "cuda  library missing  no driver\n                       hint: install it\n\
                        mock  taken            asked for";
        assert_eq!(report.to_string(), expected);
        assert_eq!(report.taken().unwrap().name, "mock");
    }

    #[test]
    fn absent_places_are_one_line_and_broken_ones_a_line_each() {
        let place = |kind, path: Option<&str>, outcome, reason: &str| {
            Place::new(kind, path.map(PathBuf::from), outcome, reason)
        };
        let mut file = place(PlaceKind::UserFolder, Some("/u"), Outcome::Failed, "it is no folder");
        file.hint = "remove it".into();
        let report = LoadReport {
            places: vec![
                place(PlaceKind::PathVariable, None, Outcome::NotSet, ""),
                file,
                place(PlaceKind::SystemFolder, Some("/s"), Outcome::Absent, ""),
            ],
            candidates: Vec::new(),
        };
        let expected = "user folder: /u (failed): it is no folder; remove it\n\
                        plugins looked for in: HIGHWATER_PLUGIN_PATH (not set), /s (absent)";
        assert_eq!(report.to_string(), expected);
    }

    #[test]
    fn an_error_is_a_paragraph_and_has_the_report_behind_it() {
        let taken = candidate("cuda", Outcome::LibraryMissing, "no driver");
        let report = LoadReport { candidates: vec![taken], ..LoadReport::default() };
        let error = Error::new(ErrorKind::LibraryMissing, "open", "no driver").with_hint("install it");
        let error = OpenError { error, report };
        assert_eq!(format!("{error:?}"), "open: library missing: no driver\nhint: install it");
        let boxed: Box<dyn std::error::Error + Send + Sync> = error.clone().into();
        let source = boxed.source().unwrap();
        assert_eq!(source.to_string(), "cuda  library missing  no driver");
        let converted: Box<dyn std::error::Error> = Error::from(error).into();
        assert_eq!(converted.source().unwrap().downcast_ref::<LoadReport>(), source.downcast_ref());
    }

    #[test]
    fn outcomes_are_known_by_their_words() {
        for &outcome in Outcome::ALL {
            assert_eq!(Outcome::of_words(outcome.as_str()), Some(outcome));
        }
        assert_eq!(Outcome::of_words("splendid"), None);
    }
}
