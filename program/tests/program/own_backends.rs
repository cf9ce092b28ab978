//! Backends as others write them: the one in C (`examples/c-backend`) and the one in Rust (`conformance/example-backend`) are
//! built, loaded as plugins and held against the conformance suite; and the guide's pieces of code stand in them.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use highwater::plugin::{LoadOptions, load};
use highwater::{GemmShape, Runtime};
use serde_json::Value;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// Cases that a backend with the groups `required`, `host` and `blas` passes, at least.
const PASSED: u64 = 130;

fn read(file: &str) -> String {
    fs::read_to_string(Path::new(ROOT).join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// Runs the C compiler on the backend in C, with the flags of its Makefile. `None`: there is no such compiler.
fn compile(compiler: &OsString, more: &[&str]) -> Option<()> {
    let makefile = read("examples/c-backend/Makefile");
    let flags = makefile.lines().find_map(|line| line.strip_prefix("FLAGS = ")).expect("the Makefile has FLAGS");
    let mut command = Command::new(compiler);
    command.current_dir(Path::new(ROOT).join("examples/c-backend"));
    command.args(flags.split_whitespace()).args(more).arg("backend.c");
    match command.output() {
        Ok(output) => {
            let words = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{command:?} failed:\n{words}");
            Some(())
        }
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => panic!("{command:?}: {error}"),
    }
}

/// The plugin in C.
fn c_backend() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let makefile = read("examples/c-backend/Makefile");
        let link = makefile.lines().find_map(|line| line.strip_prefix("LINK = ")).expect("the Makefile has LINK");
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libhighwater_c.so");
        let compiler = env::var_os("CC").unwrap_or_else(|| "cc".into());
        let mut more: Vec<&str> = link.split_whitespace().collect();
        more.extend(["-o", file.to_str().expect("the target folder's name is UTF-8")]);
        compile(&compiler, &more).unwrap_or_else(|| {
            panic!(
                "there is no C compiler {compiler:?}, which builds examples/c-backend: install gcc or clang, or set CC"
            )
        });
        file
    })
}

/// The plugin in Rust.
fn rust_backend() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("the folder is one of the target folder's");
        let mut cargo = Command::new(env!("CARGO"));
        cargo.current_dir(ROOT).arg("build").args(["--quiet", "--locked", "--profile", "simulated"]);
        cargo.args(["--package", "highwater-example-backend"]).arg("--target-dir").arg(target);
        let output = cargo.output();
        let output =
            output.unwrap_or_else(|error| panic!("this test builds a backend: {cargo:?} does not start: {error}"));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        target.join("simulated/libhighwater_example.so")
    })
}

/// Gives the backend to the suite. Returns its report, or the error.
fn conformance(file: &Path, more: &[&str]) -> (Value, std::process::Output) {
    let mut program = Command::new(env!("CARGO_BIN_EXE_highwater"));
    // A umask that leaves files writable by a group yields such plugins, too.
    program.env("HIGHWATER_ALLOW_INSECURE_PLUGINS", "1").env_remove("HIGHWATER_MOCK");
    let output = program.args(["conformance", "--json", "--plugin"]).arg(file).args(more).output();
    let output = output.expect("the program starts");
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let report = serde_json::from_str(&stdout).unwrap_or_else(|error| panic!("{error}: {stdout}\n{stderr}"));
    (report, output)
}

