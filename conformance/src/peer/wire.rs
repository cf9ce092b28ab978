//! Messages between a case and the second process: a code, numbers, bytes and at most one descriptor.
//!
//! One message is one packet of a `SOCK_SEQPACKET` socket, so no message arrives in parts:
//!
//! | bytes | |
//! |---|---|
//! | 1 | code: of the command, or of the answer |
//! | 1 | how many numbers |
//! | 8 each | the numbers, little-endian |
//! | the rest | bytes |

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use highwater_hal::numbers::Coded;
use highwater_hal::{Completion, Descriptor, Error, ErrorKind, EventHandle, LiveObjects, MemoryHandle};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

/// The most bytes beside the numbers. A packet must fit into the buffer of a socket.
pub(super) const MOST_BYTES: usize = 64 << 10;
const HEADER: usize = 2;
const MOST_NUMBERS: usize = 16;

/// An answer of success. Its numbers and bytes are the result.
pub(super) const DONE: u8 = 0;
/// An answer with an error of the backend. The number is its kind, and the bytes are its text.
pub(super) const REFUSED: u8 = 1;
/// An answer to a command that the second process could not execute. The bytes give the reason.
pub(super) const CONFUSED: u8 = 2;

#[derive(Debug, Clone)]
pub(super) struct Message {
    pub(super) code: u8,
    pub(super) numbers: Vec<u64>,
    pub(super) bytes: Vec<u8>,
    pub(super) descriptor: Option<Descriptor>,
}

impl Message {
    pub(super) fn new(code: u8) -> Self {
        Self { code, numbers: Vec::new(), bytes: Vec::new(), descriptor: None }
    }

    pub(super) fn with_numbers(mut self, numbers: impl IntoIterator<Item = u64>) -> Self {
        self.numbers.extend(numbers);
        self
    }

    pub(super) fn with_bytes(mut self, bytes: &[u8]) -> Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    pub(super) fn with_memory_handle(mut self, handle: &MemoryHandle) -> Self {
        self.descriptor = handle.descriptor.clone();
        self.with_numbers([u64::from(handle.transport.code()), handle.bytes])
            .with_bytes(&handle.device_uuid)
            .with_bytes(&handle.payload)
    }

    pub(super) fn with_event_handle(mut self, handle: &EventHandle) -> Self {
        self.descriptor = handle.descriptor.clone();
        self.with_bytes(&handle.device_uuid).with_bytes(&handle.payload)
    }

    /// Creates the answer that carries an error of the backend.
    pub(super) fn refusal(error: &Error) -> Self {
        Self::new(REFUSED).with_numbers([u64::from(error.kind().code())]).with_bytes(error.to_string().as_bytes())
    }

    /// Returns the error of such an answer.
    pub(super) fn into_error(self, operation: &'static str) -> Error {
        let kind = self.number(0).and_then(decoded).unwrap_or(ErrorKind::Vendor);
        Error::new(kind, operation, format!("in the second process: {}", String::from_utf8_lossy(&self.bytes)))
    }

    pub(super) fn number(&self, index: usize) -> Option<u64> {
        self.numbers.get(index).copied()
    }

    pub(super) fn memory_handle(&self) -> Option<MemoryHandle> {
        let transport = decoded(self.number(0)?)?;
        let (uuid, payload) = self.uuid_and_payload()?;
        let handle = MemoryHandle::new(transport, uuid, self.number(1)?, payload);
        Some(match self.descriptor.clone() {
            Some(descriptor) => handle.with_descriptor(descriptor),
            None => handle,
        })
    }

    pub(super) fn event_handle(&self) -> Option<EventHandle> {
        let (uuid, payload) = self.uuid_and_payload()?;
        let handle = EventHandle::new(uuid, payload);
        Some(match self.descriptor.clone() {
            Some(descriptor) => handle.with_descriptor(descriptor),
            None => handle,
        })
    }

    pub(super) fn completion(&self) -> Option<Completion> {
        self.number(0).and_then(decoded)
    }

    pub(super) fn with_live_objects(self, mut live: LiveObjects) -> Self {
        self.with_numbers(counts(&mut live).map(|count| *count))
    }

    pub(super) fn live_objects(&self) -> Option<LiveObjects> {
        let mut live = LiveObjects::default();
        let counts = counts(&mut live);
        if self.numbers.len() != counts.len() {
            return None;
        }
        counts.into_iter().zip(&self.numbers).for_each(|(count, &number)| *count = number);
        Some(live)
    }

    fn uuid_and_payload(&self) -> Option<([u8; 16], [u8; 64])> {
        let (uuid, payload) = self.bytes.split_at_checked(16)?;
        Some((uuid.try_into().ok()?, payload.try_into().ok()?))
    }

    fn encode(&self) -> Vec<u8> {
        assert!(self.numbers.len() <= MOST_NUMBERS && self.bytes.len() <= MOST_BYTES, "a case sends too much at once");
        let mut packet = vec![self.code, self.numbers.len() as u8];
        packet.extend(self.numbers.iter().flat_map(|number| number.to_le_bytes()));
        packet.extend_from_slice(&self.bytes);
        packet
    }

