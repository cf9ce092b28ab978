//! Device memory: what is allocated or mapped where, and whose an address is.
//!
//! All addresses are of one space, as with the vendor: an address says whether it is a device's, of page-locked host
//! memory, or of ordinary (pageable) host memory. The device's own memory is mapped into the process, so an address in
//! it that nobody has allocated would pass for ordinary memory; it is told apart by where it lies.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use highwater_hal::{AllocateOptions, Backend, DeviceMemoryKind, DevicePtr, Transport};
use highwater_mock::simulated::Call;
use parking_lot::{Mutex, RwLock};

use crate::captures::node;
use crate::code::{Answer, Code};
use crate::current;
use crate::devices;
use crate::host::HostBlock;
use crate::process::{Simulation, simulation, with_context};
use crate::vmm::Virtual;

/// Addresses from here on are never the host's.
const BEYOND_HOST: u64 = 1 << 48;

/// How a block came to be, and so how it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `cuMemAlloc`.
    Plain,
    /// `cuMemAllocAsync`.
    Ordered,
    /// `cuMemAllocAsync` in a capture.
    Graph,
    /// `cuIpcOpenMemHandle`, so often.
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
    /// No other block of the process has it.
    pub(crate) number: u64,
}

/// What there is.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub(crate) blocks: RwLock<BTreeMap<u64, Block>>,
    pub(crate) hosts: RwLock<BTreeMap<u64, HostBlock>>,
    /// First address and bytes of what was registered over a part of other registrations (HIP).
    pub(crate) overlaps: Mutex<BTreeMap<u64, u64>>,
    pub(crate) virtuals: Mutex<Virtual>,
}

/// Whose an address is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// A device's that can reach it.
    Device(u32),
    /// Page-locked memory.
    Pinned,
    /// Other memory of the host.
    Pageable,
}

/// A number that no block had before.
pub(crate) fn new_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    // Relaxed: only the number counts.
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// What lies at or before an address, if the address is inside of it.
pub(crate) fn around<B>(blocks: &BTreeMap<u64, B>, address: u64, bytes: impl Fn(&B) -> u64) -> Option<(u64, &B)> {
    let (&start, block) = blocks.range(..=address).next_back()?;
    (address - start < bytes(block)).then_some((start, block))
}

impl Memory {
    /// The block that an address lies in.
    pub(crate) fn around(&self, address: u64) -> Option<(u64, Block)> {
        around(&self.blocks.read(), address, |block| block.bytes).map(|(start, block)| (start, *block))
    }

    pub(crate) fn insert(&self, address: u64, bytes: u64, device: u32, kind: Kind) {
        self.blocks.write().insert(address, Block { bytes, device, kind, number: new_number() });
    }

    /// Takes a block out of the table where `wanted` holds of it.
    pub(crate) fn remove_if(&self, address: u64, wanted: impl FnOnce(Kind) -> bool) -> Option<Block> {
        let mut blocks = self.blocks.write();
        let block = blocks.get(&address).copied().filter(|block| wanted(block.kind))?;
        blocks.remove(&address);
        Some(block)
    }

    /// Bytes that were allocated in stream order on a device.
    pub(crate) fn ordered_bytes(&self, device: u32) -> u64 {
        let blocks = self.blocks.read();
        let ordered = blocks.values().filter(|block| block.device == device && block.kind == Kind::Ordered);
        ordered.map(|block| block.bytes).sum()
    }
}

impl Simulation {
    /// Whose an address is, and how many bytes from there on lie in one piece.
    ///
    /// # Errors
    /// 1 for addresses of a device at which nothing lies, or nothing that a device has access to.
    pub(crate) fn piece(&self, address: u64) -> Answer<(Place, u64)> {
        if address == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let address = self.on_host(address);
        if let Some((start, block)) = self.memory.around(address) {
            let device = match block.kind {
                Kind::Mapped { access: 0 } => return Err(Code::INVALID_VALUE),
                Kind::Mapped { access } if access >> block.device & 1 == 0 => access.trailing_zeros(),
                _ => block.device,
            };
            return Ok((Place::Device(device), block.bytes - (address - start)));
        }
        if let Some((start, block)) = around(&self.memory.hosts.read(), address, |block| block.bytes) {
            return Ok((Place::Pinned, block.bytes - (address - start)));
        }
        let is_own = |device: u32| {
            self.hooks.own_memory(device).is_ok_and(|(base, bytes)| address >= base && address - base < bytes)
        };
        if address >= BEYOND_HOST || (0..self.devices.len() as u32).any(is_own) {
            return Err(Code::INVALID_VALUE);
        }
        let next = self.memory.hosts.read().range(address..).next().map(|(&start, _)| start);
        Ok((Place::Pageable, next.map_or(u64::MAX, |next| next - address)))
    }

