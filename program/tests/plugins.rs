//! The mock's plugin passes the suite as the mock that is built in does.

#![forbid(unsafe_code)]

mod built;

use std::process::{Child, Command, Stdio};

use serde_json::Value;

fn conformance(arguments: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_highwater"));
    command.args(["conformance", "--json"]).args(arguments).env_remove("HIGHWATER_MOCK");
    // Who builds with files that are writable by a group, by their umask, has such plugins too.
    command.env("HIGHWATER_ALLOW_INSECURE_PLUGINS", "1");
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn result(child: Child) -> Value {
    let output = child.wait_with_output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error} in {output:?}"))
}

/// The number of cases that the mock skips with one device. They need a second device, or the absence of an ability. `program.rs` has the
/// run of the mock that is built in.
const SKIPPED: u64 = 63;

#[test]
fn every_conformance_case_passes_on_the_mocks_plugin() {
    let plugin = built::plugin("mock");
    let through = result(conformance(&["--plugin", plugin.to_str().unwrap()]));
    let count = |of: &str| through[of].as_u64().unwrap();
    assert_eq!((count("failed"), &through["backend"]), (0, &Value::from("mock")), "{}", through["failures"]);
    assert_eq!(count("passed") + count("skipped"), count("cases"));
    assert!(count("passed") > 600 && count("skipped") <= SKIPPED, "{through}");
}

#[test]
fn a_plugin_that_cannot_be_loaded_is_an_error_that_says_why() {
    let mut child = conformance(&["--plugin", "/no/such/plugin.so"]);
    assert_eq!(child.wait().unwrap().code(), Some(2));
    let object = result(child);
    assert_eq!(object["error"]["kind"], "library missing");
    assert!(object["error"]["message"].as_str().unwrap().contains("/no/such/plugin.so"), "{object}");
    let both = conformance(&["--plugin", "a.so", "--backend", "mock"]).wait_with_output().unwrap();
    assert_eq!(both.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&both.stderr).contains("cannot be used with"), "{both:?}");
}
