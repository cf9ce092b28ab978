//! The promises of the parsers of sharing, for `crate::fuzzing`.

use highwater_hal::{ErrorKind, Result};

use super::batch::TicketBatch;
use super::listing::Listing;
use super::message::{LONGEST, Message};
use super::store;
use super::ticket::{Ticket, from_digits, is_inside, to_digits, values};
use crate::fuzzing::is_refusal;

/// Bytes of the checksum at the end of tickets and batches.
const SUM: usize = 4;

/// Returns the input with a valid checksum. Few inputs have one by chance.
fn with_sum(data: &[u8]) -> Vec<u8> {
    let mut bytes = data[..data.len().saturating_sub(SUM)].to_vec();
    bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
    bytes
}

/// Returns the comparable part of a result.
fn of<T>(read: Result<T>) -> std::result::Result<T, (ErrorKind, String)> {
    read.map_err(|error| (error.kind(), error.message().to_owned()))
}

/// Checks the two notations of one value, from raw bytes and with a valid checksum.
fn both<T: PartialEq + std::fmt::Debug>(
    data: &[u8],
    from_bytes: impl Fn(&[u8]) -> Result<T>,
    from_text: impl Fn(&str) -> Result<T>,
    check: impl Fn(&T, &[u8]),
) {
    for bytes in [data.to_vec(), with_sum(data)] {
        let read = from_bytes(&bytes);
        match &read {
            Ok(value) => {
                check(value, &bytes);
                // Any one bit is protected. The input chooses which.
                let bit = crc32fast::hash(&bytes) as usize % (8 * bytes.len());
                let mut altered = bytes.clone();
                altered[bit / 8] ^= 1 << (bit % 8);
                assert!(from_bytes(&altered).is_err(), "bit {bit} can be altered");
                assert!(from_bytes(&bytes[..bit / 8]).is_err(), "{} bytes are enough", bit / 8);
            }
            Err(error) => is_refusal(error),
        }
        assert_eq!(of(from_text(&to_digits(&bytes))), of(read));
    }
    if let Ok(text) = std::str::from_utf8(data) {
        match from_digits(text) {
            Some(bytes) => assert_eq!(of(from_text(text)), of(from_bytes(&bytes))),
            None => is_refusal(&from_text(text).unwrap_err()),
        }
    }
}

pub(crate) fn ticket(data: &[u8]) {
    both(data, Ticket::from_bytes, str::parse, |ticket, _| {
        assert_eq!(of(Ticket::from_bytes(&ticket.to_bytes())).as_ref(), Ok(ticket));
        assert!(is_inside(ticket.offset, ticket.length, ticket.allocation_bytes));
        check_values::<u8>(ticket.offset, ticket.length);
        check_values::<[u8; 3]>(ticket.offset, ticket.length);
        check_values::<u64>(ticket.offset, ticket.length);
    });
}

/// Checks the range of values against the range of bytes.
fn check_values<T>(offset: u64, length: u64) {
    let size = size_of::<T>() as u64;
    match values::<T>("fuzzed", offset, length) {
        Ok(range) => assert_eq!((range.start as u64 * size, range.len() as u64 * size), (offset, length)),
        Err(error) => {
            is_refusal(&error);
            assert!(!offset.is_multiple_of(size) || !length.is_multiple_of(size), "{error}");
        }
    }
}

pub(crate) fn batch(data: &[u8]) {
    both(data, TicketBatch::from_bytes, str::parse, |batch, bytes| {
        assert_eq!(of(TicketBatch::from_bytes(&batch.to_bytes())).as_ref(), Ok(batch));
        // No input makes a reader allocate more than it justifies.
        assert!(batch.allocations() * 84 + batch.len() * 20 <= bytes.len());
        for slice in 0..batch.len() {
            let ticket = batch.ticket(slice).expect("the batch has this slice");
            assert!(is_inside(ticket.offset, ticket.length, ticket.allocation_bytes));
            assert_eq!(of(Ticket::from_bytes(&ticket.to_bytes())), Ok(ticket));
        }
        assert_eq!(batch.ticket(batch.len()), None);
    });
}

pub(crate) fn message(data: &[u8]) {
    let Some(message) = Message::decode(data) else { return };
    let bytes = message.encode();
    assert!(bytes.len() <= data.len().max(LONGEST));
    assert_eq!(Message::decode(&bytes), Some(message));
}

pub(crate) fn listing(data: &[u8]) {
    let Some(listing) = Listing::decode(data) else { return };
    let bytes = listing.encode();
    assert_eq!(bytes.len(), data.len());
    assert_eq!(Listing::decode(&bytes), Some(listing));
}

pub(crate) fn state(data: &[u8]) {
    for bytes in [data.to_vec(), with_ticket_sums(data)] {
        match store::decode(&bytes) {
            Ok(all) => {
                let again = store::encode(&all);
                assert_eq!(again.len(), bytes.len());
                assert_eq!(of(store::decode(&again)), Ok(all));
            }
            Err(error) => is_refusal(&error),
        }
    }
}

/// Returns a state in which each ticket has a valid checksum.
fn with_ticket_sums(data: &[u8]) -> Vec<u8> {
    /// Bytes of the head of a state, of an allocation beside its ticket and its parts, and of a part.
    const SIZES: (usize, usize, usize) = (16, 44, 72);
    let mut bytes = data.to_vec();
    let number = |bytes: &[u8], at: usize| Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?) as usize);
    let mut at = SIZES.0;
    while let Some(length) = number(&bytes, at) {
        let Some(ticket) = bytes.get_mut(at + 4..at + 4 + length) else { break };
        let summed = with_sum(ticket);
        if summed.len() == length {
            ticket.copy_from_slice(&summed);
        }
        at += 4 + length + SIZES.1;
        let Some(parts) = number(&bytes, at - 4) else { break };
        at += parts * SIZES.2;
    }
    bytes
}
