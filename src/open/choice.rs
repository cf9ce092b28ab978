//! Chooses the backend that is opened, and reports on each.
//!
//! A backend requested by name is opened or refused, and never replaced by another: a run meant for a GPU must not pass on the
//! mock. Of several with one name, only the first counts, even if it fails. Built-in backends come before plugins, and plugins in
//! the order of their places.

use std::collections::HashMap;
use std::sync::Arc;

use highwater_hal::OpenFailure;
use highwater_hal::{Backend, Error, ErrorKind, display_foreign};

use super::Fallback;
use super::built_in::{KNOWN, backends};
use super::report::OPERATION;
use super::report::{Candidate, LoadReport, OpenError, Opened, Origin, Outcome, Place, PlaceKind};

/// Names by which a caller means the best real device. No backend has them.
const ANY: [&str; 5] = ["", "any", "auto", "best", "default"];

/// The most names that a message lists.
const MOST_NAMES: usize = 32;

/// A backend that could be opened.
pub(super) struct Contender<'a> {
    pub(super) name: String,
    pub(super) origin: Origin,
    /// Whether the caller gave its path. Then it shadows no other of its name, and no other shadows it.
    pub(super) given: bool,
    /// True if no report names it. It lies in a folder that other users can write to, so they chose its name.
    pub(super) hidden: bool,
    /// Whether it drives hardware; `None` if only the opened backend knows.
    pub(super) real: Option<bool>,
    pub(super) state: State<'a>,
}

pub(super) enum State<'a> {
    /// Its feature is off.
    Off,
    /// It was found, and cannot be opened.
    #[cfg_attr(not(feature = "plugins"), allow(dead_code, reason = "a built-in backend is never broken"))]
    Broken(Failure),
    Ready(Box<dyn Fn() -> Result<Opening, Failure> + 'a>),
}

/// An opened backend.
pub(super) struct Opening {
    pub(super) backend: Arc<dyn Backend>,
    /// Its own name, if only the opened backend knows it.
    pub(super) name: Option<String>,
    pub(super) notes: Vec<String>,
}

/// Why a backend cannot be opened.
#[derive(Debug, Clone)]
pub(super) struct Failure {
    pub(super) outcome: Outcome,
    pub(super) error: Error,
    pub(super) tried: Vec<OpenFailure>,
    pub(super) notes: Vec<String>,
}

impl Failure {
    pub(super) fn new(outcome: Outcome, error: Error) -> Self {
        Self { outcome, error, tried: Vec::new(), notes: Vec::new() }
    }
}

impl Contender<'_> {
    fn is_built_in(&self) -> bool {
        self.origin == Origin::BuiltIn
    }

    fn candidate(&self, outcome: Outcome, reason: impl Into<String>) -> Candidate {
        Candidate {
            name: self.name.clone(),
            origin: self.origin.clone(),
            outcome,
            reason: reason.into(),
            hint: String::new(),
            tried: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// Returns a candidate that was not tried: its feature is off, it is broken, or else for `reason`.
    fn not_tried(&self, reason: &str) -> Candidate {
        match &self.state {
            State::Off => {
                let hint = format!("build with the feature `{}`", self.name);
                Candidate { hint, ..self.candidate(Outcome::NotTried, "it is not built in") }
            }
            State::Broken(failure) => self.failed(failure),
            State::Ready(_) => self.candidate(Outcome::NotTried, reason),
        }
    }

    /// Returns a candidate that was opened.
    fn opened(
        &self,
        outcome: Outcome,
        reason: impl Into<String>,
        name: Option<String>,
        notes: Vec<String>,
    ) -> Candidate {
        let name = name.unwrap_or_else(|| self.name.clone());
        Candidate { name, notes, ..self.candidate(outcome, reason) }
    }

    /// Returns the error of this contender alone, which names its file.
    fn error(&self, error: Error) -> Error {
        let file = self.origin.to_string();
        let library = self.origin.library().map(|library| display_foreign(library).to_string());
        let names = |file: &str| error.message().contains(file);
        // If the search ended before it found a file, the message names the goal of the search.
        let is_nowhere = self.origin.manifest().is_none() && library.is_none();
        if self.is_built_in() || is_nowhere || names(&file) || library.is_some_and(|library| names(&library)) {
            return error;
        }
        let what = format!("plugin {file}: {}", error.message());
        let named = Error::new(error.kind(), error.operation(), what).with_hint(error.hint());
        match error.code() {
            Some(code) => named.with_code(code),
            None => named,
        }
    }

    fn failed(&self, failure: &Failure) -> Candidate {
        let Failure { outcome, error, tried, notes } = failure.clone();
        Candidate { hint: error.hint().to_owned(), tried, notes, ..self.candidate(outcome, error.message()) }
    }
}

/// The contenders that reports name.
fn shown<'c, 'a>(contenders: &'c [Contender<'a>]) -> impl Iterator<Item = &'c Contender<'a>> {
    contenders.iter().filter(|one| !one.hidden)
}

