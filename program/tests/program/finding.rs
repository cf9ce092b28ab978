//! Finding plugins, from outside: what the program says where there are none, and of those that are broken.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::started::Run;

const NO_DRIVER: &str = "/nowhere/libdriver.so";

/// A home with a folder of plugins, removed at the end.
struct Home(PathBuf);

impl Home {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        // Not in the target's folder, which may be writable by a group, by the umask of who builds.
        let folder = std::env::temp_dir().join(format!("highwater-home-{}-{number}", std::process::id()));
        fs::create_dir_all(folder.join("plugins")).unwrap();
        for folder in [&folder, &folder.join("plugins")] {
            fs::set_permissions(folder, Permissions::from_mode(0o755)).unwrap();
        }
        Self(fs::canonicalize(folder).unwrap())
    }

    fn plugins(&self) -> PathBuf {
        self.0.join("plugins")
    }

    fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        let path = self.plugins().join(name);
        fs::write(&path, contents).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        path
    }

    /// A manifest that is right.
    fn manifest(&self, name: &str, library: &str) -> PathBuf {
        let platform = format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS);
        self.write(
            &format!("{name}.toml"),
            format!(
                "name = \"{name}\"\nversion = \"1\"\nvendor = \"Acme\"\nlicence = \"MIT\"\n\
                 table_versions = {{ min = 1, max = 1 }}\n[library]\n{platform} = \"{library}\"\n"
            ),
        )
    }

    /// A real library, and a manifest for it.
    fn library(&self, name: &str, code: &str, arguments: &[&str]) {
        let source = self.0.join(format!("{name}.c"));
        fs::write(&source, code).unwrap();
        self.build(name, &source, arguments);
    }

    /// A real plugin, which calls itself `test` and is wrong in this way, and a manifest for it.
    fn plugin(&self, name: &str, wrong: &str) {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../plugin");
        let right = fs::read_to_string(format!("{folder}/tests/plugin/plugin.c")).unwrap();
        let code = right.replace("NOTHING};", &format!("{wrong}}};"));
        assert_eq!(code == right, wrong == "NOTHING", "the source chooses what is wrong in another way");
        let header = format!("-DHEADER=\"{folder}/include/highwater.h\"");
        self.library(name, &code, &[&header, "-fvisibility=hidden"]);
    }

    fn build(&self, name: &str, source: &Path, arguments: &[&str]) {
        let library = self.plugins().join(format!("{name}.so"));
        let mut compiler = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
        compiler.args(["-std=gnu11", "-shared", "-fPIC", "-w", "-o"]).arg(&library).args(arguments).arg(source);
        let output = compiler.output();
        let output = output
            .unwrap_or_else(|error| panic!("these tests need a C compiler: {compiler:?} does not start: {error}"));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        fs::set_permissions(&library, Permissions::from_mode(0o755)).unwrap();
        self.manifest(name, &format!("{name}.so"));
    }

    fn run(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Run {
        let mut command = Command::new(env!("CARGO_BIN_EXE_highwater"));
        command.args(arguments).env("HIGHWATER_PLUGIN_PATH", self.plugins()).env("HOME", &self.0);
        for name in ["XDG_DATA_HOME", "HIGHWATER_BACKEND", "HIGHWATER_ALLOW_INSECURE_PLUGINS", "HIGHWATER_MOCK"] {
            command.env_remove(name);
        }
        // No driver, even if this machine has one, so that the best backend is the one of the test.
        command.env("HIGHWATER_CUDA_LIBRARY", NO_DRIVER).env("HIGHWATER_HIP_LIBRARY", NO_DRIVER);
        Run::of(command.envs(variables.iter().copied()).output().unwrap(), arguments)
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// What doctor says of a plugin in the folder of `home`.
fn said<'o>(object: &'o Value, home: &Home, name: &str) -> &'o Value {
    let manifest = home.plugins().join(format!("{name}.toml")).display().to_string();
    let backends = object["backends"].as_array().unwrap();
    backends
        .iter()
        .find(|backend| backend["manifest"] == manifest.as_str())
        .unwrap_or_else(|| panic!("{name}: {object}"))
}

