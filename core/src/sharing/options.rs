//! [`SharingOptions`]: the rendezvous of processes that share memory, and the processes that may open it. The variable
//! `HIGHWATER_SHARING` has a text form of both.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::fd::RawFd;
use std::path::Path;

use crate::key_values::{self, Key};
use highwater_hal::{Result, secure_execution};

/// The variable that sets options that the program does not set.
const VARIABLE: &str = "HIGHWATER_SHARING";
pub(super) const OPERATION: &str = "sharing options";

const OPENERS: &str = "`user`, `secret`, or `group:ID` with the number of a group, which `getent group NAME` prints";

/// The keys of the variable, with the form of their values and a function that sets one.
const KEYS: [Key<SharingOptions>; 2] = [
    ("rendezvous", "`abstract`, `directory:PATH` or `descriptor:NUMBER`", |options, value| {
        Some(options.with_rendezvous(rendezvous(value)?))
    }),
    ("openers", OPENERS, |options, value| Some(options.with_openers(openers(value)?))),
];

/// The method by which processes that share memory find each other.
///
/// The exporter's method is in its tickets. An importer follows the ticket, so it may use another method for its own exports. It
/// needs the exporter's option only to know the path or the descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Rendezvous {
    /// A socket with an abstract name. The processes must be in one network namespace.
    #[default]
    Abstract,
    /// A socket in a directory, which every process mounts. The paths may differ between the processes. If all users may
    /// write to the directory, it must be sticky (`chmod +t`).
    ///
    /// The path lives as long as the program. Leak a path that the program computes, or set `HIGHWATER_SHARING`.
    Directory(&'static Path),
    /// One end of a pair of Unix sockets of the type `SOCK_SEQPACKET`, by its number. The processes inherit the pair from a
    /// common parent. The exporting process has one end. Any number of importing processes have the other end.
    ///
    /// The runtime duplicates the descriptor when it is created, and never closes the original.
    Descriptor(RawFd),
}

impl Rendezvous {
    /// Returns the name of the method, as in the environment variable: `abstract`, `directory` or `descriptor`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.method().name()
    }

    pub(crate) const fn method(self) -> Method {
        match self {
            Self::Abstract => Method::Abstract,
            Self::Directory(_) => Method::Directory,
            Self::Descriptor(_) => Method::Descriptor,
        }
    }
}

impl fmt::Display for Rendezvous {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.method().name();
        match self {
            Self::Abstract => f.write_str(name),
            Self::Directory(path) => write!(f, "{name}:{}", path.display()),
            Self::Descriptor(number) => write!(f, "{name}:{number}"),
        }
    }
}

/// A method of [`Rendezvous`], without its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Method {
    Abstract,
    Directory,
    Descriptor,
}

impl Method {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Abstract => "abstract",
            Self::Directory => "directory",
            Self::Descriptor => "descriptor",
        }
    }
}

/// The processes that may open the memory of a runtime, and whose memory the runtime opens.
///
/// Both sides check the credentials of the other process, as the kernel reports them. The exporter's option selects the processes
/// that may open. The importer's option selects the processes whose memory it trusts. Between processes of one user, the importer
/// needs no option. An id without a value in this user namespace never matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Openers {
    /// Processes of the same user.
    #[default]
    SameUser,
    /// Processes of the same user, and processes with this group id, also as a supplementary group.
    Group(u32),
    /// Any process that has the ticket. Each allocation of such an exporter has a random secret of 16 bytes. The tickets carry it,
    /// and each open must name it. Protect such tickets like passwords.
    Secret,
}

impl fmt::Display for Openers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SameUser => f.write_str("user"),
            Self::Group(id) => write!(f, "group:{id}"),
            Self::Secret => f.write_str("secret"),
        }
    }
}