    /// Whose a range is.
    ///
    /// # Errors
    /// 1 where it leaves the block or the registration that it begins in; mapped blocks that touch are one.
    pub(crate) fn place(&self, address: u64, bytes: u64) -> Answer<Place> {
        let (place, mut reached) = self.piece(address)?;
        while reached < bytes {
            let next = address.checked_add(reached).ok_or(Code::INVALID_VALUE)?;
            let mapped = |at: u64| self.memory.around(at).is_some_and(|(_, b)| matches!(b.kind, Kind::Mapped { .. }));
            if !mapped(next) || !mapped(next - 1) {
                return Err(Code::INVALID_VALUE);
            }
            reached += self.piece(next)?.1;
        }
        Ok(place)
    }

    /// Frees what belongs to a context that ends.
    pub(crate) fn end_memory(&self, device: u32) {
        let own = |block: &Block| block.device == device && matches!(block.kind, Kind::Plain | Kind::Ordered);
        let addresses: Vec<u64> =
            self.memory.blocks.read().iter().filter(|(_, block)| own(block)).map(|(&start, _)| start).collect();
        for address in addresses {
            // Who frees it meanwhile has freed it.
            let _ = self.free_block(address);
        }
    }

    /// Frees a block of a device at once; the device's work is waited for before.
    pub(crate) fn free_block(&self, address: u64) -> Answer<()> {
        let ours = |kind| matches!(kind, Kind::Plain | Kind::Ordered);
        let block = self.memory.remove_if(address, ours).ok_or(Code::INVALID_VALUE)?;
        self.hooks.wait_for_device(block.device);
        let stream = (block.kind == Kind::Ordered).then(|| self.legacy_stream(block.device));
        // SAFETY: the address came from `allocate`, was taken out of the table, so nobody else frees it, and the device has
        // executed what was enqueued.
        unsafe { self.gpu.free(block.device, DevicePtr::new(address), stream) }.map_err(|error| self.code_of(error))?;
        if stream.is_some() {
            self.hooks.wait_for_device(block.device);
        }
        Ok(())
    }
}

/// `cuMemAlloc_v2`.
///
/// # Errors
/// 201 without a context, 900 while something is captured, 1 for no bytes, 2 when there is no room.
pub fn allocate(bytes: usize) -> Answer<u64> {
    let (simulation, device) = with_context()?;
    simulation.check_unsafe_call()?;
    if bytes == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let capabilities = simulation.capabilities(device)?;
    let mut options = AllocateOptions::new(bytes);
    if capabilities.shareable_memory && capabilities.ipc_transports.contains(Transport::Descriptor) {
        // Pages of its own, so that it can be mapped by other processes.
        options = options.with_kind(DeviceMemoryKind::Shareable(Transport::Descriptor));
    }
    let ptr = simulation.gpu.allocate(device, &options).map_err(|error| simulation.code_of(error))?;
    simulation.memory.insert(ptr.get(), bytes as u64, device, Kind::Plain);
    Ok(ptr.get())
}

/// `cuMemFree_v2`. Waits until the device has executed what was enqueued on any stream.
///
/// # Errors
/// 900 while something is captured, 1 for what is no address of an allocation, the code of a lost context.
pub fn free(address: u64) -> Answer<()> {
    let simulation = simulation()?;
    simulation.check_unsafe_call()?;
    if address == 0 {
        return Ok(());
    }
    if let Some((_, block)) = simulation.memory.around(address) {
        simulation.check_context(block.device)?;
    }
    simulation.free_block(address)
}

