//! [`TicketBatch`]: the message that lets another process open many ranges of few allocations.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::str::FromStr;

use super::ticket::{Fields, OF_ALLOCATION, Ticket, bytes_of, is_inside, to_digits};
use highwater_hal::{Error, ErrorKind, Result, counted};

const MAGIC: [u8; 4] = *b"HWTB";
/// Version of the format below.
const VERSION: u16 = 1;
/// Oldest version of the format that a reader must know to use this batch.
const OLDEST_READER: u16 = 1;
/// The feature that each allocation has its own features and a secret, as a [`Ticket`] has.
const FEATURES: u32 = 1;
/// Features that a reader must support beyond the version, one bit each.
const KNOWN_FEATURES: u32 = FEATURES;
/// Bytes before the allocations.
const HEADER: usize = 32;
/// Offset of the bytes of the header that are 0.
const RESERVED: usize = 20;
/// Bytes of an allocation, and of its features and its secret.
const ALLOCATION: usize = 84;
const ALLOCATION_FEATURES: usize = 20;
/// Bytes of a slice.
const SLICE: usize = 20;
/// Bytes of the checksum at the end.
const SUM: usize = 4;
/// Bytes of the largest batch.
#[cfg(feature = "serde")]
const LONGEST: usize =
    HEADER + (ALLOCATION + ALLOCATION_FEATURES) * TicketBatch::MAX_ALLOCATIONS + SLICE * TicketBatch::MAX_SLICES + SUM;

const OPERATION: &str = "ticket_batch";

/// Names many ranges of shared device buffers, in order. [`Runtime::share_all`](crate::Runtime::share_all) makes it, and
/// [`Runtime::open_shared_all`](crate::Runtime::open_shared_all) opens it. Like a [`Ticket`], it is plain bytes and keeps nothing
/// alive.
///
/// ```
/// use highwater_core::{DeviceBuffer, Result, Runtime, TicketBatch};
///
/// /// In the process that has the weights: one allocation for each layer, with many tensors in it.
/// fn send(runtime: &Runtime, layers: &[DeviceBuffer<f32>]) -> Result<Vec<u8>> {
///     let tensors = layers.iter().flat_map(|layer| (0..10).map(|at| layer.slice(at * 100..at * 100 + 100)));
///     let batch = runtime.share_all(&tensors.collect::<Result<Vec<_>>>()?)?;
///     Ok(batch.to_bytes())
/// }
///
/// /// In any other process: all tensors, in the same order.
/// fn receive(runtime: &Runtime, bytes: &[u8]) -> Result<Vec<DeviceBuffer<f32>>> {
///     runtime.open_shared_all(&TicketBatch::from_bytes(bytes)?)
/// }
/// # use highwater_mock::{MockGpu, MockOptions};
/// # let runtimes = [(); 2].map(|()| Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap());
/// # let device = runtimes[0].device(0)?;
/// # let layers = [device.allocate_shared(1000)?, device.allocate_shared(1000)?];
/// # let tensors = receive(&runtimes[1], &send(&runtimes[0], &layers)?)?;
/// # assert_eq!((tensors.len(), tensors[19].len()), (20, 100));
/// # Ok::<(), highwater_core::Error>(())
/// ```
///
/// A batch names each allocation once, and each slice by its place in an allocation. So it has 20 bytes for a slice and 84 for an
/// allocation, where a ticket has 136 for both: 19,500 slices of 40 allocations are 393,396 bytes instead of 2,652,000.
///
/// # Format
/// Every number is little-endian. The text is the same bytes in hexadecimal digits.
///
/// | offset | bytes | field |
/// | --- | --- | --- |
/// | 0 | 4 | `HWTB` |
/// | 4 | 2 | version of the format, 1 |
/// | 6 | 2 | oldest version that a reader must know, 1 |
/// | 8 | 4 | features that a reader must support, one bit each: 1 if an allocation has features |
/// | 12 | 4 | number of allocations, A |
/// | 16 | 4 | number of slices, S |
/// | 20 | 12 | 0 |
/// | 32 | 84 A | the allocations: the bytes 12 to 95 of a [`Ticket`] of each. With the feature 1, each has 104 bytes: its features (32, 64 and 128, as in a ticket) and its secret follow |
/// | 32 + 84 A | 20 S | the slices: 4 bytes for the number of the allocation, 8 for the offset, 8 for the length in bytes |
/// | 32 + 84 A + 20 S | 4 | CRC-32 of the preceding bytes |
///
/// The allocations are in the order in which the slices first use them, each once. So two batches of the same slices and shares
/// have the same bytes. A reader refuses any other order, an allocation without a slice, and a slice that ends outside its
/// allocation.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct TicketBatch {
    /// A ticket of each whole allocation.
    pub(super) allocations: Vec<Ticket>,
    pub(super) slices: Vec<BatchSlice>,
}

