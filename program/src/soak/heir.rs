//! The heir of a worker: a process that holds the worker's descriptors and outlives it.
//!
//! It simulates a child that a worker forked. Sockets and locks do not prove that a worker is alive. The heir keeps them until the
//! supervisor closes its end of the worker's socket.

use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use anyhow::Result;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{Errno, FdFlags, fcntl_setfd};

use super::super::Verdict;
use super::descriptors::copies;

/// Starts an heir that holds every descriptor of this process. Returns their number.
///
/// This process does not wait for it. When this process dies, the heir becomes a child of the supervisor.
pub(super) fn leave() -> io::Result<u64> {
    // This process closes the copies on return, and no other thread starts a process meanwhile.
    let copies = copies()?;
    copies.iter().try_for_each(|copy| fcntl_setfd(copy, FdFlags::empty()))?;
    let socket = io::stdin().as_fd().try_clone_to_owned()?;
    Command::new("/proc/self/exe")
        .arg0("highwater")
        .arg("soak-heir")
        .stdin(Stdio::from(socket))
        .stdout(Stdio::null())
        .spawn()?;
    Ok(copies.len() as u64 + 1)
}

/// Runs the heir, which waits until the supervisor closes its socket or ends. It reads nothing, because the worker may live on.
pub(in super::super) fn command() -> Result<Verdict> {
    let stdin = io::stdin();
    loop {
        // The end of a connection is always reported.
        let mut end = [PollFd::from_borrowed_fd(stdin.as_fd(), PollFlags::empty())];
        match poll(&mut end, None) {
            Ok(_) => return Ok(Verdict::Good),
            Err(Errno::INTR) => {}
            Err(error) => return Err(io::Error::from(error).into()),
        }
    }
}
