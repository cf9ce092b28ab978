//! Child processes: every process of this program that it starts, watches and stops.
//!
//! *Messages.* A child's standard input is a socket, over which both sides send the messages of a protocol ([`frame`]). Its
//! standard error is the parent's. It has no standard output.
//!
//! *Death.* A child is dead if its pidfd is readable. A closed socket proves nothing: it may be closed long before, or be kept
//! open by a child of the child.
//!
//! *Orphans.* A child ends when its parent does. Its socket is closed, and the kernel kills a child that is too busy to notice.
//! The kernel sends no signal if the parent died before the child asked for it. So the child asks first, and then compares
//! its parent with the one on its command line.
//!
//! [`frame`]: super::frame

use std::ffi::{CStr, OsStr};
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use highwater::ErrorKind;
use highwater::hal::display_foreign;
use highwater::sharing::{Rendezvous, SharingOptions};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, getpid, getppid, kill_process, pidfd_open, pidfd_send_signal,
    set_parent_process_death_signal, waitpid,
};

use super::failure::Failure;
use super::frame::{Inbox, Message};

/// The time for a killed process to disappear. It takes milliseconds; more means that the kernel holds the process.
const END: Duration = Duration::from_secs(10);

/// A child process.
#[derive(Debug)]
pub(super) struct Child {
    pid: Pid,
    pidfd: OwnedFd,
    socket: UnixStream,
    inbox: Inbox,
    ended: Option<ExitStatus>,
    /// `None` without namespaces of its own.
    wrapper: Option<Wrapper>,
}

/// The programs between this process and a child in namespaces of its own. `Child::pid` is that of the first of them.
#[derive(Debug, Default)]
struct Wrapper {
    /// Set once the child has sent something.
    inner: Option<Inner>,
}

/// The child itself.
#[derive(Debug)]
struct Inner {
    shell: Pid,
    pid: Pid,
    pidfd: OwnedFd,
}

impl Inner {
    /// Finds the child of the shell that `unshare` has started. Each of them has one child.
    fn of(unshare: Pid) -> Option<Self> {
        let shell = only_child(unshare)?;
        let pid = only_child(shell)?;
        Some(Self { shell, pid, pidfd: pidfd_open(pid, PidfdFlags::empty()).ok()? })
    }
}

/// Returns the command that starts this program once more, with these arguments and `--parent`.
fn this_program(arguments: &[impl AsRef<OsStr>]) -> Command {
    // Unlike `current_exe`, this is the same program even if the file was replaced.
    let mut command = Command::new("/proc/self/exe");
    command.arg0("highwater").args(arguments).arg("--parent").arg(getpid().to_string());
    command
}

impl Child {
    /// Starts this program once more, with these arguments and `--parent`.
    ///
    /// The parent of the child is the calling *thread*: the child dies with it.
    pub(super) fn start(arguments: &[impl AsRef<OsStr>]) -> io::Result<Self> {
        Self::spawn(&mut this_program(arguments))
    }

    /// As [`Child::start`], and sets an environment variable.
    pub(super) fn start_with(arguments: &[impl AsRef<OsStr>], name: &str, value: &OsStr) -> io::Result<Self> {
        Self::spawn(this_program(arguments).env(name, value))
    }

    /// Starts this program once more, in user, network, PID, IPC and mount namespaces of its own. It sees no process outside.
    ///
    /// A shell is the first process of the PID namespace and the parent of the child. The kernel ends the shell with `unshare`, and
    /// the namespace with the shell. The child of this process is `unshare`.
    pub(super) fn start_isolated(arguments: &[impl AsRef<OsStr>]) -> io::Result<Self> {
        // The second command keeps the shell from replacing itself.
        const SHELL: &str = r#""$@"; exit $?"#;
        let mut command = Command::new("unshare");
        command.args(["-Urnpifm", "--kill-child", "--", "sh", "-c", SHELL, "sh"]).arg(std::env::current_exe()?);
        let mut child = Self::spawn(command.args(arguments).args(["--parent", "1"]))?;
        child.wrapper = Some(Wrapper::default());
        Ok(child)
    }