/// A range of an allocation of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct BatchSlice {
    pub(super) allocation: u32,
    pub(super) offset: u64,
    pub(super) length: u64,
}

fn invalid(what: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, OPERATION, what)
        .with_hint("pass the bytes of `TicketBatch::to_bytes` unchanged")
}

/// Returns the error for a batch that has too many of something.
pub(super) fn too_many(operation: &'static str, what: &str, count: usize, most: usize) -> Error {
    Error::new(ErrorKind::InvalidArgument, operation, format!("a batch has at most {most} {what}, not {count}"))
        .with_hint("share the slices in several batches")
}

impl TicketBatch {
    /// Maximum number of slices.
    pub const MAX_SLICES: usize = 1 << 20;
    /// Maximum number of allocations.
    pub const MAX_ALLOCATIONS: usize = 1 << 16;

    /// Returns the number of slices.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slices.len()
    }

    /// Returns whether the batch has no slices.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.slices.is_empty()
    }

    /// Returns the number of allocations. An importer opens each of them once.
    #[must_use]
    pub fn allocations(&self) -> usize {
        self.allocations.len()
    }

    /// Returns the ticket of one slice, for a process that needs only some of them. `None` if the batch has no such slice.
    #[must_use]
    pub fn ticket(&self, slice: usize) -> Option<Ticket> {
        let slice = self.slices.get(slice)?;
        let allocation = self.allocations.get(slice.allocation as usize)?;
        Some(allocation.of_range(slice.offset, slice.length))
    }

    /// Returns the batch in the format above.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let with_features = self.allocations.iter().any(|allocation| allocation.features() != 0);
        let length =
            HEADER + allocation_bytes(with_features) * self.allocations.len() + SLICE * self.slices.len() + SUM;
        let mut bytes = Vec::with_capacity(length);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(OLDEST_READER.to_le_bytes());
        bytes.extend(if with_features { FEATURES } else { 0 }.to_le_bytes());
        // Neither count is above its maximum.
        bytes.extend((self.allocations.len() as u32).to_le_bytes());
        bytes.extend((self.slices.len() as u32).to_le_bytes());
        bytes.resize(HEADER, 0);
        for allocation in &self.allocations {
            allocation.put_share(&mut bytes);
            if with_features {
                bytes.extend(allocation.features().to_le_bytes());
                bytes.extend(allocation.secret.map_or([0; 16], |secret| secret.0));
            }
        }
        for slice in &self.slices {
            let mut field = [0; SLICE];
            field[..4].copy_from_slice(&slice.allocation.to_le_bytes());
            field[4..12].copy_from_slice(&slice.offset.to_le_bytes());
            field[12..].copy_from_slice(&slice.length.to_le_bytes());
            bytes.extend(field);
        }
        bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
        bytes
    }

    /// Reads a batch. Allocates no more than the given bytes justify.
    ///
    /// # Errors
    /// `InvalidArgument` if the bytes are not a whole and unaltered batch; `Unsupported` if it needs a newer version of this
    /// library.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let magic = bytes.get(..4).unwrap_or(bytes);
        if magic != MAGIC {
            return Err(invalid(format!(
                "a batch begins with `HWTB`; passed: {} with another beginning",
                counted(bytes.len(), "byte")
            )));
        }
        let mut fields = Fields { bytes: &bytes[4..] };
        let cut = || invalid(format!("a batch has at least {} bytes, not {}", HEADER + SUM, bytes.len()));
        let version = fields.u16().ok_or_else(cut)?;
        let oldest = fields.u16().ok_or_else(cut)?;
        let features = fields.u32().ok_or_else(cut)?;
        // Checked first: a newer format may have other fields.
        if oldest > VERSION || features & !KNOWN_FEATURES != 0 {
            return Err(Error::new(
                ErrorKind::Unsupported,
                OPERATION,
                format!(
                    "the batch of format {version} requires format {oldest} and features {features:#x}; \
                     this library supports format {VERSION} and features {KNOWN_FEATURES:#x}"
                ),
            )
            .with_hint("use the same version of the library in both processes"));
        }
        let allocations = fields.u32().ok_or_else(cut)? as usize;
        let slices = fields.u32().ok_or_else(cut)? as usize;
        if allocations > Self::MAX_ALLOCATIONS {
            return Err(too_many(OPERATION, "allocations", allocations, Self::MAX_ALLOCATIONS));
        }
        if slices > Self::MAX_SLICES {
            return Err(too_many(OPERATION, "slices", slices, Self::MAX_SLICES));
        }
        // No overflow: both counts are limited.
        let allocation_bytes = allocation_bytes(features & FEATURES != 0);
        let length = HEADER + allocation_bytes * allocations + SLICE * slices + SUM;
        if bytes.len() != length {
            return Err(invalid(format!(
                "a batch of {} of {} has {length} bytes, not {}",
                counted(slices, "slice"),
                counted(allocations, "allocation"),
                bytes.len()
            )));
        }
        let (checked, sum) = bytes.split_at(length - SUM);
        if sum != crc32fast::hash(checked).to_le_bytes() {
            return Err(invalid("the checksum of the batch is wrong: the batch was altered".to_owned()));
        }
        // A newer format that this version can read may use the bytes that are 0 here.
        let reserved = &checked[RESERVED..HEADER];
        if version < oldest || oldest == 0 || (version == VERSION && reserved.iter().any(|&byte| byte != 0)) {
            return Err(invalid(format!("the batch is not of format {version}, which it names")));
        }
        let (allocation_fields, slice_fields) = checked[HEADER..].split_at(allocation_bytes * allocations);
        let allocations = read_allocations(allocation_fields, allocation_bytes)?;
        let slices = read_slices(slice_fields, &allocations)?;
        Ok(Self { allocations, slices })
    }
}