#[track_caller]
fn assert_said(object: &Value, home: &Home, name: &str, outcome: &str, reason: &str) {
    let said = said(object, home, name);
    assert_eq!((&said["outcome"], &said["name"]), (&outcome.into(), &name.into()), "{said}");
    assert_eq!((&said["usable"], &said["origin"]), (&false.into(), &"plugin".into()), "{said}");
    assert!(said["reason"].as_str().unwrap().contains(reason), "{said}");
    assert!(!said["hint"].as_str().unwrap().is_empty(), "{said}");
}

/// The header of an ELF file of a machine that this is not, and nothing behind it.
fn foreign_elf() -> [u8; 64] {
    let mut header = [0; 64];
    // 64 bits, little-endian, version 1; a shared library of SPARC.
    header[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    header[16] = 3;
    header[18] = 43;
    header[20] = 1;
    header[52] = 64;
    header
}

const PLAIN: &str = "int plain(void) { return 7; }";

#[test]
fn where_there_is_nothing_one_line_says_where_it_was_looked_for() {
    let home = Home::new();
    let table = home.run(&["doctor"], &[]).ended(0);
    let lines: Vec<&str> = table.stdout.lines().filter(|line| line.contains("plugins looked for in")).collect();
    let [line] = lines[..] else { panic!("{}", table.stdout) };
    let folder = format!("{} (absent)", home.plugins().display());
    let user = format!("{}/.local/share/highwater/plugins (absent)", home.0.display());
    for part in ["HIGHWATER_BACKEND (not set)", &folder, &user, "/usr/lib/highwater/plugins ("] {
        assert!(line.contains(part), "`{part}` is missing in {line}");
    }

    let object = home.run(&["doctor", "--json"], &[]).object();
    let places = object["places"].as_array().unwrap();
    let kinds: Vec<_> = places.iter().map(|place| place["kind"].as_str().unwrap()).collect();
    let expected = [
        "HIGHWATER_BACKEND",
        "HIGHWATER_PLUGIN_PATH",
        "user folder",
        "system folder",
        "system folder",
        "beside the executable",
    ];
    assert_eq!(kinds, expected);
    assert_eq!((&places[0]["path"], &places[0]["outcome"]), (&Value::Null, &"not set".into()));
    assert!(places.iter().all(|place| place["hint"] == ""), "{object}");
}

#[test]
fn every_broken_plugin_is_told_with_its_reason_and_harms_nobody() {
    let home = Home::new();
    home.write("text.so", "this is no library\n");
    home.manifest("text", "text.so");
    home.write("foreign.so", foreign_elf());
    home.manifest("foreign", "foreign.so");
    home.manifest("gone", "nowhere.so");
    home.manifest("mock", "nowhere.so");
    home.library("plain", PLAIN, &[]);
    home.library("unresolved", "int nobody_has_this(void); int f(void) { return nobody_has_this(); }", &["-Wl,-z,now"]);
    home.library("crashes", "#include <stdlib.h>\n__attribute__((constructor)) void c(void) { abort(); }", &[]);
    home.library("leaves", "#include <unistd.h>\n__attribute__((constructor)) void c(void) { _exit(0); }", &[]);
    home.library(
        "chatty",
        &format!("#include <stdio.h>\n__attribute__((constructor)) void c(void) {{ puts(\"hello\"); }}{PLAIN}"),
        &[],
    );
    let invalid = home.manifest("invalid", "plain.so");
    fs::write(&invalid, fs::read_to_string(&invalid).unwrap().replace("vendor", "vendro")).unwrap();
    let open = home.manifest("open", "plain.so");
    fs::set_permissions(&open, Permissions::from_mode(0o666)).unwrap();
    let folder = home.plugins().join("folder.toml");
    fs::create_dir(&folder).unwrap();
    fs::set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();

    let run = home.run(&["doctor", "--json"], &[]).ended(0);
    let object = run.object();
    assert!(object["usable"].as_array().unwrap().contains(&"mock".into()), "{object}");
    for (name, outcome, reason) in [
        ("text", "wrong platform", ""),
        ("foreign", "wrong platform", ""),
        ("gone", "library missing", "nowhere.so`: No such file"),
        ("plain", "no entry point", ""),
        ("unresolved", "symbol missing", "nobody_has_this"),
        ("crashes", "crashed in the probe", "signal: 6"),
        ("leaves", "crashed in the probe", "exit status: 0"),
        ("chatty", "no entry point", ""),
        ("invalid", "invalid manifest", "invalid.toml:3: the key `vendro` is unknown; known are `name`, "),
        ("open", "not permitted", "can be written to by every user (mode 0666)"),
        ("folder", "invalid manifest", "folder.toml: it is a folder"),
    ] {
        assert_said(&object, &home, name, outcome, reason);
    }
    // One that could never be meant stands behind all others.
    let mocks = object["backends"].as_array().unwrap().iter().filter(|backend| backend["name"] == "mock");
    assert_eq!(mocks.map(|mock| mock["origin"].as_str().unwrap()).next(), Some("built in"), "{object}");
    let table = home.run(&["doctor"], &[]).ended(0);
    table.assert_printed(&[
        "wrong platform",
        "no entry point",
        "symbol missing",
        "invalid manifest",
        "not permitted",
        "hint: ",
    ]);

    // Whoever asks for one of them by name is told the same, and gets no other.
    for arguments in [&["--backend", "crashes"][..], &["conformance", "--backend", "crashes"]] {
        home.run(arguments, &[]).assert_error(&["signal: 6"]);
    }
    home.run(&["--backend", "invalid"], &[]).assert_error(&["invalid.toml:3: "]);
    home.run(&["--backend", "nobody"], &[]).assert_error(&["no backend is named `nobody`", "plugins: ", "plain"]);
}

#[test]
fn a_plugin_that_hangs_holds_nobody_up_for_longer_than_its_limit() {
    let home = Home::new();
    home.library("hangs", "#include <unistd.h>\n__attribute__((constructor)) void c(void) { for (;;) pause(); }", &[]);
    let started = Instant::now();
    let object = home.run(&["doctor", "--json", "--load-limit", "1"], &[]).object();
    assert_said(&object, &home, "hangs", "hung in the probe", "within 1s");
    // The best of all is found all the same.
    let best = home.run(&["--workers", "0", "--load-limit", "1"], &[]).ended(0);
    assert!(best.stderr.contains("not hangs: hung in the probe"), "{}", best.stderr);
    assert!(started.elapsed() < Duration::from_secs(60));
}

const HANGING: &str = "HIGHWATER_TEST_HANGING";

/// Ends with `abort`, because the process cannot exit.
#[test]
#[ignore = "another test runs it in a process of its own"]
fn child_opens_a_plugin_whose_constructor_hangs() {
    let library = std::env::var_os(HANGING).unwrap();
    let limit = Duration::from_millis(300);
    let options = highwater::OpenOptions::new().with_path(library).with_load_limit(limit);
    let error = options.open().unwrap_err().error;
    assert!(error.message().contains("constructors did not come back within 300ms"), "{error}");
    assert!(error.hint().contains("abort"), "{error}");
    // No other backend is opened either: it would hang, the mock in the start of a thread.
    for name in ["cuda", "mock"] {
        assert_eq!(highwater::open(name).unwrap_err().error.kind(), highwater::ErrorKind::InvalidState);
    }
    let fallback = highwater::OpenOptions::new().without_plugins().with_fallback(highwater::Fallback::Mock);
    let report = fallback.open().unwrap_err().report;
    assert!(report.to_string().contains("have not returned"), "{report}");
    std::process::abort();
}

#[test]
fn a_process_whose_loader_is_blocked_says_so_and_opens_nothing() {
    use std::os::unix::process::ExitStatusExt as _;
    let home = Home::new();
    home.library("hangs", "#include <unistd.h>\n__attribute__((constructor)) void c(void) { for (;;) pause(); }", &[]);
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "finding::child_opens_a_plugin_whose_constructor_hangs", "--nocapture", "--ignored"]);
    child.env_remove("HIGHWATER_BACKEND").env(HANGING, home.plugins().join("hangs.so"));
    let mut child = child.spawn().unwrap();
    let started = Instant::now();
    let status = loop {
        match child.try_wait().unwrap() {
            None if started.elapsed() < Duration::from_secs(30) => std::thread::sleep(Duration::from_millis(20)),
            status => break status,
        }
    };
    let _ = child.kill().and_then(|()| child.wait());
    assert_eq!(status.expect("the process hangs").signal(), Some(6), "it aborts");
}

