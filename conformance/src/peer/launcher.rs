//! The launcher of the second process.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use highwater_hal::display_foreign;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

/// The environment variable that marks a process that a case started.
pub(super) const VARIABLE: &str = "HIGHWATER_CONFORMANCE_PEER";

/// A command line whose process opens the backend under test and calls [`serve_peer`](crate::serve_peer).
///
/// Cases of sharing start it, with a socket as its standard input and an environment variable for
/// [`serve_peer`](crate::serve_peer). In a test binary, the command line is the binary itself with the name of an ignored
/// test:
///
/// ```no_run
/// use highwater_conformance::{Launcher, Options, serve_peer};
/// # fn open_my_backend() -> highwater_hal::Result<std::sync::Arc<dyn highwater_hal::Backend>> {
/// #     Ok(highwater_mock::MockGpu::open(highwater_mock::MockOptions::new())?)
/// # }
///
/// // #[test] #[ignore = "the second process of the suite"]
/// fn peer() {
///     if let Some(served) = serve_peer(open_my_backend) {
///         served.unwrap();
///     }
/// }
///
/// // #[test]
/// fn conforms() -> std::io::Result<()> {
///     let launcher = Launcher::current_executable()?.with_arguments(["peer", "--exact", "--ignored"]);
///     let options = Options::new().with_launcher(launcher);
///     // ... run
///     # drop(options);
///     Ok(())
/// }
/// # conforms().unwrap();
/// ```
#[derive(Debug, Clone)]
pub struct Launcher {
    program: PathBuf,
    arguments: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
}

impl Launcher {
    /// Creates a launcher of `program`, without arguments.
    #[must_use]
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Self { program: program.into(), arguments: Vec::new(), environment: Vec::new() }
    }

    /// Creates a launcher of this process's executable.
    ///
    /// # Errors
    ///
    /// The error of the system, if it does not report the path of the executable.
    pub fn current_executable() -> io::Result<Self> {
        Ok(Self::new(std::env::current_exe()?))
    }

    /// Appends arguments.
    #[must_use]
    pub fn with_arguments(mut self, arguments: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// Sets an environment variable, in addition to those of this process.
    #[must_use]
    pub fn with_environment(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// Starts the process with the socket. Its standard output, such as the report of a test harness, is discarded. Its
    /// standard error is that of this process.
    pub(super) fn start(&self) -> io::Result<(Child, OwnedFd)> {
        let (near, far) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        // The command owns the other end and closes it here, so that only the new process has it.
        let child = Command::new(&self.program)
            .args(&self.arguments)
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .env(VARIABLE, "1")
            .stdin(Stdio::from(far))
            .stdout(Stdio::null())
            .spawn()?;
        Ok((child, near))
    }

    /// Returns the command line, for messages.
    pub(super) fn describe(&self) -> String {
        let mut line = display_foreign(&self.program).to_string();
        for argument in &self.arguments {
            line.push(' ');
            line += &display_foreign(argument).to_string();
        }
        line
    }
}
