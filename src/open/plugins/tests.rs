//! Tests of the search, without a real plugin.

use std::os::unix::fs::symlink;
use std::sync::Arc;

use highwater_hal::{BackendTag, Identity, MockBackend};

use super::super::choice;
use super::super::environment::{DATA_HOME, PLUGIN_PATH};
use super::super::report::{Candidate, LoadReport, Opened};
use super::permission::tests::chmod;
use super::testing::{Folder, manifest_of};
use super::*;

/// Opens a plugin whose name is the text of its file; other files have no entry point.
fn load(file: &Path, _: Duration) -> Result<Loaded, Failure> {
    let name = fs::read_to_string(file).unwrap();
    if name.is_empty() {
        return Err(failure(Outcome::NoEntryPoint, "it has none", ""));
    }
    let mut backend = MockBackend::new();
    backend.expect_identity().return_const(Identity::new(name.as_str(), "a fake", BackendTag::next()));
    backend.expect_device_count().return_const(1_u32);
    Ok(Loaded { name, version: "1.2.0".into(), warnings: vec!["a warning".into()], backend: Arc::new(backend) })
}

struct World {
    options: OpenOptions,
    environment: Environment,
    means: Means,
    probing: Probing,
}

impl World {
    fn new() -> Self {
        // Excludes the plugins installed on this machine.
        let mut environment = Environment::default();
        environment.user = Environment::of_process().user;
        let means = Means { load: Box::new(load), probe: Box::new(|_, _, _| panic!("nobody is asked to probe")) };
        Self { options: OpenOptions::new(), environment, means, probing: Probing::Off }
    }

    fn of(folder: &Folder) -> Self {
        let mut world = Self::new();
        world.options = world.options.with_search_folder(folder.path());
        world
    }

    fn finder(&self) -> Finder<'_> {
        Finder::new(&self.options, &self.environment, &self.means, self.probing.clone())
    }

    fn survey(&self) -> LoadReport {
        let (contenders, places) = self.finder().all();
        choice::survey(&contenders, places)
    }

    fn one(&self) -> Candidate {
        let report = self.survey();
        let [candidate] = <[Candidate; 1]>::try_from(report.candidates).unwrap();
        candidate
    }

    fn at(&self, path: &Path, name: Option<&str>) -> Result<Opened, Box<Candidate>> {
        let contender = [self.finder().at(path, name)];
        choice::only(&contender, Vec::new(), 0, "asked")
            .map_err(|mut error| Box::new(error.report.candidates.remove(0)))
    }
}

#[track_caller]
fn assert_broken(candidate: &Candidate, outcome: Outcome, reason: &str) {
    assert_eq!(candidate.outcome, outcome, "{candidate:?}");
    assert!(candidate.reason.contains(reason), "{candidate:?}");
    assert!(!candidate.hint.is_empty(), "{candidate:?}");
}

#[test]
fn a_plugin_is_found_by_its_manifest_and_opened() {
    let folder = Folder::new();
    let library = folder.file("lib.so", "acme");
    let manifest = folder.manifest("acme.toml");
    let candidate = World::of(&folder).one();
    assert_eq!((candidate.name.as_str(), candidate.outcome), ("acme", Outcome::Usable));
    assert_eq!(candidate.reason, "a fake, 1 device");
    assert_eq!((candidate.origin.manifest(), candidate.origin.library()), (Some(&*manifest), Some(&*library)));
    assert_eq!(candidate.notes, ["a warning"]);
    assert_eq!(candidate.origin.to_string(), manifest.display().to_string());
}

#[test]
fn places_count_in_their_order_and_the_first_of_a_name_decides() {
    let folders = [Folder::new(), Folder::new(), Folder::new()];
    for folder in &folders {
        folder.file("lib.so", "acme");
        folder.manifest("acme.toml");
    }
    fs::create_dir_all(folders[2].path().join("highwater")).unwrap();
    let mut world = World::of(&folders[0]);
    world.environment = world.environment.with(PLUGIN_PATH, folders[1].path()).with(DATA_HOME, folders[2].path());
    let report = world.survey();
    let outcomes: Vec<_> = report.candidates.iter().map(|candidate| candidate.outcome).collect();
    assert_eq!(outcomes, [Outcome::Usable, Outcome::NotTried], "{report}");
    assert!(report.candidates[1].reason.contains(&folders[0].path().display().to_string()), "{report}");
    let places: Vec<_> = report.places.iter().map(|place| (place.kind, place.outcome)).collect();
    let expected = [
        (PlaceKind::SearchFolder, Outcome::Searched),
        (PlaceKind::PathVariable, Outcome::Searched),
        (PlaceKind::UserFolder, Outcome::Absent),
    ];
    assert_eq!(places[..3], expected);

    // A broken one stops its name.
    folders[0].file("acme.toml", manifest_of("acme", "lib.so") + "colour = \"red\"\n[more]\n");
    let report = world.survey();
    let outcomes: Vec<_> = report.candidates.iter().map(|candidate| candidate.outcome).collect();
    assert_eq!(outcomes, [Outcome::InvalidManifest, Outcome::NotTried], "{report}");
}

