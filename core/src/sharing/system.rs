//! The operating system's part of sharing: messages with descriptors, and bells that wake a thread.

use std::cell::Cell;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread::ThreadId;

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};

use highwater_hal::{Error, ErrorKind, Result};

thread_local! {
    /// True in the sharing threads of all runtimes.
    static IS_SERVICE: Cell<bool> = const { Cell::new(false) };
}

/// Notes that this is a sharing thread.
pub(super) fn become_service() {
    IS_SERVICE.set(true);
    crate::own_thread::become_caller();
}

/// Returns whether this is a sharing thread. It must not wait for one.
pub(super) fn is_service() -> bool {
    // The thread-local may be gone at the end of the thread.
    IS_SERVICE.try_with(Cell::get).unwrap_or(false)
}

/// The sharing threads that wait for the end of another one: the thread that waits, and the other one.
static WAITS: Mutex<Vec<(ThreadId, ThreadId)>> = Mutex::new(Vec::new());

/// The wait of a sharing thread for the end of another one.
pub(super) struct WaitForService(ThreadId);

impl WaitForService {
    /// Begins a wait. `None` if it would not end: the other thread is this one, or waits for it, perhaps through further threads.
    pub(super) fn begin(service: ThreadId) -> Option<Self> {
        let this = std::thread::current().id();
        let mut waits = WAITS.lock();
        // The list has no circle, so this ends.
        let mut last = service;
        while last != this {
            match waits.iter().find(|(waiting, _)| *waiting == last) {
                Some((_, other)) => last = *other,
                None => {
                    waits.push((this, service));
                    return Some(Self(this));
                }
            }
        }
        None
    }
}

impl Drop for WaitForService {
    fn drop(&mut self) {
        WAITS.lock().retain(|(waiting, _)| *waiting != self.0);
    }
}

/// Maximum number of descriptors in one message.
pub(crate) const MOST_DESCRIPTORS: usize = 16;

/// Returns the error of a system call that failed to provide `what`.
pub(crate) fn os_error(operation: &'static str, what: &str, errno: Errno) -> Error {
    let (kind, hint) = match errno {
        Errno::MFILE => {
            (ErrorKind::OperatingSystem, "the process has no descriptors left: raise `ulimit -n`, or close files")
        }
        Errno::NFILE => (ErrorKind::OperatingSystem, "the system has no descriptors left: raise fs.file-max"),
        Errno::NOMEM | Errno::NOBUFS => (ErrorKind::OperatingSystem, "free memory, or raise the limits of the process"),
        Errno::FBIG => (ErrorKind::OutOfMemory, highwater_hal::file_limit::HINT),
        Errno::PERM | Errno::ACCESS => (
            ErrorKind::OperatingSystem,
            "a sandbox or a security module refuses this system call: allow it for this process",
        ),
        _ => (ErrorKind::OperatingSystem, ""),
    };
    Error::new(kind, operation, format!("the operating system cannot provide the {what}: {errno}"))
        .with_code(i64::from(errno.raw_os_error()))
        .with_hint(hint)
}

/// Returns an error about a message of a peer.
pub(crate) fn invalid_message(operation: &'static str, what: &str) -> Error {
    Error::new(ErrorKind::InvalidArgument, operation, format!("the other process sent {what}"))
        .with_hint("use compatible versions of this library in both processes")
}

/// Identifies the running system. A ticket of an earlier boot is invalid.
pub(crate) fn boot_id() -> [u8; 16] {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    // Zeros if the file is missing. No process refuses a ticket because of zeros, and a ticket of another boot names no
    // exporter.
    u128::from_str_radix(&digits, 16).unwrap_or(0).to_be_bytes()
}

/// Returns whether a read from a descriptor would return at once.
pub(crate) fn is_readable(descriptor: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(descriptor, PollFlags::IN)];
    let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut polled, Some(&now)).is_ok_and(|count| count > 0)
}

