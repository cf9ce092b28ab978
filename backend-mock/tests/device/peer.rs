//! A second process with the same tests: the binary runs itself again, with a socket for messages and descriptors.

use std::ffi::OsString;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use highwater_hal::{Descriptor, EventHandle, MemoryHandle, Transport};
use rustix::io::FdFlags;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType,
};

const SOCKET: &str = "HIGHWATER_MOCK_TEST_SOCKET";
const LONGEST: usize = 256;

/// One end of the socket.
pub(crate) struct Channel(OwnedFd);

/// The other process.
pub(crate) struct Peer {
    child: Child,
    pub(crate) channel: Channel,
}

/// The channel to the process that started this one, if a test did.
pub(crate) fn parent() -> Option<Channel> {
    let number: OsString = std::env::var_os(SOCKET)?;
    let number = number.to_str().unwrap().parse().unwrap();
    // SAFETY: the number is the one that the parent left open for this process, and only the first test asks.
    let socket = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::io::fcntl_setfd(&socket, FdFlags::CLOEXEC).unwrap();
    Some(Channel(socket))
}

impl Peer {
    /// Runs the named test in a new process.
    pub(crate) fn start(test: &str) -> Self {
        let (own, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        // No process waits for ever if a test fails.
        let patience = Some(Duration::from_secs(60));
        for end in [&own, &theirs] {
            rustix::net::sockopt::set_socket_timeout(end, rustix::net::sockopt::Timeout::Recv, patience).unwrap();
        }
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--nocapture", "--test-threads=1"]).stdout(Stdio::null());
        command.env(SOCKET, theirs.as_raw_fd().to_string());
        let number = theirs.as_raw_fd();
        // SAFETY: between fork and exec the child only makes one system call, on a descriptor that it has: `theirs` is
        // dropped after the child was started.
        let child = unsafe {
            command.pre_exec(move || {
                let theirs = std::os::fd::BorrowedFd::borrow_raw(number);
                Ok(rustix::io::fcntl_setfd(theirs, FdFlags::empty())?)
            })
        }
        .spawn()
        .unwrap();
        drop(theirs);
        Self { child, channel: Channel(own) }
    }

    /// Ends the process by SIGKILL, and waits until it has ended.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits for the process.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if self.child.kill().is_ok() {
            let _ = self.child.wait();
        }
    }
}

impl Channel {
    pub(crate) fn send(&self, bytes: &[u8], descriptor: Option<&OwnedFd>) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let borrowed = descriptor.map(|descriptor| [descriptor.as_fd()]);
        if let Some(borrowed) = &borrowed {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(borrowed)));
        }
        rustix::net::sendmsg(&self.0, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL).unwrap();
    }

    pub(crate) fn receive(&self) -> (Vec<u8>, Option<OwnedFd>) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = vec![0; LONGEST];
        let received =
            rustix::net::recvmsg(&self.0, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)
                .unwrap();
        assert!(received.bytes > 0, "the other process has ended");
        bytes.truncate(received.bytes);
        let descriptor = ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        });
        (bytes, descriptor)
    }

    /// Says one word.
    pub(crate) fn say(&self, word: &str) {
        self.send(word.as_bytes(), None);
    }

    /// Waits for a word.
    pub(crate) fn expect(&self, word: &str) {
        assert_eq!(String::from_utf8(self.receive().0).unwrap(), word);
    }

    pub(crate) fn send_memory(&self, handle: &MemoryHandle) {
        let bytes = [&handle.device_uuid[..], &handle.bytes.to_le_bytes(), &handle.payload].concat();
        self.send(&bytes, Some(handle.descriptor.as_ref().unwrap().as_ref()));
    }

    pub(crate) fn receive_memory(&self) -> MemoryHandle {
        let (bytes, descriptor) = self.receive();
        MemoryHandle::new(
            Transport::Descriptor,
            bytes[..16].try_into().unwrap(),
            u64::from_le_bytes(bytes[16..24].try_into().unwrap()),
            bytes[24..].try_into().unwrap(),
        )
        .with_descriptor(Descriptor::new(descriptor.unwrap()))
    }

    pub(crate) fn send_event(&self, handle: &EventHandle) {
        let bytes = [&handle.device_uuid[..], &handle.payload].concat();
        self.send(&bytes, Some(handle.descriptor.as_ref().unwrap().as_ref()));
    }

    pub(crate) fn receive_event(&self) -> EventHandle {
        let (bytes, descriptor) = self.receive();
        EventHandle::new(bytes[..16].try_into().unwrap(), bytes[16..].try_into().unwrap())
            .with_descriptor(Descriptor::new(descriptor.unwrap()))
    }
}
