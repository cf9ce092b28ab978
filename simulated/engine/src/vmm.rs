//! Virtual memory management: physical memory, reserved addresses, and mappings.
//!
//! Each physical allocation is a sealed memory file with its device in the file's name, so one descriptor describes it
//! completely. The bytes count against the device's memory in the process that created the allocation. It
//! ends with the last handle, mapping and descriptor of any process.
//!
//! A mapping becomes part of the addresses of each device that gets access to it, at the same address.

use std::collections::BTreeMap;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use highwater_hal::DevicePtr;
use highwater_mock::simulated as mock;
use parking_lot::Mutex;

use crate::blocks::{Block, Kind, MEMORY, around};
use crate::code::{Answer, Code};
use crate::devices;
use crate::handles::{Handles, new_number};
use crate::process::{Simulation, simulation};

/// The unit of sizes and addresses.
pub const GRANULARITY: u64 = 2 << 20;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub const DESCRIPTOR: u32 = 1;
/// `CU_MEM_HANDLE_TYPE_FABRIC`.
pub const FABRIC: u32 = 8;
const NAME: &str = "highwater-simulated-vmm-";

/// The arguments of `cuMemCreate`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Properties {
    /// 1, `CU_MEM_ALLOCATION_TYPE_PINNED`, is the only type.
    pub kind: u32,
    /// [`DESCRIPTOR`], [`FABRIC`], both, or 0 for none.
    pub handle_types: u32,
    /// 1 for a device.
    pub location_kind: u32,
    /// The device's ordinal.
    pub location: i32,
}

/// Physical memory.
#[derive(Debug)]
struct Allocation {
    file: OwnedFd,
    bytes: u64,
    device: u32,
    handle_types: u32,
    /// Its share of the device's memory; `None` for an import.
    taken: Option<DevicePtr>,
    raw: u64,
}

static HANDLES: Handles = Handles::new();

impl Drop for Allocation {
    fn drop(&mut self) {
        // At exit and in a forked child the device is not touched.
        let Ok(simulation) = simulation() else { return };
        if let Some(taken) = self.taken {
            simulation.hooks.give_back(self.device, taken, self.bytes as usize);
        }
        HANDLES.give_back(self.raw);
    }
}

#[derive(Debug)]
struct Handle {
    allocation: Arc<Allocation>,
    uses: u64,
}

#[derive(Debug)]
struct Mapping {
    handle: u64,
    allocation: Arc<Allocation>,
    offset: u64,
    bytes: u64,
}

/// Handles, reserved addresses and mappings.
#[derive(Debug)]
struct Virtual {
    handles: BTreeMap<u64, Handle>,
    reserved: BTreeMap<u64, u64>,
    mappings: BTreeMap<u64, Mapping>,
}

static VIRTUAL: Mutex<Virtual> =
    Mutex::new(Virtual { handles: BTreeMap::new(), reserved: BTreeMap::new(), mappings: BTreeMap::new() });

impl Virtual {
    /// Returns whether a range is reserved and nothing is mapped in it.
    fn is_unused(&self, address: u64, bytes: u64) -> bool {
        let Some(end) = address.checked_add(bytes).filter(|_| bytes > 0) else { return false };
        let is_reserved =
            around(&self.reserved, address, |bytes| *bytes).is_some_and(|(start, length)| end - start <= *length);
        let before = self.mappings.range(..end).next_back();
        is_reserved && before.is_none_or(|(&start, mapping)| start + mapping.bytes <= address)
    }

    /// Returns the start and the length of the mappings that form a range exactly. Returns `None` if the range cuts a mapping
    /// or has a gap.
    fn whole(&self, address: u64, bytes: u64) -> Option<Vec<u64>> {
        let end = address.checked_add(bytes)?;
        let mut next = address;
        let mut found = Vec::new();
        while next < end {
            found.push(next);
            next = next.checked_add(self.mappings.get(&next)?.bytes)?;
        }
        (next == end && bytes > 0).then_some(found)
    }
}

fn check_properties(properties: &Properties) -> Answer<u32> {
    if properties.kind != 1 {
        return Err(Code::INVALID_VALUE);
    }
    match properties.location_kind {
        1 => {}
        // Host memory is not simulated.
        2..=4 => return Err(Code::NOT_SUPPORTED),
        _ => return Err(Code::INVALID_VALUE),
    }
    devices::get(properties.location)
}

