//! The two output streams.
//!
//! A reader that closes its pipe early is not an error, as in `highwater doctor | head -1`. The program drops the rest of its
//! output, finishes its work, and exits with the code of that work. Every other failure to write a result is an error.
//!
//! A standard output that is closed from the start (`>&-`) is an error too, found before any work. Rust opens `/dev/null` in
//! its place before `main`, so writing to it proves nothing.

use std::fmt::Display;
use std::fs::File;
use std::io::{self, IsTerminal as _, Write as _};
use std::os::fd::AsFd as _;
use std::sync::atomic::Ordering;

use highwater::ErrorKind;
use highwater::hal::{display_foreign, harmless};
use rustix::io::Errno;
use serde_json::Value;

use super::failure::Failure;

/// Prints a result on standard output. Escapes terminal commands in it, from any source of the text.
pub(super) fn result(text: impl Display) -> Result<(), Failure> {
    print(harmless(format!("{text}\n")))
}

/// Prints an object on standard output as JSON. Escapes the characters that a terminal obeys.
pub(super) fn object(value: &Value) -> Result<(), Failure> {
    print(to_json(value) + "\n")
}

fn to_json(value: &Value) -> String {
    let text = value.to_string();
    let mut escaped = String::with_capacity(text.len() + 1);
    for c in text.chars() {
        if c.is_ascii() && !c.is_ascii_control() || harmless(c.to_string()).len() == c.len_utf8() {
            escaped.push(c);
        } else {
            // Such a character occurs only inside a string, where JSON allows an escape.
            c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| escaped += &format!("\\u{unit:04x}"));
        }
    }
    escaped
}

/// Prints a message of the command line's parser: help and version on standard output, errors on standard error.
pub(super) fn of_parser(said: &clap::Error) -> Result<(), Failure> {
    let text = said.render();
    if said.use_stderr() {
        // It contains arguments, which a shell may have expanded from file names.
        text.to_string().trim_end().lines().for_each(|text| line(display_foreign(text)));
        return Ok(());
    }
    // The text is the program's own.
    print(if io::stdout().is_terminal() { text.ansi().to_string() } else { text.to_string() })
}

fn print(text: String) -> Result<(), Failure> {
    require()?;
    match write(&text) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.map_err(unwritable),
    }
}

/// Checks that the program was started with a standard output.
///
/// # Errors
/// If its descriptor was closed.
pub(super) fn require() -> Result<(), Failure> {
    // Relaxed: stored before `main`.
    if at_start::WAS_CLOSED.load(Ordering::Relaxed) { Err(unwritable(Errno::BADF.into())) } else { Ok(()) }
}

fn unwritable(error: io::Error) -> Failure {
    let hint = "give the program a standard output that can be written, with room for the result";
    Failure::new(ErrorKind::InvalidState, "the result cannot be written", hint).because_of(error)
}

/// Looks at standard output before Rust replaces it.
mod at_start {
    #![allow(unsafe_code, reason = "only a function of the loader runs before Rust opens `/dev/null`")]

    use std::sync::atomic::{AtomicBool, Ordering};

    use rustix::io::{Errno, fcntl_getfd};

    pub(super) static WAS_CLOSED: AtomicBool = AtomicBool::new(false);

    // SAFETY: the loader calls each function of this section once, before `main`. The signature is the one it expects.
    #[unsafe(link_section = ".init_array")]
    #[used]
    static LOOK: extern "C" fn() = look;

    extern "C" fn look() {
        WAS_CLOSED.store(fcntl_getfd(rustix::stdio::stdout()) == Err(Errno::BADF), Ordering::Relaxed);
    }
}

/// Writes to the descriptor itself, because `Stdout` ignores a descriptor that is not open for writing.
fn write(text: &str) -> io::Result<()> {
    let stdout = io::stdout().lock();
    File::from(stdout.as_fd().try_clone_to_owned()?).write_all(text.as_bytes())
}

/// Prints a line on standard error.
pub(super) fn line(text: impl Display) {
    // A failure of standard error cannot be reported.
    let _ = writeln!(io::stderr().lock(), "{}", harmless(text.to_string()));
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    #[test]
    fn objects_say_the_same_without_characters_that_a_terminal_obeys() {
        // The tests in tests/program/finding.rs read the output.
        let value = json!({ "name": "a\u{1b}[2J\u{9b}1m\u{202e}\u{e0041}é", "quote": "\"\n" });
        let text = super::to_json(&value);
        assert!(text.is_ascii() || text.contains('é'), "{text}");
        assert!(!text.chars().any(|c| c.is_control() || c == '\u{202e}' || c == '\u{e0041}'), "{text}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
    }
}