/// The contender for each name: a built-in one, else the first.
struct Namesakes<'c, 'a>(HashMap<&'c str, &'c Contender<'a>>);

impl<'c, 'a> Namesakes<'c, 'a> {
    fn of(contenders: &'c [Contender<'a>]) -> Self {
        let mut meant: HashMap<&str, &Contender<'_>> = HashMap::with_capacity(contenders.len());
        for one in contenders.iter().filter(|one| !one.given && !matches!(one.state, State::Off)) {
            let first = meant.entry(&one.name).or_insert(one);
            if one.is_built_in() && !first.is_built_in() {
                *first = one;
            }
        }
        Self(meant)
    }

    fn meant(&self, name: &str) -> Option<&'c Contender<'a>> {
        self.0.get(name).copied()
    }

    /// Returns the candidate for a contender that comes after another of the same name.
    fn shadowed(&self, one: &Contender<'_>) -> Option<Candidate> {
        let first = self.meant(&one.name).filter(|&first| !std::ptr::addr_eq(first, one))?;
        if one.given || matches!(one.state, State::Off) {
            return None;
        }
        let reason = if first.is_built_in() {
            format!("the built-in backend `{}` comes first", first.name)
        } else {
            format!("`{}` comes first", first.origin)
        };
        let mut candidate = one.not_tried(&reason);
        if candidate.outcome == Outcome::NotTried {
            candidate.hint = "to open this one, give its path".into();
        }
        Some(candidate)
    }
}

