//! The load report: every place and every backend, and what became of each.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use highwater_hal::OpenFailure;
use highwater_hal::{Backend, Error, ErrorKind, display_foreign};

/// What became of a backend, or of a place where plugins are looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outcome {
    /// It was opened and is the one returned.
    Taken,
    /// It opens; nobody asked to keep it.
    Usable,
    /// It was not tried; the reason says why.
    NotTried,
    /// A library could not be opened: a vendor's, or the plugin itself.
    LibraryMissing,
    /// A symbol is missing: in a vendor's library, or one that the plugin needs.
    SymbolMissing,
    /// The libraries work, but there is no usable device.
    DeviceMissing,
    /// It was found, but this version does not drive it, or it is too old.
    Unsupported,
    /// It failed in another way, when it was initialised.
    Failed,
    /// Of a place: the variable or the folder that would name it is not set.
    NotSet,
    /// Of a place: there is no such folder, or no plugin in it.
    Absent,
    /// Of a place: its plugins are among the candidates.
    Searched,
    /// The plugin is for other machines, or its file is no library.
    WrongPlatform,
    /// The plugin's manifest is wrong: file, line and reason are told.
    InvalidManifest,
    /// Another user could change what would be loaded, or it cannot be read.
    NotPermitted,
    /// The plugin's library has no entry point.
    NoEntryPoint,
    /// The plugin's versions of the table and those of this program do not meet.
    VersionOutOfRange,
    /// The plugin's table is not as it has to be.
    BadTable,
    /// The process that probed the plugin crashed.
    CrashedInProbe,
    /// The process that probed the plugin did not come to an end, and was killed.
    HungInProbe,
}

impl Outcome {
    /// All of them, each once.
    const ALL: [Self; 19] = [
        Self::Taken,
        Self::Usable,
        Self::NotTried,
        Self::LibraryMissing,
        Self::SymbolMissing,
        Self::DeviceMissing,
        Self::Unsupported,
        Self::Failed,
        Self::NotSet,
        Self::Absent,
        Self::Searched,
        Self::WrongPlatform,
        Self::InvalidManifest,
        Self::NotPermitted,
        Self::NoEntryPoint,
        Self::VersionOutOfRange,
        Self::BadTable,
        Self::CrashedInProbe,
        Self::HungInProbe,
    ];

    /// The outcome as words, as it stands in reports.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Taken => "taken",
            Self::Usable => "usable",
            Self::NotTried => "not tried",
            Self::LibraryMissing => "library missing",
            Self::SymbolMissing => "symbol missing",
            Self::DeviceMissing => "no device",
            Self::Unsupported => "unsupported",
            Self::Failed => "failed",
            Self::NotSet => "not set",
            Self::Absent => "absent",
            Self::Searched => "searched",
            Self::WrongPlatform => "wrong platform",
            Self::InvalidManifest => "invalid manifest",
            Self::NotPermitted => "not permitted",
            Self::NoEntryPoint => "no entry point",
            Self::VersionOutOfRange => "version out of range",
            Self::BadTable => "bad table",
            Self::CrashedInProbe => "crashed in the probe",
            Self::HungInProbe => "hung in the probe",
        }
    }

    /// Whether something is there and does not work, as against nothing being there.
    #[must_use]
    pub const fn is_broken(self) -> bool {
        !matches!(self, Self::Taken | Self::Usable | Self::NotTried | Self::NotSet | Self::Absent | Self::Searched)
    }

    /// The outcome of these words.
    #[cfg_attr(not(feature = "plugins"), allow(dead_code, reason = "only probes tell outcomes as words"))]
    pub(super) fn of_words(words: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|outcome| outcome.as_str() == words)
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

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Where a backend comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// It is, or would be with its feature, a part of this program.
    BuiltIn,
    /// A library that is loaded at run time.
    #[non_exhaustive]
    Plugin {
        /// The manifest that names it; `None` where the library itself was found or given.
        manifest: Option<PathBuf>,
        /// The library, with all links resolved; `None` where the search ended before it was known.
        library: Option<PathBuf>,
    },
}

impl Origin {
    /// The library of a plugin.
    #[must_use]
    pub fn library(&self) -> Option<&Path> {
        match self {
            Self::BuiltIn => None,
            Self::Plugin { library, .. } => library.as_deref(),
        }
    }

    /// The manifest of a plugin.
    #[must_use]
    pub fn manifest(&self) -> Option<&Path> {
        match self {
            Self::BuiltIn => None,
            Self::Plugin { manifest, .. } => manifest.as_deref(),
        }
    }
}

