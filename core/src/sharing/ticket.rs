//! [`Ticket`]: the message that lets another process open a buffer.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use super::name::Name;
use super::options::Method;
use highwater_hal::{Error, ErrorKind, Result, Transport, counted};

const MAGIC: [u8; 4] = *b"HWTK";
/// Version of the format below.
const VERSION: u16 = 1;
/// Oldest version of the format that a reader must know to use this ticket.
const OLDEST_READER: u16 = 1;
/// The feature that the ticket names page-locked memory.
const PINNED: u32 = 1 << 4;
/// The feature that an open has to name the ticket's secret.
const SECRET: u32 = 1 << 5;
/// The features that the exporter is found in a directory, or by an inherited descriptor.
const DIRECTORY: u32 = 1 << 6;
const DESCRIPTOR: u32 = 1 << 7;
/// Features of an allocation, without those of a ticket alone.
pub(super) const OF_ALLOCATION: u32 = SECRET | DIRECTORY | DESCRIPTOR;
/// Features that a reader must support beyond the version, one bit each.
const KNOWN_FEATURES: u32 = PINNED | OF_ALLOCATION;
const BYTES: usize = 136;
const CHECKED: usize = BYTES - 4;
/// Offset of the secret; without one, of the bytes that are 0.
const SECRET_AT: usize = 112;
/// Offset of the bytes that are always 0.
const RESERVED: usize = 128;

/// The secret of an allocation. It is not printed.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Secret(pub(crate) [u8; 16]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

impl Secret {
    /// Compares all bytes, so that the time of the comparison reveals nothing.
    pub(super) fn matches(&self, other: &Self) -> bool {
        let differing = self.0.iter().zip(other.0).fold(0, |bits, (ours, theirs)| bits | (ours ^ theirs));
        std::hint::black_box(differing) == 0
    }
}

/// Names a range of a shared buffer, of device memory or of page-locked memory. It is plain bytes: send it through a pipe, a file, an argument or a queue.
///
/// Any number of processes may open a ticket, once or often, while its exporter runs and keeps the buffer. A ticket by itself
/// keeps nothing alive. The processes must be on the same running system. [`SharingOptions`](crate::SharingOptions) select the
/// rendezvous and the processes that may open: by default, those of the same user in the same network namespace.
///
/// # Format
/// A ticket has 136 bytes. Every number is little-endian. Its text is the same bytes in hexadecimal digits.
///
/// | offset | bytes | field |
/// | --- | --- | --- |
/// | 0 | 4 | `HWTK` |
/// | 4 | 2 | version of the format, 1 |
/// | 6 | 2 | oldest version that a reader must know, 1 |
/// | 8 | 4 | features that a reader must support, one bit each: 16 page-locked memory, 32 a secret, 64 an exporter in a directory, 128 an exporter at an inherited descriptor |
/// | 12 | 4 | transport: 0 legacy, 1 descriptor, 2 fabric |
/// | 16 | 16 | boot id of the system |
/// | 32 | 16 | incarnation: random number of the exporting runtime |
/// | 48 | 16 | UUID of the device; 0 for page-locked memory |
/// | 64 | 4 | process id of the exporter, as the exporter sees it |
/// | 68 | 4 | index of the allocation in the exporter |
/// | 72 | 8 | generation of the allocation: never used twice by one exporter |
/// | 80 | 8 | number of the share; an open waits for its device work |
/// | 88 | 8 | bytes of the allocation |
/// | 96 | 8 | offset of the range in bytes |
/// | 104 | 8 | length of the range in bytes |
/// | 112 | 16 | the secret, with the feature 32; else 0 |
/// | 128 | 4 | 0 |
/// | 132 | 4 | CRC-32 of the preceding bytes |
///
/// The checksum detects damage, but not forgery. A later version of the format may use the bytes at 128.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Ticket {
    pub(crate) transport: Transport,
    /// True for page-locked memory, false for device memory.
    pub(crate) is_pinned: bool,
    /// The method by which importers find the exporter.
    pub(crate) method: Method,
    /// The secret that an open must name, if the exporter admits any process that has the ticket.
    pub(crate) secret: Option<Secret>,
    pub(crate) boot: [u8; 16],
    pub(crate) incarnation: [u8; 16],
    pub(crate) device_uuid: [u8; 16],
    pub(crate) pid: u32,
    pub(crate) index: u32,
    pub(crate) serial: u64,
    pub(crate) number: u64,
    pub(crate) allocation_bytes: u64,
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

