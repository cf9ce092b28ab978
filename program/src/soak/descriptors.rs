//! The descriptors of a worker: copies for its heir, and the cutting of its sockets.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{FileType, fstat};
use rustix::net::{Shutdown, shutdown};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};

/// Returns a copy of every descriptor of this process but the standard ones. A copy refers to the same open file or socket.
pub(super) fn copies() -> io::Result<Vec<OwnedFd>> {
    let own = pidfd_open(getpid(), PidfdFlags::empty())?;
    let mut copies = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let Some(number) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        if number > 2
            // Another thread may have closed it, or a sandbox may refuse.
            && let Ok(copy) = pidfd_getfd(&own, number, PidfdGetfdFlags::empty())
        {
            copies.push(copy);
        }
    }
    Ok(copies)
}

/// Cuts every socket of this process but one, as its end would, and returns their number. It looks dead to the other ends.
pub(super) fn cut_sockets(kept: impl AsFd) -> io::Result<u64> {
    let identity = |descriptor: &dyn AsFd| -> io::Result<_> {
        let status = fstat(descriptor.as_fd())?;
        let is_socket = FileType::from_raw_mode(status.st_mode) == FileType::Socket;
        Ok(is_socket.then_some((status.st_dev, status.st_ino)))
    };
    let kept = identity(&kept)?;
    let mut cut = 0;
    for copy in copies()? {
        let socket = identity(&copy)?;
        if socket.is_some() && socket != kept {
            // Its other end may be gone already.
            cut += u64::from(shutdown(&copy, Shutdown::Both).is_ok());
        }
    }
    Ok(cut)
}