/// `cuMemGetAllocationGranularity`.
///
/// # Errors
/// 1 and 101 for impossible properties.
pub fn granularity(properties: &Properties) -> Answer<u64> {
    simulation()?;
    check_properties(properties).map(|_| GRANULARITY)
}

/// `cuMemCreate`.
///
/// # Errors
/// 1 for a size that is 0 or not a multiple of [`GRANULARITY`], and for flags and impossible properties; 101, 2; 800 for fabric
/// handles, 801 for memory of the host.
pub fn create(bytes: usize, properties: &Properties, flags: u64) -> Answer<u64> {
    let simulation = simulation()?;
    let device = check_properties(properties)?;
    let wide = bytes as u64;
    if flags != 0 || wide == 0 || !wide.is_multiple_of(GRANULARITY) || properties.handle_types & !15 != 0 {
        return Err(Code::INVALID_VALUE);
    }
    if properties.handle_types & FABRIC != 0 {
        return Err(Code::NOT_PERMITTED);
    }
    let capabilities = simulation.capabilities(device)?;
    let supported = match properties.handle_types {
        0 => capabilities.mapped_memory,
        DESCRIPTOR => !capabilities.ipc_transports.is_empty(),
        _ => false,
    };
    if !supported {
        return Err(Code::NOT_SUPPORTED);
    }
    let taken = simulation.hooks.take(device, bytes).map_err(|error| simulation.code_of(error))?;
    let file = mock::create_file(&format!("{NAME}{device}"), wide).map_err(|error| {
        simulation.hooks.give_back(device, taken, bytes);
        let is_too_long = error.kind() == std::io::ErrorKind::FileTooLarge;
        if is_too_long { Code::OUT_OF_MEMORY } else { Code::OPERATING_SYSTEM }
    })?;
    let handle_types = properties.handle_types;
    Ok(simulation.add(Allocation { file, bytes: wide, device, handle_types, taken: Some(taken), raw: HANDLES.take() }))
}

impl Simulation {
    fn add(&self, allocation: Allocation) -> u64 {
        let raw = allocation.raw;
        VIRTUAL.lock().handles.insert(raw, Handle { allocation: Arc::new(allocation), uses: 1 });
        raw
    }

    /// Changes a device's access to a mapping.
    fn change_access(&self, address: u64, mapping: &Mapping, device: u32, may: bool) -> Answer<()> {
        let has = |block: &Block| matches!(block.kind, Kind::Mapped { access } if access >> device & 1 == 1);
        let before = MEMORY.blocks.read().get(&address).is_some_and(has);
        if before == may {
            return Ok(());
        }
        if may {
            let file = &mapping.allocation.file;
            self.hooks
                .map(device, address, file, mapping.offset, mapping.bytes, 1 << 63 | new_number())
                .map_err(|error| self.code_of(error))?;
        } else {
            self.hooks.close(device, DevicePtr::new(address)).map_err(|error| self.code_of(error))?;
        }
        if let Some(Block { kind: Kind::Mapped { access }, .. }) = MEMORY.blocks.write().get_mut(&address) {
            *access ^= 1 << device;
        }
        Ok(())
    }
}

/// `cuMemRelease`. The memory stays as long as it is mapped.
///
/// # Errors
/// 1 for an unknown handle.
pub fn release(raw: u64) -> Answer<()> {
    simulation()?;
    let mut table = VIRTUAL.lock();
    let handle = table.handles.get_mut(&raw).ok_or(Code::INVALID_VALUE)?;
    handle.uses -= 1;
    if handle.uses > 0 {
        return Ok(());
    }
    let last = table.handles.remove(&raw);
    drop(table);
    drop(last);
    Ok(())
}

/// `cuMemRetainAllocationHandle`: the handle of the memory that is mapped at an address.
///
/// # Errors
/// 1 if no memory is mapped there.
pub fn retain(address: u64) -> Answer<u64> {
    simulation()?;
    let mut table = VIRTUAL.lock();
    let found = around(&table.mappings, address, |mapping| mapping.bytes);
    let (raw, allocation) =
        found.map(|(_, mapping)| (mapping.handle, Arc::clone(&mapping.allocation))).ok_or(Code::INVALID_VALUE)?;
    table.handles.entry(raw).or_insert(Handle { allocation, uses: 0 }).uses += 1;
    Ok(raw)
}