/// Returns the bytes of an allocation.
const fn allocation_bytes(with_features: bool) -> usize {
    if with_features { ALLOCATION + ALLOCATION_FEATURES } else { ALLOCATION }
}

fn read_allocations(bytes: &[u8], allocation_bytes: usize) -> Result<Vec<Ticket>> {
    let mut names = HashSet::with_capacity(bytes.len() / allocation_bytes);
    let read = |(place, field): (usize, &[u8])| {
        let mut fields = Fields { bytes: field };
        let allocation = Ticket::take_share(&mut fields)
            .ok_or_else(|| invalid(format!("allocation {place} of the batch is cut")))?
            .map_err(|transport| {
                invalid(format!(
                    "allocation {place} of the batch has the transport {transport}, and this library knows 0 to 2"
                ))
            })?;
        let allocation = match (fields.u32(), fields.array()) {
            (Some(features), Some(secret)) => {
                let known = Some(allocation).filter(|_| features & !OF_ALLOCATION == 0);
                known.and_then(|allocation| allocation.with_features(features, secret)).ok_or_else(|| {
                    invalid(format!("allocation {place} of the batch has features {features:#x}, which do not fit"))
                })?
            }
            _ => allocation,
        };
        if !names.insert(name_of(&allocation)) {
            return Err(invalid(format!("the batch names allocation {place} twice")));
        }
        Ok(allocation)
    };
    bytes.chunks_exact(allocation_bytes).enumerate().map(read).collect()
}

