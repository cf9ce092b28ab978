//! Page-locked host memory, allocated or registered.

use std::ptr::NonNull;

use highwater_hal::{Backend, HostMemoryKind, HostOptions, HostPtr};

use crate::blocks::{HostBlock, MEMORY, around};
use crate::code::{Answer, Code};
use crate::current::{where_needed, with_context};
use crate::handles::new_number;
use crate::process::{Simulation, simulation};
use crate::variants::{Vendor, variants, vendor};

/// Flags of `cuMemHostAlloc`.
mod allocate_flags {
    pub(super) const WRITE_COMBINED: u32 = 4;
    pub(super) const KNOWN: u32 = 7;
}

/// Flags of `cuMemHostRegister`.
mod register_flags {
    pub(super) const IO_MEMORY: u32 = 4;
    pub(super) const READ_ONLY: u32 = 8;
    pub(super) const KNOWN: u32 = 15;
}

fn pointer(address: u64) -> Answer<HostPtr> {
    let pointer = std::ptr::with_exposed_provenance_mut(address as usize);
    NonNull::new(pointer).map(HostPtr::new).ok_or(Code::INVALID_VALUE)
}

impl Simulation {
    /// Waits for all devices, because queued work may use the pages.
    fn wait_for_all(&self) {
        for device in 0..self.devices.len() as u32 {
            self.hooks.wait_for_device(device);
        }
    }
}

/// `cuMemHostAlloc`. Returns null for 0 bytes.
///
/// # Errors
/// 201 without a context, 900 while a capture is open, 1 for unknown flags, 2 if memory is exhausted.
pub fn allocate(bytes: usize, flags: u32) -> Answer<u64> {
    let (simulation, device) = with_context()?;
    simulation.check_unsafe_call()?;
    // HIP accepts flags that it does not know.
    if flags & !allocate_flags::KNOWN != 0 && vendor() == Vendor::Cuda {
        return Err(Code::INVALID_VALUE);
    }
    if bytes == 0 {
        return Ok(0);
    }
    let mut options = HostOptions::new();
    if flags & allocate_flags::WRITE_COMBINED != 0 {
        options = options.with_kind(HostMemoryKind::WriteCombined);
    }
    let allocated = simulation.gpu.host_allocator().allocate(bytes, &options);
    let address = allocated.map_err(|error| simulation.code_of(error))?.as_ptr().expose_provenance() as u64;
    let (is_registered, is_moved, number) = (false, false, new_number());
    let block = HostBlock { bytes: bytes as u64, device, is_registered, is_moved, flags, number };
    MEMORY.hosts.write().insert(address, block);
    Ok(address)
}

/// `cuMemFreeHost`. Waits for work that may use the memory.
///
/// # Errors
/// 900 while a capture is open, 1 for an address that `cuMemHostAlloc` did not return, the code of a lost context.
pub fn free(address: u64) -> Answer<()> {
    let simulation = simulation()?;
    simulation.check_unsafe_call()?;
    if address == 0 {
        return Ok(());
    }
    let mut hosts = MEMORY.hosts.write();
    match hosts.get(&address) {
        Some(block) if !block.is_registered => simulation.check_context(block.device)?,
        _ => return Err(Code::INVALID_VALUE),
    }
    hosts.remove(&address);
    drop(hosts);
    simulation.wait_for_all();
    // SAFETY: the address came from `allocate`, was removed from the table, so no other call frees it, and no work uses it.
    unsafe { simulation.gpu.host_allocator().free(pointer(address)?) }.map_err(|error| simulation.code_of(error))
}

