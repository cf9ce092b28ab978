//! A process of this program that this one starts, watches and stops.
//!
//! *Death.* A child is dead when its pidfd is readable, and by nothing else: a socket may be closed long before, or be kept
//! open by a child of the child.
//!
//! *Orphans.* A child ends when its parent does, however that ends: its socket is closed, and where the child is too busy
//! to notice, the kernel kills it. That signal alone is not enough: it is not sent where the parent has died before it was
//! asked for. So the child asks first, and then looks whether its parent is still the one that it was told.

use std::ffi::{CStr, OsStr};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, getpid, getppid, kill_process, pidfd_open, pidfd_send_signal,
    set_parent_process_death_signal, waitpid,
};

/// How long a killed process may take to be gone. It is a matter of milliseconds; longer means that the kernel holds it.
const END: Duration = Duration::from_secs(10);

/// A child, with a socket to it, which is its standard input.
#[derive(Debug)]
pub(super) struct Child {
    pid: Pid,
    pidfd: OwnedFd,
    socket: UnixStream,
    ended: Option<ExitStatus>,
}

impl Child {
    /// Starts this program once more, with these arguments and `--parent`.
    ///
    /// The parent of the child is the calling *thread*: the child dies with it.
    pub(super) fn start(arguments: &[impl AsRef<OsStr>]) -> io::Result<Self> {
        let (socket, theirs) = UnixStream::pair()?;
        // Not `current_exe`: this is the same program for certain, also where the file has been replaced since.
        let child = Command::new("/proc/self/exe")
            .arg0("highwater")
            .args(arguments)
            .arg("--parent")
            .arg(getpid().to_string())
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn()?;
        let pid = Pid::from_child(&child);
        // The number cannot mean another process before the child has been waited for.
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).inspect_err(|_| {
            let _ = kill_process(pid, Signal::KILL).and_then(|()| waitpid(Some(pid), WaitOptions::empty()));
        })?;
        Ok(Self { pid, pidfd, socket, ended: None })
    }

    pub(super) fn pid(&self) -> Pid {
        self.pid
    }

    pub(super) fn socket(&self) -> &UnixStream {
        &self.socket
    }

    /// The same socket, which may outlive the child's place here.
    pub(super) fn clone_socket(&self) -> io::Result<UnixStream> {
        self.socket.try_clone()
    }

    /// Readable once the child is dead.
    pub(super) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// The child's state as the system reports it, such as `T (stopped)`; `None` if it does not.
    pub(super) fn state(&self) -> Option<String> {
        // The id names no other process until the child has been waited for.
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid)).ok()?;
        status.lines().find_map(|line| line.strip_prefix("State:")).map(|state| state.trim().to_owned())
    }

    /// How the child ended, if it has; does not wait.
    pub(super) fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        if self.ended.is_none() {
            let waited = waitpid(Some(self.pid), WaitOptions::NOHANG)?;
            self.ended = waited.map(|(_, status)| ExitStatus::from_raw(status.as_raw()));
        }
        Ok(self.ended)
    }

    /// Notes how the child ended, where somebody else has waited for it.
    pub(super) fn note_end(&mut self, status: ExitStatus) {
        self.ended = Some(status);
    }

    /// Ends the child, and waits until it is gone.
    pub(super) fn stop(&mut self) -> io::Result<()> {
        if self.ended()?.is_some() {
            return Ok(());
        }
        self.kill()?;
        if !wait_readable(self.pidfd(), END)? || self.ended()?.is_none() {
            return Err(io::Error::other(format!("process {} is still there after it was killed", self.pid)));
        }
        Ok(())
    }

    /// Kills the child; no error where it is dead already.
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

/// Waits until a descriptor is readable; false when it is not within `limit`.
pub(super) fn wait_readable(descriptor: BorrowedFd<'_>, limit: Duration) -> io::Result<bool> {
    wait_any(&[descriptor], limit)
}

/// Waits until one of the descriptors is readable; false when none is within `limit`.
pub(super) fn wait_any(descriptors: &[BorrowedFd<'_>], limit: Duration) -> io::Result<bool> {
    let deadline = Instant::now() + limit;
    let polled = |&descriptor| PollFd::from_borrowed_fd(descriptor, PollFlags::IN);
    let mut descriptors: Vec<_> = descriptors.iter().map(polled).collect();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match poll(&mut descriptors, Some(&timespec(left))) {
            Err(Errno::INTR) => {}
            ready => return Ok(ready? > 0),
        }
    }
}

/// A duration as `poll` takes it.
pub(super) fn timespec(duration: Duration) -> Timespec {
    Timespec::try_from(duration).unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 })
}

/// In a child: it ends when `parent` does.
pub(super) fn end_with(parent: u32, name: &CStr) -> io::Result<()> {
    // For `ps`; nothing depends on it.
    let _ = rustix::thread::set_name(name);
    set_parent_process_death_signal(Some(Signal::KILL))?;
    if getppid().is_none_or(|now| now.as_raw_pid().cast_unsigned() != parent) {
        die();
    }
    Ok(())
}

/// In a child: ties it to `parent` and gives its end of the socket.
pub(super) fn serve(parent: u32, name: &CStr) -> io::Result<UnixStream> {
    end_with(parent, name)?;
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    socket.peer_addr().map_err(|error| io::Error::new(error.kind(), "the standard input is no socket"))?;
    Ok(socket)
}

/// Ends this process at once, whatever its threads do: what `kill -9` does.
///
/// For a child without a parent. An orderly exit could wait for what does not come any more, and nobody is left to tell.
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
