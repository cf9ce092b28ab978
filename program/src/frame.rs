//! Framed messages on a socket between two processes of this program.
//!
//! A frame is a length, a kind and a payload. Numbers are little-endian. [`messages!`] declares the messages of a protocol,
//! and [`fields!`] the structs in them. A frame that is too long, cut short or unknown is an error that names the sender.
//!
//! Both ends are the same executable, so the frames carry no version.

use std::borrow::Cow;
use std::io::{self, Write as _};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use rustix::process::Pid;

/// The most bytes of a frame after its length.
const MOST_BYTES: usize = 1 << 20;

/// The most bytes of a text. A longer one is cut.
pub(super) const MOST_TEXT: usize = 64 << 10;

/// One side's messages of a protocol.
pub(super) trait Message: Sized {
    /// Returns the frame.
    fn encode(&self) -> Frame;

    /// Reads the payload of a frame of this kind.
    fn decode(kind: u8, payload: &mut Payload<'_>) -> io::Result<Self>;

    /// Sends the message whole. Waits while the socket is full.
    fn send(&self, socket: &UnixStream) -> io::Result<()> {
        self.send_patiently(socket, || ())
    }

    /// Sends the message whole. Calls `waits` each time the socket's write timeout, if it has one, has passed.
    fn send_patiently(&self, mut socket: &UnixStream, mut waits: impl FnMut()) -> io::Result<()> {
        let Frame(mut bytes) = self.encode();
        let length = bytes.len() - 4;
        if length > MOST_BYTES {
            return Err(io::Error::other(format!("a message of {length} bytes is too long")));
        }
        bytes[..4].copy_from_slice(&(length as u32).to_le_bytes());
        let mut left = &bytes[..];
        while !left.is_empty() {
            match socket.write(left) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => left = &left[written..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => waits(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// A value in a payload.
pub(super) trait Field: Sized {
    fn put(&self, frame: &mut Frame);
    fn take(payload: &mut Payload<'_>) -> io::Result<Self>;
}

/// A frame to send.
#[derive(Debug)]
pub(super) struct Frame(Vec<u8>);

impl Frame {
    /// Returns a frame without a payload. Sending it fills in the length.
    pub(super) fn new(kind: u8) -> Self {
        Self(vec![0, 0, 0, 0, kind])
    }

    /// Appends a field.
    pub(super) fn with(mut self, field: &impl Field) -> Self {
        field.put(&mut self);
        self
    }
}

/// The fields of a received frame that are not read yet.
#[derive(Debug)]
pub(super) struct Payload<'m>(&'m [u8]);

/// Reads a frame without its length.
pub(super) fn decode<M: Message>(frame: &[u8]) -> io::Result<M> {
    let (&kind, payload) = frame.split_first().ok_or_else(|| malformed("it is empty"))?;
    let mut payload = Payload(payload);
    let message = M::decode(kind, &mut payload)?;
    if payload.0.is_empty() { Ok(message) } else { Err(malformed("it is longer than it should be")) }
}

/// Returns the error for a frame that this program does not send.
pub(super) fn malformed(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

/// Declares the messages that one side of a protocol sends, each with the kind of its frame.
macro_rules! messages {
    ($(#[$attribute:meta])* enum $name:ident {
        $($(#[$doc:meta])* $kind:literal $variant:ident
            $(( $($value:ident: $inner:ty),* ))? $({ $($(#[$field_doc:meta])* $field:ident: $type:ty),* $(,)? })?,)*
    }) => {
        $(#[$attribute])*
        #[derive(Debug, Clone, PartialEq)]
        pub(super) enum $name {
            $($(#[$doc])* $variant $(( $($inner),* ))? $({ $($(#[$field_doc])* $field: $type),* })?,)*
        }

        impl $crate::frame::Message for $name {
            fn encode(&self) -> $crate::frame::Frame {
                match self {
                    $(Self::$variant $(( $($value),* ))? $({ $($field),* })? =>
                        $crate::frame::Frame::new($kind) $($(.with($value))*)? $($(.with($field))*)?,)*
                }
            }

            fn decode(kind: u8, payload: &mut $crate::frame::Payload<'_>) -> std::io::Result<Self> {
                Ok(match kind {
                    $($kind => Self::$variant
                        $(( $(<$inner as $crate::frame::Field>::take(payload)?),* ))?
                        $({ $($field: $crate::frame::Field::take(payload)?),* })?,)*
                    kind => return Err($crate::frame::malformed(format!("{kind} is not a kind of {}", stringify!($name)))),
                })
            }
        }
    };
}

/// Makes a struct a [`Field`]: its own fields, in this order.
macro_rules! fields {
    ($name:ident { $($field:ident),* $(,)? }) => {
        impl $crate::frame::Field for $name {
            fn put(&self, frame: &mut $crate::frame::Frame) {
                $(self.$field.put(frame);)*
            }

            fn take(payload: &mut $crate::frame::Payload<'_>) -> std::io::Result<Self> {
                Ok(Self { $($field: $crate::frame::Field::take(payload)?),* })
            }
        }
    };
}

pub(super) use {fields, messages};

impl Field for u64 {
    fn put(&self, frame: &mut Frame) {
        frame.0.extend(self.to_le_bytes());
    }

    fn take(payload: &mut Payload<'_>) -> io::Result<Self> {
        let (number, rest) = payload.0.split_first_chunk().ok_or_else(|| malformed("a number is cut short"))?;
        payload.0 = rest;
        Ok(Self::from_le_bytes(*number))
    }
}

impl Field for u32 {
    fn put(&self, frame: &mut Frame) {
        u64::from(*self).put(frame);
    }

    fn take(payload: &mut Payload<'_>) -> io::Result<Self> {
        u64::take(payload)?.try_into().map_err(|_| malformed("a number is too large"))
    }
}

impl Field for bool {
    fn put(&self, frame: &mut Frame) {
        u64::from(*self).put(frame);
    }

    fn take(payload: &mut Payload<'_>) -> io::Result<Self> {
        Ok(u64::take(payload)? != 0)
    }
}

impl Field for Vec<u8> {
    fn put(&self, frame: &mut Frame) {
        (self.len() as u64).put(frame);
        frame.0.extend(self);
    }

    fn take(payload: &mut Payload<'_>) -> io::Result<Self> {
        let length = usize::try_from(u64::take(payload)?).unwrap_or(usize::MAX);
        let (bytes, rest) = payload.0.split_at_checked(length).ok_or_else(|| malformed("bytes are cut short"))?;
        payload.0 = rest;
        Ok(bytes.to_vec())
    }
}

impl Field for String {
    fn put(&self, frame: &mut Frame) {
        self.as_bytes()[..self.floor_char_boundary(MOST_TEXT)].to_vec().put(frame);
    }

    fn take(payload: &mut Payload<'_>) -> io::Result<Self> {
        Self::from_utf8(Vec::take(payload)?).map_err(|_| malformed("a text is not UTF-8"))
    }
}

impl Field for Cow<'static, str> {
    fn put(&self, frame: &mut Frame) {
        self.as_ref().to_owned().put(frame);
    }

    fn take(payload: &mut Payload<'_>) -> io::Result<Self> {
        String::take(payload).map(Self::Owned)
    }
}

impl<A: Field, B: Field> Field for (A, B) {
    fn put(&self, frame: &mut Frame) {
        self.0.put(frame);
        self.1.put(frame);
    }

    fn take(payload: &mut Payload<'_>) -> io::Result<Self> {
        Ok((A::take(payload)?, B::take(payload)?))
    }
}

impl<T: Field> Field for Vec<T> {
    fn put(&self, frame: &mut Frame) {
        (self.len() as u64).put(frame);
        self.iter().for_each(|item| item.put(frame));
    }

    fn take(payload: &mut Payload<'_>) -> io::Result<Self> {
        // A length that is not true runs into the end of the payload.
        (0..u64::take(payload)?).map(|_| T::take(payload)).collect()
    }
}

impl<T: Field> Field for Option<T> {
    fn put(&self, frame: &mut Frame) {
        self.is_some().put(frame);
        self.iter().for_each(|value| value.put(frame));
    }

    fn take(payload: &mut Payload<'_>) -> io::Result<Self> {
        bool::take(payload)?.then(|| T::take(payload)).transpose()
    }
}

/// The received bytes that are not read yet.
#[derive(Debug)]
pub(super) struct Inbox {
    sender: Pid,
    bytes: Vec<u8>,
    /// No process holds the other end any more.
    ended: bool,
}

impl Inbox {
    /// Returns an empty inbox. Its errors name the sender.
    pub(super) fn new(sender: Pid) -> Self {
        Self { sender, bytes: Vec::new(), ended: false }
    }

    /// Receives everything that has arrived, without waiting.
    pub(super) fn receive_all(&mut self, socket: &UnixStream) -> io::Result<()> {
        while !self.ended {
            match self.receive(socket, RecvFlags::DONTWAIT) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                received => received?,
            }
        }
        Ok(())
    }

    /// Returns true if nothing more can arrive.
    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }

    /// Returns true if nothing more can arrive and the last message is incomplete.
    pub(super) fn is_cut(&self) -> bool {
        self.ended && !self.bytes.is_empty()
    }

    /// Returns the next received message, without waiting.
    pub(super) fn next<M: Message>(&mut self) -> io::Result<Option<M>> {
        let Some((length, rest)) = self.bytes.split_first_chunk() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        let message = match rest.get(..length) {
            _ if length > MOST_BYTES => Err(malformed("it is too long")),
            None => return Ok(None),
            Some(frame) => decode(frame),
        };
        let message = message.map_err(|error| self.unreadable(&error))?;
        self.bytes.drain(..4 + length);
        Ok(Some(message))
    }

    /// Waits for the next message. Returns `None` once the other end is closed.
    pub(super) fn wait<M: Message>(&mut self, socket: &UnixStream) -> io::Result<Option<M>> {
        loop {
            if let Some(message) = self.next()? {
                return Ok(Some(message));
            }
            if self.is_cut() {
                return Err(self.unreadable(&malformed("it is cut short")));
            }
            if self.ended {
                return Ok(None);
            }
            self.receive(socket, RecvFlags::empty())?;
        }
    }

    fn unreadable(&self, error: &io::Error) -> io::Error {
        malformed(format!("a message of process {} cannot be read: {error}", self.sender))
    }

    fn receive(&mut self, socket: &UnixStream, flags: RecvFlags) -> io::Result<()> {
        let mut chunk = [0; 16 << 10];
        let (received, _) = loop {
            match recv(socket, &mut chunk[..], flags) {
                Err(Errno::INTR) => {}
                // The other process died before it had read everything.
                Err(Errno::CONNRESET) => break (0, 0),
                received => break received?,
            }
        };
        self.ended = received == 0;
        self.bytes.extend(&chunk[..received]);
        Ok(())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::fmt::Debug;

    use super::*;

    messages! {
        enum Sample {
            7 Pair(number: u64, text: String),
            8 Bytes(bytes: Vec<u8>),
        }
    }

    fn inbox() -> Inbox {
        Inbox::new(Pid::INIT)
    }

    fn frame(message: &impl Message) -> Vec<u8> {
        message.encode().0.split_off(4)
    }

    /// Checks that a message arrives as it was sent, and that no truncation of it is read as a message.
    pub(in super::super) fn check_round_trip<M: Message + PartialEq + Debug>(message: &M) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        message.send(&ours).unwrap();
        assert_eq!(inbox().wait::<M>(&theirs).unwrap().as_ref(), Some(message));
        let frame = frame(message);
        for length in 0..frame.len() {
            assert!(decode::<M>(&frame[..length]).is_err(), "{message:?}, {length}");
        }
        assert!(decode::<M>(&[&frame[..], &[0]].concat()).is_err(), "{message:?}");
    }

    #[test]
    fn messages_arrive_whole_and_in_order_however_they_are_cut() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut inbox = inbox();
        inbox.receive_all(&theirs).unwrap();
        assert_eq!(inbox.next::<Sample>().unwrap(), None);
        let mut bytes = Vec::new();
        for number in 0..3 {
            let (our_end, their_end) = UnixStream::pair().unwrap();
            Sample::Pair(number, "abc".into()).send(&our_end).unwrap();
            drop(our_end);
            io::Read::read_to_end(&mut &their_end, &mut bytes).unwrap();
        }
        for byte in bytes.chunks(5) {
            (&ours).write_all(byte).unwrap();
            inbox.receive_all(&theirs).unwrap();
        }
        drop(ours);
        for number in 0..3 {
            assert_eq!(inbox.wait(&theirs).unwrap(), Some(Sample::Pair(number, "abc".into())));
        }
        assert!(inbox.wait::<Sample>(&theirs).unwrap().is_none() && inbox.has_ended() && !inbox.is_cut());
    }

    #[test]
    fn a_frame_that_is_cut_is_an_error_that_names_the_process() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        Sample::Pair(1, "abc".into()).send(&ours).unwrap();
        (&ours).write_all(&[9, 0, 0, 0, 7]).unwrap();
        drop(ours);
        let mut inbox = inbox();
        assert!(inbox.wait::<Sample>(&theirs).unwrap().is_some() && !inbox.is_cut());
        let error = inbox.wait::<Sample>(&theirs).unwrap_err().to_string();
        assert_eq!(error, "a message of process 1 cannot be read: it is cut short");
        assert!(inbox.is_cut());
    }

    #[test]
    fn a_sender_that_waits_says_so_and_loses_nothing() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_write_timeout(Some(std::time::Duration::from_millis(5))).unwrap();
        // More than the socket holds.
        let message = Sample::Bytes((0..MOST_BYTES - 100).map(|index| index as u8).collect());
        let (begin, may_begin) = std::sync::mpsc::channel::<()>();
        let reader = std::thread::spawn(move || {
            may_begin.recv().unwrap();
            inbox().wait::<Sample>(&theirs).unwrap().unwrap()
        });
        let mut waits = 0;
        let send = message.send_patiently(&ours, || {
            waits += 1;
            let _ = begin.send(());
        });
        send.unwrap();
        assert_eq!(reader.join().unwrap(), message);
        assert!(waits > 0);
    }

    #[test]
    fn a_text_that_is_too_long_is_cut_and_a_message_is_refused() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        Sample::Pair(1, "ä".repeat(MOST_TEXT)).send(&ours).unwrap();
        let heard = inbox().wait(&theirs).unwrap();
        assert_eq!(heard, Some(Sample::Pair(1, "ä".repeat(MOST_TEXT / 2))));
        assert!(Sample::Bytes(vec![0; MOST_BYTES]).send(&ours).is_err());
    }

    #[test]
    fn garbage_is_refused() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (&ours).write_all(&[0xff; 64]).unwrap();
        assert_eq!(inbox().wait::<Sample>(&theirs).unwrap_err().kind(), io::ErrorKind::InvalidData);
        check_round_trip(&Sample::Pair(3, String::new()));
        check_round_trip(&Sample::Bytes(vec![1, 2]));
        for bad in [&[][..], &[9], &[8, 9, 0, 0, 0, 0, 0, 0, 0, 1]] {
            assert!(decode::<Sample>(bad).is_err(), "{bad:?}");
        }
    }
}
