//! How the second process is started.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use highwater_hal::display_foreign;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

/// The environment variable that tells a process that it was started by a case.
pub(super) const VARIABLE: &str = "HIGHWATER_CONFORMANCE_PEER";

/// A command line whose process opens the backend under test and calls [`serve_peer`](crate::serve_peer).
///
/// Cases about what two processes share start it, with an environment variable that
/// [`serve_peer`](crate::serve_peer) looks for and a socket as its standard input. In a test binary the command line is
/// that of the binary itself with the name of an ignored test:
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
    /// Starts `program`, without arguments.
    #[must_use]
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Self { program: program.into(), arguments: Vec::new(), environment: Vec::new() }
    }

    /// Starts the executable of this process.
    ///
    /// # Errors
    /// Where the system does not say which that is.
    pub fn current_executable() -> io::Result<Self> {
        Ok(Self::new(std::env::current_exe()?))
    }

    /// The same with further arguments.
    #[must_use]
    pub fn with_arguments(mut self, arguments: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// The same with an environment variable beside those of this process.
    #[must_use]
    pub fn with_environment(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// Starts the process and gives the socket to it. What it writes to standard output, such as the report of a test
    /// harness, goes nowhere; its errors go where those of this process go.
    pub(super) fn start(&self) -> io::Result<(Child, OwnedFd)> {
        let (near, far) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        // The command owns the other end and closes it here, so that the process is the only one to have it.
        let child = Command::new(&self.program)
            .args(&self.arguments)
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .env(VARIABLE, "1")
            .stdin(Stdio::from(far))
            .stdout(Stdio::null())
            .spawn()?;
        Ok((child, near))
    }

    /// The command line, for messages.
    pub(super) fn describe(&self) -> String {
        let mut line = display_foreign(&self.program).to_string();
        for argument in &self.arguments {
            line.push(' ');
            line += &display_foreign(argument).to_string();
        }
        line
    }
}