/// Opens the backend `name` and no other.
///
/// `by` is empty, or names the source of the request: ` by VARIABLE`.
pub(super) fn by_name(
    contenders: &[Contender<'_>],
    places: Vec<Place>,
    name: &str,
    by: &str,
) -> Result<Opened, OpenError> {
    let others = format!("`{}` was asked for{by}", display_foreign(name));
    let Some(asked) = Namesakes::of(contenders).meant(name) else {
        let candidates = shown(contenders).map(|one| one.not_tried(&others)).collect();
        let error = unknown(contenders, &places, name, by);
        return Err(OpenError { error, report: LoadReport { places, candidates } });
    };
    let asked = contenders.iter().position(|one| std::ptr::eq(one, asked)).unwrap_or_default();
    only(contenders, places, asked, &others)
}

/// Opens the contender at `asked` and no other.
pub(super) fn only(
    contenders: &[Contender<'_>],
    places: Vec<Place>,
    asked: usize,
    reason: &str,
) -> Result<Opened, OpenError> {
    let asked = &contenders[asked];
    let namesakes = Namesakes::of(contenders);
    let rest = |one: &Contender<'_>| namesakes.shadowed(one).unwrap_or_else(|| one.not_tried(reason));
    // Before the requested one, and after it.
    let (before, after): (Vec<_>, Vec<_>) = {
        let index = contenders.iter().position(|one| std::ptr::eq(one, asked)).unwrap_or_default();
        let (before, after) = contenders.split_at(index);
        (shown(before).map(rest).collect(), shown(after).filter(|one| !std::ptr::eq(*one, asked)).map(rest).collect())
    };
    let opened = match &asked.state {
        State::Ready(open) => open(),
        State::Broken(failure) => Err(failure.clone()),
        State::Off => Err(Failure::new(Outcome::NotTried, unknown(contenders, &[], &asked.name, ""))),
    };
    match opened {
        Ok(Opening { backend, name, notes }) => {
            let candidate = asked.opened(Outcome::Taken, reason, name, notes);
            let candidates = [before, vec![candidate], after].concat();
            Ok(Opened { backend, report: LoadReport { places, candidates } })
        }
        Err(failure) => {
            // The requested backend and the reason for its absence come before all others.
            let candidates = [vec![asked.failed(&failure)], before, after].concat();
            Err(OpenError { error: asked.error(failure.error), report: LoadReport { places, candidates } })
        }
    }
}

/// A contender that was taken, or could be.
struct Found {
    index: usize,
    opening: Opening,
}

/// Opens the best backend with real hardware that works here. If none works, opens the fallback.
pub(super) fn best(contenders: &[Contender<'_>], places: Vec<Place>, fallback: Fallback) -> Result<Opened, OpenError> {
    let namesakes = Namesakes::of(contenders);
    let mut candidates: Vec<Option<Candidate>> = contenders.iter().map(|one| namesakes.shadowed(one)).collect();
    let mut taken = None;
    let mut reason = "the first real device that works, in order of preference";
    // Plugins that opened and drive no hardware.
    let mut unreal = Vec::new();
    for (index, one) in contenders.iter().enumerate() {
        let State::Ready(open) = &one.state else { continue };
        if candidates[index].is_some() || one.real == Some(false) {
            continue;
        }
        match open() {
            Ok(opening) if one.real == Some(true) || opening.backend.identity().real_device => {
                taken = Some(Found { index, opening });
                break;
            }
            Ok(opening) => unreal.push(Found { index, opening }),
            Err(failure) => candidates[index] = Some(one.failed(&failure)),
        }
    }
    let mut mock_failure = None;
    if taken.is_none() && fallback == Fallback::Mock {
        reason = "no real device works here, and the mock was allowed";
        for (index, one) in contenders.iter().enumerate() {
            let State::Ready(open) = &one.state else { continue };
            if candidates[index].is_some() || one.real != Some(false) {
                continue;
            }
            match open() {
                Ok(opening) => {
                    taken = Some(Found { index, opening });
                    break;
                }
                Err(failure) => {
                    candidates[index] = Some(one.failed(&failure));
                    mock_failure = Some((index, failure.error));
                }
            }
        }
        if taken.is_none() && !unreal.is_empty() {
            taken = Some(unreal.remove(0));
        }
    }
    let better = taken.as_ref().map(|found| contenders[found.index].name.as_str());
    let why_not = better.map_or_else(
        || "it is no real device, and was not allowed".to_owned(),
        |better| format!("`{better}` was taken"),
    );
    for Found { index, opening } in unreal {
        let reason = format!("it opens, but is no real device: {why_not}");
        candidates[index] = Some(contenders[index].opened(Outcome::Usable, reason, opening.name, opening.notes));
    }
    let backend = taken.map(|Found { index, opening }| {
        candidates[index] = Some(contenders[index].opened(Outcome::Taken, reason, opening.name, opening.notes));
        opening.backend
    });
    let rest = contenders.iter().zip(candidates).filter(|(one, _)| !one.hidden);
    let candidates = rest.map(|(one, candidate)| candidate.unwrap_or_else(|| one.not_tried(&why_not))).collect();
    let mut report = LoadReport { places, candidates };
    match backend {
        Some(backend) => Ok(Opened { backend, report }),
        None => {
            let mock_failure = mock_failure.map(|(index, error)| {
                // The mock works anywhere, so its error is the first one to fix.
                let place = shown(&contenders[..index]).count();
                report.candidates[..=place].rotate_right(1);
                error
            });
            Err(OpenError { error: nothing_usable(&report, mock_failure.as_ref()), report })
        }
    }
}

/// Tries every contender and keeps none.
pub(super) fn survey(contenders: &[Contender<'_>], places: Vec<Place>) -> LoadReport {
    let namesakes = Namesakes::of(contenders);
    let look = |one: &Contender<'_>| {
        if let Some(candidate) = namesakes.shadowed(one) {
            return candidate;
        }
        let State::Ready(open) = &one.state else { return one.not_tried("") };
        match open() {
            Ok(Opening { backend, name, notes }) => {
                let devices = match backend.device_count() {
                    1 => "1 device".to_owned(),
                    count => format!("{count} devices"),
                };
                let reason = format!("{}, {devices}", display_foreign(&backend.identity().description));
                one.opened(Outcome::Usable, reason, name, notes)
            }
            Err(failure) => one.failed(&failure),
        }
    };
    LoadReport { candidates: shown(contenders).map(look).collect(), places }
}

/// Returns the known name that a misspelled one probably means: equal except for case, or the nearest with one or two typing errors.
fn similar<'n>(name: &str, known: impl Iterator<Item = &'n str>) -> Option<&'n str> {
    let lower = name.to_lowercase();
    // Two errors turn a name of three letters into almost any other.
    let most = lower.chars().count() / 3;
    let near = known
        .map(|known| (strsim::osa_distance(&lower, &known.to_lowercase()), known))
        .filter(|(errors, _)| *errors <= most.min(2));
    near.min_by_key(|(errors, _)| *errors).map(|(_, known)| known)
}

fn unknown(contenders: &[Contender<'_>], places: &[Place], name: &str, by: &str) -> Error {
    let off: Vec<String> =
        KNOWN.iter().filter(|known| known.open.is_none()).map(|known| format!("`{}`", known.name)).collect();
    let built_in = if backends().is_empty() { "none".to_owned() } else { backends().join(", ") };
    let is_off = KNOWN.iter().any(|known| known.name == name);
    let plugins = || shown(contenders).filter(|one| !one.is_built_in()).map(|one| one.name.as_str());
    let similar = similar(name, KNOWN.iter().map(|known| known.name).chain(plugins())).filter(|_| !is_off);
    let name = display_foreign(name).to_string();
    let mut message = if is_off {
        format!("`{name}`{by} is not built in: its feature is off")
    } else {
        format!("no backend is named `{name}`{}", if by.is_empty() { "" } else { ", which was asked for" }) + by
    };
    message += &format!("; built in: {built_in}");
    if !off.is_empty() && !is_off {
        message += &format!("; features that are off: {}", off.join(", "));
    }
    let all = plugins().count();
    let plugins: Vec<String> = plugins().take(MOST_NAMES).map(|name| display_foreign(name).to_string()).collect();
    if !plugins.is_empty() {
        let more = if all > plugins.len() { format!(" and {} more", all - plugins.len()) } else { String::new() };
        message += &format!("; plugins: {}{more}", plugins.join(", "));
    }
    let folders = places.iter().filter(|place| place.kind != PlaceKind::BackendVariable);
    let places: Vec<String> = folders.map(ToString::to_string).collect();
    if !places.is_empty() {
        message += &format!("; plugins looked for in: {}", places.join(", "));
    }
    let hint = match (is_off, places.is_empty()) {
        (true, true) => format!("build with the feature `{name}`, or open one that is built in"),
        (true, false) => {
            format!("build with the feature `{name}`, or put a plugin `{name}.toml` into one of these folders")
        }
        (false, true) => "open one of the names that are built in".to_owned(),
        (false, false) => {
            format!("open one of the names that are built in, or put a plugin `{name}.toml` into one of these folders")
        }
    };
    let hint = match similar {
        Some(similar) => format!("did you mean `{}`? Else {hint}", display_foreign(similar)),
        None if !ANY.contains(&name.to_lowercase().as_str()) => hint,
        None => match by.strip_prefix(" by ") {
            Some(variable) => format!("unset {variable} for the best real device. Else {hint}"),
            None => format!("give no name for the best real device. Else {hint}"),
        },
    };
    Error::new(ErrorKind::UnknownBackend, OPERATION, message).with_hint(hint)
}

fn nothing_usable(report: &LoadReport, mock_failure: Option<&Error>) -> Error {
    let one = |c: &Candidate| format!("{}: {}: {}", display_foreign(&c.name), c.outcome, c.reason);
    let mut each: Vec<String> = report.candidates.iter().take(MOST_NAMES).map(one).collect();
    if report.candidates.len() > each.len() {
        each.push(format!("and {} more", report.candidates.len() - each.len()));
    }
    let message = format!("no backend could be taken ({})", each.join(" | "));
    let (kind, hint) = match mock_failure {
        // The mock works anywhere, so its error is the easiest to fix.
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
    use highwater_hal::{BackendTag, Identity, MockBackend};

    use super::*;

    fn opens(real: bool) -> State<'static> {
        State::Ready(Box::new(move || {
            let mut backend = MockBackend::new();
            let mut identity = Identity::new("fake", "a fake", BackendTag::next());
            identity.real_device = real;
            backend.expect_identity().return_const(identity);
            backend.expect_device_count().return_const(2_u32);
            Ok(Opening { backend: Arc::new(backend), name: None, notes: vec!["a note".into()] })
        }))
    }

    fn failure(outcome: Outcome) -> Failure {
        let error = Error::new(ErrorKind::Vendor, OPERATION, format!("it is {outcome}")).with_hint("mend it");
        Failure::new(outcome, error)
    }

    fn fails() -> State<'static> {
        State::Ready(Box::new(|| Err(failure(Outcome::LibraryMissing))))
    }

    /// A state that must not be opened.
    fn untouched() -> State<'static> {
        State::Ready(Box::new(|| panic!("it was opened")))
    }

    fn built_in(name: &str, real: bool, state: State<'static>) -> Contender<'static> {
        Contender { name: name.into(), origin: Origin::BuiltIn, given: false, hidden: false, real: Some(real), state }
    }

    fn plugin(name: &str, file: &str, state: State<'static>) -> Contender<'static> {
        let origin = Origin::Plugin { manifest: Some(file.into()), library: None };
        Contender { name: name.into(), origin, given: false, hidden: false, real: None, state }
    }

    fn outcomes(report: &LoadReport) -> Vec<(&str, Outcome)> {
        report.candidates.iter().map(|candidate| (candidate.name.as_str(), candidate.outcome)).collect()
    }

    #[test]
    fn a_built_in_backend_comes_before_a_plugin_of_its_name_wherever_it_stands() {
        let all = [plugin("mock", "/p/mock.toml", untouched()), built_in("mock", false, opens(false))];
        let report = by_name(&all, Vec::new(), "mock", "").unwrap().report;
        assert_eq!(outcomes(&report), [("mock", Outcome::NotTried), ("mock", Outcome::Taken)]);
        assert!(report.candidates[0].reason.contains("built-in backend `mock` comes first"), "{report}");
        assert!(report.candidates[0].hint.contains("give its path"), "{report}");
        assert_eq!(report.taken().unwrap().notes, ["a note"]);
        // A survey and the choice of the best agree.
        assert_eq!(outcomes(&survey(&all, Vec::new())), [("mock", Outcome::NotTried), ("mock", Outcome::Usable)]);
        let report = best(&all, Vec::new(), Fallback::Mock).unwrap().report;
        assert_eq!(outcomes(&report), [("mock", Outcome::NotTried), ("mock", Outcome::Taken)]);
    }

    #[test]
    fn a_plugin_counts_where_the_feature_of_its_name_is_off() {
        let all = [built_in("rocm", true, State::Off), plugin("rocm", "/p/rocm.toml", opens(true))];
        let report = by_name(&all, Vec::new(), "rocm", "").unwrap().report;
        assert_eq!(outcomes(&report), [("rocm", Outcome::NotTried), ("rocm", Outcome::Taken)]);
        assert!(report.candidates[0].reason.contains("not built in"), "{report}");
    }

    #[test]
    fn the_first_plugin_of_a_name_decides_also_where_it_is_broken() {
        let broken = State::Broken(failure(Outcome::InvalidManifest));
        let all = [plugin("acme", "/a/acme.toml", broken), plugin("acme", "/b/acme.toml", untouched())];
        let OpenError { error, report } = by_name(&all, Vec::new(), "acme", "").unwrap_err();
        assert_eq!((error.message(), error.hint()), ("plugin /a/acme.toml: it is invalid manifest", "mend it"));
        assert_eq!(outcomes(&report), [("acme", Outcome::InvalidManifest), ("acme", Outcome::NotTried)]);
        assert!(report.candidates[1].reason.contains("`/a/acme.toml` comes first"), "{report}");
        assert_eq!(outcomes(&survey(&all, Vec::new())), outcomes(&report));
    }

    #[test]
    fn a_plugin_that_was_given_by_its_path_is_tried_whatever_its_name() {
        let mut given = plugin("mock", "/p/mock.toml", opens(false));
        given.given = true;
        let all = [given, built_in("mock", false, opens(false))];
        assert_eq!(outcomes(&survey(&all, Vec::new())), [("mock", Outcome::Usable), ("mock", Outcome::Usable)]);
    }

    #[test]
    fn auto_takes_a_plugin_with_a_real_device_after_the_built_in_ones_and_before_the_mock() {
        let all = [
            built_in("cuda", true, fails()),
            plugin("cpu", "/a", opens(false)),
            plugin("acme", "/b", opens(true)),
            plugin("late", "/c", untouched()),
            built_in("mock", false, untouched()),
        ];
        let report = best(&all, Vec::new(), Fallback::Mock).unwrap().report;
        let expected = [
            ("cuda", Outcome::LibraryMissing),
            ("cpu", Outcome::Usable),
            ("acme", Outcome::Taken),
            ("late", Outcome::NotTried),
            ("mock", Outcome::NotTried),
        ];
        assert_eq!(outcomes(&report), expected);
        assert!(report.candidates[1].reason.contains("no real device: `acme` was taken"), "{report}");
        let first = [built_in("cuda", true, opens(true)), plugin("acme", "/b", untouched())];
        assert_eq!(best(&first, Vec::new(), Fallback::None).unwrap().report.taken().unwrap().name, "cuda");
    }

    #[test]
    fn auto_takes_a_plugin_without_hardware_only_where_that_was_allowed_and_after_the_mock() {
        let cpu = || plugin("cpu", "/a", opens(false));
        let refused = best(&[cpu()], Vec::new(), Fallback::None).unwrap_err();
        assert_eq!(refused.error.kind(), ErrorKind::DeviceMissing);
        assert_eq!(outcomes(&refused.report), [("cpu", Outcome::Usable)]);
        let report = best(&[cpu(), built_in("mock", false, opens(false))], Vec::new(), Fallback::Mock).unwrap().report;
        assert_eq!(outcomes(&report), [("cpu", Outcome::Usable), ("mock", Outcome::Taken)]);
        let report = best(&[cpu(), built_in("mock", false, fails())], Vec::new(), Fallback::Mock).unwrap().report;
        assert_eq!(outcomes(&report), [("cpu", Outcome::Taken), ("mock", Outcome::LibraryMissing)]);
    }

    #[test]
    fn where_the_mock_was_allowed_and_failed_its_kind_and_hint_are_given() {
        let failing = State::Ready(Box::new(|| {
            let error = Error::new(ErrorKind::InvalidArgument, "mock_options", "no").with_hint("expected bytes");
            Err(Failure::new(Outcome::of(&error), error))
        }));
        let all = [built_in("cuda", true, fails()), built_in("mock", false, failing)];
        let error = best(&all, Vec::new(), Fallback::Mock).unwrap_err().error;
        assert_eq!((error.kind(), error.hint()), (ErrorKind::InvalidArgument, "expected bytes"));
        let expected = "(mock: failed: no | cuda: library missing: it is library missing)";
        assert!(error.message().contains(expected), "{error}");
    }

    #[test]
    fn an_unknown_name_is_answered_with_plugins_and_places() {
        let all = [plugin("acme", "/a", untouched())];
        let places = vec![Place::new(PlaceKind::SystemFolder, Some("/s".into()), Outcome::Absent, "")];
        let OpenError { error, report } = by_name(&all, places, "acne", "").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnknownBackend);
        for part in ["`acne`", "plugins: acme", "/s (absent)"] {
            assert!(error.message().contains(part), "{error}");
        }
        assert_eq!(error.message().matches("cuda").count(), usize::from(cfg!(feature = "cuda")), "{error}");
        assert!(error.hint().starts_with("did you mean `acme`? ") && error.hint().contains("`acne.toml`"), "{error}");
        assert_eq!(outcomes(&report), [("acme", Outcome::NotTried)]);
    }

    #[test]
    fn a_misspelt_name_is_answered_with_the_one_that_was_meant() {
        let all = [plugin("acme-labs", "/a", untouched())];
        for (name, meant) in [
            ("CUDA", Some("cuda")),
            ("Rocm", Some("rocm")),
            ("cdua", Some("cuda")),
            ("moc", Some("mock")),
            ("mokc", Some("mock")),
            ("acme_lab", Some("acme-labs")),
            ("metal", None),
            ("hip", None),
            ("", None),
        ] {
            let error = by_name(&all, Vec::new(), name, " by HIGHWATER_BACKEND").unwrap_err().error;
            match meant {
                Some(meant) => {
                    assert!(error.hint().starts_with(&format!("did you mean `{meant}`?")), "{name}: {error}")
                }
                None => assert!(!error.hint().contains("did you mean"), "{name}: {error}"),
            }
            assert!(error.message().contains("asked for by HIGHWATER_BACKEND"), "{error}");
        }
    }

    #[test]
    fn what_was_asked_for_stands_first_where_it_failed() {
        let all =
            [built_in("cuda", true, untouched()), plugin("acme", "/a", untouched()), built_in("mock", false, fails())];
        let report = by_name(&all, Vec::new(), "mock", "").unwrap_err().report;
        let expected = [("mock", Outcome::LibraryMissing), ("cuda", Outcome::NotTried), ("acme", Outcome::NotTried)];
        assert_eq!(outcomes(&report), expected);
        let all = [built_in("cuda", true, fails()), built_in("mock", false, fails())];
        let report = best(&all, Vec::new(), Fallback::Mock).unwrap_err().report;
        assert_eq!(report.candidates[0].name, "mock", "{report}");
        assert_eq!(best(&all, Vec::new(), Fallback::None).unwrap_err().report.candidates[0].name, "cuda");
    }

    #[test]
    fn a_path_that_leads_nowhere_is_no_plugin_called_plugin() {
        let failure = || {
            let error = Error::new(ErrorKind::LibraryMissing, OPERATION, "`/nowhere/lib.so`: No such file");
            Failure::new(Outcome::LibraryMissing, error)
        };
        let origin = Origin::Plugin { manifest: None, library: None };
        let state = State::Broken(failure());
        let all = [Contender { name: "lib".into(), origin, given: true, hidden: false, real: None, state }];
        let error = only(&all, Vec::new(), 0, "asked").unwrap_err().error;
        assert_eq!(error.message(), "`/nowhere/lib.so`: No such file");
    }

    #[test]
    fn a_survey_counts_the_devices_and_keeps_the_notes() {
        let report = survey(&[plugin("acme", "/a", opens(true))], Vec::new());
        let candidate = &report.candidates[0];
        assert_eq!((candidate.outcome, candidate.reason.as_str()), (Outcome::Usable, "a fake, 2 devices"));
        assert_eq!(candidate.notes, ["a note"]);
    }
}