    fn decode(packet: &[u8], descriptor: Option<OwnedFd>) -> Option<Self> {
        let (&[code, numbers], rest) = packet.split_first_chunk::<HEADER>()?;
        let (numbers, bytes) = rest.split_at_checked(usize::from(numbers) * 8)?;
        let numbers = numbers.as_chunks::<8>().0.iter().map(|eight| u64::from_le_bytes(*eight)).collect();
        Some(Self { code, numbers, bytes: bytes.to_vec(), descriptor: descriptor.map(Descriptor::new) })
    }
}

/// Returns the counts in the order of a message.
fn counts(live: &mut LiveObjects) -> [&mut u64; 11] {
    let LiveObjects { streams, events, handles, graphs, descriptors, shared_files, .. } = live;
    let (allocations, host_allocations, mappings) =
        (&mut live.allocations, &mut live.host_allocations, &mut live.mappings);
    let (reservations, memory) = (&mut live.reservations, &mut live.physical_memory);
    [
        streams,
        events,
        handles,
        allocations,
        host_allocations,
        graphs,
        mappings,
        descriptors,
        shared_files,
        reservations,
        memory,
    ]
}

/// Returns the value of an enum with this number.
pub(super) fn decoded<T: Coded>(number: u64) -> Option<T> {
    T::of(u32::try_from(number).ok()?)
}

/// Sends a message. A closed other end gives an error instead of a signal.
pub(super) fn send(socket: impl AsFd, message: &Message) -> io::Result<()> {
    let packet = message.encode();
    let descriptors: Vec<_> = message.descriptor.iter().map(|descriptor| descriptor.as_ref().as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
    }
    rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(&socket, &[IoSlice::new(&packet)], &mut control, SendFlags::NOSIGNAL)
    })?;
    Ok(())
}

/// Waits for a message; returns `None` once the other end is closed.
pub(super) fn receive(socket: impl AsFd) -> io::Result<Option<Message>> {
    let mut packet = vec![0; HEADER + 8 * MOST_NUMBERS + MOST_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(&socket, &mut [IoSliceMut::new(&mut packet)], &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    let descriptor = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    if received.bytes == 0 {
        return Ok(None);
    }
    let garbled = || io::Error::new(io::ErrorKind::InvalidData, "a message that is cut short or malformed");
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(garbled());
    }
    Message::decode(&packet[..received.bytes], descriptor).ok_or_else(garbled).map(Some)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use highwater_hal::Transport;
    use rustix::net::{AddressFamily, SocketFlags, SocketType};

    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    #[test]
    fn messages_arrive_whole_and_in_order() {
        let (near, far) = pair();
        send(&near, &Message::new(3).with_numbers([1, u64::MAX]).with_bytes(b"abc")).unwrap();
        send(&near, &Message::new(4).with_bytes(&[7; MOST_BYTES])).unwrap();
        drop(near);
        let first = receive(&far).unwrap().unwrap();
        assert_eq!((first.code, &first.numbers[..], &first.bytes[..]), (3, &[1, u64::MAX][..], &b"abc"[..]));
        let second = receive(&far).unwrap().unwrap();
        assert_eq!((second.code, second.numbers.len(), second.bytes.len()), (4, 0, MOST_BYTES));
        assert!(receive(&far).unwrap().is_none());
    }

    #[test]
    fn handles_arrive_with_their_descriptors() {
        let (near, far) = pair();
        let (mut reader, writer) = std::io::pipe().unwrap();
        let handle = MemoryHandle::new(Transport::Descriptor, [9; 16], 4096, [5; 64])
            .with_descriptor(Descriptor::new(writer.into()));
        send(&near, &Message::new(DONE).with_memory_handle(&handle)).unwrap();
        drop(handle);
        let got = receive(&far).unwrap().unwrap().memory_handle().unwrap();
        assert_eq!((got.transport, got.bytes), (Transport::Descriptor, 4096));
        assert_eq!((got.device_uuid, got.payload), ([9; 16], [5; 64]));
        std::fs::File::from(got.descriptor.unwrap().as_ref().try_clone().unwrap()).write_all(b"x").unwrap();
        let mut byte = [0];
        reader.read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"x");
    }

    #[test]
    fn errors_keep_their_kind_and_text() {
        for &kind in ErrorKind::ALL {
            let error = Error::new(kind, "open_memory", "what was wrong").with_hint("what to do");
            let got = Message::refusal(&error).into_error("open_memory");
            assert_eq!(got.kind(), kind);
            assert!(got.message().contains("what was wrong") && got.message().contains("what to do"), "{got}");
        }
    }

    #[test]
    fn malformed_messages_are_refused() {
        let (near, far) = pair();
        // The packet claims five numbers and has none.
        rustix::io::write(&near, &[0, 5, 1, 2, 3]).unwrap();
        assert_eq!(receive(&far).unwrap_err().kind(), io::ErrorKind::InvalidData);
        rustix::io::write(&near, &[0]).unwrap();
        assert_eq!(receive(&far).unwrap_err().kind(), io::ErrorKind::InvalidData);
        rustix::io::write(&near, &[0; 2 * MOST_BYTES]).unwrap();
        assert_eq!(receive(&far).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