#[test]
fn the_same_folder_is_searched_once_by_whatever_way() {
    let folder = Folder::new();
    folder.file("inner/lib.so", "acme");
    folder.manifest("inner/acme.toml");
    symlink("inner", folder.path().join("link")).unwrap();
    let mut world = World::new();
    for name in ["inner", "link", "inner/../inner"] {
        world.options = world.options.with_search_folder(folder.path().join(name));
    }
    let report = world.survey();
    assert_eq!(report.candidates.len(), 1, "{report}");
    let outcomes: Vec<_> = report.places[..3].iter().map(|place| place.outcome).collect();
    assert_eq!(outcomes, [Outcome::Searched, Outcome::NotTried, Outcome::NotTried], "{report}");
}

#[test]
fn an_invalid_manifest_is_told_with_file_line_and_reason() {
    let folder = Folder::new();
    folder.file("lib.so", "acme");
    let path = folder.file("acme.toml", manifest_of("acme", "lib.so").replace("vendor", "vendro"));
    let at = path.display().to_string();
    assert_broken(&World::of(&folder).one(), Outcome::InvalidManifest, &format!("{at}:3: the key `vendro` is unknown"));
    folder.file("acme.toml", manifest_of("acne", "lib.so"));
    assert_broken(
        &World::of(&folder).one(),
        Outcome::InvalidManifest,
        &format!("{at}:1: `name` is `acne`, and the file is named for `acme`"),
    );
    fs::remove_file(&path).unwrap();
    folder.folder("acme.toml");
    assert_broken(&World::of(&folder).one(), Outcome::InvalidManifest, &format!("{at}: it is a folder"));
    fs::remove_dir(&path).unwrap();
    symlink("acme.toml", &path).unwrap();
    assert_broken(&World::of(&folder).one(), Outcome::InvalidManifest, "Too many levels of symbolic links");
    fs::remove_file(&path).unwrap();
    symlink("nowhere", &path).unwrap();
    assert_broken(&World::of(&folder).one(), Outcome::InvalidManifest, "No such file");
    fs::remove_file(&path).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RUSR).unwrap();
    assert_broken(&World::of(&folder).one(), Outcome::InvalidManifest, "it is not a regular file");
}

#[test]
fn a_manifest_whose_name_is_not_utf_8_is_told_and_harms_nobody() {
    use std::os::unix::ffi::OsStrExt as _;
    let folder = Folder::new();
    folder.file("lib.so", "acme");
    folder.manifest("acme.toml");
    folder.file(OsStr::from_bytes(b"\xff.toml"), manifest_of("x", "lib.so"));
    let report = World::of(&folder).survey();
    assert_eq!(report.candidates[0].outcome, Outcome::Usable, "{report}");
    assert_broken(&report.candidates[1], Outcome::InvalidManifest, "the file is named for `\u{fffd}`");
}

#[test]
fn twenty_thousand_plugins_of_one_folder_are_found_in_a_moment() {
    let folder = Folder::new();
    // All manifests share one file, which is for another machine.
    let manifest = folder.file("m0.toml", manifest_of("m0", "lib.so").replace(&manifest::platform(), "sparc64-linux"));
    for number in 1..20_000 {
        fs::hard_link(&manifest, folder.path().join(format!("m{number}.toml"))).unwrap();
    }
    let started = std::time::Instant::now();
    let report = World::of(&folder).survey();
    assert_eq!(report.candidates.len(), 20_000);
    // Comparing each with each took 29 s in a release build.
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
}

