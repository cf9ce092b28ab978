//! The messages between exporter and importer: datagrams of explicit little-endian fields, checked before use.
//!
//! The importer sends the first message and gets one answer for each request:
//!
//! | importer | exporter |
//! | --- | --- |
//! | `Knock`, only on an inherited descriptor (`rendezvous.rs`) | `Door`, with the connection for all other messages, or `Refused` |
//! | `Hello`, with a line to ring the importer on | `Welcome` or `Refused` |
//! | `Open` | `Opened`, with the descriptors of the memory and of the requested counts, or `Refused` |
//! | `Parts`: further parts of an allocation whose `Opened` announced some | `PartsOpened`, with their descriptors, or `Refused` |
//! | `Abandon`: an `Opened` that could not be used | nothing |
//! | `Ring`: check the flags in the counts | nothing |
//! | `Entrust`, to an heir: the handle of memory of the dead owner (`heir.rs`); without parts, to an owner that hands over | `Entrusted` or `Refused` |
//! | `TakeOver`, only to an owner that hands over (`hand_over.rs`) | `HandedOver`, with the socket on which it listened, or `Refused` |
//!
//! One message answers no request: `Heir`, of an owner that has handed over, with the pidfd of its heir.
//!
//! An `Open` names the secret of a ticket that has one. Before Linux 6.5, `Hello` and `Welcome` also bring the pidfd of their senders.
//!
//! Both sides send the version that they speak and the oldest version that they understand, so that later versions can adapt. Version 6
//! understands no other. Version 2 belongs to release 0.1; the versions between belong to no release.

use super::options::Openers;
use super::ticket::{Fields, Secret};
use highwater_hal::{Error, ErrorKind, Result, Transport};

/// Version of these messages, and of the memory that both sides map (`segment.rs`, `counts.rs`).
const PROTOCOL: u16 = 6;
/// Oldest version that is understood.
const OLDEST_PROTOCOL: u16 = 6;
/// Maximum number of requests that wait for their answers: few enough for the queue of any socket, and for the descriptors of
/// both processes.
pub(crate) const AT_ONCE: usize = 32;
/// Maximum number of parts in one message.
pub(crate) const MOST_PARTS: usize = super::system::MOST_DESCRIPTORS;
/// Longest message.
pub(crate) const LONGEST: usize = 1280;
const LONGEST_TEXT: usize = 512;

const MAGIC: [u8; 4] = *b"HWSH";
const HELLO: u16 = 1;
const WELCOME: u16 = 2;
const OPEN: u16 = 3;
const OPENED: u16 = 4;
const ABANDON: u16 = 5;
const REFUSED: u16 = 6;
const RING: u16 = 7;
const PARTS: u16 = 8;
const PARTS_OPENED: u16 = 9;
const ENTRUST: u16 = 10;
const ENTRUSTED: u16 = 11;
const TAKE_OVER: u16 = 12;
const HANDED_OVER: u16 = 13;
const HEIR: u16 = 14;
const KNOCK: u16 = 20;
const DOOR: u16 = 21;

/// Names an allocation of an exporter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ExportKey {
    pub(crate) index: u32,
    pub(crate) serial: u64,
}

/// A memory handle without its descriptor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Opened {
    pub(crate) transport: Transport,
    pub(crate) device_uuid: [u8; 16],
    pub(crate) bytes: u64,
    pub(crate) payload: [u8; 64],
    /// True if the memory's descriptor is the first one of the message. The requested files follow it.
    pub(crate) with_descriptor: bool,
    /// Number of parts beside this one, which the importer requests next. 0 for all but adopted memory.
    pub(crate) further: u32,
}

/// The handle of a further part, without its descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) bytes: u64,
    pub(crate) payload: [u8; 64],
}

/// The sender of a `Welcome`, as it describes itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Standing {
    /// True if the sender is the heir of a dead owner, and answers under its name.
    pub(crate) is_heir: bool,
    /// The processes that may open the memory. An heir admits the same ones.
    pub(crate) openers: Openers,
}