/// The options of memory that a [`Runtime`](crate::Runtime) shares with other processes.
///
/// [`RuntimeOptions::with_sharing`](crate::RuntimeOptions::with_sharing) passes them to a runtime. The environment variable
/// `HIGHWATER_SHARING` sets those that the program does not set. It has `key=value` pairs, separated by commas:
/// `rendezvous=directory:/run/highwater,openers=secret`. The key of each field is in parentheses.
///
/// ```
/// use std::path::Path;
///
/// use highwater_core::{Openers, Rendezvous, Runtime, RuntimeOptions, SharingOptions};
/// use highwater_mock::{MockGpu, MockOptions};
///
/// // A directory that two containers mount. It need not have the same path in both.
/// # let directory = std::env::temp_dir().join(format!("highwater-doc-{}", std::process::id()));
/// # std::fs::create_dir(&directory).unwrap();
/// # let directory: &'static Path = Box::leak(directory.into_boxed_path());
/// let sharing = SharingOptions::new().with_rendezvous(Rendezvous::Directory(directory)).with_openers(Openers::Secret);
/// let options = RuntimeOptions::new().with_sharing(sharing);
///
/// // In one container:
/// let exporter = Runtime::with_options(MockGpu::open(MockOptions::new())?, &options)?;
/// let weights = exporter.device(0)?.allocate_shared::<f32>(2)?;
/// exporter.device(0)?.create_stream()?.write(&[1.0, 2.0], &weights)?;
/// let ticket = weights.share()?;
/// assert_eq!(ticket.rendezvous(), "directory");
///
/// // In the other one, which may run as another user:
/// let importer = Runtime::with_options(MockGpu::open(MockOptions::new())?, &options)?;
/// let opened = importer.open_shared::<f32>(&ticket)?;
/// assert_eq!(importer.device(0)?.create_stream()?.download(&opened)?, [1.0, 2.0]);
/// # drop((opened, importer, weights, exporter));
/// # std::fs::remove_dir(directory).expect("nothing is left in the directory");
/// # Ok::<(), highwater_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct SharingOptions {
    /// The method by which processes find each other (`rendezvous`); abstract names by default.
    pub rendezvous: Option<Rendezvous>,
    /// The processes that may open the memory (`openers`); those of the same user by default.
    pub openers: Option<Openers>,
}

impl SharingOptions {
    /// Returns the defaults.
    #[must_use]
    pub const fn new() -> Self {
        Self { rendezvous: None, openers: None }
    }

    /// Returns the options with another method of rendezvous.
    #[must_use]
    pub const fn with_rendezvous(mut self, rendezvous: Rendezvous) -> Self {
        self.rendezvous = Some(rendezvous);
        self
    }

    /// Returns the options with another choice of the processes that may open memory.
    #[must_use]
    pub const fn with_openers(mut self, openers: Openers) -> Self {
        self.openers = Some(openers);
        self
    }

    /// Returns these options. Those of `others` fill in the options that are not set here.
    #[must_use]
    pub(crate) fn or(self, others: Self) -> Self {
        Self { rendezvous: self.rendezvous.or(others.rendezvous), openers: self.openers.or(others.openers) }
    }

    /// Returns the options of the environment variable `HIGHWATER_SHARING`; the defaults if it is not set. A program with more
    /// rights than its caller ignores the variable.
    ///
    /// # Errors
    /// `InvalidArgument` for an unknown or repeated key, or a malformed value.
    pub fn from_environment() -> Result<Self> {
        Self::of_variable(variable())
    }

    pub(super) fn of_variable(text: Option<OsString>) -> Result<Self> {
        text.map_or_else(|| Ok(Self::new()), |text| Self::parse(&text))
    }

    fn parse(text: &OsStr) -> Result<Self> {
        key_values::parse(OPERATION, VARIABLE, text, &KEYS, Self::new())
    }
}

/// Writes the options that are set in the form of the environment variable.
impl fmt::Display for SharingOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rendezvous = self.rendezvous.map(|rendezvous| format!("rendezvous={rendezvous}"));
        let openers = self.openers.map(|openers| format!("openers={openers}"));
        f.write_str(&rendezvous.into_iter().chain(openers).collect::<Vec<_>>().join(","))
    }
}

/// Returns the value of the variable.
pub(super) fn variable() -> Option<OsString> {
    trusted(env::var_os(VARIABLE), secure_execution())
}

/// Returns a value that the caller of the program may decide. `is_secure`: whether the program has more rights than its caller. Such
/// a caller must not decide which processes open the memory.
fn trusted(value: Option<OsString>, is_secure: bool) -> Option<OsString> {
    value.filter(|_| !is_secure)
}