/// `cuMemAllocAsync`, from the default pool of the stream's device; of no bytes, it gives null.
///
/// # Errors
/// 2 when there is no room, 801 where the device has no pools, 901 in a lost capture.
pub fn allocate_ordered(bytes: usize, raw_stream: u64) -> Answer<u64> {
    let simulation = simulation()?;
    let stream = simulation.stream(raw_stream)?;
    simulation.before_enqueue(&stream)?;
    if bytes == 0 {
        return Ok(0);
    }
    if let Some(capture) = simulation.captures.of(stream.id) {
        let ptr = simulation.gpu.allocate(stream.device, &AllocateOptions::new(bytes));
        let address = ptr.map_err(|error| simulation.code_of(error))?.get();
        simulation.memory.insert(address, bytes as u64, stream.device, Kind::Graph);
        capture.memory.addresses.lock().push(address);
        simulation.note_nodes(&stream, node::ALLOCATE, 1);
        return Ok(address);
    }
    let options = AllocateOptions::new(bytes).with_kind(DeviceMemoryKind::StreamOrdered(stream.id));
    let ptr = simulation.gpu.allocate(stream.device, &options).map_err(|error| simulation.code_of(error))?;
    simulation.memory.insert(ptr.get(), bytes as u64, stream.device, Kind::Ordered);
    simulation.note_use(stream.device);
    Ok(ptr.get())
}

/// `cuMemFreeAsync`, also of memory of `cuMemAlloc`.
///
/// # Errors
/// 1 for what is no address of an allocation, and in a capture for what was not allocated in it; 901 in a lost capture.
pub fn free_ordered(address: u64, raw_stream: u64) -> Answer<()> {
    let simulation = simulation()?;
    let stream = simulation.stream(raw_stream)?;
    simulation.before_enqueue(&stream)?;
    if let Some(capture) = simulation.captures.of(stream.id) {
        if !capture.memory.addresses.lock().contains(&address) {
            return Err(Code::INVALID_VALUE);
        }
        // The memory itself stays as long as the graph does.
        simulation.note_nodes(&stream, node::FREE, 1);
        return Ok(());
    }
    let found = simulation.memory.around(address);
    let found = found.filter(|&(start, block)| start == address && matches!(block.kind, Kind::Ordered | Kind::Plain));
    let (_, block) = found.ok_or(Code::INVALID_VALUE)?;
    if block.device != stream.device {
        return Err(Code::INVALID_VALUE);
    }
    simulation.memory.remove_if(address, |kind| kind == block.kind).ok_or(Code::INVALID_VALUE)?;
    if block.kind == Kind::Plain {
        // The mock frees such memory at once, so that is done when its turn in the stream comes.
        let free = Call::new(move || {
            // SAFETY: as below; the work before this point of the stream is done.
            let _ = unsafe { simulation.gpu.free(block.device, DevicePtr::new(address), None) };
        });
        return simulation.hooks.enqueue_call(stream.id, free).map_err(|error| simulation.code_of(error));
    }
    // SAFETY: the address came from `allocate`, and was taken out of the table, so nobody else frees it; that it is not
    // used after this point of the stream is the promise of every user of the vendor's function.
    unsafe { simulation.gpu.free(stream.device, DevicePtr::new(address), Some(stream.id)) }
        .map_err(|error| simulation.code_of(error))
}

/// Memory that captures allocated for their graph; freed with the last graph.
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
        // At exit and in a forked child it is left alone.
        let Ok(simulation) = simulation() else { return };
        if !addresses.is_empty() {
            simulation.hooks.wait_for_device(self.device);
        }
        for address in addresses {
            if simulation.memory.remove_if(address, |kind| kind == Kind::Graph).is_some() {
                // SAFETY: the address came from `allocate`, was taken out of the table, and no launch is outstanding.
                let _ = unsafe { simulation.gpu.free(self.device, DevicePtr::new(address), None) };
            }
        }
    }
}

/// `cuMemGetInfo_v2`: bytes that are free, and all.
///
/// # Errors
/// 201 without a context.
pub fn info() -> Answer<(u64, u64)> {
    let (simulation, device) = with_context()?;
    let info = simulation.gpu.memory_info(device).map_err(|error| simulation.code_of(error))?;
    Ok((info.free, info.total))
}

/// `cuMemGetAddressRange_v2`: where the allocation that an address lies in begins, and its length.
///
/// # Errors
/// 201 without a context, 500 when it lies in none.
pub fn address_range(address: u64) -> Answer<(u64, u64)> {
    let (simulation, _) = with_context()?;
    if let Some((start, block)) = simulation.memory.around(address) {
        return Ok((start, block.bytes));
    }
    let hosts = simulation.memory.hosts.read();
    let found = around(&hosts, address, |block| block.bytes).map(|(start, block)| (start, block.bytes));
    found.ok_or(Code::NOT_FOUND)
}