/// An allocation of a dead owner, and some of its parts, for the heir.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entrusted {
    pub(crate) key: ExportKey,
    /// False for page-locked memory.
    pub(crate) is_device: bool,
    pub(crate) secret: Option<Secret>,
    pub(crate) device_uuid: [u8; 16],
    /// Bytes of the allocation.
    pub(crate) bytes: u64,
    /// Number of the latest share, and of the latest share whose device work was done.
    pub(crate) issued: u64,
    pub(crate) done: u64,
    /// Number of the first part in this message, and number of all parts.
    pub(crate) first: u32,
    pub(crate) count: u32,
    /// Each part has a descriptor.
    pub(crate) parts: Vec<Part>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message {
    Knock {
        incarnation: [u8; 16],
    },
    Door,
    Hello {
        version: u16,
        oldest: u16,
    },
    /// `pid` is the id of the sender in its own PID namespace. After a hand-over, the kernel may name the former owner.
    Welcome {
        version: u16,
        oldest: u16,
        incarnation: [u8; 16],
        standing: Standing,
        pid: u32,
    },
    Open {
        question: u32,
        key: ExportKey,
        wants: Wants,
        secret: Option<Secret>,
    },
    Opened {
        question: u32,
        opened: Opened,
    },
    Parts {
        question: u32,
        key: ExportKey,
        first: u32,
    },
    PartsOpened {
        question: u32,
        parts: Vec<Part>,
    },
    Abandon {
        key: ExportKey,
    },
    Ring,
    Entrust {
        question: u32,
        entrusted: Entrusted,
    },
    Entrusted {
        question: u32,
    },
    TakeOver {
        question: u32,
    },
    HandedOver {
        question: u32,
    },
    Heir,
    Refused {
        question: u32,
        kind: ErrorKind,
        text: String,
    },
}

/// What an `Open` requests beside the count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wants {
    pub(crate) counts: bool,
    pub(crate) ready: bool,
    /// False if the importer has the memory mapped already, and only registers at an heir.
    pub(crate) memory: bool,
}

/// The kinds of errors that a message can carry, by number. Others are sent as `Vendor`.
const KINDS: [(u32, ErrorKind); 8] = [
    (1, ErrorKind::InvalidArgument),
    (2, ErrorKind::Expired),
    (3, ErrorKind::PermissionDenied),
    (4, ErrorKind::OperatingSystem),
    (5, ErrorKind::Unsupported),
    (6, ErrorKind::OutOfMemory),
    (7, ErrorKind::Vendor),
    (8, ErrorKind::ShuttingDown),
];

/// Refuses a process that speaks no version in common with this one.
pub(crate) fn check_version(operation: &'static str, side: &str, version: u16, oldest: u16) -> Result<()> {
    if oldest <= PROTOCOL && OLDEST_PROTOCOL <= version {
        return Ok(());
    }
    let what = format!(
        "the {side} speaks versions {oldest} to {version} of the protocol, and this process versions {OLDEST_PROTOCOL} to {PROTOCOL}"
    );
    Err(Error::new(ErrorKind::Unsupported, operation, what)
        .with_hint("use the same version of the library in both processes"))
}

impl Message {
    pub(crate) fn hello() -> Self {
        Self::Hello { version: PROTOCOL, oldest: OLDEST_PROTOCOL }
    }

    pub(crate) fn welcome(incarnation: [u8; 16], standing: Standing) -> Self {
        let (version, oldest, pid) = (PROTOCOL, OLDEST_PROTOCOL, std::process::id());
        Self::Welcome { version, oldest, incarnation, standing, pid }
    }

