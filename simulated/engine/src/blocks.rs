//! The address space: allocations, mappings and page-locked memory by address.
//!
//! All memory shares one address space, as with the vendor. An address shows whether it belongs to a device, to page-locked
//! host memory, or to pageable host memory. The device's memory is mapped into the process. An unallocated address in that
//! mapping would look like pageable memory, so its range identifies it.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use highwater_hal::{Backend, DevicePtr};
use parking_lot::{Mutex, RwLock};

use crate::code::{Answer, Code};
use crate::handles::new_number;
use crate::process::{Simulation, simulation};

/// The distance between the host's and the devices' address of registered memory. No memory of the host is at that distance.
pub(crate) const MOVED: u64 = 1 << 50;

/// Addresses from here on are never the host's.
const BEYOND_HOST: u64 = 1 << 48;

/// The call that created a block, which decides how it is freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `cuMemAlloc`.
    Plain,
    /// `cuMemAllocManaged`. It stays on the device.
    Managed,
    /// `cuMemAllocAsync`.
    Ordered,
    /// `cuMemAllocAsync` in a capture.
    Graph,
    /// `cuIpcOpenMemHandle`, with the number of opens.
    Imported { opens: u64 },
    /// `cuMemMap`, with one bit for each device that has access.
    Mapped { access: u64 },
}

/// Memory that begins at an address of the table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Block {
    pub(crate) bytes: u64,
    pub(crate) device: u32,
    pub(crate) kind: Kind,
    /// Unique among the blocks of the process.
    pub(crate) number: u64,
}

/// One allocation or registration.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostBlock {
    pub(crate) bytes: u64,
    /// The device whose context was current.
    pub(crate) device: u32,
    pub(crate) is_registered: bool,
    /// True if devices use another address: [`crate::hip::MOVED`] more than the host's.
    pub(crate) is_moved: bool,
    /// The flags of the allocation.
    pub(crate) flags: u32,
    pub(crate) number: u64,
}

/// Device memory and page-locked memory of the process, by first address.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) blocks: RwLock<BTreeMap<u64, Block>>,
    pub(crate) hosts: RwLock<BTreeMap<u64, HostBlock>>,
}

pub(crate) static MEMORY: Memory = Memory { blocks: RwLock::new(BTreeMap::new()), hosts: RwLock::new(BTreeMap::new()) };

/// The owner of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// A device that has access.
    Device(u32),
    /// Page-locked memory.
    Pinned,
    /// Other host memory.
    Pageable,
}

/// Returns the block that contains an address, with its first address.
pub(crate) fn around<B>(blocks: &BTreeMap<u64, B>, address: u64, bytes: impl Fn(&B) -> u64) -> Option<(u64, &B)> {
    let (&start, block) = blocks.range(..=address).next_back()?;
    (address - start < bytes(block)).then_some((start, block))
}

impl Memory {
    /// Returns the block that contains an address.
    pub(crate) fn around(&self, address: u64) -> Option<(u64, Block)> {
        around(&self.blocks.read(), address, |block| block.bytes).map(|(start, block)| (start, *block))
    }

    pub(crate) fn insert(&self, address: u64, bytes: u64, device: u32, kind: Kind) {
        self.blocks.write().insert(address, Block { bytes, device, kind, number: new_number() });
    }

    /// Removes a block that `wanted` accepts.
    pub(crate) fn remove_if(&self, address: u64, wanted: impl FnOnce(Kind) -> bool) -> Option<Block> {
        let mut blocks = self.blocks.write();
        let block = blocks.get(&address).copied().filter(|block| wanted(block.kind))?;
        blocks.remove(&address);
        Some(block)
    }

    /// Returns the bytes that were allocated in stream order on a device.
    pub(crate) fn ordered_bytes(&self, device: u32) -> u64 {
        let blocks = self.blocks.read();
        let ordered = blocks.values().filter(|block| block.device == device && block.kind == Kind::Ordered);
        ordered.map(|block| block.bytes).sum()
    }
}

