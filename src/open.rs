//! Opening a backend, with an account of every candidate.
//!
//! Two rules. A backend that was asked for by name is opened or refused, and never replaced by another: a run that was
//! meant for a GPU must not pass on the mock. And nothing is left out of the report: each backend that Highwater knows
//! stands in it with what became of it and why, so that a user who gets another one than expected can read the reason.

use std::fmt;
use std::sync::Arc;

use highwater_core::driver::{OpenFailure, Unavailable};
use highwater_core::{Backend, Error, ErrorKind, Result};

/// A backend that this version knows, whether or not it was built in.
struct Known {
    /// Its name, which is also that of its feature.
    name: &'static str,
    /// Whether there is hardware behind it.
    real: bool,
    /// Opens it; `None` where its feature is off.
    open: Option<Opener>,
}

type Opener = fn() -> Result<Arc<dyn Backend>, Unavailable>;

/// In order of preference.
static KNOWN: [Known; 3] = [
    Known {
        name: "cuda",
        real: true,
        #[cfg(feature = "cuda")]
        open: Some(highwater_cuda::open),
        #[cfg(not(feature = "cuda"))]
        open: None,
    },
    Known {
        name: "rocm",
        real: true,
        #[cfg(feature = "rocm")]
        open: Some(highwater_rocm::open),
        #[cfg(not(feature = "rocm"))]
        open: None,
    },
    Known {
        name: "mock",
        real: false,
        #[cfg(feature = "mock")]
        open: Some(open_mock),
        #[cfg(not(feature = "mock"))]
        open: None,
    },
];

/// Opens the mock as the environment describes it.
#[cfg(feature = "mock")]
fn open_mock() -> Result<Arc<dyn Backend>, Unavailable> {
    let options = highwater_mock::MockOptions::from_environment()?;
    Ok(highwater_mock::MockGpu::open(options)?)
}

/// What became of a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outcome {
    /// It was opened and is the one returned.
    Taken,
    /// It opens; nobody asked to keep it.
    Usable,
    /// It was not tried, because another was taken or asked for, or its feature is off.
    NotTried,
    /// A vendor library could not be opened.
    LibraryMissing,
    /// A vendor library lacks a required symbol.
    SymbolMissing,
    /// The libraries work, but there is no usable device.
    DeviceMissing,
    /// It was found, but this version does not drive it, or it is too old.
    Unsupported,
    /// It failed in another way.
    Failed,
}

impl Outcome {
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
        }
    }

    fn of(error: &Error) -> Self {
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

/// One backend, and why it was or was not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Candidate {
    /// The backend's name.
    pub name: &'static str,
    /// What became of it.
    pub outcome: Outcome,
    /// Why.
    pub reason: String,
    /// What to do about it; may be empty.
    pub hint: String,
    /// The libraries that were tried and did not open, with the loader's words.
    pub tried: Vec<OpenFailure>,
}

impl Candidate {
    fn new(known: &Known, outcome: Outcome, reason: impl Into<String>) -> Self {
        Self { name: known.name, outcome, reason: reason.into(), hint: String::new(), tried: Vec::new() }
    }

    fn failed(known: &Known, unavailable: Unavailable) -> Self {
        let error = &unavailable.error;
        Self {
            name: known.name,
            outcome: Outcome::of(error),
            reason: error.message().to_owned(),
            hint: error.hint().to_owned(),
            tried: unavailable.tried,
        }
    }

    /// A candidate that was left alone: because its feature is off, or else for `reason`.
    fn not_tried(known: &Known, reason: impl Into<String>) -> Self {
        if known.open.is_some() {
            return Self::new(known, Outcome::NotTried, reason);
        }
        let mut candidate = Self::new(known, Outcome::NotTried, "it is not built in");
        candidate.hint = format!("build with the feature `{}`", known.name);
        candidate
    }
}

/// Every backend that this version knows, in order of preference, and what became of each.
///
/// `Display` prints one line for each, with a hint under it where there is one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct LoadReport {
    /// The candidates, in order of preference.
    pub candidates: Vec<Candidate>,
}