    pub(crate) fn refusal(question: u32, error: &Error) -> Self {
        let mut text = error.message().to_owned();
        text.truncate(text.floor_char_boundary(LONGEST_TEXT));
        Self::Refused { question, kind: error.kind(), text }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(128);
        bytes.extend(MAGIC);
        let kind = match self {
            Self::Hello { .. } => HELLO,
            Self::Welcome { .. } => WELCOME,
            Self::Open { .. } => OPEN,
            Self::Opened { .. } => OPENED,
            Self::Abandon { .. } => ABANDON,
            Self::Refused { .. } => REFUSED,
            Self::Ring => RING,
            Self::Parts { .. } => PARTS,
            Self::PartsOpened { .. } => PARTS_OPENED,
            Self::Entrust { .. } => ENTRUST,
            Self::Entrusted { .. } => ENTRUSTED,
            Self::TakeOver { .. } => TAKE_OVER,
            Self::HandedOver { .. } => HANDED_OVER,
            Self::Heir => HEIR,
            Self::Knock { .. } => KNOCK,
            Self::Door => DOOR,
        };
        bytes.extend(kind.to_le_bytes());
        bytes.extend(0_u16.to_le_bytes());
        match self {
            Self::Ring | Self::Heir | Self::Door => {}
            Self::Knock { incarnation } => bytes.extend(incarnation),
            Self::Hello { version, oldest } => {
                bytes.extend(version.to_le_bytes());
                bytes.extend(oldest.to_le_bytes());
            }
            Self::Welcome { version, oldest, incarnation, standing: Standing { is_heir, openers }, pid } => {
                bytes.extend(version.to_le_bytes());
                bytes.extend(oldest.to_le_bytes());
                bytes.extend(incarnation);
                let (kind, group): (u32, u32) = match openers {
                    Openers::SameUser => (0, 0),
                    Openers::Group(group) => (1, *group),
                    Openers::Secret => (2, 0),
                };
                for number in [u32::from(*is_heir), kind, group, *pid] {
                    bytes.extend(number.to_le_bytes());
                }
            }
            Self::Open { question, key, wants, secret } => {
                bytes.extend(question.to_le_bytes());
                bytes.extend(key.index.to_le_bytes());
                bytes.extend(key.serial.to_le_bytes());
                let flags = [wants.counts, wants.ready, secret.is_some(), !wants.memory];
                let flags = flags.iter().rev().fold(0, |flags, flag| flags << 1 | u32::from(*flag));
                bytes.extend(flags.to_le_bytes());
                bytes.extend(secret.iter().flat_map(|secret| secret.0));
            }
            Self::Opened { question, opened } => {
                bytes.extend(question.to_le_bytes());
                bytes.extend((opened.transport as u32).to_le_bytes());
                bytes.extend(opened.device_uuid);
                bytes.extend(opened.bytes.to_le_bytes());
                bytes.extend(opened.payload);
                bytes.extend((u32::from(opened.with_descriptor) | opened.further << 1).to_le_bytes());
            }
            Self::Parts { question, key, first } => {
                bytes.extend(question.to_le_bytes());
                bytes.extend(key.index.to_le_bytes());
                bytes.extend(key.serial.to_le_bytes());
                bytes.extend(first.to_le_bytes());
            }
            Self::PartsOpened { question, parts } => {
                bytes.extend(question.to_le_bytes());
                bytes.extend((parts.len() as u32).to_le_bytes());
                for part in parts {
                    bytes.extend(part.bytes.to_le_bytes());
                    bytes.extend(part.payload);
                }
            }
            Self::Entrust { question, entrusted } => {
                bytes.extend(question.to_le_bytes());
                bytes.extend(entrusted.key.index.to_le_bytes());
                bytes.extend(entrusted.key.serial.to_le_bytes());
                let flags = u32::from(entrusted.is_device) | u32::from(entrusted.secret.is_some()) << 1;
                bytes.extend(flags.to_le_bytes());
                bytes.extend(entrusted.secret.map_or([0; 16], |secret| secret.0));
                bytes.extend(entrusted.device_uuid);
                for number in [entrusted.bytes, entrusted.issued, entrusted.done] {
                    bytes.extend(number.to_le_bytes());
                }
                for number in [entrusted.first, entrusted.count, entrusted.parts.len() as u32] {
                    bytes.extend(number.to_le_bytes());
                }
                for part in &entrusted.parts {
                    bytes.extend(part.bytes.to_le_bytes());
                    bytes.extend(part.payload);
                }
            }
            Self::Entrusted { question } | Self::TakeOver { question } | Self::HandedOver { question } => {
                bytes.extend(question.to_le_bytes());
            }
            Self::Abandon { key } => {
                bytes.extend(key.index.to_le_bytes());
                bytes.extend(key.serial.to_le_bytes());
            }
            Self::Refused { question, kind, text } => {
                let number = KINDS.iter().find(|(_, known)| known == kind).map_or(7, |(number, _)| *number);
                bytes.extend(question.to_le_bytes());
                bytes.extend(number.to_le_bytes());
                bytes.extend(text.as_bytes());
            }
        }
        bytes
    }

