//! What the exporter and its consumers say to each other: offers of tickets one way, what was done with them the other.

use std::io;
use std::os::unix::net::UnixStream;

use super::super::frame::{Fields, Message, malformed};
use super::pattern::Pattern;

/// A shared buffer, which may be gone when the offer is taken up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Offer {
    pub(super) ticket: Vec<u8>,
    pub(super) pattern: Pattern,
}

/// What a consumer has done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Deed {
    Opened,
    Released,
    /// A ticket was refused because the buffer is gone.
    Expired,
    /// The contents of a buffer were looked at, and were its own.
    Checked,
    /// Work was enqueued and is not waited for.
    Queued,
    /// Nothing is outstanding.
    Idle,
    /// A child was left behind that holds so many of this process's descriptors.
    Bequeathed(u64),
    /// So many sockets were cut, and the memory that is open is still used.
    Cut(u64),
    /// The contents of a buffer are not its own.
    Stolen(String),
    /// Something that must not fail did.
    Failed(String),
}

const OFFER: u8 = 1;
const DEED: u8 = 2;

impl Offer {
    pub(super) fn send(&self, socket: &UnixStream) -> io::Result<()> {
        let Self { ticket, pattern } = self;
        Message::new(OFFER).number(pattern.tag()).number(pattern.side() as u64).bytes(ticket).send(socket)
    }

    pub(super) fn read(message: &[u8]) -> io::Result<Self> {
        let (kind, mut fields) = Fields::of(message)?;
        let (tag, side) = (fields.number()?, fields.number()? as usize);
        let ticket = fields.bytes()?.to_vec();
        fields.end()?;
        if kind != OFFER || !Pattern::SIDES.contains(&side) {
            return Err(malformed("it is no offer"));
        }
        Ok(Self { ticket, pattern: Pattern::new(tag, side) })
    }
}

impl Deed {
    pub(super) fn send(&self, socket: &UnixStream) -> io::Result<()> {
        let (kind, number, text) = match self {
            Self::Opened => (0, 0, ""),
            Self::Released => (1, 0, ""),
            Self::Expired => (2, 0, ""),
            Self::Checked => (3, 0, ""),
            Self::Queued => (4, 0, ""),
            Self::Idle => (5, 0, ""),
            Self::Bequeathed(descriptors) => (6, *descriptors, ""),
            Self::Stolen(what) => (7, 0, what.as_str()),
            Self::Failed(what) => (8, 0, what.as_str()),
            Self::Cut(sockets) => (9, *sockets, ""),
        };
        Message::new(DEED).number(kind).number(number).bytes(text.as_bytes()).send(socket)
    }

    pub(super) fn read(message: &[u8]) -> io::Result<Self> {
        let (kind, mut fields) = Fields::of(message)?;
        let (deed, number, text) = (fields.number()?, fields.number()?, fields.text()?);
        fields.end()?;
        match (kind, deed) {
            (DEED, 0) => Ok(Self::Opened),
            (DEED, 1) => Ok(Self::Released),
            (DEED, 2) => Ok(Self::Expired),
            (DEED, 3) => Ok(Self::Checked),
            (DEED, 4) => Ok(Self::Queued),
            (DEED, 5) => Ok(Self::Idle),
            (DEED, 6) => Ok(Self::Bequeathed(number)),
            (DEED, 7) => Ok(Self::Stolen(text)),
            (DEED, 8) => Ok(Self::Failed(text)),
            (DEED, 9) => Ok(Self::Cut(number)),
            _ => Err(malformed("it is no deed")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::frame::Inbox;
    use super::*;

    #[test]
    fn offers_and_deeds_are_read_as_they_were_sent() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut inbox = Inbox::default();
        let offer = Offer { ticket: vec![1, 2, 3], pattern: Pattern::new(77, 32) };
        offer.send(&ours).unwrap();
        let message = inbox.wait(&theirs).unwrap().unwrap();
        assert_eq!(Offer::read(&message).unwrap(), offer);
        assert!(Deed::read(&message).is_err() && Offer::read(&message[..9]).is_err());
        let deeds = [
            Deed::Opened,
            Deed::Released,
            Deed::Expired,
            Deed::Checked,
            Deed::Queued,
            Deed::Idle,
            Deed::Bequeathed(9),
            Deed::Cut(2),
            Deed::Stolen("word 7".into()),
            Deed::Failed("open".into()),
        ];
        for deed in deeds {
            deed.send(&ours).unwrap();
            let message = inbox.wait(&theirs).unwrap().unwrap();
            assert_eq!(Deed::read(&message).unwrap(), deed);
            assert!(Offer::read(&message).is_err());
        }
    }
}
