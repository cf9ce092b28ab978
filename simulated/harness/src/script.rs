//! Runs commands under `scripts/simulated.sh`, and reads what it lays out.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::Once;

use libloading::Library;

/// Variables of the caller that would change what a test sees.
const FOREIGN: [&str; 9] = [
    "HIGHWATER_MOCK",
    "HIGHWATER_SIMULATED_CUDA",
    "HIGHWATER_SIMULATED_HIP",
    "HIGHWATER_HIP_LIBRARY",
    "HIGHWATER_HIPBLAS_LIBRARY",
    "CUBLAS_WORKSPACE_CONFIG",
    "ROCBLAS_TENSILE_LIBPATH",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
];

/// Makes a command that sees `environment` and no setting of the caller.
#[must_use]
pub fn clean(mut command: Command, environment: &[(&str, &str)]) -> Command {
    for variable in FOREIGN {
        command.env_remove(variable);
    }
    command.envs(environment.iter().copied());
    command
}

/// Returns the script for simulated libraries, to which the command is added. The first call for a vendor builds its libraries, so that
/// the script itself does not ask cargo whether they are current.
///
/// # Panics
/// If the libraries cannot be built.
#[must_use]
pub fn script(libraries: &str) -> Command {
    static BUILT: [Once; 2] = [const { Once::new() }; 2];
    let script = || Command::new(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../scripts/simulated.sh"));
    let is_rocm = libraries.starts_with("rocm");
    BUILT[usize::from(is_rocm)].call_once_force(|_| {
        let vendor = if is_rocm { "rocm" } else { "cuda" };
        let output = script().args([vendor, "true"]).output().expect("the script starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    });
    let mut script = script();
    script.env("HIGHWATER_SIMULATED_BUILT", "1").arg(libraries);
    script
}

/// Runs a command under the script.
///
/// # Panics
/// If the script does not start.
#[must_use]
pub fn under(vendor: &str, command: &[&OsStr], environment: &[(&str, &str)]) -> Output {
    clean(script(vendor), environment).args(command).output().expect("the script starts")
}

/// Lays out the folder of a variant and returns its path.
///
/// # Panics
/// If the script fails.
#[must_use]
pub fn folder(vendor: &str) -> PathBuf {
    let output = under(vendor, &["sh", "-c", "printf %s \"${LD_LIBRARY_PATH%%:*}\""].map(OsStr::new), &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    PathBuf::from(String::from_utf8(output.stdout).expect("the path is text"))
}

/// Returns the names of the files of a variant, in order.
///
/// # Panics
/// If the folder cannot be read.
#[must_use]
pub fn files(vendor: &str) -> Vec<String> {
    let entries = std::fs::read_dir(folder(vendor)).expect("the folder was laid out");
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.expect("an entry").file_name().into_string();
    let mut names: Vec<_> = entries.map(|entry| name(entry).expect("the name is text")).collect();
    names.sort();
    names
}

/// Returns the symbols among `names` that a library of a variant has.
///
/// # Panics
/// If the library cannot be opened.
#[must_use]
pub fn symbols<'a>(vendor: &str, file: &str, names: &[&'a str]) -> Vec<&'a str> {
    // SAFETY: the simulated libraries may be opened at any time. The symbols are looked up and not used.
    unsafe {
        let library = Library::new(folder(vendor).join(file)).expect("the library opens");
        names.iter().copied().filter(|name| library.get::<*const ()>(name.as_bytes()).is_ok()).collect()
    }
}

/// Asserts that standard output and the exit status are those of the command.
///
/// # Panics
/// If they are not.
pub fn check_output(vendor: &str) {
    let output = under(vendor, &["sh", "-c", "echo seen; echo told >&2; exit 9"].map(OsStr::new), &[]);
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(9), b"seen\n".as_slice()));
    assert!(String::from_utf8_lossy(&output.stderr).ends_with("told\n"));
}

/// Asserts that the script refuses a vendor or a command with its usage.
///
/// # Panics
/// If it does not.
pub fn check_misuse(vendor: &str, command: &[&str]) {
    let command: Vec<_> = command.iter().map(OsStr::new).collect();
    let output = under(vendor, &command, &[]);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{vendor}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("Usage: scripts/simulated.sh"));
}
