//! Rules of AMD's runtime alone: a current device instead of contexts, frees by any address of an allocation, host memory with
//! another address on devices, and the last error of a thread.
//!
//! The rules were observed on the host side of HIP 6.4.3 and 7.2.4, on an emulated device, or read in clr 6.4.3. The rules of
//! captures and of events that follow their streams are in `capture_state.rs` and `events.rs`.
//!
//! # Differences from the vendor
//! - A stale handle of an event, a graph or a pool answers 400 or 1; the real runtime crashes.
//! - A device that is lost answers 700 to every call; the real runtime ends the process when a kernel faults.
//! - HIP 5 exists only to be refused: it has its version and its answer of `hipInit`, and otherwise behaves as HIP 6.
//! - Cached and uncached memory differ only in the flag that `hipHostGetFlags` returns.
//! - `hipEventReleaseToSystem` has no effect, as in clr 6.4.3 (`hip_event.cpp`, `recordCommand`).

use std::cell::Cell;
use std::collections::BTreeMap;

use parking_lot::Mutex;

use crate::blocks::{Kind, MEMORY, MOVED};
use crate::code::{Answer, Code};
use crate::copies::CopyShape;
use crate::current::with_context;
use crate::process::{self, die, simulation};
use crate::variants::{HipVariants, follow_hip, hip_major, variants};
use crate::{copies, current, devices, events, host, ipc, memory, streams};

/// `hipErrorInvalidConfiguration`.
pub const INVALID_CONFIGURATION: Code = Code(9);
/// `hipErrorInvalidMemcpyDirection`.
pub const INVALID_COPY_DIRECTION: Code = Code(21);

/// `hipErrorInvalidPitchValue`.
pub const INVALID_PITCH: Code = Code(12);

/// Flags of host memory.
pub mod host_flags {
    /// `hipHostMallocCoherent`.
    pub const COHERENT: u32 = 0x4000_0000;
    /// `hipHostMallocNonCoherent`.
    pub const NON_COHERENT: u32 = 0x8000_0000;
    /// The flags that `hipHostRegister` knows in each version: portable, mapped, of a device, read-only.
    pub const REGISTER: u32 = 0xf;
    /// The additional flag that `hipHostRegister` knows in HIP 7: uncached.
    pub const REGISTER_UNCACHED: u32 = 0x8000_0000;
}

/// Kinds of memory, as `hipPointerGetAttributes` gives them since HIP 6.
pub mod memory_type {
    /// Memory that the runtime does not know.
    pub const UNREGISTERED: i32 = 0;
    /// Page-locked memory.
    pub const HOST: i32 = 1;
    /// Memory of a device.
    pub const DEVICE: i32 = 2;
    /// Managed memory.
    pub const MANAGED: i32 = 3;
}

/// Reads the settings of the library from the environment.
///
/// # Errors
/// 1, with a message on standard error, if they cannot be parsed.
pub fn settings() -> Answer<&'static HipVariants> {
    follow_hip();
    variants().map(|variants| &variants.hip)
}

// ---------------------------------------------------------------------- the thread's state

thread_local! {
    static LAST: Cell<u32> = const { Cell::new(0) };
}

/// Starts the runtime if needed, as every call does, and makes the first device current in a thread without one.
///
/// # Errors
/// 100 without a device (HIP 5: 101, from `hipInit`), 3 in a forked child, 4 at exit, 1 if a variable cannot be parsed.
pub fn enter() -> Answer<()> {
    follow_hip();
    process::initialize()?;
    if current::device().is_none() {
        let simulation = simulation()?;
        let first = *simulation.visible.first().ok_or(Code::NO_DEVICE)?;
        current::set(current::handle_of(first))?;
    }
    Ok(())
}

/// `hipInit`.
///
/// # Errors
/// As [`enter`], and 1 for flags.
pub fn init(flags: u32) -> Answer<()> {
    let entered = enter();
    if hip_major() == 5 && entered == Err(Code::NO_DEVICE) {
        return Err(Code::INVALID_DEVICE);
    }
    entered?;
    if flags == 0 { Ok(()) } else { Err(Code::INVALID_VALUE) }
}

