//! The library as C programs use it: its header in C11 and C++17, its rules and the examples, on the mock and over the simulated CUDA,
//! under the sanitizers of the C compiler where they exist. `scripts/check-memory.sh` runs valgrind.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// What describes devices to a program, so that a test says it all.
const VARIABLES: [&str; 6] = [
    "HIGHWATER_BACKEND",
    "HIGHWATER_MOCK",
    "HIGHWATER_SIMULATED_CUDA",
    "HIGHWATER_HOST_MEMORY",
    "HIGHWATER_SHARING",
    "CUDA_VISIBLE_DEVICES",
];

fn command(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(program);
    for variable in VARIABLES {
        command.env_remove(variable);
    }
    command
}

/// Runs a command to success, and returns what it printed.
#[track_caller]
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?} does not start: {error}"));
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}\n{err}", output.status);
    out.into_owned()
}

fn scratch(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}

/// The line that an installation prints: how pkg-config finds it.
fn use_of(prefix: &Path) -> String {
    format!("export PKG_CONFIG_PATH=\"{}/lib/pkgconfig:$PKG_CONFIG_PATH\"", prefix.display())
}

/// The library, installed once for all tests of this file.
fn installed() -> &'static Path {
    static INSTALLED: LazyLock<PathBuf> = LazyLock::new(|| {
        let prefix = scratch("c");
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("it is a folder of the target's");
        let mut script = command(format!("{ROOT}/scripts/install-c.sh"));
        let printed = run(script.arg(&prefix).env("CARGO_TARGET_DIR", target));
        assert_eq!(printed, format!("{}\n", use_of(&prefix)));
        prefix
    });
    &INSTALLED
}

/// Compiles a source of the tests or the examples.
fn compile(source: &str, flags: &[&str], output: &str) -> PathBuf {
    compile_file(&Path::new(ROOT).join(source), flags, output)
}

/// Compiles a file. The warnings are errors.
fn compile_file(source: &Path, flags: &[&str], output: &str) -> PathBuf {
    let (prefix, output) = (installed(), scratch(output));
    let (include, lib) = (prefix.join("include"), prefix.join("lib"));
    let mut cc = command(std::env::var("CC").unwrap_or_else(|_| "cc".to_owned()));
    cc.args(["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-pthread", "-g"]).arg("-I").arg(include);
    cc.arg(source).arg("-L").arg(&lib).args(flags).arg("-o").arg(&output);
    run(cc.arg(format!("-Wl,-rpath,{}", lib.display())));
    output
}

/// Returns whether a command can be run here. If not, the test says so and passes.
fn exists(program: &str, arguments: &[&str]) -> bool {
    let found = command(program).args(arguments).output().is_ok_and(|output| output.status.success());
    if !found {
        println!("skipped: `{program} {}` does not work here", arguments.join(" "));
    }
    found
}

#[test]
fn the_header_compiles_as_c11_and_as_cpp17_without_warnings() {
    let header = format!("{ROOT}/c-api/include/highwater/highwater.h");
    for (compiler, language, standard) in [
        ("cc", "c", "c11"),
        ("gcc", "c", "c11"),
        ("clang", "c", "c11"),
        ("c++", "c++", "c++17"),
        ("g++", "c++", "c++17"),
        ("clang++", "c++", "c++17"),
    ] {
        if exists(compiler, &["--version"]) {
            let mut check = command(compiler);
            check.args([&format!("-std={standard}"), "-x", language, "-fsyntax-only"]);
            let checks = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror"];
            run(check.args(checks).arg(&header));
        }
    }
}

#[test]
fn the_library_exports_the_functions_of_the_header_and_no_other_of_its_names() {
    let header = std::fs::read_to_string(format!("{ROOT}/c-api/include/highwater/highwater.h")).unwrap();
    let words = header.split(|letter: char| !(letter.is_alphanumeric() || letter == '_' || letter == '('));
    let mut declared: Vec<_> = words.filter_map(|word| word.split_once('(')).map(|(name, _)| name).collect();
    declared.retain(|name| name.starts_with("highwater_"));
    // Comments name functions and types, too.
    declared.sort_unstable();
    declared.dedup();
    if !exists("nm", &["--version"]) {
        return;
    }
    let symbols = run(command("nm").args(["-D", "--defined-only"]).arg(installed().join("lib/libhighwater.so")));
    let mut exported: Vec<_> = symbols.split_whitespace().filter(|word| word.starts_with("highwater_")).collect();
    exported.sort_unstable();
    assert!(exported.len() > 50, "{exported:?}");
    assert_eq!(declared, exported);
}

#[test]
fn the_rules_hold_under_the_sanitizers_of_the_compiler() {
    let probe = scratch("empty.c");
    std::fs::write(&probe, "int main(void) { return 0; }\n").unwrap();
    let sanitizers = "-fsanitize=address,undefined";
    let output = scratch("empty").display().to_string();
    let sanitized = exists("cc", &[sanitizers, &probe.display().to_string(), "-o", &output]);
    let flags: &[&str] = if sanitized { &["-lhighwater", sanitizers] } else { &["-lhighwater"] };
    let rules = compile("c-api/tests/rules.c", flags, "rules-sanitized");
    assert_eq!(run(command(rules).env("HIGHWATER_BACKEND", "mock")), "the rules hold\n");
}