    fn spawn(command: &mut Command) -> io::Result<Self> {
        let (socket, theirs) = UnixStream::pair()?;
        let child = command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null()).spawn()?;
        let pid = Pid::from_child(&child);
        // The id names no other process until the child has been waited for.
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).inspect_err(|_| {
            let _ = kill_process(pid, Signal::KILL).and_then(|()| waitpid(Some(pid), WaitOptions::empty()));
        })?;
        Ok(Self { pid, pidfd, socket, inbox: Inbox::new(pid), ended: None, wrapper: None })
    }

    pub(super) fn pid(&self) -> Pid {
        self.pid
    }

    pub(super) fn socket(&self) -> &UnixStream {
        &self.socket
    }

    /// Returns a second descriptor of the socket, which may outlive the child.
    pub(super) fn clone_socket(&self) -> io::Result<UnixStream> {
        self.socket.try_clone()
    }

    /// Returns true once the child can send nothing more.
    pub(super) fn has_hung_up(&self) -> bool {
        self.inbox.has_ended()
    }

    /// Returns true if the child ended or hung up in the middle of a message.
    pub(super) fn is_cut(&self) -> bool {
        self.inbox.is_cut()
    }

    /// Returns the process that does the work: the child, or the one that its wrapper has started. `None` before that is known.
    pub(super) fn worker(&self) -> Option<Pid> {
        self.wrapper.as_ref().map_or(Some(self.pid), |wrapper| Some(wrapper.inner.as_ref()?.pid))
    }

    fn inner(&self) -> Option<&Inner> {
        self.wrapper.as_ref().and_then(|wrapper| wrapper.inner.as_ref())
    }

    /// Returns the state of that process as the system reports it, such as `T (stopped)`, or `None` if it does not.
    pub(super) fn state(&self) -> Option<String> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.worker()?)).ok()?;
        let field = |name| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        // The id of a child names no other process until the child has been waited for. The shell waits for the worker.
        if let Some(inner) = self.inner()
            && field("PPid:") != Some(&*inner.shell.to_string())
        {
            return None;
        }
        field("State:").map(str::to_owned)
    }

    /// Returns the messages that have arrived, without waiting.
    pub(super) fn messages<M: Message>(&mut self) -> io::Result<Vec<M>> {
        self.inbox.receive_all(&self.socket)?;
        if let Some(wrapper) = &mut self.wrapper {
            wrapper.inner = wrapper.inner.take().or_else(|| Inner::of(self.pid));
        }
        std::iter::from_fn(|| self.inbox.next().transpose()).collect()
    }

    /// Waits for a message. Returns `None` once the child has ended or `limit` has passed.
    pub(super) fn wait_for<M: Message>(&mut self, limit: Duration) -> io::Result<Option<M>> {
        let deadline = Instant::now() + limit;
        loop {
            // Death is checked first: everything that a dead child sent is in the socket.
            let dead = wait_readable(self.pidfd.as_fd(), Duration::ZERO)?;
            self.inbox.receive_all(&self.socket)?;
            if let Some(message) = self.inbox.next()? {
                return Ok(Some(message));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if dead || left.is_zero() {
                return Ok(None);
            }
            ready([&*self], left)?;
        }
    }

    /// Returns the child's exit status if it has ended; does not wait.
    pub(super) fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        if self.ended.is_none() {
            let waited = waitpid(Some(self.pid), WaitOptions::NOHANG)?;
            self.ended = waited.map(|(_, status)| {
                let status = ExitStatus::from_raw(status.as_raw());
                // The code of a shell whose child was killed: 128 and the signal.
                let signal = status.code().filter(|code| self.wrapper.is_some() && (129..192).contains(code));
                signal.map_or(status, |code| ExitStatus::from_raw(code - 128))
            });
        }
        Ok(self.ended)
    }

    /// Records the exit status, if the child was waited for elsewhere.
    pub(super) fn note_end(&mut self, status: ExitStatus) {
        self.ended = Some(status);
    }

    /// Closes this end for writing, waits until the child ends, and returns its exit status; `None` after `limit`.
    pub(super) fn finish(&mut self, limit: Duration) -> io::Result<Option<ExitStatus>> {
        self.socket.shutdown(Shutdown::Write)?;
        wait_readable(self.pidfd.as_fd(), limit)?;
        self.ended()
    }

    /// Kills the child and waits until it is gone.
    pub(super) fn stop(&mut self) -> io::Result<()> {
        if self.ended()?.is_some() {
            return Ok(());
        }
        self.kill()?;
        if !wait_readable(self.pidfd.as_fd(), END)? || self.ended()?.is_none() {
            return Err(io::Error::other(format!("process {} is still there after it was killed", self.pid)));
        }
        // The kernel kills it after `unshare` and the shell, and until then it has memory open.
        if let Some(inner) = self.inner() {
            wait_readable(inner.pidfd.as_fd(), END)?;
        }
        Ok(())
    }

    /// Kills the child. Succeeds if it is dead already.
    pub(super) fn kill(&self) -> io::Result<()> {
        match pidfd_send_signal(&self.pidfd, Signal::KILL) {
            Err(Errno::SRCH) => Ok(()),
            sent => Ok(sent?),
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            tracing::warn!("a process could not be stopped: {error}");
        }
    }
}