/// Records the code of a call. HIP 6 keeps the code of the last call. HIP 7 keeps the last failure until it is read, and does
/// not count 600 as one.
pub fn note(code: u32) {
    let is_failure = code != 0 && code != Code::NOT_READY.0;
    if hip_major() < 7 || is_failure {
        LAST.set(code);
    }
}

/// `hipPeekAtLastError`.
#[must_use]
pub fn peek_at_last_error() -> u32 {
    enter().err().map_or_else(|| LAST.get(), |code| code.0)
}

/// `hipGetLastError`: returns the thread's last error and clears it. A missing device is reported every time.
#[must_use]
pub fn last_error() -> u32 {
    enter().err().map_or_else(|| LAST.take(), |code| code.0)
}

/// `hipSetDevice`.
///
/// # Errors
/// 101 if no such device exists.
pub fn set_device(ordinal: i32) -> Answer<()> {
    current::set(current::handle_of(devices::get(ordinal)?))
}

/// `hipGetDevice`.
///
/// # Errors
/// 101 if the thread has none.
pub fn device() -> Answer<i32> {
    devices::ordinal(current::device().ok_or(Code::INVALID_DEVICE)?)
}

// ---------------------------------------------------------------------- devices

/// `hipDeviceGetAttribute`, with an AMD Instinct MI300X's value unless the simulation has its own.
///
/// # Errors
/// 1 for an unknown attribute, 101 if no such device exists.
pub fn attribute(attribute: i32, ordinal: i32) -> Answer<i32> {
    let device = devices::get(ordinal)?;
    let capabilities = simulation()?.capabilities(device)?;
    let settings = settings()?;
    let (major, minor) = compute_capability(&settings.arch);
    Ok(match attribute {
        2 => 8,
        3 | 8 | 10 | 24 | 85 => 1,
        4 => i32::from(!settings.moves_registered),
        5 => 2_100_000,
        19 => 4 << 20,
        23 => major,
        61 => minor,
        26..=28 | 56 => 1024,
        29..=31 => i32::MAX,
        59 => 8192,
        60 => 1_300_000,
        63 => 304,
        67 => bus_of(device),
        71 | 74 | 75 => 65536,
        78 => i32::from(capabilities.stream_priority),
        83 => i32::MAX,
        84 => i32::try_from(devices::memory_bytes(ordinal)?).unwrap_or(i32::MAX),
        87 => 64,
        88 => i32::from(capabilities.stream_ordered_memory),
        90 => i32::from(capabilities.host_register),
        10011 => 1,
        10017 => 100_000,
        10018 => 8,
        0..=92 | 10000..=10020 => 0,
        _ => return Err(Code::INVALID_VALUE),
    })
}

fn bus_of(device: u32) -> i32 {
    device as i32 + 1
}

/// Returns the major and minor version of an architecture: 9 and 4 for `gfx942:sramecc+`.
fn compute_capability(arch: &str) -> (i32, i32) {
    let digits = arch.trim_start_matches("gfx").split(':').next().unwrap_or_default();
    let major = digits.get(..digits.len().saturating_sub(2)).and_then(|major| major.parse().ok());
    let minor = digits.chars().rev().nth(1).and_then(|minor| minor.to_digit(16));
    (major.unwrap_or(9), minor.map_or(0, |minor| minor as i32))
}

/// The results of `hipGetDeviceProperties` and `hipGetDevicePropertiesR0600`, which have two layouts.
#[derive(Debug)]
pub struct Properties {
    /// The device's name.
    pub name: String,
    /// 16 bytes that are unique to the device.
    pub uuid: [u8; 16],
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Major and minor version of the architecture.
    pub compute: (i32, i32),
    /// Number on the PCI bus.
    pub bus: i32,
    /// The architecture with its features.
    pub arch: String,
    ordinal: i32,
}

