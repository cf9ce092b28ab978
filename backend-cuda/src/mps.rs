//! NVIDIA's multi-process service (MPS): several processes use one GPU at the same time, instead of in time slices.
//!
//! A service is a daemon of the user, `nvidia-cuda-mps-control`, with a *pipe directory* in which the processes find it.
//! The driver of a process looks for the service once, in the process's first CUDA call. It looks in the directory that
//! the variable `CUDA_MPS_PIPE_DIRECTORY` names, else in `/tmp/nvidia-mps`. So the [variables](Guard::environment) have to
//! be set when the process starts. A process that has initialized CUDA without them stays outside of the service.
//!
//! [`status`] reports whether a service runs. [`start`] starts one in a private directory, for the children of this
//! process:
//!
//! ```no_run
//! use highwater_cuda::mps;
//!
//! let service = mps::start(mps::Options::new())?;
//! let worker = std::process::Command::new("my-worker").envs(service.environment()).spawn();
//! # Ok::<(), highwater_hal::Error>(())
//! ```
//!
//! # The end of a service
//!
//! A daemon outlives the process that started it. [`start`] therefore starts it through a shell, the *watcher*, which
//! then reads from a pipe that only this process holds open for writing. The pipe closes when the [`Guard`] is dropped,
//! and also when this process is killed, even during the start. The watcher then ends the daemon with `quit` and removes
//! the directory. There is one procedure for every end, and no helper program of Highwater is installed.
//!
//! The workers could end the service as well, since they notice the end of their owner. But a worker that is killed at
//! the same time would leave the daemon behind. A child of `fork` that runs no other program holds the pipe open too, so
//! the service lasts until it ends.

use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::fs::{self, DirBuilder, File};
use std::io::{self, PipeWriter, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use highwater_driver::environment_path;
use highwater_hal::{Error, ErrorKind, Result};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// The name of NVIDIA's control program.
pub const CONTROL_PROGRAM: &str = "nvidia-cuda-mps-control";

/// The variable that names the pipe directory.
pub const PIPE_DIRECTORY: &str = "CUDA_MPS_PIPE_DIRECTORY";

/// The variable that names the directory of the daemon's logs.
pub const LOG_DIRECTORY: &str = "CUDA_MPS_LOG_DIRECTORY";

/// The most processes that one service serves on all GPUs since Volta. NVIDIA documents 48, and 60 for newer drivers.
pub const MOST_CLIENTS: usize = 48;

/// The driver's default for the pipe directory.
const DEFAULT_PIPE_DIRECTORY: &str = "/tmp/nvidia-mps";

/// The sockets of a pipe directory. The second one has the longest name.
const SOCKETS: [&str; 2] = ["control", "control_privileged"];

/// The bytes of a socket's path, with the zero at its end.
const SOCKET_PATH_BYTES: usize = 108;

/// The operation in the errors of [`start`].
const OPERATION: &str = "mps::start";

/// The pause between two looks.
const PAUSE: Duration = Duration::from_millis(5);

/// The time for the watcher to end a service; more than all its own limits on a busy machine, where a step takes longer.
const END: Duration = Duration::from_secs(20);

/// The watcher. Its arguments are the control program, the directory, and the limit of the start in steps.
///
/// It starts the daemon, so that a start which has begun is also ended, and writes the result to a file. It then waits
/// until its standard input closes, asks the daemon to quit, and waits for the end of the request and of the daemon:
/// together at most 5 seconds, in 250 steps. It kills what is left, and waits one more second.
const WATCHER: &str = r#"
cd /
trap '' HUP INT TERM
# Waits for a child, for as many steps as are left, and kills it then.
await() {
  while [ "$left" -gt 0 ] && kill -0 "$1" 2>/dev/null; do left=$((left - 1)); sleep 0.02; done
  kill -9 "$1" 2>/dev/null && [ "$left" -le 0 ] && return 255
  wait "$1"
}
left=$3
(trap - HUP INT TERM; exec "$1" -d) </dev/null >"$2/log/start" 2>&1 &
await $!
echo "$? " >"$2/log/status"
while read -r _; do :; done
id=$(cat "$2/pipe/nvidia-cuda-mps-control.pid" 2>/dev/null)
left=250
echo quit | "$1" >/dev/null 2>&1 &
await $!
# The variable tells the daemon from a process that has got its number, and from a dead one that nobody has waited for.
lives() { [ -n "$id" ] && grep -qsF "$2/pipe" "/proc/$id/environ"; }
while [ "$left" -gt 0 ] && lives "$@"; do left=$((left - 1)); sleep 0.02; done
lives "$@" && kill -9 "$id"
left=50
while [ "$left" -gt 0 ] && lives "$@"; do left=$((left - 1)); sleep 0.02; done
rm -rf "$2"
"#;

/// A step of the watcher, and its status of a program that exceeded the limit.
const STEP: Duration = Duration::from_millis(20);
const LATE: &str = "255";

/// What is known about the service for this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// True if a daemon listens in the pipe directory.
    pub running: bool,
    /// The directory in which the driver of this process looks for a service.
    pub pipe_directory: PathBuf,
    /// NVIDIA's control program, which starts a service; `None` if no folder of `PATH` has it.
    pub control_program: Option<PathBuf>,
}