impl fmt::Display for Origin {
    /// `built in`, or the file that was found: the manifest, else the library.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self, self.manifest().or(self.library())) {
            (Self::BuiltIn, _) => f.pad("built in"),
            (_, Some(file)) => display_foreign(file).fmt(f),
            (_, None) => f.pad("plugin"),
        }
    }
}

/// One backend, and why it was or was not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Candidate {
    /// The backend's name. That of a plugin is the name of its file where its manifest could not be read.
    pub name: String,
    /// Where it comes from.
    pub origin: Origin,
    /// What became of it.
    pub outcome: Outcome,
    /// Why.
    pub reason: String,
    /// What to do about it; may be empty.
    pub hint: String,
    /// The libraries that were tried and did not open, with the loader's words.
    pub tried: Vec<OpenFailure>,
    /// What is worth knowing all the same: warnings of a plugin, a plugin that was not probed, an unsafe file that was allowed.
    pub notes: Vec<String>,
}

/// What kind of place a plugin was looked for in. They are tried in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PlaceKind {
    /// A path that the caller gave.
    Path,
    /// The environment variable `HIGHWATER_BACKEND`: a name or a path, where the caller left the choice open.
    BackendVariable,
    /// A folder that the caller gave.
    SearchFolder,
    /// A folder of the environment variable `HIGHWATER_PLUGIN_PATH`.
    PathVariable,
    /// The user's folder.
    UserFolder,
    /// A folder of the system.
    SystemFolder,
    /// The folder of the executable.
    Executable,
}

impl PlaceKind {
    /// The kind as words, as it stands in reports.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Path => "path",
            Self::BackendVariable => "HIGHWATER_BACKEND",
            Self::SearchFolder => "search folder",
            Self::PathVariable => "HIGHWATER_PLUGIN_PATH",
            Self::UserFolder => "user folder",
            Self::SystemFolder => "system folder",
            Self::Executable => "beside the executable",
        }
    }
}

impl fmt::Display for PlaceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A place where plugins were looked for, and what became of it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Place {
    /// What kind of place it is.
    pub kind: PlaceKind,
    /// The folder or file, or the value of `HIGHWATER_BACKEND`; `None` where it is not set.
    pub path: Option<PathBuf>,
    /// What became of it.
    pub outcome: Outcome,
    /// Why; may be empty.
    pub reason: String,
    /// What to do about it; may be empty.
    pub hint: String,
}

impl Place {
    #[cfg_attr(not(feature = "plugins"), allow(dead_code, reason = "without plugins there is one place only"))]
    pub(super) fn new(kind: PlaceKind, path: Option<PathBuf>, outcome: Outcome, reason: impl Into<String>) -> Self {
        Self { kind, path, outcome, reason: reason.into(), hint: String::new() }
    }
}

impl fmt::Display for Place {
    /// `/usr/lib/highwater/plugins (absent)`; `HIGHWATER_BACKEND=mock`.
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

/// Every place where a backend was looked for and every backend that was found, and what became of each.
///
/// `Display` prints one line for each backend, with a hint and notes under it where there are any; a line for each place that is
/// broken; and one line with all other places.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct LoadReport {
    /// The places, in the order in which they count; none where none was needed.
    pub places: Vec<Place>,
    /// The candidates, in order of preference.
    pub candidates: Vec<Candidate>,
}

impl LoadReport {
    /// The candidate that was taken.
    #[must_use]
    pub fn taken(&self) -> Option<&Candidate> {
        self.candidates.iter().find(|candidate| candidate.outcome == Outcome::Taken)
    }

    /// The places that are broken: there, and of no use.
    pub fn broken_places(&self) -> impl Iterator<Item = &Place> {
        self.places.iter().filter(|place| place.outcome.is_broken() || !place.hint.is_empty())
    }

    /// One line that names all places that are not broken; `None` where there is none.
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

/// A backend that was opened, and how it was chosen.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Opened {
    /// The backend.
    pub backend: Arc<dyn Backend>,
    /// Why it was taken, and why the others were not.
    pub report: LoadReport,
}

/// No backend was opened: why, and what was tried.
///
/// `?` converts it to an [`Error`], or boxes it unchanged. Either way the report is its
/// [`source`](std::error::Error::source). `Debug`, which `fn main() -> Result<_, _>` prints, shows the error alone.
#[derive(Clone)]
#[non_exhaustive]
pub struct OpenError {
    /// What went wrong.
    pub error: Error,
    /// What became of each backend, and of each place.
    pub report: LoadReport,
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.error, f)
    }
}

impl fmt::Debug for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.error, f)
    }
}

impl std::error::Error for OpenError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.report)
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
        for outcome in Outcome::ALL {
            assert_eq!(Outcome::of_words(outcome.as_str()), Some(outcome));
        }
        assert_eq!(Outcome::of_words("splendid"), None);
    }
}