/// The value of a pointer's attribute, as wide as C has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attribute {
    /// A number or a flag of 32 bits.
    Narrow(u32),
    /// An address, a size or a mask of 64 bits.
    Wide(u64),
}

/// `cuPointerGetAttribute`.
///
/// # Errors
/// 1 for an attribute that is unknown or that such memory does not have, and for memory that the driver does not know.
pub fn pointer_attribute(attribute: u32, address: u64) -> Answer<Attribute> {
    use Attribute::{Narrow, Wide};
    const HOST: u32 = 1;
    const DEVICE: u32 = 2;
    let simulation = simulation()?;
    if let Some((start, block)) = simulation.memory.around(address) {
        let is_virtual = matches!(block.kind, Kind::Mapped { .. });
        return Ok(match attribute {
            1 => Wide(if is_virtual { 0 } else { current::handle_of(block.device) }),
            2 => Narrow(DEVICE),
            3 => Wide(address),
            6 => Narrow(0),
            7 => Wide(block.number),
            8 => Narrow(0),
            9 => Narrow(devices::ordinal(block.device)? as u32),
            10 => Narrow(u32::from(block.kind == Kind::Plain)),
            11 => Wide(start),
            12 => Wide(block.bytes),
            13 => Narrow(1),
            14 => Wide(u64::from(is_virtual)),
            15 => Narrow(1),
            16 => Narrow(3),
            17 => Wide(if block.kind == Kind::Ordered { pool_of(block.device) } else { 0 }),
            _ => return Err(Code::INVALID_VALUE),
        });
    }
    let hosts = simulation.memory.hosts.read();
    let (start, block) = around(&hosts, address, |block| block.bytes).ok_or(Code::INVALID_VALUE)?;
    Ok(match attribute {
        1 => Wide(current::handle_of(block.device)),
        2 => Narrow(HOST),
        3 | 4 => Wide(address),
        6 => Narrow(0),
        7 => Wide(block.number),
        8 => Narrow(0),
        9 => Narrow(devices::ordinal(block.device)? as u32),
        10 => Narrow(0),
        11 => Wide(start),
        12 => Wide(block.bytes),
        13 => Narrow(1),
        14 => Wide(0),
        16 => Narrow(3),
        17 => Wide(0),
        _ => return Err(Code::INVALID_VALUE),
    })
}

const POOLS: u64 = 0x00d0_0000_0000;
const POOL_STEP: u64 = 0x1000;

/// The settings and high-water marks of a device's default pool. The pool tells as reserved what its threshold lets it
/// keep; the memory itself goes back to the device at once, so nobody runs out of it for that.
#[derive(Debug)]
pub(crate) struct Pool {
    reuse: [AtomicI32; 3],
    threshold: AtomicU64,
    /// At most what is reserved: the threshold bounds it when it is asked for.
    reserved: AtomicU64,
    highest_reserved: AtomicU64,
    highest: AtomicU64,
}

impl Default for Pool {
    fn default() -> Self {
        let reuse = [AtomicI32::new(1), AtomicI32::new(1), AtomicI32::new(1)];
        let [threshold, reserved, highest_reserved, highest] = [const { AtomicU64::new(0) }; 4];
        Self { reuse, threshold, reserved, highest_reserved, highest }
    }
}

impl Pool {
    /// Bytes that are used or kept, when so many are used.
    fn reserved(&self, used: u64) -> u64 {
        let kept = self.reserved.load(Ordering::Relaxed).min(self.threshold.load(Ordering::Relaxed)).max(used);
        self.reserved.store(kept, Ordering::Relaxed);
        kept
    }
}

fn pool_of(device: u32) -> u64 {
    POOLS + u64::from(device) * POOL_STEP
}

impl Simulation {
    fn pool(&self, raw: u64) -> Answer<(u32, &Pool)> {
        let device = raw.checked_sub(POOLS).filter(|offset| offset.is_multiple_of(POOL_STEP));
        let device = device.and_then(|offset| u32::try_from(offset / POOL_STEP).ok()).ok_or(Code::INVALID_VALUE)?;
        Ok((device, &self.state(device).map_err(|_| Code::INVALID_VALUE)?.pool))
    }

    fn note_use(&self, device: u32) {
        if let Ok(state) = self.state(device) {
            let used = self.memory.ordered_bytes(device);
            state.pool.highest.fetch_max(used, Ordering::Relaxed);
            let reserved = state.pool.reserved(used);
            state.pool.highest_reserved.fetch_max(reserved, Ordering::Relaxed);
        }
    }
}

