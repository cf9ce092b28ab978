//! Rules of the standard test program, each in a process of its own.

use std::ffi::OsStr;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use crate::script::{clean, under};

/// Set in the process that a rule runs in: the major version of HIP, or 0 over other libraries. Set by hand, it makes one
/// test (`--exact NAME`) run right away, over the libraries that the loader finds.
pub const INSIDE: &str = "HIGHWATER_TEST_INSIDE";

/// Returns the version in [`INSIDE`]; `None` in the process that starts the rules.
#[must_use]
pub fn version() -> Option<i32> {
    std::env::var(INSIDE).ok()?.parse().ok()
}

/// Runs the test of this name in a process over each vendor, or over the libraries at hand if `vendors` is empty. If the test
/// has to end its process, `aborts` is the message that it ends with.
///
/// # Panics
/// If the test fails.
#[track_caller]
pub fn outside(test: &str, vendors: &[&str], environment: &[(&str, &str)], aborts: Option<&str>) {
    let own = std::env::current_exe().expect("this program has a path");
    let arguments = ["--exact", test, "--nocapture", "--test-threads=1"].map(OsStr::new);
    let check = |vendor: &str, output: std::process::Output| {
        let (text, told) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        let as_expected = match aborts {
            // A misspelt name runs no test and fails nothing.
            None => output.status.success() && text.contains("1 passed"),
            Some(message) => output.status.signal() == Some(libc::SIGABRT) && told.contains(message),
        };
        assert!(as_expected, "`{test}` over `{vendor}` ended with {}:\n{text}{told}", output.status);
    };
    for vendor in vendors {
        let version = match vendor {
            vendor if vendor.starts_with("rocm6") => "6",
            vendor if vendor.starts_with("rocm") => "7",
            _ => "0",
        };
        let command = [&[own.as_os_str()], &arguments[..]].concat();
        check(vendor, under(vendor, &command, &[environment, &[(INSIDE, version)]].concat()));
    }
    if vendors.is_empty() {
        let output = clean(Command::new(own), environment).env(INSIDE, "0").args(arguments).output();
        check("", output.expect("this program starts again"));
    }
}

/// Tests that run in a process of their own over each of the vendors, with an environment. The parameter is the major
/// version of HIP, 0 over other libraries.
///
/// ```text
/// isolated! {
///     fn a_pool_keeps_its_threshold(version) over ["rocm", "rocm6"] with HIGHWATER_MOCK = "devices=2" { ... }
///     fn a_stale_stream_ends_the_process(7) over ["rocm"] aborts "a stream was used after its end" { ... }
/// }
/// ```
#[macro_export]
macro_rules! isolated {
    ($(
        $(#[$attribute:meta])*
        fn $name:ident($version:pat) over $vendors:tt $(with $variable:ident = $value:literal)* $(aborts $message:literal)?
            $body:block
    )*) => {
        $(
            $(#[$attribute])*
            #[test]
            fn $name() {
                match $crate::isolated::version() {
                    Some($version) => $body,
                    #[allow(unreachable_patterns, reason = "some tests name their versions")]
                    Some(_) => {}
                    None => {
                        let module = module_path!().split_once("::").map_or("", |(_, module)| module);
                        let test = format!("{module}::{}", stringify!($name));
                        let message: &[&str] = &[$($message)?];
                        let environment: &[(&str, &str)] = &[$((stringify!($variable), $value)),*];
                        $crate::isolated::outside(&test, &$vendors, environment, message.first().copied());
                    }
                }
            }
        )*
    };
}
