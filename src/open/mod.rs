//! Opens a backend, with a report of every candidate.
//!
//! Two rules hold. A backend requested by name is opened or refused, and never replaced by another: a run meant for a GPU must
//! not pass on the mock. The report omits nothing: it lists each backend that Highwater knows and each place that was searched
//! for plugins, with the outcome and the reason.
//!
//! Built-in backends and plugins become contenders of one kind. A contender is ready to be opened, or broken for a reason that is
//! known without loading anything.
//!
//! - `options`: the request; `environment`: the variables and the executable; `search`: the two together
//! - `choice`: picks the contender that is opened, and knows nothing of files; `built_in`: the contenders that are part of the program
//! - `plugins`: the other contenders. `places` and `manifest` find them, `permission` checks whether other users could change them on
//!   the way from the root to the library, `probe` tries them in another process, `plugin` opens them
//! - `report`: the outcome, for the user; `serial`: the same as data
//!
//! A plugin that no process has tried yet is first loaded by a child, because only a child can be killed. The child writes the first
//! bytes of its answer before it touches the plugin. So a plugin that ends the process differs from a program that cannot probe. The
//! child is dead when its pidfd says so, even if another process keeps its pipes open.

mod built_in;
mod choice;
mod environment;
mod options;
#[cfg(feature = "plugins")]
mod plugins;
mod report;
mod search;
#[cfg(feature = "serde")]
mod serial;

pub use built_in::backends;
pub use options::{Fallback, OpenOptions};
#[cfg(feature = "plugins")]
pub use plugins::serve_probe;
pub use report::{Candidate, LoadReport, OpenError, Opened, Origin, Outcome, Place, PlaceKind};

/// Opens the backend `name` and no other: the built-in one, else the first plugin of that name.
///
/// # Errors
/// - `UnknownBackend`: no backend or plugin has that name, or its feature is off.
/// - `LibraryMissing`, `SymbolMissing`, `DeviceMissing`, `Unsupported`: the backend cannot work on this machine.
/// - `InvalidArgument`: a plugin's manifest is invalid.
/// - `PermissionDenied`: another user could change a plugin.
/// - `InvalidState`: a constructor of a plugin exceeds its limit and blocks the process
///   ([`OpenOptions::with_load_limit`]).
/// - Else the backend's error. [`OpenError`] has the kind for each [`Outcome`].
pub fn open(name: &str) -> Result<Opened, OpenError> {
    OpenOptions::new().with_name(name).open()
}

/// Opens the backend that the environment variable `HIGHWATER_BACKEND` names. If it is not set, opens the best backend
/// with real hardware that works on this machine: built-in ones first, then plugins in the order of their places. If none
/// works, opens the fallback.
///
/// # Errors
/// `DeviceMissing`, with what became of each backend in the message and as data. With a fallback, the fallback's error.
/// With `HIGHWATER_BACKEND`, the errors of [`open`].
pub fn open_best(fallback: Fallback) -> Result<Opened, OpenError> {
    OpenOptions::new().with_fallback(fallback).open()
}

/// Opens the best backend: the mock if allowed and no real device works.
///
/// # Errors
/// The errors of [`open_best`].
#[deprecated(since = "0.2.0", note = "use `open_best(Fallback::Mock)`")]
pub fn open_auto(allow_mock: bool) -> Result<Opened, OpenError> {
    open_best(if allow_mock { Fallback::Mock } else { Fallback::None })
}