/// Reports whether a service runs, in which directory, and which program would start one.
///
/// Calls no CUDA function. Reads the environment of this process, as the driver does in its first call.
#[must_use]
pub fn status() -> Status {
    let pipe_directory = environment_path(PIPE_DIRECTORY).unwrap_or_else(|| DEFAULT_PIPE_DIRECTORY.into());
    Status { running: is_running(&pipe_directory), pipe_directory, control_program: find_control_program() }
}

/// Options of [`start`].
#[derive(Debug, Clone)]
pub struct Options {
    control_program: Option<PathBuf>,
    folder: Option<PathBuf>,
    limit: Duration,
}

impl Options {
    /// Returns the defaults: the control program of `PATH`, a directory in `$XDG_RUNTIME_DIR` or `/tmp`, and a limit of
    /// 10 seconds.
    #[must_use]
    pub fn new() -> Self {
        Self { control_program: None, folder: None, limit: Duration::from_secs(10) }
    }

    /// Sets the file of the control program.
    #[must_use]
    pub fn with_control_program(mut self, file: impl Into<PathBuf>) -> Self {
        self.control_program = Some(file.into());
        self
    }

    /// Sets the folder in which the private directory is created. Its path must be short: a socket's path has at most 107
    /// bytes.
    #[must_use]
    pub fn with_folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.folder = Some(folder.into());
        self
    }

    /// Sets the time that the daemon may take to start.
    #[must_use]
    pub fn with_limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }
}

impl Default for Options {
    fn default() -> Self {
        Self::new()
    }
}

/// A service that this process started. Dropping it ends the service, which takes as long as NVIDIA's `quit`: a daemon that
/// does not end in about 5 seconds is killed. The wait has a limit of 20 seconds.
///
/// The service also ends if this process is killed; [the module](self) describes how. End the processes that use the
/// service first, because it waits for them.
#[derive(Debug)]
pub struct Guard {
    directory: PathBuf,
    pipe_directory: PathBuf,
    log_directory: PathBuf,
    /// Closed by `drop`, which the watcher notices.
    lifeline: Option<PipeWriter>,
    watcher: Child,
    /// The process that started the service. A forked child has a copy of the guard and must not end the service.
    process: u32,
}