fn read_slices(bytes: &[u8], allocations: &[Ticket]) -> Result<Vec<BatchSlice>> {
    let (fields, _) = bytes.as_chunks::<SLICE>();
    let mut used = 0;
    let read = |(place, field): (usize, &[u8; SLICE])| {
        let mut fields = Fields { bytes: field };
        let cut = || invalid(format!("slice {place} of the batch is cut"));
        let slice = BatchSlice {
            allocation: fields.u32().ok_or_else(cut)?,
            offset: fields.u64().ok_or_else(cut)?,
            length: fields.u64().ok_or_else(cut)?,
        };
        let number = slice.allocation as usize;
        let Some(allocation) = allocations.get(number) else {
            return Err(invalid(format!(
                "slice {place} of the batch is in allocation {number}, and the batch has {}",
                allocations.len()
            )));
        };
        if number > used {
            return Err(invalid(format!("slice {place} of the batch is in allocation {number}, before any in {used}")));
        }
        used = used.max(number + 1);
        if !is_inside(slice.offset, slice.length, allocation.allocation_bytes) {
            return Err(invalid(format!(
                "slice {place} of the batch has {} at {}, and its allocation has {}",
                counted(slice.length, "byte"),
                slice.offset,
                allocation.allocation_bytes
            )));
        }
        Ok(slice)
    };
    let slices = fields.iter().enumerate().map(read).collect::<Result<Vec<_>>>()?;
    if used < allocations.len() {
        return Err(invalid(format!("no slice of the batch is in allocation {used}")));
    }
    Ok(slices)
}

/// Returns what an importer tells allocations apart by.
fn name_of(allocation: &Ticket) -> ([u8; 16], u64) {
    (allocation.incarnation, allocation.serial)
}

/// A batch that is being made.
pub(super) struct BatchBuilder {
    batch: TicketBatch,
    numbers: HashMap<([u8; 16], u64), u32>,
}

impl BatchBuilder {
    pub(super) fn new(slices: usize) -> Self {
        let batch = TicketBatch { allocations: Vec::new(), slices: Vec::with_capacity(slices) };
        Self { batch, numbers: HashMap::new() }
    }

    /// Adds an allocation with the ticket of one share, and returns its number. A later share of the same allocation replaces an
    /// earlier one, so an open waits for the work before both.
    pub(super) fn allocation(&mut self, ticket: Ticket) -> Result<u32> {
        let allocations = &mut self.batch.allocations;
        if let Some(&number) = self.numbers.get(&name_of(&ticket)) {
            let known = &mut allocations[number as usize];
            known.number = known.number.max(ticket.number);
            return Ok(number);
        }
        if allocations.len() == TicketBatch::MAX_ALLOCATIONS {
            return Err(too_many("share_all", "allocations", allocations.len() + 1, TicketBatch::MAX_ALLOCATIONS));
        }
        let number = allocations.len() as u32;
        self.numbers.insert(name_of(&ticket), number);
        let bytes = ticket.allocation_bytes;
        allocations.push(Ticket { offset: 0, length: bytes, ..ticket });
        Ok(number)
    }

    pub(super) fn slice(&mut self, allocation: u32, offset: u64, length: u64) {
        self.batch.slices.push(BatchSlice { allocation, offset, length });
    }

    pub(super) fn end(self) -> TicketBatch {
        self.batch
    }
}

/// Counts, because a batch may have a million slices.
impl fmt::Debug for TicketBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TicketBatch")
            .field("slices", &self.slices.len())
            .field("allocations", &self.allocations.len())
            .finish_non_exhaustive()
    }
}

impl fmt::Display for TicketBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&to_digits(&self.to_bytes()))
    }
}

impl FromStr for TicketBatch {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::from_bytes(&bytes_of(OPERATION, "batch", text)?)
    }
}

/// Serializes as text in formats that people read, such as JSON, and as bytes in all others.
#[cfg(feature = "serde")]
impl serde::Serialize for TicketBatch {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            serializer.collect_str(self)
        } else {
            serializer.serialize_bytes(&self.to_bytes())
        }
    }
}

