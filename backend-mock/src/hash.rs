//! Two functions of bits: a checksum and a scrambler.

/// Returns a checksum that detects accidental changes: FNV-1a of 64 bits.
pub(crate) fn checksum(parts: &[&[u8]]) -> u64 {
    let bytes = parts.iter().copied().flatten();
    bytes.fold(0xcbf2_9ce4_8422_2325, |sum, &byte| (sum ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// Maps numbers to numbers one to one, without pattern: the step of splitmix64.
pub(crate) fn scramble(value: u64) -> u64 {
    highwater_hal::SplitMix64::new(value).draw()
}