impl LoadReport {
    /// The candidate that was taken.
    #[must_use]
    pub fn taken(&self) -> Option<&Candidate> {
        self.candidates.iter().find(|candidate| candidate.outcome == Outcome::Taken)
    }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, candidate) in self.candidates.iter().enumerate() {
            let Candidate { name, outcome, reason, hint, .. } = candidate;
            let line_break = if index == 0 { "" } else { "\n" };
            write!(f, "{line_break}{name:<6}{outcome:<17}{reason}")?;
            if !hint.is_empty() {
                write!(f, "\n{:<23}hint: {hint}", "")?;
            }
        }
        Ok(())
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
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct OpenError {
    /// What went wrong.
    pub error: Error,
    /// What became of each backend.
    pub report: LoadReport,
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for OpenError {}

impl From<OpenError> for Error {
    fn from(error: OpenError) -> Self {
        error.error
    }
}

/// The operation that errors of this module name.
const OPERATION: &str = "open";

/// The names of the backends that were built in, in order of preference.
///
/// ```
/// assert_eq!(highwater::backends().contains(&"cuda"), cfg!(feature = "cuda"));
/// ```
#[must_use]
pub fn backends() -> &'static [&'static str] {
    &[
        #[cfg(feature = "cuda")]
        "cuda",
        #[cfg(feature = "rocm")]
        "rocm",
        #[cfg(feature = "mock")]
        "mock",
    ]
}

/// Opens the backend `name`, and no other in its place.
///
/// # Errors
/// `UnknownBackend` for a name that does not exist or was not built in; otherwise what the backend said:
/// `LibraryMissing`, `SymbolMissing`, `DeviceMissing`, `Unsupported`, or another kind.
pub fn open(name: &str) -> Result<Opened, OpenError> {
    let others = format!("`{name}` was asked for");
    let Some((asked, opener)) =
        KNOWN.iter().find(|known| known.name == name).and_then(|known| Some((known, known.open?)))
    else {
        let candidates = KNOWN.iter().map(|known| Candidate::not_tried(known, others.as_str())).collect();
        return Err(OpenError { error: unknown(name), report: LoadReport { candidates } });
    };
    let report = |asked_for: Candidate| {
        let rest = |known: &Known| {
            if known.name == asked.name { asked_for.clone() } else { Candidate::not_tried(known, others.as_str()) }
        };
        LoadReport { candidates: KNOWN.iter().map(rest).collect() }
    };
    match opener() {
        Ok(backend) => Ok(Opened { backend, report: report(Candidate::new(asked, Outcome::Taken, others.as_str())) }),
        Err(unavailable) => {
            let error = unavailable.error.clone();
            Err(OpenError { error, report: report(Candidate::failed(asked, unavailable)) })
        }
    }
}

