//! Mapped memory over a [`Platform`]: reserved addresses, physical memory, and the mappings between them.
//!
//! Vendors report misuse of addresses by the same code as many other faults, and some accept it. So the ranges and the
//! mappings stand in a table, and a call that the contract refuses does not reach the vendor. The vendor is never called
//! under the lock of the table. The caller promises that no two calls use a range at the same time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::platform::{Platform, SharedBlock};
use super::state::{DriverState, nothing};
use highwater_hal::{
    Capabilities, DevicePtr, Error, ErrorKind, Location, PhysicalMemoryId, PhysicalMemoryOptions, Result, Transport,
};

/// Physical memory. The vendor's handle is released when the id is destroyed and nothing maps the memory: an export of mapped
/// memory needs it.
#[derive(Debug)]
pub(super) struct PhysicalMemory {
    device: u32,
    /// The vendor's handle.
    allocation: u64,
    bytes: usize,
    /// The transport, and the number that identifies the memory among that of all processes.
    shareable: Option<(Transport, [u8; 16])>,
    /// Whether a call destroys the id, or has destroyed it.
    is_destroyed: AtomicBool,
    /// Whether the vendor's handle was released.
    is_released: AtomicBool,
}

/// The reserved ranges and the memory that is mapped in them, by address.
#[derive(Debug, Default)]
pub(super) struct MappedMemory {
    /// The device and the bytes of each range.
    reserved: BTreeMap<u64, (u32, u64)>,
    pieces: BTreeMap<u64, Arc<PhysicalMemory>>,
}

impl MappedMemory {
    pub(super) fn reservations(&self) -> u64 {
        self.reserved.len() as u64
    }

    /// Returns whether a range lies inside one reserved range of the device.
    fn is_reserved(&self, device: u32, address: u64, bytes: u64) -> bool {
        let around = self.reserved.range(..=address).next_back();
        around.is_some_and(|(&start, &(of, length))| {
            of == device && address.checked_add(bytes).is_some_and(|end| end <= start + length)
        })
    }

    /// Returns whether memory is mapped in a range.
    fn is_mapped(&self, address: u64, bytes: u64) -> bool {
        let before = self.pieces.range(..address.saturating_add(bytes)).next_back();
        before.is_some_and(|(&start, memory)| start + memory.bytes as u64 > address)
    }

    /// Returns the addresses of the mappings that form a range of the device exactly.
    fn whole(&self, operation: &'static str, device: u32, ptr: DevicePtr, bytes: usize) -> Result<Vec<u64>> {
        let end = ptr.get().checked_add(bytes as u64);
        let (mut next, mut found) = (ptr.get(), Vec::new());
        while let Some(memory) = self.pieces.get(&next).filter(|_| Some(next) < end) {
            found.push(next);
            next += memory.bytes as u64;
        }
        if Some(next) == end && bytes > 0 && self.is_reserved(device, ptr.get(), bytes as u64) {
            return Ok(found);
        }
        let message = format!("{bytes} bytes at {ptr} of device {device} do not consist of whole mappings");
        Err(Error::new(ErrorKind::InvalidPointer, operation, message)
            .with_hint("pass the address of a mapping and its bytes, or those of several without a gap"))
    }
}

/// Returns the error of an id that another thread destroys.
#[cold]
fn being_destroyed(operation: &'static str, id: PhysicalMemoryId) -> Error {
    Error::new(ErrorKind::InvalidHandle, operation, format!("the {id} is being destroyed by another thread"))
        .with_hint("use each id before it is destroyed, and destroy it once")
}

/// Returns the error of a range that a call cannot take.
#[cold]
fn wrong_range(operation: &'static str, device: u32, ptr: DevicePtr, bytes: usize, what: &str, hint: &str) -> Error {
    let message = format!("{bytes} bytes at {ptr} of device {device} {what}");
    Error::new(ErrorKind::InvalidPointer, operation, message).with_hint(hint)
}

impl<P: Platform> DriverState<P> {
    /// Begins a call: checks the process, the device and the capability.
    fn enter_mapped(&self, operation: &'static str, device: u32) -> Result<&Capabilities> {
        self.enter(operation)?;
        let capabilities = self.capabilities(operation, device)?;
        if capabilities.mapped_memory { Ok(capabilities) } else { Err(Error::lacks(operation, "mapped_memory")) }
    }

    /// Begins a call that takes an id.
    fn enter_any_mapped(&self, operation: &'static str) -> Result<()> {
        self.enter(operation)?;
        let any = self.devices.iter().any(|device| device.capabilities.mapped_memory);
        if any { Ok(()) } else { Err(Error::lacks(operation, "mapped_memory")) }
    }