/// Returns the types of handles of the memory that is mapped from an address on; 0 if none is.
pub(crate) fn handle_types(address: u64) -> u64 {
    VIRTUAL.lock().mappings.get(&address).map_or(0, |mapping| u64::from(mapping.allocation.handle_types))
}

/// `cuMemAddressReserve`.
///
/// # Errors
/// 1 for a size that is 0 or not a multiple of [`GRANULARITY`], an alignment that is not a power of two, and flags.
pub fn reserve(bytes: usize, alignment: usize, flags: u64) -> Answer<u64> {
    let simulation = simulation()?;
    let bytes = bytes as u64;
    let aligned = alignment == 0 || alignment.is_power_of_two();
    if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) || !aligned || flags != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let alignment = GRANULARITY.max(alignment as u64);
    let address = simulation.hooks.reserve(0, bytes, alignment).map_err(|error| simulation.code_of(error))?;
    VIRTUAL.lock().reserved.insert(address, bytes);
    Ok(address)
}

/// `cuMemAddressFree`.
///
/// # Errors
/// 1 for a range that was not reserved in this form, or in which memory is mapped.
pub fn free_addresses(address: u64, bytes: usize) -> Answer<()> {
    let simulation = simulation()?;
    let mut table = VIRTUAL.lock();
    let is_mapped = table.mappings.range(address..address.saturating_add(bytes as u64)).next().is_some();
    if table.reserved.get(&address) != Some(&(bytes as u64)) || is_mapped {
        return Err(Code::INVALID_VALUE);
    }
    table.reserved.remove(&address);
    simulation.hooks.unreserve(0, address);
    Ok(())
}

/// `cuMemMap`. The memory is not accessible before `cuMemSetAccess`.
///
/// # Errors
/// 1 for an unknown handle, for flags, and for addresses that are not a multiple of [`GRANULARITY`], not reserved or already
/// mapped; 801 for lengths and offsets that are no multiples or leave the memory.
pub fn map(address: u64, bytes: usize, offset: usize, raw: u64, flags: u64) -> Answer<()> {
    simulation()?;
    let (bytes, offset) = (bytes as u64, offset as u64);
    let mut table = VIRTUAL.lock();
    let allocation = table.handles.get(&raw).map(|handle| Arc::clone(&handle.allocation));
    let allocation = allocation.ok_or(Code::INVALID_VALUE)?;
    let aligned = [bytes, offset].iter().all(|number| number.is_multiple_of(GRANULARITY));
    let inside = offset.checked_add(bytes).is_some_and(|end| end <= allocation.bytes);
    if flags != 0 || bytes == 0 || !address.is_multiple_of(GRANULARITY) {
        return Err(Code::INVALID_VALUE);
    }
    if !aligned || !inside {
        return Err(Code::NOT_SUPPORTED);
    }
    let end = address.checked_add(bytes).ok_or(Code::INVALID_VALUE)?;
    let reserved = table.reserved.range(..=address).next_back();
    let fits = reserved.is_some_and(|(&start, &length)| end <= start + length);
    let before = table.mappings.range(..end).next_back();
    if !fits || before.is_some_and(|(&start, mapping)| start + mapping.bytes > address) {
        return Err(Code::INVALID_VALUE);
    }
    let device = allocation.device;
    table.mappings.insert(address, Mapping { handle: raw, allocation, offset, bytes });
    MEMORY.insert(address, bytes, device, Kind::Mapped { access: 0 });
    Ok(())
}

/// `cuMemUnmap`. Waits for no work. Does nothing for reserved addresses at which nothing is mapped.
///
/// # Errors
/// 1 for a range that cuts a mapping or has a gap.
pub fn unmap(address: u64, bytes: usize) -> Answer<()> {
    let simulation = simulation()?;
    let mut table = VIRTUAL.lock();
    if table.is_unused(address, bytes as u64) {
        return Ok(());
    }
    let mappings = table.whole(address, bytes as u64).ok_or(Code::INVALID_VALUE)?;
    let mut ended = Vec::new();
    for start in mappings {
        if let Some(mapping) = table.mappings.get(&start) {
            for device in 0..simulation.devices.len() as u32 {
                simulation.change_access(start, mapping, device, false)?;
            }
        }
        MEMORY.remove_if(start, |kind| matches!(kind, Kind::Mapped { .. }));
        ended.extend(table.mappings.remove(&start));
    }
    drop(table);
    drop(ended);
    Ok(())
}

