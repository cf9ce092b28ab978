//! What a consumer leaves behind: a process that holds the consumer's descriptors and outlives it.
//!
//! It stands for a child that a consumer forked. Whether a consumer is dead must not be told from its sockets or its locks:
//! the heir keeps them, until the exporter lets go of its end of the consumer's socket.

use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use anyhow::Result;
use rustix::io::{FdFlags, fcntl_setfd};

use super::super::Verdict;
use super::descriptors::copies;

/// Starts an heir that holds every descriptor of this process; says how many.
///
/// Nobody waits for it: when this process dies, it becomes a child of the exporter.
pub(super) fn leave() -> io::Result<u64> {
    // The copies are all gone from this process when this returns, and nobody else starts a process here meanwhile.
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

/// The heir: does nothing, until the exporter has no more use for it or is gone.
pub(in super::super) fn command() -> Result<Verdict> {
    // What the consumer was still to hear.
    io::copy(&mut io::stdin().lock(), &mut io::sink())?;
    Ok(Verdict::Good)
}
