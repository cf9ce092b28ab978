//! The handle of a segment, as PyTorch's allocator writes it.
//!
//! | bytes | content |
//! | --- | --- |
//! | 64 in all | the vendor's legacy handle; every version of PyTorch opens it |
//! | 0 | the version: 1 to 3. A reader refuses later ones |
//! | 1 | `c`: a block of `cudaMalloc`; `e`: an expandable segment |
//! | 2.. | `c`: the vendor's legacy handle, alike in all versions |

use highwater_core::{Error, ErrorKind, Result};

/// The newest version that is understood: that of PyTorch 2.13.
const NEWEST: u8 = 3;
/// Bytes of the vendor's handles of memory and of events.
pub(crate) const VENDOR_BYTES: usize = 64;

/// Returns the vendor's legacy handle.
pub(crate) fn legacy(operation: &'static str, handle: &[u8]) -> Result<[u8; VENDOR_BYTES]> {
    if let Ok(bare) = handle.try_into() {
        return Ok(bare);
    }
    let refused = |kind, message: String, hint| Err(Error::new(kind, operation, message).with_hint(hint));
    const WHOLE: &str = "pass the second field of `_share_cuda_` as it is";
    match handle {
        [version, _, ..] if *version > NEWEST || *version == 0 => {
            let message = format!("the handle has version {version}, expected 1 to {NEWEST}");
            refused(ErrorKind::Unsupported, message, "use a version of Highwater that knows this version of PyTorch")
        }
        [_, b'c', payload @ ..] => match payload.try_into() {
            Ok(payload) => Ok(payload),
            Err(_) => {
                let message = format!("the handle of a block has {} bytes, expected {VENDOR_BYTES}", payload.len());
                refused(ErrorKind::InvalidArgument, message, WHOLE)
            }
        },
        [_, b'e', ..] => refused(
            ErrorKind::Unsupported,
            "the storage lies in an expandable segment, which travels by descriptors of the sender's process"
                .to_owned(),
            "in the sender, set `expandable_segments:False` for this allocation, or adopt it with `Device::adopt` and send a \
             ticket",
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
    use super::*;

    #[test]
    fn a_block_is_found_in_each_version_and_all_else_is_refused() {
        let vendor: [u8; 64] = std::array::from_fn(|at| at as u8);
        assert_eq!(legacy("open", &vendor).unwrap(), vendor);
        let with = |head: &[u8], payload: &[u8]| legacy("open", &[head, payload].concat());
        for version in 1..=NEWEST {
            assert_eq!(with(&[version, b'c'], &vendor).unwrap(), vendor);
            assert_eq!(with(&[version, b'e'], &[0; 28]).unwrap_err().kind(), ErrorKind::Unsupported);
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
