//! The handle of a segment, as PyTorch's allocator writes it.
//!
//! | bytes | content |
//! | --- | --- |
//! | 64 in all | the vendor's legacy handle; every version of PyTorch opens it |
//! | 0 | the version: 1 to 3. A reader refuses later ones |
//! | 1 | `c`: a block of `cudaMalloc`; `e`: an expandable segment |
//! | 2.. | `c`: the vendor's legacy handle, alike in all versions; `e`: pages, see `expandable` |

use crate::expandable::Pages;
use highwater_core::{Error, ErrorKind, Result};

/// The newest version that this crate understands, that of PyTorch 2.13. Only PyTorch 2.11.0 was run; it writes version 2.
const NEWEST: u8 = 3;
/// The newest version whose pages this crate understands, that of PyTorch 2.12.
const NEWEST_OF_PAGES: u8 = 2;
/// Bytes of the vendor's handles of memory and of events.
pub(crate) const VENDOR_BYTES: usize = 64;

/// A handle of memory.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Handle {
    /// The vendor's legacy handle of a block.
    Block([u8; VENDOR_BYTES]),
    Pages(Pages),
}

/// Reads a handle.
pub(crate) fn read(operation: &'static str, handle: &[u8]) -> Result<Handle> {
    if let Ok(bare) = handle.try_into() {
        return Ok(Handle::Block(bare));
    }
    let refused = |kind, message: String, hint| Err(Error::new(kind, operation, message).with_hint(hint));
    const WHOLE: &str = "pass the second field of `_share_cuda_` as it is";
    match handle {
        [version, _, ..] if *version > NEWEST || *version == 0 => {
            let message = format!("the handle has version {version}, expected 1 to {NEWEST}");
            refused(ErrorKind::Unsupported, message, "use a version of Highwater that knows this version of PyTorch")
        }
        [_, b'c', payload @ ..] => match payload.try_into() {
            Ok(payload) => Ok(Handle::Block(payload)),
            Err(_) => {
                let message = format!("the handle of a block has {} bytes, expected {VENDOR_BYTES}", payload.len());
                refused(ErrorKind::InvalidArgument, message, WHOLE)
            }
        },
        [version, b'e', payload @ ..] if *version <= NEWEST_OF_PAGES => {
            Pages::read(operation, payload).map(Handle::Pages)
        }
        [version, b'e', ..] => refused(
            ErrorKind::Unsupported,
            format!("the handle of an expandable segment has version {version}, expected 1 to {NEWEST_OF_PAGES}"),
            "in the sender, set `expandable_segments:False` for this allocation",
        ),
        [_, other, ..] => {
            let message = format!("the handle has type {other}, expected {} (`c`) or {} (`e`)", b'c', b'e');
            refused(ErrorKind::InvalidArgument, message, WHOLE)
        }
        _ => {
            let message = format!("the handle has {} bytes, expected {VENDOR_BYTES} or more", handle.len());
            refused(ErrorKind::InvalidArgument, message, WHOLE)
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_are_a_handle_or_an_error(
            head in (0_u8..5, prop_oneof![Just(b'c'), Just(b'e'), any::<u8>()]),
            rest in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let handle = [&[head.0, head.1], &rest[..]].concat();
            let is_block = handle.len() == 64 || (matches!(head, (1..=3, b'c')) && rest.len() == 64);
            match read("open", &handle) {
                Ok(Handle::Block(_)) => prop_assert!(is_block),
                Ok(Handle::Pages(_)) => prop_assert!(matches!(head, (1..=2, b'e')) && rest.len() > 24),
                Err(_) => prop_assert!(!is_block),
            }
        }
    }

    #[test]
    fn a_block_is_found_in_each_version_and_all_else_is_refused() {
        let vendor: [u8; 64] = std::array::from_fn(|at| at as u8);
        assert_eq!(read("open", &vendor).unwrap(), Handle::Block(vendor));
        let with = |head: &[u8], payload: &[u8]| read("open", &[head, payload].concat());
        for version in 1..=NEWEST {
            assert_eq!(with(&[version, b'c'], &vendor).unwrap(), Handle::Block(vendor));
            let of_pages = if version <= NEWEST_OF_PAGES { ErrorKind::InvalidArgument } else { ErrorKind::Unsupported };
            assert_eq!(with(&[version, b'e'], &[0; 28]).unwrap_err().kind(), of_pages);
            assert_eq!(with(&[version, b'x'], &vendor).unwrap_err().kind(), ErrorKind::InvalidArgument);
            assert_eq!(with(&[version, b'c'], &vendor[1..]).unwrap_err().kind(), ErrorKind::InvalidArgument);
            assert_eq!(with(&[version], &[]).unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
        for version in [0, NEWEST + 1, 255] {
            assert_eq!(with(&[version, b'c'], &vendor).unwrap_err().kind(), ErrorKind::Unsupported);
        }
        assert_eq!(with(&[], &[]).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
}