impl Ticket {
    /// Returns the bytes of the shared range.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.length
    }

    /// Returns the transport that the exporter chose.
    #[must_use]
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// Returns whether the ticket names page-locked memory, which [`Runtime::open_pinned`](crate::Runtime::open_pinned) opens.
    /// Otherwise it names device memory.
    #[must_use]
    pub fn is_pinned(&self) -> bool {
        self.is_pinned
    }

    /// Returns the UUID of the memory's device; zeros for page-locked memory.
    #[must_use]
    pub fn device_uuid(&self) -> [u8; 16] {
        self.device_uuid
    }

    /// Returns the process id of the exporter, as the exporter sees it.
    #[must_use]
    pub fn exporter_pid(&self) -> u32 {
        self.pid
    }

    /// Returns the method by which importers find the exporter: `abstract`, `directory` or `descriptor`.
    #[must_use]
    pub fn rendezvous(&self) -> &'static str {
        self.method.name()
    }

    /// Returns whether the ticket carries a secret, with which any process may open it. Protect such a ticket like a password.
    #[must_use]
    pub fn has_secret(&self) -> bool {
        self.secret.is_some()
    }

    /// Returns the name of the exporter.
    pub(crate) fn exporter(&self) -> Name {
        Name { boot: self.boot, incarnation: self.incarnation }
    }

    /// Returns the features of the allocation.
    pub(super) fn features(&self) -> u32 {
        let method = match self.method {
            Method::Abstract => 0,
            Method::Directory => DIRECTORY,
            Method::Descriptor => DESCRIPTOR,
        };
        method | if self.secret.is_some() { SECRET } else { 0 }
    }

    /// Sets the fields that the features of an allocation state. `secret` has the 16 bytes of the secret, or zeros. `None` if the
    /// features and the bytes do not agree.
    pub(super) fn with_features(mut self, features: u32, secret: [u8; 16]) -> Option<Self> {
        self.method = match features & (DIRECTORY | DESCRIPTOR) {
            0 => Method::Abstract,
            DIRECTORY => Method::Directory,
            DESCRIPTOR => Method::Descriptor,
            _ => return None,
        };
        self.secret = (features & SECRET != 0).then_some(Secret(secret));
        (self.secret.is_some() || secret == [0; 16]).then_some(self)
    }

    /// Returns the ticket of a range of bytes of the allocation.
    pub(crate) fn part(mut self, offset: u64, length: u64) -> Self {
        (self.offset, self.length) = (offset, length);
        self
    }

    /// Returns the values of the range, counted from the start of the allocation.
    pub(crate) fn values<T>(&self, operation: &'static str) -> Result<Range<usize>> {
        values::<T>(operation, self.offset, self.length)
    }

    /// Returns the ticket in the format above.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(BYTES);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(OLDEST_READER.to_le_bytes());
        let features = self.features() | if self.is_pinned { PINNED } else { 0 };
        bytes.extend(features.to_le_bytes());
        self.put_share(&mut bytes);
        bytes.extend(self.offset.to_le_bytes());
        bytes.extend(self.length.to_le_bytes());
        bytes.extend(self.secret.iter().flat_map(|secret| secret.0));
        bytes.resize(CHECKED, 0);
        bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
        bytes
    }

    /// Reads a ticket.
    ///
    /// # Errors
    /// `InvalidArgument` if the bytes are not a whole and unaltered ticket; `Unsupported` if it needs a newer version of this
    /// library.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let invalid = |what: String| {
            Error::new(ErrorKind::InvalidArgument, "ticket", what)
                .with_hint("pass the bytes of `Ticket::to_bytes` unchanged")
        };
        let magic = bytes.get(..4).unwrap_or(bytes);
        if magic != MAGIC {
            return Err(invalid(format!(
                "a ticket begins with `HWTK`; passed: {} with another beginning",
                counted(bytes.len(), "byte")
            )));
        }
        let mut fields = Fields { bytes: &bytes[4..] };
        let cut = || invalid(format!("a ticket has {BYTES} bytes, not {}", bytes.len()));
        let version = fields.u16().ok_or_else(cut)?;
        let oldest = fields.u16().ok_or_else(cut)?;
        let features = fields.u32().ok_or_else(cut)?;
        // Checked first: a newer format may be longer.
        if oldest > VERSION || features & !KNOWN_FEATURES != 0 {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "ticket",
                format!(
                    "the ticket of format {version} requires format {oldest} and features {features:#x}; \
                     this library supports format {VERSION} and features {KNOWN_FEATURES:#x}"
                ),
            )
            .with_hint("use the same version of the library in both processes"));
        }
        if bytes.len() != BYTES {
            return Err(cut());
        }
        let (checked, sum) = bytes.split_at(CHECKED);
        if sum != crc32fast::hash(checked).to_le_bytes() {
            return Err(invalid("the checksum of the ticket is wrong: the ticket was altered".to_owned()));
        }
        // A newer format that this version can read may use the bytes that are 0 here.
        let reserved = &checked[RESERVED..];
        if version < oldest || oldest == 0 || (version == VERSION && reserved.iter().any(|&byte| byte != 0)) {
            return Err(invalid(format!("the ticket is not of format {version}, which it names")));
        }
        let mut ticket = Self::take_share(&mut fields).ok_or_else(cut)?.map_err(|transport| {
            invalid(format!("the ticket has the transport {transport}, and this library knows 0 to 2"))
        })?;
        ticket.offset = fields.u64().ok_or_else(cut)?;
        ticket.length = fields.u64().ok_or_else(cut)?;
        let secret = checked[SECRET_AT..].first_chunk().copied().unwrap_or_default();
        // A newer format that this version can read may use the bytes of a secret that is not there.
        let secret = if features & SECRET != 0 || version == VERSION { secret } else { [0; 16] };
        let mut ticket = ticket
            .with_features(features, secret)
            .ok_or_else(|| invalid(format!("the ticket is not of format {version}, which it names")))?;
        ticket.is_pinned = features & PINNED != 0;
        if !is_inside(ticket.offset, ticket.length, ticket.allocation_bytes) {
            return Err(invalid("the ticket's range is not inside its allocation".to_owned()));
        }
        Ok(ticket)
    }

    /// Appends the fields at 12 to 95 of the format: the allocation and the share, without the range.
    pub(super) fn put_share(&self, bytes: &mut Vec<u8>) {
        bytes.extend((self.transport as u32).to_le_bytes());
        bytes.extend(self.boot);
        bytes.extend(self.incarnation);
        bytes.extend(self.device_uuid);
        bytes.extend(self.pid.to_le_bytes());
        bytes.extend(self.index.to_le_bytes());
        for number in [self.serial, self.number, self.allocation_bytes] {
            bytes.extend(number.to_le_bytes());
        }
    }

    /// Takes the fields of [`Ticket::put_share`]: an allocation of device memory, whose range is the whole allocation. `None` if bytes are missing; the inner error
    /// is a transport that this version does not know.
    pub(super) fn take_share(fields: &mut Fields<'_>) -> Option<std::result::Result<Self, u32>> {
        let transport = fields.u32()?;
        let known = [Transport::Legacy, Transport::Descriptor, Transport::Fabric];
        let known = known.into_iter().find(|known| *known as u32 == transport);
        let (boot, incarnation, device_uuid) = (fields.array()?, fields.array()?, fields.array()?);
        let (pid, index) = (fields.u32()?, fields.u32()?);
        let (serial, number, allocation_bytes) = (fields.u64()?, fields.u64()?, fields.u64()?);
        let ticket = known.map(|transport| Self {
            transport,
            is_pinned: false,
            method: Method::Abstract,
            secret: None,
            boot,
            incarnation,
            device_uuid,
            pid,
            index,
            serial,
            number,
            allocation_bytes,
            offset: 0,
            length: allocation_bytes,
        });
        Some(ticket.ok_or(transport))
    }

    /// Returns the ticket of a range of the allocation.
    pub(super) fn of_range(&self, offset: u64, length: u64) -> Self {
        Self { offset, length, ..self.clone() }
    }
}