/// Starts a service of this user in a private directory (mode 0700).
///
/// Every GPU that this machine shows to the process belongs to the service: the daemon runs without
/// `CUDA_VISIBLE_DEVICES`, because its ordinals would apply a second time in each process.
///
/// # Errors
/// - `Unsupported` if the control program is not found.
/// - `InvalidArgument` if the path of a socket would be too long.
/// - `OperatingSystem` if a directory or a process cannot be created: the machine needs `/bin/sh`.
/// - `InvalidState` if the control program fails, or no daemon listens within the limit. The error has the program's
///   output. Nothing is left.
pub fn start(options: Options) -> Result<Guard> {
    let Options { control_program, folder, limit } = options;
    let control = control_program.or_else(find_control_program).ok_or_else(|| {
        Error::new(ErrorKind::Unsupported, OPERATION, format!("`{CONTROL_PROGRAM}` is in no folder of PATH"))
            .with_hint("install the package of NVIDIA's driver that has it, or mount it into the container")
    })?;
    let guard = Guard::watch(private_directory(folder)?, &control, limit)?;
    guard.await_daemon(&control, limit)?;
    Ok(guard)
}

impl Guard {
    /// Returns the directory in which processes find the service.
    #[must_use]
    pub fn pipe_directory(&self) -> &Path {
        &self.pipe_directory
    }

    /// Returns the directory of the daemon's logs. It is removed with the service.
    #[must_use]
    pub fn log_directory(&self) -> &Path {
        &self.log_directory
    }

    /// Returns the variables with which a child of this process uses the service. They count only from the start of the
    /// child, before its first CUDA call.
    #[must_use]
    pub fn environment(&self) -> [(&'static str, OsString); 2] {
        [
            (PIPE_DIRECTORY, self.pipe_directory.as_os_str().to_owned()),
            (LOG_DIRECTORY, self.log_directory.as_os_str().to_owned()),
        ]
    }

    /// Starts the watcher, which starts the daemon.
    fn watch(directory: PathBuf, control: &Path, limit: Duration) -> Result<Self> {
        let [pipe_directory, log_directory] = ["pipe", "log"].map(|name| directory.join(name));
        let steps = limit.as_millis().div_ceil(STEP.as_millis());
        let start = || -> io::Result<(PipeWriter, Child)> {
            for directory in [&pipe_directory, &log_directory] {
                DirBuilder::new().mode(0o700).create(directory)?;
            }
            let (theirs, lifeline) = io::pipe()?;
            let mut watcher = Command::new("/bin/sh");
            watcher.arg("-c").arg(WATCHER).arg("highwater-mps").arg(control).arg(&directory).arg(steps.to_string());
            watcher.env(PIPE_DIRECTORY, &pipe_directory).env(LOG_DIRECTORY, &log_directory);
            watcher.env_remove("CUDA_VISIBLE_DEVICES");
            // In a process group of its own: Ctrl-C ends this process and not the watcher.
            watcher.stdin(theirs).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
            Ok((lifeline, watcher.spawn()?))
        };
        let (lifeline, watcher) = start().map_err(|error| {
            let _ = fs::remove_dir_all(&directory);
            let message = format!("the shell that starts and ends the service does not start: {error}");
            Error::new(ErrorKind::OperatingSystem, OPERATION, message)
        })?;
        let lifeline = Some(lifeline);
        Ok(Self { directory, pipe_directory, log_directory, lifeline, watcher, process: std::process::id() })
    }

    /// Waits until the daemon listens.
    fn await_daemon(&self, control: &Path, limit: Duration) -> Result<()> {
        let failed = |what: String| {
            let mut message = format!("{} -d {what}", control.display());
            for name in ["start", "control.log"] {
                if let Some(text) = end_of(&self.log_directory.join(name)) {
                    let _ = write!(message, ": {text}");
                }
            }
            Error::new(ErrorKind::InvalidState, OPERATION, message)
                .with_hint("without the service, processes share a GPU by time slices")
        };
        let deadline = Instant::now() + limit;
        // The watcher's steps are longer than their names say on a busy machine.
        let latest = deadline + limit + Duration::from_secs(1);
        loop {
            let status = fs::read_to_string(self.log_directory.join("status")).unwrap_or_default();
            match status.trim_end_matches('\n').strip_suffix(' ') {
                Some("0") if is_running(&self.pipe_directory) => return Ok(()),
                Some("0") if Instant::now() > deadline => {
                    return Err(failed(format!("started no daemon that listens within {limit:?}")));
                }
                Some(LATE) => return Err(failed(format!("did not end within {limit:?}"))),
                Some("0") => {}
                Some(code) => return Err(failed(format!("failed (exit code {code})"))),
                None if Instant::now() > latest => {
                    return Err(failed(format!("was not started within {:?}", 2 * limit)));
                }
                None => {}
            }
            thread::sleep(PAUSE);
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.lifeline.take());
        if self.process != std::process::id() {
            return;
        }
        if wait(&mut self.watcher, Instant::now() + END).is_none() {
            let _ = self.watcher.kill();
            let _ = self.watcher.wait();
            tracing::warn!("the multi-process service in {} may not have ended", self.directory.display());
        }
        // Nothing is there unless the watcher was killed.
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// Waits for the end of a process; `None` after the deadline.
fn wait(process: &mut Child, deadline: Instant) -> Option<ExitStatus> {
    loop {
        match process.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if Instant::now() < deadline => thread::sleep(PAUSE),
            Ok(None) | Err(_) => return None,
        }
    }
}

/// Returns the last part of a file on one line; `None` if it is empty or missing.
fn end_of(file: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    File::open(file).and_then(|file| file.take(64 << 10).read_to_end(&mut bytes)).ok()?;
    let text = String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(300)..]).into_owned();
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    (!text.is_empty()).then_some(text)
}