impl Properties {
    /// Returns the properties of a device.
    ///
    /// # Errors
    /// 101 if no such device exists.
    pub fn of(ordinal: i32) -> Answer<Self> {
        let arch = settings()?.arch.clone();
        Ok(Self {
            name: devices::name(ordinal)?,
            uuid: devices::uuid(ordinal)?,
            memory_bytes: devices::memory_bytes(ordinal)?,
            compute: compute_capability(&arch),
            bus: bus_of(devices::get(ordinal)?),
            arch,
            ordinal,
        })
    }

    /// Returns an attribute of the same device.
    ///
    /// # Errors
    /// As [`attribute`].
    pub fn attribute(&self, attribute: i32) -> Answer<i32> {
        self::attribute(attribute, self.ordinal)
    }
}

/// `hipDeviceEnablePeerAccess`: from the current device to another.
///
/// # Errors
/// 101 for an unknown device and for the current one, 1 for flags, 217 between devices without peer access, 704 for the second
/// call.
pub fn enable_peer_access(peer: i32, flags: u32) -> Answer<()> {
    devices::enable_peer_access(current::handle_of(devices::get(peer)?), flags)
}

/// `hipDeviceDisablePeerAccess`.
///
/// # Errors
/// 101 for an unknown device, 705 if access is not enabled.
pub fn disable_peer_access(peer: i32) -> Answer<()> {
    let peer = devices::get(peer)?;
    let (simulation, device) = with_context()?;
    let bit = 1 << peer;
    let before = simulation.state(device)?.peers.fetch_and(!bit, std::sync::atomic::Ordering::AcqRel);
    if before & bit == 0 { Err(Code::PEER_ACCESS_NOT_ENABLED) } else { Ok(()) }
}

// ---------------------------------------------------------------------- streams and events

/// `hipStreamDestroy`.
///
/// # Errors
/// 400 for a default stream; as [`crate::process::Simulation::stream`] for a destroyed one.
pub fn destroy_stream(raw: u64) -> Answer<()> {
    if raw <= streams::PER_THREAD {
        return Err(Code::INVALID_HANDLE);
    }
    streams::destroy(raw)
}

/// `hipStreamGetDevice`.
///
/// # Errors
/// As [`crate::process::Simulation::stream`].
pub fn stream_device(raw: u64) -> Answer<i32> {
    devices::ordinal(simulation()?.stream(raw)?.device)
}

// ---------------------------------------------------------------------- memory

/// `hipMalloc`. Returns null for 0 bytes.
///
/// # Errors
/// 900 while a capture is open, 2 if memory is exhausted.
pub fn allocate(bytes: usize) -> Answer<u64> {
    if bytes == 0 { Ok(0) } else { memory::allocate(bytes) }
}

/// `hipFree` and `hipHostFree`. Either frees memory of both allocators, the whole allocation by any address in it. Waits for
/// work that may use the memory.
///
/// # Errors
/// 900 while a capture is open, 1 for other memory.
pub fn free(address: u64) -> Answer<()> {
    let simulation = simulation()?;
    simulation.check_unsafe_call()?;
    if address == 0 {
        return Ok(());
    }
    if let Some((start, block)) = MEMORY.around(address) {
        simulation.check_context(block.device)?;
        return simulation.free_block(start);
    }
    match simulation.registered(address) {
        Some((start, block)) if !block.is_registered => host::free(start),
        _ => Err(Code::INVALID_VALUE),
    }
}

/// `hipFreeAsync`.
///
/// # Errors
/// As [`memory::free_ordered`]; 1 for null with HIP 6.
pub fn free_ordered(address: u64, raw_stream: u64) -> Answer<()> {
    if address == 0 && hip_major() >= 7 {
        return simulation()?.stream(raw_stream).map(drop);
    }
    memory::free_ordered(address, raw_stream)
}

/// The result of `hipPointerGetAttributes`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pointer {
    /// One of [`memory_type`].
    pub memory_type: i32,
    /// The device's ordinal, -2 for memory that the runtime does not know.
    pub device: i32,
    /// The address that devices use.
    pub on_device: u64,
    /// The address that the host uses.
    pub on_host: u64,
    /// The flags of the allocation.
    pub flags: u32,
}

