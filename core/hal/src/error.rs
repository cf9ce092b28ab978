//! One error type for every fallible call: the kind, the operation, the vendor's code, the message and the remedy.

use std::fmt;
use std::sync::Arc;

use crate::text::harmless;

/// The result of every fallible call in this workspace.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kind of an error, as far as a program can act on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The operation does not accept an argument (size, alignment, leading dimension, option).
    InvalidArgument,
    /// A stream, event, graph or handle id is stale, forged, or belongs to another backend.
    InvalidHandle,
    /// A pointer is not from this runtime, was freed, or points into the middle of a block.
    InvalidPointer,
    /// Objects of different devices were mixed in one operation.
    WrongDevice,
    /// The device lacks the [capability](crate::Capabilities), or this version does not support it.
    Unsupported,
    /// Device or host memory is exhausted.
    OutOfMemory,
    /// A vendor library could not be opened.
    LibraryMissing,
    /// A vendor library lacks a required symbol.
    SymbolMissing,
    /// The library works, but there is no usable device.
    DeviceMissing,
    /// No backend of that name is known.
    UnknownBackend,
    /// A stream capture was refused or lost.
    Capture,
    /// The object is in a state that forbids this operation now.
    InvalidState,
    /// A device error from which no call recovers. The process must end.
    DeviceLost,
    /// The process is exiting, and the driver must not be called.
    ShuttingDown,
    /// The process was forked after the backend was opened; the child cannot use it.
    Forked,
    /// The process at the other end of a share has ended.
    PeerLost,
    /// The memory of a ticket is no longer shared: its exporter has freed it or has ended.
    Expired,
    /// A call of the operating system failed; the code is its `errno`.
    OperatingSystem,
    /// The operating system or the driver refused permission.
    PermissionDenied,
    /// Any other vendor error; the vendor's code says which.
    Vendor,
}

impl ErrorKind {
    /// Returns the kind in the words of messages.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::InvalidArgument => "invalid argument",
            Self::InvalidHandle => "invalid handle",
            Self::InvalidPointer => "invalid pointer",
            Self::WrongDevice => "wrong device",
            Self::Unsupported => "unsupported",
            Self::OutOfMemory => "out of memory",
            Self::LibraryMissing => "library missing",
            Self::SymbolMissing => "symbol missing",
            Self::DeviceMissing => "no device",
            Self::UnknownBackend => "unknown backend",
            Self::Capture => "capture error",
            Self::InvalidState => "invalid state",
            Self::DeviceLost => "device lost",
            Self::ShuttingDown => "shutting down",
            Self::Forked => "forked process",
            Self::PeerLost => "peer lost",
            Self::Expired => "expired",
            Self::OperatingSystem => "operating system",
            Self::PermissionDenied => "permission denied",
            Self::Vendor => "vendor error",
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// An error: kind, operation, vendor code, message and hint.
///
/// `Display` prints all of them on one line. `Debug`, which `fn main() -> Result<()>` and `unwrap` print, puts the hint
/// on a line of its own. The accessors give each alone. The value is one pointer wide, so a `Result` on a hot path
/// costs no more than the success value.
///
/// ```
/// use highwater_hal::{Error, ErrorKind};
/// let error = Error::new(ErrorKind::OutOfMemory, "allocate", "4 GiB asked for, 1 GiB free")
///     .with_code(2)
///     .with_hint("free buffers or use a smaller batch");
/// assert_eq!(
///     error.to_string(),
///     "allocate: out of memory: 4 GiB asked for, 1 GiB free (vendor code 2); free buffers or use a smaller batch"
/// );
/// ```
#[derive(Clone)]
pub struct Error(Box<Body>);

#[derive(Clone)]
struct Body {
    kind: ErrorKind,
    operation: &'static str,
    code: Option<i64>,
    message: String,
    hint: String,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

struct Code(Option<i64>);

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |code| write!(f, " (vendor code {code})"))
    }
}

impl Error {
    /// Writes all parts, with `before_hint` before the hint.
    fn write(&self, f: &mut fmt::Formatter<'_>, before_hint: &str) -> fmt::Result {
        let Body { kind, operation, code, message, hint, .. } = &*self.0;
        write!(f, "{operation}: {kind}: {message}{}", Code(*code))?;
        if hint.is_empty() { Ok(()) } else { write!(f, "{before_hint}{hint}") }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, "; ")
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, "\nhint: ")
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}

