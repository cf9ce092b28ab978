//! The default memory pools: their settings and high-water marks.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use crate::blocks::MEMORY;
use crate::code::{Answer, Code};
use crate::devices;
use crate::process::simulation;
use crate::variants::{Vendor, vendor};

/// The value of an attribute of a pool or a pointer, in its width in C.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attribute {
    /// A number or a flag of 32 bits.
    Narrow(u32),
    /// An address, a size or a mask of 64 bits.
    Wide(u64),
}

const HANDLES: u64 = 0x00d0_0000_0000;
const STEP: u64 = 0x1000;

/// The settings and high-water marks of a device's default pool. The pool reports as reserved the bytes that its threshold lets
/// it keep. The memory itself returns to the device at once, so no allocation fails because of it.
#[derive(Debug, Clone, Copy)]
struct Pool {
    reuse: [u32; 3],
    threshold: u64,
    /// An upper bound; a read applies the threshold.
    reserved: u64,
    highest_reserved: u64,
    highest: u64,
}

impl Pool {
    /// Returns the bytes that are used or kept if `used` bytes are used.
    fn reserved(&mut self, used: u64) -> u64 {
        self.reserved = self.reserved.min(self.threshold).max(used);
        self.reserved
    }
}

/// The pools whose settings differ from the initial ones, by device.
static POOLS: Mutex<BTreeMap<u32, Pool>> = Mutex::new(BTreeMap::new());

/// Runs `body` on a device's pool, with the bytes that are allocated from it.
fn with<R>(device: u32, body: impl FnOnce(&mut Pool, u64) -> R) -> R {
    let used = MEMORY.ordered_bytes(device);
    let initial = Pool { reuse: [1; 3], threshold: 0, reserved: 0, highest_reserved: 0, highest: 0 };
    body(POOLS.lock().entry(device).or_insert(initial), used)
}

/// Returns the handle of a device's default pool.
pub(crate) fn handle_of(device: u32) -> u64 {
    HANDLES + u64::from(device) * STEP
}

/// Returns the device of a pool's handle.
fn device_of(raw: u64) -> Answer<u32> {
    let simulation = simulation()?;
    let device = raw.checked_sub(HANDLES).filter(|offset| offset.is_multiple_of(STEP)).map(|offset| offset / STEP);
    let device = device.and_then(|device| u32::try_from(device).ok()).ok_or(Code::INVALID_VALUE)?;
    simulation.check_device(device).map_err(|_| Code::INVALID_VALUE)?;
    Ok(device)
}

/// Raises the high-water marks of a pool after an allocation.
pub(crate) fn note_use(device: u32) {
    with(device, |pool, used| {
        pool.highest = pool.highest.max(used);
        pool.highest_reserved = pool.reserved(used).max(pool.highest_reserved);
    });
}

/// `cuDeviceGetDefaultMemPool`.
///
/// # Errors
/// 101 if no such device exists, 801 if it has no pools.
pub fn default(device: u32) -> Answer<u64> {
    let simulation = simulation()?;
    simulation.check_device(device)?;
    if !simulation.capabilities(device)?.stream_ordered_memory {
        return Err(Code::NOT_SUPPORTED);
    }
    Ok(handle_of(device))
}

/// Checks a call about a pool. CUDA: 900 while a capture is open.
fn check_call() -> Answer<()> {
    let simulation = simulation()?;
    if vendor() == Vendor::Cuda { simulation.check_unsafe_call() } else { Ok(()) }
}

/// `cuMemPoolGetAttribute`.
///
/// # Errors
/// 1 for an unknown pool or attribute. CUDA: 900 while a capture is open.
pub fn attribute(raw: u64, attribute: u32) -> Answer<Attribute> {
    check_call()?;
    with(device_of(raw)?, |pool, used| match attribute {
        1..=3 => Ok(Attribute::Narrow(pool.reuse[attribute as usize - 1])),
        4 => Ok(Attribute::Wide(pool.threshold)),
        5 => Ok(Attribute::Wide(pool.reserved(used))),
        6 => Ok(Attribute::Wide(pool.highest_reserved)),
        7 => Ok(Attribute::Wide(used)),
        8 => Ok(Attribute::Wide(pool.highest)),
        _ => Err(Code::INVALID_VALUE),
    })
}

/// Returns whether `cuMemPoolSetAttribute` reads 64 bits for this attribute, instead of 32.
///
/// # Errors
/// 1 for an attribute that cannot be set.
pub fn attribute_is_wide(attribute: u32) -> Answer<bool> {
    match attribute {
        1..=3 => Ok(false),
        4 | 6 | 8 => Ok(true),
        _ => Err(Code::INVALID_VALUE),
    }
}

/// `cuMemPoolSetAttribute`.
///
/// # Errors
/// 1 for an unknown pool, an attribute that cannot be set, and a high-water mark other than 0. CUDA: 900 while a capture is
/// open.
pub fn set_attribute(raw: u64, attribute: u32, value: Attribute) -> Answer<()> {
    check_call()?;
    with(device_of(raw)?, |pool, used| {
        match (attribute, value) {
            (1..=3, Attribute::Narrow(value)) => pool.reuse[attribute as usize - 1] = value,
            (4, Attribute::Wide(value)) => {
                // Memory that the old threshold did not keep is gone.
                pool.reserved(used);
                pool.threshold = value;
            }
            (6, Attribute::Wide(0)) => pool.highest_reserved = pool.reserved(used),
            (8, Attribute::Wide(0)) => pool.highest = used,
            _ => return Err(Code::INVALID_VALUE),
        }
        Ok(())
    })
}

/// `cuMemPoolTrimTo`: keeps at most `keep` bytes.
///
/// # Errors
/// 1 for an unknown pool. CUDA: 900 while a capture is open.
pub fn trim(raw: u64, keep: usize) -> Answer<()> {
    check_call()?;
    with(device_of(raw)?, |pool, _| pool.reserved = pool.reserved.min(keep as u64));
    Ok(())
}

/// `cuMemPoolSetAccess` for one device. Copies reach the memory of every device in any case.
///
/// # Errors
/// 1 for an unknown pool or device, and for removing the access of the pool's own device; 217 between devices without peer
/// access.
pub fn set_access(raw: u64, device: i32, flags: u32) -> Answer<()> {
    let simulation = simulation()?;
    let own = device_of(raw)?;
    let device = devices::get(device).map_err(|_| Code::INVALID_VALUE)?;
    match flags {
        3 if device == own || simulation.capabilities(own)?.peer_copy => Ok(()),
        3 => Err(Code::PEER_ACCESS_UNSUPPORTED),
        0 if device != own => Ok(()),
        _ => Err(Code::INVALID_VALUE),
    }
}