    /// Calls the vendor with the device current, in the relaxed capture mode.
    fn with_device<T>(&self, operation: &'static str, device: u32, call: impl FnOnce(&P) -> Result<T>) -> Result<T> {
        let _relaxed = self.relaxed();
        let _current = self.make_current(operation, device)?;
        call(&self.platform)
    }

    pub(super) fn reserve_addresses(&self, device: u32, bytes: usize) -> Result<DevicePtr> {
        const OPERATION: &str = "reserve_addresses";
        check_bytes(OPERATION, bytes, self.enter_mapped(OPERATION, device)?)?;
        let ptr = self.with_device(OPERATION, device, |platform| platform.reserve_addresses(device, bytes))?;
        self.made(OPERATION, ptr)?;
        self.mapped_memory.lock().reserved.insert(ptr.get(), (device, bytes as u64));
        Ok(ptr)
    }

    /// # Safety
    /// As for [`Backend::free_addresses`](highwater_hal::Backend::free_addresses).
    pub(super) unsafe fn free_addresses(&self, device: u32, ptr: DevicePtr, bytes: usize) -> Result<()> {
        const OPERATION: &str = "free_addresses";
        self.enter_mapped(OPERATION, device)?;
        let range = (device, bytes as u64);
        {
            let mut mapped = self.mapped_memory.lock();
            if mapped.reserved.get(&ptr.get()) != Some(&range) {
                let (what, hint) = ("are no reserved range", "pass a range as `reserve_addresses` returned it");
                return Err(wrong_range(OPERATION, device, ptr, bytes, what, hint));
            }
            if mapped.is_mapped(ptr.get(), bytes as u64) {
                return Err(wrong_range(OPERATION, device, ptr, bytes, "hold mapped memory", "unmap the memory first"));
            }
            // Removed before the call, because the addresses can be reserved again as soon as they are free.
            mapped.reserved.remove(&ptr.get());
        }
        // SAFETY: The range is reserved, nothing is mapped in it, and the caller owns it.
        let freed = self.with_device(OPERATION, device, |platform| unsafe { platform.free_addresses(ptr, bytes) });
        if freed.is_err() {
            self.mapped_memory.lock().reserved.insert(ptr.get(), range);
        }
        freed
    }

    pub(super) fn create_memory(&self, device: u32, options: &PhysicalMemoryOptions) -> Result<PhysicalMemoryId> {
        const OPERATION: &str = "create_memory";
        let capabilities = self.enter_mapped(OPERATION, device)?;
        let &PhysicalMemoryOptions { bytes, shareable, rdma, .. } = options;
        if let Some(transport) = shareable
            && (transport == Transport::Legacy || !capabilities.ipc_transports.contains(transport))
        {
            return Err(super::ipc::unsupported(OPERATION, transport));
        }
        if rdma && !capabilities.mapped_memory_rdma {
            return Err(Error::lacks(OPERATION, "mapped_memory_rdma"));
        }
        check_bytes(OPERATION, bytes, capabilities)?;
        let most = self.device(OPERATION, device)?.info.memory_bytes;
        if bytes as u64 > most {
            let message = format!("{bytes} bytes were asked for, the device has {most}");
            return Err(Error::new(ErrorKind::OutOfMemory, OPERATION, message).with_hint("ask for less"));
        }
        let shareable = match shareable {
            Some(transport) => Some((transport, highwater_hal::random(OPERATION)?)),
            None => None,
        };
        let create = |platform: &P| platform.create_memory(device, options);
        let allocation = self.with_device(OPERATION, device, |platform| match create(platform) {
            Err(error) if error.kind() == ErrorKind::OutOfMemory && self.trim_pool(device) => create(platform),
            created => created,
        })?;
        if allocation == 0 {
            return Err(nothing(OPERATION));
        }
        let (is_destroyed, is_released) = (AtomicBool::new(false), AtomicBool::new(false));
        let memory = Arc::new(PhysicalMemory { device, allocation, bytes, shareable, is_destroyed, is_released });
        self.physical_memory.insert(OPERATION, device, Arc::clone(&memory)).inspect_err(|_| {
            self.release(OPERATION, memory);
        })
    }

    /// Enters memory of another process, of which the vendor returned a handle. Nobody can export it again.
    pub(super) fn enter_imported(
        &self,
        operation: &'static str,
        device: u32,
        bytes: usize,
        allocation: u64,
    ) -> Result<PhysicalMemoryId> {
        if allocation == 0 {
            return Err(nothing(operation));
        }
        let (is_destroyed, is_released) = (AtomicBool::new(false), AtomicBool::new(false));
        let memory = Arc::new(PhysicalMemory { device, allocation, bytes, shareable: None, is_destroyed, is_released });
        self.physical_memory.insert(operation, device, Arc::clone(&memory)).inspect_err(|_| {
            self.release(operation, memory);
        })
    }