#[test]
fn the_installation_prints_its_use() {
    let usage = "install-c.sh PREFIX [--release]";
    let script = |arguments: &[&str]| command(format!("{ROOT}/scripts/install-c.sh")).args(arguments).output().unwrap();
    for help in ["--help", "-h"] {
        let output = script(&[help]);
        assert!(output.status.success(), "{help}");
        assert!(String::from_utf8_lossy(&output.stdout).contains(usage), "{help}: {output:?}");
    }
    for wrong in [&[][..], &["--release"], &["prefix", "--debug"], &["prefix", "--release", "more"]] {
        let output = script(wrong);
        assert_eq!(output.status.code(), Some(2), "{wrong:?}: {output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(usage), "{wrong:?}: {output:?}");
    }
}

#[test]
fn without_a_device_each_function_names_a_remedy_that_it_has() {
    let rules = compile("c-api/tests/rules.c", &["-lhighwater"], "rules-without-device");
    let mut rules = command(rules);
    // Devices of this machine stay out.
    rules.env("CUDA_VISIBLE_DEVICES", "").env("ROCR_VISIBLE_DEVICES", "").env("HIP_VISIBLE_DEVICES", "");
    assert_eq!(run(rules.arg("without device")), "no device\n");
}

#[test]
fn the_rules_hold_over_the_simulated_cuda() {
    let rules = compile("c-api/tests/rules.c", &["-lhighwater"], "rules");
    let mut script = command(format!("{ROOT}/scripts/simulated.sh"));
    assert_eq!(run(script.arg("cuda").arg(rules).env("HIGHWATER_BACKEND", "cuda")), "the rules hold\n");
}

/// What each example prints last.
const PRINTED: [&str; 5] = [
    "[58, 64, 139, 154]",
    "2 and 9",
    "the first process reads what the other wrote",
    "its weights are here, and its ticket still opens",
    "3 tensors are on the device",
];

#[test]
fn the_examples_run_on_the_mock_and_over_the_simulated_cuda() {
    if !exists("make", &["--version"]) || !exists("pkg-config", &["--version"]) {
        return;
    }
    let arguments = |goal: &str| {
        let (prefix, build) = (installed().display(), scratch("c-examples"));
        [goal.to_owned(), format!("PREFIX={prefix}"), format!("BUILD={}", build.display())]
    };
    let folder = format!("{ROOT}/examples/c");
    let mock = run(command("make").args(["-s", "-C", &folder]).args(arguments("check")));
    assert_eq!(mock.lines().last(), Some(use_of(installed()).as_str()), "{mock}");
    let mut script = command(format!("{ROOT}/scripts/simulated.sh"));
    script.args(["cuda", "make", "-s", "-C", &folder]).args(arguments("run"));
    let cuda = run(script.env("HIGHWATER_BACKEND", "cuda"));
    for printed in [mock, cuda] {
        for line in PRINTED {
            assert!(printed.lines().any(|found| found == line), "`{line}` is not in:\n{printed}");
        }
    }
}

#[test]
fn an_example_runs_on_a_plugin() {
    let plugin = compile(
        "examples/c-backend/backend.c",
        &["-shared", "-fPIC", &format!("-I{ROOT}/plugin/include")],
        "plugin.so",
    );
    let program = compile("examples/c/gemm.c", &["-lhighwater"], "gemm-plugin");
    let mut program = command(program);
    program.env("HIGHWATER_BACKEND", plugin).env("HIGHWATER_ALLOW_INSECURE_PLUGINS", "1");
    assert_eq!(run(&mut program), "[58, 64, 139, 154]\n");
}

#[test]
fn an_example_runs_from_the_static_library() {
    let archive = installed().join("lib/libhighwater.a").display().to_string();
    let rest = ["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl", "-lc"];
    let program = compile("examples/c/gemm.c", &[&[archive.as_str()][..], &rest].concat(), "gemm-static");
    let print = run(command(program).env("HIGHWATER_BACKEND", "mock"));
    assert_eq!(print, "[58, 64, 139, 154]\n");
}

/// Returns the blocks of C of a page.
fn blocks(page: &str) -> Vec<&str> {
    let rest = page.split("\n```c\n").skip(1);
    rest.map(|rest| rest.split_once("\n```").expect("a block ends").0).collect()
}

#[test]
fn the_blocks_of_the_page_compile_and_the_programs_among_them_run() {
    let page = std::fs::read_to_string(format!("{ROOT}/docs/c.md")).unwrap();
    let (programs, parts): (Vec<_>, Vec<_>) = blocks(&page).into_iter().partition(|block| block.contains("int main("));
    assert!(!programs.is_empty() && parts.len() > 5, "{} and {}", programs.len(), parts.len());
    // A part is the body of a function, with the objects that the text of the page has by then.
    let mut all = "#include <highwater/highwater.h>\n#include <stdio.h>\n".to_owned();
    all += "void died(void *user);\n";
    all += "void multiply(void *user, uint64_t handle, uint64_t workspace, size_t workspace_bytes);\n";
    for (index, part) in parts.iter().enumerate() {
        let objects = ["runtime", "device", "stream", "buffer", "pinned"];
        let arguments = objects.map(|name| format!("highwater_{name} *{name}")).join(", ");
        let used = objects.map(|name| format!("(void){name};")).concat();
        all += &format!("void part_{index}({arguments});\nvoid part_{index}({arguments}) {{\n{used}\n{part}\n}}\n");
    }
    let write = |name: &str, text: &str| std::fs::write(scratch(name), text).map(|()| name.to_owned()).unwrap();
    compile_file(&scratch(&write("page-parts.c", &all)), &["-c"], "page-parts.o");
    for (index, program) in programs.iter().enumerate() {
        let source = scratch(&write(&format!("page-{index}.c"), program));
        let program = compile_file(&source, &["-lhighwater"], &format!("page-{index}"));
        run(&mut command(program));
    }
}