#[test]
fn a_library_for_other_machines_or_of_other_versions_is_not_touched() {
    let folder = Folder::new();
    let mut world = World::of(&folder);
    world.means.load = Box::new(|_, _| panic!("it was loaded"));
    folder.file("acme.toml", manifest_of("acme", "lib.so").replace(&manifest::platform(), "sparc64-linux"));
    let expected = format!("libraries for sparc64-linux, and none for {}", manifest::platform());
    assert_broken(&world.one(), Outcome::WrongPlatform, &expected);
    let newer = TABLE_VERSIONS.end() + 1;
    let versions = format!("min = {newer}, max = {newer}");
    folder.file("acme.toml", manifest_of("acme", "lib.so").replace("min = 1, max = 1", &versions));
    assert_broken(&world.one(), Outcome::VersionOutOfRange, &format!("it offers versions {newer} to {newer}"));
    folder.manifest("acme.toml");
    assert_broken(&world.one(), Outcome::LibraryMissing, "lib.so`: No such file");
    folder.folder("lib.so");
    assert_broken(&world.one(), Outcome::WrongPlatform, "not a regular file");
}

#[test]
fn the_library_lies_where_the_resolved_manifest_says() {
    let folder = Folder::new();
    let library = folder.file("vendor/lib/lib.so", "acme");
    folder.file("vendor/share/acme.toml", manifest_of("acme", "../lib/lib.so"));
    folder.folder("plugins");
    symlink("../vendor/share/acme.toml", folder.path().join("plugins/acme.toml")).unwrap();
    let mut world = World::new();
    world.options = world.options.with_search_folder(folder.path().join("plugins"));
    let candidate = world.one();
    assert_eq!((candidate.outcome, candidate.origin.library()), (Outcome::Usable, Some(&*library)), "{candidate:?}");
}

#[test]
fn what_others_can_change_is_not_permitted_unless_allowed() {
    let folder = Folder::new();
    folder.file("plugins/lib.so", "acme");
    folder.manifest("plugins/acme.toml");
    let mut world = World::new();
    world.options = world.options.with_search_folder(folder.path().join("plugins"));
    for (path, mode, usual, is_file) in [
        ("plugins", 0o777, 0o755, false),
        ("plugins", 0o1777, 0o755, false),
        ("plugins/acme.toml", 0o666, 0o644, true),
        ("plugins/lib.so", 0o775, 0o644, true),
        ("", 0o775, 0o755, false),
    ] {
        let path = folder.path().join(path);
        chmod(&path, mode);
        let named = path.display().to_string();
        let named = named.trim_end_matches('/');
        if is_file {
            assert_broken(&world.one(), Outcome::NotPermitted, named);
        } else {
            // A user who can write to a folder chooses the names in it, so the report shows none of them.
            let report = world.survey();
            assert!(report.candidates.is_empty(), "{report}");
            let place = report.broken_places().next().unwrap();
            assert_eq!(place.outcome, Outcome::NotPermitted, "{report}");
            assert!(
                place.reason.contains(named) && place.reason.ends_with("1 plugin in it was not looked at"),
                "{report}"
            );
            assert!(place.hint.contains("chmod go-w") && !report.to_string().contains("acme"), "{report}");
            // A request by name is refused, and nothing is taken in its place.
            let (contenders, places) = world.finder().all();
            let refused = choice::by_name(&contenders, places, "acme", "").unwrap_err();
            assert_eq!(refused.error.kind(), highwater_hal::ErrorKind::PermissionDenied, "{refused}");
            assert_eq!(refused.report.candidates.len(), 1, "{}", refused.report);
        }
        let mut allowed = World::new();
        allowed.options = world.options.clone().allow_insecure_plugins();
        let candidate = allowed.one();
        assert_eq!(candidate.outcome, Outcome::Usable, "{candidate:?}");
        assert!(candidate.notes[0].contains("not safe, and allowed"), "{candidate:?}");
        chmod(&path, usual);
    }
    assert_eq!(world.one().outcome, Outcome::Usable);
    // Sticky on the way is good enough.
    chmod(folder.path(), 0o1777);
    assert_eq!(world.one().outcome, Outcome::Usable);
}

#[test]
fn an_unsafe_folder_without_plugins_is_quiet() {
    let folder = Folder::new();
    chmod(folder.path(), 0o777);
    let report = World::of(&folder).survey();
    assert!(report.candidates.is_empty() && report.broken_places().next().is_none(), "{report}");
    assert!(report.to_string().contains(&format!("{} (absent)", folder.path().display())), "{report}");
}