/// `cuMemHostRegister_v2`.
///
/// # Errors
/// 201 without a context, 900 while a capture is open, 712 if a part is already registered, 801 if the device cannot register
/// memory. 1 for 0 bytes, unknown flags, memory of `cuMemHostAlloc`, and memory that is not mapped, or not writable (unless
/// registered as read-only).
pub fn register(address: u64, bytes: usize, flags: u32) -> Answer<()> {
    let (simulation, device) = with_context()?;
    simulation.check_unsafe_call()?;
    if address == 0 || bytes == 0 || flags & !register_flags::KNOWN != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let end = address.checked_add(bytes as u64).ok_or(Code::INVALID_VALUE)?;
    if flags & register_flags::IO_MEMORY != 0 {
        return Err(Code::NOT_SUPPORTED);
    }
    let check_overlap = |hosts: &std::collections::BTreeMap<u64, HostBlock>| {
        let before = hosts.range(..end).next_back();
        match before.filter(|&(start, block)| start + block.bytes > address) {
            None => Ok(()),
            Some((_, block)) if block.is_registered => Err(Code::HOST_MEMORY_ALREADY_REGISTERED),
            Some(_) => Err(Code::INVALID_VALUE),
        }
    };
    check_overlap(&MEMORY.hosts.read())?;
    touch(address, bytes, flags & register_flags::READ_ONLY != 0)?;
    let is_moved = vendor() == Vendor::Hip && variants()?.hip.moves_registered;
    let (is_registered, number) = (true, new_number());
    let block = HostBlock { bytes: bytes as u64, device, is_registered, is_moved, flags, number };
    let mut hosts = MEMORY.hosts.write();
    check_overlap(&hosts)?;
    // SAFETY: the memory was found mapped; that it stays so until it is unregistered is the promise of every user of the
    // vendor's function.
    unsafe { simulation.gpu.host_allocator().register(pointer(address)?, bytes, &HostOptions::new()) }
        .map_err(|error| simulation.code_of(error))?;
    hosts.insert(address, block);
    Ok(())
}

/// Faults the pages in, as a lock of the pages does.
fn touch(address: u64, bytes: usize, read_only: bool) -> Answer<()> {
    let page = highwater_mock::simulated::page_size();
    let start = address / page * page;
    let length = (address - start) as usize + bytes;
    let advice = if read_only { libc::MADV_POPULATE_READ } else { libc::MADV_POPULATE_WRITE };
    let start = std::ptr::with_exposed_provenance_mut(start as usize);
    // SAFETY: the advice brings pages of the process in and changes nothing of what they hold; for addresses at which
    // nothing is mapped it fails.
    if unsafe { libc::madvise(start, length, advice) } == 0 {
        return Ok(());
    }
    match std::io::Error::last_os_error().raw_os_error() {
        // Memory that cannot be faulted in this way, or a kernel before 5.14, which does not know the advice.
        Some(libc::EINVAL) if may_touch(start.addr() as u64, length as u64, read_only) => Ok(()),
        Some(libc::EAGAIN) => Err(Code::OUT_OF_MEMORY),
        _ => Err(Code::INVALID_VALUE),
    }
}

/// Returns whether the process may read a range, and write it unless it is read-only.
fn may_touch(start: u64, length: u64, read_only: bool) -> bool {
    let Ok(maps) = std::fs::read_to_string("/proc/self/maps") else { return false };
    // Each line begins with `start-end permissions`, in ascending order.
    let mut reached = start;
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        let range = words.next().and_then(|range| range.split_once('-'));
        let bounds = range
            .and_then(|(low, high)| Some((u64::from_str_radix(low, 16).ok()?, u64::from_str_radix(high, 16).ok()?)));
        let (Some((low, high)), Some(permissions)) = (bounds, words.next()) else { return false };
        let may = permissions.starts_with(if read_only { "r" } else { "rw" });
        if low <= reached && reached < high && may {
            reached = high;
        }
    }
    reached >= start.saturating_add(length)
}

/// `cuMemHostUnregister`. Waits for work that may use the memory.
///
/// # Errors
/// 900 while a capture is open, 1 for an address inside page-locked memory at which no registration begins, 713 for an address
/// in none (CUDA: 1 for null), the code of a lost context.
pub fn unregister(address: u64) -> Answer<()> {
    let simulation = simulation()?;
    simulation.check_unsafe_call()?;
    if address == 0 && vendor() == Vendor::Cuda {
        return Err(Code::INVALID_VALUE);
    }
    let mut hosts = MEMORY.hosts.write();
    match around(&hosts, address, |block| block.bytes) {
        Some((start, block)) if start == address && block.is_registered => simulation.check_context(block.device)?,
        Some(_) => return Err(Code::INVALID_VALUE),
        None => return Err(Code::HOST_MEMORY_NOT_REGISTERED),
    }
    hosts.remove(&address);
    drop(hosts);
    simulation.wait_for_all();
    // SAFETY: the address was registered and taken out of the table, and no work uses the memory.
    unsafe { simulation.gpu.host_allocator().unregister(pointer(address)?) }.map_err(|error| simulation.code_of(error))
}

/// `cuMemHostGetDevicePointer_v2`: the same address.
///
/// # Errors
/// 201 without a context (CUDA), 1 for memory that is not page-locked.
pub fn device_address(address: u64, flags: u32) -> Answer<u64> {
    where_needed()?;
    let found = around(&MEMORY.hosts.read(), address, |block| block.bytes).is_some();
    if found && flags == 0 { Ok(address) } else { Err(Code::INVALID_VALUE) }
}