#[test]
fn what_others_can_change_is_loaded_where_that_was_allowed() {
    let home = Home::new();
    home.library("plain", PLAIN, &[]);
    fs::set_permissions(home.plugins(), Permissions::from_mode(0o777)).unwrap();
    // The report shows the folder, and not the files that others may have put into it.
    let refused = |variables| {
        let object = home.run(&["doctor", "--json"], variables).object();
        let place = object["places"].as_array().unwrap()[1].clone();
        assert_eq!((&place["kind"], &place["outcome"]), (&"HIGHWATER_PLUGIN_PATH".into(), &"not permitted".into()));
        assert!(place["reason"].as_str().unwrap().contains("can be written to by every user (mode 0777)"), "{place}");
        assert!(!object.to_string().contains("plain"), "{object}");
        place["hint"].as_str().unwrap().to_owned()
    };
    let hint = refused(&[]);
    assert!(hint.contains("chmod go-w") && hint.contains("--allow-insecure-plugins"), "{hint}");
    home.run(&["--backend", "plain"], &[]).assert_error(&["mode 0777", "permission denied"]);
    let variable = [("HIGHWATER_ALLOW_INSECURE_PLUGINS", "1")];
    for (arguments, variables) in
        [(&["doctor", "--json", "--allow-insecure-plugins"][..], &[][..]), (&["doctor", "--json"][..], &variable[..])]
    {
        let object = home.run(arguments, variables).object();
        assert_said(&object, &home, "plain", "no entry point", "");
        assert!(
            said(&object, &home, "plain")["notes"][0].as_str().unwrap().contains("not safe, and allowed"),
            "{object}"
        );
    }
    assert!(refused(&[("HIGHWATER_ALLOW_INSECURE_PLUGINS", "yes")]).contains("it is `yes`"));
}