    /// Returns the bytes of the mapping that begins at an address, and the transport that exports it.
    pub(super) fn mapped_piece(&self, ptr: DevicePtr) -> Option<(usize, Option<Transport>)> {
        let mapped = self.mapped_memory.lock();
        let memory = mapped.pieces.get(&ptr.get())?;
        Some((memory.bytes, memory.shareable.map(|(transport, _)| transport)))
    }

    pub(super) fn destroy_memory(&self, id: PhysicalMemoryId) -> Result<()> {
        const OPERATION: &str = "destroy_memory";
        self.enter_any_mapped(OPERATION)?;
        let memory = self.physical_memory.get(OPERATION, id)?;
        if memory.is_destroyed.swap(true, Ordering::AcqRel) {
            return Err(being_destroyed(OPERATION, id));
        }
        // The table and this call hold memory that nothing maps.
        if Arc::strong_count(&memory) == 2 {
            self.release_handle(OPERATION, &memory)
                .inspect_err(|_| memory.is_destroyed.store(false, Ordering::Release))?;
            memory.is_released.store(true, Ordering::Release);
        }
        drop(self.physical_memory.remove(OPERATION, id)?);
        self.release(OPERATION, memory);
        Ok(())
    }

    fn release_handle(&self, operation: &'static str, memory: &PhysicalMemory) -> Result<()> {
        let &PhysicalMemory { device, allocation, .. } = memory;
        // SAFETY: The id is or was being destroyed, and nothing maps the memory.
        self.with_device(operation, device, |platform| unsafe { platform.release_memory(allocation) })
    }

    /// Gives up a use of physical memory. The last one releases the vendor's handle.
    fn release(&self, operation: &'static str, memory: Arc<PhysicalMemory>) {
        let Some(memory) = Arc::into_inner(memory).filter(|memory| !memory.is_released.load(Ordering::Acquire)) else {
            return;
        };
        if let Err(error) = self.release_handle(operation, &memory) {
            // The id is gone, so the call cannot be repeated.
            tracing::warn!("{} bytes of physical memory were leaked: {error}", memory.bytes);
        }
    }

    /// # Safety
    /// As for [`Backend::map_memory`](highwater_hal::Backend::map_memory).
    pub(super) unsafe fn map_memory(&self, device: u32, ptr: DevicePtr, id: PhysicalMemoryId) -> Result<()> {
        const OPERATION: &str = "map_memory";
        self.enter_any_mapped(OPERATION)?;
        let memory = self.physical_memory.get(OPERATION, id)?;
        if memory.is_destroyed.load(Ordering::Acquire) {
            return Err(being_destroyed(OPERATION, id));
        }
        let mapped = self.map(OPERATION, device, ptr, &memory);
        // Another thread may have destroyed the id meanwhile.
        self.release(OPERATION, memory);
        mapped
    }

    fn map(&self, operation: &'static str, device: u32, ptr: DevicePtr, memory: &Arc<PhysicalMemory>) -> Result<()> {
        let granularity = self.enter_mapped(operation, device)?.mapped_memory_granularity;
        if memory.device != device {
            let message = format!("the memory belongs to device {}, expected device {device}", memory.device);
            return Err(Error::new(ErrorKind::WrongDevice, operation, message)
                .with_hint("map memory at addresses of its own device"));
        }
        if !ptr.is_aligned_to(granularity) {
            let message = format!("{ptr} is no multiple of {granularity}");
            return Err(Error::new(ErrorKind::InvalidArgument, operation, message)
                .with_hint("map memory at a multiple of `mapped_memory_granularity`"));
        }
        let bytes = memory.bytes;
        {
            let mut mapped = self.mapped_memory.lock();
            if !mapped.is_reserved(device, ptr.get(), bytes as u64) {
                let (what, hint) = ("are not inside one reserved range", "reserve the addresses first");
                return Err(wrong_range(operation, device, ptr, bytes, what, hint));
            }
            if mapped.is_mapped(ptr.get(), bytes as u64) {
                let (what, hint) = ("hold mapped memory already", "unmap the memory first");
                return Err(wrong_range(operation, device, ptr, bytes, what, hint));
            }
            mapped.pieces.insert(ptr.get(), Arc::clone(memory));
        }
        self.has_mapped.store(true, Ordering::Relaxed);
        let allocation = memory.allocation;
        // SAFETY: The range is reserved, nothing is mapped in it, and the caller owns it. The memory is held.
        let call = |platform: &P| unsafe { platform.map_memory(ptr, bytes, allocation) };
        self.with_device(operation, device, call).inspect_err(|_| {
            self.mapped_memory.lock().pieces.remove(&ptr.get());
        })
    }

