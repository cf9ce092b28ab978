//! [`TorchStorage`]: the eight fields that PyTorch sends, and their text.

use std::fmt;
use std::str::FromStr;

use highwater_core::{Error, ErrorKind, Result};

use crate::counters::Counter;

/// The fields of the tuple that PyTorch's `_share_cuda_` returns and `_new_shared_cuda` takes, in that order.
///
/// The text form separates them by colons. Bytes are hexadecimal digits, and all other fields are decimal numbers:
///
/// ```
/// # use highwater_pytorch::TorchStorage;
/// let text = format!("0:{}:4000:512:{}:7:{}:1", "ab".repeat(64), "2f746f7263685f315f325f33", "00".repeat(64));
/// let storage: TorchStorage = text.parse()?;
/// assert_eq!((storage.size_bytes, storage.offset_bytes), (4000, 512));
/// assert_eq!(storage.ref_counter_handle, b"/torch_1_2_3");
/// assert_eq!(storage.to_string(), text);
/// # Ok::<(), highwater_core::Error>(())
/// ```
///
/// In Python:
///
/// ```text
/// text = ":".join(f.hex() if isinstance(f, bytes) else str(int(f)) for f in storage._share_cuda_())
///
/// d, h, n, o, c, s, e, w = text.split(":")
/// b = bytes.fromhex
/// storage = torch.UntypedStorage._new_shared_cuda(int(d), b(h), int(n), int(o), b(c), int(s), b(e), w.strip() == "1")
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TorchStorage {
    /// Ordinal of the device in the sender's process. The receiver may have other ordinals.
    pub device: u32,
    /// The handle of the segment: 64 bytes, or PyTorch's version, type and payload.
    pub handle: Vec<u8>,
    /// Bytes of the storage.
    pub size_bytes: u64,
    /// Offset of the storage in the segment.
    pub offset_bytes: u64,
    /// Name of the file of counters, with a slash at the start.
    pub ref_counter_handle: Vec<u8>,
    /// Slot of the counter in that file.
    pub ref_counter_offset: u64,
    /// The vendor's handle of the event that the sender's work precedes: 64 bytes.
    pub event_handle: Vec<u8>,
    /// Whether the receiver must wait for the event. If false, the sender has waited for its work.
    pub event_sync_required: bool,
}

impl TorchStorage {
    /// Counts the storage as released without opening it, as PyTorch's `_release_ipc_counter` does. A receiver calls it for a
    /// message that it does not open, or a sender for a message that was not delivered. The caller must ensure that no process has
    /// the storage open or opens it afterwards, because its memory may be freed.
    ///
    /// # Errors
    /// `Expired` if the share has ended already, or its file is gone; `InvalidArgument` for invalid fields.
    pub fn release(&self) -> Result<()> {
        Counter::of("release", self)?.release();
        Ok(())
    }
}

impl fmt::Display for TorchStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hex = |f: &mut fmt::Formatter<'_>, bytes: &[u8]| {
            bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}")).and_then(|()| f.write_str(":"))
        };
        write!(f, "{}:", self.device)?;
        hex(f, &self.handle)?;
        write!(f, "{}:{}:", self.size_bytes, self.offset_bytes)?;
        hex(f, &self.ref_counter_handle)?;
        write!(f, "{}:", self.ref_counter_offset)?;
        hex(f, &self.event_handle)?;
        write!(f, "{}", u8::from(self.event_sync_required))
    }
}

/// Returns the error of a field of a text.
#[cold]
fn refused(field: &str, expected: &str) -> Error {
    let message = format!("the field `{field}` of the text of a storage is not {expected}");
    Error::new(ErrorKind::InvalidArgument, "parse", message).with_hint(
        "join the eight fields of `_share_cuda_` by colons, bytes as hexadecimal digits and all else as numbers",
    )
}

fn number<N: FromStr>(field: &str, text: &str) -> Result<N> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| digits).ok_or_else(|| refused(field, "a decimal number in range"))
}

