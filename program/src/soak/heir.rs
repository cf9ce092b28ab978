//! The heir of a consumer: a process that holds the consumer's descriptors and outlives it.
//!
//! It simulates a child that a consumer forked. Sockets and locks do not prove that a consumer is alive:
//! the heir keeps them until the exporter closes its end of the consumer's socket.

use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use anyhow::Result;
use rustix::io::{FdFlags, fcntl_setfd};

use super::super::Verdict;
use super::descriptors::copies;

/// Starts an heir that holds every descriptor of this process. Returns their number.
///
/// This process does not wait for it. When this process dies, the heir becomes a child of the exporter.
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

/// Runs the heir, which waits until the exporter closes its socket or ends.
pub(in super::super) fn command() -> Result<Verdict> {
    // Discards the messages for the consumer.
    io::copy(&mut io::stdin().lock(), &mut io::sink())?;
    Ok(Verdict::Good)
}