    /// Reads a message; `None` for anything that is not one, to the last byte.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut fields = Fields { bytes };
        if fields.array()? != MAGIC {
            return None;
        }
        let kind = fields.u16()?;
        fields.u16()?;
        let message = match kind {
            HELLO => Self::Hello { version: fields.u16()?, oldest: fields.u16()? },
            WELCOME => {
                let (version, oldest, incarnation) = (fields.u16()?, fields.u16()?, fields.array()?);
                let standing = take_standing(&mut fields)?;
                Self::Welcome { version, oldest, incarnation, standing, pid: fields.u32()? }
            }
            OPEN => {
                let question = fields.u32()?;
                let key = ExportKey { index: fields.u32()?, serial: fields.u64()? };
                let flags = fields.u32()?;
                let secret = if flags & 4 != 0 { Some(Secret(fields.array()?)) } else { None };
                let wants = Wants { counts: flags & 1 != 0, ready: flags & 2 != 0, memory: flags & 8 == 0 };
                Self::Open { question, key, wants, secret }
            }
            OPENED => {
                let question = fields.u32()?;
                let transport = fields.u32()?;
                let transport = [Transport::Legacy, Transport::Descriptor, Transport::Fabric]
                    .into_iter()
                    .find(|known| *known as u32 == transport)?;
                let (device_uuid, bytes, payload) = (fields.array()?, fields.u64()?, fields.array()?);
                let flags = fields.u32()?;
                let (with_descriptor, further) = (flags & 1 != 0, flags >> 1);
                let opened = Opened { transport, device_uuid, bytes, payload, with_descriptor, further };
                Self::Opened { question, opened }
            }
            PARTS => {
                let question = fields.u32()?;
                let key = ExportKey { index: fields.u32()?, serial: fields.u64()? };
                Self::Parts { question, key, first: fields.u32()? }
            }
            PARTS_OPENED => {
                let question = fields.u32()?;
                Self::PartsOpened { question, parts: take_parts(&mut fields)? }
            }
            ENTRUST => {
                let question = fields.u32()?;
                let key = ExportKey { index: fields.u32()?, serial: fields.u64()? };
                let flags = fields.u32()?;
                let secret = Secret(fields.array()?);
                let (device_uuid, bytes) = (fields.array()?, fields.u64()?);
                let (issued, done, first, count) = (fields.u64()?, fields.u64()?, fields.u32()?, fields.u32()?);
                let (is_device, secret) = (flags & 1 != 0, (flags & 2 != 0).then_some(secret));
                let parts = take_parts(&mut fields)?;
                let entrusted =
                    Entrusted { key, is_device, secret, device_uuid, bytes, issued, done, first, count, parts };
                Self::Entrust { question, entrusted }
            }
            ENTRUSTED => Self::Entrusted { question: fields.u32()? },
            TAKE_OVER => Self::TakeOver { question: fields.u32()? },
            HANDED_OVER => Self::HandedOver { question: fields.u32()? },
            ABANDON => Self::Abandon { key: ExportKey { index: fields.u32()?, serial: fields.u64()? } },
            REFUSED => {
                let question = fields.u32()?;
                let number = fields.u32()?;
                let kind =
                    KINDS.iter().find(|(known, _)| *known == number).map_or(ErrorKind::Vendor, |(_, kind)| *kind);
                let text = std::str::from_utf8(fields.bytes).ok()?.to_owned();
                fields.bytes = &[];
                Self::Refused { question, kind, text }
            }
            RING => Self::Ring,
            HEIR => Self::Heir,
            KNOCK => Self::Knock { incarnation: fields.array()? },
            DOOR => Self::Door,
            _ => return None,
        };
        fields.bytes.is_empty().then_some(message)
    }
}

