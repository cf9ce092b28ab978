//! The payloads of handles: numbers, and a checksum that ties them to a device and to a memory file.

use crate::hash::checksum;
use crate::sealed_file::FileId;

/// Returns a payload of numbers, with the checksum at its end.
pub(crate) fn seal_payload(numbers: &[u64], uuid: &[u8; 16], file: FileId) -> [u8; 64] {
    let mut payload = [0; 64];
    for (place, number) in payload[..56].chunks_exact_mut(8).zip(numbers) {
        place.copy_from_slice(&number.to_le_bytes());
    }
    let sum = checksum(&[&payload[..56], uuid, &file.inode.to_le_bytes()]);
    payload[56..].copy_from_slice(&sum.to_le_bytes());
    payload
}

/// Returns the numbers of a payload; `None` unless [`seal_payload`] made it for this device and file.
pub(crate) fn open_payload(payload: &[u8; 64], magic: u64, uuid: &[u8; 16], file: FileId) -> Option<[u64; 7]> {
    let mut numbers = [0; 7];
    for (number, place) in numbers.iter_mut().zip(payload.chunks_exact(8)) {
        *number = u64::from_le_bytes(place.try_into().ok()?);
    }
    (numbers[0] == magic && seal_payload(&numbers, uuid, file) == *payload).then_some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sealed_file;

    const MAGIC: u64 = u64::from_le_bytes(*b"HWMKTEST");

    #[test]
    fn a_payload_is_opened_as_it_was_sealed_or_not_at_all() {
        let file = sealed_file::identify(&sealed_file::create("test", 4096).unwrap()).unwrap();
        let other = sealed_file::identify(&sealed_file::create("test", 4096).unwrap()).unwrap();
        let (uuid, wrong_uuid) = ([7; 16], [8; 16]);
        let payload = seal_payload(&[MAGIC, 4096, 100, 3], &uuid, file);
        assert_eq!(payload[8..16], 4096u64.to_le_bytes());
        assert_eq!(open_payload(&payload, MAGIC, &uuid, file), Some([MAGIC, 4096, 100, 3, 0, 0, 0]));
        for index in 0..64 {
            let mut altered = payload;
            altered[index] ^= 1;
            assert_eq!(open_payload(&altered, MAGIC, &uuid, file), None, "byte {index}");
        }
        assert_eq!(open_payload(&payload, MAGIC, &wrong_uuid, file), None);
        assert_eq!(open_payload(&payload, MAGIC, &uuid, other), None, "two files made in this test");
        assert_eq!(open_payload(&payload, MAGIC + 1, &uuid, file), None);
    }
}
