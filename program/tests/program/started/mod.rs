//! Programs that tests start: what they printed, and their processes.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::collections::BTreeSet;
use std::fs;
use std::process::Output;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// A program that has ended.
pub(crate) struct Run {
    /// Whether it was called with `--json`.
    pub(crate) json: bool,
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Run {
    pub(crate) fn of(output: Output, arguments: &[&str]) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        let Output { status, stdout, stderr } = output;
        let json = arguments.contains(&"--json");
        Self { json, code: status.code(), stdout: text(stdout), stderr: text(stderr) }
    }

    /// The same, which ended with this code.
    #[track_caller]
    pub(crate) fn ended(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{}{}", self.stdout, self.stderr);
        self
    }

    /// The one object on standard output.
    #[track_caller]
    pub(crate) fn object(&self) -> Value {
        let value: Value = serde_json::from_str(&self.stdout)
            .unwrap_or_else(|error| panic!("{error} in {:?}\n{}", self.stdout, self.stderr));
        assert!(value.is_object(), "{}", self.stdout);
        value
    }

    /// Standard output has all of `parts`.
    #[track_caller]
    pub(crate) fn assert_printed(&self, parts: &[&str]) {
        assert_parts(&self.stdout, parts);
    }

    /// The program failed with exactly one error, which has all of `parts`, and a hint; with `--json` standard output
    /// holds the same as an object, else nothing.
    #[track_caller]
    pub(crate) fn assert_error(&self, parts: &[&str]) {
        assert_eq!(self.code, Some(2), "{}", self.stderr);
        self.assert_told(parts);
    }

    /// The same, whatever the exit code.
    #[track_caller]
    pub(crate) fn assert_told(&self, parts: &[&str]) {
        if self.json {
            let object = self.object();
            assert_eq!(object.as_object().unwrap().len(), 1, "{object}");
            let text = |key: &str| object["error"][key].as_str().unwrap();
            assert!(self.stderr.contains(&format!("error: {}\nhint: {}\n", text("message"), text("hint"))), "{object}");
            assert!(!text("kind").is_empty(), "{object}");
        } else {
            assert_eq!(self.stdout, "");
        }
        assert_eq!(self.stderr.lines().filter(|line| line.starts_with("error: ")).count(), 1, "{}", self.stderr);
        assert!(self.stderr.contains("\nhint: "), "{}", self.stderr);
        assert!(!self.stderr.contains("panicked") && !self.stderr.contains("left"), "{}", self.stderr);
        assert_parts(&self.stderr, parts);
    }
}

/// A text has all of `parts`.
#[track_caller]
pub(crate) fn assert_parts(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "`{part}` is missing in:\n{text}");
    }
}

/// A running process, seen from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Process(pub(crate) u32);

impl Process {
    /// What stands in one of its files in /proc; nothing where it has ended.
    pub(crate) fn file(self, name: &str) -> String {
        fs::read_to_string(format!("/proc/{}/{name}", self.0)).unwrap_or_default()
    }

    /// Whether it runs; one that has ended and that nobody has waited for does not.
    pub(crate) fn runs(self) -> bool {
        let stat = self.file("stat");
        let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
        state.is_some_and(|state| !"ZX".contains(state))
    }

    /// Its children.
    pub(crate) fn children(self) -> Vec<Process> {
        let is_child = |process: &Process| {
            let stat = process.file("stat");
            let parent = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse().ok());
            parent == Some(self.0)
        };
        let entries = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok().map(Process)).filter(is_child).collect()
    }

    /// The shared memory that it maps whose name begins so: its inode, and the rest of its name.
    pub(crate) fn shared_memory(self, name: &str) -> BTreeSet<(String, String)> {
        let block = |line: &str| {
            let (_, rest) = line.split_once(&format!("memfd:{name}"))?;
            Some((line.split_whitespace().nth(4)?.to_owned(), rest.split(' ').next()?.to_owned()))
        };
        self.file("maps").lines().filter_map(block).collect()
    }

    pub(crate) fn send(self, signal: Signal) {
        kill_process(Pid::from_raw(self.0 as i32).unwrap(), signal).unwrap();
    }
}

/// Checks that a plugin reports the same results as the built-in backend. `results` runs cases and returns their report. It must fail if a
/// case fails. (CI runs the whole suite on the plugins: scripts/conformance-simulated.sh.)
#[track_caller]
pub(crate) fn plugin_says_the_same(built_in: &[&str], plugin: &[&str], results: impl Fn(&[&str]) -> Value) {
    for group in ["identity.", "lacking.", "limits."] {
        let of = |which: &[&str]| results(&[which, &["--filter", group]].concat());
        let (built_in, through) = (of(built_in), of(plugin));
        for count in ["backend", "cases", "passed", "skips", "expected_failures"] {
            assert_eq!(through[count], built_in[count], "{group} {count}");
        }
    }
}