fn take_parts(fields: &mut Fields<'_>) -> Option<Vec<Part>> {
    let count = fields.u32().filter(|&count| count as usize <= MOST_PARTS)?;
    (0..count).map(|_| Some(Part { bytes: fields.u64()?, payload: fields.array()? })).collect()
}

fn take_standing(fields: &mut Fields<'_>) -> Option<Standing> {
    let (flags, kind, group) = (fields.u32()?, fields.u32()?, fields.u32()?);
    let openers = match kind {
        0 => Openers::SameUser,
        1 => Openers::Group(group),
        2 => Openers::Secret,
        _ => return None,
    };
    Some(Standing { is_heir: flags & 1 != 0, openers })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn messages() -> Vec<Message> {
        let key = ExportKey { index: 3, serial: 1 << 40 };
        let opened = Opened {
            transport: Transport::Descriptor,
            device_uuid: [7; 16],
            bytes: 1 << 33,
            payload: [9; 64],
            with_descriptor: true,
            further: 70_000,
        };
        let parts = vec![Part { bytes: 1 << 33, payload: [9; 64] }; MOST_PARTS];
        let standing = Standing { is_heir: true, openers: Openers::Group(100) };
        let wants = Wants { counts: true, ready: false, memory: true };
        let registers = Wants { counts: false, ready: true, memory: false };
        let entrusted = Entrusted {
            key,
            is_device: true,
            secret: Some(Secret([6; 16])),
            device_uuid: [7; 16],
            bytes: 1 << 40,
            issued: 3,
            done: 2,
            first: 16,
            count: 70_000,
            parts: parts.clone(),
        };
        vec![
            Message::Hello { version: 1, oldest: 1 },
            Message::Welcome { version: 4, oldest: 1, incarnation: [5; 16], standing, pid: 7 },
            Message::Open { question: 8, key, wants, secret: None },
            Message::Open { question: 8, key, wants: registers, secret: Some(Secret([6; 16])) },
            Message::Entrust { question: 8, entrusted },
            Message::Entrusted { question: 8 },
            Message::TakeOver { question: 9 },
            Message::HandedOver { question: 9 },
            Message::Heir,
            Message::Knock { incarnation: [5; 16] },
            Message::Door,
            Message::Opened { question: 8, opened },
            Message::Parts { question: 8, key, first: 70_000 },
            Message::PartsOpened { question: 8, parts },
            Message::Abandon { key },
            Message::Ring,
            Message::Refused { question: 0, kind: ErrorKind::Expired, text: "gone".to_owned() },
        ]
    }

    #[test]
    fn messages_come_back_and_cut_ones_do_not() {
        for message in messages() {
            let bytes = message.encode();
            assert!(bytes.len() <= LONGEST);
            assert_eq!(Message::decode(&bytes), Some(message.clone()));
            if !matches!(message, Message::Refused { .. }) {
                (0..bytes.len()).for_each(|length| assert_eq!(Message::decode(&bytes[..length]), None));
                assert_eq!(Message::decode(&[&bytes[..], &[0]].concat()), None);
            }
        }
    }

    #[test]
    fn a_long_refusal_is_cut_between_characters() {
        let error = Error::new(ErrorKind::Vendor, "test", "\u{20ac}".repeat(1000));
        let bytes = Message::refusal(1, &error).encode();
        assert!(bytes.len() <= LONGEST);
        assert!(Message::decode(&bytes).is_some());
    }

    proptest! {
        #[test]
        fn garbage_never_panics(mut bytes in proptest::collection::vec(any::<u8>(), 0..300), kind in 0_u8..24) {
            if bytes.len() >= 8 {
                bytes[..4].copy_from_slice(&MAGIC);
                bytes[4..6].copy_from_slice(&[kind, 0]);
            }
            if let Some(message) = Message::decode(&bytes) {
                prop_assert!(message.encode().len() <= bytes.len().max(LONGEST));
            }
        }
    }
}