impl Simulation {
    /// Returns the owner of an address, and how many contiguous bytes begin there.
    ///
    /// # Errors
    /// 1 for unallocated addresses of a device, and for memory to which no device has access.
    pub(crate) fn piece(&self, address: u64) -> Answer<(Place, u64)> {
        if address == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let address = self.on_host(address);
        if let Some((start, block)) = MEMORY.around(address) {
            let device = match block.kind {
                Kind::Mapped { access: 0 } => return Err(Code::INVALID_VALUE),
                Kind::Mapped { access } if access >> block.device & 1 == 0 => access.trailing_zeros(),
                _ => block.device,
            };
            return Ok((Place::Device(device), block.bytes - (address - start)));
        }
        if let Some((start, block)) = around(&MEMORY.hosts.read(), address, |block| block.bytes) {
            return Ok((Place::Pinned, block.bytes - (address - start)));
        }
        let is_own = |device: u32| {
            self.hooks.own_memory(device).is_ok_and(|(base, bytes)| address >= base && address - base < bytes)
        };
        if address >= BEYOND_HOST || (0..self.devices.len() as u32).any(is_own) {
            return Err(Code::INVALID_VALUE);
        }
        let next = MEMORY.hosts.read().range(address..).next().map(|(&start, _)| start);
        Ok((Place::Pageable, next.map_or(u64::MAX, |next| next - address)))
    }

    /// Returns whether a device can access a block: its own, memory that was mapped for it, and memory of its peers.
    pub(crate) fn reaches(&self, device: u32, block: &Block) -> bool {
        let peers = || self.state(device).map_or(0, |state| state.peers.load(Ordering::Acquire));
        match block.kind {
            Kind::Mapped { access } => access >> device & 1 == 1,
            _ => block.device == device || peers() >> block.device & 1 == 1,
        }
    }

    /// Returns the owner of a range.
    ///
    /// # Errors
    /// 1 if the range leaves the block or the registration in which it begins. Adjacent mapped blocks count as one.
    pub(crate) fn place(&self, address: u64, bytes: u64) -> Answer<Place> {
        let (place, mut reached) = self.piece(address)?;
        while reached < bytes {
            let next = address.checked_add(reached).ok_or(Code::INVALID_VALUE)?;
            let mapped = |at: u64| MEMORY.around(at).is_some_and(|(_, b)| matches!(b.kind, Kind::Mapped { .. }));
            if !mapped(next) || !mapped(next - 1) {
                return Err(Code::INVALID_VALUE);
            }
            reached += self.piece(next)?.1;
        }
        Ok(place)
    }
}

impl Simulation {
    /// Returns the host's address of memory that devices know at another address. Returns every other address unchanged.
    pub(crate) fn on_host(&self, address: u64) -> u64 {
        let host = address & !MOVED;
        if host != address && self.registered(host).is_some_and(|(_, block)| block.is_moved) { host } else { address }
    }

    /// Returns whether a device reaches page-locked memory by this address.
    pub(crate) fn is_of_devices(&self, address: u64) -> bool {
        address & MOVED != 0 || !self.registered(address).is_some_and(|(_, block)| block.is_moved)
    }

    /// Returns the page-locked memory that contains an address.
    pub(crate) fn registered(&self, address: u64) -> Option<(u64, HostBlock)> {
        let hosts = MEMORY.hosts.read();
        around(&hosts, address, |block| block.bytes).map(|(start, block)| (start, *block))
    }
}

/// Memory that a capture allocated for its graph. Dropping the last graph frees it.
#[derive(Debug)]
pub(crate) struct GraphMemory {
    device: u32,
    pub(crate) addresses: Mutex<Vec<u64>>,
}

impl GraphMemory {
    pub(crate) fn new(device: u32) -> Self {
        Self { device, addresses: Mutex::new(Vec::new()) }
    }
}

impl Drop for GraphMemory {
    fn drop(&mut self) {
        let addresses = std::mem::take(self.addresses.get_mut());
        // At exit and in a forked child the memory is not freed.
        let Ok(simulation) = simulation() else { return };
        if !addresses.is_empty() {
            simulation.hooks.wait_for_device(self.device);
        }
        for address in addresses {
            if MEMORY.remove_if(address, |kind| kind == Kind::Graph).is_some() {
                // SAFETY: the address came from `allocate`, was taken out of the table, and no launch is outstanding.
                let _ = unsafe { simulation.gpu.free(self.device, DevicePtr::new(address), None) };
            }
        }
    }
}
