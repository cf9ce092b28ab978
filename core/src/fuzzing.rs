//! The parsers of bytes that other processes write, each with the promises that hold for every input.
//!
//! A function takes one input and panics if a promise does not hold. `scripts/fuzz.sh` calls it with generated inputs. The test below
//! calls it with the inputs in `fuzz/corpus`. This module exists in tests and under `--cfg fuzzing` only.

use crate::ledger::{DeviceBlockInfo, Held, Ledger};
use crate::sharing::fuzzed;
use highwater_hal::{DevicePtr, Error, ErrorKind, Result};

/// Reads a ticket, from bytes and from text.
pub fn ticket(data: &[u8]) {
    fuzzed::ticket(data);
}

/// Reads a batch of tickets, from bytes and from text.
pub fn batch(data: &[u8]) {
    fuzzed::batch(data);
}

/// Reads a message between exporter and importer.
pub fn message(data: &[u8]) {
    fuzzed::message(data);
}

/// Reads a list of shared memory.
pub fn listing(data: &[u8]) {
    fuzzed::listing(data);
}

/// Reads the state of a holder.
pub fn state(data: &[u8]) {
    fuzzed::state(data);
}

/// Checks that an error has a remedy and one of the kinds that a parser returns.
pub(crate) fn is_refusal(error: &Error) {
    assert!(matches!(error.kind(), ErrorKind::InvalidArgument | ErrorKind::Unsupported), "{error}");
    assert!(!error.hint().is_empty(), "{error}");
}

/// A block as the model of the ledger knows it.
#[derive(Debug, Clone, Copy)]
struct Known {
    info: DeviceBlockInfo,
    owned: bool,
    divided: bool,
    /// 0 for memory of this process.
    opens: u32,
}

impl Known {
    fn start(&self) -> u128 {
        self.info.base.get().into()
    }

    fn end(&self) -> u128 {
        self.start() + self.info.bytes as u128
    }
}

/// The model: a list that is searched from its start to its end.
#[derive(Debug, Default)]
struct Model(Vec<Known>);

impl Model {
    /// Returns whether the ledger has to accept a block.
    fn insert(&mut self, new: Known) -> bool {
        let meets =
            |known: &Known| known.start() == new.start() || (known.start() < new.end() && new.start() < known.end());
        let fits = new.end() <= u128::from(u64::MAX) && !self.0.iter().any(meets);
        if fits {
            self.0.push(new);
        }
        fits
    }

    fn insert_opened(&mut self, info: DeviceBlockInfo) -> bool {
        match self.0.iter_mut().find(|known| known.info == info && known.opens > 0) {
            Some(known) => {
                known.opens += 1;
                true
            }
            None => self.insert(Known { info, owned: false, divided: false, opens: 1 }),
        }
    }

    fn at(&self, ptr: DevicePtr) -> Option<usize> {
        self.0.iter().position(|known| known.info.base == ptr)
    }

    fn holding(&self, ptr: DevicePtr) -> Option<Known> {
        let at = u128::from(ptr.get());
        self.0.iter().copied().find(|known| !known.divided && known.start() <= at && at < known.end())
    }

    /// Removes a block, or returns the reason why the ledger must not.
    fn remove(&mut self, device: u32, ptr: DevicePtr) -> std::result::Result<DeviceBlockInfo, ErrorKind> {
        match self.at(ptr) {
            Some(at) if self.0[at].info.device == device => Ok(self.0.swap_remove(at).info),
            Some(_) => Err(ErrorKind::WrongDevice),
            None => Err(ErrorKind::InvalidPointer),
        }
    }

    fn held(&self, device: u32) -> Held {
        let of = |owned: bool| {
            let own = |known: &&Known| known.info.device == device && !known.divided && known.owned == owned;
            self.0.iter().filter(own).map(|known| known.info.bytes as u64).sum()
        };
        Held { buffers: of(true), others: of(false) }
    }
}

