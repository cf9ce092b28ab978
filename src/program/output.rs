//! The two output streams. A reader that has gone away is no error: `highwater doctor | head -1` ends quietly.

use std::fmt::Display;
use std::io::{self, ErrorKind, Write as _};

/// Prints a result on standard output.
pub(super) fn result(text: impl Display) -> io::Result<()> {
    match writeln!(io::stdout().lock(), "{text}") {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}

/// Prints a line that is no result on standard error.
pub(super) fn line(text: impl Display) {
    // Nobody is left to tell that it cannot be written.
    let _ = writeln!(io::stderr().lock(), "{text}");
}
