//! What a consumer leaves behind: a process that holds the consumer's descriptors and outlives it.
//!
//! It stands for a child that a consumer forked. Whether a consumer is dead must not be told from its sockets or its locks:
//! the heir keeps them, until the exporter lets go of its end of the consumer's socket.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use anyhow::Result;
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};

use super::super::Verdict;

/// Starts an heir that holds every descriptor of this process; says how many.
///
/// Nobody waits for it: when this process dies, it becomes a child of the exporter.
pub(super) fn leave() -> io::Result<u64> {
    let own = pidfd_open(getpid(), PidfdFlags::empty())?;
    // A copy of a descriptor stands for the same open file or socket. The copies are all gone from this process when this
    // returns, and nobody else starts a process here meanwhile.
    let mut copies: Vec<OwnedFd> = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let Some(number) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        if number > 2
            // Closed by another thread meanwhile, or refused by a sandbox.
            && let Ok(copy) = pidfd_getfd(&own, number, PidfdGetfdFlags::empty())
        {
            fcntl_setfd(&copy, FdFlags::empty())?;
            copies.push(copy);
        }
    }
    let socket = io::stdin().as_fd().try_clone_to_owned()?;
    Command::new("/proc/self/exe")
        .arg0("highwater")
        .arg("soak-heir")
        .stdin(Stdio::from(socket))
        .stdout(Stdio::null())
        .spawn()?;
    Ok(copies.len() as u64 + 1)
}

/// The heir: does nothing, until the exporter has no more use for it or is gone.
pub(in super::super) fn command() -> Result<Verdict> {
    // What the consumer was still to hear.
    io::copy(&mut io::stdin().lock(), &mut io::sink())?;
    Ok(Verdict::Good)
}