/// Bytes of a step of [`ledger`].
const STEP: usize = 4;

/// Obeys steps on a ledger and on its model, which must agree.
///
/// A step has four bytes: the operation with the device, the address in units of 16 bytes, the size in units of 8 bytes, and an offset
/// of the address. The byte 255 means the last address of all, or the largest size.
pub fn ledger(data: &[u8]) {
    let ledger = Ledger::default();
    let mut model = Model::default();
    let (steps, _) = data.as_chunks::<STEP>();
    // Longer inputs find no more, and the model is slow.
    for [operation, address, size, add] in steps.iter().take(12) {
        let device = u32::from(operation >> 7);
        let base = if *address == u8::MAX { u64::MAX } else { u64::from(*address) * 16 };
        let ptr = DevicePtr::new(base.saturating_add(u64::from(*add % 16)));
        let bytes = if *size == u8::MAX { usize::MAX } else { usize::from(*size) * 8 };
        let info = DeviceBlockInfo { device, base: ptr, bytes };
        let known = Known { info, owned: false, divided: false, opens: 0 };
        match operation % 8 {
            0 => agree(ledger.insert_device(info), model.insert(known)),
            1 => agree(ledger.insert_owned(info), model.insert(Known { owned: true, ..known })),
            2 => agree(ledger.insert_divided(info), model.insert(Known { divided: true, ..known })),
            3 => agree(ledger.insert_opened(info), model.insert_opened(info)),
            4 => {
                let removed = ledger.remove_device(device, ptr);
                assert_eq!(removed.map_err(|error| error.kind()), model.remove(device, ptr));
            }
            5 => {
                let removed = ledger.remove_opened(device, ptr).map_err(|error| error.kind());
                match model.at(ptr).map(|at| &mut model.0[at]) {
                    Some(known) if known.info.device == device && known.opens > 1 => {
                        known.opens -= 1;
                        assert_eq!(removed, Ok(known.info));
                    }
                    _ => assert_eq!(removed, model.remove(device, ptr)),
                }
            }
            6 => {
                ledger.set_dropped(ptr);
                model.at(ptr).into_iter().for_each(|at| model.0[at].owned = false);
            }
            _ => assert_eq!(ledger.find_device(ptr), model.holding(ptr).map(|known| known.info)),
        }
    }
    for device in 0..2 {
        assert_eq!(ledger.held_bytes(device), model.held(device));
    }
    for known in std::mem::take(&mut model.0) {
        assert_eq!(ledger.remove_device(known.info.device, known.info.base).ok(), Some(known.info));
        assert_eq!(ledger.find_device(known.info.base), None);
    }
}

fn agree(inserted: Result<()>, fits: bool) {
    assert_eq!(inserted.is_ok(), fits);
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    /// Calls a parser with each kept input.
    fn replay(name: &str, least: usize, parser: fn(&[u8])) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(name);
        let mut files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        assert!(files.len() >= least, "{} has only {} inputs", folder.display(), files.len());
        for file in files {
            let input = std::fs::read(&file).unwrap();
            let held = std::panic::catch_unwind(|| parser(&input));
            assert!(held.is_ok(), "a promise does not hold for {}", file.display());
        }
    }

    #[test]
    fn kept_inputs_of_tickets() {
        replay("ticket", 10, super::ticket);
    }

    #[test]
    fn kept_inputs_of_batches() {
        replay("batch", 10, super::batch);
    }

    #[test]
    fn kept_inputs_of_messages() {
        replay("message", 10, super::message);
    }

    #[test]
    fn kept_inputs_of_listings() {
        replay("listing", 10, super::listing);
    }

    #[test]
    fn kept_inputs_of_states() {
        replay("state", 10, super::state);
    }

    #[test]
    fn kept_inputs_of_the_ledger() {
        replay("ledger", 10, super::ledger);
    }
}
