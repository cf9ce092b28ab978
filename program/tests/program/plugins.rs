//! The mock's plugin reports the same results as the built-in mock.

use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::started::plugin_says_the_same;

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

#[test]
fn the_plugin_says_what_the_built_in_mock_says() {
    let plugin = crate::built::plugin("mock");
    plugin_says_the_same(&["--backend", "mock"], &["--plugin", plugin.to_str().unwrap()], |which| {
        let report = result(conformance(which));
        assert_eq!(report["failed"], 0, "{}", report["failures"]);
        report
    });
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