#[test]
fn beside_the_executable_bare_libraries_count_and_other_toml_files_do_not() {
    let folder = Folder::new();
    let bare = folder.file("libhighwater_bare_plugin.so", "bare");
    folder.file("lib.so", "acme");
    folder.file("libhighwater_acme.so", "acme");
    folder.file("acme.toml", manifest_of("acme", "libhighwater_acme.so"));
    folder.file("settings.toml", "colour = \"red\"\n");
    folder.file("broken.toml", "[library]\nnonsense");
    let mut world = World::new();
    world.environment.executable = Some(folder.path().join("tool"));
    let report = world.survey();
    let found: Vec<_> = report.candidates.iter().map(|c| (c.name.as_str(), c.outcome)).collect();
    let expected = [("acme", Outcome::Usable), ("broken", Outcome::InvalidManifest), ("bare", Outcome::Usable)];
    assert_eq!(found, expected, "{report}");
    assert_eq!(report.candidates[2].origin.to_string(), bare.display().to_string());
    // In any other folder, only manifests do.
    assert_eq!(World::of(&folder).survey().candidates.len(), 3);
}

#[test]
fn a_plugin_has_to_bear_out_its_name() {
    let folder = Folder::new();
    folder.file("lib.so", "other");
    folder.manifest("acme.toml");
    assert_broken(&World::of(&folder).one(), Outcome::InvalidManifest, "calls itself `other`");
    let bare = folder.file("libhighwater_bare.so", "other");
    let mut world = World::new();
    world.environment.executable = Some(folder.path().join("tool"));
    assert_broken(&world.survey().candidates[1], Outcome::Failed, "is named for `bare`, and calls itself `other`");
    assert_broken(&World::new().at(&bare, Some("bare")).unwrap_err(), Outcome::Failed, "`bare` was asked for, and");
    let opened = World::new().at(&bare, None).unwrap();
    assert_eq!(opened.report.taken().unwrap().name, "other");
    assert_eq!(World::new().at(&bare, Some("other")).unwrap().report.taken().unwrap().name, "other");
}

#[test]
fn another_version_than_the_manifests_is_worth_a_note() {
    let folder = Folder::new();
    folder.file("lib.so", "acme");
    folder.file("acme.toml", manifest_of("acme", "lib.so").replace("1.2.0", "1.3.0"));
    let candidate = World::of(&folder).one();
    assert_eq!(candidate.outcome, Outcome::Usable);
    assert!(candidate.notes[1].contains("says version 1.3.0, and the library says 1.2.0"), "{candidate:?}");
}

#[test]
fn a_path_may_be_a_manifest_or_a_library_and_nothing_else() {
    let folder = Folder::new();
    let library = folder.file("lib.so", "acme");
    let manifest = folder.manifest("acme.toml");
    let world = World::new();
    for path in [&library, &manifest] {
        let opened = world.at(path, None).unwrap();
        let taken = opened.report.taken().unwrap();
        assert_eq!((taken.name.as_str(), taken.origin.library()), ("acme", Some(&*library)));
    }
    assert_broken(&world.at(&manifest, Some("acne")).unwrap_err(), Outcome::Failed, "`acne` was asked for");
    assert_broken(&world.at(folder.path(), None).unwrap_err(), Outcome::WrongPlatform, "not a regular file");
    let none = folder.path().join("none.so");
    assert_broken(&world.at(&none, None).unwrap_err(), Outcome::LibraryMissing, "No such file");
    let none = folder.path().join("none.toml");
    assert_broken(&world.at(&none, None).unwrap_err(), Outcome::InvalidManifest, "No such file");
    folder.file("lib.so", "");
    assert_broken(&world.at(&manifest, None).unwrap_err(), Outcome::NoEntryPoint, "it has none");
}

#[test]
fn a_probe_comes_before_loading_and_decides() {
    let folder = Folder::new();
    folder.file("lib.so", "acme");
    folder.manifest("acme.toml");
    let mut world = World::of(&folder);
    world.probing = Probing::By { prober: "/prober".into() };
    world.options = world.options.with_load_limit(Duration::from_secs(1));
    world.means.load = Box::new(|_, _| panic!("it was loaded"));
    world.means.probe = Box::new(|prober, file, limit| {
        assert!(prober == Path::new("/prober") && file.ends_with("lib.so") && limit == Duration::from_secs(1));
        Probed::Refused(failure(Outcome::HungInProbe, "it hung", ""))
    });
    assert_broken(&world.one(), Outcome::HungInProbe, "it hung");
    world.means.load = Box::new(load);
    world.means.probe = Box::new(|_, _, _| Probed::Opens);
    assert_eq!(world.one().notes, ["a warning"]);
    // If no program can probe, the plugin is loaded all the same, and a note says so.
    world.means.probe = Box::new(|_, _, _| Probed::Impossible("out of order".into()));
    assert!(world.one().notes[0].contains("not probed in a process of its own: out of order"));
    world.probing = Probing::Impossible("nobody there".into());
    assert!(world.one().notes[0].contains("nobody there"));
}
