//! Device memory: allocations, frees, and the attributes of pointers.

use highwater_hal::{AllocateOptions, Backend, DeviceMemoryKind, DevicePtr, StreamId, Transport};
use highwater_mock::simulated::Call;

use crate::blocks::{Block, Kind, MEMORY, around};
use crate::capture_state::{CAPTURES, node};
use crate::code::{Answer, Code};
use crate::current::{self, with_context};
use crate::devices;
use crate::handles::Stream;
use crate::pools;
use crate::process::{Simulation, simulation};
use crate::variants::{Vendor, vendor};
use crate::vmm;

impl Simulation {
    /// Frees the memory of a context that ends.
    pub(crate) fn end_memory(&self, device: u32) {
        let own =
            |block: &Block| block.device == device && matches!(block.kind, Kind::Plain | Kind::Managed | Kind::Ordered);
        let addresses: Vec<u64> =
            MEMORY.blocks.read().iter().filter(|(_, block)| own(block)).map(|(&start, _)| start).collect();
        for address in addresses {
            // Another thread that frees it in the meantime has freed it.
            let _ = self.free_block(address);
        }
    }

    /// Frees a block of a device, after the device's work. CUDA waits for no work before it frees memory of a pool.
    pub(crate) fn free_block(&self, address: u64) -> Answer<()> {
        let ours = |kind| matches!(kind, Kind::Plain | Kind::Managed | Kind::Ordered);
        let block = MEMORY.remove_if(address, ours).ok_or(Code::INVALID_VALUE)?;
        if block.kind == Kind::Ordered && vendor() == Vendor::Cuda {
            let helper = self.helper(block.device)?;
            // SAFETY: as below; the vendor lets the caller promise that no work uses the memory.
            unsafe { self.gpu.free(block.device, DevicePtr::new(address), Some(helper)) }
                .map_err(|error| self.code_of(error))?;
            return self.gpu.synchronize_stream(helper).map_err(|error| self.code_of(error));
        }
        self.hooks.wait_for_device(block.device);
        let stream = (block.kind == Kind::Ordered).then(|| self.legacy_stream(block.device));
        // SAFETY: the address came from `allocate`, was removed from the table, so no other call frees it, and the device has
        // executed what was enqueued.
        unsafe { self.gpu.free(block.device, DevicePtr::new(address), stream) }.map_err(|error| self.code_of(error))?;
        if stream.is_some() {
            self.hooks.wait_for_device(block.device);
        }
        Ok(())
    }
}

/// Makes the checks that `cuMemAlloc_v2` makes before it looks at its arguments.
///
/// # Errors
/// 201 without a context, 900 while a capture is open.
pub fn check_allocation() -> Answer<(&'static Simulation, u32)> {
    let (simulation, device) = with_context()?;
    simulation.check_unsafe_call()?;
    Ok((simulation, device))
}

/// `cuMemAlloc_v2`.
///
/// # Errors
/// 201 without a context, 900 while a capture is open, 1 for 0 bytes, 2 if memory is exhausted.
pub fn allocate(bytes: usize) -> Answer<u64> {
    let (simulation, device) = check_allocation()?;
    if bytes == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let capabilities = simulation.capabilities(device)?;
    let can_share = capabilities.shareable_memory && capabilities.ipc_transports.contains(Transport::Descriptor);
    let allocated = if can_share {
        simulation.hooks.allocate_pages(device, bytes)
    } else {
        simulation.gpu.allocate(device, &AllocateOptions::new(bytes))
    };
    let ptr = allocated.map_err(|error| simulation.code_of(error))?;
    MEMORY.insert(ptr.get(), bytes as u64, device, Kind::Plain);
    Ok(ptr.get())
}