/// Opens the best backend with real hardware that works here; where there is none and `allow_mock` is set, the mock.
///
/// # Errors
/// With what became of each backend in the message and as data. `DeviceMissing`; but where the mock was allowed, which
/// needs no device, what the mock gave.
pub fn open_auto(allow_mock: bool) -> Result<Opened, OpenError> {
    let mut taken: Option<(&'static str, Arc<dyn Backend>)> = None;
    let mut mock_failure = None;
    let mut candidates = Vec::with_capacity(KNOWN.len());
    for known in &KNOWN {
        candidates.push(match (known.open, &taken) {
            (Some(_), Some((better, _))) => Candidate::not_tried(known, format!("`{better}` was taken")),
            (Some(_), None) if !known.real && !allow_mock => {
                Candidate::not_tried(known, "it is no real device, and was not allowed")
            }
            (Some(open), None) => match open() {
                Ok(backend) => {
                    let reason = if known.real {
                        "the first real device that works, in order of preference"
                    } else {
                        "no real device works here, and the mock was allowed"
                    };
                    taken = Some((known.name, backend));
                    Candidate::new(known, Outcome::Taken, reason)
                }
                Err(unavailable) => {
                    if !known.real {
                        mock_failure = Some(unavailable.error.clone());
                    }
                    Candidate::failed(known, unavailable)
                }
            },
            (None, _) => Candidate::not_tried(known, ""),
        });
    }
    let report = LoadReport { candidates };
    match taken {
        Some((_, backend)) => Ok(Opened { backend, report }),
        None => Err(OpenError { error: nothing_usable(&report, mock_failure.as_ref()), report }),
    }
}

/// Tries every backend that was built in and keeps none.
///
/// The vendors' libraries that open stay open, because a driver cannot be unloaded.
#[must_use]
pub fn survey() -> LoadReport {
    let look = |known: &Known| match known.open.map(|open| open()) {
        Some(Ok(backend)) => {
            let devices = match backend.device_count() {
                1 => "1 device".to_owned(),
                count => format!("{count} devices"),
            };
            Candidate::new(known, Outcome::Usable, format!("{}, {devices}", backend.identity().description))
        }
        Some(Err(unavailable)) => Candidate::failed(known, unavailable),
        None => Candidate::not_tried(known, ""),
    };
    LoadReport { candidates: KNOWN.iter().map(look).collect() }
}

fn unknown(name: &str) -> Error {
    let known: Vec<&str> = KNOWN.iter().map(|known| known.name).collect();
    let off: Vec<String> =
        KNOWN.iter().filter(|known| known.open.is_none()).map(|known| format!("`{}`", known.name)).collect();
    let built_in = if backends().is_empty() { "none".to_owned() } else { backends().join(", ") };
    let message = if known.contains(&name) {
        format!("`{name}` is not built in: its feature is off")
    } else {
        format!("no backend is named `{name}`")
    };
    let features = if off.is_empty() { String::new() } else { format!("; features that are off: {}", off.join(", ")) };
    let message = format!("{message}; known are {}; built in: {built_in}{features}", known.join(", "));
    let hint = if known.contains(&name) {
        format!("build with the feature `{name}`, or open one that is built in")
    } else {
        "open one of the names that are built in".to_owned()
    };
    Error::new(ErrorKind::UnknownBackend, OPERATION, message).with_hint(hint)
}

fn nothing_usable(report: &LoadReport, mock_failure: Option<&Error>) -> Error {
    let each: Vec<String> =
        report.candidates.iter().map(|c| format!("{}: {}: {}", c.name, c.outcome, c.reason)).collect();
    let message = format!("no backend could be taken ({})", each.join(" | "));
    let (kind, hint) = match mock_failure {
        // It works anywhere, so what it lacks is the quickest to put right.
        Some(error) => (error.kind(), error.hint()),
        None if backends().contains(&"mock") => {
            (ErrorKind::DeviceMissing, "allow the mock, or ask for it by name, to compute on the CPU")
        }
        None => (ErrorKind::DeviceMissing, "build with the feature `mock` and allow it, to compute on the CPU"),
    };
    Error::new(kind, OPERATION, message).with_hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate<'a>(report: &'a LoadReport, name: &str) -> &'a Candidate {
        report.candidates.iter().find(|candidate| candidate.name == name).unwrap()
    }

    /// Of the real backends, none opens in this version, on whatever machine the test runs.
    fn assert_real_ones_were_refused(report: &LoadReport) {
        for known in KNOWN.iter().filter(|known| known.real) {
            let candidate = candidate(report, known.name);
            match known.open {
                Some(_) => {
                    let refused = [Outcome::LibraryMissing, Outcome::Unsupported];
                    assert!(refused.contains(&candidate.outcome), "{report}");
                    assert!(!candidate.hint.is_empty(), "{report}");
                    if candidate.outcome == Outcome::LibraryMissing {
                        assert!(!candidate.tried.is_empty(), "{report}");
                        assert!(candidate.reason.contains(&candidate.tried[0].name), "{report}");
                    }
                }
                None => assert_eq!(candidate.outcome, Outcome::NotTried, "{report}"),
            }
        }
    }

    #[test]
    fn the_list_of_names_agrees_with_the_table() {
        let built_in: Vec<&str> = KNOWN.iter().filter(|known| known.open.is_some()).map(|known| known.name).collect();
        assert_eq!(backends(), built_in);
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones_and_nothing_is_tried() {
        let OpenError { error, report } = open("metal").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnknownBackend);
        assert!(error.message().contains("`metal`") && error.message().contains("cuda, rocm, mock"), "{error}");
        for known in &KNOWN {
            assert_eq!(candidate(&report, known.name).outcome, Outcome::NotTried);
            let named_as_off = error.message().contains(&format!("`{}`", known.name));
            assert_eq!(named_as_off, known.open.is_none(), "{error}");
        }
    }

    #[test]
    fn a_backend_that_was_not_built_in_names_its_feature() {
        for known in KNOWN.iter().filter(|known| known.open.is_none()) {
            let OpenError { error, report } = open(known.name).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::UnknownBackend);
            assert!(error.message().contains("its feature is off"), "{error}");
            assert!(error.hint().contains(&format!("feature `{}`", known.name)), "{error}");
            assert!(candidate(&report, known.name).reason.contains("not built in"), "{report}");
        }
    }

    #[test]
    fn a_real_backend_asked_for_by_name_is_refused_and_not_replaced() {
        for known in KNOWN.iter().filter(|known| known.real && known.open.is_some()) {
            let OpenError { error, report } = open(known.name).unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::LibraryMissing | ErrorKind::Unsupported), "{error}");
            assert!(report.taken().is_none(), "{report}");
            assert_eq!(candidate(&report, known.name).outcome, Outcome::of(&error));
            assert_eq!(candidate(&report, "mock").outcome, Outcome::NotTried);
            assert_eq!(Error::from(OpenError { error: error.clone(), report }).kind(), error.kind());
        }
    }

    #[test]
    fn auto_without_the_mock_says_of_each_why_not() {
        let OpenError { error, report } = open_auto(false).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeviceMissing);
        for known in &KNOWN {
            assert!(error.message().contains(&format!("{}: ", known.name)), "{error}");
        }
        assert_real_ones_were_refused(&report);
        assert_eq!(candidate(&report, "mock").outcome, Outcome::NotTried);
        assert!(error.hint().contains("mock"), "{error}");
    }

    #[test]
    fn where_the_mock_was_allowed_and_failed_its_kind_and_hint_are_given() {
        let failure = Error::new(ErrorKind::InvalidArgument, "mock_options", "no").with_hint("expected bytes");
        let missing = Candidate::new(&KNOWN[0], Outcome::LibraryMissing, "no driver");
        let failed = Candidate::failed(&KNOWN[2], Unavailable::from(failure.clone()));
        let error = nothing_usable(&LoadReport { candidates: vec![missing, failed] }, Some(&failure));
        assert_eq!((error.kind(), error.hint()), (ErrorKind::InvalidArgument, "expected bytes"));
        assert!(error.message().contains("cuda: library missing: no driver | mock: failed: no"), "{error}");
    }

    #[test]
    fn a_report_prints_one_line_for_each_candidate_and_its_hint_below() {
        let taken = Candidate::new(&KNOWN[2], Outcome::Taken, "asked for");
        let mut missing = Candidate::new(&KNOWN[0], Outcome::LibraryMissing, "no driver");
        missing.hint = "install it".into();
        let report = LoadReport { candidates: vec![missing, taken] };
        let expected = "cuda  library missing  no driver\n                       hint: install it\n\
                        mock  taken            asked for";
        assert_eq!(report.to_string(), expected);
        assert_eq!(report.taken().unwrap().name, "mock");
    }

    #[cfg(feature = "mock")]
    #[test]
    fn auto_with_the_mock_takes_it_and_says_why() {
        let Opened { backend, report } = open_auto(true).unwrap();
        assert_eq!(backend.identity().name, "mock");
        assert_real_ones_were_refused(&report);
        let mock = report.taken().unwrap();
        assert_eq!(mock.name, "mock");
        assert!(mock.reason.contains("no real device works here"), "{report}");
    }

    #[cfg(feature = "mock")]
    #[test]
    fn the_mock_is_opened_by_name_and_a_survey_finds_it_usable() {
        let Opened { backend, report } = open("mock").unwrap();
        assert!(!backend.identity().real_device && backend.device_count() >= 1);
        assert!(report.taken().unwrap().reason.contains("`mock` was asked for"), "{report}");
        let survey = survey();
        assert_eq!(candidate(&survey, "mock").outcome, Outcome::Usable, "{survey}");
        assert_real_ones_were_refused(&survey);
        assert!(survey.taken().is_none());
    }
}