/// Tries every built-in backend and every plugin that is found, and keeps none.
///
/// Libraries that open stay open, because a driver cannot be unloaded.
#[must_use]
pub fn survey() -> LoadReport {
    OpenOptions::new().survey()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use highwater_hal::Unavailable;
    use highwater_hal::{Backend, BackendTag, Error, ErrorKind, Identity, MockBackend};

    use super::built_in::{KNOWN, Known};
    use super::report::OPERATION;
    use super::search::Search;
    use super::*;

    fn candidate<'a>(report: &'a LoadReport, name: &str) -> &'a Candidate {
        let built_in = |candidate: &&Candidate| candidate.name == name && candidate.origin == Origin::BuiltIn;
        report.candidates.iter().find(built_in).unwrap()
    }

    /// A machine without any vendor's library, on any test machine. Each real backend is refused.
    static BARE: [Known; 3] = [
        Known { name: "cuda", real: true, open: Some(no_driver) },
        Known { name: "rocm", real: true, open: Some(no_driver) },
        Known { name: "mock", real: false, open: KNOWN[2].open },
    ];
    /// A machine with a fake AMD device.
    static WITH_ROCM: [Known; 3] = [
        Known { name: "cuda", real: true, open: Some(no_driver) },
        Known { name: "rocm", real: true, open: Some(fake) },
        Known { name: "mock", real: false, open: KNOWN[2].open },
    ];

    fn no_driver() -> Result<Arc<dyn Backend>, Unavailable> {
        let error =
            Error::new(ErrorKind::LibraryMissing, OPERATION, "there is no driver").with_hint("install the driver");
        Err(error.into())
    }

    fn fake() -> Result<Arc<dyn Backend>, Unavailable> {
        let mut backend = MockBackend::new();
        let mut identity = Identity::new("rocm", "a fake", BackendTag::next());
        identity.real_device = true;
        backend.expect_identity().return_const(identity);
        backend.expect_device_count().return_const(1_u32);
        Ok(Arc::new(backend))
    }

    fn open_on(machine: &'static [Known], options: OpenOptions) -> Result<Opened, OpenError> {
        Search::of_machine(&options.without_plugins(), machine).open()
    }

    #[track_caller]
    fn assert_refused(candidate: &Candidate) {
        assert!(candidate.outcome.is_broken() && !candidate.reason.is_empty(), "{candidate:?}");
        assert!(!candidate.hint.is_empty(), "{candidate:?}");
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones_and_nothing_is_tried() {
        let OpenError { error, report } = open("metal").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnknownBackend);
        let built_in: Vec<_> = KNOWN.iter().filter(|known| known.open.is_some()).map(|known| known.name).collect();
        assert!(error.message().contains("`metal`") && error.message().contains(&built_in.join(", ")), "{error}");
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
            assert_eq!(error.message().matches(&format!("`{}`", known.name)).count(), 1, "{error}");
            assert!(error.hint().contains(&format!("feature `{}`", known.name)), "{error}");
            assert!(candidate(&report, known.name).reason.contains("not built in"), "{report}");
        }
    }

    #[test]
    fn a_real_backend_asked_for_by_name_is_refused_and_not_replaced() {
        for name in ["cuda", "rocm"] {
            let OpenError { error, report } = open_on(&BARE, OpenOptions::new().with_name(name)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::LibraryMissing);
            assert!(report.taken().is_none(), "{report}");
            assert_refused(candidate(&report, name));
            assert_eq!(candidate(&report, "mock").outcome, Outcome::NotTried);
            assert_eq!(Error::from(OpenError { error: error.clone(), report }).kind(), error.kind());
        }
    }

    #[test]
    fn auto_without_the_mock_says_of_each_why_not() {
        let OpenError { error, report } = open_on(&BARE, OpenOptions::new()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeviceMissing);
        for known in &BARE {
            assert!(error.message().contains(&format!("{}: ", known.name)), "{error}");
        }
        assert_refused(candidate(&report, "cuda"));
        assert_refused(candidate(&report, "rocm"));
        assert_eq!(candidate(&report, "mock").outcome, Outcome::NotTried);
        assert!(error.hint().contains("mock"), "{error}");
    }

    #[cfg(feature = "mock")]
    #[test]
    fn auto_with_the_mock_takes_it_and_says_why() {
        let Opened { backend, report } = open_on(&BARE, OpenOptions::new().with_fallback(Fallback::Mock)).unwrap();
        assert_eq!(backend.identity().name, "mock");
        assert_refused(candidate(&report, "cuda"));
        let mock = report.taken().unwrap();
        assert_eq!(mock.name, "mock");
        assert!(mock.reason.contains("no real device works here"), "{report}");
    }

    #[test]
    fn auto_takes_the_real_device_that_is_there_also_where_the_mock_was_allowed() {
        for fallback in [Fallback::None, Fallback::Mock] {
            let Opened { backend, report } = open_on(&WITH_ROCM, OpenOptions::new().with_fallback(fallback)).unwrap();
            assert!(backend.identity().real_device);
            assert_eq!(report.taken().unwrap().name, "rocm");
            assert_refused(candidate(&report, "cuda"));
            assert_eq!(candidate(&report, "mock").outcome, Outcome::NotTried, "{report}");
        }
    }

    #[cfg(feature = "mock")]
    #[test]
    fn the_mock_is_opened_by_name_and_a_survey_finds_it_usable() {
        for machine in [&BARE, &WITH_ROCM] {
            let Opened { backend, report } = open_on(machine, OpenOptions::new().with_name("mock")).unwrap();
            assert!(!backend.identity().real_device && backend.device_count() >= 1);
            assert!(report.taken().unwrap().reason.contains("`mock` was asked for"), "{report}");
            let survey = Search::of_machine(&OpenOptions::new().without_plugins(), machine).survey();
            assert_eq!(candidate(&survey, "mock").outcome, Outcome::Usable, "{survey}");
            assert_refused(candidate(&survey, "cuda"));
            assert!(survey.taken().is_none());
        }
    }

    /// The test machine itself, with any hardware. A real backend opens as itself, or is refused with its reason.
    #[test]
    fn each_real_backend_opens_here_as_itself_or_says_why_not() {
        for known in KNOWN.iter().filter(|known| known.real && known.open.is_some()) {
            match open(known.name) {
                Ok(Opened { backend, report }) => {
                    assert!(backend.identity().name == known.name && backend.identity().real_device, "{report}");
                    assert_eq!(report.taken().unwrap().name, known.name);
                }
                Err(OpenError { error, report }) => {
                    assert!(report.taken().is_none(), "{report}");
                    let refused = candidate(&report, known.name);
                    assert_refused(refused);
                    assert_eq!(refused.outcome, Outcome::of(&error));
                    if refused.outcome == Outcome::LibraryMissing {
                        assert!(refused.tried.iter().any(|tried| refused.reason.contains(&tried.name)), "{report}");
                    }
                    assert_eq!(candidate(&report, "mock").outcome, Outcome::NotTried);
                }
            }
        }
    }
}