/// `cuMemAllocManaged`, with the flag 1 for memory that every stream may use, or 2.
///
/// # Errors
/// As [`allocate`]; 1 for other flags.
pub fn allocate_managed(bytes: usize, flags: u32) -> Answer<u64> {
    let (simulation, device) = with_context()?;
    simulation.check_unsafe_call()?;
    if bytes == 0 || !matches!(flags, 1 | 2) {
        return Err(Code::INVALID_VALUE);
    }
    let ptr =
        simulation.gpu.allocate(device, &AllocateOptions::new(bytes)).map_err(|error| simulation.code_of(error))?;
    MEMORY.insert(ptr.get(), bytes as u64, device, Kind::Managed);
    Ok(ptr.get())
}

/// `cuMemFree_v2`. Waits until the device has executed the queued work of every stream, except for memory of a pool (CUDA).
///
/// # Errors
/// 900 while a capture is open, 1 for an address at which no allocation starts, the code of a lost context.
pub fn free(address: u64) -> Answer<()> {
    let simulation = simulation()?;
    simulation.check_unsafe_call()?;
    if address == 0 {
        return Ok(());
    }
    if let Some((_, block)) = MEMORY.around(address) {
        simulation.check_context(block.device)?;
    }
    simulation.free_block(address)
}

/// `cuMemAllocAsync`, from the default pool of the stream's device. Returns null for 0 bytes.
///
/// # Errors
/// 2 if memory is exhausted, 801 if the device has no pools, 901 in an invalidated capture. CUDA: 900 while a capture of other
/// streams is open.
pub fn allocate_ordered(bytes: usize, raw_stream: u64) -> Answer<u64> {
    let simulation = simulation()?;
    let stream = simulation.stream(raw_stream)?;
    simulation.before_enqueue(&stream)?;
    simulation.check_ordered(&stream)?;
    if bytes == 0 {
        return Ok(0);
    }
    if let Some(part) = CAPTURES.of(stream.id) {
        let capture = &part.capture;
        let ptr = simulation.gpu.allocate(stream.device, &AllocateOptions::new(bytes));
        let address = ptr.map_err(|error| simulation.code_of(error))?.get();
        MEMORY.insert(address, bytes as u64, stream.device, Kind::Graph);
        capture.memory.addresses.lock().push(address);
        simulation.note_nodes(&stream, node::ALLOCATE, 1);
        return Ok(address);
    }
    let options = AllocateOptions::new(bytes).with_kind(DeviceMemoryKind::StreamOrdered(stream.id));
    let ptr = simulation.gpu.allocate(stream.device, &options).map_err(|error| simulation.code_of(error))?;
    MEMORY.insert(ptr.get(), bytes as u64, stream.device, Kind::Ordered);
    pools::note_use(stream.device);
    Ok(ptr.get())
}

/// `cuMemFreeAsync`, also for memory of `cuMemAlloc`.
///
/// # Errors
/// 1 for an address at which no allocation starts, and in a capture for memory that was not allocated in it; 901 in an
/// invalidated capture. CUDA: 900 as [`allocate_ordered`]; null and a stream of another device are accepted. HIP: 1 for those.
pub fn free_ordered(address: u64, raw_stream: u64) -> Answer<()> {
    let simulation = simulation()?;
    let stream = simulation.stream(raw_stream)?;
    simulation.before_enqueue(&stream)?;
    simulation.check_ordered(&stream)?;
    let is_cuda = vendor() == Vendor::Cuda;
    if address == 0 && is_cuda {
        return Ok(());
    }
    if let Some(part) = CAPTURES.of(stream.id) {
        let capture = &part.capture;
        if !capture.memory.addresses.lock().contains(&address) {
            return Err(Code::INVALID_VALUE);
        }
        // The memory itself lives as long as the graph.
        simulation.note_nodes(&stream, node::FREE, 1);
        return Ok(());
    }
    let found = MEMORY.around(address);
    let found = found.filter(|&(start, block)| start == address && matches!(block.kind, Kind::Ordered | Kind::Plain));
    let (_, block) = found.ok_or(Code::INVALID_VALUE)?;
    let is_far = block.device != stream.device;
    if is_far && !is_cuda {
        return Err(Code::INVALID_VALUE);
    }
    MEMORY.remove_if(address, |kind| kind == block.kind).ok_or(Code::INVALID_VALUE)?;
    if block.kind == Kind::Plain {
        // The mock frees such memory at once, so the free runs in the order of the stream.
        let free = Call::new(move || {
            // SAFETY: as below; the work before this point of the stream is done.
            let _ = unsafe { simulation.gpu.free(block.device, DevicePtr::new(address), None) };
        });
        return simulation.hooks.enqueue_call(stream.id, free).map_err(|error| simulation.code_of(error));
    }
    let free = |on: StreamId| {
        // SAFETY: the address came from `allocate`, and was removed from the table, so no other call frees it; that it is not
        // used after this point of the stream is the promise of every user of the vendor's function.
        unsafe { simulation.gpu.free(block.device, DevicePtr::new(address), Some(on)) }
            .map_err(|error| simulation.code_of(error))
    };
    if is_far { simulation.on_helper(block.device, stream.id, free) } else { free(stream.id) }
}