/// The output has no terminal commands and no endless line.
#[track_caller]
fn assert_harmless(run: &Run) {
    for text in [&run.stdout, &run.stderr] {
        let harm = |c: char| c != '\n' && (c.is_control() || ('\u{202a}'..='\u{202e}').contains(&c));
        assert!(!text.contains(harm), "{text:?}");
        assert!(text.len() < 100_000, "{} bytes: {}", text.len(), &text[..2000]);
    }
}

#[test]
fn what_others_called_their_files_is_no_command_to_the_terminal() {
    const EVIL: &str = "\x1b]0;evil\x07\u{9b}2J\u{202e}";
    let home = Home::new();
    home.library(
        "crashes",
        "#include <stdio.h>\n#include <stdlib.h>\n__attribute__((constructor)) void c(void) \
         { fprintf(stderr, \"gone \\033[2J\"); fflush(stderr); abort(); }",
        &[],
    );
    home.write("plain.so", "no library");
    home.manifest(&format!("a{EVIL}"), "plain.so");
    home.manifest("library", &EVIL.replace('\x1b', "\\u001b").replace('\x07', "\\u0007"));
    let manifest = home.manifest("key", "plain.so");
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, format!("\"\\u001b[31m{}\" = 1\n{text}", "k".repeat(50_000))).unwrap();
    let manifest = home.manifest("name", "plain.so");
    fs::write(&manifest, fs::read_to_string(&manifest).unwrap().replace("\"name\"", "\"\\u001b[31mname\"")).unwrap();
    let manifest = home.manifest("platform", "plain.so");
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, text.replace(std::env::consts::ARCH, "\"\\u001b[31m\".x")).unwrap();

    for arguments in [&["doctor"][..], &["doctor", "--json"], &["--workers", "0"]] {
        let run = home.run(arguments, &[("HIGHWATER_BACKEND", if arguments[0] == "doctor" { "" } else { EVIL })]);
        assert_harmless(&run);
        assert!(run.stdout.contains("evil") || run.stderr.contains("evil"), "{}", run.stderr);
    }
    let object = home.run(&["doctor", "--json"], &[]).object();
    // As data the names are unchanged.
    assert_eq!(said(&object, &home, &format!("a{EVIL}"))["name"], format!("a{EVIL}"));
    let crashed = said(&object, &home, "crashes")["reason"].as_str().unwrap();
    assert!(crashed.ends_with(r"it said: gone \u{1b}[2J"), "{crashed}");
    let long = "x".repeat(100_000);
    for value in [EVIL, &long] {
        for variable in ["HIGHWATER_BACKEND", "HIGHWATER_MOCK", "HIGHWATER_PLUGIN_PATH", "CUBLAS_WORKSPACE_CONFIG"] {
            for arguments in [&["--workers", "0"][..], &["doctor"], &["--workers", "0", "--json"]] {
                assert_harmless(&home.run(arguments, &[(variable, value)]));
            }
        }
        for arguments in [["--backend", value], ["--data", value], ["--threads", value], ["conformance", value]] {
            assert_harmless(&home.run(&arguments, &[]));
        }
    }
}