    /// Returns whether a range of a copy may begin in one mapping and end in another. Without a current context, CUDA refuses a
    /// copy of such memory as an invalid value, though no other.
    #[inline]
    pub(super) fn may_cross_mappings(&self, sides: [(Location, usize); 2]) -> bool {
        // Relaxed: the caller has mapped the memory before this call.
        self.has_mapped.load(Ordering::Relaxed) && sides.into_iter().any(|(at, bytes)| self.crosses(at, bytes))
    }

    /// Returns whether a range contains an address at which a mapping can begin.
    #[inline(never)]
    fn crosses(&self, at: Location, bytes: usize) -> bool {
        let Location::Device { device, ptr } = at else { return false };
        let granularity = self.device("copy", device).map_or(0, |device| device.capabilities.mapped_memory_granularity);
        let last = ptr.get().saturating_add(bytes.saturating_sub(1) as u64);
        granularity > 0 && ptr.get() / granularity as u64 != last / granularity as u64
    }

    /// # Safety
    /// As for [`Backend::set_memory_access`](highwater_hal::Backend::set_memory_access).
    pub(super) unsafe fn set_memory_access(
        &self,
        device: u32,
        ptr: DevicePtr,
        bytes: usize,
        accessing: u32,
    ) -> Result<()> {
        const OPERATION: &str = "set_memory_access";
        self.enter_mapped(OPERATION, device)?;
        let peer = self.capabilities(OPERATION, accessing)?;
        if accessing != device && !peer.peer_copy {
            return Err(Error::lacks(OPERATION, "peer_copy"));
        }
        self.mapped_memory.lock().whole(OPERATION, device, ptr, bytes)?;
        // SAFETY: The range consists of whole mappings, which the caller owns.
        self.with_device(OPERATION, device, |platform| unsafe { platform.set_memory_access(ptr, bytes, accessing) })
    }

    /// # Safety
    /// As for [`Backend::unmap_memory`](highwater_hal::Backend::unmap_memory).
    pub(super) unsafe fn unmap_memory(&self, device: u32, ptr: DevicePtr, bytes: usize) -> Result<()> {
        const OPERATION: &str = "unmap_memory";
        self.enter_mapped(OPERATION, device)?;
        let pieces = self.mapped_memory.lock().whole(OPERATION, device, ptr, bytes)?;
        // SAFETY: The range consists of whole mappings, which the caller owns, and no work uses it.
        self.with_device(OPERATION, device, |platform| unsafe { platform.unmap_memory(ptr, bytes) })?;
        let unmapped: Vec<_> = {
            let mut mapped = self.mapped_memory.lock();
            pieces.into_iter().filter_map(|address| mapped.pieces.remove(&address)).collect()
        };
        unmapped.into_iter().for_each(|memory| self.release(OPERATION, memory));
        Ok(())
    }

    /// Passes shareable memory that is mapped at `ptr` to `export`, with its number. Returns `None` if no memory is mapped
    /// there, or memory that `transport` does not share.
    pub(super) fn export_mapped<T>(
        &self,
        operation: &'static str,
        device: u32,
        (ptr, transport): (DevicePtr, Transport),
        export: impl FnOnce([u8; 16], &SharedBlock) -> Result<T>,
    ) -> Option<Result<T>> {
        let memory = self.mapped_memory.lock().pieces.get(&ptr.get()).map(Arc::clone)?;
        let shared = memory.shareable.filter(|(of, _)| *of == transport && memory.device == device);
        let exported = shared.map(|(_, token)| {
            let block = SharedBlock { address: ptr, allocation: memory.allocation, bytes: memory.bytes };
            export(token, &block)
        });
        self.release(operation, memory);
        exported
    }
}

fn check_bytes(operation: &'static str, bytes: usize, capabilities: &Capabilities) -> Result<()> {
    let granularity = capabilities.mapped_memory_granularity;
    if bytes > 0 && bytes.is_multiple_of(granularity) {
        return Ok(());
    }
    Err(Error::new(ErrorKind::InvalidArgument, operation, format!("{bytes} bytes were asked for"))
        .with_hint(format!("ask for a multiple of {granularity} bytes, the `mapped_memory_granularity`")))
}