/// Wakes the sharing thread of a runtime, from this process only.
#[derive(Debug)]
pub(crate) struct Bell(OwnedFd);

impl Bell {
    pub(crate) fn new(operation: &'static str) -> Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        rustix::event::eventfd(0, flags)
            .map(Self)
            .map_err(|errno| os_error(operation, "descriptor that wakes a thread", errno))
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    pub(crate) fn ring(&self) {
        // The write fails after 2^64 - 2 unread rings; the bell is already ringing then.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Clears the rings so far.
    pub(crate) fn drain(&self) {
        let _ = rustix::io::read(&self.0, &mut [0_u8; 8]);
    }
}

/// Returns the two ends of a line on which one process rings the other. Each pair of processes has its own line, so that no
/// process can cut the line of others.
pub(crate) fn line() -> Result<(OwnedFd, OwnedFd)> {
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .map_err(|errno| os_error("open_shared", "socket", errno))
}

/// Rings at the other end. If the queue is full, the line is already ringing. If the other end is closed, there is no thread to
/// wake.
pub(crate) fn ring(line: BorrowedFd<'_>) {
    let _ = rustix::net::send(line, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

/// Clears the rings so far. Returns `false` if the other end is closed.
pub(crate) fn drain(line: BorrowedFd<'_>) -> bool {
    let mut bytes = [0_u8; 8];
    // Bounded, because the other process may ring without end.
    for _ in 0..512 {
        match rustix::net::recv(line, &mut bytes, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => return false,
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return errno == Errno::AGAIN,
        }
    }
    true
}

/// Sends one message with descriptors, without waiting.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    message: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> std::result::Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::INVAL);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    loop {
        match rustix::net::sendmsg(socket, &[IoSlice::new(message)], &mut control, flags) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// The result of [`receive`].
#[derive(Debug)]
pub(crate) enum Received {
    /// A message: its length in bytes, and its descriptors.
    Message(usize, Vec<OwnedFd>),
    /// A message that could not be received completely: it is too long, or this process has no descriptors left for it.
    Cut {
        /// True if descriptors are missing.
        descriptors: bool,
    },
    /// No message yet.
    Nothing,
    /// The other end is closed.
    End,
}

/// Receives one message, without waiting.
pub(crate) fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> std::result::Result<Received, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = loop {
        match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags) {
            Ok(received) => break received,
            // A reset is reported once, before the messages that the other end sent before it, and before its end.
            Err(Errno::INTR | Errno::CONNRESET) => {}
            Err(Errno::AGAIN) => return Ok(Received::Nothing),
            Err(errno) => return Err(errno),
        }
    };
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    // Descriptors that were cut off are closed with `descriptors`.
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Ok(Received::Cut { descriptors: true });
    }
    if received.flags.contains(ReturnFlags::TRUNC) {
        return Ok(Received::Cut { descriptors: false });
    }
    // No message of this protocol is empty: an empty one is the end of the connection.
    if received.bytes == 0 { Ok(Received::End) } else { Ok(Received::Message(received.bytes, descriptors)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bells_ring_without_end_and_nobody_waits() {
        let bell = Bell::new("test").unwrap();
        (0..10_000).for_each(|_| bell.ring());
        assert!(is_readable(bell.descriptor()));
        bell.drain();
        assert!(!is_readable(bell.descriptor()));
        let (ear, button) = line().unwrap();
        (0..10_000).for_each(|_| ring(button.as_fd()));
        while is_readable(ear.as_fd()) {
            assert!(drain(ear.as_fd()));
        }
        drop(button);
        // A child that another test forks holds a copy for a moment.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while drain(ear.as_fd()) {
            assert!(std::time::Instant::now() < deadline, "the other end is not gone");
            std::thread::yield_now();
        }
        ring(ear.as_fd());
    }

    #[test]
    fn the_boot_stays() {
        assert_eq!(boot_id(), boot_id());
    }
}