/// `cuMemSetAccess` for one device: 0 removes access, 1 and 3 grant it. There is no read-only access.
///
/// # Errors
/// 1 for a range that does not consist of whole mappings, for unknown flags and for an unknown device; 217 between devices
/// without peer access; 801 for the host.
pub fn set_access(address: u64, bytes: usize, location_kind: u32, location: i32, flags: u32) -> Answer<()> {
    let simulation = simulation()?;
    match location_kind {
        1 => {}
        2..=4 => return Err(Code::NOT_SUPPORTED),
        _ => return Err(Code::INVALID_VALUE),
    }
    let device = devices::get(location).map_err(|_| Code::INVALID_VALUE)?;
    let may = match flags {
        0 => false,
        1 | 3 => true,
        _ => return Err(Code::INVALID_VALUE),
    };
    let table = VIRTUAL.lock();
    for start in table.whole(address, bytes as u64).ok_or(Code::INVALID_VALUE)? {
        let mapping = table.mappings.get(&start).ok_or(Code::INVALID_VALUE)?;
        if mapping.allocation.device != device && !simulation.capabilities(device)?.peer_copy {
            return Err(Code::PEER_ACCESS_UNSUPPORTED);
        }
        simulation.change_access(start, mapping, device, may)?;
    }
    Ok(())
}

/// `cuMemExportToShareableHandle`: a descriptor, which the caller owns.
///
/// # Errors
/// 1 for an unknown handle, for flags, and for a type that the memory was not created with; 304 if the process has no
/// descriptors left.
pub fn export(raw: u64, handle_type: u32, flags: u64) -> Answer<RawFd> {
    simulation()?;
    let table = VIRTUAL.lock();
    let allocation = &table.handles.get(&raw).ok_or(Code::INVALID_VALUE)?.allocation;
    if flags != 0 || handle_type != DESCRIPTOR || allocation.handle_types & DESCRIPTOR == 0 {
        return Err(Code::INVALID_VALUE);
    }
    allocation.file.try_clone().map(IntoRawFd::into_raw_fd).map_err(|_| Code::OPERATING_SYSTEM)
}

/// `cuMemImportFromShareableHandle`. The caller keeps its descriptor.
///
/// # Errors
/// 1 for another type and for a descriptor that was not exported in this form; 800 for fabric handles.
pub fn import(descriptor: RawFd, handle_type: u32) -> Answer<u64> {
    let simulation = simulation()?;
    match handle_type {
        DESCRIPTOR => {}
        FABRIC => return Err(Code::NOT_PERMITTED),
        _ => return Err(Code::INVALID_VALUE),
    }
    // SAFETY: `fcntl` takes any number, and refuses one that is not an open descriptor. A driver returns 999 then, as seen on an
    // H200.
    let copy = unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 0) };
    if copy < 0 {
        return Err(Code::UNKNOWN);
    }
    // SAFETY: the descriptor is new and has no other owner.
    let file = unsafe { OwnedFd::from_raw_fd(copy) };
    let (_, bytes) = mock::check_file(&file).map_err(|_| Code::INVALID_VALUE)?;
    let name = std::fs::read_link(format!("/proc/self/fd/{copy}")).map_err(|_| Code::OPERATING_SYSTEM)?;
    let device = name.to_str().and_then(|name| {
        let name = name.strip_prefix("/memfd:")?.strip_prefix(NAME)?;
        name.strip_suffix(" (deleted)").unwrap_or(name).parse().ok()
    });
    let device = device.filter(|&device| simulation.check_device(device).is_ok()).ok_or(Code::INVALID_VALUE)?;
    if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
        return Err(Code::INVALID_VALUE);
    }
    Ok(simulation.add(Allocation { file, bytes, device, handle_types: DESCRIPTOR, taken: None, raw: HANDLES.take() }))
}
