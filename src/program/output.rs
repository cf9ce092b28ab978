//! The two output streams. A reader that has gone away is no error: `highwater doctor | head -1` ends quietly.

use std::fmt::Display;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::AsFd as _;

use highwater::ErrorKind;

use super::failure::Failure;

/// Prints a result on standard output.
pub(super) fn result(text: impl Display) -> Result<(), Failure> {
    match write(&format!("{text}\n")) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.map_err(|error| {
            let hint = "give the program a standard output that can be written, with room for the result";
            Failure::new(ErrorKind::InvalidState, "the result cannot be written", hint).because_of(error)
        }),
    }
}

/// Writes to the descriptor itself: `Stdout` takes a descriptor that is not open for writing for success.
fn write(text: &str) -> io::Result<()> {
    let stdout = io::stdout().lock();
    File::from(stdout.as_fd().try_clone_to_owned()?).write_all(text.as_bytes())
}

/// Prints a line that is no result on standard error.
pub(super) fn line(text: impl Display) {
    // Nobody is left to tell that it cannot be written.
    let _ = writeln!(io::stderr().lock(), "{text}");
}
