//! Opening a backend, with an account of every candidate.
//!
//! Two rules. A backend that was asked for by name is opened or refused, and never replaced by another: a run that was
//! meant for a GPU must not pass on the mock. And nothing is left out of the report: each backend that Highwater knows
//! stands in it with what became of it and why, and each place where plugins were looked for, so that a user who gets another
//! one than expected can read the reason.
//!
//! - `options`: what is asked for; `environment`: what the process says about where to look; `search`: the two together
//! - `choice`: which of the candidates is opened; `built_in`: those that are part of the program
//! - `plugins`: those that are not: `places` and `manifest` find them, `permission` says whether other users could change them,
//!   `probe` tries them in another process, `plugin` opens them
//! - `report`: what is said about it all

mod built_in;
mod choice;
mod environment;
mod options;
#[cfg(feature = "plugins")]
mod plugins;
mod report;
mod search;

pub use built_in::backends;
pub use options::OpenOptions;
#[cfg(feature = "plugins")]
pub use plugins::serve_probe;
pub use report::{Candidate, LoadReport, OpenError, Opened, Origin, Outcome, Place, PlaceKind};

/// The operation that errors of this module name.
const OPERATION: &str = "open";

/// Opens the backend `name`, and no other in its place: the one that was built in, else the first plugin of that name.
///
/// # Errors
/// `UnknownBackend` for a name that does not exist, was not built in and is no plugin; otherwise what the backend said:
/// `LibraryMissing`, `SymbolMissing`, `DeviceMissing`, `Unsupported`, or another kind. For a plugin also `InvalidArgument` where its
/// manifest is wrong, `PermissionDenied` where other users could change it, and `Unsupported` where it is for other machines or other
/// versions.
pub fn open(name: &str) -> Result<Opened, OpenError> {
    OpenOptions::new().with_name(name).open()
}

/// Opens what the environment variable `HIGHWATER_BACKEND` names or, where it is not set, the best backend with real hardware that
/// works here: built-in ones first, then plugins in the order of their places. Where there is none and `allow_mock` is set, the mock.
///
/// # Errors
/// With what became of each backend in the message and as data. `DeviceMissing`; but where the mock was allowed, which
/// needs no device, what the mock gave. With `HIGHWATER_BACKEND`, as [`open`].
pub fn open_auto(allow_mock: bool) -> Result<Opened, OpenError> {
    OpenOptions::new().with_mock_allowed(allow_mock).open()
}

/// Tries every backend that was built in and every plugin that is found, and keeps none.
///
/// The libraries that open stay open, because a driver cannot be unloaded.
#[must_use]
pub fn survey() -> LoadReport {
    OpenOptions::new().survey()
}

#[cfg(test)]
mod tests {
    use highwater_core::{Error, ErrorKind};

    use super::built_in::KNOWN;
    use super::*;

    fn candidate<'a>(report: &'a LoadReport, name: &str) -> &'a Candidate {
        let built_in = |candidate: &&Candidate| candidate.name == name && candidate.origin == Origin::BuiltIn;
        report.candidates.iter().find(built_in).unwrap()
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