/// Returns a range of bytes as a range of values.
pub(super) fn values<T>(operation: &'static str, offset: u64, length: u64) -> Result<Range<usize>> {
    let size = size_of::<T>() as u64;
    if size == 0 || !offset.is_multiple_of(size) || !length.is_multiple_of(size) {
        return Err(Error::new(
            ErrorKind::InvalidArgument,
            operation,
            format!(
                "the range of {} at offset {offset} is not a whole number of {size}-byte values",
                counted(length, "byte")
            ),
        )
        .with_hint("open the ticket with the type that was shared"));
    }
    let start = usize::try_from(offset / size).unwrap_or(usize::MAX);
    Ok(start..start.saturating_add(usize::try_from(length / size).unwrap_or(usize::MAX)))
}

/// Returns whether a range lies inside an allocation.
pub(super) fn is_inside(offset: u64, length: u64, allocation_bytes: u64) -> bool {
    offset.checked_add(length).is_some_and(|end| end <= allocation_bytes)
}

/// Returns the error for a ticket that describes an allocation differently from its exporter.
pub(super) fn not_given_out(what: &str) -> Error {
    Error::new(ErrorKind::InvalidArgument, "open_shared", format!("the exporter did not issue this ticket: {what}"))
        .with_hint("pass the bytes of `Ticket::to_bytes` unchanged")
}