fn bytes(field: &str, text: &str) -> Result<Vec<u8>> {
    let digit = |byte: u8| (byte as char).to_digit(16);
    let byte = |pair: &[u8]| Some((digit(pair[0])? << 4 | digit(pair[1])?) as u8);
    let decoded = text.len().is_multiple_of(2).then(|| text.as_bytes().chunks_exact(2).map(byte).collect());
    decoded.flatten().ok_or_else(|| refused(field, "an even number of hexadecimal digits"))
}

impl FromStr for TorchStorage {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let fields: Vec<&str> = text.trim().split(':').collect();
        let [device, handle, size, offset, file, slot, event, waits] = fields[..] else {
            let message = format!("the text of a storage has {} fields, expected 8", fields.len());
            return Err(Error::new(ErrorKind::InvalidArgument, "parse", message).with_hint(
                "join the eight fields of `_share_cuda_` by colons, bytes as hexadecimal digits and all else as numbers",
            ));
        };
        Ok(Self {
            device: number("device", device)?,
            handle: bytes("handle", handle)?,
            size_bytes: number("size_bytes", size)?,
            offset_bytes: number("offset_bytes", offset)?,
            ref_counter_handle: bytes("ref_counter_handle", file)?,
            ref_counter_offset: number("ref_counter_offset", slot)?,
            event_handle: bytes("event_handle", event)?,
            event_sync_required: match waits {
                "0" => false,
                "1" => true,
                _ => return Err(refused("event_sync_required", "0 or 1")),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_storage() -> impl Strategy<Value = TorchStorage> {
        let bytes = || proptest::collection::vec(any::<u8>(), 0..100);
        (any::<u32>(), bytes(), any::<u64>(), any::<u64>(), bytes(), any::<u64>(), bytes(), any::<bool>()).prop_map(
            |(
                device,
                handle,
                size_bytes,
                offset_bytes,
                ref_counter_handle,
                ref_counter_offset,
                event_handle,
                waits,
            )| {
                TorchStorage {
                    device,
                    handle,
                    size_bytes,
                    offset_bytes,
                    ref_counter_handle,
                    ref_counter_offset,
                    event_handle,
                    event_sync_required: waits,
                }
            },
        )
    }

    proptest! {
        #[test]
        fn the_text_brings_every_storage_back(storage in any_storage()) {
            prop_assert_eq!(storage.to_string().parse::<TorchStorage>().unwrap(), storage);
        }

        #[test]
        fn any_text_is_a_storage_or_an_error(text in ".*") {
            if let Ok(storage) = text.parse::<TorchStorage>() {
                prop_assert_eq!(storage.to_string().parse::<TorchStorage>().unwrap(), storage);
            }
        }
    }

    #[test]
    fn each_field_of_a_text_is_checked() {
        let good = "0:ab:4:0:2f:7:00:1";
        assert!(good.parse::<TorchStorage>().is_ok());
        for (bad, field) in [
            ("", "1 fields"),
            ("0:ab:4:0:2f:7:00", "7 fields"),
            ("-1:ab:4:0:2f:7:00:1", "device"),
            ("0:abc:4:0:2f:7:00:1", "handle"),
            ("0:äx:4:0:2f:7:00:1", "handle"),
            ("0:ab:+4:0:2f:7:00:1", "size_bytes"),
            ("0:ab:4:99999999999999999999:2f:7:00:1", "offset_bytes"),
            ("0:ab:4:0:2g:7:00:1", "ref_counter_handle"),
            ("0:ab:4:0:2f:None:00:1", "ref_counter_offset"),
            ("0:ab:4:0:2f:7:0:1", "event_handle"),
            ("0:ab:4:0:2f:7:00:True", "event_sync_required"),
        ] {
            let error = bad.parse::<TorchStorage>().unwrap_err();
            assert!(error.kind() == ErrorKind::InvalidArgument && error.message().contains(field), "{bad}: {error}");
        }
    }

    #[cfg(feature = "serde")]
    #[test]
    fn serde_brings_it_back() {
        let storage: TorchStorage = "0:ab:4:0:2f:7:00:1".parse().unwrap();
        let json = serde_json::to_string(&storage).unwrap();
        assert_eq!(serde_json::from_str::<TorchStorage>(&json).unwrap(), storage);
    }
}