/// Returns the first executable control program of `PATH`.
fn find_control_program() -> Option<PathBuf> {
    let folders = std::env::var_os("PATH")?;
    std::env::split_paths(&folders)
        .filter(|folder| folder.is_absolute())
        .map(|folder| folder.join(CONTROL_PROGRAM))
        .find(|file| fs::metadata(file).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0))
}

/// Creates an empty directory that only this user can enter.
fn private_directory(folder: Option<PathBuf>) -> Result<PathBuf> {
    let name = format!("highwater-mps-{:08x}", u32::from_ne_bytes(highwater_hal::random(OPERATION)?));
    let chosen = folder.is_some();
    let folders = match folder {
        Some(folder) => vec![folder],
        None => environment_path("XDG_RUNTIME_DIR").into_iter().chain(["/tmp".into()]).collect(),
    };
    let mut refused = None;
    for folder in folders {
        let directory = folder.join(&name);
        // Not of the user's making, and the next one is short.
        match check_length(&directory).and_then(|()| {
            DirBuilder::new().mode(0o700).create(&directory).map_err(|error| cannot_create(&directory, &error))
        }) {
            Ok(()) => return Ok(directory),
            Err(error) if chosen => return Err(error),
            Err(error) => refused = Some(error),
        }
    }
    Err(refused.unwrap_or_else(|| Error::lacks(OPERATION, "a folder for the service")))
}

/// Checks that the sockets of a service in this directory have paths that the system accepts.
fn check_length(directory: &Path) -> Result<()> {
    let longest = directory.join("pipe").join(SOCKETS[1]);
    let bytes = longest.as_os_str().len();
    if bytes < SOCKET_PATH_BYTES && directory.is_absolute() {
        return Ok(());
    }
    let message = if directory.is_absolute() {
        format!(
            "the socket {} would have a path of {bytes} bytes, expected fewer than {SOCKET_PATH_BYTES}",
            longest.display()
        )
    } else {
        format!("the folder of {} is not an absolute path", directory.display())
    };
    Err(Error::new(ErrorKind::InvalidArgument, OPERATION, message)
        .with_hint("use a folder with a short path, such as /tmp"))
}