/// Checks the bytes as [`TicketBatch::from_bytes`] does. Accepts text, bytes and a sequence of bytes, whatever the format says of
/// itself: a value that was buffered, as in an untagged enum, may say that people read it.
#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for TicketBatch {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if deserializer.is_human_readable() {
            deserializer.deserialize_str(Reader)
        } else {
            deserializer.deserialize_bytes(Reader)
        }
    }
}

#[cfg(feature = "serde")]
struct Reader;

#[cfg(feature = "serde")]
impl<'de> serde::de::Visitor<'de> for Reader {
    type Value = TicketBatch;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the text or the bytes of a batch of tickets")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<TicketBatch, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<TicketBatch, E> {
        TicketBatch::from_bytes(bytes).map_err(E::custom)
    }

    fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut seq: A) -> Result<TicketBatch, A::Error> {
        // The length that the sequence names is not trusted.
        let mut bytes = Vec::new();
        while let Some(byte) = seq.next_element::<u8>()? {
            if bytes.len() == LONGEST {
                return Err(serde::de::Error::custom(invalid(format!("a batch has at most {LONGEST} bytes"))));
            }
            bytes.push(byte);
        }
        self.visit_bytes(&bytes)
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::super::options::Method;
    use super::super::ticket::Secret;
    use super::*;

    const BYTES: u64 = 4096;

    fn allocation(serial: u64) -> Ticket {
        Ticket::example(serial, BYTES)
    }

    /// Slices, each of an allocation by its serial number.
    fn batch(slices: &[(u64, u64, u64)]) -> TicketBatch {
        let mut batch = BatchBuilder::new(slices.len());
        for (serial, offset, length) in slices {
            let number = batch.allocation(allocation(*serial)).unwrap();
            batch.slice(number, *offset, *length);
        }
        batch.end()
    }

    fn small() -> TicketBatch {
        batch(&[(8, 0, 16), (9, 16, 4080), (8, 8, 16), (8, 0, 16), (9, BYTES, 0)])
    }

    /// The bytes after a change, with a checksum that fits them.
    fn forged(batch: &TicketBatch, change: impl FnOnce(&mut Vec<u8>)) -> Result<TicketBatch> {
        let mut bytes = batch.to_bytes();
        bytes.truncate(bytes.len() - SUM);
        change(&mut bytes);
        bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
        TicketBatch::from_bytes(&bytes)
    }

    #[track_caller]
    fn is_refused(read: Result<TicketBatch>, why: &str) {
        let error = read.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(error.message().contains(why) && !error.hint().is_empty(), "{error}");
    }

    #[test]
    fn bytes_and_text_bring_it_back() {
        for batch in [batch(&[]), small()] {
            assert_eq!(TicketBatch::from_bytes(&batch.to_bytes()).unwrap(), batch);
            assert_eq!(batch.to_string().parse::<TicketBatch>().unwrap(), batch);
            assert_eq!(batch.to_string().to_uppercase().parse::<TicketBatch>().unwrap(), batch);
        }
    }

    #[test]
    fn allocations_keep_their_secrets_and_methods() {
        let mut batch = BatchBuilder::new(2);
        let secret = Some(Secret([9; 16]));
        for ticket in [allocation(8), Ticket { secret, method: Method::Directory, ..allocation(9) }] {
            let number = batch.allocation(ticket).unwrap();
            batch.slice(number, 0, 16);
        }
        let batch = batch.end();
        let bytes = batch.to_bytes();
        assert_eq!(bytes.len(), HEADER + 2 * 104 + 2 * SLICE + SUM);
        let read = TicketBatch::from_bytes(&bytes).unwrap();
        assert_eq!(read, batch);
        assert_eq!((read.ticket(0).unwrap().secret, read.ticket(1).unwrap().secret), (None, secret));
        assert_eq!(read.ticket(1).unwrap().rendezvous(), "directory");
        // Both methods; a feature of tickets alone; a secret without its feature.
        is_refused(forged(&batch, |bytes| bytes[HEADER + 84] = 0xc0), "has features 0xc0");
        is_refused(forged(&batch, |bytes| bytes[HEADER + 84] = 16), "has features 0x10");
        is_refused(forged(&batch, |bytes| bytes[HEADER + 88] = 1), "has features 0x0");
    }

    #[test]
    fn the_bytes_stay_as_they_are() {
        let bytes = batch(&[(8, 16, 32)]).to_bytes();
        let mut expected = b"HWTB\x01\0\x01\0\0\0\0\0\x01\0\0\0\x01\0\0\0".to_vec();
        expected.extend([0; 12]);
        expected.extend([1, 0, 0, 0]);
        expected.extend([[1; 16], [2; 16], [3; 16]].concat());
        expected.extend([4, 0, 0, 0, 5, 0, 0, 0]);
        expected.extend([8, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0]);
        expected.extend([0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[..bytes.len() - SUM], expected);
        assert_eq!(bytes[bytes.len() - SUM..], crc32fast::hash(&expected).to_le_bytes());
    }

    #[test]
    fn it_has_the_bytes_that_the_docs_state() {
        let slices: Vec<_> = (0..19_500).map(|slice| (slice % 40, 0, 16)).collect();
        let batch = batch(&slices);
        assert_eq!((batch.len(), batch.allocations()), (19_500, 40));
        assert_eq!(batch.to_bytes().len(), 393_396);
        assert_eq!(19_500 * batch.ticket(0).unwrap().to_bytes().len(), 2_652_000);
    }

    #[test]
    fn each_slice_has_a_ticket() {
        let batch = small();
        let ticket = batch.ticket(1).unwrap();
        assert_eq!((ticket.offset, ticket.length, ticket.serial), (16, 4080, 9));
        assert_eq!(Ticket::from_bytes(&ticket.to_bytes()).unwrap(), ticket);
        assert_eq!(batch.ticket(5), None);
    }

    #[test]
    fn a_later_share_of_an_allocation_counts() {
        let mut batch = BatchBuilder::new(0);
        for number in [7, 9, 8] {
            assert_eq!(batch.allocation(Ticket { number, ..allocation(1) }).unwrap(), 0);
        }
        assert_eq!(batch.end().allocations[0].number, 9);
    }

    #[test]
    fn every_cut_and_every_altered_bit_is_refused() {
        let bytes = small().to_bytes();
        for length in 0..bytes.len() {
            assert!(TicketBatch::from_bytes(&bytes[..length]).is_err(), "{length}");
        }
        for bit in 0..bytes.len() * 8 {
            let mut altered = bytes.clone();
            altered[bit / 8] ^= 1 << (bit % 8);
            assert!(TicketBatch::from_bytes(&altered).is_err(), "bit {bit}");
        }
        assert!(TicketBatch::from_bytes(&[&bytes[..], &[0]].concat()).is_err());
    }

    #[test]
    fn wrong_fields_are_refused_even_with_a_good_checksum() {
        let slice = |place: usize| HEADER + 2 * ALLOCATION + place * SLICE;
        let with = |at: usize, field: &[u8]| {
            let field = field.to_vec();
            forged(&small(), move |bytes| bytes[at..at + field.len()].copy_from_slice(&field))
        };
        is_refused(with(12, &u32::MAX.to_le_bytes()), "at most 65536 allocations, not 4294967295");
        is_refused(with(16, &u32::MAX.to_le_bytes()), "at most 1048576 slices, not 4294967295");
        is_refused(with(12, &3_u32.to_le_bytes()), "bytes, not");
        is_refused(with(16, &4_u32.to_le_bytes()), "bytes, not");
        (RESERVED..HEADER).for_each(|at| is_refused(with(at, &[1]), "format 1"));
        is_refused(with(4, &[0]), "format 0");
        is_refused(with(6, &[0]), "format 1");
        is_refused(with(HEADER, &[3]), "allocation 0 of the batch has the transport 3");
        is_refused(with(HEADER + ALLOCATION + 60, &8_u64.to_le_bytes()), "names allocation 1 twice");
        is_refused(
            with(slice(2), &2_u32.to_le_bytes()),
            "slice 2 of the batch is in allocation 2, and the batch has 2",
        );
        is_refused(with(slice(0), &1_u32.to_le_bytes()), "slice 0 of the batch is in allocation 1, before any in 0");
        is_refused(with(slice(3) + 4, &(BYTES - 15).to_le_bytes()), "slice 3 of the batch has 16 bytes at 4081");
        is_refused(with(slice(3) + 4, &u64::MAX.to_le_bytes()), "slice 3");
        is_refused(with(slice(3) + 12, &(BYTES + 1).to_le_bytes()), "slice 3 of the batch has 4097 bytes at 0");
        let unused = forged(&batch(&[(8, 0, 1), (9, 0, 1)]), |bytes| {
            bytes.truncate(bytes.len() - SLICE);
            bytes[16] = 1;
        });
        is_refused(unused, "no slice of the batch is in allocation 1");
        // A later format that this version can read, by its own word.
        assert_eq!(with(4, &[2]).unwrap(), small());
    }

    #[test]
    fn a_newer_batch_names_what_it_needs() {
        let mut bytes = small().to_bytes();
        bytes[4..8].copy_from_slice(&[9, 0, 8, 0]);
        let error = TicketBatch::from_bytes(&bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains("format 9") && error.message().contains("format 8"), "{error}");
    }

    #[test]
    fn more_allocations_than_the_maximum_are_refused() {
        let mut batch = BatchBuilder::new(0);
        for serial in 0..TicketBatch::MAX_ALLOCATIONS as u64 {
            batch.allocation(allocation(serial)).unwrap();
        }
        assert!(batch.allocation(allocation(1)).is_ok(), "a known one");
        let error = batch.allocation(allocation(1 << 40)).unwrap_err();
        assert!(error.message().contains("at most 65536 allocations"), "{error}");
    }

    #[cfg(feature = "serde")]
    mod serde {
        use ::serde::Deserialize;
        use ::serde::de::IntoDeserializer;
        use ::serde::de::value::{BytesDeserializer, Error as ValueError, SeqDeserializer};

        use super::*;

        #[test]
        fn a_text_format_has_the_text() {
            let json = serde_json::to_string(&small()).unwrap();
            assert_eq!(json, format!("\"{}\"", small()));
            assert_eq!(serde_json::from_str::<TicketBatch>(&json).unwrap(), small());
            assert_eq!(serde_json::from_reader::<_, TicketBatch>(json.as_bytes()).unwrap(), small());
            let value = serde_json::to_value(small()).unwrap();
            assert_eq!(serde_json::from_value::<TicketBatch>(value).unwrap(), small());
            let error = serde_json::from_str::<TicketBatch>(&json.replacen("48", "49", 1)).unwrap_err();
            assert!(error.to_string().contains("HWTB"), "{error}");
            assert!(serde_json::from_str::<TicketBatch>(&json[..json.len() / 2]).is_err());
            assert!(serde_json::from_str::<TicketBatch>("17").is_err());
        }

        #[test]
        fn formats_that_describe_themselves_and_formats_that_do_not_have_the_bytes() {
            let pair = || (small(), 5_u8, batch(&[]));
            // Not self-describing: a length and the bytes.
            let posted = postcard::to_stdvec(&pair()).unwrap();
            assert_eq!(postcard::from_bytes::<(TicketBatch, u8, TicketBatch)>(&posted).unwrap(), pair());
            assert!(posted.len() < small().to_bytes().len() + batch(&[]).to_bytes().len() + 8);
            // Self-describing.
            let packed = rmp_serde::to_vec(&pair()).unwrap();
            assert_eq!(rmp_serde::from_slice::<(TicketBatch, u8, TicketBatch)>(&packed).unwrap(), pair());
            assert_eq!(rmp_serde::from_read::<_, (TicketBatch, u8, TicketBatch)>(&packed[..]).unwrap(), pair());
            assert!(packed.len() < small().to_bytes().len() + batch(&[]).to_bytes().len() + 12);
            for cut in 0..posted.len() {
                assert!(postcard::from_bytes::<(TicketBatch, u8, TicketBatch)>(&posted[..cut]).is_err(), "{cut}");
            }
            for cut in 0..packed.len() {
                assert!(rmp_serde::from_slice::<(TicketBatch, u8, TicketBatch)>(&packed[..cut]).is_err(), "{cut}");
            }
            for bit in 8..(small().to_bytes().len() + 2) * 8 {
                let mut altered = posted.clone();
                altered[bit / 8] ^= 1 << (bit % 8);
                assert!(postcard::from_bytes::<(TicketBatch, u8, TicketBatch)>(&altered).is_err(), "bit {bit}");
            }
        }

        #[test]
        fn bytes_and_sequences_are_read_where_a_format_makes_them_of_text() {
            let bytes = small().to_bytes();
            let read = BytesDeserializer::<ValueError>::new(&bytes);
            assert_eq!(TicketBatch::deserialize(read).unwrap(), small());
            let read = SeqDeserializer::<_, ValueError>::new(bytes.iter().copied());
            assert_eq!(TicketBatch::deserialize(read).unwrap(), small());
            let text = small().to_string();
            let read: ::serde::de::value::StrDeserializer<'_, ValueError> = text.as_str().into_deserializer();
            assert_eq!(TicketBatch::deserialize(read).unwrap(), small());
        }

        #[test]
        fn a_sequence_without_an_end_is_refused_at_the_maximum() {
            let read = SeqDeserializer::<_, ValueError>::new(std::iter::repeat(0_u8));
            let error = TicketBatch::deserialize(read).unwrap_err();
            assert!(error.to_string().contains("at most 27787300 bytes"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn any_batch_comes_back(slices in vec((0_u64..6, 0..=BYTES, 0..=BYTES), 0..80)) {
            let slices: Vec<_> = slices.into_iter().map(|(at, from, to)| (at, from.min(to), from.abs_diff(to))).collect();
            let batch = batch(&slices);
            prop_assert_eq!(batch.len(), slices.len());
            for (place, (serial, offset, length)) in slices.iter().enumerate() {
                let ticket = batch.ticket(place).unwrap();
                prop_assert_eq!((ticket.serial, ticket.offset, ticket.length), (*serial, *offset, *length));
            }
            prop_assert_eq!(TicketBatch::from_bytes(&batch.to_bytes()).unwrap(), batch);
        }

        #[test]
        fn garbage_never_panics_and_is_never_a_batch(mut bytes in vec(any::<u8>(), 0..600), head: bool) {
            if head && bytes.len() >= 12 {
                bytes[..12].copy_from_slice(b"HWTB\x01\0\x01\0\0\0\0\0");
            }
            prop_assert!(TicketBatch::from_bytes(&bytes).is_err());
        }

        /// What is read in spite of changes has no other bytes, so nothing of it was overlooked.
        #[test]
        fn changes_with_a_good_checksum_are_refused_or_meant(changes in vec((any::<usize>(), any::<u8>()), 1..4), cut in 0..30_usize) {
            let mut changed = Vec::new();
            let read = forged(&small(), |bytes| {
                for (at, value) in changes {
                    let at = at % bytes.len();
                    bytes[at] = value;
                }
                bytes.truncate(bytes.len() - cut.saturating_sub(20));
                changed = bytes.clone();
            });
            if let Ok(batch) = read {
                let mut bytes = batch.to_bytes();
                // The version of a format that a newer library wrote.
                bytes[4..6].copy_from_slice(&changed[4..6]);
                bytes.truncate(bytes.len() - SUM);
                if changed[4..6] == [1, 0] {
                    prop_assert_eq!(bytes, changed);
                }
                for slice in &batch.slices {
                    let bytes = batch.allocations[slice.allocation as usize].allocation_bytes;
                    prop_assert!(slice.offset <= bytes && slice.length <= bytes - slice.offset);
                }
            }
        }

        #[test]
        fn text_never_panics(text in ".{0,300}") {
            prop_assert!(text.parse::<TicketBatch>().is_err());
        }
    }
}