impl Error {
    /// Creates an error of `kind` in `operation`, the name of a trait method or a public function.
    ///
    /// Control characters of the message, except line breaks, and characters that reorder text become escapes, so that
    /// a terminal shows them. [`display_foreign`](crate::display_foreign) cuts names and texts of another origin.
    #[must_use]
    pub fn new(kind: ErrorKind, operation: &'static str, message: impl Into<String>) -> Self {
        let message = harmless(message.into());
        Self(Box::new(Body { kind, operation, code: None, message, hint: String::new(), source: None }))
    }

    /// Adds the vendor's code.
    #[must_use]
    pub fn with_code(mut self, code: i64) -> Self {
        self.0.code = Some(code);
        self
    }

    /// Adds the remedy. Escapes the same characters as the message.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.0.hint = harmless(hint.into());
        self
    }

    /// Adds the cause, which [`source`](std::error::Error::source) returns.
    #[must_use]
    pub fn with_source(mut self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.0.source = Some(Arc::new(source));
        self
    }

    /// Creates an `Unsupported` error: the capability `name` of the device is false.
    #[must_use]
    pub fn lacks(operation: &'static str, name: &str) -> Self {
        Self::new(ErrorKind::Unsupported, operation, format!("the device's capability `{name}` is false"))
            .with_hint("ask `capabilities()` before, or use another device or backend")
    }

    /// Creates an `Unsupported` error: this backend is older than `choice`.
    #[cold]
    #[must_use]
    pub fn unknown(operation: &'static str, choice: &dyn fmt::Debug) -> Self {
        Self::new(ErrorKind::Unsupported, operation, format!("this backend does not know {choice:?}"))
            .with_hint("use a backend of the same version as the program")
    }

    /// Returns the kind, on which a program can act.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Returns whether the same call may succeed later, after other work has finished or has freed something.
    ///
    /// True for `OutOfMemory`, and for `OperatingSystem` if its code is `EAGAIN`, `EINTR`, `EBUSY`, `ENOBUFS`, `ENOMEM`, `EMFILE`,
    /// `ENFILE` or `ETIMEDOUT`. False for every other kind:
    ///
    /// | kinds | what has to change first |
    /// | --- | --- |
    /// | `InvalidArgument`, `InvalidHandle`, `InvalidPointer`, `WrongDevice`, `Unsupported` | the call |
    /// | `InvalidState`, `Capture` | the state of the object or of the capture, which a later call in a loop does not change |
    /// | `LibraryMissing`, `SymbolMissing`, `DeviceMissing`, `UnknownBackend`, `PermissionDenied` | the machine or the program |
    /// | `PeerLost`, `Expired` | the other process, which has to share again |
    /// | `DeviceLost`, `ShuttingDown`, `Forked` | the process |
    /// | `Vendor` | unknown |
    ///
    /// Highwater has already retried a request for memory, after it freed what its own pools kept. A further retry is
    /// worthwhile once the program has freed memory of its own, or has waited for work that will.
    ///
    /// ```
    /// use highwater_hal::{Error, ErrorKind};
    /// assert!(Error::new(ErrorKind::OutOfMemory, "allocate", "none free").is_temporary());
    /// assert!(!Error::new(ErrorKind::DeviceLost, "copy", "gone").is_temporary());
    /// ```
    #[must_use]
    pub fn is_temporary(&self) -> bool {
        use libc::{EAGAIN, EBUSY, EINTR, EMFILE, ENFILE, ENOBUFS, ENOMEM, ETIMEDOUT};
        match self.kind() {
            ErrorKind::OutOfMemory => true,
            ErrorKind::OperatingSystem => {
                let temporary = [EAGAIN, EINTR, EBUSY, ENOBUFS, ENOMEM, EMFILE, ENFILE, ETIMEDOUT];
                self.code().is_some_and(|code| temporary.iter().any(|&errno| i64::from(errno) == code))
            }
            ErrorKind::InvalidArgument
            | ErrorKind::InvalidHandle
            | ErrorKind::InvalidPointer
            | ErrorKind::WrongDevice
            | ErrorKind::Unsupported
            | ErrorKind::LibraryMissing
            | ErrorKind::SymbolMissing
            | ErrorKind::DeviceMissing
            | ErrorKind::UnknownBackend
            | ErrorKind::Capture
            | ErrorKind::InvalidState
            | ErrorKind::DeviceLost
            | ErrorKind::ShuttingDown
            | ErrorKind::Forked
            | ErrorKind::PeerLost
            | ErrorKind::Expired
            | ErrorKind::PermissionDenied
            | ErrorKind::Vendor => false,
        }
    }

    /// Returns the operation that failed.
    #[must_use]
    pub fn operation(&self) -> &'static str {
        self.0.operation
    }

    /// Returns the vendor's code, if a vendor call failed.
    #[must_use]
    pub fn code(&self) -> Option<i64> {
        self.0.code
    }

    /// Returns the fault, and the expected value.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// Returns the remedy; may be empty.
    #[must_use]
    pub fn hint(&self) -> &str {
        &self.0.hint
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_one_pointer_wide() {
        assert_eq!(size_of::<Result<()>>(), size_of::<usize>());
    }

    #[test]
    fn no_text_of_an_error_reaches_the_terminal_as_a_command() {
        let error = Error::new(ErrorKind::Vendor, "open", "it said \u{1b}[2J\u{9b}1m\nmore").with_hint("see \u{202e}x");
        assert_eq!(error.message(), "it said \\u{1b}[2J\\u{9b}1m\nmore");
        assert_eq!(error.hint(), "see \\u{202e}x");
    }

    #[test]
    fn debug_is_what_a_main_function_should_print() {
        let error = Error::new(ErrorKind::OutOfMemory, "allocate", "4 GiB asked for, 1 GiB free");
        assert_eq!(format!("{error:?}"), "allocate: out of memory: 4 GiB asked for, 1 GiB free");
        let error = error.with_code(2).with_hint("free buffers");
        let expected = "allocate: out of memory: 4 GiB asked for, 1 GiB free (vendor code 2)\nhint: free buffers";
        assert_eq!((format!("{error:?}"), format!("{error:#?}")), (expected.to_owned(), expected.to_owned()));
    }

    #[test]
    fn an_error_gives_its_source_also_behind_a_box() {
        let error = Error::new(ErrorKind::OperatingSystem, "open", "no").with_source(std::io::Error::other("the disk"));
        let boxed: Box<dyn std::error::Error + Send + Sync> = error.clone().into();
        assert_eq!(boxed.source().unwrap().to_string(), "the disk");
        assert!(Error::new(ErrorKind::Vendor, "open", "no").0.source.is_none());
    }

    #[test]
    fn only_memory_and_limits_of_the_system_are_worth_a_retry() {
        use crate::numbers::Coded;
        use ErrorKind::*;
        let temporary = |kind: &ErrorKind| Error::new(*kind, "call", "").is_temporary();
        assert_eq!(ErrorKind::ALL.iter().copied().filter(temporary).collect::<Vec<_>>(), [OutOfMemory]);
        let errno = |code| Error::new(OperatingSystem, "call", "").with_code(i64::from(code)).is_temporary();
        let retried = [
            libc::EAGAIN,
            libc::EINTR,
            libc::EBUSY,
            libc::ENOBUFS,
            libc::ENOMEM,
            libc::EMFILE,
            libc::ENFILE,
            libc::ETIMEDOUT,
        ];
        assert!(retried.into_iter().all(errno));
        assert!(![libc::EPERM, libc::ENOENT, libc::ENOSPC, libc::EINVAL].into_iter().any(errno));
        // A vendor's code is not an errno.
        assert!(!Error::new(Vendor, "call", "").with_code(i64::from(libc::EAGAIN)).is_temporary());
    }

    #[test]
    fn display_leaves_out_what_is_not_there() {
        let error = Error::new(ErrorKind::InvalidArgument, "copy", "0 bytes");
        assert_eq!(error.to_string(), "copy: invalid argument: 0 bytes");
    }
}