fn cannot_create(path: &Path, error: &io::Error) -> Error {
    Error::new(ErrorKind::OperatingSystem, OPERATION, format!("{} cannot be created: {error}", path.display()))
}

/// Reports whether a daemon listens in a pipe directory. Does not wait.
///
/// The socket's file stays when a daemon ends, so its presence proves nothing.
fn is_running(pipe_directory: &Path) -> bool {
    let control = pipe_directory.join(SOCKETS[0]);
    let Ok(metadata) = fs::metadata(&control) else { return false };
    if metadata.file_type().is_fifo() {
        let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        // A pipe without a reader refuses (ENXIO).
        return rustix::fs::open(&control, flags, Mode::empty()).is_ok();
    }
    metadata.file_type().is_socket() && connects(control.as_os_str())
}

fn connects(path: &OsStr) -> bool {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let Ok(socket) = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None) else { return false };
    let Ok(address) = SocketAddrUnix::new(path.as_bytes()) else { return false };
    // A listener of another type, a full queue, or one that this user may not enter, is a daemon too.
    matches!(connect(&socket, &address), Ok(()) | Err(Errno::PROTOTYPE | Errno::AGAIN | Errno::ACCESS))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn scratch(purpose: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("hw-mps-{purpose}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn a_listener_is_a_service_and_a_socket_that_was_left_is_none() {
        let folder = scratch("listener");
        assert!(!is_running(&folder), "no socket");
        let listener = UnixListener::bind(folder.join("control")).unwrap();
        assert!(is_running(&folder));
        drop(listener);
        assert!(folder.join("control").exists() && !is_running(&folder), "nobody listens");
        fs::remove_file(folder.join("control")).unwrap();
        fs::write(folder.join("control"), "").unwrap();
        assert!(!is_running(&folder), "a plain file");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_long_folder_is_an_error_that_names_the_length() {
        let folder = Path::new("/tmp").join("x".repeat(80));
        let error = private_directory(Some(folder)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.message().contains("expected fewer than 108") && !error.hint().is_empty(), "{error}");
        let error = private_directory(Some("run".into())).unwrap_err();
        assert!(error.message().contains("not an absolute path"), "{error}");
        // The longest that fits.
        let most = SOCKET_PATH_BYTES - 1 - "/pipe/control_privileged".len();
        assert!(check_length(&Path::new("/").join("y".repeat(most - 1))).is_ok());
        assert!(check_length(&Path::new("/").join("y".repeat(most))).is_err());
    }

    #[test]
    fn a_program_that_fails_or_hangs_is_an_error_and_leaves_nothing() {
        let folder = scratch("failing");
        let cases = [
            ("echo no such GPU >&2; exit 3", "no such GPU"),
            ("exec sleep 60", "did not end within"),
            ("exit 0", "started no daemon"),
        ];
        for (index, (script, expected)) in cases.into_iter().enumerate() {
            let program = folder.join(format!("control-{index}"));
            fs::write(&program, format!("#!/bin/sh\n[ \"$1\" = -d ] || exit 1\n{script}\n")).unwrap();
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
            let inner = folder.join(index.to_string());
            fs::create_dir(&inner).unwrap();
            let options = Options::new().with_control_program(&program).with_folder(&inner);
            let begun = Instant::now();
            let error = start(options.with_limit(Duration::from_millis(300))).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidState, "{error}");
            assert!(error.message().contains(expected), "{error}");
            assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
            assert_eq!(fs::read_dir(&inner).unwrap().count(), 0, "{script}");
        }
        let missing = Options::new().with_control_program(folder.join("none")).with_folder(&folder);
        let error = start(missing).unwrap_err();
        assert!(
            error.kind() == ErrorKind::InvalidState && error.message().contains("failed (exit code 127)"),
            "{error}"
        );
        fs::remove_dir_all(&folder).unwrap();
    }
}
