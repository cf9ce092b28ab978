//! Legacy handles of memory and events: 64 bytes that name an object in another process.
//!
//! The bytes carry no descriptor, so an importer opens the exporter's memory file through `/proc/PID/fd/N`. They are
//! little-endian:
//!
//! | bytes | content |
//! |---|---|
//! | 0..8 | the kind of the object |
//! | 8..16 | the exporter: process and the low half of its start time |
//! | 16..24 | the descriptor in that process, and the device's ordinal |
//! | 24..32 | the file's inode |
//! | 32..56 | memory: offset (in pages, 30 bits) and number of the allocation, bytes, offset in it; event: first and last word of the mock's payload |
//! | 56..64 | a checksum of the above |
//!
//! A handle is stale if its process has ended or its descriptor names another file. A free of the allocation is not detected.
//! Opening it then is undefined, as with the vendor.

use std::fs::OpenOptions;
use std::os::fd::{AsRawFd, OwnedFd};

use highwater_hal::{Backend, DevicePtr, EventHandle};
use highwater_mock::simulated as mock;

use crate::blocks::{Kind, MEMORY};
use crate::code::{Answer, Code};
use crate::current::{where_needed, with_context};
use crate::devices;
use crate::events::flags;
use crate::process::simulation;
use crate::variants::{Vendor, hip_major, vendor};

/// A handle in its binary format.
pub type Handle = [u8; 64];

const OF_MEMORY: u64 = u64::from_le_bytes(*b"HWSIMMEM");
const OF_EVENT: u64 = u64::from_le_bytes(*b"HWSIMEVT");
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
const LAZY_ENABLE_PEER_ACCESS: u32 = 1;

/// The unit of an allocation's offset in a handle, and the bits that it takes.
const PAGE: u64 = 4096;
const PAGE_BITS: u32 = 30;

/// The fields of a handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Words {
    what: u64,
    process: u32,
    start: u32,
    descriptor: u32,
    device: u32,
    inode: u64,
    rest: [u64; 3],
}

/// FNV-1a.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, &byte| (sum ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