/// Takes fields off the front of a message.
pub(crate) struct Fields<'b> {
    pub(crate) bytes: &'b [u8],
}

impl Fields<'_> {
    pub(crate) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.bytes.split_first_chunk::<N>()?;
        self.bytes = rest;
        Some(*field)
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
}

/// Returns the bytes as pairs of hexadecimal digits.
pub(super) fn to_digits(bytes: &[u8]) -> String {
    let digit = |value: u8| char::from(b"0123456789abcdef"[usize::from(value)]);
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        text.push(digit(byte >> 4));
        text.push(digit(byte & 15));
    }
    text
}

/// Returns the bytes of pairs of hexadecimal digits. `None` for any other text.
pub(super) fn from_digits(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        b'A'..=b'F' => Some(byte - b'A' + 10),
        _ => None,
    };
    let (pairs, []) = text.trim().as_bytes().as_chunks::<2>() else { return None };
    pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?)).collect()
}

/// Returns the bytes of a text. `what` is the noun for the error, such as `ticket`.
pub(super) fn bytes_of(operation: &'static str, what: &str, text: &str) -> Result<Vec<u8>> {
    from_digits(text).ok_or_else(|| {
        let message = format!("the text of a {what} consists of pairs of hexadecimal digits, and this text does not");
        let error = Error::new(ErrorKind::InvalidArgument, operation, message);
        error.with_hint(format!("pass the text of the {what} unchanged"))
    })
}

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&to_digits(&self.to_bytes()))
    }
}

impl FromStr for Ticket {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::from_bytes(&bytes_of("ticket", "ticket", text)?)
    }
}