/// `hipPointerGetAttributes`.
///
/// # Errors
/// 1 for null with HIP 6.
pub fn pointer(address: u64) -> Answer<Pointer> {
    if address == 0 && hip_major() < 7 {
        return Err(Code::INVALID_VALUE);
    }
    let simulation = simulation()?;
    if let Some((_, block)) = MEMORY.around(address) {
        let device = devices::ordinal(block.device)?;
        let memory_type = if block.kind == Kind::Managed { memory_type::MANAGED } else { memory_type::DEVICE };
        return Ok(Pointer { memory_type, device, on_device: address, on_host: 0, flags: 0 });
    }
    let on_host = simulation.on_host(address);
    let Some((_, block)) = simulation.registered(on_host) else {
        let memory_type = memory_type::UNREGISTERED;
        return Ok(Pointer { memory_type, device: -2, on_device: 0, on_host: 0, flags: 0 });
    };
    let on_device = if block.is_moved { on_host | MOVED } else { on_host };
    let device = devices::ordinal(block.device)?;
    Ok(Pointer { memory_type: memory_type::HOST, device, on_device, on_host, flags: block.flags })
}

// ---------------------------------------------------------------------- page-locked memory

/// `hipHostMalloc`. Returns null for 0 bytes. Accepts unknown flags.
///
/// # Errors
/// 1 if the flags request both coherent and non-coherent memory, 900 while a capture is open, 2 if memory is exhausted.
pub fn allocate_host(bytes: usize, flags: u32) -> Answer<u64> {
    if flags & host_flags::COHERENT != 0 && flags & host_flags::NON_COHERENT != 0 {
        return Err(Code::INVALID_VALUE);
    }
    host::allocate(bytes, flags)
}

/// `hipHostGetFlags`: the flags as they were passed to `hipHostMalloc`.
///
/// # Errors
/// 1 for registered memory and for memory that is not page-locked. The runtime looks for a fine-grained buffer, which registered
/// memory is not (clr 6.4.3, `hip_memory.cpp`).
pub fn host_flags(address: u64) -> Answer<u32> {
    let found = simulation()?.registered(address).filter(|(_, block)| !block.is_registered);
    found.map(|(_, block)| block.flags).ok_or(Code::INVALID_VALUE)
}

/// First address and bytes of memory that was registered over a part of other registrations.
static OVERLAPS: Mutex<BTreeMap<u64, u64>> = Mutex::new(BTreeMap::new());

/// `hipHostRegister`. Registering memory again succeeds, and changes nothing if it begins at the same
/// address.
///
/// # Errors
/// As [`host::register`], except 712.
pub fn register(address: u64, bytes: usize, flags: u32) -> Answer<()> {
    let (simulation, _) = with_context()?;
    simulation.check_unsafe_call()?;
    let end = address.checked_add(bytes as u64).filter(|_| address != 0 && bytes > 0).ok_or(Code::INVALID_VALUE)?;
    let further = if hip_major() < 7 { 0 } else { host_flags::REGISTER_UNCACHED };
    if flags & !(host_flags::REGISTER | further) != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let before = {
        let hosts = MEMORY.hosts.read();
        hosts.range(..end).next_back().map(|(&start, &block)| (start, block))
    };
    match before.filter(|(start, block)| start + block.bytes > address) {
        Some((start, block)) if block.is_registered => {
            if start != address {
                OVERLAPS.lock().insert(address, bytes as u64);
            }
            Ok(())
        }
        _ => host::register(address, bytes, flags & 0xf),
    }
}

/// `hipHostUnregister`. Waits for work that may use the memory. An address inside a registration ends the process.
///
/// # Errors
/// 900 while a capture is open, 713 for unregistered memory.
pub fn unregister(address: u64) -> Answer<()> {
    let simulation = simulation()?;
    simulation.check_unsafe_call()?;
    if OVERLAPS.lock().remove(&address).is_some() {
        return Ok(());
    }
    match simulation.registered(address) {
        Some((start, block)) if block.is_registered && start != address => {
            die(&format!("Memobj map does not have ptr: {address:#x}"))
        }
        Some((_, block)) if block.is_registered => host::unregister(address),
        _ => Err(Code::HOST_MEMORY_NOT_REGISTERED),
    }
}

