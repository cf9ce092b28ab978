//! Errors of the program: what, why, and what to do, on two lines.

use std::error::Error;
use std::fmt;

use super::output;

/// What a person can do about an error, kept apart from what went wrong.
#[derive(Debug)]
pub(super) struct Failure {
    message: String,
    hint: String,
    cause: Option<Box<dyn Error + Send + Sync>>,
}

impl Failure {
    pub(super) fn new(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { message: message.into(), hint: hint.into(), cause: None }
    }

    /// The same with the error behind it.
    pub(super) fn because_of(mut self, cause: impl Error + Send + Sync + 'static) -> Self {
        self.cause = Some(Box::new(cause));
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for Failure {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.cause.as_deref().map(|cause| cause as _)
    }
}

/// The error as one line, the outermost cause first, and the outermost hint: the program's own, which speaks to its user,
/// before the library's, which speaks to programmers.
fn explain(error: &anyhow::Error) -> (String, String) {
    let mut messages = Vec::new();
    let mut hints = Vec::new();
    for cause in error.chain() {
        if let Some(error) = cause.downcast_ref::<highwater::Error>() {
            let code = error.code().map_or_else(String::new, |code| format!(" (vendor code {code})"));
            messages.push(format!("{}: {}: {}{code}", error.operation(), error.kind(), error.message()));
            hints.push(error.hint());
        } else {
            messages.push(cause.to_string());
            hints.extend(cause.downcast_ref::<Failure>().map(|failure| failure.hint.as_str()));
        }
    }
    let hint = hints.into_iter().find(|hint| !hint.is_empty()).unwrap_or_default();
    (messages.join(": "), hint.to_owned())
}

/// Prints an error on standard error.
pub(super) fn print(error: &anyhow::Error) {
    let (message, hint) = explain(error);
    output::line(format_args!("error: {message}"));
    if !hint.is_empty() {
        output::line(format_args!("hint: {hint}"));
    }
}

#[cfg(test)]
mod tests {
    use highwater::ErrorKind;

    use super::*;

    #[test]
    fn messages_are_joined_and_the_hint_of_the_program_comes_first() {
        let inner = highwater::Error::new(ErrorKind::OutOfMemory, "allocate", "1 MiB asked for, none free")
            .with_code(2)
            .with_hint("free some");
        let outer = Failure::new("no room for worker 3", "use fewer threads").because_of(inner);
        let (message, hint) = explain(&outer.into());
        assert_eq!(
            message,
            "no room for worker 3: allocate: out of memory: 1 MiB asked for, none free (vendor code 2)"
        );
        assert_eq!(hint, "use fewer threads");
    }

    #[test]
    fn an_error_of_the_library_alone_keeps_its_hint_too() {
        let error = highwater::Error::new(ErrorKind::Vendor, "copy", "it failed").with_hint("try again");
        assert_eq!(explain(&error.into()), ("copy: vendor error: it failed".to_owned(), "try again".to_owned()));
    }
}