/// Serializes as the text of the ticket, in every format.
#[cfg(feature = "serde")]
impl serde::Serialize for Ticket {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Checks the text as [`Ticket::from_bytes`] checks bytes.
#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for Ticket {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
impl Ticket {
    /// The ticket of a whole allocation, for tests.
    pub(super) fn example(serial: u64, bytes: u64) -> Self {
        Self {
            transport: Transport::Descriptor,
            is_pinned: false,
            method: Method::Abstract,
            secret: None,
            boot: [1; 16],
            incarnation: [2; 16],
            device_uuid: [3; 16],
            pid: 4,
            index: 5,
            serial,
            number: 7,
            allocation_bytes: bytes,
            offset: 0,
            length: bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ticket() -> Ticket {
        Ticket { offset: 16, length: 4080, ..Ticket::example(6, 4096) }
    }

    #[test]
    fn bytes_and_text_bring_it_back() {
        let ticket = ticket();
        assert_eq!(ticket.to_bytes().len(), BYTES);
        assert_eq!(Ticket::from_bytes(&ticket.to_bytes()).unwrap(), ticket);
        assert_eq!(ticket.to_string().parse::<Ticket>().unwrap(), ticket);
        let pinned = Ticket { is_pinned: true, device_uuid: [0; 16], ..ticket };
        assert_eq!(Ticket::from_bytes(&pinned.to_bytes()).unwrap(), pinned);
        assert!(pinned.is_pinned());
    }

    #[cfg(feature = "serde")]
    #[test]
    fn serde_brings_it_back_and_refuses_an_altered_one() {
        let ticket = ticket();
        let json = serde_json::to_string(&ticket).unwrap();
        assert_eq!(json, format!("\"{ticket}\""));
        assert_eq!(serde_json::from_str::<Ticket>(&json).unwrap(), ticket);
        let error = serde_json::from_str::<Ticket>(&json.replacen('0', "1", 1)).unwrap_err();
        assert!(error.to_string().contains("checksum"), "{error}");
    }

    #[test]
    fn every_cut_and_every_altered_bit_is_refused() {
        let bytes = ticket().to_bytes();
        for length in 0..bytes.len() {
            assert!(Ticket::from_bytes(&bytes[..length]).is_err(), "{length}");
        }
        for bit in 0..bytes.len() * 8 {
            let mut altered = bytes.clone();
            altered[bit / 8] ^= 1 << (bit % 8);
            assert!(Ticket::from_bytes(&altered).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn a_range_outside_the_allocation_is_refused_even_with_a_good_checksum() {
        for (offset, length) in [(16, 4081), (u64::MAX, 2), (4097, 0)] {
            let error = Ticket::from_bytes(&Ticket { offset, length, ..ticket() }.to_bytes()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        }
    }

    #[test]
    fn another_version_and_reserved_bytes_are_refused_even_with_a_good_checksum() {
        let changed = |at: usize, value: u8| {
            let mut bytes = ticket().to_bytes();
            bytes[at] = value;
            let sum = crc32fast::hash(&bytes[..CHECKED]).to_le_bytes();
            bytes[CHECKED..].copy_from_slice(&sum);
            Ticket::from_bytes(&bytes)
        };
        // Version 0, a reader older than the first, and each reserved byte.
        // The bytes of a secret are 0 without the feature.
        for at in [4, 6].into_iter().chain(SECRET_AT..CHECKED) {
            let value = u8::from(at >= SECRET_AT);
            assert_eq!(changed(at, value).unwrap_err().kind(), ErrorKind::InvalidArgument, "byte {at}");
        }
        // A later format that this version can read, by its own word.
        assert_eq!(changed(4, 2).unwrap(), ticket());
    }

    #[test]
    fn a_ticket_with_a_secret_or_a_method_has_the_size_of_others_and_needs_a_reader_that_knows_them() {
        for method in [Method::Abstract, Method::Directory, Method::Descriptor] {
            for secret in [None, Some(Secret([9; 16]))] {
                let ticket = Ticket { method, secret, ..ticket() };
                let bytes = ticket.to_bytes();
                assert_eq!(bytes.len(), BYTES);
                let read = Ticket::from_bytes(&bytes).unwrap();
                assert_eq!(read, ticket);
                assert_eq!((read.rendezvous(), read.has_secret()), (method.name(), secret.is_some()));
                // A reader that does not know these features refuses the ticket: only the ticket of before has none.
                let features = u32::from_le_bytes(bytes[8..12].try_into().unwrap());
                assert_eq!(features == 0, method == Method::Abstract && secret.is_none());
                assert!(!format!("{ticket:?}").contains("9, 9"), "the secret is printed");
            }
        }
        let other = Ticket { secret: Some(Secret([8; 16])), ..ticket() };
        assert_ne!(other, Ticket { secret: Some(Secret([9; 16])), ..ticket() });
        // Both methods at once.
        let mut bytes = ticket().to_bytes();
        bytes[8] = 0xc0;
        let sum = crc32fast::hash(&bytes[..CHECKED]).to_le_bytes();
        bytes[CHECKED..].copy_from_slice(&sum);
        assert_eq!(Ticket::from_bytes(&bytes).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }

    #[test]
    fn the_bytes_of_before_are_read_and_written_as_before() {
        // Written by the version of 2026-11-23, which knew neither secrets nor methods.
        let mut expected = b"HWTK\x01\0\x01\0\0\0\0\0\x01\0\0\0".to_vec();
        expected.extend([[1; 16], [2; 16], [3; 16]].concat());
        expected.extend([4, 0, 0, 0, 5, 0, 0, 0]);
        for number in [6_u64, 7, 4096, 16, 4080] {
            expected.extend(number.to_le_bytes());
        }
        expected.resize(CHECKED, 0);
        expected.extend(crc32fast::hash(&expected).to_le_bytes());
        assert_eq!(ticket().to_bytes(), expected);
        assert_eq!(Ticket::from_bytes(&expected).unwrap(), ticket());
    }

    #[test]
    fn a_newer_ticket_names_what_it_needs() {
        let mut bytes = ticket().to_bytes();
        bytes[4..8].copy_from_slice(&[9, 0, 8, 0]);
        bytes.extend([0; 40]);
        let error = Ticket::from_bytes(&bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains("format 9") && error.message().contains("format 8"), "{error}");
    }

    proptest! {
        #[test]
        fn garbage_never_panics_and_is_never_a_ticket(mut bytes in proptest::collection::vec(any::<u8>(), 0..300), head: bool) {
            if head && bytes.len() >= 4 {
                bytes[..4].copy_from_slice(&MAGIC);
            }
            prop_assert!(Ticket::from_bytes(&bytes).is_err());
        }

        #[test]
        fn text_never_panics(text in ".{0,300}") {
            prop_assert!(text.parse::<Ticket>().is_err());
        }
    }
}