/// `cuDeviceGetDefaultMemPool`.
///
/// # Errors
/// 101 when there is no such device, 801 where it has no pools.
pub fn default_pool(device: u32) -> Answer<u64> {
    let simulation = simulation()?;
    simulation.check_device(device)?;
    if !simulation.capabilities(device)?.stream_ordered_memory {
        return Err(Code::NOT_SUPPORTED);
    }
    Ok(pool_of(device))
}

/// `cuMemPoolGetAttribute`.
///
/// # Errors
/// 1 for what is no pool and for an unknown attribute.
pub fn pool_attribute(raw: u64, attribute: u32) -> Answer<Attribute> {
    let simulation = simulation()?;
    let (device, pool) = simulation.pool(raw)?;
    Ok(match attribute {
        1..=3 => Attribute::Narrow(pool.reuse[attribute as usize - 1].load(Ordering::Relaxed) as u32),
        4 => Attribute::Wide(pool.threshold.load(Ordering::Relaxed)),
        5 => Attribute::Wide(pool.reserved(simulation.memory.ordered_bytes(device))),
        6 => Attribute::Wide(pool.highest_reserved.load(Ordering::Relaxed)),
        7 => Attribute::Wide(simulation.memory.ordered_bytes(device)),
        8 => Attribute::Wide(pool.highest.load(Ordering::Relaxed)),
        _ => return Err(Code::INVALID_VALUE),
    })
}

/// Whether `cuMemPoolSetAttribute` reads 64 bits for this attribute, or 32.
///
/// # Errors
/// 1 for one that cannot be set.
pub fn pool_attribute_is_wide(attribute: u32) -> Answer<bool> {
    match attribute {
        1..=3 => Ok(false),
        4 | 6 | 8 => Ok(true),
        _ => Err(Code::INVALID_VALUE),
    }
}

/// `cuMemPoolSetAttribute`.
///
/// # Errors
/// 1 for what is no pool, for an attribute that cannot be set, and for a high-water mark that is not reset to 0.
pub fn set_pool_attribute(raw: u64, attribute: u32, value: Attribute) -> Answer<()> {
    let simulation = simulation()?;
    let (device, pool) = simulation.pool(raw)?;
    match (attribute, value) {
        (1..=3, Attribute::Narrow(value)) => pool.reuse[attribute as usize - 1].store(value as i32, Ordering::Relaxed),
        (4, Attribute::Wide(value)) => {
            // What the old threshold did not keep is gone.
            pool.reserved(simulation.memory.ordered_bytes(device));
            pool.threshold.store(value, Ordering::Relaxed);
        }
        (6, Attribute::Wide(0)) => {
            let reserved = pool.reserved(simulation.memory.ordered_bytes(device));
            pool.highest_reserved.store(reserved, Ordering::Relaxed);
        }
        (8, Attribute::Wide(0)) => {
            pool.highest.store(simulation.memory.ordered_bytes(device), Ordering::Relaxed);
        }
        _ => return Err(Code::INVALID_VALUE),
    }
    Ok(())
}

/// `cuMemPoolTrimTo`: keeps so many bytes at most.
///
/// # Errors
/// 1 for what is no pool.
pub fn trim_pool(raw: u64, keep: usize) -> Answer<()> {
    let simulation = simulation()?;
    let (_, pool) = simulation.pool(raw)?;
    pool.reserved.fetch_min(keep as u64, Ordering::Relaxed);
    Ok(())
}

/// `cuMemPoolSetAccess` for one device. Copies reach the memory of every device in any case.
///
/// # Errors
/// 1 for what is no pool or no device, and for taking the pool's own device its access; 217 where devices cannot reach
/// each other.
pub fn set_pool_access(raw: u64, device: i32, flags: u32) -> Answer<()> {
    let simulation = simulation()?;
    let (own, _) = simulation.pool(raw)?;
    let device = devices::get(device).map_err(|_| Code::INVALID_VALUE)?;
    match flags {
        3 if device == own || simulation.capabilities(own)?.peer_copy => Ok(()),
        3 => Err(Code::PEER_ACCESS_UNSUPPORTED),
        0 if device != own => Ok(()),
        _ => Err(Code::INVALID_VALUE),
    }
}
