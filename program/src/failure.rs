//! Errors of the program: a message and a hint, as two lines for people and as an object for programs.

use std::borrow::Cow;
use std::error::Error;

use highwater::ErrorKind;
use highwater::hal::display_foreign;
use serde_json::{Value, json};

use super::frame::fields;
use super::output;

/// The exit code of a command that could not do its work.
pub(super) const CANNOT: u8 = 2;
/// The exit code of a job that lost a worker.
const LOST_WORKER: u8 = 3;

/// An error with a hint for the user.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(super) struct Failure {
    /// The kind for programs: an error kind of the library, or `worker`.
    kind: Cow<'static, str>,
    exit_code: u8,
    message: String,
    hint: String,
    #[source]
    cause: Option<Box<dyn Error + Send + Sync>>,
}

impl Failure {
    /// Returns an error. `kind` is for programs; pass that of the library's error, if one is the cause.
    pub(super) fn new(kind: ErrorKind, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { kind: kind.as_str().into(), exit_code: CANNOT, message: message.into(), hint: hint.into(), cause: None }
    }

    /// Returns the error of another process of this program, with its name in front if it has one.
    pub(super) fn of_process(name: Option<&str>, why: Explanation) -> Self {
        let Explanation { message, hint, kind } = why;
        let message = name.map_or_else(|| message.clone(), |name| format!("{name}: {message}"));
        let kind = kind.map_or_else(|| ErrorKind::InvalidState.as_str().into(), Cow::Owned);
        Self { kind, exit_code: CANNOT, message, hint, cause: None }
    }

    /// Returns the error of a worker that died.
    pub(super) fn lost_worker(message: String, hint: &str) -> Self {
        Self { kind: "worker".into(), exit_code: LOST_WORKER, message, hint: hint.into(), cause: None }
    }

    #[cfg(test)]
    pub(super) fn hint(&self) -> &str {
        &self.hint
    }

    /// Adds the cause.
    pub(super) fn because_of(mut self, cause: impl Error + Send + Sync + 'static) -> Self {
        self.cause = Some(Box::new(cause));
        self
    }
}

/// Returns the exit code of an error.
pub(super) fn exit_code(error: &anyhow::Error) -> u8 {
    error.chain().find_map(|cause| cause.downcast_ref::<Failure>()).map_or(CANNOT, |failure| failure.exit_code)
}

/// The text of an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Explanation {
    /// One line, the outermost cause first.
    pub(super) message: String,
    /// The outermost hint. The program's own hint, for its user, comes before the library's, for programmers.
    pub(super) hint: String,
    /// The outermost kind; `None` if neither the program nor the library made the error.
    pub(super) kind: Option<String>,
}

fields!(Explanation { message, hint, kind });

impl Explanation {
    pub(super) fn of(error: &anyhow::Error) -> Self {
        let mut messages = Vec::new();
        let mut hints = Vec::new();
        let mut kinds = Vec::new();
        for cause in error.chain() {
            if let Some(error) = cause.downcast_ref::<highwater::Error>() {
                let code = error.code().map_or_else(String::new, |code| format!(" (vendor code {code})"));
                messages.push(format!("{}: {}: {}{code}", error.operation(), error.kind(), error.message()));
                hints.push(error.hint());
                kinds.push(error.kind().as_str());
            } else if !cause.is::<highwater::opening::LoadReport>() {
                // The error before a report gives the reason for each backend.
                let is_own = cause.is::<Failure>();
                messages.push(if is_own { cause.to_string() } else { display_foreign(&cause.to_string()).to_string() });
                if let Some(Failure { kind, hint, .. }) = cause.downcast_ref() {
                    hints.push(hint);
                    kinds.push(kind);
                }
            }
        }
        let hint = hints.into_iter().find(|hint| !hint.is_empty()).unwrap_or_default();
        Self { message: messages.join(": "), hint: hint.to_owned(), kind: kinds.first().map(|&kind| kind.to_owned()) }
    }

    fn to_json(&self) -> Value {
        json!({ "error": { "message": self.message, "hint": self.hint, "kind": self.kind } })
    }
}

/// Prints an error on standard error, and with `json` as the one object on standard output.
pub(super) fn print(error: &anyhow::Error, json: bool) {
    let explanation = Explanation::of(error);
    output::line(format_args!("error: {}", explanation.message));
    if !explanation.hint.is_empty() {
        output::line(format_args!("hint: {}", explanation.hint));
    }
    if json {
        // If it cannot be written, the lines above and the exit code still report the error.
        let _ = output::object(&explanation.to_json());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_joined_and_the_hint_of_the_program_comes_first() {
        let inner = highwater::Error::new(ErrorKind::OutOfMemory, "allocate", "1 MiB asked for, none free")
            .with_code(2)
            .with_hint("free some");
        let outer = Failure::new(ErrorKind::OutOfMemory, "no room for worker 3", "use fewer threads").because_of(inner);
        let explanation = Explanation::of(&outer.into());
        let message = "no room for worker 3: allocate: out of memory: 1 MiB asked for, none free (vendor code 2)";
        assert_eq!((explanation.message.as_str(), explanation.hint.as_str()), (message, "use fewer threads"));
        assert_eq!(
            explanation.to_json(),
            json!({ "error": { "message": message, "hint": "use fewer threads", "kind": "out of memory" } })
        );
    }

    #[test]
    fn an_error_of_the_library_alone_keeps_its_hint_and_kind_too() {
        let error = highwater::Error::new(ErrorKind::Vendor, "copy", "it failed").with_hint("try again");
        let expected = Explanation {
            message: "copy: vendor error: it failed".into(),
            hint: "try again".into(),
            kind: Some("vendor error".into()),
        };
        assert_eq!(Explanation::of(&error.into()), expected);
    }

    #[test]
    fn a_lost_worker_has_a_kind_and_a_code_of_its_own() {
        let lost: anyhow::Error = Failure::lost_worker("worker 7 is gone".into(), "look for it").into();
        assert_eq!((Explanation::of(&lost).kind.as_deref(), exit_code(&lost)), (Some("worker"), 3));
        let why = Explanation { kind: Some("expired".into()), message: "it is gone".into(), hint: String::new() };
        let failed = Failure::of_process(Some("worker 7"), why.clone()).into();
        assert_eq!(exit_code(&failed), 2);
        assert_eq!(Explanation::of(&failed), Explanation { message: "worker 7: it is gone".into(), ..why.clone() });
        let nameless = Failure::of_process(None, Explanation { kind: None, ..why.clone() }).into();
        assert_eq!(Explanation::of(&nameless), Explanation { kind: Some("invalid state".into()), ..why });
        assert_eq!(exit_code(&std::io::Error::other("broken").into()), 2);
    }

    #[test]
    fn an_error_of_neither_has_no_kind() {
        let error = std::io::Error::other("broken");
        assert_eq!(Explanation::of(&error.into()).to_json()["error"]["kind"], Value::Null);
    }
}