#[test]
fn the_variable_names_the_backend_where_the_command_line_does_not() {
    let home = Home::new();
    let named = home.run(&["--workers", "0"], &[("HIGHWATER_BACKEND", "mock")]).ended(0);
    assert!(named.stderr.contains("backend mock: `mock` was asked for"), "{}", named.stderr);
    home.run(&["--workers", "0"], &[("HIGHWATER_BACKEND", "metal")]).assert_error(&["no backend is named `metal`"]);
    let text = home.write("text.so", "this is no library\n").display().to_string();
    home.run(&["--workers", "0"], &[("HIGHWATER_BACKEND", &text)]).assert_error(&[]);
    let none = home.run(&["--workers", "0"], &[("HIGHWATER_BACKEND", "/nowhere/lib.so")]);
    none.assert_error(&["`/nowhere/lib.so`: No such file"]);
    home.run(&["--workers", "0", "--backend", "mock"], &[("HIGHWATER_BACKEND", "metal")]).ended(0);
    // Doctor looks at it too.
    let object = home.run(&["doctor", "--json"], &[("HIGHWATER_BACKEND", &text)]).object();
    let first = &object["backends"][0];
    assert_eq!((&first["outcome"], &first["library"]), (&"wrong platform".into(), &text.as_str().into()), "{object}");
}

#[test]
fn a_folder_that_is_none_is_told() {
    let home = Home::new();
    let file = home.write("file", "");
    let path = format!("relative:{}:{}", file.display(), home.0.join("none").display());
    let variables = [("HIGHWATER_PLUGIN_PATH", path.as_str())];
    let table = home.run(&["doctor"], &variables).ended(0);
    table.assert_printed(&[
        "relative (not tried): a relative path",
        "hint: give an absolute path",
        "file (failed): Not a directory",
    ]);
    assert!(table.stdout.contains(&format!("{} (absent)", home.0.join("none").display())), "{}", table.stdout);
}

#[test]
fn a_probe_answers_in_one_object_whatever_the_plugin_prints() {
    let home = Home::new();
    home.library("chatty", &format!("#include <stdio.h>\n__attribute__((constructor)) void c(void) {{ puts(\"hello\"); fflush(stdout); }}{PLAIN}"), &[]);
    let file = home.plugins().join("chatty.so").display().to_string();
    let run = home.run(&["probe", "--open", &file], &[]).ended(0);
    let object = run.object();
    assert_eq!((&object["probe"], &object["file"]), (&1.into(), &file.as_str().into()), "{object}");
    assert_eq!(
        (&object["opened"], &object["refusal"]["outcome"]),
        (&false.into(), &"no entry point".into()),
        "{object}"
    );
    assert!(run.stderr.contains("hello"), "{}", run.stderr);
}

// ---------------------------------------------------------------- plugins that load