impl Simulation {
    /// Checks a call about stream-ordered memory, which CUDA forbids beside a capture of other streams.
    fn check_ordered(&self, stream: &Stream) -> Answer<()> {
        if vendor() == Vendor::Cuda && CAPTURES.of(stream.id).is_none() { self.check_unsafe_call() } else { Ok(()) }
    }
}

/// `cuMemGetInfo_v2`: the free bytes and all bytes.
///
/// # Errors
/// 201 without a context.
pub fn info() -> Answer<(u64, u64)> {
    let (simulation, device) = with_context()?;
    let info = simulation.gpu.memory_info(device).map_err(|error| simulation.code_of(error))?;
    Ok((info.free, info.total))
}

/// `cuMemGetAddressRange_v2`: the start and the length of the allocation that contains an address.
///
/// # Errors
/// 201 without a context, 500 if no allocation contains the address. CUDA: 500 also for memory that the current context's device
/// cannot access.
pub fn address_range(address: u64) -> Answer<(u64, u64)> {
    let (simulation, device) = with_context()?;
    if let Some((start, block)) = MEMORY.around(address) {
        if vendor() == Vendor::Cuda && !simulation.reaches(device, &block) {
            return Err(Code::NOT_FOUND);
        }
        return Ok((start, block.bytes));
    }
    let hosts = MEMORY.hosts.read();
    let found = around(&hosts, address, |block| block.bytes).map(|(start, block)| (start, block.bytes));
    found.ok_or(Code::NOT_FOUND)
}

/// `cuPointerGetAttribute`.
///
/// # Errors
/// 1 for an attribute that is unknown or that such memory does not have, and for memory that the driver does not know.
pub fn pointer_attribute(attribute: u32, address: u64) -> Answer<pools::Attribute> {
    use pools::Attribute::{Narrow, Wide};
    const HOST: u32 = 1;
    const DEVICE: u32 = 2;
    simulation()?;
    if let Some((start, block)) = MEMORY.around(address) {
        let is_virtual = matches!(block.kind, Kind::Mapped { .. });
        return Ok(match attribute {
            1 => Wide(if is_virtual { 0 } else { current::handle_of(block.device) }),
            2 => Narrow(DEVICE),
            3 => Wide(address),
            6 => Narrow(0),
            7 => Wide(block.number),
            8 => Narrow(u32::from(block.kind == Kind::Managed)),
            9 => Narrow(devices::ordinal(block.device)? as u32),
            10 => Narrow(u32::from(block.kind == Kind::Plain)),
            11 => Wide(start),
            12 => Wide(block.bytes),
            13 => Narrow(1),
            14 => Wide(vmm::handle_types(start)),
            15 => Narrow(1),
            16 => Narrow(3),
            17 => Wide(if block.kind == Kind::Ordered { pools::handle_of(block.device) } else { 0 }),
            _ => return Err(Code::INVALID_VALUE),
        });
    }
    let hosts = MEMORY.hosts.read();
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