/// Refuses a rendezvous by which the children of this process cannot share memory with it. `is_isolated` is true if they are in
/// namespaces of their own.
///
/// # Errors
/// If the children could not reach this process.
pub(super) fn check_rendezvous(is_isolated: bool) -> anyhow::Result<()> {
    let rendezvous = SharingOptions::from_environment()?.rendezvous.unwrap_or_default();
    let why = match rendezvous {
        Rendezvous::Descriptor(_) => "the processes that this one starts inherit no descriptor",
        Rendezvous::Abstract if is_isolated => "`--isolate-workers` starts workers in network namespaces of their own",
        _ => return Ok(()),
    };
    let message =
        format!("the rendezvous `{}` cannot serve this command: {why}", display_foreign(&rendezvous.to_string()));
    let hint = if is_isolated {
        "set HIGHWATER_SHARING=rendezvous=directory:PATH"
    } else {
        "set HIGHWATER_SHARING=rendezvous=directory:PATH, or leave the rendezvous out"
    };
    Err(Failure::new(ErrorKind::InvalidArgument, message, hint).into())
}

/// Waits until a child sends something, hangs up or dies. Returns the positions of all such children: none after `limit`.
///
/// A child that has hung up is waited for only to die.
pub(super) fn ready<'c>(children: impl IntoIterator<Item = &'c Child>, limit: Duration) -> io::Result<Vec<usize>> {
    let (mut positions, mut descriptors) = (Vec::new(), Vec::new());
    for (position, child) in children.into_iter().enumerate() {
        let socket = (!child.has_hung_up()).then(|| child.socket.as_fd());
        for descriptor in socket.into_iter().chain([child.pidfd.as_fd()]) {
            positions.push(position);
            descriptors.push(descriptor);
        }
    }
    let is_ready = poll_all(&descriptors, limit)?;
    let mut ready: Vec<usize> = positions.into_iter().zip(is_ready).filter_map(|(at, is)| is.then_some(at)).collect();
    ready.dedup();
    Ok(ready)
}

/// Returns the child of a process, if it has one thread and one child.
fn only_child(parent: Pid) -> Option<Pid> {
    let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).ok()?;
    Pid::from_raw(children.trim().parse().ok()?)
}

/// Waits until a descriptor is readable; false after `limit`.
pub(super) fn wait_readable(descriptor: BorrowedFd<'_>, limit: Duration) -> io::Result<bool> {
    Ok(poll_all(&[descriptor], limit)?[0])
}

/// Waits until a descriptor is readable or `limit` has passed. Says of each whether it is.
fn poll_all(descriptors: &[BorrowedFd<'_>], limit: Duration) -> io::Result<Vec<bool>> {
    let deadline = Instant::now() + limit;
    let polled = |&descriptor| PollFd::from_borrowed_fd(descriptor, PollFlags::IN);
    let mut descriptors: Vec<_> = descriptors.iter().map(polled).collect();
    loop {
        let left = Timespec::try_from(deadline.saturating_duration_since(Instant::now()));
        match poll(&mut descriptors, Some(&left.unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 }))) {
            Err(Errno::INTR) => {}
            polled => {
                polled?;
                return Ok(descriptors.iter().map(|descriptor| !descriptor.revents().is_empty()).collect());
            }
        }
    }
}

/// In a child: makes this process end when `parent` does.
pub(super) fn end_with(parent: u32, name: &CStr) -> io::Result<()> {
    // For `ps`; nothing depends on it.
    let _ = rustix::thread::set_name(name);
    set_parent_process_death_signal(Some(Signal::KILL))?;
    if getppid().is_none_or(|now| now.as_raw_pid().cast_unsigned() != parent) {
        die();
    }
    Ok(())
}

/// In a child: makes this process end when `parent` does. Returns the socket to the parent, and the inbox of its messages.
///
/// # Errors
/// If the standard input is not a socket. The error tells people that only `command` starts this process.
pub(super) fn serve(parent: u32, name: &CStr, command: &str) -> Result<(UnixStream, Inbox), Failure> {
    let serve = || {
        end_with(parent, name)?;
        let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
        socket.peer_addr().map_err(|error| io::Error::new(error.kind(), "the standard input is not a socket"))?;
        let parent = parent.try_into().ok().and_then(Pid::from_raw).ok_or(Errno::SRCH)?;
        Ok((socket, Inbox::new(parent)))
    };
    serve().map_err(|error: io::Error| {
        let hint = format!("this command is for `{command}`, which starts it with a socket as its standard input");
        Failure::new(ErrorKind::InvalidState, "this process has no parent to work for", hint).because_of(error)
    })
}

/// Ends this process at once, as `kill -9` does.
///
/// A child without a parent calls this. An orderly exit could wait for messages that never come.
pub(super) fn die() -> ! {
    loop {
        let _ = kill_process(getpid(), Signal::KILL);
        std::thread::yield_now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_has_an_end() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        assert!(!wait_readable(ours.as_fd(), Duration::from_millis(1)).unwrap());
        drop(theirs);
        assert!(wait_readable(ours.as_fd(), Duration::from_secs(10)).unwrap());
    }
}