/// The suite has nothing against the backend, and leaves out only what the device does not claim.
#[track_caller]
fn conforms(file: &Path) {
    let (report, output) = conformance(file, &[]);
    let count = |key: &str| report[key].as_u64().unwrap_or_else(|| panic!("{key}: {report}"));
    assert_eq!((count("failed"), count("expected_failures")), (0, 0), "{:#}", report["failures"]);
    assert!(count("passed") >= PASSED, "{} cases passed, expected are {PASSED} or more", count("passed"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for skip in report["skips"].as_array().expect("a list of cases that were left out") {
        let reason = skip["reason"].as_str().expect("a reason");
        // Two cases need more memory than these devices have.
        let is_large = skip["case"].as_str().is_some_and(|case| case.contains("four_gibibytes"));
        let is_small = is_large && reason.contains("of free memory");
        let is_lacking = reason.starts_with("the capability `") || reason == "the backend has one device";
        assert!(is_lacking || is_small, "{skip}");
    }
}

/// The plugin says what it is, and core's pools work over it and get everything back.
#[track_caller]
fn works(file: &Path, name: &str, groups: &[&str]) {
    let plugin = load(file, &LoadOptions::new()).unwrap();
    assert_eq!((plugin.name(), plugin.table_version()), (name, 1));
    assert_eq!(plugin.groups(), groups);
    let runtime = Runtime::new(plugin.open().unwrap()).unwrap();
    assert_eq!(plugin.warnings(), [""; 0]);
    let device = runtime.device(0).unwrap();
    let stream = device.create_stream().unwrap();
    let a = stream.upload(&[1.0_f32, 2.0, 3.0, 4.0]).unwrap();
    let b = stream.upload(&[0.0_f32, 1.0, 1.0, 0.0]).unwrap();
    let c = device.allocate::<f32>(4).unwrap();
    stream.blas().unwrap().gemm(&GemmShape::of::<f32>(2, 2, 2), 1.0, &a, &b, 0.0, &c).unwrap();
    assert_eq!(stream.download(&c).unwrap(), [3.0, 4.0, 1.0, 2.0]);
    drop((a, b, c, stream, device));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn the_backend_in_c_conforms() {
    conforms(c_backend());
}

/// Rules of the table that the suite checks in every call of a plugin. Each has the text of the backend in C, a text that breaks the
/// rule, and words of the failures.
const BROKEN_RULES: [(&str, &str, &str); 7] = [
    ("if (((const unsigned char *)given)[byte] != 0)", "if (0)", "in `open` with success for a longer struct"),
    (
        "    CHECK(take(&options, sizeof options, given, e));\n    CHECK(none_but_0(options.priority",
        "    options = *given;\n    CHECK(none_but_0(options.priority",
        "in `create_stream` with success for a longer struct whose unknown bytes are not zero",
    ),
    (
        "    for (uint64_t byte = bytes; byte < size; byte++)\n",
        "    if (size != bytes)\n        return invalid(e, \"size\", size);\n    for (uint64_t byte = bytes; byte < size; byte++)\n",
        "is no size",
    ),
    (
        "    memcpy(answer, &written, sizeof written);",
        "    memcpy(answer, &bytes, sizeof bytes);",
        "in `capabilities` with a size of 72 in a `hw_capabilities` of 64 bytes",
    ),
    (
        "    CHECK(none_but_0(options.kind, \"such memory\", e));\n    return add_block(b, &b->device",
        "    *ptr = 256;\n    CHECK(none_but_0(options.kind, \"such memory\", e));\n    return add_block(b, &b->device",
        "in `allocate` with an answer, although it returned an error",
    ),
    (
        "    vsnprintf(e->message, sizeof e->message, format, arguments);\n",
        "    vsnprintf(e->message, 1, format, arguments);\n",
        "and no message",
    ),
    (
        "    va_end(arguments);\n",
        "    va_end(arguments);\n    e->has_vendor_code = 7;\n",
        "and 7 for `has_vendor_code`",
    ),
];

#[test]
fn a_backend_in_c_that_breaks_a_rule_of_the_table_does_not_conform() {
    let source = read("examples/c-backend/backend.c");
    std::thread::scope(|scope| {
        for (number, (text, wrong, words)) in BROKEN_RULES.iter().enumerate() {
            assert_eq!(source.matches(text).count(), 1, "{text}");
            let source = source.replacen(text, wrong, 1);
            scope.spawn(move || {
                let (report, _) = conformance(&variant(&source, number), &["--filter", "memory.zero"]);
                let failures = report.to_string();
                assert!(failures.contains(words), "{wrong}: {failures}");
            });
        }
    });
}

/// Changes of the backend in C that end the process when the bytes behind a block have changed.
const GUARDED: [(&str, &str); 3] = [
    ("calloc(1, bytes + 2 * ALIGNMENT)", "calloc(1, bytes + 3 * ALIGNMENT)"),
    (
        "    to->bytes += bytes;\n",
        "    memset((void *)(uintptr_t)(*answer + bytes), 0xa5, ALIGNMENT);\n    to->bytes += bytes;\n",
    ),
    (
        "    from->bytes -= block->bytes;\n",
        "    for (uint64_t byte = 0; byte < ALIGNMENT; byte++)\n        \
         if (((unsigned char *)(uintptr_t)(address + block->bytes))[byte] != 0xa5)\n            \
         abort();\n    from->bytes -= block->bytes;\n",
    ),
];

/// Failed before: mutants wrote past the end of blocks, or let the suite write there, because the backend in C checks no range. The run
/// of all mutants aborted in `malloc`.
#[test]
fn mutants_leave_the_memory_of_the_backend_in_c_whole() {
    let mut source = read("examples/c-backend/backend.c");
    for (text, guarded) in GUARDED {
        assert_eq!(source.matches(text).count(), 1, "{text}");
        source = source.replacen(text, guarded, 1);
    }
    let file = variant(&source, BROKEN_RULES.len());
    for clause in ["copy.zero", "fill.zero", "fill.exact", "host.usable"] {
        let (report, output) = conformance(&file, &["--saboteurs", "--filter", clause]);
        assert!(output.status.success(), "{report}");
        let count = |key: &str| report[key].as_u64().unwrap_or_else(|| panic!("{key}: {report}"));
        assert!(count("saboteurs") > 0 && count("caught") == count("saboteurs"), "{report}");
    }
}

/// Builds a variant of the backend in C, without optimization.
fn variant(source: &str, number: usize) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (code, file) = (folder.join(format!("variant-{number}.c")), folder.join(format!("libvariant-{number}.so")));
    fs::write(&code, source).unwrap();
    let mut compiler = Command::new(env::var_os("CC").unwrap_or_else(|| "cc".into()));
    compiler.args(["-O0", "-shared", "-fPIC", "-pthread", "-I"]).arg(Path::new(ROOT).join("plugin/include"));
    let output = compiler.arg(&code).arg("-o").arg(&file).output().expect("the compiler starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    file
}

#[test]
fn the_backend_in_c_works_under_a_runtime() {
    works(c_backend(), "c", &["required", "host", "blas"]);
}

#[test]
fn the_backend_in_c_is_short_and_every_compiler_here_is_content_with_it() {
    let lines = read("examples/c-backend/backend.c").lines().count();
    assert!(lines < 600, "backend.c has {lines} lines");
    for compiler in ["gcc", "clang"] {
        // One of them is `cc` in most places, and the other is not everywhere.
        let _ = compile(&compiler.into(), &["-fsyntax-only"]);
    }
}

#[test]
fn the_backend_in_rust_conforms() {
    conforms(rust_backend());
}

#[test]
fn the_backend_in_rust_works_under_a_runtime() {
    // Every slot is there, and answers `Unsupported` where the backend leaves a method to the trait.
    let every = [
        "required", "timing", "foreign", "host", "register", "blas", "lt", "capture", "ipc", "reset", "mapped",
        "adopt", "rows",
    ];
    works(rust_backend(), "example", &every);
}

/// The texts between fences of a language.
fn fenced<'t>(text: &'t str, language: &str) -> Vec<&'t str> {
    let opening = format!("```{language}\n");
    text.split(opening.as_str()).skip(1).map(|rest| rest.split("\n```").next().unwrap_or_default()).collect()
}

#[test]
fn the_guides_pieces_of_code_stand_in_the_examples() {
    let guide = read("docs/write-a-backend.md");
    let folder = Path::new(ROOT).join("conformance/example-backend/src");
    let mut rust = vec![read("conformance/example-backend/build.rs"), read("conformance/example-backend/Cargo.toml")];
    for file in fs::read_dir(folder).unwrap() {
        rust.push(fs::read_to_string(file.unwrap().path()).unwrap());
    }
    let c = [read("examples/c-backend/backend.c")];
    for (language, files, least) in [("c", &c[..], 10), ("rust", &rust[..], 5), ("toml", &rust[..], 1)] {
        let pieces = fenced(&guide, language);
        assert!(pieces.len() >= least, "the guide has {} pieces of {language}", pieces.len());
        for piece in pieces {
            let stands = files.iter().any(|file| file.contains(piece));
            assert!(stands, "this piece of {language} stands in none of the examples:\n{piece}");
        }
    }
}