fn pair(low: u32, high: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

impl Words {
    fn seal(&self) -> Handle {
        let [a, b, c] = self.rest;
        let words =
            [self.what, pair(self.process, self.start), pair(self.descriptor, self.device), self.inode, a, b, c];
        let mut handle = [0; 64];
        for (place, word) in handle.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        let sum = checksum(&handle[..56]);
        handle[56..].copy_from_slice(&sum.to_le_bytes());
        handle
    }

    /// Returns `None` for bytes that `seal` did not create.
    fn open(handle: &Handle) -> Option<Self> {
        let mut words = [0; 8];
        for (word, place) in words.iter_mut().zip(handle.chunks_exact(8)) {
            *word = u64::from_le_bytes(place.try_into().ok()?);
        }
        let [what, process, descriptor, inode, a, b, c, sum] = words;
        (sum == checksum(&handle[..56])).then_some(Self {
            what,
            process: process as u32,
            start: (process >> 32) as u32,
            descriptor: descriptor as u32,
            device: (descriptor >> 32) as u32,
            inode,
            rest: [a, b, c],
        })
    }

    /// Describes an object of this process.
    fn own(what: u64, file: &OwnedFd, device: u32, rest: [u64; 3]) -> Answer<Self> {
        let process = std::process::id();
        let start = mock::start_time(process).ok_or(Code::OPERATING_SYSTEM)?;
        let descriptor = u32::try_from(file.as_raw_fd()).map_err(|_| Code::OPERATING_SYSTEM)?;
        let (inode, _) = mock::check_file(file)?;
        Ok(Self { what, process, start, descriptor, device, inode, rest })
    }

    /// Opens the exporter's file.
    fn file(&self) -> Answer<OwnedFd> {
        if self.process == std::process::id() {
            return Err(Code::INVALID_CONTEXT);
        }
        // A reused process id names another process.
        if mock::start_time(self.process) != Some(self.start) {
            return Err(Code::INVALID_HANDLE);
        }
        let path = format!("/proc/{}/fd/{}", self.process, self.descriptor);
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(|_| Code::INVALID_HANDLE)?;
        let file = OwnedFd::from(file);
        match mock::check_file(&file) {
            Ok((inode, _)) if inode == self.inode => Ok(file),
            _ => Err(Code::INVALID_HANDLE),
        }
    }
}

/// Offset and number of an allocation in one word: offsets are whole pages, of 4 TiB at most.
fn place_and_serial(offset: u64, serial: u64) -> Answer<u64> {
    let page = offset / PAGE;
    let fits = offset.is_multiple_of(PAGE) && page >> PAGE_BITS == 0 && serial >> (64 - PAGE_BITS) == 0;
    if fits { Ok(serial << PAGE_BITS | page) } else { Err(Code::UNKNOWN) }
}

/// `cuIpcGetMemHandle`: a handle of the whole allocation that contains an address. HIP's handle opens at that address again.
///
/// # Errors
/// 1 for null; 201 without a context (CUDA); 1 for memory that `cuMemAlloc` did not return; 801 if the device shares no memory.
pub fn export_memory(address: u64) -> Answer<Handle> {
    simulation()?;
    if address == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let simulation = where_needed()?;
    let (start, block) = MEMORY.around(address).ok_or(Code::INVALID_VALUE)?;
    if block.kind != Kind::Plain {
        return Err(Code::INVALID_VALUE);
    }
    simulation.check_context(block.device)?;
    if simulation.capabilities(block.device)?.ipc_transports.is_empty() {
        return Err(Code::NOT_SUPPORTED);
    }
    let (offset, bytes, serial) =
        simulation.hooks.pages(block.device, DevicePtr::new(start)).map_err(|error| simulation.code_of(error))?;
    let file = simulation.hooks.memory_file(block.device).map_err(|error| simulation.code_of(error))?;
    let is_hip = vendor() == Vendor::Hip;
    let inside = if is_hip { address - start } else { 0 };
    // HIP's handle has the owner's ordinal.
    let device = if is_hip { devices::ordinal(block.device)? as u32 } else { block.device };
    Ok(Words::own(OF_MEMORY, file, device, [place_and_serial(offset, serial)?, bytes, inside])?.seal())
}

/// `cuIpcOpenMemHandle_v2`, for the current context's device. Another open of the same memory returns the same address, and is
/// counted.
///
/// # Errors
/// 201 without a context and in the process that exported it, 1 for other flags and for an unknown handle, 400 if the exporter
/// has ended. HIP 7: 1 if this process sees no device with the owner's ordinal.
pub fn open_memory(handle: &Handle, open_flags: u32) -> Answer<u64> {
    let (simulation, device) = with_context()?;
    let is_hip = vendor() == Vendor::Hip;
    if open_flags != LAZY_ENABLE_PEER_ACCESS {
        return Err(Code::INVALID_VALUE);
    }
    let words = Words::open(handle).filter(|words| words.what == OF_MEMORY).ok_or(Code::INVALID_VALUE)?;
    if is_hip && hip_major() >= 7 {
        devices::get(words.device as i32).map_err(|_| Code::INVALID_VALUE)?;
    }
    let file = words.file()?;
    // CUDA refuses the handle first, and HIP's calls do not check for captures.
    if !is_hip {
        simulation.check_unsafe_call()?;
    }
    let [place, bytes, inside] = words.rest;
    let (offset, serial) = ((place & ((1 << PAGE_BITS) - 1)) * PAGE, place >> PAGE_BITS);
    let ptr = simulation.hooks.open(device, &file, offset, bytes, serial).map_err(|error| simulation.code_of(error))?;
    let mut blocks = MEMORY.blocks.write();
    if let Some(block) = blocks.get_mut(&ptr.get())
        && let Kind::Imported { opens } = &mut block.kind
    {
        *opens += 1;
        return Ok(ptr.get() + inside);
    }
    drop(blocks);
    MEMORY.insert(ptr.get(), bytes, device, Kind::Imported { opens: 1 });
    Ok(ptr.get() + inside)
}

/// `cuIpcCloseMemHandle`. The last close waits for the device's work. HIP accepts any address of the memory.
///
/// # Errors
/// 201 without a context (CUDA), 1 for an address that `cuIpcOpenMemHandle` did not return, the code of a lost context.
pub fn close_memory(address: u64) -> Answer<()> {
    let simulation = where_needed()?;
    let address = match MEMORY.around(address) {
        Some((start, _)) if vendor() == Vendor::Hip => start,
        _ => address,
    };
    let mut blocks = MEMORY.blocks.write();
    let block = blocks.get_mut(&address).ok_or(Code::INVALID_VALUE)?;
    let device = block.device;
    simulation.check_context(device)?;
    let Kind::Imported { opens } = &mut block.kind else { return Err(Code::INVALID_VALUE) };
    // As for an open.
    if vendor() == Vendor::Cuda {
        simulation.check_unsafe_call()?;
    }
    *opens -= 1;
    let last = *opens == 0;
    if last {
        blocks.remove(&address);
    }
    drop(blocks);
    if last {
        simulation.hooks.wait_for_device(device);
    }
    simulation.hooks.close(device, DevicePtr::new(address)).map_err(|error| simulation.code_of(error))
}

/// `cuIpcGetEventHandle`.
///
/// # Errors
/// 201 without a context (CUDA), 400 for an event that was not created for other processes, or was opened here.
pub fn export_event(raw: u64) -> Answer<Handle> {
    let simulation = where_needed()?;
    let event = simulation.event(raw)?;
    if event.flags & flags::INTERPROCESS == 0 || event.is_import {
        return Err(Code::INVALID_HANDLE);
    }
    let mut exported = event.exported.lock();
    if exported.is_none() {
        let sharing = simulation.gpu.ipc_sharing().ok_or(Code::NOT_SUPPORTED)?;
        *exported = Some(sharing.export_event(event.id).map_err(|error| simulation.code_of(error))?);
    }
    let handle = exported.as_ref().ok_or(Code::UNKNOWN)?;
    let descriptor = handle.descriptor.as_ref().ok_or(Code::UNKNOWN)?;
    let word = |at: usize| handle.payload[at..at + 8].try_into().map(u64::from_le_bytes).map_err(|_| Code::UNKNOWN);
    Ok(Words::own(OF_EVENT, descriptor.as_ref(), event.device, [word(0)?, word(56)?, 0])?.seal())
}

/// `cuIpcOpenEventHandle`, for the current context's device.
///
/// # Errors
/// 201 without a context and in the process that exported it, 1 for an unknown handle and for an event of another device, 400
/// if the exporter has ended.
pub fn open_event(handle: &Handle) -> Answer<u64> {
    let (simulation, device) = with_context()?;
    let words = Words::open(handle).filter(|words| words.what == OF_EVENT).ok_or(Code::INVALID_VALUE)?;
    let file = words.file()?;
    let mut payload = [0; 64];
    payload[..8].copy_from_slice(&words.rest[0].to_le_bytes());
    payload[56..].copy_from_slice(&words.rest[1].to_le_bytes());
    let uuid = simulation.gpu.device_info(device).map_err(|error| simulation.code_of(error))?.uuid;
    let handle = EventHandle::new(uuid, payload).with_descriptor(highwater_hal::Descriptor::new(file));
    let sharing = simulation.gpu.ipc_sharing().ok_or(Code::NOT_SUPPORTED)?;
    let id = sharing.open_event(device, &handle).map_err(|error| simulation.code_of(error))?;
    Ok(simulation.insert_event(id, device, flags::DISABLE_TIMING | flags::INTERPROCESS, true))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offset_and_number_of_an_allocation_share_a_word() {
        assert_eq!(place_and_serial(3 * PAGE, 5), Ok(5 << PAGE_BITS | 3));
        assert!(place_and_serial((4 << 40) - PAGE, (1 << 34) - 1).is_ok());
        for (offset, serial) in [(1, 1), (4 << 40, 1), (0, 1 << 34)] {
            assert_eq!(place_and_serial(offset, serial), Err(Code::UNKNOWN));
        }
    }

    #[test]
    fn a_handle_is_opened_as_it_was_sealed_or_not_at_all() {
        let words =
            Words { what: OF_MEMORY, process: 7, start: 8, descriptor: 9, device: 1, inode: 10, rest: [11, 12, 13] };
        let handle = words.seal();
        assert_eq!(Words::open(&handle), Some(words));
        for index in 0..64 {
            let mut altered = handle;
            altered[index] ^= 1;
            assert_eq!(Words::open(&altered), None, "byte {index}");
        }
        assert_eq!(Words::open(&[0; 64]), None);
    }
}
