//! Messages on a socket between two processes of this program: a length, then that many bytes; numbers little-endian.

use std::io::{self, Write as _};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

/// No message is longer; a length beyond it is not from this program.
const LONGEST: usize = 1 << 20;

/// A message as it is written.
#[derive(Debug)]
pub(super) struct Message(Vec<u8>);

impl Message {
    /// A message of this kind, with nothing in it yet.
    pub(super) fn new(kind: u8) -> Self {
        // The length is known when the message is sent.
        Self(vec![0, 0, 0, 0, kind])
    }

    pub(super) fn number(mut self, number: u64) -> Self {
        self.0.extend(number.to_le_bytes());
        self
    }

    /// Bytes with their length in front.
    pub(super) fn bytes(self, bytes: &[u8]) -> Self {
        let mut message = self.number(bytes.len() as u64);
        message.0.extend(bytes);
        message
    }

    /// Sends the message whole. Waits while the socket is full.
    pub(super) fn send(self, socket: &UnixStream) -> io::Result<()> {
        self.send_patiently(socket, || ())
    }

    /// The same. Calls `waits` each time the socket's limit for writing, if it has one, has passed.
    pub(super) fn send_patiently(mut self, mut socket: &UnixStream, mut waits: impl FnMut()) -> io::Result<()> {
        let length = self.0.len() - 4;
        if length > LONGEST {
            return Err(io::Error::other(format!("a message of {length} bytes is too long")));
        }
        self.0[..4].copy_from_slice(&(length as u32).to_le_bytes());
        let mut left = &self.0[..];
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

/// A message as it is read; what is taken from it comes in the order in which it was put in.
#[derive(Debug)]
pub(super) struct Fields<'m>(&'m [u8]);

impl<'m> Fields<'m> {
    /// The kind of a message and its fields.
    pub(super) fn of(message: &'m [u8]) -> io::Result<(u8, Self)> {
        let (&kind, fields) = message.split_first().ok_or_else(|| malformed("it is empty"))?;
        Ok((kind, Self(fields)))
    }

    pub(super) fn number(&mut self) -> io::Result<u64> {
        let (number, rest) = self.0.split_first_chunk().ok_or_else(|| malformed("a number is cut short"))?;
        self.0 = rest;
        Ok(u64::from_le_bytes(*number))
    }

    pub(super) fn bytes(&mut self) -> io::Result<&'m [u8]> {
        let length = usize::try_from(self.number()?).unwrap_or(usize::MAX);
        let (bytes, rest) = self.0.split_at_checked(length).ok_or_else(|| malformed("bytes are cut short"))?;
        self.0 = rest;
        Ok(bytes)
    }

    pub(super) fn text(&mut self) -> io::Result<String> {
        String::from_utf8(self.bytes()?.to_vec()).map_err(|_| malformed("a text is not UTF-8"))
    }

    /// Nothing may be left.
    pub(super) fn end(self) -> io::Result<()> {
        if self.0.is_empty() { Ok(()) } else { Err(malformed("it is longer than it should be")) }
    }
}

/// A message that this program does not send.
pub(super) fn malformed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("a message of the other process cannot be read: {what}"))
}

/// What came in on a socket and was not taken yet.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    bytes: Vec<u8>,
    /// The other end is closed everywhere.
    ended: bool,
}

impl Inbox {
    /// Takes in what is there, without waiting.
    pub(super) fn take_in(&mut self, socket: &UnixStream) -> io::Result<()> {
        while !self.ended {
            match self.receive(socket, RecvFlags::DONTWAIT) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                received => received?,
            }
        }
        Ok(())
    }

    /// Whether nothing more can come in.
    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }

    /// The next message that is here.
    pub(super) fn next(&mut self) -> io::Result<Option<Vec<u8>>> {
        let Some((length, rest)) = self.bytes.split_first_chunk() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if length > LONGEST {
            return Err(malformed("it is too long"));
        }
        let Some(message) = rest.get(..length).map(<[u8]>::to_vec) else { return Ok(None) };
        self.bytes.drain(..4 + length);
        Ok(Some(message))
    }

    /// The next message, waited for; `None` once the other end is closed.
    pub(super) fn wait(&mut self, socket: &UnixStream) -> io::Result<Option<Vec<u8>>> {
        loop {
            if let Some(message) = self.next()? {
                return Ok(Some(message));
            }
            if self.ended {
                return Ok(None);
            }
            self.receive(socket, RecvFlags::empty())?;
        }
    }

    fn receive(&mut self, socket: &UnixStream, flags: RecvFlags) -> io::Result<()> {
        let mut chunk = [0; 16 << 10];
        let (received, _) = loop {
            match recv(socket, &mut chunk[..], flags) {
                Err(Errno::INTR) => {}
                // The other process died with something unread.
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
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_whole_and_in_order_however_they_are_cut() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut inbox = Inbox::default();
        inbox.take_in(&theirs).unwrap();
        assert_eq!(inbox.next().unwrap(), None);
        let mut bytes = Vec::new();
        for number in 0..3 {
            let (our_end, their_end) = UnixStream::pair().unwrap();
            Message::new(7).number(number).bytes(b"abc").send(&our_end).unwrap();
            drop(our_end);
            io::Read::read_to_end(&mut &their_end, &mut bytes).unwrap();
        }
        for byte in bytes.chunks(5) {
            (&ours).write_all(byte).unwrap();
            inbox.take_in(&theirs).unwrap();
        }
        drop(ours);
        for number in 0..3 {
            let message = inbox.wait(&theirs).unwrap().unwrap();
            let (kind, mut fields) = Fields::of(&message).unwrap();
            assert_eq!((kind, fields.number().unwrap(), fields.text().unwrap()), (7, number, "abc".to_owned()));
            fields.end().unwrap();
        }
        assert!(inbox.wait(&theirs).unwrap().is_none() && inbox.has_ended());
    }

    #[test]
    fn a_reader_that_waits_is_told_of_and_misses_nothing() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_write_timeout(Some(std::time::Duration::from_millis(5))).unwrap();
        // More than the socket holds.
        let bytes: Vec<u8> = (0..LONGEST - 100).map(|index| index as u8).collect();
        let (begin, may_begin) = std::sync::mpsc::channel::<()>();
        let reader = std::thread::spawn(move || {
            may_begin.recv().unwrap();
            Inbox::default().wait(&theirs).unwrap().unwrap()
        });
        let mut waits = 0;
        let send = Message::new(7).bytes(&bytes).send_patiently(&ours, || {
            waits += 1;
            let _ = begin.send(());
        });
        send.unwrap();
        let message = reader.join().unwrap();
        assert!(waits > 0);
        assert_eq!(Fields::of(&message).unwrap().1.bytes().unwrap(), bytes);
    }

    #[test]
    fn garbage_is_refused() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (&ours).write_all(&[0xff; 64]).unwrap();
        assert_eq!(Inbox::default().wait(&theirs).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert!(Fields::of(&[]).is_err());
        let (_, mut fields) = Fields::of(&[1, 9, 0, 0, 0, 0, 0, 0, 0, 1]).unwrap();
        assert!(fields.bytes().is_err());
        let (_, fields) = Fields::of(&[1, 9]).unwrap();
        assert!(fields.end().is_err());
    }
}