fn rendezvous(value: &str) -> Option<Rendezvous> {
    match value.split_once(':') {
        None => (value == Method::Abstract.name()).then_some(Rendezvous::Abstract),
        Some((name, path)) if name == Method::Directory.name() && !path.is_empty() => {
            // The options are `Copy`. The variable is read once for each runtime, so little is leaked.
            Some(Rendezvous::Directory(Path::new(Box::leak(Box::<str>::from(path)))))
        }
        Some((name, number)) if name == Method::Descriptor.name() => {
            Some(Rendezvous::Descriptor(digits(number)?.try_into().ok()?))
        }
        Some(_) => None,
    }
}

fn openers(value: &str) -> Option<Openers> {
    match value {
        "user" => Some(Openers::SameUser),
        "secret" => Some(Openers::Secret),
        // The greatest number is no id: system calls use it for "unchanged".
        _ => digits(value.strip_prefix("group:")?).filter(|id| *id != u32::MAX).map(Openers::Group),
    }
}

/// Returns a whole number without a sign.
fn digits(text: &str) -> Option<u32> {
    text.parse().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use highwater_hal::ErrorKind;

    use super::*;

    fn parse(text: &str) -> Result<SharingOptions> {
        SharingOptions::parse(text.as_ref())
    }

    #[test]
    fn every_value_is_read_and_written_alike() {
        let directory = Rendezvous::Directory(Path::new("/run/a:b"));
        let all = [
            ("rendezvous=abstract", SharingOptions::new().with_rendezvous(Rendezvous::Abstract)),
            ("rendezvous=directory:/run/a:b", SharingOptions::new().with_rendezvous(directory)),
            ("rendezvous=descriptor:3", SharingOptions::new().with_rendezvous(Rendezvous::Descriptor(3))),
            ("openers=user", SharingOptions::new().with_openers(Openers::SameUser)),
            ("openers=group:100", SharingOptions::new().with_openers(Openers::Group(100))),
            (
                "rendezvous=directory:/run/a:b,openers=secret",
                SharingOptions::new().with_rendezvous(directory).with_openers(Openers::Secret),
            ),
            ("", SharingOptions::new()),
        ];
        for (text, options) in all {
            assert_eq!(parse(text).unwrap(), options, "{text}");
            assert_eq!(options.to_string(), text);
        }
        assert_eq!(parse(" openers = secret ").unwrap().to_string(), "openers=secret");
    }

    #[test]
    fn everything_else_is_refused_with_the_form_that_is_expected() {
        let values = "`abstract`, `directory:PATH` or `descriptor:NUMBER`";
        let bad = [
            ("rendezvous", values),
            ("rendezvous=", values),
            ("rendezvous=Abstract", values),
            ("rendezvous=abstract:", values),
            ("rendezvous=directory", values),
            ("rendezvous=directory:", values),
            ("rendezvous=descriptor:", values),
            ("rendezvous=descriptor:+3", values),
            ("rendezvous=descriptor:-1", values),
            ("rendezvous=descriptor:4294967296", values),
            ("rendezvous=abstract,rendezvous=abstract", "keep one"),
            ("openers=all", OPENERS),
            ("openers=group:wheel", OPENERS),
            ("openers=group:4294967295", OPENERS),
            ("opener=user", "the keys are `rendezvous`"),
            (",", "the keys are `rendezvous`"),
        ];
        for (text, expected) in bad {
            let error = parse(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{text}");
            assert!(error.message().starts_with(&format!("HIGHWATER_SHARING={text}: `")), "{error}");
            assert!(error.hint().contains(expected), "{text}: {}", error.hint());
        }
        let error = SharingOptions::parse(OsStr::from_bytes(b"openers=\xff")).unwrap_err();
        assert_eq!(error.message(), "HIGHWATER_SHARING=openers=\\xff: not UTF-8");
    }

    #[test]
    fn a_program_with_more_rights_than_its_caller_ignores_the_variable() {
        let value = || Some(OsString::from("openers=secret"));
        assert_eq!((trusted(value(), true), trusted(value(), false)), (None, value()));
    }

    #[test]
    fn the_program_decides_before_the_variable() {
        let program = SharingOptions::new().with_openers(Openers::Group(7));
        let variable = parse("rendezvous=descriptor:3,openers=secret").unwrap();
        assert_eq!(program.or(variable).to_string(), "rendezvous=descriptor:3,openers=group:7");
    }
}