/// `hipHostGetDevicePointer`: for registered memory, an address other than the host's, unless the settings say otherwise.
///
/// # Errors
/// 1 for flags and for memory that is not page-locked.
pub fn device_address(address: u64, flags: u32) -> Answer<u64> {
    let found = simulation()?.registered(address).filter(|_| flags == 0);
    let (_, block) = found.ok_or(Code::INVALID_VALUE)?;
    Ok(if block.is_moved { address | MOVED } else { address })
}

// ---------------------------------------------------------------------- copies

/// Checks `hipMemcpyKind`. The addresses alone decide the direction.
///
/// # Errors
/// 21 for an unknown kind.
pub fn check_kind(kind: i32) -> Answer<()> {
    if (0..=4).contains(&kind) { Ok(()) } else { Err(INVALID_COPY_DIRECTION) }
}

/// `hipMemcpy`. The copy runs on the legacy default stream and is done when the call returns.
///
/// # Errors
/// 906 while a capture is open, which is then invalidated; otherwise as [`copies::copy`].
///
/// # Safety
/// As [`copies::copy_now`].
pub unsafe fn copy_now(dst: u64, src: u64, bytes: usize, kind: i32) -> Answer<()> {
    check_kind(kind)?;
    simulation()?.check_nothing_captures()?;
    // SAFETY: forwarded to the caller.
    unsafe { copies::copy_now(dst, src, bytes, copies::Direction::Any) }
}

/// `hipMemcpy2DAsync`.
///
/// # Errors
/// 21 for an unknown kind, 12 for a pitch less than the width, otherwise as [`copies::copy_rows`].
///
/// # Safety
/// As [`copies::copy_rows`].
pub unsafe fn copy_rows(dst: u64, src: u64, shape: CopyShape, kind: i32, raw_stream: u64) -> Answer<()> {
    check_kind(kind)?;
    shape.check("copy_2d").map_err(|_| INVALID_PITCH)?;
    // SAFETY: forwarded to the caller.
    unsafe { copies::copy_rows(dst, src, shape, raw_stream, copies::Direction::Any) }
}

/// `hipMemcpyPeerAsync`.
///
/// # Errors
/// As [`copies::copy_peer`], 101 for an unknown device.
///
/// # Safety
/// As [`copies::copy_peer`].
pub unsafe fn copy_peer(
    dst: u64,
    dst_device: i32,
    src: u64,
    src_device: i32,
    bytes: usize,
    raw_stream: u64,
) -> Answer<()> {
    let [to, from] = [dst_device, src_device].map(|device| devices::get(device).map(current::handle_of));
    // SAFETY: forwarded to the caller.
    unsafe { copies::copy_peer(dst, to?, src, from?, bytes, raw_stream) }
}

/// `hipMemsetAsync`.
///
/// # Errors
/// As [`copies::fill`].
///
/// # Safety
/// As [`copies::fill`].
pub unsafe fn fill(dst: u64, value: i32, bytes: usize, raw_stream: u64) -> Answer<()> {
    // SAFETY: forwarded to the caller.
    unsafe { copies::fill(dst, value as u32 & 0xff, 1, bytes, raw_stream) }
}

// ---------------------------------------------------------------------- other processes

/// `hipIpcGetEventHandle`.
///
/// # Errors
/// 9 for an event that was not created for other processes, or was opened here; 400 for an unknown event.
pub fn export_event(raw: u64) -> Answer<ipc::Handle> {
    let event = simulation()?.event(raw)?;
    if event.flags & events::flags::INTERPROCESS == 0 || event.is_import {
        return Err(INVALID_CONFIGURATION);
    }
    ipc::export_event(raw)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_have_a_version() {
        for (arch, version) in [
            ("gfx942:sramecc+:xnack-", (9, 4)),
            ("gfx90a:sramecc+:xnack-", (9, 0)),
            ("gfx1030", (10, 3)),
            ("gfx1100", (11, 0)),
        ] {
            assert_eq!(compute_capability(arch), version, "{arch}");
        }
    }
}