#[test]
fn a_plugin_that_works_is_usable_by_name_by_path_and_by_the_variable() {
    let home = Home::new();
    home.plugin("test", "NOTHING");
    let run = home.run(&["doctor", "--json"], &[]).ended(0);
    let object = run.object();
    let plugin = said(&object, &home, "test");
    assert_eq!((&plugin["outcome"], &plugin["usable"]), (&"usable".into(), &true.into()), "{plugin}");
    assert_eq!(plugin["devices"].as_array().unwrap().len(), 1, "{plugin}");
    assert!(object["usable"].as_array().unwrap().contains(&"test".into()), "{object}");
    let table = home.run(&["doctor"], &[]);
    assert!(table.stdout.contains("test.toml") && table.stdout.contains("device 0: "), "{}", table.stdout);

    // In this process too.
    let folder = highwater::OpenOptions::new().with_search_folder(home.plugins());
    for options in [folder.clone().with_name("test"), folder.with_path(home.plugins().join("test.so"))] {
        let opened = options.open().unwrap();
        assert_eq!(opened.backend.identity().name, "test");
        let taken = opened.report.taken().unwrap();
        assert_eq!((taken.name.as_str(), taken.origin.library()), ("test", Some(&*home.plugins().join("test.so"))));
    }
    // It has no hardware behind it, so nobody gets it without asking for it.
    let best = home.run(&["--workers", "0"], &[]).ended(0);
    assert!(best.stderr.contains("not test: usable: it opens, but is no real device"), "{}", best.stderr);
    // Its device multiplies nothing, so the answer is wrong: it was this one that was used, and no other.
    let path = home.plugins().join("test.so").display().to_string();
    let by_name = home.run(&["--workers", "0", "--backend", "test"], &[]);
    let by_path = home.run(&["--workers", "0"], &[("HIGHWATER_BACKEND", &path)]);
    for (run, reason) in [(by_name, "`test` was asked for"), (by_path, "was asked for by HIGHWATER_BACKEND")] {
        assert_eq!(run.code, Some(1), "{}", run.stderr);
        assert!(run.stderr.contains("backend test: ") && run.stderr.contains(reason), "{}", run.stderr);
    }
}

#[test]
fn workers_open_the_plugin_of_their_owner() {
    let home = Home::new();
    let library = home.plugins().join("mock.so");
    fs::copy(crate::built::plugin("mock"), &library).unwrap();
    home.manifest("mock", "mock.so");
    let manifest = home.plugins().join("mock.toml").display().to_string();
    // Also where others could change it, which was allowed to the owner.
    fs::set_permissions(home.plugins(), Permissions::from_mode(0o777)).unwrap();
    let variables = [("HIGHWATER_BACKEND", manifest.as_str())];
    home.run(&["--workers", "2"], &variables).assert_error(&["mode 0777"]);
    let run = home.run(&["--workers", "2", "--json", "--allow-insecure-plugins"], &variables).ended(0);
    assert!(run.stderr.contains("was asked for by HIGHWATER_BACKEND"), "{}", run.stderr);
    assert_eq!(run.object()["processes"], 3, "{}", run.stdout);
}

#[test]
fn a_plugin_that_breaks_the_rules_is_told_by_its_fault() {
    let home = Home::new();
    for (name, wrong) in [
        ("refuses", "ENTRY_NULL"),
        ("newer", "VERSIONS_ABOVE"),
        ("lacking", "SLOT_CAPTURE_NULL"),
        ("empty", "NO_DEVICE"),
        ("other", "NOTHING"),
        ("hanging", "ENTRY_HANGS"),
    ] {
        home.plugin(name, wrong);
    }
    let object = home.run(&["doctor", "--json", "--load-limit", "2"], &[]).object();
    assert_said(&object, &home, "refuses", "failed", "refused");
    assert_said(&object, &home, "newer", "version out of range", "2 to 9");
    assert_said(&object, &home, "lacking", "bad table", "slot");
    assert_said(&object, &home, "empty", "no device", "");
    assert_said(&object, &home, "other", "invalid manifest", "calls itself `test`");
    assert_said(&object, &home, "hanging", "hung in the probe", "within 2s");
}
